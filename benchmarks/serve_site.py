"""What the benchmark of serving starts: engines, gateways with the rows that replicad would publish, and load."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.run import run_command
from sluice.base.tokens import TokenStore
from sluice.exchange.serving import (
    ACCOUNTS,
    LIMITS,
    REPLICAS,
    SERVICES,
    Abilities,
    AccountRow,
    LeaseReport,
    Limit,
    LimitRow,
    ReplicaRow,
    ServiceRow,
    State,
    as_row,
    row,
)
from sluice.exchange.snapshot import Snapshot, render_answer
from sluice.serve.replicad.leases import Book

ROOT = Path(__file__).resolve().parents[1]
USER = "nobody"
MODEL = "m"
TICKS = os.sysconf("SC_CLK_TCK")
_SECRET = "5" * 64
START_S = 60.0


def free_port() -> int:
    """A port of 127.0.0.1."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def build_load(folder: Path) -> Path:
    """The program of both ends. Raises SluiceError."""
    program = folder / "serve_load"
    flags = ["-O2", "-D_GNU_SOURCE", "-std=c11", "-Wall", "-Wextra"]
    run_command(["gcc", *flags, "-o", str(program), str(ROOT / "benchmarks/serve_load.c"), "-lssl", "-lcrypto"])
    return program


# ---- processes ----


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found, look = [pid], [pid]
    while look:
        one = look.pop()
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                below = [int(word) for word in task.read_text().split()]
                found += below
                look += below
    return found


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process and those below it have used, ended children included."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(word) for word in words[11:15])
    return total / TICKS


