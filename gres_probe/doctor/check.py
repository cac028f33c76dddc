"""What a check is, what it may look at, and what it answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from gres_probe.slurm_conf import ConfigFile, SlurmConf, read_config, read_slurm_conf
from sluice_base.errors import SluiceError
from sluice_base.slurm_version import OLDEST, SlurmVersion
from slurm_client import SlurmClient, connect
from slurm_client.model import Node


class Verdict(StrEnum):
    """How it stands."""

    OK = "ok"
    WARN = "warn"  # works today, and will hurt some day
    FAIL = "fail"  # does not work, or is not safe
    SKIP = "skip"  # could not be looked at; `what` says why


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer of a check."""

    verdict: Verdict
    what: str
    remedy: str = ""


def ok(what: str) -> Outcome:
    """All is well."""
    return Outcome(Verdict.OK, what)


def warn(what: str, remedy: str) -> Outcome:
    """Works today."""
    return Outcome(Verdict.WARN, what, remedy)


def fail(what: str, remedy: str) -> Outcome:
    """Does not work, or is not safe."""
    return Outcome(Verdict.FAIL, what, remedy)


def skip(what: str, remedy: str = "") -> Outcome:
    """Could not be looked at."""
    return Outcome(Verdict.SKIP, what, remedy)


class CannotLookError(Exception):
    """Raised inside a check when what it needs is not there: the check is skipped with this reason."""


@dataclass
class Patient:
    """The site under examination; everything is read once, when first asked for, and nothing is ever changed."""

    slurm_conf: Path
    prefix: Path | None = None
    inventory_dir: Path | None = None
    root: Path = Path("/")  # files of this host are looked for below it
    command_timeout: float = 8.0  # seconds for one Slurm command
    clock: Callable[[], float] = time.time
    privileged: bool = field(default_factory=lambda: os.geteuid() == 0)

    @cached_property
    def slurm(self) -> SlurmConf:
        """slurm.conf as it stands on disk."""
        return read_slurm_conf(self.slurm_conf)

    @property
    def folder(self) -> Path:
        """Where slurm.conf lies."""
        return self.slurm_conf.parent

    def config_file(self, name: str) -> ConfigFile | None:
        """Another configuration file beside slurm.conf; None when there is none."""
        path = self.folder / name
        return read_config(path, cluster_name=self.slurm.option("ClusterName")) if path.is_file() else None

    @cached_property
    def client(self) -> SlurmClient:
        """Slurm's commands for this site."""
        return connect(conf=self.slurm_conf, prefix=self.prefix, timeout=self.command_timeout)

    @cached_property
    def version(self) -> SlurmVersion:
        """The installed commands' version; OLDEST when there are none."""
        try:
            return self.client.version()
        except SluiceError:
            return OLDEST

    @cached_property
    def _controller(self) -> dict[str, str] | SluiceError:
        try:
            return self.client.config()
        except SluiceError as error:
            return error

    @property
    def effective(self) -> dict[str, str]:
        """slurmctld's own view of its configuration. Raises CannotLookError when it does not answer."""
        if isinstance(self._controller, SluiceError):
            raise CannotLookError(f"slurmctld does not answer: {self._controller.what}")
        return self._controller

    @property
    def controller_answers(self) -> bool:
        """Whether slurmctld answers."""
        return not isinstance(self._controller, SluiceError)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes as slurmctld sees them. Raises CannotLookError when it does not answer."""
        if not self.effective:
            raise CannotLookError("slurmctld does not answer")
        try:
            return self.client.nodes()
        except SluiceError as error:
            raise CannotLookError(error.what) from error

    def option(self, key: str, default: str = "") -> str:
        """An option in effect: what slurmctld says, else what slurm.conf says."""
        if self.controller_answers:
            by_name = {name.lower(): value for name, value in self.effective.items()}
            if key.lower() in by_name:
                return by_name[key.lower()] or default
        return self.slurm.option(key, default)

    def host(self, path: str | Path) -> Path:
        """A path on this host."""
        return Path(path) if Path(path).is_relative_to(self.root) else self.root / str(path).lstrip("/")


Examine = Callable[[Patient], Iterable[Outcome]]


@dataclass(frozen=True, slots=True)
class Check:
    """One point of the list."""

    name: str
    title: str
    examine: Examine


REGISTERED: dict[str, Check] = {}


def check(name: str, title: str) -> Callable[[Examine], Examine]:
    """Put a function on the list."""

    def register(examine: Examine) -> Examine:
        REGISTERED[name] = Check(name, title, examine)
        return examine

    return register
