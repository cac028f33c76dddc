"""A process that sends batches from a spool to a database or receiver: in order, until it has acknowledged them.

``python -m sluice.metrics.sender SPOOL`` reads its settings, one JSON object, from the first line of standard input,
and ends when that is closed. A batch whose answer is lost is sent again; points have a series and a time of their own,
so that the database keeps one of each. When the database was away, what it took in the last minute before is sent again
as well: a database that is killed loses what it had only in memory.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import PREFIX
from sluice.metrics.influx import Database, RejectedError, TooLargeError, token_for
from sluice.metrics.spool import Reader

FIRST_WAIT_S, LAST_WAIT_S = 1.0, 30.0
_STATUS_S = 5.0
_MOST = 128 << 10
_LEAST = 1 << 10
_GROW = 100  # after so many batches a larger one is tried again


@dataclass
class Status:
    """The status of the sender for the agent."""

    problem: str = ""
    since: float = 0.0  # of the problem
    batches: int = 0
    bytes: int = 0
    rejected: int = 0  # bytes that the database refused for good
    damaged: int = 0
    resent: int = 0  # how often what was sent before was sent again


class Target(Protocol):
    """What is written to."""

    def write(self, lines: bytes) -> None:
        """See `Database.write`."""


class Sender:
    """One spool and one target. `words`: what is sent, and where to."""

    def __init__(
        self,
        reader: Reader,
        connect: Callable[[], Target],
        say: Callable[[str], None],
        folder: Path | None = None,
        words: tuple[str, str] = ("samples", "the database"),
    ) -> None:
        self.reader = reader
        self.status = Status()
        self._what, self._whom = words
        self._connect = connect
        self._say = say
        self._folder = folder
        self._target: Target | None = None
        self._most = _MOST
        self._wait = FIRST_WAIT_S
        self._status_written = 0.0

    def step(self) -> float:
        """Send one batch; the seconds to wait before the next step."""
        found = self.reader.next(self._most)
        self.status.damaged = self.reader.damaged
        if found is None:
            return 1.0
        batch, place = found
        try:
            if self._target is None:
                self._target = self._connect()
            self._target.write(batch)
        except TooLargeError as error:
            if self._most > _LEAST:
                self._most //= 2
                return 0.0
            self._reject(batch, error)
        except RejectedError as error:
            self._reject(batch, error)
        except SluiceError as error:
            return self._failed(error)
        else:
            if self.status.problem:
                self._say(f"{self._whom} accepts {self._what} again, after {time.time() - self.status.since:.0f} s")
            self.status.problem = ""
            self.status.batches += 1
            if self.status.batches % _GROW == 0:
                self._most = min(_MOST, 2 * self._most)
            self.status.bytes += len(batch)
        self._wait = FIRST_WAIT_S
        self.reader.taken(place)
        return 0.0

    def _reject(self, batch: bytes, error: SluiceError) -> None:
        """Skip what would always be refused."""
        if not self.status.rejected:
            self._say(f"{self._whom} refuses {self._what}, which are dropped: {error}")
        self.status.rejected += len(batch)

    def _failed(self, error: SluiceError) -> float:
        self._target = None  # the token may have changed
        if not self.status.problem:
            self._say(f"{self._whom} accepts no {self._what}, they wait on disk: {error}")
            self.status.since = time.time()
            self.status.resent += self.reader.rewind()
        self.status.problem = str(error)
        wait, self._wait = self._wait, min(2 * self._wait, LAST_WAIT_S)
        return wait

    def write_status(self, now: float | None = None) -> None:
        """Write the status for the agent, every few seconds."""
        now = time.monotonic() if now is None else now
        if self._folder is not None and now - self._status_written >= _STATUS_S:
            self._status_written = now
            text = json.dumps(asdict(self.status))
            write_atomic(self._folder / "status.json", text, mode=0o600, follow_links=False)


def connect(settings: dict[str, Any]) -> Database:
    """The database of the settings. Raises SluiceError."""
    return Database(
        settings["url"],
        settings["organization"],
        settings["bucket"],
        token_for(settings["url"], Path(settings["token_file"]), without_tls=settings["token_without_tls"]),
        settings["ca_file"],
    )


def say(text: str) -> None:
    """Onto standard error, which is the daemon's log."""
    print(f"{PREFIX}{text}", file=sys.stderr, flush=True)


def main() -> None:
    """Send samples to the database."""
    folder = Path(sys.argv[1])
    settings = json.loads(sys.stdin.readline())
    send_until_closed(Sender(Reader(folder), lambda: connect(settings), say, folder))


def send_until_closed(sender: Sender) -> None:
    """Send until standard input is closed."""
    said = ""
    while True:
        try:
            wait = sender.step()
            sender.write_status()
            said = ""
        except OSError as error:  # a full disk: the place is kept in memory until there is room
            wait = LAST_WAIT_S / 3
            if str(error) != said:
                said = str(error)
                say(f"{error.filename}: {error.strerror}")
        if select.select([sys.stdin], [], [], wait)[0] and not sys.stdin.readline():
            return


if __name__ == "__main__":
    main()
