"""`sluice simulate`: a job history under other policies, side by side."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.errors import UsageError

if TYPE_CHECKING:
    from policy.pools import Pool
    from sluice.fleet.simulate import Figures, StockOut
    from sluice.simulate.metrics import Metrics
    from sluice.simulate.simulation import Assumptions, Moves, SimulatedPolicy, Simulation
    from sluice.simulate.traces import Trace

Rows = Sequence[tuple[str, str, int]]

SCHEMA_VERSION = 1
DEFAULT_POLICIES = ("easy", "slurm", "sluice")
_DEFAULTS = "-"
# Row of the table: metric, words, and what one unit of the table is.
ROWS = (
    ("jobs", "jobs that ended", 1),
    ("rejected", "jobs that fit nowhere", 1),
    ("jct_mean_s", "completion time, mean (h)", 3600),
    ("jct_p99_s", "completion time, p99 (h)", 3600),
    ("wait_mean_s", "wait, mean (h)", 3600),
    ("wait_p50_s", "wait, median (h)", 3600),
    ("wait_p95_s", "wait, p95 (h)", 3600),
    ("wait_p99_s", "wait, p99 (h)", 3600),
    ("makespan_s", "makespan (h)", 3600),
    ("throughput_per_hour", "jobs per hour", 1),
    ("allocation_percent", "GPUs allocated (%)", 1),
    ("fragmented_percent", "idle GPUs fragmented (%)", 1),
    ("fairness_worst", "worst tenant's finish-time ratio", 1),
    ("fairness_jain", "fairness between tenants (Jain)", 1),
    ("deadlines", "deadlines", 1),
    ("deadlines_missed", "deadlines missed", 1),
    ("preemptions", "preemptions", 1),
    ("moves", "moves", 1),
)

POOL_ROWS = (
    ("jobs", "jobs that ran", 1),
    ("rejected", "jobs that fit nowhere", 1),
    ("cost", "cost of pools", 1),
    ("node_hours", "hours of pools' nodes", 1),
    ("busy_percent", "of these with a job (%)", 1),
    ("wait_mean_s", "wait, mean (s)", 1),
    ("wait_p50_s", "wait, median (s)", 1),
    ("wait_p95_s", "wait, p95 (s)", 1),
    ("wait_p99_s", "wait, p99 (s)", 1),
    ("boot_wait_mean_s", "wait for boots, mean (s)", 1),
    ("boots", "boots", 1),
    ("hidden_percent", "boot time that no job waited for (%)", 1),
    ("foreseen_boots", "boots for starts that the plan foresaw", 1),
    ("foreseen_hidden_percent", "of these hidden (%)", 1),
    ("wasted_boots", "boots for no job", 1),
    ("given_back", "starts that found no capacity", 1),
)


class FiniteRange(click.FloatRange):
    """A number within bounds, which nan never is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


@click.command("simulate")
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Job history; see sluice-simulate(1) for its formats.",
)
@click.option(
    "--format",
    "format_name",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="auto, openb, muri, philly, swf or sacct.",
)
@click.option("--nodes", metavar="FILE|NxG", help="The cluster: a file, or nodes x GPUs, e.g. 16x8:a100.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[,KEY=VALUE]...",
    help="May be given several times.  [default: easy, slurm, sluice]",
)
@click.option("--list-policies", is_flag=True, help="Name the policies, and leave.")
@click.option(
    "--estimates",
    type=click.Choice(["limit", "exact", "noisy"]),
    default="limit",
    show_default=True,
    help="What the policy knows of run times.",
)
@click.option(
    "--noise",
    type=FiniteRange(1, 1000),
    default=5.0,
    show_default=True,
    help="With noisy estimates: up to so many times the run time.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the noise.")
