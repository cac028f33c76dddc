"""The spans of a job, from what accounting, nodes and decisions say."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.base.events import Event as AnEvent
from sluice.base.events import append
from sluice.controllerd.spans.happened import Happened
from sluice.controllerd.spans.identity import job_span_id
from sluice.controllerd.spans.job_spans import Hidden, JobLife, lives, spans_of, task_of
from sluice.controllerd.spans.span import Span
from sluice.controllerd.spans.waits import StartDecision
from sluice.exchange.record import STAGES, Event, Grant, JobRecord, Stage
from sluice.exchange.saves import SAVES_FILE, JobSaves, Saves
from sluice.slurm.allocations import Allocation

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
JOB = Allocation(
    id=17, label="17", name="", user="alice", account="physics", qos="normal", partition="gpu", state="COMPLETED",
    exit_code="0:0", submit=1000, eligible=1000, start=1100, end=1400, elapsed_s=300, limit_s=600, node_count=1,
    nodes="g-1", requested="cpu=1", allocated="cpu=1,gres/gpu=1", admin_comment="",
)  # fmt: skip
RECORD = JobRecord(
    job=17, uid=1, user="alice", account="physics", partition="gpu", node="g-1", started=1100.5, ended=1401.5,
    grants=[Grant(0, "GPU-1", "nvidia", "h100", 1)],
    events=[Event(1101.25, "grant"), Event(1200.0, "warn", times=3), Event(1401.0, "return")],
)  # fmt: skip


def row(**changes: Any) -> Allocation:
    return replace(JOB, **changes)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def check_whole(spans: list[Span]) -> None:
    """One trace, IDs that differ, parents that are there and hold their children's beginnings."""
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans) and len({span.trace for span in spans}) == 1
    for span in spans:
        assert span.start <= span.end
        if span.name != "slurm.job":
            assert by_id[span.parent].start <= span.start


LAST_LONGER = {"slurm.node", "slurm.node.prolog", "slurm.node.epilog"}


def check_contained(spans: list[Span]) -> None:
    """As the chapter on spans says: but for a node's parts, a second at most is outside of the parent."""
    check_whole(spans)
    by_id = {span.id: span for span in spans}
    for span in spans[1:]:
        assert span.name in LAST_LONGER or span.end <= by_id[span.parent].end + 1.0


def test_a_job_from_its_submission_to_its_end() -> None:
    life = JobLife("main", [JOB], [row(label="17.batch"), row(label="17.0", state="FAILED", start=1200)], [RECORD])
    spans = spans_of(life)
    check_whole(spans)
    job = spans[0]
    assert (job.name, job.start, job.end, job.parent, job.error) == ("slurm.job", 1000, 1400, "", "")
    assert job.attributes["user.name"] == "alice" and job.attributes["slurm.account"] == "physics"
    assert [(span.start, span.end) for span in named(spans, "slurm.job.wait")] == [(1000, 1100)]
    assert [(span.start, span.end) for span in named(spans, "slurm.job.run")] == [(1100, 1400)]
    assert [(s.attributes["slurm.step.id"], s.error) for s in named(spans, "slurm.step")] == [
        ("batch", ""),
        ("0", "FAILED"),
    ]
    (node,) = named(spans, "slurm.node")
    assert node.attributes["host.name"] == "g-1"
    assert [event.name for event in node.events] == ["slurm.node.grant", "slurm.node.warn", "slurm.node.return"]
    assert [(s.start, s.end) for s in named(spans, "slurm.node.prolog")] == [(1100, 1101.25)]
    assert [(s.start, s.end) for s in named(spans, "slurm.node.epilog")] == [(1400, 1401.5)]
    assert spans_of(life) == spans


def test_the_submitters_span_is_the_parent() -> None:
    comment = f"traceparent:00-{TRACE}-{PARENT}-01 sluice:v=1"
    job = spans_of(JobLife("main", [row(admin_comment=comment)]))[0]
    assert (job.trace, job.parent, job.remote_parent) == (TRACE, PARENT, True)
    assert job.id == job_span_id("main", TRACE, 17)
    assert spans_of(JobLife("main", [row(admin_comment=comment.replace("-01", "-00"))])) == []


