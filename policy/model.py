"""sluice.yaml: tenants, quotas, classes and scheduling. docs/policy.md is generated from this module.

Fields and sections that are marked ``enforced: False`` are checked like all others, but nothing acts on them yet. A
policy that sets one is refused unless it names it in `accept_unenforced`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from policy.alerts import Alerts
from policy.checkpoint import Checkpoint
from policy.compaction import Compaction
from policy.compiled import MOST_PLANNED
from policy.grouping import Grouping
from policy.health import Health
from policy.monitoring import Monitoring
from policy.names import Name, TenantName, UserName, Words
from policy.pools import Fleet, Pool
from policy.power import Power
from policy.preflight import Preflight
from policy.services import MOST_SERVICES, Service, ServiceName, Serving
from policy.state import Level
from policy.traces import Traces
from policy.units import Count, Date, Gpus, Hours, Mib, Ratio, Seconds
from sluice.base.errors import UsageError
from sluice.base.hostlist import expand

SCHEMA_VERSION = 1
Shares = Annotated[int, Field(ge=0, le=1_000_000)]
Strategy = Literal["static", "dynamic", "hybrid"]
Fabric = Literal["near", "spread"]
NicPlanes = Literal["any", "one", "spread"]


class Section(BaseModel):
    """Base of all sections: unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# ---- tenants ----


class ClassAmount(Section):
    """An amount within one class of GPUs."""

    gpus: Gpus | None = None
    """Whole GPUs of the class. Example: `8`."""
    gpu_hours: Hours | None = None
    """GPU-hours of the class in each `scheduling.usage_period` (limits only). Example: `1000`."""


class Guarantee(Section):
    """What a tenant can have at any time: it is taken back from over-quota work of others."""

    gpus: Gpus | None = None
    """Whole GPUs of any class. Example: `8`."""
    gpu_memory: Mib | None = None
    """GPU memory in shares (`--gpu-mem`), in MiB or with a unit. Example: `640G`."""
    classes: dict[Name, ClassAmount] = {}
    """The same for single classes. Example: `{h100: {gpus: 4}}`."""


class Limit(Guarantee):
    """What a tenant can never exceed, its children's use and over-quota work included."""

    gpu_hours: Hours | None = None
    """GPU-hours in each `scheduling.usage_period`; when they are used, no more jobs start. Example: `10000`."""


class ClassJob(Section):
    """The largest job within one class of GPUs."""

    gpus: Gpus | None = None
    """GPUs of the class in one job. Example: `4`."""
    time: Seconds | None = None
    """Longest run time of a job that uses the class. Example: `12h`."""


class JobLimit(Section):
    """The largest job."""

    gpus: Gpus | None = None
    """GPUs of one job. Example: `16`."""
    gpu_memory: Mib | None = None
    """GPU memory of one job. Example: `320G`."""
    classes: dict[Name, ClassJob] = {}
    """The same for single classes. Example: `{h100: {gpus: 4, time: 12h}}`."""


class Budget(Section):
    """GPU-hours or GPU-memory-hours for each `scheduling.usage_period`."""

    gpu_hours: Hours | None = None
    """Hours of whole GPUs. Example: `5000`."""
    gpu_memory_hours: Hours | None = None
    """GiB-hours of GPU memory in shares. Example: `400000`."""
    at_80: Literal["nothing", "warn", "lower_priority"] = "warn"
    """When 80 percent are used: warn (a note of `sluice plan` and `sluice apply`, and in the audit log), or also lower
    the priority of the tenant's QOS to 0 with the next apply."""
    at_100: Literal["warn", "lower_priority", "stop"] = "stop"
    """When all is used: as above, or no more jobs of the tenant start (Slurm's GrpTRESMins)."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.gpu_hours is None and self.gpu_memory_hours is None:
            raise ValueError("a budget needs gpu_hours or gpu_memory_hours")
        return self


class Member(Section):
    """A member with its own settings; otherwise a plain name is enough."""

    name: UserName
    """Unix user. Example: `alice`."""
    max_gpus: Gpus | None = None
    """Instead of the tenant's `max_gpus_per_user`. Example: `2`."""
    shares: Shares = 1
    """Fair-share weight among the tenant's members. Example: `2`."""
    slurm: dict[str, str] = {}
    """Further options of the user's association, kept as written (by `sluice import`). Example:
    `{MaxJobs: "5", qos: "normal,high"}`."""

    @field_validator("slurm")
    @classmethod
    def _options(cls, value: dict[str, str]) -> dict[str, str]:
        return _known_options(value, (*ASSOCIATION_OPTIONS, "qos", "defaultqos"))


