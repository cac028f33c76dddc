"""The request gate from Python: limits, fair queue and choice of replica, over all workers (``sluice/core.h``).

A Gate is for one thread; every worker process, and each further thread, opens its own on the shared region. Ids of
subjects and replicas are 64-bit numbers that are not 0; times are microseconds of one clock, e.g.
`time.monotonic_ns() // 1000`. Order of work: admit, turn (at once, and when the worker is woken), progress while it
streams, settle, turn again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Self

from sluice.core._core import ffi, lib
from sluice.core.errors import check, new_error_text
from sluice.core.layout import layout_of

Region = bytearray | memoryview | mmap.mmap

ALIGNMENT: int = lib.SLUICE_GATE_ALIGNMENT
MAX_PRIORITY: int = lib.SLUICE_GATE_MAX_PRIORITY
MAX_WEIGHT: int = lib.SLUICE_GATE_MAX_WEIGHT
MAX_AMOUNT: int = lib.SLUICE_GATE_MAX_AMOUNT
"""Of a ticket's tokens, a limit and a burst."""
MAX_PREFIX: int = lib.SLUICE_GATE_MAX_PREFIX
"""How many hashes of a prefix are looked at."""
_MAX_SEATS: int = lib.SLUICE_GATE_MAX_WORKERS
_NONE = 2**64 - 1
_BATCH = 256
_put_request = layout_of(
    "sluice_gate_request",
    (
        "subjects", "tag", "tokens", "prompt_tokens", "deadline_us", "priority", "needs_replica", "prefix_count",
    ),
    rest=("reserved", "prefix"),
).pack_into  # fmt: skip
_TURN = layout_of("sluice_gate_turn", ("ticket", "replica", "tag", "slot", "prefix_blocks"))
_SETTLED = layout_of(
    "sluice_gate_settled",
    (
        "ticket", "tag", "subjects", "replica", "reserved", "prompt_tokens", "completion_tokens", "admitted_us",
        "granted_us", "ended_us",
    ),
)  # fmt: skip


class Kind(IntEnum):
    """Of a subject of limits."""

    KEY = lib.SLUICE_GATE_KEY
    USER = lib.SLUICE_GATE_USER
    TENANT = lib.SLUICE_GATE_TENANT
    SERVICE = lib.SLUICE_GATE_SERVICE


class Reason(IntEnum):
    """What refused a request."""

    REQUESTS = lib.SLUICE_GATE_REQUESTS
    TOKENS = lib.SLUICE_GATE_TOKENS
    CONCURRENT = lib.SLUICE_GATE_CONCURRENT
    QUEUED = lib.SLUICE_GATE_QUEUED
    FULL = lib.SLUICE_GATE_FULL
    NO_REPLICAS = lib.SLUICE_GATE_NO_REPLICAS
    NO_PART = lib.SLUICE_GATE_NO_PART


class Use(IntEnum):
    """Whether a replica gets requests; LAST: where no usable one has a free place."""

    USABLE = lib.SLUICE_GATE_USABLE
    LAST = lib.SLUICE_GATE_LAST
    NO = lib.SLUICE_GATE_NOT_USABLE


class Standing(IntEnum):
    """Whether a replica is slow. OUT: it gets nothing; TRIAL: one request at a time."""

    IN = lib.SLUICE_GATE_IN
    OUT = lib.SLUICE_GATE_OUT
    TRIAL = lib.SLUICE_GATE_TRIAL


class Time(IntEnum):
    """What a replica took: until a stream's first token, from one to the next, for an answer that is not streamed."""

    FIRST = lib.SLUICE_GATE_FIRST
    TOKEN = lib.SLUICE_GATE_TOKEN
    WHOLE = lib.SLUICE_GATE_WHOLE


class Shape(NamedTuple):
    """How much a region has room for; `prefixes` is rounded up to a power of two."""

    workers: int = 16
    subjects: int = 16384
    services: int = 256
    replicas: int = 1024
    tickets: int = 32768
    prefixes: int = 65536

    def size(self) -> int:
        """Bytes that a region of this shape takes."""
        size: int = lib.sluice_gate_size(self.to_c())
        if size == 0:
            Gate.format(bytearray(), self)  # refuses and says why
        return size

    def to_c(self) -> Any:
        """As ``struct sluice_gate_shape *``."""
        return ffi.new("struct sluice_gate_shape *", tuple(self))


