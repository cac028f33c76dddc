"""The cluster's metrics from snapshots of Slurm; and settings, token and database of the writer."""

from __future__ import annotations

import gzip
import os
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from policy.monitoring import Monitoring, NodeMetrics, compile_metrics
from policy.quota_use import TenantUse
from prolog_epilog.metrics import Slots
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.controllerd.metrics.cluster import (
    Events,
    Throughput,
    class_points,
    pool_points,
    queue_points,
    scheduler_points,
    shards_per_gpu,
    tenant_points,
)
from sluice.exchange.fleet import FleetStatus, PoolStatus
from sluice.metrics.influx import Database, RejectedError, TooLargeError, read_token, token_for
from sluice.metrics.names import unknown
from sluice.metrics.output import Output
from sluice.metrics.points import Point
from sluice.plugin.status import Controller
from sluice.slurm.answers import Job, Node, task_count
from tests.unit.controllerd.http_server import HttpServer


def job(number: int, state: str = "PENDING", **more: Any) -> Job:
    plain: dict[str, Any] = {
        "array_id": None, "array_tasks": "", "name": "j", "user": "ann", "uid": 1000, "account": "physics", "qos": "",
        "partition": "main", "state": state, "reason": "", "nodes": "", "node_count": 1, "cpus": 1, "submit_time": 100,
        "eligible_time": 120, "start_time": None, "end_time": None, "time_limit_s": None, "priority": 1, "tres": {},
        "tres_per_node": "", "tres_per_job": "", "tres_per_task": "", "features": "", "dependency": "",
        "reservation": "", "comment": "", "work_dir": "",
    }  # fmt: skip
    fields = {name: value for name, value in {**plain, **more}.items() if name in Job.__dataclass_fields__}
    return Job(id=number, **fields)


def node(name: str, gres: str, allocated: dict[str, int], state: str = "mixed", *flags: str) -> Node:
    plain: dict[str, Any] = {field: "" for field in Node.__dataclass_fields__}
    plain |= {
        "name": name,
        "gres": gres,
        "tres_allocated": allocated,
        "state": state,
        "flags": frozenset(flags),
        "tres": {},
    }
    return Node(**plain)


def only(points: list[Point]) -> Point:
    (one,) = points
    assert unknown(one.measurement, one.fields) == []
    return one


@pytest.mark.parametrize(
    ("text", "count"), [("", 1), ("7", 1), ("3-9%2", 7), ("0-10:5,12", 4), ("[1-4]", 4), ("x", 1), ("9-3", 1)]
)
def test_tasks_of_an_array(text: str, count: int) -> None:
    assert task_count(text) == count


def test_queues() -> None:
    jobs = [
        job(1, tres={"gres/gpu": 4}),
        job(2, array_tasks="0-9", tres={"gres/shard": 40_000}, eligible_time=500),
        job(3, "RUNNING", tres={"gres/gpu": 2}),
        job(4, "COMPLETED", tres={"gres/gpu": 8}),
    ]
    fields = only(queue_points("c", jobs, 80_000.0, 1000.0, 1)).fields
    assert fields == {
        "pending_jobs": 11,
        "running_jobs": 1,
        "pending_gpus": 9.0,
        "running_gpus": 2,
        "oldest_wait_seconds": 880.0,
    }


