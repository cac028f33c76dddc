"""Makes the rows of each report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy.quota_use import TenantUse
from sluice.base.errors import SluiceError, UsageError
from sluice.exchange.job_records import key_of
from sluice.exchange.job_runs import from_to
from sluice.exchange.record import JobRecord
from sluice.report.collect import Selection, Source
from sluice.report.costs import cost_rows, unpriced_words
from sluice.report.count import Span, gpu_type, tally
from sluice.report.fields import GROUPED_BY, Row, entitled_s, wasted_gpu_s
from sluice.report.tally import Key, Tally, group
from sluice.report.tenants import add_fairness, below, capacity, class_name, inclusive, quota

GROUPS = ("account", "user", "partition", "qos", "state", "gpu_type", "node")
"""What --by takes."""
_EVER = Span(0, 1 << 40)


@dataclass
class Report:
    """A finished report."""

    kind: str
    span: Span
    rows: list[Row]
    extra: dict[str, Any] = field(default_factory=dict)  # of the whole, e.g. jain_index


def parse_groups(text: str) -> tuple[str, ...]:
    """``user,gpu_type`` as names. Raises UsageError."""
    names = tuple(word.strip().lower() for word in text.split(","))
    for name in names:
        if name not in GROUPS:
            raise UsageError(f"--by {name[:40]!r}: cannot group by that", remedy=f"use {', '.join(GROUPS)}")
    return names


def job_rows(
    source: Source,
    span: Span,
    selection: Selection,
    *,
    ids: Sequence[str] = (),
    steps: bool = False,
    truncate: bool = False,
) -> Iterator[Row]:
    """One row a job (and step), as it is read: a million of them need no memory."""
    for job, use in source.jobs(span, selection, ids=ids, steps=steps, names=True):
        over = Span(span.start, span.end) if truncate else _EVER
        if job.end is None:
            over = Span(over.start, min(over.end, int(source.now)))
        made = tally(job, over, use, source.fleet) or Tally()
        kind = gpu_type(job, source.fleet)
        names = {
            "account": job.account,
            "user": job.user,
            "partition": job.partition,
            "qos": job.qos,
            "gpu_type": kind,
            "gpu_class": class_name(kind, source.fleet),
        }
        yield Row(made, names, job=job, use=use, fleet=source.fleet, price_kwh=source.price_kwh)


def build(
    source: Source,
    kind: str,
    span: Span,
    selection: Selection,
    *,
    by: Sequence[str] = (),
    tenants: Callable[[], Mapping[str, TenantUse]] = dict,
    idle: bool = False,
) -> Report:
    """A report of sums. `tenants` is called only where quotas or shares belong to it. `idle`: a report of costs has
    lines for what no job used, as all jobs are among those of the source."""
    names = tuple(by) or GROUPED_BY[kind]
    known = tenants() if names == ("account",) else {}
    if kind in ("tenants", "fairness") and selection.accounts:
        selection = Selection(
            below(selection.accounts, known),
            selection.users,
            selection.partitions,
            selection.states,
            selection.gpu_types,
        )
    cells = source.cells(span, selection, by_node="node" in names)
    if kind == "cost":
        pools = source.costs()
        rows = cost_rows(pools, cells, names, span, idle=idle and names == GROUPED_BY[kind])
        used = None if idle else {key.partition for key in cells}
        for words in unpriced_words(pools, span, used):
            source.note(words)
        report = Report(kind, span, rows)
    else:
        report = Report(kind, span, _rows(source, cells, names))
    if names == ("account",):
        _tenants(source, report, cells, known)
    if kind in ("gpus", "nodes") and not by:
        _capacity(source, report)
    _sort(report)
    return report


def _rows(source: Source, cells: Mapping[Key, Tally], names: tuple[str, ...]) -> list[Row]:
    rows = []
    for values, made in group(cells.items(), names).items():
        named = dict(zip(names, values, strict=True))
        if "gpu_type" in named:
            named["gpu_class"] = class_name(named["gpu_type"], source.fleet)
        if "gpu_type" in named and not named["gpu_type"] and not entitled_s(made) and names == ("gpu_type",):
            continue  # jobs without GPUs
        if named.get("node", "-") == "":
            continue  # jobs that never had a node
        rows.append(Row(made, named, price_kwh=source.price_kwh))
    return rows


def _tenants(source: Source, report: Report, cells: Mapping[Key, Tally], known: Mapping[str, TenantUse]) -> None:
    tallies = {name: made for (name,), made in group(cells.items(), ("account",)).items()}
    sums = inclusive(tallies, known)
    report.rows = [Row(made, {"account": name}, price_kwh=source.price_kwh) for name, made in sums.items()]
    try:
        config = source.client.config()
    except SluiceError:
        config = {}
    for row in report.rows:
        tenant = known.get(row.names["account"])
        if tenant is not None:
            row.extra |= quota(tenant, config, source.now)
    index = add_fairness(report.rows, known, tallies)
    if report.kind == "fairness":
        report.extra["jain_index"] = index


def _capacity(source: Source, report: Report) -> None:
    """Also of what nobody used."""
    name = "gpu_type" if report.kind == "gpus" else "node"
    counts = (
        source.fleet.types() if name == "gpu_type" else {node: one.gpus for node, one in source.fleet.nodes.items()}
    )
    present = {row.names[name] for row in report.rows}
    for missing in [one for one in counts if one not in present]:
        report.rows.append(Row(Tally(), {name: missing}))
    until = Span(report.span.start, min(report.span.end, int(source.now)))
    for row in report.rows:
        if name == "gpu_type":
            row.names = {**row.names, "gpu_class": class_name(row.names["gpu_type"], source.fleet)}
        elif (known := source.fleet.of_node(row.names["node"])) is not None:
            kind = known.gpu_type
            row.names = {**row.names, "gpu_type": kind, "gpu_class": class_name(kind, source.fleet)}
        if row.names[name] in counts:
            row.extra |= capacity(counts[row.names[name]], row.tally, until)


def each_gpu(
    source: Source,
    span: Span,
    selection: Selection = Selection(),  # noqa: B008 - frozen
    sees: Callable[[Key], bool] | None = None,
) -> Report:
    """One row a GPU, from the records alone: which device a job had is known from nowhere else. Raises SluiceError.

    Of a selection of jobs, the GPUs that they had; else also those that nobody had. States are not selected by.
    `sees`: whose use its viewer may see, where not everybody's.
    """
    if source.records is None:
        raise SluiceError(
            "single GPUs are known from the jobs' records alone, which cannot be read here",
            remedy="run it as root or SlurmUser on a controller, or name the records with --records",
        )
    rows: dict[tuple[str, int], Row] = {}

    def row_of(node: str, index: int) -> Row:
        if (node, index) not in rows:
            kind = _type_of(source, node)
            names = {"node": node, "gpu": str(index), "gpu_type": kind, "gpu_class": class_name(kind, source.fleet)}
            rows[node, index] = Row(Tally(), names, price_kwh=source.price_kwh)
        return rows[node, index]

    if sees is None and not (selection.accounts or selection.users or selection.partitions):
        for node, one in source.fleet.nodes.items():
            if not selection.gpu_types or one.gpu_type in selection.gpu_types:
                for index in range(one.gpus):
                    row_of(node, index)
    for record in _records(source, span):
        started, finish = from_to(record, source.now)
        begin, end = max(started, span.start), min(finish, span.end)
        key = Key(record.account, record.user, record.partition, "", "", _type_of(source, record.node))
        if end < begin or not selection.takes(key) or not (sees is None or sees(key)):
            continue
        whole = finish - started
        measured = record.usage.get("gpus", {}) if isinstance(record.usage, dict) else {}
        for grant in record.grants:
            into = row_of(record.node, grant.index).tally
            _add_grant(into, grant, measured.get(grant.uuid), end - begin, (end - begin) / whole if whole else 1.0)
    until = Span(span.start, min(span.end, int(source.now)))
    for row in rows.values():
        row.extra |= capacity(1, row.tally, until)
    return Report("gpus", span, [rows[place] for place in sorted(rows)])


def _records(source: Source, span: Span) -> list[JobRecord]:
    """Of the jobs that ended since the span's start, and of those that run."""
    assert source.records is not None  # noqa: S101 - the caller has looked
    ended = {key_of(one): one for one in source.records.between(span.start, source.now + 86_400)}
    return [*ended.values(), *(one for one in source.running_records() if key_of(one) not in ended)]


