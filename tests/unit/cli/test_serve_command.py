"""`sluice serve`: what it shows to whom, and what it changes in the policy file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from policy import access, site
from policy.access import Caller
from policy.document import parse
from policy.edit import edited
from policy.quota_use import TenantUse
from policy.service_jobs import CALLERS_FILE, FILE_NAME, compile_services
from policy.service_use import service_documents
from sluice.base.errors import SluiceError
from sluice.base.line_server import Kind
from sluice.base.local_server import serve_local
from sluice.cli import serve
from sluice.exchange.serve_status import (
    ServiceStatus,
    Status,
    ask_status,
    parse_status,
    render_status,
    replica_status,
    service_status,
)
from sluice.exchange.serving import Abilities, Callers, Demand, Heartbeat, Load, ServiceRow, State
from sluice.exchange.snapshot import render_answer

LAUNCH, OTHER = "0123456789abcdef", "fedcba9876543210"
POLICY = """\
# the site's models
tenants:
  nlp: {members: [nlp-serve, alice]}
  robotics: {members: [bob]}  # with arms
services:
  deepseek-7b:  # the first one
    tenant: nlp
    user: nlp-serve
    engine: vllm
    model: /models/deepseek
    replicas: {most: 2}  # GPUs are few
  open:
    log_prompts: true
    tenant: nlp
    user: nlp-serve
    engine: python
    command: [/opt/embed]
    callers: "*"
    replicas: {least: 1}
