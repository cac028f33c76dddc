"""Making the changes.

Order: first what is added and set, then what is cleared, last what is removed; so no limit is removed before its
replacement is set. The next `sluice plan` compares each step with the cluster again, so the next apply finishes one
that was ended at any point.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from policy.changes import Change
from policy.live import Cluster, Live
from policy.names import OVER_QOS
from policy.service_jobs import CALLERS_FILE
from policy.state import SNIPPET, State
from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange.serving import REPLICAD_USER
from sluice.slurm.accounting import TRES_OPTIONS, chunks
from sluice.slurm.answers import Job

Progress = Callable[[str], None]
_LOAD_NAMES = {
    "MaxWall": "MaxWallDurationPerJob",
    "description": "Description",
    "organization": "Organization",
    "fairshare": "Fairshare",
    "qos": "QOS",
    "defaultqos": "DefaultQOS",
}
_QUIET_S = 0.5  # between two looks at draining jobs


class Applier:
    """One apply."""

    def __init__(
        self, cluster: Cluster, live: Live, wanted: State, progress: Progress | None = None, *, load: bool = True
    ) -> None:
        self.load = load
        self.cluster = cluster
        self.live = live
        self.wanted = wanted
        self.progress = progress or (lambda _: None)

    # ---- before anything is changed ----

    def refuse_impossible(self, changes: Iterable[Change]) -> None:
        """Raise SluiceError for what cannot be done, before anything is."""
        changes = list(changes)
        needed: dict[str, str] = {}
        for change in changes:
            for option, (_, new) in change.fields.items():
                if option in TRES_OPTIONS:
                    for pair in filter(None, new.split(",")):
                        needed.setdefault(pair.partition("=")[0], f"{change.kind} {change.name}")
        missing = sorted(set(needed) - self.live.tres)
        if missing:
            raise SluiceError(
                f"Slurm does not count {', '.join(missing)} (needed by {needed[missing[0]]})",
                remedy=f"put AccountingStorageTRES of {SNIPPET} into slurm.conf (sluice plan --snippet prints it), "
                "restart slurmctld, and apply again",
            )
        for change in changes:
            if change.kind == "file":
                folder = Path(change.name).parent
                if not os.access(folder, os.W_OK):
                    raise SluiceError(
                        f"{change.name}: you may not write in {folder}",
                        remedy="apply as a user who may write there (root), on a host where it is slurm.conf's folder",
                    )

    def jobs_in_the_way(self, changes: Iterable[Change]) -> list[Job]:
        """Jobs of what is to be removed."""
        accounts = {change.name for change in changes if change.kind == "account" and change.action == "remove"}
        users = {
            (change.account, change.user) for change in changes if change.kind == "user" and change.action == "remove"
        }
        if not accounts and not users:
            return []
        return [
            job for job in self.cluster.client.jobs() if job.account in accounts or (job.account, job.user) in users
        ]

    def drain(self, changes: list[Change], patience: float) -> None:
        """Let what is to be removed submit nothing more, cancel what waits, give what runs `patience` seconds."""
        accounts = [change.name for change in changes if change.kind == "account" and change.action == "remove"]
        users = [change for change in changes if change.kind == "user" and change.action == "remove"]
        lines = [f"modify account where name={','.join(chunk)} set GrpSubmitJobs=0" for chunk in chunks(accounts)]
        lines += [
            f"modify user where name={change.user} account={change.account} set MaxSubmitJobs=0"
            for change in users
            if change.account not in accounts
        ]
        self.cluster.accounting.session(lines)
        deadline = time.monotonic() + patience
        self.cluster.control.cancel(self.jobs_in_the_way(changes), only_waiting=True)
        while jobs := self.jobs_in_the_way(changes):
            if time.monotonic() > deadline:
                self.progress(f"cancelled {len(jobs)} jobs")
                self.cluster.control.cancel(jobs)
                deadline += 120
                if time.monotonic() > deadline:
                    raise SluiceError(f"job {jobs[0].id} does not end", remedy="see: scontrol show job; apply again")
            time.sleep(_QUIET_S)

    # ---- the steps ----

    def run(self, changes: list[Change]) -> None:
        """Make all changes. Raises SluiceError with Slurm's message; what was done stays done."""
        of = _Grouped(changes)
        first = [one for one in of["qos", "add"] if one.name == OVER_QOS]  # the others name it
        self.step("QOS", self.qos_additions(first))
        rest = [one for one in of["qos", "add"] if one.name != OVER_QOS]
        self.step("QOS", self.qos_additions(rest) + self.settings("qos", of["qos", "change"]))
        self.additions(of["account", "add"], of["user", "add"])
        self.step(
            "limits",
            self.coordinators(of["account", "add"] + of["account", "change"], adding=True)
            + self.settings("account", of["account", "change"])
            + self.user_settings(of["user", "change"])
            + self.root(of["cluster", "change"], clearing=False),
        )
        self.reservations(of["reservation", "add"] + of["reservation", "change"])
        self.files([*of["file", "add"], *of["file", "change"]])
        self.step(
            "limits to clear",
            self.clearings("qos", of["qos", "change"])
            + self.clearings("account", of["account", "change"])
            + self.user_clearings(of["user", "change"])
            + self.root(of["cluster", "change"], clearing=True)
            + self.coordinators(of["account", "change"], adding=False),
        )
        self.removals(of)

    def step(self, what: str, lines: list[str]) -> None:
        """Run one session."""
        if lines:
            self.progress(f"{what}: {len(lines)} command{'s' if len(lines) > 1 else ''}")
            self.cluster.accounting.session(lines)

    def qos_additions(self, changes: list[Change]) -> list[str]:
        """Commands for new QOS."""
        return [
            f"add qos {','.join(chunk)} {options}".rstrip()
            for options, names in _alike(changes, lambda one: _options(_new(one))).items()
            for chunk in chunks(names)
        ]

    def settings(self, entity: str, changes: list[Change]) -> list[str]:
        """Fields that get a value."""
        return [
            f"modify {entity} where name={','.join(chunk)} set {options}"
            for options, names in _alike(changes, lambda one: _options(_new(one, skip=("coordinators",)))).items()
            if options
            for chunk in chunks(names)
        ]

    def clearings(self, entity: str, changes: list[Change]) -> list[str]:
        """Fields, and single TRES of a field, that lose their value."""
        return [
            f"modify {entity} where name={','.join(chunk)} set {options}"
            for options, names in _alike(changes, _cleared).items()
            if options
            for chunk in chunks(names)
        ]

    def user_settings(self, changes: list[Change]) -> list[str]:
        """Fields of members that get a value."""
        return self._users(changes, lambda one: _options(_new(one)))

    def user_clearings(self, changes: list[Change]) -> list[str]:
        """Fields of members that lose their value."""
        return self._users(changes, _cleared)

    def _users(self, changes: list[Change], options_of: Callable[[Change], str]) -> list[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for change in changes:
            if options := options_of(change):
                groups.setdefault((change.account, options), []).append(change.user)
        return [
            f"modify user where name={','.join(chunk)} account={account} set {options}"
            for (account, options), users in groups.items()
            for chunk in chunks(users)
        ]

    def root(self, changes: list[Change], *, clearing: bool) -> list[str]:
        """Commands for the limits of the whole cluster."""
        lines = []
        for change in changes:
            options = _cleared(change) if clearing else _options(_new(change))
            if options:
                lines.append(f"modify account where name=root cluster={self.live.name} set {options}")
        return lines

    def coordinators(self, changes: list[Change], *, adding: bool) -> list[str]:
        """Coordinators of the accounts above are coordinators of an account without being named."""
        lines = []
        for change in changes:
            if "coordinators" not in change.fields:
                continue
            old, new = (set(filter(None, text.split(","))) for text in change.fields["coordinators"])
            state = self.wanted.accounts[change.name]
            above = self.wanted.accounts[state.parent].coordinators if state.parent in self.wanted.accounts else set()
            there = self.live.state.accounts
            before = there[state.parent].coordinators if state.parent in there else set()
            users = sorted((new - old - above) if adding else (old - new - before))
            if users and adding:
                lines.append(f"add coordinator account={change.name} names={','.join(users)}")
            elif users:
                lines.append(f"remove coordinator account={change.name} names={','.join(users)}")
        return lines

    def additions(self, accounts: list[Change], users: list[Change]) -> None:
        """New accounts and members, in one message."""
        if not accounts and not users:
            return
        lines: list[str] = []
        parents: dict[str, list[str]] = {}
        for change in accounts:
            fields = _new(change, skip=("parent", "coordinators"))
            parents.setdefault(self.wanted.accounts[change.name].parent, []).append(
                f"Account - '{change.name}':{_load_options(fields)}"
            )
        for parent, children in parents.items():
            lines += [f"Parent - '{parent}'", *children]
        default = self.live_defaults(users)
        members: dict[str, list[str]] = {}
        for change in users:
            home = default.setdefault(change.user, change.account)
            members.setdefault(change.account, []).append(
                f"User - '{change.user}':DefaultAccount='{home}':{_load_options(_new(change))}"
            )
        for account, rows in members.items():
            lines += [f"Parent - '{account}'", *rows]
        self.progress(f"{len(accounts)} accounts and {len(users)} members to add")
        if self.load:
            self.cluster.accounting.load(self.live.name, "\n".join(lines) + "\n")
        else:
            self.cluster.accounting.session(self.single_additions(accounts, users))

    def single_additions(self, accounts: list[Change], users: list[Change]) -> list[str]:
        """The same by one command for each account and group of equal members: only administrators may load."""
        lines = [
            f"add account name={one.name} parent={self.wanted.accounts[one.name].parent} "
            + _options(_new(one, skip=("parent", "coordinators")))
            for one in accounts
        ]
        groups: dict[tuple[str, str], list[str]] = {}
        for change in users:
            groups.setdefault((change.account, _options(_new(change))), []).append(change.user)
        return lines + [
            f"add user name={','.join(chunk)} account={account} {options}".rstrip()
            for (account, options), names in groups.items()
            for chunk in chunks(names)
        ]

    def live_defaults(self, users: list[Change]) -> dict[str, str]:
        """The default accounts of users who have one that stays theirs."""
        names = {change.user for change in users}
        known = {user for _, user in self.live.state.users} & names
        return self.cluster.accounting.default_accounts(known) if known else {}

    def reservations(self, changes: list[Change]) -> None:
        """Make and change reservations."""
        for change in changes:
            state = self.wanted.reservations[change.name]
            remade = change.action == "change" and "feature" in change.fields
            if remade:
                self.cluster.control.delete_reservation(change.name)
            if change.action == "add" or remade:
                self.cluster.control.create_reservation(
                    change.name, accounts=state.accounts, nodes=state.nodes, feature=state.feature, flags=["MAGNETIC"]
                )
            else:
                self.cluster.control.update_reservation(
                    change.name,
                    accounts=state.accounts,
                    nodes=state.nodes,
                    flags=["MAGNETIC"],
                    users_to_drop=self.live.state.reservations[change.name].users,
                )
            self.progress(f"reservation {change.name}: {state.nodes} nodes")

    def files(self, changes: list[Change]) -> None:
        """Write files next to slurm.conf; slurmctld reads the snippet where slurm.conf includes it."""
        for change in changes:
            path = Path(change.name)
            private = path.name == CALLERS_FILE
            write_atomic(path, change.fields["content"][1], mode=0o640 if private else 0o644)
            if private:
                _let_replicad_read(path)
            self.progress(f"wrote {path}")
        if any(Path(change.name).name == SNIPPET for change in changes) and includes_snippet(self.live.folder):
            self.cluster.control.reconfigure()
            self.progress("slurmctld reads its configuration again")

    def removals(self, of: _Grouped) -> None:
        """Removals: members, accounts, QOS, reservations."""
        users = of["user", "remove"]
        lines = self.member_removals(users) if users else []
        lines += [f"remove account where name={one.name}" for one in of["account", "remove"]]
        self.step("to remove", lines + [f"remove qos where name={one.name}" for one in of["qos", "remove"]])
        for change in of["reservation", "remove"]:
            self.cluster.control.delete_reservation(change.name)
            self.progress(f"reservation {change.name} ended")

    def member_removals(self, removed: list[Change]) -> list[str]:
        """Slurm keeps a default account while its user has another: make that the default, or remove it last."""
        leaving: dict[str, set[str]] = {}
        for change in removed:
            leaving.setdefault(change.user, set()).add(change.account)
        staying: dict[str, str] = {}
        wanted = [*self.live.state.users, *self.wanted.users, *(("root", user) for user in self.live.state.root_users)]
        for account, user in wanted:
            if user in leaving and account not in leaving[user]:
                staying.setdefault(user, account)
        default = self.cluster.accounting.default_accounts(leaving)
        lines = [
            f"modify user where name={user} set defaultaccount={staying[user]}"
            for user, account in default.items()
            if account in leaving[user] and user in staying
        ]
        last = [one for one in removed if default.get(one.user) == one.account and one.user not in staying]
        for changes in ([one for one in removed if one not in last], last):
            groups: dict[str, list[str]] = {}
            for change in changes:
                groups.setdefault(change.account, []).append(change.user)
            lines += [
                f"remove user where name={','.join(chunk)} account={account}"
                for account, names in groups.items()
                for chunk in chunks(names)
            ]
        return lines


def _let_replicad_read(path: Path) -> None:
    """By its group, where there is one on this host and this user may give files away."""
    with suppress(KeyError, PermissionError):
        os.chown(path, -1, pwd.getpwnam(REPLICAD_USER).pw_gid)


class _Grouped:
    """Changes by kind and action."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self._of: dict[tuple[str, str], list[Change]] = {}
        for change in changes:
            self._of.setdefault((change.kind, change.action), []).append(change)

    def __getitem__(self, key: tuple[str, str]) -> list[Change]:
        return self._of.get(key, [])


def includes_snippet(folder: Path) -> bool:
    """Whether slurm.conf includes Sluice's snippet."""
    try:
        lines = (folder / "slurm.conf").read_text(errors="replace").splitlines()
    except OSError:
        return False
    words = [line.split() for line in lines]
    return any(len(one) == 2 and one[0].lower() == "include" and Path(one[1]).name == SNIPPET for one in words)


def _alike(changes: Iterable[Change], options_of: Callable[[Change], str]) -> dict[str, list[str]]:
    """Names of changes with equal options, so that one command serves them all."""
    groups: dict[str, list[str]] = {}
    for change in changes:
        groups.setdefault(options_of(change), []).append(change.name)
    return groups


def _new(change: Change, skip: tuple[str, ...] = ()) -> dict[str, str]:
    return {key: new for key, (_, new) in change.fields.items() if new and key not in skip}


def _options(fields: Mapping[str, str]) -> str:
    return " ".join(f"{key}={_quoted(key, value)}" for key, value in fields.items())


def _quoted(key: str, value: str) -> str:
    if key == "PreemptExemptTime":  # a plain number would be minutes
        seconds = int(value)
        return f"{seconds // 3600:02}:{seconds % 3600 // 60:02}:{seconds % 60:02}"
    return f'"{value}"' if key in ("description", "organization") else value


def _load_options(fields: Mapping[str, str]) -> str:
    return ":".join(f"{_LOAD_NAMES.get(key, key)}='{value}'" for key, value in fields.items())


def _cleared(change: Change) -> str:
    """Options that remove what is not wanted any more: whole fields, or single TRES of one."""
    gone = []
    for key, (old, new) in change.fields.items():
        if key in TRES_OPTIONS:
            kept = {pair.partition("=")[0] for pair in filter(None, new.split(","))}
            names = [pair.partition("=")[0] for pair in filter(None, old.split(","))]
            if lost := [f"{name}=-1" for name in names if name not in kept]:
                gone.append(f"{key}={','.join(lost)}")
        elif old and not new and key != "coordinators":
            gone.append(f"{key}={_NONE.get(key, '-1')}")
    return " ".join(gone)


_NONE = {"qos": "", "Preempt": "", "Flags": "-1", "PreemptMode": "cluster", "Priority": "0", "GraceTime": "0",
         "UsageFactor": "1", "description": '""', "organization": '""'}  # fmt: skip
