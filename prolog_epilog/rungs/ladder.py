"""Which rung holds a grant: the strongest that the policy allows and the node has, decided when the limit is set.

A rung that cannot hold the grant is skipped, and the record says why. One that could and then fails refuses the
job: nothing runs with a limit that is not in force. The watchdog runs with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from policy.node_limits import NodeLimits
from prolog_epilog.refusals import Refusal
from prolog_epilog.rungs.base import DRIVER, MIG, MPS, NONE, Rung
from prolog_epilog.rungs.share import Shares
from prolog_epilog.state import RefusalError, State
from sluice.base.errors import SluiceError
from sluice.core.errors import CoreError
from sluice.exchange.record import Grant, JobRecord

_FAILURES = (SluiceError, CoreError, OSError)


@dataclass(frozen=True, slots=True)
class Fault:
    """A limit that is not in force; `lost`: it can be set again."""

    grant: Grant
    rung: str
    limit: int
    why: str
    lost: bool


class Ladder:
    """Chooses, sets, finds again and removes. But for `look` the caller holds the state's lock."""

    def __init__(self, state: State, rungs: Iterable[Rung], shares: Shares, policy: Callable[[], NodeLimits]) -> None:
        self._state = state
        self._rungs = {rung.name: rung for rung in rungs}
        self._shares = shares
        self._policy = policy

    def hold(self, record: JobRecord) -> None:
        """Hold each grant of a job to its limit and share. Raises RefusalError, CoreError, OSError."""
        policy = self._policy()
        self._shares.choose(record, policy)
        for grant in record.grants:
            self._hold_grant(record, grant, policy)
        self._shares.apply(record)

    def describe(self) -> str:
        """The rungs that the policy allows, or why that is not known."""
        try:
            return ", ".join(self._policy().ladder)
        except SluiceError as error:
            return str(error)

    def choose_share(self, record: JobRecord) -> None:
        """Find what gives a job its share, before it starts. Raises RefusalError where nothing can."""
        self._shares.choose(record, self._policy())

    def _hold_grant(self, record: JobRecord, grant: Grant, policy: NodeLimits) -> None:
        if grant.limit is None:
            grant.rung = MIG if self._state.devices[grant.index].partition else NONE
            return
        passed: dict[str, str] = {}
        for name in policy.ladder:
            rung = self._rungs[name]
            why = rung.unavailable(record, grant)
            if why:
                passed[name] = why
                continue
            self._set(record, grant, rung)
            left, grant.rung, grant.passed_over = grant.rung, name, passed
            if left in self._rungs and left not in rung.needs and all(one.rung != left for one in record.grants):
                self._rungs[left].remove(record)
            return
        reasons = "; ".join(f"{name}: {why}" for name, why in passed.items())
        raise RefusalError(
            f"GPU {grant.index} ({grant.model}): the policy allows no rung that can hold its limit ({reasons})",
            Refusal.NO_RUNG,
            remedy="add a weaker one to enforcement.ladder, or give the job another node",
        )

    def _set(self, record: JobRecord, grant: Grant, rung: Rung) -> None:
        for one in (rung, *(self._rungs[name] for name in rung.needs)):
            try:
                why = one.verify(record, grant) if one.apply(record, grant) else ""
            except _FAILURES as error:
                record.note("refuse", uuid=grant.uuid, rung=one.name, why=str(error))
                raise
            if why:
                record.note("refuse", uuid=grant.uuid, rung=one.name, why=why)
                raise RefusalError(
                    f"GPU {grant.index}: the limit that {one.name} should hold is not in force: {why}",
                    Refusal.NOT_IN_FORCE,
                )

    def look(self, record: JobRecord) -> list[Fault]:
        """The limits that were set and are not in force. Without the lock: a job's daemon may be slow to answer.

        After a restart of the agent, and every so often: a daemon that a rung keeps may have died.
        """
        found = []
        for grant in list(record.grants):
            if grant.rung not in (DRIVER, MPS) or grant.limit is None:
                continue  # the others cannot end by themselves
            rung, limit = grant.rung, grant.limit
            try:
                why = self._rungs[rung].verify(record, grant)
            except _FAILURES as error:
                found.append(Fault(grant, rung, limit, str(error), lost=False))
            else:
                found += [Fault(grant, rung, limit, why, lost=True)] if why else []
        return found

    def mend(self, record: JobRecord, faults: Iterable[Fault]) -> None:
        """Set again what is lost, and note what cannot be set; what was changed in the meantime is left as it is."""
        for fault in faults:
            grant = fault.grant
            if (grant.rung, grant.limit) != (fault.rung, fault.limit):
                continue
            try:
                if not fault.lost:
                    raise SluiceError(fault.why)
                record.note("rung", uuid=grant.uuid, rung=grant.rung, again=fault.why)
                self._rungs[grant.rung].apply(record, grant)
            except _FAILURES as error:
                record.note_once("problem", uuid=grant.uuid, rung=grant.rung, what=str(error))
        self._shares.check(record)

    def stop(self, record: JobRecord) -> None:
        """The job has ended: end the daemons that hold its memory."""
        for rung in self._rungs.values():
            rung.stop(record)

    def remove(self, record: JobRecord) -> None:
        """Remove everything that was set for a job, also what its record does not name."""
        for rung in self._rungs.values():
            rung.remove(record)

    def exports(self, record: JobRecord) -> dict[str, str]:
        """Variables by which a task finds what holds it."""
        return self._shares.exports(record)
