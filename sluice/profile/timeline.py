"""Profiles of many processes on one time line: ns of the time of day of the host that collected them.

A node's CLOCK_MONOTONIC never jumps, so that all times are taken from it. How it relates to the collector's clock is
measured while a profile is collected; for files that were found next to a job's output each node's own time of day is
used, and said to be.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.profile.records import Profile, Reason, read

CLOCKS = "clocks.json"
MOST_EVENTS = 2_000_000
"""Of all processes together: some 300 bytes of memory each."""
_MOST_FILES = 16_384
_JUMP_NS = 1_000_000
_NUMBER = re.compile(r"\.([0-9]{1,10})(?:-[0-9]{1,2})?\.profile\Z")


@dataclass(frozen=True, slots=True)
class Offset:
    """What is to be added to a node's CLOCK_MONOTONIC, and by how much that may be wrong; None: not measured."""

    node: str
    add_ns: int
    uncertainty_ns: int | None
    ahead_ns: int | None = None
    """Of the node's time of day, before the collector's."""


@dataclass(slots=True)
class Timeline:
    """All that was collected of a job, or of a step."""

    profiles: list[Profile]
    offsets: dict[tuple[str, str], Offset]
    notes: list[str] = field(default_factory=list)

    def add_ns(self, profile: Profile) -> int:
        """For a process's times."""
        return self.offsets[profile.host, profile.boot].add_ns

    @property
    def start(self) -> int:
        """Of the first process."""
        return min(one.started + self.add_ns(one) for one in self.profiles)

    @property
    def end(self) -> int:
        """Of the last process."""
        return max(one.end + self.add_ns(one) for one in self.profiles)


def find(folder: Path, step: str = "") -> list[Path]:
    """The files of a folder, and of its folders, which are named NODE.STEP: in each those of the newest profile.

    Raises SluiceError, OSError.
    """
    found: list[Path] = []
    for place in (folder, *sorted(folder.glob("*.*"))):
        if place.is_symlink() or not place.is_dir() or (step and place.name.rpartition(".")[2] != step):
            continue
        numbered = {path: int(match[1]) for path in place.iterdir() if (match := _NUMBER.search(path.name))}
        newest = max(numbered.values(), default=0)
        found += sorted(path for path, number in numbered.items() if number == newest)
        if len(found) > _MOST_FILES:
            what = f"{one_line(str(folder))}: more than {_MOST_FILES} files"
            raise SluiceError(what, remedy="look at one step: JOB.STEP")
    return found


def load(folder: Path, step: str = "", most: int = MOST_EVENTS) -> Timeline:
    """What was collected in a folder. Raises SluiceError where nothing can be read, OSError."""
    paths = find(folder, step)
    most = max(1, most // max(1, len(paths)))
    profiles, notes = [], []
    gc.disable()  # millions of events, none of which is garbage, would be looked through again and again
    try:
        for path in paths:
            try:
                profiles.append(read(path, most))
            except SluiceError as error:
                notes.append(error.what)
            except OSError as error:
                notes.append(f"{path}: {error.strerror}")
    finally:
        gc.freeze()
        gc.enable()
    if not profiles:
        what = f"{one_line(str(folder))}: no profile" + (f": {one_line(notes[0])}" if notes else "")
        raise SluiceError(what, remedy="profiled are programs that use a GPU while a profile runs")
    measured = _measured(folder / CLOCKS, notes)
    offsets = _offsets(profiles, measured, notes)
    for profile in profiles:
        notes += _notes(profile)
    return Timeline(profiles, offsets, notes)


def write_clocks(folder: Path, clocks: Mapping[tuple[str, str], Offset]) -> None:
    """What was measured, for `load`. Raises OSError."""
    rows = [[node, boot, one.add_ns, one.uncertainty_ns] for (node, boot), one in clocks.items()]
    (folder / CLOCKS).write_text(json.dumps(rows))


def _measured(path: Path, notes: list[str]) -> dict[tuple[str, str], Offset]:
    try:
        rows = json.loads(path.read_text())
        return {(str(row[0]), str(row[1])): Offset(str(row[0]), int(row[2]), int(row[3])) for row in rows}
    except FileNotFoundError:
        notes.append("offsets of clocks were not measured: each node's own time of day counts")
    except (OSError, ValueError, TypeError, LookupError):
        notes.append(f"{path}: cannot be read: each node's own time of day counts")
    return {}


def _offsets(
    profiles: Iterable[Profile], measured: Mapping[tuple[str, str], Offset], notes: list[str]
) -> dict[tuple[str, str], Offset]:
    """Of each boot of each node."""
    found: dict[tuple[str, str], Offset] = {}
    for profile in profiles:
        key = profile.host, profile.boot
        differences = [one.time_of_day - one.monotonic for one in profile.clocks]
        if differences and (jump := max(differences) - min(differences)) > _JUMP_NS:
            notes.append(f"{profile.host}: its clock was changed by {jump / 1e6:.0f} ms; times are not affected")
        if key in found:
            continue
        own = profile.time_of_day - profile.started
        known = measured.get(key) or next((one for (host, boot), one in measured.items() if boot == profile.boot), None)
        if known is None:
            if measured:
                notes.append(f"{profile.host}: its clock was not measured, or it has booted since")
            found[key] = Offset(profile.host, own, None)
        else:
            found[key] = Offset(profile.host, known.add_ns, known.uncertainty_ns, own - known.add_ns)
    return found


_WORDS = {
    Reason.QUOTA: "ended early: it had written as much as it may",
    Reason.DISK: "ended early: its disk is full",
    Reason.LIBRARY: "not traced",
    Reason.OCCUPIED: "not traced: another profiler has it",
}


def _notes(profile: Profile) -> list[str]:
    """What is to be known of a process's file."""
    who = f"{profile.host} process {profile.pid}"
    found = []
    if profile.damaged:
        found.append(f"{who}: {profile.damaged} records are damaged or have no times, and are left out")
    if profile.left_out:
        found.append(f"{who}: {profile.left_out} records more than are shown")
    if any(loss.reason == Reason.FORBIDDEN for loss in profile.losses):
        found.append(
            f"{who}: not all of its threads are sampled: they are more than 64, its node forbids it "
            "(kernel.perf_event_paranoid above 2, a container's seccomp), or it has no more files or locked memory"
        )
    ended = profile.ended
    if ended is None:
        found.append(f"{who}: its file has no end: it was killed, or still runs")
    elif ended.reason in _WORDS:
        said = one_line(profile.name(ended.name))
        found.append(f"{who}: {_WORDS[Reason(ended.reason)]}" + (f": {said}" if said else ""))
    return found
