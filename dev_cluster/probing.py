"""Running `sluice probe` on a node."""

from __future__ import annotations

from dev_cluster.handle import ClusterHandle
from gres_probe.inventory import Inventory
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON, run_command

_TIMEOUT = 60.0


def probe(cluster: ClusterHandle, host: str, *, inside: bool) -> Inventory:
    """The inventory of a node, kept in the folder ``inventory`` as well. Raises SluiceError.

    `inside`: on the node itself. A node in another system's tree, where this Python does not run, is probed from
    outside: the same simulated libraries and files, found through environment and options.
    """
    command = [*PYTHON, "-m", "sluice.main", "probe", "--json", "--node", host]
    if inside:
        done = cluster.run(command, node=host, cwd="/", timeout=_TIMEOUT, check=False)
    else:
        sim = cluster.layout.gpu_sim(host)
        environment = ["env", f"SLUICE_SIM_STATE={sim}/state", f"LD_LIBRARY_PATH={cluster.layout.libraries}"]
        command += ["--sys-root", f"{sim}/sys", "--proc-root", f"{sim}/proc"]
        done = run_command([*environment, *command], timeout=_TIMEOUT, check=False)
    if not done.stdout:  # what cannot be read is reported in the inventory; this is worse
        raise SluiceError(f"sluice probe on {host} failed: {done.stderr.strip()}")
    (cluster.layout.inventories / f"{host}.json").write_text(done.stdout)
    return Inventory.from_json(done.stdout, source=f"sluice probe on {host}")
