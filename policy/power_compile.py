"""The section `power` for those who read it: nodes, controllers, plugins; and whether the cluster can keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from policy import compiled
from policy.control_power import ControlBudget, ControlGpu, ControlPower
from policy.names import OVER_QOS
from policy.node_power import NodeCap, NodePower, NodeThermal
from policy.power import PowerBudget, Thermal, show_watts
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand, fold

if TYPE_CHECKING:  # these are below the model of the whole policy
    from policy.live import Live
    from policy.model import Policy


def compile_power(policy: Policy) -> NodePower:
    """What nodes read."""
    power = policy.power
    if power is None:
        return NodePower()
    caps = tuple(
        NodeCap(
            gpu_types=tuple(policy.classes[one.gpu].types) if one.gpu is not None else (),
            accounts=tuple(policy.subtree(one.tenant)) if one.tenant is not None else (),
            watts=one.watts,
            at_most=one.at_most,
        )
        for one in power.caps
    )
    return NodePower(caps=caps, thermal=_thermal(power.thermal), report=bool(power.budgets))


def _thermal(rule: Thermal | None) -> NodeThermal | None:
    if rule is None:
        return None
    return NodeThermal(after_s=rule.after, lower_percent=rule.lower_by, least_percent=rule.at_least)


def compile_control(policy: Policy, switches: Mapping[str, str]) -> ControlPower:
    """What controllers read. `switches`: nodes of the topology's switches. Raises SluiceError for one that is none."""
    power = policy.power
    if power is None:
        return ControlPower()
    return ControlPower(
        price_kwh=power.price_kwh,
        budgets=tuple(
            ControlBudget(
                name=one.name,
                nodes=budget_nodes(one, switches),
                accounts=tuple(policy.subtree(one.tenant)) if one.tenant is not None else (),
                watts=one.watts,
                hours=tuple(one.week()),
            )
            for one in power.budgets
        ),
        classes={
            gpu_type: ControlGpu(name=name, idle=gpu.idle, least=gpu.least, default=gpu.default)
            for name, gpu in power.gpus.items()
            for gpu_type in policy.classes[name].types
        },
        lower_first=tuple(power.lower_first),
        guaranteed=tuple(
            name for name, tenant in policy.tenants.items() if tenant.guarantee is not None and tenant.qos is None
        ),
        lowest_percent=power.lowest_cap,
        cancel=policy.scheduling.preemption.mode == "cancel",
    )


def budget_nodes(budget: PowerBudget, switches: Mapping[str, str]) -> str:
    """A hostlist; empty for a tenant's budget. Raises SluiceError."""
    if budget.switch is None:
        return budget.nodes or ""
    if budget.switch not in switches:
        known = ", ".join(sorted(switches)[:10]) or "none"
        raise SluiceError(
            f"power.budgets: budget {budget.name!r}: the topology has no switch {budget.switch!r} (known: {known})",
            remedy="name one of `scontrol show topology`, or give its nodes",
        )
    return switches[budget.switch]


def compiled_budgets(policy: Policy, switches: Mapping[str, str], kept: Mapping[str, int]) -> list[compiled.Budget]:
    """What the planner reads. `kept`: watts of each budget for guarantees. Raises SluiceError."""
    power = policy.power
    return [
        compiled.Budget(
            name=one.name,
            nodes=budget_nodes(one, switches) or None,
            tenant=one.tenant,
            watts=one.watts,
            kept=kept.get(one.name, 0),
            hours=[f"{begin}-{end}:{watts}" for begin, end, watts in one.week()],
        )
        for one in (power.budgets if power is not None else ())
    ]


def class_watts(policy: Policy, name: str) -> dict[str, int]:
    """Fields of a class of the compiled policy."""
    gpu = policy.power.gpus.get(name) if policy.power is not None else None
    if policy.power is None or gpu is None:
        return {}
    lowest = max(gpu.least, -(-gpu.default * policy.power.lowest_cap // 100))
    return {
        "power_least_w": gpu.least,
        "power_most_w": gpu.most,
        "power_default_w": gpu.default,
        "power_idle_w": gpu.idle,
        "power_start_least_w": lowest,
    }


def start_watts(policy: Policy, name: str) -> int:
    """What a GPU of a class needs above what it draws idle, so that a job can start on it: its `lowest_cap`."""
    watts = class_watts(policy, name)
    return max(0, watts["power_start_least_w"] - watts["power_idle_w"]) if watts else 0


def rule_watts(policy: Policy, tenant: str) -> Iterator[tuple[str, dict[str, int]]]:
    """By class, fields of a tenant's rules in the compiled policy: the first cap that fits it."""
    family = {tenant, *policy.ancestors(tenant)}
    for name in policy.classes:
        for cap in policy.power.caps if policy.power is not None else ():
            if cap.gpu in (None, name) and (cap.tenant is None or cap.tenant in family):
                yield name, {"power_w": cap.watts, "power_most_w": cap.at_most or cap.watts}
                break


def check_cluster(policy: Policy, live: Live, gpus: Mapping[str, Mapping[str, int]], kept: Mapping[str, int]) -> None:
    """Whether the cluster can keep the budgets. `gpus`: of each node, by GRES type; `kept`: watts of each budget for
    guarantees. Raises SluiceError."""
    power = policy.power
    if power is None:
        return
    known = {*live.state.qos, *policy.tenants, OVER_QOS}
    for name in power.lower_first:
        if name not in known:
            raise SluiceError(
                f"power.lower_first: {name!r} is not a QOS of the cluster (known: {', '.join(sorted(known)[:10])})",
                remedy="name a QOS or a tenant",
            )
    idle = {gpu_type: one.idle for name, one in power.gpus.items() for gpu_type in policy.classes[name].types}
    for budget in power.budgets:
        nodes = budget_nodes(budget, live.switches)
        named = list(gpus) if nodes == "*" else expand(nodes)
        if missing := [node for node in named if node not in gpus]:
            raise SluiceError(
                f"power.budgets: budget {budget.name!r}: {fold(missing)[:200]} is not a node of this cluster",
                remedy="take it out, or correct the names",
            )
        drawn = sum(idle.get(kind, 0) * count for node in named for kind, count in gpus[node].items())
        if budget.lowest < drawn:
            raise SluiceError(
                f"power.budgets: budget {budget.name!r}: {show_watts(budget.lowest)} is less than the "
                f"{show_watts(drawn)} that its GPUs draw without jobs",
                remedy=f"raise it to more than {show_watts(drawn)}, or name fewer nodes",
            )
        if budget.lowest < (needed := drawn + kept.get(budget.name, 0)):
            raise SluiceError(
                f"power.budgets: budget {budget.name!r}: {show_watts(budget.lowest)} is less than the "
                f"{show_watts(needed)} that its GPUs draw without jobs and with guaranteed ones at their lowest cap",
                remedy=f"raise it to {show_watts(needed)}, or lower lowest_cap or the guarantees",
            )
