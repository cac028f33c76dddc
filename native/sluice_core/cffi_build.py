"""Writes the C source of the cffi module from the public header, so that the two cannot drift apart.

Usage: cffi_build.py COMPILER HEADER OUTPUT
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
        [compiler, "-E", "-std=c11", str(header)], check=True, capture_output=True, text=True, timeout=60
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


def main(compiler: str, header: str, output: str) -> None:
    """Generate OUTPUT; the module is named sluice_core._core."""
    builder = cffi.FFI()
    builder.cdef(definitions(compiler, Path(header)))
    builder.set_source("sluice_core._core", '#include "sluice/core.h"', py_limited_api=True)
    builder.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
