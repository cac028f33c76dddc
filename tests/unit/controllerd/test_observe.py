"""What each kind of rule sees, and what nodes report."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from policy.alerts import NodeAlerts, NodeRule
from policy.node import NodePolicy
from policy.quota_use import TenantUse
from policy.service_jobs import ServicePolicy, ServicesPolicy
from prolog_epilog.accounting import Tick
from prolog_epilog.live_reports import LiveReports
from prolog_epilog.summary import Interval
from sluice.base.duties import NotYet
from sluice.base.errors import SluiceError
from sluice.controllerd.alerts import observe
from sluice.controllerd.alerts.duty import Alerting, alerts_folder
from sluice.controllerd.alerts.engine import trial
from sluice.controllerd.alerts.observe import Observation, UnknownError
from sluice.controllerd.alerts.outbox import Outbox
from sluice.exchange.courier import MAX_REQUEST, AnswerError
from sluice.exchange.fleet import FleetStatus, PoolStatus
from sluice.exchange.live import GpuReading
from sluice.exchange.readings import Reading
from sluice.exchange.record import Event, JobRecord
from sluice.exchange.requests import Outcome, RequestLog
from sluice.exchange.running import Running
from sluice.exchange.serve_status import ServiceStatus, Status
from tests.unit.exchange.test_requests import a_request
from tests.unit.top.test_top import job, node


class FakeSite:
    """As much of a controller as rules look at."""

    def __init__(self, folder: Path) -> None:
        self.state_save = folder
        self.host = "ctl1"
        self.answers = True
        self.commands = self

    def config(self) -> dict[str, str]:
        return {"AccountingStorageType": "accounting_storage/slurmdbd"}

    def run(self, *words: str, timeout: float) -> None:
        if not self.answers:
            raise SluiceError("sacctmgr: error: Sending PersistInit msg: Connection refused")


def see(tmp_path: Path, **known: Any) -> Observation:
    """An observation in which all is known that is given."""
    seen = Observation(FakeSite(tmp_path), 10_000.0)  # type: ignore[arg-type]
    seen.__dict__.update({"gpus": [], "nodes": [], "jobs": {}, "tenants": {}, **known})
    return seen


def rule(kind: str, threshold: float, **more: Any) -> NodeRule:
    return NodeRule(name="r", kind=kind, threshold=threshold, duration=0, **more)


def test_budgets_of_watts(tmp_path: Path) -> None:
    kept = {"name": "row", "watts": 1000, "measured_w": 900.0, "short_w": 0.0, "below_w": 0.0, "guaranteed_w": 0.0}
    over = {**kept, "name": "hall", "measured_w": 1100.0, "short_w": 100.0}
    below = {**kept, "name": "row2", "below_w": 50.0, "guaranteed_w": 950.0}
    found = see(tmp_path, budgets=[kept, over, below, {**over, "name": "new", "measured_w": None}]).look(
        rule("power-budget", 100)
    )
    assert {name: one.text for name, one in found.seen.items()} == {
        "budget hall": "draws 1.1 kW of 1.0 kW; the lowest caps of its running jobs are 100 W too much",
        "budget row2": "draws 900 W of 1.0 kW; caps are 50 W below lowest_cap, only guaranteed jobs start there; "
        "guaranteed jobs need 950 W at lowest_cap",
    }
    assert [found.known(f"budget {name}") for name in ("row", "hall", "new")] == [True, True, False]


@pytest.mark.parametrize(
    ("status", "budgets", "said"),
    [
        ({"level": "place", "started": 0, "counters": {"plan.last_s": 9_941}}, 1, None),
        ({"level": "place", "started": 9_941, "counters": {}}, 1, None),  # its first plan is to come
        ({"level": "place", "started": 0, "counters": {"plan.last_s": 9_940, "plan.failures": 7}}, 1, "60 s, 7 failed"),
        ({"level": "place", "started": 0, "counters": {"plan.last_s": 9_940}}, 0, None),
        ({"level": "admit", "started": 0, "counters": {}}, 1, None),
    ],
)
def test_a_planner_that_makes_no_plan(tmp_path: Path, status: dict[str, Any], budgets: int, said: str | None) -> None:
    found = see(tmp_path, budgets=[{"name": "hall"}] * budgets, plugins=status).look(rule("power-plan", 60)).seen
    assert said in found["planner"].text if said else not found


def test_gpus(tmp_path: Path) -> None:
    gpus = [
        GpuReading("n1", 0, "a", temperature_c=91),
        GpuReading("n1", 1, "b", temperature_c=40),
        GpuReading("n2", 0, "c", temperature_c=99),
        GpuReading("n3", 0, "d"),
    ]
    found = see(tmp_path, gpus=gpus).look(rule("temperature", 90, nodes="n[1,3]"))
    assert {name: one.value for name, one in found.seen.items()} == {"n1 GPU 0": 91}
    assert [found.known(name) for name in ("n1 GPU 1", "n3 GPU 0", "n4 GPU 0")] == [True, False, False]


def test_idle_jobs(tmp_path: Path) -> None:
    jobs = {
        7: job(7, tres={"gres/gpu": 2}, nodes="n1"),
        8: job(8, nodes="n1", account="biology"),
        9: job(9, nodes="n2"),
    }
    gpus = [
        GpuReading("n1", 0, "a", jobs={7: 0.0}),
        GpuReading("n1", 1, "b", jobs={7: 80.0, 9: 0.0}),  # a node cannot report a job that is not there
        GpuReading("n1", 2, "c", jobs={8: 0.5, 55: 0.0}),
        GpuReading("n1", 3, "d", jobs={8: None}),
    ]
    found = see(tmp_path, gpus=gpus, jobs=jobs).look(rule("gpu-idle", 1))
    assert list(found.seen) == ["job 7 of alice (physics)", "job 8 of alice (biology)"]
    assert found.seen["job 7 of alice (physics)"].jobs == ()  # it works on its other GPU
    assert "1 of its 2 GPUs" in found.seen["job 7 of alice (physics)"].text
    assert found.seen["job 8 of alice (biology)"].jobs == ()  # it has three GPUs, and one is known
    assert not found.known("job 9 of alice (physics)")  # it runs, and no node reported it
    assert found.known("job 70 of alice (physics)")  # it is over
    only = see(tmp_path, gpus=gpus, jobs=jobs).look(rule("gpu-idle", 1, tenants=("physics",)))
    assert list(only.seen) == ["job 7 of alice (physics)"]
    alone = {7: job(7, tres={"gres/gpu": 1}, nodes="n1")}
    found = see(tmp_path, gpus=gpus[:1], jobs=alone).look(rule("gpu-idle", 1))
    assert found.seen["job 7 of alice (physics)"].jobs == (7,)


def test_nodes(tmp_path: Path) -> None:
    nodes = [
        node("n1"),
        node("n2", flags=frozenset({"drain"}), reason="hot"),
        node("n3", state="down"),
        node("n4", flags=frozenset({"not_responding"})),
    ]
    found = see(tmp_path, nodes=nodes).look(rule("node-drained", 1)).seen
    assert list(found) == ["node n2", "node n3", "node n4"]
    assert found["node n2"].text == "drained: hot"
    assert list(see(tmp_path, nodes=nodes).look(rule("node-drained", 1, nodes="n3")).seen) == ["node n3"]


def test_waits(tmp_path: Path) -> None:
    jobs = {
        one.id: one
        for one in (
            job(1, state="PENDING", eligible_time=9000, reason="Resources"),
            job(2, state="PENDING", eligible_time=1000, reason="Priority"),
            job(3, state="PENDING", eligible_time=0, reason="Dependency"),
            job(4, state="PENDING", eligible_time=None, reason="BeginTime"),
            job(5, state="PENDING", eligible_time=9990, account="biology", reason="Resources"),
        )
    }
    found = see(tmp_path, jobs=jobs).look(rule("queue-wait", 900)).seen
    assert {name: one.value for name, one in found.items()} == {"tenant physics": 9000}
    assert "job 2" in found["tenant physics"].text


def test_quotas_and_budgets(tmp_path: Path) -> None:
    tenants = {
        "physics": TenantUse(
            "physics",
            "",
            limits={"GrpTRES": "gres/gpu=8", "GrpTRESMins": "gres/gpu=6000"},
            used={"gres/gpu": 8},
            minutes={"gres/gpu": 4900.0},
        ),
        "biology": TenantUse(
            "biology", "", limits={"GrpTRESMins": "gres/shard=61440"}, minutes={"gres/shard": 61440.0}
        ),
        "free": TenantUse("free", "", used={"gres/gpu": 50}),
    }
    seen = see(tmp_path, tenants=tenants)
    assert list(seen.look(rule("quota", 100)).seen) == ["tenant physics"]
    found = seen.look(rule("budget", 80)).seen
    assert list(found) == ["tenant physics GPU-hours", "tenant biology GiB-hours"]
    assert "81.7 of 100.0 GPU-hours" in found["tenant physics GPU-hours"].text
    assert list(seen.look(rule("budget", 100)).seen) == ["tenant biology GiB-hours"]
    assert list(seen.look(rule("budget", 80, tenants=("physics",))).seen) == ["tenant physics GPU-hours"]


SERVICES = ServicesPolicy(
    services={
        name: ServicePolicy(name=name, tenant=tenant, user="u", engine="vllm", most=3)
        for name, tenant in {"llm": "nlp", "embed": "robotics"}.items()
    }
)


def test_requests_that_wait_for_a_replica(tmp_path: Path) -> None:
    status = Status(
        {"llm": ServiceStatus(waiting=4, oldest_s=400.0, why="no GPU is free"), "embed": ServiceStatus(1, 10.0)}, {}
    )
    seen = see(tmp_path, services=SERVICES, serving=status)
    found = seen.look(rule("service-wait", 300)).seen
    assert list(found) == ["service llm"] and found["service llm"].value == 400
    assert found["service llm"].text == "4 requests wait, the oldest for 400 s (no GPU is free); 0 to 3 replicas"
    assert set(seen.look(rule("service-wait", 10)).seen) == {"service llm", "service embed"}
    assert set(seen.look(rule("service-wait", 10, tenants=("robotics",))).seen) == {"service embed"}
    assert see(tmp_path, services=ServicesPolicy()).look(rule("service-wait", 1)).seen == {}


def test_without_replicad_waits_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(timeout: float) -> Status:
        raise SluiceError("/run/x: Connection refused")

    monkeypatch.setattr(observe, "ask_status", away)
    with pytest.raises(UnknownError, match="refused"):
        see(tmp_path, services=SERVICES).look(rule("service-wait", 1))


def test_requests_that_fail(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "h")
    outcomes: list[Outcome] = ["ok"] * 18 + ["failed", "expired"] + ["refused-limit", "cancelled"] * 50
    for number, outcome in enumerate(outcomes):
        log.write(a_request(number, ended=9_900.0, outcome=outcome, service="llm"))
    for number in range(19):
        log.write(a_request(number, id=f"e{number}", ended=9_900.0, outcome="failed", service="embed"))
    log.write(a_request(999, ended=9_000.0, outcome="failed", service="embed"))  # long ago
    policy = SERVICES.model_copy(update={"requests": str(tmp_path)})
    found = see(tmp_path, services=policy).look(rule("service-errors", 10))
    assert {name: one.value for name, one in found.seen.items()} == {"service llm": 10.0}
    assert found.seen["service llm"].text == "2 of 20 requests failed in 5 minutes (10%)"
    assert found.known("service llm") and not found.known("service embed"), "too few to know"
    assert see(tmp_path, services=policy).look(rule("service-errors", 11)).seen == {}


def test_the_database(tmp_path: Path) -> None:
    seen = see(tmp_path)
    assert seen.look(rule("database-down", 1)).seen == {}
    seen = see(tmp_path)
    seen.site.answers = False  # type: ignore[attr-defined]
    assert "Connection refused" in seen.look(rule("database-down", 1)).seen["slurmdbd"].text


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        ({"journal.open": 1, "journal.lag_ms": 100}, None),
        ({"journal.open": 1, "journal.lag_ms": 9000}, "9.0 s behind"),
        ({"journal.open": 0, "journal.lag_ms": 9000}, None),
        ({"journal.open": 1, "journal.lag_ms": 0, "journal.error": 28}, "errno 28"),
    ],
)
def test_the_journal(tmp_path: Path, counters: dict[str, int], expected: str | None) -> None:
    (tmp_path / "sluice.status.ctl1").write_text(json.dumps({"schema_version": 1, "counters": counters}))
    found = see(tmp_path).look(rule("journal-lag", 5)).seen
    assert (expected is None) == (not found)
    if expected is not None:
        assert expected in found["failover journal"].text


def test_without_a_status_the_journal_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownError):
        see(tmp_path).look(rule("journal-lag", 5))


# ---- the node's side ----


class Watch:
    full = False

    def __init__(self) -> None:
        self.wanted = threading.Event()


def live_reports(tmp_path: Path, alerts: NodeAlerts) -> tuple[LiveReports, list[dict[str, Any]], Watch]:
    from types import SimpleNamespace

    policy = tmp_path / "sluice.node.json"
    policy.write_text(NodePolicy(alerts=alerts).render())
    devices = [SimpleNamespace(uuid="GPU-0", index=0), SimpleNamespace(uuid="GPU-1", index=1)]
    watch = Watch()
    told: list[dict[str, Any]] = []
    state = SimpleNamespace(node="n1", devices=devices, records={}, lock=threading.Lock())
    watcher = SimpleNamespace(watches={"nvidia": watch})
    sums: Any = lambda record: {"gpus": {"GPU-0": {}}, "us": record.job}  # noqa: E731
    made = LiveReports(state, watcher, policy, sums, lambda _: 5.0, told.append)  # type: ignore[arg-type]
    return made, told, watch


def test_a_node_tells_only_where_a_rule_needs_it(tmp_path: Path) -> None:
    made, told, watch = live_reports(tmp_path, NodeAlerts())
    made.run()
    assert (told, watch.full) == ([], False)


def test_a_node_tells_of_its_gpus_and_jobs(tmp_path: Path) -> None:
    made, told, watch = live_reports(tmp_path, NodeAlerts(interval=5, readings=True))
    made.run()
    assert watch.full and watch.wanted.is_set()
    assert told == []
    reading = Reading("GPU-0", temperature_c=71.0, memory_total_bytes=100, memory_used_bytes=25, ecc_uncorrected=2)
    reading.xids = [(1.0, 79), (2.0, 79)]
    for _ in range(2):
        made.on_sample(watch, {"full": {"GPU-0": reading.to_dict(), "GPU-9": {"nonsense": 1}}})  # type: ignore[arg-type]
    made.on_sample(watch, {"usage": []})  # type: ignore[arg-type]
    made.on_tick(Tick("GPU-0", {7: Interval(3.0, 0.5), 8: Interval(3.0, None)}))
    made.on_tick(Tick("GPU-0", {7: Interval(1.0, 0.9)}))
    made._sent = -60
    made.run()
    (request,) = told
    (gpu,) = request["gpus"]
    assert (request["do"], request["node"]) == ("readings", "n1")
    assert (gpu["index"], gpu["temperature_c"], gpu["memory_percent"], gpu["errors"]) == (0, 71, 25, 6)
    assert gpu["jobs"] == {"7": 60, "8": None}
    assert made.document(time.monotonic())[0]["jobs"] == {}  # reported once


def test_a_node_tells_of_its_running_jobs(tmp_path: Path) -> None:
    """As often as the policy says, where there are jobs, in requests that munge takes."""
    made, told, watch = live_reports(tmp_path, NodeAlerts())
    records = {number: JobRecord(number, 1000, "alice", "physics", "main", "n1", 1.0) for number in (7, 8)}
    records[7].events = [Event(1.0, "limit"), *(Event(2.0 + number, "refuse") for number in range(30))]
    made._state.records.update(records)
    made.on_tick(Tick("GPU-0", {7: Interval(2.0, 0.25, 5 << 30)}))
    assert made.run() and watch.full and told == [], "the drivers are asked first"
    assert made.run() is None
    readings, running = told
    assert (readings["do"], running["do"], running["more"], running["period"]) == ("readings", "running", False, 60)
    assert readings["gpus"][0]["jobs"] == {"7": 25} and readings["gpus"][0]["job_memory"] == {"7": 5 << 30}
    first, second = running["records"]
    assert first["usage"]["gpus"]["GPU-0"]["now"] == {
        "utilisation": 25, "memory": 5 << 30, "throttled": 0.0, "watts": None,
    }  # fmt: skip
    assert (second["job"], second["usage"]["us"], "now" in second["usage"]["gpus"]["GPU-0"]) == (8, 8, False)
    assert [event["time"] for event in first["events"]] == [float(time) for time in range(22, 32)]
    store = Running()
    store.take(running)
    assert [one["job"] for one in store.answer({}, None)["records"]] == [7, 8]
    assert isinstance(made.run(), NotYet) and len(told) == 2, "not again within a minute"
    made._sent_running = -1e9
    for number in range(1000):
        made._state.records.setdefault(number, JobRecord(number, 1, "u" * 1000, "a", "p", "n1", 1.0))
    made.run()
    made.run()
    parts = [one for one in told[2:] if one["do"] == "running"]
    assert [one["more"] for one in parts] == [False] + [True] * (len(parts) - 1) and len(parts) > 2
    assert all(len(json.dumps(one)) < MAX_REQUEST for one in parts)
    for one in parts:
        store.take(one)
    assert store.answer({}, None)["next"] and len(made._state.records) == sum(len(one["records"]) for one in parts)


def test_large_events_of_one_job_do_not_silence_the_others(tmp_path: Path) -> None:
    """Attack: ten events of 62 KB made a request that munge does not take, and nothing was reported from then on."""
    made, told, _ = live_reports(tmp_path, NodeAlerts())
    for number in range(1, 5):
        made._state.records[number] = JobRecord(number, 1000, "alice", "physics", "main", "n1", 1.0)
    made._state.records[1].events = [Event(1.0, "refuse", {"open": ["x" * 62_000]}) for _ in range(10)]
    made._state.records[2].account = "x" * MAX_REQUEST
    made.run()
    made.run()
    parts = [one for one in told if one["do"] == "running"]
    assert all(len(json.dumps(one)) < MAX_REQUEST for one in parts)
    assert [one["job"] for part in parts for one in part["records"]] == [1, 3, 4]


def test_a_request_that_is_not_taken_does_not_silence_the_others(tmp_path: Path) -> None:
    made, told, _ = live_reports(tmp_path, NodeAlerts())
    for number in range(600):
        made._state.records[number] = JobRecord(number, 1, "u" * 1000, "a", "p", "n1", 1.0)

    def take(request: dict[str, Any]) -> None:
        told.append(request)
        if len(told) == 1:
            raise AnswerError("record of job 7: fields of the wrong type")

    made._give = take
    made.run()
    with pytest.raises(AnswerError):
        made.run()
    assert sum(len(one["records"]) for one in told) == 600 and len(told) > 1


def test_a_shorter_interval_holds_at_once(tmp_path: Path) -> None:
    """A node that reports every minute, as no rule needs more, does not wait for the minute's end when one does."""
    made, told, _ = live_reports(tmp_path, NodeAlerts())
    made._state.records[7] = JobRecord(7, 1000, "alice", "physics", "main", "n1", 1.0)
    made.on_tick(Tick("GPU-0", {7: Interval(2.0, 0.25)}))
    assert made.run() and made.run() is None and [one["do"] for one in told] == ["readings", "running"]
    assert isinstance(made.run(), NotYet), "not before the minute is over, and a failure before it is not over"
    made._sent -= 15
    (tmp_path / "sluice.node.json").write_text(NodePolicy(alerts=NodeAlerts(interval=5, readings=True)).render())
    made.on_tick(Tick("GPU-0", {7: Interval(2.0, 0.25)}))
    assert made.run() and made.run() is None and [one["do"] for one in told[2:]] == ["readings"]


