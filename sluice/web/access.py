"""Who may see what: roles are Slurm's, and PrivateData holds for every row, count, event and search.

Everything that an endpoint gives goes through a `Viewer`. What is not known is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sluice.web.store import Job, Store

_ALL = frozenset({"accounts", "events", "jobs", "nodes", "partitions", "reservations", "usage", "users"})
LEVELS = ("user", "operator", "administrator")


@dataclass(frozen=True)
class Viewer:
    """A caller with the roles that Slurm's accounting gives it."""

    user: str
    store: Store
    scopes: frozenset[str] = frozenset({"read"})

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
        return not self.withholds("jobs") or job.user == self.user or job.account in self.coordinates

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
            found |= {"running": 0, "submitted": 0, "used": {}, "used_minutes": {}, "quota": []}
        if self.withholds("users"):
            found["members"] = [one for one in row["members"] if one == self.user]
        if self.withholds("usage") or self.withholds("users"):
            found["member_use"] = [one for one in row["member_use"] if one["user"] == self.user]
        return found

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

    def sees_use(self, account: str, user: str) -> bool:
        """As sreport: whose use a report shows."""
        return not self.withholds("usage") or user == self.user or account in self.coordinates

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
