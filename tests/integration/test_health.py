"""Faults on real daemons: found on nodes of three vendors, drained, jobs started again, and back in service."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import set_values
from policy.document import parse
from policy.node import FILE_NAME, compile_node
from sluice.base import events
from sluice.base.files import write_atomic
from sluice.base.hostlist import expand
from sluice.controllerd.health import withdrawn
from sluice.controllerd.preflight_restarts import FIRST_FILE
from tests.integration.jobs import shown, submit
from tests.integration.settled import await_health, until

pytestmark = pytest.mark.cluster

# Windows and rounds are short, so that the test is; what is counted and compared is as by default.
FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
INTERVAL, COUNTED = ("5s", "60s") if FULL else ("1s", "8s")
"""Between two rounds of a node; how long errors count. 128 agents have two cores here."""
HOSTS = {"h": 112, "m": 8, "x": 8} if FULL else {"h": 3, "m": 1, "x": 1}
PATIENCE = 300 if FULL else 120
CHECKS = {
    "temperature": "window: 0s",
    "temperature_memory": "window: 0s",
    "power": "window: 0s",
    "pcie_width": "window: 0s",
    "throttle_thermal": "window: 3s",
    "throttle_power": "window: 3s",
    "residual_memory": "window: 0s",
    "driver": "window: 2s",
    "xid": f"window: {COUNTED}",
    "ecc_uncorrected": f"window: {COUNTED}",
    "stray_process": "window: 0s",
}
Fault = tuple[dict[str, str], dict[str, str], str]
"""What is set, what mends it, and the check that finds it."""
NVIDIA: list[Fault] = [
    ({"xid": "79"}, {}, "xid"),
    ({"ecc_uncorrected": "1"}, {}, "ecc_uncorrected"),
    ({"remap_failed": "yes"}, {"remap_failed": "no"}, "row_remap_failed"),
    ({"remap_pending": "yes"}, {"remap_pending": "no"}, "row_remap_pending"),
    ({"temperature": "96"}, {"temperature": "35"}, "temperature"),
    ({"link3": "down"}, {"link3": "up"}, "link_down"),
    ({"lost": "yes"}, {"lost": "no"}, "gpu_lost"),
    ({"memory_used": "10G"}, {"memory_used": "0"}, "residual_memory"),
    ({"temperature_memory": "106"}, {"temperature_memory": "39"}, "temperature_memory"),
]
AMD: list[Fault] = [
    ({"ecc_uncorrected": "1"}, {}, "ecc_uncorrected"),
    ({"temperature": "97"}, {"temperature": "40"}, "temperature"),
    ({"temperature_memory": "106"}, {"temperature_memory": "48"}, "temperature_memory"),
    ({"lost": "yes"}, {"lost": "no"}, "gpu_lost"),
    ({"memory_used": "10G"}, {"memory_used": "0"}, "residual_memory"),
    ({"retired_double": "64"}, {"retired_double": "0"}, "retired_pages"),
    ({"retired_pending": "yes", "retired_single": "1"}, {"retired_pending": "no"}, "row_remap_pending"),
]
INTEL: list[Fault] = [
    ({"temperature": "96"}, {"temperature": "40"}, "temperature"),
    ({"ecc_uncorrected": "2"}, {}, "ecc_uncorrected"),
    ({"lost": "yes"}, {"lost": "no"}, "gpu_lost"),
    ({"memory_used": "10G"}, {"memory_used": "0"}, "residual_memory"),
]
GPUS = {"h": 8, "m": 8, "x": 4}
HIT = {"xid", "ecc_uncorrected", "gpu_lost"}
"""Checks whose findings requeue jobs."""


class Site:
    """The cluster, and what is asked of it again and again."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.since = 0
        """The last event before the test."""

    def policy(self, breaker: str = "{share: 100}", more: str = "") -> None:
        """As `sluice apply` writes it."""
        checks = ", ".join(f"{name}: {{{words}}}" for name, words in CHECKS.items())
        text = (
            f"health: {{interval: {INTERVAL}, passes: 2, breaker: {breaker}, checks: {{{checks}}}}}\n"
            "checkpoint: {backoff: 2s, before_requeue: 1s, before_time_limit: 10m}\n"
            "monitoring: {running: 5s}\n" + more
        )
        write_atomic(self.cluster.layout.slurm / FILE_NAME, compile_node(parse(text)).render())

    def run(self, *command: str, node: str = "login", check: bool = True) -> str:
        return self.cluster.run(list(command), node=node, check=check).stdout

    def health(self, *words: str) -> str:
        return self.run("sluice", "health", *words)

    def set(self, node: str, gpu: int, **values: str) -> None:
        set_values(self.cluster.layout.gpu_sim(node), gpu, values)

    def rows(self) -> list[dict[str, Any]]:
        return list(json.loads(self.health("list", "--json"))["rows"])

    def out(self) -> dict[tuple[str, str], str]:
        """GPUs out of service and nodes drained, with the check that their reason names."""
        found = {}
        for row in self.rows():
            if row["state"] in ("out", "drained"):
                assert row["reason"].startswith("sluice: ")
                found[(row["node"], row["gpu"])] = row["reason"].split()[1].rstrip(":")
        return found

    def out_by_events(self) -> dict[tuple[str, str], str]:
        """Which GPUs were ever taken out, and for which check, as the events have it (the list is cut off)."""
        path = self.cluster.folder / "controllerd/ctl1/events.jsonl"
        found = {}
        for event in events.read(path, self.since):
            if event.kind == "health.out":
                for gpu in event.fields["gpus"]:
                    found[(str(event.fields["node"]), str(gpu))] = str(event.fields["reason"]).split()[1]
        return found

    def told(self, kind: str) -> list[events.Event]:
        """All events of a kind since the test began."""
        known = events.read(self.cluster.folder / "controllerd/ctl1/events.jsonl", self.since)
        return [one for one in known if one.kind == kind]

    def states(self) -> dict[str, str]:
        """By job."""
        rows = self.run("squeue", "-h", "-a", "-t", "all", "-o", "%A %T").splitlines()
        return dict(row.split() for row in rows)

    def withdrawn(self) -> list[withdrawn.Gpu]:
        """What the placement hook reads."""
        return withdrawn.read(self.cluster.layout.state / withdrawn.FILE_NAME)

    def await_hook(self, count: int) -> None:
        """Wait until slurmctld has read that so many GPUs are out of service, which it looks for twice a second."""
        log = self.cluster.log("slurmctld@ctl1")
        said = re.compile(r"sluice: (\d+) GPUs are out of service")
        self.wait(lambda: said.findall(log.read_text(errors="replace"))[-1:] == [str(count)])

    def submit(self, *options: str, script: str = "exec sleep 600") -> str:
        return submit(self.cluster, *options, wrap=script, user="root")

    def job(self, job: str) -> dict[str, str]:
        return shown(self.cluster, job)

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def explain(self, job: str) -> dict[str, Any]:
        return dict(json.loads(self.run("sluice", "explain", job, "--json")))

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        log = self.cluster.log_tail
        until(
            condition,
            timeout=seconds,
            shows=lambda: (self.health("list"), self.run("squeue"), log("controllerd@ctl1", 20)),
        )

    def all_reported(self) -> bool:
        """Whether a report of each node has come."""
        done = self.cluster.run(["sluice", "health", "list", "--json"], check=False)
        return done.returncode == 0 and len(expand(json.loads(done.stdout)["healthy"] or "x")) == sum(HOSTS.values())

    def run_until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """As `wait`, while the controllers' daemon cannot be asked."""
        until(condition, timeout=seconds, shows=lambda: (self.run("squeue"), self.run("sinfo", "-R")))

    def events(self, kind: str, node: str = "") -> list[dict[str, Any]]:
        found = json.loads(self.health("history", "--json"))["events"]
        return [one for one in found if one["kind"] == f"health.{kind}" and node in ("", one["node"])]

    def clear(self) -> None:
        self.run("bash", "-c", "squeue -h -o %A | xargs -r scancel")
        self.wait(lambda: not self.run("squeue", "-h").strip())


