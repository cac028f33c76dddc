"""AMD partitions against the simulated driver: planned, checked, laid out, and finished after a kill."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from layout_node import DYING, LayoutNode

from gpu_sim import read_state
from gpu_sim.fields import get_values, set_values
from policy.document import parse
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from sluice.base.errors import SluiceError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("amdsmi") is None, reason="the package amdsmi is missing"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the driver partitions GPUs for root only"),
]
PLATFORMS = Path(__file__).parents[3] / "gpu_sim/platforms"
GPUS = 8
WHOLE = ["spx-nps1"] * GPUS


class Node(LayoutNode):
    """One of AMD GPUs."""

    def __init__(self, folder: Path, platform: str = "mi300x-platform") -> None:
        super().__init__(folder, platform)

    def wants(self, **modes: str) -> None:
        layouts = {key.replace("_", ":", 1).replace("_", ","): mode for key, mode in modes.items()}
        self.policy.write_text(NodePolicy(limits=NodeLimits(amd_partitions=layouts)).render())

    def apply(self, stop_after: int = -1, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(APPLY, self.policy, stop_after, check=check)

    def modes(self) -> list[str]:
        return [get_values(self.sim, index)["partitions"] for index in range(len(read_state(self.sim).gpus))]


# Lays out what `sluice mig apply` would, and is killed after so many calls of the driver's setters.
APPLY = f"""{DYING}
from pathlib import Path
from sluice.cli.mig import _find
import amdsmi
for name in ("amdsmi_set_gpu_compute_partition", "amdsmi_set_gpu_memory_partition", "amdsmi_gpu_driver_reload"):
    setattr(amdsmi, name, dying(getattr(amdsmi, name)))
for layer in _find(Path(sys.argv[1]), "n1")[1]:
    layer.library.apply_all(layer.changes, print)
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_compute_modes_are_changed_gpu_by_gpu(node: Node) -> None:
    node.wants(n1_0_3="cpx-nps1", n1_1="qpx-nps1")
    planned = json.loads(node.plan("--json").stdout)["changes"]
    assert [(one["vendor"], one["gpu"], one["now"], one["wanted"]) for one in planned] == [
        ("amd", 0, ["spx-nps1"], ["cpx-nps1"]),
        ("amd", 1, ["spx-nps1"], ["qpx-nps1"]),
        ("amd", 3, ["spx-nps1"], ["cpx-nps1"]),
    ]
    assert "GPU 1 (AMD Instinct MI300X): spx-nps1 -> qpx-nps1" in node.plan().stdout
    assert node.modes() == WHOLE
    node.apply()
    assert node.modes() == ["cpx-nps1", "qpx-nps1", "spx-nps1", "cpx-nps1", *WHOLE[4:]]
    before = (node.sim / "state").read_bytes()
    assert "nothing to change" in node.plan().stderr
    node.apply()
    assert (node.sim / "state").read_bytes() == before  # GPUs that are as they should be are not touched


def test_a_memory_mode_is_the_nodes_and_killed_at_any_call_it_is_finished(tmp_path: Path) -> None:
    platform = yaml.safe_load((PLATFORMS / "mi300x-platform.yaml").read_text())
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump({**platform, "gpus": platform["gpus"][:2]}))
    node = Node(tmp_path, str(small))
    node.wants(n1="qpx-nps4", n1_1="cpx-nps4")
    killed = 0
    while node.apply(stop_after=killed, check=False).returncode == -9:
        killed += 1
        node.apply()
        assert node.modes() == ["qpx-nps4", "cpx-nps4"]
        for index in range(2):
            set_values(node.sim, index, {"partitions": "spx-nps1"})
    assert killed == 2 + 1 + 1  # a request of each GPU, the driver's start, and what is not as it starts
    assert node.modes() == ["qpx-nps4", "cpx-nps4"]
    node.wants(n1="spx-nps1")
    node.apply()
    assert node.modes() == WHOLE[:2]


