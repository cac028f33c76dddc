"""How long ``sluice probe`` takes as a whole process: start of Python, the vendors' libraries, sysfs, JSON.

The vendors' libraries are the simulated ones, below the real Python packages; ``--real`` probes this machine's own
GPUs. Where ``nvidia-smi`` is installed, its ``topo -m`` and ``-q`` together, which print about as much, are timed, too.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import click

from benchmarks import Result
from sluice.base.errors import SluiceError

OPTIONS = [
    click.Option(["--platform"], default="dgx-h100", show_default=True, help="Simulated machine, or a file of one."),
    click.Option(["--runs"], type=click.IntRange(1), default=30, show_default=True, help="How often."),
    click.Option(["--real"], is_flag=True, help="Probe the GPUs of this machine instead."),
]
MUST = {"probe_ms_p50": ("<=", 300.0)}


def run(platform: str, runs: int, real: bool) -> Result:
    """Time `runs` probes, after one that warms the caches."""
    program = [sys.executable, "-m", "sluice.main", "probe", "--json"]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        environment = dict(os.environ)
        if not real:
            program += _simulate(platform, Path(folder), environment)
        gpus = _time_once(program, environment)[1].count('"pci_address"')
        times = [_time_once(program, environment)[0] for _ in range(runs)]
        bare = [_time_once([sys.executable, "-c", "pass"], environment)[0] for _ in range(runs)]
    figures = {
        "probe_ms_p50": statistics.median(times),
        "probe_ms_p95": _percentile(times, 0.95),
        "python_start_ms_p50": statistics.median(bare),
        "devices": float(gpus),  # GPUs and RDMA interfaces that were described
    }
    return Result(
        figures=figures,
        peer=_peer(runs),
        spread={"probe_ms": sorted(times)},
        versions={name: version(name) for name in ("nvidia-ml-py", "click")},
    )


def _simulate(platform: str, folder: Path, environment: dict[str, str]) -> list[str]:
    from gpu_sim import library_dir, load_platform, write_node_state

    write_node_state(folder, load_platform(platform), "bench")
    if not any(library_dir().glob("*.so*")):
        raise SluiceError(f"{library_dir()}: no simulated libraries", remedy="build them: make build")
    environment |= {"SLUICE_SIM_STATE": str(folder / "state"), "LD_LIBRARY_PATH": str(library_dir())}
    return ["--sys-root", str(folder / "sys"), "--proc-root", str(folder / "proc")]


def _time_once(program: list[str], environment: dict[str, str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
    milliseconds = 1000 * (time.perf_counter() - start)
    if done.returncode != 0:
        raise SluiceError(f"{' '.join(program)}: {done.stderr.strip() or done.returncode}")
    return milliseconds, done.stdout


def _peer(runs: int) -> dict[str, float]:
    if shutil.which("nvidia-smi") is None:
        return {}
    times = []
    for _ in range(min(runs, 5)):
        start = time.perf_counter()
        for words in (["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"]):
            subprocess.run(words, capture_output=True, timeout=120, check=False)
        times.append(1000 * (time.perf_counter() - start))
    return {"probe_ms_p50": statistics.median(times)}


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
