"""A GPU out of service on real daemons: no job gets it, those that have it go on, through reconfigure and restart."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global
from sluice.controllerd.health import withdrawn
from tests.integration.jobs import state, submit
from tests.integration.settled import PATIENCE, fresh_status, until
from tests.integration.versions import NATIVE_FIRST

pytestmark = pytest.mark.cluster

POLICY = CompiledPolicy(settings=Global(placement="sluice", planner_interval_ms=500)).render()


class Slurm:
    """One node of eight GPUs of 80 GiB."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster

    def run(self, *command: str) -> str:
        return self.cluster.run(list(command)).stdout

    def submit(self, *options: str) -> str:
        return submit(self.cluster, *options, user="root")

    def state(self, job: str) -> str:
        return state(self.cluster, job)

    def gpus(self, job: str) -> set[int]:
        """Which GPUs a running job has."""
        self.wait(lambda: self.state(job) == "RUNNING")
        shown = self.run("scontrol", "-d", "show", "job", job)
        found: set[int] = set()
        for shares in re.findall(r" GRES=shard\S*?\((\d+/\d+(?:,\d+/\d+)*)\)", shown):  # of each GPU: Slurm 24.11
            found |= {number for number, one in enumerate(shares.split(",")) if not one.startswith("0/")}
        for ranges in re.findall(r" GRES=\S*?(?:IDX:|\()([0-9,-]+)(?:\(\d+/\d+\))?\)", shown) if not found else []:
            for part in ranges.split(","):
                first, _, last = part.partition("-")
                found |= set(range(int(first), int(last or first) + 1))
        assert found, shown
        return found

    def used(self) -> str:
        return re.search(r"GresUsed=(\S+)", self.run("scontrol", "-d", "show", "node", "n1"))[1]  # type: ignore[index]

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        until(condition, timeout=seconds, shows=lambda: (self.run("squeue", "-o", "%A %T %r %b"), self.used()))

    def withdraw(self, *gpus: int) -> None:
        """As the controllers' daemon does; return when slurmctld has read it."""
        withdrawn.write(self.cluster.layout.state / withdrawn.FILE_NAME, [("n1", gpu) for gpu in gpus])
        self.wait(lambda: self.counter("withdrawn.listed") == len(gpus))

    def counter(self, name: str) -> int:
        return int(fresh_status(self.cluster)["counters"].get(name, 0))

    def clear(self) -> None:
        self.run("bash", "-c", "squeue -h -o %A | xargs -r scancel")
        self.wait(lambda: not self.run("squeue", "-h").strip())


@pytest.fixture(scope="module", params=NATIVE_FIRST)
def version(request: pytest.FixtureRequest) -> str:
    return "22.05" if request.param == "native" else "24.11"


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster], version: str) -> Slurm:
    root = {} if version == "22.05" else {"root": request.getfixturevalue("trixie_root")}
    sluice: dict[str, Any] = {
        "level": "place",
        "policy": POLICY,
        "environment": {"SLUICE_CROSS_CHECK_PERMILLE": "1000", "SLUICE_MIRROR_CHECK_EVERY": "1"},
    }
    return Slurm(
        make_shared_cluster(
            {
                "nodes": [{"names": "n1", "platform": "dgx-h100"}],
                "controllers": 1,
                "accounting": False,
                "slurm_conf": "DefMemPerCPU=100\n"
                "SchedulerParameters=bf_interval=3,sched_interval=2,sched_min_interval=0,batch_sched_delay=0\n",
                "sluice": sluice,
            },
            **root,
        )
    )


@pytest.fixture
def slurm(shared: Slurm) -> Iterator[Slurm]:
    yield shared
    shared.clear()
    shared.withdraw()


def test_no_job_gets_it_through_reconfigure_and_restart(slurm: Slurm) -> None:
    running = slurm.submit("--gres=gpu:1")
    (sick,) = slurm.gpus(running)
    slurm.withdraw(sick)
    rest = set(range(8)) - {sick}
    seven = slurm.submit("--gres=gpu:7")
    assert slurm.gpus(seven) == rest
    waiting = [slurm.submit("--gres=gpu:1"), slurm.submit("--gres=shard:1024"), slurm.submit("--gres=gpu:h100:1")]
    assert slurm.state(running) == "RUNNING"  # who has it keeps it
    slurm.run("scancel", running)  # and when he goes, nobody gets it
    slurm.wait(lambda: slurm.state(running) == "CANCELLED")
    for disturb in (lambda: None, lambda: slurm.run("scontrol", "reconfigure"), slurm.cluster.restart_slurmctld):
        disturb()
        slurm.run("scontrol", "update", f"jobid={waiting[0]}", "nice=1")  # look at it again
        time.sleep(2.5)  # as long as two cycles of the scheduler
        assert {slurm.state(job) for job in waiting} == {"PENDING"}
        assert slurm.state(seven) == "RUNNING"
        slurm.wait(lambda: slurm.counter("withdrawn.held") == 1)
    slurm.withdraw()
    slurm.wait(lambda: "RUNNING" in {slurm.state(job) for job in waiting})
    slurm.run("scancel", seven)
    slurm.wait(lambda: {slurm.state(job) for job in waiting} == {"RUNNING"})
    slurm.clear()
    slurm.wait(lambda: "gpu:h100:0" in slurm.used() or "gpu:0" in slurm.used())
    assert re.search(r"shard:(?:h100:)?0\b", slurm.used()), slurm.used()


def test_shares_of_it_are_not_given_out(slurm: Slurm) -> None:
    first = slurm.submit("--gres=shard:20000")
    (sick,) = slurm.gpus(first)
    slurm.withdraw(sick)
    second = slurm.submit("--gres=shard:20000")  # would fit next to the first
    assert sick not in slurm.gpus(second)
    others = [slurm.submit("--gres=gpu:1") for _ in range(6)]
    for job in others:
        assert sick not in slurm.gpus(job)
    waiting = slurm.submit("--gres=shard:70000")
    slurm.run("scancel", first)
    slurm.wait(lambda: slurm.state(first) == "CANCELLED")
    slurm.run("scontrol", "reconfigure")
    time.sleep(2.5)
    assert slurm.state(waiting) == "PENDING"
    slurm.withdraw()
    assert slurm.gpus(waiting) == {sick}


def test_a_damaged_list_changes_nothing_and_a_level_off_gives_all_back(slurm: Slurm) -> None:
    slurm.withdraw(0, 1)
    path = slurm.cluster.layout.state / withdrawn.FILE_NAME
    path.write_text("sluice-withdrawn 1\nn1 5\n")
    job = slurm.submit("--gres=gpu:6")
    assert slurm.gpus(job) == set(range(2, 8))
    slurm.wait(lambda: "stay so" in slurm.cluster.log("slurmctld@ctl1").read_text())
    waiting = slurm.submit("--gres=gpu:1")
    level = slurm.cluster.layout.slurm / "sluice.level"
    level.write_text("off\n")
    slurm.wait(lambda: slurm.state(waiting) == "RUNNING")
    level.write_text("place\n")
    slurm.run("scancel", waiting)
    slurm.wait(lambda: slurm.counter("withdrawn.held") == 2)


def test_the_mirror_was_never_wrong(shared: Slurm) -> None:
    assert (shared.counter("select.check_failures"), shared.counter("select.cross_wrong")) == (0, 0)
