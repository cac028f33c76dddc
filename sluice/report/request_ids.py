"""Which requests the days before one have billed, so that what comes again is billed once, and on the right day.

A record can come long after another one of its id: a stream that went on over midnight after its first worker was
killed, a batch's line that a job answered again, what a gateway that was cut off wrote. Of a day, all ids are kept in
eight bytes each, and those bills whole that a later record may replace.

A caller chooses what an id is made of (its Idempotency-Key), and gateways forget which they have billed: except of
batches, whose ids are the gateway's own, a request that began AGAIN_S after a day's end is none of that day, so that
nobody has an answer for nothing by a key that was paid for days ago.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime
from functools import cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, Self

from sluice.exchange.requests import BATCHES, Added, RequestRecord, parse, render, replaces

LATE_DAYS: Final = 15
"""A batch takes 14 days at most, and is the longest that there is."""
AGAIN_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_MOST_IDS: Final = 2_000_000
_MOST_BILLS: Final = 20_000  # some 1 KiB each

Billed = RequestRecord | Literal["whole"] | None
"""What is known of an id: its bill, which may be replaced; that nothing more is billed for it; nothing."""


class DayIds:
    """Of the records of one UTC day."""

    def __init__(self) -> None:
        self._marks = array("Q")
        self._sorted = True
        self._bills: dict[str, RequestRecord] = {}

    def follow(self, added: Added, paths: Iterable[Path]) -> Iterator[tuple[RequestRecord, RequestRecord | None]]:
        """What `added` reads, once all of it was taken. Raises OSError."""
        for record, bill in added.read(paths):
            if bill is None and len(self._marks) < _MOST_IDS:
                self._marks.append(_mark(record.id))
                self._sorted = False
            yield record, bill
        self._bills = dict(islice(reversed(added.bills().items()), _MOST_BILLS))

    def find(self, name: str, mark: int) -> Billed:
        """What this day has of an id."""
        if not self._sorted:
            self._marks, self._sorted = array("Q", sorted(self._marks)), True
        at = bisect_left(self._marks, mark)
        if at == len(self._marks) or self._marks[at] != mark:
            return None
        return self._bills.get(name, "whole")

    def document(self) -> dict[str, Any]:
        """For a file."""
        bills = [render(one).decode() for one in self._bills.values()]
        return {"ids": b64encode(self._marks.tobytes()).decode(), "bills": bills}

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """What `document` gave. Raises ValueError, KeyError, TypeError, AttributeError for what is none."""
        made = cls()
        made._marks.frombytes(b64decode(document["ids"], validate=True))
        made._sorted = False
        for line in document["bills"]:
            record = parse(line.rstrip("\n").encode())
            if record is None:
                raise ValueError("a bill that is none")
            made._bills[record.id] = record
        return made


class Earlier:
    """Those of several days, the oldest first, each got when it is needed: of the oldest ones batches alone may ask."""

    def __init__(self, days: Iterable[date], ids_of: Callable[[date], DayIds]) -> None:
        self._days = [(_end_of(day), day) for day in days]
        self._ids_of = cache(ids_of)

    def find(self, record: RequestRecord) -> Billed:
        """What is billed of a record's request. Raises OSError."""
        since = 0.0 if record.endpoint == BATCHES else record.begun - AGAIN_S
        days = [day for end, day in self._days if end > since]
        if not days:
            return None
        mark, found = _mark(record.id), None
        for day in days:
            found = holds(found, self._ids_of(day).find(record.id, mark))
        return found


def holds(before: Billed, after: Billed) -> Billed:
    """Which of two bills of one id holds."""
    if before is None or after is None:
        return before or after
    if before == "whole" or after == "whole":
        return "whole" if before == "whole" else after
    return after if replaces(after, before) else before


def _end_of(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() + _DAY_S


def _mark(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
