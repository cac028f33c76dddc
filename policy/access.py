"""Who is calling, and what that user may change.

The caller is the process's real user, never a name from the environment; the level is what Slurm's accounting says.
This is the first check, for a clear message: slurmdbd, slurmctld and the file system decide again on each change, as
every command runs as the caller.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from dataclasses import dataclass

from policy.changes import Change
from policy.live import Cluster
from sluice.base.errors import SluiceError

NONE, OPERATOR, ADMINISTRATOR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling."""

    user: str
    uid: int
    level: int
    coordinates: frozenset[str] = frozenset()  # accounts, those below included

    @property
    def is_admin(self) -> bool:
        """Whether the caller may change everything."""
        return self.level >= OPERATOR


def user_name() -> str:
    """The name of the process's real user."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SluiceError(f"uid {os.getuid()} has no name", remedy="call it as a user of this system") from None


def caller(cluster: Cluster) -> Caller:
    """Who is calling, with the level that Slurm gives. Raises SluiceError."""
    uid, user = os.getuid(), user_name()
    if uid == 0:
        return Caller(user, uid, ADMINISTRATOR)
    level, coordinates = cluster.accounting.level(user)
    return Caller(user, uid, level, coordinates)


def permitted(who: Caller, changes: Iterable[Change], tops: Iterable[str]) -> tuple[list[Change], list[Change]]:
    """The changes that the caller may make, and the others.

    A coordinator may change the members of the accounts that it coordinates, and everything of the accounts below them.
    It may not change the accounts at the top of its subtrees (`tops`): their limits are what it was given.
    """
    if who.is_admin:
        return list(changes), []
    allowed: list[Change] = []
    refused: list[Change] = []
    for change in changes:
        inside = change.account in who.coordinates
        fine = inside and (change.kind == "user" or (change.kind == "account" and change.account not in set(tops)))
        (allowed if fine else refused).append(change)
    return allowed, refused


def require(who: Caller, what: str) -> None:
    """Raise SluiceError unless the caller may change something."""
    if not who.is_admin and not who.coordinates:
        raise SluiceError(
            f"{what}: {who.user} is not an operator, administrator or coordinator in Slurm",
            remedy="ask an administrator (sacctmgr modify user ... set adminlevel=operator)",
        )
