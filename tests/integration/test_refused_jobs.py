"""A request can fail its job, never a node: shares and power that cannot be given, forged or valid, also in arrays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE, python_in_tree
from gpu_sim.fields import get_values, set_values
from policy.compiled import CompiledPolicy, Global, GpuClass
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from policy.node_power import NodeCap, NodePower, NodeThermal
from sluice.slurm.refused import reason_in
from tests.integration.jobs import submit
from tests.integration.platforms import SINGLE
from tests.integration.settled import PATIENCE, lasts_until, status, until
from tests.programs.build import build_program

pytestmark = pytest.mark.cluster

NODE = "single-1"
OPTION = "_SLURM_SPANK_OPTION_sluice_gpu"
SCRIPT = "#!/bin/sh\necho ran\n"


@pytest.fixture(scope="module")
def description(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    platform = tmp_path_factory.mktemp("platform") / "single.yaml"
    platform.write_text(SINGLE)
    return {
        "nodes": [{"names": NODE, "platform": str(platform)}],
        "controllers": 1,
        "accounting": False,
        "agent": True,
        "users": [{"name": "alice"}, {"name": "bob"}],
    }


def prepared(cluster: DevCluster) -> DevCluster:
    """MPS gives shares."""
    policy = cluster.slurm_conf_dir() / "sluice.node.json"
    policy.write_text(NodePolicy(limits=NodeLimits(ladder=("mps", "limiter", "watchdog"))).render())
    return cluster


@pytest.fixture(scope="module")
def stock(description: dict[str, Any], make_shared_cluster: Callable[..., DevCluster]) -> DevCluster:
    """job_submit/sluice is not loaded: whatever a client sends comes to the node."""
    return prepared(make_shared_cluster(description))


@pytest.fixture(scope="module", params=["22.05", pytest.param("24.11", marks=pytest.mark.trixie)])
def cluster(
    request: pytest.FixtureRequest, description: dict[str, Any], make_shared_cluster: Callable[..., DevCluster]
) -> DevCluster:
    """Level admit: shares are checked, and not placed by."""
    root = request.getfixturevalue("trixie_root") if request.param == "24.11" else None
    h100 = GpuClass(name="h100", gpu_types=["h100"], power_least_w=200, power_most_w=700)
    settings = Global(gpu_shares=True)
    policy = CompiledPolicy(generated_s=0, source="test", settings=settings, classes=[h100]).render()
    conf = f"Epilog={INSIDE}/programs/*-epilog\nSchedulerParameters=batch_sched_delay=0,sched_min_interval=0\n"
    own = {"sluice": {"level": "admit", "policy": policy}, "slurm_conf": conf}
    made = prepared(make_shared_cluster(description | own, root=root))
    until(lambda: status(made)["level"], lambda level: level == "admit")
    return made


@pytest.fixture(scope="module")
def client() -> Iterator[Path]:
    """A client of one's own, built against this machine's libslurm."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        yield build_program("forged_submit", Path(folder) / "forged_submit", "-lslurm")


def forged(cluster: DevCluster, client: Path, *strings: str, requeue: int = 1, array: str = "-") -> str:
    words = [client, str(requeue), array, "gres:shard:1024", SCRIPT, *strings]
    return cluster.run(words, user="alice", timeout=60).stdout.strip()


def node_state(cluster: DevCluster) -> str:
    return cluster.run(["sinfo", "-h", "-n", NODE, "-o", "%T %E"]).stdout.strip()


def assert_in_service(cluster: DevCluster) -> None:
    """Not drained, and jobs run."""
    cluster.wait_idle(timeout=PATIENCE)
    assert node_state(cluster) == "idle none"
    ran = cluster.run(["srun", "--quiet", "--gres=shard:1024", "echo", "ran"], user="bob", timeout=PATIENCE)
    assert ran.stdout == "ran\n"


def jobs(cluster: DevCluster, job: str) -> list[str]:
    """State, reason, restarts and comment of a job, or of each task of an array."""
    form = "State:20,Reason:40,RestartCnt:4,admin_comment:400"
    out = cluster.run(["squeue", "-h", "-r", "-t", "all", "-j", job, "-O", form], check=False).stdout
    return [" ".join(line.split()) for line in out.splitlines()]


HOLDS = "import pathlib as p, prolog_epilog.holds as h; h.Holds(p.Path('/run/sluice/agent/refused')).run()"


def is_newer(cluster: DevCluster) -> bool:
    return "24.11" in cluster.run(["sinfo", "--version"]).stdout


