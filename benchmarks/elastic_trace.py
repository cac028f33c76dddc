"""Pools on a public history: cost and waits of fleetd's way, Slurm's own power saving, and nodes that are always on.

The jobs are replayed three times on one pool of equal nodes; see sluice.fleet.simulate. A fourth replay has no spare
nodes: what launching ahead of the plan hides alone. Most jobs of a history are foreseen by no plan, as they start when
they are submitted where nodes can be had.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks import Result
from policy.pools import Pool, Shape
from sluice.core import version
from sluice.fleet.simulate import Booting, Figures, Replay, Way
from sluice.simulate.simulation import Assumptions
from sluice.simulate.traces import Trace, read_trace

OPTIONS = [
    click.Option(
        ["--trace"], type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="Job history."
    ),
    click.Option(["--jobs"], type=click.IntRange(1), default=2000, show_default=True, help="The first of the history."),
    click.Option(
        ["--nodes"], type=click.IntRange(1, 4096), default=48, show_default=True, help="Of the pool, at most."
    ),
    click.Option(["--gpus"], type=click.IntRange(1, 16), default=8, show_default=True, help="Of a node."),
    click.Option(["--spare"], type=click.IntRange(0), default=2, show_default=True, help="Idle nodes that are kept."),
    click.Option(["--idle"], type=click.IntRange(1), default=600, show_default=True, help="Seconds."),
    click.Option(["--boot"], type=click.FloatRange(0), default=180.0, show_default=True, help="Seconds."),
    click.Option(["--noise"], type=click.FloatRange(1), default=1.0, show_default=True, help="Of estimates: up to."),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"hidden_percent": (">=", 80.0), "cost_over_always_on": ("<", 1.0)}
_SHOWN = (
    "wait_mean_s", "wait_p95_s", "boot_wait_mean_s", "boots", "wasted_boots", "hidden_percent", "foreseen_boots",
    "foreseen_hidden_percent", "busy_percent",
)  # fmt: skip


def run(
    trace: Path, jobs: int, nodes: int, gpus: int, spare: int, idle: int, boot: float, noise: float, seed: int
) -> Result:
    """Replay in each way. A node costs 1 an hour, so that costs are node-hours; the peer is Slurm's power saving."""
    history = read_trace(trace)
    first = Trace(history.format, history.jobs[:jobs], history.share_unit)
    shape = Shape.model_validate(
        {"name": "node", "gpus": {"gpu": gpus}, "cpus": 4096, "memory": "1000T", "price": 1}  # as the history has none
    )
    pool = Pool.model_validate(
        {"driver": "local", "nodes": f"n[1-{nodes}]", "shapes": [shape], "idle": f"{idle}s", "spare": spare}
    )
    assumed = Assumptions("exact" if noise == 1 else "noisy", noise, seed)

    def replayed(way: Way, spare: int) -> Figures:
        pools = {"p": pool.model_copy(update={"spare": spare})}
        return Replay(first, [], pools, way, Booting(boot, seed), assumed).run()

    begin = time.perf_counter()
    always, saving = replayed("always-on", 0), replayed("power-saving", 0)
    fleet, planned = replayed("fleet", spare), replayed("fleet", 0)
    shown = asdict(fleet)
    return Result(
        figures={
            "jobs": fleet.jobs,
            "cost_over_always_on": fleet.cost / always.cost,
            "cost_over_power_saving": fleet.cost / saving.cost,
            **{name: shown[name] for name in _SHOWN},
            "always_on_wait_mean_s": always.wait_mean_s,
            "plan_alone_hidden_percent": planned.hidden_percent,
            "plan_alone_foreseen_boots": planned.foreseen_boots,
            "plan_alone_foreseen_hidden_percent": planned.foreseen_hidden_percent,
            "plan_alone_cost_over_power_saving": planned.cost / saving.cost,
            "replays_s": time.perf_counter() - begin,
        },
        peer={"cost_over_always_on": saving.cost / always.cost, **{name: asdict(saving)[name] for name in _SHOWN}},
        versions={"sluice_core": version()},
    )
