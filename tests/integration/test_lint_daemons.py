"""`sluice lint` against what real daemons print for the same files."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gres_probe.inventory import Link, LinkType, Nic
from gres_probe.lint import RULES, Finding, Severity, Site, Source, lint
from gres_probe.writer import generate, node_devices
from sluice.base.slurm_version import SlurmVersion, parse_slurm_version
from sluice.slurm.slurm_conf import read_config, read_slurm_conf
from tests.integration.gres_cases import READING, REGISTERING, Case
from tests.integration.private_slurm import NEEDS, NODE, entered, free_ports, head, running
from tests.integration.topology_cases import CONF_CASES, CONF_NODES
from tests.integration.versions import TREES
from tests.unit.gres_probe import machines

pytestmark = NEEDS
COMPLAINT = re.compile(r"(error|fatal|warning): ", re.IGNORECASE)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dev")
    for number in range(8):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(195, number))
    (folder / "plain").touch()
    return folder


class Slurmd:
    """`slurmd -G`, which reads the GRES configuration and ends; `prefix` is that of another system tree."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.prefix = prefix
        said = subprocess.run([*prefix, "slurmd", "-V"], capture_output=True, text=True, check=True)
        self.version = parse_slurm_version(said.stdout)

    def read_gres(self, folder: Path, node: str) -> tuple[int, list[str], str]:
        """Its exit code, its complaints, and all that it said about ``folder/slurm.conf``."""
        (folder / node).mkdir(exist_ok=True)  # 24.11 wants its spool folder
        (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\nCgroupPlugin=disabled\n" if self.prefix else "")
        done = subprocess.run(
            [*self.prefix, "slurmd", "-G", "-N", node, "-f", str(folder / "slurm.conf")],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
        )
        said = done.stdout + done.stderr
        return done.returncode, [line for line in said.splitlines() if COMPLAINT.search(line)], said


@pytest.fixture(scope="module", params=["native", *TREES])
def slurmd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurmd]:
    if request.param == "native":
        yield Slurmd()
    else:
        with entered(request.getfixturevalue(f"{request.param}_root"), tmp_path_factory.getbasetemp()) as prefix:
            yield Slurmd(prefix)


def write_case(case: Case, folder: Path, devices: Path) -> Path:
    text = head(folder, 1) + (f"GresTypes={case.types}\n" if case.types else "")
    text += f"NodeName=n1 {NODE} Port=2" + (f" Gres={case.gres}\n" if case.gres else "\n")
    text += f"PartitionName=all Nodes=n1\n{case.more}\n"
    (folder / "slurm.conf").write_text(text)
    if case.gres_conf is not None:
        (folder / "gres.conf").write_text(case.gres_conf.replace("{dev}", str(devices)) + "\n")
    return folder


def lint_folder(folder: Path, local: frozenset[str], version: SlurmVersion) -> list[Finding]:
    gres = folder / "gres.conf"
    return lint(
        Site(
            slurm=read_slurm_conf(folder),
            gres=read_config(gres) if gres.exists() else None,
            local_nodes=local,
            version=version,
        )
    )


@pytest.mark.parametrize("case", READING, ids=lambda case: case.name)
def test_lint_says_what_slurmd_says(case: Case, tmp_path: Path, devices: Path, slurmd: Slurmd) -> None:
    folder = write_case(case, tmp_path, devices)
    findings = lint_folder(folder, frozenset({"n1"}), slurmd.version)
    expected = case.codes if case.newer is None or slurmd.version < (23, 2, 7) else case.newer
    assert tuple(sorted({finding.rule.code for finding in findings})) == expected

    code, complaints, _ = slurmd.read_gres(folder, "n1")
    for line in complaints:
        assert any(f.rule.says and re.search(f.rule.says, line) for f in findings), f"not predicted: {line}"
    fatal = [finding for finding in findings if finding.rule.severity is Severity.FATAL]
    assert bool(fatal) == (code != 0), complaints
    for finding in fatal or [f for f in findings if f.rule.source is Source.SLURMD]:
        said = any(re.search(finding.rule.says, line) for line in complaints)
        assert said or len(fatal) > 1, f"slurmd does not say {finding.rule.code}"  # it ends at the first fatal one


def test_lint_says_what_slurmctld_says(tmp_path: Path, devices: Path) -> None:
    """One cluster, one node a case: each node's registration is accepted or refused as lint predicts."""
    ports = free_ports(len(REGISTERING) + 1)
    names = [f"n{number}" for number in range(1, len(REGISTERING) + 1)]
    text = head(tmp_path, ports[0]) + "GresTypes=gpu,shard\n"
    gres = ""
    for name, case, port in zip(names, REGISTERING, ports[1:], strict=True):
        text += f"NodeName={name} {NODE} Port={port} Gres={case.gres}\n"
        for line in (case.gres_conf or "").replace("\\\n", " ").splitlines():
            if line.strip():
                gres += f"NodeName={name} {line.replace('{dev}', str(devices))}\n"
    (tmp_path / "slurm.conf").write_text(text + "PartitionName=all Nodes=ALL\n")
    (tmp_path / "gres.conf").write_text(gres)
    findings = lint_folder(tmp_path, frozenset(names), Slurmd().version)
    for name, case in zip(names, REGISTERING, strict=True):
        assert tuple(sorted({f.rule.code for f in findings if name in f.nodes})) == case.codes, case.name

    with running(tmp_path, names) as states:
        pass
    said = (tmp_path / "slurmctld.log").read_text()
    for name, case in zip(names, REGISTERING, strict=True):
        expected = [f for f in findings if name in f.nodes and f.rule.source is Source.SLURMCTLD]
        about = [
            line
            for line in said.splitlines()
            if COMPLAINT.search(line) and re.search(rf"\b{name}\b", line) and "_rpc_node_registration" not in line
        ]  # without the general line that follows each refusal
        for finding in expected:
            assert any(re.search(finding.rule.says, line) for line in about), (case.name, finding.what, about)
        for line in about:
            predicted = [f for f in findings if name in f.nodes and f.rule.says]
            assert any(re.search(f.rule.says, line) for f in predicted), (case.name, line)
        refused = {"SL046", "SL050"} & set(case.codes)
        assert ("INVALID_REG" in states[name]) == bool(refused), (case.name, states[name])


