"""From inventories to gres.conf and node lines."""

from __future__ import annotations

import random
import re
import zlib

import pytest
from machines import dgx, gpu, instances, l40s, matrix, mig, mixed, nics

from gres_probe.inventory import Inventory, Link, LinkType, Nic, NicPort, Problem
from gres_probe.lint import Site, lint
from gres_probe.nic_groups import nic_groups
from gres_probe.writer import HEADER, GresConfiguration, generate, node_devices, type_name
from sluice.base.errors import SluiceError
from sluice.slurm.slurm_conf import interpret_slurm_conf, parse_text

NEW = (24, 11, 5)
PXB = LinkType.PCI_BRIDGES


def lines(configuration: GresConfiguration, node: str) -> list[str]:
    return configuration.gres_lines[node]


def test_linked_gpus_have_a_line_each() -> None:
    written = lines(generate([dgx()]), "dgx1")
    assert written[0] == "AutoDetect=off"
    assert written[1] == (
        "Name=gpu Type=h100 File=/dev/nvidia0 Cores=0-55 Links=-1,18,18,18,18,18,18,18 Flags=nvidia_gpu_env"
    )
    assert written[8].startswith("Name=gpu Type=h100 File=/dev/nvidia7 Cores=56-111 ")
    assert written[9:] == [f"Name=shard Count={8 * 81037} File=/dev/nvidia[0-7]"]


def test_unlinked_gpus_share_a_line() -> None:
    assert lines(generate([l40s()], shards=False), "l40s1") == [
        "AutoDetect=off",
        "Name=gpu Type=l40s File=/dev/nvidia[0-3] Flags=nvidia_gpu_env",
    ]


def test_node_line() -> None:
    assert generate([dgx()]).nodes["dgx1"].parameters() == {
        "Sockets": "2",
        "CoresPerSocket": "56",
        "ThreadsPerCore": "2",
        "RealMemory": "2063360",  # whole GiB
        "Gres": "gpu:h100:8,shard:648296",
        "Feature": "nvidia,h100,gpumem80g,sm90,nvlink8",
        "Weight": "634",
    }


def test_equal_nodes_share_lines() -> None:
    configuration = generate([dgx("dgx2"), l40s(), dgx("dgx10"), dgx("dgx1")])
    assert "NodeName=dgx[1-2,10] Name=gpu " in configuration.gres_conf
    assert list(configuration.nodes) == ["dgx1", "dgx2", "dgx10", "l40s1"]
    assert configuration.nodes_conf().count("NodeName=") == 2


def test_extra_parameters_of_a_node() -> None:
    text = generate([dgx("n1"), dgx("n2")]).nodes_conf(
        {"n1": {"Port": "7", "Weight": "3"}, "n2": {"RealMemory": "", "Reason": "two words"}}
    )
    first, second = text.splitlines()[1:]
    assert first.startswith("NodeName=n1 ") and first.endswith(" Weight=3 Port=7")
    assert "RealMemory" not in second and second.endswith(' Reason="two words"')
    with pytest.raises(SluiceError, match="cannot hold"):
        generate([dgx("n1")]).nodes_conf({"n1": {"Reason": 'a"b'}})


def test_order_of_inventories_does_not_matter() -> None:
    machines = [dgx("a1"), dgx("a2"), l40s("b1"), mixed("c1"), mig("d1")]
    expected = generate(machines)
    for seed in range(5):
        random.Random(seed).shuffle(machines)
        again = generate(machines)
        assert (again.gres_conf, again.nodes_conf()) == (expected.gres_conf, expected.nodes_conf())


def test_vendors_on_one_node_share_flags() -> None:
    """Slurm refuses lines of one node whose environment flags differ."""
    configuration = generate([mixed()])
    gpus = [line for line in lines(configuration, "mixed1") if line.startswith("Name=gpu")]
    assert all(line.endswith(" Flags=amd_gpu_env,nvidia_gpu_env") for line in gpus)
    assert configuration.nodes["mixed1"].gres == "gpu:mi300x:1,gpu:h100:1,shard:277325"
    assert any("/dev/dri/card0" in note for note in configuration.notes)


def test_several_files_of_a_device() -> None:
    whole = generate([mixed()], shards=False)
    assert "MultipleFiles=/dev/dri/renderD128,/dev/dri/card0" in whole.gres_conf
    assert not whole.notes


@pytest.mark.parametrize("version", [(22, 5, 8), (23, 2, 6)])
def test_mig_with_shards_where_slurm_splits_multiple_files(version: tuple[int, int, int]) -> None:
    written = lines(generate([mig()], slurm_version=version), "mig1")
    assert not any("MultipleFiles" in line for line in written)
    assert any("Type=h100_1g.10gb File=/dev/nvidia-caps/nvidia-cap66 " in line for line in written)
    assert "Name=shard Count=9984 File=/dev/nvidia-caps/nvidia-cap66" in written
    assert "Name=shard Count=81037 File=/dev/nvidia1" in written


