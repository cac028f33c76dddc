"""Images of jobs as the agent writes them, and a CRIU that writes what a test wants it to."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from prolog_epilog.checkpoint.images import Images, Run

# As CRIU does with --stream: all files of its folder, but those that stay there, each through a pipe.
STREAM = """
import os, signal, socket, sys
os.chdir(sys.argv[1])
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as streamer:
    streamer.connect("streamer-capture.sock")
    for name in sorted({*os.listdir()} - {"streamer-capture.sock", "log", "stats-dump"}):
        message = bytes([10, len(name)]) + name.encode()
        streamer.sendall(len(message).to_bytes(4, "little") + message)
        end, pipe = os.pipe()
        socket.send_fds(streamer, [bytes(1)], [end])
        os.close(end)
        with open(pipe, "wb") as file, open(name, "rb") as content:
            while piece := content.read(1 << 16):
                file.write(piece)
        os.unlink(name)
"""


def write_image(images: Images, run: Run, facts: dict[str, Any] | None = None, **files: bytes) -> None:
    """With these files."""
    with images.writing(run) as image:
        for name, content in files.items():
            image.add(name, io.BytesIO(content), 1 << 40)
        image.end(facts or {})


def fake_criu(path: Path, act: str, then: str = "") -> Path:
    """It does `act` for a dump, a shell's script: what that writes into folder $2 is what it saves; `then` follows."""
    path.write_text(
        f'#!/bin/sh\ncase $1 in --version) echo "Version: 4.2.1"; exit;; check) exit;; esac\n'
        f'while [ "$1" != -D ]; do shift; done\n{act}\n'
        f"{sys.executable} -c '{STREAM}' \"$2\" || exit 1\n{then}\n"
    )
    path.chmod(0o755)
    return path
