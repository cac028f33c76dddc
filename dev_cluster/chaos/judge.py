"""What became of every job of a run: nothing may be lost, revived or run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_GRACE_S = 2.0  # what a cancelled job may still have begun
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Outcome:
    """What became of the jobs. All but the first three must be 0."""

    acknowledged: int = 0
    cancelled: int = 0
    refused: int = 0
    lost: int = 0
    """Acknowledged, not cancelled, and neither run to their end nor known to Slurm."""
    revived: int = 0
    """Started, or still wanted, after their cancellation was acknowledged."""
    run_again: int = 0
    """Started after their end."""
    started_again: int = 0
    """Started a second time, the first having been broken off."""
    id_twice: int = 0
    """Ids that two jobs were given."""
    at_once: int = 0
    """Running twice at the same time."""
    left: int = 0
    """Still waiting or running when all should be over."""
    held_again: int = 0
    """Released, and held again: a change is not replayed, but reported (docs/failover.md)."""
    lost_jobs: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Sum up."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def evaluate(log: Iterable[dict[str, Any]], runs: dict[str, list[list[str]]], states: dict[int, str]) -> Outcome:
    """Judge what Slurm answered (`log`), what the jobs said (`runs`: TAG.TASK -> lines), and Slurm's last word.

    `states` has the jobs that slurmctld still knows; those of an array under the id of each task.
    """
    outcome = Outcome()
    accepted: dict[str, dict[str, Any]] = {}
    cancelled: dict[int, float] = {}
    asked: dict[int, float] = {}
    for entry in log:
        if entry["what"] == "accepted":
            accepted[entry["tag"]] = entry
        elif entry["what"] == "refused":
            outcome.refused += 1
        elif entry["what"] == "asks" and entry["do"] == "cancel":
            asked.setdefault(entry["id"], entry["up"])
        elif entry["what"] == "done" and entry["do"] == "cancel":
            cancelled[entry["id"]] = entry["up"]
    outcome.acknowledged = len(accepted)
    outcome.cancelled = len(cancelled)
    ids = Counter(entry["id"] for entry in accepted.values())
    ids_of_runs: dict[int, set[str]] = {}
    for name, lines in runs.items():
        for line in lines:
            ids_of_runs.setdefault(int(line[1]), set()).add(name)
    twice = {number for number, count in ids.items() if count > 1}
    twice |= {number for number, names in ids_of_runs.items() if len(names) > 1}
    outcome.id_twice = len(twice)
    for tag, entry in accepted.items():
        names = [f"{tag}.{task}" for task in range(1, 4)] if entry["tasks"] > 1 else [f"{tag}.x"]
        number = entry["id"]
        for name in names:
            _judge(outcome, name, entry, runs.get(name, []), states, cancelled.get(number), asked.get(number))
    return outcome


def _judge(
    outcome: Outcome,
    name: str,
    entry: dict[str, Any],
    lines: list[list[str]],
    states: dict[int, str],
    cancelled: float | None,
    asked: float | None,
) -> None:
    number = entry["id"]
    starts = [float(line[4]) for line in lines if line[0] == "start"]
    ends = [float(line[4]) for line in lines if line[0] == "end"]
    outcome.at_once += any(line[0] == "twice" for line in lines)
    again = bool(ends) and any(start > min(ends) for start in starts)
    outcome.run_again += again
    outcome.started_again += len(starts) > 1 and not again
    state = states.get(number, "")
    waiting = state and not state.startswith(_ENDED)
    if again or len(starts) > 1 or (lines and any(line[0] == "twice" for line in lines)):
        outcome.others.append(f"{name}={number} {state} {lines}")
    if cancelled is not None:
        revived = bool(waiting) or any(start > cancelled + _GRACE_S for start in starts)
        outcome.revived += revived
        if revived:
            outcome.others.append(f"revived {name}={number} {state} cancelled {cancelled} {lines}")
    elif state == "PENDING" and entry.get("fate") == "release" and not lines:
        outcome.held_again += 1
    elif waiting:
        outcome.left += 1
        outcome.others.append(f"left {name}={number} {state} {lines}")
    elif not ends and asked is None:
        outcome.lost += 1
        outcome.lost_jobs.append(f"{name}={number} {state or 'unknown'} {lines}")
