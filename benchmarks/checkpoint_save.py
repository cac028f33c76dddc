"""From the order to save a job as it runs until its GPU is free, over the time in which its memory alone is written.

Real daemons, CRIU itself, a simulated driver, whose device memory is the process's own: what a real driver takes to
move it to the host is not in these figures. A job fills host and device memory with random bytes; it is ordered to be
saved as slurmctld orders it where it preempts (`scancel`, whose own time counts), and its GPU is free when its process
has ended: the image is on disk by then. Before each save so many bytes are written on the same disk, into one file,
in order, and synced: `plain`, as most programs do, and `early`, with each piece on its way to the disk at once, as the
agent does. The bound is on the first.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import click
import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.handle import require_root
from dev_cluster.layout import DEFAULT_FOLDER, INSIDE
from policy.checkpoint import NodeCheckpoint, NodeSystem
from policy.compiled import CompiledPolicy, Global
from policy.node import FILE_NAME, NodePolicy
from sluice.slurm.control import SAVE_WORDS

OPTIONS = [
    click.Option(
        ["--criu"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="CRIU, to measure saves with; tools/criu fetches it. Needs root.",
    ),
    click.Option(["--mib"], type=click.IntRange(16), default=1024, show_default=True, help="Host memory of the job."),
    click.Option(["--gpu-mib"], type=click.IntRange(0), default=1024, show_default=True, help="On its GPU."),
    click.Option(["--saves"], type=click.IntRange(1), default=5, show_default=True, help="How many."),
]
MUST = {"save_over_plain_write": ("<=", 1.2)}

_NODE, _USER = "n1", "alice"
_PLATFORM = """
name: pair
description: a GPU whose driver saves what it has
cpu: {sockets: 1, cores_per_socket: 8, threads_per_core: 1, numa_nodes: 1, memory_mib: 524288}
drivers:
  nvidia: {version: 580.65.06, library: 12.580.65.06, runtime: 13000}
gpus:
  - {model: h100-sxm5-80gb, pci: '0000:1b:00.0', numa: 0, under: 'pci0000:15/0000:15:01.0'}
"""
_JOB = """#!/usr/bin/python3
import ctypes as c, os, sys, time
cu, context, address = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_uint64()
def ok(code):
    assert code == 0, code
ok(cu.cuInit(0)), ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0)), ok(cu.cuCtxSetCurrent(context))
host = [os.urandom(1 << 20) for _ in range({mib})]
if {gpu_mib}:
    ok(cu.cuMemAlloc_v2(c.byref(address), c.c_size_t({gpu_mib} << 20)))
for at in range({gpu_mib}):
    ok(cu.cuMemcpyHtoD_v2(c.c_uint64(address.value + (at << 20)), os.urandom(1 << 20), c.c_size_t(1 << 20)))
