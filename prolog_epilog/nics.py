"""What the node's network interfaces count while jobs run: of each interface, and of a job that has one to itself.

Everything is read from sysfs: the ports of RDMA interfaces (InfiniBand, RoCE), and interfaces of plain Ethernet.
Reading asks the adapters' firmware and may hang, so it has a thread of its own and its results have an age.

What is counted here only grows: a counter of 32 bits that wraps goes on, one that a reset or a reloaded driver has set
back counts from there. Counters of an InfiniBand port (IBTA, volume 1, 16.1.3.5) do not wrap but stay at their maximum.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gres_probe.inventory import Inventory
from prolog_epilog import cgroups
from prolog_epilog.state import State
from sluice.exchange.record import JobRecord

NICS_S = 5.0
"""Between two readings."""
_FRESH_S = 4 * NICS_S
_MOST_NICS = 64
_MOST_PORTS = 4  # of an adapter
_MOST_BYTES = 32  # of a file
_GROWN_UP = 3 << 30  # a counter of 32 bits that was here, and is then below the next, has wrapped
_BEGUN = 1 << 30

_MAXIMUM = {
    "symbol_error": 0xFFFF, "port_rcv_errors": 0xFFFF, "port_xmit_discards": 0xFFFF,
    "link_error_recovery": 0xFF, "link_downed": 0xFF, "port_xmit_wait": 0xFFFF_FFFF,
}  # fmt: skip
"""Where counters of InfiniBand's ports stay."""

_WORDS = 4  # bytes; InfiniBand counts in words
_PORT = {
    "transmit_bytes": ("port_xmit_data",),
    "receive_bytes": ("port_rcv_data",),
}
_INFINIBAND = {
    "link_downs": ("link_downed",),
    "link_recoveries": ("link_error_recovery",),
    "symbol_errors": ("symbol_error",),
    "receive_errors": ("port_rcv_errors",),
    "transmit_discards": ("port_xmit_discards",),
    "transmit_wait_ticks": ("port_xmit_wait",),
}
_HARDWARE = {  # the names that mlx5, bnxt_re, irdma, efa and rxe have for it
    "retransmissions": (
        "packet_seq_err", "local_ack_timeout_err", "implied_nak_seq_err", "rnr_nak_retry_err",
        "to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd", "tcpRetransSegs", "retrans_pkts",
        "completer_retry_err", "rcvd_seq_err", "rcvd_rnr_err",
    ),
    "out_of_sequence": ("out_of_sequence", "oos_drop_count", "out_of_seq_request"),
    "congestion_marks": ("np_ecn_marked_roce_packets", "rx_ecn_marked_pkts", "RxECNMrkd"),
    "congestion_notifications": ("rp_cnp_handled", "rx_cnp_pkts", "cnpHandled"),
}  # fmt: skip
_WIRE = {  # of a network interface, below /sys/class/net/NAME
    "link_downs": ("carrier_down_count",),
    "symbol_errors": ("statistics/rx_crc_errors",),
    "receive_errors": ("statistics/rx_errors",),
    "transmit_discards": ("statistics/tx_errors",),
}
_ETHERNET = {
    "transmit_bytes": ("statistics/tx_bytes",),
    "receive_bytes": ("statistics/rx_bytes",),
    **_WIRE,
}


@dataclass
class _File:
    """One counter in sysfs."""

    path: str
    field: str
    factor: int = 1
    maximum: int | None = None  # where it stays
    last: int | None = None

    def grown(self) -> int:
        """Since the reading before; 0 the first time. Raises OSError, ValueError where it is not there or no number."""
        value = int(_text(self.path))
        before, self.last = self.last, value
        if before is None:
            return 0
        if value >= before:
            return (value - before) * self.factor
        if self.maximum is None and _GROWN_UP <= before < 1 << 32 and value < _BEGUN:
            return (value + (1 << 32) - before) * self.factor
        return value * self.factor

    @property
    def full(self) -> bool:
        """It counts no further until it is reset (perfquery -R)."""
        return self.maximum is not None and self.last == self.maximum


@dataclass
class Interface:
    """One network interface. Counts are those since the agent started; only what its driver has is among them."""

    name: str
    kind: str  # ib, roce, ethernet
    states: list[str] = field(default_factory=list)  # paths of its ports' state
    files: list[_File] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    up: bool | None = None  # None: not known
    present: bool = True

    @property
    def full(self) -> int:
        """Counters that stay at their maximum."""
        return sum(file.full for file in self.files)

    def read(self) -> Counter[str]:
        """Read all counters; what has grown. A driver may refuse one that it lists."""
        grown: Counter[str] = Counter()
        for file in self.files:
            with suppress(OSError, ValueError):
                grown[file.field] += file.grown()
        self.counts.update(grown)
        self.up = _all_up(self.states)
        return grown


