"""NCCL itself reads the files that it gets in NCCL_TOPO_FILE: a real NVIDIA GPU and NCCL's library, no Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gres_probe.inventory import Inventory
from prolog_epilog.devices import devices_of
from prolog_epilog.nccl_topology import VARIABLE, topology_xml
from tests.unit.prolog_epilog.test_nccl_topology import GOLDEN, inventory_of

pytestmark = pytest.mark.gpu

NVIDIA = [name for name in GOLDEN if name != "mi300x-platform"]
# A communicator of one rank, which reads the file; prints NCCL's version and its answer.
READER = """
import ctypes as c, json, sys
nccl, cuda = c.CDLL(sys.argv[1]), c.CDLL("libcuda.so.1")
class Id(c.Structure):
    _fields_ = [("bytes", c.c_char * 128)]
version, unique, communicator, context = c.c_int(), Id(), c.c_void_p(), c.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
nccl.ncclGetVersion(c.byref(version))
nccl.ncclCommInitRank.argtypes = [c.POINTER(c.c_void_p), c.c_int, Id, c.c_int]
answers = [nccl.ncclGetUniqueId(c.byref(unique)), nccl.ncclCommInitRank(c.byref(communicator), 1, unique, 0)]
print(json.dumps([version.value, *answers]))
"""


@pytest.fixture(scope="module")
def library() -> str:
    """NCCL, of the package that PyTorch needs."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        pytest.skip("NCCL is not installed: pip install nvidia-nccl-cu13, or torch")
    [path] = Path(next(iter(found.submodule_search_locations))).glob("lib/libnccl.so.*")
    return str(path)


@pytest.fixture(scope="module")
def machine(library: str) -> Inventory:
    """This one, as the probe sees it."""
    words = [sys.executable, "-m", "sluice.main", "probe", "--json", "--vendor", "nvidia", "--timeout", "60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return Inventory.from_json(done.stdout, source="sluice probe")


def read_by_nccl(library: str, text: str, folder: Path) -> str:
    """What NCCL has of the machine after it has read the file."""
    given, dumped = folder / "given.xml", folder / "dumped.xml"
    given.write_text(text)
    environment = {
        **os.environ, VARIABLE: str(given), "NCCL_TOPO_DUMP_FILE": str(dumped), "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", READER, library], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, *answers = json.loads(done.stdout.splitlines()[-1])
    assert answers == [0, 0] and "WARN" not in done.stdout, done.stdout
    return dumped.read_text()


def way_to(bus: str, text: str) -> list[str]:
    """From the processor to the GPU: its NUMA node, then addresses of PCI."""
    system = ElementTree.fromstring(text)
    above = {inner: one for one in system.iter() for inner in one}
    [at] = [one for one in system.iter("pci") if one.get("busid") == bus]
    way = [bus]
    while (at := above[at]) is not system:
        way.append(at.get("busid") or at.get("numaid") or at.tag)
    return way[::-1]


def test_this_machines_file_is_read(library: str, machine: Inventory, tmp_path: Path) -> None:
    text = topology_xml(machine, devices_of(machine)[:1], [nic.name for nic in machine.nics])
    if text is None:
        pytest.skip("the probe does not know this machine's processors or PCI: no file is written")
    bus = machine.gpus[0].pci_address
    assert way_to(bus, read_by_nccl(library, text, tmp_path)) == way_to(bus, text)


@pytest.mark.parametrize("name", NVIDIA)
def test_other_machines_files_are_read(library: str, machine: Inventory, name: str, tmp_path: Path) -> None:
    """As if this GPU were one of theirs: NCCL has it where the file says."""
    gpus, _, cpuinfo, _ = GOLDEN[name]
    inventory = inventory_of(name, tmp_path / "machine", cpuinfo)
    devices = devices_of(inventory)
    text = topology_xml(inventory, [devices[index] for index in gpus], ())
    assert text is not None
    bus = machine.gpus[0].pci_address
    text = text.replace(inventory.gpus[gpus[0]].pci_address, bus)
    assert way_to(bus, read_by_nccl(library, text, tmp_path)) == way_to(bus, text)