@pytest.fixture(scope="module")
def shared(make_shared_cluster: Callable[..., DevCluster]) -> Site:
    return Site(
        make_shared_cluster(
            {
                "nodes": [
                    {"names": f"{kind}[1-{HOSTS[kind]}]", "platform": platform}
                    for kind, platform in (("h", "dgx-h100"), ("m", "mi300x-platform"), ("x", "intel-max-1550x4"))
                ],
                "controllers": 1,
                "accounting": False,
                "agent": True,
                "controllerd": True,
                "explaind": True,
                "partitions": [
                    {"name": "main", "options": "PriorityTier=1 GraceTime=60"},
                    {"name": "urgent", "options": "PriorityTier=10"},
                ],
                "slurm_conf": "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
                "SlurmctldParameters=preempt_send_user_signal\nDefMemPerCPU=100\nSlurmdTimeout=8\nReturnToService=1\nUnkillableStepTimeout=10\n"
                "SchedulerParameters=bf_interval=2,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,"
                "nohold_on_prolog_fail\nHealthCheckProgram=/run/sluice-cluster/programs/sluice-health\n"
                "HealthCheckInterval=20\n",
                "sluice": {"level": "place", "policy": "[global]\nplacement = sluice\n"},
            }
        )
    )


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    shared.policy()
    shared.run_until(shared.all_reported)
    known = events.read(shared.cluster.folder / "controllerd/ctl1/events.jsonl")
    shared.since = known[-1].seq if known else 0
    yield shared
    shared.clear()
    shared.wait(lambda: not shared.out())


