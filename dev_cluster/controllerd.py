"""The controller-side daemon in a cluster: one on each controller."""

from __future__ import annotations

import sys

from dev_cluster.layout import INSIDE


def controllerd_command(host: str) -> list[str]:
    """The daemon's command line on a controller."""
    place = INSIDE / "controllerd" / host
    return [
        sys.executable,
        "-m",
        "admin_cli.main",
        "controllerd",
        "--state",
        str(place),
        "--events",
        str(place / "events.jsonl"),
        "-v",
    ]
