"""What the simulated machines cannot show of a vendor's module: odd packages, old loaders, AMD partitions."""

from __future__ import annotations

import builtins
import ctypes.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest

from gres_probe.inventory import Gpu, Health
from gres_probe.level_zero import LIBRARY_VARIABLE, LevelZero, LevelZeroError, LoaderMissingError, LoaderTooOldError
from gres_probe.machine import Machine
from gres_probe.vendor_names import vendor_names
from gres_probe.vendors import VendorSpec, Verdict, amd, intel, usable_memory, vendor
from sluice.base.errors import SluiceError, UsageError


def test_every_vendor_is_one_module_and_nothing_else_lists_them() -> None:
    assert vendor_names() == ("amd", "intel", "nvidia")
    for name in vendor_names():
        spec = vendor(name)
        assert spec.name == name and spec.library and spec.remedy and spec.gres_flag == f"{name}_gpu_env"
    with pytest.raises(UsageError, match="choose from amd, intel, nvidia"):
        vendor("matrox")


def test_a_fourth_vendor_is_one_file(tmp_path: Path) -> None:
    """Copy the package, add a file, and its GPUs are probed, validated and printed."""
    root = Path(__file__).parents[3]
    for room in ("gres_probe", "sluice"):
        subprocess.run(["cp", "-r", str(root / room), str(tmp_path / room)], check=True)
    (tmp_path / "gres_probe/vendors/tachyum.py").write_text(
        "from gres_probe.inventory import Gpu\n"
        "from gres_probe.vendors import Findings, VendorSpec\n"
        "def probe(machine):\n"
        "    return Findings([Gpu('tachyum', 0, 'T-0', 'Prodigy', '/dev/tachyum0', 0, '0000:41:00.0', 1024, 1000)])\n"
        "VENDOR = VendorSpec('tachyum', 'Tachyum', 0x1ed2, '', 'libtachyum.so', 'install it', probe)\n"
    )
    words = [sys.executable, "-S", "-m", "sluice.main", "probe", "--sys-root", str(tmp_path)]
    done = subprocess.run(
        [*words, "-P", "-n", "-o", "vendor,model"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{Path(click.__file__).parents[1]}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "tachyum|Prodigy\n", done.stderr


# ---- usable memory and health ----


@pytest.mark.parametrize(
    ("total", "kept", "usable"),
    [(1024, 0, 1024), (1024, 1, 768), (1024, 256, 768), (1024, 257, 512), (100, 300, 0)],
)
def test_usable_memory_is_a_stable_count(total: int, kept: int, usable: int) -> None:
    mib = 1 << 20
    assert usable_memory(total * mib, kept * mib) == usable
    if kept:  # some bytes more or less kept change nothing within a step
        assert usable_memory(total * mib, kept * mib - mib // 2) == usable


def test_verdict_is_the_worst_of_what_was_reported() -> None:
    verdict = Verdict()
    verdict.add(None, Health.FAILED, "never told")
    assert (verdict.health, verdict.reasons) == (Health.UNKNOWN, [])
    verdict.add(0, Health.FAILED, "well")
    assert (verdict.health, verdict.reasons) == (Health.OK, [])
    verdict.add(2, Health.FAILED, "bad")
    verdict.add(1, Health.DEGRADED, "worn")
    assert (verdict.health, verdict.reasons) == (Health.FAILED, ["bad", "worn"])


@pytest.mark.parametrize(
    ("now", "slow", "stop", "health"),
    [
        (50, 90, 95, Health.OK),
        (90, 90, 95, Health.DEGRADED),
        (95, 90, 95, Health.FAILED),
        (95, None, 95, Health.FAILED),
        (50, None, 95, Health.UNKNOWN),
        (None, 90, 95, Health.UNKNOWN),
    ],
)
def test_temperature_is_judged_by_the_gpus_own_limits(
    now: int | None, slow: int | None, stop: int | None, health: Health
) -> None:
    gpu = Gpu("amd", 0, "u", "m", "/dev/x", 0, "0000:01:00.0", 1, 1)
    gpu.temperature_c, gpu.temperature_slowdown_c, gpu.temperature_shutdown_c = now, slow, stop
    verdict = Verdict()
    verdict.temperature(gpu)
    assert verdict.health is health


# ---- AMD: what the package answers ----


class AmdSmiError(Exception):
    """In place of amdsmi's own exception."""


def fake_amdsmi(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A package amdsmi of the given functions; any other says that it is not supported."""

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("amdsmi_"):
                return refuse
            raise AttributeError(name)

    def refuse(*arguments: Any) -> Any:
        raise AmdSmiError("AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")

    package = Package("amdsmi")
    package.__path__ = []
    exceptions = ModuleType("amdsmi.amdsmi_exception")
    exceptions.AmdSmiException = AmdSmiError  # type: ignore[attr-defined]
    package.amdsmi_exception = exceptions  # type: ignore[attr-defined]
    package.AmdSmiMemoryType = SimpleNamespace(VRAM=0)  # type: ignore[attr-defined]
    package.AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1, EDGE=0)  # type: ignore[attr-defined]
    package.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0, CRITICAL=5, EMERGENCY=7)  # type: ignore[attr-defined]
    package.AmdSmiLinkType = SimpleNamespace(AMDSMI_LINK_TYPE_XGMI=2)  # type: ignore[attr-defined]
    for name, function in functions.items():
        setattr(package, name, function)
    monkeypatch.setitem(sys.modules, "amdsmi", package)
    monkeypatch.setitem(sys.modules, "amdsmi.amdsmi_exception", exceptions)


MIB = 1 << 20


def partitioned(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """One MI300X in CPX mode as amd-smi lists it: eight devices on one PCI device, each with its render node."""
    functions: dict[str, Any] = {
        "amdsmi_init": lambda: None,
        "amdsmi_get_processor_handles": lambda: list(range(8)),
        "amdsmi_get_gpu_device_bdf": lambda handle: f"0000:0C:00.{handle}",
        "amdsmi_get_gpu_device_uuid": lambda handle: "40ff74a1-0000-1000-8000-000000000001",
        "amdsmi_get_gpu_enumeration_info": lambda handle: {"drm_render": 128 + handle, "drm_card": 1 + handle},
        "amdsmi_get_gpu_asic_info": lambda handle: {"market_name": "N/A", "target_graphics_version": "gfx942"},
        "amdsmi_get_gpu_board_info": lambda handle: {"product_name": "AMD Instinct MI300X"},
        "amdsmi_get_gpu_memory_total": lambda handle, kind: 196592 * MIB,
        "amdsmi_get_gpu_compute_partition": lambda handle: "CPX",
        "amdsmi_get_gpu_memory_partition": lambda handle: "NPS4",
    }
    fake_amdsmi(monkeypatch, **functions | more)


def test_amd_partitions_are_devices_of_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    partitioned(monkeypatch)
    findings = amd.probe(Machine(tmp_path, tmp_path, None))
    (gpu,) = findings.gpus
    assert not findings.problems
    assert (gpu.pci_address, gpu.device_file, gpu.minor) == ("0000:0c:00.0", "/dev/dri/renderD128", 128)
    assert gpu.model == "AMD Instinct MI300X" and gpu.partitioned and len(gpu.partitions) == 8
    assert {part.profile for part in gpu.partitions} == {"cpx-nps4"}
    assert {part.memory_mib for part in gpu.partitions} == {196592 // 8}
    assert gpu.partitions[3].device_files == ["/dev/dri/renderD131", "/dev/dri/card4"]
    assert len({part.uuid for part in gpu.partitions}) == 8


def test_amd_driver_that_tells_little_is_unknown_not_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What an old library refuses, or answers with its marks for "no value", becomes None."""
    partitioned(
        monkeypatch,
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": "N/A"},
        amdsmi_topo_get_numa_node_number=lambda handle: 0xFFFFFFFF,
        amdsmi_get_gpu_driver_info=lambda handle: {"driver_version": "N/A"},
    )
    (gpu,) = amd.probe(Machine(tmp_path, tmp_path, None)).gpus
    assert (gpu.utilisation_percent, gpu.numa_node, gpu.temperature_c, gpu.power_limit_w) == (None, None, None, None)
    assert (gpu.ecc.enabled, gpu.ecc.corrected, gpu.driver_version) == (None, None, "")
    assert gpu.health is Health.UNKNOWN


@pytest.mark.parametrize(("user", "usable", "used"), [(0, 196592 - 512, 100), (1000, 196592, 20400)])
def test_amd_memory_is_reckoned_by_root_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, usable: int, used: int
) -> None:
    """Others do not see all processes, and would take what jobs hold for what the driver keeps."""
    partitioned(
        monkeypatch,
        amdsmi_get_gpu_memory_usage=lambda handle, kind: (300 + 100 + (0 if user == 0 else 20000)) * MIB,
        amdsmi_get_gpu_process_list=lambda handle: [{"memory_usage": {"vram_mem": 100 * MIB}}],
    )
    monkeypatch.setattr("os.geteuid", lambda: user)
    (gpu,) = amd.probe(Machine(tmp_path, tmp_path, None)).gpus
    assert (gpu.memory_total_mib, gpu.memory_usable_mib, gpu.memory_used_mib) == (196592, usable, used)


def test_amd_gpu_without_render_node_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    partitioned(monkeypatch, amdsmi_get_gpu_enumeration_info=None)
    findings = amd.probe(Machine(tmp_path, tmp_path, None))
    assert not findings.gpus and "render node" in findings.problems[0].what


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("libamd_smi.so"), "no libamd_smi.so"),
        (AttributeError("undefined symbol: amdsmi_get_new"), "does not fit libamd_smi.so"),
        (ModuleNotFoundError("No module named 'amdsmi'", name="amdsmi"), "package amdsmi is not installed"),
    ],
)
def test_amd_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "amdsmi":
            raise error
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SluiceError, match=words) as caught:
        amd.probe(Machine())
    assert caught.value.remedy


