"""The ports of RDMA interfaces: the kernel asks the adapter for them, whose firmware may not answer."""

from __future__ import annotations

from gres_probe.machine import Machine
from gres_probe.vendors import Findings, VendorSpec


def _probe(machine: Machine) -> Findings:
    return Findings(ports=machine.rdma_ports())


SPEC = VendorSpec("rdma", "RDMA", 0, "", "the kernel", "", _probe)
"""Not a vendor: found by no name, and asked for ports only."""
