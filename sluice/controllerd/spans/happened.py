"""What happened to jobs besides what accounting and their nodes say, from files that others write anyway."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.events import Event
from sluice.base.text import one_line
from sluice.exchange.saves import SAVES_FILE, JobSaves, read_saves

JOURNAL = "sluice.journal"
"""Below StateSaveLocation."""
REPLAYS = "replays.jsonl"
ACKNOWLEDGED = "acknowledged"
"""slurm_plugin/journal/journal.h describes it."""
REPLAY = "journal.replay"
_OUTCOMES = ("resubmitted", "restored", "ended", "requeued", "unsettled")
"""slurm_plugin/failover/replay_outcome_slurm.c has them."""
_MOST_BYTES = 16 << 20  # of one file of replays: slurmctld begins another after 1 MiB
_OF_ALL_JOBS = ("takeover", "controller.")
_SUBMIT_S = 10.0  # between a submission and its entry in the journal, at most

log = logging.getLogger("sluice.spans")


class Happened:
    """As the files are when it is first asked. Its methods raise OSError."""

    def __init__(self, state_save: Path, events_file: Path) -> None:
        self._folder = state_save
        self._events_file = events_file

    def to_job(self, number: int) -> list[Event]:
        """To one job and to the controllers, by time; a number may have been another job's before."""
        of_all, of_job = self._events
        return sorted(of_all + of_job.get(number, []), key=lambda event: event.time)

    def saves_of(self, number: int) -> JobSaves:
        """What is known of the saves of its state."""
        return self._saves.get(number, JobSaves())

    def journalled(self, numbers: Iterable[int], submit: float) -> tuple[float, float] | None:
        """When a job's submission was passed to the failover journal, and when it was durable there; None: not known.
        `numbers`: its own and its array's; `submit`: its submission, as a number may have been another job's before."""
        times = (times for number in set(numbers) for times in self._acknowledged.get(number, ()))
        return next((one for one in times if 0 <= one[0] - submit <= _SUBMIT_S), None)

    @cached_property
    def _acknowledged(self) -> dict[int, list[tuple[float, float]]]:
        found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for name in (ACKNOWLEDGED, f"{ACKNOWLEDGED}.1"):  # what is renamed meanwhile is read twice, and not lost
            with suppress(FileNotFoundError), (self._folder / JOURNAL / name).open("rb") as file:
                for line in file.read(_MOST_BYTES).splitlines():
                    with suppress(ValueError, OverflowError):  # one that was cut
                        job, passed_us, durable_us = map(int, line.split())
                        if passed_us <= durable_us:
                            found[job].append((passed_us / 1e6, durable_us / 1e6))
        return found

    @cached_property
    def _events(self) -> tuple[list[Event], dict[int, list[Event]]]:
        of_all: list[Event] = []
        of_job: defaultdict[int, list[Event]] = defaultdict(list)
        for event in events.read(self._events_file):
            if event.kind.startswith(_OF_ALL_JOBS):
                of_all.append(event)
            elif type(job := event.fields.get("job")) is int:
                of_job[job].append(event)
        for name in (f"{REPLAYS}.1", REPLAYS):
            for event in _replays(self._folder / JOURNAL / name):
                of_job[event.fields["job"]].append(event)
        return of_all, of_job

    @cached_property
    def _saves(self) -> dict[int, JobSaves]:
        try:
            return read_saves(self._folder / SAVES_FILE).jobs
        except SluiceError as error:
            log.error("%s", one_line(str(error)))
            return {}


def _replays(path: Path) -> Iterator[Event]:
    """What each replay of the failover journal did with each job; lines that are damaged are left out."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file.read(_MOST_BYTES).splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                report = json.loads(line)
                at = float(report["at"])
                for outcome in _OUTCOMES:
                    for one in report.get(outcome, ()):
                        yield Event(0, at, REPLAY, {"job": _job(one), "outcome": outcome})


def _job(one: Any) -> int:
    """Of a list of outcomes: numbers, or where there is a reason, objects."""
    return int(one["job"] if isinstance(one, dict) else one)
