"""What clients may not send, and what they may make a gateway hold."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import OctKey

from sluice.base.tokens import TokenStore
from sluice.core.gate import Kind as SubjectKind
from sluice.core.gate import Limit as CoreLimit
from sluice.exchange.requests import RequestRecord
from sluice.exchange.serving import AccountRow, Limit, LimitRow
from sluice.serve.gateway import body, bounds
from sluice.serve.gateway import worker as worker_module
from sluice.serve.gateway.client import new_id
from sluice.serve.gateway.directory import subject
from sluice.serve.gateway.keys import Keys, ask_controllerd
from sluice.serve.gateway.leases import KINDS, limit_of, share_of
from sluice.serve.gateway.refusals import RefusalError
from sluice.slurm import jwt as slurms
from tests.unit.serve.gateway_bed import (
    CHAT,
    STREAM_HEAD,
    Answer,
    Heard,
    answer_of,
    bed,
    chunk,
    identity_provider,
    in_chunk,
    plain,
    run,
    service_row,
    until,
)

BODY = b'{"model": "m", "messages": []}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
ASK: dict[str, Any] = {"model": "m", "messages": []}


def post(
    *lines: bytes, body: bytes = BODY, first: bytes = b"POST /v1/chat/completions HTTP/1.1", key: str = "KEY"
) -> bytes:
    head = [
        first,
        b"host: gateway",
        b"authorization: Bearer " + key.encode(),
        *(line.removesuffix(b"\r\n") for line in lines),
    ]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


CHUNKED = b"transfer-encoding: chunked"
WHOLE = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = {
    "length and chunks": post(LENGTH, CHUNKED, body=WHOLE),
    "chunks and length": post(CHUNKED, LENGTH, body=WHOLE),
    "two lengths": post(LENGTH, LENGTH),
    "two other lengths": post(LENGTH, b"content-length: 3"),
    "a list of lengths": post(b"content-length: 30, 30"),
    "a length with a sign": post(b"content-length: +30"),
    "a length that is hexadecimal": post(b"content-length: 0x1e"),
    "no length after all": post(b"content-length: "),
    "a length of many digits": post(b"content-length: 99999999999999999999"),
    "a folded header": post(b"x-a: b\r\n c", LENGTH),
    "a header without a name": post(b": b", LENGTH),
    "a space before the colon": post(b"content-length : 30"),
    "a bare LF": post(LENGTH).replace(b"\r\n", b"\n"),
    "one bare LF": post(b"x-a: b\nx-b: c", LENGTH),
    "a bare CR": post(b"x-a: b\rx-b: c", LENGTH),
    "an LF at the end of the head": post(LENGTH).replace(b"\r\n\r\n", b"\r\n\n"),
    "a NUL": post(b"x-a: b\0c", LENGTH),
    "two codings": post(b"transfer-encoding: gzip, chunked", body=WHOLE),
    "chunks twice": post(CHUNKED, CHUNKED, body=WHOLE),
    "another coding": post(b"transfer-encoding: xchunked", body=WHOLE),
    "a coding after chunks": post(b"transfer-encoding: chunked, identity", body=WHOLE),
    "a tab in the coding": post(b"transfer-encoding:\x0bchunked", body=WHOLE),
    "chunks in HTTP/1.0": post(CHUNKED, first=b"POST /v1/chat/completions HTTP/1.0", body=WHOLE),
    "a size that is no number": post(CHUNKED, body=b"0x1e\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a size that overflows": post(CHUNKED, body=b"ffffffffffffffff1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk that is too long": post(CHUNKED, body=b"1d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk that ends with LF": post(CHUNKED, body=b"1e\r\n" + BODY + b"\n0\r\n\r\n"),
    "a trailer": post(CHUNKED, body=WHOLE.removesuffix(b"\r\n") + b"authorization: Bearer x\r\n\r\n"),
    "a trailer with a length": post(CHUNKED, body=WHOLE.removesuffix(b"\r\n") + b"content-length: 5\r\n\r\n"),
    "two hosts": post(b"host: other", LENGTH),
    "two keys": post(b"authorization: Bearer other", LENGTH),
    "two tenants": post(b"sluice-tenant: physics", b"sluice-tenant: biology", LENGTH),
    "no host": post(LENGTH).replace(b"host: gateway\r\n", b""),
    "HTTP/1.2": post(LENGTH, first=b"POST /v1/chat/completions HTTP/1.2"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an upgrade": post(b"connection: upgrade", b"upgrade: h2c", LENGTH),
    "CONNECT": post(first=b"CONNECT replica:443 HTTP/1.1"),
    "a URL of another host": post(LENGTH, first=b"POST http://other/v1/chat/completions HTTP/1.1"),
    "no path": post(LENGTH, first=b"POST * HTTP/1.1"),
    "another encoding": post(b"content-encoding: gzip", LENGTH),
    "a form": post(b"content-type: application/x-www-form-urlencoded", LENGTH),
    "another expectation": post(b"expect: a-miracle", LENGTH),
}


@pytest.mark.parametrize("what", SMUGGLED)
def test_what_two_parsers_could_read_in_two_ways_is_refused_and_ends_the_connection(tmp_path: Path, what: str) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            data = SMUGGLED[what].replace(b"KEY", one.key.encode())
            second = b"GET /v1/models HTTP/1.1\r\nhost: g\r\nauthorization: Bearer " + one.key.encode() + b"\r\n\r\n"
            answer = await asyncio.wait_for(one.send(data + second), 10)
            first = Answer.of(answer)
            assert 400 <= first.status < 500, answer
            assert "x-request-id" in first.headers and first.headers["connection"] == "close"
            assert answer.count(b"HTTP/1.1 ") == 1, "what came after it was taken for a request"
            assert one.replicas[0].heard == [] and one.worker.held == 0

    run(work())


@pytest.mark.parametrize(
    "data",
    [
        post(LENGTH),
        post(CHUNKED, body=WHOLE),
        post(CHUNKED, body=b"1e;extension=1\r\n" + BODY + b"\r\n0\r\n\r\n"),
        post(LENGTH, b"content-type: application/json; charset=utf-8"),
        post(LENGTH, b"connection: keep-alive", first=b"POST /v1/chat/completions HTTP/1.0"),
        b"\r\n" + post(LENGTH),
        post(LENGTH, first=b"POST /v1/chat/completions?api-version=1 HTTP/1.1"),
    ],
)
def test_what_is_right_is_answered_whatever_pieces_it_comes_in(tmp_path: Path, data: bytes) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            data_ = data.replace(b"KEY", one.key.encode())
            for size in (1, 7, len(data_)):
                reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
                for at in range(0, len(data_), size):
                    writer.write(data_[at : at + size])
                    await asyncio.sleep(0)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), head
                assert (
                    json.loads(await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))) == CHAT
                )
                writer.close()
            head = one.replicas[0].heard[0].head
            names = sorted(line.partition(":")[0] for line in head.split("\r\n")[1:] if line)
            assert names == ["accept", "authorization", "content-length", "content-type", "host", "x-request-id"]
            assert one.key not in head

    run(work())


def test_requests_of_one_connection_are_answered_in_their_order(tmp_path: Path) -> None:
    async def slow(heard: Heard) -> None:
        await asyncio.sleep(heard.document["wait"])
        heard.writer.write(answer_of({**CHAT, "id": heard.document["wait"]}))

    async def work() -> None:
        async with bed(tmp_path, slow) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            waits = [0.2, 0.0, 0.1, 0.0]
            for wait in waits:
                body = json.dumps(ASK | {"wait": wait}).encode()
                writer.write(post(b"content-length: %d" % len(body), body=body, key=one.key))
            found = []
            for _ in waits:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.partition(b"content-length: ")[2].split()[0])
                found.append(json.loads(await reader.readexactly(size))["id"])
            assert found == waits
            writer.write(post(LENGTH, key=one.key) * 30)
            rest = await asyncio.wait_for(_all(reader), 20)
            assert b" 429 " not in rest.partition(b"\r\n")[0] and rest.count(b"HTTP/1.1") <= bounds.MOST_PIPELINED + 1

    async def _all(reader: asyncio.StreamReader) -> bytes:
        data = b""
        with suppress(OSError):
            while piece := await reader.read(1 << 16):
                data += piece
        return data

    run(work())


def test_a_body_that_is_too_large_is_refused_before_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.serve.gateway import heads

    for module in (bounds, heads):
        monkeypatch.setattr(module, "MOST_BODY", 1 << 20)

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            refused = Answer.of(await one.send(post(b"content-length: 1048577", body=b"", key=one.key)))
            assert refused.status == 413 and refused.document["error"]["code"] == "request_too_large"
            piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            refused = Answer.of(await one.send(post(CHUNKED, body=piece * 17, key=one.key)))
            assert refused.status == 413 and one.worker.held == 0
            # Without a key, not a byte of it is taken.
            refused = Answer.of(await one.send(post(b"content-length: 1000000", body=b"", key="x")))
            assert refused.status == 401
            monkeypatch.setattr(bounds, "HELD_BODIES", 300_000)
            first = await _open(one.port, post(b"content-length: 290000", body=b"x" * 1000, key=one.key))
            await until(lambda: one.worker.held == 290_000)
            refused = Answer.of(await one.send(post(b"content-length: 290000", body=b"", key=one.key)))
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            first.close()
            await until(lambda: one.worker.held == 0)
            good = json.dumps(ASK | {"x": "y" * 250_000}).encode()
            assert Answer.of(await one.send(one.request(good))).status == 200
            assert one.worker.held == 0

    run(work())


async def _open(port: int, data: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return writer


@pytest.mark.parametrize("data", [b"", b"POST /v1/chat", post(b"content-length: 1000", body=b'{"mod')])
def test_clients_that_send_slowly_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    for name in ("HEAD_S", "BODY_S", "IDLE_S"):
        monkeypatch.setattr(bounds, name, 0.5)

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            begun = time.monotonic()
            answer = await one.send(data.replace(b"KEY", one.key.encode()))
            assert 0.4 < time.monotonic() - begun < 10
            assert (Answer.of(answer).status == 408) if b"{" in data else (answer == b"")
            assert one.worker._clients == set() and one.worker._open == {}

    run(work())


def test_a_worker_that_drains_answers_first_requests_and_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 1.0)

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            fresh = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(200)]
            await until(lambda: len(one.worker._clients) == len(fresh))
            one.worker.drain()
            reader, writer = fresh[0]
            writer.write(one.request({"model": "m", "messages": []}, connection="keep-alive"))
            answer = Answer.of(await asyncio.wait_for(reader.read(), 10))
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            await asyncio.wait_for(one.sweeping, 10)
            for reader, writer in fresh[1:]:
                assert await asyncio.wait_for(reader.read(), 1) == b""
                writer.close()

    run(work())


def test_a_client_that_does_not_read_holds_the_replica_back_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "WRITE_S", 1.5)
    sent = [0]

    async def endless(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD)
        piece = in_chunk(chunk("x" * 8000))
        while True:
            heard.writer.write(piece)
            await heard.writer.drain()
            sent[0] += len(piece)

    async def work() -> None:
        async with bed(tmp_path, endless) as one:
            _, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(one.request(ASK | {"stream": True}))
            await until(lambda: any(client.full for client in one.worker._clients))
            await asyncio.sleep(0.5)
            before = sent[0]
            await asyncio.sleep(0.5)
            assert sent[0] == before < 64 << 20, "the replica is not held back"
            await until(lambda: one.worker.calls == {} and one.replicas[0].gone == 1)
            assert one.records()[0].outcome == "cancelled"
            writer.close()

    run(work())


def test_a_slow_reader_gets_all(tmp_path: Path) -> None:
    words = [f"{number:08}" * 500 for number in range(600)]

    async def fast(heard: Heard) -> None:
        heard.writer.write(STREAM_HEAD)
        for word in words:
            heard.writer.write(in_chunk(chunk(word)))
            await heard.writer.drain()
        heard.writer.write(in_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def work() -> None:
        async with bed(tmp_path, fast) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=1024)
            writer.write(one.request(ASK | {"stream": True}))
            data = b""
            while piece := await reader.read(1 << 18):
                data += piece
                await asyncio.sleep(0.01)
            answer = Answer.of(data)
            assert answer.whole and answer.text == "".join(words)

    run(work())


def test_a_large_answer_passes_while_it_comes(tmp_path: Path) -> None:
    document = {
        "object": "list",
        "data": ["y" * 5_000_000],
        "model": "m",
        "usage": {"prompt_tokens": 11, "total_tokens": 11},
    }

    async def large(heard: Heard) -> None:
        heard.writer.write(answer_of(document))

    async def work() -> None:
        async with bed(tmp_path, large) as one:
            answer = await one.ask({"model": "m", "input": "x"}, "/v1/embeddings")
            assert answer.whole and answer.document == document
            assert one.records()[0].prompt_tokens == 11

    run(work())


def test_addresses_have_bounded_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_CONNECTIONS", (10, 8, 5))

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            kept = [await _open(one.port, b"") for _ in range(5)]
            await until(lambda: len(one.worker._clients) == 5)
            assert await one.send(one.request(ASK)) == b""
            kept[0].close()
            await until(lambda: len(one.worker._clients) == 4)
            assert (await one.ask(ASK)).status == 200

    run(work())


def test_keys(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            store: TokenStore = one.store
            made, key = store.create("alice", ["serve"], now=time.time(), seconds=3600)
            _, reads = store.create("alice", ["read"], now=time.time(), seconds=3600)
            _, short = store.create("alice", ["serve"], now=time.time(), seconds=1.5)
            _, stranger = store.create("mallory", ["serve"], now=time.time(), seconds=3600)
            await asyncio.sleep(0.6)

            async def status(key: str, **headers: str) -> tuple[int, str]:
                answer = await one.ask(ASK, authorization=f"Bearer {key}", **headers)
                return answer.status, answer.document["error"]["code"] if answer.status != 200 else ""

            assert await status(key) == await status(short) == (200, "")
            assert await status(reads) == (403, "insufficient_scope")
            assert await status(stranger) == (403, "no_tenant")
            assert await status(key[:-1] + ("A" if key[-1] != "A" else "B")) == (401, "invalid_api_key")
            assert await status(key, sluice_tenant="biology") == (200, "")
            assert await status(key, sluice_tenant="chemistry") == (403, "tenant_not_allowed")
            assert [record.tenant for record in one.records()] == ["physics", "physics", "biology"]
            store.revoke([made.id])
            begun = time.monotonic()
            while (await status(key))[0] == 200:
                assert time.monotonic() - begun < 1.0
                await asyncio.sleep(0.02)
            await asyncio.sleep(1.0)
            assert (await status(short))[0] == 401
            for authorization in ("", "Basic eDp5", "Bearer", "bearer  "):
                assert (await one.ask(ASK, authorization=authorization)).status in (401, 429)

    run(work())


def test_who_guesses_keys_is_slowed_down_and_others_are_not(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            assert (await one.ask(ASK)).status == 200
            found = [(await one.ask(ASK, authorization=f"Bearer sluice_{n:016x}_{'x' * 43}")).status for n in range(60)]
            assert found[:20] == [401] * 20 and found[-1] == 429
            assert (await one.ask(ASK)).status == 200

    run(work())


def test_who_may_call_what(tmp_path: Path) -> None:
    async def work() -> None:
        rows = {
            "m": service_row(),
            "ours": service_row("ours", callers=("physics",)),
            "theirs": service_row("theirs", callers=("chemistry",)),
        }
        async with bed(tmp_path, plain, services=rows) as one:
            one.accounts.append(AccountRow("bob", ("chemistry",)))
            one.publish()
            _, bob = one.store.create("bob", ["serve"], now=time.time(), seconds=3600)
            await asyncio.sleep(0.6)

            async def models(key: str) -> list[str]:
                data = f"GET /v1/models HTTP/1.1\r\nhost: g\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n"
                return [row["id"] for row in Answer.of(await one.send(data.encode())).document["data"]]

            assert await models(one.key) == ["m", "ours"] and await models(bob) == ["m", "theirs"]
            refused = await one.ask(ASK | {"model": "theirs"})
            unknown = await one.ask(ASK | {"model": "nobodys"})
            assert refused.status == unknown.status == 404
            assert refused.body.replace(b"theirs", b"") == unknown.body.replace(b"nobodys", b"")

    run(work())


def test_limits_and_budgets(tmp_path: Path) -> None:
    async def hold(heard: Heard) -> None:
        await asyncio.sleep(0.5)
        heard.writer.write(answer_of(CHAT))

    async def work() -> None:
        limits = [
            LimitRow("user", "*", Limit(requests_per_minute=600)),
            LimitRow("tenant", "physics", Limit(concurrent=2)),
            LimitRow("tenant", "biology", Limit(tokens_per_minute=2000)),
        ]
        async with bed(tmp_path, hold, limits=limits) as one:
            answers = await asyncio.gather(*(one.ask(ASK) for _ in range(5)))
            assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
            refused = next(answer for answer in answers if answer.status == 429)
            error = refused.document["error"]
            assert error["type"] == "rate_limit_error" and "limit of 2 requests at once" in error["message"]
            too_large = await one.ask(ASK | {"max_tokens": 5000}, sluice_tenant="biology")
            assert (too_large.status, too_large.document["error"]["code"]) == (400, "larger_than_limit")
            assert (await one.ask(ASK | {"max_tokens": 1900}, sluice_tenant="biology")).status == 200
            # What was reserved and not used was given back.
            assert (await one.ask(ASK | {"max_tokens": 1900}, sluice_tenant="biology")).status == 200
            one.limits[2] = LimitRow("tenant", "biology", Limit(), tokens_left=0)
            one.publish()
            over = await one.ask(ASK, sluice_tenant="biology")
            assert over.status == 429 and over.document["error"]["type"] == "insufficient_quota"
            outcomes = [record.outcome for record in one.records()]
            assert outcomes.count("refused-limit") == 4 and outcomes.count("ok") == 4

    run(work())


def test_a_limit_that_is_new_holds_for_a_caller_that_is_known(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            assert [(await one.ask(ASK)).status for _ in range(3)] == [200, 200, 200]
            one.limits.append(LimitRow("tenant", "physics", Limit(requests_per_minute=1)))
            one.publish()
            assert [(await one.ask(ASK)).status for _ in range(3)] == [200, 429, 429]

    run(work())


def test_what_is_larger_than_a_share_and_not_than_the_limit_may_be_asked_again(tmp_path: Path) -> None:
    """While no controller answers, a gateway has a share of each limit."""

    async def work() -> None:
        limits = [
            LimitRow("tenant", "physics", Limit(concurrent=1)),
            LimitRow("tenant", "biology", Limit(tokens_per_minute=2000)),
        ]
        async with bed(tmp_path, plain, limits=limits) as one:
            for row in limits:
                one.given.add((row.kind, row.name))
                number = subject(row.kind, row.name)
                one.worker.gate.set_limit(KINDS[row.kind], number, share_of(limit_of(row.limit), 2, 1))
            for words, tenant in ((ASK, "physics"), (ASK | {"max_tokens": 1900}, "biology")):
                answer = await one.ask(words, sluice_tenant=tenant)
                assert (answer.status, answer.document["error"]["code"]) == (429, "rate_limit_exceeded")
                assert "a share of the whole" in answer.document["error"]["message"]
            answer = await one.ask(ASK | {"max_tokens": 2100}, sluice_tenant="biology")
            assert (answer.status, answer.document["error"]["code"]) == (400, "larger_than_limit")

    run(work())


WRONG = {
    "no JSON": b"{",
    "no UTF-8": b'{"model": "\xff"}',
    "UTF-16": '{"model": "m", "stream": true}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model": "m"}',
    "half a pair": b'{"model": "m", "messages": "\xed\xa0\x80"}',
    "more than an object": b'{"model": "m"} {}',
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no model": b"{}",
    "a model of numbers": b'{"model": 5}',
    "an empty model": b'{"model": ""}',
    "tokens below 0": b'{"model": "m", "max_tokens": -1}',
    "too many tokens": b'{"model": "m", "max_tokens": 1e30}',
    "tokens in words": b'{"model": "m", "max_tokens": "5"}',
    "many choices": b'{"model": "m", "n": 100000}',
    "a stream in words": b'{"model": "m", "stream": "yes"}',
    "options of a stream": b'{"model": "m", "stream": true, "stream_options": 5}',
    "nothing": b"",
}


@pytest.mark.parametrize("what", WRONG)
def test_bodies_that_say_nothing_are_refused_with_a_reason(tmp_path: Path, what: str) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            answer = await one.ask(WRONG[what])
            assert answer.status == 400 and answer.document["error"]["type"] == "invalid_request_error"
            assert one.replicas[0].heard == [] and one.worker.calls == {}

    run(work())


def test_logs_have_neither_keys_nor_prompts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    secret = "zanzibar-is-what-the-user-said"

    async def dies(heard: Heard) -> None:
        heard.writer.transport.abort()
        raise ConnectionResetError

    async def work() -> None:
        async with bed(tmp_path, dies, plain, access_log=True) as one:
            caplog.set_level(logging.DEBUG)
            said = {"model": "m", "messages": [{"role": "user", "content": secret}]}
            assert (await one.ask(said)).status == 200
            assert (await one.ask(said | {"stream": True})).status == 200
            for wrong in (said | {"model": secret}, said | {"max_tokens": secret}, said | {"n": [secret]}):
                assert (await one.ask(wrong)).status in (400, 404)
            await one.ask(json.dumps(said).encode()[:-1])
            await one.ask(said, authorization=f"Bearer {secret}")
            await one.ask(said, f"/v1/{secret}")
            await one.ask(said, content_type=secret)
            await one.send(f"GET /{secret}\x00 HTTP/1.1\r\n{secret}\r\n\r\n".encode())
            one.worker.flush()
            records = b"".join(path.read_bytes() for path in one.records_folder.glob("*")).decode()
            written = capfd.readouterr().err + caplog.text + records
            assert "user=alice tenant=physics service=m path=/v1/chat/completions status=200 outcome=ok" in written
            assert secret not in written and one.key not in written and one.key.split("_")[2] not in written
            assert "zanzibar" not in written

    run(work())


def test_prompts_are_in_the_log_only_while_the_service_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "zanzibar\n\x1b[2J\x7f\u009b\u2028 request=forged"
    asked = ASK | {"messages": [{"role": "user", "content": said}]}

    async def work() -> None:
        services = {"m": service_row(), "other": service_row("other", log_prompts=True)}
        refused = LimitRow("tenant", "biology", Limit(tokens_per_minute=10))
        async with bed(tmp_path, plain, services=services, limits=[refused], access_log=True) as one:

            async def log_of(row: bool) -> tuple[str, list[str]]:
                one.services["m"] = service_row(log_prompts=row)
                one.publish()
                answer = await one.ask(asked)
                assert answer.status == 200
                assert (await one.ask(asked, sluice_tenant="biology")).status == 400  # over its limit
                assert (await one.ask(asked, authorization="Bearer other")).status == 401
                one.worker.flush()
                return answer.headers["x-request-id"], capfd.readouterr().err.split("\n")

            for row in (False, True, False):
                name, lines = await log_of(row)
                prompts = [line for line in lines if "zanzibar" in line]
                wanted = (
                    f"sluice: request={name} user=alice tenant=physics service=m prompt="
                    r'"user" "zanzibar\n\u001b[2J\u007f\u009b\u2028 request=forged"'
                )
                assert prompts == [wanted] * row
                assert len(lines) == 4 + row and one.key not in "".join(lines)  # with the empty end

    run(work())


def test_without_an_access_log_there_are_no_prompts_either(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain, services={"m": service_row(log_prompts=True)}) as one:
            assert (await one.ask(ASK | {"messages": [{"role": "user", "content": "zanzibar"}]})).status == 200
            one.worker.flush()
            assert "zanzibar" not in capfd.readouterr().err

    run(work())


LOGGED = {
    "a chat of parts": (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "user": "not this"},
        '"user" "text" "hi"',
    ),
    "token ids": ("completions", {"prompt": [[1, 2], [3]], "suffix": "end"}, '1 2 3 "end"'),
    "an answer's input": ("responses", {"input": "b", "instructions": "a"}, '"a" "b"'),
    "half of a surrogate": ("embeddings", {"input": ["\ud800"]}, r'"\ud800"'),
    "none": ("chat", {}, ""),
    "one that fits": ("completions", {"prompt": "x" * 98}, f'"{"x" * 98}"'),
    "one too long": ("completions", {"prompt": "x" * 99}, f'"{"x" * 99}...'),
    "one that grows by its escapes": ("completions", {"prompt": "\0" * (1 << 20)}, '"' + r"\u0000" * 16 + r"\u0..."),
    "more after the bound": ("completions", {"prompt": ["x" * 98, "y"]}, f'"{"x" * 98}"...'),
    "nothing but lists": ("completions", {"prompt": [[]] * 1000}, "..."),
    "a deep one": ("completions", {"prompt": json.loads("[" * 500 + "]" * 500)}, "..."),
}


@pytest.mark.parametrize("what", LOGGED)
def test_a_prompt_in_the_log_is_ascii_and_bounded(what: str) -> None:
    ability, document, wanted = LOGGED[what]
    found = body.read(ability, json.dumps({"model": "m", **document}).encode()).prompt(100)  # type: ignore[arg-type]
    assert found == wanted and found.isascii() and (found.isprintable() or not found)


def test_where_the_gate_has_no_room_for_a_limit_the_request_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain, limits=[LimitRow("key", "*", Limit(requests_per_minute=5))]) as one:
            for number in range(one.worker.gate.shape.subjects):
                one.worker.gate.set_limit(SubjectKind.KEY, 1 << 40 | number, CoreLimit(requests=1))
            answer = await one.ask(ASK)
            assert answer.status == 503 and "too many that have limits" in answer.document["error"]["message"]
            assert one.worker.calls == {}

    run(work())


def test_the_log_has_a_request_by_the_id_that_its_client_got(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async with bed(tmp_path, plain, access_log=True) as one:
            got = [(await one.ask(ASK, **more)).headers["x-request-id"] for more in ({}, {"idempotency_key": "k"})]
            one.worker.flush()
            first, second = (line for line in capfd.readouterr().err.splitlines() if "service=m" in line)
            assert f" request={got[0]} user=alice" in first
            assert f" request={got[1]} record={one.records()[1].id} user=alice" in second

    run(work())


def test_a_check_of_an_identity_token_that_crashes_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def crashes(text: str, address: str) -> None:
        raise RecursionError

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            monkeypatch.setattr(one.worker.keys, "check", lambda *_: "a.b.c")
            monkeypatch.setattr(one.worker.keys, "check_later", crashes)
            answer = await asyncio.wait_for(one.ask(ASK), 10)
            assert answer.status == 500 and "see the log" in answer.document["error"]["message"]

    run(work())


def test_no_bill_is_lost_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_module, "MOST_LATE_RECORDS", 3)
    asked = {"model": "m", "messages": []}

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            write, full = one.worker._records.write, [True]

            def written(record: RequestRecord) -> None:
                if full[0]:
                    raise OSError(28, "No space left on device")
                write(record)

            monkeypatch.setattr(one.worker._records, "write", written)
            assert [(await one.ask(asked)).status for _ in range(5)] == [200, 200, 200, 503, 503]
            assert one.records() == []
            full[0] = False
            await until(lambda: len(one.records()) == 3)
            assert (await one.ask(asked)).status == 200
            # a record that can never be written is in nobody's way
            one.worker._append(replace(one.records()[0], endpoint="/" * 5000))
            one.worker._append(replace(one.records()[0], user="\ud800"))
            full[0] = True
            assert (await one.ask(asked)).status == 200
            full[0] = False
            await until(lambda: len(one.records()) == 5)
            # what is left when the worker ends is tried once more, or logged
            full[0] = True
            last = [(await one.ask(asked)).headers["x-request-id"] for _ in range(2)]
            one.worker.drain()
            await until(lambda: one.worker._clients == set())
            await asyncio.wait_for(one.sweeping, 10)
            written_out = capfd.readouterr().err
            assert all(f'"id":"{name}"' in written_out for name in last)

    run(work())


def test_identity_tokens_of_the_provider(tmp_path: Path) -> None:
    provider, token = identity_provider()

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            one.worker.keys = Keys(one.store, provider)
            for _ in range(2):
                assert (await one.ask(ASK, authorization=f"Bearer {token()}")).status == 200
            assert {(record.user, record.key[:5]) for record in one.records()} == {("alice", "oidc-")}
            for wrong in ({"aud": "other"}, {"exp": time.time() - 5}, {"preferred_username": "root"}):
                assert (await one.ask(ASK, authorization=f"Bearer {token(**wrong)}")).status == 401
            assert (await one.ask(ASK, authorization=f"Bearer {token()[:-8]}AAAAAAAA")).status == 401
            assert (await one.ask(ASK)).status == 200

    run(work())


def test_a_token_that_many_requests_have_is_checked_once_however_they_write_it() -> None:
    asked: list[str] = []

    def check(text: str) -> tuple[str, float]:
        asked.append(text)
        time.sleep(0.1)
        return "alice", time.time() + 60

    async def work() -> None:
        keys = Keys(store, None, check)
        callers = await asyncio.gather(*(keys.check_later("a.b.c", "127.0.0.1") for _ in range(50)))
        callers += [keys.check(text, "127.0.0.1") for text in (b"Bearer a.b.c", b"bearer a.b.c", b"Bearer  a.b.c ")]
        assert {caller.user for caller in callers if not isinstance(caller, str)} == {"alice"} and asked == ["a.b.c"]

    store = TokenStore(Path("/nonexistent"))
    run(work())


def test_a_controllerd_that_hangs_or_answers_nothing_refuses_nobodys_good_token(tmp_path: Path) -> None:
    provider, token = identity_provider()
    go_on = threading.Event()

    def hangs(text: str) -> tuple[str, float]:
        go_on.wait(30)
        return ask_controllerd(tmp_path / "socket", text)

    def closes() -> None:
        while True:
            connection, _ = listening.accept()
            if not connection.recv(1 << 16):
                return
            connection.close()

    async def work() -> None:
        keys = Keys(TokenStore(tmp_path / "none"), provider, hangs)
        waiting = [asyncio.create_task(keys.check_later(f"a.{n}.c", "127.0.0.1")) for n in range(100)]
        await asyncio.sleep(0.1)
        assert (await keys.check_later(token(), "127.0.0.1")).user == "alice"
        go_on.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert {one.status for one in found if isinstance(one, RefusalError)} == {503} and len(found) == 100

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen(8)
        thread = threading.Thread(target=closes, daemon=True)
        thread.start()
        try:
            run(work())
        finally:
            go_on.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(tmp_path / "socket"))
            thread.join()


def test_tokens_of_slurm_as_the_web_pages_take_them(tmp_path: Path) -> None:
    key, away, asked = b"k" * 32, [False], list[str]()

    def token(key: bytes = key, **claims: Any) -> str:
        said = {"sun": "alice", "iat": int(time.time()), "exp": time.time() + 60, **claims}
        return str(jwt.encode({"alg": "HS256"}, said, OctKey.import_key(key)))

    def check(text: str) -> tuple[str, float]:
        asked.append(text)
        if away[0]:
            return ask_controllerd(tmp_path / "nothing", text)
        claims = slurms.verify(text, key, time.time())
        return claims.user, claims.expires

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            one.worker.keys = Keys(one.store, None, check)
            one.worker.keys.refresh()
            good, short = token(), token(exp=time.time() + 2)
            for _ in range(2):
                assert (await one.ask(ASK, authorization=f"Bearer {good}")).status == 200
            assert asked == [good] and {(record.user, record.key[:6]) for record in one.records()} == {
                ("alice", "slurm-")
            }
            assert (await one.ask(ASK, authorization=f"Bearer {short}")).status == 200
            nobody = await one.ask(ASK, authorization=f"Bearer {token(sun='mallory')}")
            assert (nobody.status, nobody.document["error"]["code"]) == (403, "no_tenant")
            for wrong in (token(b"x" * 32), token(exp=time.time() - 1), good[:-4] + "AAAA", "a.b.c"):
                assert (await one.ask(ASK, authorization=f"Bearer {wrong}")).status == 401
            await asyncio.sleep(2.1)
            assert (await one.ask(ASK, authorization=f"Bearer {short}")).status == 401
            away[0] = True
            assert (await one.ask(ASK, authorization=f"Bearer {good}")).status == 200  # known for a minute
            assert (await one.ask(ASK, authorization=f"Bearer {token(exp=time.time() + 30)}")).status == 503
            assert (await one.ask(ASK)).status == 200

    run(work())


def test_a_request_that_has_ended_is_in_figures_that_are_asked_right_after_it(tmp_path: Path) -> None:
    """It is counted after its answer was sent, and its bill is written before."""

    async def work() -> None:
        async with bed(tmp_path, plain) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            for number in range(1, 4):
                writer.write(post(LENGTH, key=one.key) + b"GET /metrics HTTP/1.1\r\nhost: gateway\r\n\r\n")
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 ") and len(one.records()) == number
                await reader.readexactly(len(answer_of(CHAT).partition(b"\r\n\r\n")[2]))
                while sum("metrics" in message for message in one.told) < number:
                    await asyncio.sleep(0.01)
                asked = [message.get("metrics") for message in one.told].index(number)
                said = next(message["counts"] for message in reversed(one.told[:asked]) if "counts" in message)
                assert ["requests", "m", "ok", number] in said
                one.worker.told({"metrics": number, "text": ""})
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.close()

    run(work())


def test_each_request_has_an_id_of_its_own() -> None:
    made = [new_id() for _ in range(1000)]
    assert len(set(made)) == 1000 and all(len(one) == 32 and int(one, 16) >= 0 for one in made)
