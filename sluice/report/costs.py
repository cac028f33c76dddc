"""The report `cost`: what machines of pools cost, by whose jobs used them; what nobody used is a line of its own.

A job's part of a machine is that of its GPUs; where a pool has none, that of its CPUs. An hour of a machine costs what
the pool's machines cost on average over the report's days, so that all lines together are what was paid.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from sluice.exchange.pool_costs import PoolCosts, Spent
from sluice.report.count import Span
from sluice.report.fields import Row, entitled_s
from sluice.report.rollup import day_of
from sluice.report.tally import Key, Tally

IDLE = "(idle)"


def machine_s(tally: Tally, pool: PoolCosts) -> float:
    """Time of whole machines that jobs had."""
    return entitled_s(tally) / pool.gpus if pool.gpus else tally.cpu_s / max(1, pool.cpus)


def cost_rows(
    pools: Mapping[str, PoolCosts], cells: Mapping[Key, Tally], names: Sequence[str], span: Span, *, idle: bool
) -> list[Row]:
    """Lines for each of `names`; `idle`: also for what no job used, which needs the cells of all jobs."""
    of_partition = {one.partition: one for one in pools.values()}  # the newest pool says what a node is
    totals = {partition: Spent() for partition in of_partition}
    for one in pools.values():  # one that was renamed is two of one partition
        totals[one.partition].add(one.total(day_of(span.start), day_of(span.end - 1)))
    rows: dict[tuple[str, ...], Row] = {}
    left = {partition: replace(one) for partition, one in totals.items()}
    for key, tally in cells.items():
        if key.partition not in of_partition:
            continue
        used = machine_s(tally, of_partition[key.partition])
        total = totals[key.partition]
        part = used / total.machine_s if total.machine_s else 0.0
        spent = Spent(used, total.cost * part, total.unpriced_s * part)
        _add(rows, {name: getattr(key, name) for name in names}, tally, spent)
        left[key.partition].machine_s -= used
        left[key.partition].cost -= spent.cost
    if idle:
        for partition, rest in left.items():
            if rest.machine_s > 0:
                _add(rows, {"partition": partition, "account": IDLE}, Tally(), rest)
    return list(rows.values())


def _add(rows: dict[tuple[str, ...], Row], names: Mapping[str, str], tally: Tally, spent: Spent) -> None:
    row = rows.setdefault(tuple(names.values()), Row(Tally(), names, {"machine_s": 0.0, "cost": None}))
    row.tally.add(tally)
    row.extra["machine_s"] += spent.machine_s
    if spent.cost or not spent.unpriced_s:  # else nothing is known, which is not 0
        row.extra["cost"] = (row.extra["cost"] or 0.0) + spent.cost


def unpriced_words(pools: Mapping[str, PoolCosts], span: Span, partitions: Container[str] | None = None) -> list[str]:
    """A sentence for each pool, of these partitions, whose costs in a span lack those of machines of which nobody knows
    the price. It has nothing of how many machines there were: that is not everybody's to see.
    """
    return [
        f"pool {name}: costs are without {total.unpriced_s / total.machine_s:.1%} of the machine-hours: "
        "fleetd took machines over whose shape the policy does not have"
        for name, one in pools.items()
        if partitions is None or one.partition in partitions
        if (total := one.total(day_of(span.start), day_of(span.end - 1))).unpriced_s
    ]