@dataclass
class _Use:
    """One job and one interface."""

    shared: bool = False  # others could use it, for some of the time
    counts: Counter[str] = field(default_factory=Counter)  # while it was the job's alone

    def report(self) -> dict[str, Any]:
        """The part of the job's record."""
        return {"shared": self.shared, **{name: count for name, count in self.counts.items() if count}}


Job = tuple[int, float]
"""A job's number and its start here."""


class Nics:
    """The node's interfaces and the jobs that have them. Thread-safe; sysfs is read without the lock."""

    def __init__(
        self,
        state: State,
        root: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
        jobs_here: Callable[[], set[int]] = cgroups.jobs_here,
    ) -> None:
        self._state = state
        self._root = root
        self._clock = clock
        self._jobs_here = jobs_here
        self._lock = threading.Lock()  # guards all below
        self._interfaces: dict[str, Interface] = {}
        self._expected: set[str] = set()  # adapters that the inventory has
        self._shown: list[Interface] = []  # as they were at the last reading
        self._read_at: float | None = None
        self._closed: set[str] = set()  # interfaces that some step could not open: Slurm gives them to jobs
        self._alone: dict[str, Job] = {}  # who had an interface to itself at the last reading
        self._uses: dict[Job, dict[str, _Use]] = {}

    def start(self, inventory: Inventory) -> None:
        """Know the adapters that should be here: those that are hardware, and no virtual functions."""
        self._expected = {nic.name for nic in inventory.nics if nic.pci_address and not nic.parent}

    # ---- who may use what ----

    def opened(self, record: JobRecord, nics: Iterable[str]) -> None:
        """A step of the job can open these RDMA interfaces, as root has tried in its cgroup. The record is kept by
        the caller, who holds the state's lock."""
        known = set(self._state.nics)
        can = known & set(nics)
        record.nics = sorted({*(record.nics or ()), *can})
        closed = {nic for nic in known - can if os.path.exists(self._state.nics[nic])}  # noqa: PTH110
        job = (record.job, record.started)
        with self._lock:
            self._closed |= closed
            for nic in can & {nic for nic, owner in self._alone.items() if owner != job}:
                use = self._uses.get(self._alone.pop(nic), {}).get(nic)
                if use is not None:
                    use.shared = True  # also where this job ends before the next reading

    def _owners(self) -> tuple[dict[str, list[Job]], set[int]]:
        """The jobs that can open each interface; and all jobs of which it is known. The caller holds the state's lock.

        Of those with GPUs no step begins without `opened`, but steps of an earlier version may still run.
        """
        found: dict[str, list[Job]] = {}
        for record in self._state.records.values():
            for nic in record.nics or ():
                found.setdefault(nic, []).append((record.job, record.started))
        return found, {job for job, record in self._state.records.items() if record.nics is not None}

    # ---- readings ----

    def run(self) -> None:
        """A duty: read all counters, and count what has grown for the jobs that had an interface to themselves."""
        interfaces = self._find()
        grown = {name: one.read() for name, one in interfaces.items() if one.present}
        here = self._jobs_here()
        with self._state.lock, self._lock:
            owners, known = self._owners()
            self._interfaces = interfaces
            self._shown = [replace(one, counts=Counter(one.counts)) for _, one in sorted(interfaces.items())]
            self._read_at = self._clock()
            for nic, jobs in owners.items():
                self._count(nic, jobs, not here <= known, grown.get(nic, Counter()))
            self._alone = {nic: job for nic, job in self._alone.items() if job in owners.get(nic, ())}
            having = {job for jobs in owners.values() for job in jobs}
            self._uses = {job: uses for job, uses in self._uses.items() if job in having}

    def _count(self, nic: str, jobs: list[Job], others: bool, grown: Mapping[str, int]) -> None:
        """Where a job has it alone now, and had at the reading before, what has grown meanwhile is the job's.

        `others`: there are jobs, as those without GPUs, which can use it where devices are not confined.
        """
        alone = len(jobs) == 1 and (nic in self._closed or not others)
        for job in jobs:
            use = self._uses.setdefault(job, {}).setdefault(nic, _Use())
            use.shared = use.shared or not alone
        before = self._alone.pop(nic, None)
        if alone:
            self._alone[nic] = jobs[0]
            if before == jobs[0]:
                self._uses[jobs[0]][nic].counts.update(grown)

    def _find(self) -> dict[str, Interface]:
        """The interfaces that are there now, and those that were: an adapter that has gone keeps its counts.

        Of many, such as virtual functions, those of the inventory come first, and then those that jobs can have.
        """
        found = dict(self._interfaces)  # this thread's alone
        names = _names(self._root / "class/infiniband")
        names.sort(key=lambda name: (name not in self._expected, name not in self._state.nics))
        ports = {name: self._ports(name) for name in names[:_MOST_NICS]}
        for name, folders in ports.items():
            if folders and (name not in found or not found[name].present):
                found[name] = _again(found.get(name), self._rdma(name, folders))
        behind = {net for folders in ports.values() for folder in folders if (net := _network(folder))}
        ethernet = [name for name in _names(self._root / "class/net") if name not in behind and self._is_hardware(name)]
        for name in ethernet[:_MOST_NICS]:
            if name not in found or not found[name].present:
                folder = self._root / "class/net" / name
                found[name] = _again(found.get(name), _ethernet(name, folder))
        here = {*(name for name, folders in ports.items() if folders), *ethernet}
        for name, one in found.items():
            one.present = name in here
            one.up = one.up if one.present else None
        gone = [name for name, one in found.items() if not one.present and name not in self._expected]
        for name in gone[:-_MOST_NICS]:  # the longest known; names may come and go without end
            del found[name]
        return found

    def _ports(self, name: str) -> list[Path]:
        folder = self._root / "class/infiniband" / name / "ports"
        return [folder / port for port in _names(folder)[:_MOST_PORTS]]

    def _is_hardware(self, net: str) -> bool:
        return (self._root / "class/net" / net / "device").exists()

    def _rdma(self, name: str, ports: list[Path]) -> Interface:
        layers = {_said(port / "link_layer") for port in ports}
        found = Interface(name, "ib" if layers == {"InfiniBand"} else "roce", [str(port / "state") for port in ports])
        for port in ports:
            found.files += _files(port / "counters", _PORT, factor=_WORDS)
            if _said(port / "link_layer") == "InfiniBand":
                found.files += _files(port / "counters", _INFINIBAND, _MAXIMUM)
            elif net := _network(port):
                found.files += _files(self._root / "class/net" / net, _WIRE)
            found.files += _files(port / "hw_counters", _HARDWARE)
        return found

    # ---- what others read ----

    def interfaces(self) -> list[Interface] | None:
        """All that are or were here, by name, as last read; None where that is too long ago."""
        with self._lock:
            if self._read_at is None or self._clock() - self._read_at > _FRESH_S:
                return None
            return self._shown

    def gone(self) -> list[str] | None:
        """Adapters of the inventory that the kernel does not have any more."""
        found = self.interfaces()
        return None if found is None else sorted(self._expected - {one.name for one in found if one.present})

    def rdma_counts(self) -> dict[str, dict[str, int]] | None:
        """The counts of each RDMA interface since the agent started; None where they are too old."""
        found = self.interfaces()
        return None if found is None else {one.name: dict(one.counts) for one in found if one.kind != "ethernet"}

    def uses(self) -> dict[Job, dict[str, dict[str, Any]]]:
        """What `of_job` says, of each job that has interfaces."""
        with self._lock:
            return {job: {nic: use.report() for nic, use in sorted(uses.items())} for job, uses in self._uses.items()}

    def of_job(self, record: JobRecord) -> dict[str, Any]:
        """The part of `JobRecord.usage` of a job: ``nics``, by interface whether it was ``shared``, and what grew while
        it was not; empty where it has none, or has just begun."""
        found = self.uses().get((record.job, record.started))
        return {"nics": found} if found else {}

    def finish(self, record: JobRecord) -> None:
        """Put the sums into the record of a job that ends."""
        found = self.of_job(record)
        if found and record.usage is not None:
            record.usage |= found
        with self._lock:
            self._uses.pop((record.job, record.started), None)


