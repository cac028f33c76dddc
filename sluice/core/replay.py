"""Replay of a job trace in the core (``sluice/core.h``, section replay)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from sluice.core._core import ffi, lib
from sluice.core.cluster import Cluster
from sluice.core.errors import check, new_error_text
from sluice.core.order import FairShare, OrderPolicy
from sluice.core.placement import Policy, Request


class Backfill(IntEnum):
    """Which jobs may start before one that cannot (``enum sluice_replay_backfill``)."""

    STRICT = lib.SLUICE_REPLAY_STRICT
    GREEDY = lib.SLUICE_REPLAY_GREEDY
    EASY = lib.SLUICE_REPLAY_EASY
    CONSERVATIVE = lib.SLUICE_REPLAY_CONSERVATIVE


class Preemption(IntEnum):
    """Whether running jobs make room (``enum sluice_replay_preemption``)."""

    NEVER = lib.SLUICE_REPLAY_NEVER
    TIERS = lib.SLUICE_REPLAY_TIERS
    ORDER = lib.SLUICE_REPLAY_ORDER


class State(IntEnum):
    """The outcome of a job (``enum sluice_replay_state``)."""

    FUTURE = lib.SLUICE_REPLAY_FUTURE
    PENDING = lib.SLUICE_REPLAY_PENDING
    RUNNING = lib.SLUICE_REPLAY_RUNNING
    ENDED = lib.SLUICE_REPLAY_ENDED
    REJECTED = lib.SLUICE_REPLAY_REJECTED


@dataclass(frozen=True)
class ReplayConfig:
    """The policy of a replay (``struct sluice_replay_config``); times in ticks."""

    placement: Policy = Policy.FIRST_FIT
    backfill: Backfill = Backfill.EASY
    preemption: Preemption = Preemption.NEVER
    order: OrderPolicy = field(default_factory=OrderPolicy)
    learn: bool = False
    guarded: bool = False
    restart_each_decision: bool = False
    guard_margin_permille: int = 0
    guard_doubt_permille: int = 0
    depth: int = 0
    interval: int = 0
    checkpoint: int = 0
    sample_interval: int = 1
    second: int = 1
    move_wait: int = 0
    move_cost: int = 1
    move_factor_permille: int = 1000
    moves_per_job: int = 0
    moves_per_hour: int = 0


@dataclass(slots=True)
class ReplayJob:
    """One job of a trace (``struct sluice_replay_job``); times in ticks."""

    submit: int
    run: int
    estimate: int
    request: int
    gpus_milli: int
    deadline: int = 0
    restart: int = 0
    priority: int = 0
    account: int = 0
    tier: int = 0
    movable: int = 0


@dataclass(slots=True)
class Outcome:
    """The outcome of a job (``struct sluice_replay_outcome``); -1: did not happen."""

    start: int
    end: int
    busy: int
    preemptions: int
    state: State
    moves: int = 0


@dataclass(slots=True)
class Sample:
    """The cluster at one moment (``struct sluice_replay_sample``)."""

    at: int
    gpus_milli: int
    running: int
    pending: int
    fragmented_permille: int


@dataclass
class Replayed:
    """Outcomes by job, samples by time, and how many decisions were made."""

    outcomes: list[Outcome]
    samples: list[Sample]
    decisions: int


_EVENTS_PER_CALL = 2000  # between which progress is reported and an interrupt noticed


def replay(
    cluster: Cluster,
    config: ReplayConfig,
    requests: Sequence[Request],
    jobs: Sequence[ReplayJob],
    *,
    fairshare: FairShare | None = None,
    progress: Callable[[int], None] = lambda ended: None,
) -> Replayed:
    """Run the jobs, sorted by submission, through the idle cluster; `progress` gets how many have ended."""
    c_config, c_requests, kept = _config(config), ffi.new("struct sluice_request[]", max(1, len(requests))), []
    for index, request in enumerate(requests):
        kept.append(request.fill(c_requests[index]))
    c_jobs = ffi.new("struct sluice_replay_job[]", max(1, len(jobs)))
    for c_job, job in zip(c_jobs, jobs, strict=False):
        c_job.submit = job.submit
        c_job.run = job.run
        c_job.estimate = job.estimate
        c_job.deadline = job.deadline
        c_job.restart = job.restart
        c_job.request = job.request
        c_job.gpus_milli = job.gpus_milli
        c_job.priority = job.priority
        c_job.account = job.account
        c_job.tier = job.tier
        c_job.movable = job.movable
    made, text = ffi.new("struct sluice_replay **"), new_error_text()
    tree = ffi.NULL if fairshare is None else fairshare.handle
    arguments = (c_requests, len(requests), c_jobs, len(jobs), tree)
    check(lib.sluice_replay_new(cluster.handle, c_config, *arguments, made, text), text)
    handle = made[0]
    try:
        ended = ffi.new("uint32_t *")
        while ended[0] < len(jobs):
            check(lib.sluice_replay_run(handle, _EVENTS_PER_CALL, ended, text), text)
            progress(ended[0])
        c_outcomes, count = lib.sluice_replay_outcomes(handle), ffi.new("uint32_t *")
        outcomes = [
            Outcome(one.start, one.end, one.busy, one.preemptions, State(one.state), one.moves)
            for one in (c_outcomes[index] for index in range(len(jobs)))
        ]
        c_samples = lib.sluice_replay_samples(handle, count)
        samples = [
            Sample(one.at, one.gpus_milli, one.running, one.pending, one.fragmented_permille)
            for one in (c_samples[index] for index in range(count[0]))
        ]
        return Replayed(outcomes, samples, lib.sluice_replay_decisions(handle))
    finally:
        lib.sluice_replay_free(handle)


def _config(config: ReplayConfig) -> object:
    c_config = ffi.new("struct sluice_replay_config *")
    c_config.order = config.order.to_c()[0]
    for name in _PLAIN:
        setattr(c_config, name, getattr(config, name))
    return c_config


_PLAIN = tuple(name for name in ReplayConfig.__dataclass_fields__ if name != "order")
