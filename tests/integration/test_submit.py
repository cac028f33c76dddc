"""Submission through the plugins on real daemons: the options, what they become, and each refusal's words."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.slurm_version import SlurmVersion, parse_slurm_version
from tests.integration.settled import PATIENCE, fresh_status, set_level, until
from tests.integration.versions import PREFIX, TREES
from tests.programs.build import build_program

pytestmark = pytest.mark.cluster

POLICY = """sluice-policy 1.0
generated-s = 1
[global]
cpus-per-gpu-milli = 4000
memory-mib-per-gpu = 8192
[class h100]
gpu-types = h100
gpu-memory-mib = 81920
[class mi300x]
gpu-types = mi300x
[tenant free]
[tenant memory]
gpu-memory-mib-per-gpu = 20480
gpu-memory-mib-per-job = 40960
run-time-s = 7200
[tenant nvidia]
gpus-per-job = 4
classes = h100
class.h100.gpus-per-job = 2
class.h100.run-time-s = 3600
gang = no
deadline = no
[tenant few]
gpus-per-job = 8
[tenant fast]
partitions = fast
qos = silver
features = nvidia
[tenant slow]
submissions-per-minute = 3
[tenant burst]
submissions-per-minute = 10
gpu-memory-mib-per-job = 2048
[tenant gone]
expires-s = 1700000000
"""
ACCOUNTS = ["free", "memory", "nvidia", "few", "fast", "slow", "burst", "gone"]
COMMANDS = ["srun", "sbatch", "salloc"]


@pytest.fixture(scope="module", params=["native", *TREES])
def cluster(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[DevCluster]:
    """Two NVIDIA nodes and one of AMD, at level admit; on newer Slurm tasks may share several GPUs.

    With SLUICE_TEST_SCALE=full the plugins on 22.05 are built with the address sanitizer.
    """
    described: dict[str, Any] = {
        "nodes": [
            {"names": "h100-[1-2]", "platform": "dgx-h100"},
            {"names": "mi300x-1", "platform": "mi300x-platform"},
        ],
        "accounts": [{"name": name} for name in ACCOUNTS],
        "users": [{"name": "alice", "accounts": ACCOUNTS}, {"name": "oper", "accounts": ["free"]}],
        "partitions": [{"name": "main", "nodes": "ALL"}, {"name": "fast", "nodes": "h100-[1-2]"}],
        "controllers": 1,
        "sluice": {"level": "admit", "policy": f"{POLICY}checksum = crc32:{zlib.crc32(POLICY.encode()):08x}\n"},
    }
    options: dict[str, Any] = {}
    if request.param != "native":
        options["root"] = request.getfixturevalue(f"{request.param}_root")
    elif PREFIX is None and os.environ.get("SLUICE_TEST_SCALE") == "full":
        described["sluice"]["sanitize"] = True
    if SlurmTree(PREFIX or Path("/usr"), options.get("root")).version() >= (24, 5):
        described["slurm_conf"] = "SelectTypeParameters=CR_Core_Memory,MULTIPLE_SHARING_GRES_PJ\n"
    made = make_shared_cluster(described, **options)
    for change in (
        ["add", "qos", "silver"],
        ["modify", "account", "where", "name=fast", "set", "qos+=silver"],
        ["modify", "user", "oper", "set", "adminlevel=operator"],
    ):
        made.run(["sacctmgr", "-i", *change])
    yield made
    if described["sluice"].get("sanitize"):
        made.stop_daemon("slurmctld@ctl1", timeout=60)
        said = made.log("slurmctld@ctl1").read_text(errors="replace")
        assert "ERROR: AddressSanitizer" not in said
        assert not re.search(r"#\d+ 0x.*sluice", said)  # a leak with a frame of ours
    made.down()


@pytest.fixture
def knows_jobs(cluster: DevCluster) -> None:
    """The plugins read slurmctld's own records of jobs; built from public headers alone they refuse all changes."""
    if not (cluster.layout.plugins / "select_cons_tres.so").exists():
        pytest.skip("this Slurm's plugins are built from public headers: test_sid.py")


@pytest.fixture
def slurm_version(cluster: DevCluster) -> SlurmVersion:
    return parse_slurm_version(cluster.run(["sinfo", "--version"]).stdout)


@pytest.fixture
def old_slurm(slurm_version: SlurmVersion) -> bool:
    return slurm_version < (22, 6)


