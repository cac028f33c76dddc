"""The cluster description: nodes and their GPUs, users, accounts, additions to slurm.conf, and the parts of Sluice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, field_validator, model_validator

from gpu_sim import platform_names
from sluice.base.documents import load_document, parse_document
from sluice.base.errors import UsageError
from sluice.base.hostlist import expand

SHIPPED = Path(__file__).parent / "clusters"
REFERENCE = "the reference of cluster files is docs/dev-cluster.md"
RESERVED_HOSTS = ("login", "ctl1", "ctl2", "db", "localhost")

Word = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
HostName = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NodeGroup(_Strict):
    """Nodes of one kind."""

    names: str
    """A hostlist, e.g. ``h100-[1-4]``."""
    platform: str
    """A platform of gpu_sim, the path of a platform file, ``none`` for no GPUs, or ``real`` for this machine's own."""
    config: Literal["shared", "own", "configless"] = "shared"
    """How the node gets its configuration: one folder for all, a private copy, or served by slurmctld."""
    pool: bool = False
    """Machines of a pool of the policy, whose lines in slurm.conf are the policy's: no slurmd runs on them until its
    driver `local` launches them."""
    _hosts: list[str] = PrivateAttr(default_factory=list)

    @field_validator("names")
    @classmethod
    def _hostlist(cls, value: str) -> str:
        hosts = _expand(value)
        if not hosts:
            raise ValueError("no node named")
        for host in hosts:
            if not HostName.fullmatch(host) or host in RESERVED_HOSTS:
                raise ValueError(f"{host!r} cannot be a node's name")
        return value

    @field_validator("platform")
    @classmethod
    def _known(cls, value: str) -> str:
        named = "/" not in value and not value.endswith(".yaml")
        if named and value not in (known := ["none", "real", *platform_names()]):
            raise ValueError(f"there is no such platform; known are {', '.join(known)}, or a file by its path")
        return value

    @property
    def hosts(self) -> list[str]:
        """The nodes' names."""
        if not self._hosts:
            self._hosts = expand(self.names)
        return self._hosts


class User(_Strict):
    """A unix user who exists in the cluster only."""

    name: Word
    uid: Annotated[int, Field(ge=1000, le=60000)] | None = None
    """Default: 2001 and up, in order."""
    accounts: list[Word] = []
    """Slurm accounts, the default one first."""


class Account(_Strict):
    """A Slurm account."""

    name: Word
    parent: Word = "root"
    description: Annotated[str, StringConstraints(pattern=r"^[\w .,-]*$", max_length=80)] = ""


class Partition(_Strict):
    """A partition of Slurm; the first one is the default."""

    name: Word
    nodes: str = "ALL"
    """A hostlist, or ALL."""
    options: str = ""
    """More parameters of its line, e.g. ``MaxTime=1:00:00``."""


class Gres(_Strict):
    """GRES configuration written by hand instead of probed, to test how Slurm handles it."""

    gres_conf: str = ""
    node_lines: str
    """NodeName lines without NodeAddr, NodeHostname and Port."""


class Sluice(_Strict):
    """Sluice's plugins in slurmctld, and its options in the commands."""

    level: Literal["off", "admit", "shadow", "place"] = "place"
    policy: str = ""
    """A compiled policy: its text, or a file's path. Empty: none, so that everything is stock Slurm's."""
    plugins: Path | None = None
    """A folder of built plugins; default: built for the cluster's Slurm, once."""
    sanitize: bool = False
    """Plugins with the address sanitizer; slurmctld then starts with its library, and what it finds is in its log."""
    environment: dict[str, str] = {}
    """More variables of slurmctld's environment, e.g. SLUICE_CROSS_CHECK_PERMILLE."""
    node_environment: dict[str, str] = {}
    """More variables of the environment of each node's slurmd and agent."""
    journal: bool = False
    """The failover journal: `journal` switched on in the policy."""
    supervise: bool = False
    """Each slurmctld under sluice-supervise, with its lease in the shared state folder."""
    lease: Annotated[float, Field(ge=0.2, le=600)] = 4.0
    """Seconds of that lease."""


