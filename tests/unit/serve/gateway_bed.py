"""A worker of the gateway in this process, fake replicas behind it, and a client that sends bytes as they are."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import mmap
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from joserfc import jwt
from joserfc.jwk import RSAKey

from sluice.base import oidc
from sluice.base.oidc import Provider
from sluice.base.tokens import TokenStore
from sluice.core.gate import Gate, Shape
from sluice.core.gate import Limit as GateLimit
from sluice.exchange.requests import RequestLog, RequestRecord, parse
from sluice.exchange.serving import (
    NO_LIMIT,
    Abilities,
    AccountRow,
    Limit,
    LimitRow,
    ReplicaRow,
    ServiceRow,
    State,
    SubjectKind,
    as_row,
)
from sluice.serve.gateway.client import Client
from sluice.serve.gateway.directory import subject
from sluice.serve.gateway.keys import Keys
from sluice.serve.gateway.leases import KINDS, limit_of
from sluice.serve.gateway.repeated import SIZE, Repeated
from sluice.serve.gateway.worker import Settings, Worker

ALL = Abilities(chat=True, completions=True, embeddings=True, responses=True, resume="text")
SECRET = "5" * 64
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], seconds: float = 120) -> T:
    """On the loop that the gateway uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, seconds))


@cache
def certificate(folder: Path) -> tuple[ssl.SSLContext, str]:
    """A server's context with a certificate of its own, and its fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "replica")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / "replica.pem"
    path.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()


@dataclass
class Heard:
    """A request as a replica got it."""

    head: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def path(self) -> str:
        return self.head.split()[1]

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


Script = Callable[[Heard], Awaitable[None]]


@dataclass
class Replica:
    """A fake one: a script for each request."""

    script: Script
    context: ssl.SSLContext
    fingerprint: str
    launch: str = "00000000000000a1"
    service: str = "m"
    slots: int = 64
    abilities: Abilities = ALL
    state: State = State.READY
    suspect: bool = False
    heard: list[Heard] = field(default_factory=list)
    connections: int = 0
    gone: int = 0
    """Connections that the gateway has closed."""
    port: int = 0
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> Replica:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            assert await reader.readline() == SECRET.encode() + b"\n"
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
                one = Heard(head.decode(), await reader.readexactly(length), reader, writer)
                self.heard.append(one)
                await self.script(one)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            self.gone += 1
        finally:
            self.writers.discard(writer)
            writer.close()

    def kill(self) -> None:
        """As SIGKILL does."""
        if self.server is not None:
            self.server.close()
        for one in list(self.writers):
            one.transport.abort()

    def row(self) -> ReplicaRow:
        return ReplicaRow(
            self.service, self.launch, 7, "127.0.0.1", self.port, self.fingerprint, SECRET, self.state, self.abilities,
            self.slots, 0.0, self.suspect,
        )  # fmt: skip


def service_row(name: str = "m", **values: Any) -> ServiceRow:
    wanted: dict[str, Any] = {
        "tenant": "physics", "callers": ("*",), "engine": "openai", "priority": "normal", "deadline_s": 10.0,
        "default_tokens": 256, "least": 1, "most": 4, "slots": 64,
    }  # fmt: skip
    return ServiceRow(name=name, **{**wanted, **values})


def identity_provider() -> tuple[Provider, Callable[..., str]]:
    """A site's provider, and what makes tokens of it: alice's, unless the claims say otherwise."""
    key = RSAKey.generate_key(2048, {"kid": "one"})
    settings = oidc.Settings(
        issuer="https://sso.site.org", client_id="sluice", redirect_uri="https://site.org/login/oidc/callback"
    )

    def fetch(url: str) -> tuple[int, dict[str, Any]]:
        if url.endswith("openid-configuration"):
            ends = {
                name: f"https://sso.site.org/{name}"
                for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")
            }
            return 200, {"issuer": settings.issuer, **ends}
        return 200, {"keys": [key.as_dict(private=False)]}

    def token(**claims: Any) -> str:
        now = time.time()
        said = {
            "iss": settings.issuer,
            "aud": "sluice",
            "sub": "1",
            "iat": now,
            "exp": now + 60,
            "preferred_username": "alice",
        }
        return jwt.encode({"alg": "RS256", "kid": "one"}, {**said, **claims}, key)

    return Provider(settings, fetch), token


@dataclass
class Bed:
    """The worker and its surroundings."""

    worker: Worker
    port: int
    key: str
    store: TokenStore
    records_folder: Path
    told: list[dict[str, Any]]
    sweeping: asyncio.Task[None]
    replicas: list[Replica] = field(default_factory=list)
    services: dict[str, ServiceRow] = field(default_factory=dict)
    limits: list[LimitRow] = field(default_factory=list)
    accounts: list[AccountRow] = field(default_factory=list)
    given: set[tuple[SubjectKind, str]] = field(default_factory=set)
    """Whose limits the gate has."""

    def publish(self) -> None:
        """As the parent does."""
        rows = {
            "services": {name: as_row(one) for name, one in self.services.items()},
            "replicas": {one.launch: as_row(one.row()) for one in self.replicas},
            "limits": {f"{one.kind}/{one.name}": as_row(one) for one in self.limits},
            "accounts": {one.user: as_row(one) for one in self.accounts},
        }
        for kind, name in self.given:
            self.worker.gate.set_limit(KINDS[kind], subject(kind, name), limit_of(self._limit(kind, name)))
        self.worker.told({"rows": json.loads(json.dumps(rows))})

    def give_all(self, kind: SubjectKind, name: str) -> None:
        """The only gateway has the whole of each limit."""
        if (kind, name) not in self.given:
            self.given.add((kind, name))
            number, gate = subject(kind, name), self.worker.gate
            gate.set_limit(KINDS[kind], number, GateLimit())
            gate.set_limit(KINDS[kind], number, limit_of(self._limit(kind, name)))

    def _limit(self, kind: SubjectKind, name: str) -> Limit:
        found = {one.name: one.limit for one in self.limits if one.kind == kind}
        return found.get(name) or found.get("*") or NO_LIMIT

    def records(self) -> list[RequestRecord]:
        return [
            record
            for path in sorted(self.records_folder.glob("*.jsonl"))
            for line in path.read_bytes().splitlines()
            if (record := parse(line)) is not None
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def send(self, data: bytes) -> bytes:
        """Bytes on a connection of their own, and all that comes back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = b""
        with suppress(OSError):  # it may be reset after the answer, where not all was read of what was sent
            while piece := await asyncio.wait_for(reader.read(1 << 16), 60):
                answer += piece
        writer.close()
        return answer

    def request(self, document: Any, path: str = "/v1/chat/completions", **headers: str) -> bytes:
        """A request that ends its connection."""
        data = document if isinstance(document, bytes) else json.dumps(document).encode()
        words = {
            "host": "gateway", "authorization": f"Bearer {self.key}", "content-type": "application/json",
            "content-length": str(len(data)), "connection": "close", **{k.replace("_", "-"): v for k,
            v in headers.items()},
        }  # fmt: skip
        return (
            f"POST {path} HTTP/1.1\r\n".encode()
            + b"".join(f"{k}: {v}\r\n".encode() for k, v in words.items())
            + b"\r\n"
            + data
        )

    async def ask(self, document: Any, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        return Answer.of(await self.send(self.request(document, path, **headers)))


@dataclass
class Answer:
    """Of the gateway, taken apart."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """Whether it ended as HTTP says."""

    @classmethod
    def of(cls, data: bytes) -> Answer:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body, whole = b"", False
            while rest:
                size, mark, rest = rest.partition(b"\r\n")
                if not mark:
                    break
                length = int(size, 16)
                if not length:
                    whole = rest == b"\r\n"
                    break
                body, rest = body + rest[:length], rest[length + 2 :]
        else:
            body, whole = rest, len(rest) == int(headers.get("content-length", -1))
        return cls(int(first.split()[1]), headers, body, whole)

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def events(self) -> list[Any]:
        """Of a stream: documents, or texts."""
        found = []
        for part in self.body.split(b"\n\n"):
            if part.startswith(b"data: "):
                found.append(part[6:].decode() if part == b"data: [DONE]" else json.loads(part[6:]))
        return found

    @property
    def text(self) -> str:
        said = ""
        for one in self.events:
            for choice in one.get("choices", ()) if isinstance(one, dict) else ():
                said += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return said


@asynccontextmanager
async def bed(
    folder: Path, *scripts: Script, services: dict[str, ServiceRow] | None = None, limits: list[LimitRow] | None = None,
    publish: bool = True, slots: int = 64, services_file: str = "/nowhere/services.json", **settings: Any,
) -> AsyncIterator[Bed]:  # fmt: skip
    """A gateway with a replica of the service `m` for each script."""
    store = TokenStore(folder / "tokens.json")
    if not store.path.exists():
        _, key = store.create("alice", ["serve"], now=datetime.datetime.now().timestamp(), seconds=3600)
        (folder / "key").write_text(key)
    key = (folder / "key").read_text()
    records = folder / "records"
    records.mkdir(exist_ok=True)
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    made = Settings(
        -1,
        -1,
        -1,
        (wake,) * 64,
        str(store.path),
        "",
        str(records),
        (),
        ("127.0.0.0/8",),
        **{"access_log": False, "services": services_file, **settings},
    )
    shape = Shape(subjects=1024, tickets=1024, prefixes=1024)
    gate = Gate.create(mmap.mmap(-1, shape.size()), shape)
    loop = asyncio.get_running_loop()
    keys = Keys(store)
    keys.refresh()
    worker = Worker(made, gate, Repeated(bytearray(SIZE)), keys, RequestLog(records), loop)
    told: list[dict[str, Any]] = []

    def tell(message: dict[str, Any]) -> None:
        told.append(message)
        if "need" in message:
            for kind, name, *_ in message["needs"]:
                one.give_all(kind, name)
            loop.call_soon(worker.told, {"parts": message["need"], "known": True, "retry": [], "soon": []})
        if "claim" in message:
            loop.call_soon(worker.told, {"claim": message["claim"], "verdict": "free"})

    worker.tell = tell
    worker.server = await loop.create_server(lambda: Client(worker), "127.0.0.1", 0)
    sweeping = loop.create_task(worker.run())
    context, fingerprint = certificate(folder)
    one = Bed(worker, worker.server.sockets[0].getsockname()[1], key, store, records, told, sweeping)
    one.services = services if services is not None else {"m": service_row()}
    one.limits = limits or []
    one.accounts = [AccountRow("alice", ("physics", "biology"))]
    for number, script in enumerate(scripts):
        replica = Replica(script, context, fingerprint, f"{0xA1 + number:016x}", slots=slots)
        one.replicas.append(await replica.start())
    if publish:
        one.publish()
    try:
        yield one
    finally:
        sweeping.cancel()
        worker.server.close()
        for replica in one.replicas:
            replica.kill()
        os.close(wake)


# ---- scripts of replicas ----


def chunk(text: str | None = None, finish: str | None = None, name: str = "chatcmpl-1", **more: Any) -> bytes:
    delta = {"content": text} if text is not None else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    document = {
        "id": name,
        "object": "chat.completion.chunk",
        "created": 100,
        "model": "engine",
        "choices": [choice],
        **more,
    }
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def role_chunk(name: str = "chatcmpl-1") -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    document = {"id": name, "object": "chat.completion.chunk", "created": 100, "model": "engine", "choices": [choice]}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def usage_chunk(prompt: int, completion: int, name: str = "chatcmpl-1") -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    document = {
        "id": name,
        "object": "chat.completion.chunk",
        "created": 100,
        "model": "engine",
        "choices": [],
        "usage": usage,
    }
    return b"data: " + json.dumps(document).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def in_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream_of(words: list[str], prompt: int = 5, name: str = "chatcmpl-1", before: int = 0) -> bytes:
    """The bytes of a whole answer that streams; `before` tokens of the prompt are of the answer that goes on."""
    events = [role_chunk(name), *(chunk(word, name=name) for word in words), chunk(finish="stop", name=name)]
    events += [usage_chunk(prompt + before, len(words), name), DONE]
    return STREAM_HEAD + b"".join(map(in_chunk, events)) + b"0\r\n\r\n"


def answer_of(document: Any, status: int = 200) -> bytes:
    data = json.dumps(document).encode()
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )


CHAT = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "engine",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
}  # fmt: skip


async def plain(heard: Heard) -> None:
    """Answers anything."""
    if heard.document.get("stream"):
        heard.writer.write(stream_of(["hello", " world"]))
    else:
        heard.writer.write(answer_of(CHAT))


async def until(seen: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not seen():
            await asyncio.sleep(0.01)
