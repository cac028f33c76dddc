"""The controller-side daemon in a cluster: one on each controller."""

from __future__ import annotations

import shlex
import sys

from dev_cluster.layout import INSIDE, Layout, python_in_tree
from dev_cluster.slurm_tree import SlurmTree

_MAIN = ["-m", "admin_cli.main"]


def controllerd_command(host: str, tree: SlurmTree) -> list[str]:
    """The daemon's command line on a controller."""
    place = INSIDE / "controllerd" / host
    words = [*_MAIN, "controllerd", "--state", str(place), "--events", str(place / "events.jsonl"), "-v"]
    return [sys.executable, *words] if tree.root is None else python_in_tree(words)


def write_program(layout: Layout) -> None:
    """`sluice` for users of a cluster of another system's tree, which has no Python of ours. Raises OSError."""
    layout.programs.mkdir(mode=0o755)
    program = layout.programs / "sluice"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(python_in_tree(_MAIN))} "$@"\n')
    program.chmod(0o755)
