"""One round of checks: from facts and the memory of earlier rounds to findings. Uses no clock, files or drivers."""

from __future__ import annotations

from dataclasses import dataclass, field

from policy.health import NodeHealth, Rule
from policy.units import show_seconds
from prolog_epilog.health import xid
from prolog_epilog.health.check import Answer, GpuCheck, Kind, Measured, NodeCheck, Status
from prolog_epilog.health.checks import GPU_CHECKS, NODE_CHECKS
from prolog_epilog.health.facts import GpuFacts, NodeFacts
from prolog_epilog.health.memory import Found, Memory, Subject

NODE = "node"
TAG = "sluice: "
"""Prefix of every reason that Sluice gives Slurm."""
_ACTS = ("drain-gpu", "drain-node", "requeue")
_GAP_S = 7200.0  # a round is due every hour at least
_COVER = 0.8  # of a share's window that must have been seen


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `gpu` is None for the node; `acts`: the policy is in force and an action is due."""

    check: str
    gpu: GpuFacts | None
    severity: str
    action: str
    acts: bool
    began: float
    text: str
    jobs: tuple[int, ...]
    new: bool
    quick: bool

    @property
    def reason(self) -> str:
        """As Slurm shows it."""
        number = "" if self.gpu is None or not self.gpu.gpu.numbers else f" GPU {self.gpu.gpu.numbers[0]}"
        return f"{TAG}{self.check}{number}: {self.text}"[:200]


@dataclass(slots=True)
class Round:
    """The result. `unknown`: checks without a reading, by subject."""

    findings: list[Finding] = field(default_factory=list)
    unknown: dict[str, list[str]] = field(default_factory=dict)
    passed: dict[str, list[str]] = field(default_factory=dict)


def judge(facts: NodeFacts, memory: Memory, policy: NodeHealth) -> Round:
    """Run every check that the policy has on; `memory` is updated. In mode off nothing runs."""
    result = Round()
    if policy.mode == "off":
        return result
    _forget_gone(facts, memory)
    _forget_gap(facts, memory)
    for gpu in facts.gpus:
        xid.record(memory.of(gpu.gpu.uuid), gpu, policy)
    xid.blame({gpu.gpu.uuid: memory.of(gpu.gpu.uuid) for gpu in facts.gpus}, facts.now, policy)
    for name, rule in policy.checks.items():
        if name in NODE_CHECKS:
            check = NODE_CHECKS[name]
            _decide(name, rule, check, check.measure(facts, policy), None, facts, memory.of(NODE), policy, result)
    for gpu in facts.gpus:
        subject = memory.of(gpu.gpu.uuid)
        _note_residual(gpu, subject)
        for name, rule in policy.checks.items():
            if name in GPU_CHECKS and gpu.gpu.vendor in GPU_CHECKS[name].vendors:
                of_gpu = GPU_CHECKS[name]
                answer = _xid_answer(subject, facts.now, rule) if name == "xid" else None
                if answer is None or not gpu.answered:
                    answer = of_gpu.measure(gpu, facts, policy)
                _decide(name, rule, of_gpu, answer, gpu, facts, subject, policy, result)
    _warn_of_strange(facts, memory, policy, result)
    _repeat_rule(facts, memory, policy, result)
    _count_passes(facts, memory, result)
    return result


def _forget_gone(facts: NodeFacts, memory: Memory) -> None:
    """GPUs that were taken out of the machine before the agent started."""
    here = {NODE, *(gpu.gpu.uuid for gpu in facts.gpus)}
    for name in [name for name in memory.subjects if name not in here]:
        del memory.subjects[name]


def _forget_gap(facts: NodeFacts, memory: Memory) -> None:
    """A condition need not have lasted through a time without checks (or in which the clock was set)."""
    if not 0 <= facts.now - memory.last_round <= _GAP_S:
        for subject in memory.subjects.values():
            subject.since.clear()
            subject.shares.clear()
    memory.last_round = facts.now


def _note_residual(gpu: GpuFacts, subject: Subject) -> None:
    """Drivers keep some memory for themselves: it is taken as the least that was seen so far."""
    if gpu.residual_bytes is None or gpu.jobs:
        return
    if subject.least_residual is None or gpu.residual_bytes < subject.least_residual:
        subject.least_residual = gpu.residual_bytes
    gpu.residual_bytes -= subject.least_residual


def _xid_answer(subject: Subject, now: float, rule: Rule) -> Answer | None:
    """The GPU's own events; of other unknown ones at least a warning; None where there are none."""
    count, text = xid.counted(subject, now, rule.window_s)
    if count:
        return Measured(count, text)
    return Measured(0)