class Limit(NamedTuple):
    """What a subject may use; None: no limit. A burst is what a full bucket holds: without it a minute's worth."""

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None
    queued: int | None = None
    requests_burst: int | None = None
    tokens_burst: int | None = None


class Refused(NamedTuple):
    """Why a request was refused: `limit` of the subject of kind `kind`, of which `used` is taken."""

    kind: Kind
    what: Reason
    limit: int
    used: int
    retry_after_us: int
    """Then the same request succeeds if nobody else asks meanwhile; 0: no time can be known, others must end first."""
    never: bool
    """It is larger than the limit: waiting does not help."""
    part: bool = False
    """It is this gate's part of the limit that is used up: another gate may have more."""


class Part(NamedTuple):
    """A gate's part of limits that several share: what is left of buckets (below 0: debt), what counts may reach."""

    requests: int = 0
    tokens: int = 0
    concurrent: int = 0
    queued: int = 0


class Kept(NamedTuple):
    """What a gate keeps of a part, and what it gives back."""

    part: Part
    requests_back: int
    tokens_back: int
    tokens_over: int
    """Settled beyond the part since the last time: given back, too."""
    open: int
    waiting: int


class Turn(NamedTuple):
    """A ticket whose turn it is, and its replica; `prefix_blocks` of its prefix are known to be there."""

    ticket: int
    replica: int
    slot: int
    tag: int
    prefix_blocks: int


class Settled(NamedTuple):
    """How a ticket ended: tokens reserved and used, and its times. `replica` 0, `granted_us` 0: it had no turn."""

    ticket: int
    tag: int
    key: int
    user: int
    tenant: int
    service: int
    replica: int
    reserved: int
    prompt_tokens: int
    completion_tokens: int
    admitted_us: int
    granted_us: int
    ended_us: int


class Replica(NamedTuple):
    """A replica that the gate knows."""

    name: int
    service: int
    slots: int
    in_flight: int
    tokens: int
    use: Use
    removed: bool
    standing: Standing
    standing_us: int
    """Out: until then, else since then."""
    slow: Time
    times_slower: int
    """Not in: it takes at least so many times as long as most of the others do, for `slow`; in: 0."""


class Service(NamedTuple):
    """A service now; `slots` and `replicas` are those usable and last; `oldest_us`: since when the first waits; `out`:
    usable ones that are slow, or on trial."""

    waiting: int
    in_flight: int
    tokens_waiting: int
    tokens_in_flight: int
    oldest_us: int
    slots: int
    replicas: int
    usable: int
    out: int


class Subject(NamedTuple):
    """A key, user, tenant or service now. What is left of a bucket is below 0 in debt, None without a limit."""

    limit: Limit
    weight: int
    open: int
    waiting: int
    tokens: int
    requests_left: int | None
    tokens_left: int | None
    refused: int


class Worker(NamedTuple):
    """A worker process in the gate."""

    worker: int
    pid: int
    start: int
    tickets: int