@pytest.fixture(autouse=True)
def _no_job_left(cluster: DevCluster) -> Iterator[None]:
    yield
    cluster.run(["scancel", "--user=alice"], check=False)


def submit(cluster: DevCluster, *options: str, account: str = "free") -> subprocess.CompletedProcess[str]:
    """sbatch of a held job that would do nothing."""
    return cluster.run(
        ["sbatch", "--parsable", "-H", "-A", account, *options, "--wrap", "true"], user="alice", check=False, cwd="/tmp"
    )


def accepted(cluster: DevCluster, *options: str, account: str = "free") -> dict[str, str]:
    """The fields of the job that it became."""
    done = submit(cluster, *options, account=account)
    assert done.returncode == 0, done.stderr
    return fields(cluster, done.stdout.strip())


def fields(cluster: DevCluster, job: str) -> dict[str, str]:
    shown = cluster.run(["scontrol", "show", "job", "--oneliner", job]).stdout.splitlines()[0]
    return dict(re.findall(r"(\S+?)=(\S+)", shown))


def gres(fields: dict[str, str], key: str = "TresPerNode") -> str:
    return fields.get(key, "").replace("gres/", "gres:")


def assert_logged(cluster: DevCluster, refusal: str) -> None:
    """slurmctld's log has a line for a refusal, in the form that the audit log's collector reads."""
    lines = cluster.log("slurmctld@ctl1").read_text(errors="replace").splitlines()
    assert any(re.search(f"job_submit/sluice: refused {refusal}", line) for line in lines)


def refused(cluster: DevCluster, *options: str, account: str = "free") -> str:
    done = submit(cluster, *options, account=account)
    assert done.returncode != 0, done.stdout
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_are_in_the_help(cluster: DevCluster, command: str) -> None:
    said = cluster.run([command, "--help"]).stdout
    for option in ("--gpu-mem=SIZE", "--gpu-share=PERCENT", "--gpu-affinity=WHAT", "--gpu-spread", "--gang=NAME:COUNT",
                   "--gpu-profile=SECONDS"):  # fmt: skip
        assert option in said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--gpu-mem=lots", "--gpu-mem=lots is not understood"),
        ("--gpu-mem=17T", "1M to 16T"),
        ("--gpu-share=0", "percent of each GPU, 1 to 100"),
        ("--gpu-affinity=near", "link, numa or none"),
        ("--gang=team", "NAME:COUNT"),
        ("--gpu-profile=0", "1 to 86400"),
    ],
)
def test_a_malformed_option_is_refused_by_the_command(
    cluster: DevCluster, command: str, option: str, part: str
) -> None:
    program = ["--wrap", "true"] if command == "sbatch" else ["true"]
    done = cluster.run([command, option, *program], user="alice", check=False, cwd="/tmp")
    assert done.returncode != 0
    assert part in done.stderr


@pytest.mark.parametrize(
    ("options", "became"),
    [
        (["--gpu-mem=10G"], {"TresPerNode": "gres:shard:10240"}),
        (["--gpu-mem=1.5G", "-N2"], {"TresPerNode": "gres:shard:1536", "NumNodes": "2-2"}),
        (["--gpu-mem=10G", "--gpus=1"], {"TresPerNode": "gres:shard:10240", "NumNodes": "1-1"}),
        (["--gpu-mem=10G", "--gpus=2", "--gpus-per-node=1"], {"TresPerNode": "gres:shard:10240", "NumNodes": "2-2"}),
        (["--gpu-mem=10G", "--gpus=2", "-N2"], {"TresPerNode": "gres:shard:10240", "NumNodes": "2-2"}),
        (["--gpu-mem=10G", "--gpus-per-node=1"], {"TresPerNode": "gres:shard:10240"}),
        (["--gpu-mem=10G", "--gres=gpu:h100:1"], {"TresPerNode": "gres:shard:10240", "Features": "h100"}),
        (["--gpu-mem=10G", "--gpus-per-task=1", "-n2", "-N2"], {"TresPerNode": "gres:shard:10240"}),
        (
            ["--gpu-mem=10G", "--gpus=1", "--cpus-per-gpu=6", "--mem-per-gpu=512"],
            {"TresPerNode": "gres:shard:10240", "MinCPUsNode": "6", "MinMemoryNode": "512M"},
        ),
        (["--gpu-mem=40G", "-C", "h100"], {"MinCPUsNode": "2", "MinMemoryNode": "4G"}),
        (["--gpus=2"], {"CpusPerTres": "gres:gpu:4", "MemPerTres": "gres:gpu:8192"}),
        (["--gres=gpu:2", "-c3", "--mem=1G"], {"MinMemoryNode": "1G"}),
    ],
)
def test_what_a_request_becomes(cluster: DevCluster, options: list[str], became: dict[str, str]) -> None:
    job = accepted(cluster, *options)
    for key, value in became.items():
        if key == "NumNodes":
            assert job[key] in (value, value.split("-")[0])
        else:
            assert job.get(key, "").replace("gres/", "gres:") == value


