"""Words by which replicad knows whose a heartbeat is before it has its credential decoded.

A replica is told one in each answer, and sends it in clear before the credential of its next heartbeat, which then has
a place and a rate of its own: what else comes from that node's address, which any user there can send, keeps it from
nothing. A ticket proves nothing. Who copies one can delay that replica alone, for a minute or two.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_PERIOD_S = 60.0
_DIGITS = 32
_MOST = 100  # bytes of one: the loop that reads all heartbeats signs no more of what a stranger sends


class Tickets:
    """Signed with a key of this process. Thread-safe."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self, launch: str, now: float) -> str:
        """One that holds until the end of the next period."""
        return f"{launch}.{self._signature(launch, int(now // _PERIOD_S))}"

    def launch(self, ticket: bytes, now: float) -> str | None:
        """Whose it is; None: it is none, or too old."""
        if len(ticket) > _MOST:
            return None
        launch, _, signature = ticket.decode("latin-1").partition(".")
        last = int(now // _PERIOD_S)
        good = [self._signature(launch, period).encode() for period in (last, last - 1)]
        return launch if any(hmac.compare_digest(one, signature.encode()) for one in good) else None

    def _signature(self, launch: str, period: int) -> str:
        return hmac.new(self._key, f"{launch} {period}".encode(), hashlib.sha256).hexdigest()[:_DIGITS]
