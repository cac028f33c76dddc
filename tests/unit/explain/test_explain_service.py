"""The explain service without Slurm and munge: who may see what, requests of any kind, a server on a real socket."""

from __future__ import annotations

import json
import os
import pwd
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from policy.checkpoint import NodeCheckpoint
from policy.node import FILE_NAME, NodePolicy
from sluice.base.errors import SluiceError
from sluice.cli.explain import render
from sluice.exchange.saves import SAVES_FILE, JobSaves, Saves
from sluice.explain import checkpoints as checkpoints_module
from sluice.explain import explain_service
from sluice.explain.checkpoints import SiteCheckpoints, describe
from sluice.explain.decisions import Decision, Start, read_entries
from sluice.explain.explain_service import (
    MAX_REQUEST,
    Server,
    answer,
    ask,
    decisions_folder,
    find_job,
    may_see,
    parse_request,
    render_request,
    withhold,
)
from sluice.explain.explanation import JobName, explain_job
from sluice.slurm import munge_service
from sluice.slurm.answers import Job
from sluice.slurm.munge import Message, MungeError
from sluice.slurm.munge_service import RefusedError, listen, read_line
from sluice.slurm.user import drop_privileges, slurm_user

ME = os.getuid()


def job(number: int, **more: Any) -> Job:
    facts: dict[str, Any] = {
        "id": number, "array_id": None, "array_tasks": "", "name": "x", "user": "alice", "uid": 2001,
        "account": "physics", "qos": "normal", "partition": "main", "state": "PENDING", "reason": "Priority",
        "nodes": "", "node_count": 1, "cpus": 1,
        "submit_time": 5, "eligible_time": 5, "start_time": None, "end_time": None, "time_limit_s": 60, "priority": 9,
        "tres": {}, "tres_per_node": "", "tres_per_job": "", "tres_per_task": "", "features": "", "dependency": "",
        "reservation": "", "comment": "", "work_dir": "/",
    }  # fmt: skip
    return Job(**(facts | more))


@dataclass
class FakeSite:
    """Slurm's answers."""

    private: str = "jobs"
    known: list[Job] = field(default_factory=lambda: [job(7)])
    operators: tuple[str, ...] = ()
    coordinators: tuple[tuple[str, str], ...] = ()
    broken: bool = False

    def config(self) -> Mapping[str, str]:
        return {"PrivateData": self.private, "SlurmUser": f"slurm({ME + 5})", "StateSaveLocation": "/var/spool/slurm"}

    def jobs(self, number: int) -> list[Job]:
        return self.known

    def checkpoint(self, job: Job) -> dict[str, Any]:
        return describe(job.account, job.comment, NodeCheckpoint(), JobSaves())

    def moves(self, job: Job, *, others: bool) -> list[str]:
        return [f"moved to make room for {'job 9' if others else 'another job'}"]

    def preflights(self, job: Job) -> list[dict[str, Any]]:
        return [{"at": 1e9, "text": f"preflight of {job.user}'s job"}]

    def is_operator(self, user: str) -> bool:
        if self.broken:
            raise SluiceError("sacctmgr: no database")
        return user in self.operators

    def is_coordinator(self, user: str, account: str) -> bool:
        return (user, account) in self.coordinators


@pytest.mark.parametrize(
    ("site", "uid", "seen"),
    [
        (FakeSite(), 2001, True),  # one's own
        (FakeSite(), 0, True),
        (FakeSite(), ME + 5, True),  # SlurmUser
        (FakeSite(), 64999, False),  # a uid without a name
        (FakeSite(private="none"), 64999, True),
        (FakeSite(private=""), 64999, True),
        (FakeSite(private="accounts,nodes"), 64999, True),
        (FakeSite(private="accounts,jobs,nodes"), 64999, False),
        (FakeSite(private="all"), 64999, False),
        (FakeSite(), 1, False),
        (FakeSite(operators=(pwd.getpwuid(1).pw_name,)), 1, True),
        (FakeSite(coordinators=((pwd.getpwuid(1).pw_name, "physics"),)), 1, True),
        (FakeSite(coordinators=((pwd.getpwuid(1).pw_name, "biology"),)), 1, False),
        (FakeSite(operators=(pwd.getpwuid(1).pw_name,), broken=True), 1, False),  # no answer allows nothing
    ],
)
def test_private_data(site: FakeSite, uid: int, seen: bool) -> None:
    assert may_see(site, uid, 2001, "physics") is seen


def test_a_job_that_a_node_refused_is_explained_by_its_words(tmp_path: Path) -> None:
    refused = job(7, admin_comment="site's sluice-refused: on n1: 40 % are left sluice:v=1,rung=none")
    document = answer(FakeSite(known=[refused]), tmp_path, 2001, JobName(7))
    assert document["slurm"]["refused"] == "on n1: 40 % are left"
    assert {"Refused on n1: 40 % are left", "  It waits until it is released: scontrol release 7"} <= {
        *render(document)
    }
    document["slurm"]["state"] = "RUNNING"
    assert not any("Refused" in line for line in render(document))


