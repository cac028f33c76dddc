"""What reports add to sums: the tree of tenants, their quotas and budgets with a projection, shares, capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from policy.live import Cluster
from policy.quota_use import TenantUse, read_use
from sluice.base.errors import SluiceError
from sluice.report.count import Span
from sluice.report.fields import Row, entitled_s
from sluice.report.fleet import Fleet
from sluice.report.tally import Tally


def read_tenants(conf: Path | None, prefix: Path | None, note: Callable[[str], None]) -> dict[str, TenantUse]:
    """The tenants that the caller may see; none where Slurm does not report them."""
    try:
        return read_use(Cluster.at(conf, prefix))
    except SluiceError as error:
        note(f"quotas and shares are not known: {error}")
        return {}


def inclusive(tallies: Mapping[str, Tally], tenants: Mapping[str, TenantUse]) -> dict[str, Tally]:
    """Each tenant with what is below it, as sreport counts; accounts that are gone have an entry of their own."""
    found: dict[str, Tally] = {}
    for name, tally in tallies.items():
        for account in [name, *ancestors(name, tenants)]:
            found.setdefault(account, Tally()).add(tally)
    return found


def ancestors(name: str, tenants: Mapping[str, TenantUse]) -> list[str]:
    """From a tenant's parent up to the top."""
    found: list[str] = []
    parent = tenants[name].parent if name in tenants else ""
    while parent and parent in tenants and parent not in found:
        found.append(parent)
        parent = tenants[parent].parent
    return found


def below(names: frozenset[str], tenants: Mapping[str, TenantUse]) -> frozenset[str]:
    """The tenants and all below them."""
    return names | {one for one in tenants if names.intersection(ancestors(one, tenants))}


# ---- quotas and budgets ----


@dataclass(frozen=True, slots=True)
class Period:
    """The usage period that budgets are for; seconds since 1970."""

    start: float
    end: float


def usage_period(config: Mapping[str, str], now: float) -> Period | None:
    """Slurm's PriorityUsageResetPeriod around `now`; None where there is none."""
    today = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)
    word = config.get("PriorityUsageResetPeriod", "NONE").upper()
    if word == "DAILY":
        first, last = today, today + timedelta(days=1)
    elif word == "WEEKLY":
        first = today - timedelta(days=(today.weekday() + 1) % 7)  # Slurm's week begins on Sunday
        last = first + timedelta(days=7)
    elif word in ("MONTHLY", "QUARTERLY", "YEARLY"):
        months = {"MONTHLY": 1, "QUARTERLY": 3, "YEARLY": 12}[word]
        first = today.replace(day=1, month=(today.month - 1) // months * months + 1)
        year, month = divmod(first.year * 12 + first.month - 1 + months, 12)
        last = first.replace(year=year, month=month + 1)
    else:
        return None
    return Period(first.timestamp(), last.timestamp())


def decays(config: Mapping[str, str]) -> bool:
    """Whether usage fades, so that it is no count of what was used."""
    return config.get("PriorityDecayHalfLife", "7-00:00:00") not in ("00:00:00", "0", "")


def quota(tenant: TenantUse, config: Mapping[str, str], now: float) -> dict[str, Any]:
    """The fields of a tenant's quota and budget."""
    most = tenant.limit.get("gres/gpu")
    gpus = int(tenant.used.get("gres/gpu", 0))
    found: dict[str, Any] = {"gpus_now": gpus, "shares": tenant.shares}
    if most is not None:
        found |= {"gpu_limit": most, "quota_percent": 100 * gpus / most if most else None}
    minutes = tenant.minute_limit.get("gres/gpu")
    if minutes:
        used_s = tenant.minutes.get("gres/gpu", 0.0) * 60
        found |= budget(minutes * 60.0, used_s, None if decays(config) else usage_period(config, now), now)
    return found


def budget(budget_s: float, used_s: float, period: Period | None, now: float) -> dict[str, Any]:
    """Fields of a budget; the projection goes on as since the period's begin."""
    found: dict[str, Any] = {
        "budget_gpu_s": budget_s,
        "budget_used_percent": 100 * used_s / budget_s,
        "budget_left_gpu_s": max(0.0, budget_s - used_s),
    }
    if period is not None and now > period.start:
        rate = used_s / (now - period.start)
        found["budget_projected_percent"] = 100 * rate * (period.end - period.start) / budget_s
        if rate > 0:
            at = period.start + budget_s / rate
            found["budget_used_up_at"] = int(at) if at < period.end else None
    return found


# ---- fairness ----


def entitlements(tenants: Mapping[str, TenantUse], active: frozenset[str]) -> dict[str, float]:
    """Each tenant's part of the cluster (0 to 1) by shares, among siblings that are active themselves or below."""
    alive = active | {above for name in active for above in ancestors(name, tenants)}
    found: dict[str, float] = {}
    for name in tenants:  # parents come first
        if name not in alive:
            continue
        tenant = tenants[name]
        siblings = [one for one in alive if one in tenants and tenants[one].parent == tenant.parent]
        total = sum(_shares(tenants[one]) for one in siblings)
        above = found.get(tenant.parent, 1.0)
        found[name] = above * _shares(tenant) / total if total else 0.0
    return found


def _shares(tenant: TenantUse) -> int:
    return int(tenant.shares) if tenant.shares.isdecimal() else 1


def add_fairness(rows: list[Row], tenants: Mapping[str, TenantUse], tallies: Mapping[str, Tally]) -> float | None:
    """Fill in the rows' parts; Jain's index of Got by Entitled over the tenants that have jobs of their own."""
    active = frozenset(name for name, tally in tallies.items() if tally.ran or tally.pending)
    entitled = entitlements(tenants, active)
    whole = sum(entitled_s(tally) for tally in tallies.values())
    ratios: list[float] = []
    for row in rows:
        name = row.names["account"]
        got = entitled_s(row.tally) / whole if whole else None
        share = entitled.get(name)
        row.extra |= {
            "got_percent": None if got is None else 100 * got,
            "entitled_percent": None if share is None else 100 * share,
        }
        if got is not None and share:
            row.extra["got_ratio"] = got / share
            if name in active:
                ratios.append(got / share)
    return jain(ratios)


def jain(values: list[float]) -> float | None:
    """Jain's index of fairness (Jain, Chiu, Hawe 1984): 1 where all are equal, 1/n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


# ---- capacity ----


def capacity(gpus: int, tally: Tally, span: Span) -> dict[str, Any]:
    """Fields of what could have been used."""
    whole = float(gpus * (span.end - span.start))
    used = entitled_s(tally)
    return {
        "gpu_count": gpus,
        "capacity_gpu_s": whole,
        "allocated_percent": 100 * used / whole if whole else None,
        "unallocated_gpu_s": max(0.0, whole - used),
    }


def class_name(gpu_type: str, fleet: Fleet) -> str:
    """The classes of a job's types."""
    return "+".join(fleet.class_of(name) for name in gpu_type.split("+")) if gpu_type else ""


def month_start(now: float) -> int:
    """Midnight of the month's first day."""
    day = datetime.fromtimestamp(now)
    return int(day.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp())
