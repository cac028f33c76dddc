"""Grouping of 100,000 GPUs into classes, all strategies composed; as the peer, a plain sort of them by model."""

from __future__ import annotations

import statistics
import time

import click

from benchmarks import Result
from gres_probe.group import group
from gres_probe.inventory import Gpu, Inventory, Link, LinkType
from policy.grouping import Grouping

OPTIONS = [
    click.Option(["--gpus"], type=click.IntRange(min=8), default=100_000, show_default=True, help="How many GPUs."),
    click.Option(["--runs"], type=click.IntRange(min=1), default=3, show_default=True, help="Repetitions."),
]
MUST = {"group_100k_s": ("<=", 5.0)}

_MODELS = (
    ("nvidia", "NVIDIA H100 80GB HBM3", 81559, "9.0", LinkType.NVLINK, 989.0),
    ("nvidia", "NVIDIA A100-SXM4-40GB", 40960, "8.0", LinkType.NVLINK, 312.0),
    ("nvidia", "NVIDIA L40S", 46068, "8.9", LinkType.SYSTEM, 362.0),
    ("amd", "AMD Instinct MI300X", 196592, "gfx942", LinkType.XGMI, 1307.0),
    ("intel", "Intel(R) Data Center GPU Max 1550", 131072, "12.60.7", LinkType.XELINK, 420.0),
)
_GROUPING = {
    "strategies": [
        {"by": "model"},
        {"by": "memory", "step": "8G"},
        {"by": "compatibility", "driver": True},
        {"by": "link-domain"},
        {"by": "performance", "threshold": 0.05},
        {
            "by": "expression",
            "classes": {"training": "memory_gib >= 80 and link_size >= 4", "small": "memory_gib < 48 or sm < 8.9"},
        },
    ]
}


def inventories(count: int) -> tuple[list[Inventory], dict[str, float]]:
    """Nodes of eight GPUs of five models, each GPU with a measured performance of its own."""
    nodes, measured = [], {}
    for number in range((count + 7) // 8):
        vendor, model, memory, capability, link, speed = _MODELS[number % len(_MODELS)]
        gpus = [
            Gpu(
                vendor=vendor,
                index=place,
                uuid=f"GPU-{number}-{place}",
                model=model,
                device_file=f"/dev/gpu{place}",
                minor=place,
                pci_address=f"0000:{place:02x}:00.0",
                memory_total_mib=memory,
                memory_usable_mib=memory - 512,
                capability=capability,
                driver_version=f"{550 + number % 3}.54",
            )
            for place in range(min(8, count - number * 8))
        ]
        for place, gpu in enumerate(gpus):
            measured[gpu.uuid] = speed * (1 + ((number * 7 + place) % 40) / 1000)
        links = [[Link(LinkType.SELF if i == j else link, 1) for j in range(len(gpus))] for i in range(len(gpus))]
        nodes.append(Inventory(f"node{number:05}", gpus, links))
    return nodes, measured


def run(gpus: int, runs: int) -> Result:
    """Group them, and sort them by model."""
    nodes, measured = inventories(gpus)
    grouping = Grouping.model_validate(_GROUPING)
    times, sorts = [], []
    for _ in range(runs):
        start = time.perf_counter()
        classes = group(nodes, grouping, measured=measured)
        classes.features()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        by_model: dict[str, list[str]] = {}
        for gpu in sorted((gpu for node in nodes for gpu in node.gpus), key=lambda gpu: gpu.model):
            by_model.setdefault(gpu.model, []).append(gpu.uuid)
        sorts.append(time.perf_counter() - start)
    scale = 100_000 / gpus
    return Result(
        figures={"group_100k_s": statistics.median(times) * scale, "classes": len(classes.classes)},
        peer={"group_100k_s": statistics.median(sorts) * scale, "classes": len(by_model)},
        spread={"group_100k_s": [seconds * scale for seconds in times]},
    )
