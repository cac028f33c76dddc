"""`sluice fabric`: the network between nodes, discovered and compared with what is configured."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Any

import click

from sluice.base.text import one_line
from sluice.cli.slurm_options import find_slurm_conf, find_version, site_options

if TYPE_CHECKING:
    from gres_probe.deploy import FileChange
    from gres_probe.inventory import Inventory
    from sluice.fabric.model import Fabric, FabricProblem, Reported
    from sluice.slurm.slurm_conf import SlurmConf
    from sluice.slurm.topology import Topology

# The tree without them is another one.
_MISLEADING = frozenset({"duplicate-adapter", "duplicate-guid", "double-cable", "unreachable"})


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where the fabric is known from; several sources are put together."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object."),
        click.option(
            "--inventory-dir", type=click.Path(path_type=Path), metavar="DIR", help="Inventories: GUIDs, link domains."
        ),
        click.option("--timeout", type=click.FloatRange(1), default=120.0, show_default=True, help="Of ibnetdiscover."),
        click.option("--setting", "settings", multiple=True, metavar="KEY=VALUE", help="Of the provider."),
        click.option("--provider", metavar="NAME", help="Ask a provider of machines, e.g. ec2."),
        click.option(
            "--lldp",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="PATH",
            help="NAME.json of `lldpctl -f json`, or a folder of them.",
        ),
        click.option(
            "--ibnetdiscover", type=click.Path(path_type=Path), metavar="FILE", help="Its output; '-': run it."
        ),
    ):
        command = option(command)
    return site_options(command)


@dataclass(frozen=True, slots=True)
class _Sources:
    """What the options name."""

    ibnetdiscover: Path | None
    lldp: tuple[Path, ...]
    provider: str | None
    settings: tuple[str, ...]
    timeout: float

    def read(self) -> list[Reported]:
        from sluice.base.errors import UsageError

        found: list[Reported] = []
        if self.ibnetdiscover is not None:
            found.append(_read_ibnetdiscover(self.ibnetdiscover, self.timeout))
        for path in self.lldp:
            from sluice.fabric.lldp import read_lldp

            found.append(read_lldp(path))
        if self.provider is not None:
            from sluice.fabric.providers import ask_provider

            pairs = [setting.partition("=") for setting in self.settings]
            if wrong := [key for key, equals, _ in pairs if not equals]:
                raise UsageError(f"--setting {wrong[0]!r}: no value", remedy="write it as KEY=VALUE")
            found.append(ask_provider(self.provider, {key: value for key, _, value in pairs}))
        if not found:
            raise UsageError("no source of the fabric", remedy="give --ibnetdiscover, --lldp or --provider")
        return found


def _read_ibnetdiscover(file: Path, timeout: float) -> Reported:
    from sluice.base.errors import UsageError
    from sluice.fabric.ibnet import read_ibnetdiscover, run_ibnetdiscover

    if str(file) == "-":
        return run_ibnetdiscover(timeout)
    try:
        return read_ibnetdiscover(file.read_text(errors="replace"), str(file))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", remedy="name a file that can be read, or '-'") from error


@dataclass(slots=True)
class _Site:
    """The fabric with names of Slurm's nodes, and what else is known of the site."""

    conf: Path
    slurm: SlurmConf
    inventories: dict[str, Inventory]
    fabric: Fabric
    tree: Topology
    problems: list[FabricProblem]


def _discover(sources: _Sources, slurm_conf: Path | None, inventory_dir: Path | None) -> _Site:
    from gres_probe.collect import load_inventories
    from sluice.fabric.check import adapters_by_guid
    from sluice.fabric.model import Fabric, renamed
    from sluice.fabric.tree import tree_of
    from sluice.slurm.slurm_conf import read_slurm_conf

    conf = find_slurm_conf(slurm_conf)
    assert conf is not None  # noqa: S101 - it is required
    slurm = read_slurm_conf(conf)
    inventories: dict[str, Inventory] = {}
    if inventory_dir is not None:
        collected = load_inventories(inventory_dir)
        inventories = {name: one for name, one in collected.inventories.items() if name in slurm.nodes}
        for failure in collected.failures.values():
            click.echo(f"sluice: {one_line(str(failure), limit=None)}", err=True)
    aliases = {node.text("nodehostname"): name for name, node in slurm.nodes.items() if node.text("nodehostname")}
    guids = adapters_by_guid(inventories)
    fabric = Fabric([renamed(one, guids, aliases) for one in sources.read()])
    tree, unlike = tree_of(fabric, slurm.nodes)
    return _Site(conf, slurm, inventories, fabric, tree, [*fabric.judge(slurm.nodes), *unlike])


@click.group("fabric")
def command() -> None:
    """The network between nodes: discover it, write it for Slurm, check what is configured."""


