"""Checks across fields: whether the parts of a policy fit each other; each mistake has a place and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policy.model import ClassAmount, Guarantee, Policy
from policy.services import Service

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Mistake:
    """What does not fit, where, and what to do about it."""

    place: Place
    what: str
    remedy: str


def mistakes(policy: Policy) -> list[Mistake]:
    """All of them, in the order of the file's sections."""
    return [
        *_unenforced(policy),
        *_classes(policy),
        *_preflight(policy),
        *_tree(policy),
        *_amounts(policy),
        *_members(policy),
        *_periods(policy),
        *_services(policy),
        *_serving(policy),
        *_pools(policy),
        *_power(policy),
        *_checkpoint(policy),
        *_compaction(policy),
    ]


def _unenforced(policy: Policy) -> Iterator[Mistake]:
    for name in policy.unenforced():
        if name not in policy.accept_unenforced:
            yield Mistake(
                (name,),
                f"{name} is set, but not yet enforced: nothing acts on it",
                f"take it out, or name it in accept_unenforced: [{name}]",
            )


def _preflight(policy: Policy) -> Iterator[Mistake]:
    for name in policy.preflight.classes if policy.preflight else ():
        if name not in policy.classes:
            yield _no_class(policy, ("preflight", "classes"), name)


def _classes(policy: Policy) -> Iterator[Mistake]:
    owner: dict[str, str] = {}
    for name, one in policy.classes.items():
        for gpu_type in one.types:
            if gpu_type in owner:
                yield Mistake(
                    ("classes", name, "types"),
                    f"GPU type {gpu_type!r} is in class {owner[gpu_type]!r} already",
                    "give each type to one class",
                )
            owner[gpu_type] = name
        strategy, ratio = policy.strategy_of(name)
        if strategy == "hybrid" and ratio <= 0:
            yield Mistake(("classes", name), f"class {name!r} is hybrid without a reserved_ratio", "give it one")


def _tree(policy: Policy) -> Iterator[Mistake]:
    for name, tenant in policy.tenants.items():
        if tenant.parent is not None and tenant.parent not in policy.tenants:
            yield Mistake(
                ("tenants", name, "parent"), f"parent {tenant.parent!r} is not a tenant", "name a tenant of this file"
            )
            continue
        seen, parent = {name}, tenant.parent
        while parent is not None and parent in policy.tenants:
            if parent in seen:
                yield Mistake(("tenants", name, "parent"), f"{name!r} is its own ancestor", "break the cycle")
                break
            seen.add(parent)
            parent = policy.tenants[parent].parent


def _amounts(policy: Policy) -> Iterator[Mistake]:
    for name, tenant in policy.tenants.items():
        for part, amount in (("guarantee", tenant.guarantee), ("limit", tenant.limit)):
            for class_name, of_class in amount.classes.items() if amount else ():
                place = ("tenants", name, part, "classes", class_name)
                yield from _class_amount(policy, place, class_name, of_class, part)
        for class_name in tenant.per_job.classes if tenant.per_job else ():
            if class_name not in policy.classes:
                yield _no_class(policy, ("tenants", name, "per_job", "classes", class_name), class_name)
        for class_name in tenant.classes or ():
            if class_name not in policy.classes:
                yield _no_class(policy, ("tenants", name, "classes"), class_name)
        yield from _guarantees_fit(policy, name)
        yield from _reserved(policy, name)


def _class_amount(policy: Policy, place: Place, class_name: str, amount: ClassAmount, part: str) -> Iterator[Mistake]:
    if class_name not in policy.classes:
        yield _no_class(policy, place, class_name)
    elif len(policy.classes[class_name].types) > 1:
        types = ", ".join(policy.classes[class_name].types)
        yield Mistake(
            place,
            f"class {class_name!r} has the types {types}, which Slurm counts one by one",
            "split the class into one for each type",
        )
    if part == "guarantee" and amount.gpu_hours is not None:
        yield Mistake(place, "hours cannot be guaranteed", "write gpu_hours in the limit, or as a budget")


