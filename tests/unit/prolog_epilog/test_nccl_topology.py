"""NCCL_TOPO_FILE: by the rules of NCCL's parser, and for machines whose trees were written down by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_sim import load_platform
from gpu_sim.sysfs import write_tree
from gres_probe.inventory import Gpu, Inventory, PciDevice
from gres_probe.machine import Machine
from gres_probe.topology import link_matrix, pci_devices, rdma_nics
from prolog_epilog.agent import Agent
from prolog_epilog.devices import devices_of
from prolog_epilog.nccl_topology import topology_xml
from sluice.base.errors import SluiceError
from sluice.exchange.record import Grant
from tests.unit.prolog_epilog.examples import GIB, record
from tests.unit.prolog_epilog.nccl_rules import FUSED, read

CPUINFO = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\n\nprocessor\t: 1\n"
INTEL, AMD = CPUINFO.format("GenuineIntel", 6, 143), CPUINFO.format("AuthenticAMD", 25, 17)
CAPABILITIES = {"nvidia": "9.0", "amd": "gfx942"}

# What each machine's own documents say (gpu_sim/platforms names them), for a task with these GPUs and interfaces.
DGX_H100 = """\
cpu 0
  3e:00.0
    40:00.0
      mlx5_3
    41:00.0
      43:00.0
        gpu 0
cpu 1
  98:00.0
    9b:00.0
      9d:00.0
        gpu 1
  a8:00.0
    aa:00.0
      mlx5_7
"""
HGX_A100 = """\
cpu 0
cpu 1
  41:00.0
    45:00.0
      47:00.0
        gpu 2
    4b:00.0
      mlx5_2
    4c:00.0
      4e:00.0
        gpu 3
    54:00.0
      mlx5_3
cpu 2
cpu 3
  01:00.0
    05:00.0
      07:00.0
        gpu 0
    0c:00.0
      mlx5_0
    0d:00.0
      0f:00.0
        gpu 1
    12:00.0
      mlx5_1
cpu 4
cpu 5
  b1:00.0
    b5:00.0
      b7:00.0
        gpu 6
    ba:00.0
      mlx5_6
    bb:00.0
      bd:00.0
        gpu 7
    cc:00.0
      mlx5_7
cpu 6
cpu 7
  81:00.0
    85:00.0
      87:00.0
        gpu 4
    8d:00.0
      mlx5_4
    8e:00.0
      90:00.0
        gpu 5
    94:00.0
      mlx5_5
"""
PCIE_L40S = """\
cpu 0
  31:00.0
    33:00.0
      mlx5_0
    34:00.0
      gpu 0
    35:00.0
      gpu 1
cpu 1
  b1:00.0
    b4:00.0
      gpu 2
    b5:00.0
      gpu 3
"""
MI300X = """\
cpu 0
  02:00.0
    04:00.0
      05:00.0
        gpu
    09:00.0
      mlx5_0
cpu 1
  e2:00.0
    e4:00.0
      e5:00.0
        gpu
"""
WORKSTATION = """\
cpu 0
  01:00.0
    gpu 0
  c1:00.0
    gpu 1
