"""`sluice mig`: lay out this node's GPUs in MIG instances or AMD partitions as the policy says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from sluice.cli.slurm_options import find_slurm_conf, find_version, site_options

if TYPE_CHECKING:
    from gres_probe.mig import Change, GpuLayout

NODE_POLICY = Path("/etc/slurm/sluice.node.json")
_LAY_OUT_S = 300.0  # AMD's driver takes minutes for its start
_POLICY_OPTION = click.option(
    "--node-policy",
    type=click.Path(path_type=Path),
    default=NODE_POLICY,
    show_default=True,
    help="What `sluice apply` wrote for the nodes.",
)
_NODE_OPTION = click.option(
    "--node", metavar="NAME", help="This node's name in Slurm; default: SLURMD_NODENAME, else the host's."
)


@click.group("mig")
def command() -> None:
    """MIG instances and AMD partitions as the policy says (enforcement.mig, .amd_partitions); on the node, as root."""


@command.command()
@_POLICY_OPTION
@_NODE_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(node_policy: Path, node: str | None, as_json: bool) -> None:
    """What `sluice mig apply` would change; nothing is changed, and the exit status is 0."""
    name, layers = _find(node_policy, node)
    found = [one for layer in layers for one in layer.changes]
    for layer in layers:
        layer.library.close()
    if as_json:
        rows = [
            {
                "vendor": layer.vendor,
                "gpu": one.now.index,
                "uuid": one.now.uuid,
                "now": one.now.profiles,
                "wanted": one.wanted,
                "processes": one.now.busy,
            }
            for layer in layers
            for one in layer.changes
        ]
        click.echo(json.dumps({"schema_version": 1, "node": name, "changes": rows}))
        return
    for one in found:
        click.echo(one.describe() + (f"; {one.now.busy} processes are on it" if one.now.busy else ""))
    if not found:
        click.echo("nothing to change", err=True)


@command.command()
@_POLICY_OPTION
@_NODE_OPTION
@site_options
@click.option("--inventory-dir", type=click.Path(path_type=Path), metavar="DIR", help="Drop folder of the inventories.")
@click.option(
    "--wait", default=0, show_default=True, metavar="SECONDS", help="Wait so long for the node's jobs to end."
)
@click.option("--no-gres", is_flag=True, help="Do not write GRES here: the node then stays drained until you have.")
def apply(
    node_policy: Path,
    node: str | None,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    slurm_version: str | None,
    inventory_dir: Path | None,
    wait: int,
    no_gres: bool,
) -> None:
    """Drain the node, lay out its idle GPUs, write its GRES again, and resume it if this command drained it.

    If it is killed at any point, run it again: it continues.
    """
    import os

    from prolog_epilog.relayout import Relayout
    from sluice.base.errors import SluiceError
    from sluice.slurm.commands import Commands

    if os.geteuid() != 0:
        raise SluiceError("sluice mig apply: not root", remedy="run it with sudo, on the node")
    name, layers = _find(node_policy, node)
    found = any(layer.changes for layer in layers)
    site = find_slurm_conf(slurm_conf)
    assert site is not None  # noqa: S101 - it is required
    relayout = Relayout(
        name, Commands(conf=site, prefix=slurm_prefix), progress=lambda text: click.echo(text, err=True)
    )
    stale = not found and relayout.drained_by_us()  # of a run that was killed before it reported to the agent
    try:
        if found:
            relayout.drain(wait)
            relayout.pause_agent()
            stale = True
        for layer in layers:
            layer.library.apply_all(layer.changes, click.echo)
    finally:
        for layer in layers:
            layer.library.close()
        if stale:
            relayout.refresh_agent()
    if no_gres:
        click.echo(
            f"to do: sluice inventory collect {name}; sluice gres write; scontrol reconfigure; then: sluice mig apply",
            err=True,
        )
        return
    version = find_version(slurm_version, slurm_prefix)
    relayout.write_gres(site, inventory_dir, version, {layer.vendor for layer in layers})
    relayout.resume()
    if not found:
        click.echo("nothing to change", err=True)


@command.command()
@_POLICY_OPTION
@_NODE_OPTION
@click.option("--slurm-conf", type=click.Path(path_type=Path), metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Where Slurm is installed.")
@click.option(
    "--wait",
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Try so long to drain the node where it has to be, while no controller answers.",
)
def restore(node_policy: Path, node: str | None, slurm_conf: Path | None, slurm_prefix: Path | None, wait: int) -> None:
    """When the node starts, before its agent and slurmd: lay out its GPUs again, because a restart removes the layout.

    Where that fails the node is drained, and its reason says why. For sluice-mig.service.
    """
    import os

    from prolog_epilog.relayout import Relayout
    from sluice.base.errors import SluiceError
    from sluice.slurm.commands import Commands

    if os.geteuid() != 0:
        raise SluiceError("sluice mig restore: not root", remedy="enable sluice-mig.service, which runs it")
    if not node_policy.exists():
        click.echo(f"nothing to restore: there is no {node_policy}", err=True)
        return

    def lay_out() -> None:
        _, layers = _find(node_policy, node)
        for layer in layers:
            layer.library.apply_all(layer.changes, click.echo)
        if not any(layer.changes for layer in layers):
            click.echo("nothing to change", err=True)

    commands = Commands(conf=find_slurm_conf(slurm_conf, required=False), prefix=slurm_prefix)
    relayout = Relayout(_name(node), commands, progress=lambda text: click.echo(text, err=True))
    relayout.restore(lay_out, limit=_LAY_OUT_S, wait=wait)


class _Library(Protocol):
    """NVML or AMD SMI, for layouts."""

    def layouts(self) -> list[GpuLayout]: ...
    def check_all(self, changes: list[Change]) -> None: ...
    def apply_all(self, changes: list[Change], progress: Callable[[str], None]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Layer:
    """One vendor's GPUs, and what of them is not as the policy says."""

    vendor: str
    library: _Library
    changes: list[Change]


def _name(given: str | None) -> str:
    """The node's name in Slurm."""
    import os

    return given or os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def _find(node_policy: Path, node: str | None) -> tuple[str, list[_Layer]]:
    """The node's name, and of each vendor that the policy has layouts for here what differs from them.

    All is checked against what the GPUs can be.
    """
    from gres_probe.amd_partitions import AmdPartitions
    from gres_probe.mig import Mig, changes, names_node, wanted_layouts
    from policy.node import parse
    from sluice.base.errors import SluiceError

    name = _name(node)
    try:
        limits = parse(node_policy.read_bytes(), source=str(node_policy)).limits
    except OSError as error:
        raise SluiceError(f"{node_policy}: {error.strerror}", remedy="write it with: sluice apply") from error
    modes = {key: (mode,) for key, mode in limits.amd_partitions.items()}
    sections: list[tuple[str, str, Mapping[str, tuple[str, ...]], Callable[[], _Library]]] = [
        ("nvidia", "mig", limits.mig, Mig),
        ("amd", "amd_partitions", modes, AmdPartitions),
    ]
    layers = []
    for vendor, section, layouts, library in sections:
        if names_node(name, layouts):
            opened = library()
            now = opened.layouts()
            layers.append(_Layer(vendor, opened, changes(now, wanted_layouts(name, layouts, len(now), section))))
            opened.check_all(layers[-1].changes)
    return name, layers
