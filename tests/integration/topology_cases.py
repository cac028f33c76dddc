"""Files topology.yaml and topology.conf, and what lint says of them."""

from __future__ import annotations

SLURM_CONF = "NodeName=n1\nPartitionName=main Nodes=ALL Default=YES\n"
_TREE = "- topology: a\n  cluster_default: true\n  tree:\n    switches:\n    - switch: s1\n      nodes: {}\n"
_BLOCK = "- topology: a\n  cluster_default: true\n  block: {{block_sizes: [1], blocks: [{{block: b, nodes: {}}}]}}\n"
# Of topology.yaml: options of the partition, text, codes.
CASES: dict[str, tuple[str, str, list[str]]] = {
    "good": ("Topology=a", _TREE.format("n1"), []),
    "flat": ("", "- topology: a\n  cluster_default: true\n  flat: true\n", []),
    "not yaml": ("", "- topology: a\n  tree: {switches: [\n", ["SL005"]),
    "no list": ("", "topology: a\n", ["SL005"]),
    "no kind": ("", "- topology: a\n  cluster_default: true\n", ["SL005"]),
    "unknown kind": ("", "- topology: a\n  mesh:\n    switches: []\n", ["SL005"]),
    "unknown nodes": ("", _TREE.format('"n[1-3]"'), ["SL006"]),
    "unknown nodes of a block": ("", _BLOCK.format('"n[1-3]"'), ["SL006"]),
    "unknown topology": ("Topology=b", _TREE.format("n1"), ["SL007"]),
}

# Of topology.conf, for topology/tree and four nodes: text, codes.
CONF_NODES = "n[1-4]"
CONF_CASES: dict[str, tuple[str, list[str]]] = {
    "good": ("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=top Switches=s[1-2]\n", []),
    "link speeds": ("SwitchName=s1 Nodes=n[1-4] LinkSpeed=100\n", []),
    "unknown key": ("SwitchName=s1 Node=n[1-4]\n", ["SL070"]),
    "no switch": ("Name=s1 Nodes=n[1-4]\n", ["SL070"]),
    "twice": ("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s1 Nodes=n[3-4]\n", ["SL071"]),
    "both": ("SwitchName=s1 Nodes=n[1-4]\nSwitchName=s2 Nodes=n1 Switches=s1\n", ["SL072", "SL075"]),
    "neither": ("SwitchName=s1 LinkSpeed=1\n", ["SL072"]),
    "unknown child": ("SwitchName=s1 Nodes=n[1-4]\nSwitchName=top Switches=s[1-2]\n", ["SL073"]),
    "loop": (
        "SwitchName=s1 Nodes=n[1-4]\nSwitchName=a Switches=s1,b\nSwitchName=b Switches=a\n",
        ["SL074"],
    ),
    "its own child": ("SwitchName=s1 Nodes=n[1-4]\nSwitchName=a Switches=s1,a\n", ["SL074"]),
    "unknown node": ("SwitchName=s1 Nodes=n[1-5]\n", ["SL006"]),
    "two leaf switches": (
        "SwitchName=s1 Nodes=n[1-3]\nSwitchName=s2 Nodes=n[3-4]\nSwitchName=top Switches=s[1-2]\n",
        ["SL075"],
    ),
    "node on no switch": ("SwitchName=s1 Nodes=n[1-3]\n", ["SL076"]),
    "no common switch": ("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\n", ["SL077"]),
}
