"""The policy's section `pools`: nodes that come and go, what they have, and where they come from."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from policy.names import Name, TenantName
from policy.units import Mib, Seconds
from sluice.base.errors import UsageError
from sluice.base.hostlist import expand

MOST_NODES = 4096
_GPU_TYPE = re.compile(r"[a-z_][a-z0-9_.-]{0,63}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")
_SETTING = re.compile(r"[a-z][a-z0-9_]{0,39}")
_SECRET = re.compile(r"secret|passw|credential|token|access_?key|api_?key|private_?key")
_SLURM = re.compile(r"[A-Za-z]+=[^\s=#\"']+(?: [A-Za-z]+=[^\s=#\"']+)*")
_OURS = frozenset({
    "nodename", "state", "gres", "cpus", "realmemory", "feature", "features", "weight", "partitionname", "nodes",
    "allowaccounts", "suspendtime", "suspendtimeout", "resumetimeout",
})  # fmt: skip


def _gpu_type(value: str) -> str:
    if not _GPU_TYPE.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not a GPU type of GRES; write it as `sluice gres` does, in lower case")
    return value


def _word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError(f"{value[:80]!r}: use letters, digits and _ . : / -, a letter or digit first")
    return value


GpuType = Annotated[str, AfterValidator(_gpu_type)]
ProviderWord = Annotated[str, AfterValidator(_word)]
Setting = str | int | bool | list[str] | dict[str, str]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Shape(_Section):
    """One type of machine that the provider has."""

    name: ProviderWord
    """The provider's name of the type. Example: `p5.48xlarge`."""
    gpus: dict[GpuType, Annotated[int, Field(ge=1, le=64)]] = {}
    """Its GPUs by GRES type; all shapes of a pool have the same. Example: `{h100: 8}`."""
    gpu_memory: Mib = 0
    """Memory of one GPU, as the probe finds it; offered as shards. Example: `81559M`."""
    cpus: Annotated[int, Field(ge=1, le=4096)]
    """Its CPUs; the nodes have those of the smallest shape. Example: `192`."""
    memory: Annotated[Mib, Field(ge=1)]
    """Host memory that slurmd may use; the nodes have that of the smallest shape. Example: `2000G`."""
    price: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Price of an hour, for reports and alerts; in the site's currency. Example: `98.32`."""


