"""What jobs made of their GPUs, on real daemons with loads of known shape; and a database that dies and fills up."""

from __future__ import annotations

import ctypes
import json
import re
import shlex
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim import holdings
from gpu_sim.fields import get_values, set_values
from gpu_sim.layout import Slot
from gpu_sim.state import read_state
from policy.monitoring import NodeMetrics
from policy.node import FILE_NAME, NodePolicy
from sluice.exchange.job_records import FOLDER, JobRecords
from tests.integration.jobs import sbatch
from tests.integration.metrics_site import Database, done, load, work
from tests.integration.private_slurm import free_ports
from tests.integration.settled import PATIENCE, start_again, until
from tests.programs.build import build_library

pytestmark = pytest.mark.cluster

WHOLE, SHARED, MIG, AMD, INTEL = "whole-1", "shared-1", "mig-1", "amd-1", "intel-1"
SINGLE = """
name: single
description: {count} H100
cpu: {{sockets: 1, cores_per_socket: 56, threads_per_core: 2, numa_nodes: 1, memory_mib: 524288}}
drivers:
  nvidia: {{version: 550.90.07, library: 12.550.90.07, runtime: 12040}}
gpus:
"""
GPU = (
    "  - {{model: h100-sxm5-80gb, pci: '0000:{bus:02x}:00.0', numa: 0, under: 'pci0000:15/0000:15:{bus:02x}.0'{mig}}}\n"
)
OUTPUT = f"{INSIDE}/home/%u/%j.out"
WATTS = 400
INTEL_WATTS = 180  # an A770 draws no more than its limit of 190
MIB = 1 << 20
CLOSE = 0.02


