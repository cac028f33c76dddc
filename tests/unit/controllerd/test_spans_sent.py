"""Spans on their way from accounting to a receiver, while the daemon is killed and the receiver is away."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy.node import FILE_NAME, NodePolicy
from policy.traces import NodeTraces
from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.spans import duty, waits
from sluice.controllerd.spans.duty import FOLDER, Spans, _waiting, hidden_by, sampled
from sluice.controllerd.spans.happened import ACKNOWLEDGED, JOURNAL
from sluice.controllerd.spans.job_spans import Hidden
from sluice.controllerd.spans.otlp import Receiver, headers_for, read_headers
from sluice.controllerd.spans.span import Span
from sluice.controllerd.spans.waits import Waits
from sluice.exchange.job_records import FOLDER as RECORDS
from sluice.exchange.job_records import JobRecords
from sluice.exchange.record import STAGES, JobRecord, Stage
from sluice.metrics.influx import TooLargeError
from sluice.metrics.sender import Sender
from sluice.metrics.spool import Reader, Writer
from sluice.slurm import Commands, SlurmClient
from tests.otlp_receiver import OtlpReceiver

FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
KILLS = 100 if FULL else 5
AWAY_S = 600.0 if FULL else 3.0
SACCT = """#!{python}
import json, sys, time
from pathlib import Path
words = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
mark, fields = words["--delimiter"], words["--format"].split(",")
jobs = [json.loads(line) for line in (Path(__file__).parent / "jobs").read_text().splitlines()]
wanted = words.get("--jobs")
for job in jobs:
    if job["End"] > time.time() or wanted and str(job["JobIDRaw"]) not in wanted.split(","):
        continue
    print("".join(str(job.get(name, "")) + mark for name in fields))
"""
DAEMON = """
import sys, threading
from pathlib import Path
from sluice.controllerd.daemon import Controllerd, Site
from sluice.controllerd.spans import duty
from sluice.slurm import Commands, SlurmClient

class Client:
    def config(self):
        return {{"SLURM_CONF": "{folder}/slurm.conf", "StateSaveLocation": "{folder}", "ClusterName": "main",
                 "AccountingStorageType": "accounting_storage/slurmdbd", "SlurmctldHost[0]": "here"}}
    def ping(self):
        return [type("Up", (), {{"up": True}})]

folder = Path("{folder}")
site = Site(Client(), Commands(prefix=folder), folder / "own", events=folder / "events", host="here")
print("ready", flush=True)
Controllerd(site, duty.duties(site)).serve()
"""


class Slurm:
    """Commands that show the jobs of a file, and the daemon that reads them."""

    def __init__(self, folder: Path, receiver: OtlpReceiver) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("sacct", SACCT.format(python=sys.executable)), ("squeue", "#!/bin/sh\n")):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "bin/jobs").touch()
        settings = NodeTraces(
            endpoint=receiver.endpoint, protocol=receiver.protocol, settle=1, headers_file=str(folder / "none")
        )
        (folder / FILE_NAME).write_text(NodePolicy(traces=settings).render())
        self.numbers: list[int] = []
        self.daemon: subprocess.Popen[str] | None = None

    def run_jobs(self, count: int, ago: int = 0, *, saved: bool = False) -> None:
        """Jobs that end now, or some seconds ago; `saved`: after they have saved their state, as their nodes report,
        which know all stages, as slurmctld does of their submission."""
        now = int(time.time()) - ago
        with (self.folder / "bin/jobs").open("a") as file:
            for _ in range(count):
                number = len(self.numbers) + 1
                self.numbers.append(number)
                journal = self.folder / JOURNAL
                journal.mkdir(exist_ok=True)
                with (journal / ACKNOWLEDGED).open("a") as acknowledged:
                    acknowledged.write(f"{number} {now - 20}000100 {now - 20}002500\n")
                if saved:
                    JobRecords(self.folder / RECORDS).append([staged(replace(record_of(number, now), saved=now - 5.0))])
                job: dict[str, Any] = {
                    "JobIDRaw": number, "JobID": number, "User": "alice", "State": "COMPLETED", "Submit": now - 20,
                    "Eligible": now - 20, "Start": now - 10, "End": now, "NodeList": "g-1", "ElapsedRaw": 10,
                    "Partition": "main",
                }  # fmt: skip
                if saved:
                    times = f"{now - 20}000150,37,{now - 21}900000"
                    job["AdminComment"] = f"traceparent:00-{number:032x}-{7:016x}-01 submitted:{times}"
                file.write(json.dumps(job) + "\n")

    def start(self) -> None:
        self.daemon = subprocess.Popen(
            [sys.executable, "-c", DAEMON.format(folder=self.folder)], stdout=subprocess.PIPE, text=True
        )
        assert self.daemon.stdout is not None and self.daemon.stdout.readline()

    def kill(self) -> None:
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()


@pytest.fixture(params=["http", "grpc"])
def receiver(request: pytest.FixtureRequest) -> Iterator[OtlpReceiver]:
    with OtlpReceiver(request.param) as found:
        yield found


def until(look: Callable[[], bool], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def senders(folder: Path) -> list[Path]:
    """Processes that send what is in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            if str(folder).encode() in process.read_bytes():
                found.append(process)
    return found


