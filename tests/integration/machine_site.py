"""Sluice in a virtual machine as the admin guide has it, from packages alone: one host, `sluice`, with two simulated
GPUs and the user alice.
"""

from __future__ import annotations

from collections.abc import Sequence

from policy.compiled import FILE_NAME, CompiledPolicy, Global, Tenant
from tests.integration.booted import slurm_conf
from tests.integration.package_builds import kept_packages
from tests.integration.simulated import simulate_gpus
from tests.integration.virtual import VirtualMachine

UNITS = ("munge", "slurmctld", "slurmd", "sluice-agent", "sluice-controllerd", "sluice-explaind")


def set_up(machine: VirtualMachine, suite: str, *, nics: bool = False) -> None:
    """All of it, for the next boot; `nics`: jobs are given the machine's RDMA interfaces."""
    machine.write("/etc/hostname", "sluice\n")
    machine.write("/etc/hosts", "127.0.0.1 localhost\n10.0.2.15 sluice\n")
    machine.shell("hostname sluice; useradd --create-home --shell /bin/bash alice")
    machine.copy(kept_packages(suite), "/root/packages")
    machine.shell("cd /root/packages; apt-get install -y -q ./*.deb")
    simulate_gpus(machine, "h100-sxm5-80gb", 2, cores=2)
    machine.shell(
        "mkdir -p /var/log/slurm /var/spool/slurmctld /var/spool/slurmd /var/lib/sluice/inventory;"
        "chown slurm /var/log/slurm /var/spool/slurmctld;"
        "touch /etc/slurm/nodes.sluice.conf /etc/slurm/gres.sluice.conf"
    )
    more = ("TaskPlugin=task/cgroup,task/affinity", "JobAcctGatherType=jobacct_gather/cgroup", "MinJobAge=86400")
    conf = slurm_conf("machine", *more, "JobAcctGatherFrequency=task=2")
    if nics:
        conf = conf.replace("GresTypes=gpu,shard", "GresTypes=gpu,shard,nic")
    machine.write("/etc/slurm/slurm.conf", conf)
    machine.write("/etc/slurm/gres.conf", "Include gres.sluice.conf\n")
    machine.shell(
        "cp /opt/sluice/share/sluice/etc/slurm/cgroup.conf /etc/slurm/;"
        f"sluice probe --drop /var/lib/sluice/inventory; sluice gres write{' --nics' if nics else ''};"
        "sluice plugin install --limits; echo Include sluice.plugins.conf >>/etc/slurm/slurm.conf;"
        "systemctl daemon-reload; sluice plugin level place"
    )
    policy = CompiledPolicy(source="test", settings=Global(journal=True), tenants=[Tenant(account="physics")])
    machine.write(f"/etc/slurm/{FILE_NAME}", policy.render())
    machine.shell(f"systemctl enable {' '.join(UNITS)} sluice-mig")


def is_in_service(machine: VirtualMachine, units: Sequence[str] = UNITS) -> None:
    """Wait for it, with these units."""
    machine.wait(lambda: machine.run("sinfo", "--noheader", "--format=%t", check=False) in ("idle", "mix", "alloc"))
    assert [unit for unit in units if not machine.is_active(unit)] == []


def srun(machine: VirtualMachine, *words: str, check: bool = True) -> str:
    """A step of alice's."""
    return machine.run("srun", "--quiet", *words, user="alice", check=check)


def sbatch(machine: VirtualMachine, *words: str) -> str:
    """The number of a job of alice's."""
    return machine.run("sbatch", "--parsable", "--output=/dev/null", *words, user="alice")


def cancel_all(machine: VirtualMachine) -> None:
    """Until none is left."""
    machine.run("scancel", "--full", "--user=alice")
    machine.wait(lambda: not machine.run("squeue", "--noheader"))
