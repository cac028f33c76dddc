"""Where things are: the state folder as seen from outside, and the same folder as every process inside sees it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

INSIDE = Path("/run/sluice-cluster")
"""The state folder inside the cluster, whatever its name is outside: short enough for unix sockets."""
PLUGIN_SEARCH = Path("/run/slurm-plugins")
"""First in PluginDir: on every host, and empty but on controllers with Sluice's plugins."""
SLUICE_STATE = Path("/var/lib/sluice")
"""What Sluice's programs keep on a host; each host has its own."""
THIS_SYSTEM = Path("/sluice-this-system")
"""Where this machine's own root is seen inside a cluster of another system's tree: Sluice's Python runs from there."""

MARKER = "SLUICE_CLUSTER_INIT"
"""Environment variable that only the cluster's process 1 carries: the state folder."""

DEFAULT_FOLDER = Path("/run/sluice-cluster")  # as with all else in /run, a reboot ends it
LOGIN = "login"
DATABASE = "db"


def python_in_tree(words: list[str]) -> list[str]:
    """A command line that runs this machine's Python, with this project, among the programs of another system's tree.

    For what calls the tree's Slurm commands. The tree's C library must be as new as this machine's, and it must have
    the libraries that Python needs (libffi, libexpat, zlib).
    """
    stdlib = Path(sys.base_prefix)
    mine = [name for name in sys.path if name and not Path(name).is_relative_to(stdlib / "lib")]
    path = ":".join(f"{THIS_SYSTEM}{name}" for name in [*mine, *_project_path()])
    home, program = f"{THIS_SYSTEM}{stdlib}", f"{THIS_SYSTEM}{Path(sys.executable).resolve()}"
    return ["/usr/bin/env", f"PYTHONHOME={home}", f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1", program, *words]


def _project_path() -> list[str]:
    """Where the project's packages are, also where an editable installation finds them by other means than a path."""
    return [str(Path(__file__).resolve().parents[1])]


class Layout:
    """Paths below one state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = folder / "cluster.json"  # written first: marks the folder as ours
        self.init = folder / "init.json"
        self.socket = folder / "init.sock"
        self.overlay = folder / "etc"  # laid over /etc
        self.slurm = folder / "slurm"  # /etc/slurm
        self.sluice = folder / "sluice"  # /etc/sluice
        self.munge = folder / "munge"  # /run/munge
        self.database = folder / "database"
        self.state = folder / "state"  # StateSaveLocation
        self.logs = folder / "log"
        self.programs = folder / "bin"  # `sluice` in a cluster of another system's tree
        self.homes = folder / "home"
        self.inventories = folder / "inventory"
        self.libraries = folder / "lib"  # simulated vendor libraries
        self.plugins = folder / "plugins"  # Sluice's, for Slurm's daemons and commands
        self.nodes = folder / "nodes"
        self.machines = folder / "machines"  # of pools: what was launched; SlurmUser's
        self.scratch = folder / "scratch"  # mount point

    def node(self, name: str) -> Path:
        """Everything of one node."""
        return self.nodes / name

    def gpu_sim(self, name: str) -> Path:
        """The node's simulated GPUs; /dev/sluice-sim on the node."""
        return self.node(name) / "gpu_sim"

    def node_slurm(self, name: str) -> Path:
        """/etc/slurm of a node that does not share it."""
        return self.node(name) / "slurm"

    @property
    def cgroup(self) -> str:
        """The cluster's cgroup in every hierarchy; follows from the folder's name alone, so that it is always found."""
        return f"sluice-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:12]}"