def test_what_one_may_not_see_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as hidden:
        answer(FakeSite(), tmp_path, 1, JobName(7))
    with pytest.raises(RefusedError) as unknown:
        answer(FakeSite(known=[]), tmp_path, 1, JobName(7))
    assert str(hidden.value) == str(unknown.value)
    document = answer(FakeSite(), tmp_path, 2001, JobName(7))
    assert document["slurm"]["reason"] == "Priority"
    assert "Preflight of alice's job" in render(document)


ONE = pwd.getpwuid(1).pw_name


@pytest.mark.parametrize(
    ("site", "withheld"),
    [
        (FakeSite(private=""), []),
        (FakeSite(private="jobs,users,accounts,partitions,reservations,events"), []),
        (FakeSite(private="usage"), ["usage"]),
        (FakeSite(private="jobs, Usage"), ["usage"]),
        (FakeSite(private="nodes"), ["nodes"]),
        (FakeSite(private="nodes,usage"), ["usage", "nodes"]),
        (FakeSite(private="all"), ["usage", "nodes"]),
        (FakeSite(private="all", operators=(ONE,)), []),
        (FakeSite(private="all", coordinators=((ONE, "physics"),)), ["nodes"]),  # as sshare and sinfo
        (FakeSite(private="all", coordinators=((ONE, "particles"),)), ["usage", "nodes"]),  # of a part of it
        (FakeSite(private="all", operators=(ONE,), broken=True), ["usage", "nodes"]),
    ],
)
def test_what_of_ones_own_job_is_private(site: FakeSite, withheld: list[str]) -> None:
    document: dict[str, Any] = {
        "job": "7",
        "uid": 1,
        "account": "particles",
        "partition": "main",
        "order": {
            "as_of": 1, "site_factor": 5, "place": 1, "predicted_run_s": 60, "gpus": 8, "starving": False,
            "terms": [{"name": "fair-share", "weight": 10, "value": 5.0}], "slurm_terms": {}, "deadline": "none",
            "tenant": {"account": "physics", "shares": 31, "fair_share": 0.5, "gpu_hours": 37.25, "tier": 0},
        },
        "waiting": {
            "as_of": 1, "fits_now": False, "never": False, "nodes": 41, "nodes_that_fit": 0,
            "nodes_by_reason": [{"reason": "drained or down", "nodes": 41}],
            "would_start_now": [{"what": "gpus", "value": 4, "unit": ""}],
        },
    }  # fmt: skip
    withhold(site, 1, document)
    assert document.get("private", []) == withheld
    assert document["order"]["terms"][0]["value"] == 5.0, "as sprio has it"
    assert document["waiting"]["would_start_now"][0]["value"] == 4
    for said in (json.dumps(document), "\n".join(render(document))):
        assert ("37.25" not in said and "31" not in said) is ("usage" in withheld)
        assert ("drained" not in said and "41" not in said) is ("nodes" in withheld)
    assert ("PrivateData=" + ",".join(withheld) in "\n".join(render(document))) is bool(withheld)
    whole = dict(document)
    for uid in (0, ME + 5):
        withhold(FakeSite(private="all", broken=True), uid, document)
        assert document == whole, "root and SlurmUser see all"


def test_private_nodes_of_recorded_jobs(sample: Path) -> None:
    """Each owner sees the nodes of his own job, no other node, and not how many there are."""
    jobs = {
        body.job.id: body.job
        for body in (entry.body for entry in read_entries(sample))
        if isinstance(body, Decision | Start)
    }
    named_others = 0
    for number, facts in jobs.items():
        site = FakeSite(private="nodes", known=[])
        document = answer(site, sample.parent, facts.uid, JobName(number))
        whole = explain_job(sample.parent, JobName(number))
        assert whole is not None
        own = {part["node"] for part in whole.get("start", {}).get("parts", [])}
        named = set(re.findall(r"node-\d+", json.dumps(document)))
        assert named == own
        assert document.get("start") == whole.get("start")
        assert not any("nodes_by_reason" in part for part in document.values() if isinstance(part, dict))
        assert render(document)
        named_others += set(re.findall(r"node-\d+", json.dumps(whole))) > own
        assert answer(FakeSite(private="usage", known=[]), sample.parent, facts.uid, JobName(number)) == whole
    assert named_others > 10


