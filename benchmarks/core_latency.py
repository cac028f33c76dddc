"""How long the core takes to place, commit and release with the sluice policy, timed in C.

The cluster is kept at a steady use of its GPU memory: random allocations end to make room for each next request.
Requests are an openb list's pods with random GPU memory and host memory, to the MiB, so that most are new to the core.
A second, untimed run compares each decision with the best of scoring every node. Larger clusters are made of the same
nodes over again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import Result
from benchmarks.openb_trace import Node, PodShape, add_nodes, read_nodes, read_pods, to_request, typical_shapes
from sluice.base.errors import SluiceError
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.cluster import Cluster
from sluice.core.errors import check, new_error_text
from sluice.core.placement import Policy, set_workload

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OPTIONS = [
    click.Option(["--nodes"], type=_FILE, required=True, help="Node list in the openb or the spot format."),
    click.Option(["--pods"], type=_FILE, required=True, help="Pod list in the openb format."),
    click.Option(["--decisions"], type=click.IntRange(1000), default=1_000_000, show_default=True),
    click.Option(["--checked"], type=click.IntRange(0), default=20_000, show_default=True, help="Decisions compared."),
    click.Option(["--large-gpus"], type=click.IntRange(1), default=99_392, show_default=True),
    click.Option(["--use-percent"], type=click.IntRange(1, 100), default=90, show_default=True),
    click.Option(["--seeds"], type=click.IntRange(1), default=3, show_default=True, help="Timed runs of each size."),
    click.Option(["--first-seed"], type=click.IntRange(0), default=1, show_default=True),
    click.Option(["--peer-decisions"], type=click.IntRange(0), default=2000, show_default=True, help="Of FGD."),
]
MUST = {
    "place_p99_us": ("<=", 10.0),
    "place_p999_us": ("<=", 100.0),
    "large_place_p99_us": ("<=", 25.0),
    "growth_exponent_p50": ("<=", 0.3),
    "wrong_decisions": ("==", 0.0),
}

# GPU memory of the models that the lists name; of others, and of shares as the pods ask them.
_MEMORY_MIB = {
    "A10": 24_564,
    "A100-SXM4-80GB": 81_920,
    "A800-SXM4-80GB": 81_920,
    "H800": 81_920,
    "P100": 16_384,
    "T4": 16_384,
    "V100M16": 16_384,
    "V100M32": 32_768,
}
_OTHER_MEMORY_MIB = 24_576


def grow(nodes: Sequence[Node], gpus: int) -> list[Node]:
    """The nodes over again until they have `gpus` GPUs; those that would be too many are left out."""
    grown: list[Node] = []
    have = without = 0
    for node in itertools.cycle(nodes):
        if have == gpus or without == len(nodes):
            return grown
        if have + node.gpus <= gpus:
            grown.append(node)
            have += node.gpus
            without = 0
        else:
            without += 1
    return grown


class Load:
    """A cluster with nothing on it, and the pods that will ask for it."""

    def __init__(self, nodes: Sequence[Node], pods: Sequence[PodShape]) -> None:
        self.gpus = sum(node.gpus for node in nodes)
        models = {node.model for node in nodes}
        self.cluster = Cluster(len(nodes))
        add_nodes(self.cluster, nodes, {model: _MEMORY_MIB.get(model, _OTHER_MEMORY_MIB) for model in models})
        # A pod that accepts certain models is asked without them where the cluster has none of them.
        requests = [
            to_request(self.cluster, pod if models & set(pod.models) else _any_model(pod), _OTHER_MEMORY_MIB)
            for pod in pods
        ]
        self.pool, self.pool_count = ffi.new("struct sluice_request[]", len(requests)), len(requests)
        for index, request in enumerate(requests):
            request.fill(self.pool[index])
        usual = [(_any_model(shape), count) for shape, count in typical_shapes(pods)]
        set_workload(self.cluster, [(to_request(self.cluster, pod, _OTHER_MEMORY_MIB), n) for pod, n in usual])

    def run(self, policy: Policy, use_percent: int, decisions: int, seed: int, checked: bool = False) -> dict[str, Any]:
        """Times in microseconds, and what the run counted."""
        start, release = np.zeros(decisions, dtype=np.uint32), np.zeros(decisions, dtype=np.uint32)
        result, text = ffi.new("struct sluice_bench_steady_result *"), new_error_text()
        result.start_ns = ffi.from_buffer("uint32_t[]", start, require_writable=True)
        result.release_ns = ffi.from_buffer("uint32_t[]", release, require_writable=True)
        result.check = checked
        check(
            lib.sluice_bench_steady(
                self.cluster.handle,
                policy,
                self.pool,
                self.pool_count,
                use_percent * 10,
                decisions,
                seed,
                result,
                text,
            ),
            text,
        )
        return {
            "place": start / 1000,
            "release": release[: result.releases] / 1000,
            "refused": result.refused,
            "wrong": result.wrong,
            "use_percent": result.use_permille / 10,
        }

    def new_share(self, decisions: int, seed: int) -> float:
        """The share of the decisions that were for a request never seen before."""
        distinct, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_bench_shapes(self.pool, self.pool_count, decisions, seed, distinct, text), text)
        return float(distinct[0] / decisions)


def _any_model(pod: PodShape) -> PodShape:
    return PodShape(pod.cpus_milli, pod.host_memory_mib, pod.gpus, pod.gpu_milli, ())


def run(nodes: Path, pods: Path, decisions: int, large_gpus: int, use_percent: int, **options: Any) -> Result:
    """The list's own size, then the large one; medians over the seeds of each run's percentiles."""
    node_list, pod_list = read_nodes(nodes), read_pods(pods)
    gpus = sum(node.gpus for node in node_list)
    if large_gpus <= gpus:
        raise SluiceError(
            f"--large-gpus {large_gpus}: the node list has {gpus}", remedy="give a larger number", usage=True
        )
    seeds = [options["first_seed"] + i for i in range(options["seeds"])]
    result = Result(figures={}, versions={"sluice_core": version(), "numpy": np.__version__})
    wrong = 0
    for prefix, listed in (("", node_list), ("large_", grow(node_list, large_gpus))):
        spread: dict[str, list[float]] = {}
        for seed in seeds:
            load = Load(listed, pod_list)
            answer = load.run(Policy.SLUICE, use_percent, decisions, seed)
            for what in ("place", "release"):
                for name, percentile in (("p50", 50), ("p99", 99), ("p999", 99.9)):
                    figure = f"{prefix}{what}_{name}_us"
                    spread.setdefault(figure, []).append(float(np.percentile(answer[what], percentile)))
            for name in ("use_percent", "refused"):
                spread.setdefault(f"{prefix}{name}", []).append(float(answer[name]))
        result.figures |= {figure: float(np.median(values)) for figure, values in spread.items()}
        result.figures[f"{prefix}gpus"] = float(load.gpus)
        result.figures[f"{prefix}never_seen_before_share"] = load.new_share(decisions, seeds[-1])
        result.spread |= spread
        if options["checked"]:
            # Fewer where each costs more to check.
            checked = max(1, options["checked"] * len(node_list) // len(listed))
            wrong += Load(listed, pod_list).run(Policy.SLUICE, use_percent, checked, seeds[0], checked=True)["wrong"]
            result.figures[f"{prefix}checked_decisions"] = float(checked)
        if options["peer_decisions"]:
            fgd = Load(listed, pod_list).run(Policy.FGD, use_percent, options["peer_decisions"], seeds[0])["place"]
            result.peer |= {
                f"{prefix}place_{name}_us": float(np.percentile(fgd, p)) for name, p in (("p50", 50), ("p99", 99))
            }
    result.figures["wrong_decisions"] = float(wrong)
    figures = result.figures
    result.figures["growth_exponent_p50"] = math.log(
        figures["large_place_p50_us"] / figures["place_p50_us"]
    ) / math.log(figures["large_gpus"] / figures["gpus"])
    return result
