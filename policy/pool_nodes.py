"""The pools of a policy as they run: what fleetd reads, and what slurmctld knows of nodes before there is one.

`sluice apply` writes `sluice.pools.json` and `pools.sluice.conf` next to slurm.conf.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from policy.node import CompiledFile, parse_compiled
from policy.pools import Pool, Setting
from sluice.base.hostlist import unbroken

if TYPE_CHECKING:
    from policy.model import Policy

FILE_NAME = "sluice.pools.json"
"""Its name next to slurm.conf."""
NODES_FILE = "pools.sluice.conf"
"""The nodes' lines next to slurm.conf, which includes it."""
POOL_FEATURE, MADE_FEATURE = "sluice-pool-", "sluice-made-"
"""Of a dynamic node: which pool it is of, by which its partition finds it; and of which parameters it was made."""
_MOST_BYTES = 4 << 20
_SLACK_S = 300
"""Added to all that the fleet itself may take, for Slurm's own ResumeTimeout: it decides only when no fleet does."""

# ---- what fleetd reads ----


class _Compiled(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ShapePolicy(_Compiled):
    """A shape, as far as the fleet needs it."""

    name: str
    price: float = 0.0


class PoolPolicy(_Compiled):
    """A pool with plain values."""

    driver: str
    settings: dict[str, Setting] = {}
    nodes: str
    gres: str = ""
    gpus: int = 0
    cpus: int = 1
    shapes: tuple[ShapePolicy, ...]
    zones: tuple[str, ...] = ("",)
    partition: str
    least: int = 0
    spare: int = 0
    ahead: int | None = None
    idle_s: float = 600
    boot_s: float = 600
    give_back_s: float = 60
    back_off_s: float = 60
    list_s: float = 30
    node_conf: str = ""  # of a dynamic pool: the parameters of its nodes, for slurmctld and for `slurmd -Z --conf`
    made: str = ""  # the feature of nodes that were created with these


class PoolsPolicy(_Compiled):
    """The whole file."""

    schema_version: int = 1
    cluster: str = ""
    look_s: float = 5
    pools: dict[str, PoolPolicy] = {}

    def render(self) -> str:
        """The file's text."""
        return self.model_dump_json(indent=1, exclude_defaults=True) + "\n"


class PoolsFile(CompiledFile[PoolsPolicy]):
    """The pools in force."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, parse_pools, PoolsPolicy(), most=_MOST_BYTES)


def parse_pools(text: str | bytes, *, source: str) -> PoolsPolicy:
    """A file's content. Raises SluiceError that names `source` and the place."""
    return parse_compiled(text, PoolsPolicy, source=source, most=_MOST_BYTES)


def compile_pools(policy: Policy, cluster: str, *, shards: bool) -> PoolsPolicy:
    """What fleetd needs of a policy."""
    return PoolsPolicy(
        cluster=cluster,
        look_s=policy.fleet.look_every,
        pools={
            name: PoolPolicy(
                **_creation(name, one, shards=shards),
                driver=one.driver,
                settings=one.settings,
                nodes=one.nodes,
                gres=gres_of(one, shards=shards),
                gpus=sum(one.shapes[0].gpus.values()),
                cpus=min(shape.cpus for shape in one.shapes),
                shapes=tuple(ShapePolicy(name=shape.name, price=shape.price) for shape in one.shapes),
                zones=tuple(one.zones) or ("",),
                partition=one.partition or name,
                least=one.least,
                spare=one.spare,
                ahead=one.ahead,
                idle_s=one.idle,
                boot_s=one.boot_within,
                give_back_s=one.give_back_within,
                back_off_s=one.back_off,
                list_s=one.list_every,
            )
            for name, one in policy.pools.items()
        },
    )


# ---- what Slurm reads ----


def gres_of(pool: Pool, *, shards: bool) -> str:
    """GRES of a node, known before there is one."""
    shape = pool.shapes[0]
    words = [f"gpu:{kind}:{count}" for kind, count in sorted(shape.gpus.items())]
    if shards and shape.gpu_memory:
        words.append(f"shard:{shape.gpu_memory * sum(shape.gpus.values())}")
    return ",".join(words)


def _node(pool: Pool, *features: str, shards: bool) -> str:
    """Parameters of its nodes."""
    fields = {
        "CPUs": str(min(shape.cpus for shape in pool.shapes)),
        "RealMemory": str(min(shape.memory for shape in pool.shapes)),
        "Gres": gres_of(pool, shards=shards),
        "Feature": ",".join([*pool.features, *features]),
        "Weight": str(pool.weight),
    }
    return _line(fields, pool.node_options)


def _creation(name: str, pool: Pool, *, shards: bool) -> dict[str, str]:
    """How the nodes of a dynamic pool are created, and known again."""
    if not pool.dynamic:
        return {}
    plain = _node(pool, f"{POOL_FEATURE}{name}", shards=shards)
    made = MADE_FEATURE + hashlib.sha256(plain.encode()).hexdigest()[:8]
    return {"node_conf": _node(pool, f"{POOL_FEATURE}{name}", made, shards=shards), "made": made}


def node_lines(policy: Policy, *, shards: bool) -> str:
    """Nodes and partitions of all pools, for slurm.conf; of dynamic pools their partitions alone."""
    lines = [f"# Written by `sluice apply`; slurm.conf includes it: Include {NODES_FILE}"]
    for name, one in policy.pools.items():
        group = f"{POOL_FEATURE}{name}"
        below = [below for tenant in one.tenants or () for below in policy.subtree(tenant)]
        tenants = "" if one.tenants is None else ",".join(["root", *dict.fromkeys(below)])
        partition = {
            "PartitionName": one.partition or name,
            "Nodes": group if one.dynamic else one.nodes,
            "AllowAccounts": tenants,
            "SuspendTime": str(one.idle + one.boot_within),  # the fleet itself lets nodes go after `idle`
            "SuspendTimeout": str(one.end_within),
            "ResumeTimeout": str(one.boot_within * 2 + one.give_back_within + _SLACK_S),
        }
        fixed = f"NodeName={one.nodes} {_node(one, shards=shards)} State=CLOUD"
        lines.append(f"NodeSet={group} Feature={group}" if one.dynamic else fixed)
        lines.append(_line(partition, one.partition_options))
    return "\n".join(lines) + "\n"


def _line(fields: dict[str, str], *more: str) -> str:
    return " ".join([*(f"{key}={value}" for key, value in fields.items() if value), *filter(None, more)])


def slurm_settings(policy: Policy) -> dict[str, str]:
    """Parameters of slurm.conf for all pools; each partition has its own times."""
    if not policy.pools:
        return {}
    # Slurm after 22.05 divides it at each comma, also in brackets. So it may keep more than `least`; fleetd does not.
    kept = [
        f"{part}:{min(size, one.least)}"
        for one in policy.pools.values() if one.least
        for part, size in unbroken(one.nodes)
    ]  # fmt: skip
    return {
        "ResumeProgram": f"{policy.fleet.programs}/sluice-resume",
        "SuspendProgram": f"{policy.fleet.programs}/sluice-suspend",
        "ResumeRate": "0",  # the fleet is asked at once for all that is needed, and keeps the provider's rates itself
        "SuspendRate": "0",
        **({"SuspendExcNodes": ",".join(kept)} if kept else {}),
    }
