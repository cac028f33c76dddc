"""`sluice drift`: what was changed by hand."""

from __future__ import annotations

import json

import click

from sluice.cli.site_options import ClusterOptions, cluster_options, print_changes


@click.command("drift")
@click.option("--json", "as_json", is_flag=True, help="The way back, as JSON.")
@cluster_options
def command(as_json: bool, cluster: ClusterOptions) -> None:
    """Compare the cluster with the policy that was applied last. Exit 0: no drift, 3: something was changed by hand.

    Shown is what `sluice apply` would change back.
    """

    comparison = cluster.site().drift()
    if as_json:
        click.echo(json.dumps(comparison.document(), indent=2))
    else:
        print_changes(comparison)
    if comparison.changes:
        raise click.exceptions.Exit(3)
