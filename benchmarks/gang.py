"""Placing a gang of many nodes, all or nothing and on few switches, on a cluster in use.

The nodes of the list are put into racks, each kind of node into racks of its own, and racks into pods. Before each gang
a new random choice of nodes has a GPU in use, so that no two gangs see the same cluster. A gang is placed, committed
and released; start includes placing and committing. Starts during which the system ran something else on the processor
count in all figures but the one named so. The peer places the same gang's nodes one after another by first fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks import Result
from benchmarks.openb_trace import Node, read_nodes
from sluice.base.errors import SluiceError
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.errors import check, new_error_text
from sluice.core.placement import Policy, Request

OPTIONS = [
    click.Option(
        ["--nodes"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        required=True,
        help="Node list of the openb or the spot trace.",
    ),
    click.Option(["--gang-nodes"], type=click.IntRange(2, 4096), default=64, show_default=True),
    click.Option(["--gpus"], type=click.IntRange(1, 16), default=8, show_default=True, help="Of each node."),
    click.Option(["--rack-nodes"], type=click.IntRange(1), default=32, show_default=True, help="Nodes of a rack."),
    click.Option(["--pod-racks"], type=click.IntRange(1), default=8, show_default=True, help="Racks of a pod."),
    click.Option(
        ["--busy"], type=click.IntRange(0, 1000), default=500, show_default=True, help="Thousandths of nodes in use."
    ),
    click.Option(["--policy"], type=click.Choice([policy.label for policy in Policy]), default="sluice"),
    click.Option(["--decisions"], type=click.IntRange(1), default=20_000, show_default=True, help="Of each round."),
    click.Option(["--rounds"], type=click.IntRange(1), default=5, show_default=True),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"start_p99_us": ("<=", 100.0)}

_GPU_MEMORY_MIB = 81920


def build(nodes: Sequence[Node], rack_nodes: int, pod_racks: int) -> Cluster:
    """The nodes in racks and pods."""
    cluster = Cluster(len(nodes), max_switches=2 * len(nodes))
    shapes: dict[tuple[str, int], int] = {}
    racks: dict[int, tuple[int, int]] = {}  # by shape: the rack that is being filled, and how many nodes it has
    rack_count = pod = 0
    for node in nodes:
        key = (node.model, node.gpus)
        if key not in shapes:
            shapes[key] = cluster.add_shape(NodeShape((GpuShape(node.model, _GPU_MEMORY_MIB),) * node.gpus))
        rack, filled = racks.get(shapes[key], (0, rack_nodes))
        if filled == rack_nodes:
            if rack_count % pod_racks == 0:
                pod = cluster.add_switch()
            rack, filled, rack_count = cluster.add_switch(pod), 0, rack_count + 1
        racks[shapes[key]] = (rack, filled + 1)
        cluster.add_node(shapes[key], node.cpus_milli, node.host_memory_mib, rack)
    return cluster


def measure(
    cluster: Cluster, policy: Policy, gang: Request, *, node_by_node: bool, busy: int, decisions: int, seed: int
) -> dict[str, float]:
    """One round."""
    times = {name: np.zeros(decisions, dtype=np.uint32) for name in ("start_ns", "release_ns", "leaves")}
    result, text = ffi.new("struct sluice_bench_gang_result *"), new_error_text()
    for name, array in times.items():
        setattr(result, name, ffi.from_buffer("uint32_t[]", array, require_writable=True))
    interrupted = np.zeros(decisions, dtype=bool)
    result.interrupted = ffi.from_buffer("bool[]", interrupted, require_writable=True)
    check(
        lib.sluice_bench_gang(cluster.handle, policy, gang.c, node_by_node, busy, decisions, seed, result, text),
        text,
    )
    if not result.started:
        raise SluiceError("no gang found a place", remedy="ask for fewer nodes, or let fewer of them be busy")
    kept = {name: array[: result.started] for name, array in times.items()}
    start, release, interrupted = kept["start_ns"] / 1000, kept["release_ns"] / 1000, interrupted[: result.started]
    return {
        "start_p50_us": float(np.percentile(start, 50)),
        "start_p99_us": float(np.percentile(start, 99)),
        "start_p999_us": float(np.percentile(start, 99.9)),
        "start_p99_uninterrupted_us": float(np.percentile(start[~interrupted], 99)),
        "interrupted_percent": 100 * float(interrupted.mean()),
        "release_p50_us": float(np.percentile(release, 50)),
        "release_p99_us": float(np.percentile(release, 99)),
        "leaf_switches_mean": float(kept["leaves"].mean()),
        "refused": float(result.refused),
    }


def run(
    nodes: Path,
    gang_nodes: int,
    gpus: int,
    rack_nodes: int,
    pod_racks: int,
    busy: int,
    policy: str,
    decisions: int,
    rounds: int,
    seed: int,
) -> Result:
    """Medians over the rounds, each on a new cluster."""
    listed = read_nodes(nodes)
    gang = Request(gpus=gpus, nodes_min=gang_nodes, nodes_max=gang_nodes, cpus_milli=1000 * gpus)
    arms = {"ours": (Policy.from_name(policy), False), "peer": (Policy.FIRST_FIT, True)}
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    totals = None
    for number in range(rounds):
        for arm, (of_arm, node_by_node) in arms.items():
            cluster = build(listed, rack_nodes, pod_racks)
            totals = cluster.totals()
            measured[arm].append(
                measure(
                    cluster,
                    of_arm,
                    gang,
                    node_by_node=node_by_node,
                    busy=busy,
                    decisions=decisions if arm == "ours" else max(1, decisions // 10),
                    seed=seed + number,
                )
            )
    assert totals is not None
    names = list(measured["ours"][0])
    medians = {
        arm: {name: float(np.median([figures[name] for figures in found])) for name in names}
        for arm, found in measured.items()
    }
    return Result(
        figures={"nodes": float(totals.nodes), "gpus": float(totals.gpus), **medians["ours"]},
        peer=medians["peer"],
        spread={name: [figures[name] for figures in measured["ours"]] for name in names},
        versions={"sluice_core": version()},
    )
