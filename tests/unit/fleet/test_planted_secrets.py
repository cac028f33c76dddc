"""Secrets planted where drivers find credentials, and providers that repeat them in every form: nobody reads one, in
errors, logs, the journal, what fleetd publishes, and what `sluice pool` and the REST API make of it.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus
from xml.sax.saxutils import escape

import pytest
from click.testing import CliRunner

from policy.pool_nodes import PoolPolicy, PoolsPolicy, ShapePolicy
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.cli.pool import command
from sluice.exchange import fleet
from sluice.exchange.pool_costs import render_costs
from sluice.fleet.daemon import Providers, Settings
from sluice.fleet.driver import GROUP, DriverSite, Order, ProviderError, load_driver
from sluice.fleet.journal import Journal
from sluice.fleet.keeper import Keeper
from sluice.fleet.views import JobAct, LaunchAct, ListAct, Listed, NodeAct, SlurmNode, SlurmView, TerminateAct

USER, SECRET, SESSION = "planted-user", 'planted/secret+"1" &x~?', "planted-session-token=="
NODE = "n1"
ORDER = Order("a" * 32, NODE, "big", "")


def forms(word: str) -> list[str]:
    """In which a provider may repeat it."""
    encoded = [encode(word.encode()).decode() for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    lower = re.sub("%..", lambda found: found[0].lower(), quote(word, safe=""))
    return [word, quote(word, safe=""), lower, quote_plus(word), json.dumps(word)[1:-1], *encoded,
            *(one.rstrip("=") for one in encoded)]  # fmt: skip


def echo_of(*words: str) -> str:
    """What a provider says that was given these."""
    return f"you said {' and '.join(form for word in words for form in forms(word))} to me"


LOGIN = f"{USER}:{SECRET}"  # as HTTP has it
FORMS = [form for word in (SECRET, SESSION, LOGIN) for form in forms(word)]


@dataclass
class Planted:
    """A driver's pool, with a provider that repeats what it is given."""

    driver: str
    settings: dict[str, Any]
    file: Path | None = None  # of its credentials
    also: Callable[[Any], None] = field(default=lambda driver: None)  # done to the driver


class Echo(BaseHTTPRequestHandler):
    """EC2, which refuses with all that it was sent and more."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        words = escape(f"{self.headers['X-Amz-Security-Token']} {echo_of(SECRET, SESSION)} {body}")
        code = "SignatureDoesNotMatch"
        text = f"<Response><Errors><Error><Code>{code}</Code><Message>{words}</Message></Error></Errors></Response>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def ec2(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    pytest.importorskip("boto3")
    return Planted("ec2", {"region": "us-east-1", "image": "ami-1", "endpoint": echo})


def ec2_file(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    keys = f"aws_access_key_id={USER}\naws_secret_access_key={SECRET}\naws_session_token={SESSION}\n"
    file = private(folder / "credentials", f"[default]\n{keys}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    planted = ec2(folder, echo, monkeypatch)
    planted.file = file
    return planted


def ec2_role(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    planted = ec2_file(folder, echo, monkeypatch)
    role = "[profile own]\nrole_arn=arn:aws:iam::123456789012:role/own\nsource_profile=default\n"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(private(folder / "config", role, 0o644)))
    monkeypatch.setenv("AWS_PROFILE", "own")
    return planted


def libcloud(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    pytest.importorskip("libcloud")
    file = private(folder / "own.json", json.dumps({"args": [SECRET], "kwargs": {}}))

    def repeat(driver: Any) -> None:
        for name in ("list_nodes", "create_node"):
            monkeypatch.setattr(driver._cloud, name, raising(lambda: OSError(echo_of(SECRET))))

    return Planted("libcloud", {"provider": "dummy", "image": "Ubuntu 9.10"}, file, repeat)


def redfish(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    sushy = pytest.importorskip("sushy")
    file = private(folder / "own.json", json.dumps({"user": USER, "password": SECRET}))

    class Response:
        status_code, headers, text = 400, {}, ""

        def json(self) -> object:
            return {"error": {"code": "Base.1.0.GeneralError", "message": echo_of(SECRET, LOGIN)}}

    failure = raising(lambda: sushy.exceptions.BadRequestError("GET", "https://n1/", Response()))
    monkeypatch.setattr("sluice.fleet.drivers.redfish.sushy.Sushy", failure)
    return Planted("redfish", {"bmc": "https://{node}.example"}, file)


def program(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    path = private(
        folder / "driver", "#!/bin/sh\n/usr/bin/env >&2\n/usr/bin/tr '\\0' ' ' </proc/$$/environ >&2\nexit 1\n", 0o755
    )
    return Planted("program", {"program": str(path)})


def wakeonlan(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    pytest.importorskip("wakeonlan")
    path = private(folder / "stop", "#!/bin/sh\n/usr/bin/env >&2\nexit 1\n", 0o755)
    monkeypatch.setattr("sluice.fleet.drivers.wakeonlan.WakeOnLan._answers", lambda *_: True)
    folder = folder / "state/wakeonlan-own"
    folder.mkdir(parents=True)
    record = {"token": ORDER.token, "shape": "big", "zone": "", "began": time.time()}
    (folder / f"{NODE}.json").write_text(json.dumps(record))
    return Planted("wakeonlan", {"macs": {NODE: "00:25:90:ab:cd:ef"}, "stop": [str(path), "{node}"]})


def vm(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    data = private(folder / "user-data", f"munge_key: {SECRET}\n{SESSION}\n")
    qemu = private(folder / "qemu", "#!/bin/sh\n/usr/bin/env >&2\necho $@ >&2\nexit 1\n", 0o755)
    return Planted("vm", {"shapes": {"big": "-m 16"}, "user_data": str(data), "qemu": str(qemu)})


def local(folder: Path, echo: str, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted("local", {})


ALL = (ec2, ec2_file, libcloud, redfish, program, wakeonlan, vm, local)


def raising(make: Callable[[], Exception]) -> Callable[..., None]:
    def run(*_: object, **__: object) -> None:
        raise make()

    return run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with fleetd's state folder, and an environment with everybody's credentials."""
    tmp_path.chmod(0o755)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    return tmp_path