"""


def a_job(number: int = 17, *, launch: str = LAUNCH, **more: Any) -> Any:
    usual = {
        "id": number, "name": f"sluice-serve.deepseek-7b.{launch}", "user": "nlp-serve", "account": "nlp",
        "state": "RUNNING", "nodes": "gpu-1", "reason": "None", "start_time": 1000,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **more})


BEAT = Heartbeat(
    service="deepseek-7b", launch=LAUNCH, job=17, host="gpu-1", port=4000, fingerprint="f" * 64,
    secret="5ec" + "0" * 61,
    state=State.READY, abilities=Abilities(chat=True, resume="tokens"), slots=16,
    load=Load(running=3, waiting=1, prompt_tokens=10, completion_tokens=20, cache_used=0.5), ends=2000.0,
)  # fmt: skip
ROW = ServiceRow("deepseek-7b", "nlp", ("nlp",), "vllm", "normal", 600.0, 1024, 0, 2, 16, why="no GPU", eta_s=9.0)


def a_demand(**more: Any) -> Demand:
    usual: dict[str, Any] = {"service": "deepseek-7b", "worker": "h:1", "waiting": 2, "oldest_s": 1.0, "in_flight": 3,
                             "tokens_in_flight": 100, "delay_s": 0.5}  # fmt: skip
    return Demand(**{**usual, **more})


def documents(jobs: list[Any], status: Status | None = None) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in service_documents(compile_services(parse(POLICY)), jobs, status)}


# ---- what replicad says ----


def test_status_has_no_secret_and_survives_the_way() -> None:
    demands = [a_demand(), a_demand(worker="h:2", oldest_s=4.0, delay_s=0.1), a_demand(service="other", waiting=99)]
    status = {"deepseek-7b": service_status(ROW, demands, wanted=2)}
    callers = Callers({"user/alice": 3}, whole=False)
    words = render_status(status, {LAUNCH: replica_status(BEAT, heard=1500.0)}, callers)
    line = render_answer(words)
    assert BEAT.secret not in line.decode() and BEAT.fingerprint not in line.decode()
    found = parse_status(json.loads(line))
    assert found.services["deepseek-7b"] == ServiceStatus(4, 4.0, 6, 200, 0.5, 2, "no GPU", 9.0)
    assert found.callers == callers
    replica = found.replicas[LAUNCH]
    assert (replica.state, replica.running, replica.cache_used, replica.resume) == (State.READY, 3, 0.5, "tokens")


@pytest.mark.parametrize("answer", [{}, {"services": [], "replicas": {}}, {"services": {"a": {"waiting": "x"}}}])
def test_a_status_that_is_none(answer: dict[str, Any]) -> None:
    with pytest.raises(SluiceError, match="replicad's status"):
        parse_status({"replicas": {}, **answer})


@contextmanager
def replicad(path: Path) -> Iterator[None]:
    """A socket that answers as replicad does."""
    stopping = threading.Event()
    room = Kind("x", places=4, threads=1, line=1000, held=1000, seconds=5.0, rates=())

    def answer(line: bytes, who: object) -> bytes:
        assert json.loads(line)["do"] == "status"
        return render_answer(
            render_status(
                {"deepseek-7b": service_status(ROW, [a_demand()], 1)},
                {LAUNCH: replica_status(BEAT, 1500.0)},
                Callers({}),
            )
        )

    thread = threading.Thread(
        target=serve_local, args=(path, answer, (room,), lambda uid: room, stopping), kwargs={"remedy": ""}
    )
    thread.start()
    try:
        while not path.exists():
            thread.join(0.01)
        yield
    finally:
        stopping.set()
        thread.join(10)


def test_asking_replicad(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="is sluice-replicad running on this host"):
        ask_status(tmp_path / "s")
    with replicad(tmp_path / "s"):
        assert ask_status(tmp_path / "s").replicas[LAUNCH].job == 17


# ---- services as they are ----


def test_states_of_services() -> None:
    assert {name: one["state"] for name, one in documents([]).items()} == {"deepseek-7b": "idle", "open": "down"}
    queued = documents([a_job(state="PENDING", reason="Resources", nodes="", start_time=5000)])["deepseek-7b"]
    assert (queued["state"], queued["queued"], queued["waiting"]) == ("starting", 1, None)
    assert queued["replicas"][0] | {"why": "Resources", "start_time": None, "state": "queued"} == queued["replicas"][0]
    running = documents([a_job()])["deepseek-7b"]
    assert (running["state"], running["ready"]) == ("running", 0)
    said = Status({"deepseek-7b": service_status(ROW, [])}, {})
    assert documents([], said)["deepseek-7b"]["state"] == "failed", "replicad says why"
    assert documents([a_job(state="COMPLETED")])["deepseek-7b"]["replicas"] == []


def test_what_replicad_knows_is_shown_with_the_job() -> None:
    status = Status({"deepseek-7b": service_status(ROW, [a_demand()], 2)}, {LAUNCH: replica_status(BEAT, 1500.0)})
    one = documents([a_job()], status)["deepseek-7b"]
    assert (one["state"], one["ready"], one["waiting"], one["wanted"], one["why"]) == ("ready", 1, 2, 2, "no GPU")
    (replica,) = one["replicas"]
    assert replica | {"launch": LAUNCH, "job": 17, "state": "ready", "nodes": "gpu-1", "running": 3} == replica
    without_job = documents([], status)["deepseek-7b"]["replicas"]
    assert [(one["job"], one["job_state"]) for one in without_job] == [(17, None)]
    failed = Status({}, {OTHER: replace(status.replicas[LAUNCH], launch=OTHER, state=State.FAILED, why="no memory")})
    assert documents([a_job(state="FAILED", launch=OTHER)], failed)["deepseek-7b"]["state"] == "failed"


@pytest.mark.parametrize("change", [{"user": "mallory"}, {"account": "robotics"}, {"name": "sluice-serve.x." + LAUNCH},
                                    {"name": "sluice-serve.deepseek-7b.short"}])  # fmt: skip
def test_jobs_that_only_have_such_a_name_are_no_replicas(change: dict[str, Any]) -> None:
    assert documents([a_job(**change)])["deepseek-7b"]["replicas"] == []


# ---- the commands ----


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a command as a user at a site with one replica."""
    policy = compile_services(parse(POLICY))
    (tmp_path / FILE_NAME).write_text(policy.render())
    (tmp_path / CALLERS_FILE).write_text(policy.render_callers())
    client = SimpleNamespace(config=lambda: {"SLURM_CONF": str(tmp_path / "slurm.conf")}, jobs=lambda: [a_job()])
    members = {"alice": "nlp", "bob": "robotics"}

    def call(*words: str, user: str = "root", level: int = 2) -> Any:
        monkeypatch.setattr(site, "Site", lambda *_: SimpleNamespace(cluster=SimpleNamespace(client=client)))
        monkeypatch.setattr(access, "caller", lambda _: Caller(user, 1, level))
        monkeypatch.setattr(access, "user_name", lambda: user)
        tenant = TenantUse(members.get(user, "x"), "", [user], "1", {})
        monkeypatch.setattr("policy.quota_use.read_use", lambda _, only: {tenant.name: tenant})
        return CliRunner().invoke(serve.command, list(words), catch_exceptions=True)

    return call


def test_list_as_root(called: Callable[..., Any], tmp_path: Path) -> None:
    with replicad(tmp_path / "s"):
        found = called("list", "-P", "-o", "name,state,waiting,in_flight,wanted", "--socket", str(tmp_path / "s"))
    assert found.stdout == (
        "NAME|STATE|WAITING|IN_FLIGHT|WANTED\ndeepseek-7b|ready|2|3|1\nopen|down|0|0|\n"
    ), found.output  # fmt: skip


