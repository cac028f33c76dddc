"""GPU allocation when jobs arrive, wait, run and leave, and ask for as much as there is, or more.

Pods of an openb list, drawn at random with their own run times, arrive at random (a Poisson process) so that the GPU
time asked is `--load` percent of the cluster's. Those that find no place wait in order of arrival and are tried again
whenever a pod leaves; others may overtake, as under backfill, but for one that is out of patience a node is set aside
until it has started. Measured after a warm-up, over the second half of the arrivals, which are the same for all
policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks import Result
from benchmarks.openb_trace import (
    MILLI,
    Node,
    PodShape,
    add_nodes,
    read_nodes,
    read_pods,
    read_text,
    to_request,
    typical_shapes,
)
from sluice.core import version
from sluice.core._bench import ffi, lib
from sluice.core.cluster import Cluster
from sluice.core.errors import CoreError, check, new_error_text
from sluice.core.placement import Policy, place, set_workload
from sluice.simulate.traces.rows import MAX_SECONDS, csv_rows

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OPTIONS = [
    click.Option(["--nodes"], type=_FILE, required=True, help="Node list in the openb format."),
    click.Option(["--pods"], type=_FILE, required=True, help="Pod list in the openb format."),
    click.Option(["--policy"], type=click.Choice([policy.label for policy in Policy]), default="sluice"),
    click.Option(
        ["--peer"],
        type=click.Choice([policy.label for policy in Policy]),
        multiple=True,
        default=("fgd", "first-fit"),
        show_default=True,
        help="May be given several times; the first one's figures are shown next to ours.",
    ),
    click.Option(["--load"], type=click.IntRange(1, 1000), default=110, show_default=True, help="Percent asked."),
    click.Option(["--arrivals"], type=click.IntRange(1000), default=400_000, show_default=True),
    click.Option(
        ["--longest"], type=click.IntRange(1), default=21600, show_default=True, help="Run times are cut to it (s)."
    ),
    click.Option(["--patience"], type=click.IntRange(0), default=1800, show_default=True, help="Seconds."),
    click.Option(
        ["--set-aside"], type=click.IntRange(0), default=12, show_default=True, help="At most so many nodes at a time."
    ),
    click.Option(["--seeds"], type=click.IntRange(1), default=3, show_default=True),
    click.Option(["--first-seed"], type=int, default=42, show_default=True),
]
MUST = {"gpu_allocation_percent": (">=", 95.0)}

_JOB = np.dtype([("arrival", "u8"), ("duration", "u8"), ("request", "u4")], align=True)


def read_run_times(path: Path, longest: int) -> list[int]:
    """Seconds from creation to deletion, at least one, in the order of the pods' names."""
    named = []
    for row in csv_rows(path, read_text(path, "pod"), ("name", "creation_time", "deletion_time")):
        seconds = row.integer("deletion_time", high=MAX_SECONDS) - row.integer("creation_time", high=MAX_SECONDS)
        named.append((row.text("name"), min(max(seconds, 1), longest)))
    return [seconds for _, seconds in sorted(named, key=lambda item: item[0])]


