"""`sluice lint` against what real daemons print for the same files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from pathlib import Path

import pytest

from gres_probe.lint import Finding, Severity, Site, Source, lint
from gres_probe.slurm_conf import read_config, read_slurm_conf
from sluice_base.slurm_version import parse_slurm_version
from tests.integration.gres_cases import READING, REGISTERING, Case

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make device files"),
    pytest.mark.skipif(shutil.which("slurmd") is None, reason="needs slurmd"),
]

SLURM_CONF = """\
ClusterName=lint
SlurmctldHost={host}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={port}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
"""
NODE = "NodeHostname={host} Sockets=2 CoresPerSocket=8 ThreadsPerCore=2 RealMemory=100"
COMPLAINT = re.compile(r"(error|fatal|WARNING): ")


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dev")
    for number in range(8):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(195, number))
    (folder / "plain").touch()
    return folder


def version() -> tuple[int, int, int]:
    return parse_slurm_version(subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout)


def write_case(case: Case, folder: Path, devices: Path) -> Path:
    host = socket.gethostname()
    text = SLURM_CONF.format(host=host, folder=folder, port=1)
    text += f"GresTypes={case.types}\n" if case.types else ""
    text += f"NodeName=n1 {NODE.format(host=host)} Port=2" + (f" Gres={case.gres}\n" if case.gres else "\n")
    text += f"PartitionName=all Nodes=n1\n{case.more}\n"
    (folder / "slurm.conf").write_text(text)
    if case.gres_conf is not None:
        (folder / "gres.conf").write_text(case.gres_conf.replace("{dev}", str(devices)) + "\n")
    return folder


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def lint_folder(folder: Path, local: frozenset[str]) -> list[Finding]:
    gres = folder / "gres.conf"
    return lint(
        Site(
            slurm=read_slurm_conf(folder),
            gres=read_config(gres) if gres.exists() else None,
            local_nodes=local,
            version=version(),
        )
    )


@pytest.mark.parametrize("case", READING, ids=lambda case: case.name)
def test_lint_says_what_slurmd_says(case: Case, tmp_path: Path, devices: Path) -> None:
    folder = write_case(case, tmp_path, devices)
    findings = lint_folder(folder, frozenset({"n1"}))
    assert tuple(sorted({finding.rule.code for finding in findings})) == case.codes

    slurmd = subprocess.run(
        ["slurmd", "-G", "-N", "n1", "-f", folder / "slurm.conf"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    complaints = [line for line in (slurmd.stdout + slurmd.stderr).splitlines() if COMPLAINT.search(line)]
    for line in complaints:
        assert any(f.rule.says and re.search(f.rule.says, line) for f in findings), f"not predicted: {line}"
    assert any(f.rule.severity is Severity.FATAL for f in findings) == (slurmd.returncode != 0), complaints
    for finding in findings:
        if finding.rule.source is Source.SLURMD and (slurmd.returncode == 0 or finding.rule.severity is Severity.FATAL):
            said = any(re.search(finding.rule.says, line) for line in complaints)
            first = [f for f in findings if f.rule.severity is Severity.FATAL]
            assert said or (slurmd.returncode and len(first) > 1), f"slurmd does not say {finding.rule.code}"


def test_lint_says_what_slurmctld_says(tmp_path: Path, devices: Path) -> None:
    """One cluster, one node a case: each node's registration is accepted or refused as lint predicts."""
    host = socket.gethostname()
    ports = free_ports(len(REGISTERING) + 1)
    names = [f"n{number}" for number in range(1, len(REGISTERING) + 1)]
    text = SLURM_CONF.format(host=host, folder=tmp_path, port=ports[0]) + "GresTypes=gpu,shard\n"
    gres = ""
    for name, case, port in zip(names, REGISTERING, ports[1:], strict=True):
        text += f"NodeName={name} {NODE.format(host=host)} Port={port} Gres={case.gres}\n"
        for line in (case.gres_conf or "").replace("\\\n", " ").splitlines():
            if line.strip():
                gres += f"NodeName={name} {line.replace('{dev}', str(devices))}\n"
    (tmp_path / "slurm.conf").write_text(text + "PartitionName=all Nodes=ALL\n")
    (tmp_path / "gres.conf").write_text(gres)
    (tmp_path / "state").mkdir()
    findings = lint_folder(tmp_path, frozenset(names))
    for name, case in zip(names, REGISTERING, strict=True):
        assert tuple(sorted({f.rule.code for f in findings if name in f.nodes})) == case.codes, case.name

    log = tmp_path / "slurmctld.log"
    conf = tmp_path / "slurm.conf"
    daemons = []
    try:
        with log.open("w") as out:
            daemons.append(subprocess.Popen(["slurmctld", "-D", "-f", conf], stdout=out, stderr=out))
        for name in names:
            with (tmp_path / f"{name}.log").open("w") as out:
                command = ["slurmd", "-D", "-N", name, "-f", conf]
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out))
        states = wait_registered(conf, names)
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=60)
    said = log.read_text()
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


def wait_registered(conf: Path, names: list[str]) -> dict[str, str]:
    """The state of each node, once all have registered."""
    deadline = time.monotonic() + 60
    while True:
        shown = subprocess.run(
            ["scontrol", "show", "node", "--oneliner"],
            capture_output=True,
            text=True,
            env=os.environ | {"SLURM_CONF": str(conf)},
        ).stdout
        states = dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+) ", shown, re.MULTILINE))
        refused = {name for name, state in states.items() if "INVALID_REG" in state}
        unknown = [n for n in names if n not in refused and re.search(r"UNKNOWN|\*", states.get(n, "UNKNOWN"))]
        if not unknown:
            return states
        assert time.monotonic() < deadline, f"not registered: {unknown}"
        time.sleep(0.2)