def test_classes_with_shares_and_nodes_that_are_away() -> None:
    nodes = [
        node("a", "gpu:h100:8(S:0-1),shard:h100:640000(S:0-1)", {"gres/gpu:h100": 2, "gres/shard": 80_000}),
        node("b", "gpu:h100:8", {}, "idle"),
        node("c", "gpu:h100:8", {}, "down"),
        node("d", "gpu:h100:8", {"gres/gpu:h100": 8}, "allocated", "drain"),
    ]
    fields = only(class_points("c", nodes, 1)).fields
    assert (fields["gpus"], fields["available_gpus"], fields["allocated_gpus"]) == (32, 16, 11)
    assert fields["largest_free_gpus"] == 8 and fields["nodes_unavailable"] == 2
    assert fields["fragmentation_ratio"] == pytest.approx(5 / 13, abs=1e-6)
    assert "utilisation_ratio" not in fields
    told = only(class_points("c", nodes, 1, {"a": [100.0, 50.0], "b": [0.0], "elsewhere": [7.0]})).fields
    assert told["utilisation_ratio"] == 0.5 and unknown("sluice_class", told) == []
    mixed = node("e", "gpu:h100:4,gpu:a100:4", {}, "idle")
    assert all("utilisation_ratio" not in one.fields for one in class_points("c", [mixed], 1, {"e": [9.0] * 8}))
    assert shards_per_gpu(nodes) == 80_000


def test_throughput_counts_each_job_once() -> None:
    seen = Throughput()
    seen.look([job(1), job(9, "RUNNING", start_time=90)])
    assert seen.points("c", 1) == []
    seen.look([job(1, "RUNNING", start_time=150), job(9, "RUNNING", start_time=90)])
    failed = job(2, "FAILED", start_time=160, end_time=170)
    seen.look([job(1, "RUNNING", start_time=150), failed, job(9, "COMPLETED", start_time=90)])
    seen.look([job(1, "PENDING", start_time=900), failed])  # requeued
    seen.look([job(1, "RUNNING", start_time=300), failed])
    fields = only(seen.points("c", 1)).fields
    assert fields == {
        "started_total": 3,
        "ended_total": 2,
        "failed_total": 1,
        "wait_seconds_total": 30 + 40 + 180,
        "submit_to_start_seconds_total": 50 + 60 + 200,
    }


def test_pools() -> None:
    pool = PoolStatus(
        "ec2", "n[1-4]", 4, 0, "p", on=2, launching=1, cost_hour=6.0, boot_s=95.0, launches=7,
        failures={"no_capacity": 3}, oldest_wait_since=940.0,
    )  # fmt: skip
    first, second = pool_points("c", FleetStatus(990.0, pools={"p5": pool}), 1000.0, 1)
    assert (first.fields["on_nodes"], first.fields["boot_seconds"], first.fields["cost_hour"]) == (2, 95.0, 6.0)
    assert (first.fields["oldest_wait_seconds"], first.fields["without_capacity_seconds"]) == (60.0, 0.0)
    assert (second.tags["kind"], second.fields) == ("no_capacity", {"seen_total": 3})
    assert all(unknown(one.measurement, one.fields) == [] for one in (first, second))
    assert pool_points("c", FleetStatus(900.0, pools={"p5": pool}), 1000.0, 1) == []


def test_tenants() -> None:
    tenant = TenantUse("physics", "", limits={"GrpTRES": "gres/gpu=8", "GrpTRESMins": "gres/gpu=6000"}, running=2)
    tenant.used, tenant.minutes = {"gres/gpu": 3}, {"gres/gpu": 90.0}
    fields = only(tenant_points("c", {"physics": tenant}, 1)).fields
    assert fields == {"gpus": 3, "gpus_limit": 8, "gpu_hours": 1.5, "gpu_hours_limit": 100, "jobs": 2}


SDIAG = """
Server thread count:  3
Agent queue size:     0
DBD Agent queue size: 7

Main schedule statistics (microseconds):
\tLast cycle:   1200
\tMax cycle:    9000
\tTotal cycles: 12
\tMean cycle:   1500
\tLast queue length: 0

Backfilling stats
\tTotal backfilled jobs (since last slurm start): 1
\tLast cycle: 2500
\tMean cycle: 3000
"""


