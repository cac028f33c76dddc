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
_BOUNDS: Final[Mapping[Ability, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens", N_PREDICT),
    "completions": ("max_tokens", N_PREDICT),
    "embeddings": (),
    "responses": ("max_output_tokens", N_PREDICT),
}
_BLOCKS: Final = tuple(1024 << step // 4 for step in range(16))
"""Bytes of the blocks by which prompts are compared: the later ones are longer."""
_CHOICES: Final = {"n": _MOST_CHOICES, "n_cmpl": _MOST_CHOICES}  # n_cmpl: of llama.cpp
_COUNTS: Final[Mapping[Ability, Mapping[str, int]]] = {
    ability: {**dict.fromkeys(bounds, _MOST_TOKENS), **_CHOICES} for ability, bounds in _BOUNDS.items()
}
"""Members that are numbers, and the most that they may be."""
_PROMPTS: Final = ("instructions", "messages", "prompt", "suffix", "input")
"""Members that are the prompt, of one ability or another."""
_END: Final = object()
_BEGINS: Final = {"chat": b'"messages"', "completions": b'"prompt"'}


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
    raw: bytes = field(default=b"", repr=False)
    """What came."""

    def reserved(self, default: int) -> int:
        """Tokens that it may take."""
        if self.ability == "embeddings":
            return self.prompt_tokens
        most = default if self.most_tokens is None else self.most_tokens
        return min(self.prompt_tokens + most * self.choices, MAX_AMOUNT)

    def prefix(self, salt: bytes) -> list[int]:
        """A number for each begin of its prompt, shortest first: equal begins have equal ones. `salt`: of whom."""
        found: list[int] = []
        last, at = salt, max(self.raw.find(_BEGINS.get(self.ability, b'"input"')), 0)
        for size in _BLOCKS:
            if at + size > len(self.raw):
                break
            last = blake2b(self.raw[at : at + size], digest_size=8, key=last).digest()
            found.append(int.from_bytes(last, "little") or 1)
            at += size
        return found

    def prompt(self, most: int) -> str:
        """What its prompt says: strings and numbers as JSON, in ASCII without control characters, a space between them.

        Of `most` characters, then `...` where there is more. The work is bounded by `most`, too.
        """
        walk = [iter([self.document[name] for name in _PROMPTS if name in self.document])]
        said: list[str] = []
        room = most + 1  # with a space after the last
        for _ in range(most):
            value = next(walk[-1], _END)
            if value is _END:
                walk.pop()
            elif isinstance(value, dict | list):
                walk.append(iter(value.values() if isinstance(value, dict) else value))
            else:
                text = json.dumps(value[:room] if isinstance(value, str) else value).replace("\x7f", "\\u007f")
                said.append(text)
                room -= len(text) + 1
            if not walk or room < 0:
                break
        whole = " ".join(said)
        return whole if not walk and len(whole) <= most else f"{whole[:most]}..."


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
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _wrong("stream", "neither true nor false", "correct it")
    stream = bool(stream) and ability != "embeddings"
    most, choices = _amounts(document, _COUNTS[ability])
    if ability == "completions":
        best = _count("best_of", document.get("best_of"), _MOST_CHOICES)
        if isinstance(prompts := document.get("prompt"), list) and prompts:
            choices *= len(prompts) if isinstance(prompts[0], str | list) else 1
        choices = max(choices, best or 1)
    resume = document.pop(RESUME, None)
    if resume is not None and not (isinstance(resume, dict) and stream):
        raise _wrong(RESUME, "not an object, or of a request that does not stream", "leave it out")
    shows, body = _with_usage(document, raw, ability, stream, changed=resume is not None)
    return Asked(ability, model, stream, shows, most, choices, _estimate(raw), body, document, resume, raw)


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


def _amounts(document: dict[str, Any], counts: Mapping[str, int]) -> tuple[int | None, int]:
    """Most tokens of one choice (None: no bound), and how many choices: the most of all that engines might take."""
    most: int | None = None
    choices, endless = 1, False
    for name, value in document.items():
        if name not in counts:
            continue
        if name == N_PREDICT and type(value) is int and value < 0:
            endless = True
        elif (found := _count(name, value, counts[name])) is None:
            continue
        elif name in _CHOICES:
            choices = max(choices, found)
        else:  # engines differ in which of several they take, and in what they make of 0
            most = found if most is None else max(most, found)
    return None if endless else most, choices


def _count(name: str, value: Any, most: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= most:
        raise _wrong(name, f"not a number from 0 to {most}", "correct it")
    return value


def _wrong(param: str, what: str, remedy: str) -> RefusalError:
    return RefusalError(400, f"{param}: {what}", remedy=remedy, param=param)
