"""A fabric of InfiniBand without hardware: ibsim answers the real infiniband-diags (packages of Debian)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.base.errors import SluiceError

UNIT = 32  # nodes of a leaf switch
_SPINES = 8
_PRELOAD = "umad2sim/libumad2sim.so"


def fat_tree(nodes: int) -> str:
    """A network for ibsim: leaf switches with 32 nodes each, every one of them below eight spine switches."""
    leaves = -(-nodes // UNIT)
    lines: list[str] = []
    for leaf in range(1, leaves + 1):
        lines.append(f'Switch {UNIT + _SPINES} "leaf{leaf}"')
        members = range((leaf - 1) * UNIT + 1, min(nodes, leaf * UNIT) + 1)
        lines += [f'[{port}] "node{node}"[1]' for port, node in enumerate(members, start=1)]
        lines += [f'[{UNIT + spine}] "spine{spine}"[{leaf}]' for spine in range(1, _SPINES + 1)]
        lines.append("")
    for spine in range(1, _SPINES + 1):
        lines.append(f'Switch {leaves} "spine{spine}"')
        lines += [f'[{leaf}] "leaf{leaf}"[{UNIT + spine}]' for leaf in range(1, leaves + 1)]
        lines.append("")
    for node in range(1, nodes + 1):
        lines += [f'Hca 1 "node{node}"', f'[1] "leaf{(node - 1) // UNIT + 1}"[{(node - 1) % UNIT + 1}]', ""]
    return "\n".join(lines)


def write_site(folder: Path, nodes: int) -> None:
    """A slurm.conf of these nodes."""
    (folder / "slurm.conf").write_text(
        f"ClusterName=fabric\nSlurmctldHost=ctl\nTopologyPlugin=topology/tree\nNodeName=node[1-{nodes}] CPUs=64\n"
        "PartitionName=all Nodes=ALL\n"
    )


@contextmanager
def simulated(folder: Path, network: str) -> Iterator[dict[str, str]]:
    """The environment in which infiniband-diags asks the network. Raises SluiceError without ibsim."""
    program = shutil.which("ibsim")
    preload = next(iter(Path("/usr/lib").glob(f"*/{_PRELOAD}")), None)
    if program is None or preload is None or shutil.which("ibnetdiscover") is None:
        raise SluiceError("no ibsim or no ibnetdiscover", remedy="apt-get install ibsim-utils infiniband-diags")
    (folder / "network").write_text(network)
    ours = {"IBSIM_SOCKNAME": f"sluice-{os.getpid()}"}
    ports = str(4 * network.count("["))
    command = [program, "-s", "-n", "-N", "20000", "-S", "2000", "-P", ports, str(folder / "network")]
    with subprocess.Popen(
        command, env=os.environ | ours, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as ibsim:
        try:
            assert ibsim.stdout is not None
            for line in ibsim.stdout:
                if line.startswith(b"MaxMcastCap"):  # the last line before it serves
                    break
            else:
                raise SluiceError("ibsim ended", remedy=f"see: {' '.join(command)}")
            yield os.environ | ours | {"LD_PRELOAD": str(preload)}
        finally:
            ibsim.kill()
