"""NVIDIA's CUDA runtime library, in the versions that its wheels on PyPI bring."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from gpu_sim.platform import DriverVersion


@dataclass(frozen=True)
class Runtime:
    """One version of the library, and a driver that it accepts."""

    package: str
    folder: str
    version: int
    driver: DriverVersion

    def file(self, name: str) -> Path:
        """Of its wheel."""
        path = Path(str(importlib.metadata.distribution(self.package).locate_file(f"{self.folder}/{name}")))
        assert path.exists(), path
        return path

    @property
    def library(self) -> str:
        return str(self.file(f"lib/libcudart.so.{self.version}"))


RUNTIMES = (
    Runtime("nvidia-cuda-runtime-cu12", "nvidia/cuda_runtime", 12, DriverVersion(version="550.90.07", runtime=12040)),
    Runtime("nvidia-cuda-runtime", "nvidia/cu13", 13, DriverVersion(version="580.82.07", runtime=13000)),
)
