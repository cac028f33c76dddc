"""Which gateway answers a request that has a name (an Idempotency-Key), so that several that get it answer it once.

A gateway that is not heard for CLAIM_US is taken for dead, and what it answered is free. A new book knows no names:
gateways say again what they answer, and what has a bill is known at its gateway alone then.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from sluice.exchange.serving import LeaseReport

CLAIM_US: Final = 1_500_000
"""Three times what is between two reports."""
MOST_NAMES: Final = 20_000
"""Of a gateway; what it claims beyond them is free, and not remembered."""
MOST_BILLED: Final = 200_000


@dataclass(slots=True)
class _Gateway:
    heard: int
    names: set[str] = field(default_factory=set)


class Claims:
    """All of them. Times are microseconds of the book's clock."""

    def __init__(self) -> None:
        self._gateways: dict[str, _Gateway] = {}
        self._owners: dict[str, str] = {}
        self._billed: OrderedDict[str, None] = OrderedDict()

    def take(self, report: LeaseReport, now: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A gateway's report; what of its claims others hold, and what has a bill."""
        for name in [name for name, one in self._gateways.items() if now - one.heard > CLAIM_US]:
            if name != report.gateway:
                self._drop(name)
        mine = self._gateways.setdefault(report.gateway, _Gateway(now))
        mine.heard = now
        for name, has_bill in report.ended:
            self._free(report.gateway, mine, name)
            if has_bill:
                self._bill(name)
        if report.leaves:
            self._drop(report.gateway)
            return (), ()
        billed = tuple(name for name in report.claims if name in self._billed)
        rest = [name for name in report.claims if name not in self._billed]
        return tuple(name for name in rest if not self._claim(report.gateway, mine, name)), billed

    def _claim(self, gateway: str, mine: _Gateway, name: str) -> bool:
        if self._owners.get(name, gateway) != gateway:
            return False
        if len(mine.names) < MOST_NAMES:
            self._owners[name] = gateway
            mine.names.add(name)
        return True

    def _free(self, gateway: str, mine: _Gateway, name: str) -> None:
        mine.names.discard(name)
        if self._owners.get(name) == gateway:
            del self._owners[name]

    def _bill(self, name: str) -> None:
        self._billed[name] = None
        if len(self._billed) > MOST_BILLED:
            self._billed.popitem(last=False)

    def _drop(self, gateway: str) -> None:
        for name in self._gateways.pop(gateway).names:
            del self._owners[name]
