"""This tree next to another commit: `python -m benchmarks.compare BASE NAME...`, which `make bench BASE=COMMIT` calls.

BASE is checked out into a git worktree below build/base and built there by its own `make build`, with a virtual
environment of its own, so that another layout or another name of the package does not matter. Each benchmark runs by
its own tree's tools/bench, in turns (base, this; this, base; ...), so that other load on the machine affects both. Each
figure is compared as a ratio of medians, with an interval from resampling the pairs of runs. A figure is worse when its
ratio is above the bound and all of the interval is above 1.

Exit 1: a figure is worse; 2: could not be measured.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.__main__ import machine, run_program
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.base.run import run_command

ROOT = Path(__file__).resolve().parents[1]
RESAMPLES = 2000
LOWER, HIGHER, NEITHER = "lower", "higher", ""
# Which direction is better, by the first pattern that fits a figure's name; where none does, by the figure's must.
DIRECTIONS = (
    # Differences of two figures that are compared themselves: near 0 their ratio says nothing.
    ("*overhead*", NEITHER),
    ("*added*", NEITHER),
    ("growth_exponent*", NEITHER),
    ("cost_percent*", NEITHER),
    # Figures that the input decides, and those that only show that there was something to measure.
    ("python_*", NEITHER),
    ("clock_us", NEITHER),
    ("*_use_percent", NEITHER),
    ("*interrupted_percent", NEITHER),
    ("*gain*_points", HIGHER),
    ("*off_published_points", LOWER),
    ("*allocat*_percent", HIGHER),
    ("*started_percent", HIGHER),
    ("*within*_percent", HIGHER),
    ("*_core_percent", LOWER),
    ("*_per_second", HIGHER),
    ("*_per_s", HIGHER),
    ("*_faster", HIGHER),
    ("*_over_*", LOWER),
    *((pattern, LOWER) for unit in ("us", "ms", "s", "mib", "kib") for pattern in (f"*_{unit}", f"*_{unit}_*")),
    ("*_waiting_mean", LOWER),
    ("waiting_mean", LOWER),
)
_BY_MUST = {"<": LOWER, "<=": LOWER, "==": LOWER, ">": HIGHER, ">=": HIGHER}


def direction(figure: str, must: Mapping[str, Sequence[Any]]) -> str:
    """Which direction of a figure is better: LOWER, HIGHER or NEITHER."""
    for pattern, better in DIRECTIONS:
        if fnmatchcase(figure, pattern):
            return better
    return _BY_MUST[must[figure][0]] if figure in must else NEITHER


def times_worse(base: float, this: float, better: str) -> float:
    """How many times worse `this` is than `base`; below 1 it is better."""
    below, above = (base, this) if better == LOWER else (this, base)
    if below == above:
        return 1.0
    if below <= 0 or above <= 0:
        return inf if above > below else 0.0
    return above / below


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both trees; `ratio` above 1: worse than the base."""

    benchmark: str
    figure: str
    better: str
    base: float
    this: float
    ratio: float
    low: float
    high: float
    worse: bool


def compare(benchmark: str, figure: str, better: str, pairs: Sequence[tuple[float, float]], bound: float) -> Compared:
    """Medians of both, their ratio, and its 95 % interval from resampling pairs of runs next to each other."""
    draw = random.Random(0)  # the same runs have the same interval

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        base, this = zip(*chosen, strict=True)
        return times_worse(median(base), median(this), better)

    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = ratios[RESAMPLES // 40], ratios[-RESAMPLES // 40 - 1]
    base, this = zip(*pairs, strict=True)
    found = ratio(pairs)
    return Compared(
        benchmark, figure, better, median(base), median(this), found, low, high, worse=found > bound and low > 1
    )


def compare_documents(
    name: str, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], bound: float
) -> list[Compared]:
    """All figures that both trees have and that have a direction. Raises SluiceError if the options differ."""
    commands = {document["command"] for pair in pairs for document in pair}
    if len(commands) > 1:
        raise SluiceError(
            f"{name}: the base ran it with other options: {'; '.join(sorted(commands))}", remedy="leave it out of NAMES"
        )
    base, this = pairs[0]
    compared = []
    for figure in this["figures"]:
        better = direction(figure, this["must"])
        if better and figure in base["figures"]:
            values = [(one["figures"][figure], other["figures"][figure]) for one, other in pairs]
            compared.append(compare(name, figure, better, values, bound))
    return compared


# ---- two trees ----


