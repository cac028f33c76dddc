"""Temperature, power and clocks."""

from __future__ import annotations

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, GpuCheck, Measured, Status, reported
from prolog_epilog.health.facts import GpuFacts, NodeFacts
from sluice.exchange.readings import THROTTLING

_BUSY_PERCENT = 50.0


def temperature(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Of the GPU."""
    del node, policy
    return reported(None if facts.reading is None else facts.reading.temperature_c)


def temperature_memory(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Of its memory."""
    del node, policy
    return reported(None if facts.reading is None else facts.reading.temperature_memory_c)


def _slowed(facts: GpuFacts, *words: str) -> Answer:
    words_now = None if facts.reading is None else facts.reading.throttle
    return reported(None if words_now is None else any(word in words_now for word in words))


def throttle_thermal(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """By heat."""
    del node, policy
    return _slowed(facts, "thermal", "hardware")


def throttle_power(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """By the power supply. The GPU's own power limit is no fault."""
    del node, policy
    return _slowed(facts, "brake")


def power(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """In percent of the limit."""
    del node, policy
    reading = facts.reading
    if reading is None or reading.power_mw is None or not reading.power_limit_mw:
        return Status.UNKNOWN
    watts = f"{reading.power_mw / 1000:.0f} W of {reading.power_limit_mw / 1000:.0f} W"
    return Measured(100 * reading.power_mw / reading.power_limit_mw, watts)


def clocks(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """In percent of the maximum, of a GPU that works and that nothing is known to slow down."""
    del node, policy
    reading = facts.reading
    if (
        reading is None
        or reading.clock_graphics_mhz is None
        or not reading.clock_graphics_max_mhz
        or reading.utilisation_percent is None
    ):
        return Status.UNKNOWN
    if reading.utilisation_percent < _BUSY_PERCENT or THROTTLING & set(reading.throttle or ()):
        return Status.SKIPPED
    return Measured(
        100 * reading.clock_graphics_mhz / reading.clock_graphics_max_mhz,
        f"{reading.clock_graphics_mhz} MHz of {reading.clock_graphics_max_mhz} MHz",
    )


CHECKS = {
    "temperature": GpuCheck(temperature, "{value:g} degrees, from {threshold:g} on for {window}"),
    "temperature_memory": GpuCheck(
        temperature_memory, "memory at {value:g} degrees, from {threshold:g} on for {window}"
    ),
    "throttle_thermal": GpuCheck(throttle_thermal, "slowed down by heat for {value:.0f} % of {window}", kind="share"),
    "throttle_power": GpuCheck(
        throttle_power, "slowed down by the power supply for {value:.0f} % of {window}", kind="share"
    ),
    "power": GpuCheck(power, "takes {detail} for {window}"),
    "clocks": GpuCheck(clocks, "busy at {detail} for {window}, and nothing is known to slow it down", below=True),
}