@click.option(
    "--restart",
    type=FiniteRange(0, 10**6),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="What each start of a job costs.",
)
@click.option(
    "--checkpoint",
    type=FiniteRange(-1, 10**6),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between checkpoints: what a preempted job keeps. 0: all; -1: nothing.",
)
@click.option(
    "--depth",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Pending jobs that are tried at a decision; 0: all.",
)
@click.option(
    "--interval",
    type=FiniteRange(0, 10**6),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Least time between decisions.",
)
@click.option(
    "--pools",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A policy whose pools are simulated, next to --nodes: cost and waits of three ways to have their nodes.",
)
@click.option(
    "--boot",
    type=FiniteRange(0, 7200),
    default=180.0,
    show_default=True,
    metavar="SECONDS",
    help="With --pools: the usual time from a launch until a node is there.",
)
@click.option(
    "--no-capacity",
    "no_capacity",
    multiple=True,
    metavar="POOL[,shape=SHAPE][,zone=ZONE]:FROM-TO",
    help="With --pools: the provider launches nothing for the pool in these hours of the history, of this shape and in "
    "this zone where they are named; may be repeated.",
)
@click.option(
    "--migrate",
    is_flag=False,
    flag_value=_DEFAULTS,
    metavar="[FILE]",
    help="Each policy once more, with running jobs that are moved to make room, as the section compaction of a policy "
    "FILE says, or by its defaults.",
)
@click.option(
    "--savable",
    type=click.IntRange(0, 100),
    default=100,
    show_default=True,
    metavar="PERCENT",
    help="With --migrate: of all jobs, those that can be saved and moved; drawn at random.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the cluster's state over time.")
@click.option("-P", "--parsable2", is_flag=True, help="A line for each policy, fields separated by '|'.")
@click.option("-n", "--noheader", is_flag=True, help="No header line.")
@click.option("-o", "--format-fields", "columns", metavar="FIELD[,FIELD]...", help="Figures to print, in this order.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Plot as SVG or PNG.")
def command(
    trace_path: Path | None,
    format_name: str,
    nodes: str | None,
    policies: tuple[str, ...],
    list_policies: bool,
    estimates: str,
    noise: float,
    seed: int,
    restart: float,
    checkpoint: float,
    depth: int,
    interval: float,
    pools: Path | None,
    boot: float,
    no_capacity: tuple[str, ...],
    migrate: str | None,
    savable: int,
    as_json: bool,
    parsable2: bool,
    noheader: bool,
    columns: str | None,
    plot: Path | None,
) -> None:
    """Replay a job history under other policies, and compare them: your last month under another policy."""
    from sluice.simulate.simulation import Assumptions

    if list_policies:
        _list_policies()
        return
    if trace_path is None:
        raise click.UsageError("--trace is needed")
    if pools is not None:
        if policies or plot is not None or migrate is not None:
            raise click.UsageError("--policy, --plot and --migrate do not go with --pools")
        found = _simulate_pools(
            trace_path, format_name, nodes, pools, boot, no_capacity, Assumptions(estimates, noise, seed),
            as_json=as_json,
        )  # fmt: skip
        if not as_json:
            wanted = _columns(columns, type(found[0]), ("way",))
            _print("way", [str(one.way) for one in found], found, POOL_ROWS, wanted, lines=parsable2, bare=noheader)
        return
    if no_capacity:
        raise click.UsageError("--no-capacity goes with --pools alone")
    if nodes is None:
        raise click.UsageError("--nodes or --pools is needed")
    if plot is not None:
        from sluice.base.pictures import check_plot

        check_plot(plot)
    from sluice.simulate.metrics import Metrics, measure
    from sluice.simulate.traces import MICROSECOND

    wanted = _columns(columns, Metrics, ("fairness",))
    cost = round(restart * MICROSECOND)
    assumptions = Assumptions(
        estimates,
        noise,
        seed,
        lambda job: cost,
        checkpoint=round(checkpoint * MICROSECOND),
        depth=depth,
        interval=round(interval * MICROSECOND),
    )
    runs = _runs(policies, assumptions, None if migrate is None else _moves(migrate, savable, MICROSECOND))
    trace = _read_trace(trace_path, format_name)
    simulations = _simulate(trace, nodes, runs)
    measured = [measure(simulation) for simulation in simulations]
    if plot is not None:
        from sluice.simulate.plot import draw_plot

        draw_plot(plot, simulations, measured)
    if as_json:
        click.echo(json.dumps(_document(trace, simulations, measured)))
    else:
        names = [simulation.policy.name for simulation in simulations]
        _print("policy", names, measured, ROWS, wanted, lines=parsable2, bare=noheader)


