"""The node agent: one root daemon a node that sets limits, watches memory and keeps each job's record.

Everything that a running job depends on lies in files below /run/sluice that root alone writes, so that the agent can
be killed and started again at any moment. A thread for each connection answers requests, one for each vendor watches,
one for each duty runs periodic work; the state's lock guards the records. docs/node-agent.md describes it all.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Any

from policy.node import FILE_NAME, NodePolicyFile
from policy.node_limits import NodeLimits
from prolog_epilog.accounting import SAVE_SECONDS, Accounting
from prolog_epilog.checkpoint.drains import AGAIN_S, LOOK_S
from prolog_epilog.checkpoint.gpus import Gpus
from prolog_epilog.checkpoint.saver import ANNOUNCE_S, PRUNE_S, Saver
from prolog_epilog.end_notices import PERIOD_S as END_NOTICES_S
from prolog_epilog.end_notices import EndNotices
from prolog_epilog.gpu_reset import GpuReset
from prolog_epilog.guarding import MEMORY
from prolog_epilog.health.monitor import Monitor
from prolog_epilog.holds import Holds
from prolog_epilog.jobs import Jobs
from prolog_epilog.live_reports import PERIOD_S as LIVE_REPORTS_S
from prolog_epilog.live_reports import LiveReports
from prolog_epilog.nccl_topology import Topologies
from prolog_epilog.network import NETWORK_S, Network
from prolog_epilog.nics import NICS_S, Nics
from prolog_epilog.outages import PERIOD_S as OUTAGES_S
from prolog_epilog.outages import Outages
from prolog_epilog.power.keeper import CHECK_S, PowerKeeper
from prolog_epilog.power.reports import PowerReports
from prolog_epilog.preflight import Preflights
from prolog_epilog.preflight_spare import SELDOM_S, Spare
from prolog_epilog.profiles import LIBRARY, Profiles
from prolog_epilog.rdma import RdmaBounds
from prolog_epilog.refusals import Refusal
from prolog_epilog.regions import Regions
from prolog_epilog.rungs.base import Rung
from prolog_epilog.rungs.driver import Driver
from prolog_epilog.rungs.ladder import Ladder
from prolog_epilog.rungs.limiter import Limiter
from prolog_epilog.rungs.mps import Mps
from prolog_epilog.rungs.partition import Partition
from prolog_epilog.rungs.share import Shares
from prolog_epilog.rungs.watchdog import Watchdog
from prolog_epilog.server import Peer, Server
from prolog_epilog.state import RefusalError, Settings
from prolog_epilog.unkillable import PERIOD_S as UNKILLABLE_S
from prolog_epilog.unkillable import Unkillable
from prolog_epilog.vigil import Vigil
from sluice.base.duties import Duties
from sluice.base.log import log
from sluice.exchange.courier import VERSION, Courier, slurmd_spool
from sluice.exchange.power import PERIOD_S
from sluice.exchange.record import JobRecord
from sluice.exchange.uplink import Uplink

_DAY_S = 86400.0
_RETENTION_S = 30 * _DAY_S
_IDLE_S = 30.0  # for duties that are woken when there is work


class Agent:
    """The daemon, put together from its parts."""

    def __init__(self, settings: Settings, vigil: Vigil | None = None) -> None:
        """`vigil`: one that has started to watch."""
        self._vigil = vigil or Vigil(settings)
        self.state, self.watcher, self.contexts = self._vigil.state, self._vigil.watcher, self._vigil.contexts
        self.server = Server(settings.run / "agent.sock", self.state.stopping, self.state.users)
        self.duties = Duties(self.state.stopping)
        self.regions = Regions(self.state, self.contexts)
        file = NodePolicyFile(settings.policy.with_name(FILE_NAME))
        self.power = PowerKeeper(self.state, self.watcher, lambda: file.current().power)
        self.profiles = Profiles(
            settings.records.parent / "profiles",
            settings.run / "profile",
            settings.library.with_name(LIBRARY),
            lambda: file.current().profiles == "all",
        )
        self.profiles.on_retired = self.duties.add("profiles", _IDLE_S, self.profiles.sweep, retry=60.0).wake
        self.topologies = Topologies(self.state)
        self.jobs = Jobs(
            self.state, self.watcher, self.contexts, self.regions, *self._limits(), self.power, self.profiles,
            self.topologies,
        )  # fmt: skip
        self.jobs.rdma = RdmaBounds(lambda: file.current().limits)
        network = Network()
        self.jobs.interface = lambda: network.interface
        self.duties.add("network", NETWORK_S, network.run)
        self.jobs.answer_to(self.server)
        self.server.add("restart", self.restart)
        self.server.add("pause", self.pause)
        strangers = self.watcher.strangers
        self.jobs.on_prolog.append(lambda _: strangers.earlier.begin())
        self.jobs.prologs_come = strangers.earlier.begun
        self.server.add("announce", strangers.announce, quiet=True)
        strangers.on_note = self.duties.add("strangers", _IDLE_S, strangers.write, retry=1.0, delay=1.0).wake
        self.duties.add("limits", 5.0, self.jobs.check_limits)
        self.duties.add("inherited", 5.0, self.jobs.settle_inherited)
        self.accounting = Accounting(self.state, settings.records.parent / "running")
        self.watcher.on_sample.append(self.accounting.sample)
        self.jobs.on_end.append(self.accounting.finish)
        self.duties.add("accounting", SAVE_SECONDS, self.accounting.save)
        self.nics = Nics(self.state)
        self.jobs.on_opened = self.nics.opened
        self.jobs.on_end.append(self.nics.finish)
        self.duties.add("nics", NICS_S, self.nics.run)
        self.holds = Holds(settings.run / "agent/refused")
        self.holds.on_put = self.duties.add("holds", _IDLE_S, self.holds.run, retry=5.0).wake
        self.jobs.on_refused = self.holds.put
        self.jobs.on_skipped = self.holds.put_back
        self.saver = Saver(
            settings.records.parent / "checkpoints",
            lambda: file.current().checkpoint.system,
            settings.run / "checkpoint",
            self.holds.put_saved,
            Gpus(self.jobs.gpus_of, self.jobs.held_by),
            node=self.state.node,
            stopping=self.state.stopping,
        )
        self.saver.node_gpus = self.jobs.gpus_here
        self.saver.told = self.jobs.on_unsaved = self.holds.note
        self.jobs.unsaved = self.saver.why_not
        self.saver.found_unsaved = self.jobs.note_unsaved
        self.saver.restored_from = lambda job, began: self.jobs.keep_stage(job, "restore", began)
        self.saver.answer_to(self.server)
        self.duties.add("saved-jobs", PRUNE_S, self.saver.prune)
        self.duties.add("can-save", ANNOUNCE_S, self.saver.announce)
        self.duties.add("unfinished-saves", ANNOUNCE_S, self.saver.settle)
        self.saver.on_moved = self.duties.add(
            "moved-saves", LOOK_S, self.saver.drains.run, retry=AGAIN_S, delay=1.0
        ).wake
        self.uplink = Uplink()
        self.watcher.on_sample.append(self.power.on_sample)
        self.power.on_due = self.duties.add("power", CHECK_S, self.power.run, retry=1.0).wake
        reports = PowerReports(self.state, self.power, lambda: file.current().power, self.uplink.send)
        self.duties.add("power-reports", PERIOD_S, reports.run)
        self.preflights = Preflights(
            self.state, lambda: file.current().preflight, self.uplink.send, self.jobs.interface
        )
        self.jobs.preflight_s = self.preflights.longest_s
        self.jobs.preflight_alone = self.preflights.tests_one_node
        self.server.add("preflight", self.preflights.run)
        spare = Spare(self.state, lambda: file.current().preflight, self.uplink.send, self.jobs.interface)
        self.jobs.on_prolog.append(lambda _: spare.leave())
        self.duties.add("preflight-spare", SELDOM_S, spare.run)
        self._watch_outages()
        self._watch_health()
        policy = settings.policy.with_name(FILE_NAME)
        live_reports = LiveReports(self.state, self.watcher, policy, self._used, self.profiles.saved, self.uplink.send)
        self.watcher.on_sample.append(live_reports.on_sample)
        self.accounting.on_tick.append(live_reports.on_tick)
        self.duties.add("live-reports", LIVE_REPORTS_S, live_reports.run)
        self.jobs.on_unwritten = self.duties.add("records", _IDLE_S, self.jobs.write_records, retry=1.0).wake
        self.duties.add("retention", _DAY_S, self.forget_old)
        self.end_notices = EndNotices(settings.records.parent / "ended", lambda: self.state.node)
        self.duties.add("end-notices", END_NOTICES_S, self.end_notices.run, retry=1.0)
        self.duties.add("unkillable", UNKILLABLE_S, Unkillable().run)
        courier = Courier(self.state.outbox, self.uplink.asking)
        self.state.outbox.on_put = self.duties.add("courier", _IDLE_S, courier.run, retry=1.0).wake

    def _used(self, record: JobRecord) -> dict[str, Any]:
        """What a running job has used until now, as `JobRecord.usage`."""
        return self.accounting.of_job(record) | self.nics.of_job(record)

    def _limits(self) -> tuple[Ladder, GpuReset]:
        """What holds jobs to their limits, and what resets their GPUs for the next job."""
        file = NodePolicyFile(self.state.settings.policy.with_name(FILE_NAME))

        def policy() -> NodeLimits:
            """The policy in force; a file that could never be read is not the same as none."""
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
        return ladder, GpuReset(self.state, self.watcher, policy)

    def _watch_outages(self) -> None:
        """Times without an agent: recorded and evaluated by the next agent."""
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
        """Checks of GPUs and node: periodically, before and after each job, and on request."""
        settings = self.state.settings
        memory = settings.records.parent / "health.json"
        monitor = Monitor(
            self.state,
            self.watcher,
            policy=settings.policy.with_name(FILE_NAME),
            memory=memory,
            send=lambda report: self.uplink.send({"version": VERSION, "do": "health", "report": report}),
            spools=(str(settings.run), str(settings.records.parent), slurmd_spool()),
            outages=self.outages.last,
            fabric=self.preflights.found,
            nics=self.nics,
        )
        self.health = monitor
        self.watcher.on_sample.append(monitor.on_sample)
        self.jobs.on_prolog.append(monitor.refuse_sick)
        self.jobs.on_end.append(monitor.ended)
        self.preflights.on_found = monitor.found_again
        self.server.add("health", monitor.check)
        monitor.on_due = self.duties.add("health", 1.0, monitor.run, delay=1.0).wake
        monitor.on_report = self.duties.add("health-report", _IDLE_S, monitor.deliver).wake

    def start(self) -> None:
        """Take over the state of an earlier agent, now that the node is watched. Raises SluiceError, OSError."""
        self._prepare()
        self.outages.judge()
        self.health.start(self._vigil.inventory)
        self.nics.start(self._vigil.inventory)
        self.accounting.load()
        self.power.load()
        self.jobs.take_over()
        cut_off = self.accounting.cut_off()
        self.jobs.write_also(cut_off)
        self.accounting.drop(cut_off)
        self.watcher.notifying.set()
        self.duties.start()

    def _prepare(self) -> None:
        """Folders and files that others find here, and the mount points that must be there to be mounted over."""
        self.state.outbox.prepare()
        self.end_notices.prepare(self.state.settings.run / "ended")
        self.holds.prepare()
        self.saver.images.prepare()
        self.regions.prepare()
        self.profiles.prepare(self.state.records)
        self.topologies.prepare()

    def forget_old(self) -> None:
        """A duty: remove records that were kept long enough, sent or not. Raises OSError."""
        before = time.time() - _RETENTION_S
        self.state.store.prune(before)
        self.state.outbox.prune(before)

    def _ready(self) -> None:
        self.state.guard.ready()
        log("ready", node=self.state.node, devices=len(self.state.devices), jobs=len(self.state.records))

    def pause(self, *, peer: Peer) -> dict[str, Any]:
        """A request: close the drivers for two minutes, or until `restart`. Refused while jobs have GPUs."""
        del peer
        self._refuse_with_jobs()
        self.watcher.pause(120.0)
        return {}

    def _refuse_with_jobs(self) -> None:
        with self.state.lock:
            if self.state.records:
                raise RefusalError(f"{len(self.state.records)} jobs have GPUs here", Refusal.BUSY)

    def restart(self, *, peer: Peer) -> dict[str, Any]:
        """A request: restart, e.g. as the node has other devices now. Refused while jobs have GPUs."""
        del peer
        self._refuse_with_jobs()
        self.server.stop()
        return {}

    def serve(self) -> None:
        """Answer until SIGTERM or SIGINT, or until a request to restart: the guard starts the next agent."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.server.stop())
        self.server.serve(self._ready)
        with suppress(OSError):  # a full disk: what was saved before stays
            self.accounting.save()
        self.watcher.close()
        log("stop")
