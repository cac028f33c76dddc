"""Simulated machines for the probe: `sluice probe` runs on them as on hardware, through the vendors' own packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gpu_sim import library_dir
from gpu_sim.state import NodeState, changing
from gres_probe.inventory import Inventory

LIBRARIES = {"nvidia": "libnvidia-ml.so.1", "amd": "libamd_smi.so", "intel": "libze_loader.so.1"}


@dataclass(frozen=True)
class SimulatedNode:
    """One machine, simulated in a folder."""

    folder: Path

    def change(self) -> AbstractContextManager[NodeState]:
        """The state of its hardware, to be changed within a with block."""
        return changing(self.folder)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the vendors' libraries are those of this machine."""
        return {"SLUICE_SIM_STATE": str(self.folder / "state"), "LD_LIBRARY_PATH": str(library_dir())}

    def run(self, command: str, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `sluice COMMAND` as on that machine."""
        roots = ["--sys-root", str(self.folder / "sys"), "--proc-root", str(self.folder / "proc")]
        return subprocess.run(
            [sys.executable, "-m", "sluice.main", command, *roots, *options],
            env={**os.environ, **self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def probe(self, *options: str, env: dict[str, str] | None = None) -> Inventory:
        """Its inventory, as validated JSON."""
        done = self.run("probe", "--json", "--node", "n1", *options, env=env)
        assert done.stdout, done.stderr
        assert done.returncode == (1 if json.loads(done.stdout)["problems"] else 0), done.stderr
        return Inventory.from_json(done.stdout, source="sluice probe")


Simulate = Callable[[str], SimulatedNode]
