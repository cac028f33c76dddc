"""The probe on whole simulated machines, through pynvml, amdsmi and our Level Zero binding."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest
from simulated_node import Simulate

from gpu_sim import device_files, layout, load_platform, platform_names, read_state
from gpu_sim.fields import set_values
from gpu_sim.platform import Platform
from gpu_sim.state import NodeState
from gres_probe.collect import DEFAULT_DIR
from gres_probe.inventory import GpuFabric, Health, Inventory, LinkType
from gres_probe.probe import DEFAULT_TIMEOUT
from gres_probe.topology import FAST_LINKS, link_domains
from gres_probe.writer import node_devices
from prolog_epilog.devices import devices_of
from sluice.cli import probe as probe_command

# Per GPU or instance, below its vendor's figure: what a driver without a figure of its own reserve may be rounded up.
_ROUNDING_MIB = 512


@pytest.mark.parametrize("name", platform_names())
def test_every_platform_is_found_whole(simulate: Simulate, name: str) -> None:
    """Each GPU with the identity, place and memory that the machine was described with, and nothing unreadable."""
    node = simulate(name)
    platform = load_platform(name)
    inventory = node.probe()
    assert inventory.problems == []
    assert len(inventory.gpus) == len(platform.gpus)
    state = read_state(node.folder)
    for gpu in inventory.gpus:
        index = next(i for i, place in enumerate(platform.gpus) if place.pci == gpu.pci_address)
        place, model, record = platform.gpus[index], platform.model_of(index), state.gpus[index]
        assert gpu.vendor == model.vendor
        assert gpu.model == model.name
        assert gpu.uuid == record.uuid.decode()
        assert gpu.minor == record.minor
        assert gpu.numa_node == place.numa
        assert gpu.memory_total_mib == model.memory.total_mib
        usable = model.memory.total_mib - model.memory.reserved_mib
        if gpu.vendor == "nvidia" or os.geteuid() == 0:  # of the others only root sees what the driver keeps
            assert usable - _ROUNDING_MIB < gpu.memory_usable_mib <= usable
        assert gpu.driver_version == platform.drivers[model.vendor].version
        assert gpu.temperature_c == model.temperature.idle
        assert gpu.power_limit_max_w == model.power.max_w
        assert (gpu.power_limit_min_w, gpu.power_limit_default_w) == (model.power.min_w, model.power.default_w)
        assert gpu.cores
        assert gpu.health is Health.OK, gpu.health_reasons
        assert gpu.firmware_version
        assert gpu.capability
    assert [nic.name for nic in inventory.nics] == [nic.name for nic in platform.nics]
    assert inventory.sockets == platform.cpu.sockets
    assert inventory.cores_per_socket == platform.cpu.cores_per_socket
    assert inventory.threads_per_core == platform.cpu.threads_per_core
    assert len(inventory.cpu_cores) == platform.cpu.count
    _check_links(inventory, platform)


def _check_links(inventory: Inventory, platform: Platform) -> None:
    """The matrix is symmetric, and fast links are exactly those of the description."""
    order = [next(i for i, p in enumerate(platform.gpus) if p.pci == gpu.pci_address) for gpu in inventory.gpus]
    joined = set()
    for links in platform.links:
        members = platform.link_members(links)
        if links.pairs:
            joined |= {frozenset((one, other)) for one, other, _ in links.pairs}
        else:
            joined |= {frozenset((one, other)) for one in members for other in members if one != other}
    for row, one in enumerate(order):
        assert inventory.links[row][row].type is LinkType.SELF
        for column, other in enumerate(order):
            link = inventory.links[row][column]
            assert link == inventory.links[column][row]
            if row != column:
                assert (link.type in FAST_LINKS) == (frozenset((one, other)) in joined)
                assert link.type is not LinkType.UNKNOWN


def test_links_of_known_machines(simulate: Simulate) -> None:
    """DGX H100: NV18 between all, as its `nvidia-smi topo -m` shows, and a NIC of its own behind each GPU's switch."""
    inventory = simulate("dgx-h100").probe()
    assert {
        (link.type, link.width) for i, row in enumerate(inventory.links) for j, link in enumerate(row) if i != j
    } == {(LinkType.NVLINK, 18)}
    assert [gpu.nics[0] for gpu in inventory.gpus] == [
        "mlx5_0",
        "mlx5_3",
        "mlx5_4",
        "mlx5_5",
        "mlx5_6",
        "mlx5_9",
        "mlx5_10",
        "mlx5_11",
    ]
    assert link_domains(inventory) == [list(range(8))]


