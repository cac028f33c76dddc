"""What the fleet has asked for, on disk before it is asked: a process that is killed goes on where it was."""

from __future__ import annotations

import json
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from policy.pool_nodes import PoolPolicy, PoolsPolicy, parse_pools
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.fleet import Difference, Event, Stage
from sluice.exchange.pool_costs import COSTS, PoolCosts, read_costs

VERSION = 1
MOST_HISTORY = 500
MOST_ENDED = 5000
KNOWN_POOLS = "pools.json"
"""Next to the journal: every pool that may have machines, and its driver. A journal that is lost loses no machine."""
_MOST_BYTES = 64 << 20

log = logging.getLogger("sluice.fleet")


@dataclass(slots=True)
class Launch:
    """One machine, from before it is asked for until the provider does not have it any more; times in seconds."""

    token: str
    node: str
    pool: str
    shape: str
    zone: str
    stage: Stage
    since: float  # of the stage
    asked: float
    machine: str = ""
    address: str = ""
    why: Difference = "none"  # it is ending
    text: str = ""
    price: float = 0.0
    sent: float = 0.0  # the last request of which it is not known whether it was carried out
    refused: Difference | None = None  # a later request of the same launch was refused
    launched: float | None = None
    notice: str = ""  # the provider takes the machine back soon
    noticed: float = 0.0
    at_risk: str = ""  # it may
    used: bool = False  # a job has been there
    unpriced: bool = False  # it was taken over, and nobody knows of which shape it is; older fleetds read a price of 0

    @property
    def known_price(self) -> float | None:
        """None: nobody knows it."""
        return None if self.unpriced else self.price

    @property
    def leaves(self) -> str:
        """Why no more jobs begin on it."""
        return self.notice or self.at_risk


@dataclass(slots=True)
class BackOff:
    """Until when something is not tried again, and how often it failed in a row."""

    until: float
    times: int
    kind: Difference
    text: str = ""
    since: float = 0.0


@dataclass(slots=True)
class Hold:
    """Why a node that Slurm wants cannot be had; until None: until an operator returns it."""

    kind: Difference
    text: str
    since: float
    until: float | None
    drained: bool = False  # it was seen so in Slurm


@dataclass(slots=True)
class Search:
    """A pool whose machines are looked for before any is launched, as nothing is known of it. `lost`: there were
    launches, of which the last ones may still be on their way.
    """

    since: float
    lost: bool
    lists: int = 0  # that began late enough to have all


@dataclass(slots=True)
class Memory:
    """All that outlives the process. `origin`: whether it is what a process before left, nothing as there was none, or
    nothing though there was one.
    """

    origin: Literal["kept", "new", "lost"] = "kept"
    searches: dict[str, Search] = field(default_factory=dict)  # by pool

    version: int = VERSION
    clock: float = 0.0
    launches: dict[str, Launch] = field(default_factory=dict)  # by token; none that is gone
    back_offs: dict[str, BackOff] = field(default_factory=dict)  # by pool, pool|shape|zone, or pool|node
    holds: dict[str, Hold] = field(default_factory=dict)  # by node
    due: dict[str, float] = field(default_factory=dict)  # nodes that Slurm will power up, since when
    requeued: dict[int, float] = field(default_factory=dict)  # jobs that are to start again at once
    ended: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))  # tokens of launches that are gone
    pools: dict[str, PoolPolicy] = field(default_factory=dict)  # also those that the policy does not have any more
    boots: dict[str, list[float]] = field(default_factory=dict)  # by pool|shape, the last ones
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # by pool: launches, and failures by kind
    costs: dict[str, PoolCosts] = field(default_factory=dict)  # by pool, of machines that are gone
    history: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_HISTORY))


_ADAPTER: TypeAdapter[Memory] = TypeAdapter(Memory)


class DamagedError(SluiceError):
    """A file of fleetd's own is not what it wrote."""


def parse_journal(data: bytes, *, source: str) -> Memory:
    """A journal's content. Raises SluiceError for one that cannot be used: then nothing must be launched."""
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError("too large")
        version = json.loads(data)["version"]
        memory = _ADAPTER.validate_json(data) if version == VERSION else None
    except (ValidationError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DamagedError(
            f"{source}: damaged: {error!r:.200}",
            remedy="move it away: machines are found again by their tags at the provider",
        ) from error
    if memory is None:
        raise SluiceError(
            f"{source}: of version {version!r:.20}, and this one reads {VERSION}",
            remedy="install one version of Sluice on all controllers",
        )
    memory.history = deque(memory.history, maxlen=MOST_HISTORY)
    memory.ended = deque(memory.ended, maxlen=MOST_ENDED)
    return memory


def render_journal(memory: Memory) -> bytes:
    """Its content."""
    return _ADAPTER.dump_json(memory) + b"\n"


def without_journal(known: PoolsPolicy, costs: dict[str, PoolCosts] | None = None) -> Memory:
    """What a process begins with that finds no journal. `known`: pools that may have machines."""
    return Memory(origin="lost" if known.pools else "new", costs=costs or {})


class Journal:
    """The file, which is replaced as a whole, and next to it the pools that may have machines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = path.with_name(KNOWN_POOLS)

    def load(self) -> Memory:
        """What was written last; one that is damaged is moved away, and machines are found again by their tags. Raises
        SluiceError for a file that cannot be read, or is of another version.
        """
        try:
            return parse_journal(self.path.read_bytes(), source=str(self.path))
        except FileNotFoundError:
            return without_journal(self.load_pools(), self._costs())
        except DamagedError as error:
            self._move_away(self.path, error)
            memory = without_journal(self.load_pools(), self._costs())
            memory.origin = "lost"
            return memory
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}", remedy="it is SlurmUser's") from error

    def save(self, memory: Memory) -> None:
        """Replace it. Raises OSError."""
        write_atomic(self.path, render_journal(memory), mode=0o600, follow_links=False)

    def load_pools(self) -> PoolsPolicy:
        """Pools that may have machines; of a damaged file none, then the journal and the policy name them. Raises
        SluiceError for one that cannot be read.
        """
        try:
            return parse_pools(self._known.read_bytes(), source=str(self._known))
        except FileNotFoundError:
            return PoolsPolicy()
        except OSError as error:
            raise SluiceError(f"{self._known}: {error.strerror}", remedy="it is SlurmUser's") from error
        except SluiceError as error:
            self._move_away(self._known, error)
            return PoolsPolicy()

    def save_pools(self, known: PoolsPolicy) -> None:
        """Replace them. Raises OSError."""
        write_atomic(self._known, known.render(), mode=0o600, follow_links=False)

    def _costs(self) -> dict[str, PoolCosts]:
        with suppress(SluiceError):  # what machines have cost is known for reports alone
            return read_costs(self.path.with_name(COSTS.name))
        return {}

    @staticmethod
    def _move_away(path: Path, error: SluiceError) -> None:
        away = path.with_name(f"{path.name}.damaged")
        log.error("%s; it is %s now, and providers are asked for machines", error, away)
        try:
            path.replace(away)
        except OSError as problem:
            raise SluiceError(f"{path}: {problem.strerror}", remedy="it is SlurmUser's") from problem
