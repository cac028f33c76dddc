"""Reports this node's power to the controllers each `PERIOD_S`, and follows the caps that they answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from policy.node_power import NodePower
from prolog_epilog.power.keeper import PowerKeeper
from prolog_epilog.state import State
from sluice.base.duties import NotYet
from sluice.exchange.courier import VERSION
from sluice.exchange.power import PERIOD_S, GpuPower, PowerOrder, PowerReport

_IDLE_S = 5.0  # between two looks at a policy without budgets

Send = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends a request to the controllers; their answer. Raises SluiceError."""


class PowerReports:
    """What is remembered between two reports."""

    def __init__(
        self,
        state: State,
        keeper: PowerKeeper,
        policy: Callable[[], NodePower],
        send: Send,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._keeper = keeper
        self._policy = policy
        self._send = send
        self._clock = clock
        self._energy: dict[str, tuple[float, int]] = {}  # when, and the counter in mJ

    def run(self) -> float | None:
        """A duty. Raises SluiceError when the controllers do not answer, OSError."""
        if not self._policy().report:
            if self._keeper.order.number:
                self._keeper.obey(PowerOrder())  # the site has no budgets any more
            return NotYet(_IDLE_S)
        began = self._clock()
        answer = self._send({"version": VERSION, "do": "power", **self.report().to_dict()})
        if "order" in answer:
            order = PowerOrder.from_dict(answer["order"])
            if order.number > self._keeper.order.number:
                self._keeper.obey(order)
        return max(0.0, began + PERIOD_S - self._clock())

    def report(self) -> PowerReport:
        """Of all GPUs now."""
        jobs: dict[str, set[int]] = {}
        with self._state.lock:
            for record in self._state.records.values():
                for grant in record.grants:
                    jobs.setdefault(self._state.devices[grant.index].gpu_uuid, set()).add(record.job)
        gpus = []
        for uuid, one in self._keeper.look().items():
            limit = one.limit
            gpus.append(
                GpuPower(
                    uuid,
                    cap_w=limit.cap_mw / 1000 if limit else None,
                    default_w=limit.default_mw / 1000 if limit else None,
                    least_w=limit.least_mw / 1000 if limit else None,
                    most_w=limit.most_mw / 1000 if limit else None,
                    before_w=None if one.before_mw is None else one.before_mw / 1000,
                    power_w=self._power(uuid, one.energy_mj),
                    jobs_w=None if one.jobs_mw is None else one.jobs_mw / 1000,
                    planned_w=None if one.planned_mw is None else one.planned_mw / 1000,
                    jobs=tuple(sorted(jobs.get(uuid, ()))),
                    why=one.why,
                    problem=one.problem[:300],
                )
            )
        return PowerReport(self._state.node, self._keeper.order.number, tuple(gpus))

    def _power(self, uuid: str, energy_mj: int | None) -> float | None:
        """The mean since the report before; None the first time, and where the driver does not count energy."""
        now, last = self._clock(), self._energy.pop(uuid, None)
        if energy_mj is None:
            return None
        self._energy[uuid] = now, energy_mj
        if last is None or now <= last[0] or energy_mj < last[1]:
            return None
        return round((energy_mj - last[1]) / 1000 / (now - last[0]), 3)
