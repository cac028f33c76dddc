"""The policy's compaction section: running jobs that are moved to make room for one that waits."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from policy.units import Seconds

Wait = Annotated[Seconds, Field(ge=1)]


class Compaction(BaseModel):
    """Running jobs are moved to other nodes where that makes room for a job that waits; docs/scheduling-in-slurm.md.
    Only jobs that have saved their work since they started (`checkpoint`), and that Slurm may requeue. Needs
    `failover: {journal: true}`. Without this section no job is moved."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    wait: Wait = 600
    """A job that has waited for this long, and could not start now, may have others moved. Example: `10m`."""
    classes: dict[str, Wait] = {}
    """The same for jobs that would start on GPUs of a class. Example: `{hopper: 5m}`."""
    factor: Annotated[float, Field(ge=0.1, le=1000)] = 2.0
    """What is gained has to exceed what it costs by this factor: the time by which the job starts earlier, times its
    GPUs, or what jobs lose that it would preempt; against the time of a save and `move_cost`, times the GPUs of the
    jobs that are moved. Example: `2`."""
    move_cost: Annotated[Seconds, Field(ge=1, le=86400)] = 120
    """Time for which a job that is moved or preempted does no work, besides its save: the end on one node, and the
    start and the read of its state on another. Example: `2m`."""
    save_within: Annotated[Seconds, Field(ge=1, le=3600)] = 60
    """A job that has not saved so long after the signal stays where it is, with all others of the plan, and is not
    asked again before it starts again. Example: `60s`."""
    moves_per_job: Annotated[int, Field(ge=1, le=1000)] = 2
    """Most moves of a job. Example: `2`."""
    moves_per_hour: Annotated[int, Field(ge=1, le=64)] = 8
    """Most moves of all jobs together within an hour, and of one plan. Example: `8`."""
    empty_within: Seconds = 0
    """Jobs also leave nodes that are draining, and nodes that a maintenance reservation takes within this time, where
    that empties the node earlier: the time by which it does, times the node's GPUs, against the cost as above. 0: they
    stay there until they end. Example: `1h`."""
    default: bool = True
    """Jobs of tenants that `tenants` does not name may be moved."""
    tenants: dict[str, bool] = {}
    """The same for a tenant and those below it. Example: `{physics: false}`."""

    def settings(self) -> dict[str, Any]:
        """Of the compiled policy, for all jobs."""
        return {
            "compaction_wait_s": self.wait,
            "compaction_factor_permille": round(self.factor * 1000),
            "compaction_move_cost_s": self.move_cost,
            "compaction_save_s": self.save_within,
            "compaction_moves_per_job": self.moves_per_job,
            "compaction_moves_per_hour": self.moves_per_hour,
            "compaction_moves_unlisted": self.default,
            "compaction_empty_within_s": self.empty_within,
        }

    def may_move(self, family: list[str]) -> bool:
        """Whether jobs of a tenant may be moved; `family`: the tenant, then its ancestors up to the top."""
        return next((self.tenants[name] for name in family if name in self.tenants), self.default)
