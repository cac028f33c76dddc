"""Spans on their way from accounting to a receiver, while the daemon is killed and the receiver is away."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.node import FILE_NAME, NodePolicy
from policy.traces import NodeTraces
from sluice.base.errors import SluiceError
from sluice.controllerd.spans.duty import FOLDER, _waiting, hidden_by, sampled
from sluice.controllerd.spans.job_spans import Hidden
from sluice.controllerd.spans.otlp import Receiver, headers_for, read_headers
from sluice.controllerd.spans.span import Span
from sluice.metrics.influx import TooLargeError
from sluice.metrics.sender import Sender
from sluice.metrics.spool import Reader, Writer
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
from sluice.slurm import Commands

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

    def run_jobs(self, count: int) -> None:
        """Jobs that end now."""
        now = int(time.time())
        with (self.folder / "bin/jobs").open("a") as file:
            for _ in range(count):
                number = len(self.numbers) + 1
                self.numbers.append(number)
                job: dict[str, Any] = {
                    "JobIDRaw": number, "JobID": number, "User": "alice", "State": "COMPLETED", "Submit": now - 20,
                    "Eligible": now - 20, "Start": now - 10, "End": now, "NodeList": "g-1", "ElapsedRaw": 10,
                }  # fmt: skip
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


def test_nothing_is_lost_or_doubled_by_kills_and_a_receiver_that_is_away(
    tmp_path: Path, receiver: OtlpReceiver
) -> None:
    chance = random.Random(7)
    slurm = Slurm(tmp_path, receiver)
    slurm.start()
    until((tmp_path / FOLDER / "state.json").exists)
    away_until = 0.0
    for kill in range(KILLS):
        slurm.run_jobs(chance.randrange(1, 20))
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
    until(lambda: len(receiver.by_id()) == 5 * len(slurm.numbers))  # job, attempt, wait, reason, run
    slurm.kill()
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


def test_dependencies_and_samples() -> None:
    listing = (
        "20|afterok:17(unfulfilled),afterany:18_*(unfulfilled)?afterok:19_3+5\n21|(null)\n22|singleton(unfulfilled)\n"
    )
    assert list(_waiting(listing)) == [(20, [17, 18, 19]), (21, []), (22, [])]
    spans = [Span("one", f"{number << 60:032x}", "1" * 16, "", 1, 2) for number in range(16)]
    assert [len(sampled(spans, share)) for share in (0.0, 0.25, 1.0)] == [0, 4, 16]
