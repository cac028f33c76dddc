"""Moves images from this node to storage that nodes share, at a bounded rate, and says meanwhile where a job can go on.

Slurm lets a requeued job wait for two minutes. Where its image is not moved by then the job waits on, for as long as
this agent moves images and says so: each word of it holds for two minutes, so that no job waits for a node that died.
When the image is moved, the nodes that cannot go on with it are excluded for the job, before Slurm chooses one. What is
half moved has another name, and the node's own copy goes only when the other one is on disk and was read again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.checkpoint import NodeSystem
from prolog_epilog.checkpoint import cpus
from prolog_epilog.checkpoint.gpus import from_facts, why_unlike
from prolog_epilog.checkpoint.images import Images, Run
from prolog_epilog.checkpoint.shared import Last, Shared
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand, fold
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.slurm.commands import Commands
from sluice.slurm.job import ENDED, JobFacts, read_job, read_job_options

LOOK_S = 10.0
AGAIN_S = 60.0
_WAIT_S = 120  # as Slurm itself lets a requeued job wait
_EXTEND_S = 50.0
_LOCK_S = 60.0
_ENDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a drain works with: the agent's images, where they go by the policy, and a lock of a job's own."""

    images: Images
    node: str
    shared: Callable[[], Shared | None]
    policy: Callable[[], NodeSystem]
    alone: Callable[[int, float], AbstractContextManager[int]]
    told: Callable[[int, str], None]
    stopping: threading.Event


