"""`sluice tenant`: the tenants of the cluster; changes go into the policy file first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from admin_cli.site_options import (
    apply_options,
    cluster_options,
    complete_tenant,
    file_option,
    make_changes,
    policy_path,
)
from admin_cli.tables import Column, print_table, table_options

if TYPE_CHECKING:
    from policy.report import TenantReport
    from policy.site import Site


@click.group("tenant")
def command() -> None:
    """Tenants: list, show, create, change, remove.

    Users see the tenants that they belong to. Changes are written into the policy file, comments kept, and applied.
    """


def _columns() -> list[Column[TenantReport]]:
    def amount(values: str, tres: str) -> Callable[[TenantReport], object]:
        return lambda one: getattr(one, values).get(tres) or None

    return [
        Column("tenant", lambda one: one.name),
        Column("parent", lambda one: one.parent),
        Column("members", lambda one: len(one.members), right=True),
        Column("shares", lambda one: one.shares, right=True),
        Column("guarantee", amount("guarantee", "gres/gpu"), right=True),
        Column("limit", amount("limit", "gres/gpu"), right=True),
        Column("gpus", lambda one: one.used.get("gres/gpu", 0), right=True),
        Column("memory_limit", amount("limit", "gres/shard"), right=True),
        Column("memory", lambda one: one.used.get("gres/shard", 0), right=True),
        Column("running", lambda one: one.running, right=True),
        Column("submitted", lambda one: one.submitted, right=True),
        Column("borrow", lambda one: "yes" if one.borrows else "no"),
        Column("qos", lambda one: one.qos),
        Column("users", lambda one: one.members),
    ]


DEFAULT_COLUMNS = (
    "tenant",
    "parent",
    "members",
    "shares",
    "guarantee",
    "limit",
    "gpus",
    "running",
    "submitted",
    "borrow",
)


def _visible(site: Site) -> dict[str, TenantReport]:
    from policy.access import caller, user_name
    from policy.report import report

    who = caller(site.cluster)
    if who.is_admin:
        return report(site.cluster)
    found = report(site.cluster, only=user_name())
    if who.coordinates:
        found |= {name: one for name, one in report(site.cluster).items() if name in who.coordinates}
    return found


def visible_tenant(site: Site, name: str) -> TenantReport:
    """A tenant that the caller may see. Raises UsageError."""
    from sluice_base.errors import UsageError

    tenants = _visible(site)
    if name not in tenants:
        known = ", ".join(list(tenants)[:10]) or "none"
        raise UsageError(f"tenant {name!r}: none that you may see", remedy=f"those are: {known}")
    return tenants[name]


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@table_options
@cluster_options
def list_(
    as_json: bool, fields: str | None, parsable2: bool, noheader: bool, conf: Path | None, prefix: Path | None,
    state: Path | None,
) -> None:  # fmt: skip
    """All tenants that you may see, with what they have and use."""
    from policy.site import Site

    rows = list(_visible(Site(conf, prefix, state)).values())
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "tenants": [row.document() for row in rows]}, indent=2))
        return
    print_table(_columns(), rows, default=DEFAULT_COLUMNS, fields=fields, parsable2=parsable2, noheader=noheader)


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@cluster_options
def show(name: str, as_json: bool, conf: Path | None, prefix: Path | None, state: Path | None) -> None:
    """One tenant: members, limits, use."""
    from policy.site import Site

    one = visible_tenant(Site(conf, prefix, state), name)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **one.document()}, indent=2))
        return
    lines = [
        f"tenant {one.name}",
        f"  parent     {one.parent or '-'}",
        f"  members    {', '.join(one.members) or '-'}",
        f"  shares     {one.shares}",
        f"  qos        {', '.join(one.qos) or '-'} (default {one.default_qos or '-'})",
        f"  jobs       {one.running} running, {one.submitted} submitted",
    ]
    lines += [f"  {option:<10} {value}" for option, value in one.limits.items()]
    lines += [f"  guaranteed {name}={count}" for name, count in one.guarantee.items()]
    lines += [f"  uses       {name}={count}" for name, count in one.used.items() if count]
    click.echo("\n".join(lines))


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@table_options
@cluster_options
def usage(
    name: str, as_json: bool, fields: str | None, parsable2: bool, noheader: bool, conf: Path | None,
    prefix: Path | None, state: Path | None,
) -> None:  # fmt: skip
    """What the members of a tenant use now, and have used."""
    from policy.site import Site
    from slurm_client.accounting import Use

    one = visible_tenant(Site(conf, prefix, state), name)
    rows = [use for user, use in one.member_use.items() if user in one.members]
    if as_json:
        document = [
            {"user": use.user, "running": use.running, "submitted": use.submitted, "used": dict(use.tres),
             "used_minutes": dict(use.tres_minutes)}
            for use in rows
        ]  # fmt: skip
        click.echo(json.dumps({"schema_version": 1, "tenant": name, "members": document}, indent=2))
        return
    columns: list[Column[Use]] = [
        Column("user", lambda use: use.user),
        Column("running", lambda use: use.running, right=True),
        Column("submitted", lambda use: use.submitted, right=True),
        Column("gpus", lambda use: use.tres.get("gres/gpu", 0), right=True),
        Column("memory", lambda use: use.tres.get("gres/shard", 0), right=True),
        Column("gpu_hours", lambda use: round(use.tres_minutes.get("gres/gpu", 0) / 60, 2), right=True),
    ]
    default = ("user", "running", "submitted", "gpus", "memory", "gpu_hours")
    print_table(columns, rows, default=default, fields=fields, parsable2=parsable2, noheader=noheader)


# ---- changes ----


def change_file(
    path: Path | None,
    site: Site,
    change: Callable[[Any], None],
    *,
    action: str,
    yes: bool,
    force: bool,
    drain_time: str,
) -> None:
    """Change the policy file, show what that changes, ask, write the file, apply. Raises SluiceError.

    The level stays as it is: who changes a tenant switches nothing on or off.
    """
    from policy.access import require
    from policy.document import read
    from policy.edit import edited, require_writable, save

    require(site.caller(), action)
    name = policy_path(path)
    require_writable(name)
    was = read(name)
    source = edited(name, change)
    make_changes(
        site, site.plan(source, keep_level=True), action=action, yes=yes, force=force, drain_time=drain_time,
        before=lambda: save(source, was),
    )  # fmt: skip


def tenants_of(document: Any) -> Any:
    """The section of the file, made where there is none."""
    if document.get("tenants") is None:
        document["tenants"] = {}
    return document["tenants"]


def existing(document: Any, name: str) -> Any:
    """A tenant's mapping in the file. Raises UsageError."""
    from sluice_base.errors import UsageError

    tenants = tenants_of(document)
    if name not in tenants:
        raise UsageError(f"tenant {name!r}: not in the policy file", remedy="see `sluice policy show`, or create it")
    if tenants[name] is None:
        tenants[name] = {}
    return tenants[name]


