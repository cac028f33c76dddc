"""The policy's checkpoint section: signals for jobs that save their state, and restarts of jobs that faults ended."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from policy.units import Seconds, parse_seconds

_ASK = re.compile(r"(?:^|[\s,;])sluice:checkpoint(?:=(\w{1,20}))?(?=$|[\s,;])")
_LEAST_S = 60
Signal = Literal["USR1", "USR2", "TERM", "HUP"]


class Checkpoint(BaseModel):
    """Signals for jobs that save their state (those that ask with `--comment=sluice:checkpoint`), and restarts of
    jobs that a fault of the machine has hit. Jobs that fail by themselves are never started again."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    interval: Annotated[Seconds, Field(ge=60)] | None = None
    """Time between two signals; default: no periodic ones, unless a job asks for its own with
    `--comment=sluice:checkpoint=20m`. Example: `10m`."""
    signal: Signal = "USR1"
    """The signal, to the batch script and all steps."""
    before_preemption: Seconds | None = None
    """Time of over-quota jobs between the signal and their end; at least `scheduling.preemption.grace`. The signal
    is the one that the job named with `--signal`. Example: `60s`."""
    before_requeue: Seconds = 30
    """Time from the signal until a job is taken off a faulty GPU. Example: `30s`."""
    before_time_limit: Seconds | None = None
    """Time from the signal to the time limit. Example: `5m`."""
    requeue: bool = True
    """Jobs that a fault has hit start again."""
    max_retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """Most restarts of one job because of faults. Example: `3`."""
    backoff: Seconds = 60
    """Wait before the first restart; doubles with each. Example: `60s`."""
    silent_wait: Seconds | None = None
    """A node that stopped responding may only be cut off, and its jobs still run: the least wait before they restart.
    Default: `backoff`. Example: `30m`."""


class NodeCheckpoint(BaseModel):
    """The same in `sluice.node.json`, times in seconds; the controllers' daemon reads it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    interval_s: int | None = None
    signal: Signal = "USR1"
    before_requeue_s: int = 30
    before_time_limit_s: int | None = None
    requeue: bool = True
    max_retries: int = 3
    backoff_s: int = 60
    silent_wait_s: int = 0


def compile_checkpoint(policy: Checkpoint | None) -> NodeCheckpoint:
    """What the controllers' daemon reads of the policy's section."""
    if policy is None:
        return NodeCheckpoint()
    return NodeCheckpoint(
        interval_s=policy.interval,
        signal=policy.signal,
        before_requeue_s=policy.before_requeue,
        before_time_limit_s=policy.before_time_limit,
        requeue=policy.requeue,
        max_retries=policy.max_retries,
        backoff_s=policy.backoff,
        silent_wait_s=policy.silent_wait or 0,
    )


def asks(comment: str) -> int | None:
    """The interval of signals that a job's comment asks for: 0 for the policy's, else seconds; None: no signals."""
    match = _ASK.search(comment)
    if match is None:
        return None
    try:
        return max(_LEAST_S, parse_seconds(match[1])) if match[1] else 0
    except ValueError:
        return 0
