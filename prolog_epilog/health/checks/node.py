"""The node itself."""

from __future__ import annotations

from collections.abc import Mapping

from policy.health import NodeHealth
from prolog_epilog.health.check import Answer, Measured, NodeCheck, Status, reported
from prolog_epilog.health.facts import NodeFacts

_UP = ("ACTIVE", "up")
_MOST_NAMED = 4  # interfaces


def driver(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Vendors whose driver does not answer."""
    del policy
    silent = [f"{vendor}: {problem}" for vendor, problem in sorted(node.problems.items()) if problem]
    return Measured(len(silent), "; ".join(silent)) if node.problems else Status.SKIPPED


def driver_version(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Library and module of two versions, or another than the policy expects."""
    wrong, known = [], 0
    for vendor, problem in sorted(node.problems.items()):
        if problem and "mismatch" in problem.lower():
            wrong.append(f"{vendor}: {problem}")
            known += 1
            continue
        library = next((one.gpu.driver_version for one in node.gpus if one.gpu.vendor == vendor), "")
        module = node.modules.get(vendor)
        expected = policy.expect.get(vendor)
        known += bool(library and (module or expected))
        if library and module and module != library:
            wrong.append(f"{vendor}: module {module}, library {library}")
        if library and expected and library != expected:
            wrong.append(f"{vendor}: {library}, expected {expected}")
    if not node.problems:
        return Status.SKIPPED
    return Measured(len(wrong), "; ".join(wrong)) if known else Status.UNKNOWN


def nic_link(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Adapters near a GPU whose link is not up."""
    del policy
    if not node.nics:
        return Status.SKIPPED
    if all(state is None for state in node.nics.values()):
        return Status.UNKNOWN
    down = [f"{name} is {state}" for name, state in sorted(node.nics.items()) if state and state not in _UP]
    return Measured(len(down), ", ".join(down))


def fabric_nic(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Interfaces that the last preflight has named."""
    del policy
    return _named(node, "fabric_nic")


def fabric_link(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Links to switches that the last preflight has named."""
    del policy
    return _named(node, "fabric_link")


def fabric_gpu(node: NodeFacts, policy: NodeHealth) -> Answer:
    """GPUs, or links of GPUs, that the last preflight has named."""
    del policy
    return _named(node, "fabric_gpu")


def fabric_lost(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Adapters of the inventory that are not there any more."""
    del policy
    if node.lost_nics is None:
        return Status.UNKNOWN if node.nics else Status.SKIPPED
    return Measured(len(node.lost_nics), ", ".join(node.lost_nics))


def fabric_flaps(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Times that links of RDMA interfaces went down, or had to be trained again."""
    del policy
    return _counted(node, "link_downs", "link_recoveries")


def fabric_errors(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Errors on the wire: of symbols, and of packets that came."""
    del policy
    return _counted(node, "symbol_errors", "receive_errors")


def fabric_retransmissions(node: NodeFacts, policy: NodeHealth) -> Answer:
    """What RDMA interfaces had to send again."""
    del policy
    return _counted(node, "retransmissions")


def _counted(node: NodeFacts, *names: str) -> Answer:
    """The sum of the node's RDMA interfaces, and which have most of it."""
    if node.nic_counts is None:
        return Status.UNKNOWN if node.nics else Status.SKIPPED
    by_nic = {nic: sum(counts.get(name, 0) for name in names) for nic, counts in node.nic_counts.items()}
    if not by_nic:
        return Status.SKIPPED
    worst = sorted((nic for nic, count in by_nic.items() if count), key=lambda nic: (-by_nic[nic], nic))[:_MOST_NAMED]
    return Measured(sum(by_nic.values()), ", ".join(f"{nic} {by_nic[nic]}" for nic in worst))


def _named(node: NodeFacts, check: str) -> Answer:
    if node.fabric is None:
        return Status.SKIPPED
    found = node.fabric.get(check, [])
    return Measured(len(found), "; ".join(found))


def _fullest(free_by_path: Mapping[str, float | None], shown: str) -> Answer:
    """The least that is free; `shown` makes a text of it."""
    known = [(free, path) for path, free in free_by_path.items() if free is not None]
    if not known:
        return Status.UNKNOWN if free_by_path else Status.SKIPPED
    free, path = min(known)
    return Measured(free, f"{path}: {shown.format(free)} free")


def free_space(node: NodeFacts, policy: NodeHealth) -> Answer:
    """The fullest of the policy's paths, in percent that are free."""
    del policy
    return _fullest(node.free_percent, "{:.1f} %")


def spool(node: NodeFacts, policy: NodeHealth) -> Answer:
    """MiB in the fullest of the folders without which no job can start."""
    del policy
    return _fullest(node.room_mib, "{:.0f} MiB")


def clock_skew(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Seconds in either direction; the controllers' daemon answers each report with its time."""
    del policy
    return reported(None if node.skew_s is None else abs(node.skew_s))


def agent_lost(node: NodeFacts, policy: NodeHealth) -> Answer:
    """Times in which the agent was down, or gave no samples, so that jobs were unwatched."""
    del policy
    count, words = node.outages
    return Measured(count, words)


_SINCE = " (since the agent started: {detail})"
CHECKS = {
    "driver": NodeCheck(driver, "{detail}"),
    "driver_version": NodeCheck(driver_version, "driver versions: {detail}"),
    "nic_link": NodeCheck(nic_link, "{detail}"),
    "fabric_nic": NodeCheck(fabric_nic, "{detail}"),
    "fabric_link": NodeCheck(fabric_link, "{detail}"),
    "fabric_gpu": NodeCheck(fabric_gpu, "{detail}"),
    "fabric_lost": NodeCheck(fabric_lost, "not there any more: {detail}"),
    "fabric_flaps": NodeCheck(fabric_flaps, "{value:.0f} link failures within {window}" + _SINCE, kind="growth"),
    "fabric_errors": NodeCheck(fabric_errors, "{value:.0f} errors on links within {window}" + _SINCE, kind="growth"),
    "fabric_retransmissions": NodeCheck(
        fabric_retransmissions, "{value:.0f} retransmissions within {window}" + _SINCE, kind="growth"
    ),
    "free_space": NodeCheck(free_space, "{detail}", below=True),
    "spool": NodeCheck(spool, "{detail}", below=True),
    "clock_skew": NodeCheck(clock_skew, "clock differs from the controller's by {value:.1f} s"),
    "agent_lost": NodeCheck(agent_lost, "{detail}", kind="growth"),
}
