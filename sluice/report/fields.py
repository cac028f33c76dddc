"""The fields of all reports: one table, from which the commands, JSON and docs/report-fields.md are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.report.fleet import Fleet
from sluice.report.summaries import JobUse
from sluice.report.tally import Tally
from sluice.slurm.allocations import Allocation, tres_of
from sluice.slurm.answers import UNLIMITED

JOULES_PER_KWH = 3_600_000


@dataclass
class Row:
    """One line of a report."""

    tally: Tally
    names: Mapping[str, str] = field(default_factory=dict)  # of the group: account, user, gpu_type, node, ...
    extra: dict[str, Any] = field(default_factory=dict)  # quota, capacity, shares: by Field.key
    job: Allocation | None = None
    use: JobUse | None = None
    fleet: Fleet | None = None
    price_kwh: float = 0.0


@dataclass(frozen=True)
class Field:
    """One field. `value` gives a row's value in `unit`, or None where it is not known.

    Units: ``text``, ``count``, ``percent``, ``s`` (a duration), ``at`` (seconds since 1970), ``ms``, ``gpu_s`` and the
    like (an amount times seconds, shown in the report's unit of time), ``mib_s``, ``mib``, ``j``, ``ratio``, ``price``.
    """

    name: str
    key: str  # in JSON: with the unit that it has there
    unit: str
    says: str
    value: Callable[[Row], Any]
    jobs: bool = False  # of single jobs only


def _name(key: str) -> Callable[[Row], Any]:
    return lambda row: row.names.get(key)


def _sum(key: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.tally, key)


def _measured(key: str) -> Callable[[Row], Any]:
    """A sum that is not known where nothing was measured."""
    return lambda row: getattr(row.tally, key) if row.tally.device_s else None


def _extra(key: str) -> Callable[[Row], Any]:
    return lambda row: row.extra.get(key)


def _job(key: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row.job, key) if row.job is not None else None


def _wait(percent: float) -> Callable[[Row], Any]:
    return lambda row: row.tally.waits.percentile(percent)


def _part(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def entitled_s(tally: Tally) -> float:
    """GPU time that was held: whole GPUs, and shares as parts of one."""
    return tally.gpu_s + tally.shared_gpu_s


def efficiency(tally: Tally) -> float | None:
    """How much of the GPU time that was held and measured was used, in percent."""
    return min(100.0, 100 * tally.busy_s / tally.measured_gpu_s) if tally.measured_gpu_s and tally.device_s else None


def wasted_gpu_s(tally: Tally) -> float | None:
    """GPU time that was held, measured and not used."""
    share = efficiency(tally)
    return None if share is None else tally.measured_gpu_s * (1 - share / 100)


def _unlimited(value: int | None) -> Any:
    return "UNLIMITED" if value == UNLIMITED else value


def _gpus(row: Row) -> int | None:
    return tres_of(row.job.allocated or row.job.requested).get("gres/gpu", 0) if row.job else None


def _gpu_mem(row: Row) -> int | None:
    if row.job is None:
        return None
    if row.use is not None and row.use.asked_mib is not None:
        return row.use.asked_mib
    return tres_of(row.job.allocated or row.job.requested).get("gres/shard") or None


def _now_percent(row: Row) -> float | None:
    known = [gpu.now_percent for gpu in row.use.gpus if gpu.now_percent is not None] if row.use else []
    return sum(known) / len(known) if known else None


def _now_mib(row: Row) -> int | None:
    known = [gpu.now_mib for gpu in row.use.gpus if gpu.now_mib is not None] if row.use else []
    return sum(known) if known else None


def _energy_cost(row: Row) -> float | None:
    energy = row.tally.gpu_energy_j
    return energy / JOULES_PER_KWH * row.price_kwh if energy and row.price_kwh else None


FIELDS: tuple[Field, ...] = (
    # who
    Field("Account", "account", "text", "Account (tenant) of the jobs.", _name("account")),
    Field("User", "user", "text", "User of the jobs.", _name("user")),
    Field("Partition", "partition", "text", "Partition of the jobs.", _name("partition")),
    Field("QOS", "qos", "text", "QOS of the jobs.", _name("qos")),
    Field("GPUType", "gpu_type", "text", "GRES type of the jobs' GPUs; of shares that of their node.",
          _name("gpu_type")),
    Field("GPUClass", "gpu_class", "text", "The policy's class of that type; the type where the policy has none.",
          _name("gpu_class")),
    Field("Node", "node", "text", "Node.", _name("node")),
    Field("GPU", "gpu", "text", "Number of the GPU on its node (in gres.conf), from the records.", _name("gpu")),
    # one job
    Field("JobID", "job_id", "text", "The job as users write it: 17, 17_3, 17+1.", _job("label"), True),
    Field("JobIDRaw", "job_id_raw", "count", "The job's own number.", _job("id"), True),
    Field("JobName", "job_name", "text", "Its name.", _job("name"), True),
    Field("State", "state", "text", "The job's state now, or the one it ended in.",
          lambda row: row.job.state if row.job else row.names.get("state")),
    Field("ExitCode", "exit_code", "text", "Exit code and signal.", _job("exit_code"), True),
    Field("Submit", "submit", "at", "When it was submitted.", _job("submit"), True),
    Field("Eligible", "eligible", "at", "When it could have started.", _job("eligible"), True),
    Field("Start", "start", "at", "When it started.", _job("start"), True),
    Field("End", "end", "at", "When it ended.", _job("end"), True),
    Field("Elapsed", "elapsed_s", "s", "How long it ran, suspended time not counted; the part within the report's "
          "time with --truncate.", lambda row: int(row.tally.wall_s) if row.job else None, True),
    Field("Timelimit", "time_limit_s", "s", "Its time limit.",
          lambda row: _unlimited(row.job.limit_s) if row.job else None, True),
    Field("Wait", "wait_s", "s", "From eligible to start: sacct's Planned (Reserved before Slurm 23.02).",
          _job("wait_s"), True),
    Field("NNodes", "nodes", "count", "Nodes.", _job("node_count"), True),
    Field("NodeList", "node_list", "text", "Its nodes.", _job("nodes"), True),
    Field("ReqTRES", "requested", "text", "What it asked for.", _job("requested"), True),
    Field("AllocTRES", "allocated", "text", "What it was given.", _job("allocated"), True),
    Field("GPUs", "gpus", "count", "Whole GPUs of the job.", _gpus, True),
    Field("GPUMem", "gpu_mem_mib", "mib", "GPU memory that it was given: of each GPU where records show it, else all "
          "its shards.", _gpu_mem, True),
    Field("GPUMemPeak", "gpu_mem_peak_mib", "mib", "The most that it used of one GPU's memory.",
          lambda row: row.use.peak_mib if row.use else None, True),
    Field("UtilNow", "utilisation_now_percent", "percent", "Of a running job: the share of its GPUs' time that was its "
          "since its nodes' previous report.", _now_percent, True),
    Field("GPUMemNow", "gpu_mem_now_mib", "mib", "Of a running job: memory that it has in use on all its GPUs.",
          _now_mib, True),
    Field("Rung", "rung", "text", "What held it to its GPU memory (docs/limits.md).",
          lambda row: (row.use.rung or None) if row.use else None, True),
    # how many
    Field("Jobs", "jobs", "count", "Jobs that ran within the time.", _sum("ran")),
    Field("Started", "started", "count", "Jobs that started within it.", _sum("started")),
    Field("Ended", "ended", "count", "Jobs that ended within it, those that never started included.", _sum("ended")),
    Field("Completed", "completed", "count", "Ended with exit code 0.", _sum("completed")),
    Field("Failed", "failed", "count", "Ended by a failure: of the program, its memory, a node.", _sum("failed")),
    Field("Cancelled", "cancelled", "count", "Cancelled.", _sum("cancelled")),
    Field("Timeout", "timeout", "count", "Ended at their time limit or deadline.", _sum("timeout")),
    Field("Pending", "pending", "count", "Jobs that wait, where the time reaches to now.", _sum("pending")),
    # amounts
    Field("GPUHours", "gpu_s", "gpu_s", "Whole GPUs (gres/gpu) times time: sreport's gres/gpu.", _sum("gpu_s")),
    Field("SharedGPUHours", "shared_gpu_s", "gpu_s", "Shares of GPUs as parts of a GPU of their node, times time.",
          _sum("shared_gpu_s")),
    Field("GPUMemHours", "gpu_mem_mib_s", "mib_s", "GPU memory in shares (gres/shard) times time: sreport's "
          "gres/shard, in GiB.", _sum("shard_mib_s")),
    Field("CPUHours", "cpu_s", "gpu_s", "CPUs times time: sreport's cpu.", _sum("cpu_s")),
    Field("MemHours", "mem_mib_s", "mib_s", "Host memory times time: sreport's mem, in GiB.", _sum("memory_mib_s")),
    Field("WallHours", "wall_s", "gpu_s", "Run time of the jobs.", _sum("wall_s")),
    Field("GPUEnergy", "gpu_energy_j", "j", "Energy of the GPUs, measured; kWh, in JSON joules.",
          lambda row: row.tally.gpu_energy_j if row.tally.gpu_energy_j else None),
    Field("EnergyCost", "energy_cost", "price", "What that energy cost by `power.price_kwh` of the policy, in the "
          "site's currency; '-' where the policy has no price.", _energy_cost),
    Field("PowerPerGPU", "power_per_gpu_w", "ratio", "Mean watts of a GPU while it was measured.",
          lambda row: row.tally.gpu_energy_j / row.tally.device_s
          if row.tally.device_s and row.tally.gpu_energy_j else None),
    Field("NodeEnergy", "node_energy_j", "j", "Energy by Slurm's own plugin (AcctGatherEnergyType); kWh, in JSON "
          "joules.", lambda row: row.tally.energy_j or None),
    # waits
    Field("WaitP50", "wait_p50_s", "s", "Half of the jobs that started waited at most this long. Percentiles of more "
          "than 128 s are at most 1.6 percent too high.", _wait(50)),
    Field("WaitP90", "wait_p90_s", "s", "The same for 90 percent.", _wait(90)),
    Field("WaitP95", "wait_p95_s", "s", "The same for 95 percent.", _wait(95)),
    Field("WaitP99", "wait_p99_s", "s", "The same for 99 percent.", _wait(99)),
    Field("WaitMax", "wait_max_s", "s", "The longest wait.", _wait(100)),
    Field("WaitMean", "wait_mean_s", "s", "The mean wait.", lambda row: row.tally.waits.mean()),
    # how well
    Field("Measured", "measured_percent", "percent", "Part of the GPU time (whole and shared) that was measured. "
          "Utilisation, efficiency and waste are about this part only.",
          lambda row: _part(row.tally.measured_gpu_s, entitled_s(row.tally))),
    Field("Utilisation", "utilisation_percent", "percent", "Mean utilisation of the GPUs by these jobs while they "
          "had them; '-' where nothing was measured.", lambda row: _part(row.tally.busy_s, row.tally.device_s)),
    Field("Efficiency", "efficiency_percent", "percent", "Compute time used of the GPU time held; a share of a GPU "
          "counts as the part of it that it is.", lambda row: efficiency(row.tally)),
    Field("MemUsed", "gpu_mem_used_percent", "percent", "GPU memory used at the jobs' peaks, of what they had.",
          lambda row: _part(row.tally.peak_mib_s, row.tally.asked_mib_s)),
    Field("TimeUsed", "time_used_percent", "percent", "Run time of the ended jobs, of their time limits.",
          lambda row: _part(row.tally.limited_s, row.tally.limit_s)),
    Field("Throttled", "throttled_s", "gpu_s", "GPU time at reduced clocks.", _measured("throttled_s")),
    Field("Refused", "refused", "count", "Allocations beyond a limit that were refused.", _sum("refused")),
    # waste
    Field("IdleGPUHours", "idle_gpu_s", "gpu_s", "Time in which a GPU of a job was idle.",
          _measured("idle_s")),
    Field("WastedGPUHours", "wasted_gpu_s", "gpu_s", "GPU time held and not used: what is missing to an efficiency "
          "of 100 percent.", lambda row: wasted_gpu_s(row.tally)),
    Field("WastedGPUMemHours", "wasted_gpu_mem_mib_s", "mib_s", "GPU memory asked for and not used at the peak.",
          lambda row: row.tally.asked_mib_s - row.tally.peak_mib_s if row.tally.asked_mib_s else None),
    Field("UnusedTimeHours", "unused_time_s", "gpu_s", "Time limits of the ended jobs beyond their run time: it "
          "blocks nothing, but makes backfill worse.",
          lambda row: max(0, row.tally.limit_s - row.tally.limited_s) if row.tally.limit_s else None),
    # tenants
    Field("GPULimit", "gpu_limit", "count", "GPUs that the tenant may have at once (GrpTRES).", _extra("gpu_limit")),
    Field("GPUsNow", "gpus_now", "count", "GPUs that it has now.", _extra("gpus_now")),
    Field("Quota", "quota_percent", "percent", "GPUs now, of the limit.", _extra("quota_percent")),
    Field("Budget", "budget_gpu_s", "gpu_s", "GPU-hours of the usage period (GrpTRESMins).", _extra("budget_gpu_s")),
    Field("BudgetUsed", "budget_used_percent", "percent", "Used of the budget, as slurmctld counts it.",
          _extra("budget_used_percent")),
    Field("BudgetLeft", "budget_left_gpu_s", "gpu_s", "What is left of it.", _extra("budget_left_gpu_s")),
    Field("Projected", "budget_projected_percent", "percent", "Use at the period's end, if it continues as since the "
          "period's begin; '-' where usage has no period or decays.", _extra("budget_projected_percent")),
    Field("UsedUpOn", "budget_used_up_at", "at", "When the budget is used up at that rate.",
          _extra("budget_used_up_at")),
    Field("Shares", "shares", "text", "Fair-share of the tenant among its siblings.", _extra("shares")),
    Field("Entitled", "entitled_percent", "percent", "Part of the cluster by shares, of the tenants that had jobs.",
          _extra("entitled_percent")),
    Field("Got", "got_percent", "percent", "Part of all GPU time (whole and shared) that its jobs had.",
          _extra("got_percent")),
    Field("GotRatio", "got_ratio", "ratio", "Got by entitled: 1 is exactly fair, below 1 is too little.",
          _extra("got_ratio")),
    # capacity
    Field("GPUCount", "gpu_count", "count", "GPUs that there are now.", _extra("gpu_count")),
    Field("CapacityHours", "capacity_gpu_s", "gpu_s", "Those times the report's time, down time included.",
          _extra("capacity_gpu_s")),
    Field("Allocated", "allocated_percent", "percent", "GPU time of jobs, of the capacity.",
          _extra("allocated_percent")),
    Field("UnallocatedGPUHours", "unallocated_gpu_s", "gpu_s", "Capacity that no job had.",
          _extra("unallocated_gpu_s")),
    # machines of pools
    Field("MachineHours", "machine_s", "gpu_s", "Machines of the pool times time, jobs of parts of one as parts.",
          _extra("machine_s")),
    Field("Cost", "cost", "price", "What they cost, by the prices in the policy and in the site's currency.",
          _extra("cost")),
)  # fmt: skip

_OF_REQUESTS = (
    Field("Service", "service", "text", "The service: the model's name.", _name("service")),
    Field("Account", "account", "text", "Account (tenant) of the callers.", _name("account")),
    Field("User", "user", "text", "User who called; empty: time of replicas that nobody called.", _name("user")),
    Field("Day", "day", "text", "The day on which the requests ended.", _name("day")),
    Field("Requests", "requests", "count", "Requests, whatever became of them.", _extra("requests")),
    Field("Answered", "answered", "count", "Answered in full.", _extra("answered")),
    Field("Refused", "refused", "count", "Refused, as a limit or a budget was reached.", _extra("refused")),
    Field("Expired", "expired", "count", "Had no first token before their deadline.", _extra("expired")),
    Field("Cancelled", "cancelled", "count", "Ended by their callers.", _extra("cancelled")),
    Field("Failed", "failed", "count", "Failed.", _extra("failed")),
    Field("Resumed", "resumed", "count", "Went on at another replica.", _extra("resumed")),
    Field("Tokens", "tokens", "count", "Tokens of prompts and answers.", _extra("tokens")),
    Field("PromptTokens", "prompt_tokens", "count", "Tokens of prompts.", _extra("prompt_tokens")),
    Field("CachedTokens", "cached_tokens", "count", "Those of them that a replica had in its cache.",
          _extra("cached_tokens")),
    Field("AnswerTokens", "completion_tokens", "count", "Tokens of answers.", _extra("completion_tokens")),
    Field("FirstTokenP50", "first_token_p50_ms", "ms", "Half of the requests that had a first token had it after at "
          "most this time. Percentiles of more than 128 ms are at most 1.6 percent too high.",
          _extra("first_token_p50_ms")),
    Field("FirstTokenP95", "first_token_p95_ms", "ms", "The same for 95 percent.", _extra("first_token_p95_ms")),
    Field("FirstTokenP99", "first_token_p99_ms", "ms", "The same for 99 percent.", _extra("first_token_p99_ms")),
    Field("GPUHours", "gpu_s", "gpu_s", "Whole GPUs of the replicas times time, divided among callers by their tokens "
          "of the day.", _sum("gpu_s")),
    Field("SharedGPUHours", "shared_gpu_s", "gpu_s", "The same of shares of GPUs.", _sum("shared_gpu_s")),
    Field("TokensPerGPUHour", "tokens_per_gpu_hour", "count", "Tokens for each GPU-hour, whole and shared.",
          _extra("tokens_per_gpu_hour")),
)  # fmt: skip
"""Of the report `services`."""


def fields_of(kind: str) -> tuple[Field, ...]:
    """All fields of a report."""
    if kind == "services":
        return _OF_REQUESTS
    return tuple(one for one in FIELDS if kind == "jobs" or not one.jobs)


BY_NAME = {one.name.lower(): one for one in FIELDS}

GROUPED_BY = {
    "tenants": ("account",),
    "users": ("user", "account"),
    "gpus": ("gpu_type",),
    "nodes": ("node",),
    "efficiency": ("user", "account"),
    "waste": ("user", "account"),
    "fairness": ("account",),
    "cost": ("partition", "account"),
}
"""What a report's lines stand for, unless --by says otherwise."""

EACH_GPU = "Node,GPU,GPUClass,Jobs,GPUHours,SharedGPUHours,Allocated,Utilisation,IdleGPUHours,GPUEnergy,Refused"
"""What a report shows of each GPU."""

ENERGY = "Jobs,GPUHours,SharedGPUHours,GPUEnergy,PowerPerGPU,EnergyCost,NodeEnergy"
"""What a report shows with --energy, after the names."""

DEFAULTS = {
    "jobs": "JobID,JobName,User,Account,State,Elapsed,Wait,GPUs,GPUMem,GPUMemPeak,GPUHours,Utilisation",
    "tenants": "Account,Jobs,GPUHours,SharedGPUHours,GPUMemHours,WaitP50,WaitP95,Utilisation,Efficiency,"
    "WastedGPUHours,GPULimit,Budget,BudgetUsed,Projected",
    "users": "User,Account,Jobs,GPUHours,SharedGPUHours,GPUMemHours,WaitP50,WaitP95,Utilisation,Efficiency,"
    "WastedGPUHours",
    "gpus": "GPUClass,GPUType,GPUCount,Jobs,GPUHours,SharedGPUHours,CapacityHours,Allocated,Utilisation,GPUEnergy",
    "nodes": "Node,GPUType,GPUCount,Jobs,GPUHours,SharedGPUHours,Allocated,Utilisation,GPUEnergy",
    "efficiency": "User,Account,Jobs,GPUHours,SharedGPUHours,Measured,Utilisation,Efficiency,MemUsed,TimeUsed,"
    "Throttled",
    "waste": "User,Account,Jobs,WastedGPUHours,IdleGPUHours,WastedGPUMemHours,UnusedTimeHours,Failed,Efficiency",
    "fairness": "Account,Shares,Entitled,Got,GotRatio,Jobs,GPUHours,SharedGPUHours,WaitP50,WaitP95",
    "cost": "Partition,Account,Jobs,GPUHours,SharedGPUHours,MachineHours,Cost",
    "services": "Service,Account,Requests,Refused,Failed,PromptTokens,AnswerTokens,FirstTokenP50,FirstTokenP95,"
    "FirstTokenP99,GPUHours,SharedGPUHours",
}
