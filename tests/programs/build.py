"""Programs and libraries in C that tests run: each is a file in this folder."""

from __future__ import annotations

import subprocess
from pathlib import Path


def build_program(name: str, target: Path, *options: str | Path) -> Path:
    """Compile NAME.c to `target`, with the compiler's options and libraries."""
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["gcc", "-O1", "-o", target, source, *options, "-ldl"], check=True, timeout=60)
    return target


def build_library(name: str, target: Path, *options: str | Path) -> Path:
    """The same, as a shared library."""
    return build_program(name, target, "-shared", "-fPIC", *options)