def test_what_tenants_are_given(cluster: DevCluster) -> None:
    job = accepted(cluster, account="fast")
    assert (job["Partition"], job["QOS"], job["Features"]) == ("fast", "silver", "nvidia")
    job = accepted(cluster, "--gres=gpu:2", account="nvidia")
    assert gres(job) == "gres:gpu:h100:2"
    assert job["TimeLimit"] == "01:00:00"
    job = accepted(cluster, "--gpu-mem=1G", account="nvidia")
    assert job["Features"] == "h100"
    job = accepted(cluster, "-n6", "--gpu-mem=20G", account="memory")
    assert job["NumNodes"] == "1-2"


@pytest.mark.parametrize(
    ("account", "options", "part"),
    [
        ("free", ["--gpu-mem=10G", "--gpus=2"], "ask for"),
        ("free", ["--gpu-mem=10G", "--gpus-per-node=2"], "one GPU on each of several nodes"),
        ("free", ["--gpu-mem=10G", "--gres=shard:5"], "share GPUs in two ways"),
        ("free", ["--gpu-mem=10G", "--exclusive"], "--exclusive takes whole nodes"),
        ("free", ["--gpus=1", "--gpu-share=50"], "no GPU of this cluster can be held"),
        ("free", ["--gang=team:2"], "below level place"),
        ("free", ["--gpu-affinity=link"], "asks for none"),
        ("free", ["--deadline=now+1hour", "-t", "2:00:00"], "cannot be met: started now, a job of 02:00:00 ends at"),
        ("free", ["--deadline=now+1hour", "-t", "3:00:00", "--time-min=2:00:00"], "Invalid time-min specification"),
        ("memory", ["--gpu-mem=30G"], "ask for --gpu-mem=20G or less"),
        ("memory", ["--gres=shard:20481"], "20481M of one GPU's memory"),
        ("memory", ["--gpu-mem=20G", "-N3"], "60G of GPU memory on 3 GPUs"),
        ("memory", ["--gres=gpu:1"], "whole GPUs"),
        ("memory", ["-t", "3:00:00"], "may run a job for 02:00:00 at most"),
        ("nvidia", ["--gpus=3"], "3 GPUs of class h100"),
        ("nvidia", ["--gpus=5"], "5 GPUs (on 1 node):"),
        ("nvidia", ["--gres=gpu:mi300x:1"], "not open to account nvidia; it may use h100"),
        ("nvidia", ["--gres=gpu:1", "-C", "mi300x"], "not open to account nvidia"),
        ("nvidia", ["--gpus=1", "-t", "2:00:00"], "ask for --time=01:00:00 or less"),
        ("nvidia", ["--exclusive"], "--exclusive takes all GPUs of a node"),
        ("nvidia", ["--deadline=now+1hour", "-t", "1"], "--deadline is not open"),
        ("fast", ["-p", "main"], "partition main: account fast may use fast"),
        ("gone", [], "account gone expired on 2023-11-14"),
        ("GONE", [], "account gone expired"),
    ],
)
def test_what_is_refused(cluster: DevCluster, account: str, options: list[str], part: str) -> None:
    assert part in refused(cluster, *options, account=account)


@pytest.mark.parametrize("command", ["srun", "salloc"])
def test_refusals_reach_srun_and_salloc(cluster: DevCluster, command: str) -> None:
    done = cluster.run([command, "-A", "memory", "--gpu-mem=30G", "true"], user="alice", check=False)
    assert done.returncode != 0
    assert "ask for --gpu-mem=20G or less" in done.stderr


