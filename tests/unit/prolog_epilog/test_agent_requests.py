"""What the agent answers to prologs, tasks and epilogs: limits in force, and requests that it refuses."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import pytest

from policy.compiled import CompiledPolicy, Tenant
from prolog_epilog.agent import Agent
from prolog_epilog.cgroups import Place
from prolog_epilog.hints import OF_LIBRARIES
from prolog_epilog.server import Peer
from prolog_epilog.state import RefusalError
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker
from sluice.exchange.record import Grant, JobRecord
from tests.unit.prolog_epilog.examples import GIB, MIB, granted, record


def ask(agent: Agent, peer_uid: Any = 0, **request: object) -> dict[str, object]:
    return agent.server.answer(json.dumps(request).encode(), Peer(os.getpid(), peer_uid))


def test_the_smaller_of_what_was_asked_and_the_cap_holds(agent: Agent) -> None:
    CompiledPolicy(
        generated_s=0, source="test", tenants=[Tenant(account="physics", gpu_memory_mib_per_gpu=10240)]
    ).write(agent.state.settings.policy)
    for asked, bound in ((4 * GIB, 4 * GIB), (20 * GIB, 10 * GIB), (None, 10 * GIB)):
        one = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
        agent.jobs.limit_device(one, agent.state.devices[0], asked, True)
        assert one.grants[0].limit == bound
    other = granted(8 * GIB, job=8)
    agent.state.records[8] = other
    one = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
    agent.jobs.limit_device(one, agent.state.devices[0], 4 * GIB, True)
    assert one.grants[0].limit == 2 * GIB  # what the tenant's other job leaves
    other.grants[0].limit = 10 * GIB
    with pytest.raises(RefusalError, match=r"account physics may have 10G of a GPU, and its jobs here have 10G"):
        agent.jobs.limit_device(one, agent.state.devices[0], 4 * GIB, True)


def test_steps_that_srun_starts_do_not_add_up(agent: Agent) -> None:
    """With --overlap their parts are the same memory; the largest is the job's, until the whole is known."""
    one = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
    for asked, whole, bound in ((2, False, 2), (4, False, 4), (3, False, 4), (8, True, 8)):
        agent.jobs.limit_device(one, agent.state.devices[0], asked * GIB, whole)
        assert one.grants[0].limit == bound * GIB


def test_requests_that_make_no_sense_are_refused(agent: Agent) -> None:
    for line in (b"", b"x", b"[]", b"1", b'{"do": "no"}', b'{"do": []}', b"{}", b'{"do": "prolog"}'):
        assert "error" in agent.server.answer(line, Peer(1, 0)), line
    for wrong in ({"job": 1, "gpus": [9]}, {"job": 1, "gpus": [-1]}, {"job": 1, "gpus": 3}):
        fields = {"uid": 1, "user": "", "account": "", "partition": ""} | wrong
        assert "error" in ask(agent, do="prolog", **fields)
    assert agent.state.records == {} and list(agent.state.jobs.folder.iterdir()) == []


def test_a_split_over_gpus_is_in_force_from_the_prolog_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.cgroups.jobs_here", lambda: set())
    for name in ("nvidia",):
        agent.watcher.watches[name] = Watch(Worker(name))
    job = {"do": "prolog", "uid": 1000, "user": "ann", "account": "physics", "partition": "main", "gpus": [0, 1]}
    assert ask(agent, **job, job=7, split=[[0, 40960], [1, 512]]) == {"ok": {}}
    one = agent.state.records[7]
    assert one.split and [grant.limit for grant in one.grants] == [40 * GIB, 512 * MIB]
    assert ask(agent, **job, job=8, split=[[0, 1000]]) == {"ok": {}}  # not of all its GPUs: it is not used
    assert not agent.state.records[8].split and agent.state.records[8].grants[0].limit is None
    assert "makes no sense" in str(ask(agent, **job, job=9, split=[[0]])["error"]) or 9 not in agent.state.records


