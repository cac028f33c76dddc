"""Requeues and holds jobs that were refused here for what their users asked, or over which agents died; cancels those
that Slurm cannot requeue.

A prolog that fails drains the node, and a prolog may not call Slurm's commands: so the prolog succeeds, the
agent starts none of the job's tasks, and this duty asks the controllers until one has answered. The reason is written
to the job's AdminComment, which users see in scontrol, sacct and `sluice explain`. Only this run of the job is
affected.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log
from sluice.base.run import CommandError
from sluice.base.text import one_line
from sluice.exchange.record import JobRecord
from sluice.slurm.commands import Commands
from sluice.slurm.job import ENDED, JobFacts, read_job
from sluice.slurm.refused import with_reason, with_state

_SAYS_WHY_S = 5.0  # time of a job that will be cancelled to write the reason to its own standard error
_SAVED_S = 10.0  # within which a controller that dies may forget what it did
_COMMAND_S = 20.0
_MOST_COMMENT = 4096
_AGAIN_S = 1.0
_MOST_NOTES = 256
# What Slurm's commands answer for a job that has ended or waits already; LC_ALL is C.
_SETTLED = (
    "Job is pending execution",
    "Job/step already completing or completed",
    "Job has already finished",
    "Invalid job id specified",
)
_DECLINED = (  # it cannot be requeued
    "Requested operation is presently disabled",
    "Only batch jobs are accepted or processed",
    "Job not heterogeneous job leader",
)
_NO_ANSWER = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "standby mode")


@dataclass(frozen=True, slots=True)
class Hold:
    """One run of a job that is to wait; `restarts`: how often it was started before, None: not text.

    `held`: until its user releases it; else until Slurm starts it again.
    """

    job: int
    restarts: int | None
    why: str
    since: float  # seconds since 1970
    held: bool = True

    @classmethod
    def read(cls, path: Path) -> Hold:
        """Raises SluiceError for a file that is none, OSError."""
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise SluiceError(f"{path}: not a job that is to wait: {error}", remedy="it is removed") from error


class Holds:
    """A folder of root's with one file for each job that is to wait."""

    def __init__(
        self, folder: Path, *, commands: Commands | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self.on_put: Callable[[], None] = lambda: None
        self._commands = commands or Commands(timeout=_COMMAND_S)
        self._clock = clock
        self._notes: deque[tuple[int, str]] = deque(maxlen=_MOST_NOTES)
        self._done: dict[Hold, float] = {}  # when a controller did what was asked; it is checked once more

    def prepare(self) -> None:
        """Make the folder. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, record: JobRecord, reason: str) -> None:
        """The job is to wait. Raises OSError."""
        self._put(Hold(record.job, record.restarts, f"on {record.node}: {reason}", self._clock()))

    def put_back(self, job: int) -> None:
        """The job is to start again, as slurmd ran no prolog for it. Raises OSError."""
        self._put(Hold(job, None, "its prolog did not run", self._clock(), held=False))

    def put_saved(self, job: int, restarts: int) -> None:
        """The job is to start again, as its state is saved. Raises OSError."""
        self._put(Hold(job, restarts, "its state is saved", self._clock(), held=False))

    def note(self, job: int, words: str) -> None:
        """What came of saving or resuming a job is written to its AdminComment, once."""
        self._notes.append((job, words))
        self.on_put()

    def _put(self, hold: Hold) -> None:
        write_atomic(self.folder / str(hold.job), json.dumps(asdict(hold)), mode=0o600, follow_links=False)
        self.on_put()

    def run(self) -> float | None:
        """A duty of the agent; seconds until the next look. Raises SluiceError when no controller answers."""
        self._write_notes()
        waiting, failed = False, None
        for path in [path for path in self.folder.iterdir() if path.name.isdecimal()]:
            try:
                hold = Hold.read(path)
                if self._settle(hold):
                    self._forget(path, hold)
                else:
                    waiting = True
            except FileNotFoundError:
                continue
            except CommandError as error:
                failed = error  # one that is not accepted delays no other
                if any(words in str(error) for words in _NO_ANSWER) or error.returncode is None:
                    break
            except SluiceError as error:
                log("problem", what=error.what, remedy=error.remedy)
                path.unlink(missing_ok=True)
        if failed is not None:
            raise failed
        return _AGAIN_S if waiting else None

    def _write_notes(self) -> None:
        while self._notes:
            job, words = self._notes.popleft()
            try:
                facts = read_job(self._commands, job)
                if facts is not None and facts.state not in ENDED:
                    self._comment(facts, lambda comment, words=words: with_state(comment, words))  # type: ignore[misc]
            except SluiceError as error:
                log("problem", job=job, what=f"not in its AdminComment: {words}: {error.what}")

    def _settle(self, hold: Hold) -> bool:
        """One step; whether the job is done. Raises CommandError when no controller accepts it."""
        now = self._clock()
        if now - self._done.get(hold, 0.0) < _SAVED_S:
            return False
        facts = read_job(self._commands, hold.job)
        if facts is None or facts.state == "PENDING" or hold.restarts not in (None, facts.restarts):
            return True  # it is gone, waits already, or is another run
        if facts.state in ENDED - {"FAILED"}:  # e.g. its user cancelled it
            return True
        if facts.state == "COMPLETING":  # of which run is not known
            return False
        can_wait = facts.batch and facts.requeue
        if not hold.held:
            if can_wait:  # else it fails, with the reason
                self._do(hold, "scontrol", "requeue", facts.name)
            return True  # and is not checked again: its next run may be there
        if not can_wait and facts.runs and now - hold.since < _SAYS_WHY_S:
            return False
        if facts.runs:  # a job that has ended takes no comment, before it is requeued
            self._tell_why(facts, hold.why)
        requeued = can_wait and self._do(hold, "scontrol", "requeuehold", facts.name)
        if not facts.runs:
            if not requeued:
                return True
            self._tell_why(facts, hold.why)
        if requeued or self._do(hold, "scancel", facts.name):
            self._done[hold] = now
        return False

    def _tell_why(self, facts: JobFacts, why: str) -> None:
        self._comment(facts, lambda comment: with_reason(comment, why))

    def _comment(self, facts: JobFacts, change: Callable[[str], str]) -> None:
        shown = ("-h", "-a", "-t", "all", "-j", facts.name, "-O", f"admin_comment:{_MOST_COMMENT}")
        comment = self._commands.output("squeue", *shown).strip().removeprefix("(null)")
        text = change(comment)
        if text != comment:
            self._commands.run("scontrol", "update", f"JobId={facts.name}", f"AdminComment={text}")

    def _do(self, hold: Hold, *words: str) -> bool:
        """Whether a controller has done it, or it is not needed any more. Raises CommandError when none answers."""
        done = self._commands.run(*words, check=False)
        said = one_line(f"{done.stdout} {done.stderr}")
        taken = done.returncode == 0 or any(settled in said for settled in _SETTLED)
        if not taken and not any(declined in said for declined in _DECLINED):
            raise CommandError(f"{' '.join(words)}: {said}", returncode=done.returncode)
        log("held", job=hold.job, by=" ".join(words), said=said)
        return taken

    def _forget(self, path: Path, hold: Hold) -> None:
        """Unless the job's next run was refused in the meantime."""
        self._done.pop(hold, None)
        with suppress(OSError, SluiceError):
            if Hold.read(path) == hold:
                path.unlink()
