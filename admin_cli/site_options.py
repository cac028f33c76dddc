"""Options of the commands that bring a policy file and a cluster together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from admin_cli.slurm_options import where_options

if TYPE_CHECKING:
    from policy.changes import Change
    from policy.site import Plan, Site

file_option = click.option(
    "-f", "--file", "path", type=click.Path(path_type=Path), metavar="FILE",
    help="Policy file; default: /etc/sluice/sluice.yaml.",
)  # fmt: skip


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--slurm-conf, --slurm-prefix and --state-dir."""
    state = click.option(
        "--state-dir", "state", type=click.Path(path_type=Path), metavar="DIR",
        help="Where Sluice keeps what it applied, and the audit log; default: /var/lib/sluice.",
    )  # fmt: skip
    return where_options(state(command))


def apply_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--yes, --force and --drain-time."""
    for option in (
        click.option("--drain-time", default="5m", show_default=True, metavar="TIME",
                     help="With --force: how long running jobs of removed tenants may go on."),
        click.option("--force", is_flag=True, help="Remove tenants that have jobs, after draining them."),
        click.option("-y", "--yes", is_flag=True, help="Do not ask."),
    ):  # fmt: skip
        command = option(command)
    return command


def policy_path(path: Path | None) -> Path:
    """The policy file that was named, or the site's."""
    from policy.document import DEFAULT_FILE

    return path or DEFAULT_FILE


def complete_tenant(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names for the shell's completion, from the policy file; none where it cannot be read."""
    from policy.document import load
    from sluice_base.errors import SluiceError

    del parameter
    try:
        tenants = load(policy_path(context.params.get("path"))).policy.tenants
    except SluiceError:
        return []
    return [name for name in tenants if name.startswith(incomplete)]


def say(text: str) -> None:
    """Progress, on stderr."""
    click.echo(f"sluice: {text}", err=True)


def print_plan(plan: Plan) -> None:
    """What would change, for people."""
    from policy.changes import show, summary

    for line in show(plan.changes):
        click.echo(line)
    for note in plan.wanted.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"cluster {plan.live.name}, {plan.source.path}: {summary(plan.changes)}", err=True)


def make_changes(
    site: Site,
    plan: Plan,
    *,
    action: str,
    yes: bool,
    force: bool,
    drain_time: str,
    before: Callable[[], None] | None = None,
) -> None:
    """Show, ask and apply. Raises SluiceError; click.Abort when the answer is no."""
    from policy.units import parse_seconds
    from sluice_base.errors import UsageError

    try:
        drain_s = float(parse_seconds(drain_time))
    except ValueError as error:
        raise UsageError(f"--drain-time: {error}") from error
    print_plan(plan)
    if plan.changes and not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody to ask: standard input is no terminal", remedy="read the plan, then use --yes")
        click.confirm("apply?", abort=True, err=True)
    if not plan.changes and before is None:
        _record_unchanged(site, plan)
        return
    done, left = site.apply(
        plan, who=site.caller(), action=action, force=force, drain_s=drain_s, progress=say, before=before
    )
    say(f"{len(done)} changes applied")
    _say_left(left)


def _record_unchanged(site: Site, plan: Plan) -> None:
    """A plan without changes is applied: `drift` compares with it from now on."""
    who = site.caller()
    if who.is_admin and site.applied().version != plan.source.digest:
        site.apply(plan, who=who)


def _say_left(left: list[Change]) -> None:
    if left:
        names = ", ".join(f"{change.kind} {change.name}" for change in left[:5])
        say(f"left to an administrator: {names}{' and more' if len(left) > 5 else ''}")