def test_each_command_gets_the_shards_that_it_asked_for(cluster: DevCluster) -> None:
    show = "echo shards=$SLURM_SHARDS_ON_NODE; scontrol show job $SLURM_JOB_ID"
    for line in (
        ["srun", "-Afree", "--gpu-mem=10G", "bash", "-c", show],
        ["salloc", "-Afree", "--gpu-mem=10G", "--gpus=1", "srun", "bash", "-c", show],
    ):
        said = cluster.run(line, user="alice").stdout
        assert "shards=10240" in said
        assert re.search(r"TRES=\S*gres/shard=10240", said)
    options = "#SBATCH -A free\n#SBATCH --gpu-mem=10G\n#SBATCH --gpus=1\n"
    script = f"#!/bin/bash\n{options}{show}\nsrun hostname\nsrun --gres=shard:1024 hostname\n"
    cluster.run(["sbatch", "-W", "-o", "/tmp/said"], user="alice", input_text=script, cwd="/tmp")
    said = cluster.run(["cat", "/tmp/said"]).stdout
    assert "shards=10240" in said
    assert said.count("h100-") + said.count("mi300x-") >= 3  # the job's node, and two steps
    assert "error" not in said


def test_srun_says_what_its_own_step_would_do(cluster: DevCluster) -> None:
    done = cluster.run(["srun", "-Afree", "--gpu-mem=10G", "--gpus=1", "true"], user="alice", check=False)
    assert done.returncode != 0
    assert "srun's own step would ask for whole GPUs" in done.stderr
    done = cluster.run(["salloc", "-Afree", "--gpu-mem=10G", "srun", "--gpu-mem=5G", "true"], user="alice", check=False)
    assert "--gpu-mem is an option of jobs" in done.stderr


def test_a_job_submitted_from_a_job_asks_for_itself(cluster: DevCluster) -> None:
    inner = "sbatch --parsable -A free -H --gpus=2 --wrap true > /tmp/inner"
    outer = ["sbatch", "-W", "-A", "free", "-o", "/tmp/outer", "--gpu-mem=1G", "--wrap", inner]
    cluster.run(outer, user="alice", cwd="/tmp")
    assert gres(fields(cluster, cluster.run(["cat", "/tmp/inner"]).stdout.strip()), "TresPerJob") == "gres:gpu:2"


def test_arrays_and_heterogeneous_jobs(cluster: DevCluster) -> None:
    job = accepted(cluster, "--array=1-3", "--gpu-mem=1G", account="memory")
    assert gres(job) == "gres:shard:1024"
    assert "30G of one GPU's memory" in refused(cluster, "--array=1-3", "--gpu-mem=30G", account="memory")
    assert "30G of one GPU's memory" in refused(cluster, "--gpu-mem=1G", ":", "--gpu-mem=30G", account="memory")
    done = submit(cluster, "--gpu-mem=1G", ":", "--gpu-mem=2G", account="memory")
    assert done.returncode == 0, done.stderr
    first = int(done.stdout)
    assert [gres(fields(cluster, str(first + i))) for i in range(2)] == ["gres:shard:1024", "gres:shard:2048"]


@pytest.mark.usefixtures("knows_jobs")
def test_preferred_features_stay_within_what_a_tenant_may_use(cluster: DevCluster, old_slurm: bool) -> None:
    """Slurm looks for nodes with the features of --prefer instead of those of the constraint."""

    def preferred(job: dict[str, str]) -> str:
        return fields(cluster, job["JobId"])["Prefer"]

    assert preferred(accepted(cluster, "--gpu-mem=1G", "--prefer=nvidia", account="nvidia")) == "nvidia&h100"
    assert preferred(accepted(cluster, "--prefer=h100", account="fast")) == "h100&nvidia"
    assert preferred(accepted(cluster, "--gpu-mem=1G", "--prefer=mi300x")) == "mi300x"
    for account in ("nvidia", "fast"):
        job = accepted(cluster, "--gpu-mem=1G", "--prefer=", account=account)
        assert "Prefer" not in job  # Slurm takes an empty one for what every node has
        counted = "Prefer=[h100*1&nvidia*1]"
        refused_update(cluster, job["JobId"], counted, part="write a --prefer that joins", old_slurm=old_slurm)
        cluster.run(["scontrol", "update", f"JobId={job['JobId']}", "Prefer=mi300x"], user="alice")
        assert preferred(job) == ("mi300x&h100" if account == "nvidia" else "mi300x&nvidia")
        command = ["srun", "-A", account, "--gpu-mem=1G", "--prefer=mi300x", "hostname"]
        done = cluster.run(command, user="alice", check=False)
        assert "Requested node configuration is not available" in done.stderr  # no node has both
    for counted in ("mi300x*1&nvidia", "[mi300x*1&nvidia*1]", "mi300x|nvidia"):
        assert "joins features by & only" in refused(cluster, "-C", counted, account="fast")


