"""How much memory one driver context takes on each kind of device of the node: measured once for each boot."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from prolog_epilog.devices import NodeDevice
from prolog_epilog.state import State
from prolog_epilog.watching import Watcher
from prolog_epilog.worker import STARTS_S
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log

VENDORS = ("nvidia", "amd")
"""Those with a program that opens a device (`prolog_epilog.context`)."""


class Contexts:
    """Bytes, by a device's kind: of one context, and what the driver reports as the device's total."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.measured: dict[str, dict[str, int]] = {}

    def of(self, device: NodeDevice) -> dict[str, int] | None:
        """``{"context": ..., "total": ...}``; None where the driver reports none."""
        return self.measured.get(device.kind)

    @property
    def path(self) -> Path:
        """What was measured since the boot; there once an agent has tried."""
        return self._state.settings.run / "agent/contexts.json"

    def measure(self, watcher: Watcher, deadline: float) -> None:
        """One device of each kind, unless an earlier agent measured it since the boot. Raises OSError.

        `deadline` is one for all kinds: until it returns no job is watched, and the guard waits for no agent for ever.
        """
        with suppress(OSError, ValueError):
            self.measured = json.loads(self.path.read_text())
        for device in self._state.devices:
            if device.vendor not in VENDORS or device.kind in self.measured:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                log("problem", device=device.uuid, what="no driver context measured: other devices took too long")
                continue
            place = device.uuid
            if device.vendor == "amd":
                place = str(device.ordinal)
            try:
                found = watcher.watches[device.vendor].worker.ask(
                    do="context", uuid=device.uuid, place=place, timeout=min(STARTS_S, left)
                )
            except SluiceError as error:
                log("problem", device=device.uuid, what=f"no driver context measured: {error}")
                continue
            if 0 < found["context"] < found["total"]:
                self.measured[device.kind] = found
                log("context", model=device.model, bytes=found["context"], total=found["total"])
            else:
                log("problem", device=device.uuid, what="the driver does not report the size of a driver context")
        write_atomic(self.path, json.dumps(self.measured), mode=0o600)
