"""Metrics of a replay, for users and for the site. Times in seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sluice.core.replay import State
from sluice.simulate.simulation import Simulation
from sluice.simulate.traces import MICROSECOND

HOUR = 3600


@dataclass(frozen=True)
class Metrics:
    """Figures of one replay. Percentages are of all GPUs, deadlines or idle GPU memory."""

    jobs: int  # that ended
    rejected: int  # that would not fit the idle cluster
    jct_mean_s: float  # from submission to end
    jct_p50_s: float
    jct_p99_s: float
    wait_mean_s: float  # from submission to the first start
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    makespan_s: float  # from the first submission to the last end
    throughput_per_hour: float
    allocation_percent: float  # GPUs held, mean over the makespan
    fragmented_percent: float  # of idle GPU memory, mean over the samples with jobs pending
    fairness_worst: float  # the tenant with the largest mean finish-time ratio
    fairness_jain: float  # 1: all tenants are treated equally
    deadlines: int
    deadlines_missed: int
    preemptions: int
    moves: int  # of running jobs, to make room
    decisions: int
    fairness: dict[str, float] = field(default_factory=dict)  # by tenant


def measure(simulation: Simulation) -> Metrics:
    """The figures of a replay."""
    outcomes, trace = simulation.replayed.outcomes, simulation.trace
    pairs = [(job, outcome) for job, outcome in zip(trace.jobs, outcomes, strict=True) if outcome.state == State.ENDED]
    jcts = sorted((outcome.end - job.submit) / MICROSECOND for job, outcome in pairs)
    waits = sorted((outcome.start - job.submit) / MICROSECOND for job, outcome in pairs)
    begin = min((job.submit for job, _ in pairs), default=0)
    makespan = (max((outcome.end for _, outcome in pairs), default=begin) - begin) / MICROSECOND
    busy = sum(outcome.busy * _gpus(job.gpus, job.share, simulation) for job, outcome in pairs) / MICROSECOND
    waiting = [sample.fragmented_permille / 10 for sample in simulation.replayed.samples if sample.pending]
    due = [(job, outcome) for job, outcome in pairs if job.deadline]
    ratios = fairness(simulation)
    return Metrics(
        jobs=len(pairs),
        rejected=sum(outcome.state == State.REJECTED for outcome in outcomes),
        jct_mean_s=mean(jcts),
        jct_p50_s=percentile(jcts, 50),
        jct_p99_s=percentile(jcts, 99),
        wait_mean_s=mean(waits),
        wait_p50_s=percentile(waits, 50),
        wait_p95_s=percentile(waits, 95),
        wait_p99_s=percentile(waits, 99),
        makespan_s=makespan,
        throughput_per_hour=len(pairs) * HOUR / makespan if makespan else 0.0,
        allocation_percent=100 * busy / (simulation.gpus * makespan) if makespan and simulation.gpus else 0.0,
        fragmented_percent=mean(waiting),
        fairness_worst=max(ratios.values(), default=0.0),
        fairness_jain=jain(list(ratios.values())),
        deadlines=len(due),
        deadlines_missed=sum(outcome.end > job.deadline for job, outcome in due),
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        moves=sum(outcome.moves for outcome in outcomes),
        decisions=simulation.replayed.decisions,
        fairness=ratios,
    )


def fairness(simulation: Simulation) -> dict[str, float]:
    """Finish-time ratio rho by tenant, the mean over its jobs: the time from submission to end over the time that the
    job would take on the tenant's equal part of the cluster, alone (Mahajan et al., "Themis", NSDI 2020). A job wider
    than that part is taken to run longer in proportion. 1 or less: the tenant loses nothing by sharing.
    """
    tenants = {job.tenant for job in simulation.trace.jobs}
    part = simulation.gpus / max(1, len(tenants))
    ratios: dict[str, list[float]] = defaultdict(list)
    for job, outcome in zip(simulation.trace.jobs, simulation.replayed.outcomes, strict=True):
        if outcome.state == State.ENDED and job.run:
            alone = job.run * max(1.0, _gpus(job.gpus, job.share, simulation) / part)
            ratios[job.tenant].append((outcome.end - job.submit) / alone)
    return {tenant: mean(values) for tenant, values in sorted(ratios.items())}


def _gpus(gpus: int, share: int, simulation: Simulation) -> float:
    """GPUs that a job holds; a share counts as its part of one."""
    if not share:
        return float(gpus)
    return share / simulation.share_whole


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The value that `percent` of 100 do not exceed (nearest rank) of an ascending sequence; 0 of nothing."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


def jain(values: Sequence[float]) -> float:
    """Jain's index, from 1 (all equal) down to 1/n."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0
