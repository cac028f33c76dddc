"""--gpu-role on real daemons: GPUs by purpose, laid out as the job starts, and what its tasks find of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global
from sluice.cli.explain import render
from sluice.explain.explanation import explain_job, parse_job
from tests.integration.conftest import MakeCluster
from tests.integration.jobs import submit
from tests.integration.settled import set_level, until

pytestmark = pytest.mark.cluster

POLICY = CompiledPolicy(settings=Global(placement="sluice")).render()
HALVES = {"prefill": [[0, 1, 2, 3]], "decode": [[4, 5, 6, 7]]}
SHOW = (
    "echo $SLURMD_NODENAME ${SLUICE_GPU_ROLE:-none} ${SLUICE_GPU_ROLE_RANK:-x} ${SLUICE_GPU_ROLE_SIZE:-x} "
    "$CUDA_VISIBLE_DEVICES"
)


@pytest.fixture(scope="module", params=["native", pytest.param("trixie", marks=pytest.mark.trixie)])
def cluster(request: pytest.FixtureRequest, make_shared_cluster: MakeCluster) -> DevCluster:
    """Two DGX H100, with an NVSwitch and two sockets each."""
    root: Path | None = None if request.param == "native" else request.getfixturevalue("trixie_root")
    description = {
        "nodes": [{"names": "h-[1-2]", "platform": "dgx-h100"}],
        "controllers": 1,
        "accounting": False,
        "agent": True,
        "users": [{"name": "alice"}],
        "sluice": {"level": "place", "policy": POLICY, "environment": {"SLUICE_MIRROR_CHECK_EVERY": "1"}},
    }
    made: DevCluster = make_shared_cluster(description, root=root)
    return made


def batch(cluster: DevCluster, script: str, *words: str) -> tuple[str, list[str]]:
    """A job of alice that has ended, and the lines that it has printed."""
    command = [
        "sbatch",
        "--parsable",
        "-W",
        "-o",
        "/tmp/roles-%j",
        "-c1",
        "--mem-per-cpu=16",
        *words,
        f"--wrap={script}",
    ]
    done = cluster.run(command, user="alice", cwd="/tmp", check=False)
    job = done.stdout.strip()
    printed = cluster.run(["cat", f"/tmp/roles-{job}"], user="alice", check=False).stdout.splitlines()
    assert done.returncode == 0, (done.stderr, printed)
    return job, printed


def laid_out(cluster: DevCluster, job: str) -> dict[str, Any]:
    """What slurmctld has recorded."""
    return until(lambda: (explain_job(cluster.layout.state / "sluice.records", parse_job(job)) or {}).get("start"))


def gpus_of(start: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {role["name"]: [part["gpus"] for part in role["parts"]] for role in start["roles"]}


def test_each_task_has_the_role_of_its_gpu(cluster: DevCluster) -> None:
    """Slurm binds a GPU to each task: the role is that of the GPU."""
    words = ["-N1", "-n8", "--gpus=8", "--gpu-role=prefill:4,decode:4"]
    job, printed = batch(cluster, f"srun -n8 --gpus-per-task=1 sh -c '{SHOW}'", *words)
    assert gpus_of(laid_out(cluster, job)) == HALVES
    found = sorted(line.split()[1:4] for line in printed)
    assert found == sorted([[role, str(rank), "4"] for role in HALVES for rank in range(4)])
    document = explain_job(cluster.layout.state / "sluice.records", parse_job(job)) or {}
    lines = render(document)
    node = printed[0].split()[0]
    assert f"  role prefill: {node} GPU 0,1,2,3" in lines, lines
    assert f"  role decode: {node} GPU 4,5,6,7" in lines


def test_tasks_that_share_a_node_have_the_gpus_of_one_role(cluster: DevCluster) -> None:
    """A task for each role: neither sees the other's GPUs, and the batch script sees all and where the roles are."""
    words = ["-N1", "-n2", "--gpus=8", "--gpu-role=prefill:2,decode:6"]
    script = (
        f"{SHOW}; echo $SLUICE_GPU_ROLES; srun -n8 -c1 --overcommit sh -c '{SHOW}'; env | grep SLUICE_GPU_ROLE | sort"
    )
    _, printed = batch(cluster, script, *words)
    node = printed[0].split()[0]
    assert printed[0] == f"{node} none x x 0,1,2,3,4,5,6,7"
    assert printed[1] == f"prefill={node}:4-5 decode={node}:0-3,6-7"  # the smaller one is in one NUMA node
    tasks = sorted(printed[2:10])
    assert tasks == sorted(
        [f"{node} prefill {rank} 2 4,5" for rank in range(2)]
        + [f"{node} decode {rank} 6 0,1,2,3,6,7" for rank in range(6)]
    )
    assert printed[10:] == [
        f"SLUICE_GPU_ROLES=prefill={node}:4-5 decode={node}:0-3,6-7",
        f"SLUICE_GPU_ROLE_NODES_decode={node}",
        f"SLUICE_GPU_ROLE_NODES_prefill={node}",
    ]


