"""The server at its edges: more streams than it has, a daemon that hangs, clocks, cursors of another version.

With SLUICE_TEST_SCALE=full 10,000 streams are asked for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import pwd
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.exchange.snapshot import Snapshot
from sluice.web.stream import MOST, MOST_OF_USER
from tests.unit.web.test_access import Web, a_snapshot

FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
STREAMS = 10_000 if FULL else 1500
USERS = 200
_AN_ADDRESS = 100  # connections: less than one may have
_NETWORK = 8  # addresses of one: less than one may have
NOBODY = pwd.getpwnam("nobody")


class Daemon:
    """Publishes a snapshot, or hangs."""

    def __init__(self, path: Path, snapshot: Snapshot) -> None:
        self.path, self.snapshot = path, snapshot
        self.hangs = False

    async def serve(self) -> asyncio.Server:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = json.loads(await reader.readline())
            while self.hangs:
                await asyncio.sleep(0.1)
            writer.write(self.snapshot.after(str(request.get("epoch")), int(request.get("last", 0))))
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

        found = await asyncio.start_unix_server(answer, str(self.path))
        self.path.chmod(0o666)
        return found


class Served:
    """A process of `sluice web`, as a user without rights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon = Daemon(folder / "socket", a_snapshot([]))
        self.tokens: dict[str, str] = {}
        self._write_tokens([*(f"u{number}" for number in range(USERS)), "oscar"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])

    def _write_tokens(self, users: list[str]) -> None:
        rows = []
        for user in users:
            name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
            self.tokens[user] = f"sluice_{name}_{secret}"
            digest = hashlib.sha256(secret.encode()).hexdigest()
            rows.append({"id": name, "user": user, "scopes": ["read"], "created": 0.0, "expires": time.time() + 3600,
                         "digest": digest, "comment": ""})  # fmt: skip
        (self.folder / "tokens.json").write_text(json.dumps({"version": 1, "tokens": rows}))

    def start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "sluice.main", "web", "--port", str(self.port)]
        words += ["--snapshot", str(self.daemon.path), "--tokens", str(self.folder / "tokens.json")]
        log = (self.folder / "log").open("wb")
        return subprocess.Popen(words, stderr=log, user=NOBODY.pw_uid, group=NOBODY.pw_gid, extra_groups=[], cwd="/",
                                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])})  # fmt: skip

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            headers = {"authorization": f"Bearer {self.tokens['oscar']}"}
            return await client.get(f"http://127.0.0.1:{self.port}/api/v1{path}", headers=headers)

    async def ready(self) -> None:
        for _ in range(300):
            with suppress(httpx.TransportError):
                if (await self.get("/whoami")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
        raise AssertionError((self.folder / "log").read_text())

    def memory_mib(self, pid: int) -> float:
        line = next(one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


@pytest.fixture
def served() -> Iterator[Served]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to start the server as another user")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Served(Path(name))


async def _open(served: Served, number: int) -> tuple[int, asyncio.StreamWriter | None, asyncio.StreamReader | None]:
    """Ask for a stream, from an address of its own for each 100; its status, 0 where the connection is closed."""
    address = number // _AN_ADDRESS
    source = f"127.{1 + address // _NETWORK // 250}.{address // _NETWORK % 250}.{1 + address % _NETWORK}"
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, local_addr=(source, 0))
        token = served.tokens[f"u{number % USERS}"]
        writer.write(
            f"GET /api/v1/stream?topics=parts HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n".encode()
        )
        async with asyncio.timeout(60):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except (OSError, asyncio.IncompleteReadError):
        if writer is not None:
            writer.close()
        return 0, None, None
    status = int(head.split()[1])
    if status in (429, 503):
        assert "retry-after:" in head.lower() or "text/plain" in head.lower(), head
    return status, writer, reader


def test_more_streams_than_it_has_are_refused_in_order_and_its_memory_is_bounded(served: Served) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))

    async def talk(pid: int) -> None:
        await served.ready()
        before, found, held = served.memory_mib(pid), Counter[int](), []
        for number in range(STREAMS):
            status, writer, reader = await _open(served, number)
            found[status] += 1
            held.append((writer, reader))
            assert status in (200, 0, 429, 503) and (number >= MOST or status == 200), (number, status)
        assert found[200] == min(MOST, USERS * MOST_OF_USER), found
        assert served.memory_mib(pid) < before + 100
        assert (await served.get("/whoami")).status_code == 200, "who only asks is not held up"
        served.daemon.snapshot.put_one("parts", "jobs", {"at": 2.0, "stale_since": None, "problem": ""})
        for _, reader in (held[0], held[MOST - 1]):
            assert reader is not None
            async with asyncio.timeout(60):
                while b'"at":2.0' not in await reader.readline():
                    pass
        for writer, _ in held:
            if writer is not None:
                writer.close()
        for _ in range(100):
            status, writer, _ = await _open(served, 0)
            if writer is not None:
                writer.close()
            if status == 200:
                break
            await asyncio.sleep(0.2)
        assert status == 200, "streams that were closed make room"
        assert served.memory_mib(pid) < before + 100

    _with(served, talk)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_daemon_that_hangs_leaves_what_is_known_with_its_age(served: Served) -> None:
    async def talk(pid: int) -> None:
        await served.ready()
        assert (await served.get("/jobs")).json()["stale_since"] is None
        served.daemon.hangs = True
        began = time.time()
        asked = asyncio.create_task(served.get("/jobs/3/explanation"))
        for _ in range(300):
            said = await served.get("/jobs")
            assert said.status_code == 200 and said.json()["total"] == 4
            if said.json()["stale_since"] is not None:
                break
            await asyncio.sleep(0.1)
        assert began - 5 < said.json()["stale_since"] <= time.time() and said.json()["problem"]
        late = await asked
        assert late.status_code == 503 and late.json()["remedy"]
        served.daemon.hangs = False
        for _ in range(300):
            if (await served.get("/jobs")).json()["stale_since"] is None:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it does not recover")

    _with(served, talk)


def _with(served: Served, talk: Any) -> None:
    async def main() -> None:
        listening = await served.daemon.serve()
        process = served.start()
        try:
            await talk(process.pid)
        finally:
            process.terminate()
            listening.close()
            process.wait(20)

    asyncio.run(main())


@pytest.mark.parametrize("hours", [-24 * 365, -1, 0.5])
def test_a_clock_that_jumps_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    web = Web(tmp_path, [])
    _, token = web.site.login.tokens.create("alice", ["read"], now=time.time(), seconds=3600)
    web.tokens["alice"] = token
    before = {path: web.get(path, "alice").json() for path in ("/jobs", "/nodes", "/events", "/tenants", "/whoami")}
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
    for path, document in before.items():
        assert web.get(path, "alice").json() == document
    web.site.store.apply(json.loads(web.snapshot.after(web.site.store.epoch, web.site.store.last)))
    web.site.store.lost("it hangs")
    stale = web.get("/jobs", "alice").json()
    assert stale["stale_since"] <= time.time() and stale["jobs"] == before["/jobs"]["jobs"]


@pytest.mark.parametrize("version", [0, 2, 99, -1, "1", None, True])
def test_a_cursor_of_another_version_is_refused_with_what_to_do(tmp_path: Path, version: Any) -> None:
    words = json.dumps([version, "id", 1, 3, 3]).encode()
    cursor = base64.urlsafe_b64encode(words).rstrip(b"=").decode()
    said = Web(tmp_path, []).get(f"/jobs?cursor={cursor}", "root")
    assert said.status_code == 400 and said.json()["remedy"] == "begin again without a cursor"
