"""Paths over PCI, nearness of NICs, link domains, and what the kernel reports of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_sim import load_platform
from gpu_sim.sysfs import write_tree
from gres_probe.inventory import Gpu, Inventory, Link, LinkType, NicPort
from gres_probe.machine import CpuLayout, Machine, PciFunction, natural, pci_address
from gres_probe.topology import link_domains, link_matrix, pci_path, rdma_nics


def function(path: str, numa: int | None = 0) -> PciFunction:
    parts = tuple(path.split("/"))
    return PciFunction(parts[-1], 0x10DE, 0, "nvidia", False, parts, numa, "0-3")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # Two functions of one board, two slots of one switch, switches in a row, one host bridge, one node, two nodes.
        ("a/b/c/x.0", "a/b/c/x.1", LinkType.PCI_SWITCH),
        ("a/port/up/down1/x", "a/port/up/down2/y", LinkType.PCI_SWITCH),
        ("a/port/up/down1/x", "a/port/up/down2/up2/down3/y", LinkType.PCI_BRIDGES),
        ("a/port/up/down1/up1/down/x", "a/port/up/down2/up2/down/y", LinkType.PCI_BRIDGES),
        ("a/port1/x", "a/port2/y", LinkType.HOST_BRIDGE),
        ("a/x", "a/y", LinkType.HOST_BRIDGE),
        ("a/port/x", "b/port/y", LinkType.NUMA_NODE),
    ],
)
def test_path_kinds(one: str, other: str, expected: LinkType) -> None:
    assert pci_path(function(one), function(other)) is expected
    assert pci_path(function(other), function(one)) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (0, 1, LinkType.SYSTEM),
        (None, None, LinkType.NUMA_NODE),
        (0, None, LinkType.UNKNOWN),
        (3, 3, LinkType.NUMA_NODE),
    ],
)
def test_path_across_host_bridges(one: int | None, other: int | None, expected: LinkType) -> None:
    assert pci_path(function("a/p/x", one), function("b/p/y", other)) is expected


def test_path_to_itself_and_to_nothing() -> None:
    assert pci_path(function("a/b/x"), function("a/b/x")) is LinkType.SELF
    assert pci_path(function("a/b/x"), None) is LinkType.UNKNOWN


def inventory(size: int, joined: set[tuple[int, int]]) -> Inventory:
    gpus = [Gpu("nvidia", n, f"G{n}", "m", f"/dev/nvidia{n}", n, pci_address(0, n, 0, 0), 1, 1) for n in range(size)]

    def link(one: int, other: int) -> Link:
        fast = (one, other) in joined or (other, one) in joined
        return Link(LinkType.NVLINK, 2) if fast else Link(LinkType.SYSTEM)

    return Inventory("n1", gpus, [[link(row, column) for column in range(size)] for row in range(size)])


def test_link_domains_join_over_others() -> None:
    assert link_domains(inventory(6, {(0, 2), (2, 4), (3, 5)})) == [[0, 2, 4], [1], [3, 5]]
    assert link_domains(inventory(0, set())) == []


@given(
    st.integers(0, 12).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11))))
    )
)
def test_link_domains_are_the_connected_components(case: tuple[int, set[tuple[int, int]]]) -> None:
    size, pairs = case
    joined = {(one, other) for one, other in pairs if one < size and other < size and one != other}
    domains = link_domains(inventory(size, joined))
    owner = {position: number for number, domain in enumerate(domains) for position in domain}
    assert sorted(owner) == list(range(size))
    assert all(owner[one] == owner[other] for one, other in joined)
    # A domain is not larger than its links make it: a spanning tree needs one link fewer than it has members.
    for number, domain in enumerate(domains):
        within = {frozenset(pair) for pair in joined if owner[pair[0]] == number}
        assert domain == sorted(domain) and len(within) >= len(domain) - 1
    assert [domain[0] for domain in domains] == sorted(domain[0] for domain in domains)


def tree(root: Path, devices: dict[str, dict[str, str]]) -> Machine:
    """A sysfs of PCI functions: path below /sys/devices -> files; `rdma` names an interface, `driver` a driver."""
    for path, files in devices.items():
        folder = root / "devices" / path
        folder.mkdir(parents=True)
        for name, text in files.items():
            if name == "driver":
                (folder / "driver").symlink_to(f"../drivers/{text}")
            elif name == "rdma":
                (root / "class/infiniband" / text).mkdir(parents=True)
                (root / "class/infiniband" / text / "device").symlink_to(folder)
            elif name == "drm":
                for entry in text.split():
                    (folder / "drm" / entry).mkdir(parents=True)
            else:
                (folder / name).write_text(text + "\n")
        link = root / "bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    return Machine(root, root / "proc", None)


def test_kernel_shows_gpus_of_every_class_but_virtual_functions(tmp_path: Path) -> None:
    machine = tree(
        tmp_path,
        {
            "pci0000:00/0000:00:01.0/0000:01:00.0": {"class": "0x030000", "vendor": "0x10de", "driver": "nvidia"},
            "pci0000:00/0000:00:02.0/0000:02:00.0": {"class": "0x030200", "vendor": "0x10de"},
            "pci0000:00/0000:00:03.0/0000:03:00.0": {"class": "0x120000", "vendor": "0x1002", "numa_node": "-1"},
            "pci0000:00/0000:00:04.0/0000:04:00.0": {"class": "0x020000", "vendor": "0x15b3"},
            "pci0000:00/0000:00:05.0/0000:05:00.1": {"class": "0x038000", "vendor": "0x8086", "physfn": ""},
            "pci10000:e0/10000:e0:06.0/10000:e1:00.0": {"class": "0x038000", "vendor": "0x8086", "numa_node": "1"},
        },
    )
    assert [gpu.address for gpu in machine.gpu_functions] == [
        "0000:01:00.0",
        "0000:02:00.0",
        "0000:03:00.0",
        "10000:e1:00.0",
    ]
    first, second, third, last = machine.gpu_functions
    assert (first.driver, second.driver) == ("nvidia", "")
    assert (third.vendor, third.numa_node) == (0x1002, None)
    assert (last.numa_node, last.path) == (1, ("pci10000:e0", "10000:e0:06.0", "10000:e1:00.0"))


def test_drm_files_and_absent_functions(tmp_path: Path) -> None:
    machine = tree(tmp_path, {"pci0000:00/0000:03:00.0": {"class": "0x038000", "drm": "card1 renderD129 controlD65"}})
    assert machine.drm_files("0000:03:00.0") == ("/dev/dri/renderD129", "/dev/dri/card1")
    assert machine.drm_files("0000:04:00.0") == ("", "")
    assert machine.pci_function("0000:04:00.0") is None


def test_near_nics_nearest_first(tmp_path: Path) -> None:
    machine = tree(
        tmp_path,
        {
            "pci0000:10/p/u/d1/0000:11:00.0": {"class": "0x030200", "numa_node": "0"},
            "pci0000:10/p/u/d2/0000:12:00.0": {"rdma": "mlx5_10", "numa_node": "0"},
            "pci0000:10/p/u/d3/0000:13:00.0": {"rdma": "mlx5_2", "numa_node": "0"},
            "pci0000:20/p/0000:21:00.0": {"rdma": "mlx5_0", "numa_node": "0"},
            "pci0000:30/p/0000:31:00.0": {"rdma": "mlx5_1", "numa_node": "1"},
        },
    )
    gpus = [Gpu("nvidia", 0, "G", "m", "/dev/nvidia0", 0, "0000:11:00.0", 1, 1)]
    nics = rdma_nics(gpus, machine, {})
    assert [nic.name for nic in nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    assert gpus[0].nics == ["mlx5_2", "mlx5_10", "mlx5_0"]
    assert [link.type for link in nics[2].links] == [
        LinkType.PCI_SWITCH,
        LinkType.NUMA_NODE,
        LinkType.SYSTEM,
        LinkType.SELF,
        LinkType.PCI_SWITCH,
    ]


def test_own_links_win_over_pci_and_stay_within_a_vendor(tmp_path: Path) -> None:
    machine = tree(
        tmp_path,
        {f"pci0000:00/0000:0{n}:01.0/0000:1{n}:00.0": {"class": "0x030200", "numa_node": "0"} for n in range(4)},
    )
    gpus = [
        Gpu(vendor, index, f"{vendor}{index}", "m", f"/dev/{vendor}{index}", index, f"0000:1{place}:00.0", 1, 1)
        for place, (vendor, index) in enumerate([("amd", 0), ("amd", 1), ("nvidia", 0), ("nvidia", 1)])
    ]
    matrix = link_matrix(gpus, {"amd": {(0, 1): Link(LinkType.XGMI, 4)}, "nvidia": {}}, machine)
    bridge = LinkType.HOST_BRIDGE
    assert [[link.type for link in row] for row in matrix] == [
        [LinkType.SELF, LinkType.XGMI, bridge, bridge],
        [LinkType.XGMI, LinkType.SELF, bridge, bridge],
        [bridge, bridge, LinkType.SELF, bridge],
        [bridge, bridge, bridge, LinkType.SELF],
    ]


def cpus(root: Path, packages: list[list[tuple[int, ...]]], package_file: str = "package_cpus_list") -> Machine:
    """A sysfs of processors: packages of cores of CPU numbers."""
    base = root / "devices/system/cpu"
    for package in packages:
        members = sorted(cpu for core in package for cpu in core)
        for core in package:
            for cpu in core:
                topology = base / f"cpu{cpu}/topology"
                topology.mkdir(parents=True)
                (topology / package_file).write_text(",".join(map(str, members)) + "\n")
                (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    (base / "online").write_text(",".join(str(cpu) for package in packages for core in package for cpu in core) + "\n")
    return Machine(root, root, None)


def test_cpu_layout_of_two_sockets_with_threads(tmp_path: Path) -> None:
    machine = cpus(tmp_path, [[(0, 4), (1, 5)], [(2, 6), (3, 7)]])
    assert machine.cpu_layout() == CpuLayout(2, 2, 2, [0, 1, 2, 3, 0, 1, 2, 3])


def test_cpu_layout_with_interleaved_sockets_and_older_kernels(tmp_path: Path) -> None:
    machine = cpus(tmp_path, [[(0,), (2,)], [(1,), (3,)]], "core_siblings_list")
    assert machine.cpu_layout() == CpuLayout(2, 2, 1, [0, 2, 1, 3])


def test_cpu_layout_unknown(tmp_path: Path) -> None:
    assert Machine(tmp_path).cpu_layout() == CpuLayout()
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-3\n")
    assert Machine(tmp_path).cpu_layout() == CpuLayout()
    (tmp_path / "devices/system/cpu/online").write_text("rubbish\n")
    assert Machine(tmp_path).cpu_layout() == CpuLayout()


def test_memory_counts_numa_nodes_and_the_whole(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path)
    assert machine.memory_mib() is None
    for node, kib in enumerate((2048, 4096)):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       {kib} kB\nNode {node} MemFree: 1 kB\n")
    assert machine.memory_mib() == 6
    (tmp_path / "meminfo").write_text("MemTotal:        10240 kB\n")
    assert machine.memory_mib() == 10
    (tmp_path / "meminfo").write_text("MemTotal:        4096 kB\n")
    assert machine.memory_mib() == 4  # what slurmd registers, and not another machine's below /sys


@given(st.lists(st.sampled_from(["mlx5_0", "mlx5_2", "mlx5_10", "bnxt_re0", "10", "a", ""])))
def test_natural_order_sorts_anything(names: list[str]) -> None:
    names.sort(key=natural)
    wanted = [name for name in ("mlx5_0", "mlx5_2", "mlx5_10") if name in names]
    assert list(dict.fromkeys(name for name in names if name.startswith("mlx5"))) == wanted


def test_what_sysfs_says_of_an_adapter(tmp_path: Path) -> None:
    """InfiniBand with virtual functions, RoCE, and soft RoCE, which has no device below it."""
    shown = load_platform("dgx-h100")
    first, second = shown.nics[:2]
    nics = [
        first.model_copy(update={"virtual_functions": 2}),
        second.model_copy(update={"link_layer": "Ethernet", "state": "DOWN"}),
    ]
    write_tree(tmp_path, shown.model_copy(update={"nics": nics}))
    port = tmp_path / "sys/class/infiniband/rxe0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    machine = Machine(tmp_path / "sys", dev_root=None)
    found = {nic.name: nic for nic in rdma_nics([], machine, machine.rdma_ports())}
    assert list(found) == ["mlx5_0", "mlx5_0v0", "mlx5_0v1", "mlx5_1", "rxe0"]
    physical, virtual, ethernet, soft = (found[name] for name in ("mlx5_0", "mlx5_0v1", "mlx5_1", "rxe0"))
    assert (physical.virtual_functions, physical.parent) == (2, "")
    assert (virtual.virtual_functions, virtual.parent) == (0, physical.pci_address)
    assert (physical.firmware, physical.board) == ("28.39.1002", "MT_0000000838")
    assert physical.device_file.startswith("/dev/infiniband/uverbs")
    assert len({nic.guid for nic in found.values()}) == 5
    assert (physical.ports[0].state, physical.ports[0].physical_state) == ("ACTIVE", "LinkUp")
    assert (physical.ports[0].rate_gbps, physical.ports[0].guid) == (400.0, physical.guid)
    assert physical.ports[0].lid
    assert (ethernet.ports[0].link_layer, ethernet.ports[0].network) == ("Ethernet", "net_mlx5_1")
    assert (ethernet.ports[0].state, ethernet.ports[0].lid) == ("DOWN", None)
    assert (soft.pci_address, soft.guid, soft.ports[0].state) == ("", "", "ACTIVE")
    inventory = Inventory("n1", nics=list(found.values()))
    assert Inventory.from_json(inventory.to_json(), source="test").nics == inventory.nics


def test_what_a_kernel_cannot_say(tmp_path: Path) -> None:
    """Files that are missing, empty or of another form are unknown."""
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in {"rate": "fast", "state": "ACTIVE", "lid": "none", "link_layer": "InfiniBand"}.items():
        (port / name).write_text(text)
    (port.parent.parent / "node_guid").write_text("0000:0000:0000:0000\n")
    machine = Machine(tmp_path, dev_root=None)
    (nic,) = rdma_nics([], machine, machine.rdma_ports())
    assert nic.guid == ""
    assert nic.ports == [NicPort(1, link_layer="InfiniBand")]


def test_words_of_drivers_leave_the_inventory_valid(tmp_path: Path) -> None:
    """A physical state of two words or none, LIDs of Omni-Path, and ports of adapters in switchdev mode."""
    port = tmp_path / "class/infiniband/hfi1_0/ports/1"
    port.mkdir(parents=True)
    (port.parent / "256").mkdir()
    said = {"state": "0: <unknown>", "phys_state": "7: Phy Test", "lid": "0x10000", "link_layer": "InfiniBand"}
    for name, text in said.items():
        (port / name).write_text(text)
    machine = Machine(tmp_path, dev_root=None)
    (nic,) = rdma_nics([], machine, machine.rdma_ports())
    assert nic.ports == [NicPort(1, physical_state="PhyTest", link_layer="InfiniBand")]
    Inventory("n1", nics=[nic]).check("test")
