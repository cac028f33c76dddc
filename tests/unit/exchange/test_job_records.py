"""From the node's outbox over the controllers' service into the store, and into the words of AdminComment."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError
from sluice.controllerd.accounting import Comments
from sluice.controllerd.daemon import Site
from sluice.controllerd.inbox import store_records
from sluice.exchange import courier
from sluice.exchange.admin_comment import merge, parse, render
from sluice.exchange.courier import MAX_REQUEST, AnswerError, Controllers, Courier, Outbox, controllers
from sluice.exchange.inbox import Inbox
from sluice.exchange.job_records import JobRecords
from sluice.exchange.record import Grant, JobRecord, Store
from sluice.slurm import munge, munge_service
from sluice.slurm.munge import Message, MungeError

MIB = 1 << 20
NOON = 1_763_726_400.0  # 2025-11-21 12:00 UTC
DAY = 86400.0


def record(job: int = 7, node: str = "n1", started: float = NOON, ended: float | None = NOON + 60) -> JobRecord:
    made = JobRecord(job, 1000, "alice", "physics", "main", node, started, ended)
    grant = Grant(0, f"GPU-{node}", "nvidia", "H100", 80 << 30, asked=10240 * MIB, limit=10240 * MIB)
    grant.rung, grant.peak = "limiter", 9000 * MIB + 1
    made.grants.append(grant)
    return made


# ---- the store ----


def test_a_store_gives_back_what_was_added_by_day_and_job(tmp_path: Path) -> None:
    store = JobRecords(tmp_path / "jobs")
    assert list(store.between(0, NOON)) == [] and store.of_job(7) == []
    store.append([record(7), record(7, "n2"), record(8, ended=NOON + DAY)])
    store.append([record(9, ended=NOON - 13 * 3600)])
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "2025-11-20.jsonl",
        "2025-11-21.jsonl",
        "2025-11-22.jsonl",
    ]
    assert [(one.job, one.node) for one in store.between(NOON, NOON + 3600)] == [(7, "n1"), (7, "n2")]
    assert [one.job for one in store.between(0, NOON + 9 * DAY)] == [9, 7, 7, 8]
    assert list(store.between(NOON + 61, NOON + 61)) == []
    assert [one.node for one in store.of_job(7)] == ["n1", "n2"]
    assert store.of_job(7, since=NOON + DAY) == []
    assert store.folder.stat().st_mode & 0o777 == 0o700
    store.prune(NOON + DAY)
    assert [one.job for one in store.between(0, NOON + 9 * DAY)] == [8]


def test_a_record_sent_twice_counts_once_and_the_last_one_counts(tmp_path: Path) -> None:
    store = JobRecords(tmp_path)
    second = record()
    second.grants[0].refused = 5
    store.append([record()])
    store.append([second, record(started=NOON + 5)])  # the latter: a run after a requeue
    assert [one.grants[0].refused for one in store.between(0, NOON + DAY)] == [5, 0]


def test_what_a_crash_left_half_written_costs_one_line(tmp_path: Path) -> None:
    store = JobRecords(tmp_path)
    store.append([record(1), record(2)])
    path = tmp_path / "2025-11-21.jsonl"
    os.truncate(path, path.stat().st_size - 10)
    store.append([record(3)])
    assert [one.job for one in store.between(0, NOON + DAY)] == [1, 3] and store.damaged == 1


def test_a_record_without_end_and_a_time_that_is_none_are_refused(tmp_path: Path) -> None:
    for ended in (None, 1e300, float("nan")):
        with pytest.raises(SluiceError):
            JobRecords(tmp_path).append([record(ended=ended)])
    assert list(tmp_path.iterdir()) == []


# ---- the way there ----


def fake_encode(payload: bytes, *, readable_by: int | None = None) -> str:
    return base64.b64encode(json.dumps([readable_by, 0, payload.decode()]).encode()).decode()


def fake_decode(text: str) -> Message:
    try:
        _, uid, payload = json.loads(base64.b64decode(text))
        return Message(payload.encode(), uid, 0)
    except ValueError as error:
        raise MungeError("munge: Invalid credential") from error


Serve = Callable[[], int]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Serve]:
    """A function that starts the service on a store in ``tmp_path / "jobs"`` and returns its port."""
    for module in (munge, munge_service):
        monkeypatch.setattr(module, "encode", fake_encode)
        monkeypatch.setattr(module, "decode", fake_decode)
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def start() -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        store = JobRecords(tmp_path / "jobs")
        service = Inbox({"records": store_records(store, Comments(store).arrived)}, {0, 64030})
        threads.append(threading.Thread(target=service.serve, args=([listening], lambda: not stop.is_set())))
        threads[-1].start()
        return int(listening.getsockname()[1])

    yield start
    stop.set()
    for thread in threads:
        thread.join(10)


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    made = Outbox(tmp_path / "outbox", Store(tmp_path / "records"))
    made.prepare()
    made.store.prepare()
    return made


def put(outbox: Outbox, *records: JobRecord) -> None:
    for one in records:
        outbox.store.save(one)
        outbox.put(one)


HERE = Controllers(("127.0.0.1",), frozenset({0}))


def test_what_waits_is_stored_and_waits_no_more(serve: Serve, outbox: Outbox, tmp_path: Path) -> None:
    put(outbox, record(1), record(2))
    (outbox.folder / "3-1.json").touch()  # torn
    (outbox.folder / "junk.json").touch()
    assert outbox.send(HERE, serve()) == 2
    assert outbox.waiting() == []
    assert [one.job for one in JobRecords(tmp_path / "jobs").between(0, NOON + DAY)] == [1, 2]


def test_both_runs_of_a_requeued_job_are_sent(serve: Serve, outbox: Outbox, tmp_path: Path) -> None:
    put(outbox, record(1), record(1, started=NOON + 90, ended=NOON + 120))  # the store keeps the last one
    put(outbox, record(1, started=NOON + 90, ended=NOON + 120))  # written again, as after a kill half-way
    assert outbox.waiting() == [1, 1]
    assert outbox.send(HERE, serve()) == 2 and outbox.waiting() == []
    found = JobRecords(tmp_path / "jobs").of_job(1)
    assert sorted((one.started, one.ended) for one in found) == [(NOON, NOON + 60), (NOON + 90, NOON + 120)]


def test_names_that_an_earlier_version_left_and_records_that_are_too_old(outbox: Outbox) -> None:
    outbox.store.save(record(4))
    for name in ("4.json", "5.json"):  # of the second there is no record any more
        (outbox.folder / name).touch()
    outbox.prepare()
    assert outbox.waiting() == [4] and len(list(outbox.folder.iterdir())) == 1
    outbox.prune(1.0)
    assert outbox.waiting() == [4]
    outbox.prune(NOON + 100 * 366 * DAY)
    assert outbox.waiting() == []


def test_many_records_go_in_several_requests(serve: Serve, outbox: Outbox, tmp_path: Path) -> None:
    for job in range(1, 60):
        one = record(job)
        for _ in range(150):
            one.note("end", text="x" * 100)
        put(outbox, one)
    assert outbox.send(HERE, serve()) == 59
    found = {one.job: one for one in JobRecords(tmp_path / "jobs").between(0, NOON + DAY)}
    assert len(found) == 59 and len(found[1].events) == 150


def test_nobody_there_and_records_wait(serve: Serve, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    del serve
    put(outbox, record(1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SluiceError, match="no controller accepts requests"):
        outbox.send(HERE, port)
    assert outbox.waiting() == [1]
    asked: list[int] = []

    def fail(*_: Any) -> int:
        asked.append(1)
        raise SluiceError("nobody")

    monkeypatch.setattr(courier, "controllers", lambda: HERE)
    monkeypatch.setattr(outbox, "send", fail)
    messenger = Courier(outbox)
    with pytest.raises(SluiceError):
        messenger.run()
    messenger.run()  # too early to try again
    assert asked == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"started": "yesterday"},
        {"grants": "none"},
        {"schema_version": 99},
        {"job": "7"},
        {"grants": [{"index": 0, "uuid": "u", "vendor": "v", "model": "m", "total": -1}]},
    ],
)
def test_a_record_that_makes_no_sense_is_refused_whole(change: dict[str, Any], tmp_path: Path) -> None:
    store = JobRecords(tmp_path / "jobs")
    service = Inbox({"records": store_records(store, Comments(store).arrived)}, {0})
    good = json.loads(record(1).to_json())
    payload = json.dumps({"version": 1, "do": "records", "records": [good, {**good, **change}]})
    assert "error" in service.answer(payload.encode())
    assert not store.folder.exists()


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", b'{"version":2,"do":"records"}', b'{"version":1,"do":"x"}', b"[" * 9999]
)
def test_what_is_no_request_gets_an_error(payload: bytes) -> None:
    assert "error" in Inbox({}, {0}).answer(payload)


def test_a_user_is_not_heard(serve: Serve, tmp_path: Path) -> None:
    port = serve()
    forged = base64.b64encode(json.dumps([None, 1000, '{"version":1,"do":"records","records":[]}']).encode())
    for line in (forged, b"nonsense", b"\xff\xfe"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(line + b"\n")
            assert connection.recv(100) == b""
    assert not (tmp_path / "jobs").exists()


def test_a_record_that_is_not_taken_waits_behind_the_others(serve: Serve, outbox: Outbox, tmp_path: Path) -> None:
    """Attack: one job's record that the controller refused kept all later records on the node."""
    port = serve()
    for job in range(1, 13):
        bad = record(job)
        bad.grants[0].peak = -1
        put(outbox, bad, record(100 + job))
    for _ in range(2):
        with pytest.raises(AnswerError, match="wrong type"):
            outbox.send(HERE, port)
    stored = {one.job for one in JobRecords(tmp_path / "jobs").between(0, NOON + DAY)}
    assert stored == {100 + job for job in range(1, 13)} and sorted(outbox.waiting()) == list(range(1, 13))


