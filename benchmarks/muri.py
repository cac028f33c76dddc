"""Job completion time and makespan on Muri's traces, by the protocol published with them.

Zhao et al., "Multi-Resource Interleaving for Deep Learning Training", SIGCOMM 2022. A decision is made at every arrival
and end; a job of up to 8 GPUs goes to the first node with enough of them, a larger one to idle nodes; a (re)start costs
what the file with the published results says, by GPUs and model. As in the simulator behind those results, every
decision restarts all that runs, so every running job pays at every decision, under SRTF, SRSF and Sluice alike. EASY
(first come, first served, EASY backfill) never preempts and pays once for each job, which favours it.

First SRTF and SRSF are reproduced. Then Sluice's preemptive policy (`sluice-preempt`) is compared with SRSF's average
job completion time and EASY's makespan: with exact run times, and with run times known within a factor only: the
estimate is the run time times a number drawn evenly from 1 to `--noise`, the same for all three, for each seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks import Result
from sluice.base.errors import UsageError
from sluice.core import version
from sluice.simulate.cluster_file import read_nodes
from sluice.simulate.metrics import Metrics, mean, measure
from sluice.simulate.simulation import Assumptions, parse_policy, simulate
from sluice.simulate.traces import MICROSECOND, Trace, TraceJob, read_trace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OPTIONS = [
    click.Option(["--trace"], type=_FILE, required=True, multiple=True, help="Trace; may be given several times."),
    click.Option(["--published"], type=_FILE, required=True, help="Restart costs and published results, JSON."),
    click.Option(["--nodes"], default="8x8", show_default=True, help="Cluster: a file, or nodes x GPUs."),
    click.Option(["--noise"], type=click.FloatRange(1), default=5.0, show_default=True, help="Factor of estimates."),
    click.Option(["--seeds"], type=click.IntRange(1), default=10, show_default=True, help="Noisy runs of each trace."),
    click.Option(["--first-seed"], type=int, default=1, show_default=True),
]
# Of every trace that is given, the worst. A figure of the noisy runs is the mean over the seeds.
MUST = {
    "jct_over_srsf": ("<=", 1.05),
    "makespan_over_easy": ("<=", 1.02),
    "noisy_jct_over_srsf": ("<=", 1.05),
    "noisy_makespan_over_easy": ("<=", 1.02),
}
_REPRODUCED = {"SRTF": "srtf", "SRSF": "srsf"}
_DEFAULT_RESTART_S = 10


def run(trace: tuple[Path, ...], published: Path, nodes: str, noise: float, seeds: int, first_seed: int) -> Result:
    """All policies on all traces."""
    known = _published(published)
    restart = _restart(known, published)
    cluster = read_nodes(nodes)
    figures: dict[str, float] = {}
    peer: dict[str, float] = {}
    spread: dict[str, list[float]] = {}
    worst: dict[str, float] = {}
    errors: list[float] = []

    def figures_of(jobs: Trace, name: str, assumptions: Assumptions) -> Metrics:
        return measure(simulate(jobs, cluster, parse_policy(name), assumptions))

    for path in trace:
        jobs = read_trace(path, "muri")
        exact = Assumptions(estimates="exact", restart=restart, restart_each_decision=True)
        found = {name: figures_of(jobs, name, exact) for name in ("srtf", "srsf", "easy", "sluice-preempt")}
        for label, name in _REPRODUCED.items():
            for key, value in (("avg_jct", found[name].jct_mean_s), ("makespan", found[name].makespan_s)):
                figures[f"{path.stem}_{name}_{key}_s"] = value
                if label in known.get(path.stem, {}):
                    peer[f"{path.stem}_{name}_{key}_s"] = wanted = float(known[path.stem][label][key])
                    errors.append(abs(value / wanted - 1))
        _compare("", path.stem, [_ratios(found)], figures, peer, spread, worst)
        figures[f"{path.stem}_avg_jct_s"], peer[f"{path.stem}_avg_jct_s"] = (
            found["sluice-preempt"].jct_mean_s,
            found["srsf"].jct_mean_s,
        )
        figures[f"{path.stem}_makespan_s"], peer[f"{path.stem}_makespan_s"] = (
            found["sluice-preempt"].makespan_s,
            found["easy"].makespan_s,
        )
        runs = []
        for seed in range(first_seed, first_seed + seeds):
            noisy = Assumptions("noisy", noise, seed, restart=restart, restart_each_decision=True)
            runs.append(_ratios({name: figures_of(jobs, name, noisy) for name in ("srsf", "easy", "sluice-preempt")}))
        _compare("noisy_", path.stem, runs, figures, peer, spread, worst)
    must = {}
    if errors:
        figures["reproduced_error"] = max(errors)
        must["reproduced_error"] = ("<=", 1e-5)
    return Result({**worst, **figures}, peer=peer, spread=spread, versions={"sluice_core": version()}, must=must)


def _ratios(found: dict[str, Metrics]) -> tuple[float, float]:
    ours = found["sluice-preempt"]
    return ours.jct_mean_s / found["srsf"].jct_mean_s, ours.makespan_s / found["easy"].makespan_s


def _compare(
    prefix: str,
    trace: str,
    runs: list[tuple[float, float]],
    figures: dict[str, float],
    peer: dict[str, float],
    spread: dict[str, list[float]],
    worst: dict[str, float],
) -> None:
    for name, values in zip(("jct_over_srsf", "makespan_over_easy"), zip(*runs, strict=True), strict=True):
        figures[f"{trace}_{prefix}{name}"] = mean(values)
        peer[f"{trace}_{prefix}{name}"] = 1.0
        if len(values) > 1:
            spread[f"{trace}_{prefix}{name}"] = list(values)
        worst[prefix + name] = max(worst.get(prefix + name, 0.0), mean(values))


def _published(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"published results {path}: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"published results {path}: not a JSON object")
    return document


def _restart(known: dict[str, dict[str, dict[str, float]]], path: Path) -> Callable[[TraceJob], int]:
    """What a start costs, by GPUs and model."""
    table = known.get("restart_overhead_seconds")
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise UsageError(f"published results {path}: restart_overhead_seconds must give seconds by GPUs and model")

    def cost(job: TraceJob) -> int:
        return round(table.get(str(job.gpus), {}).get(job.kind, _DEFAULT_RESTART_S) * MICROSECOND)

    return cost