def test_the_decision_that_started_an_attempt_ends_its_wait() -> None:
    """Others of the same job, e.g. one whose start was revoked, are not its own."""
    made = [StartDecision(when, "used", planned=True, core_s=25e-6, stock_s=75e-6) for when in (1050.0, 1100.4, 1300.0)]
    spans = spans_of(JobLife("main", [JOB], decisions=made))
    check_whole(spans)
    (decision,) = named(spans, "slurm.job.decision")
    assert (decision.start, decision.end) == (pytest.approx(1100.3999), 1100.4)
    assert decision.attributes == {
        "slurm.job.id": 17,
        "slurm.decision.outcome": "used",
        "slurm.decision.planned": True,
        "slurm.decision.core_us": 25,
        "slurm.decision.stock_us": 75,
    }


def test_members_of_a_gang_are_linked() -> None:
    members = [row(id=18, label="18"), row(id=19, label="19")]
    job = spans_of(JobLife("main", [JOB], gang=members))[0]
    assert job.attributes["slurm.gang.job_ids"] == ["18", "19"]
    assert [number for _, number in job.links] == [spans_of(JobLife("main", [one]))[0].id for one in members]


def test_tasks_are_known_by_their_array() -> None:
    assert task_of(JOB) == (17, None)
    assert task_of(row(id=20, label="17_3")) == (17, 3)
    assert task_of(row(id=20, label="17+1")) == (20, None)


def test_reasons_cut_the_wait_into_pieces() -> None:
    reasons = [(900.0, "old"), (1030.0, "no place"), (1040.0, "no place"), (1060.0, "reserved"), (1300.0, "late")]
    spans = spans_of(JobLife("main", [row(eligible=1020)], reasons=reasons))
    check_whole(spans)
    assert [(s.start, s.end, s.attributes["slurm.wait.reason"]) for s in named(spans, "slurm.job.wait.reason")] == [
        (1000, 1020, "not eligible"),
        (1020, 1030, "not decided yet"),
        (1030, 1060, "no place"),
        (1060, 1100, "reserved"),
    ]


def test_a_requeued_job_has_attempts_and_a_used_again_number_is_another_job() -> None:
    rows = [
        row(submit=90_000, eligible=90_000, start=90_010, end=90_020),
        row(state="REQUEUED", end=1150),
        row(submit=1151, eligible=1270, start=1280, end=1400, state="FAILED"),
    ]
    jobs = lives(rows)
    assert [[one.submit for one in job] for job in jobs] == [[1000, 1151], [90_000]]
    spans = spans_of(JobLife("main", jobs[0]))
    check_whole(spans)
    assert (spans[0].start, spans[0].end, spans[0].error) == (1000, 1400, "FAILED")
    assert [(s.start, s.end, s.error) for s in named(spans, "slurm.job.attempt")] == [
        (1000, 1150, ""),
        (1151, 1400, "FAILED"),
    ]
    assert {span.trace for span in spans}.isdisjoint(span.trace for span in spans_of(JobLife("main", jobs[1])))


def test_a_job_that_never_started() -> None:
    made = [StartDecision(1049.5, "used", planned=True, core_s=25e-6, stock_s=75e-6)]  # its start was revoked
    spans = spans_of(JobLife("main", [row(state="CANCELLED", start=None, end=1050, nodes="")], decisions=made))
    check_whole(spans)
    assert {span.name for span in spans} == {
        "slurm.job", "slurm.job.attempt", "slurm.job.wait", "slurm.job.wait.reason",
    }  # fmt: skip
    assert spans[0].end == 1050 and spans[0].error == "CANCELLED"


def test_tasks_of_an_array_and_parts_of_a_heterogeneous_job_are_one_trace() -> None:
    array = [spans_of(JobLife("main", [row(id=17 + task, label=f"17_{task}")]))[0] for task in range(3)]
    assert len({span.trace for span in array}) == 1 and len({span.id for span in array}) == 3
    assert [span.attributes["slurm.array.task_id"] for span in array] == ["0", "1", "2"]
    parts = [spans_of(JobLife("main", [row(id=17 + part, label=f"17+{part}")]))[0] for part in range(2)]
    assert len({span.trace for span in parts}) == 1
    assert parts[1].attributes["slurm.het.offset"] == "1" and parts[1].attributes["slurm.het.job_id"] == 17


SAVED = replace(RECORD, saved=1260.5)


