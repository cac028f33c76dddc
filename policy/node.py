"""What nodes and the controllers' daemon read of a policy: `sluice.node.json`.

`sluice apply` writes it next to sluice.policy. Each part of Sluice that runs there owns one section, a pydantic model
whose defaults hold where there is no file. The file is read again when it changes; one that cannot be read leaves the
last good one in force.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from policy.alerts import NodeAlerts, compile_alerts
from policy.checkpoint import NodeCheckpoint, compile_checkpoint
from policy.control_power import ControlPower
from policy.health import NodeHealth, compile_health
from policy.monitoring import NodeMetrics, compile_metrics
from policy.node_limits import NodeLimits, compile_limits
from policy.node_power import NodePower
from policy.power_compile import compile_control, compile_power
from policy.preflight import NodePreflight, compile_preflight
from policy.traces import NodeTraces, compile_traces
from sluice.base.errors import SluiceError

if TYPE_CHECKING:
    from policy.model import Policy

FILE_NAME = "sluice.node.json"
"""Its name next to slurm.conf."""
_MAX_BYTES = 4 << 20
_REMEDY = "write it again with: sluice apply"
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
M = TypeVar("M", bound=BaseModel)


class NodePolicy(BaseModel):
    """The whole file. Sections that this version does not know are left out: a newer `sluice apply` wrote them."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1] = 1
    limits: NodeLimits = NodeLimits()
    health: NodeHealth = NodeHealth()
    metrics: NodeMetrics = NodeMetrics()
    checkpoint: NodeCheckpoint = NodeCheckpoint()
    alerts: NodeAlerts = NodeAlerts()
    traces: NodeTraces = NodeTraces()
    preflight: NodePreflight = NodePreflight()
    power_control: ControlPower = ControlPower()
    power: NodePower = NodePower()
    profiles: Literal["all", "asked"] = "all"

    def render(self) -> str:
        """The file's text."""
        return self.model_dump_json(indent=1) + "\n"


def compile_node(policy: Policy, switches: Mapping[str, str] | None = None) -> NodePolicy:
    """What nodes and controllers read of a policy. `switches`: nodes of the topology's switches. Raises SluiceError."""
    return NodePolicy(
        limits=compile_limits(policy.enforcement),
        health=compile_health(policy.health),
        metrics=compile_metrics(policy.monitoring),
        checkpoint=compile_checkpoint(policy.checkpoint, policy.subtree),
        alerts=compile_alerts(policy.alerts),
        traces=compile_traces(policy.traces),
        preflight=compile_preflight(policy.preflight, {name: one.types for name, one in policy.classes.items()}),
        power=compile_power(policy),
        power_control=compile_control(policy, switches or {}),
        profiles=policy.profiles,
    )


def parse(text: str | bytes, *, source: str) -> NodePolicy:
    """A file's content. Raises SluiceError that names `source` and the place."""
    return parse_compiled(text, NodePolicy, source=source, most=_MAX_BYTES)


def parse_compiled(text: str | bytes, model: type[M], *, source: str, most: int) -> M:
    """The content of a file that `sluice apply` wrote. Raises SluiceError that names `source` and the place."""
    if len(text) > most:
        raise SluiceError(f"{source}: larger than {most} bytes", remedy=_REMEDY)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SluiceError(f"{source}: {place + ': ' if place else ''}{first['msg']}", remedy=_REMEDY) from error


class Parse(Protocol[T_co]):
    """Makes something of a file's content. Raises SluiceError that names `source`."""

    def __call__(self, text: str | bytes, *, source: str) -> T_co:
        """The content."""


class CompiledFile(Generic[T]):
    """What `sluice apply` wrote, in force on this machine, for all threads: read again when it changes, the last good
    one kept."""

    def __init__(self, path: Path, parser: Parse[T], default: T, *, most: int) -> None:
        self.path = path
        self.problem: SluiceError | None = None
        """Why the file on disk is not the one in force."""
        self.loaded = False
        """Whether what is in force was read from a file, and is not the defaults."""
        self._parse = parser
        self._most = most
        self._stamp: tuple[int, int, int] | None = None
        self._policy = default
        self._lock = threading.Lock()

    def current(self) -> T:
        """The policy; defaults where there never was a file that could be read. Raises nothing."""
        with self._lock:
            return self._read()

    def _read(self) -> T:
        try:
            state = self.path.stat()
            stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
            if stamp != self._stamp:
                self._stamp = stamp
                with self.path.open("rb") as file:
                    self._policy = self._parse(file.read(self._most + 1), source=str(self.path))
                self.problem, self.loaded = None, True
        except FileNotFoundError:
            self._stamp = None  # what was read before stays in force
        except OSError as error:
            self._stamp = None
            self.problem = SluiceError(f"{self.path}: {error.strerror}", remedy=_REMEDY)
        except SluiceError as error:
            self.problem = error
        return self._policy


class NodePolicyFile(CompiledFile[NodePolicy]):
    """`sluice.node.json` in force."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, parse, NodePolicy(), most=_MAX_BYTES)
