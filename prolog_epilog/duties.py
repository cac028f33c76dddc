"""What the agent does every so often, beside answering and watching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prolog_epilog.log import log


@dataclass(frozen=True, slots=True)
class Duty:
    """A function and how often it is called, in seconds from the end of one call to the start of the next.

    `period`: where nobody knows of work before; the function may return another for this once. `retry`: after a
    failure. `least`: that much lies between two calls, whatever happens.
    """

    name: str
    period: float
    function: Callable[[], float | None]
    retry: float
    least: float
    wanted: threading.Event = field(default_factory=threading.Event)

    def wake(self) -> None:
        """There is work: call the function now."""
        self.wanted.set()


class Duties:
    """A thread a duty, so that none waits for another. One that fails says so once and is called again."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._duties: list[Duty] = []

    def add(
        self,
        name: str,
        period: float,
        function: Callable[[], float | None],
        *,
        retry: float | None = None,
        least: float = 0.0,
    ) -> Duty:
        """Before `start`. See `Duty`; without `retry` it is the period."""
        duty = Duty(name, period, function, period if retry is None else retry, least)
        self._duties.append(duty)
        return duty

    def start(self) -> None:
        """Call each for the first time now, and until the agent stops."""
        for duty in self._duties:
            threading.Thread(target=self._run, args=(duty,), name=duty.name, daemon=True).start()

    def _run(self, duty: Duty) -> None:
        problem = ""
        while not self._stopping.is_set():
            duty.wanted.clear()
            try:
                told = duty.function()
                wait = duty.period if told is None else told
            except Exception as error:  # a duty's fault is not the end of what holds jobs to their limits
                if str(error) != problem:
                    problem = str(error)
                    log("problem", duty=duty.name, what=f"{type(error).__name__}: {error}")
                wait = duty.retry
            else:
                problem = ""
            ended = time.monotonic()
            if duty.wanted.wait(max(wait, duty.least)):
                self._stopping.wait(max(0.0, ended + duty.least - time.monotonic()))
