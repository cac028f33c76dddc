"""Sluice under systemd, as an admin sets it up: Debian's tree boots by systemd-nspawn with Slurm's units and Sluice's.

One machine is controller and node. It has simulated GPUs and cgroups of version 2. What differs from hardware: the
libraries of simulated drivers, /dev below it, and the view of cgroups that this kernel needs (a drop-in for slurmd).
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpu_sim
from gres_probe.machine import Machine as Kernel
from policy.compiled import FILE_NAME, CompiledPolicy, Tenant
from sluice.base.run import run_command
from tests.integration.booted import CannotBootError, Machine, nspawn

pytestmark = pytest.mark.cluster

_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = "/opt/sluice/src"
_SLUICE = "/opt/sluice/bin/sluice"
_SIM = "/var/lib/sluice-sim"
_LIMIT = 2048  # MiB
_CONF = """ClusterName=boot
SlurmctldHost=sluice
AuthType=auth/munge
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PriorityType=priority/multifactor
SchedulerParameters=sched_min_interval=100000
GresTypes=gpu,shard
ReturnToService=2
PluginDir=/usr/lib/x86_64-linux-gnu/slurm-wlm
Prolog=/usr/libexec/sluice/sluice-prolog
Epilog=/usr/libexec/sluice/sluice-epilog
TaskProlog=/usr/libexec/sluice/sluice-task-prolog
PrologFlags=Alloc,Contain
PrologEpilogTimeout=120
HealthCheckProgram=/usr/libexec/sluice/sluice-health
HealthCheckInterval=300
Include nodes.sluice.conf
PartitionName=main Nodes=ALL Default=YES
Include sluice.plugins.conf
"""
_PLATFORM = """name: boot
description: two L40S, and far more memory than the machine that pretends to have them
cpu: {{sockets: {0.sockets}, cores_per_socket: {0.cores_per_socket}, threads_per_core: {0.threads_per_core}, numa_nodes: 1, memory_mib: 4194304}}
drivers:
  nvidia: {{version: 550.90.07, runtime: 12040}}
gpus:
  - {{model: l40s-48gb, pci: '0000:01:00.0', numa: 0, under: 'pci0000:00/0000:00:01.1'}}
  - {{model: l40s-48gb, pci: '0000:41:00.0', numa: 0, under: 'pci0000:40/0000:40:01.1'}}
"""


def _installed(folder: Path, tree: Path) -> list[str]:
    """Sluice at /opt/sluice: an environment of the tree's Python, as `make install` makes it, of what is built here.

    In place of a wheel, its packages and those that they need are the checkout's and its environment's, by bind mounts.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    home = Path("/usr") if (tree / "usr/bin" / version).exists() else Path("/opt/python")
    prefix = folder / "prefix"
    packages = prefix / "lib" / version / "site-packages"
    for path in (packages, prefix / "bin", prefix / "src", prefix / "needed"):
        path.mkdir(parents=True)
    (packages / "sluice.pth").write_text("/opt/sluice/src\n/opt/sluice/needed\n")
    (prefix / "pyvenv.cfg").write_text(f"home = {home}/bin\n")
    (prefix / "bin/python3").symlink_to(f"{home}/bin/{version}")
    program = prefix / "bin/sluice"
    program.write_text("#!/opt/sluice/bin/python3\nimport sys\nfrom sluice.main import main\nsys.exit(main())\n")
    program.chmod(0o755)
    binds = {prefix: "", _ROOT: "/src", Path(sysconfig.get_path("purelib")): "/needed"}
    found = [f"--bind-ro={source}:/opt/sluice{place}" for source, place in binds.items()]
    if home != Path("/usr"):  # this Python, in a tree that has another
        base = Path(sys.base_prefix)
        found += [f"--bind-ro={base / part}:/opt/python/{part}" for part in (f"bin/{version}", f"lib/{version}")]
    return found


