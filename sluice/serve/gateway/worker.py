"""A worker of the gateway: one process with one event loop, that answers what comes to its listening socket.

Its parent gives it the socket, the gate's memory, a descriptor to wake each worker, and a connection over which it
tells what replicad says. `python -m sluice.serve.gateway.worker DESCRIPTOR`, of that connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import socket
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, cast

import uvloop

from policy.service_jobs import FILE_NAME
from sluice.base.errors import SluiceError
from sluice.base.log import start_logging
from sluice.base.networks import Network, network_of, parse_networks, within
from sluice.base.oidc import Provider, load_settings
from sluice.base.rates import Budgets, FewLines, Rate
from sluice.base.tokens import TokenStore
from sluice.core.errors import UNKNOWN, CoreError
from sluice.core.gate import Gate, Limit, Standing, Time, Use
from sluice.exchange.requests import RequestLog, RequestRecord, render
from sluice.exchange.serving import Callers, Demand, State, SubjectKind, callers_of
from sluice.exchange.snapshot import SOCKET as CONTROLLERD_SOCKET
from sluice.serve.gateway import bounds
from sluice.serve.gateway.body import Asked
from sluice.serve.gateway.call import Call
from sluice.serve.gateway.claims import Names
from sluice.serve.gateway.client import Client, Request
from sluice.serve.gateway.directory import Directory, subject
from sluice.serve.gateway.figures import Delays, Figures
from sluice.serve.gateway.keys import Caller, Keys, ask_controllerd
from sluice.serve.gateway.leases import KINDS, limit_of
from sluice.serve.gateway.parts import Parts
from sluice.serve.gateway.refusals import RefusalError, failed_request
from sluice.serve.gateway.repeated import Repeated
from sluice.serve.gateway.spare import Spare
from sluice.serve.gateway.stored import Stored
from sluice.serve.gateway.upload import Upload
from sluice.serve.gateway.upstream import Pool, tls_context

_JSON: Final = "application/json"
_LOOK_S: Final = 1.0
MOST_LATE_RECORDS: Final = 10_000
"""Usage records that wait for the disk, those of requests that run included; then nothing more is taken."""
_MOST_SUBJECTS: Final = 100_000
_REFUSED_RECORDS: Final = (Rate(100, 10), Rate(20, 1))
_TIMES: Final = {
    Time.FIRST: "first tokens take", Time.TOKEN: "tokens take", Time.WHOLE: "answers take",
}  # fmt: skip
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"

log = logging.getLogger("sluice.gateway")
log.addFilter(FewLines())


@dataclass(frozen=True, slots=True)
class Settings:
    """What the parent tells a worker at its start."""

    listening: int
    region: int
    repeated: int
    wakes: tuple[int, ...]
    tokens: str
    oidc: str
    records: str
    proxies: tuple[str, ...]
    metrics_from: tuple[str, ...]
    certificate: str | None = None
    key: str | None = None
    access_log: bool = True
    verbose: bool = False
    services: str = f"/etc/slurm/{FILE_NAME}"
    controllerd: str = str(CONTROLLERD_SOCKET)
    """Which says whose tokens of Slurm are."""


class Worker:
    """All that the requests of a process share."""

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        repeated: Repeated,
        keys: Keys,
        records: RequestLog,
        loop: asyncio.AbstractEventLoop,
        spare: Spare | None = None,
    ) -> None:
        self.settings = settings
        self.gate = gate
        self.repeated = repeated
        self.keys = keys
        self.loop = loop
        self.directory = Directory()
        self.pools: dict[int, Pool] = {}
        self.calls: dict[int, Call] = {}
        """By their tickets."""
        self.waiting: dict[int, Call] = {}
        """Those of them that wait for their turn."""
        self.parts = Parts(self)
        self.names = Names(self)
        self.metrics = Figures()
        self.delays = Delays()
        self.held = 0
        """Bytes of large bodies."""
        self.draining = False
        self.alone = False  # the parent is dead: nobody says which replicas there are
        self.replaced = False  # another worker has its place: the gateway as a whole is well
        self.proxies: Sequence[Network] = parse_networks(settings.proxies)
        self.number = gate.join(os.getpid(), process_start(os.getpid()))
        self._metrics_from = parse_networks(settings.metrics_from)
        self._seat = gate.seat(self.number)
        self._clients: set[Client] = set()
        self._open: Counter[str] = Counter()
        self._context = tls_context()
        self._records = records
        self._late: deque[RequestRecord] = deque()
        self._spare = spare
        self._subjects: dict[tuple[SubjectKind, str], int] = {}
        self._callers: dict[tuple[str, str, str, str], tuple[int, int, int, int]] = {}
        self._salts: dict[str, bytes] = {}
        self._slow: dict[str, dict[str, int]] = {}  # by service and launch: how many times slower
        self._turning = False
        self._asked: set[str] = set()
        self._refused = Budgets(*_REFUSED_RECORDS)
        self._ended: list[tuple[RequestRecord, str]] = []  # not counted yet; the second is the request's id
        self._lines: list[str] = []
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._metrics_waiting: dict[int, tuple[Client, Request]] = {}
        self._metrics_number = 0
        self.stored = Stored(self, Path(settings.services), Path(settings.records))
        self.tell: Any = lambda _: None
        """Sends the parent a message."""

    # ---- connections of clients ----

    def enter(self, client: Client) -> bool:
        """Count a connection; whether it may stay."""
        network, address = network_of(client.peer)
        if len(self._clients) >= bounds.MOST_CONNECTIONS[0] or (
            not within(client.peer, self.proxies)
            and (
                self._open[network] >= bounds.MOST_CONNECTIONS[1]
                or self._open[f"={address}"] >= bounds.MOST_CONNECTIONS[2]
            )
        ):
            self.metrics.add("connections_refused")
            return False
        self._clients.add(client)
        self._open[network] += 1
        self._open[f"={address}"] += 1
        self.metrics.add("connections")
        return True

    def leave(self, client: Client) -> None:
        """A connection that has ended."""
        if client not in self._clients:
            return
        self._clients.discard(client)
        network, address = network_of(client.peer)
        for name in (network, f"={address}"):
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]

    # ---- requests ----

    def begin(self, client: Client, request: Request) -> None:
        """Answer a request, or begin to."""
        if request.refused is not None:
            self.refuse(client, request, request.refused)
            return
        if isinstance(request.caller, str):
            task = self.loop.create_task(self._begin_later(client, request, request.caller))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        self._begin(client, request, request.caller)

    _tasks: set[asyncio.Task[None]] = set()  # noqa: RUF012  # of the process's one worker

    async def _begin_later(self, client: Client, request: Request, text: str) -> None:
        try:
            caller = await self.keys.check_later(text, request.address)
        except RefusalError as refusal:
            if client.request is request:
                self.refuse(client, request, refusal)
            return
        except Exception:  # nobody else would answer
            log.exception("request %s: unexpected", request.id)
            if client.request is request:
                self.refuse(client, request, failed_request())
            return
        if client.request is request:
            self._begin(client, request, caller)

    def check_job(self, request: Request) -> None:
        """Whether who asks is a batch's job. Raises RefusalError."""
        self.stored.check_job(request)

    def upload(self, client: Client, request: Request, length: int | None) -> Upload:
        """What takes the body of an upload. Raises RefusalError."""
        return self.stored.upload(client, request, length)

    def _begin(self, client: Client, request: Request, caller: Caller | None) -> None:
        route = request.route
        if route is not None and route.stored:
            self.stored.begin(client, request, caller)
            return
        if route is not None and route.ability is not None and caller is not None:
            call = Call(self, client, request)
            client.handler = call
            try:
                call.begin(caller)
            except RefusalError as refusal:
                call.refuse(refusal)
            except Exception:
                log.exception("request %s: unexpected", request.id)
                call.crashed()
            return
        try:
            self._plain(client, request, caller)
        except RefusalError as refusal:
            self.refuse(client, request, refusal)

    def _plain(self, client: Client, request: Request, caller: Caller | None) -> None:
        """What needs no replica. Raises RefusalError."""
        path = "" if request.route is None else request.route.path
        if path == "/health":
            ready = self.directory.complete and (self.replaced or not self.draining)
            self.log(request, 200 if ready else 503)
            client.answer(200 if ready else 503, _JSON, b'{"status":"ok"}' if ready else b'{"status":"not ready"}')
        elif path == "/metrics":
            if not within(request.address, self._metrics_from):
                raise RefusalError(
                    403, f"address {request.address}: not for it", remedy="see --metrics-from", code="forbidden"
                )
            self._metrics_number += 1
            self._metrics_waiting[self._metrics_number] = client, request
            self._tell_counts()
            self.tell({"metrics": self._metrics_number})
        elif caller is not None:
            tenant = self.directory.tenant(caller.user, request.headers.get(b"sluice-tenant"))
            if request.named:
                found: Any = self._model(self.directory.service(request.named.decode(), tenant).name)
            else:
                rows = self.directory.callable_by(tenant)
                found = {
                    "object": "list",
                    "data": [self._model(one.name) for one in sorted(rows, key=lambda one: one.name)],
                }
            self.log(request, 200, caller=caller, tenant=tenant)
            client.answer(200, _JSON, json.dumps(found).encode())

    def _model(self, name: str) -> dict[str, Any]:
        service = self.directory.services[name]
        ready = sum(1 for one in self.directory.of_service.get(name, {}).values() if one.state is State.READY)
        return {
            "id": name, "object": "model", "created": 0, "owned_by": service.tenant,
            "sluice": {"replicas_ready": ready, "paused": service.paused},
        }  # fmt: skip

    def refuse(self, client: Client, request: Request, refusal: RefusalError, call: Call | None = None) -> None:
        """Answer that there is no answer."""
        service = "" if call is None or call.service is None else call.service.name
        self.metrics.add("refused", service, str(refusal.status))
        if refusal.close:
            request.keep = False
        if call is not None and call.service is not None and call.caller is not None and refusal.status == 429:
            self._record_refused(call, refusal)
        self.log(request, refusal.status, call=call)
        client.answer(refusal.status, _JSON, refusal.document(request.id), refusal.retry_after)

    def _record_refused(self, call: Call, refusal: RefusalError) -> None:
        """Few of them: who is over a limit may ask as often as he likes, and must not fill the disk."""
        now, wall = time.monotonic(), time.time()
        if self._late or self._refused.wait((call.tenant,), now) > 0 or call.caller is None or call.service is None:
            return
        self._refused.take((call.tenant,), now)
        begun = wall - (now - call.request.begun)
        path = "" if call.request.route is None else call.request.route.path
        self._append(
            RequestRecord(
                call.request.id,
                begun,
                wall,
                call.caller.key,
                call.caller.user,
                call.tenant,
                call.service.name,
                0,
                0,
                0,
                0,
                "refused-limit",
                refusal.status,
                0.0,
                None,
                wall - begun,
                path,
            )  # fmt: skip
        )

    # ---- the gate ----

    def subjects(self, key: str, user: str, tenant: str, service: str) -> tuple[int, int, int, int]:
        """The gate's numbers of them, see `subject`. Raises RefusalError."""
        names = key, user, tenant, service
        known = self._callers.get(names)
        if known is None:
            known = (
                self.subject("key", key), self.subject("user", user), self.subject("tenant", tenant),
                self.subject("service", service),
            )  # fmt: skip
            if len(self._callers) >= _MOST_SUBJECTS:
                self._callers.clear()
            self._callers[names] = known
        return known

    def subject(self, kind: SubjectKind, name: str) -> int:
        """The gate's number of a key, user, tenant or service; its limits are in the gate from now on. Raises
        RefusalError where the gate has no room for them."""
        known = self._subjects.get((kind, name))
        if known is not None:
            return known
        number = subject(kind, name)
        row = self.directory.limit(kind, name)
        if row is not None:
            try:
                self.gate.share(KINDS[kind], number, limit_of(row.limit))
                if kind == "tenant":
                    self.gate.set_weight(number, row.weight)
            except CoreError as error:
                raise RefusalError(
                    503, f"{kind} {name}: this gateway has met too many that have limits",
                    remedy="tell an admin to restart it", code="busy",
                ) from error  # fmt: skip
        else:
            self.gate.set_limit(KINDS[kind], number, Limit())
        if len(self._subjects) >= _MOST_SUBJECTS:
            self._subjects.clear()
        self._subjects[kind, name] = number
        return number

    def check_budget(self, tenant: str) -> None:
        """Raises RefusalError where a tenant has used what it may use."""
        row = self.directory.limit("tenant", tenant)
        if row is not None and row.tokens_left is not None and row.tokens_left <= 0:
            raise RefusalError(
                429, f"tenant {tenant}: has used its tokens of this period", remedy="see: sluice report services",
                code="insufficient_quota", kind="insufficient_quota",
            )  # fmt: skip

    def salt(self, tenant: str) -> bytes:
        """Prompts are compared within a tenant alone."""
        found = self._salts.get(tenant)
        if found is None:
            found = self._salts[tenant] = blake2b(tenant.encode(), digest_size=16).digest()
        return found

    def turn(self) -> None:
        """Begin those whose turn it is, and wake workers that have some."""
        if self._turning:
            self.turn_soon()
            return
        self._turning = True
        try:
            for one in self.gate.turn(self.number, now_us()):
                call = self.calls.get(one.ticket)
                if call is None:
                    self.gate.abandon(one.ticket, now_us())
                    self.turn_soon()
                    continue
                try:
                    call.granted(one.replica)
                except Exception:  # of this call alone, and not of the one that asked for a turn
                    log.exception("request %s: unexpected", call.request.id)
                    call.crashed()
        finally:
            self._turning = False
        mask = self.gate.wakes() & ~(1 << self._seat)
        while mask:
            bit = (mask & -mask).bit_length() - 1
            mask &= mask - 1
            if bit < len(self.settings.wakes):
                with suppress(BlockingIOError):
                    os.eventfd_write(self.settings.wakes[bit], 1)

    def turn_soon(self) -> None:
        """After what is being done now."""
        if not self._turn_planned:
            self._turn_planned = True
            self.loop.call_soon(self._turn_now)

    _turn_planned = False

    def _turn_now(self) -> None:
        self._turn_planned = False
        self._count_ended()
        self.turn()

    def woken(self) -> None:
        """Another worker says that there is a turn."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.settings.wakes[self._seat])
        self.turn()

    def has_replica(self, service: str) -> bool:
        """Whether one is ready, as far as this worker knows."""
        return any(one.state is State.READY for one in self.directory.of_service.get(service, {}).values())

    def failed(self, pool: Pool, why: str, *, surely: bool) -> None:
        """A replica failed: leave it out for a while, where it is its own fault."""
        seconds = pool.failed(why, surely=surely)
        if not seconds:
            return
        self._set_replica(int(pool.row.launch, 16), pool)
        self.loop.call_later(seconds + 0.01, self._back, int(pool.row.launch, 16))

    def took(self, call: Call, time: Time, seconds: float, tokens: int = 0, *, so_far: bool = False) -> None:
        """What a call's replica took; where it is slow, or no longer, that is said once."""
        changed = self.gate.took(call.ticket, now_us(), time, int(seconds * 1e6), tokens=tokens, so_far=so_far)
        row = call.replica
        if changed is None or row is None:
            return
        self._slow[row.service] = {}
        if changed.standing is Standing.OUT:
            self.metrics.add("replica_slow", row.service)
            log.warning(
                "replica %s of %s: slow: %s at least %d times as long as with most others; left out for %g s",
                row.launch, row.service, _TIMES[time], changed.times_slower, (changed.standing_us - now_us()) / 1e6,
            )  # fmt: skip
        else:
            log.warning("replica %s of %s: no longer slow", row.launch, row.service)
        self.turn_soon()

    def _look_at_slow(self) -> None:
        """Which replicas are slow, of services that had some."""
        if not self._slow:
            return
        names = {subject("service", name): name for name in self._slow}
        found: dict[str, dict[str, int]] = {}
        for one in self.gate.replicas():
            if one.service in names and one.times_slower and not one.removed:
                found.setdefault(names[one.service], {})[f"{one.name:016x}"] = one.times_slower
        self._slow = found

    def _back(self, launch: int) -> None:
        pool = self.pools.get(launch)
        if pool is not None:
            self._set_replica(launch, pool)
            self.turn()

    def _set_replica(self, launch: int, pool: Pool) -> None:
        row = pool.row
        if time.monotonic() < pool.out_until or row.state is not State.READY:
            use = Use.NO
        else:
            use = Use.LAST if row.suspect else Use.USABLE
        self.gate.set_replica(launch, subject("service", row.service), row.slots, use)

    def _remove_replica(self, launch: int) -> None:
        try:
            self.gate.remove_replica(launch)
        except CoreError as error:
            if error.code != UNKNOWN:  # another worker was told first
                raise

    # ---- what the parent says ----

    def told(self, message: dict[str, Any]) -> None:
        """A message of the parent."""
        if "rows" in message:
            self._take_rows(message["rows"])
        if "metrics" in message:
            client, request = self._metrics_waiting.pop(message["metrics"], (None, None))
            if client is not None and request is not None and client.request is request:
                self.log(request, 200)
                client.answer(200, "text/plain; version=0.0.4; charset=utf-8", message["text"].encode())
        if "revoked" in message:
            self.keys.revoked(message["revoked"], silent=message["silent"])
        if "parts" in message:
            self.parts.told(message)
        if "claim" in message:
            self.names.told(message)
        if message.get("do") == "drain":
            self.replaced = message.get("replaced") is True
            self.drain()

    def _take_rows(self, sections: dict[str, Any]) -> None:
        before = self.directory.limits, self.directory.accounts
        self.directory.take(sections)
        if (self.directory.limits, self.directory.accounts) != before:
            self._subjects.clear()
            self._callers.clear()
        replicas = self.directory.replicas
        for launch in [launch for launch in self.pools if launch not in replicas]:
            self.pools.pop(launch).end()
            self._remove_replica(launch)
        for launch, row in replicas.items():
            pool = self.pools.get(launch)
            if pool is None:
                if row.state is not State.READY:
                    continue
                pool = self.pools[launch] = Pool(launch, row, self._context)
            elif (pool.row.host, pool.row.port, pool.row.fingerprint) != (row.host, row.port, row.fingerprint):
                pool.end()
                pool = self.pools[launch] = Pool(launch, row, self._context)
            pool.row = row
            if row.state is not State.READY:
                pool.end()
            self._set_replica(launch, pool)
        self.turn()

    # ---- records and logs ----

    def write(self, record: RequestRecord, *, request_id: str, repeated: bool) -> None:
        """A request has ended. Its bill is written at once; it is counted and logged when its client has the answer."""
        if repeated:
            self.repeated.bill(record.id)
        self._append(record)
        self._ended.append((record, request_id))

    def _count_ended(self) -> None:
        ended, self._ended = self._ended, []
        add = self.metrics.add
        for record, request_id in ended:
            service = record.service
            add("requests", service, record.outcome)
            add("prompt_tokens", service, "", record.prompt_tokens)
            add("completion_tokens", service, "", record.completion_tokens)
            self.metrics.time("request_seconds", service, record.total_s)
            if record.first_token_s is not None:
                self.metrics.time("first_token_seconds", service, record.first_token_s)
            if self.settings.access_log:
                named = "" if record.id == request_id else f" record={record.id}"
                self._lines.append(
                    f"request={request_id}{named} user={record.user} tenant={record.tenant} service={service}"
                    f" path={record.endpoint} status={record.status} outcome={record.outcome}"
                    f" seconds={record.total_s:.3f} tokens={record.prompt_tokens}+{record.completion_tokens}"
                    f" resumed={record.resumed}\n"
                )

    def _append(self, record: RequestRecord) -> None:
        try:
            self._records.write(record)
        except OSError as error:
            self.metrics.add("records_failed")
            self._late.append(record)
            if self._spare is not None:
                self._spare.keep(record)
            log.error("a usage record could not be written, and is tried again: %s", error)
        except (SluiceError, ValueError) as error:  # it never will be, and must not be in the way of others
            self.metrics.add("records_failed")
            log.error("the usage record of request %s is lost: %s", record.id, error)

    def check_records(self) -> None:
        """Raises RefusalError where so many usage records wait for the disk that another one has no room."""
        if self._late and len(self._late) + len(self.calls) >= MOST_LATE_RECORDS:
            raise RefusalError(
                503, "this gateway cannot write usage records", remedy="tell an admin that its disk is full",
                code="busy", retry_after=1.0,
            )  # fmt: skip

    def _write_late(self) -> None:
        while self._late:
            try:
                self._records.write(self._late[0])
            except OSError:
                return
            self._late.popleft()
        if self._spare is not None:
            self._spare.clear()

    def log(
        self, request: Request, status: int, *, call: Call | None = None, caller: Caller | None = None, tenant: str = ""
    ) -> None:
        """A line of the access log, for what has no usage record."""
        if not self.settings.access_log:
            return
        caller = call.caller if call is not None else caller
        path = request.route.path if request.route is not None else "-"
        user = "-" if caller is None else caller.user
        tenant = (tenant if call is None else call.tenant) or "-"
        self._lines.append(
            f"request={request.id} user={user} tenant={tenant} service=- path={path} status={status}"
            f" address={request.address}\n"
        )

    def log_prompt(self, call: Call) -> None:
        """A request was admitted: a line of the access log with its prompt, only where its service says so."""
        asked, caller = cast(Asked, call.asked), cast(Caller, call.caller)
        service = self.directory.services.get(asked.model)  # as it is now: the request may have waited
        if self.settings.access_log and service is not None and service.log_prompts:
            self._lines.append(
                f"request={call.request.id} user={caller.user} tenant={call.tenant} service={service.name}"
                f" prompt={asked.prompt(bounds.MOST_LOGGED)}\n"
            )

    def flush(self) -> None:
        """Write the access log's lines."""
        self._count_ended()
        if self._lines:
            lines, self._lines = self._lines, []
            with suppress(OSError):
                os.write(2, "".join(f"sluice: {line}" for line in lines).encode(errors="replace"))

    # ---- again and again ----

    async def run(self) -> None:
        """Until it is drained."""
        round_ = 0
        while not (self.draining and not self._clients):
            await asyncio.sleep(bounds.SWEEP_S)
            round_ += 1
            try:
                self.sweep(time.monotonic(), full=not round_ % 4)
            except Exception:
                log.exception("sweep: unexpected")
        self._write_late()
        self._lines += [f"usage record that cannot be written: {render(one).decode()}" for one in self._late]
        self.flush()
        self._tell_counts()
        if self._spare is not None:
            self._spare.close()

    def sweep(self, now: float, *, full: bool) -> None:
        """What is over, too slow or silent."""
        for ticket in self.gate.expired(self.number, int(now * 1e6)):
            call = self.calls.get(ticket)
            if call is not None:
                call.expired()
            else:
                self.gate.abandon(ticket, int(now * 1e6))
        for call in list(self.waiting.values()):
            if self.alone:  # another gateway gets it a replica: nobody shall wait here until the deadline
                call.client.abort()
            else:
                call.sweep(now)
        for call in list(self.calls.values()):
            call.look(now)
        self.parts.sweep(now)
        with suppress(SluiceError):
            self.keys.refresh()
        self.flush()
        if full:
            for client in list(self._clients):
                client.sweep(now)
            for pool in self.pools.values():
                pool.sweep(now)
            self._refused.forget(now)
            self._write_late()
            self._tell_counts()
            self._tell_callers()
        self._tell_demand(now)
        self.turn()

    def _tell_counts(self) -> None:
        self._count_ended()
        self.tell({"counts": [[*key, value] for key, value in self.metrics.counts.items()]})

    def _tell_callers(self) -> None:
        """Who has how many requests here, those that wait included."""
        found: Counter[str] = Counter()
        for call in self.calls.values():
            if call.caller is not None:
                found.update((f"key/{call.caller.key}", f"user/{call.caller.user}", f"tenant/{call.tenant}"))
        self.tell({"callers": asdict(callers_of([Callers(dict(found))]))})

    def demand_now(self, service: str) -> None:
        """Nobody can serve it: say so at once."""
        if service not in self._asked:
            self._asked.add(service)
            self.loop.call_soon(self._tell_demand, time.monotonic())

    def _tell_demand(self, now: float) -> None:
        """What each service is asked for here."""
        self._asked.clear()
        waiting: Counter[str] = Counter()
        oldest: dict[str, float] = {}
        flying: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for ticket, call in self.calls.items():
            if call.service is None or call.asked is None:
                continue
            name = call.service.name
            if ticket in self.waiting:
                waiting[name] += 1
                oldest[name] = max(oldest.get(name, 0.0), now - call.admitted)
            else:
                flying[name] += 1
                tokens[name] += call.asked.reserved(call.service.default_tokens)
        self._look_at_slow()
        names = {*waiting, *flying, *self._slow}
        if names or self._said_demand:
            self.tell(
                {
                    "demand": [
                        asdict(
                            Demand(
                                name,
                                self._name,
                                waiting[name],
                                oldest.get(name, 0.0),
                                flying[name],
                                tokens[name],
                                self.delays.high(name, now),
                                self._slow.get(name, {}),
                            )  # fmt: skip
                        )
                        for name in names
                    ]
                }
            )
        self._said_demand = bool(names)

    _said_demand = False

    def drain(self) -> None:
        """Take nothing new; end when what there is has ended."""
        if self.draining:
            return
        self.draining = True
        if self.server is not None:
            self.server.close()
        for client in list(self._clients):
            client.drain()

    server: asyncio.Server | None = None


