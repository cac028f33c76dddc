"""Times in which jobs ran unwatched, as the guard recorded them: reported, and evaluated after three deaths in a
minute.

Jobs whose data the agent was reading at these deaths are suspects: what they wrote is not read any more, and they are
requeued and held, or cancelled where they cannot be. Where it read no job's data the fault is the node's, which is
drained.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prolog_epilog.state import State
from sluice.base.log import log
from sluice.exchange.record import JobRecord
from sluice.slurm.commands import Commands

DEATHS = 3
"""Within `MINUTE_S`: too many to be chance."""
MINUTE_S = 60.0
PERIOD_S = 30.0
_COMMAND_S = 20.0
_WHY = f"the node agent died {DEATHS} times within a minute while it read this job's data"
_MOST_BYTES = 64 << 10
_STALLED = "stalled"
_LINE = re.compile(
    r"outage (?P<number>\d{1,10}) (?P<when>\d{1,15}) (?P<cause>stalled|hung|(?:signal|exit)-\d{1,3})"
    r" (?P<lasted>-1|\d{1,12}) (?P<frozen>-|[\d,]{1,400}) (?P<about>-|[\d,]{1,400})"
)


@dataclass(frozen=True, slots=True)
class Outage:
    """`lasted` in seconds, None while it lasts; `about`: jobs whose data was read as the agent died."""

    number: int
    when: float
    cause: str
    lasted: float | None
    frozen: tuple[int, ...]
    about: tuple[int, ...]

    @property
    def is_death(self) -> bool:
        """Whether the agent died, and not only stalled."""
        return self.cause != _STALLED

    @property
    def text(self) -> str:
        """For people."""
        how = "it gave no sample" if not self.is_death else f"the node agent was lost ({self.cause})"
        length = "still" if self.lasted is None else f"for {self.lasted:.1f} s"
        frozen = f"; frozen: job {','.join(map(str, self.frozen))}" if self.frozen else ""
        about = f"; it was reading data of job {','.join(map(str, self.about))}" if self.about else ""
        return f"{how}; jobs unwatched {length}{frozen}{about}"


def read(path: Path) -> list[Outage]:
    """Those that the guard recorded, the oldest first; none where there is no guard."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return []
    return [_outage(match) for match in map(_LINE.fullmatch, lines) if match]


def after_one_death(path: Path, today: Callable[[], float] = time.time) -> bool:
    """Whether the agent before this one died, and none within the minute before."""
    now = today()
    deaths = [one for one in read(path) if one.is_death and 0 <= now - one.when < MINUTE_S]
    return len(deaths) == 1 and deaths[0].lasted is None


def _outage(match: re.Match[str]) -> Outage:
    lasted = int(match["lasted"])
    return Outage(
        int(match["number"]),
        int(match["when"]) / 1000,
        match["cause"],
        None if lasted < 0 else lasted / 1000,
        _jobs(match["frozen"]),
        _jobs(match["about"]),
    )


def _jobs(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.isdecimal())


def _suspects(deaths: Iterable[Outage]) -> set[int]:
    """Whose data was read at every death at which any was; where that is nobody's, all."""
    named = [set(one.about) for one in deaths if one.about]
    return set.intersection(*named) or set.union(*named) if named else set()


class Outages:
    """Notes outages in jobs' records, for the health checks, and acts when the agent dies repeatedly."""

    def __init__(
        self,
        state: State,
        path: Path,
        *,
        bound: Callable[[], int],
        hold: Callable[[JobRecord, str], None],
        commands: Commands | None = None,
        today: Callable[[], float] = time.time,
    ) -> None:
        """`bound`: the policy's seconds that a job may run unwatched; `hold`: requeues one held, raises OSError."""
        self._state = state
        self._path = path
        self._bound = bound
        self._hold = hold
        self._commands = commands or Commands(timeout=_COMMAND_S)
        self._today = today
        self._held: set[int] = set()
        self._drain = ""

    def judge(self) -> None:
        """At the agent's start, before anything of a job is read."""
        now = self._today()
        deaths = [one for one in read(self._path) if one.is_death and 0 <= now - one.when < MINUTE_S]
        if len(deaths) < DEATHS:
            return
        suspects = _suspects(deaths)
        if suspects:
            self._state.suspects |= suspects
            log("suspects", jobs=",".join(map(str, sorted(suspects))), deaths=len(deaths))
        else:
            causes = ", ".join(one.cause for one in deaths)
            self._drain = (
                f"sluice: the node agent died {len(deaths)} times within a minute ({causes}), "
                "and was not reading a job's data: see its log"
            )

    def run(self) -> None:
        """A duty: send the guard the bound, note past outages, remove suspects from the node. Raises SluiceError."""
        self._state.guard.bound(self._bound())
        self._note_over()
        if self._drain:
            node = self._state.node
            self._commands.output("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={self._drain}")
            log("drain", node=node, why=self._drain)
            self._drain = ""
        for job in self._state.suspects - self._held:
            self._hold_suspect(job)
            self._held.add(job)

    def _hold_suspect(self, job: int) -> None:
        with self._state.lock:
            record = self._state.records.get(job)
            if record is None:
                return
            self._hold(record, _WHY)
            record.note("suspect", why=_WHY)
            self._save(record)
        log("suspect", job=job, why=_WHY)

    def _note_over(self) -> None:
        """Note outages that are over in the records of the jobs that ran then."""
        over = [one for one in read(self._path) if one.lasted is not None]
        with self._state.lock:
            for record in self._state.records.values():
                if self._note(record, over):
                    self._save(record)

    def ended(self, record: JobRecord) -> None:
        """A job ends: note past outages, and one that lasts."""
        self._note(record, read(self._path))

    def _note(self, record: JobRecord, outages: Iterable[Outage]) -> bool:
        noted = {event.detail.get("outage") for event in record.events if event.action == "unwatched"}
        new = [one for one in outages if one.number not in noted and record.started <= one.when]
        for one in new:
            seconds = max(0.0, self._today() - one.when) if one.lasted is None else one.lasted
            record.note(
                "unwatched",
                outage=one.number,
                cause=one.cause,
                seconds=round(seconds, 1),
                frozen=record.job in one.frozen,
            )
        return bool(new)

    def _save(self, record: JobRecord) -> None:
        with suppress(OSError):  # a full /run: noted again after the next restart
            self._state.jobs.save(record)

    def last(self) -> tuple[int, str]:
        """The number of the last one that is over, and its text; (0, "") where there was none."""
        over = [one for one in read(self._path) if one.lasted is not None]
        return (over[-1].number, over[-1].text) if over else (0, "")
