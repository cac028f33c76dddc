"""fleetd, put together: the keeper's loop, and the threads that bring it what it sees and do what it asks for.

Nothing here decides anything. A driver that hangs holds up its own pool's calls, and Slurm's commands nobody.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from policy import node
from policy.node import NodePolicyFile
from policy.pool_nodes import FILE_NAME, PoolPolicy, PoolsFile, PoolsPolicy
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.hostlist import expand
from sluice.base.service import notify
from sluice.base.text import one_line
from sluice.exchange.fleet import REQUESTS, STATE, STATUS, FleetStatus, render_status
from sluice.exchange.pool_costs import COSTS, render_costs
from sluice.fleet.driver import CREDENTIALS, Driver, DriverSite, Failure, ProviderError, load_driver
from sluice.fleet.journal import Journal
from sluice.fleet.keeper import Keeper
from sluice.fleet.slurm import change, read_view
from sluice.fleet.starts import RunTimes
from sluice.fleet.state import LOST_S, pool_named
from sluice.fleet.views import (
    Act,
    Changed,
    JobAct,
    LaunchAct,
    Launched,
    ListAct,
    Listed,
    NodeAct,
    Result,
    SlurmView,
    TerminateAct,
    Terminated,
    Unsent,
)
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.leader import leads

_STEP_S = 0.2
_BUSY_VIEW_S = 0.5
_POLICY_S = 2.0
_LEADS_S = 2.0
_CONFIG_S = 300.0  # what is read of it changes with a restart of slurmctld
_STATUS_S = 0.5
_COSTS_S = 60.0
_QUEUED_S = 10.0  # a call that waited longer for a thread is not made: a lost answer is known to be lost by then
_CALLS = 8  # of one pool at a time

log = logging.getLogger("sluice.fleet")


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are."""

    conf: Path  # slurm.conf
    state: Path = STATE
    requests: Path = REQUESTS
    credentials: Path = CREDENTIALS
    host: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])


