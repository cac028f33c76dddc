"""Running jobs that slurmctld moved to make room for others: its file `sluice.moves` (`slurm_plugin/planner/moves.h`).

Times are seconds since 1970.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from sluice.exchange.plugin_list import items_of, read_list

FILE_NAME = "sluice.moves"
"""Below StateSaveLocation."""
Stage = Literal["asked", "left", "back", "stayed", "gone"]
Why = Literal["-", "unsaved", "other", "waits", "changed", "refused"]
_HEAD = "sluice-moves 1\n"
_STAGES = "asked|left|back|stayed|gone"
_WHYS = "-|unsaved|other|waits|changed|refused"
_NODE = r"([!-~]{1,64})"
_NODES = r"([!-~]{1,255})"
_LINE = re.compile(
    rf"(\d{{1,10}}) (\d{{1,10}}) ({_STAGES}) \d{{1,13}} (\d{{1,13}}) (\d{{1,13}}) (\d{{1,13}}) (\d{{1,13}}) "
    rf"{_NODE} {_NODE} {_NODES} ({_WHYS})(?: (\d{{1,13}}) ([1-9]\d{{0,12}}))?"
)


@dataclass(frozen=True, slots=True)
class Move:
    """One job's move; times that have not come are 0."""

    job: int
    for_job: int
    """0: to empty `room`."""
    stage: Stage
    asked: int
    saved: int
    left: int
    back: int
    origin: str
    to: str
    room: str
    """The nodes where room is made, or that is emptied, as Slurm lists them."""
    why: Why
    """Why it stayed."""
    lose: int = 0
    """GPU-seconds that all moves of the plan lose ..."""
    instead: int = 0
    """... and that preempting for `for_job` would have lost; 0: nobody would have been preempted."""


def parse_moves(text: str, *, source: str) -> list[Move]:
    """The moves of a file, the oldest first. Raises SluiceError that names `source`."""
    remedy = "slurmctld writes it again with the next move"
    found = items_of(text, head=_HEAD, line=_LINE, what="a move", source=source, remedy=remedy)
    return [_move(*words) for words in found]


def _move(job: str, for_job: str, stage: str, *rest: str) -> Move:
    asked, saved, left, back, origin, to, room, why, lose, instead = rest
    numbers = (int(asked), int(saved), int(left), int(back))
    losses = (int(lose or 0), int(instead or 0))
    return Move(int(job), int(for_job), cast(Stage, stage), *numbers, origin, to, room, cast(Why, why), *losses)


def read_moves(path: Path) -> list[Move]:
    """None where there is no file. Raises SluiceError, OSError."""
    return read_list(path, lambda text: parse_moves(text, source=str(path)))
