"""The network's switches and blocks, as `scontrol show topology` has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MOST_TEXT = 1024


def switch_rows(said: str) -> Iterable[dict[str, Any]]:
    """The switches and blocks in `scontrol show topology`; none where it says that there is no topology."""
    for line in said.splitlines():
        fields = dict(word.partition("=")[::2] for word in line.split())
        name = fields.get("SwitchName") or fields.get("BlockName")
        if name:
            level = fields.get("Level", "0")
            yield {
                "name": name[:_MOST_TEXT],
                "kind": "switch" if "SwitchName" in fields else "block",
                "level": int(level) if level.isdecimal() else 0,
                "nodes": fields.get("Nodes", ""),
                "switches": fields.get("Switches", ""),
            }
