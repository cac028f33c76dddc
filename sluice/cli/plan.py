"""`sluice plan`: what would change."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sluice.cli.site_options import ClusterOptions, cluster_options, file_option, policy_path, print_changes


@click.command("plan")
@file_option
@click.option("--json", "as_json", is_flag=True, help="The changes as JSON.")
@click.option("--snippet", is_flag=True, help="Print the snippet for slurm.conf, and nothing else.")
@cluster_options
def command(path: Path | None, as_json: bool, snippet: bool, cluster: ClusterOptions) -> None:
    """Compare the policy file with the cluster; change nothing. Exit 0: nothing to do, 3: there are changes."""
    from policy.site import load_source
    from policy.state import SNIPPET

    comparison = cluster.site().compare(load_source(policy_path(path)))
    if snippet:
        text = next(text for file, text in comparison.wanted.state.files.items() if file.name == SNIPPET)
        click.echo(text, nl=False)
        return
    if as_json:
        click.echo(json.dumps(comparison.document(), indent=2))
    else:
        print_changes(comparison)
    if comparison.changes:
        raise click.exceptions.Exit(3)
