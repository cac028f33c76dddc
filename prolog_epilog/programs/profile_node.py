#!/usr/bin/python3 -IS
"""sluice-profile-node: what `sluice profile` starts on each node of a job, as its user and in a step of the job.

It reads commands from standard input, one a line, and answers on standard output, in lines that srun does not split:
TASK WORD FIELDS. The folders of the job's steps are its user's own, and so is this process: what lies in them can
mislead nobody else. The standard library alone: nodes need no more.

clock N                  TASK clock N NANOSECONDS             of CLOCK_MONOTONIC
start STEP NUMBER S W    TASK started STEPS                   a profile, of S seconds; 0: until it is stopped
stop STEP                TASK stopped FILES                   when all files are complete
send STEP BYTES          TASK file STEP NAME SIZE, TASK data TEXT, TASK sent LEFT_OUT

It ends with its input, or when the job does, which sends it SIGTERM: then all is sent first.

STEP is a step's name, as 0 or batch, or * for all; W is what is collected, a sum of SLUICE_PROFILE_WANT_....
Whatever goes wrong is TASK problem TEXT.
"""

from __future__ import annotations

import binascii
import contextlib
import os
import re
import signal
import stat
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

FOLDER = Path("/run/sluice/profile")
CONTROL = struct.Struct("<8sIIQIIQ24x")
MAGIC = b"SLUPCTL1"
ALL = 47  # SLUICE_PROFILE_WANT_ALL
HEADER, END = 256, 320
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.([0-9]{1,10})(?:-[0-9]{1,2})?\.profile\Z")
STEP = re.compile(r"[A-Za-z0-9]{1,16}\Z")
VARIABLE = re.compile(r"[A-Z0-9_]{1,64}\Z")
MOST_FILES = 1024
PIECE = 1 << 18
LINE = 660  # bytes of a line's text before it is encoded: srun passes on lines of up to 1,024 whole
MOST = 1 << 30
COMPLETE_S = 3.0
OPENCL = b"/libigdrcl.so"  # Intel's driver of OpenCL, which makes no call of Level Zero
MOST_LOOKED_AT = 4096


class EndingError(Exception):
    """The job ends."""


def say(*words: object) -> None:
    """One line to the collector."""
    sys.stdout.write(" ".join([TASK, *map(str, words)]) + "\n")
    sys.stdout.flush()


def problem(what: str, error: OSError) -> None:
    """Something that went wrong, and stopped nothing else."""
    say("problem", f"{what}: {error.strerror}")


def steps(wanted: str) -> Iterator[str]:
    """The folders of the job's steps."""
    try:
        names = sorted(os.listdir(JOB))
    except OSError as error:
        problem("no folder for profiles on this node", error)
        return
    for name in names:
        if STEP.match(name) and wanted in ("*", name) and name != OWN:
            yield name


def open_file(path: Path) -> int:
    """A regular file, and nothing that a link leads to or that would wait. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def control(step: str, wanted: int, until: int, number: int) -> None:
    """What the step's processes are asked for, as sluice/profile.h says. Raises OSError."""
    fresh = JOB / step / f"control.{os.getpid()}"
    try:
        with fresh.open("xb") as file:
            file.write(CONTROL.pack(MAGIC, 0, wanted, until, 0, number, 0))
        fresh.replace(fresh.with_name("control"))
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def not_loaded(step: str) -> str | None:
    """Why the step's programs have not loaded the library, as the task prolog noted. Raises OSError."""
    try:
        descriptor = open_file(JOB / step / "injected")
    except FileNotFoundError:
        return None
    variable = os.read(descriptor, 64).decode("ascii", "replace")
    os.close(descriptor)
    if VARIABLE.match(variable):
        return f"its user set {variable}"
    return (
        "its programs were started without --gpu-profile, which AMD's and Intel's GPUs and `profiles: asked` in the "
        "policy require, and cannot load the library later; start it again with srun --gpu-profile"
    )


def start(wanted: str, number: int, seconds: int, what: int) -> None:
    """Ask for a profile, where programs have loaded the library."""
    until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + seconds * 10**9 if seconds else 0
    done = 0
    for step in steps(wanted):
        try:
            if (why_not := not_loaded(step)) is not None:
                say("problem", f"step {step}: {why_not}: not profiled")
                continue
            control(step, what, until, number)
            done += 1
        except OSError as error:
            problem(f"step {step}", error)
    say("started", done)


