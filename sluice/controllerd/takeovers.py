"""Reports every takeover, and each controller that died or was fenced, as events (which alerts read)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sluice.base import events
from sluice.base.files import write_atomic
from sluice.controllerd.daemon import Duty, Site
from sluice.failover import shared

PERIOD_S = 3.0
LEADER_FILE = "sluice.leader"
_WORTH_REPORTING = ("fenced", "slurmctld.died", "lease.lost")
_FOLDER = "failover"
_REPORTED_FILE = "reported.json"


def duties(site: Site) -> Iterator[Duty]:
    """One duty, on the controller that leads."""
    folder = site.state / _FOLDER
    folder.mkdir(mode=0o750, exist_ok=True)
    with suppress(FileNotFoundError):
        (folder / "told.json").rename(folder / _REPORTED_FILE)  # its name until 0.1.0
    yield Duty("takeovers", PERIOD_S, report)


def report(site: Site) -> None:
    """Append what is new to the events. Raises OSError and SluiceError."""
    cluster = shared.read_cluster(site.conf_folder / "slurm.conf")
    _report_leader(site, cluster)
    _report_history(site, cluster)


def _report_leader(site: Site, cluster: shared.Cluster) -> None:
    """The last leader is in the shared folder, so that a new leader knows that it is one."""
    path = cluster.folder / LEADER_FILE
    before = path.read_text(errors="replace").strip() if path.exists() else ""
    if before == site.host or not site.leads():
        return
    if before:
        lease = shared.lease(cluster.folder, 0.0)
        epoch = {"epoch": lease.epoch} if lease is not None else {}
        events.append(site.events, "takeover", fsync=True, leader=site.host, before=before[:64], **epoch)
    write_atomic(path, site.host + "\n", follow_links=False)


def _report_history(site: Site, cluster: shared.Cluster) -> None:
    """Each controller also reports the other's events: one that was killed cannot."""
    path = site.state / _FOLDER / _REPORTED_FILE
    reported = _read_reported(path)
    fresh = shared.history(cluster, reported or {})
    seen = dict(reported or {})
    for event in fresh:
        host = str(event.fields.get("host", ""))[:64]
        if reported is not None and event.kind in _WORTH_REPORTING:  # in the first run all is old
            detail = {key: event.fields[key] for key in ("why", "signal", "status", "leader") if key in event.fields}
            events.append(site.events, f"controller.{event.kind}", host=host, at=event.time, **detail)
        seen[host] = max(seen.get(host, 0), event.seq)
    if reported is None or seen != reported:
        write_atomic(path, json.dumps(seen) + "\n", mode=0o640)


def _read_reported(path: Path) -> dict[str, int] | None:
    with suppress(OSError, ValueError):
        document = json.loads(path.read_text())
        if isinstance(document, dict):
            return {str(host): int(seq) for host, seq in document.items() if isinstance(seq, int)}
    return None
