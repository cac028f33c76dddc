"""What the agent does every so often, beside answering and watching."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from prolog_epilog.log import log


@dataclass(frozen=True, slots=True)
class Duty:
    """A function and how often it is called, in seconds from the end of one call to the start of the next."""

    name: str
    period: float
    function: Callable[[], None]


class Duties:
    """A thread a duty, so that none waits for another. One that fails says so once and is called again."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._duties: list[Duty] = []

    def add(self, name: str, period: float, function: Callable[[], None]) -> None:
        """Before `start`."""
        self._duties.append(Duty(name, period, function))

    def start(self) -> None:
        """Call each for the first time now, and until the agent stops."""
        for duty in self._duties:
            threading.Thread(target=self._run, args=(duty,), name=duty.name, daemon=True).start()

    def _run(self, duty: Duty) -> None:
        problem = ""
        while not self._stopping.is_set():
            try:
                duty.function()
            except Exception as error:  # a duty's fault is not the end of what holds jobs to their limits
                if str(error) != problem:
                    problem = str(error)
                    log("problem", duty=duty.name, what=f"{type(error).__name__}: {error}")
            else:
                problem = ""
            self._stopping.wait(duty.period)