def test_all_drivers_are_here() -> None:
    assert {point.name for point in entry_points(group=GROUP)} == {one.__name__.partition("_")[0] for one in ALL}


def run_fleet(planted: Planted, home: Path) -> str:
    """What results, files and commands say after some rounds in which a node is wanted and called off."""
    settings = Settings(home / "slurm.conf", home / "state", home / "requests", home)
    providers = Providers(settings, lambda result: None, time.time)
    pool = PoolPolicy(
        driver=planted.driver, settings=planted.settings, nodes=NODE, shapes=(ShapePolicy(name="big", price=1.0),),
        partition="own", back_off_s=1,
    )  # fmt: skip
    providers.set_pools("main", {"own": pool})
    planted.also(providers._made["own"][2])
    keeper = Keeper(Journal(home / "state/journal.json"))
    keeper.set_policy(PoolsPolicy(cluster="main", pools={"own": pool}))
    said = []
    for number in range(40):
        now = 1000.0 + 20 * number
        keeper.see(SlurmView(now, {NODE: SlurmNode("up" if number < 30 else "off")}))
        for act in keeper.step(now):
            if not isinstance(act, NodeAct | JobAct):
                said.append(result := providers._answer(act, now))
                keeper.take(result, now)
    status = keeper.status()
    path = home / "state/status.json"
    write_atomic(path, fleet.render_status(status))
    write_atomic(home / "state/costs.json", render_costs(keeper.costs()))
    shown = [CliRunner().invoke(command, [*words, "--status", str(path)], catch_exceptions=False).output for words in (
        ["list"], ["show", "own"], ["history", "own"], ["why", NODE], ["why", NODE, "--json"], ["list", "--json"],
    )]  # fmt: skip
    rest = [fleet.pool_documents(status), fleet.why_document(status, NODE), fleet.history_document(status, "own")]
    files = [one.read_text(errors="replace") for one in (home / "state").glob("*.json")]
    assert len(said) > 3  # it was asked
    return "\n".join([repr(said), *shown, json.dumps(rest), *files])


