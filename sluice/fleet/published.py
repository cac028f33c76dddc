"""Where readers find what fleetd publishes: in the usual folder of each controller, wherever its state folder is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sluice.exchange.fleet import STATE, STATUS
from sluice.exchange.pool_costs import COSTS

log = logging.getLogger("sluice.fleet")


def lead_to(state: Path, usual: Path = STATE) -> None:
    """Make links in the usual folder to the published files of another state folder.

    What keeps it from that is logged, and keeps fleetd from nothing else.
    """
    try:
        if state.exists() and usual.exists() and state.samefile(usual):
            return
        for name in (STATUS.name, COSTS.name):
            part = usual / f".{name}.{os.getpid()}"
            part.unlink(missing_ok=True)
            part.symlink_to(state.absolute() / name)
            try:
                part.rename(usual / name)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        log.error(
            "%s: %s: reports, alerts and `sluice pool` look there, and %s is elsewhere; make it SlurmUser's, and start "
            "fleetd again: install -d -o SLURMUSER %s", usual, error.strerror, state, usual,
        )  # fmt: skip
