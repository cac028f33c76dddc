"""The backend that every Slurm since 22.05 has: commands with explicit formats.

Names, comments and reasons are their users' own and may hold any character, separators and line breaks included. So
fields are separated by a random word that is made for each call, and squeue is given it where nobody else can read it.
sacct takes it as an option, which all users of the host can read while it runs: it is asked for nothing of theirs.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial

from sluice.base.errors import SluiceError
from sluice.base.run import CommandError
from sluice.base.slurm_version import SlurmVersion, parse_slurm_version
from sluice.slurm.answers import (
    UNLIMITED,
    AccountingJob,
    Controller,
    Job,
    Node,
    Partition,
    Reservation,
    SeenJob,
    parse_tres,
)
from sluice.slurm.commands import Commands

_NOTHING = frozenset({"", "(null)", "N/A", "None", "NONE", "n/a", "Unknown"})

_JOB_FIELDS = (
    "JobID", "ArrayJobID", "ArrayTaskID", "Name", "UserName", "UserID", "Account", "QOS", "Partition", "State",
    "Reason", "NodeList", "NumNodes", "NumCPUs", "SubmitTime", "EligibleTime", "StartTime", "EndTime", "TimeLimit",
    "PriorityLong", "tres-alloc", "tres-per-node", "tres-per-job", "tres-per-task", "Feature", "Dependency",
    "Reservation", "Comment", "WorkDir", "admin_comment",
)  # fmt: skip
_ACCOUNTING_FIELDS = (
    "JobIDRaw", "JobID", "User", "Account", "QOS", "Partition", "State", "ExitCode", "NodeList", "NNodes", "AllocCPUS",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "ReqTRES", "AllocTRES", "Reservation",
)  # fmt: skip
_STATE_SUFFIXES = {
    "*": "not_responding",
    "~": "powered_down",
    "#": "powering_up",
    "%": "powering_down",
    "!": "power_down",
    "$": "maintenance",
    "@": "reboot_requested",
    "^": "reboot_issued",
    "-": "planned",
}


class TextClient:
    """Slurm through the output of squeue, sacct and scontrol. One call is one command (and one RPC)."""

    name = "text"
    unknown: frozenset[str] = frozenset()

    def __init__(self, commands: Commands | None = None) -> None:
        self.commands = commands or Commands()
        self._marks = new_mark(), new_mark()  # of each_job: the same each time, so that its rows can be compared
        self._nodes: dict[str, Node] = {}  # by their records, of the last listing: few differ in the next one

    def version(self) -> SlurmVersion:
        """Version of the commands in use."""
        return parse_slurm_version(self.commands.output("sinfo", "--version"))

    def ping(self) -> list[Controller]:
        """The controllers, the primary first, and whether each answers."""
        done = self.commands.run("scontrol", "ping", check=False)
        found = re.findall(r"^Slurmctld\(([^)]*)\) at (\S+) is (UP|DOWN)\s*$", done.stdout, re.MULTILINE)
        if not found:
            raise SluiceError(f"scontrol ping: {(done.stderr or done.stdout).strip() or 'no answer'}")
        return [Controller(host=host, role=role, up=state == "UP") for role, host, state in found]

    def config(self) -> dict[str, str]:
        """slurmctld's configuration in effect, as `scontrol show config` names it; unset values are empty."""
        values: dict[str, str] = {}
        for line in self.commands.output("scontrol", "show", "config").splitlines():
            match = re.match(r"(\S+)\s*=\s?(.*)", line)
            if match and match[1] not in values:
                values[match[1]] = _text(match[2].strip())
        return values

    def nodes(self, names: str | None = None) -> list[Node]:
        """All nodes, or those of a hostlist."""
        arguments = ["show", "node", "--oneliner", "--details", "--all"]
        if names is not None:
            arguments.insert(2, names)
        known = self._nodes
        records = _records(self.commands.output("scontrol", *arguments), "NodeName=")
        found = {record: known.get(record) or _node(record) for record in records}
        if names is None:
            self._nodes = found
        return list(found.values())

    def partitions(self) -> list[Partition]:
        """All partitions, hidden ones included."""
        text = self.commands.output("scontrol", "show", "partition", "--oneliner", "--all")
        return [_partition(line) for line in _records(text, "PartitionName=")]

    def reservations(self) -> list[Reservation]:
        """All reservations."""
        text = self.commands.output("scontrol", "show", "reservation", "--oneliner", "--all")
        return [_reservation(line) for line in _records(text, "ReservationName=")]

    def jobs(self, *, ids: Iterable[int] = (), states: Iterable[str] = (), users: Iterable[str] = ()) -> list[Job]:
        """Jobs that slurmctld knows; each filter that is given must hold. Default: pending and running ones."""
        mark = new_mark()
        shape = {"SQUEUE_FORMAT2": ",".join(f"{field}:0{mark}" for field in _JOB_FIELDS)}  # an option all would see
        arguments = _filters(("--jobs", map(str, ids)), ("--states", states), ("--user", users))
        environment = self.commands.environment() | shape
        try:
            done = self.commands.run("squeue", "--noheader", "--all", *arguments, env=environment)
        except CommandError as error:  # only where it is asked for one
            if "Invalid job id" in f"{error} {error.stderr}":
                return []
            raise
        rows = _rows(done.stdout, mark, len(_JOB_FIELDS))
        return [_job(dict(zip(_JOB_FIELDS, row, strict=True))) for row in rows]

    def planned_nodes(self) -> dict[int, str]:
        """By job that waits: the nodes that Slurm's backfill has chosen for it, as a hostlist."""
        shape = "--Format=JobID:0|,SchedNodes:0"
        text = self.commands.output("squeue", "--noheader", "--all", "--states=PENDING", shape)
        rows = [line.split("|") for line in text.splitlines() if line.strip()]
        return {_number(job): _text(nodes) for job, nodes in rows if _text(nodes)}

    def each_job(self) -> Iterator[SeenJob]:
        """All jobs that slurmctld knows, without having all in memory; it may fail after some of them."""
        mark, last = self._marks
        fields = [f"{field}:0{mark}" for field in _JOB_FIELDS[:-1]] + [f"{_JOB_FIELDS[-1]}:0{last}"]
        shape = {"SQUEUE_FORMAT2": ",".join(fields)}
        arguments = ("--noheader", "--all", "--states=all")
        rest = b""
        for piece in self.commands.read("squeue", *arguments, env=self.commands.environment() | shape):
            *rows, rest = (rest + piece).split(f"{last}\n".encode())
            for row in rows:
                yield SeenJob(int(row[: row.index(b"\x1f")]), hash(row), partial(_job_of, row, mark))
        if rest:
            raise SluiceError(f"squeue's answer is cut off before {len(rest)} bytes", remedy="try again")

    def accounting_jobs(
        self,
        *,
        start: int | None = None,
        end: int | None = None,
        ids: Iterable[int] = (),
        users: Iterable[str] = (),
        states: Iterable[str] = (),
    ) -> list[AccountingJob]:
        """Jobs of the accounting database that were active between `start` and `end` (seconds since 1970)."""
        mark = new_mark()
        arguments = [
            "--noheader",
            "--allocations",
            "--duplicates",
            "--parsable",
            f"--delimiter={mark}",
            f"--format={','.join(_ACCOUNTING_FIELDS)}",
        ]
        arguments += accounting_filters(start, end, ids, users, states)
        rows = _rows(self.commands.output("sacct", *arguments), mark, len(_ACCOUNTING_FIELDS))
        return [_accounting_job(dict(zip(_ACCOUNTING_FIELDS, row, strict=True))) for row in rows]


