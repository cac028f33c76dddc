"""sluice-launch resumes a job with helpers that fail or die: again where they say so, when what they left has ended."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from sluice.core.limit import launcher_path

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="launchers are root's"),
    pytest.mark.skipif(not launcher_path().exists(), reason="not built: make build"),
]
DONE = "sleep 600 >left & echo resumed $!"
# What is started is no child of the helper any more when it has ended; it says whether the one before it has ended.
HELPER = """#!/bin/sh
cd {folder}
echo "$1 $SLUICE_RESTARTS" >>asked
for pid in $(cat left); do [ ! -e /proc/$pid ] || echo "$pid is there" >>asked; done
case $(wc -l <asked) in {cases} esac
"""
LEAVES = "(sleep 600 & echo $! >>left; echo $$ >>left; exec sleep 600) >/dev/null & echo $! >>left"


def launched(folder: Path, *ends: str) -> tuple[list[str], bool, str]:
    """What the helper was asked, whether the script was let go, and the name of what the launcher waits for.

    `ends`: how each try ends.
    """
    (folder / "left").touch()
    cases = " ".join(f"{number}) {end};;" for number, end in enumerate(ends, 1))
    helper = folder / "helper"
    helper.write_text(HELPER.format(folder=folder, cases=cases))
    helper.chmod(0o755)
    ours, gate = socket.socketpair()
    # The launcher is the parent of the job's first process, as the SPANK plugin makes it.
    script = f"sleep 500 & exec {launcher_path()} wait $! {gate.fileno()} 7 2001 {helper}"
    with ours, subprocess.Popen(["sh", "-c", script], pass_fds=[gate.fileno()]) as launcher:
        gate.close()
        try:
            ours.sendall((1).to_bytes(4, "little"))
            ours.settimeout(30)
            begun = ours.recv(1) != b""
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            (child,) = children
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        finally:
            for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
                os.kill(int(pid), 9)
            launcher.kill()
    return (folder / "asked").read_text().splitlines(), begun, words[1]


ASKED = "resume 1"


@pytest.mark.parametrize("failing", ["exit 75", "kill -9 $$"])
def test_it_is_tried_again_when_what_was_left_has_ended(tmp_path: Path, failing: str) -> None:
    assert launched(tmp_path, f"{LEAVES}; {failing}", DONE) == ([ASKED, ASKED], False, "600")


def test_a_refusal_is_final(tmp_path: Path) -> None:
    assert launched(tmp_path, f"{LEAVES}; exit 1", DONE) == ([ASKED], True, "500")


def test_nothing_to_resume_is_no_failure(tmp_path: Path) -> None:
    assert launched(tmp_path, "exit 0", DONE) == ([ASKED], True, "500")


def test_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    began = time.monotonic()
    asked, begun, child = launched(tmp_path, *["kill -9 $$"] * 9)
    assert asked == [ASKED] * 4 and begun and child == "500" and time.monotonic() - began < 30
