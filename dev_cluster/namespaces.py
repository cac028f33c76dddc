"""The few Linux calls that Python 3.11 lacks: unshare, setns, mount, pivot_root. Raise OSError."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000

MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SHARED = 0x100000
MNT_DETACH = 2

_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "riscv64": 41, "s390x": 217}
_PR_SET_NAME = 15

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave some of the caller's namespaces for new ones (CLONE_NEWPID: for its children)."""
    _check(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Enter the namespace behind a descriptor of /proc/PID/ns/*."""
    _check(_libc.setns(descriptor, kind), "setns")


def mount(source: str | Path, target: str | Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, data.encode() or None)
    _check(result, f"mount {source} on {target}")


def bind(source: str | Path, target: str | Path, *, recursive: bool = False) -> None:
    """Show `source` at `target` as well."""
    mount(source, target, "", MS_BIND | (MS_REC if recursive else 0))


def tmpfs(target: str | Path, *, mode: int = 0o755, size: str = "50%") -> None:
    """An empty file system in memory."""
    mount("tmpfs", target, "tmpfs", 0, f"mode={mode:o},size={size}")


def overlay(lower: str | Path, over: str | Path) -> None:
    """Show `over` with the files of `lower` laid over it, read-only. `lower` must hold no colon or comma."""
    mount("overlay", over, "overlay", 0, f"lowerdir={lower}:{over}")


def make_private() -> None:
    """Mounts made from here on stay in this mount namespace."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)


def unmount(target: str | Path) -> None:
    """Take the mount away now, and for its users when they are done."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def change_root(root: str | Path) -> None:
    """Make the mount point `root` the root of this mount namespace and drop the old one, also from within a chroot."""
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(0, f"another root on {os.uname().machine}: not supported")
    new = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    setns(namespace, CLONE_NEWNS)  # out of a chroot, to where pivot_root works
    os.close(namespace)
    os.fchdir(new)
    os.close(new)
    _check(_libc.syscall(number, b".", b"."), f"pivot_root {root}")
    unmount(".")
    os.chdir("/")


def set_process_name(name: str) -> None:
    """What `ps` shows, 15 characters at most."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