def accounting_filters(
    start: int | None, end: int | None, ids: Iterable[int], users: Iterable[str], states: Iterable[str]
) -> list[str]:
    """sacct's options for a selection; all users unless some are named."""
    names = list(users)
    arguments = [] if names else ["--allusers"]
    return arguments + _times(start, end) + _filters(("--jobs", map(str, ids)), ("--user", names), ("--state", states))


def _times(start: int | None, end: int | None) -> list[str]:
    """sacct reads local wall-clock times, but for an hour that comes twice, as clocks are put back, seconds."""

    def local(seconds: int) -> str:
        when = datetime.fromtimestamp(seconds)
        twice = when.replace(fold=0).timestamp() != when.replace(fold=1).timestamp()
        return f"uts{seconds}" if twice else when.strftime("%Y-%m-%dT%H:%M:%S")

    return ([] if start is None else [f"--starttime={local(start)}"]) + (
        [] if end is None else [f"--endtime={local(end)}"]
    )


def _filters(*filters: tuple[str, Iterable[str]]) -> list[str]:
    arguments = []
    for option, values in filters:
        chosen = list(values)
        if any("," in value or not value for value in chosen):
            raise SluiceError(f"{option} {chosen!r}: a value is empty or holds a comma")
        if chosen:
            arguments.append(f"{option}={','.join(chosen)}")
    return arguments


def new_mark() -> str:
    """A separator that nobody can have put into a name before."""
    return f"\x1f{secrets.token_hex(8)}\x1f"


