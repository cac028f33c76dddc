"""The controller's side: what is taken out of service, what returns, which jobs restart. Decides; changes nothing.

`Keeper.decide` compares what nodes report with what Slurm has and returns a list of `Act`s; the caller that carries
them out calls `done`. All that must outlive a daemon is in `State`, a plain document in Slurm's shared state folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from policy.health import NodeHealth
from sluice.controllerd.health.requeue import Requeue
from sluice.controllerd.health.withdrawn import Gpu
from sluice.exchange.health_report import SEVERITIES, Fault, GpuState, Report, parse_report
from sluice.slurm.answers import Node

TAG = "sluice: "
_FRESH_ROUNDS = 4  # a report that is older than this many rounds of checks is outdated
_FRESH_LEAST_S = 90.0
_JUST_S = 20.0  # between two hosts' clocks, and from a refused prolog to the drain of its node
_SPOOL = "SlurmdSpoolDir is full"  # the reason that slurmd gives
_ADOPTED = "number "
_MOST_TRIES = 10000
_REMEMBERED_S = 7 * 86400.0

ActKind = Literal["drain", "undrain", "out", "return", "requeue", "event"]


@dataclass(frozen=True, slots=True)
class Act:
    """Something to do. `out` and `return` change the list of GPUs that are out of service."""

    kind: ActKind
    node: str
    reason: str = ""
    uuid: str = ""
    numbers: tuple[int, ...] = ()
    job: int = 0
    key: str = ""  # of the fault
    began: float = 0.0
    event: str = ""


@dataclass
class Out:
    """A GPU out of service."""

    numbers: list[int]
    reason: str
    since: float
    key: str


@dataclass
class NodeState:
    """What the keeper did to a node."""

    gpus: dict[str, Out] = field(default_factory=dict)  # by UUID
    drained: str = ""  # the reason that Sluice gave Slurm; empty: it did not
    drained_since: float = 0.0
    drained_key: str = ""
    overruled: list[str] = field(default_factory=list)  # faults whose drain a person has ended
    seen_up: float = 0.0  # when it was last seen without a drain
    seen_drained: float = 0.0  # when it was first seen with one; 0: it has none

    @property
    def affected(self) -> bool:
        """Counts for the breaker."""
        return bool(self.gpus or self.drained)


@dataclass
class State:
    """All that outlives the daemon."""

    nodes: dict[str, NodeState] = field(default_factory=dict)
    reports: dict[str, tuple[float, Report]] = field(default_factory=dict)  # when it came
    held_back: dict[str, str] = field(default_factory=dict)  # node -> what the breaker kept from being done
    breaker_since: float = 0.0
    settled: dict[str, float] = field(default_factory=dict)  # "fault|job" that is requeued, "fault|reported" -> when
    returned: dict[str, list[str]] = field(default_factory=dict)  # node -> GPUs that a person returned
    jobs: dict[int, Requeue] = field(default_factory=dict)  # that are to restart
    tries: dict[int, int] = field(default_factory=dict)  # job -> how often it was restarted for faults

    def of(self, node: str) -> NodeState:
        """What was done to a node; nothing at first."""
        return self.nodes.setdefault(node, NodeState())

    def withdrawn(self) -> list[Gpu]:
        """The GPUs out of service, as the placement hook wants them."""
        return [
            (name, number) for name, node in self.nodes.items() for out in node.gpus.values() for number in out.numbers
        ]


class Keeper:
    """Decides. Not thread-safe: its owner locks."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()

    def is_news(self, report: Report) -> bool:
        """Whether a node's report may need an action that its last one did not."""
        mine = self.state.nodes.get(report.node)
        if mine is not None and mine.affected:
            return True  # it may be good again
        before = self.state.reports.get(report.node)
        known = {fault.key for fault in before[1].faults} if before else set()
        return any(fault.key not in known for fault in report.faults)

    def take(self, report: Report, now: float) -> dict[str, Any]:
        """A node's report; the answer: the time, GPUs that a person returned, whether the breaker holds it back."""
        self.state.reports[report.node] = (now, report)
        returned = self.state.returned.pop(report.node, [])
        return {"time": now, "returned": returned, "held_back": report.node in self.state.held_back}

    def adopt(self, gpus: Iterable[Gpu], now: float) -> None:
        """GPUs out of service of which nothing else is known; their nodes' reports will identify them."""
        for node, number in gpus:
            self.state.of(node).gpus[f"{_ADOPTED}{number}"] = Out([number], f"{TAG}found out of service", now, "")

    def decide(self, nodes: Iterable[Node], policy: NodeHealth, now: float, *, by_gpu: bool = True) -> list[Act]:
        """What is to be done now. `by_gpu`: single GPUs can be taken out; else it is the whole node."""
        known = {node.name: node for node in nodes}
        self._forget(known, now)
        acts: list[Act] = []
        wanted: list[tuple[float, str, list[Act]]] = []
        for node in known.values():
            mine = self.state.of(node.name)
            if "drain" not in node.flags:
                mine.seen_up, mine.seen_drained = now, 0.0
            elif not mine.seen_drained:
                mine.seen_drained = now
        for name, (came, report) in sorted(self.state.reports.items()):
            if name not in known:
                continue
            node, mine = known[name], self.state.of(name)
            acts += self._follow_persons(node, mine)
            _recognise(mine, report)
            fresh = now - came <= max(_FRESH_LEAST_S, _FRESH_ROUNDS * policy.interval_s)
            if not fresh:
                continue
            acts += self._undo_prolog(node, mine, report)
            acts += self._undo_spool(node, mine, report)
            take = self._take_out(node, mine, report, by_gpu=by_gpu)
            if take:
                wanted.append((min(act.began for act in take), name, take))
            acts += self._give_back(node, mine, report)
            acts += self._warn(name, report)
        return acts + self._through_breaker(wanted, len(known), policy, now)

    # ---- parts of it ----

    def _forget(self, known: Mapping[str, Node], now: float) -> None:
        state = self.state
        state.settled = {key: when for key, when in state.settled.items() if now - when < _REMEMBERED_S}
        for job in sorted(state.tries)[:-_MOST_TRIES]:
            del state.tries[job]
        for name in [name for name in state.reports if name not in known]:
            del state.reports[name]
        for name in [name for name in state.nodes if name not in known]:
            del state.nodes[name]

    def _follow_persons(self, node: Node, mine: NodeState) -> list[Act]:
        """A person has resumed a node that Sluice drained, or drained it for another reason: leave it to them."""
        if not mine.drained or (node.reason == mine.drained and "drain" in node.flags):
            return []
        if "drain" not in node.flags and mine.drained_key:
            mine.overruled = [*mine.overruled[-20:], mine.drained_key]
        why = "resumed by a person" if "drain" not in node.flags else f"now drained for: {node.reason}"
        mine.drained = mine.drained_key = ""
        return [Act("event", node.name, why, event="health.left")]

    def _undo_prolog(self, node: Node, mine: NodeState, report: Report) -> list[Act]:
        """A job got a faulty GPU before it was out, and Slurm drained the node when its prolog refused, or when its
        epilog did not get the GPU back clean. The GPU is out now: the node may go on, if this was what drained it,
        and nothing else is wrong."""
        if "drain" not in node.flags:
            return []
        unclean = set(report.unclean)
        why = "Epilog error" if unclean else "Prolog error"
        ours = node.reason.startswith(why) and unclean <= mine.gpus.keys() and not mine.drained
        known = report.refused_at > 0 and mine.seen_up > 0
        just_then = known and mine.seen_up - _JUST_S <= report.refused_at <= mine.seen_drained + _JUST_S
        settled = all(fault.numbers and fault.uuid in mine.gpus for fault in report.faults if fault.acts)
        if ours and just_then and settled and node.name not in self.state.held_back:
            return [Act("undrain", node.name, f"{why} was for a GPU that is out of service now")]
        return []

    def _undo_spool(self, node: Node, mine: NodeState, report: Report) -> list[Act]:
        """slurmd drained its node as its spool was full, before the check `spool` found it: there is room again."""
        ours = "drain" in node.flags and node.reason == _SPOOL and not mine.drained
        passed = report.mode == "enforce" and report.passes >= report.wanted_passes and report.time > mine.seen_up
        if ours and passed and report.room and not any(fault.acts and not fault.numbers for fault in report.faults):
            return [Act("undrain", node.name, "slurmd's spool has room again")]
        return []

    def _take_out(self, node: Node, mine: NodeState, report: Report, *, by_gpu: bool) -> list[Act]:
        """Drains and GPUs to take out, each with the jobs that are to restart."""
        found: list[Act] = []
        for fault in sorted(report.faults, key=lambda one: (-SEVERITIES.index(one.severity), one.began)):
            if not fault.acts or fault.key in mine.overruled:
                continue
            whole = not fault.numbers or fault.action == "drain-node" or not by_gpu
            if whole and not mine.drained and "drain" not in node.flags:
                if not any(act.kind == "drain" for act in found):
                    found.append(Act("drain", node.name, fault.reason, fault.uuid, (), 0, fault.key, fault.began))
            elif not whole and fault.uuid not in mine.gpus and not any(act.uuid == fault.uuid for act in found):
                found.append(Act("out", node.name, fault.reason, fault.uuid, fault.numbers, 0, fault.key, fault.began))
            if fault.action == "requeue":
                found += self._requeue(node.name, fault)
        return found

    def _requeue(self, node: str, fault: Fault) -> list[Act]:
        return [
            Act("requeue", node, fault.reason, fault.uuid, (), job, fault.key, fault.began)
            for job in fault.jobs
            if f"{fault.key}|{job}" not in self.state.settled
        ]

    def _give_back(self, node: Node, mine: NodeState, report: Report) -> list[Act]:
        """What has passed its checks often enough since it was taken out."""
        found: list[Act] = []
        acting = [fault for fault in report.faults if fault.acts]
        states: dict[str, GpuState] = {gpu.uuid: gpu for gpu in report.gpus}
        for uuid, out in mine.gpus.items():
            gpu = states.get(uuid)  # a GPU that is no longer there does not return by itself
            if gpu is None or any(fault.uuid == uuid for fault in acting) or report.time <= out.since:
                continue
            if gpu.passes >= report.wanted_passes:
                found.append(Act("return", node.name, out.reason, uuid, tuple(out.numbers)))
        if mine.drained and report.time > mine.drained_since:
            still = [fault for fault in acting if fault.key == mine.drained_key or not fault.numbers]
            passed = report.passes >= report.wanted_passes and all(
                gpu.passes >= report.wanted_passes for gpu in report.gpus if mine.drained_key.startswith(gpu.uuid)
            )
            if not still and passed:
                found.append(Act("undrain", node.name, mine.drained))
        return found

    def _warn(self, node: str, report: Report) -> list[Act]:
        """Findings that are only reported: one event each."""
        found = []
        for fault in report.faults:
            if fault.action != "log" and (fault.action == "warn" or not fault.acts):
                key = f"{fault.key}|reported"
                if key not in self.state.settled:
                    self.state.settled[key] = report.time
                    shadow = "" if fault.action == "warn" else f" (would {fault.action})"
                    found.append(
                        Act(
                            "event",
                            node,
                            fault.reason + shadow,
                            fault.uuid,
                            fault.numbers,
                            key=fault.key,
                            event="health.warn" if not shadow else "health.shadow",
                        )
                    )
        return found

    def _through_breaker(
        self, wanted: list[tuple[float, str, list[Act]]], total: int, policy: NodeHealth, now: float
    ) -> list[Act]:
        """As much of it as the breaker lets through, the oldest faults first."""
        state = self.state
        most = max(policy.breaker_least, int(total * policy.breaker_percent / 100))
        affected = {name for name, node in state.nodes.items() if node.affected}
        acts: list[Act] = []
        held: dict[str, str] = {}
        for _, name, take in sorted(wanted, key=lambda one: (one[0], one[1])):
            if name not in affected and any(act.kind in ("drain", "out") for act in take):
                if len(affected) >= most:
                    held[name] = next(act.reason for act in take if act.kind in ("drain", "out"))
                    continue
                affected.add(name)
            acts += take
        if held and not state.breaker_since:
            state.breaker_since = now
            why = (
                f"{len(held)} more nodes than the {most} of {total} that may be out at once: nothing more is taken out"
            )
            acts.append(Act("event", min(held), f"{why}; {held[min(held)]}", event="health.breaker"))
        elif not held and state.breaker_since:
            state.breaker_since = 0.0
            acts.append(Act("event", "", "closed again", event="health.breaker"))
        state.held_back = held
        return acts

    # ---- what was done ----

    def done(self, act: Act, now: float) -> None:
        """An act was carried out."""
        mine = self.state.of(act.node) if act.node else NodeState()
        if act.kind == "out":
            mine.gpus[act.uuid] = Out(list(act.numbers), act.reason, now, act.key)
        elif act.kind == "return":
            mine.gpus.pop(act.uuid, None)
        elif act.kind == "drain":
            mine.drained, mine.drained_since, mine.drained_key = act.reason, now, act.key
        elif act.kind == "undrain":
            mine.drained, mine.drained_key = "", ""
        elif act.kind == "requeue":
            self.state.settled[f"{act.key}|{act.job}"] = now

    def return_by_hand(self, node: str, number: int | None) -> list[Act]:
        """A person returns a node's GPU (or all of the node): the acts; the node forgets its repeats."""
        mine = self.state.of(node)
        found = [
            Act("return", node, out.reason, uuid, tuple(out.numbers))
            for uuid, out in mine.gpus.items()
            if number is None or number in out.numbers
        ]
        if number is None and mine.drained:
            found.append(Act("undrain", node, mine.drained))
        if node in self.state.reports:
            kept = [gpu.uuid for gpu in self.state.reports[node][1].gpus if number is None or number in gpu.numbers]
            self.state.returned[node] = sorted({*self.state.returned.get(node, []), *kept})
        return found


