"""The units and the guard under systemd itself: it boots as process 1 of namespaces of its own, on an overlay of this
machine's root, and nothing of it is left afterwards. With SLUICE_TEST_SCALE=full.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.base.run import run_command

pytestmark = pytest.mark.cluster
_ROOT = Path(__file__).resolve().parents[2]
_SLUICE = _ROOT / ".venv/bin/sluice"

# $1: an empty folder, $2: the checkout, $3: built plugins, $4: a cgroup of version 2 that is ours.
_BOOT = r"""
echo $$ > "$4/cgroup.procs"
exec unshare --pid --mount --uts --ipc --net --cgroup --fork --kill-child --propagation private sh -euc '
    ip link set lo up; ip address add 192.0.2.1/32 dev lo  # names of loopback addresses alone are not found
    mount -t tmpfs tmpfs "$1"; mkdir "$1/upper" "$1/work" "$1/root"; root=$1/root
    mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$root"
    mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount -t sysfs -o ro sysfs "$root/sys"
    mount -t tmpfs tmpfs "$root/run"; mount -t tmpfs tmpfs "$root/tmp"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    mkdir -p "$root$2"; mount --rbind "$2" "$root$2"; cp -r "$3" "$root/root/built"
    echo sluice-systemd > "$root/etc/hostname"
    export container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin
    exec chroot "$root" /lib/systemd/systemd --unit=basic.target
