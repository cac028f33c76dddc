"""The snapshot that all viewers share: readers follow it from any moment, and no reader costs more than a bound."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange import snapshot as module
from sluice.exchange.snapshot import Snapshot, parse_answer


class Reader:
    """What a viewer's process does with the answers."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Any] = {}
        self.epoch, self.last, self.resets = "", 0, 0

    def follow(self, snapshot: Snapshot) -> int:
        """Everything that is new; the number of answers."""
        for answers in range(1, 1000):
            line = snapshot.after(self.epoch, self.last)
            assert len(line) < module.MOST_ANSWER + module._MOST_ROW + 4096
            answer = parse_answer(line)
            if answer["reset"]:
                self.resets += 1
                self.rows = {}
            for section, key, value in answer["rows"]:
                if value is None:
                    self.rows.pop((section, key), None)
                else:
                    self.rows[section, key] = value
            self.epoch, self.last = answer["epoch"], answer["last"]
            if not answer["more"]:
                return answers
        raise AssertionError("no end")


def test_readers_that_look_at_any_moment_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER", 2000)
    monkeypatch.setattr(module, "_LEAST_GONE", 20)
    choose = random.Random(7)
    snapshot, readers = Snapshot(), [Reader() for _ in range(3)]
    truth: dict[str, dict[str, Any]] = {"jobs": {}, "nodes": {}}
    for _ in range(400):
        section = choose.choice(list(truth))
        rows = truth[section]
        for _ in range(choose.randrange(8)):
            rows[str(choose.randrange(60))] = {"value": choose.randrange(5)}
        before = dict(rows)
        for key in choose.sample(sorted(rows), min(len(rows), choose.randrange(6))):
            del rows[key]
        if choose.random() < 0.5:
            snapshot.put(section, rows)
        else:
            encoded = {key: module.encode(section, key, row) for key, row in rows.items()}
            snapshot.change(section, encoded, [key for key in (*before, "never") if key not in rows])
        for number, reader in enumerate(readers):
            if choose.random() < (0.9, 0.2, 0.02)[number]:
                reader.follow(snapshot)
                assert reader.rows == {(part, key): row for part in truth for key, row in truth[part].items()}
    assert readers[0].resets <= 2, "one that keeps up gets the changes alone"
    assert sum(len(mine) for mine in snapshot._sections.values()) < 120 + 100, "rows that are gone are forgotten"


def test_what_is_equal_is_no_change_and_a_large_load_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER", 10_000)
    snapshot, reader = Snapshot(), Reader()
    rows = {str(number): {"name": "x" * 100} for number in range(1000)}
    snapshot.put("jobs", rows)
    assert reader.follow(snapshot) > 10
    snapshot.put("jobs", rows)
    assert json.loads(snapshot.after(reader.epoch, reader.last))["rows"] == []
    rows["7"] = {"name": "y"}
    snapshot.put("jobs", rows)
    assert [row[1] for row in json.loads(snapshot.after(reader.epoch, reader.last))["rows"]] == ["7"]


def test_a_reader_of_another_daemon_gets_all_again() -> None:
    first, second, reader = Snapshot(), Snapshot(), Reader()
    first.put("jobs", {"1": {}, "2": {}})
    second.put("jobs", {"2": {}})
    reader.follow(first)
    reader.follow(second)
    assert set(reader.rows) == {("jobs", "2")} and reader.resets == 2


def test_a_row_that_is_too_large_is_refused() -> None:
    with pytest.raises(SluiceError, match="larger than"):
        Snapshot().put("jobs", {"1": {"name": "x" * (2 << 20)}})


@pytest.mark.parametrize("line", [b"", b"[]", b'{"version": 2}', b"{" * 100_000, b'{"version": 1, "error": "no"}'])
def test_what_is_no_answer_is_an_error(line: bytes) -> None:
    with pytest.raises(SluiceError):
        parse_answer(line)
