"""One slurmctld and its slurmd in a temporary folder, without munge, accounting or namespaces: up in two seconds."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from dev_cluster.ports import PortClaim, claim_ports

NEEDS = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: device files, and slurmd"),
    pytest.mark.skipif(shutil.which("slurmd") is None, reason="needs slurmd"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs slurmctld"),
]
NODE = f"NodeHostname={socket.gethostname()} Sockets=2 CoresPerSocket=8 ThreadsPerCore=2 RealMemory=100"

_CLAIMS: list[PortClaim] = []
_SLURM_CONF = """\
ClusterName=private
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
MpiDefault=none
"""


def head(folder: Path, port: int) -> str:
    """The beginning of a slurm.conf; GresTypes, nodes and partitions are for the caller to add."""
    return _SLURM_CONF.format(host=socket.gethostname(), folder=folder, port=port)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that nothing takes for a client or another cluster as long as tests run."""
    claim = claim_ports(count)
    _CLAIMS.append(claim)
    return [claim.base + number for number in range(count)]


@contextmanager
def entered(tree: Path, shared: Path) -> Iterator[list[str]]:
    """A prefix for commands of another system tree, which see the folder `shared` at its own path.

    All mounts are in a namespace that ends with the block.
    """
    script = (
        'mount -t proc proc "$1/proc"; mount --bind /dev "$1/dev"; mount --bind /etc/hosts "$1/etc/hosts"\n'
        'mount -t tmpfs tmpfs "$1/tmp"\n'
        'mkdir -p "$1/$2"; mount --bind "$2" "$1/$2"; echo ready; exec sleep infinity'
    )
    command = ["unshare", "--mount", "sh", "-ec", script, "sh", str(tree), str(shared)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        yield ["nsenter", "--target", str(holder.pid), "--mount", "chroot", str(tree)]
    finally:
        holder.kill()
        holder.wait()


def wrappers(folder: Path, prefix: Sequence[str]) -> Path:
    """A Slurm prefix whose commands run behind the command prefix."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("squeue", "sinfo", "scontrol", "sacct", "sbatch", "scancel"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.join(prefix)} {name} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


@contextmanager
def running(folder: Path, names: Sequence[str], prefix: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """The daemons for ``folder/slurm.conf``, until the block ends; gives each node's state at its registration."""
    conf = folder / "slurm.conf"
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    (folder / "cgroup.conf").write_text("IgnoreSystemd=yes\nCgroupPlugin=disabled\n" if prefix else "")
    (folder / "state").mkdir(exist_ok=True)
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    commands = {"slurmctld": ["slurmctld", "-D", "-f", conf]}
    # Each slurmd in a PID namespace of its own: what it started, job steps above all, ends with it.
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if prefix:  # the root of another system tree is no mount; the namespace around it is private already
        own.append("--propagation=unchanged")
    commands |= {name: [*own, "slurmd", "-D", "-N", name, "-f", conf] for name in names}
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("w") as log:
                daemons[name] = subprocess.Popen([*prefix, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        yield _wait_registered(conf, names, daemons, prefix)
    finally:
        for name, daemon in reversed(daemons.items()):
            daemon.kill() if name in names else daemon.terminate()
        for daemon in daemons.values():
            daemon.wait(timeout=60)


def _wait_registered(
    conf: Path, names: Sequence[str], daemons: Mapping[str, subprocess.Popen[bytes]], prefix: Sequence[str]
) -> dict[str, str]:
    deadline = time.monotonic() + 60
    while True:
        shown = subprocess.run(
            [*prefix, "scontrol", "show", "node", "--oneliner"],
            capture_output=True,
            text=True,
            env=os.environ | {"SLURM_CONF": str(conf)},
        ).stdout
        states = dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+) ", shown, re.MULTILINE))
        refused = {name for name, state in states.items() if "INVALID_REG" in state}
        unknown = [n for n in names if n not in refused and re.search(r"UNKNOWN|\*", states.get(n, "UNKNOWN"))]
        if not unknown:
            return states
        for name, daemon in daemons.items():
            assert daemon.poll() is None, (conf.parent / f"{name}.log").read_text()[-2000:]
        assert time.monotonic() < deadline, f"not registered: {unknown}"
        time.sleep(0.2)
