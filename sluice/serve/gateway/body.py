"""What a request's body asks for.

The bytes go on to the replica as they came, with two exceptions: `stream_options` that ask for the usage, which is what
is billed, and what a client sends of a stream that broke.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from sluice.core.gate import MAX_AMOUNT
from sluice.serve.gateway.heads import Ability
from sluice.serve.gateway.refusals import RefusalError

RESUME: Final = "sluice_resume"
"""Member of a body: how far the client has a stream that broke."""
N_PREDICT: Final = "n_predict"
"""llama.cpp's own name of a bound, which it prefers to the others; below 0: none."""
_USAGE: Final = b'"stream_options":{"include_usage":true},'
_DATA: Final = re.compile(rb'"data:[^"]{64,}"')
_BLANKS: Final = " \t\n\r"
_raw_decode: Final = json.JSONDecoder().raw_decode
_BYTES_A_TOKEN: Final = 4
_IMAGE_TOKENS: Final = 1024
_MOST_TOKENS: Final = 1 << 30
_MOST_CHOICES: Final = 128
_BLOCKS: Final = tuple(1024 << step // 4 for step in range(16))
"""Bytes of the blocks by which prompts are compared: the later ones are longer."""
_LIMITS: Final[Mapping[Ability, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens", N_PREDICT),
    "completions": ("max_tokens", N_PREDICT),
    "embeddings": (),
    "responses": ("max_output_tokens", N_PREDICT),
}


@dataclass(slots=True)
class Asked:
    """A request's body."""

    ability: Ability
    model: str
    stream: bool
    shows_usage: bool
    """Whether the client wants the usage in its stream."""
    most_tokens: int | None
    """Of one choice."""
    choices: int
    prompt_tokens: int
    """Estimated, from its length."""
    body: bytes
    """For the replica."""
    document: dict[str, Any]
    resume: dict[str, Any] | None = None
    begin: int = 0
    """Where the prompt begins in the bytes that came."""
    raw: bytes = field(default=b"", repr=False)

    def reserved(self, default: int) -> int:
        """Tokens that it may take."""
        if self.ability == "embeddings":
            return self.prompt_tokens
        most = default if self.most_tokens is None else self.most_tokens
        return min(self.prompt_tokens + most * self.choices, MAX_AMOUNT)

    def prefix(self, salt: bytes) -> list[int]:
        """A number for each begin of its prompt, shortest first: equal begins have equal ones. `salt`: of whom."""
        found: list[int] = []
        last, at = salt, self.begin
        for size in _BLOCKS:
            if at + size > len(self.raw):
                break
            last = blake2b(self.raw[at : at + size], digest_size=8, key=last).digest()
            found.append(int.from_bytes(last, "little") or 1)
            at += size
        return found


def read(ability: Ability, raw: bytes) -> Asked:
    """A body. Raises RefusalError."""
    try:
        document = _parse(raw)
    except (ValueError, RecursionError) as error:
        where = f" at byte {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise RefusalError(400, f"body: not JSON{where}", remedy="send one object of JSON, in UTF-8") from error
    if not isinstance(document, dict):
        raise RefusalError(400, "body: not an object of JSON", remedy='send {"model": ..., ...}')
    model = document.get("model")
    if not isinstance(model, str) or not model or len(model) > 512:
        raise _wrong("model", "not a name", "name a service: GET /v1/models lists them")
    stream = _flag(document, "stream") and ability != "embeddings"
    # engines differ in which of several they take, and in what they make of 0
    endless = type(bound := document.get(N_PREDICT)) is int and bound < 0
    bounds = [_count(document, name, _MOST_TOKENS) for name in _LIMITS[ability] if not (endless and name == N_PREDICT)]
    most = None if endless else max((found for found in bounds if found is not None), default=None)
    choices = max(_count(document, name, _MOST_CHOICES) or 1 for name in ("n", "n_cmpl"))  # n_cmpl: of llama.cpp
    best = _count(document, "best_of", _MOST_CHOICES) if ability == "completions" else None
    if ability == "completions" and isinstance(prompts := document.get("prompt"), list) and prompts:
        choices *= len(prompts) if isinstance(prompts[0], str | list) else 1
    resume = document.pop(RESUME, None)
    if resume is not None and not (isinstance(resume, dict) and stream):
        raise _wrong(RESUME, "not an object, or of a request that does not stream", "leave it out")
    shows, body = _with_usage(document, raw, ability, stream, changed=resume is not None)
    begin = max(
        raw.find(b'"messages"' if ability == "chat" else b'"prompt"' if ability == "completions" else b'"input"'), 0
    )
    return Asked(
        ability, model, stream, shows, most, max(choices, best or 1), _estimate(raw), body, document, resume, begin, raw
    )


def _parse(raw: bytes) -> Any:
    """As json.loads, but UTF-8 alone, and in half the time. Raises ValueError, RecursionError."""
    text = raw.decode()
    document, end = _raw_decode(text, len(text) - len(text.lstrip(_BLANKS)))
    if text[end:].strip(_BLANKS):
        raise json.JSONDecodeError("Extra data", text, end)
    return document


def _with_usage(
    document: dict[str, Any], raw: bytes, ability: Ability, stream: bool, *, changed: bool
) -> tuple[bool, bytes]:
    """Whether the client wants to see the usage, and the body that asks for it."""
    if not stream or ability not in ("chat", "completions"):
        return True, dump(document) if changed else raw
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", "not an object", 'send {"include_usage": true}')
    if options is not None and options.get("include_usage") is True:
        return True, dump(document) if changed else raw
    given = "stream_options" in document
    document["stream_options"] = {**(options or {}), "include_usage": True}
    if given or changed:
        return False, dump(document)
    at = raw.index(b"{") + 1
    return False, b"".join((raw[:at], _USAGE, raw[at:]))


def dump(document: dict[str, Any]) -> bytes:
    """Its JSON, for the replica."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _estimate(raw: bytes) -> int:
    """Tokens of a prompt, roughly: the replica's own count takes its place at the end."""
    size, images = len(raw), 0
    if b'"data:' in raw:
        for found in _DATA.finditer(raw):
            images += 1
            size -= len(found[0])
    return size // _BYTES_A_TOKEN + images * _IMAGE_TOKENS + 1


def _flag(document: dict[str, Any], name: str) -> bool:
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "neither true nor false", "correct it")
    return bool(value)


def _count(document: dict[str, Any], name: str, most: int) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= most:
        raise _wrong(name, f"not a number from 0 to {most}", "correct it")
    return value


def _wrong(param: str, what: str, remedy: str) -> RefusalError:
    return RefusalError(400, f"{param}: {what}", remedy=remedy, param=param)
