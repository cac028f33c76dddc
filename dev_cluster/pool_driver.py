"""The driver `local`: a pool's machines are nodes of this development cluster, whose slurmd starts and ends.

Runs inside the cluster, as SlurmUser, which process 1 lets in where there are pools. `settings.boot` is the seconds
that a machine takes until its slurmd starts; `settings.stock` a file that says how many machines of each shape and zone
there are (``{"big": 2, "big/zone-a": 0}``), for tests of what happens when there is none; `settings.notices` one that
says which machines are taken back soon, and why (``{"local-f7604dad3850": "spot"}``).
"""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dev_cluster.control import ask
from dev_cluster.layout import INSIDE, Layout
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.fleet.driver import DriverSite, Machine, Order, ProviderError

_FORGOTTEN_S = 3600.0  # from its launch, for one that has ended


class Local:
    """The driver."""

    def __init__(self, site: DriverSite) -> None:
        site.only("boot", "notices", "stock")
        self._site = site
        self._layout = Layout(INSIDE)
        self._folder = self._layout.machines
        self._lock = threading.Lock()
        self._boot = float(site.setting("boot", "0"))

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`."""
        with self._lock:  # of two at a time, both would have the last one of a shape, or list one that has not begun
            return self._launch(order)

    def _launch(self, order: Order) -> Machine:
        there = self._machines()
        for machine in there:
            if machine.token == order.token and not machine.ending:
                return machine
        self._check_stock(order, there)
        daemon = self._daemon(order.node)
        machine = Machine(f"local-{order.token[:12]}", order.token, order.node, order.shape, order.zone)
        write_atomic(self._file(machine.id), json.dumps({"pool": self._site.pool, **asdict(machine)}) + "\n")
        wait = ["sh", "-c", f'sleep {self._boot:g}; exec "$@"', "boot"] if self._boot else []
        try:
            ask(self._layout, "spawn", name=machine.id, **{**daemon, "argv": [*wait, *daemon["argv"]]})
        except SluiceError as error:
            raise ProviderError("unknown", str(error)) from error
        return machine

    def _check_stock(self, order: Order, there: list[Machine]) -> None:
        with suppress(FileNotFoundError):
            stock = json.loads(Path(self._site.setting("stock", "/nonexistent")).read_text())
            used = [one for one in there if not one.ending]
            for key in (order.shape, f"{order.shape}/{order.zone}"):
                have = sum(key in (one.shape, f"{one.shape}/{one.zone}") for one in used)
                if key in stock and have >= stock[key]:
                    raise ProviderError("no_capacity", f"no {key} is left")

    def _daemon(self, node: str) -> dict[str, Any]:
        facts = json.loads(self._layout.facts.read_text())
        try:
            daemon: dict[str, Any] = facts["daemons"][f"slurmd@{node}"]
            return daemon
        except KeyError as error:
            raise ProviderError("refused", f"the cluster has no node {node}") from error

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`."""
        try:
            ask(self._layout, "signal", name=machine, number=signal.SIGKILL)
        except SluiceError as error:
            raise ProviderError("unknown", str(error)) from error

    def machines(self) -> list[Machine]:
        """As `Driver.machines`."""
        with self._lock:
            return self._machines()

    def _machines(self) -> list[Machine]:
        """Those of the pool, as another pool's would be ended as unknown. One whose slurmd has ended is listed as
        ending for a while, as providers do.
        """
        try:
            daemons = ask(self._layout, "list")
        except SluiceError as error:
            raise ProviderError("unknown", str(error)) from error
        running = {name for name, one in daemons.items() if one["status"] is None}
        notices: dict[str, str] = {}
        with suppress(FileNotFoundError):
            notices = json.loads(Path(self._site.setting("notices", "/nonexistent")).read_text())
        found = []
        for path in self._folder.glob("*.json"):
            if path.stem not in running and time.time() > path.stat().st_mtime + _FORGOTTEN_S:
                path.unlink(missing_ok=True)
                continue
            facts = json.loads(path.read_text())
            if facts.pop("pool") != self._site.pool:
                continue
            machine = Machine(**facts)
            ending = path.stem not in running
            found.append(replace(machine, ending=ending, notice=notices.get(machine.id, "")))
        return found

    def _file(self, machine: str) -> Path:
        return self._folder / f"{machine}.json"


def make(site: DriverSite) -> Local:
    """The entry point. Raises SluiceError."""
    return Local(site)
