"""Decisions as slurmctld's plugins write them (slurm_plugin/decisions/decisions.h), and their replay.

`read_entries` reads one file, `Replay` follows the entries and puts any decision to the core again. The format is
described in docs/explain.md. Files are not trusted: every length and number is checked, and a file that was cut off
(slurmctld was killed, or still writes) ends where its last whole entry ends.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from sluice.base.errors import SluiceError
from sluice.core import CoreError, ffi, lib
from sluice.core.cluster import Cluster, NicGroups, fill_nics
from sluice.core.errors import check, new_error_text
from sluice.core.placement import (
    Explanation,
    Layout,
    Part,
    Placement,
    Policy,
    Preference,
    Request,
    RequestFlag,
    commit,
    explain,
    place,
    release,
    set_workload,
)

FOLDER = "sluice.records"
"""Below StateSaveLocation."""
FORMAT = 1
_MAGIC = b"SLUICEDR"
_HEADER = struct.Struct("<8sII")
HEADER_BYTES = _HEADER.size
ENTRY_HEAD = struct.Struct("<IHHQq")
"""Length of the payload, kind, nothing, sequence number, microseconds since 1970."""
_MAX_PAYLOAD = 256 * 1024 * 1024
_NAME = re.compile(r"decisions\.\d{12}\Z")
_MAX_64 = (1 << 64) - 1
_NO_TASK = (1 << 32) - 1
_MAX_BITMAP_WORDS = int(lib.SLUICE_MAX_NODES) // 64 + 1
NO_START = int(lib.SLUICE_BACKFILL_NO_START)


class DecisionError(SluiceError):
    """A file of decisions that cannot be read."""


class Mode(IntEnum):
    """For what purpose Slurm asked (``enum sluice_decision_mode``)."""

    RUN_NOW = 0
    WILL_RUN = 1
    TEST_ONLY = 2


class Outcome(IntEnum):
    """What was made of the core's answer (``enum sluice_decision_outcome``)."""

    USED = 0
    REFUSED = 1
    OVERRULED = 2
    SHADOWED = 3
    RESERVED = 4
    STOCK_FOUND = 5


FACTORS = ("priority", "age", "fair-share", "deadline", "service", "time", "size")
"""By ``enum sluice_factor``."""
SLURM_TERMS = ("age", "association", "fair-share", "job-size", "partition", "qos", "tres", "nice")
"""By ``enum sluice_queue_term``."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Who asked."""

    id: int
    array_id: int  # 0: no array
    array_task: int | None
    uid: int
    priority: int
    gpus: int
    submit: int  # seconds since 1970
    limit_s: int | None  # None: no limit
    account: str
    partition: str


@dataclass(frozen=True, slots=True)
class Image:
    """One node at a moment (``struct sluice_node_view``, without what the topology says)."""

    node: int
    state: int
    exclusive: bool
    parts: int
    cpus_milli: int
    cpus_milli_free: int
    host_memory_mib: int
    host_memory_mib_free: int
    gpus_healthy: int
    gpus_idle: int
    gpu_memory_mib_free: tuple[int, ...]
    gpu_utilisation: tuple[int, ...]  # empty: all 0
    gpu_compute_free: tuple[int, ...] = ()  # percent that nobody has claimed; empty: all 100
    nics_free: int | None = None  # None: the node has no NICs that are counted


@dataclass(frozen=True, slots=True)
class Topology:
    """The calls that made the cluster, as (call, values) in their sequence."""

    calls: tuple[tuple[int, tuple[Any, ...]], ...]

    MODEL: ClassVar[int] = 1
    SHAPE: ClassVar[int] = 2
    SWITCH: ClassVar[int] = 3
    NODE: ClassVar[int] = 4
    ORDER: ClassVar[int] = 5
    WORKLOAD: ClassVar[int] = 6
    NICS: ClassVar[int] = 7
    NIC_PLANES: ClassVar[int] = 8

    @property
    def node_names(self) -> list[str]:
        """Slurm's names of the nodes."""
        return [values[0] for call, values in self.calls if call == self.NODE]


