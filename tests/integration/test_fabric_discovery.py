"""`sluice fabric` on a fabric of 1,000 nodes: ibsim's, asked by the real ibnetdiscover."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fabric_site import fat_tree, simulated, write_site
from dev_cluster.cluster import DevCluster
from gres_probe.collect import load_inventories
from gres_probe.nic_groups import NICS_FILE, render, with_planes
from gres_probe.nic_groups import read as read_nics
from gres_probe.writer import generate
from policy.compiled import CompiledPolicy, Global
from policy.monitoring import NodeMetrics
from policy.node import FILE_NAME, NodePolicy
from sluice.base.slurm_version import parse_slurm_version
from sluice.explain.decisions import check_file, list_files
from sluice.explain.explanation import explain_job, parse_job
from tests.integration.conftest import MakeCluster
from tests.integration.jobs import shown, submit
from tests.integration.private_slurm import free_ports
from tests.integration.settled import await_policy, fresh_status, until
from tests.unit.prolog_epilog.nccl_rules import read

simulates = pytest.mark.skipif(
    shutil.which("ibsim") is None or shutil.which("ibnetdiscover") is None,
    reason="no ibsim-utils or infiniband-diags: make test-packages",
)
NODES = 1000
POLICY = CompiledPolicy(settings=Global(placement="sluice")).render()


def sluice(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sluice.main", "fabric", *words, "--slurm-conf", str(folder)]
    command += ["--ibnetdiscover", "-", "--slurm-version", "24.11.5"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@simulates
def test_discover_write_and_check(tmp_path: Path) -> None:
    write_site(tmp_path, NODES)
    file = tmp_path / "topology.conf"
    with simulated(tmp_path, fat_tree(NODES)) as environment:
        shown = sluice(tmp_path, environment, "discover")
        assert (shown.returncode, file.exists()) == (0, False), shown.stderr
        assert "40 switches, 1256 links, 1000 of 1000 nodes, 1 planes" in shown.stderr
        assert "+SwitchName=leaf32 Nodes=node[993-1000]\n+SwitchName=group-spine1 Switches=leaf[1-32]\n" in shown.stdout
        written = sluice(tmp_path, environment, "discover", "--write")
        assert (written.returncode, file.exists()) == (0, True), written.stderr
        assert sluice(tmp_path, environment, "discover", "--write").stderr.endswith("nothing to change\n")
        checked = sluice(tmp_path, environment, "check", "--json")
        assert (checked.returncode, json.loads(checked.stdout)["problems"]) == (0, [])
        text = file.read_text()
        file.write_text(text.replace("leaf1 Nodes=node[1-32]", "leaf1 Nodes=node[1-31]").replace("[33-64]", "[32-64]"))
        moved = sluice(tmp_path, environment, "check")
        assert moved.returncode == 1
        assert moved.stdout.startswith("other-place: node32: configured in leaf switch leaf2, whose other nodes")


@simulates
def test_nodes_that_are_not_there(tmp_path: Path) -> None:
    """Eight nodes of slurm.conf have no cable: they are named, and nothing is written unless it must be."""
    write_site(tmp_path, 72)
    with simulated(tmp_path, fat_tree(64)) as environment:
        done = sluice(tmp_path, environment, "discover", "--write")
        assert done.returncode == 1
        assert "unreachable: node[65-72]: no port of theirs leads to a switch" in done.stderr
        assert not (tmp_path / "topology.conf").exists()
        assert sluice(tmp_path, environment, "discover", "--write", "--force").returncode == 0
    assert "node[33-64]\n" in (tmp_path / "topology.conf").read_text()


# Prints how opening each RDMA interface's device file ends.
OPEN = """
import os
for number in range(10):
    try:
        os.close(os.open(f"/dev/infiniband/uverbs{number}", os.O_RDWR))
    except OSError as error:
        print(error.errno)
