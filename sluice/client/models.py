"""The documents of the API. What a command prints with --json has the same model as its endpoint.

Times are seconds since 1970, durations seconds, memory MiB; null: not known. New fields may come at any time; a field
is not removed or changed within a `schema_version`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator
from typing_extensions import TypeAliasType

from gres_probe.inventory import Inventory as NodeInventory
from gres_probe.inventory import Link, Nic
from sluice.exchange.acts import MOST_POLICY, MOST_SCRIPT


class Model(BaseModel):
    """What all have in common: fields that a newer server adds are passed over."""


Json = TypeAliasType("Json", "str | int | float | bool | None | list[Json] | dict[str, Json]")
"""Any value of JSON: what is said of something whose names are not known before."""


class Document(Model):
    """A whole answer."""

    schema_version: int = 1


class Viewed(Document):
    """An answer from the snapshot."""

    stale_since: float | None = Field(None, description="Since when it could not be read again; null: it is fresh.")
    problem: str = Field("", description="Why it could not be read again.")


class Text(Model):
    """An answer that is no JSON, as CSV."""

    text: str


class Problem(Model):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = Field(description="What is wrong: the value and the place.")
    remedy: str = Field("", description="What to do about it.")
    request_id: str = ""


class Job(Model):
    """A job that slurmctld knows. Waiting tasks of an array are one."""

    id: int
    array_id: int | None
    array_tasks: str
    name: str
    user: str
    account: str
    qos: str
    partition: str
    state: str
    reason: str
    nodes: str = Field(description="A hostlist; empty while it waits.")
    node_count: int
    cpus: int
    gpus: int
    gpu_mem_mib: int
    memory_mib: int
    submit_time: int | None
    eligible_time: int | None
    start_time: int | None
    end_time: int | None
    time_limit_s: int | None = Field(description="-1: no limit.")
    priority: int
    features: str
    dependency: str
    reservation: str
    comment: str
    work_dir: str
    refused: str = Field(description="Why the node's agent refused it; empty: it did not.")


class JobList(Viewed):
    """Jobs, a page of them."""

    jobs: list[Job]
    total: int = Field(description="All that match and the caller may see.")
    next: str | None = Field(None, description="The cursor of the next page; null: this is the last.")


class JobGpu(Model):
    """A GPU that a job has."""

    node: str
    index: int
    utilisation_percent: float | None
    memory_used_mib: int | None
    memory_total_mib: int | None
    temperature_c: float | None


class JobPage(Viewed):
    """One job."""

    job: Job
    gpus: list[JobGpu] = Field(description="As its nodes report them; empty where they do not.")


class NodesByReason(Model):
    """Nodes that do not fit, and why."""

    reason: str
    nodes: int


class PlacedPart(Model):
    """What a job has, or was to have, on a node."""

    node: str
    gpus: list[int]
    gpu_memory_mib: int | None = Field(description="Of each GPU; null: whole GPUs.")
    gpu_compute_percent: int | None
    cpus: float
    host_memory_mib: int
    nics: list[int] | None = None


class RequestSeen(Model):
    """What the scheduler was asked for."""

    nodes: int
    gpus: int
    gpus_in_total: bool
    gpu_memory_mib: int | None
    gpu_compute_percent: int | None
    cpus: float
    host_memory_mib: int
    exclusive: bool
    gpu_types: list[str] | None = None
    one_link_domain: str | None = None
    one_numa_node: str | None = None
    near_nic: str | None = None
    one_switch: str | None = None
    nics: int | None = Field(None, description="RDMA interfaces on each node.")
    nics_per_gpu: int | None = None
    nic_planes: str | None = Field(None, description="Of all its interfaces: one, or spread over several.")
    segment: int | None = Field(None, description="Nodes of each segment, in one block or below one leaf switch.")


class ScoreTerm(Model):
    """A part of a score."""

    name: str
    value: float


class NextBest(Model):
    """What would have been chosen without the node that was."""

    node: str
    score: float


class Choice(Model):
    """Where Sluice placed the job, and why there."""

    parts: list[PlacedPart]
    score: float
    score_terms: list[ScoreTerm]
    next_best: NextBest | None


class GpusWithoutNic(Model):
    """A node with free GPUs that have no free RDMA interface near them; some of them are named."""

    node: str
    gpus: int


class Decision(Model):
    """The last decision."""

    at: float
    asked_by: Literal["backfill", "scheduler", "forecast"]
    outcome: str
    policy: str
    planned: bool
    core_us: float
    request: RequestSeen | None = None
    error: str | None = None
    replayed: bool | None = Field(None, description="Whether the decision came out the same when it was made again.")
    nodes: int | None = None
    nodes_by_reason: list[NodesByReason] | None = None
    nodes_that_fit: int | None = None
    gpus_without_nic: list[GpusWithoutNic] | None = None
    choice: Choice | None = None
    stock_nodes: list[str] | None = None


class OrderTerm(Model):
    """A term of the order."""

    name: str
    weight: float
    value: float


class TenantRank(Model):
    """The tenant's place."""

    account: str
    shares: float
    fair_share: float
    gpu_hours: float
    tier: int


class Order(Model):
    """Why the job has its priority."""

    as_of: float
    site_factor: int
    place: int
    terms: list[OrderTerm]
    slurm_terms: dict[str, float]
    predicted_run_s: float
    gpus: int
    starving: bool
    deadline: Literal["none", "feasible", "infeasible"]
    operators_site_factor: int | None = None
    laxity_s: float | None = None
    tenant: TenantRank | None = None


class RolePart(Model):
    """The GPUs of a role on a node."""

    node: str
    gpus: list[int]


class JobRole(Model):
    """A role of the job (--gpu-role), and the GPUs that it has."""

    name: str
    gpus: int
    parts: list[RolePart]


class Started(Model):
    """How it started."""

    at: float
    parts: list[PlacedPart]
    roles: list[JobRole] | None = None
    as_chosen: bool | None = None


class Planned(Model):
    """A start that is planned."""

    planned_at: float
    expected_start: float | None
    reason: str
    gang: int = Field(description="Jobs of its gang; 0: none.")


class SmallerRequest(Model):
    """A request that asks less in one respect, and would start now."""

    what: str
    value: float | str
    unit: str


class Waiting(Model):
    """Why it still waits, as of the newest decision."""

    as_of: float
    plan: Planned | None = None
    fits_now: bool | None = None
    never: bool | None = None
    nodes: int | None = None
    nodes_by_reason: list[NodesByReason] | None = None
    nodes_that_fit: int | None = None
    gpus_without_nic: list[GpusWithoutNic] | None = None
    would_start_now: list[SmallerRequest] | None = None