@dataclass
class Site:
    """The cluster, the database, and which settings are in force."""

    cluster: DevCluster
    database: Database
    prometheus: int

    def settings(self, **more: Any) -> None:
        values: dict[str, Any] = {
            "url": self.database.url,
            "interval": 1,
            "token_file": "/etc/slurm/none",
            "prometheus": f"127.0.0.1:{self.prometheus}",
            **more,
        }
        (self.cluster.layout.slurm / FILE_NAME).write_text(NodePolicy(metrics=NodeMetrics(**values)).render())

    def submit(self, node: str, gres: str, command: list[str], *options: str, user: str = "alice") -> int:
        script = "#!/bin/sh\nexec " + shlex.join(command) + "\n"
        ask = ("-w", node, f"--gres={gres}", "-o", OUTPUT)
        return int(sbatch(self.cluster, *ask, *options, user=user, input_text=script, cwd="/tmp"))

    def record(self, node: str, job: int) -> dict[str, Any]:
        path = self.cluster.node_folder(node) / "records" / f"{job}.json"
        until(path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def use(self, node: str, job: int) -> dict[str, Any]:
        """Of the job's only GPU, with the job's whole time on it."""
        record = self.record(node, job)
        (use,) = record["usage"]["gpus"].values()
        return {**use, "time": record["ended"] - record["started"], "us": record["usage"].get("us")}

    def output(self, job: int, user: str = "alice") -> str:
        return (self.cluster.layout.homes / user / f"{job}.out").read_text()

    def done(self, job: int, kind: str = "cuda", user: str = "alice") -> list[tuple[int, float]]:
        """The phases of a job that has ended, or rests, with the time that each took."""
        found = done(self.output(job, user), kind)
        assert found
        return found

    def metric(self, name: str, **labels: str) -> dict[str, list[tuple[int, float]]]:
        chosen = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return self.database.series(f"{name}{{{chosen}}}")

    def samples(self, node: str) -> float:
        """How many the node's agent reports to have taken for the database."""
        told = self.metric("sluice_agent_samples_total", node=node).values()
        return max((values[-1][1] for values in told), default=0.0)

    def await_sample(self, node: str) -> None:
        """Wait for one that began after now: of those that come, the first may have been taken, the next begun."""
        before = self.samples(node)
        until(lambda: self.samples(node) >= before + 3)

    def peak(self, node: str, job: int) -> int:
        """Bytes that the node's agent has seen a running job hold."""
        known = json.loads(self.cluster.run(["sluice", "agent", "status", "--json"], node=node).stdout)["jobs"]
        return max((grant["peak"] for one in known if one["job"] == job for grant in one["grants"]), default=0)


def platform(folder: Path, name: str, layouts: list[str]) -> str:
    path = folder / f"{name}.yaml"
    gpus = [
        GPU.format(bus=0x1B + place, mig=f", mig: {{instances: [{layout}]}}" if layout else "")
        for place, layout in enumerate(layouts)
    ]
    path.write_text(SINGLE.format(count=len(layouts)) + "".join(gpus))
    return str(path)


@pytest.fixture(scope="module")
def site(make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("metrics")
    database = Database(folder / "database")
    cluster = make_shared_cluster(
        {
            "nodes": [
                {"names": WHOLE, "platform": platform(folder, "whole", [""] * 4)},
                {"names": SHARED, "platform": platform(folder, "shared", [""])},
                {"names": MIG, "platform": platform(folder, "mig", ["3g.40gb, 3g.40gb"])},
                {"names": AMD, "platform": "mi300x-platform"},
                {"names": INTEL, "platform": "arc-a770x2"},
            ],
            "controllers": 1,
            "accounting": False,
            "agent": True,
            "controllerd": True,
            "users": [{"name": "alice"}, {"name": "bob"}, {"name": "carol"}],
            "slurm_conf": "SchedulerParameters=nohold_on_prolog_fail,batch_sched_delay=0,"
            "sched_interval=2,bf_interval=1",
        }
    )
    for node in (WHOLE, SHARED, MIG, AMD, INTEL):
        for gpu in range({WHOLE: 4, AMD: 8, INTEL: 2}.get(node, 1)):
            most = INTEL_WATTS if node == INTEL else WATTS
            set_values(cluster.node_folder(node) / "gpu_sim", gpu, {"power": str(most)})
    (port,) = free_ports(1)
    one = Site(cluster, database, port)
    one.settings()
    database.start()
    yield one
    database.kill()


def check_work(use: dict[str, Any], *phases: tuple[int, float]) -> None:
    """GPU-seconds and mean within two percent of what was done."""
    assert use["us"] == pytest.approx(work(*phases), rel=CLOSE, abs=0.05)
    assert use["seconds"] == pytest.approx(use["time"], abs=0.15 + CLOSE * use["time"])
    assert use["utilisation"]["mean"] == pytest.approx(100 * work(*phases) / use["seconds"], rel=CLOSE)
    assert use["utilisation"]["peak"] == pytest.approx(max(permille for permille, _ in phases) / 10, abs=2)


def test_figures_of_jobs_are_those_of_their_loads(site: Site, full_scale: bool) -> None:
    """All at the same time, each on its GPU or share, while the database is killed, full, and back."""
    stretch = 10.0 if full_scale else 1.0
    mib = 10_000
    whole = [(800, 4.0 * stretch), (200, 3.0 * stretch)]
    one, two, three = [(300, 5.0 * stretch)], [(200, 4.0 * stretch)], [(450, 3.0 * stretch)]
    halves = [(600, 4.0 * stretch)], [(250, 4.0 * stretch)]
    hip = [(400, 4.0 * stretch)], [(350, 3.0 * stretch)]
    short, task = [(900, 1.2)], [(500, 2.0)]

    jobs = {
        "whole": site.submit(WHOLE, "gpu:1", load("cuda", mib, *whole)),
        "array": site.submit(WHOLE, "gpu:1", load("cuda", mib, *task), "--array=0-1"),
        "one": site.submit(SHARED, "shard:20000", load("cuda", mib, *one)),
        "two": site.submit(SHARED, "shard:20000", load("cuda", mib, *two), user="bob"),
        "three": site.submit(SHARED, "shard:20000", load("cuda", mib, *three), user="carol"),
        "mig": site.submit(MIG, "gpu:1", load("cuda", mib, *halves[0])),
        "mig2": site.submit(MIG, "gpu:1", load("cuda", mib, *halves[1]), user="bob"),
        "hip": site.submit(AMD, "shard:30000", load("hip", mib, *hip[0])),
        "hip2": site.submit(AMD, "shard:30000", load("hip", mib, *hip[1]), user="bob"),
        "short": site.submit(WHOLE, "gpu:1", load("cuda", mib, *short)),
    }
    intel = intel_job(site)
    tasks = array_tasks(site, jobs["array"])
    away = 300.0 if full_scale else 2.0
    site.database.kill()
    time.sleep(away)
    site.database.start(full=True)
    time.sleep(away)
    site.database.kill()
    site.database.start()

    use = site.use(WHOLE, jobs["whole"])
    check_work(use, *site.done(jobs["whole"]))
    held = site.output(jobs["whole"])
    context = int(use["memory"]["peak"]) - mib * MIB
    assert 0 < context < 1024 * MIB and use["memory"]["p50"] == pytest.approx(use["memory"]["peak"], rel=0.0101)
    expected = use["memory"]["peak"] * float(held.split()[-1]) / use["seconds"]
    edge = 0.5 * use["memory"]["peak"] / use["seconds"]  # memory is seen twice a second, and changed twice
    assert use["memory"]["mean"] == pytest.approx(expected, abs=CLOSE * expected + edge)
    assert use["energy_j"] == pytest.approx(WATTS * use["seconds"], rel=CLOSE)
    assert use["share"] == 1 and use["idle_s"] == pytest.approx(use["seconds"] - 7.0 * stretch, abs=1.1)

    shared = [site.use(SHARED, jobs[name]) for name in ("one", "two", "three")]
    for use, name, user in zip(shared, ("one", "two", "three"), ("alice", "bob", "carol"), strict=True):
        check_work(use, *site.done(jobs[name], user=user))
        assert use["share"] == pytest.approx(20_000 * MIB / get_total(site, SHARED), rel=CLOSE)
        assert use["memory"]["peak"] == shared[0]["memory"]["peak"]
    records = [site.record(SHARED, jobs[name]) for name in ("one", "two", "three")]
    together = max(record["ended"] for record in records) - min(record["started"] for record in records)
    assert sum(use["energy_j"] for use in shared) == pytest.approx(WATTS * together, rel=CLOSE, abs=0.2 * WATTS)

    for name, user in (("mig", "alice"), ("mig2", "bob")):
        use = site.use(MIG, jobs[name])
        check_work(use, *site.done(jobs[name], user=user))
        assert use["energy_estimated"] and use["energy_j"] == pytest.approx(WATTS * use["seconds"] / 2, rel=0.1)
    for name, user in (("hip", "alice"), ("hip2", "bob")):
        check_work(site.use(AMD, jobs[name]), *site.done(jobs[name], "hip", user))
    check_work(site.use(WHOLE, jobs["short"]), *site.done(jobs["short"]))
    assert len(tasks) == 2
    for number in tasks:
        check_work(site.use(WHOLE, number), *site.done(number))

    check_intel(site, *intel)


def get_total(site: Site, node: str) -> int:
    return max(json.loads(path.read_text())["grants"][0]["total"] for path in folder_of(site, node).glob("*.json"))


def folder_of(site: Site, node: str) -> Path:
    return site.cluster.node_folder(node) / "records"


def array_tasks(site: Site, number: int) -> list[int]:
    """The tasks' own numbers, which they have once they run."""
    found: list[int] = []

    def started() -> bool:
        shown = site.cluster.run(["scontrol", "show", "job", "-o", str(number)]).stdout
        found[:] = map(int, re.findall(r"^JobId=(\d+) .*JobState=(?!PENDING)", shown, re.MULTILINE))
        return len(found) == 2

    until(started)
    return found


def intel_job(site: Site) -> tuple[int, float]:
    """A job on an Intel GPU, whose process and load the test makes up; its number, and the work that it does."""
    number = site.submit(INTEL, "gpu:1", ["sleep", "600"])
    find = ["pgrep", "-u", "alice", "-x", "sleep"]
    until(lambda: site.cluster.run(find, node=INTEL, check=False).stdout.strip())
    pid = site.cluster.run(find, node=INTEL).stdout.split()[0]
    sim = site.cluster.node_folder(INTEL) / "gpu_sim"
    set_values(sim, 0, {"process": f"{pid}:4G"})
    before = read_state(sim).gpus[0].active_us
    set_values(sim, 0, {"utilisation": "60"})
    time.sleep(4.0)  # of work
    set_values(sim, 0, {"utilisation": "0"})
    done = (read_state(sim).gpus[0].active_us - before) / 1e6
    until(lambda: site.peak(INTEL, number) == 4096 * MIB)
    set_values(sim, 0, {"process": f"{pid}:0"})
    site.cluster.run(["scancel", str(number)])
    return number, done


def check_intel(site: Site, number: int, done: float) -> None:
    use = site.use(INTEL, number)
    assert use["us"] == pytest.approx(done, rel=CLOSE, abs=0.05)
    assert use["memory"]["peak"] == 4096 * MIB and use["energy_j"] == pytest.approx(
        INTEL_WATTS * use["seconds"], rel=CLOSE
    )


def test_nothing_is_lost_or_doubled_in_the_database(site: Site) -> None:
    """Each GPU has as many samples as its agent took, also of the time when the database was away and full."""
    platforms = {WHOLE: 4, SHARED: 1, MIG: 1, AMD: 8, INTEL: 2}
    until(lambda: all(site.samples(node) > 5 for node in platforms))
    site.settings(interval=60)  # no more of them while we count

    def counted(node: str) -> tuple[float, list[int]]:
        taken = site.samples(node)
        kept = [len({when for when, _ in samples}) for samples in site.metric("sluice_gpu_up", node=node).values()]
        doubled = [
            samples
            for samples in site.metric("sluice_gpu_up", node=node).values()
            if len(samples) != len({when for when, _ in samples})
        ]
        assert not doubled
        return taken, kept

    for node, gpus in platforms.items():
        # The agent reports the number of its samples with the next ones: after the last report there may be one more.
        def complete(node: str = node, gpus: int = gpus) -> bool:
            taken, kept = counted(node)
            return len(kept) == gpus and len(set(kept)) == 1 and 0 <= kept[0] - taken <= 1 and taken > 5

        until(complete, timeout=90)
    gaps = [
        (after[0] - before[0]) / 1000
        for samples in site.metric("sluice_gpu_up", node=SHARED).values()
        for before, after in pairwise(samples)
    ]
    assert max(gaps) < 4, "no hole where the database was away"


def test_samples_name_tenant_share_and_job(site: Site) -> None:
    samples = site.metric("sluice_job_utilisation_ratio", node=SHARED)
    by_user = {json.loads(labels)["user"]: [value for _, value in found] for labels, found in samples.items()}
    assert {"alice", "bob", "carol"} <= set(by_user)
    assert max(by_user["carol"]) == pytest.approx(0.45, abs=0.02)
    assert max(by_user["alice"]) == pytest.approx(0.3, abs=0.02)
    labels = [json.loads(one) for one in samples]
    assert all("job" not in one and {"gpu", "slot", "partition"} <= set(one) for one in labels)
    assert len(labels) <= 9  # three users, three slots
    jobs = site.metric("sluice_job_job", node=SHARED)
    assert len({value for found in jobs.values() for _, value in found}) == 3
    memory = site.metric("sluice_process_memory_used_bytes", node=AMD)
    assert max(value for found in memory.values() for _, value in found) > 10_000 * MIB

    def classes() -> set[str]:
        return {json.loads(one)["class"] for one in site.metric("sluice_class_gpus")}

    until(classes, lambda seen: seen >= {"h100"})  # the controller's come more seldom


def test_prometheus_page(site: Site) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{site.prometheus}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert text.endswith("# EOF\n") and re.search(r"^# TYPE sluice_gpu_energy_joules counter$", text, re.MULTILINE)
    assert re.search(r'^sluice_gpu_power_watts\{.*vendor=".*"\} \d', text, re.MULTILINE)


def test_a_heterogeneous_job_and_an_agent_that_restarts(site: Site) -> None:
    """Each component has its own record; what the agent did not see is said, and not guessed."""
    here, there = [(500, 4.0)], [(400, 8.0)]  # longer than an agent needs to start on a busy machine
    script = "#!/bin/sh\n" + "".join(
        f"srun --het-group={group} {shlex.join(load(kind, 5000, *phases))} &\n"
        for group, kind, phases in ((0, "cuda", here), (1, "hip", there))
    )
    options = ["--gres=gpu:1", "-o", OUTPUT, "-w"]
    words = ["sbatch", "--parsable", *options, WHOLE, ":", *options, AMD]
    submitted = site.cluster.run(words, user="alice", input_text=script + "wait\n", cwd="/tmp")
    number = int(submitted.stdout.split(";")[0])
    until(lambda: site.peak(AMD, number + 1))
    agent = f"agent@{AMD}"
    ready = site.cluster.log(agent).read_text().count("action=ready")
    site.cluster.stop_daemon(agent)
    site.cluster.start_daemon(agent)
    until(lambda: site.cluster.log(agent).read_text().count("action=ready") > ready)

    check_work(site.use(WHOLE, number), *site.done(number))
    use, did = site.use(AMD, number + 1), site.done(number, "hip")
    away = use["unmeasured_s"]
    # The agent ends at some time between two samples, half a second apart.
    assert 0 < away < 10 and use["seconds"] + away == pytest.approx(use["time"], abs=0.8 + CLOSE * use["time"])
    assert work(*did) - 0.4 * (away + 1.0) <= use["us"] <= work(*did) + 0.05
    assert use["utilisation"]["peak"] == pytest.approx(40, abs=2)


def test_a_slow_driver_skips_samples_and_says_so(site: Site) -> None:
    site.settings()
    sim = site.cluster.node_folder(SHARED) / "gpu_sim"
    log = site.cluster.log(f"agent@{SHARED}")
    before = log.read_text().count("action=slow")
    set_values(sim, 0, {"driver_delay": "60"})  # of each call, of which a sample has dozens
    try:
        until(lambda: log.read_text().count("action=slow") > before)
    finally:
        set_values(sim, 0, {"driver_delay": "0"})
    skipped = site.metric("sluice_agent_samples_skipped_total", node=SHARED)

    def told() -> bool:
        found = site.metric("sluice_agent_samples_skipped_total", node=SHARED)
        return max(value for samples in found.values() for _, value in samples) > 0

    assert skipped is not None
    until(told)
    assert get_values(sim, 0)["driver_delay"] == "0"


def test_a_token_that_others_may_read_is_not_sent(site: Site) -> None:
    path = site.cluster.layout.slurm / "token"
    path.write_text("secret-word\n")
    path.chmod(0o644)
    log = site.cluster.log(f"agent@{INTEL}")
    site.settings(token_file="/etc/slurm/token", token_without_tls=True, interval=1)
    try:
        until(lambda: "/etc/slurm/token: others than its owner can read it" in log.read_text())
        command = site.cluster.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], node=INTEL, check=False).stdout
        assert "secret-word" not in log.read_text() and "secret-word" not in command
        path.chmod(0o600)
        until(lambda: log.read_text().count("the database accepts samples again") > 0)
    finally:
        site.settings()


