"""What the keeper does in simulated time: replicas come, are replaced, go, and survive its own death."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policy.service_jobs import ServicesPolicy
from sluice.base.errors import SluiceError
from sluice.exchange.serving import (
    MOST_CALLERS,
    MOST_REVOKED,
    Callers,
    Demand,
    PeerNote,
    State,
    Weights,
    parse,
    render,
)
from sluice.serve.replicad.journal import Intent, Journal
from sluice.serve.replicad.pattern import Patterns
from tests.unit.serve.replicad_world import STEP, Job, World, make_world, policy_of

Make = Callable[..., World]
__all__ = ["make_world"]


def test_the_first_request_brings_a_replica_at_once(make_world: Make) -> None:
    world = make_world()
    world.run(10)
    assert not world.jobs and world.why() == ""
    world.asks(waiting=1)
    world.run(0.5)
    assert len(world.jobs) == 1
    world.run(4)
    assert len(world.ready()) == 1 and world.why() == "" and world.eta() is None


def test_it_scales_with_the_delay_and_never_above_the_most(make_world: Make) -> None:
    world = make_world(most=3)
    world.asks(waiting=40, in_flight=4, oldest_s=5, delay_s=5)
    world.run(60)
    assert len(world.ready()) == 3 and world.most_living == 3


def test_no_more_than_there_are_slots_to_fill(make_world: Make) -> None:
    world = make_world(most=9)
    world.asks(waiting=2, in_flight=4, oldest_s=30, delay_s=30)
    world.run(120)
    assert len(world.ready()) == 2, "six requests fill two replicas of four slots"


def test_it_goes_to_none_after_the_idle_time_and_not_before(make_world: Make) -> None:
    world = make_world(idle_s=60.0)
    world.asks(in_flight=1)
    world.run(20)
    world.need.clear()
    world.run(58)
    assert len(world.ready()) == 1
    world.run(15)
    assert not world.living()
    world.run(20)
    assert len(world.jobs) == 1, "and it stays so"


def test_a_short_pause_takes_no_replica_away(make_world: Make) -> None:
    world = make_world(idle_s=60.0)
    world.asks(in_flight=8)
    world.run(20)
    first = {job.launch for job in world.living()}
    assert len(first) == 2
    for _ in range(10):
        world.asks(in_flight=1)
        world.run(40)
        world.asks(in_flight=8)
        world.run(5)
    assert {job.launch for job in world.jobs} == first


def test_the_least_runs_always(make_world: Make) -> None:
    world = make_world(least=2)
    world.run(200)
    assert len(world.ready()) == 2 and len(world.jobs) == 2


def test_a_replica_that_has_requests_is_not_ended_while_it_drains(make_world: Make) -> None:
    world = make_world(idle_s=5.0, drain_s=20.0)
    world.asks(in_flight=1)
    world.run(10)
    (job,) = world.jobs
    job.load = 1
    world.need.clear()
    world.run(10)
    assert job.orders == "drain" and job.state == "RUNNING" and not world.ready()
    job.load = 0
    world.run(3)
    assert job.state == "CANCELLED"


def test_and_for_no_longer_than_its_bound(make_world: Make) -> None:
    world = make_world(idle_s=5.0, drain_s=20.0)
    world.asks(in_flight=1)
    world.run(10)
    world.jobs[0].load = 1
    world.need.clear()
    world.run(5 + 20 + 5)
    assert world.jobs[0].state == "CANCELLED"


def test_what_a_quarter_of_an_hour_needs_as_a_rule_is_there_before_it_begins(make_world: Make, tmp_path: Path) -> None:
    world = make_world(ahead=True)
    soon = (world.now + 1800) // 900 * 900
    known = Patterns(tmp_path / "patterns.json")
    for days in (1, 7, 8):  # Sundays and Saturdays, as the day is
        known.record("words", soon - 86_400 * days, 2)
    known.save({"words": None})
    world.begin()
    world.run(soon - world.now - 60)
    assert not world.jobs
    world.run(60)
    assert len(world.ready()) == 2, "nobody has asked"


@pytest.mark.parametrize("count", [1, 3])
def test_walltime_is_handed_over_with_the_successor_first(make_world: Make, count: int) -> None:
    world = make_world(least=count, most=count, walltime_s=300, drain_s=20.0)
    world.run(20)
    world.least_ready, world.most_living = 1000, 0
    world.run(3000)
    assert world.least_ready == count and world.most_living <= count + 1
    assert all(job.state == "CANCELLED" for job in world.jobs if job not in world.living()), "none ran into its limit"
    assert len(world.jobs) <= count * 3000 / (300 - 100) + 2 * count, "nor were they replaced much too early"


def test_two_minutes_of_walltime_are_enough(make_world: Make) -> None:
    world = make_world(least=1, most=1, walltime_s=120, ready_s=30.0, drain_s=20.0)
    world.run(20)
    world.least_ready = 1000
    world.run(1800)
    assert world.least_ready == 1 and not any(job.state == "TIMEOUT" for job in world.jobs)


def _one_ready(make_world: Make, **words: object) -> tuple[World, Job]:
    world = make_world(least=1, most=1, **words)
    world.run(20)
    (job,) = world.ready()
    world.least_ready = 1000
    return world, job


def test_a_drained_node(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    job.load = 1
    world.leave[job.node] = "node n1 is drained: fan"
    world.run(6)
    assert world.least_ready == 1 and job.orders == "drain" and job.state == "RUNNING"
    job.load = 0
    world.run(5)
    assert job.state == "CANCELLED" and len(world.ready()) == 1


def test_a_drained_node_that_is_back_before_its_successor_is_ready(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    world.start_s = 30.0
    world.leave[job.node] = "node n1 is drained"
    world.run(5)
    assert len(world.living()) == 2
    world.leave.clear()
    world.run(5)
    assert world.living() == [job] and job.orders == "go on"


def test_a_successor_that_gateways_have_not_been_given_yet_takes_nobody_away(make_world: Make) -> None:
    """It says that it is ready, and Slurm's answer to where it is takes up to three seconds more."""
    world, job = _one_ready(make_world)
    world.start_s = 0.0
    world.leave[job.node] = "node n1 is drained: fan"

    def every_three_seconds() -> None:
        world.hangs = world.now % 3.0 < 3.0 - STEP

    world.run(12, every_three_seconds)
    assert world.least_ready == 1 and job.state == "CANCELLED"


