"""The daemon's side of the snapshot: read once for all, kept where Slurm does not answer, given to whom it may."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import pwd
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from policy.service_jobs import FILE_NAME as SERVICES_FILE
from policy.service_jobs import ServicePolicy, ServicesPolicy
from sluice.base.errors import SluiceError
from sluice.client import models
from sluice.controllerd import published_nodes
from sluice.controllerd import snapshot as module
from sluice.controllerd.daemon import Site
from sluice.controllerd.readings import readings_of
from sluice.controllerd.snapshot import Publisher, Settings
from sluice.exchange.moves import FILE_NAME as MOVES_FILE
from sluice.exchange.plugin_list import checksummed
from sluice.exchange.preflight_jobs import FILE_NAME as JOBS_FILE
from sluice.exchange.preflight_jobs import JobPreflight, write_preflights
from sluice.exchange.saves import SAVES_FILE, JobSaves, Saves
from sluice.exchange.serve_status import ServiceStatus, Status, replica_status
from sluice.exchange.serving import Abilities, Callers, Heartbeat, Load, State
from sluice.exchange.snapshot import ask, encode
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.answers import Job, Node, SeenJob
from sluice.slurm.job_changes import WANTED
from tests.unit.controllerd.slurm_objects import a_job, a_node
from tests.unit.slurm.test_job_changes import a_line, look, put

KEY = b"k" * 32


class FakeSlurm:
    """The client, and how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs_now: list[Job] = [a_job(1), a_job(2)]
        self.nodes_now: list[Node] = [a_node("n1", gres_used="gpu:h100:1(IDX:2)")]
        self.down = False
        self.asked = 0
        self.looked: list[int] = []

    def config(self) -> dict[str, str]:
        return {
            "ClusterName": "c", "StateSaveLocation": str(self.folder), "SlurmUser": f"x({os.getuid()})",
            "SLURM_VERSION": "24.11.5", "PrivateData": "jobs,usage", "SLURM_CONF": str(self.folder / "slurm.conf"),
            "AuthAltTypes": "auth/jwt", "AuthAltParameters": f"jwt_key={self.folder}/key",
        }  # fmt: skip

    def each_job(self) -> Iterator[SeenJob]:
        self.asked += 1
        for job in self.jobs_now:
            yield SeenJob(job.id, hash(repr(job)), partial(self._look, job))
        if self.down:
            raise SluiceError("squeue: Unable to contact slurm controller")

    def _look(self, job: Job) -> Job:
        self.looked.append(job.id)
        return job

    def nodes(self) -> list[Node]:
        return self.nodes_now

    def partitions(self) -> list[Any]:
        return []


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    (tmp_path / "key").write_bytes(KEY)
    return FakeSlurm(tmp_path)


@pytest.fixture
def publisher(slurm: FakeSlurm, tmp_path: Path) -> Publisher:
    site = Site(cast(SlurmClient, slurm), Commands(), tmp_path / "state", events=tmp_path / "events", host="here")
    user = pwd.getpwuid(os.getuid()).pw_name
    return Publisher(site, Settings(tmp_path / "socket", user, tmp_path / "inventory", tmp_path / "policy"))


def request(publisher: Publisher, **words: Any) -> dict[str, Any]:
    return dict(json.loads(publisher.answer(json.dumps({"version": 1, **words}).encode())))


def rows(publisher: Publisher, section: str) -> dict[str, Any]:
    return {key: value for part, key, value in request(publisher, do="changes")["rows"] if part == section}


def read_again(publisher: Publisher, group: str) -> None:
    for part in publisher.groups[group]:
        part.due = 0.0
    publisher.refresh(group)


def test_nothing_is_read_while_nobody_asks_and_once_for_all_who_do(publisher: Publisher, slurm: FakeSlurm) -> None:
    publisher.refresh("jobs")
    assert slurm.asked == 0
    for _ in range(100):
        request(publisher, do="changes")
    for _ in range(5):
        publisher.refresh("jobs")
    assert slurm.asked == 1, "within its period"
    assert set(rows(publisher, "jobs")) == {"1", "2"}


