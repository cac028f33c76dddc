"""The gateway's first process: it keeps the listening sockets and the gate's memory, follows replicad, and has workers.

It answers nothing itself. A worker that dies is replaced, and what its requests had used is billed from the gate.
SIGHUP replaces all workers: new ones take connections from the same sockets, the old ones end what they have. A worker
whose parent died ends what it has, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import secrets
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from sluice.base.errors import SluiceError
from sluice.base.rates import FewLines
from sluice.base.run import PYTHON
from sluice.base.service import notify
from sluice.base.text import one_line
from sluice.base.tokens import TokenStore
from sluice.core.gate import Gate, Settled, Shape
from sluice.exchange.requests import RequestLog, RequestRecord, prune
from sluice.exchange.serving import (
    ACCOUNTS,
    LIMITS,
    NO_LIMIT,
    NOBODY,
    REPLICAS,
    REVOKED,
    SERVICES,
    Callers,
    LeaseAnswer,
    LeaseReport,
    Limit,
    LimitRow,
    SubjectKind,
    callers_of,
    row,
)
from sluice.exchange.snapshot import MOST_ANSWER, parse_answer, render_request
from sluice.serve.gateway import repeated
from sluice.serve.gateway.claims import Claims
from sluice.serve.gateway.directory import subject
from sluice.serve.gateway.figures import Key, render
from sluice.serve.gateway.leases import Leases, Need, State
from sluice.serve.gateway.revoked import Revoked
from sluice.serve.gateway.shelf import prune_files
from sluice.serve.gateway.spare import recover
from sluice.serve.gateway.worker import Settings, now_us, spare_of

_PERIOD_S: Final = 0.1
_TIMEOUT_S: Final = 5.0
_START_S: Final = 30.0  # until a worker must listen
_END_S: Final = 0.05
_AGAIN_S: Final = 0.5  # between two starts of one worker
_DRAIN_S: Final = 3600.0
_STOP_S: Final = 300.0  # for answers that run when it is to end; shorter than TimeoutStopSec of the unit
_SECTIONS: Final = (SERVICES, REPLICAS, LIMITS, ACCOUNTS)  # what workers know
REVOKED_FILE: Final = "revoked.json"
"""In the folder of records: keys that were revoked, on any host."""
_BACKLOG: Final = 4096
_DEMAND_S: Final = 3.0
_CALLERS_S: Final = 1.0
_DAY_S: Final = 86_400.0
_LATE_S: Final = 1.0  # between two tries to write a record
_LEASE_TIMEOUT_S: Final = 1.0
_LEASE_STEP_S: Final = 0.1
_LEASE_WATCH_S: Final = 0.005  # while places are to be given back at once, of fifty subjects
_LEASE_LEAST_S: Final = 0.005  # between two reports, so that what is needed at once is in one

log = logging.getLogger("sluice.gateway")
log.addFilter(FewLines())


@dataclass(frozen=True, slots=True)
class Options:
    """Of `sluice gateway`."""

    address: str
    port: int
    workers: int
    replicad: Path
    keep_s: float
    """For how long usage records are kept."""
    settings: Settings
    """Of the workers, without descriptors."""


class Follow:
    """The rows of replicad, and what is reported to it; `untold`: keys that were revoked, of which it has no row."""

    def __init__(
        self, path: Path, changed: Callable[[dict[str, Any]], None], untold: Callable[[], list[tuple[str, float]]]
    ) -> None:
        self.path = path
        self._untold = untold
        self.rows: dict[str, dict[str, Any]] = {name: {} for name in (*_SECTIONS, REVOKED)}
        self.complete = False
        self.demand: dict[str, tuple[float, list[dict[str, Any]]]] = {}
        """By worker, and when it said so."""
        self._epoch, self._last = "", 0
        self._coming: dict[str, dict[str, Any]] | None = None  # of an answer in pieces
        self._changed = changed
        self._problem = ""
        self._soon = asyncio.Event()

    def ask_soon(self) -> None:
        """Do not wait for the next time."""
        self._soon.set()

    async def run(self) -> None:
        """For ever. While replicad does not answer, what it said last holds."""
        while True:
            more = False
            self._soon.clear()  # before it asks: what is said meanwhile is not in this request
            try:
                more = await self.step()
                if self._problem:
                    log.warning("replicad answers again")
                self._problem = ""
            except (SluiceError, KeyError, TypeError, ValueError) as error:
                said = one_line(str(error), limit=300)
                if said != self._problem:
                    log.warning("services stay as they were: %s", said)
                self._problem = said
            if not more:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._soon.wait(), _PERIOD_S)

    async def step(self) -> bool:
        """Ask for what is new; whether there is more. Raises SluiceError, and what a bad answer raises."""
        now = time.monotonic()
        lately = [one for said, rows in self.demand.values() if now - said < _DEMAND_S for one in rows]
        words: dict[str, Any] = {"demand": lately, "revoked": self._untold()}
        answer = await self.ask(render_request("changes", epoch=self._epoch, last=self._last, **words))
        rows = self._coming if self._coming is not None else self.rows
        if answer["reset"]:
            rows = {name: {} for name in self.rows}
        touched = {name for name in rows if rows is not self.rows}
        for section, key, value in answer["rows"]:
            found = rows.get(section)
            if found is None:
                continue
            touched.add(section)
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
        self._epoch, self._last = answer["epoch"], answer["last"]
        if answer["more"]:
            self._coming = rows
            return True
        self.rows, self._coming = rows, None
        if touched or not self.complete:
            self.complete = True
            self._changed({name: self.rows[name] for name in touched or self.rows})
        return False

    async def ask(self, line: bytes, seconds: float = _TIMEOUT_S) -> dict[str, Any]:
        """What replicad answers. Raises SluiceError."""
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_unix_connection(str(self.path), limit=2 * MOST_ANSWER)
                try:
                    writer.write(line)
                    answer = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error) or "no answer in time"
            raise SluiceError(f"{self.path}: {said}", remedy="is sluice-replicad running on this host?") from error
        return parse_answer(answer)


class Child:
    """A worker's process, as its parent sees it."""

    def __init__(self, place: int, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.place = place
        self.process = process
        self.counts: dict[Key, float] = {}
        self.callers = NOBODY
        self.listening = asyncio.Event()
        self.retired = False
        self._writer = writer

    def tell(self, message: dict[str, Any]) -> None:
        """Send it a message."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """It has ended."""
        self._writer.close()


class Leasing:
    """Asks the authority of limits for this gateway's parts of them, and tells workers that wait."""

    def __init__(
        self, leases: Leases, ask: Callable[[LeaseReport], Awaitable[LeaseAnswer]], revoked: Revoked,
        revoked_here: Callable[[], None], tell_keys: Callable[[], None],
    ) -> None:  # fmt: skip
        self.leases = leases
        self.revoked = revoked
        self._revoked_here, self._tell_keys = revoked_here, tell_keys
        self._keys_at = 0.0
        self._ask = ask
        self._waiting: list[tuple[Child, int]] = []  # who is to hear of the next answer, and of which request
        self._soon = asyncio.Event()
        self._problem = ""
        self.claims = Claims(secrets.token_hex(8), self._soon.set)

    def need(self, child: Child, message: dict[str, Any]) -> None:
        """Requests of a worker wait for more."""
        self.leases.need([Need(*one) for one in message["needs"]], now_us())
        self._waiting.append((child, message["need"]))
        self._soon.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self._step()
            except Exception:  # without it nothing that has limits is let in
                log.exception("limits: unexpected")
                await asyncio.sleep(_LEASE_STEP_S)

    async def _step(self) -> None:
        self.leases.sweep(now_us())
        self._look_at_keys()
        if self.leases.state is State.SHARE and self._waiting:
            waiting, self._waiting = self._waiting, []
            self._tell(waiting, known=True)
        if self.leases.due(now_us()) or self.claims.due:
            await self._exchange()
            await asyncio.sleep(_LEASE_LEAST_S)
            return
        self._soon.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._soon.wait(), self._pause())

    def _look_at_keys(self) -> None:
        """Ten times a second: what was revoked here is said at once."""
        if time.monotonic() - self._keys_at >= _LEASE_STEP_S:
            self._keys_at = time.monotonic()
            if self.revoked.look(time.time()):
                self._revoked_here()
                self._tell_keys()

    def _pause(self) -> float:
        watched = self.leases.watched
        return min(_LEASE_WATCH_S * (1 + watched // 50), _LEASE_STEP_S) if watched else _LEASE_STEP_S

    async def _exchange(self) -> None:
        waiting, self._waiting = self._waiting, []
        report = self.revoked.of_report(self.claims.of_report(self.leases.report(now_us())))
        answer, silent = None, self.revoked.silent(time.monotonic())
        try:
            answer = await self._ask(report)
            self.leases.take(answer, now_us())
            problem = ""
        except SluiceError as error:
            problem = one_line(str(error), limit=300)
        if problem != self._problem:
            self._problem = problem
            log.warning("limits: %s", problem or "are leased again")
        self.claims.take(report, answer)
        if answer is not None:
            self.revoked.answered(answer, time.monotonic())
        if self.revoked.silent(time.monotonic()) != silent:
            self._tell_keys()
        self._tell(waiting, known=not problem and self.leases.state is not State.NONE)
        if problem:
            await asyncio.sleep(_LEASE_STEP_S)

    def _tell(self, waiting: list[tuple[Child, int]], *, known: bool) -> None:
        retry = [[kind, name, us] for (kind, name), us in self.leases.retry.items()]
        soon = list(self.leases.soon)
        for child, number in waiting:
            child.tell({"parts": number, "known": known, "retry": retry, "soon": soon})

    async def leave(self) -> None:
        """What this gateway has is free."""
        with suppress(SluiceError):
            await self._ask(self.claims.of_report(self.leases.leave()))


class Parent:
    """The process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        shape = Shape()
        self._shape = shape
        self._region = _memory("sluice-gate", shape.size())
        self._repeated = _memory("sluice-repeated", repeated.SIZE)
        self._table = repeated.Repeated.create(mmap.mmap(self._repeated, 0))
        self.gate = Gate.create(mmap.mmap(self._region, 0), shape)
        self._wakes = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(shape.workers))
        self._sockets = _listen(options)
        self._children: set[Child] = set()
        self._current: dict[int, Child] = {}
        self._dead: Counter[Key] = Counter()
        self._limits: dict[tuple[str, str], Limit] = {}
        self._records = RequestLog(Path(options.settings.records))
        self._store = TokenStore(Path(options.settings.tokens))
        revoked = Revoked(self._store, self._records.folder / REVOKED_FILE, socket.gethostname(), time.time())
        self._follow = Follow(options.replicad, self._changed, revoked.untold)
        self.leasing = Leasing(
            Leases(self.gate, lambda: secrets.token_hex(8), self._limit), self._ask_for_parts, revoked,
            self._follow.ask_soon, self._tell_keys,
        )  # fmt: skip
        self._sent: dict[str, Any] = {}
        self._late: deque[RequestRecord] = deque()
        self._spare = spare_of(self._records.folder)
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reloading = asyncio.Lock()
        self._lately: deque[float] = deque(maxlen=16)

    @property
    def port(self) -> int:
        """Where it listens."""
        found: int = self._sockets[0].getsockname()[1]
        return found

    async def run(self) -> None:
        """Until SIGTERM."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._start(self.reload()))
        following = loop.create_task(self._follow.run())
        leasing = loop.create_task(self.leasing.run())
        pruning = loop.create_task(self._prune())
        telling = loop.create_task(self._tell_callers())
        writing = loop.create_task(self._keep_writing())
        await asyncio.gather(*(self._replace(place) for place in range(len(self._sockets))))
        notify("READY=1")
        log.info("listening on port %d with %d workers", self.port, len(self._sockets))
        await stop.wait()
        notify("STOPPING=1")
        self._stopping = True
        following.cancel()
        pruning.cancel()
        telling.cancel()
        for one in self._sockets:
            one.close()
        for child in list(self._children):
            child.tell({"do": "drain"})
        await self._end_all()
        writing.cancel()
        leasing.cancel()
        await self.leasing.leave()
        self._write_late()
        if self._late:
            log.error("%d usage records of workers that were killed wait for the disk", len(self._late))
        if self._spare is not None:
            self._spare.close()

    def _keys(self) -> dict[str, Any]:
        """What workers must know of keys beyond the store."""
        revoked = self.leasing.revoked
        return {"revoked": list(revoked.digests), "silent": revoked.silent(time.monotonic())}

    def _tell_keys(self) -> None:
        for child in self._children:
            child.tell(self._keys())

    async def _tell_callers(self) -> None:
        """Say again and again who has how many requests here."""
        name = f"{socket.gethostname()}:{os.getpid()}"
        while True:
            await asyncio.sleep(_CALLERS_S)
            found = callers_of(child.callers for child in self._children)
            with suppress(SluiceError):  # what replicad does not hear, it forgets
                await self._follow.ask(render_request("callers", gateway=name, callers=asdict(found)))

    async def _prune(self) -> None:
        """Remove old usage records, files and batches, once a day."""
        while True:
            try:
                folder = Path(self.options.settings.records)
                for path in await asyncio.to_thread(prune, folder, time.time(), self.options.keep_s):
                    log.info("%s: removed", path)
                await asyncio.to_thread(prune_files, Path(self.options.settings.services), time.time())
            except OSError as error:
                log.error("old usage records or files stay: %s", error)
            await asyncio.sleep(_DAY_S)

    async def reload(self) -> None:
        """New workers for all old ones."""
        async with self._reloading:
            notify("RELOADING=1", f"MONOTONIC_USEC={now_us()}")
            for place in range(len(self._sockets)):
                if not self._stopping:
                    await self._replace(place)
            notify("READY=1")
            log.info("reloaded")

    async def _replace(self, place: int) -> None:
        """A new worker; the old one of the same socket takes nothing new as soon as it listens."""
        old = self._current.get(place)
        child = await self._spawn(place)
        self._current[place] = child
        try:
            async with asyncio.timeout(_START_S):
                await child.listening.wait()
        except TimeoutError:
            log.error("worker %d: does not listen after %g s", child.process.pid, _START_S)
            if old is not None:
                self._current[place], child.retired = old, True
                child.process.kill()
                return
        if old is not None:
            old.retired = True
            old.tell({"do": "drain", "replaced": True})
            self._start(self._end_of(old))

    async def _end_all(self) -> None:
        """Until all workers have ended and are billed; what takes too long is cut."""
        end = time.monotonic() + _STOP_S
        while self._children:
            if time.monotonic() > end:
                for child in self._children:
                    log.warning("worker %d: has requests after %g s; ended", child.process.pid, _STOP_S)
                    with suppress(ProcessLookupError):
                        child.process.kill()
                end += _TIMEOUT_S
            await asyncio.sleep(_END_S)

    async def _end_of(self, child: Child) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                await child.process.wait()
        except TimeoutError:
            log.warning("worker %d: has requests after %g s; ended", child.process.pid, _DRAIN_S)
            child.process.kill()

    async def _spawn(self, place: int) -> Child:
        ours, theirs = socket.socketpair()
        settings = replace(
            self.options.settings, listening=self._sockets[place].fileno(), region=self._region,
            repeated=self._repeated,
            wakes=self._wakes,
        )  # fmt: skip
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *PYTHON, "-m", "sluice.serve.gateway.worker", str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), settings.listening, settings.region, settings.repeated, *settings.wakes),
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=ours, limit=64 << 20)
        writer.write(json.dumps(asdict(settings)).encode() + b"\n")
        child = Child(place, process, writer)
        self._children.add(child)
        child.tell(self._keys())
        if self._follow.complete:
            child.tell({"rows": self._rows()})
        if self._stopping:  # it was begun before
            child.tell({"do": "drain"})
        self._start(self._hear(child, reader))
        self._start(self._watch(child))
        return child

    async def _hear(self, child: Child, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                self._heard(child, json.loads(line))

    def _heard(self, child: Child, message: dict[str, Any]) -> None:
        if "listening" in message:
            child.listening.set()
        if "counts" in message:
            child.counts = {(name, service, what): value for name, service, what, value in message["counts"]}
        if "demand" in message:
            self._follow.demand[str(child.process.pid)] = time.monotonic(), message["demand"]
            if any(one["waiting"] for one in message["demand"]):
                self._follow.ask_soon()
        if "callers" in message:
            child.callers = Callers(**message["callers"])
        if "need" in message:
            self.leasing.need(child, message)
        if "claim" in message:
            self.leasing.claims.claim(child, message["claim"], message["name"])
        if "ended" in message:
            self.leasing.claims.end(child, message["ended"], billed=message["billed"])
        if "metrics" in message:
            child.tell({"metrics": message["metrics"], "text": self._figures()})

    async def _watch(self, child: Child) -> None:
        """Wait for its end; another one takes its place."""
        code = await child.process.wait()
        self._children.discard(child)
        self._follow.demand.pop(str(child.process.pid), None)
        self._dead.update(child.counts)
        child.close()
        self._bill(child.process.pid)
        self.leasing.claims.gone(child, self._table.billed)
        child.listening.set()
        if child.retired or self._stopping:
            return
        log.error("worker %d: ended with %d; another one takes its place", child.process.pid, code)
        while not self._stopping and self._current.get(child.place) is child:
            await asyncio.sleep(_AGAIN_S if self._often() else 0.0)
            self._current.pop(child.place, None)
            await self._replace(child.place)

    def _often(self) -> bool:
        now = time.monotonic()
        self._lately.append(now)
        return len(self._lately) >= 4 and now - self._lately[-4] < 2.0

    # ---- bills of workers that died ----

    def _bill(self, pid: int) -> None:
        """What its requests had used."""
        for worker in self.gate.workers():
            if worker.pid != pid:
                continue
            left = self.gate.left(worker.pid, worker.start)
            if left:
                names = self._names()
                for one in left:
                    self._write(one, names)
            self.gate.reap(worker.pid, worker.start, now_us())
        self._wake_all()

    def _wake_all(self) -> None:
        for number in self._wakes:
            with suppress(BlockingIOError):
                os.eventfd_write(number, 1)

    def _write(self, one: Settled, names: dict[int, str]) -> None:
        now, wall = now_us(), time.time()
        begun = wall - (now - one.admitted_us) / 1e6
        replica = self._follow.rows[REPLICAS].get(f"{one.replica:016x}", {})
        record = RequestRecord(
            f"{one.tag:032x}", begun, wall, names.get(one.key, f"{one.key:016x}"), names.get(one.user, "unknown"),
            names.get(one.tenant, "unknown"), names.get(one.service, "unknown"), replica.get("job", 0),
            one.prompt_tokens,
            one.completion_tokens, 0, "failed", 499, max(one.granted_us - one.admitted_us, 0) / 1e6, None,
            wall - begun, "",
        )  # fmt: skip
        self._table.bill(record.id)
        try:
            self._records.write(record)
        except OSError as error:
            self._late.append(record)
            if self._spare is not None:
                self._spare.keep(record)
            log.error("a usage record could not be written, and is tried again: %s", error)
        except (SluiceError, ValueError) as error:
            log.error("the usage record of request %s is lost: %s", record.id, error)

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(_LATE_S)
            self._write_late()

    def _write_late(self) -> None:
        with suppress(OSError):
            while self._late:
                self._records.write(self._late[0])
                self._late.popleft()
            if self._spare is not None:
                self._spare.clear()
            if count := recover(self._records.folder, self._records):
                log.info("%d usage records of processes that were killed while the disk was full are written", count)

    def _names(self) -> dict[int, str]:
        """Keys, users, tenants and services by the gate's numbers."""
        rows = self._follow.rows
        known = [("service", name) for name in rows[SERVICES]] + [("user", name) for name in rows[ACCOUNTS]]
        known += [("tenant", tenant) for one in rows[ACCOUNTS].values() for tenant in one["tenants"]]
        with suppress(SluiceError):
            known += [("key", name) for name in self._store.tokens()]
        return {subject(kind, name): name for kind, name in known}

    # ---- rows and figures ----

    def _rows(self) -> dict[str, Any]:
        return {name: _plain(name, self._follow.rows[name]) for name in _SECTIONS}

    def _limit(self, kind: SubjectKind, name: str) -> Limit | None:
        found = self._limits.get((kind, name)) or self._limits.get((kind, "*"))
        return None if found == NO_LIMIT else found

    async def _ask_for_parts(self, report: LeaseReport) -> LeaseAnswer:
        answer = await self._follow.ask(render_request("lease", report=asdict(report)), _LEASE_TIMEOUT_S)
        return row(LeaseAnswer, answer["lease"])

    def _changed(self, sections: dict[str, Any]) -> None:
        """Tell the workers, where it is news for them."""
        if (revoked := sections.pop(REVOKED, None)) is not None and self.leasing.revoked.hear(revoked):
            self._tell_keys()
        if LIMITS in sections:
            known = [row(LimitRow, one) for one in sections[LIMITS].values()]
            limits: dict[tuple[str, str], Limit] = {(one.kind, one.name): one.limit for one in known}
            if limits != self._limits:
                self._limits = limits
                self.leasing.leases.changed()
        news = {}
        for name, rows in sections.items():
            plain = _plain(name, rows)
            if self._sent.get(name) != plain:
                news[name] = self._sent[name] = plain
        if news:
            for child in self._children:
                child.tell({"rows": news if len(self._sent) == len(_SECTIONS) else self._rows()})

    def _figures(self) -> str:
        total = Counter(self._dead)
        for child in self._children:
            total.update(child.counts)
        gauges = [("workers", "Workers that run.", "", float(len(self._children)))]
        for name in self._follow.rows[SERVICES]:
            found = self.gate.service(subject("service", name))
            gauges += [
                ("waiting", "Requests that wait for their turn.", name, float(found.waiting)),
                ("in_flight", "Requests that a replica has.", name, float(found.in_flight)),
                ("tokens_in_flight", "Tokens that these have reserved.", name, float(found.tokens_in_flight)),
                ("replicas_usable", "Replicas that get requests.", name, float(found.usable - found.out)),
                ("replicas_slow", "Replicas that are left out as slow, or on trial.", name, float(found.out)),
            ]
        return render(total, gauges)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _plain(section: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Rows without what changes each second and decides nothing."""
    if section != REPLICAS:
        return dict(rows)
    return {key: {**row, "heard": 0.0} for key, row in rows.items()}


def _memory(name: str, size: int) -> int:
    """Memory that workers share: its descriptor."""
    number = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(number, size)
    return number


def _listen(options: Options) -> list[socket.socket]:
    """A listening socket for each worker, of one address: the kernel spreads connections. Raises SluiceError."""
    made: list[socket.socket] = []
    port = options.port
    family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
    try:
        for _ in range(options.workers):
            one = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((options.address, port))
            port = one.getsockname()[1]
        for one in made:
            one.listen(_BACKLOG)
    except OSError as error:
        for one in made:
            one.close()
        raise SluiceError(
            f"--address {options.address} --port {port}: {error.strerror}", remedy="is it another program's?"
        ) from error
    return made


def serve(options: Options) -> None:
    """Until SIGTERM. Raises SluiceError."""

    async def run() -> None:
        await Parent(options).run()

    asyncio.run(run())