def _recognise(mine: NodeState, report: Report) -> None:
    """Give adopted GPUs their names."""
    for gpu in report.gpus:
        for number in gpu.numbers:
            out = mine.gpus.pop(f"{_ADOPTED}{number}", None)
            if out is not None and gpu.uuid not in mine.gpus:
                mine.gpus[gpu.uuid] = Out(list(gpu.numbers), out.reason, out.since, out.key)


# ---- as a document ----


def to_document(state: State) -> dict[str, Any]:
    """For JSON. Nodes without faults are left out, as they report again by themselves."""
    reports = {
        name: {"came": came, **report.to_dict()}
        for name, (came, report) in state.reports.items()
        if report.faults or name in state.held_back or (name in state.nodes and state.nodes[name].affected)
    }
    return {
        "schema_version": 1,
        "nodes": {
            name: {
                "gpus": {
                    uuid: {"numbers": out.numbers, "reason": out.reason, "since": out.since, "key": out.key}
                    for uuid, out in node.gpus.items()
                },
                "drained": node.drained,
                "drained_since": node.drained_since,
                "drained_key": node.drained_key,
                "overruled": node.overruled,
            }
            for name, node in state.nodes.items()
            if node.affected or node.overruled
        },
        "reports": reports,
        "held_back": state.held_back,
        "breaker_since": state.breaker_since,
        "settled": state.settled,
        "returned": state.returned,
        "jobs": {str(job): asdict(requeue) for job, requeue in state.jobs.items()},
        "tries": {str(job): count for job, count in state.tries.items()},
    }


