"""Planes of RDMA interfaces: what the fabric says, what nics.sluice.conf gets, and what keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gres_probe.collect import write_inventory
from gres_probe.deploy import gres_changes
from gres_probe.inventory import Gpu, Inventory, Link, LinkType, Nic, NicPort
from gres_probe.nic_groups import NICS_FILE, read, with_planes, without_planes
from gres_probe.writer import generate
from sluice.base.errors import SluiceError
from sluice.cli.fabric import command as fabric_command
from sluice.fabric.ibnet import read_ibnetdiscover
from sluice.fabric.model import Fabric
from sluice.fabric.planes import planes_of
from tests.unit.fabric.networks import Cable, guid_of, ibnetdiscover, rails

NODES = ["n1", "n2"]
ADAPTERS = 4
TWO: list[Cable] = [
    (f"{plane}-leaf", 10 * node + nic, f"n{node}/mlx5_{nic}", 1) for node in (1, 2) for nic, plane in enumerate("abab")
]
"""Two planes of one switch each, and four adapters a node."""


def fabric_of(cables: list[Cable]) -> Fabric:
    return Fabric([read_ibnetdiscover(ibnetdiscover(cables), "test")])


def test_planes_or_else_rails() -> None:
    of_node = {f"mlx5_{nic}": 1 + nic % 2 for nic in range(ADAPTERS)}
    assert planes_of(fabric_of(TWO), NODES) == {"n1": of_node, "n2": of_node}
    alone = fabric_of([*TWO, ("lost", 1, "lost2", 1), ("0-lost", 1, "0-lost2", 1)])  # switches without nodes
    assert planes_of(alone, NODES) == {"n1": of_node, "n2": of_node}
    assert planes_of(fabric_of(rails(2, 2, 2)), NODES) == {node: {"mlx5_0": 1, "mlx5_1": 2} for node in NODES}
    shared = [("leaf", 10 * node + nic, f"n{node}/mlx5_{nic}", 1) for node in (1, 2) for nic in (0, 1)]
    assert planes_of(fabric_of(shared), NODES) == {}
    islands = [("a", 1, "n1/mlx5_0", 1), ("b", 1, "n2/mlx5_0", 1)]  # no node is in two
    assert planes_of(fabric_of(islands), NODES) == {}
    both = [*TWO, ("b-leaf", 99, "n1/mlx5_0", 2)]  # an adapter with a port in each
    assert planes_of(fabric_of(both), NODES)["n1"] == {name: of_node[name] for name in list(of_node)[1:]}


def test_lines_with_planes() -> None:
    assert with_planes("n1 0,1 0,1,2", [2, 1, 0]) == "n1 0,1 0/2,1/1,2"
    assert with_planes("n1 0,1 0/2,1/1,2", [0, 0, 3]) == "n1 0,1 0,1,2/3"
    assert without_planes("n1 0,1 0/2,1/31,2") == "n1 0,1 0,1,2"


def machine(node: str, adapters: int = ADAPTERS) -> Inventory:
    """A GPU and an adapter below each of its switches."""
    kinds = [LinkType.SYSTEM, LinkType.PCI_SWITCH]
    gpus = [
        Gpu(
            "nvidia",
            number,
            f"GPU-{number}",
            "NVIDIA H100",
            f"/dev/nvidia{number}",
            number,
            f"0000:{number}1:00.0",
            81920,
            81000,
        )
        for number in range(adapters)
    ]
    links = [[Link(LinkType.SELF if a == b else LinkType.SYSTEM) for b in range(adapters)] for a in range(adapters)]
    inventory = Inventory(node, gpus, links)
    inventory.nics = [
        Nic(
            f"mlx5_{nic}",
            f"0000:{nic}2:00.0",
            links=[
                *(Link(kinds[gpu == nic]) for gpu in range(adapters)),
                *(Link(LinkType.SELF if other == nic else LinkType.SYSTEM) for other in range(adapters)),
            ],
            guid=guid_of(f"{node}/mlx5_{nic}"),
            device_file=f"/dev/infiniband/uverbs{nic}",
            ports=[NicPort(1, state="ACTIVE", link_layer="InfiniBand")],
        )
        for nic in range(adapters)
    ]
    return inventory


class Site:
    """slurm.conf, nics.sluice.conf, inventories, and the fabric."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.listing, self.inventories = folder, folder / "listing", folder / "inventories"
        (folder / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=ctl\nNodeName=n[1-2] CPUs=1 Gres=nic:4\n")
        self.machines = [machine(node) for node in NODES]
        for one in self.machines:
            write_inventory(self.inventories, one)
        self.file = folder / NICS_FILE
        self.file.write_text(generate(self.machines, nics=True).nics_conf())
        self.listing.write_text(ibnetdiscover(TWO))

    def run(self, name: str, *words: str) -> Result:
        known = ["--slurm-conf", str(self.folder), "--ibnetdiscover", str(self.listing), "--slurm-version", "24.11.5"]
        return CliRunner().invoke(fabric_command, [name, *known, "--inventory-dir", str(self.inventories), *words])

    def lines(self) -> dict[str, str]:
        return read(self.file.read_text())


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_discover_writes_planes_and_check_compares_them(site: Site) -> None:
    plain = site.file.read_text()
    shown = site.run("discover")
    assert "+n1 0,1,2,3 0/1,1/2,2/1,3/2\n" in shown.output
    assert site.file.read_text() == plain
    assert site.run("discover", "--write").exit_code == 0
    assert site.lines() == {node: f"{node} 0,1,2,3 0/1,1/2,2/1,3/2" for node in NODES}
    assert site.run("check").exit_code == 0
    moved = [(("b-leaf", 70, *cable[2:]) if cable[2] == "n2/mlx5_0" else cable) for cable in TWO]
    site.listing.write_text(ibnetdiscover(moved))
    found = site.run("check")
    assert found.exit_code == 1
    assert "other-plane: n2: groups and planes of interfaces are 0/1,1/2,2/1,3/2, " in found.output
    assert ", discovered 0/2,1/2,2/1,3/2\n" in found.output
    site.file.write_text(plain.replace("n1 0", "n1 1"))
    damaged = site.run("discover", "--write")
    assert isinstance(damaged.exception, SluiceError)
    assert str(site.file) in str(damaged.exception)


def test_gres_write_keeps_planes_of_the_same_interfaces(site: Site) -> None:
    site.run("discover", "--write")
    kept = gres_changes(site.machines, site.folder, slurm=None, gres=None, slurm_version=(24, 11, 5), nics=True)
    assert [change.new for change in kept.files if change.path == site.file] == [site.file.read_text()]
    others = [site.machines[0], machine("n2", 3)]
    changes = gres_changes(others, site.folder, slurm=None, gres=None, slurm_version=(24, 11, 5), nics=True)
    (text,) = [change.new for change in changes.files if change.path == site.file]
    assert list(read(text).values()) == ["n1 0,1,2,3 0/1,1/2,2/1,3/2", "n2 0,1,2 0,1,2"]
    assert any("n2: other interfaces than before" in note for note in changes.notes)