"""
ALL = tuple(range(8))
GOLDEN = {
    "dgx-h100": ((1, 4), ("mlx5_3", "mlx5_7"), INTEL, DGX_H100),
    "dgx-a100": (ALL, tuple(f"mlx5_{nic}" for nic in ALL), AMD, HGX_A100),
    "l40s-x4": ((0, 1, 2, 3), ("mlx5_0",), INTEL, PCIE_L40S),
    "mi300x-platform": ((0, 7), ("mlx5_0",), AMD, MI300X),
    "rtx4090x4": ((0, 3), (), AMD, WORKSTATION),
}


def inventory_of(name: str, folder: Path, cpuinfo: str = INTEL) -> Inventory:
    """A machine as its kernel shows it; drivers are not needed."""
    platform = load_platform(name)
    write_tree(folder, platform)
    (folder / "proc/cpuinfo").write_text(cpuinfo)
    machine = Machine(folder / "sys", folder / "proc", dev_root=None)
    gpus = []
    for index, place in enumerate(platform.gpus):
        vendor = platform.model_of(index).vendor
        gpu = Gpu(vendor, index, f"GPU-{index}", "model", f"/dev/gpu{index}", index, place.pci, 80_000, 80_000)
        gpus.append(replace(gpu, capability=CAPABILITIES[vendor]))
    nics = rdma_nics(gpus, machine, {})
    links = link_matrix(gpus, {}, machine)
    found = Inventory(
        "n1", gpus, links, nics=nics, pci=pci_devices(gpus, nics, machine), processors=machine.processors()
    )
    found.processors.arch = "x86_64"
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_machines_by_hand(name: str, tmp_path: Path) -> None:
    gpus, nics, cpuinfo, outline = GOLDEN[name]
    inventory = inventory_of(name, tmp_path, cpuinfo)
    devices = devices_of(inventory)
    text = topology_xml(inventory, [devices[index] for index in gpus], nics)
    assert text is not None
    system = read(text)
    assert system.outline() == outline
    family = {"175"} if cpuinfo is AMD else {"6"}
    assert {cpu.attributes["familyid"] for cpu in system.inner} == family
    for switch in (one for one in system.all() if one.name == "pci" and one.inner[0].name == "pci"):
        assert switch.attributes["link_width"] != "0"


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "l40s-x4", "mi300x-platform"])
def test_ranks_put_their_files_together(name: str, tmp_path: Path) -> None:
    """A switch or processor has the same attributes whatever else a task has, and all that NCCL would add for some."""
    inventory = inventory_of(name, tmp_path)
    for folder in (tmp_path / "sys/devices").rglob("max_link_speed"):  # as on hardware; the simulation lacks them
        for word in FUSED:
            (folder.parent / word).write_text("0x15b3\n")
    machine = Machine(tmp_path / "sys", tmp_path / "proc", dev_root=None)
    inventory.pci = pci_devices(inventory.gpus, inventory.nics, machine)
    everything = [nic.name for nic in inventory.nics]
    seen: dict[str, dict[str, str]] = {}
    for device in devices_of(inventory):
        text = topology_xml(inventory, [device], everything)
        assert text is not None
        for one in read(text).all():
            identity = one.attributes.get("busid") or one.attributes.get("numaid")
            if one.name in ("cpu", "pci") and identity is not None:
                assert seen.setdefault(identity, one.attributes) == one.attributes
                assert one.name == "cpu" or set(FUSED) <= one.attributes.keys()
    assert seen["0"]["affinity"].replace(",", "").strip("0f") == ""


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    inventory = inventory_of("dgx-h100", tmp_path)
    devices = devices_of(inventory)
    assert topology_xml(inventory, devices, ()) is not None
    assert topology_xml(inventory, [], ["mlx5_0"]) is None
    assert topology_xml(inventory, [replace(devices[0], pci="")], ()) is None  # an instance of MIG
    assert topology_xml(inventory, [replace(devices[0], vendor="intel")], ()) is None
    mute = [replace(gpu, capability="") for gpu in inventory.gpus]
    unknown = replace(inventory.processors, family=None)
    for changes in ({"pci": inventory.pci[:3]}, {"processors": unknown}, {"gpus": []}, {"gpus": mute}):
        assert topology_xml(replace(inventory, **changes), devices, ()) is None
    large = replace(inventory.processors, numa={0: "0-895", 1: "896"})  # NCCL ends where a word is too long
    assert topology_xml(replace(inventory, processors=large), devices, ()) is None
    arm = replace(inventory, processors=replace(inventory.processors, arch="aarch64"))
    assert 'arch="arm64"/' not in str(topology_xml(arm, devices, ())) and "arm64" in str(topology_xml(arm, devices, ()))
    away = [replace(one, numa_node=None) for one in inventory.pci]
    assert "cpu -1\n  16:00.0" in read(str(topology_xml(replace(inventory, pci=away), devices[:1], ()))).outline()


def test_inventories_with_a_loop_are_refused(tmp_path: Path) -> None:
    inventory = inventory_of("l40s-x4", tmp_path)
    assert Inventory.from_json(inventory.to_json(), source="test") == inventory
    inventory.pci = [PciDevice("0000:01:00.0", "0000:02:00.0"), PciDevice("0000:02:00.0", "0000:01:00.0")]
    with pytest.raises(SluiceError, match=r"pci.0: 0000:01:00.0 below '0000:02:00.0': twice, or before its switch"):
        Inventory.from_json(inventory.to_json(), source="test")


def test_a_steps_tasks_make_its_files_once(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a task asks, the other ones wait."""
    state, made = agent.state, []
    state.inventory = inventory_of("dgx-h100", tmp_path / "node")
    state.devices = devices_of(state.inventory)
    one = record(grants=[Grant(device.index, device.uuid, "nvidia", "H100", 80 * GIB) for device in state.devices])
    agent.topologies.prepare()
    monkeypatch.setattr(
        "prolog_epilog.nccl_topology.topology_xml", lambda *words: made.append(words) or topology_xml(*words)
    )
    for _ in range(128):
        agent.topologies.write(one, [device.own_file for device in state.devices], ["mlx5_0"])
    assert len(made) == 9 + 127
    assert len(list((state.settings.run / "topology").rglob("*.xml"))) == 9


def test_files_are_roots_and_go_with_their_job(agent: Agent, tmp_path: Path) -> None:
    state = agent.state
    state.inventory = inventory_of("dgx-h100", tmp_path / "node")
    state.devices = devices_of(state.inventory)
    one = record(grants=[Grant(device.index, device.uuid, "nvidia", "H100", 80 * GIB) for device in state.devices[:2]])
    state.records = {one.job: one}
    files = agent.topologies
    files.prepare()
    open_ones = ["/dev/gpu1", "/dev/gpu5"]  # the second was not given to it
    files.write(one, ["/dev/gpu0", "/dev/gpu1"], ["mlx5_0"])
    paths = set((state.settings.run / "topology").rglob("*.xml"))
    tasks = (["/dev/gpu0", "/dev/gpu1"], ["/dev/gpu0"], ["/dev/gpu1"])
    assert {Path(files.exports(one, task, ["mlx5_0"])["NCCL_TOPO_FILE"]) for task in tasks} == paths
    files.retire(one)
    files.write(one, open_ones, ["mlx5_3"])
    (path,) = (state.settings.run / "topology").rglob("*.xml")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    assert [end.attributes["dev"] for end in read(path.read_text()).all() if end.name == "gpu"] == ["0"]
    assert files.exports(one, open_ones, ["mlx5_3"]) == {"NCCL_TOPO_FILE": str(path)}
    assert files.exports(one, ["/dev/gpu0"], []) == {}  # what a task says of itself makes no file
    assert len(list(path.parent.iterdir())) == 1
    nics = [nic.name for nic in state.inventory.nics]
    for number in range(100):
        files.write(one, open_ones, [name for bit, name in enumerate(nics) if number >> bit & 1])
    assert len(list(path.parent.iterdir())) == 64
    files.prepare()
    assert path.exists()
    files.retire(one)
    files.retire(one)
    files.write(one, open_ones, [])
    state.records.clear()
    files.prepare()
    assert list((state.settings.run / "topology").iterdir()) == []
