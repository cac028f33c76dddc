"""Jobs that a fault of the machine has hit start anew; those that failed by themselves do not.

They are signalled first where they ask for it, start within their budget and after a wait, and with a hint not to come
back to the node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from health.checkpoints import asks
from health.slurm_job import ENDED, JobFacts, read_job, read_wishes
from policy.checkpoint import NodeCheckpoint
from sluice_base.errors import SluiceError
from sluice_base.hostlist import expand
from sluice_base.text import one_line
from slurm_client.commands import Commands

_EVIDENCE_S = 60.0  # a job that failed so long before the fault was found may have died of it
_PATIENCE_S = 300.0  # until a requeued job waits
_MOST_EXCLUDED = 16
_MOST_WAIT_S = 86400
_LEFT_S = 10  # what a job has left on a node is ended within so long after the node is back
_AHEAD_S = 30.0

log = logging.getLogger("sluice.health")

Stage = Literal["new", "signalled", "requeued", "away"]
"""away: it waits for a node that is silent, to which it may go back; `JobPlan.since` is when it may start."""


@dataclass
class JobPlan:
    """One job on its way; `began`: when the fault did; `since`: when the stage did."""

    node: str
    reason: str
    key: str
    began: float
    stage: Stage = "new"
    since: float = 0.0
    silent: bool = False  # the node stopped responding: the job may still run there


Tell = Callable[[str, str, int, str], None]
"""An event: kind, node, job, words."""


class Requeues:
    """Moves jobs' plans on, a stage at a time. Not thread-safe."""

    def __init__(self, commands: Commands, tell: Tell) -> None:
        self._commands = commands
        self._tell = tell

    def advance(
        self,
        plans: dict[int, JobPlan],
        tries: dict[int, int],
        policy: NodeCheckpoint,
        now: float,
        nodes: dict[str, int],
        down: Collection[str] = (),
    ) -> None:
        """One step of every plan; those that are through are taken out. `nodes`: how many each partition has; `down`:
        nodes that do not respond."""
        for job, plan in list(plans.items()):
            try:
                facts = read_job(self._commands, job)
                if plan.stage == "away":
                    through = facts is None or self._keep_away(plan, facts, now, plan.node in down)
                else:
                    through = facts is None or self._step(job, plan, facts, tries, policy, now, nodes)
            except SluiceError as error:
                log.error("job %d: %s", job, one_line(str(error)))
                through = now - max(plan.since, plan.began) > _PATIENCE_S and plan.stage == "requeued"
            if through:
                plans.pop(job, None)

    def _step(
        self,
        job: int,
        plan: JobPlan,
        facts: JobFacts,
        tries: dict[int, int],
        policy: NodeCheckpoint,
        now: float,
        nodes: dict[str, int],
    ) -> bool:
        """True when the plan is through."""
        if facts.state == "PENDING":
            if plan.stage == "requeued" or facts.restarts:
                return self._hint(job, plan, facts, tries, policy, now, nodes)
            return True  # never started: not hit
        if plan.stage == "requeued":
            return now - plan.since > _PATIENCE_S
        if plan.stage == "new":
            why = _why_not(facts, plan, tries.get(job, 0), policy)
            if why is not None:
                if why:
                    self._tell("health.not-requeued", plan.node, job, f"{why}; {plan.reason}")
                return True
            if facts.runs and policy.before_requeue_s and asks(read_wishes(self._commands, facts).comment) is not None:
                self._commands.run("scancel", f"--signal={policy.signal}", "--full", facts.name, check=False)
                plan.stage, plan.since = "signalled", now
                return False
        elif now - plan.since < policy.before_requeue_s and facts.runs:
            return False
        if facts.state == "COMPLETING":
            return False
        self._commands.output("scontrol", "requeue", facts.name)
        plan.stage, plan.since = "requeued", now
        return False

    def _hint(
        self,
        job: int,
        plan: JobPlan,
        facts: JobFacts,
        tries: dict[int, int],
        policy: NodeCheckpoint,
        now: float,
        nodes: dict[str, int],
    ) -> bool:
        """It waits: where it is not to go, and until when."""
        wishes = read_wishes(self._commands, facts)
        count = tries[job] = tries.get(job, 0) + 1
        if count > policy.max_retries:  # Slurm itself has requeued it, as its node went down
            self._commands.output("scontrol", "hold", facts.name)
            self._tell("health.held", plan.node, job, f"its {policy.max_retries} new starts are used up; {plan.reason}")
            return True
        wait = min(policy.backoff_s << (count - 1), _MOST_WAIT_S) if policy.backoff_s else 0
        excluded = sorted({*expand(wishes.excluded), plan.node}) if wishes.excluded else [plan.node]
        # Never so much that the job could not run at all.
        free = plan.node not in (expand(wishes.wanted) if wishes.wanted else ())
        away = (
            free
            and len(excluded) <= _MOST_EXCLUDED
            and nodes.get(facts.partition, 0) - len(excluded) >= facts.node_count
        )
        if plan.silent:
            wait = max(wait, policy.silent_wait_s, 0 if away else round(_AHEAD_S))
        changes = [f"StartTime=now+{wait}"] if wait else []
        if away:
            changes.append(f"ExcNodeList={','.join(excluded)}")
        if changes:
            self._commands.output("scontrol", "update", f"JobId={facts.name}", *changes)
        self._tell(
            "health.requeue", plan.node, job, f"start {count} of {policy.max_retries}, in {wait} s; {plan.reason}"
        )
        if plan.silent and not away:
            plan.stage, plan.since = "away", now + wait
            return False
        return True

    def _keep_away(self, plan: JobPlan, facts: JobFacts, now: float, is_down: bool) -> bool:
        """Slurm would start the job the moment that its node is back, and what it has left there is still being ended:
        slurmd refuses the second copy, upon which Slurm drains the node and holds the job."""
        if facts.state != "PENDING":
            return True
        if is_down:
            if plan.since - now < _AHEAD_S:
                plan.since = now + 2 * _AHEAD_S
                self._start_at(facts, plan.since - now)
            return False
        if plan.since - now < _LEFT_S:
            self._start_at(facts, _LEFT_S)
        return True

    def _start_at(self, facts: JobFacts, seconds: float) -> None:
        self._commands.output("scontrol", "update", f"JobId={facts.name}", f"StartTime=now+{seconds:.0f}")


def _why_not(facts: JobFacts, plan: JobPlan, tries: int, policy: NodeCheckpoint) -> str | None:
    """Why a job is not started anew; empty where nobody need be told; None: it is."""
    if facts.state in ENDED:
        if facts.state not in ("FAILED", "NODE_FAIL", "BOOT_FAIL"):
            return ""
        if facts.end_time is None or facts.end_time < plan.began - _EVIDENCE_S:
            return ""
    if not policy.requeue:
        return "checkpoint.requeue is off"
    if not facts.batch:
        return "it is no batch job"
    if not facts.requeue:
        return "it may not be requeued (--no-requeue)"
    if tries >= policy.max_retries:
        return f"its {policy.max_retries} new starts are used up"
    return None
