"""NVML through the unmodified pynvml."""

from __future__ import annotations

import ctypes
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from sim_node import Node

SOURCES = Path(__file__).parents[3] / "gpu_sim/src"

INVENTORY = """
import json, pynvml as n
n.nvmlInit()
out = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    m = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
    out.append({
        "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h), "minor": n.nvmlDeviceGetMinorNumber(h),
        "pci": n.nvmlDeviceGetPciInfo(h).busId, "total": m.total >> 20, "reserved": m.reserved >> 20,
        "free": m.free >> 20, "used": m.used >> 20, "v1_used": n.nvmlDeviceGetMemoryInfo(h).used >> 20,
        "cc": n.nvmlDeviceGetCudaComputeCapability(h), "index": n.nvmlDeviceGetIndex(h),
        "numa": n.nvmlDeviceGetNumaNodeId(h), "cpus": list(n.nvmlDeviceGetCpuAffinity(h, 4)),
        "ancestors": [n.nvmlDeviceGetTopologyCommonAncestor(h, n.nvmlDeviceGetHandleByIndex(k))
                      for k in range(n.nvmlDeviceGetCount())],
    })
print(json.dumps({"driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion(), "gpus": out}))
"""


def test_inventory_is_the_platforms(dgx: Node) -> None:
    found = dgx.run(INVENTORY)
    assert (found["driver"], found["cuda"], len(found["gpus"])) == ("550.90.07", 12040, 8)
    first, last = found["gpus"][0], found["gpus"][7]
    assert first["name"] == "NVIDIA H100 80GB HBM3"
    assert first["uuid"] == dgx.get(0, "uuid")
    assert (first["total"], first["reserved"], first["free"], first["used"]) == (81559, 551, 81008, 0)
    assert first["v1_used"] == 551
    assert (first["pci"], last["pci"]) == ("00000000:1B:00.0", "00000000:DF:00.0")
    assert first["cc"] == [9, 0]
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(8))
    assert [gpu["numa"] for gpu in found["gpus"]] == [0] * 4 + [1] * 4
    cpus = sum(word << 64 * place for place, word in enumerate(last["cpus"]))
    assert [cpu for cpu in range(256) if cpus >> cpu & 1] == [*range(56, 112), *range(168, 224)]
    assert first["ancestors"] == [0, 40, 40, 40, 50, 50, 50, 50]


def test_every_function_of_pynvml_is_exported(dgx: Node) -> None:
    missing = dgx.run(
        """
import ctypes, json, re, pynvml
names = set(re.findall(r'_nvmlGetFunctionPointer\\("(\\w+)"\\)', open(pynvml.__file__).read()))
library = ctypes.CDLL("libnvidia-ml.so.1")
print(json.dumps([len(names), [name for name in sorted(names) if not hasattr(library, name)]]))
"""
    )
    assert missing[0] > 400
    assert missing[1] == []