def test_a_save_that_answered_a_signal_begins_with_it() -> None:
    other = replace(SAVED, node="g-2", saved=1263.0)
    life = JobLife("main", [row(node_count=2)], records=[SAVED, other], saves=JobSaves(signalled=1250.0, save_s=13.0))
    spans = spans_of(life)
    check_whole(spans)
    (checkpoint,) = named(spans, "slurm.job.checkpoint")
    assert (checkpoint.start, checkpoint.end, checkpoint.attributes["slurm.checkpoint.asked"]) == (1250, 1263, True)
    assert [(e.name, e.time) for e in named(spans, "slurm.node")[1].events][-1] == ("slurm.node.save", 1263.0)


@pytest.mark.parametrize(
    "saves",
    [
        JobSaves(),
        JobSaves(signalled=1270.0, save_s=3.0),
        JobSaves(signalled=1150.0, save_s=3.0),
        JobSaves(2000.0, 2000.0),
    ],
)
def test_a_save_of_its_own_is_a_moment(saves: JobSaves) -> None:
    (checkpoint,) = named(spans_of(JobLife("main", [JOB], records=[SAVED], saves=saves)), "slurm.job.checkpoint")
    assert (checkpoint.start, checkpoint.end, checkpoint.attributes["slurm.checkpoint.asked"]) == (
        1260.5,
        1260.5,
        False,
    )


@pytest.mark.parametrize("changes", [{"saved": None}, {"saved": 1090.0}, {"saved": 1500.0}])
def test_what_not_all_nodes_saved_in_the_run_is_no_save_of_the_job(changes: dict[str, Any]) -> None:
    other = replace(SAVED, node="g-2", **changes)
    spans = spans_of(JobLife("main", [row(node_count=2)], records=[SAVED, other]))
    assert not named(spans, "slurm.job.checkpoint")
    assert not named(spans_of(JobLife("main", [row(node_count=2)], records=[SAVED])), "slurm.job.checkpoint")


def test_how_often_it_was_asked_to_save() -> None:
    job = spans_of(JobLife("main", [JOB], saves=JobSaves(signals=3, answers=2)))[0]
    assert (job.attributes["slurm.checkpoint.signals"], job.attributes["slurm.checkpoint.answers"]) == (3, 2)
    assert "slurm.checkpoint.signals" not in spans_of(JobLife("main", [JOB]))[0].attributes


def test_what_happened_to_a_job_alone_and_to_all(tmp_path: Path) -> None:
    """A requeue for a node's failure, and a replay of the failover journal by the next controller."""
    file = tmp_path / "events"
    append(file, "takeover", leader="ctl2")
    append(file, "health.requeue", node="g-1", job=17, reason="secret")
    append(file, "health.requeue", node="g-1", job=18, reason="secret")
    append(file, "drill", job="17")
    Saves({17: JobSaves(signals=1)}).write(tmp_path / SAVES_FILE)
    replays = tmp_path / "sluice.journal/replays.jsonl"
    replays.parent.mkdir()
    replays.with_name("replays.jsonl.1").write_text('{"at": 1200, "restored": [16, 17], "unsettled": []}\n')
    damaged = 'torn {\n[]\n{"at": 1, "ended": [Infinity]}\n'
    replays.write_text(damaged + '{"at": 1300, "unsettled": [{"job": 17, "why": "damaged"}, {"why": 1}]}\n')
    found = Happened(tmp_path, file)
    assert [event.kind for event in found.to_job(19)] == ["takeover"]
    assert (found.saves_of(17).signals, found.saves_of(19).signals) == (1, 0)
    happened = [replace(one, time=1100.0) if one.time > 2000 else one for one in found.to_job(17)]
    job = spans_of(JobLife("main", [JOB], happened=happened))[0]
    assert [(event.name, event.attributes) for event in job.events] == [
        ("slurm.journal.replay", {"slurm.journal.outcome": "restored"}),
        ("slurm.journal.replay", {"slurm.journal.outcome": "unsettled"}),
        ("slurm.takeover", {}),
        ("slurm.health.requeue", {"host.name": "g-1"}),
    ]
    hidden = spans_of(JobLife("main", [JOB], happened=happened, hidden=Hidden(nodes=True)))[0]
    assert [event.attributes for event in hidden.events][-1] == {}