def test_machine_without_fast_links_shows_pci_paths(simulate: Simulate) -> None:
    inventory = simulate("l40s-x4").probe()
    assert [link.type for link in inventory.links[0]] == [
        LinkType.SELF,
        LinkType.PCI_SWITCH,
        LinkType.SYSTEM,
        LinkType.SYSTEM,
    ]
    assert link_domains(inventory) == [[0], [1], [2], [3]]


def test_minor_number_may_differ_from_ordinal(simulate: Simulate) -> None:
    inventory = simulate("mixed").probe("--vendor", "nvidia")
    assert [(gpu.index, gpu.minor, gpu.device_file) for gpu in inventory.gpus] == [
        (0, 1, "/dev/nvidia1"),
        (1, 0, "/dev/nvidia0"),
    ]


def test_lost_gpu_is_reported_and_left_out(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    with node.change() as state:
        state.gpus[3].lost = 1
    inventory = node.probe()
    assert [gpu.index for gpu in inventory.gpus] == [0, 1, 2, 4, 5, 6, 7]
    assert len(inventory.links) == 7
    (problem,) = inventory.problems
    assert (problem.vendor, problem.index) == ("nvidia", 3)
    assert "lost" in problem.what
    assert problem.remedy


@pytest.mark.parametrize(("platform", "vendor"), [("mi300x-platform", "amd"), ("intel-max-1550x4", "intel")])
def test_lost_gpu_of_other_vendors(simulate: Simulate, platform: str, vendor: str) -> None:
    node = simulate(platform)
    with node.change() as state:
        state.gpus[2].lost = 1
    inventory = node.probe()
    lost = load_platform(platform).gpus[2].pci
    assert lost not in [gpu.pci_address for gpu in inventory.gpus]
    assert len(inventory.gpus) == len(load_platform(platform).gpus) - 1
    (problem,) = inventory.problems
    assert problem.vendor == vendor and problem.remedy


@pytest.mark.parametrize("platform", ["dgx-h100", "mi300x-platform", "intel-max-1550x4"])
def test_current_utilisation(simulate: Simulate, platform: str) -> None:
    node = simulate(platform)
    with node.change() as state:
        state.gpus[1].utilisation = 70
    first, second = node.probe().gpus[:2]
    assert first.utilisation_percent == 0
    assert second.utilisation_percent is not None and abs(second.utilisation_percent - 70) <= 2


@pytest.mark.parametrize(
    ("field", "value", "health"),
    [
        ("remap_pending", 1, Health.DEGRADED),
        ("remap_failed", 1, Health.FAILED),
        ("ecc_uncorrected", 2, Health.DEGRADED),
        ("temperature", 88, Health.DEGRADED),
        ("temperature", 93, Health.FAILED),
    ],
)
def test_health_of_an_nvidia_gpu(simulate: Simulate, field: str, value: int, health: Health) -> None:
    node = simulate("dgx-h100")
    with node.change() as state:
        setattr(state.gpus[2], field, value)
    inventory = node.probe("--vendor", "nvidia")
    assert [gpu.health for gpu in inventory.gpus] == [health if gpu.index == 2 else Health.OK for gpu in inventory.gpus]
    assert inventory.gpus[2].health_reasons


@pytest.mark.parametrize("platform", ["mi300x-platform", "intel-max-1550x4"])
@pytest.mark.parametrize(
    ("field", "value", "health"), [("ecc_uncorrected_total", 3, Health.DEGRADED), ("temperature", 111, Health.FAILED)]
)
def test_health_of_other_vendors(simulate: Simulate, platform: str, field: str, value: int, health: Health) -> None:
    node = simulate(platform)
    with node.change() as state:
        setattr(state.gpus[1], field, value)
        if field == "ecc_uncorrected_total":
            state.gpus[1].ecc_uncorrected = value
    first, second = node.probe().gpus[:2]
    assert (first.health, second.health) == (Health.OK, health)
    if field == "ecc_uncorrected_total":
        assert second.ecc.uncorrected == value


def test_links_that_are_down_do_not_count(simulate: Simulate) -> None:
    """NVLinks to the switches of one GPU: 16 of 18 are up, then none, and it leaves the link domain."""
    node = simulate("dgx-h100")
    with node.change() as state:
        for link in list(state.gpus[2].links)[:2]:
            link.up = 0
    inventory = node.probe()
    assert [link.width for link in inventory.links[2]] == [16, 16, 0, 16, 16, 16, 16, 16]
    assert inventory.links[0][1].width == 18
    with node.change() as state:
        for link in state.gpus[2].links:
            link.up = 0
    inventory = node.probe()
    assert inventory.links[2][0].type is LinkType.NUMA_NODE
    assert link_domains(inventory) == [[0, 1, 3, 4, 5, 6, 7], [2]]


def test_xe_links_that_are_down_do_not_count(simulate: Simulate) -> None:
    node = simulate("intel-max-1550x4")
    before = node.probe().links[0][1].width
    with node.change() as state:
        link = next(link for link in state.gpus[0].links if link.peer == layout.LinkPeer.GPU and link.peer_gpu == 1)
        link.up = 0
    after = node.probe()
    assert after.links[0][1].width == after.links[1][0].width == before - 1


def test_slow_driver_is_waited_for(simulate: Simulate) -> None:
    node = simulate("rtx4090x4")
    with node.change() as state:
        state.head.drivers[layout.Vendor.NVIDIA].delay_ms = 2
    inventory = node.probe("--timeout", "60")
    assert len(inventory.gpus) == 4 and not inventory.problems


def test_old_driver_lacks_fields_but_no_gpu(simulate: Simulate) -> None:
    """A driver before R510 knows no reserved memory: what it keeps is what is used by no process."""
    node = simulate("dgx-a100")
    with node.change() as state:
        state.head.drivers[layout.Vendor.NVIDIA].generation = 470
        state.head.drivers[layout.Vendor.NVIDIA].version = b"470.256.02"
    inventory = node.probe()
    assert inventory.problems == []
    assert len(inventory.gpus) == len(load_platform("dgx-a100").gpus)
    model = load_platform("dgx-a100").model_of(0)
    usable = model.memory.total_mib - model.memory.reserved_mib
    for gpu in inventory.gpus:
        assert gpu.driver_version == "470.256.02"
        assert usable - _ROUNDING_MIB < gpu.memory_usable_mib <= usable
        assert gpu.memory_usable_mib % 256 == gpu.memory_total_mib % 256  # does not change from probe to probe


def test_memory_in_use_does_not_change_what_is_usable(simulate: Simulate) -> None:
    """The count of shards must not depend on the jobs of the moment."""
    for platform in ("dgx-h100", "mi300x-platform") if os.geteuid() == 0 else ("dgx-h100",):
        node = simulate(platform)
        before = node.probe()
        with node.change() as state:
            process = state.gpus[0].processes[0]
            process.pid, process.memory_mib, process.instance = 4242, 20000, layout.NO_INSTANCE
            state.gpus[0].process_count = 1
        after = node.probe()
        assert after.gpus[0].memory_usable_mib == before.gpus[0].memory_usable_mib
        used = (after.gpus[0].memory_used_mib or 0) - (before.gpus[0].memory_used_mib or 0)
        assert 20000 <= used < 21000


def test_mig_instances_with_every_device_file(simulate: Simulate) -> None:
    node = simulate("dgx-h100-mig")
    inventory = node.probe()
    assert inventory.problems == []
    platform = load_platform("dgx-h100-mig")
    there = {file.path for file in device_files(node.folder)}
    for gpu in inventory.gpus:
        mig = platform.gpus[gpu.index].mig
        assert gpu.partitioned == (mig is not None)
        assert sorted(part.profile for part in gpu.partitions) == sorted(mig.instances if mig else [])
        for part in gpu.partitions:
            assert len(part.device_files) == 3 and part.device_files[0] == gpu.device_file
            assert set(part.device_files) <= there
            assert part.uuid.startswith("MIG-")
            assert 0 < part.memory_mib < gpu.memory_total_mib
    files = [part.device_files[1] for gpu in inventory.gpus for part in gpu.partitions]
    assert len(files) == len(set(files))


@pytest.mark.parametrize("mode", ["cpx-nps4", "dpx-nps2", "qpx-nps1"])
def test_amd_partitions_are_devices_of_their_own(simulate: Simulate, mode: str) -> None:
    node = simulate("mi300x-platform")
    whole = node.probe()
    set_values(node.folder, 1, {"partitions": mode})
    inventory = node.probe()
    assert inventory.problems == []
    count = {"cpx": 8, "dpx": 2, "qpx": 4}[mode[:3]]
    gpu = inventory.gpus[1]
    assert [len(one.partitions) for one in inventory.gpus] == [0, count, *[0] * 6]
    assert gpu.partitioned and gpu.memory_usable_mib == whole.gpus[1].memory_usable_mib
    assert {(part.profile, part.memory_mib) for part in gpu.partitions} == {(mode, gpu.memory_usable_mib // count)}
    assert [part.uuid for part in gpu.partitions] == [f"{gpu.uuid}/{place}" for place in range(count)]
    files = [part.device_files[0] for part in gpu.partitions]
    assert files[0] == gpu.device_file and len(set(files)) == count
    assert {*files} <= {file.path for file in device_files(node.folder)}
    devices = node_devices(inventory)
    assert Counter(device.type for device in devices) == {"mi300x": 7, f"mi300x_{mode.replace('-', '.')}": count}
    found = devices_of(inventory)
    assert sorted(device.ordinal for device in found) == list(range(7 + count))
    assert [(device.ordinal, device.siblings) for device in found if device.partition] == [
        (place, count) for place in range(1, 1 + count)
    ]


def test_mig_without_capability_list_leaves_instances_out(simulate: Simulate, tmp_path: Path) -> None:
    inventory = simulate("dgx-h100-mig").probe("--proc-root", str(tmp_path / "none"))
    assert all(not gpu.partitions for gpu in inventory.gpus)
    assert inventory.problems and "capability file" in inventory.problems[0].what


def test_all_vendors_on_one_node(simulate: Simulate) -> None:
    inventory = simulate("mixed").probe()
    vendors = [gpu.vendor for gpu in inventory.gpus]
    assert vendors == sorted(vendors) and set(vendors) == {"amd", "intel", "nvidia"}
    for row, one in enumerate(inventory.gpus):
        for column, other in enumerate(inventory.gpus):
            if one.vendor != other.vendor:
                assert inventory.links[row][column].type not in FAST_LINKS | {LinkType.UNKNOWN}


def test_missing_library_of_hardware_that_is_there(simulate: Simulate, tmp_path: Path) -> None:
    """No vendor library at all: a problem with a remedy for each vendor whose GPUs the kernel shows."""
    inventory = simulate("mixed").probe(env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert inventory.gpus == []
    assert [problem.vendor for problem in inventory.problems] == ["amd", "intel", "nvidia"]
    assert all("0000:" in problem.what and "install" in problem.remedy for problem in inventory.problems)


def test_hanging_driver_ends_in_time_and_spares_the_others(simulate: Simulate) -> None:
    node = simulate("mixed")
    with node.change() as state:
        state.head.drivers[layout.Vendor.NVIDIA].hang = 1
    inventory = node.probe("--timeout", "6")
    assert {gpu.vendor for gpu in inventory.gpus} == {"amd", "intel"}
    (problem,) = inventory.problems
    assert problem.vendor == "nvidia" and "no answer" in problem.what and "6 s" in problem.what


def test_damaged_driver_state_is_an_error_not_a_guess(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    data = bytearray((node.folder / "state").read_bytes())
    data[5000] ^= 0xFF
    (node.folder / "state").write_bytes(data)
    inventory = node.probe()
    assert inventory.gpus == []
    (problem,) = inventory.problems
    assert problem.vendor == "nvidia" and problem.remedy


def test_driver_not_loaded(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    with node.change() as state:
        state.head.drivers[layout.Vendor.NVIDIA].loaded = 0
    (problem,) = node.probe().problems
    assert "8 NVIDIA GPUs" in problem.what and "modprobe nvidia" in problem.remedy


def test_hostile_model_name_is_cleaned(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    with node.change() as state:
        state.gpus[0].name = b"H100\x1b[31m\nName=gpu\x07 \xe2\x80\xae80GB|x"
    inventory = node.probe()
    assert inventory.gpus[0].model == "H100 [31m Name=gpu 80GB|x"
    printed = node.run("probe").stdout
    assert "\x1b" not in printed and len(printed.splitlines()) == 9
    assert node.run("probe", "-P", "-n", "-o", "model,index").stdout.splitlines()[0] == "H100 [31m Name=gpu 80GB x|0"


def test_undecodable_model_name_is_a_problem_of_that_gpu(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    with node.change() as state:
        state.gpus[0].name = b"\xff\xfe"
    inventory = node.probe()
    assert [gpu.index for gpu in inventory.gpus] == list(range(1, 8))
    assert [problem.index for problem in inventory.problems] == [0]


def test_missing_device_file_is_reported(simulate: Simulate, tmp_path: Path) -> None:
    node = simulate("dgx-h100-mig")
    dev = tmp_path / "dev"
    for file in device_files(node.folder):
        path = dev / file.path.removeprefix("/dev/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert node.probe("--dev-root", str(dev)).problems == []
    (dev / "nvidia5").unlink()
    gone = node.probe("--dev-root", str(dev)).gpus
    assert 5 not in [gpu.index for gpu in gone]
    instance = next(part for gpu in gone for part in gpu.partitions)
    (dev / instance.device_files[2].removeprefix("/dev/")).unlink()
    inventory = node.probe("--dev-root", str(dev))
    assert instance.uuid not in [part.uuid for gpu in inventory.gpus for part in gpu.partitions]
    assert sorted(problem.index or 0 for problem in inventory.problems) == [0, 5]


def test_table_json_and_fields(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    lines = node.run("probe").stdout.splitlines()
    assert lines[0].split() == "INDEX VENDOR MODEL MEMORY USED UTIL TEMP NUMA CORES DEVICE HEALTH".split()
    assert len(lines) == 9 and max(map(len, lines)) <= 120
    plain = node.run("probe", "-P", "-o", "index,uuid,memory").stdout.splitlines()
    assert plain[0] == "INDEX|UUID|MEMORY" and plain[8].split("|")[2] == "81559"
    assert "capability" in node.run("probe", "-o", "help").stdout.split()
    wrong = node.run("probe", "-o", "color")
    assert wrong.returncode == 2 and "'color'" in wrong.stderr and not wrong.stdout


def test_drop_writes_one_whole_file(simulate: Simulate, tmp_path: Path) -> None:
    node = simulate("dgx-h100")
    done = node.run("probe", "--drop", str(tmp_path / "drop"), "--node", "gpu-01")
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "drop").iterdir()
    assert file.name == "gpu-01.json" and stat.S_IMODE(file.stat().st_mode) == 0o644
    assert len(Inventory.from_json(file.read_bytes(), source=str(file)).gpus) == 8


def test_the_commands_defaults_are_the_rooms() -> None:
    """They are repeated in the command line, which starts faster without importing the rooms."""
    assert probe_command.DEFAULT_TIMEOUT == DEFAULT_TIMEOUT
    assert Path(probe_command.DROP_FOLDER) == DEFAULT_DIR


def test_topology_matrix_as_people_know_it(simulate: Simulate) -> None:
    done = simulate("dgx-h100").run("topo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:9] == [*(f"GPU{number}" for number in range(8)), "NIC0"]
    assert lines[1].split()[:9] == ["GPU0", "X", *["NV18"] * 7]
    assert lines[1].split()[-2:] == ["0-55,112-167", "0"]
    assert "  NV#   = a number of NVLinks, directly or over NVSwitch" in lines
    assert "  NIC2: mlx5_3" in lines


def test_topology_of_several_vendors(simulate: Simulate) -> None:
    matrix = simulate("mixed").run("topo", "-P").stdout.splitlines()
    header = matrix[0].split("|")
    assert header[0] == "" and {"amd0", "nvidia0", "nvidia1", "intel0"} <= set(header)
    assert all(len(row.split("|")) == len(header) for row in matrix)


CLUSTER = "2f1c0000-0000-4000-8000-000000000001"


def in_domain(state: NodeState) -> None:
    for gpu in state.gpus:
        gpu.fabric_cluster[:] = list(UUID(CLUSTER).bytes)
        gpu.fabric_clique = 7


def test_domain_of_links_between_nodes(simulate: Simulate) -> None:
    node = simulate("dgx-h100")
    assert [gpu.fabric for gpu in node.probe().gpus] == [None] * 8
    with node.change() as state:
        in_domain(state)
    assert [gpu.fabric for gpu in node.probe().gpus] == [GpuFabric(CLUSTER, 7)] * 8


def test_both_calls_say_the_same_of_a_domain(simulate: Simulate) -> None:
    """nvmlDeviceGetGpuFabricInfoV in the two versions that there are, and in one that there is not."""
    node = simulate("dgx-h100")
    with node.change() as state:
        in_domain(state)
    program = """if True:
        import ctypes, pynvml as n
        n.nvmlInit()
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        for name in ("v2", "v3"):
            info = getattr(n, f"c_nvmlGpuFabricInfo_{name}_t")()
            n.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
            print(bytes(info.clusterUuid).hex(), info.cliqueId, info.state)
        info.version = 1
        try:
            n.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
        except n.NVMLError as error:
            print(error.value)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | node.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == [f"{UUID(CLUSTER).hex} 7 3"] * 2 + ["25", ""]
