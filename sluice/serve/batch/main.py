"""`sluice-batch`: starts the model's engine, asks it all requests, writes the answers, and ends.

Runs as the job's user, and reads its orders, one line of JSON, from standard input. Exit status 0: all requests have
answers; 1: some have errors, which are in the file, or the engine has ended; 2: the orders are wrong.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.exchange.serving import ReplicaSpec
from sluice.serve.batch.orders import MOST_LINE, Orders, Output, Request, parse_orders, requests
from sluice.serve.engines.base import Place
from sluice.serve.engines.known import engine_of
from sluice.serve.replica.asking import get, is_own_port
from sluice.serve.replica.engine_process import EngineProcess

SLOTS = 16
READY_S = 1800.0
_TRIES = 3
_ANSWER_S = 3600.0
_SAY_S = 10.0
_HEALTH = "/health"


class _Unix(http.client.HTTPConnection):
    """Over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("engine", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ANSWER_S)
        self.sock.connect(str(self._path))


class _Port(http.client.HTTPConnection):
    """To a port of this host, as long as it is this user's: when the engine has ended, anybody may take it."""

    def connect(self) -> None:
        if not is_own_port(self.port):
            raise ConnectionRefusedError(f"port {self.port}: not the engine's")
        super().connect()


class Batch:
    """One run."""

    def __init__(self, orders: Orders, folder: Path) -> None:
        self.orders = orders
        self.output = Output(orders.output)
        self.ended = threading.Event()
        self.failed = self.written = 0
        self._lock = threading.Lock()
        self._left = self._requests()
        self._key = secrets.token_hex(32)
        name = orders.model.stem
        spec = ReplicaSpec(
            name, "0" * 16, orders.engine, str(orders.model), None, None, orders.options, (), SLOTS, (), 0, READY_S,
            0.0, _HEALTH, 0, 1,
        )  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._name = name
        place = Place(folder, port, self._key, orders.model, _gpus())
        self.process = EngineProcess(engine_of(orders.engine).start(spec, place), folder)

    def _requests(self) -> Iterator[Request]:
        seen = set()
        for one in requests(self.orders):
            if one.custom_id in seen:
                raise SluiceError(f"custom_id {one.custom_id[:80]!r}: twice", remedy="give each request its own")
            seen.add(one.custom_id)
            if one.custom_id not in self.output.done:
                yield one

    def wait_ready(self) -> None:
        """Until the engine answers. Raises SluiceError."""
        end = time.monotonic() + READY_S
        while not self.ended.is_set():
            if (why := self.process.ended()) is not None:
                raise SluiceError(why, remedy="see the job's output")
            answer = asyncio.run(get(self.process.address, _HEALTH, self._key, 5.0))
            if answer is not None and answer[0] == 200:
                return
            if time.monotonic() > end:
                raise SluiceError(f"the engine does not answer after {READY_S:g} s", remedy="see the job's output")
            time.sleep(0.1)

    def run(self) -> int:
        """All requests; the exit status. Raises SluiceError."""
        self.wait_ready()
        self.process.was_ready = True
        with ThreadPoolExecutor(SLOTS) as threads:
            working = [threads.submit(self._work) for _ in range(SLOTS)]
            said = time.monotonic()
            while not all(one.done() for one in working):
                time.sleep(0.02)
                if time.monotonic() - said > _SAY_S:
                    said = time.monotonic()
                    print(f"{self.written} answers, {self.failed} of them errors", flush=True)
        for one in working:
            one.result()
        print(f"{self.written} answers, {self.failed} of them errors, in {self.output.path}", flush=True)
        if self.ended.is_set():
            raise SluiceError("ended before all was done", remedy="a requeued job goes on where it was")
        return 1 if self.failed else 0

    def _next(self) -> Request | None:
        with self._lock:
            return None if self.ended.is_set() else next(self._left, None)

    def _work(self) -> None:
        connection: http.client.HTTPConnection | None = None
        try:
            while (request := self._next()) is not None:
                connection = self._answer(connection, request)
        except BaseException:
            self.ended.set()
            raise
        finally:
            if connection is not None:
                connection.close()

    def _answer(self, connection: http.client.HTTPConnection | None, request: Request) -> http.client.HTTPConnection:
        """Ask until there is an answer. Raises SluiceError where the engine has ended."""
        for number in range(_TRIES):
            connection = connection or self._connect()
            try:
                status, body = self._ask(connection, request)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                connection = None
                if self.ended.is_set() or (why := self.process.ended()) is not None:
                    raise SluiceError(why or "ended", remedy="see the job's output") from error
                status, body = 0, {"error": {"message": f"no answer: {error}"}}
            if status < 500 and status not in (0, 429):
                break
            time.sleep(0.5 * (number + 1))
        problem = "" if status == 200 else one_line(str(_message(body)), limit=1000)
        with self._lock:
            self.output.write(request, status, body, problem)
            self.written += 1
            self.failed += status != 200
        return connection or self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        address = self.process.address
        if isinstance(address, int):
            return _Port("127.0.0.1", address, timeout=_ANSWER_S)
        return _Unix(address)

    def _ask(self, connection: http.client.HTTPConnection, request: Request) -> tuple[int, Any]:
        body = json.dumps({"model": self._name, **request.body})
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        connection.request("POST", request.path, body, headers)
        answer = connection.getresponse()
        text = answer.read(MOST_LINE)
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return 502, {"error": {"message": f"not JSON: {text[:200]!r}"}}


def _message(body: Any) -> Any:
    error = body.get("error") if isinstance(body, dict) else None
    return error.get("message", body) if isinstance(error, dict) else body


def _gpus() -> int:
    text = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def main() -> int:
    """The exit status."""
    os.umask(0o077)
    folder = Path(tempfile.mkdtemp(prefix="sluice-batch.", dir="/tmp"))
    batch = None
    try:
        orders = parse_orders(sys.stdin.read(2 * MOST_LINE), os.environ.get("SLURM_JOB_ID", "0"))
        batch = Batch(orders, folder)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: batch.ended.set())
        return batch.run()
    except SluiceError as error:
        print(f"sluice-batch: {error}", file=sys.stderr)
        return 2 if error.usage else 1
    finally:
        if batch is not None and batch.process.ended() is None:
            batch.process.end(5)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
