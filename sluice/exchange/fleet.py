"""What fleetd says of pools to those who only look: a file that it replaces as it changes.

`sluice pool`, `sluice explain` and the controllers' daemon read it. It has no credentials; names of machines and prices
are in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from sluice.base.errors import SluiceError, UsageError
from sluice.base.hostlist import expand

STATE = Path("/var/lib/sluice/fleet")
STATUS = STATE / "status.json"
REQUESTS = Path("/run/sluice-fleet/requests")
"""Where ResumeProgram and SuspendProgram leave their requests; SlurmUser's."""
VERSION = 1
_MOST_BYTES = 32 << 20

Stage = Literal["asked", "launched", "registered", "terminating", "gone"]
Difference = Literal[
    "none", "boots", "unanswered", "not_registered", "vanished", "not_wanted", "ending", "unknown_machine",
    "second_machine", "no_machine", "down", "down_by_operator", "other_gpus", "no_capacity", "quota", "credentials",
    "throttled", "refused", "provider", "empty_list", "not_in_slurm", "slurm_silent", "pool_closed", "no_pool",
    "broken", "notice", "at_risk", "searched",
]  # fmt: skip
DIFFERENCES: dict[Difference, tuple[str, str]] = {
    "none": ("Slurm, the journal and the provider agree", "nothing is to be done"),
    "boots": ("it was launched and has not registered yet", "wait; after boot_within it is replaced"),
    "unanswered": (
        "the provider gave no answer to a launch, so that it is not known whether there is a machine",
        "the same launch is asked for again, which makes no second machine",
    ),
    "not_registered": (
        "its slurmd did not register within boot_within",
        "the machine is ended and another one asked for; see its console at the provider",
    ),
    "vanished": (
        "the provider does not have its machine any more",
        "Slurm requeues its jobs; a new machine is asked for where Slurm wants one",
    ),
    "not_wanted": ("Slurm called the node off", "its machine is ended"),
    "ending": ("its machine is being ended", "wait until the provider does not list it any more"),
    "unknown_machine": ("a machine has the cluster's tags, and no launch in the journal asked for it", "it is ended"),
    "second_machine": ("the provider made two machines of one launch", "the second one is ended"),
    "no_machine": ("Slurm takes the node for running, and the provider has no machine", "the node is powered down"),
    "down": ("Slurm set the node DOWN", "its machine is ended and the node made available again"),
    "down_by_operator": ("a person set the node DOWN", "set it to RESUME when it may be used again"),
    "other_gpus": (
        "the machine has other GPUs than the pool promises",
        "it was ended and the node drained; mend the pool's shape or image, then: sluice pool return NODE",
    ),
    "no_capacity": (
        "the provider has no capacity in any zone for any shape of the pool",
        "it is asked again after the back-off; more zones or shapes in the policy help",
    ),
    "quota": ("the account's quota at the provider is reached", "have it raised, or lower the pool's nodes"),
    "credentials": ("the provider does not accept the credentials", "renew them; docs/elastic.md says where they are"),
    "throttled": ("the provider takes no more calls for now", "it is asked again after the back-off"),
    "refused": ("the provider refuses the request as such", "mend the pool's settings; its words say which"),
    "broken": (
        "this node's machine does not do what it is told",
        "see the words, and mend the machine or its BMC; it is asked again after the back-off",
    ),
    "provider": ("the provider or its driver fails", "see the words; it is asked again after the back-off"),
    "empty_list": (
        "the provider lists no machine, although there were some",
        "nothing is concluded from it until five lists in a row say the same",
    ),
    "searched": (
        "there was no journal of launches, and the provider is asked for machines before any is launched",
        "wait: two lists that began a minute later have to have come, or five without any machine",
    ),
    "not_in_slurm": (
        "the policy names the node, and slurmctld does not know it",
        "have Include pools.sluice.conf in slurm.conf, and restart slurmctld; in a dynamic pool see Slurm's words",
    ),
    "slurm_silent": ("slurmctld does not answer", "nothing is launched or ended until it does"),
    "pool_closed": ("the pool takes no jobs until its back-off is over", "wait; or: sluice pool return POOL"),
    "notice": (
        "the provider takes its machine back soon",
        "it takes no more jobs; those that save their state are signalled, those that may start again are requeued",
    ),
    "at_risk": (
        "the provider may take its machine back soon",
        "it takes no more jobs, and is ended when those that it has are over",
    ),
    "no_pool": (
        "its pool is not in the policy any more, or has other nodes",
        "its machine is ended; a dynamic node is drained, and deleted when its jobs are over",
    ),
}
"""The closed list: what may differ between Slurm, journal and provider, and what is done."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of a pool. Times are seconds since 1970."""

    node: str
    pool: str
    slurm: str
    """What Slurm takes it for: off, due (to be powered up), up (it waits for it), on, down, invalid, or unknown."""
    stage: Stage | None = None
    machine: str = ""
    shape: str = ""
    zone: str = ""
    since: float | None = None
    difference: Difference = "none"
    text: str = ""
    """The provider's words, or what else is to be known."""
    again: float | None = None
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """Of a shape in a zone: why its last launches came to nothing. Times are seconds since 1970."""

    shape: str
    zone: str
    difference: Difference
    text: str
    """The provider's words."""
    since: float
    times: int
    """How often in a row, as far as that makes the back-off longer."""
    again: float
    """From when on it is asked again, if a node is wanted then."""

    def words(self, now: float) -> str:
        """A line."""
        place = f" in {self.zone}" if self.zone else ""
        wait = f"asked again in {self.again - now:.0f} s" if self.again > now else "asked again with the next node"
        return f"{self.shape}{place}: {self.difference} for {max(0.0, now - self.since):.0f} s, {wait}"


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool."""

    driver: str
    nodes: str
    most: int
    least: int
    partition: str
    on: int = 0
    launching: int = 0
    ending: int = 0
    held: int = 0
    cost_hour: float = 0.0
    closed_until: float | None = None
    closed_for: Difference = "none"
    without_capacity_since: float | None = None
    boot_s: float | None = None
    """Usual time from a launch until slurmd registers, learnt."""
    problem: str = ""
    launches: int = 0
    """Machines that the provider has made, ever."""
    failures: dict[Difference, int] = field(default_factory=dict)
    """How often a launch came to nothing or a machine was lost, by difference, ever."""
    oldest_wait_since: float | None = None
    """Since when Slurm has waited for the node that it has waited for longest."""
    shortages: list[Shortage] = field(default_factory=list)
    """Of which shapes and zones there is none now, in the order in which they are asked."""


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a node's life."""

    at: float
    node: str
    pool: str
    what: str
    shape: str = ""
    zone: str = ""
    machine: str = ""
    text: str = ""


