"""What the processes of a job have open, and which rights, before it runs again.

CRIU opens files by their names, as root: what the job's user has put in a file's place would be opened for the user. So
a resumed job is looked at before any of its processes runs: it may have files of its own user, and those that it had
before, in the same way, and that nobody has changed since. What the kernel shows as files is none of these: who has
opened it, root, counts there.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from sluice.base.errors import SluiceError

Opened = tuple[int, int, int, int]
"""Device, inode, time of the last change, which no user can set, as an inode's number is given to other files; and
whether it is read and written, as bits of a mode."""
Named = tuple[str, int, int, int, int, int, int]
"""The same on another node, where the file is another one: its whole path, owner, group, mode, size, time of change of
its content, as a package sets it; and how it is open."""
_MOST_PROCESSES = 65536
_SINGLE = ("exe", "cwd", "root")
_MANY = ("fd", "map_files")
_HARMLESS = (3, 5, 7, 8, 9)  # null, zero, full, random, urandom
_KERNELS = frozenset(
    "binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts efivarfs fusectl mqueue nsfs proc pstore resctrl securityfs"
    " selinuxfs sysfs tracefs".split()
)
_USERS_OWN = ("CapInh", "CapPrm", "CapEff", "CapAmb")
_ENDED = ("Z", "X")
"""What its parent has not waited for is made by CRIU, too, and ends as root: it never runs again."""
_KEPT = ("Gid", "Groups", "CapBnd", "NoNewPrivs", "Seccomp")


def processes(init: int) -> list[int]:
    """It, and all below it, without what ends meanwhile: all of them where they are stopped. Raises SluiceError."""
    found = [init]
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        if len(found) > _MOST_PROCESSES:
            raise SluiceError(f"it has more than {_MOST_PROCESSES} processes")
    return found


def look(init: int, uid: int) -> set[Opened]:
    """All files of others than `uid` that a job has open. Raises SluiceError for what cannot be resumed; OSError."""
    kernels, found = _kernels(), set()
    for path, state in _others(init, uid, kernels):
        if state.st_dev in kernels:
            raise SluiceError(f"it has {path.readlink()} open, which is the kernel's")
        found.add(_opened(path, state))
    return found


def look_by_name(init: int, uid: int) -> set[Named]:
    """The same files, as another node finds them. Raises OSError."""
    return {_named(path, state) for path, state in _others(init, uid, _kernels())}


def stranger(
    init: int,
    uid: int,
    known: Collection[Opened] | Collection[Named],
    log: Path,
    began_ns: int,
    *,
    by_name: bool = False,
) -> str | None:
    """One that the job did not have before; None: there is none. Raises SluiceError, OSError.

    `by_name`: it was saved on another node, and `known` is what `look_by_name` gave there.
    `log` is CRIU's, which closes it before the job runs, and so the /proc of the job's PID namespace. Memory that
    processes share is made by CRIU, as root: it is not older than `began_ns`, when the job was to be resumed.
    """
    kernels, of_criu, memory = _kernels(), log.stat(), _device_of_memory()
    for path, state in _others(init, uid, kernels):
        if os.path.samestat(state, of_criu) or _is_root_of_proc(path, state):
            continue
        if state.st_dev == memory and state.st_ctime_ns >= began_ns:
            continue
        if state.st_dev in kernels or (_named if by_name else _opened)(path, state) not in known:
            with suppress(OSError):
                return str(path.readlink())
            return str(path)
    return None


def rights(init: int, uid: int) -> set[str]:
    """What a job's processes may, except for `init`, which is root's. Raises SluiceError for one that has any rights
    but its user's; OSError."""
    found = set()
    for pid in processes(init)[1:]:
        with suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                values = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
                if values["State"].split()[0] not in _ENDED:
                    found.add(_rights(values, uid))
    return found


def _rights(values: dict[str, str], uid: int) -> str:
    if any(int(one) != uid for one in values["Uid"].split()) or any(int(values[name], 16) for name in _USERS_OWN):
        raise SluiceError(f"its process {values['Name'].strip()} has rights that are not its user's")
    return " ".join(f"{name}:{' '.join(values[name].split())}" for name in _KEPT)


def _device_of_memory() -> int:
    """Of files without a name that are memory: shared mappings, memfd."""
    file = os.memfd_create("")
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)


def _is_root_of_proc(path: Path, state: os.stat_result) -> bool:
    """Such a folder, which cannot be read by this (O_PATH); its mount has no name."""
    readable = path.lstat().st_mode & (stat.S_IRUSR | stat.S_IWUSR)
    return stat.S_ISDIR(state.st_mode) and not readable and state.st_ino == 1 and str(path.readlink()) == "/"


def _opened(path: Path, state: os.stat_result) -> Opened:
    # A folder's time changes with what is in it; to have it open, in any way, gives no right to what is in it.
    if stat.S_ISDIR(state.st_mode):
        return state.st_dev, state.st_ino, 0, 0
    return state.st_dev, state.st_ino, state.st_ctime_ns, path.lstat().st_mode & (stat.S_IRUSR | stat.S_IWUSR)


def _named(path: Path, state: os.stat_result) -> Named:
    """Folders as in `_opened`."""
    name = str(path.readlink())
    if stat.S_ISDIR(state.st_mode):
        return name, state.st_uid, state.st_gid, state.st_mode, 0, 0, 0
    how = path.lstat().st_mode & (stat.S_IRUSR | stat.S_IWUSR)
    return name, state.st_uid, state.st_gid, state.st_mode, state.st_size, state.st_mtime_ns, how


def _others(init: int, uid: int, kernels: Collection[int]) -> Iterator[tuple[Path, os.stat_result]]:
    nameless = _nameless()
    for pid in processes(init):
        for path in _paths(Path(f"/proc/{pid}")):
            with suppress(FileNotFoundError):  # a kernel's mapping has no file
                state = path.stat()
                if state.st_dev in nameless or _is_harmless(state):
                    continue
                if state.st_uid != uid or (state.st_dev in kernels and path.parent.name == "fd"):
                    yield path, state


def _kernels() -> set[int]:
    """The file systems in which the kernel shows itself."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        of_mount, _, of_system = line.partition(" - ")
        if of_system.split()[0] in _KERNELS:
            major, _, minor = of_mount.split()[2].partition(":")
            found.add(os.makedev(int(major), int(minor)))
    return found


def _paths(process: Path) -> Iterator[Path]:
    yield from (process / name for name in _SINGLE)
    for name in _MANY:
        yield from (process / name).iterdir()


def _is_harmless(state: os.stat_result) -> bool:
    """Null and the like. Others have been refused when the job was saved: CRIU does not know them."""
    return stat.S_ISCHR(state.st_mode) and os.major(state.st_rdev) == 1 and os.minor(state.st_rdev) in _HARMLESS


def _nameless() -> set[int]:
    """The kernel's file systems of pipes, sockets and such, which nobody can open by a name."""
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as one:
        found = {os.fstat(reading).st_dev, os.fstat(one.fileno()).st_dev}
    os.close(reading)
    os.close(writing)
    event = os.eventfd(0)
    found.add(os.fstat(event).st_dev)
    os.close(event)
    return found
