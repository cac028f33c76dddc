"""What to ask for next time, from what a job asked for and used."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field

from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.report.fleet import NodeGpus
from sluice.report.summaries import GpuUse, JobUse
from sluice.slurm.allocations import Allocation, tres_of
from sluice.slurm.answers import UNLIMITED

SPARE = 1.2
"""What is advised beyond what was used: the next run is not the same."""
_STEP_MIB = 256
_LEAST_MIB = 512
_STEP_S = 300
_LITTLE = 0.6  # less than this of what was asked for: ask for less
_IDLE_PERCENT = 1.0


@dataclass(frozen=True, slots=True)
class HostUse:
    """What the job's steps used of their hosts; None: not gathered."""

    cpu_s: float | None = None
    memory_mib: int | None = None  # the most of one task (MaxRSS)


@dataclass
class Advice:
    """Options of the next sbatch line, and why they differ from this job's."""

    options: list[str] = field(default_factory=list)
    because: list[str] = field(default_factory=list)
    script: str = "job.sh"

    @property
    def line(self) -> str:
        """Ready to be pasted into a shell."""
        return shlex.join(["sbatch", *self.options, self.script])


def advise(job: Allocation, use: JobUse | None, host: HostUse, node: NodeGpus | None) -> Advice:
    """Advice from what is known; what was not measured stays as it was."""
    found = Advice()
    if job.account:
        found.options.append(f"--account={one_line(job.account)}")
    if job.partition and "," not in job.partition:
        found.options.append(f"--partition={one_line(job.partition)}")
    tres = tres_of(job.allocated or job.requested)
    nodes = max(1, job.node_count or tres.get("node", 1))
    if nodes > 1:
        found.options.append(f"--nodes={nodes}")
    if tres.get("gres/shard"):
        _share(found, tres["gres/shard"] // nodes, use, node)
    elif tres.get("gres/gpu"):
        _whole(found, tres, nodes, use)
    _host(found, job, tres, nodes, host)
    _time(found, job)
    return found


def round_mib(mib: float) -> int:
    """Rounded up to what people would write."""
    return max(_LEAST_MIB, math.ceil(mib / _STEP_MIB) * _STEP_MIB)


def _size(mib: int) -> str:
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def _share(found: Advice, asked: int, use: JobUse | None, node: NodeGpus | None) -> None:
    """A part of a GPU's memory."""
    wanted = asked
    if use is not None and use.asked_mib:
        asked = wanted = use.asked_mib
    most = int(node.mib_per_gpu) if node is not None and node.mib_per_gpu else asked * 4
    if use is not None and use.refused:
        wanted = min(most, round_mib(max(asked, use.peak_mib or 0) * 1.5))
        found.because.append(
            f"{use.refused} allocations were refused at {format_mib(asked)} of GPU memory: ask for more"
        )
    elif use is not None and use.peak_mib is not None and use.peak_mib > 0:
        needed = round_mib(use.peak_mib * SPARE)
        if needed < asked * _LITTLE or needed < asked - 8 * 1024:
            wanted = needed
            found.because.append(f"it used {format_mib(use.peak_mib)} of its {format_mib(asked)} of GPU memory at most")
        elif use.peak_mib > asked * 0.95:
            wanted = min(most, round_mib(use.peak_mib * SPARE))
            found.because.append(f"it came within 5 percent of its {format_mib(asked)} of GPU memory")
    found.options.append(f"--gpu-mem={_size(wanted)}")


def _whole(found: Advice, tres: dict[str, int], nodes: int, use: JobUse | None) -> None:
    """Whole GPUs: fewer where some did nothing, a share where one was hardly filled."""
    kinds = sorted(name.removeprefix("gres/gpu:") for name in tres if name.startswith("gres/gpu:"))
    kind = f"{kinds[0]}:" if len(kinds) == 1 else ""
    count = max(1, tres["gres/gpu"] // nodes)
    gpus = use.gpus if use is not None else ()
    idle = [gpu for gpu in gpus if _did_nothing(gpu)]
    if gpus and idle and len(idle) < len(gpus) and nodes == 1:
        count = len(gpus) - len(idle)
        found.because.append(f"{len(idle)} of its {len(gpus)} GPUs were idle")
    elif gpus and len(idle) == len(gpus):
        found.because.append("none of its GPUs did anything: check whether it needs one")
    elif len(gpus) == 1 and nodes == 1 and _fits_a_share(gpus[0]):
        needed = round_mib(gpus[0].peak_mib * SPARE)
        found.because.append(
            f"it used {format_mib(gpus[0].peak_mib)} and {gpus[0].utilisation['mean']:.0f} percent of a whole GPU"
            f" of {format_mib(gpus[0].total_mib)}: a part of one is enough, and starts sooner"
        )
        found.options.append(f"--gpu-mem={_size(needed)}")
        if kind:
            found.options.append(f"--constraint={one_line(kinds[0])}")
        return
    found.options.append(f"--gres=gpu:{one_line(kind)}{count}")


def _did_nothing(gpu: GpuUse) -> bool:
    return "peak" in gpu.utilisation and gpu.utilisation["peak"] < _IDLE_PERCENT


def _fits_a_share(gpu: GpuUse) -> bool:
    return (
        gpu.total_mib > 0
        and 0 < gpu.peak_mib < gpu.total_mib * 0.4
        and gpu.utilisation.get("mean", 100.0) < 40
        and not _did_nothing(gpu)
    )


def _host(found: Advice, job: Allocation, tres: dict[str, int], nodes: int, host: HostUse) -> None:
    cpus, memory = tres.get("cpu", 0) // nodes, tres.get("mem", 0) // nodes
    if cpus > 1 and host.cpu_s is not None and job.elapsed_s >= 60:
        busy = host.cpu_s / job.elapsed_s / nodes
        if busy < cpus * 0.5:
            wanted = max(1, math.ceil(busy * SPARE))
            found.because.append(f"it kept {busy:.1f} of its {cpus} CPUs busy{' on each node' if nodes > 1 else ''}")
            cpus = wanted
    if job.state == "OUT_OF_MEMORY" and memory:
        found.because.append(f"it ran out of its {format_mib(memory)} of host memory")
        memory = round_mib(memory * 1.5)
    elif memory and host.memory_mib and host.memory_mib * SPARE < memory * 0.5 and memory > 4096:
        found.because.append(f"a task used {format_mib(host.memory_mib)} of its {format_mib(memory)} of host memory")
        memory = round_mib(host.memory_mib * SPARE * 1.5)  # MaxRSS is sampled, and of one task
    if cpus > 1:
        found.options.append(f"--cpus-per-task={cpus}")
    if memory:
        found.options.append(f"--mem={memory}M")


def _time(found: Advice, job: Allocation) -> None:
    limit = job.limit_s
    if limit == UNLIMITED or (limit is None and job.state != "TIMEOUT"):
        limit = None
    if job.state == "TIMEOUT" and limit is not None:
        limit = math.ceil(limit * 1.5 / _STEP_S) * _STEP_S
        found.because.append("it was ended at its time limit")
    elif job.state == "COMPLETED" and job.elapsed_s > 0:
        needed = max(_STEP_S, math.ceil(job.elapsed_s * SPARE / _STEP_S) * _STEP_S)
        if limit is None or needed < limit * _LITTLE:
            asked = "no time limit" if limit is None else f"a limit of {limit // 60} minutes"
            minutes = math.ceil(job.elapsed_s / 60)
            ran = f"{minutes} minute{'' if minutes == 1 else 's'}"
            found.because.append(f"it ran for {ran} and had {asked}: a closer one lets backfill start it sooner")
            limit = needed
    if limit is not None:
        found.options.append(f"--time={limit // 60}")
