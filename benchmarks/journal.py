"""What the failover journal adds to a submission: real daemons, plugins with and without the journal.

Two clusters of the same nodes side by side, both with the plugins at level admit; one journals. One client submits to
them in turns, as in submit-latency. The state folders are on --folder's file system: where that is memory, a sync costs
nothing, so it should be a disk.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click
import yaml

from benchmarks import Result
from benchmarks.submit_latency import _build, _counters, _description, _sluice, _submit
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from sluice.base.run import run_command

OPTIONS = [
    click.Option(["--nodes"], type=click.IntRange(1, 4096), default=16, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--rounds"], type=click.IntRange(2), default=40, show_default=True, help="Turns of each arm."),
    click.Option(["--batch"], type=click.IntRange(1), default=20, show_default=True, help="Jobs in a turn."),
    click.Option(["--folder"], default=".", show_default=True, help="Where the state folders are made."),
    click.Option(["--plugins"], default="", help="Folder of built plugins; default: built for the installed Slurm."),
]
# 10 percent or 2 ms at the median, whichever is more.
MUST = {"added_p50_of_allowed_percent": ("<=", 100.0)}


def run(nodes: int, rounds: int, batch: int, folder: str, plugins: str) -> Result:
    """Latency of both arms, and how much longer journalling takes."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=folder) as name:
        place = Path(name).resolve()
        place.chmod(0o755)
        client = _build(place)
        arms = {arm: DevCluster(place / arm) for arm in ("plain", "journal")}
        try:
            for arm, cluster in arms.items():
                sluice = _sluice(20, "admit", plugins) | {"journal": arm == "journal"}
                described = yaml.safe_dump(_description(nodes, sluice))
                cluster.up(parse_description(described, source="benchmark"), timeout=900, attached=True)
            taken: dict[str, list[float]] = {arm: [] for arm in arms}
            for turn in range(rounds + 1):
                for arm in sorted(arms, reverse=turn % 2 == 0):
                    values = _submit(arms[arm], client, batch, "option")
                    taken[arm] += values if turn else []  # the first turn warms up
            counters = _counters(arms["journal"])
        finally:
            for cluster in arms.values():
                cluster.down()
    for values in taken.values():
        values.sort()
    p50 = {arm: statistics.median(values) for arm, values in taken.items()}
    p99 = {arm: values[int(0.99 * len(values))] for arm, values in taken.items()}
    added = p50["journal"] - p50["plain"]
    return Result(
        figures={
            "submit_p50_ms": p50["journal"],
            "submit_p99_ms": p99["journal"],
            "added_p50_ms": added,
            "added_p50_percent": 100 * added / p50["plain"],
            "added_p50_of_allowed_percent": 100 * added / max(0.1 * p50["plain"], 2.0),
            "entries": counters["journal.entries"],
            "longest_sync_ms": counters["journal.longest_sync_us"] / 1000,
            "refused": counters.get("journal.refused", 0),
        },
        peer={"submit_p50_ms": p50["plain"], "submit_p99_ms": p99["plain"]},
        versions={"slurm": run_command(["slurmctld", "-V"]).stdout.split()[-1]},
    )
