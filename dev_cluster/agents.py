"""The node agent in a cluster: one on each node, its programs in slurm.conf, and its SPANK plugin."""

from __future__ import annotations

import shutil
from pathlib import Path

import gpu_sim
from dev_cluster.layout import INSIDE, THIS_SYSTEM, Layout, python_in_tree
from dev_cluster.slurm_tree import SlurmTree
from sluice.base.files import write_atomic
from sluice.base.run import PYTHON
from sluice.core.limit import launcher_path, library_path
from sluice.plugin.builder import build_limit_plugin
from sluice.plugin.install import limit_line

_PROJECT = Path(__file__).resolve().parents[1]
_PROGRAMS = INSIDE / "programs"  # copies: jobs' users need them, and may not enter a checkout
READY = "action=ready"
"""In an agent's log when it answers."""


class NodeAgents:
    """The agents of one cluster."""

    def __init__(self, tree: SlurmTree, *, only_ends: bool = False) -> None:
        self.tree = tree
        self.only_ends = only_ends
        self.version = tree.version()
        self.packaged = tree.packaged()
        self.headers = tree.headers() if self.packaged is None else None

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """slurm.conf's parameters."""
        if self.only_ends:
            return [("Epilog", str(_PROGRAMS / "sluice-epilog"))]
        names = {"Prolog": "sluice-prolog", "Epilog": "sluice-epilog", "TaskProlog": "sluice-task-prolog"}
        return [*((key, str(_PROGRAMS / name)) for key, name in names.items()), ("PrologFlags", "Alloc,Contain")]

    def write(self, layout: Layout) -> set[str]:
        """Programs, limiter, and the SPANK plugin with its line in plugstack.conf; files next to slurm.conf."""
        programs = layout.folder / _PROGRAMS.name
        shutil.copytree(_PROJECT / "prolog_epilog/programs", programs, symlinks=True)
        for file in (*library_path().parent.glob("libsluice_*.so"), launcher_path()):
            shutil.copy(file, programs)
        if self.headers is not None:
            build_limit_plugin(self.headers, self.version, layout.folder)
        elif self.packaged is not None:
            shutil.copy(self.packaged.folder / "spank_sluice_limit.so", layout.folder)
        stack = layout.slurm / "plugstack.conf"
        others = stack.read_text() if stack.exists() else ""
        write_atomic(stack, others + limit_line(INSIDE, _PROGRAMS / "sluice-task-init") + "\n")
        return {"plugstack.conf"}

    def prepare_overlay(self, layout: Layout) -> None:
        """What must be in /etc to be mounted over: it cannot be made there later."""
        (layout.overlay / "ld.so.preload").touch(mode=0o644)

    def command(self, host: str) -> list[str]:
        """The agent's command line."""
        records = str(INSIDE / "nodes" / host / "records")
        library = str(_PROGRAMS / library_path().name)
        seen = "" if self.tree.root is None else THIS_SYSTEM
        search = f"PATH={seen}{gpu_sim.program_dir()}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        agent = ["-m", "sluice.main", "agent", "--records", records, "--library", library]
        words = [*PYTHON, *agent] if self.tree.root is None else python_in_tree(agent)  # it calls Slurm's commands
        return ["/usr/bin/env", search, *words]