class SlurmFacts(Model):
    """The job as slurmctld has it."""

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    state: str
    reason: str
    priority: int
    submit_time: int | None
    eligible_time: int | None
    start_time: int | None
    end_time: int | None
    time_limit_s: int | None
    nodes: str
    refused: str


class Checkpoint(Model):
    """Whether a job saves its state when it is signalled, how often it is, and what came of it."""

    mode: Literal["app", "system", "no"]
    saved: float | None = Field(description="When it last saved its state.")
    signal: str | None = None
    daly: bool | None = Field(None, description="Whether the interval is the one that loses least by Daly's formula.")
    interval_s: int | None = Field(None, description="Between two signals; null: only before it is ended.")
    signals: int | None = None
    answers: int | None = Field(None, description="Signals after which it saved.")
    save_s: float | None = Field(None, description="What a save takes.")
    mttf_s: float | None = Field(None, description="Mean time until one of its nodes fails.")
    problem: str | None = Field(None, description="Why what was measured of it cannot be read.")
    limit_mib: int | None = Field(None, description="Of a job with system: the most memory with which it is saved.")
    elsewhere: bool | None = Field(
        None,
        description="Of a job with system: whether it goes on on other nodes that are like its own, too; else it "
        "begins again from its start there.",
    )
    cannot: str | None = Field(None, description="Of a job with system: why its node cannot save it; null: it can.")


class PartAtFault(Model):
    """A node, and what is at fault of it."""

    node: str
    what: str


class JobPreflight(Model):
    """What the nodes of a job found when they tested each other before it started; `nodes`, `suspected` and `left_out`
    are hostlists."""

    at: float
    nodes: str
    rounds: int
    seconds: float
    tool: str = Field(description="perftest or tcp; empty: nothing was measured.")
    verdict: Literal["good", "fault", "undecided", "none"] = Field(
        description="fault: a node was drained, or was to be; undecided: nodes are suspected; none: nothing was judged."
    )
    at_fault: list[PartAtFault]
    suspected: str
    left_out: str = Field(description="Nodes that did not join.")
    requeued_at: float | None = Field(description="When the job was seen to wait again, as a node was at fault.")
    released_at: float | None = Field(description="When it was let start again, before Slurm's own pause was over.")
    text: str = Field(description="All of it in a sentence.")


class Explanation(Document):
    """Why a job has its priority and its nodes, or why it waits (docs/explain.md)."""

    job: str
    job_id: int | None = None
    uid: int | None = None
    account: str | None = None
    partition: str | None = None
    order: Order | None = None
    decision: Decision | None = None
    start: Started | None = None
    waiting: Waiting | None = None
    slurm: SlurmFacts | None = None
    checkpoint: Checkpoint | None = None
    moves: list[str] | None = Field(
        None, description="Moves of the job to make room for others, and of others to make room for it, in sentences."
    )
    preflights: list[JobPreflight] | None = Field(
        None, description="Tests of the job's nodes before it started, the oldest first (docs/fabric.md#preflight)."
    )
    pools: list[str] | None = Field(None, description="What it waits for of pools, in sentences.")
    private: list[str] | None = Field(None, description="The words of PrivateData that kept something back.")


class Node(Model):
    """A node."""

    name: str
    state: str
    flags: list[str]
    available: bool = Field(description="Whether new jobs can start there.")
    reason: str
    gpu_types: dict[str, int]
    gpus: int
    gpus_allocated: int
    gpu_mem_mib: int
    gpu_mem_allocated_mib: int
    cpus: int
    cpus_allocated: int
    memory_mib: int
    memory_allocated_mib: int
    features: list[str]
    partitions: list[str]
    slurm_version: str


class NodeList(Viewed):
    """Nodes."""

    nodes: list[Node]


class Gpu(Model):
    """A GPU."""

    node: str
    index: int
    type: str
    use: Literal["free", "shared", "whole"]
    available: bool
    health: Literal["ok", "out"]
    reason: str
    jobs: list[int] = Field(description="Of those that the caller may see.")
    utilisation_percent: float | None
    memory_used_mib: int | None
    memory_total_mib: int | None
    temperature_c: float | None


class GpuList(Viewed):
    """GPUs."""

    gpus: list[Gpu]


class QuotaRow(Model):
    """One thing that is limited, guaranteed or used."""

    what: str
    guaranteed: float | None
    limit: float | None
    used: float
    left: float | None


class Budget(Model):
    """GPUs and GPU time of a tenant; what is not limited is left out."""

    gpus_now: int
    shares: str
    gpu_limit: int | None = None
    quota_percent: float | None = None
    budget_gpu_s: float | None = Field(None, description="Of the usage period (GrpTRESMins).")
    budget_used_percent: float | None = None
    budget_left_gpu_s: float | None = None
    budget_projected_percent: float | None = Field(None, description="At the period's end, if it goes on as before.")
    budget_used_up_at: int | None = Field(None, description="When the budget is used up at that rate.")


class Quota(Document):
    """What a tenant may use, and uses."""

    tenant: str
    quota: list[QuotaRow]
    budget: Budget | None = None


class MemberUse(Model):
    """What a member of a tenant uses."""

    user: str
    running: int
    submitted: int
    used: dict[str, int]
    used_minutes: dict[str, float]


class TenantInList(Model):
    """A tenant: an account of Slurm with its limits and use."""

    name: str
    parent: str
    members: list[str] = Field(description="Those that the caller may see.")
    shares: str
    qos: list[str]
    default_qos: str
    borrow: bool
    guarantee: dict[str, int]
    limits: dict[str, str]
    running: int
    submitted: int
    used: dict[str, int]
    used_minutes: dict[str, float]


class Tenant(TenantInList):
    """A tenant alone: `sluice tenant show`."""

    schema_version: int = 1


class TenantList(Viewed):
    """Tenants."""

    tenants: list[TenantInList]


class TenantUsage(Document):
    """What the members of a tenant use."""

    tenant: str
    members: list[MemberUse]