STRUCTURES = {
    "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
    "nvmlPciInfo_v2_t": pynvml.nvmlPciInfo_v2_t,
    "nvmlPciInfoExt_t": pynvml.nvmlPciInfoExt_v1_t,
    "nvmlMemory_t": pynvml.c_nvmlMemory_t,
    "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
    "nvmlBAR1Memory_t": pynvml.c_nvmlBAR1Memory_t,
    "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
    "nvmlEccErrorCounts_t": pynvml.c_nvmlEccErrorCounts_t,
    "nvmlProcessInfo_t": pynvml.c_nvmlProcessInfo_t,
    "nvmlProcessDetail_t": pynvml.c_nvmlProcessDetail_v1_t,
    "nvmlProcessDetailList_t": pynvml.c_nvmlProcessDetailList_v1_t,
    "nvmlProcessUtilizationSample_t": pynvml.c_nvmlProcessUtilizationSample_t,
    "nvmlValue_t": pynvml.c_nvmlValue_t,
    "nvmlSample_t": pynvml.c_nvmlSample_t,
    "nvmlFieldValue_t": pynvml.c_nvmlFieldValue_t,
    "nvmlViolationTime_t": pynvml.c_nvmlViolationTime_t,
    "nvmlEventData_t": pynvml.c_nvmlEventData_t,
    "nvmlPlacement_t": pynvml.c_nvmlGpuInstancePlacement_t,
    "nvmlGpuInstanceProfileInfo_t": pynvml.c_nvmlGpuInstanceProfileInfo_t,
    "nvmlGpuInstanceProfileInfo_v2_t": pynvml.c_nvmlGpuInstanceProfileInfo_v2_t,
    "nvmlGpuInstanceInfo_t": pynvml.c_nvmlGpuInstanceInfo_t,
    "nvmlComputeInstanceInfo_t": pynvml.c_nvmlComputeInstanceInfo_t,
    "nvmlDeviceAttributes_t": pynvml.c_nvmlDeviceAttributes,
    "nvmlRowRemapperHistogramValues_t": pynvml.c_nvmlRowRemapperHistogramValues,
    "nvmlRemappedRowsInfo_v2_t": pynvml.c_nvmlRemappedRowsInfo_v2_t,
    "nvmlAccountingStats_t": pynvml.c_nvmlAccountingStats_t,
    "nvmlTemperature_t": pynvml.c_nvmlTemperature_v1_t,
    "nvmlGpuFabricInfo_t": pynvml.c_nvmlGpuFabricInfo_t,
}


