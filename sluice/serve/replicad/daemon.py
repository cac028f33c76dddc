"""The daemon, put together: the keeper's loop, and the threads that bring it what it sees.

Nothing here decides anything. Each thread may hang without another one waiting for it: reading Slurm, root's helper,
the other controller's daemon, gateways on the local socket, replicas on the network.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from policy.service_jobs import FILE_NAME, ServicesFile, ServicesPolicy, has_budgets, limit_rows
from sluice.base.clock import uptime
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.line_server import Kind
from sluice.base.local_server import serve_local
from sluice.base.rates import FewLines, Rate
from sluice.base.service import notify
from sluice.base.text import one_line
from sluice.exchange.acts import SOCKET as ACT_SOCKET
from sluice.exchange.acts import ActError
from sluice.exchange.courier import Controllers, controllers
from sluice.exchange.launches import LaunchRequest, ask_actd
from sluice.exchange.requests import Spent, period_start
from sluice.exchange.serving import (
    GATEWAY_USER,
    MOST_MESSAGE,
    SOCKET,
    Callers,
    Demand,
    LeaseAnswer,
    LeaseReport,
    M,
    Message,
    PeerNote,
    parse,
    render,
    replicad_port,
    row,
)
from sluice.exchange.snapshot import MOST_REQUEST, VERSION, Snapshot, render_answer
from sluice.exchange.snapshot import SOCKET as SNAPSHOT_SOCKET
from sluice.serve.replicad.journal import Journal
from sluice.serve.replicad.keeper import WARM_S, Keeper, Result
from sluice.serve.replicad.leases import FRESH_S, Authority
from sluice.serve.replicad.pattern import Patterns
from sluice.serve.replicad.registry import Registry, addresses
from sluice.serve.replicad.slurm_view import read_view
from sluice.slurm.munge import Message as Credential
from sluice.slurm.munge import decode, encode
from sluice.slurm.munge_service import Service, listen

STATE = Path("/var/lib/sluice/replicad")
_STEP_S = 0.25
_LEAST_STEP_S = 0.02
_VIEW_S, _QUIET_VIEW_S = 1.0, 3.0
_NOTE_S = 0.5
_POLICY_S = 1.0
_SPENT_S = 5.0
_SAVE_S = 30.0
_ACTS = 8  # of root's helper at a time
_MOST_DEMANDS = 1000  # in one request
_CREDENTIAL = 2 * MOST_MESSAGE
_RATES = Rate(4096, 2000), Rate(1024, 400)  # heartbeats of all, and from an address
_RATES_OF_UIDS = Rate(8192, 2000), Rate(4096, 1000)
_RATES_OF_REPLICAS = Rate(8192, 4000), Rate(64, 20)  # heartbeats with a ticket: of all, and of one
_GATEWAYS = Kind("gateways", 512, 4, MOST_REQUEST, 16 << 20, 10.0)
_LOOKERS = Kind("lookers", 32, 2, MOST_REQUEST, 1 << 20, 10.0, rates=(Rate(100, 20),))

log = logging.getLogger("sluice.replicad")
log.addFilter(FewLines())


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are."""

    conf: Path  # slurm.conf
    state: Path = STATE
    socket: Path = SOCKET
    snapshot: Path = SNAPSHOT_SOCKET
    actd: Path = ACT_SOCKET
    gateway_user: str = GATEWAY_USER
    addresses: tuple[str, ...] = ()  # to listen on
    port: int = 0
    host: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])


class Asking:
    """Root's helper, asked by a few threads."""

    def __init__(self, path: Path, done: Callable[[Result], None]) -> None:
        self._path, self._done = path, done
        self._pool = ThreadPoolExecutor(_ACTS, thread_name_prefix="acts")

    def ask(self, request: LaunchRequest) -> None:
        """Ask; returns at once."""
        self._pool.submit(self._ask, request)

    def _ask(self, request: LaunchRequest) -> None:
        try:
            self._done(Result(request.do, request.service, request.launch, ask_actd(self._path, request)))
        except ActError as error:
            self._done(Result(request.do, request.service, request.launch, None, error))