def test_nothing_is_lost_or_doubled_by_kills_and_a_receiver_that_is_away(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    chance = random.Random(7)
    slurm = Slurm(tmp_path, receiver)
    slurm.start()
    until((tmp_path / FOLDER / "state.json").exists)
    away_until = 0.0
    for kill in range(KILLS):
        slurm.run_jobs(chance.randrange(1, 20), saved=True)
        if kill == KILLS // 2:
            receiver.away, away_until = True, time.monotonic() + AWAY_S
        receiver.away = time.monotonic() < away_until
        time.sleep(chance.random() * 2)
        slurm.kill()
        slurm.start()
    time.sleep(max(0.0, away_until - time.monotonic()))
    receiver.away = False

    def jobs() -> set[str]:
        return {
            str(one.value.int_value)
            for span in receiver.by_id().values()
            if span.name == "slurm.job"
            for one in span.attributes
            if one.key == "slurm.job.id"
        }

    until(lambda: jobs() == set(map(str, slurm.numbers)))
    # job, journal, attempt, wait, reason, run; submit, check; node, prolog, epilog, checkpoint, stages
    until(lambda: len(receiver.by_id()) == (12 + len(STAGES)) * len(slurm.numbers))
    slurm.kill()
    until(lambda: not senders(tmp_path))  # they end when they see that their daemon has
    content: dict[bytes, set[bytes]] = {}
    for span in receiver.spans:
        content.setdefault(span.span_id, set()).add(span.SerializeToString(deterministic=True))
    assert all(len(one) == 1 for one in content.values())  # what came twice is the same
    assert receiver.resources[0]["service.name"] == "slurm" and receiver.resources[0]["slurm.cluster.name"] == "main"


def span(name: str, number: int = 1) -> Span:
    return Span(name, f"{7:032x}", f"{number:016x}", "", 1.0, 2.0, {"word": "x" * 100}, cluster="main")


def test_what_is_refused_goes_and_the_rest_arrives(tmp_path: Path, receiver: OtlpReceiver) -> None:
    receiver.refused = "bad"
    writer = Writer(tmp_path, 1 << 20)
    for number in range(1, 41):
        writer.append(span("bad" if number == 20 else "good", number).to_line())
    said: list[str] = []
    settings = NodeTraces(endpoint=receiver.endpoint, protocol=receiver.protocol, headers_file=str(tmp_path / "none"))
    sender = Sender(Reader(tmp_path), lambda: Receiver(settings), said.append, words=("spans", "the receiver"))
    while sender.step() == 0:
        pass
    arrived = {int(one, 16) for one in receiver.by_id()}
    assert 20 not in arrived and len(arrived) >= 36 and sender.status.rejected > 0
    assert len(said) == 1 and said[0].startswith("the receiver refuses spans, which are dropped")


def test_a_receiver_that_is_away_is_not_one_that_refuses(receiver: OtlpReceiver) -> None:
    settings = NodeTraces(endpoint=receiver.endpoint, protocol=receiver.protocol, headers_file="/none")
    one = Receiver(settings)
    one.write(span("good").to_line())
    receiver.refused = "good"
    with pytest.raises(TooLargeError):
        one.write(span("good").to_line())


@pytest.mark.parametrize("bad", [{"end": 2.5e11}, {"error": "\ud800"}])
def test_a_span_that_cannot_be_encoded_holds_up_no_others(
    receiver: OtlpReceiver, tmp_path: Path, bad: dict[str, Any]
) -> None:
    """As of a record that an earlier version has stored."""
    one, other = span("good"), replace(span("good"), id=f"{2:016x}")
    writer = Writer(tmp_path, 1 << 20)
    for line in (replace(one, **bad).to_line() + b" " * (1 << 10), other.to_line()):
        writer.append(line)
    settings = NodeTraces(endpoint=receiver.endpoint, protocol=receiver.protocol, headers_file="/none")
    sender = Sender(Reader(tmp_path), lambda: Receiver(settings), lambda _: None)
    while sender.step() == 0:
        pass
    assert {int(one, 16) for one in receiver.by_id()} == {2} and sender.status.rejected


@pytest.mark.parametrize("receiver", ["http"], indirect=True)
def test_a_redirection_is_no_success_and_an_endless_answer_ends(receiver: OtlpReceiver) -> None:
    one = Receiver(NodeTraces(endpoint=receiver.endpoint, headers_file="/none"))
    receiver.moved_to = receiver.endpoint + "/elsewhere"
    with pytest.raises(SluiceError, match="no answer to OTLP"):
        one.write(span("good").to_line())
    receiver.moved_to, receiver.answer_bytes = "", 256 << 20
    one.write(span("good").to_line())
    time.sleep(0.5)
    assert receiver.answered < 64 << 20


def test_what_is_no_span_goes_and_the_rest_arrives(tmp_path: Path, receiver: OtlpReceiver) -> None:
    writer = Writer(tmp_path, 1 << 20)
    writer.append(span("good", 1).to_line().replace(b'"remote_parent"', b'"of_another_version"'))
    settings = NodeTraces(endpoint=receiver.endpoint, protocol=receiver.protocol, headers_file="/none")
    sender = Sender(Reader(tmp_path), lambda: Receiver(settings), lambda _: None)
    assert sender.step() == 0
    writer.append(span("good", 2).to_line())
    assert sender.step() == 0
    assert [int(one, 16) for one in receiver.by_id()] == [2] and sender.status.rejected > 0


def test_a_full_spool_drops_the_oldest_and_counts_them(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1 << 20)
    for number in range(1, 8001):
        writer.append(span("good", number).to_line())
    found = Reader(tmp_path).next()
    assert writer.dropped > 0 and writer.size <= (1 << 20) + (128 << 10)
    assert found is not None and int(Span.from_line(found[0].splitlines()[0]).id, 16) > 1


def test_headers_are_read_from_a_private_file_and_sent_over_tls(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("Authorization: Bearer abc\n\nx-scope: main \n")
    path.chmod(0o644)
    with pytest.raises(SluiceError, match="others than its owner can read it"):
        read_headers(path)
    path.chmod(0o600)
    assert read_headers(path) == {"Authorization": "Bearer abc", "x-scope": "main"}
    plain = NodeTraces(endpoint="http://receiver:4318", headers_file=str(path))
    with pytest.raises(SluiceError, match="not sent over plain HTTP"):
        headers_for(plain)
    assert headers_for(plain.model_copy(update={"headers_without_tls": True}))
    assert headers_for(plain.model_copy(update={"endpoint": "https://receiver:4318"}))
    path.write_text("X-Token-Bin: abc\n")
    secure = plain.model_copy(update={"endpoint": "https://receiver:4318"})
    assert headers_for(secure)
    with pytest.raises(SluiceError, match="gRPC cannot send X-Token-Bin") as raised:
        headers_for(secure.model_copy(update={"protocol": "grpc"}))
    assert "abc" not in str(raised.value)
    path.write_text("no header\n")
    with pytest.raises(SluiceError, match=":1: not a header"):
        read_headers(path)
    assert read_headers(tmp_path / "none") == {}


def test_what_is_private_stays_unless_the_policy_says_otherwise() -> None:
    nothing, all_of_it = NodeTraces(), NodeTraces(private=["jobs", "users", "accounts", "nodes"])
    assert hidden_by("(null)", nothing) == Hidden()
    assert hidden_by("accounts,nodes,users", nothing) == Hidden(users=True, accounts=True, nodes=True)
    with pytest.raises(SluiceError, match="nothing is sent"):
        hidden_by("jobs,usage", nothing)
    assert hidden_by("jobs,users,accounts", all_of_it) == Hidden()
    assert hidden_by("jobs,users", NodeTraces(private=["jobs"])) == Hidden(users=True)


@dataclass
class OneLook:
    """The duty in this process, without a sender."""

    slurm: Slurm
    site: Site
    spans: Spans = field(default_factory=Spans)

    def look(self) -> list[Span]:
        """Look for jobs; all spans in the spool then."""
        self.spans._due = 0.0
        self.spans.run(self.site)
        found = Reader(self.slurm.folder / FOLDER).next(1 << 20)
        return [Span.from_line(line) for line in found[0].splitlines()] if found else []

    def restart(self) -> None:
        self.spans = Spans()

    def endpoint(self, endpoint: str, settle: int = 1) -> None:
        settings = NodeTraces(endpoint=endpoint, settle=settle, headers_file="/none")
        (self.slurm.folder / FILE_NAME).write_text(NodePolicy(traces=settings).render())


@pytest.fixture
def one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneLook:
    """At first nothing has ended since spans were switched on, an hour ago."""
    monkeypatch.setattr(duty.SenderProcess, "keep", lambda *_: None)
    config = {
        "SLURM_CONF": f"{tmp_path}/slurm.conf",
        "StateSaveLocation": str(tmp_path),
        "ClusterName": "main",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "SlurmctldHost[0]": "here",
    }
    client = SimpleNamespace(config=lambda: config, ping=lambda: [SimpleNamespace(up=True)])
    site = Site(
        cast(SlurmClient, client), Commands(prefix=tmp_path), tmp_path / "own", events=tmp_path / "events", host="here"
    )
    receiver = SimpleNamespace(endpoint="http://receiver:4318", protocol="http")
    made = OneLook(Slurm(tmp_path, cast(OtlpReceiver, receiver)), site)
    made.look()
    state = tmp_path / FOLDER / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"cursor": time.time() - 3600}))
    made.restart()
    return made


