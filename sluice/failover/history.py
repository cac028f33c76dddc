"""What happened to the controllers, with the drills: for `sluice failover history` and viewers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.failover import shared
from sluice.failover.drill import REPORTS, kept


def history_rows(cluster: shared.Cluster, reports: Path = REPORTS) -> list[dict[str, Any]]:
    """Events of the supervisors and drills, the oldest first. Raises SluiceError where the folder cannot be read."""
    shared.check_folder(cluster.folder)
    rows = [{"time": event.time, "what": event.kind, **event.fields} for event in shared.history(cluster)]
    for report in kept(reports):
        seconds = ", ".join(f"{leg['to']} after {leg['took_s']} s" for leg in report["legs"])
        detail = report["aborted"] or seconds
        rows.append({"time": report["begun"], "what": "drill", "host": "", "good": report["good"], "detail": detail})
    return sorted(rows, key=lambda row: float(row["time"]))
