"""What `sluice replicad` sees of Slurm: its replicas' jobs, and what their nodes are about to do.

That daemon's user has no right in Slurm, and with PrivateData sees no other user's jobs. It asks here on each
controller, for the users of the services of the policy alone: slurmctld then packs the jobs of those users, and not the
whole queue, so that asking each second costs little on a full cluster.
"""

from __future__ import annotations

import pwd
import re
import threading
import time
from collections.abc import Iterable
from typing import Any

from policy.names import OVER_QOS
from policy.service_jobs import parse_job_name
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand, hosts
from sluice.controllerd.daemon import Site
from sluice.slurm.answers import Job, Node, Reservation

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}\$?\Z")
_ALONE = 8  # users whose jobs are asked for one after the other: more are read with all jobs
_MOST_USERS = 2000
_NODES_S = 2.0
_RESERVATIONS_S = 5.0
_MOST_TEXT = 256


class Serving:
    """Answers. Thread-safe; one at a time reads."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._nodes: tuple[float, frozenset[str], dict[str, str]] = (-1e9, frozenset(), {})
        self._reservations: tuple[float, list[Reservation]] = (-1e9, [])

    def answer(self, users: object) -> dict[str, Any]:
        """Jobs of replicas, and why nodes that have some are to be left. Raises SluiceError."""
        names = _users(users)
        with self._lock:
            began = time.time()
            jobs = list(self._jobs(names))
            running = frozenset(node for job in jobs if job.state == "RUNNING" for node in expand(job.nodes))
            return {
                "host": self._site.host,
                "leads": self._site.leads(),
                "at": began,
                "jobs": [row(job) for job in jobs],
                "leave": self._left(running),
                "maintenance": self._maintenance(running),
            }

    def _jobs(self, users: list[str]) -> Iterable[Job]:
        client = self._site.client
        groups = [[user] for user in users] if len(users) <= _ALONE else [users]
        for group in groups:
            for job in client.jobs(users=group, states=["all"]):
                if job.user in group and parse_job_name(job.name) is not None:
                    yield job

    def _left(self, running: frozenset[str]) -> dict[str, str]:
        """Nodes that take no new jobs, and why."""
        asked, known, found = self._nodes
        if not running:
            return {}
        if running != known or time.monotonic() > asked + _NODES_S:
            found = {node.name: why for node in self._site.client.nodes(hosts(running)) if (why := leaves(node))}
            self._nodes = time.monotonic(), running, found
        return found

    def _maintenance(self, running: frozenset[str]) -> dict[str, int]:
        """Nodes that a reservation takes from all jobs, and when."""
        asked, found = self._reservations
        if not running:
            return {}
        if time.monotonic() > asked + _RESERVATIONS_S:
            found = self._site.client.reservations()
            self._reservations = time.monotonic(), found
        starts: dict[str, int] = {}
        now = time.time()
        for one in found:
            if "maint" not in {flag.lower() for flag in one.flags} or one.start_time is None:
                continue
            if one.end_time is not None and one.end_time < now:
                continue
            for node in running & set(expand(one.nodes)):
                starts[node] = min(one.start_time, starts.get(node, one.start_time))
        return starts


def leaves(node: Node) -> str:
    """Why a node's jobs are to go somewhere else; empty: they may stay."""
    if node.flags & {"drain", "fail"} or node.state in ("drained", "draining"):
        why = node.reason.partition("\n")[0][:_MOST_TEXT]
        return f"node {node.name} is drained" + (f": {why}" if why else "")
    if node.flags & {"reboot_requested", "reboot_issued"}:
        return f"node {node.name} is to be rebooted"
    return ""


def row(job: Job) -> dict[str, Any]:
    """A job, as replicad gets it."""
    return {
        "id": job.id,
        "name": job.name[:_MOST_TEXT],
        "user": job.user,
        "state": job.state,
        "reason": job.reason[:_MOST_TEXT],
        "nodes": job.nodes[: 16 * _MOST_TEXT],
        "submitted": job.submit_time,
        "started": job.start_time,
        "ends": job.end_time,
        "lent": job.qos == OVER_QOS,
    }


def _users(given: object) -> list[str]:
    if not isinstance(given, list) or len(given) > _MOST_USERS:
        raise SluiceError("users: not a list of users", remedy="install one version of Sluice and restart both")
    for one in given:
        if not isinstance(one, str) or not _USER.match(one):
            raise SluiceError(f"user {one!r:.80}: not a user's name", remedy="correct the policy's services")
    return [one for one in dict.fromkeys(given) if _is_there(one)]


def _is_there(user: str) -> bool:
    """squeue refuses a list with a user that this host does not know."""
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