def test_when_a_submission_was_durable(tmp_path: Path) -> None:
    """By its own number or its array's; a number was another job's a day before, and a line was cut."""
    folder = tmp_path / "sluice.journal"
    folder.mkdir()
    (folder / "acknowledged.1").write_text("17 900000000 900000100\n18 1000000000 1000000100\n")
    (folder / "acknowledged").write_text("17 1000250000 1000260000\nx\n17 1000900000 1000\n19 10003")
    found = Happened(tmp_path, tmp_path / "none")
    assert found.journalled({17}, 1000.0) == (1000.25, 1000.26) and found.journalled({20, 18}, 1000.0) == (
        1000.0,
        1000.0001,
    )
    assert found.journalled({19}, 1000.0) is None and found.journalled({17}, 1001.0) is None
    spans = spans_of(JobLife("main", [JOB], journalled=found.journalled({17}, 1000.0)))
    check_whole(spans)
    (span,) = named(spans, "slurm.job.journal")
    assert (span.start, span.end, span.parent) == (1000.25, 1000.26, spans[0].id)
    assert spans_of(JobLife("main", [JOB], journalled=(1000.25, 1000.26)))[1].id == span.id


def test_a_damaged_file_of_saves_costs_checkpoints_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SAVES_FILE).write_text("{")
    found = Happened(tmp_path, tmp_path / "none")
    assert found.saves_of(17) == JobSaves() and found.to_job(17) == []
    assert SAVES_FILE in caplog.text


def test_links_takeovers_and_what_is_hidden() -> None:
    other = row(id=16, label="16", admin_comment=f"traceparent:00-{TRACE}-{PARENT}-01")
    happened = [AnEvent(1, 1200.0, "takeover", {}), AnEvent(2, 5000.0, "takeover", {})]
    life = JobLife("main", [JOB], records=[RECORD], happened=happened, waited_for=[other])
    job = spans_of(life)[0]
    assert job.links == [(TRACE, job_span_id("main", TRACE, 16))]
    assert [(event.name, event.time) for event in job.events] == [("slurm.takeover", 1200.0)]
    hidden = spans_of(replace(life, hidden=Hidden(users=True, accounts=True, nodes=True)))
    text = "".join(span.to_line().decode() for span in hidden)
    assert not any(word in text.replace("slurm.node", "") for word in ("alice", "physics", "g-1", "normal"))
    assert [Span.from_line(span.to_line()) for span in hidden] == hidden


SUBMITTED = f"traceparent:00-{TRACE}-{PARENT}-01 submitted:0000001000250000,150,0000000997750000"


def test_a_submission_is_the_clients_part_and_the_checks() -> None:
    spans = spans_of(JobLife("main", [row(admin_comment=SUBMITTED)]))
    check_contained(spans)
    (submit,), (checks,) = named(spans, "slurm.job.submit"), named(spans, "slurm.job.submit.check")
    assert (spans[0].start, submit.start, round(submit.end, 6)) == (997.75, 997.75, 1000.25015)
    assert (checks.start, checks.end, checks.parent) == (1000.25, submit.end, submit.id)
    assert set(submit.attributes) == set(checks.attributes) == {"slurm.job.id"}
    assert spans_of(JobLife("main", [row(admin_comment=SUBMITTED)])) == spans


@pytest.mark.parametrize(
    "began", ["", ",0000001000260000", ",0000000000000001"], ids=["not said", "ahead of slurmctld", "not believed"]
)
def test_a_clients_time_that_does_not_fit_is_left_out(began: str) -> None:
    comment = SUBMITTED.rpartition(",")[0] + began
    spans = spans_of(JobLife("main", [row(admin_comment=comment)]))
    assert spans[0].start == 1000 and named(spans, "slurm.job.submit")[0].start == 1000.25


def test_a_submission_of_another_time_is_none() -> None:
    """An operator may have copied the comment."""
    spans = spans_of(JobLife("main", [row(admin_comment=SUBMITTED, submit=1011, eligible=1011)]))
    assert not named(spans, "slurm.job.submit") and spans[0].start == 1011


STAGED = replace(
    RECORD, started_uptime=50.0, ran_s=301.0,
    stages=[
        Stage("prolog.drivers", -0.2, 0.1), Stage("prolog.health", -0.1, 0.1), Stage("prolog.grant", 0.0, 0.75),
        Stage("prolog.power", 0.75, 0.25), Stage("prolog.preflight", 1.5, 2.0), Stage("limits", 4.0, 0.1),
        Stage("epilog.reclaim", 299.6, 0.9), Stage("epilog.return", 300.5, 0.5), Stage("of.a.later.version", 1.0, 1.0),
    ],
)  # fmt: skip