class Gate:
    """A view of a formatted region, e.g. an `mmap` that workers inherited, which it keeps alive.

    Every method raises CoreError with the core's own message.
    """

    def __init__(self, region: Region) -> None:
        self._region = ffi.from_buffer("unsigned char[]", region, require_writable=True)
        handle, self._text = ffi.new("struct sluice_gate **"), new_error_text()
        check(lib.sluice_gate_new(self._region, len(self._region), handle, self._text), self._text)
        self._gate = ffi.gc(handle[0], lib.sluice_gate_free)
        self._request = ffi.new("struct sluice_gate_request *")
        self._request_bytes = ffi.buffer(self._request)
        self._answer = ffi.new("struct sluice_gate_answer *")
        self._settled = ffi.new("struct sluice_gate_settled *")
        self._settled_bytes = memoryview(ffi.buffer(self._settled))
        self._took = ffi.new("struct sluice_gate_took *")
        self._changed = ffi.new("struct sluice_gate_replica *")
        self._turns = ffi.new("struct sluice_gate_turn[]", _BATCH)
        self._turn_bytes = memoryview(ffi.buffer(self._turns))
        self._tickets = ffi.new("uint64_t[]", _BATCH)
        self._next = ffi.new("uint64_t *")
        self._count = ffi.new("uint32_t *")

    @classmethod
    def format(cls, region: Region, shape: Shape) -> None:
        """Make an empty gate in `region`, before any other use of it."""
        memory, text = ffi.from_buffer("unsigned char[]", region, require_writable=True), new_error_text()
        check(lib.sluice_gate_format(memory, len(memory), shape.to_c(), text), text)

    @classmethod
    def create(cls, region: Region, shape: Shape) -> Self:
        """Format and open."""
        cls.format(region, shape)
        return cls(region)

    @property
    def shape(self) -> Shape:
        """What the region has room for."""
        shape = ffi.new("struct sluice_gate_shape *")
        lib.sluice_gate_get_shape(self._gate, shape)
        return Shape(*(getattr(shape, name) for name in Shape._fields))

    # ---- workers ----

    def join(self, pid: int, start: int, seat: int | None = None) -> int:
        """Enter a worker, on `seat` or on a free one; its id in further calls. The parent may do it for its child."""
        self._call(lib.sluice_gate_join, pid, start, 2**32 - 1 if seat is None else seat, self._count)
        return int(self._count[0])

    @staticmethod
    def seat(worker: int) -> int:
        """The worker's bit in `wakes`."""
        return worker % _MAX_SEATS

    def left(self, pid: int, start: int) -> list[Settled]:
        """What a worker would leave: tickets that were given a replica, with the tokens that it reported."""
        room = self.shape.tickets
        settled = ffi.new("struct sluice_gate_settled[]", room)
        self._call(lib.sluice_gate_left, pid, start, room, settled, self._count)
        found = ffi.buffer(settled)[: min(self._count[0], room) * _SETTLED.size]
        return [_settled(*values) for values in _SETTLED.iter_unpack(found)]

    def reap(self, pid: int, start: int, now_us: int) -> list[Settled]:
        """End all tickets of a worker that is dead, and free its seat; what it left that is to be billed.

        Who must not lose a bill when it dies itself in between writes down `left` first, then reaps.
        """
        settled = self.left(pid, start)
        self._call(lib.sluice_gate_reap, pid, start, now_us, self._count)
        return settled

    def workers(self) -> list[Worker]:
        """All workers in the gate."""
        workers = ffi.new("struct sluice_gate_worker[]", _MAX_SEATS)
        self._call(lib.sluice_gate_workers, _MAX_SEATS, workers, self._count)
        return [Worker(w.worker, w.pid, w.start, w.tickets) for w in workers[0 : self._count[0]]]

    # ---- limits and replicas: any process may set them, any number of times ----

    def set_limit(self, kind: Kind, subject: int, limit: Limit) -> None:
        """Limits of a subject; `Limit()` removes them."""
        self._call(lib.sluice_gate_set_limit, kind, subject, _limit(limit))

    def share(self, kind: Kind, subject: int, limit: Limit, *, convert: bool = False) -> None:
        """A subject's limits, `limit` in whole, are shared with other gates; it has nothing of them until `give`.

        One that has limits of its own keeps them, unless `convert`: then what it has is its part."""
        self._call(lib.sluice_gate_share, kind, subject, _limit(limit), convert)

    def give(self, kind: Kind, subject: int, now_us: int, more: Part) -> None:
        """Add requests and tokens to a part, and set its counts."""
        self._call(lib.sluice_gate_give, kind, subject, now_us, ffi.new("struct sluice_gate_part *", tuple(more)))

    def keep(self, kind: Kind, subject: int, now_us: int, most: Part) -> Kept:
        """Keep at most so much of a part."""
        kept = ffi.new("struct sluice_gate_kept *")
        self._call(lib.sluice_gate_keep, kind, subject, now_us, ffi.new("struct sluice_gate_part *", tuple(most)), kept)
        part = kept.part
        return Kept(
            Part(part.requests, part.tokens, part.concurrent, part.queued),
            kept.requests_back, kept.tokens_back, kept.tokens_over, kept.open, kept.waiting,
        )  # fmt: skip

    def parts_until(self, until_us: int) -> None:
        """All parts hold until then; 0: none does."""
        self._call(lib.sluice_gate_parts_until, until_us)

    def set_weight(self, tenant: int, weight: int) -> None:
        """A tenant's share in all queues, 1 unless set."""
        self._call(lib.sluice_gate_set_weight, tenant, weight)

    def set_replica(self, name: int, service: int, slots: int, use: Use = Use.USABLE) -> int:
        """Make a replica known, or change it; its slot."""
        self._call(lib.sluice_gate_set_replica, name, service, slots, use, self._count)
        return int(self._count[0])

    def remove_replica(self, name: int) -> None:
        """It gets nothing more, and is forgotten as soon as nothing is in flight to it."""
        self._call(lib.sluice_gate_remove_replica, name)

    def replicas(self) -> list[Replica]:
        """All replicas that are known."""
        room = self.shape.replicas
        found = ffi.new("struct sluice_gate_replica[]", room)
        self._call(lib.sluice_gate_replicas, room, found, self._count)
        return [_replica(r) for r in found[0 : self._count[0]]]

    # ---- requests ----

    def admit(
        self,
        worker: int,
        now_us: int,
        *,
        key: int,
        user: int,
        tenant: int,
        service: int,
        tokens: int,
        prompt_tokens: int = 0,
        priority: int = 0,
        deadline_us: int = 0,
        prefix: Sequence[int] = (),
        may_start: bool = True,
        tag: int = 0,
    ) -> int | Refused:
        """A ticket, or why not.

        `tokens` are reserved, `prompt_tokens` of them for the prompt. It waits for its turn until `deadline_us` (0: for
        ever); with `may_start` also where the service has no replica yet. `prefix`: a hash of all of the prompt up to
        the end of each block, shortest first. `tag`: 128 bits of the caller's, e.g. the request's id.
        """
        request, count = self._request, min(len(prefix), MAX_PREFIX)
        _put_request(
            self._request_bytes, 0, key, user, tenant, service, tag & _NONE, tag >> 64, tokens, prompt_tokens,
            deadline_us, priority, not may_start, count,
        )  # fmt: skip
        if count:
            request.prefix[0:count] = prefix[:count]
        answer = self._answer
        error = lib.sluice_gate_admit(self._gate, worker, now_us, request, answer, self._text)
        if error:
            check(error, self._text)
        if answer.ticket:
            return int(answer.ticket)
        never = answer.retry_after_us == _NONE
        return Refused(
            Kind(answer.kind),
            Reason(answer.reason),
            answer.limit,
            answer.used,
            0 if never else answer.retry_after_us,
            never,
            bool(answer.part),
        )

    def turn(self, worker: int, now_us: int) -> list[Turn]:
        """Give free places to waiting tickets of all workers, in fair order; those of this worker, each once."""
        granted: list[Turn] = []
        while True:
            error = lib.sluice_gate_turn(self._gate, worker, now_us, _BATCH, self._turns, self._count, self._text)
            if error:
                check(error, self._text)
            count = self._count[0]
            if not count:
                return granted
            for ticket, replica, low, high, slot, prefix_blocks in _TURN.iter_unpack(
                self._turn_bytes[: count * _TURN.size]
            ):
                granted.append(Turn(ticket, replica, slot, high << 64 | low, prefix_blocks))
            if count < _BATCH:
                return granted

    def wakes(self) -> int:
        """Bit s: the worker on seat s has turns or expired tickets to fetch; it stays set until it has fetched them."""
        return int(lib.sluice_gate_wakes(self._gate))

    def expired(self, worker: int, now_us: int) -> list[int]:
        """This worker's tickets whose deadline passed while they waited, each once; each must still be abandoned."""
        expired: list[int] = []
        while True:
            self._call(lib.sluice_gate_expired, worker, now_us, _BATCH, self._tickets, self._count, self._next)
            expired.extend(self._tickets[0 : self._count[0]])
            if self._count[0] < _BATCH:
                return expired

    @property
    def next_deadline_us(self) -> int:
        """When `expired` is to be called next, as its latest call found; 0: nothing waits that has a deadline."""
        return int(self._next[0])

    def again(self, ticket: int, now_us: int, avoid: int = 0, deadline_us: int | None = None) -> None:
        """The ticket's replica failed: it waits again, first of its tenant; replica `avoid` is a last resort."""
        deadline = _NONE if deadline_us is None else deadline_us
        self._call(lib.sluice_gate_again, ticket, now_us, avoid, deadline)

    def progress(self, ticket: int, completion_tokens: int, prompt_tokens: int = 0) -> None:
        """What the ticket has used so far, for its bill if this process dies; 0 prompt tokens: as admitted."""
        error = lib.sluice_gate_progress(self._gate, ticket, prompt_tokens, completion_tokens, self._text)
        if error:
            check(error, self._text)

    def took(
        self, ticket: int, now_us: int, time: Time, us: int, *, tokens: int = 0, so_far: bool = False
    ) -> Replica | None:
        """What the ticket's replica took for it; the replica, where it is out or in by that.

        `tokens`: of a whole answer. `so_far`: it is not over, and takes at least so long."""
        took, changed = self._took, self._changed
        took.us, took.tokens, took.time, took.so_far = us, tokens, time, so_far
        error = lib.sluice_gate_took(self._gate, ticket, now_us, took, changed, self._text)
        if error:
            check(error, self._text)
        return _replica(changed) if changed.name else None

    def settle(self, ticket: int, now_us: int, prompt_tokens: int, completion_tokens: int) -> Settled:
        """End a ticket with the tokens that it used; what it reserved beyond them goes back, more becomes debt."""
        error = lib.sluice_gate_settle(
            self._gate, ticket, now_us, prompt_tokens, completion_tokens, self._settled, self._text
        )
        if error:
            check(error, self._text)
        return _settled(*_SETTLED.unpack(self._settled_bytes))

    def abandon(self, ticket: int, now_us: int) -> Settled:
        """End a ticket with the tokens reported by `progress`: none where it reported no completion."""
        self._call(lib.sluice_gate_abandon, ticket, now_us, self._settled)
        return _settled(*_SETTLED.unpack(self._settled_bytes))

    # ---- figures ----

    def service(self, service: int) -> Service:
        """A service's figures; all 0 where it is not known."""
        figures = ffi.new("struct sluice_gate_service *")
        self._call(lib.sluice_gate_get_service, service, figures)
        return Service(*(getattr(figures, name) for name in Service._fields))

    def subject(self, kind: Kind, subject: int, now_us: int) -> Subject:
        """A subject's figures, its buckets as of now."""
        figures = ffi.new("struct sluice_gate_subject *")
        self._call(lib.sluice_gate_get_subject, kind, subject, now_us, figures)
        limit = Limit(*(_amount(getattr(figures.limit, name), _NONE) for name in Limit._fields))
        return Subject(
            limit,
            figures.weight,
            figures.open,
            figures.waiting,
            figures.tokens,
            _amount(figures.requests_left, 2**63 - 1),
            _amount(figures.tokens_left, 2**63 - 1),
            figures.refused,
        )

    def audit(self) -> None:
        """Raise CoreError unless all sums, queues and lists are what the tickets say. For tests: others wait."""
        self._call(lib.sluice_gate_audit)

    def _call(self, function: Any, *arguments: Any) -> None:
        check(function(self._gate, *arguments, self._text), self._text)


def _limit(limit: Limit) -> Any:
    amounts = [_NONE if amount is None else amount for amount in limit[:4]] + [amount or 0 for amount in limit[4:]]
    return ffi.new("struct sluice_gate_limit *", amounts)


def _amount(amount: int, none: int) -> int | None:
    return None if amount == none else amount


def _replica(replica: Any) -> Replica:
    return Replica(
        replica.name, replica.service, replica.slots, replica.in_flight, replica.tokens, Use(replica.state),
        bool(replica.removed), Standing(replica.standing), replica.standing_us, Time(replica.slow_time),
        replica.times_slower,
    )  # fmt: skip


def _settled(ticket: int, low: int, high: int, *rest: int) -> Settled:
    return Settled(ticket, high << 64 | low, *rest)
