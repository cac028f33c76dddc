"""Slurm as the fleet sees it, and the changes that it makes there."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from policy.checkpoint import NodeCheckpoint
from policy.pool_nodes import MADE_FEATURE, POOL_FEATURE
from sluice.base.hostlist import expand, fold
from sluice.fleet.ahead import PlannedStart
from sluice.fleet.views import POOL_REASON, Change, JobAct, NodeAct, SlurmJob, SlurmNode, SlurmView, Want
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.answers import Job, Node, Reservation

_WITH_NODES = frozenset({"CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STOPPED"})
_BY_SLURM = ("Not responding", "ResumeTimeout", "Node unexpectedly rebooted", POOL_REASON)
_CREATED = "dynamic_norm"
_AFTER = re.compile(r"after(?:ok|any):(\d+(?:_\d+)?)\(unfulfilled\)")
_MAINTENANCE = frozenset({"MAINT"})
_STATES: dict[Change, str] = {
    "power_up": "POWER_UP", "power_down": "POWER_DOWN", "power_down_force": "POWER_DOWN_FORCE", "drain": "DRAIN",
    "undrain": "UNDRAIN",
}  # fmt: skip


def read_view(
    client: SlurmClient, names: Collection[str], at: float, wall: float, checkpoint: NodeCheckpoint
) -> SlurmView:
    """The nodes `names` of pools and their jobs, with times by the fleet's clock. `at`: now, by it; `wall`: now, by
    Slurm's. Raises SluiceError.
    """
    seen_nodes = ((node.name, slurm_node(node)) for node in client.nodes())
    nodes = {name: node for name, node in seen_nodes if name in names or node.made}
    jobs: dict[int, SlurmJob] = {}
    seen = client.jobs()
    for job in seen:
        begins = job.state == "PENDING" and job.reason == "BeginTime"
        if not begins and job.state not in _WITH_NODES:
            continue
        on = frozenset(node for node in expand(job.nodes) if node in nodes) if job.nodes else frozenset[str]()
        if on or begins:
            jobs[job.id] = _job(job, on, begins, at - wall, checkpoint)
    for name in frozenset[str]().union(*(one.nodes for one in jobs.values() if one.waits)):
        if nodes[name].want == "off":
            # A controller that took over may know the job and not that its nodes boot: it powers them up again.
            nodes[name] = replace(nodes[name], want="due")
    reservations = client.reservations()
    for name in _reserved(reservations):
        if name in nodes:
            nodes[name] = replace(nodes[name], reserved=True)
    later = [job for job in seen if job.state == "PENDING" and job.start_time is not None]
    chosen = client.planned_nodes() if later else {}
    ends = {job.own_name: job.end_time for job in seen if job.state == "RUNNING"}
    planned = (_planned_start(job, chosen.get(job.id, ""), ends) for job in seen if job.state == "PENDING")
    starts = [*map(_reserved_start, reservations), *planned]
    return SlurmView(at, nodes, jobs, tuple(replace(one, at=one.at + at - wall) for one in starts if one is not None))


def _reserved(reservations: Collection[Reservation]) -> list[str]:
    """Nodes of reservations that have begun."""
    return [node for one in reservations if one.state == "active" and one.nodes for node in expand(one.nodes)]


def _reserved_start(one: Reservation) -> PlannedStart | None:
    """A reservation that begins: its nodes are there then, but for one for maintenance."""
    if one.state == "active" or one.start_time is None or not one.nodes or _MAINTENANCE & one.flags:
        return None
    return PlannedStart(one.start_time, frozenset(expand(one.nodes)))


def _planned_start(job: Job, chosen: str, ends: Mapping[str, int | None]) -> PlannedStart | None:
    """What Slurm or the planner expects of a job that waits. Of one that only waits for its begin time or for the end
    of others, the nodes are chosen then: as many of its partition as it fills, where it names one alone. Of others
    without nodes nothing is asked for: the planner has them on nodes that are there.
    """
    if chosen and job.start_time is not None:
        return PlannedStart(job.start_time, frozenset(expand(chosen)))
    at = job.start_time if job.reason == "BeginTime" else _after(job, ends) if job.reason == "Dependency" else None
    if at is None or "," in job.partition or job.reservation:
        return None
    gpus = job.tres.get("gres/gpu", 0)
    return PlannedStart(at, frozenset(), job.node_count, job.partition, gpus, job.cpus, job.account)


def _after(job: Job, ends: Mapping[str, int | None]) -> int | None:
    """When a job that depends on running ones can start at the latest, by their limits. None: it is not known."""
    jobs = [_AFTER.fullmatch(word) for word in job.dependency.split(",")]
    times = [None if match is None else ends.get(match[1]) for match in jobs]
    known = [at for at in times if at is not None]
    return max(known) if len(known) == len(times) else None


def _job(job: Job, on: frozenset[str], begins: bool, shift: float, checkpoint: NodeCheckpoint) -> SlurmJob:
    ends = math.inf if job.end_time is None else job.end_time + shift
    saves = checkpoint.rhythm(job.account, job.comment) is not None
    return SlurmJob(job.id, job.state == "CONFIGURING", on, begins, job.own_name, saves, ends)


def slurm_node(node: Node) -> SlurmNode:
    """What Slurm wants of a node."""
    flags = node.flags
    by_slurm = "not_responding" in flags or node.reason.startswith(_BY_SLURM)
    made = _feature(node, MADE_FEATURE) if _CREATED in flags else ""
    pool = _feature(node, POOL_FEATURE).removeprefix(POOL_FEATURE) if made else ""
    return SlurmNode(
        _want(node.state, flags), "drain" in flags, node.reason, by_slurm, node.address, made=made, pool=pool
    )


def _feature(node: Node, prefix: str) -> str:
    return next((one for one in node.features if one.startswith(prefix)), "")


def _want(state: str, flags: frozenset[str]) -> Want:
    """A node keeps the flag `power_up` for good if its machine registers before slurmctld's power saving gets to it."""
    if "powering_up" in flags:
        return "up"
    if {"powered_down", "power_up"} <= flags:
        return "due"
    if flags & {"powering_down", "powered_down"}:
        return "off"
    if "invalid_reg" in flags:
        return "invalid"
    if state in ("down", "error"):
        return "down"
    return "on" if state in ("idle", "mixed", "allocated", "completing", "planned") else "unknown"


def change(commands: Commands, act: NodeAct | JobAct) -> None:
    """Make a change. Raises SluiceError with Slurm's words."""
    if isinstance(act, JobAct):
        if act.change == "signal":
            commands.output("scancel", f"--signal={act.text}", "--full", act.name)
        elif act.change == "requeue":
            commands.output("scontrol", "requeue", act.name)
        else:
            commands.output("scontrol", "update", f"JobId={act.name}", "StartTime=now")
        return
    nodes = f"NodeName={fold(act.nodes)}"
    if act.change == "create":
        commands.output("scontrol", "create", nodes, *act.text.split(), "State=CLOUD")
        return
    if act.change == "delete":
        commands.output("scontrol", "delete", nodes)
        return
    if act.change == "address":
        commands.output("scontrol", "update", nodes, f"NodeAddr={act.text}")
        return
    reason = [f"Reason={act.text}"] if act.text else []
    commands.output("scontrol", "update", nodes, f"State={_STATES[act.change]}", *reason)
