"""`sluice report`: what was used, by whom, and how well."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.slurm_options import where_options

if TYPE_CHECKING:
    from policy.service_jobs import ServicesPolicy
    from sluice.report.build import Report
    from sluice.report.collect import Selection, Source
    from sluice.report.count import Span

_HELP = {
    "tenants": "Accounts: hours, waits, utilisation, waste, quota and budget. With what is below them, as sreport.",
    "users": "Users: hours, waits, utilisation, waste.",
    "gpus": "Types of GPU: how much of what there is was allocated and used; --each: every single GPU.",
    "nodes": "Nodes: the same. A job of several nodes counts in even parts.",
    "efficiency": "How well GPU time, GPU memory and time limits were used, the most wasteful first.",
    "waste": "What was asked for and not used, the most first.",
    "fairness": "Which part of the cluster each tenant got, next to the part that its shares give it.",
    "cost": "What machines of pools cost, by who used them, on whole days; what nobody used is a line of its own.",
}


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_PATH = click.Path(path_type=Path)
_source_options = _options(
    click.option(
        "--records",
        type=_PATH,
        metavar="DIR",
        help="The jobs' records; default: the controllers' own, where this user may read them.",
    ),
    click.option(
        "--rolled",
        type=_PATH,
        metavar="DIR",
        help="Rolled-up days; default: the controllers' own, where this user may read them.",
    ),
    click.option("--fresh", is_flag=True, help="Count everything again, without rolled-up days."),
    where_options,
)
_select_options = _options(
    click.option("-S", "--starttime", metavar="TIME", help="From then on. As sacct: 2026-11-01, 14:30, now-7days, ..."),
    click.option("-E", "--endtime", metavar="TIME", help="Up to then; default: now."),
    click.option("-A", "--accounts", metavar="NAMES", help="Only these accounts, comma-separated."),
    click.option("-u", "--user", "users", metavar="NAMES", help="Only these users."),
    click.option("-p", "--partition", "partitions", metavar="NAMES", help="Only these partitions."),
    click.option(
        "-s",
        "--state",
        "states",
        metavar="STATES",
        help="Only jobs that are in these states now, or ended in them: CD,F,TO or long names.",
    ),
    click.option("--energy", is_flag=True, help="Energy of the GPUs and what it cost, instead of the usual fields."),
    click.option("--gpu-class", "classes", metavar="NAMES", help="Only GPUs of these classes or types."),
)
_output_options = _options(
    click.option(
        "-o", "--format", "fields", metavar="FIELDS", help="Fields, each with %WIDTH if wanted: User%-12,Jobs."
    ),
    click.option("-e", "--helpformat", is_flag=True, help="Name all fields."),
    click.option("-n", "--noheader", is_flag=True, help="No header."),
    click.option("-P", "--parsable2", is_flag=True, help="Plain values separated by '|'."),
    click.option("--csv", "as_csv", is_flag=True, help="CSV for spreadsheets."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object with all fields."),
    click.option(
        "-t",
        "--time-unit",
        type=click.Choice(["seconds", "minutes", "hours", "days"]),
        default="hours",
        show_default=True,
        help="Unit of GPU time and the like.",
    ),
    click.option("--units", type=click.Choice(["M", "G", "T"]), default=None, help="Unit of memory."),
    click.option("--plot", "plot", type=_PATH, metavar="FILE", help="Draw it into FILE.svg or FILE.png instead."),
)


@click.group("report")
def command() -> None:
    """What was used, by whom, and how well: from Slurm's accounting and the jobs' records."""


def _source(options: dict[str, Any]) -> Source:
    """The source that the options name, and what this user may read."""
    from sluice.base.errors import SluiceError, UsageError
    from sluice.exchange.job_records import FOLDER, JobRecords
    from sluice.exchange.running import ask_running
    from sluice.report.collect import cluster_name, open_source
    from sluice.report.rollup import DEFAULT_FOLDER, Rollup

    conf = options.pop("conf")
    source = open_source(conf, options.pop("prefix"), note=_note)
    source.running = lambda jobs: ask_running(jobs, conf=conf)
    records, rolled, fresh = options.pop("records"), options.pop("rolled"), options.pop("fresh")
    for name, path in (("--records", records), ("--rolled", rolled)):
        if path is not None and not path.is_dir():
            raise UsageError(f"{name} {path}: no such folder", remedy=f"name an existing folder, or omit {name}")
    if records is None:
        try:
            records = Path(source.client.config().get("StateSaveLocation", "")) / FOLDER
        except SluiceError:
            _note("slurmctld does not tell where the jobs' records are: what was measured is not known")
    if records is not None and records.is_absolute() and _readable(records):
        source.records = JobRecords(records)
    folder = rolled or DEFAULT_FOLDER
    if not fresh and os.access(folder, os.R_OK | os.X_OK):
        source.rolled = Rollup(folder, cluster_name(source))
    return source


def _readable(folder: Path) -> bool:
    """Also a folder that is not there yet, where this user would see it."""
    parent = os.access(folder.parent, os.R_OK | os.X_OK)
    return os.access(folder, os.R_OK | os.X_OK) or (parent and not folder.exists())


def _note(text: str) -> None:
    from sluice.base.text import one_line

    click.echo(f"sluice: {one_line(text)}", err=True)


def _names(text: str | None) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip()) if text else frozenset()


def _selection(source: Source, options: dict[str, Any]) -> Selection:
    from sluice.report.collect import Selection, parse_states

    states, classes = options.pop("states"), options.pop("classes")
    return Selection(
        _names(options.pop("accounts")),
        _names(options.pop("users")),
        _names(options.pop("partitions")),
        parse_states(states) if states else frozenset(),
        source.fleet.types_of(_names(classes)) if classes else frozenset(),
    )


def _span(source: Source, options: dict[str, Any], default: int) -> Span:
    from sluice.base.errors import UsageError
    from sluice.report.count import Span
    from sluice.slurm.time_words import parse_time

    start, end = options.pop("starttime"), options.pop("endtime")
    span = Span(
        parse_time(start, source.now) if start else default, parse_time(end, source.now) if end else int(source.now)
    )
    if span.end <= span.start:
        raise UsageError("the report's time is empty: it ends before it begins", remedy="look at -S and -E")
    return span


@command.command("jobs")
@click.option("-j", "--jobs", "ids", metavar="IDS", help="Only these jobs: 17,18_3.")
@click.option("-a", "--allusers", is_flag=True, help="All users; default for root, as sacct.")
@click.option("-X", "--allocations", is_flag=True, help="Jobs without their steps: the default.")
@click.option("--steps", is_flag=True, help="Steps too.")
@click.option("-T", "--truncate", is_flag=True, help="Count only the time within -S and -E.")
@_select_options
@_source_options
@_output_options
def jobs(ids: str | None, allusers: bool, allocations: bool, steps: bool, truncate: bool, **options: Any) -> None:
    """Single jobs, running ones included."""
    import getpass

    from sluice.base.errors import UsageError
    from sluice.report.build import job_rows
    from sluice.report.collect import Selection

    if allocations and steps:
        raise UsageError("-X and --steps contradict each other", remedy="choose one")
    if _help_format(options, "jobs"):
        return
    _choose_energy(options, "jobs", ())
    source = _source(options)
    selection = _selection(source, options)
    if os.geteuid() and not allusers and not selection.users and not selection.accounts and not ids:
        selection = Selection(
            selection.accounts,
            frozenset({getpass.getuser()}),
            selection.partitions,
            selection.states,
            selection.gpu_types,
        )
    named = _job_ids(ids)
    midnight = time.localtime(source.now)
    default = int(time.mktime((*midnight[:3], 0, 0, 0, 0, 0, -1)))
    span = _span(source, options, 0 if named else default)
    rows = job_rows(source, span, selection, ids=named, steps=steps, truncate=truncate)
    first = next(rows, None)
    _print("jobs", span, [] if first is None else itertools.chain([first], rows), {}, options)
    if first is None and _for_people(options):
        _nothing(source, selection, "no such jobs, or not yours to see" if named else "")


def _job_ids(text: str | None) -> list[str]:
    import re

    from sluice.base.errors import UsageError

    found = [word.strip() for word in text.split(",")] if text else []
    for word in found:
        if not re.fullmatch(r"\d{1,10}([_+]\d{1,10})?", word, re.ASCII):
            raise UsageError(f"--jobs {word[:40]!r}: not a job's number", remedy="write 17, 17_3 or 17+1")
    return found


def _add_group(kind: str) -> None:
    def run(by: str | None, each: bool = False, **options: Any) -> None:
        from sluice.base.errors import UsageError
        from sluice.report.build import build, each_gpu, parse_groups
        from sluice.report.collect import Selection
        from sluice.report.fields import EACH_GPU
        from sluice.report.rollup import whole_days
        from sluice.report.tenants import month_start, read_tenants

        if _help_format(options, kind):
            return
        names = parse_groups(by) if by else ()
        _choose_energy(options, kind, names)
        conf, prefix = options["conf"], options["prefix"]
        source = _source(options)
        selection = _selection(source, options)
        span = _span(source, options, month_start(source.now))
        if kind == "cost":
            span = whole_days(span, source.now)
        if each and (names or selection.states):
            raise UsageError(f"--each: {'--by' if names else '--state'} has no meaning there", remedy="leave one out")
        if each:
            report = each_gpu(source, span, selection)
        else:
            report = build(
                source,
                kind,
                span,
                selection,
                by=names,
                tenants=lambda: read_tenants(conf, prefix, _note),
                idle=selection == Selection() and source.records is not None,  # who reads them sees all jobs
            )
        if options["fields"] is None and each:
            options["fields"] = EACH_GPU
        elif options["fields"] is None and names:
            options["fields"] = _regrouped(kind, names)
        _print(kind, span, report.rows, report.extra, options)
        _closing(report, options)
        if not report.rows and _for_people(options):
            _nothing(source, selection, "")

    run.__doc__ = _HELP[kind]
    decorated = _output_options(_source_options(_select_options(run)))
    if kind == "gpus":
        help_ = "Every GPU, from the jobs' records; with -A, -u or -p those that these jobs had."
        decorated = click.option("--each", is_flag=True, help=help_)(decorated)
    decorated = click.option(
        "--by",
        metavar="FIELDS",
        help="Lines for each account, user, partition, qos, state, gpu_type or node; several " "with commas.",
    )(decorated)
    command.command(kind)(decorated)


for _kind in _HELP:
    _add_group(_kind)


def _choose_energy(options: dict[str, Any], kind: str, names: Iterable[str]) -> None:
    """Fields for --energy, where no others are asked for. Raises UsageError."""
    from sluice.base.errors import UsageError
    from sluice.report.fields import ENERGY, GROUPED_BY, fields_of

    if not options.pop("energy"):
        return
    if kind in ("cost", "fairness"):
        raise UsageError(f"--energy: not in the report {kind}", remedy="see: sluice report tenants --energy")
    of_key = {one.key: one.name for one in fields_of(kind)}
    heads = ("job_id", "user", "account") if kind == "jobs" else tuple(names) or GROUPED_BY[kind]
    shown = ",".join([*(of_key[name] for name in heads), ENERGY.removeprefix("Jobs,") if kind == "jobs" else ENERGY])
    options["fields"] = options["fields"] or shown


def _regrouped(kind: str, names: Iterable[str]) -> str:
    from sluice.report.fields import DEFAULTS, GROUPED_BY, fields_of
    from sluice.report.services import GROUPS

    of_key = {one.key: one.name for one in fields_of(kind)}
    grouping = {of_key[name] for name in (GROUPS if kind == "services" else GROUPED_BY[kind])}
    rest = [word for word in DEFAULTS[kind].split(",") if word not in grouping]
    return ",".join([*(of_key[name] for name in names), *rest])


def _help_format(options: dict[str, Any], kind: str) -> bool:
    from sluice.cli.report_output import help_format

    if options.pop("helpformat"):
        click.echo("\n".join(help_format(kind)))
        return True
    return False


def _print(kind: str, span: Span, rows: Iterable[Any], extra: dict[str, Any], options: dict[str, Any]) -> None:
    from sluice.base.errors import UsageError
    from sluice.cli import report_output as output
    from sluice.report.fields import DEFAULTS
    from sluice.report.output import Units

    if options["plot"] is not None:
        from sluice.report.plot import plot

        plot(options["plot"], kind, span, list(rows))
        return
    if sum((options["as_json"], options["as_csv"], options["parsable2"])) > 1:
        raise UsageError("--json, --csv and -P are three forms", remedy="choose one")
    if options["as_json"]:
        head = {"start": span.start, "end": span.end, "made": int(time.time()), **extra}
        output.print_json(kind, head, rows)
        return
    columns = output.choose(options["fields"] or DEFAULTS[kind], kind)
    units = Units(options["time_unit"], options["units"] or "")
    show = output.print_csv if options["as_csv"] else output.print_parsable if options["parsable2"] else None
    (show or output.print_aligned)(columns, rows, units, header_line=not options["noheader"])


def _closing(report: Report, options: dict[str, Any]) -> None:
    """Notes to the table, on stderr."""
    from sluice.report.output import moment

    if not _for_people(options):
        return
    click.echo(f"{moment(report.span.start)} to {moment(report.span.end)}", err=True)
    if report.extra.get("jain_index") is not None:
        click.echo(
            f"Jain's index of fairness: {report.extra['jain_index']:.3f} (1: all got what they are entitled to)",
            err=True,
        )


def _for_people(options: dict[str, Any]) -> bool:
    forms = ("as_json", "as_csv", "parsable2", "noheader", "plot")
    return not any(options[name] for name in forms)


def _nothing(source: Source, selection: Selection, why: str) -> None:
    """Say why there may be no line: a name that was mistyped looks like one that used nothing."""
    from sluice.base.errors import SluiceError
    from sluice.slurm.accounting import Accounting

    def accounts() -> Iterable[str]:
        return Accounting(source.commands).accounts()

    def partitions() -> Iterable[str]:
        return [one.name for one in source.client.partitions()]

    for what, names, known in (
        ("account", selection.accounts, accounts),
        ("partition", selection.partitions, partitions),
    ):
        with suppress(SluiceError):
            strange = sorted(names.difference(known())) if names else []
            if strange:
                why = f"{what} {strange[0]!r} is not known, or not yours to see"
    _note(f"nothing to show: {why or 'no such jobs in this time'}")


@command.command("services")
@click.option("--by", metavar="FIELDS", help="Lines for each service, account, user or day; several with commas.")
@click.option("--requests", type=_PATH, metavar="DIR", help="The records of requests; default: the policy's.")
@click.option("-S", "--starttime", metavar="TIME", help="From that day on. As sacct: 2026-11-01, now-7days, ...")
@click.option("-E", "--endtime", metavar="TIME", help="Up to that day, which is included; default: today.")
@click.option("--service", "services", metavar="NAMES", help="Only these services, comma-separated.")
@click.option("-A", "--accounts", metavar="NAMES", help="Only callers of these accounts.")
@click.option("-u", "--user", "users", metavar="NAMES", help="Only these users.")
@where_options
@_output_options
def services(by: str | None, requests: Path | None, **options: Any) -> None:
    """Models as a service: requests, tokens, time to the first token and GPU time, by service and account.

    For those who may read the records: root and the gateways' user; others see theirs in the REST API.
    """
    from sluice.report.rollup import DEFAULT_FOLDER
    from sluice.report.services import KEPT, USUAL, RequestDays, ServiceSelection, parse_groups, services_report

    if _help_format(options, "services"):
        return
    names = parse_groups(by) if by else USUAL
    conf = options["conf"]
    source = _source({**{name: options.pop(name) for name in ("conf", "prefix")}, **_PLAIN_SOURCE})
    policy = _services_of(source, conf)
    folder = requests or Path(policy.requests)
    first, last = _whole_days(source, options)
    selection = ServiceSelection(*(_names(options.pop(name)) for name in ("services", "accounts", "users")))
    _require_records(folder)
    report = services_report(
        source, RequestDays(folder, DEFAULT_FOLDER / KEPT), policy, first, last, selection.takes, names
    )
    if options["fields"] is None and names != USUAL:
        options["fields"] = _regrouped("services", names)
    _print("services", report.span, report.rows, report.extra, options)
    _closing(report, options)
    if not report.rows and _for_people(options):
        _note("nothing to show: no such requests in this time")


_PLAIN_SOURCE: dict[str, Any] = {"records": None, "rolled": None, "fresh": True}


def _services_of(source: Source, conf: Path | None) -> ServicesPolicy:
    """The services that were applied. Raises SluiceError."""
    from policy.service_jobs import FILE_NAME, ServicesFile
    from sluice.base.errors import SluiceError

    try:
        where = source.client.config().get("SLURM_CONF") or conf or "/etc/slurm/slurm.conf"
    except SluiceError:
        where = conf or "/etc/slurm/slurm.conf"
    return ServicesFile(Path(where).parent / FILE_NAME).current()


def _require_records(folder: Path) -> None:
    from sluice.base.errors import SluiceError

    if not os.access(folder, os.R_OK | os.X_OK):
        why = "not this user's to read" if folder.exists() else "not there"
        raise SluiceError(
            f"{folder}: {why}", remedy="run it as root on a host with a gateway, or name the folder with --requests"
        )


def _whole_days(source: Source, options: dict[str, Any]) -> tuple[date, date]:
    from sluice.report.rollup import day_of
    from sluice.report.tenants import month_start

    span = _span(source, options, month_start(source.now))
    return day_of(span.start), day_of(span.end - 1)


@command.command("roll-up")
@click.option("--days", type=click.IntRange(1, 4000), default=62, show_default=True, help="How far back.")
@click.option("--rolled", type=_PATH, metavar="DIR", help="Where to; default: /var/lib/sluice/controllerd/report.")
@click.option("--records", type=_PATH, metavar="DIR", help="The jobs' records; default: the controllers' own.")
@where_options
def roll_up(days: int, rolled: Path | None, records: Path | None, conf: Path | None, prefix: Path | None) -> None:
    """Count days that are over and keep them, so that reports of many jobs are fast. `sluice controllerd` does it too.

    Needs to see all jobs: run it as root or SlurmUser.
    """
    from sluice.base.errors import SluiceError
    from sluice.report import collect, rollup
    from sluice.report.collect import cluster_name

    source = _source({"conf": conf, "prefix": prefix, "records": records, "rolled": None, "fresh": True})
    source.rolled = rollup.Rollup(rolled or rollup.DEFAULT_FOLDER, cluster_name(source))
    try:
        for day, count in collect.roll_up(source, rollup.missing_days(source.rolled, days, source.now)):
            click.echo(f"{day}  {count} jobs", err=True)
    except OSError as error:
        remedy = "run it as root or SlurmUser on a controller, or name a folder with --rolled"
        raise SluiceError(f"{error.filename or source.rolled.folder}: {error.strerror}", remedy=remedy) from error


@command.command("job")
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--decisions",
    type=_PATH,
    metavar="DIR",
    help="Decisions; default: the controllers' own, else the explain service is asked.",
)
@_source_options
def job_(job: str, as_json: bool, decisions: Path | None, **options: Any) -> None:
    """JOB (17, 17_3, 17+1) on one page: asked, granted, used, limits, why it waited, what to ask next time."""
    from sluice.cli.report_job import run

    run(_source(options), job, as_json, decisions)
