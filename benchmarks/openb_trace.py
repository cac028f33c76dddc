"""Node and pod lists in the formats of Alibaba's cluster-trace-gpu-v2023 (openb) and of its spot trace's node list."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice_base.errors import SluiceError
from sluice_core.cluster import Cluster, GpuShape, NodeShape
from sluice_core.placement import Request

MILLI = 1000  # of a GPU, and of a CPU


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


def _rows(path: Path, kind: str, columns: Iterable[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or [])]
            if missing:
                raise SluiceError(
                    f"{path}: no column {missing[0]}", remedy=f"give a {kind} list in the openb format", usage=True
                )
            return list(reader)
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy=f"give the path of a {kind} list", usage=True) from error


def _number(path: Path, line: int, row: dict[str, str], column: str) -> int:
    text = row[column] or ""
    if not text.isdecimal():
        raise SluiceError(f"{path}:{line}: {column} is {text!r}", remedy="it must be a whole number", usage=True)
    return int(text)


def read_nodes(path: Path, host_memory_mib_per_cpu: int = 8192) -> list[Node]:
    """The nodes of an openb list, or of a spot list, which does not tell the host memory."""
    with_memory = ["cpu_milli", "memory_mib", "gpu", "model"]
    without_memory = ["gpu_model", "gpu_capacity_num", "cpu_num"]
    rows = _rows(path, "node", [])
    if rows and set(without_memory) <= set(rows[0]):
        nodes = []
        for line, row in enumerate(rows, start=2):
            cpus = _number(path, line, row, "cpu_num")
            gpus = _number(path, line, row, "gpu_capacity_num")
            nodes.append(Node(cpus * MILLI, cpus * host_memory_mib_per_cpu, gpus, row["gpu_model"]))
        return nodes
    return [
        Node(
            _number(path, line, row, "cpu_milli"),
            _number(path, line, row, "memory_mib"),
            _number(path, line, row, "gpu"),
            row["model"],
        )
        for line, row in enumerate(_rows(path, "node", with_memory), start=2)
    ]


def read_pods(path: Path) -> list[PodShape]:
    """The pods' shapes, in the order of the pods' names. Some lists have no column gpu_spec: any model will do."""
    columns = ["name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"]
    named = []
    for line, row in enumerate(_rows(path, "pod", columns), start=2):
        gpus, gpu_milli = _number(path, line, row, "num_gpu"), _number(path, line, row, "gpu_milli")
        if gpus == 0 or gpu_milli == 0:
            gpus = gpu_milli = 0
        if gpu_milli > MILLI or (gpus > 1 and gpu_milli != MILLI):
            raise SluiceError(
                f"{path}:{line}: {gpus} x {gpu_milli} gpu_milli",
                remedy="a pod asks whole GPUs, or a share of one",
                usage=True,
            )
        models = tuple(sorted({model for model in (row.get("gpu_spec") or "").split("|") if model}))
        cpus, memory = _number(path, line, row, "cpu_milli"), _number(path, line, row, "memory_mib")
        named.append((row["name"], PodShape(cpus, memory, gpus, gpu_milli, models)))
    if not any(shape.gpus for _, shape in named):
        raise SluiceError(f"{path}: no pod asks a GPU", remedy="give a pod list in the openb format", usage=True)
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
