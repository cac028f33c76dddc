"""Node and pod lists in the formats of Alibaba's cluster-trace-gpu-v2023 (openb) and of its spot trace's node list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import UsageError
from sluice.core.cluster import Cluster, GpuShape, NodeShape
from sluice.core.placement import Request
from sluice.simulate.traces.rows import Row, csv_rows

MILLI = 1000  # of a GPU, and of a CPU
MAX_GPUS, MAX_CPUS_MILLI, MAX_HOST_MEMORY_MIB = 16, 10**9, 2**30  # of one node, as in the core


@dataclass(frozen=True)
class Node:
    """One line of a node list."""

    cpus_milli: int
    host_memory_mib: int
    gpus: int
    model: str


@dataclass(frozen=True)
class PodShape:
    """What a pod asks; `gpu_milli` of one GPU, or `gpus` whole ones. `models`: those it accepts, none for all."""

    cpus_milli: int
    host_memory_mib: int
    gpus: int
    gpu_milli: int
    models: tuple[str, ...]

    @property
    def gpu_milli_in_all(self) -> int:
        """Thousandths of a GPU over all GPUs."""
        return self.gpus * self.gpu_milli


def read_text(path: Path, kind: str) -> str:
    """A list as text; what is not text is left to the reader of its columns."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy=f"give the path of a {kind} list") from error


def read_nodes(path: Path, host_memory_mib_per_cpu: int = 8192) -> list[Node]:
    """The nodes of an openb list, or of a spot list, which does not have the host memory."""
    text = read_text(path, "node")
    nodes = []
    if "gpu_capacity_num" in text.partition("\n")[0]:
        for row in csv_rows(path, text, ("gpu_model", "gpu_capacity_num", "cpu_num")):
            cpus = row.integer("cpu_num", high=MAX_CPUS_MILLI // MILLI)
            memory = min(cpus * host_memory_mib_per_cpu, MAX_HOST_MEMORY_MIB)
            nodes.append(Node(cpus * MILLI, memory, row.integer("gpu_capacity_num", high=MAX_GPUS), _model(row)))
    else:
        for row in csv_rows(path, text, ("cpu_milli", "memory_mib", "gpu", "model")):
            cpus_milli = row.integer("cpu_milli", high=MAX_CPUS_MILLI)
            memory = row.integer("memory_mib", high=MAX_HOST_MEMORY_MIB)
            nodes.append(Node(cpus_milli, memory, row.integer("gpu", high=MAX_GPUS), _model(row)))
    if not any(node.gpus for node in nodes):
        raise UsageError(f"{path}: no node with a GPU", remedy="give a node list in the openb or the spot format")
    return nodes


def _model(row: Row) -> str:
    return row.text("model" if "model" in row.fields else "gpu_model")[:63] or "gpu"


def read_pods(path: Path) -> list[PodShape]:
    """The pods' shapes, in the order of the pods' names. Some lists have no column gpu_spec: any model will do."""
    columns = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    named = []
    for row in csv_rows(path, read_text(path, "pod"), columns):
        gpus, gpu_milli = row.integer("num_gpu"), row.integer("gpu_milli")
        if gpus == 0 or gpu_milli == 0:
            gpus = gpu_milli = 0
        if gpu_milli > MILLI or (gpus > 1 and gpu_milli != MILLI):
            raise UsageError(
                f"{path}:{row.line}: {gpus} x {gpu_milli} gpu_milli",
                remedy="a pod asks whole GPUs, or a share of one",
            )
        models = tuple(sorted({model for model in row.text("gpu_spec").split("|") if model}))
        cpus, memory = (
            row.integer("cpu_milli", high=MAX_CPUS_MILLI),
            row.integer("memory_mib", high=MAX_HOST_MEMORY_MIB),
        )
        named.append((row.text("name"), PodShape(cpus, memory, gpus, gpu_milli, models)))
    if not any(shape.gpus for _, shape in named):
        raise UsageError(f"{path}: no pod asks a GPU", remedy="give a pod list in the openb format")
    return [shape for _, shape in sorted(named, key=lambda item: item[0])]


def typical_shapes(pods: Sequence[PodShape], percent: int = 95) -> list[tuple[PodShape, int]]:
    """The most frequent shapes, host memory aside, that together cover `percent` of the pods, with their counts."""
    counts = Counter(PodShape(pod.cpus_milli, 0, pod.gpus, pod.gpu_milli, pod.models) for pod in pods)
    typical, covered = [], 0
    for shape, count in sorted(counts.items(), key=lambda item: (-item[1], repr(item[0]))):
        if covered * 100 >= percent * len(pods):
            break
        typical.append((shape, count))
        covered += count
    return typical


def add_nodes(cluster: Cluster, nodes: Sequence[Node], gpu_memory_mib: dict[str, int] | int) -> None:
    """Add the nodes; `gpu_memory_mib` is one size for all GPUs, or says each model's."""
    shapes: dict[tuple[str, int], int] = {}
    for node in nodes:
        key = (node.model, node.gpus)
        if key not in shapes:
            memory = gpu_memory_mib if isinstance(gpu_memory_mib, int) else gpu_memory_mib[node.model]
            shapes[key] = cluster.add_shape(NodeShape((GpuShape(node.model, memory),) * node.gpus))
        cluster.add_node(shapes[key], node.cpus_milli, node.host_memory_mib)


def to_request(cluster: Cluster, pod: PodShape, gpu_memory_mib: int = MILLI) -> Request:
    """What the pod asks, its share taken of a GPU of `gpu_memory_mib`."""
    return Request(
        gpus=pod.gpus,
        gpu_memory_mib=0 if pod.gpu_milli in (0, MILLI) else max(1, pod.gpu_milli * gpu_memory_mib // MILLI),
        cpus_milli=pod.cpus_milli,
        host_memory_mib=pod.host_memory_mib,
        models=cluster.models(pod.models),
    )
