"""Links between GPUs, and the PCIe link."""

from __future__ import annotations

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, GpuCheck, Measured, Status, reported
from prolog_epilog.health.facts import GpuFacts, NodeFacts


def down(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """How many are down of those that the driver lists."""
    del node, policy
    if facts.reading is None:
        return Status.UNKNOWN
    if not facts.reading.links:
        return Status.SKIPPED  # a GPU without links, or a driver that lists none
    states = [link.up for link in facts.reading.links]
    if all(state is None for state in states):
        return Status.UNKNOWN
    dead = [str(link.number) for link in facts.reading.links if link.up is False]
    return Measured(len(dead), ", ".join(dead))


def errors(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Replays, recoveries and CRC errors of all links together."""
    del node, policy
    if facts.reading is None:
        return Status.UNKNOWN
    if not facts.reading.links:
        return Status.SKIPPED
    counts = [
        count
        for link in facts.reading.links
        for count in (link.replays, link.recoveries, link.crc)
        if count is not None
    ]
    return reported(sum(counts) if counts else None)


def width(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Of the PCIe link, in percent of what GPU and slot could."""
    del node, policy
    reading = facts.reading
    if reading is None or not reading.pcie_width or not reading.pcie_width_max:
        return Status.UNKNOWN
    return Measured(
        100 * reading.pcie_width / reading.pcie_width_max, f"x{reading.pcie_width} of x{reading.pcie_width_max}"
    )


def replays(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """What the PCIe link had to send again."""
    del node, policy
    return reported(None if facts.reading is None else facts.reading.pcie_replays)


CHECKS = {
    "link_down": GpuCheck(down, "link {detail} is down"),
    "link_errors": GpuCheck(errors, "{value:g} errors of links in {window}", kind="growth"),
    "pcie_width": GpuCheck(width, "PCIe link {detail}", below=True),
    "pcie_replays": GpuCheck(replays, "{value:g} replays of the PCIe link in {window}", kind="growth"),
}
