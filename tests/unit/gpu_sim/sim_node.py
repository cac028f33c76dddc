"""A simulated node in a temporary folder, and programs that run on it with the simulated libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sim import library_dir
from gpu_sim.fields import get_values, set_values

LIBRARIES = ("libnvidia-ml.so.1", "libamd_smi.so", "libze_loader.so.1", "libcuda.so.1", "libamdhip64.so.6")


@dataclass(frozen=True)
class Node:
    """One simulated node."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def set(self, gpu: int | str, **values: object) -> None:
        set_values(self.folder, gpu, {name: str(value) for name, value in values.items()})

    def get(self, gpu: int, name: str) -> str:
        return get_values(self.folder, gpu)[name]

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **os.environ,
            "SLUICE_SIM_STATE": str(self.state),
            "LD_LIBRARY_PATH": str(library_dir()),
            "PYTHONDONTWRITEBYTECODE": "1",
            **extra,
        }

    def start(self, code: str, *arguments: object, **extra: str) -> subprocess.Popen[str]:
        """A Python program on this node, its standard streams piped."""
        return subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=self.environment(**extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )

    def run(self, code: str, *arguments: object, **extra: str) -> Any:
        """What a Python program prints as JSON; it must exit with 0."""
        with self.start(code, *arguments, **extra) as process:
            try:
                out, err = process.communicate(timeout=60)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, err
        return json.loads(out)