class ServiceInList(Model):
    """A model that runs as jobs of a tenant. Figures are null where replicad does not say them."""

    name: str = Field(description="By which clients call the model.")
    tenant: str
    user: str = Field(description="Whose jobs its replicas are; empty for callers of other tenants, as what follows.")
    engine: str
    model: str
    callers: list[str] = Field(description="Tenants that may call it and that the caller may see; `*`: all.")
    priority: str
    state: Literal["ready", "running", "starting", "idle", "down", "failed", "paused"]
    paused: bool
    least: int
    most: int
    slots: int = Field(description="Requests that a replica works on at once.")
    gres: str
    partition: str
    walltime_s: int
    first_token_deadline_s: float
    log_prompts: bool = Field(False, description="Gateways write prompts of its requests into their log.")
    queued: int = Field(description="Replicas whose jobs wait.")
    starting: int
    ready: int
    draining: int
    failed: int
    waiting: int | None = Field(description="Requests that wait for a replica.")
    oldest_s: float | None
    in_flight: int | None
    tokens_in_flight: int | None
    delay_s: float | None = Field(description="Time in the queue lately, 95th percentile.")
    wanted: int | None = Field(description="Replicas that replicad wants.")
    eta_s: float | None = Field(description="Until the first replica is ready.")
    requests_per_minute: int | None = Field(None, description="Of the last five minutes, as they ended.")
    tokens_per_minute: int | None = Field(None, description="Of the last five minutes: prompts and answers.")
    deadline_met_percent: float | None = Field(
        None,
        description="Of the last hour's requests, those that had their first token within the service's deadline; "
        "refused and cancelled ones do not count.",
    )
    why: str = Field(description="Why there is no replica.")


class ServiceReplica(Model):
    """A job that answers for a service."""

    launch: str
    job: int
    state: Literal["queued", "running", "starting", "ready", "draining", "failed", "gone"]
    job_state: str | None
    nodes: str
    start_time: int | None
    why: str
    slots: int | None
    running: int | None
    waiting: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cache_used: float | None = Field(description="Part of the KV cache.")
    slow: int | None = Field(
        default=None,
        description="Gateways leave it out for a while: it takes at least so many times as long as most others.",
    )
    heard: float | None
    ends: float | None


class ServiceList(Viewed):
    """Services that the caller may call or looks after."""

    address: str = Field("", description="Where clients reach the gateways; empty where the policy does not say it.")
    services: list[ServiceInList]


class Service(ServiceInList, Viewed):
    """One service: `sluice serve show`."""

    replicas: list[ServiceReplica]


class CallerLimit(Model):
    """What gateways let through of a caller, one of its keys or one of its tenants, over all services. None: there is
    no limit."""

    kind: Literal["user", "key", "tenant"]
    name: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent: int | None = Field(description="Requests at once, those that wait included.")
    queued: int | None = Field(description="Requests that wait at once.")
    tokens: int | None = Field(description="Of a tenant in each usage period.")
    used_requests_per_minute: int | None = Field(description="Of the last five minutes; null: not known, or private.")
    used_tokens_per_minute: int | None = Field(description="Of the last five minutes; null: not known, or private.")
    used_concurrent: int | None = Field(description="Now, at all gateways; null: not known, or private.")


class CallerLimits(Viewed):
    """The caller's own limits at services, those of its keys that have any or are in use, and those of its tenants; for
    operators those of all tenants that have any or are served."""

    limits: list[CallerLimit]


class ServiceMoment(Model):
    """How a service was at a time."""

    time: float
    ready: int
    waiting: int | None
    in_flight: int | None
    tokens_per_minute: int | None


class ServiceSeries(Viewed):
    """A service over the last day, as far as this server has seen it."""

    moments: list[ServiceMoment]


class Shortage(Model):
    """Of a shape in a zone: why its last launches came to nothing."""

    shape: str
    zone: str
    difference: str
    text: str = Field(description="The provider's words.")
    since: float
    times: int = Field(description="How often in a row, as far as that makes the back-off longer.")
    again: float = Field(description="From when on it is asked again, if a node is wanted then.")


class PoolInList(Model):
    """Nodes that come and go."""

    name: str
    driver: str
    nodes: str
    partition: str
    least: int
    most: int
    on: int = Field(description="Nodes that have registered.")
    launching: int
    ending: int
    held: int = Field(description="Nodes that Slurm wants and that cannot be had.")
    cost_hour: float = Field(description="Price of an hour of the machines that there are.")
    closed_until: float | None = Field(description="Until when the pool takes no jobs.")
    closed_for: str
    without_capacity_since: float | None
    boot_s: float | None = Field(description="Usual time from a launch until slurmd registers.")
    problem: str
    launches: int = Field(description="Machines that the provider has made, ever.")
    failures: dict[str, int] = Field(description="How often a launch came to nothing or a machine was lost, by why.")
    oldest_wait_since: float | None = Field(description="Since when Slurm has waited longest for a node.")
    shortages: list[Shortage] = Field([], description="Of which shapes and zones there is none now, as they are asked.")


class PoolNode(Model):
    """A node of a pool, as Slurm, the journal and the provider have it."""

    node: str
    pool: str
    slurm: Literal["off", "due", "up", "on", "down", "invalid", "unknown"]
    stage: Literal["asked", "launched", "registered", "terminating", "gone"] | None
    machine: str
    shape: str
    zone: str
    since: float | None
    difference: str = Field(description="How the three differ; `none`: they agree.")
    text: str
    again: float | None = Field(description="When it is tried again.")
    jobs: list[int]


class PoolList(Viewed):
    """Pools."""

    pools: list[PoolInList]


class Pool(PoolInList, Viewed):
    """One pool: `sluice pool show`."""

    node_list: list[PoolNode]


class PoolNodeWhy(PoolNode, Viewed):
    """Why a node of a pool is as it is."""

    sentence: str
    remedy: str


class PoolEvent(Model):
    """A step of a node's life."""

    at: float
    node: str
    pool: str
    what: str
    shape: str
    zone: str
    machine: str
    text: str


class PoolHistory(Viewed):
    """What happened in a pool, the oldest first."""

    pool: str
    events: list[PoolEvent]


class Event(Model):
    """Something that happened on the controller."""

    seq: int
    time: float
    kind: str
    fields: dict[str, Json]


class EventList(Viewed):
    """Events, the oldest first."""

    events: list[Event]


class HealthRow(Model):
    """A fault, or what is out of service."""

    node: str
    gpu: str
    state: str
    severity: str
    check: str
    since: float | None
    reason: str
    uuid: str = ""


class HealthList(Viewed):
    """All faults and what is out of service."""

    mode: str
    breaker_since: float | None
    rows: list[HealthRow]
    left_out: int
    healthy: str = Field(description="Nodes without a fault, as a hostlist.")


class HealthEvent(Model, extra="allow"):
    """Something that health did or saw."""

    time: float
    kind: str


class FailoverEvent(Model, extra="allow"):
    """Something that happened to the controllers, or a drill."""

    time: float
    what: str
    host: str = ""
    epoch: int | None = None
    detail: str | None = None
    good: bool | None = Field(None, description="Of a drill.")


class FailoverHistory(Viewed):
    """Who led when, who died or was killed and why, and drills; the oldest first, the last 500."""

    events: list[FailoverEvent]


