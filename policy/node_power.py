"""What nodes read of a policy about power: the section `power` of sluice.node.json."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_WATTS = 100_000
"""More than any GPU draws."""
Watts = Annotated[int, Field(ge=1, le=MOST_WATTS)]


class NodeCap(BaseModel):
    """The power cap of jobs of some accounts on some GPUs; an empty list: of all."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    gpu_types: tuple[str, ...] = ()
    """GRES types."""
    accounts: tuple[str, ...] = ()
    watts: Watts
    at_most: Watts | None = None
    """What a job may ask for with --gpu-power; None: `watts`."""


class NodeThermal(BaseModel):
    """A GPU that slows down by heat gets a lower cap."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    after_s: Annotated[int, Field(ge=1, le=3600)] = 10
    """How long it has been slowed down before each step; it goes back a step after six times that without."""
    lower_percent: Annotated[int, Field(ge=1, le=50)] = 10
    """Of the cap that it would have, each step."""
    least_percent: Annotated[int, Field(ge=1, le=100)] = 60
    """Of the cap that it would have: no step goes below."""


class NodePower(BaseModel):
    """Power caps on nodes. Without the section nothing is capped."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    caps: tuple[NodeCap, ...] = ()
    """The first that fits a job and a GPU counts."""
    thermal: NodeThermal | None = None
    report: bool = False
    """Nodes report their power to the controllers, and follow the caps that these want."""
