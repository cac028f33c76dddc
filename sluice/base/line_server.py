"""Sockets on which one line asks and one line answers: one poll loop reads and writes, a few threads find the answers.

No thread waits for a connection: who says nothing, says it slowly or does not read the answer has a place for a bounded
time, and nothing else. Connections are of kinds, each with places, threads and rates of its own. Where a kind's places
are full, the owner who has most of them loses the oldest; owners' requests are answered in turn.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any

_LOOK_S = 2.0  # at the longest between two questions whether to go on
_TICK_S = 0.25  # the same while there are connections
_LAST_S = 0.3  # for answers that are being found when the server stops
_PAUSE_S = 0.1  # without accepting, where no descriptor is left
_ROUND = 256  # connections that are accepted before others are looked at
_PIECE = 1 << 16
_OTHER_FILES = 512  # that the process has open besides connections

Owner = tuple[Hashable, ...]
"""Who has a connection, from the widest to the narrowest, e.g. a user and one of the jobs."""

log = logging.getLogger("sluice.line_server")


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and so many a second from then on."""

    burst: int
    per_second: float


@dataclass(frozen=True, slots=True)
class Kind:
    """What connections of one kind may have."""

    name: str
    places: int  # all together
    threads: int
    line: int  # bytes of a request
    held: int  # bytes of all requests that are not answered yet
    seconds: float  # in which a request must have come, and an answer must have been taken
    rates: tuple[Rate, ...] = ()  # requests of all together, then of each part of an owner
    once: bool = False  # one request a connection
    too_long: bytes = b""  # the answer to a longer line


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose connection it is, and what the answer's function is given of that."""

    kind: Kind
    owner: Owner
    who: Any = None


Greet = Callable[[socket.socket, Any], Asker]
"""Who has connected, from which address. OSError: nobody any more."""
Answer = Callable[[bytes, Any], bytes | None]
"""The answer, with its newline, to a line and `Asker.who`; None closes the connection. Called by several threads."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket. `rate`: of connections that are accepted; the others wait in the kernel's queue."""

    socket: socket.socket
    greet: Greet
    rate: Rate | None = None


class Budgets:
    """How much each owner has spent of some rates. Not thread-safe."""

    def __init__(self, rates: Sequence[Rate]) -> None:
        self._rates = rates
        self._until: dict[Owner, float] = {}  # when all that was taken is earned again

    def wait(self, owner: Owner, now: float) -> float:
        """Seconds until the owner may take one more; 0: now."""
        return max(
            (
                self._until.get(owner[:part], now) - now - (rate.burst - 1) / rate.per_second
                for part, rate in enumerate(self._rates[: len(owner) + 1])
            ),
            default=0.0,
        )

    def take(self, owner: Owner, now: float) -> None:
        """Take one."""
        for part, rate in enumerate(self._rates[: len(owner) + 1]):
            self._until[owner[:part]] = max(self._until.get(owner[:part], now), now) + 1 / rate.per_second

    def forget(self, now: float) -> None:
        """Drop those who have earned all again."""
        for owner in [owner for owner, until in self._until.items() if until <= now]:
            del self._until[owner]


class _State(Enum):
    READING = auto()
    WAITING = auto()  # for its turn
    ANSWERING = auto()
    WRITING = auto()


@dataclass(eq=False, slots=True)
class _Connection:
    socket: socket.socket
    asker: Asker
    until: float
    state: _State = _State.READING
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""
    closed: bool = False
    last: bool = False  # it is closed when `outgoing` is written
    watched: int = select.EPOLLIN


class _Workers:
    """Threads that are started when there is work for them."""

    def __init__(self, kind: Kind, work: Callable[[_Connection, bytes], None]) -> None:
        self._kind = kind
        self._work = work
        self._queue: SimpleQueue[tuple[_Connection, bytes] | None] = SimpleQueue()
        self._threads = 0
        self.busy = 0

    @property
    def free(self) -> bool:
        return self.busy < self._kind.threads

    def give(self, connection: _Connection, line: bytes) -> None:
        self.busy += 1
        if self.busy > self._threads:
            self._threads += 1
            threading.Thread(target=self._run, name=self._kind.name, daemon=True).start()
        self._queue.put((connection, line))

    def end(self) -> None:
        for _ in range(self._threads):
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._work(*item)