def test_tasks_of_an_array() -> None:
    waiting = job(20, array_id=20, array_tasks="5-9:2,12%4")
    running = job(23, array_id=20, array_tasks="3", state="RUNNING")
    assert find_job([waiting, running], JobName(20, 3)) is running
    assert find_job([waiting, running], JobName(20, 7)) is waiting
    assert find_job([waiting, running], JobName(20, 12)) is waiting
    assert find_job([waiting, running], JobName(20, 6)) is None
    assert find_job([waiting, running], JobName(20)) is waiting
    assert find_job([job(1, array_id=1, array_tasks="0-4000000000,junk")], JobName(1, 5)) is None


def test_requests() -> None:
    assert parse_request(render_request(JobName(17, 3))) == JobName(17, 3)
    for bad in (
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"version": 2, "job": "1"}',
        b'{"version": 1, "job": 1}',
        b"\xff\xfe",
        b"[" * 900,
    ):
        with pytest.raises(RefusedError):
            parse_request(bad)
    with pytest.raises(RefusedError, match="1024"):
        parse_request(b" " * 2000)


def test_random_requests_raise_nothing_but_refusals() -> None:
    rng = random.Random(3)
    good = render_request(JobName(17, 3))
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 5)):
            place = rng.randrange(len(data) + 1)
            data[place : place + rng.randrange(2)] = rng.choice(
                [b"", b"{", b'"', b"\\u0000", b"9" * 30, rng.randbytes(2)]
            )
        try:
            parse_request(bytes(data))
        except RefusedError:
            continue


def test_site_facts() -> None:
    assert slurm_user({"SlurmUser": "slurm(64030)"}) == 64030
    for bad in ("", "slurm", "slurm(x)"):
        with pytest.raises(SluiceError):
            slurm_user({"SlurmUser": bad})
    assert decisions_folder({"StateSaveLocation": "/var/spool"}) == Path("/var/spool/sluice.records")
    with pytest.raises(SluiceError):
        decisions_folder({"StateSaveLocation": "(null)"})


def test_only_root_and_slurm_user_may_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_privileges(os.geteuid())  # is that user already
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(SluiceError, match="not root or SlurmUser"):
        drop_privileges(64030)


# ---- a server on a real socket, with credentials that anyone could forge ----


def fake_encode(payload: bytes, *, readable_by: int | None = None) -> str:
    return json.dumps({"uid": ME, "for": readable_by, "payload": payload.hex()}, separators=(",", ":"))


def fake_decode(credential: str) -> Message:
    try:
        said = json.loads(credential)
        return Message(bytes.fromhex(said["payload"]), int(said["uid"]), 0)
    except (ValueError, KeyError, TypeError) as error:
        raise MungeError("munge: Invalid credential") from error


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[FakeSite], int]]:
    for module in (explain_service, munge_service):
        monkeypatch.setattr(module, "encode", fake_encode)
        monkeypatch.setattr(module, "decode", fake_decode)
    running: list[tuple[Server, threading.Thread]] = []

    def start(site: FakeSite) -> int:
        made = Server(site, tmp_path, listen(["127.0.0.1"], 0))
        port: int = made.sockets[0].getsockname()[1]
        thread = threading.Thread(target=made.serve)
        thread.start()
        running.append((made, thread))
        return port

    yield start
    for made, thread in running:
        made.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