def test_without_rules_what_fired_is_forgotten_unless_the_policy_cannot_be_read(tmp_path: Path) -> None:
    site = FakeSite(tmp_path)
    site.conf_folder = tmp_path  # type: ignore[attr-defined]
    state = alerts_folder(tmp_path) / "state.json"
    state.parent.mkdir()
    state.write_text("{}")
    file = tmp_path / "sluice.node.json"
    file.write_text("damaged")
    alerting = Alerting(site)  # type: ignore[arg-type]
    alerting.look(site)  # type: ignore[arg-type]
    assert state.exists()
    file.write_text(NodePolicy().render())
    alerting.look(site)  # type: ignore[arg-type]
    assert not state.exists()


def test_messages_wait_while_no_policy_names_their_sinks(tmp_path: Path) -> None:
    site = FakeSite(tmp_path)
    site.conf_folder = tmp_path  # type: ignore[attr-defined]
    outbox = Outbox(alerts_folder(tmp_path) / "outbox")
    outbox.put(trial("test"), ["log"])
    file = tmp_path / "sluice.node.json"
    for text in (None, "damaged"):
        if text:
            file.write_text(text)
        Alerting(site).deliver(site)  # type: ignore[arg-type]
        assert outbox.waiting()
    file.write_text(NodePolicy(alerts=NodeAlerts(sinks={"log": {"kind": "log"}})).render())
    Alerting(site).deliver(site)  # type: ignore[arg-type]
    assert not outbox.waiting()


