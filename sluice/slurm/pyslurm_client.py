"""The backend on pyslurm, where a pyslurm of the site's own Slurm version is installed (the extra ``pyslurm``).

It reads jobs and nodes through libslurm, and all else as the text backend does. Importing pyslurm without a usable
slurm.conf ends the whole process, so that it lives in a child process, which answers on its stdout in JSON.

It takes single attributes of pyslurm's records and not ``to_dict()``, which reads all: what one user wrote can make one
of them raise, and would end everybody's listing. `UNKNOWN` names what pyslurm does not have, or has without a part:
requests by node, job and task lose their units and some all they say, dependencies their states, a node's GRES its
sockets, and one whose count Slurm prints with a unit raises; of what is in use it has no indexes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand
from sluice.base.run import PYTHON, CommandError, run_command
from sluice.base.slurm_version import format_slurm_version, parse_slurm_version
from sluice.slurm.answers import UNLIMITED, Job, Node, SeenJob, parse_tres
from sluice.slurm.commands import Commands
from sluice.slurm.text import TextClient, node_state

UNKNOWN = frozenset(
    {
        "Job.dependency",
        "Job.tres_per_job",
        "Job.tres_per_node",
        "Job.tres_per_task",
        "Node.gres",
        "Node.gres_used",
        "Node.tres",
    }
)

_JOB_FIELDS = (
    "id", "array_id", "array_task_id", "array_tasks_waiting", "array_tasks_parallel", "name", "user_name", "user_id",
    "account", "qos", "partition", "state", "state_reason", "allocated_nodes", "num_nodes", "cpus", "submit_time",
    "eligible_time", "start_time", "end_time", "time_limit", "priority", "allocated_tres", "requested_tres",
    "constraints", "reservation", "comment", "working_directory", "admin_comment",
)  # fmt: skip
_NODE_FIELDS = (
    "name", "address", "hostname", "state", "reason", "total_cpus", "allocated_cpus", "sockets", "cores_per_socket",
    "threads_per_core", "real_memory", "allocated_memory", "free_memory", "available_features", "active_features",
    "partitions", "weight", "slurm_version", "allocated_tres",
)  # fmt: skip
_ENDED = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip
_VERSION = """
import importlib.metadata
print(importlib.metadata.version("pyslurm"))
"""
_CHILD = """
import json, sys
answer, sys.stdout = sys.stdout, sys.stderr  # pyslurm prints the TRES that it does not know
import pyslurm

def counts(tres):
    found = [getattr(tres, name) for name in ("cpu", "mem", "node", "billing", "energy", "pages", "vmem")]
    for group in (tres.gres, tres.license, tres.fs, tres.interconnect, tres.other):
        found += group.values()
    return {one.type_and_name: one.count for one in found if one is not None}

def value(record, name):
    try:
        found = getattr(record, name)
    except UnicodeDecodeError as error:  # users write what they like
        text = error.object.decode(errors="replace")
        return text.split(",") if name in lists else text
    return counts(found) if hasattr(found, "gres") else found

