"""What the agent does every so often, beside answering and watching."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from prolog_epilog.log import log


class NotYet(float):
    """What a duty's function returns that did nothing, as it is too early: seconds. What failed before still does."""


@dataclass(frozen=True, slots=True)
class Duty:
    """A function and how often it is called, in seconds from the end of one call to the start of the next.

    `period`: where nobody knows of work before; the function may return another for this once. `retry`: after a
    failure. `delay`: after it was told of work, so that it is in nobody's way who is being answered.
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
        delay: float = 0.0,
    ) -> Duty:
        """Before `start`. See `Duty`; without `retry` it is the period."""
        duty = Duty(name, period, function, period if retry is None else retry, delay)
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
                problem = problem if isinstance(told, NotYet) else ""
            if duty.wanted.wait(wait) and duty.delay:
                self._stopping.wait(duty.delay)
