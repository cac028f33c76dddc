"""GPUs that only OpenCL knows; PoCL, which makes an OpenCL device of the processor, is one in these tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gres_probe import opencl
from gres_probe.inventory import Inventory
from gres_probe.probe import probe_node

# In a process of its own: PoCL keeps signal handlers and threads in whoever has loaded it.
ASK = """
import sys
from gres_probe import opencl
from gres_probe.inventory import Inventory
opencl.LIBRARY = sys.argv[1]
print(Inventory("n1", opencl=opencl.opencl_devices(opencl.ANY)).to_json())
"""


def asked(library: str = opencl.LIBRARY) -> Inventory:
    done = subprocess.run([sys.executable, "-c", ASK, library], capture_output=True, text=True, check=True, timeout=60)
    return Inventory.from_json(done.stdout, source="test")


def test_what_pocl_says() -> None:
    found = [one for one in asked().opencl if one.platform == "Portable Computing Language"]
    if not found:
        pytest.skip("no PoCL: apt-get install pocl-opencl-icd ocl-icd-libopencl1")
    assert found[0].name.startswith("pthread")
    assert found[0].compute_units
    assert found[0].memory_mib


def test_without_the_library() -> None:
    assert asked("libNoOpenCL.so.1").opencl == []


def test_it_is_asked_for_gpus_that_no_library_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of a maker without a module in `gres_probe.vendors`, and none at all."""
    monkeypatch.setattr(opencl, "GPUS", opencl.ANY)
    sys_root, proc_root = tmp_path / "sys", tmp_path / "proc"
    device = sys_root / "bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "class").write_text("0x060400")
    assert probe_node(node="n1", sys_root=sys_root, proc_root=proc_root, dev_root=None).opencl == []
    (device / "class").write_text("0x030200")
    (device / "vendor").write_text("0x1234")
    found = probe_node(node="n1", sys_root=sys_root, proc_root=proc_root, dev_root=None)
    assert found.opencl == asked().opencl
    assert found.problems == []
    (sys_root / "bus/pci/drivers/ast").mkdir(parents=True)
    (device / "driver").symlink_to(sys_root / "bus/pci/drivers/ast")  # the console of a server's board
    assert probe_node(node="n1", sys_root=sys_root, proc_root=proc_root, dev_root=None).opencl == []
