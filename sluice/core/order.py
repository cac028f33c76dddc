"""Order, fair-share and run-time prediction of the core (``sluice/core.h``, section order)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from sluice.core._core import ffi, lib
from sluice.core.errors import check, new_error_text

FACTOR_ONE: int = lib.SLUICE_FACTOR_ONE


class Factor(IntEnum):
    """What an order is composed of (``enum sluice_factor``)."""

    PRIORITY = lib.SLUICE_FACTOR_PRIORITY
    AGE = lib.SLUICE_FACTOR_AGE
    FAIR_SHARE = lib.SLUICE_FACTOR_FAIR_SHARE
    DEADLINE = lib.SLUICE_FACTOR_DEADLINE
    SERVICE = lib.SLUICE_FACTOR_SERVICE
    TIME = lib.SLUICE_FACTOR_TIME
    SIZE = lib.SLUICE_FACTOR_SIZE


class DeadlineVerdict(IntEnum):
    """Whether a deadline can still be met (``enum sluice_deadline_verdict``)."""

    NONE = lib.SLUICE_DEADLINE_NONE
    FEASIBLE = lib.SLUICE_DEADLINE_FEASIBLE
    INFEASIBLE = lib.SLUICE_DEADLINE_INFEASIBLE


@dataclass(frozen=True)
class OrderPolicy:
    """Weights by factor and what they need; all weights zero is FIFO. Times in the unit of the jobs' times."""

    weights: Mapping[Factor, int] = field(default_factory=dict)
    age_full_s: int = 7 * 86400
    laxity_horizon_s: int = 86400
    size_full_gpus: int = 64
    starvation_s: int = 0

    def to_c(self) -> Any:
        """As ``struct sluice_order_policy *``."""
        policy = ffi.new("struct sluice_order_policy *")
        for factor, weight in self.weights.items():
            policy.weight[factor] = weight
        policy.age_full_s = self.age_full_s
        policy.laxity_horizon_s = self.laxity_horizon_s
        policy.size_full_gpus = self.size_full_gpus
        policy.starvation_s = self.starvation_s
        return policy


@dataclass(slots=True)
class OrderJob:
    """One job as the order sees it (``struct sluice_order_job``)."""

    id: int
    submit_s: int
    remaining_s: int
    gpus: int
    eligible_s: int | None = None  # None: as submitted
    deadline_s: int = 0
    priority: int = 0
    account: int = 0

    def fill(self, job: Any) -> None:
        """Write into a ``struct sluice_order_job``."""
        job.id = self.id
        job.submit_s = self.submit_s
        job.eligible_s = self.submit_s if self.eligible_s is None else self.eligible_s
        job.deadline_s = self.deadline_s
        job.remaining_s = self.remaining_s
        job.gpus = self.gpus
        job.priority = self.priority
        job.account = self.account


@dataclass(frozen=True)
class OrderTerms:
    """Why a job has its place in the order (``struct sluice_order_terms``)."""

    score: int
    terms: dict[Factor, int]
    laxity_s: int
    deadline: DeadlineVerdict
    starving: bool


class FairShare:
    """A tree of accounts with shares and decayed usage; account 0 is the root."""

    def __init__(self, max_accounts: int, half_life_s: int = 0) -> None:
        handle, text = ffi.new("struct sluice_fairshare **"), new_error_text()
        check(lib.sluice_fairshare_new(max_accounts, half_life_s, handle, text), text)
        self.handle = ffi.gc(handle[0], lib.sluice_fairshare_free)

    def add(self, parent: int, shares: int) -> int:
        """Add an account below `parent`; its id."""
        account, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_fairshare_add(self.handle, parent, shares, account, text), text)
        return int(account[0])

    def charge(self, account: int, usage: int, now_s: int) -> None:
        """Charge usage to an account and all above it."""
        text = new_error_text()
        check(lib.sluice_fairshare_charge(self.handle, account, usage, now_s, text), text)

    def usage(self, account: int, now_s: int) -> int:
        """Usage decayed to `now_s`."""
        usage, text = ffi.new("uint64_t *"), new_error_text()
        check(lib.sluice_fairshare_usage(self.handle, account, now_s, usage, text), text)
        return int(usage[0])

    def refresh(self, now_s: int) -> None:
        """Recompute the factors."""
        lib.sluice_fairshare_refresh(self.handle, now_s)

    def factor(self, account: int) -> int:
        """The account's factor as of the last refresh."""
        factor, text = ffi.new("uint32_t *"), new_error_text()
        check(lib.sluice_fairshare_factor(self.handle, account, factor, text), text)
        return int(factor[0])


def score(policy: OrderPolicy, job: OrderJob, now_s: int, fairshare: FairShare | None = None) -> OrderTerms:
    """The score of one job, term by term."""
    c_job, terms, text = ffi.new("struct sluice_order_job *"), ffi.new("struct sluice_order_terms *"), new_error_text()
    job.fill(c_job)
    check(lib.sluice_order_score(policy.to_c(), _handle(fairshare), c_job, now_s, terms, text), text)
    return OrderTerms(
        score=terms.score,
        terms={factor: terms.term[factor] for factor in Factor},
        laxity_s=terms.laxity_s,
        deadline=DeadlineVerdict(terms.deadline),
        starving=terms.starving,
    )


class Order:
    """Room for ordering up to `capacity` jobs."""

    def __init__(self, capacity: int) -> None:
        handle, text = ffi.new("struct sluice_order **"), new_error_text()
        check(lib.sluice_order_new(capacity, handle, text), text)
        self.handle = ffi.gc(handle[0], lib.sluice_order_free)

    def sort(
        self, policy: OrderPolicy, jobs: Sequence[OrderJob], now_s: int, fairshare: FairShare | None = None
    ) -> list[int]:
        """Indices into `jobs`, first to run first."""
        c_jobs, ranked = ffi.new("struct sluice_order_job[]", len(jobs)), ffi.new("uint32_t[]", len(jobs))
        for job, c_job in zip(jobs, c_jobs, strict=True):
            job.fill(c_job)
        text = new_error_text()
        check(
            lib.sluice_order_sort(
                self.handle, policy.to_c(), _handle(fairshare), c_jobs, len(jobs), now_s, ranked, text
            ),
            text,
        )
        return list(ranked)


class Predictor:
    """Predicts run times from history under keys, most specific first."""

    def __init__(self, capacity: int = 65536, quantile_percent: int = 50) -> None:
        handle, text = ffi.new("struct sluice_predictor **"), new_error_text()
        check(lib.sluice_predictor_new(capacity, quantile_percent, handle, text), text)
        self.handle = ffi.gc(handle[0], lib.sluice_predictor_free)

    def record(self, keys: Sequence[int], run_s: int) -> None:
        """Remember a finished run under all of its keys (64-bit hashes)."""
        text = new_error_text()
        check(lib.sluice_predictor_record(self.handle, ffi.new("uint64_t[]", keys), len(keys), run_s, text), text)

    def predict(self, keys: Sequence[int], limit_s: int, elapsed_s: int = 0) -> int:
        """Predicted seconds that are left; `limit_s` 0 means no limit."""
        remaining, text = ffi.new("int64_t *"), new_error_text()
        c_keys = ffi.new("uint64_t[]", keys)
        check(lib.sluice_predictor_predict(self.handle, c_keys, len(keys), elapsed_s, limit_s, remaining, text), text)
        return int(remaining[0])


def _handle(fairshare: FairShare | None) -> Any:
    return ffi.NULL if fairshare is None else fairshare.handle
