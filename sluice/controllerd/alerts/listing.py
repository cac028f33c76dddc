"""Alerts for people and programs: what `sluice alerts list --json` prints and viewers get."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sluice.controllerd.alerts.engine import STATE_FILE
from sluice.controllerd.alerts.outbox import Outbox, read_json
from sluice.exchange.silences import read_silences


def alerts_document(folder: Path, now: float, *, everything: bool) -> dict[str, Any]:
    """What fires now; with `everything` also what has not held long enough, and what is silenced. Raises OSError."""
    document: Any = read_json(folder / STATE_FILE).get("alerts", {})
    rows: list[dict[str, Any]] = []
    for rule, mine in document.items() if isinstance(document, dict) else ():
        for subject, one in mine.items():
            state = "silenced" if one["silenced"] else "waiting" if one["fired"] is None else "firing"
            rows.append(
                {
                    "rule": rule,
                    "state": state,
                    "subject": subject,
                    "since": one["since"],
                    "value": one["value"],
                    "text": one["text"],
                }
            )
    return {
        "schema_version": 1,
        "alerts": rows if everything else [row for row in rows if row["state"] == "firing"],
        "undelivered": len(Outbox(folder / "outbox").waiting()),
        "silences": [asdict(one) for one in read_silences(folder, now)],
    }
