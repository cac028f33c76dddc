"""`sluice apply`: make the cluster what the policy file says."""

from __future__ import annotations

from pathlib import Path

import click

from admin_cli.site_options import apply_options, cluster_options, file_option, make_changes, policy_path


@click.command("apply")
@file_option
@apply_options
@cluster_options
def command(
    path: Path | None,
    yes: bool,
    force: bool,
    drain_time: str,
    conf: Path | None,
    prefix: Path | None,
    state: Path | None,
) -> None:
    """Show what would change, ask, and apply it. One that was interrupted is finished by the next one."""
    from policy.site import Site, load_source

    site = Site(conf, prefix, state)
    plan = site.plan(load_source(policy_path(path)))
    make_changes(site, plan, action="apply", yes=yes, force=force, drain_time=drain_time)
