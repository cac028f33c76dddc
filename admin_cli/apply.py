"""`sluice apply`: make the cluster what the policy file says."""

from __future__ import annotations

from pathlib import Path

import click

from admin_cli.site_options import apply_options, cluster_options, file_option, make_changes, policy_path


@click.command("apply")
@file_option
@apply_options
@click.option("--last", is_flag=True, help="Not a file, but the policy that was applied last: for timers.")
@cluster_options
def command(
    path: Path | None,
    last: bool,
    yes: bool,
    force: bool,
    drain_time: str,
    conf: Path | None,
    prefix: Path | None,
    state: Path | None,
) -> None:
    """Show what would change, ask, and apply it. One that was interrupted is finished by the next one.

    With --last, what time has brought is applied (a tenant that expired, a budget that is used up, a reservation to
    renew), and what was changed by hand is changed back, but for the level: one that was lowered in an emergency does
    not come back by a timer. A file that is being edited is not looked at.
    """
    from policy.site import Site, load_source
    from sluice_base.errors import UsageError

    if last and path is not None:
        raise UsageError("--last and --file do not go together", remedy="leave one out")
    site = Site(conf, prefix, state)
    plan = site.drift(keep_level=True) if last else site.plan(load_source(policy_path(path)))
    make_changes(site, plan, action="apply", yes=yes, force=force, drain_time=drain_time)
