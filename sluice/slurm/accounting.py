"""Slurm's accounting database through sacctmgr: who may use what, and changes of it.

Changes run as the invoking user: slurmdbd decides whether they are allowed. They are sent through one session after
another, never at the same time: concurrent additions deadlock in slurmdbd's database and end the daemon (22.05.8). New
accounts and users go through ``sacctmgr load``, which takes thousands in one message; a session remembers the QOS that
it has seen first, so that QOS are made in one of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.slurm.answers import parse_tres
from sluice.slurm.commands import Commands
from sluice.slurm.text import parse_duration

LIMITS = {
    "grptres": "GrpTRES",
    "grptresmins": "GrpTRESMins",
    "grptresrunmins": "GrpTRESRunMins",
    "grpjobs": "GrpJobs",
    "grpsubmit": "GrpSubmitJobs",
    "grpwall": "GrpWall",
    "maxtresperjob": "MaxTRESPerJob",
    "maxtresmins": "MaxTRESMinsPerJob",
    "maxtrespernode": "MaxTRESPerNode",
    "maxjobs": "MaxJobs",
    "maxsubmit": "MaxSubmitJobs",
    "maxwall": "MaxWall",
    "priority": "Priority",
}
"""Limits of an association: sacctmgr's column, and the option that sets it."""
QOS_FIELDS = {
    "priority": "Priority",
    "gracetime": "GraceTime",
    "preempt": "Preempt",
    "preemptexempttime": "PreemptExemptTime",
    "preemptmode": "PreemptMode",
    "flags": "Flags",
    "grptres": "GrpTRES",
    "grptresmins": "GrpTRESMins",
    "grptresrunmins": "GrpTRESRunMins",
    "grpjobs": "GrpJobs",
    "grpsubmit": "GrpSubmitJobs",
    "grpwall": "GrpWall",
    "maxtres": "MaxTRESPerJob",
    "maxtresmins": "MaxTRESMinsPerJob",
    "maxtrespernode": "MaxTRESPerNode",
    "maxtrespa": "MaxTRESPA",
    "maxtrespu": "MaxTRESPU",
    "mintres": "MinTRESPerJob",
    "maxjobspa": "MaxJobsPerAccount",
    "maxjobspu": "MaxJobsPerUser",
    "maxsubmitpa": "MaxSubmitJobsPerAccount",
    "maxsubmitpu": "MaxSubmitJobsPerUser",
    "maxwall": "MaxWall",
    "usagefactor": "UsageFactor",
    "limitfactor": "LimitFactor",
}
"""Fields of a QOS: sacctmgr's column, and the option that sets it."""
TRES_OPTIONS = frozenset({
    "GrpTRES", "GrpTRESMins", "GrpTRESRunMins", "MaxTRESPerJob", "MaxTRESMinsPerJob", "MaxTRESPerNode", "MaxTRESPA",
    "MaxTRESPU", "MinTRESPerJob",
})  # fmt: skip
_LEVELS = {"None": 0, "Operator": 1, "Administrator": 2}
_MOST_LINE = 3000  # characters; sacctmgr without readline reads 4,095
_SESSION_S = 1800.0


@dataclass(frozen=True, slots=True)
class Association:
    """An account (user empty) or a user in one, with the limits set there and not inherited."""

    account: str
    user: str
    partition: str
    parent: str  # of an account
    shares: str  # a number, or "parent"
    limits: Mapping[str, str] = field(default_factory=dict)  # by LIMITS' options, as `canonical` writes them
    qos: tuple[str, ...] = ()  # set here; empty: inherited
    default_qos: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """An account's description."""

    description: str
    organization: str
    coordinators: frozenset[str]  # those of the accounts above included


@dataclass(frozen=True, slots=True)
class Use:
    """What an association's jobs use now, and have used."""

    account: str
    user: str
    running: int
    submitted: int
    tres: Mapping[str, int]  # allocated now
    tres_minutes: Mapping[str, float]  # used, decayed as the site does
    shares_raw: int = 0
    usage_raw: float = 0.0


