"""Lets jobs that were refused here for what their users asked wait, held; cancels those that Slurm cannot requeue.

A prolog that failed would drain the node, and Slurm's commands may not be called in one: so the prolog succeeds, the
agent starts none of the job's tasks, and this duty tells the controllers, until one has answered. Why is written into
the job's AdminComment, which users see in scontrol, sacct and `sluice explain`. Only that very run of the job is meant.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from health.slurm_job import ENDED, JobFacts, read_job
from prolog_epilog.log import log
from prolog_epilog.record import JobRecord
from sluice_base.errors import SluiceError
from sluice_base.files import write_atomic
from sluice_base.run import CommandError
from sluice_base.text import one_line
from slurm_client.commands import Commands
from slurm_client.refused import with_reason

_SAYS_WHY_S = 5.0  # a job that will be cancelled has so long to tell its user why, on its own standard error
_SAVED_S = 10.0  # within which a controller that dies may forget what it did
_COMMAND_S = 20.0
_MOST_COMMENT = 4096
_AGAIN_S = 1.0
# What Slurm's commands say of a job that has gone its way meanwhile; LC_ALL is C.
_SETTLED = (
    "Job is pending execution",
    "Job/step already completing or completed",
    "Job has already finished",
    "Invalid job id specified",
)
_DECLINED = (  # it cannot be requeued after all
    "Requested operation is presently disabled",
    "Only batch jobs are accepted or processed",
    "Job not heterogeneous job leader",
)
_NO_ANSWER = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "standby mode")


@dataclass(frozen=True, slots=True)
class Hold:
    """One run of a job that is to wait; `restarts`: how often it was begun before, None: not told."""

    job: int
    restarts: int | None
    why: str
    since: float  # seconds since 1970

    @classmethod
    def read(cls, path: Path) -> Hold:
        """Raises SluiceError for a file that is none, OSError."""
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, ValueError) as error:
            raise SluiceError(f"{path}: not a job that is to wait: {error}", remedy="it is removed") from error


class Holds:
    """A folder of root's: one file a job that is to wait."""

    def __init__(
        self, folder: Path, *, commands: Commands | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self.on_put: Callable[[], None] = lambda: None
        self._commands = commands or Commands(timeout=_COMMAND_S)
        self._clock = clock
        self._done: dict[Hold, float] = {}  # when a controller did what was asked; it is looked at once more

    def prepare(self) -> None:
        """Make the folder. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, record: JobRecord) -> None:
        """The job is to wait. Raises OSError."""
        why = f"on {record.node}: {record.refused}"
        hold = Hold(record.job, record.restarts, why, self._clock())
        write_atomic(self.folder / str(hold.job), json.dumps(asdict(hold)), mode=0o600, follow_links=False)
        self.on_put()

    def run(self) -> float | None:
        """A duty of the agent; seconds until the next look. Raises SluiceError when no controller answers."""
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
                failed = error  # one that is not taken keeps up no other
                if any(words in str(error) for words in _NO_ANSWER) or error.returncode is None:
                    break
            except SluiceError as error:
                log("problem", what=error.what, remedy=error.remedy)
                path.unlink(missing_ok=True)
        if failed is not None:
            raise failed
        return _AGAIN_S if waiting else None

    def _settle(self, hold: Hold) -> bool:
        """One step; whether the job is through. Raises CommandError when nobody takes it."""
        now = self._clock()
        if now - self._done.get(hold, 0.0) < _SAVED_S:
            return False
        facts = read_job(self._commands, hold.job)
        if facts is None or facts.state == "PENDING" or hold.restarts not in (None, facts.restarts):
            return True  # it is gone, waits already, or is another run
        if facts.state in ENDED - {"FAILED"}:  # e.g. its user cancelled it
            return True
        if facts.state == "COMPLETING":  # nobody can tell of what
            return False
        can_wait = facts.batch and facts.requeue
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
        shown = ("-h", "-a", "-t", "all", "-j", facts.name, "-O", f"admin_comment:{_MOST_COMMENT}")
        comment = self._commands.output("squeue", *shown).strip().removeprefix("(null)")
        told = with_reason(comment, why)
        if told != comment:
            self._commands.run("scontrol", "update", f"JobId={facts.name}", f"AdminComment={told}")

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
        """Unless the job's next run was refused meanwhile."""
        self._done.pop(hold, None)
        with suppress(OSError, SluiceError):
            if Hold.read(path) == hold:
                path.unlink()