def test_one_gpu_of_eight_goes_out_and_returns_while_other_jobs_continue(site: Site) -> None:
    beside = site.submit("-w", "h1", "--gres=gpu:7")
    site.wait(lambda: site.state(beside) == "RUNNING")
    free = site.run("scontrol", "-d", "show", "job", beside)
    (idle,) = set(range(8)) - set(_indices(free))
    site.set("h1", idle, temperature="96")
    site.wait(lambda: site.out() == {("h1", str(idle)): "temperature"})
    site.await_hook(1)
    waiting = site.submit("-w", "h1", "--gres=gpu:1")
    why = site.health("why", "h1")
    assert f"GPU {idle} is out" in why and "96 degrees" in why and "2 bring it back" in why
    checked = site.cluster.run(["sluice", "health", "check"], node="h1", check=False)
    assert checked.returncode == 2 and f"CRITICAL: temperature GPU {idle}: 96 degrees" in checked.stdout
    assert site.cluster.run(["sluice", "health", "check"], node="h2", check=False).returncode == 0
    assert site.state(beside) == "RUNNING" and site.state(waiting) == "PENDING"
    site.cluster.stop_daemon("controllerd@ctl1")  # what is out stays out, and who took it out remembers
    site.cluster.start_daemon("controllerd@ctl1")
    site.set("h1", idle, temperature="35")
    site.wait(lambda: site.state(waiting) == "RUNNING")
    assert site.out() == {}
    assert [one["gpus"] for one in site.events("return", "h1")] == [[idle]]
    assert not site.events("drain")


def install_perftest(site: Site, **slow: float) -> None:
    """On all hosts a stand-in for perftest, by which these are slow, in GB/s."""
    folder = site.cluster.folder / "programs/perftest"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / "speeds.json", json.dumps(slow))
    (folder / "speeds.json").chmod(0o644)
    for name in ("ib_write_bw", "ib_write_lat"):
        if not (folder / name).exists():
            shutil.copy(Path(__file__).with_name("stand_in_perftest.py"), folder / name)
            for node in ("h1", "h2", "h3", "m1"):
                site.run("mount", "--bind", str(INSIDE / "programs/perftest"), "/usr/local/bin", node=node)


