"""Messages until each sink has accepted them: one file for each message and sink, on disk before anything is sent.

At least once: a message is removed when its sink has accepted it, so that a daemon that is killed in between sends it
again, with the same ID. What cannot be delivered is tried again with growing pauses, and given up after a day.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.text import one_line
from sluice.controllerd.alerts.message import Message

MOST = 5000
"""Files; beyond it the oldest are dropped, which is logged."""
KEPT_S = 86_400.0
_FIRST_S, _LAST_S = 5.0, 1800.0
_NAME = re.compile(r"([A-Za-z0-9._-]{1,80})@([A-Za-z0-9_.-]{1,64})\.json\Z")

log = logging.getLogger("sluice.alerts")

Deliver = Callable[[Message], None]
"""Gives a message to a sink. Raises SluiceError or OSError when it was not accepted."""


@dataclass
class _Sink:
    wait: float = 0.0
    next: float = 0.0  # monotonic


class Outbox:
    """The folder of messages. One process works on it at a time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._sinks: dict[str, _Sink] = {}

    def put(self, message: Message, sinks: Iterable[str]) -> None:
        """Keep a message for sinks; what is there already stays as it is. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for sink in sinks:
            path = self.folder / f"{message.id}@{sink}.json"
            if not path.exists():
                write_atomic(path, message.to_json(), mode=0o600, follow_links=False)
        self._bound()

    def waiting(self) -> list[tuple[Path, str]]:
        """Files and their sinks, the oldest first."""
        found = []
        for path in self.folder.glob("*.json"):
            match = _NAME.match(path.name)
            if match:
                with suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime_ns, path, match[2]))
        return [(path, sink) for _, path, sink in sorted(found)]

    def deliver(self, sinks: Mapping[str, Deliver]) -> int:
        """Try what waits, once; how many were accepted. A sink that fails gets a pause, others continue."""
        taken = 0
        now = self._clock()
        for path, name in self.waiting():
            state = self._sinks.setdefault(name, _Sink())
            if now < state.next:
                self._give_up(path, name)
                continue
            sink = sinks.get(name)
            if sink is None:
                self._drop(path, f"there is no sink {name!r} any more")
                continue
            try:
                message = Message.from_json(path.read_text(encoding="utf-8"))
            except (SluiceError, UnicodeDecodeError) as error:
                self._drop(path, str(error))
                continue
            except FileNotFoundError:
                continue
            try:
                sink(message)
            except (SluiceError, OSError, ValueError) as error:
                state.wait = min(max(2 * state.wait, _FIRST_S), _LAST_S)
                state.next = self._clock() + state.wait
                log.error("sink %s: %s; tried again in %d s", name, one_line(str(error)), state.wait)
                self._give_up(path, name)
                continue
            state.wait = state.next = 0.0
            path.unlink(missing_ok=True)
            taken += 1
        return taken

    def _give_up(self, path: Path, name: str) -> None:
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > KEPT_S:
                self._drop(path, f"sink {name} did not accept it for a day")

    def _bound(self) -> None:
        files = self.waiting()
        for path, _ in files[: max(0, len(files) - MOST)]:
            self._drop(path, f"more than {MOST} messages wait")

    def _drop(self, path: Path, why: str) -> None:
        log.error("%s is dropped: %s", path.name, one_line(why))
        path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, object]:
    """A file of ours; empty where there is none or it is damaged, which is logged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        raise ValueError("not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.error("%s: %s; starting empty", path, one_line(str(error)))
        return {}
