"""The units and the guard of slurmctld under systemd itself: a controller boots by systemd-nspawn on an overlay of this
machine's root. With SLUICE_TEST_SCALE=full; test_boot.py has a node.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.base.run import run_command
from tests.integration.booted import SLUICE, SOURCES, CannotBootError, Machine, installed, nspawn

pytestmark = pytest.mark.cluster

_CONF = """ClusterName=systemd
SlurmctldHost=sluice
AuthType=auth/munge
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
PriorityType=priority/multifactor
NodeName=sluice CPUs=1 RealMemory=100
PartitionName=main Nodes=ALL Default=YES
Include sluice.plugins.conf
"""


def restart_slurmctld(machine: Machine) -> None:
    machine.run("systemctl", "reset-failed", "slurmctld")  # five starts in ten seconds are too many otherwise
    machine.run("systemctl", "restart", "slurmctld")
    machine.wait(lambda: "is UP" in machine.run("scontrol", "ping", check=False))


def loads_sluice(machine: Machine) -> bool:
    return "sluice" in machine.run("sh", "-c", "scontrol show config | grep ^JobSubmitPlugins")


def restarts(machine: Machine, unit: str) -> int:
    return int(machine.shown(unit, "NRestarts"))


@pytest.fixture(scope="module")
def machine(full_scale: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if not full_scale:
        pytest.skip("boots systemd; SLUICE_TEST_SCALE=full")
    folder = tmp_path_factory.mktemp("systemd")
    run_command([f"{sys.prefix}/bin/sluice", "plugin", "build", "--output", folder / "built"], timeout=300)
    binds = [f"--bind-ro={folder / 'built'}:/root/built", *installed(folder, Path("/"))]
    try:
        with nspawn(Path("/"), folder, binds) as made:
            yield _set_up(made)
    except CannotBootError as error:
        pytest.skip(str(error))


def _set_up(machine: Machine) -> Machine:
    machine.run("sh", "-euc", "mkdir -p /var/log/slurm /var/spool/slurmctld /var/spool/slurmd /etc/munge")
    machine.run("chown", "slurm", "/var/log/slurm", "/var/spool/slurmctld")
    key = "head -c 128 /dev/urandom > /etc/munge/munge.key; chown -R munge /etc/munge; chmod 400 /etc/munge/munge.key"
    machine.run("sh", "-euc", key)
    machine.shell("ip link set lo up; ip address add 192.0.2.1/32 dev lo")  # no names of loopback addresses alone
    machine.write("/etc/hosts", "127.0.0.1 localhost\n192.0.2.1 sluice\n")
    machine.write("/etc/slurm/slurm.conf", _CONF)
    machine.run(SLUICE, "plugin", "install", "--build", "/root/built")
    machine.run("sh", "-euc", f"cp {SOURCES}/etc/systemd/*.service {SOURCES}/etc/systemd/*.timer /etc/systemd/system/")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "munge")
    return machine


def test_slurmctld_starts_with_the_plugins_and_without_them_when_it_was_upgraded(machine: Machine) -> None:
    restart_slurmctld(machine)
    assert loads_sluice(machine)
    slurmctld = machine.run("readlink", "-f", "/usr/sbin/slurmctld")
    machine.run("mv", slurmctld, f"{slurmctld}.real")
    newer = f'[ "$1" = -V ] && {{ echo slurm-wlm 99.05.1; exit; }}\nexec {slurmctld}.real "$@"\n'
    machine.write(slurmctld, f"#!/bin/sh\n{newer}", "755")
    restart_slurmctld(machine)
    assert not loads_sluice(machine)
    said = machine.run("journalctl", "--unit=slurmctld", "--output=cat")
    assert "Slurm starts without Sluice's plugins: slurmctld is 99.05.1, the plugins are for" in said
    machine.run("mv", f"{slurmctld}.real", slurmctld)
    restart_slurmctld(machine)
    assert loads_sluice(machine)


def test_the_supervisor_is_started_again_when_it_was_killed(machine: Machine) -> None:
    drop_in = "slurmctld.service.d/sluice-supervise.conf"
    machine.run("cp", f"{SOURCES}/etc/systemd/{drop_in}", f"/etc/systemd/system/{drop_in}")
    machine.run("systemctl", "daemon-reload")
    restart_slurmctld(machine)
    before = machine.run("systemctl", "show", "--property=MainPID", "--value", "slurmctld")
    assert machine.run("cat", f"/proc/{before}/comm") == "sluice-supervis"
    machine.run("pkill", "--signal=KILL", "--parent", before, "--exact", "slurmctld")
    machine.wait(lambda: restarts(machine, "slurmctld") == 1)
    for number in range(2, 9):  # oftener than systemd lets services start that do not say otherwise
        machine.wait(lambda: machine.is_active("slurmctld"))
        machine.run("systemctl", "kill", "--signal=KILL", "slurmctld")
        machine.wait(lambda: restarts(machine, "slurmctld") >= number)  # noqa: B023
    machine.wait(lambda: "is UP" in machine.run("scontrol", "ping", check=False))
    assert loads_sluice(machine)


@pytest.mark.parametrize("unit", ["sluice-explaind", "sluice-controllerd", "sluice-agent"])
def test_services_run_in_their_sandbox(machine: Machine, unit: str) -> None:
    ready = {"sluice-explaind": "listening on port", "sluice-controllerd": "ready on", "sluice-agent": "action=ready"}
    machine.run("systemctl", "start", "slurmctld")
    machine.run("systemctl", "restart", unit)
    machine.wait(lambda: ready[unit] in machine.run("journalctl", f"--unit={unit}", "--output=cat"))
    assert machine.is_active(unit)
    assert restarts(machine, unit) == 0


def test_the_web_service_has_the_snapshot_in_its_sandbox(machine: Machine) -> None:
    machine.run("systemctl", "start", "slurmctld")
    machine.run("useradd", "--system", "sluice-web")
    machine.run("systemctl", "restart", "sluice-controllerd")
    token = machine.run("sh", "-euc", f"mkdir -p /etc/sluice; {SLUICE} token create root 2>/dev/null")
    machine.run("chgrp", "sluice-web", "/etc/sluice/tokens.json")
    machine.run("systemctl", "restart", "sluice-web")
    ask = (
        "import sys, urllib.request as u; print(u.urlopen(u.Request('http://127.0.0.1:6823/api/v1/nodes', "
        "headers={'authorization': 'Bearer ' + sys.argv[1]})).read().decode())"
    )
    machine.wait(lambda: '"name":"sluice"' in machine.run("python3", "-c", ask, token, check=False))
    assert machine.is_active("sluice-web") and restarts(machine, "sluice-web") == 0


def test_the_helper_acts_as_users_in_its_sandbox(machine: Machine) -> None:
    machine.run("systemctl", "start", "slurmctld", "sluice-web")
    machine.run("useradd", "--create-home", "alice")
    make = f"{SLUICE} token create alice --scope read --scope write 2>/dev/null"
    token = machine.run("sh", "-euc", make)
    machine.run("systemctl", "restart", "sluice-actd")
    ask = (
        "import sys, urllib.request as u; print(u.urlopen(u.Request('http://127.0.0.1:6823/api/v1/jobs', "
        'b\'{"script": "#!/bin/sh\\\\n", "hold": true}\', '
        "headers={'authorization': 'Bearer ' + sys.argv[1], 'content-type': 'application/json', "
        "'idempotency-key': 'k'})).read().decode())"
    )
    machine.wait(lambda: '"job_id":' in machine.run("python3", "-c", ask, token, check=False))
    assert machine.run("squeue", "--noheader", "--format=%u %Z").split() == ["alice", "/home/alice"]
    machine.run("systemctl", "kill", "--signal=KILL", "sluice-actd")
    machine.wait(lambda: restarts(machine, "sluice-actd") == 1 and machine.is_active("sluice-actd"))
    assert '"job_id":' in machine.run("python3", "-c", ask, token), "the same key: the same job"
    assert len(machine.run("squeue", "--noheader").splitlines()) == 1
    machine.run("scancel", "--user=alice")


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("sluice-mig", "nothing to restore: there is no /etc/slurm/sluice.node.json"),
        ("sluice-probe", "wrote /var/lib/sluice/inventory/sluice.json"),
        # without slurmdbd these have nothing to do, and say so
        ("sluice-apply", "keeps no accounts|no policy was applied on this host yet"),
        ("sluice-drift", "keeps no accounts|no policy was applied on this host yet"),
        ("sluice-audit-collect", "accounting storage is disabled"),
    ],
)
def test_what_runs_once_does_its_work_in_its_sandbox(machine: Machine, unit: str, said: str) -> None:
    machine.run("systemctl", "start", "slurmctld")
    machine.run("systemctl", "restart", unit, check=False)
    machine.wait(lambda: re.search(said, machine.run("journalctl", f"--unit={unit}", "--output=cat")))
