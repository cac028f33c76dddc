"""The failover journal on real daemons: SIGKILL of the controller, and what was acknowledged is there again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from sluice.base.files import write_atomic
from sluice.base.run import CommandError
from sluice.base.slurm_version import parse_slurm_version
from tests.integration.jobs import submit
from tests.integration.settled import PATIENCE, block_saving, fresh_status, let_it_save, status, until
from tests.integration.versions import NATIVE_FIRST
from tests.journal_reader import read_journal, read_replays

pytestmark = pytest.mark.cluster

TRACE = "/run/sluice-cluster/trace"


class Site:
    """A cluster whose controller is killed."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.state = cluster.folder / "state"
        self.journal = self.state / "sluice.journal"
        self.trace = cluster.folder / "trace"
        self.trace.mkdir(exist_ok=True)
        self.trace.chmod(0o777)

    def submit(self, *options: str, script: str = "exec sleep 600", user: str = "alice") -> str:
        return submit(self.cluster, "-t5", *options, wrap=script, user=user)

    def jobs(self) -> dict[str, list[str]]:
        """By job id: state, reason, start, submission, restarts as squeue has them, arrays' waiting tasks as one."""
        shown = self.cluster.run(
            [
                "squeue",
                "-h",
                "-t",
                "all",
                "-O",
                "JobID:|,State:|,Reason:|,StartTime:|,SubmitTime:|,JobArrayID:|,UserName:",
            ]
        ).stdout
        rows = [[word.strip() for word in line.split("|")] for line in shown.splitlines()]
        return {row[0]: row[1:] for row in rows}

    def job_state(self, job: str) -> str:
        return self.jobs().get(job, ["MISSING"])[0]

    def wait_for(self, job: str, *states: str) -> None:
        until(lambda: self.job_state(job), lambda state: state in states)

    def stop_saving(self) -> None:
        """Let Slurm write its state once more, and then no more: what follows is in the journal alone."""
        let_it_save(self.cluster)
        until(lambda: block_saving(self.cluster), bool)
        time.sleep(1.1)  # the state's time has whole seconds

    def kill(self) -> None:
        self.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)

    def start(self) -> None:
        self.cluster.start_daemon("slurmctld@ctl1")
        self.wait_for_answer()

    def wait_for_answer(self, timeout: float = PATIENCE) -> None:
        until(self._answers, bool, timeout)
        with suppress(FileNotFoundError):
            (self.state / "job_state.new").rmdir()

    def _answers(self) -> bool:
        return self.cluster.run(["squeue", "-h"], check=False, timeout=20).returncode == 0

    def replay(self) -> dict[str, Any]:
        """The last replay's report."""
        return read_replays(self.journal)[-1]

    def counter(self, name: str) -> int:
        return int(fresh_status(self.cluster)["counters"].get(name, 0))

    def ran(self, name: str) -> list[str]:
        path = self.trace / name
        return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def site(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    root = {} if request.param == "native" else {"root": request.getfixturevalue("trixie_root")}
    description = {
        "nodes": [{"names": "n[1-4]", "platform": "none"}],
        "accounts": [{"name": "physics"}],
        "users": [{"name": "alice", "accounts": ["physics"]}],
        "controllers": 2,
        "slurm_conf": "SlurmctldTimeout=5\nDefMemPerCPU=10\n",
        "sluice": {"level": "admit", "journal": True},
    }
    yield Site(make_shared_cluster(description, **root))


def test_what_was_acknowledged_is_there_again(site: Site) -> None:
    site.stop_saving()
    array = site.submit("-a", "1-6%2")
    runs = site.submit(
        "-N2",
        "-J",
        "runs",
        "--export=ALL,WORD=kept",
        script=f"echo $SLURM_JOB_ID $WORD >> {TRACE}/runs; exec sleep 600",
    )
    done = site.submit(script=f"echo run >> {TRACE}/done; exit 3")
    requeued = site.submit("--requeue", script=f"echo run >> {TRACE}/requeued; exec sleep 600")
    held = site.submit("-H", "-J", "held", "--export=ALL,WORD=kept", script=f"echo $WORD >> {TRACE}/held")
    hetero = site.cluster.run(["sbatch", "--parsable", "-H", "-n1", ":", "-H", "-n1", "--wrap=true"], user="alice")
    leader = hetero.stdout.strip()
    site.wait_for(runs, "RUNNING")
    site.wait_for(requeued, "RUNNING")
    site.wait_for(done, "FAILED")
    until(
        lambda: [row for row in site.jobs().values() if row[4].startswith(f"{array}_") and row[0] == "RUNNING"],
        lambda running: len(running) == 2,
    )
    site.cluster.run(["scontrol", "requeue", requeued])
    cancelled = site.submit("-H")
    cancelled_running = site.submit()
    site.wait_for(cancelled_running, "RUNNING")
    site.cluster.run(["scancel", cancelled, cancelled_running], user="alice")
    dependent = site.submit("-d", f"afternotok:{done}", "-H")
    before = site.jobs()
    site.kill()
    last = max(int(job) for job in before)
    site.start()

    after = site.jobs()
    assert set(before) <= set(after)  # every id that was given out
    for job in (runs, done, held, array, dependent, leader, str(int(leader) + 1)):
        assert (after[job][0], after[job][3], after[job][5]) == (before[job][0], before[job][3], before[job][5]), job
    assert after[runs][2] == before[runs][2]  # it was not started again
    assert after[array][4] == before[array][4]  # the same tasks of the array wait
    tasks = {job: row[2] for job, row in before.items() if row[4].startswith(f"{array}_") and row[0] == "RUNNING"}
    assert {job: after[job][2] for job in tasks} == tasks
    assert len(tasks) == 2
    assert after[requeued][0] == "PENDING"
    assert {after[job][0] for job in (cancelled, cancelled_running)} <= {"CANCELLED", "COMPLETING"}
    assert int(site.submit("-H")) > last  # no id is given twice
    report = site.replay()
    assert report["unsettled"] == [], report
    assert {int(held), int(array), int(leader), int(leader) + 1} <= set(report["resubmitted"])
    assert {int(runs), *map(int, tasks)} <= set(report["restored"])
    script = site.cluster.run(["scontrol", "write", "batch_script", held, "-"]).stdout
    assert f"{TRACE}/held" in script

    site.cluster.run(["scontrol", "release", held])
    until(lambda: site.ran("held"), lambda words: bool(words == ["kept"]))  # script and environment
    assert site.ran("runs") == [runs, "kept"]
    assert site.ran("done") == ["run"]
    assert site.ran("requeued") == ["run"]
    site.cluster.run(["scancel", runs], user="alice")
    site.wait_for(runs, "CANCELLED")
    rows = until(
        lambda: site.cluster.run(
            ["sacct", "-n", "-X", "-P", "-D", "-j", f"{runs},{done}", "-o", "JobIDRaw,State,ExitCode"]
        ).stdout.splitlines(),
        lambda lines: any(line.startswith(f"{runs}|CANCELLED") for line in lines),
    )
    assert sorted(row.split("|")[0] for row in rows) == sorted([runs, done])  # one row each
    assert any(row == f"{done}|FAILED|3:0" for row in rows)
    site.cluster.run(["scancel", "-u", "alice"])


def test_an_array_whose_tasks_all_run_keeps_their_ids(site: Site) -> None:
    """The last task to start has the array's own id: it is brought back after the others have left the array."""
    site.stop_saving()
    array = site.submit("-a", "1-4", script='[ "$SLURM_ARRAY_TASK_ID" = 2 ] || sleep 600')

    def tasks() -> dict[str, list[str]]:
        return {job: row for job, row in site.jobs().items() if row[4].startswith(f"{array}_")}

    before = until(tasks, lambda now: sorted(row[0] for row in now.values()) == ["COMPLETED", *["RUNNING"] * 3])
    site.kill()
    site.start()
    assert site.replay()["unsettled"] == []
    after = tasks()
    assert {job: (row[2], row[4]) for job, row in after.items()} == {
        job: (row[2], row[4]) for job, row in before.items()
    }  # ids, start times, tasks
    until(tasks, lambda now: sorted(row[0] for row in now.values()) == ["COMPLETED", *["RUNNING"] * 3])
    site.cluster.run(["scancel", "-u", "alice"])


def test_jobs_that_waited_in_the_saved_state_and_run_or_have_ended_are_taken_out_of_no_count(site: Site) -> None:
    """Waiting jobs' age is counted after the replay only: to take one out of that count is an underflow in the log."""
    first, second = site.submit("-N4", "--exclusive"), site.submit("-N2", "--exclusive")
    short = site.submit("-N2", "--exclusive", script="true")
    site.wait_for(first, "RUNNING")
    waits = ("Resources", "Priority")
    until(lambda: site.jobs(), lambda jobs: jobs[second][1] in waits and jobs[short][1] in waits)
    site.stop_saving()
    site.cluster.run(["scancel", first], user="alice")
    site.wait_for(second, "RUNNING")
    site.wait_for(short, "COMPLETING", "COMPLETED")
    site.kill()
    site.start()
    assert int(second) in site.replay()["restored"]
    assert site.job_state(second) == "RUNNING"
    assert site.job_state(short) in ("COMPLETING", "COMPLETED")
    assert "underflow" not in site.cluster.log("slurmctld@ctl1").read_text(errors="replace")
    site.cluster.run(["scancel", "-u", "alice"])


def test_a_job_saved_while_slurmdbd_is_asked_for_its_row_can_be_changed(site: Site) -> None:
    """Stock Slurm rejects each change of such a job, so that nodes could not report its end either."""
    if parse_slurm_version(site.cluster.run(["scontrol", "--version"]).stdout) >= (24, 11, 0):
        pytest.skip("this version of Slurm has no such state")
    slurmdbd = next(daemon.pid for daemon in site.cluster.daemons() if daemon.name == "slurmdbd")
    site.cluster.run(["kill", "-STOP", str(slurmdbd)])
    try:
        job = site.submit()
        site.wait_for(job, "RUNNING")
        change = ["scontrol", "update", f"JobId={job}", "Comment=changed"]
        until(lambda: site.cluster.run(change, check=False).stderr, lambda said: "DB index is being set" in said)
        let_it_save(site.cluster)
        site.kill()
    finally:
        site.cluster.run(["kill", "-CONT", str(slurmdbd)])
    site.start()
    until(lambda: site.cluster.run(change, check=False).returncode == 0, bool)
    site.cluster.run(["scancel", "-u", "alice"])
    rows = ["sacct", "--allusers", "--duplicates", "-XnPj", job, "-o", "state"]
    until(lambda: site.cluster.run(rows).stdout.split()[:1], lambda states: states == ["CANCELLED"])
    assert len(site.cluster.run(rows).stdout.splitlines()) == 1, "its row, and no other"


def test_a_job_that_was_saved_before_its_launch_is_not_launched_twice(site: Site) -> None:
    """Its node would refuse, and be drained, and the job requeued, though it runs."""
    conf, go = site.cluster.layout.slurm / "slurm.conf", site.trace / "go"
    plain = conf.read_text()
    prolog = site.cluster.folder / "scratch/slow_prolog"
    prolog.write_text(f"#!/bin/sh\nwhile [ ! -e {TRACE}/go ]; do sleep 0.1; done\n")
    prolog.chmod(0o755)
    write_atomic(conf, f"{plain}PrologSlurmctld=/run/sluice-cluster/scratch/slow_prolog\n")
    site.kill()
    site.start()  # slurmctld asks once whether there is one
    job = site.submit(script=f"echo began >> {TRACE}/launched; exec sleep 600")
    site.wait_for(job, "CONFIGURING")
    site.stop_saving()
    go.touch()
    until(lambda: site.ran("launched"), lambda began: began == ["began"])
    site.kill()
    write_atomic(conf, plain)
    site.start()
    site.cluster.wait_registered()
    assert site.job_state(job) == "RUNNING"
    shown = site.cluster.run(["scontrol", "show", "job", job]).stdout
    assert "Restarts=0" in shown
    assert site.ran("launched") == ["began"]
    assert not [one for one in site.cluster.node_states() if one.state.startswith("drain")]
    site.cluster.run(["scancel", "-u", "alice"])


def test_a_torn_record_and_a_damaged_one_are_not_believed(site: Site) -> None:
    site.stop_saving()
    good = site.submit("-H")
    torn = site.submit("-H")
    site.kill()
    segment = sorted(site.journal.glob("*.journal"))[-1]
    entries = read_journal(site.journal).entries
    assert [entry.job_id for entry in entries if entry.kind == "submit"][-2:] == [int(good), int(torn)]
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 7)
    site.start()
    assert site.job_state(good) == "PENDING"
    assert site.job_state(torn) == "MISSING"
    assert site.replay()["torn_bytes"] > 0
    assert int(site.submit("-H")) >= int(torn)

    site.stop_saving()
    first = site.submit("-H")
    size = sorted(site.journal.glob("*.journal"))[-1].stat().st_size
    later = [site.submit("-H") for _ in range(2)]
    site.kill()
    segment = sorted(site.journal.glob("*.journal"))[-1]
    with segment.open("r+b") as file:
        file.seek(size + 50)
        byte = file.read(1)
        file.seek(size + 50)
        file.write(bytes([byte[0] ^ 1]))
    site.start()
    report = site.replay()
    assert int(first) in report["resubmitted"]
    assert "corrupt" in report["problem"]
    assert report["lost_bytes"] > 0
    assert int(site.submit("-H")) > max(map(int, later))