def _rows(text: str, mark: str, width: int) -> list[list[str]]:
    """Every field ends with the mark, every row with a line break."""
    fields = text.split(mark)
    if fields.pop().strip() or len(fields) % width:
        raise SluiceError(f"Slurm's answer is cut off after {len(fields)} fields", remedy="try again")
    rows = [fields[at : at + width] for at in range(0, len(fields), width)]
    for row in rows:
        row[0] = row[0].removeprefix("\n")
    return rows


def _records(text: str, key: str) -> list[str]:
    """One record a line; a line break inside a free text does not start a new record unless it forges the key."""
    records: list[str] = []
    for line in text.splitlines():
        if line.startswith(key):
            records.append(line)
        elif records:
            records[-1] += f"\n{line}"
    return records


def _values(record: str, keys: Sequence[str]) -> dict[str, str]:
    """The first `` key=value`` of each key: Slurm prints its own fields before any free text."""
    values = {}
    for key in keys:
        match = re.search(rf"(?:^|\s){re.escape(key)}=(\S*)", record)
        values[key] = _text(match[1]) if match else ""
    return values


def _node(record: str) -> Node:
    value = _values(
        record,
        (
            "NodeName", "NodeAddr", "NodeHostName", "State", "CPUTot", "CPUAlloc", "Sockets", "CoresPerSocket",
            "ThreadsPerCore", "RealMemory", "AllocMem", "FreeMem", "Gres", "GresUsed", "AvailableFeatures",
            "ActiveFeatures", "Partitions", "Weight", "Version", "CfgTRES", "AllocTRES",
        ),
    )  # fmt: skip
    state, flags = node_state(value["State"].split("+"))
    return Node(
        name=value["NodeName"],
        address=value["NodeAddr"],
        hostname=value["NodeHostName"],
        state=state,
        flags=flags,
        reason=_reason(record),
        cpus=_number(value["CPUTot"]),
        cpus_allocated=_number(value["CPUAlloc"]),
        sockets=_number(value["Sockets"]),
        cores_per_socket=_number(value["CoresPerSocket"]),
        threads_per_core=_number(value["ThreadsPerCore"]),
        memory_mib=_number(value["RealMemory"]),
        memory_allocated_mib=_number(value["AllocMem"]),
        memory_free_mib=_optional(value["FreeMem"]),
        gres=value["Gres"],
        gres_used=value["GresUsed"],
        features=_words(value["AvailableFeatures"]),
        active_features=_words(value["ActiveFeatures"]),
        partitions=_words(value["Partitions"]),
        weight=_number(value["Weight"]),
        version=value["Version"],
        tres=parse_tres(value["CfgTRES"]),
        tres_allocated=parse_tres(value["AllocTRES"]),
    )


def _reason(record: str) -> str:
    """The reason, which comes last but for comment and extra; after its first line comes who set it and when."""
    found = re.search(r"\sReason=(.*)$", record, re.DOTALL)
    if found is None:
        return ""
    text = re.split(r"\s(?:Comment|Extra)=", found[1])[0]
    text = re.sub(r" \[[^\s\[\]@]+@[^\[\]]*\](?= {8}|\s*$)", "", text, count=1)
    return text.replace(" " * 8, "\n").rstrip()


def node_state(words: Sequence[str]) -> tuple[str, frozenset[str]]:
    """Base state and flags, lower case; the suffixes of the short form become flags."""
    base = words[0].lower() if words else ""
    flags = {word.lower() for word in words[1:]}
    while base and base[-1] in _STATE_SUFFIXES:
        flags.add(_STATE_SUFFIXES[base[-1]])
        base = base[:-1]
    return base, frozenset(flags)


def _partition(record: str) -> Partition:
    value = _values(
        record,
        ("PartitionName", "State", "Default", "Nodes", "TotalNodes", "TotalCPUs", "MaxTime", "DefaultTime",
         "PriorityTier", "QoS", "TRES"),
    )  # fmt: skip
    return Partition(
        name=value["PartitionName"],
        state=value["State"].lower(),
        default=value["Default"] == "YES",
        nodes=value["Nodes"],
        node_count=_number(value["TotalNodes"]),
        cpus=_number(value["TotalCPUs"]),
        max_time_s=parse_duration(value["MaxTime"]),
        default_time_s=parse_duration(value["DefaultTime"]),
        priority_tier=_number(value["PriorityTier"]),
        qos=value["QoS"],
        tres=parse_tres(value["TRES"]),
    )


