"""The agent's guard under real jobs: an agent that is killed, that hangs, and that dies again and again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.agents import READY
from dev_cluster.cluster import DevCluster
from dev_cluster.control import init_pid
from policy.document import parse
from policy.node import FILE_NAME, compile_node
from prolog_epilog.outages import Outage, read
from sluice.base import events
from sluice.base.files import write_atomic
from tests.integration.beds import Bed
from tests.integration.jobs import shown, submit
from tests.integration.settled import PATIENCE, until

pytestmark = pytest.mark.cluster

NODE = "n1"
AGENT = f"agent@{NODE}"
PYTHON = "/usr/bin/python3"
BOUND_S = 6
# Holds 1 GiB, and tries what else it is asked for as soon as there is a file of its own; writes the time down.
GREEDY = """
import ctypes, os, sys, time
cu, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cu.cuCtxSetCurrent(context) == 0 and cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0
folder, more = sys.argv[1], int(sys.argv[2])
while True:
    if more and os.path.exists(folder + "/now"):
        print(cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(more << 30)), flush=True)
        more = 0
    with open(folder + "/next", "w") as file:
        file.write(str(time.monotonic()))
    os.replace(folder + "/next", folder + "/alive")
    time.sleep(0.02)
"""
# Nothing is preloaded in a mount namespace of the user's own: the watchdog alone holds.
ESCAPE = "unshare -Urm sh -c 'mount --bind /dev/null /etc/ld.so.preload && exec env -i \"$@\"' x "


class Site:
    """The cluster's only node, its agent, and one job's folder."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        (folder / "greedy.py").write_text(GREEDY)
        folder.chmod(0o777)

    def run(self, *command: str, node: str = "login", user: str = "root", check: bool = True) -> str:
        return self.cluster.run(list(command), node=node, user=user, check=check).stdout

    def submit(self, *options: str, more: int = 0, escape: bool = False) -> int:
        command = f"{ESCAPE if escape else ''}{PYTHON} {self.folder}/greedy.py {self.folder} {more}"
        ask = ("--gres=shard:4096", "--mem=100", "-o", f"{self.folder}/out")
        job = int(submit(self.cluster, *ask, *options, wrap=command))
        until(lambda: self.age() < 1)
        return job

    def age(self) -> float:
        """Seconds since the job's program did something."""
        try:
            return time.monotonic() - float((self.folder / "alive").read_text())
        except FileNotFoundError:
            return float("inf")

    @property
    def guard(self) -> int:
        """Its number outside of the cluster."""
        found = {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_guard(pid, self.cluster)}
        [guard] = {pid for pid in found if _parent(pid) not in found}  # an agent that begins is its guard until exec
        return guard

    @property
    def agent(self) -> int | None:
        """Likewise; None between two."""
        guard = self.guard
        children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        return int(children[0]) if children else None

    def kill(self, number: int = signal.SIGKILL) -> int:
        agent = self.agent
        assert agent is not None
        os.kill(agent, number)
        return agent

    def die_over(self, jobs: int, *, deaths: int) -> None:
        """Let the agent die again and again, as if over a job's data; 0: over nobody's."""
        for _ in range(deaths):
            before = self.last()
            until(lambda: self.agent)
            with self.page().open("r+b", buffering=0) as page:
                page.seek(63 * 4)
                page.write(jobs.to_bytes(4, "little"))
            self.kill(signal.SIGSEGV)
            until(lambda before=before: self.last() > before)
        until(lambda: self.ready() and self.over(0))

    def page(self) -> Path:
        """Where agents say whose data they read."""
        files = Path(f"/proc/{self.guard}/fd").iterdir()
        return next(file for file in files if str(file.readlink()).startswith("/memfd:sluice-about"))

    def ready(self) -> bool:
        """Whether the agent answers."""
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(2)
                link.connect(f"/proc/{self.guard}/root/run/sluice/ask/0")
                link.sendall(b'{"do": "devices"}\n')
                return link.recv(1 << 16).endswith(b"\n")
        except OSError:
            return False

    def outages(self) -> list[Outage]:
        return read(Path(f"/proc/{self.guard}/root/run/sluice/agent/guard"))

    def last(self) -> int:
        return max((outage.number for outage in self.outages()), default=0)

    def over(self, after: int) -> list[Outage]:
        """The outages since one of that number, when all of them are over."""
        found = [outage for outage in self.outages() if outage.number > after]
        return found if all(outage.lasted is not None for outage in found) else []

    def deaths(self, after: int) -> list[Outage]:
        """Those of the agent: on a busy machine there are also outages in which a sample came late."""
        return [outage for outage in self.over(after) if outage.is_death]

    def record(self, job: int) -> dict[str, Any]:
        path = self.cluster.node_folder(NODE) / f"records/{job}.json"
        until(path.exists)
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def details(self, job: int, action: str) -> list[dict[str, Any]]:
        return [event["detail"] for event in self.record(job)["events"] if event["action"] == action]

    def unwatched(self, job: int, outage: Outage) -> list[dict[str, Any]]:
        """What the job's record says of an outage."""
        return [one for one in self.details(job, "unwatched") if one["outage"] == outage.number]

    def node_state(self) -> str:
        return self.run("sinfo", "-h", "-n", NODE, "-o", "%T %E").strip()

    def warnings(self) -> list[str]:
        """What the controllers' events say of agents that were lost."""
        found = events.read(self.cluster.folder / "controllerd/ctl1/events.jsonl", 0)
        words = [str(event.fields["reason"]) for event in found if event.kind == "health.warn"]
        return [reason for reason in words if "agent_lost" in reason]


