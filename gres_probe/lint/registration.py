"""What slurmctld reports when the nodes register: counts, cores and links against slurm.conf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gres_probe.lint.gres_lines import GresLine, NodeGres
from gres_probe.lint.rules import RULES, Finding, Site


def check(site: Site, nodes: Sequence[NodeGres]) -> Iterator[Finding]:
    """Each node alone, then the nodes together."""
    for node in nodes:
        for name in node.configured:
            yield from _check_gres(node, name)
    yield from _check_files_everywhere(nodes)


def _check_gres(node: NodeGres, name: str) -> Iterator[Finding]:
    gres_lines = [gres for gres in node.sent if gres.name == name]
    wanted = node.configured[name].count
    found = sum(gres.count for gres in gres_lines)
    if wanted > found:
        yield _finding("SL046", node, f"gres/{name}: {found} on the node, {wanted} in Gres")
    if any(gres.type or gres.cores for gres in gres_lines):  # slurmctld reads Links only together with these
        devices = min(found, wanted)
        for gres in gres_lines:
            if gres.links and devices and len([part for part in gres.links.split(",") if part]) > devices:
                what = f"Links={gres.links} for {devices} gpu{'s' if devices > 1 else ''}"
                yield _finding("SL050", node, what, gres)
    with_cores = [gres.cores is not None for gres in gres_lines if gres.line is not None]
    if any(with_cores) and not all(with_cores) and with_cores[0]:
        without = next(gres for gres in gres_lines if gres.line is not None and gres.cores is None)
        yield _finding("SL051", node, f"Name={name}", without)


def _check_files_everywhere(nodes: Sequence[NodeGres]) -> Iterator[Finding]:
    """slurmctld keeps for each GRES whether it has files, for the whole cluster."""
    names = {name for node in nodes for name in node.configured if name not in ("gpu", "shard", "mps")}
    for name in sorted(names):
        having = [(node, gres) for node in nodes for gres in node.sent if gres.name == name and gres.count]
        if any(gres.has_file for _, gres in having):
            for node, gres in having:
                if not gres.has_file:
                    yield _finding("SL053", node, f"Name={name}", gres)


def _finding(code: str, node: NodeGres, what: str, gres: GresLine | None = None) -> Finding:
    place = gres.line.place if gres is not None and gres.line is not None else node.gres_place
    return Finding(RULES[code], what, place, (node.definition.name,))
