"""`@serve.model`: a file with a function, run as a service's command, asked as gateways ask."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import UsageError
from sluice.exchange.serving import State
from sluice.serve import model
from tests.unit.serve.replica_bed import ROOT, Registry, connect, read_all, replica, request, spec_of, until

PROGRAM = """
import time
from sluice import serve

@serve.model(max_batch=16, max_delay=0.02, count_tokens=len)
def embed(texts):
    if "bad" in texts:
        raise ValueError("bad: " + " ".join(map(str, texts)))
    time.sleep(0.02)  # of a call, however many inputs it has
    return [[len(text), 0.5, -1.0] for text in texts]

serve.run()
"""


class Server:
    def __init__(self, folder: Path, program: str = PROGRAM) -> None:
        (folder / "embed.py").write_text(program)
        self.socket = folder / "e.sock"
        self.process = subprocess.Popen(
            [sys.executable, folder / "embed.py"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "SLUICE_ENGINE_SOCKET": str(self.socket),
                 "SLUICE_SERVICE": "tiny"},
            stderr=subprocess.PIPE,
        )  # fmt: skip
        until(lambda: self.socket.exists() or self.process.poll() is not None)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30)
        until(lambda: connection.connect_ex(str(self.socket)) == 0)
        return connection

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        with self.connect() as connection:
            connection.sendall(request(path, body))
            head, _, text = read_all(connection).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), json.loads(text) if text[:1] in (b"{", b"[") else text.decode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server(tmp_path)
    yield one
    one.process.kill()
    one.process.wait()


def test_embeddings_as_openai_has_them(server: Server) -> None:
    status, answer = server.ask("/v1/embeddings", {"input": ["ab", "abcd"], "model": "tiny"})
    assert status == 200 and answer["model"] == "tiny" and answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [one["embedding"] for one in answer["data"]] == [[2.0, 0.5, -1.0], [4.0, 0.5, -1.0]]
    assert [one["index"] for one in answer["data"]] == [0, 1]
    _, answer = server.ask("/v1/embeddings", {"input": "abc", "encoding_format": "base64"})
    assert struct.unpack("<3f", base64.b64decode(answer["data"][0]["embedding"])) == (3.0, 0.5, -1.0)
    assert server.ask("/v1/embeddings", {"input": [5, 6, 7, 8]})[1]["data"][0]["embedding"][0] == 4.0
    assert server.ask("/predict", {"inputs": ["xy"]})[1]["outputs"] == [[2, 0.5, -1.0]]
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "tiny" and server.ask("/health")[0] == 200
    assert "sluice_model_prompt_tokens_total 15\n" in server.ask("/metrics")[1]
    assert server.socket.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/embeddings", {"input": []}, 400, "input: give a text"),
        ("/v1/embeddings", {"input": [["x"]]}, 400, "input: give a text"),
        ("/v1/embeddings", {"input": [True]}, 400, "input: give a text"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "dimensions: this model has one size"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format 'hex': use float"),
        ("/v1/embeddings", [], 400, "the body is no object"),
        ("/v1/embeddings", None, 405, "GET /v1/embeddings: use POST"),
        ("/v1/chat/completions", {}, 404, "this model has /v1/embeddings and /predict"),
        ("/predict", {"inputs": "a"}, 400, "inputs: give a list"),
        ("/v1/embeddings", {"input": "bad"}, 500, "the model failed with ValueError"),
    ],
)
def test_what_is_not_right_is_said(server: Server, path: str, body: Any, status: int, said: str) -> None:
    found, answer = server.ask(path, body)
    assert found == status and said in answer["error"]["message"]
    assert server.ask("/v1/embeddings", {"input": "good"})[0] == 200


HOSTILE = """
import time
from sluice import serve

def count(text):
    return {"uncounted": lambda: int("x")}.get(text, lambda: 1)()

@serve.model(max_batch=1, max_delay=0, count_tokens=count)
def embed(texts):
    while "hang" in texts:
        time.sleep(1)
    return [next(iter(())) if text == "stop" else {1, 2} if text == "set" else [1.0] for text in texts]

