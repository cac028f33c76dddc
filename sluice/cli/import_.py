"""`sluice import`: a policy file from an existing cluster."""

from __future__ import annotations

from pathlib import Path

import click

from sluice.cli.site_options import ClusterOptions, cluster_options, say


@click.command("import")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="A new file, instead of stdout.")
@cluster_options
def command(output: Path | None, cluster: ClusterOptions) -> None:
    """Print a policy file that says what the cluster is now. `sluice plan` with it changes no account, user or QOS.

    Sluice's own files next to slurm.conf are new if there were none.
    """
    from policy.importer import import_policy
    from policy.live import read_live
    from sluice.base.errors import UsageError
    from sluice.base.files import write_atomic

    text, notes = import_policy(read_live(cluster.site().cluster))
    for note in notes:
        say(note)
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists():
        raise UsageError(f"--output {output}: is there already", remedy="name a new file")
    write_atomic(output, text)
