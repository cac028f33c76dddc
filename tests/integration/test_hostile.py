"""Hostile tenants on a real cluster: each attack fails or costs its own job; neighbours and nodes do not notice.

Thirteen attacks that once broke something come first, then others of their kind, each as an unprivileged user has it.
`hostile_programs.py` has what runs inside jobs; every test ends with the same look at the cluster (`unharmed`).
docs/security.md names these tests.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import set_values
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from sluice.exchange.job_records import FOLDER, JobRecords
from tests.integration.beds import Bed
from tests.integration.hostile_site import (
    NODE,
    OTHER,
    PROGRAMS,
    PYTHON,
    RUN_KIB,
    SCRATCH,
    TENANTS,
    HostileSite,
    description,
)
from tests.integration.jobs import sbatch
from tests.integration.settled import PATIENCE, until
from tests.programs.begin import ESCAPE
from tests.programs.build import build_program

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def site(
    make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory, bed: Bed
) -> HostileSite:
    described = description(tmp_path_factory.mktemp("platform") / "single.yaml", **bed.description)
    return HostileSite(make_shared_cluster(described, **bed.options), other_system=bed.root is not None)


@pytest.fixture(scope="module")
def neighbour(site: HostileSite) -> Iterator[int]:
    """A job of alice's that runs as long as the attacks do; its process."""
    with site.job(*site.program("quiet"), user="alice", gres="shard:1024") as running:
        yield running.pid


@pytest.fixture(autouse=True)
def unharmed(site: HostileSite, neighbour: int) -> Iterator[None]:
    """After each attack: the same agent, no node lost, little in /run, no traceback, and the neighbour lives."""
    agents = {node: site.agent_pid(node) for node in (NODE, OTHER)}
    logs, before = site.log_sizes(), site.run_kib()
    try:
        yield
        site.clear()
        assert not site.broken_nodes(), site.broken_nodes()
        assert {node: site.agent_pid(node) for node in agents} == agents, "an agent was lost"
        site.programs_of_neighbour()
        assert site.lives(neighbour), "the neighbour's process was ended"
        assert site.run_kib() < before + RUN_KIB, f"/run/sluice has {site.run_kib()} KiB, {before} before"
        assert not site.tracebacks(logs), site.tracebacks(logs)
    finally:
        site.clear()
        site.heal()


# ---- attacks from inside a job: its own excess is ended all the same, and the neighbour's is, too ----

STORMS = (
    # of the thirteen, each alone
    ("truncate",), ("fill",), ("seats",), ("requests",), ("leaderless",), ("crowd",),
    # what else shared memory and files allow
    ("scribble", "remove"), ("locks", "watch-files"),
    # processes
    ("processes", "names"), ("mappings", "threads"), ("forks", "execs"), ("stopped", "deaf", "signals"),
    ("trace", "limits"), ("dump",), ("namespaces", "cgroups"), ("churn",),
    # the socket, and what is said to the job
    ("half-closed", "json-bombs", "descriptors"), ("full-pipe",),
)  # fmt: skip
FULL = {"processes": "10000", "mappings": "1000000", "threads": "10000", "watch-files": "100000", "crowd": "64"}


@pytest.mark.parametrize("names", STORMS, ids="+".join)
def test_under_attack_excess_is_ended_and_neighbours_are_served(
    site: HostileSite, names: tuple[str, ...], full_scale: bool
) -> None:
    """The attacks at the same time, each in a job of its own."""
    before = site.run_kib()
    with ExitStack() as jobs:
        attackers = []
        for name in names:
            env = {"COUNT": FULL[name]} if full_scale and name in FULL else None
            for _ in range(3):  # the attacks that run take their own user's turn, and can fail the next one's start
                with suppress(AssertionError):
                    attackers.append(jobs.enter_context(site.attack(name, env=env)))
                    break
        assert len(attackers) == len(names)
        site.neighbour_is_served()
        assert site.run_kib() < before + RUN_KIB, f"/run/sluice grew from {before} to {site.run_kib()} KiB"
        for attacker in attackers:
            record = site.holds_to(attacker)
            ends = [event["detail"]["step"] for event in record["events"] if event["action"] == "end"]
            assert ends[:1] == ["0"], record["events"]


def test_several_users_cannot_take_all_places_at_the_agent(site: HostileSite) -> None:
    """Once 64 connections for all users together: four of them kept another one's task from starting."""
    with ExitStack() as jobs:
        for user in TENANTS:
            jobs.enter_context(site.attack("crowd", user=user, gres="shard:1024"))
        site.neighbour_is_served()
        ran = site.run(*site.srun("echo", "ran", gres="shard:1024"), user="bob", timeout=PATIENCE)
        assert ran.stdout == "ran\n"


