"""The vendors of GPUs. Each module of this package is one vendor, found by its name; nothing else lists them.

A module has one attribute, `VENDOR`, a `VendorSpec`: what is known of the vendor without its driver, and the function
that reads its GPUs through its library. `gres_probe.probe` runs that function in a child process, so it may crash or
hang without harm, and may import anything; the module itself must import fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from gres_probe.inventory import Gpu, Health, Link, OpenClDevice, Problem
from gres_probe.machine import Machine, RdmaPort
from gres_probe.vendor_names import vendor_names
from sluice.base.errors import SluiceError, UsageError


@dataclass(slots=True)
class Findings:
    """What one vendor's library reported. `links` holds the vendor's own links by pairs of ordinals, smaller first."""

    gpus: list[Gpu] = field(default_factory=list)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    opencl: list[OpenClDevice] = field(default_factory=list)
    ports: dict[str, list[RdmaPort]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VendorSpec:
    """One vendor.

    `probe` reads all GPUs of a node. It raises SluiceError where its library or driver is missing or does not work: a
    problem if the kernel shows GPUs of this vendor, and otherwise this vendor is not on this node. A single GPU that
    cannot be read goes into `Findings.problems`.
    """

    name: str  # the module's name
    title: str  # as people write it
    pci_vendor: int  # PCI vendor number
    gres_flag: str  # gres.conf Flags= word that makes Slurm set the vendor's visible-devices variable
    library: str  # the library that `probe` loads
    remedy: str  # what to do where the library is missing
    probe: Callable[[Machine], Findings]
    device_pattern: str = ""  # device files below /dev that show the hardware
    integrated: tuple[str, ...] = ()  # PCI addresses at which graphics of the processor sit, which is not for jobs

    def library_missing(self) -> SluiceError:
        """The error of `probe` without the library."""
        return SluiceError(f"no {self.library}", remedy=self.remedy)


def vendor(name: str) -> VendorSpec:
    """One vendor by its name. Raises UsageError for one that does not exist."""
    if name not in vendor_names():
        raise UsageError(f"vendor {name!r}: not known", remedy=f"choose from {', '.join(vendor_names())}")
    spec = import_module(f"{__name__}.{name}").VENDOR
    assert isinstance(spec, VendorSpec)  # noqa: S101 - a mistake in the vendor's module
    return spec


def usable_memory(total: int, kept: int) -> int:
    """Memory in MiB that is left where a driver counts what it keeps as used, from figures in bytes.

    `kept` is what is used less what processes hold. It wavers by some MiB, so it is rounded up to 256 MiB: the answer
    becomes a count in gres.conf and must not change from probe to probe.
    """
    step = 256 << 20
    return max(0, total - -(-kept // step) * step) >> 20


class Verdict:
    """Collects what a driver reports of one GPU's health: unknown until it reports something, then the worst of it."""

    _ORDER = (Health.UNKNOWN, Health.OK, Health.DEGRADED, Health.FAILED)

    def __init__(self) -> None:
        self.health = Health.UNKNOWN
        self.reasons: list[str] = []

    def add(self, answer: object, bad: Health, reason: str) -> None:
        """Add one answer: None is ignored, anything false is OK, anything true is `bad` for `reason`."""
        if answer is None:
            return
        seen = bad if answer else Health.OK
        self.health = max(self.health, seen, key=self._ORDER.index)
        if answer:
            self.reasons.append(reason)

    def temperature(self, gpu: Gpu) -> None:
        """Compare the temperature with the GPU's own limits."""
        now, slow, stop = gpu.temperature_c, gpu.temperature_slowdown_c, gpu.temperature_shutdown_c
        if now is not None and stop is not None and now >= stop:
            self.add(True, Health.FAILED, f"{now} C, at or above its shutdown limit of {stop} C")
        elif now is not None and slow is not None:
            self.add(now >= slow, Health.DEGRADED, f"{now} C, at or above its slowdown limit of {slow} C")