def test_a_slow_link_is_found_before_the_job_starts_and_the_job_starts_elsewhere(site: Site) -> None:
    install_perftest(site, h3=11.0)
    site.policy(more="preflight: {when: always, least: 30, bound: 30s, gpus: false}\n")
    job = site.submit("-N3", "-x", "m1,x1", "--gres=gpu:1")
    site.wait(lambda: site.job(job)["Restarts"] == "1")
    site.run("scontrol", "update", f"JobId={job}", "ExcNodeList=x1")  # m1 takes h3's place
    reason = ["sinfo", "-h", "-n", "h3", "-o", "%E"]
    said = until(lambda: site.run(*reason).strip(), lambda said: said != "none")
    assert said.startswith("sluice: fabric_link: node h3's link mlx5_") and "slow: 11 of 30 GB/s" in said
    site.wait(lambda: len(preflights(site, job)) == 2 and site.state(job) == "RUNNING")
    first, second = preflights(site, job)
    assert (first["verdict"], [one["node"] for one in first["at_fault"]]) == ("fault", ["h3"])
    assert (second["verdict"], second["nodes"]) == ("good", "h[1-2],m1")
    assert first["at"] < first["requeued_at"] < first["released_at"] < second["at"] < first["at"] + 60
    assert "starts on other nodes than h3" in site.run("sluice", "explain", job)
    [again] = site.told("fabric.preflight-requeue")
    assert (again.fields["job"], again.fields["node"]) == (int(job), "h3")
    [told] = verdicts(site, job, "h1")
    assert "slow: 11 of 30 GB/s" in told
    site.clear()
    install_perftest(site)
    site.run("scontrol", "update", "nodename=h3", "state=resume")
    mended = site.submit("-N3", "-x", "m1,x1", "--gres=gpu:1")
    site.wait(lambda: [one["verdict"] for one in preflights(site, mended)] == ["good"])
    site.wait(lambda: site.state(mended) == "RUNNING")
    site.wait(lambda: site.out() == {})


def test_an_idle_node_says_which_of_two_nodes_is_at_fault_and_takes_its_place(site: Site) -> None:
    install_perftest(site, h1=11.0)
    site.policy(more="preflight: {when: always, least: 30, bound: 40s, gpus: false}\n")

    def tested() -> str:
        """A job of two nodes of which one was found at fault; none where h2 did not stand by yet."""
        job = site.submit("-N2", "-x", "h2,m1,x1", "--gres=gpu:1")
        site.wait(lambda: len(preflights(site, job)) == 1)
        [first] = preflights(site, job)
        assert "with idle h2" in first["text"] or first["verdict"] == "undecided", first
        if first["verdict"] == "fault":
            return job
        site.clear()
        return ""

    job = until(tested, timeout=PATIENCE)
    site.wait(lambda: site.job(job)["Restarts"] == "1")
    site.run("scontrol", "update", f"JobId={job}", "ExcNodeList=m1,x1")
    site.wait(lambda: len(preflights(site, job)) == 2 and site.state(job) == "RUNNING")
    first, second = preflights(site, job)
    assert [one["node"] for one in first["at_fault"]] == ["h1"]
    assert (second["verdict"], second["nodes"]) == ("good", "h[2-3]")
    assert site.run("sinfo", "-h", "-n", "h1", "-o", "%E").startswith("sluice: fabric_link: node h1's link mlx5_")
    install_perftest(site)
    site.policy()


def test_a_gpu_that_copies_slowly_is_found_before_the_job_starts_and_the_job_starts_elsewhere(site: Site) -> None:
    """Rates that this machine reaches however busy it is."""
    for node in ("h1", "h2", "h3"):
        for gpu in range(GPUS["h"]):
            site.set(node, gpu, copy_host="800", copy_local="1000", copy_peer="1200")
    site.set("h2", 3, copy_host="150")
    site.policy(more="preflight: {when: always, bound: 30s}\n")
    job = site.submit("-N1", "-x", "h1,h3,m1,x1", "--gres=gpu:8")
    site.wait(lambda: site.job(job)["Restarts"] == "1")
    site.run("scontrol", "update", f"JobId={job}", "ExcNodeList=m1,x1")
    said = until(lambda: site.run("sinfo", "-h", "-n", "h2", "-o", "%E").strip(), lambda said: said != "none")
    assert re.fullmatch(r"sluice: fabric_gpu: node h2's PCIe of GPU 3 slow: 0\.1\d+ of 0\.\d+ GB/s.*", said), said
    site.wait(lambda: len(preflights(site, job)) == 2 and site.state(job) == "RUNNING")
    first, second = preflights(site, job)
    assert (first["verdict"], [one["node"] for one in first["at_fault"]]) == ("fault", ["h2"])
    assert (second["verdict"], second["nodes"] in ("h1", "h3")) == ("good", True)
    site.clear()
    site.set("h2", 3, copy_host="800")
    site.run("scontrol", "update", "nodename=h2", "state=resume")
    mended = site.submit("-N1", "-w", "h2", "--gres=gpu:8")
    site.wait(lambda: [one["verdict"] for one in preflights(site, mended)] == ["good"])
    site.wait(lambda: site.out() == {})
    site.clear()
    site.policy()


