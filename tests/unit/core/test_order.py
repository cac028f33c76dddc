"""The core's order against a plain Python reference, on random queues and account trees."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.core.errors import CoreError
from sluice.core.order import (
    FACTOR_ONE,
    DeadlineVerdict,
    Factor,
    FairShare,
    Order,
    OrderJob,
    OrderPolicy,
    Predictor,
    score,
)

NOW = 10_000


@st.composite
def queues(draw):
    count = draw(st.integers(0, 30))
    return [
        OrderJob(
            id=index,
            submit_s=draw(st.integers(0, NOW)),
            remaining_s=draw(st.integers(0, 100_000)),
            gpus=draw(st.integers(0, 128)),
            deadline_s=draw(st.sampled_from([0, 1, 9_000, 12_000, 30_000])),
            priority=draw(st.integers(0, FACTOR_ONE)),
        )
        for index in range(count)
    ]


policies = st.builds(
    OrderPolicy,
    weights=st.dictionaries(
        st.sampled_from([Factor.PRIORITY, Factor.AGE, Factor.DEADLINE, Factor.SIZE]), st.integers(0, 1_000_000)
    ),
    age_full_s=st.integers(1, 20_000),
    laxity_horizon_s=st.integers(1, 20_000),
    size_full_gpus=st.integers(1, 128),
    starvation_s=st.sampled_from([0, 1, 5_000, 20_000]),
)


def reference_factors(policy: OrderPolicy, job: OrderJob) -> dict[Factor, int]:
    laxity = job.deadline_s - NOW - job.remaining_s
    urgent = job.deadline_s > 0 and laxity >= 0
    return {
        Factor.PRIORITY: job.priority,
        Factor.AGE: FACTOR_ONE * min(NOW - job.submit_s, policy.age_full_s) // policy.age_full_s,
        Factor.DEADLINE: FACTOR_ONE - FACTOR_ONE * min(laxity, policy.laxity_horizon_s) // policy.laxity_horizon_s
        if urgent
        else 0,
        Factor.SIZE: FACTOR_ONE * min(job.gpus, policy.size_full_gpus) // policy.size_full_gpus,
    }


def reference_key(policy: OrderPolicy, job: OrderJob) -> tuple[bool, int, int, int]:
    starving = 0 < policy.starvation_s <= NOW - job.submit_s
    factors = reference_factors(policy, job)
    total = sum(weight * factors[factor] for factor, weight in policy.weights.items())
    return (not starving, 0 if starving else -total, job.submit_s, job.id)


@given(policies, queues())
def test_order_is_the_reference_order(policy, jobs):
    expected = sorted(range(len(jobs)), key=lambda index: reference_key(policy, jobs[index]))
    assert Order(len(jobs)).sort(policy, jobs, NOW) == expected


@given(queues())
def test_shortest_remaining_service_up_to_the_resolution_of_the_logarithm(jobs):
    policy = OrderPolicy(weights={Factor.SERVICE: 1})
    services = [max(jobs[i].remaining_s * max(jobs[i].gpus, 1), 1) for i in Order(len(jobs)).sort(policy, jobs, NOW)]
    for earlier, later in pairwise(services):
        assert math.log2(earlier) <= math.log2(later) + 2**-23


def test_terms_explain_the_score():
    policy = OrderPolicy(weights={Factor.AGE: 3, Factor.DEADLINE: 5}, age_full_s=NOW, laxity_horizon_s=1000)
    terms = score(policy, OrderJob(id=1, submit_s=0, remaining_s=100, gpus=1, deadline_s=NOW + 600), NOW)
    assert terms.terms[Factor.AGE] == 3 * FACTOR_ONE
    assert terms.terms[Factor.DEADLINE] == 5 * (FACTOR_ONE // 2)
    assert terms.score == sum(terms.terms.values())
    assert (terms.laxity_s, terms.deadline, terms.starving) == (500, DeadlineVerdict.FEASIBLE, False)


class ReferenceTree:
    """Fair Tree as its authors describe it, with exact fractions and without decay."""

    def __init__(self) -> None:
        self.parents = [0]
        self.shares = [1]
        self.usage = [0]

    def add(self, parent: int, shares: int) -> None:
        self.parents.append(parent)
        self.shares.append(shares)
        self.usage.append(0)

    def charge(self, account: int, usage: int) -> None:
        while True:
            self.usage[account] += usage
            if account == 0:
                return
            account = self.parents[account]

    def children(self, account: int) -> list[int]:
        return [child for child in range(1, len(self.parents)) if self.parents[child] == account]

    def level_key(self, account: int) -> tuple[bool, float | Fraction, int]:
        if self.shares[account] == 0:
            return (True, -Fraction(0), self.usage[account] and 0)
        if self.usage[account] == 0:
            return (False, -math.inf, -self.shares[account])
        return (False, -Fraction(self.shares[account], self.usage[account]), 0)

    def size(self, account: int) -> int:
        return 1 + sum(self.size(child) for child in self.children(account))

    def positions(self, account: int = 0, begin: int = 0) -> dict[int, int]:
        places = {account: begin}
        position = begin + 1
        previous: int | None = None
        for child in sorted(self.children(account), key=lambda child: (self.level_key(child), child)):
            leaves = previous is not None and not self.children(child) and not self.children(previous)
            tied = leaves and self.level_key(child) == self.level_key(previous)
            places |= self.positions(child, places[previous] if tied else position)
            position += self.size(child)
            previous = child
        return places


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 5)), max_size=12),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), max_size=12),
)
def test_fair_tree_is_the_reference_tree(accounts, charges):
    tree, reference = FairShare(len(accounts) + 1), ReferenceTree()
    for count, (parent, shares) in enumerate(accounts, start=1):
        tree.add(parent % count, shares)
        reference.add(parent % count, shares)
    total = len(accounts) + 1
    for account, usage in charges:
        tree.charge(account % total, usage, 0)
        reference.charge(account % total, usage)
    tree.refresh(0)
    for account, position in reference.positions().items():
        place = position - 1 if account else 0
        assert tree.factor(account) == FACTOR_ONE * (total - place) // total


def test_two_tenants_of_weight_one_and_three_share_a_busy_cluster_so():
    """Serve the user who comes first in the tree, a minute of GPU at a time."""
    tree = FairShare(3, half_life_s=86400)
    small, large = tree.add(0, 1), tree.add(0, 3)
    served = {small: 0, large: 0}
    for minute in range(10_000):
        tree.refresh(minute * 60)
        account = max(served, key=tree.factor)
        tree.charge(account, 60_000, minute * 60)
        served[account] += 1
    assert served[large] / 10_000 == pytest.approx(0.75, abs=0.01)


def test_refusals_carry_the_cores_words():
    with pytest.raises(CoreError, match="account 5 is not in the fair-share tree"):
        score(OrderPolicy(weights={Factor.FAIR_SHARE: 1}), OrderJob(1, 0, 1, 1, account=5), NOW, FairShare(1))
    with pytest.raises(CoreError, match="0 predictor keys"):
        Predictor().predict([], 10)


def test_predictor_learns():
    predictor = Predictor(quantile_percent=100)
    for run_s in (100, 300, 200):
        predictor.record([11, 1], run_s)
    assert predictor.predict([11, 1], limit_s=3600) == 300
    assert predictor.predict([12, 1], limit_s=250) == 250
    assert predictor.predict([99], limit_s=77) == 77