def look_at(cluster: DevCluster, job: str) -> list[str]:
    """With 24.11 the agent runs on this machine's system, whose commands are 22.05's: its duty is done for it."""
    if is_newer(cluster):
        cluster.run(python_in_tree(["-c", HOLDS]), node=NODE, check=False)
    return jobs(cluster, job)


def await_held(cluster: DevCluster, job: str, count: int = 1) -> list[str]:
    held = re.compile("PENDING job.requeued.in.held.state 1 sluice-refused: ")
    seen: list[str] = until(
        lambda: look_at(cluster, job),
        lambda seen: len(seen) == count and all(held.match(line) for line in seen),
        shows=lambda: (cluster.log_tail(f"agent@{NODE}", 30), cluster.log_tail("slurmctld@ctl1", 30)),
    )
    return [reason_in(line) for line in seen]


def record(cluster: DevCluster, job: str) -> dict[str, Any]:
    path = cluster.node_folder(NODE) / f"records/{job}.json"
    until(path.exists)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def gone(cluster: DevCluster, job: str) -> None:
    cluster.run(["scancel", job])


FORGED = [f"{OPTION}_share=50%", f"{OPTION}-share=50%", f"SPANK_{OPTION}_share=-1", f"{OPTION}_share="]


@pytest.mark.parametrize("string", FORGED)
def test_a_forged_share_holds_the_job_and_not_the_node(stock: DevCluster, client: Path, string: str) -> None:
    job = forged(stock, client, string)
    [reason] = await_held(stock, job)
    assert reason.startswith(f"on {NODE}: --gpu-share=") and "is not a number from 1 to 100" in reason
    found = record(stock, job)
    assert found["refused"].startswith("--gpu-share=") and found["grants"] == []
    assert "ran" not in output(stock, job)
    gone(stock, job)
    assert_in_service(stock)


def test_forged_power_holds_the_job_and_not_the_node(stock: DevCluster, client: Path) -> None:
    for string, why in (
        (f"{OPTION}_power=lots", "is not a number of watts"),
        (f"{OPTION}-power=701W", "at most 700 W"),
    ):
        job = forged(stock, client, string)
        [reason] = await_held(stock, job)
        assert reason.startswith(f"on {NODE}: --gpu-power=") and why in reason
        gone(stock, job)
    job = forged(stock, client, "SLUICE_GPU_POWER=1")  # as slurmctld says that a budget lets it start: its own loss
    assert record(stock, job)["grants"][0]["planned_mw"] == 200_000
    assert_in_service(stock)
    assert limit(stock) == 700


def output(cluster: DevCluster, job: str) -> str:
    return cluster.run(["sh", "-c", f"cat {INSIDE}/home/alice/forged-{job} 2>/dev/null"], node=NODE, check=False).stdout


