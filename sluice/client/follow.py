"""What both clients do with the stream of changes: its lines, when to connect again, and jobs until they end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from sluice.base.text import one_line
from sluice.client import models
from sluice.client.transport import ApiError, Call, error_of, no_answer, pause_after
from sluice.slurm.job import ENDED

if TYPE_CHECKING:
    import httpx

RESET = "reset"
"""The topic of a change that says: read all again."""
PATH = "/stream"
QUIET_S = 45.0
"""After so long without a line, which the server sends every 15 s, the connection is lost."""
KNOWN_S = 15.0
"""In which a job that was just submitted is in the snapshot."""
_MOST_ATTEMPTS = 6  # of what the longest pause is made
_ROWS: dict[str, type[BaseModel]] = {
    "jobs": models.Job,
    "nodes": models.Node,
    "gpus": models.Gpu,
    "events": models.Event,
    "tenants": models.TenantInList,
    "services": models.Service,
    "parts": models.Part,
}


@dataclass(frozen=True)
class Change:
    """A row that is new or not as it was; `row` None: it is gone. Of the topic `reset`: read again what you need."""

    topic: str
    key: str = ""
    row: BaseModel | None = None


class Stream:
    """One stream, over all its connections. It begins with a reset after each."""

    def __init__(self, topics: tuple[str, ...], retries: int) -> None:
        self.call = Call(models.Problem, "GET", PATH, query={"topics": ",".join(topics)})
        self._retries = retries
        self._worked = False
        self._failures = 0
        self._topic = ""
        self._data = ""

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """What opens a connection."""
        self._topic = self._data = ""
        return self.call.request(http, {"accept": "text/event-stream"}, timeout=QUIET_S)

    def opened(self) -> Change:
        """The server has answered 200."""
        self._worked, self._failures = True, 0
        return Change(RESET)

    def pause(self, answer: httpx.Response | Exception | None) -> float:
        """How long to wait before the next connection. Raises ApiError where none would help, and where there was none
        yet after so many attempts. `answer` None: the server has ended the stream."""
        attempt = min(self._failures, _MOST_ATTEMPTS)
        self._failures += 1
        if answer is None:
            return pause_after(ConnectionError(), attempt) or 0.0
        pause = pause_after(answer, attempt)
        if pause is not None and (self._worked or self._failures <= self._retries):
            return pause
        if isinstance(answer, Exception):
            raise no_answer(answer, self.call.where) from answer
        raise error_of(answer, self.call.where) or AssertionError(answer)

    def line(self, text: str) -> Change | None:
        """The change that a line ends. Raises ApiError for what is not an event of this API."""
        name, _, value = text.partition(":")
        if name == "event":
            self._topic = value.strip()
        elif name == "data":
            self._data += value
        elif not text and self._data:
            topic, data = self._topic, self._data
            self._topic = self._data = ""
            return self._change(topic, data)
        return None

    def _change(self, topic: str, data: str) -> Change | None:
        if topic == RESET:
            return Change(RESET)
        if topic not in _ROWS:
            return None  # of a newer server
        try:
            document = json.loads(data)
            row = document.get("row")
            return Change(topic, str(document["key"]), None if row is None else _ROWS[topic].model_validate(row))
        except (ValueError, KeyError, AttributeError, ValidationError) as error:
            what = f"an event of {topic} that is none: {one_line(data, limit=100)}"
            raise ApiError(200, what, where=self.call.where, remedy="is the server of this version?") from error


class Watched:
    """Jobs until they have ended."""

    topics = ("jobs", "parts")  # the latter change every second, so that waiting ends

    def __init__(self, jobs: tuple[int, ...]) -> None:
        self._left: dict[int, models.Job | None] = dict.fromkeys(jobs)
        self._until = time.monotonic() + KNOWN_S

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return not self._left

    def to_read(self, change: Change) -> list[int]:
        """Jobs to look at now: all after a reset, else those that are not known yet once they should be."""
        if change.topic == RESET:
            return list(self._left)
        late = time.monotonic() >= self._until
        return [number for number, job in self._left.items() if job is None] if late else []

    def read(self, number: int, found: models.Job | ApiError) -> Iterator[models.Job]:
        """What came of that: the job where it changed. Raises ApiError for a job that is not known."""
        if not isinstance(found, ApiError):
            yield from self._see(number, found)
        elif found.status != 404 or (self._left[number] is None and time.monotonic() >= self._until):
            raise found
        elif self._left[number] is not None:
            del self._left[number]  # it ended, and slurmctld has forgotten it

    def changed(self, change: Change) -> Iterator[models.Job]:
        """The job of a change, if it is one of these."""
        if change.topic == "jobs" and change.key.isdecimal() and int(change.key) in self._left:
            if isinstance(change.row, models.Job):
                yield from self._see(int(change.key), change.row)
            else:
                del self._left[int(change.key)]

    def _see(self, number: int, job: models.Job) -> Iterator[models.Job]:
        if job != self._left[number]:
            self._left[number] = job
            yield job
        if job.state in ENDED:
            del self._left[number]


def page_call(number: int) -> Call[models.JobPage]:
    """Reads one job."""
    return Call(models.JobPage, "GET", "/jobs/{job}", {"job": number})