def test_each_run_of_a_requeued_job_has_its_record_and_figures(site: Site) -> None:
    """Also where no controller took the first run's before the second ended on the same node."""
    first, second = [(600, 2.0)], [(300, 2.5)]
    (controllerd,) = (one.name for one in site.cluster.daemons() if one.name.startswith("controllerd@"))
    site.cluster.stop_daemon(controllerd)
    try:
        runs = [shlex.join(load("cuda", mib, *phases)) for mib, phases in ((5000, first), (8000, second))]
        command = f'if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then {runs[0]}; sleep 600; else {runs[1]}; fi'
        number = site.submit(WHOLE, "gpu:1", ["sh", "-c", command], "--requeue", "--open-mode=append")
        sim = site.cluster.node_folder(WHOLE) / "gpu_sim"
        until(lambda: holdings(sim))
        until(lambda: not holdings(sim))
        site.cluster.run(["scontrol", "requeue", str(number)])

        # A run that begins before the first one's epilog has ended is requeued by the agent, for two minutes.
        waiting = site.cluster.node_folder(WHOLE) / "outbox"
        until(lambda: len(list(waiting.glob(f"{number}-*.json"))) == 1)
        start_again(site.cluster, str(number))
        until(lambda: len(list(waiting.glob(f"{number}-*.json"))) == 2)
    finally:
        site.cluster.start_daemon(controllerd)
    until(lambda: not list(waiting.glob("*.json")), timeout=2 * PATIENCE)

    stored = JobRecords(site.cluster.layout.state / FOLDER).of_job(number)
    assert len(stored) == 2 and stored[0].ended is not None and stored[0].ended <= stored[1].started
    assert [record.restarts for record in stored] == [0, 1], "slurmd tells which run it is"
    for record, mib, did in zip(stored, (5000, 8000), site.done(number), strict=True):
        assert record.usage is not None and record.ended is not None
        (use,) = record.usage["gpus"].values()
        check_work({**use, "time": record.ended - record.started, "us": record.usage["us"]}, did)
        assert mib * MIB < use["memory"]["peak"] < (mib + 1024) * MIB
    assert site.record(WHOLE, number)["started"] == stored[1].started