def _parent(pid: int) -> int | None:
    """None: it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _is_guard(pid: int, cluster: DevCluster) -> bool:
    try:
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        return program.endswith(b"/sluice-guard") and Path(f"/proc/{pid}/ns/pid").samefile(
            f"/proc/{init_pid(cluster.layout)}/ns/pid"
        )
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster], bed: Bed) -> DevCluster:
    cluster = make_shared_cluster(
        {
            **bed.description,
            "nodes": [{"names": NODE, "platform": "dgx-h100"}],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "controllerd": True,
            "users": [{"name": "alice"}],
            "slurm_conf": "DefMemPerCPU=100\nKillWait=2\n",
        },
        **bed.options,
    )
    policy = f"enforcement: {{unwatched: {BOUND_S}s}}\nhealth: {{mode: shadow, interval: 1s}}\n"
    write_atomic(cluster.layout.slurm / FILE_NAME, compile_node(parse(policy)).render())
    return cluster


@pytest.fixture
def site(cluster: DevCluster) -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    made = Site(cluster, folder)
    cluster.stop_daemon(AGENT)
    made.run("rm", "-f", "/run/sluice/agent/guard", node=NODE)  # deaths in other tests are not this one's
    before = cluster.log(AGENT).read_text().count(READY)
    cluster.start_daemon(AGENT)
    until(lambda: cluster.log(AGENT).read_text().count(READY) > before)
    yield made
    made.run("scancel", "--full", "--user=alice", check=False)
    until(lambda: not made.run("squeue", "-h").strip())
    made.run("scontrol", "update", f"nodename={NODE}", "state=resume", check=False)
    cluster.wait_idle(timeout=PATIENCE)
    shutil.rmtree(folder)


def test_an_agent_that_is_killed_is_back_before_an_escaped_job_has_more_than_a_moment(site: Site) -> None:
    job = site.submit(more=60, escape=True)
    before, warned = site.last(), len(site.warnings())
    site.kill()
    (site.folder / "now").touch()
    [outage] = until(lambda: site.deaths(before))
    assert outage.cause == "signal-9" and outage.lasted is not None and outage.lasted < BOUND_S
    [end] = site.details(job, "end")
    assert end["charged"] > 60 << 30 and end["limit"] == 4 << 30
    [unwatched] = site.unwatched(job, outage)
    assert not unwatched["frozen"]
    assert unwatched["seconds"] == pytest.approx(outage.lasted, abs=0.1)
    until(lambda: any("the node agent was lost (signal-9)" in one for one in site.warnings()[warned:]))


def test_a_job_is_frozen_while_the_agent_is_stopped_and_continues_after(site: Site) -> None:
    job = site.submit()
    before = site.last()
    agent = site.kill(signal.SIGSTOP)
    began = time.monotonic()
    [outage] = until(lambda: [one for one in site.outages() if one.number > before and one.frozen])
    assert BOUND_S - 1 < time.monotonic() - began < BOUND_S + 5
    assert outage.frozen == (job,) and outage.lasted is None
    until(lambda: site.age() > 1)
    [outage] = until(lambda: site.deaths(before))
    assert outage.cause == "hung"
    until(lambda: site.age() < 0.5, timeout=5)  # thawed with the next agent's first sample
    assert site.agent != agent
    site.run("scancel", "--full", str(job))
    [unwatched] = site.unwatched(job, outage)
    assert unwatched["frozen"] and unwatched["cause"] == "hung"
    state, reason = site.node_state().split(maxsplit=1)
    assert state.startswith(("idle", "mix", "comp")) and reason == "none"


def test_a_prolog_that_meets_a_hanging_agent_waits_for_the_next(site: Site) -> None:
    agent = site.kill(signal.SIGSTOP)
    job = site.submit()  # returns when it runs
    assert site.agent != agent
    assert "drain" not in site.node_state()
    site.run("scancel", "--full", str(job))


@pytest.mark.cgroup1
def test_a_frozen_job_can_be_ended(site: Site) -> None:
    job = site.submit()
    before = site.last()
    site.kill(signal.SIGSTOP)
    until(lambda: site.age() > 1)
    site.run("scancel", str(job))
    until(lambda: not site.run("squeue", "-h").strip())
    until(lambda: site.over(before))
    site.cluster.wait_idle(timeout=PATIENCE)
    assert "drain" not in site.node_state()


def test_the_third_death_over_one_job_holds_that_job_and_spares_the_node(site: Site) -> None:
    job = site.submit("--requeue")
    site.die_over(job, deaths=3)
    requeued = until(lambda: shown(site.cluster, job), lambda seen: seen["JobState"] == "PENDING")
    assert requeued["Reason"] == "job_requeued_in_held_state"
    assert "died 3 times within a minute" in site.run("scontrol", "show", "job", str(job))
    assert "drain" not in site.node_state()
    [suspect] = site.details(job, "suspect")
    assert "died 3 times within a minute" in suspect["why"]
    log = site.cluster.log(AGENT).read_text()
    assert f"action=suspects jobs={job} deaths=" in log


def test_deaths_over_nobodys_data_drain_the_node(site: Site) -> None:
    site.die_over(0, deaths=3)
    until(lambda: "drain" in site.node_state())
    assert "sluice: the node agent died 3 times within a minute (signal-11, signal-11, signal-11)" in site.node_state()
