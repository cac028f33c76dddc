"""The library that hides version 1 from the programs of a cluster on cgroup version 2."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[3] / "dev_cluster/cgroup_view/libcgroup_view.so"

READS = """
import os, pathlib
whole = pathlib.Path("/proc/self/cgroup").read_bytes()
file = os.open("/proc/1/cgroup", os.O_RDONLY)
pieces = b"".join(iter(lambda: os.read(file, 2), b""))
print(whole.count(b"\\n"), whole.startswith(b"0::/"))
print(pieces == os.pread(file, 4096, 0), pieces.startswith(b"0::/"), os.pread(file, 3, 0), os.pread(file, 9, 1 << 20))
os.close(file)
other = os.open("/proc/self/status", os.O_RDONLY)
print(other == file, os.read(other, 5), os.pread(other, 5, 0))
"""
ENDS = """
import os, signal
pid = os.fork()
if pid == 0:
    signal.pause()
file = os.open(f"/proc/{pid}/cgroup", os.O_RDONLY)
print(os.pread(file, 3, 0))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
try:
    print(os.pread(file, 3, 0))
except ProcessLookupError:
    print("ended")
"""


@pytest.fixture
def says() -> Callable[[str], list[str]]:
    if not LIBRARY.exists():
        pytest.skip("not built: make build")

    def run(program: str) -> list[str]:
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, env={"LD_PRELOAD": str(LIBRARY)}, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    return run


def test_files_hold_the_line_of_version_2_alone(says: Callable[[str], list[str]]) -> None:
    assert says(READS) == ["1 True", "True True b'0::' b''", "True b'Name:' b'Name:'"]


def test_a_file_ends_with_its_process(says: Callable[[str], list[str]]) -> None:
    assert says(ENDS) == ["b'0::'", "ended"]
