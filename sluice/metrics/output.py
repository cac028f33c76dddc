"""Where points go: the spool with its sender's process, and Prometheus' page. Used by the agent and by controllerd."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from policy.monitoring import NodeMetrics
from sluice.base.run import PYTHON
from sluice.metrics.points import Point, to_lines, to_openmetrics
from sluice.metrics.spool import Writer

_MIB = 1 << 20
_MEMORY = 4 * _MIB  # batches that wait for room on a full disk
_RESTART_S = 10.0
_CONTENT = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Say = Callable[[str], None]


class SenderProcess:
    """The process that sends what is in a spool: a module that reads its settings from the first line of its standard
    input, and ends when that is closed."""

    def __init__(self, module: str, folder: Path) -> None:
        self._command = [*PYTHON, "-m", module, str(folder)]
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -_RESTART_S

    def keep(self, settings: dict[str, Any]) -> None:
        """Start it, or again where it ended some time ago. Raises OSError."""
        if (
            self._process is None or self._process.poll() is not None
        ) and time.monotonic() - self._started > _RESTART_S:
            self._started = time.monotonic()
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe
            with suppress(OSError):
                self._process.stdin.write(json.dumps(settings).encode() + b"\n")
                self._process.stdin.flush()

    def stop(self) -> None:
        """End it; `keep` then starts it at once."""
        if self._process is not None:
            if self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process, self._started = None, -_RESTART_S


class Output:
    """Takes points; settings may change with every call. Thread-safe."""

    def __init__(self, folder: Path, host: str, say: Say, *, controller: bool = False) -> None:
        self.folder = folder
        self.host = host
        self._say = say
        self._controller = controller
        self._lock = threading.Lock()
        self._settings: NodeMetrics | None = None
        self._writer: Writer | None = None
        self._sender = SenderProcess("sluice.metrics.sender", folder)
        self._waiting: list[bytes] = []  # while the disk is full
        self._lost = 0
        self._full = ""
        self._latest: dict[str, list[Point]] = {}
        self._page: _Page | None = None
        self._last_ns = 0

    # ---- settings ----

    def configure(self, settings: NodeMetrics) -> None:
        """Take settings into force; cheap where they are the same. Restarts a sender that ended."""
        with self._lock:
            if settings != self._settings:
                before, self._settings = self._settings, settings
                self._sender.stop()
                self._writer = Writer(self.folder, settings.spool * _MIB) if settings.url else None
                self._serve(before, settings)
            if settings.url:
                self._sender.keep(settings.model_dump())

    def _serve(self, before: NodeMetrics | None, settings: NodeMetrics) -> None:
        address = settings.prometheus_controller if self._controller else settings.prometheus
        old = "" if before is None else before.prometheus_controller if self._controller else before.prometheus
        if address == old:
            return
        if self._page is not None:
            self._page.close()
            self._page = None
        if address:
            try:
                self._page = _Page(address, self.page)
            except OSError as error:
                self._say(f"cannot serve Prometheus at {address}: {error.strerror or error}")

    def close(self) -> None:
        """End the sender and the page."""
        with self._lock:
            self._sender.stop()
            if self._page is not None:
                self._page.close()
                self._page = None

    # ---- points ----

    def stamp(self, clock: Callable[[], int] = time.time_ns) -> int:
        """A time for points: later than the last one, unless the clock was set back by more than a second."""
        now = clock()
        with self._lock:
            if self._last_ns - 1_000_000_000 < now <= self._last_ns:
                now = self._last_ns + 1
            self._last_ns = now
        return now

    def put(self, source: str, points: Iterable[Point]) -> None:
        """Send points, and show them on the page until those of the same source come next."""
        points = list(points)
        with self._lock:
            self._latest[source] = points
            if self._writer is None:
                return
            batch = to_lines(points).encode()
            if batch:
                self._append(batch)

    def _append(self, batch: bytes) -> None:
        assert self._writer is not None  # noqa: S101 - the caller has looked
        self._waiting.append(batch)
        try:
            while self._waiting:
                self._writer.append(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            if str(error) != self._full:
                self._full = str(error)
                self._say(f"samples wait in memory: {error.filename or self.folder}: {error.strerror}")
            while sum(map(len, self._waiting)) > _MEMORY:
                self._lost += len(self._waiting.pop(0))
        except ValueError as error:
            self._lost += len(self._waiting.pop(0))
            self._say(str(error))
        else:
            self._full = ""

    def sender_points(self, time_ns: int) -> list[Point]:
        """The state of the spool and its sender."""
        with self._lock:
            if self._writer is None:
                return []
            status = self.sender_status()
            fields = {
                "bytes": self._writer.size,
                "dropped_bytes_total": self._writer.dropped + self._lost + int(status.get("rejected", 0)),
                "damaged_bytes_total": int(status.get("damaged", 0)),
            }
        return [Point("sluice_spool", {"node": self.host}, fields, time_ns)]

    def sender_status(self) -> dict[str, Any]:
        """What the sender wrote last; empty before that."""
        try:
            found = json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def page(self) -> str:
        """The last points of all sources as OpenMetrics' text."""
        with self._lock:
            points = [point for source in self._latest.values() for point in source]
            labels = self._settings is not None and self._settings.job_ids == "tags"
        return to_openmetrics(points, identity_as_labels=labels)


class _Page:
    """Answers GET /metrics. Raises OSError when the address cannot be used."""

    def __init__(self, address: str, text: Callable[[], str]) -> None:
        host, _, port = address.rpartition(":")

        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            server_version, sys_version = "sluice", ""

            def do_GET(self) -> None:  # noqa: N802 - its name there
                """Prometheus' question."""
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = text().encode()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """No log line for each request."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            _slots = threading.BoundedSemaphore(8)

            def process_request(self, request: Any, client_address: Any) -> None:
                """A few at a time: others wait in the kernel."""
                self._slots.acquire()
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                """In its thread."""
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    self._slots.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that went away."""

        self._server = Server((host.strip("[]"), int(port)), Handler)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
