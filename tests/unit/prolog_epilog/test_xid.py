from __future__ import annotations

import pytest
from facts_of import gpu, node

from policy.document import parse
from policy.health import XID_BLAME_THE_JOB, compile_health
from prolog_epilog.health.judge import judge
from prolog_epilog.health.memory import Memory

POLICY = compile_health(parse("health: {}").health)


def verdicts(known: Memory, number: int = 0) -> list[tuple[int, str]]:
    return [(one.xid, one.blamed) for one in known.of(f"GPU-{number}").xids]


def checks(known: Memory, now: float, *gpus: object) -> dict[str, str]:
    result = judge(node(now, *gpus), known, POLICY)  # type: ignore[arg-type]
    return {f"{one.check} {one.gpu.gpu.numbers[0]}": one.text for one in result.findings if one.gpu is not None}


def test_a_fatal_event_is_the_gpus_and_names_the_job_that_it_hit() -> None:
    known = Memory()
    result = judge(node(100.0, gpu(_xids=[(99.0, 79)], _jobs=(7,)), gpu(1, _jobs=(7,))), known, POLICY)
    (one,) = result.findings
    assert (one.check, one.severity, one.action, one.text, one.jobs) == ("xid", "fatal", "requeue", "XID 79", (7,))
    assert one.gpu is not None and one.gpu.gpu.uuid == "GPU-0"
    assert not checks(known, 100.0 + 601, gpu(), gpu(1))  # the window is over


@pytest.mark.parametrize("xid", XID_BLAME_THE_JOB)
def test_a_programs_event_alone_is_nothing(xid: int) -> None:
    known = Memory()
    assert not checks(known, 100.0, gpu(_xids=[(99.0, xid)], _jobs=(7,)))
    assert not checks(known, 300.0, gpu())
    assert verdicts(known) == [(xid, "job")]


@pytest.mark.parametrize("xid", [13, 31])
def test_the_same_event_under_another_users_job_is_the_gpus(xid: int) -> None:
    known = Memory()
    assert not checks(known, 100.0, gpu(_xids=[(99.0, xid)], _jobs=(7,)))
    assert not checks(known, 200.0, gpu(_xids=[(199.0, xid)], _jobs=(7,)))  # the same job
    found = checks(known, 4000.0, gpu(_xids=[(3999.0, xid)], _jobs=(18,)))
    assert found == {"xid 0": f"XID {xid} under several users' jobs"}


def test_nobody_has_a_gpu_taken_out_of_service_by_jobs_of_his_own() -> None:
    known = Memory()
    for number in range(8):
        jobs = (10 + number,) if number % 2 else (10 + number, 20 + number)  # others share the GPU now and then
        found = gpu(_xids=[(100.0 * number, 31)], _jobs=jobs)
        assert not checks(known, 100.0 * number + 1, found)


def test_but_not_when_it_comes_a_day_later_or_is_of_another_kind() -> None:
    known = Memory()
    assert not checks(known, 100.0, gpu(_xids=[(99.0, 31)], _jobs=(7,)))
    assert not checks(known, 90000.0, gpu(_xids=[(89999.0, 31)], _jobs=(8,)))
    assert not checks(known, 90100.0, gpu(_xids=[(90099.0, 13)], _jobs=(9,)))
    assert not checks(known, 90200.0, gpu(_xids=[(90199.0, 45)], _jobs=(9,)))
    assert not checks(known, 90300.0, gpu(_xids=[(90299.0, 45)], _jobs=(10,)))  # a kill: never the GPU's


def test_one_event_on_many_gpus_of_a_job_blames_the_job_even_the_second_time() -> None:
    known = Memory()
    assert not checks(known, 100.0, *(gpu(n, _xids=[(99.0, 31)], _jobs=(7,)) for n in range(4)))
    assert [verdicts(known, n) for n in range(4)] == [[(31, "job")]] * 4
    assert not checks(known, 200.0, gpu(_xids=[(199.0, 31)], _jobs=(8,)))
    found = checks(known, 300.0, gpu(_xids=[(299.0, 31)], _jobs=(19,)))
    assert found == {"xid 0": "XID 31 under several users' jobs"}


def test_an_event_that_no_list_names_is_a_warning() -> None:
    known = Memory()
    result = judge(node(100.0, gpu(_xids=[(99.0, 999)])), known, POLICY)
    (one,) = result.findings
    assert (one.check, one.severity, one.acts, one.text) == ("xid", "warning", False, "XID 999, which no list names")


def test_the_policy_may_name_others() -> None:
    by = compile_health(parse("health: {xid: [999]}").health)
    known = Memory()
    (one,) = judge(node(100.0, gpu(_xids=[(99.0, 999)])), known, by).findings
    assert (one.severity, one.acts) == ("fatal", True)
    (one,) = [one for one in judge(node(110.0, gpu(_xids=[(109.0, 79)])), known, by).findings if not one.acts]
    assert one.text == "XID 79, which no list names"


def test_five_fatal_events_in_a_day_keep_a_gpu_out_until_a_person_returns_it() -> None:
    known = Memory()
    for number in range(4):
        judge(node(2000.0 * number, gpu(_xids=[(2000.0 * number, 79)])), known, POLICY)
        judge(node(2000.0 * number + 700, gpu()), known, POLICY)  # passes in between
    assert not known.of("GPU-0").kept
    judge(node(9000.0, gpu(_xids=[(9000.0, 79)])), known, POLICY)
    (one,) = judge(node(90000.0, gpu()), known, POLICY).findings
    assert (one.check, one.action, one.acts) == ("repeated", "drain-gpu", True)
    assert "5 fatal events within 24h" in one.text and "sluice health return" in one.text


def test_five_fatal_events_in_two_days_do_not() -> None:
    known = Memory()
    for number in range(5):
        judge(node(22000.0 * number, gpu(_xids=[(22000.0 * number, 79)])), known, POLICY)
        judge(node(22000.0 * number + 700, gpu()), known, POLICY)
    assert not known.of("GPU-0").kept


def test_events_wait_while_the_driver_does_not_answer() -> None:
    known = Memory()
    judge(node(100.0, gpu(_xids=[(99.0, 79)], _jobs=(7,))), known, POLICY)
    silent = gpu(_reading=None, _answered=False)
    result = judge(node(5000.0, silent, problems={"nvidia": "hangs"}), known, POLICY)
    assert "xid" in {one.check for one in result.findings}  # nobody can say that it is gone
