"""The watts that each budget was kept with last, in StateSaveLocation: a daemon that follows one which ended while a
budget was being lowered stops the jobs that are still to give way."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from sluice.base.files import write_if_changed

FILE_NAME = "sluice.power-met.json"
_MAX_BYTES = 1 << 20

log = logging.getLogger("sluice.power")


def read(path: Path) -> dict[str, float]:
    """By budget. Nothing of a damaged file: then budgets count as constant."""
    try:
        with path.open("rb") as file:
            found = {str(name): float(watts) for name, watts in json.loads(file.read(_MAX_BYTES))["met"].items()}
        if not all(map(math.isfinite, found.values())):
            raise ValueError("no amount of watts")
        return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.error("%s: damaged: %s; it is written again", path, error)
    return {}


def write(path: Path, met: Mapping[str, float]) -> None:
    """Raises OSError."""
    write_if_changed(path, json.dumps({"version": 1, "met": dict(met)}) + "\n", mode=0o600)
