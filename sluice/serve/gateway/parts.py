"""Requests that wait until the gateway has asked for more of a limit that gateways of several hosts share.

The gate refuses what is over this gateway's part. Before that is an answer, the parent asks the authority; the request
is tried again when it has heard. Who was refused by the authority, too, is refused at once for a moment.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, Protocol

from sluice.serve.gateway.refusals import RefusalError

_AGAIN_S: Final = 0.1  # for so long the authority's word is taken for the next requests, too
_AWAY_S: Final = 0.25  # between two tries while nobody answers
MOST_WAIT_S: Final = 10.0
_MOST_TRIES: Final = 3  # others may have taken what was given


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
    def limited(self) -> list[tuple[str, str]]:
        """Kinds and names of those of its subjects that have limits."""

    def enter_again(self, waiting: Waiting) -> None:
        """More was asked for."""


class Waiting:
    """A request that waits so, and since when."""

    __slots__ = ("call", "deadline", "tries")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.deadline = min(time.monotonic() + MOST_WAIT_S, call.deadline)
        self.tries = 0


class Parts:
    """All of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._new: list[Waiting] = []
        self._asked: dict[int, list[Waiting]] = {}
        self._number = 0
        self._planned = False
        self._denied: dict[tuple[str, str], tuple[float, float]] = {}
        """Until when, and when there will be enough; 0: not known."""

    def ask(self, call: Call, waiting: Waiting | None) -> bool:
        """Ask for more, after which the request is tried again. False: it is refused, and `retry_after` says when
        there will be enough."""
        if waiting is None:
            if self._is_denied(call):
                return False
            waiting = Waiting(call)
        elif waiting.tries >= _MOST_TRIES or time.monotonic() > waiting.deadline:
            return False
        self._new.append(waiting)
        if not self._planned:
            self._planned = True
            self._worker.loop.call_soon(self._send)
        return True

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
        new, self._new = [one for one in self._new if not one.call.over], []
        if not new:
            return
        self._number += 1
        self._asked[self._number] = new
        needs: dict[tuple[str, str], list[int]] = {}
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
        if not message["known"]:
            self._worker.loop.call_later(_AWAY_S, self._later, waiting)
            return
        for kind, name, us in message["retry"]:
            self._denied[kind, name] = now + min(_AGAIN_S, us / 1e6), now + us / 1e6
        for one in waiting:
            one.tries += 1
            one.call.enter_again(one)

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
                one.call.enter_again(one)
        self._denied = {key: one for key, one in self._denied.items() if one[1] > now or one[0] > now}


def nobody_answers() -> RefusalError:
    """No authority, and the policy says that nothing is let in then."""
    return RefusalError(
        503, "no controller answers for the limits", remedy="try again, or tell an admin", retry_after=1.0, code="busy"
    )