def test_structures_are_as_large_as_pynvmls(tmp_path: Path) -> None:
    lines = "".join(f'    printf("{name} %zu\\n", sizeof({name}));\n' for name in STRUCTURES)
    source = tmp_path / "sizes.c"
    source.write_text(f'#include <stdio.h>\n#include "nvml_abi.h"\nint main(void)\n{{\n{lines}    return 0;\n}}\n')
    program = tmp_path / "sizes"
    subprocess.run(["cc", f"-I{SOURCES}", "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(said[::2], map(int, said[1::2]), strict=True)) == {
        name: ctypes.sizeof(structure) for name, structure in STRUCTURES.items()
    }


HEALTH = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(2)
fields = n.nvmlDeviceGetFieldValues(h, [n.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, n.NVML_FI_DEV_MEMORY_TEMP, (166, 3), 9999])
print(json.dumps({
    "temperature": n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
    "slowdown": n.nvmlDeviceGetTemperatureThreshold(h, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    "power": n.nvmlDeviceGetPowerUsage(h), "limits": n.nvmlDeviceGetPowerManagementLimitConstraints(h),
    "utilisation": n.nvmlDeviceGetUtilizationRates(h).gpu, "clock": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
    "throttle": n.nvmlDeviceGetCurrentClocksThrottleReasons(h), "ecc": n.nvmlDeviceGetEccMode(h),
    "uncorrected": n.nvmlDeviceGetTotalEccErrors(h, 1, 0), "lifetime": n.nvmlDeviceGetTotalEccErrors(h, 1, 1),
    "remapped": n.nvmlDeviceGetRemappedRows(h), "width": n.nvmlDeviceGetCurrPcieLinkWidth(h),
    "replays": n.nvmlDeviceGetPcieReplayCounter(h), "links": [n.nvmlDeviceGetNvLinkState(h, k) for k in range(18)],
    "switches": len({n.nvmlDeviceGetNvLinkRemotePciInfo(h, k).busId for k in range(18) if k != 3}),
    "crc": n.nvmlDeviceGetNvLinkErrorCounter(h, 5, n.NVML_NVLINK_ERROR_DL_CRC_DATA),
    "fields": [[f.nvmlReturn, f.value.ullVal] for f in fields],
    "processes": [[p.pid, p.usedGpuMemory >> 20] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
    "graphics": [n.nvmlSystemGetProcessName(p.pid) for p in n.nvmlDeviceGetGraphicsRunningProcesses(h)],
    "used": n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used >> 20,
}))
"""


def test_a_sick_gpu_shows_it(dgx: Node) -> None:
    dgx.set(
        2,
        temperature=91,
        power=650,
        utilisation=77,
        clock_graphics=1200,
        throttle="hw_thermal",
        ecc_uncorrected=4,
        remapped_uncorrectable=2,
        remap_failed="yes",
        pcie_width=4,
        pcie_replays=12,
        temperature_memory=88,
        link3="down",
        link5_crc=9,
        memory_used="1G",
        process="4194000:2G",
    )
    dgx.set(2, process="4194001:100M:graphics:Xorg")
    found = dgx.run(HEALTH)
    assert found["temperature"] == 91
    assert found["slowdown"] == 87
    assert (found["power"], found["limits"]) == (650_000, [200_000, 700_000])
    assert (found["utilisation"], found["clock"], found["throttle"]) == (77, 1200, 0x40)
    assert (found["ecc"], found["uncorrected"], found["lifetime"]) == ([1, 1], 4, 4)
    assert found["remapped"] == [0, 2, 0, 1]
    assert (found["width"], found["replays"]) == (4, 12)
    assert found["links"] == [1, 1, 1, 0, *[1] * 14]
    assert found["switches"] == 4
    assert found["crc"] == 9
    assert found["fields"] == [[0, 4], [0, 88], [0, 4], [3, 0]]
    assert found["processes"] == [[4194000, 2048]]
    assert found["graphics"] == ["Xorg"]
    assert found["used"] == 1024 + 2048 + 100


def test_changes_show_in_a_running_program(dgx: Node) -> None:
    watch = """
import sys, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
for _ in sys.stdin:
    try:
        print(n.nvmlDeviceGetTemperature(h, 0), flush=True)
    except n.NVMLError as error:
        print(error, flush=True)
"""
    with dgx.start(watch) as program:
        assert program.stdin and program.stdout

        def ask() -> str:
            program.stdin.write("\n")
            program.stdin.flush()
            return program.stdout.readline().strip()

        assert ask() == "31"
        dgx.set(0, temperature=55)
        assert ask() == "55"
        dgx.set(0, lost="yes")
        assert ask() == "GPU is lost"
        dgx.set(0, lost="no", driver_loaded="no")
        assert ask() == "Driver Not Loaded"
        dgx.set(0, driver_loaded="yes")
        assert ask() == "55"
        whole = dgx.state.read_bytes()
        dgx.state.write_bytes(whole[:1000])
        assert ask() == "Corrupted infoROM"
        dgx.state.unlink()
        assert ask() == "Driver Not Loaded"
        dgx.state.write_bytes(whole)
        assert ask() == "55"
        program.stdin.close()


def test_no_reader_sees_half_a_change(dgx: Node, full_scale: bool) -> None:
    """Two fields are always set to the same number; one call that reads both must find them equal."""
    read = """
import json, sys, threading, time, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
stop, torn, seen = threading.Event(), [], set()
def watch():
    while not stop.is_set():
        one, other = n.nvmlDeviceGetFieldValues(h, [n.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, n.NVML_FI_DEV_PCIE_REPLAY_COUNTER])
        seen.add(one.value.ullVal)
        if one.nvmlReturn or other.nvmlReturn or one.value.ullVal != other.value.ullVal:
            torn.append([one.value.ullVal, other.value.ullVal])
threads = [threading.Thread(target=watch) for _ in range(2)]
[t.start() for t in threads]
print("ready", flush=True)
last = int(sys.stdin.readline())
while last not in seen:
    time.sleep(0.001)
stop.set()
[t.join() for t in threads]
print(json.dumps([torn, max(seen)]))
"""
    last = 3000 if full_scale else 100
    with dgx.start(read) as program:
        assert program.stdin and program.stdout
        assert program.stdout.readline() == "ready\n"
        for number in range(1, last + 1):
            dgx.set(0, ecc_corrected=number, pcie_replays=number)
        program.stdin.write(f"{last}\n")
        program.stdin.flush()
        torn, newest = json.loads(program.stdout.readline())
    assert torn == []
    assert newest == last


def test_a_hanging_driver_hangs_until_it_is_set_free(dgx: Node) -> None:
    dgx.set(0, driver_hang="yes")
    with dgx.start("import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())") as program:
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(timeout=0.7)
        dgx.set(0, driver_hang="no")
        assert program.wait(timeout=30) == 0


def test_a_slow_driver_takes_its_time_for_each_call(dgx: Node) -> None:
    dgx.set(0, driver_delay=100)
    seconds = dgx.run(
        """
import json, time, pynvml as n
n.nvmlInit()
start = time.monotonic()
for _ in range(3):
    n.nvmlDeviceGetCount()
print(json.dumps(time.monotonic() - start))
"""
    )
    assert seconds >= 0.3


def test_xid_events(dgx: Node) -> None:
    dgx.set(1, xid=13)  # before anybody listens: it is reported to nobody
    wait = """
import sys, json, pynvml as n
n.nvmlInit()
events = n.nvmlEventSetCreate()
for i in (0, 1):
    n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(i), n.nvmlEventTypeXidCriticalError, events)
try:
    n.nvmlEventSetWait_v2(events, 1)
except n.NVMLError_Timeout:
    print("listening", flush=True)
events_seen = [n.nvmlEventSetWait_v2(events, 30000) for _ in range(3)]
print(json.dumps([[n.nvmlDeviceGetIndex(t.device) if t.eventData != 79 else "lost", t.eventData] for t in events_seen]))
"""
    with dgx.start(wait) as program:
        assert program.stdout
        assert program.stdout.readline() == "listening\n"
        dgx.set(1, xid="48,63")
        dgx.set(0, lost="yes", xid=79)
        assert sorted(map(str, json.loads(program.stdout.readline()))) == sorted(
            map(str, [[1, 48], [1, 63], ["lost", 79]])
        )


MIG = """
import json, pynvml as n
n.nvmlInit()
out = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    row = []
    for k in range(n.nvmlDeviceGetMaxMigDeviceCount(h) if n.nvmlDeviceGetMigMode(h)[0] else 0):
        try:
            m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, k)
        except n.NVMLError_NotFound:
            break
        parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m)
        assert n.nvmlDeviceGetUUID(parent) == n.nvmlDeviceGetUUID(h)
        assert n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(m))) == n.nvmlDeviceGetUUID(m)
        a = n.nvmlDeviceGetAttributes(m)
        row.append([n.nvmlDeviceGetName(m).split(" MIG ")[1], n.nvmlDeviceGetGpuInstanceId(m), a.memorySizeMB,
                    n.nvmlDeviceGetMemoryInfo(m).total >> 20, a.gpuInstanceSliceCount])
    out.append(row)