def test_a_database_that_hangs_is_asked_once_in_an_evaluation(tmp_path: Path) -> None:
    seen = see(tmp_path)
    del seen.__dict__["tenants"]
    asked: list[tuple[str, ...]] = []

    def hang(*words: str, timeout: float) -> None:
        asked.append(words)
        raise SluiceError(f"sacctmgr gave no answer within {timeout:.0f} s")

    seen.site.run = hang  # type: ignore[attr-defined]
    for kind in ("quota", "budget", "quota"):
        with pytest.raises(UnknownError, match="slurmdbd does not answer: sacctmgr gave no answer within 10 s"):
            seen.look(rule(kind, 80))
    assert list(seen.look(rule("database-down", 1)).seen) == ["slurmdbd"]
    assert len(asked) == 1


@pytest.mark.parametrize("action", ["notify", "signal", "cancel"])
def test_an_action_is_for_one_task_and_not_its_whole_array(tmp_path: Path, action: str) -> None:
    """The number of an array's last task is that of the array."""
    site = ActingSite(tmp_path, [job(5, array_id=5, array_tasks="1"), job(4, array_id=5, array_tasks="0")])
    alerting = Alerting(site)  # type: ignore[arg-type]
    alerting._act(rule("gpu-idle", 1, action="cancel", signal="TERM"), action, 5)
    alerting._act(rule("gpu-idle", 1, action="cancel", signal="TERM"), action, 7)  # has ended
    assert site.did and all("5_1" in words and "5" not in words for words in site.did)


