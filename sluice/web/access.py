"""Who may see what: roles are Slurm's, and PrivateData holds for every row, count, event and search.

Everything that an endpoint gives goes through a `Viewer`. What is not known is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sluice.exchange.acts import Proof
from sluice.web.store import Job, Store

_ALL = frozenset({"accounts", "events", "jobs", "nodes", "partitions", "reservations", "usage", "users"})
USE_OF_SERVICE = (
    "in_flight", "tokens_in_flight", "waiting", "oldest_s", "requests_per_minute", "tokens_per_minute",
    "deadline_met_percent",
)  # fmt: skip
"""What others' use of a service shows in."""
LEVELS = ("user", "operator", "administrator")


@dataclass(frozen=True)
class Asked:
    """What a write needs to know of its request."""

    request_id: str = ""
    key: str | None = None
    address: str = ""


@dataclass(frozen=True)
class Viewer:
    """A caller with the roles that Slurm's accounting gives it.

    `proof`: what it sent to show who it is; None where a proxy says so, who can only read.
    """

    user: str
    store: Store
    scopes: frozenset[str] = frozenset({"read"})
    proof: Proof | None = None
    asked: Asked = field(default_factory=Asked)
    by_cookie: bool = False
    """Whether a browser sent the proof by itself, as it does with what other sites ask, too."""

    @cached_property
    def _row(self) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self.store.rows("users").get(self.user, {})
        return row

    @property
    def level(self) -> int:
        """0 user, 1 operator, 2 administrator."""
        return int(self._row.get("level", 0))

    @property
    def operator(self) -> bool:
        """Whether it may look after others' jobs."""
        return self.level >= 1

    @cached_property
    def coordinates(self) -> frozenset[str]:
        """Accounts that it coordinates, those below included."""
        return frozenset(self._row.get("coordinates", ()))

    @cached_property
    def accounts(self) -> frozenset[str]:
        """Accounts of which it is a member."""
        return frozenset(self._row.get("accounts", ()))

    @cached_property
    def private(self) -> frozenset[str]:
        """The words of PrivateData; all of them where they are not known."""
        cluster = self.store.one("cluster")
        return _ALL if cluster is None else frozenset(cluster["private_data"])

    def withholds(self, word: str) -> bool:
        """Whether PrivateData keeps others' things of a kind from it."""
        return not self.operator and word in self.private

    # ---- jobs ----

    def sees_job(self, job: Job | None) -> bool:
        """As squeue."""
        if job is None:
            return False
        return self.sees_job_of(job.user, job.account)

    def sees_job_of(self, user: str, account: str) -> bool:
        """The same for a job that slurmctld knows no more."""
        return not self.withholds("jobs") or user == self.user or account in self.coordinates

    def seen_jobs(self) -> set[int] | None:
        """The numbers of the jobs that it may see; None: all."""
        if not self.withholds("jobs"):
            return None
        mine = self.store.jobs.of("user", [self.user])
        return mine | self.store.jobs.of("account", self.coordinates) if self.coordinates else mine

    def sees_number(self, number: object) -> bool:
        """Whether it may see a job by its number; one that is forgotten is nobody's."""
        return type(number) is int and self.sees_job(self.store.jobs.by_id.get(number))

    # ---- nodes ----

    @property
    def sees_nodes(self) -> bool:
        """As sinfo."""
        return not self.withholds("nodes")

    def gpu(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """A GPU as this viewer sees it, or None. Where nodes are private, those that its own jobs have."""
        jobs = [number for number in row["jobs"] if self.sees_number(number)]
        if not self.sees_nodes and not any(self.store.jobs.by_id[one].user == self.user for one in jobs):
            return None
        return {**row, "jobs": jobs}

    # ---- tenants ----

    def tenant(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """A tenant as this viewer sees it, or None."""
        name = row["name"]
        if self.operator or name in self.coordinates:
            return dict(row)
        mine = name in self._and_above
        if not mine and self.withholds("accounts"):
            return None
        found = dict(row)
        if name not in self.accounts and self.withholds("usage"):  # that of one above, less its own, is its neighbours'
            found |= {"running": 0, "submitted": 0, "used": {}, "used_minutes": {}, "quota": [], "budget": None}
        if self.withholds("users"):
            found["members"] = [one for one in row["members"] if one == self.user]
        if self.withholds("usage") or self.withholds("users"):
            found["member_use"] = [one for one in row["member_use"] if one["user"] == self.user]
        return found

    # ---- services ----

    def service(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """A service as this viewer sees it, or None: who may call it sees that it is there, and how busy it is.

        What its jobs are is for its own tenant and operators; the jobs themselves are seen as squeue shows them.
        """
        tenant, callers = row["tenant"], row["callers"]
        own = self._looks_after(tenant)
        mine = self.accounts | self.coordinates
        if not own and "*" not in callers and mine.isdisjoint(callers):
            return None
        found = dict(row)
        if not own:
            found |= {"user": "", "model": "", "gres": "", "partition": "", "why": ""}
            found["callers"] = [one for one in callers if one == "*" or one in mine]
        if not self.sees_use_of_service(row):
            found |= dict.fromkeys(USE_OF_SERVICE)
        found["replicas"] = [self._replica(one) for one in row["replicas"] if self.sees_job_of(row["user"], tenant)]
        return found

    def sees_use_of_service(self, row: Mapping[str, Any]) -> bool:
        """Whether it may see how busy a service is."""
        return self._looks_after(row["tenant"]) or not self.withholds("usage")

    def _looks_after(self, tenant: str) -> bool:
        """Whether a tenant's services are its own, too."""
        return self.operator or tenant in self.accounts or tenant in self.coordinates

    def _replica(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return dict(row) if self.sees_nodes else {**row, "nodes": ""}

    @cached_property
    def _and_above(self) -> frozenset[str]:
        """Its accounts and those above them, whose limits hold for it, too."""
        tenants = self.store.rows("tenants")
        found: set[str] = set()
        for name in self.accounts:
            here = name
            while here and here not in found:
                found.add(here)
                here = tenants.get(here, {}).get("parent", "")
        return frozenset(found)

    def sees_use_of(self, user: str, account: str) -> bool:
        """Whether it may see what a job of these used."""
        return not self.withholds("usage") or user == self.user or account in self.coordinates

    def seen_use(self, by: Iterable[str]) -> dict[str, Any] | None:
        """As sreport: whose use a report by these shows, for the daemon that makes it; None: everybody's."""
        names = {"usage", *(word for field, word in (("user", "users"), ("account", "accounts")) if field in set(by))}
        return self._mine(names)

    def seen_jobs_used(self) -> dict[str, Any] | None:
        """The same for single jobs and what they used."""
        return self._mine({"jobs", "usage"})

    def _mine(self, words: Iterable[str]) -> dict[str, Any] | None:
        if not any(self.withholds(word) for word in words):
            return None
        mine = self.accounts | self.coordinates
        return {"user": self.user, "accounts": sorted(self.coordinates), "tenants": sorted(mine)}

    def withhold_from(self, explanation: dict[str, Any]) -> None:
        """Take out of an explanation what PrivateData keeps from this viewer."""
        from sluice.explain.explain_service import withhold_from

        withhold_from(explanation, set(self.private), lambda one: self.operator or one in self.coordinates)

    # ---- parts of the snapshot ----

    def part(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """How old a part is. Why one could not be read may name what is operators', as a line of the policy."""
        return dict(row) if self.operator else {**row, "problem": ""}

    # ---- events ----

    def event(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """An event as this viewer sees it, or None: operators see all, others those of a job that they may see."""
        if self.operator:
            return dict(row)
        fields = row["fields"]
        if not self.sees_number(fields.get("job")):
            return None
        shown = {
            name: fields[name] for name in ("job", "reason", *(["node"] if self.sees_nodes else [])) if name in fields
        }
        return {**row, "fields": shown}
