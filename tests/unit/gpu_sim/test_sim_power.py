"""Power limits of simulated drivers: who may set them, what they can be, and what they do."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sim_node import Node

from gpu_sim.power_curve import speed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may set power limits")

NVML = """
import json, os, sys, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
if sys.argv[1] == "user":
    os.setuid(65534)
def tried(function, *arguments):
    try:
        function(*arguments)
    except n.NVMLError as error:
        return str(error)
    return ""
set = n.nvmlDeviceSetPowerManagementLimit
answers = [tried(set, h, mw) for mw in (300_000, 199_999, 700_001, 431_500)]
mig = [tried(set, n.nvmlDeviceGetMigDeviceHandleByIndex(h, 0), 300_000)] if sys.argv[1] == "mig" else []
value = n.c_nvmlPowerValue_v2_t(version=n.nvmlPowerValue_v2, powerScope=0, powerValueMw=350_000)
second = []
if sys.argv[1] == "second":
    function = n._nvmlGetFunctionPointer("nvmlDeviceSetPowerManagementLimit_v2")
    second = [function(h, n.byref(value))]
    value.version = 1
    second += [function(h, n.byref(value))]
print(json.dumps([answers, n.nvmlDeviceGetPowerManagementLimit(h), mig, second]))
"""
REFUSED = "Invalid Argument"


def test_nvml_takes_what_root_sets_within_the_range(dgx: Node) -> None:
    assert dgx.run(NVML, "root") == [["", REFUSED, REFUSED, ""], 431_500, [], []]
    assert dgx.run(NVML, "second")[1::2] == [350_000, [0, 25]]
    dgx.set(0, power_limit="default", mig_layout="3g.40gb")
    answers, limit, mig, _ = dgx.run(NVML, "mig")
    assert (answers[0], limit, mig) == ("", 431_500, ["Not Supported"])  # of the whole GPU, and of nothing else
    dgx.set(0, power_limit=650)
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        shutil.copytree(dgx.folder, Path(folder) / "n1", symlinks=True)
        answers, limit, _, _ = Node(Path(folder) / "n1").run(NVML, "user")
    assert (set(answers), limit) == ({"Insufficient Permissions"}, 650_000)


def test_drivers_are_told_to_refuse(dgx: Node) -> None:
    dgx.set(0, driver_power_limits=1)
    assert dgx.run(NVML, "root")[:2] == [["Unknown Error"] * 4, 700_000]
    dgx.set(0, driver_power_limits=2)
    refused = """
import json, pynvml as n
n.nvmlInit()
h, found = n.nvmlDeviceGetHandleByIndex(0), []
for function in (n.nvmlDeviceGetPowerManagementLimit, n.nvmlDeviceGetPowerManagementLimitConstraints,
                 lambda h: n.nvmlDeviceSetPowerManagementLimit(h, 300000)):
    try:
        function(h)
    except n.NVMLError_NotSupported:
        found.append(1)
print(json.dumps(found))
"""
    assert dgx.run(refused) == [1, 1, 1]


def test_amd_smi_and_level_zero_do_the_same(make_node: Callable[..., Node]) -> None:
    amd = make_node("mi300x-platform", "a1").run("""
import json, amdsmi as a
a.amdsmi_init()
h, found = a.amdsmi_get_processor_handles()[0], []
for uw in (500_000_000, 0, 751_000_000, 431_500_000):
    try:
        a.amdsmi_set_power_cap(h, 0, uw)
        found.append(a.amdsmi_get_power_cap_info(h)["power_cap"])
    except a.AmdSmiLibraryException as error:
        found.append(error.get_error_code())
print(json.dumps(found))
""")
    assert amd == [500_000_000, 1, 1, 431_000_000]  # whole watts
    for old in ("", "old"):
        intel = make_node("intel-max-1550x4", f"i1{old}").run(
            """
import json, sys
from gres_probe.level_zero import LevelZeroError, UNSUPPORTED_FEATURE
from gres_probe.vendors.intel import open_devices
sysman, devices = open_devices()
if sys.argv[1]:
    has = sysman.has
    sysman.has = lambda function: not function.endswith("Ext") and has(function)  # before Level Zero 1.4
[domain] = sysman.handles("zesDeviceEnumPowerDomains", devices[0][1])
found = []
for mw in (450_000, 299_999, 600_001, 431_500):
    try:
        sysman.set_sustained_power_mw(domain, mw)
        found.append(sysman.sustained_power_mw(domain))
    except LevelZeroError as error:
        found.append(hex(error.result))
print(json.dumps(found))
""",
            old,
        )
        assert intel == [450_000, "0x78000004", "0x78000004", 431_500]


def test_what_a_limit_does(dgx: Node) -> None:
    read = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
print(json.dumps([n.nvmlDeviceGetPowerUsage(h), n.nvmlDeviceGetClockInfo(h, 0),
                  n.nvmlDeviceGetCurrentClocksThrottleReasons(h) & 4, n.nvmlDeviceGetTotalEnergyConsumption(h)]))
"""
    dgx.set(0, power=500, clock_graphics=1980, power_limit=300)
    began = time.monotonic()
    power, clock, capped, first = dgx.run(read)
    assert (power, clock, capped) == (300_000, int(1980 * 0.936), 4) and dgx.get(0, "power_drawn") == "300"
    dgx.set(0, power_limit="default")
    assert dgx.run(read)[:3] == [500_000, 1980, 0]
    dgx.set(0, power=0)
    second = dgx.run(read)[3]
    assert 0 < second - first <= (time.monotonic() - began) * 500_000
    dgx.set(0, power=800, power_limit=300)  # a fault: no limit holds it
    assert dgx.run(read)[:3] == [800_000, 1980, 0]


def test_the_curve() -> None:
    assert [speed(cap, 250) for cap in (0, 50, 100, 150, 200, 250, 300)] == [0, 0.3805, 0.761, 0.936, 0.968, 1.0, 1.0]
