"""The agent's log: one line an action on standard error, which systemd's journal takes."""

from __future__ import annotations

import json
import sys
from typing import Any

from sluice_base.text import one_line


def log(action: str, **detail: Any) -> None:
    """One line, KEY=VALUE, on standard error."""
    words = [f"action={action}"]
    for key, value in detail.items():
        text = one_line(str(value))
        words.append(f"{key}={json.dumps(text) if ' ' in text or '=' in text or not text else text}")
    print(" ".join(words), file=sys.stderr, flush=True)