serve.run()
"""


def test_a_function_that_does_what_it_should_not(tmp_path: Path) -> None:
    server = Server(tmp_path, HOSTILE)
    try:
        for path, name, text, said in (
            ("/predict", "inputs", "set", "TypeError"),
            ("/v1/embeddings", "input", "uncounted", "ValueError"),
            ("/v1/embeddings", "input", "stop", "RuntimeError"),
        ):
            status, answer = server.ask(path, {name: [text]})
            assert status == 500 and answer["error"]["message"] == f"the model failed with {said}"
        assert server.ask("/v1/embeddings", {"input": "good"})[0] == 200
    finally:
        server.process.kill()
        server.process.wait()


def test_a_connection_s_requests_are_not_read_without_end(tmp_path: Path) -> None:
    server = Server(tmp_path, HOSTILE)
    text = b'{"inputs": ["hang"]}'
    one = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    try:
        with server.connect() as connection:
            connection.sendall(one * 17)
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(15)
            connection.sendall(one)
            assert read_all(connection) == b""
    finally:
        server.process.kill()
        server.process.wait()


def test_words_of_requests_are_in_no_error(server: Server) -> None:
    """The function's error has the input in it."""
    assert "confidential" not in json.dumps(server.ask("/v1/embeddings", {"input": ["bad", "confidential"]}))
    server.process.send_signal(signal.SIGTERM)
    _, said = server.process.communicate(timeout=30)
    assert b"ValueError" in said and b"confidential" not in said


def test_one_bad_input_fails_alone_among_clients(server: Server) -> None:
    found: dict[str, int] = {}

    def ask(text: str) -> None:
        found[text] = server.ask("/v1/embeddings", {"input": text})[0]

    threads = [threading.Thread(target=ask, args=(text,)) for text in ("bad", *(f"t{one}" for one in range(12)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.pop("bad") == 500 and set(found.values()) == {200} and len(found) == 12


def test_requests_are_put_together(server: Server) -> None:
    """64 requests of one input each, from 16 clients at once: far fewer calls than requests."""
    with server.connect() as warm:
        warm.sendall(request("/health"))
        read_all(warm)

    def client() -> None:
        with server.connect() as connection:
            for _ in range(4):
                text = b'{"input": "abc"}'
                connection.sendall(
                    b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text
                )
                answer = b""
                while b"total_tokens" not in answer:
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")

    threads = [threading.Thread(target=client) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures = dict(line.rsplit(" ", 1) for line in server.ask("/metrics")[1].splitlines())
    assert figures["sluice_model_inputs_total"] == "64" and int(figures["sluice_model_calls_total"]) <= 24
    assert 4 <= int(figures["sluice_model_largest_call"]) <= 16


def test_what_is_under_way_is_finished_at_the_end(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(request("/v1/embeddings", {"input": ["abc"] * 160}))
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert server.process.wait(30) == 0


def test_what_no_parser_takes_is_closed(server: Server) -> None:
    for bad in (
        b"\x00\x01\x02\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ):
        with server.connect() as connection:
            connection.sendall(bad)
            assert b" 200 " not in read_all(connection)
    assert server.ask("/health")[0] == 200


def test_as_a_replica(tmp_path: Path) -> None:
    registry = Registry()
    (tmp_path / "embed.py").write_text(PROGRAM)
    command = (sys.executable, str(tmp_path / "embed.py"))
    spec = spec_of("", engine="python", command=command, registries=(registry.address,))
    with registry.socket, replica(spec, tmp_path) as one:
        beat = registry.wait(State.READY)
        assert beat.abilities.embeddings and not beat.abilities.chat
        with connect(beat.port, beat.secret) as connection:
            connection.sendall(request("/v1/embeddings", {"input": "abc"}))
            assert b'"embedding":[3.0,0.5,-1.0]' in read_all(connection)
        until(lambda: registry.beats[-1].load.prompt_tokens == 3)
        one.process.send_signal(signal.SIGTERM)
        assert one.ended() == 0


def test_declarations_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_batch 0"):
        model(max_batch=0)
    with pytest.raises(UsageError, match="max_delay 61"):
        model(max_delay=61)
    one = Server(tmp_path, "from sluice import serve\nserve.run()\n")
    _, said = one.process.communicate(timeout=30)
    assert one.process.returncode == 1 and b"0 functions with @serve.model" in said
