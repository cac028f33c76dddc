"""Preflights on the controllers: the nodes of a job join from its prolog, get their tests, and get the verdict.

Nodes ask with MUNGE, as root, like for all that they send; who belongs to a job is what Slurm says of it. A node that
does not join is waited for a few seconds only, and a controller that is lost ends its preflights: nodes that ask
another one about them go on without a verdict. What outlives the daemon is StateSaveLocation/sluice.preflight.json.
Where the job's nodes alone do not say which of them is at fault, idle nodes take part (`preflight_spares`).
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy.node import FILE_NAME, NodePolicyFile
from policy.preflight import NodePreflight
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.hostlist import expand, fold
from sluice.base.text import one_line
from sluice.controllerd.daemon import Duty, Site, of_site
from sluice.controllerd.health.controller import controller_of
from sluice.controllerd.preflight_restarts import PERIOD_S, Restarts, record_of
from sluice.controllerd.preflight_spares import CALL_S, Spares
from sluice.exchange.preflight import NO_ANSWER, STATE_FILE, Memory
from sluice.exchange.preflight_jobs import FILE_NAME as JOBS_FILE
from sluice.exchange.preflight_jobs import AtFault, JobPreflight, keep_preflight, read_preflights, write_preflights
from sluice.fabric.preflight import Finding, Preflight, Verdict
from sluice.fabric.tested import GPU_TESTS, Member, Part, Result, Test
from sluice.fabric.usual import Rules
from sluice.slurm.answers import Job
from sluice.slurm.topology import switch_rows

_WATCH_S = 10.0
_JOIN_S = 3.0  # from the first node that joins
_LEFT_S = 1.0  # of the bound, for answers on their way
_KEPT_S = 300.0
_TOPOLOGY_S = 300.0
_POLL_S = 0.1
_POLL_NODE_S = 0.001  # so that all nodes of all jobs ask no more than a thousand times a second
_ON_NODES = ("running", "suspended", "completing", "stopped")
_CHECKS = {"nic": "fabric_nic", "link": "fabric_link", **dict.fromkeys(("gpu", *GPU_TESTS), "fabric_gpu")}
_UNNAMED = "network"  # an interface whose name a node does not know
_TOOLS = ("perftest", "ucx", "libfabric")  # the best first; TCP of Sluice's own is everywhere
_WITHOUT_RDMA = ("ucx", "libfabric")  # they measure TCP then
_SHARED_GRES = re.compile(r"\b(shard|mps)\b")
_FAULT = re.compile(r"[A-Za-z0-9_ ]{1,60}")
_WORD = re.compile(r"[A-Za-z0-9_.:@-]{1,63}")
_MOST_NICS = 32
_MOST_WORDS = 1000
_MOST_GBS, _MOST_US = 1e5, 1e9

log = logging.getLogger("sluice.preflight")


@dataclass(frozen=True, slots=True)
class Joined:
    """What a node reports when it joins."""

    port: int
    tools: tuple[str, ...]
    nics: tuple[str, ...]
    interface: str
    types: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    gpu_model: str = ""
    linked: bool = False


@dataclass
class _Run:
    """One preflight; a job that starts again has another one."""

    job: int
    bound_s: float
    began: float
    record: Job | None = None  # Slurm's, of the job
    nodes: tuple[str, ...] = ()  # empty: Slurm is asked which they are
    shared: frozenset[str] = frozenset()  # nodes on which other jobs run
    asked: set[str] = field(default_factory=set)  # nodes whose prolog has begun
    joined: dict[str, Joined] = field(default_factory=dict)
    tool: str = ""
    preflight: Preflight | None = None
    members: dict[str, Member] = field(default_factory=dict)
    planned: list[list[list[Test]]] = field(default_factory=list)  # batches that are still to be given out
    batch: int = -1
    rounds: list[dict[str, Test]] = field(default_factory=list)  # of the batch, by the test's ID
    of_node: dict[str, list[dict[str, Test]]] = field(default_factory=dict)  # the same, of each node
    tokens: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)  # for what these measured
    done: dict[str, Any] | None = None
    faults: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    good: set[str] = field(default_factory=set)
    doubted: set[str] = field(default_factory=set)  # named, and not to be drained for it
    busy: frozenset[str] = frozenset()  # nodes on which there were jobs when it began
    partners: tuple[str, ...] | None = None  # idle nodes that take part; None: none was asked yet
    calling_until: float | None = None  # they are waited for
    left: set[str] = field(default_factory=set)  # partners that take part no longer

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_under_way(self) -> bool:
        return self.done is None and self.age < self.bound_s

    def is_another(self, node: str) -> bool:
        """Whether a node that begins is of a later start of the job: it has begun before, or was not one of its."""
        return node in self.asked or bool(self.nodes and node not in self.nodes)

    def takes(self, node: str) -> bool:
        """Whether an idle node is to take part."""
        return self.is_under_way and node in (self.partners or ()) and node not in self.left

    def leave(self, nodes: Collection[str]) -> None:
        """Idle nodes among these that take part no longer, as a job comes, or they do not answer."""
        self.left.update(set(nodes) & set(self.partners or ()))
        self.waiting -= self.left
        if self.preflight is not None:
            self.preflight.leave(self.left)

    @property
    def with_partners(self) -> set[str]:
        """All nodes that it keeps busy."""
        return {*self.nodes, *(self.partners or ())} - self.left


class Coordinator:
    """All preflights that are under way, and what is remembered of earlier ones."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.RLock()
        self._runs: dict[int, _Run] = {}  # by job
        self._policy: NodePolicyFile | None = None
        self._memory: Memory | None = None
        self._addresses: dict[str, str] = {}
        self._leaves: tuple[float, dict[str, str]] = (-_TOPOLOGY_S, {})
        self.counts: dict[str, int] = {"passed": 0, "found": 0, "undecided": 0}
        self.restarts = Restarts(site, self._requeued)
        self.spares = Spares()

    # ---- requests of nodes ----

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """``preflight`` of the inbox: a node joins, asks what to measure, or says what it has measured.

        Raises SluiceError for what is no such request.
        """
        try:
            return self._reply(request)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SluiceError(f"preflight: not a valid request: {one_line(repr(error))[:200]}") from error

    def answer_spare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """``preflight-spare`` of the inbox: an idle node asks whether a job's preflight needs it.

        Raises SluiceError for what is no such request.
        """
        try:
            node, types = _word(request["node"]), _words(request["types"])
        except (KeyError, TypeError, ValueError) as error:
            raise SluiceError(f"preflight-spare: not a valid request: {one_line(repr(error))[:200]}") from error
        with self._lock:
            again_s = self.spares.seen(node, types, self._leaves[1].get(node, ""), time.monotonic())
            job = next((one.job for one in self._runs.values() if one.takes(node) and node not in one.joined), None)
        return {"state": "wait", "again_s": again_s} if job is None else {"state": "join", "job": job}

    def _reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job, node, begins = int(request["job"]), _word(request["node"]), request.get("begins") is True
        with self._lock:
            run = self._runs.get(job)
            first = begins and (run is None or run.is_another(node))
            if first:
                run = self._runs[job] = _Run(job, float(self.policy.bound_s), time.monotonic())
            if run is None:
                return {"state": "none"}  # another controller's, which is lost
            run.asked |= {node} if begins else set()
        if first:
            self._begin(run, request)
        with self._lock:
            return self._answer(run, node, request)

    def _answer(self, run: _Run, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if run.done is not None:
            return self._outcome(run, node)
        if not run.nodes:
            return self._wait()
        if node not in run.nodes and not run.takes(node):
            raise SluiceError(f"preflight: node {node} is not one of the job's")
        awaited = run.preflight is None or (run.calling_until is not None and node in (run.partners or ()))
        if "port" in request and awaited:
            run.joined[node] = _joined(request)
        if request.get("leaves") is True:
            run.leave({node})
        if request.get("batch") == run.batch and "results" in request:
            self._take(run, node, request["results"])
        self._advance(run)
        if run.done is not None:
            return self._outcome(run, node)
        if node not in run.joined:
            joins = {"state": "join", "gpus": self.policy.gpus and _has_whole_gpus(run.record)}
            return joins if awaited else {"state": "none"}
        if node in run.waiting and request.get("batch") != run.batch:
            return {"state": "test", "batch": run.batch, "rounds": self._orders(run, node)}
        return self._wait()

    def _wait(self) -> dict[str, Any]:
        asking = sum(len(one.nodes) for one in self._runs.values() if one.is_under_way)
        return {"state": "wait", "again_s": max(_POLL_S, _POLL_NODE_S * asking)}

    def _outcome(self, run: _Run, node: str) -> dict[str, Any]:
        known = controller_of(self.site).keeper.state.nodes.get(node)
        faults, drained = run.faults.get(node, {}), known is not None and bool(known.drained)
        if faults and drained:
            self.restarts.refused(run.job)
        return {**(run.done or {}), "faults": faults, "good": node in run.good, "drained": drained}

    # ---- the life of one preflight ----

    @property
    def policy(self) -> NodePreflight:
        """In force. Raises SluiceError."""
        if self._policy is None:
            self._policy = NodePolicyFile(self.site.conf_folder / FILE_NAME)
        return self._policy.current().preflight

    def _begin(self, run: _Run, request: Mapping[str, Any]) -> None:
        """Ask Slurm for the job's nodes, without a lock: other nodes wait meanwhile."""
        job = run.job
        nodes: tuple[str, ...] = ()
        shared = busy = frozenset[str]()
        wanted = False
        try:
            types, node, gpus = _words(request.get("types", ())), _word(request["node"]), _gpus(request)
            if request.get("alone") is not True or self._wanted([node], types, node, gpus):
                run.record = record_of(self.site.client.jobs(ids=[job], states=["all"]), job)
                nodes = tuple(expand(run.record.nodes)) if run.record is not None else ()
            gpus = gpus if _has_whole_gpus(run.record) else ()
            if (len(nodes) > 1 or (nodes and gpus)) and self._wanted(nodes, types, node, gpus):
                self._look(nodes)
                busy = self._busy(job)
                shared = busy & frozenset(nodes)
                wanted = True
        except (SluiceError, TypeError) as error:
            log.error("job %d: %s", job, one_line(str(error)))
        with self._lock:
            run.nodes, run.shared, run.busy = nodes, shared, busy
            for one in self._runs.values():
                one.leave(nodes)
            others = [one for one in self._runs.values() if one is not run and one.is_under_way]
            # Two at once would make each other's nodes look slow; the other one's verdict is of these nodes as well.
            if not wanted or any(not set(nodes).isdisjoint(one.nodes) for one in others):
                run.done = {"state": "none"}

    def _busy(self, job: int) -> frozenset[str]:
        """Nodes where other jobs run: their users can fill a node's interface, or its ports, and it looks slow."""
        others = [one for one in self.site.client.jobs(states=_ON_NODES) if one.id != job and one.nodes]
        return frozenset(node for one in others for node in expand(one.nodes))

    def _look(self, nodes: Iterable[str]) -> None:
        """Addresses of nodes, and their leaf switches."""
        if not self._addresses.keys() >= set(nodes):
            self._addresses = {one.name: one.address for one in self.site.client.nodes()}
        if time.monotonic() - self._leaves[0] > _TOPOLOGY_S:
            said = self.site.commands.run("scontrol", "show", "topology", check=False).stdout
            leaves = [row for row in switch_rows(said) if row["kind"] == "switch" and not row["switches"]]
            found = {node: str(row["name"]) for row in leaves if row["nodes"] for node in expand(row["nodes"])}
            self._leaves = time.monotonic(), found

    def _wanted(self, nodes: Iterable[str], types: tuple[str, ...], node: str, gpus: tuple[str, ...]) -> bool:
        """Whether the policy has this job's nodes tested. `gpus`: those of `node`, which asks first."""
        policy, memory = self.policy, self.memory
        if policy.when == "never" or (policy.types and not set(policy.types) & set(types)):
            return False
        if policy.when == "always" or not memory.suspects.isdisjoint(nodes):
            return True
        if policy.when == "after-maintenance" and not (
            memory.proved.keys() >= set(nodes) and memory.proved[node] >= set(gpus)
        ):
            return True
        reports = controller_of(self.site).keeper.state.reports
        return any(one in reports and reports[one][1].severity not in (None, "info") for one in nodes)

    def _advance(self, run: _Run) -> None:
        """Begin when all have joined, give out what comes next, and end with a verdict, or when time is over."""
        late = run.age > run.bound_s - _LEFT_S
        if run.preflight is None:
            if len(run.joined) < len(run.nodes) and run.age < min(_JOIN_S, run.bound_s / 3):
                return
            if len(run.joined) < min(2, len(run.nodes)) or late:
                self._end(run, None, "too few nodes joined")
                return
            self._plan(run)
        assert run.preflight is not None  # noqa: S101 - for the type checker
        if run.calling_until is not None:
            self._await_partners(run)
            return
        if late and run.waiting <= set(run.partners or ()):  # the job's own nodes have answered
            run.leave(run.waiting)
        if not run.waiting:
            self._give_results(run)
            self._go_on(run, over=late and bool(run.partners))
        elif late:
            known = run.preflight.verdict() if run.partners else None  # of what was measured before they came
            self._end(run, known, f"no answer from {fold(sorted(run.waiting))} in time")

    def _go_on(self, run: _Run, *, over: bool = False) -> None:
        """With the next tests; where there are none, or time is `over`, with the verdict."""
        assert run.preflight is not None  # noqa: S101 - for the type checker
        tests = [] if over or run.planned else run.preflight.next_round()
        self._next_batch(run, run.planned.pop(0) if run.planned else [tests] if tests else [])
        if not run.rounds and (over or not self._call_partners(run)):
            self._end(run, run.preflight.verdict(), "")

    # ---- idle nodes ----

    def _call_partners(self, run: _Run) -> bool:
        """Ask idle nodes to take part, once, where nothing else says which of the job's nodes is at fault: whether they
        are waited for."""
        assert run.preflight is not None  # noqa: S101 - for the type checker
        now, suspects = time.monotonic(), run.preflight.unresolved()
        if run.partners is not None or not suspects or not run.tool or run.age > run.bound_s - _LEFT_S - CALL_S:
            return False
        taken = [one.with_partners for one in self._runs.values() if one.is_under_way]
        avoid = run.busy.union(self.memory.suspects, *taken)
        leaves = [leaf for name in suspects for leaf in run.members[name].leaves]
        run.partners = self.spares.choose(set(run.joined[suspects[0]].types), leaves, avoid, now)
        run.calling_until = now + _JOIN_S if run.partners else None
        return bool(run.partners)

    def _await_partners(self, run: _Run) -> None:
        """Go on with those that have joined, when all have, or time is over."""
        assert run.preflight is not None and run.calling_until is not None  # noqa: S101 - for the type checker
        joined = [name for name in run.partners or () if name in run.joined and name not in run.left]
        if len(joined) < len(set(run.partners or ()) - run.left) and time.monotonic() < run.calling_until:
            return
        run.calling_until = None
        of_suspect = run.members[run.preflight.unresolved()[0]]
        members = [member for name in joined if (member := self._like(run, name, of_suspect)) is not None]
        run.partners = tuple(member.name for member in members)
        run.members |= {member.name: member for member in members}
        run.preflight.add_partners(members)
        self._go_on(run, over=not members)

    def _like(self, run: _Run, name: str, other: Member) -> Member | None:
        """An idle node as a member like one of the job's; None where it cannot be measured as they are."""
        one, like, leaf = run.joined[name], run.joined[other.name], self._leaves[1].get(name, "")
        by_nics = other.nics == like.nics
        if (run.tool != "tcp" and run.tool not in one.tools) or (by_nics and not set(other.nics) <= set(one.nics)):
            return None
        nics = other.nics if by_nics else (one.interface,)
        return Member(name, nics, (leaf,) * len(nics), (), other.model, other.gpu_model, other.linked)

    def _plan(self, run: _Run) -> None:
        policy = self.policy
        run.tool = _tool(run.joined.values(), policy.tool) if len(run.nodes) > 1 else ""
        by_nics = _nics(run.joined.values(), run.tool)
        leaves = self._leaves[1]
        members = []
        for name, one in sorted(run.joined.items()):
            nics = one.nics if by_nics else (one.interface,)
            model = "/".join([*one.types, run.tool, str(len(nics))])
            gpus = one.gpus if policy.gpus and _has_whole_gpus(run.record) else ()
            leaf = (leaves.get(name, ""),) * len(nics)
            members.append(Member(name, nics, leaf, gpus, model, one.gpu_model, one.linked))
        run.members = {member.name: member for member in members}
        run.preflight = Preflight(members, Rules(policy.share / 100, policy.least), self.memory.past)
        rounds = run.preflight.planned()
        # Where GPUs are measured, all nodes are done with themselves before any has to answer another one.
        first = int(any(test.kind in GPU_TESTS for tests in rounds[:1] for test in tests))
        run.planned = [some for some in (rounds[:first], rounds[first:]) if some]
        self._next_batch(run, run.planned.pop(0) if run.planned else [])

    def _next_batch(self, run: _Run, rounds: list[list[Test]]) -> None:
        run.batch += 1
        run.rounds = [
            {f"{run.batch}.{turn}.{number}": test for number, test in enumerate(tests)}
            for turn, tests in enumerate(rounds)
        ]
        run.of_node = {}
        for turn, tests in enumerate(run.rounds):
            for one, test in tests.items():
                for node in test.nodes():
                    run.of_node.setdefault(node, [{} for _ in run.rounds])[turn][one] = test
        run.tokens = {one: secrets.token_hex(16) for tests in run.rounds for one in tests}
        run.results = {}
        run.waiting = set(run.of_node)

    def _orders(self, run: _Run, node: str) -> list[list[dict[str, Any]]]:
        """The tests of a node, round by round; the first of two nodes asks, the second serves."""
        rounds = run.of_node[node]
        return [[self._order(run, one, test, node) for one, test in tests.items()] for tests in rounds]

    def _order(self, run: _Run, one: str, test: Test, node: str) -> dict[str, Any]:
        if test.kind in GPU_TESTS:
            gpus = run.joined[node].gpus
            return {
                "id": one,
                "role": "alone",
                "tool": "gpu",
                "kind": test.kind,
                "gpu": gpus[test.place],
                "other_gpu": gpus[test.other_gpu],
            }
        peer = next((other for other in test.nodes() if other != node), node)
        role = "alone" if test.kind == "loopback" else "ask" if node == test.node else "serve"
        member = run.members[node]
        return {
            "id": one,
            "role": role,
            "tool": run.tool,
            "nic": member.nics[test.place],
            "address": self._addresses.get(peer, peer),
            "port": run.joined[peer].port,
            "token": run.tokens[one],
        }

    def _take(self, run: _Run, node: str, results: Any) -> None:
        """What a node has measured: of tests in which it asks, or is alone. Each of these once."""
        mine = run.of_node.get(node, ())
        asked = {one: test for tests in mine for one, test in tests.items() if test.node == node}
        for one in asked.keys() & dict(results).keys():
            value, us, *fault = results[one]
            run.results[one] = Result(
                asked[one], _number(value, _MOST_GBS), _number(us, _MOST_US) or 0.0, _fault(fault)
            )
        run.waiting.discard(node)

    def _give_results(self, run: _Run) -> None:
        assert run.preflight is not None  # noqa: S101 - for the type checker
        for tests in run.rounds:
            made = {one: test for one, test in tests.items() if run.left.isdisjoint(test.nodes())}
            results = [run.results.get(one, Result(test, None)) for one, test in made.items()]
            run.preflight.take([one for one in results if one.test.kind not in GPU_TESTS or _was_made(one)])

    # ---- the end ----

    def _end(self, run: _Run, verdict: Verdict | None, why: str) -> None:
        """Keep what was learned, and what the nodes are to get."""
        verdict = verdict or Verdict()
        absent = sorted(set(run.nodes) - run.joined.keys())
        texts = [*_found(verdict), *self._blame(run, verdict)]
        texts += [f"{fold(absent)} did not join"] if absent else []
        texts += [why] if why else []
        judged = verdict.tests > verdict.unjudged
        if not texts:
            good = f"{len(run.nodes)} nodes are good" if len(run.nodes) > 1 else f"{run.nodes[0]} is good"
            texts = [good if judged else "nothing to compare with yet"]
        by = run.tool or ("GPUs" if run.preflight is not None else "nothing")
        by += f" with idle {fold(run.partners)}" if run.partners else ""
        words = f"preflight: {verdict.rounds} rounds, {run.age:.1f} s by {by}, {'; '.join(texts)}"
        words = one_line(words, limit=_MOST_WORDS)
        suspects = {part.node for parts in verdict.undecided for part in parts if part.kind != "uplink"}
        suspects |= {*absent, *run.doubted}
        run.good = (run.joined.keys() & set(run.nodes)) - suspects - set(verdict.drain) if judged else set()
        self._remember(run, verdict, suspects, words)
        run.done = {"state": "done", "text": words, "verdict": self._keep(run, verdict, suspects, absent, words)}

    def _blame(self, run: _Run, verdict: Verdict) -> list[str]:
        """Whom the findings have drained, and whom suspected only; words of the latter."""
        texts = []
        for finding in verdict.findings:
            check = next((_CHECKS[part.kind] for part in finding.parts if part.kind in _CHECKS), None)
            if finding.node in (run.partners or ()):
                run.doubted.add(finding.node)
                texts.append(f"{finding.node} is idle, and suspected only")
            elif finding.node in run.shared and not _is_own(finding):
                run.doubted.add(finding.node)
                texts.append(f"{finding.node} is not the job's alone, and suspected only")
            elif finding.node and check is None:  # of a silent node: its tools may not run
                run.doubted.add(finding.node)
            elif check is not None:
                run.faults.setdefault(finding.node, {}).setdefault(check, []).append(finding.text)
        return texts

    def _remember(self, run: _Run, verdict: Verdict, suspects: Collection[str], words: str) -> None:
        """Of nodes and of classes, for the next preflights."""
        memory = self.memory
        if run.preflight is not None and verdict.tests:
            memory.learn(run.preflight.good_results())
        gpus = {node: set(run.joined[node].gpus) for node in run.good}
        memory.judge(gpus, suspects, run.faults, words, time.time())
        self.counts["found" if verdict.findings else "undecided" if verdict.undecided else "passed"] += 1
        self._save(memory)
        if verdict.findings or verdict.undecided:
            self._event("fabric.preflight", job=run.job, nodes=fold(run.nodes), reason=words)
        log.warning("job %d, %s: %s", run.job, fold(run.nodes), words)

    def _keep(self, run: _Run, verdict: Verdict, suspects: Collection[str], absent: Collection[str], words: str) -> str:
        """For the job's explanation; the verdict in a word. Where a node is at fault, the job is followed."""
        faults = [
            AtFault(node, "; ".join(text for some in of.values() for text in some)) for node, of in run.faults.items()
        ]
        kept = JobPreflight(
            user=run.record.user if run.record is not None else "",
            time=time.time(),
            nodes=fold(run.nodes),
            rounds=verdict.rounds,
            seconds=run.age,
            tool=run.tool,
            verdict="fault" if faults else "undecided" if suspects else "good" if run.good else "none",
            words=words,
            at_fault=faults,
            suspected=fold(suspects),
            left_out=fold(absent),
        )
        self._keep_of_job(run.job, kept)
        if faults:
            self.restarts.follow(run.job, kept, run.record)
        return kept.verdict

    def _requeued(self, job: int, preflight: JobPreflight) -> None:
        """What came of a job whose node was at fault."""
        self._keep_of_job(job, preflight)
        for part in preflight.at_fault if preflight.released is None else ():
            why = f"preflight found {part.what}; requeued, starts on other nodes"
            self._event("fabric.preflight-requeue", job=job, node=part.node, reason=one_line(why, limit=_MOST_WORDS))

    def _keep_of_job(self, job: int, preflight: JobPreflight) -> None:
        path = self.site.state_save / JOBS_FILE
        with self._lock:
            try:
                jobs = read_preflights(path)
            except SluiceError as error:
                log.error("%s", one_line(str(error)))
                jobs = {}
            keep_preflight(jobs, job, preflight)
            try:
                write_preflights(path, jobs)
            except (OSError, SluiceError) as error:
                log.error("%s", one_line(str(error)))

    def _event(self, kind: str, **fields: Any) -> None:
        try:
            events.append(self.site.events, kind, **fields)
        except (OSError, SluiceError) as error:
            log.error("%s", one_line(str(error)))

    def _save(self, memory: Memory) -> None:
        try:
            write_atomic(self.site.state_save / STATE_FILE, memory.render(), mode=0o600)
        except (OSError, SluiceError) as error:
            log.error("%s", one_line(str(error)))

    @property
    def memory(self) -> Memory:
        """What is remembered; nothing where its file cannot be read. Raises SluiceError."""
        if self._memory is None:
            path = self.site.state_save / STATE_FILE
            try:
                self._memory = Memory.load(path)
            except SluiceError as error:
                log.error("%s", one_line(str(error)))
                self._memory = Memory()
        return self._memory

    def watch(self, site: Site) -> None:
        """The duty: nodes that are down or drained have to prove themselves again."""
        nodes = site.client.nodes()
        away = {one.name for one in nodes if one.state == "down" or "drain" in one.flags}
        with self._lock:
            self._addresses = {one.name: one.address for one in nodes}
            self.spares.watch(nodes, time.monotonic())
            if self.memory.forget(away, self._addresses.keys()):
                self._save(self.memory)
            self._runs = {job: run for job, run in self._runs.items() if run.age < _KEPT_S}


def _word(value: Any) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise SluiceError(f"preflight: {one_line(repr(value))[:80]} is not a name")
    return value


def _words(values: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_word(value) for value in list(values)[:_MOST_NICS]))