def test_maintenance_is_a_time_that_ends_sooner(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    world.maintenance[job.node] = world.now + 200
    world.run(60)
    assert world.ready() == [job]
    world.run(130)
    assert world.least_ready == 1 and job.state == "CANCELLED" and world.ready()[0] is not job


@pytest.mark.parametrize("notice", [True, False])
def test_preemption_brings_a_successor_first(make_world: Make, notice: bool) -> None:
    """Also at sites where Slurm signals job steps alone: its end is brought forward."""
    world, job = _one_ready(make_world)
    job.load = 1
    world.preempt(job, 60.0, notice=notice)
    world.run(3)
    assert len(world.living()) == 2 and job in world.ready()
    world.run(5)
    assert world.least_ready == 1 and job not in world.ready() and job.state == "RUNNING"
    job.load = 0
    world.run(5)
    assert job.state == "CANCELLED" and len(world.living()) == 1


def test_preemption_without_room_for_a_successor_drains_before_the_end(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    job.load, world.free = 1, 1
    world.preempt(job, 30.0)
    world.run(18)
    assert job in world.ready(), "nobody else is there"
    world.run(4)
    assert job not in world.ready() and job.state == "RUNNING"
    world.run(10)
    assert job.state == "PREEMPTED"
    (waits,) = world.living()
    assert waits.state == "PENDING" and "failed" not in world.why()


def test_a_replica_that_drains_by_itself_has_a_successor_at_once(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    job.drains, job.load = True, 1
    world.run(2)
    assert len(world.living()) == 2
    world.run(5)
    assert len(world.ready()) == 1 and job.state == "RUNNING"
    job.load = 0
    world.run(5)
    assert job.state == "CANCELLED"


def test_a_requeued_job_is_ended_and_replaced_at_once(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    job.state, job.node, job.submitted = "PENDING", "", world.now + 120  # as Slurm puts it off
    world.run(6)
    assert job.state == "CANCELLED" and len(world.ready()) == 1


def test_a_requeued_job_that_was_seen_completing_first_is_no_replica(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    job.state = "COMPLETING"
    world.run(2)
    job.state, job.node, job.submitted = "PENDING", "", world.now + 120
    world.run(6)
    assert job.state == "CANCELLED" and [one.orders for one in world.ready()] == ["go on"]


def test_who_stages_nothing_costs_no_look_at_all_others(make_world: Make) -> None:
    world = make_world(least=3)
    world.run(20)
    first, second, third = world.ready()
    looks = []

    class Known(dict[str, object]):
        def values(self) -> Any:
            looks.append(1)
            return super().values()

    world.keeper._known = Known(world.keeper._known)  # type: ignore[assignment]
    world.say(first, State.READY)
    world.say(second, State.READY, Weights("m.1", 7, whole=True))
    assert not looks
    orders = world.say(third, State.STARTING, Weights("m.1", 7, whole=False))
    assert len(looks) == 1 and [one.host for one in orders.peers] == [second.node] and not orders.reads


def test_lent_resources_come_and_go_and_come_again(make_world: Make) -> None:
    world = make_world(least=1, most=3, guaranteed=1)
    world.free = 3
    world.asks(in_flight=12)
    world.run(20)
    assert sorted(job.lent for job in world.ready()) == [False, True, True]
    world.begin()  # another keeper knows it from Slurm
    world.run(3)
    world.least_ready = 1000
    for job in [job for job in world.living() if job.lent]:
        job.load = 1
        world.preempt(job, 30.0)
    world.run(4)
    assert [job.lent for job in world.ready()] == [False], "there is another one: they drain at once"
    for job in world.jobs:
        job.load = 0
    world.run(6)
    assert [job.state for job in world.living()] == ["RUNNING", "PENDING", "PENDING"]
    world.free = 3
    world.run(10)
    assert sorted(job.lent for job in world.ready()) == [False, True, True] and world.least_ready == 1
    world.asks(in_flight=1)
    world.run(70)
    assert [job.lent for job in world.living()] == [False]


def test_a_launch_that_is_asked_again_is_lent_as_it_was(make_world: Make) -> None:
    world = make_world(least=0, most=2, guaranteed=0)
    world.unsure = True
    world.asks(waiting=1)
    world.run(0.5)
    world.begin()
    world.jobs.clear()
    world.unsure = False
    world.run(3)
    assert [job.lent for job in world.jobs] == [True]


def test_a_job_that_is_cancelled_is_replaced(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    world.run(60)
    world.over(job, "CANCELLED")
    world.run(8)
    assert len(world.ready()) == 1


def test_a_crash_soon_after_it_was_ready_is_a_failure_and_a_cancelled_job_is_none(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    world.over(job, "CANCELLED")
    world.run(6)
    assert len(world.jobs) == 2 and "failed" not in world.why()
    for _ in range(4):
        world.run(8)
        for one in world.ready():
            world.over(one, "FAILED")
    world.run(8)
    assert len(world.jobs) <= 6 and "its job failed" in world.why()


def test_a_silent_replica_is_not_chosen_and_replaced_and_ended(make_world: Make) -> None:
    world, job = _one_ready(make_world)
    world.run(40)
    job.silent = True
    world.run(4)
    assert world.keeper.snapshot.get("replicas", job.launch)["suspect"]
    world.run(7)
    assert world.keeper.snapshot.get("replicas", job.launch)["state"] == "draining"
    world.run(10)
    assert len(world.ready()) == 1 and job.state == "CANCELLED"


def test_failures_are_tried_less_and_less_and_said(make_world: Make) -> None:
    world = make_world()
    world.fails = "CUDA out of memory"
    world.asks(waiting=1)
    world.run(600)
    assert 5 <= len(world.jobs) <= 9, "5, 10, 20, ... seconds between them, and no more than 300"
    assert "CUDA out of memory" in world.why() and "next try is in" in world.why()
    world.fails = ""
    world.run(320)
    assert len(world.ready()) == 1 and world.why() == ""


def test_what_slurm_refuses_is_said(make_world: Make) -> None:
    world = make_world()
    world.refuses = "Invalid account or account/partition combination specified"
    world.asks(waiting=1)
    world.run(30)
    assert "Invalid account" in world.why() and len(world.asked) == 3


def test_a_replica_that_is_never_ready_is_ended(make_world: Make) -> None:
    world = make_world(ready_s=30.0)
    world.start_s = 1e9
    world.asks(waiting=1)
    world.run(60)
    assert world.jobs[0].state == "CANCELLED" and "not ready within 30 s" in world.why()


def test_why_a_job_waits_and_for_how_long(make_world: Make) -> None:
    world = make_world(idle_s=1.0)
    world.asks(in_flight=1)
    world.run(10)
    world.need.clear()
    world.run(10)
    assert not world.living()
    world.free, world.start_s = 0, 60.0
    world.asks(waiting=1)
    world.run(10)
    assert world.why() == "a replica's job waits in Slurm: not enough is free now (Resources)"
    assert world.eta() is None
    world.free = 1
    world.run(3)
    assert world.why() == "a replica is starting" and world.eta() is not None


# ---- its own death ----


def test_sigkill_at_any_step_loses_none_and_doubles_none(make_world: Make) -> None:
    """The keeper dies after each step in turn, also between the journal and what root's helper says."""
    world = make_world(least=2, most=3)
    world.run(20)
    before = {job.launch for job in world.living()}
    for _ in range(20):
        world.begin()
        world.run(1.25)
    world.run(10)
    assert {job.launch for job in world.living()} == before and len(world.jobs) == 2


def test_killed_between_the_journal_and_the_launch(make_world: Make, tmp_path: Path) -> None:
    world = make_world(least=1)
    Journal(tmp_path / "launches.json").save([Intent("words", "0" * 15 + "1", "alice", world.now)])
    world.begin()
    world.run(10)
    assert [job.launch for job in world.jobs] == ["0" * 15 + "1"], "the same launch is asked for, and no other"


def test_killed_between_the_launch_and_its_answer(make_world: Make, tmp_path: Path) -> None:
    world = make_world(least=1)
    world.unsure = True
    world.run(10)
    assert len(world.jobs) == 1, "it is asked again, and is one job"
    world.unsure = False
    world.begin()
    world.run(10)
    assert len(world.jobs) == 1 and len(world.ready()) == 1


def test_a_launch_that_is_not_wanted_any_more_is_forgotten(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    Journal(tmp_path / "launches.json").save([Intent("words", "0" * 15 + "1", "alice", world.now - 3600)])
    world.begin()
    world.run(30)
    assert not world.jobs and not Journal(tmp_path / "launches.json").load()


def test_a_lost_journal_loses_no_replica(make_world: Make, tmp_path: Path) -> None:
    world = make_world(least=2)
    world.run(20)
    (tmp_path / "launches.json").unlink()
    world.begin()
    world.run(20)
    assert len(world.jobs) == 2 == len(world.ready())
    assert len(Journal(tmp_path / "launches.json").load()) == 2


def test_a_damaged_journal_launches_nothing(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    (tmp_path / "launches.json").write_text("{")
    with pytest.raises(SluiceError, match="damaged"):
        world.begin()


def test_a_full_disk_launches_nothing(make_world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    world.run(5)
    world.asks(waiting=1)

    def full(launches: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(world.keeper._journal, "save", full)
    with pytest.raises(OSError, match="No space"):
        world.run(1)
    assert not world.asked
    monkeypatch.undo()


def test_where_it_does_not_lead_it_asks_for_nothing_and_takes_over_what_is_there(make_world: Make) -> None:
    world = make_world(least=1)
    world.run(20)
    world.leads = False
    world.begin()
    world.asked.clear()
    world.asks(waiting=9, oldest_s=9)
    world.run(60)
    assert not world.asked and len(world.ready()) == 1, "it hears, and its gateways have the replica"
    world.leads = True
    world.run(30)
    assert len(world.jobs) == 3 and len(world.ready()) == 3


def test_nothing_is_done_on_an_old_view_of_slurm(make_world: Make) -> None:
    """After a takeover, a command that hangs keeps the old controller from seeing that it does not lead any more."""
    world = make_world()
    world.run(5)
    world.hangs = True
    world.run(7)
    world.asks(waiting=1)
    world.run(10)
    assert world.asked == []
    world.hangs = False
    world.run(2)
    assert len(world.asked) == 1


def test_of_two_that_say_that_they_lead_the_one_that_asked_last_acts(make_world: Make) -> None:
    world = make_world()
    world.run(5)
    world.hangs = True
    said = world.keeper.note(world.now)
    assert said.leads and said.as_of == world.view().at
    for as_of, acts in ((said.as_of - 1, True), (said.as_of, True), (said.as_of + 1, False)):
        world.keeper.take_note(replace(said, host="ctl2", as_of=as_of), world.now)
        assert world.keeper.leads == acts
    world.asks(waiting=1)
    world.run(3)
    assert world.asked == []
    world.hangs = False
    world.run(2)
    assert len(world.asked) == 1


def test_gateways_get_no_replica_before_slurm_shows_that_its_host_is_its_node(make_world: Make) -> None:
    world = make_world(least=1)
    world.queue_s = 1000.0
    world.run(2)
    (job,) = world.jobs

    def row() -> object:
        return world.keeper.snapshot.get("replicas", job.launch)

    job.node = "elsewhere"
    world.say(job, State.READY)
    job.node, job.silent = "", True
    world.keeper.step(world.now)
    assert world.keeper.unplaced(world.now) and row() is None
    assert not world.keeper.unplaced(world.now + 61), "one that is never placed makes no work for long"
    world.queue_s = 0.0
    world.run(2)
    assert job.state == "RUNNING" and not world.keeper.unplaced(world.now) and row() is None
    job.silent = False
    world.run(2)
    assert world.keeper.snapshot.get("replicas", job.launch)["host"] == job.node


def test_two_keepers_tell_each_other(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    world.run(5)
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", world.policy, leads=False)
    other.run(5)
    other.keeper.host = "ctl2"
    other.asks(waiting=1)
    other.run(0.25)
    assert not other.asked
    world.keeper.take_note(other.keeper.note(world.now), world.now)
    world.run(0.25)
    assert len(world.jobs) == 1, "demand of the other host's gateways counts"
    launch = world.jobs[0].launch
    assert other.keeper.expected(launch) is None
    other.keeper.take_note(replace(world.keeper.note(world.now), host="ctl1"), other.now)
    assert other.keeper.expected(launch) is not None, "its heartbeats are taken before Slurm shows it there"
    world.run(0.5)
    said = world.keeper.note(world.now)
    assert said.leads and [one.service for one in said.outlooks] == ["words"]
    other.keeper.take_note(said, other.now)
    other.run(0.25)
    assert other.why() == said.outlooks[0].why


def test_how_many_requests_callers_have_is_that_of_all_gateways(make_world: Make, tmp_path: Path) -> None:
    world = make_world()
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other", world.policy, leads=False)
    other.keeper.host = "ctl2"
    for gateway, count in (("h1:1", 5), ("h1:2", 2), ("h1:1", 3)):
        world.keeper.count(gateway, Callers({"user/alice": count, f"key/{count}": 1}), world.now)
    other.keeper.count("h2:1", Callers({"user/alice": 1, "user/bob": 4}), other.now)
    world.keeper.take_note(other.keeper.note(other.now), world.now)
    other.keeper.take_note(world.keeper.note(world.now), other.now)
    whole = {"user/bob": 4, "user/alice": 6, "key/2": 1, "key/3": 1}
    for one in (world, other):
        assert one.keeper.status()["callers"] == {"open": whole, "whole": True}
    world.run(4)
    assert world.keeper.status()["callers"] == {"open": {}, "whole": True}, "a gateway that died says nothing"


def test_of_many_callers_the_busiest_are_known_and_that_they_are_not_all(make_world: Make) -> None:
    world = make_world()
    many = {f"user/{number}": number for number in range(1, MOST_CALLERS + 2)}
    world.keeper.count("h1:1", Callers(many), world.now)
    found = world.keeper.status()["callers"]
    assert not found["whole"] and many.keys() - found["open"].keys() == {"user/1"}


# ---- the policy ----


def test_a_service_that_is_gone_from_the_policy_drains_and_ends(make_world: Make) -> None:
    world = make_world(least=1)
    world.run(20)
    (job,) = world.ready()
    job.load = 1
    world.policy = ServicesPolicy()
    world.run(5)
    assert job.orders == "drain" and job.state == "RUNNING"
    job.load = 0
    world.run(5)
    assert job.state == "CANCELLED" and len(world.jobs) == 1


def test_also_where_replicad_was_restarted_in_between(make_world: Make) -> None:
    world = make_world(least=1)
    world.run(20)
    world.policy = ServicesPolicy()
    world.begin()
    world.run(20)
    assert not world.living()


def test_a_paused_service_and_one_with_a_smaller_bound(make_world: Make) -> None:
    world = make_world(least=2)
    world.run(20)
    world.policy = policy_of(most=1, least=0)
    world.asks(in_flight=8)
    world.run(20)
    assert len(world.living()) == 1
    world.policy = policy_of(paused=True)
    world.run(20)
    assert not world.living() and world.why() == "the service is paused"


def test_a_service_with_another_user_gets_new_replicas(make_world: Make) -> None:
    world = make_world(least=1)
    world.run(20)
    (job,) = world.ready()
    world.policy = policy_of(least=1, user="bob")
    world.least_ready = 1000
    world.run(20)
    assert world.least_ready == 1 and job.state == "CANCELLED"
    assert [one.user for one in world.living()] == ["bob"]


def test_a_job_of_another_user_with_such_a_name_is_none_of_its(make_world: Make) -> None:
    world = make_world()
    world.jobs.append(Job(7, "words", "1" * 16, "bob", world.now, state="RUNNING", node="n7", started=world.now))
    world.run(30)
    assert world.keeper.expected("1" * 16) is None and not world.asked
    assert world.jobs[0].state == "RUNNING"


# ---- what is published ----


def test_secrets_are_for_gateways_and_not_in_the_status_or_on_disk(make_world: Make, tmp_path: Path) -> None:
    world = make_world(least=1)
    world.run(20)
    (job,) = world.ready()
    assert world.keeper.snapshot.get("replicas", job.launch)["secret"] == "cd" * 32
    status = world.keeper.status()
    assert status["replicas"][job.launch]["state"] == "ready" and status["services"]["words"]["wanted"] == 1
    assert "cdcd" not in json.dumps(status)
    assert not any("cdcd" in path.read_text() for path in tmp_path.iterdir())


def test_rows_follow_the_policy_and_the_state(make_world: Make) -> None:
    world = make_world(least=1)
    world.run(1)
    world.run(20)
    (job,) = world.ready()
    world.say(job, State.FAILED)
    world.run(0.25)
    assert world.keeper.snapshot.get("replicas", job.launch) is None
    world.policy = ServicesPolicy()
    world.run(1)
    assert world.keeper.snapshot.get("services", "words") is None


def test_a_note_is_one_that_is_taken_and_has_the_keys_that_were_revoked(make_world: Make) -> None:
    world = make_world()
    busy = [Demand(f"service-{number}", "ctl1.cluster:1234567", 3, 1.5, 12, 34567, 0.5) for number in range(1000)]
    world.keeper.demand(busy, world.now)
    world.keeper.revoked.take((f"{number:064x}", 1e10) for number in range(MOST_REVOKED))
    note = parse(PeerNote, render(world.keeper.note(world.now)))
    assert note.revoked is not None and len(note.revoked.keys) == MOST_REVOKED and len(note.demands) > 200
