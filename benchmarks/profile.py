"""What kernel profiles cost a program: launches in a row and a program's usual share of them, traced and not.

And how long a profile of many nodes takes from its end to a trace (`benchmarks.profile_collect`).
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import Result, profile_collect
from gpu_sim import library_dir, load_platform, write_node_state
from sluice.base.errors import SluiceError
from sluice.core import version

OPTIONS = [
    click.Option(
        ["--driver"],
        type=click.Choice(["simulated", "installed"]),
        default="simulated",
        show_default=True,
        help="installed: a real NVIDIA GPU's, with its CUPTI.",
    ),
    click.Option(["--rounds"], type=click.IntRange(1), default=7, show_default=True, help="Of all arms in turn."),
    click.Option(["--seconds"], type=click.FloatRange(0.1), default=0.7, show_default=True, help="An arm, a round."),
    click.Option(["--nodes"], type=click.IntRange(2), default=512, show_default=True, help="That are collected from."),
    click.Option(["--events"], type=click.IntRange(4), default=1000, show_default=True, help="Of each of these."),
]
MUST = {
    "on_overhead_ns": ("<=", 200.0),
    "amd_on_overhead_ns": ("<=", 200.0),
    "intel_on_overhead_ns": ("<=", 200.0),
    "program_loss_percent": ("<=", 1.0),
    **profile_collect.MUST,
}

_LIBRARY = Path(__file__).parents[1] / "sluice/core/libsluice_profile.so"
_HEADER, _END = 256, struct.Struct("<HHIQQIIIIQI4xQ")

# Arms in turn in one process; prints for each by rounds its ns a launch: the median of blocks, and the processor time
# of all threads, the library's own among them. A profile is asked for by its control file, and 0.6 s let it begin.
_CHILD = """
import json, os, struct, sys, time
from pathlib import Path
import numpy as np
from sluice.core._bench import ffi, lib
from sluice.core.errors import check, new_error_text
arms, rounds, seconds, launches, work, driver = json.loads(sys.argv[1])
folder = Path(os.environ["SLUICE_PROFILE_FOLDER"])
def ask(wanted, number, budget):
    (folder / "fresh").write_bytes(struct.pack("<8sIIQIIQ24x", b"SLUPCTL1", 0, wanted, 0, budget, number, 4 << 30))
    (folder / "fresh").replace(folder / "control")
def blocks(count):
    times, text = np.zeros(count, dtype=np.uint64), new_error_text()
    place = ffi.from_buffer("uint64_t[]", times, require_writable=True)
    check(lib.sluice_bench_launches(driver, count, launches, work, place, text), text)
    return times / launches
count = max(10, int(seconds * 1e9 / (np.median(blocks(20)) * launches)))
seen, number = {arm: [] for arm in arms}, 0
for _ in range(rounds):
    for arm, budget in arms.items():
        number += 1
        if budget:
            ask(47, number, budget)
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            blocks(10)
        before = time.process_time_ns()
        times = blocks(count)
        seen[arm].append([float(np.median(times)), (time.process_time_ns() - before) / count / launches])
        ask(0, number, 0)
        time.sleep(0.5)
