"""What the keeper's parts know of the fleet, and what they note: the memory that the journal keeps, the last views, and
the acts that are to be asked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from policy.checkpoint import NodeCheckpoint
from policy.pool_nodes import PoolPolicy, PoolsPolicy
from sluice.base.hostlist import expand
from sluice.base.text import one_line
from sluice.exchange.fleet import Difference, Event, Stage
from sluice.exchange.pool_costs import PoolCosts
from sluice.fleet.ahead import Foreseen
from sluice.fleet.driver import Failure, Machine
from sluice.fleet.journal import BackOff, Hold, Launch, Memory, Search
from sluice.fleet.views import Act, Change, Changed, JobAct, NodeAct, SlurmView

FRESH_S = 30.0
"""On an older view of Slurm nothing is launched or ended."""
LOST_S = 150.0
"""An answer that has not come by then is lost; drivers' own time limits are shorter."""
SLURM_AGAIN_S = 10.0
"""Between two requests of the same change in Slurm."""
ABSENT, EMPTY = 2, 5
"""Lists in a row that do not have a machine, and those of them that have none at all."""
PAUSES: dict[Difference, float] = {"throttled": 5.0, "credentials": 60.0, "provider": 10.0}
"""First back-off of a whole pool, in seconds."""
LOST: frozenset[Difference] = frozenset({"not_registered", "vanished", "other_gpus", "down"})
"""Failures of machines that the provider had made."""
_LONG: dict[Difference, float] = {"quota": 5.0, "refused": 10.0, "not_registered": 1.0}
"""Of a shape, in times of the pool's own back-off."""
_FORMER = "~"  # no name of a pool has it
_SWAP_S = 1.0  # until a pool's driver is another one
_DOUBLED = 4  # times that a back-off is doubled

log = logging.getLogger("sluice.fleet")


class Store(Protocol):
    """Where the memory is kept: `journal.Journal`."""

    def load(self) -> Memory:
        """What was saved last."""

    def save(self, memory: Memory) -> None:
        """Replace it."""

    def load_pools(self) -> PoolsPolicy:
        """Pools that may have machines, as they were saved last."""

    def save_pools(self, known: PoolsPolicy) -> None:
        """Replace them."""


@dataclass(slots=True)
class Lists:
    """What lists said of a pool. `absent`: how many in a row do not have a launch, by token."""

    known: dict[str, Machine] = field(default_factory=dict)  # by id, of the last list
    began: float = -math.inf
    failed: str = ""
    suspect: bool = False
    absent: dict[str, int] = field(default_factory=dict)
    bare: dict[str, int] = field(default_factory=dict)  # ... a machine of a node that is on without a launch
    odd: dict[str, float] = field(default_factory=dict)  # machines without a launch, since when
    noted: set[str] = field(default_factory=set)  # those of them that are ended, and in the history
    complete: int = 0  # lists in a row since this process began
    none: int = 0  # ... without a machine, of a pool that has left the policy


def pool_named(key: str) -> str:
    """The policy's name of a pool that `State.pools` has, perhaps with the driver or settings that it had formerly."""
    return key.partition(_FORMER)[0]


def difference_of(failure: Failure) -> Difference:
    """The name of a provider's refusal."""
    return "provider" if failure == "unknown" else failure