def test_only_root_may_speak_for_jobs(agent: Agent) -> None:
    for name in ("prolog", "limit", "epilog", "status"):
        assert "for root only" in str(ask(agent, peer_uid=1000, do=name)["error"])
    found = {"files": ["/dev/nvidia0", "/dev/nvidia1"], "nics": {}, "variables": OF_LIBRARIES, "roles": False}
    assert ask(agent, peer_uid=1000, do="devices") == {"ok": found}


def test_limits_are_refused_that_cannot_hold(agent: Agent) -> None:
    fields = {"do": "limit", "job": 7, "uid": 1000, "whole": True, "gpus": [0], "shards": 10, "open": []}
    assert "its prolog did not run" in str(ask(agent, **fields)["error"])
    agent.state.records[7] = record(grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 * GIB)])
    assert "of user 1000, not 5" in str(ask(agent, **fields | {"uid": 5})["error"])
    assert "GPU 1 was not given to" in str(ask(agent, **fields | {"gpus": [1]})["error"])
    assert "can open /dev/nvidia1, which it was not given" in str(ask(agent, **fields | {"open": ["/dev/nvidia1"]}))
    assert agent.state.records[7].events[-1].detail["open"] == ["/dev/nvidia1"]
    assert "100G requested of a GPU with 80G" in str(ask(agent, **fields | {"shards": 100 * 1024})["error"])
    agent.state.records[7].grants.append(Grant(1, "GPU-1", "nvidia", "H100", 80 * GIB))
    assert "how many on each" in str(ask(agent, **fields | {"gpus": [0, 1]})["error"])
    agent.contexts.measured = {}
    assert "a driver context is not known" in str(ask(agent, **fields)["error"])


