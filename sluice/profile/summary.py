"""What people want to know first of a profile: busy, copies, idle, what overlaps, the kernels, the slowest rank."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.base.text import one_line
from sluice.profile.intervals import both, length, union, without
from sluice.profile.records import PLACES, Kind, Profile, Reason
from sluice.profile.timeline import Timeline

_TOP = 20
_RANKS = 64
_NODES = 1024
_NOTES = 64
_COLLECTIVE = re.compile(r"(?i)^(void )?[a-z_]*nccl|rccl|oneccl")
"""Kernels in which ranks wait for each other."""


_ON_GPU = frozenset({Kind.KERNEL, Kind.COPY, Kind.FILL})


@dataclass(slots=True)
class _Gpu:
    """What one GPU did for the job's processes."""

    window: list[tuple[int, int]] = field(default_factory=list)
    kernels: list[tuple[int, int]] = field(default_factory=list)
    collectives: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Sum:
    count: int = 0
    ns: int = 0
    size: int = 0

    def add(self, ns: int, size: int = 0) -> None:
        self.count, self.ns, self.size = self.count + 1, self.ns + ns, self.size + size


def summarise(timeline: Timeline) -> dict[str, Any]:
    """As a JSON document; all texts are printable."""
    gpus: dict[tuple[str, str], _Gpu] = defaultdict(_Gpu)
    kernels: dict[str, _Sum] = defaultdict(_Sum)
    copies: dict[str, _Sum] = defaultdict(_Sum)
    functions: Counter[str] = Counter()
    ranks: list[dict[str, Any]] = []
    for profile in timeline.profiles:
        functions.update(profile.name(one.name) or "unnamed" for one in profile.events if one.kind == Kind.SAMPLE)
        ranks.append(_process(timeline, profile, gpus, kernels, copies))
    totals = _totals(gpus)
    first = timeline.profiles[0]
    return {
        "schema_version": 1,
        "job_id": first.job,
        "start": round(timeline.start / 1e9, 6),
        "seconds": round((timeline.end - timeline.start) / 1e9, 6),
        "nodes": len({one.host for one in timeline.profiles}),
        "processes": len(timeline.profiles),
        "gpus": len(gpus),
        **totals,
        "kernels": _kernels(kernels),
        "copies": _copies(copies),
        "samples": functions.total(),
        "functions": [
            {"name": name, "samples": count, "percent": _percent(count, functions.total())}
            for name, count in functions.most_common(_TOP)
        ],
        **_ranks(ranks),
        "lost_events": sum(loss.events for one in timeline.profiles for loss in one.losses),
        "lost_because": sorted({_reason(loss.reason) for one in timeline.profiles for loss in one.losses}),
        "not_timed_events": sum(one.not_timed for one in timeline.profiles),
        "cost_percent": _cost(timeline),
        "clocks": [
            {
                "node": one.node,
                "ahead_ms": None if one.ahead_ns is None else round(one.ahead_ns / 1e6, 6),
                "uncertainty_us": None if one.uncertainty_ns is None else round(one.uncertainty_ns / 1e3, 3),
            }
            for one in list(timeline.offsets.values())[:_NODES]
        ],
        "notes": [one_line(note) for note in timeline.notes[:_NOTES]],
    }


def _kernels(sums: Mapping[str, _Sum]) -> list[dict[str, Any]]:
    """Those that took the most time, by their names."""
    total_ns = sum(one.ns for one in sums.values())
    return [
        {
            "name": name,
            "calls": one.count,
            "seconds": round(one.ns / 1e9, 9),
            "percent": _percent(one.ns, total_ns),
            "mean_us": round(one.ns / one.count / 1e3, 3),
        }
        for name, one in sorted(sums.items(), key=lambda item: -item[1].ns)[:_TOP]
    ]


def _copies(sums: Mapping[str, _Sum]) -> list[dict[str, Any]]:
    """All, by their directions."""
    return [
        {
            "direction": name,
            "count": one.count,
            "bytes": one.size,
            "seconds": round(one.ns / 1e9, 9),
            "gb_per_s": round(one.size / one.ns, 3) if one.ns else None,
        }
        for name, one in sorted(sums.items(), key=lambda item: -item[1].ns)
    ]


