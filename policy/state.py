"""What a policy manages in a cluster, in one form for what is wanted and what is there, to compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SNIPPET = "policy.sluice.conf"
"""Its name next to slurm.conf, which includes it."""
LEVEL_FILE = "sluice.level"
"""A file next to slurm.conf with one word: how much of Sluice is switched on in slurmctld."""
Level = Literal["off", "admit", "shadow", "place"]


@dataclass(frozen=True, slots=True)
class AccountState:
    """A Slurm account."""

    parent: str  # "root" at the top
    description: str
    organization: str
    shares: str
    limits: Mapping[str, str]
    qos: tuple[str, ...]
    default_qos: str
    coordinators: frozenset[str]  # those of the accounts above included


@dataclass(frozen=True, slots=True)
class UserState:
    """A user in an account."""

    shares: str
    limits: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReservationState:
    """Nodes kept for accounts."""

    accounts: frozenset[str]
    nodes: int
    feature: str
    users: frozenset[str] = frozenset()
    magnetic: bool = True  # jobs of the accounts need not name it
    lasting: bool = True  # it does not end within a month


@dataclass(slots=True)
class State:
    """All of it. Accounts are listed parents first."""

    accounts: dict[str, AccountState] = field(default_factory=dict)
    users: dict[tuple[str, str], UserState] = field(default_factory=dict)  # (account, user)
    root_users: set[str] = field(default_factory=set)  # users of the account root: not managed
    qos: dict[str, dict[str, str]] = field(default_factory=dict)
    root_limits: dict[str, str] = field(default_factory=dict)
    reservations: dict[str, ReservationState] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
