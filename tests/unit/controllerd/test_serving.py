"""What replicad sees of Slurm, and that it sees nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError
from sluice.controllerd import serving as module
from sluice.controllerd.daemon import Site
from sluice.controllerd.serving import Serving
from sluice.controllerd.snapshot import SERVING, TOKENS, Publisher, Settings
from sluice.serve.replicad.slurm_view import parse_view
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.answers import Job, Node, Reservation
from tests.unit.controllerd.slurm_objects import a_job, a_node

NAME = "sluice-serve.words.0123456789abcdef"


class FakeSlurm:
    """The client, and what it was asked."""

    def __init__(self) -> None:
        self.now: list[Job] = [
            a_job(1), a_job(2, name=NAME, nodes="n[1-2]"), a_job(3, name=NAME, user="bob"),
            a_job(4, name="sluice-serve.words.x"),
        ]  # fmt: skip
        self.nodes_now: list[Node] = [a_node("n1"), a_node("n2")]
        self.reserved: list[Reservation] = []
        self.asked: list[Any] = []

    def config(self) -> dict[str, str]:
        return {"SlurmUser": "slurm(64030)", "SlurmctldHost[0]": "here"}

    def ping(self) -> list[Any]:
        return []

    def jobs(self, *, users: Iterable[str], states: Iterable[str]) -> list[Job]:
        self.asked.append(list(users))
        assert list(states) == ["all"]
        return [job for job in self.now if job.user in users]

    def nodes(self, names: str | None = None) -> list[Node]:
        self.asked.append(names)
        return self.nodes_now

    def reservations(self) -> list[Reservation]:
        return self.reserved


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(module, "_is_there", lambda user: user != "unknown")
    return FakeSlurm()


@pytest.fixture
def site(slurm: FakeSlurm, tmp_path: Path) -> Site:
    return Site(cast(SlurmClient, slurm), Commands(), tmp_path / "state", host="here")


@pytest.fixture
def serving(site: Site) -> Serving:
    return Serving(site)


def test_the_jobs_of_these_users_that_are_replicas(slurm: FakeSlurm, serving: Serving) -> None:
    view = parse_view(serving.answer(["alice", "unknown", "alice"]))
    assert [(job.id, job.service, job.user) for job in view.jobs.values()] == [(2, "words", "alice")]
    assert view.jobs["0123456789abcdef"].nodes == ("n1", "n2") and not view.leads and view.host == "here"
    assert slurm.asked == [["alice"], "n[1-2]"], "one user's jobs, and the nodes that they are on"
    slurm.asked.clear()
    serving.answer([f"u{number}" for number in range(20)])
    assert len(slurm.asked) == 1, "many users are read at once"
    with pytest.raises(SluiceError, match="not a user"):
        serving.answer(["alice,root"])
    for users in (None, "alice", [1], ["a"] * 5000):
        with pytest.raises(SluiceError):
            serving.answer(users)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"drain"}, "node n1 is drained: fan"),
        ({"reboot_requested"}, "node n1 is to be rebooted"),
        ({"maintenance"}, None),
        (set(), None),
    ],
)
def test_nodes_that_are_to_be_left(slurm: FakeSlurm, serving: Serving, flags: set[str], why: str | None) -> None:
    slurm.nodes_now[0] = a_node("n1", flags=frozenset(flags), reason="fan\nmore")
    assert parse_view(serving.answer(["alice"])).leave.get("n1") == why


def test_maintenance_is_told_with_its_begin(slurm: FakeSlurm, serving: Serving) -> None:
    now = int(time.time())

    def reserve(name: str, nodes: str, start: int, end: int, *flags: str) -> Reservation:
        return Reservation(name, "inactive", start, end, nodes, 1, "", (), (), frozenset(flags), {})

    slurm.reserved = [
        reserve("a", "n[1-9]", now + 500, now + 900, "MAINT"),
        reserve("b", "n1", now + 300, now + 900, "maint", "ignore_jobs"),
        reserve("over", "n2", now - 900, now - 300, "MAINT"),
        reserve("ours", "n2", now + 1, now + 900),
    ]
    assert parse_view(serving.answer(["alice"])).maintenance == {"n1": now + 300, "n2": now + 500}


def test_replicads_user_gets_nothing_else(site: Site, tmp_path: Path) -> None:
    publisher = Publisher(site, Settings(tmp_path / "socket", "nobody"))
    publisher.snapshot.put("jobs", {"1": {"name": "secret"}})

    def ask(text: str) -> dict[str, Any]:
        return dict(json.loads(publisher.answer(text.encode(), SERVING)))

    for do in ("changes", "explain", "jwt", "report", "job-page", "shadow", "status", ""):
        answer = ask(json.dumps({"version": 1, "do": do, "job": "1", "epoch": "", "last": 0}))
        assert "error" in answer and "secret" not in json.dumps(answer)
    for text in ("", "{", "[]", "[" * 2000, '{"version": 2, "do": "serving", "users": []}'):
        assert "error" in ask(text)
    assert ask('{"version": 1, "do": "serving", "users": ["alice"]}')["jobs"]
    assert not publisher.wanted, "the whole cluster is not read for it"


def test_gateways_may_have_tokens_of_slurm_checked_and_nothing_else(site: Site, tmp_path: Path) -> None:
    publisher = Publisher(site, Settings(tmp_path / "socket", "nobody"))
    for do in ("changes", "explain", "serving", "report", "job-page", "shadow", "status", ""):
        asked = {"version": 1, "do": do, "job": "1", "epoch": "", "last": 0, "users": ["alice"]}
        assert json.loads(publisher.answer(json.dumps(asked).encode(), TOKENS))["error"] == "request: not jwt"
    asked = {"version": 1, "do": "jwt", "token": "a.b.c"}
    assert "tokens are not set up" in json.loads(publisher.answer(json.dumps(asked).encode(), TOKENS))["error"]
