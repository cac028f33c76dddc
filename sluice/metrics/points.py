"""Points, and their two forms: InfluxDB's line protocol and OpenMetrics' text.

Both formats are their projects' public specifications. Names and values come from users in part (accounts, models), so
that both forms escape all that has a meaning, and drop what cannot be escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sluice.base.text import UNPRINTABLE
from sluice.metrics.names import BY_NAME

Value = float | int | str
MAX_TAG = 256
"""Characters of a tag's value."""
_GAPS = re.compile(rf"[{UNPRINTABLE}]")
# A backslash before what is escaped is read in two ways by databases, so that tags have none.
_TAG = str.maketrans({",": r"\,", "=": r"\=", " ": r"\ ", "\\": "_"})
_TEXT = str.maketrans({"\\": r"\\", '"': r"\""})
_LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement at a time: `tags` say of what, `fields` what it is. `time_ns` is nanoseconds since 1970."""

    measurement: str
    tags: Mapping[str, str]
    fields: Mapping[str, Value]
    time_ns: int
    identity: Mapping[str, Value] = field(default_factory=dict)
    """Fields that only name things (job, step, process)."""


def _clean(text: str) -> str:
    """On one line, without control characters."""
    return _GAPS.sub("_", text)[:MAX_TAG]


def _field(value: Value) -> str | None:
    if isinstance(value, bool):
        return f"{int(value)}i"
    if isinstance(value, int):
        return f"{value}i" if -(1 << 63) <= value < 1 << 63 else repr(float(value))
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else None
    return '"' + _clean(value).translate(_TEXT) + '"'


def to_line(point: Point) -> str:
    """The point as a line without its newline; empty when there is no valid field."""
    fields = []
    for name, value in (*point.fields.items(), *point.identity.items()):
        text = _field(value)
        if text is not None:
            fields.append(f"{name}={text}")
    if not fields:
        return ""
    tags = "".join(
        f",{name}={cleaned.translate(_TAG)}" for name, value in sorted(point.tags.items()) if (cleaned := _clean(value))
    )
    return f"{point.measurement}{tags} {','.join(fields)} {point.time_ns}"


def to_lines(points: Iterable[Point]) -> str:
    """Points as a request's body."""
    return "".join(f"{line}\n" for line in map(to_line, points) if line)


def to_openmetrics(points: Iterable[Point], *, identity_as_labels: bool = False) -> str:
    """Points as Prometheus reads them, each metric's lines together, without times; ends with ``# EOF``."""
    by_metric: dict[tuple[str, str], list[str]] = {}
    for point in points:
        named = {**point.tags, **({n: str(v) for n, v in point.identity.items()} if identity_as_labels else {})}
        labels = ",".join(f'{name}="{_clean(value).translate(_LABEL)}"' for name, value in sorted(named.items()))
        for name, value in point.fields.items():
            if not isinstance(value, str) and math.isfinite(value):
                line = f"{point.measurement}_{name}{{{labels}}} {value!r}"
                by_metric.setdefault((point.measurement, name), []).append(line)
    text = []
    for (measurement, name), lines in by_metric.items():
        metric = BY_NAME[measurement].by_field[name]
        family = f"{measurement}_{name}"
        family = family.removesuffix("_total") if metric.kind == "counter" else family
        text += [f"# HELP {family} {metric.help}", f"# TYPE {family} {metric.kind}", *lines]
    return "\n".join([*text, "# EOF", ""])
