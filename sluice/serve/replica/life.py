"""A replica's life: starting, ready, draining, gone, or failed. Everything here is in the main thread's loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from sluice.base.errors import SluiceError
from sluice.base.log import log
from sluice.base.text import one_line
from sluice.exchange.serving import Heartbeat, Load, Orders, Peer, ReplicaSpec, State, peer_key
from sluice.serve.engines.base import Engine, Place, samples
from sluice.serve.replica.asking import get
from sluice.serve.replica.engine_process import EngineProcess
from sluice.serve.replica.heartbeats import Heartbeats, addresses
from sluice.serve.replica.relay import Relay
from sluice.serve.replica.share import Share
from sluice.serve.replica.stage import Staged, pieces_of

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.25  # while it starts
_FIGURES_S = 1.0
_ASK_S = 5.0
_DEAF = 12  # looks without an answer, one after the other, until it has failed
_HEALTH_S = 5.0
_DRAIN_LOOK_S = 0.1
_QUIET = 3  # looks without anything running until a drain is over
_NO_ANSWER_S = 3.0
_WHY = 900
_NOTICE = "Slurm ends the job: preempted, its time is over, or cancelled"


@dataclass(slots=True)
class Start:
    """What was done before the loop."""

    spec: ReplicaSpec
    engine: Engine
    place: Place
    secret: str
    began: float  # of time.monotonic()
    process: EngineProcess | None  # None: the model is to be staged first
    staged: Staged | None  # of the process


class Life:
    """One replica, until `run` returns its exit status."""

    def __init__(
        self,
        start: Start,
        stage: Callable[[Event, Share | None], Staged],
        launch: Callable[[Staged, Peer | None], EngineProcess],
    ) -> None:
        self._spec, self._engine, self._place = start.spec, start.engine, start.place
        self._secret, self._began = start.secret, start.began
        self._process, self._staged = start.process, start.staged
        self._stage, self._launch = stage, launch
        self._leave = Event()  # staging is of no use any more
        self._state, self._why = State.STARTING, ""
        self._load = Load()
        self._known = False  # whether the load was ever said
        self._port = 0
        self._fingerprint = ""
        self._ends = _end_of_job()
        self._job = int(os.environ.get("SLURM_JOB_ID", "0") or 0)
        self._host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._abilities = start.engine.abilities(start.spec)
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        self._answers = 0  # of replicads
        self._relay: Relay | None = None
        self._heartbeats: Heartbeats | None = None
        self._share: Share | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self, tls: Callable[[], tuple[ssl.SSLContext, str]]) -> int:
        """Its whole life."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled)
        try:
            context, self._fingerprint = tls()
            where = self._process.address if self._process else self._engine.start(self._spec, self._place).address
            self._relay = Relay(context, self._secret, where)
            self._port = self._relay.listen()
            if self._spec.stage is not None and self._spec.broadcast:
                rate = self._spec.broadcast << 20
                self._share = Share(context, self._secret, rate, self._beat_now, self._spec.data_path)
            self._heartbeats = Heartbeats(
                addresses(self._spec.registries), self._spec.registry_uid, self._beat, self._obey_soon
            )
            self._heartbeats.start()
            await self._live(self._relay)
            self._change(State.GONE, self._why)
            return 0
        except _EndedError as error:
            self._change(State.FAILED, str(error))
            return 1
        except (SluiceError, OSError) as error:
            self._change(State.FAILED, str(error))
            return 1
        finally:
            await self._end()

    # ---- its states ----

    async def _live(self, relay: Relay) -> None:
        if not await self._start():
            return
        relay.open = True
        self._change(State.READY, "")
        log("ready", service=self._spec.service, after=f"{time.monotonic() - self._began:.3f}s", port=self._port)
        if not await self._serve():
            return
        self._change(State.DRAINING, self._why or "ordered")
        await self._finish(relay)

    async def _start(self) -> bool:
        """Until the engine answers; False: it is not wanted any more."""
        until = self._began + self._spec.ready_s
        if self._process is None:
            staging = self._loop.run_in_executor(None, self._stage, self._leave, self._share)
            while not staging.done():
                if self._unwanted():
                    return False
                await asyncio.wait([staging], timeout=0.1)
                self._check_time(until, "the model is staged")
            self._staged = staged = staging.result()
            log("staged", model=staged.path, copied=staged.copied, taken=staged.taken, ucx=staged.by_ucx)
        if self._share is not None and self._staged is not None:
            await self._loop.run_in_executor(None, self._give, self._share, self._staged)
        if self._process is None:
            assert self._staged is not None  # noqa: S101 - it was staged
            self._process = self._launch(self._staged, self._peer())
        wait = _FIRST_LOOK_S
        while True:
            self._check_engine(self._process)
            if self._unwanted():
                return False
            answer = await get(self._process.address, self._spec.health, self._place.key, _ASK_S)
            if answer is not None and answer[0] == 200:
                self._process.was_ready = True
                return True
            self._check_time(until, f"the engine answers {self._spec.health}")
            await asyncio.sleep(wait)
            wait = min(wait * 1.2, _LAST_LOOK_S)

    async def _serve(self) -> bool:
        """Until it is to drain; False: until it is to stop."""
        healthy = self._loop.create_task(self._watch_health())
        figures = self._loop.create_task(self._watch_figures())
        waits = [self._loop.create_task(event.wait()) for event in (self._drain, self._stop)]
        try:
            while not self._drain.is_set() and not self._stop.is_set():
                await asyncio.wait([*waits, healthy], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                self._check_engine(self._process)
                if healthy.done():
                    healthy.result()
            return not self._stop.is_set()
        finally:
            for task in (healthy, figures, *waits):
                task.cancel()

    async def _finish(self, relay: Relay) -> None:
        """Until nothing is asked of it any more, at most `drain_s`."""
        until = self._loop.time() + self._spec.drain_s
        quiet, moved = 0, -1
        while self._loop.time() < until and not self._stop.is_set():
            self._check_engine(self._process)
            await self._ask_figures()
            idle = self._known and not self._load.running and not self._load.waiting
            quiet = quiet + 1 if not relay.connections or (idle and relay.moved == moved) else 0
            moved = relay.moved
            if quiet >= _QUIET:
                return
            await asyncio.sleep(_DRAIN_LOOK_S)
        log("drain-ended", connections=relay.connections, running=self._load.running)

    async def _end(self) -> None:
        self._leave.set()
        if self._share is not None:
            self._share.end()
        if self._relay is not None:
            self._relay.open = False
        if self._process is not None:
            await self._loop.run_in_executor(None, self._process.end, self._engine.end_s)
        if self._relay is not None:
            self._relay.close()
        if self._heartbeats is not None:
            await self._loop.run_in_executor(None, self._heartbeats.end)

    @staticmethod
    def _give(share: Share, staged: Staged) -> None:
        """To other replicas, from now on, what it has staged."""
        pieces = pieces_of(staged)
        if pieces is not None:
            share.offer(pieces)

    def _peer(self) -> Peer | None:
        """This one, for those that take its staged model; None: it gives none."""
        weights = self._share.weights if self._share is not None else None
        return None if weights is None else Peer(self._host, weights.port, self._fingerprint, peer_key(self._secret))

    # ---- what it looks at ----

    def _check_engine(self, process: EngineProcess | None) -> None:
        if process is not None and (why := process.ended()) is not None:
            raise _EndedError(why)

    def _check_time(self, until: float, what: str) -> None:
        if time.monotonic() > until:
            raise _EndedError(f"not ready within {self._spec.ready_s:g} s: before {what}; see the engine's output")

    def _unwanted(self) -> bool:
        return self._stop.is_set() or self._drain.is_set()

    async def _watch_health(self) -> None:
        deaf = 0
        while deaf < _DEAF:
            await asyncio.sleep(_HEALTH_S)
            answer = await get(self._where(), self._spec.health, self._place.key, _ASK_S)
            deaf = 0 if answer is not None and answer[0] == 200 else deaf + 1
        raise _EndedError(f"the engine did not answer {self._spec.health} {_DEAF} times")

    async def _watch_figures(self) -> None:
        while True:
            await self._ask_figures()
            await asyncio.sleep(_FIGURES_S)

    async def _ask_figures(self) -> None:
        if self._engine.figures is None:
            return
        answer = await get(self._where(), self._engine.figures, self._place.key, _ASK_S)
        if answer is not None and answer[0] == 200:
            with suppress(ValueError):
                self._load = self._engine.load(samples(answer[1].decode(errors="replace")))
                self._known = True

    def _where(self) -> Path | int:
        assert self._process is not None  # noqa: S101 - it was started
        return self._process.address

    # ---- what it says, and its orders ----

    def _beat(self) -> Heartbeat:
        """By a thread of heartbeats; each part is one word that the loop sets."""
        return Heartbeat(
            self._spec.service, self._spec.launch, self._job, self._host, self._port, self._fingerprint, self._secret,
            self._state, self._abilities, self._spec.slots, self._load, self._ends, self._why,
            self._share.weights if self._share is not None else None,
        )  # fmt: skip

    def _change(self, state: State, why: str) -> None:
        self._state, self._why = state, one_line(why, limit=_WHY)
        log("state", service=self._spec.service, launch=self._spec.launch, state=state, why=self._why or "-")
        self._beat_now()

    def _beat_now(self) -> None:
        """From any thread."""
        if self._heartbeats is not None:
            self._heartbeats.now()

    def _signalled(self) -> None:
        """SIGTERM. The first one is a notice: what is ready works on until replicad has a successor and says so, or
        until Slurm says it again; it drains at once where no replicad answers."""
        noticed, self._why = bool(self._why), _NOTICE
        if self._state is not State.READY or noticed:
            self._drain.set()
            return
        self._change(State.READY, self._why)
        heard = self._answers
        self._loop.call_later(_NO_ANSWER_S, lambda: self._drain.set() if self._answers == heard else None)

    def _obey_soon(self, orders: Orders) -> None:
        self._answers += 1
        if self._share is not None:
            self._share.tell(orders)
        if orders.do != "go on":
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._obey, orders)

    def _obey(self, orders: Orders) -> None:
        (self._drain if orders.do == "drain" else self._stop).set()


class _EndedError(Exception):
    """It has failed, for this reason."""


def _end_of_job() -> float | None:
    with suppress(ValueError):
        return float(os.environ["SLURM_JOB_END_TIME"]) if "SLURM_JOB_END_TIME" in os.environ else None
    return None