"""


@pytest.fixture(scope="module")
def dgx(make_shared_cluster: MakeCluster) -> DevCluster:
    """A DGX H100 with ten interfaces, as `sluice gres write --nics` offers them, and another one that is drained."""
    description = {
        "nodes": [{"names": "h-[1-2]", "platform": "dgx-h100"}],
        "nics": True,
        "controllers": 1,
        "accounting": False,
        "agent": True,
        "sluice": {"level": "place", "policy": POLICY, "environment": {"SLUICE_MIRROR_CHECK_EVERY": "1"}},
    }
    cluster: DevCluster = make_shared_cluster(description)
    cluster.run(["scontrol", "update", "nodename=h-2", "state=drain", "reason=later"])
    return cluster


@pytest.mark.cluster
def test_a_job_opens_its_own_interfaces(dgx: DevCluster) -> None:
    state = dgx.node_states()[0]
    assert "nic:10" in state.gres
    for asked, opened in (("gpu:1", 0), ("gpu:2,nic:2", 2)):
        job = ["srun", f"--gres={asked}", "python3", "-c", OPEN]
        codes = [int(code) for code in dgx.run(job).stdout.split()]
        # No driver is behind the files: one that may be opened fails as absent.
        assert len(codes) == 10
        assert codes.count(errno.EPERM) == 10 - opened, codes
        near = dgx.run(["srun", f"--gres={asked}", "sh", "-c", "echo $NCCL_IB_HCA"]).stdout.split()
        assert len(near) == min(opened, 1), near
        own = dgx.run(["srun", f"--gres={asked}", "sh", "-c", "echo $NCCL_IB_HCA"], env={"NCCL_IB_HCA": "mine"})
        assert own.stdout == "mine\n"


@pytest.mark.cluster
def test_what_interfaces_count_is_the_jobs_that_has_them(dgx: DevCluster) -> None:
    """Errors that the driver counts while two jobs run."""
    settings = dgx.slurm_conf_dir() / FILE_NAME
    port = 0

    def served() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    for port in free_ports(20):  # the nodes share this machine's addresses: one of them gets the port
        settings.write_text(NodePolicy(metrics=NodeMetrics(prometheus=f"127.0.0.1:{port}", interval=1)).render())
        if 'node="h-1"' in until(served, lambda page: 'node="h-' in page):
            break

    def samples(name: str) -> dict[str, int]:
        """By interface."""
        lines = [line for line in served().splitlines() if line.startswith(f"{name}{{")]
        return {re.findall(r'nic="(\w+)"', line)[0]: int(line.rpartition("}")[2].split()[0]) for line in lines}

    sys = next(dgx.node_folder("h-1").rglob("sys/class/infiniband"))

    def count(nic: str, value: int) -> None:
        (sys / nic / "ports/1/counters/link_downed").write_text(f"{value}\n")

    def has(name: str, wanted: dict[str, int]) -> bool:
        return samples(name) == wanted

    dgx.run(["srun", "--gres=gpu:1", "true"])  # can open none: Slurm gives interfaces to jobs
    jobs = [submit(dgx, "--gres=gpu:2,nic:2", wrap="srun sleep 600", user="root") for _ in range(2)]
    until(lambda: all(len(shown_nics(dgx, job)) == 2 for job in jobs))
    own = [shown_nics(dgx, job) for job in jobs]
    all_own = {nic: 0 for nics in own for nic in nics}
    assert len(all_own) == 4
    until(lambda: has("sluice_jobnic_shared", all_own))
    counted = until(lambda: samples("sluice_nic_link_downs_total"))
    others = {nic for nic in counted if nic in INTERFACES} - set(all_own)  # this machine's own Ethernet is listed, too
    assert set(all_own) < set(counted) and not any(counted[nic] for nic in INTERFACES if nic in counted)
    foreign = min(others)
    count(own[0][0], 3)
    count(foreign, 9)
    until(lambda: has("sluice_jobnic_link_downs_total", {own[0][0]: 3}))
    until(lambda: samples("sluice_nic_link_downs_total")[foreign] == 9)
    dgx.run(["scancel", *jobs])
    records = [dgx.node_folder("h-1") / "records" / f"{job}.json" for job in jobs]
    until(lambda: all(path.exists() for path in records))
    first, second = (json.loads(path.read_text())["usage"]["nics"] for path in records)
    assert first == {own[0][0]: {"shared": False, "link_downs": 3}, own[0][1]: {"shared": False}}
    assert second == {nic: {"shared": False} for nic in own[1]}
    settings.unlink()


def shown_nics(cluster: DevCluster, job: str) -> list[str]:
    """The RDMA interfaces that a running job can open."""
    known = json.loads(cluster.run(["sluice", "agent", "status", "--json"], node="h-1").stdout)["jobs"]
    return next((one["nics"] or [] for one in known if str(one["job"]) == job), [])


INTERFACES = [f"mlx5_{number}" for number in (0, 1, 3, 4, 5, 6, 7, 9, 10, 11)]

# Shows the file, and what another user than root may write of it and of the folders above it.
TOPOLOGY = """
cat $NCCL_TOPO_FILE
for path in $NCCL_TOPO_FILE $(dirname $NCCL_TOPO_FILE) /run/sluice/topology; do
    setpriv --reuid=65534 --regid=65534 --clear-groups test -r $path && echo readable
    setpriv --reuid=65534 --regid=65534 --clear-groups test -w $path && echo writable
