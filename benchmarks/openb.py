"""GPU allocation on Alibaba's openb lists, by the protocol published with FGD, compared with the published policies.

Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX ATC
2023. The pods of a list, ordered by name, are shuffled, and random clones are appended until 130 percent of the
cluster's GPUs are asked; nothing departs. A(x) is the share of all GPUs that is allocated when x percent have been
asked, the mean over all arrivals that round to x; a run ends with the last one that counts for A(100). Then, too, the
fragmented share of what is idle is taken: for a typical shape all that is idle on nodes that cannot host it, else on
GPUs too small for it, in the mean over the shapes. Ties go to the lowest node of a random order. `fgd` knows the
list's typical shapes, as published, and `sluice` all of its shapes; `sluice_learnt` knows at any time only what has
arrived before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import Result, openb_moves
from benchmarks.openb_trace import (
    MILLI,
    Node,
    PodShape,
    add_nodes,
    read_nodes,
    read_pods,
    to_request,
    typical_shapes,
)
from sluice.base.errors import SluiceError
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.cluster import Cluster
from sluice.core.errors import check, new_error_text
from sluice.core.placement import Policy, set_workload

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OPTIONS = [
    click.Option(["--nodes"], type=_FILE, required=True, help="Node list in the openb format."),
    click.Option(["--pods"], type=_FILE, required=True, multiple=True, help="Pod list; may be given several times."),
    click.Option(["--published"], type=_FILE, help="Published results to reproduce, JSON."),
    click.Option(["--seeds"], type=click.IntRange(1), default=10, show_default=True, help="Runs for each list."),
    click.Option(["--first-seed"], type=int, default=42, show_default=True),
    click.Option(["--migrate"], is_flag=True, help="Also with pods that may be moved, for sluice and fgd."),
    click.Option(
        ["--savable-percent"],
        type=click.IntRange(0, 100),
        default=100,
        show_default=True,
        help="With --migrate: so many of the pods may be moved.",
    ),
]
# Of every list, whichever is given.
MUST = {"gain_over_fgd_least_points": (">", 0.0)}
# Of the lists that Sluice promises a figure for.
_LIST_MUST: dict[str, dict[str, tuple[str, float]]] = {
    "default": {
        "sluice_allocation_percent": (">=", 95.8),
        "gain_over_fgd_points": (">=", 0.5),
        "gain_over_fgd_worst_seed_points": (">", 0.0),
    },
    "gpuspec33": {"sluice_allocation_percent": (">=", 94.0)},
}
_PUBLISHED_AS = {
    "fgd": "FGD",
    "best_fit": "BestFit",
    "gpu_packing": "GpuPacking",
    "gpu_clustering": "GpuClustering",
    "dot_product": "DotProd",
    "random": "Random",
}
_MUST_REPRODUCE = ("fgd", "best_fit", "gpu_packing", "random")
_REPRODUCED_WITHIN = 0.3  # points

_POLICIES = {
    "sluice": Policy.SLUICE,
    "sluice_learnt": Policy.SLUICE,
    "fgd": Policy.FGD,
    "best_fit": Policy.BEST_FIT,
    "gpu_packing": Policy.GPU_PACKING,
    "gpu_clustering": Policy.GPU_CLUSTERING,
    "dot_product": Policy.DOT_PRODUCT,
    "random": Policy.RANDOM,
}
_ASKED_PERCENT = 130
_REPORTED_PERCENT = 100
_LEARN_EVERY = 200  # arrivals


def arrivals(pods: Sequence[PodShape], gpu_milli: int, seed: int) -> list[PodShape]:
    """The pods in the seed's order, with clones (or, in a large list, without some) until enough is asked."""
    chance = random.Random(seed)
    order, enough = list(pods), gpu_milli * _ASKED_PERCENT // 100
    chance.shuffle(order)
    asked = sum(pod.gpu_milli_in_all for pod in order)
    while asked > enough:
        asked -= order.pop(chance.randrange(len(order))).gpu_milli_in_all
    while asked + (clone := chance.choice(pods)).gpu_milli <= enough:
        order.append(clone)
        asked += clone.gpu_milli_in_all
    return order