@command.command()
@click.argument("name")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@file_option
@apply_options
@cluster_options
def create(
    name: str, settings: tuple[str, ...], path: Path | None, yes: bool, force: bool, drain_time: str, conf: Path | None,
    prefix: Path | None, state: Path | None,
) -> None:  # fmt: skip
    """Put a new tenant into the policy file, and apply.

    KEY is a field of a tenant in the file, e.g. limit.gpus=8 'members=[alice, bob]' parent=acme.
    """
    from policy.edit import pairs, set_value
    from policy.site import Site
    from sluice_base.errors import UsageError

    words = pairs(settings)

    def change(document: Any) -> None:
        tenants = tenants_of(document)
        if name in tenants:
            raise UsageError(f"tenant {name!r}: is in the policy file already", remedy="change it: sluice tenant set")
        tenants[name] = {}
        for key, value in words:
            set_value(tenants[name], key, value)

    change_file(path, Site(conf, prefix, state), change, action="tenant create", yes=yes, force=force,
                drain_time=drain_time)  # fmt: skip


@command.command("set")
@click.argument("name", shell_complete=complete_tenant)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@file_option
@apply_options
@cluster_options
def set_(
    name: str, settings: tuple[str, ...], path: Path | None, yes: bool, force: bool, drain_time: str, conf: Path | None,
    prefix: Path | None, state: Path | None,
) -> None:  # fmt: skip
    """Change fields of a tenant in the policy file, and apply. KEY= takes one out."""
    from policy.edit import pairs, set_value
    from policy.site import Site

    words = pairs(settings)

    def change(document: Any) -> None:
        tenant = existing(document, name)
        for key, value in words:
            set_value(tenant, key, value)

    change_file(path, Site(conf, prefix, state), change, action="tenant set", yes=yes, force=force,
                drain_time=drain_time)  # fmt: skip


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@file_option
@apply_options
@cluster_options
def remove(
    name: str, path: Path | None, yes: bool, force: bool, drain_time: str, conf: Path | None, prefix: Path | None,
    state: Path | None,
) -> None:  # fmt: skip
    """Take a tenant out of the policy file, and apply. One with jobs needs --force: it is drained first."""
    from policy.site import Site

    def change(document: Any) -> None:
        existing(document, name)
        del tenants_of(document)[name]

    change_file(path, Site(conf, prefix, state), change, action="tenant remove", yes=yes, force=force,
                drain_time=drain_time)  # fmt: skip


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@click.option("--add", "added", multiple=True, metavar="USER[,USER]", help="New members.")
@click.option("--remove", "removed", multiple=True, metavar="USER[,USER]", help="Members who go.")
@file_option
@apply_options
@cluster_options
def members(
    name: str, added: tuple[str, ...], removed: tuple[str, ...], path: Path | None, yes: bool, force: bool,
    drain_time: str, conf: Path | None, prefix: Path | None, state: Path | None,
) -> None:  # fmt: skip
    """The members of a tenant; with --add or --remove, change them in the policy file, and apply."""
    from policy.site import Site
    from sluice_base.errors import UsageError

    site = Site(conf, prefix, state)
    new = [user for word in added for user in word.split(",")]
    old = [user for word in removed for user in word.split(",")]
    if not new and not old:
        click.echo("\n".join(visible_tenant(site, name).members))
        return

    def change(document: Any) -> None:
        tenant = existing(document, name)
        there = tenant.get("members")
        if there is None:
            there = tenant["members"] = []
        names = [one if isinstance(one, str) else one.get("name") for one in there]
        for user in old:
            if user not in names:
                raise UsageError(f"user {user!r}: no member of {name}", remedy="see: sluice tenant members")
            del there[names.index(user)]
            names.remove(user)
        for user in new:
            if user in names:
                raise UsageError(f"user {user!r}: is a member of {name} already", remedy="name new members only")
            there.append(user)
            names.append(user)

    change_file(path, site, change, action="tenant members", yes=yes, force=force, drain_time=drain_time)