done
true
"""
# How many GPUs the task's file has, and how many it cannot open.
COUNT = """
closed() { for file in /dev/nvidia[0-7]; do (: <>$file) 2>&1; done | grep -c permitted; }
echo $(grep -c '<gpu' $NCCL_TOPO_FILE) $(closed)
"""


@pytest.mark.cluster
def test_a_task_finds_its_part_of_the_node(dgx: DevCluster) -> None:
    inherited = {"NCCL_TOPO_FILE": "/of/the/batch.xml", "SLUICE_SET": "NCCL_TOPO_FILE=/of/the/batch.xml"}
    shown = dgx.run(["srun", "-n1", "-c2", "--gres=gpu:2,nic:2", "sh", "-c", TOPOLOGY], env=inherited).stdout
    text, end, access = shown.rpartition("</system>\n")
    assert access == "readable\n" * 3
    system = read(text + end)
    ends = {name: [one.attributes for one in system.all() if one.name == name] for name in ("gpu", "net")}
    assert [gpu["dev"] for gpu in ends["gpu"]] == ["0", "1"]
    assert {nic["name"] for nic in ends["net"]} <= set(INTERFACES) and len(ends["net"]) == 2
    for job in (["-n1", "--gres=gpu:3"], ["-n2", "--gpus-per-task=1"]):
        for line in dgx.run(["srun", *job, "sh", "-c", COUNT]).stdout.splitlines():
            has, closed = line.split()
            assert int(has) + int(closed) == 8
    mine = dgx.run(["srun", "--gres=gpu:1", "printenv", "NCCL_TOPO_FILE"], env={"NCCL_TOPO_FILE": "mine"})
    assert mine.stdout == "mine\n"
    until(lambda: dgx.run(["srun", "ls", "/run/sluice/topology"]).stdout == "")


NEAR = {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 7: 5, 8: 6, 9: 7}
"""The GPU next to each interface, by their numbers in Slurm; 1 and 6 are for storage."""


def devices(cluster: DevCluster, job: str, name: str) -> set[int]:
    """The numbers of a running job's GPUs or interfaces."""
    until(lambda: shown(cluster, job)["JobState"] == "RUNNING")
    line = cluster.run(["scontrol", "show", "job", "-d", job]).stdout
    found = re.search(rf"GRES=\S*?{name}(?::\w+)?:\d+\(IDX:([\d,-]+)\)", line)
    assert found, line
    ends = [part.partition("-")[::2] for part in found[1].split(",")]
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}


def counters(cluster: DevCluster) -> dict[str, int]:
    shown = fresh_status(cluster)["counters"]
    return {name.removeprefix("select."): count for name, count in shown.items()}