def test_a_node_that_is_rebooted_in_the_middle(site: Site) -> None:
    """What its job did until then becomes a record; nothing of the new boot is taken for the old one's."""
    number = site.submit(WHOLE, "gpu:1", load("cuda", 5000, (500, 4.0), (0, 600.0)), "--no-requeue")
    sim = site.cluster.node_folder(WHOLE) / "gpu_sim"
    until(lambda: rests(sim))
    site.await_sample(WHOLE)
    rested, phases = time.time(), site.done(number)
    down = go_down(site, WHOLE, number)
    boot = "/proc/sys/kernel/random/boot_id"
    fake = site.cluster.node_folder(WHOLE) / "boot_id"
    fake.write_text("11111111-2222-3333-4444-555555555555\n")
    site.cluster.run(["mount", "--bind", f"{INSIDE}/nodes/{WHOLE}/boot_id", boot], node=WHOLE)
    try:
        site.cluster.start_daemon(f"agent@{WHOLE}")
        site.cluster.start_daemon(f"slurmd@{WHOLE}")
        record = site.record(WHOLE, number)
    finally:
        site.cluster.run(["umount", boot], node=WHOLE)
    assert [event["action"] for event in record["events"]].count("reboot") == 1
    assert rested - 1 < record["ended"] < down  # its sums are saved every half second, and when the agent ends
    (use,) = record["usage"]["gpus"].values()
    # What it did before its first sample and after its last one is not known: on a quiet machine 0.4 s.
    assert phases[0][1] <= use["seconds"] < record["ended"] - record["started"]
    assert record["usage"]["us"] == pytest.approx(work(*phases), rel=CLOSE, abs=0.05)
    assert use["utilisation"]["mean"] == pytest.approx(100 * work(*phases) / use["seconds"], rel=CLOSE)
    assert 5000 * MIB < use["memory"]["peak"] < 6024 * MIB
    site.cluster.run(["scancel", str(number)], check=False)
    site.cluster.wait_idle(timeout=60)
    after = site.submit(WHOLE, "gpu:1", load("cuda", 5000, (700, 1.5)))
    check_work(site.use(WHOLE, after), *site.done(after))


