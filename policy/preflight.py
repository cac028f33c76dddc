"""The policy's preflight section: which jobs are tested before they start, and what is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from policy.names import Name
from policy.units import Percent, Seconds

When = Literal["always", "after-maintenance", "on-suspicion", "never"]
Tool = Literal["any", "perftest", "ucx", "libfabric", "tcp"]
Gigabytes = Annotated[float, Field(gt=0, le=10_000)]
MOST_BOUND_S = 60
MOST_DRAIN_S = 10
"""After the bound, in which the controllers take a node at fault out of service."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    when: When = "after-maintenance"
    """Which jobs: `always`; those with a node that was down or drained since its last good preflight, or is suspected
    (`after-maintenance`); those with a node that its last preflight found at fault or could not tell from another one,
    or whose health checks find something (`on-suspicion`); or `never`. Example: `always`."""
    share: Annotated[Percent, Field(ge=10, le=95)] = 75
    """A result is slow below this percentage of the median of its class. Example: `80`."""
    least: Gigabytes | None = None
    """GB/s between two nodes below which a result is slow, whatever its class gives. Example: `40`."""
    gpus: bool = True
    """Whether GPUs are measured, too: clock, memory, PCIe and the links between them, of GPUs that a job has as a
    whole. Jobs of one node are then tested as well. Example: `false`."""
    tool: Tool = "any"
    """What measures between nodes: `perftest`, `ucx` (ucx_perftest), `libfabric` (fi_pingpong), `tcp` (Sluice's own),
    or `any`: the first of these that all nodes of the job have. Nodes of a job that lack the named one are measured by
    TCP. Example: `ucx`."""


class Preflight(_Settings):
    """Nodes of a job test their GPUs, and each other, before it starts."""

    model_config = ConfigDict(extra="forbid")

    classes: list[Name] = []
    """Classes of GPUs whose jobs are tested; empty: all. Example: `[h100]`."""
    bound: Annotated[Seconds, Field(ge=2, le=MOST_BOUND_S)] = 15
    """The longest that a job waits for its preflight; then it starts without a verdict. PrologEpilogTimeout of
    slurm.conf (PrologTimeout, where that is set) must be longer by 11 s: see `sluice doctor prolog`. Example: `20s`."""


class NodePreflight(_Settings):
    """The section as nodes and controllers read it."""

    model_config = ConfigDict(extra="ignore")

    when: When = "never"
    types: tuple[str, ...] = ()
    """GRES types of the classes; empty: all."""
    bound_s: Annotated[int, Field(ge=2, le=MOST_BOUND_S)] = 15

    @property
    def longest_s(self) -> int:
        """So many seconds at most a prolog waits; 0 where no job is tested."""
        return 0 if self.when == "never" else self.bound_s + MOST_DRAIN_S + 1


def compile_preflight(section: Preflight | None, types_of: Mapping[str, Sequence[str]]) -> NodePreflight:
    """What nodes and controllers read; no preflights without a section. `types_of`: GRES types of each class."""
    if section is None:
        return NodePreflight()
    types = sorted({kind for name in section.classes for kind in types_of[name]})
    return NodePreflight(
        **section.model_dump(include=set(_Settings.model_fields)), types=tuple(types), bound_s=section.bound
    )
