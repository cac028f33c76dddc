"""Memory errors, and what the GPU did about them."""

from __future__ import annotations

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, GpuCheck, Status, reported
from prolog_epilog.health.facts import GpuFacts, NodeFacts


def _reading(facts: GpuFacts, *names: str) -> float | None:
    """The first of the reading's fields that the driver reported."""
    for name in names:
        value = None if facts.reading is None else getattr(facts.reading, name)
        if value is not None:
            return float(value)
    return None


def _counts(facts: GpuFacts, name: str) -> Answer:
    if facts.reading is not None and facts.reading.ecc_enabled is False:
        return Status.SKIPPED
    return reported(_reading(facts, name))


def uncorrected(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Data was lost."""
    del node, policy
    return _counts(facts, "ecc_uncorrected")


def corrected(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Many of them announce uncorrected ones."""
    del node, policy
    return _counts(facts, "ecc_corrected")


def remap_failed(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """No spare row was left: the GPU is to be replaced."""
    del node, policy
    return reported(_reading(facts, "rows_failed"))


def remap_pending(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Rows (since Ampere) or pages (before, and AMD)."""
    del node, policy
    found = [value for name in ("rows_pending", "pages_pending") if (value := _reading(facts, name)) is not None]
    return reported(max(found) if found else None)


def pages(facts: GpuFacts, node: NodeFacts, policy: NodeHealth) -> Answer:
    """Pages that are never used again. GPUs that replace rows retire none."""
    del node, policy
    found = _reading(facts, "pages_retired")
    if found is None and _reading(facts, "rows_failed", "rows_pending") is not None:
        return Status.SKIPPED
    return reported(found)


CHECKS = {
    "ecc_uncorrected": GpuCheck(uncorrected, "{value:g} uncorrected memory errors in {window}", kind="growth"),
    "ecc_corrected": GpuCheck(corrected, "{value:g} corrected memory errors in {window}", kind="growth"),
    "row_remap_failed": GpuCheck(remap_failed, "a memory row could not be replaced", vendors=("nvidia",)),
    "row_remap_pending": GpuCheck(
        remap_pending, "a replaced memory row or page waits for a reset", vendors=("nvidia", "amd")
    ),
    "retired_pages": GpuCheck(pages, "{value:g} retired memory pages", vendors=("nvidia", "amd")),
}
