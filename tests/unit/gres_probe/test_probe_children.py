"""A vendor's driver that hangs, crashes, floods or throws affects its own answer only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gres_probe import probe as probing
from gres_probe.children import read_all
from gres_probe.inventory import Gpu, Inventory
from gres_probe.machine import Machine
from gres_probe.vendors import Findings, VendorSpec
from sluice.base.errors import SluiceError, UsageError


def gpu(vendor: str, index: int = 0) -> Gpu:
    return Gpu(
        vendor, index, f"{vendor}-{index}", "model", f"/dev/{vendor}{index}", index, f"0000:0{index}:00.0", 100, 90
    )


def spec(name: str, ask: Callable[[Machine], Findings], *, device_pattern: str = "") -> VendorSpec:
    return VendorSpec(name, name.upper(), 0x10DE, "", f"lib{name}.so", "install it", ask, device_pattern)


@pytest.fixture
def probe_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Inventory]:
    """Probe a machine without hardware by the given vendors."""

    def probe(*specs: VendorSpec, timeout: float = 30.0, dev_root: Path | None = None) -> Inventory:
        by_name = {one.name: one for one in specs}
        monkeypatch.setattr(probing, "vendor", by_name.__getitem__)
        return probing.probe_node(
            node="n1", vendors=list(by_name), timeout=timeout, sys_root=tmp_path, proc_root=tmp_path, dev_root=dev_root
        )

    return probe


def answering(name: str) -> VendorSpec:
    return spec(name, lambda machine: Findings([gpu(name)]))


def test_hang_is_given_up(probe_with: Callable[..., Inventory]) -> None:
    def hang(machine: Machine) -> Findings:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1000)

    inventory = probe_with(answering("amd"), spec("nvidia", hang), timeout=5)
    assert [one.vendor for one in inventory.gpus] == ["amd"]
    (problem,) = inventory.problems
    assert problem.vendor == "nvidia" and "within 5 s" in problem.what and "--timeout" in problem.remedy


def test_an_adapter_that_does_not_answer_costs_its_ports_only(
    probe_with: Callable[..., Inventory], tmp_path: Path
) -> None:
    """The kernel asks the adapter's firmware when a port's file is read; a pipe without a writer hangs alike."""
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port.parent.parent / "fw_ver").write_text("28.39.1002")
    os.mkfifo(port / "state")
    began = time.monotonic()
    inventory = probe_with(answering("amd"), timeout=2)
    assert time.monotonic() - began < 20
    assert [one.vendor for one in inventory.gpus] == ["amd"]
    assert [(nic.name, nic.firmware, nic.ports) for nic in inventory.nics] == [("mlx5_0", "28.39.1002", [])]


def test_child_that_cannot_be_killed_is_left_behind(
    probe_with: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in an uninterruptible sleep ignores even SIGKILL: here, one that is not sent it."""
    spared: list[int] = []
    kill = os.kill
    monkeypatch.setattr(probing.os, "kill", lambda pid, number: spared.append(pid))
    monkeypatch.setattr(probing.os, "killpg", lambda pid, number: spared.append(pid))
    try:
        inventory = probe_with(answering("amd"), spec("nvidia", lambda machine: time.sleep(1000)), timeout=3)  # type: ignore[arg-type,return-value]
    finally:
        for pid in set(spared):
            kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert len(inventory.gpus) == len(inventory.problems) == len(set(spared)) == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_crash_names_the_signal(probe_with: Callable[..., Inventory], number: signal.Signals) -> None:
    def crash(machine: Machine) -> Findings:
        os.kill(os.getpid(), number)
        return Findings()

    inventory = probe_with(answering("amd"), spec("nvidia", crash))
    assert [one.vendor for one in inventory.gpus] == ["amd"]
    assert number.name in inventory.problems[0].what and "libnvidia.so" in inventory.problems[0].what


def test_real_segmentation_fault(probe_with: Callable[..., Inventory]) -> None:
    def crash(machine: Machine) -> Findings:
        ctypes.string_at(1)
        return Findings()

    assert "SIGSEGV" in probe_with(spec("nvidia", crash)).problems[0].what


def test_library_that_ends_the_process(probe_with: Callable[..., Inventory]) -> None:
    def leave(machine: Machine) -> Findings:
        os._exit(0)

    assert "exit status 0" in probe_with(spec("nvidia", leave)).problems[0].what


