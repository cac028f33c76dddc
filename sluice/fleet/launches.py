"""What is done of one node: its launch, from before it is asked for until the provider does not have its machine."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sluice.base.text import one_line
from sluice.exchange.fleet import Difference
from sluice.fleet.driver import Failure, Machine, Order
from sluice.fleet.journal import BackOff, Launch
from sluice.fleet.state import ABSENT, EMPTY, LOST, PAUSES, SLURM_AGAIN_S, State, difference_of
from sluice.fleet.views import (
    HELD_REASON,
    POOL_REASON,
    JobAct,
    LaunchAct,
    Launched,
    SlurmNode,
    SlurmView,
    TerminateAct,
)

_AGAIN_S = 5.0  # between two requests of the same
_TELLING: tuple[Difference, ...] = ("refused", "quota", "not_registered", "no_capacity")
_BOOTS = 20


class Launches:
    """All launches."""

    def __init__(self, state: State, new_token: Callable[[], str] | None = None) -> None:
        self._state = state
        self._new_token = new_token or (lambda: secrets.token_hex(16))

    def node(self, node: str, view: SlurmView) -> None:
        """What a view says of a node, and what is done of it."""
        seen = view.nodes.get(node, SlurmNode("unknown"))
        if seen.want == "up":
            self._state.wanted.setdefault(node, self._state.now)
        else:
            self._state.wanted.pop(node, None)
        pool = self._state.pool_of.get(node)
        launch = self._state.by_node.get(node)
        if launch is not None:
            self._state.bare.pop(node, None)
        if seen.want == "invalid" and pool is not None:
            self._other_gpus(node, seen, launch)
            return
        hold = self._state.memory.holds.get(node)
        if hold is not None and (seen.want in ("off", "on") and hold.until is not None):
            self._state.forget_hold(node)
        elif hold is not None and hold.until is None and seen.want != "unknown":
            if seen.drained and not hold.drained:
                hold.drained = self._state.dirty = True
            elif hold.drained and not seen.drained:
                self._state.forget_hold(node)  # an operator has returned it
        if launch is not None:
            if not launch.used and self._state.jobs_on(node):
                launch.used = self._state.dirty = True
            self._one_launch(launch, seen, view)
        elif pool is not None:
            self._without_launch(node, pool, seen)

    def _one_launch(self, launch: Launch, seen: SlurmNode, view: SlurmView) -> None:
        stage = launch.stage
        self._tell_address(launch, seen)
        if stage == "terminating":
            self._terminate(launch)
        elif launch.node not in self._state.pool_of and not self._finishes(launch, seen):
            self._end(launch, "no_pool")
        elif view.at < launch.since or seen.want in ("due", "unknown"):
            pass  # seen before the step, or not known
        elif seen.want == "off":
            self._end(launch, "not_wanted")
        elif seen.want == "down":
            self._end(launch, "not_registered" if stage == "launched" else "down", seen.reason)
        elif stage == "asked":
            self._ask(launch)
        elif stage == "launched" and seen.want == "on":
            self._registered(launch)
        elif stage == "launched" and self._state.now - launch.since > self._state.pools[launch.pool].boot_s:
            self._state.back_off(launch, "not_registered", "the last machine did not register")
            self._end(launch, "not_registered")
        elif stage == "registered" and seen.want == "up":
            self._end(launch, "not_wanted", "called off and wanted again")
        elif launch.notice and stage == "launched":
            self._end(launch, "notice", launch.notice)
        elif launch.leaves and stage == "registered":
            self._leave(launch, seen, view)

    def _finishes(self, launch: Launch, seen: SlurmNode) -> bool:
        """Whether a dynamic node that has left the policy keeps its machine: jobs run there, or may until it is seen
        drained, or slurmctld has just started and does not know.
        """
        may_run = seen.want == "on" and (not seen.drained or bool(self._state.jobs_on(launch.node)))
        return bool(seen.made) and (may_run or seen.want == "unknown")

    def _leave(self, launch: Launch, seen: SlurmNode, view: SlurmView) -> None:
        """The provider takes the machine back soon: jobs that save their state do, all that may start elsewhere. From
        one that is only at risk no job is taken.
        """
        reason = f"{POOL_REASON}{launch.leaves}"[:200]
        if not seen.drained:
            self._state.change((launch.node,), "drain", reason)
        jobs = self._state.jobs_on(launch.node)
        if not jobs and seen.drained:
            self._state.change((launch.node,), "power_down_force", reason)
        for job in jobs if launch.notice else ():
            saves = view.jobs[job].saves
            if saves and job not in self._state.signalled:
                signal = JobAct(job, "signal", view.jobs[job].name, self._state.checkpoint.signal)
                self._state.do(("job", "signal", str(job)), signal, again=SLURM_AGAIN_S)
            if self._state.now >= launch.noticed + (self._state.checkpoint.before_requeue_s if saves else 0):
                self._state.requeue(job)

    def _tell_address(self, launch: Launch, seen: SlurmNode) -> None:
        """Tell Slurm where the node is, until it says so."""
        if launch.stage == "launched" and seen.want in ("up", "on") and launch.address not in ("", seen.address):
            self._state.change((launch.node,), "address", launch.address)

    def _without_launch(self, node: str, pool: str, seen: SlurmNode) -> None:
        if seen.want != "on":
            self._state.bare.pop(node, None)
        if seen.want == "up":
            self._new_launch(node, pool)
        elif seen.want == "down" and seen.by_slurm:
            self._state.change((node,), "power_down", f"{POOL_REASON}{seen.reason}"[:200])
        elif seen.want == "on" and self._state.formers_listed(pool) and not self._state.machine_of(node, pool):
            self._state.bare.setdefault(node, self._state.now)
            lists = self._state.lists.get(pool)
            if lists and not lists.suspect and lists.bare.get(node, 0) >= (ABSENT if lists.known else EMPTY):
                self._state.change((node,), "power_down_force", f"{POOL_REASON}the provider has no machine")

    def _new_launch(self, node: str, pool_name: str) -> None:
        if self._state.searched(pool_name):
            return
        hold = self._state.memory.holds.get(node)
        if hold is not None and hold.until is None:
            return
        pool = self._state.policy.pools[pool_name]
        pause = self._state.waits(pool_name) or self._state.waits(f"{pool_name}|{node}")
        if pause is not None:
            self._state.hold(node, pause.kind, pause.text, pause.until)
            return
        if self._state.machine_of(node, pool_name):
            return
        waits: list[BackOff] = []
        for shape in pool.shapes:
            for zone in pool.zones:
                back_off = self._state.waits(f"{pool_name}|{shape.name}|{zone}")
                if back_off is not None:
                    waits.append(back_off)
                    continue
                token = self._new_token()
                launch = Launch(
                    token,
                    node,
                    pool_name,
                    shape.name,
                    zone,
                    "asked",
                    self._state.now,
                    self._state.now,
                    price=shape.price,
                )
                self._state.memory.launches[token] = self._state.by_node[node] = launch
                self._state.event(launch, "asked")
                self._ask(launch)
                return
        shown = max(waits, key=lambda one: -_TELLING.index(one.kind))
        self._state.hold(node, shown.kind, shown.text, min(one.until for one in waits))

    def _ask(self, launch: Launch) -> None:
        if launch.refused is not None or ("launch", launch.token) in self._state.busy:
            return
        if self._state.waits(launch.pool) is not None:
            return
        if launch.sent and self._state.now < launch.sent + _AGAIN_S:
            return
        launch.sent = self._state.now
        self._state.dirty = True
        self._state.do(("launch", launch.token), LaunchAct(launch.pool, self._order(launch)))

    def _order(self, launch: Launch) -> Order:
        return Order(launch.token, launch.node, launch.shape, launch.zone)

    def launched(self, result: Launched) -> None:
        """What came of a launch."""
        launch = self._state.memory.launches.get(result.token)
        if launch is None:
            return  # the list shows its machine, if there is one
        if result.machine is not None and result.machine.ending and launch.stage == "asked":
            self.gone(launch, "vanished", "the provider has ended it")
        elif result.machine is not None:
            self.has_machine(launch, result.machine)
        elif result.failure is not None and launch.stage == "asked":
            self._refused(launch, result.failure, result.text)

    def has_machine(self, launch: Launch, machine: Machine) -> None:
        """The provider has a machine of this launch."""
        if machine.ending:
            return
        if not launch.machine:
            launch.machine = machine.id
            self._state.dirty = True
        if machine.id != launch.machine:
            return
        if launch.stage == "asked":
            self._state.enter(launch, "launched")
            self._state.count(launch.pool, "launches")
            launch.launched = self._state.now
            self._state.remember_gpus(launch)
            for key in (launch.pool, self._state.key(launch), f"{launch.pool}|{launch.node}"):
                self._state.memory.back_offs.pop(key, None)
            self._state.forget_hold(launch.node)
        if machine.notice and not launch.notice:
            launch.notice, launch.noticed = machine.notice, self._state.now
            self._warned(launch, "notice", machine.notice)
        if machine.at_risk and not launch.at_risk:
            launch.at_risk = machine.at_risk
            self._warned(launch, "at_risk", machine.at_risk)
        if machine.address and machine.address != launch.address and launch.stage == "launched":
            launch.address = machine.address
            self._state.dirty = True

    def _warned(self, launch: Launch, what: Difference, text: str) -> None:
        """The next machine is launched elsewhere, where there is an elsewhere."""
        self._state.event(launch, what, text)
        self._state.count(launch.pool, what)
        pool = self._state.pools[launch.pool]
        if len(pool.shapes) * len(pool.zones) > 1:
            self._state.back_off(launch, "no_capacity", text)

    def _refused(self, launch: Launch, failure: Failure, text: str) -> None:
        kind = difference_of(failure)
        self._state.count(launch.pool, kind)
        words = one_line(text)[:300]
        if failure == "unknown":
            launch.text = words
            self._state.pause(launch.pool, kind, words)
            self._state.dirty = True
            return
        if kind == "broken":
            self._state.set_back_off(
                f"{launch.pool}|{launch.node}", kind, words, self._state.pools[launch.pool].back_off_s
            )
        elif kind in PAUSES:
            self._state.pause(launch.pool, kind, words)
        else:
            self._state.back_off(launch, kind, words)
        launch.refused, launch.text = kind, words
        self._state.dirty = True
        if launch.sent <= launch.asked:  # the only request, and its answer is known
            self.gone(launch, kind, words)

    def _registered(self, launch: Launch) -> None:
        boots = self._state.memory.boots.setdefault(f"{launch.pool}|{launch.shape}", [])
        boots.append(round(self._state.now - (launch.launched or launch.since), 1))
        del boots[:-_BOOTS]
        self._state.enter(launch, "registered")

    def _end(self, launch: Launch, why: Difference, text: str = "") -> None:
        launch.why, launch.text = why, text or launch.text
        if why in LOST:
            self._state.count(launch.pool, why)
        self._state.enter(launch, "terminating", one_line(text)[:200])
        self._terminate(launch)

    def _terminate(self, launch: Launch) -> None:
        """Ask for its end until lists do not have it; without a known machine, lists say whether there is one."""
        if launch.machine:
            self.end_machine(launch.pool, launch.machine, launch.token)

    def end_machine(self, pool: str, machine: str, token: str) -> None:
        """Ask for a machine's end, unless it is listed as ending."""
        known = self._state.lists.get(pool)
        listed = known.known.get(machine) if known is not None else None
        if not (listed is not None and listed.ending):
            self._state.do(("terminate", machine), TerminateAct(pool, machine, token), again=_AGAIN_S)

    def gone(self, launch: Launch, why: Difference, text: str = "") -> None:
        """The provider does not have its machine any more."""
        if why in LOST and launch.stage != "terminating":  # else it is counted
            self._state.count(launch.pool, why)
        self._state.book(self._state.memory.costs, launch)
        self._state.memory.launches.pop(launch.token, None)
        self._state.memory.ended.append(launch.token)
        if self._state.by_node.get(launch.node) is launch:
            del self._state.by_node[launch.node]
        launch.why, launch.text = why, text
        self._state.enter(launch, "gone", text)

    def _other_gpus(self, node: str, seen: SlurmNode, launch: Launch | None) -> None:
        """What has registered is not what the pool promises: no job may run there, until an operator returns it."""
        if node not in self._state.memory.holds:
            self._state.hold(node, "other_gpus", seen.reason, None)
            for job in self._state.jobs_on(node):
                self._state.requeue(job)
        if launch is not None and launch.stage != "terminating":
            self._end(launch, "other_gpus", seen.reason)
        elif launch is not None:
            self._terminate(launch)
        self._state.change((node,), "power_down_force", f"{HELD_REASON}{seen.reason}"[:200])
