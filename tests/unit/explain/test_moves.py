"""What is said of jobs that were moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.moves import Move, parse_moves, read_moves
from sluice.exchange.plugin_list import checksummed
from sluice.explain.moves import sentences

MOVED = Move(12, 15, "back", 1000, 1003, 1006, 1010, "n1", "n2", "n1", "-")
WRITTEN = "12 15 back 500 1000 1003 1006 1010 n1 n2 n1 -\n"


def whole(lines: str) -> str:
    return checksummed(f"sluice-moves 1\n{lines}")


def test_the_file_that_slurmctld_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sluice.moves"
    assert read_moves(path) == []
    path.write_text(whole(WRITTEN))
    assert read_moves(path) == [MOVED]
    room = f"n[{','.join(str(node) for node in range(100, 162))},7]"
    assert len(room) > 200
    path.write_text(whole(WRITTEN.replace("n2 n1 -", f"n2 {room} -")))
    assert read_moves(path) == [replace(MOVED, room=room)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        whole(WRITTEN)[:-1],
        whole(WRITTEN).replace("12 15", "12 16"),
        whole(WRITTEN.replace("back", "lost")),
        whole(WRITTEN.replace(" -", " because")),
        whole(WRITTEN.replace("n1 -", f"{'n' * 256} -")),
        whole(WRITTEN).replace("moves 1", "moves 2"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(SluiceError, match=r"^sluice\.moves: "):
        parse_moves(text, source="sluice.moves")


@pytest.mark.parametrize(
    ("move", "said"),
    [
        (MOVED, "from n1 to make room for job 15; saved 3 s before, ran again after 4 s"),
        (replace(MOVED, stage="left", back=0), "saved 3 s before; a place on n2 is kept for it"),
        (replace(MOVED, stage="gone", back=0), "saved 3 s before, ended before it ran again"),
        (replace(MOVED, stage="asked"), "is asked to save, to be moved from n1 to n2 and make room for job 15"),
        (replace(MOVED, stage="stayed", why="unsaved"), "make room for job 15, and not moved: it did not save in time"),
    ],
)
def test_a_job_that_moves_is_told_why_and_where(move: Move, said: str) -> None:
    (sentence,) = sentences([move], 12, others=True)
    assert said in sentence
    (hidden,) = sentences([move], 12, others=False)
    assert "job 15" not in hidden
    assert "another job" in hidden


@pytest.mark.parametrize(
    ("move", "said"),
    [
        (MOVED, "from n1 to empty n1; saved 3 s before, ran again after 4 s"),
        (replace(MOVED, stage="asked"), "is asked to save, to be moved from n1 to n2 and empty n1"),
        (replace(MOVED, stage="stayed", why="waits"), "empty n1, and not moved: the node no longer has to be empty"),
        (replace(MOVED, stage="stayed", why="other"), "not moved: another job that would have had to move did not"),
    ],
)
def test_a_job_that_leaves_a_node_is_told_so(move: Move, said: str) -> None:
    (sentence,) = sentences([replace(move, for_job=0)], 12, others=False)
    assert sentence.endswith(said)


def test_the_job_that_waits_is_told_how_many_move_and_not_which() -> None:
    asked = replace(MOVED, stage="asked")
    assert sentences([asked, replace(asked, job=13)], 15, others=True) == [
        "waits: 2 smaller jobs are being moved to make room on n1"
    ]
    left = replace(MOVED, stage="left")
    assert sentences([MOVED, replace(left, job=13)], 15, others=True) == [
        "2 smaller jobs were moved to make room on n1; 1 run again"
    ]
    assert sentences([replace(MOVED, stage="stayed", why="waits")], 15, others=True) == []
    assert sentences([MOVED], 99, others=True) == []


def test_both_sides_are_told_that_nobody_is_preempted_and_what_that_saves() -> None:
    (move,) = parse_moves(whole(WRITTEN.replace("n1 -", "n1 - 4 4400")), source="sluice.moves")
    assert (move.lose, move.instead) == (4, 4400)
    loss = "room for job 15, at a loss of 4 GPU-seconds (it would preempt others at one of 4400)"
    assert loss in sentences([move], 12, others=True)[0]
    assert "room for another job, at a loss of 4 GPU-seconds" in sentences([move], 12, others=False)[0]
    instead = "; the moves lose 4 GPU-seconds, preempting others would lose 4400"
    assert sentences([move], 15, others=True) == [f"1 smaller job was moved to make room on n1; 1 run again{instead}"]
    asked = replace(move, stage="asked", back=0)
    assert sentences([asked], 15, others=True) == [f"waits: a smaller job is being moved to make room on n1{instead}"]


@pytest.mark.parametrize("words", ["- 4", "- 4 0", "- 4 44 4", "- -4 44"])
def test_losses_are_both_there_or_neither(words: str) -> None:
    with pytest.raises(SluiceError):
        parse_moves(whole(WRITTEN.replace("n1 -", f"n1 {words}")), source="sluice.moves")
