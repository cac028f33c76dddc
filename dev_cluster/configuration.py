"""The files that Slurm reads: slurm.conf, cgroup.conf, slurmdbd.conf and the hosts file."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dev_cluster.description import ClusterDescription
from dev_cluster.layout import DATABASE, INSIDE, LOGIN
from policy.pool_nodes import NODES_FILE
from policy.state import SNIPPET
from sluice.base.hostlist import expand

CLUSTER_NAME = "sluice"
ACCT_DATABASE = "slurm_acct_db"
ADDRESSES = {"ctl1": "127.0.1.1", "ctl2": "127.0.1.2", DATABASE: "127.0.1.3", LOGIN: "127.0.1.4"}


class Ports:
    """Which port is whose, in a run that starts at `base`."""

    def __init__(self, base: int) -> None:
        self.slurmctld = base
        self.slurmdbd = base + 1
        self.controllerd = base + 2
        self.explaind = base + 3
        self.replicad = base + 4
        self.gateway = base + 5
        self.slurmd = base + 6  # the first node's

    @staticmethod
    def needed(nodes: int) -> int:
        """How many ports a cluster takes."""
        return nodes + 6

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Sluice's programs find its daemons."""
        return {
            "SLUICE_CONTROLLERD_PORT": str(self.controllerd),
            "SLUICE_EXPLAIN_PORT": str(self.explaind),
            "SLUICE_REPLICAD_PORT": str(self.replicad),
            "SLUICE_GATEWAY_PORT": str(self.gateway),
        }


def controllers(description: ClusterDescription) -> list[str]:
    """Host names of the controllers, the primary first."""
    return [f"ctl{number + 1}" for number in range(description.controllers)]


def node_addresses(description: ClusterDescription) -> dict[str, str]:
    """Addresses of the nodes."""
    return {host: f"127.1.{at // 250}.{at % 250 + 1}" for at, host in enumerate(description.hosts)}