class Qos(Section):
    """Existing QOS that the tenant uses instead of one of its own."""

    use: list[Name] = []
    """The QOS that it may use; empty: those of the tenant above it. Example: `[normal, high]`."""
    default: Name | None = None
    """The default QOS of its jobs. Example: `normal`."""


class Tenant(Section):
    """A tenant: one Slurm account, with a QOS of the same name."""

    description: Words = ""
    """Shown by sacctmgr. Example: `Robotics group`."""
    organization: Words = "sluice"
    """Slurm's organization of the account. Example: `acme`."""
    parent: TenantName | None = None
    """The tenant that this one belongs to: organisation, group, project. Example: `acme`."""
    members: list[UserName | Member] = []
    """Unix users. Example: `[alice, bob]`."""
    coordinators: list[UserName] = []
    """Users who may change the members and limits of this tenant and those below it. Example: `[alice]`."""
    guarantee: Guarantee | None = None
    """What it can have at any time."""
    limit: Limit | None = None
    """What it never exceeds; default: none, or the guarantee where it does not `borrow`."""
    borrow: bool = False
    """May use idle GPUs beyond its guarantee, in the QOS `sluice_over`, whose jobs are taken back by those who are
    guaranteed. A tenant that borrows without a guarantee has over-quota work only."""
    lend: bool = True
    """Others may use its idle guarantee. `false` reserves nodes for it, whatever the class's strategy."""
    shares: Shares = 1
    """Fair-share weight among its siblings. Example: `3`."""
    tier: Annotated[int, Field(ge=0, le=1000)] = 0
    """Priority tier: a higher one goes first. Example: `10`."""
    default_priority: Annotated[int, Field(ge=0, le=999)] | None = None
    """Priority of its jobs within the tier. Default: that of `defaults`. Example: `5`."""
    max_time: Seconds | None = None
    """Longest job. Default: that of `defaults`. Example: `48h`."""
    max_jobs: Count | None = None
    """Most jobs running at once. Example: `100`."""
    max_queued: Count | None = None
    """Most jobs submitted at once, running and waiting. Example: `1000`."""
    max_gpus_per_user: Gpus | None = None
    """Most GPUs of one member at once. Default: that of `defaults`. Example: `8`."""
    per_job: JobLimit | None = None
    """The largest job."""
    gpu_memory_per_gpu: Mib | None = None
    """Most memory on one GPU for all jobs of the tenant together, whole GPUs included. Example: `40G`."""
    classes: list[Name] | None = None
    """Classes of GPUs that it may use; default: all. Example: `[h100, l40s]`."""
    partitions: list[Name] = []
    """Partitions that it may use, the default one first; empty: all. Example: `[gpu]`."""
    features: list[Name] = []
    """Features that all nodes of its jobs must have: they are added to each job's constraint. Example: `[nvlink8]`."""
    submissions_per_minute: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Most submissions of the tenant in a minute. Example: `60`."""
    expires: Date | None = None
    """First day on which it may no longer submit jobs. Example: `2027-12-31`."""
    one_block_for: Annotated[Seconds, Field(ge=0, le=2_592_000)] = 0
    """Its jobs of several nodes that say nothing else (`--fabric`, `--switches`) wait this long for nodes of one block
    or leaf switch, then take any; 0s: they do not wait. Example: `10m`."""
    gang: bool = True
    """May start gangs of jobs together (`--gang`)."""
    deadlines: bool = True
    """May order its jobs by `--deadline`."""
    budget: Budget | None = None
    """Hours for each period."""
    qos: Qos | None = None
    """Existing QOS instead of its own."""
    slurm: dict[str, str] = {}
    """Further options of the account's association, kept as written (by `sluice import`). Example:
    `{GrpWall: "1000"}`."""

    @property
    def users(self) -> dict[str, Member]:
        """The members by name."""
        return {member.name: member for member in (Member(name=m) if isinstance(m, str) else m for m in self.members)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [m if isinstance(m, str) else m.name for m in self.members]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"member {name!r} is named twice; name it once")
        if self.qos is not None:
            if self.guarantee is not None or self.borrow or self.tier or self.default_priority is not None:
                raise ValueError(
                    "guarantee, borrow, tier and default_priority are kept in the tenant's own QOS; remove `qos`"
                )
            if self.qos.default is not None and self.qos.use and self.qos.default not in self.qos.use:
                raise ValueError(f"qos.default {self.qos.default!r} is not among those in `use`")
        if self.guarantee is not None:
            self._within_limit(self.guarantee)
        if not self.lend and self.guarantee is None:
            raise ValueError("lend: false needs a guarantee, which is what is not lent")
        return self

    @field_validator("slurm")
    @classmethod
    def _options(cls, value: dict[str, str]) -> dict[str, str]:
        return _known_options(value, ASSOCIATION_OPTIONS)

    def _within_limit(self, guarantee: Guarantee) -> None:
        if self.limit is None:
            return
        pairs: list[tuple[str, float | None, float | None]] = [
            ("gpus", guarantee.gpus, self.limit.gpus),
            ("gpu_memory", guarantee.gpu_memory, self.limit.gpu_memory),
        ]
        pairs += [
            (f"classes.{name}.gpus", amount.gpus, self.limit.classes.get(name, ClassAmount()).gpus)
            for name, amount in guarantee.classes.items()
        ]
        for name, least, most in pairs:
            if least is not None and most is not None and least > most:
                raise ValueError(f"guarantee.{name} {least:g} is more than limit.{name} {most:g}; raise the limit")
            if least is not None and most is not None and most > least and not self.borrow:
                raise ValueError(
                    f"limit.{name} {most:g} is above guarantee.{name} {least:g}: the part above is over-quota work; "
                    "set borrow: true, or make them equal"
                )


ASSOCIATION_OPTIONS = (
    "GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "GrpJobs", "GrpSubmitJobs", "GrpWall", "MaxTRESPerJob",
    "MaxTRESMinsPerJob", "MaxTRESPerNode", "MaxJobs", "MaxSubmitJobs", "MaxWall", "Priority",
)  # fmt: skip
"""Limits of an association, as sacctmgr names them."""


def _known_options(options: dict[str, str], known: tuple[str, ...]) -> dict[str, str]:
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"slurm.{key}: not an option of an association; use one of {', '.join(known)}")
        if not re.fullmatch(r"[\w.,:=/+-]+", value, re.ASCII):
            raise ValueError(f"slurm.{key}: {value!r} is not the value of one option; write it as sacctmgr shows it")
    return options


class Defaults(Section):
    """Defaults for all tenants."""

    default_priority: Annotated[int, Field(ge=0, le=999)] = 0
    """As the tenant's field. Example: `5`."""
    max_time: Seconds | None = None
    """As the tenant's field. Example: `48h`."""
    max_gpus_per_user: Gpus | None = None
    """As the tenant's field. Example: `8`."""


