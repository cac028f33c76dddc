"""What the agent does first: it finds the GPUs, the jobs of the agent before it, and watches.

From its first sample all limits are in force. All else (answering, records, health, metrics) takes longer to load
than this takes to run, and comes after it: nothing that is imported here may import pydantic.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gres_probe.inventory import Inventory
from prolog_epilog.contexts import Contexts
from prolog_epilog.devices import devices_of
from prolog_epilog.guarding import MEMORY, Guard
from prolog_epilog.outages import after_one_death
from prolog_epilog.state import Settings, State
from prolog_epilog.watching import Watcher
from prolog_epilog.worker import STARTS_S
from sluice.base.clock import boot_id
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.log import log

if TYPE_CHECKING:
    from policy.node import NodePolicyFile
    from policy.node_limits import NodeStrangers

_LOCK_SECONDS = 2.0
_FIRST_S = 0.5  # what takes long to load leaves the processor to the first sample for this time
_AGAIN_S = 5.0  # for driver contexts that an earlier agent could not measure: jobs are not watched meanwhile
_SWITCH_S = 0.001  # how long a thread that computes delays one that samples or answers; Python's default is 5 ms


def only_one(path: Path) -> int:
    """An open file that one agent at a time has locked, for as long as it lives. Raises SluiceError, OSError.

    One that is killed may leave a child behind that holds the lock for a moment.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                raise SluiceError(
                    "sluice agent: another one runs on this node", remedy="see: systemctl status sluice-agent"
                ) from None
            time.sleep(0.05)


class Vigil:
    """The watch of this node's GPUs; `prolog_epilog.agent` puts the other parts on top."""

    def __init__(self, settings: Settings) -> None:
        self.state = State(settings)
        self.state.guard = Guard.inherited()
        self.watcher = Watcher(self.state, self._strangers)
        self.contexts = Contexts(self.state)

    def begin(self) -> None:
        """Watch; readers of samples get nothing until the watcher is `notifying`. Raises SluiceError, OSError."""
        if os.geteuid() != 0:
            raise SluiceError("sluice agent: not root", remedy="start it with systemd or sudo")
        self._prepare()
        self._first, began = not self.contexts.path.exists(), time.monotonic()
        self.inventory = self._inventory()
        self.state.inventory, self.state.node = self.inventory, self.inventory.node
        self.state.devices = devices_of(self.inventory)
        self.state.nics = {nic.name: nic.device_file for nic in self.inventory.nics if nic.device_file}
        self.state.find_jobs()
        self.watcher.strangers.load()
        self.watcher.find()
        self.contexts.measure(self.watcher, began + 2 * STARTS_S if self._first else time.monotonic() + _AGAIN_S)
        sys.setswitchinterval(_SWITCH_S)
        self.watcher.notifying.clear()
        self.watcher.start()
        watches = self.watcher.watches.values()
        wait = began + 2 * STARTS_S - time.monotonic() if self._first else _FIRST_S
        with self.state.sampled:
            self.state.sampled.wait_for(
                lambda: all(one.samples or (one.problem and not one.worker.starting) for one in watches), wait
            )

    def _prepare(self) -> None:
        run = self.state.settings.run
        run.mkdir(mode=0o755, parents=True, exist_ok=True)
        (run / "agent").mkdir(mode=0o700, exist_ok=True)
        self._lock = only_one(run / "agent/lock")
        self.state.jobs.prepare()
        self.state.store.prepare()

    def _inventory(self) -> Inventory:
        """The node's GPUs: as an agent found them since the boot, else from the drivers, which may be slow."""
        run = self.state.settings.run
        path, boot = run / "agent/inventory.json", boot_id()
        with suppress(OSError, SluiceError):
            found_by, _, text = path.read_text().partition("\n")
            if found_by == boot != "" and after_one_death(run / MEMORY):
                return Inventory.from_json(text, source=str(path))
        from gres_probe.probe import DEFAULT_TIMEOUT, probe_node

        # Forks: before there are threads. After a boot a driver may take long to start.
        inventory = probe_node(node=self.state.node, timeout=STARTS_S if self._first else DEFAULT_TIMEOUT)
        for problem in inventory.problems:
            log("problem", vendor=problem.vendor, what=problem.what, remedy=problem.remedy)
        with suppress(OSError):
            if inventory.problems:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, f"{boot}\n{inventory.to_json(indent=None)}", mode=0o600)
        return inventory

    def _strangers(self) -> NodeStrangers:
        return _policy_file(self.state.settings.policy).current().limits.strangers


@cache
def _policy_file(policy: Path) -> NodePolicyFile:
    from policy.node import FILE_NAME, NodePolicyFile

    return NodePolicyFile(policy.with_name(FILE_NAME))