class Pool(_Section):
    """Nodes of one kind that are launched when Slurm needs them."""

    driver: Name
    """Who launches them: an entry point of `sluice.pool_drivers`. Example: `ec2`."""
    settings: dict[str, Setting] = {}
    """What the driver needs to know; no credentials. Example: `{region: eu-west-1, image: ami-0abc}`."""
    nodes: str
    """Their names; as many as there are at most. Example: `p5-[001-016]`."""
    shapes: Annotated[list[Shape], Field(min_length=1, max_length=20)]
    """Types of machines in order of preference."""
    zones: Annotated[list[ProviderWord], Field(max_length=20)] = []
    """Zones in order of preference; default: the driver's one. Example: `[eu-west-1a, eu-west-1b]`."""
    partition: Name | None = None
    """Partition that is made of them; default: the pool's name. Example: `burst`."""
    tenants: list[TenantName] | None = None
    """Tenants that may use the partition; default: all. Example: `[nlp]`."""
    features: list[Name] = []
    """Features of the nodes. Example: `[cloud]`."""
    weight: Annotated[int, Field(ge=1, le=65_000)] = 100
    """Slurm's weight: nodes of less are taken first. Example: `200`."""
    least: Annotated[int, Field(ge=0, le=MOST_NODES)] = 0
    """Nodes that are there always. Example: `1`."""
    spare: Annotated[int, Field(ge=0, le=MOST_NODES)] = 0
    """Idle nodes that are kept for jobs that nobody foresees. Example: `1`."""
    ahead: Annotated[int, Field(ge=0, le=MOST_NODES)] | None = None
    """Nodes that are asked for ahead at most for the jobs of one account that wait for their `--begin`, for the end of
    other jobs, or as a gang; for a job or gang of more none is. Default: as many as the pool has. Example: `2`."""
    idle: Annotated[Seconds, Field(ge=1)] = 600
    """Time without a job after which a node goes. Example: `15m`."""
    boot_within: Annotated[Seconds, Field(ge=1, le=7200)] = 600
    """Time from a launch until slurmd registers; a machine that takes longer is replaced. Example: `8m`."""
    end_within: Annotated[Seconds, Field(ge=1, le=7200)] = 30
    """Time from Slurm calling a node off until its machine has ended; before, Slurm starts nothing there. Example:
    `1m`."""
    give_back_within: Annotated[Seconds, Field(le=7200)] = 60
    """Time for which a job's other nodes are kept where one of them cannot be had; then all are given back and the job
    is requeued. Example: `2m`."""
    back_off: Annotated[Seconds, Field(ge=1, le=3600)] = 60
    """After no capacity a zone and shape is asked again after this time, which doubles up to 15 times. Example:
    `30s`."""
    list_every: Annotated[Seconds, Field(ge=1, le=600)] = 30
    """While nothing of the pool is under way, the provider is asked this often for its machines, and so for notices
    that it takes one back. Example: `10s`."""
    dynamic: bool = False
    """Its nodes are created in slurmctld while that runs, and deleted when `nodes` names them no more; slurm.conf has a
    `MaxNodeCount` then, and their slurmd is started with `-Z`. Default: they are lines of slurm.conf."""
    node_options: Annotated[str, Field(max_length=1000)] = ""
    """More parameters of the nodes' line. Example: `Sockets=2 CoresPerSocket=48 ThreadsPerCore=2`."""
    partition_options: Annotated[str, Field(max_length=1000)] = ""
    """More parameters of the partition's line. Example: `MaxTime=2-0 PriorityTier=2`."""

    @field_validator("settings")
    @classmethod
    def _no_secrets(cls, settings: dict[str, Setting]) -> dict[str, Setting]:
        for name, value in settings.items():
            if not _SETTING.fullmatch(name):
                raise ValueError(f"{name[:80]!r} is not a setting's name; use a-z, 0-9 and _")
            if _SECRET.search(name) or (isinstance(value, dict) and any(_SECRET.search(key) for key in value)):
                raise ValueError(
                    f"{name}: credentials are never in the policy; docs/elastic.md says where each driver finds them"
                )
        return settings

    @field_validator("nodes")
    @classmethod
    def _names(cls, nodes: str) -> str:
        try:
            names = expand(nodes)
        except UsageError as error:
            raise ValueError(error.what) from error
        if not names or len(names) > MOST_NODES:
            raise ValueError(f"{len(names)} nodes; a pool has 1 to {MOST_NODES}")
        for name in names:
            if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
                raise ValueError(f"{name[:80]!r} is not a host's name; use a-z, 0-9 and '-'")
        return nodes

    @field_validator("node_options", "partition_options")
    @classmethod
    def _options(cls, text: str) -> str:
        if text and not _SLURM.fullmatch(text):
            raise ValueError(f"{text[:80]!r}: write KEY=VALUE, separated by one space")
        for word in text.split():
            if (key := word.partition("=")[0]).lower() in _OURS:
                raise ValueError(f"{key} is written from the pool's own fields; take it out")
        return text

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        first = self.shapes[0]
        for one in self.shapes[1:]:
            if one.gpus != first.gpus or one.gpu_memory != first.gpu_memory:
                raise ValueError(
                    f"shape {one.name!r} has not the GPUs of {first.name!r}, which are part of the nodes' names in "
                    "Slurm; make it a pool of its own"
                )
        if len({one.name for one in self.shapes}) != len(self.shapes):
            raise ValueError("a shape is named twice; take one of them out")
        if len(set(self.zones)) != len(self.zones):
            raise ValueError("a zone is named twice; take one of them out")
        if self.least > len(self.names):
            raise ValueError(f"least {self.least} is more than the {len(self.names)} nodes; name more nodes")
        return self

    @property
    def names(self) -> list[str]:
        """Its nodes."""
        return expand(self.nodes)


class Fleet(_Section):
    """What all pools share."""

    programs: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/+-]{1,250}$")] = "/opt/sluice/bin"
    """Folder of `sluice-resume` and `sluice-suspend` on the controllers. Example: `/usr/libexec/sluice`."""
    look_every: Annotated[Seconds, Field(ge=1, le=15)] = 5
    """While no node boots or ends, fleetd looks this often at Slurm: an idle node goes up to twice this time later than
    `idle` says. Example: `1s`."""