class ShadowSide(Model):
    """What the choices of one side cost."""

    idle_nodes_broken: int
    idle_gpus_on_them: int
    idle_gpus_opened: int


class ShadowDifference(Model):
    """A job that Sluice would have placed elsewhere."""

    job: int
    at: float
    sluice: list[str]
    stock: list[str]


class ShadowReport(Document):
    """Sluice's choices next to stock Slurm's, from the decisions of level shadow (docs/plugins.md)."""

    first: float
    last: float
    decisions: int
    both_start: int
    same_nodes: int
    gpus_compared: int
    same_gpus: int
    only_sluice_starts: int
    only_stock_starts: int
    neither_starts: int
    sluice: ShadowSide
    stock: ShadowSide
    jobs_started_earlier: int
    earlier_s_median: float | None
    earlier_s_most: float | None
    jobs_still_waiting: int
    sluice_us_median: float | None
    stock_us_median: float | None
    decisions_lost: int
    records_lost: int | None = Field(None, description="`decisions_lost` under its earlier name.", deprecated=True)
    differences: list[ShadowDifference]


class GpuOfClass(Model):
    """A GPU of a class."""

    node: str
    index: int
    uuid: str


class GpuClass(Model):
    """GPUs that are alike, as the policy groups them."""

    name: str
    feature: str
    nodes: list[str]
    gpus: list[GpuOfClass]


class ClassList(Viewed):
    """Classes of GPUs: `sluice group`."""

    classes: list[GpuClass]


class Switch(Model):
    """A switch, or a block of nodes."""

    name: str
    kind: Literal["switch", "block"]
    level: int
    nodes: str = Field(description="Below it, as a hostlist.")
    switches: str = Field("", description="Directly below it, as a hostlist.")


class NetworkTopology(Viewed):
    """How nodes are joined, as slurmctld has it; empty where the site has not described it."""

    switches: list[Switch]


class MetricField(Model):
    """One metric."""

    field: str
    kind: Literal["gauge", "counter"]
    help: str


class Measurement(Model):
    """A kind of thing that is measured; in Prometheus each metric is called NAME_FIELD."""

    name: str
    side: Literal["node", "controller", "both"]
    help: str
    tags: dict[str, str]
    metrics: list[MetricField]


class MetricNames(Document):
    """Every metric there is (docs/metrics.md)."""

    measurements: list[Measurement]


class HealthHistory(Document):
    """The last events of health."""

    events: list[HealthEvent]


class Alert(Model):
    """An alert."""

    rule: str
    state: Literal["firing", "waiting", "silenced"]
    subject: str
    since: float
    value: float
    text: str


class Silence(Model):
    """A rule that sends nothing for a while."""

    id: str
    rule: str
    subject: str
    until: float
    by: str
    comment: str


class AlertList(Viewed):
    """Alerts and silences."""

    alerts: list[Alert]
    undelivered: int
    silences: list[Silence]


class PolicyShown(Viewed):
    """The policy file as it is understood: sizes in MiB, times in seconds."""

    policy: dict[str, Json] = Field(description="As `sluice policy schema` describes it (docs/policy.md).")
    text: str = Field("", description="The file as it is written; empty: it is longer than 128 KiB.")


class Finding(Model):
    """A check of what a takeover needs."""

    kind: Literal["ok", "remark", "problem"]
    what: str
    remedy: str = ""


class Lease(Model):
    """Which controller may lead."""

    epoch: int
    held: bool
    host: str
    valid_s: float
    age_s: float


class FailoverStatus(Viewed):
    """The controllers."""

    hosts: list[str]
    leader: str | None
    up: dict[str, bool]
    lease: Lease | None
    journal: dict[str, int]
    findings: list[Finding]


class Inventory(Viewed):
    """The GPUs that nodes reported when they were probed."""

    nodes: list[NodeInventory]
    failures: dict[str, str]


class ReportRow(Model):
    """A line of a report: docs/report-fields.md says what each field is. What is not known is left out."""

    account: str | None = None
    user: str | None = None
    partition: str | None = None
    qos: str | None = None
    gpu_type: str | None = None
    gpu_class: str | None = None
    node: str | None = None
    gpu: str | None = None
    state: str | None = None
    jobs: int | None = None
    started: int | None = None
    ended: int | None = None
    completed: int | None = None
    failed: int | None = None
    cancelled: int | None = None
    timeout: int | None = None
    pending: int | None = None
    gpu_s: float | None = None
    shared_gpu_s: float | None = None
    gpu_mem_mib_s: float | None = None
    cpu_s: float | None = None
    mem_mib_s: float | None = None
    wall_s: float | None = None
    gpu_energy_j: float | None = None
    energy_cost: float | None = None
    power_per_gpu_w: float | None = None
    node_energy_j: float | None = None
    wait_p50_s: float | None = None
    wait_p90_s: float | None = None
    wait_p95_s: float | None = None
    wait_p99_s: float | None = None
    wait_max_s: float | None = None
    wait_mean_s: float | None = None
    measured_percent: float | None = None
    utilisation_percent: float | None = None
    efficiency_percent: float | None = None
    gpu_mem_used_percent: float | None = None
    time_used_percent: float | None = None
    throttled_s: float | None = None
    refused: int | None = None
    idle_gpu_s: float | None = None
    wasted_gpu_s: float | None = None
    wasted_gpu_mem_mib_s: float | None = None
    unused_time_s: float | None = None
    gpu_limit: int | None = None
    gpus_now: int | None = None
    quota_percent: float | None = None
    budget_gpu_s: float | None = None
    budget_used_percent: float | None = None
    budget_left_gpu_s: float | None = None
    budget_projected_percent: float | None = None
    budget_used_up_at: int | None = None
    shares: str | None = None
    entitled_percent: float | None = None
    got_percent: float | None = None
    got_ratio: float | None = None
    gpu_count: int | None = None
    capacity_gpu_s: float | None = None
    allocated_percent: float | None = None
    unallocated_gpu_s: float | None = None
    machine_s: float | None = None
    cost: float | None = None


class Report(Viewed):
    """What was used, by whom, and how well (docs/reports.md)."""

    report: Literal["tenants", "users", "gpus", "nodes", "efficiency", "waste", "fairness", "cost"]
    start: int = Field(description="Seconds since 1970.")
    end: int
    made: int
    jain_index: float | None = Field(None, description="Of `fairness`: 1 where all got what they are entitled to.")
    rows: list[ReportRow]
    total: int | None = Field(None, description="Lines; more than `rows` where they are too many for one answer.")
    recent_at: float | None = Field(None, description="When the accounting was last read for the days that are new.")
    missing: list[str] = Field([], description="Days of which nothing is known: not rolled up, as `sluice report`.")
    notes: list[str] = Field([], description="What the figures lack, in sentences.")


