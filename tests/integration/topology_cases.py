"""Files topology.yaml, and what lint says of them: options of the partition, text, codes."""

from __future__ import annotations

SLURM_CONF = "NodeName=n1\nPartitionName=main Nodes=ALL Default=YES\n"
_TREE = "- topology: a\n  cluster_default: true\n  tree:\n    switches:\n    - switch: s1\n      nodes: {}\n"
_BLOCK = "- topology: a\n  cluster_default: true\n  block: {{block_sizes: [1], blocks: [{{block: b, nodes: {}}}]}}\n"
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