def test_a_job_that_a_killed_daemon_followed_waits_for_slurm_and_keeps_its_place_for_minutes_at_most(
    site: Site,
) -> None:
    install_perftest(site, h3=11.0)
    site.policy(more="preflight: {when: always, least: 30, bound: 30s, gpus: false}\n")
    job = site.submit("-N3", "-x", "m1,x1", "--gres=gpu:1")
    site.wait(lambda: site.job(job)["Restarts"] == "1")
    site.cluster.stop_daemon("controllerd@ctl1", number=signal.SIGKILL)
    leads = said_to_lead(site)
    site.cluster.start_daemon("controllerd@ctl1")
    site.wait(lambda: said_to_lead(site) > leads and site.state(job) == "PENDING")
    [found] = preflights(site, job)
    assert (found["verdict"], found["released_at"]) == ("fault", None)
    begins = datetime.fromisoformat(site.job(job)["EligibleTime"]).timestamp()
    (listed, until_s), *others = re.findall(r"(?m)^(\d+) (\d+)$", (site.cluster.layout.state / FIRST_FILE).read_text())
    assert (listed, others) == (job, []) and begins < int(until_s) <= found["at"] + 310
    assert begins > time.time() + 10  # Slurm's pause: nothing else would make the test see whether it was let start
    site.run("scontrol", "update", f"JobId={job}", "ExcNodeList=x1", "StartTime=now")
    site.wait(lambda: len(preflights(site, job)) == 2 and site.state(job) == "RUNNING")
    assert preflights(site, job)[1]["nodes"] == "h[1-2],m1"
    install_perftest(site)
    site.policy()  # what preflights found is no finding any more
    site.run("scontrol", "update", "nodename=h3", "state=resume")
    site.wait(lambda: site.out() == {})


def said_to_lead(site: Site) -> int:
    """How often the controllers' daemon took charge."""
    return site.cluster.log("controllerd@ctl1").read_text().count("ctl1 leads")


def preflights(site: Site, job: str) -> list[dict[str, Any]]:
    return list(site.explain(job).get("preflights", ()))


def verdicts(site: Site, job: str, node: str) -> list[str]:
    """Of the job's preflight, in the record of its last run that ended, on a node."""
    record = json.loads((site.cluster.node_folder(node) / f"records/{job}.json").read_text())
    return [one["detail"]["what"] for one in record["events"] if one["action"] == "preflight"]


def test_jobs_that_a_fault_hit_start_again_and_those_that_failed_by_themselves_do_not(site: Site) -> None:
    saved = site.cluster.folder / "scratch/saved"
    saves = "trap 'touch /run/sluice-cluster/scratch/saved' USR1; while :; do sleep 1 & wait $!; done"
    hit = site.submit("-w", "h1", "--gres=gpu:8", "--comment=sluice:checkpoint", script=saves)
    site.wait(lambda: site.state(hit) == "RUNNING")
    array = site.submit("--array=1-2", "--gres=gpu:8", "-x", "m1,x1,h1")
    after = site.submit("-d", f"afterok:{hit}", "--gres=gpu:1")
    failed = site.submit("--gres=gpu:1", "-w", "m1", script="exit 3")
    site.wait(lambda: site.state(f"{array}_1") == site.state(f"{array}_2") == "RUNNING")
    site.wait(lambda: site.state(failed) == "FAILED")
    site.set("h1", 2, xid="79")
    task, node = f"{array}_2", site.job(f"{array}_2")["NodeList"]
    site.set(node, 5, ecc_uncorrected="1")
    site.wait(lambda: {one["job"] for one in site.events("requeue")} >= {int(hit), int(site.job(task)["JobId"])})
    assert site.job(task)["ExcNodeList"] != "(null)" and node in site.job(task)["ExcNodeList"]
    assert site.job(task)["Restarts"] == "1" and site.job(f"{array}_1")["Restarts"] == "0"
    assert site.job(after)["JobState"] == "PENDING" and f"afterok:{hit}" in site.job(after)["Dependency"]
    assert site.state(failed) == "FAILED"
    assert saved.exists()  # it got its signal before it was requeued
    site.wait(lambda: site.state(hit) == "RUNNING")  # the GPU has passed its checks: it was asked for by name
    counts = [one["job"] for one in site.events("requeue")]
    assert sorted(counts) == sorted(set(counts))


