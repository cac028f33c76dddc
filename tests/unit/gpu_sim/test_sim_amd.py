"""AMD SMI through the unmodified amdsmi."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sim_node import Node

from sluice.base.errors import UsageError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("amdsmi") is None, reason="the package amdsmi is missing")

SOURCES = Path(__file__).parents[3] / "gpu_sim/src"


@pytest.fixture
def mi300x(make_node: Callable[..., Node]) -> Node:
    return make_node("mi300x-platform")


def test_inventory_is_the_platforms(mi300x: Node) -> None:
    found = mi300x.run(
        """
import json, amdsmi as a
a.amdsmi_init()
hs = a.amdsmi_get_processor_handles()
print(json.dumps([{
    "bdf": a.amdsmi_get_gpu_device_bdf(h), "uuid": a.amdsmi_get_gpu_device_uuid(h),
    "asic": a.amdsmi_get_gpu_asic_info(h),
    "vram": a.amdsmi_get_gpu_vram_usage(h), "total": a.amdsmi_get_gpu_memory_total(h, a.AmdSmiMemoryType.VRAM),
    "numa": a.amdsmi_topo_get_numa_node_number(h), "nodes": a.amdsmi_get_gpu_enumeration_info(h),
    "driver": a.amdsmi_get_gpu_driver_info(h)["driver_version"], "cap": a.amdsmi_get_power_cap_info(h),
    "links": [list(a.amdsmi_topo_get_link_type(h, o).values()) for o in hs],
    "peers": [link["bdf"] for link in a.amdsmi_get_link_metrics(h)["links"][:7]],
    "partition": a.amdsmi_get_gpu_compute_partition(h),
} for h in hs], default=str))
"""
    )
    assert [gpu["bdf"][5:7] for gpu in found] == ["05", "26", "46", "65", "85", "a6", "c6", "e5"]
    first = found[0]
    assert first["uuid"] == mi300x.get(0, "uuid")
    assert first["asic"]["market_name"] == "AMD Instinct MI300X"
    assert (first["asic"]["target_graphics_version"], first["asic"]["num_compute_units"]) == ("gfx942", 304)
    assert first["vram"] == {"vram_total": 196592, "vram_used": 284}  # the library counts what the driver keeps as used
    assert first["total"] == 196592 << 20
    assert [gpu["numa"] for gpu in found] == [0] * 4 + [1] * 4
    assert [(gpu["nodes"]["drm_render"], gpu["nodes"]["drm_card"]) for gpu in found] == [
        (128 + place, place) for place in range(8)
    ]
    assert (first["driver"], first["cap"]["power_cap"]) == ("6.10.5", 750_000_000)
    assert first["links"] == [[0, 0], *[[1, 2]] * 7]  # hops, type xGMI
    assert first["peers"] == [gpu["bdf"] for gpu in found[1:]]
    assert first["partition"] == "SPX"


def test_a_sick_gpu_shows_it(mi300x: Node) -> None:
    mi300x.set(3, temperature=99, power=600, utilisation=88, ecc_uncorrected=2, ecc_corrected=7, retired_double=2)
    mi300x.set(3, throttle="hw_thermal", clock_graphics=900)
    mi300x.set(3, link0="down", process="4194000:3G:compute:train", memory_used="1G", pcie_replays=4)
    found = mi300x.run(
        """