def send(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                answer += piece
        except OSError:
            pass
        return answer


def test_a_question_and_its_answer(server: Callable[[FakeSite], int]) -> None:
    port = server(FakeSite(known=[job(7, uid=ME)]))
    document = ask(["127.0.0.1"], port, JobName(7), trusted=[ME])
    assert document["slurm"]["job_id"] == 7
    with pytest.raises(RefusedError, match="not known, or you may not see it"):
        ask(["127.0.0.1"], port, JobName(8), trusted=[ME])
    with pytest.raises(SluiceError, match="not from SlurmUser"):
        ask(["127.0.0.1"], port, JobName(7), trusted=[ME + 1])


def test_answers_are_for_the_asking_user_only(server: Callable[[FakeSite], int]) -> None:
    port = server(FakeSite(known=[job(7, uid=ME)]))
    said = json.loads(send(port, fake_encode(render_request(JobName(7))).encode() + b"\n"))
    assert said["for"] == ME


def test_nonsense_gets_no_answer_and_does_no_harm(server: Callable[[FakeSite], int]) -> None:
    port = server(FakeSite(known=[job(7, uid=ME)]))
    rng = random.Random(5)
    for data in (
        b"",
        b"\n",
        b"x" * (MAX_REQUEST + 5000),
        b"\x00" * 50 + b"\n",
        *(rng.randbytes(200) + b"\n" for _ in range(50)),
    ):
        assert send(port, data) == b""
    assert ask(["127.0.0.1"], port, JobName(7), trusted=[ME])["job"] == "7"


def test_internal_errors_are_not_shown(server: Callable[[FakeSite], int], caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeSite):
        def jobs(self, number: int) -> list[Job]:
            raise RuntimeError("secret path /etc/shadow")

    port = server(Broken())
    with pytest.raises(RefusedError) as told:
        ask(["127.0.0.1"], port, JobName(7), trusted=[ME])
    assert "secret" not in str(told.value)
    assert "secret" in caplog.text


SAVES = JobSaves(1.0, 9.0, 9.0, 3, 2, 1000.0, 8.0, 1302, True, 864_000.0)


def of(checkpoints: SiteCheckpoints, known: Job) -> dict[str, Any]:
    return checkpoints.of(known.id, known.account, known.comment)


@pytest.mark.parametrize(
    ("comment", "saves", "told"),
    [
        ("", JobSaves(), ["Cannot be saved: it does not ask for signals (--checkpoint=app)"]),
        (
            "sluice:checkpoint=20m", JobSaves(),
            ["Saves its state when signalled (USR2), every 20 min\n", "had no signal yet: it is not known whether"],
        ),
        ("sluice:checkpoint", JobSaves(), ["(USR2), before it is ended only\n"]),
        ("sluice:checkpoint=daly", JobSaves(), ["every so often, once it runs"]),
        ("sluice:checkpoint=daly", JobSaves(5.0, interval_s=600, daly=True), ["every 10 min until a save has been"]),
        ("sluice:checkpoint=20m", JobSaves(5.0, signals=2, interval_s=1200), ["has not answered 2 signals: it is not"]),
        (
            "sluice:checkpoint=daly", SAVES,
            ["every 21 min by Daly's formula: a save takes 8 s, and one of its nodes fails every 10 days\n",
             "Last saved 1970-", "answered 2 of 3 signals."],
        ),
    ],
)  # fmt: skip
def test_whether_a_job_can_be_saved_is_known(tmp_path: Path, comment: str, saves: JobSaves, told: list[str]) -> None:
    (tmp_path / FILE_NAME).write_text(NodePolicy(checkpoint=NodeCheckpoint(signal="USR2")).render())
    checkpoints = SiteCheckpoints({"SLURM_CONF": str(tmp_path / "slurm.conf"), "StateSaveLocation": str(tmp_path)})
    known = job(7, comment=comment, state="RUNNING")
    unknown = describe(known.account, known.comment, NodeCheckpoint(signal="USR2"), JobSaves())
    assert of(checkpoints, known) == unknown
    Saves({7: saves, 8: JobSaves(signals=9)}).write(tmp_path / SAVES_FILE)
    shown = "\n".join(render({"job": "7", "checkpoint": of(checkpoints, known)})) + "\n"
    assert [words for words in told if words not in shown] == []


def test_a_damaged_record_of_saves_hides_nothing_else_of_a_job(tmp_path: Path) -> None:
    checkpoints = SiteCheckpoints({"StateSaveLocation": str(tmp_path)})
    known, file = job(7, comment="sluice:checkpoint=20m", state="RUNNING"), tmp_path / SAVES_FILE
    file.write_text("{")
    for _ in range(2):  # the second time it has not changed
        shown = "\n".join(render({"job": "7", "checkpoint": of(checkpoints, known)}))
        assert "every 20 min" in shown and f"cannot be read: {file}: " in shown
    Saves({7: JobSaves(signals=2)}).write(file)
    assert "problem" not in of(checkpoints, known) and of(checkpoints, known)["signals"] == 2


def test_nobody_sees_half_of_a_record_of_saves_that_another_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    read_saves = checkpoints_module.read_saves

    def slowly(path: Path) -> Saves:
        begun.set()
        assert go_on.wait(10)
        return read_saves(path)

    monkeypatch.setattr(checkpoints_module, "read_saves", slowly)
    Saves({7: JobSaves(signals=2)}).write(tmp_path / SAVES_FILE)
    checkpoints = SiteCheckpoints({"StateSaveLocation": str(tmp_path)})
    known = job(7, comment="sluice:checkpoint", state="RUNNING")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(of, checkpoints, known)
        assert begun.wait(10)
        second = pool.submit(of, checkpoints, known)
        wait([second], timeout=0.2)
        go_on.set()
        assert first.result()["signals"] == second.result()["signals"] == 2


def test_a_slow_request_ends_in_time() -> None:
    here, there = socket.socketpair()
    with here, there:
        begin = time.monotonic()
        there.sendall(b"half a line")
        with pytest.raises(RefusedError, match="in time"):
            read_line(here, 1000, 0.3)
        assert time.monotonic() - begin < 5
        there.sendall(b"\nmore")
        assert read_line(here, 1000, 1) == b""


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_service, "encode", fake_encode)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SluiceError, match="--port"):
            listen(["127.0.0.1"], port)
    with pytest.raises(SluiceError, match="no explain service answers"):
        explain_service.ask(["127.0.0.1"], port, JobName(7), trusted=[0])