@command.command("discover")
@source_options
@click.option(
    "--as",
    "kind",
    type=click.Choice(["tree", "block", "yaml"]),
    help="topology.conf as tree or block, topology.yaml with both; default: yaml from Slurm 25.05 on, else tree.",
)
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Default: next to slurm.conf.")
@click.option("--write", "do_write", is_flag=True, help="Write the file; without it, only the difference is shown.")
@click.option("--force", is_flag=True, help="Write also where GUIDs, cables or nodes are in doubt.")
def discover(
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    slurm_version: str | None,
    inventory_dir: Path | None,
    as_json: bool,
    kind: str | None,
    output: Path | None,
    do_write: bool,
    force: bool,
    **sources: Any,
) -> None:
    """Switches, links, rails and planes, as topology.conf or topology.yaml; the difference first.

    Reads only, unless --write is given. Problems of the fabric are printed to stderr.
    """
    from gres_probe.deploy import FileChange, current_text
    from sluice.base.errors import SluiceError
    from sluice.fabric.tree import blocks_of
    from sluice.slurm.topology import YAML_SINCE, topology_conf, topology_yaml

    site = _discover(_Sources(**sources), slurm_conf, inventory_dir)
    blocks = blocks_of(site.tree, site.inventories)
    kind = kind or ("yaml" if find_version(slurm_version, slurm_prefix) >= YAML_SINCE else "tree")
    text = (
        topology_yaml([site.tree, blocks])
        if kind == "yaml"
        else topology_conf(blocks if kind == "block" else site.tree)
    )
    path = output or site.conf.parent / ("topology.yaml" if kind == "yaml" else "topology.conf")
    change = FileChange(path, current_text(path), text)
    planes = _planes_change(site)
    if as_json:
        click.echo(json.dumps(_document(site, blocks), indent=2))
    else:
        _tell_fabric(site)
        click.echo(change.diff(), nl=False)
        click.echo(planes.diff() if planes is not None else "", nl=False)
    _tell_problems(site.problems)
    if not do_write:
        return
    if kind == "yaml" and not force:
        _refuse_loss(path, site.slurm, {site.tree.name, blocks.name})
    doubtful = [problem for problem in site.problems if problem.kind in _MISLEADING]
    if doubtful and not force:
        raise SluiceError(
            f"{path}: not written: {doubtful[0].kind}: {doubtful[0].what}", remedy="mend the fabric, or give --force"
        )
    files = [(path, text), *([(planes.path, planes.new)] if planes is not None else [])]
    written = [_write(*file) for file in files]
    for file, new in zip(files, written, strict=True):
        click.echo(f"wrote {file[0]}" if new else f"{file[0]}: nothing to change", err=True)
    if any(written):
        click.echo("to do: sluice lint; then scontrol reconfigure (a new TopologyPlugin needs a restart)", err=True)


def _refuse_loss(path: Path, slurm: SlurmConf, written: Collection[str]) -> None:
    """Raise SluiceError where a partition has a topology that the file would not have: slurmctld does not start."""
    from sluice.base.errors import SluiceError

    for name, line in slurm.partitions.items():
        value = line.get("topology")
        if value is not None and value.text not in written:
            raise SluiceError(
                f"{path}: not written: partition {name} has Topology={value.text}, which would not be in it",
                remedy="give --output, and put its topologies into the site's file by hand; or give --force",
            )


def _write(path: Path, text: str) -> bool:
    """Whether it differed; owner, group and mode stay those of the file that it replaces."""
    from sluice.base.errors import SluiceError
    from sluice.base.files import write_if_changed

    try:
        try:
            old = path.stat()
        except FileNotFoundError:
            return write_if_changed(path, text)
        return write_if_changed(path, text, mode=S_IMODE(old.st_mode), like=old)
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="name a file that you may write: --output") from error


def _planes_change(site: _Site) -> FileChange | None:
    """nics.sluice.conf with the planes discovered; None where inventories or the file are not there."""
    from gres_probe.deploy import FileChange
    from gres_probe.nic_groups import render

    path, lines, wanted = _planes(site)
    return FileChange(path, render(lines.values()), render(wanted.values())) if lines else None


def _planes(site: _Site) -> tuple[Path, dict[str, str], dict[str, str]]:
    """The file, its lines by node, and these with the planes discovered. Raises SluiceError for a damaged file."""
    from gres_probe.deploy import current_text
    from gres_probe.nic_groups import NICS_FILE, read
    from sluice.base.errors import SluiceError
    from sluice.fabric.planes import lines_with_planes, planes_of

    path = site.conf.parent / NICS_FILE
    text = current_text(path) if site.inventories else None
    if text is None:
        return path, {}, {}
    try:
        lines = read(text)
    except SluiceError as error:
        raise SluiceError(f"{path}: {error.what}", remedy="write it again with: sluice gres write --nics") from error
    planes = planes_of(site.fabric, site.slurm.nodes)
    return path, lines, lines_with_planes(lines, planes, site.inventories, site.slurm)


