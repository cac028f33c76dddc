"""What caused an XID event of NVIDIA's driver: the GPU, the program, or neither.

Events of the policy's `xid` list are the GPU's. Those that programs cause (`XID_BLAME_THE_JOB`) are the job's; the same
one again on one GPU with another user's job is the GPU's, unless several GPUs of the job had it at once: users cannot
have a GPU taken out of service with their own jobs. Any other event is a warning.
"""

from __future__ import annotations

from policy.health import XID_BLAME_THE_JOB, NodeHealth
from prolog_epilog.health.facts import GpuFacts
from prolog_epilog.health.memory import MOST_EVENTS, Subject, Xid

_TOGETHER_S = 60.0  # events of one fault come within this time
_REPEATING = frozenset({13, 31})  # illegal access and page fault, which a second job should not repeat


def record(subject: Subject, gpu: GpuFacts, policy: NodeHealth) -> None:
    """Take a GPU's new events into its memory."""
    for when, number in gpu.xids:
        blamed = "gpu" if number in policy.xid_fatal else ""
        subject.xids.append(Xid(when, number, list(gpu.recent_jobs), blamed, users=list(gpu.recent_users)))
    del subject.xids[:-MOST_EVENTS]


def blame(subjects: dict[str, Subject], now: float, policy: NodeHealth) -> None:
    """Assign the events without a cause yet, over all GPUs together; forget what is too old."""
    for subject in subjects.values():
        subject.xids = [one for one in subject.xids if now - one.at <= max(policy.fatal_window_s, 86400)]
    for name, subject in subjects.items():
        for event in subject.xids:
            if event.blamed or event.xid not in XID_BLAME_THE_JOB:
                continue
            if _gpus_of_job(subjects, event) >= policy.job_gpus:
                event.blamed = "job"
                event.many = True
            elif event.xid in _REPEATING and _repeats(subjects[name], event, policy) >= policy.same_xid:
                event.blamed = "gpu"
            elif event.jobs and now - event.at > _TOGETHER_S:
                event.blamed = "job"


def _gpus_of_job(subjects: dict[str, Subject], event: Xid) -> int:
    """On how many GPUs a job of the event's had the same at the same time."""
    if not event.jobs:
        return 0
    return sum(
        any(
            one.xid == event.xid and abs(one.at - event.at) <= _TOGETHER_S and set(one.jobs) & set(event.jobs)
            for one in subject.xids
        )
        for subject in subjects.values()
    )


def _repeats(subject: Subject, event: Xid, policy: NodeHealth) -> int:
    """With how many users' jobs this GPU had the same, this time included, and not as one of several of a job."""
    users: list[frozenset[int]] = []
    for one in subject.xids:
        if one.xid == event.xid and event.at - policy.fatal_window_s <= one.at <= event.at and not one.many:
            mine = frozenset(one.users)
            if not one.jobs or (mine and all(not mine & other for other in users)):
                users.append(mine)
    return len(users)


def counted(subject: Subject, now: float, window_s: float) -> tuple[int, str]:
    """How many events of the window are the GPU's fault, and a text that names them."""
    guilty = [one for one in subject.xids if one.blamed == "gpu" and now - one.at <= window_s]
    numbers = sorted({one.xid for one in guilty})
    repeated = [number for number in numbers if number in XID_BLAME_THE_JOB]
    text = f"XID {', '.join(map(str, numbers))}" + (" under several users' jobs" if repeated else "")
    return len(guilty), text


def strange(subject: Subject, now: float, window_s: float) -> list[int]:
    """Events that no list names: worth a warning."""
    return sorted(
        {
            one.xid
            for one in subject.xids
            if not one.blamed and one.xid not in XID_BLAME_THE_JOB and now - one.at <= window_s
        }
    )