@dataclass(frozen=True)
class Answer:
    """What one run shows."""

    allocation_percent: float
    fragmented_percent: float
    decision_mean_us: float


class Replay:
    """One seed's arrivals on one cluster."""

    def __init__(self, nodes: Sequence[Node], pods: Sequence[PodShape], seed: int) -> None:
        self.nodes, self.pods = nodes, pods
        self.gpu_milli = MILLI * sum(node.gpus for node in nodes)
        order = arrivals(pods, self.gpu_milli, seed)
        asked = np.cumsum([pod.gpu_milli_in_all for pod in order])
        asked_percent = np.rint(100 * asked / self.gpu_milli)
        self.order = order[: int(np.searchsorted(asked_percent, _REPORTED_PERCENT, side="right"))]
        self.counts = asked_percent[: len(self.order)] == _REPORTED_PERCENT
        self.asked = np.array([pod.gpu_milli_in_all for pod in self.order], dtype=np.int64)
        self.rank = list(range(len(nodes)))
        random.Random(seed + (1 << 32)).shuffle(self.rank)
        self.shapes = sorted(set(self.order), key=repr)
        number = {shape: i for i, shape in enumerate(self.shapes)}
        self.numbers = np.array([number[pod] for pod in self.order], dtype=np.uint32)

    def run(self, policy: Policy, learn: bool) -> Answer:
        """With the workload known beforehand, or learnt from the arrivals."""
        cluster, requests = self.prepare(policy, learn)
        placed = np.zeros(len(self.order), dtype=bool)
        step = _LEARN_EVERY if learn else len(self.order)
        elapsed_ns = 0
        for start in range(0, len(self.order), step):
            if start:
                self._set_workload(cluster, policy, self.order[:start])
            elapsed_ns += self._replay(cluster, policy, requests, placed, slice(start, start + step))
        cluster.check()
        return Answer(
            self.allocation_percent(placed), self._fragmented_percent(cluster), elapsed_ns / 1000 / len(self.order)
        )

    def prepare(self, policy: Policy, learn: bool = False) -> tuple[Cluster, Any]:
        """An idle cluster that knows the workload, unless it is to learn it, and the shapes as requests of its."""
        cluster = Cluster(len(self.nodes), max_allocations=len(self.order))
        add_nodes(cluster, self.nodes, MILLI)
        cluster.set_order(self.rank)
        if not learn:
            self._set_workload(cluster, policy, self.pods)
        requests = ffi.new("struct sluice_request[]", len(self.shapes))
        for i, shape in enumerate(self.shapes):
            to_request(cluster, shape).fill(requests[i])
        return cluster, requests

    def _set_workload(self, cluster: Cluster, policy: Policy, seen: Sequence[PodShape]) -> None:
        """FGD knows the typical shapes, as published; sluice all: those that ask most GPUs are often the rarest."""
        usual = typical_shapes(seen, percent=100 if policy is Policy.SLUICE else 95)
        set_workload(
            cluster, [(to_request(cluster, shape), count) for shape, count in usual[: lib.SLUICE_MAX_WORKLOAD]]
        )

    def _replay(self, cluster: Cluster, policy: Policy, requests: Any, placed: Any, part: slice) -> int:
        numbers, answers = self.numbers[part], placed[part]
        elapsed, text = ffi.new("uint64_t *"), new_error_text()
        check(
            lib.sluice_bench_replay(
                cluster.handle,
                policy,
                requests,
                len(self.shapes),
                ffi.from_buffer("uint32_t[]", numbers),
                len(numbers),
                ffi.from_buffer("bool[]", answers, require_writable=True),
                elapsed,
                text,
            ),
            text,
        )
        return int(elapsed[0])

    def allocation_percent(self, placed: Any) -> float:
        """A(100), from which of the arrivals were placed."""
        allocated_percent = np.round(100 * np.cumsum(self.asked * placed) / self.gpu_milli, 2)
        return float(allocated_percent[self.counts].mean())

    def _fragmented_percent(self, cluster: Cluster) -> float:
        free = np.zeros((len(self.nodes), max(node.gpus for node in self.nodes)))
        cpus = np.zeros(len(self.nodes))
        for number, node in enumerate(self.nodes):
            view = cluster.node(number)
            free[number, : node.gpus] = view.gpu_memory_mib_free
            cpus[number] = view.cpus_milli_free
        models = np.array([node.model for node in self.nodes])
        idle, fragments, weights = free.sum(), 0.0, 0
        for shape, count in typical_shapes(self.pods):
            weights += count
            fits = free >= max(shape.gpu_milli, 1)
            hosts = (cpus >= shape.cpus_milli) & (fits.sum(axis=1) >= shape.gpus) & bool(shape.gpus)
            if shape.models:
                hosts &= np.isin(models, shape.models)
            fragments += count * (idle - free[fits & hosts[:, None]].sum())
        return float(100 * fragments / weights / idle) if idle else 0.0


