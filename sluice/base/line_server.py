"""Sockets with one line as request and one as answer: one poll loop reads and writes, a few threads find the answers.

A connection is for one request. No thread waits for it: a client that sends nothing, sends slowly or does not read the
answer only occupies a place for a bounded time. Connections are of kinds, each with its own places, threads and rates.
Where a kind's places are full, the owner with most of them loses the oldest; owners' requests are answered in turn.
Where it is known who connects, an owner without budget is not even accepted, which costs nothing. Where a line shows
whose it is, its connection changes to a place of that owner's when it is complete.
"""

from __future__ import annotations

import heapq
import logging
import os
import resource
import select
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any

from sluice.base.rates import Budgets, FewLines, Owner, Rate

_LOOK_S = 2.0  # at most between two checks whether to go on
_TICK_S = 0.5  # the same while there are connections
_LAST_S = 0.3  # for answers that are being found when the server stops
_AT_ONCE_S = 0.5  # so long one that has just connected may be about to send its request
_PAUSE_S = 0.1  # without accepting, where no descriptor is left
_ROUND = 256  # connections that are accepted before others are served
_AHEAD = 32  # requests of an owner that wait for a thread: more are not accepted
_BUSY_S = 0.02  # until the next check whether they are fewer
_LATELY_S = 60.0  # half-life of the count of accepted connections
_PIECE = 1 << 16
_OTHER_FILES = 512  # that the process has open besides connections

log = logging.getLogger("sluice.line_server")
log.addFilter(FewLines())


@dataclass(frozen=True, slots=True)
class Kind:
    """What connections of one kind may have."""

    name: str
    places: int  # all together
    threads: int
    line: int  # bytes of a request
    held: int  # bytes of all requests that are not answered yet
    seconds: float  # in which a request must have come, and an answer must have been taken
    rates: tuple[Rate, ...] = ()  # requests of all together, then of each owner by the first part
    too_long: bytes = b""  # the answer to a longer line


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose connection it is, and what the answer's function gets of that."""

    kind: Kind
    owner: Owner
    who: Any = None


Greet = Callable[[socket.socket, Any], Asker]
"""Who has connected, from which address. OSError: the client has gone."""
Answer = Callable[[bytes, Any], bytes]
"""The answer, with its newline or empty, to a line and `Asker.who`. Called by several threads."""
Recognize = Callable[[bytes, Any], Asker | None]
"""Whose a line is, where it shows that; None: whoever has connected, `Asker.who`. Called by the poll loop."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket. `kind`, `owner`: at whose rates connections are accepted, each for one request."""

    socket: socket.socket
    greet: Greet
    kind: Kind | None = None
    owner: Owner = ()


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
    paid: int  # rates that are charged already
    state: _State = _State.READING
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""
    closed: bool = False
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
        self.budgets = Budgets(*kind.rates)
        self._waiting: dict[Owner, deque[_Connection]] = {}  # by the first part of the owner; the next one comes first
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
        if connection.state is _State.WAITING:
            self._unqueue(connection)

    def all(self) -> list[_Connection]:
        return [connection for mine in self._mine.values() for connection in mine]

    def one_too_many(self) -> _Connection | None:
        """The connection to close where there are more than places."""
        return self._of_most(self._counts) if self._counts[()] > self.kind.places else None

    def one_too_large(self) -> _Connection | None:
        """The connection to close where all together sent more than is held."""
        held = Counter[Owner]()
        for owner, mine in self._mine.items():
            size = sum(len(connection.incoming) for connection in mine)
            held.update({owner[:part]: size for part in range(len(owner) + 1)})
        return self._of_most(held) if held[()] > self.kind.held else None

    def _of_most(self, weights: Counter[Owner]) -> _Connection:
        """Of the owner with most connections, the oldest that has not sent its request in time, else the oldest."""
        owner: Owner = ()
        while owner not in self._mine:
            parts = (one for one in weights if len(one) == len(owner) + 1 and one[: len(owner)] == owner)
            owner = max(parts, key=weights.__getitem__)
        mine, late = self._mine[owner], time.monotonic() + self.kind.seconds - _AT_ONCE_S
        return next((one for one in mine if one.state is _State.READING and one.until < late), next(iter(mine)))

    def queue(self, connection: _Connection) -> None:
        """Queue it for its turn."""
        self._waiting.setdefault(connection.asker.owner[:1], deque()).append(connection)

    def _unqueue(self, connection: _Connection) -> None:
        """Move its owner's next turn behind all others'."""
        owner = connection.asker.owner[:1]
        queue = self._waiting.pop(owner)
        queue.remove(connection)
        if queue:
            self._waiting[owner] = queue

    def next(self, now: float) -> _Connection | float:
        """The next connection, or the seconds until there is one."""
        least = _LOOK_S
        for owner, queue in self._waiting.items():
            wait = self.budgets.wait(owner, now, queue[0].paid)
            if wait <= 0:
                self.budgets.take(owner, now, queue[0].paid)
                connection = queue[0]
                self._unqueue(connection)
                return connection
            least = min(least, wait)
        return least

    def wait(self, owner: Owner, now: float) -> float:
        """Seconds until a connection of an owner is accepted; 0: now."""
        if len(self._waiting.get(owner[:1], ())) >= _AHEAD:
            return _BUSY_S
        return self.budgets.wait(owner, now)