Outlook = Literal["later", "asked", "no_room", "bound"]
"""Of a start: its nodes are asked for later; they are there or asked for; not all can be had by then, or not within
what the policy allows its account, so that none is asked for."""


@dataclass(frozen=True, slots=True)
class AheadStatus:
    """A job that waits, for which nodes are asked for ahead of its start, or not."""

    job: int
    pool: str
    at: float
    """When it may start, as far as that is foreseen."""
    nodes: int
    outlook: Outlook
    after: str = ""
    """The jobs whose ends it waits for."""
    gang: bool = False


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """All of it."""

    at: float
    host: str = ""
    leads: bool = True
    slurm_at: float | None = None
    pools: dict[str, PoolStatus] = field(default_factory=dict)
    nodes: list[NodeStatus] = field(default_factory=list)
    history: list[Event] = field(default_factory=list)
    ahead: list[AheadStatus] = field(default_factory=list)
    version: int = VERSION


_SHORT: tuple[Difference, ...] = ("no_capacity", "quota", "refused", "not_registered")
"""What is a shape's in a zone, or in all."""
_MOST_SHORT = 6  # in a sentence
MOST_AGE_S = 60.0
"""An older status says nothing of now."""

_ADAPTER: TypeAdapter[FleetStatus] = TypeAdapter(FleetStatus)


def render_status(status: FleetStatus) -> bytes:
    """The file's content."""
    return _ADAPTER.dump_json(status) + b"\n"


def parse_status(text: bytes, *, source: str) -> FleetStatus:
    """Raises SluiceError."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SluiceError(
            f"{source}: {place}: {first['msg']}", remedy="install one version of Sluice and restart sluice-fleetd"
        ) from error


def read_status(path: Path = STATUS) -> FleetStatus:
    """What fleetd on this host last said. Raises SluiceError."""
    try:
        with path.open("rb") as file:
            return parse_status(file.read(_MOST_BYTES), source=str(path))
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="is sluice-fleetd running on this host?") from error


# ---- as commands and endpoints show it ----


def pool_documents(status: FleetStatus) -> list[dict[str, Any]]:
    """All pools."""
    return [{"name": name, **asdict(pool)} for name, pool in sorted(status.pools.items())]


def pool_document(status: FleetStatus, pool: str) -> dict[str, Any]:
    """One pool and its nodes. Raises UsageError for one that there is not."""
    _check_pool(status, pool)
    nodes = [asdict(one) for one in status.nodes if one.pool == pool]
    return {"name": pool, **asdict(status.pools[pool]), "node_list": nodes}


def history_document(status: FleetStatus, pool: str, node: str | None = None) -> dict[str, Any]:
    """What happened in a pool, the oldest first. Raises UsageError."""
    _check_pool(status, pool)
    events = [asdict(one) for one in status.history if one.pool == pool and node in (None, one.node)]
    return {"pool": pool, "events": events}


def why_document(status: FleetStatus, node: str) -> dict[str, Any]:
    """Why a node is as it is. Raises UsageError for one that is no pool's."""
    for one in status.nodes:
        if one.node == node:
            what, remedy = DIFFERENCES[one.difference]
            return {**asdict(one), "sentence": f"{what}{f' ({one.text})' if one.text else ''}", "remedy": remedy}
    raise UsageError(f"node {node[:80]!r}: not of a pool", remedy="sluice pool show POOL lists the nodes of each")


