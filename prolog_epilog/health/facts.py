"""What one round of checks looks at: facts of a node and its GPUs, gathered before anything is judged."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.exchange.readings import Reading


@dataclass(frozen=True, slots=True)
class Gpu:
    """A physical GPU of the node; `numbers` are those of gres/gpu, several where it is partitioned."""

    uuid: str
    vendor: str
    model: str
    numbers: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    driver_version: str = ""


@dataclass(slots=True)
class GpuFacts:
    """One GPU now."""

    gpu: Gpu
    answered: bool = True  # the vendor's driver answered in this round
    reading: Reading | None = None  # of that answer; None: the driver does not know this GPU
    xids: list[tuple[float, int]] = field(default_factory=list)  # new since the last round: when, which
    missing_files: tuple[str, ...] = ()
    residual_bytes: int | None = None  # in use by no process
    strays: tuple[int, ...] | None = None  # processes of no job; None: not known
    jobs: tuple[int, ...] = ()  # that hold it now
    recent_jobs: tuple[int, ...] = ()  # that hold it, or did within the last minute
    recent_users: tuple[int, ...] = ()  # whose these are


@dataclass(slots=True)
class NodeFacts:
    """The node now. `problems`: by vendor, why its driver does not answer; None where it does."""

    now: float
    problems: dict[str, str | None] = field(default_factory=dict)
    modules: dict[str, str | None] = field(default_factory=dict)  # version of the kernel's module, by vendor
    nics: dict[str, str | None] = field(default_factory=dict)  # state of the link, by name
    free_percent: dict[str, float | None] = field(default_factory=dict)  # by path
    room_mib: dict[str, float | None] = field(default_factory=dict)  # free, by folder that jobs need
    fabric: dict[str, list[str]] | None = None  # what the last preflight found here, by check; None: there was none
    lost_nics: list[str] | None = None  # adapters that the kernel does not have any more; None: not known
    nic_counts: dict[str, dict[str, int]] | None = None  # of RDMA interfaces, by name; None: not known
    skew_s: float | None = None  # this clock less the controller's
    outages: tuple[int, str] = (0, "")  # times in which jobs were unwatched, and the last one in words
    gpus: list[GpuFacts] = field(default_factory=list)
    jobs: tuple[int, ...] = ()  # with GPUs, on this node
