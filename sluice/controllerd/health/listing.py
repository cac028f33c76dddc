"""The daemon's state for people: `sluice health list` and `why`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sluice.base.errors import SluiceError
from sluice.controllerd.health.keeper import NodeState, State
from sluice.exchange.health_report import Fault, Report

SILENT_S = 300.0
"""A node whose last report is older than this counts as silent."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line about a GPU or a node."""

    node: str
    gpu: str  # its number, or those of its partitions; empty: the node
    state: str  # "out", "drained", "held back", "fault", "warning", "silent"
    severity: str
    check: str
    since: float | None
    reason: str
    uuid: str = ""


def rows_of(state: State, now: float) -> tuple[list[Row], list[str]]:
    """All faults and what is out of service, and the nodes without any."""
    found: list[Row] = []
    healthy = []
    for name in sorted({*state.nodes, *state.reports}):
        before = len(found)
        node = state.nodes.get(name, NodeState())
        if node.drained:
            found.append(Row(name, "", "drained", "", "", node.drained_since, node.drained))
        for uuid, out in node.gpus.items():
            found.append(Row(name, numbers(out.numbers), "out", "", "", out.since, out.reason, uuid))
        if name in state.held_back:
            found.append(Row(name, "", "held back", "", "", state.breaker_since, state.held_back[name]))
        if name in state.reports:
            came, report = state.reports[name]
            found += [_row(name, fault) for fault in report.faults]
            if now - came > SILENT_S:
                found.append(Row(name, "", "silent", "", "", came, "its agent has not reported since then"))
        if len(found) == before and name in state.reports:
            healthy.append(name)
    return found, healthy


def _row(node: str, fault: Fault) -> Row:
    kind = "warning" if fault.action in ("log", "warn") else "fault"
    text = fault.text + does(fault)
    return Row(node, numbers(fault.numbers), kind, fault.severity, fault.check, fault.began, text, fault.uuid)


def does(fault: Fault) -> str:
    """What is done about it, in brackets."""
    if fault.action in ("log", "warn"):
        return ""
    return f" ({fault.action})" if fault.acts else f" (would {fault.action})"


def explain(state: State, node: str, now: float) -> list[str]:
    """Why a node or its GPUs are out of service, and what brings them back. Raises SluiceError for an unknown node."""
    mine = state.nodes.get(node, NodeState())
    came, report = state.reports.get(node, (0.0, None))
    if report is None and not mine.affected:
        raise SluiceError(f"node {node!r}: has not sent a report", remedy="check that its node agent runs")
    lines = []
    if mine.drained:
        lines.append(f"{node} is drained since {when(mine.drained_since)}: {mine.drained}")
        if report is not None:
            lines.append(f"  has passed its checks {report.passes} times; {report.wanted_passes} bring it back")
    for uuid, out in mine.gpus.items():
        lines.append(f"GPU {numbers(out.numbers)} is out since {when(out.since)}: {out.reason}")
        lines.append("  " + _way_back(report, node, uuid))
    if node in state.held_back:
        lines.append(f"the breaker is open, so nothing is taken out here: {state.held_back[node]}")
    for fault in report.faults if report else ():
        where = f"GPU {numbers(fault.numbers)}" if fault.numbers else "node"
        lines.append(f"{fault.severity} since {when(fault.began)}: {where}: {fault.check}: {fault.text}{does(fault)}")
    lines += [f"not the hardware's fault: {words}" for words in (report.blames if report else ())]
    if report is None:
        return [*lines, "its agent has not reported"]
    if not lines:
        lines.append(f"{node}: nothing is wrong")
    return [*lines, f"last report {now - came:.0f} s ago, mode {report.mode}"]


def _way_back(report: Report | None, node: str, uuid: str) -> str:
    gpu = next((one for one in report.gpus if one.uuid == uuid), None) if report else None
    if gpu is None or report is None:
        return "its node does not report it: it returns when it does, or by `sluice health return`"
    if gpu.kept:
        return f"{gpu.kept}: it returns by `sluice health return {node} {gpu.numbers[0]}` only"
    return f"has passed its checks {gpu.passes} times; {report.wanted_passes} bring it back"


def numbers(values: tuple[int, ...] | list[int]) -> str:
    """``0,1``."""
    return ",".join(map(str, values))


def when(seconds: float) -> str:
    """Local time."""
    return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
