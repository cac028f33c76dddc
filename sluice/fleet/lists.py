"""What is concluded from a provider's lists.

A machine counts as absent when two lists that were begun `SETTLE_S` after the last request say so, or five that have no
machine at all: a provider's answers may be late, and a list may be empty by mistake.
"""

from __future__ import annotations

from policy.pool_nodes import PoolPolicy
from sluice.base.text import one_line
from sluice.exchange.fleet import Difference, Event
from sluice.fleet.driver import Machine
from sluice.fleet.journal import Launch
from sluice.fleet.launches import Launches
from sluice.fleet.state import ABSENT, EMPTY, PAUSES, Lists, State, difference_of, pool_named
from sluice.fleet.views import POOL_REASON, ListAct, Listed

SETTLE_S = 60.0
"""A request to a provider takes effect within this time, or never, and is seen in lists after it."""
_QUICK_LIST_S = 3.0  # while something is under way


class Provided:
    """Machines of all pools, as providers list them."""

    def __init__(self, state: State, launches: Launches) -> None:
        self._state = state
        self._launches = launches

    def take(self, result: Listed) -> None:
        """Compare a list with the journal."""
        if result.pool not in self._state.pools:
            return  # a late answer of one that was forgotten
        lists = self._state.lists.setdefault(result.pool, Lists())
        if result.machines is None:
            lists.failed = one_line(result.text)[:300]
            self._state.pause(result.pool, difference_of(result.failure or "unknown"), lists.failed)
            return
        if result.began <= lists.began:
            return  # a late answer
        lists.failed = ""
        mine = [one for one in self._state.memory.launches.values() if one.pool == result.pool]
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
            node: lists.bare.get(node, 0) + 1 for node, since in self._state.bare.items()
            if node not in nodes and self._state.pool_of.get(node) == result.pool and result.began > since + SETTLE_S
        }  # fmt: skip
        self._search(result)
        if result.pool in self._state.left and result.pool not in self._state.memory.searches:
            self._forget_pool(result, lists)

    def _search(self, result: Listed) -> None:
        """Without a journal nothing is launched before lists have what was launched before, if anything was."""
        search = self._state.memory.searches.get(result.pool)
        if search is None or self._state.view is None:
            return
        self._state.dirty = True
        begun = not self._state.begun_with.isdisjoint(self._state.names.get(result.pool, ()))
        if not search.lost and (result.machines or begun):
            search.lost, search.since = True, self._state.now  # there was a journal
        if search.lost and result.began < search.since + SETTLE_S:
            return
        search.lists += 1
        if not search.lost or search.lists >= (ABSENT if result.machines else EMPTY):
            del self._state.memory.searches[result.pool]

    def _forget_pool(self, result: Listed, lists: Lists) -> None:
        """Its driver is not asked any more when lists say that a pool without launches has no machine."""
        used = any(one.pool == result.pool for one in self._state.memory.launches.values())
        others = {one.machine for one in self._state.memory.launches.values() if one.pool != result.pool}
        if used or any(not one.ending and one.id not in others for one in result.machines or ()):
            lists.none = 0
        elif result.began >= self._state.left[result.pool] + SETTLE_S:
            lists.none += 1
        if lists.none >= EMPTY:
            del self._state.pools[result.pool], self._state.left[result.pool], self._state.lists[result.pool]
            self._state.pools_changed()

    def _compare(self, launch: Launch, machines: list[Machine], lists: Lists, began: float) -> None:
        for machine in sorted(machines, key=lambda one: (one.ending, one.id != launch.machine)):
            self._launches.has_machine(launch, machine)
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
            if lists.absent[launch.token] < (ABSENT if lists.known else EMPTY):
                return
        lists.absent.pop(launch.token, None)
        self._absent(launch, ended)

    def _absent(self, launch: Launch, ended: bool) -> None:
        """The provider does not have its machine, for certain. `ended`: it had one."""
        if launch.stage == "terminating":
            self._launches.gone(launch, launch.why, launch.text)
        elif launch.stage == "asked":
            if launch.refused is not None:
                self._launches.gone(launch, launch.refused, launch.text)
            elif ended:
                self._launches.gone(launch, "vanished")
        else:
            was_on = launch.stage == "registered"
            if not was_on:
                self._state.back_off(launch, "not_registered", "the last machine ended before it registered")
            self._launches.gone(launch, "vanished")
            if was_on:
                self._state.change(
                    (launch.node,), "power_down_force", f"{POOL_REASON}the provider has ended its machine"
                )

    def _odd(self, result: Listed, lists: Lists) -> None:
        """Machines with our tags that no launch has: second ones, late ones, and those of a journal that was lost."""
        odd: dict[str, float] = {}
        for machine in result.machines or ():
            launch = self._state.memory.launches.get(machine.token)
            if machine.ending or (launch is not None and launch.machine in ("", machine.id)):
                if launch is not None and launch.pool != result.pool:
                    self._launches.has_machine(launch, machine)  # both drivers list it; one alone may have the notice
                continue
            odd[machine.id] = lists.odd.get(machine.id, self._state.now)
            if launch is None and self._unsure(machine):
                continue
            if launch is None and self._adopt(machine, result.pool):
                del odd[machine.id]
                continue
            if machine.id not in lists.noted:
                lists.noted.add(machine.id)
                what: Difference = "unknown_machine" if launch is None else "second_machine"
                self._state.note(
                    Event(self._state.now, machine.node, result.pool, what, machine.shape, machine.zone, machine.id)
                )
            self._launches.end_machine(result.pool, machine.id, machine.token)
        lists.odd = odd
        lists.noted &= odd.keys()

    def _unsure(self, machine: Machine) -> bool:
        """Whether it is not known what Slurm wants of its node: its job may run there."""
        view = self._state.fresh_view()
        return view is None or (machine.node in view.nodes and view.nodes[machine.node].want in ("due", "unknown"))

    def _adopt(self, machine: Machine, pool: str) -> bool:
        """Take over a machine of a node that has none, which Slurm wants or has: the journal was lost. One of a dynamic
        node that its pool has left may have jobs.
        """
        seen = None if self._state.view is None else self._state.view.nodes.get(machine.node)
        wanted = seen is not None and seen.want in ("up", "on")
        if not wanted or machine.token in self._state.memory.ended:
            return False
        home = self._state.pool_of.get(machine.node, pool if seen is not None and seen.made else "")
        if machine.node in self._state.by_node or pool_named(home) != pool_named(pool):
            return False
        price = _price(self._state.pools[pool], machine.shape)
        launch = Launch(
            machine.token, machine.node, pool, machine.shape, machine.zone, "asked", self._state.now, self._state.now,
            price=price or 0.0, unpriced=price is None,
        )  # fmt: skip
        self._state.memory.launches[machine.token] = self._state.by_node[machine.node] = launch
        words = f"its price is not known: the policy has no shape {machine.shape!r}" if price is None else ""
        self._state.event(launch, "taken over", words)
        self._launches.has_machine(launch, machine)
        return True

    def ask(self) -> None:
        """Ask for the lists that are due."""
        for name, pool in self._state.pools.items():
            searched = name in self._state.memory.searches
            mine = [one for one in self._state.memory.launches.values() if one.pool == name]
            lists = self._state.lists.get(name)
            open_ = lists is None or not lists.complete or lists.suspect or bool(lists.odd) or searched
            open_ = open_ or any(one.stage in ("asked", "terminating") for one in mine)
            pause = self._state.waits(name)
            if pause is not None and pause.kind in PAUSES:
                continue
            self._state.do(
                ("list", name), ListAct(name), again=min(_QUICK_LIST_S, pool.list_s) if open_ else pool.list_s
            )


def _price(pool: PoolPolicy, shape: str) -> float | None:
    """Of a machine by its shape; of one whose driver cannot say it, where all cost the same. None: not known."""
    prices = {one.price for one in pool.shapes if shape in ("", one.name)}
    return prices.pop() if len(prices) == 1 else None
