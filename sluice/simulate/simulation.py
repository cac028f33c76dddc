"""Replay of a job history under other policies: "your last month under another policy".

A policy is an order, a placement, a backfill and a preemption; `PRESETS` names some, and `parse_policy` changes any of
them in a word, as in ``slurm,placement=fgd,fair-share=2000``. The replay itself runs in the core.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.base.errors import SluiceError, UsageError
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.order import FACTOR_ONE, Factor, FairShare, OrderPolicy
from sluice.core.placement import Policy, Request, RequestFlag, set_workload
from sluice.core.replay import Backfill, Preemption, ReplayConfig, Replayed, ReplayJob, replay
from sluice.simulate.cluster_file import ClusterNode
from sluice.simulate.traces import MICROSECOND, Trace, TraceJob

DAY = 86400 * MICROSECOND
MILLI = 1000
MAX_SAMPLES = 500  # of the cluster's state over the time of the trace
MAX_WORKLOAD = 1024  # request shapes that the placement policies get, as in the core
ACCOUNT_SHARES = 1000
NO_SUCH_MODEL = "(a model that is not there)"  # a job that accepts no other is rejected
SERVICE_ORDER = {Factor.SERVICE: 1000}

# The makespan guard's margins, in thousandths of its horizon; see docs/scheduling.md. The only figures of ours that
# were tuned: on Muri's traces 1 and 2.
GUARD_MARGIN_PERMILLE = 200
GUARD_DOUBT_PERMILLE = 50

FACTOR_WORDS = {
    "priority": Factor.PRIORITY,
    "age": Factor.AGE,
    "fair-share": Factor.FAIR_SHARE,
    "deadline": Factor.DEADLINE,
    "service": Factor.SERVICE,
    "time": Factor.TIME,
    "size": Factor.SIZE,
}


@dataclass(frozen=True)
class SimulatedPolicy:
    """Order x placement x backfill x preemption. Times in microseconds."""

    name: str
    weights: Mapping[Factor, int] = field(default_factory=dict)  # none: first come, first served
    placement: Policy = Policy.FIRST_FIT
    backfill: Backfill = Backfill.EASY
    preemption: Preemption = Preemption.NEVER
    learn: bool = False
    guarded: bool = False
    starvation: int = 0
    age_full: int = 7 * DAY
    laxity_horizon: int = DAY
    half_life: int = 7 * DAY


PRESETS: dict[str, tuple[SimulatedPolicy, str]] = {
    policy.name: (policy, text)
    for policy, text in (
        (SimulatedPolicy("fifo", backfill=Backfill.STRICT), "first come, first served; no job overtakes"),
        (SimulatedPolicy("easy"), "first come, first served with EASY backfill"),
        (
            SimulatedPolicy("slurm", {Factor.AGE: 1000, Factor.FAIR_SHARE: 10000, Factor.SIZE: 1000}),
            "Slurm's multifactor terms (age, fair-share, size) with EASY backfill",
        ),
        (SimulatedPolicy("fair-share", {Factor.FAIR_SHARE: 1000}), "Fair Tree with decayed usage, EASY backfill"),
        (
            SimulatedPolicy("deadline", {Factor.DEADLINE: 1000}, preemption=Preemption.TIERS),
            "least laxity first; best-effort jobs make room",
        ),
        (
            SimulatedPolicy("srtf", {Factor.TIME: 1000}, backfill=Backfill.GREEDY, preemption=Preemption.ORDER),
            "shortest remaining time first, preemptive",
        ),
        (
            SimulatedPolicy("srsf", SERVICE_ORDER, backfill=Backfill.GREEDY, preemption=Preemption.ORDER),
            "least remaining GPU-seconds first, preemptive",
        ),
        (
            SimulatedPolicy("sluice", SERVICE_ORDER, Policy.SLUICE, learn=True, starvation=7 * DAY),
            "least GPU-seconds first by corrected estimates, starvation bound, EASY, fragmentation-aware placement",
        ),
        (
            SimulatedPolicy(
                "sluice-preempt",
                SERVICE_ORDER,
                backfill=Backfill.GREEDY,
                preemption=Preemption.ORDER,
                learn=True,
                guarded=True,
            ),
            "least remaining GPU-seconds first by corrected estimates, preemptive, with the makespan guard",
        ),
    )
}


def parse_policy(text: str) -> SimulatedPolicy:
    """``PRESET[,KEY=VALUE]...``; a factor's name is the key of its weight. Raises UsageError."""
    name, *changes = text.split(",")
    if name not in PRESETS:
        raise UsageError(f"policy {name!r}: unknown", remedy=f"use one of {', '.join(PRESETS)}")
    policy = replace(PRESETS[name][0], name=text)
    for change in changes:
        key, _, value = change.partition("=")
        policy = replace(policy, **_changed(policy, text, key, value))
    if policy.preemption == Preemption.ORDER and policy.backfill in {Backfill.EASY, Backfill.CONSERVATIVE}:
        raise UsageError(
            f"policy {text!r}: backfill that reserves does not go with preemption by order",
            remedy="add backfill=greedy",
        )
    return policy


