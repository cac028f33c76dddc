"""What is to be done, from three views: what Slurm wants, what the journal says, what the provider has.

Nothing here waits, reads a clock or talks to anybody: `step` writes the journal and then returns what is to be asked
for; what came of it is brought back by `take`. A launch is in the journal before it is asked for, with the token by
which the provider knows it again; a node has one launch at a time, and the next one begins when the provider does not
have the machine of the last one any more. So whenever the process is killed, the next one asks the same again.

A machine counts as absent when two lists that were begun `SETTLE_S` after the last request say so, or five that have no
machine at all: a provider's answers may be late, and a list may be empty by mistake.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

from policy.checkpoint import NodeCheckpoint
from policy.pool_nodes import PoolPolicy, PoolsPolicy
from sluice.base.hostlist import expand
from sluice.base.text import one_line
from sluice.exchange.fleet import DIFFERENCES, Difference, Event, FleetStatus, NodeStatus, PoolStatus, Stage
from sluice.exchange.pool_costs import PoolCosts
from sluice.fleet.ahead import Decision, NodeStage, PoolNode, PoolTimes, decide, predicted_boot
from sluice.fleet.driver import Failure, Machine, Order
from sluice.fleet.journal import BackOff, Hold, Launch, Memory
from sluice.fleet.views import (
    HELD_REASON,
    POOL_REASON,
    Act,
    Change,
    Changed,
    JobAct,
    LaunchAct,
    Launched,
    ListAct,
    Listed,
    NodeAct,
    Result,
    SlurmNode,
    SlurmView,
    TerminateAct,
    Terminated,
    Unsent,
)

SETTLE_S = 60.0
"""A request to a provider takes effect within this time, or never, and is seen in lists after it."""
FRESH_S = 30.0
"""On an older view of Slurm nothing is launched or ended."""
LOST_S = 150.0
"""An answer that has not come by then is lost; drivers' own time limits are shorter."""
_LIST_S, _QUICK_LIST_S = 30.0, 3.0
_AGAIN_S = 5.0  # between two requests of the same
_SLURM_AGAIN_S = 10.0
_RELEASE_S = 600.0  # a requeued job may complete for minutes first, as its machine is gone
_DOUBLED = 4  # times that a back-off is doubled
_PAUSES: dict[Difference, float] = {"throttled": 5.0, "credentials": 60.0, "provider": 10.0}
"""First back-off of a whole pool, in seconds."""
_LONG: dict[Difference, float] = {"quota": 5.0, "refused": 10.0, "not_registered": 1.0}
"""Of a shape, in times of the pool's own back-off."""
_LOST: frozenset[Difference] = frozenset({"not_registered", "vanished", "other_gpus", "down"})
"""Failures of machines that the provider had made."""
_TELLING: tuple[Difference, ...] = ("refused", "quota", "not_registered", "no_capacity")
_BOOTS = 20
_ABSENT, _EMPTY = 2, 5
"""Lists in a row that do not have a machine, and those of them that have none at all."""

log = logging.getLogger("sluice.fleet")


class Store(Protocol):
    """Where the memory is kept: `journal.Journal`."""

    def load(self) -> Memory:
        """What was saved last."""

    def save(self, memory: Memory) -> None:
        """Replace it."""


@dataclass(slots=True)
class _Lists:
    """What lists said of a pool. `absent`: how many in a row do not have a launch, by token."""

    known: dict[str, Machine] = field(default_factory=dict)  # by id, of the last list
    began: float = -math.inf
    failed: str = ""
    suspect: bool = False
    absent: dict[str, int] = field(default_factory=dict)
    bare: dict[str, int] = field(default_factory=dict)  # ... a machine of a node that is on without a launch
    odd: dict[str, float] = field(default_factory=dict)  # machines without a launch, since when
    complete: int = 0  # lists in a row since this process began


def difference_of(failure: Failure) -> Difference:
    """The name of a provider's refusal."""
    return "provider" if failure == "unknown" else failure


