"""What a node reports of its health: to the controllers' daemon, `sluice health check` and HealthCheckProgram."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.text import one_line

SCHEMA_VERSION = 1
SEVERITIES = ("info", "warning", "critical", "fatal")
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_WORD = re.compile(r"[a-z0-9_-]{1,40}")
_MOST = 1000
_MOST_TEXT = 300
_MOST_FAULTS = 256
_MOST_BLAMES = 100  # a job can cause any number of events


@dataclass(frozen=True, slots=True)
class Fault:
    """A finding as it is reported. `numbers`: of gres/gpu, empty for the node; `jobs`: had the GPU when it began."""

    check: str
    uuid: str
    numbers: tuple[int, ...]
    severity: str
    action: str
    acts: bool
    began: float
    text: str
    jobs: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """As Slurm shows it."""
        number = f" GPU {','.join(map(str, self.numbers))}" if self.numbers else ""
        return f"sluice: {self.check}{number}: {self.text}"[:200]

    @property
    def key(self) -> str:
        """Which fault this is: the same one for as long as it lasts."""
        return f"{self.uuid or 'node'}/{self.check}/{self.began:.0f}"


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU's place in a report."""

    uuid: str
    vendor: str
    model: str
    numbers: tuple[int, ...]
    passes: int
    kept: str = ""
    unknown: tuple[str, ...] = ()
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """One node."""

    node: str
    time: float
    mode: str
    wanted_passes: int
    gpus: tuple[GpuState, ...] = ()
    faults: tuple[Fault, ...] = ()
    passes: int = 0
    unknown: tuple[str, ...] = ()
    undelivered_since: float | None = None  # no controllers' daemon has accepted a report since then
    blames: tuple[str, ...] = field(default=())  # texts about jobs that caused an event
    refused_at: float = 0.0  # when a prolog was refused for a fault last, or a GPU not returned clean
    unclean: tuple[str, ...] = ()  # the GPUs that were not returned clean then
    room: bool = False  # there is room in all folders that jobs need

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the worst faults and the latest blames, as many as fit one request."""
        worst = sorted(self.faults, key=lambda fault: SEVERITIES.index(fault.severity))[-_MOST_FAULTS:]
        shortened = replace(
            self,
            faults=tuple(replace(one, text=one.text[:_MOST_TEXT]) for one in self.faults if one in worst),
            blames=tuple(one[:_MOST_TEXT] for one in self.blames[-_MOST_BLAMES:]),
        )
        return {"schema_version": SCHEMA_VERSION, **asdict(shortened)}

    @property
    def severity(self) -> str | None:
        """The worst of its faults; None without one."""
        return max((fault.severity for fault in self.faults), key=SEVERITIES.index, default=None)

    @property
    def nagios(self) -> int:
        """0 ok, 1 warning, 2 critical, 3 unknown."""
        worst = self.severity
        if worst in ("critical", "fatal"):
            return 2
        if worst == "warning":
            return 1
        return 3 if self.unanswered else 0

    @property
    def unanswered(self) -> list[str]:
        """GPUs for which even the check whether they are there could not run."""
        return [gpu.uuid for gpu in self.gpus if "gpu_lost" in gpu.unknown]


def parse_report(document: Mapping[str, Any]) -> Report:
    """A report from JSON, every field checked. Raises SluiceError."""
    try:
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError("another version's")
        gpus = document["gpus"][:_MOST]
        faults = document["faults"][:_MOST]
        return Report(
            node=_match(_NODE, document["node"]),
            time=_time(document["time"]),
            mode=_match(_WORD, document["mode"]),
            wanted_passes=max(1, int(document["wanted_passes"])),
            gpus=tuple(_gpu(one) for one in gpus),
            faults=tuple(_fault(one) for one in faults),
            passes=int(document["passes"]),
            unknown=tuple(_match(_WORD, one) for one in document["unknown"][:_MOST]),
            undelivered_since=None,
            refused_at=_time(document["refused_at"]),
            unclean=tuple(_text(one) for one in document.get("unclean", ())[:_MOST]),
            room=document.get("room") is True,
            blames=tuple(_text(one) for one in document["blames"][:_MOST]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise SluiceError(
            f"health report: {one_line(repr(error))}", remedy="install one version of Sluice on node and controller"
        ) from error


def _gpu(one: Mapping[str, Any]) -> GpuState:
    return GpuState(
        uuid=_text(one["uuid"]),
        vendor=_match(_WORD, one["vendor"]),
        model=_text(one["model"]),
        numbers=_numbers(one["numbers"]),
        passes=int(one["passes"]),
        kept=_text(one["kept"]),
        unknown=tuple(_match(_WORD, word) for word in one["unknown"][:_MOST]),
        jobs=_ids(one["jobs"]),
    )


def _fault(one: Mapping[str, Any]) -> Fault:
    if one["severity"] not in SEVERITIES or not isinstance(one["acts"], bool):
        raise ValueError(f"severity {one['severity']!r}")
    return Fault(
        check=_match(_WORD, one["check"]),
        uuid=_text(one["uuid"]),
        numbers=_numbers(one["numbers"]),
        severity=one["severity"],
        action=_match(_WORD, one["action"]),
        acts=one["acts"],
        began=_time(one["began"]),
        text=_text(one["text"]),
        jobs=_ids(one["jobs"]),
    )


def _match(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r:.60} is not a name")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return one_line(value)[:_MOST_TEXT]


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise ValueError("not a time")
    return float(value)


def _numbers(values: Any) -> tuple[int, ...]:
    found = tuple(int(value) for value in values[:64])
    if any(not 0 <= value <= 255 for value in found):
        raise ValueError("GPU number")
    return found


def _ids(values: Any) -> tuple[int, ...]:
    found = tuple(int(value) for value in values[:_MOST])
    if any(not 0 < value < 1 << 32 for value in found):
        raise ValueError("job id")
    return found