@command.command("check")
@source_options
@click.option("--topology", type=click.Path(path_type=Path), metavar="FILE", help="Default: next to slurm.conf.")
@click.pass_context
def check(
    context: click.Context,
    /,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    slurm_version: str | None,
    inventory_dir: Path | None,
    as_json: bool,
    topology: Path | None,
    **sources: Any,
) -> None:
    """What was discovered, against what is configured, what nodes report in their inventories, and preflights.

    Exit 0 where they agree, 1 where they do not.
    """
    from sluice.fabric.check import compare, measured
    from sluice.fabric.planes import compare_planes
    from sluice.fabric.tree import blocks_of

    site = _discover(_Sources(**sources), slurm_conf, inventory_dir)
    configured = _configured(site, topology, slurm_version, slurm_prefix)
    problems = list(site.problems)
    for one in configured:
        found = blocks_of(site.tree, site.inventories) if one.kind == "block" else site.tree
        problems += compare(one, found)
    blocks = next((one for one in configured if one.kind == "block"), None)
    problems += measured(site.fabric, site.inventories, blocks)
    _, lines, wanted = _planes(site)
    problems += compare_planes(lines, wanted)
    problems += _of_preflights(site)
    problems = list(dict.fromkeys(problems))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "problems": [asdict(one) for one in problems]}, indent=2))
    else:
        _tell_fabric(site)
        _tell_problems(problems, err=False)
    if problems:
        context.exit(1)


def _of_preflights(site: _Site) -> list[FabricProblem]:
    """Nodes that the last preflights of jobs suspected or found at fault; none where this host has no such file.

    Raises SluiceError for a file that cannot be read.
    """
    from sluice.exchange.preflight import STATE_FILE, Memory
    from sluice.fabric.model import FabricProblem

    where = site.slurm.options.get("statesavelocation")
    memory = Memory() if where is None else Memory.load(Path(where.text) / STATE_FILE)
    remedy = "mend what it names, then: scontrol update nodename=NODE state=resume; its next job tests it again"
    return [
        FabricProblem("preflight", f"{node} is {said.state}: {said.words}", remedy)
        for node, said in memory.nodes.items()
        if said.state != "good"
    ]


def _configured(
    site: _Site, given: Path | None, slurm_version: str | None, slurm_prefix: Path | None
) -> list[Topology]:
    """The topologies that the site's Slurm reads. Raises SluiceError for a file that slurmctld would refuse."""
    from sluice.base.errors import SluiceError, UsageError
    from sluice.slurm.topology import YAML_SINCE, read_topology

    path = given
    if path is None:
        path = site.conf.parent / "topology.yaml"
        if not path.is_file() or find_version(slurm_version, slurm_prefix) < YAML_SINCE:
            path = site.conf.parent / "topology.conf"
    try:
        read = read_topology(path)
    except OSError as error:
        remedy = "write it with: sluice fabric discover --write; or name it with --topology"
        raise UsageError(f"{path}: {error.strerror}", remedy=remedy) from error
    if read.faults:
        fault = read.faults[0]
        raise SluiceError(f"{fault.place}: {fault.what}", remedy="see: sluice lint")
    return [one for one in read.topologies if one.kind in ("tree", "block")]


def _document(site: _Site, blocks: Topology) -> dict[str, object]:
    fabric = site.fabric
    return {
        "schema_version": 1,
        "devices": [asdict(device) for device in fabric.devices.values()],
        "links": [asdict(link) for link in fabric.links],
        "planes": fabric.planes(),
        "rails": fabric.rails(site.slurm.nodes),
        "switches": [
            {"name": one.name, "nodes": list(one.nodes), "switches": list(one.switches)} for one in site.tree.switches
        ],
        "blocks": [{"name": block.name, "nodes": list(block.nodes)} for block in blocks.blocks],
        "problems": [asdict(problem) for problem in site.problems],
    }


def _tell_fabric(site: _Site) -> None:
    fabric = site.fabric
    switches = sum(not device.node for device in fabric.devices.values())
    nodes = len(set(fabric.adapters) & set(site.slurm.nodes))
    counts = (
        (switches, "switches"), (len(fabric.links), "links"), (nodes, f"of {len(site.slurm.nodes)} nodes"),
        (len(fabric.planes()), "planes"), (len(fabric.rails(site.slurm.nodes)), "rails"),
    )  # fmt: skip
    click.echo(", ".join(f"{count} {what}" for count, what in counts), err=True)


def _tell_problems(problems: Iterable[FabricProblem], *, err: bool = True) -> None:
    for problem in problems:
        click.echo(one_line(f"{problem.kind}: {problem.what}", limit=None), err=err)
        click.echo(f"    {problem.remedy}", err=err)
