"""The files themselves: lines that Slurm's parser refuses."""

from __future__ import annotations

from collections.abc import Iterator

from gres_probe.lint.rules import RULES, Finding, Site
from sluice.base.slurm_version import SlurmVersion
from sluice.slurm.slurm_conf import ConfigFile, Line, slurm_hostlist

_FAULT_RULES = {"syntax": "SL001", "include": "SL003", "repeated": "SL004"}
GRES_KEYS = frozenset(
    {"autodetect", "count", "cpus", "cores", "file", "files", "flags", "link", "links", "multiplefiles", "name", "type"}
)
_NODE_KEYS = frozenset(
    {
        "bcastaddr", "boards", "corespeccount", "corespersocket", "cpus", "cpuspeclist", "cpubind", "feature",
        "features", "gres", "memspeclimit", "nodeaddr", "nodehostname", "port", "procs", "realmemory", "reason",
        "sockets", "socketsperboard", "state", "threadspercore", "tmpdisk", "tresweights", "weight",
    }
)  # fmt: skip
_NEWER_NODE_KEYS: dict[str, SlurmVersion] = {
    "restrictedcorespergpu": (24, 5, 0),
    "topology": (25, 5, 0),
    "parameters": (25, 11, 0),
}


def check(site: Site) -> Iterator[Finding]:
    """Faults of the parser, unknown keys of node lines and of gres.conf."""
    gres_files = {id(config): config for config in (site.gres, *site.node_gres.values()) if config is not None}
    for config in (site.slurm.config, *gres_files.values()):
        for fault in config.faults:
            yield Finding(RULES[_FAULT_RULES[fault.kind]], fault.what, fault.place)
    allowed = _NODE_KEYS | {key for key, since in _NEWER_NODE_KEYS.items() if site.version >= since}
    for line in site.slurm.config.lines:
        if line.head.key.lower() == "nodename":
            yield from _unknown(line, allowed, "a NodeName line")
    for gres in gres_files.values():
        yield from _check_gres(gres)


def _check_gres(config: ConfigFile) -> Iterator[Finding]:
    for line in config.lines:
        head = line.head.key.lower()
        if head == "autodetect":
            if len(line.pairs) > 1:
                yield Finding(RULES["SL001"], f"{line.pairs[1].key} after AutoDetect", line.place)
        elif head in ("name", "nodename"):
            yield from _unknown(line, GRES_KEYS, "gres.conf")
            if head == "nodename" and slurm_hostlist(line.head.text) is None:
                yield Finding(RULES["SL038"], f"NodeName={line.head.text}", line.place)
        else:
            yield Finding(
                RULES["SL002"],
                f"{line.head.key}: a line of gres.conf begins with Name, NodeName or AutoDetect",
                line.place,
            )


def _unknown(line: Line, allowed: frozenset[str], where: str) -> Iterator[Finding]:
    for pair in line.pairs[1:]:
        if pair.key.lower() not in allowed:
            yield Finding(RULES["SL002"], f"{pair.key} is not known in {where}", pair.place)