lists = ("constraints", "available_features", "active_features", "partitions")
kind, *names = sys.argv[1:]
records = getattr(pyslurm, kind).load().values()
json.dump([{name: value(record, name) for name in names} for record in records], answer)
"""


class PyslurmClient(TextClient):
    """Slurm through pyslurm. Raises SluiceError where there is none of this Slurm's major version."""

    name = "pyslurm"
    unknown = UNKNOWN

    def __init__(self, commands: Commands | None = None) -> None:
        super().__init__(commands)
        try:
            built_for = parse_slurm_version(self._child(_VERSION))
        except CommandError as error:
            raise SluiceError("pyslurm is not installed", remedy="use the text backend") from error
        installed = self.version()
        if built_for[:2] != installed[:2]:
            raise SluiceError(
                f"pyslurm {format_slurm_version(built_for)} does not fit Slurm {format_slurm_version(installed)}",
                remedy="use the text backend",
            )

    def nodes(self, names: str | None = None) -> list[Node]:
        """See TextClient."""
        wanted = None if names is None else set(expand(names))
        nodes = [_node(record) for record in self._ask("Nodes", _NODE_FIELDS)]
        if wanted is not None and (missing := wanted - {node.name for node in nodes}):
            raise SluiceError(f"node {sorted(missing)[0]!r}: slurmctld knows no such node")
        return [node for node in nodes if wanted is None or node.name in wanted]

    def jobs(self, *, ids: Iterable[int] = (), states: Iterable[str] = (), users: Iterable[str] = ()) -> list[Job]:
        """See TextClient."""
        of_ids, of_users = set(ids), set(users)
        of_states = {state.upper() for state in states}
        return [
            job
            for job in map(_job, self._ask("Jobs", _JOB_FIELDS))
            if (not of_ids or job.id in of_ids or job.array_id in of_ids)
            and ("ALL" in of_states or (job.state in of_states if of_states else job.state not in _ENDED))
            and (not of_users or job.user in of_users)
        ]

    def each_job(self) -> Iterator[SeenJob]:
        """See TextClient; here all of them are in memory."""
        for job in self.jobs(states=["all"]):
            yield SeenJob(job.id, hash(repr(job)), partial(_whole, job))

    def _ask(self, kind: str, fields: Iterable[str]) -> Any:
        try:
            return json.loads(self._child(_CHILD, kind, *fields))
        except CommandError as error:  # its own message has the child's whole program
            said = error.stderr.strip().splitlines() or ["no answer"]
            raise SluiceError(f"pyslurm: {kind}: {said[-1]}", remedy="use the text backend") from error

    def _child(self, program: str, *arguments: str) -> str:
        environment = self.commands.environment()
        return run_command([*PYTHON, "-c", program, *arguments], timeout=self.commands.timeout, env=environment).stdout


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _node(r: Mapping[str, Any]) -> Node:
    state, flags = node_state(_text(r["state"]).split("+"))
    return Node(
        name=r["name"],
        address=_text(r["address"]),
        hostname=_text(r["hostname"]),
        state=state,
        flags=flags,
        reason=_text(r["reason"]),
        cpus=r["total_cpus"] or 0,
        cpus_allocated=r["allocated_cpus"] or 0,
        sockets=r["sockets"] or 0,
        cores_per_socket=r["cores_per_socket"] or 0,
        threads_per_core=r["threads_per_core"] or 0,
        memory_mib=r["real_memory"] or 0,
        memory_allocated_mib=r["allocated_memory"] or 0,
        memory_free_mib=r["free_memory"],
        gres="",
        gres_used="",
        features=tuple(r["available_features"] or ()),
        active_features=tuple(r["active_features"] or ()),
        partitions=tuple(r["partitions"] or ()),
        weight=r["weight"] or 0,
        version=_text(r["slurm_version"]),
        tres={},
        tres_allocated=parse_tres(",".join(f"{name}={count}" for name, count in r["allocated_tres"].items())),
    )


def _job(r: Mapping[str, Any]) -> Job:
    unlimited = r["time_limit"] is None
    end = r["end_time"]
    if unlimited and end is not None and end > time.time():
        end = None  # Slurm's own mark for a job without a limit: a year after its start
    return Job(
        id=r["id"],
        array_id=r["array_id"],
        array_tasks=_array_tasks(r),
        name=_text(r["name"]),
        user=_text(r["user_name"]),
        uid=r["user_id"] or 0,
        account=_text(r["account"]),
        qos=_text(r["qos"]),
        partition=_text(r["partition"]),
        state=_text(r["state"]),
        reason="" if r["state_reason"] == "None" else _text(r["state_reason"]),
        nodes=_text(r["allocated_nodes"]),
        node_count=r["num_nodes"] or 0,
        cpus=r["cpus"] or 0,
        submit_time=r["submit_time"],
        eligible_time=r["eligible_time"],
        start_time=r["start_time"],
        end_time=end,
        time_limit_s=UNLIMITED if unlimited else r["time_limit"] * 60,
        priority=r["priority"] or 0,
        tres=r["allocated_tres"] or r["requested_tres"] or {},
        tres_per_node="",
        tres_per_job="",
        tres_per_task="",
        features=",".join(r["constraints"] or ()),
        dependency="",
        reservation=_text(r["reservation"]),
        comment=_text(r["comment"]),
        work_dir=_text(r["working_directory"]),
        admin_comment=_text(r["admin_comment"]),
    )


def _array_tasks(r: Mapping[str, Any]) -> str:
    """As squeue has it: pyslurm leaves out how many may run at a time, and takes task 0 for none."""
    if r["array_id"] is None:
        return ""
    if waiting := r["array_tasks_waiting"]:
        return f"{waiting}%{r['array_tasks_parallel']}" if r["array_tasks_parallel"] else str(waiting)
    return str(r["array_task_id"] or 0)


def _whole(job: Job) -> Job:
    return job
