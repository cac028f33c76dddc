"""`sluice lint`: what slurmd and slurmctld would complain about."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.base.text import one_line
from sluice.cli.slurm_options import find_slurm_conf, find_version, site_options
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from gres_probe.lint import Finding, Site
    from sluice.base.slurm_version import SlurmVersion
    from sluice.slurm.slurm_conf import SlurmConf

DEFAULT_COLUMNS = ("code", "severity", "daemon", "place", "what", "nodes", "remedy")


@click.command("lint")
@site_options
@click.option("--gres-conf", type=click.Path(path_type=Path), metavar="FILE", help="Default: next to slurm.conf.")
@click.option(
    "--node-gres", type=click.Path(path_type=Path), metavar="DIR", help="Nodes' own files, as DIR/NODE/gres.conf."
)
@click.option("--inventory-dir", type=click.Path(path_type=Path), metavar="DIR", help="Check against inventories.")
@click.option("--node", "local", metavar="HOSTLIST", help="Nodes whose device files are here; default: this host.")
@click.option("--no-devices", is_flag=True, help="Look at no device files.")
@click.option("--strict", is_flag=True, help="Exit 1 for warnings too.")
@click.option("--explain", metavar="CODE", help="Describe one rule, or 'all', and exit.")
@click.option("--json", "as_json", is_flag=True, help="Findings as JSON.")
@table_options
@click.pass_context
def command(
    context: click.Context,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    slurm_version: str | None,
    gres_conf: Path | None,
    node_gres: Path | None,
    inventory_dir: Path | None,
    local: str | None,
    no_devices: bool,
    strict: bool,
    explain: str | None,
    as_json: bool,
    table: TableOptions,
) -> None:
    """What slurmd and slurmctld would complain about in slurm.conf, gres.conf, topology.conf and topology.yaml.

    Exit 0 when there is nothing but warnings, 1 when there are errors, 2 when it could not look.
    """
    if explain is not None:
        _explain(explain)
        return
    from gres_probe.lint import Severity, lint

    site_file = find_slurm_conf(slurm_conf)
    assert site_file is not None  # noqa: S101 - it is required
    site = _site(site_file, gres_conf, node_gres, find_version(slurm_version, slurm_prefix))
    if inventory_dir is not None:
        _add_inventories(site, inventory_dir)
    if not no_devices:
        _add_local_nodes(site, site_file, local)
    findings = lint(site)
    if as_json:
        click.echo(
            json.dumps({"schema_version": 1, "findings": [_document(finding) for finding in findings]}, indent=2)
        )
    elif findings or table.asked:
        _print(findings, table)
    else:
        click.echo(f"{site_file}: no complaints ({len(site.slurm.nodes)} nodes)", err=True)
    grave = [f for f in findings if strict or f.rule.severity is not Severity.WARNING]
    if grave:
        context.exit(1)


def _site(slurm_conf: Path, gres_conf: Path | None, node_gres: Path | None, version: SlurmVersion) -> Site:
    """The files of a site. Raises SluiceError."""
    from gres_probe.lint import Site
    from gres_probe.nic_groups import NICS_FILE
    from sluice.base.errors import UsageError
    from sluice.slurm.slurm_conf import read_config, read_slurm_conf

    slurm, folder = read_slurm_conf(slurm_conf), slurm_conf.parent
    if gres_conf is not None and not gres_conf.is_file():
        raise UsageError(f"{gres_conf}: no such file", remedy="name a gres.conf with --gres-conf")
    cluster, shared = slurm.option("ClusterName"), gres_conf or folder / "gres.conf"
    return Site(
        slurm=slurm,
        gres=read_config(shared, cluster_name=cluster) if shared.is_file() else None,
        node_gres={
            name: read_config(node_gres / name / "gres.conf", cluster_name=cluster)
            for name in slurm.nodes
            if node_gres is not None and (node_gres / name / "gres.conf").is_file()
        },
        version=version,
        topology=topology if (topology := folder / "topology.yaml").is_file() else None,
        nics=folder / NICS_FILE,
        topology_conf=read_config(tree) if (tree := folder / "topology.conf").is_file() else None,
    )


def _add_inventories(site: Site, folder: Path) -> None:
    """Those that can be read; what cannot is said."""
    from gres_probe.collect import load_inventories

    collected = load_inventories(folder)
    site.inventories = collected.inventories
    for failure in collected.failures.values():
        click.echo(f"sluice: {one_line(str(failure), limit=None)}", err=True)


def _add_local_nodes(site: Site, slurm_conf: Path, named: str | None) -> None:
    """Whose devices are those of this host. Raises UsageError for a node that slurm.conf has not."""
    from sluice.base.errors import UsageError
    from sluice.base.hostlist import expand

    site.local_nodes = frozenset(expand(named)) if named is not None else _this_host(site.slurm)
    if unknown := sorted(site.local_nodes - site.slurm.nodes.keys()):
        raise UsageError(f"--node: {unknown[0]!r} is not in {slurm_conf}", remedy="name nodes of slurm.conf")


def _this_host(slurm: SlurmConf) -> frozenset[str]:
    """The node that this host is, unless several nodes share it."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    here = [name for name, node in slurm.nodes.items() if node.text("nodehostname") in names or name in names]
    return frozenset(here) if len(here) == 1 else frozenset()


def _document(finding: Finding) -> dict[str, object]:
    return {
        "code": finding.rule.code,
        "severity": finding.rule.severity.value,
        "daemon": finding.rule.source.value,
        "title": finding.rule.title,
        "file": str(finding.place.file),
        "line": finding.place.line,
        "what": finding.what,
        "nodes": list(finding.nodes),
        "remedy": finding.rule.remedy,
    }


def _print(findings: list[Finding], table: TableOptions) -> None:
    from sluice.base.hostlist import fold

    def nodes(finding: Finding) -> str:
        return fold(finding.nodes) if finding.nodes else ""

    if not table.asked:
        for f in findings:
            concerned = f" [{nodes(f)}]" if f.nodes else ""
            click.echo(
                one_line(f"{f.place}: {f.rule.severity} {f.rule.code}: {f.rule.title}: {f.what}{concerned}", limit=None)
            )
            click.echo(f"    {f.rule.source}: {f.rule.remedy}")
        return
    columns: list[Column[Finding]] = [
        Column("code", lambda f: f.rule.code),
        Column("severity", lambda f: f.rule.severity.value),
        Column("daemon", lambda f: f.rule.source.value),
        Column("file", lambda f: str(f.place.file)),
        Column("line", lambda f: f.place.line, right=True),
        Column("place", lambda f: str(f.place)),
        Column("title", lambda f: f.rule.title),
        Column("what", lambda f: f.what),
        Column("nodes", nodes),
        Column("remedy", lambda f: f.rule.remedy),
    ]
    table.print(columns, findings, default=DEFAULT_COLUMNS)


def _explain(code: str) -> None:
    from gres_probe.lint import RULES
    from sluice.base.errors import UsageError

    chosen = list(RULES.values()) if code.lower() == "all" else [RULES[code.upper()]] if code.upper() in RULES else []
    if not chosen:
        raise UsageError(f"--explain {code!r}: no such rule", remedy="list them with --explain all")
    for rule in chosen:
        click.echo(f"{rule.code}  {rule.severity}, {rule.source}: {rule.title}")
        click.echo(f"       remedy: {rule.remedy}")
        if rule.says:
            click.echo(f"       said as: {rule.says}")
