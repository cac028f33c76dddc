"""The controllers' daemon tells of every takeover, and of each controller that died or was fenced (alerts read it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from failover import shared
from sluice_base import events
from sluice_base.files import write_atomic
from usage.controllerd import Duty, Site

PERIOD_S = 3.0
LEADER_FILE = "sluice.leader"
_TOLD = ("fenced", "slurmctld.died", "lease.lost")
_FOLDER = "failover"


def duties(site: Site) -> Iterator[Duty]:
    """One duty, on the controller that leads."""
    (site.state / _FOLDER).mkdir(mode=0o750, exist_ok=True)
    yield Duty("takeovers", PERIOD_S, tell)


def tell(site: Site) -> None:
    """Append what is new to the events. Raises OSError and SluiceError."""
    cluster = shared.read_cluster(site.conf_folder / "slurm.conf")
    _tell_leader(site, cluster)
    _tell_history(site, cluster)


def _tell_leader(site: Site, cluster: shared.Cluster) -> None:
    """Who led last stands in the shared folder, so that a new leader knows that it is one."""
    path = cluster.folder / LEADER_FILE
    before = path.read_text(errors="replace").strip() if path.exists() else ""
    if before == site.host or not site.leads():
        return
    if before:
        lease = shared.lease(cluster.folder, 0.0)
        epoch = {"epoch": lease.epoch} if lease is not None else {}
        events.append(site.events, "takeover", fsync=True, leader=site.host, before=before[:64], **epoch)
    write_atomic(path, site.host + "\n", follow_links=False)


def _tell_history(site: Site, cluster: shared.Cluster) -> None:
    """Each controller tells the other's story, too: who was killed could not."""
    path = site.state / _FOLDER / "told.json"
    told = _read_told(path)
    fresh = shared.history(cluster, told or {})
    seen = dict(told or {})
    for event in fresh:
        host = str(event.fields.get("host", ""))[:64]
        if told is not None and event.kind in _TOLD:  # at the very first look all is old
            detail = {key: event.fields[key] for key in ("why", "signal", "status", "leader") if key in event.fields}
            events.append(site.events, f"controller.{event.kind}", host=host, at=event.time, **detail)
        seen[host] = max(seen.get(host, 0), event.seq)
    if told is None or seen != told:
        write_atomic(path, json.dumps(seen) + "\n", mode=0o640)


def _read_told(path: Path) -> dict[str, int] | None:
    with suppress(OSError, ValueError):
        document = json.loads(path.read_text())
        if isinstance(document, dict):
            return {str(host): int(seq) for host, seq in document.items() if isinstance(seq, int)}
    return None
