"""Ends all processes of a step, by the cgroup that Slurm keeps them in: no other processes are touched.

Version 2: ``cgroup.kill`` ends all processes at once. Version 1 does not have it: the step's freezer keeps them from
starting others, and from exiting. What is left, as there are more than one call takes, is ended with the
next sample.

In version 1 Slurm gives the folder of a step to its user, who may make cgroups below it and freeze what is in them: a
signal ends it only when it is thawed. The job's own folder is root's.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

_MOST_PIDS = 1 << 16  # of one step, at one time
_MOST_FOLDERS = 512  # below a step's: users may make cgroups there
_MOST_FREED = 64
_SECONDS = 0.2


def end_step(folder: Path | None, pids: Collection[int], is_still: Callable[[int], bool]) -> int:
    """End the processes below a step's folder (`Place.step_folder`), and these; how many there were to end.

    `is_still`: whether a process is still the one that was found: it may have ended, and another may have its number.
    """
    at_once = folder is not None and _end_at_once(folder)
    with ExitStack() as files:
        ended = 0
        processes: dict[int, int] = {}
        for pid in pids:
            file = _kill_known(pid, is_still)
            if file is None:
                continue
            ended += 1
            if len(processes) < _MOST_FREED:
                processes[pid] = file
                files.callback(os.close, file)
            else:
                os.close(file)
        if at_once:  # those that have gone by now are ended as well
            return len(pids)
        if folder is None:
            return ended
        ended = max(ended, _end_frozen(folder))
        if (folder / "freezer.state").exists():
            _free(folder, processes)
    return ended


def _end_at_once(folder: Path) -> bool:
    """Version 2, before single processes: the job's script would see the first one's end, and go on for a moment."""
    try:
        file = os.open(folder / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)  # version 1 has none
    except OSError:
        return False
    try:
        return os.write(file, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(file)


def _kill_known(pid: int, is_still: Callable[[int], bool]) -> int | None:
    """Kill a process if it is still the same; returns the file that identifies it even if its number is used again."""
    try:
        file = os.pidfd_open(pid)
    except OSError:  # it has ended
        return None
    if is_still(pid):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(file, signal.SIGKILL)
            return file
    os.close(file)
    return None


def _free(folder: Path, processes: dict[int, int]) -> None:
    """Take processes out of cgroups that their user made and froze, and may freeze again: this is slow."""
    if len(list(islice(_folders(folder), 2))) == 2:
        members = set(_members(folder))
        for pid, file in processes.items():
            if pid not in members and not _has_ended(file):
                with suppress(OSError):  # it is just ending
                    (folder.parent / "cgroup.procs").write_text(str(pid))


def _has_ended(process: int) -> bool:
    look = select.poll()
    look.register(process, select.POLLIN)
    return bool(look.poll(0))


def _end_frozen(folder: Path) -> int:
    """Freeze, kill, thaw: also what its user froze."""
    version_2 = (folder / "cgroup.freeze").exists()
    name, frozen, thawed = ("cgroup.freeze", "1", "0") if version_2 else ("freezer.state", "FROZEN", "THAWED")
    deadline = time.monotonic() + _SECONDS
    found: set[int] = set()
    with suppress(OSError):
        (folder / name).write_text(frozen)
    try:
        while time.monotonic() < deadline and len(found) < _MOST_PIDS:
            new = {pid for one in _folders(folder) for pid in _members(one)} - found
            if not new:
                break
            _kill(new)
            found |= new
    finally:
        for one in _folders(folder):
            with suppress(OSError):
                (one / name).write_text(thawed)
    return len(found)


def _folders(folder: Path) -> Iterator[Path]:
    """A cgroup and those below it, up to a bound."""
    waiting = deque([folder])
    for _ in range(_MOST_FOLDERS):
        if not waiting:
            return
        yield waiting[0]
        with suppress(OSError), os.scandir(waiting.popleft()) as entries:
            waiting.extend(
                Path(one.path) for one in islice(entries, _MOST_FOLDERS) if one.is_dir(follow_symlinks=False)
            )


def _members(folder: Path) -> Iterator[int]:
    with suppress(OSError, ValueError), (folder / "cgroup.procs").open() as file:
        for line in islice(file, _MOST_PIDS):
            yield int(line)


def _kill(pids: Iterable[int]) -> int:
    killed = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed
