"""The words of a job's record in the AdminComment of Slurm's accounting, where users of sacct find it.

``sluice:v=1,rung=limiter,gpus=2,asked=10240,peak=9216,refused=1,ended=0``: words without quotes, as sacctmgr changes
quotes. All else in the field is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sluice.exchange.record import JobRecord

_MIB = 1 << 20
_OURS = re.compile(r"(?:^|\s)sluice:([A-Za-z0-9_=,.+-]*)")


def render(records: Iterable[JobRecord]) -> str:
    """The words for one run of a job, of its records on all nodes. Memory is in MiB of one GPU, the largest of all."""
    records = list(records)
    grants = [grant for record in records for grant in record.grants]
    events = [event.action for record in records for event in record.events]
    asked = [grant.asked for grant in grants if grant.asked is not None]
    limits = [grant.limit for grant in grants if grant.limit is not None]
    facts: dict[str, object] = {
        "v": 1,
        "rung": "+".join(sorted({grant.rung for grant in grants})) or "none",
        "gpus": len({(record.node, grant.uuid) for record in records for grant in record.grants}),
        "asked": max(asked) // _MIB if asked else None,
        "limit": max(limits) // _MIB if limits else None,
        "peak": max((-(-grant.peak // _MIB) for grant in grants), default=0),
        "refused": sum(grant.refused for grant in grants),
        "ended": events.count("end"),
        "unclean": sum(grant.clean is False for grant in grants) or None,
        **_measured(records),
    }
    return "sluice:" + ",".join(f"{name}={value}" for name, value in facts.items() if value is not None)


_MEASURED = ("gs", "us", "is", "ej", "ts")


def _measured(records: list[JobRecord]) -> dict[str, object]:
    """GPU-seconds measured, used and idle, joules, and throttled seconds: sums over the nodes that know them."""
    found: dict[str, object] = {}
    for name in _MEASURED:
        values = [record.usage[name] for record in records if record.usage and _is_number(record.usage.get(name))]
        if values:
            found[name] = round(sum(values))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e15


def parse(comment: str) -> dict[str, str] | None:
    """Our words in an AdminComment; None where there are none."""
    match = _OURS.search(comment)
    if match is None:
        return None
    return dict(word.split("=", 1) for word in match[1].split(",") if "=" in word)


def merge(comment: str, ours: str) -> str:
    """The field with our words in place of our earlier ones, and all else as it was."""
    others = _OURS.sub("", comment).strip()
    return f"{others} {ours}" if others else ours
