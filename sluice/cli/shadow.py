"""`sluice shadow`: what Sluice would have done otherwise, while stock Slurm decides (level shadow)."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.base.errors import SluiceError
from sluice.cli.decisions_option import decisions_option

if TYPE_CHECKING:
    from sluice.explain.shadow import Shadow


@click.group("shadow")
def command() -> None:
    """What Sluice would have done otherwise, from the decisions of level shadow."""


@command.command("report")
@decisions_option()
@click.option(
    "--hours", type=click.FloatRange(min=0, min_open=True), metavar="HOURS", help="Only the last so many hours."
)
@click.option("--differences", type=click.IntRange(0, 100000), default=10, show_default=True, help="Jobs to list.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def report_command(decisions: Path | None, hours: float | None, differences: int, as_json: bool) -> None:
    """Sluice's choices next to stock Slurm's. On a controller, as SlurmUser or root."""
    from sluice.explain.shadow import report

    if decisions is None:
        from sluice.explain.explain_service import decisions_folder, open_site

        decisions = decisions_folder(open_site().config())
    since = time.time() - hours * 3600 if hours else 0.0
    shadow = report(decisions, since=since, most_differences=differences)
    if as_json:
        click.echo(json.dumps(shadow.document(), indent=2))
        return
    if not shadow.decisions:
        raise SluiceError(
            f"{decisions}: no decisions of level shadow",
            remedy="set the level: see sluice-plugin(1); the files of decisions are rotated",
        )
    for line in render(shadow):
        click.echo(line)


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f}%)" if whole else "0"


def render(shadow: Shadow) -> list[str]:
    """The report as lines of text."""
    first, last = (
        datetime.fromtimestamp(moment).strftime("%Y-%m-%dT%H:%M:%S") for moment in (shadow.first, shadow.last)
    )
    lines = [
        f"{shadow.decisions} decisions from {first} to {last}",
        f"  both would start the job       {_share(shadow.both, shadow.decisions)}",
        f"    on the same nodes            {_share(shadow.same_nodes, shadow.both)}",
        f"    and the same GPUs            {_share(shadow.same_gpus, shadow.compared_gpus)}",
        f"  only Sluice would              {_share(shadow.only_core, shadow.decisions)}",
        f"  only stock Slurm would         {_share(shadow.only_stock, shadow.decisions)}",
        f"  neither would                  {_share(shadow.neither, shadow.decisions)}",
        "",
        f"{'Where both would start the job':<40}{'Sluice':>10}{'stock':>10}",
        f"{'  idle nodes that it breaks into':<40}"
        f"{shadow.core.idle_nodes_broken:>10}{shadow.stock.idle_nodes_broken:>10}",
        f"{'  idle GPUs on those nodes':<40}{shadow.core.idle_gpus_on_them:>10}{shadow.stock.idle_gpus_on_them:>10}",
        f"{'  idle GPUs opened for shares':<40}{shadow.core.idle_gpus_opened:>10}{shadow.stock.idle_gpus_opened:>10}",
    ]
    figures = shadow.document()
    if shadow.core_us:
        stock_us = figures["stock_us_median"] or "-"
        lines.append(f"{'  time to decide, median (us)':<40}{figures['sluice_us_median']:>10}{stock_us:>10}")
    lines += ["", f"Jobs that Sluice would have started earlier: {len(shadow.earlier_s)}"]
    if shadow.earlier_s:
        lines.append(f"  by {figures['earlier_s_median']:g} s in the median, {figures['earlier_s_most']:g} s at most")
    if shadow.still_waiting:
        lines.append(f"  and {shadow.still_waiting} that wait still")
    if shadow.differences:
        lines += ["", f"{'JOB':>10}  {'SLUICE':<28}  STOCK"]
        lines += [f"{one.job:>10}  {','.join(one.core):<28}  {','.join(one.stock)}" for one in shadow.differences]
    if shadow.lost:
        lines += ["", f"{shadow.lost} entries were lost (slurmctld was faster than the disk)."]
    return lines