def test_slurmctld_and_the_plugins() -> None:
    counters = {
        "plan.plan_us_last": 1500,
        "plan.jobs": 20,
        "select.asked": 100,
        "select.hook_us_to_5": 60,
        "select.hook_us_to_100": 39,
        "select.hook_us_more": 1,
        "submit.submitted": 10,
        "submit.total_ns": 200_000,
        "decisions.dropped": "many",
    }
    plugins = Controller("ctl1", 0.0, {"counters": counters})
    fields = only(scheduler_points("c", SDIAG, plugins, 2, 1)).fields
    assert fields["main_cycle_seconds"] == 0.0015 and fields["backfill_cycle_seconds"] == 0.0025
    assert fields["dbd_queue"] == 7 and fields["controllers_up"] == 2 and fields["plan_seconds"] == 0.0015
    assert fields["hook_median_seconds"] == 5e-6 and fields["hook_p95_seconds"] == 1e-4
    assert fields["submit_seconds"] == pytest.approx(2e-5) and "decisions_dropped" not in fields
    assert only(scheduler_points("c", "", None, 0, 1)).fields == {"controllers_up": 0}
    assert only(scheduler_points("c", SDIAG, Controller("x", 0.0, {"counters": 3}), 1, 1)).fields["dbd_queue"] == 7


def test_dropped_decisions_also_have_their_former_name() -> None:
    plugins = Controller("ctl1", 0.0, {"counters": {"decisions.dropped": 3}})
    fields = only(scheduler_points("c", "", plugins, 1, 1)).fields
    assert fields["decisions_dropped"] == fields["records_dropped"] == 3