def _list_policies() -> None:
    from sluice.simulate.simulation import PRESETS

    for name, (_, words) in PRESETS.items():
        click.echo(f"{name}\t{words}")


def _runs(texts: Sequence[str], assumed: Assumptions, moves: Moves | None) -> list[tuple[SimulatedPolicy, Assumptions]]:
    """Each policy, and with `moves` once more with these. Raises UsageError."""
    from sluice.simulate.simulation import parse_policy, with_moves

    policies = [parse_policy(text) for text in texts or DEFAULT_POLICIES]
    if moves is None:
        return [(policy, assumed) for policy in policies]
    moving = replace(assumed, moves=moves)
    return [run for policy in policies for run in ((policy, assumed), (with_moves(policy), moving))]


def _simulate(trace: Trace, nodes: str, runs: Sequence[tuple[SimulatedPolicy, Assumptions]]) -> list[Simulation]:
    """The history on these nodes, in each run."""
    from sluice.simulate.cluster_file import read_nodes
    from sluice.simulate.simulation import simulate

    cluster = read_nodes(nodes)
    if trace.share_unit == "mib" and not any(node.gpu_memory_mib for node in cluster):
        shared = sum(job.share > 0 for job in trace.jobs)
        if shared:
            click.echo(
                f"sluice: --nodes {nodes}: does not tell the GPUs' memory: {shared} jobs with shards will fit nowhere; "
                "give the output of scontrol show node, with shards",
                err=True,
            )
    simulations = [
        simulate(trace, cluster, policy, assumed, progress=_progress(policy.name, len(trace.jobs)))
        for policy, assumed in runs
    ]
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    return simulations


def _moves(named: str, savable: int, second: int) -> Moves:
    """By the section of a policy file. Raises UsageError where it has none."""
    from policy.compaction import Compaction
    from policy.document import load
    from sluice.simulate.simulation import Moves

    section = Compaction() if named == _DEFAULTS else load(Path(named)).policy.compaction
    if section is None:
        raise UsageError(f"{named}: has no section compaction", remedy="add one, or give --migrate without a file")
    return Moves(
        wait=section.wait * second,
        cost=section.move_cost * second,
        factor=section.factor,
        per_job=section.moves_per_job,
        per_hour=section.moves_per_hour,
        savable_percent=savable,
    )


def _simulate_pools(
    path: Path,
    format_name: str,
    nodes: str | None,
    policy: Path,
    boot: float,
    no_capacity: tuple[str, ...],
    assumed: Assumptions,
    *,
    as_json: bool,
) -> list[Figures]:
    """A history with the pools of a policy, in each way to have their nodes."""
    from policy.document import load
    from sluice.fleet.simulate import WAYS, Booting, Replay, fixed_nodes
    from sluice.simulate.cluster_file import read_nodes

    pools = load(policy).policy.pools
    if not pools:
        raise UsageError(f"{policy}: has no pools", remedy="name a policy with the section pools; see sluice.yaml(5)")
    outs = [_stock_out(text, pools) for text in no_capacity]
    trace = _read_trace(path, format_name)
    fixed = fixed_nodes(read_nodes(nodes) if nodes is not None else [], pools)
    booting = Booting(boot, assumed.seed)
    found = [
        Replay(trace, fixed, pools, way, booting, assumed, outs).run(_progress(way, len(trace.jobs))) for way in WAYS
    ]
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    if as_json:
        ways = [asdict(one) for one in found]
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "trace": _trace_document(trace), "ways": ways}))
    return found


