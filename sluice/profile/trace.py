"""Writes a time line as Perfetto's UI opens it: Chrome's trace event format (JSON), compressed.

One process of the trace is one process of the job, and one thread of it a stream of a GPU. Perfetto's own
package writes the protobuf format, an object of protobuf an event; its UI shows the same of both.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.profile.records import PLACES, Kind, Profile
from sluice.profile.timeline import Timeline

_HOST = 0xFFFF_FFFF  # the lane of what the process itself does
_CATEGORY: dict[int, str] = {
    Kind.KERNEL: "kernel", Kind.COPY: "copy", Kind.FILL: "fill", Kind.SYNC: "synchronisation", Kind.MEMORY: "memory",
    Kind.CALL: "call", Kind.COLLECTIVE: "collective", Kind.SAMPLE: "sample",
}  # fmt: skip
_ON_GPU = frozenset({Kind.KERNEL, Kind.COPY, Kind.FILL})
_LINES = 4096


def write(timeline: Timeline, path: Path) -> int:
    """The trace as a file that is there whole or not at all; the number of its events. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(descriptor, "wb") as raw, gzip.GzipFile("", "wb", 1, raw, mtime=0) as file:
            count = 0
            file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
            lines: list[str] = []
            for line in _lines(timeline):
                lines.append(line)
                count += 1
                if len(lines) == _LINES:
                    file.write(",\n".join([*lines, ""]).encode())
                    lines = []
            lines.append(_meta("job", 0, 0, name=f"job {timeline.profiles[0].job}"))
            file.write(",\n".join(lines).encode())
            file.write(b'\n],"otherData":' + json.dumps(_other(timeline)).encode() + b"}\n")
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
    return count


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _other(timeline: Timeline) -> dict[str, Any]:
    clocks = [
        {"node": one.node, "uncertainty_ns": one.uncertainty_ns, "ahead_ns": one.ahead_ns}
        for one in timeline.offsets.values()
    ]
    return {"start_ns": timeline.start, "clocks": clocks, "notes": timeline.notes[:256]}


def _lines(timeline: Timeline) -> Iterator[str]:
    """An event of the trace each, in which texts are JSON and so ASCII."""
    first = timeline.start
    order = sorted(timeline.profiles, key=lambda one: (one.rank is None, one.rank or 0, one.host, one.pid))
    for number, profile in enumerate(order, 1):
        yield from _process(profile, number, timeline.add_ns(profile) - first)


def _process(profile: Profile, number: int, add: int) -> Iterator[str]:
    who = "process" if profile.rank is None else f"rank {profile.rank}"
    yield _meta("process_name", number, 0, name=f"{who}: {profile.program} {profile.pid} on {profile.host}")
    yield _meta("process_sort_index", number, 0, sort_index=number)
    lanes: dict[tuple[int, int], int] = {}
    names = {key: json.dumps(name) for key, name in profile.names.items()}
    for kind, start, end, device, stream, name, size, places in profile.events:
        key = (device, stream) if kind in _ON_GPU else (_HOST, stream if kind == Kind.SAMPLE else 0)
        lane = lanes.get(key)
        if lane is None:
            lane = lanes[key] = len(lanes) + 1
            title = f"GPU {device} stream {stream}" if key[0] != _HOST else _title(key[1])
            yield _meta("thread_name", number, lane, name=title)
        at, took = max(0, start + add), end - start
        text, more = names.get(name) or f'"{_CATEGORY[kind]}"', ""
        if kind == Kind.MEMORY:
            text = '"release"' if places[1] else '"allocate"'
            more = f',"args":{{"bytes":{size}}}'
        elif size:
            more = f',"args":{{"bytes":{size},"from":"{_place(places[0])}","to":"{_place(places[1])}"}}'
        yield (
            f'{{"ph":"X","pid":{number},"tid":{lane},"ts":{at // 1000}.{at % 1000:03d},"dur":{took // 1000}.'
            f'{took % 1000:03d},"cat":"{_CATEGORY[kind]}","name":{text}{more}}}'
        )
    for loss in profile.losses:
        at, took = max(0, loss.start + add), loss.end - loss.start
        if loss.end and took >= 0:
            yield (
                f'{{"ph":"X","pid":{number},"tid":0,"ts":{at // 1000}.{at % 1000:03d},"dur":{took // 1000}.'
                f'{took % 1000:03d},"cat":"gap","name":"not collected: {loss.events} events"}}'
            )


def _title(thread: int) -> str:
    return f"thread {thread}, sampled" if thread else "process"


def _place(number: int) -> str:
    return PLACES[number] if number < len(PLACES) else PLACES[0]


def _meta(kind: str, number: int, lane: int, **what: Any) -> str:
    return json.dumps({"ph": "M", "pid": number, "tid": lane, "name": kind, "args": what})
