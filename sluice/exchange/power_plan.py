"""`sluice.power` in StateSaveLocation: what slurmctld's planner counts jobs with. The controllers' daemon writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.base.files import write_if_changed
from sluice.exchange.plugin_list import checksummed

FILE_NAME = "sluice.power"
MOST_LINES = 65_536
_HEAD = "sluice-power 1\n"


@dataclass(frozen=True, slots=True)
class LoweredBudget:
    """A budget that is less than the policy's for a while."""

    watts: int
    until: float
    """Unix time."""
    by: str = ""
    at: float = 0.0


def render(
    estimates: Iterable[tuple[int | None, str, float]],
    jobs: Mapping[int, float],
    lowered: Mapping[str, LoweredBudget],
) -> str:
    """The file's text. `estimates`: user (None: any), class, watts. Budgets come first: where there are more lines than
    the plugins take, jobs and estimates are left out, which then count with their class's default."""
    lines = [f"budget {name} {one.watts} {int(one.until)}" for name, one in sorted(lowered.items())]
    lines += [f"job {job} {-int(-watts // 1)}" for job, watts in sorted(jobs.items())]
    lines += [f"estimate {'-' if user is None else user} {name} {-int(-watts // 1)}" for user, name, watts in estimates]
    body = _HEAD + "".join(line + "\n" for line in lines[:MOST_LINES])
    return checksummed(body)


def write(path: Path, text: str) -> bool:
    """Whether the file changed. Raises OSError."""
    return write_if_changed(path, text, mode=0o644)