def _place_of(error: Exception) -> str:
    """What kind of mistake and where; its words may have credentials."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {place.filename}, line {place.lineno}"


def _make(name: str, site: DriverSite) -> Driver | SluiceError:
    """A pool's driver, or why it cannot be made: a mistake of a driver is its pool's alone, here as well."""
    try:
        return load_driver(name, site)
    except SluiceError as error:
        return error
    except Exception as error:
        return SluiceError(f"pool {site.pool}: the driver cannot be made: {_place_of(error)}")


class Providers:
    """Drivers by pool, and the threads in which they are called."""

    def __init__(self, settings: Settings, done: Callable[[Result], None], now: Callable[[], float]) -> None:
        self._settings = settings
        self._done = done
        self._now = now
        self._made: dict[str, tuple[str, DriverSite, Driver | SluiceError, ThreadPoolExecutor]] = {}
        self._calls: dict[Future[None], float] = {}  # since when

    def set_pools(self, cluster: str, pools: dict[str, PoolPolicy]) -> None:
        """Make the drivers of new and changed pools; one that cannot be made says so at each call, and is tried again
        with each list.
        """
        for name, pool in pools.items():
            before = self._made.get(name)
            shapes = tuple(one.name for one in pool.shapes)
            named, settings = pool_named(name), self._settings
            site = DriverSite(cluster, named, pool.settings, settings.credentials, settings.state, shapes)
            if before is not None and before[:2] == (pool.driver, site):
                continue
            driver = _make(pool.driver, site)
            if isinstance(driver, SluiceError):
                log.error("%s", one_line(site.secrets.hide(str(driver))))
            threads = ThreadPoolExecutor(_CALLS, name) if before is None else before[3]
            self._made[name] = pool.driver, site, driver, threads

    def ask(self, act: LaunchAct | TerminateAct | ListAct) -> None:
        """Ask; returns at once."""
        now = time.monotonic()
        call = self._made[act.pool][3].submit(self._call, act, now)
        self._calls[call] = now
        call.add_done_callback(lambda done: self._calls.pop(done, None))

    def let_go(self) -> bool:
        """Make none of the calls that still wait for a thread; whether none is under way that may yet be answered."""
        for call in list(self._calls):
            call.cancel()
        return all(time.monotonic() - since > LOST_S for since in list(self._calls.values()))

    def _call(self, act: LaunchAct | TerminateAct | ListAct, queued: float) -> None:
        if time.monotonic() - queued > _QUEUED_S:
            self._done(Unsent(act))
            return
        self._done(self._answer(act, self._now()))

    def _answer(self, act: LaunchAct | TerminateAct | ListAct, began: float) -> Result:
        name, site, driver, threads = self._made[act.pool]
        if isinstance(driver, SluiceError) and isinstance(act, ListAct):  # somebody may have done what it says
            driver = _make(name, site)
            self._made[act.pool] = name, site, driver, threads
        failure: Failure = "unknown"
        try:
            if isinstance(driver, SluiceError):
                raise ProviderError("refused", str(driver))
            if isinstance(act, LaunchAct):
                return Launched(act.order.token, driver.launch(act.order))
            if isinstance(act, TerminateAct):
                driver.terminate(act.machine)
                return Terminated(act.pool, act.machine)
            return Listed(act.pool, began, tuple(driver.machines()))
        except ProviderError as error:
            failure, text = error.kind, site.secrets.hide(str(error))
        except Exception as error:  # a driver of a site's own: its mistakes are its pool's alone
            text = _place_of(error)
            log.error("pool %s: the driver failed: %s", act.pool, text)
        if isinstance(act, LaunchAct):
            return Launched(act.order.token, None, failure, text)
        if isinstance(act, TerminateAct):
            return Terminated(act.pool, act.machine, failure, text)
        return Listed(act.pool, began, None, failure, text)


class Fleetd:
    """The daemon."""

    def __init__(self, settings: Settings, client: SlurmClient, commands: Commands, stopping: threading.Event) -> None:
        self.settings = settings
        self.stopping = stopping
        self._client, self._commands = client, commands
        self._policy = PoolsFile(settings.conf.parent / FILE_NAME)
        self._node_policy = NodePolicyFile(settings.conf.parent / node.FILE_NAME)
        self._results: SimpleQueue[Result | SlurmView] = SimpleQueue()
        self._woken = threading.Event()
        self._look = threading.Event()
        self._look_s = PoolsPolicy().look_s
        self._busy = False
        self._began = time.monotonic()
        self._base = time.time()
        self._providers = Providers(settings, self._bring, self.now)
        self._slurm = ThreadPoolExecutor(1, "slurm")
        self._run_times = RunTimes()
        self._config: dict[str, str] = {}
        self._config_at = -1e9
        self._keeper: Keeper | None = None
        self._lock: IO[str]
        self._nodes: frozenset[str] | None = None  # of the pools; None: nobody looks at them
        self._problem = ""

    def now(self) -> float:
        """The fleet's clock: it does not jump while this process lives, and goes back for no other."""
        return self._base + time.monotonic() - self._began

    def serve(self) -> None:
        """Until it is to stop. Raises SluiceError, OSError where it cannot begin."""
        self.settings.requests.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.settings.state / "lock").open("a") as self._lock:
            threading.Thread(target=self._guard, args=(self._read_views,), name="view", daemon=True).start()
            notify("READY=1")
            self._loop()

    def _guard(self, run: Callable[[], None]) -> None:
        """A thread that ends before the daemon is to stop ends the daemon: systemd starts it again."""
        try:
            run()
        except Exception:
            log.exception("ended")
        if not self.stopping.is_set():
            os._exit(1)

    def _bring(self, result: Result | SlurmView) -> None:
        self._results.put(result)
        self._woken.set()

    # ---- the loop ----

    def _loop(self) -> None:
        policy_at = status_at = costs_at = led_at = -1e9
        while not self.stopping.is_set():
            self._woken.clear()
            try:
                if time.monotonic() > led_at + _LEADS_S:
                    led_at = time.monotonic()
                    self._lead(self._leads())
                if self._keeper is not None:
                    if time.monotonic() > policy_at + _POLICY_S or self._nodes is None:
                        policy_at = time.monotonic()
                        self._set_policy(self._keeper)
                    self._step(self._keeper)
                    if time.monotonic() > status_at + _STATUS_S:
                        status_at = time.monotonic()
                        self._publish(self._keeper.status())
                    if time.monotonic() > costs_at + _COSTS_S:
                        costs_at = time.monotonic()
                        costs = render_costs(self._keeper.costs())
                        write_atomic(self.settings.state / COSTS.name, costs, follow_links=False)
                self._say("")
            except (SluiceError, OSError) as error:
                self._say(one_line(str(error)))
            self._woken.wait(_STEP_S)

    def _say(self, problem: str) -> None:
        """A problem that lasts is logged once."""
        if problem != self._problem:
            log.warning("%s", problem or "works again")
            self._problem = problem

    def _leads(self) -> bool:
        if time.monotonic() > self._config_at + _CONFIG_S:
            self._config_at = time.monotonic()
            try:
                self._config = self._client.config()
            except SluiceError:
                if not self._config:
                    self._config_at = -1e9
                    raise
                log.info("slurm.conf as it was read before: slurmctld does not answer, as in a takeover")
        return leads(self._config, self.settings.host, lambda: any(one.up for one in self._client.ping()))

    def _lead(self, it_does: bool) -> None:
        """The controller that begins to lead reads the journal, which the other one may have written."""
        if not it_does:
            self._keeper = None
            self._nodes = None  # nothing is read for nobody
            self._forget_results()
            if self._providers.let_go():  # else the next one could launch what is just being launched
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        elif self._keeper is None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SluiceError(
                    f"{self._lock.name}: the other controller's fleetd still works on this journal",
                    remedy="it is waited for; if none runs, see who has the file open",
                ) from error
            keeper = Keeper(Journal(self.settings.state / "journal.json"), self.settings.host)
            self._base = max(self._base, keeper.memory.clock - (time.monotonic() - self._began))
            self._set_policy(keeper)
            self._look.set()  # at Slurm, at once
            self._keeper = keeper
            log.warning("%s leads: %d launches in the journal", self.settings.host, len(keeper.memory.launches))

    def _forget_results(self) -> None:
        with suppress(Empty):
            while True:
                self._results.get_nowait()

    def _set_policy(self, keeper: Keeper) -> None:
        policy = self._policy.current()
        if self._policy.problem is not None:
            log.warning("%s", one_line(str(self._policy.problem)))
        if keeper.pools() and not self._policy.loaded:  # all nodes would seem to have left it
            raise SluiceError(
                f"{self._policy.path}: cannot be read, and there are pools that may have machines",
                remedy="sluice apply writes it; until then nothing is launched or ended",
            )
        keeper.set_policy(policy, self._node_policy.current().checkpoint)
        self._providers.set_pools(keeper.cluster, keeper.pools())
        self._look_s = policy.look_s
        self._nodes = frozenset(node for pool in keeper.pools().values() for node in expand(pool.nodes))

    def _step(self, keeper: Keeper) -> None:
        with suppress(Empty):
            while True:
                result = self._results.get_nowait()
                if isinstance(result, SlurmView):
                    keeper.see(result)
                else:
                    keeper.take(result, self.now())
        for act in keeper.step(self.now()):
            self._do(act)
        busy = any(one.stage in ("asked", "launched", "terminating") for one in keeper.memory.launches.values())
        if busy and not self._busy:
            self._look.set()  # Slurm is looked at more often from now on
        self._busy = busy

    def _do(self, act: Act) -> None:
        if isinstance(act, NodeAct | JobAct):
            self._slurm.submit(self._change, act, time.monotonic())
        else:
            self._providers.ask(act)

    def _change(self, act: NodeAct | JobAct, queued: float) -> None:
        """A change that waited for long behind a slurmctld that hung was wanted of what Slurm said then, one of a
        controller that leads no more of what the next one may see otherwise: neither is made.
        """
        if time.monotonic() - queued > _QUEUED_S:
            self._bring(Changed(act, "not made: it waited for too long"))
            return
        try:
            if not leads(self._config, self.settings.host, lambda: True):  # alone, nobody else could
                self._bring(Changed(act, f"not made: {self.settings.host} leads no more"))
                return
            change(self._commands, act)
            self._bring(Changed(act))
        except (SluiceError, OSError) as error:
            self._bring(Changed(act, str(error)))
        self._look.set()

    def _publish(self, status: FleetStatus) -> None:
        write_atomic(self.settings.state / STATUS.name, render_status(status), follow_links=False)

    # ---- Slurm ----

    def _read_views(self) -> None:
        said = ""
        while not self.stopping.is_set():
            requests = self._requests()
            self._look.clear()
            problem = ""
            try:
                if (nodes := self._nodes) is not None:
                    self._bring(self._view(nodes))
                for request in requests:
                    request.unlink(missing_ok=True)
            except (SluiceError, OSError) as error:
                problem = one_line(str(error))
            if problem != said:
                said = problem
                log.warning("Slurm: %s", problem or "is seen again")
            until = time.monotonic() + (_BUSY_VIEW_S if self._busy and not problem else self._look_s)
            while not self.stopping.is_set() and not self._look.is_set() and time.monotonic() < until:
                if not problem and self._requests():
                    break
                self._look.wait(_STEP_S)

    def _view(self, nodes: Collection[str]) -> SlurmView:
        checkpoint = self._node_policy.current().checkpoint
        return read_view(self._client, nodes, self.now(), time.time(), checkpoint, self._run_times)

    def _requests(self) -> list[Path]:
        """What slurmctld's programs have left."""
        return [one for one in self.settings.requests.iterdir() if one.suffix == ".json"]
