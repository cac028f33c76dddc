"""`sluice tenant`: the tenants of the cluster; changes go into the policy file first."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.site_options import (
    ChangeOptions,
    ClusterOptions,
    change_options,
    cluster_options,
    complete_tenant,
    make_changes,
    policy_path,
)
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from policy.quota_use import TenantUse
    from policy.site import Site


@click.group("tenant")
def command() -> None:
    """Tenants: list, show, create, change, remove.

    Users see the tenants that they belong to. Changes are written into the policy file, comments kept, and applied.
    """


def _columns() -> list[Column[TenantUse]]:
    def amount(values: str, tres: str) -> Callable[[TenantUse], object]:
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


def _visible(site: Site) -> dict[str, TenantUse]:
    from policy.access import caller, user_name
    from policy.quota_use import read_use

    who = caller(site.cluster)
    if who.is_admin:
        return read_use(site.cluster)
    found = read_use(site.cluster, only=user_name())
    if who.coordinates:
        found |= {name: one for name, one in read_use(site.cluster).items() if name in who.coordinates}
    return found


def visible_tenant(site: Site, name: str) -> TenantUse:
    """A tenant that the caller may see. Raises UsageError."""
    from sluice.base.errors import UsageError

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
    as_json: bool,
    table: TableOptions,
    cluster: ClusterOptions,
) -> None:
    """All tenants that you may see, with what they have and use."""

    rows = list(_visible(cluster.site()).values())
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "tenants": [row.document() for row in rows]}, indent=2))
        return
    table.print(_columns(), rows, default=DEFAULT_COLUMNS)


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@cluster_options
def show(name: str, as_json: bool, cluster: ClusterOptions) -> None:
    """One tenant: members, limits, use."""

    one = visible_tenant(cluster.site(), name)
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
    name: str,
    as_json: bool,
    table: TableOptions,
    cluster: ClusterOptions,
) -> None:
    """What the members of a tenant use now, and have used."""
    from sluice.slurm.accounting import Use

    one = visible_tenant(cluster.site(), name)
    rows = [use for user, use in one.member_use.items() if user in one.members]
    if as_json:
        document = [
            {
                "user": use.user,
                "running": use.running,
                "submitted": use.submitted,
                "used": dict(use.tres),
                "used_minutes": dict(use.tres_minutes),
            }
            for use in rows
        ]
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
    table.print(columns, rows, default=default)


# ---- changes ----


def change_file(options: ChangeOptions, change: Callable[[Any], None], *, action: str) -> None:
    """Change the policy file, show what that changes, ask, write the file, apply. Raises SluiceError.

    The level stays as it is: who changes a tenant switches nothing on or off.
    """
    from policy.access import require
    from policy.document import read
    from policy.edit import edited, require_writable, save

    site = options.cluster.site()
    require(site.caller(), action)
    name = policy_path(options.path)
    require_writable(name)
    was = read(name)
    source = edited(name, change)
    make_changes(
        site,
        site.compare(source, keep_level=True),
        action=action,
        options=options,
        before=lambda: save(source, was),
    )


def creating(section: str, name: str, settings: tuple[str, ...]) -> Callable[[Any], None]:
    """The change that puts a new name with KEY=VALUE settings into a section. Raises UsageError."""
    from policy.edit import mapping_of, pairs, set_value
    from sluice.base.errors import UsageError

    words = pairs(settings)

    def change(document: Any) -> None:
        names = mapping_of(document, section)
        if name in names:
            what = f"{section.removesuffix('s')} {name[:80]!r}"
            raise UsageError(f"{what}: is in the policy file already", remedy="change it with `set`")
        names[name] = {}
        for key, value in words:
            set_value(names[name], key, value)

    return change


def setting(section: str, name: str, settings: tuple[str, ...]) -> Callable[[Any], None]:
    """The change that sets fields of a name in a section. Raises UsageError."""
    from policy.edit import existing, pairs, set_value

    words = pairs(settings)

    def change(document: Any) -> None:
        one = existing(document, name, section)
        for key, value in words:
            set_value(one, key, value)

    return change


def removing(section: str, name: str) -> Callable[[Any], None]:
    """The change that takes a name out of a section."""

    def change(document: Any) -> None:
        from policy.edit import existing

        existing(document, name, section)
        del document[section][name]

    return change


@command.command()
@click.argument("name")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@change_options
def create(name: str, settings: tuple[str, ...], options: ChangeOptions) -> None:
    """Put a new tenant into the policy file, and apply.

    KEY is a field of a tenant in the file, e.g. limit.gpus=8 'members=[alice, bob]' parent=acme.
    """
    change_file(options, creating("tenants", name, settings), action="tenant create")


@command.command("set")
@click.argument("name", shell_complete=complete_tenant)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@change_options
def set_(name: str, settings: tuple[str, ...], options: ChangeOptions) -> None:
    """Change fields of a tenant in the policy file, and apply. KEY= takes one out."""
    change_file(options, setting("tenants", name, settings), action="tenant set")


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@change_options
def remove(name: str, options: ChangeOptions) -> None:
    """Take a tenant out of the policy file, and apply. One with jobs needs --force: it is drained first."""
    change_file(options, removing("tenants", name), action="tenant remove")


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@click.option("--add", "added", multiple=True, metavar="USER[,USER]", help="New members.")
@click.option("--remove", "removed", multiple=True, metavar="USER[,USER]", help="Members who go.")
@change_options
def members(name: str, added: tuple[str, ...], removed: tuple[str, ...], options: ChangeOptions) -> None:
    """The members of a tenant; with --add or --remove, change them in the policy file, and apply."""
    from policy.edit import existing
    from sluice.base.errors import UsageError

    new = [user for word in added for user in word.split(",")]
    old = [user for word in removed for user in word.split(",")]
    if not new and not old:
        click.echo("\n".join(visible_tenant(options.cluster.site(), name).members))
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

    change_file(options, change, action="tenant members")