# ---- classes and scheduling ----


class GpuClass(Section):
    """A class of GPUs: a GRES type that quotas and jobs name."""

    types: Annotated[list[Name], Field(min_length=1)]
    """GRES types (`gpu:TYPE`). Quotas in a class need exactly one, as Slurm counts types. Example: `[h100]`."""
    feature: Name | None = None
    """Node feature of the class, for reservations; default: the first type, which `sluice gres write` makes a feature.
    Example: `h100`."""
    strategy: Strategy | None = None
    """Instead of `allocation.strategy`. Example: `static`."""
    reserved_ratio: Ratio | None = None
    """Instead of `allocation.reserved_ratio`. Example: `0.5`."""
    gpu_memory: Mib = 0
    """Memory of one GPU; default: from the nodes' shards. Example: `80G`."""
    cpus_per_gpu: Annotated[float, Field(ge=0, le=1000)] = 0
    """CPUs for each GPU of a job that names none; 0: Slurm's default. `sluice plan` notes where a node has fewer for
    all of its GPUs. Example: `8`."""
    memory_per_gpu: Mib = 0
    """Host memory for each GPU of a job that names none; 0: Slurm's default. `sluice plan` notes where a node has less
    for all of its GPUs. Example: `64G`."""
    fabric: Fabric | None = None
    """Instead of `scheduling.fabric`, for jobs that name a type of the class. Example: `spread`."""
    nic_planes: NicPlanes | None = None
    """Instead of `scheduling.nic_planes`, likewise. Example: `one`."""


