"""`sluice token`: tokens for Sluice's own services."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

_store = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=Path("/etc/sluice/tokens.json"),
    show_default=True,
    metavar="FILE",
    help="Where they are kept, without their secrets.",
)


@click.group("token")
def command() -> None:
    """Tokens for `sluice web`. For root."""


@command.command()
@click.argument("user")
@click.option("--for", "duration", default="30d", show_default=True, metavar="TIME", help="How long it holds.")
@click.option("--scope", "scopes", multiple=True, default=("read",), show_default=True, help="What it is for.")
@click.option("--comment", default="", metavar="TEXT", help="What it is used for.")
@_store
def create(user: str, duration: str, scopes: tuple[str, ...], comment: str, store: Path) -> None:
    """Make a token of USER and print it: it is shown only now."""
    from policy.units import parse_seconds
    from sluice.base.errors import UsageError
    from sluice.base.text import one_line
    from sluice.base.tokens import TokenStore

    try:
        seconds = parse_seconds(duration)
    except ValueError as error:
        raise UsageError(f"--for: {error}") from error
    made, text = TokenStore(store).create(
        user, scopes, now=time.time(), seconds=seconds, comment=one_line(comment, limit=200)
    )
    click.echo(text)
    click.echo(f"token {made.id} of {user}, until {_moment(made.expires)}", err=True)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@_store
def list_(as_json: bool, store: Path) -> None:
    """All tokens; never their secrets."""
    from sluice.base.tokens import TokenStore

    found = sorted(TokenStore(store).tokens().values(), key=lambda one: one.created)
    if as_json:
        rows = [{name: value for name, value in asdict(one).items() if name != "digest"} for one in found]
        click.echo(json.dumps({"schema_version": 1, "tokens": rows}, indent=2))
        return
    for one in found:
        over = " (over)" if one.expires <= time.time() else ""
        scopes = ",".join(one.scopes)
        click.echo(f"{one.id}  {one.user}  {scopes}  until {_moment(one.expires)}{over}  {one.comment}".rstrip())


@command.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@_store
def revoke(ids: tuple[str, ...], store: Path) -> None:
    """Remove tokens: they are refused from the next request on."""
    from sluice.base.tokens import TokenStore

    for one in TokenStore(store).revoke(ids):
        click.echo(f"{one.id} of {one.user}: revoked")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
