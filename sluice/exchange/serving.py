"""What a service's replicas, the daemon that keeps them (`sluice replicad`) and the gateways tell each other.

A replica sends a Heartbeat, and gets Orders, as credentials of munge that only the other side's user can read. Gateways
read rows of the sections below over a local socket (`sluice.exchange.snapshot`) and say with Demand what they need.
Times are seconds since 1970 unless a name says otherwise.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from sluice.base.errors import SluiceError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

VERSION = 1
SOCKET = Path("/run/sluice-serve/socket")
"""Of replicad, for the gateways of its host."""
PORT = 6824
"""Of replicad, for replicas and for the replicad of the other controller."""
PORT_VARIABLE = "SLUICE_REPLICAD_PORT"
"""Of the environment: another port."""
REPLICAD_USER = "sluice-serve"
GATEWAY_USER = "sluice-gateway"
JOB_PREFIX = "sluice-serve."
"""Begin of the names of replicas' jobs: sluice-serve.SERVICE.LAUNCH."""
SCOPE = "serve"
"""Of a token, for requests to gateways."""
MOST_MESSAGE = 64 << 10
"""Bytes of a heartbeat, of orders and of a demand."""
HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
"""Without a heartbeat: the replica is chosen last."""
LOST_S = 10.0
"""Without a heartbeat: the replica is not chosen, and another is launched."""

SERVICES = "services"
REPLICAS = "replicas"
LIMITS = "limits"
ACCOUNTS = "accounts"
REVOKED = "revoked"
"""Sections that replicad publishes: services by name, replicas by launch, limits by KIND/NAME, users by name, and when
keys that were revoked would have been over, by their digests."""

LEASE_S = 3.0
"""For so long a gateway has its parts of limits after it has asked; the authority waits a little longer."""
MOST_LEASE_ROWS = 200
"""In one report."""
MOST_CLAIMS = 200
"""In one report, and as many that have ended."""
MOST_REVOKED = 100
"""Keys in one message."""
MOST_CALLERS = 200
"""Keys, users and tenants in one message."""
SubjectKind = Literal["key", "user", "tenant", "service"]
WithoutAuthority = Literal["share", "refuse"]
"""What a gateway does with limits while no authority answers: it goes on with its share of each, or it refuses."""
DataPath = Literal["auto", "tcp", "ucx"]
"""How replicas give each other staged models, see `serving.data_path` of the policy."""