' sh "$1" "$2" "$3"
"""

_CONF = """ClusterName=systemd
SlurmctldHost=sluice-systemd
AuthType=auth/munge
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
PriorityType=priority/multifactor
NodeName=sluice-systemd CPUs=1 RealMemory=100
PartitionName=main Nodes=ALL Default=YES
Include sluice.plugins.conf
"""


class Machine:
    """A machine that systemd has booted."""

    def __init__(self, boot: subprocess.Popen[bytes]) -> None:
        self.boot = boot
        self.wait(lambda: len(self._children()) == 1, 30)
        self.pid = self._children()[0]
        self.wait(lambda: self.run("systemctl", "is-active", "basic.target", check=False) == "active", 60)

    def _children(self) -> list[str]:
        assert self.boot.poll() is None, "systemd does not boot here"
        return Path(f"/proc/{self.boot.pid}/task/{self.boot.pid}/children").read_text().split()

    def run(self, *words: str, check: bool = True, text: str | None = None) -> str:
        """A command's output and complaints."""
        enter = ["nsenter", "--target", self.pid, "--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--root"]
        done = run_command([*enter, "--wdns=/", *words], check=False, timeout=120, input_text=text)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return (done.stdout + done.stderr).strip()

    def write(self, path: str, text: str, mode: str = "644") -> None:
        self.run("sh", "-euc", f'mkdir -p "$(dirname {path})"; cat > {path}; chmod {mode} {path}', text=text)

    def wait(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.run("journalctl", "--lines=40", "--output=cat", check=False)
            time.sleep(0.2)

    def restart_slurmctld(self) -> None:
        self.run("systemctl", "reset-failed", "slurmctld")  # five starts in ten seconds are too many otherwise
        self.run("systemctl", "restart", "slurmctld")
        self.wait(lambda: "is UP" in self.run("scontrol", "ping", check=False))

    def loads_sluice(self) -> bool:
        return "sluice" in self.run("sh", "-c", "scontrol show config | grep ^JobSubmitPlugins")

    def restarts(self, unit: str) -> int:
        return int(self.run("systemctl", "show", "--property=NRestarts", "--value", unit))

    def is_active(self, unit: str) -> bool:
        return self.run("systemctl", "is-active", unit, check=False) == "active"


@pytest.fixture(scope="module")
def machine(full_scale: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if not full_scale:
        pytest.skip("boots systemd; SLUICE_TEST_SCALE=full")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    unified = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    if os.geteuid() != 0 or unified is None or not Path("/lib/systemd/systemd").exists():
        pytest.skip("needs root, a cgroup tree of version 2, and systemd")
    build = tmp_path_factory.mktemp("built")
    run_command([_SLUICE, "plugin", "build", "--output", build], timeout=300)
    folder, group = tmp_path_factory.mktemp("systemd"), unified / f"sluice-test-{os.getpid()}"
    group.mkdir()
    words = ["sh", "-euc", _BOOT, "sh", str(folder), str(_ROOT), str(build), str(group)]
    with (folder.parent / "systemd.log").open("wb") as log:
        boot = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        yield _set_up(Machine(boot))
    finally:
        os.killpg(boot.pid, signal.SIGKILL)
        boot.wait()
        deadline = time.monotonic() + 30  # process 1 takes all others with it
        while "populated 1" in (group / "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        for below in sorted(group.rglob("*/"), reverse=True):
            below.rmdir()
        group.rmdir()


def _set_up(machine: Machine) -> Machine:
    machine.run(
        "sh", "-euc", "mkdir -p /opt/sluice/bin /var/log/slurm /var/spool/slurmctld /var/spool/slurmd /etc/munge"
    )
    machine.run("ln", "-sfn", str(_SLUICE), "/opt/sluice/bin/sluice")
    machine.run("chown", "slurm", "/var/log/slurm", "/var/spool/slurmctld")
    key = "head -c 128 /dev/urandom > /etc/munge/munge.key; chown -R munge /etc/munge; chmod 400 /etc/munge/munge.key"
    machine.run("sh", "-euc", key)
    machine.write("/etc/hosts", "127.0.0.1 localhost\n192.0.2.1 sluice-systemd\n")
    machine.write("/etc/slurm/slurm.conf", _CONF)
    machine.run("/opt/sluice/bin/sluice", "plugin", "install", "--build", "/root/built")
    machine.run("sh", "-euc", f"cp {_ROOT}/etc/systemd/*.service {_ROOT}/etc/systemd/*.timer /etc/systemd/system/")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "munge")
    return machine


def test_slurmctld_starts_with_the_plugins_and_without_them_when_it_was_upgraded(machine: Machine) -> None:
    machine.restart_slurmctld()
    assert machine.loads_sluice()
    slurmctld = machine.run("readlink", "-f", "/usr/sbin/slurmctld")
    machine.run("mv", slurmctld, f"{slurmctld}.real")
    newer = f'[ "$1" = -V ] && {{ echo slurm-wlm 99.05.1; exit; }}\nexec {slurmctld}.real "$@"\n'
    machine.write(slurmctld, f"#!/bin/sh\n{newer}", "755")
    machine.restart_slurmctld()
    assert not machine.loads_sluice()
    said = machine.run("journalctl", "--unit=slurmctld", "--output=cat")
    assert "Slurm starts without Sluice's plugins: slurmctld is 99.05.1, the plugins are for" in said
    machine.run("mv", f"{slurmctld}.real", slurmctld)
    machine.restart_slurmctld()
    assert machine.loads_sluice()


def test_the_supervisor_is_started_again_when_it_was_killed(machine: Machine) -> None:
    drop_in = "slurmctld.service.d/sluice-supervise.conf"
    machine.run("cp", f"{_ROOT}/etc/systemd/{drop_in}", f"/etc/systemd/system/{drop_in}")
    machine.run("systemctl", "daemon-reload")
    machine.restart_slurmctld()
    before = machine.run("systemctl", "show", "--property=MainPID", "--value", "slurmctld")
    assert machine.run("cat", f"/proc/{before}/comm") == "sluice-supervis"
    machine.run("pkill", "--signal=KILL", "--parent", before, "--exact", "slurmctld")
    machine.wait(lambda: machine.restarts("slurmctld") == 1)
    for number in range(2, 9):  # oftener than systemd lets services start that do not say otherwise
        machine.wait(lambda: machine.is_active("slurmctld"))
        machine.run("systemctl", "kill", "--signal=KILL", "slurmctld")
        machine.wait(lambda: machine.restarts("slurmctld") >= number)  # noqa: B023
    machine.wait(lambda: "is UP" in machine.run("scontrol", "ping", check=False))
    assert machine.loads_sluice()


@pytest.mark.parametrize("unit", ["sluice-explaind", "sluice-controllerd", "sluice-agent"])
def test_services_run_in_their_sandbox(machine: Machine, unit: str) -> None:
    ready = {"sluice-explaind": "listening on port", "sluice-controllerd": "ready on", "sluice-agent": "action=ready"}
    machine.run("systemctl", "start", "slurmctld")
    machine.run("systemctl", "restart", unit)
    machine.wait(lambda: ready[unit] in machine.run("journalctl", f"--unit={unit}", "--output=cat"))
    assert machine.is_active(unit)
    assert machine.restarts(unit) == 0


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        ("sluice-mig", "nothing to restore: there is no /etc/slurm/sluice.node.json"),
        ("sluice-probe", "wrote /var/lib/sluice/inventory/sluice-systemd.json"),
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
