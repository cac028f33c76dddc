from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from sluice.base.documents import compose_document, load_document, parse_document
from sluice.base.errors import UsageError


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int

    @field_validator("size")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("must be positive")
        return value


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid")
    leaves: list[Leaf] = []
    named: dict[str, Leaf] = {}


def parse(text: str) -> Tree:
    return parse_document(text, Tree, source="t.yaml", remedy="see t(5)")


def test_a_document() -> None:
    assert parse("leaves:\n- size: 3\nnamed: {a: {size: 4}}\n").named["a"].size == 4
    assert parse("") == Tree()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("leaves:\n- size: 1\n- size: x\n", "t.yaml:3: leaves.1.size: Input should be a valid integer.*, got 'x'"),
        ("leaves:\n- size: 1\n\n- size: -2\n", "t.yaml:4: leaves.1.size: must be positive, got -2"),
        ("leaves:\n- {}\n", "t.yaml:2: leaves.0.size: Field required"),
        ("named:\n  b:\n    size: 1\n    tall: 2\n", "t.yaml:4: named.b.tall: Extra inputs are not permitted"),
        ("leaves: [\n", "t.yaml:2: not YAML"),
        ("named:\n  a: {size: 1}\n  a: {size: 2}\n", "t.yaml:3: a: given twice in one mapping"),
        ("named:\n  a: {size: 1}\n  b: {size: 2026-13-01}\n", "t.yaml:3: '2026-13-01': month must be in 1..12"),
        ("named: {}\n2026-02-30: 1\n", "t.yaml:2: '2026-02-30': day is out of range"),
        (f"a: 1\nb: {'9' * 5000}\n", "t.yaml:2: '9+': Exceeds the limit"),
        ("- 1\n", "t.yaml:1: not a mapping of keys to values"),
        ("leaves: !!python/object/apply:os.system [id]\n", "t.yaml:1: not YAML: could not determine a constructor"),
        ("a: " + "[" * 5000, "t.yaml:.*not YAML|nested too deeply"),
        ("leaves: [{size: 1, size: 0, size: x}]\nx: 1\n", "t.yaml:1: size: given twice"),
        ("leaves: [{size: a}, {size: b}]", r"leaves.0.size: .*got 'a' \(and 1 more\)"),
    ],
)
def test_errors_name_file_line_and_place(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        parse(text)
    assert str(refused.value).endswith("; see t(5)")
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, what in (("none", "No such file"), (".", "Is a directory"), ("binary", "not UTF-8 text at byte 0")):
        with pytest.raises(UsageError, match=what):
            load_document(tmp_path / name, Tree, remedy="see t(5)")


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"])
def test_aliases_of_aliases_are_refused_before_they_are_written_out(item: str) -> None:
    names = [f"n{number}" for number in range(12)]
    lines = ["n0: &n0 {a: 1, b: 2}"]
    for before, name in pairwise(names):
        lines.append(f"{name}: &{name} {item.format(', '.join([f'*{before}'] * 9))}")
    with pytest.raises(UsageError, match=r"aliases repeat more than"):
        compose_document("\n".join(lines), source="x", remedy="")
    assert compose_document("a: &a [1]\nb: [*a, *a]", source="x", remedy="")[1] == {"a": [1], "b": [[1], [1]]}