import json, amdsmi as a
a.amdsmi_init()
hs = a.amdsmi_get_processor_handles()
h = hs[3]
hot, now = a.AmdSmiTemperatureType.HOTSPOT, a.AmdSmiTemperatureMetric
print(json.dumps({
    "temperature": [a.amdsmi_get_temp_metric(h, hot, m) for m in (now.CURRENT, now.CRITICAL, now.EMERGENCY)],
    "power": a.amdsmi_get_power_info(h)["socket_power"], "activity": a.amdsmi_get_gpu_activity(h)["gfx_activity"],
    "ecc": a.amdsmi_get_gpu_total_ecc_count(h), "umc": a.amdsmi_get_gpu_ecc_count(h, a.AmdSmiGpuBlock.UMC),
    "gfx": a.amdsmi_get_gpu_ecc_count(h, a.AmdSmiGpuBlock.GFX), "pages": len(a.amdsmi_get_gpu_bad_page_info(h)),
    "link": a.amdsmi_topo_get_link_type(h, hs[0])["type"], "status": a.amdsmi_get_gpu_xgmi_link_status(h)["status"],
    "thermal": [a.amdsmi_get_violation_status(hs[k])["active_socket_thrm"] for k in (2, 3)],
    "clock": a.amdsmi_get_clock_info(h, a.AmdSmiClkType.GFX)["clk"],
    "replays": a.amdsmi_get_gpu_pci_replay_counter(h), "used": a.amdsmi_get_gpu_vram_usage(h)["vram_used"],
    "processes": [[p["name"], p["pid"], p["memory_usage"]["vram_mem"] >> 20] for p in a.amdsmi_get_gpu_process_list(h)],
}))
"""
    )
    assert found["temperature"] == [99, 100, 110]
    assert (found["power"], found["activity"]) == (600, 88)
    assert (found["ecc"]["uncorrectable_count"], found["ecc"]["correctable_count"]) == (2, 7)
    assert (found["umc"]["uncorrectable_count"], found["gfx"]["uncorrectable_count"]) == (2, 0)
    assert found["pages"] == 2
    assert (found["thermal"], found["clock"]) == ([False, True], 900)
    assert found["link"] == 1  # the way is PCIe now
    assert found["status"].count("D") == 1
    assert (found["replays"], found["used"]) == (4, 284 + 1024 + 3072)
    assert found["processes"] == [["train", 4194000, 3072]]


def test_failures_are_the_librarys(mi300x: Node) -> None:
    ask = """
import json, amdsmi as a
try:
    a.amdsmi_init()
    print(json.dumps(a.amdsmi_get_gpu_device_uuid(a.amdsmi_get_processor_handles()[0])))
except a.AmdSmiLibraryException as error:
    print(json.dumps(error.get_error_code()))
"""
    mi300x.set(0, lost="yes")
    assert mi300x.run(ask) == 12
    mi300x.set(0, lost="no", driver_loaded="no")
    assert mi300x.run(ask) == 34
    mi300x.state.write_bytes(b"")
    assert mi300x.run(ask) == 43


def test_structures_are_as_large_as_amdsmis(mi300x: Node, tmp_path: Path) -> None:
    header = (SOURCES / "amd_smi_abi.h").read_text()
    names = [name for name in re.findall(r"^\} (amdsmi_\w+_t);", header, re.MULTILINE) if name != "amdsmi_status_t"]
    assert len(names) > 20
    theirs = mi300x.run(
        """
import ctypes, json, sys
from amdsmi import amdsmi_wrapper as w
print(json.dumps({n: ctypes.sizeof(getattr(w, n)) for n in json.loads(sys.argv[1])}))
""",
        json.dumps(names),
    )
    lines = "".join(f'    printf("{name} %zu\\n", sizeof({name}));\n' for name in names)
    source = tmp_path / "sizes.c"
    source.write_text(f'#include <stdio.h>\n#include "amd_smi_abi.h"\nint main(void)\n{{\n{lines}    return 0;\n}}\n')
    subprocess.run(["cc", f"-I{SOURCES}", "-o", tmp_path / "sizes", source], check=True)
    said = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(said[::2], map(int, said[1::2]), strict=True)) == theirs


PARTITIONS = """
import json, sys, amdsmi as a
from amdsmi.amdsmi_exception import AmdSmiLibraryException
def handles():
    a.amdsmi_init()
    return a.amdsmi_get_processor_handles()
