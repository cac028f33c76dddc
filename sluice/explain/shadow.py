"""What Sluice would have decided differently: its choices and stock Slurm's, from the decisions of level shadow.

Each decision is evaluated on the real state of the cluster, which stock Slurm made: the report shows how often
the two differ and what a single choice costs, not where the cluster would be after a day of Sluice's choices.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.core.cluster import Cluster
from sluice.core.placement import Part, RequestFlag
from sluice.explain.decisions import (
    Decision,
    DecisionEntry,
    Lost,
    Mode,
    Outcome,
    Replay,
    Start,
    list_files,
    read_entries,
)

SCHEMA_VERSION = 1


@dataclass
class Side:
    """What the choices of one side cost, over the decisions where both are known."""

    idle_nodes_broken: int = 0  # nodes that had no job and got one
    idle_gpus_on_them: int = 0  # what was idle there before
    idle_gpus_opened: int = 0  # wholly idle GPUs that got a share

    def add(self, cluster: Cluster, parts: Sequence[Part]) -> None:
        """Count one placement on the cluster as it is before it."""
        for part in parts:
            view = cluster.node(part.node)
            if view.parts == 0 and part.gpus:
                self.idle_nodes_broken += 1
                self.idle_gpus_on_them += view.gpus_idle.bit_count()
            if part.gpu_memory_mib:
                self.idle_gpus_opened += (part.gpus & view.gpus_idle).bit_count()


@dataclass(frozen=True, slots=True)
class Difference:
    """One job that Sluice would have placed elsewhere."""

    job: int
    time: float
    core: tuple[str, ...]  # nodes
    stock: tuple[str, ...]


@dataclass
class Shadow:
    """The report's figures."""

    first: float = 0
    last: float = 0
    decisions: int = 0  # both asked whether a job can start now
    both: int = 0  # ... and both would start it
    same_nodes: int = 0
    compared_gpus: int = 0  # of same_nodes, where the job really started there with GPUs
    same_gpus: int = 0
    only_core: int = 0
    only_stock: int = 0
    neither: int = 0
    lost: int = 0  # entries that were dropped
    core: Side = field(default_factory=Side)
    stock: Side = field(default_factory=Side)
    earlier_s: list[float] = field(default_factory=list)  # of jobs that Sluice would have started before stock did
    still_waiting: int = 0  # that it would have started, and stock has not yet
    core_us: list[float] = field(default_factory=list)
    stock_us: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As one JSON object."""

        def middle(values: list[float]) -> float | None:
            return round(statistics.median(values), 1) if values else None

        return {
            "schema_version": SCHEMA_VERSION,
            "first": self.first,
            "last": self.last,
            "decisions": self.decisions,
            "both_start": self.both,
            "same_nodes": self.same_nodes,
            "gpus_compared": self.compared_gpus,
            "same_gpus": self.same_gpus,
            "only_sluice_starts": self.only_core,
            "only_stock_starts": self.only_stock,
            "neither_starts": self.neither,
            "sluice": vars(self.core),
            "stock": vars(self.stock),
            "jobs_started_earlier": len(self.earlier_s),
            "earlier_s_median": middle(self.earlier_s),
            "earlier_s_most": round(max(self.earlier_s), 1) if self.earlier_s else None,
            "jobs_still_waiting": self.still_waiting,
            "sluice_us_median": middle(self.core_us),
            "stock_us_median": middle(self.stock_us),
            "decisions_lost": self.lost,
            "records_lost": self.lost,  # its name until 0.1.0
            "differences": [
                {"job": one.job, "at": one.time, "sluice": list(one.core), "stock": list(one.stock)}
                for one in self.differences
            ],
        }


def report(folder: Path, *, since: float = 0, most_differences: int = 100) -> Shadow:
    """Read all entries from `since` (seconds since 1970) on. Raises DecisionError."""
    shadow = Shadow()
    waiting: dict[int, float] = {}  # jobs that the core would have started, since when
    for path in list_files(folder):
        _read_file(shadow, read_entries(path), waiting, since, most_differences)
    shadow.still_waiting = len(waiting)
    return shadow


def _read_file(
    shadow: Shadow, entries: Iterable[DecisionEntry], waiting: dict[int, float], since: float, most_differences: int
) -> None:
    replay = Replay()
    undecided: dict[int, Decision] = {}
    for entry in entries:
        replay.feed(entry)
        body = entry.body
        if entry.time < since:
            continue
        if isinstance(body, Start):
            begun = waiting.pop(body.job.id, None)
            if begun is not None:
                shadow.earlier_s.append(entry.time - begun)
            compared = undecided.pop(body.job.id, None)
            if compared is not None:
                _compare_gpus(shadow, compared, body)
        elif isinstance(body, Decision) and body.outcome == Outcome.SHADOWED and body.mode == Mode.RUN_NOW:
            shadow.first = shadow.first or entry.time
            shadow.last = entry.time
            _compare(shadow, replay, body, entry.time, waiting, most_differences)
            if body.stock_fits and body.placement is not None:
                undecided[body.job.id] = body
        elif isinstance(body, Lost):
            shadow.lost += body.count


def _compare(
    shadow: Shadow, replay: Replay, decision: Decision, time: float, waiting: dict[int, float], most_differences: int
) -> None:
    if not decision.stock_answered:
        return
    shadow.decisions += 1
    if decision.core_ns:
        shadow.core_us.append(decision.core_ns / 1000)
    if decision.stock_ns:
        shadow.stock_us.append(decision.stock_ns / 1000)
    core = decision.placement
    if core is None:
        shadow.only_stock += decision.stock_fits
        shadow.neither += not decision.stock_fits
        return
    if not decision.stock_fits:
        shadow.only_core += 1
        waiting.setdefault(decision.job.id, time)
        return
    shadow.both += 1
    cluster = replay.ready()
    core_nodes = tuple(part.node for part in core.parts)
    if core_nodes == tuple(sorted(decision.stock_nodes)):
        shadow.same_nodes += 1
    elif len(shadow.differences) < most_differences and replay.topology is not None:
        names = replay.topology.node_names
        shadow.differences.append(
            Difference(
                decision.job.id,
                time,
                tuple(names[node] for node in core_nodes),
                tuple(names[node] for node in decision.stock_nodes if node < len(names)),
            )
        )
    shadow.core.add(cluster, core.parts)
    shadow.stock.add(cluster, _stock_parts(cluster, decision))


def _stock_parts(cluster: Cluster, decision: Decision) -> list[Part]:
    """Stock's nodes with as many GPUs as are asked; which ones it took is not known before the job starts: the idle
    ones count only where a share could not go to a GPU that is in use already."""
    request, parts = decision.request, []
    for node in decision.stock_nodes:
        view = cluster.node(node)
        count = 1 if request.flags & RequestFlag.GPUS_TOTAL else request.gpus
        share = request.gpu_memory_mib
        gpus, order = 0, list(range(len(view.gpu_memory_mib)))
        if share:  # those in use first, as far as they have room
            order.sort(key=lambda gpu, idle=view.gpus_idle: idle >> gpu & 1)  # type: ignore[misc]
        for gpu in order:
            if gpus.bit_count() < count and view.gpu_memory_mib_free[gpu] >= (share or view.gpu_memory_mib[gpu]):
                gpus |= 1 << gpu
        parts.append(Part(node, gpus, share))
    return parts


def _compare_gpus(shadow: Shadow, decision: Decision, start: Start) -> None:
    """Which GPUs: where both chose the same nodes."""
    if decision.placement is None:
        return
    chosen = {part.node: part.gpus for part in decision.placement.parts}
    held = {part.node: part.gpus for part in start.parts}
    if chosen.keys() == held.keys() and any(chosen.values()):
        shadow.compared_gpus += 1
        shadow.same_gpus += chosen == held
