"""`sluice gres`: write gres.conf and node lines from inventories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.base.text import one_line
from sluice.cli.slurm_options import find_slurm_conf, find_version, site_options

if TYPE_CHECKING:
    from gres_probe.deploy import GresChanges
    from gres_probe.inventory import Inventory


@click.group("gres")
def command() -> None:
    """Write gres.conf and node lines from inventories."""


@command.command("write")
@site_options
@click.option("--inventory-dir", type=click.Path(path_type=Path), metavar="DIR", help="Drop folder of the inventories.")
@click.option("--nodes", metavar="HOSTLIST", help="Only these nodes; default: every inventory in the folder.")
@click.option("--output-dir", type=click.Path(path_type=Path), metavar="DIR", help="Default: the folder of slurm.conf.")
@click.option("--policy", type=click.Path(path_type=Path), metavar="FILE", help="Add the classes of its grouping.")
@click.option("--per-node", is_flag=True, help="A gres.conf for each node, in DIR/NODE, instead of one for all.")
@click.option("--no-shards", is_flag=True, help="Whole GPUs only: no GPU memory as gres/shard.")
@click.option("--nics", is_flag=True, help="RDMA interfaces as gres/nic: jobs open only those that they ask for.")
@click.option("--nic-types", is_flag=True, help="With --nics: by their link layer, as nic:ib and nic:roce.")
@click.option("--migrate-shards", is_flag=True, help="Replace shards that the site defines itself; lists their jobs.")
@click.option("--diff", "only_diff", is_flag=True, help="Show what would change, and write nothing.")
def write(
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    slurm_version: str | None,
    inventory_dir: Path | None,
    nodes: str | None,
    output_dir: Path | None,
    policy: Path | None,
    per_node: bool,
    no_shards: bool,
    nics: bool,
    nic_types: bool,
    migrate_shards: bool,
    only_diff: bool,
) -> None:
    """Write gres.sluice.conf and nodes.sluice.conf where something changed; slurm.conf and gres.conf stay untouched.

    With --nics also nics.sluice.conf, for the placement.
    """
    from gres_probe.deploy import gres_changes
    from sluice.base.errors import SluiceError, UsageError
    from sluice.slurm.slurm_conf import read_config, read_slurm_conf

    if nic_types and not nics:
        raise UsageError("--nic-types is about interfaces that --nics offers", remedy="add --nics, or leave it out")
    site = find_slurm_conf(slurm_conf, required=output_dir is None)
    folder = output_dir or (site.parent if site else Path())
    if output_dir is not None and not output_dir.is_dir():
        raise UsageError(f"--output-dir {output_dir}: no such folder", remedy="make it first")
    inventories = _inventories(inventory_dir, nodes)
    gres_file = site.parent / "gres.conf" if site else None
    changes = gres_changes(
        inventories,
        folder,
        slurm=read_slurm_conf(site) if site else None,
        gres=read_config(gres_file) if gres_file and gres_file.is_file() else None,
        slurm_version=find_version(slurm_version, slurm_prefix),
        shards=not no_shards,
        nics=nics,
        nic_types=nic_types,
        per_node=per_node,
        features=_class_features(inventories, policy),
    )
    for note in changes.notes:
        click.echo(f"sluice: {one_line(note, limit=None)}", err=True)
    if changes.foreign_shards and not no_shards:
        _tell_migration(changes, site, slurm_prefix)
        if not (migrate_shards or only_diff):
            raise SluiceError(
                f"{changes.foreign_shards[0]}: this site already uses shards; nothing written",
                remedy="keep them with --no-shards, or replace them with --migrate-shards",
            )
    if only_diff:
        for file in changes.files:
            click.echo(file.diff(), nl=False)
    else:
        written = changes.write()
        for path in written:
            click.echo(f"wrote {path}")
        if not written:
            click.echo("nothing to change", err=True)
    for step in changes.steps:
        click.echo(f"to do: {one_line(step, limit=None)}", err=True)


def _inventories(folder: Path | None, nodes: str | None) -> list[Inventory]:
    """Those that were collected, of these nodes. Raises SluiceError where one cannot be read, which is said."""
    from gres_probe.collect import DEFAULT_DIR, load_inventories
    from sluice.base.errors import SluiceError, UsageError
    from sluice.base.hostlist import expand

    collected = load_inventories(folder or DEFAULT_DIR, expand(nodes) if nodes is not None else None)
    if collected.failures:
        for failure in collected.failures.values():
            click.echo(f"sluice: {one_line(str(failure), limit=None)}", err=True)
        raise SluiceError(
            "nothing written: some inventories cannot be read", remedy="mend them, or choose with --nodes"
        )
    if not collected.inventories:
        raise UsageError(f"{folder or DEFAULT_DIR}: no inventories", remedy="sluice inventory collect")
    return list(collected.inventories.values())


def _class_features(inventories: list[Inventory], policy: Path | None) -> dict[str, tuple[str, ...]]:
    if policy is None:
        return {}
    from gres_probe.group import group
    from policy.grouping import load_grouping

    return group(inventories, load_grouping(policy)).features()


def _tell_migration(changes: GresChanges, slurm_conf: Path | None, prefix: Path | None) -> None:
    """What the change of meaning does to jobs: a shard was a share of a GPU, and becomes one MiB."""
    from sluice.base.errors import SluiceError
    from sluice.slurm import connect

    click.echo("sluice: shards of this site's own are defined at", err=True)
    for place in changes.foreign_shards:
        click.echo(f"  {one_line(place, limit=None)}", err=True)
    try:
        jobs = connect(conf=slurm_conf, prefix=prefix).jobs()
    except SluiceError as error:
        click.echo(f"sluice: jobs cannot be listed: {one_line(str(error), limit=None)}", err=True)
        return
    asking = [
        job
        for job in jobs
        if any(name.partition(":")[0] == "gres/shard" for name in job.tres)
        or "shard" in f"{job.tres_per_node},{job.tres_per_job},{job.tres_per_task}"
    ]
    if not asking:
        click.echo("sluice: no job asks for shards", err=True)
        return
    click.echo("sluice: these jobs ask for shards, each of which then is 1 MiB of GPU memory:", err=True)
    for job in asking:
        asked = job.tres_per_node or job.tres_per_job or job.tres_per_task
        fate = "keeps running, and is counted in MiB" if job.state == "RUNNING" else "waits with the new meaning"
        click.echo(f"  {one_line(f'{job.id} {job.user} {job.state} {asked}', limit=None)}: {fate}", err=True)
    click.echo(
        "sluice: let running ones end and change waiting ones: scontrol update JobId=N TresPerNode=...", err=True
    )
