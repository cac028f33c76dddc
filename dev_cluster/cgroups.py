"""The cluster's own cgroup: one folder at the root of each hierarchy that it uses, and nothing next to it.

Under version 1 Slurm constrains devices in ``devices`` and follows jobs in ``freezer``. Both can be mounted also on a
system that otherwise uses version 2, as neither is a controller there. ``memory`` and ``cpuset`` are taken where
version 1 has them.

Under version 2 the cluster's folder is the root of its cgroup namespace, laid out as systemd lays out a node:
``init.scope`` has process 1, ``system.slice/NAME.service`` a daemon, and Slurm puts its jobs next to them.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dev_cluster import namespaces
from sluice.base.run import PYTHON, run_command

Version = Literal["v1", "v2"]

_TIMEOUT = 20.0  # seconds
REQUIRED = ("devices", "freezer")
_PLACE = Path("/sys/fs/cgroup")  # also where hierarchies are mounted for a moment, in a mount namespace of our own
_OPTIONAL = ("memory", "cpuset", "cpuacct")
_UNIFIED = "unified"  # version 2's hierarchy
_SERVICES = _PLACE / "system.slice"


def _mount(hierarchy: str, place: Path) -> bool:
    """Mount one hierarchy; False when this kernel or system does not give it."""
    kind, options = ("cgroup2", "") if hierarchy == _UNIFIED else ("cgroup", hierarchy)
    try:
        namespaces.mount(kind, place, kind, 0, options)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EINVAL, errno.ENOENT, errno.EPERM, errno.ENODEV):
            raise
        return False
    return True


def _available(version: Version) -> list[str]:
    """Hierarchies to use; of version 1 the required ones, and the optional ones that it has already."""
    if version == "v2":
        return [_UNIFIED]
    bound = set()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        bound.update(line.split(":")[1].split(","))
    return [*REQUIRED, *(name for name in _OPTIONAL if name in bound)]


def enter(name: str, version: Version) -> None:
    """Make the cgroup `name` and move the calling process there.

    Leaves the caller in a mount namespace of its own. Raises OSError.
    """
    namespaces.unshare(namespaces.CLONE_NEWNS)
    namespaces.make_private()
    other = "v1" if version == "v2" else "v2"
    for hierarchy in _available(version):
        if not _mount(hierarchy, _PLACE):
            if hierarchy not in _OPTIONAL:
                raise OSError(
                    errno.ENODEV,
                    f"cgroup {version} {hierarchy!r} cannot be mounted: this kernel or container does not give it; "
                    f"set 'cgroup: {other}' in the cluster file",
                )
            continue
        nested = _PLACE / name
        nested.mkdir(exist_ok=True)
        if hierarchy == "cpuset":
            for key in ("cpuset.cpus", "cpuset.mems"):
                (nested / key).write_text((_PLACE / key).read_text())
        (nested / "cgroup.procs").write_text("0")
        namespaces.unmount(_PLACE)


def show(version: Version) -> None:
    """Mount the hierarchies where Slurm looks for them: in a cgroup namespace, the cluster's own part alone."""
    if version == "v2":
        namespaces.mount("cgroup2", _PLACE, "cgroup2")
        _SERVICES.mkdir()
        _move_to(_PLACE / "init.scope")
        return
    controllers = _available(version)
    namespaces.tmpfs(_PLACE)
    for controller in controllers:
        (_PLACE / controller).mkdir()
        if not _mount(controller, _PLACE / controller):
            (_PLACE / controller).rmdir()


def become_service(name: str) -> None:
    """Move the calling process to where a daemon of that name runs; under version 1 all are in one place."""
    if _SERVICES.is_dir():
        _move_to(_SERVICES / f"{name}.service")


def _move_to(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.procs").write_text("0")


def remove(name: str) -> None:
    """Remove the cgroup `name` with all below it. Its processes must have ended. Raises CommandError.

    Done by a process of its own, as mounting needs a mount namespace.
    """
    run_command([*PYTHON, "-m", "dev_cluster.cgroups", "remove", name], timeout=_TIMEOUT + 10)


def thaw(name: str) -> None:
    """Thaw what is frozen below the cgroup `name`: in version 1 frozen processes do not end. Raises CommandError."""
    run_command([*PYTHON, "-m", "dev_cluster.cgroups", "thaw", name], timeout=_TIMEOUT)


def main() -> None:
    """Remove, or thaw, the cgroup that the command line names."""
    act, name = sys.argv[1:]
    try:
        namespaces.unshare(namespaces.CLONE_NEWNS)
    except PermissionError as error:
        if any(_PLACE.glob(f"*/{name}")):
            sys.exit(f"cgroup {name}: {error}")
        return  # who may not do this has not made one either
    namespaces.make_private()
    if act == "thaw":
        _thaw(name)
        return
    for hierarchy in (*_available("v1"), *_available("v2")):
        ours = hierarchy != _UNIFIED and not _is_mounted(hierarchy)
        if _mount(hierarchy, _PLACE):
            deadline = time.monotonic() + _TIMEOUT
            while not _remove_tree(_PLACE / name):  # the kernel may take a moment to see that processes have ended
                if time.monotonic() > deadline:
                    sys.exit(f"cgroup {hierarchy}/{name} is in use: its cgroup.procs says by which processes")
                time.sleep(0.05)
            # A hierarchy that only clusters mount goes with its last mount, once the kernel is done with its cgroups.
            deadline = time.monotonic() + 1
            while ours and _cgroup_count(hierarchy) > 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            namespaces.unmount(_PLACE)


def _thaw(name: str) -> None:
    if _mount("freezer", _PLACE):
        for state in (_PLACE / name).rglob("freezer.state"):
            with suppress(OSError):
                state.write_text("THAWED")
        namespaces.unmount(_PLACE)


def _is_mounted(controller: str) -> bool:
    """Whether the version 1 hierarchy can be seen somewhere on this system."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        kind, _, options = line.rpartition(" - ")[2].split(" ", 2)
        if kind == "cgroup" and controller in options.split(" ")[-1].split(","):
            return True
    return False


def _cgroup_count(controller: str) -> int:
    """How many cgroups the hierarchy has, its root included."""
    for line in Path("/proc/cgroups").read_text().splitlines():
        name, _, count, _ = line.split()
        if name == controller:
            return int(count)
    return 0


def _remove_tree(folder: Path) -> bool:
    """Remove a cgroup and those below it, deepest first; False when one is still busy."""
    gone = True
    for path, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(path)  # noqa: PTH106
        except FileNotFoundError:
            pass
        except OSError:
            gone = False
    return gone


if __name__ == "__main__":
    main()
