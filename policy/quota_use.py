"""What tenants may use and use now, from Slurm itself: for `tenant`, `quota` and `whoami`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policy.live import Cluster
from policy.names import OVER_QOS
from sluice.slurm.accounting import Association, Use


@dataclass(slots=True)
class TenantUse:
    """What one account may use and uses, as Slurm sees it."""

    name: str
    parent: str
    members: list[str] = field(default_factory=list)
    shares: str = "1"
    limits: Mapping[str, str] = field(default_factory=dict)
    member_limits: dict[str, Mapping[str, str]] = field(default_factory=dict)
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    guarantee: dict[str, int] = field(default_factory=dict)
    running: int = 0
    submitted: int = 0
    used: Mapping[str, int] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    member_use: dict[str, Use] = field(default_factory=dict)

    @property
    def limit(self) -> dict[str, int]:
        """GrpTRES by TRES."""
        return counts(self.limits.get("GrpTRES", ""))

    @property
    def minute_limit(self) -> dict[str, int]:
        """GrpTRESMins by TRES."""
        return counts(self.limits.get("GrpTRESMins", ""))

    @property
    def borrows(self) -> bool:
        """May use the over-quota QOS."""
        return OVER_QOS in self.qos

    def left(self, tres: str) -> int | None:
        """How much more of a TRES its jobs can have; None: no limit."""
        most = self.limit.get(tres)
        return None if most is None else max(0, most - self.used.get(tres, 0))

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "parent": self.parent,
            "members": self.members,
            "shares": self.shares,
            "qos": list(self.qos),
            "default_qos": self.default_qos,
            "borrow": self.borrows,
            "guarantee": self.guarantee,
            "limits": dict(self.limits),
            "running": self.running,
            "submitted": self.submitted,
            "used": {name: count for name, count in self.used.items() if count},
            "used_minutes": {name: count for name, count in self.minutes.items() if count},
        }


def counts(text: str) -> dict[str, int]:
    """``gres/gpu=8`` as a dictionary."""
    return {name: int(value) for name, value in (pair.split("=") for pair in text.split(",") if pair)}


def read_use(cluster: Cluster, *, only: str | None = None) -> dict[str, TenantUse]:
    """All tenants, parents first; or those that a user is a member of, with what is above them."""
    name = cluster.client.config().get("ClusterName", "").lower()
    associations = cluster.accounting.associations(name)
    qos = cluster.accounting.qos()
    found: dict[str, TenantUse] = {}
    for one in associations:
        if one.account == "root" or one.partition:
            continue
        if one.user:
            found[one.account].members.append(one.user)
            found[one.account].member_limits[one.user] = one.limits
        else:
            found[one.account] = _tenant(one, found, qos)
    if only is not None:
        found = _of_user(found, only)
    for use in cluster.accounting.use(found) if found else ():
        tenant = found.get(use.account)
        if tenant is None:
            continue
        if use.user:
            tenant.member_use[use.user] = use
        else:
            tenant.running, tenant.submitted = use.running, use.submitted
            tenant.used, tenant.minutes = use.tres, use.tres_minutes
    return found


def _tenant(one: Association, found: Mapping[str, TenantUse], qos: Mapping[str, Mapping[str, str]]) -> TenantUse:
    parent = found.get(one.parent)
    words = one.qos or (parent.qos if parent else ())
    default = one.default_qos or (parent.default_qos if parent else "")
    guarantee = counts(qos.get(one.account, {}).get("MaxTRESPA", "")) if one.account in words else {}
    return TenantUse(
        one.account,
        "" if one.parent == "root" else one.parent,
        [],
        one.shares,
        one.limits,
        {},
        words,
        default,
        guarantee,
    )


def _of_user(found: dict[str, TenantUse], user: str) -> dict[str, TenantUse]:
    wanted: set[str] = set()
    for name, tenant in found.items():
        if user in tenant.members:
            here: str | None = name
            while here:
                wanted.add(here)
                here = found[here].parent if here in found else None
    kept = {name: tenant for name, tenant in found.items() if name in wanted}
    for tenant in kept.values():  # this user may not see others' names and use
        tenant.members = [member for member in tenant.members if member == user]
        tenant.member_limits = {name: one for name, one in tenant.member_limits.items() if name == user}
    return kept


def example(tenant: TenantUse, types: list[str], partition: str) -> str:
    """A job that the tenant can submit now."""
    gpus = min([1, *(left for left in [tenant.left("gres/gpu")] if left is not None)])
    what = f"gpu:{types[0]}:{gpus}" if types and gpus else "gpu:1"
    longest = tenant.limits.get("MaxWall", "")
    minutes = min(60, int(longest)) if longest.isdecimal() else 60
    words = ["sbatch", f"--account={tenant.name}"]
    if partition:
        words.append(f"--partition={partition}")
    words += [f"--gres={what}", f"--time={minutes}", "job.sh"]
    return " ".join(words)


def quota_rows(tenant: TenantUse) -> list[dict[str, Any]]:
    """One row for each thing that is limited, guaranteed or used."""
    rows: list[dict[str, Any]] = []

    def add(what: str, guaranteed: float | None, limit: float | None, used: float) -> None:
        if guaranteed is None and limit is None and not used:
            return
        left = None if limit is None else max(0, round(limit - used, 2))
        rows.append({"what": what, "guaranteed": guaranteed, "limit": limit, "used": used, "left": left})

    names = [name for name in {**tenant.limit, **tenant.guarantee, **tenant.used} if name.startswith("gres/")]
    for name in names:
        add(name, tenant.guarantee.get(name), tenant.limit.get(name), tenant.used.get(name, 0))
    for name, minutes in tenant.minute_limit.items():
        add(f"{name} hours", None, round(minutes / 60, 2), round(tenant.minutes.get(name, 0) / 60, 2))
    for what, option, used in (
        ("running jobs", "GrpJobs", tenant.running),
        ("submitted jobs", "GrpSubmitJobs", tenant.submitted),
    ):
        text = tenant.limits.get(option, "")
        add(what, None, int(text) if text else None, used)
    return rows
