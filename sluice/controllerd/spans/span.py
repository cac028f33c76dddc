"""A span as it waits on disk: one line of JSON, without anything of OpenTelemetry's packages."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something at a moment within a span; seconds since 1970."""

    name: str
    time: float
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One span; IDs in hexadecimal digits, times in seconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str  # empty: none
    start: float
    end: float
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)  # trace and span
    error: str = ""  # why it failed
    remote_parent: bool = False
    cluster: str = ""

    def to_line(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Span:
        """What `to_line` wrote. Raises ValueError."""
        try:
            fields = json.loads(line)
            events = [SpanEvent(**event) for event in fields.pop("events")]
            links = [(str(trace), str(span)) for trace, span in fields.pop("links")]
            return cls(**fields, events=events, links=links)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a span: {error}") from error