class Keeper:
    """One cluster's fleet. Not thread-safe."""

    def __init__(self, store: Store, host: str = "", *, new_token: Callable[[], str] | None = None) -> None:
        self._store = store
        self._host = host
        self._new_token = new_token or (lambda: secrets.token_hex(16))
        self.memory = store.load()
        self._policy = PoolsPolicy()
        self._checkpoint = NodeCheckpoint()
        self._pools: dict[str, PoolPolicy] = self.memory.pools
        self._names: dict[str, list[str]] = {}  # nodes by pool
        self._pool_of: dict[str, str] = {}
        self._view: SlurmView | None = None
        self._lists: dict[str, _Lists] = {}
        self._busy: dict[tuple[str, ...], float] = {}  # acts under way, since when
        self._last: dict[tuple[str, ...], float] = {}
        self._wanted: dict[str, float] = {}  # nodes that Slurm waits for, since when
        self._bare: dict[str, float] = {}  # nodes that are on without a machine, since when
        self._signalled: set[int] = set()  # jobs on machines that are taken back which have had their signal
        self._idle: dict[str, float] = {}  # nodes that are on without a job, since when this process has seen it
        self._dirty = False
        self._acts: list[Act] = []
        self._asked: list[tuple[str, ...]] = []  # keys of these acts
        self._jobs: dict[str, list[int]] = {}  # by node, of the view
        self.now = self.memory.clock
        self._by_node = {launch.node: launch for launch in self.memory.launches.values()}
        self._started = False

    # ---- what it is given ----

    def set_policy(self, policy: PoolsPolicy, checkpoint: NodeCheckpoint | None = None) -> None:
        """The pools in force, and how jobs are signalled that save their state."""
        self._checkpoint = checkpoint or NodeCheckpoint()
        if policy is not self._policy:
            self._policy = policy
            used = {one.pool for one in self.memory.launches.values()}
            kept = {name: pool for name, pool in self.memory.pools.items() if name in used}
            self._pools = self.memory.pools = {**kept, **policy.pools}
            self._dirty = True
            self._names = {name: expand(pool.nodes) for name, pool in policy.pools.items()}
            self._pool_of = {node: name for name, nodes in self._names.items() for node in nodes}

    def see(self, view: SlurmView) -> None:
        """What Slurm says; an older view than the last one is nothing."""
        if self._view is None or view.at >= self._view.at:
            self._view = view
            self._jobs = {}
            for job in view.jobs.values():
                for node in job.nodes:
                    self._jobs.setdefault(node, []).append(job.id)

    def pools(self) -> dict[str, PoolPolicy]:
        """All that have machines or may have: those that the policy does not have any more until theirs are gone."""
        return self._pools

    def take(self, result: Result, now: float) -> None:
        """What came of an act; late and doubled ones are no harm."""
        self.now = max(self.now, now)
        if isinstance(result, Launched):
            self._busy.pop(("launch", result.token), None)
            self._launched(result)
        elif isinstance(result, Terminated):
            self._busy.pop(("terminate", result.machine), None)
            if result.failure is not None and result.failure != "broken":
                self._pause(result.pool, difference_of(result.failure), one_line(result.text)[:300])
        elif isinstance(result, Listed):
            self._busy.pop(("list", result.pool), None)
            self._listed(result)
        elif isinstance(result, Unsent):
            act = result.act
            if isinstance(act, LaunchAct):
                self._busy.pop(("launch", act.order.token), None)
            elif isinstance(act, TerminateAct):
                self._busy.pop(("terminate", act.machine), None)
            else:
                self._busy.pop(("list", act.pool), None)
        else:
            self._changed(result)

    def step(self, now: float) -> list[Act]:
        """What is to be asked for now; the journal has it when this returns. Raises OSError, and then nothing is: what
        is still wanted when the journal can be written again is asked for then.
        """
        self.now = max(self.now, now)
        if not self._started:
            self._start()
        self._busy = {key: since for key, since in self._busy.items() if self.now - since <= LOST_S}
        view = self._fresh_view()
        if view is not None:
            for node in dict.fromkeys([*self._pool_of, *self._by_node]):
                self._node(node, view)
            self._signalled &= {
                job for one in self._by_node.values() if one.notice for job in self._jobs_on(one.node)
            }  # one that starts again may meet the next notice
            self._give_back(view)
            self._keep_least(view)
            self._open_and_close(view)
            self._follow_plan(view)
            self._release(view)
        self._list()
        asked, self._asked = self._asked, []
        acts, self._acts = self._acts, []
        if self._dirty:
            self.memory.clock = self.now
            try:
                self._store.save(self.memory)
            except OSError:
                for key in asked:
                    self._busy.pop(key, None)
                raise
            self._dirty = False
        return acts

    def _fresh_view(self) -> SlurmView | None:
        """What Slurm says, unless that is old."""
        view = self._view
        return view if view is not None and self.now - view.at <= FRESH_S else None

    def _start(self) -> None:
        """What the last process asked for may still be under way, however long ago that seems to be."""
        self._started = True
        for launch in self.memory.launches.values():
            if launch.stage != "registered":
                launch.sent = self.now

    # ---- one node ----

    def _node(self, node: str, view: SlurmView) -> None:
        seen = view.nodes.get(node, SlurmNode("unknown"))
        if seen.want == "up":
            self._wanted.setdefault(node, self.now)
        else:
            self._wanted.pop(node, None)
        pool = self._pool_of.get(node)
        launch = self._by_node.get(node)
        if launch is not None:
            self._bare.pop(node, None)
        if seen.want == "invalid" and pool is not None:
            self._other_gpus(node, seen, launch)
            return
        hold = self.memory.holds.get(node)
        if hold is not None and (seen.want in ("off", "on") and hold.until is not None):
            self._forget_hold(node)
        elif hold is not None and hold.until is None and seen.want != "unknown":
            if seen.drained and not hold.drained:
                hold.drained = self._dirty = True
            elif hold.drained and not seen.drained:
                self._forget_hold(node)  # an operator has returned it
        if launch is not None:
            self._one_launch(launch, seen, view)
        elif pool is not None:
            self._without_launch(node, pool, seen)

    def _one_launch(self, launch: Launch, seen: SlurmNode, view: SlurmView) -> None:
        stage = launch.stage
        self._tell_address(launch, seen)
        if stage == "terminating":
            self._terminate(launch)
        elif launch.node not in self._pool_of:
            self._end(launch, "no_pool")
        elif view.at < launch.since or seen.want == "unknown":
            pass  # seen before the step, or not known
        elif seen.want == "off":
            self._end(launch, "not_wanted")
        elif seen.want == "down":
            self._end(launch, "not_registered" if stage == "launched" else "down", seen.reason)
        elif stage == "asked":
            self._ask(launch)
        elif stage == "launched" and seen.want == "on":
            self._registered(launch)
        elif stage == "launched" and self.now - launch.since > self._pools[launch.pool].boot_s:
            self._back_off(launch, "not_registered", "the last machine did not register")
            self._end(launch, "not_registered")
        elif stage == "registered" and seen.want == "up":
            self._end(launch, "not_wanted", "called off and wanted again")
        elif launch.notice and stage == "launched":
            self._end(launch, "notice", launch.notice)
        elif launch.notice:
            self._leave(launch, seen, view)

    def _leave(self, launch: Launch, seen: SlurmNode, view: SlurmView) -> None:
        """The provider takes the machine back soon: jobs that save their state do, all that may start elsewhere."""
        reason = f"{POOL_REASON}{launch.notice}"[:200]
        if not seen.drained:
            self._change((launch.node,), "drain", reason)
        jobs = self._jobs_on(launch.node)
        if not jobs and seen.drained:
            self._change((launch.node,), "power_down_force", reason)
        for job in jobs:
            saves = view.jobs[job].saves
            if saves and job not in self._signalled:
                signal = JobAct(job, "signal", view.jobs[job].name, self._checkpoint.signal)
                self._do(("job", "signal", str(job)), signal, again=_SLURM_AGAIN_S)
            if self.now >= launch.noticed + (self._checkpoint.before_requeue_s if saves else 0):
                self._requeue(job)

    def _tell_address(self, launch: Launch, seen: SlurmNode) -> None:
        """Tell Slurm where the node is, until it says so."""
        if launch.stage == "launched" and seen.want in ("up", "on") and launch.address not in ("", seen.address):
            self._change((launch.node,), "address", launch.address)

    def _without_launch(self, node: str, pool: str, seen: SlurmNode) -> None:
        if seen.want != "on":
            self._bare.pop(node, None)
        if seen.want == "up":
            self._new_launch(node, pool)
        elif seen.want == "down" and seen.by_slurm:
            self._change((node,), "power_down", f"{POOL_REASON}{seen.reason}"[:200])
        elif seen.want == "on" and not self._machine_of(node, pool):
            self._bare.setdefault(node, self.now)
            lists = self._lists.get(pool)
            if lists and not lists.suspect and lists.bare.get(node, 0) >= (_ABSENT if lists.known else _EMPTY):
                self._change((node,), "power_down_force", f"{POOL_REASON}the provider has no machine")

    def _machine_of(self, node: str, pool: str) -> bool:
        """Whether the provider's last list has a machine that is this node's: it is taken over or ended first. Until
        there is a list, it may have."""
        lists = self._lists.get(pool)
        if lists is None or not lists.complete:
            return True
        return any(one.node == node and not one.ending for one in lists.known.values() if one.id in lists.odd)

    def _new_launch(self, node: str, pool_name: str) -> None:
        hold = self.memory.holds.get(node)
        if hold is not None and hold.until is None:
            return
        pool = self._policy.pools[pool_name]
        pause = self._waits(pool_name) or self._waits(f"{pool_name}|{node}")
        if pause is not None:
            self._hold(node, pause.kind, pause.text, pause.until)
            return
        if self._machine_of(node, pool_name):
            return
        waits: list[BackOff] = []
        for shape in pool.shapes:
            for zone in pool.zones:
                back_off = self._waits(f"{pool_name}|{shape.name}|{zone}")
                if back_off is not None:
                    waits.append(back_off)
                    continue
                token = self._new_token()
                launch = Launch(
                    token, node, pool_name, shape.name, zone, "asked", self.now, self.now, price=shape.price
                )
                self.memory.launches[token] = self._by_node[node] = launch
                self._event(launch, "asked")
                self._ask(launch)
                return
        told = max(waits, key=lambda one: -_TELLING.index(one.kind))
        self._hold(node, told.kind, told.text, min(one.until for one in waits))

    def _ask(self, launch: Launch) -> None:
        if launch.refused is not None or ("launch", launch.token) in self._busy:
            return
        if self._waits(launch.pool) is not None:
            return
        if launch.sent and self.now < launch.sent + _AGAIN_S:
            return
        launch.sent = self.now
        self._dirty = True
        self._do(("launch", launch.token), LaunchAct(launch.pool, self._order(launch)))

    def _order(self, launch: Launch) -> Order:
        return Order(launch.token, launch.node, launch.shape, launch.zone)

    def _launched(self, result: Launched) -> None:
        launch = self.memory.launches.get(result.token)
        if launch is None:
            return  # the list shows its machine, if there is one
        if result.machine is not None and result.machine.ending and launch.stage == "asked":
            self._gone(launch, "vanished", "the provider has ended it")
        elif result.machine is not None:
            self._has_machine(launch, result.machine)
        elif result.failure is not None and launch.stage == "asked":
            self._refused(launch, result.failure, result.text)

    def _has_machine(self, launch: Launch, machine: Machine) -> None:
        if machine.ending:
            return
        if not launch.machine:
            launch.machine = machine.id
            self._dirty = True
        if machine.id != launch.machine:
            return
        if launch.stage == "asked":
            self._enter(launch, "launched")
            self._count(launch.pool, "launches")
            launch.launched = self.now
            for key in (launch.pool, self._key(launch), f"{launch.pool}|{launch.node}"):
                self.memory.back_offs.pop(key, None)
            self._forget_hold(launch.node)
        if machine.notice and not launch.notice:
            launch.notice, launch.noticed = machine.notice, self.now
            self._event(launch, "notice", machine.notice)
            self._count(launch.pool, "notice")
            pool = self._pools[launch.pool]
            if len(pool.shapes) * len(pool.zones) > 1:  # the next one is launched elsewhere
                self._back_off(launch, "no_capacity", machine.notice)
        if machine.address and machine.address != launch.address and launch.stage == "launched":
            launch.address = machine.address
            self._dirty = True

    def _refused(self, launch: Launch, failure: Failure, text: str) -> None:
        kind = difference_of(failure)
        self._count(launch.pool, kind)
        words = one_line(text)[:300]
        if failure == "unknown":
            launch.text = words
            self._pause(launch.pool, kind, words)
            self._dirty = True
            return
        if kind == "broken":
            self._set_back_off(f"{launch.pool}|{launch.node}", kind, words, self._pools[launch.pool].back_off_s)
        elif kind in _PAUSES:
            self._pause(launch.pool, kind, words)
        else:
            self._back_off(launch, kind, words)
        launch.refused, launch.text = kind, words
        self._dirty = True
        if launch.sent <= launch.asked:  # the only request, and its answer is known
            self._gone(launch, kind, words)

    def _registered(self, launch: Launch) -> None:
        boots = self.memory.boots.setdefault(f"{launch.pool}|{launch.shape}", [])
        boots.append(round(self.now - (launch.launched or launch.since), 1))
        del boots[:-_BOOTS]
        self._enter(launch, "registered")

    def _end(self, launch: Launch, why: Difference, text: str = "") -> None:
        launch.why, launch.text = why, text or launch.text
        if why in _LOST:
            self._count(launch.pool, why)
        self._enter(launch, "terminating", one_line(text)[:200])
        self._terminate(launch)

    def _terminate(self, launch: Launch) -> None:
        """Ask for its end until lists do not have it; without a known machine, lists say whether there is one."""
        if launch.machine:
            self._end_machine(launch.pool, launch.machine, launch.token)

    def _end_machine(self, pool: str, machine: str, token: str) -> None:
        known = self._lists.get(pool)
        listed = known.known.get(machine) if known is not None else None
        if not (listed is not None and listed.ending):
            self._do(("terminate", machine), TerminateAct(pool, machine, token), again=_AGAIN_S)

    def _gone(self, launch: Launch, why: Difference, text: str = "") -> None:
        if why in _LOST and launch.stage != "terminating":  # else it is counted
            self._count(launch.pool, why)
        self._book(self.memory.costs, launch)
        self.memory.launches.pop(launch.token, None)
        self.memory.ended.append(launch.token)
        if self._by_node.get(launch.node) is launch:
            del self._by_node[launch.node]
        launch.why, launch.text = why, text
        self._enter(launch, "gone", text)

    def _other_gpus(self, node: str, seen: SlurmNode, launch: Launch | None) -> None:
        """What has registered is not what the pool promises: no job may run there, until an operator returns it."""
        if node not in self.memory.holds:
            self._hold(node, "other_gpus", seen.reason, None)
            for job in self._jobs_on(node):
                self._requeue(job)
        if launch is not None and launch.stage != "terminating":
            self._end(launch, "other_gpus", seen.reason)
        elif launch is not None:
            self._terminate(launch)
        self._change((node,), "power_down_force", f"{HELD_REASON}{seen.reason}"[:200])

    # ---- what lists say ----

    def _listed(self, result: Listed) -> None:
        lists = self._lists.setdefault(result.pool, _Lists())
        if result.machines is None:
            lists.failed = one_line(result.text)[:300]
            self._pause(result.pool, difference_of(result.failure or "unknown"), lists.failed)
            return
        if result.began <= lists.began:
            return  # a late answer
        lists.failed = ""
        mine = [one for one in self.memory.launches.values() if one.pool == result.pool]
        lists.suspect = not result.machines and any(one.machine and one.stage != "terminating" for one in mine)
        lists.began = result.began
        lists.known = {one.id: one for one in result.machines}
        lists.complete += 1
        by_token: dict[str, list[Machine]] = {}
        for machine in result.machines:
            by_token.setdefault(machine.token, []).append(machine)
        for launch in mine:
            self._compare(launch, by_token.get(launch.token, []), lists, result.began)
        self._odd(result, lists)
        nodes = {one.node for one in result.machines if not one.ending}
        lists.bare = {
            node: lists.bare.get(node, 0) + 1 for node, since in self._bare.items()
            if node not in nodes and self._pool_of.get(node) == result.pool and result.began > since + SETTLE_S
        }  # fmt: skip

    def _compare(self, launch: Launch, machines: list[Machine], lists: _Lists, began: float) -> None:
        for machine in sorted(machines, key=lambda one: (one.ending, one.id != launch.machine)):
            self._has_machine(launch, machine)
        mine = [one for one in machines if not launch.machine or one.id == launch.machine]
        if any(not one.ending for one in mine):
            lists.absent.pop(launch.token, None)
            return
        ended = bool(mine)
        if not ended:
            settled = max(launch.sent, launch.launched or 0.0) + SETTLE_S
            if began < settled:
                return
            lists.absent[launch.token] = lists.absent.get(launch.token, 0) + 1
            if lists.absent[launch.token] < (_ABSENT if lists.known else _EMPTY):
                return
        lists.absent.pop(launch.token, None)
        self._absent(launch, ended)

    def _absent(self, launch: Launch, ended: bool) -> None:
        """The provider does not have its machine, for certain. `ended`: it had one."""
        if launch.stage == "terminating":
            self._gone(launch, launch.why, launch.text)
        elif launch.stage == "asked":
            if launch.refused is not None:
                self._gone(launch, launch.refused, launch.text)
            elif ended:
                self._gone(launch, "vanished")
        else:
            was_on = launch.stage == "registered"
            if not was_on:
                self._back_off(launch, "not_registered", "the last machine ended before it registered")
            self._gone(launch, "vanished")
            if was_on:
                self._change((launch.node,), "power_down_force", f"{POOL_REASON}the provider has ended its machine")

    def _odd(self, result: Listed, lists: _Lists) -> None:
        """Machines with our tags that no launch has: second ones, late ones, and those of a journal that was lost."""
        odd: dict[str, float] = {}
        for machine in result.machines or ():
            launch = self.memory.launches.get(machine.token)
            if machine.ending or (launch is not None and launch.machine in ("", machine.id)):
                continue
            odd[machine.id] = lists.odd.get(machine.id, self.now)
            if launch is None and self._unsure(machine):
                continue
            if launch is None and self._adopt(machine, result.pool):
                del odd[machine.id]
                continue
            if machine.id not in lists.odd:
                what: Difference = "unknown_machine" if launch is None else "second_machine"
                self._note(Event(self.now, machine.node, result.pool, what, machine.shape, machine.zone, machine.id))
            self._end_machine(result.pool, machine.id, machine.token)
        lists.odd = odd

    def _unsure(self, machine: Machine) -> bool:
        """Whether it is not known what Slurm wants of its node: its job may run there."""
        view = self._fresh_view()
        return view is None or (machine.node in view.nodes and view.nodes[machine.node].want == "unknown")

    def _adopt(self, machine: Machine, pool: str) -> bool:
        """Take over a machine of a node that has none, which Slurm wants or has: the journal was lost."""
        seen = None if self._view is None else self._view.nodes.get(machine.node)
        wanted = seen is not None and seen.want in ("up", "on")
        if not wanted or machine.token in self.memory.ended:
            return False
        if machine.node in self._by_node or self._pool_of.get(machine.node) != pool:
            return False
        launch = Launch(
            machine.token, machine.node, pool, machine.shape, machine.zone, "asked", self.now, self.now,
            price=next((one.price for one in self._policy.pools[pool].shapes if one.name == machine.shape), 0.0),
        )  # fmt: skip
        self.memory.launches[machine.token] = self._by_node[machine.node] = launch
        self._event(launch, "taken over")
        self._has_machine(launch, machine)
        return True

    def _list(self) -> None:
        for name in self._pools:
            mine = [one for one in self.memory.launches.values() if one.pool == name]
            lists = self._lists.get(name)
            open_ = lists is None or not lists.complete or lists.suspect or bool(lists.odd)
            open_ = open_ or any(one.stage in ("asked", "terminating") for one in mine)
            pause = self._waits(name)
            if pause is not None and pause.kind in _PAUSES:
                continue
            self._do(("list", name), ListAct(name), again=_QUICK_LIST_S if open_ else _LIST_S)

    # ---- several nodes ----

    def _give_back(self, view: SlurmView) -> None:
        """Jobs for which a node cannot be had: all their nodes are given back, and they are requeued."""
        for node, hold in list(self.memory.holds.items()):
            pool_name = self._pool_of.get(node)
            seen = view.nodes.get(node)
            if pool_name is None or seen is None or seen.want != "up":
                continue
            if hold.until is not None and self.now - hold.since < self._policy.pools[pool_name].give_back_s:
                continue
            jobs = self._jobs_on(node)
            back = {node}
            for job in jobs:
                self._requeue(job)
                back |= {one for one in view.jobs[job].nodes if one in self._pool_of and self._alone(one, jobs)}
            # `power_down_force` also takes the jobs from nodes whose machine is there.
            self._change(tuple(sorted(back)), "power_down_force", f"{POOL_REASON}{hold.kind.replace('_', ' ')}")

    def _alone(self, node: str, jobs: Collection[int]) -> bool:
        """Whether no other jobs are on the node."""
        return all(one in jobs for one in self._jobs_on(node))

    def _jobs_on(self, node: str) -> list[int]:
        return self._jobs.get(node, [])

    def _requeue(self, job: int) -> None:
        name = self._view.jobs[job].name if self._view is not None and job in self._view.jobs else ""
        if self._do(("job", "requeue", str(job)), JobAct(job, "requeue", name), again=_SLURM_AGAIN_S):
            self.memory.requeued[job] = self.now
            self._dirty = True

    def _release(self, view: SlurmView) -> None:
        """Slurm lets a requeued job wait for two minutes; it may start at once."""
        for job, since in list(self.memory.requeued.items()):
            seen = view.jobs.get(job)
            if seen is not None and seen.pending_until:
                self._do(("job", "release", str(job)), JobAct(job, "release", seen.name), again=_SLURM_AGAIN_S)
            elif view.at > since + _RELEASE_S:
                del self.memory.requeued[job]
                self._dirty = True

    def _keep_least(self, view: SlurmView) -> None:
        for name, pool in self._policy.pools.items():
            if not pool.least or self._closed(name) is not None:
                continue
            wants = {node: view.nodes.get(node, SlurmNode("unknown")) for node in self._names[name]}
            missing = pool.least - sum(one.want in ("up", "on") for one in wants.values())
            off = [
                node for node, one in wants.items()
                if one.want == "off" and not one.drained and node not in self._by_node
            ]  # fmt: skip
            if missing > 0 and off:
                self._change(tuple(off[:missing]), "power_up")

    def _follow_plan(self, view: SlurmView) -> None:
        """Ask for nodes so early that they are there when the plan needs them, and let go those that nobody needs."""
        for name, pool in self._policy.pools.items():
            decision = self._decide(name, pool, view)
            if decision.ask and self._closed(name) is None:
                self._change(decision.ask, "power_up")
            if decision.let_go:
                self._change(decision.let_go, "power_down", f"{POOL_REASON}idle")

    def _decide(self, name: str, pool: PoolPolicy, view: SlurmView) -> Decision:
        starts = [one for one in view.starts if one.partition in ("", pool.partition)]
        boots = self.memory.boots.get(f"{name}|{pool.shapes[0].name}", [])
        nodes = [self._pool_node(node, view) for node in self._names[name]]
        times = PoolTimes(pool.idle_s, pool.least, pool.spare, pool.gpus, pool.cpus)
        return decide(self.now, nodes, starts, times, predicted_boot(boots, pool.boot_s))

    def _pool_node(self, node: str, view: SlurmView) -> PoolNode:
        seen = view.nodes.get(node, SlurmNode("unknown"))
        launch = self._by_node.get(node)
        jobs = self._jobs_on(node)
        if seen.want == "on" and not jobs:
            self._idle.setdefault(node, view.at)
        else:
            self._idle.pop(node, None)
        state: NodeStage = "other"
        if seen.want == "on":
            state = "on"
        elif seen.want == "up":
            state = "boots"
        elif seen.want == "off" and launch is None and not seen.drained:
            state = "off"
        return PoolNode(
            node, state, self._idle.get(node), max((view.jobs[job].ends for job in jobs), default=math.inf),
            stays=seen.drained or seen.reserved, price=launch.price if launch else 0.0,
            zone=launch.zone if launch else "",
        )  # fmt: skip

    def _closed(self, pool_name: str) -> BackOff | None:
        """Why a pool can have no machine now; None: it can."""
        pause = self._waits(pool_name)
        if pause is not None and pause.times > 1:
            return pause
        found: list[BackOff] = []
        pool = self._policy.pools[pool_name]
        for shape in pool.shapes:
            for zone in pool.zones:
                one = self._waits(f"{pool_name}|{shape.name}|{zone}")
                if one is None:
                    return None
                found.append(one)
        return min(found, key=lambda one: one.until)

    def _open_and_close(self, view: SlurmView) -> None:
        """While a pool can have no machine, or a node, Slurm plans none of its absent nodes, and jobs go elsewhere."""
        for name, nodes in self._names.items():
            closed = self._closed(name)
            seen = [(node, view.nodes[node]) for node in nodes if node in view.nodes]
            broken = {node for node, _ in seen if self._waits(f"{name}|{node}") is not None}
            left = {one.node for one in self.memory.launches.values() if one.notice}
            ours = [
                node for node, one in seen
                if one.drained and one.reason.startswith(POOL_REASON) and node not in broken | left
            ]  # fmt: skip
            held = [
                node for node, one in seen
                if node in self.memory.holds and self.memory.holds[node].until is None and not one.drained
                and one.want == "off"
            ]  # fmt: skip
            for node in held:
                self._change((node,), "drain", f"{HELD_REASON}{self.memory.holds[node].text}"[:200])
            if apart := [node for node, one in seen if node in broken and one.want == "off" and not one.drained]:
                self._change(tuple(apart), "drain", f"{POOL_REASON}broken, asked again later")
            if closed is None:
                if ours:
                    self._change(tuple(ours), "undrain")
                continue
            absent = [node for node, one in seen if one.want == "off" and not one.drained and node not in held]
            if absent:
                words = closed.kind.replace("_", " ")
                self._change(tuple(absent), "drain", f"{POOL_REASON}{words}, asked again later")

    # ---- small parts ----

    def _do(self, key: tuple[str, ...], act: Act, again: float = 0.0) -> bool:
        """Ask for an act, unless it is under way, or was asked for less than `again` seconds ago."""
        if key in self._busy or self.now - self._last.get(key, -math.inf) < again:
            return False
        self._last[key] = self._busy[key] = self.now
        self._asked.append(key)
        self._acts.append(act)
        return True

    def _change(self, nodes: tuple[str, ...], change: Change, text: str = "") -> None:
        """Ask for a change of nodes in Slurm; each node's is asked for once in a while until a view shows it."""
        due = []
        for node in nodes:
            key = ("slurm", change, node)
            if key not in self._busy and self.now - self._last.get(key, -math.inf) >= _SLURM_AGAIN_S:
                self._last[key] = self._busy[key] = self.now
                self._asked.append(key)
                due.append(node)
        if due:
            self._acts.append(NodeAct(tuple(due), change, one_line(text)))

    def _changed(self, result: Changed) -> None:
        act = result.act
        if isinstance(act, NodeAct):
            for node in act.nodes:
                self._busy.pop(("slurm", act.change, node), None)
        else:
            self._busy.pop(("job", act.change, str(act.job)), None)
            if act.change == "signal" and not result.text:
                self._signalled.add(act.job)
        if result.text:
            log.warning("%s: %s", act, one_line(result.text))

    def _waits(self, key: str) -> BackOff | None:
        """The back-off of this key, unless it is over."""
        one = self.memory.back_offs.get(key)
        return one if one is not None and one.until > self.now else None

    def _key(self, launch: Launch) -> str:
        return f"{launch.pool}|{launch.shape}|{launch.zone}"

    def _back_off(self, launch: Launch, kind: Difference, text: str) -> None:
        """Of a shape in a zone; of what is not a zone's, in all zones."""
        pool = self._pools[launch.pool]
        zones = (launch.zone,) if kind in ("no_capacity", "not_registered") else pool.zones
        first = pool.back_off_s * _LONG.get(kind, 1.0)
        for zone in zones:
            self._set_back_off(f"{launch.pool}|{launch.shape}|{zone}", kind, text, first)

    def _pause(self, pool: str, kind: Difference, text: str) -> None:
        """Of a whole pool."""
        before = self.memory.back_offs.get(pool)
        if before is None or before.until <= self.now:  # several calls at once that fail are one failure
            self._set_back_off(pool, kind, text, _PAUSES.get(kind, _PAUSES["provider"]))

    def _set_back_off(self, key: str, kind: Difference, text: str, first: float) -> None:
        before = self.memory.back_offs.get(key)
        times = 1 if before is None else min(before.times + 1, _DOUBLED)
        since = self.now if before is None else before.since
        self.memory.back_offs[key] = BackOff(self.now + first * 2 ** (times - 1), times, kind, text, since)
        self._dirty = True

    def _hold(self, node: str, kind: Difference, text: str, until: float | None) -> None:
        before = self.memory.holds.get(node)
        if before is None or (before.kind, before.until) != (kind, until):
            since = self.now if before is None else before.since
            self.memory.holds[node] = Hold(kind, one_line(text)[:300], since, until)
            self._dirty = True
            if before is None:
                self._note(Event(self.now, node, self._pool_of.get(node, ""), kind, text=one_line(text)[:300]))

    def _forget_hold(self, node: str) -> None:
        if self.memory.holds.pop(node, None) is not None:
            self._dirty = True

    def _count(self, pool: str, what: str) -> None:
        counts = self.memory.counts.setdefault(pool, {})
        counts[what] = counts.get(what, 0) + 1
        self._dirty = True

    def _enter(self, launch: Launch, stage: Stage, text: str = "") -> None:
        launch.stage, launch.since = stage, self.now
        self._event(launch, stage if stage != "gone" or launch.why == "none" else f"gone: {launch.why}", text)

    def _event(self, launch: Launch, what: str, text: str = "") -> None:
        self._note(
            Event(self.now, launch.node, launch.pool, what, launch.shape, launch.zone, launch.machine, text[:300])
        )

    def _note(self, event: Event) -> None:
        self.memory.history.append(event)
        self._dirty = True
        log.info("%s: %s %s", event.node, event.what, event.text)

    def _book(self, costs: dict[str, PoolCosts], launch: Launch) -> None:
        """What its machine has cost until now."""
        if launch.launched is not None and launch.pool in self._pools:
            pool = self._pools[launch.pool]
            known = costs.setdefault(launch.pool, PoolCosts())
            known.partition, known.gpus, known.cpus = pool.partition, pool.gpus, pool.cpus
            known.book(launch.launched, self.now, launch.price)

    # ---- what people see ----

    def costs(self) -> dict[str, PoolCosts]:
        """Of all machines until now, by pool and day."""
        found = deepcopy(self.memory.costs)
        for launch in self.memory.launches.values():
            self._book(found, launch)
        return found

    def status(self) -> FleetStatus:
        """All of it."""
        view = self._view
        nodes = [self._node_status(node) for node in dict.fromkeys([*self._pool_of, *self._by_node])]
        return FleetStatus(
            at=self.now,
            host=self._host,
            slurm_at=None if view is None else view.at,
            pools={name: self._pool_status(name, pool, nodes) for name, pool in self._policy.pools.items()},
            nodes=nodes,
            history=list(self.memory.history),
        )

    def _node_status(self, node: str) -> NodeStatus:
        seen = SlurmNode("unknown") if self._view is None else self._view.nodes.get(node, SlurmNode("unknown"))
        launch = self._by_node.get(node)
        difference, text, again = self._difference(node, seen, launch)
        pool = launch.pool if launch is not None else self._pool_of[node]
        jobs = tuple(sorted(self._jobs_on(node)))
        if launch is None:
            hold = self.memory.holds.get(node)
            since = None if hold is None else hold.since
            return NodeStatus(
                node, pool, seen.want, difference=difference, text=text, again=again, since=since, jobs=jobs
            )
        return NodeStatus(
            node, pool, seen.want, launch.stage, launch.machine, launch.shape, launch.zone, launch.since, difference,
            text, again, jobs,
        )  # fmt: skip

    def _difference(self, node: str, seen: SlurmNode, launch: Launch | None) -> tuple[Difference, str, float | None]:
        """Its name, the words, and when it is tried again."""
        hold = self.memory.holds.get(node)
        if self._view is None or self.now - self._view.at > FRESH_S:
            return "slurm_silent", "", None
        if launch is not None:
            return self._difference_of_launch(launch, seen)
        if hold is not None:
            return hold.kind, hold.text, hold.until
        if seen.want == "unknown":
            return "not_in_slurm", "", None
        if seen.want == "down":
            return ("down" if seen.by_slurm else "down_by_operator"), seen.reason, None
        pool = self._pool_of[node]
        lists = self._lists.get(pool)
        if lists is not None and any(lists.known[one].node == node for one in lists.odd if one in lists.known):
            return "unknown_machine", "", None
        if seen.want in ("up", "on"):
            if lists is not None and lists.suspect:
                return "empty_list", "", None
            pause = self._waits(pool)
            if pause is not None:
                return pause.kind, pause.text, pause.until
            return ("no_machine" if seen.want == "on" else "boots"), "", None
        broken = self._waits(f"{pool}|{node}")
        if broken is not None:
            return broken.kind, broken.text, broken.until
        closed = self._closed(pool)
        if seen.drained and seen.reason.startswith(POOL_REASON) and closed is not None:
            return "pool_closed", closed.text, closed.until
        return "none", "", None

    def _difference_of_launch(self, launch: Launch, seen: SlurmNode) -> tuple[Difference, str, float | None]:
        if launch.stage == "terminating":
            return ("ending" if launch.why == "not_wanted" else launch.why), launch.text, None
        if launch.stage == "asked":
            if launch.refused is not None:
                return launch.refused, launch.text, None
            return ("boots" if launch.sent <= launch.asked else "unanswered"), launch.text, None
        if launch.notice:
            return "notice", launch.notice, None
        if launch.stage == "launched":
            return "boots", "", None
        return ("none" if seen.want == "on" else "down"), "", None

    def _pool_status(self, name: str, pool: PoolPolicy, nodes: list[NodeStatus]) -> PoolStatus:
        mine = [one for one in nodes if one.pool == name]
        launches = [one for one in self.memory.launches.values() if one.pool == name]
        closed = self._closed(name)
        pause = self._waits(name)
        boots = sorted(boot for key, times in self.memory.boots.items() if key.split("|")[0] == name for boot in times)
        held = [one for one in mine if one.node in self.memory.holds]
        none_since = [self.memory.holds[one.node].since for one in held if one.difference in ("no_capacity", "quota")]
        if closed is not None and closed.kind in ("no_capacity", "quota"):
            none_since.append(closed.since)
        counts = self.memory.counts.get(name, {})
        problem = self._lists[name].failed if name in self._lists else ""
        return PoolStatus(
            driver=pool.driver,
            nodes=pool.nodes,
            most=len(self._names[name]),
            least=pool.least,
            partition=pool.partition,
            on=sum(one.stage == "registered" for one in launches),
            launching=sum(one.stage in ("asked", "launched") for one in launches),
            ending=sum(one.stage == "terminating" for one in launches),
            held=len(held),
            cost_hour=round(sum(one.price for one in launches if one.machine), 4),
            closed_until=None if closed is None else closed.until,
            closed_for="none" if closed is None else closed.kind,
            without_capacity_since=min(none_since, default=None),
            boot_s=boots[len(boots) // 2] if boots else None,
            problem=problem or ("" if pause is None else pause.text),
            launches=counts.get("launches", 0),
            failures={kind: counts[kind] for kind in DIFFERENCES if kind in counts},
            oldest_wait_since=min((self._wanted[one.node] for one in mine if one.node in self._wanted), default=None),
        )
