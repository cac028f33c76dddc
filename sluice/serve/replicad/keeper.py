"""Keeps as many replicas of each service as are wanted: Slurm's jobs, heartbeats, and what is wanted, in one loop.

A launch has its name before it is asked for, in a journal on disk, and root's helper makes one job of one name:
whenever this process is killed, the next one finds each replica again, and asks for none twice. The keepers of both
controllers see the same and decide the same; the one whose controller leads acts.
"""

from __future__ import annotations

import logging
import pwd
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

from policy.service_jobs import (
    ServicePolicy,
    ServicesPolicy,
    account_rows,
    limit_rows,
    service_rows,
)
from sluice.base.rates import FewLines
from sluice.exchange.acts import ActError
from sluice.exchange.launches import Do, LaunchRequest
from sluice.exchange.serve_status import ReplicaStatus, ServiceStatus, render_status, replica_status, service_status
from sluice.exchange.serving import (
    ACCOUNTS,
    LIMITS,
    LOST_S,
    MOST_MESSAGE,
    REPLICAS,
    SERVICES,
    SUSPECT_S,
    Callers,
    Demand,
    Heartbeat,
    Launched,
    Orders,
    Outlook,
    PeerNote,
    ReplicaRow,
    ServiceRow,
    State,
    as_row,
    callers_of,
    render,
)
from sluice.exchange.snapshot import Snapshot, encode
from sluice.serve.replicad.journal import Intent, Journal
from sluice.serve.replicad.pattern import Patterns
from sluice.serve.replicad.registry import Expected, names_node
from sluice.serve.replicad.revoked import RevokedKeys
from sluice.serve.replicad.scale import Decision, Memory, Need, Phase, Replica, Spec, decide, start_estimate
from sluice.serve.replicad.slurm_view import ReplicaJob, View
from sluice.serve.replicad.weights import peers_of
from sluice.serve.replicad.words import why_it_ended, why_it_waits

DEMAND_S = 3.0
"""For so long a gateway's word holds."""
WARM_S = 2.5
"""After the start, in which replicas are heard before anything is decided."""
_PLACED_S = 60.0  # so long after its launch a replica that is heard is looked for in Slurm at once
_FRESH_S = 6.0  # nothing is done on an older view of Slurm, which is asked every 3 s
_SAME_LAUNCH_S = 60.0  # for which a launch is asked for again, where it is not known what became of it
_END_AGAIN_S = 15.0
_WELL_S = 30.0
_SEEN_LATER_S = 1.0  # a job that was queued so long before a view was read is in it
_MOST_DEMANDS = 20_000
_MOST_GATEWAYS = 256
_BLAMELESS = frozenset({"CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"})  # of a job whose replica was ready

log = logging.getLogger("sluice.replicad")
log.addFilter(FewLines())


class Acts(Protocol):
    """Root's helper, asked in the background; what became of it comes by `Keeper.result`."""

    def ask(self, request: LaunchRequest) -> None:
        """Ask; returns at once."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of an act: what was done, or why not."""

    do: Do
    service: str
    launch: str
    done: Mapping[str, Any] | None
    error: ActError | None = None


@dataclass(slots=True, eq=False)
class _Known:
    """A launch, until its job is over."""

    service: str
    launch: str
    user: str
    asked: float
    job: int | None = None
    lent: bool = False
    fresh: bool = False  # asked for by this process
    asking: bool = False
    answered: float = 0.0
    again: float = 0.0  # when it is asked for again
    trouble: str = ""
    seen: ReplicaJob | None = None
    heard: Heartbeat | None = None
    heard_at: float = 0.0
    staging: float = float("inf")  # since when it gives the model to others
    drained: float | None = None
    told: bool = False  # to drain
    requeued: bool = False  # its job, and its process is no more
    ready_at: float | None = None
    learnt: bool = False
    failed: bool = False
    ending: float | None = None
    end_why: str = ""


@dataclass(slots=True)
class _Service:
    """What is remembered of a service."""

    policy: ServicePolicy | None
    spec: Spec
    memory: Memory = field(default_factory=Memory)
    decision: Decision | None = None
    outlook: Outlook | None = None  # of the other controller's keeper
    said: str = ""