def test_mig_of_equal_memory_on_a_newer_slurm() -> None:
    written = lines(generate([instances()], slurm_version=NEW), "mig2")
    assert "MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap66,/dev/nvidia-caps/nvidia-cap67" in written[1]
    assert written[-1] == "Name=shard Type=h100_1g.10gb Count=19968"


def test_mig_of_different_memory_on_a_newer_slurm() -> None:
    """Slurm would divide the shards evenly: each device needs a File of its own."""
    written = lines(generate([mig()], slurm_version=NEW), "mig1")
    assert not any("MultipleFiles" in line for line in written)


def of_shards(*machines: Inventory, version: tuple[int, int, int]) -> list[str]:
    """What is written of shards: nodes' Gres, and lines of gres.conf."""
    configuration = generate(machines, slurm_version=version)
    assert not any(node.gres.count("shard:") != 1 for node in configuration.nodes.values())
    return [
        *(f"{name} {node.gres.rpartition(',')[2]}" for name, node in configuration.nodes.items()),
        *(line.removeprefix("NodeName=") for line in configuration.gres_conf.splitlines() if "Name=shard" in line),
    ]


@pytest.mark.parametrize("version", [(22, 5, 0), (22, 5, 8), (23, 2, 7)])
def test_shards_have_no_types_for_slurm_that_needs_none(version: tuple[int, int, int]) -> None:
    mig2 = ["mig2 Name=shard Count=19968"]
    if version < (23, 2, 7):
        mig2 = [f"mig2 Name=shard Count=9984 File=/dev/nvidia-caps/nvidia-cap{number}" for number in (66, 75)]
    assert of_shards(dgx(), l40s(), mixed(), mig(), instances(), version=version) == [
        "dgx1 shard:648296",
        "l40s1 shard:182184",
        "mig1 shard:101005",
        "mig2 shard:19968",
        "mixed1 shard:277325",
        "dgx1 Name=shard Count=648296 File=/dev/nvidia[0-7]",
        "l40s1 Name=shard Count=182184 File=/dev/nvidia[0-3]",
        "mig1 Name=shard Count=9984 File=/dev/nvidia-caps/nvidia-cap66",
        "mig1 Name=shard Count=9984 File=/dev/nvidia-caps/nvidia-cap75",
        "mig1 Name=shard Count=81037 File=/dev/nvidia1",
        *mig2,
        "mixed1 Name=shard Count=196288 File=/dev/dri/renderD128",
        "mixed1 Name=shard Count=81037 File=/dev/nvidia0",
    ]


@pytest.mark.parametrize("version", [(23, 11, 0), NEW, (26, 5, 0)])
def test_shards_have_the_type_of_their_node_for_slurm_that_needs_it(version: tuple[int, int, int]) -> None:
    assert of_shards(dgx(), l40s(), instances(), version=version) == [
        "dgx1 shard:h100:648296",
        "l40s1 shard:l40s:182184",
        "mig2 shard:h100_1g.10gb:19968",
        "dgx1 Name=shard Type=h100 Count=648296 File=/dev/nvidia[0-7]",
        "l40s1 Name=shard Type=l40s Count=182184 File=/dev/nvidia[0-3]",
        "mig2 Name=shard Type=h100_1g.10gb Count=19968",
    ]


@pytest.mark.parametrize("version", [(23, 11, 0), NEW])
@pytest.mark.parametrize("several", [mixed(), mig()], ids=lambda one: one.node)
def test_shards_have_no_type_where_a_node_has_gpus_of_several(
    several: Inventory, version: tuple[int, int, int]
) -> None:
    """Of a job on nodes with and without, Slurm would count a part only."""
    machines = [dgx(), l40s(), several]
    assert of_shards(*machines, version=version) == of_shards(*machines, version=(23, 2, 7))


def test_types_of_shards_are_the_only_difference() -> None:
    machines = [dgx(), l40s(), instances()]
    typed, untyped = (generate(machines, slurm_version=version) for version in (NEW, (23, 2, 7)))
    text = typed.gres_conf + typed.nodes_conf()
    assert text != untyped.gres_conf + untyped.nodes_conf()
    text = re.sub(r"(?<=Name=shard )Type=\S+ |(?<=,shard:)[a-z][^:]*:", "", text)
    assert text == untyped.gres_conf + untyped.nodes_conf()