class _Room:
    """The connections of one kind."""

    def __init__(self, kind: Kind, workers: _Workers) -> None:
        self.kind = kind
        self.workers = workers
        self.budgets = Budgets(kind.rates)
        self.waiting: dict[Owner, deque[_Connection]] = {}  # by the first part of the owner; who is next comes first
        self._mine: dict[Owner, dict[_Connection, None]] = {}  # the oldest first
        self._counts: Counter[Owner] = Counter()  # of each part of the owners

    def enter(self, connection: _Connection) -> None:
        owner = connection.asker.owner
        self._mine.setdefault(owner, {})[connection] = None
        self._counts.update(owner[:part] for part in range(len(owner) + 1))

    def leave(self, connection: _Connection) -> None:
        owner = connection.asker.owner
        del self._mine[owner][connection]
        if not self._mine[owner]:
            del self._mine[owner]
        for part in range(len(owner) + 1):
            self._counts[owner[:part]] -= 1
            if not self._counts[owner[:part]]:
                del self._counts[owner[:part]]
        queue = self.waiting.get(owner[:1])
        if connection.state is _State.WAITING and queue is not None:
            queue.remove(connection)
            if not queue:
                del self.waiting[owner[:1]]

    def all(self) -> list[_Connection]:
        return [connection for mine in self._mine.values() for connection in mine]

    def one_too_many(self) -> _Connection | None:
        """Who has to go where there are more than places."""
        return self._of_most(self._counts) if self._counts[()] > self.kind.places else None

    def one_too_large(self) -> _Connection | None:
        """Who has to go where all together sent more than is held."""
        held = Counter[Owner]()
        for owner, mine in self._mine.items():
            size = sum(len(connection.incoming) for connection in mine)
            held.update({owner[:part]: size for part in range(len(owner) + 1)})
        return self._of_most(held) if held[()] > self.kind.held else None

    def _of_most(self, weights: Counter[Owner]) -> _Connection:
        """Of the owner who has most, the oldest that has not asked yet, else the oldest."""
        owner: Owner = ()
        while owner not in self._mine:
            parts = (one for one in weights if len(one) == len(owner) + 1 and one[: len(owner)] == owner)
            owner = max(parts, key=weights.__getitem__)
        mine = self._mine[owner]
        return next((one for one in mine if one.state is _State.READING), next(iter(mine)))

    def queue(self, connection: _Connection) -> None:
        self.waiting.setdefault(connection.asker.owner[:1], deque()).append(connection)

    def next(self, now: float) -> _Connection | float | None:
        """Whose turn it is, or seconds until it is somebody's, or None where nobody waits."""
        if not self.waiting:
            return None
        least = self.budgets.wait((), now)
        if least > 0:
            return least
        least = _LOOK_S
        for owner, queue in self.waiting.items():
            wait = self.budgets.wait(owner, now)
            for connection in queue if wait <= 0 else ():
                wait = self.budgets.wait(connection.asker.owner, now)
                if wait <= 0:
                    self._take(owner, connection, now)
                    return connection
            least = min(least, wait)
        return least

    def _take(self, owner: Owner, connection: _Connection, now: float) -> None:
        self.budgets.take(connection.asker.owner, now)
        queue = self.waiting.pop(owner)
        queue.remove(connection)
        if queue:
            self.waiting[owner] = queue  # the last in turn


