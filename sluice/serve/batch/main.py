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
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.ports import free_port
from sluice.base.run import CommandError, run_command
from sluice.base.text import one_line
from sluice.exchange.serving import ReplicaSpec
from sluice.serve.batch.orders import MOST_LINE, GatewayOrders, Orders, Output, Request, parse_orders, requests
from sluice.serve.batch.remote import Remote
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
_GRACE_S = 60.0
"""From SIGTERM on, for the requests that the engine has."""
_REQUEUED_S = 30.0


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


class Files:
    """Requests of a file or of the orders, and the file of answers."""

    stopped = False

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.output = Output(orders.output)
        self.failed = self.written = 0
        self._lock = threading.Lock()
        self._left = self._requests()

    def _requests(self) -> Iterator[Request]:
        seen = set()
        for one in requests(self.orders):
            if one.custom_id in seen:
                raise SluiceError(f"custom_id {one.custom_id[:80]!r}: twice", remedy="give each request its own")
            seen.add(one.custom_id)
            if one.custom_id not in self.output.done:
                yield one

    def take(self) -> Request | None:
        """The next one; None: there are no more."""
        with self._lock:
            return next(self._left, None)

    def put(self, request: Request, status: int, body: Any, problem: str = "") -> None:
        """An answer. Raises SluiceError."""
        with self._lock:
            self.output.write(request, status, body, problem)
            self.written += 1
            self.failed += status != 200

    def look(self) -> None:
        """Nothing is to be done while others work."""

    def stop(self) -> None:
        """Give out no more requests."""
        with self._lock:
            self._left = iter(())

    def close(self, why: str = "") -> None:
        """All is in the file."""


class Batch:
    """One run."""

    def __init__(self, orders: Orders | GatewayOrders, folder: Path) -> None:
        self.ended = threading.Event()
        self._key = secrets.token_hex(32)
        self.work: Files | Remote
        if isinstance(orders, Orders):
            self.work, name = Files(orders), orders.model.stem
            self.slots, self._health = SLOTS, _HEALTH
            spec = ReplicaSpec(
                name, "0" * 16, orders.engine, str(orders.model), None, None, orders.options, (), SLOTS, (), 0, READY_S,
                0.0, _HEALTH, 0, 1,
            )  # fmt: skip
        else:
            spec, name = orders.spec, orders.spec.service
            self.slots, self._health = spec.slots, spec.health
            self.work = Remote(orders.place, spec.slots)
        self._name, self._ready_s = name, spec.ready_s
        place = Place(folder, free_port(), self._key, Path(spec.model), _gpus())
        self.process = EngineProcess(engine_of(spec.engine).start(spec, place), folder)

    def wait_ready(self) -> None:
        """Until the engine answers. Raises SluiceError."""
        end = time.monotonic() + self._ready_s
        while not self.ended.is_set():
            if (why := self.process.ended()) is not None:
                raise SluiceError(why, remedy="see the job's output")
            answer = asyncio.run(get(self.process.address, self._health, self._key, 5.0))
            if answer is not None and answer[0] == 200:
                return
            if time.monotonic() > end:
                raise SluiceError(
                    f"the engine does not answer after {self._ready_s:g} s", remedy="see the job's output"
                )
            time.sleep(0.1)

    def run(self) -> int:
        """All requests; the exit status. Raises SluiceError."""
        try:
            self.wait_ready()
            self.process.was_ready = True
            self._all()
        except SluiceError as error:
            if not self.ended.is_set() and not self.work.stopped:
                self.work.close(str(error))
            raise
        work = self.work
        print(f"{work.written} answers, {work.failed} of them errors", flush=True)
        if self.ended.is_set() and not work.stopped:
            if isinstance(work, Remote):
                _requeue()
            raise SluiceError("ended before all was done", remedy="a requeued job goes on where it was")
        return 1 if work.failed and isinstance(work, Files) else 0

    def _all(self) -> None:
        """All requests that there are. Raises SluiceError."""
        leave = 0.0
        with ThreadPoolExecutor(self.slots) as threads:
            working = [threads.submit(self._work) for _ in range(self.slots)]
            said = time.monotonic()
            while not all(one.done() for one in working):
                time.sleep(0.02)
                now = time.monotonic()
                if (self.ended.is_set() or self.work.stopped) and not leave:
                    self.work.stop()
                    leave = now + _GRACE_S
                elif leave and now > leave:
                    self.process.end(1)
                try:
                    self.work.look()
                except SluiceError:
                    self.ended.set()
                    self.work.stop()
                    self.process.end(1)
                    raise
                if now - said > _SAY_S:
                    said = now
                    print(f"{self.work.written} answers, {self.work.failed} of them errors", flush=True)
        self.work.close()
        if not leave:
            for one in working:
                one.result()

    def _work(self) -> None:
        connection: http.client.HTTPConnection | None = None
        try:
            while (request := self.work.take()) is not None:
                connection = self._answer(connection, request)
        except BaseException:
            self.work.stop()
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
        self.work.put(request, status, body, "" if status == 200 else one_line(str(_message(body)), limit=1000))
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


def _requeue() -> None:
    """Have Slurm queue this job again, which ends this process."""
    with suppress(CommandError):
        run_command(["scontrol", "requeue", os.environ.get("SLURM_JOB_ID", "")], timeout=_REQUEUED_S)
        time.sleep(_REQUEUED_S)


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