def now_us() -> int:
    """The gate's clock, which all workers of a host share."""
    return time.monotonic_ns() // 1000


def process_start(pid: int) -> int:
    """When a process began, in the kernel's ticks."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def client_context(certificate: str, key: str) -> ssl.SSLContext:
    """TLS for clients. Raises SluiceError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise SluiceError(f"{certificate}, {key}: {error}", remedy="name a certificate and its key, PEM") from error
    return context


def spare_of(records: Path) -> Spare | None:
    """Room for records while the disk is full; None where it is so already."""
    try:
        return Spare(records)
    except OSError as error:
        log.error("%s: no room for usage records while the disk is full: %s", records, error)
        return None


async def _talk(worker: Worker, control: socket.socket) -> None:
    """Messages of the parent; without a parent, drain."""
    reader, writer = await asyncio.open_connection(sock=control, limit=64 << 20)

    def tell(message: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(message).encode() + b"\n")

    worker.tell = tell
    tell({"ready": os.getpid(), "worker": worker.number})
    with suppress(OSError):  # of a parent that was killed before it had read all, the connection is reset
        while line := await reader.readline():
            try:
                worker.told(json.loads(line))
            except Exception:
                log.exception("a message of the parent: unexpected")
    worker.alone = True
    worker.drain()