def _type_of(source: Source, node: str) -> str:
    known = source.fleet.of_node(node)
    return known.gpu_type if known else ""


def _add_grant(into: Tally, grant: Any, measured: Any, seconds: float, part: float) -> None:
    into.ran += 1
    held = seconds * (min(1.0, grant.asked / grant.total) if grant.asked is not None and grant.total else 1.0)
    if grant.asked is None:
        into.gpu_s += held
    else:
        into.shared_gpu_s += held
        into.shard_mib_s += seconds * grant.asked / (1 << 20)
    into.refused += grant.refused
    if isinstance(measured, dict) and isinstance(measured.get("utilisation"), dict):
        time = measured.get("seconds") or 0
        into.measured_gpu_s += held
        into.device_s += time * part
        into.busy_s += time * part * (measured["utilisation"].get("mean") or 0) / 100
        into.idle_s += (measured.get("idle_s") or 0) * part
        into.gpu_energy_j += (measured.get("energy_j") or 0) * part


def _sort(report: Report) -> None:
    def name(row: Row) -> tuple[str, ...]:
        return tuple(row.names.values())

    if report.kind in ("efficiency", "waste"):
        report.rows.sort(key=lambda row: (-(wasted_gpu_s(row.tally) or 0), -entitled_s(row.tally), name(row)))
    elif report.kind == "users":
        report.rows.sort(key=lambda row: (-entitled_s(row.tally), name(row)))
    else:
        report.rows.sort(key=name)