def test_events_since_the_daemon_began(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen = Events(path)
    assert seen.points("c", 1) == []
    events.append(path, "takeover", host="ctl2")
    events.append(path, "takeover", host="ctl1")
    events.append(path, "drained", node="n1")
    assert {one.tags["kind"]: one.fields["seen_total"] for one in seen.points("c", 1)} == {"takeover": 2, "drained": 1}
    assert {one.tags["kind"]: one.fields["seen_total"] for one in seen.points("c", 1)} == {"takeover": 2, "drained": 1}


# ---- settings ----


@pytest.mark.parametrize(
    "bad",
    [
        {"interval": 0}, {"interval": "2m"}, {"url": "ftp://x"}, {"url": "http://u:p@host"}, {"url": "http://h/?q=1"},
        {"url": "http://h\nx"}, {"prometheus": "9835"}, {"prometheus": "host:0"}, {"token_file": "token"},
        {"job_ids": "both"}, {"url": "http://h", "bucket": ""}, {"spool": 0}, {"bucket": "a\nb"},
    ],
)  # fmt: skip
def test_settings_that_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Monitoring(**bad)


def test_settings_as_nodes_read_them() -> None:
    wanted = Monitoring(interval="10s", url="https://db:8086/", spool="1G", job_ids="tags", prometheus="[::1]:9835")  # type: ignore[arg-type]
    compiled = compile_metrics(wanted)
    assert (compiled.interval, compiled.url, compiled.spool) == (10, "https://db:8086", 1024)
    assert compile_metrics(None) == NodeMetrics()
    assert NodeMetrics.model_validate_json(compiled.model_dump_json()) == compiled


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(mode)
    with pytest.raises(SluiceError, match="chmod 600") as caught:
        read_token(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", [b"two words", b"a\nb", b"\xff", b"x" * 5000])
def test_what_is_no_token(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(SluiceError, match="not a token"):
        read_token(path)


def test_a_token_and_none(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert read_token(path) == ""
    path.write_text("secret\n")
    path.chmod(0o400)
    assert read_token(path) == "secret"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(SluiceError):
        read_token(fifo)


def test_a_token_goes_over_plain_http_only_where_the_admin_says_so(tmp_path: Path) -> None:
    """Also to this host: a tenant can listen on the port of a database that is down."""
    path = tmp_path / "token"
    assert token_for("http://db:8086", path, without_tls=False) == ""  # there is none to protect
    path.write_text("secret\n")
    path.chmod(0o600)
    for url in ("http://db:8086", "http://127.0.0.1:8086"):
        with pytest.raises(SluiceError, match="token_without_tls") as caught:
            token_for(url, path, without_tls=False)
        assert "secret" not in str(caught.value)
        assert token_for(url, path, without_tls=True) == "secret"
    assert token_for("https://db:8086", path, without_tls=False) == "secret"


# ---- the database and the page ----


class Server(HttpServer):
    """A database whose answers a test sets, and which keeps what it got."""

    def __init__(self) -> None:
        self.status, self.delay = 204, 0.0
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.got.append((self.path, dict(self.headers), gzip.decompress(body)))
                time.sleep(outer.delay)
                self.send_response(outer.status)
                self.end_headers()
                self.wfile.write(b'{"message": "as told"}' if outer.status >= 300 else b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(Handler)


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def test_writes_as_influxdb_wants_it(server: Server) -> None:
    Database(server.url, "my org", "b&c", "secret").write(b"m f=1i 5\n")
    path, headers, body = server.got[0]
    assert path == "/api/v2/write?org=my+org&bucket=b%26c&precision=ns" and body == b"m f=1i 5\n"
    assert headers["Authorization"] == "Token secret" and headers["Content-Encoding"] == "gzip"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RejectedError),
        (422, RejectedError),
        (413, TooLargeError),
        *((one, SluiceError) for one in (401, 503, 302)),
    ],
)
def test_refusals(server: Server, status: int, kind: type[Exception]) -> None:
    server.status = status
    with pytest.raises(kind) as caught:
        Database(server.url, "", "b", "secret").write(b"m f=1i 5\n")
    assert type(caught.value) is kind and "secret" not in str(caught.value) and str(status) in str(caught.value)


def test_a_database_has_seconds_to_answer(server: Server) -> None:
    server.delay = 0.3
    Database(server.url, "", "b", "secret").write(b"m f=1i 5\n")
    assert [body for _, _, body in server.got] == [b"m f=1i 5\n"]


def test_a_database_that_is_not_there() -> None:
    with pytest.raises(SluiceError, match="check that the database runs"):
        Database("http://127.0.0.1:1", "", "b", "").write(b"m f=1i 5\n")


def test_output_sends_by_a_process_of_its_own_and_answers_prometheus(tmp_path: Path, server: Server) -> None:
    said: list[str] = []
    output = Output(tmp_path, "n1", said.append)
    settings = NodeMetrics(url=server.url, token_file=str(tmp_path / "none"), prometheus="127.0.0.1:0")
    try:
        output.configure(settings)
        for number in range(20):
            output.put("test", [Point("sluice_gpu", {"gpu": "G"}, {"power_watts": float(number)}, number)])
        until = time.monotonic() + 20
        while sum(body.count(b"\n") for _, _, body in server.got) < 20 and time.monotonic() < until:
            time.sleep(0.05)
        lines = b"".join(body for _, _, body in server.got).splitlines()
        assert lines == [f"sluice_gpu,gpu=G power_watts={float(number)!r} {number}".encode() for number in range(20)]
        assert output._page is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{output._page.port}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert b'sluice_gpu_power_watts{gpu="G"} 19.0' in answer.read()
        output.configure(NodeMetrics())
        assert output.sender_points(1) == [] and output._page is None
    finally:
        output.close()
    assert said == []


def test_stamps_never_repeat(tmp_path: Path) -> None:
    output = Output(tmp_path, "n1", lambda _: None)
    clock = iter([1_000, 1_000, 999, 5_000_000_000, 10, 11])
    assert [output.stamp(lambda: next(clock)) for _ in range(6)] == [1000, 1001, 1002, 5_000_000_000, 10, 11]


def test_slots_are_small_and_stay() -> None:
    slots = Slots()
    assert slots.of("G", ["a", "b", "c"]) == {"a": 0, "b": 1, "c": 2}
    assert slots.of("G", ["a", "c", "d"]) == {"a": 0, "c": 2, "d": 1}
    assert slots.of("G", ["z"]) == {"z": 0} and slots.of("H", ["a"]) == {"a": 0}
