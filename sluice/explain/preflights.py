"""What is shown of a job's preflights: whether its nodes were good, and why it was requeued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from sluice.base.files import KeptFile
from sluice.base.hostlist import fold
from sluice.base.text import one_line
from sluice.exchange.preflight_jobs import FILE_NAME, JobPreflight, read_preflights

_MOST_SAID = 200  # characters, so that what came of it is not cut off


class SitePreflights:
    """Those of a site's jobs. `config`: slurmctld's."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._file = KeptFile(Path(config["StateSaveLocation"]) / FILE_NAME, read_preflights)

    def of(self, job: int, user: str) -> list[dict[str, Any]]:
        """Of a user's job, the oldest first; of an array's task by its own number. Raises SluiceError."""
        return shown(one for one in self._file.current().get(job, ()) if one.user == user)


def shown(preflights: Iterable[JobPreflight]) -> list[dict[str, Any]]:
    """As documents have them."""
    return [
        {
            "at": one.time,
            "nodes": one.nodes,
            "rounds": one.rounds,
            "seconds": round(one.seconds, 3),
            "tool": one.tool,
            "verdict": one.verdict,
            "at_fault": [vars(part) for part in one.at_fault],
            "suspected": one.suspected,
            "left_out": one.left_out,
            "requeued_at": one.requeued,
            "released_at": one.released,
            "text": _sentence(one),
        }
        for one in preflights
    ]


def _sentence(one: JobPreflight) -> str:
    said = one_line(one.words.removeprefix("preflight: "), limit=_MOST_SAID)
    words = f"preflight at {_moment(one.time)}: {said}"
    if one.requeued is None:
        return words
    words += f"; requeued at {_moment(one.requeued)}"
    others = fold(part.node for part in one.at_fault)
    return words if one.released is None else f"{words}, starts on other nodes than {others}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S")