def update(cluster: DevCluster, job: str, *changes: str) -> subprocess.CompletedProcess[str]:
    """scontrol update by the job's owner."""
    return cluster.run(["scontrol", "update", f"JobId={job}", *changes], user="alice", check=False)


def refused_update(cluster: DevCluster, job: str, *changes: str, part: str, old_slurm: bool) -> None:
    """22.05 shows why with the job only, until its scheduler looks at that again."""

    def said() -> str:
        done = update(cluster, job, *changes)
        assert done.returncode != 0
        return cluster.run(["squeue", "-h", "-j", job, "-o", "%r"]).stdout if old_slurm else done.stderr

    until(said, lambda seen: part in seen, timeout=PATIENCE if old_slurm else 0)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("TimeLimit=3:00:00", "ask for --time=02:00:00 or less"),
        ("Gres=shard:30000", "30000M of one GPU's memory"),
        ("Gres=gpu:8", "only be changed to another number"),
        ("NumNodes=8", "80G of GPU memory on 8 GPUs"),
        ("Account=gone", "account gone expired"),
        ("Account=fast", "partition main: account fast may use fast"),
    ],
)
@pytest.mark.usefixtures("knows_jobs")
def test_an_update_is_no_way_around(cluster: DevCluster, old_slurm: bool, change: str, part: str) -> None:
    done = cluster.run(
        ["sbatch", "--parsable", "--begin=now+1hour", "-A", "memory", "--gpu-mem=10G", "-t", "10", "--wrap", "true"],
        user="alice",
        cwd="/tmp",
    )
    job = done.stdout.strip()
    before = fields(cluster, job)
    refused_update(cluster, job, change, part=part, old_slurm=old_slurm)
    changed = {key for key, value in fields(cluster, job).items() if before.get(key) != value}
    assert changed <= {"Reason", "LastSchedEval", "RunTime", "EligibleTime"}


@pytest.mark.parametrize(
    ("account", "options", "changes", "part"),
    [
        ("memory", ["--gpu-mem=10G"], ["Gres=shard:20480", "NumNodes=3"], "60G of GPU memory on 3 GPUs"),
        ("few", ["--gres=gpu:1", "-N1-8"], ["NumNodes=1-4", "TresPerNode=gres:gpu:8"], "32 GPUs (on 4 nodes)"),
        ("few", ["--gres=gpu:4"], ["ReqNodeList=h100-[1-2],mi300x-1", "NumNodes=3"], "12 GPUs (on 3 nodes)"),
        ("few", ["--gpus=h100:4"], ["TresPerJob=gres:gpu:mi300x:4"], "the job asks for gpu:h100"),
        ("few", ["--gres=gpu:h100:8"], ["TresPerNode=gres:gpu:mi300x:1", "NumNodes=2"], "the job asks for gpu:h100"),
        ("free", ["-t", "1", "--deadline=now+65minutes"], ["TimeLimit=10"], "started with --begin at"),
        ("few", ["--gres=gpu:8", "-N1"], ["Account=nvidia", "TimeLimit=10"], "8 GPUs"),
    ],
)
@pytest.mark.usefixtures("knows_jobs")
def test_several_changes_at_once_are_no_way_around(
    cluster: DevCluster, old_slurm: bool, account: str, options: list[str], changes: list[str], part: str
) -> None:
    job = accepted(cluster, "--begin=now+1hour", *options, account=account)["JobId"]
    refused_update(cluster, job, *changes, part=part, old_slurm=old_slurm)


