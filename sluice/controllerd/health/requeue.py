"""Requeues jobs that a fault of the machine has hit; those that failed by themselves are not requeued.

They are signalled first where they ask for it, restart within their budget and after a wait, and with a hint not to go
back to the node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from policy.checkpoint import NodeCheckpoint
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand
from sluice.base.text import one_line
from sluice.slurm.commands import Commands
from sluice.slurm.control import SAVE_WORDS
from sluice.slurm.job import ENDED, JobFacts, read_job, read_job_options

_EVIDENCE_S = 60.0  # a job that failed this long before the fault was found may have died of it
_PATIENCE_S = 300.0  # until a requeued job waits
_MOST_EXCLUDED = 16
_MOST_WAIT_S = 86400
_LEFT_S = 10  # what a job has left on a node is ended within this time after the node is back
_AHEAD_S = 30.0

log = logging.getLogger("sluice.health")

Stage = Literal["new", "signalled", "requeued", "away"]
"""away: it waits for a node that is silent, to which it may go back; `Requeue.since` is when it may start."""


@dataclass
class Requeue:
    """One job on its way; `began`: when the fault did; `since`: when the stage did."""

    node: str
    reason: str
    key: str
    began: float
    stage: Stage = "new"
    since: float = 0.0
    silent: bool = False  # the node stopped responding: the job may still run there


Report = Callable[[str, str, int, str], None]
"""An event: kind, node, job, words."""


class Requeues:
    """Moves requeues on, a stage at a time. Not thread-safe."""

    def __init__(self, commands: Commands, report: Report) -> None:
        self._commands = commands
        self._report = report

    def advance(
        self,
        requeues: dict[int, Requeue],
        tries: dict[int, int],
        policy: NodeCheckpoint,
        now: float,
        nodes: dict[str, int],
        down: Collection[str] = (),
    ) -> None:
        """One step of every requeue; those that are done are removed. `nodes`: how many each partition has; `down`:
        nodes that do not respond."""
        for job, requeue in list(requeues.items()):
            try:
                facts = read_job(self._commands, job)
                if requeue.stage == "away":
                    through = facts is None or self._keep_away(requeue, facts, now, requeue.node in down)
                else:
                    through = facts is None or self._step(job, requeue, facts, tries, policy, now, nodes)
            except SluiceError as error:
                log.error("job %d: %s", job, one_line(str(error)))
                through = now - max(requeue.since, requeue.began) > _PATIENCE_S and requeue.stage == "requeued"
            if through:
                requeues.pop(job, None)

    def _step(
        self,
        job: int,
        requeue: Requeue,
        facts: JobFacts,
        tries: dict[int, int],
        policy: NodeCheckpoint,
        now: float,
        nodes: dict[str, int],
    ) -> bool:
        """True when the requeue is done."""
        if facts.state == "PENDING":
            if requeue.stage == "requeued" or facts.restarts:
                return self._hint(job, requeue, facts, tries, policy, now, nodes)
            return True  # never started: not hit
        if requeue.stage == "requeued":
            return now - requeue.since > _PATIENCE_S
        if requeue.stage == "new":
            why = _why_not(facts, requeue, tries.get(job, 0), policy)
            if why is not None:
                if why:
                    self._report("health.not-requeued", requeue.node, job, f"{why}; {requeue.reason}")
                return True
            words = self._signal(facts, policy) if facts.runs and policy.before_requeue_s else ()
            if words:
                self._commands.run("scancel", *words, facts.name, check=False)
                requeue.stage, requeue.since = "signalled", now
                return False
        elif now - requeue.since < policy.before_requeue_s and facts.runs:
            return False
        if facts.state == "COMPLETING":
            return False
        self._commands.output("scontrol", "requeue", facts.name)
        requeue.stage, requeue.since = "requeued", now
        return False

    def _signal(self, facts: JobFacts, policy: NodeCheckpoint) -> tuple[str, ...]:
        """How scancel asks a job to save its state; nothing where it does not."""
        options = read_job_options(self._commands, facts)
        if policy.is_system(options.comment):
            return SAVE_WORDS
        return (f"--signal={policy.signal}", "--full") if policy.rhythm(options.account, options.comment) else ()

    def _hint(
        self,
        job: int,
        requeue: Requeue,
        facts: JobFacts,
        tries: dict[int, int],
        policy: NodeCheckpoint,
        now: float,
        nodes: dict[str, int],
    ) -> bool:
        """It waits: exclude nodes, and set its earliest start."""
        options = read_job_options(self._commands, facts)
        count = tries[job] = tries.get(job, 0) + 1
        if count > policy.max_retries:  # Slurm itself has requeued it, as its node went down
            self._commands.output("scontrol", "hold", facts.name)
            self._report(
                "health.held", requeue.node, job, f"its {policy.max_retries} restarts are used up; {requeue.reason}"
            )
            return True
        wait = min(policy.backoff_s << (count - 1), _MOST_WAIT_S) if policy.backoff_s else 0
        excluded = sorted({*expand(options.excluded), requeue.node}) if options.excluded else [requeue.node]
        # Never so much that the job could not run at all.
        free = requeue.node not in (expand(options.wanted) if options.wanted else ())
        away = (
            free
            and len(excluded) <= _MOST_EXCLUDED
            and nodes.get(facts.partition, 0) - len(excluded) >= facts.node_count
        )
        if requeue.silent:
            wait = max(wait, policy.silent_wait_s, 0 if away else round(_AHEAD_S))
        changes = [f"StartTime=now+{wait}"] if wait else []
        if away:
            changes.append(f"ExcNodeList={','.join(excluded)}")
        if changes:
            self._commands.output("scontrol", "update", f"JobId={facts.name}", *changes)
        self._report(
            "health.requeue", requeue.node, job, f"start {count} of {policy.max_retries}, in {wait} s; {requeue.reason}"
        )
        if requeue.silent and not away:
            requeue.stage, requeue.since = "away", now + wait
            return False
        return True

    def _keep_away(self, requeue: Requeue, facts: JobFacts, now: float, is_down: bool) -> bool:
        """Slurm would start the job as soon as its node is back, while what it left there is still being ended:
        slurmd refuses the second copy, after which Slurm drains the node and holds the job."""
        if facts.state != "PENDING":
            return True
        if is_down:
            if requeue.since - now < _AHEAD_S:
                requeue.since = now + 2 * _AHEAD_S
                self._start_at(facts, requeue.since - now)
            return False
        if requeue.since - now < _LEFT_S:
            self._start_at(facts, _LEFT_S)
        return True

    def _start_at(self, facts: JobFacts, seconds: float) -> None:
        self._commands.output("scontrol", "update", f"JobId={facts.name}", f"StartTime=now+{seconds:.0f}")


def _why_not(facts: JobFacts, requeue: Requeue, tries: int, policy: NodeCheckpoint) -> str | None:
    """Why a job is not requeued; empty where this needs no report; None: it is requeued."""
    if facts.state in ENDED:
        if facts.state not in ("FAILED", "NODE_FAIL", "BOOT_FAIL"):
            return ""
        if facts.end_time is None or facts.end_time < requeue.began - _EVIDENCE_S:
            return ""
    if not policy.requeue:
        return "checkpoint.requeue is off"
    if not facts.batch:
        return "it is not a batch job"
    if not facts.requeue:
        return "it may not be requeued (--no-requeue)"
    if tries >= policy.max_retries:
        return f"its {policy.max_retries} restarts are used up"
    return None