def test_shards_of_unknown_memory_have_no_type() -> None:
    """slurmctld takes a type that it has none of for none, and then refuses the node's."""
    inventory = Inventory("n1", [gpu(0, memory_total_mib=0, memory_usable_mib=0)], matrix(1))
    configuration = generate([inventory], slurm_version=NEW)
    assert configuration.nodes["n1"].gres == "gpu:h100:1,shard:0"
    assert lines(configuration, "n1")[-1] == "Name=shard Count=0 File=/dev/nvidia0"
    inventory = Inventory("n1", [gpu(0, memory_total_mib=0, memory_usable_mib=0), gpu(1)], matrix(2))
    assert generate([inventory], slurm_version=NEW).nodes["n1"].gres == "gpu:h100:2,shard:h100:81037"


def test_partitions_have_no_links() -> None:
    inventory = mig()
    inventory.gpus.append(gpu(2))
    inventory.links = matrix(3, LinkType.NVLINK, 4)
    gpus = [line for line in lines(generate([inventory]), "mig1") if line.startswith("Name=gpu")]
    assert [line.split("Links=")[1].split()[0] for line in gpus] == ["-1,0,0,0", "0,-1,0,0", "0,0,-1,4", "0,0,4,-1"]


def test_types_stand_together() -> None:
    """slurmd takes the node's Gres type by type, and Links counts in that order."""
    inventory = Inventory("n1", [gpu(0), gpu(1, "NVIDIA L4"), gpu(2)], matrix(3))
    assert [device.files[0] for device in node_devices(inventory)] == ["/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia1"]
    assert generate([inventory], shards=False).nodes["n1"].gres == "gpu:h100:2,gpu:l4:1"


def test_cores_of_another_numbering() -> None:
    inventory = dgx()
    inventory.cpu_cores = [cpu // 2 for cpu in range(224)]  # threads side by side
    inventory.gpus[0].cores = "0-1"
    assert " Cores=0 " in lines(generate([inventory]), "dgx1")[1]


def test_cores_for_all_or_none() -> None:
    inventory = dgx()
    inventory.gpus[3].cores = ""
    assert " Cores=0-111 " in lines(generate([inventory]), "dgx1")[4]
    for one in inventory.gpus:
        one.cores = ""
    assert "Cores" not in generate([inventory]).gres_conf


def test_unreadable_gpu_is_reported_and_left_out() -> None:
    inventory = l40s()
    inventory.problems = [Problem("nvidia", "GPU is lost", index=4)]
    configuration = generate([inventory])
    assert configuration.notes == ["l40s1: nvidia GPU 4 left out: GPU is lost"]
    assert configuration.nodes["l40s1"].gres.startswith("gpu:l40s:4,")


def test_partitioned_gpu_without_instances_is_reported() -> None:
    inventory = mig()
    inventory.gpus[0].partitions = []
    configuration = generate([inventory])
    assert configuration.notes == ["mig1: nvidia GPU 0 left out: partitioned, without an instance"]
    assert configuration.nodes["mig1"].gres == "gpu:h100:1,shard:81037"


def test_node_without_gpus() -> None:
    configuration = generate([Inventory("cpu1")])
    assert configuration.gres_conf == HEADER
    assert configuration.nodes["cpu1"].parameters() == {"Weight": "1"}


def test_what_is_refused() -> None:
    with pytest.raises(SluiceError, match="2 inventories"):
        generate([dgx(), dgx()])
    with pytest.raises(SluiceError, match="too old"):
        generate([dgx()], slurm_version=(21, 8, 0))
    with pytest.raises(SluiceError, match="not a host name"):
        generate([dgx("a b")])
    twice = dgx()
    twice.gpus[1].device_file = twice.gpus[0].device_file
    with pytest.raises(SluiceError, match="no device file of its own"):
        generate([twice])
    evil = dgx()
    evil.gpus[0].device_file = "/dev/x Count=9"
    with pytest.raises(SluiceError, match="not a path"):
        generate([evil])


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
        ("Intel(R) Data Center GPU Max 1550", "max1550"),
        ("Intel(R) Arc(TM) A770 Graphics", "arca770"),
        ("X1; rm -rf $HOME", "x1rmrfhome"),
        ("", "gpu"),
        ("NVIDIA", "gpu"),
    ],
)
def test_type_names(model: str, name: str) -> None:
    assert type_name(model) == name


@pytest.mark.parametrize("version", [(22, 5, 8), NEW])
@pytest.mark.parametrize("shards", [True, False])
def test_lint_has_nothing_to_say(version: tuple[int, int, int], shards: bool) -> None:
    machines = [dgx(), l40s(), mixed(), mig(), mig("mig2", (9984, 19968))]
    configuration = generate(machines, slurm_version=version, shards=shards)
    types = "gpu,shard" if shards else "gpu"
    slurm = f"GresTypes={types}\nSelectType=select/cons_tres\n{configuration.nodes_conf()}"
    site = Site(
        interpret_slurm_conf(parse_text(slurm)),
        gres=parse_text(configuration.gres_conf),
        inventories={machine.node: machine for machine in machines},
        version=version,
    )
    assert lint(site) == []


