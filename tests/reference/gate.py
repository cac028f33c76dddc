"""What the core's request gate must decide, written plainly from the rules in ``sluice/core.h``: no heap, no table.

Every sum is computed again from the tickets whenever it is asked for; what is first is found by sorting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.core.gate import Kind, Limit, Reason, Refused, Settled, Standing, Time, Turn, Use

MINUTE_US = 60_000_000
LEAD = 32768 << 16
AGE_S = 600
WAYS = 8


@dataclass(eq=False)
class Bucket:
    """Tokens times MINUTE_US, so that a rate a minute is a rate a microsecond."""

    rate: int
    burst: int
    level: int
    at_us: int

    def at(self, now_us: int) -> int:
        return min(self.burst * MINUTE_US, self.level + self.rate * (now_us - self.at_us))

    def change(self, now_us: int, amount: int) -> None:
        self.level, self.at_us = min(self.burst * MINUTE_US, self.at(now_us) + amount * MINUTE_US), now_us

    def wait(self, now_us: int, amount: int) -> int | None:
        """Microseconds until `amount` is there; None: never."""
        missing = amount * MINUTE_US - self.at(now_us)
        if amount > self.burst or (missing > 0 and not self.rate):
            return None
        return max(0, -(-missing // self.rate)) if missing > 0 else 0


@dataclass
class Subject:
    limit: Limit = field(default_factory=Limit)
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass
class Flow:
    start: int
    epoch: int = 0


@dataclass
class Service:
    virtual: int = 1 << 40
    flows: dict[int, Flow] = field(default_factory=dict)


def log2(value: int) -> int:
    """With 24 fraction bits, rounded down."""
    value = max(value, 1)
    exponent = value.bit_length() - 1
    mantissa, result = value << (63 - exponent), exponent
    for _ in range(24):
        square = mantissa * mantissa
        carry = square >> 127
        mantissa = square >> (63 + carry)
        result = result << 1 | carry
    return result


@dataclass
class Pace:
    """Averages of logarithms: microseconds, tokens of the prompt, of the answer, requests at a time."""

    terms: list[int] = field(default_factory=lambda: [0] * 4)
    count: int = 0
    second: int = 0

    def add(self, sample: list[int], second: int) -> None:
        self.count, self.second = min(self.count + 1, 8), second
        for i in range(4):
            difference = sample[i] - self.terms[i]
            self.terms[i] += abs(difference) // self.count * (1 if difference > 0 else -1)

    def level_over(self, other: Pace) -> int:
        more = [max(0, a - b) for a, b in zip(self.terms, other.terms, strict=True)]
        excess = self.terms[0] - other.terms[0] - more[1] - more[2] - more[3] // 2
        return min(max(excess, 0) >> 24, 15)


@dataclass(eq=False)
class Replica:
    name: int
    service: int
    slot: int
    slots: int
    use: Use
    removed: bool = False
    standing: Standing = Standing.IN
    standing_us: int = 0
    times_out: int = 0
    slow: tuple[Time, bool] = (Time.FIRST, False)
    paces: dict[tuple[Time, bool], Pace] = field(default_factory=dict)

    @property
    def out(self) -> bool:
        return not self.removed and self.use == Use.USABLE and self.standing != Standing.IN


@dataclass(eq=False)
class Ticket:
    id: int
    worker: int
    subjects: tuple[int, int, int, int]
    tag: int
    tokens: int
    prompt: int
    priority: int
    deadline: int
    prefix: tuple[int, ...]
    admitted: int
    sequence: int
    buckets: list[Bucket | None]
    state: str = "waiting"
    since: int = 0
    front: bool = False
    replica: Replica | None = None
    replica_name: int = 0
    blocks: int = 0
    granted: int = 0
    avoid: int = 0
    cost: int = 0
    epoch: int = 0
    completion: int = 0

    @property
    def service(self) -> int:
        return self.subjects[Kind.SERVICE]

    @property
    def tenant(self) -> int:
        return self.subjects[Kind.TENANT]

    def place(self) -> tuple[int, int, int]:
        return (0 if self.front else 8 - self.priority, self.deadline or 1 << 62, self.sequence)


def mix(value: int) -> int:
    """MurmurHash3's finaliser."""
    mask = 2**64 - 1
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & mask
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & mask
    return value ^ value >> 33