def list_name(path: Path) -> str:
    """``openb_pod_list_gpuspec33.csv`` is the list ``gpuspec33``."""
    return path.stem.removeprefix("openb_pod_list_")


def run(
    nodes: Path,
    pods: Sequence[Path],
    published: Path | None,
    seeds: int,
    first_seed: int,
    migrate: bool = False,
    savable_percent: int = 100,
) -> Result:
    """All policies on all lists and seeds; the same arrivals and tie-breaks for every policy."""
    cluster_nodes = read_nodes(nodes)
    expected = _read_published(published) if published else {}
    result = Result(figures={}, versions={"sluice_core": version()})
    for path in pods:
        name, shapes = list_name(path), read_pods(path)
        replays = [Replay(cluster_nodes, shapes, first_seed + i) for i in range(seeds)]
        runs = {
            policy: [replay.run(number, learn=policy == "sluice_learnt") for replay in replays]
            for policy, number in _POLICIES.items()
        }
        for policy, answers in runs.items():
            target = result.figures if policy.startswith("sluice") else result.peer
            for figure in ("allocation_percent", "fragmented_percent", "decision_mean_us"):
                values = [float(getattr(answer, figure)) for answer in answers]
                target[f"{name}_{policy}_{figure}"] = float(np.mean(values))
                result.spread[f"{name}_{policy}_{figure}"] = values
        gains = [
            ours.allocation_percent - theirs.allocation_percent
            for ours, theirs in zip(runs["sluice"], runs["fgd"], strict=True)
        ]
        result.figures[f"{name}_gain_over_fgd_points"] = float(np.mean(gains))
        result.spread[f"{name}_gain_over_fgd_points"] = gains
        result.figures[f"{name}_gain_over_fgd_worst_seed_points"] = min(gains)
        for figure, bound in _LIST_MUST.get(name, {}).items():
            result.must[f"{name}_{figure}"] = bound
        if migrate:
            openb_moves.measure(result, name, replays, savable_percent, first_seed)
        for policy, theirs in _PUBLISHED_AS.items():
            if name in expected and theirs in expected[name]:
                figure = f"{name}_{policy}_off_published_points"
                measured = result.peer[f"{name}_{policy}_allocation_percent"]
                result.figures[figure] = abs(measured - expected[name][theirs])
                if policy in _MUST_REPRODUCE:
                    result.must[figure] = ("<=", _REPRODUCED_WITHIN)
    result.figures["gain_over_fgd_least_points"] = min(
        result.figures[f"{list_name(path)}_gain_over_fgd_points"] for path in pods
    )
    return result


def _read_published(path: Path) -> dict[str, dict[str, float]]:
    """Published mean A(100) by list and policy."""
    try:
        lists = json.loads(path.read_text())["allocation_percent"]
        percent = str(_REPORTED_PERCENT)
        return {
            list_name(Path(name)): {policy: float(at[percent]["mean"]) for policy, at in policies.items()}
            for name, policies in lists.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SluiceError(
            f"{path}: {error!r}", remedy="it must map allocation_percent, list, policy, percent to a mean", usage=True
        ) from error
