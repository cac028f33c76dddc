"""The judge of the chaos runs finds each kind of loss, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from dev_cluster.chaos.judge import Outcome, evaluate

_COUNTS = ("lost", "revived", "run_again", "started_again", "id_twice", "at_once", "left")


def accepted(tag: str = "a", number: int = 1, tasks: int = 1) -> dict[str, Any]:
    return {"what": "accepted", "tag": tag, "id": number, "tasks": tasks, "up": 1.0}


def cancel(number: int = 1, up: float = 5.0) -> list[dict[str, Any]]:
    return [
        {"what": "asks", "do": "cancel", "id": number, "up": up},
        {"what": "done", "do": "cancel", "id": number, "up": up},
    ]


def line(what: str, up: float, number: int = 1) -> list[str]:
    return [what, str(number), "n1", "77", str(up)]


def counts(outcome: Outcome) -> dict[str, int]:
    return {name: getattr(outcome, name) for name in _COUNTS if getattr(outcome, name)}


START, END = line("start", 2), line("end", 3)


@pytest.mark.parametrize(
    ("log", "runs", "states", "expected"),
    [
        ([accepted()], {"a.x": [START, END]}, {}, {}),
        ([accepted()], {"a.x": [START, END]}, {1: "COMPLETED"}, {}),
        ([accepted()], {}, {}, {"lost": 1}),
        ([accepted()], {"a.x": [START]}, {}, {"lost": 1}),
        ([accepted()], {}, {1: "PENDING"}, {"left": 1}),
        ([accepted() | {"fate": "release"}], {}, {1: "PENDING"}, {}),  # a change that was not repeated is no loss
        ([accepted() | {"fate": "release"}], {}, {1: "RUNNING"}, {"left": 1}),
        ([accepted(), *cancel()], {}, {1: "CANCELLED"}, {}),
        ([accepted(), *cancel()], {}, {}, {}),
        ([accepted(), *cancel()], {}, {1: "PENDING"}, {"revived": 1}),
        ([accepted(), *cancel(up=5)], {"a.x": [START, line("start", 9)]}, {}, {"revived": 1, "started_again": 1}),
        ([accepted(), *cancel(up=5)], {"a.x": [line("start", 4)]}, {}, {}),
        ([accepted(), cancel()[0]], {"a.x": [START]}, {}, {}),  # asked, never answered: either is right
        ([accepted()], {"a.x": [START, END, line("start", 4), line("end", 5)]}, {}, {"run_again": 1}),
        ([accepted()], {"a.x": [START, line("start", 4), line("end", 5)]}, {}, {"started_again": 1}),
        ([accepted()], {"a.x": [START, line("twice", 3), END]}, {}, {"at_once": 1}),
        ([accepted(), accepted("b")], {"a.x": [START, END], "b.x": [START, END]}, {}, {"id_twice": 1}),
        (
            [accepted(tasks=3)],
            {f"a.{task}": [line("start", 2, task), line("end", 3, task)] for task in (1, 2)},
            {},
            {"lost": 1},
        ),
        ([{"what": "refused", "tag": "a"}], {}, {}, {}),
    ],
)
def test_judgement(log: list[Any], runs: dict[str, Any], states: dict[int, str], expected: dict[str, int]) -> None:
    assert counts(evaluate(log, runs, states)) == expected


def test_outcomes_add_up() -> None:
    total = Outcome()
    for _ in range(2):
        total.add(evaluate([accepted()], {}, {}))
    assert (total.acknowledged, total.lost, len(total.lost_jobs)) == (2, 2, 2)
