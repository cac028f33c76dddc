"""Calls of the gateway of this host, with what the caller sent to show who it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import floor
from typing import Any

import grpc
import httpx

from sluice.serve.rpc.status import CallError, Context, of_answer, of_event

PASSED_ON = ("authorization", "sluice-tenant", "idempotency-key")
"""Metadata that become headers."""
_MOST_ANSWER = 64 << 20
_MOST_LINE = 4 << 20
_MOST_ERROR = 64 << 10
_CONNECT_S = 5.0
_QUIET_S = 600.0
"""Between two bytes of a stream; while it waits for a replica it has a comment each few seconds."""
_WRITE_S = 60.0
_MOST_WAIT_S = 24 * 3600.0


class Gateway:
    """Over a pool of connections."""

    def __init__(self, url: str, connections: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=url, limits=limits, trust_env=False, follow_redirects=False, transport=transport
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return (await self._http.get("/health", timeout=_CONNECT_S)).is_success
        except httpx.HTTPError:
            return False

    async def ask(self, context: Context, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer, parsed. Raises CallError."""
        async with self._sent(context, method, path, body, None) as answer:
            content = await _read(answer, _MOST_ANSWER)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CallError(
                grpc.StatusCode.INTERNAL, f"{path}: the answer is no JSON; see the log of the model's engine"
            ) from error

    async def stream(self, context: Context, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream. Raises CallError, also where it ends before its end is said."""
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._sent(context, "POST", path, sent, _QUIET_S) as answer:
            request_id = answer.headers.get("x-request-id", "")
            try:
                async for data in _events(answer):
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if isinstance(event, dict) and isinstance(event.get("error"), dict):
                        raise of_event(event["error"], request_id)
                    if isinstance(event, dict):
                        yield event
            except (httpx.HTTPError, ValueError, RecursionError) as error:
                raise _cut(str(error) or type(error).__name__, request_id) from error
            raise _cut("no [DONE]", request_id)

    @asynccontextmanager
    async def _sent(
        self, context: Context, method: str, path: str, body: Mapping[str, Any] | None, quiet_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        left = context.time_remaining()
        read_s = quiet_s if quiet_s is not None else min(left or _MOST_WAIT_S, _MOST_WAIT_S) + 1
        timeout = httpx.Timeout(_CONNECT_S, read=read_s, write=_WRITE_S, pool=left)
        headers = _headers(context, left)
        try:
            async with self._http.stream(method, path, json=body, headers=headers, timeout=timeout) as answer:
                if not answer.is_success:
                    raise of_answer(answer.status_code, answer.headers, await _read(answer, _MOST_ERROR))
                yield answer
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise CallError(
                grpc.StatusCode.UNAVAILABLE, f"the gateway does not answer ({error}); is sluice gateway running?"
            ) from error
        except httpx.HTTPError as error:
            raise CallError(
                grpc.StatusCode.UNAVAILABLE, f"{path}: {str(error) or type(error).__name__}; try again"
            ) from error


def _cut(why: str, request_id: str) -> CallError:
    text = f"the stream was cut ({why}); what came before is not whole, ask again"
    return CallError(grpc.StatusCode.UNAVAILABLE, text, {"x-request-id": request_id})


def _headers(context: Context, left: float | None) -> dict[str, str]:
    headers = {}
    for name, value in context.invocation_metadata() or ():
        if name in PASSED_ON and isinstance(value, str):
            if name in headers:
                raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"metadata {name}: twice; send it once")
            headers[name] = value
    if "authorization" not in headers:
        raise CallError(
            grpc.StatusCode.UNAUTHENTICATED,
            "metadata authorization: missing; send `Bearer` and a token of: sluice token create --scope serve",
        )
    if left is not None:
        headers["sluice-deadline"] = f"{max(floor(left * 1000), 1) / 1000:.3f}"
    return headers


async def _read(answer: httpx.Response, most: int) -> bytes:
    parts, size = [], 0
    async for part in answer.aiter_bytes():
        size += len(part)
        if size > most:
            raise CallError(grpc.StatusCode.INTERNAL, f"an answer of more than {most} bytes; ask for less, or stream")
        parts.append(part)
    return b"".join(parts)


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """The data of each event; comments are passed over."""
    data: list[str] = []
    rest = b""
    async for part in answer.aiter_bytes():
        lines = (rest + part).split(b"\n")
        rest = lines.pop()
        if len(rest) > _MOST_LINE:
            raise ValueError(f"an event of more than {_MOST_LINE} bytes")
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data.clear()
    if data:
        yield "\n".join(data)