def refused(function, *arguments):
    try:
        function(*arguments)
    except AmdSmiLibraryException as error:
        return error.get_error_code()
    return 0
def modes(found):
    return [f"{a.amdsmi_get_gpu_compute_partition(h)}-{a.amdsmi_get_gpu_memory_partition(h)}" for h in found]
compute, memory = a.AmdSmiComputePartitionType, a.AmdSmiMemoryPartitionType
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the driver partitions GPUs for root only")
BUSY, NO_PERM, NOT_SUPPORTED, RESTART, UNAVAILABLE = 30, 10, 2, 54, 55


@needs_root
def test_a_gpu_is_partitioned_at_once_and_listed_when_the_library_is_opened_again(mi300x: Node) -> None:
    before, after, devices, config = mi300x.run(
        PARTITIONS
        + """
hs = handles()
a.amdsmi_set_gpu_compute_partition(hs[1], compute.CPX)
before = len(a.amdsmi_get_processor_handles())
a.amdsmi_shut_down()
hs = handles()
print(json.dumps([before, len(hs), [{
    "bdf": a.amdsmi_get_gpu_device_bdf(h), "files": a.amdsmi_get_gpu_enumeration_info(h),
    "uuid": a.amdsmi_get_gpu_device_uuid(h), "part": a.amdsmi_get_gpu_kfd_info(h)["current_partition_id"],
    "units": a.amdsmi_get_gpu_asic_info(h)["num_compute_units"],
    "total": a.amdsmi_get_gpu_memory_total(h, a.AmdSmiMemoryType.VRAM) >> 20,
    "profile": a.amdsmi_get_gpu_accelerator_partition_profile(h)["partition_profile"]["profile_type"],
} for h in hs[:10]], a.amdsmi_get_gpu_accelerator_partition_profile_config(hs[0])]))
"""
    )
    assert (before, after) == (8, 15)
    assert [one["bdf"] for one in devices[1:9]] == [f"0000:26:00.{part}" for part in range(8)]
    assert (devices[0]["bdf"], devices[9]["bdf"]) == ("0000:05:00.0", "0000:46:00.0")
    assert [one["part"] for one in devices] == [0, *range(8), 0]
    assert [one["units"] for one in devices] == [304, *[38] * 8, 304]
    assert {one["total"] for one in devices} == {196592}  # of each partition the library reports what the GPU has
    assert len({one["uuid"] for one in devices[1:9]}) == 1
    assert [one["files"]["drm_render"] for one in devices] == [128, 129, *range(143, 150), 130]
    assert [one["profile"] for one in devices] == ["SPX", *["CPX"] * 8, "SPX"]
    assert [(one["profile_type"], one["num_partitions"], one["memory_caps"]) for one in config["profiles"]] == [
        ("SPX", 1, ["NPS1"]),
        ("DPX", 2, ["NPS1", "NPS2"]),
        ("QPX", 4, ["NPS1", "NPS4"]),
        ("CPX", 8, ["NPS1", "NPS4"]),
    ]
    assert (mi300x.get(1, "partitions"), mi300x.get(0, "partitions")) == ("cpx-nps1", "spx-nps1")


@needs_root
def test_parts_of_the_memory_come_with_the_drivers_next_start(mi300x: Node) -> None:
    found = mi300x.run(
        PARTITIONS
        + """
hs = handles()
steps = [refused(a.amdsmi_set_gpu_compute_partition, hs[0], compute.TPX)]
a.amdsmi_set_gpu_compute_partition(hs[0], compute.CPX)
a.amdsmi_set_gpu_memory_partition(hs[0], memory.NPS2)
steps.append(modes(hs[:2]))
for nps in (None, memory.NPS4):
    if nps:
        a.amdsmi_set_gpu_memory_partition(hs[3], nps)
    a.amdsmi_gpu_driver_reload()
    a.amdsmi_shut_down()
    hs = handles()
    steps.append([len(hs), modes(hs[:1] + hs[-1:]), refused(a.amdsmi_set_gpu_compute_partition, hs[0], compute.SPX)])
a.amdsmi_gpu_driver_reload()
steps.append(modes(hs[:1]))
print(json.dumps(steps))
"""
    )
    assert found == [
        UNAVAILABLE,  # eight dies are not three equal parts
        ["CPX-NPS1", "SPX-NPS1"],
        [16, ["DPX-NPS2"] * 2, UNAVAILABLE],  # all that xGMI joins, with the mode that goes with it
        [64, ["CPX-NPS4"] * 2, UNAVAILABLE],
        ["CPX-NPS4"],
    ]