@pytest.mark.usefixtures("knows_jobs")
def test_an_update_that_names_one_bound_keeps_the_other(
    cluster: DevCluster, old_slurm: bool, slurm_version: SlurmVersion
) -> None:
    """What scontrol 22.05 leaves out of NumNodes=1, and more nodes by name than are asked for."""
    job = accepted(cluster, "-N1-8", "--gres=gpu:1", account="few")["JobId"]
    changes = ["NumNodes=1", "TresPerNode=gres:gpu:8"]
    if old_slurm:
        refused_update(cluster, job, *changes, part="64 GPUs (on 8 nodes)", old_slurm=True)
    else:
        assert update(cluster, job, *changes).returncode == 0  # one node at most from then on
    job = accepted(cluster, "--gres=gpu:4", account="few")["JobId"]
    named = "ReqNodeList=h100-[1-2],mi300x-1"
    if old_slurm:
        refused_update(cluster, job, named, part="12 GPUs (on 3 nodes)", old_slurm=True)
    else:
        assert update(cluster, job, named).returncode == 0  # some of them
        assert fields(cluster, job)["NumNodes"] == "1-2"
    job = accepted(cluster, "-n1", "-c8", "--gres=gpu:4", account="few")["JobId"]
    assert update(cluster, job, "CPUsPerTask=1", "MinCPUsNode=1").returncode == 0  # so the CPUs may be of many nodes
    # From 26.05 on, Slurm itself takes the number of tasks as the most nodes.
    assert fields(cluster, job)["NumNodes"] == ("1-1" if slurm_version >= (26, 5) else "1-2")


@pytest.mark.usefixtures("knows_jobs")
def test_another_type_is_not_added_to_the_old_one(cluster: DevCluster, old_slurm: bool) -> None:
    job = accepted(cluster, "--gpus=h100:4", account="few")["JobId"]
    change = "TresPerJob=gres:gpu:mi300x:4"
    refused_update(cluster, job, change, part="submit a new job for other GPUs", old_slurm=old_slurm)
    assert gres(fields(cluster, job), "TresPerJob") == "gres:gpu:h100:4"
    if old_slurm:  # 24.11 itself refuses that with --cpus-per-gpu, which is filled in
        for step in ("TresPerJob=", change):
            assert update(cluster, job, step).returncode == 0
        assert gres(fields(cluster, job), "TresPerJob") == "gres:gpu:mi300x:4"


@pytest.mark.parametrize("which", ["array task", "component", "running"])
@pytest.mark.usefixtures("knows_jobs")
def test_no_part_of_a_job_is_a_way_around(cluster: DevCluster, old_slurm: bool, which: str) -> None:
    start = ["--begin=now+1hour"] if which != "running" else []
    more = {"array task": ["--array=0-3"], "component": [":", "--gpu-mem=2G", "-t", "10"], "running": []}[which]
    done = cluster.run(
        [
            "sbatch",
            "--parsable",
            "-A",
            "memory",
            *start,
            "--gpu-mem=10G",
            "-c2",
            "-t",
            "10",
            *more,
            "--wrap",
            "sleep 600",
        ],
        user="alice",
        cwd="/tmp",
    )
    job = done.stdout.strip() + {"array task": "_0", "component": "+1", "running": ""}[which]
    if which == "running":
        until(lambda: fields(cluster, job)["JobState"], lambda state: state == "RUNNING")
        cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=5"], user="alice")
        assert fields(cluster, job)["TimeLimit"] == "00:05:00"
    for change, part in (("TimeLimit=3:00:00", "ask for --time=02:00:00 or less"), ("Account=gone", "expired on 2023")):
        if which == "running" and old_slurm:  # which does not show it with jobs that run
            assert update(cluster, job, change).returncode != 0
            assert_logged(cluster, rf"change of a job of user \d+, .*{part}")
        else:
            refused_update(cluster, job, change, part=part, old_slurm=old_slurm)


@pytest.mark.usefixtures("knows_jobs")
def test_what_an_update_may_change(cluster: DevCluster) -> None:
    job = accepted(cluster, "--gpu-mem=10G", "-t", "10", account="memory")["JobId"]
    for change in ("TimeLimit=20", "Gres=shard:2048", "Comment=hello", "NumNodes=1-2"):
        cluster.run(["scontrol", "update", f"JobId={job}", change], user="alice")
    after = fields(cluster, job)
    assert (after["TimeLimit"], gres(after), after["Comment"]) == ("00:20:00", "gres:shard:2048", "hello")
    # an operator may do more, as with Slurm's own limits
    cluster.run(["scontrol", "update", f"JobId={job}", "TimeLimit=10:00:00"], user="oper")
    assert fields(cluster, job)["TimeLimit"] == "10:00:00"
    # and what has nothing to do with limits can be changed even so
    cluster.run(["scontrol", "update", f"JobId={job}", "Comment=again"], user="alice")