def test_a_job_of_two_nodes_has_saved_when_both_say_so(site: Site) -> None:
    touch = 'srun --overlap --ntasks-per-node=1 sh -c "{} touch $SLUICE_CHECKPOINT_FILE"'
    one, all_of_them = touch.format("[ $SLURM_NODEID = 0 ] ||"), touch.format("")
    options = ("-N2", "-w", "h[1-2]", "--gres=gpu:1", "-t1", "--checkpoint=app", "--checkpoint-interval=20m")
    loop = "while :; do sleep 1 & wait $!; done"
    jobs = [site.submit(*options, script=f"trap '{say}' USR1; {loop}") for say in (one, all_of_them)]
    plain = site.submit("--gres=gpu:1", "--checkpoint=no")
    half, whole = [lambda job=job: site.explain(job)["checkpoint"] for job in jobs]
    site.wait(lambda: half()["signals"] == whole()["signals"] == 1)  # half a minute before their limit
    for job in jobs:
        site.run("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    site.wait(lambda: whole()["answers"] == 1)
    found = whole()
    assert (found["mode"], found["interval_s"], found["signal"], found["daly"]) == ("app", 1200, "USR1", False)
    assert 0 < found["save_s"] < 60 and found["saved"] <= time.time()
    assert (half()["answers"], half()["saved"]) == (0, None)
    assert "Last saved" in site.run("sluice", "explain", jobs[1]) and "not answered" in site.run(
        "sluice", "explain", jobs[0]
    )
    assert site.explain(plain)["checkpoint"]["mode"] == "no"
    assert site.job(jobs[1])["Comment"] == "sluice:checkpoint=1200s"
    refused = site.cluster.run(["sbatch", "--checkpoint-interval=20m", "--wrap=true"], check=False)
    assert "--checkpoint-interval is the time between signals of jobs with --checkpoint=app" in refused.stderr
    assert (
        "nodes of this cluster do not save jobs"
        in site.cluster.run(["sbatch", "--checkpoint=system", "--wrap=true"], check=False).stderr
    )


def test_a_job_that_is_preempted_is_signalled_at_once_with_its_steps(site: Site) -> None:
    folder = site.cluster.folder / "scratch"
    loop, say = "while :; do sleep 1 & wait $!; done", "touch /run/sluice-cluster/scratch"
    step = f"srun --overlap sh -c 'trap \"{say}/step.$SLURM_JOB_ID\" USR1; {say}/up.$SLURM_JOB_ID; {loop}'"
    script = f"trap '{say}/batch.$SLURM_JOB_ID' USR1; {step} & {loop}"
    job = site.submit("-w", "h3", "--gres=gpu:8", "--requeue", "--checkpoint=app", script=script)
    site.wait(lambda: (folder / f"up.{job}").exists())
    site.submit("-p", "urgent", "-w", "h3", "--gres=gpu:8")
    site.wait(lambda: (folder / f"step.{job}").exists() and (folder / f"batch.{job}").exists())
    assert site.state(job) == "RUNNING"  # until the partition's GraceTime is over


def test_a_job_that_meets_a_sick_gpu_first_goes_elsewhere_and_its_node_goes_on(site: Site) -> None:
    pid = next(str(daemon.pid) for daemon in site.cluster.daemons() if daemon.name == "controllerd@ctl1")
    site.run("kill", "-STOP", pid, node="ctl1")  # so that the GPU is not out before the job comes
    try:
        site.set("h2", 6, remap_failed="yes")
        site.run_until(lambda: site.cluster.run(["sluice", "health", "check"], node="h2", check=False).returncode == 2)
        job = site.submit("-w", "h2", "--gres=gpu:8")
        site.run_until(lambda: "drain" in site.run("sinfo", "-h", "-n", "h2", "-o", "%T"))
        assert "row_remap_failed" in site.cluster.log("slurmd@h2").read_text()
    finally:
        site.run("kill", "-CONT", pid, node="ctl1")
    site.wait(lambda: site.out() == {("h2", "6"): "row_remap_failed"})
    site.wait(lambda: "drain" not in site.run("sinfo", "-h", "-n", "h2", "-o", "%T"))
    shown = site.job(job)
    assert (shown["JobState"], shown["Priority"] != "0") == ("PENDING", True)  # not held
    site.set("h2", 6, remap_failed="no")
    site.wait(lambda: site.out() == {})


def test_a_driver_that_hangs_is_found_in_time_and_drains_its_node(site: Site) -> None:
    site.set("x1", 0, driver_hang="yes")
    began = time.monotonic()
    done = site.cluster.run(["/run/sluice-cluster/programs/sluice-health"], node="x1", check=False)
    assert time.monotonic() - began < 10
    assert done.returncode in (2, 3) and ("UNKNOWN" in done.stdout or "gives no answer" in done.stdout)
    site.wait(lambda: site.out().get(("x1", "")) == "driver")
    assert "sluice: driver: intel" in site.run("sinfo", "-h", "-R", "-o", "%E %n")
    assert "action=health ms=" in site.cluster.log("agent@m1").read_text()  # HealthCheckProgram asks there
    site.set("x1", 0, driver_hang="no")
    site.wait(lambda: site.out() == {})
    assert "drain" not in site.run("sinfo", "-h", "-n", "x1", "-o", "%T")


def test_a_node_that_loses_power_with_jobs_of_three_kinds(site: Site) -> None:
    fillers = [site.submit("-w", "h1", "--gres=gpu:8"), site.submit("-w", "h2", "--gres=gpu:7")]
    for job in fillers:
        site.wait(lambda job=job: site.state(job) == "RUNNING")  # type: ignore[misc]
    allowed = site.submit("--gres=gpu:h100:2")
    refused = site.submit("--gres=gpu:h100:2", "--no-requeue")
    gang = site.submit("-N2", "--gres=gpu:h100:1", script="srun sleep 600")
    for job in (allowed, refused, gang):
        site.wait(lambda job=job: "3" in site.job(job)["NodeList"])  # type: ignore[misc]
    site.run("scancel", *fillers)
    await_health(site.cluster)  # it has seen who runs where
    for daemon in ("agent@h3", "slurmd@h3"):
        site.cluster.stop_daemon(daemon, number=signal.SIGKILL)
    site.wait(lambda: "down" in site.run("sinfo", "-h", "-n", "h3", "-o", "%T"), 60)
    detected = time.monotonic()
    site.wait(lambda: site.job(gang)["Restarts"] == "1" and bool(site.events("down", "h3")), 60)
    site.wait(lambda: site.state(refused) == "NODE_FAIL", 60)
    site.wait(lambda: {one["job"] for one in site.events("requeue", "h3")} >= {int(allowed), int(gang)}, 60)
    assert time.monotonic() - detected < 60
    for job in (allowed, gang):
        assert site.job(job)["ExcNodeList"] == "h3"
        site.wait(lambda job=job: site.state(job) == "RUNNING")  # type: ignore[misc]
        assert "3" not in site.job(job)["NodeList"]
    assert [one["job"] for one in site.events("not-requeued", "h3")] == [int(refused)]
    for daemon in ("slurmd@h3", "agent@h3"):
        site.cluster.start_daemon(daemon)
    site.wait(lambda: "down" not in site.run("sinfo", "-h", "-n", "h3", "-o", "%T"), 60)


def test_a_storm_of_faults_drains_each_for_its_reason_and_the_breaker_holds(site: Site) -> None:
    """Every fault that the simulated drivers have; with SLUICE_TEST_SCALE=full on half of 128 nodes."""
    rng = random.Random(11)
    kinds: dict[str, list[Fault]] = {"h": NVIDIA, "m": AMD, "x": INTEL}
    nodes = [f"{kind}{n}" for kind, count in HOSTS.items() for n in range(1, 1 + count)]
    sick = [f"{kind}{n}" for kind, count in HOSTS.items() for n in range(1, 1 + max(1, count // 2))]
    faults = [
        (node, gpu, kinds[node[0]][(gpu + turn) % len(kinds[node[0]])])
        for turn, node in enumerate(sick)
        for gpu in range(min(GPUS[node[0]], len(kinds[node[0]])))
    ]
    rng.shuffle(faults)
    jobs = {node: site.submit("-w", node, f"--gres=gpu:{GPUS[node[0]]}", "-t", "100") for node in nodes}

    def all_run() -> bool:
        states = site.states()  # of jobs of other tests too
        return {states.get(job) for job in jobs.values()} == {"RUNNING"}

    site.wait(all_run, PATIENCE)
    expected = {(node, str(gpu)): check for node, gpu, (_, _, check) in faults}
    since = {}
    for node, gpu, (values, _, _) in faults:
        site.set(node, gpu, **values)
        since[(node, str(gpu))] = time.time()
    seen: dict[tuple[str, str], str] = {}

    def all_found() -> bool:
        seen.update(site.out_by_events())
        return expected.keys() <= seen.keys()

    site.wait(all_found, PATIENCE)
    peers = {place: check for place, check in seen.items() if place not in expected}
    assert set(peers.values()) <= {"link_down"}, peers  # a link has two ends
    assert {place: check for place, check in seen.items() if place in expected} == expected
    assert {node for node, _ in seen} == set(sick)  # no healthy node
    told = {
        (str(one.fields["node"]), str(gpu)): one.time for one in site.told("health.out") for gpu in one.fields["gpus"]
    }
    took = sorted(told[place] - since[place] for place in expected if expected[place] != "residual_memory")
    print(
        f"{len(expected)} faults on {len(sick)} of {len(nodes)} nodes, rounds every {INTERVAL}: out after "
        f"{took[len(took) // 2]:.1f} s (median), {took[-1]:.1f} s (most)"
    )
    hit = {jobs[node] for node in sick if HIT & {check for (name, _), check in expected.items() if name == node}}
    site.wait(lambda: {str(one.fields["job"]) for one in site.told("health.requeue")} >= hit, PATIENCE)
    for node, gpu, (_, mended, _) in faults:
        if mended:
            site.set(node, gpu, **mended)
    site.wait(lambda: site.withdrawn() == [], PATIENCE)
    site.wait(all_run, PATIENCE)
    assert sorted(str(one.fields["job"]) for one in site.told("health.requeue")) == sorted(hit)  # each once
    for job in jobs.values():
        assert site.job(job)["Restarts"] == ("1" if job in hit else "0")
    # Now with a breaker that lets a fifth of the nodes out.
    most = sum(HOSTS.values()) // 5
    hot = [f"h{n}" for n in range(1, most + 2)] + ["m1"]
    site.policy("{share: 20, least: 1}")
    before = len(site.events("breaker"))
    for node in hot:
        site.set(node, 0, temperature="96")
    site.wait(lambda: len(site.withdrawn()) == most and len(site.events("breaker")) == before + 1, PATIENCE)
    time.sleep(3)  # more than one look of the controllers' daemon
    assert len(site.withdrawn()) == most
    held = [row["node"] for row in site.rows() if row["state"] == "held back"]
    assert len(held) == 2 and set(held) <= set(hot)
    for node in hot:
        site.set(node, 0, temperature="35")
    site.wait(lambda: site.withdrawn() == [] and len(site.events("breaker")) == before + 2, PATIENCE)


def _indices(shown: str) -> list[int]:
    """GPU numbers of ``scontrol -d show job``."""
    found: list[int] = []
    for part in shown.split("IDX:")[1].split(")")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