@dataclass(frozen=True, slots=True)
class Decision:
    """One question to the core and its answer."""

    job: JobFacts
    mode: Mode
    outcome: Outcome
    planned: bool  # the placement is the planner's
    backfill: bool
    stock_answered: bool
    stock_fits: bool
    policy: Policy
    verdict: int  # enum sluice_error
    request: Request
    placement: Placement | None
    stock_nodes: tuple[int, ...]
    core_ns: int
    stock_ns: int

    @property
    def replayable(self) -> bool:
        """Whether the answer is the core's own to this request, by a policy that uses only the present state."""
        answers = (lib.SLUICE_OK, lib.SLUICE_ERROR_NO_PLACE, lib.SLUICE_ERROR_NEVER)
        return (
            not self.planned
            and self.verdict in answers
            and self.policy not in (Policy.ROUND_ROBIN, Policy.GPU_CLUSTERING)
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """Why a job had its place in the order."""

    taken: int  # seconds since 1970
    site: int
    place: int
    gpus: int
    remaining_s: int
    deadline: int  # enum sluice_deadline_verdict
    starving: bool
    laxity_s: int
    weights: dict[str, int]
    terms: dict[str, float]  # in units of weight
    slurm: dict[str, int]
    operators_site: int | None = None  # an operator set it, and `site` was not used


@dataclass(frozen=True, slots=True)
class Start:
    """The job got its nodes and GPUs."""

    job: JobFacts
    parts: tuple[Part, ...]
    rank: Rank | None
    roles: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each part the GPUs that the role has


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the planner expected the job to start."""

    job_id: int
    gang: int
    start: int | None  # seconds since 1970; None: not planned
    parts: tuple[Part, ...]
    reason: str
    planned: int


@dataclass(frozen=True, slots=True)
class Lost:
    """How many entries before this one were dropped, as slurmctld was faster than the disk."""

    count: int


Body: TypeAlias = Topology | Image | Decision | Start | Plan | Lost


@dataclass(frozen=True, slots=True)
class DecisionEntry:
    """One entry of a file."""

    sequence: int
    time_us: int
    body: Body

    @property
    def time(self) -> float:
        """Seconds since 1970."""
        return self.time_us / 1e6


class Fields:
    """The fields of one payload, one after the other."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def number(self) -> int:
        """LEB128, 64 bits."""
        data, at = self.data, self.at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise DecisionError("decision entry: a number is cut off or too long")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if value > _MAX_64:
            raise DecisionError("decision entry: a number is larger than 64 bits")
        self.at = at
        return value

    def signed(self) -> int:
        """A number in two's complement of 64 bits."""
        value = self.number()
        return value - (1 << 64) if value >> 63 else value

    def count(self, most: int) -> int:
        """A number of entries that follow."""
        value = self.number()
        if value > most:
            raise DecisionError(f"decision entry: {value} entries, at most {most} are possible")
        return value

    def raw(self, length: int) -> bytes:
        """Bytes as they are."""
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise DecisionError("decision entry: cut off")
        self.at += length
        return piece

    def text(self) -> str:
        """A short text with its length before it."""
        return self.raw(self.count(255)).decode("utf-8", "replace")

    def bitmap(self) -> frozenset[int] | None:
        """Bits that are set; None where there was no bitmap."""
        size = self.count(_MAX_BITMAP_WORDS + 1)
        if size == 0:
            return None
        bits: set[int] = set()
        word = 0
        while word < size - 1:
            run = self.count(_MAX_BITMAP_WORDS * 4 + 3)
            kind, length = run & 3, run >> 2
            if length == 0 or word + length > size - 1 or kind > 2:
                raise DecisionError("decision entry: a bitmap does not add up")
            if kind == 1:
                bits.update(range(word * 64, (word + length) * 64))
            elif kind == 2:
                number = int.from_bytes(self.raw(length * 8), "little")
                while number:
                    low = number & -number
                    bits.add(word * 64 + low.bit_length() - 1)
                    number ^= low
            word += length
        return frozenset(bits)


def _request(data: Fields) -> dict[str, Any]:
    values = [data.signed() for _ in range(8)]
    return {
        "nodes_min": values[0],
        "nodes_max": values[1],
        "gpus": values[2],
        "gpu_memory_mib": values[3],
        "cpus_milli": values[4],
        "host_memory_mib": values[5],
        "cpus_milli_per_gpu": values[6],
        "host_memory_mib_per_gpu": values[7],
        "models": data.number(),
        "capability_min": data.signed(),
        "gpu_memory_mib_min": data.signed(),
        "one_link_domain": Preference(data.number()),
        "one_numa_node": Preference(data.number()),
        "near_nic": Preference(data.number()),
        "one_switch": Preference(data.number()),
        "switch_level": data.count(_NO_TASK),
        "layout": Layout(data.number()),
        "flags": RequestFlag(data.count(_NO_TASK)),
        "seed": data.number(),
    }


def _parts(data: Fields) -> tuple[Part, ...]:
    return tuple(
        Part(
            node=data.count(_NO_TASK),
            gpus=data.count(0xFFFF),
            gpu_memory_mib=data.signed(),
            cpus_milli=data.signed(),
            host_memory_mib=data.signed(),
            exclusive=bool(data.number()),
        )
        for _ in range(data.count(int(lib.SLUICE_MAX_NODES)))
    )


def _with_nics(data: Fields, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    if data.number() != len(parts):
        raise DecisionError("decision entry: NICs of other parts")
    return tuple(replace(part, nics=data.count(_NO_TASK)) for part in parts)


def _job(data: Fields) -> JobFacts:
    job, array, task, uid, priority, gpus = (data.number() for _ in range(6))
    submit, limit = data.signed(), data.signed()
    return JobFacts(
        id=job,
        array_id=array,
        array_task=None if task == _NO_TASK else task,
        uid=uid,
        priority=priority,
        gpus=gpus,
        submit=submit,
        limit_s=None if limit < 0 else limit,
        account=data.text(),
        partition=data.text(),
    )


def _topology(data: Fields) -> Topology:
    calls: list[tuple[int, tuple[Any, ...]]] = []
    while data.at < len(data.data):
        call = data.number()
        values: tuple[Any, ...]
        if call == Topology.MODEL:
            values = (data.text(),)
        elif call == Topology.SHAPE:
            count = data.count(int(lib.SLUICE_MAX_GPUS))
            gpus = tuple(
                (data.number(), data.number(), data.signed(), data.number(), data.number(), bool(data.number()))
                for _ in range(count)
            )
            values = (gpus, tuple(data.raw(count) for _ in range(count)))
        elif call == Topology.NICS:
            gpu_count, nic_count = data.count(int(lib.SLUICE_MAX_GPUS)), data.count(int(lib.SLUICE_MAX_NICS))
            values = (NicGroups(*(tuple(data.raw(count)) for count in (gpu_count, nic_count, nic_count))),)
        elif call == Topology.NIC_PLANES:
            values = (tuple(data.raw(data.count(int(lib.SLUICE_MAX_NICS)))),)
        elif call == Topology.SWITCH:
            values = (data.number(),)
        elif call == Topology.NODE:
            values = (data.text(), data.number(), data.signed(), data.signed(), data.number())
        elif call == Topology.ORDER:
            values = tuple(data.number() for _ in range(data.count(int(lib.SLUICE_MAX_NODES))))
        elif call == Topology.WORKLOAD:
            values = tuple(
                (Request(**_request(data), allowed=data.bitmap()), data.number())
                for _ in range(data.count(int(lib.SLUICE_MAX_WORKLOAD)))
            )
        else:
            raise DecisionError(f"decision entry: topology call {call} is unknown")
        calls.append((call, values))
    return Topology(tuple(calls))


def _image(data: Fields) -> Image:
    node, state, flags, parts = (data.number() for _ in range(4))
    cpus, cpus_free, memory, memory_free = (data.signed() for _ in range(4))
    healthy, idle = data.number(), data.number()
    count = data.count(int(lib.SLUICE_MAX_GPUS))
    free = tuple(data.signed() for _ in range(count))
    return Image(
        node=node,
        state=state,
        exclusive=bool(flags & 1),
        parts=parts,
        cpus_milli=cpus,
        cpus_milli_free=cpus_free,
        host_memory_mib=memory,
        host_memory_mib_free=memory_free,
        gpus_healthy=healthy,
        gpus_idle=idle,
        gpu_memory_mib_free=free,
        gpu_utilisation=tuple(data.number() for _ in range(count)) if flags & 2 else (),
        gpu_compute_free=tuple(data.number() for _ in range(count)) if flags & 4 else (),
        nics_free=data.count(_NO_TASK) if flags & 8 else None,
    )


def _decision(data: Fields) -> Decision:
    job = _job(data)
    mode, outcome, flags = Mode(data.number()), Outcome(data.number()), data.number()
    policy, verdict = Policy(data.number()), data.number()
    asked, allowed = _request(data), data.bitmap()
    score = data.signed()
    parts = _parts(data)
    stock = tuple(data.number() for _ in range(data.count(int(lib.SLUICE_MAX_NODES))))
    core_ns, stock_ns = data.number(), data.number()
    compute = data.signed() if flags & 16 else 0
    parts = tuple(replace(part, gpu_compute_percent=compute if part.gpus else 0) for part in parts)
    nics, per_gpu, kinds, pairs = 0, 0, 0, 0
    if flags & 32:
        nics, per_gpu, kinds, pairs = data.signed(), data.signed(), data.number(), data.count(_NO_TASK)
        parts = _with_nics(data, parts)
    segment = data.signed() if flags & 64 else 0
    lower_switches, switch_layout = (data.signed(), Layout(data.number())) if flags & 128 else (0, Layout.POLICY)
    nic_planes = Layout(data.number()) if flags & 256 else Layout.POLICY
    return Decision(
        job=job,
        mode=mode,
        outcome=outcome,
        planned=bool(flags & 8),
        backfill=bool(flags & 1),
        stock_answered=bool(flags & 2),
        stock_fits=bool(flags & 4),
        policy=policy,
        verdict=verdict,
        request=Request(
            **asked,
            allowed=allowed,
            gpu_compute_percent=compute,
            segment=segment,
            nics=nics,
            nics_per_gpu=per_gpu,
            nic_kinds=kinds,
            lower_switches=lower_switches,
            switch_layout=switch_layout,
            nic_planes=nic_planes,
        ),  # fmt: skip
        placement=Placement(parts, score, pairs) if verdict == lib.SLUICE_OK else None,
        stock_nodes=stock,
        core_ns=core_ns,
        stock_ns=stock_ns,
    )


def _rank(data: Fields) -> Rank | None:
    if not data.number():
        return None
    taken, site, place_, gpus, remaining = (data.signed() for _ in range(5))
    deadline, starving, laxity = data.number(), bool(data.number()), data.signed()
    weights: dict[str, int] = {}
    terms: dict[str, float] = {}
    for index in range(data.count(64)):
        name = FACTORS[index] if index < len(FACTORS) else f"factor-{index}"
        weights[name] = data.number()
        terms[name] = data.signed() / int(lib.SLUICE_FACTOR_ONE)
    slurm = {
        SLURM_TERMS[index] if index < len(SLURM_TERMS) else f"term-{index}": data.signed()
        for index in range(data.count(64))
    }
    operators = data.signed() if data.at < len(data.data) and data.number() else None
    return Rank(
        taken=taken,
        site=site,
        place=place_,
        gpus=gpus,
        remaining_s=remaining,
        deadline=deadline,
        starving=starving,
        laxity_s=laxity,
        weights=weights,
        terms=terms,
        slurm=slurm,
        operators_site=operators,
    )


def _start(data: Fields) -> Start:
    job, parts, rank = _job(data), _parts(data), _rank(data)
    if data.at < len(data.data):
        parts = _with_nics(data, parts)
    return Start(job, parts, rank, _roles(data, len(parts)) if data.at < len(data.data) else {})


def _roles(data: Fields, parts: int) -> dict[str, tuple[int, ...]]:
    names = [data.text() for _ in range(data.count(lib.SLUICE_MAX_ROLES))]
    gpus = [[data.count(_NO_TASK) for _ in names] for _ in range(parts)]
    return {name: tuple(of_part[role] for of_part in gpus) for role, name in enumerate(names)}


def _plan(data: Fields) -> Plan:
    job, gang, start = data.number(), data.number(), data.signed()
    parts, reason = _parts(data), data.text()
    return Plan(job, gang, None if start == NO_START else start, parts, reason, data.signed())


DECISION, PLAN = 3, 5
"""The kinds of a decision's and a plan's entries."""
_READERS: dict[int, Callable[[Fields], Body]] = {
    1: _topology,
    2: _image,
    DECISION: _decision,
    4: _start,
    PLAN: _plan,
    6: lambda data: Lost(data.number()),
}


def question_of(payload: bytes) -> tuple[JobFacts, Mode, Outcome]:
    """Who asked, for what, and the outcome, of a decision's entry; cheap. Raises DecisionError when malformed."""
    data = Fields(payload)
    try:
        return _job(data), Mode(data.number()), Outcome(data.number())
    except ValueError as error:
        raise DecisionError(f"decision entry: {error}") from error


def parse_entry(kind: int, payload: bytes) -> Body | None:
    """The body of one entry; None for a kind that a later version has brought. Raises DecisionError when malformed."""
    reader = _READERS.get(kind)
    if reader is None:
        return None
    try:
        return reader(Fields(payload))
    except ValueError as error:  # a number that is not in an enumeration
        raise DecisionError(f"decision entry of type {kind}: {error}") from error


def check_header(path: Path, data: bytes) -> None:
    """Raise DecisionError unless `data` begins as a file of this format does, or is the beginning of such a file."""
    header = data[: _HEADER.size]
    if header == _HEADER.pack(_MAGIC, FORMAT, 0)[: len(header)]:
        return
    magic, version, _ = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise DecisionError(f"{path}: not a file of decisions")
    raise DecisionError(f"{path}: format {version}", remedy=f"this Sluice reads format {FORMAT}")


def read_entries(path: Path) -> Iterator[DecisionEntry]:
    """The entries of one file. Raises DecisionError for another kind of file, another format, or damage inside."""
    try:
        with path.open("rb") as file:
            check_header(path, file.read(_HEADER.size))
            yield from _read_all(path, file)
    except OSError as error:
        raise DecisionError(f"{path}: {error.strerror}") from error


def _read_all(path: Path, file: Any) -> Iterator[DecisionEntry]:
    while True:
        place_ = file.tell()
        head = file.read(ENTRY_HEAD.size)
        if len(head) < ENTRY_HEAD.size:
            return
        length, kind, _, sequence, time_us = ENTRY_HEAD.unpack(head)
        if length > _MAX_PAYLOAD:
            raise DecisionError(f"{path}: byte {place_}: an entry of {length} bytes: the file is damaged")
        payload, checksum = file.read(length), file.read(4)
        if len(checksum) < 4:
            return
        if zlib.crc32(payload, zlib.crc32(head)) != int.from_bytes(checksum, "little"):
            raise DecisionError(f"{path}: byte {place_}: checksum wrong: the file is damaged")
        body = parse_entry(kind, payload)
        if body is not None:
            yield DecisionEntry(sequence, time_us, body)


def list_files(folder: Path) -> list[Path]:
    """The decision files of a folder, the oldest first; none where there is no such folder. Raises DecisionError."""
    try:
        return sorted(path for path in folder.iterdir() if _NAME.match(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DecisionError(
            f"{folder}: {error.strerror}", remedy="run it as root or SlurmUser, who alone can read decisions"
        ) from error


@dataclass
class Replay:
    """A cluster of the core that follows the entries of one file; use `feed` for each entry, then ask.

    Node images are taken in when a question is asked, the last of each node only: that is what the core knew then.
    """

    cluster: Cluster | None = None
    topology: Topology | None = None
    _fresh: dict[int, Image] = field(default_factory=dict)
    _held: dict[int, list[int]] = field(default_factory=dict)
    _memory: list[tuple[int, ...]] = field(default_factory=list)  # of the GPUs of each shape
    _shape: list[int] = field(default_factory=list)  # of each node
    _nics: dict[int, NicGroups] = field(default_factory=dict)  # of shapes

    def feed(self, entry: DecisionEntry) -> None:
        """Follow one entry; only topologies and images change anything."""
        if isinstance(entry.body, Topology):
            self.topology = entry.body
            self.cluster = None
            self._fresh, self._held = {}, {}
        elif isinstance(entry.body, Image):
            self._fresh[entry.body.node] = entry.body

    def ready(self) -> Cluster:
        """The cluster as it was at the last entry. Raises DecisionError where entries contradict each other."""
        if self.topology is None:
            raise DecisionError("decisions: no topology before the first decision")
        try:
            if self.cluster is None:
                self.cluster = self._build(self.topology)
            for node in self._fresh:
                for allocation in self._held.pop(node, ()):
                    release(self.cluster, allocation)
            for image in self._fresh.values():
                self._take(self.cluster, image)
        except (CoreError, IndexError) as error:
            raise DecisionError(f"decisions: a node's image does not fit the topology: {error}") from error
        self._fresh = {}
        return self.cluster

    def ask(self, decision: Decision) -> tuple[int, Placement | None]:
        """The core's answer now: verdict (``enum sluice_error``) and placement."""
        try:
            placement = place(self.ready(), decision.policy, decision.request)
        except CoreError as error:
            return error.code, None
        if placement is None:
            return int(lib.SLUICE_ERROR_NO_PLACE), None
        return int(lib.SLUICE_OK), placement

    def agrees(self, decision: Decision) -> bool:
        """Whether the core decides now as is recorded."""
        return self.ask(decision) == (decision.verdict, decision.placement)

    def explain(self, decision: Decision) -> Explanation:
        """Why the core decided so."""
        return explain(self.ready(), decision.policy, decision.request)

    def free_without_nic(self, node: int, kinds: int) -> int:
        """How many GPUs of a node are free, while no NIC near them is of these kinds (0: any) and free."""
        view, nics = self.ready().node(node), self._nics.get(self._shape[node])
        if nics is None:
            return 0
        near = {
            group
            for nic, (group, kind) in enumerate(zip(nics.nics, nics.kinds, strict=True))
            if view.nics_free >> nic & 1 and (not kinds or kinds >> kind & 1)
        }
        return sum(view.gpus_idle >> gpu & 1 for gpu, group in enumerate(nics.gpus) if group not in near)

    def _build(self, topology: Topology) -> Cluster:
        nodes = sum(call == Topology.NODE for call, _ in topology.calls)
        cluster = Cluster(
            max(nodes, 1),
            max_switches=max(sum(call == Topology.SWITCH for call, _ in topology.calls), 1),
            max_allocations=max(nodes, 1) * 32,
        )
        self._memory, self._shape, self._nics = [], [], {}
        shapes: dict[int, tuple[int, ...]] = {}
        nics: NicGroups | None = None
        for call, values in topology.calls:
            if call == Topology.MODEL:
                cluster.add_model(values[0])
            elif call == Topology.SHAPE:
                number = _add_shape(cluster, values, nics)
                shapes[number] = tuple(gpu[2] for gpu in values[0])
                if nics is not None:
                    self._nics[number] = nics
                nics = None
            elif call == Topology.NICS:
                nics = values[0]
            elif call == Topology.NIC_PLANES:
                nics = replace(nics, planes=values[0]) if nics is not None else None
            elif call == Topology.SWITCH:
                cluster.add_switch(values[0])
            elif call == Topology.NODE:
                _, shape, cpus, memory, switch = values
                cluster.add_node(shape, cpus, memory, switch)
                self._shape.append(shape)
            elif call == Topology.ORDER:
                cluster.set_order(values or None)
            else:
                set_workload(cluster, values)
        self._memory = [shapes[number] for number in range(len(shapes))]
        return cluster

    def _take(self, cluster: Cluster, image: Image) -> None:
        memory = self._memory[self._shape[image.node]]
        if len(image.gpu_memory_mib_free) != len(memory):
            raise DecisionError(f"decisions: node {image.node} has {len(memory)} GPUs, its image others")
        node = image.node
        view = cluster.node(node)
        if (view.cpus_milli, view.host_memory_mib) != (image.cpus_milli, image.host_memory_mib):
            cluster.resize_node(node, image.cpus_milli, image.host_memory_mib)
        cluster.set_state(node, lib_state(image.state))
        for gpu in range(len(memory)):
            cluster.set_health(node, gpu, bool(image.gpus_healthy >> gpu & 1))
            if any(view.gpu_utilisation) or image.gpu_utilisation:
                cluster.set_utilisation(node, gpu, image.gpu_utilisation[gpu] if image.gpu_utilisation else 0)
        parts = held_parts(image, memory, view.nic_count)
        if parts:
            self._held[node] = [commit(cluster, [part]) for part in parts]


def lib_state(number: int) -> Any:
    """A node's state. Raises DecisionError for a number that is none."""
    from sluice.core.cluster import NodeState

    try:
        return NodeState(number)
    except ValueError as error:
        raise DecisionError(f"decisions: {error}") from error


def _add_shape(cluster: Cluster, values: tuple[Any, ...], nics: NicGroups | None) -> int:
    gpus, links = values
    shape, text, number = ffi.new("struct sluice_node_shape *"), new_error_text(), ffi.new("uint32_t *")
    shape.gpu_count = len(gpus)
    for index, (model, capability, memory, link_domain, numa_node, near_nic) in enumerate(gpus):
        gpu = shape.gpus[index]
        gpu.model, gpu.capability, gpu.memory_mib = model, capability, memory
        gpu.link_domain, gpu.numa_node, gpu.near_nic = link_domain, numa_node, near_nic
        for other, weight in enumerate(links[index]):
            shape.links[index][other] = weight
    if nics is not None:
        fill_nics(shape.nics, nics)
    check(lib.sluice_cluster_add_shape(cluster.handle, shape, number, text), text)
    return int(number[0])


def held_parts(image: Image, memory: tuple[int, ...], nic_count: int = 0) -> list[Part]:
    """Parts that leave a node as the image has it: GPUs of which equally much is held are in one part."""
    groups: dict[tuple[int, int], int] = {}
    unclaimed = image.gpu_compute_free or (100,) * len(memory)
    for gpu, (free, whole, compute) in enumerate(zip(image.gpu_memory_mib_free, memory, unclaimed, strict=True)):
        if free < whole:
            held = whole - free if free else 0, 100 - compute
            groups[held] = groups.get(held, 0) | 1 << gpu
    cpus = image.cpus_milli - image.cpus_milli_free
    host_memory = image.host_memory_mib - image.host_memory_mib_free
    if not groups and not image.parts:
        return []
    parts = [Part(image.node, gpus, held, gpu_compute_percent=compute) for (held, compute), gpus in groups.items()] or [
        Part(image.node)
    ]
    first = parts[0]
    nics = 0 if image.nics_free is None else ~image.nics_free & ((1 << nic_count) - 1)
    parts[0] = replace(first, cpus_milli=cpus, host_memory_mib=host_memory, exclusive=image.exclusive, nics=nics)
    return parts


@dataclass(frozen=True, slots=True)
class Check:
    """What replaying a file showed."""

    replayed: int
    different: tuple[str, ...]  # one line for each decision with another result
    not_replayable: int
    lost: int


def check_file(path: Path) -> Check:
    """Replay every decision of a file."""
    replay = Replay()
    replayed = skipped = lost = 0
    different: list[str] = []
    for entry in read_entries(path):
        replay.feed(entry)
        if isinstance(entry.body, Lost):
            lost += entry.body.count
        if not isinstance(entry.body, Decision):
            continue
        if not entry.body.replayable:
            skipped += 1
            continue
        replayed += 1
        answer = replay.ask(entry.body)
        if answer != (entry.body.verdict, entry.body.placement):
            recorded = (entry.body.verdict, entry.body.placement)
            different.append(f"{path}: entry {entry.sequence}, job {entry.body.job.id}: {recorded}, now {answer}")
    return Check(replayed, tuple(different), skipped, lost)