def test_what_a_task_makes_up_is_refused_and_not_kept(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: 62 KB of names a request, each of them another event."""
    agent.state.records[7] = granted(GIB)
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
    other = agent.state.devices[1].own_file
    saved: list[JobRecord] = []
    monkeypatch.setattr(agent.state.jobs, "save", saved.append)
    for number in range(200):
        request = {"do": "task", "open": [other, *(f"/dev/{number}/" + "x" * 100 for _ in range(50))]}
        answer = agent.server.answer(json.dumps(request).encode(), Peer(1, 1000))
        assert "which it was not given" in answer["error"]
    [event] = agent.state.records[7].events
    assert event.detail["open"] == [other] and event.times == 200 and len(saved) == 1
    answer = agent.server.answer(b'{"do": "status"}', Peer(1, 0))
    assert len(json.dumps(answer)) < 8 << 10


def test_what_a_user_has_set_is_kept_and_recorded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.state.records[7] = granted(GIB)
    agent.jobs.interface = lambda: "eth0"
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
    monkeypatch.setattr("prolog_epilog.cgroups.take_steps", lambda *_: None)
    request = {"do": "task", "open": ["/dev/nvidia0"], "nics": ["mlx5_0"], "own": ["NCCL_IB_HCA", "made up"]}
    for _ in range(100):
        answer = agent.server.answer(json.dumps(request).encode(), Peer(1, 1000))
    assert answer["ok"]["export"]["SLUICE_SET"] == "CUDA_DEVICE_ORDER=PCI_BUS_ID GLOO_SOCKET_IFNAME=eth0"
    assert "NCCL_IB_HCA" not in answer["ok"]["export"]
    [event] = agent.state.records[7].events
    assert (event.action, event.detail, event.times) == ("own", {"set": ["NCCL_IB_HCA"]}, 100)


def test_a_task_is_told_its_role_and_sees_its_gpus_alone(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.state.records[7] = granted(GIB)
    agent.state.records[7].grants.append(Grant(1, "GPU-1", "nvidia", "H100", 80 * GIB))
    agent.state.records[7].roles = f"learner,actor {agent.state.node}=1/0"
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
    monkeypatch.setattr("prolog_epilog.cgroups.take_steps", lambda *_: None)
    both = ["/dev/nvidia0", "/dev/nvidia1"]
    step = {"role": "learner", "tasks": "1", "size": 1, "visible": {"CUDA_VISIBLE_DEVICES": "0,1"}}

    def told(peer_uid: int = 0, **request: object) -> Any:
        return ask(agent, peer_uid, **request)["ok"]

    assert told(1000, do="devices")["roles"]
    for _ in range(5):
        answer = told(do="task", open=both, nics=[], step=step)
    assert answer["visible"] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert answer["export"]["SLUICE_GPU_ROLE"] == "learner"
    [event] = agent.state.records[7].events
    assert (event.detail, event.times) == ({"step": "0", "role": "learner", "gpus": [1]}, 5)
    batch = told(do="task", open=both, nics=[])
    assert batch["visible"] == {}
    assert "SLUICE_GPU_ROLE" not in batch["export"]
    assert batch["export"]["SLUICE_GPU_ROLES"] == f"learner={agent.state.node}:1 actor={agent.state.node}:0"


def test_tasks_far_from_their_gpus_are_recorded(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.state.records[7] = granted(GIB)
    agent.state.inventory.processors.numa = {0: f"0-{1 << 10}", 1: f"{(1 << 10) + 1}-{1 << 11}"}
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
    monkeypatch.setattr("prolog_epilog.cgroups.take_steps", lambda *_: None)
    for _ in range(8):
        assert "ok" in ask(agent, do="task", open=["/dev/nvidia0"], nics=[])
    [event] = agent.state.records[7].events
    assert (event.action, event.times, event.detail["agrees"]) == ("binding", 8, True)
    assert event.detail["cpus"] == len(os.sched_getaffinity(0))
    agent.state.inventory.processors.numa = {0: "2048", 1: "0-2047"}
    assert "ok" in ask(agent, do="task", open=["/dev/nvidia0"], nics=[])
    assert agent.state.records[7].events[-1].detail | {"cpus": 0, "memory_nodes": "", "huge_mib": 0} == {
        "huge_mib": 0, "huge_far_mib": None,
        "step": "0", "gpu_nodes": "0", "cpus": 0, "cpus_near": 0, "cpu_nodes": "1", "memory_nodes": "", "agrees": False,
    }  # fmt: skip


def test_a_task_of_a_job_that_ends_meanwhile_does_not_write_its_record_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent would send it a second time."""

    class Lock:
        """The job's epilog had it before."""

        def __enter__(self) -> None:
            agent.state.records.pop(7, None)

        def __exit__(self, *_: object) -> None:
            pass

    agent.state.records[7] = granted(GIB)
    monkeypatch.setattr(agent.state, "lock", Lock())
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: Place(7, "0"))
    monkeypatch.setattr("prolog_epilog.cgroups.take_steps", lambda *_: None)
    answer = ask(agent, do="task", open=["/dev/nvidia0"], nics=[], own=["NCCL_IB_HCA"])
    assert "not a task of a job" in str(answer["error"])
    assert list(agent.state.jobs.folder.iterdir()) == []


def test_a_stage_is_no_reason_to_fail_on_a_full_disk(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that runs again would be taken for one that does not, and started a second time."""
    agent.state.records[7] = one = granted(GIB)
    one.started_uptime = 5.0
    monkeypatch.setattr(type(agent.state.jobs), "save", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    agent.saver.restored_from(7, 6.0)
    assert [stage.name for stage in one.stages] == ["restore"]


def test_the_drivers_are_let_go_for_a_change_of_layout(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, asked = Watch(Worker("nvidia")), []
    agent.watcher.watches["nvidia"] = watch

    def sample(**request: object) -> dict[str, object]:
        asked.append(request)
        agent.state.stopping.set()
        return {"usage": []}

    monkeypatch.setattr(watch.worker, "ask", sample)
    agent.state.records[7] = granted(GIB)
    assert "1 jobs have GPUs here" in str(ask(agent, do="pause")["error"])
    del agent.state.records[7]
    assert ask(agent, do="pause") == {"ok": {}}
    thread = threading.Thread(target=agent.watcher._watch, args=(watch,), daemon=True)
    thread.start()
    thread.join(0.5)
    assert asked == []
    agent.watcher._paused_until = 0.0
    thread.join(20)
    assert len(asked) == 1
    assert ask(agent, do="restart") == {"ok": {}}
