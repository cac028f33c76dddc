"""Options of the commands that bring a policy file and a cluster together."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.slurm_options import where_options

if TYPE_CHECKING:
    from policy.changes import Change
    from policy.site import Comparison, Site

file_option = click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Policy file; default: /etc/sluice/sluice.yaml.",
)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the options of `cluster_options` say."""

    conf: Path | None
    prefix: Path | None
    state: Path | None

    def site(self) -> Site:
        """The site that they name."""
        from policy.site import Site

        return Site(self.conf, self.prefix, self.state)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--slurm-conf, --slurm-prefix and --state-dir, given to the command as one `ClusterOptions`, `cluster`."""

    @functools.wraps(command)
    def call(conf: Path | None, prefix: Path | None, state: Path | None, **given: Any) -> Any:
        return command(cluster=ClusterOptions(conf, prefix, state), **given)

    state = click.option(
        "--state-dir",
        "state",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Where Sluice keeps what it applied, and the audit log; default: /var/lib/sluice.",
    )
    return where_options(state(call))


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """What the options of `change_options` say."""

    path: Path | None
    yes: bool
    force: bool
    drain_time: str
    cluster: ClusterOptions


def change_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """All options of a command that changes a site, given to it as one `ChangeOptions`, `options`."""

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        options = ChangeOptions(**{name: given.pop(name) for name in ChangeOptions.__slots__})
        return command(options=options, **given)

    wrapped: Callable[..., Any] = cluster_options(call)
    for option in (
        click.option(
            "--drain-time",
            default="5m",
            show_default=True,
            metavar="TIME",
            help="With --force: how long running jobs of removed tenants may continue.",
        ),
        click.option("--force", is_flag=True, help="Remove tenants that have jobs, after draining them."),
        click.option("-y", "--yes", is_flag=True, help="Do not ask."),
        file_option,
    ):
        wrapped = option(wrapped)
    return wrapped


def policy_path(path: Path | None) -> Path:
    """The policy file that was named, or the site's."""
    from policy.document import DEFAULT_FILE

    return path or DEFAULT_FILE


def complete_tenant(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names for the shell's completion, from the policy file; none where it cannot be read."""
    from policy.document import load
    from sluice.base.errors import SluiceError

    del parameter
    try:
        tenants = load(policy_path(context.params.get("path"))).policy.tenants
    except SluiceError:
        return []
    return [name for name in tenants if name.startswith(incomplete)]


def say(text: str) -> None:
    """Progress, on stderr."""
    click.echo(f"sluice: {text}", err=True)


def print_changes(comparison: Comparison) -> None:
    """What would change, for people."""
    from policy.changes import show, summary

    for line in show(comparison.changes):
        click.echo(line)
    for note in comparison.wanted.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"cluster {comparison.live.name}, {comparison.source.path}: {summary(comparison.changes)}", err=True)


def make_changes(
    site: Site,
    comparison: Comparison,
    *,
    action: str,
    options: ChangeOptions,
    before: Callable[[], None] | None = None,
) -> None:
    """Show, ask and apply. Raises SluiceError; click.Abort when the answer is no."""
    from policy.units import parse_seconds
    from sluice.base.errors import UsageError

    try:
        drain_s = float(parse_seconds(options.drain_time))
    except ValueError as error:
        raise UsageError(f"--drain-time: {error}") from error
    print_changes(comparison)
    if comparison.changes and not options.yes:
        if not sys.stdin.isatty():
            raise UsageError("cannot ask: standard input is not a terminal", remedy="read the changes, then use --yes")
        click.confirm("apply?", abort=True, err=True)
    if not comparison.changes and before is None:
        _record_unchanged(site, comparison)
        return
    done, left = site.apply(
        comparison, who=site.caller(), action=action, force=options.force, drain_s=drain_s, progress=say, before=before
    )
    say(f"{len(done)} changes applied")
    _say_left(left)


def _record_unchanged(site: Site, comparison: Comparison) -> None:
    """A policy that changes nothing is applied: `drift` compares with it from now on."""
    who = site.caller()
    if who.is_admin and site.applied().version != comparison.source.digest:
        site.apply(comparison, who=who)


def _say_left(left: list[Change]) -> None:
    if left:
        names = ", ".join(f"{change.kind} {change.name}" for change in left[:5])
        say(f"left to an administrator: {names}{' and more' if len(left) > 5 else ''}")
