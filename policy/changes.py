"""The difference between what is there and what is wanted, as changes that people can read and `apply` makes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from policy.names import OVER_QOS
from policy.state import AccountState, ReservationState, State, UserState

Kind = Literal["qos", "account", "user", "cluster", "reservation", "file"]
Action = Literal["add", "change", "remove"]
_ORDER: tuple[Kind, ...] = ("cluster", "qos", "account", "user", "reservation", "file")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs. `fields`: what is there and what is wanted ("" where there is none)."""

    kind: Kind
    action: Action
    name: str  # of a user: user@account
    fields: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def account(self) -> str:
        """The account that it is about; empty where it is about none."""
        return {"account": self.name, "user": self.name.partition("@")[2]}.get(self.kind, "")

    @property
    def user(self) -> str:
        """The user that it is about, of changes of users."""
        return self.name.partition("@")[0]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "action": self.action,
            "name": self.name,
            "fields": {key: {"from": old, "to": new} for key, (old, new) in self.fields.items()},
        }

    def lines(self) -> list[str]:
        """For people."""
        sign = {"add": "+", "change": "~", "remove": "-"}[self.action]
        if self.kind == "file":
            old, new = self.fields["content"]
            return [f"{sign} file {self.name}", *(f"    {line}" for line in _text_difference(old, new))]
        shown = []
        for key, (old, new) in self.fields.items():
            if self.action == "change":
                shown.append(f"    {key}: {old or '(none)'} -> {new or '(none)'}")
            elif self.action == "add" and new:
                shown.append(f"    {key}: {new}")
        return [f"{sign} {self.kind} {self.name}", *shown]


def compare(there: State, wanted: State, *, managed: Iterable[str], managed_qos: Iterable[str]) -> list[Change]:
    """Everything that differs.

    `managed`: accounts that are removed where they are not wanted; `managed_qos` likewise. Accounts and QOS that are in
    neither are left as they are.
    """
    changes = [
        *_cluster(there, wanted),
        *_qos(there, wanted, set(managed_qos)),
        *_accounts(there, wanted, set(managed)),
        *_users(there, wanted, set(managed)),
        *_reservations(there, wanted),
        *_files(there, wanted),
    ]
    return sorted(changes, key=lambda change: _ORDER.index(change.kind))