def _reservation(record: str) -> Reservation:
    value = _values(
        record,
        (
            "ReservationName",
            "StartTime",
            "EndTime",
            "Nodes",
            "NodeCnt",
            "Features",
            "Flags",
            "TRES",
            "Users",
            "Accounts",
            "State",
        ),
    )
    return Reservation(
        name=value["ReservationName"],
        state=value["State"].lower(),
        start_time=_optional(value["StartTime"]),
        end_time=_optional(value["EndTime"]),
        nodes=value["Nodes"],
        node_count=_number(value["NodeCnt"]),
        features=_text(value["Features"]),
        users=_words(value["Users"]),
        accounts=_words(value["Accounts"]),
        flags=frozenset(_words(value["Flags"])),
        tres=parse_tres(value["TRES"]),
    )


def _job_of(row: bytes, mark: str) -> Job:
    """The job of a row of `each_job`."""
    return _job(dict(zip(_JOB_FIELDS, row.decode(errors="replace").split(mark), strict=True)))


def job_of_fields(fields: Sequence[str], name_of: Callable[[int], str]) -> Job:
    """The job of squeue's fields, but for its user's name. Raises ValueError for more or fewer fields."""
    value = dict(zip(_JOB_FIELDS, fields, strict=True))
    return _job(value | {"UserName": name_of(_number(value["UserID"]))})


def _job(value: Mapping[str, str]) -> Job:
    def text(field: str) -> str:
        return _text(value[field])

    tasks = text("ArrayTaskID")
    return Job(
        id=_number(value["JobID"]),
        array_id=_number(value["ArrayJobID"]) if tasks else None,
        array_tasks=tasks,
        name=value["Name"],
        user=value["UserName"],
        uid=_number(value["UserID"]),
        account=text("Account"),
        qos=text("QOS"),
        partition=text("Partition"),
        state=value["State"],
        reason=text("Reason"),
        nodes=text("NodeList"),
        node_count=_number(value["NumNodes"].partition("-")[0]),
        cpus=_number(value["NumCPUs"].partition("-")[0]),
        submit_time=_optional(value["SubmitTime"]),
        eligible_time=_optional(value["EligibleTime"]),
        start_time=_optional(value["StartTime"]),
        end_time=_optional(value["EndTime"]),
        time_limit_s=parse_duration(text("TimeLimit")),
        priority=_number(value["PriorityLong"]),
        tres=parse_tres(text("tres-alloc")),
        tres_per_node=text("tres-per-node"),
        tres_per_job=text("tres-per-job"),
        tres_per_task=text("tres-per-task"),
        features=text("Feature"),
        dependency=text("Dependency"),
        reservation=text("Reservation"),
        comment=_text(value["Comment"]),
        work_dir=value["WorkDir"],
        admin_comment=_text(value["admin_comment"]),
    )


def _accounting_job(value: Mapping[str, str]) -> AccountingJob:
    code, _, signal = value["ExitCode"].partition(":")
    limit = value["TimelimitRaw"]
    return AccountingJob(
        id=_number(value["JobIDRaw"]),
        label=value["JobID"],
        user=value["User"],
        account=value["Account"],
        qos=value["QOS"],
        partition=value["Partition"],
        state=value["State"].split()[0] if value["State"].strip() else "",  # "CANCELLED by 0"
        exit_code=_number(code),
        exit_signal=_number(signal),
        nodes="" if value["NodeList"] == "None assigned" else _text(value["NodeList"]),
        node_count=_number(value["NNodes"]),
        cpus=_number(value["AllocCPUS"]),
        submit_time=_optional(value["Submit"]),
        eligible_time=_optional(value["Eligible"]),
        start_time=_optional(value["Start"]),
        end_time=_optional(value["End"]),
        elapsed_s=_number(value["ElapsedRaw"]),
        time_limit_s=UNLIMITED if limit == "UNLIMITED" else int(limit) * 60 if limit.isdecimal() else None,
        tres_requested=parse_tres(value["ReqTRES"]),
        tres_allocated=parse_tres(value["AllocTRES"]),
        reservation=value["Reservation"],
    )


def parse_duration(text: str) -> int | None:
    """Slurm's ``[days-]hours:minutes:seconds`` or ``minutes:seconds`` in seconds; UNLIMITED, or None when unset."""
    if text in ("UNLIMITED", "INFINITE"):
        return UNLIMITED
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _text(value: str) -> str:
    return "" if value in _NOTHING else value


def _words(value: str) -> tuple[str, ...]:
    return tuple(word for word in value.split(",") if word)


def _number(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)  # faster, and nearly always so
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip())
    return int(match[1]) * {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}[match[2]] if match else 0


def _optional(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