def test_an_array_of_refused_jobs_drains_nothing_while_a_neighbour_runs(stock: DevCluster, client: Path) -> None:
    words = ["srun", "--quiet", "--gres=shard:1024", "sh", "-c", f"echo up; {lasts_until(INSIDE / 'array')}; echo done"]
    with subprocess.Popen(stock.command(words, user="bob"), stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout and neighbour.stdout.readline() == "up\n"
        job = forged(stock, client, f"{OPTION}_share=50%", array="1-12")
        reasons = await_held(stock, job, 12)
        (stock.folder / "array").touch()
        assert neighbour.stdout.read() == "done\n" and neighbour.wait(PATIENCE) == 0
    assert len(reasons) == 12
    gone(stock, job)
    assert_in_service(stock)


def test_a_refused_job_that_may_not_be_requeued_says_why_and_ends(stock: DevCluster, client: Path) -> None:
    job = forged(stock, client, f"{OPTION}_share=50%", requeue=0)
    [seen] = until(lambda: jobs(stock, job), lambda lines: lines and lines[0].split()[0] in ("FAILED", "CANCELLED"))
    assert "is refused: --gpu-share='50%'" in output(stock, job) and "ran" not in output(stock, job), seen
    assert_in_service(stock)


@pytest.mark.parametrize("requeue", [1, 0])
def test_a_refused_jobs_name_points_at_no_neighbours_job(stock: DevCluster, client: Path, requeue: int) -> None:
    """scontrol shows the name before most of what Slurm itself says of a job."""
    words = ["sbatch", "--parsable", "-o", "/dev/null", "--array=3", "--gres=shard:1024", "--wrap=exec sleep 600"]
    neighbour = stock.run(words, user="bob", cwd="/tmp").stdout.strip()
    until(lambda: jobs(stock, neighbour), lambda lines: lines and lines[0].startswith("RUNNING"))
    name = f"JOB_NAME=x ArrayJobId={neighbour} ArrayTaskId=3 JobState=RUNNING Restarts=0 Requeue={requeue} BatchFlag=1"
    words = ["env", name, client, str(requeue), "-", "gres:shard:1024", SCRIPT, f"{OPTION}_share=50%"]
    job = stock.run(words, user="alice", timeout=60).stdout.strip()
    record(stock, job)

    def untouched() -> bool:
        return jobs(stock, neighbour)[0].startswith("RUNNING None 0")

    until(lambda: not untouched() or not stock.run(["ls", "/run/sluice/agent/refused"], node=NODE).stdout)
    assert untouched(), jobs(stock, neighbour)
    if requeue:
        await_held(stock, job)
    gone(stock, neighbour)
    gone(stock, job)
    assert_in_service(stock)


def test_a_refused_job_waits_for_a_controller_that_is_away(
    description: dict[str, Any], make_cluster: Callable[..., DevCluster], client: Path
) -> None:
    """And for an agent that was killed meanwhile."""
    stock = prepared(make_cluster(description))
    job = forged(stock, client, f"{OPTION}_share=1e2")
    stock.stop_daemon("slurmctld@ctl1")
    agent = f"agent@{NODE}"
    before = stock.log(agent).read_text().count("action=ready")
    stock.stop_daemon(agent, number=9)
    stock.start_daemon(agent)
    until(lambda: stock.log(agent).read_text().count("action=ready") > before)
    stock.start_daemon("slurmctld@ctl1")
    await_held(stock, job)
    gone(stock, job)
    assert_in_service(stock)


def test_a_run_without_its_prolog_begins_again(stock: DevCluster) -> None:
    """On a busy node slurmd 22.05 takes a job that begins again soon for one whose prolog has run."""
    others = ["sh", "-c", "while :; do srun --quiet true; done"]
    job = sbatch(stock, "--requeue", script=f"echo ran $SLURM_RESTART_COUNT; {lasts_until(INSIDE / 'enough')}")
    words = stock.command(others, user="bob")
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True) as busy:
        try:
            until(lambda: begins_again_without_prolog(stock, job))
        finally:
            os.killpg(busy.pid, signal.SIGTERM)
    until(lambda: jobs(stock, job)[0].startswith("PENDING BeginTime"))
    assert "sluice-refused" not in jobs(stock, job)[0]
    (stock.folder / "enough").touch()

    def completed() -> bool:
        """Without its prolog it may begin again more than once: where slurmd has not yet forgotten the run before."""
        [seen] = jobs(stock, job)
        if seen.startswith("PENDING BeginTime"):
            time.sleep(3)  # slurmd forgets what has expired every two seconds
            stock.run(["scontrol", "update", f"jobid={job}", "starttime=now"], user="alice", check=False)
        return seen.startswith("COMPLETED")

    until(completed)
    assert record(stock, job)["grants"][0]["limit"] == 1024 << 20
    gone(stock, job)
    assert_in_service(stock)


def begins_again_without_prolog(cluster: DevCluster, job: str) -> bool:
    """Whether it has; its user makes it begin again at once."""
    [seen] = jobs(cluster, job)
    assert not seen.startswith("FAILED"), seen
    if seen.startswith("RUNNING") and output(cluster, job).startswith("ran"):
        cluster.run(["scontrol", "requeue", job], user="alice", check=False)
    elif seen.startswith("PENDING"):
        cluster.run(["scontrol", "update", f"jobid={job}", "starttime=now"], user="alice", check=False)
    return f'by="scontrol requeue {job}"' in cluster.log(f"agent@{NODE}").read_text()


# ---- where submissions are checked ----


def sbatch(cluster: DevCluster, *options: str, script: str = "exec sleep 600") -> str:
    ask = ("-o", "/run/sluice-cluster/home/alice/forged-%j", "--gres=shard:1024")
    return submit(cluster, *ask, *options, wrap=script, cwd="/tmp")


def test_a_job_has_its_gpus_that_starts_before_its_node_has_registered(cluster: DevCluster) -> None:
    """With a slurmctld that has just started: nodes register 3 s later. Slurm takes a busy node for available when it
    has answered anything; 22.05 does not know its GPUs then, and the job waits."""
    busy = submit(cluster, "-o", f"{INSIDE}/home/alice/forged-%j", wrap="echo up; exec sleep 600")
    until(lambda: "up" in output(cluster, busy))
    cluster.stop_daemon("slurmctld@ctl1")
    cluster.start_daemon("slurmctld@ctl1")
    cluster.run(["scancel", "-s", "USR1", busy])  # the node answers it
    job = sbatch(cluster, script="echo ran $SLURM_RESTART_COUNT")
    until(
        lambda: output(cluster, job),
        lambda out: out == "ran\n",
        shows=lambda: (jobs(cluster, job), cluster.log_tail(f"agent@{NODE}"), cluster.log_tail("slurmctld@ctl1", 30)),
    )
    assert record(cluster, job)["grants"][0]["limit"] == 1024 << 20
    gone(cluster, busy)
    assert_in_service(cluster)