def from_document(document: Mapping[str, Any]) -> State:
    """What `to_document` gave. Raises KeyError, TypeError, ValueError, SluiceError."""
    if document["schema_version"] != 1:
        raise ValueError("another version's")
    state = State()
    for name, node in document["nodes"].items():
        state.nodes[name] = NodeState(
            {
                uuid: Out([int(n) for n in out["numbers"]], str(out["reason"]), float(out["since"]), str(out["key"]))
                for uuid, out in node["gpus"].items()
            },
            str(node["drained"]),
            float(node["drained_since"]),
            str(node["drained_key"]),
            [str(key) for key in node["overruled"]],
        )
    for name, report in document["reports"].items():
        state.reports[name] = (float(report["came"]), parse_report(report))
    state.held_back = {str(name): str(why) for name, why in document["held_back"].items()}
    state.breaker_since = float(document["breaker_since"])
    settled = document["settled"].items()
    state.settled = {str(key).replace("|told", "|reported"): float(when) for key, when in settled}  # told until 0.1.0
    state.returned = {str(name): [str(uuid) for uuid in uuids] for name, uuids in document["returned"].items()}
    state.jobs = {int(job): Requeue(**requeue) for job, requeue in document["jobs"].items()}
    state.tries = {int(job): int(count) for job, count in document["tries"].items()}
    return state