@pytest.mark.parametrize("plant", ALL)
def test_nobody_reads_a_planted_secret(
    plant: Callable[..., Planted],
    home: Path,
    echo: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)  # as `sluice fleetd -v`
    planted = plant(home, echo, monkeypatch)
    said = [run_fleet(planted, home)]
    driver = load_driver(planted.driver, DriverSite("main", "own", planted.settings, home, home / "state"))
    planted.also(driver)
    machine = f"{NODE}/{ORDER.token[:12]}"  # as those drivers name it that keep records
    failed = 0
    for ask in (lambda: driver.launch(ORDER), lambda: driver.terminate(machine), driver.machines):
        try:
            ask()
        except ProviderError as error:
            said += [repr(error), *traceback.format_exception(error)]
            failed += 1
    text = "\n".join([*said, caplog.text])
    assert failed and [form for form in FORMS if form in text] == []


@pytest.mark.parametrize("plant", [ec2_file, ec2_role, libcloud, redfish])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_credentials_that_others_can_read_or_change_are_refused_with_a_remedy(
    plant: Callable[..., Planted], mode: int, home: Path, echo: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    planted = plant(home, echo, monkeypatch)
    assert planted.file is not None
    planted.file.chmod(mode)
    planted.also = lambda driver: None  # there is none
    said = run_fleet(planted, home)
    assert "others than its owner can read it" in said and f"chmod 600 {planted.file}" in said + caplog.text
    assert [form for form in FORMS if form in said + caplog.text] == []


def test_credentials_that_were_made_private_are_read_without_a_restart(home: Path) -> None:
    file = private(home / "own.json", json.dumps({"args": [SECRET]}), 0o644)
    settings = Settings(home / "slurm.conf", home / "state", home / "requests", home)
    providers = Providers(settings, lambda result: None, time.time)
    words = {"provider": "dummy", "image": "Ubuntu 9.10"}
    pool = PoolPolicy(driver="libcloud", settings=words, nodes=NODE, shapes=(ShapePolicy(name="big"),), partition="own")
    pytest.importorskip("libcloud")
    providers.set_pools("main", {"own": pool})
    assert "chmod 600" in repr(providers._answer(ListAct("own"), 1.0))
    file.chmod(0o600)
    providers.set_pools("main", {"own": pool})
    found = providers._answer(ListAct("own"), 2.0)
    assert isinstance(found, Listed) and found.machines == ()


def test_a_driver_of_a_site_s_own_that_cannot_be_made_shows_no_secret(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    private(home / "own.json", json.dumps({"password": SECRET}))

    def make(name: str, site: DriverSite) -> None:
        site.read_credentials("password")
        raise SluiceError(echo_of(SECRET))

    monkeypatch.setattr("sluice.fleet.daemon.load_driver", make)
    settings = Settings(home / "slurm.conf", home / "state", home / "requests", home)
    providers = Providers(settings, lambda result: None, time.time)
    pool = PoolPolicy(driver="own", nodes=NODE, shapes=(ShapePolicy(name="big"),), partition="own")
    providers.set_pools("main", {"own": pool})
    said = caplog.text + repr(providers._answer(ListAct("own"), 1.0))
    assert "you said" in caplog.text and [form for form in FORMS if form in said] == []


def test_a_driver_of_a_site_s_own_that_shows_what_it_has_read_is_overruled(home: Path) -> None:
    private(home / "own.json", json.dumps({"password": SECRET}))

    class Own:
        def __init__(self, site: DriverSite) -> None:
            site.read_credentials("password")

        launch = terminate = raising(lambda: ProviderError("refused", echo_of(SECRET)))
        machines = raising(lambda: ValueError(echo_of(SECRET)))

    settings = Settings(home / "slurm.conf", home / "state", home / "requests", home)
    providers = Providers(settings, lambda result: None, time.time)
    shapes = (ShapePolicy(name="big"),)
    providers.set_pools("main", {"own": PoolPolicy(driver="none", nodes=NODE, shapes=shapes, partition="own")})
    _, site, _, threads = providers._made["own"]
    providers._made["own"] = ("own", site, Own(site), threads)  # type: ignore[assignment]
    for act in (LaunchAct("own", ORDER), TerminateAct("own", "m", ORDER.token), ListAct("own")):
        said = repr(providers._answer(act, 1.0))
        assert "failure" in said and [form for form in FORMS if form in said] == []
