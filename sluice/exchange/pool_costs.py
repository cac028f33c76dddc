"""What the machines of pools have cost, by day: fleetd counts it, reports divide it among those who used them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sluice.base.errors import SluiceError
from sluice.exchange.fleet import STATE

COSTS = STATE / "costs.json"
MOST_DAYS = 400
MOST_NODES = 5000
_MOST_BYTES = 32 << 20


@dataclass(slots=True)
class Spent:
    """Machines of a pool on a day."""

    machine_s: float = 0.0
    cost: float = 0.0
    unpriced_s: float = 0.0  # of machine_s, of machines whose price is not known: cost has nothing of them

    def add(self, more: Spent) -> None:
        """Also of these."""
        self.machine_s += more.machine_s
        self.cost += more.cost
        self.unpriced_s += more.unpriced_s


@dataclass(slots=True)
class PoolCosts:
    """A pool's. `gpus` and `cpus`: of one node, which a job has parts of."""

    partition: str = ""
    gpus: int = 0
    cpus: int = 1
    days: dict[str, Spent] = field(default_factory=dict)  # by ISO date of the controller's time
    gres: dict[str, str] = field(default_factory=dict)  # by node that had a machine: Slurm may not know it any more

    def remember(self, node: str, gres: str) -> None:
        """A node has a machine; those that had none for longest are forgotten."""
        self.gres.pop(node, None)
        self.gres[node] = gres
        for oldest in list(self.gres)[:-MOST_NODES]:
            del self.gres[oldest]

    def book(self, begin: float, end: float, price: float | None) -> None:
        """A machine was there from `begin` to `end`, at a price an hour (None: not known); days that are too old are
        forgotten.
        """
        while begin < end:
            day = datetime.fromtimestamp(begin).date()
            until = min(end, datetime.combine(day + timedelta(days=1), datetime.min.time()).timestamp())
            spent = self.days.setdefault(day.isoformat(), Spent())
            lasted = until - begin
            unpriced_s = lasted if price is None else 0.0
            spent.add(Spent(lasted, lasted / 3600 * (price or 0.0), unpriced_s))
            begin = until
        for old in sorted(self.days)[:-MOST_DAYS]:
            del self.days[old]

    def total(self, first: date, last: date) -> Spent:
        """On these days."""
        found = Spent()
        for day, spent in self.days.items():
            if first.isoformat() <= day <= last.isoformat():
                found.add(spent)
        return found


_ADAPTER: TypeAdapter[dict[str, PoolCosts]] = TypeAdapter(dict[str, PoolCosts])


def render_costs(pools: dict[str, PoolCosts]) -> bytes:
    """The file's content."""
    return _ADAPTER.dump_json(pools) + b"\n"


def read_costs(path: Path = COSTS) -> dict[str, PoolCosts]:
    """By pool; nothing where there is no fleetd. Raises SluiceError."""
    try:
        with path.open("rb") as file:
            return _ADAPTER.validate_json(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="is sluice-fleetd's state folder readable?") from error
    except ValidationError as error:
        raise SluiceError(
            f"{path}: not what fleetd writes", remedy="install one version of Sluice and restart sluice-fleetd"
        ) from error
