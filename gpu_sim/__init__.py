"""Simulated vendor drivers with the real C ABI: hardware for development and tests only."""

from pathlib import Path

from gpu_sim.devices import DeviceFile, device_files, gpu_files
from gpu_sim.platform import Platform, load_platform, platform_names
from gpu_sim.state import Holding, holdings, read_state, write_node_state

__all__ = [
    "DeviceFile",
    "Holding",
    "Platform",
    "device_files",
    "gpu_files",
    "holdings",
    "library_dir",
    "load_platform",
    "platform_names",
    "program_dir",
    "read_state",
    "write_node_state",
]


def program_dir() -> Path:
    """The folder of the simulated programs, for PATH."""
    return Path(__file__).parent / "bin"


def library_dir() -> Path:
    """The folder of the simulated shared libraries, for LD_LIBRARY_PATH or a loader cache."""
    return Path(__file__).parent / "lib"