def canonical(option: str, value: str) -> str:
    """One spelling for each value of an option: TRES sorted, times in minutes; empty where there is none."""
    if value in ("", "-1", "UNLIMITED", "INFINITE"):
        return ""
    if option in TRES_OPTIONS:
        return ",".join(f"{name}={count}" for name, count in sorted(parse_tres(value).items()))
    if option in ("MaxWall", "GrpWall", "PreemptExemptTime", "GraceTime"):
        seconds = parse_duration(value)
        if seconds is None:
            return value
        if option in ("GraceTime", "PreemptExemptTime"):
            return str(seconds)
        return str(seconds // 60)
    if option in ("Preempt", "Flags"):
        return ",".join(sorted(word for word in value.split(",") if word))
    if option in ("UsageFactor", "LimitFactor"):
        return f"{float(value):g}"
    return value.lower() if option == "PreemptMode" else value


class Accounting:
    """The accounting database of one cluster. All raise SluiceError with Slurm's message."""

    def __init__(self, commands: Commands | None = None) -> None:
        self.commands = commands or Commands()

    # ---- reading ----

    def associations(self, cluster: str) -> list[Association]:
        """All associations of a cluster, parents before children."""
        columns = ("account", "user", "partition", "parentname", "share", *LIMITS, "qos", "defaultqos")
        rows = self._show("association", columns, "where", f"cluster={cluster}", "woplimits")
        found = []
        for row in rows:
            value = dict(zip(columns, row, strict=True))
            limits = {option: canonical(option, value[column]) for column, option in LIMITS.items() if value[column]}
            limits = {option: text for option, text in limits.items() if text and (option, text) != ("Priority", "0")}
            qos = tuple(sorted(word for word in value["qos"].split(",") if word))
            found.append(
                Association(
                    value["account"],
                    value["user"],
                    value["partition"],
                    value["parentname"],
                    value["share"],
                    limits,
                    qos,
                    value["defaultqos"],
                )
            )
        return found

    def accounts(self) -> dict[str, Account]:
        """The accounts' descriptions and coordinators."""
        found = {}
        for line in self._lines("show", "account", "withcoord", "format=account,coord,org,descr"):
            name, coordinators, organization, *rest = line.split("|")
            found[name] = Account("|".join(rest), organization, frozenset(filter(None, coordinators.split(","))))
        return found

    def qos(self) -> dict[str, dict[str, str]]:
        """All QOS: their set fields, by sacctmgr's options."""
        found = {}
        for name, *values in self._show("qos", ("name", *QOS_FIELDS)):
            fields = zip(QOS_FIELDS.values(), values, strict=True)
            set_fields = {option: canonical(option, value) for option, value in fields}
            unset = {("Priority", "0"), ("GraceTime", "0"), ("PreemptMode", "cluster"), ("UsageFactor", "1")}
            found[name] = {option: text for option, text in set_fields.items() if text and (option, text) not in unset}
        return found

    def tres(self) -> frozenset[str]:
        """The TRES that are counted, e.g. ``gres/gpu:h100``."""
        return frozenset(f"{kind}/{name}" if name else kind for kind, name in self._show("tres", ("type", "name")))

    def cluster_exists(self, cluster: str) -> bool:
        """Whether the database knows the cluster."""
        return any(row[0] == cluster for row in self._show("cluster", ("cluster",)))

    def level(self, user: str) -> tuple[int, frozenset[str]]:
        """A user's AdminLevel (0 none, 1 operator, 2 administrator), and the accounts that it coordinates."""
        lines = self._lines("show", "user", "where", f"name={user}", "withcoord", "format=user,admin,coord")
        for line in lines:
            name, level, coordinated = [*line.split("|"), "", ""][:3]
            if name == user:
                return _LEVELS.get(level, 0), frozenset(filter(None, coordinated.split(",")))
        return 0, frozenset()

    def levels(self) -> dict[str, int]:
        """The AdminLevel of every user that has one above none."""
        rows = (line.split("|") for line in self._lines("show", "user", "format=user,admin"))
        return {row[0]: _LEVELS[row[1]] for row in rows if len(row) == 2 and _LEVELS.get(row[1])}

    def default_accounts(self, users: Iterable[str]) -> dict[str, str]:
        """The default account of each of the users that the database knows."""
        names = sorted(set(users))
        found: dict[str, str] = {}
        for chunk in chunks(names):
            rows = self._show("user", ("user", "defaultaccount"), "where", f"name={','.join(chunk)}")
            found.update((user, account) for user, account in rows)
        return found

    def use(self, accounts: Iterable[str] = ()) -> list[Use]:
        """What associations use now, from slurmctld."""
        words = ["show", "assoc_mgr", "flags=assoc"]
        if names := ",".join(accounts):
            words.append(f"accounts={names}")
        text = self.commands.output("scontrol", *words)
        return [_use(record) for record in re.split(r"\n(?=ClusterName=)", text) if record.startswith("ClusterName=")]

    def _lines(self, *words: str) -> list[str]:
        return self.commands.output("sacctmgr", "--noheader", "--parsable2", *words).splitlines()

    def _show(self, entity: str, columns: Sequence[str], *words: str) -> list[list[str]]:
        rows = [line.split("|") for line in self._lines("show", entity, *words, f"format={','.join(columns)}")]
        for row in rows:
            if len(row) != len(columns):
                raise SluiceError(f"sacctmgr show {entity}: {one_line('|'.join(row))!r} has {len(row)} fields")
        return rows

    # ---- changing ----

    def session(self, lines: Sequence[str]) -> None:
        """Run sacctmgr's commands one after another. Raises SluiceError with the first that failed, after all ran."""
        if not lines:
            return
        for line in lines:
            if re.search(r"[\x00-\x1f\x7f]", line) or line.startswith(("!", "#")):
                raise SluiceError(f"sacctmgr {one_line(line)!r}: control characters")
        done = self.commands.run(
            "sacctmgr",
            "--immediate",
            "--quiet",
            check=False,
            input_text="\n".join([*lines, "quit", ""]),
            timeout=_SESSION_S,
        )
        if done.returncode == 0 and "error:" not in done.stderr + done.stdout:
            return
        said = _failure(done.stdout + done.stderr)
        raise SluiceError(f"sacctmgr: {said}", remedy="later steps were not started; correct it and apply again")

    def load(self, cluster: str, text: str) -> None:
        """Add the accounts and users of a file in the form of ``sacctmgr dump``; those that exist must be left out."""
        done = self.commands.run(
            "sacctmgr",
            "--immediate",
            "--quiet",
            "load",
            "file=/dev/stdin",
            check=False,
            input_text=f"Cluster - '{cluster}'\n{text}",
            timeout=_SESSION_S,
        )
        output = done.stdout + done.stderr
        if done.returncode != 0 or "error:" in output or "Problem" in output:
            raise SluiceError(f"sacctmgr load: {_failure(output)}", remedy="correct it and apply again")


def chunks(names: Sequence[str], most: int = _MOST_LINE) -> list[list[str]]:
    """The names in groups whose list, joined by commas, fits one line."""
    found: list[list[str]] = []
    length = most
    for name in names:
        if length + len(name) + 1 > most:
            found.append([])
            length = 0
        found[-1].append(name)
        length += len(name) + 1
    return found


def _failure(output: str) -> str:
    """The command that failed and what was said of it."""
    command = ""
    for line in output.splitlines():
        if line.startswith("sacctmgr: ") and not line.startswith("sacctmgr: error:"):
            command = line.removeprefix("sacctmgr: ")
        elif re.search(r"error:|Problem|Unknown|don't|doesn't|Nothing|not |bad |non-existent|Error|denied", line):
            said = line.removeprefix("sacctmgr: ").strip()
            return one_line(f"{command}: {said}" if command not in ("", "quit") else said, limit=600)
    return one_line(output[-300:]) or "failed without a message"


def _use(record: str) -> Use:
    def counted(key: str) -> dict[str, float]:
        match = re.search(rf"(?:^|\s){key}=(\S*)", record)
        pairs = re.findall(r"([^=,]+)=[^(,]*\(([\d.]+)\)", match[1] if match else "")
        return {name: float(used) for name, used in pairs}

    def number(pattern: str) -> float:
        match = re.search(pattern, record)
        return float(match[1]) if match else 0.0

    head = dict(re.findall(r"(\w+)=(\S*)", record.splitlines()[0]))
    return Use(
        account=head.get("Account", ""),
        user=head.get("UserName", "").partition("(")[0],
        running=int(number(r"\sGrpJobs=[^(]*\((\d+)\)")),
        submitted=int(number(r"\sGrpSubmitJobs=[^(]*\((\d+)\)")),
        tres={name: int(used) for name, used in counted("GrpTRES").items()},
        tres_minutes=counted("GrpTRESMins"),
        shares_raw=int(number(r"SharesRaw/Norm/Level/Factor=(\d+)")),
        usage_raw=number(r"UsageRaw/Norm/Efctv=([\d.]+)"),
    )