print("ready", flush=True)
time.sleep(3600)
"""
_PIECE = 4 << 20
_STAGES = re.compile(r"saved in ([\d.]+) s \((.+?)\)")  # what the agent says of each
_PATIENCE_S = 300.0


def measure(criu: Path, mib: int, gpu_mib: int, saves: int) -> dict[str, list[float]]:
    """Seconds of each save, by what was timed. Raises SluiceError, click.ClickException."""
    require_root("up")
    taken: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent) as parent, _node(Path(parent), criu) as cluster:
        folder = cluster.node_folder(_NODE) / "checkpoints"
        _await(lambda: cluster.run(["test", "-e", "/run/sluice/checkpoint"], node=_NODE, check=False).returncode == 0)
        for number in range(saves):
            taken["plain_s"].append(_write(folder / "written", mib + gpu_mib, early=False))
            taken["early_s"].append(_write(folder / "written", mib + gpu_mib, early=True))
            for name, seconds in _save(cluster, number, mib, gpu_mib).items():
                taken[name].append(seconds)
            for image in (folder / "images").iterdir():
                shutil.rmtree(image)
    return dict(taken)


def figures(taken: Mapping[str, Sequence[float]], mib: int) -> dict[str, float]:
    """Of all saves of so much memory."""
    found: dict[str, float] = {"save_memory_mib": mib}
    for way in ("plain", "early"):
        written = taken[f"{way}_s"]
        ratios = [free / one for free, one in zip(taken["free_s"], written, strict=True)]
        found |= {f"save_over_{way}_write": median(ratios), f"save_over_{way}_write_worst": max(ratios)}
        found[f"save_{way}_write_mib_s"] = mib / median(written)
    return found | {
        f"save_{name}": median(seconds) for name, seconds in taken.items() if name not in ("plain_s", "early_s")
    }


@contextmanager
def _node(parent: Path, criu: Path) -> Iterator[DevCluster]:
    described = parent / "platform.yaml"
    described.write_text(_PLATFORM)
    policy = CompiledPolicy(generated_s=0, source="benchmark", settings=Global(checkpoint_system=True))
    of_node = NodePolicy(checkpoint=NodeCheckpoint(system=NodeSystem(criu=str(criu.resolve()))))
    description = {
        "nodes": [{"names": _NODE, "platform": str(described)}],
        "controllers": 1,
        "accounting": False,
        "agent": True,
        "sluice": {"level": "admit", "policy": policy.render()},
        "users": [{"name": _USER}],
    }
    cluster = DevCluster(parent / "cluster")
    cluster.up(parse_description(yaml.safe_dump(description), source="benchmark"), attached=True)
    try:
        (cluster.slurm_conf_dir() / FILE_NAME).write_text(of_node.render())
        yield cluster
    finally:
        cluster.run(["scancel", f"--user={_USER}"], check=False)
        cluster.down()


def _write(path: Path, mib: int, *, early: bool) -> float:
    """Seconds, until it is on disk."""
    data = os.urandom(_PIECE)
    os.sync()  # what others have written before
    begin = time.monotonic()
    with path.open("xb", buffering=0) as file:
        for at in range(0, mib << 20, _PIECE):
            size = min(_PIECE, (mib << 20) - at)
            file.write(data[:size])
            if early:
                os.posix_fadvise(file.fileno(), at, size, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())
    seconds = time.monotonic() - begin
    path.unlink()
    return seconds


def _save(cluster: DevCluster, number: int, mib: int, gpu_mib: int) -> dict[str, float]:
    """Seconds, by stage."""
    name, mark = f"job-{number}", f"{cluster.folder.parent.name}-{number}"
    home, inside = cluster.folder / "home" / _USER, INSIDE / "home" / _USER
    (home / name).write_text(_JOB.format(mib=mib, gpu_mib=gpu_mib))
    words = ["--parsable", "--checkpoint=system", "--gres=gpu:1", "-c1", f"--mem={2 * (mib + gpu_mib) + 512}M",
             "-D", str(inside), "-o", f"{inside}/{name}.out", f"{inside}/{name}", mark]  # fmt: skip
    job = cluster.run(["sbatch", *words], user=_USER).stdout.strip()
    output = home / f"{name}.out"
    _await(lambda: output.exists() and "ready" in output.read_text())
    os.sync()
    ended = os.pidfd_open(_process(mark))
    try:
        begin = time.monotonic()
        cluster.run(["scancel", *SAVE_WORDS, job])
        if not select.select([ended], [], [], _PATIENCE_S)[0]:
            raise click.ClickException(f"job {job} did not end:\n{cluster.log_tail(f'agent@{_NODE}', 20)}")
        free = time.monotonic() - begin
    finally:
        os.close(ended)
    _await(lambda: "JobState=PENDING" in cluster.run(["scontrol", "show", "job", job]).stdout)
    requeued = time.monotonic() - begin
    log = cluster.log_tail(f"agent@{_NODE}", 20)
    said = [line for line in log.splitlines() if f" job={job} " in line and "action=saved" in line]
    if not said or not (stages := _STAGES.search(said[-1])):
        raise click.ClickException(f"job {job} was not saved:\n{log}")
    found = {"free_s": free, "requeued_s": requeued, "agent_s": float(stages[1])}
    for stage in stages[2].split(", "):
        name, _, seconds = stage.rpartition(" ")
        found[f"{name.lower().replace(' ', '_')}_s"] = float(seconds)
    cluster.run(["scancel", job])
    return found


def _process(mark: str) -> int:
    """Of the job: Python, with this word."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0].endswith(b"python3") and mark.encode() in words:
                return int(path.parent.name)
    raise click.ClickException(f"{mark}: the job does not run")


def _await(good: Callable[[], bool]) -> None:
    """Raises click.ClickException."""
    end = time.monotonic() + _PATIENCE_S
    while not good():
        if time.monotonic() > end:
            raise click.ClickException("the cluster did not get there in time")
        time.sleep(0.1)