def test_rdma_interfaces_on_request() -> None:
    """Those with a file of their own, without the parent of virtual functions; linked where they share a switch."""
    machine = dgx("n1")
    kinds = [LinkType.SELF, LinkType.PCI_BRIDGES, LinkType.SYSTEM]
    rows = [[0, 1, 2, 2], [1, 0, 2, 2], [2, 2, 0, 2], [2, 2, 2, 0]]
    sides = [machine.gpus[0].cores, machine.gpus[0].cores, machine.gpus[-1].cores, machine.gpus[-1].cores]
    machine.nics = [
        Nic(
            f"mlx5_{number}",
            f"0000:18:00.{number}",
            links=[Link(LinkType.SYSTEM)] * len(machine.gpus) + [Link(kinds[kind]) for kind in row],
            cores=cores,
            device_file=f"/dev/infiniband/uverbs{number}" if number != 3 else "",
        )
        for number, (row, cores) in enumerate(zip(rows, sides, strict=True))
    ]
    assert "nic" not in generate([machine]).gres_conf
    configuration = generate([machine], nics=True)
    written = [line for line in configuration.gres_lines["n1"] if line.startswith("Name=nic")]
    assert [re.sub(r"Cores=\S+", "Cores=", line) for line in written] == [
        "Name=nic File=/dev/infiniband/uverbs0 Cores= Links=-1,1,0",
        "Name=nic File=/dev/infiniband/uverbs1 Cores= Links=1,-1,0",
        "Name=nic File=/dev/infiniband/uverbs2 Cores= Links=0,0,-1",
    ]
    assert configuration.nodes["n1"].gres.endswith(",nic:3")
    assert configuration.nic_groups == ["n1 0,1,2,3,4,5,6,7 8,8,9"]
    machine.nics[1].parent = machine.nics[0].pci_address
    assert generate([machine], nics=True).nodes["n1"].gres.endswith(",nic:2")


def test_groups_of_gpus_and_interfaces() -> None:
    """Of a DGX A100: two GPUs and two interfaces below each pair of switches; instances of a GPU are where it is."""
    machine = dgx("n1")
    machine.nics = nics(
        *["InfiniBand"] * 4,
        near=lambda gpu, nic: PXB if gpu // 2 == nic // 2 else LinkType.SYSTEM,
        among=LinkType.NUMA_NODE,
    )
    configuration = generate([machine, dgx("n2")], nics=True)
    assert configuration.nic_groups == ["n1 0,0,1,1,2,3,4,5 0,0,1,1"]
    assert nic_groups(machine, [2, 2, 0], machine.nics[:3]) == "n1 0,0,1 1,1,0"
    assert nic_groups(machine, [0] * 17, machine.nics) is None
    body, last = configuration.nics_conf().rsplit("checksum", 1)
    assert (body, last) == (
        "sluice-nics 1\nn1 0,0,1,1,2,3,4,5 0,0,1,1\n",
        f" = crc32:{zlib.crc32(body.encode()):08x}\n",
    )


def test_interfaces_by_type() -> None:
    """slurmd numbers GRES type by type: lines, groups and counts follow."""
    machine = dgx("n1")
    layers = "InfiniBand", "Ethernet", "InfiniBand", ""
    machine.nics = nics(*layers, near=lambda gpu, nic: PXB if gpu == nic else LinkType.SYSTEM)
    configuration = generate([machine], nics=True, nic_types=True)
    assert configuration.nodes["n1"].gres.endswith(",nic:ib:2,nic:roce:1,nic:rdma:1")
    assert [line for line in configuration.gres_lines["n1"] if line.startswith("Name=nic")] == [
        "Name=nic Type=ib File=/dev/infiniband/uverbs0",
        "Name=nic Type=ib File=/dev/infiniband/uverbs2",
        "Name=nic Type=roce File=/dev/infiniband/uverbs1",
        "Name=nic Type=rdma File=/dev/infiniband/uverbs3",
    ]
    assert configuration.nic_groups == ["n1 0,1,2,3,4,5,6,7 0,2,1,3"]
    assert generate([machine], nics=True).nodes["n1"].gres.endswith(",nic:4")
    machine.nics[0].ports.append(NicPort(2, link_layer="Ethernet"))
    assert generate([machine], nics=True, nic_types=True).nodes["n1"].gres.endswith("nic:rdma:2,nic:roce:1,nic:ib:1")
