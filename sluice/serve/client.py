"""A client of gateways whose streams survive the gateway, too: it goes on with another one, where the text ended.

    from sluice.serve.client import ResumingStream

    with ResumingStream(["https://gw1:6825", "https://gw2:6825"], key, {"model": "m", "messages": [...]}) as stream:
        for part in stream.text():
            print(part, end="")

A gateway that loses a replica goes on by itself, for every client. This class is for the loss of the gateway: it
sends the request again with the same Idempotency-Key and what it has (`sluice_resume`, docs/serve-gateway.md), so that
the text goes on and the request is billed once. Needs the optional package httpx.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from sluice.base.errors import SluiceError

_PATHS: Final = ("/v1/chat/completions", "/v1/completions")
_AGAIN: Final = frozenset((408, 409, 429, 500, 502, 503, 504))
_MOST_WAIT_S: Final = 30.0
_LEAST_WAIT_S: Final = 0.05


class StreamError(SluiceError):
    """A stream that did not come to its end. `text`: what of it came; `status`: of HTTP, 0 where there is none."""

    def __init__(self, what: str, *, remedy: str = "", text: str = "", status: int = 0) -> None:
        super().__init__(what, remedy=remedy)
        self.text = text
        self.status = status


class _Progress:
    """How far a stream has come, and what is sent next."""

    def __init__(self, urls: Sequence[str], key: str, body: Mapping[str, Any], path: str, retries: int) -> None:
        if not urls or path not in _PATHS:
            raise SluiceError(
                f"path {path!r}: cannot be resumed", remedy=f"use {' or '.join(_PATHS)}, and name a gateway"
            )
        self.said = ""
        self.ended = False
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._headers = {"authorization": f"Bearer {key}", "idempotency-key": secrets.token_hex(16)}
        self._body = {**body, "stream": True}
        self._path = path
        self._left = self._retries = retries
        self._tries = 0
        self._name: dict[str, Any] | None = None
        self._tokens = 0
        self._finish: str | None = None
        self._why_not = "" if self._body.get("n") in (None, 1) else "it has several choices"

    def request(self) -> dict[str, Any]:
        """Arguments of httpx's `stream`."""
        body = self._body
        if self._name is not None:
            resume = {**self._name, "text": self.said, "tokens": self._tokens}
            if self._finish is not None:
                resume["finish_reason"] = self._finish
            body = {**body, "sluice_resume": resume}
        url = self._urls[self._tries % len(self._urls)] + self._path
        return {"method": "POST", "url": url, "headers": self._headers, "json": body}

    def line(self, line: str) -> dict[str, Any] | None:
        """A line of the stream; the part of the answer that it is. Raises StreamError."""
        if not line.startswith("data:"):
            return None
        data = line[5:].strip()
        if data == "[DONE]":
            self.ended = True
            return None
        try:
            part = json.loads(data)
        except ValueError as error:
            raise StreamError(
                f"not a part of an answer: {data[:80]!r}", remedy="is it a gateway?", text=self.said
            ) from error
        if not isinstance(part, dict):
            raise StreamError(f"not a part of an answer: {data[:80]!r}", remedy="is it a gateway?", text=self.said)
        if part.get("error"):
            error_ = part["error"]
            said = error_.get("message", "") if isinstance(error_, dict) else str(error_)
            raise StreamError(said, remedy="ask again", text=self.said)
        self._take(part)
        return part

    def _take(self, part: dict[str, Any]) -> None:
        if self._name is None:
            self._name = {name: part.get(name) for name in ("id", "created", "model")}
        self._left = self._retries
        for choice in part.get("choices") or ():
            delta = choice.get("delta") or {}
            said = choice.get("text") or delta.get("content") or ""
            if any(delta.get(name) for name in ("tool_calls", "function_call", "reasoning_content", "reasoning")):
                self._why_not = "it has called a tool, or has reasoned"
            self.said += said
            self._tokens += bool(said)
            self._finish = choice.get("finish_reason") or self._finish

    def failed(self, why: str, status: int = 0, after: str | None = None) -> float:
        """It broke; seconds until the next try. Raises StreamError where there is none."""
        if status and status not in _AGAIN:
            raise StreamError(why, text=self.said, status=status)
        if self._name is not None and self._why_not:
            raise StreamError(
                f"{why}, and nobody can go on: {self._why_not}", remedy="ask again", text=self.said, status=status
            )
        if self._left <= 0:
            raise StreamError(
                f"{why} ({self._retries + 1} tries)", remedy="ask again later", text=self.said, status=status
            )
        self._left -= 1
        self._tries += 1
        if after is not None and after.isdecimal():
            return min(float(after), _MOST_WAIT_S)
        round_ = (self._retries - self._left - 1) // len(self._urls)
        return float(min(_LEAST_WAIT_S * 4**round_, _MOST_WAIT_S)) if round_ else 0.0