def test_a_step_of_each_role_on_two_nodes(cluster: DevCluster) -> None:
    """Roles in as few nodes as possible; each has a step of its own, at the same time."""
    script = f"""
    srun --overlap --gpu-role=learner -w $SLUICE_GPU_ROLE_NODES_learner -N1 -n1 sh -c '{SHOW}; sleep 2' &
    srun --overlap --gpu-role=actor -N2 -n4 --ntasks-per-node=2 sh -c '{SHOW}' ; wait
    srun --overlap -N2 -n2 --gpu-role=learner true; echo learner $?
    srun --overlap -N2 -n2 --gpu-role=critic true; echo critic $?
    srun --overlap -N2 -n16 --ntasks-per-node=8 sh -c '{SHOW}'
    """
    words = ["-N2", "--ntasks-per-node=8", "--gpus-per-node=8", "--gpu-role=learner:4,actor:12"]
    job, printed = batch(cluster, script, *words)
    start = laid_out(cluster, job)
    assert sorted(map(len, gpus_of(start)["actor"])) == [4, 8]
    assert gpus_of(start)["learner"] in ([[0, 1, 2, 3]], [[4, 5, 6, 7]])
    (learner,) = next(role for role in start["roles"] if role["name"] == "learner")["parts"]
    own = ",".join(map(str, learner["gpus"]))
    rest = ",".join(str(gpu) for gpu in range(8) if gpu not in learner["gpus"])
    other = ({"h-1", "h-2"} - {learner["node"]}).pop()
    steps = [line for line in printed if " " in line and line.startswith("h-")]
    assert f"{learner['node']} learner 0 1 {own}" in steps
    ranks = {line.split()[2]: line for line in steps if line.split()[1:4:2] == ["actor", "4"]}
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert {line.split()[0] + " " + line.split()[4] for line in ranks.values()} == {
        f"{learner['node']} {rest}",
        f"{other} 0,1,2,3,4,5,6,7",
    }
    assert "learner 0" not in printed
    assert "critic 0" not in printed
    text = "\n".join(printed)
    assert f"--gpu-role=learner: the step has none of the role's GPUs on {other}; start it on {learner['node']}" in text
    assert "--gpu-role=critic: no role of the job; name one of learner, actor" in text
    shared = [line.split() for line in steps if line.split()[3] in ("12", "4") and line not in ranks.values()]
    assert sorted(int(line[2]) for line in shared if line[1] == "actor") == list(range(12))
    assert sorted(int(line[2]) for line in shared if line[1] == "learner") == list(range(4))


def test_srun_makes_the_job_and_its_tasks(cluster: DevCluster) -> None:
    command = ["srun", "-N1", "-n8", "--gpus-per-task=1", "--gpu-role=a:3,b:5", "-c1", "--mem-per-cpu=16"]
    done = cluster.run([*command, "sh", "-c", SHOW], user="alice")
    found = sorted(line.split()[1:4] for line in done.stdout.splitlines())
    assert found == sorted([["a", str(rank), "3"] for rank in range(3)] + [["b", str(rank), "5"] for rank in range(5)])


def test_a_job_without_roles_finds_none(cluster: DevCluster) -> None:
    """Nor does one that a job with roles has submitted, or a step of its own."""
    script = "SLUICE_GPU_ROLE=x SLUICE_GPU_ROLES=y SLUICE_STEP_ROLE=z srun -n1 env | grep -c SLUICE_.*ROLE"
    _, printed = batch(cluster, f"{script}; true", "-N1", "--gpus=1")
    assert printed == ["0"]
    done = cluster.run(
        ["sbatch", "-W", "-o", "/tmp/roles-none", "--gpus=1", "--wrap=srun --gpu-role=a true"],
        user="alice",
        check=False,
    )
    assert done.returncode != 0
    assert "has no roles here" in cluster.run(["cat", "/tmp/roles-none"], user="alice").stdout


def refused(cluster: DevCluster, *words: str) -> str:
    done = cluster.run(["sbatch", "-H", *words, "--wrap=true"], user="alice", check=False)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_what_is_refused(cluster: DevCluster) -> None:
    assert "have 8 GPUs, and the job asks for 7" in refused(cluster, "--gpus=7", "--gpu-role=a:4,b:4")
    assert "asks for none; add --gpus=8" in refused(cluster, "--gpu-role=a:4,b:4")
    assert "how many the job gets is open" in refused(cluster, "-N1-2", "--gpus-per-node=4", "--gpu-role=a:4,b:4")
    for roles in ("a:4,a:4", "a-b:8", "a:8,", "a:0,b:8"):
        assert "each once, of at most 16 letters" in refused(cluster, "--gpus=8", f"--gpu-role={roles}")
    done = cluster.run(
        ["salloc", "--gpus=8", "--gpu-role=a:4,b:4", "srun", "--gpu-role=a:4", "true"], user="alice", check=False
    )
    assert "of a step is the name of one of its job's roles" in done.stderr
    steps = ["srun", "-n1", "--gpu-role=a", "true", ":", "-n1", "--gpu-role=b", "true"]
    done = cluster.run(["salloc", "--gpus=8", "--gpu-role=a:4,b:4", *steps], user="alice", check=False)
    assert done.returncode != 0
    assert "--gpu-role=a and --gpu-role=b: a step has one role; start a step for each, as in" in done.stderr
    job = submit(cluster, "-H", "--gpus=8", "--gpu-role=a:4,b:4")
    changed = cluster.run(["scontrol", "update", f"jobid={job}", "numtasks=2"], check=False)
    assert changed.returncode == 0, changed.stderr
    cluster.run(["scancel", job])


@pytest.fixture
def below(cluster: DevCluster) -> Iterator[DevCluster]:
    yield cluster
    set_level(cluster, "place")


def test_below_level_place(below: DevCluster) -> None:
    set_level(below, "admit")
    assert "runs Sluice below level place" in refused(below, "--gpus=8", "--gpu-role=a:4,b:4")
    set_level(below, "off")
    assert "Sluice is off on this cluster" in refused(below, "--gpus=8", "--gpu-role=a:4,b:4")
    for where in ("block", "rail@5"):
        assert "ask for nodes near each other with --switches=1@TIME" in refused(below, "-N2", f"--fabric={where}")
    accepted = below.run(["sbatch", "--parsable", "-H", "-N2", "--fabric=any", "--wrap=true"], user="alice")
    below.run(["scancel", accepted.stdout.strip()])