def nodes_named(status: FleetStatus, names: Iterable[str]) -> list[str]:
    """The nodes of pools and hostlists. Raises UsageError for a node that is no pool's."""
    known = {one.node for one in status.nodes}
    found: list[str] = []
    for name in names:
        nodes = expand(status.pools[name].nodes if name in status.pools else name)
        if unknown := [node for node in nodes if node not in known] or ([] if nodes else [name]):
            pools = ", ".join(sorted(status.pools)) or "none"
            raise UsageError(f"{unknown[0][:80]!r}: neither a pool nor a node of one", remedy=f"pools are {pools}")
        found += nodes
    return found


def _check_pool(status: FleetStatus, pool: str) -> None:
    if pool not in status.pools:
        pools = ", ".join(sorted(status.pools)) or "none"
        raise UsageError(f"pool {pool[:80]!r}: there is none of this name", remedy=f"pools are {pools}")


def waiting_words(status: FleetStatus, nodes: Iterable[str], now: float) -> list[str]:
    """What a job whose nodes these are waits for, a sentence a pool; none where all are there."""
    wanted = set(nodes)
    lines = []
    for name, pool in status.pools.items():
        mine = [one for one in status.nodes if one.pool == name and one.node in wanted]
        missing = [one for one in mine if one.slurm != "on" or one.stage not in ("registered", None)]
        if not missing:
            continue
        worst = max(missing, key=lambda one: (one.difference not in ("boots", "none"), one.since or 0.0))
        words = DIFFERENCES[worst.difference][0] if worst.difference != "none" else "asked for"
        words += _shortage_words(pool, now) if worst.difference in _SHORT else ""
        launched = [one.since for one in missing if one.stage == "launched" and one.since is not None]
        if worst.difference in ("boots", "none") and launched:
            usual = f", usually there after {pool.boot_s:.0f} s" if pool.boot_s is not None else ""
            words = f"launched {max(0.0, now - min(launched)):.0f} s ago{usual}"
        lines.append(f"waits for {len(missing)} of {len(mine)} nodes of pool {name}: {words}")
    return lines


def _shortage_words(pool: PoolStatus, now: float) -> str:
    words = [one.words(now) for one in pool.shortages[:_MOST_SHORT]]
    return f" ({'; '.join(words)})" if words else ""


def closed_words(status: FleetStatus, partitions: Iterable[str], now: float) -> list[str]:
    """Of a job that waits in these partitions: pools of theirs that can have no node now."""
    wanted = set(partitions)
    return [
        f"pool {name} takes no jobs: {DIFFERENCES[pool.closed_for][0]}{_shortage_words(pool, now)}; asked again in "
        f"{max(0.0, pool.closed_until - now):.0f} s"
        for name, pool in status.pools.items()
        if pool.partition in wanted and pool.closed_until is not None
    ]


_AHEAD: dict[Outlook, str] = {
    "later": "are asked for a boot before it",
    "asked": "are there, or asked for ahead of it",
    "no_room": "cannot all be had by then: none is asked for ahead of it",
    "bound": "are more than the pool's `ahead` allows its account: none is asked for ahead of it",
}


def ahead_words(status: FleetStatus, job: int, now: float) -> list[str]:
    """Of a job that waits and whose start is foreseen: what is done for it in each pool."""
    lines = []
    for one in status.ahead:
        if one.job != job:
            continue
        whose = "the nodes of its gang" if one.gang else "its node" if one.nodes == 1 else f"its {one.nodes} nodes"
        after = f" after {one.after}" if one.after else ""
        words = _AHEAD[one.outlook]
        if one.nodes == 1 and not one.gang:
            words = words.replace("are ", "is ", 1).replace("cannot all be had", "cannot be had")
        lines.append(f"may start in {max(0.0, one.at - now):.0f} s{after}; {whose} of pool {one.pool} {words}")
    return list(dict.fromkeys(lines))


def words_for_job(job: int, state: str, nodes: str, partition: str, path: Path = STATUS) -> list[str]:
    """Sentences on pools for a job that waits; none where there is no fleet on this host, or it says nothing."""
    try:
        status = read_status(path)
    except SluiceError:
        return []
    if state == "CONFIGURING":
        return waiting_words(status, expand(nodes), status.at)
    if state != "PENDING":
        return []
    return [*closed_words(status, partition.split(","), status.at), *ahead_words(status, job, status.at)]
