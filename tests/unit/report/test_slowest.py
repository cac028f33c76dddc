"""The GPU that the others of a job wait for, found in simulated counters of ranks that work in step."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from sluice.cli.report_job import _nics, _slowest
from sluice.exchange.record import Grant, JobRecord
from sluice.report.slowest import Slowest, slowest
from sluice.report.summaries import GpuUse, of_records

WORK_W, SPIN_W, IDLE_W, SLOWED_W = 650.0, 330.0, 110.0, 420.0


def gpu(number: int, percent: float | None, watts: float | None = None, throttled: float | None = 0.0) -> GpuUse:
    return GpuUse(
        f"n{number // 4}", number % 4, f"GPU-{number}", "H100", 81920, None, None, "none", 0, 0,
        now_percent=percent, now_watts=watts, now_throttled_percent=throttled,
    )  # fmt: skip


def job(work: list[float], *, spins: bool, slowed: int | None = None, noise: random.Random) -> list[GpuUse]:
    """Ranks whose step takes so long by themselves, and that wait for the longest; `slowed` draws less at work."""
    step = max(work)
    found = []
    for number, own in enumerate(work):
        share, rest = own / step, 1 - own / step
        watts = share * (SLOWED_W if number == slowed else WORK_W) + rest * (SPIN_W if spins else IDLE_W)
        percent = 100.0 if spins else 100 * share
        found.append(
            gpu(
                number,
                percent * noise.uniform(0.97, 1.0),
                watts * noise.uniform(0.97, 1.03),
                noise.uniform(60, 100) if number == slowed else noise.uniform(0, 2),
            )
        )
    return found


@pytest.mark.parametrize("spins", [False, True])
def test_what_is_named_is_the_slowest_and_one_that_is_clearly_slower_is_always_named(spins: bool) -> None:
    chance = random.Random(4)
    named = 0
    for _ in range(2000):
        work = [chance.uniform(0.9, 1.0) for _ in range(chance.randrange(2, 17))]
        slow = chance.randrange(len(work))
        factor = chance.choice((1.0, 1.1, 1.3, 2.0, 4.0))
        work[slow] *= factor
        slowed = slow if factor > 1 and chance.random() < 0.3 else None
        found = slowest(job(work, spins=spins, slowed=slowed, noise=chance))
        if found is not None:
            named += 1
            assert 4 * int(found.node[1:]) + found.index == slow
        assert found is not None or factor < (4.0 if spins else 2.0)
        assert found is None or factor > 1.0
    assert named > 500


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ([], None),
        ([gpu(0, 99)], None),
        ([gpu(0, 99), gpu(1, 40)], Slowest("n0", 0, "busy", 99, 40)),
        ([gpu(0, 99), gpu(1, None)], None),  # a node has not reported
        ([gpu(0, 99), gpu(1, 95), gpu(2, 40), gpu(3, 40)], None),  # two of them: neither is the one
        ([gpu(0, 45), gpu(1, 5)], None),  # nobody works much
        ([gpu(0, 99, 600), gpu(1, 98, 300)], Slowest("n0", 0, "power", 600, 300)),
        ([gpu(0, 99, 600), gpu(1, 98)], None),
        ([gpu(0, 99, 600, 10), gpu(1, 98, 300, 10)], None),  # both are slowed down
        ([gpu(0, 99, 300, 80), gpu(1, 98, 600)], Slowest("n0", 0, "throttled", 80, 0)),
        ([gpu(0, 99), replace(gpu(1, 40), model="A100")], None),
        ([gpu(0, 99), replace(gpu(1, 40), asked_mib=1024)], None),
        ([gpu(0, 0, 0), gpu(1, 0, 0)], None),
    ],
)
def test_the_rule(gpus: list[GpuUse], found: Slowest | None) -> None:
    assert slowest(gpus) == found


def record(node: str, percent: float, **usage: Any) -> JobRecord:
    grant = Grant(0, f"GPU-{node}", "nvidia", "H100", 80 << 30)
    now = {"utilisation": percent, "memory": 1 << 30, "watts": 500.0, "throttled": 0.0}
    gpus = {grant.uuid: {"seconds": 60.0, "now": now}}
    return JobRecord(7, 1, "a", "b", "c", node, 1.0, grants=[grant], usage={"gpus": gpus, **usage})


def test_lines_of_the_page_from_the_records_of_a_jobs_nodes() -> None:
    counted = {"shared": False, "transmit_bytes": 3 << 30, "link_downs": 2}
    use = of_records(
        [record("n1", 97.0, nics={"mlx5_0": counted, "mlx5_1": {"shared": True}}), record("n2", 40.0, nics="none")]
    )
    assert use.slowest is not None
    used = {"nics": list(use.nics), "slowest": asdict(use.slowest)}
    assert _slowest(used) == [
        "  slowest      n1 GPU 0: busy 97 % of the time, and the others 40 %, as they wait for it"
    ]
    assert _nics(used) == [
        "  network      n1 mlx5_0: 3G sent, link downs 2",
        "  network      n1 mlx5_1: shared with other jobs",
    ]
    assert _nics({}) == _slowest({}) == []
