"""What the parts of the node agent share: settings, devices, the jobs' records, and the lock that guards these."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from gres_probe.inventory import Inventory
from prolog_epilog import cgroups
from prolog_epilog.caps import Caps
from prolog_epilog.devices import NodeDevice
from prolog_epilog.guarding import Guard
from prolog_epilog.refusals import Refusal
from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.core import limit
from sluice.exchange.courier import Outbox
from sluice.exchange.record import JobRecord, Store

RUN = Path("/run/sluice")
RECORDS = Path("/var/lib/sluice/records")
MIB = 1 << 20


class RefusalError(SluiceError):
    """A request that is not granted, and whose fault that is."""

    def __init__(self, what: str, refusal: Refusal, *, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.refusal = refusal
        self.blame = refusal.blame


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are, and how often the watchdog looks (seconds)."""

    run: Path = RUN
    library: Path = field(default_factory=limit.library_path)
    records: Path = RECORDS
    policy: Path = Path("/etc/slurm/sluice.policy")
    period: float = 0.5
    idle_period: float = 5.0
    memory_wait: float = 10.0


class State:
    """Shared by all threads. `lock` guards `records` and their contents; `sampled` is notified with every sample."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self.inventory = Inventory(self.node)
        self.devices: list[NodeDevice] = []
        self.nics: dict[str, str] = {}  # RDMA interfaces and their device files
        self.records: dict[int, JobRecord] = {}
        self.ended: list[JobRecord] = []  # that an earlier agent left
        self.jobs = Store(settings.run / "agent/jobs")
        self.store = Store(settings.records, mode=0o755)
        self.outbox = Outbox(settings.records.parent / "outbox", self.store)
        self.caps = Caps(settings.policy)
        self.lock = threading.RLock()
        self.sampled = threading.Condition(self.lock)
        self.stopping = threading.Event()
        self.guard = Guard()
        self.suspects: set[int] = set()  # jobs whose data is not read, as agents died of it

    def find_jobs(self) -> None:
        """The jobs of an earlier agent, before there are threads."""
        found, bad = self.jobs.load_all()
        for error in bad:
            log("problem", what=error.what, remedy=error.remedy)
        self.ended = [record for record in found if record.ended is not None]
        self.records = {record.job: record for record in found if record.ended is None}
        for record in self.records.values():
            if record.sluid:
                cgroups.name_job(record.sluid, record.job)

    def users(self) -> set[int]:
        """Users who have jobs here."""
        with self.lock:
            return {record.uid for record in self.records.values()}