def test_what_cannot_be_journalled_is_refused_with_a_clear_error(site: Site) -> None:
    """A full disk: the journal's folder is a file system of its own, of 256 KiB."""
    site.kill()
    folder = "/run/sluice-cluster/state/sluice.journal"
    for controller in ("ctl1", "ctl2"):
        site.cluster.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700,uid=64030", "tmpfs", folder], node=controller
        )
    site.start()
    large = "#" * 60000
    refused = None
    for _ in range(8):
        try:
            site.submit("-H", script=large)
        except CommandError as error:
            refused = str(error)
            break
    assert refused is not None
    assert "could not be made safe" in refused
    assert "No space left on device" in refused
    until(
        lambda: status(site.cluster)["counters"],
        lambda counts: bool(counts.get("journal.refused", 0) >= 1 and counts["journal.error"] != 0),
    )
    # Slurm saves its state, the old segments go, and submissions are taken in again, without anybody's hand.
    until(lambda: _accepts(site, large), bool)


def _accepts(site: Site, script: str) -> bool:
    try:
        site.submit("-H", script=script)
    except CommandError:
        time.sleep(0.5)
        return False
    return True


def test_the_backup_brings_them_back_too(site: Site) -> None:
    site.cluster.run(["umount", "-l", "/run/sluice-cluster/state/sluice.journal"], node="ctl2")
    site.kill()
    site.cluster.run(["umount", "-l", "/run/sluice-cluster/state/sluice.journal"], node="ctl1")
    site.start()
    site.stop_saving()
    runs = site.submit(script=f"echo run >> {TRACE}/backup; exec sleep 600")
    held = site.submit("-H")
    site.wait_for(runs, "RUNNING")
    start = site.jobs()[runs][2]
    site.kill()
    site.wait_for_answer()
    assert site.jobs()[runs][0] == "RUNNING"
    assert site.jobs()[runs][2] == start
    assert site.job_state(held) == "PENDING"
    assert site.replay()["controller"] == "ctl2"
    assert int(site.submit("-H")) > int(held)
    assert Path(site.trace / "backup").read_text().split() == ["run"]