class _Port:
    """A listener, and until when no connection is accepted."""

    def __init__(self, listener: Listener, room: _Room | None) -> None:
        self.listener = listener
        self.room = room
        self.shut_until = 0.0
        self._let_in = 0.0
        self._counted = 0.0

    def wait(self, now: float) -> float:
        return self.room.wait(self.listener.owner, now) if self.room is not None else 0.0

    def lately(self, now: float) -> float:
        """How many were accepted, with older ones counting less."""
        return float(self._let_in * 0.5 ** ((now - self._counted) / _LATELY_S))

    def accept(self, now: float) -> tuple[socket.socket, Any]:
        """Accept the next connection; raises OSError."""
        accepted, address = self.listener.socket.accept()
        self._let_in, self._counted = self.lately(now) + 1, now
        if self.room is not None:
            self.room.budgets.take(self.listener.owner, now)
        return accepted, address


class LineServer:
    """Serves listeners of any kinds until it is stopped."""

    def __init__(self, kinds: Sequence[Kind], answer: Answer, recognize: Recognize = lambda line, who: None) -> None:
        _allow_open_files(sum(kind.places for kind in kinds) + _OTHER_FILES)
        self._answer, self._recognize = answer, recognize
        self._rooms = {kind.name: _Room(kind, _Workers(kind, self._find)) for kind in kinds}
        self._connections: dict[int, _Connection] = {}
        self._found: deque[tuple[_Connection, bytes]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # not when it has ended: somebody may still wake it
        self._doors: dict[int, _Port] = {}
        self._shut: dict[int, _Port] = {}
        self._changes: deque[tuple[socket.socket, Listener | None]] = deque()
        self._next_tick = 0.0

    def wake(self) -> None:
        """Check at once whether to go on; also from a signal's handler."""
        os.eventfd_write(self._wake, 1)

    def listen(self, listener: Listener) -> None:
        """Serve one more, from now on; by any thread."""
        listener.socket.setblocking(False)
        self._changes.append((listener.socket, listener))
        self.wake()

    def leave(self, listening: socket.socket) -> None:
        """Close a listening socket; by any thread. Clients that have connected already are answered."""
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
            self._changes.extend((door.listener.socket, None) for door in self._doors.values())
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
            if number in self._doors:
                doors.append(number)  # the last, as new connections get the numbers of those that are closed now
            elif number == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif number in self._connections:
                self._on_event(self._connections[number], events)
        self._accept(doors)
        self._change_listeners()
        while self._found:
            self._on_answer(*self._found.popleft())
        now = time.monotonic()
        return min([self._tick(now), *(self._dispatch(room, now) for room in self._rooms.values())])

    # ---- in the poll loop ----

    def _change_listeners(self) -> None:
        while self._changes:
            listening, listener = self._changes.popleft()
            number = listening.fileno()
            if listener is not None:
                self._doors[number] = _Port(listener, self._rooms[listener.kind.name] if listener.kind else None)
                self._poll.register(number, select.EPOLLIN)
            elif self._doors.pop(number, None) is not None:
                self._shut.pop(number, None)
                self._poll.unregister(number)
                listening.close()

    def _accept(self, numbers: list[int]) -> None:
        """Accept one after the other, each where the fewest were accepted recently: many clients of some listeners that
        spend what all together have then leave it to clients of others."""
        now = time.monotonic()
        turn = [(self._doors[number].lately(now), number) for number in numbers]
        heapq.heapify(turn)
        for _ in range(_ROUND):
            if not turn:
                return
            _, number = heapq.heappop(turn)
            if self._let_in(number, now):
                heapq.heappush(turn, (self._doors[number].lately(now), number))

    def _let_in(self, number: int, now: float) -> bool:
        """Accept one connection of a listener; whether there may be more."""
        door = self._doors[number]
        wait = door.wait(now)
        if wait > 0:
            return self._close_door(number, now + wait)
        try:
            accepted, address = door.accept(now)
        except BlockingIOError:
            return False
        except OSError:  # gone again, or no descriptor is left
            return self._close_door(number, now + _PAUSE_S)
        try:
            accepted.setblocking(False)
            asker = door.listener.greet(accepted, address)
        except OSError:
            accepted.close()
            return True
        paid = 0 if door.room is None else len(door.listener.owner) + 1
        self._enter(_Connection(accepted, asker, now + asker.kind.seconds, paid))
        return True

    def _close_door(self, number: int, until: float) -> bool:
        self._shut[number] = self._doors[number]
        self._shut[number].shut_until = until
        self._poll.modify(number, 0)
        return False

    def _enter(self, connection: _Connection) -> None:
        self._connections[connection.socket.fileno()] = connection
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        self._take_place(connection)
        if not connection.closed:
            self._read(connection)

    def _take_place(self, connection: _Connection) -> None:
        room = self._room(connection)
        room.enter(connection)
        if (loser := room.one_too_many()) is not None:
            self._close(loser)

    def _change_place(self, connection: _Connection) -> None:
        """If its line shows whose it is."""
        line = bytes(connection.incoming).partition(b"\n")[0]
        if (asker := self._recognize(line, connection.asker.who)) is not None:
            self._room(connection).leave(connection)
            connection.asker, connection.paid = asker, 0
            self._take_place(connection)

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

    def _look_for_line(self, connection: _Connection, since: int) -> None:
        kind = connection.asker.kind
        if connection.incoming.find(b"\n", since, kind.line) >= 0:
            self._change_place(connection)
            if connection.closed:
                return
            connection.state = _State.WAITING
            self._watch(connection, 0)
            self._room(connection).queue(connection)
        elif len(connection.incoming) >= kind.line:
            self._begin_writing(connection, kind.too_long)

    def _dispatch(self, room: _Room, now: float) -> float:
        while room.workers.free:
            connection = room.next(now)
            if not isinstance(connection, _Connection):
                return connection
            line = bytes(connection.incoming).partition(b"\n")[0]
            connection.incoming.clear()
            connection.state = _State.ANSWERING
            room.workers.give(connection, line)
        return _LOOK_S

    def _on_answer(self, connection: _Connection, answer: bytes) -> None:
        self._room(connection).workers.busy -= 1
        if not connection.closed:
            self._begin_writing(connection, answer)

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
            pass
        self._close(connection)

    def _watch(self, connection: _Connection, events: int) -> None:
        if connection.watched != events:
            self._poll.modify(connection.socket.fileno(), events)
            connection.watched = events

    def _tick(self, now: float) -> float:
        """Close what took too long, resume listeners that were paused; seconds until there may be more to do."""
        pause = _LOOK_S
        for number, door in list(self._shut.items()):
            if door.shut_until <= now:
                del self._shut[number]
                self._poll.modify(number, select.EPOLLIN)
            pause = min(pause, max(0.0, door.shut_until - now))
        if not self._connections:
            return pause
        if now >= self._next_tick:
            self._next_tick = now - now % _TICK_S + _TICK_S
            for connection in list(self._connections.values()):
                if now > connection.until and connection.state in (_State.READING, _State.WRITING):
                    self._close(connection)
            for room in self._rooms.values():
                room.budgets.forget(now)
        return min(pause, self._next_tick - now)

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
        answer = b""
        try:
            if not connection.closed:
                answer = self._answer(line, connection.asker.who)
        except Exception:  # the failure of one request must not end others
            log.exception("a request: unexpected")
        self._found.append((connection, answer))
        self.wake()


def _allow_open_files(more: int) -> None:
    """Allow this many more than are open now: without a free descriptor before all places are taken, no owner would
    lose a place to others. systemd's usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + more
    if soft != resource.RLIM_INFINITY and soft < wanted:
        room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