@pytest.fixture(scope="module")
def machine(bookworm_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Set up, and booted to its multi-user.target."""
    folder = tmp_path_factory.mktemp("boot")
    plugins = folder / "plugins"
    run_command([sys.prefix + "/bin/sluice", "plugin", "build", "--output", plugins], timeout=600)
    (folder / "boot.yaml").write_text(_PLATFORM.format(Kernel().cpu_layout()))
    sim = folder / "sim"
    gpu_sim.write_node_state(sim, gpu_sim.load_platform(folder / "boot.yaml"), "sluice")
    binds = [f"--bind-ro={plugins}:/root/plugins", f"--bind={sim}:{_SIM}", *_installed(folder, bookworm_root)]
    with nspawn(bookworm_root, folder, binds) as made:
        _set_up(made, sim)
        made.run("systemctl", "start", "--no-block", "multi-user.target")
        made.wait(lambda: "idle" in made.run("sinfo", "--noheader", "--format=%t", check=False))
        yield made


def _set_up(machine: Machine, sim: Path) -> None:
    """What the admin guide says, before the units start for the first time."""
    # The machine: its name and address, its users, its GPUs.
    machine.write("/etc/hosts", "127.0.0.1 localhost\n192.0.2.1 sluice\n")
    machine.shell("ip link set lo up; ip address add 192.0.2.1/32 dev lo; useradd --create-home alice")
    device_files = "".join(
        f"c {file.path} {file.mode & 0o777:o} root root - {file.major}:{file.minor}\n"
        for file in gpu_sim.device_files(sim)
    )
    machine.write("/etc/tmpfiles.d/gpu.conf", f"L /dev/sluice-sim - - - - {_SIM}\n{device_files}")
    libraries = f"cp -P {_SOURCES}/gpu_sim/lib/*.so* /usr/local/lib/; ldconfig"
    machine.shell(f"systemd-tmpfiles --create /etc/tmpfiles.d/gpu.conf; {libraries}")
    view = f"{_SOURCES}/dev_cluster/cgroup_view/libcgroup_view.so"
    if "/" in Path("/proc/self/cgroup").read_text().partition("0::")[0]:  # this kernel has hierarchies of version 1
        machine.write("/etc/systemd/system/slurmd.service.d/view.conf", f"[Service]\nEnvironment=LD_PRELOAD={view}\n")
    # Slurm
    machine.shell(
        "mkdir -p /var/log/slurm /var/spool/slurmctld /var/spool/slurmd; chown slurm /var/log/slurm /var/spool/slurmctld;"
        "systemctl disable mariadb slurmdbd; systemctl enable munge slurmctld slurmd"
    )
    machine.write("/etc/slurm/slurm.conf", _CONF)
    machine.write("/etc/slurm/cgroup.conf", "ConstrainDevices=yes\n")
    machine.write("/etc/slurm/gres.conf", "Include gres.sluice.conf\n")
    machine.write("/etc/slurm/plugstack.conf", "include /etc/slurm/plugstack.conf.d/*.conf\n")
    # Sluice
    machine.shell(
        f"ln -s {_SLUICE} /usr/local/bin/; mkdir -p /usr/libexec; ln -s {_SOURCES}/prolog_epilog/programs /usr/libexec/sluice;"
        f"cp {_SOURCES}/etc/systemd/sluice-* /etc/systemd/system/; mkdir -p /var/lib/sluice/inventory;"
        f"{_SLUICE} probe --json --sys-root {_SIM}/sys >/var/lib/sluice/inventory/sluice.json;"
        f"touch /etc/slurm/nodes.sluice.conf /etc/slurm/gres.sluice.conf; {_SLUICE} gres write;"
        f"{_SLUICE} plugin install --limits --build /root/plugins; {_SLUICE} plugin level admit;"
    )
    machine.write(f"/etc/slurm/{FILE_NAME}", CompiledPolicy(source="test", tenants=[Tenant(account="physics")]).render())
    machine.shell("systemctl daemon-reload; systemctl enable sluice-agent sluice-controllerd sluice-explaind")


def test_x(machine: Machine) -> None:
    print(machine.run("systemctl", "--failed", check=False))
    print(machine.run("sinfo", "-N", "-o", "%N %t %G %m %E"))
    print(machine.shell("journalctl -b -o short-precise | tail -80; cat /etc/slurm/*sluice.conf; sluice agent status; sluice doctor", check=False))
    print(machine.shell("systemctl status sluice-agent sluice-controllerd sluice-explaind slurmd slurmctld", check=False))
    print(machine.run("sh", "-c", "cd /tmp; srun --gpu-mem=2G env | grep -i slurm; sinfo", user="alice", check=False))
