"""`sluice serve`: models that run as jobs of tenants; changes go into the policy file first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.site_options import ChangeOptions, ClusterOptions, change_options, cluster_options, policy_path
from sluice.cli.tables import Column, TableOptions, table_options
from sluice.cli.tenant import change_file, creating, removing, setting

if TYPE_CHECKING:
    from policy.service_jobs import ServicesPolicy
    from policy.site import Site
    from sluice.exchange.recent_use import ServiceUse


@click.group("serve")
def command() -> None:
    """Models as a service: list, show, create, scale, pause, remove.

    Users see the services that they may call. Changes are written into the policy file, comments kept, and applied.
    Keys for callers: sluice token create --scope serve.
    """


def complete_service(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names for the shell's completion, from the policy file; none where it cannot be read."""
    from policy.document import load
    from sluice.base.errors import SluiceError

    del parameter
    try:
        services = load(policy_path(context.params.get("path"))).policy.services
    except SluiceError:
        return []
    return [name for name in services if name.startswith(incomplete)]


_socket_option = click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Where replicad answers; default: /run/sluice-serve/socket.",
)


def _documents(site: Site, policy: ServicesPolicy, socket: Path | None) -> tuple[list[dict[str, Any]], str]:
    """The services that the caller may see, and why figures of them are missing. Raises SluiceError."""
    from policy.access import caller
    from policy.service_use import service_documents
    from sluice.base.errors import SluiceError
    from sluice.exchange.serve_status import ask_status
    from sluice.exchange.serving import SOCKET

    if not policy.services:
        return [], ""
    who = caller(site.cluster)
    status, problem = None, ""
    if who.is_admin:
        try:
            status = ask_status(socket or SOCKET)
        except SluiceError as error:
            problem = str(error)
    documents = service_documents(policy, site.cluster.client.jobs(), status, _recent_use(policy))
    if who.is_admin:
        return documents, problem
    mine = _tenants(site) | who.coordinates
    return [
        one for one in documents if "*" in one["callers"] or not mine.isdisjoint([one["tenant"], *one["callers"]])
    ], ""


def _recent_use(policy: ServicesPolicy) -> dict[str, ServiceUse] | None:
    """From the ends of the records; None to who may not read them."""
    from sluice.exchange.recent_use import RecentUse

    try:
        return RecentUse(Path(policy.requests)).look({name: one.first_token_s for name, one in policy.services.items()})
    except OSError:
        return None


def _in_force(site: Site) -> ServicesPolicy:
    """What was applied. Raises SluiceError."""
    from policy.service_jobs import FILE_NAME, ServicesFile

    conf = site.cluster.client.config().get("SLURM_CONF") or "/etc/slurm/slurm.conf"
    file = ServicesFile(Path(conf).parent / FILE_NAME)
    policy = file.current()
    if policy.services or file.problem is None:
        return policy
    raise file.problem


def _tenants(site: Site) -> set[str]:
    from policy.access import user_name
    from policy.quota_use import read_use

    user = user_name()
    return {name for name, one in read_use(site.cluster, only=user).items() if user in one.members}


def _columns() -> list[Column[dict[str, Any]]]:
    def plain(name: str, *, right: bool = True) -> Column[dict[str, Any]]:
        return Column(name, lambda row: row[name], right=right)

    def seconds(name: str, key: str) -> Column[dict[str, Any]]:
        return Column(name, lambda row: row[key], lambda value: f"{value:.1f}s", right=True)

    return [
        *(plain(name, right=False) for name in ("name", "tenant", "user", "engine", "state", "priority")),
        *(plain(name) for name in ("least", "most", "wanted", "ready", "starting", "queued", "draining", "failed")),
        *(plain(name) for name in ("slots", "waiting", "in_flight", "tokens_in_flight")),
        *(plain(name) for name in ("requests_per_minute", "tokens_per_minute")),
        Column("deadline_met", lambda row: row["deadline_met_percent"], lambda value: f"{value:.1f}%", right=True),
        seconds("oldest", "oldest_s"),
        seconds("delay", "delay_s"),
        seconds("eta", "eta_s"),
        *(plain(name, right=False) for name in ("callers", "gres", "partition", "model", "why")),
    ]


DEFAULT_COLUMNS = (
    "name",
    "tenant",
    "engine",
    "state",
    "least",
    "most",
    "ready",
    "starting",
    "queued",
    "waiting",
    "in_flight",
    "delay",
    "why",
)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@_socket_option
@table_options
@cluster_options
def list_(
    as_json: bool,
    socket: Path | None,
    table: TableOptions,
    cluster: ClusterOptions,
) -> None:
    """All services that you may see; root and Slurm's user also see what waits and is worked on."""

    site = cluster.site()
    policy = _in_force(site)
    rows, problem = _documents(site, policy, socket)
    if as_json:
        listed = {"schema_version": 1, "address": policy.address, "services": [_short(row) for row in rows]}
        click.echo(json.dumps(listed, indent=2))
    else:
        table.print(_columns(), rows, default=DEFAULT_COLUMNS)
    _note(problem)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "replicas"}


def _note(problem: str) -> None:
    if problem:
        click.echo(f"sluice: figures are not known: {problem}", err=True)


_REPLICA = ("launch", "job", "state", "job_state", "nodes", "running", "waiting", "why")


