"""Level Zero through cffi, with declarations of its own: only what these tests read."""

from __future__ import annotations

from collections.abc import Callable

from sim_node import Node

READ = """
import json
from cffi import FFI
ffi = FFI()
ffi.cdef('''
typedef struct { uint32_t stype; void *pNext; uint32_t type; uint8_t onSubdevice; uint32_t subdeviceId, location;
                 uint64_t physicalSize; int32_t busWidth, numChannels; } mem_properties;
typedef struct { uint32_t stype; void *pNext; uint32_t health; uint64_t free, size; } mem_state;
typedef struct { uint32_t fabricId, attachId; uint8_t portNumber; } port_id;
typedef struct { int64_t bitRate; int32_t width; } port_speed;
typedef struct { uint32_t stype; void *pNext; char model[256]; uint8_t onSubdevice; uint32_t subdeviceId;
                 port_id portId; port_speed maxRxSpeed, maxTxSpeed; } port_properties;
typedef struct { uint32_t stype; void *pNext; uint32_t status, qualityIssues, failureReasons; port_id remotePortId;
                 port_speed rxSpeed, txSpeed; } port_state;
typedef struct { uint32_t stype; void *pNext; uint64_t category[7]; } ras_state;
typedef struct { uint64_t energy, timestamp; } energy;
typedef struct { uint32_t stype; void *pNext; uint32_t processId; uint64_t memSize, sharedSize;
                 uint32_t engines; } process;
typedef struct { uint32_t stype; void *pNext; uint32_t domain, bus, device, function; int32_t gen, width;
                 int64_t maxBandwidth; uint8_t flags[3]; } pci_properties;
int zesInit(uint32_t);
int zesDriverGet(uint32_t *, void **);
int zesDeviceGet(void *, uint32_t *, void **);
int zesDevicePciGetProperties(void *, pci_properties *);
int zesDeviceEnumMemoryModules(void *, uint32_t *, void **);
int zesMemoryGetProperties(void *, mem_properties *);
int zesMemoryGetState(void *, mem_state *);
int zesDeviceEnumFabricPorts(void *, uint32_t *, void **);
int zesFabricPortGetProperties(void *, port_properties *);
int zesFabricPortGetState(void *, port_state *);
int zesDeviceEnumRasErrorSets(void *, uint32_t *, void **);
int zesRasGetState(void *, uint8_t, ras_state *);
int zesDeviceEnumTemperatureSensors(void *, uint32_t *, void **);
int zesTemperatureGetState(void *, double *);
int zesDeviceEnumPowerDomains(void *, uint32_t *, void **);
int zesPowerGetEnergyCounter(void *, energy *);
int zesDeviceProcessesGetState(void *, uint32_t *, process *);
int zeInit(uint32_t);
int zeDriverGet(uint32_t *, void **);
int zeDeviceGet(void *, uint32_t *, void **);
''')
z = ffi.dlopen("libze_loader.so.1")

def handles(function, *parent):
    count = ffi.new("uint32_t *")
    code = function(*parent, count, ffi.NULL)
    if code:
        return code
    array = ffi.new("void *[]", max(1, count[0]))
    assert function(*parent, count, array) == 0
    return [array[i] for i in range(count[0])]

def get(kind, function, *arguments):
    value = ffi.new(kind + " *")
    code = function(*arguments, value)
    return value if code == 0 else code
"""


def test_memory_links_and_errors(make_node: Callable[..., Node]) -> None:
    node = make_node("intel-max-1550x4")
    node.set(1, temperature=77, ecc_corrected=6, ecc_uncorrected=1, memory_used="8G", process="4194000:4G")
    node.set(1, link0="down", link1_replays=3)
    found = node.run(
        READ
        + """
assert z.zesInit(0) == 0
device = handles(z.zesDeviceGet, handles(z.zesDriverGet)[0])
d = device[1]
memory = handles(z.zesDeviceEnumMemoryModules, d)
ports = handles(z.zesDeviceEnumFabricPorts, d)
states = [get("port_state", z.zesFabricPortGetState, p) for p in ports]
ids = {(i.portId.fabricId, i.portId.attachId, i.portId.portNumber): (n, k)
       for n, dev in enumerate(device) for k, p in enumerate(handles(z.zesDeviceEnumFabricPorts, dev))
       for i in [get("port_properties", z.zesFabricPortGetProperties, p)]}
remote = [ids[s.remotePortId.fabricId, s.remotePortId.attachId, s.remotePortId.portNumber][0] for s in states]
ras = [list(get("ras_state", z.zesRasGetState, r, 0).category) for r in handles(z.zesDeviceEnumRasErrorSets, d)]
count = ffi.new("uint32_t *")
z.zesDeviceProcessesGetState(d, count, ffi.NULL)
process = ffi.new("process[]", count[0])
z.zesDeviceProcessesGetState(d, count, process)
state = [get("mem_state", z.zesMemoryGetState, m) for m in memory]
print(json.dumps({
    "devices": len(device), "bus": get("pci_properties", z.zesDevicePciGetProperties, d).bus, "ids": len(ids),
    "physical": [get("mem_properties", z.zesMemoryGetProperties, m).physicalSize >> 20 for m in memory],
    "used": [s.size - s.free >> 20 for s in state], "size": [s.size >> 20 for s in state],
    "status": [s.status for s in states], "remote": remote, "ras": ras,
    "temperature": get("double", z.zesTemperatureGetState, handles(z.zesDeviceEnumTemperatureSensors, d)[0])[0],
    "processes": [[p.processId, p.memSize >> 20] for p in process],
}))
"""
    )
    assert (found["devices"], found["bus"], found["ids"]) == (4, 0x42, 4 * 12)
    assert found["physical"] == [65536, 65536]  # two stacks
    assert found["size"] == [(131072 - 112) // 2] * 2
    assert found["used"] == [6144, 6144]
    assert found["status"] == [3, 2, *[1] * 10]  # failed, degraded, healthy
    assert sorted(found["remote"]) == sorted([0, 2, 3] * 4)
    assert [sum(counts) for counts in found["ras"]] == [6, 1]
    assert found["temperature"] == 77
    assert found["processes"] == [[4194000, 4096]]


def test_a_lost_gpu_and_no_driver(make_node: Callable[..., Node]) -> None:
    node = make_node("arc-a770x2")
    node.set(1, lost="yes")
    ask = (
        READ
        + """
code = z.zesInit(0)
device = handles(z.zesDeviceGet, handles(z.zesDriverGet)[0]) if code == 0 else []
answers = [get("pci_properties", z.zesDevicePciGetProperties, d) for d in device]
print(json.dumps([code, [a if isinstance(a, int) else a.bus for a in answers]]))
"""
    )
    assert node.run(ask) == [0, [3, 0x70000001]]
    node.set(0, driver_loaded="no")
    assert node.run(ask) == [0x78000001, []]


def test_affinity_mask_is_for_the_core_part_only(make_node: Callable[..., Node]) -> None:
    found = make_node("intel-max-1550x4").run(
        READ
        + """
assert z.zeInit(0) == 0 and z.zesInit(0) == 0
core = handles(z.zeDeviceGet, handles(z.zeDriverGet)[0])
print(json.dumps([len(core), len(handles(z.zesDeviceGet, handles(z.zesDriverGet)[0]))]))
""",
        ZE_AFFINITY_MASK="0.1,3",
    )
    assert found == [2, 4]