def test_a_prolog_and_an_epilog_by_stage() -> None:
    spans = spans_of(JobLife("main", [JOB], records=[STAGED]))
    check_contained(spans)
    by_id = {span.id: span for span in spans}
    found = {
        span.name: (round(span.start, 6), round(span.end, 6), by_id[span.parent].name)
        for span in spans
        if span.name.startswith("slurm.node.")
    }
    assert found == {
        "slurm.node.prolog": (1100, 1104, "slurm.job.run"),  # with the preflight
        "slurm.node.prolog.drivers": (1100.3, 1100.4, "slurm.node.prolog"),
        "slurm.node.prolog.health": (1100.4, 1100.5, "slurm.node.prolog"),
        "slurm.node.prolog.grant": (1100.5, 1101.25, "slurm.node.prolog"),
        "slurm.node.prolog.power": (1101.25, 1101.5, "slurm.node.prolog"),
        "slurm.node.prolog.preflight": (1102, 1104, "slurm.node.prolog"),
        "slurm.node.limits": (1104.5, 1104.6, "slurm.node"),
        "slurm.node.epilog": (1400, 1401.5, "slurm.job.run"),
        "slurm.node.epilog.reclaim": (1400.1, 1401, "slurm.node.epilog"),
        "slurm.node.epilog.return": (1401, 1401.5, "slurm.node.epilog"),
    }
    hidden = spans_of(JobLife("main", [JOB], records=[STAGED], hidden=Hidden(nodes=True)))
    assert len(hidden) == len(spans) and not any("host.name" in span.attributes for span in hidden)
    assert {span.attributes.get("host.name") for span in spans if span.name.startswith("slurm.node")} == {"g-1"}


def shown_by(clock: Callable[[float], float], record: JobRecord = STAGED) -> JobRecord:
    """A record as a node with such a clock writes it: of the true time."""
    events = [replace(event, time=clock(event.time)) for event in record.events]
    ended = None if record.ended is None else clock(record.ended)
    saved = None if record.saved is None else clock(record.saved)
    text = replace(record, started=clock(record.started), ended=ended, saved=saved, events=events).to_json()
    return JobRecord.from_json(text, "a node")


