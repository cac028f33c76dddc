"""`sluice quota`: what tenants may use, and use."""

from __future__ import annotations

import json
from typing import Any

import click

from sluice.cli.site_options import ChangeOptions, ClusterOptions, change_options, cluster_options, complete_tenant
from sluice.cli.tables import Column, TableOptions, table_options
from sluice.cli.tenant import change_file, visible_tenant

_PARTS = ("guarantee", "limit", "budget", "per_job", "max_jobs", "max_queued", "max_time", "max_gpus_per_user",
          "gpu_memory_per_gpu", "submissions_per_minute", "borrow", "lend")  # fmt: skip


@click.group("quota")
def command() -> None:
    """What tenants may use, and use."""


@command.command()
@click.argument("name", shell_complete=complete_tenant)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@table_options
@cluster_options
def show(
    name: str,
    as_json: bool,
    table: TableOptions,
    cluster: ClusterOptions,
) -> None:
    """The limits of a tenant, what is used of each, and what is left."""
    from policy.quota_use import quota_rows

    rows = quota_rows(visible_tenant(cluster.site(), name))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "tenant": name, "quota": rows}, indent=2))
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("what", lambda row: row["what"]),
        Column("guaranteed", lambda row: row["guaranteed"], right=True),
        Column("limit", lambda row: row["limit"], right=True),
        Column("used", lambda row: row["used"], right=True),
        Column("left", lambda row: row["left"], right=True),
    ]
    default = ("what", "guaranteed", "limit", "used", "left")
    table.print(columns, rows, default=default)


@command.command("set")
@click.argument("name", shell_complete=complete_tenant)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@change_options
def set_(name: str, settings: tuple[str, ...], options: ChangeOptions) -> None:
    """Change what a tenant may use, in the policy file, and apply: e.g. limit.gpus=16 guarantee.gpus=8 borrow=true."""
    from policy.edit import existing, pairs, set_value
    from sluice.base.errors import UsageError

    words = pairs(settings)
    for key, _ in words:
        if key.split(".")[0] not in _PARTS:
            raise UsageError(f"{key!r}: no quota", remedy=f"one of {', '.join(_PARTS)}; others: sluice tenant set")

    def change(document: Any) -> None:
        tenant = existing(document, name)
        for key, value in words:
            set_value(tenant, key, value)

    change_file(options, change, action="quota set")