def test_amd_library_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_amdsmi(monkeypatch)
    with pytest.raises(SluiceError, match="does not start: NOT_SUPPORTED"):
        amd.probe(Machine())


# ---- Intel: old and new loaders ----


def test_loader_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "libno_such_loader.so.1")
    with pytest.raises(LoaderMissingError):
        LevelZero()
    with pytest.raises(SluiceError, match=r"no libze_loader\.so\.1"):
        intel.probe(Machine())


def test_loader_without_zes_init_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any library without that function serves as one."""
    library = ctypes.util.find_library("c")
    assert library
    with pytest.raises(LoaderTooOldError):
        LevelZero(library)
    monkeypatch.setenv(LIBRARY_VARIABLE, library)
    with pytest.raises(SluiceError, match="too old: it lacks zesInit") as caught:
        intel.probe(Machine())
    assert "Level Zero" in caught.value.remedy


# Of the specification's C declarations (zes_api.h of Level Zero 1.17) on a 64-bit Linux.
SIZES = {
    "ze_device_properties_t": 368,
    "ze_device_ip_version_ext_t": 24,
    "zes_device_properties_t": 776,
    "zes_device_state_t": 24,
    "zes_pci_properties_t": 56,
    "zes_process_state_t": 48,
    "zes_mem_properties_t": 48,
    "zes_mem_state_t": 40,
    "zes_engine_properties_t": 32,
    "zes_engine_stats_t": 16,
    "zes_temp_properties_t": 48,
    "zes_power_properties_t": 40,
    "zes_power_sustained_limit_t": 12,
    "zes_fabric_port_properties_t": 328,
    "zes_fabric_port_state_t": 72,
    "zes_ras_properties_t": 32,
    "zes_ras_state_t": 72,
    "zes_device_ecc_properties_t": 32,
    "zes_firmware_properties_t": 160,
}


def test_structures_are_as_the_specification_lays_them_out() -> None:
    from cffi import FFI

    from gres_probe import level_zero

    ffi = FFI()
    ffi.cdef(level_zero._DECLARATIONS)
    assert {name: ffi.sizeof(name) for name in SIZES} == SIZES
    fields = dict(ffi.typeof("zes_firmware_properties_t").fields)
    assert fields["name"].offset == 25  # ze_bool_t is one byte


def test_error_of_a_call_names_it() -> None:
    assert str(LevelZeroError("zesInit", 0x78000001)) == "zesInit: no driver"
    assert str(LevelZeroError("zesInit", 0x12345)) == "zesInit: error 0x12345"


def test_spec_says_what_is_missing() -> None:
    spec = VendorSpec("x", "X", 1, "", "libx.so", "install libx", lambda machine: None)  # type: ignore[arg-type,return-value]
    assert str(spec.library_missing()) == "no libx.so; install libx"