HOUR = 3600.0
CLOCKS: dict[str, Callable[[float], float]] = {
    "hours ahead": lambda now: now + 3 * HOUR,
    "hours behind": lambda now: now - 0.25 * HOUR,
    "set right in the middle": lambda now: now + (3 * HOUR if now < 1250 else 0.0),
    "set back in the middle": lambda now: now - (0.0 if now < 1250 else 0.2 * HOUR),
    "set ahead in the middle": lambda now: now + (0.0 if now < 1250 else 3 * HOUR),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_nodes_clock_that_is_wrong_or_is_set(name: str) -> None:
    """Stages are timed by the monotonic clock, so the spans are the true ones, but for when the job came."""
    true = replace(STAGED, saved=1260.5)
    life = JobLife("main", [JOB], records=[true])
    record = shown_by(CLOCKS[name], true)
    spans, expected = spans_of(replace(life, records=[record])), spans_of(life)
    check_contained(spans)
    assert [span.name for span in spans] == [span.name for span in expected]
    for span, as_it_was in zip(spans, expected, strict=True):
        assert abs(span.start - as_it_was.start) <= 0.6 and abs(span.end - as_it_was.end) <= 0.6
        assert "slurm.clock.cut_s" not in span.attributes
        for event, at in zip(span.events, as_it_was.events, strict=True):
            assert abs(event.time - at.time) <= 0.6
    (node,) = named(spans, "slurm.node")
    off, moved = record.started - true.started, (record.ended or 0) - record.started - 301
    assert node.attributes.get("slurm.clock.ahead_s", 0) == pytest.approx(off, abs=0.6)
    assert node.attributes.get("slurm.clock.set_s", 0) == pytest.approx(moved, abs=0.001)


def test_a_job_that_is_cancelled_while_its_drivers_do_not_answer() -> None:
    """It is on its node after its end; the clock there is right, as its prolog began within the run."""
    record = replace(RECORD, started=1190.0, ended=1191.0, ran_s=1.0, started_uptime=99.0, events=[])
    record.stages = [Stage("prolog.drivers", -89.5, 89.0)]
    spans = spans_of(JobLife("main", [row(end=1130, state="CANCELLED")], records=[record]))
    (drivers,), (prolog,) = named(spans, "slurm.node.prolog.drivers"), named(spans, "slurm.node.prolog")
    assert (drivers.start, drivers.end, prolog.end) == (1100.5, 1189.5, 1189.5)
    assert "slurm.clock.ahead_s" not in named(spans, "slurm.node")[0].attributes


def test_a_record_of_another_job_under_the_same_number() -> None:
    """As after a slurmctld that lost its state: the controller's own clock says that it is another run."""
    record = replace(STAGED, begun=1100)
    assert named(spans_of(JobLife("main", [JOB], records=[record])), "slurm.node")
    later = row(submit=9000, eligible=9000, start=9100, end=9400)
    assert named(spans_of(JobLife("main", [later], records=[record])), "slurm.node") == []


def test_a_record_of_before_stages_and_monotonic_times() -> None:
    """As after a reboot in the middle: its clock alone says how long it was there."""
    before = shown_by(lambda now: now + 3 * HOUR, RECORD)
    spans = spans_of(JobLife("main", [JOB], records=[before]))
    check_contained(spans)
    (node,) = named(spans, "slurm.node")
    assert (node.start, node.end) == (1100, 1401)


def test_slurmctlds_clock_that_is_set_back_while_a_job_runs() -> None:
    """It ends before it began; its node knows how long it was there."""
    step = row(label="17.batch", end=700)
    spans = spans_of(JobLife("main", [row(end=700)], [step], [shown_by(lambda now: now)]))
    check_contained(spans)
    (run,) = named(spans, "slurm.job.run")
    assert (run.start, run.end, spans[0].end) == (1100, 1100, 1100)
    assert named(spans, "slurm.step") and named(spans, "slurm.node")[0].end == 1401.5


def test_a_clock_that_is_set_back_between_two_attempts() -> None:
    """One job by its trace, whatever the times say."""
    comment = f"traceparent:00-{TRACE}-{PARENT}-01"
    rows = [
        row(state="REQUEUED", admin_comment=comment, submit=9000, eligible=9000, start=9010, end=9100),
        row(admin_comment=comment, submit=9000, eligible=9000, start=9000, end=9300),
        row(admin_comment=comment),
    ]
    (job,) = lives(rows)
    spans = spans_of(JobLife("main", job))
    check_contained(spans)
    assert len(named(spans, "slurm.job")) == 1 and len(named(spans, "slurm.job.attempt")) == 3


def test_any_times_make_spans_that_contain_each_other() -> None:
    chance = random.Random(11)

    def when() -> int:
        return chance.choice((1000, 1100, 1400, chance.randrange(0, 3000), chance.randrange(0, 10**6)))

    for _ in range(3000 if os.environ.get("SLUICE_TEST_SCALE") == "full" else 150):
        rows = [
            row(
                submit=when(), eligible=chance.choice((None, when())), start=chance.choice((None, when(), when())),
                end=when(), nodes=chance.choice(("", "g-1")), admin_comment=chance.choice(("", SUBMITTED)),
                state=chance.choice(("COMPLETED", "REQUEUED", "CANCELLED")),
            )
            for _ in range(chance.randrange(1, 4))
        ]  # fmt: skip
        steps = [row(label=f"17.{name}", start=when(), end=when()) for name in ("batch", 0)]
        records = [
            replace(
                STAGED, node=node, started=when() + chance.random(), ended=chance.choice((None, when())),
                ran_s=chance.choice((None, 301.0, float(when()))), saved=chance.choice((None, when())),
                stages=[Stage(name, chance.uniform(-10, 400), chance.uniform(-1, 50)) for name in STAGES],
                begun=chance.choice((None, when())), restarts=chance.choice((None, 0, 1)),
            )
            for node in ("g-1", "g-2")[: chance.randrange(3)]
        ]  # fmt: skip
        made = [StartDecision(when(), "used", planned=True, core_s=chance.random(), stock_s=1.0)]
        life = JobLife(
            "main", rows, steps, records, reasons=sorted((float(when()), f"reason {n}") for n in range(3)),
            decisions=made, journalled=chance.choice((None, (1000.5, 1001.0))),
            saves=JobSaves(signalled=when(), save_s=3.0),
        )  # fmt: skip
        spans = spans_of(life)
        check_contained(spans)
        assert spans == spans_of(life)
