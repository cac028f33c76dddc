"""A profile of many nodes: from the moment it is stopped until it is collected, and merged into one trace.

Each node's files are simulated, and sent by the real program of nodes; one process plays all of them, one after the
other, in place of srun. Before that a collector is killed half-way: what the next one gets must be all.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

from benchmarks.profile_files import Writer, training
from sluice.base.run import PYTHON
from sluice.profile.collect import Collector
from sluice.profile.summary import summarise
from sluice.profile.timeline import load
from sluice.profile.trace import write

MUST = {"collect_and_merge_s": ("<=", 5.0), "lost_events_after_kill": ("==", 0.0)}
_PROGRAM = Path(__file__).resolve().parents[1] / "prolog_epilog/programs/profile_node.py"


def measure(nodes: int = 512, events: int = 1000) -> dict[str, float]:
    """`events`: of each node. Figures as in `MUST`, and their parts."""
    with tempfile.TemporaryDirectory(prefix="sluice-profile-") as name:
        folder = Path(name)
        written = _make(folder / "nodes", nodes, events)
        _killed(folder, nodes)
        begun = time.monotonic()
        target = folder / "collected"
        target.mkdir()
        with _collector(folder, nodes, target) as collector:
            joined = time.monotonic()
            collector.stop("*")
            collector.collect("*")
        collected, began = time.monotonic(), time.process_time()
        timeline = load(target)
        write(timeline, folder / "trace.json.gz")
        merged, spent = time.monotonic(), time.process_time() - began
        found = summarise(timeline)
        summed = time.monotonic()
        read = sum(len(one.events) for one in timeline.profiles)
        return {
            "collect_and_merge_s": merged - joined,
            "join_s": joined - begun,
            "collect_s": collected - joined,
            "merge_s": merged - collected,
            "merge_cpu_s": spent,
            "summary_s": summed - merged,
            "profile_nodes": float(found["nodes"]),
            "profile_events": float(read),
            "profile_mb": sum(one.stat().st_size for one in target.glob("*/*")) / 1e6,
            "trace_mb": (folder / "trace.json.gz").stat().st_size / 1e6,
            "lost_events_after_kill": float(written - read),
        }


def _make(folder: Path, nodes: int, events: int) -> int:
    """Their files; how many events."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    now, today = time.clock_gettime_ns(time.CLOCK_MONOTONIC), time.time_ns()
    for rank in range(nodes):
        place = folder / str(rank) / "17/0"
        place.mkdir(parents=True)
        writer = Writer(f"n{rank}", 100, rank=rank, started=now, time_of_day=today, boot=boot)
        training(writer, events, rank, 1.1 if rank == nodes // 2 else 1.0)
        (place / writer.file_name).write_bytes(writer.content())
    return nodes * (events // 4) * 4


def _collector(folder: Path, nodes: int, target: Path) -> Collector:
    words = [*PYTHON, "-m", "benchmarks.profile_collect", str(folder / "nodes"), str(nodes)]
    return Collector(words, nodes, target, {**os.environ, "PYTHONPATH": str(_PROGRAM.parents[2])})


def _killed(folder: Path, nodes: int) -> None:
    """A collector that dies half-way."""

    def collect() -> None:
        target = folder / "killed"
        target.mkdir()
        with _collector(folder, nodes, target) as collector:
            collector.collect("*")

    child = multiprocessing.get_context("fork").Process(target=collect)
    child.start()
    until = time.monotonic() + 30
    while not any((folder / "killed").glob("*/*")) and time.monotonic() < until:
        time.sleep(0.01)
    child.kill()
    child.join()


def _nodes(folder: Path, count: int) -> None:
    """Answer in place of the nodes, until standard input ends."""
    specification = importlib.util.spec_from_file_location("profile_node", _PROGRAM)
    assert specification is not None and specification.loader is not None
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for rank in range(count):
        _be(program, folder, rank)
        program.say("hello", f"n{rank}", boot)
    for line in sys.stdin:
        for rank in range(count):
            _be(program, folder, rank)
            program.answer(line.split())


def _be(program: ModuleType, folder: Path, rank: int) -> None:
    program.TASK, program.OWN, program.JOB = str(rank), "", folder / str(rank) / "17"  # type: ignore[attr-defined]


if __name__ == "__main__":
    _nodes(Path(sys.argv[1]), int(sys.argv[2]))
