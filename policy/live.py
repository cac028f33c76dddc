"""The state of a running cluster, read with a few commands at the same time."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from policy.names import OWN_PREFIX
from policy.state import LEVEL_FILE, AccountState, Level, ReservationState, State, UserState
from sluice.base.errors import SluiceError
from sluice.slurm import SlurmClient, connect
from sluice.slurm.accounting import Account, Accounting, Association
from sluice.slurm.answers import Node, Partition, Reservation
from sluice.slurm.commands import Commands
from sluice.slurm.control import Control
from sluice.slurm.topology import switch_rows

_LASTING_S = 30 * 86400  # a reservation that ends sooner is renewed


@dataclass(slots=True)
class Cluster:
    """How to reach one cluster."""

    commands: Commands
    client: SlurmClient
    accounting: Accounting
    control: Control

    @classmethod
    def at(cls, conf: Path | None = None, prefix: Path | None = None) -> Cluster:
        """The cluster of a slurm.conf (None: that of Slurm's own commands)."""
        commands = Commands(prefix=prefix, conf=conf, timeout=120)
        return cls(commands, connect(conf=conf, prefix=prefix, timeout=120), Accounting(commands), Control(commands))


@dataclass(slots=True)
class Live:
    """A cluster as it is."""

    name: str
    folder: Path  # where slurm.conf lies
    config: Mapping[str, str]
    state: State
    tres: frozenset[str]
    nodes: list[Node]
    partitions: list[Partition]
    odd_users: list[Association] = field(default_factory=list)  # with a partition: not governed
    switches: dict[str, str] = field(default_factory=dict)  # of the topology: their nodes

    def level(self) -> Level:
        """The level that slurmctld is asked for; off where there is none, or none that it knows."""
        try:
            word = (self.folder / LEVEL_FILE).read_text(errors="replace").strip()
        except OSError:
            return "off"
        known: dict[str, Level] = {level: level for level in get_args(Level)}
        return known.get(word, "off")


def read_live(cluster: Cluster) -> Live:
    """Read a cluster. Raises SluiceError where it has no accounting, or does not answer."""
    client, accounting = cluster.client, cluster.accounting
    config = client.config()
    name = config.get("ClusterName", "").lower()
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        raise SluiceError(
            f"cluster {name!r} keeps no accounts: AccountingStorageType is not accounting_storage/slurmdbd",
            remedy="set up slurmdbd first; tenants are its accounts",
        )
    with ThreadPoolExecutor(7) as pool:
        associations = pool.submit(accounting.associations, name)
        accounts = pool.submit(accounting.accounts)
        qos = pool.submit(accounting.qos)
        tres = pool.submit(accounting.tres)
        nodes = pool.submit(client.nodes)
        topology = pool.submit(cluster.commands.run, "scontrol", "show", "topology", check=False)
        reservations = pool.submit(client.reservations)
        partitions = client.partitions()
        state, odd = _state(associations.result(), accounts.result(), reservations.result())
        state.qos = qos.result()
        folder = Path(config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
        switches = {row["name"]: row["nodes"] for row in switch_rows(topology.result().stdout)}
        return Live(name, folder, config, state, tres.result(), nodes.result(), partitions, odd, switches)


def _state(
    associations: list[Association], accounts: Mapping[str, Account], reservations: list[Reservation]
) -> tuple[State, list[Association]]:
    state, odd = State(), []
    for one in associations:
        if one.user:
            if one.partition:
                odd.append(one)
            elif one.account == "root":
                state.root_users.add(one.user)
            else:
                state.users[one.account, one.user] = UserState(one.shares, {**one.limits, **_own_qos(one)})
        elif one.account == "root":
            state.root_limits = dict(one.limits)
        else:
            about = accounts.get(one.account, Account("", "", frozenset()))
            state.accounts[one.account] = AccountState(
                one.parent,
                about.description,
                about.organization,
                one.shares,
                one.limits,
                one.qos,
                one.default_qos,
                about.coordinators,
            )
    for reservation in reservations:
        if reservation.name.startswith(OWN_PREFIX):
            state.reservations[reservation.name] = ReservationState(
                frozenset(reservation.accounts),
                reservation.node_count,
                reservation.features,
                users=frozenset(reservation.users),
                magnetic="MAGNETIC" in reservation.flags,
                lasting=(reservation.end_time or 0) > time.time() + _LASTING_S,
            )
    return state, odd


def _own_qos(one: Association) -> dict[str, str]:
    """A user's own QOS, which replace the account's."""
    options = {"qos": ",".join(one.qos), "defaultqos": one.default_qos}
    return {option: value for option, value in options.items() if value}


def gpus_of(node: Node) -> tuple[dict[str, int], int]:
    """A node's GPUs by GRES type ("" where it has none), and its shards (MiB)."""
    return gpus_in(node.gres)


def gpus_in(gres: str) -> tuple[dict[str, int], int]:
    """The same of the text of its GRES."""
    types: dict[str, int] = {}
    shards = 0
    for word in re.split(r",(?![^(]*\))", gres):
        match = re.match(r"(gpu|shard)(?::([A-Za-z_][\w.-]*))?:(\d+)", word)
        if match and match[1] == "gpu":
            types[match[2] or ""] = types.get(match[2] or "", 0) + int(match[3])
        elif match:
            shards += int(match[3])
    return types, shards


def gpus_in_use(text: str, kind: str) -> frozenset[int]:
    """GPUs in use, of ``gpu:h100:3(IDX:0-2)``, ``shard:h100:2(IDX:0,2)``, or ``shard:h100:10240(10240/81008,0/81008)``.

    The last is 24.11's; in 26.05 a GPU that is in use as a whole has ``-/81008``. Of a node with several types the
    shards' places are counted on from type to type.
    """
    found: set[int] = set()
    place = 0
    for match in re.finditer(rf"(?:^|,){kind}:(?:[^:,()]+:)?\d+\(([^()]{{1,40000}})\)", text):
        if not match[1].startswith("IDX:"):
            uses = match[1].split(",")
            found.update(place + number for number, use in enumerate(uses) if not use.startswith(("0/", "-/")))
            place += len(uses)
            continue
        for piece in match[1].removeprefix("IDX:").split(","):
            first, _, last = piece.partition("-")
            if first.isdecimal() and (not last or last.isdecimal()):
                found.update(range(int(first), min(int(last or first), int(first) + 4096) + 1))
    return frozenset(found)
