"""The cluster that a history is replayed on: ``--nodes``.

Read are ``scontrol show node`` (one line a node or several), CSV files with a header of either published form

    sn,cpu_milli,memory_mib,gpu,model                       openb
    gpu_model,gpu_capacity_num,cpu_num,node_name            alibaba_spot

and, for a cluster of equal nodes, a word such as ``8x8`` or ``16x4:a100``: nodes, GPUs of each and their model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice.base.errors import UsageError
from sluice.simulate.traces.rows import Row, csv_rows

MAX_GPUS = 16  # of one node, as in the core
UNBOUNDED = 10**6  # CPUs, and GiB of memory, of a node whose file does not have them: they do not limit what runs there


@dataclass(frozen=True)
class ClusterNode:
    """One node; all its GPUs are of one kind."""

    name: str
    gpus: int
    model: str = ""
    cpus_milli: int = UNBOUNDED * 1000
    memory_mib: int = UNBOUNDED * 1024
    gpu_memory_mib: int = 0  # 0: not in the file


def read_nodes(source: str) -> list[ClusterNode]:
    """The nodes of a file or of a word like ``8x8:a100``. Raises UsageError with file, line and value."""
    word = re.fullmatch(r"(\d{1,6})x(\d{1,2})(?::([\w.-]{1,63}))?", source)
    path = Path(source)
    if word and not path.exists():
        count, gpus = int(word[1]), int(word[2])
        if not 1 <= count <= 131072 or not 1 <= gpus <= MAX_GPUS:
            raise UsageError(
                f"--nodes {source!r}: from 1x1 to 131072x{MAX_GPUS}",
                remedy="give COUNTxGPUS within these bounds, e.g. 64x8",
            )
        return [ClusterNode(f"node{index}", gpus, word[3] or "gpu") for index in range(count)]
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"--nodes {source!r}: {error.strerror}", remedy="give a file, or nodes x GPUs, e.g. 8x8:a100"
        ) from error
    if "NodeName=" in text:
        nodes = list(_scontrol(path, text))
    elif text.lstrip("\ufeff").startswith("gpu_model,"):
        nodes = list(_spot(path, text))
    else:
        nodes = list(_openb(path, text))
    if not any(node.gpus for node in nodes):
        raise UsageError(f"{path}: no node with a GPU", remedy="name another file, or give COUNTxGPUS")
    return nodes


def _openb(path: Path, text: str) -> Iterator[ClusterNode]:
    for row in csv_rows(path, text, ("sn", "cpu_milli", "memory_mib", "gpu", "model")):
        yield ClusterNode(
            name=row.text("sn"),
            gpus=row.integer("gpu", high=MAX_GPUS),
            model=row.text("model")[:63] or "gpu",
            cpus_milli=row.integer("cpu_milli", high=10**9),
            memory_mib=row.integer("memory_mib", high=2**30),
        )


def _spot(path: Path, text: str) -> Iterator[ClusterNode]:
    for row in csv_rows(path, text, ("gpu_model", "gpu_capacity_num", "cpu_num", "node_name")):
        yield ClusterNode(
            name=row.text("node_name"),
            gpus=row.integer("gpu_capacity_num", high=MAX_GPUS),
            model=row.text("gpu_model")[:63] or "gpu",
            cpus_milli=1000 * row.integer("cpu_num", high=10**6),
        )


def _scontrol(path: Path, text: str) -> Iterator[ClusterNode]:
    """Nodes of ``scontrol show node``. Nodes that are down or drained now were there in the history: they count."""
    fields: dict[str, str] = {}
    begin = 1
    for number, line in enumerate([*text.splitlines(), "NodeName="], start=1):
        for word in line.split():
            name, equals, value = word.partition("=")
            if name == "NodeName":
                if fields:
                    yield _scontrol_node(Row(path, begin, fields))
                fields, begin = {}, number
            if equals and value:
                fields.setdefault(name, value)


def _scontrol_node(row: Row) -> ClusterNode:
    gpus = shards = 0
    model = "gpu"
    gres = row.text("Gres")
    for word in re.split(r",(?![^(]*\))", gres) if gres not in {"", "(null)"} else ():
        match = re.fullmatch(r"(\w+)(?::([A-Za-z_][\w.-]*))?(?::(\d{1,9})([KMG]?))?(?:\(.*\))?", word, re.ASCII)
        if not match:
            raise row.wrong("Gres", word, "written as name[:type]:count")
        count = int(match[3] or 1) * {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}[match[4] or ""]
        if match[1] == "gpu":
            gpus += count
            model = match[2] or model
        elif match[1] == "shard":
            shards += count
    if gpus > MAX_GPUS:
        raise row.wrong("Gres", gres, f"at most {MAX_GPUS} GPUs")
    memory = row.integer("RealMemory", low=1, high=2**30) if row.text("RealMemory") else UNBOUNDED * 1024
    cpus = row.integer("CPUTot", low=1, high=10**6) if row.text("CPUTot") else UNBOUNDED
    return ClusterNode(
        name=row.text("NodeName"),
        gpus=gpus,
        model=model[:63],
        cpus_milli=1000 * cpus,
        memory_mib=memory,
        gpu_memory_mib=min(shards // gpus, 2**26) if gpus else 0,
    )
