"""One request from its body to its bill: limits, its turn, a replica, the answer; another replica where one fails."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final, Protocol, cast

from sluice.core.gate import Gate, Refused, Time
from sluice.exchange.requests import Outcome, RequestRecord
from sluice.exchange.serving import Priority, ReplicaRow, ServiceRow
from sluice.serve.gateway import body, bounds, continuation, heads
from sluice.serve.gateway.body import Asked
from sluice.serve.gateway.claims import Names, Verdict
from sluice.serve.gateway.client import Client, Handler, Request
from sluice.serve.gateway.continuation import Plan, Rewriter, Story
from sluice.serve.gateway.directory import Directory
from sluice.serve.gateway.figures import Delays, Figures
from sluice.serve.gateway.keys import Caller
from sluice.serve.gateway.parts import Parts, Waiting
from sluice.serve.gateway.refusals import RefusalError, failed_request
from sluice.serve.gateway.repeated import Repeated
from sluice.serve.gateway.sse import Events, Kind, TooLongError, document_of, event_of, kind_of
from sluice.serve.gateway.subjects import Subjects, over_limit
from sluice.serve.gateway.upstream import Pool, Upstream
from sluice.serve.gateway.usage import TAIL, Usage, usage_at_end, usage_of

_PRIORITY: Final[dict[Priority, int]] = {"low": 1, "normal": 3, "high": 5}
_LOWER: Final = {b"low": "low", b"normal": "normal", b"high": "high"}
_ELSEWHERE: Final = frozenset((429, 502, 503, 504))
"""What a replica answers that may well be another's to answer."""
_DONE: Final = b"data: [DONE]\n\n"
_WAITING: Final = b": waiting\n\n"
_ENDS: Final = frozenset(("response.completed", "response.incomplete", "response.failed"))
_PROGRESS: Final = 8  # parts of an answer between two reports to the gate
_BYTES_A_TOKEN: Final = 4
_UNKNOWN_S: Final = 0.05

log = logging.getLogger("sluice.gateway")


class Worker(Protocol):
    """What calls need of their worker."""

    number: int
    gate: Gate
    loop: asyncio.AbstractEventLoop
    directory: Directory
    pools: dict[int, Pool]
    calls: dict[int, Call]
    waiting: dict[int, Call]
    metrics: Figures
    delays: Delays
    parts: Parts
    names: Names
    repeated: Repeated

    def subjects(self, key: str, user: str, tenant: str, service: str) -> tuple[int, int, int, int]:
        """The gate's numbers of them. Raises RefusalError."""

    def check_budget(self, tenant: str) -> None:
        """Raises RefusalError where a tenant has used what it may use."""

    def check_records(self) -> None:
        """Raises RefusalError where the bill of another request might be lost."""

    def salt(self, tenant: str) -> bytes:
        """Prompts are compared within a tenant alone."""

    def turn(self) -> None:
        """Begin those whose turn it is."""

    def turn_soon(self) -> None:
        """After what is being done now."""

    def has_replica(self, service: str) -> bool:
        """Whether one is ready."""

    def demand_now(self, service: str) -> None:
        """Nobody can serve it: say so at once."""

    def failed(self, pool: Pool, why: str, *, surely: bool) -> None:
        """A replica failed."""

    def took(self, call: Call, time: Time, seconds: float, tokens: int = 0, *, so_far: bool = False) -> None:
        """What a call's replica took: slow ones get nothing for a while."""

    def refuse(self, client: Client, request: Request, refusal: RefusalError, call: Call | None = None) -> None:
        """Answer that there is no answer."""

    def log_prompt(self, call: Call) -> None:
        """A request was admitted."""

    def write(self, record: RequestRecord, *, request_id: str, repeated: bool) -> None:
        """A request has ended."""


