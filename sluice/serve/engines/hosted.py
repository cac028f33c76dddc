"""A function in Python that is served as a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Function = Callable[[list[Any]], Sequence[Any]]


def estimate_tokens(item: Any) -> int:
    """Tokens of an input, where the model does not count them: ids as they are, four bytes of text as one."""
    return len(item) if isinstance(item, list) else -(-len(str(item).encode()) // 4)


@dataclass(frozen=True, slots=True)
class Model:
    """A function and how its calls are put together."""

    function: Function
    max_batch: int
    max_delay: float
    count_tokens: Callable[[Any], int]