@pytest.mark.cluster
def test_gpus_come_with_interfaces_near_them(dgx: DevCluster) -> None:
    """Stock Slurm takes the lowest numbers of each; here each GPU has its own next to it, as long as there are any, and
    who asks for interfaces alone gets those that no GPU has near first."""
    jobs = []

    def start(*words: str) -> tuple[set[int], set[int]]:
        jobs.append(submit(dgx, "-c1", *words, user="root"))
        return devices(dgx, jobs[-1], "gpu"), devices(dgx, jobs[-1], "nic")

    before = counters(dgx)
    try:
        jobs.append(submit(dgx, "-c1", "--gres=nic:4", user="root"))
        assert devices(dgx, jobs[0], "nic") == {0, 1, 2, 6}
        # The first GPUs of the NUMA node have no free interface near them any more.
        assert start("--gpu-affinity=numa", "--gres=gpu:1,nic:1") == ({2}, {3})
        gpus, nics = start("--gres=gpu:2,nic:2")
        assert {NEAR[nic] for nic in nics} == gpus, (gpus, nics)
        gpus, nics = start("--gres=gpu:h100:1,nic:1")
        assert {NEAR[nic] for nic in nics} == gpus, (gpus, nics)
        dgx.run(["scancel", *jobs[:2]])
        until(lambda: {shown(dgx, job)["JobState"] for job in jobs[:2]} == {"CANCELLED"})
        gpus, nics = start("--gres=gpu:2,nic:3")  # one more than it has GPUs: none that other GPUs have near
        assert {NEAR[nic] for nic in nics - {1, 6}} == gpus, (gpus, nics)
        own = dgx.run(["srun", "-n1", "--gres=gpu:1,nic:1", "sh", "-c", "echo $NCCL_IB_HCA $SLURM_STEP_GPUS"])
        hca, gpu = own.stdout.split()
        assert NEAR[INTERFACES.index(hca.removeprefix("="))] == int(gpu)
        after = counters(dgx)
        assert after["nic_pairs"] - before["nic_pairs"] == 8
        assert after["nic_pairs_near"] - before["nic_pairs_near"] == 7
        assert after["check_failures"] == 0
    finally:
        dgx.run(["scancel", *jobs])


@pytest.mark.cluster
def test_without_the_file_slurm_chooses_interfaces(dgx: DevCluster) -> None:
    """They are counted, and those near the job's cores are kept: on the second processor, the second half of them."""
    file = dgx.slurm_conf_dir() / "nics.sluice.conf"
    content = file.read_text()
    file.unlink()
    dgx.run(["scontrol", "reconfigure"])
    before = counters(dgx)
    try:
        dgx.run(["srun", "--gres=gpu:1,nic:1", "true"])
        submit(dgx, "-c1", "--gres=gpu:4,nic:1", user="root")  # those of the first processor
        job = submit(dgx, "-c1", "--gres=gpu:1,nic:1", user="root")
        gpu, nic = devices(dgx, job, "gpu"), devices(dgx, job, "nic")
        assert gpu <= {4, 5, 6, 7} and nic <= {5, 6, 7, 8, 9}, (gpu, nic)
        after = counters(dgx)
        assert after["nic_pairs"] == before["nic_pairs"]
        assert after["check_failures"] == 0
    finally:
        dgx.run(["scancel", "-u", "root"])
        dgx.wait_idle(nodes=["h-1"])  # a reconfiguration ends an epilog that runs
        file.write_text(content)
        dgx.run(["scontrol", "reconfigure"])


@pytest.mark.cluster
def test_a_damaged_file_changes_nothing(dgx: DevCluster) -> None:
    file = dgx.slurm_conf_dir() / "nics.sluice.conf"
    file.write_text(file.read_text().replace("h-1 0,1", "h-1 1,0"))
    dgx.run(["scontrol", "reconfigure"])
    log = dgx.log("slurmctld@ctl1")
    until(lambda: "nics.sluice.conf: the checksum is not the file's" in log.read_text())
    near = counters(dgx)["nic_pairs_near"]
    dgx.run(["srun", "--gres=gpu:1,nic:1", "true"])
    assert counters(dgx)["nic_pairs_near"] == near + 1


@pytest.fixture
def both(dgx: DevCluster) -> Iterator[DevCluster]:
    """With the second node."""
    dgx.run(["scontrol", "update", "nodename=h-2", "state=resume"])
    dgx.wait_idle()
    yield dgx
    dgx.run(["scancel", "-u", "root"])
    until(lambda: not dgx.run(["squeue", "-h"]).stdout)
    dgx.run(["scontrol", "update", "nodename=h-2", "state=drain", "reason=later"])


def reasons(cluster: DevCluster, job: str) -> set[str]:
    """Why nodes do not take a job that waits; empty as long as that is not recorded."""
    said = explain_job(cluster.layout.state / "sluice.records", parse_job(job)) or {}
    return {entry["reason"] for entry in said.get("waiting", {}).get("nodes_by_reason", [])}