def test_a_record_that_fits_into_no_request_is_in_nobodys_way(serve: Serve, outbox: Outbox, tmp_path: Path) -> None:
    huge = record(1)
    huge.usage = {"x": "y" * (2 * MAX_REQUEST)}
    put(outbox, huge, record(2))
    assert outbox.send(HERE, serve()) == 1 and outbox.waiting() == []
    assert [one.job for one in JobRecords(tmp_path / "jobs").between(0, NOON + DAY)] == [2]
    assert outbox.store.load(1).usage == huge.usage


def test_only_slurm_user_can_decode_what_nodes_send(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    port, readers = serve(), []

    def encode(payload: bytes, *, readable_by: int | None = None) -> str:
        readers.append(readable_by)
        return fake_encode(payload, readable_by=readable_by)

    monkeypatch.setattr(munge, "encode", encode)
    with pytest.raises(AnswerError):
        courier.ask(Controllers(("127.0.0.1",), frozenset({0}), 64030), port, b'{"version":1,"do":"x"}')
    assert readers == [64030]


def test_an_answer_of_somebody_else_is_not_believed(serve: Serve, outbox: Outbox) -> None:
    put(outbox, record(1))
    with pytest.raises(SluiceError, match="not from SlurmUser"):
        outbox.send(Controllers(("127.0.0.1",), frozenset({64030})), serve())
    assert outbox.waiting() == [1]


def test_the_controllers_are_those_of_slurm_conf(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=c\nSlurmctldHost=ctl1(10.0.0.1)\nslurmctldhost=ctl2\nSlurmUser=root\n")
    assert controllers(conf) == Controllers(("10.0.0.1", "ctl2"), frozenset({0}), 0)
    conf.write_text("SlurmUser=root\n")
    with pytest.raises(SluiceError, match="names no SlurmctldHost"):
        controllers(conf)
    conf.write_text("SlurmctldHost=a\nSlurmUser=nobody-of-this-name\n")
    with pytest.raises(SluiceError, match="no such user"):
        controllers(conf)


# ---- AdminComment ----


def test_words_for_a_job_of_two_nodes() -> None:
    first, second = record(), record(node="n2")
    second.grants[0].rung, second.grants[0].refused, second.grants[0].clean = "watchdog", 2, False
    second.note("end")
    second.usage = {"gs": 100.4, "us": float("nan"), "ej": "many"}
    text = render([first, second])
    assert text == (
        "sluice:v=1,rung=limiter+watchdog,gpus=2,asked=10240,limit=10240,peak=9001,refused=2,ended=1,unclean=1,gs=100"
    )
    assert parse(f"site's own text {text}") == dict(word.split("=") for word in text[7:].split(","))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "sluice:v=1"),
        ("JS1:H4sI", "JS1:H4sI sluice:v=1"),
        ("sluice:v=1,peak=3", "sluice:v=1"),
        ("a sluice:v=1,peak=3 b", "a b sluice:v=1"),
        ("nosluice:x", "nosluice:x sluice:v=1"),
    ],
)
def test_other_words_in_the_field_stay(before: str, after: str) -> None:
    assert merge(before, "sluice:v=1") == after


