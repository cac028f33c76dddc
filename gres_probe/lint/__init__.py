"""Predicts what slurmd and slurmctld would report about GRES and the topology, before they read the files.

The checks follow the order of Slurm's own code (src/common/gres.c, src/plugins/gres), node by node, so that they
agree with the daemons; the integration tests hold them to what real daemons print for the same files.
"""

from __future__ import annotations

from collections.abc import Iterable

from gres_probe.lint import files, gres_lines, hardware, nics, registration, slurm, topology
from gres_probe.lint.rules import RULES, Finding, Rule, Severity, Site, Source

__all__ = ["RULES", "Finding", "Rule", "Severity", "Site", "Source", "lint"]


def lint(site: Site) -> list[Finding]:
    """Every mistake, in the order of files and lines; equal ones of several nodes are one finding."""
    found: list[Finding] = []
    found += files.check(site)
    found += topology.check(site)
    found += slurm.check(site)
    nodes = gres_lines.read_nodes(site, found)
    found += registration.check(site, nodes)
    found += hardware.check(site, nodes)
    found += nics.check(site, nodes)
    return _joined(found)


def _joined(findings: Iterable[Finding]) -> list[Finding]:
    joined: dict[tuple[object, ...], dict[str, None]] = {}
    kept: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        key = (finding.rule.code, finding.what, finding.place)
        kept.setdefault(key, finding)
        joined.setdefault(key, {}).update(dict.fromkeys(finding.nodes))
    result = [Finding(f.rule, f.what, f.place, tuple(joined[key])) for key, f in kept.items()]
    return sorted(result, key=lambda f: (str(f.place.file), f.place.line, f.rule.code, f.what))