def rests(sim: Path) -> bool:
    """Whether a program on the node's GPUs has worked, and none does any more."""
    data, size = (sim / "processes").read_bytes(), ctypes.sizeof(Slot)
    slots = [Slot.from_buffer_copy(data, place * size) for place in range(len(data) // size)]
    alive = {one.pid for one in holdings(sim)}
    loads = [(slot.busy_ns, slot.load) for slot in slots if slot.pid in alive]  # busy: till the load changed last
    return any(busy for busy, _ in loads) and not any(load for _, load in loads)


def go_down(site: Site, node: str, job: int) -> float:
    """slurmd, the agent, the job, and what only memory keeps: a node that reboots at its administrator's request.

    The time at which the agent had ended.
    """
    site.cluster.stop_daemon(f"slurmd@{node}")
    site.cluster.stop_daemon(f"agent@{node}")
    down = time.time()
    listed = site.cluster.run(["ps", "-e", "-o", "pid=,ppid=,args="], node=node).stdout
    table = [line.split(None, 2) for line in listed.splitlines()]
    ended = {pid for pid, _, words in table if words.startswith(f"slurmstepd: [{job}.")}
    assert ended
    while more := {pid for pid, parent, _ in table if parent in ended} - ended:
        ended |= more
    site.cluster.run(["kill", "-KILL", *ended], node=node)
    site.cluster.run(["rm", "-rf", "/run/sluice/agent/jobs"], node=node)
    return down


def await_told(site: Site, node: str, shift: float) -> None:
    """Wait until alice's job there was reported with the time of now, by a clock that is so many seconds off."""
    begin = time.time() + shift

    def told() -> bool:
        series = site.metric("sluice_job_busy_seconds_total", node=node, user="alice").values()
        return any(begin <= when / 1000 < begin + 600 for samples in series for when, _ in samples)

    until(told)


def test_a_node_whose_clock_is_set_doubles_nothing(site: Site) -> None:
    """An hour late, then two, then right in two steps, while a job works: its figures and samples are as without.

    The last test: the agent that it starts has ended, which nothing that waits for the cluster takes well.
    """
    site.settings()
    scratch, inside = site.cluster.layout.scratch, f"{INSIDE}/scratch"
    build_library("shifted_clock", scratch / "shift.so")
    clock = scratch / "clock"
    clock.write_text("-3600\n")
    agent, phases = f"agent@{SHARED}", [(400, 10.0)]
    how = site.cluster.facts["daemons"][agent]
    shifted = {**how["env"], "LD_PRELOAD": f"{inside}/shift.so", "SHIFTED_CLOCK": f"{inside}/clock"}
    began, up = time.time(), time.monotonic()
    site.cluster.stop_daemon(agent)
    site.cluster.start_program("agent-shifted", how["argv"], node=SHARED, env=shifted)
    try:
        until(lambda: "action=ready" in site.cluster.log_tail("agent-shifted", 1000))
        command = f"{shlex.join(load('cuda', 5000, *phases))}; exec sleep 600"
        number = site.submit(SHARED, "shard:20000", ["sh", "-c", command])
        sim = site.cluster.node_folder(SHARED) / "gpu_sim"
        until(lambda: holdings(sim))
        for before, after in pairwise((-3600, -7200, -3600, 0)):
            await_told(site, SHARED, before)
            clock.write_text(f"{after}\n")
        until(lambda: not holdings(sim))
        site.cluster.run(["scancel", str(number)])
        record = site.record(SHARED, number)
        most = time.monotonic() - up
    finally:
        site.cluster.stop_daemon("agent-shifted")
        site.cluster.start_daemon(agent)
    assert sum(phase[1] for phase in phases) < record["ran_s"] < most
    assert record["ended"] - record["started"] == pytest.approx(record["ran_s"] + 3600, abs=5)
    (use,) = record["usage"]["gpus"].values()
    check_work({**use, "time": record["ran_s"], "us": record["usage"]["us"]}, *site.done(number))
    (grant,) = record["grants"]

    def counted() -> bool:
        """The job in the report of single GPUs, once its record is with the controllers."""
        words = ["sluice", "report", "gpus", "--each", "--json", "-S", f"{datetime.fromtimestamp(began):%FT%T}"]
        rows = json.loads(site.cluster.run(words, cwd="/", timeout=60).stdout)["rows"]
        held = [row["shared_gpu_s"] for row in rows if row["node"] == SHARED]
        return held == [pytest.approx(record["ran_s"] * grant["asked"] / grant["total"], rel=0.01)]

    until(counted)

    def told() -> list[list[tuple[int, float]]]:
        return list(site.metric("sluice_job_busy_seconds_total", node=SHARED, user="alice").values())

    def complete() -> bool:
        ages = [began - when / 1000 for samples in told() for when, _ in samples]
        return any(7300 > age > 5000 for age in ages) and any(3700 > age > 1000 for age in ages)

    until(complete)
    for samples in told():
        assert len({when for when, _ in samples}) == len(samples)
    for name, most in (("sluice_job_utilisation_ratio", 1.0), ("sluice_gpu_utilisation_ratio", 1.0)):
        values = [value for samples in site.metric(name, node=SHARED).values() for _, value in samples]
        assert values and min(values) >= 0 and max(values) <= most