def _again(before: Interface | None, now: Interface) -> Interface:
    """An interface that is found, as it may have been before: then its counters go on where they were."""
    if before is not None:
        last = {file.path: file.last for file in before.files}
        now.counts = before.counts
        for file in now.files:
            file.last = last.get(file.path)
    return now


def _ethernet(name: str, folder: Path) -> Interface:
    return Interface(name, "ethernet", [str(folder / "carrier")], _files(folder, _ETHERNET))


def _files(
    folder: Path, fields: Mapping[str, Collection[str]], maximum: Mapping[str, int] | None = None, factor: int = 1
) -> list[_File]:
    """Those of the counters that are there."""
    return [
        _File(str(folder / name), field, factor, (maximum or {}).get(name))
        for field, names in fields.items()
        for name in names
        if (folder / name).exists()
    ]


def _network(port: Path) -> str:
    """The network interface of a port of RoCE; empty: none."""
    name = _said(port / "gid_attrs/ndevs/0") if _said(port / "link_layer") != "InfiniBand" else ""
    return name if name and "/" not in name else ""


def _all_up(states: Iterable[str]) -> bool | None:
    """Ports of RDMA say "4: ACTIVE", network interfaces 1; one that is switched off cannot be read (EINVAL)."""
    found = []
    for path in states:
        with suppress(OSError):
            found.append(_text(path) in ("4: ACTIVE", "1"))
    return all(found) if found else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _said(path: Path) -> str:
    try:
        return _text(str(path))
    except OSError:
        return ""


def _text(path: str) -> str:
    """A short file, in one read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