print(json.dumps(seen))
"""
_STOPPED = 1
_CUDA, _HIP, _LEVEL_ZERO = range(3)  # of enum sluice_bench_driver
_OTHERS: dict[str, tuple[str, int, dict[str, str]]] = {  # platform, driver, how it loads the library
    "amd": ("mi300x-platform", _HIP, {"ROCP_TOOL_LIBRARIES": str(_LIBRARY)}),
    "intel": (
        "intel-max-1550x4",
        _LEVEL_ZERO,
        {"LD_PRELOAD": str(_LIBRARY.with_name("libsluice_profile_preload.so")), "ZE_ENABLE_TRACING_LAYER": "1"},
    ),
}
_EVERYTHING, _DEFAULT = 1_000_000, 10_000  # millionths of the time that tracing may cost


def _environment(platform: str | None, folder: Path) -> dict[str, str]:
    """Of programs on simulated GPUs, or on those of this machine (None)."""
    environment = {**os.environ, "SLUICE_PROFILE_FOLDER": str(folder / "profile")}
    (folder / "profile").mkdir(parents=True)
    if platform is not None:
        write_node_state(folder / "node", load_platform(platform), "n1")
        environment |= {
            "SLUICE_SIM_STATE": str(folder / "node/state"),
            "LD_LIBRARY_PATH": str(library_dir()),
            "SLUICE_SIM_KERNEL_US": "0.01",  # a launch is placed on its stream, and the stream is never in the way
        }
    return environment


def _measure(
    arms: dict[str, int],
    options: dict[str, Any],
    environment: dict[str, str],
    launches: int,
    work: int = 0,
    driver: int = _CUDA,
) -> dict[str, list[list[float]]]:
    words = json.dumps([arms, options["rounds"], options["seconds"], launches, work, driver])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, words],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SluiceError(f"the program with the launches failed: {done.stderr.strip()[-500:]}")
    seen: dict[str, list[list[float]]] = json.loads(done.stdout)
    return seen


def _accounted(folder: Path) -> list[float]:
    """What each profile says that it cost, per cent of its time; none may be empty or have ended by itself."""
    accounted = []
    for path in folder.glob("*.profile"):
        with path.open("rb") as file:
            file.seek(_HEADER)
            end = _END.unpack(file.read(_END.size))
        path.unlink()
        started, ended, events, reason, cost = end[3], end[4], *end[9:]
        if events == 0 or reason != _STOPPED:
            raise SluiceError(f"a profile of {events} events ended for reason {reason}")
        accounted.append(100 * cost / (ended - started))
    if not accounted:
        raise SluiceError("there is no profile: the library was not loaded")
    return accounted


def _loss(seen: dict[str, list[list[float]]], arm: str, place: int) -> list[float]:
    """Per cent by which an arm needs more than without a profile, by rounds."""
    return [100 * (one[place] / off[place] - 1) for one, off in zip(seen[arm], seen["off"], strict=True)]


def _simulated(vendor: str, folder: Path, options: dict[str, Any]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """What a launch costs more on a vendor's simulated GPUs, by rounds: loaded and not traced, and traced."""
    platform, driver, injection = _OTHERS[vendor]
    environment = _environment(platform, folder)
    bare = _measure({"off": 0}, options, environment, 2000, driver=driver)
    loop = _measure({"off": 0, "on": _EVERYTHING}, options, environment | injection, 2000, driver=driver)
    _accounted(folder / "profile")
    on = [one[0] - off[0] for one, off in zip(loop["on"], loop["off"], strict=True)]
    off = median(one[0] for one in loop["off"]) - median(one[0] for one in bare["off"])
    figures = {f"{vendor}_off_overhead_ns": off, f"{vendor}_on_overhead_ns": median(on)}
    return figures, {f"{vendor}_on_overhead_ns": on}


def run(**options: Any) -> Result:
    """Arms take turns in one process; the bare driver has a process of its own, without the library."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulated = options["driver"] == "simulated"
        environment = _environment("h100x1" if simulated else None, folder / "nvidia")
        injected = {**environment, "CUDA_INJECTION64_PATH": str(_LIBRARY)}
        bare = _measure({"off": 0}, options, environment, 2000)
        loop = _measure({"off": 0, "on": _EVERYTHING, "governed": _DEFAULT}, options, injected, 2000)
        _accounted(folder / "nvidia/profile")
        program = _measure({"off": 0, "governed": _DEFAULT}, options, injected, 20, 200_000)
        accounted = _accounted(folder / "nvidia/profile")
        others = [_simulated(vendor, folder / vendor, options) for vendor in (_OTHERS if simulated else ())]
    # Its rounds differ by what else the machine does, which only adds: the best of each arm is compared.
    of_program = {arm: [one[1] for one in rounds] for arm, rounds in program.items()}
    on = [one[0] - off[0] for one, off in zip(loop["on"], loop["off"], strict=True)]
    losses = _loss(program, "governed", 1)
    governed = _loss(loop, "governed", 1)
    return Result(
        figures={
            "off_overhead_ns": median(one[0] for one in loop["off"]) - median(one[0] for one in bare["off"]),
            "on_overhead_ns": median(on),
            "governed_loop_loss_percent": median(governed),
            "program_loss_percent": 100 * (min(of_program["governed"]) / min(of_program["off"]) - 1),
            "program_accounted_percent": median(accounted),
            "program_launches_a_second": 1e9 / median(one[0] for one in program["off"]),
            **{name: value for figures, _ in others for name, value in figures.items()},
            **profile_collect.measure(options["nodes"], options["events"]),
        },
        peer={"launch_ns": median(one[0] for one in bare["off"])},
        spread={
            "on_overhead_ns": on,
            "governed_loop_loss_percent": governed,
            "program_loss_percent": losses,
            "program_accounted_percent": accounted,
            **{name: values for _, spread in others for name, values in spread.items()},
        },
        versions={"sluice_core": version(), "driver": options["driver"]},
    )
