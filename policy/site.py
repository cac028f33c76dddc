"""What `sluice plan`, `apply` and `drift` do: compares a policy file with a cluster."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy.access import ADMINISTRATOR, Caller, caller, permitted, require
from policy.apply import Applier, Progress, includes_snippet
from policy.audit import AuditLog
from policy.changes import Change, compare, read_files, summary
from policy.document import Source, load, parse
from policy.live import Cluster, Live, read_live
from policy.names import OVER_QOS
from policy.state import SNIPPET
from policy.wanted import Wanted, make
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.slurm.accounting import Use
from sluice.slurm.slurm_conf import read_config

STATE_FOLDER = Path("/var/lib/sluice")
_LISTS = ("AccountingStorageTRES", "AccountingStorageEnforce", "PreemptMode", "PrivateData", "SlurmctldParameters")
"""Of which slurmctld may have more words."""
_RECORDS = ("nodename", "partitionname", "nodeset", "downnodes", "frontendname")
"""Keys that begin lines of slurm.conf whose other keys are about one object only."""


@dataclass(slots=True)
class Applied:
    """What the last apply left."""

    tenants: list[str] = field(default_factory=list)
    qos: list[str] = field(default_factory=list)
    text: str = ""  # the policy file's
    version: str = ""
    user: str = ""
    time: float = 0.0


@dataclass(slots=True)
class Comparison:
    """A policy and the cluster, and what would change."""

    source: Source
    live: Live
    wanted: Wanted
    changes: list[Change]
    applied: Applied  # when it was made

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": 1,
            "cluster": self.live.name,
            "file": str(self.source.path),
            "version": self.source.digest,
            "changes": [change.document() for change in self.changes],
            "notes": self.wanted.notes,
        }


class Site:
    """One cluster, and where Sluice keeps what it did there."""

    def __init__(self, conf: Path | None = None, prefix: Path | None = None, state: Path | None = None) -> None:
        self.cluster = Cluster.at(conf, prefix)
        self.folder = trusted_folder(state or STATE_FOLDER)
        self.audit = AuditLog(self.folder / "audit")

    # ---- looking ----

    def applied(self) -> Applied:
        """What the last apply left; empty where there was none. Raises SluiceError when it cannot be read."""
        path = self.folder / "applied.json"
        try:
            document = json.loads(path.read_text())
            return Applied(**{key: document[key] for key in Applied.__slots__})
        except FileNotFoundError:
            return Applied()
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}", remedy="run it as a user who may read it") from error
        except (ValueError, KeyError, TypeError) as error:
            raise SluiceError(f"{path}: damaged", remedy="remove it: the next apply writes it again") from error

    def compare(self, source: Source, *, live: Live | None = None, keep_level: bool = False) -> Comparison:
        """Compare a policy with the cluster. Raises SluiceError.

        `keep_level`: the level that slurmctld is asked for stays, even if the policy sets another.
        """
        live = live or read_live(self.cluster)
        policy = source.policy.model_copy(update={"level": None}) if keep_level else source.policy
        use: list[Use] = []
        if any(tenant.budget for tenant in policy.tenants.values()):
            use = self.cluster.accounting.use(name for name in policy.tenants if name in live.state.accounts)
        wanted = make(policy, live, use=use)
        if keep_level and source.policy.level not in (None, live.level()):
            wanted.notes.append(
                f"level is {live.level()}, the policy file says {source.policy.level}: left as it is; "
                "sluice apply of the file sets it"
            )
        live.state.files = read_files(wanted.state.files)
        applied = self.applied()
        managed = set(applied.tenants)
        if policy.unlisted == "remove":
            managed |= set(live.state.accounts)
        managed |= _below(live, managed - set(wanted.state.accounts)) - set(wanted.state.accounts)
        changes = compare(live.state, wanted.state, managed=managed, managed_qos=applied.qos)
        wanted.notes += _not_in_force(live, wanted)
        wanted.notes += _given_twice(live, wanted)
        others = [name for name in live.state.accounts if name not in wanted.state.accounts and name not in managed]
        wanted.notes += [
            f"user {odd.user} in {odd.account}, partition {odd.partition}: an association of its own that the file "
            "does not manage, so max_gpus_per_user does not hold there"
            for odd in live.odd_users[:10]
        ]
        if others:
            wanted.notes.append(
                f"accounts that the file does not name, left alone: {', '.join(others[:10])}"
                + (f" and {len(others) - 10} more" if len(others) > 10 else "")
            )
        return Comparison(source, live, wanted, changes, applied)

    def drift(self, *, keep_level: bool = False) -> Comparison:
        """What was changed by hand since the last apply: the way back to it. Raises SluiceError without one."""
        applied = self.applied()
        if not applied.version:
            raise SluiceError("no policy was applied on this host yet", remedy="apply a policy first: sluice apply")
        path = self.folder / "applied.json"
        policy = parse(applied.text, source=f"{path}: the policy applied last")
        return self.compare(Source(path, applied.text, policy), keep_level=keep_level)

    def caller(self) -> Caller:
        """Who is calling."""
        return caller(self.cluster)

    # ---- changing ----

    def apply(
        self,
        comparison: Comparison,
        *,
        who: Caller,
        action: str = "apply",
        force: bool = False,
        drain_s: float = 300.0,
        progress: Progress | None = None,
        before: Callable[[], None] | None = None,
    ) -> tuple[list[Change], list[Change]]:
        """Make the changes that the caller may make; those made, and those left to an administrator.

        `before` is called after all checks, e.g. to write the policy file. Raises SluiceError.
        """
        require(who, action)
        tops = _tops(comparison.live, who)
        changes, left = permitted(who, comparison.changes, tops)
        if left and not who.is_admin and not changes:
            raise SluiceError(
                f"{action}: {who.user} may not change {left[0].kind} {left[0].name}",
                remedy="coordinators change members of their accounts, and the accounts below them",
            )
        load = who.level >= ADMINISTRATOR
        applier = Applier(self.cluster, comparison.live, comparison.wanted.state, progress, load=load)
        applier.refuse_impossible(changes)
        self.audit.refuse_unwritable()
        with self._alone(comparison):
            return self._apply(comparison, who, action, applier, changes, left, force, drain_s, before)

    @contextmanager
    def _alone(self, comparison: Comparison) -> Iterator[None]:
        """One apply at a time: two sacctmgr that add at the same time can end slurmdbd. Raises SluiceError.

        The lock is in a folder that only users who may write records can enter, so that no other user can hold it.
        """
        flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / "audit/.apply", flags, 0o660)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SluiceError("another apply is running", remedy="wait until it ends, and try again") from None
            if self.applied() != comparison.applied:
                raise SluiceError(
                    "somebody applied a policy since the cluster was compared with this one", remedy="try again"
                )
            yield
        finally:
            os.close(descriptor)

    def _apply(
        self,
        comparison: Comparison,
        who: Caller,
        action: str,
        applier: Applier,
        changes: list[Change],
        left: list[Change],
        force: bool,
        drain_s: float,
        before: Callable[[], None] | None,
    ) -> tuple[list[Change], list[Change]]:
        jobs = applier.jobs_in_the_way(changes)
        if jobs and not force:
            names = sorted({f"{job.user}@{job.account}" for job in jobs})
            raise SluiceError(
                f"{len(jobs)} jobs of {', '.join(names[:5])}, who are to be removed, run or wait",
                remedy="wait for them, or --force: they are drained and then cancelled",
            )
        version = comparison.source.digest
        detail = {"changes": len(changes), "summary": summary(changes), "file": str(comparison.source.path)}
        if jobs:
            detail["jobs_to_end"] = ",".join(str(one) for one in sorted(job.id for job in jobs))[:4000]
        if budgets := [note for note in comparison.wanted.notes if "budget" in note]:
            detail["budgets"] = "; ".join(budgets)[:4000]
        if unenforced := comparison.source.policy.unenforced():
            detail["accepted_unenforced"] = ",".join(unenforced)
        self.audit.append(who.user, f"{action} begun", comparison.live.name, detail, version=version)
        try:
            if before is not None:
                before()
            self.remember(comparison, who, finished=False)
            if jobs:
                applier.drain(changes, drain_s)
            applier.run(changes)
        except BaseException as error:
            with suppress(OSError, SluiceError):
                self.audit.append(
                    who.user, f"{action} failed", comparison.live.name, {"error": str(error)[:1000]}, version=version
                )
            raise
        for change in changes:
            if change.kind != "user" or change.action == "change":
                self.audit.append(
                    who.user, f"{change.action} {change.kind}", change.name, _audited(change), version=version
                )
        for account, users in _members(changes).items():
            self.audit.append(who.user, "change members", account, users, version=version)
        self.audit.append(who.user, action, comparison.live.name, detail, version=version)
        if not left:
            self.remember(comparison, who, finished=True)
        return changes, left

    def remember(self, comparison: Comparison, who: Caller, *, finished: bool) -> None:
        """Write what is applied. Until it is finished, what was managed before stays managed: it may still go."""
        old = self.applied()
        tenants, qos = list(comparison.wanted.state.accounts), list(comparison.wanted.state.qos)
        if not finished:
            tenants, qos = sorted({*old.tenants, *tenants}), sorted({*old.qos, *qos})
        document = {
            "tenants": tenants,
            "qos": qos,
            "text": comparison.source.text if finished else old.text,
            "version": comparison.source.digest if finished else old.version,
            "user": who.user if finished else old.user,
            "time": time.time() if finished else old.time,
        }
        write_atomic(self.folder / "applied.json", json.dumps(document) + "\n", mode=0o644)


def trusted_folder(folder: Path) -> Path:
    """The state folder. Raises UsageError for one that any user could have forged.

    Nobody may avoid the records by naming another folder.
    """
    if os.getuid() == 0:
        return folder
    try:
        status = folder.stat()
    except OSError:
        return folder
    if status.st_uid == os.getuid() or status.st_mode & stat.S_IWOTH:
        raise UsageError(
            f"--state-dir {folder}: belongs to you, or anybody may write there",
            remedy=f"leave the option out: Sluice keeps its state in {STATE_FOLDER}",
        )
    return folder


def load_source(path: Path) -> Source:
    """A policy file. Raises PolicyError."""
    return load(path)


def _tops(live: Live, who: Caller) -> list[str]:
    """The accounts at the top of a coordinator's subtrees."""
    return [
        name
        for name in who.coordinates
        if name not in live.state.accounts or live.state.accounts[name].parent not in who.coordinates
    ]