class ServiceRow(Model):
    """What requests to a service used (docs/report-fields.md)."""

    service: str | None = None
    account: str | None = None
    user: str | None = None
    day: str | None = None
    requests: int | None = None
    answered: int | None = None
    refused: int | None = None
    expired: int | None = None
    cancelled: int | None = None
    failed: int | None = None
    resumed: int | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_p50_ms: int | None = None
    first_token_p95_ms: int | None = None
    first_token_p99_ms: int | None = None
    gpu_s: float | None = None
    shared_gpu_s: float | None = None
    tokens_per_gpu_hour: int | None = None


class ServicesReport(Document):
    """What requests to services used."""

    report: Literal["services"]
    start: int = Field(description="Seconds since 1970.")
    end: int
    made: int
    rows: list[ServiceRow]
    total: int | None = Field(None, description="Lines; more than `rows` where they are too many for one answer.")


class JobRow(ReportRow):
    """A job of the accounting, and what it used."""

    job_id: str | None = None
    job_id_raw: int | None = None
    job_name: str | None = None
    exit_code: str | None = None
    submit: int | None = None
    eligible: int | None = None
    start: int | None = None
    end: int | None = None
    elapsed_s: float | None = None
    time_limit_s: int | Literal["UNLIMITED"] | None = None
    wait_s: float | None = None
    nodes: int | None = None
    node_list: str | None = None
    requested: str | None = None
    allocated: str | None = None
    gpus: int | None = None
    gpu_mem_mib: int | None = None
    gpu_mem_peak_mib: int | None = None
    utilisation_now_percent: float | None = None
    gpu_mem_now_mib: int | None = None
    rung: str | None = None


class JobsReport(Viewed):
    """Single jobs, ended ones included, the latest ones where they are too many: `sluice report jobs`."""

    report: Literal["jobs"]
    start: int = Field(description="Seconds since 1970.")
    end: int
    made: int
    rows: list[JobRow]
    total: int | None = None


class JobFacts(Model):
    """A job as Slurm's accounting has it."""

    id: int
    label: str = Field(description="As users write it: 17, 17_3, 17+1.")
    name: str
    user: str
    account: str
    qos: str
    partition: str
    state: str
    exit_code: str
    submit: int | None
    eligible: int | None
    start: int | None
    end: int | None
    wait_s: int | None
    elapsed_s: int


class JobAsked(Model):
    """What it asked for."""

    tres: dict[str, int] = Field(description="As Slurm names them; memory and GPU memory in MiB.")
    time_limit_s: int | None
    time_unlimited: bool


class JobGranted(Model):
    """What it was given."""

    nodes: str
    node_count: int
    tres: dict[str, int]


class GpuUtilisation(Model):
    """Percent of a GPU's time; what was not measured is left out."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    peak: float | None = None


class JobGpuUse(Model):
    """What a job used of a GPU."""

    node: str
    index: int
    uuid: str
    model: str
    total_mib: int
    asked_mib: int | None = Field(description="null: the whole GPU.")
    limit_mib: int | None
    rung: str = Field(description="What held it to its limit (docs/limits.md).")
    peak_mib: int
    refused: int
    seconds: float | None = Field(description="Measured.")
    utilisation: GpuUtilisation
    memory_mean_mib: float | None
    energy_j: float | None
    idle_s: float | None
    throttled_s: float | None
    errors: int | None
    now_percent: float | None
    now_mib: int | None
    now_watts: float | None = Field(None, description="Its part of the GPU's power since the previous report.")
    now_throttled_percent: float | None = Field(None, description="Part of that time in which the GPU was slowed down.")


class JobNic(Model):
    """What an RDMA interface that a job can open has counted, while no other job could use it."""

    node: str
    nic: str
    shared: bool = Field(description="Another job could use it for some of the time.")
    counts: dict[str, int] = Field(description="By counter (docs/metrics.md, sluice_jobnic); those that are not 0.")


class SlowestGpu(Model):
    """The GPU of a running job that its others wait for (docs/fabric.md)."""

    node: str
    index: int
    why: Literal["throttled", "busy", "power"]
    value: float = Field(description="Its own: percent of the time, or watts (power).")
    others: float = Field(description="The middle one of the others.")


class JobBinding(Model):
    """What tasks of a job on a node may use, next to what is near their GPUs; NUMA nodes are lists such as `0-1`."""

    node: str
    step: str
    tasks: int = Field(description="How many had the same.")
    gpu_nodes: str = Field(description="NUMA nodes of their GPUs.")
    cpus: int = Field(description="That each may use.")
    cpus_near: int = Field(description="Of these, on the GPUs' NUMA nodes.")
    cpu_nodes: str
    memory_nodes: str
    agrees: bool = Field(description="All of its CPUs are near, and its memory may be.")
    huge_mib: int | None = Field(None, description="Reserved as huge pages on the GPUs' NUMA nodes, used or not.")
    huge_far_mib: int | None = Field(None, description="The same on the node's other NUMA nodes.")


class JobUsed(Model):
    """What a job used of its GPUs."""

    gpus: list[JobGpuUse]
    utilisation_percent: float | None
    gpu_memory_asked_mib: int | None
    gpu_memory_peak_mib: int | None
    idle_gpu_s: float | None
    gpu_energy_j: float | None
    throttled_s: float | None
    refused: int
    rung: str
    reported_at: float | None = Field(description="Of a running job: when its node last reported it.")
    saved_at: float | None = Field(None, description="When it last saved its state, on all of its nodes.")
    bindings: list[JobBinding] = Field([], description="What its tasks were bound to, and what is near their GPUs.")
    nics: list[JobNic] = Field([], description="What its network interfaces counted.")
    slowest: SlowestGpu | None = Field(None, description="The GPU that the others wait for; null: there is none.")
    told: float | None = Field(None, description="`reported_at` under its earlier name.", deprecated=True)


class JobHost(Model):
    """What a job used of its hosts."""

    cpu_s: float | None
    cpu_percent: float | None
    memory_peak_mib: int | None


class LimitHit(Model, extra="allow"):
    """A limit that a job hit, or the like."""

    node: str
    time: float
    action: Literal["refuse", "warn", "end", "stray"]


class JobAdvice(Model):
    """What to ask for next time."""

    sbatch: str = Field(description="A line for the next submission.")
    because: list[str]


class JobWaited(Model):
    """Why it waited."""

    seconds: int | None
    slurm_reason: str
    explanation: Explanation | None = None
    not_explained: str | None = Field(None, description="Why there is no explanation.")


class JobReport(Document):
    """Everything that is known of one job: `sluice report job`."""

    job: JobFacts
    runs: int
    asked: JobAsked
    granted: JobGranted
    used: JobUsed | None
    host: JobHost
    limits_hit: list[LimitHit]
    waited: JobWaited
    advice: JobAdvice | None


class SeriesGpu(Model):
    """A GPU over time: a value for each of the times of its series, null where it was not reported."""

    node: str
    index: int
    utilisation_percent: list[int | None]
    memory_used_mib: list[int | None]


class JobSeries(Viewed):
    """The use of a running job's GPUs over the last two hours, as far as this server has seen it."""

    times: list[float]
    gpus: list[SeriesGpu]


