"""What the daemons hold, Sluice's and Slurm's with its plugins: memory, descriptors, threads; and the state on disk.

A sample is one JSON object a line, appended to a file as the run goes, so that a run that was killed can be reported.
Memory is PSS: of what processes share each has its part, so that parts can be added up.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak_site import Soak

SETTLED_S = 5.0
"""Younger processes are not read: commands that a daemon calls, and a fork on its way to one."""
# Programs of a daemon of the cluster, by the beginning of the kernel's name for them, and the name in the report.
PROGRAMS = {
    "slurmctld": {
        "slurmctld": "slurmctld",
        "slurmscriptd": "slurmscriptd",
        "sluice-supervis": "supervise",
        "sluice-storage": "supervise-storage",
    },
    "slurmd": {"slurmd": "slurmd"},
    "agent": {"sluice-guard": "guard", "python": "agent"},
    "controllerd": {"python": "controllerd"},
    "explaind": {"python": "explaind"},
}
_TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """A process of this machine's /proc. Reading it raises OSError once it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.folder = Path("/proc") / str(pid)
        name, _, rest = (self.folder / "stat").read_text().partition(" (")[2].rpartition(") ")
        self.name = name
        self.started = int(rest.split()[19])

    @property
    def life(self) -> str:
        """This process, and no other one with its number."""
        return f"{self.pid}.{self.started}"

    @property
    def age_s(self) -> float:
        """How long it has run."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.started / _TICKS

    def inner_pid(self) -> int:
        """Its number in the innermost namespace."""
        return int(self._status("NSpid").split()[-1])

    def children(self) -> Iterator[Process]:
        """Those that still run."""
        for task in (self.folder / "task").iterdir():
            for pid in (task / "children").read_text().split():
                with suppress(OSError):
                    yield Process(int(pid))

    def tree(self) -> Iterator[Process]:
        """Itself and its descendants."""
        yield self
        for child in self.children():
            with suppress(OSError):
                yield from child.tree()

    def read(self) -> dict[str, float]:
        """What it holds now."""
        found = re.search(r"^Pss:\s+(\d+)", (self.folder / "smaps_rollup").read_text(), re.MULTILINE)
        return {
            "pss_kib": float(found[1]) if found else 0.0,
            "descriptors": float(len(os.listdir(self.folder / "fd"))),
            "threads": float(self._status("Threads")),
        }

    def _status(self, key: str) -> str:
        found = re.search(rf"^{key}:\s+(.*)$", (self.folder / "status").read_text(), re.MULTILINE)
        return found[1] if found else "0"


def programs(daemon: str, root: Process) -> dict[str, list[Process]]:
    """The processes of a daemon by their name in the report."""
    kind, _, host = daemon.partition("@")
    found: dict[str, list[Process]] = {}
    for process in root.tree():
        for beginning, name in PROGRAMS.get(kind, {}).items():
            if process.name.startswith(beginning) and process.age_s > SETTLED_S:
                found.setdefault(f"{name}@{host}", []).append(process)
    return found


def size(paths: list[Path]) -> dict[str, float]:
    """Files below the paths, and what they hold; those that go meanwhile are left out."""
    files = kib = 0.0
    for path in paths:
        for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
            for name in names:
                with suppress(OSError):
                    kib += (Path(folder) / name).lstat().st_size / 1024
                    files += 1
    return {"kib": kib, "files": files}


def sample(site: Soak) -> dict[str, dict[str, Any]]:
    """Each program and folder: its values, and the life that they were read in."""
    values: dict[str, dict[str, Any]] = {name: {"life": "", **size(paths)} for name, paths in site.folders().items()}
    by_inner = {process.inner_pid(): process for process in Process(site.init).children()}
    for daemon in site.cluster.daemons():
        root = by_inner.get(daemon.pid)
        if root is None or daemon.status is not None:
            continue
        with suppress(OSError):
            for name, processes in programs(daemon.name, root).items():
                read = [process.read() for process in processes]
                life = ",".join(process.life for process in processes)
                values[name] = {"life": life, **{kind: sum(one[kind] for one in read) for kind in read[0]}}
            if daemon.name.startswith("agent@"):
                values[f"{daemon.name} /run/sluice"] = {"life": "", **size([root.folder / "root/run/sluice"])}
    return values


class Sampler(threading.Thread):
    """Appends samples to a file until it is stopped."""

    def __init__(self, site: Soak, file: Path, *, period_s: float) -> None:
        super().__init__(name="sampler")
        self.site = site
        self.file = file
        self.period_s = period_s
        self.begun = time.monotonic()
        self.problem: Exception | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    @property
    def hours(self) -> float:
        """Since the run began."""
        return (time.monotonic() - self.begun) / 3600

    def write(self, **fields: Any) -> None:
        """One line."""
        with self._lock, self.file.open("a") as file:
            file.write(json.dumps({"hours": round(self.hours, 6), **fields}) + "\n")

    def run(self) -> None:
        """One sample a period."""
        try:
            while not self._stopping.wait(self.period_s):
                self.write(sample=sample(self.site))
        except Exception as error:  # the run must not go on without samples
            self.problem = error

    def stop(self) -> None:
        """No sample after this."""
        self._stopping.set()
        self.join()
