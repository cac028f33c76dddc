"""The spans of one job, from its rows in accounting, its nodes' records, and decisions about it. Pure.

::

    slurm.job                   from the submission to the end of the last attempt; its parent is the submitter's span
      slurm.job.submit          from when the client had read its options until slurmctld had checked the job
        slurm.job.submit.check  job_submit's checks
      slurm.job.journal         until its submission was durable in the failover journal
      slurm.job.attempt         one for each row of a requeued job
        slurm.job.wait          until the start, or the end of a job that never started
          slurm.job.wait.reason a piece for each reason
          slurm.job.decision    how slurmctld came to the nodes
        slurm.job.run
          slurm.job.checkpoint  the last save of the run that all its nodes made
          slurm.step            steps as accounting has them, batch and extern among them
          slurm.node            what the node agent recorded on a node, with what it did as events
            slurm.node.limits     and other stages while tasks start
          slurm.node.prolog     from Slurm's start until the agent was done with the job's prolog there
            slurm.node.prolog.*   its stages
          slurm.node.epilog     from Slurm's end until the agent had the GPUs back
            slurm.node.epilog.*   its stages

Slurm counts a job as ended when its epilogs begin: `slurm.node` and `slurm.node.epilog` last longer than the run.
So may `slurm.node.prolog`, of a job that is cancelled in it. All others are within their parents, to a second: where
clocks say otherwise they are cut, and say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sluice.base.events import Event
from sluice.controllerd.spans.identity import (
    Context,
    Submission,
    job_span_id,
    own_trace,
    span_id,
    submission_in,
    submitted_in,
)
from sluice.controllerd.spans.node_times import CLOCKS_S, NodeTimes
from sluice.controllerd.spans.span import Span, SpanEvent, Value
from sluice.controllerd.spans.waits import StartDecision
from sluice.exchange.job_runs import Began, nearest, runs_of
from sluice.exchange.record import STAGES, JobRecord
from sluice.exchange.saves import JobSaves
from sluice.slurm.allocations import Allocation

GOING = frozenset({"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "COMPLETING", "CONFIGURING", "STOPPED"})
"""States of a job that has not ended; accounting calls an attempt that was requeued REQUEUED."""
_GOOD = frozenset({"COMPLETED", "REQUEUED", "PREEMPTED", "RESIZING"})
_SAME_JOB_S = 300.0  # a requeued job is submitted again by slurmctld within this time after its end
_SLOW_START_S = 2.0  # accounting's start is a whole second; further away the decision did not start the attempt
MOST_LINKS = 32
_MOST_EVENTS = 200
_SUBMIT_S = 10.0  # between accounting's submission and job_submit's
_CLIENT_S = 600.0  # a client may wait so long for slurmctld; what it says beyond that is not believed
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
    context, again_s = submitted_in(row.admin_comment), abs((row.submit or 0) - (before.end or before.submit or 0))
    return context == submitted_in(before.admin_comment) and (context is not None or again_s <= _SAME_JOB_S)


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
        self.submission = _submission_of(life.rows[0])
        self.ids = {self.root}
        self.ran_once = sum(_started(row) is not None for row in life.rows) == 1

    def all(self) -> Iterator[Span]:
        first, last = self.life.rows[0], self.life.rows[-1]
        submit = float(first.submit or 0)
        start = min(submit, _client_time(self.submission, submit))
        end = max(start, *(_end_of(row) for row in self.life.rows))
        links = [
            (one.trace, job_span_id(self.life.cluster, one.trace, row.id))
            for row in (*self.life.waited_for[:MOST_LINKS], *self.life.gang[:MOST_LINKS])
            for one in (context_of(self.life.cluster, row),)
        ]
        root = Span(
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
        yield root
        if self.submission is not None:
            yield from self._submit(root, self.submission)
        if self.life.journalled is not None:
            passed, durable = self.life.journalled
            yield self._span("slurm.job.journal", "journal", root, passed, durable, {})
        for number, row in enumerate(self.life.rows):
            yield from self._attempt(root, number, row)

    def _span(
        self,
        name: str,
        kind: str,
        parent: Span,
        start: float,
        end: float,
        attributes: Mapping[str, Value],
        *,
        error: str = "",
        events: Iterable[SpanEvent] = (),
        outlasts: bool = False,
    ) -> Span:
        """A span within the job. `kind`: what tells it from others that start at the same time. `outlasts`: it may
        end after its parent."""
        end = max(start, end)
        begun = min(max(start, parent.start), parent.end + CLOCKS_S)
        until = max(begun, end if outlasts else min(end, parent.end + CLOCKS_S))
        cut_s = max(abs(begun - start), abs(until - end))
        facts: dict[str, Value] = {"slurm.job.id": self.job, **attributes}
        if cut_s > CLOCKS_S:
            facts["slurm.clock.cut_s"] = round(cut_s, 3)
        return Span(
            name,
            self.context.trace,
            self._id(kind, start),
            parent.id,
            begun,
            until,
            facts,
            list(events),
            error=error,
            cluster=self.life.cluster,
        )

    def _id(self, kind: str, start: float) -> str:
        """An ID that follows from kind and start; a clock that was set back may show a start twice."""
        words = (kind if again == 0 else f"{kind} again {again}" for again in count())
        ids = (span_id(self.life.cluster, self.context.trace, self.job, one, start) for one in words)
        found = next(one for one in ids if one not in self.ids)
        self.ids.add(found)
        return found

    def _submit(self, root: Span, submission: Submission) -> Iterator[Span]:
        """The client's part by its own clock, where that fits; slurmctld's by its."""
        arrived, checked = submission.arrived, submission.arrived + submission.checks_s
        began = _client_time(submission, arrived)
        submit = self._span("slurm.job.submit", "submit", root, began, checked, {})
        yield submit
        yield self._span("slurm.job.submit.check", "check", submit, arrived, checked, {})

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

    def _attempt(self, root: Span, number: int, row: Allocation) -> Iterator[Span]:
        submit, end = float(row.submit or 0), _end_of(row)
        started = _started(row)
        facts: dict[str, Value] = {"slurm.job.attempt": number, "slurm.job.state": row.state}
        attempt = self._span("slurm.job.attempt", "attempt", root, submit, end, facts, error=_failure(row))
        yield attempt
        yield from self._wait(attempt, row, started)
        if started:
            yield from self._run(attempt, row, float(started), end)

    def _wait(self, attempt: Span, row: Allocation, started: int | None) -> Iterator[Span]:
        until = float(started or _end_of(row))
        wait = self._span("slurm.job.wait", "wait", attempt, attempt.start, until, {})
        yield wait
        for start, end, reason in _pieces(attempt.start, until, row.eligible, self.life.reasons):
            facts: dict[str, Value] = {"slurm.wait.reason": reason}
            yield self._span("slurm.job.wait.reason", f"reason {reason}", wait, start, end, facts)
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
        return self._span("slurm.job.decision", "decision", wait, start, decision.time, facts)

    def _run(self, attempt: Span, row: Allocation, start: float, end: float) -> Iterator[Span]:
        facts: dict[str, Value] = {"slurm.job.exit_code": row.exit_code}
        run = self._span("slurm.job.run", "run", attempt, start, end, facts, error=_failure(row))
        yield run
        for step in self.life.steps:
            if step.start is not None and step.end is not None and (self.ran_once or start <= step.start <= end):
                name = step.label.partition(".")[2]
                of_step: dict[str, Value] = {
                    "slurm.step.id": name,
                    "slurm.step.state": step.state,
                    "slurm.step.exit_code": step.exit_code,
                }
                yield self._span("slurm.step", f"step {name}", run, step.start, step.end, of_step, error=_failure(step))
        records = [(record, NodeTimes.of(record, start, end)) for record in self._records_of(start, end)]
        yield from self._checkpoint(run, row, records)
        for record, times in records:
            yield from self._node(run, record, times)

    def _records_of(self, start: float, end: float) -> Sequence[JobRecord]:
        """The records of the attempt that ran then. The only ones are its own if it was the only one that ran, and
        the clocks of its nodes alone say otherwise."""
        found = nearest(self.runs, start, end)
        if found is None and self.ran_once and len(self.runs) == 1:
            return [] if any(one.begun is not None for one in self.runs[0][1]) else self.runs[0][1]
        return found or ()

    def _checkpoint(self, run: Span, row: Allocation, records: Sequence[tuple[JobRecord, NodeTimes]]) -> Iterator[Span]:
        """From the signal, where the save answered one, else from the first node's save, to the last one's."""
        saved = [times.at(record.saved) for record, times in records if record.saved is not None]
        times = [one for one in saved if run.start <= one <= run.end + CLOCKS_S]
        if not times or len(times) < max(row.node_count, len(records)):
            return
        first, last, saves = min(times), max(times), self.life.saves
        answers = run.start <= saves.signalled <= first and last - saves.signalled <= (saves.save_s or 0) + _SAME_SAVE_S
        start = saves.signalled if answers else first
        yield self._span("slurm.job.checkpoint", "checkpoint", run, start, last, {"slurm.checkpoint.asked": answers})

    def _node(self, run: Span, record: JobRecord, times: NodeTimes) -> Iterator[Span]:
        """What happened on a node, by the node's clock; its prolog begins by slurmctld's."""
        facts: dict[str, Value] = {"slurm.node.gpus": len(record.grants)}
        if not self.life.hidden.nodes:
            facts["host.name"] = record.node
        events = [
            SpanEvent(f"slurm.node.{event.action}", times.within(event.time), {"slurm.node.times": event.times})
            for event in record.events[:_MOST_EVENTS]
        ]
        if record.saved is not None:
            events.append(SpanEvent("slurm.node.save", times.within(record.saved)))
        where = {key: value for key, value in facts.items() if key == "host.name"}
        for name, value in (("ahead_s", times.ahead_s), ("set_s", times.set_s)):
            if value:
                facts[f"slurm.clock.{name}"] = round(value, 3)
        node = self._span(
            "slurm.node", f"node {record.node}", run, times.start, times.end, facts, events=events, outlasts=True
        )
        yield node
        granted = [times.within(event.time) for event in record.events if event.action == "grant"]
        ended = [times.end] if record.ended is not None else []
        for name, begin, ends in (("prolog", run.start, granted[:1]), ("epilog", run.end, ended)):
            stages = _stages(record, times, name)
            start = min([begin, *(stage.start for stage in stages)])
            end = max([*ends, *(stage.end for stage in stages)], default=None)
            if end is not None and start <= end:
                kind = f"{name} {record.node}"
                part = self._span(f"slurm.node.{name}", kind, run, start, end, where, outlasts=True)
                yield part
                yield from self._stages(part, stages, record.node, where)
        yield from self._stages(node, _stages(record, times, ""), record.node, where)

    def _stages(self, parent: Span, stages: Iterable[_Stage], node: str, where: Mapping[str, Value]) -> Iterator[Span]:
        for stage in stages:
            yield self._span(f"slurm.node.{stage.name}", f"{stage.name} {node}", parent, stage.start, stage.end, where)


def _submission_of(row: Allocation) -> Submission | None:
    """What job_submit kept, if it is of this job: an operator may have written the comment."""
    found = submission_in(row.admin_comment)
    return found if found is not None and abs(found.arrived - (row.submit or 0)) <= _SUBMIT_S else None


def _client_time(submission: Submission | None, otherwise: float) -> float:
    """When the client began to submit, where its clock and its user are to be believed."""
    if submission is None or submission.began is None:
        return otherwise
    return submission.began if 0 <= submission.arrived - submission.began <= _CLIENT_S else otherwise


def _started(row: Allocation) -> int | None:
    return row.start if row.start and row.start <= _end_of(row) and row.state != "PENDING" else None


class _Stage(NamedTuple):
    name: str
    start: float
    end: float


def _stages(record: JobRecord, times: NodeTimes, part: str) -> list[_Stage]:
    """What is known of a part of a job's time on a node: "prolog", "epilog", or "" between them."""
    known = [one for one in record.stages if one.name in STAGES]  # not those of a later version
    return [_Stage(one.name, *times.of_stage(one)) for one in known if one.name.rpartition(".")[0] == part]


def _end_of(row: Allocation) -> float:
    """Not before its start, even if slurmctld's clock was set back in between."""
    end = row.end or row.start or row.submit or 0
    return float(max(end, row.start or 0) if row.nodes else end)


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