def _process(
    timeline: Timeline,
    profile: Profile,
    gpus: dict[tuple[str, str], _Gpu],
    kernels: dict[str, _Sum],
    copies: dict[str, _Sum],
) -> dict[str, Any]:
    """Add a process to the sums; its own row."""
    add = timeline.add_ns(profile)
    gaps = union((one.start + add, one.end + add) for one in profile.losses if one.reason == Reason.BUDGET)
    window = without((profile.started + add, profile.end + add), gaps)
    known = set(profile.devices) | {
        one.device for one in profile.events if one.kind in (Kind.KERNEL, Kind.COPY, Kind.FILL)
    }
    of_device = {}
    for device in known:
        uuid = profile.devices.get(device, ("", ""))[0] or f"{profile.pid}.{device}"
        of_device[device] = gpus[profile.host, uuid]
        of_device[device].window += window
    computing: list[tuple[int, int]] = []
    waiting: list[tuple[int, int]] = []
    collective = {number for number, name in profile.names.items() if _COLLECTIVE.match(name)}
    for kind, start, end, device, _, name, size, places in profile.events:
        span = start + add, end + add
        if kind == Kind.KERNEL:
            together = name in collective
            (of_device[device].collectives if together else of_device[device].kernels).append(span)
            (waiting if together else computing).append(span)
            kernels[profile.name(name) or "unnamed"].add(end - start)
        elif kind == Kind.COPY:
            of_device[device].copies.append(span)
            copies[_direction(places)].add(end - start, size)
        elif kind == Kind.FILL:
            of_device[device].copies.append(span)
            copies["fill"].add(end - start, size)
        elif kind == Kind.SYNC:
            waiting.append(span)
    total = max(1, length(window))
    return {
        "rank": profile.rank,
        "node": profile.host,
        "pid": profile.pid,
        "program": profile.program,
        "compute_seconds": round(length(union(computing)) / 1e9, 9),
        "compute_percent": _percent(length(union(computing)), total),
        "waiting_percent": _percent(length(union(waiting)), total),
    }


def _direction(places: tuple[int, int]) -> str:
    short = {"pageable": "host", "pinned": "host (pinned)"}
    words = [PLACES[one] if one < len(PLACES) else "unknown" for one in places]
    return " to ".join(short.get(word, word) for word in words)


def _totals(gpus: dict[tuple[str, str], _Gpu]) -> dict[str, Any]:
    """Percent of the time of all GPUs in which something was collected."""
    window = busy = copying = idle = hidden = collective = covered = 0
    for gpu in gpus.values():
        kernels, collectives, copies = union(gpu.kernels), union(gpu.collectives), union(gpu.copies)
        all_kernels = union([*kernels, *collectives])
        here = union(gpu.window)
        window += length(here)
        busy += both(all_kernels, here)
        copying += length(copies)
        idle += length(here) - both(union([*all_kernels, *copies]), here)
        hidden += both(copies, all_kernels)
        collective += length(collectives)
        covered += both(collectives, kernels)
    return {
        "busy_percent": _percent(busy, window),
        "copies_percent": _percent(copying, window),
        "idle_percent": _percent(idle, window),
        "collectives_percent": _percent(collective, window),
        "copies_overlapped_percent": _percent(hidden, copying),
        "collectives_overlapped_percent": _percent(covered, collective),
    }


