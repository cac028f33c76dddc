"""`sluice power`: budgets of watts, what is drawn, and why a job's GPUs have the caps that they have."""

from __future__ import annotations

import getpass
import json
import time
from typing import Any

import click

from sluice.base.errors import UsageError
from sluice.cli.tables import Column, TableOptions, table_options

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("power")
def command() -> None:
    """Power of GPUs: budgets, what is drawn, and why a job's GPUs have their caps.

    Budgets and caps are in the policy file (docs/power.md).
    """


def _ask(do: str, **request: Any) -> dict[str, Any]:
    from sluice.base.errors import SluiceError
    from sluice.exchange.courier import VERSION, AnswerError, ask, controllers, port

    try:
        return ask(controllers(), port(), json.dumps({"version": VERSION, "do": do, **request}).encode())
    except AnswerError as error:
        raise SluiceError(error.said, remedy="see: sluice power show") from error


def _watts(value: float | None) -> str:
    from policy.power import show_watts

    return "" if value is None else show_watts(value)


def _moment(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def _where(row: dict[str, Any]) -> str:
    return row["nodes"] or "jobs of " + ",".join(row["accounts"])


BUDGETS: list[Column[dict[str, Any]]] = [
    Column("name", lambda row: row["name"]),
    Column("where", _where),
    Column("watts", lambda row: row["watts"], _watts),
    Column("measured", lambda row: row["measured_w"], _watts),
    Column("bound", lambda row: row["bound_w"], _watts),
    Column("policy", lambda row: row["policy_w"], _watts),
    Column("changes", lambda row: row["changes"]),
    Column("lowered_until", lambda row: row["lowered_until"], _moment),
    Column("lowered_by", lambda row: row["lowered_by"] or None),
    Column("capped", lambda row: row["capped_gpus"]),
    Column("silent", lambda row: row["silent_gpus"]),
    Column("short", lambda row: row["short_w"] or None, _watts),
    Column("below", lambda row: row["below_w"] or None, _watts),
    Column("guaranteed", lambda row: row["guaranteed_w"] or None, _watts),
]
_BUDGETS = ("name", "where", "watts", "measured", "bound", "changes", "lowered_until", "capped", "silent", "short")
GPUS: list[Column[dict[str, Any]]] = [
    Column("node", lambda row: row["node"]),
    Column("uuid", lambda row: row["uuid"]),
    Column("power", lambda row: row["power_w"], _watts),
    Column("cap", lambda row: row["cap_w"], _watts),
    Column("why", lambda row: row["why"] or None),
    Column("default", lambda row: row["default_w"], _watts),
    Column("least", lambda row: row["least_w"], _watts),
    Column("most", lambda row: row["most_w"], _watts),
    Column("before", lambda row: row["before_w"], _watts),
    Column("jobs", lambda row: ",".join(map(str, row["jobs"])) or None),
    Column("problem", lambda row: row["problem"] or None),
]
_GPUS = ("node", "uuid", "power", "cap", "why", "least", "default", "most", "jobs", "problem")


@command.command("show")
@click.option("--gpus", is_flag=True, help="Every GPU: draw, cap, and what can be set. For root and SlurmUser.")
@_json_option
@table_options
def show(gpus: bool, as_json: bool, table: TableOptions) -> None:
    """Budgets: what they are now, what is measured, and the most that can be drawn by the caps in force."""
    answer = _ask("power-gpus" if gpus else "power-show")
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **answer}, indent=2))
        return
    rows, columns, default = (answer["gpus"], GPUS, _GPUS) if gpus else (answer["budgets"], BUDGETS, _BUDGETS)
    table.print(columns, rows, default=default)


@command.command("budget")
@click.argument("name")
@click.option("--now", "watts", metavar="WATTS", help="Lower it to this now: 60kW.")
@click.option("--for", "lasts", metavar="TIME", help="For so long: 90m, 2h, 1d.")
@click.option("--end", is_flag=True, help="The policy's budget counts again.")
@_json_option
def budget(name: str, watts: str | None, lasts: str | None, end: bool, as_json: bool) -> None:
    """Lower the budget NAME for a while, as a grid operator asks for, or end that. For root and SlurmUser.

    Caps fall within 5 s in the policy's order; where that is not enough, jobs are requeued, never guaranteed ones.
    """
    from policy.power import parse_watts
    from policy.units import parse_seconds

    request: dict[str, Any] = {"name": name, "by": getpass.getuser()}
    if end:
        if watts or lasts:
            raise UsageError("--end: goes without --now and --for", remedy="leave them out")
        request["end"] = True
    elif not watts or not lasts:
        raise UsageError("--now and --for are both needed", remedy="write e.g. --now 60kW --for 2h")
    else:
        try:
            request |= {"watts": parse_watts(watts), "seconds": parse_seconds(lasts)}
        except ValueError as error:
            raise UsageError(str(error), remedy="see: sluice power budget --help") from error
    answer = _ask("power-budget", **request)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **answer}, indent=2))
    elif end:
        click.echo(f"{name}: the policy's budget counts again")
    else:
        click.echo(f"{name}: {_watts(request['watts'])} until {_moment(answer['until'])}")


@command.command("why")
@click.argument("job", type=click.IntRange(1))
@_json_option
def why(job: int, as_json: bool) -> None:
    """Why the GPUs of the running JOB have their caps: budgets that count it, and when it gives way. Own jobs only."""
    answer = _ask("power-why", job=job)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, **answer}, indent=2))
        return
    way = answer["gives_way"]
    click.echo(f"job {job} of {answer['user']} ({answer['account']}, QOS {answer['qos']}): ", nl=False)
    loses = f"gives way as number {way}, and would lose {answer['would_lose_s']} s of work now"
    click.echo("guaranteed, never stopped" if isinstance(way, str) else loses)
    for gpu in answer["gpus"]:
        cap = f"{_watts(gpu['cap_w'])} of {_watts(gpu['default_w'])}"
        click.echo(
            f"  {gpu['node']} {gpu['uuid']}: draws {_watts(gpu['power_w'])}, cap {cap}{_FROM.get(gpu['why'], '')}"
        )
    for kind, watts in answer["estimates"].items():
        click.echo(f"  jobs of {answer['user']} draw on {kind}: {_watts(watts) or 'not known yet'}")
    for one in answer["budgets"]:
        lowered = f", lowered until {_moment(one['lowered_until'])}" if one["lowered_until"] else ""
        click.echo(f"  budget {one['name']}: {_watts(one['measured_w'])} of {_watts(one['watts'])} drawn{lowered}")


_FROM = {
    "job": " (of the job, by the policy or --gpu-power)",
    "order": " (to keep a budget)",
    "thermal": " (it was too hot)",
}