# ---- whose a process is ----


def cgroup(site: HostileSite, name: str) -> Path:
    """A cgroup that an admin delegated to mallory, as a user's session has."""
    roots = "/sys/fs/cgroup/freezer /sys/fs/cgroup/devices /sys/fs/cgroup"
    script = f"""
for root in {roots}; do
    [ -e $root/cgroup.procs ] || continue
    mkdir -p $root/user.slice/{name}
    chown -R $(id -u mallory) $root/user.slice
    echo $root/user.slice/{name}
done"""
    return Path(site.run("sh", "-c", script, node=NODE).stdout.split()[0])


IN_CGROUP = """
for root in /sys/fs/cgroup/freezer /sys/fs/cgroup/devices /sys/fs/cgroup; do
    [ -e $root/user.slice/hostile ] || continue
    mkdir -p "$root/user.slice/hostile/$1"
    echo 0 >"$root/user.slice/hostile/$1/cgroup.procs"
done
shift
exec "$@"
"""


def outside(site: HostileSite, *command: str, uid: int, place: str = "") -> subprocess.Popen[str]:
    """A process of a user's on the node that no job started, in a cgroup of its own; prints ``up PID``."""
    line = ["setpriv", f"--reuid={uid}", "--clear-groups", *command]
    if place:
        line = ["sh", "-c", IN_CGROUP, "x", place, *line]
    return subprocess.Popen(
        site.cluster.command(line, node=NODE, cwd="/tmp"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def clean_cgroups(site: HostileSite) -> None:
    script = "find /sys/fs/cgroup/*/user.slice /sys/fs/cgroup/user.slice -depth -type d -exec rmdir {} +"
    site.run("sh", "-c", script, node=NODE, check=False)


@pytest.mark.parametrize("place", ["job_{job}/step_0", "slurm_single-1/uid_2002/job_{job}/step_0"])
def test_a_cgroup_with_a_neighbours_name_ends_nothing_of_the_neighbours(site: HostileSite, place: str) -> None:
    cgroup(site, "hostile")
    uid = int(site.run("id", "-u", "mallory").stdout)
    with site.job(*site.program("quiet"), user="bob") as victim:
        named = place.format(job=victim.job)
        with outside(site, *site.program("quiet"), uid=uid, place=named) as program:
            assert program.stdout
            try:
                pid = int(program.stdout.readline().split()[1])
                ended = exceed(site, pid)
                assert site.lives(victim.pid), "the neighbour's step was ended for it"
                assert ended < 10 or not site.lives(pid)
            finally:
                program.kill()
    record = until(lambda: site.record(victim.job))
    assert [event for event in record["events"] if event["action"] == "end"] == []
    assert record["grants"][0]["peak"] < 10 << 30
    clean_cgroups(site)


def exceed(site: HostileSite, pid: int, seconds: float = 4.0) -> float:
    """The driver says that the process holds 50 GiB; seconds until it is gone, or those that were waited."""
    began = time.monotonic()
    set_values(site.sim, 0, {"process": f"{pid}:50G"})
    try:
        while site.lives(pid) and time.monotonic() - began < seconds:
            time.sleep(0.02)
    finally:
        set_values(site.sim, 0, {"processes": "none"})
    return time.monotonic() - began


def test_a_job_without_gpus_that_holds_one_is_ended(site: HostileSite) -> None:
    """By a descriptor that was sent to it; also while the same user has a job with the GPU on the node."""
    with site.attack("quiet", gres="shard:2048"), site.attack("quiet", gres="") as without:
        assert exceed(site, without.pid) < 3, "50 GiB for as long as it liked"
        assert not site.lives(without.pid)


def test_a_device_sent_to_a_job_without_gpus_does_not_help_it(site: HostileSite) -> None:
    path = f"/tmp/device.{time.time_ns()}"
    with (
        site.attack("send-device", path, "/dev/nvidia0", gres="shard:1024"),
        site.attack("receive-device", path, gres="", user="trudy") as other,
    ):
        assert "got 1\n" in other.said
        assert exceed(site, other.pid) < 3
        assert not site.lives(other.pid)


def test_a_subordinate_uid_is_its_owners(site: HostileSite) -> None:
    (site.cluster.folder / "subuid").write_text("mallory:100000:65536\n")
    agents = (
        "nsenter",
        f"--target={site.agent_pid()}",
        "--mount",
        "--root",
    )  # its file systems, on another system, too
    site.run(*agents, "mount", "--bind", str(INSIDE / "subuid"), "/etc/subuid", node=NODE)
    with site.attack("quiet", gres="shard:1024"), outside(site, *site.program("quiet"), uid=100001) as program:
        assert program.stdout
        try:
            pid = int(program.stdout.readline().split()[1])
            assert exceed(site, pid) < 3, "8 GiB undisturbed"
        finally:
            program.kill()


def test_an_ended_leader_does_not_hide_a_job_that_has_no_gpu(site: HostileSite) -> None:
    with site.attack("leaderless", gres="") as without:
        assert exceed(site, without.pid) < 3
        assert not site.lives(without.pid)


def test_real_memory_from_within_namespaces_is_ended(site: HostileSite) -> None:
    """What the driver's own library holds, past the limiter, in a user, process and mount namespace."""
    command = ["unshare", "-Urmpf", "sh", "-c", ESCAPE, "x", *site.program("hold", "8192")]
    with site.job(*command, until="code", gres="shard:4096") as running:
        at = next(float(line.split()[1]) for line in running.said if line.startswith("at "))
        assert running.said[-1] == "code 0\n"
        record = until(lambda: site.record(running.job))
    [end] = [event for event in record["events"] if event["action"] == "end"]
    assert end["time"] - at < 2.5


def test_a_process_that_no_signal_ends_costs_no_node(site: HostileSite) -> None:
    """It waits for a file system whose server it is itself: Slurm drained the node ("Kill task failed")."""
    with site.attack("fuse", gres="shard:2048") as attacker:
        exceed(site, attacker.pid, 30)
        assert not site.lives(attacker.pid), "it holds 50 GiB and lives"
    with site.attack("fuse", gres=""):
        pass


@pytest.fixture
def containers(site: HostileSite) -> Iterator[None]:
    """Slurm gives each job on the other node a /tmp of its own (job_container/tmpfs)."""
    folder = site.cluster.slurm_conf_dir()
    before = (folder / "slurm.conf").read_text()
    (folder / "job_container.conf").write_text("AutoBasePath=true\nBasePath=/var/lib/containers\n")
    (folder / "slurm.conf").write_text(f"{before}JobContainerType=job_container/tmpfs\n")
    restart_slurmd(site)
    yield
    (folder / "slurm.conf").write_text(before)
    restart_slurmd(site)


def restart_slurmd(site: HostileSite) -> None:
    """The other node's, on a CPU on which it can keep mount namespaces."""
    name, started = f"slurmd@{OTHER}", "slurmd started on"
    log = site.cluster.log(name)
    before = log.read_text().count(started)
    site.cluster.stop_daemon(name)
    site.cluster.start_daemon(name)
    until(lambda: log.read_text().count(started) > before)  # hwloc, which restores the CPUs that it found, is done
    [pid] = [daemon.pid for daemon in site.cluster.daemons() if daemon.name == name]
    pin = ["taskset", "--all-tasks", "--cpu-list", "--pid", keeping_cpu(site), str(pid)]
    until(lambda: site.run(*pin, node=OTHER, check=False).returncode == 0)  # it fails when a thread ends meanwhile
    until(lambda: site.run(*site.srun("true", node=OTHER), user="bob", check=False).returncode == 0)


def keeping_cpu(site: HostileSite) -> str:
    """A CPU whose new mount namespaces can be bound to a file on the other node, as Slurm binds those of jobs.

    Linux refuses one that is older than the namespace it would be bound in, by their numbers. Linux 6.18 gives each
    CPU 4,096 of these at a time (measured), so that new ones of some CPUs count as older than the node's.
    """
    bind = "touch /dev/shm/kept && unshare --mount=/dev/shm/kept true && umount /dev/shm/kept"
    for cpu in map(str, os.sched_getaffinity(0)):
        if not site.run("taskset", "--cpu-list", cpu, "sh", "-c", bind, node=OTHER, check=False).returncode:
            return cpu
    pytest.fail("no CPU's new mount namespaces can be bound")


def test_limits_hold_where_slurm_gives_jobs_a_tmp_of_their_own(site: HostileSite, containers: None) -> None:
    """The job's mount namespace is older than what the agent mounts for it; nothing of either is left on the node."""
    for size, code in (("2048", "0"), ("8192", "2")):
        command = ["sh", "-c", 'ls -A /tmp; exec "$@"', "x", *site.program("hold", size)]
        with site.job(*command, until="code", node=OTHER, gres="shard:4096") as limited:
            assert [line.split()[0] for line in limited.said] == ["job", "at", "code"], limited.said
            assert limited.said[-1] == f"code {code}\n"
    command = ["unshare", "-Urm", "sh", "-c", ESCAPE, "x", *site.program("hold", "8192")]
    with site.job(*command, until="code", node=OTHER, gres="shard:4096") as hostile:
        record = until(lambda: site.record(hostile.job, OTHER))
    assert [event["action"] for event in record["events"]].count("end") == 1, record["events"]
    until(lambda: "/run/sluice/limit/job" not in site.run("cat", "/proc/self/mountinfo", node=OTHER).stdout)


# ---- requests and limits of others ----


def test_nobody_asks_for_another_or_as_root(site: HostileSite) -> None:
    with site.job(*site.program("quiet"), user="bob") as victim:
        ran = site.run(*site.srun(*site.program("spoof", str(victim.job)), gres="shard:1024"), user="mallory")
        answers = [json.loads(line) for line in ran.stdout.splitlines()]
        assert len(answers) == 5 and all("error" in one for one in answers), answers
        assert site.lives(victim.pid)
        site.holds_to(victim)  # it is still known, with its limit


def test_others_limits_cannot_be_read(site: HostileSite) -> None:
    with site.job(*site.program("quiet"), user="bob") as victim:
        look = (
            "import os; [print(path, os.access(path, os.R_OK)) for f, _, names in os.walk('/run/sluice') "
            "for path in (os.path.join(f, n) for n in names)]"
        )
        shown = site.run(*site.srun(PYTHON, "-c", look, gres="shard:1024"), user="mallory").stdout
        foreign = [line for line in shown.splitlines() if f"job_{victim.job}/" in line and line.endswith("True")]
        assert foreign == [], "whatever PrivateData says"


def test_a_record_keeps_room_for_the_end_and_stays_small(site: HostileSite) -> None:
    """62 KB requests once made it 37 MB; 210 small ones left no room for the event that the job was ended."""
    with site.attack("requests") as attacker:
        time.sleep(4)
        clock = time.monotonic()
        shown = site.run("sluice", "agent", "status", "--json", node=NODE).stdout
        assert len(shown) < 1 << 20 and time.monotonic() - clock < 5
        record = site.holds_to(attacker)
    assert len(record["events"]) <= 250


def test_silent_connections_do_not_stop_the_controllers_inbox(site: HostileSite) -> None:
    port = site.cluster.environment()["SLUICE_CONTROLLERD_PORT"]
    crowd = (
        "import socket, time\nheld = []\n"
        f"for _ in range(64):\n    held.append(socket.create_connection(('ctl1', {port}), 2))\n"
        "print('up 0', flush=True)\ntime.sleep(600)"
    )
    with site.job(PYTHON, "-c", crowd, gres=""), site.job(*site.program("quiet"), user="bob") as one:
        record = site.holds_to(one)
        store = site.cluster.layout.state / FOLDER
        until(
            lambda: any(found.job == record["job"] for found in JobRecords(store).between(0, time.time() + 86400)),
            timeout=15,
        )


# ---- what a user asks for fails the submission or the job, never the node ----


def submit(site: HostileSite, *options: str, env: dict[str, str] | None = None, wrap: str = "sleep 2") -> str:
    """A batch job; its id, or empty when it was refused."""
    words = ("--mem=100", "-t", "5", *options, f"--wrap={wrap}")
    return sbatch(site.cluster, *words, user="mallory", env=env, cwd="/tmp", check=False)


def scratch(site: HostileSite, name: str) -> Path:
    """A file that jobs write and this test sees, in `SCRATCH`."""
    return site.cluster.layout.scratch / f"hostile.{name}"


def settled(site: HostileSite, jobs: list[str], seconds: float = PATIENCE) -> dict[str, str]:
    """State and reason of each when none will change soon: ended, held, or waiting for what it cannot have."""

    now: dict[str, str] = {}

    def look() -> bool:
        assert not site.broken_nodes(), site.broken_nodes()
        lines = site.run("squeue", "-h", "-t", "all", "-o", "%A|%T|%r").stdout.splitlines()
        found = {number: f"{state} {reason}" for number, state, reason in (line.split("|", 2) for line in lines)}
        now.update({job: found.get(job, "COMPLETED None") for job in jobs if job})
        moving = ("RUNNING", "COMPLETING", "CONFIGURING", "PENDING None", "PENDING Priority", "PENDING BeginTime")
        return not any(state.startswith(moving) for state in now.values())

    until(lambda: (look(), now), lambda seen: seen[0], seconds)
    return now


SHARES = (
    "50%", "050", "+50", "50.0", "0", "101", "-1", "4294967346", "99999999999999999999", "5 0", "", "50\n", "0x32",
    "1e1", "\u0665\u0660",
)  # fmt: skip
GRES = (
    "shard:2147483647", "shard:2147483648", "shard:4294967295", "shard:4294967297", "shard:18446744073709551615",
    "gpu:0", "gpu:4294967297", "shard:1,gpu:1", "shard:1,shard:1", "gpu:h100:-1", "shard:1K", "mps:100", "shard",
)  # fmt: skip


@pytest.fixture
def shares(site: HostileSite) -> Iterator[None]:
    """MPS holds jobs, and gives shares of a GPU's compute time."""
    policy = site.cluster.slurm_conf_dir() / "sluice.node.json"
    policy.write_text(NodePolicy(limits=NodeLimits(ladder=("mps", "limiter", "watchdog"))).render())
    yield
    site.clear()
    policy.write_text(NodePolicy().render())


@pytest.fixture(scope="module")
def forger(site: HostileSite) -> Path:
    """A client of one's own, built against this machine's libslurm."""
    if site.other_system:
        pytest.skip("its libslurm is another system's; test_refused_jobs.py has forged shares there")
    program = build_program("forged_submit", site.cluster.layout.scratch / "forged_submit", "-lslurm")
    return SCRATCH / program.name


def test_a_share_of_a_gpu_in_any_spelling_drains_no_node(site: HostileSite, shares: None) -> None:
    options = ["-w", NODE, "--gres=shard:1024"]
    settled(site, [submit(site, *options, f"--gpu-share={share}", wrap="true") for share in SHARES])


def test_numbers_beyond_all_sense_drain_no_node(site: HostileSite) -> None:
    settled(site, [submit(site, "-w", NODE, f"--gres={gres}", wrap="true") for gres in GRES])


@pytest.mark.parametrize(
    "forged", ["gpu-share=60", "gpu_share=60", "gpu_share=60%", "gpu_share=60\n", "gpu-share=x" * 900]
)
def test_a_forged_share_fails_its_job_or_is_held_to(site: HostileSite, shares: None, forger: Path, forged: str) -> None:
    """Sent past Slurm's commands, as a client of one's own does: two of sixty percent are never together on a GPU."""
    words = [str(forger), "0", "-", "gres:shard:1024", "#!/bin/sh\nsleep 3\n", f"_SLURM_SPANK_OPTION_sluice_{forged}"]
    jobs = [site.run(*words, user="mallory", check=False).stdout.strip() for _ in range(2)]
    jobs = [job for job in jobs if job.isdigit()]
    end = time.monotonic() + 6
    while jobs and time.monotonic() < end:
        given = [record["share_percent"] or 0 for record in site.running_records()]
        assert sum(given) <= 100, given
        assert not site.broken_nodes(), site.broken_nodes()
        time.sleep(0.2)
    settled(site, jobs)


def test_shares_that_do_not_fit_wait_for_each_other(site: HostileSite, shares: None) -> None:
    jobs = [submit(site, "-w", NODE, "--gres=shard:1024", "--gpu-share=60") for _ in range(2)]
    settled(site, jobs)


def test_an_array_of_refused_jobs_drains_nothing(site: HostileSite, shares: None, full_scale: bool) -> None:
    """Each would fail its prolog: past job_submit by the environment, without a node named."""
    count = 10_000 if full_scale else 12
    env = {"_SLURM_SPANK_OPTION_sluice_gpu_share": "50%", "SLUICE_GPU_SHARE": "50%"}
    for options in ((), ("--gpu-share=33",)):
        array = submit(site, f"--array=1-{count}", "--gres=shard:1024", *options, env=env, wrap="true")
        for change in ("requeuehold", "hold", "release"):
            site.run("scontrol", change, array or "0", user="mallory", check=False)
        end = time.monotonic() + (600 if full_scale else 8)
        while (
            array
            and time.monotonic() < end
            and site.run("squeue", "-h", "-t", "R,CF,CG", "-j", array, check=False).stdout
        ):
            assert not site.broken_nodes(), site.broken_nodes()
            time.sleep(0.5)
    assert not site.broken_nodes()


NASTY = "x\n\x1b[2J\x1b]0;y\x07\t\"'`$(id);|<>&\\ \u202e %n%j" + "z" * 300


def test_hostile_names_comments_and_folders_stay_text(site: HostileSite) -> None:
    names = ("job-name", "comment", "wckey", "chdir", "account", "mail-user", "licenses", "constraint", "extra")
    values = [f"--{name}={'/tmp/' if name == 'chdir' else ''}{NASTY}" for name in names]
    jobs = [submit(site, "-w", NODE, "--gres=shard:512", value, wrap="true") for value in values]
    settled(site, jobs)
    for words in (["sluice", "agent", "status"], ["sluice", "report", "jobs"], ["sluice", "top", "--once"]):
        shown = site.run(*words, node=NODE if "agent" in words else "login", check=False).stdout
        assert "\x1b[2J" not in shown and "\x07" not in shown, words


@pytest.mark.parametrize("output", ["/dev/full", "/proc/self/mem", "/tmp/link"])
def test_output_that_cannot_be_written_keeps_nobody_alive(site: HostileSite, output: str) -> None:
    site.run("ln", "-sfn", "/etc/slurm/slurm.conf", "/tmp/link", user="mallory", node=NODE)
    up = scratch(site, output.rpartition("/")[2])
    script = f"echo $$ >{SCRATCH}/{up.name}; exec sleep 600"
    job = submit(site, "-w", NODE, "--gres=shard:1024", "-o", output, wrap=script)
    with suppress(AssertionError):  # a job whose output cannot be opened does not start
        pid = int(until(lambda: up.exists() and up.read_text(), timeout=5))
        assert exceed(site, pid) < 3.5
        assert not site.lives(pid), "it holds 50 GiB and lives"
    settled(site, [job])


def test_output_that_cannot_be_opened_drains_no_node(site: HostileSite) -> None:
    paths = ("/nowhere/%j", "/dev/null/x", "/etc/passwd", "/run/sluice/agent.sock", "x" * 5000, "/dev/nvidia0")
    settled(site, [submit(site, "-w", NODE, "--gres=shard:512", "-o", path, wrap="true") for path in paths])


def test_an_environment_of_a_megabyte_and_names_of_ours_change_nothing(site: HostileSite) -> None:
    bomb = {f"BOMB_{number}": "x" * 100_000 for number in range(10)}
    ours = {
        "SLUICE_JOB": "1", "SLUICE_UID": "0", "SLUICE_STEP": "whole", "SLUICE_SHARDS": "80000", "SLUICE_GPUS": "0,1,2",
        "SLURM_SPANK_SLUICE_SHARDS": "80000", "SPANK_SLUICE_SHARDS": "80000", "SLURM_JOB_GPUS": "0,1",
        "_SLURM_SPANK_OPTION_sluice_gpu_mem": "80G", "PYTHONPATH": "/tmp", "PYTHONSTARTUP": "/tmp/x.py",
        "LD_PRELOAD": "/tmp/evil.so", "LD_LIBRARY_PATH": "/tmp", "LD_AUDIT": "/tmp/evil.so", "BASH_ENV": "/tmp/x",
        "SLUICE_SOCKET": "/tmp/agent.sock", "SLUICE_LIMIT": "/tmp", "GCONV_PATH": "/tmp", "MALLOC_CONF": "x",
    }  # fmt: skip
    for env in (bomb, ours):
        with site.job(*site.program("quiet"), env=env) as running:
            record = site.holds_to(running)
        assert record["grants"][0]["limit"] == 2048 << 20


LIMITS = ("nofile=0", "nofile=8", "fsize=0", "as=1048576", "core=unlimited", "nproc=1", "cpu=1", "stack=4096", "data=0",
          "memlock=0", "sigpending=0", "msgqueue=0")  # fmt: skip


def test_limits_that_slurm_passes_on_hit_the_job_alone(site: HostileSite) -> None:
    """PropagateResourceLimits: what root starts in the task's place runs under what the user set."""
    options = ["-w", NODE, "--gres=shard:512"]
    jobs = []
    for limit in LIMITS:
        line = ["prlimit", f"--{limit}", "sbatch", "--parsable", "-o", "/dev/null", "--mem=100", "-t", "1", *options]
        passed_on = site.run(*line, "--wrap", "true", user="mallory", cwd="/tmp", check=False).stdout.strip()
        # sbatch itself cannot live with each: then a step is started by a shell that has set its own limit
        steps = f"prlimit --{limit} --pid $$; exec srun --overlap true"
        jobs += [passed_on, submit(site, *options, wrap=steps)]
    settled(site, jobs, 2 * PATIENCE)


# ---- steps, changes and requeues ----


def test_nobody_steps_into_anothers_job(site: HostileSite) -> None:
    with site.job(*site.program("quiet"), user="bob") as victim:
        for more in ((), ("--overlap",), ("--overlap", "--gres=shard:2048"), ("--overlap", "--gres=none", "-N1")):
            done = site.run(
                "timeout",
                "15",
                "srun",
                "--quiet",
                f"--jobid={victim.job}",
                *more,
                "echo",
                "ran",
                user="mallory",
                check=False,
            )
            assert "ran" not in done.stdout and done.returncode != 0
        for words in (
            ["scancel", str(victim.job)],
            ["scontrol", "requeue", str(victim.job)],
            ["scontrol", "update", f"jobid={victim.job}", "timelimit=1"],
            ["scontrol", "suspend", str(victim.job)],
        ):
            assert site.run(*words, user="mallory", check=False).returncode != 0, words
        assert site.lives(victim.pid)


def test_overlapping_steps_share_one_limit(site: HostileSite) -> None:
    """Steps that take turns in holding: each is under the limit, together they are over it."""
    with site.job(*site.program("quiet"), gres="shard:4096") as running:
        pids = []
        steps = []
        try:
            for _ in range(3):
                words = ["srun", "--quiet", "--overlap", f"--jobid={running.job}", *site.program("quiet")]
                step = subprocess.Popen(
                    site.cluster.command(words, user="mallory", cwd="/tmp"), stdout=subprocess.PIPE, text=True
                )
                steps.append(step)
                assert step.stdout
                pids.append(int(step.stdout.readline().split()[1]))
            clock = time.monotonic()
            for pid in pids:
                set_values(site.sim, 0, {"process": f"{pid}:2G"})
            until(lambda: sum(site.lives(pid) for pid in pids) <= 2, timeout=10)
            took = time.monotonic() - clock
        finally:
            set_values(site.sim, 0, {"processes": "none"})
            for step in steps:
                step.kill()
                step.wait()
    assert took < 3.5


CHANGES = (
    "comment={nasty}", "name={nasty}", "timelimit=365-00:00:00", "features=nothing", "gres=gpu:1", "licenses=x:1",
    "numnodes=2", "admincomment=sluice:v=1,rung=none,gpus=0", "tresperjob=gres:shard:80000", "qos=none",
    "trespernode=gres:shard:80000", "account=physics", "partition=none", "reqnodelist=single-2", "wckey={nasty}",
    "stdout=/dev/full", "excnodelist=single-1", "starttime=now+1hour", "endtime=2106-02-07T06:28:15",
)  # fmt: skip


def test_a_running_job_that_its_user_changes_keeps_its_limit(site: HostileSite) -> None:
    with site.job(*site.program("quiet")) as running:
        for change in CHANGES:
            words = ["scontrol", "update", f"jobid={running.job}", change.format(nasty=NASTY)]
            site.run(*words, user="mallory", check=False)
        record = site.holds_to(running)
    assert record["grants"][0]["limit"] == 2048 << 20 and record["user"] == "mallory"


def test_a_job_requeued_again_and_again_without_slurms_pause_costs_itself_alone(site: HostileSite) -> None:
    """slurmd does not run the prolog of a run that its user makes begin at once: its task is refused, and it waits."""
    job = submit(site, "--requeue", "-w", NODE, "--gres=shard:1024", wrap="exec sleep 600")

    def state() -> str:
        site.run("scontrol", "update", f"jobid={job}", "starttime=now", user="mallory", check=False)
        return site.run("squeue", "-h", "-j", job, "-o", "%T", check=False).stdout.strip()

    for _ in range(3):
        if not until(state, lambda now: now in ("RUNNING", ""), PATIENCE):
            break
        for _ in range(10):
            site.run("scontrol", "requeue", job, user="mallory", check=False)
        assert not site.broken_nodes(), site.broken_nodes()
    site.run("scancel", job, check=False)


def test_a_job_requeued_while_it_is_over_its_limit_is_still_ended(site: HostileSite) -> None:
    up = scratch(site, "requeued")
    job = submit(
        site, "--requeue", "-w", NODE, "--gres=shard:1024", wrap=f"echo $$ >{SCRATCH}/{up.name}; exec sleep 600"
    )
    pid = int(until(lambda: up.exists() and up.read_text().strip(), timeout=PATIENCE))
    set_values(site.sim, 0, {"process": f"{pid}:60G"})
    try:
        site.run("scontrol", "requeue", job, user="mallory", check=False)
        until(lambda: not site.lives(pid), timeout=10)
    finally:
        set_values(site.sim, 0, {"processes": "none"})
    site.run("scancel", job, check=False)


def test_short_steps_that_end_while_they_are_judged(site: HostileSite) -> None:
    """Many steps a second, each over the limit for a moment: the watchdog ends what is there and nobody else's."""
    one = f"srun --overlap --quiet timeout -s KILL 0.6 {shlex.join(site.program('quiet'))}"
    loop = f"for i in 1 2 3 4 5 6; do {one} & done; wait"
    with site.job("sh", "-c", f"echo up $$; while :; do {loop}; done"):
        for _ in range(3):
            site.programs_of_neighbour()
        site.neighbour_is_served()


def test_files_sent_to_a_job_are_written_as_its_user(site: HostileSite) -> None:
    ours = (
        "/run/sluice/x",
        "/run/sluice/limit/job/x",
        "/run/sluice/preload",
        "/etc/ld.so.preload",
        str(PROGRAMS / "sluice-prolog"),
    )
    send = f"for file in {shlex.join(ours)}; do sbcast -f /etc/passwd $file && echo wrote $file; done; echo done"
    words = ["salloc", "--quiet", "--mem=100", "-w", NODE, "--gres=shard:2048", "sh", "-c", send]
    assert site.run(*words, user="mallory", timeout=PATIENCE).stdout == "done\n"


def test_a_task_prolog_of_the_users_own_says_what_it_likes(site: HostileSite) -> None:
    prolog = scratch(site, "prolog")
    prolog.write_text(
        "#!/bin/sh\necho export LD_PRELOAD=libc.so.6\necho unset CUDA_VISIBLE_DEVICES\necho export SLUICE_JOB=1\n"
    )
    prolog.chmod(0o755)
    options = [f"--task-{when}={SCRATCH / prolog.name}" for when in ("prolog", "epilog")]
    with site.job(*site.program("quiet"), options=options) as running:
        record = site.holds_to(running)
    assert record["grants"][0]["limit"] == 2048 << 20


# ---- MPS ----


def test_a_deep_tree_in_the_folder_of_mps_logs_fails_nothing(site: HostileSite, shares: None) -> None:
    deep = (
        "import os\nfor name in ('CUDA_MPS_LOG_DIRECTORY', 'CUDA_MPS_PIPE_DIRECTORY'):\n"
        "    try:\n        os.chdir(os.environ[name])\n"
        "        for _ in range(1500):\n            os.mkdir('d'); os.chdir('d')\n"
        "        for n in range(500):\n            os.symlink('/etc', f'l{n}'); os.mkfifo(f'p{n}')\n"
        "    except (KeyError, OSError) as error:\n        print(error)\nprint('done')"
    )
    ran = site.run(*site.srun(PYTHON, "-c", deep, gres="shard:2048"), user="mallory", timeout=PATIENCE)
    assert "done" in ran.stdout
    until(lambda: "job_" not in site.run("ls", "/run/sluice/mps", node=NODE, check=False).stdout)
    assert not site.broken_nodes(), site.broken_nodes()


# ---- memory that outlives its owner ----

EXPORT = """
import ctypes as c, os, sys, time
cu = c.CDLL("libcuda.so.1")
context, address, handle = c.c_void_p(), c.c_uint64(), c.create_string_buffer(64)
assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0 and cu.cuCtxSetCurrent(context) == 0
path = sys.argv[1]
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_ubyte * 64)]
if sys.argv[2:] == ["take"]:
    code = cu.cuIpcOpenMemHandle_v2(c.byref(address), Handle.from_buffer_copy(open(path, "rb").read()), 1)
    print("code", code, flush=True)
else:
    assert cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(1000 << 20)) == 0
    assert cu.cuIpcGetMemHandle(handle, address) == 0
    open(path, "wb").write(handle.raw); os.chmod(path, 0o644)
    print("code 0", flush=True)
time.sleep(600)
"""


def test_memory_handed_to_another_job_does_not_cost_the_node(site: HostileSite) -> None:
    """A job imports memory of one that then ends: its GPU is returned all the same."""
    path = f"/tmp/handle.{time.time_ns()}"
    with (
        site.job(PYTHON, "-c", EXPORT, path, until="code", gres="shard:4096") as giver,
        site.job(PYTHON, "-c", EXPORT, path, "take", until="code", user="trudy"),
    ):
        site.run("scancel", str(giver.job))
        until(lambda: site.record(giver.job), timeout=30)
        assert not site.broken_nodes(), site.broken_nodes()
        site.programs_of_neighbour()


# ---- other ports ----

GARBAGE = r"""
import os, socket, struct
parts = b"", b"{{", b"[" * 70000, b"\0" * 1000, os.urandom(5000), b"MUNGE:" + b"A" * 99999, b"GET / HTTP/1.0\r\n\r\n"
for part in parts:
    for how in range(3):
        try:
            one = socket.create_connection(("ctl1", {port}), 2)
            one.settimeout(0.3)
            one.sendall(part)
            if how == 0:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how == 1:
                one.shutdown(socket.SHUT_WR)
                one.recv(100)
            one.close()
        except OSError:
            pass
print("done")
"""


def test_other_daemons_ports_take_garbage(site: HostileSite) -> None:
    """The controllers' daemon, from a job: bytes that are no message, half messages, and resets."""
    program = GARBAGE.format(port=site.cluster.environment()["SLUICE_CONTROLLERD_PORT"])
    ran = site.run(*site.srun(PYTHON, "-c", program, gres=""), user="mallory", timeout=PATIENCE)
    assert ran.stdout == "done\n"
    assert all(daemon.status is None for daemon in site.cluster.daemons()), site.cluster.daemons()
