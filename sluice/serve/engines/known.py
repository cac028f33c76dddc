"""The adapters by the names that services have."""

from __future__ import annotations

from importlib import import_module

from sluice.base.errors import UsageError
from sluice.serve.engines.base import Engine

_MODULES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llama_cpp",
    "tei": "tei",
    "openai": "openai",
    "python": "python",
}


def engine_of(name: str) -> Engine:
    """The adapter; only its module is loaded. Raises UsageError."""
    if name not in _MODULES:
        raise UsageError(f"engine {name[:40]!r}: not known", remedy=f"use {', '.join(_MODULES)}")
    found: Engine = import_module(f"sluice.serve.engines.{_MODULES[name]}").ENGINE
    return found