LAUNCH = "0123456789abcdef"


def test_services_are_published_with_their_jobs_and_no_secret(
    publisher: Publisher, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request(publisher, do="changes")
    read_again(publisher, "services")
    assert rows(publisher, "services") == {} and rows(publisher, "parts")["services"]["problem"] == ""
    service = ServicePolicy(name="llm", tenant="nlp", user="nlp-serve", engine="vllm", callers=("*",))
    (tmp_path / SERVICES_FILE).write_text(ServicesPolicy(services={"llm": service}).render())
    job = replace(a_job(7, user="nlp-serve", account="nlp"), name=f"sluice-serve.llm.{LAUNCH}", state="RUNNING")
    slurm.jobs_now = [*slurm.jobs_now, job]
    publisher.refresh("jobs")
    read_again(publisher, "services")
    found = rows(publisher, "services")["llm"]
    assert (found["state"], found["waiting"], [one["job"] for one in found["replicas"]]) == ("running", None, [7])
    load, secret, print_ = Load(running=2), "5" * 64, "f" * 64
    beat = Heartbeat("llm", LAUNCH, 7, "n1", 4000, print_, secret, State.READY, Abilities(), 16, load, None)
    assert rows(publisher, "serving")["serving"]["open_whole"] is False, "replicad does not answer"
    callers = Callers({"user/alice": 2, "tenant/nlp": 2})
    said = Status({"llm": ServiceStatus(waiting=3)}, {LAUNCH: replica_status(beat, 5.0)}, callers)
    monkeypatch.setattr(module, "ask_status", lambda path, timeout: said)
    read_again(publisher, "services")
    found = rows(publisher, "services")["llm"]
    assert (found["state"], found["waiting"], found["replicas"][0]["running"]) == ("ready", 3, 2)
    assert rows(publisher, "serving-open") == {"user/alice": {"requests": 2}, "tenant/nlp": {"requests": 2}}
    assert rows(publisher, "serving")["serving"]["open_whole"] is True
    assert beat.secret not in json.dumps(found) and beat.fingerprint not in json.dumps(found)
    slurm.jobs_now = slurm.jobs_now[:2]
    read_again(publisher, "jobs")
    monkeypatch.setattr(module, "ask_status", lambda path, timeout: Status({}, {}))
    read_again(publisher, "services")
    assert rows(publisher, "services")["llm"]["replicas"] == []


def test_what_slurm_does_not_answer_stays_and_says_since_when(publisher: Publisher, slurm: FakeSlurm) -> None:
    request(publisher, do="changes")
    publisher.refresh("jobs")
    good = rows(publisher, "parts")["jobs"]
    slurm.down = True
    for _ in range(2):
        read_again(publisher, "jobs")
        stale = rows(publisher, "parts")["jobs"]
        assert stale["stale_since"] == good["at"] and "contact" in stale["problem"]
        assert set(rows(publisher, "jobs")) == {"1", "2"}
    slurm.down, slurm.jobs_now = False, slurm.jobs_now[1:]
    read_again(publisher, "jobs")
    assert rows(publisher, "parts")["jobs"]["stale_since"] is None and set(rows(publisher, "jobs")) == {"2"}


def test_changes_that_slurmctld_writes_are_followed_and_nothing_is_listed(
    publisher: Publisher, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sluice.records"
    folder.mkdir()
    put(folder, 1, ["begin", "x"], look())
    request(publisher, do="changes")
    publisher.refresh("jobs")
    assert slurm.asked == 1 and (folder / WANTED).exists()
    put(folder, 1, a_line(2, Comment="changed"), a_line(3), ["gone", 1], look(later := time.time() + 1))
    read_again(publisher, "jobs")
    assert slurm.asked == 1
    found = rows(publisher, "jobs")
    assert "1" not in found and found["2"]["comment"] == "changed" and found["3"]["state"] == "PENDING"
    assert rows(publisher, "parts")["jobs"]["at"] == round(later, 2)

    publisher.check()
    assert slurm.asked == 1, "not yet"
    monkeypatch.setattr(module, "_CHECK_S", 0.0)
    listing = slurm.each_job

    def meanwhile() -> Iterator[SeenJob]:
        yield from listing()
        put(folder, 1, a_line(2, Comment="newer"), a_line(4), ["gone", 3], look())
        read_again(publisher, "jobs")

    monkeypatch.setattr(slurm, "each_job", meanwhile)
    publisher.check()
    found = rows(publisher, "jobs")
    assert slurm.asked == 2 and found["1"]["id"] == 1, "a listing counts for what nobody said had changed"
    assert found["2"]["comment"] == "newer" and "3" not in found and found["4"]["id"] == 4

    monkeypatch.setattr(slurm, "each_job", listing)
    put(folder, 1, ["lost"], look())
    read_again(publisher, "jobs")
    assert slurm.asked == 3 and rows(publisher, "jobs").keys() == {"1", "2"}, "all again"


def test_slurmctld_that_looks_no_more_is_asked_itself(
    publisher: Publisher, slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sluice.records"
    folder.mkdir()
    put(folder, 1, ["begin", "x"], look())
    request(publisher, do="changes")
    publisher.refresh("jobs")
    slurm.down = True
    monkeypatch.setattr(module, "_LATE_S", -1.0)
    read_again(publisher, "jobs")
    stale = rows(publisher, "parts")["jobs"]
    assert stale["stale_since"] and "does not come" in stale["problem"] and slurm.asked == 1
    monkeypatch.setattr(module, "FOLLOWED_S", -1.0)
    read_again(publisher, "jobs")
    assert "contact" in rows(publisher, "parts")["jobs"]["problem"] and slurm.asked == 2


def test_a_part_that_hangs_is_stale_before_its_time_out_and_read_soon_after_it(
    publisher: Publisher, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE_S", 0.1)
    request(publisher, do="changes")
    publisher.refresh("jobs")
    (part,) = publisher.groups["jobs"]
    part.period_s, part.due = 0.1, 0.0
    goes_on = threading.Event()

    def hangs() -> Iterator[SeenJob]:
        assert goes_on.wait(30)
        raise SluiceError("squeue: timed out")

    monkeypatch.setattr(slurm, "each_job", hangs)
    began = time.monotonic()
    reading = threading.Thread(target=publisher.refresh, args=("jobs",))
    reading.start()
    until = time.monotonic() + 10
    while rows(publisher, "parts")["jobs"]["stale_since"] is None and time.monotonic() < until:
        time.sleep(0.05)
    assert rows(publisher, "parts")["jobs"]["problem"] == "no answer yet"
    goes_on.set()
    reading.join(10)
    assert "timed out" in rows(publisher, "parts")["jobs"]["problem"]
    took = time.monotonic() - began
    assert part.due <= began + took + 2.5, "not twice as long as the time-out"


def test_where_the_sockets_folder_is_not_there_no_duty_fails(tmp_path: Path, slurm: FakeSlurm) -> None:
    site = Site(cast(SlurmClient, slurm), Commands(), tmp_path / "state")
    folder = tmp_path / "run"
    module.configure(site, Settings(folder / "socket"))
    assert module.duties(site) == []
    module.make_folder(folder, os.geteuid())
    module.make_folder(folder, os.geteuid())
    assert folder.stat().st_mode & 0o777 == 0o755
    assert len(module.duties(site)) == 12


def test_gpus_have_their_use_and_private_data_is_published(publisher: Publisher) -> None:
    request(publisher, do="changes")
    for group in ("nodes", "site"):
        publisher.refresh(group)
    gpus = rows(publisher, "gpus")
    assert [gpus[f"n1/{index}"]["use"] for index in range(4)] == ["free", "free", "whole", "free"]
    assert rows(publisher, "cluster")["cluster"]["private_data"] == ["jobs", "usage"]
    parts = rows(publisher, "parts")
    assert parts["inventory"]["stale_since"] and parts["events"]["stale_since"] is None


def test_rows_are_made_only_of_nodes_that_have_changed(
    publisher: Publisher, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(section: str, key: str, value: Any) -> bytes:
        made.append(key)
        return encode(section, key, value)

    def read() -> list[str]:
        made.clear()
        read_again(publisher, "nodes")
        return sorted(made)

    monkeypatch.setattr(published_nodes, "encode", noted)
    slurm.nodes_now = [a_node("n1"), a_node("n2")]
    request(publisher, do="changes")
    assert read() == ["n1", *(f"n1/{index}" for index in range(4)), "n2", *(f"n2/{index}" for index in range(4))]
    assert read() == []
    slurm.nodes_now = [a_node("n1"), a_node("n2", gres="gpu:h100:2", gres_used="gpu:h100:1(IDX:0)")]
    assert read() == ["n2", "n2/0", "n2/1"]
    assert set(rows(publisher, "gpus")) == {"n1/0", "n1/1", "n1/2", "n1/3", "n2/0", "n2/1"}
    assert rows(publisher, "gpus")["n2/0"]["use"] == "whole"
    slurm.nodes_now = [a_node("n2", gres="gpu:h100:2", gres_used="gpu:h100:1(IDX:0)")]
    assert read() == []
    assert set(rows(publisher, "nodes")) == {"n2"} and set(rows(publisher, "gpus")) == {"n2/0", "n2/1"}
    slurm.nodes_now.append(a_node("n1"))
    assert read() == ["n1", *(f"n1/{index}" for index in range(4))]
    assert set(rows(publisher, "nodes")) == {"n1", "n2"} and len(rows(publisher, "gpus")) == 6


def test_rows_follow_what_is_not_in_slurms_record(
    publisher: Publisher, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    out: list[dict[str, str]] = []
    monkeypatch.setattr(module, "controller_of", lambda site: SimpleNamespace(listing=lambda: {"rows": out}))

    def report(percent: float, *jobs: int) -> None:
        gpu = {"index": 1, "utilisation_percent": percent, "jobs": dict.fromkeys(map(str, jobs), percent)}
        readings_of(publisher.site).take({"node": "n1", "gpus": [gpu]})

    def seen() -> tuple[Any, ...]:
        read_again(publisher, "nodes")
        row = rows(publisher, "gpus")["n1/1"]
        return row["utilisation_percent"], row["jobs"], row["health"], row["available"], row["reason"]

    slurm.nodes_now = [a_node("n1")]
    request(publisher, do="changes")
    assert seen() == (None, [], "ok", True, "")
    report(50.0, 7)
    assert seen() == (50.0, [7], "ok", True, "")
    report(50.0, 8, 7)
    assert seen() == (50.0, [7, 8], "ok", True, "")
    report(60.0, 8, 7)
    assert seen() == (60.0, [7, 8], "ok", True, "")
    report(60.0)
    assert seen() == (60.0, [], "ok", True, "")
    out.append({"node": "n1", "gpu": "1", "state": "out", "reason": "XID 79"})
    assert seen() == (60.0, [], "out", False, "XID 79")
    out[0]["reason"] = "XID 48"
    assert seen() == (60.0, [], "out", False, "XID 48")
    out.clear()
    assert seen() == (60.0, [], "ok", True, "")


def token(claims: dict[str, Any], key: bytes = KEY, alg: str = "HS256") -> str:
    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    text = f"{part(json.dumps({'alg': alg, 'typ': 'JWT'}).encode())}.{part(json.dumps(claims).encode())}"
    return f"{text}.{part(hmac.new(key, text.encode(), hashlib.sha256).digest())}"


def test_only_a_token_that_the_key_signed_names_a_user(publisher: Publisher) -> None:
    now = time.time()
    claims = {"sun": "alice", "iat": now - 1, "exp": now + 60}
    assert request(publisher, do="jwt", token=token(claims))["user"] == "alice"
    bad = {
        "another key": token(claims, b"x" * 32), "no algorithm": token(claims, alg="none"),
        "over": token({**claims, "exp": now - 1}), "not yet": token({**claims, "iat": now + 3600}),
        "no end": token({"sun": "alice", "iat": now}), "a strange name": token({**claims, "sun": "a\nb"}),
        "changed": token(claims)[:-2] + "AA", "no token": "x",
        "without a signature": token(claims).rpartition(".")[0] + ".",
    }  # fmt: skip
    for why, text in bad.items():
        assert "error" in request(publisher, do="jwt", token=text), why


def test_an_explanation_says_whether_the_job_can_be_saved(
    publisher: Publisher, slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.jobs_now = [a_job(1), replace(a_job(2), comment="sluice:checkpoint=20m")]
    Saves({2: JobSaves(signals=3, answers=2, saved=1000.0)}).write(tmp_path / SAVES_FILE)
    request(publisher, do="changes")
    publisher.refresh("jobs")
    assert request(publisher, do="explain", job="1")["explanation"]["checkpoint"]["mode"] == "no"
    found = request(publisher, do="explain", job="2")["explanation"]["checkpoint"]
    assert (found["mode"], found["interval_s"], found["saved"], found["answers"]) == ("app", 1200, 1000.0, 2)
    models.Explanation.model_validate(request(publisher, do="explain", job="2")["explanation"])
    assert request(publisher, do="explain", job="3")["explanation"] is None


def test_a_task_of_an_array_is_explained_by_its_own_number(
    publisher: Publisher, slurm: FakeSlurm, tmp_path: Path
) -> None:
    """The task that started last, 9, has the array's own number; 2 runs, and 3 to 8 wait."""
    slurm.jobs_now = [
        a_job(6, array_id=6, array_tasks="9"),
        a_job(8, array_id=6, array_tasks="2", comment="sluice:checkpoint=20m"),
        a_job(9, array_id=6, array_tasks="3-8", state="PENDING"),
        a_job(10, array_id=66, array_tasks="2", name='"array_id":6,'),
        a_job(11, name='"array_id":6,"array_tasks":"2"'),
    ]
    once = JobPreflight("alice", 1e9, "n1", 1, 1.0, "perftest", "good", "preflight: 1 node is good")
    write_preflights(tmp_path / JOBS_FILE, {6: [replace(once, words="of task 9")], 8: [replace(once, words="of 2")]})
    moves = "".join(f"{job} 0 back 1 1000 1010 1020 1030 n{job} n2 n3 -\n" for job in (6, 8))
    (tmp_path / MOVES_FILE).write_text(checksummed("sluice-moves 1\n" + moves))
    request(publisher, do="changes")
    publisher.refresh("jobs")

    def found(name: str) -> tuple[str, list[str], list[str]]:
        one = request(publisher, do="explain", job=name)["explanation"]
        assert one["job"] == name
        return one["checkpoint"]["mode"], [one["text"].partition(": ")[2] for one in one["preflights"]], one["moves"]

    mode, preflights, moved = found("6_2")
    assert (mode, preflights, len(moved)) == ("app", ["of 2"], 1) and "from n8 to" in moved[0]
    assert found("8") == (mode, preflights, moved)
    mode, preflights, moved = found("6_9")
    assert (mode, preflights, len(moved)) == ("no", ["of task 9"], 1) and "from n6 to" in moved[0]
    assert found("6") == (mode, preflights, moved)
    waiting = request(publisher, do="explain", job="6_4")["explanation"]
    assert waiting["checkpoint"]["mode"] == "no" and not {"preflights", "moves"} & waiting.keys()
    assert request(publisher, do="explain", job="6_1")["explanation"] is None


@pytest.mark.parametrize(
    "asked", [{"do": "write"}, {"do": "day", "day": "../../etc/passwd"}, {"do": "explain", "job": "x"}]
)
def test_other_requests_are_refused(publisher: Publisher, asked: dict[str, str]) -> None:
    assert "error" in request(publisher, **asked)


def test_readers_take_a_share_of_the_daemons_time(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(epoch: str, last: int) -> bytes:
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return b"{}\n"

    monkeypatch.setattr(publisher.snapshot, "after", slow)
    began = time.monotonic()
    for _ in range(5):
        request(publisher, do="changes")
    monkeypatch.setattr("sluice.controllerd.snapshot._BURST_S", 0.0)
    for _ in range(6):
        request(publisher, do="changes")
    assert time.monotonic() - began > 6 * 0.03 / 0.25
    monkeypatch.undo()
    assert "rows" in request(publisher, do="changes")


def test_a_day_of_all_tenants_use_is_not_given(publisher: Publisher, tmp_path: Path) -> None:
    folder = publisher.reports.history.rolled().folder
    folder.mkdir(parents=True)
    (folder / "2026-11-01.jsonl").write_text("secret")
    assert "error" in request(publisher, do="day", day="2026-11-01"), "nobody reads it, and it could be large"


@pytest.fixture
def served(publisher: Publisher) -> Iterator[Path]:
    thread = threading.Thread(target=publisher.serve, args=(publisher.site,), daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while not publisher.settings.socket.exists() and time.monotonic() < until:
        time.sleep(0.01)
    yield publisher.settings.socket
    publisher.site.stopping.set()
    thread.join(10)
    assert not thread.is_alive()


def test_readers_that_do_not_read_hold_nobody_up(served: Path, publisher: Publisher) -> None:
    publisher.snapshot.put("jobs", {str(number): {"name": "x" * 1000} for number in range(3000)})
    crowd = []
    for _ in range(50):
        one = socket.socket(socket.AF_UNIX)
        one.connect(str(served))
        one.sendall(b'{"version": 1, "do": "changes", "epoch": "", "last": 0}\n')  # and never reads
        crowd.append(one)
    for _ in range(5):
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(str(served))
        crowd.append(silent)
    began = time.monotonic()
    assert len(ask(served, "changes", epoch="", last=0)["rows"]) == 3000
    assert time.monotonic() - began < 8
    for one in crowd:
        one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_other_users_get_nothing(served: Path) -> None:
    served.parent.chmod(0o755)
    for folder in served.parents[1:4]:
        folder.chmod(folder.stat().st_mode | 0o011)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            ask(served, "changes", epoch="", last=0)
            os.write(writer, b"answered")
        except SluiceError as error:
            os.write(writer, str(error).encode()[:200])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 300).decode()
    assert "answered" not in said and ("no answer" in said or "reset" in said or "pipe" in said.lower()), said


def test_only_jobs_that_changed_are_looked_at(publisher: Publisher, slurm: FakeSlurm) -> None:
    publisher._read_jobs()
    slurm.looked.clear()
    slurm.jobs_now = [replace(a_job(2), reason="Resources"), a_job(3)]
    publisher._read_jobs()
    assert slurm.looked == [2, 3]
    found = rows(publisher, "jobs")
    assert set(found) == {"2", "3"} and found["2"]["reason"] == "Resources"


def test_a_listing_that_breaks_off_changes_nothing(publisher: Publisher, slurm: FakeSlurm) -> None:
    publisher._read_jobs()
    slurm.jobs_now, slurm.down = [a_job(7)], True
    with pytest.raises(SluiceError, match="contact"):
        publisher._read_jobs()
    assert set(rows(publisher, "jobs")) == {"1", "2"}
    slurm.down = False
    publisher._read_jobs()
    assert set(rows(publisher, "jobs")) == {"7"}