@needs_root
def test_processes_are_in_the_way_of_partitions(mi300x: Node, make_node: Callable[..., Node]) -> None:
    mi300x.set(2, process="4194000:3G")
    found = mi300x.run(
        PARTITIONS
        + """
hs = handles()
print(json.dumps([refused(a.amdsmi_set_gpu_compute_partition, hs[2], compute.CPX), modes(hs[2:3]),
                  refused(a.amdsmi_set_gpu_compute_partition, hs[1], compute.DPX),
                  refused(a.amdsmi_set_gpu_memory_partition, hs[1], memory.NPS8), refused(a.amdsmi_gpu_driver_reload)]))
"""
    )
    assert found == [BUSY, ["SPX-NPS1"], 0, UNAVAILABLE, RESTART]
    assert mi300x.get(1, "partitions") == "dpx-nps1"
    setter = "print(json.dumps(refused(a.amdsmi_set_gpu_compute_partition, handles()[0], compute.CPX)))"
    drop = "import os; os.setgid(65534); os.setuid(65534)\n"
    state = mi300x.folder / "state"
    state.chmod(0o644)
    for folder in (mi300x.folder, *mi300x.folder.parents):
        if folder.owner() == "root" and folder.stat().st_mode & 0o001 == 0 and folder != folder.parent:
            folder.chmod(folder.stat().st_mode | 0o011)
    assert mi300x.run(drop + PARTITIONS + setter) == NO_PERM


@needs_root
def test_memory_of_a_partition_is_its_own(mi300x: Node) -> None:
    mi300x.set(0, partitions="cpx-nps4")
    with pytest.raises(UsageError, match="no partition mode"):
        mi300x.set(0, partitions="spx-nps4")
    allocate = """
import ctypes as c, json, sys
hip, p, free, total, count = c.CDLL("libamdhip64.so"), c.c_void_p(), c.c_size_t(), c.c_size_t(), c.c_int()
assert hip.hipGetDeviceCount(c.byref(count)) == 0 and hip.hipMemGetInfo(c.byref(free), c.byref(total)) == 0
got = hip.hipMalloc(c.byref(p), c.c_size_t(total.value))
while free.value and hip.hipMalloc(c.byref(p), c.c_size_t(free.value >> 1 << 1)) != 0:
    free.value -= 1 << 20
print(json.dumps([count.value, total.value >> 20, got]), flush=True)
sys.stdin.read()
"""
    part = (196592 - 284) // 8
    with mi300x.start(allocate, ROCR_VISIBLE_DEVICES="3") as process:
        assert process.stdout is not None and process.stdin is not None
        assert json.loads(process.stdout.readline()) == [1, part, 2]
        listed = mi300x.run(
            PARTITIONS
            + "print(json.dumps([[p['memory_usage']['vram_mem'] >> 20 for p in a.amdsmi_get_gpu_process_list(h)]"
            + " for h in handles()]))"
        )
        assert listed[3] and part - 2 <= listed[3][0] <= part
        assert listed[:3] + listed[4:] == [[]] * 14
        with pytest.raises(UsageError, match="would not change it"):
            mi300x.set(0, partitions="spx-nps1")
        process.stdin.close()
    mi300x.set(0, partitions="spx-nps1")
