"""Heartbeats of replicas, and notes of the other controller's replicad: what comes over the network.

Who sends is known by MUNGE alone. A heartbeat counts where its sender is the service's user, and its launch one that
was asked for or that Slurm shows; all else is refused before it costs more than decoding it, and counted.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.exchange.serving import Heartbeat, LeaseReport, Orders, PeerNote, parse, render
from sluice.serve.replicad.tickets import Tickets
from sluice.slurm.munge import Message
from sluice.slurm.munge_service import RefusedError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}\Z|\[?[0-9A-Fa-f:.]{2,45}\]?\Z")
_ENTRY = re.compile(r"[A-Za-z0-9._-]{1,200}\Z")
_HEXADECIMAL = re.compile(r"[0-9a-f]{64}\Z")
_MOST_SLOTS = 1_000_000
_MOST_WHY = 1000
_MOST_COUNT = 1 << 53
_LATEST = 1e11  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Expected:
    """A launch whose heartbeats are taken. `job`: Slurm's number, `nodes`: of the job; None and empty: not known."""

    service: str
    uid: int
    job: int | None
    nodes: frozenset[str]


Expect = Callable[[str], Expected | None]
Take = Callable[[Heartbeat], Orders]
TakeNote = Callable[[PeerNote], PeerNote]
Lease = Callable[[LeaseReport], bytes]


def names_node(host: str, nodes: Iterable[str]) -> bool:
    """Whether a replica's host is one of the nodes of its job."""
    return any(host in (node, node.partition(".")[0]) for node in nodes)


class Registry:
    """Answers what was authenticated: heartbeats, notes, and gateways' reports that the other replicad passes on.
    Thread-safe.

    `uids`: of the services' users, the only ones besides `own` (replicad's) whose messages are looked at.
    """

    def __init__(
        self, own: int, uids: Callable[[], Mapping[int, object]], expect: Expect, take: Take, note: TakeNote,
        lease: Lease,
    ) -> None:  # fmt: skip
        self._own, self._uids, self._expect, self._take, self._note = own, uids, expect, take, note
        self._lease = lease
        self._tickets = Tickets()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Heartbeats that were taken, and what was refused, by its reason."""
        with self._lock:
            return dict(self._counts)

    def count(self, what: str) -> None:
        """One more."""
        with self._lock:
            self._counts[what] += 1

    def answer(self, message: Message) -> bytes:
        """The answer to a heartbeat or to a note. Raises SluiceError, RefusedError for what is not answered."""
        if message.uid == self._own and message.payload.startswith(b'{"holder":'):
            return self._lease(parse(LeaseReport, message.payload))
        if message.uid == self._own:
            return render(self._note(parse(PeerNote, message.payload)))
        if message.uid not in self._uids():
            raise self._refusal("stranger", f"uid {message.uid}: no service's user")
        try:
            beat = parse(Heartbeat, message.payload)
        except SluiceError as error:
            raise self._refusal("malformed", error.what) from error
        expected = self._expect(beat.launch)
        if expected is None or expected.service != beat.service:
            raise self._refusal("unknown launch", f"{beat.service[:64]}.{beat.launch[:16]}: was not asked for")
        if expected.uid != message.uid:
            raise self._refusal("another user", f"uid {message.uid}: not that of {beat.service[:64]}")
        self._check(beat, expected)
        self.count("taken")
        return render(replace(self._take(beat), ticket=self._tickets.make(beat.launch, uptime())))

    def owner(self, word: bytes) -> tuple[str] | None:
        """Whose heartbeat follows a word, where that is a ticket: the launch."""
        launch = self._tickets.launch(word, uptime())
        return None if launch is None else (launch,)

    def _check(self, beat: Heartbeat, expected: Expected) -> None:
        """Raises RefusedError for what no gateway should get."""
        if expected.job is not None and beat.job != expected.job:
            raise self._refusal("another job", f"{beat.launch}: job {beat.job}, and not {expected.job}")
        if not _HOST.match(beat.host) or not 0 < beat.port < 65536:
            raise self._refusal("malformed", f"{beat.launch}: no address")
        # gateways connect to it: no address, and no name in a domain that the service's user may have
        if expected.nodes and not names_node(beat.host, expected.nodes):
            raise self._refusal("another host", f"{beat.launch}: {beat.host[:80]} is no node of its job")
        if not _HEXADECIMAL.match(beat.secret) or not _HEXADECIMAL.match(beat.fingerprint):
            raise self._refusal("malformed", f"{beat.launch}: no secret or no fingerprint")
        if not 0 < beat.slots <= _MOST_SLOTS or len(beat.why) > _MOST_WHY:
            raise self._refusal("malformed", f"{beat.launch}: slots or why")
        weights = beat.weights
        if weights is not None and not (0 < weights.port < 65536 and _ENTRY.match(weights.entry)):
            raise self._refusal("malformed", f"{beat.launch}: weights")
        load = beat.load
        counts = load.running, load.waiting, load.prompt_tokens, load.completion_tokens
        shares = (
            (0.0 if load.cache_used is None else load.cache_used),
            (0.0 if beat.ends is None else beat.ends / _LATEST),
        )
        if not all(0 <= one < _MOST_COUNT for one in counts) or not all(0 <= one <= 1 for one in shares):
            raise self._refusal("malformed", f"{beat.launch}: load or end")

    def _refusal(self, what: str, text: str) -> RefusedError:
        self.count(what)
        return RefusedError(text)


def addresses(registries: Iterable[str]) -> list[tuple[str, int]]:
    """Of HOST:PORT. Raises SluiceError."""
    found = []
    for one in registries:
        host, _, port = one.rpartition(":")
        if not host or not port.isdecimal():
            raise SluiceError(
                f"registry {one[:80]!r}: not HOST:PORT", remedy="correct serving.registries, and apply it"
            )
        found.append((host.strip("[]"), int(port)))
    return found
