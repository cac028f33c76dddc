"""Pools on a public history: cost and waits of fleetd's way, Slurm's own power saving, and nodes that are always on.

The jobs are replayed three times on one pool of equal nodes; see sluice.fleet.simulate. A fourth replay has no spare
nodes: what launching ahead of the plan hides alone. Most jobs of a history are foreseen by no plan, as they start when
they are submitted where nodes can be had.

Histories do not say which jobs wait for others. So the same jobs are replayed once more with such relations: each job
of several nodes is a gang of jobs of one node, and by chance each job waits for the end of the one before it.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, replace
from pathlib import Path

import click

from benchmarks import Result
from policy.pools import Pool, Shape
from sluice.core import version
from sluice.fleet.simulate import Booting, Figures, Relations, Replay, Way
from sluice.simulate.simulation import Assumptions
from sluice.simulate.traces import Trace, TraceJob, read_trace

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
    click.Option(
        ["--chained"],
        type=click.IntRange(0, 100),
        default=30,
        show_default=True,
        help="Percent of jobs that wait for the end of the one before, where there are chains.",
    ),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"hidden_percent": (">=", 80.0), "related_hidden_percent": (">=", 80.0), "cost_over_always_on": ("<", 1.0)}
_SHOWN = (
    "wait_mean_s", "wait_p95_s", "boot_wait_mean_s", "boots", "wasted_boots", "hidden_percent", "foreseen_boots",
    "foreseen_hidden_percent", "busy_percent",
)  # fmt: skip
_RELATED = ("wait_mean_s", "boot_wait_mean_s", "boots", "wasted_boots", "hidden_percent")


def related(history: Trace, gpus: int, chained: int, seed: int) -> tuple[Trace, Relations]:
    """The jobs of a history with gangs and chains; of a chain's gang each member waits for the first one of the gang
    before.
    """
    chance = random.Random(seed)
    jobs: list[TraceJob] = []
    after: dict[int, int] = {}
    gangs: dict[int, int] = {}
    before = None
    for number, job in enumerate(history.jobs):
        members = max(job.nodes, -(-job.gpus // gpus), 1)
        first = len(jobs)
        waits = before is not None and chance.randrange(100) < chained
        for _ in range(members):
            if waits and before is not None:
                after[len(jobs)] = before
            if members > 1:
                gangs[len(jobs)] = number + 1
            jobs.append(replace(job, gpus=-(-job.gpus // members), nodes=1))
        before = first
    return Trace(history.format, jobs, history.share_unit), Relations(after, gangs)


def run(
    trace: Path,
    jobs: int,
    nodes: int,
    gpus: int,
    spare: int,
    idle: int,
    boot: float,
    noise: float,
    chained: int,
    seed: int,
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

    def replayed(way: Way, spare: int, jobs: Trace = first, relations: Relations | None = None) -> Figures:
        pools = {"p": pool.model_copy(update={"spare": spare})}
        return Replay(jobs, [], pools, way, Booting(boot, seed), assumed, relations=relations).run()

    begin = time.perf_counter()
    always, saving = replayed("always-on", 0), replayed("power-saving", 0)
    fleet, planned = replayed("fleet", spare), replayed("fleet", 0)
    history, relations = related(first, gpus, chained, seed)
    with_relations = replayed("fleet", spare, history, relations)
    planned_relations = replayed("fleet", 0, history, relations)
    saving_relations = replayed("power-saving", 0, history, relations)
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
            "gangs": len(set(relations.gangs.values())),
            "chained_jobs": len(relations.after),
            **{f"related_{name}": asdict(with_relations)[name] for name in _RELATED},
            "related_cost_over_power_saving": with_relations.cost / saving_relations.cost,
            "related_plan_alone_hidden_percent": planned_relations.hidden_percent,
            "related_plan_alone_foreseen_boots": planned_relations.foreseen_boots,
            "related_plan_alone_foreseen_hidden_percent": planned_relations.foreseen_hidden_percent,
            "related_plan_alone_cost_over_power_saving": planned_relations.cost / saving_relations.cost,
            "replays_s": time.perf_counter() - begin,
        },
        peer={
            "cost_over_always_on": saving.cost / always.cost,
            **{name: asdict(saving)[name] for name in _SHOWN},
            **{f"related_{name}": asdict(saving_relations)[name] for name in _RELATED},
        },
        versions={"sluice_core": version()},
    )