def with_moves(policy: SimulatedPolicy) -> SimulatedPolicy:
    """The policy by another name, for its replay with moves. Raises UsageError for one that plans by itself."""
    if policy.preemption == Preemption.ORDER or policy.backfill == Backfill.CONSERVATIVE:
        raise UsageError(
            f"policy {policy.name}: places all jobs again at every decision: moves do not go with it",
            remedy="use backfill=strict, greedy or easy, and preemption=never or tiers",
        )
    return replace(policy, name=f"{policy.name}+moves")


def _changed(policy: SimulatedPolicy, text: str, key: str, value: str) -> dict[str, Any]:
    try:
        if key in FACTOR_WORDS:
            weight = int(value)
            if not 0 <= weight <= 10**6:
                raise ValueError
            return {"weights": {**policy.weights, FACTOR_WORDS[key]: weight}}
        if key == "placement":
            return {"placement": Policy.from_name(value)}
        if key == "backfill":
            return {"backfill": Backfill[value.upper()]}
        if key == "preemption":
            return {"preemption": Preemption[value.upper()]}
        if key in {"learn", "guard"}:
            return {{"learn": "learn", "guard": "guarded"}[key]: {"yes": True, "no": False}[value]}
        if key in {"starvation", "half-life", "age-full", "laxity"}:
            names = {"half-life": "half_life", "age-full": "age_full", "laxity": "laxity_horizon"}
            days = float(value)
            if not 0 <= days <= 36500 or (not days and key in {"age-full", "laxity"}):
                raise ValueError
            return {names.get(key, key): round(days * DAY)}
    except (KeyError, ValueError, SluiceError):
        pass
    raise UsageError(
        f"policy {text!r}: {key}={value}: not known",
        remedy=f"keys: {', '.join(FACTOR_WORDS)} (weights); placement; backfill=strict|greedy|easy|conservative; "
        "preemption=never|tiers|order; learn, guard=yes|no; starvation, half-life, age-full, laxity in days",
    )


@dataclass(frozen=True)
class Moves:
    """Which running jobs are moved to make room for the first one that cannot start; as the policy's section
    compaction. Times in microseconds."""

    wait: int
    cost: int
    factor: float
    per_job: int
    per_hour: int
    savable_percent: int = 100  # of all jobs, drawn at random: those that can be moved


@dataclass(frozen=True)
class Assumptions:
    """What is assumed about the jobs, the same for every policy."""

    estimates: str = "limit"  # what the policy knows of run times: exact, limit (the user's; else exact) or noisy
    noise: float = 5.0  # noisy: the run time times a number drawn evenly from 1 to this
    seed: int = 1
    restart: Callable[[TraceJob], int] = lambda job: 0  # what a start costs, microseconds
    restart_each_decision: bool = False  # of preemptive orders: every running job pays at every decision
    checkpoint: int = 0  # microseconds between checkpoints: what a preempted job keeps; 0: all, < 0: nothing
    depth: int = 0
    interval: int = 0
    moves: Moves | None = None


