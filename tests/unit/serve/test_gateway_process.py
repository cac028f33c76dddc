"""The gateway's processes: a parent, its workers, what happens when one dies and when all are replaced."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluice.base.line_server import Kind
from sluice.base.local_server import serve_local
from sluice.base.tokens import TokenStore
from sluice.core.gate import Settled
from sluice.exchange.requests import RequestRecord, parse
from sluice.exchange.serving import AccountRow, LeaseReport, Limit, LimitRow, as_row, row
from sluice.exchange.snapshot import Snapshot, render_answer
from sluice.serve.client import AsyncResumingStream
from sluice.serve.gateway.parent import Options, Parent
from sluice.serve.gateway.worker import Settings
from sluice.serve.replicad.leases import Book
from sluice.serve.replicad.revoked import RevokedKeys
from tests.unit.serve.gateway_bed import (
    DONE,
    STREAM_HEAD,
    Answer,
    Heard,
    Replica,
    certificate,
    chunk,
    in_chunk,
    plain,
    role_chunk,
    run,
    service_row,
    until,
    usage_chunk,
)

ASK: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "begin"}]}
_START = """
import sys
from pathlib import Path
from sluice.base.log import start_logging
from sluice.serve.gateway.parent import Options, serve
from sluice.serve.gateway.worker import Settings
folder = Path(sys.argv[1])
start_logging(verbose=True)
pem = sys.argv[4] or None
settings = Settings(
    -1, -1, -1, (), str(folder / "tokens.json"), str(folder / "oidc.json"), str(folder / "records"), (),
    ("127.0.0.0/8",),
    pem, pem,
)
serve(Options("127.0.0.1", int(sys.argv[2]), int(sys.argv[3]), folder / "replicad", 86400.0, settings))
"""


_BOOK = threading.Lock()
"""Two gateways may have one book."""


@dataclass
class Replicad:
    """What the gateway asks, from a snapshot."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    demand: list[dict[str, Any]] = field(default_factory=list)
    callers: dict[str, Any] = field(default_factory=dict)
    book: Book = field(default_factory=lambda: Book("e", 0, {}))
    peer: Replicad | None = None
    """Of another host, who hears at once what was revoked here."""
    asked: int = 0
    asked_before: list[int] = field(default_factory=list)
    """How often the gateway had asked for what is new, at each report of its limits."""
    told: dict[str, int] = field(default_factory=dict)
    """By keys that the gateway said were revoked: with which of these questions it did."""

    def __post_init__(self) -> None:
        self.revoked = RevokedKeys(self.snapshot)

    def answer(self, line: bytes, who: Any) -> bytes:
        asked = json.loads(line)
        self.demand += asked.get("demand", ())
        self.callers = asked.get("callers", self.callers)
        if asked["do"] == "lease":
            self.asked_before.append(self.asked)
            limit = self.snapshot.get("limits", "tenant/physics")
            with _BOOK:
                self.book.set_limits({} if limit is None else {("tenant", "physics"): row(LimitRow, limit).limit})
                report = row(LeaseReport, asked["report"])
                answer = self.book.answer(report, time.monotonic_ns() // 1000)
            return render_answer({"lease": asdict(answer)} if answer else {"error": "late"})
        if asked["do"] == "changes":
            self.asked += 1
            for digest, _ in asked["revoked"]:
                self.told.setdefault(digest, self.asked)
            if self.revoked.take((key, until) for key, until in asked["revoked"]) and self.peer is not None:
                self.peer.revoked.hear("here", self.revoked.say("there"))
            return self.snapshot.after(asked["epoch"], asked["last"])
        return render_answer({"ok": True})


@contextmanager
def replicad(folder: Path) -> Iterator[Replicad]:
    made, stopping = Replicad(), threading.Event()
    kind = Kind("gateway", 64, 2, 1 << 20, 8 << 20, 10.0)
    serving = threading.Thread(
        target=serve_local,
        args=(folder / "replicad", made.answer, (kind,), lambda _: kind, stopping),
        kwargs={"remedy": ""},
    )
    serving.start()
    try:
        yield made
    finally:
        stopping.set()
        serving.join()


@dataclass
class Gateway:
    process: subprocess.Popen[bytes]
    folder: Path
    port: int
    key: str
    keeper: Replicad

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def workers(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def records(self) -> list[RequestRecord]:
        lines = [line for path in (self.folder / "records").glob("*.jsonl") for line in path.read_bytes().splitlines()]
        return [record for line in lines if (record := parse(line)) is not None]

    def head(self, document: Any, *more: str) -> bytes:
        data = json.dumps(document).encode()
        lines = [
            "POST /v1/chat/completions HTTP/1.1",
            "host: g",
            f"authorization: Bearer {self.key}",
            f"content-length: {len(data)}",
            *more,
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + data

    async def ask(self, document: Any, *more: str) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.head(document, "connection: close", *more))
        data = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return Answer.of(data)

    async def get(self, path: str, *more: str) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [f"GET {path} HTTP/1.1", "host: g", "connection: close", *more]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        data = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return Answer.of(data)


@asynccontextmanager
async def gateway(
    folder: Path, workers: int = 2, pem: str = "", *, killed: bool = False
) -> AsyncIterator[tuple[Gateway, Replicad]]:
    (folder / "records").mkdir(parents=True, exist_ok=True)
    _, key = TokenStore(folder / "tokens.json").create("alice", ["serve"], now=time.time(), seconds=3600)
    with replicad(folder) as keeper, (folder / "log").open("wb") as log:
        keeper.snapshot.put("services", {"m": as_row(service_row())})
        keeper.snapshot.put("accounts", {"alice": as_row(AccountRow("alice", ("physics",)))})
        process = subprocess.Popen([sys.executable, "-c", _START, str(folder), "0", str(workers), pem], stderr=log)
        one = Gateway(process, folder, 0, key, keeper)
        try:
            await until(lambda: "listening on port" in one.log or process.poll() is not None, 60)
            one.port = int(one.log.partition("listening on port ")[2].split()[0])
            yield one, keeper
        finally:
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, 30)
            assert code == (-signal.SIGKILL if killed else 0), one.log


@asynccontextmanager
async def two_gateways(
    folder: Path, replica: Replica, *limits: LimitRow, killed: bool = False
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Of one authority, with the same key. `killed`: how the first one ends."""
    async with (
        gateway(folder / "second") as (other, keeper),
        gateway(folder / "first", killed=killed) as (one, keeper_),
    ):
        keeper_.book = keeper.book
        keeper.peer, keeper_.peer = keeper_, keeper
        for each in (keeper, keeper_):
            each.snapshot.put("limits", {f"{row.kind}/{row.name}": as_row(row) for row in limits})
            put(each, replica)
        await share_key(other, one)
        yield one, other


async def a_replica(folder: Path, script: Any, launch: str = "00000000000000a1") -> Replica:
    context, fingerprint = certificate(folder)
    return await Replica(script, context, fingerprint, launch).start()


def put(keeper: Replicad, *replicas: Replica) -> None:
    keeper.snapshot.put("replicas", {one.launch: as_row(one.row()) for one in replicas})


async def sure(one: Gateway, wanted: int = 200) -> Answer:
    answer = await one.ask(ASK)
    assert answer.status == wanted and answer.whole, answer
    return answer


def test_requests_through_two_workers_with_figures_of_both(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with gateway(tmp_path) as (one, keeper):
            put(keeper, replica)
            answers = await asyncio.gather(*(one.ask(ASK) for _ in range(40)))
            assert {(answer.text, answer.whole) for answer in answers} == {("hello world", True)}
            await until(lambda: len(one.records()) == 40)
            await asyncio.sleep(1.3)
            figures = (await one.get("/metrics")).body.decode()
            assert 'sluice_gateway_requests_total{service="m",outcome="ok"} 40' in figures
            assert 'sluice_gateway_completion_tokens_total{service="m"} 80' in figures
            assert 'sluice_gateway_replicas_usable{service="m"} 1' in figures
            assert (await one.get("/health")).status == 200
            assert one.key not in one.log and "begin" not in one.log

    run(work())


def test_who_has_how_many_requests_now_is_counted_over_all_workers(tmp_path: Path) -> None:
    async def work() -> None:
        async with gateway(tmp_path) as (one, keeper):
            writers = []
            for _ in range(5):
                _, writer = await asyncio.open_connection("127.0.0.1", one.port)
                writer.write(one.head(ASK))
                writers.append(writer)
            key = one.key.split("_")[1]
            who = {f"key/{key}", "user/alice", "tenant/physics"}
            await until(lambda: keeper.callers == {"open": dict.fromkeys(who, 5), "whole": True}, 20)
            for writer in writers[1:]:
                writer.close()
            await until(lambda: keeper.callers["open"] == dict.fromkeys(who, 1), 20)
            writers[0].close()
            await until(lambda: keeper.callers["open"] == {}, 20)

    run(work())


def test_limits_hold_over_all_workers(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with gateway(tmp_path) as (one, keeper):
            limit = LimitRow("tenant", "physics", Limit(requests_per_minute=25))
            keeper.snapshot.put("limits", {"tenant/physics": as_row(limit)})
            put(keeper, replica)
            await asyncio.sleep(0.5)
            begun = time.monotonic()
            answers = await asyncio.gather(*(one.ask(ASK) for _ in range(60)))
            good = sum(answer.status == 200 for answer in answers)
            assert 25 <= good <= 25 + (time.monotonic() - begun) * 25 / 60 + 1
            refused = next(answer for answer in answers if answer.status != 200)
            assert refused.status == 429 and refused.document["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(refused.headers["retry-after"]) <= 60

    run(work())


def test_a_tenant_that_has_used_its_tokens_is_refused_until_it_has_more(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with gateway(tmp_path) as (one, keeper):
            put(keeper, replica)
            for left, status in ((5, 200), (0, 429), (1000, 200)):
                row = LimitRow("tenant", "physics", Limit(), tokens_left=left)
                keeper.snapshot.put("limits", {"tenant/physics": as_row(row)})
                await asyncio.sleep(0.5)
                answer = await sure(one, status)
                if status == 429:
                    assert answer.document["error"]["type"] == "insufficient_quota"
                    assert "physics" in answer.document["error"]["message"]

    run(work())


def test_old_usage_records_are_removed(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    for day in ("2020-01-01", today):
        (records / f"other-{day}.jsonl").write_text("")

    async def work() -> None:
        async with gateway(tmp_path) as (one, _):
            await until(lambda: "other-2020-01-01.jsonl: removed" in one.log)
            assert [path.name for path in records.glob("*.jsonl")] == [f"other-{today}.jsonl"]

    run(work())


def test_reload_breaks_no_stream_and_drops_no_connection(tmp_path: Path) -> None:
    async def slow(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD + in_chunk(role_chunk()))
        for _ in range(40):
            heard.writer.write(in_chunk(chunk(" word")))
            await heard.writer.drain()
            await asyncio.sleep(0.1)
        heard.writer.write(in_chunk(usage_chunk(5, 40)) + in_chunk(DONE) + b"0\r\n\r\n")

    async def work() -> None:
        replica = await a_replica(tmp_path, slow)
        async with gateway(tmp_path) as (one, keeper):
            put(keeper, replica)
            before = set(one.workers())
            streams = [asyncio.create_task(sure(one)) for _ in range(6)]
            await until(lambda: len(replica.heard) == 6)
            one.process.send_signal(signal.SIGHUP)
            failed = 0
            while not {*one.workers()}.isdisjoint(before) and not all(stream.done() for stream in streams):
                failed += (await one.get("/health")).status != 200
            answers = await asyncio.gather(*streams)
            assert {answer.text for answer in answers} == {" word" * 40} and failed == 0
            await until(lambda: {*one.workers()}.isdisjoint(before) and "reloaded" in one.log, 30)
            await sure(one)
            assert len(one.records()) == 7

    run(work())


def test_a_worker_that_dies_is_replaced_and_what_it_did_is_billed(tmp_path: Path) -> None:
    async def slow(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD + in_chunk(role_chunk()))
        for _ in range(20):
            heard.writer.write(in_chunk(chunk(" word")))
        await heard.writer.drain()
        await heard.reader.read(1)
        raise ConnectionResetError

    async def work() -> None:
        replica = await a_replica(tmp_path, slow)
        async with gateway(tmp_path, workers=1) as (one, keeper):
            put(keeper, replica)
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.head(ASK))
            await reader.readuntil(b"word")
            (pid,) = one.workers()
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            assert b"[DONE]" not in await reader.read()
            await until(lambda: one.workers() not in ([], [pid]), 20)
            await until(lambda: len(one.records()) == 1)
            (record,) = one.records()
            assert (record.user, record.tenant, record.service, record.outcome) == ("alice", "physics", "m", "failed")
            assert 16 <= record.completion_tokens <= 21 and record.job == 7
            replica.script = plain
            await until(lambda: "another one takes its place" in one.log)
            assert (await sure(one)).text == "hello world"

    run(work())


def test_the_bill_of_a_killed_worker_waits_for_the_disk(tmp_path: Path) -> None:
    records = tmp_path / "records"
    settings = Settings(-1, -1, -1, (), str(tmp_path / "tokens.json"), "", str(records), (), ())
    parent = Parent(Options("127.0.0.1", 0, 1, tmp_path / "replicad", 1e9, settings))
    parent._write(Settled(1, 0xABC, 1, 2, 3, 4, 5, 90, 10, 20, 1, 2, 3), {})
    parent._write_late()
    records.mkdir()
    parent._write_late()
    parent._write_late()
    for one in parent._sockets:
        one.close()
    (line,) = next(records.iterdir()).read_bytes().splitlines()
    record = parse(line)
    assert record is not None
    assert (record.id, record.prompt_tokens, record.completion_tokens) == (f"{0xABC:032x}", 10, 20)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_records_that_a_full_disk_kept_out_survive_sigkill(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with gateway(tmp_path, 1, killed=True) as (one, keeper):
            put(keeper, replica)
            await sure(one)
            await until(lambda: len(one.records()) == 1)
            with suppress(OSError), (records / "filler").open("wb", buffering=0) as filler:
                while filler.write(b"\0" * 4096):
                    pass
            for _ in range(12):  # the page that the first record is in has room for some
                await sure(one)
            assert len(one.records()) < 13
            for pid in (one.process.pid, *one.workers()):
                os.kill(pid, signal.SIGKILL)
        (records / "filler").unlink()
        async with gateway(tmp_path, 1) as (one, _):
            await until(lambda: len({record.id for record in one.records()}) == 13, 30)
        assert not list(records.glob(".*"))

    records = tmp_path / "records"
    records.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(records)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount: {mounted.stderr.decode()}")
    try:
        run(work())
    finally:
        subprocess.run(["umount", "-l", str(records)], check=True)


def test_rows_stay_while_replicad_is_away(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with gateway(tmp_path) as (one, keeper):
            put(keeper, replica)
            await sure(one)
            (tmp_path / "replicad").rename(tmp_path / "away")
            await until(lambda: "services stay as they were" in one.log)
            await sure(one)
            (tmp_path / "away").rename(tmp_path / "replicad")
            await until(lambda: "replicad answers again" in one.log)

    run(work())


def test_prompts_are_logged_as_the_policy_now_says(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with gateway(tmp_path, workers=1) as (one, keeper):
            put(keeper, replica)
            await sure(one)

            async def logged(said: str) -> bool:
                answer = await one.ask(ASK | {"messages": [{"role": "user", "content": said}]})
                bill = re.compile(f"request={answer.headers['x-request-id']} .* outcome=ok")
                await until(lambda: bill.search(one.log) is not None)
                return said in one.log

            async def becomes(service: dict[str, Any], wanted: bool) -> None:
                keeper.snapshot.put("services", {"m": service})
                async with asyncio.timeout(20):
                    while await logged(secrets.token_hex(8)) != wanted:
                        pass

            assert not await logged("usual")
            plain_row = as_row(service_row())
            await becomes(plain_row | {"log_prompts": True}, True)
            del plain_row["log_prompts"]  # as a replicad that does not know it
            await becomes(plain_row, False)
            assert not await logged("no longer")

    run(work())


def test_clients_speak_tls(tmp_path: Path) -> None:
    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        _, fingerprint = certificate(tmp_path)
        async with gateway(tmp_path, pem=str(tmp_path / "replica.pem")) as (one, keeper):
            put(keeper, replica)
            trusts = ssl.create_default_context(cafile=str(tmp_path / "replica.pem"))
            trusts.check_hostname = False
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                trusts.maximum_version = trusts.minimum_version = version
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port, ssl=trusts, server_hostname="g")
                shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                assert hashlib.sha256(shown).hexdigest() == fingerprint
                writer.write(one.head(ASK, "connection: close"))
                answer = Answer.of(await reader.read())
                assert answer.whole and answer.text == "hello world"
            # Without TLS nothing is said, and nobody is held up.
            assert b"HTTP/1.1 200" not in await _plain(one)

    async def _plain(one: Gateway) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(one.head(ASK))
        with suppress(OSError):
            return await asyncio.wait_for(reader.read(), 20)
        return b""

    run(work())


def test_workers_end_with_a_parent_that_had_not_read_all_they_said(tmp_path: Path) -> None:
    """The kernel resets their connection to it then. They would go on, and never hear of another replica."""

    async def work() -> None:
        async with gateway(tmp_path, killed=True) as (one, _):
            workers = one.workers()
            os.kill(one.process.pid, signal.SIGSTOP)
            await asyncio.sleep(1.5)  # in which each says what it has counted
            os.kill(one.process.pid, signal.SIGKILL)
            await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 20)

    run(work())


def test_nobody_waits_in_the_workers_of_a_gateway_that_is_killed(tmp_path: Path) -> None:
    """They live on for what is under way, and hear of no replica any more."""

    async def work() -> None:
        async with gateway(tmp_path, 1, killed=True) as (one, keeper):
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(one.head(ASK))
            await until(lambda: any(row["waiting"] for row in keeper.demand), 20)
            one.process.kill()
            with suppress(ConnectionResetError):
                assert b"[DONE]" not in await asyncio.wait_for(reader.read(), 10)
            writer.close()

    run(work())


def test_a_gateway_that_is_killed_breaks_no_resuming_stream_and_bills_it_once(tmp_path: Path) -> None:
    words = [f" {number}" for number in range(60)]

    async def counts(heard: Heard) -> None:
        last = heard.document["messages"][-1]
        said = last["content"] if last["role"] == "assistant" else ""
        begin = len(said.split())
        assert said == "".join(words[:begin])
        heard.writer.write(STREAM_HEAD + in_chunk(role_chunk()))
        for word in words[begin:]:
            heard.writer.write(in_chunk(chunk(word)))
            await heard.writer.drain()
            await asyncio.sleep(0.05)
        heard.writer.write(in_chunk(chunk(finish="stop")) + in_chunk(usage_chunk(5 + begin, 60 - begin)))
        heard.writer.write(in_chunk(DONE) + b"0\r\n\r\n")

    async def work() -> None:
        replica = await a_replica(tmp_path, counts)
        async with two_gateways(tmp_path, replica, killed=True) as (one, other):
            urls = [f"http://127.0.0.1:{one.port}", f"http://127.0.0.1:{other.port}"]

            async def stream() -> str:
                async with AsyncResumingStream(urls, one.key, ASK) as made:
                    return "".join([part async for part in made.text()])

            streams = [asyncio.create_task(stream()) for _ in range(6)]
            await until(lambda: len(replica.heard) == 6)
            await asyncio.sleep(0.8)
            for pid in (one.process.pid, *one.workers()):
                os.kill(pid, signal.SIGKILL)
            assert set(await asyncio.gather(*streams)) == {"".join(words)}
            assert one.records() == []
            records = other.records()
            assert len({record.id for record in records}) == 6
            assert {(r.outcome, r.prompt_tokens, r.completion_tokens) for r in records} == {("ok", 5, 60)}

    run(work())


def test_one_request_to_several_gateways_at_once_is_answered_and_billed_once(tmp_path: Path) -> None:
    """The others wait for its end, and have the next ones of that name billed by themselves."""
    go_on = asyncio.Event()

    async def waits(heard: Heard) -> None:
        await go_on.wait()
        await plain(heard)

    async def work() -> None:
        replica = await a_replica(tmp_path, waits)
        async with two_gateways(tmp_path, replica) as (one, other):
            named = "idempotency-key: k"
            asked = [asyncio.create_task(at.ask(ASK, named)) for at in (one, other, one, other)]
            await until(lambda: sum(task.done() for task in asked) == 3, 30)
            refused = [task.result() for task in asked if task.done()]
            assert [answer.status for answer in refused] == [409] * 3
            assert {answer.document["error"]["code"] for answer in refused} == {"request_in_progress"}
            go_on.set()
            answers = await asyncio.gather(*asked)
            assert sorted(answer.status for answer in answers) == [200, 409, 409, 409]
            assert len(replica.heard) == 1
            assert [(await at.ask(ASK, named)).status for at in (one, other)] == [200, 200]
            records = [*one.records(), *other.records()]
            assert len(replica.heard) == len(records) == len({record.id for record in records}) == 3

    run(work())


def test_the_only_place_of_two_gateways_is_where_a_request_is(tmp_path: Path) -> None:
    """A client that asks one after the other is never refused; of two that ask all the time, each has its turns, the
    place is never idle for long, and nobody has two."""
    running, most, busy = 0, 0, 0.0

    async def slow(heard: Heard) -> None:
        nonlocal running, most, busy
        running, begun = running + 1, time.monotonic()
        most = max(most, running)
        await asyncio.sleep(0.4)
        running, busy = running - 1, busy + time.monotonic() - begun
        await plain(heard)

    async def insist(one: Gateway, until_: float, got: list[int]) -> None:
        while time.monotonic() < until_:
            answer = await one.ask(ASK)
            got.append(answer.status)
            if answer.status != 200:
                await asyncio.sleep(0.02)

    async def work() -> None:
        replica = await a_replica(tmp_path, slow)
        limit = LimitRow("tenant", "physics", Limit(concurrent=1))
        async with two_gateways(tmp_path, replica, limit) as (one, other):
            await asyncio.sleep(0.5)
            for number in range(10):
                assert (await (one, other)[number % 2].ask(ASK)).status == 200, number
            nonlocal busy
            busy, begun = 0.0, time.monotonic()
            got: tuple[list[int], list[int]] = [], []
            await asyncio.gather(*(insist(at, begun + 14, to) for at, to in zip((one, other), got, strict=True)))
            spent = time.monotonic() - begun
            assert most == 1
            assert min(one.count(200) for one in got) >= 4, got
            assert busy > 0.8 * spent, f"{busy:.1f} of {spent:.1f} s"

    run(work())


def test_few_requests_wait_for_a_place_that_another_gateway_does_not_give_back(tmp_path: Path) -> None:
    """The others are refused at once, as all are where there is one gateway."""
    free = asyncio.Event()

    async def held(heard: Heard) -> None:
        await free.wait()
        await plain(heard)

    async def ask(one: Gateway) -> tuple[int, float]:
        begun = time.monotonic()
        return (await one.ask(ASK)).status, time.monotonic() - begun

    async def work() -> None:
        replica = await a_replica(tmp_path, held)
        async with gateway(tmp_path / "first", 1) as (one, keeper):
            limit = as_row(LimitRow("tenant", "physics", Limit(concurrent=1)))
            keeper.snapshot.put("limits", {"tenant/physics": limit})
            put(keeper, replica)
            await asyncio.sleep(0.5)
            holder = asyncio.create_task(one.ask(ASK))
            await asyncio.sleep(0.5)
            alone = await asyncio.gather(*(ask(one) for _ in range(10)))
            assert all(status == 429 and seconds < 3 for status, seconds in alone), alone
            async with gateway(tmp_path / "second", 1) as (other, keeper_):
                keeper_.book = keeper.book
                keeper_.snapshot.put("limits", {"tenant/physics": limit})
                put(keeper_, replica)
                await share_key(other, one)
                await asyncio.sleep(0.5)
                many = await asyncio.gather(*(ask(other) for _ in range(30)))
                assert {status for status, _ in many} == {429}
                assert sum(seconds > 4.5 for _, seconds in many) == 8, many
                again = [asyncio.create_task(ask(other)) for _ in range(10)]
                done, left = await asyncio.wait(again, timeout=3)
                assert len(left) == 1 and {one.result()[0] for one in done} == {429}
                free.set()
                assert (await holder).status == 200
                assert (await left.pop())[0] == 200

    run(work())


async def share_key(one: Gateway, other: Gateway) -> None:
    """Both take the other one's key."""
    (one.folder / "tokens.json").write_bytes((other.folder / "tokens.json").read_bytes())
    one.key = other.key
    async with asyncio.timeout(10):
        while (await one.get("/v1/models", f"authorization: Bearer {one.key}")).status != 200:
            await asyncio.sleep(0.1)
