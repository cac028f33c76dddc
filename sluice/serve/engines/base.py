"""What an adapter is: pure functions from what a service wants to a command line, and from figures to a load."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from sluice.exchange.serving import Abilities, Load, ReplicaSpec

KEY_VARIABLE = "SLUICE_ENGINE_KEY"
"""In the environment of engines that listen on a port: what requests must have as `Authorization: Bearer`."""
_SAMPLE = re.compile(
    r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*\})?\s+([-+0-9.eEinfNa]+)\s*(?:\d+)?\s*\Z"
)


Figures = Mapping[str, Sequence[float]]
"""Samples of an engine's metrics by their names: several where it has several parts, each with its labels."""


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of an engine that runs on several, and which of its parts this is: 0 answers."""

    nodes: int = 1
    rank: int = 0
    host: str = ""  # of rank 0
    port: int = 0  # there, where the others find it


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs. `folder` is this replica's alone (0700), `port` is free on 127.0.0.1."""

    folder: Path
    port: int
    key: str  # for those that cannot listen on a Unix socket
    model: Path  # the staged one
    gpus: int = 0  # that the job has here
    group: Group = ALONE

    @property
    def socket(self) -> Path:
        """Where it listens if it can."""
        return self.folder / "engine.sock"


@dataclass(frozen=True, slots=True)
class Start:
    """How an engine is started. `address`: path of a socket, or port of 127.0.0.1."""

    arguments: tuple[str, ...]
    address: Path | int
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the replica's folder, readable by its user alone; written before."""
    secret: str = ""
    """What is not passed on of its output: engines print their settings, keys included."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An adapter. `figures`: path that is asked for the load, None: it says nothing of itself."""

    start: Callable[[ReplicaSpec, Place], Start]
    abilities: Callable[[ReplicaSpec], Abilities]
    figures: str | None = None
    load: Callable[[Figures], Load] = lambda _: Load()
    end_s: float = 10.0
    """From SIGTERM to SIGKILL, when nothing is asked of it any more."""


def samples(text: str) -> dict[str, list[float]]:
    """The finite samples of an exposition in Prometheus's text format."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (match := _SAMPLE.match(line)):
            continue
        with suppress(ValueError):
            value = float(match[2])
            if isfinite(value):
                found.setdefault(match[1], []).append(value)
    return found


def total(figures: Figures, name: str) -> int:
    """What all parts have together."""
    found = sum(figures.get(name, ()))
    return int(found) if isfinite(found) else 0


def share(figures: Figures, *names: str) -> float | None:
    """The mean of the parts' shares, from 0 to 1, by the first of the names that is known."""
    for name in names:
        if found := figures.get(name):
            return min(max(sum(one / len(found) for one in found), 0.0), 1.0)
    return None


def has_option(options: tuple[str, ...], *names: str) -> bool:
    """Whether one of the options is given, as a word or as NAME=VALUE."""
    return any(word.partition("=")[0].replace("_", "-") in names for word in options)


def option_value(options: tuple[str, ...], name: str) -> str | None:
    """What an option is set to, by the next word or as NAME=VALUE; the last one counts. None: not given."""
    found = None
    for number, word in enumerate(options):
        given, equals, value = word.partition("=")
        if given.replace("_", "-") == name:
            found = value if equals else "".join(options[number + 1 : number + 2])
    return found
