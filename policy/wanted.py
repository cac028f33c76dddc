"""What a policy wants of a cluster: its accounts, users, QOS, limits, reservations and files.

guarantee      MaxTRESPA of the tenant's own QOS, which preempts `sluice_over`. Not GrpTRES: a GrpTRES of a QOS would
               switch off the same limit of the associations (acct_policy.c), and so the tenant's limit
limit          GrpTRES and GrpTRESMins of the account's association: holds for all below it, whatever the QOS
per user       GrpTRES of the user's association: holds whatever the QOS
over-quota     the QOS `sluice_over`: preemptible after its PreemptExemptTime
reserved share a reservation of whole nodes, MAGNETIC, so that jobs need not name it
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from policy import compiled, pool_nodes
from policy.checkpoint import Checkpoint
from policy.document import digest
from policy.live import Live, gpus_of
from policy.model import Guarantee, Limit, Policy, Tenant
from policy.names import OVER_QOS, OWN_PREFIX
from policy.node import FILE_NAME as NODE_FILE
from policy.node import compile_node
from policy.power import show_watts
from policy.power_compile import (
    budget_nodes,
    check_cluster,
    class_watts,
    compiled_budgets,
    rule_watts,
    start_watts,
)
from policy.service_jobs import CALLERS_FILE, compile_services
from policy.service_jobs import FILE_NAME as SERVICES_FILE
from policy.state import LEVEL_FILE, SNIPPET, AccountState, ReservationState, State, UserState
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand, fold
from sluice.slurm.accounting import TRES_OPTIONS, Use, canonical

_PERIODS = {
    "none": "NONE",
    "daily": "DAILY",
    "weekly": "WEEKLY",
    "monthly": "MONTHLY",
    "quarterly": "QUARTERLY",
    "yearly": "YEARLY",
}

_NIC_PLANES = {"any": 0, "one": 1, "spread": 2}
_FULL_GPUS = 8  # whole GPUs of a job that is as large as jobs get, for the order
# SchedulerParameters at level place. What waits for room is started by the planner within its interval; Slurm's own
# passes, which hold its locks, are for what the planner leaves to them. docs/scheduling-in-slurm.md
BACKFILL = {
    "bf_interval": "30",  # its default: shorter only costs, longer lets jobs wait that the planner leaves to Slurm
    "bf_continue": "",  # a long pass goes on after it released its locks; else jobs at the end are never reached
    "bf_max_job_test": "500",  # its default: more only costs, as the planner looks at all jobs
    "bf_yield_interval": "500000",  # its default, 2 s, is how long nobody sees what else has changed
    "bf_resolution": "60",  # seconds; the planner's own starts are exact
}
CONTROLLER_TIMEOUT_S, NODE_TIMEOUT_S = 6, 300
"""SlurmctldTimeout and SlurmdTimeout of a site with the failover journal (docs/failover.md, Parameters)."""
_BACKFILL_WINDOW = 1440  # minutes at the least; shorter than the longest time limit, jobs' ends are not seen


@dataclass(slots=True)
class Wanted:
    """The wanted state, and notes for the admin."""

    state: State
    notes: list[str] = field(default_factory=list)
    compiled: compiled.CompiledPolicy = field(default_factory=compiled.CompiledPolicy)


class _Maker:
    """One compilation."""

    def __init__(self, policy: Policy, live: Live, used: Mapping[str, float], now: float) -> None:
        self.policy = policy
        self.live = live
        self.used = used
        self.now = now
        self.today = datetime.date.fromtimestamp(now)
        self.level = policy.level or live.level()  # a policy that sets none follows the one that was set by hand
        self.state = State()
        self.notes: list[str] = []
        self.class_nodes: dict[str, tuple[int, int, int]] = {}  # nodes, GPUs, MiB of one GPU
        self.gpus = {node.name: gpus_of(node)[0] for node in live.nodes}  # of each node, by GRES type
        self.kept: dict[str, int] = {}  # watts of each power budget for guaranteed jobs
        self.children: dict[str | None, list[str]] = {}
        for name, tenant in policy.tenants.items():
            self.children.setdefault(tenant.parent, []).append(name)

    # ---- classes ----

    def count_classes(self) -> None:
        """Count nodes and GPUs of each class."""
        for name, one in self.policy.classes.items():
            nodes = gpus = memory = 0
            for node in self.live.nodes:
                types, shards = gpus_of(node)
                count = sum(types.get(gpu_type, 0) for gpu_type in one.types)
                nodes += bool(count)
                gpus += count
                if count:
                    memory = max(memory, shards // sum(types.values()))
            self.class_nodes[name] = (nodes, gpus, one.gpu_memory or memory)
            if not nodes:
                self.notes.append(f"classes.{name}: no node of the cluster has GPUs of type {', '.join(one.types)}")
            self.compare_defaults(name)

    def compare_defaults(self, name: str) -> None:
        """Compare what a class gives each GPU by default with the node that has least for each of its GPUs."""
        one = self.policy.classes[name]
        nodes = [(node, gpus_of(node)[0]) for node in self.live.nodes]
        having = [(node, sum(types.values())) for node, types in nodes if types.keys() & set(one.types)]
        cpus = max(int(one.cpus_per_gpu), 1) if one.cpus_per_gpu else 0  # as job_submit rounds them
        for key, each, unit, amounts in (
            ("cpus_per_gpu", cpus, "CPUs", [node.cpus for node, _ in having]),
            ("memory_per_gpu", one.memory_per_gpu, "MiB", [node.memory_mib for node, _ in having]),
        ):
            all_of = [(has, gpus, node.name) for has, (node, gpus) in zip(amounts, having, strict=True)]
            short = [(has, gpus, node) for has, gpus, node in all_of if each * gpus > has]
            if short:
                has, gpus, node = min(short, key=lambda one: one[0] / one[1])
                self.notes.append(
                    f"classes.{name}: with {key} the {gpus} GPUs of {node} take {each * gpus} {unit}, "
                    f"and it has {has}: jobs that name none leave some of its GPUs unused"
                )

    def gpu_type(self, class_name: str) -> str:
        """The TRES of a class."""
        return f"gres/gpu:{self.policy.classes[class_name].types[0]}"

    # ---- amounts ----

    def class_tres(self, amount: Guarantee | None) -> dict[str, int]:
        """What is guaranteed or limited, as TRES."""
        if amount is None:
            return {}
        found = {} if amount.gpus is None else {"gres/gpu": amount.gpus}
        if amount.gpu_memory is not None:
            found["gres/shard"] = amount.gpu_memory
        for name, one in amount.classes.items():
            if one.gpus is not None:
                found[self.gpu_type(name)] = one.gpus
        return found

    def guarantee_left(self, name: str) -> dict[str, int]:
        """A tenant's guarantee without what is guaranteed to those below it."""
        left = self.class_tres(self.policy.tenants[name].guarantee)
        for child in self.children.get(name, []):
            for key, value in self.class_tres(self.policy.tenants[child].guarantee).items():
                if key in left:
                    left[key] = max(0, left[key] - value)
        return left

    def limits_of(self, name: str) -> dict[str, str]:
        """Limits of a tenant's association."""
        tenant, defaults = self.policy.tenants[name], self.policy.defaults
        most = self.class_tres(tenant.limit)
        if tenant.guarantee is not None and not tenant.borrow:
            most = self.class_tres(tenant.guarantee) | most
        limits = {
            "GrpTRES": _tres_text(most),
            "GrpTRESMins": _tres_text(self.minutes(tenant)),
            "GrpJobs": _text(tenant.max_jobs),
            "GrpSubmitJobs": _text(tenant.max_queued),
            "MaxTRESPerJob": _tres_text(self.job_tres(tenant)),
        }
        longest = defaults.max_time if tenant.max_time is None else tenant.max_time
        if longest is not None:
            limits["MaxWall"] = str(max(1, longest // 60))
        if tenant.expires is not None and self.today >= tenant.expires:
            limits["GrpSubmitJobs"] = "0"
            self.notes.append(f"tenant {name}: expired on {tenant.expires}; its submissions are refused")
        return _merge(limits, tenant.slurm)

    def minutes(self, tenant: Tenant) -> dict[str, int]:
        """GPU minutes of a period."""
        found: dict[str, int] = {}
        if isinstance(tenant.limit, Limit):
            if tenant.limit.gpu_hours is not None:
                found["gres/gpu"] = math.floor(tenant.limit.gpu_hours * 60)
            for name, one in tenant.limit.classes.items():
                if one.gpu_hours is not None:
                    found[self.gpu_type(name)] = math.floor(one.gpu_hours * 60)
        budget = tenant.budget
        if budget is not None and budget.at_100 == "stop":
            if budget.gpu_hours is not None:
                found["gres/gpu"] = math.floor(budget.gpu_hours * 60)
            if budget.gpu_memory_hours is not None:
                found["gres/shard"] = math.floor(budget.gpu_memory_hours * 60 * 1024)
        return found

    def job_tres(self, tenant: Tenant) -> dict[str, int]:
        """The largest job, as TRES."""
        per_job = tenant.per_job
        if per_job is None:
            return {}
        found = {} if per_job.gpus is None else {"gres/gpu": per_job.gpus}
        if per_job.gpu_memory is not None:
            found["gres/shard"] = per_job.gpu_memory
        for name, one in per_job.classes.items():
            if one.gpus is not None and len(self.policy.classes[name].types) == 1:
                found[self.gpu_type(name)] = one.gpus
        return found

    # ---- the parts ----

    def tenants(self) -> None:
        """Accounts and members."""
        coordinators: dict[str, frozenset[str]] = {}
        for name in self.policy.in_order():
            tenant = self.policy.tenants[name]
            above = coordinators.get(tenant.parent or "", frozenset())
            coordinators[name] = above | frozenset(tenant.coordinators)
            qos, default = self.qos_of(name)
            self.state.accounts[name] = AccountState(
                parent=tenant.parent or "root",
                description=(tenant.description or name).lower(),  # Slurm keeps it so
                organization=tenant.organization.lower(),
                shares=str(tenant.shares),
                limits=self.limits_of(name),
                qos=tuple(sorted(qos)),
                default_qos=default,
                coordinators=coordinators[name],
            )
            most = tenant.max_gpus_per_user
            most = self.policy.defaults.max_gpus_per_user if most is None else most
            for user, member in tenant.users.items():
                gpus = most if member.max_gpus is None else member.max_gpus
                limits = {} if gpus is None else {"GrpTRES": f"gres/gpu={gpus}"}
                self.state.users[name, user] = UserState(str(member.shares), _merge(limits, member.slurm))

    def qos_of(self, name: str) -> tuple[list[str], str]:
        """The QOS that a tenant may use, and its default."""
        tenant = self.policy.tenants[name]
        if tenant.qos is not None:
            return list(tenant.qos.use), tenant.qos.default or ""
        if tenant.borrow and tenant.guarantee is None:
            return [OVER_QOS], OVER_QOS
        return ([name, OVER_QOS] if tenant.borrow else [name]), name

    def qos(self) -> None:
        """QOS of tenants, and that of over-quota work."""
        preemption = self.policy.scheduling.preemption
        checkpoint = self.policy.checkpoint
        before = (checkpoint.before_preemption if checkpoint else None) or 0
        lends = any(tenant.borrow for tenant in self.policy.tenants.values())
        if lends:
            self.state.qos[OVER_QOS] = {}
            if preemption.enabled:
                over = {
                    "PreemptMode": preemption.mode,
                    "GraceTime": str(max(preemption.grace, before)),
                    "PreemptExemptTime": str(preemption.min_run_time),
                }
                self.state.qos[OVER_QOS] = {key: value for key, value in over.items() if value != "0"}
        for name, tenant in self.policy.tenants.items():
            if tenant.qos is not None or (tenant.borrow and tenant.guarantee is None):
                continue
            priority = 0 if self.lowered(name) else self.policy.priority_of(name)
            fields = {"Priority": str(priority) if priority else ""}
            if tenant.guarantee is not None:
                if tenant.borrow:
                    fields["MaxTRESPA"] = _tres_text(self.guarantee_left(name))
                if lends and preemption.enabled:
                    fields["Preempt"] = OVER_QOS
            self.state.qos[name] = {key: value for key, value in fields.items() if value}

    def lowered(self, name: str) -> bool:
        """Whether the tenant's budget is used and its action applies."""
        budget, used = self.policy.tenants[name].budget, self.used.get(name, 0.0)
        if budget is None or used < 0.8:
            return False
        action = budget.at_100 if used >= 1 else budget.at_80
        self.notes.append(f"tenant {name}: {used:.0%} of its budget is used ({action.replace('_', ' ')})")
        return action == "lower_priority" or (used >= 1 and budget.at_80 == "lower_priority")

    def reservations(self) -> None:
        """Reserved nodes."""
        for class_name, one in self.policy.classes.items():
            nodes, gpus, _ = self.class_nodes[class_name]
            if not nodes:
                continue
            per_node = max(1, gpus // nodes)
            strategy, ratio = self.policy.strategy_of(class_name)
            feature = one.feature or one.types[0]
            guaranteed = self.guaranteed_in(class_name)
            together = {name: count for name, count in guaranteed.items() if self.policy.tenants[name].lend}
            alone = {name: count for name, count in guaranteed.items() if name not in together}
            if strategy == "static":
                alone, together = guaranteed, {}
            reserved = 0
            for name, count in alone.items():
                reserved += math.ceil(count / per_node)
                self.state.reservations[f"{OWN_PREFIX}{class_name}_{name}"] = ReservationState(
                    frozenset(self.policy.subtree(name)), math.ceil(count / per_node), feature
                )
            if strategy == "hybrid" and together:
                shared = math.ceil(nodes * ratio)
                reserved += shared
                if sum(together.values()) > shared * per_node:
                    raise SluiceError(
                        f"classes.{class_name}: {sum(together.values())} GPUs are guaranteed, but {ratio:g} of "
                        f"{nodes} nodes is {shared} nodes with {shared * per_node} GPUs",
                        remedy="raise reserved_ratio, or lower the guarantees",
                    )
                accounts = frozenset(below for name in together for below in self.policy.subtree(name))
                self.state.reservations[f"{OWN_PREFIX}{class_name}"] = ReservationState(accounts, shared, feature)
            if sum(guaranteed.values()) > gpus or reserved > nodes:
                raise SluiceError(
                    f"classes.{class_name}: {sum(guaranteed.values())} GPUs, {reserved} reserved nodes guaranteed, "
                    f"but there are {gpus} on {nodes} nodes",
                    remedy="lower the guarantees",
                )

    def guaranteed_in(self, class_name: str, top: str | None = None) -> dict[str, int]:
        """GPUs of a class that are guaranteed, by the topmost tenant that names them; of `top`: to it or below it."""
        only = len(self.policy.classes) == 1
        found: dict[str, int] = {}

        def visit(name: str) -> None:
            guarantee = self.policy.tenants[name].guarantee
            guaranteed = self.class_tres(guarantee)
            count = guaranteed.get(self.gpu_type(class_name), guaranteed.get("gres/gpu", 0) if only else 0)
            if count:
                found[name] = count
            else:
                for child in self.children.get(name, []):
                    visit(child)

        for name in self.children.get(None, []) if top is None else [top]:
            visit(name)
        return found

    def keep_watts(self) -> None:
        """What each power budget keeps for guarantees: for a part of the nodes, that part of the guaranteed GPUs."""
        for budget in self.policy.power.budgets if self.policy.power is not None else ():
            nodes = budget_nodes(budget, self.live.switches)
            named = set(self.gpus if nodes in ("", "*") else expand(nodes))
            self.kept[budget.name] = 0
            for name, one in self.policy.classes.items():
                gpus = self.class_nodes[name][1]
                here = sum(self.gpus[node].get(kind, 0) for node in named & self.gpus.keys() for kind in one.types)
                guaranteed = sum(self.guaranteed_in(name, budget.tenant).values())
                kept = math.ceil(guaranteed * here / gpus) if gpus else 0
                self.kept[budget.name] += kept * start_watts(self.policy, name)

    def power_notes(self) -> Iterator[str]:
        """Budgets of nodes in which guaranteed jobs can have more GPUs than the part for which watts are kept."""
        for budget in self.policy.power.budgets if self.policy.power is not None else ():
            nodes = budget_nodes(budget, self.live.switches)
            named = set(self.gpus if nodes == "*" else expand(nodes)) & self.gpus.keys()
            needed = gpus = 0
            for name, one in self.policy.classes.items() if nodes else ():
                here = sum(self.gpus[node].get(kind, 0) for node in named for kind in one.types)
                guaranteed = min(here, sum(self.guaranteed_in(name, None).values()))
                watts = class_watts(self.policy, name)
                gpus += guaranteed if watts else 0
                needed += guaranteed * start_watts(self.policy, name) + here * watts.get("power_idle_w", 0)
            if needed > budget.lowest:
                yield (
                    f"power: budget {budget.name}: guaranteed jobs can have {gpus} GPUs there, which draw "
                    f"{show_watts(needed)} at lowest_cap with what the others draw idle, more than its "
                    f"{show_watts(budget.lowest)}: if they do, caps go below lowest_cap, and no other job starts there"
                )

    def cluster_limits(self) -> None:
        """Limits of the root association."""
        if self.policy.scheduling.max_queued is not None:
            self.state.root_limits["GrpSubmitJobs"] = str(self.policy.scheduling.max_queued)

    # ---- files ----

    def fair_share(self) -> tuple[int, int]:
        """Weights of Slurm's fair-share and of ours; the two never order tenants together.

        At level place tenants are ordered by ours: by GPU time, which is some seconds old. Slurm's then decides between
        members of one tenant only: all of it weighs less than one step of ours, and there are as many steps as
        tenants, the root, and the one for accounts that are not tenants (native/core/fairshare.c). Usage
        that starts again with each period is kept by Slurm alone.
        """
        scheduling = self.policy.scheduling
        weight = scheduling.weights.fair_share
        if self.level != "place" or scheduling.usage_period != "none":
            return weight, 0
        return max(0, weight // (len(self.policy.tenants) + 2) - 1), weight

    def snippet(self) -> str:
        """The snippet for slurm.conf."""
        scheduling, weights = self.policy.scheduling, self.policy.scheduling.weights
        needed = {"gres/gpu", "gres/shard"} | {
            f"gres/gpu:{gpu_type}" for one in self.policy.classes.values() for gpu_type in one.types
        }
        kept = set(filter(None, self.live.config.get("AccountingStorageTRES", "").split(",")))
        kept -= {"cpu", "mem", "energy", "node", "billing", "fs/disk", "vmem", "pages"}
        enforce = {"associations", "limits", "qos", "safe"}  # safe: no job starts that would outrun its hours
        enforce |= {word for word in self.live.config.get("AccountingStorageEnforce", "").lower().split(",") if word}
        enforce.discard("none")
        lines = [
            "# Written by `sluice apply`; slurm.conf includes it: Include " + SNIPPET,
            f"AccountingStorageTRES={','.join(sorted(kept | needed))}",
            f"AccountingStorageEnforce={','.join(sorted(enforce))}",
            "PriorityType=priority/multifactor",
            f"PriorityWeightAge={weights.fifo}",
            f"PriorityWeightFairshare={self.fair_share()[0]}",
            f"PriorityWeightQOS={weights.priority}",
            f"PriorityMaxAge={_slurm_time(scheduling.aging)}",
            f"PriorityDecayHalfLife={_slurm_time(scheduling.fair_share_half_life)}",
            f"PriorityUsageResetPeriod={_PERIODS[scheduling.usage_period]}",
        ]
        if self.level == "place":
            lines.append(f"SchedulerParameters={self.scheduler_parameters()}")
        if any(tenant.borrow for tenant in self.policy.tenants.values()):
            enabled = scheduling.preemption.enabled
            lines.append(f"PreemptType={'preempt/qos' if enabled else 'preempt/none'}")
            lines.append(f"PreemptMode={scheduling.preemption.mode.upper() if enabled else 'OFF'}")
            # Preemption signals job steps; batch scripts only so, and only with `sbatch --signal=B:...`.
            words = set(filter(None, self.live.config.get("SlurmctldParameters", "").lower().split(",")))
            lines.append(f"SlurmctldParameters={','.join(sorted(words | {'preempt_send_user_signal'}))}")
        lines += [f"{key}={seconds}" for key, seconds in self.timeouts().items()]
        lines += [f"{key}={value}" for key, value in pool_nodes.slurm_settings(self.policy).items()]
        if self.policy.pools:  # without, nobody sees a node of a pool before it is there
            private = set(filter(None, self.live.config.get("PrivateData", "none").lower().split(","))) - {"none"}
            lines.append(f"PrivateData={','.join(sorted(private | {'cloud'}))}")
        return "\n".join(lines) + "\n"

    def timeouts(self) -> dict[str, int]:
        """When a controller or a node counts as lost; docs/failover.md, Parameters."""
        failover, config = self.policy.failover, self.live.config
        given = {"SlurmctldTimeout": failover.controller_timeout, "SlurmdTimeout": failover.node_timeout}
        chosen = {key: seconds for key, seconds in given.items() if seconds is not None}
        if not failover.journal or "SlurmctldHost[1]" not in config:
            return chosen
        now = config.get("SlurmdTimeout", "").split(" ")[0]
        nodes = max(NODE_TIMEOUT_S, int(now)) if now.isdecimal() else NODE_TIMEOUT_S
        return {"SlurmctldTimeout": CONTROLLER_TIMEOUT_S, "SlurmdTimeout": nodes} | chosen

    def scheduler_parameters(self) -> str:
        """SchedulerParameters of sched/backfill next to the planner; the site's other parameters stay."""
        limits = [tenant.max_time for tenant in self.policy.tenants.values()] + [self.policy.defaults.max_time]
        longest = max((seconds for seconds in limits if seconds is not None), default=0)
        ours = {**BACKFILL, "bf_window": str(max(_BACKFILL_WINDOW, math.ceil(longest / 60)))}
        words = [word for word in self.live.config.get("SchedulerParameters", "").split(",") if word]
        kept = [word for word in words if word.partition("=")[0] not in ours and word != "(null)"]
        return ",".join([*kept, *(f"{key}={value}" if value else key for key, value in ours.items())])

    def compile(self) -> compiled.CompiledPolicy:
        """The compiled policy."""
        policy, scheduling = self.policy, self.policy.scheduling
        weights = scheduling.weights
        settings = compiled.Global(
            # Age and priority are Slurm's own terms; the site factor adds what Slurm lacks.
            weight=compiled.Weights(
                fair_share=self.fair_share()[1],
                deadline=weights.deadline,
                service=weights.shortest_service,
                size=weights.size,
            ),
            size_full_gpus=_FULL_GPUS if weights.size else None,
            age_full_s=scheduling.aging,
            laxity_horizon_s=86400 if weights.deadline else None,
            starvation_s=scheduling.starvation_bound,
            fair_share_half_life_s=scheduling.fair_share_half_life,
            placement=scheduling.placement,
            spread_nodes=scheduling.fabric == "spread",
            nic_planes=_NIC_PLANES[scheduling.nic_planes],
            backfill_reservations=scheduling.backfill.reservations,
            backfill_depth=scheduling.backfill.depth,
            planner_interval_ms=scheduling.backfill.interval * 1000,
            gang_limit_s=scheduling.gang_time_limit,
            gang_incomplete_s=scheduling.gang_incomplete_after,
            gang_incomplete_cancel=scheduling.gang_incomplete == "cancel",
            deadlines=scheduling.deadlines,
            gpu_shares=policy.gpu_shares(),
            checkpoint_signal=(policy.checkpoint or Checkpoint()).signal_number,
            **(policy.compaction.settings() if policy.compaction is not None else {}),
            checkpoint_system=(policy.checkpoint or Checkpoint()).system is not None,
            journal=policy.failover.journal,
            journal_wait_ms=policy.failover.journal_wait_ms,
            journal_warn=policy.failover.on_failure == "warn",
            journal_max_mib=policy.failover.journal_max,
        )
        classes = [
            compiled.GpuClass(
                name=name,
                gpu_types=list(one.types),
                strategy=policy.strategy_of(name)[0],
                reserved_permille=round(policy.strategy_of(name)[1] * 1000),
                gpu_memory_mib=self.class_nodes[name][2],
                spread_nodes=(one.fabric or policy.scheduling.fabric) == "spread",
                nic_planes=_NIC_PLANES[one.nic_planes or policy.scheduling.nic_planes],
                cpus_per_gpu_milli=round(one.cpus_per_gpu * 1000),
                memory_mib_per_gpu=one.memory_per_gpu,
                **class_watts(policy, name),
                compaction_wait_s=policy.compaction.classes.get(name, 0) if policy.compaction is not None else 0,
            )
            for name, one in policy.classes.items()
        ]
        tenants = [self.compile_tenant(name) for name in policy.in_order()]
        source = digest(policy.model_dump_json(exclude={"level", "unlisted", "accept_unenforced"}))
        budgets = compiled_budgets(policy, self.live.switches, self.kept)
        return compiled.CompiledPolicy(
            source=source, settings=settings, classes=classes, tenants=tenants, budgets=budgets
        )

    def compile_tenant(self, name: str) -> compiled.Tenant:
        """One tenant of the compiled policy."""
        tenant, policy = self.policy.tenants[name], self.policy
        per_job = tenant.per_job
        rules: dict[str, dict[str, int]] = {}
        for class_name, of_class in tenant.limit.classes.items() if tenant.limit else ():
            if of_class.gpus is not None:
                rules.setdefault(class_name, {})["gpus_limit"] = of_class.gpus
        for class_name in policy.classes:
            if name in (guaranteed := self.guaranteed_in(class_name, name)):
                rules.setdefault(class_name, {})["gpus_guaranteed"] = guaranteed[name]
        for class_name, job in per_job.classes.items() if per_job else ():
            if job.gpus is not None:
                rules.setdefault(class_name, {})["gpus_per_job"] = job.gpus
            if job.time is not None:
                rules.setdefault(class_name, {})["run_time_s"] = job.time
        for class_name, watts in rule_watts(policy, name):
            rules.setdefault(class_name, {}).update(watts)
        expires = 0
        if tenant.expires is not None:
            expires = int(datetime.datetime.combine(tenant.expires, datetime.time()).timestamp())
        longest = policy.defaults.max_time if tenant.max_time is None else tenant.max_time
        return compiled.Tenant(
            account=name,
            parent=tenant.parent,
            qos=self.qos_of(name)[1] or None,
            partitions=list(tenant.partitions),
            features=list(tenant.features),
            shares=tenant.shares,
            tier=tenant.tier,
            default_priority=policy.priority_of(name) % 1000,
            gpu_memory_mib_per_job=per_job.gpu_memory if per_job else None,
            gpu_memory_mib_per_gpu=tenant.gpu_memory_per_gpu,
            gpus_per_job=per_job.gpus if per_job else None,
            run_time_s=longest,
            submissions_per_minute=tenant.submissions_per_minute,
            expires_s=expires,
            one_block_s=tenant.one_block_for,
            gang=tenant.gang,
            deadline=tenant.deadlines,
            borrow=tenant.borrow,
            movable=policy.compaction is None or policy.compaction.may_move([name, *policy.ancestors(name)]),
            classes=list(tenant.classes) if tenant.classes is not None else None,
            class_rules={key: compiled.ClassRule(**rule) for key, rule in rules.items()},
        )

    def files(self) -> compiled.CompiledPolicy:
        """Files next to slurm.conf; an equal compiled policy keeps its time."""
        policy = self.compile()
        path = self.live.folder / compiled.FILE_NAME
        try:
            there, warnings = compiled.load(path)
            same = not warnings and there.model_copy(update={"generated_s": 0}) == policy
            policy = there if same else policy.model_copy(update={"generated_s": int(self.now)})
        except SluiceError:
            policy = policy.model_copy(update={"generated_s": int(self.now)})
        self.state.files = {
            self.live.folder / SNIPPET: self.snippet(),
            path: policy.render(),
            self.live.folder / NODE_FILE: compile_node(self.policy, self.live.switches).render(),
        }
        services = self.live.folder / SERVICES_FILE
        if self.policy.services or services.exists():
            compiled_services = compile_services(self.policy)
            self.state.files[services] = compiled_services.render()
            self.state.files[services.with_name(CALLERS_FILE)] = compiled_services.render_callers()
        fleet = self.live.folder / pool_nodes.FILE_NAME
        if self.policy.pools or fleet.exists():
            shards = "shard" in self.live.config.get("GresTypes", "").split(",")
            compiled_pools = pool_nodes.compile_pools(self.policy, self.live.name, shards=shards)
            self.state.files[fleet] = compiled_pools.render()
            self.state.files[fleet.with_name(pool_nodes.NODES_FILE)] = pool_nodes.node_lines(self.policy, shards=shards)
        if self.policy.level is not None:
            self.state.files[self.live.folder / LEVEL_FILE] = f"{self.policy.level}\n"
        return policy

    def add_notes(self) -> None:
        """Names in the policy that the cluster does not know, and limits that are not in force."""
        partitions = {partition.name for partition in self.live.partitions}
        features = {feature for node in self.live.nodes for feature in node.features}
        beyond = []
        partitions |= {pool.partition or name for name, pool in self.policy.pools.items()}
        features |= {feature for pool in self.policy.pools.values() for feature in pool.features}
        known = {node.name for node in self.live.nodes}
        created: list[str] = []
        for name, pool in self.policy.pools.items():
            missing = [node for node in pool.names if node not in known]
            if missing and pool.dynamic:
                created += missing
            elif missing:
                self.notes.append(
                    f"pool {name}: slurmctld does not know {fold(missing)}: have Include {pool_nodes.NODES_FILE} in "
                    "slurm.conf, apply, and restart slurmctld once; it is not restarted when the pool grows"
                )
        room = self.live.config.get("MaxNodeCount", "0")
        if created and int(room if room.isdecimal() else 0) < len(known) + len(created):
            self.notes.append(
                f"MaxNodeCount {room}: slurmctld knows {len(known)} nodes and has no room for {fold(created)}: give "
                f"slurm.conf a MaxNodeCount of {len(known) + len(created)} or more, and restart slurmctld once"
            )
        for name, tenant in self.policy.tenants.items():
            for word in set(tenant.partitions) - partitions:
                self.notes.append(f"tenant {name}: there is no partition {word!r}")
            for word in set(tenant.features) - features:
                self.notes.append(f"tenant {name}: no node has the feature {word!r}")
            limits = (tenant.gpu_memory_per_gpu, tenant.submissions_per_minute, tenant.classes)
            times = tenant.per_job is not None and any(one.time is not None for one in tenant.per_job.classes.values())
            if times or tenant.partitions or tenant.features or any(one is not None for one in limits):
                beyond.append(name)
        if beyond and self.level == "off":
            self.notes.append(
                "level is off: gpu_memory_per_gpu, submissions_per_minute, classes, partitions, features and times by "
                f"class are kept from level admit on, so not yet for {', '.join(beyond[:5])}"
            )
        power = self.policy.power
        if power is not None and power.budgets and self.level != "place":
            self.notes.append(
                f"power.budgets: kept by caps alone at level {self.level}: jobs wait for watts at level place"
            )
        self.notes += self.power_notes()
        self.notes += [f"{name}: accepted, but not yet enforced" for name in self.policy.unenforced()]


def make(policy: Policy, live: Live, *, use: list[Use] | None = None, now: float | None = None) -> Wanted:
    """The state that the policy wants for this cluster. `use`: what the tenants have used, for budgets.

    Raises SluiceError for a policy that the cluster cannot keep: another cluster's, or more guaranteed than there is.
    """
    if policy.cluster is not None and policy.cluster != live.name:
        raise SluiceError(
            f"cluster: the policy is for {policy.cluster!r}, but this is {live.name!r}",
            remedy="name the right slurm.conf, or the right policy file",
        )
    maker = _Maker(policy, live, budget_use(policy, use or []), time.time() if now is None else now)
    maker.count_classes()
    maker.keep_watts()
    check_cluster(policy, live, maker.gpus, maker.kept)
    maker.tenants()
    maker.qos()
    maker.reservations()
    maker.cluster_limits()
    maker.add_notes()
    result = maker.files()
    return Wanted(maker.state, maker.notes, result)


def budget_use(policy: Policy, use: list[Use]) -> dict[str, float]:
    """The used part of each tenant's budget: 1 is all of it."""
    minutes = {one.account: one.tres_minutes for one in use if not one.user}
    found: dict[str, float] = {}
    for name, tenant in policy.tenants.items():
        budget = tenant.budget
        if budget is None:
            continue
        spent = minutes.get(name, {})
        parts = [0.0]
        if budget.gpu_hours:
            parts.append(spent.get("gres/gpu", 0.0) / 60 / budget.gpu_hours)
        if budget.gpu_memory_hours:
            parts.append(spent.get("gres/shard", 0.0) / 60 / 1024 / budget.gpu_memory_hours)
        found[name] = max(parts)
    return found


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _tres_text(tres: Mapping[str, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in sorted(tres.items()))


def _merge(limits: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """The limits, and what else is to be in the association; canonical, without empty ones."""
    merged = dict(limits)
    for option, value in extra.items():
        if option in TRES_OPTIONS and merged.get(option):
            both = dict(pair.split("=") for text in (value, merged[option]) for pair in text.split(","))
            merged[option] = ",".join(f"{name}={count}" for name, count in both.items())
        else:
            merged.setdefault(option, value)
            merged[option] = merged[option] or value
    return {option: text for option, value in merged.items() if (text := _canonical(option, value))}


def _canonical(option: str, value: str) -> str:
    return value if option in ("MaxWall", "GrpWall") and value.isdecimal() else canonical(option, value)


def _slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return f"{days}-{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}" if seconds else "0"
