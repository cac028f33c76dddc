"""How long `sluice fabric discover` takes, on how many leaf switches gangs are with what it wrote, and GPUs near NICs.

The fabric is ibsim's, asked by the real ibnetdiscover; the time is that of the whole process. Gangs are placed by the
core on a cluster in use, with the tree that was discovered; the peer is the same core without a topology, as on a site
that has no topology.conf. Both find the same nodes in use.

Jobs with as many NICs as GPUs are placed by the core on DGX H100 in use, next to the same jobs without NICs (peer of
the share: the node is chosen without a look at its NICs), and started by real daemons on five simulated ones, at level
place and (peer) by stock Slurm alone.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from benchmarks import Result
from benchmarks.fabric_nics import choose, count_pairs
from benchmarks.fabric_site import fat_tree, simulated, write_site
from sluice.base.errors import SluiceError
from sluice.core import version
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.placement import Policy, Request, place
from sluice.slurm.topology import Topology, read_topology

OPTIONS = [
    click.Option(["--nodes"], type=click.IntRange(2, 1500), default=1000, show_default=True),
    click.Option(["--runs"], type=click.IntRange(1), default=5, show_default=True, help="Discoveries."),
    click.Option(["--gangs"], type=click.IntRange(1), default=500, show_default=True),
    click.Option(["--gang-nodes"], type=click.IntRange(2), default=16, show_default=True),
    click.Option(
        ["--busy"], type=click.IntRange(0, 90), default=50, show_default=True, help="Percent of nodes in use."
    ),
    click.Option(["--decisions"], type=click.IntRange(1000), default=200_000, show_default=True, help="With NICs."),
    click.Option(["--jobs"], type=click.IntRange(10), default=80, show_default=True, help="On real daemons."),
    click.Option(["--seed"], type=int, default=1, show_default=True),
]
MUST = {"discover_s_max": ("<=", 5.0), "nics_p99_us_more": ("<=", 1.0), "near_of_possible": (">=", 1.0)}


def run(nodes: int, runs: int, gangs: int, gang_nodes: int, busy: int, decisions: int, jobs: int, seed: int) -> Result:
    """Discover, write, and place."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
        folder = Path(name)
        write_site(folder, nodes)
        with simulated(folder, fat_tree(nodes)) as environment:
            times = [_discover(folder, environment) for _ in range(runs)]
        tree = read_topology(folder / "topology.conf").topologies[0]
    leaf_of = {node: leaf for leaf, members in tree.groups().items() for node in members}
    ours = _leaves(tree, leaf_of, gangs, gang_nodes, busy, seed, topology=True)
    peer = _leaves(tree, leaf_of, gangs, gang_nodes, busy, seed, topology=False)
    chosen = choose(nodes, decisions, seed)
    mine, stock = (count_pairs(jobs, seed, sluice=sluice) for sluice in (True, False))
    return Result(
        figures={
            "discover_s_p50": float(np.median(times)),
            "discover_s_max": max(times),
            "nodes": float(len(leaf_of)),
            "leaf_switches_mean": float(np.mean(ours)),
            "place_p99_us": chosen.without_p99,
            "place_with_nics_p99_us": chosen.with_p99,
            "nics_p99_us_more": chosen.with_p99 - chosen.without_p99,
            "core_near_share": chosen.share,
            "core_other_node_share": chosen.elsewhere,
            "near_share": mine.near / mine.wanted,
            "near_of_possible": mine.near / mine.possible,
        },
        peer={
            "leaf_switches_mean": float(np.mean(peer)),
            "core_near_share": chosen.node_share,
            "near_share": stock.near / stock.wanted,
            "near_of_possible": stock.near / stock.possible,
        },
        spread={"discover_s": times},
        versions={"sluice_core": version()},
    )


def _discover(folder: Path, environment: dict[str, str]) -> float:
    program = [sys.executable, "-m", "sluice.main", "fabric", "discover", "--slurm-conf", str(folder), "--write"]
    program += ["--ibnetdiscover", "-", "--as", "tree"]
    start = time.perf_counter()
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise SluiceError(f"sluice fabric discover: {done.stderr.strip()}")
    return seconds


def _leaves(
    tree: Topology, leaf_of: dict[str, str], gangs: int, gang_nodes: int, busy: int, seed: int, *, topology: bool
) -> list[int]:
    """Leaf switches of each gang; before each, another choice of nodes is in use."""
    chance = random.Random(seed)
    names = list(leaf_of)
    gang = Request(gpus=8, nodes_min=gang_nodes, nodes_max=gang_nodes, cpus_milli=8000)
    found = []
    for _ in range(gangs):
        used = set(chance.sample(range(len(names)), len(names) * busy // 100))
        free = [name for number, name in enumerate(names) if number not in used]
        placed = place(_cluster(tree, free, leaf_of, topology=topology), Policy.SLUICE, gang)
        if placed is None:
            raise SluiceError("no gang found a place", remedy="ask for fewer nodes, or let fewer of them be busy")
        found.append(len({leaf_of[free[part.node]] for part in placed.parts}))
    return found


def _cluster(tree: Topology, free: list[str], leaf_of: dict[str, str], *, topology: bool) -> Cluster:
    """The nodes that are free; with `topology`, below the switches of the tree."""
    cluster = Cluster(len(free), max_switches=len(tree.switches))
    shape = cluster.add_shape(NodeShape((GpuShape("h100", 81920),) * 8))
    above = {child: switch.name for switch in tree.switches for child in switch.switches}
    known: dict[str, int] = {}
    if topology:
        for switch in reversed(tree.switches):  # the topmost is the last
            known[switch.name] = cluster.add_switch(known.get(above.get(switch.name, ""), 0))
    for name in free:
        cluster.add_node(shape, 64_000, 1 << 20, known.get(leaf_of[name], 0))
    return cluster
