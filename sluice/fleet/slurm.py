"""Slurm as the fleet sees it, and the changes that it makes there."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from policy.checkpoint import NodeCheckpoint
from policy.pool_nodes import MADE_FEATURE, POOL_FEATURE
from sluice.base.hostlist import expand, hosts
from sluice.fleet.ahead import PlannedStart
from sluice.fleet.starts import RunTimes, planned_starts
from sluice.fleet.views import POOL_REASON, Change, JobAct, NodeAct, SlurmJob, SlurmNode, SlurmView, Want
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.answers import Job, Node, Reservation

_WITH_NODES = frozenset({"CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "STOPPED"})
_BY_SLURM = ("Not responding", "ResumeTimeout", "Node unexpectedly rebooted", POOL_REASON)
_CREATED = "dynamic_norm"
_SHARED = ("cpu", "mem", "gres/gpu", "gres/shard")
_MAINTENANCE = frozenset({"MAINT"})
_STATES: dict[Change, str] = {
    "power_up": "POWER_UP", "power_down": "POWER_DOWN", "power_down_force": "POWER_DOWN_FORCE", "drain": "DRAIN",
    "undrain": "UNDRAIN",
}  # fmt: skip


def read_view(
    client: SlurmClient,
    names: Collection[str],
    at: float,
    wall: float,
    checkpoint: NodeCheckpoint,
    run_times: RunTimes,
) -> SlurmView:
    """The nodes `names` of pools and their jobs, with times by the fleet's clock. `at`: now, by it; `wall`: now, by
    Slurm's. `run_times` learns from what it sees. Raises SluiceError.
    """
    seen_nodes = ((node.name, slurm_node(node)) for node in client.nodes())
    nodes = {name: node for name, node in seen_nodes if name in names or node.made}
    jobs: dict[int, SlurmJob] = {}
    seen = client.jobs()
    run_times.see(seen, wall)
    for job in seen:
        begins = job.state == "PENDING" and job.reason == "BeginTime"
        if not begins and job.state not in _WITH_NODES:
            continue
        on = frozenset(node for node in expand(job.nodes) if node in nodes) if job.nodes else frozenset[str]()
        if on or begins:
            ends = _ends(job, run_times, wall) + at - wall
            jobs[job.id] = _job(job, on, begins, ends, checkpoint)
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
    reserved = filter(None, map(_reserved_start, reservations))
    starts = [*reserved, *planned_starts(seen, chosen, run_times, wall)]
    shift = at - wall
    return SlurmView(at, nodes, jobs, tuple(replace(one, at=one.at + shift, until=one.until + shift) for one in starts))


def _reserved(reservations: Collection[Reservation]) -> list[str]:
    """Nodes of reservations that have begun."""
    return [node for one in reservations if one.state == "active" and one.nodes for node in expand(one.nodes)]


def _reserved_start(one: Reservation) -> PlannedStart | None:
    """A reservation that begins: its nodes are there then, but for one for maintenance."""
    if one.state == "active" or one.start_time is None or not one.nodes or _MAINTENANCE & one.flags:
        return None
    return PlannedStart(one.start_time, frozenset(expand(one.nodes)))


def _ends(job: Job, run_times: RunTimes, wall: float) -> float:
    """As its limit and its user's jobs before say, by Slurm's clock."""
    limit = math.inf if job.end_time is None else job.end_time
    if job.state != "RUNNING" or job.start_time is None:
        return limit
    return min(limit, wall + run_times.left(job, wall - job.start_time))


def _job(job: Job, on: frozenset[str], begins: bool, ends: float, checkpoint: NodeCheckpoint) -> SlurmJob:
    saves = checkpoint.rhythm(job.account, job.comment) is not None
    return SlurmJob(job.id, job.state == "CONFIGURING", on, begins, job.own_name, saves, ends)


def slurm_node(node: Node) -> SlurmNode:
    """What Slurm wants of a node."""
    flags = node.flags
    by_slurm = "not_responding" in flags or node.reason.startswith(_BY_SLURM)
    made = _feature(node, MADE_FEATURE) if _CREATED in flags else ""
    pool = _feature(node, POOL_FEATURE).removeprefix(POOL_FEATURE) if made else ""
    return SlurmNode(
        _want(node.state, flags), "drain" in flags, node.reason, by_slurm, node.address, _room(node), made=made,
        pool=pool,
    )  # fmt: skip


def _room(node: Node) -> float:
    """The part of it that jobs leave, of what they leave least of."""
    parts = [1 - node.tres_allocated.get(key, 0) / all_ for key in _SHARED if (all_ := node.tres.get(key, 0)) > 0]
    return max(0.0, min(parts, default=0.0))


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
        else:  # slurmd fails a run that begins in the second in which the one before was ended there
            commands.output("scontrol", "update", f"JobId={act.name}", "StartTime=now+1")
        return
    nodes = f"NodeName={hosts(act.nodes)}"
    if act.change in ("delete", "make_again"):
        commands.output("scontrol", "delete", nodes)
    if act.change in ("create", "make_again"):
        commands.output("scontrol", "create", nodes, *act.text.split(), "State=CLOUD")
    if act.change in ("create", "delete", "make_again"):
        return
    if act.change == "address":
        commands.output("scontrol", "update", nodes, f"NodeAddr={act.text}")
        return
    reason = [f"Reason={act.text}"] if act.text else []
    commands.output("scontrol", "update", nodes, f"State={_STATES[act.change]}", *reason)