class ActingSite(FakeSite):
    """A leading controller, and what it did."""

    def __init__(self, folder: Path, jobs: list[Any]) -> None:
        super().__init__(folder)
        self.conf_folder, self.client, self._jobs = folder, self, jobs
        self.did: list[tuple[str, ...]] = []

    def leads(self) -> bool:
        return True

    def jobs(self, ids: list[int]) -> list[Any]:
        return [one for one in self._jobs if one.id in ids or one.array_id in ids]

    def run(self, *words: str, timeout: float) -> None:
        self.did.append(words)


def test_pools_without_capacity_and_those_that_cost_too_much(tmp_path: Path) -> None:
    pools = {
        "dear": PoolStatus("ec2", "n[1-2]", 2, 0, "p", on=2, cost_hour=200.0),
        "empty": PoolStatus("ec2", "m1", 1, 0, "q", held=1, without_capacity_since=9_000.0),
    }
    seen = see(tmp_path, fleet=FleetStatus(10_000.0, pools=pools))
    found = seen.look(rule("pool-capacity", 900)).seen
    assert found["pool empty"].text == "no capacity for 17 minutes: 1 nodes cannot be had" and len(found) == 1
    assert seen.look(rule("pool-capacity", 1001)).seen == {}
    assert seen.look(rule("pool-cost", 200)).seen["pool dear"].text == "2 machines cost 200 an hour"
    assert seen.look(rule("pool-cost", 201)).seen == {}


def test_pools_of_which_nobody_speaks_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "read_status", lambda: FleetStatus(9_900.0))
    with pytest.raises(UnknownError, match="fleetd said what it knows 100 s ago"):
        see(tmp_path).look(rule("pool-cost", 1))
