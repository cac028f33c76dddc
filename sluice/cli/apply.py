"""`sluice apply`: make the cluster what the policy file says."""

from __future__ import annotations

import click

from sluice.cli.site_options import ChangeOptions, change_options, make_changes, policy_path


@click.command("apply")
@click.option("--last", is_flag=True, help="Not a file, but the policy that was applied last: for timers.")
@change_options
def command(last: bool, options: ChangeOptions) -> None:
    """Show what would change, ask, and apply it. If an apply is interrupted, the next one finishes it.

    With --last, what has become due is applied (a tenant that expired, a budget that is used up, a reservation to
    renew), and what was changed by hand is changed back, except for the level: if it was lowered in an emergency, a
    timer does not raise it. The policy file is not read.
    """
    from policy.site import load_source
    from sluice.base.errors import UsageError

    if last and options.path is not None:
        raise UsageError("--last and --file do not go together", remedy="leave one out")
    site = options.cluster.site()
    comparison = site.drift(keep_level=True) if last else site.compare(load_source(policy_path(options.path)))
    make_changes(site, comparison, action="apply", options=options)
