"""When jobs are signalled to save their state, and what their nodes answer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from policy.checkpoint import NodeCheckpoint, NodeSystem
from sluice.base.errors import SluiceError
from sluice.controllerd.health import checkpoints as checkpoints_module
from sluice.controllerd.health.checkpoints import FIRST_S, Checkpoints, class_of, daly, rate
from sluice.exchange.saves import ClassFailures, JobSaves, Saves, read_saves, write_for_plugins
from sluice.explain.checkpoints import describe
from sluice.slurm.answers import Job, Node

DAY = 86400.0
NOW = 20_000.0
POLICY = NodeCheckpoint(interval_s="daly", node_mtbf_s=10 * 86400)


def running(number: int, comment: str, start: int, end: int | None = None, nodes: str = "n1", count: int = 1) -> Job:
    return Job(
        number, None, "", "", "", 1, "", "", "", "RUNNING", "", nodes, count, 1, 0, 0, start, end, None, 1, {}, "", "",
        "", "", "", "", comment, "",
    )  # fmt: skip


def node(name: str, gres: str) -> Node:
    return Node(name, "", "", "mixed", frozenset(), "", 1, 1, 1, 1, 1, 1, 0, None, gres, "", (), (), (), 1, "")


def test_signals_come_round() -> None:
    checkpoints = Checkpoints()
    policy = NodeCheckpoint(interval_s=600, before_time_limit_s=300)
    jobs = [
        running(1, "sluice:checkpoint", 9000),
        running(2, "sluice:checkpoint=20m", 9000),
        running(3, "", 9000),
        running(4, "sluice:checkpoint=10h", 9000, 11000),
        running(5, "sluice:checkpoint,sluice:checkpoint=no", 9000),
        running(6, "sluice:checkpoint=10h", 9000, 9300),  # its limit is not longer than the time before it
        running(7, "sluice:checkpoint=10h", 9000, 9060),
    ]
    seen = {at: checkpoints.due(jobs, policy, 9000.0 + at) for at in range(15, 2000, 15)}
    when = {number: [at for at, due in seen.items() if number in [job.id for job in due]] for number in range(1, 8)}
    assert when == {1: [600, 1200, 1800], 2: [1200], 3: [], 4: [1710], 5: [], 6: [60], 7: [30]}


def test_the_interval_that_loses_least() -> None:
    """The exact optimum of the expected run time M exp(R/M) (exp((t+d)/M) - 1) / t is where its derivative is 0."""
    for save_s, mttf_s in ((10.0, DAY), (300.0, DAY), (600.0, 3600.0)):
        costs = {t: (math.exp((t + save_s) / mttf_s) - 1) / t for t in range(30, 40_000, 10)}
        assert costs[round(daly(save_s, mttf_s), -1)] <= 1.001 * min(costs.values())
    assert daly(20.0, 10.0) == 10.0


def test_the_interval_follows_measured_saves_and_failures() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint", 9000)
    checkpoints.watch([node("n1", "gpu:h100:8(S:0-1)")], ["n1"], 9000.0)
    assert checkpoints.due([job], POLICY, 9000.0 + FIRST_S - 1) == []
    assert checkpoints.due([job], POLICY, 9600.0) == [job]
    assert checkpoints.hear([job], {1: [9630.0]}, NOW)
    assert not checkpoints.hear([job], {1: [9630.0]}, NOW)
    assert checkpoints.due([job], POLICY, 9660.0) == []
    one = checkpoints.saves.jobs[1]
    assert (one.signals, one.answers, one.save_s, one.saved) == (1, 1, 30.0, 9630.0)
    assert (one.mttf_s, one.interval_s) == (pytest.approx(10 * DAY), round(daly(30.0, 10 * DAY)))
    for _ in range(9):
        checkpoints.failed("n1")
    interval = round(daly(30.0, DAY))
    assert checkpoints.due([job], POLICY, 9630.0 + interval - 1) == []
    assert one.mttf_s == pytest.approx(DAY) and one.interval_s == interval
    assert checkpoints.due([job], POLICY, 9630.0 + interval) == [job]  # counted from the end of the save


def test_a_new_job_begins_with_what_saves_of_its_account_take() -> None:
    checkpoints = Checkpoints()
    first, second, other = (
        replace(running(number, "sluice:checkpoint", 9000), account=account)
        for number, account in ((1, "physics"), (2, "physics"), (3, "guests"))
    )
    assert checkpoints.due([first], POLICY, 9600.0) == [first]
    checkpoints.hear([first], {1: [9640.0]}, NOW)
    checkpoints.due([second, other], POLICY, 9640.0)
    jobs = checkpoints.saves.jobs
    assert (jobs[2].interval_s, jobs[3].interval_s) == (round(daly(40.0, 10 * DAY)), FIRST_S)
    jobs[1].signalled = 10_000.0
    checkpoints.hear([first], {1: [10_120.0]}, NOW)
    assert checkpoints.saves.accounts == {"physics": 50.0}  # one save more counts for an eighth
    checkpoints.due([first], POLICY, 10_120.0)
    assert jobs[1].interval_s == round(daly(120.0, 10 * DAY))  # its own last save


def test_a_job_that_may_not_catch_the_signal_yet_is_not_asked_before_it_is_ended() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint", 9000)
    assert not checkpoints.ask(job, POLICY, 9059.0)
    assert checkpoints.ask(job, POLICY, 9060.0) and checkpoints.saves.jobs[1].signalled == 9060.0
    assert not checkpoints.ask(running(2, "", 9000), POLICY, 9060.0)
    checkpoints.saves.jobs[3] = JobSaves(started=9000.0, saved=9001.0)  # it has shown that it catches it
    assert checkpoints.ask(running(3, "sluice:checkpoint", 9000), POLICY, 9010.0)


def test_a_job_whose_node_cannot_save_it_is_not_asked() -> None:
    """Until it runs elsewhere, or again."""
    policy = NodeCheckpoint(system=NodeSystem(), before_time_limit_s=300)
    checkpoints, comment = Checkpoints(), "sluice:checkpoint=system"
    jobs = [running(number, comment, int(NOW) - 2000, int(NOW) + 200) for number in (1, 2)]
    checkpoints.due(jobs, policy, NOW - 1000)
    checkpoints.know({1: "its NVIDIA driver is too old", 2: "", 3: "not known here"})
    assert [job.id for job in checkpoints.due(jobs, policy, NOW)] == [2]
    assert [job.id for job in jobs if checkpoints.ask(job, policy, NOW)] == [2]
    shown = [describe("", comment, policy, checkpoints.saves.jobs[number]) for number in (1, 2)]
    assert [one["cannot"] for one in shown] == ["its NVIDIA driver is too old", None]
    again = running(1, comment, int(NOW) + 100)
    checkpoints.due([again], policy, NOW + 200)
    assert checkpoints.ask(again, policy, NOW + 200)


def test_nodes_that_get_other_gpus_change_what_is_expected() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint", 9000, nodes="n[1-2]", count=2)
    checkpoints.saves.classes = {"h100": ClassFailures(), "b200": ClassFailures(failures=9)}
    for gpus, days in (("h100", 10.0), ("b200", 1.0)):
        checkpoints.watch([node(name, f"gpu:{gpus}:8") for name in ("n1", "n2")], [], 9000.0)
        checkpoints.due([job], POLICY, 9000.0)
        assert checkpoints.saves.jobs[1].mttf_s == pytest.approx(days * DAY / 2)


def test_what_slurmctld_reads_of_saves(tmp_path: Path) -> None:
    jobs = {
        1: JobSaves(started=100.0, saved=150.7),
        2: JobSaves(started=200.0, saved=150.0),  # in a run before
        3: JobSaves(started=100.0),
        4: JobSaves(started=100.0, saved=160.0),
    }
    path = tmp_path / "sluice.saves"
    assert write_for_plugins(path, Saves(jobs)) and not write_for_plugins(path, Saves(jobs))
    *lines, checksum = path.read_text().splitlines()
    assert lines == ["sluice-saves 1", "4 160", "1 150"] and checksum.startswith("checksum = crc32:")
    assert (tmp_path / "sluice.save-times").read_text().splitlines()[:-1] == ["sluice-save-times 1", "4 60", "1 60"]
    Saves(jobs, accounts={"physics": 40.0}).write(path)
    assert read_saves(path).accounts == {"physics": 40.0}


def test_what_slurmctld_reads_of_how_long_saves_take(tmp_path: Path) -> None:
    """Of jobs that save when they are asked to: measured, of others of the account, or taken to be so."""
    jobs = {
        1: JobSaves(started=100.0, saved=150.0, save_s=2.1, seen=9.0),
        2: JobSaves(started=200.0, saved=150.0, save_s=5.0),  # it has not in this run
        3: JobSaves(started=100.0, savable=True, account="physics", seen=8.0),
        4: JobSaves(started=100.0, saved=160.0, seen=7.0),
        5: JobSaves(started=100.0, saved=160.0, save_s=0.1, seen=6.0),
    }
    path, saves = tmp_path / "sluice.saves", Saves(jobs, accounts={"physics": 40.2})
    assert write_for_plugins(path, saves) and not write_for_plugins(path, saves)
    lines = (tmp_path / "sluice.save-times").read_text().splitlines()
    assert sorted(lines[1:-1]) == ["1 3", "3 41", "4 60", "5 1"] and lines[0] == "sluice-save-times 1"
    jobs[1].save_s = 9.0
    assert write_for_plugins(path, saves), "one of the files is new"


def test_a_node_says_whether_it_can_save_a_job_in_this_run() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint=10m", 9000)
    checkpoints.due([job], POLICY, 9100.0)
    one = checkpoints.saves.jobs[1]
    assert checkpoints.know({1: "", 99: ""}) and not checkpoints.know({1: ""})
    assert (one.savable, one.account) == (True, job.account)
    checkpoints.know({1: "its GPUs are partitions"})
    assert not one.savable
    checkpoints.know({1: ""})
    checkpoints.due([running(1, "sluice:checkpoint=10m", 9500)], POLICY, 9600.0)
    assert not one.savable, "of the run before"


def test_a_job_of_several_nodes_has_saved_when_all_have() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint=10m", 9000, nodes="n[1-2]", count=2)
    assert checkpoints.due([job], POLICY, 9600.0) == [job]
    one = checkpoints.saves.jobs[1]
    for said in ([9610.0], [9610.0, None], [9610.0, None, 9611.0]):
        checkpoints.hear([job], {1: said}, NOW)
        assert (one.saved, one.answers) == (None, 0)
    checkpoints.hear([job], {1: [9610.0, 9640.0]}, NOW)
    assert (one.saved, one.answers, one.save_s) == (9610.0, 1, 40.0)
    assert checkpoints.due([job], POLICY, 10200.0) == [job]
    checkpoints.hear([job], {1: [10205.0, 9640.0]}, NOW)
    assert (one.saved, one.answers) == (9640.0, 1)  # of the second save one part is there


def test_a_job_that_saves_by_itself_answers_nothing_and_loses_less() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint=10m", 9000)
    checkpoints.due([job], POLICY, 9100.0)
    checkpoints.hear([job], {1: [9090.0]}, NOW)
    checkpoints.due([job], POLICY, 9600.0)
    checkpoints.hear([job], {1: [9090.0]}, NOW)
    one = checkpoints.saves.jobs[1]
    assert (one.signals, one.answers, one.saved, one.save_s) == (1, 0, 9090.0, None)


def test_a_clock_that_was_ahead_silences_no_job() -> None:
    checkpoints, job = Checkpoints(), running(1, "sluice:checkpoint=daly", 9000)
    assert checkpoints.due([job], POLICY, 9600.0) == [job]
    assert not checkpoints.hear([job], {1: [9e9]}, 9605.0)
    assert checkpoints.hear([job], {1: [9610.0]}, 9620.0)
    assert checkpoints.saves.jobs[1].saved == 9610.0


def test_a_job_that_starts_again_goes_on_with_what_is_known_of_it() -> None:
    checkpoints = Checkpoints()
    first = running(1, "sluice:checkpoint", 9000)
    checkpoints.due([first], POLICY, 9600.0)
    checkpoints.hear([first], {1: [9620.0]}, NOW)
    checkpoints.due([], POLICY, 9700.0)
    again = replace(first, start_time=9800)
    assert checkpoints.due([again], POLICY, 9815.0) == []
    one = checkpoints.saves.jobs[1]
    assert (one.started, one.signalled, one.saved, one.save_s) == (9800.0, 0.0, 9620.0, 20.0)
    checkpoints.due([], POLICY, 9815.0 + DAY)
    assert checkpoints.saves.jobs == {}


def test_of_jobs_that_ended_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "_MOST_KEPT", 2)
    checkpoints = Checkpoints()
    for number in range(1, 6):
        checkpoints.due([running(number, "sluice:checkpoint", 9000)], POLICY, 9000.0 + number)
    running_now = [running(number, "sluice:checkpoint", 9000) for number in (1, 6, 7, 8)]
    checkpoints.due(running_now, POLICY, 9100.0)
    assert set(checkpoints.saves.jobs) == {1, 6, 7, 8, 4, 5}


def test_failures_are_counted_by_class_in_the_time_of_nodes_with_jobs() -> None:
    checkpoints = Checkpoints()
    nodes = [node("n1", "gpu:h100:8,shard:h100:10"), node("n2", "gpu:mi300x:4,gpu:a100:2(S:0)"), node("n3", "")]
    assert [class_of(one) for one in nodes] == ["h100", "a100,mi300x", "none"]
    checkpoints.watch(nodes, ["n1", "n3"], 100.0)
    checkpoints.watch(nodes, ["n1", "n3"], 105.0)
    checkpoints.watch(nodes, ["n1"], 5000.0)  # the daemon did not see what failed in between
    checkpoints.failed("n1")
    assert checkpoints.saves.classes == {"h100": ClassFailures(65.0, 1), "none": ClassFailures(5.0, 0)}
    assert rate(ClassFailures(3 * DAY, 4), 2 * DAY) == 1 / DAY


def test_what_is_known_outlives_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "saves"
    assert read_saves(path) == Saves()
    one = JobSaves(9000.0, 9700.0, 9600.0, 2, 1, 9620.0, 20.0, 600, True, DAY)
    saves = Saves({7: one}, {"h100": ClassFailures(1.5, 2)})
    saves.write(path)
    assert read_saves(path) == saves and path.stat().st_mode & 0o777 == 0o600
    for text in ("", "[]", '{"schema_version": 2}', '{"schema_version": 1, "jobs": {"x": {}}, "classes": {}}'):
        path.write_text(text)
        with pytest.raises(SluiceError, match="remove it"):
            read_saves(path)
