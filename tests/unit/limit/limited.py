"""Programs under the preloaded limiter: on a simulated node, with their job's region in its place."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.core.limit import Device, Region, create, library_path

MIB = 1 << 20

LOOK = Path(__file__).parents[3] / "build/editable/native/limit/look_at_region"

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def enter_job(region: str, name: str = "job") -> None:
    """In a child before exec: a mount namespace in which /run/sluice/limit/NAME is the job's region."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), function)

    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    call("mount", b"none", b"/run", b"tmpfs", ctypes.c_ulong(0), None)
    place = f"/run/sluice/limit/{name}"
    os.makedirs(place)  # noqa: PTH103
    if region:
        call("mount", region.encode(), place.encode(), None, ctypes.c_ulong(MS_BIND), None)


@dataclass(frozen=True)
class Look:
    """What the preloaded library makes of a region: which processes it removes, and how many bytes of each
    device the others hold."""

    released: int
    ended: int
    processes: dict[int, list[int]]  # by number in its PID namespace
    spaces: set[int]


def look(folder: Path) -> Look:
    """Remove dead processes, as a process of the job that lacks room does, and audit the ledger."""
    done = subprocess.run([LOOK, folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    released, ended, left = json.loads(done.stdout)
    return Look(released, ended, {pid: held for pid, _, held in left}, {space for _, space, _ in left})


@dataclass
class Job:
    """A job with a region of its own on a simulated node."""

    folder: Path  # of the region; "" none
    environment: dict[str, str]
    preload: str = str(library_path())
    uid: int = 0
    place: str = "job"
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: list[str] | str, *arguments: object, **extra: str) -> subprocess.Popen[str]:
        """A command, or a Python program, in the job; its streams are piped."""
        words = [sys.executable, "-c", command] if isinstance(command, str) else command
        words = [*words, *map(str, arguments)]
        folder, name, uid = str(self.folder) if self.folder.name else "", self.place, self.uid

        def enter() -> None:
            enter_job(folder, name)
            if uid:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)

        process = subprocess.Popen(
            words,
            env={**self.environment, "LD_PRELOAD": self.preload, **extra},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
            cwd="/",
        )
        self.started.append(process)
        return process

    def run(self, command: list[str] | str, *arguments: object, code: int = 0, **extra: str) -> tuple[str, str]:
        """What it prints on both streams; it must exit with `code`."""
        process = self.start(command, *arguments, **extra)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{process.returncode}: {out}{err}"
        return out, err

    def region(self) -> Region:
        return Region(self.folder)

    def charged(self, device: int = 0) -> int:
        """MiB, without dead processes."""
        look(self.folder)
        with self.region() as region:
            return region.usage(device).charged // MIB

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def new_job(folder: Path, environment: dict[str, str], devices: list[Device], **more: Any) -> Job:
    """Make the region, and a job on it."""
    uid = more.get("uid", 0)
    create(folder, devices, uid, more.pop("processes", 128), mounted=more.pop("mounted", False))
    return Job(folder, environment, **more)
