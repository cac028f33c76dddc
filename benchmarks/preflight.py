"""Preflights of jobs on a simulated fabric with faults and noise: what is named, who is drained, how long it takes.

The tests, their order and the verdict are the real ones (sluice/fabric/preflight.py). What is measured is simulated,
and the seconds of a preflight are by a model of the tests' durations (benchmarks/preflight_fabric.py); the core's own
processor time is measured. Each run draws a job of 2 to 128 nodes, one to four rails, in a part of the runs a class of
nodes that is healthy and four times slower, and up to three faults, or another job's traffic.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import click

from benchmarks import Result
from benchmarks.preflight_fabric import ACROSS, LATENCY_US, SLOWER, USUAL, Faults, SimulatedFabric, run_preflight
from sluice.fabric.preflight import Preflight
from sluice.fabric.tested import Class, Member, Part, PartKind
from sluice.fabric.usual import Measured

OPTIONS = [
    click.Option(["--runs"], type=click.IntRange(min=1), default=10_000, show_default=True, help="Preflights."),
    click.Option(["--nodes"], type=click.IntRange(min=2), default=512, show_default=True, help="Of the large job."),
    click.Option(["--large-runs"], type=click.IntRange(min=1), default=5, show_default=True, help="Of the large job."),
    click.Option(["--seed"], type=int, default=1, show_default=True, help="Of faults and noise."),
]
MUST = {"named_share": (">=", 0.999), "good_nodes_drained": ("==", 0), "preflight_s_max": ("<=", 10.0)}

_SIZES = (2, 3, 4, 6, 8, 8, 12, 16, 16, 24, 32, 48, 64, 128)
_PARTNERS = 2  # idle nodes below the first leaf switch, which a job of two or three nodes needs
_KINDS: tuple[PartKind, ...] = ("nic", "link", "clock", "memory", "pcie", "nvlink", "node")
_LEAF = 16


@dataclass(slots=True)
class Tally:
    """Counts over all runs."""

    injected: int = 0
    named: int = 0
    wrong: int = 0
    """Parts that were named and are good."""
    drained_good: int = 0
    congested_runs: int = 0


def site(count: int, chance: random.Random, gpus: int = 8) -> list[Member]:
    """A job's nodes, several below each leaf switch, one leaf switch a rail."""
    rails = chance.choice((1, 1, 2, 4))
    model = chance.choice(tuple(SLOWER))
    mixed = count > 8 and chance.random() < 0.2
    size = min(_LEAF, chance.choice((2, 4, 8, 16)))
    last = max(0, count // size - 1)
    return [
        Member(
            f"n{number}",
            tuple(f"mlx5_{rail}" for rail in range(rails)),
            tuple(f"l{min(number // size, last)}r{rail}" for rail in range(rails)),
            tuple(map(str, range(gpus))),
            kind := "old" if mixed and number % 2 else model,
            kind,
        )
        for number in range(count)
    ]


def faults_of(members: list[Member], chance: random.Random) -> Faults:
    """Up to three faults on different nodes, of which at most a third is faulty; sometimes another job's traffic.

    Each leaf switch keeps a good node: where it has none, nobody can tell a node's link from the leaf switch's own.
    """
    faults = Faults()
    most = min(3, max(1, len(members) // 3))
    for member in chance.sample(members, chance.randint(0, most)):
        if _neighbours_faulty(member, members, faults):
            continue
        kind = chance.choice(_KINDS)
        if kind == "node":
            faults.dead.add(Part("node", member.name))
            continue
        name = chance.choice(member.nics) if kind in ("nic", "link") else chance.choice(member.gpus)
        if kind == "link" and chance.random() < 0.3:
            faults.dead.add(Part("link", member.name, name))
        else:
            faults.slow[Part(kind, member.name, name)] = chance.uniform(0.05, 0.6)
    leaves = sorted({member.leaves[0] for member in members})
    if len(leaves) > 2 and chance.random() < 0.2:
        faults.busy = {leaf: chance.randint(1, 10) for leaf in chance.sample(leaves, chance.randint(1, 2))}
    elif len(leaves) > 3 and not faults.named() and chance.random() < 0.3:
        faults.slow[Part("uplink", chance.choice(leaves))] = chance.uniform(0.05, 0.6)
    return faults


def _neighbours_faulty(member: Member, members: list[Member], faults: Faults) -> bool:
    """Whether no good node would be left next to it."""
    faulty = {part.node for part in faults.named()}
    return all(one.name in faulty for one in members if one.leaves == member.leaves and one is not member)


def past(chance: random.Random) -> dict[Class, list[Measured]]:
    """Earlier good results of each class, of eight nodes."""

    def some(value: float, latency: float) -> list[Measured]:
        return [(value * chance.gauss(1, 0.03), latency * chance.gauss(1, 0.03), f"n{turn % 8}") for turn in range(32)]

    found: dict[Class, list[Measured]] = {}
    for model, share in SLOWER.items():
        for kind, value in USUAL.items():
            found[model, kind, False] = some(share * value, LATENCY_US.get(kind, 0.0))
        found[model, "pair", True] = some(share * USUAL["pair"] * ACROSS, LATENCY_US["pair"] * 1.6)
    return found


def count(tally: Tally, preflight: Preflight, faults: Faults) -> None:
    """What a verdict got right."""
    verdict = preflight.verdict()
    named = {part for finding in verdict.findings for part in finding.parts}
    wanted = faults.named()
    faulty_nodes = {part.node for part in wanted if part.kind != "uplink"}
    tally.injected += len(wanted)
    tally.named += len(wanted & named)
    tally.wrong += len(named - wanted)
    tally.drained_good += len(set(verdict.drain) - faulty_nodes)
    tally.congested_runs += bool(faults.busy)


def simulate(runs: int, seed: int) -> Tally:
    """Many preflights; a fifth of those of eight nodes and more have no earlier results to compare with."""
    tally = Tally()
    for run_number in range(runs):
        chance = random.Random(f"{seed}/{run_number}")
        members = site(chance.choice(_SIZES), chance)
        faults = faults_of(members, chance)
        partners = [
            Member(f"spare{number}", members[0].nics, members[0].leaves, (), members[0].model)
            for number in range(_PARTNERS)
        ]
        known = {} if len(members) >= 8 and chance.random() < 0.2 else past(chance)
        preflight = Preflight(members, None, known)
        fabric = SimulatedFabric([*members, *partners], faults, chance)
        run_preflight(preflight, fabric)
        if preflight.unresolved():
            preflight.add_partners(partners)
            run_preflight(preflight, fabric)
        count(tally, preflight, faults)
    return tally


def large(nodes: int, runs: int, seed: int) -> Iterator[tuple[float, float]]:
    """Seconds by the model and processor seconds of the core, of one job of many nodes with four rails and faults."""
    for run_number in range(runs):
        chance = random.Random(f"{seed}/large/{run_number}")
        members = [
            Member(
                f"n{number}",
                tuple(f"mlx5_{rail}" for rail in range(4)),
                tuple(f"l{number // 32}r{rail}" for rail in range(4)),
                tuple(map(str, range(8))),
                "h100",
                "h100",
            )
            for number in range(nodes)
        ]
        faults = faults_of(members, chance)
        fabric = SimulatedFabric(members, faults, chance)
        preflight = Preflight(members, None, past(chance))
        seconds, core = run_preflight(preflight, fabric)
        began = time.process_time()
        preflight.verdict()
        yield seconds, core + time.process_time() - began


def run(runs: int, nodes: int, large_runs: int, seed: int) -> Result:
    """Count verdicts of many jobs, and time one of many nodes."""
    tally = simulate(runs, seed)
    times = list(large(nodes, large_runs, seed))
    return Result(
        figures={
            "runs": float(runs),
            "faults": float(tally.injected),
            "named_share": tally.named / max(1, tally.injected),
            "good_parts_named": float(tally.wrong),
            "good_nodes_drained": float(tally.drained_good),
            "runs_with_other_traffic": float(tally.congested_runs),
            "preflight_s_max": max(seconds for seconds, _ in times),
            "core_cpu_s_p50": statistics.median(cpu for _, cpu in times),
        },
        spread={"preflight_s": [seconds for seconds, _ in times], "core_cpu_s": [cpu for _, cpu in times]},
    )