def memory_mib(pid: int) -> float:
    """Of a process and those below it: what is theirs alone or their part of what they share."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def wait_port(port: int, process: subprocess.Popen[Any], what: str, path: str = "", seconds: float = START_S) -> None:
    """Until somebody listens, and (with `path`) answers 200. Raises SluiceError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SluiceError(f"{what}: ended with {process.returncode}", remedy="see what it wrote")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as one:
            if not path:
                return
            one.sendall(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
            if b" 200" in one.recv(64):
                return
        time.sleep(0.05)
    raise SluiceError(f"{what}: does not answer on port {port}", remedy="see what it wrote")


def stop(process: subprocess.Popen[Any]) -> None:
    """End a process and its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def engine(program: Path, port: int, delay_us: int = 0, gap_us: int = 0, slots: int = 1024, *tls: str) -> Iterator[int]:
    """One that does nothing; its process."""
    words = [str(program), "engine", *map(str, (port, delay_us, gap_us, slots)), *tls]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SluiceError(f"engine on port {port}: did not start", remedy="is the port free?")
        yield process.pid
    finally:
        stop(process)


# ---- load ----


@dataclass(slots=True)
class Answers:
    """What a load got: of each answer start, status, first token, whole time (microseconds), tokens, completeness."""

    rows: list[tuple[int, int, int, int, int, bool]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """From the engine to the client, of each token."""
    unconnected: int = 0

    @property
    def good(self) -> list[tuple[int, int, int, int, int, bool]]:
        """Those that are whole."""
        return [row for row in self.rows if row[1] == 200 and row[5]]


def parse_answers(text: str) -> Answers:
    """What the program printed."""
    found = Answers()
    for line in text.splitlines():
        words = line.split()
        if words[0] == "h":
            found.held.append(int(words[1]))
        elif words[0] == "failed":
            found.unconnected = int(words[1])
        else:
            start, status, first, total, tokens, whole = map(int, words)
            found.rows.append((start, status, first, total, tokens, whole == 1))
    return found


class Load:
    """Sends one body from one process."""

    def __init__(
        self, program: Path, folder: Path, port: int, keys: Sequence[str], connections: int, seconds: float,
        *, rate: float = 0, path: str = "/v1/chat/completions", **body: Any,
    ) -> None:  # fmt: skip
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say some words."}], **body}
        name = f"{time.monotonic_ns()}"
        body_file, key_file = folder / f"body-{name}", folder / f"keys-{name}"
        body_file.write_text(json.dumps(body))
        key_file.write_text("\n".join(keys))
        self._output = (folder / f"answers-{name}").open("w+")
        words = [str(program), "load", "127.0.0.1", *map(str, (port, connections, seconds, rate)), path]
        self._process = subprocess.Popen([*words, str(body_file), str(key_file)], stdout=self._output)

    def wait(self) -> Answers:
        """Its answers, when it has ended. Raises SluiceError."""
        if self._process.wait(900) != 0:
            raise SluiceError("the load generator failed", remedy="see what it wrote")
        with self._output as file:
            file.seek(0)
            return parse_answers(file.read())


# ---- Sluice's gateway ----


class _Published(socketserver.ThreadingUnixStreamServer):
    """Answers as replicad does."""

    daemon_threads = True

    def __init__(self, path: Path, snapshot: Snapshot, book: Book) -> None:
        lock = threading.Lock()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(ValueError, OSError):
                    words = json.loads(self.rfile.readline(1 << 20))
                    if words["do"] == "lease":
                        with lock:
                            answer = book.answer(row(LeaseReport, words["report"]), int(uptime() * 1e6))
                        self.wfile.write(render_answer({"lease": asdict(answer)} if answer else {"error": "late"}))
                        return
                    self.wfile.write(snapshot.after(str(words.get("epoch", "")), int(words.get("last", 0))))

        super().__init__(str(path), Handler)


class GatewaySite:
    """Gateways of Sluice, and what replicad would say. Use it in a `with`."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sluice-bench-"))
        self.folder.chmod(0o755)
        self.program = build_load(self.folder)
        self.snapshot = Snapshot()
        self.gateways: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        self._started = 0
        self.replicas: dict[str, ReplicaRow] = {}
        self.store = TokenStore(self.folder / "tokens.json")
        made = self.folder / "tls"
        made.mkdir()
        self.certificate, self.fingerprint = _certificate(made)
        self.book = Book("benchmark", 0, {})
        self._published = _Published(self.folder / "replicad", self.snapshot, self.book)
        (self.folder / "replicad").chmod(0o666)
        threading.Thread(target=self._published.serve_forever, daemon=True).start()

    def __enter__(self) -> GatewaySite:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.gateways:
            stop(one)
        self._published.shutdown()
        self._published.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def keys(self, *users: str) -> list[str]:
        """A key for each."""
        made = [self.store.create(user, ["serve"], now=time.time(), seconds=86400)[1] for user in users]
        self.store.path.chmod(0o644)
        return made

    def publish(
        self, tenants: Mapping[str, str], limits: Sequence[LimitRow] = (), slots: int = 1024, deadline_s: float = 60.0
    ) -> None:
        """Users and their tenants, limits, and one service."""
        service = ServiceRow(MODEL, "serving", ("*",), "openai", "normal", deadline_s, 64, 1, 8, slots)
        self.book.set_limits({(one.kind, one.name): one.limit for one in limits})
        self.snapshot.put(LIMITS, {f"{one.kind}/{one.name}": as_row(one) for one in limits})
        self.snapshot.put(ACCOUNTS, {user: as_row(AccountRow(user, (tenant,))) for user, tenant in tenants.items()})
        self.snapshot.put(SERVICES, {MODEL: as_row(service)})

    def add_replica(
        self, launch: str, port: int, slots: int = 1024, *, secret: str = _SECRET, fingerprint: str = "",
        abilities: Abilities | None = None,
    ) -> None:  # fmt: skip
        """One that is ready."""
        can = abilities or Abilities(chat=True, completions=True, embeddings=True, resume="text")
        self.replicas[launch] = ReplicaRow(
            MODEL, launch, 1, "127.0.0.1", port, fingerprint or self.fingerprint, secret, State.READY, can, slots,
            0.0, False,
        )  # fmt: skip
        self.publish_replicas()

    def publish_replicas(self) -> None:
        """As they are now."""
        self.snapshot.put(REPLICAS, {launch: as_row(one) for launch, one in self.replicas.items()})

    def tls_engine(self) -> tuple[str, str, str]:
        """What makes an engine a replica."""
        return self.certificate, self.certificate, _SECRET

    def ask_replica(self, port: int) -> bytes:
        """What it answers on /v1/models."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10)) as one:
            one.sendall(f"{_SECRET}\nGET /v1/models HTTP/1.1\r\n\r\n".encode())
            answer = b""
            while not answer.endswith(b"]}"):
                answer += one.recv(4096)
        return answer.partition(b"\r\n\r\n")[2]

    def start(self, workers: int = 2, port: int = 0, *, access_log: bool = False) -> int:
        """Start a gateway; its port."""
        port = port or free_port()
        number, self._started = self._started, self._started + 1
        records = self.folder / f"records-{number}"
        records.mkdir()
        known = pwd.getpwnam(USER)
        os.chown(records, known.pw_uid, known.pw_gid)
        words = [
            sys.executable, "-m", "sluice.main", "gateway", "--port", str(port), "--workers", str(workers),
            "--replicad", str(self.folder / "replicad"), "--tokens", str(self.store.path), "--records", str(records),
            "--oidc", str(self.folder / "none.json"), *([] if access_log else ["--no-access-log"]),
        ]  # fmt: skip
        log = (self.folder / f"gateway-{number}.log").open("wb")
        process = subprocess.Popen(
            words, cwd=ROOT, user=known.pw_uid, group=known.pw_gid, extra_groups=[], stderr=log, start_new_session=True,
            env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        self.gateways.append(process)
        self.ports.append(port)
        try:
            wait_port(port, process, "sluice gateway", "/health")
        except SluiceError:
            print((self.folder / f"gateway-{number}.log").read_text()[-2000:], file=sys.stderr)
            raise
        return port

    @property
    def gateway(self) -> int:
        """The last one's process."""
        return self.gateways[-1].pid


