"""The node agent: one root daemon a node that sets limits, watches memory and keeps each job's record.

Everything that a running job depends on lies in files below /run/sluice that root alone writes, so that the agent can
be killed and started again at any moment. A thread a connection answers requests, a thread a vendor watches, a thread a
duty does what comes round; the state's lock guards the records. docs/node-agent.md tells the whole.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gres_probe.inventory import Inventory
from gres_probe.probe import probe_node
from health.monitor import Monitor, send_health
from policy.node import FILE_NAME, NodePolicyFile
from policy.node_limits import NodeLimits
from prolog_epilog.accounting import SAVE_SECONDS, Accounting
from prolog_epilog.contexts import Contexts
from prolog_epilog.courier import Courier, slurmd_spool
from prolog_epilog.devices import devices_of
from prolog_epilog.duties import Duties
from prolog_epilog.ends import PERIOD_S as ENDS_S
from prolog_epilog.ends import Ends
from prolog_epilog.guarding import MEMORY, Guard
from prolog_epilog.holds import Holds
from prolog_epilog.jobs import Jobs
from prolog_epilog.log import log
from prolog_epilog.outages import PERIOD_S as OUTAGES_S
from prolog_epilog.outages import Outages
from prolog_epilog.refusals import Refusal
from prolog_epilog.regions import Regions
from prolog_epilog.renewal import Renewal
from prolog_epilog.rungs.base import Rung
from prolog_epilog.rungs.driver import Driver
from prolog_epilog.rungs.ladder import Ladder
from prolog_epilog.rungs.limiter import Limiter
from prolog_epilog.rungs.mps import Mps
from prolog_epilog.rungs.partition import Partition
from prolog_epilog.rungs.share import Shares
from prolog_epilog.rungs.watchdog import Watchdog
from prolog_epilog.server import Peer, Server
from prolog_epilog.state import RefusalError, Settings, State
from prolog_epilog.telling import PERIOD_S, Telling
from prolog_epilog.watching import Watcher
from sluice_base.clock import boot_id
from sluice_base.errors import SluiceError
from sluice_base.files import write_atomic

_RETENTION_SECONDS = 30 * 86400
_LOCK_SECONDS = 2.0
_SWITCH_S = 0.001  # a thread that computes keeps one that answers a prolog waiting so long, not Python's 5 ms
_IDLE_S = 30.0  # for duties that are told when there is work


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


class Agent:
    """The daemon, put together from its parts."""

    def __init__(self, settings: Settings) -> None:
        self.state = State(settings)
        self.state.guard = Guard.inherited()
        self.server = Server(settings.run / "agent.sock", self.state.stopping, self.state.users)
        self.duties = Duties(self.state.stopping)
        node_policy = NodePolicyFile(settings.policy.with_name(FILE_NAME))
        self.watcher = Watcher(self.state, lambda: node_policy.current().limits.strangers)
        self.contexts = Contexts(self.state)
        self.regions = Regions(self.state, self.contexts)
        self.jobs = Jobs(self.state, self.watcher, self.contexts, self.regions, *self._limits())
        self.jobs.answer_to(self.server)
        self.server.add("restart", self.restart)
        self.server.add("pause", self.pause)
        strangers = self.watcher.strangers
        self.jobs.on_prolog.append(lambda _: strangers.earlier.begin())
        self.server.add("announce", strangers.announce, quiet=True)
        strangers.on_note = self.duties.add("strangers", _IDLE_S, strangers.write, retry=1.0, delay=1.0).wake
        self.duties.add("limits", 5.0, self.jobs.check_limits)
        self.accounting = Accounting(self.state, settings.records.parent / "running")
        self.watcher.on_sample.append(self.accounting.sample)
        self.jobs.on_end.append(self.accounting.finish)
        self.duties.add("accounting", SAVE_SECONDS, self.accounting.save)
        self.holds = Holds(settings.run / "agent/refused")
        self.holds.on_put = self.duties.add("holds", _IDLE_S, self.holds.run, retry=5.0).wake
        self.jobs.on_refused = self.holds.put
        self._watch_outages()
        self._watch_health()
        policy = settings.policy.with_name(FILE_NAME)
        telling = Telling(self.state, self.watcher, policy, self.accounting.of_job)
        self.watcher.on_sample.append(telling.on_sample)
        self.accounting.on_tick.append(telling.on_tick)
        self.duties.add("telling", PERIOD_S, telling.run)
        self.jobs.on_unwritten = self.duties.add("records", _IDLE_S, self.jobs.write_records, retry=1.0).wake
        self.ends = Ends(settings.records.parent / "ended", lambda: self.state.node)
        self.duties.add("ends", ENDS_S, self.ends.run, retry=1.0)
        self.state.outbox.on_put = self.duties.add("courier", _IDLE_S, Courier(self.state.outbox).run, retry=1.0).wake

    def _limits(self) -> tuple[Ladder, Renewal]:
        """What holds jobs to their limits, and what makes their GPUs good for the next."""
        file = NodePolicyFile(self.state.settings.policy.with_name(FILE_NAME))

        def policy() -> NodeLimits:
            """What is in force; a file that could never be read is not the same as none."""
            found = file.current().limits
            if file.problem is not None and not file.loaded:
                raise file.problem
            return found

        mps = Mps(self.state)
        rungs: list[Rung] = [
            Partition(self.state),
            Driver(self.state, self.watcher, self.contexts),
            mps,
            Limiter(self.regions),
            Watchdog(self.watcher),
        ]
        shares = Shares(self.state, self.watcher, mps)
        ladder = Ladder(self.state, rungs, shares, policy)
        return ladder, Renewal(self.state, self.watcher, policy)

    def _watch_outages(self) -> None:
        """Times without an agent: noted and judged by the one that comes after."""
        file = NodePolicyFile(self.state.settings.policy.with_name(FILE_NAME))
        self.outages = Outages(
            self.state,
            self.state.settings.run / MEMORY,
            bound=lambda: file.current().limits.unwatched_s,
            hold=self.holds.put,
        )
        self.jobs.on_end.append(self.outages.ended)
        self.duties.add("outages", OUTAGES_S, self.outages.run, retry=2.0)

    def _watch_health(self) -> None:
        """Checks of GPUs and node: round after round, before and after each job, and when asked."""
        settings = self.state.settings
        memory = settings.records.parent / "health.json"
        monitor = Monitor(
            self.state, self.watcher, policy=settings.policy.with_name(FILE_NAME), memory=memory, send=send_health,
            spools=(str(settings.run), str(settings.records.parent), slurmd_spool()),
            outages=self.outages.last,
        )  # fmt: skip
        self.health = monitor
        self.watcher.on_sample.append(monitor.on_sample)
        self.jobs.on_prolog.append(monitor.refuse_sick)
        self.jobs.on_end.append(monitor.ended)
        self.server.add("health", monitor.check)
        monitor.on_due = self.duties.add("health", 1.0, monitor.run, delay=1.0).wake
        monitor.on_report = self.duties.add("health-report", _IDLE_S, monitor.deliver).wake

    def start(self) -> None:
        """Find the GPUs, take over what an earlier agent left, measure driver contexts. Raises SluiceError, OSError."""
        if os.geteuid() != 0:
            raise SluiceError("sluice agent: not root", remedy="start it by systemd, or with sudo")
        self._prepare()
        self.outages.judge()
        inventory = self._inventory()
        self.state.node = inventory.node
        for problem in inventory.problems:
            log("problem", vendor=problem.vendor, what=problem.what, remedy=problem.remedy)
        self.state.devices = devices_of(inventory)
        self.health.start(inventory)
        self.watcher.find()
        self.accounting.load()
        self.jobs.take_over()
        self.watcher.strangers.load()
        cut_off = self.accounting.cut_off()
        self.jobs.write_also(cut_off)
        self.accounting.drop(cut_off)
        self.contexts.measure(self.watcher)
        sys.setswitchinterval(_SWITCH_S)
        self.watcher.start()
        self.duties.start()

    def _inventory(self) -> Inventory:
        """The node's GPUs: as the agent found them that died a moment ago, else asked of drivers, which may be slow."""
        path, boot = self.state.settings.run / "agent/inventory.json", boot_id()
        with suppress(OSError, SluiceError):
            found_by, _, text = path.read_text().partition("\n")
            if found_by == boot != "" and self.outages.after_one_death():
                return Inventory.from_json(text, source=str(path))
        inventory = probe_node(node=self.state.node)  # forks: before there are threads
        with suppress(OSError):
            if inventory.problems:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, f"{boot}\n{inventory.to_json(indent=None)}", mode=0o600)
        return inventory

    def _prepare(self) -> None:
        """Folders and files that others find here, and the mount points that must be there to be mounted over."""
        run = self.state.settings.run
        run.mkdir(mode=0o755, parents=True, exist_ok=True)
        (run / "agent").mkdir(mode=0o700, exist_ok=True)
        self._lock = only_one(run / "agent/lock")
        self.state.jobs.prepare()
        self.state.store.prepare()
        self.state.outbox.prepare()
        self.ends.prepare(run / "ended")
        self.holds.prepare()
        self.regions.prepare()
        self.state.store.prune(time.time() - _RETENTION_SECONDS)
        self.state.outbox.prune(time.time() - _RETENTION_SECONDS)

    def _ready(self) -> None:
        self.state.guard.ready()
        log("ready", node=self.state.node, devices=len(self.state.devices), jobs=len(self.state.records))

    def pause(self, *, peer: Peer) -> dict[str, Any]:
        """A request: let go of the drivers for two minutes, or until `restart`. Refused while jobs have GPUs."""
        del peer
        self._refuse_with_jobs()
        self.watcher.pause(120.0)
        return {}

    def _refuse_with_jobs(self) -> None:
        with self.state.lock:
            if self.state.records:
                raise RefusalError(f"{len(self.state.records)} jobs have GPUs here", Refusal.BUSY)

    def restart(self, *, peer: Peer) -> dict[str, Any]:
        """A request: begin again, e.g. as the node has other devices now. Refused while jobs have GPUs."""
        del peer
        self._refuse_with_jobs()
        self.server.stop()
        return {}

    def serve(self) -> None:
        """Answer until SIGTERM or SIGINT, or until a request to begin again: its guard starts the next one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.server.stop())
        self.server.serve(self._ready)
        with suppress(OSError):  # a full disk: what was saved before stays
            self.accounting.save()
        self.watcher.close()
        log("stop")