class TopologyGpu(Model):
    """A GPU of a node."""

    label: str
    vendor: str
    index: int
    uuid: str
    model: str
    pci_address: str
    numa_node: int | None
    cores: str
    nics: list[str]


class Topology(Document):
    """How the GPUs of a node are joined: `sluice topo`."""

    node: str
    gpus: list[TopologyGpu]
    links: list[list[Link]] = Field(description="From each GPU to each.")
    nics: list[Nic]
    link_domains: list[list[int]] = Field(description="GPUs that fast links join, by their place in `gpus`.")


class TenantOfCaller(TenantInList):
    """A tenant of the caller, with what is left and a job that it can submit."""

    quota: list[QuotaRow]
    example: str


class Whoami(Document):
    """The caller."""

    user: str
    level: Literal["user", "operator", "administrator"]
    coordinates: list[str]
    accounts: list[str] = []
    gpu_types: list[str] = []
    tenants: list[TenantOfCaller] = []


class Part(Model):
    """One part of the snapshot."""

    at: float | None = Field(description="When it was last read.")
    stale_since: float | None
    problem: str


class GpuTypeNow(Model):
    """The GPUs of a type now."""

    type: str
    gpu_class: str = Field(description="The policy's class of it; the type where the policy has none.")
    total: int
    whole: int = Field(description="That jobs have for themselves.")
    shared: int = Field(description="That jobs share.")
    out: int = Field(description="Out of service, or on nodes where no job can start.")
    free: int = Field(description="That a job could have for itself.")
    free_mib: int = Field(description="GPU memory that shares could have, on free GPUs and on shared ones.")


class Overview(Document):
    """The cluster in one look, and how old each part of the snapshot is."""

    cluster: str
    slurm_version: str
    private_data: list[str]
    connected: bool = Field(description="Whether the controllers' daemon answers.")
    parts: dict[str, Part]
    jobs_by_state: dict[str, int] = Field(description="Of those that the caller may see.")
    gpus: int | None = Field(description="null: PrivateData keeps nodes from the caller.")
    gpus_in_use: int | None
    gpus_out: int | None
    gpu_types: list[GpuTypeNow] | None = None
    waiting_by_reason: dict[str, int] = Field({}, description="Of those that the caller may see: the most frequent.")


# ---- writes ----

_LINE = r"^[^\x00-\x1f\x7f]*$"
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]*$"
_NAMES = r"^[A-Za-z0-9_][A-Za-z0-9_.@+,-]*$"
_TIME = r"^[0-9:-]{1,32}$|^(?i:unlimited|infinite)$"
_MOMENT = r"^[A-Za-z0-9:+.-]{1,64}$"
_COUNT = r"^[0-9]{1,9}(-[0-9]{1,9})?$"
_SIZE = r"^[0-9]{1,12}[KMGTkmgt]?$"
_GRES = r"^[A-Za-z0-9_.:,/=-]{1,256}$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"

Line = Annotated[str, StringConstraints(max_length=1024, pattern=_LINE)]
Name = Annotated[str, StringConstraints(max_length=128, pattern=_NAME)]
Names = Annotated[str, StringConstraints(max_length=1024, pattern=_NAMES)]
AbsolutePath = Annotated[str, StringConstraints(max_length=1024, pattern=r"^/[^\x00-\x1f\x7f]*$")]
Variable = Annotated[str, StringConstraints(pattern=_VARIABLE)]
Value = Annotated[str, StringConstraints(max_length=32768, pattern=r"^[^\x00]*$")]


def _without_null(schema: dict[str, Any]) -> None:
    """A body's schema: what may be left out may not be null."""
    for field in schema.get("properties", {}).values():
        kinds = [one for one in field.pop("anyOf", ()) if one != {"type": "null"}]
        field.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})
        if "patternProperties" in field:
            field["additionalProperties"] = False
        if field.get("default", "") is None:
            del field["default"]


