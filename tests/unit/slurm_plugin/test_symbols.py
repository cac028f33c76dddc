"""Symbols of small libraries that are made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sluice_base.errors import SluiceError
from slurm_plugin.symbols import missing, overridden, read_symbols


def library(folder: Path, name: str, code: str) -> Path:
    (folder / f"{name}.c").write_text(code)
    command = ["gcc", "-shared", "-fPIC", "-o", folder / f"{name}.so", folder / f"{name}.c"]
    subprocess.run(command, check=True, timeout=60)
    return folder / f"{name}.so"


def test_what_is_wanted_and_what_is_there(tmp_path: Path) -> None:
    plugin = library(
        tmp_path,
        "plugin",
        """
        #include <string.h>
        extern int theirs(void), nobodys(void), maybe(void) __attribute__((weak));
        extern int variable, lacking;
        extern const char *volatile text;
        const char *volatile text = "x";
        int init(void) { return theirs() + nobodys() + (maybe ? maybe() : 0) + variable + lacking + (int)strlen(text); }
        int same(void) { return 1; }
        static int hidden(void) { return 2; }
        int (*use)(void) = hidden;
        """,
    )
    program = library(
        tmp_path, "program", "int theirs(void) { return 1; } int variable; int same(void) { return 2; } int init;"
    )
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