class Accounting:
    """sacct and sacctmgr for `Comments`."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}
        self.written: list[str] = []

    def output(self, *words: str) -> str:
        jobs = [int(number) for number in words[words.index("-j") + 1].split(",")]
        return "".join(f"{job}|{job}_1|{self.lines[job]}\n" for job in jobs if job in self.lines)

    def run(self, *words: str) -> None:
        job, text = words[5].removeprefix("jobid=").removesuffix("_1"), words[7].removeprefix("AdminComment=")
        self.written.append(f"{job} {text}")
        self.lines[int(job)] = "|".join([*self.lines[int(job)].split("|")[:3], text])


def site(accounting: Accounting, kind: str = "accounting_storage/slurmdbd") -> Site:
    made = SimpleNamespace(
        config=lambda: {"AccountingStorageType": kind}, commands=accounting, stopping=threading.Event()
    )
    return cast(Site, made)


def test_a_comment_is_written_once_the_job_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("sluice.controllerd.accounting.time.monotonic", lambda: clock[0])
    store, accounting = JobRecords(tmp_path), Accounting()
    comments = Comments(store)
    comments.run(site(accounting))
    accounting.lines[7] = f"RUNNING|{NOON:.0f}|Unknown|own text"
    for one in (
        record(started=NOON - 7200, ended=NOON - 7000),
        record(),
        record(node="n2"),
    ):  # the first: before a requeue
        store.append([one])
        comments.arrived(one)
    clock[0] += 2
    comments.run(site(accounting))
    assert accounting.written == []
    accounting.lines[7] = f"COMPLETED|{NOON:.0f}|{NOON + 61:.0f}|own text"
    clock[0] += 20
    comments.run(site(accounting))
    comments.run(site(accounting))
    [line] = accounting.written
    assert line.startswith("7 own text sluice:v=1,") and ",gpus=2," in line
    late = record(node="n3")
    store.append([late])
    clock[0] += 2000  # all are forgotten, and found in the store
    comments.run(site(accounting))
    comments.arrived(late)
    clock[0] += 2
    comments.run(site(accounting))
    assert ",gpus=3," in accounting.written[-1] and len(accounting.written) == 2


def test_a_comment_is_of_the_last_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeued after half a minute, and run again at once on another node."""
    monkeypatch.setattr("sluice.controllerd.accounting._QUIET_S", 0.0)
    monkeypatch.setattr("sluice.controllerd.accounting.time.time", lambda: NOON + 3600)
    store, accounting = JobRecords(tmp_path), Accounting()
    first, second = record(7, "n1", NOON, NOON + 25), record(7, "n2", NOON + 30.5, NOON + 50)
    first.restarts, second.restarts = 0, 1
    store.append([second, first])
    accounting.lines[7] = f"COMPLETED|{NOON + 30:.0f}|{NOON + 50:.0f}|"
    Comments(store).run(site(accounting))
    [line] = accounting.written
    assert ",gpus=1," in line


def test_a_new_daemon_finds_what_the_old_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.controllerd.accounting.time.time", lambda: NOON + 3600)
    monkeypatch.setattr("sluice.controllerd.accounting._QUIET_S", 0.0)
    store, accounting = JobRecords(tmp_path), Accounting()
    store.append([record(), record(8)])
    accounting.lines = {7: f"FAILED|{NOON:.0f}|{NOON + 61:.0f}|it's quoted", 8: f"FAILED|{NOON:.0f}|{NOON + 61:.0f}|"}
    Comments(store).run(site(accounting))
    assert [line.split()[0] for line in accounting.written] == ["8"]  # quotes would be changed by sacctmgr
    Comments(store).run(site(accounting))
    assert len(accounting.written) == 1  # it is there already


def test_without_accounting_nothing_is_asked(tmp_path: Path) -> None:
    comments = Comments(JobRecords(tmp_path))
    comments.arrived(record())
    comments.run(site(cast(Accounting, None), "accounting_storage/none"))
