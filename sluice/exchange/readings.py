"""What the vendors' libraries report of a GPU, in one form: the process of `prolog_epilog.sampling` fills it in.

None is what the vendor, the model or the driver does not report; never 0 instead. Names carry their units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

THROTTLING = frozenset({"power", "thermal", "hardware", "brake"})
"""Words of `Reading.throttle` for a GPU that is slower than it is set to be; the others are settings, or idleness.

power: the power limit; thermal: heat; brake: the power supply; hardware: another slowdown of its own, e.g. PROCHOT.
"""


@dataclass
class Reading:
    """A physical GPU. Counters count since the driver was loaded unless their name says otherwise."""

    uuid: str
    parts: list[str] = field(default_factory=list)  # UUIDs of its MIG instances
    problem: str | None = None  # the library's message when it does not answer for this GPU
    lost: bool = False  # it fell off the bus, or hangs until it is reset
    utilisation_percent: float | None = None
    memory_bandwidth_percent: float | None = None
    encoder_percent: float | None = None
    decoder_percent: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None  # a counter
    temperature_c: float | None = None
    temperature_memory_c: float | None = None
    temperature_slowdown_c: float | None = None
    temperature_shutdown_c: float | None = None
    fan_percent: float | None = None
    clock_graphics_mhz: int | None = None
    clock_graphics_max_mhz: int | None = None
    clock_memory_mhz: int | None = None
    clock_memory_max_mhz: int | None = None
    clock_video_mhz: int | None = None
    throttle: list[str] | None = None
    performance_state: int | None = None
    persistence: bool | None = None
    vbios: str | None = None
    ecc_enabled: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected_life: int | None = None
    ecc_uncorrected_life: int | None = None
    ras_uncorrected: int | None = None  # outside of memory
    rows_correctable: int | None = None  # remapped
    rows_uncorrectable: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    pages_retired: int | None = None
    pages_pending: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    pcie_tx_bytes_per_s: int | None = None
    pcie_rx_bytes_per_s: int | None = None
    links: list[Link] = field(default_factory=list)
    xids: list[tuple[float, int]] = field(default_factory=list)  # new since the last reading: when read, which

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without what is not known."""
        found = {key: value for key, value in vars(self).items() if value is not None and value != []}
        if self.links:
            found["links"] = [dict(vars(link)) for link in self.links]
        return found

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Reading:
        """What `to_dict` gave; fields that this version does not know are left out."""
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        known["links"] = [Link(**link) for link in fields.get("links", [])]
        known["xids"] = [(float(when), int(xid)) for when, xid in fields.get("xids", [])]
        return cls(**known)


@dataclass
class Link:
    """One NVLink, xGMI or Xe Link of a GPU. Counters, since the driver was loaded."""

    number: int
    up: bool | None = None
    replays: int | None = None
    recoveries: int | None = None
    crc: int | None = None
    tx_bytes: int | None = None
    rx_bytes: int | None = None


@dataclass
class Activity:
    """What grew on a device or MIG instance since its library was opened, read at every sample of a job's devices.

    `at_s`: up to when `busy_ns` counts, by the machine's monotonic clock: other calls into the library, before or
    after, can take as long as the time between two samples; `busy_ns`: busy time; `energy_mj`: of the whole GPU;
    `throttle` as in `Reading`, now; `share`: of a MIG instance, its part of the GPU by memory.
    """

    at_s: float
    busy_ns: int | None = None
    energy_mj: int | None = None
    throttle: list[str] | None = None
    share: float = 1.0


def readings_of(answer: dict[str, Any], key: str = "full") -> dict[str, Reading]:
    """The readings that a sample's answer has under `key`, by GPU; they are parsed once for all readers.

    Raises TypeError, ValueError, KeyError or AttributeError where they are not valid.
    """
    parsed: dict[str, dict[str, Reading]] = answer.setdefault("parsed", {})
    if key not in parsed:
        parsed[key] = {str(uuid): Reading.from_dict(fields) for uuid, fields in answer[key].items()}
    return parsed[key]
