"""Log lines: each begins with PREFIX, and goes to standard error, from where systemd's journal takes it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

from sluice.base.text import one_line

PREFIX = "sluice: "


def start_logging(*, verbose: bool) -> None:
    """Let Python's loggers write such lines; `verbose`: also those of level INFO."""
    import logging

    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format=f"{PREFIX}%(message)s")


def log(action: str, **detail: Any) -> None:
    """One action as KEY=VALUE words. Raises nothing: where the file of standard error is full, the line is lost."""
    words = [f"action={action}"]
    for key, value in detail.items():
        text = one_line(str(value))
        words.append(f"{key}={json.dumps(text) if ' ' in text or '=' in text or not text else text}")
    with suppress(OSError):
        print(PREFIX + " ".join(words), file=sys.stderr, flush=True)
