"""What the controllers write into their shared state folder: heartbeat, lease, status of each, and events."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.events import Event, read
from sluice.slurm.slurm_conf import read_config

_HEARTBEAT = struct.Struct(">QQ")  # time, index among SlurmctldHost (slurmctld/heartbeat.c)
_MOST_BYTES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The controllers in slurm.conf."""

    hosts: tuple[str, ...]
    """Short names, the primary first."""
    folder: Path
    """StateSaveLocation."""
    timeout_s: int
    """SlurmctldTimeout."""
    holds: bool = False
    """Whether Slurm holds jobs whose launch failed: no nohold_on_prolog_fail among SchedulerParameters."""
    accounting: bool = False
    """Whether there is slurmdbd."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease's file (slurm_plugin/supervisor/lease.h)."""

    epoch: int
    held: bool
    host: str
    valid_s: float
    age_s: float
    """Since it was renewed, by the clock of the storage and ours."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Slurm's own sign of life of the controller in charge."""

    host: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Member:
    """The status that one controller writes into the shared folder."""

    host: str
    supervisor: dict[str, Any] = field(default_factory=dict)
    """sluice.supervise.HOST; empty: there is none."""
    supervisor_written: float = 0.0
    """When, by the clock of the storage."""
    plugins: dict[str, Any] = field(default_factory=dict)
    """sluice.status.HOST; empty: there is none."""


def read_cluster(slurm_conf: Path) -> Cluster:
    """The controllers in slurm.conf, so that it is known when none of them answers. Raises SluiceError."""
    hosts: list[str] = []
    values = {
        "statesavelocation": "/var/spool",
        "slurmctldtimeout": "120",
        "schedulerparameters": "",
        "accountingstoragetype": "",
    }
    for line in read_config(slurm_conf).lines:
        for value in line.pairs:
            key = value.key.lower()
            if key == "slurmctldhost":
                hosts.append(value.text.partition("(")[0].partition(".")[0])
            elif key in values:
                values[key] = value.text
    if not hosts:
        raise SluiceError(f"{slurm_conf}: no SlurmctldHost", remedy="add a SlurmctldHost line for each controller")
    timeout = re.match(r"\d{1,9}", values["slurmctldtimeout"])
    holds = "nohold_on_prolog_fail" not in values["schedulerparameters"].lower()
    timeout_s = int(timeout[0]) if timeout else 120
    accounting = values["accountingstoragetype"].lower().endswith("slurmdbd")
    return Cluster(tuple(hosts), Path(values["statesavelocation"]), timeout_s, holds, accounting)


def check_folder(folder: Path) -> None:
    """Raise SluiceError where the shared folder cannot be read from here."""
    try:
        os.listdir(folder)
    except OSError as error:
        raise SluiceError(
            f"StateSaveLocation {folder}: {error.strerror}", remedy="run this on a controller, as root or SlurmUser"
        ) from error


def heartbeat(cluster: Cluster, now: float) -> Heartbeat | None:
    """Who is in charge, by Slurm's heartbeat; with one controller there is none."""
    for _ in range(3):  # it is replaced by unlink and link
        with suppress(FileNotFoundError):
            data = (cluster.folder / "heartbeat").read_bytes()
            if len(data) == _HEARTBEAT.size:
                written, index = (int(part) for part in _HEARTBEAT.unpack(data))
                return Heartbeat(cluster.hosts[index], now - written) if index < len(cluster.hosts) else None
    return None


def lease(folder: Path, now: float) -> Lease | None:
    """The lease; None when there is none, or it cannot be parsed."""
    text = _read(folder / "sluice.lease")
    if text is None:
        return None
    words = dict(line.partition(" ")[::2] for line in text.splitlines())
    try:
        if words["sluice-lease"] != "1" or not _HOST.fullmatch(words["host"]):
            return None
        age = now - (folder / "sluice.lease").stat().st_mtime
        return Lease(int(words["epoch"]), words["state"] == "held", words["host"], int(words["valid-ms"]) / 1000, age)
    except (KeyError, ValueError, OSError):
        return None


def member(folder: Path, host: str) -> Member:
    """The status of a controller; what cannot be parsed is left out."""
    path = folder / f"sluice.supervise.{host}"
    supervisor, plugins = _object(path), _object(folder / f"sluice.status.{host}")
    written = path.stat().st_mtime if supervisor else 0.0
    return Member(host, supervisor, written, plugins)


def history(cluster: Cluster, since: dict[str, int] | None = None) -> list[Event]:
    """Events of the supervisors, oldest first; `since`: for each host the last seq that is known already."""
    found: list[Event] = []
    for host in cluster.hosts:
        found += read(cluster.folder / f"sluice.failover.{host}.jsonl", (since or {}).get(host, 0))
    return sorted(found, key=lambda event: event.time)


def _read(path: Path) -> str | None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
    return None


def _object(path: Path) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        document = json.loads(_read(path) or "null")
        if isinstance(document, dict) and document.get("schema_version") == 1:
            return document
    return {}
