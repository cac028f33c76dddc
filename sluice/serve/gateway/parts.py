"""Requests that wait until the gateway has asked for more of a limit that gateways of several hosts share.

The gate refuses what is over this gateway's part. Before that is an answer, the parent asks the authority; the request
is tried again when it has heard. Who was refused by the authority, too, is refused at once for a moment. Where others
have more places than their part, a few ask again until they have given one back, for _SOON_S at most; after one that
asked so long in vain, one at a time does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, Final, Protocol

from sluice.serve.gateway.refusals import RefusalError

_AGAIN_S: Final = 0.1  # for so long the authority's word is taken for the next requests, too
_AWAY_S: Final = 0.25  # between two tries while nobody answers
MOST_WAIT_S: Final = 10.0
_SOON_S: Final = 5.0  # longer than a turn of a place (replicad)
_POLL_S: Final = 0.02
_MOST_TRIES: Final = 3  # others may have taken what was given
_MOST_POLLS: Final = 8  # of a subject: each has the gate try again, and the parent ask, every _POLL_S
_VAIN_S: Final = 60.0  # for so long it is remembered that nobody gave a place back

Subject = tuple[str, str]
"""Its kind and name."""


class Worker(Protocol):
    """What is needed of the worker."""

    loop: asyncio.AbstractEventLoop
    tell: Any


class Call(Protocol):
    """What is needed of a request."""

    over: bool
    deadline: float

    @property
    def reserved(self) -> int:
        """Its tokens, as they are reserved."""

    @property
    def limited(self) -> list[Subject]:
        """Those of its subjects that have limits."""

    def enter_again(self, waiting: Waiting) -> None:
        """More was asked for."""


class Waiting:
    """A request that waits so, and since when."""

    __slots__ = ("call", "deadline", "polls", "soon", "soon_until", "tries")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.deadline = min(time.monotonic() + MOST_WAIT_S, call.deadline)
        self.tries = 0
        self.soon: frozenset[Subject] = frozenset()  # of which a place may come
        self.polls: Subject | None = None  # for a place of which it asks again now
        self.soon_until = time.monotonic() + _SOON_S


class Parts:
    """All of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._new: list[Waiting] = []
        self._asked: dict[int, list[Waiting]] = {}
        self._number = 0
        self._planned = False
        self._denied: dict[Subject, tuple[float, float]] = {}
        """Until when, and when there will be enough; 0: not known."""
        self._polls: Counter[Subject] = Counter()
        self._vain: dict[Subject, float] = {}
        """Until when it counts that a request asked again for a place as long as it may, and got none."""

    def ask(self, call: Call, waiting: Waiting | None, subject: Subject) -> bool:
        """Ask for more of what the gate refused for want of `subject`, after which the request is tried again. False:
        it is refused, and `retry_after` says when there will be enough."""
        if waiting is None:
            if self._is_denied(call):
                return False
            waiting = Waiting(call)
        elif subject in waiting.soon:
            return self._poll(waiting, subject)
        elif waiting.tries >= _MOST_TRIES or time.monotonic() > waiting.deadline:
            return False
        self._add(waiting)
        return True

    def _poll(self, waiting: Waiting, subject: Subject) -> bool:
        """Ask again in a moment, unless enough others do."""
        if self._polls[subject] >= (1 if subject in self._vain else _MOST_POLLS):
            return False
        self._polls[subject] += 1
        waiting.polls, waiting.tries = subject, 0
        self._worker.loop.call_later(_POLL_S, self._add, waiting)
        return True

    def _end_poll(self, waiting: Waiting) -> None:
        subject, waiting.polls, waiting.soon = waiting.polls, None, frozenset()
        if subject is not None:
            self._polls[subject] -= 1
            if not self._polls[subject]:
                del self._polls[subject]

    def _add(self, waiting: Waiting) -> None:
        self._new.append(waiting)
        if not self._planned:
            self._planned = True
            self._worker.loop.call_soon(self._send)

    def retry_after(self, call: Call) -> float | None:
        """Seconds until there is enough for a request that was refused; None: not known."""
        found = [self._denied[one][1] - time.monotonic() for one in call.limited if one in self._denied]
        return max(found, default=0.0) if max(found, default=0.0) > 0 else None

    def _is_denied(self, call: Call) -> bool:
        now = time.monotonic()
        return any(self._denied.get(one, (0.0, 0.0))[0] > now for one in call.limited)

    def _send(self) -> None:
        """One question for all that came together."""
        self._planned = False
        for one in self._new:
            if one.call.over:
                self._end_poll(one)
        new, self._new = [one for one in self._new if not one.call.over], []
        if not new:
            return
        self._number += 1
        self._asked[self._number] = new
        needs: dict[Subject, list[int]] = {}
        for one in new:
            tokens = one.call.reserved
            for key in one.call.limited:
                found = needs.setdefault(key, [0, 0, tokens])
                found[0] += 1
                found[1] += tokens
                found[2] = min(found[2], tokens)
        self._worker.tell({"need": self._number, "needs": [[*key, *amounts] for key, amounts in needs.items()]})

    def told(self, message: dict[str, Any]) -> None:
        """The parent has asked."""
        now = time.monotonic()
        waiting = self._asked.pop(message["parts"], [])
        for one in waiting:
            self._end_poll(one)
        if not message["known"]:
            self._worker.loop.call_later(_AWAY_S, self._later, waiting)
            return
        for kind, name, us in message["retry"]:
            self._denied[kind, name] = now + min(_AGAIN_S, us / 1e6), now + us / 1e6
        soon = frozenset(map(tuple, message.get("soon", ())))  # a parent of before a reload says nothing
        short = {(kind, name) for kind, name, _ in message["retry"]}
        for one in waiting:
            one.soon = self._soon(one, soon, short, now)
            one.tries += 1
            one.call.enter_again(one)

    def _soon(self, waiting: Waiting, soon: frozenset[Subject], short: set[Subject], now: float) -> frozenset[Subject]:
        """Of which of its subjects a request may wait for a place: of none where another limit refuses it anyway."""
        limited = waiting.call.limited
        found = soon.intersection(limited)
        if now >= waiting.soon_until:
            self._vain.update(dict.fromkeys(found, now + _VAIN_S))
        for one in self._vain.keys() & set(limited) - found:
            del self._vain[one]
        may = now < min(waiting.soon_until, waiting.deadline) and short.isdisjoint(limited)
        return found if may else frozenset()

    def _later(self, waiting: list[Waiting]) -> None:
        for one in waiting:
            one.call.enter_again(one)

    def sweep(self, now: float) -> None:
        """What nobody has answered for too long."""
        for number, waiting in list(self._asked.items()):
            late = [one for one in waiting if now > one.deadline or one.call.over]
            if late:
                self._asked[number] = [one for one in waiting if one not in late]
                if not self._asked[number]:
                    del self._asked[number]
            for one in late:
                self._end_poll(one)
                one.call.enter_again(one)
        self._denied = {key: one for key, one in self._denied.items() if one[1] > now or one[0] > now}
        self._vain = {key: until for key, until in self._vain.items() if until > now}


def nobody_answers() -> RefusalError:
    """No authority, and the policy says that nothing is let in then."""
    return RefusalError(
        503, "no controller answers for the limits", remedy="try again, or tell an admin", retry_after=1.0, code="busy"
    )