def _no_class(policy: Policy, place: Place, name: str) -> Mistake:
    known = ", ".join(policy.classes) or "none"
    return Mistake(place, f"{name!r} is not a class (known: {known})", "name it in the section classes")


def amounts(guarantee: Guarantee | None) -> dict[str, float]:
    """What is guaranteed or limited, by a name for each kind."""
    if guarantee is None:
        return {}
    found: dict[str, float | None] = {"gpus": guarantee.gpus, "gpu_memory": guarantee.gpu_memory}
    found |= {f"classes.{name}.gpus": one.gpus for name, one in guarantee.classes.items()}
    return {kind: value for kind, value in found.items() if value is not None}


def _guarantees_fit(policy: Policy, name: str) -> Iterator[Mistake]:
    """What is guaranteed below a tenant is within its own guarantee, and within its limit."""
    tenant = policy.tenants[name]
    given: dict[str, float] = {}
    for child in policy.children(name):
        for kind, value in amounts(policy.tenants[child].guarantee).items():
            given[kind] = given.get(kind, 0) + value
    guaranteed, most = amounts(tenant.guarantee), amounts(tenant.limit)
    for kind, value in given.items():
        for part, bound in (("guarantee", guaranteed.get(kind)), ("limit", most.get(kind))):
            if bound is not None and value > bound:
                yield Mistake(
                    ("tenants", name, part),
                    f"{part}.{kind} {bound:g} is less than the {value:g} guaranteed to those below it",
                    f"raise it to {value:g}, or lower theirs",
                )


def _reserved(policy: Policy, name: str) -> Iterator[Mistake]:
    """Nodes can be reserved for a class only."""
    guarantee = policy.tenants[name].guarantee
    if guarantee is None or guarantee.gpus is None or len(policy.classes) < 2:
        return
    if not policy.tenants[name].lend or any(policy.strategy_of(one)[0] != "dynamic" for one in policy.classes):
        yield Mistake(
            ("tenants", name, "guarantee", "gpus"),
            "nodes are reserved by class, and this guarantee does not say in which of several classes",
            "write it as guarantee: {classes: {CLASS: {gpus: N}}}",
        )


def _members(policy: Policy) -> Iterator[Mistake]:
    for name, tenant in policy.tenants.items():
        for place, member in enumerate(tenant.members):
            user = member if isinstance(member, str) else member.name
            if user == "root":
                yield Mistake(
                    ("tenants", name, "members", place),
                    "root is Slurm's administrator and cannot be a tenant's member",
                    "name another user",
                )


def _periods(policy: Policy) -> Iterator[Mistake]:
    scheduling = policy.scheduling
    for name, tenant in policy.tenants.items():
        limit = tenant.limit
        hours = limit is not None and (
            limit.gpu_hours is not None or any(one.gpu_hours is not None for one in limit.classes.values())
        )
        part = "budget" if tenant.budget is not None else "limit"
        if tenant.budget is None and not hours:
            continue
        if scheduling.usage_period == "none":
            yield Mistake(
                ("tenants", name, part),
                "hours are counted for a period, and none is set",
                "set scheduling.usage_period, e.g. monthly",
            )
        if scheduling.fair_share_half_life:
            yield Mistake(
                ("tenants", name, part),
                "hours that decay with fair_share_half_life cannot be counted against a budget",
                "set scheduling.fair_share_half_life: 0s (usage_period then also resets fair-share)",
            )
        if tenant.budget is not None and hours:
            yield Mistake(
                ("tenants", name, "budget"), "gpu_hours are limited twice, by limit and by budget", "keep one of them"
            )


# ---- services ----