def test_an_epilog_has_its_jobs_gpus_before_the_node_has_registered(cluster: DevCluster) -> None:
    """slurmctld loads its plugins of GRES then, and does not name a job's GPUs without them."""
    program, seen = cluster.folder / "programs/seen-epilog", cluster.node_folder(NODE) / "epilogs"
    program.write_text(f'#!/bin/sh\necho "$SLURM_JOB_ID $SLURM_JOB_GPUS" >>{INSIDE}/nodes/{NODE}/epilogs\n')
    program.chmod(0o755)
    job = sbatch(cluster, script="echo up; exec sleep 600")
    until(lambda: "up" in output(cluster, job))
    slurmd = next(one.pid for one in cluster.daemons() if one.name == f"slurmd@{NODE}")
    cluster.run(["kill", "-STOP", str(slurmd)])
    try:
        cluster.restart_slurmctld()
        cluster.run(["scancel", job])
        until(lambda: jobs(cluster, job)[0], lambda line: line.startswith(("COMPLETING", "CANCELLED")))
    finally:
        cluster.run(["kill", "-CONT", str(slurmd)])
    said: str = until(seen.read_text, lambda text: f"{job} " in text and text.endswith("\n"))  # others' may be late
    assert f"{job} 0\n" in said
    program.unlink()
    again = ["srun", "--quiet", "--gres=shard:1024", "true"]  # refused by 22.05 before the registration
    until(lambda: cluster.run(again, user="bob", check=False, timeout=PATIENCE).returncode == 0)
    assert_in_service(cluster)


@pytest.mark.parametrize("share", ["50%", "050", "50"])
def test_a_share_that_was_admitted_is_what_the_node_sees(cluster: DevCluster, share: str) -> None:
    job = sbatch(cluster, f"--gpu-share={share}", script="echo ran")
    found = record(cluster, job)
    assert (found["share_percent"], found["share_by"], found["refused"]) == (50, "mps", ""), found
    assert_in_service(cluster)


def test_two_valid_shares_that_do_not_fit_together(cluster: DevCluster) -> None:
    first = sbatch(cluster, "--gpu-share=60", script="echo up; exec sleep 600")
    until(lambda: "up" in output(cluster, first))  # its prolog has run: the share is taken
    second = sbatch(cluster, "--gpu-share=60", "--array=1-3")
    reasons = await_held(cluster, second, 3)
    assert all("the jobs on GPU 0 leave 40 % of it" in reason for reason in reasons)
    assert jobs(cluster, first)[0].startswith("RUNNING")
    gone(cluster, first)
    cluster.wait_idle(timeout=PATIENCE)
    cluster.run(["scontrol", "release", f"{second}_1"], user="alice")  # its user's to say
    waits = ("RUNNING", "PENDING BeginTime")  # Slurm starts what was requeued two minutes later
    until(lambda: jobs(cluster, f"{second}_1"), lambda lines: lines and lines[0].startswith(waits))
    gone(cluster, second)
    assert_in_service(cluster)


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_a_waiting_user_gets_the_reason(cluster: DevCluster, command: str) -> None:
    first = sbatch(cluster, "--gpu-share=60", script="echo up; exec sleep 600")
    until(lambda: "up" in output(cluster, first))  # its prolog has run: the share is taken
    words = [command, "--quiet", "--gres=shard:1024", "--gpu-share=60"]
    words += ["echo", "ran"] if command == "srun" else ["sh", "-c", "srun --quiet echo ran"]
    done = cluster.run(words, user="alice", check=False, timeout=PATIENCE)
    assert done.returncode != 0 and "ran" not in done.stdout
    assert "the jobs on GPU 0 leave 40 % of it" in done.stderr, done.stderr
    gone(cluster, first)
    assert_in_service(cluster)


