"""What is said of jobs that were moved to make room, and of those for which room was made."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from sluice.exchange.emptying import Emptying, read_emptying
from sluice.exchange.moves import FILE_NAME, Move, read_moves

_STAYED = {
    "unsaved": "it did not save in time",
    "other": "another job that would have had to move did not",
    "waits": "that job no longer waits",
    "changed": "places that were free then no longer are",
    "refused": "Slurm did not requeue it",
}
_OLD_S = 60  # slurmctld says every five seconds what becomes of jobs on nodes that are emptied
_MOST = 8  # of a job's moves, the latest


def site_moves(config: Mapping[str, str]) -> list[Move]:
    """By slurmctld's configuration. Raises SluiceError, OSError."""
    return read_moves(Path(config["StateSaveLocation"]) / FILE_NAME)


def sentences(moves: Iterable[Move], job: int, *, others: bool) -> list[str]:
    """Of a job, the oldest first. `others`: the numbers of other users' jobs are no secret."""
    moves = list(moves)
    own = [_moved(move, others=others) for move in moves if move.job == job]
    return own[-_MOST:] + _made(job, [move for move in moves if move.for_job == job])


def site_emptying(config: Mapping[str, str]) -> Emptying:
    """By slurmctld's configuration; of no node where it is old. Raises SluiceError, OSError."""
    said = read_emptying(Path(config["StateSaveLocation"]))
    return said if said.at > time.time() - _OLD_S else Emptying(0, {}, frozenset(), [])


def leaving(said: Emptying, job: int) -> list[str]:
    """Of a job on nodes that an administrator empties: what becomes of it there."""
    found = []
    for one in said.jobs:
        if one.job == job and one.node in said.ordered:
            deadline = said.deadlines[one.node]
            by = f" by {_moment(deadline)}" if deadline else ""
            found.append(f"is on {one.node}, which an administrator empties{by}: {one.reason}")
    return found


def _purpose(move: Move, *, others: bool) -> str:
    if not move.for_job:
        return f"empty {move.room}"
    room = f"make room for {f'job {move.for_job}' if others else 'another job'}"
    if not move.instead:
        return room
    return f"{room}, at a loss of {move.lose} GPU-seconds (it would preempt others at one of {move.instead})"


def _moved(move: Move, *, others: bool) -> str:
    purpose = _purpose(move, others=others)
    if move.stage == "asked":
        return f"is asked to save, to be moved from {move.origin} to {move.to} and {purpose}"
    if move.stage == "stayed":
        asked = f"was asked at {_moment(move.asked)} to save and {purpose}"
        stays = move.why == "waits" and not move.for_job
        why = "the node no longer has to be empty" if stays else _STAYED.get(move.why, move.why)
        return f"{asked}, and not moved: {why}"
    saved = f"saved {move.left - move.saved} s before"
    words = f"moved at {_moment(move.left)} from {move.origin} to {purpose}; {saved}"
    if move.stage == "left":
        return f"{words}; a place on {move.to} is kept for it"
    return f"{words}, ended before it ran again" if move.stage == "gone" else f"{words}, ran again after {_away(move)}"


def _away(move: Move) -> str:
    return f"{move.back - move.left} s"


def _made(job: int, moves: list[Move]) -> list[str]:
    """Of the job for which others move: how many of them."""
    found = []
    asked = sum(move.stage == "asked" for move in moves)
    left = [move for move in moves if move.stage in ("left", "back", "gone")]
    if asked:
        found.append(f"waits: {_jobs(asked)} being moved to make room on {moves[-1].room}{_instead(moves[-1])}")
    if left:
        back = sum(move.stage == "back" for move in left)
        rooms = ",".join(sorted({move.room for move in left}))
        verb = "was" if len(left) == 1 else "were"
        moved = f"{len(left)} smaller job{_s(len(left))} {verb} moved to make room on {rooms}"
        found.append(f"{moved}; {back} run again{_instead(left[-1])}")
    return found


def _instead(move: Move) -> str:
    """Why it preempts nobody."""
    if not move.instead:
        return ""
    return f"; the moves lose {move.lose} GPU-seconds, preempting others would lose {move.instead}"


def _jobs(count: int) -> str:
    return "a smaller job is" if count == 1 else f"{count} smaller jobs are"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S")
