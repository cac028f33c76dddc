"""What a check is, what it can read, and what it returns."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from sluice.base.errors import SluiceError
from sluice.base.slurm_version import OLDEST, SlurmVersion
from sluice.slurm import SlurmClient, connect
from sluice.slurm.answers import Node
from sluice.slurm.slurm_conf import ConfigFile, SlurmConf, read_config, read_slurm_conf


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"  # works today, but will cause trouble
    FAIL = "fail"  # does not work, or is not safe
    SKIP = "skip"  # could not be checked; `what` says why


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
    """Could not be checked."""
    return Outcome(Verdict.SKIP, what, remedy)


class CannotCheckError(Exception):
    """Raised inside a check when what it needs is missing: the check is skipped with this reason."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system: its type, and its options."""

    kind: str
    options: frozenset[str]


@dataclass
class SiteView:
    """Read-only view of a site; everything is read once, when first used, and nothing is ever changed."""

    slurm_conf: Path
    prefix: Path | None = None
    inventory_dir: Path | None = None
    root: Path = Path("/")  # files of this host are searched below it
    command_timeout: float = 8.0  # seconds for one Slurm command
    clock: Callable[[], float] = time.time
    privileged: bool = field(default_factory=lambda: os.geteuid() == 0)
    hostname: str = field(default_factory=socket.gethostname)

    @cached_property
    def slurm(self) -> SlurmConf:
        """slurm.conf as it is on disk."""
        return read_slurm_conf(self.slurm_conf)

    @property
    def folder(self) -> Path:
        """The folder of slurm.conf."""
        return self.slurm_conf.parent

    def config_file(self, name: str) -> ConfigFile | None:
        """Another configuration file next to slurm.conf; None when there is none."""
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
        """slurmctld's own view of its configuration. Raises CannotCheckError when it does not answer."""
        if isinstance(self._controller, SluiceError):
            raise CannotCheckError(f"slurmctld does not answer: {self._controller.what}")
        return self._controller

    @property
    def is_controller(self) -> bool:
        """Whether slurmctld runs on this host, by slurm.conf."""
        lines = self.slurm.config.lines
        hosts = [line.head.text.partition("(")[0] for line in lines if line.head.key.lower() == "slurmctldhost"]
        names = {host.partition(".")[0] for host in hosts}
        return not names.isdisjoint({self.hostname.partition(".")[0], "localhost"})

    @property
    def controller_answers(self) -> bool:
        """Whether slurmctld answers."""
        return not isinstance(self._controller, SluiceError)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes as slurmctld sees them. Raises CannotCheckError when it does not answer."""
        if not self.effective:
            raise CannotCheckError("slurmctld does not answer")
        try:
            return self.client.nodes()
        except SluiceError as error:
            raise CannotCheckError(error.what) from error

    def option(self, key: str, default: str = "") -> str:
        """An option in effect: slurmctld's value, else that of slurm.conf."""
        if self.controller_answers:
            by_name = {name.lower(): value for name, value in self.effective.items()}
            if key.lower() in by_name:
                return by_name[key.lower()] or default
        return self.slurm.option(key, default)

    def host(self, path: str | Path) -> Path:
        """A path on this host."""
        return Path(path) if Path(path).is_relative_to(self.root) else self.root / str(path).lstrip("/")

    def mount(self, path: Path) -> Mount:
        """The file system that holds a path of this host; an empty one when unknown."""
        found, at = Mount("", frozenset()), ""
        try:
            lines = self.host("/proc/mounts").read_text(errors="replace").splitlines()
        except OSError:
            return found
        resolved = path.resolve()
        for line in lines:
            words = line.split()
            if len(words) >= 4 and len(words[1]) >= len(at) and resolved.is_relative_to(words[1]):
                found, at = Mount(words[2], frozenset(words[3].split(","))), words[1]
        return found


Examine = Callable[[SiteView], Iterable[Outcome]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the list."""

    name: str
    title: str
    examine: Examine


REGISTERED: dict[str, Check] = {}


def check(name: str, title: str) -> Callable[[Examine], Examine]:
    """Register a function as a check."""

    def register(examine: Examine) -> Examine:
        REGISTERED[name] = Check(name, title, examine)
        return examine

    return register