def newest(wanted: str) -> list[tuple[str, str]]:
    """Step and name of each file of the newest profile."""
    found: list[tuple[str, str]] = []
    for step in steps(wanted):
        try:
            names = sorted(os.listdir(JOB / step))
        except OSError as error:
            problem(f"step {step}", error)
            continue
        numbered = [(int(match[1]), name) for name in names if (match := NAME.match(name))]
        last = max(numbered, default=(0, ""))[0]
        found += [(step, name) for number, name in numbered if number == last]
    if len(found) > MOST_FILES:
        say("problem", f"more than {MOST_FILES} files: the others are left out")
    return found[:MOST_FILES]


def opened(files: list[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """Step, name and descriptor."""
    for step, name in files:
        try:
            descriptor = open_file(JOB / step / name)
        except OSError as error:
            problem(name, error)
            continue
        try:
            yield step, name, descriptor
        finally:
            os.close(descriptor)


def is_complete(descriptor: int) -> bool:
    """Whether its process has ended the profile, or has died."""
    head = os.pread(descriptor, END, 0)
    if len(head) < END:
        return True
    if head[HEADER] or head[HEADER + 1]:
        return True
    (pid,) = struct.unpack_from("<I", head, 40)
    return not Path(f"/proc/{pid}").exists()


def stop(wanted: str) -> None:
    """Ask for none, and wait for the files."""
    for step in steps(wanted):
        try:
            control(step, 0, 0, 0)
        except OSError as error:
            problem(f"step {step}", error)
    end = time.monotonic() + COMPLETE_S
    while True:
        complete = [is_complete(descriptor) for _, _, descriptor in opened(newest(wanted))]
        if all(complete) or time.monotonic() > end:
            break
        time.sleep(0.05)
    say("stopped", len(complete))


def of_job(process: Path) -> bool:
    """Whether a process of this user's has the job's environment. Raises OSError."""
    return f"\0SLURM_JOB_ID={JOB.name}\0".encode() in b"\0" + (process / "environ").read_bytes()


def say_what_is_not_seen() -> None:
    """Programs that may use GPUs in a way that nothing here traces."""
    found = 0
    for process in list(Path("/proc").glob("[0-9]*"))[:MOST_LOOKED_AT]:
        with contextlib.suppress(OSError):  # another user's, or it has ended
            found += of_job(process) and OPENCL in (process / "maps").read_bytes()
    if found:
        say("problem", f"OpenCL work is not seen: {found} processes have Intel's OpenCL driver loaded")


def send(wanted: str, most: int) -> None:
    """All files, compressed; `most` bytes of them: what one does not need of its part is for those after it."""
    say_what_is_not_seen()
    left_out = 0
    files = newest(wanted)
    for before, (step, name, descriptor) in enumerate(opened(files)):
        size = os.fstat(descriptor).st_size
        room = min(size, most // (len(files) - before))
        left_out += size - room
        most -= room
        say("file", step, name, room)
        packer = zlib.compressobj(1)
        held = b""
        while room > 0:
            piece = os.read(descriptor, min(PIECE, room))
            if not piece:
                break
            room -= len(piece)
            held = put(held + packer.compress(piece))
        put(held + packer.flush(), 1)
    say("sent", left_out)


def put(held: bytes, least: int = LINE) -> bytes:
    """Whole lines of it; what is left."""
    lines = []
    while len(held) >= least:
        lines.append(f"{TASK} data {binascii.b2a_base64(held[:LINE], newline=False).decode()}\n")
        held = held[LINE:]
    sys.stdout.write("".join(lines))
    return held


def ending(number: int, frame: FrameType | None) -> None:
    """SIGTERM."""
    raise EndingError


def answer(words: list[str]) -> None:
    """One command."""
    if words[0] == "clock":
        say("clock", words[1], time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    elif words[0] == "start":
        start(words[1], int(words[2]), int(words[3]), int(words[4]) if len(words) > 4 else ALL)
    elif words[0] == "stop":
        stop(words[1])
    elif words[0] == "send":
        send(words[1], int(words[2]))


def serve() -> None:
    """Answer until standard input ends, or the job does."""
    try:
        for line in iter(sys.stdin.readline, ""):
            answer(line.split())
    except EndingError:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop("*")
        send("*", MOST)


if __name__ == "__main__":
    TASK = os.environ.get("SLURM_PROCID", "0")
    OWN = os.environ.get("SLURM_STEP_ID", "")
    JOB = FOLDER / os.environ.get("SLURM_JOB_ID", "")
    signal.signal(signal.SIGTERM, ending)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    say("hello", os.environ.get("SLURMD_NODENAME", os.uname().nodename), boot)
    serve()
