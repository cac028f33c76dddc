"""Process 1 of a cluster: makes its namespaces and starts its daemons; when it ends, everything ends.

Run as ``python -m dev_cluster.init FOLDER CGROUP_VERSION [ROOT]`` by `DevCluster.up`, with the read end of a pipe as
standard input.
All processes of the cluster live in this process's PID namespace and all mounts in mount namespaces that only they
hold, so the kernel ends the one and drops the other as soon as this process dies, however it dies. It dies by itself
when the pipe closes before a byte came through, that is when `up` was killed.

Requests come over a unix socket, one JSON object a line, each answered by one: see `Init.answer`. Nothing
beyond the standard library is loaded, as the process stays for the cluster's life and nodes are forks of it.
"""

from __future__ import annotations

import json
import os
import resource
import select
import selectors
import signal
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dev_cluster import cgroups, namespaces
from dev_cluster.layout import INSIDE, LOGIN, PLUGIN_SEARCH, SLUICE_STATE, THIS_SYSTEM, Layout
from dev_cluster.processes import start_time
from sluice.base.files import write_atomic

_STANDARD_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
    "fuse": (10, 229),
}
_FUSE = Path("/sys/fs/fuse/connections")
# What a simulated machine has instead of what this machine has.
_REPLACED_IN_SYS = ("bus/pci/devices", "class/drm", "class/infiniband", "class/accel", "class/net", "class/kfd")


class RequestError(Exception):
    """A request that makes no sense now."""


def main() -> None:
    """Fork process 1 into new namespaces, write down which process it is, and leave it alone."""
    layout = Layout(Path(sys.argv[1]))
    version: cgroups.Version = "v2" if sys.argv[2] == "v2" else "v1"
    root = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    if select.select([0], [], [], 0)[0]:
        return  # `up` was killed already, and `down` may have been here
    try:
        namespaces.unshare(namespaces.CLONE_NEWPID)
        pid = os.fork()
        if pid:
            write_atomic(layout.init, json.dumps({"pid": pid, "started": start_time(pid)}))
            os._exit(0)
        os.setsid()
        namespaces.set_process_name("sluice-cluster")
        os.environ.clear()  # the first process's own environment, which carries the marker, stays readable in /proc
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                os.set_inheritable(int(entry), int(entry) <= 2)
        Init(layout, version, root).serve()
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)