@command.command()
@click.argument("name", shell_complete=complete_service)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@_socket_option
@table_options
@cluster_options
def show(
    name: str,
    as_json: bool,
    socket: Path | None,
    table: TableOptions,
    cluster: ClusterOptions,
) -> None:
    """One service and its replicas; with -P or -o the replicas alone."""
    from sluice.base.errors import UsageError

    site = cluster.site()
    rows, problem = _documents(site, _in_force(site), socket)
    found = next((row for row in rows if row["name"] == name), None)
    if found is None:
        known = ", ".join([row["name"] for row in rows][:10]) or "none"
        raise UsageError(f"service {name[:80]!r}: none that you may see", remedy=f"those are: {known}")
    _note(problem)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **found}, indent=2))
        return
    if not table.asked:
        click.echo("\n".join(_lines(found)))
    if found["replicas"] or table.asked:
        table.print(_replica_columns(), found["replicas"], default=_REPLICA)


def _replica_columns() -> list[Column[dict[str, Any]]]:
    return [
        *map(_of_replica, (*_REPLICA, "slow", "slots", "prompt_tokens", "completion_tokens")),
        Column("cache", lambda row: row["cache_used"], lambda value: f"{value:.0%}", right=True),
        Column("heard", lambda row: row["heard"], _moment),
        Column("ends", lambda row: row["ends"], _moment),
    ]


def _of_replica(name: str) -> Column[dict[str, Any]]:
    numbers = ("job", "running", "waiting", "slow", "slots", "prompt_tokens", "completion_tokens")
    return Column(name, lambda row: row[name], right=name in numbers)


def _moment(seconds: float) -> str:
    from sluice.report.output import moment

    return moment(seconds)


_PROMPTS = {False: "not logged", True: "logged: gateways write those of its requests into their log (log_prompts)"}


def _lines(one: dict[str, Any]) -> list[str]:
    from sluice.base.text import one_line

    def said(value: object) -> str:
        return "-" if value is None or value == "" else one_line(str(value), limit=None)

    counts = ", ".join(f"{one[name]} {name}" for name in ("ready", "starting", "queued", "draining", "failed"))
    lines = [
        f"service {one['name']}",
        f"  state      {one['state']}{': ' + said(one['why']) if one['why'] else ''}",
        f"  tenant     {one['tenant']}, jobs of {one['user']}",
        f"  engine     {one['engine']}, model {said(one['model'])}",
        f"  callers    {', '.join(one['callers'])}",
        f"  resources  {said(one['gres'])}, partition {said(one['partition'])}",
        f"  replicas   {one['least']} to {one['most']}, {one['slots']} requests each: {counts}",
        f"  prompts    {_PROMPTS[one['log_prompts']]}",
    ]
    if one["waiting"] is not None:
        lines.append(
            f"  requests   {one['waiting']} wait, the oldest {one['oldest_s']:.1f}s; {one['in_flight']} are worked on, "
            f"{one['tokens_in_flight']} tokens"
        )
    if one["eta_s"] is not None:
        lines.append(f"  ready in   {one['eta_s']:.0f}s")
    return lines


# ---- changes ----


@command.command()
@click.argument("name")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@change_options
def create(name: str, settings: tuple[str, ...], options: ChangeOptions) -> None:
    """Put a new service into the policy file, and apply.

    KEY is a field of a service in the file, e.g. tenant=nlp user=nlp-serve engine=vllm model=/models/deepseek gpus=1
    replicas.most=4 'options=[--max-model-len, 8192]'.
    """
    change_file(options, creating("services", name, settings), action="serve create")


@command.command("set")
@click.argument("name", shell_complete=complete_service)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@change_options
def set_(name: str, settings: tuple[str, ...], options: ChangeOptions) -> None:
    """Change fields of a service in the policy file, and apply. KEY= takes one out.

    What a replica is started with, e.g. options, holds for those that are started from then on.
    """
    change_file(options, setting("services", name, settings), action="serve set")


@command.command()
@click.argument("name", shell_complete=complete_service)
@change_options
def remove(name: str, options: ChangeOptions) -> None:
    """Take a service out of the policy file, and apply. Its replicas finish what they have, and end."""
    change_file(options, removing("services", name), action="serve remove")


@command.command()
@click.argument("name", shell_complete=complete_service)
@click.option("--least", type=click.IntRange(0, 10_000), help="Replicas that run always.")
@click.option("--most", type=click.IntRange(1, 10_000), help="Replicas at once.")
@change_options
def scale(name: str, least: int | None, most: int | None, options: ChangeOptions) -> None:
    """How many replicas a service has, in the policy file, and apply."""
    from sluice.base.errors import UsageError

    if least is None and most is None:
        raise UsageError("nothing to change", remedy="name --least, --most or both")

    change_file(options, _replicas(name, least=least, most=most), action="serve scale")


@command.command()
@click.argument("name", shell_complete=complete_service)
@change_options
def pause(name: str, options: ChangeOptions) -> None:
    """Run no replicas of a service, and refuse its requests, until it is resumed."""
    change_file(options, _replicas(name, paused=True), action="serve pause")


@command.command()
@click.argument("name", shell_complete=complete_service)
@change_options
def resume(name: str, options: ChangeOptions) -> None:
    """Take requests of a paused service again."""
    change_file(options, _replicas(name, paused=False), action="serve resume")


def _replicas(name: str, **words: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        from policy.edit import change_replicas

        change_replicas(document, name, **words)

    return change
