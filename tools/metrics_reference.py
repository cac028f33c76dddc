"""Every metric, from the table sluice/metrics/names.py, for docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.metrics.names import MEASUREMENTS, Measurement

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


def reference() -> str:
    """All measurements."""
    return "\n".join(line for measurement in MEASUREMENTS for line in chapter(measurement))