class Init:
    """State of process 1."""

    def __init__(self, layout: Layout, version: cgroups.Version, root: Path | None) -> None:
        self.namespaces: dict[str, tuple[int, int]] = {}  # node -> descriptors of its mount and UTS namespaces
        self.daemons: dict[str, dict[str, Any]] = {}  # name -> pid, and status once it has ended
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.open_files = soft, hard
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        cgroups.enter(layout.cgroup, version)
        namespaces.unshare(
            namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWIPC | namespaces.CLONE_NEWCGROUP
        )
        namespaces.make_private()
        make_login(layout, version, root)
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, self.lifeline)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        self.selector.register(wake_read, selectors.EVENT_READ, self.woken)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous = os.umask(0o177)
        listener.bind(str(INSIDE / "init.sock"))
        os.umask(previous)
        listener.listen(64)
        self.listener = listener
        self.selector.register(listener, selectors.EVENT_READ, self.accept)

    def serve(self) -> None:
        """Answer requests until this process is killed."""
        while True:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def lifeline(self, descriptor: int) -> None:
        """A byte: `up` is done. End of file before that: it was killed."""
        if not os.read(descriptor, 1):
            os._exit(0)
        self.selector.unregister(descriptor)

    def woken(self, descriptor: int) -> None:
        """SIGCHLD."""
        os.read(descriptor, 4096)
        self.reap()

    def reap(self) -> None:
        """Collect every child that has ended, orphans of daemons and jobs included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for daemon in self.daemons.values():
                if daemon["pid"] == pid and daemon["status"] is None:
                    daemon["status"] = os.waitstatus_to_exitcode(status)

    def accept(self, listener: socket.socket) -> None:
        """Answer one connection's requests until it closes."""
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as stream:
            connection.settimeout(30)
            try:
                for line in stream:
                    stream.write(json.dumps(self.answer(line)) + "\n")
                    stream.flush()
            except OSError:
                return  # the client has gone

    def answer(self, line: str) -> dict[str, Any]:
        """Do one request: its fields are the keyword arguments of the method that `do` names."""
        requests: dict[str, Callable[..., object]] = {
            "node": self.node,
            "enter": self.enter,
            "spawn": self.spawn,
            "signal": self.signal,
            "list": self.list_daemons,
        }
        try:
            request = json.loads(line)
            return {"ok": requests[request.pop("do")](**request)}
        except (OSError, RequestError) as error:
            return {"error": str(error)}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            return {"error": f"request {line.strip()[:200]!r}: {error!r}"}  # not worth the cluster's life

    def list_daemons(self) -> dict[str, dict[str, Any]]:
        """Every daemon ever started: pid, host, and exit status (negative: signal) once it has ended."""
        self.reap()
        return self.daemons

    def node(self, name: str, **description: Any) -> None:
        """Make a host's namespaces; `description` goes to `make_node`."""
        answer, answered = os.pipe()
        hold, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                namespaces.unshare(namespaces.CLONE_NEWNS | namespaces.CLONE_NEWUTS)
                make_node(name, **description)
                os.write(answered, b"\0")
            except OSError as error:
                os.write(answered, f"{name}: {error}".encode())
            os.close(release)
            os.read(hold, 1)  # until our namespaces are held by our parent
            os._exit(0)
        os.close(answered)
        os.close(hold)
        try:
            said = os.read(answer, 4096)
            if said != b"\0":
                raise RequestError(
                    said.decode(errors="replace") or f"{name}: the helper that makes its namespaces died"
                )
            held = tuple(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("mnt", "uts"))
            self.namespaces[name] = (held[0], held[1])
        finally:
            os.close(answer)
            os.close(release)

    def enter(self, name: str) -> list[int] | None:
        """Our descriptors of a host's mount and UTS namespaces; none for the login host, whose are our own."""
        return None if name == LOGIN else list(self.namespaces[name])

    def spawn(self, name: str, host: str, argv: list[str], env: dict[str, str], user: list[Any], cwd: str = "/") -> int:
        """Start a daemon on a host as `user` (uid, gid, groups), its output appended to log/NAME.log; its pid."""
        running = self.daemons.get(name)
        if running and running["status"] is None:
            raise RequestError(f"{name} is running already")
        log = os.open(INSIDE / "log" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.fchown(log, user[0], user[1])
        pid = os.fork()
        if pid == 0:
            try:
                cgroups.become_service(name)
                self._become(host, argv, env, user, cwd, log)
            except OSError as error:
                os.write(log, f"{argv[0]}: {error}\n".encode())
            os._exit(127)
        os.close(log)
        self.daemons[name] = {"pid": pid, "status": None, "host": host}
        return pid

    def _become(self, host: str, argv: list[str], env: dict[str, str], user: list[Any], cwd: str, log: int) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_NOFILE, self.open_files)
        if host != LOGIN:
            mounts, names = self.namespaces[host]
            namespaces.setns(mounts, namespaces.CLONE_NEWNS)
            namespaces.setns(names, namespaces.CLONE_NEWUTS)
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        uid, gid, groups = user
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)  # noqa: S606 - no shell is wanted

    def signal(self, name: str, number: int) -> bool:
        """Signal a daemon; False when it does not run."""
        self.reap()
        daemon = self.daemons.get(name)
        if daemon is None or daemon["status"] is not None:
            return False
        os.kill(daemon["pid"], number)
        return True


