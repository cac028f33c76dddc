"""Jobs of which a preflight found a node at fault start again on other nodes, without Slurm's own pause.

Slurm requeues such a job, and then lets it wait until the credentials of its first run have expired (two minutes), as
that run might not have ended on its nodes. It has when the job is not completing any more. What remains is the second
in which it ended: slurmd takes a credential of that second for a revoked one, and nodes of the first run are among
those of the next. Not so for a slurmctld that was started meanwhile: it may not know that nodes still end the job.
What is followed here is lost with the daemon; Slurm's pause is what is left then.

Until it runs again such a job goes before all others, where slurmctld's planner decides on that: StateSaveLocation/
sluice.first (`slurm_plugin/runtime/first.h`), each with a time until which this holds, whatever becomes of the daemon.
This is for jobs alone that a drained node has refused: where nodes are not drained (a policy in shadow, the breaker),
users could requeue their jobs themselves, and go first each time. It ends when the job asks for more than it had, or
for another time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sluice.base.errors import SluiceError
from sluice.base.files import write_if_changed
from sluice.base.text import one_line
from sluice.controllerd.daemon import Site
from sluice.exchange.plugin_list import checksummed
from sluice.exchange.preflight_jobs import JobPreflight
from sluice.slurm.answers import Job

PERIOD_S = 0.5
FIRST_FILE = "sluice.first"
"""In StateSaveLocation."""
_FIRST_S = 300.0  # a job goes first so long after the verdict
_SECOND_S = 1.0
_SOON_S = 10.0  # a start so long after it was let start is another time, of its user's; clocks differ by less
_REFUSED_S = 60.0  # from the verdict until the job is requeued, after which it starts where it is
_ENDED_S = 600.0  # ... and until its first run has ended on all nodes

log = logging.getLogger("sluice.preflight")

Requeued = Callable[[int, JobPreflight], None]
"""Gets a job and its preflight when it waits again, and when it is let start."""


@dataclass
class _Followed:
    preflight: JobPreflight
    since: float
    boot: str = ""  # when slurmctld was started
    waits: float | None = None  # since when it was seen to wait
    eligible: int | None = None  # when it may start by Slurm's pause
    released: float | None = None
    first_until: int = 0  # seconds since 1970; 0: no drained node has refused it
    had: Job | None = None  # as it was in its first run


class Restarts:
    """Follows jobs from the verdict on."""

    def __init__(self, site: Site, requeued: Requeued) -> None:
        self._site = site
        self._requeued = requeued
        self._lock = threading.Lock()
        self._jobs: dict[int, _Followed] = {}

    def follow(self, job: int, preflight: JobPreflight, had: Job | None) -> None:
        """From its verdict on. `had`: Slurm's record of its first run."""
        with self._lock:
            self._jobs[job] = _Followed(preflight, time.monotonic(), had=had)
            self._write_first()

    def refused(self, job: int) -> None:
        """A node at fault gets to know that it is drained: it refuses the job, and Slurm requeues it."""
        with self._lock:
            one = self._jobs.get(job)
            if one is not None and not one.first_until:
                one.first_until = int(time.time() + _FIRST_S)
                self._write_first()

    def run(self) -> None:
        """The duty: look at each job that is followed."""
        with self._lock:
            followed = dict(self._jobs)
        for number, one in followed.items():
            try:
                done = self._step(number, one)
            except SluiceError as error:
                log.error("job %d: %s", number, one_line(str(error)))
                done = time.monotonic() - one.since > _ENDED_S
            with self._lock:
                if done and self._jobs.get(number) is one:
                    del self._jobs[number]
                    self._write_first()

    def _step(self, number: int, one: _Followed) -> bool:
        """True when there is nothing more to be done. Raises SluiceError."""
        now = time.monotonic()
        one.boot = one.boot or self._boot()
        found = record_of(self._site.client.jobs(ids=[number], states=["all"]), number)
        if found is None:
            return True
        if found.state == "PENDING":
            return self._let_start(found, one, now)
        return one.waits is not None or now - one.since > (_ENDED_S if found.state == "COMPLETING" else _REFUSED_S)

    def _let_start(self, job: Job, one: _Followed, now: float) -> bool:
        """As `_step`, of a job that waits."""
        if not one.first_until or _asks_for_more(job, one.had):
            return True
        if one.released is not None:
            later = not job.priority or (job.eligible_time or 0) > one.released + _SOON_S
            return later or now - one.since > _FIRST_S
        if one.waits is None:
            one.waits, one.eligible = now, job.eligible_time
            one.preflight = replace(one.preflight, requeued=time.time())
            self._requeued(job.id, one.preflight)
        if now - one.waits < _SECOND_S:
            return False
        if not self._only_pauses(job, one):
            return True
        self._site.commands.output("scontrol", "update", f"JobId={job.own_name}", "StartTime=now")
        one.released = time.time()
        self._requeued(job.id, replace(one.preflight, released=one.released))
        log.info("job %d: starts again without Slurm's pause, as its first run has ended on all nodes", job.id)
        return False

    def _only_pauses(self, job: Job, one: _Followed) -> bool:
        """Whether nothing but Slurm's pause keeps the job, and it is known that its first run has ended."""
        if not job.priority or job.eligible_time is None or job.eligible_time != one.eligible:
            return False  # it is held, or its user has given it another time
        return self._boot() == one.boot != ""

    def _write_first(self) -> None:
        """What slurmctld's planner reads. A failure costs the job its place in the order alone."""
        first = sorted((job, one.first_until) for job, one in self._jobs.items() if one.first_until)
        lines = "".join(f"{job} {until}\n" for job, until in first)
        try:
            write_if_changed(self._site.state_save / FIRST_FILE, checksummed(f"sluice-first 1\n{lines}"), mode=0o644)
        except (OSError, SluiceError) as error:
            log.error("%s: %s", FIRST_FILE, one_line(str(error)))

    def _boot(self) -> str:
        return self._site.client.config().get("BOOT_TIME", "")


def record_of(jobs: Iterable[Job], number: int) -> Job | None:
    """The job's own record: asked for one of an array by its number, Slurm may answer with others of it as well."""
    return next((job for job in jobs if job.id == number), None)


def _asks_for_more(job: Job, had: Job | None) -> bool:
    """Whether its user has made it larger since: what goes first is what lost its nodes."""
    if had is None or job.node_count > had.node_count:
        return True
    by_words = [(one.tres_per_node, one.tres_per_job, one.tres_per_task) for one in (job, had)]
    counted = ("node", "gres/gpu", "gres/shard")  # GPUs only where AccountingStorageTRES has them
    return by_words[0] != by_words[1] or any(job.tres.get(name, 0) > had.tres.get(name, 0) for name in counted)
