"""The HTTP side of `@serve.model`, on a Unix socket: embeddings as OpenAI has them, /predict for what else JSON holds.

Its one client is the replica's relay; bounds are for what gateways let through.
"""

from __future__ import annotations

import array
import asyncio
import base64
import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import httptools

from sluice.base.errors import SluiceError
from sluice.serve.engines.batching import Batcher, FullError
from sluice.serve.engines.hosted import Model

MOST_BODY = 32 << 20
MOST_INPUTS = 2048
_MOST_NEXT = 16  # requests of a connection that are read before it has the answer to the first
_END_S = 30.0


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


def serve(model: Model, socket: str, name: str) -> None:
    """Until SIGTERM; what is under way is finished then."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(model, Path(socket), name))
    else:
        uvloop.run(_serve(model, Path(socket), name))


async def _serve(model: Model, socket: Path, name: str) -> None:
    server = ModelServer(model, name)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    socket.unlink(missing_ok=True)
    listening = await loop.create_unix_server(lambda: _Connection(server), str(socket))
    socket.chmod(0o600)
    await stop.wait()
    listening.close()
    if server.tasks:
        await asyncio.wait(server.tasks, timeout=_END_S)
    server.close()


class ModelServer:
    """Answers requests; knows nothing of connections."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name = model, name
        self._thread = ThreadPoolExecutor(1, "model")  # models are used by the thread that loaded them, or by one
        self.batcher = Batcher(self._call, max_batch=model.max_batch, max_delay=model.max_delay)
        self.tasks: set[asyncio.Task[None]] = set()
        self._tokens = 0

    def close(self) -> None:
        """Make no more calls."""
        self.batcher.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, inputs: list[Any]) -> Sequence[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._called, inputs)

    def _called(self, inputs: list[Any]) -> Sequence[Any]:
        try:
            return self._model.function(inputs)
        except StopIteration as error:  # no future takes it: the call would never end
            raise RuntimeError("StopIteration") from error

    async def answer(self, method: str, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, content type, body."""
        try:
            if path in ("/health", "/v1/models", "/metrics"):
                return self._say(path)
            if path not in ("/v1/embeddings", "/predict"):
                raise _RefusedError(404, f"{path[:80]}: this model has /v1/embeddings and /predict")
            if method != "POST":
                raise _RefusedError(405, f"{method} {path}: use POST")
            return 200, "application/json", await self._given(path, _document(body))
        except _RefusedError as error:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            said = {"error": {"message": error.message, "type": kind, "param": error.param, "code": None}}
            return error.status, "application/json", json.dumps(said).encode()

    async def _given(self, path: str, document: dict[str, Any]) -> bytes:
        try:
            given = await (self._embed(document) if path == "/v1/embeddings" else self._predict(document))
            return json.dumps(given, separators=(",", ":")).encode()
        except _RefusedError:
            raise
        except FullError as error:
            raise _RefusedError(503, str(error)) from error
        except SluiceError as error:
            raise _RefusedError(500, str(error)) from error
        except Exception as error:  # of the function, of `count_tokens`, or of an output that JSON does not have
            # Its words may be the input's: they are for the job's output, which is its owner's.
            print(f"the model failed: {type(error).__name__}", file=sys.stderr, flush=True)
            raise _RefusedError(500, f"the model failed with {type(error).__name__}") from error

    def _say(self, path: str) -> tuple[int, str, bytes]:
        if path == "/health":
            return 200, "application/json", b'{"status":"ok"}'
        if path == "/v1/models":
            one = {"id": self._name, "object": "model", "created": 0, "owned_by": "sluice"}
            return 200, "application/json", json.dumps({"object": "list", "data": [one]}).encode()
        figures = self.batcher.figures
        lines = {
            "running": figures.running,
            "waiting": self.batcher.waiting,
            "calls_total": figures.calls,
            "inputs_total": figures.inputs,
            "prompt_tokens_total": self._tokens,
            "largest_call": figures.largest,
            "longest_wait_seconds": round(figures.longest_wait, 6),
        }
        text = "".join(f"sluice_model_{name} {value}\n" for name, value in lines.items())
        return 200, "text/plain; version=0.0.4", text.encode()

    async def _embed(self, document: dict[str, Any]) -> dict[str, Any]:
        coding = document.get("encoding_format") or "float"
        if coding not in ("float", "base64"):
            raise _RefusedError(400, f"encoding_format {str(coding)[:40]!r}: use float or base64", "encoding_format")
        if document.get("dimensions") is not None:
            raise _RefusedError(400, "dimensions: this model has one size; leave it out", "dimensions")
        inputs = _inputs(document.get("input"))
        vectors = await self.batcher.ask(inputs)
        data = [
            {"object": "embedding", "index": index, "embedding": _vector(vector, coding)}
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(self._model.count_tokens(one) for one in inputs)
        self._tokens += tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._name, "usage": usage}

    async def _predict(self, document: dict[str, Any]) -> dict[str, Any]:
        inputs = document.get("inputs")
        if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_INPUTS:
            raise _RefusedError(400, f"inputs: give a list of 1 to {MOST_INPUTS}", "inputs")
        outputs = await self.batcher.ask(inputs)
        tokens = sum(self._model.count_tokens(one) for one in inputs)
        self._tokens += tokens
        given = [one.tolist() if hasattr(one, "tolist") else one for one in outputs]
        return {"outputs": given, "model": self._name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, "the body is not JSON") from error
    if not isinstance(document, dict):
        raise _RefusedError(400, "the body is no object")
    return document


def _inputs(given: Any) -> list[Any]:
    """As OpenAI has it: a text, its tokens, or a list of either."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and len(given) <= 1_000_000:
        if all(isinstance(one, int) and not isinstance(one, bool) for one in given):
            return [given]
        if len(given) <= MOST_INPUTS and all(
            isinstance(one, str) or (isinstance(one, list) and one and all(isinstance(word, int) for word in one))
            for one in given
        ):
            return given
    raise _RefusedError(400, f"input: give a text, or a list of 1 to {MOST_INPUTS} texts or lists of tokens", "input")


def _vector(vector: Any, coding: str) -> Any:
    try:
        values = array.array("f", vector.tolist() if hasattr(vector, "tolist") else vector)
    except (TypeError, ValueError, OverflowError) as error:
        raise _RefusedError(500, "the model returned something else than a list of numbers") from error
    if coding == "float":
        return values.tolist()
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


class _Connection(asyncio.Protocol):
    """One request after the other; a client that goes away cancels its own."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self._next: list[tuple[str, str, bytes, bool]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._write(400, "text/plain", b"not a request", keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        if self._task is not None:
            self._task.cancel()

    # ---- called by the parser ----

    def on_message_begin(self) -> None:
        self._path, self._body, self._size = b"", [], 0

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and value.lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MOST_BODY:
            self._write(413, "text/plain", b"too long", keep=False)
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._size > MOST_BODY:
            return
        method = self._parser.get_method().decode()
        path = self._path.partition(b"?")[0].decode("latin-1")
        self._next.append((method, path, b"".join(self._body), self._parser.should_keep_alive()))
        self._body = []
        if len(self._next) > _MOST_NEXT and self._transport is not None:
            self._transport.abort()
        self._begin()

    # ---- answers ----

    def _begin(self) -> None:
        if self._task is None and self._next and self._transport is not None:
            self._task = asyncio.get_running_loop().create_task(self._answer(*self._next.pop(0)))
            self._server.tasks.add(self._task)
            self._task.add_done_callback(self._done)

    async def _answer(self, method: str, path: str, body: bytes, keep: bool) -> None:
        status, kind, text = await self._server.answer(method, path, body)
        self._write(status, kind, text, keep=keep)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self._task = None
        if not task.cancelled() and task.exception() is not None and self._transport is not None:
            self._transport.abort()
        self._begin()

    def _write(self, status: int, kind: str, body: bytes, *, keep: bool) -> None:
        if self._transport is None:
            return
        reason = HTTPStatus(status).phrase
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        self._transport.write(f"{head}Connection: {'keep-alive' if keep else 'close'}\r\n\r\n".encode() + body)
        if not keep:
            self._transport.close()