def _ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes that compute most first: in a job whose ranks wait for each other, those are waited for."""
    rows.sort(key=lambda row: -row["compute_seconds"])
    median = statistics.median(row["compute_seconds"] for row in rows)
    over = None
    if len(rows) > 1 and median:
        over = round(100 * (rows[0]["compute_seconds"] / median - 1), 2)
    return {"slowest_over_median_percent": over, "ranks": rows[:_RANKS]}


def _cost(timeline: Timeline) -> float | None:
    """Percent of their time that tracing has cost the processes: the worst of them."""
    costs = [
        _percent(one.ended.cost, one.end - one.started)
        for one in timeline.profiles
        if one.ended is not None and one.end > one.started
    ]
    return max((cost for cost in costs if cost is not None), default=None)


def _reason(number: int) -> str:
    try:
        return Reason(number).name.lower()
    except ValueError:
        return "unknown"


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 2) if whole else None


# ---- for people ----

_BAR = 30


def render(summary: dict[str, Any]) -> list[str]:
    """As lines."""
    s = summary
    lines = [
        f"Job {s['job_id']}: {s['seconds']:.3f} s of {s['processes']} processes with {s['gpus']} GPUs "
        f"on {s['nodes']} node{'' if s['nodes'] == 1 else 's'}",
        "",
        _bar("busy", s["busy_percent"], "a kernel ran"),
        _bar("copies", s["copies_percent"], _overlapped(s["copies_overlapped_percent"])),
    ]
    if s["collectives_percent"]:
        lines.append(_bar("collectives", s["collectives_percent"], _overlapped(s["collectives_overlapped_percent"])))
    lines += [_bar("idle", s["idle_percent"], "neither kernels nor copies"), ""]
    if s["kernels"]:
        lines.append(f"{'KERNELS':>9} {'calls':>9} {'total':>11} {'mean':>11}")
        lines += [
            f"{one['percent'] or 0:>7.1f} % {one['calls']:>9} {one['seconds']:>9.4f} s {one['mean_us']:>8.1f} us  "
            f"{one['name'][:80]}"
            for one in s["kernels"][:10]
        ]
    if s["copies"]:
        lines += ["", f"{'COPIES':>9} {'count':>9} {'total':>11} {'rate':>11}"]
        lines += [
            f"{one['bytes'] / 1e6:>6.0f} MB {one['count']:>9} {one['seconds']:>9.4f} s "
            f"{one['gb_per_s'] or 0:>6.1f} GB/s  {one['direction']}"
            for one in s["copies"]
        ]
    if s["functions"]:
        lines += ["", f"{'PROCESSOR':>9} {'samples':>9}"]
        lines += [f"{one['percent']:>7.1f} % {one['samples']:>9}  {one['name'][:80]}" for one in s["functions"][:10]]
    return lines + _slowest(s) + _closing(s)


def _bar(name: str, percent: float | None, words: str) -> str:
    if percent is None:
        return f"{name:<12} not known"
    full = round(min(100.0, percent) / 100 * _BAR)
    return f"{name:<12} [{'#' * full}{'.' * (_BAR - full)}] {percent:5.1f} %  {words}".rstrip()


def _overlapped(percent: float | None) -> str:
    return "" if percent is None else f"{percent:.0f} % of it while a kernel ran"


def _slowest(s: dict[str, Any]) -> list[str]:
    if s["slowest_over_median_percent"] is None:
        return []
    first = s["ranks"][0]
    who = f"process {first['pid']}" if first["rank"] is None else f"rank {first['rank']}"
    return [
        "",
        f"Slowest: {who} on {first['node']} computes {first['compute_seconds']:.4f} s, "
        f"{s['slowest_over_median_percent']:.1f} % more than the median",
    ]


def _closing(s: dict[str, Any]) -> list[str]:
    measured = [one["uncertainty_us"] for one in s["clocks"] if one["uncertainty_us"] is not None]
    lines = [""]
    if measured:
        lines.append(f"Clocks of {len(measured)} nodes: compared, to within {max(measured):.0f} us")
    if s["cost_percent"] is not None:
        lines.append(f"Tracing cost at most {s['cost_percent']:g} % of a process's time")
    if s["lost_events"]:
        lines.append(f"Not in it: {s['lost_events']} events ({', '.join(s['lost_because'])})")
    if s.get("not_timed_events"):  # a helper of an older version does not say
        lines.append(
            f"Not timed: {s['not_timed_events']} kernels and copies of command lists that were recorded while nothing "
            "was collected; their time counts as idle"
        )
    return lines + [f"note: {note}" for note in s["notes"][:12]]
