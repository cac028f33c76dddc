"""Nodes and hosts that vanish, do not answer, are suspended or have no space, under the supervisor and the journal."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.chaos.cluster import LEASE_S, TIMEOUT_S
from dev_cluster.chaos.driver import SCRIPT
from dev_cluster.chaos.faults import Faults
from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ADDRESSES
from dev_cluster.layout import INSIDE
from policy.compiled import CompiledPolicy, Global
from policy.document import parse
from policy.node import FILE_NAME, compile_node
from sluice.base.files import write_atomic
from tests.integration.jobs import sbatch, shown
from tests.integration.settled import PATIENCE, await_health, let_it_save, start_again, until

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3", "n4")
NODE_ADDRESSES = {node: f"127.1.0.{number}" for number, node in enumerate(NODES, 1)}
SILENT_S = 8
"""SlurmdTimeout."""


class Site:
    """The cluster, its faults, and jobs that write down what happens to them."""

    def __init__(self, cluster: DevCluster, faults: Faults) -> None:
        self.cluster = cluster
        self.faults = faults
        self.work = cluster.folder / "work"
        self.inside = INSIDE / self.work.name
        self.work.mkdir()
        (self.work / "runs").mkdir()
        (self.work / "job.sh").write_text(SCRIPT)
        for path in (self.work / "runs", self.work / "job.sh"):
            path.chmod(0o777)

    # ---- jobs ----

    def submit(self, tag: str, *options: str, seconds: float = 600) -> str:
        """A job that writes to runs/TAG.x when it begins and ends."""
        script = (str(self.inside / "job.sh"), tag, f"{seconds:g}")
        export = f"--export=SLUICE_RUNS={self.inside / 'runs'}"
        return sbatch(self.cluster, export, *options, *script, env=self.faults.environment)

    def ran(self, tag: str) -> list[tuple[str, str]]:
        """What a job said, and on which node."""
        path = self.work / "runs" / f"{tag}.x"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(line[0], line[2]) for line in lines]

    def job(self, job: str) -> dict[str, str]:
        return shown(self.cluster, job, env=self.faults.environment)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def clear(self) -> None:
        self.run("bash", "-c", "squeue -h -o %A | sort -u | xargs -r scancel")
        self.wait(lambda: not self.run("squeue", "-h").strip())

    # ---- what is ----

    def call(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A command that connections may be cut for, too."""
        return self.cluster.run(command, env=self.faults.environment, **options)

    def run(self, *command: str, node: str = "login", check: bool = True) -> str:
        return self.call(list(command), node=node, check=check).stdout

    def serves(self) -> bool:
        """Whether users are answered."""
        return self.call(["squeue", "-h"], check=False).returncode == 0

    def node_state(self, node: str) -> str:
        return self.run("sinfo", "-h", "-n", node, "-o", "%T").strip()

    def lease(self) -> dict[str, str]:
        text = (self.cluster.layout.state / "sluice.lease").read_text()
        return dict(line.split(" ", 1) for line in text.splitlines())

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Of both controllers' daemons."""
        found = []
        for host in ("ctl1", "ctl2"):
            path = self.cluster.folder / "controllerd" / host / "events.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            found += [one for line in lines if (one := json.loads(line))["kind"] == f"health.{kind}"]
        return found

    def wait(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
        queue, nodes = ("squeue", "-a", "-t", "all"), ("sinfo", "-N", "-l")
        until(
            condition,
            timeout=seconds,
            shows=lambda: (
                self.run(*queue, check=False),
                self.run(*nodes, check=False),
                self.cluster.log_tail("slurmctld@ctl1", 30),
            ),
        )

    def ended(self, daemon: str) -> bool:
        return next(one for one in self.cluster.daemons() if one.name == daemon).status is not None

    def let_it_save(self) -> None:
        """Until slurmctld has written its state and been still for a while: nothing is about to be written then."""
        let_it_save(self.cluster)

        def newest() -> float:
            own = (".sluice", "sluice.", "heartbeat")
            return max(
                one.stat().st_mtime for one in self.cluster.layout.state.iterdir() if not one.name.startswith(own)
            )

        until(newest, lambda written: time.time() - written > 2)

    def all_led_by_the_primary(self) -> None:
        """Both controllers up, the primary in charge, all nodes idle."""
        if self.ended("slurmctld@ctl1"):
            self.wait(self.serves)
            self.cluster.start_daemon("slurmctld@ctl1")
        self.wait(lambda: self.lease()["host"] == "ctl1" and self.lease()["state"] == "held")
        up = "ctl1 is UP", "ctl2 is UP"
        self.wait(lambda: all(word in self.run("scontrol", "ping", check=False) for word in up))
        self.wait(lambda: {one.state for one in self.cluster.node_states()} == {"idle"})

    # ---- faults ----

    @contextmanager
    def parted(self, *sides: tuple[str, ...]) -> Iterator[None]:
        """No connection from a host of one side to one of the other."""
        addresses = {**ADDRESSES, **NODE_ADDRESSES}
        with ExitStack() as stack:
            for side, others in (sides, sides[::-1]):
                for host in side:
                    stack.enter_context(self.faults.on(f"cut.{host}", "".join(addresses[h] + "\n" for h in others)))
            yield

    def processes_of(self, host: str) -> list[int]:
        """Of everything that runs on a host, as the cluster numbers them."""
        own = self.run("readlink", "/proc/self/ns/uts", node=host).strip()
        find = (
            "import os, pathlib\n"
            "for one in pathlib.Path('/proc').glob('[0-9]*'):\n"
            "    try:\n"
            f"        if os.readlink(one / 'ns/uts') == {own!r} and int(one.name) != os.getpid(): print(one.name)\n"
            "    except OSError: pass\n"
        )
        return [int(line) for line in self.run("/usr/bin/python3", "-I", "-c", find).split()]

    def send(self, pids: list[int], number: int) -> None:
        """To processes of the cluster, as nearly at once as can be."""
        words = " ".join(map(str, pids))
        self.run("bash", "-c", f"kill -{number} {words}", check=False)


def policy() -> str:
    """What nodes and controllers' daemons read; short times, so that the tests are."""
    return compile_node(
        parse(
            "health: {interval: 1s, passes: 2, checks: {driver: {window: 2s}}}\n"
            "checkpoint: {backoff: 2s, silent_wait: 10m, before_requeue: 1s}\n"
        )
    ).render()


@pytest.fixture(scope="module")
def shared(make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    place = Path(tempfile.mkdtemp(prefix="sluice-faults-"))
    try:
        faults = Faults(place, power=False)
        cluster = make_shared_cluster(
            {
                "nodes": [{"names": "n[1-4]", "platform": "dgx-h100"}],
                "users": [{"name": "alice"}],
                "accounting": False,
                "agent": True,
                "controllerd": True,
                "slurm_conf": f"SlurmctldTimeout={TIMEOUT_S}\nSlurmdTimeout={SILENT_S}\nReturnToService=1\n"
                "MessageTimeout=10\nDefMemPerCPU=10\nMinJobAge=600\nUnkillableStepTimeout=10\n"
                "SchedulerParameters=bf_interval=2,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,"
                "nohold_on_prolog_fail\n",
                "sluice": {
                    "level": "place",
                    "policy": CompiledPolicy(settings=Global(placement="sluice", planner_interval_ms=500)).render(),
                    "journal": True,
                    "supervise": True,
                    "lease": LEASE_S,
                    "environment": faults.environment,
                    "node_environment": faults.environment,
                },
            }
        )
        write_atomic(cluster.layout.slurm / FILE_NAME, policy())
        yield Site(cluster, faults)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    shared.all_led_by_the_primary()
    yield shared
    if shared.ended("slurmctld@ctl1"):
        shared.cluster.start_daemon("slurmctld@ctl1")
    shared.wait(shared.serves)
    shared.clear()


def paused(
    site: Site, host: str, *, clock_stands: bool, at_least_s: float
) -> tuple[float, list[tuple[float, str, str]]]:
    """Stop all of a controller's host, cut off like a suspended machine, until the other one serves; then continue it.

    Milliseconds after which it had ended, and what it still wrote into the state folder: milliseconds, call, file.
    """
    trace = site.faults.folder / "trace"
    trace.touch()
    trace.chmod(0o666)
    others = ("ctl2", "login", *NODES)
    begun = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(site.parted((host,), others))
        pids = site.processes_of(host)
        site.send(pids, signal.SIGSTOP)
        try:
            site.wait(lambda: site.lease()["host"] == "ctl2" and site.serves())
            time.sleep(max(0.0, at_least_s - (time.monotonic() - begun)))
            site.submit("meanwhile", "-w", "n2", seconds=0)
            if clock_stands:
                lacks = str(-round(time.monotonic() - begun) - 1)
                (site.faults.folder / f"boottime.{host}").write_text(lacks)
        finally:
            woke = time.monotonic()
            site.send(sorted(pids), signal.SIGCONT)
    site.wait(lambda: site.ended(f"slurmctld@{host}"))
    took = time.monotonic() - woke
    (site.faults.folder / f"boottime.{host}").unlink(missing_ok=True)
    lines = [line.split(" ", 3) for line in trace.read_text().splitlines()]
    trace.unlink()
    late = [
        (float(at) - woke * 1000, call, path.removeprefix(f"{INSIDE}/state/"))
        for at, by, call, path in lines
        if by == host
    ]
    return took * 1000, [one for one in late if one[0] >= 0]


def test_a_suspended_host_writes_no_state_when_it_continues(site: Site, full_scale: bool) -> None:
    """Supervisor, slurmctld and daemon of the leader stop at once, until the backup leads; then they go on."""
    kinds = [False, False, True] * 5 if full_scale else [False]
    for turn, clock_stands in enumerate(kinds):
        if turn:
            site.all_led_by_the_primary()
        job = site.submit(f"beside{turn}", "-w", "n1")
        site.wait(lambda job=job: site.state(job) == "RUNNING")  # type: ignore[misc]
        site.let_it_save()
        began, epoch = site.job(job)["StartTime"], int(site.lease()["epoch"])
        took, late = paused(site, "ctl1", clock_stands=clock_stands, at_least_s=2 * TIMEOUT_S if full_scale else 0)
        state = [one for one in late if not one[2].startswith((".sluice", "sluice.", "heartbeat"))]
        clock = "stood still" if clock_stands else "went on"
        print(f"clock {clock}: ended after {took:.0f} ms, wrote {len(late)} times: {late}")
        if not clock_stands:  # else only the lease's file tells it: docs/failover.md, The remaining window
            assert state == []
        assert (site.lease()["host"], int(site.lease()["epoch"])) == ("ctl2", epoch + 1)
        site.wait(lambda: site.ran("meanwhile")[-1:] == [("end", "n2")])  # what the new leader took in is there
        assert (site.state(job), site.job(job)["StartTime"], site.job(job)["Restarts"]) == ("RUNNING", began, "0")
        (site.work / "runs/meanwhile.x").unlink()
        site.clear()


def test_a_gap_of_the_clock_ends_the_leader(site: Site) -> None:
    """A suspended machine: CLOCK_BOOTTIME has gone on, and nothing else shows that time has passed."""
    began = time.monotonic()
    with site.faults.on("boottime.ctl1", str(2 * TIMEOUT_S)):
        site.wait(lambda: site.ended("slurmctld@ctl1"))
        took = time.monotonic() - began
    assert took < LEASE_S  # the gap, not a renewal that was missed
    words = site.cluster.log_tail("slurmctld@ctl1", 10)
    assert "the lease lapsed" in words or "was not renewed for" in words
    site.cluster.start_daemon("slurmctld@ctl1")  # at once, as systemd does
    site.wait(lambda: (site.lease()["host"], site.lease()["state"]) == ("ctl1", "held"))


def test_half_of_the_nodes_are_cut_off_and_one_of_them_loses_power(site: Site, full_scale: bool) -> None:
    """With the backup there, for longer than SlurmdTimeout: nodes are given up while one of them goes on. Each job as
    the policy says; of a gang's members, which are jobs of their own once they run, the one that was hit."""
    epoch, before = site.lease()["epoch"], len(site.events("requeue"))
    gang = [site.submit(f"gang{n}", "--gang=train:2", "-N1", "--gres=gpu:8", "--requeue") for n in range(2)]
    site.wait(lambda: all(site.ran(f"gang{n}") for n in range(2)))
    beside, lost = (site.job(job)["NodeList"] for job in gang)
    spare, cut = sorted({*NODES} - {beside, lost})
    near = f"{beside},{spare}"
    jobs = {
        "kept": site.submit("kept", "-w", beside, "--requeue"),
        "allowed": site.submit("allowed", "-x", near, "--requeue"),
        "several": site.submit("several", "-N2", "-x", near, "--requeue"),  # may go nowhere else afterwards
        "refused": site.submit("refused", "-w", cut, "--no-requeue"),
        "ends": site.submit("ends", "-w", cut, "--no-requeue", seconds=12),
    }
    hit = {"gang1": gang[1], "allowed": jobs["allowed"], "several": jobs["several"]}
    site.wait(lambda: all(site.ran(tag) for tag in jobs))
    await_health(site.cluster)  # it has seen who runs where
    with site.parted(("ctl1", beside, spare), ("ctl2", lost, cut)):
        site.send(site.processes_of(lost), signal.SIGKILL)
        during = site.submit("during", "-w", spare, seconds=0)
        site.wait(lambda: all("down" in site.node_state(node) for node in (lost, cut)))
        detected = time.monotonic()
        site.wait(lambda: {str(one["job"]) for one in site.events("requeue")[before:]} >= {*hit.values()}, 60)
        site.wait(lambda: site.state(jobs["refused"]) == "NODE_FAIL", 60)
        assert time.monotonic() - detected < 60
        site.wait(lambda: site.state(during) == "COMPLETED")
        assert {site.state(job) for job in hit.values()} == {"PENDING"}
        assert site.job(jobs["allowed"])["ExcNodeList"] not in ("(null)", near)
        assert (site.lease()["host"], site.lease()["epoch"]) == ("ctl1", epoch)
    for daemon in (f"agent@{lost}", f"slurmd@{lost}"):
        site.cluster.start_daemon(daemon)
    if not full_scale:  # Slurm itself asks a node that is down at every twentieth ping only
        pid = next(one.pid for one in site.cluster.daemons() if one.name == f"slurmd@{cut}")
        site.send([pid], signal.SIGHUP)
    site.wait(lambda: not any("down" in site.node_state(node) for node in (lost, cut)), 120)
    site.wait(lambda: not site.run("pgrep", "-f", f"nodes/{cut}/spool/job.*/slurm_script", check=False))  # ended there
    site.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)  # what was decided is in the journal
    site.cluster.start_daemon("slurmctld@ctl1")
    site.wait(site.serves)
    assert {site.state(job) for job in hit.values()} == {"PENDING"}  # as long as the policy says
    start_again(site.cluster, *hit.values(), env=site.faults.environment)
    site.wait(lambda: all(site.state(job) == "RUNNING" for job in hit.values()))
    for tag, job in hit.items():
        site.wait(lambda tag=tag: len(site.ran(tag)) == 2)  # type: ignore[misc]
        assert [what for what, _ in site.ran(tag)] == ["start", "start"]  # "twice": the first one still ran
        assert site.job(job)["Restarts"] == "1"
    for tag, job in (("kept", jobs["kept"]), ("gang0", gang[0])):
        assert (site.state(job), site.job(job)["Restarts"], site.ran(tag)) == ("RUNNING", "0", [("start", beside)])
    assert (site.state(jobs["refused"]), site.ran("refused")) == ("NODE_FAIL", [("start", cut)])
    assert site.state(jobs["ends"]) in ("COMPLETED", "NODE_FAIL")  # it ended while nobody heard of it
    assert [what for what, _ in site.ran("ends")] == ["start", "end"]
    assert sorted(str(one["job"]) for one in site.events("requeue")[before:]) == sorted(hit.values())  # each once


def test_a_full_disk_of_a_node_takes_no_jobs_and_comes_back_by_itself(site: Site, full_scale: bool) -> None:
    """slurmd's spool and the agent's, then /run: clear reasons, nothing half written, and no hands afterwards."""
    own = f"{INSIDE}/nodes/n2"
    for daemon in ("slurmd@n2", "agent@n2"):
        site.cluster.stop_daemon(daemon)
    small = (
        f"mkdir /run/kept && cp -a {own}/. /run/kept && mount -t tmpfs -o size=64m,mode=755 tmpfs {own} && "
        f"cp -a /run/kept/spool {own} && rm -r /run/kept && mount -o remount,size=64m /run"
    )
    site.run("sh", "-c", small, node="n2")
    agent = site.cluster.log("agent@n2")
    ready = agent.read_text().count("action=ready")
    for daemon in ("agent@n2", "slurmd@n2"):
        site.cluster.start_daemon(daemon)
    site.wait(lambda: agent.read_text().count("action=ready") > ready)
    site.wait(lambda: site.node_state("n2") == "idle")
    for folder in (own, "/run") if full_scale else (own,):
        tag = "disk" if folder == own else "run"
        before = site.submit(f"{tag}-before", "-w", "n2", "--gres=gpu:1", seconds=4)
        site.wait(lambda tag=tag: site.ran(f"{tag}-before"))  # type: ignore[misc]
        site.run("dd", "if=/dev/zero", f"of={folder}/fill", "bs=4k", node="n2", check=False)
        after = site.submit(f"{tag}-after", "-w", "n2", "--gres=gpu:1", seconds=0)  # met it, or waits for the node
        site.wait(lambda: "drain" in site.node_state("n2"))
        site.wait(lambda before=before: site.state(before) == "COMPLETED")  # type: ignore[misc]
        why = site.run("sinfo", "-h", "-n", "n2", "-o", "%E")  # who was first: slurmd, the prolog, or the check
        words = site.cluster.log("slurmd@n2").read_text()
        slurmd_said = why.startswith("SlurmdSpoolDir is full") and folder == own
        assert slurmd_said or f"spool: {folder}" in why or f"no room in {folder}" in words, why
        site.run("rm", f"{folder}/fill", node="n2")
        site.wait(lambda: site.node_state("n2") == "idle")
        assert site.job(after)["Priority"] != "0"  # not held; Slurm keeps what it requeued for two minutes
        site.run("scontrol", "update", f"JobId={after}", "StartTime=now+2", check=False)
        site.wait(lambda after=after: site.state(after) == "COMPLETED")  # type: ignore[misc]
        assert [what for what, _ in site.ran(f"{tag}-before")] == ["start", "end"]
        assert [what for what, _ in site.ran(f"{tag}-after")] == ["start", "end"]
        read = (  # what is sent just now goes
            "import json, pathlib\n"
            f"for one in pathlib.Path('{own}').glob('*/*.json'):\n"
            "    try: text = one.read_text()\n"
            "    except FileNotFoundError: continue\n"
            "    json.loads(text)\n"
        )
        site.run("/usr/bin/python3", "-I", "-c", read, node="n2")  # whole, or not there at all
        record = f"{own}/records/{before}.json"
        site.wait(lambda record=record: site.run("ls", record, node="n2", check=False))  # type: ignore[misc]
        half = f"ls -A {own}/records {own}/outbox | grep ^[.]"
        site.wait(lambda half=half: not site.run("sh", "-c", half, node="n2", check=False))  # type: ignore[misc]
