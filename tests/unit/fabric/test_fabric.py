"""From what sources print to the model, its problems, and what Slurm gets."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gres_probe.inventory import Gpu, GpuFabric, Inventory, Nic, NicPort
from sluice.base.errors import SluiceError, UsageError
from sluice.cli.fabric import command as fabric_command
from sluice.fabric.check import adapters_by_guid, compare, measured
from sluice.fabric.ibnet import read_ibnetdiscover
from sluice.fabric.lldp import parse_lldp, read_lldp
from sluice.fabric.model import Fabric, renamed
from sluice.fabric.providers import Located, ask_provider, located
from sluice.fabric.tree import blocks_of, tree_of
from sluice.slurm.topology import Switch, Topology, read_topology, read_topology_yaml, topology_conf, topology_yaml
from tests.unit.fabric.networks import Cable, guid_of, ibnetdiscover, rails

NODES = [f"n{number}" for number in range(1, 9)]
TWO_UNITS = rails(4, 2, 2) + rails(4, 2, 2, first=5, unit="b")


def fabric_of(cables: list[Cable], **more: dict[str, str]) -> Fabric:
    return Fabric([read_ibnetdiscover(ibnetdiscover(cables, **more), "test")])


def kinds(fabric: Fabric, nodes: list[str] = NODES) -> list[str]:
    return [problem.kind for problem in fabric.judge(nodes)]


def test_rails_and_planes() -> None:
    fabric = fabric_of(TWO_UNITS)
    assert kinds(fabric) == []
    assert len(fabric.links) == len(TWO_UNITS)
    names = [[fabric.devices[one].name for one in rail] for rail in fabric.rails(NODES)]
    assert names == [["a-leaf1", "b-leaf1"], ["a-leaf2", "b-leaf2"]]
    assert len(fabric.planes()) == 1
    assert [device.name for device in fabric.adapters["n1"]] == ["mlx5_0", "mlx5_1"]
    separate = fabric_of([("p1", 1, "n1/mlx5_0", 1), ("p2", 1, "n1/mlx5_1", 1), ("p1", 2, "n2/mlx5_0", 1)])
    assert len(separate.planes()) == 2
    shared = fabric_of([("leaf", 1, "n1/mlx5_0", 1), ("leaf", 2, "n1/mlx5_1", 1)])
    assert shared.rails() == []


def test_switches_that_share_nodes_are_one_for_slurm() -> None:
    tree, unlike = tree_of(fabric_of(TWO_UNITS), NODES)
    assert unlike == []
    assert topology_conf(tree).splitlines()[1:] == [
        "SwitchName=group-a-leaf1 Nodes=n[1-4]",
        "SwitchName=group-b-leaf1 Nodes=n[5-8]",
        "SwitchName=group-spine1 Switches=group-a-leaf1,group-b-leaf1",
    ]


def test_three_levels_and_what_is_not_a_node_of_slurm() -> None:
    cables: list[Cable] = [("core", 99, "storage1/mlx5_0", 1)]
    for leaf in range(1, 5):
        cables += [(f"leaf{leaf}", port, f"n{2 * (leaf - 1) + port}/mlx5_0", 1) for port in (1, 2)]
        cables.append((f"leaf{leaf}", 40, f"pod{(leaf + 1) // 2}", leaf))
    cables += [("pod1", 40, "core", 1), ("pod2", 40, "core", 2)]
    tree, unlike = tree_of(fabric_of(cables), NODES)
    assert [(one.name, one.nodes or one.switches) for one in tree.switches] == [
        ("leaf1", ("n1", "n2")),
        ("leaf2", ("n3", "n4")),
        ("leaf3", ("n5", "n6")),
        ("leaf4", ("n7", "n8")),
        ("pod1", ("leaf1", "leaf2")),
        ("pod2", ("leaf3", "leaf4")),
        ("core", ("pod1", "pod2")),
    ]
    assert unlike == []


def test_a_ring_is_named_and_still_joined() -> None:
    cables: list[Cable] = [(f"s{one}", one, f"n{one}/mlx5_0", 1) for one in (1, 2, 3)]
    cables += [("s1", 30, "s2", 31), ("s2", 30, "s3", 31), ("s3", 30, "s1", 31)]
    tree, unlike = tree_of(fabric_of(cables), NODES[:3])
    assert [problem.kind for problem in unlike] == ["no-tree"]
    assert tree.switches[-1] == Switch("fabric", switches=("s1", "s2", "s3"))


def test_two_planes_of_rings_have_one_top() -> None:
    cables: list[Cable] = []
    for plane in "ab":
        cables += [(f"{plane}{one}", one, f"n{one}/{plane}", 1) for one in (1, 2, 3)]
        cables += [(f"{plane}1", 30, f"{plane}2", 31), (f"{plane}2", 30, f"{plane}3", 31)]
    tree, unlike = tree_of(fabric_of(cables), NODES[:3])
    assert [problem.kind for problem in unlike] == ["no-tree"]
    assert [one.name for one in tree.switches if one.switches] == ["fabric"]


def test_the_top_has_a_name_of_its_own() -> None:
    """Where two planes of three switches each have the names that the tops would be given."""
    names = {"a": ("fabric", "x", "fabric-fabric"), "b": ("s1", "s2", "s3")}
    cables: list[Cable] = []
    for first, plane in zip((1, 4), names.values(), strict=True):
        cables += [(switch, 1, f"n{number}/a", 1) for number, switch in enumerate(plane, start=first)]
        cables += [(plane[0], 30, plane[1], 31), (plane[1], 30, plane[2], 31)]
    tree, _ = tree_of(fabric_of(cables), NODES[:6])
    given = [one.name for one in tree.switches]
    assert len(given) == 8
    assert len(set(given)) == 8


def test_two_hosts_of_one_name() -> None:
    """The racks of both would be one for Slurm; what the inventories say of GUIDs decides."""
    text = ibnetdiscover(TWO_UNITS).replace("n8 mlx5_0", "n1 mlx5_0").replace("n8 mlx5_1", "n1 mlx5_1")
    reported = read_ibnetdiscover(text, "t")
    found = [one.kind for one in Fabric([reported]).judge(NODES)]
    assert found == ["unreachable", "duplicate-adapter", "duplicate-adapter"]
    known = {guid_of(f"n8/mlx5_{rail}"): ("n8", f"mlx5_{rail}") for rail in range(2)}
    assert Fabric([renamed(reported, known, {})]).judge(NODES) == []


def test_time_grows_with_the_number_of_problems() -> None:
    """Pairs of switches of one name, each with a cable that leads to another port of its own."""
    pairs = 10_000
    text = "".join(
        f'Switch 4 "S-{side}{number:08x}" # "s{number}"\n[1] "S-{side}{number:08x}"[{number + 2}]\n'
        for number in range(pairs)
        for side in "12"
    )
    began = time.process_time()
    found = Counter(problem.kind for problem in Fabric([read_ibnetdiscover(text, "t")]).judge([]))
    assert time.process_time() - began < 10
    assert found == {"loop": pairs, "duplicate-name": pairs}


def test_planes_without_a_path_stay_apart() -> None:
    fabric = fabric_of([("s1", 1, "n1/mlx5_0", 1), ("s1", 2, "n2/mlx5_0", 1), ("s2", 1, "n3/mlx5_0", 1)])
    tree, unlike = tree_of(fabric, NODES[:3])
    assert [one.name for one in tree.switches] == ["s1", "s2"]
    assert unlike == []
    problems = fabric.judge(NODES[:4])
    assert [(one.kind, one.what) for one in problems] == [
        ("unreachable", "n4: no port of theirs leads to a switch"),
        ("unreachable", "n3: no path to the 2 other nodes"),
    ]


def test_each_kind_of_bad_cable_is_named() -> None:
    twice = [*TWO_UNITS, ("a-leaf1", 1, "n9/mlx5_0", 1)]
    assert kinds(fabric_of(twice)) == ["double-cable"]
    assert fabric_of(twice).problems[0].what == "a-leaf1[1] leads to both n1 mlx5_0[1] and n9 mlx5_0[1]"
    assert kinds(fabric_of([*TWO_UNITS, ("a-leaf1", 50, "a-leaf1", 51)])) == ["loop"]
    text = ibnetdiscover(TWO_UNITS).replace('[1](1f)\t"H-', '[39](1f)\t"H-', 1)
    assert "one-sided" in [one.kind for one in Fabric([read_ibnetdiscover(text, "t")]).problems]
    assert kinds(fabric_of(TWO_UNITS, speeds={"n3/mlx5_0": "4xHDR"})) == ["other-speed"]
    same = fabric_of(TWO_UNITS, guids={"n2/mlx5_0": guid_of("n1/mlx5_0")})
    assert kinds(same)[0] == "duplicate-guid"
    assert kinds(fabric_of(TWO_UNITS, guids={"n1/mlx5_0": "00000000000000aa"})) == []
    renamed_switch = ibnetdiscover(TWO_UNITS).replace("spine2", "spine1")
    assert "duplicate-name" in [one.kind for one in Fabric([read_ibnetdiscover(renamed_switch, "t")]).judge(NODES)]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=40
    )
)
def test_any_wiring_gives_a_tree_that_holds(wires: list[tuple[int, int, int, int]]) -> None:
    """Switches s0 to s4 and nodes n1 to n5, wired at random: each node once, each switch below one other at most."""
    names = [*(f"s{number}" for number in range(5)), *(f"n{number}/a" for number in range(1, 6))]
    fabric = fabric_of([(names[one], port, names[other], far) for one, port, other, far in wires])
    tree, _ = tree_of(fabric, NODES)
    nodes = [node for switch in tree.switches for node in switch.nodes]
    below = [child for switch in tree.switches for child in switch.switches]
    assert sorted(nodes) == sorted(node for node in NODES if any(map(fabric.leaves_of, _ids(fabric, node))))
    assert len(below) == len(set(below))
    assert set(below) <= {switch.name for switch in tree.switches}
    assert all(bool(switch.nodes) != bool(switch.switches) for switch in tree.switches)


def _ids(fabric: Fabric, node: str) -> list[str]:
    return [adapter.id for adapter in fabric.adapters.get(node, ())]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no switch and no adapter"),
        ("hello\n", "t:1: 'hello' is not understood"),
        ('Switch 8 "S-1" # "s"\n[1] nowhere\n', r"t:2: '\[1\] nowhere' is not understood"),
    ],
)
def test_what_ibnetdiscover_does_not_print(text: str, said: str) -> None:
    with pytest.raises(SluiceError, match=said):
        read_ibnetdiscover(text, "t")


def heard(**interfaces: tuple[str, str]) -> bytes:
    """What a host prints that hears `name`, `port` on each interface."""
    found = [
        {
            interface: {
                "via": "LLDP",
                "chassis": {
                    name: {"id": {"type": "mac", "value": "0c:42"}, "capability": {"type": "Bridge", "enabled": True}}
                },
                "port": {"id": {"type": "ifname", "value": port}},
            }
        }
        for interface, (name, port) in interfaces.items()
    ]
    return json.dumps({"lldp": {"interface": found}}).encode()


def test_lldp_of_hosts_and_switches(tmp_path: Path) -> None:
    (tmp_path / "n1.json").write_bytes(heard(eth0=("tor1", "Ethernet1"), eth1=("tor2", "Ethernet1")))
    (tmp_path / "n2.json").write_bytes(heard(eth0=("tor1", "Ethernet2"), eth1=("tor2", "Ethernet2")))
    (tmp_path / "tor1.json").write_bytes(heard(Ethernet48=("spine", "Ethernet1")))
    (tmp_path / "tor2.json").write_bytes(heard(Ethernet48=("spine", "Ethernet2")))
    fabric = Fabric([read_lldp(tmp_path)])
    assert kinds(fabric, ["n1", "n2"]) == []
    assert [[fabric.devices[one].name for one in rail] for rail in fabric.rails()] == [["tor1"], ["tor2"]]
    tree, _ = tree_of(fabric, ["n1", "n2"])
    assert topology_conf(tree).splitlines()[1:] == ["SwitchName=group-tor1 Nodes=n[1-2]"]


@pytest.mark.parametrize("text", [b"", b"[]", b'{"lldp": 1}', b'{"other": {}}', b"[" * 100_000])
def test_what_lldpctl_does_not_print(text: bytes) -> None:
    with pytest.raises(SluiceError, match="not of lldpctl"):
        parse_lldp({"n1": ("n1.json", text)})


def test_a_providers_paths() -> None:
    fabric = Fabric([located([Located("n1", ("top", "mid1", "low1")), Located("n2", ("top", "mid1", "low2"))])])
    tree, _ = tree_of(fabric, ["n1", "n2"])
    assert [(one.name, one.nodes or one.switches) for one in tree.switches] == [
        ("low1", ("n1",)),
        ("low2", ("n2",)),
        ("mid1", ("low1", "low2")),
    ]
    with pytest.raises(UsageError, match="provider 'nobody': not known; choose from .*ec2"):
        ask_provider("nobody", {})


class _Ec2:
    """EC2's answers, in two pages."""

    def describe_instance_topology(self, **words: str) -> dict[str, object]:
        one = {"InstanceId": "i-2" if words else "i-1", "NetworkNodes": ["nn-a", "nn-b", "nn-c2" if words else "nn-c1"]}
        return {"Instances": [one], **({} if words else {"NextToken": "t"})}

    def describe_instances(self, InstanceIds: list[str]) -> dict[str, object]:  # noqa: N803 - EC2's own word
        found = [{"InstanceId": one, "Tags": [{"Key": "Name", "Value": f"n{one[-1]}"}]} for one in InstanceIds]
        return {"Reservations": [{"Instances": found}]}