def _services(policy: Policy) -> Iterator[Mistake]:
    for name, service in policy.services.items():
        place: Place = ("services", name)
        for caller in service.callers or ():
            if caller != "*" and caller not in policy.tenants:
                yield _no_tenant(policy, (*place, "callers"), caller)
        if service.gpu_class is not None and service.gpu_class not in policy.classes:
            yield _no_class(policy, (*place, "gpu_class"), service.gpu_class)
        if service.tenant not in policy.tenants:
            yield _no_tenant(policy, (*place, "tenant"), service.tenant)
            continue
        if service.nodes > 1 and policy.serving.parts_network is None:
            yield Mistake(
                (*place, "nodes"),
                "what the parts of an engine on several nodes say to each other is not encrypted",
                "set serving.parts_network: trusted, where nobody else is in that network; or set nodes to 1",
            )
        yield from _of_its_tenant(policy, place, service)
        yield from _fits_its_tenant(policy, place, service)


def _no_tenant(policy: Policy, place: Place, name: str) -> Mistake:
    known = ", ".join(list(policy.tenants)[:10]) or "none"
    return Mistake(place, f"{name!r} is not a tenant (known: {known})", "name a tenant of this file")


def _of_its_tenant(policy: Policy, place: Place, service: Service) -> Iterator[Mistake]:
    """Who the replicas run as, and what the tenant may use."""
    tenant = policy.tenants[service.tenant]
    if service.user not in tenant.users:
        members = ", ".join(list(tenant.users)[:10]) or "none"
        yield Mistake(
            (*place, "user"),
            f"{service.user!r} is not a member of tenant {service.tenant!r} (members: {members})",
            "add the user to its members, or name another",
        )
    if service.user == "root":
        yield Mistake((*place, "user"), "a model is not served by root", "name a user that only serves models")
    if service.borrow and not tenant.borrow:
        yield Mistake(
            (*place, "borrow"),
            f"tenant {service.tenant!r} does not borrow, so that its services cannot",
            "set borrow: true of the tenant, or take it out here",
        )
    if service.gpu_class in policy.classes and tenant.classes is not None and service.gpu_class not in tenant.classes:
        yield Mistake(
            (*place, "gpu_class"),
            f"tenant {service.tenant!r} may not use class {service.gpu_class!r}",
            f"use one of {', '.join(tenant.classes) or 'none'}, or add it to the tenant's classes",
        )
    if service.partition is not None and tenant.partitions and service.partition not in tenant.partitions:
        yield Mistake(
            (*place, "partition"),
            f"tenant {service.tenant!r} may not use partition {service.partition!r}",
            f"use one of {', '.join(tenant.partitions)}, or add it to the tenant's partitions",
        )


def _fits_its_tenant(policy: Policy, place: Place, service: Service) -> Iterator[Mistake]:
    """Whether Slurm could ever start a replica, and all of them."""
    names = [service.tenant, *policy.ancestors(service.tenant)]
    times = [one for name in names if (one := policy.tenants[name].max_time) is not None]
    longest = min(times, default=policy.defaults.max_time)
    if longest is not None and service.walltime > longest:
        yield Mistake(
            (*place, "walltime"),
            f"{service.walltime}s is more than the {longest}s that jobs of tenant {service.tenant!r} may run",
            "lower it, or raise max_time",
        )
    for name in names:
        tenant = policy.tenants[name]
        own = tenant.guarantee if service.borrow and name == service.tenant else None
        sizes = [
            ("per_job", tenant.per_job, 1, "most"),
            ("limit", tenant.limit, service.replicas.most, "most"),
            ("guarantee", own, service.replicas.least, "least"),
        ]
        for part, bound, times_, count in sizes:
            for what, asked in (("gpus", service.gpus), ("gpu_memory", service.gpu_memory)):
                most = getattr(bound, what) if bound is not None else None
                total = (asked or 0) * service.nodes * times_
                if most is not None and total > most:
                    yield Mistake(
                        (*place, what),
                        f"{total} for {times_} replica{'s' if times_ > 1 else ''} is more than {part}.{what} {most} of "
                        f"tenant {name!r}",
                        f"lower {what} or replicas.{count}, or raise the tenant's {part}",
                    )


