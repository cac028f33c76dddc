"""Running `sluice probe` on the nodes."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor

from dev_cluster import gpu_sim
from dev_cluster.cluster import DevCluster
from dev_cluster.description import ClusterDescription, NodeGroup
from dev_cluster.slurm_tree import SlurmTree
from gres_probe.inventory import Inventory
from sluice_base.run import run_command

_TIMEOUT = 60.0


def probe_nodes(
    cluster: DevCluster, description: ClusterDescription, tree: SlurmTree, *, shared_from: int
) -> list[Inventory]:
    """The inventory of every node, probed on the node itself. Raises SluiceError.

    Where a group has `shared_from` nodes or more, the first one's is taken for all of them: they are equal but for
    serial numbers, which Slurm's configuration does not hold. What was probed is kept in the folder ``inventory``.
    """

    def probe_group(group: NodeGroup) -> list[Inventory]:
        if group.platform == "none":
            return [
                Inventory(node=host, sockets=1, cores_per_socket=8, threads_per_core=1, memory_mib=16384)
                for host in group.hosts
            ]
        if len(group.hosts) < shared_from:
            return [probe(host, group) for host in group.hosts]
        first = probe(group.hosts[0], group)
        return [dataclasses.replace(first, node=host) for host in group.hosts]

    def probe(host: str, group: NodeGroup) -> Inventory:
        command = [sys.executable, "-m", "admin_cli.main", "probe", "--json", "--node", host]
        if tree.root is None:
            text = cluster.run(command, node=host, cwd="/", timeout=_TIMEOUT).stdout
        else:  # this Python does not run in the other system's tree: probe the same hardware from outside
            sim = cluster.layout.gpu_sim(host)
            libraries = gpu_sim.library_dir()
            environment = ["env", f"SLUICE_SIM_STATE={sim}/state", f"LD_LIBRARY_PATH={libraries}"]
            command += ["--sys-root", f"{sim}/sys", "--proc-root", f"{sim}/proc"]
            text = run_command([*environment, *command], timeout=_TIMEOUT).stdout
        (cluster.layout.inventories / f"{host}.json").write_text(text)
        return Inventory.from_json(text, source=f"sluice probe on {host}")

    with ThreadPoolExecutor(4) as pool:
        return [inventory for found in pool.map(probe_group, description.nodes) for inventory in found]
