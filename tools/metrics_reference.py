"""Writes docs/metrics.md from its introduction and the table of metrics (usage/metrics/names.py); --check compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from usage.metrics.names import MEASUREMENTS, Measurement  # noqa: E402

TARGET = ROOT / "docs/metrics.md"
INTRODUCTION = ROOT / "docs/metrics-introduction.md"
_SIDES = {"node": "By each node.", "controller": "By the controller that leads.", "both": "By nodes and controllers."}


def chapter(measurement: Measurement) -> Iterator[str]:
    """One measurement."""
    yield f"### `{measurement.name}`\n"
    yield f"{measurement.help} {_SIDES[measurement.side]}\n"
    tags = ", ".join(f"`{name}` ({text})" for name, text in measurement.tags.items())
    yield f"Tags: {tags}."
    if measurement.identity:
        names = ", ".join(f"`{name}`" for name in measurement.identity)
        yield f"As `job_ids` says, fields or tags: {names}."
    yield "\n| field | kind | |\n|---|---|---|"
    for metric in measurement.metrics:
        yield f"| `{metric.field}` | {metric.kind} | {metric.help} |"
    yield ""


def page() -> str:
    """The whole page."""
    lines = [line for measurement in MEASUREMENTS for line in chapter(measurement)]
    return INTRODUCTION.read_text().rstrip("\n") + "\n\n" + "\n".join(lines).rstrip("\n") + "\n"


def main() -> int:
    """Write, or compare."""
    text = page()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
        return 0
    if not TARGET.exists() or TARGET.read_text() != text:
        print(f"{TARGET.relative_to(ROOT)} is not what the table says: run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
