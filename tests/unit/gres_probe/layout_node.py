"""A simulated node whose GPUs `sluice mig` lays out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_sim import library_dir, load_platform, write_node_state

# How a program begins that is to be killed after so many calls of the driver's setters, its last argument.
DYING = """
import os, sys
left = int(sys.argv[-1])
def dying(function):
    def call(*arguments):
        global left
        if left == 0:
            os.kill(os.getpid(), 9)
        left -= 1
        return function(*arguments)
    return call
"""

# What sluice-mig.service runs when a node starts.
RESTORE = """
import sys
from pathlib import Path
from sluice.cli.mig import _find
from prolog_epilog.relayout import Relayout
from sluice.slurm.commands import Commands
policy, agent = sys.argv[1:]
def lay_out():
    for layer in _find(Path(policy), "n1")[1]:
        layer.library.apply_all(layer.changes, lambda line: print(line, flush=True))
Relayout("n1", Commands(prefix=Path(agent).parent), print, agent=agent).restore(lay_out, limit=60, wait=0)
"""


class LayoutNode:
    """Node n1, its policy in `policy`."""

    def __init__(self, folder: Path, platform: str) -> None:
        self.sim = folder / "sim"
        write_node_state(self.sim, load_platform(platform), "n1")
        self.policy = folder / "sluice.node.json"

    def run(self, code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "SLUICE_SIM_STATE": str(self.sim / "state"), "LD_LIBRARY_PATH": str(library_dir())}
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=check,
        )

    def restore(self) -> str:
        """After a restart of the node; what was changed. Slurm is not asked: it has no commands here."""
        return self.run(RESTORE, self.policy, self.sim / "agent.sock").stdout

    def plan(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        code = "import sys; from sluice.main import main; sys.argv[0] = 'sluice'; main()"
        return self.run(code, "mig", "plan", "--node", "n1", "--node-policy", self.policy, *options, check=check)