def record_of(job: int, ended: float) -> JobRecord:
    return JobRecord(
        job=job, uid=1, user="alice", account="physics", partition="gpu", node="g-1", started=ended - 10, ended=ended
    )  # fmt: skip


def staged(record: JobRecord) -> JobRecord:
    """With all stages, each of half a second."""
    return replace(record, stages=[Stage(name, at / 2, 0.5) for at, name in enumerate(STAGES)])


def test_records_of_the_newest_jobs_alone_are_at_hand(one_look: OneLook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duty, "_MOST_JOBS", 2)
    one_look.look()
    for job in (1, 2, 3):
        one_look.spans.arrived(record_of(job, time.time() - 1800))
    assert [len(one_look.spans._records_of(job)) for job in (1, 2, 3)] == [0, 1, 1]
    assert one_look.spans._late == {2, 3}


def test_a_full_disk_delays_spans(one_look: OneLook, monkeypatch: pytest.MonkeyPatch) -> None:
    one_look.slurm.run_jobs(3, ago=60)
    with monkeypatch.context() as full:
        full.setattr(Writer, "append", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            one_look.look()
    assert len({span.id for span in one_look.look()}) == 18


def test_a_late_record_outlasts_accounting_that_is_away_and_a_restart(one_look: OneLook) -> None:
    one_look.slurm.run_jobs(1, ago=1800)
    assert {span.name for span in one_look.look()} >= {"slurm.job"}
    one_look.look()
    one_look.spans.arrived(record_of(1, time.time() - 1800))
    sacct = one_look.slurm.folder / "bin/sacct"
    sacct.rename(sacct.with_suffix(".away"))
    with pytest.raises(SluiceError, match="sacct"):
        one_look.look()
    one_look.restart()
    sacct.with_suffix(".away").rename(sacct)
    JobRecords(one_look.slurm.folder / RECORDS).append([record_of(1, time.time() - 1800)])
    assert "slurm.node" in {span.name for span in one_look.look()}


@pytest.mark.parametrize("off_s", [3 * 3600.0, -3 * 3600.0])
def test_the_record_of_a_node_whose_clock_is_hours_off(one_look: OneLook, off_s: float) -> None:
    one_look.slurm.run_jobs(1, ago=1800)
    record = record_of(1, time.time() - 1800)
    true = [replace(staged(record), ran_s=10.0, started_uptime=5.0)]
    wrong = [replace(true[0], started=record.started + off_s, ended=(record.ended or 0) + off_s)]
    JobRecords(one_look.slurm.folder / RECORDS).append(wrong)
    one_look.restart()
    spans = {span.name: span for span in one_look.look()}
    job, node = spans["slurm.job"], spans["slurm.node"]
    assert {f"slurm.node.{name}" for name in STAGES} <= set(spans)
    assert job.start <= node.start <= node.end <= job.end + 1
    assert node.attributes["slurm.clock.ahead_s"] == pytest.approx(off_s, abs=2)


def test_a_requeued_job_that_waits_has_not_ended_even_after_a_restart(one_look: OneLook) -> None:
    one_look.slurm.run_jobs(1, ago=1800)
    folder = one_look.slurm.folder / "bin"
    (folder / "jobs").write_text((folder / "jobs").read_text().replace("COMPLETED", "REQUEUED"))
    (folder / "squeue").write_text("#!/bin/sh\necho '1|(null)'\n")
    assert one_look.look() == []
    one_look.restart()
    (folder / "squeue").write_text("#!/bin/sh\n")
    assert "slurm.job" in {span.name for span in one_look.look()}


@pytest.mark.parametrize(("ended_s", "is_sent"), [(5, False), (120, True)])
def test_a_job_that_ended_before_slurmctld_said_what_it_was_waits_for_that(
    one_look: OneLook, ended_s: int, is_sent: bool
) -> None:
    """slurmdbd makes a row of a job whose end comes before its start; slurmctld sends starts every 5 s."""
    one_look.slurm.run_jobs(1, ago=ended_s)
    jobs = one_look.slurm.folder / "bin/jobs"
    whole = jobs.read_text()
    jobs.write_text(json.dumps(json.loads(whole) | {"Partition": ""}) + "\n")
    assert bool(one_look.look()) is is_sent
    one_look.restart()
    jobs.write_text(json.dumps(json.loads(whole) | {"JobID": "7_3"}) + "\n")
    tasks = [span.attributes.get("slurm.array.task_id") for span in one_look.look() if span.name == "slurm.job"]
    assert tasks == ([None] if is_sent else ["3"])


def test_nodes_have_time_to_report_and_what_is_long_sent_is_forgotten(one_look: OneLook) -> None:
    one_look.endpoint("http://receiver:4318", settle=60)
    one_look.slurm.run_jobs(1)
    assert one_look.look() == []
    one_look.slurm.run_jobs(1, ago=1800)
    one_look.restart()
    state = one_look.slurm.folder / FOLDER / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"cursor": time.time() - 3600}))
    assert {span.attributes["slurm.job.id"] for span in one_look.look()} >= {2}
    one_look.look()
    assert not any(key.startswith("2:") for key in json.loads(state.read_text())["done"])