MACHINES = {
    "dgx1": machines.dgx,
    "l40s1": machines.l40s,
    "mixed1": machines.mixed,
    "mig1": machines.mig,
    "mig2": lambda node: machines.mig(node, (9984, 19968)),
    "mig3": machines.instances,
}


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("node", MACHINES)
def test_slurmd_accepts_what_the_writer_writes(node: str, shards: bool, tmp_path: Path, slurmd: Slurmd) -> None:
    """Every device, type, core list and shard arrives, and slurmd has nothing to complain about."""
    machine = MACHINES[node](node)
    configuration = generate([machine], slurm_version=slurmd.version, shards=shards)
    inside = configuration.gres_conf.replace("/dev/", f"{tmp_path}/dev/")
    for file in {file for device in node_devices(machine) for file in device.files}:
        path = tmp_path / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(195, 1))
    types = "gpu,shard" if shards else "gpu"
    nodes = configuration.nodes_conf({node: {"NodeHostname": socket.gethostname(), "Port": "2"}})
    text = f"{head(tmp_path, 1)}GresTypes={types}\n{nodes}PartitionName=all Nodes=ALL\n"
    (tmp_path / "slurm.conf").write_text(text)
    (tmp_path / "gres.conf").write_text(inside)
    code, complaints, said = slurmd.read_gres(tmp_path, node)
    assert (code, complaints) == (0, [])
    wanted: Counter[str] = Counter()
    for device in node_devices(machine):
        wanted[device.type] += device.memory_mib
    found = re.findall(r"Gres Name=(gpu|shard) Type=(\S+) Count=(\d+) ", said)
    assert sum(int(count) for name, _, count in found if name == "gpu") == len(node_devices(machine))
    there: Counter[str] = Counter()
    for name, kind, count in found:
        there[kind] += int(count) if name == "shard" else 0
    assert +there == (wanted if shards else Counter())
    assert {kind for name, kind, _ in found if name == "gpu"} == {device.type for device in node_devices(machine)}


def test_slurmd_accepts_rdma_interfaces(tmp_path: Path, slurmd: Slurmd) -> None:
    machine = machines.dgx("n1")
    for number, gpu in enumerate((machine.gpus[0], machine.gpus[0], machine.gpus[-1])):
        links = [Link(LinkType.SYSTEM)] * 8 + [Link(LinkType.PCI_BRIDGES if number < 2 else LinkType.SYSTEM)] * 3
        file = f"/dev/infiniband/uverbs{number}"
        machine.nics.append(Nic(f"mlx5_{number}", "", links=links, cores=gpu.cores, device_file=file))
    configuration = generate([machine], slurm_version=slurmd.version, nics=True)
    for file in [*(nic.device_file for nic in machine.nics), *(gpu.device_file for gpu in machine.gpus)]:
        path = tmp_path / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(231, 1))
    nodes = configuration.nodes_conf({"n1": {"NodeHostname": socket.gethostname(), "Port": "2"}})
    text = f"{head(tmp_path, 1)}GresTypes=gpu,shard,nic\n{nodes}PartitionName=all Nodes=ALL\n"
    (tmp_path / "slurm.conf").write_text(text)
    (tmp_path / "gres.conf").write_text(configuration.gres_conf.replace("/dev/", f"{tmp_path}/dev/"))
    code, complaints, said = slurmd.read_gres(tmp_path, "n1")
    assert (code, complaints) == (0, [])
    assert len(re.findall(r"Gres Name=nic .*Links=", said)) == 3, said
    assert [one.rule.code for one in lint_folder(tmp_path, frozenset({"n1"}), slurmd.version)] == []


@pytest.mark.parametrize("name", CONF_CASES)
def test_lint_says_what_slurmctld_says_of_topology_conf(tmp_path: Path, name: str) -> None:
    text, expected = CONF_CASES[name]
    ports = free_ports(2)
    (tmp_path / "slurm.conf").write_text(
        f"{head(tmp_path, ports[0])}TopologyPlugin=topology/tree\nNodeName={CONF_NODES} {NODE} Port={ports[1]}\n"
        "PartitionName=main Nodes=ALL Default=YES\n"
    )
    (tmp_path / "topology.conf").write_text(text)
    (tmp_path / "state").mkdir(exist_ok=True)
    ready = "Running as primary controller"
    command = ["slurmctld", "-D", "-f", tmp_path / "slurm.conf"]
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as slurmctld:
        assert slurmctld.stderr is not None
        for line in slurmctld.stderr:
            lines.append(line)
            if ready in line:
                slurmctld.kill()
                break
    said = "".join(lines)
    rules = [RULES[code] for code in expected]
    assert (ready not in said) == any(rule.severity is Severity.FATAL for rule in rules), said
    theirs = [rule for rule in rules if rule.source is Source.SLURMCTLD]
    fatal = [rule for rule in theirs if rule.severity is Severity.FATAL]  # the others are not reached then
    assert all(re.search(rule.says, said) for rule in fatal[:1] or theirs), said
    if not rules:
        assert not COMPLAINT.search("".join(line for line in lines if "witch" in line)), said