def _fitting(note: PeerNote) -> PeerNote:
    """As much of it as the other one takes: keys that were revoked are always in it."""
    while len(render(note)) > MOST_MESSAGE and (note.demands or note.launched or note.outlooks):
        demands, launched, outlooks = (len(one) // 2 for one in (note.demands, note.launched, note.outlooks))
        note = replace(
            note, demands=note.demands[:demands], launched=note.launched[:launched], outlooks=note.outlooks[:outlooks]
        )
    return note


class Keeper:
    """The loop's state, without its threads. `step` is called again and again; all else from any thread.

    `wake`: is called when a step should not wait.
    """

    def __init__(
        self,
        host: str,
        journal: Journal,
        patterns: Patterns,
        acts: Acts,
        snapshot: Snapshot,
        *,
        now: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.host = host
        self.snapshot = snapshot
        self.revoked = RevokedKeys(snapshot)
        self._journal, self._patterns, self._acts, self._wake = journal, patterns, acts, wake
        self._lock = threading.RLock()
        self._begun = now
        self._known: dict[str, _Known] = {}
        self._services: dict[str, _Service] = {}
        self._policy = ServicesPolicy()
        self._spent: Mapping[str, int] = {}
        self._published: tuple[object, object] = (None, None)
        self._demands: dict[tuple[str, str], tuple[float, Demand, bool]] = {}
        self._callers: dict[str, tuple[float, Callers, bool]] = {}  # by gateway, or the other controller's host
        self._announced: dict[str, tuple[str, float]] = {}  # by the other keeper: launches, and when
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._views: SimpleQueue[View] = SimpleQueue()
        self._view: View | None = None
        self._other_leads = float("-inf")  # as of when the other controller said last that it leads
        self._rows: dict[str, bytes] = {}
        self._touched: set[str] = set()
        for one in journal.load():
            self._known[one.launch] = _Known(one.service, one.launch, one.user, one.asked, one.job, one.lent)

    # ---- what comes in ----

    def set_policy(self, policy: ServicesPolicy, spent: Mapping[str, int]) -> None:
        """What is wanted. `spent`: tokens of tenants with a budget."""
        with self._lock:
            self._policy, self._spent = policy, spent

    def see(self, view: View) -> None:
        """What Slurm shows."""
        self._views.put(view)
        self._wake()

    def result(self, result: Result) -> None:
        """What became of an act."""
        self._results.put(result)
        self._wake()

    def demand(self, demands: Iterable[Demand], now: float, *, local: bool = True) -> None:
        """What gateways need. `local`: those of this host."""
        urgent = False
        with self._lock:
            for one in demands:
                key = one.service, one.worker
                if key not in self._demands and len(self._demands) >= _MOST_DEMANDS:
                    continue
                self._demands[key] = now, one, local
                service = self._services.get(one.service)
                urgent |= one.waiting > 0 and (
                    service is None or service.decision is None or service.decision.wanted == 0
                )
        if urgent:
            self._wake()

    def count(self, gateway: str, callers: Callers, now: float, *, local: bool = True) -> None:
        """Who has how many requests at a gateway; not `local`: at those of the other controller's host."""
        with self._lock:
            if gateway in self._callers or len(self._callers) < _MOST_GATEWAYS:
                self._callers[gateway] = now, callers, local

    def hear(self, beat: Heartbeat, now: float) -> Orders:
        """A replica's heartbeat, of which it is known who sent it."""
        with self._lock:
            one = self._known.get(beat.launch)
            if one is None:  # the other keeper asked for it, and Slurm does not show it here yet
                policy = self._policy.services.get(beat.service)
                if policy is None:
                    return Orders()
                one = self._known[beat.launch] = _Known(beat.service, beat.launch, policy.user, now, beat.job)
            before = (one.heard.state, one.heard.why) if one.heard is not None else None
            one.heard, one.heard_at = beat, now
            one.job = beat.job if one.job is None else one.job
            one.staging = min(one.staging, now) if beat.weights is not None else float("inf")
            self._touched.add(beat.launch)
            if beat.state in (State.DRAINING, State.GONE) and one.drained is None:
                one.drained = now
            if before != (beat.state, beat.why):
                log.info("%s.%s: %s %s", beat.service, beat.launch, beat.state, beat.why)
                self._wake()
            if one.ending is not None:
                return Orders("stop")
            do: Literal["drain", "go on"] = "drain" if one.told else "go on"
            return Orders(do, *peers_of(beat, self._heard_of(one, now)))

    def _heard_of(self, one: _Known, now: float) -> Iterator[Heartbeat]:
        """What the replicas of its service and user say, those first that staged first. Nothing is done until the
        first is wanted: most heartbeats are of replicas that stage nothing."""
        same = [
            other for other in self._known.values()
            if (other.service, other.user) == (one.service, one.user) and now - other.heard_at < LOST_S
        ]  # fmt: skip
        same.sort(key=lambda other: (other.staging, other.launch))
        yield from (other.heard for other in same if other.heard is not None)

    def expected(self, launch: str) -> Expected | None:
        """Whether heartbeats of a launch are taken."""
        with self._lock:
            one = self._known.get(launch)
            if one is not None:
                uid = uid_of(one.user)
                nodes = frozenset(one.seen.nodes) if one.seen is not None else frozenset()
                return None if uid is None else Expected(one.service, uid, one.job, nodes)
            if launch in self._announced and (policy := self._policy.services.get(self._announced[launch][0])):
                uid = uid_of(policy.user)
                return None if uid is None else Expected(policy.name, uid, None, frozenset())
        return None

    def uids(self) -> Mapping[int, object]:
        """Of those who may send heartbeats."""
        with self._lock:
            users = self.users()
        return {uid: user for user in users if (uid := uid_of(user)) is not None}

    def users(self) -> set[str]:
        """Whose jobs are looked at."""
        with self._lock:
            mine = {one.user for one in self._policy.services.values()}
            return mine | {one.user for one in self._known.values()}

    @property
    def hurry(self) -> bool:
        """Whether what Slurm does is waited for."""
        with self._lock:
            return any(self._moves(one) for one in self._known.values()) or any(
                one.decision is not None and one.decision.launch for one in self._services.values()
            )

    def unplaced(self, now: float) -> bool:
        """Whether a new replica is heard of which Slurm has not shown yet where it is."""
        with self._lock:
            return any(
                one.heard is not None and now - one.asked < _PLACED_S and (one.seen is None or not one.seen.nodes)
                for one in self._known.values()
            )

    @staticmethod
    def _moves(one: _Known) -> bool:
        if one.ending is not None or one.drained is not None or one.seen is None or one.seen.state != "RUNNING":
            return True
        return one.heard is None or one.heard.state is not State.READY

    @property
    def heard_all(self) -> bool:
        """Whether all replicas that run were heard."""
        with self._lock:
            view = self._view
            if view is None:
                return False
            running = [one for one in view.jobs.values() if one.state == "RUNNING" and one.launch in self._known]
            return all(self._known[one.launch].heard is not None for one in running)

    # ---- the other controller's keeper ----

    def note(self, now: float, host: str = "") -> PeerNote:
        """What the other one is to know; `host`: which that is."""
        with self._lock:
            mine = [one for at, one, local in self._demands.values() if local and now - at < DEMAND_S]
            asked = [Launched(one.service, one.launch) for one in self._known.values() if one.seen is None]
            outlooks = [
                Outlook(name, one.decision.why, one.decision.eta_s)
                for name, one in self._services.items()
                if one.decision is not None and one.decision.why
            ]
            view = self._view
            leads, as_of = (False, 0.0) if view is None else (view.leads, view.at)
            callers = callers_of(one for at, one, local in self._callers.values() if local and now - at < DEMAND_S)
            note = PeerNote(
                self.host, leads, tuple(mine[:500]), tuple(asked[:500]), tuple(outlooks[:300]), as_of, callers,
                self.revoked.say(host),
            )  # fmt: skip
        return _fitting(note)

    def take_note(self, note: PeerNote, now: float) -> PeerNote:
        """What the other one says; the answer is one's own."""
        if note.host == self.host:
            return self.note(now)
        self.demand(note.demands, now, local=False)
        if note.revoked is not None:
            self.revoked.hear(note.host, note.revoked)
        if note.callers is not None:
            self.count(note.host, note.callers, now, local=False)
        with self._lock:
            self._announced = {
                launch: one for launch, one in self._announced.items() if now - one[1] < _SAME_LAUNCH_S
            } | {one.launch: (one.service, now) for one in note.launched}
            if note.leads:
                self._other_leads = note.as_of
                said = {one.service: one for one in note.outlooks}
                for name, service in self._services.items():
                    service.outlook = said.get(name)
        return self.note(now, note.host)

    # ---- the loop ----

    def step(self, now: float) -> None:
        """Look, decide, act, publish. Raises OSError where the journal cannot be written: then nothing was asked."""
        with self._lock:
            while True:
                try:
                    self._on_result(self._results.get_nowait(), now)
                except Empty:
                    break
            view: View | None = None
            while not self._views.empty():
                view = self._views.get()
            if view is not None:
                self._on_view(view, now)
            self._follow_policy(now)
            self._demands = {key: one for key, one in self._demands.items() if now - one[0] < DEMAND_S}
            self._callers = {name: one for name, one in self._callers.items() if now - one[0] < DEMAND_S}
            if self._view is not None and (now >= self._begun + WARM_S or self.heard_all):
                for name, service in list(self._services.items()):
                    self._decide(name, service, now)
            self._publish(now)

    @property
    def leads(self) -> bool:
        """Whether this one acts: its controller says that it leads, and the other one says so of no later time.

        Where slurmctld has been taken over, the last view of it is seen until a command that hangs has ended.
        """
        return self._view is not None and self._view.leads and self._other_leads <= self._view.at

    def _follow_policy(self, now: float) -> None:
        names = set(self._policy.services) | {one.service for one in self._known.values()}
        for name in [name for name in self._services if name not in names]:
            del self._services[name]
        for name in names:
            policy = self._policy.services.get(name)
            before = self._services.get(name)
            if policy is not None:
                spec = spec_of(policy)
            elif before is not None:  # it has gone: what it has drains
                spec = replace(before.spec, paused=True)
            else:
                spec = Spec(name, 0, 1, 1, 0.0, 900.0, 600.0, 1.0, paused=True)
            if before is None:
                self._services[name] = _Service(policy, spec, self._first_memory(name, now))
            else:
                before.policy, before.spec = policy, spec

    def _first_memory(self, service: str, now: float) -> Memory:
        """What there was before this process began was needed: it is not too many at once."""
        mine = (one for one in self._known.values() if one.service == service)
        count = sum(one.seen is not None or one.asked > now - _SAME_LAUNCH_S for one in mine)
        return Memory(peaks=((now, count),)) if count else Memory()

    # ---- Slurm ----

    def _on_view(self, view: View, now: float) -> None:
        first = self._view is None
        self._view = view
        for launch, job in view.jobs.items():
            policy = self._policy.services.get(job.service)
            if launch in self._known or job.over or policy is None or policy.user != job.user:
                continue
            self._known[launch] = _Known(job.service, launch, job.user, job.submitted or now, job.id)
        for one in list(self._known.values()):
            found = view.jobs.get(one.launch)
            if found is not None and found.service == one.service and found.user == one.user:
                ran = one.seen is not None and one.seen.state in ("RUNNING", "COMPLETING")
                one.requeued |= ran and found.state == "PENDING"
                one.seen, one.job, one.lent, one.answered = found, found.id, found.lent, one.answered or now
                self._touched.add(one.launch)
            over = found.over if found is not None else self._is_absent(one, view)
            if over and now - one.heard_at > SUSPECT_S:
                self._gone(one, now)
        if first:
            self._save()

    @staticmethod
    def _is_absent(one: _Known, view: View) -> bool:
        """Whether Slurm does not have its job any more; a job that was queued lately may not have been seen."""
        if one.asking or (one.answered == 0.0 and one.job is None):
            return False
        return view.at > one.answered + _SEEN_LATER_S

    def _gone(self, one: _Known, now: float) -> None:
        """Its job is over."""
        del self._known[one.launch]
        self._touched.add(one.launch)
        state = one.seen.state if one.seen is not None else ""
        state = "" if state in ("PENDING", "RUNNING", "CONFIGURING") else state
        why = (one.heard.why if one.heard is not None else "") or why_it_ended(state)
        log.info("%s.%s: gone: %s", one.service, one.launch, one.end_why or why)
        service = self._services.get(one.service)
        wanted_it = one.ending is None and one.drained is None and not one.failed
        young = state != "PREEMPTED" and (
            one.ready_at is None or (now < one.ready_at + _WELL_S and state not in _BLAMELESS)
        )
        if service is not None and wanted_it and young:
            service.memory = service.memory.with_failure(now, why)

    # ---- deciding ----

    def _decide(self, name: str, service: _Service, now: float) -> None:
        mine = [one for one in self._known.values() if one.service == name]
        replicas = []
        for one in mine:
            seen = self._replica(one, service, now)
            if seen is not None:
                replicas.append(seen)
        need = self._need(name)
        ahead = 0
        if service.policy is not None and service.policy.ahead and name in self._patterns.of:
            ahead = self._patterns.of[name].ahead(now, start_estimate(service.spec, service.memory))
        view = self._view
        acts = self.leads and view is not None and now - view.at < _FRESH_S
        decision = decide(now, service.spec, need, ahead, replicas, service.memory, may_launch=acts)
        service.decision, service.memory = decision, decision.memory
        if service.policy is not None:
            self._patterns.record(name, now, decision.needed)
        for launch in decision.failed:
            self._known[launch].failed, self._known[launch].end_why = True, decision.end[launch]
        if acts:
            self._act(name, service, decision, now)
        said = decision.why.partition("; the next try")[0]
        if said != service.said:
            service.said = said
            log.info("%s: %s", name, decision.why or ("has replicas" if decision.wanted else "needs no replica"))

    def _act(self, name: str, service: _Service, decision: Decision, now: float) -> None:
        for launch in decision.drain:
            one = self._known[launch]
            if not one.told:
                log.info("%s.%s: drains", name, launch)
                one.told, one.drained = True, one.drained or now
                self._touched.add(launch)
        for launch, why in decision.end.items():
            self._end(self._known[launch], why, now)
        for one in list(self._known.values()):
            if one.service != name:
                continue
            if one.failed if one.ending is None else one.ending + _END_AGAIN_S < now:
                self._end(one, one.end_why, now)
            elif one.job is None and not one.asking and one.ending is None and one.answered == 0.0:
                self._ask_again(one, service, decision, now)
        for number in range(decision.launch if service.policy is not None else 0):
            user = service.policy.user if service.policy is not None else ""
            self._launch(name, user, now, lent=number < decision.lent)

    def _launch(self, service: str, user: str, now: float, *, lent: bool) -> None:
        one = _Known(service, secrets.token_hex(8), user, now, lent=lent, fresh=True, asking=True)
        self._known[one.launch] = one
        try:
            self._save()
        except OSError:
            del self._known[one.launch]
            raise
        log.info("%s.%s: launched%s", service, one.launch, ", on lent resources" if lent else "")
        self._acts.ask(LaunchRequest("launch_replica", service, one.launch, lent))

    def _ask_again(self, one: _Known, service: _Service, decision: Decision, now: float) -> None:
        """A launch of which it is not known what became: the same is asked again, while it is wanted, and not for long;
        then what is not in Slurm is none."""
        staying = sum(other.service == one.service and other.ending is None for other in self._known.values())
        wanted = service.policy is not None and not service.spec.paused and staying <= decision.wanted
        if wanted and now < one.asked + _SAME_LAUNCH_S:
            if now >= one.again:
                one.asking = True
                self._acts.ask(LaunchRequest("launch_replica", one.service, one.launch, one.lent))
        elif self._view is not None and self._view.at > one.asked + _END_AGAIN_S:
            if one.trouble and one.fresh:
                service.memory = service.memory.with_failure(now, one.trouble)
            del self._known[one.launch]
            self._save()

    def _end(self, one: _Known, why: str, now: float) -> None:
        if one.ending is None:
            log.info("%s.%s: ended: %s", one.service, one.launch, why)
        one.ending, one.end_why = now, why
        self._touched.add(one.launch)
        self._acts.ask(LaunchRequest("end_replica", one.service, one.launch))

    def _on_result(self, result: Result, now: float) -> None:
        one = self._known.get(result.launch)
        if one is None:
            return
        if result.do == "end_replica":
            if result.error is not None:
                log.warning("%s.%s: not ended: %s", one.service, one.launch, result.error.what)
            elif result.done is not None and not result.done.get("living", True) and one.seen is None:
                self._gone(one, now)
            return
        one.asking = False
        if result.done is not None:
            number = result.done.get("job_id")
            one.job, one.answered, one.trouble = number if type(number) is int else None, now, ""
            self._save()
            return
        error = result.error
        assert error is not None  # noqa: S101 - one of the two is there
        one.trouble = error.what
        log.warning("%s.%s: not launched: %s", one.service, one.launch, error.what)
        if error.status == 503:  # it may have been done
            one.again = now + (error.retry_after or 2)
            return
        del self._known[one.launch]
        self._save()
        service = self._services.get(one.service)
        if service is not None:
            service.memory = service.memory.with_failure(now, error.what)

    def _save(self) -> None:
        self._journal.save(
            [Intent(one.service, one.launch, one.user, one.asked, one.job, one.lent) for one in self._known.values()]
        )

    # ---- what is seen of a replica ----

    def _replica(self, one: _Known, service: _Service, now: float) -> Replica | None:
        """A launch as decisions have it; None: its job is over."""
        job, beat = one.seen, one.heard
        if job is not None and job.over:
            return None
        phase = self._phase(one)
        started = job.started if job is not None and job.state == "RUNNING" else None
        if phase is Phase.READY:
            self._learn(one, service, started, now)
        ends = self._ends(one)
        late = phase in (Phase.READY, Phase.DRAINING) and now > one.heard_at + LOST_S
        lost = one.heard_at + LOST_S if late else None
        if started is not None and beat is None:  # not heard since this process began
            started = max(started, self._begun)
        return Replica(
            one.launch,
            phase,
            one.asked,
            lent=one.lent and service.spec.guaranteed is not None,
            taken=one.lent and self._noticed(one) != "",
            started=started,
            ends=ends,
            expected=job.started if job is not None and job.state == "PENDING" else None,
            waits=why_it_waits(job.reason) if job is not None else one.trouble,
            leaves=self._leaves(one, service),
            leaves_at=self._maintenance(one),
            lost=lost,
            drained=one.drained,
            load=0 if beat is None or beat.state is State.GONE else beat.load.running + beat.load.waiting,
            why=beat.why if beat is not None else "",
        )

    @staticmethod
    def _phase(one: _Known) -> Phase:
        if one.ending is not None or one.failed:
            return Phase.ENDING
        if one.heard is not None and not one.requeued:
            if one.heard.state is State.FAILED:
                return Phase.FAILED
            if one.told or one.heard.state in (State.DRAINING, State.GONE):
                return Phase.DRAINING
            return Phase.READY if one.heard.state is State.READY and _placed(one) else Phase.STARTING
        if one.seen is None:
            return Phase.ASKED
        return Phase.PENDING if one.seen.state == "PENDING" else Phase.STARTING

    def _learn(self, one: _Known, service: _Service, started: float | None, now: float) -> None:
        """How long the start took; that it is well."""
        one.ready_at = one.ready_at or now
        if not one.learnt and started is not None:
            one.learnt = True
            if one.fresh:
                service.memory = service.memory.with_start(one.ready_at - started)
        if now > one.ready_at + _WELL_S:
            service.memory = service.memory.well()

    def _leaves(self, one: _Known, service: _Service) -> str:
        if service.policy is not None and service.policy.user != one.user:
            return "the service has another user"
        if one.requeued:
            return "its job was requeued"
        if self._view is None or one.seen is None:
            return self._noticed(one)
        drained = (self._view.leave[node] for node in one.seen.nodes if node in self._view.leave)
        return self._noticed(one) or next(drained, "")

    @staticmethod
    def _noticed(one: _Known) -> str:
        """What a replica that is ready says of Slurm's signal; empty: it had none."""
        return one.heard.why if one.heard is not None and one.heard.state is State.READY else ""

    @staticmethod
    def _ends(one: _Known) -> float | None:
        """When its job ends at the latest: as Slurm has it now, which preemption brings forward; else as it began."""
        if one.seen is not None and one.seen.state == "RUNNING" and one.seen.ends is not None:
            return one.seen.ends
        return one.heard.ends if one.heard is not None else None

    def _maintenance(self, one: _Known) -> float | None:
        if self._view is None or one.seen is None:
            return None
        starts = [self._view.maintenance[node] for node in one.seen.nodes if node in self._view.maintenance]
        return min(starts) if starts else None

    def _need(self, service: str) -> Need:
        mine = [one for _, one, _ in self._demands.values() if one.service == service]
        return Need(
            waiting=sum(one.waiting for one in mine),
            oldest_s=max((one.oldest_s for one in mine), default=0.0),
            in_flight=sum(one.in_flight for one in mine),
            tokens=sum(one.tokens_in_flight for one in mine),
            delay_s=max((one.delay_s for one in mine), default=0.0),
        )

    # ---- publishing ----

    def _publish(self, now: float) -> None:
        self.snapshot.put(SERVICES, {row.name: as_row(row) for row in self._service_rows()})
        if self._published != (self._policy, self._spent):
            self._published = self._policy, self._spent
            rows = limit_rows(self._policy, self._spent)
            self.snapshot.put(LIMITS, {f"{row.kind}/{row.name}": as_row(row) for row in rows})
            self.snapshot.put(ACCOUNTS, {row.user: as_row(row) for row in account_rows(self._policy)})
        for one in self._known.values():
            if one.heard is not None and now - one.heard_at > SUSPECT_S:
                self._touched.add(one.launch)
        changed: dict[str, bytes] = {}
        gone: list[str] = []
        for launch in self._touched:
            one_known = self._known.get(launch)
            row = self._replica_row(one_known, now) if one_known is not None else None
            if row is not None:
                changed[launch] = encode(REPLICAS, launch, as_row(row))
            else:
                gone.append(launch)
        self._touched.clear()
        self.snapshot.change(REPLICAS, changed, gone)

    def _service_rows(self) -> list[ServiceRow]:
        rows = []
        for row in service_rows(self._policy):
            service = self._services.get(row.name)
            if service is None or service.decision is None:
                rows.append(row)
                continue
            why, eta = service.decision.why, service.decision.eta_s
            if why and not self.leads and service.outlook is not None:
                why, eta = service.outlook.why, service.outlook.eta_s
            rows.append(replace(row, why=why, eta_s=eta))
        return rows

    def _replica_row(self, one: _Known, now: float) -> ReplicaRow | None:
        beat = one.heard
        if beat is None or beat.state in (State.GONE, State.FAILED):
            return None
        if not _placed(one):
            return None
        over = one.ending is not None or (one.seen is not None and one.seen.over)
        if over and now - one.heard_at > SUSPECT_S:
            return None
        state = beat.state
        if one.told or over or (state is State.READY and now - one.heard_at > LOST_S):
            state = State.DRAINING
        return ReplicaRow(
            one.service, one.launch, beat.job, beat.host, beat.port, beat.fingerprint, beat.secret, state,
            beat.abilities, beat.slots, round(one.heard_at, 1), now - one.heard_at > SUSPECT_S,
            self._ends(one),
        )  # fmt: skip

    def status(self) -> dict[str, Any]:
        """For those who look: nothing that is secret."""
        with self._lock:
            demands = [one for _, one, _ in self._demands.values()]
            services: dict[str, ServiceStatus] = {}
            for row in self._service_rows():
                service = self._services.get(row.name)
                wanted = service.decision.wanted if service is not None and service.decision is not None else None
                services[row.name] = service_status(row, demands, wanted)
            replicas: dict[str, ReplicaStatus] = {
                one.launch: replica_status(one.heard, one.heard_at, demands)
                for one in self._known.values()
                if one.heard is not None
            }
            callers = callers_of(one for _, one, _ in self._callers.values())
        return render_status(services, replicas, callers)


def _placed(one: _Known) -> bool:
    """Whether Slurm shows its job where its heartbeats come from: gateways are sent to no other host."""
    return one.heard is not None and one.seen is not None and names_node(one.heard.host, one.seen.nodes)


def spec_of(policy: ServicePolicy) -> Spec:
    """What decisions need of a service."""
    return Spec(
        policy.name, policy.least, policy.most, policy.slots, policy.idle_s, policy.ready_s, policy.drain_s,
        policy.queue_delay_s, policy.tokens_in_flight, policy.paused, policy.guaranteed,
    )  # fmt: skip


_uids: dict[str, int] = {}


def uid_of(user: str) -> int | None:
    """A user's uid on this host, which stays as it is once it was known."""
    found = _uids.get(user)
    if found is None:
        try:
            found = _uids[user] = pwd.getpwnam(user).pw_uid
        except KeyError:
            return None
    return found