class Reference:
    """A gate whose tickets are named by the caller."""

    def __init__(self, tickets: int, prefixes: int) -> None:
        self.room = tickets
        self.now = 0
        self.sequence = 0
        self.subjects: dict[tuple[int, int], Subject] = {}
        self.weights: dict[int, int] = {}
        self.services: dict[int, Service] = {}
        self.replicas: dict[int, Replica] = {}
        self.free_slots: list[int] = []
        self.fresh_slots = 0
        self.tickets: dict[int, Ticket] = {}
        self.dirty: list[int] = []
        self.turns: dict[int, list[Ticket]] = {}
        self.late: dict[int, list[Ticket]] = {}
        self.sets: list[list[tuple[int, Replica, int] | None]] = [[None] * WAYS for _ in range(prefixes // WAYS)]

    # ---- what follows from the tickets ----

    def open(self, kind: int, id_: int, state: str | None = None) -> list[Ticket]:
        return [t for t in self.tickets.values() if t.subjects[kind] == id_ and state in (None, t.state)]

    def on(self, replica: Replica) -> list[Ticket]:
        return [t for t in self.tickets.values() if t.replica is replica]

    def usable(self, service: int) -> list[Replica]:
        return [r for r in self.replicas.values() if r.service == service and not r.removed and r.use != Use.NO]

    def free(self, replica: Replica) -> int:
        slots = replica.slots
        if replica.out:
            slots = min(slots, 1) if replica.standing == Standing.TRIAL else 0
        return max(0, slots - len(self.on(replica)))

    def places(self, service: int) -> int:
        return sum(map(self.free, self.usable(service)))

    def mark(self, service: int) -> None:
        if service not in self.dirty and self.places(service) and self.open(Kind.SERVICE, service, "waiting"):
            self.dirty.append(service)

    def time(self, now_us: int) -> int:
        self.now = max(self.now, now_us)
        return self.now

    # ---- what is set ----

    def set_limit(self, kind: Kind, id_: int, limit: Limit) -> None:
        subject = self.subjects.setdefault((kind, id_), Subject())
        subject.requests = self.bucket(subject.requests, limit.requests, limit.requests_burst)
        subject.tokens = self.bucket(subject.tokens, limit.tokens, limit.tokens_burst)
        subject.limit = limit

    def bucket(self, before: Bucket | None, rate: int | None, burst: int | None) -> Bucket | None:
        if rate is None:
            return None
        if before is None:
            return Bucket(rate, burst or rate, (burst or rate) * MINUTE_US, self.now)
        before.level, before.at_us = before.at(self.now), self.now
        before.rate, before.burst = rate, burst or rate
        before.level = min(before.level, before.burst * MINUTE_US)
        return before

    def set_replica(self, name: int, service: int, slots: int, use: Use) -> int:
        if name not in self.replicas:
            if not self.free_slots:
                self.free_slots.append(self.fresh_slots)
                self.fresh_slots += 1
            self.replicas[name] = Replica(name, service, self.free_slots.pop(), slots, use)
            self.services.setdefault(service, Service())
        replica = self.replicas[name]
        replica.slots, replica.use, replica.removed = slots, use, False
        self.bound_out(service)
        self.mark(service)
        return replica.slot

    def remove_replica(self, name: int) -> None:
        self.replicas[name].removed = True
        self.bound_out(self.replicas[name].service)
        self.mark(self.replicas[name].service)
        self.forget(self.replicas[name])

    def forget(self, replica: Replica) -> None:
        if replica.removed and not self.on(replica):
            del self.replicas[replica.name]
            self.free_slots.append(replica.slot)

    # ---- slow replicas ----

    def most_out(self, service: int) -> int:
        usable = len([r for r in self.usable(service) if r.use == Use.USABLE])
        return max(usable // 3, min(1, usable // 2))

    def outs(self, service: int) -> list[Replica]:
        return [r for r in self.usable(service) if r.out]

    def bound_out(self, service: int) -> None:
        while len(outs := self.outs(service)) > self.most_out(service):
            known = list(self.replicas.values())
            self.stand(min(outs, key=lambda r: (r.standing_us, known.index(r))), Standing.IN, self.now)

    def stand(self, replica: Replica, standing: Standing, at_us: int) -> None:
        replica.standing, replica.standing_us = standing, at_us
        for pace in replica.paces.values():
            pace.count = 0
        self.mark(replica.service)

    def level(self, replica: Replica, kind: tuple[Time, bool], pace: Pace) -> int:
        others = [
            pace.level_over(r.paces[kind])
            for r in self.usable(replica.service)
            if r is not replica and r.use == Use.USABLE and r.standing == Standing.IN and kind in r.paces
            and r.paces[kind].count >= 8 and pace.second - r.paces[kind].second <= 60
        ]  # fmt: skip
        return max((one for one in range(16) if 2 * sum(other >= one for other in others) > len(others)), default=0)

    def took(self, id_: int, now_us: int, time: Time, us: int, tokens: int, so_far: bool) -> Replica | None:
        """The replica, where its standing is another one."""
        self.time(now_us)
        ticket = self.tickets[id_]
        replica = ticket.replica
        assert replica is not None
        before = replica.standing
        if replica.removed or before == Standing.OUT:
            return None
        if before == Standing.TRIAL and ticket.granted < replica.standing_us:
            return None
        kind = (time, time != Time.TOKEN and ticket.blocks > 0)
        prompt = 0 if time == Time.TOKEN else ticket.prompt
        sample = Pace([log2(us), log2(prompt), log2(tokens), log2(len(self.on(replica)))], 8, self.now // 10**6)
        if so_far and (us < 10_000 or self.level(replica, kind, sample) < 2):
            return None
        pace = replica.paces.setdefault(kind, Pace())
        pace.add(sample.terms, sample.second)
        self.judge(replica, kind, pace)
        return replica if replica.standing != before else None

    def judge(self, replica: Replica, kind: tuple[Time, bool], pace: Pace) -> None:
        trial = replica.standing == Standing.TRIAL
        if pace.count < (4 if trial else 8):
            return
        level = self.level(replica, kind, pace) if pace.terms[0] >= log2(10_000) else 0
        if trial and level >= 1:
            self.put_out(replica, kind)
        elif trial and pace.count == 8 and (kind == replica.slow or self.now - replica.standing_us >= 60_000_000):
            self.stand(replica, Standing.IN, self.now)
        elif (
            not trial and level >= 2 and replica.use == Use.USABLE
            and len(self.outs(replica.service)) < self.most_out(replica.service)
        ):  # fmt: skip
            self.put_out(replica, kind)

    def put_out(self, replica: Replica, kind: tuple[Time, bool]) -> None:
        if replica.standing == Standing.IN and self.now - replica.standing_us > 600_000_000:
            replica.times_out = 0
        seconds = min(10 * 2 ** min(replica.times_out, 10), 300)
        replica.times_out, replica.slow = replica.times_out + 1, kind
        self.stand(replica, Standing.OUT, self.now + seconds * 10**6)

    def begin_trial(self) -> None:
        due = [r for r in self.replicas.values() if r.standing == Standing.OUT and r.standing_us <= self.now]
        if due:
            self.stand(min(due, key=lambda r: r.slot), Standing.TRIAL, self.now)

    # ---- requests ----

    def refusals(self, subjects: tuple[int, int, int, int], tokens: int, may_start: bool) -> list[Refused]:
        found: list[Refused] = []
        service = subjects[Kind.SERVICE]
        waits = self.places(service) <= len(self.open(Kind.SERVICE, service, "waiting"))

        def refuse(kind: Kind, what: Reason, limit: int, used: int, after: int | None) -> None:
            found.append(Refused(kind, what, limit, used, after or 0, after is None))

        for kind in Kind:
            subject = self.subjects.get((kind, subjects[kind]))
            if subject is None or not subjects[kind]:
                continue
            for what, bucket, amount in (
                (Reason.REQUESTS, subject.requests, 1),
                (Reason.TOKENS, subject.tokens, tokens),
            ):
                if bucket and (after := bucket.wait(self.now, amount)) != 0:
                    refuse(kind, what, bucket.burst, bucket.burst - bucket.at(self.now) // MINUTE_US, after)
            limit, used = subject.limit.concurrent, len(self.open(kind, subjects[kind]))
            if limit is not None and used >= limit:
                refuse(kind, Reason.CONCURRENT, limit, used, 0 if limit else None)
            limit, used = subject.limit.queued, len(self.open(kind, subjects[kind], "waiting"))
            if limit is not None and waits and used >= limit:
                refuse(kind, Reason.QUEUED, limit, used, 0)
        if not may_start and not self.usable(service):
            refuse(Kind.SERVICE, Reason.NO_REPLICAS, 0, 0, 0)
        if len(self.tickets) == self.room:
            refuse(Kind.SERVICE, Reason.FULL, self.room, self.room, 0)
        return found

    def admit(
        self,
        id_: int,
        worker: int,
        now_us: int,
        subjects: tuple[int, int, int, int],
        tokens: int,
        prompt: int,
        priority: int,
        deadline: int,
        prefix: tuple[int, ...],
        may_start: bool,
        tag: int,
    ) -> Refused | None:
        self.time(now_us)
        refusals = self.refusals(subjects, tokens, may_start)
        if refusals:
            return max(refusals, key=lambda r: (2 if r.never else r.retry_after_us == 0, r.retry_after_us))
        buckets: list[Bucket | None] = []
        for kind in Kind:
            subject = self.subjects.get((kind, subjects[kind])) if subjects[kind] else None
            if subject and subject.requests:
                subject.requests.change(self.now, -1)
            if subject and subject.tokens:
                subject.tokens.change(self.now, -tokens)
            buckets.append(subject.tokens if subject else None)
        self.sequence += 1
        ticket = Ticket(
            id_,
            worker,
            subjects,
            tag,
            tokens,
            prompt,
            priority,
            deadline,
            prefix,
            self.now,
            self.sequence,
            buckets,
        )
        self.tickets[id_] = ticket
        self.services.setdefault(ticket.service, Service())
        self.enqueue(ticket)
        return None

    def flow(self, ticket: Ticket) -> Flow:
        service = self.services[ticket.service]
        return service.flows.setdefault(ticket.tenant, Flow(service.virtual))

    def enqueue(self, ticket: Ticket) -> None:
        flow, service = self.flow(ticket), self.services[ticket.service]
        others = [t for t in self.open(Kind.SERVICE, ticket.service, "waiting") if t.tenant == ticket.tenant]
        if not [t for t in others if t is not ticket] and flow.start < service.virtual:
            flow.start = service.virtual
            flow.epoch += 1
        ticket.state, ticket.since = "waiting", self.now
        self.mark(ticket.service)

    def expire(self) -> None:
        due = [t for t in self.tickets.values() if t.state == "waiting" and 0 < t.deadline <= self.now]
        for ticket in sorted(due, key=lambda t: (t.deadline, t.sequence)):
            ticket.state = "expired"
            self.late.setdefault(ticket.worker, []).append(ticket)

    def grant(self, service_id: int) -> None:
        service = self.services[service_id]
        heads: dict[int, Ticket] = {}
        for ticket in sorted(self.open(Kind.SERVICE, service_id, "waiting"), key=Ticket.place):
            heads.setdefault(ticket.tenant, ticket)

        def key(ticket: Ticket) -> tuple[int, int]:
            return self.flow(ticket).start - LEAD * ticket.priority, ticket.sequence

        ticket = min(heads.values(), key=key)
        flow = self.flow(ticket)
        service.virtual = max(service.virtual, key(ticket)[0])
        ticket.cost = (max(ticket.tokens, 1) << 16) // self.weights.get(ticket.tenant, 1)
        ticket.epoch = flow.epoch
        flow.start += ticket.cost
        ticket.replica, ticket.blocks = self.choose(ticket)
        ticket.replica_name, ticket.granted, ticket.state = ticket.replica.name, self.now, "granted"
        self.remember(ticket.prefix, ticket.replica)
        self.turns.setdefault(ticket.worker, []).append(ticket)

    def choose(self, ticket: Ticket) -> tuple[Replica, int]:
        def rank(replica: Replica) -> int:
            return 2 if replica.name == ticket.avoid else int(replica.use)

        def load(replica: Replica) -> tuple[int, int]:
            return sum(t.tokens for t in self.on(replica)), replica.slot

        def slots_of(replica: Replica) -> int:
            return min(replica.slots, 1) if replica.out else replica.slots

        chosen = [r for r in self.usable(ticket.service) if not (r.out and r.standing == Standing.OUT)]
        for replica in chosen:
            if replica.out and self.free(replica) and replica.name != ticket.avoid and not ticket.front:
                return replica, 0
        best = min(rank(r) for r in chosen if self.free(r))
        group = [r for r in chosen if rank(r) == best]
        free = [r for r in group if self.free(r)]
        in_flight, slots = sum(len(self.on(r)) for r in group), sum(map(slots_of, group))
        suited = [r for r in free if len(self.on(r)) + 1 <= -(-5 * (in_flight + 1) * slots_of(r) // (4 * slots))]
        for blocks in range(len(ticket.prefix), 0, -1):
            known = [r for r in suited if self.knows(ticket.prefix[blocks - 1], r)]
            if known:
                return min(known, key=load), blocks
        return min(free, key=load), 0

    # ---- prefixes ----

    def ways(self, block: int) -> list[tuple[int, Replica, int] | None]:
        return self.sets[mix(block) % len(self.sets)]

    def there(self, entry: tuple[int, Replica, int] | None) -> bool:
        return entry is not None and entry[1] in self.replicas.values() and self.now // 10**6 - entry[2] <= AGE_S

    def knows(self, block: int, replica: Replica) -> bool:
        return any(e and e[0] == block and e[1] is replica and self.there(e) for e in self.ways(block))

    def remember(self, prefix: tuple[int, ...], replica: Replica) -> None:
        for block in prefix:
            ways = self.ways(block)
            own = [i for i, e in enumerate(ways) if e and e[0] == block and e[1] is replica and self.there(e)]
            unused = [i for i, e in enumerate(ways) if not self.there(e)]
            oldest = sorted(range(WAYS), key=lambda i: (entry[2] if (entry := ways[i]) else 0, i))
            ways[(own or unused or oldest)[0]] = (block, replica, self.now // 10**6)

    # ---- turns and ends ----

    def turn(self, worker: int, now_us: int) -> list[Turn]:
        self.time(now_us)
        self.expire()
        self.begin_trial()
        while self.dirty:
            service = self.dirty[0]
            if self.places(service) and self.open(Kind.SERVICE, service, "waiting"):
                self.grant(service)
            else:
                self.dirty.pop(0)
        mine = self.turns.pop(worker, [])
        for ticket in mine:
            ticket.state = "in flight"
        return [Turn(t.id, t.replica_name, t.replica.slot if t.replica else 0, t.tag, t.blocks) for t in mine]

    def expired(self, worker: int, now_us: int) -> list[int]:
        self.time(now_us)
        self.expire()
        return [ticket.id for ticket in self.late.pop(worker, [])]

    def wakes(self) -> set[int]:
        return {worker for worker, mine in [*self.turns.items(), *self.late.items()] if mine}

    def leave(self, ticket: Ticket, used: int) -> None:
        for lists in (self.turns, self.late):
            lists[ticket.worker] = [t for t in lists.get(ticket.worker, []) if t is not ticket]
        replica, ticket.replica = ticket.replica, None
        if replica is None:
            return
        self.forget(replica)
        self.mark(ticket.service)
        flow = self.flow(ticket)
        if ticket.epoch == flow.epoch:
            flow.start += ticket.cost * used // max(ticket.tokens, 1) - ticket.cost

    def again(self, id_: int, now_us: int, avoid: int, deadline: int | None) -> None:
        self.time(now_us)
        ticket = self.tickets[id_]
        self.leave(ticket, 0)
        ticket.front, ticket.avoid = True, avoid
        ticket.deadline = ticket.deadline if deadline is None else deadline
        self.enqueue(ticket)

    def end(self, id_: int, now_us: int, prompt: int, completion: int) -> Settled:
        self.time(now_us)
        ticket = self.tickets[id_]
        ticket.state = "ended"
        self.leave(ticket, max(prompt + completion, 1))
        for kind in Kind:
            bucket = ticket.buckets[kind]
            subject = self.subjects.get((kind, ticket.subjects[kind]))
            if bucket is not None and subject is not None and subject.tokens is bucket:
                bucket.change(self.now, ticket.tokens - prompt - completion)
        del self.tickets[id_]
        return self.describe(ticket, prompt, completion)

    def abandon(self, id_: int, now_us: int) -> Settled:
        ticket = self.tickets[id_]
        return self.end(id_, now_us, ticket.prompt if ticket.completion else 0, ticket.completion)

    def describe(self, ticket: Ticket, prompt: int, completion: int) -> Settled:
        return Settled(
            ticket.id,
            ticket.tag,
            *ticket.subjects,
            ticket.replica_name,
            ticket.tokens,
            prompt,
            completion,
            ticket.admitted,
            ticket.granted,
            self.now,
        )