def _serving(policy: Policy) -> Iterator[Mistake]:
    serving = policy.serving
    members = {user for tenant in policy.tenants.values() for user in tenant.users}
    for name, one in serving.tenants.items():
        if name not in policy.tenants:
            yield _no_tenant(policy, ("serving", "tenants", name), name)
        if one.tokens is not None and policy.scheduling.usage_period == "none":
            yield Mistake(
                ("serving", "tenants", name, "tokens"),
                "tokens are counted for a period, and none is set",
                "set scheduling.usage_period, e.g. monthly",
            )
    for name in serving.users:
        if name not in members:
            yield Mistake(
                ("serving", "users", name), f"{name!r} is not a member of any tenant", "name a member of a tenant"
            )


def _pools(policy: Policy) -> Iterator[Mistake]:
    nodes: dict[str, str] = {}
    partitions: dict[str, str] = {}
    for name, pool in policy.pools.items():
        for node in pool.names:
            if other := nodes.get(node):
                yield Mistake(
                    ("pools", name, "nodes"),
                    f"node {node!r} is in pool {other!r} already",
                    "give each node to one pool",
                )
                break
        nodes.update(dict.fromkeys(pool.names, name))
        partition = pool.partition or name
        if other := partitions.get(partition):
            yield Mistake(
                ("pools", name, "partition"),
                f"partition {partition!r} is that of pool {other!r} already",
                "name another partition: jobs may name several, e.g. --partition=a,b",
            )
        partitions[partition] = name
        for tenant in pool.tenants or ():
            if tenant not in policy.tenants:
                yield Mistake(("pools", name, "tenants"), f"{tenant!r} is not a tenant", "name a tenant of this file")


def _checkpoint(policy: Policy) -> Iterator[Mistake]:
    for name in policy.checkpoint.tenants if policy.checkpoint is not None else ():
        if name not in policy.tenants:
            yield _no_tenant(policy, ("checkpoint", "tenants", name), name)


def _compaction(policy: Policy) -> Iterator[Mistake]:
    if policy.compaction is None:
        return
    if not policy.failover.journal:
        yield Mistake(
            ("compaction",),
            "running jobs are moved only with the failover journal: without it, one that was just requeued is lost if "
            "slurmctld is killed before it saves its state",
            "add failover: {journal: true}, or take compaction out",
        )
    for name in policy.compaction.tenants:
        if name not in policy.tenants:
            yield _no_tenant(policy, ("compaction", "tenants", name), name)
    for name in policy.compaction.classes:
        if name not in policy.classes:
            yield _no_class(policy, ("compaction", "classes", name), name)


def _power(policy: Policy) -> Iterator[Mistake]:
    power = policy.power
    if power is None:
        return
    for name in power.gpus:
        if name not in policy.classes:
            yield _no_class(policy, ("power", "gpus", name), name)
    for number, cap in enumerate(power.caps):
        place: Place = ("power", "caps", number)
        if cap.gpu is not None and cap.gpu not in policy.classes:
            yield _no_class(policy, (*place, "gpu"), cap.gpu)
        if cap.tenant is not None and cap.tenant not in policy.tenants:
            yield _no_tenant(policy, (*place, "tenant"), cap.tenant)
        for name, gpu in power.gpus.items():
            if cap.gpu not in (None, name):
                continue
            for field, watts in (("watts", cap.watts), ("at_most", cap.at_most)):
                if watts is not None and not gpu.least <= watts <= gpu.most:
                    yield Mistake(
                        (*place, field),
                        f"{watts} W is outside of what GPUs of class {name!r} take, {gpu.least} to {gpu.most} W",
                        f"choose a cap in that range, or correct power.gpus.{name}",
                    )
    for number, budget in enumerate(power.budgets):
        if budget.tenant is not None and budget.tenant not in policy.tenants:
            yield _no_tenant(policy, ("power", "budgets", number, "tenant"), budget.tenant)
        if not power.gpus:
            yield Mistake(
                ("power", "budgets", number),
                f"budget {budget.name!r}: it is not known what GPUs draw",
                "give power.gpus for the classes that it counts",
            )
