"""The node agent in a cluster: one on each node, its programs in slurm.conf, and its SPANK plugin."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from dev_cluster.layout import INSIDE, Layout
from dev_cluster.slurm_tree import SlurmTree
from sluice_base.errors import UsageError
from sluice_base.files import write_atomic
from sluice_base.run import run_command
from sluice_core.limit import library_path

_PROJECT = Path(__file__).resolve().parents[1]
_PROGRAMS = INSIDE / "programs"  # copies: jobs' users need them, and may not enter a checkout
_PLUGIN = "spank_sluice_limit.so"
READY = "action=ready"
"""In an agent's log when it answers."""


class NodeAgents:
    """The agents of one cluster."""

    def __init__(self, tree: SlurmTree) -> None:
        if tree.root is not None:
            raise UsageError(
                "agent: the node agent needs this machine's own Python, and --root names another system's tree",
                remedy="leave out --root, or agent",
            )
        self.prefix = tree.prefix

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """slurm.conf's parameters."""
        names = {"Prolog": "sluice-prolog", "Epilog": "sluice-epilog", "TaskProlog": "sluice-task-prolog"}
        return [*((key, str(_PROGRAMS / name)) for key, name in names.items()), ("PrologFlags", "Alloc,Contain")]

    def write(self, layout: Layout) -> set[str]:
        """Programs, limiter, and the SPANK plugin with its line in plugstack.conf; names of files beside slurm.conf."""
        programs = layout.folder / _PROGRAMS.name
        shutil.copytree(_PROJECT / "prolog_epilog/programs", programs, symlinks=True)
        shutil.copy(library_path(), programs)
        source = _PROJECT / "slurm_plugin/spank_limit/spank_sluice_limit.c"
        headers = self.prefix / "include"
        command: list[str | Path] = ["gcc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-Wl,-z,lazy"]
        command += ["-I", _PROJECT / "native/include", "-I", headers, "-o", layout.folder / _PLUGIN, source]
        run_command(command)
        stack = layout.slurm / "plugstack.conf"
        others = stack.read_text() if stack.exists() else ""
        line = f"required {INSIDE / _PLUGIN} helper={_PROGRAMS / 'sluice-task-init'}\n"
        write_atomic(stack, others + line)
        return {"plugstack.conf"}

    def prepare_overlay(self, layout: Layout) -> None:
        """What must be in /etc to be mounted over: it cannot be made there later."""
        (layout.overlay / "ld.so.preload").touch(mode=0o644)

    def command(self, host: str) -> list[str]:
        """The agent's command line."""
        records = str(INSIDE / "nodes" / host / "records")
        library = str(_PROGRAMS / library_path().name)
        return [sys.executable, "-m", "admin_cli.main", "agent", "--records", records, "--library", library]
