"""What replicad says of services to those who only look: no secret, no certificate, no key.

Its socket answers the request ``status`` to root and to Slurm's user with an object that has ``services`` by name and
``replicas`` by launch; `sluice serve` and the controllers' daemon read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sluice.base.errors import SluiceError
from sluice.exchange.serving import NOBODY, SOCKET, Callers, Demand, Heartbeat, Resume, ServiceRow, State
from sluice.exchange.snapshot import ask

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What gateways have of a service now, all together; seconds."""

    waiting: int = 0
    oldest_s: float = 0.0
    in_flight: int = 0
    tokens_in_flight: int = 0
    delay_s: float = 0.0
    wanted: int | None = None  # replicas that replicad wants
    why: str = ""  # why there is none
    eta_s: float | None = None  # until the first one is ready


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as it last said."""

    service: str
    launch: str
    job: int
    host: str
    state: State
    slots: int
    running: int
    waiting: int
    prompt_tokens: int
    completion_tokens: int
    cache_used: float | None
    resume: Resume
    heard: float
    ends: float | None
    why: str = ""
    slow: int | None = None
    """Gateways leave it out, as it takes at least so many times as long as most others."""


@dataclass(frozen=True, slots=True)
class Status:
    """All of it."""

    services: dict[str, ServiceStatus]
    replicas: dict[str, ReplicaStatus]
    callers: Callers = NOBODY


def service_status(row: ServiceRow, demands: Iterable[Demand], wanted: int | None = None) -> ServiceStatus:
    """Of a service, with what its gateways' workers last said."""
    mine = [one for one in demands if one.service == row.name]
    return ServiceStatus(
        waiting=sum(one.waiting for one in mine),
        oldest_s=max((one.oldest_s for one in mine), default=0.0),
        in_flight=sum(one.in_flight for one in mine),
        tokens_in_flight=sum(one.tokens_in_flight for one in mine),
        delay_s=max((one.delay_s for one in mine), default=0.0),
        wanted=wanted,
        why=row.why,
        eta_s=row.eta_s,
    )


def replica_status(beat: Heartbeat, heard: float, demands: Iterable[Demand] = ()) -> ReplicaStatus:
    """Of a replica, without what gateways alone may know; with what they last said of it."""
    load = beat.load
    return ReplicaStatus(
        service=beat.service,
        launch=beat.launch,
        job=beat.job,
        host=beat.host,
        state=beat.state,
        slots=beat.slots,
        running=load.running,
        waiting=load.waiting,
        prompt_tokens=load.prompt_tokens,
        completion_tokens=load.completion_tokens,
        cache_used=load.cache_used,
        resume=beat.abilities.resume,
        heard=heard,
        ends=beat.ends,
        why=beat.why,
        slow=max((one.slow[beat.launch] for one in demands if beat.launch in one.slow), default=None),
    )


_PARTS = [one.name for one in fields(Status)]


def render_status(
    services: Mapping[str, ServiceStatus], replicas: Mapping[str, ReplicaStatus], callers: Callers
) -> dict[str, Any]:
    """The words of an answer, for `sluice.exchange.snapshot.render_answer`."""
    return {
        "services": {name: asdict(one) for name, one in services.items()},
        "replicas": {launch: asdict(one) for launch, one in replicas.items()},
        "callers": asdict(callers),
    }


def parse_status(answer: Mapping[str, Any]) -> Status:
    """An answer's. Raises SluiceError for one that is none."""
    try:
        parts = {"services": None, "replicas": None, **answer}
        return TypeAdapter(Status).validate_python({name: parts[name] for name in _PARTS if name in parts})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SluiceError(
            f"replicad's status: {place}: {first['msg']}", remedy="install one version of Sluice and restart both"
        ) from error


def ask_status(path: Path = SOCKET, *, timeout: float = 5.0) -> Status:
    """Ask replicad on this host. Raises SluiceError."""
    try:
        return parse_status(ask(path, "status", timeout=timeout))
    except SluiceError as error:
        if str(path) in error.what:
            raise SluiceError(error.what, remedy="is sluice-replicad running on this host?") from error
        raise
