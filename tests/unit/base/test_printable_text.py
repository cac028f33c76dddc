from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.base.text import one_line, printable


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("  padded \x00\x00", "padded"),
        ("two\nlines\r\n", "two lines"),
        ("\x1b[31mred\x1b[0m", "[31mred [0m"),
        ("abc\u202edef\ufeff", "abc def"),
        ("Gr\u00f6\u00dfe 80 GB", "Gr\u00f6\u00dfe 80 GB"),
        ("\ud800half", "half"),
        ("", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


@given(st.text())
def test_any_text_becomes_one_printable_line(text: str) -> None:
    line = one_line(text)
    assert len(line) <= 256 and len(line.splitlines()) <= 1 and one_line(line) == line.strip()
    assert not set(line) & set("\x00\x07\x1b\x85\u2028\u202e")
    line.encode()


def test_limit() -> None:
    assert len(one_line("x" * 1000)) == 256
    assert len(one_line("x" * 1000, limit=None)) == 1000


@given(st.text())
def test_lines_stay_where_only_what_is_no_text_goes(text: str) -> None:
    found = printable(text)
    assert len(found) == len(text)
    assert all(new in (old, "?") for new, old in zip(found, text, strict=True))
    assert one_line(found) == one_line(found.replace("\n", " ").replace("\t", " "))
    assert not set(found) & set("\x00\x07\r\x1b\x85\u2028\u202e")
    found.encode()
    assert printable("a\n\tb  c") == "a\n\tb  c" and printable("\x1b[31m") == "?[31m"
