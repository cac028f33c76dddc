"""What slurmctld says when the nodes register: counts, cores and links against slurm.conf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gres_probe.lint.model import RULES, Finding, Site
from gres_probe.lint.records import NodeGres, Record


def check(site: Site, nodes: Sequence[NodeGres]) -> Iterator[Finding]:
    """Each node alone, then the nodes together."""
    for node in nodes:
        for name in node.configured:
            yield from _check_gres(node, name)
    yield from _check_files_everywhere(nodes)


def _check_gres(node: NodeGres, name: str) -> Iterator[Finding]:
    records = [record for record in node.records if record.name == name]
    wanted = node.configured[name].count
    found = sum(record.count for record in records)
    if wanted > found:
        yield _finding("SL046", node, f"gres/{name}: {found} on the node, {wanted} in Gres")
    if any(record.type or record.cores for record in records):  # slurmctld looks at Links only beside these
        devices = min(found, wanted)
        for record in records:
            if record.links and devices and len([part for part in record.links.split(",") if part]) > devices:
                what = f"Links={record.links} for {devices} gpu{'s' if devices > 1 else ''}"
                yield _finding("SL050", node, what, record)
    with_cores = [record.cores is not None for record in records if record.line is not None]
    if any(with_cores) and not all(with_cores) and with_cores[0]:
        without = next(record for record in records if record.line is not None and record.cores is None)
        yield _finding("SL051", node, f"Name={name}", without)


def _check_files_everywhere(nodes: Sequence[NodeGres]) -> Iterator[Finding]:
    """slurmctld keeps for each GRES whether it has files, for the whole cluster."""
    names = {name for node in nodes for name in node.configured if name not in ("gpu", "shard", "mps")}
    for name in sorted(names):
        having = [(node, r) for node in nodes for r in node.records if r.name == name and r.count]
        if any(record.has_file for _, record in having):
            for node, record in having:
                if not record.has_file:
                    yield _finding("SL053", node, f"Name={name}", record)


def _finding(code: str, node: NodeGres, what: str, record: Record | None = None) -> Finding:
    place = record.line.place if record is not None and record.line is not None else node.gres_place
    return Finding(RULES[code], what, place, (node.definition.name,))
