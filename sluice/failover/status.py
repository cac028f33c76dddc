"""Whether the other controller is ready: read-only checks of everything that a takeover needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sluice.base.errors import SluiceError
from sluice.base.run import CommandError, run_command
from sluice.base.slurm_version import SlurmVersion
from sluice.failover import shared
from sluice.slurm import SlurmClient

SCHEMA_VERSION = 1
FRESH_S = 10.0
"""A supervisor writes every two seconds."""
SKEW_S = 1.0
SLOW_WRITE_MS = 500.0
LAG_MS = 1000
_NEEDS_USAGE: SlurmVersion = (25, 5, 0)
_COMPARED: dict[str, Callable[[dict[str, Any]], object]] = {
    "Slurm's version": lambda report: report.get("slurm_version"),
    "the level": lambda report: report.get("level_asked"),
    "the policy": lambda report: (report.get("policy") or {}).get("checksum"),
}
_LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; a `problem` may prevent a takeover, a `remark` does not."""

    kind: Literal["ok", "remark", "problem"]
    what: str
    remedy: str = ""


@dataclass(slots=True)
class Status:
    """What is known of the controllers."""

    hosts: tuple[str, ...]
    leader: str | None
    up: dict[str, bool]
    lease: shared.Lease | None
    journal: dict[str, int]
    """Counters of the leader's journal, without their common prefix; empty: there is none."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """What should be corrected."""
        return [finding for finding in self.findings if finding.kind == "problem"]

    def document(self) -> dict[str, Any]:
        """For --json."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def look(cluster: shared.Cluster, client: SlurmClient) -> Status:
    """Check everything. Raises SluiceError only where the shared folder cannot be read."""
    shared.check_folder(cluster.folder)
    now = time.time()
    members = {host: shared.member(cluster.folder, host) for host in cluster.hosts}
    lease = shared.lease(cluster.folder, now)
    try:
        up = {controller.host.partition(".")[0]: controller.up for controller in client.ping()}
    except SluiceError:
        up = {}
    beat = shared.heartbeat(cluster, now)
    leader = beat.host if beat and beat.age_s <= cluster.timeout_s else None
    if len(cluster.hosts) == 1:
        leader = cluster.hosts[0] if any(up.values()) else None
    status = Status(cluster.hosts, leader, up, lease, _journal(members.get(leader or "")))
    for look_at in (
        _controllers(status, beat),
        _folder(cluster, members, now),
        _lease(cluster, status, members),
        _alike(members),
        _munge(),
        _journal_findings(status),
        _requeue(cluster),
        _usage(cluster, client),
    ):
        status.findings += look_at
    return status


def _controllers(status: Status, beat: shared.Heartbeat | None) -> Iterator[Finding]:
    if len(status.hosts) < 2:
        yield Finding("problem", "slurm.conf names one controller", "add a second SlurmctldHost line")
    for host in status.hosts:
        if status.up.get(host):
            yield Finding("ok", f"{host} answers")
        else:
            yield Finding("problem", f"{host}: slurmctld does not answer", f"on {host}: systemctl status slurmctld")
    if status.leader:
        yield Finding("ok", f"{status.leader} leads" + (f" (heartbeat {beat.age_s:.0f} s old)" if beat else ""))
        if status.leader != status.hosts[0]:
            yield Finding("remark", f"the primary, {status.hosts[0]}, does not lead", "start its slurmctld to return")
    else:
        said = f"the last heartbeat, of {beat.host}, is {beat.age_s:.0f} s old" if beat else "there is no heartbeat"
        yield Finding("problem", f"no controller leads: {said}", "start slurmctld")


def _folder(cluster: shared.Cluster, members: dict[str, shared.Member], now: float) -> Iterator[Finding]:
    kind = _file_system(cluster.folder)
    if len(cluster.hosts) > 1 and kind in _LOCAL_FILE_SYSTEMS:
        yield Finding(
            "remark",
            f"{cluster.folder} is on {kind}: it may not be the same folder on all controllers",
            "a backup needs a shared file system (NFS, Lustre, GPFS ...)",
        )
    for host, member in members.items():
        if not member.supervisor:
            yield Finding("remark", f"{host}: slurmctld runs without sluice-supervise", "docs/failover.md, Set-up")
            continue
        age = now - member.supervisor_written
        if age > FRESH_S:
            yield Finding(
                "problem",
                f"{host}: has written nothing into {cluster.folder} for {age:.0f} s",
                f"on {host}: check that slurmctld runs and the folder is mounted and writable",
            )
            continue
        slowest = _number(member.supervisor, "slowest_write_ms")
        if slowest > SLOW_WRITE_MS:
            yield Finding("remark", f"{host}: a write into {cluster.folder} took {slowest:.0f} ms", "check the storage")
        else:
            yield Finding("ok", f"{host} writes into {cluster.folder} (at most {slowest:.0f} ms)")
    clocks = {
        host: _number(member.supervisor, "time") - member.supervisor_written
        for host, member in members.items()
        if member.supervisor
    }
    for host, ahead in clocks.items():
        if abs(ahead) > SKEW_S:
            yield Finding("problem", f"{host}: its clock is {ahead:+.1f} s off the storage's", "synchronise the clocks")
    if clocks and all(abs(ahead) <= SKEW_S for ahead in clocks.values()):
        yield Finding("ok", f"clocks of {', '.join(clocks)} agree with the storage's")