def check_out(commit: str) -> tuple[str, Path]:
    """A worktree of a commit, built; its short name and folder. Raises SluiceError."""
    git = ["git", "-C", str(ROOT)]
    short = run_command([*git, "rev-parse", "--short", f"{commit}^{{commit}}"]).stdout.strip()
    folder = ROOT / "build/base" / short
    if not folder.exists():
        run_command([*git, "worktree", "prune"])
        run_command([*git, "worktree", "add", "--detach", folder, short], timeout=300)
    outer = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")  # BASE and NAMES are not meant for this make
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    click.echo(f"building {short} in {folder}", err=True)
    done = subprocess.run(["make", "build"], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SluiceError(f"{short}: `make build` failed in {folder}", remedy="see its output above")
    return short, folder


def measure(tree: Path, name: str, traces: str, results: Path) -> dict[str, dict[str, Any]]:
    """Run one benchmark by a tree's own tools/bench; its JSON documents by file name. Raises SluiceError."""
    results.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "JSON": str(results), "CONTINUE": ""}  # nothing of an earlier comparison counts
    done = subprocess.run([tree / "tools/bench", traces, name], cwd=tree, env=environment, check=False)
    files = sorted(results.glob("*.json"))
    if done.returncode not in (0, 1) or not files:
        raise SluiceError(f"{name}: could not run in {tree}", remedy="see the output above, or leave it out of NAMES")
    return {path.stem: json.loads(path.read_text()) for path in files}


def measure_in_turns(
    trees: Sequence[Path], names: Sequence[str], traces: str, runs: int, results: Path
) -> dict[str, list[Any]]:
    """Every benchmark `runs` times in each tree, the two next to each other; pairs of documents by file."""
    pairs: dict[str, list[Any]] = {}
    for number in range(runs):
        for name in names:
            found: dict[int, dict[str, dict[str, Any]]] = {}
            for arm in (0, 1) if number % 2 == 0 else (1, 0):
                click.echo(f"run {number + 1} of {runs}: {name} in {trees[arm]}", err=True)
                folder = results / name / f"{number + 1}-{('base', 'this')[arm]}"
                found[arm] = measure(trees[arm], name, traces, folder)
            for file in found[1]:
                if file in found[0]:
                    pairs.setdefault(file, []).append((found[0][file], found[1][file]))
    return pairs


def print_table(compared: Sequence[Compared]) -> None:
    """One line a figure."""
    click.echo(f"{'figure':<44} {'base':>12} {'this tree':>12} {'ratio':>7}  95 % interval")
    benchmark = ""
    for one in compared:
        if one.benchmark != benchmark:
            benchmark = one.benchmark
            click.echo(benchmark)
        verdict = "  WORSE" if one.worse else ""
        interval = f"{one.low:.3f} to {one.high:.3f}"
        click.echo(f"  {one.figure:<42} {one.base:>12.6g} {one.this:>12.6g} {one.ratio:>7.3f}  {interval}{verdict}")


@click.command()
@click.argument("base")
@click.argument("names", nargs=-1)
@click.option("--runs", envvar="RUNS", type=click.IntRange(3), default=3, show_default=True, help="Of each tree.")
@click.option("--bound", envvar="BOUND", type=click.FloatRange(1), default=1.1, show_default=True, help="Times worse.")
@click.option("--traces", envvar="TRACES", default="", help="Folder of public traces (docs/benchmarks.md).")
@click.option("--json", "file", type=click.Path(path_type=Path), default=ROOT / "build/compare.json", show_default=True)
def main(base: str, names: tuple[str, ...], runs: int, bound: float, traces: str, file: Path) -> None:
    """Compare this tree with the commit BASE by the benchmarks NAMES."""
    if not names:
        raise UsageError("no benchmark is named", remedy='name some, e.g. NAMES="core-latency limiter"')
    traces = traces and str(Path(traces).resolve())
    short, folder = check_out(base)
    pairs = measure_in_turns([folder, ROOT], names, traces, runs, ROOT / "build/compare")
    compared = [one for name, documents in pairs.items() for one in compare_documents(name, documents, bound)]
    if not compared:
        raise SluiceError(f"{short} and this tree have no figure in common", remedy="name other benchmarks")
    document = {
        "base": short,
        "runs": runs,
        "bound": bound,
        "machine": machine(),
        "figures": [asdict(one) for one in compared],
    }
    write_atomic(file, json.dumps(document, indent=1) + "\n")
    print_table(compared)
    worse = [one for one in compared if one.worse]
    click.echo(f"{len(worse)} of {len(compared)} figures are worse than in {short}; the results are in {file}")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    run_program(main, "benchmarks.compare")