class State:
    """One cluster's fleet."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.memory = store.load()
        self.now = self.memory.clock
        self.policy = PoolsPolicy()
        self.checkpoint = NodeCheckpoint()
        known = store.load_pools()
        self.cluster = known.cluster
        self.pools: dict[str, PoolPolicy] = {**known.pools, **self.memory.pools}  # all that may have machines
        self.left: dict[str, float] = {}  # those of them that the policy does not have any more, since when
        self.names: dict[str, list[str]] = {}  # nodes by pool
        self.pool_of: dict[str, str] = {}
        self.view: SlurmView | None = None
        self.begun_with: set[str] = set()  # nodes that Slurm wanted or had when this process first saw it
        self.jobs: dict[str, list[int]] = {}  # by node, of the view
        self.lists: dict[str, Lists] = {}
        self.by_node = {launch.node: launch for launch in self.memory.launches.values()}
        self.busy: dict[tuple[str, ...], float] = {}  # acts under way, since when
        self.wanted: dict[str, float] = {}  # nodes that Slurm waits for, since when
        self.bare: dict[str, float] = {}  # nodes that are on without a machine, since when
        self.denied: dict[str, str] = {}  # why Slurm creates or deletes a node not, in its words
        self.foreseen: dict[str, tuple[Foreseen, ...]] = {}  # starts by pool, as last decided
        self.signalled: set[int] = set()  # jobs on machines that are taken back which have had their signal
        self.dirty = False
        self._pools_dirty = False
        self._last: dict[tuple[str, ...], float] = {}
        self._acts: list[Act] = []
        self._asked: list[tuple[str, ...]] = []  # keys of these acts

    def set_policy(self, policy: PoolsPolicy, checkpoint: NodeCheckpoint) -> None:
        """The pools in force, and how jobs are signalled that save their state."""
        self.checkpoint = checkpoint
        if policy is not self.policy:
            self.policy = policy
            self.cluster = policy.cluster or self.cluster
            for name, pool in policy.pools.items():
                self._keep_former(name, pool)
            self.pools = {**self.pools, **policy.pools}
            self.left = {name: self.left.get(name, self.now) for name in self.pools if name not in policy.pools}
            self.pools_changed()
            self.names = {name: expand(pool.nodes) for name, pool in policy.pools.items()}
            self.pool_of = {node: name for name, nodes in self.names.items() for node in nodes}

    def _keep_former(self, name: str, pool: PoolPolicy) -> None:
        """Where another driver or other settings are in force, e.g. another region, the machines that the former ones
        have launched are theirs to list and to end.
        """
        before = self.pools.get(name)
        if before is None or (before.driver, before.settings) == (pool.driver, pool.settings):
            return
        words = json.dumps([before.driver, before.settings], sort_keys=True)
        former = f"{name}{_FORMER}{hashlib.sha256(words.encode()).hexdigest()[:8]}"
        self.pools[former] = before
        self.lists[former] = self.lists.pop(name, Lists())
        self.lists[name] = Lists(began=self.now + _SWAP_S)  # what is under way is the former driver's
        for launch in self.memory.launches.values():
            if launch.pool == name:
                launch.pool = former
        if name in self.memory.searches:
            self.memory.searches[former] = replace(self.memory.searches[name])

    def pools_changed(self) -> None:
        """The pools that may have machines are others: on disk before a machine of a new one is asked for."""
        used = {one.pool for one in self.memory.launches.values()}
        self.memory.pools = {name: pool for name, pool in self.pools.items() if name not in self.left or name in used}
        self.dirty = self._pools_dirty = True

    def begin(self) -> None:
        """What was asked for before may still be on its way; without a journal nobody knows what was."""
        self.left = dict.fromkeys(self.left, self.now)
        if self.memory.origin != "kept":
            lost = self.memory.origin == "lost"
            self.memory.searches = {name: Search(self.now, lost) for name in self.pools}
            self.memory.origin, self.dirty = "kept", True
        # From now on: what the last process asked for may be under way, however long ago that seems to be.
        known = {name: Search(self.now, one.lost) for name, one in self.memory.searches.items() if name in self.pools}
        self.memory.searches = known

    def see(self, view: SlurmView) -> None:
        """What Slurm says; an older view than the last one is nothing."""
        if self.view is None:
            self.begun_with = {name for name, node in view.nodes.items() if node.want in ("due", "up", "on")}
        if self.view is None or view.at >= self.view.at:
            self.view = self._without_overdue(view)
            self.jobs = {}
            for job in view.jobs.values():
                for node in job.nodes:
                    self.jobs.setdefault(node, []).append(job.id)

    def _without_overdue(self, view: SlurmView) -> SlurmView:
        """A node that Slurm has not powered up for as long as one may boot counts as off: no machine waits longer."""
        known = self.memory.due
        due = {node: known.get(node, view.at) for node, one in view.nodes.items() if one.want == "due"}
        if due != known:
            self.memory.due, self.dirty = due, True
        overdue = {
            node: replace(view.nodes[node], want="off")
            for node, since in due.items()
            if node in self.pool_of and view.at - since > self.policy.pools[self.pool_of[node]].boot_s
        }
        return replace(view, nodes={**view.nodes, **overdue}) if overdue else view

    def flush(self) -> list[Act]:
        """What is to be asked for, once the journal has it. Raises OSError, and then nothing is."""
        asked, self._asked = self._asked, []
        acts, self._acts = [act for act in self._acts if self._may_be_done(act)], []
        if self.dirty:
            self.memory.clock = self.now
            try:
                if self._pools_dirty:
                    self._store.save_pools(PoolsPolicy(cluster=self.cluster, pools=self.pools))
                    self._pools_dirty = False
                self._store.save(self.memory)
            except OSError:
                for key in asked:
                    self.busy.pop(key, None)
                raise
            self.dirty = False
        return acts

    def _may_be_done(self, act: Act) -> bool:
        """Of a pool that was forgotten meanwhile nothing is asked for."""
        return isinstance(act, NodeAct | JobAct) or act.pool in self.pools

    def forget_acts(self) -> None:
        """Those whose answers are lost may be asked for again; of old ones nothing is known any more."""
        self.busy = {key: since for key, since in self.busy.items() if self.now - since <= LOST_S}
        # Lists may be asked for more rarely than that.
        self._last = {key: at for key, at in self._last.items() if key[0] == "list" or self.now - at <= LOST_S}

    def fresh_view(self) -> SlurmView | None:
        """What Slurm says, unless that is old."""
        view = self.view
        return view if view is not None and self.now - view.at <= FRESH_S else None

    def machine_of(self, node: str, pool: str) -> bool:
        """Whether the provider's last list has a machine that is this node's: it is taken over or ended first. Until
        there is a list, it may have."""
        lists = self.lists.get(pool)
        return lists is None or not lists.complete or self._is_odd(node)

    def formers_listed(self, pool: str) -> bool:
        """Whether the pool, and all that it was formerly, has said what it has."""
        keys = [key for key in self.pools if pool_named(key) == pool_named(pool)]
        return all(key in self.lists and self.lists[key].complete for key in keys)

    def may_have_machine(self, node: str, pool: str) -> bool:
        """Whether a machine may be there that no launch asked for: the journal was lost, or lists have one. Until the
        lists of its pool (of all, where it is not known) have come, it may.
        """
        listed = all(self.formers_listed(name) for name in self.pools if pool in ("", pool_named(name)))
        return bool(self.memory.searches) or not listed or self._is_odd(node)

    def _is_odd(self, node: str) -> bool:
        odd = (one.known.get(machine) for one in self.lists.values() for machine in one.odd)
        return any(one is not None and one.node == node and not one.ending for one in odd)

    def searched(self, pool: str) -> bool:
        """Whether its machines are looked for before any is launched."""
        return any(pool_named(key) == pool for key in self.memory.searches)

    def jobs_on(self, node: str) -> list[int]:
        """Jobs that have a node, or wait for it."""
        return self.jobs.get(node, [])

    def requeue(self, job: int) -> None:
        """Ask for a job to wait again, and to start at once then."""
        name = self.view.jobs[job].name if self.view is not None and job in self.view.jobs else ""
        if self.do(("job", "requeue", str(job)), JobAct(job, "requeue", name), again=SLURM_AGAIN_S):
            self.memory.requeued[job] = self.now
            self.dirty = True

    def closed(self, pool_name: str) -> BackOff | None:
        """Why a pool can have no machine now; None: it can."""
        pause = self.waits(pool_name)
        if pause is not None and pause.times > 1:
            return pause
        found: list[BackOff] = []
        pool = self.policy.pools[pool_name]
        for shape in pool.shapes:
            for zone in pool.zones:
                one = self.waits(f"{pool_name}|{shape.name}|{zone}")
                if one is None:
                    return None
                found.append(one)
        return min(found, key=lambda one: one.until)

    def do(self, key: tuple[str, ...], act: Act, again: float = 0.0) -> bool:
        """Ask for an act, unless it is under way, or was asked for less than `again` seconds ago."""
        if key in self.busy or self.now - self._last.get(key, -math.inf) < again:
            return False
        self._last[key] = self.busy[key] = self.now
        self._asked.append(key)
        self._acts.append(act)
        return True

    def change(self, nodes: tuple[str, ...], change: Change, text: str = "") -> None:
        """Ask for a change of nodes in Slurm; each node's is asked for once in a while until a view shows it."""
        due = []
        for node in nodes:
            if not self.asked_lately(change, node):
                key = ("slurm", change, node)
                self._last[key] = self.busy[key] = self.now
                self._asked.append(key)
                due.append(node)
        if due:
            self._acts.append(NodeAct(tuple(due), change, one_line(text)))

    def under_way(self, change: Change) -> bool:
        """Whether Slurm is just asked for such a change, of whichever node."""
        return any(key[:2] == ("slurm", change) for key in self.busy)

    def asked_lately(self, change: Change, node: str) -> bool:
        """Whether a view may not show yet what came of this change of a node."""
        key = ("slurm", change, node)
        return key in self.busy or self.now - self._last.get(key, -math.inf) < SLURM_AGAIN_S

    def changed(self, result: Changed) -> None:
        """What came of a change in Slurm."""
        act = result.act
        if isinstance(act, NodeAct):
            for node in act.nodes:
                self.busy.pop(("slurm", act.change, node), None)
                if act.change in ("create", "delete", "make_again"):
                    self.denied.pop(node, None)
                    if result.text:
                        self.denied[node] = one_line(result.text)[:300]
        else:
            self.busy.pop(("job", act.change, str(act.job)), None)
            if act.change == "signal" and not result.text:
                self.signalled.add(act.job)
        if result.text:
            log.warning("%s: %s", act, one_line(result.text))

    def waits(self, key: str) -> BackOff | None:
        """The back-off of this key, unless it is over."""
        one = self.memory.back_offs.get(key)
        return one if one is not None and one.until > self.now else None

    def key(self, launch: Launch) -> str:
        """Of the back-off of its shape in its zone."""
        return f"{launch.pool}|{launch.shape}|{launch.zone}"

    def back_off(self, launch: Launch, kind: Difference, text: str) -> None:
        """Of a shape in a zone; of what is not a zone's, in all zones."""
        pool = self.pools[launch.pool]
        zones = (launch.zone,) if kind in ("no_capacity", "not_registered") else pool.zones
        first = pool.back_off_s * _LONG.get(kind, 1.0)
        for zone in zones:
            self.set_back_off(f"{launch.pool}|{launch.shape}|{zone}", kind, text, first)

    def pause(self, pool: str, kind: Difference, text: str) -> None:
        """Of a whole pool."""
        before = self.memory.back_offs.get(pool)
        if before is None or before.until <= self.now:  # several calls at once that fail are one failure
            self.set_back_off(pool, kind, text, PAUSES.get(kind, PAUSES["provider"]))

    def set_back_off(self, key: str, kind: Difference, text: str, first: float) -> None:
        """From now on; one that comes again is twice as long."""
        before = self.memory.back_offs.get(key)
        times = 1 if before is None else min(before.times + 1, _DOUBLED)
        since = self.now if before is None else before.since
        self.memory.back_offs[key] = BackOff(self.now + first * 2 ** (times - 1), times, kind, text, since)
        self.dirty = True

    def hold(self, node: str, kind: Difference, text: str, until: float | None) -> None:
        """A node that Slurm wants cannot be had."""
        before = self.memory.holds.get(node)
        if before is None or (before.kind, before.until) != (kind, until):
            since = self.now if before is None else before.since
            self.memory.holds[node] = Hold(kind, one_line(text)[:300], since, until)
            self.dirty = True
            if before is None:
                self.note(Event(self.now, node, self.pool_of.get(node, ""), kind, text=one_line(text)[:300]))

    def forget_hold(self, node: str) -> None:
        """It may be had again."""
        if self.memory.holds.pop(node, None) is not None:
            self.dirty = True

    def count(self, pool: str, what: str) -> None:
        """One more."""
        counts = self.memory.counts.setdefault(pool_named(pool), {})
        counts[what] = counts.get(what, 0) + 1
        self.dirty = True

    def enter(self, launch: Launch, stage: Stage, text: str = "") -> None:
        """A launch's next stage."""
        launch.stage, launch.since = stage, self.now
        self.event(launch, stage if stage != "gone" or launch.why == "none" else f"gone: {launch.why}", text)

    def event(self, launch: Launch, what: str, text: str = "") -> None:
        """Something has happened to a launch."""
        self.note(
            Event(
                self.now, launch.node, pool_named(launch.pool), what, launch.shape, launch.zone, launch.machine,
                text[:300],
            )
        )  # fmt: skip

    def note(self, event: Event) -> None:
        """Into the history and the log."""
        self.memory.history.append(event)
        self.dirty = True
        log.info("%s: %s %s", event.node, event.what, event.text)

    def remember_gpus(self, launch: Launch) -> None:
        """What its node has, for reports when Slurm does not know it any more."""
        if launch.pool in self.pools:
            costs = self.memory.costs.setdefault(pool_named(launch.pool), PoolCosts())
            costs.remember(launch.node, self.pools[launch.pool].gres)

    def book(self, costs: dict[str, PoolCosts], launch: Launch) -> None:
        """What its machine has cost until now."""
        if launch.launched is not None and launch.pool in self.pools:
            pool = self.pools[launch.pool]
            known = costs.setdefault(pool_named(launch.pool), PoolCosts())
            known.partition, known.gpus, known.cpus = pool.partition, pool.gpus, pool.cpus
            known.book(launch.launched, self.now, launch.known_price)
