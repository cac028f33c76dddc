"""The backend that reads `--json` where the installed Slurm's is sound, and the text output where it is not.

Slurm 22.05 has --json for squeue, sinfo and sacct, whose exit codes are wrong there; later versions have it for
scontrol as well. Partitions are always read as text: their JSON leaves out which is the default. Numbers are plain in
22.05 and ``{"set": ..., "infinite": ..., "number": ...}`` later; states were words and became lists of words.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from sluice_base.errors import SluiceError
from sluice_base.hostlist import expand
from slurm_client.commands import Commands
from slurm_client.model import UNLIMITED, AccountingJob, Controller, Job, Node, Reservation, parse_tres
from slurm_client.text import TextClient, accounting_filters, node_state

_RECENT = (23, 11, 0)
_DEFAULT_STATES = frozenset({"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING"})
Record = Mapping[str, Any]


class JsonClient(TextClient):
    """Slurm through `--json`."""

    name = "json"

    def __init__(self, commands: Commands | None = None) -> None:
        super().__init__(commands)

    @cached_property
    def _recent(self) -> bool:
        """Whether scontrol has --json, and sacct's is sound."""
        return self.version() >= _RECENT

    def ping(self) -> list[Controller]:
        """See TextClient."""
        if not self._recent:
            return super().ping()
        return [
            Controller(host=str(r["hostname"]), role=str(r.get("mode", "")), up=r.get("pinged") == "UP")
            for r in self._load("pings", "scontrol", "ping", "--json", check=False)
        ]

    def nodes(self, names: str | None = None) -> list[Node]:
        """See TextClient."""
        command = ("scontrol", "show", "nodes") if self._recent else ("sinfo",)
        nodes = [_node(record) for record in self._load("nodes", *command, "--all", "--json")]
        if names is None:
            return nodes
        wanted = set(expand(names))
        if missing := wanted - {node.name for node in nodes}:
            raise SluiceError(f"node {sorted(missing)[0]!r}: slurmctld knows no such node")
        return [node for node in nodes if node.name in wanted]

    def reservations(self) -> list[Reservation]:
        """See TextClient."""
        if not self._recent:
            return super().reservations()
        records = self._load("reservations", "scontrol", "show", "reservations", "--all", "--json")
        return [_reservation(record) for record in records]

    def jobs(self, *, ids: Iterable[int] = (), states: Iterable[str] = (), users: Iterable[str] = ()) -> list[Job]:
        """See TextClient."""
        of_ids, of_states, of_users = set(ids), {state.upper() for state in states}, set(users)
        jobs = (_job(record) for record in self._load("jobs", "squeue", "--all", "--json"))
        return [
            job
            for job in jobs
            if (not of_ids or job.id in of_ids or job.array_id in of_ids)
            and ("ALL" in of_states or job.state in (of_states or _DEFAULT_STATES))
            and (not of_users or job.user in of_users)
        ]

    def accounting_jobs(
        self,
        *,
        start: int | None = None,
        end: int | None = None,
        ids: Iterable[int] = (),
        users: Iterable[str] = (),
        states: Iterable[str] = (),
    ) -> list[AccountingJob]:
        """See TextClient."""
        if not self._recent:
            return super().accounting_jobs(start=start, end=end, ids=ids, users=users, states=states)
        arguments = ["--duplicates", "--json", *accounting_filters(start, end, ids, users, states)]
        return [_accounting_job(record) for record in self._load("jobs", "sacct", *arguments)]

    def _load(self, key: str, command: str, *arguments: str, check: bool = True) -> list[Record]:
        done = self.commands.run(command, *arguments, check=check, env=self.commands.json_environment())
        try:
            document = json.loads(done.stdout)
            records = document[key]
            errors = document.get("errors") or []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = done.stderr.strip() or f"no JSON with {key!r}"
            raise SluiceError(f"{command} --json: {said}", remedy="use the text backend") from error
        if errors and not records:
            first = errors[0] if isinstance(errors[0], dict) else {"description": str(errors[0])}
            raise SluiceError(f"{command} --json: {first.get('error') or first.get('description')}")
        return [record for record in records if isinstance(record, dict)]


def _number(value: Any) -> int:
    return _optional(value) or 0


