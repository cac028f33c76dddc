"""Drivers against what speaks their provider's protocol: moto's EC2 server over HTTP, libcloud's dummy, programs."""

from __future__ import annotations

import base64
import http.client
import importlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import pytest
from click.testing import CliRunner

from policy.pool_nodes import PoolPolicy, PoolsPolicy, ShapePolicy
from sluice.base.errors import SluiceError
from sluice.cli.pool import command as pool_command
from sluice.exchange.fleet import FleetStatus, closed_words, render_status, waiting_words
from sluice.fleet.daemon import Providers, Settings
from sluice.fleet.driver import DriverSite, Order, ProviderError, load_driver
from sluice.fleet.drivers.ec2_events import AT_RISK, TAKEN_BACK, Events
from sluice.fleet.journal import Journal
from sluice.fleet.keeper import Keeper
from sluice.fleet.views import LaunchAct, ListAct, SlurmNode, SlurmView, TerminateAct, Want

TOKEN, OTHER = "a" * 32, "b" * 32
SECRET = "do-not-show-this-secret"


def order(token: str = TOKEN, node: str = "p5-1", shape: str = "p5.48xlarge", zone: str = "us-east-1a") -> Order:
    return Order(token, node, shape, zone)


# ---- ec2 ----


class Proxy(ThreadingHTTPServer):
    """Before moto: lets requests through, or answers RunInstances as EC2 does when something is wrong."""

    daemon_threads = True

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.errors: dict[str, tuple[int, str]] = {}  # by instance type, or zone
        self.lost_answers = 0
        self.notices: dict[str, str] | None = {}  # status of spot requests by instance; None: they may not be read
        self.seen: list[dict[str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        words = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        self.server.seen.append(words)
        if words["Action"] == "RunInstances":
            for key in (words["InstanceType"], words.get("Placement.AvailabilityZone", "")):
                if key in self.server.errors:
                    status, code = self.server.errors[key]
                    text = (
                        f"<Response><Errors><Error><Code>{code}</Code><Message>no</Message></Error></Errors></Response>"
                    )
                    self._send(status, text.encode())
                    return
        if words["Action"] == "DescribeSpotInstanceRequests":
            self._spot(words)
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        connection.request("POST", self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        if words["Action"] == "RunInstances" and self.server.lost_answers:
            self.server.lost_answers -= 1
            self.close_connection = True
            return
        self._send(answer.status, data)

    def _spot(self, words: dict[str, str]) -> None:
        """As EC2 does; moto's machines have no spot requests."""
        asked = {value for key, value in words.items() if key.startswith("Filter.1.Value")}
        items = "".join(
            f"<item><instanceId>{one}</instanceId><status><code>{code}</code></status></item>"
            for one, code in (self.server.notices or {}).items()
            if words["Filter.1.Name"] == "status-code" and code in asked
        )
        text = f"<Response><spotInstanceRequestSet>{items}</spotInstanceRequestSet></Response>"
        if self.server.notices is None:
            text = "<Response><Errors><Error><Code>UnauthorizedOperation</Code></Error></Errors></Response>"
        self._send(200 if self.server.notices is not None else 403, text.encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    server = pytest.importorskip("moto.server", reason="needs moto (pip install -e '.[dev]')")
    moto = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    port = moto.get_host_and_port()[1]
    boto3 = pytest.importorskip("boto3")
    patient = importlib.import_module("botocore.config").Config(read_timeout=300)  # it loads EC2 at the first request
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    first = boto3.client(
        "ec2", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{port}", config=patient, **keys
    )
    first.run_instances(ImageId="ami-12c6146b", InstanceType="p5.48xlarge", MinCount=1, MaxCount=1)
    yield port
    moto.stop()


@pytest.fixture
def proxy(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    proxy = Proxy(moto_port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield proxy
    proxy.shutdown()
    proxy.server_close()


def ec2(proxy: Proxy, pool: str = "p5", **settings: Any) -> Any:
    endpoint = f"http://127.0.0.1:{proxy.server_port}"
    return load_driver(
        "ec2",
        DriverSite("main", pool, {"region": "us-east-1", "image": "ami-12c6146b", "endpoint": endpoint, **settings}),
    )


def test_ec2_launches_once_for_a_token_also_when_the_answer_is_lost(proxy: Proxy) -> None:
    driver = ec2(proxy, pool="once")
    proxy.lost_answers = 1
    with pytest.raises(ProviderError) as error:
        driver.launch(order())
    assert error.value.kind == "unknown"
    machine = driver.launch(order())
    assert driver.launch(order()).id == machine.id
    assert (machine.token, machine.node, machine.zone) == (TOKEN, "p5-1", "us-east-1a") and machine.address
    assert [one.id for one in driver.machines()] == [machine.id]
    run = next(one for one in proxy.seen if one["Action"] == "RunInstances")
    assert run["ClientToken"] == TOKEN and run["MaxCount"] == "1"
    driver.terminate(machine.id)
    driver.terminate(machine.id)
    driver.terminate("i-0123456789abcdef0")
    assert all(one.ending for one in driver.machines())


def test_ec2_sees_only_its_own_pool(proxy: Proxy) -> None:
    machine = ec2(proxy, pool="mine").launch(order(OTHER))
    assert [one.id for one in ec2(proxy, pool="mine").machines()] == [machine.id]
    assert ec2(proxy, pool="theirs").machines() == []


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "InsufficientInstanceCapacity", "no_capacity"),
        (400, "Unsupported", "no_capacity"),
        (400, "VcpuLimitExceeded", "quota"),
        (503, "RequestLimitExceeded", "throttled"),
        (401, "AuthFailure", "credentials"),
        (400, "ExpiredToken", "credentials"),
        (400, "InvalidParameterValue", "refused"),
        (400, "IdempotentParameterMismatch", "refused"),
        (500, "InternalError", "unknown"),
        (503, "Unavailable", "unknown"),
    ],
)
def test_what_ec2_says_has_a_kind(proxy: Proxy, status: int, code: str, kind: str) -> None:
    proxy.errors = {"p5.48xlarge": (status, code)}
    with pytest.raises(ProviderError, match=code) as error:
        ec2(proxy).launch(order("c" * 32))
    assert error.value.kind == kind


def test_ec2_without_capacity_in_a_zone_has_it_in_another(proxy: Proxy) -> None:
    proxy.errors = {"us-east-1a": (500, "InsufficientInstanceCapacity")}
    driver = ec2(proxy, pool="zones")
    with pytest.raises(ProviderError):
        driver.launch(order("d" * 32))
    assert driver.launch(order("e" * 32, zone="us-east-1b")).zone == "us-east-1b"


def test_stock_outs_of_ec2_are_shown_by_zone_and_shape_until_there_are_machines_again(
    proxy: Proxy, tmp_path: Path
) -> None:
    """By fleetd's own parts, from EC2's answer to what people read."""
    settings = {"region": "us-east-1", "image": "ami-12c6146b", "endpoint": f"http://127.0.0.1:{proxy.server_port}"}
    shapes = tuple(ShapePolicy(name=name) for name in ("p5.48xlarge", "p4d.24xlarge"))
    pool = PoolPolicy(
        driver="ec2", settings=settings, nodes="p5-[1-2]", shapes=shapes, zones=("us-east-1a", "us-east-1b"),
        partition="p5", back_off_s=60,
    )  # fmt: skip
    providers = Providers(Settings(tmp_path, tmp_path, tmp_path, tmp_path), lambda _: None, time.time)
    providers.set_pools("stock", {"p5": pool})
    keeper = Keeper(Journal(tmp_path / "journal.json"))
    keeper.set_policy(PoolsPolicy(cluster="stock", pools={"p5": pool}))

    def rounds(now: float, want: Want = "up") -> FleetStatus:
        for at in range(8):
            keeper.see(SlurmView(now + at, {"p5-1": SlurmNode(want), "p5-2": SlurmNode("off")}))
            for act in keeper.step(now + at):
                if isinstance(act, LaunchAct | ListAct | TerminateAct):
                    keeper.take(providers._answer(act, now + at), now + at)
        return keeper.status()

    stock_out = (500, "InsufficientInstanceCapacity")
    proxy.errors = {"us-east-1a": stock_out, "p4d.24xlarge": (400, "VcpuLimitExceeded"), "us-east-1b": stock_out}
    rounds(900.0, "off")  # without a journal, a node that is wanted at first may have a machine
    status = rounds(1000.0)
    short = {(one.shape, one.zone): (one.difference, one.text) for one in status.pools["p5"].shortages}
    assert list(short) == [(shape.name, zone) for shape in shapes for zone in pool.zones]
    assert {key: kind for key, (kind, _) in short.items() if key[0] == "p5.48xlarge"} == {
        ("p5.48xlarge", zone): "no_capacity" for zone in pool.zones
    }
    assert short["p4d.24xlarge", "us-east-1a"] == ("quota", "EC2: VcpuLimitExceeded: no")
    happened = {(one.shape, one.zone, one.what): one.text for one in status.history}
    assert "InsufficientInstanceCapacity" in happened["p5.48xlarge", "us-east-1b", "gone: no_capacity"]
    (words,) = closed_words(status, ["p5"], status.at)
    assert "p5.48xlarge in us-east-1a: no_capacity for" in words and "p4d.24xlarge in us-east-1b: quota" in words
    (words,) = waiting_words(status, ["p5-1"], status.at)
    assert "p5.48xlarge in us-east-1b: no_capacity" in words
    (tmp_path / "status.json").write_bytes(render_status(status))
    shown = CliRunner().invoke(pool_command, ["show", "p5", "--status", str(tmp_path / "status.json")])
    assert "p5.48xlarge in us-east-1a: no_capacity for" in shown.stdout and "VcpuLimitExceeded" in shown.stdout
    proxy.errors = {"us-east-1a": stock_out}
    status = rounds(1500.0)
    assert [(one.shape, one.zone) for one in status.pools["p5"].shortages if one.shape == "p5.48xlarge"] == [
        ("p5.48xlarge", "us-east-1a")
    ]
    assert [(one.stage, one.shape, one.zone) for one in status.nodes if one.stage] == [
        ("launched", "p5.48xlarge", "us-east-1b")
    ]


def test_ec2_shows_no_secret(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sluice")
    proxy.errors = {"p5.48xlarge": (401, "AuthFailure")}
    with pytest.raises(ProviderError) as error:
        ec2(proxy).launch(order("f" * 32))
    assert error.value.__cause__ is None and SECRET not in f"{error.value!r} {caplog.text}"


def test_ec2_takes_the_subnet_of_the_zone_and_tells_the_node_its_name(proxy: Proxy, tmp_path: Path) -> None:
    script = tmp_path / "boot.sh"
    script.write_text("#!/bin/sh\nhostnamectl hostname {node}\n")
    driver = ec2(proxy, user_data=str(script), subnets={"us-east-1a": "subnet-none"}, spot=True)
    with pytest.raises(ProviderError, match="subnet-none") as error:
        driver.launch(order("0" * 32, node="p5-7"))
    assert error.value.kind == "refused"
    run = proxy.seen[-1]
    assert run["SubnetId"] == "subnet-none" and run["InstanceMarketOptions.MarketType"] == "spot"
    assert b"hostname p5-7" in base64.b64decode(run["UserData"])


def test_a_spot_machine_that_ec2_takes_back_has_a_notice(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    driver = ec2(proxy, pool="spot", spot=True)
    taken, other = driver.launch(order("8" * 32)), driver.launch(order("9" * 32))
    proxy.notices = {taken.id: "marked-for-termination", other.id: "fulfilled"}
    assert {one.id: one.notice for one in driver.machines()} == {
        taken.id: "EC2 spot: marked-for-termination", other.id: "",
    }  # fmt: skip
    proxy.notices = None
    assert {one.id for one in driver.machines()} == {taken.id, other.id}
    assert "no notices of spot machines: EC2: UnauthorizedOperation" in caplog.text


def event(kind: str, machine: str) -> str:
    """As EventBridge writes it into a queue."""
    return json.dumps({"version": "0", "detail-type": kind, "source": "aws.ec2", "detail": {"instance-id": machine}})


def test_what_ec2_says_of_spot_machines_in_a_queue_is_deleted_when_the_next_list_is_asked_for(
    proxy: Proxy, moto_port: int
) -> None:
    boto3 = importlib.import_module("boto3")
    endpoint = f"http://127.0.0.1:{moto_port}"
    sqs = boto3.client("sqs", region_name="us-east-1", endpoint_url=endpoint)
    queue = sqs.create_queue(QueueName="spot")["QueueUrl"]
    driver = ec2(proxy, pool="events", endpoint=endpoint, events=queue)
    taken, at_risk, other = (driver.launch(order(mark * 32)) for mark in "234")
    bodies = [event(AT_RISK, taken.id), event(AT_RISK, at_risk.id), event(TAKEN_BACK, taken.id)]
    for body in (*bodies, event(TAKEN_BACK, "i-0123456789abcdef0"), "hello", '{"detail": 1}'):
        sqs.send_message(QueueUrl=queue, MessageBody=body)

    def listed() -> dict[str, tuple[str, str]]:
        return {one.id: (one.notice, one.at_risk) for one in driver.machines()}

    def hidden() -> str:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        counts = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]
        return "/".join(counts[name] for name in names)

    said = {taken.id: (TAKEN_BACK, AT_RISK), at_risk.id: ("", AT_RISK), other.id: ("", "")}
    assert listed() == said and hidden() == "0/6"
    assert listed() == said and hidden() == "0/0"
    sqs.delete_queue(QueueUrl=queue)
    assert set(listed()) == set(said)  # without the queue, machines are still listed


def test_what_ec2_says_is_read_also_where_the_policy_forbids_to_delete_it(
    proxy: Proxy, moto_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    boto3, exceptions = importlib.import_module("boto3"), importlib.import_module("botocore.exceptions")
    endpoint = f"http://127.0.0.1:{moto_port}"
    sqs = boto3.client("sqs", region_name="us-east-1", endpoint_url=endpoint)
    queue = sqs.create_queue(QueueName="kept")["QueueUrl"]
    driver = ec2(proxy, pool="kept", endpoint=endpoint, events=queue)

    def refuse(**_: object) -> None:
        raise exceptions.ClientError({"Error": {"Code": "AccessDenied"}}, "DeleteMessageBatch")

    monkeypatch.setattr(driver._events._sqs, "delete_message_batch", refuse)
    machine = driver.launch(order("5" * 32))
    for kind, said in ((AT_RISK, ("", AT_RISK)), (TAKEN_BACK, (TAKEN_BACK, AT_RISK))):
        sqs.send_message(QueueUrl=queue, MessageBody=event(kind, machine.id))
        assert [(one.notice, one.at_risk) for one in driver.machines()] == [said]
    assert "pool kept: messages stay in the queue of events: EC2: AccessDenied" in caplog.text
    sqs.delete_queue(QueueUrl=queue)


def test_what_ec2_says_waits_in_the_queue_while_the_list_has_no_machine(proxy: Proxy, moto_port: int) -> None:
    """It may lack them by mistake."""
    boto3 = importlib.import_module("boto3")
    endpoint = f"http://127.0.0.1:{moto_port}"
    sqs = boto3.client("sqs", region_name="us-east-1", endpoint_url=endpoint)
    queue = sqs.create_queue(QueueName="none")["QueueUrl"]
    sqs.send_message(QueueUrl=queue, MessageBody=event(TAKEN_BACK, "i-0123456789abcdef0"))
    driver = ec2(proxy, pool="none", endpoint=endpoint, events=queue)
    assert [driver.machines(), driver.machines()] == [[], []]
    assert len(sqs.receive_message(QueueUrl=queue)["Messages"]) == 1
    sqs.delete_queue(QueueUrl=queue)


def test_ec2_names_the_zone_that_has_no_subnet(proxy: Proxy) -> None:
    driver = ec2(proxy, pool="subnets", subnets={"us-east-1b": "subnet-1"})
    with pytest.raises(ProviderError, match=r"no subnet of zone 'us-east-1a'") as error:
        driver.launch(order("1" * 32))
    assert error.value.kind == "refused"
    assert not any(one["Action"] == "RunInstances" for one in proxy.seen)


def test_a_setting_that_ec2_does_not_know_is_refused() -> None:
    with pytest.raises(SluiceError, match=r"settings.colour.*it knows region"):
        load_driver("ec2", DriverSite("main", "p5", {"region": "us-east-1", "image": "ami-1", "colour": "red"}))


# ---- libcloud ----


def dummy(folder: Path, document: Any = None, mode: int = 0o600, **settings: Any) -> Any:
    pytest.importorskip("libcloud", reason="needs apache-libcloud (pip install -e '.[dev]')")
    path = folder / "cloud.json"
    path.write_text(json.dumps({"args": [SECRET]} if document is None else document))
    path.chmod(mode)
    given = {"provider": "dummy", "image": "Ubuntu 9.10", **settings}
    return load_driver("libcloud", DriverSite("main", "cloud", given, folder))


def keep_names(driver: Any, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
    """As providers do, and the dummy does not; `before` is called in each launch."""
    make = driver._cloud.create_node

    def named(name: str, **words: Any) -> Any:
        before()
        node = make(name=name, **words)
        node.name = name
        return node

    monkeypatch.setattr(driver._cloud, "create_node", named)


def test_libcloud_launches_once_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = dummy(tmp_path)
    keep_names(driver, monkeypatch)
    wanted = Order(TOKEN, "c-1", "Small", "")
    machine = driver.launch(wanted)
    assert driver.launch(wanted).id == machine.id
    assert [(one.id, one.token, one.node) for one in driver.machines()] == [(machine.id, TOKEN, "c-1")]
    driver.terminate(machine.id)
    driver.terminate(machine.id)
    assert [one for one in driver.machines() if not one.ending] == []


def test_libcloud_says_of_which_shape_a_machine_is_that_it_does_not_remember(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = dummy(tmp_path)
    keep_names(driver, monkeypatch)
    driver.launch(Order(TOKEN, "c-1", "Small", ""))

    def found(shapes: tuple[str, ...], size: object, **extra: object) -> str:
        """By a driver that has just been made, of a provider that says so much of a machine."""
        later: Any = load_driver("libcloud", replace(driver._site, shapes=shapes))
        later._cloud = driver._cloud
        (node,) = [one for one in driver._cloud.list_nodes() if TOKEN in one.name]
        node.size, node.extra = size, extra
        return str(later.machines()[0].shape)

    small = next(one for one in driver._cloud.list_sizes() if one.name == "Small")
    assert found(("Big", "Small"), small) == "Small" == found(("Small",), None, flavorId=small.id)
    assert found((small.id,), small) == small.id  # as the policy has it
    assert found(("Big",), None, flavorId="gone") == "gone"
    assert found(("Big",), None, metadata={"sluice-shape": "Big"}) == "Big"
    assert found(("Big",), None) == ""


def test_libcloud_asks_for_sizes_once_also_where_two_are_listed_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = dummy(tmp_path)
    asked: list[int] = []
    sizes = driver._cloud.list_sizes
    monkeypatch.setattr(driver._cloud, "list_sizes", lambda: asked.append(1) or sizes())
    for _ in range(3):
        assert [driver._name_of(size) for size in ("gone", "also-gone")] == ["gone", "also-gone"]
    assert len(asked) == 2


def test_libcloud_writes_the_shape_into_the_metadata_of_providers_that_have_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = dummy(tmp_path)
    given: list[object] = []

    def create(name: str, size: object, image: object, ex_metadata: object = None) -> Any:
        given.append(ex_metadata)
        node = driver._cloud.list_nodes()[0]
        node.name = name
        return node

    monkeypatch.setattr(driver._cloud, "create_node", create)
    driver.launch(Order(TOKEN, "c-1", "Small", ""))
    assert given == [{"sluice-shape": "Small"}]


def test_libcloud_asked_again_during_a_slow_launch_makes_no_second_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = dummy(tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(10)

    keep_names(driver, monkeypatch, slow)
    wanted = Order(TOKEN, "c-1", "Small", "")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(driver.launch, wanted)
        assert begun.wait(10)
        second = threads.submit(driver.launch, wanted)
        monkeypatch.setattr("sluice.fleet.drivers.libcloud._TURN_S", 0.1)
        with pytest.raises(ProviderError, match="an earlier call") as error:
            driver.launch(wanted)
        go_on.set()
        assert first.result(10).id == second.result(10).id
    assert error.value.kind == "throttled"  # nothing was made
    assert len(driver.machines()) == 1


def test_libcloud_sees_no_machine_of_another_pool_or_cluster_whose_name_begins_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = dummy(tmp_path)
    keep_names(driver, monkeypatch)
    one = driver.launch(Order(TOKEN, "c-1", "Small", ""))
    cloud = driver._cloud
    (tmp_path / "cloud-b.json").write_bytes((tmp_path / "cloud.json").read_bytes())
    (tmp_path / "cloud-b.json").chmod(0o600)
    for cluster, pool in (("main", "cloud-b"), ("main-cloud", "cloud")):
        other: Any = load_driver("libcloud", DriverSite(cluster, pool, driver._site.settings, tmp_path))
        other._cloud = cloud
        other.launch(Order("2" * 32, "b-1", "Small", ""))
        assert [machine.node for machine in other.machines()] == ["b-1"]
    theirs = f"{driver._prefix}of-a-person-and-of-no-launch-of-this-pool"
    cloud.create_node(theirs, size=cloud.list_sizes()[0], image=cloud.list_images()[0])
    assert [machine.id for machine in driver.machines()] == [one.id]


def test_a_provider_that_does_not_keep_names_is_of_no_use(tmp_path: Path) -> None:
    driver = dummy(tmp_path)
    before = len(driver._cloud.list_nodes())
    with pytest.raises(ProviderError, match="does not keep the names"):
        driver.launch(Order(TOKEN, "c-1", "Small", ""))
    assert len(driver._cloud.list_nodes()) == before


def test_libcloud_says_what_the_provider_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match="no size 'Huge'") as error:
        dummy(tmp_path).launch(Order(TOKEN, "c-1", "Huge", ""))
    assert error.value.kind == "refused"


@pytest.mark.parametrize(
    ("document", "mode", "words"), [({}, 0o644, "others than its owner can read it"), ([], 0o600, "not an object")]
)
def test_libcloud_refuses_credentials_that_others_read(tmp_path: Path, document: Any, mode: int, words: str) -> None:
    with pytest.raises(SluiceError, match=words):
        dummy(tmp_path, document, mode)


def test_libcloud_shows_no_secret(tmp_path: Path) -> None:
    with pytest.raises(SluiceError) as error:
        dummy(tmp_path, {"kwargs": {"nonsense": SECRET}})
    assert SECRET not in repr(error.value) and error.value.__cause__ is None


@pytest.mark.parametrize("failure", [LookupError, OSError])
def test_libcloud_shows_no_secret_of_a_provider_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    secret = f"{SECRET} &1"
    driver = dummy(tmp_path, {"args": [secret]})
    monkeypatch.setattr(driver._cloud, "list_nodes", lambda: raises(failure(f"{secret}; https://x/?k={quote(secret)}")))
    with pytest.raises(ProviderError, match=r"\*\*\*; https://x/\?k=\*\*\*") as error:
        driver.machines()
    assert SECRET not in repr(error.value) and error.value.__cause__ is None


def raises(error: Exception) -> None:
    raise error


# ---- program ----

PROGRAM = """#!/usr/bin/python3
import json, pathlib, sys
asked = json.load(sys.stdin)
here = pathlib.Path(__file__).with_name("machines")
there = json.loads(here.read_text()) if here.exists() else []
answer = {}
if asked["do"] == "launch":
    found = [one for one in there if one["token"] == asked["order"]["token"]]
    made = found[0] if found else {"id": f"m{len(there)}", **asked["order"]}
    there += [] if found else [made]
    answer = {"machine": made}
elif asked["do"] == "terminate":
    there = [one for one in there if one["id"] != asked["machine"]]
else:
    answer = {"machines": there}
here.write_text(json.dumps(there))
print(json.dumps(answer))
"""


def program(folder: Path, text: str, mode: int = 0o755) -> Any:
    path = folder / "driver"
    path.write_text(text)
    path.chmod(mode)
    return load_driver("program", DriverSite("main", "own", {"program": str(path)}))


def test_a_site_s_own_program(tmp_path: Path) -> None:
    driver = program(tmp_path, PROGRAM)
    machine = driver.launch(order())
    assert driver.launch(order()) == machine and driver.machines() == [machine]
    there = tmp_path / "machines"
    there.write_text(json.dumps([{**one, "notice": "ends at 12"} for one in json.loads(there.read_text())]))
    assert [one.notice for one in driver.machines()] == ["ends at 12"]
    driver.terminate(machine.id)
    assert driver.machines() == []


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("#!/bin/sh\necho nonsense\n", "unknown", "Invalid JSON"),
        ("#!/bin/sh\nexit 1\n", "unknown", "exit status 1"),
        ("#!/bin/sh\necho '{}'\n", "unknown", "no machine of this token"),
        (
            '#!/bin/sh\necho \'{"machine": {"id": "x", "token": "other", "node": "n"}}\'\n',
            "unknown",
            "no machine of this",
        ),
        ('#!/bin/sh\necho \'{"error": {"kind": "quota", "text": "8 of 8"}}\'\n', "quota", "8 of 8"),
        ('#!/bin/sh\necho \'{"error": {"kind": "bad luck", "text": ""}}\'\n', "unknown", "error.kind"),
    ],
)
def test_a_program_that_misbehaves(tmp_path: Path, text: str, kind: str, words: str) -> None:
    with pytest.raises(ProviderError, match=words) as error:
        program(tmp_path, text).launch(order())
    assert error.value.kind == kind


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.fleet.drivers.program._TIMEOUT_S", 1.0)
    held = tmp_path / "held"
    os.mkfifo(held)
    end = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ProviderError, match=r"no answer within 1 s") as error:
        program(tmp_path, f"#!/bin/sh\nexec 3>{held}\necho begun >&3\nsleep 60 &\nwait\n").machines()
    assert error.value.kind == "unknown"
    assert os.read(end, 100) == b"begun\n"
    assert select.select([end], [], [], 10)[0] and os.read(end, 100) == b""  # nobody has it open any more
    os.close(end)


def test_a_program_that_prints_for_ever_is_ended_before_it_fills_the_memory(tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(ProviderError, match="more than 8 MiB"):
        program(tmp_path, "#!/bin/sh\nexec yes\n").machines()
    assert time.monotonic() - before < 15


def test_a_program_in_a_folder_of_others_is_not_run(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SluiceError, match=r"drwxrwxrwx.*nobody else's to write"):
        program(tmp_path, PROGRAM)


def test_a_program_that_others_may_write_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match=r"-rwxrwxrwx.*nobody else's to write"):
        program(tmp_path, PROGRAM, 0o777)


def test_a_driver_that_is_not_installed() -> None:
    with pytest.raises(
        SluiceError, match=r"'azure' is not installed; installed are ec2, libcloud, local, program, redfish"
    ):
        load_driver("azure", DriverSite("main", "p5", {}))


def test_the_driver_of_development_clusters_says_what_to_install_where_they_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dev_cluster", None)
    monkeypatch.delitem(sys.modules, "dev_cluster.pool_driver", raising=False)
    with pytest.raises(SluiceError) as error:
        load_driver("local", DriverSite("main", "own", {}))
    assert error.value.remedy == "install the package sluice-dev-cluster"


def test_messages_of_a_read_that_failed_are_not_deleted() -> None:
    """Nobody was told what they say: a fleetd that is killed then has to find them in the queue again."""

    class Queue:
        def __init__(self) -> None:
            self.answers: list[object] = [[{"ReceiptHandle": "h", "Body": "{}"}], OSError("cut off"), [], []]
            self.deleted: list[str] = []

        def receive_message(self, **_: object) -> dict[str, object]:
            answer = self.answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return {"Messages": answer}

        def delete_message_batch(self, **asked: list[dict[str, str]]) -> None:
            self.deleted += [one["ReceiptHandle"] for one in asked["Entries"]]

    queue = Queue()
    events = Events(queue, "q")
    with pytest.raises(OSError, match="cut off"):
        events.read(())
    events.forget()
    events.read(())
    assert not queue.deleted
