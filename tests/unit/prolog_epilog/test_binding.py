"""Bindings of tasks, from the kernel's words in trees of /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prolog_epilog.binding import binding_of
from prolog_epilog.devices import NodeDevice
from sluice.exchange.record import MOST_RECORD, JobRecord
from sluice.report.summaries import of_records
from tests.unit.prolog_epilog.examples import device, record

NUMA = {0: "0-7,16-23", 1: "8-15,24-31"}
GPU_0, GPU_1 = device(0, numa_node=0), device(1, numa_node=1)


def proc_with(folder: Path, cpus: str, memory: str) -> Path:
    (folder / "5").mkdir(parents=True, exist_ok=True)
    text = (
        f"Name:\tCpus_allowed_list:\t9\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory}\n"
    )
    (folder / "5/status").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("devices", "cpus", "memory", "expected"),
    [
        ([GPU_0], "0-3", "0", ("0", 4, 4, "0", "0", True)),
        ([GPU_0], "0-3,16-19", "0-1", ("0", 8, 8, "0", "0-1", True)),
        ([GPU_0], "6-9", "0-1", ("0", 4, 2, "0-1", "0-1", False)),
        ([GPU_0], "8-11", "0-1", ("0", 4, 0, "1", "0-1", False)),
        ([GPU_0], "0-3", "1", ("0", 4, 4, "0", "1", False)),
        ([GPU_0, GPU_1], "0-31", "0-1", ("0-1", 32, 32, "0-1", "0-1", True)),
    ],
)
def test_binding_next_to_gpus(tmp_path: Path, devices, cpus: str, memory: str, expected) -> None:
    found = binding_of(5, devices, NUMA, proc_with(tmp_path, cpus, memory))
    assert found is not None
    shown = (found.gpu_nodes, found.cpus, found.cpus_near, found.cpu_nodes, found.memory_nodes, found.agrees)
    assert shown == expected


def test_huge_pages_near_the_gpus_and_elsewhere(tmp_path: Path) -> None:
    proc, sys = proc_with(tmp_path / "proc", "0-3", "0-1"), tmp_path / "sys"

    def huge(*devices: NodeDevice) -> tuple[int | None, int | None]:
        found = binding_of(5, devices, NUMA, proc, sys)
        assert found is not None
        return found.huge_mib, found.huge_far_mib

    assert huge(GPU_0) == (None, None)  # a kernel without
    for node, size, count in ((0, 2048, 512), (0, 1048576, 2), (1, 2048, 0)):
        folder = sys / f"devices/system/node/node{node}/hugepages/hugepages-{size}kB"
        folder.mkdir(parents=True)
        (folder / "nr_hugepages").write_text(f"{count}\n")
    assert huge(GPU_0) == (1024 + 2048, 0)
    assert huge(GPU_1) == (0, 1024 + 2048)
    assert huge(GPU_0, GPU_1) == (1024 + 2048, None)


@pytest.mark.parametrize(
    ("devices", "numa", "pid"),
    [
        ([GPU_0], {0: "0-31"}, 5),  # one NUMA node: nothing is far
        ([GPU_0], {}, 5),
        ([device(0, numa_node=None)], NUMA, 5),
        ([device(0, numa_node=4)], NUMA, 5),
        ([GPU_0], NUMA, 6),  # has ended
        ([GPU_0], {0: "what", 1: "8"}, 5),
    ],
)
def test_nothing_is_said_where_nothing_is_known(tmp_path: Path, devices, numa: dict[int, str], pid: int) -> None:
    assert binding_of(pid, devices, numa, proc_with(tmp_path, "0-3", "0")) is None


def test_this_process() -> None:
    cpus = os.sched_getaffinity(0)
    found = binding_of(os.getpid(), [GPU_0], {0: ",".join(map(str, cpus)), 1: "4095"})
    assert found is not None
    assert (found.cpus, found.cpus_near, found.cpu_nodes) == (len(cpus), len(cpus), "0")


def test_a_record_keeps_few_and_counts_alike_ones(tmp_path: Path) -> None:
    """A user's tasks may be bound in as many ways as they like."""
    one = record()
    for task in range(1000):
        found = binding_of(5, [GPU_0], NUMA, proc_with(tmp_path, f"0-{task % 31}", "0"), tmp_path)
        assert found is not None
        one.note("binding", **found.detail("0"))
    assert len(one.events) == 16
    assert len(one.to_json()) < MOST_RECORD
    read = JobRecord.from_json(one.to_json(), "test")
    bindings = of_records([read]).bindings
    assert len(bindings) == 16
    assert bindings[0] | {"tasks": 0} == {
        "node": "n1", "tasks": 0, "step": "0", "gpu_nodes": "0", "cpus": 1, "cpus_near": 1, "cpu_nodes": "0",
        "memory_nodes": "0", "agrees": True, "huge_mib": None, "huge_far_mib": None,
    }  # fmt: skip
    assert bindings[0]["tasks"] > 30