@pytest.mark.parametrize(
    ("wants", "why"),
    [
        ({"n1": "tpx-nps1"}, "no partition mode 'tpx-nps1'"),
        ({"n1": "spx-nps4"}, "no partition mode 'spx-nps4'"),
        ({"n1": "cpx-nps8"}, "no partition mode 'cpx-nps8'"),
        ({"n1_0": "cpx-nps4"}, "the memory mode is one for all AMD GPUs of a node"),
        ({"n1_9": "cpx-nps1"}, "enforcement.amd_partitions 'n1:9': GPU 9: n1 has 8 GPUs"),
    ],
)
def test_what_the_gpus_cannot_have_is_refused_before_anything_is_touched(
    node: Node, wants: dict[str, str], why: str
) -> None:
    node.wants(**wants)
    refused = node.plan(check=False)
    assert refused.returncode in (1, 2) and why in refused.stderr
    assert node.modes() == WHOLE


def test_processes_are_not_in_the_way_of_other_gpus_unless_the_driver_has_to_start(node: Node) -> None:
    set_values(node.sim, 2, {"process": "4194000:2G"})
    node.wants(n1_0="cpx-nps1")
    node.apply()
    assert node.modes()[0] == "cpx-nps1"
    node.wants(n1_2="cpx-nps1")
    refused = node.apply(check=False)
    assert refused.returncode != 0 and "AMD GPU 2 (AMD Instinct MI300X): processes use it" in refused.stderr
    node.wants(n1="cpx-nps4")
    refused = node.apply(check=False)
    assert "the driver has to be restarted, which needs all of them idle" in refused.stderr
    assert node.modes() == ["cpx-nps1", *WHOLE[1:]]


def test_a_restart_of_the_node_is_made_good(node: Node) -> None:
    node.wants(n1="qpx-nps1", n1_0="cpx-nps1")
    node.apply()
    laid_out = node.modes()
    assert node.restore() == ""
    for index in range(GPUS):
        set_values(node.sim, index, {"partitions": "spx-nps1"})
    assert node.restore().count("spx-nps1 -> ") == GPUS
    assert node.modes() == laid_out == ["cpx-nps1", *["qpx-nps1"] * (GPUS - 1)]
    assert node.restore() == ""


def test_a_library_whose_setter_starts_the_driver_is_asked_once(node: Node) -> None:
    """As before ROCm 7."""
    node.wants(n1="cpx-nps4")
    older = """import amdsmi
ask, start = amdsmi.amdsmi_set_gpu_memory_partition, amdsmi.amdsmi_gpu_driver_reload
def both(handle, mode):
    ask(handle, mode)
    start()
    print("driver started")
amdsmi.amdsmi_set_gpu_memory_partition = both
del amdsmi.amdsmi_gpu_driver_reload
"""
    done = node.run(older + APPLY.replace(', "amdsmi_gpu_driver_reload"', ""), node.policy, -1)
    assert done.stdout.count("driver started") == 1
    assert node.modes() == ["cpx-nps4"] * GPUS


def test_a_node_of_two_vendors_is_laid_out_whole(tmp_path: Path) -> None:
    node = Node(tmp_path, "mixed")
    node.wants(n1_0="dpx-nps2")
    node.apply()
    assert get_values(node.sim, 2)["partitions"] == "dpx-nps2"  # the first of AMD's is the third of the node's


def test_the_policy_names_modes_that_there_are() -> None:
    text = "version: 1\nenforcement:\n  amd_partitions: {'amd-[1-2]': cpx-nps4, 'amd-3:0,1': spx-nps1}\n"
    policy = parse(text, source="f")
    assert policy.enforcement is not None and policy.gpu_shares()
    for wrong in ("cpx", "cpx-nps3", "CPX-NPS4", "1g.10gb"):
        with pytest.raises(SluiceError, match=r"amd_partitions"):
            parse(text.replace("spx-nps1", wrong), source="f")
