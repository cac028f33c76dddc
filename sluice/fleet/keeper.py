"""What is to be done, from three views: what Slurm wants, what the journal says, what the provider has.

Nothing here waits, reads a clock or talks to anybody: `step` writes the journal and then returns what is to be asked
for; what came of it is brought back by `take`. A launch is in the journal before it is asked for, with the token by
which the provider knows it again; a node has one launch at a time, and the next one begins when the provider does not
have the machine of the last one any more. So whenever the process is killed, the next one asks the same again.

Its parts, by subject: `launches` a node, `lists` the provider, `pools` a pool, `shown` people; all work on one `state`.
"""

from __future__ import annotations

from collections.abc import Callable

from policy.checkpoint import NodeCheckpoint
from policy.pool_nodes import PoolPolicy, PoolsPolicy
from sluice.base.text import one_line
from sluice.exchange.fleet import FleetStatus
from sluice.exchange.pool_costs import PoolCosts
from sluice.fleet.journal import Memory
from sluice.fleet.launches import Launches
from sluice.fleet.lists import Provided
from sluice.fleet.pools import Pools
from sluice.fleet.shown import Shown
from sluice.fleet.state import State, Store, difference_of
from sluice.fleet.views import (
    Act,
    LaunchAct,
    Launched,
    Listed,
    Result,
    SlurmView,
    TerminateAct,
    Terminated,
    Unsent,
)


class Keeper:
    """One cluster's fleet. Not thread-safe."""

    def __init__(self, store: Store, host: str = "", *, new_token: Callable[[], str] | None = None) -> None:
        self._state = State(store)
        self._launches = Launches(self._state, new_token)
        self._lists = Provided(self._state, self._launches)
        self._pools = Pools(self._state)
        self._shown = Shown(self._state, host)
        self._started = False

    @property
    def memory(self) -> Memory:
        """All that outlives the process."""
        return self._state.memory

    def set_policy(self, policy: PoolsPolicy, checkpoint: NodeCheckpoint | None = None) -> None:
        """The pools in force, and how jobs are signalled that save their state."""
        self._state.set_policy(policy, checkpoint or NodeCheckpoint())

    def see(self, view: SlurmView) -> None:
        """What Slurm says; an older view than the last one is nothing."""
        self._state.see(view)

    def pools(self) -> dict[str, PoolPolicy]:
        """All that have machines or may have: those that the policy does not have any more until theirs are gone."""
        return self._state.pools

    @property
    def cluster(self) -> str:
        """By whose name machines are tagged."""
        return self._state.cluster

    def take(self, result: Result, now: float) -> None:
        """What came of an act; late and doubled ones are no harm."""
        self._state.now = max(self._state.now, now)
        if isinstance(result, Launched):
            self._state.busy.pop(("launch", result.token), None)
            self._launches.launched(result)
        elif isinstance(result, Terminated):
            self._state.busy.pop(("terminate", result.machine), None)
            if result.failure is not None and result.failure != "broken":
                self._state.pause(result.pool, difference_of(result.failure), one_line(result.text)[:300])
        elif isinstance(result, Listed):
            self._state.busy.pop(("list", result.pool), None)
            self._lists.take(result)
        elif isinstance(result, Unsent):
            act = result.act
            if isinstance(act, LaunchAct):
                self._state.busy.pop(("launch", act.order.token), None)
            elif isinstance(act, TerminateAct):
                self._state.busy.pop(("terminate", act.machine), None)
            else:
                self._state.busy.pop(("list", act.pool), None)
        else:
            self._state.changed(result)

    def step(self, now: float) -> list[Act]:
        """What is to be asked for now; the journal has it when this returns. Raises OSError, and then nothing is: what
        is still wanted when the journal can be written again is asked for then.
        """
        self._state.now = max(self._state.now, now)
        if not self._started:
            self._start()
        self._state.forget_acts()
        view = self._state.fresh_view()
        if view is not None:
            for node in dict.fromkeys([*self._state.pool_of, *self._state.by_node]):
                self._launches.node(node, view)
            self._state.signalled &= {
                job for one in self._state.by_node.values() if one.notice for job in self._state.jobs_on(one.node)
            }  # one that starts again may meet the next notice
            self._pools.create_and_delete(view)
            self._pools.give_back(view)
            self._pools.keep_least(view)
            self._pools.open_and_close(view)
            self._pools.follow_plan(view)
            self._pools.release(view)
        self._lists.ask()
        return self._state.flush()

    def _start(self) -> None:
        """What the last process asked for may still be under way, however long ago that seems to be."""
        self._started = True
        self._state.begin()
        for launch in self._state.memory.launches.values():
            if launch.stage != "registered":
                launch.sent = self._state.now

    def costs(self) -> dict[str, PoolCosts]:
        """Of all machines until now, by pool and day."""
        return self._shown.costs()

    def status(self) -> FleetStatus:
        """All of it."""
        return self._shown.status()