def _pairs(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    keys = dict.fromkeys([*new, *old])
    return {key: (old.get(key, ""), new.get(key, "")) for key in keys if old.get(key, "") != new.get(key, "")}


def _cluster(there: State, wanted: State) -> list[Change]:
    if "GrpSubmitJobs" not in wanted.root_limits and not wanted.accounts:
        return []
    fields = _pairs(
        {"GrpSubmitJobs": there.root_limits.get("GrpSubmitJobs", "")},
        {"GrpSubmitJobs": wanted.root_limits.get("GrpSubmitJobs", "")},
    )
    return [Change("cluster", "change", "root", fields)] if fields else []


def _qos(there: State, wanted: State, managed: set[str]) -> list[Change]:
    changes = []
    for name, fields in wanted.qos.items():
        if name not in there.qos:
            changes.append(Change("qos", "add", name, _pairs({}, fields)))
        elif pairs := _pairs(there.qos[name], fields):
            changes.append(Change("qos", "change", name, pairs))
    used = {name for account in wanted.accounts.values() for name in (*account.qos, account.default_qos)}
    used |= {name for user in wanted.users.values() for name in user.limits.get("qos", "").split(",")}
    gone = (managed | {OVER_QOS}) - set(wanted.qos) - used
    return changes + [Change("qos", "remove", name) for name in there.qos if name in gone]


def account_fields(state: AccountState) -> dict[str, str]:
    """An account as sacctmgr's options."""
    return {
        "parent": state.parent,
        "description": state.description,
        "organization": state.organization,
        "fairshare": state.shares,
        "qos": ",".join(state.qos),
        "defaultqos": state.default_qos,
        "coordinators": ",".join(sorted(state.coordinators)),
        **state.limits,
    }


def user_fields(state: UserState) -> dict[str, str]:
    """A user in an account as sacctmgr's options."""
    return {"fairshare": state.shares, **state.limits}


def _accounts(there: State, wanted: State, managed: set[str]) -> list[Change]:
    changes = []
    for name, state in wanted.accounts.items():
        if name not in there.accounts:
            changes.append(Change("account", "add", name, _pairs({}, account_fields(state))))
        elif pairs := _pairs(account_fields(there.accounts[name]), account_fields(state)):
            changes.append(Change("account", "change", name, pairs))
    gone = [name for name in there.accounts if name in managed and name not in wanted.accounts]
    return changes + [Change("account", "remove", name) for name in reversed(gone)]


def _users(there: State, wanted: State, managed: set[str]) -> list[Change]:
    changes = []
    for (account, user), state in wanted.users.items():
        old = there.users.get((account, user))
        name = f"{user}@{account}"
        if old is None:
            changes.append(Change("user", "add", name, _pairs({}, user_fields(state))))
        elif pairs := _pairs(user_fields(old), user_fields(state)):
            changes.append(Change("user", "change", name, pairs))
    for account, user in there.users:
        if (account, user) not in wanted.users and (account in wanted.accounts or account in managed):
            changes.append(Change("user", "remove", f"{user}@{account}"))
    return changes


def _reservations(there: State, wanted: State) -> list[Change]:
    def fields(state: ReservationState) -> dict[str, str]:
        return {
            "accounts": ",".join(sorted(state.accounts)),
            "users": ",".join(sorted(state.users)),
            "nodes": str(state.nodes),
            "feature": state.feature,
            "flags": "MAGNETIC" if state.magnetic else "",
            "ends": "in a year" if state.lasting else "within a month",
        }

    changes = []
    for name, state in wanted.reservations.items():
        old = there.reservations.get(name)
        if old is None:
            changes.append(Change("reservation", "add", name, _pairs({}, fields(state))))
        elif pairs := _pairs(fields(old), fields(state)):
            changes.append(Change("reservation", "change", name, pairs))
    gone = [name for name in there.reservations if name not in wanted.reservations]
    return changes + [Change("reservation", "remove", name) for name in gone]


def _files(there: State, wanted: State) -> list[Change]:
    changes = []
    for path, text in wanted.files.items():
        old = there.files.get(path, "")
        if old != text:
            action: Action = "change" if path in there.files else "add"
            changes.append(Change("file", action, str(path), {"content": (old, text)}))
    return changes


def read_files(wanted: Mapping[Path, str]) -> dict[Path, str]:
    """The files that are there. One that this user may not read is taken to be as it is wanted."""
    found = {}
    for path, text in wanted.items():
        try:
            found[path] = path.read_text(errors="replace")
        except PermissionError:
            found[path] = text
        except OSError:
            continue
    return found


def _text_difference(old: str, new: str, most: int = 40) -> list[str]:
    lines = [
        line
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    rest = [f"... {len(lines) - most} more lines"] if len(lines) > most else []
    return lines[:most] + rest


def show(changes: Iterable[Change]) -> list[str]:
    """All changes for people; many additions of users are one line an account."""
    lines: list[str] = []
    added: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        if change.kind == "user" and change.action != "change":
            added.setdefault((change.action, change.account), []).append(change.user)
            continue
        lines += change.lines()
    for (action, account), users in added.items():
        sign = "+" if action == "add" else "-"
        names = ", ".join(users[:8]) + (f" and {len(users) - 8} more" if len(users) > 8 else "")
        lines.append(f"{sign} members of {account}: {names}")
    return lines


def summary(changes: Iterable[Change]) -> str:
    """One line: how much of what."""
    counts: dict[str, int] = {}
    for change in changes:
        counts[change.action] = counts.get(change.action, 0) + 1
    words = {"add": "to add", "change": "to change", "remove": "to remove"}
    return ", ".join(f"{count} {words[action]}" for action, count in counts.items()) or "nothing to do"
