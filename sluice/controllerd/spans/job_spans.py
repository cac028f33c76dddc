"""The spans of one job, from its rows in accounting, its nodes' records, and decisions about it. Pure.

::

    slurm.job                   from the submission to the end of the last attempt; its parent is the submitter's span
      slurm.job.journal         until its submission was durable in the failover journal
      slurm.job.attempt         one for each row of a requeued job
        slurm.job.wait          until the start, or the end of a job that never started
          slurm.job.wait.reason a piece for each reason
          slurm.job.decision    how slurmctld came to the nodes
        slurm.job.run
          slurm.job.checkpoint  the last save of the run that all its nodes made
          slurm.step            steps as accounting has them, batch and extern among them
          slurm.node            what the node agent recorded on a node, with what it did as events
          slurm.node.prolog         from Slurm's start until the job had its GPUs there
          slurm.node.epilog         from Slurm's end until the agent had them back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.base.events import Event
from sluice.controllerd.spans.identity import Context, job_span_id, own_trace, span_id, submitted_in
from sluice.controllerd.spans.span import Span, SpanEvent, Value
from sluice.controllerd.spans.waits import StartDecision
from sluice.exchange.job_runs import Began, nearest, runs_of
from sluice.exchange.record import JobRecord
from sluice.exchange.saves import JobSaves
from sluice.slurm.allocations import Allocation

GOING = frozenset({"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "COMPLETING", "CONFIGURING", "STOPPED"})
"""States of a job that has not ended; accounting calls an attempt that was requeued REQUEUED."""
_GOOD = frozenset({"COMPLETED", "REQUEUED", "PREEMPTED", "RESIZING"})
_SAME_JOB_S = 300.0  # a requeued job is submitted again by slurmctld within this time after its end
_SLOW_START_S = 2.0  # accounting's start is a whole second; further away the decision did not start the attempt
MOST_LINKS = 32
_MOST_EVENTS = 200
_CLOCKS_S = 1.0  # a node's clock, and accounting's whole seconds
_SAME_SAVE_S = 0.2  # the measured time of a save is rounded

Reasons = Sequence[tuple[float, str]]
"""From when a job waited for which reason, by time."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What PrivateData keeps from others, and the policy does not let out."""

    users: bool = False
    accounts: bool = False
    nodes: bool = False


@dataclass(frozen=True, slots=True)
class JobLife:
    """All that is known of one job. `rows`: its attempts, by submission; `steps`: of all attempts."""

    cluster: str
    rows: Sequence[Allocation]
    steps: Sequence[Allocation] = ()
    records: Sequence[JobRecord] = ()
    reasons: Reasons = ()
    decisions: Sequence[StartDecision] = ()
    happened: Sequence[Event] = ()  # to it, or to the controllers
    journalled: tuple[float, float] | None = None  # its submission: passed to the failover journal, and durable
    saves: JobSaves = field(default_factory=JobSaves)
    waited_for: Sequence[Allocation] = ()  # the jobs on which it depended
    gang: Sequence[Allocation] = ()  # the jobs with which it was to start together
    hidden: Hidden = field(default_factory=Hidden)

    @property
    def context(self) -> Context:
        """The trace that it belongs to."""
        return context_of(self.cluster, self.rows[0])


def base_of(row: Allocation) -> int:
    """The number of the array or heterogeneous job that a job is part of, or its own."""
    digits = row.label.split(".", 1)[0].replace("+", "_").split("_", 1)[0]
    return int(digits) if digits.isdecimal() else row.id


def task_of(row: Allocation) -> tuple[int, int | None]:
    """The number of a job's array and of its task, or its own number and None."""
    task = row.label.partition("_")[2]
    return (base_of(row), int(task)) if task.isdecimal() else (row.id, None)


def context_of(cluster: str, row: Allocation) -> Context:
    """The trace of a job, by its first row in accounting."""
    return submitted_in(row.admin_comment) or own_trace(cluster, base_of(row), row.submit or 0)


def lives(rows: Iterable[Allocation]) -> list[list[Allocation]]:
    """The rows of one job number by job: a number that is used again is another job."""
    found: list[list[Allocation]] = []
    for row in sorted(rows, key=lambda one: one.submit or 0):
        if found and _is_same_job(found[-1][-1], row):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _is_same_job(before: Allocation, row: Allocation) -> bool:
    again_s = abs((row.submit or 0) - (before.end or before.submit or 0))
    return again_s <= _SAME_JOB_S and submitted_in(before.admin_comment) == submitted_in(row.admin_comment)