def test_what_no_command_sends_is_refused_at_submission(cluster: DevCluster, client: Path) -> None:
    if is_newer(cluster):
        pytest.skip("the client is built against this machine's libslurm")
    for strings in (
        ["+70000"],
        ["+30000", "+40000"],
        [f"SPANK_{OPTION}_share=50"],
        [f"{OPTION}_share=5", f"{OPTION}-share=6"],
    ):
        assert forged(cluster, client, *strings).startswith("refused: "), strings
    job = forged(cluster, client, f"{OPTION}-share=050%")
    assert record(cluster, job)["share_percent"] == 50
    assert_in_service(cluster)


# ---- power ----

READ = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetPowerManagementLimit(n.nvmlDeviceGetHandleByIndex(0)))"


def limit(cluster: DevCluster) -> int:
    """Watts."""
    return int(get_values(cluster.node_folder(NODE) / "gpu_sim", 0)["power_limit"])


@pytest.fixture
def capped(cluster: DevCluster) -> Iterator[DevCluster]:
    """The node's policy has a cap; afterwards it is as before."""
    path = cluster.slurm_conf_dir() / "sluice.node.json"
    before = path.read_text()
    thermal = NodeThermal(after_s=1, lower_percent=20, least_percent=80)
    power = NodePower(caps=(NodeCap(watts=400, at_most=500),), thermal=thermal)
    path.write_text(NodePolicy.model_validate_json(before).model_copy(update={"power": power}).render())
    yield cluster
    path.write_text(before)


def test_power_is_capped_before_the_tasks_and_restored(capped: DevCluster) -> None:
    python = python_in_tree(["-c", READ]) if is_newer(capped) else [sys.executable, "-c", READ]
    read = ["--quiet", "--gres=shard:1024", *python]
    for option, watts in ((["--gpu-power=300W"], 300), (["--gpu-power=450"], 450), ([], 400)):
        assert capped.run(["srun", *option, *read], user="bob", timeout=PATIENCE).stdout == f"{watts}000\n"
        until(lambda: limit(capped), lambda now: now == 700)
    script = capped.folder / "capped.sh"
    script.write_text(
        f"#!/bin/sh\n#SBATCH --gpu-power=250W\n#SBATCH --gres=shard:1024\n{lasts_until(INSIDE / 'warm')}\n"
    )
    words = ["sbatch", "--parsable", "-o", "/dev/null", INSIDE / "capped.sh"]
    job = capped.run(words, user="alice", cwd="/tmp").stdout.strip()
    until(lambda: limit(capped), lambda now: now == 250)
    capped.stop_daemon(f"agent@{NODE}", number=signal.SIGKILL)
    other = sbatch(capped, "--gpu-power=350W", script=f"echo up; {lasts_until(INSIDE / 'warm')}")  # the greater counts
    capped.start_daemon(f"agent@{NODE}")
    until(lambda: limit(capped), lambda now: now == 350)
    assert capped.run(
        ["sbatch", "--gres=shard:1", "--gpu-power=199W", "--wrap=true"], user="bob", check=False
    ).returncode
    (capped.folder / "warm").touch()
    until(lambda: limit(capped), lambda now: now == 700)
    for one, watts in ((job, 250), (other, 350)):
        assert record(capped, one)["grants"][0]["power_mw"] == 1000 * watts
    assert_in_service(capped)


def test_power_that_cannot_be_had_is_refused(capped: DevCluster) -> None:
    for watts, why in (("199W", "GPUs of class h100 take 200 to 700 W"), ("lots", "watts of each GPU, 1 to 100000")):
        for command in (["sbatch", "--wrap=true"], ["srun", "true"]):
            words = [command[0], "--gres=shard:1024", f"--gpu-power={watts}", *command[1:]]
            done = capped.run(words, user="alice", check=False, cwd="/tmp")
            assert done.returncode != 0 and why in done.stderr, done.stderr
    job = sbatch(capped, "--gpu-power=501W")  # slurmctld knows no tenants here; the node has the policy
    [reason] = await_held(capped, job)
    assert "--gpu-power=501W: at most 500 W on this GPU" in reason
    gone(capped, job)
    assert_in_service(capped)


def test_a_gpu_that_slows_down_by_heat_gets_a_lower_cap(capped: DevCluster) -> None:
    path, sim = capped.slurm_conf_dir() / "sluice.node.json", capped.node_folder(NODE) / "gpu_sim"
    path.write_text(path.read_text().replace('"caps": [', '"caps_of_before": ['))  # heat alone
    job = sbatch(capped, script="exec sleep 600")
    set_values(sim, 0, {"throttle": "hw_thermal"})
    until(lambda: limit(capped), lambda now: now == 560)
    set_values(sim, 0, {"throttle": "none"})
    until(lambda: limit(capped), lambda now: now == 700)  # cool for six seconds
    gone(capped, job)
    assert_in_service(capped)