def _optional(value: Any) -> int | None:
    """A number of either form; None when unset."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return UNLIMITED
        value = value.get("number") if value.get("set") else None
    return int(value) if isinstance(value, int | float) else None


def _time(value: Any) -> int | None:
    return _optional(value) or None  # 0 is Slurm's "not yet"


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(str(word) for word in value)
    return tuple(word for word in str(value or "").split(",") if word)


def _first(value: Any) -> str:
    words = _words(value)
    return words[0] if words else ""


def _text(value: Any) -> str:
    return "" if value in (None, "None", "N/A", "(null)") else str(value)


def _minutes(value: Any, absent: int | None) -> int | None:
    minutes = _optional(value)
    return absent if minutes is None else minutes if minutes == UNLIMITED else minutes * 60


def _node(r: Record) -> Node:
    state, flags = node_state([*_words(r.get("state")), *_words(r.get("state_flags"))])
    return Node(
        name=r["name"],
        address=_text(r.get("address")),
        hostname=_text(r.get("hostname")),
        state=state,
        flags=flags,
        reason=_text(r.get("reason")),
        cpus=_number(r.get("cpus")),
        cpus_allocated=_number(r.get("alloc_cpus")),
        sockets=_number(r.get("sockets")),
        cores_per_socket=_number(r.get("cores")),
        threads_per_core=_number(r.get("threads")),
        memory_mib=_number(r.get("real_memory")),
        memory_allocated_mib=_number(r.get("alloc_memory")),
        memory_free_mib=_free_memory(r),
        gres=_text(r.get("gres")),
        gres_used=_text(r.get("gres_used")),
        features=_words(r.get("features")),
        active_features=_words(r.get("active_features")),
        partitions=_words(r.get("partitions")),
        weight=_number(r.get("weight")),
        version=_text(r.get("slurmd_version", r.get("version"))),
        tres=parse_tres(_text(r.get("tres"))),
        tres_allocated=parse_tres(_text(r.get("tres_used"))),
    )


def _free_memory(r: Record) -> int | None:
    value = _optional(r.get("free_memory", r.get("free_mem")))
    return None if value is not None and value < 0 else value


def _reservation(r: Record) -> Reservation:
    return Reservation(
        name=r["name"],
        state="",
        start_time=_time(r.get("start_time")),
        end_time=_time(r.get("end_time")),
        nodes=_text(r.get("node_list")),
        node_count=_number(r.get("node_count")),
        features=_text(r.get("features")),
        users=_words(r.get("users")),
        accounts=_words(r.get("accounts")),
        flags=frozenset(_words(r.get("flags"))),
        tres=parse_tres(_text(r.get("tres"))),
    )


def _job(r: Record) -> Job:
    limit = _minutes(r.get("time_limit"), UNLIMITED)
    task, tasks = _optional(r.get("array_task_id")), _text(r.get("array_task_string"))
    array = _optional(r.get("array_job_id"))
    return Job(
        id=_number(r["job_id"]),
        array_id=array if array and (tasks or task is not None) else None,
        array_tasks=tasks or ("" if task is None or not array else str(task)),
        name=_text(r.get("name")),
        user=_text(r.get("user_name")),
        uid=_number(r.get("user_id")),
        account=_text(r.get("account")),
        qos=_text(r.get("qos")),
        partition=_text(r.get("partition")),
        state=_first(r.get("job_state")),
        reason=_text(r.get("state_reason")),
        nodes=_text(r.get("nodes")),
        node_count=_number(r.get("node_count")),
        cpus=_number(r.get("cpus")),
        submit_time=_time(r.get("submit_time")),
        eligible_time=_time(r.get("eligible_time")),
        start_time=_time(r.get("start_time")),
        # Slurm fills in a year for a job without a limit.
        end_time=None if limit == UNLIMITED and _first(r.get("job_state")) == "RUNNING" else _time(r.get("end_time")),
        time_limit_s=limit,
        priority=_number(r.get("priority")),
        tres=parse_tres(_text(r.get("tres_alloc_str")) or _text(r.get("tres_req_str"))),
        tres_per_node=_text(r.get("tres_per_node")),
        tres_per_job=_text(r.get("tres_per_job")),
        tres_per_task=_text(r.get("tres_per_task")),
        features=_text(r.get("features")),
        dependency=_text(r.get("dependency")),
        reservation=_text(r.get("resv_name")),
        comment=_text(r.get("comment")),
        work_dir=_text(r.get("current_working_directory")),
        admin_comment=_text(r.get("admin_comment")),
    )


def _accounting_job(r: Record) -> AccountingJob:
    time, exit_code, tres = r.get("time") or {}, r.get("exit_code") or {}, r.get("tres") or {}
    array, het = r.get("array") or {}, r.get("het") or {}
    number = _number(r["job_id"])
    task = _optional(array.get("task_id"))
    label = str(number)
    if array.get("job_id") and task is not None:
        label = f"{array['job_id']}_{task}"
    elif _number(het.get("job_id")):
        label = f"{_number(het.get('job_id'))}+{_number(het.get('job_offset'))}"
    return AccountingJob(
        id=number,
        label=label,
        name=_text(r.get("name")),
        user=_text(r.get("user") or (r.get("association") or {}).get("user")),
        account=_text(r.get("account")),
        qos=_text(r.get("qos")),
        partition=_text(r.get("partition")),
        state=_first((r.get("state") or {}).get("current")),
        exit_code=_number(exit_code.get("return_code")),
        exit_signal=_number(
            (exit_code.get("signal") or {}).get("signal_id", (exit_code.get("signal") or {}).get("id"))
        ),
        nodes="" if r.get("nodes") == "None assigned" else _text(r.get("nodes")),
        node_count=_number(r.get("allocation_nodes")),
        cpus=_tres(tres.get("allocated")).get("cpu", 0),
        submit_time=_time(time.get("submission")),
        eligible_time=_time(time.get("eligible")),
        start_time=_time(time.get("start")),
        end_time=_time(time.get("end")),
        elapsed_s=_number(time.get("elapsed")),
        time_limit_s=_minutes(time.get("limit"), None),
        tres_requested=_tres(tres.get("requested")),
        tres_allocated=_tres(tres.get("allocated")),
        reservation=_text((r.get("reservation") or {}).get("name")),
    )


def _tres(entries: Any) -> dict[str, int]:
    """What was counted; the text output leaves out zeros too."""
    values = {}
    for entry in entries or []:
        name = f"{entry['type']}/{entry['name']}" if entry.get("name") else str(entry["type"])
        values[name] = _number(entry.get("count"))
    return {name: count for name, count in values.items() if count > 0}