@pytest.mark.usefixtures("knows_jobs")
def test_submissions_per_minute(cluster: DevCluster) -> None:
    began = time.monotonic()
    job = accepted(cluster, account="slow")["JobId"]
    for command in ("srun", "sbatch"):  # questions do not count, whether Slurm says yes or no
        program = "--wrap=true" if command == "sbatch" else "true"
        for gpus in (1, 9, 1, 1):
            words = [command, "--test-only", "-A", "slow", f"--gres=gpu:{gpus}", "-N1", program]
            said = cluster.run(words, user="alice", check=False, cwd="/tmp").stderr
            assert ("to start at" in said) == (gpus == 1), said
    for minutes in range(9, 4, -1):  # nor do changes
        cluster.run(["scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}"], user="alice")
    accepted(cluster, "--array=1-50", account="slow")
    refused(cluster, "--gpu-mem=10G", "--exclusive", account="slow")  # what is refused does not count
    accepted(cluster, account="slow")
    count = 3
    while (last := submit(cluster, account="slow")).returncode == 0:
        count += 1
        assert count <= 3 + (time.monotonic() - began) // 20, "one every 20 s is added"
    assert re.search(r"account slow may submit 3 jobs a minute, and has; try again in \d+ s", last.stderr)


def test_twenty_clients_at_once_get_no_more_than_the_limit(cluster: DevCluster) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        asked = [["--gpu-mem=1G"], ["--gpu-mem=3G"]]
        done = [pool.submit(submit, cluster, *asked[i % 2], account="burst") for i in range(40)]
        ends = [one.result() for one in done]
    refilled = int((time.monotonic() - began) / 6) + 1
    accepted_ends = [end for end in ends if end.returncode == 0]
    assert 10 <= len(accepted_ends) <= 10 + refilled
    assert all("-gpu-mem=1G" in " ".join(end.args) for end in accepted_ends)
    for end in ends:
        if end.returncode:
            assert "may submit 10 jobs a minute" in end.stderr or "3G of GPU memory" in end.stderr


def test_preferences_without_effect_are_reported(cluster: DevCluster) -> None:
    done = submit(cluster, "--gpus=2", "--gpu-affinity=link")
    assert done.returncode == 0
    assert "have no effect here" in done.stderr


def test_tasks_with_a_gpu_each(cluster: DevCluster, old_slurm: bool) -> None:
    asked = ["-A", "free", "-n3", "-N1", "--gpu-mem=10G", "--gpus-per-task=1"]
    if old_slurm:
        assert "let the tasks of a node share one GPU" in refused(cluster, *asked)
        return
    show = (
        "scontrol show -d job $SLURM_JOB_ID; srun bash -c 'for f in /dev/nvidia[0-7]; do (exec 3<>$f) 2>&1; done; true'"
    )
    cluster.run(["sbatch", "-W", "-o", "/tmp/tasks", "-C", "h100", *asked, "--wrap", show], user="alice", cwd="/tmp")
    said = cluster.run(["cat", "/tmp/tasks"]).stdout
    assert "TresPerTask=gres/shard:10240" in said
    assert re.search(r"GRES=shard:h100:30720\((10240/\d+,){3}0/", said)  # three GPUs, an equal part of each
    assert said.count("No such device") >= 3  # what a task may open; the simulated devices have no driver


def test_malformed_descriptions_leave_slurmctld_alive(cluster: DevCluster, old_slurm: bool) -> None:
    """A client of our own that sends what no command of Slurm's would."""
    if not old_slurm:
        pytest.skip("the client is built against this machine's libslurm")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o755)
        client = build_program("malformed_submit", Path(folder) / "malformed_submit", "-lslurm")
        said = cluster.run([client], user="alice").stdout.splitlines()
    assert len(said) == 9
    assert all(line.startswith("refused: ") for line in said[:-1])
    assert said[-1] == "accepted"
    assert_logged(cluster, r"job of user \d+, account -: --gpu-mem=1\?\[31mG is not understood")
    assert accepted(cluster, "--gpu-mem=1G")