def test_ec2(monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setattr(boto3, "client", lambda *_, **__: _Ec2())
    fabric = Fabric([ask_provider("ec2", {"region": "eu-west-1"})])
    assert [switch.nodes for switch in tree_of(fabric, ["n1", "n2"])[0].switches if switch.nodes] == [("n1",), ("n2",)]
    for settings in ({}, {"region": "r", "colour": "red"}):
        with pytest.raises(UsageError, match="provider ec2"):
            ask_provider("ec2", settings)


# ---- nodes' own view ----


def inventory(node: str, *nics: Nic, clique: int | None = None) -> Inventory:
    gpu = Gpu("nvidia", 0, f"GPU-{node}", "m", "/dev/nvidia0", 0, "0000:01:00.0", 2, 1)
    gpu.fabric = None if clique is None else GpuFabric("2f1c0000-0000-4000-8000-000000000001", clique)
    return Inventory(node, [gpu], nics=list(nics))


def nic(node: str, name: str = "mlx5_0", state: str = "ACTIVE", rate: float = 400.0) -> Nic:
    port = NicPort(1, state, "LinkUp" if state == "ACTIVE" else "Polling", "InfiniBand", rate)
    return Nic(name, "0000:18:00.0", guid=guid_of(f"{node}/{name}"), ports=[port])


def test_guids_say_more_than_names() -> None:
    """An adapter that still calls itself by another node's name is where its GUID is."""
    text = ibnetdiscover(TWO_UNITS).replace('# "n1 mlx5_0"', '# "localhost mlx5_0"')
    reported = read_ibnetdiscover(text, "t")
    assert "localhost" in Fabric([reported]).adapters
    guids = adapters_by_guid({"n1": inventory("n1", nic("n1")), "n7": inventory("n7", nic("n7"))})
    assert kinds(Fabric([renamed(reported, guids, {})])) == []
    assert adapters_by_guid({name: inventory(name, nic("n1")) for name in ("n1", "n2")}) == {}


def test_what_nodes_measure() -> None:
    nodes = {name: inventory(name, nic(name)) for name in NODES[:4]}
    fabric = fabric_of(TWO_UNITS)
    assert list(measured(fabric, nodes, None)) == []
    nodes["n1"].nics[0].ports[0].state = "DOWN"
    nodes["n2"].nics[0].ports[0].rate_gbps = 200.0
    nodes["n3"].nics[0].guid = "00000000000000aa"
    nodes["n4"].nics[0].guid = guid_of("n1/mlx5_0")
    assert [problem.kind for problem in measured(fabric, nodes, None)] == [
        "port-down",
        "other-rate",
        "not-in-fabric",
        "duplicate-guid",
    ]


def test_blocks_are_domains_of_links() -> None:
    tree, _ = tree_of(fabric_of(TWO_UNITS), NODES)
    assert [block.nodes for block in blocks_of(tree, {}).blocks] == [tuple(NODES[:4]), tuple(NODES[4:])]
    nodes = {name: inventory(name, clique=place // 3) for place, name in enumerate(NODES)}
    blocks = blocks_of(tree, nodes)
    assert [block.nodes for block in blocks.blocks] == [tuple(NODES[:3]), tuple(NODES[3:6]), tuple(NODES[6:])]
    assert blocks.block_sizes == [2]
    configured = Topology("block", blocks=[Switch("b1", tuple(NODES[:4]))])
    assert [problem.kind for problem in measured(fabric_of(TWO_UNITS), nodes, configured)] == ["split-domain"]


def test_configured_and_discovered() -> None:
    tree, _ = tree_of(fabric_of(TWO_UNITS), NODES)
    moved = Topology("tree", switches=[Switch("x", ("n1", "n2", "n3", "n8")), Switch("y", ("n5", "n6", "n9"))])
    assert [(one.kind, one.what) for one in compare(moved, tree)] == [
        ("not-discovered", "n9: configured, not discovered"),
        ("not-configured", "n[4,7]: discovered, not configured"),
        (
            "other-place",
            "n8: configured in leaf switch x, whose other nodes are on group-a-leaf1; on group-b-leaf1",
        ),
    ]
    halves = Topology(
        "tree", switches=[Switch("x", ("n1", "n2")), Switch("y", ("n3", "n4")), Switch("z", tuple(NODES[4:]))]
    )
    assert [one.what for one in compare(halves, tree)] == ["leaf switches x, y are one: group-a-leaf1"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    tree, _ = tree_of(fabric_of(TWO_UNITS), NODES)
    blocks = blocks_of(tree, {})
    for topology in (tree, blocks):
        (tmp_path / "topology.conf").write_text(topology_conf(topology))
        read = read_topology(tmp_path / "topology.conf")
        assert not read.faults
        assert read.topologies[0].groups() == topology.groups()
        assert read.topologies[0].block_sizes == topology.block_sizes
    read = read_topology_yaml(tmp_path / "topology.yaml", topology_yaml([tree, blocks]).encode())
    assert [(one.name, one.kind, one.default, one.groups()) for one in read.topologies] == [
        ("tree", "tree", True, tree.groups()),
        ("block", "block", False, blocks.groups()),
    ]


def test_aliases_of_yaml_cost_no_more_than_the_text() -> None:
    """A block within itself, and one of ten lists of ten lists of ..., which would be a thousand million words."""
    itself = "- {topology: t, block: {blocks: [&a {block: b, more: [*a, {nodes: 'n[1-2]'}], nodes: n3}]}}"
    many = ["&l0 [x]", *(f"&l{one} [{', '.join([f'*l{one - 1}'] * 10)}]" for one in range(1, 10))]
    deep = f"- {{topology: t, block: {{blocks: [{{block: b, more: [{', '.join(many)}], nodes: n1}}]}}}}"
    name = f"- {{more: [{', '.join(many)}], topology: *l9, flat: true}}"
    began = time.process_time()
    read = [read_topology_yaml(Path("topology.yaml"), text.encode()) for text in (itself, deep, name)]
    assert time.process_time() - began < 5
    assert [one.topologies[0].blocks[0].nodes for one in read[:2]] == [("n1", "n2", "n3"), ("n1",)]
    assert [fault.what for fault in read[2].faults] == ["an entry without topology, its name"]


def test_what_is_written_keeps_its_mode_and_is_refused_in_doubt(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=ctl\nNodeName=n[1-8] CPUs=1\n")
    listing, file = tmp_path / "listing", tmp_path / "topology.conf"
    file.write_text("SwitchName=s Nodes=n[1-8]\n")
    file.chmod(0o640)
    command = ["discover", "--slurm-conf", str(tmp_path), "--ibnetdiscover", str(listing), "--as", "tree", "--write"]
    listing.write_text(ibnetdiscover([*TWO_UNITS, ("a-leaf1", 9, "n9/mlx5_0", 1)]).replace("n9 mlx5_0", "n8 mlx5_0"))
    refused = CliRunner().invoke(fabric_command, command)
    assert isinstance(refused.exception, SluiceError)
    assert "not written: duplicate-adapter: n8 mlx5_0 is the name of" in str(refused.exception)
    assert file.read_text() == "SwitchName=s Nodes=n[1-8]\n"
    listing.write_text(ibnetdiscover(TWO_UNITS))
    assert CliRunner().invoke(fabric_command, command).exit_code == 0
    assert "SwitchName=group-a-leaf1 Nodes=n[1-4]\n" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o640
    slurm = tmp_path / "slurm.conf"
    slurm.write_text(slurm.read_text() + "PartitionName=p Nodes=ALL Topology=mine\n")
    command[command.index("tree")] = "yaml"
    refused = CliRunner().invoke(fabric_command, command)
    assert "not written: partition p has Topology=mine, which would not be in it" in str(refused.exception)
    assert not (tmp_path / "topology.yaml").exists()
    slurm.write_text(slurm.read_text().replace("mine", "tree"))
    assert CliRunner().invoke(fabric_command, command).exit_code == 0