def _message(status: int, data: bytes) -> str:
    try:
        return f"{status}: {json.loads(data)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


class ResumingStream:
    """One streamed request. `urls`: of a site's gateways; `body`: as for OpenAI's API; `retries`: without progress."""

    def __init__(
        self, urls: Sequence[str], key: str, body: Mapping[str, Any], *, path: str = _PATHS[0], retries: int = 8,
        timeout: float = 60.0, verify: Any = True,
    ) -> None:  # fmt: skip
        import httpx

        self._progress = _Progress(urls, key, body, path, retries)
        self._http = httpx.Client(timeout=timeout, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The parts of the answer, as if they had come in one stream. Raises StreamError."""
        import httpx

        progress = self._progress
        while not progress.ended:
            try:
                with self._http.stream(**progress.request()) as answer:
                    if answer.status_code == 200:
                        for line in answer.iter_lines():
                            if (part := progress.line(line)) is not None:
                                yield part
                        if progress.ended:
                            return
                        why, status, after = "the stream ended before its end", 0, None
                    else:
                        why, status = _message(answer.status_code, answer.read()), answer.status_code
                        after = answer.headers.get("retry-after")
            except httpx.RequestError as error:
                why, status, after = f"{type(error).__name__}: {error}", 0, None
            time.sleep(progress.failed(why, status, after))

    def text(self) -> Iterator[str]:
        """The text alone, in parts."""
        before = 0
        for _ in self:
            if len(self._progress.said) > before:
                yield self._progress.said[before:]
                before = len(self._progress.said)


class AsyncResumingStream:
    """As ResumingStream, in an `async with`."""

    def __init__(
        self, urls: Sequence[str], key: str, body: Mapping[str, Any], *, path: str = _PATHS[0], retries: int = 8,
        timeout: float = 60.0, verify: Any = True,
    ) -> None:  # fmt: skip
        import httpx

        self._progress = _Progress(urls, key, body, path, retries)
        self._http = httpx.AsyncClient(timeout=timeout, verify=verify)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """As ResumingStream's."""
        import httpx

        progress = self._progress
        while not progress.ended:
            try:
                async with self._http.stream(**progress.request()) as answer:
                    if answer.status_code == 200:
                        async for line in answer.aiter_lines():
                            if (part := progress.line(line)) is not None:
                                yield part
                        if progress.ended:
                            return
                        why, status, after = "the stream ended before its end", 0, None
                    else:
                        why, status = _message(answer.status_code, await answer.aread()), answer.status_code
                        after = answer.headers.get("retry-after")
            except httpx.RequestError as error:
                why, status, after = f"{type(error).__name__}: {error}", 0, None
            await asyncio.sleep(progress.failed(why, status, after))

    async def text(self) -> AsyncIterator[str]:
        """The text alone, in parts."""
        before = 0
        async for _ in self:
            if len(self._progress.said) > before:
                yield self._progress.said[before:]
                before = len(self._progress.said)