@dataclass(slots=True)
class _Peer:
    """The daemon at an address of a controller, which may be this one itself; `host`: as it says, once it has."""

    place: tuple[str, int]
    host: str = ""
    said: str = ""
    telling: threading.Thread | None = None


class Replicad:
    """The daemon."""

    def __init__(self, settings: Settings, stopping: threading.Event) -> None:
        self.settings = settings
        self.stopping = stopping
        self._controllers: Controllers = controllers(settings.conf)
        self._services = ServicesFile(settings.conf.parent / FILE_NAME)
        self._spent: Spent | None = None
        self._told: dict[str, int] = {}
        self._told_at = -1e9
        self._woken = threading.Event()
        self._urgent = threading.Event()
        self._problem = ""
        self.snapshot = Snapshot()
        self.authority = Authority(settings.state / "leases.json")
        self._view_at = 0.0  # of the latest view of Slurm, as its controller says
        self._viewed = -FRESH_S  # when it came, by the boot's clock
        self._leader: tuple[str, int] | None = None  # where the other controller's daemon says that it leads
        self.patterns = Patterns(settings.state / "patterns.json")
        self.patterns.load()
        self.keeper = Keeper(
            settings.host,
            Journal(settings.state / "launches.json"),
            self.patterns,
            Asking(settings.actd, lambda result: self.keeper.result(result)),
            self.snapshot,
            now=time.time(),
            wake=self._wake,
        )
        self.registry = Registry(
            os.geteuid(),
            self.keeper.uids,
            self.keeper.expected,
            lambda beat: self.keeper.hear(beat, time.time()),
            lambda note: self.keeper.take_note(note, time.time()),
            lambda report: render(self.authority.answer(report, uptime())),
        )

    def serve(self) -> None:
        """Until it is to stop. Raises SluiceError, OSError where it cannot begin."""
        sockets = listen(self.settings.addresses, self.settings.port or replicad_port())
        self._set_policy()
        heartbeats = Service(
            "replicas", self._answer_message, most=_CREDENTIAL, seconds=5.0, log=log, rates=_RATES,
            rates_of_uids=_RATES_OF_UIDS, refused=lambda: self.registry.count("refused"),
            known=self.registry.owner, rates_of_known=_RATES_OF_REPLICAS,
        )  # fmt: skip
        for name, run in (
            ("heartbeats", lambda: heartbeats.serve(sockets, lambda: not self.stopping.is_set())),
            ("view", self._read_views),
            ("peers", self._tell_peers),
            ("gateways", self._serve_gateways),
        ):
            threading.Thread(target=self._guard, args=(name, run), name=name, daemon=True).start()
        notify("READY=1")
        self._loop()

    def _guard(self, name: str, run: Callable[[], None]) -> None:
        """A thread that ends before the daemon is to stop ends the daemon: systemd starts it again."""
        try:
            run()
        except Exception:
            log.exception("%s: ended", name)
        if not self.stopping.is_set():
            os._exit(1)

    def _wake(self) -> None:
        self._woken.set()
        self._urgent.set()

    # ---- the loop ----

    def _loop(self) -> None:
        policy_at = saved_at = time.monotonic()
        while not self.stopping.is_set():
            self._woken.clear()
            try:
                if time.monotonic() > policy_at + _POLICY_S:
                    policy_at = time.monotonic()
                    self._set_policy()
                self.keeper.step(time.time())
                self.authority.lead(self._leads_until(), uptime(), alone=self._is_alone())
                if time.monotonic() > saved_at + _SAVE_S:
                    saved_at = time.monotonic()
                    self._save()
                self._say("")
            except (SluiceError, OSError) as error:
                self._say(one_line(str(error)))
            self._woken.wait(_STEP_S)
            self.stopping.wait(_LEAST_STEP_S)
        with suppress(OSError):
            self.authority.end(uptime())
            self._save()

    def _say(self, problem: str) -> None:
        """A problem that lasts is logged once."""
        if problem != self._problem:
            log.warning("%s", problem or "works again")
            self._problem = problem

    def _save(self) -> None:
        self.patterns.save(self._services.current().services)
        document = {
            "schema_version": 1,
            "host": self.settings.host,
            "leads": self.keeper.leads,
            "written": time.time(),
            "heartbeats": self.registry.counts(),
            "problem": self._problem,
        }
        text = json.dumps(document) + "\n"
        write_atomic(self.settings.state / "status.json", text, mode=0o640, follow_links=False)

    def _set_policy(self) -> None:
        policy = self._services.current()
        if self._services.problem is not None:
            log.warning("%s", one_line(str(self._services.problem)))
        self.keeper.set_policy(policy, self._spent_now(policy))
        limits = {(one.kind, one.name): one.limit for one in limit_rows(policy)}
        self.authority.set_policy(limits, policy.without_authority)

    def _spent_now(self, policy: ServicesPolicy) -> dict[str, int]:
        """Tokens of tenants in this usage period, for those that have a budget; the last known where it fails."""
        if not has_budgets(policy) or time.monotonic() < self._told_at + _SPENT_S:
            return self._told
        self._told_at = time.monotonic()
        folder = Path(policy.requests)
        if self._spent is None or self._spent.folder != folder:
            self._spent = Spent(folder)
        try:
            self._told = dict(self._spent.by_tenant(period_start(policy.usage_period, time.time())))
        except (SluiceError, OSError) as error:
            log.warning("records of requests: %s", one_line(str(error)))
        return self._told

    # ---- Slurm ----

    def _read_views(self) -> None:
        said = ""
        while not self.stopping.is_set():
            try:
                view = read_view(self.settings.snapshot, self.keeper.users())
                self.keeper.see(view)
                if view.at != self._view_at:
                    self._view_at, self._viewed = view.at, uptime()
                problem = ""
            except SluiceError as error:
                problem = one_line(str(error))
            if problem != said:
                said = problem
                log.warning("Slurm: %s", problem or "is seen again")
            until = time.monotonic() + (_VIEW_S if problem or self.keeper.hurry else _QUIET_VIEW_S)
            self.stopping.wait(_STEP_S)
            while not self.stopping.is_set() and time.monotonic() < until and not self.keeper.unplaced(time.time()):
                self.stopping.wait(_STEP_S)

    # ---- the network ----

    def _answer_message(self, message: Credential) -> bytes:
        return self.registry.answer(message)

    def _tell_peers(self) -> None:
        """Tell the other controllers' daemons each half second, and at once what is urgent. One that does not answer
        holds up no other."""
        peers: dict[tuple[str, int], _Peer] = {}
        while not self.stopping.is_set():
            self._urgent.clear()
            for place in self._peers():
                peer = peers.setdefault(place, _Peer(place))
                if peer.host != self.settings.host and not (peer.telling and peer.telling.is_alive()):
                    peer.telling = threading.Thread(target=self._tell_peer, args=(peer,), daemon=True)
                    peer.telling.start()
            self._urgent.wait(_NOTE_S)
            self.stopping.wait(_LEAST_STEP_S)

    def _tell_peer(self, peer: _Peer) -> None:
        try:
            note = tell(peer.place, self.keeper.note(time.time(), peer.host), PeerNote, self._own_uid)
            peer.host = note.host
            problem = ""
            if note.host != self.settings.host:
                self.keeper.take_note(note, time.time())
                if note.leads or self._leader == peer.place:
                    self._leader = peer.place if note.leads else None
        except (SluiceError, OSError) as error:
            problem = one_line(str(error))
        if problem != peer.said:
            peer.said = problem
            log.info("%s:%d: %s", *peer.place, problem or "answers")

    @property
    def _own_uid(self) -> int:
        return os.geteuid()

    def _peers(self) -> list[tuple[str, int]]:
        named = self._services.current().registries
        try:
            return addresses(named) if named else [(host, self._port) for host in self._controllers.hosts]
        except SluiceError as error:
            log.warning("%s", one_line(str(error)))
            return []

    @property
    def _port(self) -> int:
        return self.settings.port or replicad_port()

    # ---- limits that gateways share ----

    def _leads_until(self) -> float:
        """Until when this one says who has which part of limits: its controller leads, and was seen to do so."""
        return self._viewed + FRESH_S if self.keeper.leads else 0.0

    def _is_alone(self) -> bool:
        return len(self._services.current().registries or self._controllers.hosts) < 2

    def _lease(self, report: LeaseReport) -> LeaseAnswer:
        """The authority's answer to a gateway of this host. Raises SluiceError."""
        if self._leader is None or uptime() < self._leads_until():
            return self.authority.answer(report, uptime())
        try:
            return tell(self._leader, report, LeaseAnswer, self._own_uid, 0.5)
        except OSError as error:
            raise SluiceError(f"{self._leader[0]}: {error.strerror or error}", remedy="does it run there?") from error

    # ---- the local socket ----

    def _serve_gateways(self) -> None:
        """From when replicas were heard: a gateway that asks sooner would lose what it has."""
        until = time.monotonic() + WARM_S
        while not self.keeper.heard_all and time.monotonic() < until and not self.stopping.is_set():
            time.sleep(_LEAST_STEP_S)
        kinds = {0: _GATEWAYS}
        lookers: set[int] = {self._controllers.user} if self._controllers.user is not None else set()
        try:
            kinds[pwd.getpwnam(self.settings.gateway_user).pw_uid] = _GATEWAYS
        except KeyError:
            log.info("no user %s: only root may connect as a gateway", self.settings.gateway_user)
        serve_local(
            self.settings.socket,
            lambda line, uid: self.answer(line, whole=uid in kinds),
            (_GATEWAYS, _LOOKERS),
            lambda uid: kinds.get(uid, _LOOKERS if uid in lookers else None),
            self.stopping,
            remedy="sluice-replicad.service makes it (RuntimeDirectory)",
        )

    def answer(self, line: bytes, *, whole: bool) -> bytes:
        """The answer to a request's line. `whole`: of a gateway or root; else it may ask for the status alone."""
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("version") != VERSION:
                raise SluiceError(f"not a request of version {VERSION}", remedy="install one version of Sluice")
            do = request.get("do")
            if do == "status":
                return render_answer(self.keeper.status())
            if not whole:
                raise SluiceError("request: not status", remedy="only gateways and root may ask for more")
            if "demand" in request:
                self.keeper.demand(_demands(request["demand"]), time.time())
            if do == "lease":
                return render_answer({"lease": asdict(self._lease(row(LeaseReport, request.get("report"))))})
            if do == "changes":
                if self.keeper.revoked.take((str(key), float(until)) for key, until in request.get("revoked", ())):
                    self._urgent.set()
                last = request.get("last")
                return self.snapshot.after(str(request.get("epoch")), last if type(last) is int else 0)
            if do == "callers":
                self.keeper.count(str(request.get("gateway")), row(Callers, request.get("callers")), time.time())
                return render_answer({"ok": True})
            if do in ("demand", None) and "demand" in request:
                return render_answer({"ok": True})
            raise SluiceError("request: not one that is known", remedy="install one version of Sluice")
        except SluiceError as error:
            return render_answer({"error": error.what, "remedy": error.remedy, "usage": error.usage})
        except (ValueError, RecursionError) as error:
            return render_answer({"error": one_line(str(error)), "remedy": ""})


def _demands(given: Any) -> Iterable[Demand]:
    """One or several. Raises SluiceError."""
    many = given if isinstance(given, list) else [given]
    if len(many) > _MOST_DEMANDS:
        raise SluiceError(f"{len(many)} demands at once", remedy=f"send at most {_MOST_DEMANDS}")
    return [parse(Demand, json.dumps(one).encode()) for one in many]


def tell(place: tuple[str, int], message: Message, answer: type[M], uid: int, seconds: float = 5.0) -> M:
    """Tell the daemon at an address, and what it answers. Raises SluiceError, OSError."""
    with socket.create_connection(place, min(seconds, 2.0)) as connection:
        connection.sendall(encode(render(message), readable_by=uid).encode() + b"\n")
        connection.settimeout(seconds)
        with connection.makefile("rb") as answers:
            line = answers.readline(_CREDENTIAL)
    if not line:
        raise SluiceError("closed the connection", remedy="check that users and MUNGE keys agree on both controllers")
    said = decode(line.decode("ascii", "replace").strip())
    if said.uid != uid:
        raise SluiceError(f"the answer is from uid {said.uid}, not from this daemon's user")
    return parse(answer, said.payload)