def _decide(
    name: str,
    rule: Rule,
    check: GpuCheck | NodeCheck,
    answer: Answer,
    gpu: GpuFacts | None,
    facts: NodeFacts,
    subject: Subject,
    policy: NodeHealth,
    result: Round,
) -> None:
    """One check on one subject."""
    key = NODE if gpu is None else gpu.gpu.uuid
    if not isinstance(answer, Measured):
        subject.since.pop(name, None)
        if answer is Status.UNKNOWN:
            result.unknown.setdefault(key, []).append(name)
            _keep(name, rule, gpu, subject, policy, result)
        else:
            subject.found.pop(name, None)
        return
    value = _over_time(name, rule, check.kind, answer.value, facts.now, subject)
    if value is None:
        return  # too little was seen yet
    bad = value < rule.threshold if check.below else value >= rule.threshold and value > 0
    if not bad:
        subject.since.pop(name, None)
        subject.found.pop(name, None)
        result.passed.setdefault(key, []).append(name)
        return
    since = _since(subject, name, answer.detail if check.per_detail else "", facts.now)
    if check.kind == "level" and name != "xid" and facts.now - since < rule.window_s:
        return
    text = check.text.format(
        value=value, threshold=rule.threshold, window=show_seconds(rule.window_s), detail=answer.detail
    )
    found = subject.found.get(name)
    new = found is None
    if found is None:
        jobs = facts.jobs if gpu is None else gpu.recent_jobs
        found = subject.found[name] = Found(facts.now, text, list(jobs))
        if rule.severity == "fatal" and gpu is not None:
            subject.fatal.append(facts.now)
    found.text = text
    result.findings.append(_finding(name, rule, gpu, found, policy, new))


def _since(subject: Subject, name: str, detail: str, now: float) -> float:
    """Since when the condition has held, with this detail."""
    if subject.details.get(name, detail) != detail:
        subject.since.pop(name, None)
    subject.details[name] = detail
    return subject.since.setdefault(name, now)


def _keep(name: str, rule: Rule, gpu: GpuFacts | None, subject: Subject, policy: NodeHealth, result: Round) -> None:
    """A finding stays while it is not known whether it still holds."""
    found = subject.found.get(name)
    if found is not None:
        result.findings.append(_finding(name, rule, gpu, found, policy, False))


def _finding(name: str, rule: Rule, gpu: GpuFacts | None, found: Found, policy: NodeHealth, new: bool) -> Finding:
    acts = policy.mode == "enforce" and not rule.shadow and rule.action in _ACTS
    return Finding(
        name, gpu, rule.severity, rule.action, acts, found.began, found.text, tuple(found.jobs), new, rule.quick
    )


def _over_time(name: str, rule: Rule, kind: Kind, value: float, now: float, subject: Subject) -> float | None:
    """What is compared with the threshold; None while too little of the window was seen."""
    if kind == "growth":
        before = subject.last.get(name)
        subject.last[name] = value
        grown = subject.grown.setdefault(name, [])
        if before is not None and value != before:
            grown.append((now, value - before if value > before else value))  # reset or reboot
        grown[:] = [(when, more) for when, more in grown if now - when <= rule.window_s]
        return sum(more for _, more in grown)
    if kind == "share":
        shares = subject.shares.setdefault(name, [])
        shares.append((now, float(value > 0)))
        shares[:] = [(when, one) for when, one in shares if now - when <= rule.window_s]
        if now - shares[0][0] < _COVER * rule.window_s:
            return None
        return 100 * sum(one for _, one in shares) / len(shares)
    return value


def _repeat_rule(facts: NodeFacts, memory: Memory, policy: NodeHealth, result: Round) -> None:
    """After too many fatal findings within the window a GPU stays out until a person returns it."""
    for gpu in facts.gpus:
        subject = memory.of(gpu.gpu.uuid)
        subject.fatal = [when for when in subject.fatal if facts.now - when <= policy.fatal_window_s]
        if not subject.kept and len(subject.fatal) >= policy.fatal_events:
            subject.kept = f"{len(subject.fatal)} fatal events within {show_seconds(policy.fatal_window_s)}"
        if subject.kept:
            began = subject.fatal[-1] if subject.fatal else facts.now
            result.findings.append(
                Finding(
                    "repeated",
                    gpu,
                    "fatal",
                    "drain-gpu",
                    policy.mode == "enforce",
                    began,
                    f"{subject.kept}; out of service until `sluice health return`",
                    (),
                    False,
                    True,
                )
            )


def _count_passes(facts: NodeFacts, memory: Memory, result: Round) -> None:
    """A round without a finding that would take it out counts, if its driver answered."""
    bad = {NODE if one.gpu is None else one.gpu.gpu.uuid for one in result.findings if one.action in _ACTS}
    answered = {gpu.gpu.uuid: gpu.answered for gpu in facts.gpus}
    for name, subject in memory.subjects.items():
        if name in bad:
            subject.passes = 0
        elif answered.get(name, True):
            subject.passes += 1


def _warn_of_strange(facts: NodeFacts, memory: Memory, policy: NodeHealth, result: Round) -> None:
    """XID events that no list names."""
    rule = policy.checks.get("xid")
    for gpu in facts.gpus if rule is not None else ():
        numbers = xid.strange(memory.of(gpu.gpu.uuid), facts.now, max(rule.window_s, 3600) if rule else 0)
        if numbers:
            text = f"XID {', '.join(map(str, numbers))}, which no list names"
            result.findings.append(Finding("xid", gpu, "warning", "warn", False, facts.now, text, (), False, False))
