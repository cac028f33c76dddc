"""A drill: the backup takes over as planned, and the primary comes back, with every job counted before and after."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.run import CommandError, run_command
from sluice.failover import shared
from sluice.failover.status import Status, look
from sluice.slurm import SlurmClient
from sluice.slurm.commands import Commands

SCHEMA_VERSION = 1
REPORTS = Path("/var/lib/sluice/drills")
_POLL_S = 0.2
_LIVE = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "STOPPED")

Say = Callable[[str], None]


@dataclass(slots=True)
class Jobs:
    """The queue at one moment."""

    states: dict[str, str] = field(default_factory=dict)
    """By job, or task of an array: squeue's state."""
    restarts: dict[str, int] = field(default_factory=dict)

    def count(self) -> dict[str, int]:
        """How many in each state."""
        found: dict[str, int] = {}
        for state in self.states.values():
            found[state] = found.get(state, 0) + 1
        return found


@dataclass(slots=True)
class Leg:
    """One half of the drill."""

    to: str
    took_s: float = 0.0
    """Until the new leader answered with the queue."""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Jobs that were waiting or running, and are no longer known."""
    restarted: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What a drill found."""

    begun: float
    legs: list[Leg] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    aborted: str = ""

    @property
    def good(self) -> bool:
        """Whether both halves succeeded."""
        return not self.aborted and len(self.legs) == 2 and not any(leg.missing or leg.restarted for leg in self.legs)

    def document(self) -> dict[str, Any]:
        """The report as it is stored."""
        return {"schema_version": SCHEMA_VERSION, "good": self.good, **asdict(self)}


class Drill:
    """One drill. Each step leaves a working cluster: it can be interrupted at any point."""

    def __init__(
        self, cluster: shared.Cluster, client: SlurmClient, commands: Commands, start: Sequence[str], say: Say
    ) -> None:
        self.cluster = cluster
        self.client = client
        self.commands = commands
        self.start = start
        """The command that starts slurmctld on the primary; empty: an admin does."""
        self.say = say

    def check(self, force: bool) -> Status:
        """Refuse where a takeover may go wrong. Raises SluiceError."""
        status = look(self.cluster, self.client)
        if len(self.cluster.hosts) < 2:
            raise SluiceError("drill: slurm.conf names one controller", remedy="add a second SlurmctldHost line")
        if status.leader != self.cluster.hosts[0]:
            raise SluiceError(
                f"drill: {status.leader or 'no controller'} leads, not the primary {self.cluster.hosts[0]}",
                remedy="start slurmctld on the primary first",
            )
        if status.problems and not force:
            raise SluiceError(
                "drill: " + "; ".join(finding.what for finding in status.problems),
                remedy="correct this first, or use --force",
            )
        return status

    def run(self, limit_s: float) -> Report:
        """Both halves. Errors are in the report; so is an end by Ctrl-C."""
        report = Report(time.time())
        primary, backup = self.cluster.hosts[:2]
        try:
            self.say(f"{backup} takes over ({primary}'s slurmctld ends)")
            self.half(report, backup, lambda: self.commands.output("scontrol", "takeover"), limit_s)
            if self.start:
                self.say(f"{primary} returns: {' '.join(self.start)}")
                self.half(report, primary, lambda: run_command(self.start, timeout=120).stdout, limit_s)
            else:
                self.say(f"start slurmctld on {primary} now: systemctl start slurmctld")
                self.half(report, primary, lambda: "", max(limit_s, 900))
        except SluiceError as error:
            report.aborted = str(error)
        except KeyboardInterrupt:
            report.aborted = f"interrupted; the cluster works. To return: start slurmctld on {primary}"
        return report

    def half(self, report: Report, to: str, act: Callable[[], str], limit_s: float) -> None:
        """One change of leader. Raises SluiceError when it does not come."""
        before = self.jobs()
        leg = Leg(to, before=before.count())
        report.legs.append(leg)
        begun = time.monotonic()
        act()
        after = self.wait(to, begun + limit_s)
        leg.took_s = round(time.monotonic() - begun, 2)
        leg.after = after.count()
        live = [job for job, state in before.states.items() if state in _LIVE]
        leg.missing = [job for job in live if job not in after.states and not self.known(job)]
        leg.restarted = [job for job in live if after.restarts.get(job, before.restarts[job]) > before.restarts[job]]
        self.say(f"{to} leads after {leg.took_s:.1f} s; {sum(leg.after.values())} jobs known")

    def wait(self, to: str, deadline: float) -> Jobs:
        """Until `to` leads and answers; the queue then. Raises SluiceError."""
        while True:
            beat = shared.heartbeat(self.cluster, time.time())
            if beat is not None and beat.host == to:
                with suppress(CommandError):
                    return self.jobs()
            if time.monotonic() > deadline:
                raise SluiceError(
                    f"drill: {to} does not lead in time; now: {beat.host if beat else 'no controller'}",
                    remedy=f"see slurmctld's log on {to}; sluice failover status",
                )
            time.sleep(_POLL_S)

    def jobs(self) -> Jobs:
        """The whole queue."""
        shown = self.commands.output(
            "squeue", "-h", "-a", "-r", "-t", "all", "-O", "JobArrayID:40,StateCompact:4,State:20,RestartCnt:10"
        )
        jobs = Jobs()
        for line in shown.splitlines():
            words = line.split()
            if len(words) == 4 and words[3].isdigit():
                jobs.states[words[0]] = words[2]
                jobs.restarts[words[0]] = int(words[3])
        return jobs

    def known(self, job: str) -> bool:
        """Whether slurmctld or accounting knows a job."""
        if self.commands.run("scontrol", "-o", "show", "job", job, check=False).returncode == 0:
            return True
        with suppress(SluiceError):
            return bool(self.commands.output("sacct", "-n", "-X", "-P", "-o", "JobID", "-j", job).strip())
        return False


def keep(report: Report, folder: Path = REPORTS, event_file: Path = events.DEFAULT_PATH) -> Path:
    """Keep a report as a file of its own, and as an event. Raises OSError."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    name = datetime.fromtimestamp(report.begun, UTC).strftime("%Y%m%dT%H%M%SZ.json")
    write_atomic(folder / name, json.dumps(report.document(), indent=1) + "\n")
    times = [leg.took_s for leg in report.legs]
    with suppress(OSError, SluiceError):
        events.append(event_file, "drill", good=report.good, seconds=times, aborted=report.aborted[:500])
    return folder / name


def kept(folder: Path = REPORTS) -> list[dict[str, Any]]:
    """The reports of earlier drills, oldest first; damaged ones are left out."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        with suppress(OSError, ValueError):
            document = json.loads(path.read_text())
            if isinstance(document, dict) and document.get("schema_version") == SCHEMA_VERSION:
                found.append(document)
    return found
