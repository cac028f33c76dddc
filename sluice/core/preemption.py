"""Which jobs to preempt (``sluice/core.h``, section preemption)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.core._core import ffi, lib
from sluice.core.cluster import Cluster
from sluice.core.errors import check, new_error_text
from sluice.core.placement import Placement, Policy, Request, room_for_request, to_placement


@dataclass(frozen=True)
class Candidate:
    """A running job that might have to make room (``struct sluice_candidate``)."""

    allocation: int
    started_s: int
    checkpoint_s: int = 0
    min_run_s: int = 0
    tier: int = 0
    gang: int = 0
    over_quota: bool = False
    save_s: int = 0
    restart_s: int = 0


@dataclass(frozen=True)
class Victims:
    """Which candidates go, by their index, and where the request starts then."""

    indexes: tuple[int, ...]
    placement: Placement


class Preemption:
    """Plans preemptions among up to `max_candidates` of a cluster."""

    def __init__(self, cluster: Cluster, max_candidates: int) -> None:
        handle, text = ffi.new("struct sluice_preemption **"), new_error_text()
        check(lib.sluice_preemption_new(cluster.handle, max_candidates, handle, text), text)
        self.cluster = cluster
        self.handle = ffi.gc(handle[0], lib.sluice_preemption_free)

    def plan(
        self,
        policy: Policy,
        request: Request,
        candidates: Sequence[Candidate],
        *,
        tier: int,
        now_s: int,
        reclaims: bool = False,
    ) -> Victims | None:
        """The cheapest victims for a request of `tier`; None when it would not fit even without all who may go."""
        c_candidates = ffi.new("struct sluice_candidate[]", max(len(candidates), 1))
        for candidate, c_candidate in zip(candidates, c_candidates, strict=False):
            for name in Candidate.__dataclass_fields__:
                setattr(c_candidate, name, getattr(candidate, name))
        preemptor = ffi.new("struct sluice_preemptor *", {"tier": tier, "reclaims": reclaims})
        placement, text = room_for_request(self.cluster, request), new_error_text()
        victims, count = ffi.new("uint32_t[]", max(len(candidates), 1)), ffi.new("uint32_t *")
        code = lib.sluice_preemption_plan(
            self.handle,
            policy,
            request.c,
            preemptor,
            c_candidates,
            len(candidates),
            now_s,
            placement,
            victims,
            count,
            text,
        )
        if code == lib.SLUICE_ERROR_NO_PLACE:
            return None
        check(code, text)
        return Victims(tuple(victims[i] for i in range(count[0])), to_placement(placement))
