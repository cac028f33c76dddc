from __future__ import annotations

import subprocess
from typing import Any

import pytest

from policy.checkpoint import NodeCheckpoint
from sluice.base.run import CommandError
from sluice.controllerd.health.requeue import Requeue, Requeues


def shown(fields: str, values: dict[str, Any]) -> str:
    """A line of `squeue -O`."""
    return "".join(f"{values[name]!s:.{int(width)}}".ljust(int(width)) for name, width in _pairs(fields)) + "\n"


def _pairs(fields: str) -> list[list[str]]:
    return [field.split(":") for field in fields.split(",")]


class Slurm:
    """One job; records the requests for it."""

    def __init__(self, **changes: Any) -> None:
        self.job = {
            "state": "RUNNING",
            "requeue": 1,
            "restarts": 0,
            "end": "N/A",
            "wanted": "(null)",
            "excluded": "(null)",
            "comment": "(null)",
            "array_task": "N/A",
        } | changes
        self.asked: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.requeues = {7: Requeue("n1", "sluice: xid GPU 0: XID 79", "k", 1000.0)}
        self.tries: dict[int, int] = {}
        self.known = True

    def output(self, name: str, *arguments: str) -> str:
        if name == "squeue":
            if not self.known:
                raise CommandError("squeue: slurm_load_jobs error: Invalid job id specified")
            if arguments[-2] == "-o":
                assert arguments[-1] == "%n|%x|%a|%k"
                return "{wanted}|{excluded}|physics|{comment}\n".format(**self.job)
            facts: dict[str, Any] = {
                "JobID": 7,
                "ArrayJobID": 7,
                "ArrayTaskID": self.job["array_task"],
                "State": self.job["state"],
                "Requeue": self.job["requeue"],
                "BatchFlag": 1,
                "RestartCnt": self.job["restarts"],
                "EndTime": self.job["end"],
                "NumNodes": 1,
                "Partition": "main",
            }
            other = facts | {"JobID": 77, "State": "COMPLETED"}
            return shown(arguments[-1], other) + shown(arguments[-1], facts)
        self.asked.append(" ".join([name, *arguments]))
        if arguments[0] == "requeue":
            self.job |= {"state": "PENDING", "restarts": 1}
        return ""

    def run(self, name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        self.output(name, *arguments)
        return subprocess.CompletedProcess([], 0, "", "")

    def advance(self, now: float = 1010.0, nodes: int = 4, down: tuple[str, ...] = (), **policy: Any) -> list[str]:
        self.asked.clear()
        requeues = Requeues(self, lambda kind, node, job, words: self.events.append((kind, words)))  # type: ignore[arg-type]
        requeues.advance(self.requeues, self.tries, NodeCheckpoint(**policy), now, {"main": nodes}, down)
        return list(self.asked)


def test_a_running_job_is_requeued_waits_and_keeps_away() -> None:
    slurm = Slurm()
    assert slurm.advance() == ["scontrol requeue 7"]
    assert slurm.advance() == ["scontrol update JobId=7 StartTime=now+60 ExcNodeList=n1"]
    assert not slurm.requeues and slurm.tries == {7: 1}
    assert slurm.events == [("health.requeue", "start 1 of 3, in 60 s; sluice: xid GPU 0: XID 79")]


def test_the_wait_doubles_and_hints_add_up_until_the_budget_is_used_up() -> None:
    slurm = Slurm(excluded="n[3-4]")
    slurm.tries[7] = 2
    slurm.advance()
    assert slurm.advance(nodes=9) == ["scontrol update JobId=7 StartTime=now+240 ExcNodeList=n1,n3,n4"]
    slurm.job["state"] = "RUNNING"
    slurm.requeues = {7: Requeue("n1", "again", "k2", 2000.0)}
    assert slurm.advance() == []
    assert slurm.events[-1] == ("health.not-requeued", "its 3 restarts are used up; again")


def test_a_hint_never_leaves_too_few_nodes_nor_those_that_the_job_must_have() -> None:
    for slurm, nodes in ((Slurm(), 1), (Slurm(wanted="n[1-2]"), 9)):
        slurm.advance(nodes=nodes)
        assert slurm.advance(nodes=nodes) == ["scontrol update JobId=7 StartTime=now+60"]


@pytest.mark.parametrize(
    ("job", "policy", "event"),
    [
        ({"state": "COMPLETED", "end": 1005}, {}, ""),
        ({"state": "CANCELLED", "end": 1005}, {}, ""),
        ({"state": "TIMEOUT", "end": 1005}, {}, ""),
        ({"state": "FAILED", "end": 900}, {}, ""),  # long before the fault: by itself
        ({"state": "PENDING"}, {}, ""),  # never started
        ({"requeue": 0}, {}, "may not be requeued"),
        ({}, {"requeue": False}, "checkpoint.requeue is off"),
        ({}, {"max_retries": 0}, "used up"),
    ],
)
def test_which_jobs_are_not_started_again(job: dict[str, Any], policy: dict[str, Any], event: str) -> None:
    slurm = Slurm(**job)
    assert slurm.advance(**policy) == []
    assert not slurm.requeues
    assert [kind for kind, _ in slurm.events] == (["health.not-requeued"] if event else [])
    assert all(event in words for _, words in slurm.events)


@pytest.mark.parametrize("end", [941, 1000, 1009])
def test_a_job_that_died_of_the_fault_is_started_again(end: int) -> None:
    assert Slurm(state="FAILED", end=end).advance() == ["scontrol requeue 7"]


def test_who_asks_is_signalled_first() -> None:
    slurm = Slurm(comment="sluice:checkpoint")
    assert slurm.advance(1010.0) == ["scancel --signal=USR1 --full 7"]
    assert slurm.advance(1020.0) == []
    assert slurm.advance(1041.0) == ["scontrol requeue 7"]
    assert slurm.advance(1042.0)[0].startswith("scontrol update JobId=7")


def test_what_slurm_requeued_itself_gets_its_wait_and_is_held_when_its_budget_is_used_up() -> None:
    slurm = Slurm(state="PENDING", restarts=2)
    assert slurm.advance() == ["scontrol update JobId=7 StartTime=now+60 ExcNodeList=n1"]
    slurm.tries[7] = 3
    slurm.requeues = {7: Requeue("n1", "n1 went down", "k3", 1000.0)}
    assert slurm.advance() == ["scontrol hold 7"]
    assert slurm.events[-1][0] == "health.held"


def test_jobs_of_a_silent_node_wait_as_long_as_the_policy_says() -> None:
    slurm = Slurm(state="PENDING", restarts=1)
    slurm.requeues[7].silent = True
    assert slurm.advance(down=("n1",), silent_wait_s=1800) == [
        "scontrol update JobId=7 StartTime=now+1800 ExcNodeList=n1"
    ]
    assert not slurm.requeues
    slurm.requeues = {7: Requeue("n1", "a GPU's fault", "k", 1000.0)}
    slurm.tries.clear()
    assert slurm.advance(silent_wait_s=1800) == ["scontrol update JobId=7 StartTime=now+60 ExcNodeList=n1"]


def test_a_job_that_may_go_back_to_a_silent_node_does_not_before_what_it_left_there_is_gone() -> None:
    slurm = Slurm(state="PENDING", restarts=1, wanted="n1")
    slurm.requeues[7].silent = True
    assert slurm.advance(1010.0, down=("n1",), backoff_s=0) == ["scontrol update JobId=7 StartTime=now+30"]
    assert slurm.advance(1015.0, down=("n1",)) == ["scontrol update JobId=7 StartTime=now+60"]
    assert slurm.advance(1020.0, down=("n1",)) == []
    assert slurm.advance(1070.0, down=("n1",)) == ["scontrol update JobId=7 StartTime=now+60"]
    assert slurm.advance(1125.0) == ["scontrol update JobId=7 StartTime=now+10"]  # it is back
    assert not slurm.requeues
    slurm.requeues = {7: Requeue("n1", "n1 went down", "k", 1000.0, stage="away", since=1100.0)}
    assert slurm.advance(1080.0) == []
    assert not slurm.requeues
    assert [kind for kind, _ in slurm.events] == ["health.requeue"]


def test_a_job_that_slurm_has_forgotten_is_no_more() -> None:
    slurm = Slurm()
    slurm.known = False
    assert slurm.advance() == []
    assert not slurm.requeues


def test_a_comment_does_not_speak_for_slurm() -> None:
    slurm = Slurm(comment="sluice:checkpoint n8|n9\n7           33          2", excluded="n3")
    assert slurm.advance(1010.0) == ["scancel --signal=USR1 --full 7"]
    assert slurm.advance(1041.0) == ["scontrol requeue 7"]
    assert slurm.advance(1042.0) == ["scontrol update JobId=7 StartTime=now+60 ExcNodeList=n1,n3"]


def test_jobs_of_accounts_that_save_by_default_are_signalled_unless_they_say_no() -> None:
    policy: dict[str, Any] = {"modes": {"physics": "app"}}
    assert Slurm().advance(**policy) == ["scancel --signal=USR1 --full 7"]
    assert Slurm(comment="sluice:checkpoint=no").advance(**policy) == ["scontrol requeue 7"]


def test_the_task_that_bears_the_arrays_number_is_meant_alone() -> None:
    slurm = Slurm(array_task=2)
    assert slurm.advance() == ["scontrol requeue 7_2"]
    assert slurm.advance() == ["scontrol update JobId=7_2 StartTime=now+60 ExcNodeList=n1"]