class Load:
    """One seed's arrivals on a list of nodes."""

    def __init__(
        self,
        nodes: Sequence[Node],
        pods: Sequence[PodShape],
        seconds: Sequence[int],
        load: int,
        arrivals: int,
        seed: int,
    ) -> None:
        self.nodes, self.pods = nodes, pods
        self.shapes = sorted(set(pods), key=repr)
        number = {shape: index for index, shape in enumerate(self.shapes)}
        chance = np.random.default_rng(seed)
        drawn = chance.integers(len(pods), size=arrivals)
        durations = np.array(seconds)[drawn]
        gpu_seconds = np.array([pod.gpu_milli_in_all for pod in pods])[drawn] * durations / MILLI
        gpus = sum(node.gpus for node in nodes)
        between = float(gpu_seconds.mean()) / (gpus * load / 100)
        self.until = int(between * arrivals)
        self.jobs = np.zeros(arrivals, dtype=_JOB)
        self.jobs["arrival"] = np.cumsum(chance.exponential(between, size=arrivals))
        self.jobs["duration"] = durations
        self.jobs["request"] = np.array([number[pod] for pod in pods])[drawn]

    def run(self, policy: Policy, patience: int, set_aside: int) -> dict[str, float]:
        """The figures of one policy."""
        cluster = Cluster(len(self.nodes), max_allocations=len(self.jobs))
        add_nodes(cluster, self.nodes, MILLI)
        set_workload(cluster, [(to_request(cluster, shape), count) for shape, count in typical_shapes(self.pods)])
        requests = ffi.new("struct sluice_request[]", len(self.shapes))
        for index, shape in enumerate(self.shapes):
            to_request(cluster, shape).fill(requests[index])
        wait = np.zeros(len(self.jobs), dtype=np.uint64)
        result, text = ffi.new("struct sluice_bench_load_result *"), new_error_text()
        result.wait = ffi.from_buffer("uint64_t[]", wait, require_writable=True)
        since = self.until // 2
        check(
            lib.sluice_bench_load(
                cluster.handle,
                policy,
                requests,
                len(self.shapes),
                ffi.from_buffer("struct sluice_bench_job[]", self.jobs),
                len(self.jobs),
                patience,
                set_aside,
                since,
                self.until,
                result,
                text,
            ),
            text,
        )
        totals, span = cluster.totals(), self.until - since
        counted = (self.jobs["arrival"] >= since) & (self.jobs["arrival"] < self.until)
        has_started = wait != np.uint64(2**64 - 1)
        started = wait[counted & has_started]
        large = np.array([shape.gpus > 1 for shape in self.shapes])[self.jobs["request"]]
        return {
            "gpu_allocation_percent": 100 * result.used_mib_s / (totals.gpu_memory_mib * span),
            "cpu_allocation_percent": 100 * result.used_cpu_s / (totals.cpus_milli / MILLI * span),
            "wait_p50_s": float(np.percentile(started, 50)),
            "wait_p99_s": float(np.percentile(started, 99)),
            "waiting_mean": result.waiting_s / span,
            "several_gpus_started_percent": 100 * float(has_started[counted & large].mean()),
        }


def possible(nodes: Sequence[Node], pods: Sequence[PodShape]) -> set[PodShape]:
    """The shapes that an idle cluster can host."""
    cluster, fit = Cluster(len(nodes)), set()
    add_nodes(cluster, nodes, MILLI)
    for shape in set(pods):
        try:
            place(cluster, Policy.FIRST_FIT, to_request(cluster, shape))
            fit.add(shape)
        except CoreError as error:
            if error.code != lib.SLUICE_ERROR_NEVER:
                raise
    return fit


def run(
    nodes: Path,
    pods: Path,
    policy: str,
    peer: Sequence[str],
    load: int,
    arrivals: int,
    longest: int,
    patience: int,
    set_aside: int,
    seeds: int,
    first_seed: int,
) -> Result:
    """Means over the seeds."""
    cluster_nodes, seconds = read_nodes(nodes), read_run_times(pods, longest)
    listed = read_pods(pods)
    hostable = possible(cluster_nodes, listed)
    kept = [(pod, time) for pod, time in zip(listed, seconds, strict=True) if pod in hostable]
    loads = [
        Load(cluster_nodes, [pod for pod, _ in kept], [time for _, time in kept], load, arrivals, first_seed + number)
        for number in range(seeds)
    ]
    measured = {
        name: [each.run(Policy.from_name(name), patience, set_aside) for each in loads]
        for name in dict.fromkeys([policy, *peer])
    }
    names = list(measured[policy][0])
    means = {
        name: {figure: float(np.mean([run[figure] for run in runs])) for figure in names}
        for name, runs in measured.items()
    }
    beside = means[peer[0]] if peer else {}
    others = {f"{name}_{figure}": value for name in peer[1:] for figure, value in means[name].items()}
    return Result(
        figures=means[policy] | {"pods_that_never_fit": float(len(listed) - len(kept))},
        peer=beside | others,
        spread={
            f"{name}_gpu_allocation_percent": [run["gpu_allocation_percent"] for run in runs]
            for name, runs in measured.items()
        },
        versions={"sluice_core": version()},
    )
