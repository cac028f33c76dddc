"""Jobs that are saved on one node and go on on another: their states move to storage that both mount.

`SLUICE_CRIU` as in test_system_checkpoint.py.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from tests.integration.gpu_saved_jobs import SAVING_PAIR
from tests.integration.jobs import sbatch, shown
from tests.integration.saved_jobs import (
    GPU_COUNTER,
    NODE,
    Counter,
    can_save,
    images,
    killed_in,
    saving_cluster,
    set_policy,
)
from tests.integration.settled import start_again, until

pytestmark = pytest.mark.cluster

OTHER = "n2"
STATES = "states"
ONE = ("--gres=gpu:1", "-c1")
IS_FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
FULL = pytest.mark.skipif(not IS_FULL, reason="long: SLUICE_TEST_SCALE=full")
HELPER = "/run/sluice-cluster/programs/sluice-checkpoint"
STEPS = {
    "save": (NODE, "process", HELPER, "save"),
    "dump": (NODE, "process", "dump", "--tree"),
    "dump, agent": (NODE, "agent", "dump", "--tree"),
    "write": (NODE, "agent", f"{INSIDE}/nodes/{NODE}/checkpoints/images/.half-*"),
    "move": (NODE, "agent", f"{INSIDE}/{STATES}/images/.half-*"),
    "resume": (OTHER, "process", HELPER, "resume"),
    "restore": (OTHER, "unanswered", "restore", "--leave-stopped"),
    "restore begins": (OTHER, "process", "restore", "--leave-stopped"),
    "restore, agent": (OTHER, "agent", "restore", "--leave-stopped"),
}
IN_MAKE_TEST = ("move", "restore")
ROUNDS = 25 if IS_FULL else 1


@pytest.fixture(scope="module")
def cluster(make_shared_cluster: Callable[..., DevCluster], tmp_path_factory: pytest.TempPathFactory) -> DevCluster:
    made = saving_cluster(
        make_shared_cluster,
        tmp_path_factory.mktemp("platform"),
        SAVING_PAIR,
        nodes=f"{NODE},{OTHER}",
        # As on a site, the script of a job has the same path on each node.
        slurm_conf="SlurmdSpoolDir=/var/lib/sluice/spool\n",
    )
    (made.folder / STATES).mkdir(mode=0o700)
    shared(made)
    until(lambda: can_save(made), timeout=60)
    until(lambda: sorted(path.name for path in (made.folder / STATES / "nodes").glob("[!.]*")), [NODE, OTHER].__eq__)
    return made


def shared(cluster: DevCluster, **more: Any) -> None:
    set_policy(cluster, {"shared": str(INSIDE / STATES), **more})


def only(cluster: DevCluster, node: str) -> None:
    """Jobs start there alone."""
    for name in (NODE, OTHER):
        words = ["State=RESUME"] if name == node else ["State=DRAIN", "Reason=test"]
        cluster.run(["scontrol", "update", f"NodeName={name}", *words], check=False)


def moved(cluster: DevCluster, job: Counter) -> None:
    """Wait until its state is on shared storage, and not on its node any more."""
    image = cluster.folder / STATES / "images" / f"{job.id}-0"
    until(lambda: image.exists() and not list(images(cluster).iterdir()), timeout=60, shows=job.all_said)


def said_of(cluster: DevCluster, job: Counter) -> str:
    """What users see of it."""
    return str(cluster.run(["squeue", "-ha", "-t", "all", "-j", job.id, "-O", "admin_comment:500"]).stdout.strip())


def keys(cluster: DevCluster, node: str) -> set[str]:
    return {path.name for path in (cluster.folder / "nodes" / node / "checkpoints/keys").glob("job-*")}


@pytest.mark.parametrize("kind", ["gpu", pytest.param("processes", marks=FULL)])
def test_a_job_goes_on_on_another_node(cluster: DevCluster, kind: str) -> None:
    only(cluster, NODE)
    words: dict[str, Any] = {"script": GPU_COUNTER} if kind == "gpu" else {}
    job = Counter(cluster, f"moves-{kind}", *(ONE if kind == "gpu" else ()), last=40, **words)
    job.counts(10)
    job.save()
    until(lambda: shown(cluster, job.id)["JobState"], "PENDING".__eq__, shows=job.all_said)
    moved(cluster, job)
    until(lambda: said_of(cluster, job), lambda said: f"goes on on {NODE} and 1 other node" in said, timeout=30)
    assert f"job-{job.id}" in keys(cluster, NODE) and f"job-{job.id}" not in keys(cluster, OTHER)
    only(cluster, OTHER)
    start_again(cluster, job.id)
    assert job.ended()["ExitCode"] == "7:0", job.all_said()
    assert job.is_exact() and shown(cluster, job.id)["NodeList"] == OTHER, job.all_said()
    assert f"job-{job.id}" in keys(cluster, OTHER)
    assert not list((cluster.folder / STATES / "images").iterdir())


def test_no_task_and_no_command_has_the_key(cluster: DevCluster) -> None:
    only(cluster, NODE)
    asks = "scontrol show job -dd $SLURM_JOB_ID; scontrol write batch_script $SLURM_JOB_ID -"
    script = f"env; tr '\\0' '\\n' </proc/self/environ; srun --overlap env; {asks}; sleep 2"
    said = cluster.folder / "home/alice/key"
    command = ["--checkpoint=system", "-o", f"{INSIDE}/home/alice/key", "--wrap", script]
    job = sbatch(cluster, *command, user="alice")
    path = cluster.folder / "nodes" / NODE / "checkpoints/keys" / f"job-{job}"
    until(path.exists)
    key = path.read_bytes()
    assert len({*key}) > 8
    until(lambda: shown(cluster, job)["JobState"], "COMPLETED".__eq__)
    text = said.read_text()
    assert "JobState=RUNNING" in text and key.hex() not in text and "SAVE_KEY" not in text
    # slurmctld's state alone has it: no log, and nothing on the node but the agent's file.
    words = ["grep", "-rlaF", "--devices=skip", key.hex(), str(cluster.folder)]
    kept = [Path(name) for name in subprocess.run(words, capture_output=True, text=True).stdout.split()]
    assert all("job_state" in path.name and not path.stat().st_mode & 0o077 for path in kept), kept


def waits_or_ends(job: Counter) -> bool:
    return shown(job.cluster, job.id)["JobState"] == "PENDING" or str(job.last - 1) in job.words()


@pytest.mark.parametrize("step", STEPS if IS_FULL else IN_MAKE_TEST)
def test_a_kill_in_a_step_costs_at_most_the_work_so_far(cluster: DevCluster, step: str) -> None:
    """The last run is complete and in order, and a state that was whole is resumed, or not, but never twice."""
    node, victim, *words = STEPS[step]
    shared(cluster, rate_bytes=1 << 20 if step == "move" else 1 << 30)
    went_on = 0
    tried_again: list[Counter] = []
    for round_ in range(ROUNDS):
        only(cluster, NODE)
        job = Counter(cluster, f"{step.replace(', ', '-')}-{round_}", last=40)
        job.counts(10)
        if node == NODE:
            with killed_in(cluster, node, victim, *words):
                job.save()
        else:
            job.save()
        until(partial(waits_or_ends, job), shows=job.all_said)
        if str(job.last - 1) not in job.words():  # else it went on, as it could not be saved
            if node == OTHER or step == "move":
                moved(cluster, job)
            only(cluster, OTHER)
            if node == OTHER:
                with killed_in(cluster, node, victim, *words) as said:
                    start_again(cluster, job.id)
                if said == ["in time"]:
                    tried_again.append(job)
            else:
                start_again(cluster, job.id)
        assert job.ended()["ExitCode"] == "7:0", job.all_said()
        job.check_last_run()
        went_on += job.is_exact()
    again = [said_of(cluster, job) for job in tried_again if not job.is_exact()]
    assert not again, ("it had not run when CRIU was killed", again, cluster.log_tail(f"agent@{OTHER}", 40))
    assert not list((cluster.folder / STATES / "images").iterdir())
    logs = [cluster.log_tail(f"agent@{name}", 20) for name in (NODE, OTHER)]
    assert went_on >= ROUNDS // 2 or "restore" in step or "dump" in step, logs
    print(f"{step}: {ROUNDS} killed, {went_on} went on; {len(tried_again)} were tried again")
