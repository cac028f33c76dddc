"""The backend on pyslurm, where a pyslurm of the site's own Slurm version is installed (the extra ``pyslurm``).

It reads jobs and nodes through libslurm, and all else as the text backend does. Importing pyslurm without a usable
slurm.conf ends the whole process, so that it lives in a child process, which answers on its stdout in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand
from sluice.base.run import PYTHON, CommandError, run_command
from sluice.base.slurm_version import format_slurm_version, parse_slurm_version
from sluice.slurm.answers import UNLIMITED, Job, Node
from sluice.slurm.commands import Commands
from sluice.slurm.text import TextClient, node_state

_CHILD = """
import importlib.metadata, json, sys
if sys.argv[1] == "version":
    answer = importlib.metadata.version("pyslurm")
else:
    import pyslurm
    load = {"jobs": pyslurm.Jobs.load, "nodes": pyslurm.Nodes.load}[sys.argv[1]]
    answer = [record.to_dict() for record in load().values()]
json.dump(answer, sys.stdout, default=lambda value: value.to_dict() if hasattr(value, "to_dict") else str(value))
"""


class PyslurmClient(TextClient):
    """Slurm through pyslurm. Raises SluiceError where there is none of this Slurm's major version."""

    name = "pyslurm"

    def __init__(self, commands: Commands | None = None) -> None:
        super().__init__(commands)
        try:
            built_for = parse_slurm_version(str(self._ask("version")))
        except CommandError as error:
            raise SluiceError("pyslurm is not installed", remedy="use the text or the JSON backend") from error
        installed = self.version()
        if built_for[:2] != installed[:2]:
            raise SluiceError(
                f"pyslurm {format_slurm_version(built_for)} does not fit Slurm {format_slurm_version(installed)}",
                remedy="use the text or the JSON backend",
            )

    def nodes(self, names: str | None = None) -> list[Node]:
        """See TextClient."""
        wanted = None if names is None else set(expand(names))
        nodes = [_node(record) for record in self._ask("nodes")]
        if wanted is not None and (missing := wanted - {node.name for node in nodes}):
            raise SluiceError(f"node {sorted(missing)[0]!r}: slurmctld knows no such node")
        return [node for node in nodes if wanted is None or node.name in wanted]

    def jobs(self, *, ids: Iterable[int] = (), states: Iterable[str] = (), users: Iterable[str] = ()) -> list[Job]:
        """See TextClient."""
        of_ids, of_users = set(ids), set(users)
        of_states = {state.upper() for state in states} or {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING"}
        return [
            job
            for job in map(_job, self._ask("jobs"))
            if (not of_ids or job.id in of_ids or job.array_id in of_ids)
            and ("ALL" in of_states or job.state in of_states)
            and (not of_users or job.user in of_users)
        ]

    def _ask(self, what: str) -> Any:
        done = run_command(
            [*PYTHON, "-c", _CHILD, what], timeout=self.commands.timeout, env=self.commands.environment()
        )
        return json.loads(done.stdout)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _gres(value: Mapping[str, int] | None) -> str:
    return ",".join(f"{name}:{count}" for name, count in (value or {}).items())


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
        gres=_gres(r["configured_gres"]),
        gres_used=_gres(r["allocated_gres"]),
        features=tuple(r["available_features"] or ()),
        active_features=tuple(r["active_features"] or ()),
        partitions=tuple(r["partitions"] or ()),
        weight=r["weight"] or 0,
        version=_text(r["slurm_version"]),
        tres={},
        tres_allocated=_counts(r["allocated_tres"]),
    )


def _job(r: Mapping[str, Any]) -> Job:
    limit = r["time_limit"]
    task = r["array_task_id"]
    return Job(
        id=r["id"],
        array_id=r["array_id"],
        array_tasks=_text(r["array_tasks_waiting"]) or _text(task),
        name=_text(r["name"]),
        user=_text(r["user_name"]),
        uid=r["user_id"] or 0,
        account=_text(r["account"]),
        qos=_text(r["qos"]),
        partition=_text(r["partition"]),
        state=_text(r["state"]),
        reason=_text(r["state_reason"]).replace("None", ""),
        nodes=_text(r["allocated_nodes"]),
        node_count=r["num_nodes"] or 0,
        cpus=r["cpus"] or 0,
        submit_time=r["submit_time"],
        eligible_time=r["eligible_time"],
        start_time=r["start_time"],
        end_time=r["end_time"],
        time_limit_s=UNLIMITED if limit in ("UNLIMITED", None) else int(limit) * 60,
        priority=r["priority"] or 0,
        tres=_counts(r["tres"]),
        tres_per_node=_text(r["tres_per_node"]),
        tres_per_job=_text(r["tres_per_job"]),
        tres_per_task=_text(r["tres_per_task"]),
        features=",".join(r["constraints"] or ()),
        dependency=_text(r["dependencies"]),
        reservation=_text(r["reservation"]),
        comment=_text(r["comment"]),
        work_dir=_text(r["working_directory"]),
        admin_comment=_text(r["admin_comment"]),
    )


def _counts(tres: Mapping[str, Any] | None) -> dict[str, int]:
    """pyslurm's TRES record: cpu, mem, node, billing, and GRES by name."""
    counts: dict[str, int] = {}
    for name, value in (tres or {}).items():
        if isinstance(value, Mapping):
            counts |= {f"gres/{gres}": count for gres, count in value.items() if isinstance(count, int)}
        elif isinstance(value, int):
            counts[{"memory": "mem", "cpus": "cpu"}.get(name, name)] = value
    return counts