@pytest.mark.cluster
def test_nodes_are_chosen_with_their_interfaces(both: DevCluster) -> None:
    """The first node has a GPU and seven interfaces free, none of them near it: stock Slurm would take it."""

    def run(*words: str) -> str:
        job = submit(both, "-c1", *words, user="root")
        until(lambda: shown(both, job)["JobState"] == "RUNNING")
        return job

    first = run("-wh-1", "--gres=nic:7")
    for gres in ("nic:3", "gpu:7"):
        run("-wh-1", f"--gres={gres}")
    both.run(["scancel", first])
    until(lambda: shown(both, first)["JobState"] == "CANCELLED")
    near = counters(both)["nic_pairs_near"]
    paired = run("--gres=gpu:1,nic:1")
    assert shown(both, paired)["NodeList"] == "h-2"
    gpus, nics = devices(both, paired, "gpu"), devices(both, paired, "nic")
    assert {NEAR[nic] for nic in nics} == gpus
    assert counters(both)["nic_pairs_near"] == near + 1
    assert shown(both, run("--gres=gpu:1"))["NodeList"] == "h-1"
    waiting = submit(both, "-c1", "--gres=gpu:h100:2,nic:10", user="root")
    records = both.layout.state / "sluice.records"
    assert until(lambda: reasons(both, waiting)) == {"too few GPUs free", "GPUs free, too few RDMA NICs free"}
    decided = explain_job(records, parse_job(paired)) or {}
    assert {"name": "nic_pairs", "value": 1} in decided["decision"]["choice"]["score_terms"]
    checks = [check_file(path) for path in list_files(records)]
    assert sum(check.replayed for check in checks) > 0
    assert [check.different for check in checks] == [()] * len(checks)
    assert counters(both)["check_failures"] == 0


@pytest.mark.cluster
def test_each_node_has_the_interfaces_of_its_gpus(both: DevCluster) -> None:
    """--nics-per-gpu: tasks are divided unevenly, and their interfaces with them."""
    for words, counts in (
        (("-N2", "-n3", "--gpus-per-task=1"), ["1", "2"]),
        (("-N2", "-n2", "--gpus-per-node=h100:3"), ["3"]),  # one line for both nodes
        (("-N1", "-n1", "--gpus=5"), ["5"]),
        (("-N2", "-n2", "--gpus=6"), ["3"]),
        (("-n2", "--ntasks-per-node=1", "--gpus=10"), ["5"]),
    ):
        job = submit(both, "-c1", *words, "--nics-per-gpu=1", user="root")
        until(lambda: shown(both, job)["JobState"] == "RUNNING")  # noqa: B023
        text = both.run(["scontrol", "show", "job", "-d", job]).stdout
        found = re.findall(r"GRES=gpu:h100:(\d+)\(IDX:[\d,-]+\),nic:(\d+)\(IDX:[\d,-]+\)", text)
        assert sorted(gpus for gpus, _ in found) == counts, text
        assert all(gpus == nics for gpus, nics in found), text
        both.run(["scancel", job])
        until(lambda: not both.run(["squeue", "-h"]).stdout)
    refused = both.run(["sbatch", "--nics-per-gpu=1", "--wrap=true"], check=False)
    assert "--nics-per-gpu=1: the job asks for no whole GPUs" in refused.stderr
    assert counters(both)["check_failures"] == 0


