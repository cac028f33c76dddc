"""Common parts of readers of a vendor's GPUs (`sampling.Reader`), whose library answers one question at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from sluice.exchange.readings import Reading


@dataclass
class ReadGpu:
    """A physical GPU, and what is remembered of it between two readings."""

    uuid: str
    handle: Any
    parts: list[str] = field(default_factory=list)  # UUIDs of its partitions
    busy_ns: float = 0.0
    at: float | None = None  # by the machine's monotonic clock, when `busy_ns` was last added to

    def work(self, share: float | None, now: float) -> int:
        """Add the busy time since the last call, at a utilisation (0 to 1; None: not known); ns in all."""
        if self.at is not None and share is not None:
            self.busy_ns += (now - self.at) * 1e9 * share
        self.at = now
        return int(self.busy_ns)


G = TypeVar("G", bound=ReadGpu)


class GpuReader(Generic[G]):
    """Reads all GPUs of the node one after the other."""

    failures: tuple[type[Exception], ...]
    """What the library's wrapper raises when a GPU does not answer."""

    def __init__(self, gpus: Sequence[G]) -> None:
        self.gpus = gpus

    def named(self, wanted: Iterable[str] | None) -> list[G]:
        """The GPUs that are named, also by one of their partitions; None: all."""
        names = None if wanted is None else set(wanted)
        return [gpu for gpu in self.gpus if names is None or names & {gpu.uuid, *gpu.parts}]

    def readings(self, wanted: Iterable[str] | None = None) -> list[Reading]:
        """All GPUs, or those that are named; one that does not answer has a `problem`."""
        found = []
        for gpu in self.named(wanted):
            reading = Reading(gpu.uuid, parts=list(gpu.parts))
            try:
                self.read(gpu, reading)
            except self.failures as error:
                reading.problem = str(error) or type(error).__name__
                reading.lost = self.is_lost(error)
            found.append(reading)
        return found

    def energy(self, wanted: Iterable[str]) -> dict[str, int | None]:
        """The energy counters of GPUs, in mJ; None where it is not counted, or the GPU does not answer."""
        found: dict[str, int | None] = {}
        for gpu in self.named(wanted):
            try:
                found[gpu.uuid] = self.energy_mj(gpu)
            except self.failures:
                found[gpu.uuid] = None
        return found

    def energy_mj(self, gpu: G) -> int | None:
        """One GPU's energy counter. Raises one of `failures`."""
        raise NotImplementedError

    def read(self, gpu: G, reading: Reading) -> None:
        """Fill in what the library reports. Raises one of `failures`."""
        raise NotImplementedError

    def is_lost(self, error: Exception) -> bool:
        """Whether a failure says that the GPU fell off the bus."""
        raise NotImplementedError
