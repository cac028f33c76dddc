"""The controllers' daemon: one process on each controller that runs periodic duties where it leads.

A duty is a name, a period and a function. Each has its own thread, so that one that fails or hangs is named in the
log and stops no other. A duty runs only on the controller that leads, i.e. whose slurmctld is the active one, unless it
says otherwise. It runs as SlurmUser, keeps its state below /var/lib/sluice, and may be restarted at any moment.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sluice.base.errors import SluiceError
from sluice.base.events import DEFAULT_PATH
from sluice.base.files import write_atomic
from sluice.base.service import notify
from sluice.base.text import one_line
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.leader import leads

STATE = Path("/var/lib/sluice/controllerd")
SCHEMA_VERSION = 1
_CONFIG_S = 30.0
_LEADS_S = 2.0
_STATUS_S = 5.0
_SLOW_PERIODS = 3.0  # a run that takes this many periods, and the time below, is reported as slow
_SLOW_S = 30.0
_SWITCH_S = 0.001  # a thread that answers waits so long for one that computes, each time that it has read a file

T = TypeVar("T")

log = logging.getLogger("sluice.controllerd")


class Site:
    """What duties use: Slurm, this controller's role in it, and a folder for their state."""

    def __init__(
        self,
        client: SlurmClient,
        commands: Commands,
        state: Path = STATE,
        *,
        events: Path = DEFAULT_PATH,
        host: str | None = None,
    ) -> None:
        self.client = client
        self.commands = commands
        self.state = state
        self.events = events
        """The file of `sluice.base.events`."""
        self.host = (host or socket.gethostname()).partition(".")[0]
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._config: tuple[float, Mapping[str, str]] = (-1e9, {})
        self._leads: tuple[float, bool] = (-1e9, False)

    def config(self) -> Mapping[str, str]:
        """slurmctld's configuration, at most half a minute old or the last known; SluiceError before there is one."""
        with self._lock:
            asked, known = self._config
            if time.monotonic() - asked > _CONFIG_S:
                try:
                    known = self.client.config()
                except SluiceError:
                    if not known:
                        raise
                self._config = time.monotonic(), known
            return known

    @property
    def conf_folder(self) -> Path:
        """The folder of slurm.conf, with sluice.policy and sluice.node.json. Raises SluiceError."""
        if self.commands.conf is not None:
            return self.commands.conf_file().parent
        return Path(self.config().get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent

    @property
    def state_save(self) -> Path:
        """Slurm's StateSaveLocation. Raises SluiceError."""
        return Path(self.config()["StateSaveLocation"])

    def leads(self) -> bool:
        """Whether this host's slurmctld is the active one, two seconds old at most; False where it is not known."""
        asked, known = self._leads
        if time.monotonic() - asked > _LEADS_S:
            try:
                known = leads(self.config(), self.host, lambda: any(one.up for one in self.client.ping()))
            except (SluiceError, OSError) as error:
                log.info("the leading controller is not known: %s", one_line(str(error)))
                known = False
            self._leads = time.monotonic(), known
        return known


def of_site(make: Callable[[Site], T]) -> Callable[[Site], T]:
    """A function that returns a daemon's one object of a kind; `make` makes it when it is first asked for."""
    made: weakref.WeakKeyDictionary[Site, T] = weakref.WeakKeyDictionary()

    def find(site: Site) -> T:
        found = made.get(site)
        if found is None:
            found = made[site] = make(site)
        return found

    return find


@dataclass(frozen=True, slots=True)
class Duty:
    """Something to be done periodically.

    `period_s`: from start to start, seconds; a run that takes longer delays the next. `everywhere`: also on a
    controller that does not lead. `lasting`: a run is meant to last (a server), so that none is slow.
    """

    name: str
    period_s: float
    run: Callable[[Site], None]
    everywhere: bool = False
    lasting: bool = False


@dataclass
class _State:
    runs: int = 0
    failures: int = 0
    problem: str = ""
    began: float | None = None  # monotonic, while it runs
    last: float | None = None  # Unix time of the last run's end
    took_s: float = 0.0
    slow: bool = False
    wake: threading.Event = field(default_factory=threading.Event)


class Controllerd:
    """The daemon: one thread for each duty, and one that watches them."""

    def __init__(self, site: Site, duties: Iterable[Duty]) -> None:
        self.site = site
        self.duties = list(duties)
        self.states = {duty.name: _State() for duty in self.duties}
        if len(self.states) != len(self.duties):
            raise ValueError("two duties of one name")
        self._led: bool | None = None

    def serve(self) -> None:
        """Until `stop`."""
        self.site.state.mkdir(mode=0o750, parents=True, exist_ok=True)
        sys.setswitchinterval(_SWITCH_S)
        for duty in self.duties:
            threading.Thread(target=self._repeat, args=(duty,), name=duty.name, daemon=True).start()
        log.warning("ready on %s: %s", self.site.host, ", ".join(self.states) or "no duties")
        notify("READY=1", "STATUS=serves")
        while not self.site.stopping.wait(_STATUS_S):
            self._watch()
        with suppress(OSError):
            self._write_status()

    def stop(self) -> None:
        """Make `serve` return soon; duties that run are left where they are."""
        self.site.stopping.set()

    def wake(self, name: str) -> None:
        """Let a duty run as soon as it can, and not only when its period is over."""
        self.states[name].wake.set()

    def _repeat(self, duty: Duty) -> None:
        state = self.states[duty.name]
        due = time.monotonic()
        while not self.site.stopping.is_set():
            if duty.everywhere or self.site.leads():
                self._run(duty, state)
            due = max(due + duty.period_s, time.monotonic())
            while not self.site.stopping.is_set() and not state.wake.is_set():
                left = due - time.monotonic()
                if left <= 0:
                    break
                state.wake.wait(min(left, 1.0))
            state.wake.clear()

    def _run(self, duty: Duty, state: _State) -> None:
        state.began, state.slow = time.monotonic(), False
        problem = ""
        try:
            duty.run(self.site)
        except (SluiceError, OSError) as error:
            problem = one_line(str(error))
        except Exception as error:
            problem = one_line(repr(error))
            log.exception("%s: unexpected", duty.name)
        state.took_s, state.began = time.monotonic() - state.began, None
        state.last = time.time()
        state.runs += 1
        if problem:
            state.failures += 1
            if problem != state.problem:  # a lasting failure is logged once
                log.error("%s: %s", duty.name, problem)
        elif state.problem:
            log.warning("%s: works again", duty.name)
        state.problem = problem

    def _watch(self) -> None:
        led = self.site.leads()
        if led != self._led:
            log.warning("%s %s", self.site.host, "leads" if led else "does not lead")
            self._led = led
        for duty in self.duties:
            state = self.states[duty.name]
            began = state.began
            if began is None or duty.lasting or state.slow:
                continue
            if time.monotonic() - began > max(_SLOW_S, _SLOW_PERIODS * duty.period_s):
                state.slow = True
                log.error("%s: has been running for %d s", duty.name, time.monotonic() - began)
        try:
            self._write_status()
        except OSError as error:
            log.error("status: %s", one_line(str(error)))

    def report(self) -> dict[str, Any]:
        """What each duty did, for `sluice controllerd status`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "host": self.site.host,
            "pid": os.getpid(),
            "leads": bool(self._led),
            "written": time.time(),
            "duties": [
                {
                    "name": duty.name,
                    "period_s": duty.period_s,
                    "runs": state.runs,
                    "failures": state.failures,
                    "problem": "has not returned" if state.slow else state.problem,
                    "last": state.last,
                    "took_s": round(state.took_s, 3),
                    "serves": duty.lasting and state.began is not None,
                }
                for duty, state in ((duty, self.states[duty.name]) for duty in self.duties)
            ],
        }

    def _write_status(self) -> None:
        write_atomic(self.site.state / "status.json", json.dumps(self.report()) + "\n", mode=0o640, follow_links=False)


def collect(parts: Mapping[str, Callable[[Site], Iterable[Duty]]], site: Site) -> list[Duty]:
    """The duties of all parts; a part that fails to give its own is logged and left out."""
    found: list[Duty] = []
    for name, duties in parts.items():
        try:
            found += duties(site)
        except Exception as error:
            log.error("%s: its duties are left out: %s", name, one_line(repr(error)))
    return found
