"""How many tokens an answer took, as the replica counts them."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from sluice.core.gate import MAX_AMOUNT

TAIL: Final = 2048
"""Bytes at the end of an answer in which its usage is looked for first."""
_decode: Final = json.JSONDecoder().decode
_USAGE: Final = re.compile(
    rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})\s*(?:,\s*"timings"\s*:\s*\{[^{}]*\}\s*)?\}\s*\Z'
)


class Usage:
    """Of a usage object of any of the APIs; what is no count is 0."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self, document: dict[str, Any]) -> None:
        prompt, completion = (
            ("input_tokens", "output_tokens") if "input_tokens" in document else ("prompt_tokens", "completion_tokens")
        )
        self.prompt, self.completion = count_of(document.get(prompt)), count_of(document.get(completion))
        details = document.get("prompt_tokens_details") or document.get("input_tokens_details")
        self.cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else 0


def count_of(value: Any) -> int:
    """What an engine says to be a number of tokens, as one that the gate takes; 0 for what is none."""
    return min(value, MAX_AMOUNT) if type(value) is int and value >= 0 else 0


def usage_at_end(answer: bytes) -> Usage | None:
    """Of an answer of which only the end may be there; None: its last bytes have none."""
    found = _USAGE.search(answer, max(len(answer) - TAIL, 0))
    if found is None:
        return None
    try:
        return Usage(_decode(found[1].decode("utf-8", "surrogatepass")))  # in half the time of json.loads
    except (ValueError, RecursionError):
        return None


def usage_of(answer: bytes) -> Usage | None:
    """Of a whole answer; None: it has none."""
    found = usage_at_end(answer)
    if found is None and (document := _object(answer)) is not None:
        usage = document.get("usage")
        found = Usage(usage) if isinstance(usage, dict) else None
    return found


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
