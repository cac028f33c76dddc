"""What was launched of machines of one's own: a file for each node in fleetd's folder, as nothing else keeps it."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.fleet.driver import DriverSite, Machine, ProviderError


@dataclass(frozen=True, slots=True)
class Record:
    """A launch; times in seconds since 1970."""

    token: str
    shape: str
    zone: str
    began: float
    ending: float | None = None  # since when


class Records:
    """Those of one pool."""

    def __init__(self, site: DriverSite, driver: str) -> None:
        self._folder = site.state / f"{driver}-{site.pool}"
        self._lock = threading.Lock()
        try:
            self._folder.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            raise SluiceError(f"{self._folder}: {error.strerror}", remedy="the state folder is SlurmUser's") from error

    def nodes(self) -> list[str]:
        """Nodes that have one."""
        return [path.stem for path in self._folder.glob("*.json")]

    def read(self, node: str) -> Record | None:
        """A node's. Raises ProviderError for one that cannot be read."""
        try:
            return Record(**json.loads(self._file(node).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ProviderError("broken", f"{self._file(node)}: {error}; switch {node} off and remove it") from error

    def listed(self, node: str) -> Record | None:
        """The same for a list: without a record that can be read, nobody can say what is there."""
        try:
            return self.read(node)
        except ProviderError as error:
            raise ProviderError("unknown", str(error)) from error

    def of_machine(self, machine: str) -> tuple[str, Record | None]:
        """The node of a machine, and its record if that is the machine's still."""
        node = machine.rpartition("/")[0]
        record = self.read(node)
        return node, record if record is not None and machine_of(node, record).id == machine else None

    def write(self, node: str, record: Record) -> None:
        """Replace a node's. Raises OSError."""
        with self._lock:
            write_atomic(self._file(node), json.dumps(asdict(record)) + "\n", mode=0o600, follow_links=False)

    def forget(self, node: str, record: Record) -> None:
        """Unless it was launched again meanwhile."""
        with self._lock:
            if self.read(node) == record:
                self._file(node).unlink(missing_ok=True)

    def _file(self, node: str) -> Path:
        return self._folder / f"{node}.json"


def machine_of(node: str, record: Record) -> Machine:
    """The machine as lists have it."""
    return Machine(f"{node}/{record.token[:12]}", record.token, node, record.shape, record.zone)
