"""Keys that were revoked on this gateway's host or on another one's, in the gateway's parent.

Each host has a token store of its own, or a copy. What is revoked in one goes at once to replicad of its host, and
from there to those of all controllers and their gateways: digests of secrets, a set that only grows until they would be
over anyway. It is kept in a file, so that a copy of the store from before does not bring a key back; with what the
store had, so that what is revoked while no gateway runs here is seen when one does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path
from typing import Final

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.tokens import NO_STORE, Token, TokenStore
from sluice.exchange.serving import MOST_REVOKED, LeaseAnswer, LeaseReport

SILENT_S: Final = 60.0
"""For so long a gateway believes keys that has others on other hosts, while no authority answers."""
_AGAIN_S: Final = 10.0  # between two tries to write the file

log = logging.getLogger("sluice.gateway")


class Revoked:
    """Digests that hold no more, and when each would have been over."""

    def __init__(self, store: TokenStore, path: Path, host: str, now: float) -> None:
        """`host`: which has this store; gateways with the same one have nothing to tell each other."""
        self.store = store
        self.path = path
        self._host = host
        self.digests, self._valid = _read(path, now)
        self._before: Mapping[str, Token] | None = None
        self._write_at = inf  # the file is not what it should be, and is to be written then
        self._failing = False
        self._rows: Mapping[str, float] = {}  # what replicad has
        self._untold = dict(self.digests)
        self._heard: float | None = None
        self._others = False

    # ---- the store of this host ----

    def look(self, now: float) -> bool:
        """Whether something was revoked in the store since the last time. A store that is not there says nothing.
        `now`: seconds since 1970."""
        if now >= self._write_at:
            self._write(now)
        try:
            tokens = self.store.tokens()
        except SluiceError:
            return False
        if tokens is self._before or tokens is NO_STORE:
            return False
        self._before = tokens
        before, self._valid = self._valid, _valid(tokens)
        gone = {one: until for one, until in before.items() if one not in self._valid and until > now}
        found = self._add(gone)
        if found or self._valid != before:
            self._write(now)
        return found

    def _add(self, digests: Mapping[str, float]) -> bool:
        new = {one: until for one, until in digests.items() if one not in self.digests}
        self.digests.update(new)
        self._untold = {one: until for one, until in self.digests.items() if one not in self._rows}
        return bool(new)

    def _write(self, now: float) -> None:
        text = json.dumps({"version": 1, "revoked": self.digests, "valid": self._valid}) + "\n"
        try:
            write_atomic(self.path, text, mode=0o640, follow_links=False)
            self._write_at, self._failing = inf, False
        except OSError as error:
            if not self._failing:
                log.error("%s: %s; revoked keys are forgotten if this gateway ends", self.path, error.strerror)
            self._write_at, self._failing = now + _AGAIN_S, True

    # ---- the other gateways ----

    def untold(self) -> list[tuple[str, float]]:
        """What replicad of this host does not have yet."""
        return list(islice(self._untold.items(), MOST_REVOKED))

    def hear(self, rows: Mapping[str, float]) -> bool:
        """What it has; whether something is revoked by it."""
        self._rows = dict(rows)
        found = self._add(self._rows)
        if found:
            self._write_at = 0.0  # by the next look
        return found

    def of_report(self, report: LeaseReport) -> LeaseReport:
        """With this gateway's host, so that all know how many have some."""
        return replace(report, host=self._host)

    def answered(self, answer: LeaseAnswer, now: float) -> None:
        """The authority's word. `now`: of a clock that goes on evenly."""
        self._heard, self._others = now, answer.hosts > 1

    def silent(self, now: float) -> bool:
        """Whether there may be revocations that this gateway has not heard of for too long."""
        return self._others and self._heard is not None and now - self._heard > SILENT_S


def _valid(tokens: Mapping[str, Token]) -> dict[str, float]:
    """Digests that hold, and until when."""
    found = {one.digest: one.expires for one in tokens.values()}
    found.update({one.old_digest: one.old_until for one in tokens.values() if one.old_digest})
    return found


def _read(path: Path, now: float) -> tuple[dict[str, float], dict[str, float]]:
    """What was revoked, and what the store had."""
    try:
        document = json.loads(path.read_bytes())
        revoked, valid = (
            {str(one): float(until) for one, until in document[name].items() if float(until) > now}
            for name in ("revoked", "valid")
        )
        return revoked, valid
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.error("%s: %r; keys that were revoked on other hosts are learned again", path, error)
        return {}, {}