def test_level_off_is_stock_slurm(cluster: DevCluster) -> None:
    def level(word: str) -> None:
        set_level(cluster, word)

    level("off")
    try:
        job = accepted(cluster, "--gpus=3", account="nvidia")
        assert gres(job, "TresPerJob") == "gres:gpu:3"
        assert "CpusPerTres" not in job
        assert job["TimeLimit"] != "01:00:00"
        accepted(cluster, "--gpus=2", "--gpu-affinity=link")
        off = "has no effect now, as Sluice is off on this cluster;"
        for option, instead in {
            "--gpu-mem=1G": "ask for GPU memory with --gres=shard:MIB",
            "--gpu-share=50": "ask for GPU memory with --gres=shard:MIB",
            "--gpu-power=300W": "leave it out",
            "--gpu-role=a:1,b:2": "leave it out, or submit a heterogeneous job with a component for each role",
            "--nics-per-gpu=1": "ask for interfaces with --gres=nic:N",
            "--nic-planes=one": "leave it out",
            "--gang=a:2": "leave it out",
            "--fabric=block": "ask for nodes near each other with --switches=1@TIME",
            "--fabric=spread": "leave it out",
        }.items():
            assert f"{option} {off} {instead}" in refused(cluster, option)
        assert_logged(cluster, rf"job of user \d+, account -: --nics-per-gpu=1 {off}")
    finally:
        level("admit")
    assert gres(accepted(cluster, "--gpu-mem=1G")) == "gres:shard:1024"


def test_what_the_hook_costs_can_be_read(cluster: DevCluster) -> None:
    accepted(cluster, "--gpu-mem=1G")
    counters = fresh_status(cluster)["counters"]
    assert counters["submit.submitted"] > 0
    assert counters["submit.total_ns"] / counters["submit.submitted"] < 1e6
    assert {"submit.modified", "submit.refused", "submit.slowest_ns", "submit.over_50_us"} <= counters.keys()


def test_no_task_runs_without_the_memory_that_was_asked_for(cluster: DevCluster) -> None:
    """Where job_submit/sluice is not loaded at all nobody turns the option into a request."""
    conf = cluster.layout.slurm / "slurm.conf"
    before = conf.read_text()
    conf.write_text(re.sub("^JobSubmitPlugins=.*", "", before, flags=re.MULTILINE))
    cluster.run(["scontrol", "reconfigure"])
    try:
        done = cluster.run(
            ["sbatch", "-W", "-o", "guard", "--gpu-mem=1G", "--wrap", "echo ran"],
            user="alice",
            check=False,
            timeout=2 * PATIENCE,
        )
        assert done.returncode != 0
        said = cluster.run(["cat", "guard"], user="alice").stdout
        assert "Slurm granted no GPU memory" in said
        assert "ran" not in said.split()
        assert (
            "granted no GPU memory" in cluster.run(["srun", "--gpu-mem=1G", "true"], user="alice", check=False).stderr
        )
    finally:
        conf.write_text(before)
        cluster.run(["scontrol", "reconfigure"])
    assert gres(accepted(cluster, "--gpu-mem=1G")) == "gres:shard:1024"


def test_the_default_account_counts_also_among_many_users(
    cluster: DevCluster, old_slurm: bool, full_scale: bool
) -> None:
    """With more than a thousand users the plugin looks into a copy of Slurm's list, a second old at most."""
    if not old_slurm and not full_scale:
        pytest.skip("slow: sacctmgr adds a thousand users; SLUICE_TEST_SCALE=full")
    names = ",".join(f"user{number}" for number in range(1100))
    cluster.run(["sacctmgr", "-i", "add", "user", names, "account=free"], timeout=120)
    try:
        for account, refusal in (("memory", "account memory may use 20G"), ("nvidia", ""), ("gone", "expired")):
            cluster.run(["sacctmgr", "-i", "modify", "user", "alice", "set", f"defaultaccount={account}"])
            deadline = time.monotonic() + PATIENCE  # slurmdbd updates slurmctld in its own time
            while True:
                done = cluster.run(
                    ["sbatch", "--parsable", "-H", "--gpu-mem=30G", "--wrap", "true"],
                    user="alice",
                    check=False,
                    cwd="/tmp",
                )
                job = done.stdout.strip()
                found = refusal in done.stderr if refusal else job and fields(cluster, job)["Account"] == account
                if found:
                    break
                assert time.monotonic() < deadline, (account, done)
                time.sleep(0.5)
    finally:
        cluster.run(["sacctmgr", "-i", "modify", "user", "alice", "set", "defaultaccount=free"])
