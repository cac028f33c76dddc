"""Requests and answers of a gateway's batch: the job asks for some, and sends what it has; the gateway knows the rest.

All that it says is said by the main thread, so that nothing is sent twice at once; those that work wait for nobody.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final
from urllib.parse import urlsplit

from sluice.base.errors import SluiceError
from sluice.exchange.batches import MOST_ANSWER, BatchPlace
from sluice.serve.batch.orders import Request

_MOST_POST: Final = 8 << 20
_MOST_RESULTS: Final = 256
_MOST_REPLY: Final = 32 << 20
_HEARD_S: Final = 5.0
"""Between two words to the gateway, whatever happens."""
_EACH_S: Final = 0.5
"""Between two times that results are sent, unless there are many."""
_AGAIN_S: Final = 2.0
_AWAY_S: Final = 900.0
_TIMEOUT_S: Final = 60.0
_OVER: Final = (400, 401, 403, 404, 413)


class Remote:
    """The batch, as its job sees it. `slots`: threads that take requests."""

    def __init__(self, place: BatchPlace, slots: int) -> None:
        self.stopped = False
        """The gateway wants no more: the batch is over."""
        self.failed = self.written = 0
        self._place, self._slots = place, slots
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._results: deque[bytes] = deque()
        self._at: Any = None
        self._complete = False  # all lines were given, or no more are wanted
        self._connection: http.client.HTTPConnection | None = None
        self._gateway = 0
        self._said = self._next = 0.0
        self._away = 0.0

    # ---- for those that work ----

    def take(self) -> Request | None:
        """The next request, when there is one; None: there are no more."""
        return self._requests.get()

    def put(self, request: Request, status: int, body: Any, problem: str = "") -> None:
        """An answer."""
        said = body if status else problem
        text = _dump([request.line, request.custom_id, status, said])
        if len(text) > MOST_ANSWER:
            status = 0
            text = _dump([request.line, request.custom_id, 0, f"an answer of {len(text)} bytes: ask for less"])
        self._results.append(text)
        self.written += 1
        self.failed += status != 200

    # ---- for the main thread ----

    def look(self) -> None:
        """Say and ask what is to be said and asked. Raises SluiceError where the batch cannot go on."""
        now = time.monotonic()
        wants = not self._complete and self._requests.qsize() < self._slots
        due = len(self._results) >= self._slots or (self._results and now - self._said > _EACH_S)
        if now >= self._next and (wants or due or now - self._said > _HEARD_S):
            self._exchange({"at": self._at} if wants else {})

    def stop(self) -> None:
        """Give out no more requests."""
        with suppress(Empty):
            while True:
                self._requests.get_nowait()
        self._end()

    def close(self, why: str = "") -> None:
        """Send what is left, and why this job gives up, if it does. Raises SluiceError."""
        more: dict[str, Any] = {"why": why} if why else {}
        while self._results or more:
            time.sleep(max(0.0, self._next - time.monotonic()))
            if self._exchange(more):
                more = {}

    def _end(self) -> None:
        self._complete = True
        for _ in range(self._slots):
            self._requests.put(None)

    def _exchange(self, more: dict[str, Any]) -> bool:
        """Whether the gateway has it. Raises SluiceError."""
        now = time.monotonic()
        results: list[bytes] = []
        size = 0
        while len(results) < min(len(self._results), _MOST_RESULTS) and size < _MOST_POST:
            results.append(self._results[len(results)])
            size += len(results[-1])
        body = b'{"results":[%b],%b' % (b",".join(results), _dump({**more, "version": 1})[1:])
        try:
            status, reply = self._post(body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._missed(now, str(error) or type(error).__name__)
            return False
        if status in _OVER:
            self.stopped = True
            raise SluiceError(f"the gateway answers {status}: {str(reply)[:500]}", remedy="is the batch still there?")
        if status != 200:
            self._missed(now, f"it answers {status}: {str(reply)[:500]}")
            return False
        self._said, self._next, self._away = time.monotonic(), 0.0, 0.0
        for _ in results:
            self._results.popleft()
        self._take(reply, wanted="at" in more)
        return True

    def _take(self, reply: dict[str, Any], *, wanted: bool) -> None:
        if reply.get("do") != "go on":
            self.stopped = True
            self.stop()
            return
        if not wanted or self._complete:
            return
        for line, text in reply["requests"]:
            words = json.loads(text)
            self._requests.put(Request(words["custom_id"], words["url"], words["body"], line))
        self._at = reply["at"]
        if self._at is None:
            self._end()

    def _missed(self, now: float, why: str) -> None:
        """Try another gateway, after all of them after a while. Raises SluiceError when it has been too long."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._gateway = (self._gateway + 1) % len(self._place.gateways)
        self._away = self._away or now
        self._next = now + (0.0 if self._gateway else _AGAIN_S)
        print(f"no gateway has it: {why}", flush=True)
        if now - self._away > _AWAY_S:
            raise SluiceError(
                f"no gateway has answered for {_AWAY_S:g} s: {why}", remedy="see serving.batches.gateways"
            )

    def _post(self, body: bytes) -> tuple[int, Any]:
        connection = self._connection or self._connect()
        self._connection = connection
        headers = {"authorization": f"Bearer {self._place.secret}", "content-type": "application/json"}
        connection.request("POST", self._place.path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read(_MOST_REPLY))

    def _connect(self) -> http.client.HTTPConnection:
        url = urlsplit(self._place.gateways[self._gateway])
        host = url.hostname or ""
        if url.scheme == "http":
            return http.client.HTTPConnection(host, url.port, timeout=_TIMEOUT_S)
        context = ssl.create_default_context(cafile=self._place.ca)
        return http.client.HTTPSConnection(host, url.port, timeout=_TIMEOUT_S, context=context)


def _dump(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