def spans_of(life: JobLife) -> list[Span]:
    """The spans of a job that has ended; none of a job that its submitter's trace leaves out."""
    return list(_Spans(life).all()) if life.context.sampled else []


class _Spans:
    def __init__(self, life: JobLife) -> None:
        self.life = life
        self.context = life.context
        self.job = life.rows[0].id
        self.root = job_span_id(life.cluster, self.context.trace, self.job)
        self.runs = [(Began.of(run), run) for run in runs_of(life.records)]

    def all(self) -> Iterator[Span]:
        first, last = self.life.rows[0], self.life.rows[-1]
        start, end = float(first.submit or 0), _end_of(last)
        links = [
            (one.trace, job_span_id(self.life.cluster, one.trace, row.id))
            for row in (*self.life.waited_for[:MOST_LINKS], *self.life.gang[:MOST_LINKS])
            for one in (context_of(self.life.cluster, row),)
        ]
        yield Span(
            "slurm.job",
            self.context.trace,
            self.root,
            self.context.parent,
            start,
            end,
            self._of_job(last),
            [self._event(event) for event in self.life.happened if start <= event.time <= end][:_MOST_EVENTS],
            links,
            _failure(last),
            remote_parent=bool(self.context.parent),
            cluster=self.life.cluster,
        )
        if self.life.journalled is not None:
            passed, durable = self.life.journalled
            yield self._span("slurm.job.journal", "journal", self.root, passed, durable, {})
        for number, row in enumerate(self.life.rows):
            yield from self._attempt(number, row)

    def _span(
        self,
        name: str,
        kind: str,
        parent: str,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        *,
        error: str = "",
        events: Iterable[SpanEvent] = (),
    ) -> Span:
        """A span within the job. `kind`: what tells it from others that start at the same time."""
        return Span(
            name,
            self.context.trace,
            span_id(self.life.cluster, self.context.trace, self.job, kind, start),
            parent,
            start,
            max(start, end),
            {"slurm.job.id": self.job, **attributes},
            list(events),
            error=error,
            cluster=self.life.cluster,
        )

    def _of_job(self, row: Allocation) -> dict[str, Value]:
        found: dict[str, Value] = {
            "slurm.job.id": self.job,
            "slurm.job.state": row.state,
            "slurm.job.attempts": len(self.life.rows),
            "slurm.job.nodes": row.node_count,
            "slurm.partition": row.partition,
            "slurm.job.tres": row.allocated or row.requested,
        }
        if not self.life.hidden.accounts:
            found |= {"slurm.account": row.account, "slurm.qos": row.qos}
        if not self.life.hidden.users:
            found["user.name"] = row.user
        task = row.label.partition("_")[2]
        if task:
            found |= {"slurm.array.job_id": base_of(row), "slurm.array.task_id": task}
        if self.life.gang:
            found["slurm.gang.job_ids"] = [str(one.id) for one in self.life.gang]
        if self.life.saves.signals:
            found |= {
                "slurm.checkpoint.signals": self.life.saves.signals,
                "slurm.checkpoint.answers": self.life.saves.answers,
            }
        if "+" in row.label:
            found |= {"slurm.het.job_id": base_of(row), "slurm.het.offset": row.label.partition("+")[2]}
        return found

    def _event(self, event: Event) -> SpanEvent:
        """What happened to the job or the controllers; words for people stay here."""
        facts: dict[str, Value] = {}
        if "node" in event.fields and not self.life.hidden.nodes:
            facts["host.name"] = str(event.fields["node"])
        if "outcome" in event.fields:
            facts["slurm.journal.outcome"] = str(event.fields["outcome"])
        return SpanEvent(f"slurm.{event.kind}", event.time, facts)

    def _attempt(self, number: int, row: Allocation) -> Iterator[Span]:
        submit, end = float(row.submit or 0), _end_of(row)
        started = row.start if row.start and row.start <= end and row.state != "PENDING" else None
        facts: dict[str, Value] = {"slurm.job.attempt": number, "slurm.job.state": row.state}
        attempt = self._span("slurm.job.attempt", "attempt", self.root, submit, end, facts, error=_failure(row))
        yield attempt
        yield from self._wait(attempt, row, started)
        if started:
            yield from self._run(attempt, row, float(started), end)

    def _wait(self, attempt: Span, row: Allocation, started: int | None) -> Iterator[Span]:
        until = float(started or _end_of(row))
        wait = self._span("slurm.job.wait", "wait", attempt.id, attempt.start, until, {})
        yield wait
        for start, end, reason in _pieces(attempt.start, until, row.eligible, self.life.reasons):
            facts: dict[str, Value] = {"slurm.wait.reason": reason}
            yield self._span("slurm.job.wait.reason", f"reason {reason}", wait.id, start, end, facts)
        for decision in self.life.decisions if started else ():
            if attempt.start <= decision.time <= attempt.end and abs(decision.time - until) < _SLOW_START_S:
                yield self._decision(wait, decision)

    def _decision(self, wait: Span, decision: StartDecision) -> Span:
        facts: dict[str, Value] = {
            "slurm.decision.outcome": decision.outcome,
            "slurm.decision.planned": decision.planned,
            "slurm.decision.core_us": round(decision.core_s * 1e6),
            "slurm.decision.stock_us": round(decision.stock_s * 1e6),
        }
        start = max(wait.start, decision.time - decision.core_s - decision.stock_s)
        return self._span("slurm.job.decision", "decision", wait.id, start, decision.time, facts)

    def _run(self, attempt: Span, row: Allocation, start: float, end: float) -> Iterator[Span]:
        facts: dict[str, Value] = {"slurm.job.exit_code": row.exit_code}
        run = self._span("slurm.job.run", "run", attempt.id, start, end, facts, error=_failure(row))
        yield run
        for step in self.life.steps:
            if step.start is not None and start <= step.start <= end and step.end is not None:
                name = step.label.partition(".")[2]
                of_step: dict[str, Value] = {
                    "slurm.step.id": name,
                    "slurm.step.state": step.state,
                    "slurm.step.exit_code": step.exit_code,
                }
                yield self._span(
                    "slurm.step", f"step {name}", run.id, step.start, step.end, of_step, error=_failure(step)
                )
        records = nearest(self.runs, start, end) or ()
        yield from self._checkpoint(run, row, records)
        for record in records:
            yield from self._node(run, record)

    def _checkpoint(self, run: Span, row: Allocation, records: Sequence[JobRecord]) -> Iterator[Span]:
        """From the signal, where the save answered one, else from the first node's save, to the last one's."""
        until = run.end + _CLOCKS_S
        times = [one.saved for one in records if one.saved is not None and run.start <= one.saved <= until]
        if not times or len(times) < max(row.node_count, len(records)):
            return
        first, last, saves = min(times), max(times), self.life.saves
        answers = run.start <= saves.signalled <= first and last - saves.signalled <= (saves.save_s or 0) + _SAME_SAVE_S
        start = saves.signalled if answers else first
        yield self._span("slurm.job.checkpoint", "checkpoint", run.id, start, last, {"slurm.checkpoint.asked": answers})

    def _node(self, run: Span, record: JobRecord) -> Iterator[Span]:
        """What happened on a node, by the node's clock; its prolog begins by slurmctld's."""
        ended = record.ended if record.ended is not None else run.end
        facts: dict[str, Value] = {"slurm.node.gpus": len(record.grants)}
        if not self.life.hidden.nodes:
            facts["host.name"] = record.node
        events = [
            SpanEvent(f"slurm.node.{event.action}", event.time, {"slurm.node.times": event.times})
            for event in record.events[:_MOST_EVENTS]
        ]
        if record.saved is not None:
            events.append(SpanEvent("slurm.node.save", record.saved))
        yield self._span("slurm.node", f"node {record.node}", run.id, record.started, ended, facts, events=events)
        granted = next((event.time for event in record.events if event.action == "grant"), None)
        for name, start, end in (("prolog", run.start, granted), ("epilog", run.end, record.ended)):
            if end is not None and start <= end:
                kind = f"{name} {record.node}"
                where = {key: value for key, value in facts.items() if key == "host.name"}
                yield self._span(f"slurm.node.{name}", kind, run.id, start, end, where)


def _end_of(row: Allocation) -> float:
    return float(row.end or row.start or row.submit or 0)


def _failure(row: Allocation) -> str:
    return "" if row.state in _GOOD or row.state in GOING else row.state


def _pieces(start: float, end: float, eligible: int | None, reasons: Reasons) -> Iterator[tuple[float, float, str]]:
    """The parts of a wait, one after the other and without a gap."""
    marks = [(start, "not eligible")] if eligible is not None and eligible > start else [(start, "not decided yet")]
    if eligible is not None and start < eligible < end:
        marks.append((float(eligible), "not decided yet"))
    for time, reason in reasons:
        if marks[-1][0] < time < end and reason != marks[-1][1]:
            marks.append((time, reason))
    for (begin, reason), (until, _) in zip(marks, [*marks[1:], (end, "")], strict=True):
        if until > begin:
            yield begin, until, reason