def _below(live: Live, managed: set[str]) -> set[str]:
    """Accounts below managed ones: they cannot stay when those are removed."""
    found: set[str] = set()
    for name, state in live.state.accounts.items():
        if state.parent in managed or state.parent in found:
            found.add(name)
    return found


def _settings(wanted: Wanted) -> dict[str, str]:
    """What the snippet sets."""
    text = next((text for path, text in wanted.state.files.items() if path.name == SNIPPET), "")
    pairs = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {key: value for key, equals, value in pairs if equals}


def _given_twice(live: Live, wanted: Wanted) -> list[str]:
    """What slurm.conf sets itself in addition to the snippet that it includes: Slurm takes the last one, and warns."""
    if not includes_snippet(live.folder):
        return []
    ours = {key.lower(): f"{key}={value}" for key, value in _settings(wanted).items()}
    lines = read_config(live.folder / "slurm.conf").lines
    theirs = [
        value
        for line in lines
        if line.place.file.name != SNIPPET and line.head.key.lower() not in _RECORDS
        for value in line.pairs
        if value.key.lower() in ours
    ]
    return [
        f"{one.place}: remove {one.key}={one.text}: {ours[one.key.lower()]} is in {SNIPPET}, and the last one counts"
        for one in theirs
    ]


def _not_in_force(live: Live, wanted: Wanted) -> list[str]:
    """Settings of the snippet that slurmctld does not have."""
    missing = []
    config = {key.lower(): value for key, value in live.config.items()}  # scontrol writes PriorityWeightFairShare
    for key, value in _settings(wanted).items():
        now = config.get(key.lower(), "")
        if not _same_setting(key, value, now):
            missing.append(f"{key} is {now or 'unset'}, wanted {value}")
    if not missing:
        return []
    how = "apply it" if includes_snippet(live.folder) else f"add to slurm.conf: Include {SNIPPET}"
    return [f"not in force: {'; '.join(missing)}. {how}; AccountingStorageTRES and PreemptType need a restart"]