class ClusterDescription(_Strict):
    """A cluster file."""

    nodes: Annotated[list[NodeGroup], Field(min_length=1)]
    controllers: Annotated[int, Field(ge=1, le=2)] = 2
    accounting: bool = True
    """MariaDB and slurmdbd, with associations for every user; else no accounting at all."""
    shards: bool = True
    """Offer GPU memory as gres/shard, one MiB a shard."""
    nics: bool = False
    """Offer RDMA interfaces as gres/nic."""
    partitions: list[Partition] = [Partition(name="main")]
    accounts: list[Account] = []
    users: list[User] = []
    slurm_conf: str = ""
    """Lines for the end of slurm.conf; a parameter given here replaces the generated one."""
    cgroup: Literal["v1", "v2"] = "v2"
    """The version of cgroups that nodes show, and Slurm uses."""
    cgroup_conf: str = ""
    slurmdbd_conf: str = ""
    topology_conf: str = ""
    """The text of topology.conf; without it there is no such file."""
    gres: Gres | None = None
    sluice: Sluice | None = None
    """`false`, or not set: stock Slurm, without any of Sluice's plugins."""
    agent: bool | Literal["ends"] = False
    """The node agent on every node, with its prolog, epilog and task programs in slurm.conf; `ends`: only what reports
    jobs' ends to the controllers, which costs a small machine less time."""
    controllerd: bool = False
    """The controller-side daemon on every controller."""
    explaind: bool = False
    """The explain service on every controller."""
    serve: bool = False
    """What keeps the policy's model services, on every controller: root's helper, replicad and a gateway, with their
    users. Needs `controllerd`."""
    policy: str = ""
    """A policy, its text or a file's path: /etc/sluice/sluice.yaml, and applied before `up` returns."""
    port_base: Annotated[int, Field(ge=1024, le=65000)] | None = None
    """First of the ports; default: chosen free."""

    @field_validator("sluice", mode="before")
    @classmethod
    def _stock(cls, value: object) -> object:
        return None if value is False else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.serve and not self.controllerd:
            raise ValueError("serve: needs controllerd, which shows Slurm's jobs to replicad")
        if self.fleet and not (self.policy and self.controllerd):
            raise ValueError("pool: needs a policy with pools, and controllerd")
        if self.policy and not self.accounting:
            raise ValueError("policy: needs accounting, because tenants are accounts")
        seen: set[str] = set()
        for group in self.nodes:
            for host in group.hosts:
                if host in seen:
                    raise ValueError(f"node {host!r} is named twice")
                seen.add(host)
        for kind, names in (
            ("account", ["root", *(account.name for account in self.accounts)]),
            ("user", [user.name for user in self.users]),
            ("partition", [partition.name for partition in self.partitions]),
            ("uid", [user.uid for user in self.users if user.uid is not None]),
        ):
            for name in names:
                if names.count(name) > 1:  # type: ignore[arg-type]
                    raise ValueError(f"{kind} {name!r} is named twice")
        known = {"root"}
        for account in self.accounts:
            if account.parent not in known:
                raise ValueError(f"account {account.name!r}: parent {account.parent!r} must be named before it")
            known.add(account.name)
        for user in self.users:
            for name in user.accounts:
                if name not in known:
                    raise ValueError(f"user {user.name!r}: account {name!r} is not among the accounts")
        for partition in self.partitions:
            if partition.nodes != "ALL":
                for host in _expand(partition.nodes):
                    if host not in seen:
                        raise ValueError(f"partition {partition.name!r}: node {host!r} is not among the nodes")
        free = iter(range(2001, 60000))
        taken = {user.uid for user in self.users}
        for user in self.users:
            if user.uid is None:
                user.uid = next(uid for uid in free if uid not in taken)
        return self

    @property
    def hosts(self) -> list[str]:
        """All nodes in order."""
        return [host for group in self.nodes for host in group.hosts]

    @property
    def fleet(self) -> bool:
        """Whether some nodes are a pool's; then fleetd runs on every controller."""
        return any(group.pool for group in self.nodes)

    @property
    def fixed_hosts(self) -> list[str]:
        """All nodes but those of pools."""
        return [host for group in self.nodes if not group.pool for host in group.hosts]

    def group_of(self, host: str) -> NodeGroup:
        """The group that a node belongs to. Raises UsageError for a node that does not exist."""
        for group in self.nodes:
            if host in group.hosts:
                return group
        raise UsageError(f"node {host!r}: not in this cluster", remedy=f"its nodes are {', '.join(self.hosts[:10])}")


def _expand(hostlist: str) -> list[str]:
    """Its names; ValueError, as pydantic wants it, when malformed."""
    try:
        return expand(hostlist)
    except UsageError as error:
        raise ValueError(error.what) from error


def shipped_names() -> list[str]:
    """The clusters that come with Sluice."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_description(name: str | Path) -> ClusterDescription:
    """A shipped cluster by name, or a cluster file by path. Raises UsageError."""
    text = str(name)
    if "/" not in text and not text.endswith((".yaml", ".yml")):
        path = SHIPPED / f"{text}.yaml"
        if not path.is_file():
            raise UsageError(
                f"cluster {text!r}: not one that comes with Sluice",
                remedy=f"name one of {', '.join(shipped_names())}, or a file by a path with a slash or .yaml",
            )
    else:
        path = Path(text)
    return load_document(path, ClusterDescription, remedy=REFERENCE)


def parse_description(text: str, *, source: str) -> ClusterDescription:
    """A cluster file's text; `source` names it in errors. Raises UsageError."""
    return parse_document(text, ClusterDescription, source=source, remedy=REFERENCE)