def _certificate(folder: Path) -> tuple[str, str]:
    """A file with certificate and key for the engine in C, and the fingerprint."""
    path = folder / "tls.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run_command([*words, "-days", "2", "-keyout", str(folder / "key"), "-out", str(folder / "cert"), "-subj", "/CN=r"])
    text = (folder / "cert").read_text()
    path.write_text(text + (folder / "key").read_text())
    return str(path), sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest()


def limit(kind: Any, name: str, weight: int = 1, **words: int) -> LimitRow:
    """A row of limits."""
    return LimitRow(kind, name, Limit(**words), weight)


# ---- replicas with a real engine ----


class RealReplica:
    """llama.cpp behind a replica's relay, as a process."""

    def __init__(self, model: Path, slots: int, *options: str) -> None:
        words = [sys.executable, "-m", "benchmarks.serve_replica", str(model), str(slots), *options]
        self._process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.facts: dict[str, Any] = {}

    def wait(self) -> None:
        """Until it answers. Raises SluiceError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SluiceError("a replica ended before it was ready", remedy="is xllamacpp installed?")
        self.facts = json.loads(line)

    def kill(self) -> None:
        """As the loss of its node does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(ProcessLookupError, KeyError):
            os.killpg(self.facts["engine"], signal.SIGKILL)
        self._process.wait()


class PlainReplica:
    """llama.cpp at a port, as peers have it."""

    def __init__(self, model: Path, port: int, slots: int, *options: str) -> None:
        self.port = port
        words = [sys.executable, "-m", "sluice.serve.engines.xllamacpp_server", "--model", str(model), "--alias", MODEL]
        self._process = subprocess.Popen(
            [*words, "--port", str(port), "--parallel", str(slots), *options],
            cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> None:
        """Until it answers. Raises SluiceError."""
        wait_port(self.port, self._process, "llama.cpp", "/health")

    def kill(self) -> None:
        """As the loss of its node does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile of values that are there."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
