"""Slurm's core numbers. gres.conf counts cores, not the CPU ids that the kernel and the vendors' libraries use.

slurmd numbers cores in hwloc's logical order: sockets by their lowest CPU id, cores within a socket by theirs, and
both threads of a core share its number (slurmd's block map, doc/man5/gres.conf). `number_cores` computes the same
numbers from what the kernel reports for each CPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from sluice.base.errors import SluiceError

_MOST_CPUS = 65536  # more than any kernel supports; keeps a bad range from filling the memory


def expand_ranges(text: str) -> list[int]:
    """``"0-2,5"`` as ``[0, 1, 2, 5]``, sorted and without repetitions. Raises SluiceError when malformed."""
    numbers: set[int] = set()
    for part in text.split(",") if text else []:
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and first.isascii()) or (dash and not (last.isdecimal() and last.isascii())):
            raise SluiceError(
                f"list of CPUs or cores {text!r}: {part!r} is not a number or range", remedy="e.g. 0-31,64"
            )
        low = int(first[:9])
        high = int(last[:9]) if dash else low
        if high < low or high >= _MOST_CPUS:
            raise SluiceError(f"list of CPUs or cores {text!r}: {part!r} is out of order or too large")
        numbers.update(range(low, high + 1))
    return sorted(numbers)


def fold_ranges(numbers: Iterable[int]) -> str:
    """The inverse of `expand_ranges`: the shortest list of ranges."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def number_cores(cpus: Mapping[int, tuple[Hashable, Hashable]]) -> list[int]:
    """Slurm's core number of each CPU id, -1 for ids that are absent.

    `cpus` maps each online CPU id to what names its package and its core among those of the package, e.g. the texts of
    /sys/devices/system/cpu/cpu*/topology/{package_cpus_list,thread_siblings_list}.
    """
    lowest_of_core: dict[tuple[Hashable, Hashable], int] = {}
    lowest_of_package: dict[Hashable, int] = {}
    for cpu in sorted(cpus):
        package = cpus[cpu][0]
        lowest_of_core.setdefault(cpus[cpu], cpu)
        lowest_of_package.setdefault(package, cpu)
    ordered = sorted(lowest_of_core, key=lambda core: (lowest_of_package[core[0]], lowest_of_core[core]))
    number = {core: position for position, core in enumerate(ordered)}
    return [number[cpus[cpu]] if cpu in cpus else -1 for cpu in range(max(cpus, default=-1) + 1)]


def usual_numbering(cores: int, threads_per_core: int) -> list[int]:
    """The usual numbering of Linux on x86: first one thread of every core, socket by socket, then the others."""
    return [cpu % cores for cpu in range(cores * threads_per_core)] if cores > 0 else []


def slurm_cores(cpu_list: str, cpu_cores: Sequence[int]) -> list[int]:
    """The core numbers of a list of CPU ids; ids unknown to `cpu_cores` are ignored."""
    known = (cpu_cores[cpu] for cpu in expand_ranges(cpu_list) if cpu < len(cpu_cores))
    return sorted({core for core in known if core >= 0})
