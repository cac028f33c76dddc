"""Requests that have a name (an Idempotency-Key), and may have been sent to several gateways: one of them answers.

Before such a request goes on, the gateway claims its name with the next report to the authority of limits. While
another request of that name is answered, here or elsewhere, it waits a few seconds, in which a gateway that died is
found dead, and is refused then. Where no authority answers, each gateway goes on by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Literal, Protocol

from sluice.exchange.serving import MOST_CLAIMS, LeaseAnswer, LeaseReport

Verdict = Literal["free", "held", "billed"]
MOST_WAIT_S: Final = 4.0
"""For a name that is held: a gateway that is not heard is taken for dead sooner."""
_AGAIN_S: Final = 0.25
_MOST_SAME: Final = 8
"""So many of a worker wait for one name: they have no place of their own yet, that a limit could count."""
_UNHEARD_S: Final = 2.5  # without an answer of the parent, it has died
_MOST_ENDED: Final = 20_000


class Call(Protocol):
    """What is needed of a request."""

    over: bool
    deadline: float

    def claimed(self, verdict: Verdict) -> None:
        """Whether it may go on by its name. "free": `Names.end` is to be called at its end."""


class Worker(Protocol):
    """What is needed of the worker."""

    loop: asyncio.AbstractEventLoop
    tell: Any


class Names:
    """The names of a worker's requests."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asked: dict[int, tuple[Call, str, float]] = {}
        self._again: Counter[str] = Counter()  # how many will ask again for a name that is held
        self._number = 0

    def claim(self, call: Call, name: str, until: float | None = None) -> None:
        """Ask, and tell the call."""
        if call.over:
            return
        if until is None:
            until = min(time.monotonic() + MOST_WAIT_S, call.deadline)
        self._number += 1
        self._asked[self._number] = call, name, until
        self._worker.tell({"claim": self._number, "name": name})
        self._worker.loop.call_later(_UNHEARD_S, self._say, self._number, "free")

    def end(self, name: str, *, billed: bool) -> None:
        """A request that had its name has ended."""
        self._worker.tell({"ended": name, "billed": billed})

    def told(self, message: dict[str, Any]) -> None:
        """What the parent says."""
        self._say(message["claim"], message["verdict"])

    def _say(self, number: int, verdict: Verdict) -> None:
        call, name, until = self._asked.pop(number, (None, "", 0.0))
        if call is None:
            return
        if call.over:
            if verdict == "free":
                self.end(name, billed=False)
        elif verdict == "held" and time.monotonic() + _AGAIN_S < until and self._again[name] < _MOST_SAME:
            self._again[name] += 1
            self._worker.loop.call_later(_AGAIN_S, self._claim_again, call, name, until)
        else:
            call.claimed(verdict)

    def _claim_again(self, call: Call, name: str, until: float) -> None:
        self._again[name] -= 1
        if not self._again[name]:
            del self._again[name]
        self.claim(call, name, until)


class Child(Protocol):
    """What is needed of a worker's process."""

    def tell(self, message: dict[str, Any]) -> None:
        """Send it a message."""


@dataclass(slots=True)
class _Claim:
    child: Child
    number: int
    told: bool = False


class Claims:
    """The names of a gateway's requests, in its parent. `soon`: has a report sent."""

    def __init__(self, gateway: str, soon: Callable[[], None]) -> None:
        self._gateway = gateway
        self._soon = soon
        self._mine: dict[str, _Claim] = {}
        self._new: dict[str, None] = {}  # those of them that the authority does not know
        self._ended: deque[tuple[str, bool]] = deque(maxlen=_MOST_ENDED)
        self._epoch = ""
        self._untold = 0

    @property
    def due(self) -> bool:
        """Whether requests wait for an answer."""
        return self._untold > 0

    def claim(self, child: Child, number: int, name: str) -> None:
        """A request of a worker waits for its name."""
        if name in self._mine:
            child.tell({"claim": number, "verdict": "held"})
            return
        self._mine[name] = _Claim(child, number)
        self._new[name] = None
        self._untold += 1
        self._soon()

    def end(self, child: Child, name: str, *, billed: bool) -> None:
        """A worker's request of that name has ended."""
        found = self._mine.get(name)  # its worker may have gone on before it was told
        if found is not None and found.child is child:
            self._remove(name)
            self._ended.append((name, billed))

    def gone(self, child: Child, billed: Callable[[str], bool]) -> None:
        """A worker has ended, and with it its requests."""
        for name in [name for name, one in self._mine.items() if one.child is child]:
            self._remove(name)
            self._ended.append((name, billed(name)))

    def of_report(self, report: LeaseReport) -> LeaseReport:
        """A report with what there is of names, those first for which requests wait."""
        new = sorted(self._new, key=lambda name: self._mine[name].told)
        return replace(
            report, gateway=self._gateway, claims=tuple(new[:MOST_CLAIMS]),
            ended=tuple(islice(self._ended, MOST_CLAIMS)),
        )  # fmt: skip

    def take(self, report: LeaseReport, answer: LeaseAnswer | None) -> None:
        """The answer to that report. None: nobody answers, and each gateway goes on by itself."""
        if answer is not None and answer.epoch != self._epoch:
            self._epoch = answer.epoch
            self._new = dict.fromkeys(self._mine)
        if answer is None:
            for name in list(self._new):
                self._tell(name, "free")
            return
        held, billed = set(answer.held), set(answer.billed)
        for name in report.claims:
            if name in self._mine:
                self._tell(name, "held" if name in held else "billed" if name in billed else "free")
                self._new.pop(name, None)
        for one in report.ended:
            if self._ended and self._ended[0] == one:
                self._ended.popleft()

    def _tell(self, name: str, verdict: str) -> None:
        one = self._mine[name]
        if one.told:
            return
        one.told = True
        self._untold -= 1
        one.child.tell({"claim": one.number, "verdict": verdict})
        if verdict != "free":
            self._remove(name)

    def _remove(self, name: str) -> None:
        one = self._mine.pop(name)
        self._new.pop(name, None)
        self._untold -= not one.told
