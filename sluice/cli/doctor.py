"""`sluice doctor`: a read-only look at an existing Slurm site."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluice.base.text import one_line
from sluice.cli.slurm_options import find_slurm_conf
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from gres_probe.doctor import Answer, Check

DEFAULT_COLUMNS = ("check", "verdict", "what", "remedy")
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "cyan"}


@click.command("doctor")
@click.option("--slurm-conf", type=click.Path(path_type=Path), metavar="PATH", help="slurm.conf or its folder.")
@click.option("--slurm-prefix", type=click.Path(path_type=Path), metavar="DIR", help="Slurm's own folder.")
@click.option("--inventory-dir", type=click.Path(path_type=Path), metavar="DIR", help="Check GRES against inventories.")
@click.option("--only", multiple=True, metavar="CHECK", help="Only this check; may be repeated.")
@click.option("--list", "list_checks", is_flag=True, help="Name the checks and exit.")
@click.option("--json", "as_json", is_flag=True, help="The checklist as JSON.")
@table_options
@click.pass_context
def command(
    context: click.Context,
    slurm_conf: Path | None,
    slurm_prefix: Path | None,
    inventory_dir: Path | None,
    only: tuple[str, ...],
    list_checks: bool,
    as_json: bool,
    table: TableOptions,
) -> None:
    """A read-only look at an existing Slurm site: a checklist with verdicts and remedies, within a minute.

    Exit 0 when nothing failed, 1 when something did, 2 when it could not look. It changes nothing.
    """
    from gres_probe.doctor import CHECKS, SiteView, Verdict, examine

    if list_checks:
        for check in CHECKS.values():
            click.echo(f"{check.name:<18}  {check.title}")
        return
    site = find_slurm_conf(slurm_conf)
    assert site is not None  # noqa: S101 - it is required
    view = SiteView(site, prefix=slurm_prefix, inventory_dir=inventory_dir)

    def progress(check: Check) -> None:
        if sys.stderr.isatty() and not as_json:
            click.echo(f"\r\x1b[K{check.title} ...", err=True, nl=False)

    answers = examine(view, only, progress=progress)
    if sys.stderr.isatty() and not as_json:
        click.echo("\r\x1b[K", err=True, nl=False)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "answers": [_document(answer) for answer in answers]}, indent=2))
    elif table.asked:
        columns: list[Column[Answer]] = [
            Column("check", lambda a: a.check.name),
            Column("title", lambda a: a.check.title),
            Column("verdict", lambda a: a.outcome.verdict.value),
            Column("what", lambda a: a.outcome.what),
            Column("remedy", lambda a: a.outcome.remedy),
        ]
        table.print(columns, answers, default=DEFAULT_COLUMNS)
    else:
        _print(answers)
    if any(answer.outcome.verdict is Verdict.FAIL for answer in answers):
        context.exit(1)


def _document(answer: Answer) -> dict[str, str]:
    return {
        "check": answer.check.name,
        "title": answer.check.title,
        "verdict": answer.outcome.verdict.value,
        "what": answer.outcome.what,
        "remedy": answer.outcome.remedy,
    }


def _print(answers: list[Answer]) -> None:
    title = ""
    for answer in answers:
        if answer.check.title != title:
            title = answer.check.title
            click.echo(title)
        verdict = click.style(f"{answer.outcome.verdict.value:<4}", fg=_COLOURS[answer.outcome.verdict.value])
        click.echo(f"  {verdict}  {one_line(answer.outcome.what, limit=None)}")
        if answer.outcome.remedy:
            click.echo(f"        {one_line(answer.outcome.remedy, limit=None)}")
    counts = {verdict: sum(a.outcome.verdict.value == verdict for a in answers) for verdict in _COLOURS}
    click.echo(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
