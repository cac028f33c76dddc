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


_SECRET = ("digest", "old_digest")


@click.group("token")
def command() -> None:
    """Tokens for `sluice web` and for gateways of models. For root."""


@command.command()
@click.argument("user")
@click.option("--for", "duration", default="30d", show_default=True, metavar="TIME", help="How long it holds.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    default=("read",),
    show_default=True,
    help="What it is for: read and write of `sluice web`, serve of gateways.",
)
@click.option("--comment", default="", metavar="TEXT", help="What it is used for.")
@_store
def create(user: str, duration: str, scopes: tuple[str, ...], comment: str, store: Path) -> None:
    """Make a token of USER and print it: it is shown only now."""
    from sluice.base.text import one_line
    from sluice.base.tokens import TokenStore

    seconds = _seconds("--for", duration)
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
        rows = [{name: value for name, value in asdict(one).items() if name not in _SECRET} for one in found]
        click.echo(json.dumps({"schema_version": 1, "tokens": rows}, indent=2))
        return
    for one in found:
        over = " (over)" if one.expires <= time.time() else ""
        scopes = ",".join(one.scopes)
        click.echo(f"{one.id}  {one.user}  {scopes}  until {_moment(one.expires)}{over}  {one.comment}".rstrip())


@command.command()
@click.argument("id_", metavar="ID")
@click.option(
    "--old-for", "old_for", default="1d", show_default=True, metavar="TIME", help="How long the old secret still holds."
)
@click.option("--for", "duration", default=None, metavar="TIME", help="How long it holds; default: its end stays.")
@_store
def rotate(id_: str, old_for: str, duration: str | None, store: Path) -> None:
    """Give a token a new secret and print it: it is shown only now. Its user and scopes stay."""
    from sluice.base.tokens import TokenStore

    now = time.time()
    made, text = TokenStore(store).rotate(
        id_,
        now=now,
        old_for=_seconds("--old-for", old_for),
        seconds=None if duration is None else _seconds("--for", duration),
    )
    click.echo(text)
    old = f", the old secret until {_moment(made.old_until)}" if made.old_until else ""
    click.echo(f"token {made.id} of {made.user}, until {_moment(made.expires)}{old}", err=True)


@command.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@_store
def revoke(ids: tuple[str, ...], store: Path) -> None:
    """Remove tokens: they are refused from the next request on."""
    from sluice.base.tokens import TokenStore

    for one in TokenStore(store).revoke(ids):
        click.echo(f"{one.id} of {one.user}: revoked")


def _seconds(option: str, text: str) -> int:
    from policy.units import parse_seconds
    from sluice.base.errors import UsageError

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