def _joined(request: Mapping[str, Any]) -> Joined:
    port = int(request["port"])
    if not (0 < port < 65536 or (port == 0 and request.get("alone") is True)):
        raise SluiceError(f"preflight: {port} is not a port")
    interface = _word(request.get("interface") or _UNNAMED)
    words = [_words(request[name]) for name in ("tools", "nics", "types")]
    gpu_model = _word(request["gpu_model"]) if request.get("gpu_model") else ""
    return Joined(
        port, words[0], words[1], interface, words[2], _gpus(request), gpu_model, request.get("linked") is True
    )


def _gpus(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the GPUs that the node can measure."""
    return _words(request.get("gpus", ()))


def _has_whole_gpus(job: Job | None) -> bool:
    """Whether no other job can get a part of its GPUs. Not every node knows that before the job's first step."""
    if job is None:
        return False
    asked = (job.tres_per_node, job.tres_per_job, job.tres_per_task, *job.tres)
    return not any(_SHARED_GRES.search(one) for one in asked)


def _tool(joined: Collection[Joined], wanted: str) -> str:
    """What all nodes can measure with: the named tool, or the first of them all."""
    for tool in _TOOLS if wanted == "any" else (wanted,):
        by_network = tool in _WITHOUT_RDMA and all(one.interface != _UNNAMED for one in joined)
        named = by_network or all(one.nics for one in joined)
        if named and all(tool in one.tools for one in joined):
            return tool
    return "tcp"


def _nics(joined: Iterable[Joined], tool: str) -> bool:
    """Whether a tool measures by the interfaces next to the GPUs; else it does by the one of the node's name."""
    return tool == "perftest" or (tool in _WITHOUT_RDMA and all(one.nics for one in joined))


def _was_made(result: Result) -> bool:
    """A test that a node did not come to, or that says nothing of the GPU, is no evidence."""
    return result.value is not None or bool(result.fault)


def _is_own(finding: Finding) -> bool:
    """Whether it is of the job's own GPUs, which other jobs on the node do not load; they can load PCIe, and the host,
    on which a test may then not answer in time."""
    return bool(finding.fault and finding.fault != NO_ANSWER) or all(
        part.kind in ("clock", "memory", "nvlink") for part in finding.parts
    )


def _fault(words: Sequence[Any]) -> str:
    """What a node says that failed; empty where it says nothing, or anything else."""
    return str(words[0]) if words and _FAULT.fullmatch(str(words[0])) else ""


def _number(value: Any, most: float) -> float | None:
    """A figure that can be; None for any other."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 < value < most else None


def _found(verdict: Verdict) -> list[str]:
    """What a verdict says, in words."""
    texts = [finding.text for finding in verdict.findings]
    texts += [f"undecided: {' or '.join(map(_shown, parts))}" for parts in verdict.undecided]
    slow = dict.fromkeys(
        f"{test.node} {'with ' + test.other if test.other else 'alone'}" for test in verdict.slow_paths
    )
    return texts + ([f"slow, though not by a fault: {', '.join(slow)}"] if slow else [])


def _shown(part: Part) -> str:
    return f"{part.node}'s {part.kind} {part.name}".rstrip()


coordinator_of = of_site(Coordinator)
"""The coordinator of this daemon."""


def duties(site: Site) -> list[Duty]:
    """The duties that watch which nodes have to prove themselves, and jobs that start again."""
    coordinator = coordinator_of(site)
    return [
        Duty("preflight", _WATCH_S, coordinator.watch),
        Duty("preflight-restarts", PERIOD_S, lambda _: coordinator.restarts.run()),
    ]