def _stock_out(text: str, pools: Mapping[str, Pool]) -> StockOut:
    """A time without capacity."""
    from sluice.fleet.simulate import StockOut

    match = re.fullmatch(r"([^,]+?)((?:,[^,]+)*):(\d{1,6}(?:\.\d+)?)-(\d{1,6}(?:\.\d+)?)", text)
    if match is None or match[1] not in pools or float(match[3]) >= float(match[4]):
        raise UsageError(
            f"--no-capacity {text[:80]!r}: not a pool of the policy and hours of the history",
            remedy=f"write POOL:FROM-TO, as {min(pools)}:10-12.5, or POOL,zone=ZONE:FROM-TO",
        )
    pool = pools[match[1]]
    known = {"shape": [one.name for one in pool.shapes], "zone": pool.zones}
    place: dict[str, str] = {}
    for word in match[2].split(",")[1:]:
        key, _, value = word.partition("=")
        if value not in known.get(key, ()) or key in place:
            raise UsageError(
                f"--no-capacity {text[:80]!r}: {word[:80]!r} is none of pool {match[1]}",
                remedy=f"it has shapes {', '.join(known['shape'])} and zones {', '.join(known['zone']) or '(none)'}; "
                "write shape=SHAPE or zone=ZONE, each once",
            )
        place[key] = value
    return StockOut(match[1], float(match[3]) * 3600, float(match[4]) * 3600, **place)


def _read_trace(path: Path, format_name: str) -> Trace:
    """The history; what of it is left out is said."""
    from sluice.simulate.traces import read_trace

    trace = read_trace(path, format_name)
    for reason, count in sorted(trace.left_out.items()):
        click.echo(f"sluice: {path}: {count} {reason}" + ("" if "counted" in reason else ": left out"), err=True)
    return trace


def _columns(text: str | None, figures: type[Metrics | Figures], besides: tuple[str, ...]) -> list[str]:
    known = [field.name for field in fields(figures) if field.name not in besides]
    if text is None:
        return []
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            raise UsageError(f"--format-fields {name!r}: unknown figure", remedy=f"use {', '.join(known)}")
    return wanted


def _progress(name: str, jobs: int) -> Callable[[int], None]:
    """A line on a terminal that says how far the replay is."""
    if not sys.stderr.isatty():
        return lambda ended: None
    return lambda ended: click.echo(f"\r\033[K{name}: {ended} of {jobs} jobs", nl=False, err=True)


def _rows(described: Rows, wanted: list[str]) -> Rows:
    """The wanted ones, in their order; all where none is named."""
    known = {name: (name, words, unit) for name, words, unit in described}
    return [known.get(name, (name, name, 1)) for name in wanted] or described


def _print(
    first: str, names: list[str], measured: Sequence[object], described: Rows, wanted: list[str], *, lines: bool,
    bare: bool,
) -> None:  # fmt: skip
    """A table, or `lines` for programs. `bare`: without a header."""
    if lines:
        _print_lines(first, names, measured, wanted or [name for name, _, _ in described], bare)
    else:
        _print_table(names, measured, _rows(described, wanted), bare)


def _print_table(names: Sequence[str], measured: Sequence[object], rows: Rows, noheader: bool) -> None:
    """A figure a line, a policy a column."""
    lines = [] if noheader else [["", *names]]
    lines += [[words, *(_number(getattr(one, name) / unit) for one in measured)] for name, words, unit in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names) + 1)]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        click.echo("  ".join(cells).rstrip())


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.2f}"


def _print_lines(
    first: str, names: Sequence[str], measured: Sequence[object], wanted: list[str], noheader: bool
) -> None:
    """Seconds and percentages as they are, for programs."""
    if not noheader:
        click.echo("|".join([first, *wanted]))
    for name, one in zip(names, measured, strict=True):
        click.echo("|".join([name, *(f"{getattr(one, figure):.10g}" for figure in wanted)]))


def _document(trace: Trace, simulations: list[Simulation], measured: list[Metrics]) -> dict[str, object]:
    from sluice.simulate.traces import MICROSECOND

    return {
        "schema_version": SCHEMA_VERSION,
        "trace": _trace_document(trace),
        "policies": [
            {
                "policy": simulation.policy.name,
                "figures": asdict(one),
                "over_time": [
                    {
                        "at_s": sample.at / MICROSECOND,
                        "gpus": sample.gpus_milli / 1000,
                        "running": sample.running,
                        "pending": sample.pending,
                        "fragmented_percent": sample.fragmented_permille / 10,
                    }
                    for sample in simulation.replayed.samples
                ],
            }
            for simulation, one in zip(simulations, measured, strict=True)
        ],
    }


def _trace_document(trace: Trace) -> dict[str, object]:
    return {"format": trace.format, "jobs": len(trace.jobs), "left_out": dict(trace.left_out)}
