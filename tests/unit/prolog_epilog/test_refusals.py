"""Every refusal, whose fault it is, and what happens to a job that is refused for its own fault."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy.compiled import CompiledPolicy, Tenant
from policy.health import NodeHealth
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from policy.node_power import NodeCap, NodePower
from prolog_epilog import cgroups
from prolog_epilog.agent import Agent
from prolog_epilog.cgroups import Place
from prolog_epilog.devices import NodeDevice
from prolog_epilog.holds import Hold, Holds
from prolog_epilog.jobs import read_share
from prolog_epilog.refusals import PROGRAMS, Blame, Refusal
from prolog_epilog.server import Peer
from prolog_epilog.state import RefusalError, Settings
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError
from sluice.base.run import CommandError
from sluice.exchange.record import Grant, JobRecord
from sluice.slurm.refused import reason_in, with_reason

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "prolog_epilog/programs/node_program.py"
GIB = 1 << 30
ROOTS = Peer(os.getpid(), 0)
CAPS = (NodeCap(watts=300, at_most=400),)


# ---- the table ----


def calls(path: Path, name: str) -> list[tuple[str, ast.Call]]:
    """Where an exception is made: the innermost function's name, and the call."""
    found: list[tuple[str, ast.Call]] = []

    def walk(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == name:
                found.append((function, child))
            walk(child, child.name if isinstance(child, ast.FunctionDef) else function)

    walk(ast.parse(path.read_text()), "")
    return found


def test_each_refusal_in_the_code_is_in_the_table_and_each_of_the_table_in_the_code() -> None:
    used = set()
    for path in [*ROOT.glob("prolog_epilog/**/*.py"), *ROOT.glob("health/**/*.py")]:
        for function, call in calls(path, "RefusalError"):
            named = [
                word.attr
                for word in ast.walk(call)
                if isinstance(word, ast.Attribute)
                and word.attr.isupper()
                and isinstance(word.value, ast.Name)
                and word.value.id == "Refusal"
            ]
            assert len(named) == 1, f"{path.name}: {function}: no reason of prolog_epilog/refusals.py"
            used.add(Refusal[named[0]])
    assert used == set(Refusal)


def test_each_refusal_of_the_programs_is_in_the_table() -> None:
    """But those that the agent has made, whose blame comes with them."""
    own = [function for function, call in calls(PROGRAM, "RefusedError") if not call.keywords]
    assert set(own) == set(PROGRAMS) and set(PROGRAMS.values()) == {Blame.NODE}


# ---- each of them, tried ----


def device(index: int = 0, vendor: str = "nvidia") -> NodeDevice:
    return NodeDevice(
        index, vendor, "H100", f"GPU-{index}", f"0000:0{index}:00.0", (f"/dev/nvidia{index}",), f"/dev/nvidia{index}",
        80 * 1024, "615", 0, "", (),
    )  # fmt: skip


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(cgroups, "jobs_here", lambda: set())
    monkeypatch.setattr("prolog_epilog.jobs._DRIVER_SECONDS", 0.2)
    return make_agent(tmp_path)


def make_agent(folder: Path) -> Agent:
    made = Agent(
        Settings(run=folder / "run", records=folder / "records", policy=folder / "sluice.policy", memory_wait=0.0)
    )
    made.state.devices = [device(0), device(1)]
    made.contexts.measured = {device().kind: {"total": 80 * GIB, "context": GIB}}
    made.watcher.watches = {name: Watch(Worker(name)) for name in ("nvidia", "amd")}
    made.state.jobs.prepare()
    made.state.store.prepare()
    made.state.outbox.prepare()
    made.holds.prepare()
    return made


def limits(agent: Agent, **fields: object) -> None:
    path = agent.state.settings.policy.with_name("sluice.node.json")
    path.write_text(NodePolicy(limits=NodeLimits(**fields)).render())  # type: ignore[arg-type]


def prolog(agent: Agent, job: int = 7, gpus: tuple[int, ...] = (0,), **more: object) -> dict[str, Any]:
    fields: dict[str, Any] = {"uid": 1000, "user": "ann", "account": "physics", "partition": "main"}
    return agent.jobs.prolog(peer=ROOTS, job=job, gpus=list(gpus), **(fields | more))


def limit(agent: Agent, **more: object) -> dict[str, Any]:
    fields: dict[str, Any] = {"job": 7, "uid": 1000, "whole": True, "gpus": [0], "shards": 0, "open": []}
    return agent.jobs.limit(peer=ROOTS, **(fields | more))


def known(agent: Agent, gpus: int = 1, **more: Any) -> JobRecord:
    grants = [Grant(index, f"GPU-{index}", "nvidia", "H100", 80 * GIB) for index in range(gpus)]
    record = JobRecord(7, 1000, "ann", "physics", "main", "n1", 1.0, grants=grants, **more)
    agent.state.records[7] = record
    return record


def silent_driver(agent: Agent) -> None:
    agent.watcher.watches["nvidia"].problem = SluiceError("the nvidia driver gives no answer")
    prolog(agent)


def found_by_health_checks(agent: Agent, *faults: object, room: dict[str, int] | None = None) -> Any:
    path = agent.state.settings.policy.with_name("sluice.node.json")
    path.write_text(NodePolicy(health=NodeHealth(mode="enforce")).render())
    health: Any = agent.health
    health._report, health._room = SimpleNamespace(faults=faults), lambda: room or {}
    return health


def sick_gpu(agent: Agent) -> None:
    fault = SimpleNamespace(acts=True, uuid="GPU-0", numbers=(0,), check="repeated", text="rows")
    found_by_health_checks(agent, fault)
    prolog(agent)


def full_folder(agent: Agent) -> None:
    found_by_health_checks(agent, room={"/run/sluice": 0})
    prolog(agent)


def missing_device_file(agent: Agent) -> None:
    found_by_health_checks(agent)._gpus = [SimpleNamespace(files=["/nonexistent"], uuid="GPU-0")]
    prolog(agent)


def unlike_gpus(agent: Agent) -> None:
    limits(agent, ladder=("mps", "watchdog"), cu_mask=True)
    agent.state.devices = [device(0), device(1, "amd")]
    agent.jobs._ladder._shares._mps.unavailable = lambda *_: ""  # type: ignore[method-assign]
    prolog(agent, gpus=(0, 1), share="50")


def two_of_sixty_percent(agent: Agent) -> None:
    limits(agent, ladder=("mps", "watchdog"))
    agent.jobs._ladder._shares._mps.unavailable = lambda *_: ""  # type: ignore[method-assign]
    prolog(agent, job=6, share="60")
    prolog(agent, job=7, share="60")


def limited_power(
    agent: Agent, *, unsupported: bool = False, refused: bool = False, caps: tuple[NodeCap, ...] = CAPS
) -> None:
    """A policy's caps, and a driver that answers as it is told to."""
    path = agent.state.settings.policy.with_name("sluice.node.json")
    path.write_text(NodePolicy(power=NodePower(caps=caps)).render())
    limit = {"cap_mw": 700_000, "default_mw": 700_000, "least_mw": 200_000, "most_mw": 700_000}

    def ask(*, do: str, **_: object) -> dict[str, Any]:
        if do == "set_power_limit":
            assert refused
            raise SluiceError("the nvidia driver: no permission")
        if unsupported:
            return {"limits": {}, "unsupported": {"GPU-0": "not supported"}, "failed": {}}
        return {"limits": {"GPU-0": limit}, "unsupported": {}, "failed": {}}

    agent.watcher.watches["nvidia"].worker.ask = ask  # type: ignore[method-assign]


def wish_that_the_driver_refuses(agent: Agent) -> None:
    limited_power(agent, refused=True, caps=())
    prolog(agent, power="300W")


def task_of_a_refused_job(agent: Agent) -> None:
    known(agent, refused="no share")
    limit(agent)


def task_of_role(agent: Agent, role: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
        patch.setattr("prolog_epilog.cgroups.take_steps", lambda *_: None)
        agent.jobs.task(peer=ROOTS, open=["/dev/nvidia0"], step={"role": role})


def role_of_none(agent: Agent) -> None:
    known(agent)
    task_of_role(agent, "learner")


def role_elsewhere(agent: Agent) -> None:
    known(agent)
    agent.state.records[7].roles = f"learner,actor {agent.state.node}=1/0"
    task_of_role(agent, "learner")


def over_cap(agent: Agent) -> None:
    tenants = [Tenant(account="physics", gpu_memory_mib_per_gpu=1)]
    CompiledPolicy(generated_s=0, source="test", tenants=tenants).write(agent.state.settings.policy)
    known(agent)
    limit(agent)


def rung(agent: Agent, name: str) -> Any:
    return agent.jobs._ladder._rungs[name]


def below_a_context(agent: Agent) -> None:
    driver, record = rung(agent, "driver"), known(agent)
    driver._folder = lambda _: Path("/nonexistent")
    record.grants[0].limit = GIB
    driver.apply(record, record.grants[0])


def no_cgroup(agent: Agent) -> None:
    driver, record = rung(agent, "driver"), known(agent)
    driver._folder = lambda _: None
    driver.apply(record, record.grants[0])


def unknown_context(agent: Agent) -> None:
    agent.contexts.measured = {}
    agent.regions.make(known(agent))


def no_rung(agent: Agent) -> None:
    limits(agent, ladder=("mig",))
    known(agent)
    limit(agent, shards=4096)


def not_in_force(agent: Agent) -> None:
    limits(agent, ladder=("watchdog",))
    rung(agent, "watchdog").unavailable = lambda *_: ""
    rung(agent, "watchdog").verify = lambda *_: "nobody watches"
    known(agent)
    limit(agent, shards=4096)


TRIED: dict[Refusal, Callable[[Agent], object]] = {
    Refusal.DRIVER_SILENT: silent_driver,
    Refusal.GPU_SICK: sick_gpu,
    Refusal.NO_ROOM: full_folder,
    Refusal.NO_DEVICE_FILE: missing_device_file,
    Refusal.SHARE_UNREADABLE: lambda agent: prolog(agent, share="50%"),
    Refusal.SHARE_IMPOSSIBLE: lambda agent: prolog(agent, share="50"),
    Refusal.SHARE_OF_UNLIKE_GPUS: unlike_gpus,
    Refusal.SHARE_TAKEN: two_of_sixty_percent,
    Refusal.POWER_UNREADABLE: lambda agent: prolog(agent, power="lots"),
    Refusal.POWER_OVER_POLICY: lambda agent: (limited_power(agent), prolog(agent, power="401W")),
    Refusal.POWER_OUT_OF_RANGE: lambda agent: (limited_power(agent), prolog(agent, power="199W")),
    Refusal.POWER_UNSUPPORTED: lambda agent: (limited_power(agent, unsupported=True), prolog(agent, power="300W")),
    Refusal.POWER_NOT_TAKEN: wish_that_the_driver_refuses,
    Refusal.POWER_NOT_SET: lambda agent: (limited_power(agent, refused=True), prolog(agent)),
    Refusal.JOB_REFUSED: task_of_a_refused_job,
    Refusal.SUSPECT: lambda agent: (known(agent), agent.state.suspects.add(7), limit(agent)),
    Refusal.JOB_UNKNOWN: limit,
    Refusal.PROLOG_SKIPPED: lambda agent: (prolog(agent, job=6), limit(agent)),
    Refusal.WRONG_USER: lambda agent: (known(agent), limit(agent, uid=5)),
    Refusal.NO_TASK: lambda agent: agent.jobs.task(peer=Peer(os.getpid(), 1000), open=[]),
    Refusal.GPU_NOT_GIVEN: lambda agent: (known(agent), limit(agent, gpus=[1])),
    Refusal.GPU_OPEN: lambda agent: (known(agent), limit(agent, open=["/dev/nvidia1"])),
    Refusal.ROLE_UNKNOWN: role_of_none,
    Refusal.ROLE_NOT_HERE: role_elsewhere,
    Refusal.SHARDS_NOT_SPLIT: lambda agent: (known(agent, gpus=2), limit(agent, gpus=[0, 1], shards=5)),
    Refusal.MORE_THAN_THE_GPU: lambda agent: (known(agent), limit(agent, shards=100 * 1024)),
    Refusal.OVER_CAP: over_cap,
    Refusal.LESS_THAN_A_CONTEXT: below_a_context,
    Refusal.CONTEXT_UNKNOWN: unknown_context,
    Refusal.NO_RUNG: no_rung,
    Refusal.NOT_IN_FORCE: not_in_force,
    Refusal.NO_CGROUP: no_cgroup,
    Refusal.BUSY: lambda agent: (known(agent), agent.pause(peer=ROOTS)),
}


def test_a_refused_job_that_begins_again_without_its_prolog_is_to_wait_again(agent: Agent) -> None:
    """As after a controller that forgot the start: slurmd runs no second prolog then."""
    held: list[tuple[int, str]] = []
    agent.jobs.on_refused = lambda record, why: held.append((record.job, why))
    known(agent, refused="no share")
    with pytest.raises(RefusalError, match="no share"):
        limit(agent)
    assert held == [(7, "no share")]


def test_a_wish_that_the_driver_refuses_holds_the_job_and_not_the_node(agent: Agent) -> None:
    held: list[int] = []
    agent.jobs.on_refused = lambda record, _: held.append(record.job)
    with pytest.raises(RefusalError, match="no permission") as told:
        wish_that_the_driver_refuses(agent)
    assert told.value.blame is Blame.JOB and held == [7]
    record = agent.state.records[7]
    assert record.grants == [] and "no permission" in record.refused
    with pytest.raises(RefusalError, match="no permission"):
        limit(agent)


def test_a_job_that_begins_without_its_prolog_is_to_begin_again(agent: Agent) -> None:
    """A step's own request registers nothing."""
    assert ask(agent, do="announce") == {"ok": {}}
    answer = ask(agent, do="limit", job=7, uid=1000, whole=True, gpus=[0], shards=0, open=[])
    assert answer == {"error": "job 7: slurmd ran no prolog for it; it is requeued", "blame": "job"}
    assert agent.state.records == {} and not Hold.read(agent.holds.folder / "7").held


@pytest.mark.parametrize("refusal", Refusal, ids=lambda one: one.name)
def test_each_refusal_is_given_with_its_blame(agent: Agent, refusal: Refusal) -> None:
    with pytest.raises(RefusalError) as told:
        TRIED[refusal](agent)
    assert told.value.refusal is refusal and told.value.blame is refusal.blame


# ---- what happens to the job ----


def ask(agent: Agent, **request: object) -> dict[str, Any]:
    return agent.server.answer(json.dumps(request).encode(), ROOTS)


JOB = {"do": "prolog", "job": 7, "uid": 1000, "user": "ann", "account": "physics", "partition": "main", "gpus": [0]}
FORGED = (
    "50%",
    " 50",
    "050",
    "50.0",
    "+50",
    "5e1",
    "0",
    "101",
    "",
    "x",
    "\u0665\u0660",
    "50\n",
    "-1",
    "\udcff",
    "9" * 60,
)


@pytest.mark.parametrize("share", FORGED)
def test_a_forged_share_is_the_jobs_own_fault(agent: Agent, share: str) -> None:
    answer = ask(agent, **JOB, share=share, restarts=2)
    assert answer["blame"] == "job" and "--gpu-share=" in answer["error"]
    record = agent.state.jobs.load(7)
    assert record.refused == answer["error"] and record.grants == []
    assert Hold.read(agent.holds.folder / "7").restarts == 2


def test_the_shares_that_nodes_read_are_those_that_job_submit_writes() -> None:
    assert [read_share(str(percent)) for percent in range(1, 101)] == list(range(1, 101))


@pytest.mark.parametrize("account", ["a\x00b", "\udcff" * 1024, "\u202e", "x" * 1024])
def test_no_name_of_an_account_is_the_nodes_fault(agent: Agent, account: str) -> None:
    assert ask(agent, **JOB | {"account": account}) == {"ok": {}}
    agent.state.records[7].to_json().encode()
    assert len(agent.state.records[7].account) <= 256


def test_nothing_of_a_refused_job_starts_also_after_a_restart_and_its_epilog_does_not_wait(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(agent, **JOB, share="50%")["blame"] == "job"
    for one in (agent, again := make_agent(tmp_path)):
        if one is again:
            again.state.find_jobs()
            again.jobs.take_over()
        told = ask(one, do="limit", job=7, uid=1000, whole=True, gpus=[0], shards=0, open=[])
        assert told["blame"] == "job" and "job 7 is refused: --gpu-share='50%'" in told["error"]
        monkeypatch.setattr(cgroups, "place_of", lambda *_: Place(7, "batch"))
        assert "is refused" in ask(one, do="task", open=[])["error"]
    monkeypatch.setattr(again.watcher, "await_sample", lambda *_: pytest.fail("waited for a sample"))
    assert ask(again, do="epilog", job=7) == {"ok": {"unclean": []}}
    assert again.state.records == {} and not list(again.state.jobs.folder.iterdir())
    kept = again.state.store.load(7)
    assert "--gpu-share='50%'" in kept.refused and kept.events[0].action == "refuse"


@pytest.mark.parametrize("heard", [{"do": "epilog", "job": 7}, JOB], ids=["epilog", "prolog"])
def test_a_job_whose_epilog_gave_up_is_taken_back_when_it_is_clear_that_it_ended(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: dict[str, Any]
) -> None:
    ask(agent, **JOB)
    again = make_agent(tmp_path)
    again.state.find_jobs()
    again.jobs.take_over()
    assert 7 in again.state.records  # it has no process yet, or none any more
    monkeypatch.setattr(JobRecord, "age", lambda _: 31.0)
    again.jobs.settle_inherited()
    assert again.state.records == {} and again.state.store.load(7).ended

    ask(agent, **JOB)
    later = make_agent(tmp_path)
    monkeypatch.setattr(JobRecord, "age", lambda _: 1.0)
    later.state.find_jobs()
    later.jobs.take_over()
    monkeypatch.setattr(JobRecord, "age", lambda _: 31.0)
    monkeypatch.setattr(later.jobs, "_take_back", lambda *_: None)  # as an epilog that is not through
    ask(later, **heard)
    later.jobs.settle_inherited()
    assert 7 in later.state.records


def test_a_prolog_waits_for_a_driver_that_is_slow_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.jobs._DRIVER_SECONDS", 60.0)
    watch = agent.watcher.watches["nvidia"]
    watch.problem = SluiceError("the nvidia driver gives no answer")
    threading.Timer(0.3, setattr, (watch, "problem", None)).start()
    prolog(agent)
    assert 7 in agent.state.records


def test_a_job_that_runs_is_refused_again_where_it_was(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(agent, **JOB, share="50%")["blame"] == "job"
    monkeypatch.setattr(cgroups, "jobs_here", lambda: {7})
    assert ask(agent, **JOB, share="50")["blame"] == "job"


def test_a_refused_job_takes_no_share_from_others(agent: Agent) -> None:
    limits(agent, ladder=("mps", "watchdog"))
    agent.jobs._ladder._shares._mps.unavailable = lambda *_: ""  # type: ignore[method-assign]
    assert ask(agent, **JOB | {"job": 5}, share="60") == {"ok": {}}
    assert "the jobs on GPU 0 leave 40 %" in ask(agent, **JOB | {"job": 6}, share="60")["error"]
    assert ask(agent, **JOB, share="40") == {"ok": {}}


def test_a_job_that_cannot_be_remembered_as_refused_is_the_nodes_fault(agent: Agent) -> None:
    agent.holds.folder.rmdir()  # as on a full /run
    assert ask(agent, **JOB, share="50%")["blame"] == "node" and agent.state.records == {}


def test_what_a_tenant_left_in_its_jobs_files_does_not_fail_the_epilog(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deep(*_: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    known(agent, gpus=0)
    monkeypatch.setattr(agent.regions, "collect", deep)
    monkeypatch.setattr(agent.jobs._ladder, "remove", deep)
    assert ask(agent, do="epilog", job=7) == {"ok": {"unclean": []}}
    assert agent.state.records == {}


# ---- the programs ----


def run_program(name: str, folder: Path, answer: bytes, **environment: str) -> subprocess.CompletedProcess[str]:
    """One of the programs, with the agent's answer to each request in the place of the agent."""
    text = PROGRAM.read_text().replace("def exchange(", f"def exchange(*_):\n    return {answer!r}\n\n\ndef unused(")
    (folder / name).write_text(text)
    words = ["/usr/bin/python3", "-IS", str(folder / name)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


SLURMS = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURM_JOB_GPUS": "0"}


@pytest.mark.parametrize(("blame", "status"), [("job", 0), ("node", 1), (None, 1), ("JOB", 1), (["job"], 1)])
def test_only_what_is_the_nodes_fault_fails_the_prolog(tmp_path: Path, blame: object, status: int) -> None:
    answer = json.dumps({"error": "no share"} | ({} if blame is None else {"blame": blame})).encode()
    done = run_program("sluice-prolog", tmp_path, answer, **SLURMS)
    assert (done.returncode, done.stderr) == (status, "sluice-prolog: no share\n")


@pytest.mark.parametrize(("blame", "status"), [("job", 3), ("node", 1)])
def test_the_helper_of_a_refused_job_fails_and_says_why(tmp_path: Path, blame: str, status: int) -> None:
    answer = json.dumps({"error": "job 7 is refused", "blame": blame, "ok": {"files": []}}).encode()
    task = {"SLUICE_JOB": "7", "SLUICE_UID": "1", "SLUICE_STEP": "whole", "SLUICE_GPUS": "0"}
    done = run_program("sluice-task-init", tmp_path, answer, **task)
    assert (done.returncode, done.stdout) == (status, "sluice-task-init: job 7 is refused\n")


@pytest.mark.parametrize("name", ["gpu_share", "gpu-share"])
@pytest.mark.parametrize("share", ["50%", "", "x" * 100000, "\udcff"])
def test_the_prolog_passes_on_whatever_share_a_user_wrote(tmp_path: Path, name: str, share: str) -> None:
    text = PROGRAM.read_text().replace(
        '    if numbers("SLURM_JOB_GPUS"):\n        answer = ask(', "    if True:\n        answer = print_request("
    )
    printing = "def print_request(**request):\n    print(encode(request))\n    return {}\n\n\n"
    text = text.replace("def prolog()", f"{printing}def prolog()")
    (tmp_path / "sluice-prolog").write_text(text)
    environment = {os.fsencode(key): os.fsencode(value) for key, value in SLURMS.items()}
    environment[b"SPANK__SLURM_SPANK_OPTION_sluice_" + name.encode()] = share.encode(errors="surrogateescape")
    words = ["/usr/bin/python3", "-IS", str(tmp_path / "sluice-prolog")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["share"] == share[:64]


# ---- how it is reported to the controllers ----


class Slurm:
    """Slurm's commands, of one job."""

    def __init__(self, **changes: str) -> None:
        self.job = {
            "JobID": "7",
            "ArrayJobID": "7",
            "ArrayTaskID": "N/A",
            "State": "RUNNING",
            "Requeue": "1",
            "RestartCnt": "0",
            "BatchFlag": "1",
            "EndTime": "N/A",
            "NumNodes": "1",
            "Partition": "main",
        }
        self.job |= changes
        self.comment = "site's own"
        self.said = {"requeuehold": "", "requeue": "", "scancel": ""}
        self.done: list[list[str]] = []
        self.up = True

    def output(self, name: str, *words: str) -> str:
        return self.run(name, *words).stdout

    def run(self, name: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        if not self.up:
            raise CommandError(f"{name}: Unable to contact slurm controller (connect failure)", returncode=1)
        out, error = "", ""
        if name == "squeue" and words[-1].startswith(
            "admin_comment:"
        ):  # the only name that both versions of Slurm know
            out = f"{self.comment or '(null)'}   \n"
        elif name == "squeue":
            widths = [field.split(":") for field in words[-1].split(",")]
            out = "".join(self.job[field].ljust(int(width)) for field, width in widths) + "\n"
        elif words[0] == "update":
            if self.job["State"] == "FAILED":
                raise CommandError("scontrol: Job has already finished", returncode=1)
            self.comment = words[2].partition("=")[2]
        else:
            error = self.said["scancel" if name == "scancel" else words[0]]
            self.done.append([name, *words])
            if words[0] == "requeuehold" and not error and self.job["State"] == "FAILED":
                self.job["State"] = "PENDING"
        return subprocess.CompletedProcess([name, *words], 1 if error else 0, out, error)


def holds(tmp_path: Path, slurm: Slurm, restarts: int | None = 0) -> tuple[Holds, list[float]]:
    now = [1000.0]
    made = Holds(tmp_path / "refused", commands=slurm, clock=lambda: now[0])  # type: ignore[arg-type]
    made.prepare()
    record = JobRecord(7, 1000, "ann", "physics", "main", "n1", 1.0, restarts=restarts, refused='no "share"\nleft')
    made.put(record, record.refused)
    return made, now


def waiting(made: Holds) -> int:
    return len(list(made.folder.iterdir()))


def test_a_refused_batch_job_is_requeued_held_with_the_reason(tmp_path: Path) -> None:
    slurm = Slurm()
    made, now = holds(tmp_path, slurm)
    assert made.run() == 1.0
    assert slurm.done == [["scontrol", "requeuehold", "7"]]
    now[0] += 11
    slurm.job["State"] = "PENDING"
    assert made.run() is None and waiting(made) == 0 and len(slurm.done) == 1
    assert slurm.comment == "site's own sluice-refused: on n1: no share left"


@pytest.mark.parametrize("state", ["RUNNING", "FAILED"])
def test_a_job_without_its_prolog_is_requeued_once_without_a_comment(tmp_path: Path, state: str) -> None:
    slurm = Slurm(ArrayTaskID="3", State=state)
    made = Holds(tmp_path / "refused", commands=slurm)  # type: ignore[arg-type]
    made.prepare()
    made.put_back(7)
    assert made.run() is None and waiting(made) == 0
    assert slurm.done == [["scontrol", "requeue", "7_3"]] and slurm.comment == "site's own"


def test_a_job_without_its_prolog_that_cannot_be_requeued_fails_by_itself(tmp_path: Path) -> None:
    slurm = Slurm(Requeue="0")
    made = Holds(tmp_path / "refused", commands=slurm)  # type: ignore[arg-type]
    made.prepare()
    made.put_back(7)
    assert made.run() is None and waiting(made) == 0 and slurm.done == []


def test_the_reason_is_all_where_there_was_no_comment(tmp_path: Path) -> None:
    slurm = Slurm()
    slurm.comment = ""
    holds(tmp_path, slurm)[0].run()
    assert slurm.comment == "sluice-refused: on n1: no share left"


def test_a_task_of_an_array_is_meant_alone(tmp_path: Path) -> None:
    slurm = Slurm(ArrayTaskID="3")
    holds(tmp_path, slurm)[0].run()
    assert slurm.done == [["scontrol", "requeuehold", "7_3"]]


@pytest.mark.parametrize("changes", [{"Requeue": "0"}, {"BatchFlag": "0"}])
def test_what_cannot_be_requeued_says_why_and_is_cancelled(tmp_path: Path, changes: dict[str, str]) -> None:
    slurm = Slurm(**changes)
    made, now = holds(tmp_path, slurm)
    assert made.run() == 1.0 and slurm.done == []
    now[0] += 6
    assert made.run() == 1.0 and slurm.done == [["scancel", "7"]]
    assert "no share left" in slurm.comment
    now[0] += 11
    slurm.job["State"] = "CANCELLED"
    assert made.run() is None


def test_a_controller_that_died_before_it_saved_is_asked_again(tmp_path: Path) -> None:
    slurm = Slurm()
    made, now = holds(tmp_path, slurm)
    assert made.run() == 1.0 == made.run() and len(slurm.done) == 1
    now[0] += 11
    slurm.comment, slurm.job["State"] = "", "FAILED"
    assert made.run() == 1.0 and slurm.done == [["scontrol", "requeuehold", "7"]] * 2
    assert "no share left" in slurm.comment


def test_what_slurm_does_not_requeue_after_all_is_cancelled(tmp_path: Path) -> None:
    slurm = Slurm()
    slurm.said["requeuehold"] = "Requested operation is presently disabled for job 7"
    assert holds(tmp_path, slurm)[0].run() == 1.0
    assert slurm.done == [["scontrol", "requeuehold", "7"], ["scancel", "7"]]


@pytest.mark.parametrize(
    ("changes", "restarts"), [({"RestartCnt": "1"}, 0), ({"State": "PENDING"}, 0), ({"State": "CANCELLED"}, None)]
)
def test_only_that_run_is_meant(tmp_path: Path, changes: dict[str, str], restarts: int | None) -> None:
    slurm = Slurm(**changes)
    made, _ = holds(tmp_path, slurm, restarts)
    assert made.run() is None and waiting(made) == 0 and slurm.done == [] and slurm.comment == "site's own"


def test_the_controllers_are_asked_until_one_answers_also_after_a_restart(tmp_path: Path) -> None:
    slurm = Slurm()
    made, _ = holds(tmp_path, slurm)
    slurm.up = False
    for _ in range(2):
        with pytest.raises(CommandError, match="Unable to contact"):
            made.run()
    again = Holds(tmp_path / "refused", commands=slurm)  # type: ignore[arg-type]
    slurm.up, slurm.job["State"] = True, "COMPLETING"
    assert again.run() == 1.0
    slurm.job["State"] = "FAILED"  # its batch script was not started
    assert again.run() == 1.0 and slurm.done == [["scontrol", "requeuehold", "7"]]


def test_a_job_that_nobody_takes_keeps_up_no_other(tmp_path: Path) -> None:
    slurm = Slurm()
    made, _ = holds(tmp_path, slurm)
    (made.folder / "8").write_text("nonsense")
    slurm.said["requeuehold"] = "something new"
    with pytest.raises(CommandError, match="something new"):
        made.run()
    assert [path.name for path in made.folder.iterdir()] == ["7"]


def test_the_reason_lies_between_others_words() -> None:
    first = with_reason("site", "on n1: one")
    both = f"{first} sluice:v=1,rung=none"
    assert reason_in(both) == "on n1: one"
    assert with_reason(both, "on n2: two") == "site sluice:v=1,rung=none sluice-refused: on n2: two"
    assert reason_in("") == reason_in("sluice:v=1") == ""