class LineServer:
    """Serves listeners of any kinds until it is stopped."""

    def __init__(self, kinds: Sequence[Kind], answer: Answer) -> None:
        _allow_open_files(sum(kind.places for kind in kinds) + _OTHER_FILES)
        self._answer = answer
        self._rooms = {kind.name: _Room(kind, _Workers(kind, self._find)) for kind in kinds}
        self._connections: dict[int, _Connection] = {}
        self._found: deque[tuple[_Connection, bytes | None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listeners: dict[int, _Door] = {}
        self._changes: deque[tuple[socket.socket, Listener | None]] = deque()
        self._ticked = 0.0

    def wake(self) -> None:
        """Ask at once whether to go on; also from a signal's handler."""
        os.eventfd_write(self._wake, 1)

    def listen(self, listener: Listener) -> None:
        """Serve one more, from now on; by any thread."""
        listener.socket.setblocking(False)
        self._changes.append((listener.socket, listener))
        self.wake()

    def leave(self, listening: socket.socket) -> None:
        """Close a listening socket; by any thread. Who has connected already is answered."""
        self._changes.append((listening, None))
        self.wake()

    def serve(self, goes_on: Callable[[], bool]) -> None:
        """Answer while `goes_on` says so, asked every two seconds or sooner; closes the listening sockets."""
        with select.epoll() as self._poll:
            self._poll.register(self._wake, select.EPOLLIN)
            pause = 0.0
            self._change_listeners()
            while goes_on():
                pause = self._round(pause)
            self._changes.extend((door.listener.socket, None) for door in self._listeners.values())
            self._change_listeners()
            end = time.monotonic() + _LAST_S
            while time.monotonic() < end and any(
                one.state in (_State.ANSWERING, _State.WRITING) for one in self._connections.values()
            ):
                self._round(min(pause, 0.02))
            for connection in list(self._connections.values()):
                self._close(connection)
        for room in self._rooms.values():
            room.workers.end()

    def _round(self, pause: float) -> float:
        """Wait `pause` seconds at most, do what there is to do; how long the next wait may be."""
        doors = []
        for number, events in self._poll.poll(pause):
            if number in self._listeners:
                doors.append(number)  # the last, as new connections get the numbers of those that are closed now
            elif number == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif number in self._connections:
                self._on_event(self._connections[number], events)
        for number in doors:
            self._accept(self._listeners[number], number)
        self._change_listeners()
        while self._found:
            self._on_answer(*self._found.popleft())
        now = time.monotonic()
        return min([self._tick(now), *(self._dispatch(room, now) for room in self._rooms.values())])

    # ---- in the poll loop ----

    def _change_listeners(self) -> None:
        while self._changes:
            listening, listener = self._changes.popleft()
            if listener is not None:
                self._listeners[listening.fileno()] = _Door(listener)
                self._poll.register(listening.fileno(), select.EPOLLIN)
            elif self._listeners.pop(listening.fileno(), None) is not None:
                self._poll.unregister(listening.fileno())
                listening.close()

    def _accept(self, door: _Door, number: int) -> None:
        now = time.monotonic()
        for _ in range(_ROUND):
            wait = door.budget.wait((), now)
            if wait > 0:
                return self._shut(door, number, now + wait)
            try:
                accepted, address = door.listener.socket.accept()
            except BlockingIOError:
                return None
            except OSError:  # gone again, or no descriptor is left
                return self._shut(door, number, now + _PAUSE_S)
            door.budget.take((), now)
            try:
                accepted.setblocking(False)
                asker = door.listener.greet(accepted, address)
            except OSError:
                accepted.close()
                continue
            self._enter(_Connection(accepted, asker, now + asker.kind.seconds))
        return None

    def _shut(self, door: _Door, number: int, until: float) -> None:
        door.shut_until = until
        self._poll.modify(number, 0)

    def _enter(self, connection: _Connection) -> None:
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        room = self._room(connection)
        room.enter(connection)
        if (loser := room.one_too_many()) is not None:
            self._close(loser)
        if not connection.closed:
            self._read(connection)

    def _room(self, connection: _Connection) -> _Room:
        return self._rooms[connection.asker.kind.name]

    def _on_event(self, connection: _Connection, events: int) -> None:
        if connection.state is _State.READING:
            self._read(connection)
        elif connection.state is _State.WRITING:
            self._write(connection)
        elif events & (select.EPOLLHUP | select.EPOLLERR):  # has gone without waiting for the answer
            self._close(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            piece = connection.socket.recv(min(_PIECE, connection.asker.kind.line - len(connection.incoming)))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._close(connection)
            return
        before = len(connection.incoming)
        connection.incoming += piece
        self._look_for_line(connection, before)
        grown = len(connection.incoming) // _PIECE > before // _PIECE
        if grown and (loser := self._room(connection).one_too_large()) is not None:
            self._close(loser)

    def _look_for_line(self, connection: _Connection, since: int = 0) -> None:
        kind = connection.asker.kind
        end = connection.incoming.find(b"\n", since, kind.line)
        if end >= 0:
            connection.state = _State.WAITING
            self._watch(connection, 0)
            self._room(connection).queue(connection)
        elif len(connection.incoming) >= kind.line:
            connection.last = True
            self._begin_writing(connection, kind.too_long)

    def _dispatch(self, room: _Room, now: float) -> float:
        while room.workers.free:
            connection = room.next(now)
            if not isinstance(connection, _Connection):
                return _LOOK_S if connection is None else connection
            line, _, rest = bytes(connection.incoming).partition(b"\n")
            connection.incoming = bytearray(rest)
            connection.state = _State.ANSWERING
            room.workers.give(connection, line)
        return _LOOK_S

    def _on_answer(self, connection: _Connection, answer: bytes | None) -> None:
        self._room(connection).workers.busy -= 1
        if connection.closed:
            return
        connection.last = connection.asker.kind.once or answer is None
        self._begin_writing(connection, answer or b"")

    def _begin_writing(self, connection: _Connection, answer: bytes) -> None:
        connection.state, connection.outgoing = _State.WRITING, answer
        connection.until = time.monotonic() + connection.asker.kind.seconds
        self._write(connection)

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.outgoing:
                connection.outgoing = connection.outgoing[connection.socket.send(connection.outgoing) :]
        except BlockingIOError:
            self._watch(connection, select.EPOLLOUT)
            return
        except OSError:
            connection.last = True
        if connection.last:
            self._close(connection)
            return
        connection.state = _State.READING
        connection.until = time.monotonic() + connection.asker.kind.seconds
        self._watch(connection, select.EPOLLIN)
        self._look_for_line(connection)

    def _watch(self, connection: _Connection, events: int) -> None:
        if connection.watched != events:
            self._poll.modify(connection.socket.fileno(), events)
            connection.watched = events

    def _tick(self, now: float) -> float:
        """Close what took too long, listen again where it was paused; seconds until there may be more to do."""
        pause = _LOOK_S
        for number, door in self._listeners.items():
            if door.shut_until:
                pause = min(pause, max(0.0, door.shut_until - now))
                if door.shut_until <= now:
                    door.shut_until = 0.0
                    self._poll.modify(number, select.EPOLLIN)
        if not self._connections or now < self._ticked + _TICK_S:
            return min(pause, _TICK_S) if self._connections else pause
        self._ticked = now
        for connection in list(self._connections.values()):
            if now > connection.until and connection.state in (_State.READING, _State.WRITING):
                self._close(connection)
        for room in self._rooms.values():
            room.budgets.forget(now)
        return min(pause, _TICK_S)

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._room(connection).leave(connection)
        number = connection.socket.fileno()
        del self._connections[number]
        with suppress(OSError):
            self._poll.unregister(number)
        connection.socket.close()

    # ---- in a worker ----

    def _find(self, connection: _Connection, line: bytes) -> None:
        answer = None
        try:
            if not connection.closed:
                answer = self._answer(line, connection.asker.who)
        except Exception:  # the fault of one request is not the end of others
            log.exception("a request: unexpected")
        self._found.append((connection, answer))
        self.wake()


class _Door:
    """A listener, and until when nobody is let in."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.budget = Budgets((listener.rate,) if listener.rate else ())
        self.shut_until = 0.0


def _allow_open_files(more: int) -> None:
    """So many more than are open now: where none were left before all places are taken, nobody would lose a place to
    others. systemd's usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + more
    if soft != resource.RLIM_INFINITY and soft < wanted:
        room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