h = n.nvmlDeviceGetHandleByIndex(1)
profiles = []
for kind in range(n.NVML_GPU_INSTANCE_PROFILE_COUNT):
    try:
        p = n.nvmlDeviceGetGpuInstanceProfileInfo(h, kind)
        profiles.append([p.id, p.sliceCount, n.nvmlDeviceGetGpuInstanceRemainingCapacity(h, p.id)])
    except n.NVMLError_NotSupported:
        pass
try:
    n.nvmlDeviceGetUtilizationRates(h)
    utilisation = "given"
except n.NVMLError_NotSupported:
    utilisation = "not supported"
print(json.dumps({"layout": out, "profiles": profiles, "utilisation": utilisation}))
"""


def test_mig_devices(make_node: Callable[..., Node]) -> None:
    found = make_node("dgx-h100-mig").run(MIG)
    assert found["layout"][0] == [["1g.10gb", 7 + place, 9984, 9984, 1] for place in range(7)]
    assert found["layout"][1] == [
        ["3g.40gb", 1, 40448, 40448, 3],
        ["2g.20gb", 5, 20096, 20096, 2],
        ["1g.10gb", 13, 9984, 9984, 1],
    ]
    assert found["layout"][3] == found["layout"][4] == []
    assert [9, 3, 0] in found["profiles"]
    assert found["utilisation"] == "not supported"


def test_an_old_driver_lacks_newer_functions(dgx: Node) -> None:
    dgx.set(0, driver_generation=470)
    found = dgx.run(
        """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