class Allocation(Section):
    """How guarantees are kept."""

    strategy: Strategy = "dynamic"
    """`dynamic`: one pool; guarantees are taken back from over-quota work. `static`: whole nodes are reserved for each
    guaranteed tenant. `hybrid`: `reserved_ratio` of the nodes is reserved for all guaranteed tenants together, the rest
    is a pool for everybody."""
    reserved_ratio: Ratio = 0.0
    """Reserved share of a hybrid class, rounded up to whole nodes. Example: `0.3`."""

    @model_validator(mode="after")
    def _needed(self) -> Self:
        if (self.strategy == "hybrid") != (self.reserved_ratio > 0):
            raise ValueError("hybrid needs a reserved_ratio above 0, and only hybrid has one")
        return self


class Order(Section):
    """Weights of the factors that order the queue; 0: the factor does not count."""

    fifo: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Time of submission. Example: `1000`."""
    priority: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The tenant's tier and default priority. Example: `1000`."""
    fair_share: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Use below the tenant's shares. Example: `10000`."""
    deadline: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Little time left before `--deadline`. Example: `1000`."""
    shortest_service: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Little predicted GPU time. Example: `1000`."""
    size: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Number of whole GPUs, up to eight: large jobs before small ones, both before parts of GPUs. Example: `1000`."""


_ORDERS = {
    "fifo": Order(fifo=100_000),
    "priority": Order(priority=100_000, fifo=1000),
    "fair-share": Order(fair_share=100_000, priority=10_000, fifo=1000),
    "deadline": Order(deadline=100_000, fifo=1000),
    "shortest-service": Order(shortest_service=100_000, fifo=1000),
}


class Preemption(Section):
    """Over-quota work is preempted for guaranteed work."""

    enabled: bool = True
    """`false`: guarantees wait until over-quota jobs end by themselves."""
    min_run_time: Seconds = 0
    """Time that an over-quota job runs before it can be preempted. Example: `10m`."""
    grace: Seconds = 30
    """From SIGTERM to SIGKILL. Example: `60s`."""
    mode: Literal["requeue", "cancel"] = "requeue"
    """What happens to the job."""


class Backfill(Section):
    """How far the planner looks."""

    depth: Annotated[int, Field(ge=1, le=MOST_PLANNED)] = 10_000
    """Waiting jobs that are planned, at most 16,384."""
    reservations: Annotated[int, Field(ge=0, le=100_000)] = 64
    """The number of starts that later jobs must not delay."""
    interval: Annotated[Seconds, Field(ge=1, le=600)] = 2
    """Time between two plans. Example: `2s`."""


class Scheduling(Section):
    """Who goes first, and where."""

    order: Literal["fifo", "priority", "fair-share", "deadline", "shortest-service"] | Order = "fair-share"
    """A known order, or weights. Example: `{fair_share: 10000, fifo: 1000}`."""
    placement: Literal[
        "first-fit",
        "round-robin",
        "least-loaded",
        "best-fit",
        "dot-product",
        "gpu-packing",
        "gpu-clustering",
        "random",
        "fgd",
        "sluice",
    ] = "sluice"
    """Which nodes and GPUs; docs/scheduling.md describes the policies."""
    fabric: Fabric = "near"
    """Nodes of a job of several: `near` each other, below as few and as low switches as are free, or `spread` evenly
    over the leaf switches, for their links. A job's `--fabric` and `--switches` go before it. Level place; with
    topology/block Slurm keeps them near."""
    nic_planes: NicPlanes = "any"
    """RDMA interfaces of a job that has fewer than its nodes: all in `one` plane of the network wherever one has room,
    on each node over several (`spread`), or by the GPUs near them alone (`any`). A job's `--nic-planes` goes before
    it. Level place, where `sluice fabric discover` has written planes."""
    backfill: Backfill = Backfill()
    """How far the planner looks."""
    preemption: Preemption = Preemption()
    """Preemption of over-quota work."""
    deadlines: bool = True
    """`--deadline` is allowed."""
    gang_time_limit: Annotated[Seconds, Field(ge=1, le=86400)] = 300
    """A gang that does not have all its nodes after this time is requeued. Example: `5m`."""
    gang_incomplete_after: Annotated[Seconds, Field(ge=0, le=2_592_000)] = 3600
    """A gang with fewer members than it names is given up this long after the last of them was submitted; 0s: never.
    Example: `1h`."""
    gang_incomplete: Literal["hold", "cancel"] = "hold"
    """What then happens to the members: they stay held with a reason that says so, and start when the rest comes; or
    they are cancelled."""
    aging: Annotated[Seconds, Field(ge=1)] = 604_800
    """Waiting time after which age counts in full. Example: `7d`."""
    starvation_bound: Seconds = 0
    """A job that has waited this long goes before all that have not; 0s: never. Example: `3d`."""
    fair_share_half_life: Seconds = 604_800
    """Time after which usage counts half; 0s: it never decays, as budgets need. Example: `7d`."""
    usage_period: Literal["none", "daily", "weekly", "monthly", "quarterly", "yearly"] = "none"
    """When used hours start again at 0 (Slurm's PriorityUsageResetPeriod; one for the whole cluster)."""
    max_queued: Count | None = None
    """Most jobs in the whole cluster, running and waiting. Example: `1000`."""

    @property
    def weights(self) -> Order:
        """The order as weights."""
        return self.order if isinstance(self.order, Order) else _ORDERS[self.order]


class Failover(Section):
    """What is kept when a controller is lost; docs/failover.md."""

    journal: bool = False
    """What slurmctld acknowledges is durable first: slurmctld waits for it, for a bounded time."""
    journal_wait_ms: Annotated[int, Field(ge=1, le=10_000)] = 500
    """Longest wait for one journal entry, in milliseconds."""
    on_failure: Literal["refuse", "warn"] = "refuse"
    """What happens to a submission that cannot be journalled; a start waits or continues likewise."""
    journal_max: Annotated[Mib, Field(ge=8, le=65_536)] = 256
    """Bound of the journal's files. Example: `256M`."""
    controller_timeout: Annotated[Seconds, Field(ge=5, le=3600)] | None = None
    """SlurmctldTimeout: the backup takes over when the primary was silent for this time. At least twice the
    supervisor's lease. Default: 6 seconds, as measured, with `journal` and a backup controller; else what slurm.conf
    says. Example: `10s`."""
    node_timeout: Annotated[Seconds, Field(ge=30, le=65_533)] | None = None
    """SlurmdTimeout: a node that was silent for this time is down. Default, with `journal` and a backup controller: 300
    seconds, or more where slurm.conf says so: nodes are not set down while controllers change. Example: `600s`."""


# ---- what is checked now and enforced later ----


class Strangers(Section):
    """What happens to processes that hold GPU memory and belong to no registered job; `report`: in the agent's log."""

    jobs_without_gpus: Literal["end", "report", "ignore"] = "end"
    """Jobs without GPUs: the step is ended, and the job gets a record that says so."""
    earlier_jobs: Literal["end", "report", "ignore"] = "report"
    """Jobs that ran before the node's prologs registered jobs with the agent: what they were given is not known."""
    users: Literal["end", "report", "ignore"] = "report"
    """What users without a GPU job on the node run outside of jobs; what users with one run counts to that job."""
    unknown: Literal["end", "report", "ignore"] = "end"
    """Memory for which the driver names no living process. It is reported; when it stays after a job, `end` also ends
    what its users run on the node and may hold it, before the node is drained: first processes that have the GPU's
    device file open, then all others, those of their other jobs included."""


class Rdma(Section):
    """What a job may hold of each RDMA adapter of a node; by the kernel's rdma controller (cgroup v2)."""

    handles: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    """Contexts of the adapter that its processes have open; default: any number. Example: `64`."""
    objects: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    """Protection domains, queue pairs, memory regions and other objects; default: any number. Example: `100000`."""


class Enforcement(Section):
    """How jobs are held to their GPU memory on the nodes."""

    ladder: list[Literal["mig", "driver", "mps", "limiter", "watchdog"]] = ["mig", "limiter", "watchdog"]
    """The rungs that may be used: each GPU of a job gets the strongest of these that its node has. `driver` is
    experimental; docs/enforcement.md. Example: `[mig, driver, limiter]`."""
    default_rung: Literal["mig", "driver", "mps", "limiter", "watchdog"] | None = None
    """Weakest rung that is accepted: where a node has none, jobs with limits are refused; default: any in the
    ladder."""
    cu_mask: bool = False
    """Shares of AMD GPUs (`--gpu-share`) are given as masks of compute units, which programs could remove."""
    scrub: bool = False
    """A GPU's memory is cleared before another job gets it."""
    scrub_timeout: Annotated[Seconds, Field(ge=1, le=3600)] = 60
    """The most time for clearing; a GPU that takes longer is reported as not clean. Example: `60s`."""
    unwatched: Annotated[Seconds, Field(le=86400)] = 10
    """A job with limits that was not watched for this time, as the node agent died or its driver gives no answer, is
    frozen until it is watched again; `0s`: never. Below 10 s a single slow answer of a driver freezes jobs.
    Example: `30s`."""
    mig: dict[str, list[Annotated[str, Field(pattern=r"^[1-9]g\.\d{1,4}gb(\+[a-z.]{1,12})?$")]]] = {}
    """MIG instances by nodes, or by nodes and GPUs (`gpu-[1-4]:0,1`): profiles in the order in which they are placed;
    an empty list: MIG off. `sluice mig apply` creates them. Example: `{gpu-1: [3g.40gb, 3g.40gb]}`."""
    amd_partitions: dict[str, Annotated[str, Field(pattern=r"^(spx|dpx|tpx|qpx|cpx)-nps[1248]$")]] = {}
    """Partitions of AMD GPUs by nodes, or by nodes and GPUs: compute mode and memory mode (NPS), the latter one for all
    of a node's GPUs; `spx-nps1`: whole GPUs. `sluice mig apply` sets them. Example: `{amd-[1-4]: cpx-nps4}`."""
    rdma: Rdma = Rdma()
    """Handles and objects of RDMA adapters."""
    strangers: Strangers = Strangers()
    """Processes that hold GPU memory and belong to no registered job."""

    @field_validator("mig", "amd_partitions")
    @classmethod
    def _places(cls, layouts: dict[str, Any]) -> dict[str, Any]:
        for key in layouts:
            nodes, _, gpus = key.partition(":")
            try:
                named = expand(nodes)
            except UsageError as error:
                raise ValueError(error.what) from error
            if not named:
                raise ValueError(f"{key!r}: no nodes")
            if gpus and not re.fullmatch(r"\d{1,3}(,\d{1,3})*", gpus):
                raise ValueError(f"{key!r}: want NODES or NODES:GPUS, e.g. gpu-[1-4]:0,1")
        return layouts

    @field_validator("mig")
    @classmethod
    def _room(cls, layouts: dict[str, list[str]]) -> dict[str, list[str]]:
        for key, profiles in layouts.items():
            if len(profiles) > 7:
                raise ValueError(f"{key!r}: {len(profiles)} instances; a GPU has room for 7")
        return layouts


LATER: tuple[str, ...] = ()
"""Sections that are not enforced yet."""
LaterSection = Literal["enforcement", "health", "monitoring", "alerts", "checkpoint"]
"""Names that may be accepted: files of versions in which they were not enforced stay valid."""


class Policy(Section):
    """A whole policy file."""

    version: Literal[1] = 1
    """Version of the file's format."""
    cluster: Name | None = None
    """Slurm's ClusterName; a policy is never applied to another cluster. Example: `main`."""
    level: Level | None = None
    """How much of Sluice is switched on in slurmctld; see the admin guide. Each `sluice apply` of the file sets it;
    left out, the level is what `sluice plugin level` sets. Limits that Slurm itself keeps hold at each level, others
    from `admit` on."""
    unlisted: Literal["keep", "remove"] = "keep"
    """Accounts of the cluster that the file does not name and Sluice did not make."""
    accept_unenforced: list[LaterSection] = []
    """Sections that are set although they are not enforced yet. Example: `[alerts, checkpoint]`."""
    classes: Annotated[dict[Name, GpuClass], Field(max_length=64)] = {}
    """Classes of GPUs."""
    allocation: Allocation = Allocation()
    """How guarantees are kept."""
    defaults: Defaults = Defaults()
    """Defaults for all tenants."""
    tenants: dict[TenantName, Tenant] = {}
    """The tenants by name."""
    scheduling: Scheduling = Scheduling()
    """Who goes first, and where."""
    grouping: Grouping | None = None
    """Classes of GPUs as node features; docs/gres.md."""
    enforcement: Enforcement | None = None
    """How jobs are held to their GPU memory."""
    failover: Failover = Failover()
    """What is kept when a controller is lost."""
    health: Health | None = None
    """When a GPU or a node is taken out of service, and when it returns; docs/health.md."""
    preflight: Preflight | None = None
    """Nodes of a job test each other before it starts; docs/fabric.md. Example: `{when: always}`."""
    monitoring: Monitoring | None = None
    """What is measured, and where it goes; docs/metrics.md."""
    traces: Traces | None = None
    """Where the spans of jobs go, and what of them may leave; docs/traces.md."""
    alerts: Alerts | None = None
    """When alerts are sent, and how; docs/alerts.md."""
    checkpoint: Checkpoint | None = None
    """Checkpoint and requeue; docs/health.md."""
    compaction: Compaction | None = None
    """Running jobs that are moved to make room; docs/scheduling-in-slurm.md."""
    services: Annotated[dict[ServiceName, Service], Field(max_length=MOST_SERVICES)] = {}
    """Models that run as jobs of tenants, by the names by which clients call them; docs/serve.md."""
    serving: Serving = Serving()
    """What gateways let through, and where keys and records are; docs/serve.md."""
    pools: Annotated[dict[Name, Pool], Field(max_length=64)] = {}
    """Nodes that are launched when Slurm needs them; docs/elastic.md."""
    fleet: Fleet = Fleet()
    """What all pools share; docs/elastic.md."""
    power: Power | None = None
    """Power of GPUs: caps, budgets, price; docs/power.md."""
    profiles: Literal["all", "asked"] = "all"
    """Whose CUDA programs load the library of `sluice profile`: of all jobs, so that one that runs can be profiled, or
    of those with --gpu-profile alone; docs/profile.md. Example: `asked`."""

    @field_validator("level", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a plain off as false

    # ---- lookups ----

    def children(self, name: str | None) -> list[str]:
        """Tenants directly below one; of None: those at the top."""
        return [child for child, tenant in self.tenants.items() if tenant.parent == name]

    def ancestors(self, name: str) -> list[str]:
        """From the tenant's parent up to the top."""
        found: list[str] = []
        parent = self.tenants[name].parent
        while parent is not None and parent in self.tenants and parent not in found:
            found.append(parent)
            parent = self.tenants[parent].parent
        return found

    def subtree(self, name: str) -> list[str]:
        """The tenant and all below it, parents first."""
        below: dict[str | None, list[str]] = {}
        for child, tenant in self.tenants.items():
            below.setdefault(tenant.parent, []).append(child)
        found = [name]
        for one in found:
            found.extend(below.get(one, []))
        return found

    def in_order(self) -> list[str]:
        """All tenants, parents before children."""
        below: dict[str | None, list[str]] = {}
        for child, tenant in self.tenants.items():
            below.setdefault(tenant.parent, []).append(child)
        found = list(below.get(None, []))
        for one in found:
            found.extend(below.get(one, []))
        return found

    def priority_of(self, name: str) -> int:
        """Priority of a tenant's QOS."""
        tenant = self.tenants[name]
        within = self.defaults.default_priority if tenant.default_priority is None else tenant.default_priority
        return tenant.tier * 1000 + within

    def strategy_of(self, class_name: str) -> tuple[Strategy, float]:
        """Strategy and reserved ratio of a class."""
        one = self.classes[class_name]
        strategy = one.strategy or self.allocation.strategy
        ratio = self.allocation.reserved_ratio if one.reserved_ratio is None else one.reserved_ratio
        return strategy, ratio if strategy == "hybrid" else 0.0

    def gpu_shares(self) -> bool:
        """Whether some node may be able to hold jobs to a share of a GPU's compute time."""
        limits = self.enforcement
        return limits is not None and (
            "mps" in limits.ladder or limits.cu_mask or bool(limits.mig) or bool(limits.amd_partitions)
        )

    def unenforced(self) -> list[str]:
        """Sections that are set and not enforced yet."""
        return [name for name in LATER if getattr(self, name) is not None]