EngineName = Literal["vllm", "sglang", "llama.cpp", "tei", "openai", "python"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
Priority = Literal["low", "normal", "high"]
Resume = Literal["tokens", "text", "none"]
"""How an interrupted stream goes on: by token ids, by the text so far, or not at all."""


class State(StrEnum):
    """Of a replica."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Limit:
    """What one key, user, tenant or service may use at most; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    queued: int | None = None


NO_LIMIT = Limit()


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do, by its adapter."""

    chat: bool = False
    completions: bool = False
    embeddings: bool = False
    responses: bool = False
    resume: Resume = "none"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica gets from its job's script, all of it from the policy. Nothing in it is secret."""

    service: str
    launch: str
    engine: EngineName
    model: str  # path where the site keeps it
    sha256: str | None
    stage: str | None  # folder on the node's disk; None: the model is used where it is
    options: tuple[str, ...]  # of the engine
    command: tuple[str, ...]  # of engine "openai" and "python"; {socket}, {port}, {model}, {service} are filled in
    slots: int  # requests at once
    registries: tuple[str, ...]  # HOST:PORT of each replicad
    registry_uid: int  # who may read heartbeats
    ready_s: float  # from the job's start; longer is failed
    drain_s: float  # at most, for the requests that it has
    health: str  # path, asked of the engine
    broadcast: int  # MiB a second of a staged model that are given to other replicas; 0: none are given or taken
    nodes: int  # of the job; sluice-replica runs on the first one
    data_path: DataPath = "auto"  # by which replicas give each other staged models


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica's engine says of itself; None: it does not say."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0  # since the start
    completion_tokens: int = 0
    cache_used: float | None = None  # share of the KV cache


@dataclass(frozen=True, slots=True)
class Weights:
    """A model that a replica has staged, or stages, as it gives it to others."""

    entry: str  # name of the copy: equal ones are of the same files
    port: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """Another replica of the same service that gives the model."""

    host: str
    port: int
    fingerprint: str
    key: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a replica says each second, and at once when its state changes."""

    service: str
    launch: str
    job: int
    host: str
    port: int
    fingerprint: str  # SHA-256 of its certificate (DER), hexadecimal
    secret: str  # 64 hexadecimal digits
    state: State
    abilities: Abilities
    slots: int
    load: Load
    ends: float | None  # when its job's time is over
    why: str = ""  # of failed and draining; of ready: why it must be replaced
    weights: Weights | None = None
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Orders:
    """What replicad answers."""

    do: Literal["go on", "drain", "stop"] = "go on"
    peers: tuple[Peer, ...] = ()  # to take the model from while it is staged
    reads: bool = True  # it is the one that reads the model from the site's storage
    ticket: str = ""  # for a place in the queue of its own, before the credential of the next heartbeat
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """A service, as gateways need it."""

    name: str
    tenant: str
    callers: tuple[str, ...]  # tenants; "*": all
    engine: EngineName
    priority: Priority
    deadline_s: float  # to the first token, where the request names none
    default_tokens: int  # reserved for a request without max_tokens
    least: int
    most: int
    slots: int  # requests of a replica at once
    paused: bool = False
    why: str = ""  # why there is no replica, in words, where it is known
    eta_s: float | None = None  # until the first replica is ready, where it is known
    log_prompts: bool = False
    answer_s: float = 3600.0  # until a replica has answered, where the answer is not streamed


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica, as gateways need it."""

    service: str
    launch: str
    job: int
    host: str
    port: int
    fingerprint: str
    secret: str
    state: State
    abilities: Abilities
    slots: int
    heard: float
    suspect: bool
    ends: float | None = None


@dataclass(frozen=True, slots=True)
class LimitRow:
    """A limit; `kind` and `name` are its key. Name "*": each one that has none of its own."""

    kind: SubjectKind
    name: str
    limit: Limit
    weight: int = 1  # of a tenant, in the fair queue
    tokens_left: int | None = None  # of a tenant's budget for this usage period; None: it has none


@dataclass(frozen=True, slots=True)
class AccountRow:
    """The tenants of a user, the default one first."""

    user: str
    tenants: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a gateway's worker has of a service, each half second and at once when none can be served."""

    service: str
    worker: str  # HOST:PID
    waiting: int
    oldest_s: float
    in_flight: int
    tokens_in_flight: int
    delay_s: float  # time in the queue of those that were begun lately, 95th percentile
    slow: dict[str, int] = field(default_factory=dict)  # replicas that are left out: how many times slower than others
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Callers:
    """How many requests keys, users and tenants have at gateways now, those that wait included, as their limits count
    them."""

    open: dict[str, int]
    """By KIND/NAME, as limits are; of more than MOST_CALLERS the busiest."""
    whole: bool = True
    """Nobody is left out."""


NOBODY = Callers({})


def callers_of(counts: Iterable[Callers]) -> Callers:
    """Those of several, all together."""
    found: Counter[str] = Counter()
    whole = True
    for one in counts:
        found.update(one.open)
        whole = whole and one.whole
    return Callers(dict(found.most_common(MOST_CALLERS)), whole and len(found) <= MOST_CALLERS)


@dataclass(frozen=True, slots=True)
class Launched:
    """A replica that one replicad has asked for, and the other does not see in Slurm yet."""

    service: str
    launch: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the replicad that leads says of a service without a replica."""

    service: str
    why: str
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Revocations:
    """Keys that were revoked, as one replicad tells the other: a part of its list."""

    epoch: str
    """The list's name."""
    begin: int
    """So many of its keys come before these."""
    keys: tuple[tuple[str, float], ...]
    """Digests, and when the keys would have been over."""
    heard_epoch: str = ""
    heard: int = 0
    """How many keys of the other one's list of that name it has."""


@dataclass(frozen=True, slots=True)
class PeerNote:
    """What the replicads of two controllers tell each other; the one that is asked answers with its own."""

    host: str
    leads: bool
    demands: tuple[Demand, ...]  # of the gateways of its host
    launched: tuple[Launched, ...]
    outlooks: tuple[Outlook, ...]
    as_of: float = 0.0  # when its controller was asked who leads
    callers: Callers | None = None  # of the gateways of its host
    revoked: Revocations | None = None
    version: int = VERSION


def peer_key(secret: str) -> str:
    """What other replicas show to get the model of the one with this secret, which would let them ask its engine."""
    return hmac.new(secret.encode(), b"weights", hashlib.sha256).hexdigest()


# ---- leases: the parts that gateways of several hosts have of one limit ----


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """What a gateway has of one subject's limits, and needs. Four numbers are of requests, tokens, concurrent, queued;
    two of requests and tokens."""

    kind: SubjectKind
    name: str
    have: tuple[int, int, int, int]
    """Of requests and tokens what is left, of the others what they may reach, here and now."""
    balance: tuple[int, int]
    """All that it was given since it has its name, less all that it gave back."""
    over: int = 0
    """Tokens that requests had reserved and did not use, beyond what it had at the last report: all since it has its
    name."""
    need: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Of requests that wait for it."""
    least: int = 0
    """The fewest tokens with which one of them could go on."""
    want: tuple[int, int] = (0, 0)
    """What it will use until it asks again, as far as it can tell."""
    last: bool = False
    """It has nothing, and needs nothing: it is not named again."""


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """A gateway renews its lease of all that it has, and says of some of it how it is."""

    holder: str
    """A name of its own, another one each time that it loses what it has."""
    number: int
    """Of this report; an earlier one that comes later is not looked at."""
    answered: int
    """The latest one whose answer it got. Only an answer to its latest report counts for it."""
    rows: tuple[LeaseRow, ...] = ()
    leaves: bool = False
    gateway: str = ""
    """Its name as long as it runs, by which it has claims."""
    claims: tuple[str, ...] = ()
    """Names of requests that it would answer, so that no other gateway does."""
    ended: tuple[tuple[str, bool], ...] = ()
    """Those that it answers no more, and whether they have a bill."""
    host: str = ""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What a gateway gets more: requests and tokens to add, and what its counts may reach from now on."""

    kind: SubjectKind
    name: str
    give: tuple[int, int, int, int]
    retry_us: int = 0
    """Not given for want of it; then there will be enough. 0: not known, or nothing was refused."""
    soon: bool = False
    """Others have more places than their part while this one needs some: ask again at once."""
    scarce: bool = False
    """Others lacked places lately: those that are not used are to be given back at once."""


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What the authority says."""

    epoch: str
    number: int
    """Of the report."""
    granted: bool
    """Whether what the gateway has is its own for LEASE_S from when it sent the report. Not yet while an earlier
    authority's leases may hold."""
    gateways: int
    part: int
    """How many there are, and which of them this one is, from 0: its part of all limits where nobody answers."""
    without: WithoutAuthority
    rows: tuple[LeaseGrant, ...] = ()
    held: tuple[str, ...] = ()
    """Of what it claims, what another gateway answers now."""
    billed: tuple[str, ...] = ()
    """And what has a bill: nobody holds it."""
    hosts: int = 1
    """That have gateways now."""
    version: int = VERSION


Message = Heartbeat | Orders | Demand | Callers | ReplicaSpec | PeerNote | LeaseReport | LeaseAnswer
M = TypeVar("M")


def render(message: Message | ServiceRow | ReplicaRow | LimitRow | AccountRow) -> bytes:
    """Its JSON, without a newline."""
    return json.dumps(asdict(message), ensure_ascii=False, separators=(",", ":")).encode()


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # takes 0.1 s, which a replica's start does without

    return TypeAdapter(globals()[name])


def parse(kind: type[M], text: bytes) -> M:
    """A message or row, each field checked. Raises SluiceError."""
    from pydantic import ValidationError

    if len(text) > MOST_MESSAGE:
        raise SluiceError(f"a message of {len(text)} bytes", remedy=f"send at most {MOST_MESSAGE}")
    try:
        message: M = _adapter(kind.__name__).validate_json(text)
    except ValidationError as error:
        raise _not_one(kind.__name__, error) from error
    return message


def as_row(row: ServiceRow | ReplicaRow | LimitRow | AccountRow) -> dict[str, Any]:
    """The value of a row."""
    return asdict(row)


def replicad_port() -> int:
    """Where replicad listens. Raises SluiceError for a variable that is not a port."""
    text = os.environ.get(PORT_VARIABLE, str(PORT))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise SluiceError(f"{PORT_VARIABLE}={text!r}: not a port", remedy="use one from 1 to 65535")
    return int(text)


def row(kind: type[M], value: Any) -> M:
    """A row from its value, each field checked. Raises SluiceError."""
    from pydantic import ValidationError

    try:
        found: M = _adapter(kind.__name__).validate_python(value)
    except ValidationError as error:
        raise _not_one(kind.__name__, error) from error
    return found


def _not_one(name: str, error: ValidationError) -> SluiceError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "message"
    return SluiceError(f"{name}: {place}: {first['msg']}", remedy="run one version of Sluice everywhere")