def ask(function, *arguments, **options):
    try:
        getattr(n, function)(h, *arguments, **options)
        return "ok"
    except n.NVMLError as error:
        return str(error)
print(json.dumps([ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetMemoryInfo", version=n.nvmlMemory_v2),
                  ask("nvmlDeviceGetNumaNodeId"), ask("nvmlDeviceGetMigMode"),
                  ask("nvmlDeviceGetComputeRunningProcesses_v2"), ask("nvmlDeviceGetComputeRunningProcesses_v3")]))
"""
    )
    assert found == ["ok", "Function Not Found", "Function Not Found", "ok", "ok", "Function Not Found"]


def test_only_devices_whose_files_open_are_seen(make_node: Callable[..., Node], tmp_path: Path) -> None:
    node = make_node("dgx-h100-mig")
    devices = tmp_path / "dev"
    (devices / "nvidia-caps").mkdir(parents=True)
    ask = INVENTORY.replace("n.nvmlDeviceGetNumaNodeId(h)", "0")
    assert node.run(ask, SLUICE_SIM_DEV=str(devices))["gpus"] == []
    (devices / "nvidia5").touch()
    (devices / "nvidia0").touch()
    found = node.run(ask, SLUICE_SIM_DEV=str(devices))["gpus"]
    assert [(gpu["index"], gpu["minor"]) for gpu in found] == [(0, 0), (1, 5)]
    count = """
import json, pynvml as n
n.nvmlInit()
h, found = n.nvmlDeviceGetHandleByIndex(0), []
try:
    for k in range(7):
        found.append(n.nvmlDeviceGetGpuInstanceId(n.nvmlDeviceGetMigDeviceHandleByIndex(h, k)))
except n.NVMLError_NotFound:
    pass
print(json.dumps(found))
"""
    assert node.run(count, SLUICE_SIM_DEV=str(devices)) == []
    for minor in (3 + 9 * 9, 3 + 9 * 9 + 1, 3 + 9 * 11):  # both files of GPU instance 9, one of 11
        (devices / f"nvidia-caps/nvidia-cap{minor}").touch()
    assert node.run(count, SLUICE_SIM_DEV=str(devices)) == [9]


def test_energy_grows_with_power(dgx: Node) -> None:
    read = """
import json, pynvml as n
n.nvmlInit()
print(json.dumps(n.nvmlDeviceGetTotalEnergyConsumption(n.nvmlDeviceGetHandleByIndex(0))))
"""
    dgx.set(0, power=700)
    first = dgx.run(read)
    time.sleep(0.2)
    dgx.set(0, power=0)
    second = dgx.run(read)
    assert second - first >= 0.2 * 700 * 1000 * 0.99  # mJ
    assert dgx.run(read) == second  # nothing is drawn any more


def test_without_a_state_there_is_no_driver(dgx: Node, tmp_path: Path) -> None:
    said = dgx.run(
        """
import json, pynvml as n
try:
    n.nvmlInit()
except n.NVMLError as error:
    print(json.dumps(str(error)))
""",
        SLUICE_SIM_STATE=str(tmp_path / "none"),
    )
    assert said == "Driver Not Loaded"


def test_nothing_works_before_init_or_with_wild_handles(dgx: Node) -> None:
    said = dgx.run(
        """
import ctypes, json
library = ctypes.CDLL("libnvidia-ml.so.1")
count, value = ctypes.c_uint(), ctypes.c_ulonglong()
before = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
library.nvmlInit_v2()
wild = [library.nvmlDeviceGetTemperature(ctypes.c_void_p(h), 0, ctypes.byref(count)) for h in (0, 1, 2**63)]
none = library.nvmlDeviceGetCount_v2(None)
library.nvmlShutdown()
print(json.dumps([before, wild, none, library.nvmlDeviceGetCount_v2(ctypes.byref(count))]))
"""
    )
    assert said == [1, [2, 2, 2], 2, 1]
