"""One machine under QEMU, in a folder: its disks, its process, which holds a lock on its pid file as long as it runs,
and its monitor (QMP).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.base.run import run_command

_PID, _MONITOR, _DISK, _SEED = "pid", "qmp", "disk.qcow2", "seed"
_STARTS_S = 60.0  # much memory of a machine may have to be pinned
_ANSWERS_S = 5.0
_MOST_SAID = 4096
_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class QemuError(Exception):
    """What QEMU says of why there is no machine, or that its monitor does not answer."""


def own_folder(path: Path) -> Path:
    """Make the folder of a pool's machines unless it is there. Who could write there could leave layers above any file
    that this user reads. Raises SluiceError.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
    except OSError as error:
        raise SluiceError(f"{path}: {error.strerror}", remedy="SlurmUser makes it") from error
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise SluiceError(
            f"{path}: {stat.filemode(state.st_mode)} of uid {state.st_uid}: not a folder that is this user's alone",
            remedy=f"see who made it; then chown it to SlurmUser, and chmod 700 {path}",
        )
    return path


def disk(tool: Path, image: Path, folder: Path) -> list[str]:
    """QEMU's words for a layer of the machine's own above an image; one that is there is that of an earlier start.

    Raises OSError, CommandError.
    """
    if not (folder / _DISK).exists():
        kind = "qcow2" if image.suffix == ".qcow2" else "raw"
        part = folder / f".{_DISK}.{secrets.token_hex(4)}"
        run_command([tool, "create", "-q", "-f", "qcow2", "-F", kind, "-b", image, part], timeout=30)
        with suppress(FileExistsError):  # of a start that another process has begun: it may be in use
            (folder / _DISK).hardlink_to(part)
        part.unlink()
    return _drive("disk", {"driver": "qcow2", "file": {"driver": "file", "filename": _DISK}})


def seed(folder: Path, facts: Mapping[str, str], user_data: str) -> list[str]:
    """QEMU's words for a read-only disk that cloud-init's source NoCloud finds. Raises OSError."""
    (folder / _SEED).mkdir(mode=0o700, exist_ok=True)
    write_atomic(folder / _SEED / "meta-data", json.dumps(facts) + "\n", mode=0o600)
    write_atomic(folder / _SEED / "user-data", user_data, mode=0o600)
    return _drive("seed", {"driver": "vvfat", "dir": _SEED, "label": "cidata", "read-only": True})


def _drive(name: str, node: dict[str, object]) -> list[str]:
    return ["-blockdev", json.dumps({**node, "node-name": name}), "-device", f"virtio-blk-pci,drive={name}"]


def clean(folder: Path) -> None:
    """Remove what a machine that has ended used."""
    for path in (folder / _DISK, folder / _MONITOR, folder / _PID, *folder.glob(f".{_DISK}.*")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / _SEED, ignore_errors=True)


def running(folder: Path) -> int | None:
    """The process of the machine that runs there. Whatever the pid file says, it is the one that has it locked."""
    try:
        with (folder / _PID).open("rb") as file:
            asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except FileNotFoundError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


def start(program: Path, words: Sequence[str], folder: Path) -> None:
    """Start a machine that outlives this process, unless one runs in the folder. Raises QemuError, OSError."""
    child = subprocess.Popen(
        [str(program), "-nodefaults", "-no-user-config", "-display", "none", "-sandbox", _SANDBOX,
         "-pidfile", _PID, "-qmp", f"unix:{_MONITOR},server=on,wait=off", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder,
        env={"PATH": "/usr/bin:/bin"}, start_new_session=True,
    )  # fmt: skip
    assert child.stderr is not None  # noqa: S101 - asked for above
    with child.stderr:  # what it says later is lost: guests could make it say much
        until = time.monotonic() + _STARTS_S
        while child.poll() is None and time.monotonic() < until:
            with suppress(QemuError):
                if running(folder) == child.pid:
                    ask(folder, "query-status")
                    return
            time.sleep(0.02)
        if child.poll() is None:
            child.kill()
        child.wait()
        if running(folder) is None:  # else another one was faster
            said = child.stderr.read(_MOST_SAID).decode(errors="replace").strip()
            raise QemuError(said or f"no machine within {_STARTS_S:g} s")


def ask(folder: Path, do: str, **arguments: object) -> Any:
    """What the monitor returns. Raises QemuError."""
    link = os.open(folder, os.O_PATH | os.O_DIRECTORY)  # addresses of sockets are short, paths are not
    try:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(_ANSWERS_S)
            monitor.connect(f"/proc/self/fd/{link}/{_MONITOR}")
            lines = monitor.makefile("rwb")
            lines.readline()  # its greeting
            _say(lines, {"execute": "qmp_capabilities"})
            return _say(lines, {"execute": do, "arguments": arguments})
    except (OSError, ValueError) as error:
        raise QemuError(f"its monitor: {error}") from error
    finally:
        os.close(link)


def _say(lines: Any, command: dict[str, object]) -> Any:
    lines.write(json.dumps(command).encode() + b"\n")
    lines.flush()
    for line in lines:
        answer = json.loads(line)
        if "error" in answer:
            raise QemuError(f"its monitor: {answer['error'].get('desc', '')}")
        if "return" in answer:  # else an event
            return answer["return"]
    raise QemuError("its monitor: no answer")


def kill(folder: Path) -> None:
    """End the machine at once, if one runs there."""
    pid = running(folder)
    if pid is None:
        return
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if running(folder) == pid:  # not one that has got its number since
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