def make_login(layout: Layout, version: cgroups.Version, root: Path | None) -> None:
    """The namespaces that all hosts start from: private /etc, /run, /proc and cgroup; the login host's own."""
    state = os.open(layout.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    enter_tree(root, layout.scratch, state)
    cgroups.show(version)
    namespaces.overlay(INSIDE / "etc", "/etc")
    namespaces.bind(INSIDE / "slurm", "/etc/slurm")
    namespaces.bind(INSIDE / "sluice", "/etc/sluice")
    make_sluice_state(LOGIN)
    socket.sethostname(LOGIN)
    os.close(state)


def enter_tree(root: Path | None, scratch: Path, state: int) -> None:
    """Make a tree the root of this mount namespace: our own root, or another system's.

    Our own has to be as well, as it is not yet where we run in a chroot: a process that enters a mount namespace begins
    at its root. What is written to another system's tree, or to our own /var/lib, goes to memory only.
    """
    namespaces.tmpfs(scratch)
    os.chdir(scratch)  # relative paths, as an overlay's options can hold no comma or colon
    for name in ("upper", "work", "root"):
        Path(name).mkdir()
    if root is None:
        namespaces.bind("/", "root", recursive=True)
        layers = "lowerdir=/var/lib,upperdir=upper,workdir=work"
        namespaces.mount("overlay", "root/var/lib", "overlay", 0, layers)
    else:
        tree = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        namespaces.mount("overlay", "root", "overlay", 0, f"lowerdir=/proc/self/fd/{tree},upperdir=upper,workdir=work")
        os.close(tree)
        Path(f"root{THIS_SYSTEM}").mkdir()
        namespaces.bind("/", f"root{THIS_SYSTEM}", recursive=True)
        for name in ("sys", "dev"):
            namespaces.bind(f"/{name}", f"root/{name}", recursive=True)
    Path(f"root{SLUICE_STATE}").mkdir(exist_ok=True)
    namespaces.mount("proc", "root/proc", "proc")
    make_run(state, Path("root"))
    namespaces.change_root("root")


def make_run(state: int, root: Path = Path("/")) -> None:
    """A private /run, with the state folder (an open descriptor) and munge's socket folder."""
    namespaces.tmpfs(root / "run")
    inside = root / INSIDE.relative_to("/")
    inside.mkdir()
    namespaces.bind(f"/proc/self/fd/{state}", inside)
    munge = root / "run/munge"
    munge.mkdir()
    namespaces.bind(inside / "munge", munge)
    (root / PLUGIN_SEARCH.relative_to("/")).mkdir()
    (root / "run/lock").mkdir()
    (root / "run/lock").chmod(0o1777)


def make_sluice_state(host: str) -> None:
    """A host's own /var/lib/sluice, with links to what its daemons keep elsewhere in the state folder."""
    folder = INSIDE / "hosts" / host
    folder.mkdir(parents=True)
    (folder / "controllerd").symlink_to(INSIDE / "controllerd" / host)
    (folder / "inventory").symlink_to(INSIDE / "inventory")
    (folder / "fleet").symlink_to(INSIDE / "fleet")
    (folder / "records").symlink_to(INSIDE / "nodes" / host / "records")
    namespaces.bind(folder, SLUICE_STATE)


def make_node(
    name: str,
    *,
    slurm: str | None = None,
    devices: list[list[Any]] | None = None,
    owner: list[int] | None = None,
    memory: str | None = None,
) -> None:
    """A host, in namespaces cloned from the login host's.

    `slurm` is the folder (inside) shown as /etc/slurm; `devices` are the simulated GPUs' device files as path, major,
    minor and mode, or None for the machine's own /dev and /sys; `owner` is that of /run/slurm and of the folder
    `memory`, which is kept in memory.
    """
    socket.sethostname(name)
    state = os.open(INSIDE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    make_run(state)
    namespaces.mount("none", "/run", "", namespaces.MS_SHARED)  # as systemd has it: what an agent mounts is seen
    runtime = Path("/run/slurm")
    runtime.mkdir()
    if memory is not None:
        namespaces.tmpfs(memory)
    if owner is not None:
        os.chown(runtime, *owner)
        if memory is not None:
            os.chown(memory, *owner)
    make_sluice_state(name)
    if slurm is not None:
        namespaces.bind(slurm, "/etc/slurm")
    if devices is not None:
        make_devices(INSIDE / "nodes" / name / "gpu_sim", devices)
    if _FUSE.is_dir():
        namespaces.mount("fusectl", _FUSE, "fusectl")  # as systemd does
    os.close(state)


def make_devices(sim: Path, devices: list[list[Any]]) -> None:
    """Private /dev, /sys, /proc/driver, /proc/meminfo and loader cache of a node with simulated GPUs."""
    dev = Path("/dev")
    namespaces.tmpfs(dev, size="64m")
    for device, (major, minor) in _STANDARD_DEVICES.items():
        make_device(dev / device, major, minor, 0o666)
    for link, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (dev / link).symlink_to(f"/proc/self/{target}")
    (dev / "ptmx").symlink_to("pts/ptmx")
    for folder in ("pts", "shm", "sluice-sim"):
        (dev / folder).mkdir()
    namespaces.mount("devpts", dev / "pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620,gid=5")
    namespaces.tmpfs(dev / "shm", mode=0o1777)
    for path, major, minor, mode in devices:
        make_device(Path(path), major, minor, mode)
    if not sim.is_dir():
        return  # a node without GPUs
    namespaces.bind(sim, dev / "sluice-sim")
    if (sim / "sys").is_dir():
        cgroup = os.open("/sys/fs/cgroup", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in _REPLACED_IN_SYS:
            if (sim / "sys" / part).is_dir():
                os.setxattr(sim / "sys" / part, "trusted.overlay.opaque", b"y")
        namespaces.overlay(sim / "sys", "/sys")
        namespaces.bind(f"/proc/self/fd/{cgroup}", "/sys/fs/cgroup", recursive=True)
        os.close(cgroup)
    if (sim / "proc" / "driver").is_dir():
        namespaces.bind(sim / "proc" / "driver", "/proc/driver")
        namespaces.bind(sim / "proc" / "meminfo", "/proc/meminfo")
    if (INSIDE / "ld.so.cache").exists():
        namespaces.bind(INSIDE / "ld.so.cache", "/etc/ld.so.cache")


def make_device(path: Path, major: int, minor: int, mode: int) -> None:
    """A character device file, with the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
    path.chmod(mode)


if __name__ == "__main__":
    main()
