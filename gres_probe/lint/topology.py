"""topology.yaml, which slurmctld 25.05 and later read instead of topology.conf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gres_probe.lint.rules import RULES, Finding, Site
from sluice.slurm.slurm_conf import Place, slurm_hostlist

SINCE = (25, 5, 0)
_KINDS = ("block", "flat", "ring", "torus3d", "tree")


def check(site: Site) -> Iterator[Finding]:
    """Whether slurmctld can read it, and whether its nodes and the topologies of partitions exist."""
    if site.topology is None or site.version < SINCE:
        return
    place = Place(site.topology)
    if site.topology.with_suffix(".conf").exists():
        yield Finding(RULES["SL008"], "topology.conf", place)
    topologies, wrong = _read(site.topology)
    if wrong:
        yield Finding(RULES["SL005"], wrong, place)
        return
    for topology in topologies:
        for text in _node_lists(topology):
            lacking = [name for name in slurm_hostlist(text) or [] if name not in site.slurm.nodes]
            if lacking:
                yield Finding(RULES["SL006"], f"{lacking[0]} in topology {topology['topology']}", place)
    known = {str(topology["topology"]) for topology in topologies}
    for name, line in site.slurm.partitions.items():
        value = line.get("topology")
        if value is not None and value.text not in known:
            yield Finding(RULES["SL007"], f"Topology={value.text} of partition {name}", value.place)


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The topologies, or why slurmctld would not read them."""
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        return [], " ".join(str(error).split())
    if not isinstance(document, list) or not document:
        return [], "not a list of topologies"
    for entry in document:
        if not isinstance(entry, dict) or not entry.get("topology"):
            return [], "an entry without topology, its name"
        if sum(kind in entry for kind in _KINDS) != 1:
            return [], f"topology {entry['topology']} has not exactly one of {', '.join(_KINDS)}"
    return document, ""


def _node_lists(value: object) -> Iterator[str]:
    """Every value of a key `nodes`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "nodes" and isinstance(inner, str):
                yield inner
            else:
                yield from _node_lists(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _node_lists(inner)