def _same_setting(key: str, wanted: str, now: str) -> bool:
    if key in _LISTS:
        return set(wanted.lower().split(",")) <= set(now.lower().split(","))
    if key.endswith(("Timeout", "Rate")):  # shown as "6 sec", "0 nodes/min"
        return wanted == now.partition(" ")[0]
    if wanted == "NONE":
        return now.lower() in ("", "none")
    return wanted.lower() == now.lower() or (key.startswith("Priority") and _zero(wanted) and _zero(now))


def _zero(text: str) -> bool:
    return text in ("", "0", "00:00:00", "0-00:00:00")


def _audited(change: Change) -> Mapping[str, Any]:
    if change.kind == "file":
        return {"bytes": len(change.fields["content"][1])}
    return {key: f"{old} -> {new}" for key, (old, new) in change.fields.items()}


def _members(changes: list[Change]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, list[str]]] = {}
    for change in changes:
        if change.kind == "user" and change.action != "change":
            found.setdefault(change.account, {}).setdefault(change.action, []).append(change.user)
    return {
        account: {action: ",".join(users) for action, users in actions.items()} for account, actions in found.items()
    }


__all__ = ["OVER_QOS", "STATE_FOLDER", "Applied", "Comparison", "Site", "load_source", "trusted_folder"]