def test_what_is_in_the_spool_is_not_asked_for_again(one_look: OneLook, monkeypatch: pytest.MonkeyPatch) -> None:
    one_look.slurm.run_jobs(3, ago=60)
    once = one_look.look()
    asked: list[int] = []
    rows = duty._rows
    monkeypatch.setattr(duty, "_rows", lambda site, numbers: asked.extend(numbers) or rows(site, numbers))
    one_look.slurm.run_jobs(1, ago=60)
    assert len(one_look.look()) == len(once) + 6
    assert asked == [4]


def test_the_state_is_not_written_for_each_batch(one_look: OneLook, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100,000 jobs in it, it has 4 MB."""
    one_look.look()
    monkeypatch.setattr(duty, "_BATCH", 1)
    written: list[Path] = []
    monkeypatch.setattr(duty.State, "write", lambda _, path: written.append(path))
    one_look.slurm.run_jobs(5, ago=60)
    assert len(one_look.look()) == 30
    assert len(written) == 1


def test_what_ends_while_it_is_off_is_not_sent(one_look: OneLook) -> None:
    one_look.endpoint("")
    assert one_look.look() == []
    one_look.slurm.run_jobs(3, ago=900)
    one_look.endpoint("http://receiver:4318")
    assert one_look.look() == []
    assert json.loads((one_look.slurm.folder / FOLDER / "state.json").read_text())["cursor"] > time.time() - 60


def test_reasons_are_bounded_over_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_MOST_IN_ALL", 10)
    found = Waits(tmp_path)
    for job in range(1, 5):
        for time_s in range(4):
            found._take(job, time_s, f"reason {time_s}")
    assert sum(len(found.of_jobs({job})) for job in range(1, 5)) <= 10
    assert len(found.of_jobs({4})) == 4


def test_dependencies_and_samples() -> None:
    many = ",".join(f"afterany:{number}(unfulfilled)" for number in range(1, 20_000))
    assert list(_waiting(f"20000|{many}\n")) == [(20_000, list(range(1, 33)))]
    listing = (
        "20|afterok:17(unfulfilled),afterany:18_*(unfulfilled)?afterok:19_3+5\n21|(null)\n22|singleton(unfulfilled)\n"
    )
    assert list(_waiting(listing)) == [(20, [17, 18, 19]), (21, []), (22, [])]
    spans = [Span("one", f"{number << 60:032x}", "1" * 16, "", 1, 2) for number in range(16)]
    assert [len(sampled(spans, share)) for share in (0.0, 0.25, 1.0)] == [0, 4, 16]