class Call(Handler):
    """The request. What its parts tell it ends in exactly one of `_succeed`, `_refuse`, `_fail` and `_cancel`."""

    __slots__ = (
        "_before",
        "_begun",
        "_claim",
        "_count",
        "_counting",
        "_done",
        "_events",
        "_first",
        "_granted",
        "_head",
        "_headers",
        "_kept",
        "_kept_size",
        "_last",
        "_last_comment",
        "_paced",
        "_passing",
        "_patience",
        "_plain",
        "_plan",
        "_pool",
        "_read",
        "_rest",
        "_rewriter",
        "_story",
        "_tries",
        "_turn",
        "_usage",
        "_waits_since",
        "_why_not",
        "admitted",
        "asked",
        "billed",
        "caller",
        "client",
        "deadline",
        "named",
        "over",
        "record_id",
        "replica",
        "request",
        "resumed",
        "service",
        "status",
        "tenant",
        "ticket",
        "upstream",
        "wanted_counts",
        "wanted_ids",
        "worker",
    )  # fmt: skip

    def __init__(self, worker: Worker, client: Client, request: Request) -> None:
        self.worker = worker
        self.client = client
        self.request = request
        self.record_id = request.id
        self.caller: Caller | None = None
        self.tenant = ""
        self.service: ServiceRow | None = None
        self.asked: Asked | None = None
        self.ticket = 0
        self.admitted = 0.0
        self.deadline = 0.0
        self.replica: ReplicaRow | None = None
        self.upstream: Upstream | None = None
        self.resumed = 0
        self.status = 200
        self.over = False
        self.wanted_ids = self.wanted_counts = False
        self.named = self.billed = False
        """Whether the client has a name for it, and whether what was sent by that name before has a bill."""
        self._claim = ""  # its name, where nobody else may answer by it
        self._why_not: str | None = None  # see `why_not_resumable`
        self._before = 0  # tokens of a stream that the client has already
        self._rest = ""  # what a bill for the rest of it is remembered by
        self._counting = False  # all was said: another replica is asked how long the prompt is
        self._pool: Pool | None = None
        self._begun = False  # the head of the answer was sent
        self._passing = False  # an answer that is not streamed is passed on while it comes
        self._events: Events | None = None  # of a stream
        self._story: Story | None = None
        self._plan: Plan | None = None
        self._rewriter: Rewriter | None = None
        self._head = 0  # status of the replica's answer; 0: it has not come
        self._headers: dict[bytes, bytes] = {}
        self._kept: list[bytes] = []
        self._kept_size = 0
        self._last: list[bytes] = []  # the end of a stream, which is sent after its record is written
        self._usage: Usage | None = None
        self._count = 0
        self._first: float | None = None
        self._read = 0  # tokens of the prompt that the replica has
        self._granted = 0.0
        self._turn = 0.0  # when the replica that it has now got it
        self._paced = 0.0  # when the latest parts of a stream came whose time was taken; 0: not known
        self._patience = bounds.PATIENCE_S
        self._plain: bool | None = None  # times of it are compared; found out once
        self._done = False
        self._tries = 0
        self._waits_since = 0.0
        self._last_comment = 0.0

    def why_not_resumable(self) -> str:
        """Why nobody could go on with its stream; empty: somebody could. Found out once, when it is first needed."""
        found = self._why_not
        if found is None:
            asked = cast(Asked, self.asked)
            found = self._why_not = continuation.why_not(asked) if asked.stream else "it does not stream"
        return found

    # ---- admission ----

    def begin(self, caller: Caller) -> None:
        """Everything up to the queue. Raises RefusalError."""
        worker, request = self.worker, self.request
        self.caller = caller
        route = request.route
        if route is None or route.ability is None:
            raise RefusalError(404, "path: answers no call", remedy="see docs/serve-gateway.md")
        directory = worker.directory
        directory.check_complete()
        self.tenant = tenant = directory.tenant(caller.user, request.headers.get(b"sluice-tenant"))
        self.asked = asked = body.read(route.ability, request.body())
        self.service = service = directory.service(asked.model, tenant)
        directory.check_ability(service, route.ability, route.path)
        seconds = heads.deadline(request.headers, bounds.MOST_DEADLINE_S)
        self.deadline = request.begun + (service.deadline_s if seconds is None else seconds)
        name = heads.idempotency_key(request.headers)
        if name is not None:
            self.record_id, self.billed = worker.repeated.name(caller.key, name, asked.document)
            self.named = True
        if asked.resume is not None:
            if name is None:
                raise RefusalError(
                    400,
                    "sluice_resume: without the header idempotency-key",
                    remedy="send the stream's own",
                    param=body.RESUME,
                )
            self._story = continuation.story_of(asked.resume)
            self._before = self._story.tokens
            self._rest = worker.repeated.rest(caller.key, name, asked.document)
        if self._story is not None and self.why_not_resumable():
            raise RefusalError(
                400, f"sluice_resume: nobody can go on with this stream: {self.why_not_resumable()}",
                remedy="ask again from the begin",
                param=body.RESUME, code="cannot_resume",
            )  # fmt: skip
        worker.check_budget(tenant)
        worker.check_records()
        if self.named and not self.billed:
            worker.names.claim(self, self.record_id)
        else:
            self._enter(None)

    def claimed(self, verdict: Verdict) -> None:
        """Whether it may go on by its name."""
        if verdict == "held":
            self.refuse(
                RefusalError(
                    409, "idempotency-key: a request with it is being answered", remedy="try again when it has ended",
                    code="request_in_progress", retry_after=1.0,
                )
            )  # fmt: skip
            return
        if verdict == "billed":
            self.worker.repeated.bill(self.record_id)
            self.record_id, self.billed = self.request.id, True
        else:
            self._claim = self.record_id
        self.enter_again(None)

    def _end_claim(self, *, billed: bool) -> None:
        claim, self._claim = self._claim, ""
        if claim:
            self.worker.names.end(claim, billed=billed)

    def _enter(self, waiting: Waiting | None) -> None:
        """Reserve, and wait for a turn; later, where more of a limit has to be asked for. Raises RefusalError."""
        worker = self.worker
        if not self._admit(cast(ServiceRow, self.service), cast(Asked, self.asked), waiting):
            return
        worker.log_prompt(self)
        if self._story is not None and self._story.finish is not None:
            self._succeed_from_story()
            return
        worker.calls[self.ticket] = self
        worker.turn()
        if self.replica is None and not self.over:
            self._wait()

    def enter_again(self, waiting: Waiting | None) -> None:
        """More was asked for, or its name is its own."""
        if self.over:
            return
        try:
            self._enter(waiting)
        except RefusalError as refusal:
            self.refuse(refusal)
        except Exception:
            log.exception("request %s: unexpected", self.request.id)
            self.crashed()

    @property
    def reserved(self) -> int:
        """Its tokens, as they are reserved."""
        return cast(Asked, self.asked).reserved(cast(ServiceRow, self.service).default_tokens)

    @property
    def limited(self) -> list[tuple[str, str]]:
        """Kinds and names of those of its subjects that have limits."""
        return self._subjects().limited(self.worker.directory)

    def _subjects(self) -> Subjects:
        service, caller = cast(ServiceRow, self.service), cast(Caller, self.caller)
        return Subjects(caller.key, caller.user, self.tenant, service.name)

    def _admit(self, service: ServiceRow, asked: Asked, waiting: Waiting | None) -> bool:
        """Reserve; False: later. Raises RefusalError."""
        worker, caller = self.worker, cast(Caller, self.caller)
        now = time.monotonic()
        self.admitted = now
        priority = _LOWER.get(self.request.headers.get(b"sluice-priority", b""), service.priority)
        prefix = (
            asked.prefix(worker.salt(self.tenant)) if len(worker.directory.of_service.get(service.name, ())) > 1 else ()
        )
        key, user, tenant, number = worker.subjects(caller.key, caller.user, self.tenant, service.name)
        answer = worker.gate.admit(
            worker.number, int(now * 1e6), key=key, user=user, tenant=tenant, service=number,
            tokens=asked.reserved(service.default_tokens), prompt_tokens=asked.prompt_tokens,
            priority=min(_PRIORITY[cast(Priority, priority)], _PRIORITY[service.priority]),
            deadline_us=int(self.deadline * 1e6), prefix=prefix, tag=int(self.record_id, 16),
        )  # fmt: skip
        if isinstance(answer, Refused):
            if answer.part and not answer.never and worker.parts.ask(self, waiting, self._subjects().of(answer.kind)):
                return False
            raise self._over_limit(answer)
        self.ticket = answer
        return True

    def _over_limit(self, refused: Refused) -> RefusalError:
        subjects, worker = self._subjects(), self.worker
        policy = subjects.limit(refused.kind, worker.directory)
        return over_limit(subjects, refused, policy, self.reserved, worker.parts.retry_after(self))

    def _wait(self) -> None:
        self._waits_since = time.monotonic()
        self.worker.waiting[self.ticket] = self
        service = cast(ServiceRow, self.service)
        if not self.worker.has_replica(service.name):
            self.worker.demand_now(service.name)

    def sweep(self, now: float) -> None:
        """While it waits for its turn."""
        if cast(Asked, self.asked).stream:
            self._comment(now, self._waits_since)

    def _comment(self, now: float, since: float) -> None:
        """Nothing has come since then: comments, so that nobody on the way takes the connection for dead."""
        if now - max(since, self._last_comment) < bounds.WAITING_S or self.client.full:
            return
        self._last_comment = now
        self._begin_stream()
        self.client.part(_WAITING)

    def expired(self) -> None:
        """Its deadline passed while it waited."""
        if self.over:
            return
        if self._counting:
            self._succeed_from_story()
            return
        service = cast(ServiceRow, self.service)
        why = f" ({service.why})" if service.why else ""
        what = f"model {service.name}: no replica was free before the deadline{why}"
        after = service.eta_s if service.eta_s is not None else None
        self._fail(
            RefusalError(
                503,
                what,
                remedy="try again, or send a longer sluice-deadline",
                retry_after=after,
                code="deadline_exceeded",
            ),
            "expired",
        )

    def crashed(self) -> None:
        """Something unexpected happened to it: what it holds is given back."""
        refusal = failed_request()
        if self.ticket and not self.over:
            self._fail(refusal, "failed")
        elif not self.over:
            self.refuse(refusal)

    # ---- a replica ----

    def granted(self, launch: int) -> None:
        """It is its turn, on a replica."""
        worker = self.worker
        worker.waiting.pop(self.ticket, None)
        if self.over:
            return
        pool = worker.pools.get(launch)
        if pool is None:  # the gate knows it, and this worker does not yet
            worker.loop.call_later(_UNKNOWN_S, self._unknown, launch)
            return
        self._pool, self.replica = pool, pool.row
        self._turn, self._paced, self._patience = time.monotonic(), 0.0, bounds.PATIENCE_S
        if not self._granted:
            self._granted = self._turn
            worker.delays.add(pool.row.service, self._granted, self._granted - self.admitted)
        self._ask()

    def _unknown(self, launch: int) -> None:
        if self.over:
            return
        if launch in self.worker.pools:
            self.granted(launch)
        else:
            self._again(launch)

    def _ask(self) -> None:
        """Send the request to the replica, or what goes on with its stream."""
        pool, asked, replica = cast(Pool, self._pool), cast(Asked, self.asked), cast(ReplicaRow, self.replica)
        self._head, self._headers, self._plan = 0, {}, None
        self._kept, self._kept_size, self._events = [], 0, None
        if self._counting:
            self._plan = continuation.plan_of_count(asked)
        elif self._story is not None:
            engine = cast(ServiceRow, self.service).engine
            self._plan = continuation.plan(asked, self._story, engine, replica.abilities.resume)
            if self._plan is None:
                self._fail(self._broken("its engine cannot go on with a stream"), "failed")
                return
        upstream = pool.take()
        if upstream is None:
            pool.connect(self)
        else:
            self.connected(upstream)

    def connected(self, upstream: Upstream) -> None:
        """There is a connection."""
        if self.over or self._pool is not upstream.pool or self.upstream is not None:
            upstream.used = True
            upstream.pool.put(upstream)
            return
        self.upstream = upstream
        asked, route = cast(Asked, self.asked), self.request.route
        path, data = route.path if route is not None else "", asked.body
        if self._plan is not None:
            path, data = self._plan.path, self._plan.body
        elif upstream.pool.row.abilities.resume == "tokens" and not self.why_not_resumable():
            engine = cast(ServiceRow, self.service).engine
            if continuation.has_ids(asked, engine):
                data, self.wanted_ids = continuation.with_ids(asked, engine), True
            elif continuation.has_counts(asked, engine):
                data, self.wanted_counts = continuation.with_counts(asked), True
        self._read = asked.prompt_tokens
        row = upstream.pool.row
        head = heads.to_replica(path, row.service, row.secret, self.request.id, len(data), self.request.headers)
        upstream.send(self, head, data)
        self.why_not_resumable()  # while nobody waits for it

    def connect_failed(self, pool: Pool, why: str) -> None:
        """There is none."""
        if self.over or self._pool is not pool:
            return
        self._lost(why, surely=True, sent=False)

    def upstream_lost(self, why: str, *, stale: bool) -> None:
        """The answer will not come, or not go on."""
        self.upstream = None
        if self.over:
            return
        if stale:  # the replica closed an idle connection at that moment: another one
            cast(Pool, self._pool).connect(self)
            return
        self._lost(why)

    def _lost(self, why: str, *, surely: bool = False, sent: bool = True) -> None:
        """The replica failed, `surely` by its own fault: another one, for the whole answer or for the rest of it."""
        pool = cast(Pool, self._pool)
        self._read = 0
        self.worker.failed(pool, why, surely=surely)
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.leave()
        self.worker.metrics.add("replica_failures", cast(ServiceRow, self.service).name)
        launch = int(pool.row.launch, 16)
        if self._passing:
            self._fail(RefusalError(502, f"the replica {why}", remedy="ask again"), "failed")
        elif not self._count and cast(Asked, self.asked).resume is None:
            self._tries += sent
            self._story = None
            if self._tries >= bounds.MOST_TRIES:
                what = f"model {cast(ServiceRow, self.service).name}: {self._tries} replicas failed; the last one {why}"
                self._fail(RefusalError(502, what, remedy="ask again later", code="replica_failed"), "failed")
            else:
                self._again(launch, self._tries)
        else:
            self._go_on(launch, why, sent=sent)

    def _go_on(self, launch: int, why: str, *, sent: bool) -> None:
        """The rest of a stream from another replica."""
        story = cast(Story, self._story)
        story.absorb()
        if story.finish is not None:
            self._count_prompt(launch)
            return
        asked = cast(Asked, self.asked)
        cannot = self.why_not_resumable() or story.blocked
        if cannot:
            self._fail(self._broken(f"the replica {why}, and nobody can go on: {cannot}"), "failed")
            return
        if self.resumed >= bounds.MOST_RESUMED:
            self._fail(self._broken(f"{self.resumed + 1} replicas failed; the last one {why}"), "failed")
            return
        if asked.most_tokens is not None and story.tokens >= asked.most_tokens:
            story.finish = "length"
            self._begin_stream()
            self.client.part(continuation.full(asked, story))
            self._count_prompt(launch)
            return
        self.resumed += sent
        self.worker.metrics.add("resumed", cast(ServiceRow, self.service).name)
        self._again(launch, self.resumed)

    def _count_prompt(self, launch: int) -> None:
        """All was said, and only the end did not come. Where the usage is not known, another replica is asked, once."""
        known = self._usage is not None or cast(Story, self._story).prompt_tokens is not None
        if known or self._counting or not self.worker.has_replica(cast(ServiceRow, self.service).name):
            self._succeed_from_story()
            return
        self._counting = True
        self._again(launch)

    def _again(self, launch: int, times: int = 0) -> None:
        """Wait for another turn: at once the first time, then a little later each time."""
        self._pool = None
        if times > 1:
            self.worker.loop.call_later(bounds.AGAIN_S * 4 ** (times - 2), self._again_now, launch)
        else:
            self._again_now(launch)

    def _again_now(self, launch: int) -> None:
        if self.over:
            return
        worker = self.worker
        now = time.monotonic()
        # a stream that has begun has met its deadline: it gets the same time once more
        seconds = bounds.COUNT_S if self._counting else cast(ServiceRow, self.service).deadline_s
        deadline = int((now + seconds) * 1e6) if self._count or self._counting else None
        worker.gate.again(self.ticket, int(now * 1e6), launch, deadline)
        worker.turn()
        if self._pool is None and not self.over:
            self._wait()

    def _broken(self, why: str) -> RefusalError:
        return RefusalError(
            502, f"the stream broke: {why}", remedy="what came is not the whole answer; ask again", code="stream_broken"
        )

    # ---- the answer ----

    def upstream_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The answer's head."""
        self._head, self._headers = status, headers
        if status in _ELSEWHERE and (self._tries + 1 < bounds.MOST_TRIES):
            self._lost(f"answered {status}")
            return
        cast(Pool, self._pool).worked()
        if self._plan is not None and self._plan.way in ("template", "count"):
            return
        if status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            if not cast(Asked, self.asked).stream:
                self._lost("sent a stream that nobody asked for")
                return
            self._events = Events()
            if self._story is None:
                self._story = Story()
            if self._plan is not None:
                self._story.goes_on()
                self._rewriter = Rewriter(self._story, cast(Asked, self.asked).ability)
            self._begin_stream()
            if self.client.full and self.upstream is not None:
                self.upstream.pause()

    def _begin_stream(self) -> None:
        if not self._begun:
            self._begun = True
            self.client.begin_answer(200, "text/event-stream", None)

    def upstream_waits(self) -> None:
        """The first token is not there yet."""
        self.client.send_head()

    def upstream_data(self, data: bytes) -> None:
        """A part of its body."""
        if self._events is not None:
            try:
                events = self._events.feed(data)
            except TooLongError:
                self._lost(f"sent an event of more than {bounds.MOST_EVENT} bytes")
                return
            if events:
                self._relay(events)
            return
        if self._passing:
            self._kept = [(b"".join(self._kept) + data)[-TAIL:]]
            self._kept_size += len(data)
            self._pass(data)
            return
        self._kept.append(data)
        self._kept_size += len(data)
        if self._begun or self._plan is not None:  # a prompt that is made of the body, or nothing that can be passed on
            if self._kept_size > bounds.MOST_KEPT_ANSWER + len(cast(Asked, self.asked).body):
                self._lost(f"sent {self._kept_size} bytes that are no stream")
        elif self._kept_size > bounds.MOST_KEPT_ANSWER:
            kept = b"".join(self._kept)
            self._passing = self._begun = True
            self.status = self._head
            self.client.begin_answer(self._head, self._type(), self._headers.get(b"content-length"))
            self._kept = [kept[-TAIL:]]
            self._pass(kept)

    def _pass(self, data: bytes) -> None:
        self.client.part(data)
        if self.client.full and self.upstream is not None:
            self.upstream.pause()

    def _type(self) -> str:
        return self._headers.get(b"content-type", b"application/json").decode("latin-1")

    def _relay(self, events: list[bytes]) -> None:
        """Events of a stream."""
        out = []
        story = cast(Story, self._story)
        for event in events:
            kind = kind_of(event)
            if kind is Kind.TEXT:
                sent = self._text(event, story)
            elif kind is Kind.USAGE or kind is Kind.ERROR:
                sent = self._special(event, story)
            elif kind is Kind.DONE:
                self._done = True
                out += self._owed()
                self._last.append(event)
                break
            else:
                sent = event
            if sent:
                out.append(sent)
            if self.over:
                break
        if self.over:
            return
        if self._done:
            self._last[:0] = out  # what comes with the end is sent with it
        elif out:
            self.client.part(out[0] if len(out) == 1 else b"".join(out))
        if self._done and not self._is_responses:
            self._succeed_stream()

    def _owed(self) -> list[bytes]:
        """The usage that the replica which goes on has sent with the last part of the text."""
        owed = None if self._rewriter is None else self._rewriter.owed
        return [event_of(owed)] if owed is not None and cast(Asked, self.asked).shows_usage else []

    @property
    def _is_responses(self) -> bool:
        return cast(Asked, self.asked).ability == "responses"

    def _text(self, event: bytes, story: Story) -> bytes:
        if self._first is None:
            self._first = self._paced = time.monotonic()
            self._took(Time.FIRST, self._first - self._turn)
        self._count += 1
        if not self._count % _PROGRESS:
            self.worker.gate.progress(self.ticket, self._count)
            self._pace()
        if not self.why_not_resumable():
            story.keep(event)
        if self._rewriter is not None:
            return self._rewriter.text(event)
        return continuation.without_ids(event) if self.wanted_ids else event

    def _pace(self) -> None:
        """So many parts have come since the last time, unless the client has taken nothing meanwhile."""
        now, before = time.monotonic(), self._paced
        self._paced, self._patience = now, bounds.PATIENCE_S
        if before:
            self._took(Time.TOKEN, (now - before) / _PROGRESS)

    def _special(self, event: bytes, story: Story) -> bytes:
        """An event that may have the usage, or an error."""
        document = document_of(event)
        if document is None:
            return event
        if document.get("error") and not document.get("choices"):
            self.worker.metrics.add("stream_errors", cast(ServiceRow, self.service).name)
            self._fail_with(event, "failed", 502)
            return b""
        if self._is_responses:
            if document.get("type") in _ENDS:
                self._done = True
                response = document.get("response")
                usage = response.get("usage") if isinstance(response, dict) else None
                if isinstance(usage, dict):
                    self._usage = Usage(usage)
            return self._text(event, story)
        usage = document.get("usage")
        if not isinstance(usage, dict):
            return self._text(event, story)
        if document.get("choices") and self.wanted_counts:
            return continuation.without_counts(self._text(event, story))
        if document.get("choices"):  # usage so far, in a part of the text
            self._usage = Usage(usage if self._rewriter is None else self._rewriter.whole(usage))
            return self._text(event, story)
        if self._rewriter is not None:
            document = self._rewriter.usage(document)
            event = event_of(document)
        self._usage = Usage(cast(dict[str, Any], document["usage"]))
        if not cast(Asked, self.asked).shows_usage:
            return b""
        return continuation.without_ids(event) if self.wanted_ids else event

    def upstream_end(self) -> None:
        """The replica's answer is complete."""
        self.upstream = None
        if self.over:
            return
        if self._counting:
            self._counted()
        elif self._plan is not None and self._plan.way == "template" and self._events is None:
            self._of_template()
        elif self._events is not None:
            if self._done and self._is_responses:
                self._succeed_stream()
            else:
                self._lost("ended its stream before the end")
        elif self._passing:
            self._usage = usage_at_end(b"".join(self._kept))
            self._took_whole()
            self._settle("ok" if self._head < 400 else "failed", self._head)
            self.client.end_answer(b"")
        else:
            self._whole(b"".join(self._kept))

    def _of_template(self) -> None:
        asked, story, replica = cast(Asked, self.asked), cast(Story, self._story), cast(ReplicaRow, self.replica)
        made = continuation.plan_of_template(asked, story, b"".join(self._kept), replica.abilities.resume)
        if made is None:
            self._fail(self._broken(f"the replica's /apply-template answered {self._head}"), "failed")
            return
        pool = cast(Pool, self._pool)
        self._plan, self._head, self._headers, self._kept, self._kept_size = made, 0, {}, [], 0
        upstream = pool.take()
        if upstream is None:
            pool.connect(self)
        else:
            self.connected(upstream)

    def _counted(self) -> None:
        usage = usage_of(b"".join(self._kept)) if self._head == 200 else None
        if usage is not None and usage.prompt:
            cast(Story, self._story).prompt_tokens = usage.prompt
        self._succeed_from_story()

    def _whole(self, answer: bytes) -> None:
        """An answer that is not streamed."""
        if self._begun:  # comments of a stream were sent, and then the replica refused
            self._fail(self._broken(f"the replica answered {self._head}"), "failed")
            return
        if self._head == 200:
            self._usage = usage_of(answer)
            self._took_whole()
        self.status = self._head
        self._settle("ok" if self._head < 400 else "failed", self._head)
        self.client.answer(self._head, self._type(), answer)

    def _took_whole(self) -> None:
        if self._usage is not None and not cast(Asked, self.asked).stream:
            self._took(Time.WHOLE, time.monotonic() - self._turn, self._usage.completion)

    def _took(self, kind: Time, seconds: float, tokens: int = 0, *, so_far: bool = False) -> None:
        """What it asks for may be why it takes long: a user could have any replica left out by asking for forms."""
        if self._plain is None:
            self._plain = continuation.is_plain(cast(Asked, self.asked))
        if self._plain:
            self.worker.took(self, kind, seconds, tokens, so_far=so_far)

    # ---- ends ----

    def _succeed_stream(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.release()
        self._settle("ok", 200)
        self.client.end_answer(b"".join(self._last))

    def _succeed_from_story(self) -> None:
        """All was said, and only the end did not come."""
        asked, story = cast(Asked, self.asked), cast(Story, self._story)
        self._begin_stream()
        if self._usage is None:
            prompt = asked.prompt_tokens if story.prompt_tokens is None else story.prompt_tokens
            self._usage = Usage({"prompt_tokens": prompt, "completion_tokens": story.tokens})
            last = continuation.ending(asked, story, prompt)
        else:
            last = self._owed()
        self._settle("ok", 200)
        self.client.end_answer(b"".join([*last, _DONE]))

    def refuse(self, refusal: RefusalError) -> None:
        """It gets no ticket."""
        self.over = True
        self._end_claim(billed=False)
        self.worker.refuse(self.client, self.request, refusal, self)

    def _fail(self, refusal: RefusalError, outcome: Outcome) -> None:
        if self._begun:
            self._fail_with(b"" if self._passing else refusal.event(self.request.id), outcome, refusal.status)
            return
        self._settle(outcome, refusal.status)
        self.client.answer(refusal.status, "application/json", refusal.document(self.request.id), refusal.retry_after)

    def _fail_with(self, event: bytes, outcome: Outcome, status: int) -> None:
        """A last event, and an end that nobody takes for the answer's."""
        self._begin_stream()
        self._settle(outcome, status)
        self.client.break_off(event)

    def client_gone(self) -> None:
        """The replica's work ends with the connection to it."""
        if self.over:
            return
        if not self.ticket:  # it waits for its name or a part of a limit, and has used nothing
            self.over = True
            self._end_claim(billed=False)
            return
        self.worker.metrics.add("cancelled", cast(ServiceRow, self.service).name)
        self._settle("cancelled", 499)

    def client_full(self) -> None:
        """Read no more of the replica."""
        self._paced = 0.0
        if self.upstream is not None:
            self.upstream.pause()

    def client_ready(self) -> None:
        """Go on."""
        if self.upstream is not None:
            self.upstream.resume()

    def look(self, now: float) -> None:
        """Whether the replica is silent for too long."""
        upstream, replica = self.upstream, self.replica
        if upstream is None or replica is None or self.client.full or self.over:
            return
        silent = now - upstream.heard
        self._took_so_far(now, silent)
        row = self.worker.directory.replicas.get(int(replica.launch, 16))
        whole_s = None if cast(Asked, self.asked).stream else cast(ServiceRow, self.service).answer_s
        if row is None or row.suspect:
            most, whole_s = bounds.SUSPECT_SILENT_S, None
        elif whole_s is not None:
            most = whole_s
        elif self._counting:
            most = bounds.COUNT_S
        else:
            most = bounds.SILENT_S if self._count else bounds.FIRST_S
        if silent <= most:
            if self._begun and not self._passing:
                self._comment(now, upstream.heard)
            return
        if whole_s is not None and not self._head:
            self._unanswered(whole_s)
        else:
            self._lost(f"sent nothing for {silent:.0f} s", surely=True)

    def _took_so_far(self, now: float, silent: float) -> None:
        """While nothing comes, a replica is known to be slow after a second, two, four, ..."""
        if self._plan is not None or (silent if self._count else now - self._turn) < self._patience:
            return
        if self._count:
            self._patience = 2 * silent
            self._took(Time.TOKEN, silent, so_far=True)
            return
        seconds = now - self._turn
        self._patience = 2 * seconds
        self._took(Time.FIRST if cast(Asked, self.asked).stream else Time.WHOLE, seconds, so_far=True)

    def _unanswered(self, seconds: float) -> None:
        """The replica says that it is well. The request may be what takes so long: no other one is asked."""
        name, why = cast(ServiceRow, self.service).name, f"gave no answer within {seconds:g} s (answer_within)"
        self.worker.failed(cast(Pool, self._pool), why, surely=False)
        self.worker.metrics.add("replica_failures", name)
        remedy = "stream the answer, or ask for fewer tokens"
        self._fail(
            RefusalError(504, f"model {name}: its replica {why}", remedy=remedy, code="answer_timeout"), "failed"
        )

    def _settle(self, outcome: Outcome, status: int) -> None:
        """Give back what was not used, and write the bill, before the client has the answer's end."""
        self.over = True
        worker, service, caller = self.worker, cast(ServiceRow, self.service), cast(Caller, self.caller)
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.leave()
        prompt, completion, cached = self._used(outcome)
        if self.named and worker.repeated.billed(self.record_id):
            self.record_id = self.request.id  # the same request was answered meanwhile
        if self.billed and self._before:
            prompt, completion, cached = self._of_the_rest(prompt, completion, cached)
        worker.calls.pop(self.ticket, None)
        worker.waiting.pop(self.ticket, None)
        now = time.monotonic()
        worker.gate.settle(self.ticket, int(now * 1e6), prompt, completion)
        wall = time.time()
        begun = self.request.begun
        record = RequestRecord(
            self.record_id, wall - (now - begun), wall, caller.key, caller.user, self.tenant, service.name,
            self.replica.job if self.replica is not None else 0, prompt, completion, cached, outcome, status,
            (self._granted or now) - self.admitted, None if self._first is None else self._first - begun, now - begun,
            cast(heads.Route, self.request.route).path, self.resumed,
        )  # fmt: skip
        repeated = self.named and prompt + completion > 0
        worker.write(record, request_id=self.request.id, repeated=repeated)
        self._end_claim(billed=repeated)
        worker.turn_soon()

    def _of_the_rest(self, prompt: int, completion: int, cached: int) -> tuple[int, int, int]:
        """The bill for the rest of a stream that was billed so far: once without the prompt, which was paid for."""
        repeated, completion = self.worker.repeated, max(completion - self._before, 0)
        if not self._granted or not prompt + completion:
            return 0, completion, 0
        if not repeated.billed(self._rest):
            repeated.bill(self._rest)
            return 0, completion, 0
        # all that the engine has read: what the client says that it has is a part of it
        return prompt if self._usage is None else prompt + self._before, completion, cached

    def _used(self, outcome: Outcome) -> tuple[int, int, int]:
        """Tokens of the prompt and of the answer, and how many of the prompt were cached."""
        usage = self._usage
        if usage is not None:
            return usage.prompt, usage.completion, usage.cached
        if self._head >= 400 and not self._count:
            return 0, 0, 0
        if self._head == 0 and not self._count:
            # a client that broke off has had the engine read its prompt; a replica that failed is not its fault
            return (self._read if outcome == "cancelled" else 0), 0, 0
        asked, story = cast(Asked, self.asked), self._story
        if story is None:
            if not self._passing:
                return asked.prompt_tokens, 0, 0
            # a client took a long answer and left before its end, where the usage is: by its length
            most = asked.reserved(cast(ServiceRow, self.service).default_tokens) - asked.prompt_tokens
            return asked.prompt_tokens, max(0, min(most, self._kept_size // _BYTES_A_TOKEN)), 0
        story.absorb()
        prompt = asked.prompt_tokens if story.prompt_tokens is None else story.prompt_tokens
        return prompt, story.tokens if not self.why_not_resumable() else self._count, 0
