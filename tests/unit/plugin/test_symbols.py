"""Symbols of small libraries (tests/programs/symbols_*.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.plugin.symbols import missing, overridden, read_symbols
from tests.programs.build import build_library


def test_what_is_wanted_and_what_is_there(tmp_path: Path) -> None:
    plugin = build_library("symbols_plugin", tmp_path / "plugin.so")
    program = build_library("symbols_program", tmp_path / "program.so")
    symbols = read_symbols(plugin)
    assert {"init", "same", "use"} <= symbols.defined and "hidden" not in symbols.defined
    assert {"theirs", "nobodys", "variable", "lacking", "strlen"} <= symbols.wanted and "maybe" not in symbols.wanted
    assert missing(plugin, [program]) == ["lacking", "nobodys"]
    assert missing(plugin, [program], at_once=True) == ["lacking"]
    assert missing(plugin, [], at_once=True) == ["lacking", "variable"]
    assert overridden(plugin, [program], meant={"init"}) == ["same"]


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(200), b"#!/bin/sh\n", b"\x7fELF\x02\x01" + b"\xff" * 100]
)
def test_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    try:
        assert read_symbols(path).defined == frozenset()
    except SluiceError as error:
        assert str(path) in str(error)
