"""`sluice drift`: what was changed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import click

from admin_cli.site_options import cluster_options, print_plan


@click.command("drift")
@click.option("--json", "as_json", is_flag=True, help="The way back, as JSON.")
@cluster_options
def command(as_json: bool, conf: Path | None, prefix: Path | None, state: Path | None) -> None:
    """Compare the cluster with the policy that was applied last. Exit 0: no drift, 3: something was changed by hand.

    Shown is what `sluice apply` would change back.
    """
    from policy.site import Site

    plan = Site(conf, prefix, state).drift()
    if as_json:
        click.echo(json.dumps(plan.document(), indent=2))
    else:
        print_plan(plan)
    if plan.changes:
        raise click.exceptions.Exit(3)