class Drains:
    """One thread."""

    def __init__(self, place: Place, commands: Commands, clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._commands = commands
        self._clock = clock
        self._extended = 0.0
        self._waits: set[int] = set()  # jobs whose start was put off until their image is moved
        self._said: dict[int, str] = {}

    def run(self) -> float | None:
        """A duty: seconds until the next look. Raises SluiceError, OSError."""
        shared = self._place.shared()
        if shared is None:
            return None
        shared.images.sweep()
        again: list[float] = []
        self._extended = self._clock()
        for run in self._movable():
            try:
                if not self._move(run, shared):
                    again.append(_ENDS_S)
                self._said.pop(run.job, None)
            except FileNotFoundError:
                continue  # it was resumed here meanwhile
            except (OSError, SluiceError) as error:
                again.append(AGAIN_S)
                self._say(run, one_line(error.what if isinstance(error, SluiceError) else str(error)))
        return min(again, default=None)

    def _movable(self) -> list[Run]:
        images = self._place.images
        return [run for run in images.runs() if images.keys.has(run.job)]

    def _move(self, run: Run, shared: Shared) -> bool:
        """Each step can be repeated; False: it is to be, as its job still ends.

        Raises FileNotFoundError where the image is used or removed meanwhile, SluiceError, OSError.
        """
        images = self._place.images
        facts = images.facts(run)
        if not shared.is_old(run) and not shared.images.has(run):
            policy = self._place.policy()
            if shared.images.size(run.uid) + images.size_of(run) > policy.shared_quota_bytes:
                raise SluiceError("its user's quota on shared storage is used up")
            images.copy(run, shared.images, self._paced(policy.rate_bytes))
        with self._place.alone(run.job, _LOCK_S):
            if not images.has(run) or shared.is_old(run):  # the job runs, or has run
                shared.images.drop(run)
                if not images.work(run.job).exists():  # else it is just resumed from it
                    images.forget(run.job, run.restarts)
                return True
            if not shared.images.has(run):
                shared.images.complete(run)
        words = self._let_start(run, shared, facts)
        if words is None:
            return False
        with self._place.alone(run.job, _LOCK_S):
            images.forget(run.job, run.restarts)
        log("moved", job=run.job, uid=run.uid, what=words)
        self._place.told(run.job, words)
        return True

    def _paced(self, rate: int) -> Callable[[int], None]:
        """Bytes a second."""
        began, done = self._clock(), 0

        def paced(size: int) -> None:
            nonlocal done
            done += size
            self._extend()
            if self._place.stopping.wait(max(0.0, began + done / rate - self._clock())):
                raise SluiceError("the agent is stopped; the next one begins again")

        return paced

    def _extend(self) -> None:
        """Jobs whose images are to be moved wait on."""
        if self._clock() - self._extended < _EXTEND_S:
            return
        self._extended = self._clock()
        for run in self._movable():
            with suppress(SluiceError):
                facts = read_job(self._commands, run.job)
                if facts is not None and facts.state == "PENDING" and run.job not in self._said:
                    self._update(facts, f"StartTime=now+{_WAIT_S}")
                    self._waits.add(run.job)

    def _let_start(self, run: Run, shared: Shared, facts: dict[str, Any]) -> str | None:
        """On nodes that can go on with it; what is to be said of it, None: its run still ends."""
        words = "saved, and on shared storage"
        try:
            able = {name for name, of_node in shared.nodes().items() if not why_not(facts, of_node)}
            others = able - {self._place.node}
            known = read_job(self._commands, run.job)
            if known is None or known.state in ENDED - {"FAILED"}:
                return words
            if known.state != "PENDING":
                ends = known.state in ("COMPLETING", "FAILED") or known.restarts <= run.restarts
                return None if ends else words
            changes = self._exclusions(run, shared, known, able) if others else []
            if run.job in self._waits:
                self._waits.discard(run.job)
                changes.append("StartTime=now")
            if changes:
                self._update(known, *changes)
        except (OSError, SluiceError) as error:
            return f"{words}; where it can go on is not known: {one_line(str(error))}"
        if not others:
            return f"{words}; no other node is like {self._place.node}: elsewhere it begins again from its start"
        return f"{words}: goes on on {self._place.node} and {len(others)} other node{'s' * (len(others) > 1)}"

    def _exclusions(self, run: Run, shared: Shared, known: JobFacts, able: set[str]) -> list[str]:
        last = shared.last(run.job) or Last(run.restarts)
        options = read_job_options(self._commands, known)
        own = {*expand(options.excluded)} - {*last.excluded}
        nodes = {*self._commands.output("sinfo", "-h", "-a", "-N", "-o", "%N").split()}
        added = nodes - able - own
        if nodes <= own | added:  # no node would be left
            added = set()
        shared.note(run.job, Last(run.restarts, None, self._place.node, tuple(sorted(added))))
        wanted = own | added
        return [] if wanted == {*expand(options.excluded)} else [f"ExcNodeList={fold(wanted)}"]

    def _update(self, facts: JobFacts, *changes: str) -> None:
        self._commands.output("scontrol", "update", f"JobId={facts.name}", *changes)

    def _say(self, run: Run, why: str) -> None:
        """Once; it does not wait longer."""
        if self._said.get(run.job) == why:
            return
        self._said[run.job] = why
        log("problem", job=run.job, what=f"its state stays on this node: {why}")
        self._place.told(run.job, on_one_node(self._place.node, why))


def on_one_node(node: str, why: str = "") -> str:
    """What is said of a job whose image no other node can read."""
    return f"saved on {node} alone{f' ({why})' if why else ''}: elsewhere it begins again from its start"


def node_facts(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """What a node is like, for others. Raises OSError."""
    return {"cpu": cpus.here(), "gpus": gpus}


def why_not(saved: dict[str, Any], node: dict[str, Any]) -> str:
    """Why a node cannot go on with what was saved; empty: it can, as far as is known before it is tried."""
    try:
        problem = cpus.why_not(saved["cpu"], node["cpu"])
        return problem or why_unlike(from_facts(saved["gpus"]), from_facts(node["gpus"]))
    except (KeyError, TypeError):
        return "what it says of itself is of another version of Sluice"


def folder_of(policy: NodeSystem | None) -> Path | None:
    """Where images go by the policy; None: they stay."""
    return Path(policy.shared) if policy is not None and policy.shared else None