def test_answer_that_is_no_answer(probe_with: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_MOST_OUTPUT", 1000)
    flood = Findings([gpu("nvidia", index) for index in range(200)])
    assert "no answer" in probe_with(spec("nvidia", lambda machine: flood)).problems[0].what


def test_odd_exception_is_a_problem_of_one_line(probe_with: Callable[..., Inventory]) -> None:
    def throw(machine: Machine) -> Findings:
        raise RuntimeError("first\nsecond\x1b[0m")

    inventory = probe_with(answering("amd"), spec("nvidia", throw))
    assert inventory.problems[0].what == "RuntimeError: first second [0m"
    assert len(inventory.gpus) == 1


def test_answers_that_make_no_sense(probe_with: Callable[..., Inventory]) -> None:
    """An impossible value becomes unknown; a GPU without a valid identity or size is left out."""
    good, odd, bad, worse = (gpu("nvidia", index) for index in range(4))
    odd.utilisation_percent, odd.memory_used_mib = 65535, 1 << 40
    bad.uuid = "not a\nuuid"
    worse.memory_usable_mib = worse.memory_total_mib + 1
    inventory = probe_with(spec("nvidia", lambda machine: Findings([good, odd, bad, worse])))
    assert [one.index for one in inventory.gpus] == [0, 1]
    assert (inventory.gpus[1].utilisation_percent, inventory.gpus[1].memory_used_mib) == (None, None)
    assert [problem.index for problem in inventory.problems] == [2, 3]
    assert all("is not valid: GPU" in problem.what for problem in inventory.problems)
    inventory.check("here")


def test_interrupt_leaves_no_child_behind(
    probe_with: Callable[..., Inventory], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    marker = tmp_path / "pid"

    def hang(machine: Machine) -> Findings:
        marker.write_text(str(os.getpid()))
        time.sleep(1000)
        return Findings()

    def interrupt(*arguments: object, **options: object) -> None:
        while not marker.exists() or not marker.read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(probing, "read_all", interrupt)
    monkeypatch.setattr(probing, "_REAP_SECONDS", 60)
    with pytest.raises(KeyboardInterrupt):
        probe_with(spec("nvidia", hang))
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_missing_driver_counts_only_where_the_kernel_shows_hardware(
    probe_with: Callable[..., Inventory], tmp_path: Path
) -> None:
    def missing(machine: Machine) -> Findings:
        raise SluiceError("no libnvidia.so", remedy="install it")

    (tmp_path / "dev").mkdir()
    without = spec("nvidia", missing, device_pattern="nvidia[0-9]*")
    assert probe_with(without, dev_root=tmp_path / "dev").problems == []
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    (problem,) = probe_with(without, dev_root=tmp_path / "dev").problems
    assert problem.what == "1 NVIDIA GPU (/dev/nvidia0) cannot be read: no libnvidia.so"
    assert problem.remedy == "install it"


def test_vendors_are_asked_side_by_side(probe_with: Callable[..., Inventory], tmp_path: Path) -> None:
    """Each waits for the other's mark: run one after the other, they would never end."""

    def meet(name: str, other: str) -> VendorSpec:
        def ask(machine: Machine) -> Findings:
            (tmp_path / name).touch()
            while not (tmp_path / other).exists():
                time.sleep(0.01)
            return Findings([gpu(name)])

        return spec(name, ask)

    assert len(probe_with(meet("amd", "nvidia"), meet("nvidia", "amd")).gpus) == 2


def test_child_holds_no_pipe_of_the_caller(probe_with: Callable[..., Inventory]) -> None:
    """Else a program that reads the command's output would wait for a hanging driver."""
    reader, writer = os.pipe()

    def look(machine: Machine) -> Findings:
        os.fstat(writer)  # closed: raises
        return Findings()

    inventory = probe_with(spec("nvidia", look))
    assert inventory.problems[0].what.startswith("OSError")
    os.close(reader)
    os.close(writer)


def test_what_a_library_prints_does_not_reach_the_output(
    probe_with: Callable[..., Inventory], capfd: pytest.CaptureFixture[str]
) -> None:
    def chatter(machine: Machine) -> Findings:
        os.write(1, b"libamd_smi.so: cannot open\n")
        os.write(2, b"warning\n")
        return Findings([gpu("amd")])

    assert len(probe_with(spec("amd", chatter)).gpus) == 1
    assert capfd.readouterr() == ("", "")


def test_unknown_vendor_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'matrox'"):
        probing.probe_node(vendors=["matrox"])


def test_read_all_bounds_time_and_size() -> None:
    quiet, quiet_in = os.pipe()
    loud, loud_in = os.pipe()
    done, done_in = os.pipe()
    os.write(loud_in, b"x" * 5000)
    os.write(done_in, b"whole")
    os.close(done_in)
    outputs = read_all([quiet, loud, done], deadline=time.monotonic() + 0.2, limit=1000)
    assert not outputs[quiet].ended and not outputs[loud].ended and len(outputs[loud].data) > 1000
    assert outputs[done].ended and bytes(outputs[done].data) == b"whole"
    # A process that need not end is not waited for.
    outputs = read_all([quiet, done], deadline=time.monotonic() + 1000, limit=1000, until=[done])
    assert outputs[done].ended
    for descriptor in (quiet, quiet_in, loud, loud_in, done):
        os.close(descriptor)


def test_vendor_of_whom_the_kernel_shows_nothing_is_not_asked(
    probe_with: Callable[..., Inventory], tmp_path: Path
) -> None:
    """Where PCI can be seen, the library of another vendor, which may hang, is not even loaded."""
    device = tmp_path / "devices/pci0000:00/0000:00:01.0"
    device.mkdir(parents=True)
    (device / "class").write_text("0x020000\n")
    (device / "vendor").write_text("0x15b3\n")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:00:01.0").symlink_to(device)
    assert probe_with(answering("nvidia")).gpus == []
    (device / "class").write_text("0x030200\n")
    (device / "vendor").write_text("0x10de\n")
    inventory = probe_with(answering("nvidia"))
    assert len(inventory.gpus) == 1


def test_gpu_passed_through_to_a_virtual_machine_is_not_missed(
    probe_with: Callable[..., Inventory], tmp_path: Path
) -> None:
    for number, driver in enumerate(("nvidia", "vfio-pci", "nouveau")):
        device = tmp_path / f"devices/pci0000:00/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text("0x030200\n")
        (device / "vendor").write_text("0x10de\n")
        (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        (tmp_path / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"bus/pci/devices/{device.name}").symlink_to(device)
    inventory = probe_with(answering("nvidia"))  # it has 0000:00:00.0
    (problem,) = inventory.problems
    assert "1 of 2 GPUs, not: 0000:02:00.0" in problem.what and "nouveau" in problem.remedy
