"""What nodes read of a policy about limits: the section `limits` of sluice.node.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:  # the node agent must start fast, and does without the model of the whole policy
    from policy.model import Enforcement

RungName = Literal["mig", "driver", "mps", "limiter", "watchdog"]
ORDER: tuple[RungName, ...] = ("mig", "driver", "mps", "limiter", "watchdog")
"""The strongest first."""


class NodeStrangers(BaseModel):
    """What happens to holders of GPU memory that belong to no registered job (`policy.model.Strangers`)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    jobs_without_gpus: Literal["end", "report", "ignore"] = "end"
    earlier_jobs: Literal["end", "report", "ignore"] = "report"
    users: Literal["end", "report", "ignore"] = "report"
    unknown: Literal["end", "report", "ignore"] = "end"


class NodeLimits(BaseModel):
    """How jobs are held to their GPU memory. The defaults hold where there is no policy."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    ladder: tuple[RungName, ...] = ("mig", "limiter", "watchdog")
    """Rungs that may be used, the strongest first."""
    cu_mask: bool = False
    """Shares of AMD GPUs by a mask that programs could remove."""
    scrub: bool = False
    """Clear a GPU's memory before another job gets it."""
    scrub_seconds: int = 60
    """Time for that."""
    unwatched_s: Annotated[int, Field(ge=0, le=86400)] = 10
    """How long a job with limits may run unwatched before it is frozen; 0: without bound."""
    mig: dict[str, tuple[str, ...]] = {}
    """MIG profiles by GPU of a node: ``NODES`` or ``NODES:GPUS`` as in the policy."""
    amd_partitions: dict[str, str] = {}
    """Partition modes of AMD GPUs, by the same."""
    rdma_handles: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    """Of each RDMA adapter that a job may hold; None: any number."""
    rdma_objects: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    """Likewise queue pairs, memory regions and the like."""
    strangers: NodeStrangers = NodeStrangers()
    """What happens to holders of GPU memory that belong to no registered job."""


def compile_limits(enforcement: Enforcement | None) -> NodeLimits:
    """The section of a policy."""
    if enforcement is None:
        return NodeLimits()
    wanted = set(enforcement.ladder)
    weakest = ORDER.index(enforcement.default_rung) if enforcement.default_rung else len(ORDER) - 1
    return NodeLimits(
        ladder=tuple(name for place, name in enumerate(ORDER) if name in wanted and place <= weakest),
        cu_mask=enforcement.cu_mask,
        scrub=enforcement.scrub,
        scrub_seconds=enforcement.scrub_timeout,
        unwatched_s=enforcement.unwatched,
        mig={nodes: tuple(layout) for nodes, layout in enforcement.mig.items()},
        amd_partitions=enforcement.amd_partitions,
        rdma_handles=enforcement.rdma.handles,
        rdma_objects=enforcement.rdma.objects,
        strangers=NodeStrangers(**enforcement.strangers.model_dump()),
    )