async def _main(settings: Settings, control: socket.socket, gate: Gate, repeated: Repeated) -> None:
    loop = asyncio.get_running_loop()
    provider_settings = load_settings(Path(settings.oidc))
    provider = None if provider_settings is None else Provider(provider_settings)
    keys = Keys(TokenStore(Path(settings.tokens)), provider, partial(ask_controllerd, Path(settings.controllerd)))
    with suppress(SluiceError):
        keys.refresh()
    records = Path(settings.records)
    worker = Worker(settings, gate, repeated, keys, RequestLog(records), loop, spare_of(records))
    loop.add_reader(settings.wakes[gate.seat(worker.number)], worker.woken)
    context = client_context(settings.certificate, settings.key) if settings.certificate and settings.key else None
    loop.add_signal_handler(signal.SIGTERM, worker.drain)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    talking = loop.create_task(_talk(worker, control))
    while not (worker.directory.complete or worker.draining or talking.done()):
        await asyncio.sleep(0.01)
    listening = socket.socket(fileno=settings.listening)
    worker.server = await loop.create_server(lambda: Client(worker), sock=listening, ssl=context, backlog=1024)
    worker.tell({"listening": os.getpid()})
    if worker.draining:
        worker.server.close()
    await worker.run()
    await asyncio.sleep(0.05)  # the last message to the parent
    talking.cancel()


def settings_of(line: bytes) -> Settings:
    """The parent's first line."""
    told: dict[str, Any] = {
        name: tuple(one) if isinstance(one, list) else one for name, one in json.loads(line).items()
    }
    return Settings(**told)


def main() -> None:
    """A worker's process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    first = bytearray()
    while not first.endswith(b"\n"):
        piece = control.recv(1)
        if not piece:
            return
        first += piece
    settings = settings_of(first)
    start_logging(verbose=settings.verbose)
    gate = Gate(mmap.mmap(settings.region, 0))
    repeated = Repeated(mmap.mmap(settings.repeated, 0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(settings, control, gate, repeated))


if __name__ == "__main__":
    main()