def hosts_file(description: ClusterDescription) -> str:
    """Every host has an address of its own on the loopback network."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{address} {name}" for name, address in {**ADDRESSES, **node_addresses(description)}.items()]
    return "\n".join(lines) + "\n"


def slurm_conf(
    description: ClusterDescription,
    ports: Ports,
    nodes: str,
    plugins: Iterable[tuple[str, str]] = (),
    snippet: str = "",
) -> str:
    """slurm.conf; `nodes` are the NodeName lines, `plugins` the parameters that load Sluice's plugins.

    It includes the policy's `snippet`, if there is one, and leaves to it the parameters that are in it.
    """
    slurmctld_parameters = ["enable_configless"] if any(g.config == "configless" for g in description.nodes) else []
    generated: list[tuple[str, str]] = [
        ("ClusterName", CLUSTER_NAME),
        *(("SlurmctldHost", f"{host}({ADDRESSES[host]})") for host in controllers(description)),
        ("SlurmctldPort", str(ports.slurmctld)),
        # Both controllers listen on the same port, and so do all machines of pools, each at its own address.
        ("CommunicationParameters", "NoCtldInAddrAny" + (",NoInAddrAny" if description.fleet else "")),
        ("SlurmdPort", str(ports.slurmd + len(description.fixed_hosts)) if description.fleet else ""),
        ("SlurmctldParameters", ",".join(slurmctld_parameters)),
        ("SlurmUser", "slurm"),
        ("AuthType", "auth/munge"),
        ("CredType", "cred/munge"),
        ("StateSaveLocation", f"{INSIDE}/state"),
        ("SlurmdSpoolDir", f"{INSIDE}/nodes/%n/spool"),
        ("SlurmctldPidFile", "/run/slurm/slurmctld.pid"),
        ("SlurmdPidFile", "/run/slurm/slurmd.pid"),
        ("SlurmdParameters", "config_overrides"),  # the machines are larger than this one
        ("ProctrackType", "proctrack/cgroup"),
        ("TaskPlugin", "task/cgroup"),
        ("JobAcctGatherType", "jobacct_gather/linux" if description.accounting else "jobacct_gather/none"),
        ("MpiDefault", "none"),
        ("MailProg", "/bin/true"),
        ("GresTypes", ",".join(["gpu", *["shard"] * description.shards, *["nic"] * description.nics])),
        ("SelectType", "select/cons_tres"),
        ("SelectTypeParameters", "CR_Core_Memory"),
        ("DefMemPerCPU", "1024"),
        ("SchedulerType", "sched/backfill"),
        ("PriorityType", "priority/multifactor"),
        ("ReturnToService", "2"),
        ("SlurmctldTimeout", "10"),
        ("SlurmdTimeout", "60"),
        ("MessageTimeout", "30"),
        ("KillWait", "5"),
        *plugins,
    ]
    if description.accounting:
        generated += [
            ("AccountingStorageType", "accounting_storage/slurmdbd"),
            ("AccountingStorageHost", DATABASE),
            ("AccountingStoragePort", str(ports.slurmdbd)),
            ("AccountingStorageEnforce", "associations,limits,qos"),
            ("AccountingStorageTRES", "gres/gpu,gres/shard" if description.shards else "gres/gpu"),
        ]
    partitions = [
        f"PartitionName={partition.name} Nodes={partition.nodes} State=UP Default={'NO' if position else 'YES'} "
        f"{partition.options}".rstrip()
        for position, partition in enumerate(description.partitions)
    ]
    given = [(key, value) for key, value in generated if value]
    include = [f"Include {SNIPPET}"] if snippet else []
    include += [f"Include {NODES_FILE}"] if description.fleet else []
    extra = "\n".join([*include, nodes.rstrip("\n"), *partitions, description.slurm_conf])
    return _text(_without(given, snippet + description.slurm_conf), extra)


def with_ports(node_lines: str, ports: Ports) -> str:
    """NodeName lines with a port for every node, as they share this machine's network.

    A line of many nodes stays one line, which Slurm's daemons read much faster than many.
    """
    port = ports.slurmd
    lines = []
    for line in node_lines.splitlines():
        match = re.match(r"\s*NodeName=(\S+)", line, re.IGNORECASE)
        if match and match[1].upper() != "DEFAULT":
            count = len(expand(match[1]))
            line += f" Port={port}" if count == 1 else f" Port=[{port}-{port + count - 1}]"
            port += count
        lines.append(line)
    return "\n".join(lines) + "\n"


def cgroup_conf(description: ClusterDescription) -> str:
    """cgroup.conf: devices are constrained; cores and memory are not, as the machines are larger than this one."""
    generated = [
        ("CgroupPlugin", f"cgroup/{description.cgroup}"),
        ("CgroupMountpoint", "/sys/fs/cgroup"),
        ("ConstrainDevices", "yes"),
        *([("IgnoreSystemd", "yes")] if description.cgroup == "v2" else []),
    ]
    return _text(_without(generated, description.cgroup_conf), description.cgroup_conf)


def slurmdbd_conf(description: ClusterDescription, ports: Ports) -> str:
    """slurmdbd.conf: the database is reached by a socket in a folder that only slurmdbd's user can enter."""
    generated = [
        ("AuthType", "auth/munge"),
        ("DbdHost", DATABASE),
        ("DbdPort", str(ports.slurmdbd)),
        ("SlurmUser", "slurm"),
        ("PidFile", "/run/slurm/slurmdbd.pid"),
        ("StorageType", "accounting_storage/mysql"),
        ("StorageHost", "localhost"),
        ("StorageUser", "root"),
        ("StorageLoc", ACCT_DATABASE),
    ]
    return _text(_without(generated, description.slurmdbd_conf), description.slurmdbd_conf)


def _without(generated: Iterable[tuple[str, str]], extra: str) -> list[tuple[str, str]]:
    """The generated parameters that the extra lines do not give themselves."""
    given = {line.split("=", 1)[0].strip().lower() for line in extra.splitlines() if "=" in line}
    return [(key, value) for key, value in generated if key.lower() not in given]


def _text(parameters: Iterable[tuple[str, str]], extra: str) -> str:
    return "\n".join([*(f"{key}={value}" for key, value in parameters), extra.rstrip("\n")]).rstrip("\n") + "\n"
