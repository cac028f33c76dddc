"""What the preloaded limiter costs a program: allocating and launching with it, and with the bare driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks import Result
from gpu_sim import library_dir, load_platform, write_node_state
from gpu_sim.fields import get_values
from sluice.base.errors import SluiceError
from sluice.core import version
from sluice.core.limit import Device, Region, create, library_path

OPTIONS = [
    click.Option(
        ["--driver"],
        type=click.Choice(["simulated", "installed"]),
        default="simulated",
        show_default=True,
        help="installed: a real NVIDIA GPU's.",
    ),
    click.Option(["--rounds"], type=click.IntRange(1), default=9, show_default=True, help="Processes."),
    click.Option(["--pairs"], type=click.IntRange(100), default=10_000, show_default=True, help="A round."),
    click.Option(
        ["--blocks"], type=click.IntRange(100), default=2_000, show_default=True, help="Of 64 launches, a round."
    ),
]
MUST = {"pair_overhead_us": ("<=", 1.0), "loop_overhead_percent": ("<=", 1.0)}

_LOOPS = {"pair": 0, "small_pair": 1, "pool_pair": 2, "loop": 3}  # of enum sluice_bench_cuda_loop

# Medians in microseconds, limited and bare. A process of its own: what is preloaded is decided when it starts.
_CHILD = """
import json, sys
import numpy as np
from sluice.core._bench import ffi, lib
from sluice.core.errors import check, new_error_text
medians = {}
for name, loop, count in json.loads(sys.argv[1]):
    arms, text = [np.zeros(count, dtype=np.uint64) for _ in range(2)], new_error_text()
    places = [ffi.from_buffer("uint64_t[]", times, require_writable=True) for times in arms]
    check(lib.sluice_bench_cuda(loop, count, *places, text), text)
    medians[name] = [float(np.median(times)) / 1000 for times in arms]
print(json.dumps(medians))
"""

_ABOUT = """
import ctypes as c, json
cu = c.CDLL("libcuda.so.1")
uuid, total = (c.c_ubyte * 16)(), c.c_size_t()
assert cu.cuInit(0) == 0 and cu.cuDeviceGetUuid(uuid, 0) == 0 and cu.cuDeviceTotalMem_v2(c.byref(total), 0) == 0
text = bytes(uuid).hex()
print(json.dumps(["-".join(["GPU", text[:8], text[8:12], text[12:16], text[16:20], text[20:]]), total.value]))
"""

# The job's own mount namespace, with its region in the place where the library looks.
_ENTER = (
    'mount -t tmpfs none /run && mkdir -p /run/sluice/limit/job && mount --bind "$1" /run/sluice/limit/job && '
    'shift && exec "$@"'
)


def _run(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SluiceError(f"{command[0]}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def _device(driver: str, folder: Path) -> tuple[Device, dict[str, str]]:
    """The first GPU, and the environment in which its driver is found."""
    environment = dict(os.environ)
    if driver == "simulated":
        write_node_state(folder, load_platform("dgx-h100"), "n1")
        environment |= {"SLUICE_SIM_STATE": str(folder / "state"), "LD_LIBRARY_PATH": str(library_dir())}
        uuid, total = get_values(folder, 0)["uuid"], 81008 << 20
    else:
        uuid, total = _run([sys.executable, "-c", _ABOUT], environment)
    return Device(total, total // 2, 600 << 20, uuid=uuid), environment


def run(**options: Any) -> Result:
    """Medians over the rounds; in each, both arms take turns call by call, and overhead is their difference."""
    if os.geteuid() != 0:
        raise SluiceError("a job's region is root's: run this benchmark as root")
    loops = [[name, loop, options["blocks" if name == "loop" else "pairs"]] for name, loop in _LOOPS.items()]
    rounds: list[dict[str, list[float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        device, environment = _device(options["driver"], Path(folder) / "node")
        create(Path(folder) / "region", [device], 0, mounted=False)
        inside = ["unshare", "--mount", "sh", "-c", _ENTER, "sh", f"{folder}/region", "env"]
        child = [f"LD_PRELOAD={library_path()}", sys.executable, "-c", _CHILD, json.dumps(loops)]
        rounds = [_run([*inside, *child], environment) for _ in range(options["rounds"])]
        with Region(Path(folder) / "region") as region:
            if region.usage(0).peak == 0:
                raise SluiceError("the limiter was not in the way: nothing was charged")
    limited, bare = ({name: median(seen[name][arm] for seen in rounds) for name in _LOOPS} for arm in range(2))
    figures = {f"{name}_us": value for name, value in limited.items()}
    for name in _LOOPS:
        differences = [seen[name][0] - seen[name][1] for seen in rounds]
        if name == "loop":
            figures["loop_overhead_percent"] = 100 * median(differences) / bare[name]
        else:
            figures[f"{name}_overhead_us"] = median(differences)
    return Result(
        figures=figures,
        peer={f"{name}_us": value for name, value in bare.items()},
        spread={
            f"{arm}{name}_us": [seen[name][place] for seen in rounds]
            for place, arm in enumerate(("", "peer_"))
            for name in _LOOPS
        },
        versions={"sluice_core": version(), "driver": options["driver"]},
    )