class Body(BaseModel, extra="forbid", json_schema_extra=_without_null):
    """What a write is sent; what is left out stays as Slurm has it. Nothing may be null that is sent."""

    @model_validator(mode="before")
    @classmethod
    def _not_null(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and (null := [name for name, value in sent.items() if value is None]):
            raise ValueError(f"{str(null[0])[:80]} is null: leave it out")
        return sent


class JobRequest(Body):
    """A job to submit. Fields are sbatch's options, and are written as there."""

    script: str = Field(min_length=1, max_length=MOST_SCRIPT, description="Begins with `#!`.")
    name: Line | None = None
    account: Name | None = None
    partition: Names | None = None
    qos: Name | None = None
    time_limit: str | None = Field(None, pattern=_TIME, description="Minutes, or as 1-12:00:00.")
    nodes: str | None = Field(None, pattern=_COUNT)
    ntasks: int | None = Field(None, ge=1, le=10_000_000)
    ntasks_per_node: int | None = Field(None, ge=1, le=100_000)
    cpus_per_task: int | None = Field(None, ge=1, le=100_000)
    cpus_per_gpu: int | None = Field(None, ge=1, le=100_000)
    memory: str | None = Field(None, pattern=_SIZE, description="Of each node.")
    memory_per_cpu: str | None = Field(None, pattern=_SIZE)
    memory_per_gpu: str | None = Field(None, pattern=_SIZE)
    gpus: str | None = Field(None, pattern=_GRES, description="A number, or h100:2.")
    gpus_per_node: str | None = Field(None, pattern=_GRES)
    gpus_per_task: str | None = Field(None, pattern=_GRES)
    gpu_mem: str | None = Field(None, pattern=_SIZE, description="A part of a GPU's memory, as 10G.")
    gpu_share: str | None = Field(None, pattern=r"^[0-9]{1,3}%?$")
    gpu_power: str | None = Field(None, pattern=r"^[0-9]{1,6}[Ww]?$", description="Watts of each GPU, as 300W.")
    gpu_affinity: Name | None = None
    gpu_spread: bool = False
    fabric: str | None = Field(
        None,
        pattern=r"^(any|spread|(block|rail)(@[0-9:-]{1,16})?)$",
        description="Where its nodes are: block, rail@30:00, spread, any.",
    )
    nics_per_gpu: int | None = Field(None, ge=1, le=32, description="RDMA interfaces with each GPU.")
    nic_planes: str | None = Field(
        None, pattern=r"^(one|spread|any)$", description="The planes of the network that its interfaces are in."
    )
    segment: int | None = Field(None, ge=1, le=65533, description="Nodes of each segment, in one block each.")
    gang: str | None = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    gres: str | None = Field(None, pattern=_GRES)
    constraint: str | None = Field(None, max_length=256, pattern=r"^[A-Za-z0-9_.,&|*()\[\]-]+$")
    licenses: str | None = Field(None, pattern=_GRES)
    reservation: Names | None = None
    nodelist: str | None = Field(None, max_length=1024, pattern=r"^[A-Za-z0-9_.,\[\]-]+$")
    exclude: str | None = Field(None, max_length=1024, pattern=r"^[A-Za-z0-9_.,\[\]-]+$")
    array: str | None = Field(None, max_length=256, pattern=r"^[0-9,:%-]+$")
    dependency: str | None = Field(None, max_length=1024, pattern=r"^[A-Za-z0-9_:,?+]+$")
    begin: str | None = Field(None, pattern=_MOMENT)
    deadline: str | None = Field(None, pattern=_MOMENT)
    nice: int | None = Field(None, ge=-2_147_483_645, le=2_147_483_645)
    hold: bool = False
    requeue: bool | None = None
    exclusive: bool = False
    comment: Line | None = None
    work_dir: AbsolutePath | None = Field(None, description="The user's home folder where it is left out.")
    output: Line | None = Field(None, description="As sbatch's, with %j.")
    error: Line | None = None
    mail_type: Names | None = None
    mail_user: str | None = Field(None, max_length=254, pattern=r"^[A-Za-z0-9_.+@-]+$")
    signal: str | None = Field(None, pattern=r"^[A-Za-z0-9:@]{1,32}$")
    environment: dict[Variable, Value] = Field(
        {},
        max_length=256,
        description="Of the job, besides HOME, PATH, USER. None of Slurm's own.",
        json_schema_extra={"propertyNames": {"pattern": _VARIABLE, "maxLength": 128}, "additionalProperties": False},
    )


class Submitted(Document):
    """A job that slurmctld has."""

    job_id: int
    messages: list[str] = Field(description="What Slurm said of it, such as what was changed.")


class Smaller(Model):
    """A smaller request that would start earlier."""

    changed: dict[str, str] = Field(description="Fields of the request that differ, and their values.")
    start_time: float | None
    nodes: str


class WhatIf(Document):
    """What would become of a request that is not made."""

    accepted: bool
    refused: list[str] = Field(description="Why it would be refused, in the words of Slurm and its plugins.")
    messages: list[str]
    start_time: float | None = Field(description="When it would start as things are; null: not known.")
    starts_now: bool
    nodes: str
    partition: str
    cpus: int | None
    becomes: dict[str, str] = Field(description="Fields that are filled in or rewritten, as far as is known.")
    smaller: Smaller | None


def _of_change(schema: dict[str, Any]) -> None:
    _without_null(schema)
    schema["minProperties"] = 1


class JobChange(Body, json_schema_extra=_of_change):
    """Fields of a job to change, written as for scontrol."""

    time_limit: str | None = Field(None, pattern=_TIME.replace("[0-9", "[+-]?[0-9", 1))
    priority: int | None = Field(None, ge=0, le=4_294_967_293, description="For operators.")
    comment: Line | None = None
    name: Line | None = None
    qos: Name | None = None
    partition: Names | None = None
    account: Name | None = None
    nice: int | None = Field(None, ge=-2_147_483_645, le=2_147_483_645)
    begin: str | None = Field(None, pattern=_MOMENT)
    deadline: str | None = Field(None, pattern=_MOMENT)
    dependency: str | None = Field(None, max_length=1024, pattern=r"^[A-Za-z0-9_:,?+]*$")
    reservation: Names | None = None
    nodelist: str | None = Field(None, max_length=1024, pattern=r"^[A-Za-z0-9_.,\[\]-]*$")
    exclude: str | None = Field(None, max_length=1024, pattern=r"^[A-Za-z0-9_.,\[\]-]*$")
    constraint: str | None = Field(None, max_length=256, pattern=r"^[A-Za-z0-9_.,&|*()\[\]-]*$")
    requeue: bool | None = None
    mail_type: Names | None = None
    mail_user: str | None = Field(None, max_length=254, pattern=r"^[A-Za-z0-9_.+@-]+$")


class JobDone(Document):
    """What was done to a job."""

    job: str
    did: Literal["cancel", "hold", "release", "requeue", "update"]
    messages: list[str]


class PowerBudget(Model):
    """A budget of watts, as it is now. Null: not known on this controller, which may not lead."""

    name: str
    nodes: str = Field(description="A hostlist; `*`: all; empty: jobs of `accounts`.")
    accounts: list[str]
    policy_w: int = Field(description="By the policy at this hour.")
    changes: str | None = Field(description="When the policy has other watts, as `Mon 18:00`; null: never.")
    lowered_w: int | None = Field(description="Lowered for a while to this.")
    lowered_until: float | None
    lowered_by: str
    watts: int = Field(description="The lower of both.")
    measured_w: float | None
    bound_w: float | None = Field(description="The most that can be drawn by the caps in force.")
    capped_gpus: int | None
    silent_gpus: int | None = Field(description="GPUs of nodes that do not report.")
    short_w: float | None = Field(description="By how much the lowest caps exceed it.")
    below_w: float | None = Field(None, description="By how much caps are below `lowest_cap`, to keep it.")
    guaranteed_w: float | None = Field(None, description="What GPUs of guaranteed jobs draw at `lowest_cap`.")


class PowerShown(Viewed):
    """Budgets of watts."""

    budgets: list[PowerBudget]
    stopped: int = Field(description="Jobs that gave way since the daemon began.")


class PowerUse(Model):
    """What GPUs of a node, or under jobs of a tenant, draw. Of a shared GPU each job has an equal part."""

    name: str
    gpus: float
    power_w: float
    bound_w: float = Field(description="The most that can be drawn by the caps in force.")
    capped_gpus: float = Field(description="With a lower cap than their jobs would have otherwise.")
    silent_gpus: float = Field(description="Of nodes that do not report.")


class PowerDrawn(Viewed):
    """What nodes and tenants draw, as nodes report it while the policy has budgets."""

    nodes: list[PowerUse]
    tenants: list[PowerUse]


class BudgetRequest(Body):
    """A budget that is lowered for a while; without watts the policy's counts again."""

    name: str = Field(max_length=40, pattern=_NAME)
    watts: int | None = Field(None, ge=0, le=1_000_000_000)
    seconds: int = Field(7200, ge=1, le=30 * 86_400)


class BudgetLowered(Document):
    """What is in force."""

    budget: str
    until: float


class ProfileQuery(Body):
    """Which step of a job."""

    step: str = Field("", pattern=r"^[A-Za-z0-9]{0,16}$", description="0, batch; empty: all steps.")


class ProfileRequest(ProfileQuery):
    """A profile of a job that runs; without seconds, until it is stopped."""

    seconds: int | None = Field(None, ge=1, le=86_400)


class ProfileDone(Document):
    """A profile was started or stopped."""

    job: str
    did: Literal["start", "stop"]
    messages: list[str]


class ProfiledKernel(BaseModel):
    """A kernel of all processes; percent is of all kernels' time."""

    name: str
    calls: int
    seconds: float
    percent: float | None
    mean_us: float


class ProfiledCopies(BaseModel):
    """All copies from one kind of memory to another."""

    direction: str
    count: int
    bytes: int
    seconds: float
    gb_per_s: float | None


class ProfiledFunction(BaseModel):
    """Where threads of the job's processes were when they were sampled."""

    name: str
    samples: int
    percent: float | None


class ProfiledRank(BaseModel):
    """What one process did; `compute_seconds` are without collectives."""

    rank: int | None
    node: str
    pid: int
    program: str
    compute_seconds: float
    compute_percent: float | None
    waiting_percent: float | None


class ProfiledClock(BaseModel):
    """How far a node's time of day is ahead, and how well its clock is known; null: not measured."""

    node: str
    ahead_ms: float | None
    uncertainty_us: float | None


class ProfileSummary(Document):
    """What a job's GPUs did while it was profiled; percent of the time of all its GPUs."""

    job_id: int
    start: float
    seconds: float
    nodes: int
    processes: int
    gpus: int
    busy_percent: float | None
    copies_percent: float | None
    idle_percent: float | None
    collectives_percent: float | None
    copies_overlapped_percent: float | None
    collectives_overlapped_percent: float | None
    kernels: list[ProfiledKernel]
    copies: list[ProfiledCopies]
    samples: int = 0
    functions: list[ProfiledFunction] = []
    slowest_over_median_percent: float | None
    ranks: list[ProfiledRank]
    lost_events: int
    lost_because: list[str]
    not_timed_events: int = Field(0, description="Kernels and copies that ran, and no time of theirs is known.")
    cost_percent: float | None
    clocks: list[ProfiledClock]
    notes: list[str]


class ReturnRequest(Body):
    """GPUs to return to service; without numbers all that Sluice took out of the node."""

    node: str = Field(max_length=256, pattern=_NAME)
    gpus: list[Annotated[int, Field(ge=0, le=255)]] = Field([], max_length=64)
    reason: Line = ""


class Returned(Document):
    """What was returned to service."""

    node: str
    done: list[str]


class SilenceRequest(Body):
    """No notices of a rule for a while."""

    rule: str = Field(min_length=1, max_length=256, pattern=_LINE, description="A rule's name, or a pattern.")
    subject: str = Field("*", min_length=1, max_length=256, pattern=_LINE, description="A pattern.")
    seconds: int = Field(14_400, ge=60, le=366 * 86400)
    comment: Annotated[str, StringConstraints(max_length=256, pattern=_LINE)] = ""


class Silenced(Document):
    """A silence that holds, or that has ended."""

    id: str
    until: float


class PolicyText(Body):
    """A policy file."""

    text: str = Field(max_length=MOST_POLICY)


class Mistake(Model):
    """One mistake in a policy file."""

    line: int
    place: str
    what: str
    remedy: str


class PolicyChecked(Document):
    """The mistakes of a policy file."""

    mistakes: list[Mistake]
    tenants: int | None = Field(description="How many it has; null: it cannot be read.")
    unenforced: list[str] = Field(description="Sections that are accepted and not enforced yet.")


class FieldChange(BaseModel, populate_by_name=True):
    """A field's value there, and the wanted one; empty: none."""

    before: str = Field(alias="from")
    to: str


class Change(Model):
    """One thing that a policy would change."""

    kind: str
    action: Literal["add", "change", "remove"]
    name: str
    fields: dict[str, FieldChange]


class PolicyDrift(Document):
    """What was changed by hand since a policy was applied last, as the changes that would undo it."""

    cluster: str
    file: str = Field(description="Where the policy is kept that was applied last.")
    version: str = Field(description="Of that policy.")
    changes: list[Change]
    notes: list[str]


class PolicyPlan(Document):
    """What a policy would change, and the name of exactly this."""

    hash: str
    cluster: str
    version: str = Field(description="Of the policy file.")
    changes: list[Change]
    notes: list[str]
    lines: list[str] = Field(description="The changes for people, as `sluice plan` shows them.")


class ApplyRequest(Body):
    """A plan that the caller has seen."""

    hash: str = Field(pattern=r"^[0-9a-f]{64}$")


class PolicyApplied(Document):
    """What was changed."""

    hash: str
    changes: int
    left: int = Field(description="Changes that were left to an administrator.")
    messages: list[str]


class ServiceChange(Body, json_schema_extra=_of_change):
    """What to change of a service in the policy file."""

    least: int | None = Field(None, ge=0, le=10_000, description="Replicas that run always.")
    most: int | None = Field(None, ge=1, le=10_000, description="Replicas at once.")
    paused: bool | None = Field(None, description="No replicas, and requests are refused.")


class ServiceChanged(Document):
    """What was changed."""

    service: str
    changes: int
    messages: list[str]


class Nothing(Body):
    """No fields."""


class AuditQuery(Body):
    """Which entries of the audit log, the newest first."""

    user: str = Field("", max_length=128)
    action: str = Field("", max_length=64, description="Its first words are enough: `web`, `web refused`.")
    request_id: str = Field("", max_length=64)
    after: int = Field(0, ge=0, description="Only those with a greater `seq`.")
    before: int = Field(0, ge=0, description="Only those with a smaller `seq`; 0: all.")
    limit: int = Field(100, ge=1, le=1000)


class AuditEntry(Model):
    """Who did what."""

    seq: int
    time: float
    user: str
    action: str
    subject: str
    detail: dict[str, Json]
    version: str
    host: str
    prev: str
    hash: str


class AuditList(Document):
    """Entries of the audit log."""

    entries: list[AuditEntry]
