"""A node's way to the controllers, one for all that its agent sends: an outage is logged once, not by each sender."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.rates import Budgets, Rate
from sluice.exchange.courier import AnswerError, ask, controllers, port

_SAME_S = 60.0  # of one outage, between two reasons
_OUTAGES = Rate(4, 1 / 60)  # that are logged


class Uplink:
    """Whether controllers accept what this node sends. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._budget = Budgets(_OUTAGES)
        self._since: float | None = None  # when the outage began
        self._logged = ""  # of this outage
        self._logged_at = 0.0

    def send(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the controllers; the answer. Raises SluiceError."""
        with self.asking():
            return ask(controllers(), port(), json.dumps(request).encode())

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around what asks controllers. A SluiceError is logged here, but no AnswerError: then one is there."""
        try:
            yield
        except AnswerError:
            self._answered()
            raise
        except SluiceError as error:
            self._failed(str(error))
            error.logged = True
            raise
        self._answered()

    def _failed(self, text: str) -> None:
        now = self._clock()
        with self._lock:
            if self._since is None:
                self._since = now
            if text == self._logged or (self._logged and now < self._logged_at + _SAME_S):
                return
            if self._budget.wait((), now) > 0:
                return
            self._budget.take((), now)
            self._logged, self._logged_at = text, now
        log("problem", what=text)

    def _answered(self) -> None:
        with self._lock:
            since, logged = self._since, self._logged
            self._since, self._logged = None, ""
        if since is not None and logged:
            log("recovered", what="controllers accept requests again", seconds=round(self._clock() - since))
