"""Keys that were revoked on any host, as gateways of this host and replicads of the other controllers say.

Whoever leads: a takeover is no reason to let a key in. A list only grows, so how many of its keys the other one has is
all that is to be known of it.
"""

from __future__ import annotations

import math
import re
import secrets
import threading
from collections.abc import Iterable
from itertools import islice
from typing import Final

from sluice.exchange.serving import MOST_REVOKED, REVOKED, Revocations
from sluice.exchange.snapshot import Snapshot, encode

MOST_KEYS: Final = 100_000
"""As many as a token store has."""
_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")


class RevokedKeys:
    """Digests, and when each key would have been over; gateways of this host follow them. Thread-safe."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._epoch = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._known: dict[str, float] = {}
        self._heard: dict[str, tuple[str, int]] = {}  # by host: its list's name, and how many of its keys came
        self._told: dict[str, int] = {}  # by host: how many of these it has

    def take(self, given: Iterable[tuple[str, float]]) -> bool:
        """What somebody says; whether some are new. They are few: nobody revokes all day."""
        with self._lock:
            new: dict[str, float] = {}
            for digest, until in islice(given, MOST_REVOKED):
                fits = len(self._known) + len(new) < MOST_KEYS and _DIGEST.match(digest) and math.isfinite(until)
                if fits and digest not in self._known:
                    new[digest] = until
            self._known |= new
            self._snapshot.change(REVOKED, {one: encode(REVOKED, one, until) for one, until in new.items()}, ())
            return bool(new)

    def say(self, host: str) -> Revocations:
        """What the replicad of a host is to know."""
        with self._lock:
            begin, (epoch, heard) = self._told.get(host, 0), self._heard.get(host, ("", 0))
            keys = tuple(islice(self._known.items(), begin, begin + MOST_REVOKED))
            return Revocations(self._epoch, begin, keys, epoch, heard)

    def hear(self, host: str, said: Revocations) -> None:
        """What it says."""
        self.take(said.keys)
        with self._lock:
            epoch, before = self._heard.get(host, ("", 0))
            have = before if epoch == said.epoch else 0
            if 0 <= said.begin <= have:  # else some before these were reported to another process here
                have = max(have, said.begin + len(said.keys))
            self._heard[host] = said.epoch, have
            self._told[host] = min(max(said.heard, 0), len(self._known)) if said.heard_epoch == self._epoch else 0
