"""Writes the C source of a cffi module from a header, so that the two cannot drift apart.

Usage: cffi_build.py COMPILER MODULE HEADER OUTPUT [MODULE HEADER of a module whose types the header uses]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cffi


def definitions(compiler: str, header: Path) -> str:
    """The header's own declarations as cffi's parser wants them: preprocessed, without what it includes."""
    preprocessed = subprocess.run(
        [compiler, "-E", "-std=c11", "-I", str(header.parent.parent), str(header)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    kept: list[str] = []
    inside = False
    for line in preprocessed.splitlines():
        marker = re.match(r'# \d+ "(.*?)"', line)
        if marker:
            inside = marker.group(1) == str(header)
        elif inside:
            kept.append(line)
    return re.sub(r"__attribute__\s*\(\(.*?\)\)", "", "\n".join(kept)).replace("_Bool", "bool")


def builder(compiler: str, module: str, header: Path, base: cffi.FFI | None = None) -> cffi.FFI:
    """A module of everything that the header declares."""
    made = cffi.FFI()
    if base is not None:
        made.include(base)
    made.cdef(definitions(compiler, header))
    made.set_source(f"sluice.core.{module}", f'#include "sluice/{header.name}"', py_limited_api=True)
    return made


def main(compiler: str, module: str, header: str, output: str, *base: str) -> None:
    """Generate OUTPUT."""
    base_builder = builder(compiler, base[0], Path(base[1])) if base else None
    builder(compiler, module, Path(header), base_builder).emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
