"""Reports to the controllers how batch jobs ended, where none of them took slurmstepd's own report.

slurmstepd gives up when a waiting backup has put it off for one and a half SlurmctldTimeout; the job then stays
RUNNING, and is run again when its node registers. So the SPANK plugin (slurm_plugin/entry/spank_end_notice.c) leaves a
note of each batch script's end, and the epilog, which comes once a controller knows, removes it. What stays behind its
slurmstepd is reported here again until a controller has answered. slurmctld's plugin
(slurm_plugin/failover/end_notice_slurm.c) ends the job under Slurm's locks, and only this run of it: a late report
about another one changes nothing.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prolog_epilog import cgroups
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.slurm.commands import Commands
from sluice.slurm.job import read_job

PERIOD_S = 5.0
"""Between scans of the folder: a controller that comes back asks nodes after 20 s at the earliest what runs on them."""
_EPILOG_S = 3.0  # the epilog may still come this long after slurmstepd is gone
_FIRST_WAIT, _LAST_WAIT = 2.0, 8.0  # seconds after a failure
_COMMAND_S = 20.0
_KEPT_S = 30 * 86400
_MOST_BYTES = 256
_NOTE = re.compile(
    r"sluice-ended 1 (?P<job>\d{1,10}) (?P<restarts>\d{1,10}) (?P<uid>\d{1,10}) (?P<status>\d{1,5})"
    r" (?P<ended>\d{1,11}) (?P<stepd>\d{1,10})\n"
)
# What Slurm's commands say of a controller's answer; LC_ALL is C.
_SETTLED = (
    "Job/step already completing or completed",  # by this, or before, or the job runs again
    "Job has already finished",
    "Invalid job id specified",
)
_DECLINED = {
    "Requested operation not supported": "the failover journal is off",
    "scrontab": "Slurm does not allow changes to jobs of scrontab",
}


@dataclass(frozen=True, slots=True)
class EndNotice:
    """How a run of a batch job ended: `restarts` before it, the script's wait status, seconds since 1970."""

    job: int
    restarts: int
    uid: int
    status: int
    ended: int
    stepd: int

    @classmethod
    def read(cls, path: Path) -> EndNotice:
        """Raises SluiceError for a file that is not a notice, OSError."""
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("ascii", "replace")
        match = _NOTE.fullmatch(text)
        if match is None or match["job"] != path.name:
            raise SluiceError(f"{path}: not a notice of a job's end", remedy="it is removed; slurmd may report it")
        return cls(**{name: int(value) for name, value in match.groupdict().items()})


def reports_itself(note: EndNotice) -> bool:
    """Whether the job's slurmstepd is still there, and asks the controllers."""
    if cgroups.uid_of(note.stepd) != os.getuid():  # a user's process has the number, and can set its own name
        return False
    try:
        words = Path(f"/proc/{note.stepd}/cmdline").read_bytes()
    except OSError:
        return False
    return words.startswith(b"slurmstepd") and f"[{note.job}.".encode() in words


def report(note: EndNotice, node: str, commands: Commands | None = None) -> str:
    """Report to a controller; the problem, "" when the job has ended there. Raises SluiceError when none answers."""
    commands = commands or Commands(timeout=_COMMAND_S)
    facts = read_job(commands, note.job)
    if facts is None:
        return ""
    comment = f"sluice-ended 1 {note.job} {note.restarts} {note.uid} {note.status} {note.ended} {node}"
    done = commands.run("scontrol", "update", f"JobId={facts.name}", f"AdminComment={comment}", check=False)
    said = f"{done.stdout} {done.stderr}".strip()
    if done.returncode == 0:
        return "job_submit/sluice is not loaded on the controllers"
    if any(words in said for words in _SETTLED):
        return ""
    for words, why in _DECLINED.items():
        if words in said:
            return why
    raise SluiceError(
        f"job {note.job} ended, but no controller accepts the report: {said}",
        remedy="it is reported again until one does",
    )


class EndNotices:
    """The folder of job-end notices, and what has been seen of them."""

    def __init__(
        self,
        folder: Path,
        node: Callable[[], str],
        *,
        give: Callable[[EndNotice, str], str] = report,
        alive: Callable[[EndNotice], bool] = reports_itself,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self._node = node
        self._give = give
        self._alive = alive
        self._clock = clock
        self._seen: set[EndNotice] = set()
        self._gone: dict[EndNotice, float] = {}  # since when its slurmstepd is not there
        self._failures: dict[EndNotice, int] = {}
        self._wait = 0.0
        self._next = 0.0

    def prepare(self, link: Path) -> None:
        """Make the folder, which root alone enters, and the link by which SPANK and epilog find it. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        fresh = link.with_name(f".{link.name}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.folder)
        fresh.replace(link)

    def run(self) -> float | None:
        """A duty of the agent; seconds until the next look. Raises SluiceError when no controller answers."""
        now = self._clock()
        if now < self._next:
            return self._next - now
        notes = self._notes()
        for note in notes:
            if note not in self._seen:
                self._keep(note)
        self._seen = set(notes)
        self._gone = {note: self._gone.get(note, now) for note in notes if not self._alive(note)}
        waits = [since + _EPILOG_S - now for since in self._gone.values() if since + _EPILOG_S > now]
        self._failures = {note: self._failures.get(note, 0) for note in notes}
        for note in sorted(self._gone, key=self._failures.__getitem__):  # one that is not accepted delays no other
            if self._gone[note] + _EPILOG_S <= now and self._path(note).exists():
                self._report(note)
        return min([*waits, PERIOD_S])

    def _report(self, note: EndNotice) -> None:
        try:
            problem = self._give(note, self._node())
        except SluiceError:
            self._failures[note] += 1
            self._wait = min(max(2 * self._wait, _FIRST_WAIT), _LAST_WAIT)
            spread = random.uniform(0.75, 1.25)  # noqa: S311 - so that not all nodes ask at once
            self._next = self._clock() + self._wait * spread
            raise
        self._wait = 0.0
        self._forget(note)
        log("reported-end", job=note.job, status=note.status, **({"problem": problem} if problem else {}))

    def _path(self, note: EndNotice) -> Path:
        return self.folder / str(note.job)

    def _forget(self, note: EndNotice) -> None:
        """Unless the job's next run has ended in the meantime."""
        with suppress(OSError, SluiceError):
            if EndNotice.read(self._path(note)) == note:
                self._path(note).unlink()

    def _keep(self, note: EndNotice) -> None:
        """A notice that the epilog did not remove at once must survive a power cut."""
        for path in (self._path(note), self.folder):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _notes(self) -> list[EndNotice]:
        """The oldest first; files that are not notices, and notices that were reported for weeks, are removed."""
        found = []
        with os.scandir(self.folder) as entries:
            paths = [Path(entry.path) for entry in entries if entry.name.isdecimal()]
        for path in paths:
            try:
                note = EndNotice.read(path)
                if note.ended < time.time() - _KEPT_S:
                    raise SluiceError(f"job {note.job}: no controller accepts its end", remedy="it is removed")
                found.append(note)
            except FileNotFoundError:
                continue
            except SluiceError as error:
                log("problem", what=error.what, remedy=error.remedy)
                path.unlink(missing_ok=True)
        return sorted(found, key=lambda note: note.ended)
