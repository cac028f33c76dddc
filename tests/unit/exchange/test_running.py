"""Figures of running jobs: what nodes report, who may ask for what, and how reports use it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange import running as module
from sluice.exchange.courier import MAX_REQUEST, Controllers
from sluice.exchange.inbox import Inbox
from sluice.exchange.record import Grant, JobRecord
from sluice.exchange.running import Running, ask_running, live_of
from sluice.report.summaries import Uses
from sluice.slurm.munge_service import RefusedError

MIB = 1 << 20
ALICE, BOB = 2001, 2002


def record(job: int, node: str = "n1", uid: int = ALICE, **more: Any) -> dict[str, Any]:
    made = JobRecord(job, uid, "alice", "physics", "main", node, 1000.0)
    made.grants.append(Grant(0, "GPU-0", "nvidia", "H100", 80 << 30, peak=9 << 30))
    use = {
        "seconds": 50.0,
        "utilisation": {"mean": 40.0, "peak": 90.0},
        "now": {"utilisation": 12.5, "memory": 5 << 30},
    }
    made.usage = {"gpus": {"GPU-0": use}, "gs": 50.0, "us": 20.0, "at": 1050.0}
    return {**json.loads(made.to_json()), **more}


def tell(store: Running, node: str, *records: dict[str, Any], **more: Any) -> None:
    store.take({"node": node, "records": list(records), "period": 60, "more": False, **more})


def jobs(store: Running, uid: int | None = None, **request: Any) -> list[tuple[int, str]]:
    return [(one["job"], one["node"]) for one in store.answer(request, uid)["records"]]


def test_the_latest_of_each_node_is_kept_for_a_while() -> None:
    now = [0.0]
    store = Running(lambda: now[0])
    tell(store, "n1", record(7), record(8))
    tell(store, "n2", record(7, "n2"))
    assert jobs(store) == [(7, "n1"), (7, "n2"), (8, "n1")]
    tell(store, "n1", record(8))
    tell(store, "n1", record(9), more=True)
    assert jobs(store) == [(7, "n2"), (8, "n1"), (9, "n1")]
    assert jobs(store, jobs=[9, 7]) == [(7, "n2"), (9, "n1")]
    tell(store, "n1")
    assert jobs(store) == [(7, "n2")]
    now[0] = 149
    assert jobs(store) == [(7, "n2")]
    now[0] = 151  # two and a half periods
    assert jobs(store) == []
    tell(store, "n3")
    assert store._size == 0, "what is forgotten takes no room"


def test_when_jobs_saved_is_known_of_each_node_that_reports() -> None:
    now = [0.0]
    store = Running(lambda: now[0])
    tell(store, "n1", record(7, saved=1000.5), record(8))
    now[0] = 100
    tell(store, "n2", record(7, "n2"))
    assert store.saved() == {7: [1000.5, None], 8: [None]}
    now[0] = 151
    assert store.saved() == {7: [None]}
    with pytest.raises(SluiceError, match="wrong type"):
        tell(store, "n1", record(7, saved="now"))


def test_users_learn_of_their_own_jobs_only() -> None:
    store = Running()
    tell(store, "n1", record(7), record(8, uid=BOB))
    asked = {"ask-running": lambda request, uid: store.answer(request, None if uid == 0 else uid)}
    inbox = Inbox({"running": store.take}, {0}, asked)

    def ask(uid: int, **request: Any) -> Any:
        return inbox.answer(json.dumps({"version": 1, "do": "ask-running", **request}).encode(), uid)

    assert [one["job"] for one in ask(ALICE)["ok"]["records"]] == [7]
    assert [one["job"] for one in ask(ALICE, jobs=[7, 8])["ok"]["records"]] == [7]
    assert [one["job"] for one in ask(BOB, after=[7, "n1"])["ok"]["records"]] == [8]
    assert [one["job"] for one in ask(0)["ok"]["records"]] == [7, 8]
    for payload in (b'{"version":1,"do":"running","node":"n1","records":[],"period":1}', b"[", b"7", b"{}"):
        with pytest.raises(RefusedError):
            inbox.answer(payload, ALICE)
    assert jobs(store) == [(7, "n1"), (8, "n1")]


@pytest.mark.parametrize(
    "change",
    [{"node": ""}, {"node": 5}, {"records": {}}, {"records": [5]}, {"records": [{}]}, {"period": "x"}, {"period": -1},
     {"records": [record(7, ended=5.0)]}, {"records": [record(7, uid="root")]}, {"records": [record(7, started=None)]}],
)  # fmt: skip
def test_what_is_no_node_s_telling_is_refused(change: dict[str, Any]) -> None:
    store = Running()
    with pytest.raises(SluiceError):
        store.take({"node": "n1", "records": [], "period": 60, **change})
    assert jobs(store) == []


@pytest.mark.parametrize(
    "request_",
    [{"jobs": 7}, {"jobs": ["x"]}, {"jobs": [0] * 10_001}, {"jobs": [(1 << 61) - 1]}, {"after": 3}, {"after": []}],
)
def test_what_is_no_question_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(SluiceError):
        Running().answer(request_, ALICE)


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 3 * len(json.dumps(record(7))))
    store = Running()
    tell(store, "n1", record(7), record(8))
    with pytest.raises(SluiceError, match="more jobs than are kept"):
        tell(store, "n2", record(9, "n2"), record(10, "n2"))
    tell(store, "n1", record(7))
    tell(store, "n2", record(9, "n2"))
    assert jobs(store) == [(7, "n1"), (9, "n2")]


def test_many_jobs_come_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Running()
    for node in ("n1", "n2", "n3"):
        tell(store, node, *(record(job, node, user="u" * 900) for job in range(300)))
    sizes = []

    def answer(to: Controllers, port: int, payload: bytes) -> dict[str, Any]:
        page = store.answer(json.loads(payload), None)
        sizes.append(len(json.dumps(page)))
        return page

    monkeypatch.setattr(module, "ask", answer)
    found = ask_running(to=Controllers(("ctl1",), frozenset({0})))
    assert [(one.job, one.node) for one in found] == [(job, f"n{n}") for job in range(300) for n in (1, 2, 3)]
    assert len(sizes) > 3 and max(sizes) < MAX_REQUEST


def test_what_reports_and_top_make_of_it() -> None:
    records = [JobRecord.from_json(json.dumps(record(7, node)), "test") for node in ("n1", "n2")]
    use = Uses(records).find(7, 1000)
    assert use is not None and (use.device_s, use.busy_s, use.reported_at) == (100, 40, 1050)
    assert [(gpu.node, gpu.now_percent, gpu.now_mib) for gpu in use.gpus] == [("n1", 12.5, 5120), ("n2", 12.5, 5120)]
    shown = live_of(records).jobs[7]
    assert [(one.node, one.index, one.percent, one.used_mib) for one in shown] == [
        ("n1", 0, 12.5, 5120),
        ("n2", 0, 12.5, 5120),
    ]
    for broken in (None, [], {"gpus": 5}, {"gpus": {"GPU-0": {"now": {"utilisation": "x", "memory": -1}}}}):
        records[0].usage = broken  # type: ignore[assignment]
        assert live_of(records[:1]).jobs[7][0].percent is None
