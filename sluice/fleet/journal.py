"""What the fleet has asked for, on disk before it is asked: a process that is killed goes on where it was."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from policy.pool_nodes import PoolPolicy
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.fleet import Difference, Event, Stage
from sluice.exchange.pool_costs import PoolCosts

VERSION = 1
MOST_HISTORY = 500
MOST_ENDED = 5000
_MOST_BYTES = 64 << 20


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
class Memory:
    """All that outlives the process."""

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


def parse_journal(data: bytes, *, source: str) -> Memory:
    """A journal's content. Raises SluiceError for one that cannot be used: then nothing must be launched."""
    try:
        if len(data) > _MOST_BYTES or json.loads(data).get("version") != VERSION:
            raise ValueError("too large, or of another version")
        memory = _ADAPTER.validate_json(data)
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise SluiceError(
            f"{source}: damaged: {error!r:.200}",
            remedy="remove it: machines are found again by their tags at the provider",
        ) from error
    memory.history = deque(memory.history, maxlen=MOST_HISTORY)
    memory.ended = deque(memory.ended, maxlen=MOST_ENDED)
    return memory


def render_journal(memory: Memory) -> bytes:
    """Its content."""
    return _ADAPTER.dump_json(memory) + b"\n"


class Journal:
    """The file, which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Memory:
        """What was written last. Raises SluiceError for a file that cannot be used."""
        try:
            return parse_journal(self.path.read_bytes(), source=str(self.path))
        except FileNotFoundError:
            return Memory()
        except OSError as error:
            raise SluiceError(f"{self.path}: {error.strerror}", remedy="it is SlurmUser's") from error

    def save(self, memory: Memory) -> None:
        """Replace it. Raises OSError."""
        write_atomic(self.path, render_journal(memory), mode=0o600, follow_links=False)
