"""SIGKILL of the leading controller at random moments under load: what is lost, and when service is back.

The same load, kills and judge on stock Slurm and on Slurm under Sluice's supervisor with the journal, each with two
controllers. Every job writes to a file when it began and ended. `submit_median_ms` is of whole sbatch processes in a
quiet time before the kills; what the journal costs a submission is measured by the benchmark of that name.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import Result
from dev_cluster.chaos.cluster import SITE_CONF, Chaos, Kills, kill_series, sluice_description, usual_kinds
from dev_cluster.handle import require_root
from sluice.base.run import run_command

QUIET_S = 20.0
SHOWN = 20
LIMIT_S = 60.0  # for service that does not come back
OPTIONS = [
    click.Option(["--runs"], type=click.IntRange(1), default=30, show_default=True, help="Kills."),
    click.Option(["--rate"], type=click.FloatRange(0.5, 200), default=20.0, show_default=True, help="Jobs a second."),
    click.Option(["--nodes"], type=click.IntRange(1, 64), default=8, show_default=True),
    click.Option(["--first-seed"], type=int, default=42, show_default=True),
    click.Option(["--accounting/--no-accounting"], default=True, show_default=True, help="slurmdbd and MariaDB."),
    click.Option(["--stock/--no-stock"], default=True, show_default=True, help="Also on stock Slurm."),
    click.Option(
        ["--root"], type=click.Path(exists=True, file_okay=False, path_type=Path), help="A tree with another Slurm."
    ),
    click.Option(["--plugins"], type=click.Path(exists=True, file_okay=False, path_type=Path), help="Built plugins."),
]
MUST: dict[str, tuple[str, float]] = {
    "lost": ("==", 0.0),
    "revived": ("==", 0.0),
    "run_again": ("==", 0.0),
    "started_again": ("==", 0.0),
    "id_twice": ("==", 0.0),
    "at_once": ("==", 0.0),
    "left": ("==", 0.0),
    "no_service": ("==", 0.0),
    "service_median_s": ("<=", 10.0),
    "service_max_s": ("<=", 30.0),
}
_COUNTS = (
    "acknowledged",
    "cancelled",
    "lost",
    "revived",
    "run_again",
    "started_again",
    "id_twice",
    "at_once",
    "left",
    "held_again",
)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _arm(name: str, sluice: dict[str, Any] | None, options: dict[str, Any]) -> tuple[Kills, float]:
    """One cluster: a quiet time, whose submissions are timed, then the kills."""
    _say(f"{name}: cluster comes up")
    with Chaos(
        sluice,
        nodes=options["nodes"],
        accounting=options["accounting"],
        root=options["root"],
        slurm_conf=SITE_CONF,
        agent=sluice is not None,
    ) as chaos:
        chaos.start_load(options["rate"], options["first_seed"])
        time.sleep(QUIET_S)
        quiet_ms = chaos.submit_ms()
        chaos.stop_load()
        kills = kill_series(chaos, usual_kinds(options["runs"]), options["rate"], options["first_seed"] + 1, _say)
        for line in (*kills.outcome.lost_jobs, *kills.outcome.others)[:SHOWN]:
            _say(f"{name}: {line}")
        return kills, quiet_ms


def _figures(kills: Kills, quiet_ms: float) -> dict[str, float]:
    figures: dict[str, float] = {name: getattr(kills.outcome, name) for name in _COUNTS}
    figures["no_service"] = kills.no_service
    never = [LIMIT_S] * kills.no_service
    figures["service_median_s"] = round(median(kills.takeovers + never or [0.0]), 2)
    figures["service_max_s"] = round(max(kills.takeovers + kills.restarts + never), 2)
    if kills.restarts:
        figures["restart_median_s"] = round(median(kills.restarts), 2)
    figures["submit_median_ms"] = round(quiet_ms, 2)
    return figures


def run(plugins: Path | None, stock: bool, **options: Any) -> Result:
    """Counts over all kills; seconds from the kill to the first submission made after it that was acknowledged."""
    require_root("up")
    peer: dict[str, float] = {}
    if stock:
        peer = _figures(*_arm("stock Slurm", None, options))
    ours, quiet_ms = _arm("Sluice", sluice_description(plugins), options)
    figures = _figures(ours, quiet_ms)
    spread = {"service_s": sorted(round(one, 2) for one in ours.takeovers)}
    if ours.restarts:
        spread["restart_s"] = sorted(round(one, 2) for one in ours.restarts)
    version = run_command(["slurmd", "-V"]).stdout.split()[-1] if options["root"] is None else str(options["root"])
    return Result(figures, peer, spread, versions={"slurm": version})
