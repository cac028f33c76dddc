"""A database for metrics, and programs with loads of known shape, for tests of what is measured."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.integration.private_slurm import free_ports
from tests.integration.settled import until

PYTHON = "/usr/bin/python3"
# Holds MiB of a GPU and takes shares of its time, "PERMILLE:SECONDS" after each other; then idles a while, as a program
# that writes its results does: the agent, which looks twice a second, sees its end also where the machine is busy.
# Prints how long each share was taken, as a busy machine lets it sleep for longer, and then how long it held memory.
LOAD = """
import ctypes as c, sys, time
kind, mib, *phases = sys.argv[1:]
address, context = c.c_void_p(), c.c_void_p()
if kind == "hip":
    lib = c.CDLL("libamdhip64.so.6")
    assert lib.hipSetDevice(0) == 0 and lib.hipMalloc(c.byref(address), c.c_size_t(int(mib) << 20)) == 0
else:
    lib = c.CDLL("libcuda.so.1")
    assert lib.cuInit(0) == 0 and lib.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0
    assert lib.cuCtxSetCurrent(context) == 0
    assert lib.cuMemAlloc_v2(c.byref(address), c.c_size_t(int(mib) << 20)) == 0
begin = time.time()
before, since = None, 0.0
for phase in [*phases, "0:2.0"]:
    permille, seconds = phase.split(":")
    assert lib.sluice_sim_load(0, int(permille)) == 0
    now = time.monotonic()
    if before is not None:
        print("did", kind, before, now - since, flush=True)
    before, since = permille, now
    time.sleep(float(seconds))
print(time.time() - begin, flush=True)
"""


def load(kind: str, mib: int, *phases: tuple[int, float]) -> list[str]:
    """The program's command line."""
    return [PYTHON, "-c", LOAD, kind, str(mib), *(f"{permille}:{seconds}" for permille, seconds in phases)]


def done(said: str, kind: str = "cuda") -> list[tuple[int, float]]:
    """The phases of the programs of one kind, by what they printed: as many seconds as asked for, and a bit more."""
    words = [line.split() for line in said.splitlines() if line.startswith(f"did {kind} ")]
    return [(int(permille), float(seconds)) for _, _, permille, seconds in words]


def work(*phases: tuple[int, float]) -> float:
    """GPU-seconds of work in phases: the truth, where they are what was done."""
    return sum(permille / 1000 * seconds for permille, seconds in phases)


class Database:
    """VictoriaMetrics on a port and folder of its own; may be killed, be full, and be started again."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("victoria-metrics")
        if program is None:
            pytest.skip("victoria-metrics is not installed (tools/debian-packages.txt, group test)")
        self.program = program
        self.folder = folder
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, full: bool = False) -> None:
        """Start, and wait until it answers; `full`: as with a disk that has no room left."""
        room = "9000000GB" if full else "1MB"
        self.process = subprocess.Popen(
            [
                self.program,
                f"-httpListenAddr=127.0.0.1:{self.port}",
                f"-storageDataPath={self.folder}",
                "-search.latencyOffset=0s",
                "-dedup.minScrapeInterval=1ms",
                f"-storage.minFreeDiskSpaceBytes={room}",
                "-memory.allowedBytes=64MB",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self.answers("/health") is not None, timeout=30)

    def kill(self) -> None:
        """As a power cut."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def answers(self, path: str) -> bytes | None:
        """What it answers; None when it does not."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return bytes(answer.read())
        except OSError:
            return None

    def series(self, match: str) -> dict[str, list[tuple[int, float]]]:
        """Samples (ms, value) by labels, as they are stored."""
        self.answers("/internal/force_flush")
        text = self.answers("/api/v1/export?" + urllib.parse.urlencode({"match[]": match})) or b""
        found: dict[str, list[tuple[int, float]]] = {}
        for line in text.splitlines():
            one = json.loads(line)
            labels = json.dumps(one["metric"], sort_keys=True)
            found.setdefault(labels, []).extend(zip(one["timestamps"], one["values"], strict=True))
        return {labels: sorted(samples) for labels, samples in found.items()}
