"""Time from `sluice cluster up` until all is up, as a whole process, with real daemons; "demo" with all of Sluice."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER
from sluice.base.run import run_command

OPTIONS = [
    click.Option(
        ["--cluster", "clusters"],
        multiple=True,
        default=("demo", "scale-128"),
        show_default=True,
        help="A shipped cluster or a file; may be given several times.",
    ),
    click.Option(["--runs"], type=click.IntRange(1), default=3, show_default=True, help="Runs of each cluster."),
]
MUST: dict[str, tuple[str, float]] = {}  # depends on what is measured
_BOUNDS = {"up_demo_s": ("<=", 30.0), "up_scale_128_s": ("<=", 45.0)}


def run(clusters: tuple[str, ...], runs: int) -> Result:
    """Medians of `runs` runs in seconds: `up_NAME_s`, and `down_NAME_s` until nothing is left."""
    require_root("up")
    figures: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    for name in clusters:
        ups, downs = zip(*(_once(name) for _ in range(runs)), strict=True)
        word = Path(name).stem.replace("-", "_")
        for figure, values in ((f"up_{word}_s", ups), (f"down_{word}_s", downs)):
            figures[figure] = round(median(values), 3)
            spread[figure] = [round(value, 3) for value in (min(values), max(values))]
    return Result(
        figures,
        spread=spread,
        must={figure: bound for figure, bound in _BOUNDS.items() if figure in figures},
        versions={"slurm": run_command(["slurmd", "-V"]).stdout.split()[-1]},
    )


def _once(name: str) -> tuple[float, float]:
    sluice = [sys.executable, "-m", "sluice.main", "cluster"]
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent:
        folder = Path(parent) / "cluster"
        start = time.perf_counter()
        try:
            run_command([*sluice, "up", "--dir", folder, name], timeout=900)
            up = time.perf_counter() - start
            start = time.perf_counter()
            run_command([*sluice, "down", "--dir", folder], timeout=900)
            return up, time.perf_counter() - start
        finally:
            DevCluster(folder).down()