@dataclass
class Simulation:
    """A policy's replay of a trace on a cluster; jobs are the trace's, in the same order as the outcomes."""

    policy: SimulatedPolicy
    trace: Trace
    replayed: Replayed
    gpus: int
    share_whole: int  # how much of the trace's unit of shares is a whole GPU


def simulate(
    trace: Trace,
    nodes: Sequence[ClusterNode],
    policy: SimulatedPolicy,
    assumptions: Assumptions | None = None,
    *,
    progress: Callable[[int], None] = lambda ended: None,
) -> Simulation:
    """Run the trace through the cluster under the policy."""
    assumed = assumptions or Assumptions()
    cluster = build_cluster(nodes, len(trace.jobs), milli=trace.share_unit == "milli")
    requests, numbers = trace_requests(trace, nodes, cluster)
    _tell_workload(cluster, requests, numbers)
    accounts, fairshare = _accounts(trace, policy)
    chance = random.Random(assumed.seed)  # noqa: S311 - noise, not a secret
    share_whole = _share_whole(trace, nodes)
    savable = random.Random(assumed.seed + 1)  # noqa: S311 - its own: estimates stay as they are without moves
    percent = assumed.moves.savable_percent if assumed.moves else 0
    jobs = [
        ReplayJob(
            submit=job.submit,
            run=job.run,
            estimate=max(1, estimate(job, assumed, chance)),
            request=number,
            gpus_milli=max(1, job.share * MILLI // share_whole) if job.share else job.gpus * MILLI,
            deadline=job.deadline,
            restart=assumed.restart(job),
            priority=0 if job.best_effort else FACTOR_ONE,
            account=accounts[job.tenant],
            tier=0 if job.best_effort else 1,
            movable=int(savable.randrange(100) < percent),
        )
        for job, number in zip(trace.jobs, numbers, strict=True)
    ]
    span = max((job.submit + job.run for job in trace.jobs), default=0)
    config = ReplayConfig(
        placement=policy.placement,
        backfill=policy.backfill,
        preemption=policy.preemption,
        order=OrderPolicy(
            policy.weights,
            age_full_s=policy.age_full,
            laxity_horizon_s=policy.laxity_horizon,
            size_full_gpus=max(1, cluster.totals().gpus),
            starvation_s=policy.starvation,
        ),
        learn=policy.learn,
        guarded=policy.guarded,
        guard_margin_permille=GUARD_MARGIN_PERMILLE,
        guard_doubt_permille=GUARD_DOUBT_PERMILLE,
        restart_each_decision=assumed.restart_each_decision and policy.preemption == Preemption.ORDER,
        depth=assumed.depth,
        interval=assumed.interval,
        checkpoint=assumed.checkpoint,
        sample_interval=max(1, span // MAX_SAMPLES),
        second=MICROSECOND,
        **_moving(assumed.moves),
    )
    replayed = replay(cluster, config, requests, jobs, fairshare=fairshare, progress=progress)
    return Simulation(policy, trace, replayed, cluster.totals().gpus, share_whole)


def _moving(moves: Moves | None) -> dict[str, int]:
    """Of a ReplayConfig."""
    if moves is None:
        return {}
    return {
        "move_wait": max(1, moves.wait),
        "move_cost": max(1, moves.cost),
        "move_factor_permille": max(1, round(moves.factor * MILLI)),
        "moves_per_job": moves.per_job,
        "moves_per_hour": moves.per_hour,
    }


def build_cluster(nodes: Sequence[ClusterNode], jobs: int, *, milli: bool) -> Cluster:
    """The core's model of the nodes. With `milli`, GPU memory is counted in thousandths of a GPU."""
    cluster = Cluster(len(nodes), max_allocations=max(1, min(jobs, 16 * len(nodes) * MILLI)))
    for node in nodes:
        memory = MILLI if milli else node.gpu_memory_mib or MILLI
        shape = cluster.add_shape(NodeShape(tuple(GpuShape(node.model, memory) for _ in range(node.gpus))))
        cluster.add_node(shape, node.cpus_milli, node.memory_mib)
    return cluster


def _share_whole(trace: Trace, nodes: Sequence[ClusterNode]) -> int:
    """How much of the trace's unit is a whole GPU (the largest, where they differ)."""
    if trace.share_unit == "milli":
        return MILLI
    return max((node.gpu_memory_mib for node in nodes), default=0) or MILLI


def trace_requests(trace: Trace, nodes: Sequence[ClusterNode], cluster: Cluster) -> tuple[list[Request], list[int]]:
    """The distinct requests of the trace, and which of them each job makes."""
    largest = max((node.gpus for node in nodes), default=1)
    known_models = {node.model for node in nodes}
    requests: dict[Request, int] = {}
    numbers = []
    for job in trace.jobs:
        accepted = [model for model in job.models if model in known_models]
        if job.models and not accepted:
            accepted = [NO_SUCH_MODEL]
        request = _request(job, largest, cluster.models(accepted), len(nodes))
        numbers.append(requests.setdefault(request, len(requests)))
    return list(requests), numbers


def _request(job: TraceJob, largest: int, models: int, nodes: int) -> Request:
    """What a job asks of the core: equal shares on its nodes where they are equal, else a total."""
    count = job.nodes or max(1, -(-job.gpus // largest))
    cpus, memory = -(-job.cpus_milli // count), -(-job.memory_mib // count)
    if not job.gpus:
        cpus = max(cpus, MILLI)  # a job without GPUs takes a CPU at least
    if job.share:
        return Request(gpus=1, gpu_memory_mib=job.share, cpus_milli=cpus, host_memory_mib=memory, models=models)
    if job.gpus % count == 0:
        return Request(
            gpus=job.gpus // count,
            nodes_min=count,
            cpus_milli=cpus,
            host_memory_mib=memory,
            models=models if job.gpus else 0,
        )
    return Request(
        gpus=job.gpus,
        nodes_min=count,
        nodes_max=count if job.nodes else min(nodes, job.gpus),
        cpus_milli=cpus,
        host_memory_mib=memory,
        models=models,
        flags=RequestFlag.GPUS_TOTAL,
    )


def _tell_workload(cluster: Cluster, requests: Sequence[Request], numbers: Sequence[int]) -> None:
    """The fragmentation-aware policies know what usually arrives: the most frequent requests for one node."""
    counts = [0] * len(requests)
    for number in numbers:
        counts[number] += 1
    usual = sorted(
        (number for number, request in enumerate(requests) if request.nodes_min <= 1 and not request.flags),
        key=lambda number: -counts[number],
    )[:MAX_WORKLOAD]
    if usual:
        set_workload(cluster, [(requests[number], counts[number]) for number in usual])


def _accounts(trace: Trace, policy: SimulatedPolicy) -> tuple[dict[str, int], FairShare | None]:
    """An account of equal shares for each tenant, where the policy looks at them."""
    tenants = sorted({job.tenant for job in trace.jobs})
    if not policy.weights.get(Factor.FAIR_SHARE):
        return dict.fromkeys(tenants, 0), None
    tree = FairShare(len(tenants) + 1, half_life_s=policy.half_life // MICROSECOND)
    return {tenant: tree.add(0, ACCOUNT_SHARES) for tenant in tenants}, tree


def estimate(job: TraceJob, assumed: Assumptions, chance: random.Random) -> int:
    """What the policy knows of the job's run time, in microseconds."""
    if assumed.estimates == "noisy":
        return int(job.run * chance.uniform(1, assumed.noise))
    if assumed.estimates == "limit" and job.estimate:
        return job.estimate
    return job.run