def test_without_replicad_figures_are_unknown_and_it_is_said(called: Callable[..., Any], tmp_path: Path) -> None:
    found = called("list", "-P", "-n", "-o", "name,waiting", "--socket", str(tmp_path / "none"))
    assert found.stdout == "deepseek-7b|\nopen|\n" and found.exit_code == 0
    assert "figures are not known" in found.stderr and "sluice-replicad" in found.stderr


@pytest.mark.parametrize(
    ("user", "names"), [("alice", ["deepseek-7b", "open"]), ("bob", ["open"]), ("eve", ["open"])]
)  # fmt: skip
def test_users_see_what_they_may_call(called: Callable[..., Any], user: str, names: list[str]) -> None:
    found = called("list", "--json", user=user, level=0)
    rows = json.loads(found.stdout)["services"]
    assert [row["name"] for row in rows] == names and all(row["waiting"] is None for row in rows)
    assert all("replicas" not in row for row in rows)


def test_show(called: Callable[..., Any], tmp_path: Path) -> None:
    with replicad(tmp_path / "s"):
        found = called("show", "deepseek-7b", "--socket", str(tmp_path / "s"))
        plain = called("show", "deepseek-7b", "-P", "-n", "--socket", str(tmp_path / "s"))
    assert "0 to 2, 16 requests each: 1 ready" in found.stdout and "the oldest 1.0s" in found.stdout
    assert LAUNCH in found.stdout and BEAT.secret not in found.stdout
    assert plain.stdout == f"{LAUNCH}|17|ready|RUNNING|gpu-1|3|1|\n"
    hidden = called("show", "deepseek-7b", user="bob", level=0)
    assert hidden.exception is not None and "none that you may see; those are: open" in str(hidden.exception)


def test_callers_know_whether_prompts_are_logged(called: Callable[..., Any]) -> None:
    for user, level in (("root", 2), ("bob", 0)):
        assert "\n  prompts    logged: gateways write" in called("show", "open", user=user, level=level).stdout
    assert "\n  prompts    not logged\n" in called("show", "deepseek-7b", user="alice", level=0).stdout
    listed = json.loads(called("list", "--json", user="bob", level=0).stdout)["services"]
    assert [one["log_prompts"] for one in listed] == [True]
    assert json.loads(called("show", "open", "--json", user="bob", level=0).stdout)["log_prompts"] is True


CHANGES: list[tuple[tuple[str, ...], str, str]] = [
    (("scale", "deepseek-7b", "--least", "1", "--most", "4"), "replicas: {most: 4, least: 1} # GPUs are few", ""),
    (("pause", "deepseek-7b"), "    paused: true", ""),
    (("remove", "open"), "", "open"),
    (("set", "deepseek-7b", "idle=10m", "model="), "", "engine vllm needs a model"),
    (("set", "deepseek-7b", "idle=10m"), "    idle: 10m", ""),
    (("create", "e5", "tenant=nlp", "user=nlp-serve", "engine=tei", "model=/m/e5", "replicas.most=3"), "most: 3", ""),
    (("create", "open", "tenant=nlp"), "", "is in the policy file already"),
    (("create", "e5", "tenant=nlp"), "", "user"),
    (("scale", "other", "--most", "4"), "", "not in the policy file; those are: deepseek-7b, open"),
    (("scale", "deepseek-7b"), "", "nothing to change"),
    (("scale", "deepseek-7b", "--least", "5"), "", "least 5 is more than most 2"),
]


@pytest.mark.parametrize(("words", "there", "said"), CHANGES, ids=[" ".join(one[0])[:40] for one in CHANGES])
def test_changes_of_the_policy_file(
    words: tuple[str, ...], there: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(POLICY)
    made: list[str] = []
    monkeypatch.setattr(
        serve, "change_file", lambda options, change, action: made.append(edited(options.path, change).text)
    )
    found = CliRunner().invoke(serve.command, [words[0], "-f", str(path), *words[1:]])
    if said and words[0] != "remove":
        assert found.exception is not None and said in str(found.exception), found
        assert not made
        return
    assert made, (found.output, found.exception)
    assert there in made[0] and "# the site's models" in made[0] and "# with arms" in made[0]
    assert "# the first one" in made[0]
    assert ("  open:" in made[0]) == (words[0] != "remove")


def test_a_paused_service_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(POLICY.replace("    model: /models/deepseek\n", "    model: /models/deepseek\n    paused: true\n"))
    made: list[str] = []
    monkeypatch.setattr(
        serve, "change_file", lambda options, change, action: made.append(edited(options.path, change).text)
    )
    CliRunner().invoke(serve.command, ["resume", "-f", str(path), "deepseek-7b"])
    assert made == [POLICY]


def test_names_are_completed(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(POLICY)
    context: Any = SimpleNamespace(params={"path": path})
    assert serve.complete_service(context, None, "d") == ["deepseek-7b"]  # type: ignore[arg-type]
