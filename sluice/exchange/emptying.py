"""Nodes that an administrator empties: the order, the question, and what slurmctld says.

The files are those of `slurm_plugin/planner/emptying.h`. The order is the reason for which a node is
drained, so that Slurm keeps it. Times are seconds since 1970.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.plugin_list import checksummed, items_of, read_list

ASK_FILE = "sluice.empty"
"""Below StateSaveLocation: the nodes that are asked about."""
LOCK_FILE = f"{ASK_FILE}.lock"
"""The same folder: held by who asks. A file, as NFS lets nobody lock a folder."""
SAID_FILE = "sluice.emptying"
"""The same folder: what slurmctld says."""
MOST_NODES = 4096
"""That are asked about at once; slurmctld reads no more."""
PATIENCE_S = 40.0
"""slurmctld looks every five seconds."""
Decision = Literal["moves", "later", "ends", "stays"]

_BY_HAND = "wait for it, or cancel it"
REASONS = {
    "-": "saves, is requeued and goes on elsewhere",
    "in-time": "ends by the deadline",
    "soon": "ends before a move would be over",
    "place": "moves as soon as there is a place for it elsewhere",
    "hour": "moves when as many jobs as may be an hour (moves_per_hour) were not moved lately",
    "off": f"no job is moved here (compaction and the failover journal in the policy): {_BY_HAND}",
    "kind": f"only batch jobs with GPUs, on one node that they do not name, are moved: {_BY_HAND}",
    "requeue": f"it may not be requeued (--no-requeue): {_BY_HAND}",
    "tenant": f"the policy moves no jobs of its tenant: {_BY_HAND}",
    "unsaved": f"it has not saved since it started, and moves only once it has: {_BY_HAND}",
    "spent": f"it was moved as often as it may be, or did not save when it was asked to: {_BY_HAND}",
}
"""By the plugins' word."""

_HEAD = "sluice-emptying 1\n"
_NODE = r"([!-~]{1,64})"
_LINE = re.compile(
    rf"at (\d{{1,13}})|node {_NODE} (\d{{1,13}}) (order|ask)|"
    rf"job (\d{{1,10}}) {_NODE} (moves|later|ends|stays) ({'|'.join(map(re.escape, REASONS))}) (\d{{1,13}}) {_NODE}"
)
_ORDER = "sluice empty"
_BEFORE = "; drained before: "
_IS_ORDER = re.compile(rf"{_ORDER}(?: by \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?: ?(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LeavingJob:
    """What becomes of one job on one node."""

    job: int
    node: str
    decision: Decision
    why: str
    """A key of `REASONS`."""
    end: int
    """At the latest; 0: it has no limit."""
    to: str
    """The node where it goes on; empty: none."""

    @property
    def reason(self) -> str:
        """For people."""
        return f"{REASONS[self.why].removesuffix('elsewhere')}on {self.to}" if self.to else REASONS[self.why]


@dataclass(frozen=True, slots=True)
class Emptying:
    """What slurmctld said at a moment."""

    at: int
    deadlines: dict[str, int]
    """Of the nodes; 0: none."""
    ordered: frozenset[str]
    """Those that are not only asked about."""
    jobs: list[LeavingJob]


def parse_emptying(text: str, *, source: str) -> Emptying:
    """What a file says. Raises SluiceError that names `source`."""
    remedy = "slurmctld writes it again within seconds"
    rows = items_of(text, head=_HEAD, line=_LINE, what="a node or job", source=source, remedy=remedy)
    nodes = [row for row in rows if row[1]]
    return Emptying(
        at=max((int(row[0]) for row in rows if row[0]), default=0),
        deadlines={row[1]: int(row[2]) for row in nodes},
        ordered=frozenset(row[1] for row in nodes if row[3] == "order"),
        jobs=[_job(*row[4:]) for row in rows if row[4]],
    )


def _job(number: str, node: str, decision: str, why: str, end: str, to: str) -> LeavingJob:
    return LeavingJob(int(number), node, cast(Decision, decision), why, int(end), "" if to == "-" else to)


def read_emptying(folder: Path) -> Emptying:
    """What StateSaveLocation has; of no node where there is no file. Raises SluiceError, OSError."""
    path = folder / SAID_FILE
    said = read_list(path, lambda text: [parse_emptying(text, source=str(path))])
    return said[0] if said else Emptying(0, {}, frozenset(), [])


def ask(folder: Path, nodes: Collection[str], deadline: int, *, patience_s: float = PATIENCE_S) -> Emptying:
    """What would become of the jobs on these nodes, by slurmctld; nothing is done to them.

    One caller at a time. Raises SluiceError where there is no answer in time; OSError.
    """
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.geteuid() == 0:
            os.fchown(lock, folder.stat().st_uid, -1)  # SlurmUser asks as well
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _ask(folder, nodes, deadline, patience_s)
    finally:
        os.close(lock)


def _ask(folder: Path, nodes: Collection[str], deadline: int, patience_s: float) -> Emptying:
    asked = int(time.time())
    until = asked + int(patience_s) + 1
    lines = "".join(f"{node} {until} {deadline}\n" for node in sorted(nodes))
    path = folder / ASK_FILE
    write_atomic(path, checksummed(f"sluice-empty 1\n{lines}"), mode=0o644)
    try:
        while time.time() < until:
            said = read_emptying(folder)
            if said.at > asked and all(said.deadlines.get(node) == deadline for node in nodes):
                return said
            time.sleep(0.2)
    finally:
        path.unlink(missing_ok=True)
    raise SluiceError(
        f"slurmctld has not said in {patience_s:.0f} s what would become of the jobs",
        remedy="nodes are emptied at level place, while slurmctld runs (sluice plugin status); `scontrol update "
        "NodeName=... State=DRAIN` lets nodes take no more jobs without that",
    )


def order(text: str, deadline: int, before: str = "") -> str:
    """The reason to drain a node with, so that it is emptied. `before`: the one for which it is drained already."""
    by = f" by {datetime.fromtimestamp(deadline, UTC):%Y-%m-%dT%H:%M:%SZ}" if deadline else ""
    return f"{_ORDER}{by}: {text.replace(_BEFORE, ' ')}{_BEFORE if before else ''}{before}"


def reason_before(reason: str) -> str:
    """For what a node with this order was drained before it; empty: it was not."""
    return reason.partition(_BEFORE)[2]


def is_order(reason: str) -> bool:
    """Whether a node that is drained with this reason is emptied."""
    return _IS_ORDER.fullmatch(reason) is not None
