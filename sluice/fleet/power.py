"""slurmctld's ResumeProgram and SuspendProgram: they leave a request in fleetd's folder and end.

A request is a reason to look, not an order: what is wanted, fleetd reads from Slurm. Standard library only, as
slurmctld starts one for each change.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

REQUESTS = Path("/run/sluice-fleet/requests")
"""As in `sluice.exchange.fleet`, which is not loaded here."""
_MOST = 64 << 10


def leave(do: str, words: list[str], folder: Path = REQUESTS) -> int:
    """Leave a request; the exit status."""
    if len(words) != 1 or len(words[0]) > _MOST:
        print(f"sluice-{do}: want one expression of nodes, as slurmctld gives it", file=sys.stderr)
        return 2
    name = f"{time.time_ns()}-{os.getpid()}"
    try:
        part = folder / f".{name}"
        part.write_text(json.dumps({"do": do, "nodes": words[0], "at": time.time()}) + "\n")
        part.rename(folder / f"{name}.json")
    except OSError as error:
        # fleetd looks at Slurm from time to time as well: the node comes later.
        print(f"sluice-{do}: {folder}: {error.strerror}; does sluice-fleetd run here?", file=sys.stderr)
        return 1
    return 0


def resume() -> None:
    """`sluice-resume NODES`."""
    sys.exit(leave("resume", sys.argv[1:]))


def suspend() -> None:
    """`sluice-suspend NODES`."""
    sys.exit(leave("suspend", sys.argv[1:]))
