#!/usr/bin/env python3
"""Writes sluice/serve/rpc/serve_pb2.py and .pyi from serve.proto; --check only compares. Needs grpcio-tools."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = "sluice/serve/rpc/serve.proto"
MADE = ("sluice/serve/rpc/serve_pb2.py", "sluice/serve/rpc/serve_pb2.pyi")


def generate(folder: Path) -> None:
    """Both files below a folder. Raises CalledProcessError."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            PROTO,
        ],
        check=True,
        cwd=ROOT,
    )


def without_version(text: str) -> str:
    """What does not depend on the compiler's version, named in a comment and a check."""
    return re.sub(r"# Protobuf Python Version: \S+|ValidateProtobufRuntimeVersion\([^)]*\)", "", text)


def main() -> None:
    """Write or compare."""
    with tempfile.TemporaryDirectory() as name:
        generate(Path(name))
        texts = {path: (Path(name) / path).read_text() for path in MADE}
    if sys.argv[1:] == ["--check"]:
        made = {path: (ROOT / path).read_text() for path in MADE}
        other = [path for path in MADE if without_version(made[path]) != without_version(texts[path])]
        if other:
            sys.exit(f"{', '.join(other)}: not what {PROTO} says; run tools/grpc_reference.py")
        return
    for path, text in texts.items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    main()
