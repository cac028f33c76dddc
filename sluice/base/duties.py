"""Periodic tasks of the daemons, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.base.errors import SluiceError
from sluice.base.log import log


class NotYet(float):
    """What a duty's function returns that did nothing, as it is too early: seconds. An earlier failure persists."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A function and how often it is called, in seconds from the end of one call to the start of the next.

    `period`: unless work is announced before; the function may return another for the next call. `retry`: after a
    failure. `delay`: after it was woken for work, so that it does not delay requests that are being answered.
    """

    name: str
    period: float
    function: Callable[[], float | None]
    retry: float
    delay: float
    wanted: threading.Event = field(default_factory=threading.Event)

    def wake(self) -> None:
        """There is work: call the function soon."""
        self.wanted.set()


class Duties:
    """One thread for each duty, so that none waits for another. A duty that fails is logged once and called again."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._duties: list[Worker] = []

    def add(
        self,
        name: str,
        period: float,
        function: Callable[[], float | None],
        *,
        retry: float | None = None,
        delay: float = 0.0,
    ) -> Worker:
        """Before `start`. See `Worker`; without `retry` it is the period."""
        duty = Worker(name, period, function, period if retry is None else retry, delay)
        self._duties.append(duty)
        return duty

    def start(self) -> None:
        """Call each for the first time now, and until the agent stops."""
        for duty in self._duties:
            threading.Thread(target=self._run, args=(duty,), name=duty.name, daemon=True).start()

    def _run(self, duty: Worker) -> None:
        problem = ""
        while not self._stopping.is_set():
            duty.wanted.clear()
            try:
                result = duty.function()
                wait = duty.period if result is None else result
            except Exception as error:  # a defect in a duty must not end what holds jobs to their limits
                if str(error) != problem and not (isinstance(error, SluiceError) and error.logged):
                    problem = str(error)
                    log("problem", duty=duty.name, what=f"{type(error).__name__}: {error}")
                wait = duty.retry
            else:
                problem = problem if isinstance(result, NotYet) else ""
            if duty.wanted.wait(wait) and duty.delay:
                self._stopping.wait(duty.delay)