def _usage(cluster: shared.Cluster, client: SlurmClient) -> Iterator[Finding]:
    """A new cluster saves associations' usage after five minutes; from 25.05 on a backup ends that does not find it."""
    with suppress(SluiceError):
        path = cluster.folder / "assoc_usage"
        two = len(cluster.hosts) > 1
        if two and cluster.accounting and not path.exists() and client.version() >= _NEEDS_USAGE:
            yield Finding("problem", f"{path}: not saved yet; a backup would end at once", "run: scontrol reconfigure")


def _lease(cluster: shared.Cluster, status: Status, members: dict[str, shared.Member]) -> Iterator[Finding]:
    lease = status.lease
    if lease is None:
        if any(member.supervisor for member in members.values()):
            yield Finding("problem", f"{cluster.folder / 'sluice.lease'}: missing or damaged", "docs/failover.md")
        return
    if lease.held and lease.host == status.leader:
        yield Finding("ok", f"the lease is {lease.host}'s (epoch {lease.epoch}, {lease.valid_s:g} s)")
    elif status.leader:
        state = "held by" if lease.held else "released by"
        yield Finding(
            "problem",
            f"{status.leader} leads, but the lease is {state} {lease.host}",
            f"on {status.leader}: run slurmctld under sluice-supervise",
        )
    if cluster.timeout_s < 2 * lease.valid_s:
        yield Finding(
            "remark",
            f"SlurmctldTimeout={cluster.timeout_s} is less than twice the lease of {lease.valid_s:g} s",
            "the backup may try before the lease ends: raise it, or shorten the lease",
        )
    for host, member in members.items():
        if member.supervisor and member.plugins and member.plugins.get("pid") != member.supervisor.get("slurmctld"):
            yield Finding("problem", f"{host}: the supervised slurmctld is not the one with the plugins")


def _alike(members: dict[str, shared.Member]) -> Iterator[Finding]:
    with_plugins = {host: member.plugins for host, member in members.items() if member.plugins}
    for host in members:
        if len(with_plugins) and host not in with_plugins:
            yield Finding("problem", f"{host}: Sluice's plugins are not loaded", f"on {host}: sluice plugin check")
    for name, value in _COMPARED.items():
        values = {host: value(report) for host, report in with_plugins.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{host}: {text}" for host, text in values.items())
            yield Finding("problem", f"{name} differs ({shown})", "make it the same on both controllers")
        elif len(values) > 1:
            yield Finding("ok", f"{name} is the same on both ({next(iter(values.values()))})")


def _munge() -> Iterator[Finding]:
    try:
        made = run_command(["munge", "-n"], timeout=10)
        run_command(["unmunge"], timeout=10, input_text=made.stdout)
        yield Finding("ok", "MUNGE works here; a controller that answers accepted our credential")
    except CommandError as error:
        yield Finding("problem", f"munge: {error.what}", "start munged; the key must be the same on all hosts")


def _journal(leader: shared.Member | None) -> dict[str, int]:
    counters = (leader.plugins.get("counters") if leader else None) or {}
    return {
        name.removeprefix("journal."): value
        for name, value in counters.items()
        if name.startswith("journal.") and isinstance(value, int)
    }


def _journal_findings(status: Status) -> Iterator[Finding]:
    journal = status.journal
    if not journal.get("open"):
        if status.leader:
            yield Finding("remark", "no journal: what Slurm has not saved yet is lost", "docs/failover.md, Journal")
        return
    if journal.get("error"):
        yield Finding(
            "problem",
            f"the journal cannot be written: {os.strerror(journal['error'])}",
            "free space, check the storage",
        )
    elif journal.get("lag_ms", 0) > LAG_MS:
        yield Finding("problem", f"the journal is {journal['lag_ms']} ms behind", "check the storage")
    else:
        entries = journal.get("entries", journal.get("records", 0))  # "records": plugins from before 0.1.0
        yield Finding("ok", f"journal: {entries} entries, {journal.get('lag', 0)} not yet durable")
    if journal.get("replay_unsettled"):
        yield Finding(
            "remark",
            f"{journal['replay_unsettled']} jobs could not be settled at the last replay",
            "sluice failover history",
        )


def _requeue(cluster: shared.Cluster) -> Iterator[Finding]:
    if cluster.holds:
        yield Finding(
            "remark",
            "jobs are held that were being launched when a controller died",
            "add nohold_on_prolog_fail to SchedulerParameters",
        )


def _number(document: dict[str, Any], key: str) -> float:
    value = document.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on; empty where it is not known."""
    best, kind = "", ""
    try:
        real = str(folder.resolve())
        for line in Path("/proc/self/mounts").read_text(errors="replace").splitlines():
            _, place, name, *_ = line.split(" ")
            if (real == place or real.startswith(place.rstrip("/") + "/")) and len(place) >= len(best):
                best, kind = place, name
    except (OSError, ValueError):
        return ""
    return kind
