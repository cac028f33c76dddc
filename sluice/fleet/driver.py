"""What a driver of a provider is: an entry point of `sluice.pool_drivers`, a factory of `Driver`.

`launch` is idempotent by its token: called again with the same one, it makes no second machine as long as the first
one is there. Everything raises `ProviderError`; any other exception counts as one of an unknown outcome.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

from sluice.base.errors import SluiceError
from sluice.base.private import read_private
from sluice.exchange.fleet import STATE
from sluice.fleet.secrets import Secrets

GROUP = "sluice.pool_drivers"
CREDENTIALS = Path("/etc/sluice/fleet")
"""Where drivers without a place of their provider find credentials: POOL.json, SlurmUser's alone."""

Failure = Literal["no_capacity", "quota", "credentials", "throttled", "refused", "broken", "unknown"]
"""`broken`: this one node's machine fails, and may have been launched, which lists show; the pool's others are not
concerned. `unknown`: it is not known whether the request was carried out. After all others nothing was made."""

_MOST_CREDENTIALS = 64 << 10
_WORD = re.compile(r"[!-~]{0,255}")
_TEXT = re.compile(r"[ -~]{0,255}")
_ADDRESS = re.compile(r"[A-Za-z0-9.:_-]{0,255}")


class ProviderError(SluiceError):
    """Why a request was not carried out, or that this is not known."""

    def __init__(self, kind: Failure, what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Order:
    """A machine to be launched."""

    token: str
    node: str
    shape: str
    zone: str  # empty: the driver's one


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that the provider has, by the tags that its launch gave it. `ending`: it ends, or has.

    Raises ProviderError where these are not words: they are shown, logged, and kept in the journal.
    """

    id: str
    token: str
    node: str
    shape: str = ""
    zone: str = ""
    address: str = ""
    ending: bool = False
    notice: str = ""
    """Why the provider takes it back soon, in its words."""
    at_risk: str = ""
    """Why it may take it back: jobs run on, and no other begins there."""

    def __post_init__(self) -> None:
        for value in (self.id, self.token, self.node, self.shape, self.zone):
            if not _WORD.fullmatch(value):
                raise ProviderError("unknown", f"a machine with {value[:80]!r}: not a word of at most 255 characters")
        if not _ADDRESS.fullmatch(self.address):
            raise ProviderError("unknown", f"machine {self.id}: {self.address[:80]!r}: not an address")
        for text in (self.notice, self.at_risk):
            if not _TEXT.fullmatch(text):
                raise ProviderError("unknown", f"machine {self.id}: notice {text[:80]!r}: not a line of text")


class Driver(Protocol):
    """One pool's way to its provider. Called from several threads; each call returns within minutes."""

    def launch(self, order: Order) -> Machine:
        """Launch a machine, or find the one that this token has made. Raises ProviderError."""

    def terminate(self, machine: str) -> None:
        """End a machine; one that is not there any more is no error. Raises ProviderError."""

    def machines(self) -> list[Machine]:
        """All machines of this cluster's pool. Raises ProviderError."""


@dataclass(frozen=True, slots=True)
class DriverSite:
    """What a driver is made for."""

    cluster: str
    pool: str
    settings: Mapping[str, Any]
    credentials: Path = CREDENTIALS
    state: Path = STATE
    """fleetd's own folder, for drivers whose providers keep no tokens."""
    shapes: tuple[str, ...] = ()
    """The pool's, for drivers whose providers have several words for one."""
    secrets: Secrets = field(default_factory=Secrets, compare=False)
    """What is taken out of all that is said of the pool's provider."""

    def read_credentials(self, *known: str) -> dict[str, Any]:
        """The pool's file of credentials. Raises SluiceError for one that others could read."""
        path = self.credentials / f"{self.pool}.json"
        try:
            document = json.loads(read_private(path, _MOST_CREDENTIALS))
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="docs/elastic.md says what is in it") from error
        except ValueError:  # its words may have a part of the file
            raise SluiceError(f"{path}: not JSON", remedy="docs/elastic.md says what is in it") from None
        if not isinstance(document, dict) or not set(document) <= set(known):
            raise SluiceError(
                f"{path}: not an object with {' and '.join(known)}", remedy="docs/elastic.md says what is in it"
            )
        self.secrets.add(document)
        return document

    def setting(self, name: str, default: str | None = None) -> str:
        """A setting that is text. Raises SluiceError where it is missing or something else."""
        value = self.settings.get(name, default)
        if not isinstance(value, str) or not value:
            raise SluiceError(
                f"pool {self.pool}: settings.{name} {value!r}: not text", remedy=f"write it: settings: {{{name}: ...}}"
            )
        return value

    def only(self, *known: str) -> None:
        """Raises SluiceError for a setting that the driver does not know."""
        for name in self.settings:
            if name not in known:
                raise SluiceError(
                    f"pool {self.pool}: settings.{name}: the driver does not know it",
                    remedy=f"it knows {', '.join(known)}",
                )

    @property
    def tags(self) -> dict[str, str]:
        """By which this pool's machines are known."""
        return {"sluice-cluster": self.cluster, "sluice-pool": self.pool}

    def tags_of(self, order: Order) -> dict[str, str]:
        """Of one machine."""
        return {**self.tags, "sluice-node": order.node, "sluice-token": order.token}


def check_program(program: Path) -> None:
    """Nobody but root and this user may change what this user runs. Raises SluiceError."""
    if not program.is_absolute():
        raise SluiceError(f"{program}: not from / on", remedy="name the program in settings from / on")
    for path in (program, program.parent):
        try:
            state = path.stat()
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="name the program in settings") from error
        if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o022:
            raise SluiceError(
                f"{path}: mode {stat.filemode(state.st_mode)} of uid {state.st_uid}",
                remedy=f"it must be root's, and nobody else's to write: chown root {path}; chmod go-w {path}",
            )


Factory = Callable[[DriverSite], Driver]


def load_driver(name: str, site: DriverSite) -> Driver:
    """A pool's driver. Raises SluiceError for one that is not installed, or does not take the settings."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        raise SluiceError(
            f"pool {site.pool}: driver {name!r} is not installed",
            remedy=f"installed are {', '.join(sorted(found)) or 'none'}; docs/elastic.md has the extra that each needs",
        )
    try:
        factory: Factory = found[name].load()
    except ImportError as error:
        ours = (error.name or "").partition(".")[0] == "dev_cluster"
        package = "the package sluice-dev-cluster" if ours else f"pip's sluice-slurm[{name}]"
        raise SluiceError(f"pool {site.pool}: driver {name}: {error}", remedy=f"install {package}") from error
    return factory(site)