@pytest.mark.cluster
def test_interfaces_are_in_one_plane_or_over_several(both: DevCluster) -> None:
    """Pairs of GPUs are in planes 1, 2, 1, 2: three are in both by themselves, and two in one."""
    conf = both.slurm_conf_dir()
    inventories = list(load_inventories(both.layout.inventories).inventories.values())
    plain, policy = generate(inventories, nics=True).nics_conf(), (conf / "sluice.policy").read_text()
    plane = {nic: 1 + gpu // 2 % 2 for nic, gpu in NEAR.items()}
    lines = [with_planes(line, [plane.get(nic, 0) for nic in range(10)]) for line in read_nics(plain).values()]

    def planes(word: int, *asked: str) -> set[int]:
        CompiledPolicy(settings=Global(placement="sluice", nic_planes=word)).write(conf / "sluice.policy")
        await_policy(both)
        job = submit(both, "-c1", *asked, user="root")
        until(lambda: shown(both, job)["JobState"] == "RUNNING")
        text = both.run(["scontrol", "show", "job", "-d", job]).stdout
        nics = numbers(re.findall(r"nic:\d+\(IDX:([\d,-]+)\)", text))
        assert {NEAR[nic] for nic in nics} == numbers(re.findall(r"gpu:h100:\d+\(IDX:([\d,-]+)\)", text))
        found = {plane[nic] for nic in nics}
        records = both.layout.state / "sluice.records"
        decided = until(lambda: (explain_job(records, parse_job(job)) or {}).get("decision"))
        assert {"name": "nic_planes", "value": len(found)} in decided["choice"]["score_terms"]
        both.run(["scancel", job])
        until(lambda: not both.run(["squeue", "-h"]).stdout)
        return found

    try:
        (conf / NICS_FILE).write_text(render(lines))
        both.run(["scontrol", "reconfigure"])
        assert planes(0, "--gres=gpu:2,nic:2") == {1}
        assert planes(2, "--gres=gpu:2,nic:2") == {1, 2}
        assert planes(1, "-N2", "-n2", "--gres=gpu:3,nic:3") in ({1}, {2})
        assert planes(1, "--gres=gpu:2,nic:2", "--nic-planes=spread") == {1, 2}
        assert planes(2, "--gpus-per-node=2", "--nics-per-gpu=1", "--nic-planes=one") in ({1}, {2})
        refused = both.run(["sbatch", "--gres=gpu:1", "--nic-planes=one", "--wrap=true"], check=False)
        assert "--nic-planes=one: the job asks for no RDMA interfaces" in refused.stderr
    finally:
        (conf / NICS_FILE).write_text(plain)
        (conf / "sluice.policy").write_text(policy)
        both.run(["scontrol", "reconfigure"])
        await_policy(both)
    checks = [check_file(path) for path in list_files(both.layout.state / "sluice.records")]
    assert [check.different for check in checks] == [()] * len(checks)
    assert counters(both)["check_failures"] == 0


def numbers(listed: list[str]) -> set[int]:
    """Of lists as Slurm writes them, e.g. 0-2,5."""
    ends = [part.partition("-")[::2] for text in listed for part in text.split(",")]
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}


def give_types(cluster: DevCluster) -> None:
    """Types for the interfaces of all nodes, of which the two for storage are made RoCE: Slurm counts these last."""
    inventories = list(load_inventories(cluster.layout.inventories).inventories.values())
    for inventory in inventories:
        for number in (1, 6):
            for port in inventory.nics[number].ports:
                port.link_layer = "Ethernet"
    version = parse_slurm_version(cluster.run(["slurmd", "-V"]).stdout)
    typed, conf = generate(inventories, slurm_version=version, nics=True, nic_types=True), cluster.slurm_conf_dir()
    text = (conf / "slurm.conf").read_text()
    assert text.count(",nic:10") == 1
    (conf / "slurm.conf").write_text(text.replace(",nic:10", ",nic:ib:8,nic:roce:2"))
    (conf / "gres.conf").write_text(typed.gres_conf)
    (conf / "nics.sluice.conf").write_text(typed.nics_conf())
    for daemon in ("slurmd@h-1", "slurmd@h-2", "slurmctld@ctl1"):
        cluster.stop_daemon(daemon)
    for daemon in ("slurmctld@ctl1", "slurmd@h-1", "slurmd@h-2"):
        cluster.start_daemon(daemon)
    cluster.wait_registered()


@pytest.mark.cluster
def test_interfaces_are_placed_by_type(both: DevCluster) -> None:
    """Types come to a cluster that runs; it stays so for what follows."""
    give_types(both)

    def run(gres: str) -> str:
        job = submit(both, "-c1", f"--gres={gres}", user="root")
        until(lambda: shown(both, job)["JobState"] == "RUNNING")
        return job

    for gres in ("gpu:2,nic:ib:2", "gpu:1,nic:ib:1", "gpu:1,nic:1"):
        job = run(gres)
        assert devices(both, job, "nic") == devices(both, job, "gpu"), gres
    for_storage = [run("nic:roce:2"), run("nic:roce:2")]
    assert {shown(both, job)["NodeList"] for job in for_storage} == {"h-1", "h-2"}
    assert [devices(both, job, "nic") for job in for_storage] == [{8, 9}] * 2
    waiting = submit(both, "-c1", "--gres=nic:roce:1", user="root")
    assert until(lambda: reasons(both, waiting)) == {"GPUs free, too few RDMA NICs free"}
    refused = both.run(["sbatch", "--gres=nic:eth:1", "--wrap=true"], check=False)
    assert "Requested node configuration is not available" in refused.stderr
    assert counters(both)["check_failures"] == 0
