"""A cluster that exists: run commands in it, and bring it down."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev_cluster import cgroups, processes
from dev_cluster.control import ask, init_pid
from dev_cluster.layout import DEFAULT_FOLDER, LOGIN, Layout
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic
from sluice.base.run import CommandError, run_command

SCHEMA_VERSION = 1
_ENTER = Path(__file__).parent / "enter/enter"
_LOCK_PATIENCE = 3.0  # seconds
_THAW_AFTER = 2.0  # seconds, after which somebody may have frozen a job
_END_TIMEOUT = 60.0  # seconds for the kernel to end a thousand daemons

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon of the cluster; `status` is None while it runs, else its exit status (negative: the signal)."""

    name: str
    host: str
    pid: int  # in the cluster's PID namespace
    status: int | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as slurmctld sees it."""

    name: str
    state: str
    gres: str
    reason: str = ""


def default_folder() -> Path:
    """The state folder where none is named: $SLUICE_CLUSTER_DIR, else one for the whole machine."""
    return Path(os.environ.get("SLUICE_CLUSTER_DIR") or DEFAULT_FOLDER)


class ClusterHandle:
    """A handle on the cluster in a state folder, whether or not there is one yet."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(os.path.abspath(folder or default_folder()))  # noqa: PTH100 - links are kept
        self.layout = Layout(self.folder)
        self._lifeline: int | None = None

    # ---- life ----

    def down(self) -> bool:
        """Remove every process, mount, namespace, cgroup and file. True if there was any.

        Works on whatever an interrupted `up` or `down` has left, too. Raises UsageError, doing nothing, when the
        folder holds something else than a cluster.
        """
        require_root("down")
        if not self.folder.exists():
            return self._tear_down()
        if not self._is_ours():
            raise UsageError(f"{self.folder}: holds no cluster", remedy="name a cluster's state folder with --dir")
        with self._locked():
            return self._tear_down()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{self.folder}: {error.strerror}", remedy="name a folder in an existing one with --dir"
            ) from error
        self._check_owner()

    def _check_owner(self) -> None:
        facts = self.folder.lstat()
        if self.folder.is_symlink() or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            raise UsageError(
                f"{self.folder}: a link, or a folder that others can write to", remedy="name another with --dir"
            )

    def _is_ours(self) -> bool:
        """Whether the folder is a cluster's, or so new that nothing is in it yet."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return False
        names = [entry.name for entry in self.folder.iterdir()]
        return self.layout.facts.name in names or all(n.startswith(f".{self.layout.facts.name}.") for n in names)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One `up` or `down` at a time; the lock goes with its holder.

        A holder that was killed may have left a child on its way to another program, which lets go a moment later.
        """
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + _LOCK_PATIENCE
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise SluiceError(
                            f"{self.folder}: another `sluice cluster up` or `down` is running on it",
                            remedy="wait until it is done, or stop it",
                        ) from error
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def _tear_down(self) -> bool:
        """End process 1, and with it all processes and namespaces; then remove cgroups and files, the facts last."""
        something = self.folder.exists() or self._lifeline is not None
        deadline = time.monotonic() + _END_TIMEOUT
        self.detach()
        while pids := {*processes.marked(self.folder), *filter(None, [init_pid(self.layout)])}:
            something = True
            for pid in pids:
                if processes.kill(pid, timeout=_THAW_AFTER):
                    continue
                cgroups.thaw(self.layout.cgroup)
                if not processes.kill(pid, timeout=max(0.0, deadline - time.monotonic())):
                    raise SluiceError(
                        f"process {pid}: does not end", remedy="see in /proc/PID/stack what it waits for, and try again"
                    )
        cgroups.remove(self.layout.cgroup)
        if self.folder.exists():
            for entry in self.folder.iterdir():
                if entry != self.layout.facts:
                    _remove(entry)
            self.layout.facts.unlink(missing_ok=True)
            self.folder.rmdir()
        return something

    def detach(self) -> None:
        """End an attached cluster's processes; `down` still has to clean up."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    # ---- facts ----

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write down what `up` decided; marks the folder as a cluster's."""
        write_atomic(self.layout.facts, json.dumps({"schema_version": SCHEMA_VERSION, **facts}, indent=1) + "\n")

    @property
    def facts(self) -> dict[str, Any]:
        """What `up` wrote down. Raises SluiceError when there is no cluster that is up."""
        remedy = f"bring one up with: sluice cluster up --dir {self.folder}"
        try:
            facts: dict[str, Any] = json.loads(self.layout.facts.read_text())
        except FileNotFoundError as error:
            raise SluiceError(f"{self.folder}: no cluster here", remedy=remedy) from error
        except (OSError, ValueError) as error:
            raise SluiceError(f"{self.layout.facts}: {error}", remedy="bring the cluster down and up again") from error
        version = facts.get("schema_version") if isinstance(facts, dict) else None
        if version != SCHEMA_VERSION:
            raise SluiceError(
                f"{self.layout.facts}: schema version {version}, this is {SCHEMA_VERSION}",
                remedy="bring the cluster down and up again",
            )
        if "nodes" not in facts:
            raise SluiceError(
                f"{self.folder}: the cluster has only begun to start",
                remedy="wait for `sluice cluster up`; if that was killed, bring it down",
            )
        return facts

    @property
    def is_up(self) -> bool:
        """Whether the cluster's process 1 runs."""
        return init_pid(self.layout) is not None

    @property
    def nodes(self) -> list[str]:
        """The nodes in the description's order."""
        return list(self.facts["nodes"])

    @property
    def users(self) -> list[str]:
        """The cluster's own users."""
        return list(self.facts["users"])

    def node_folder(self, node: str) -> Path:
        """The state folder of a node; its simulated GPUs are in ``gpu_sim``. Raises UsageError for an unknown node."""
        if node not in self.facts["nodes"]:
            raise UsageError(f"node {node!r}: not in the cluster", remedy=f"its nodes are {', '.join(self.nodes[:10])}")
        return self.layout.node(node)

    def slurm_conf_dir(self, node: str | None = None) -> Path:
        """The folder that is /etc/slurm on the node, or on the controllers and the login host."""
        folder = None if node is None else self.layout.node_slurm(node)
        return folder if folder is not None and folder.is_dir() else self.layout.slurm

    # ---- work in it ----

    def command(
        self,
        argv: Sequence[str | Path],
        *,
        node: str = LOGIN,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> list[str]:
        """The command line that runs `argv` inside the cluster, for the caller's own Popen or exec.

        The process gets a fresh environment of PATH, HOME and the like with `env` added, and dies with its starter.
        """
        facts = self.facts
        account = self._unix_user(user, facts)
        pid = init_pid(self.layout)
        if pid is None:
            raise SluiceError(
                f"{self.folder}: the cluster does not run",
                remedy=f"remove it with: sluice cluster down --dir {self.folder}",
            )
        host = self._host(node, facts)
        held = None if host == LOGIN else ask(self.layout, "enter", name=host)
        mounts, names = (
            (f"/proc/{pid}/fd/{number}" for number in held) if held else (f"/proc/{pid}/ns/mnt", f"/proc/{pid}/ns/uts")
        )
        home = account["home"]
        environment = {
            **self.environment(facts),
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            **({"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}),
            **(env or {}),
        }
        groups = ",".join(map(str, account["groups"]))
        return [
            *(str(_ENTER), f"/proc/{pid}/ns/pid", f"/proc/{pid}/ns/ipc", names, mounts, "--"),
            *(str(account["uid"]), str(account["gid"]), groups, cwd or home),
            *(f"{key}={value}" for key, value in environment.items()),
            *("--", *(str(word) for word in argv)),
        ]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        node: str = LOGIN,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 60,
        check: bool = True,
        input_text: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside the cluster to its end: on the login host or a node, as any of its users.

        Raises CommandError as `run_command` does.
        """
        line = self.command(argv, node=node, user=user, env=env, cwd=cwd)
        try:
            return run_command(line, timeout=timeout, check=check, input_text=input_text)
        except CommandError as error:
            said = error.what.removeprefix(
                " ".join(line[: -len(argv)]) + " "
            )  # how the command got inside is of no use in an error
            raise CommandError(said, returncode=error.returncode, stderr=error.stderr) from error

    def environment(self, facts: Mapping[str, Any] | None = None) -> dict[str, str]:
        """What every process of the cluster has in its environment."""
        facts = facts or self.facts
        environment = {"PATH": facts["path"], **facts["environment"]}
        if facts["name_slurm_conf"]:
            environment["SLURM_CONF"] = "/etc/slurm/slurm.conf"
        return environment

    @staticmethod
    def _unix_user(user: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = facts["unix_users"]
        if user not in known:
            raise UsageError(f"user {user!r}: not in the cluster", remedy=f"its users are {', '.join(facts['users'])}")
        return known[user]

    @staticmethod
    def _host(node: str, facts: Mapping[str, Any]) -> str:
        if node not in (LOGIN, *facts["hosts"], *facts["nodes"]):
            shown = ", ".join([LOGIN, *facts["hosts"], *list(facts["nodes"])[:10]])
            raise UsageError(f"node {node!r}: not in the cluster", remedy=f"its hosts are {shown}")
        return node

    # ---- daemons ----

    def daemons(self) -> list[Daemon]:
        """Every daemon that was started."""
        return [Daemon(name, d["host"], d["pid"], d["status"]) for name, d in ask(self.layout, "list").items()]

    def stop_daemon(self, name: str, *, number: int = signal.SIGTERM, timeout: float = 30) -> None:
        """Signal a daemon and wait until it has ended. Raises SluiceError when it does not run or does not end."""
        if not ask(self.layout, "signal", name=name, number=number):
            known = ", ".join(daemon.name for daemon in self.daemons()[:12])
            raise SluiceError(f"daemon {name!r}: does not run", remedy=f"the cluster's daemons are {known}")
        deadline = time.monotonic() + timeout
        while next(daemon for daemon in self.daemons() if daemon.name == name).status is None:
            if time.monotonic() > deadline:
                raise SluiceError(f"daemon {name!r}: has not ended {timeout:g} s after signal {number}")
            time.sleep(0.05)

    def start_daemon(self, name: str) -> None:
        """Start a daemon that has ended, as `up` started it. Raises SluiceError."""
        commands = self.facts["daemons"]
        if name not in commands:
            raise UsageError(f"daemon {name!r}: not in the cluster", remedy=f"its daemons are {', '.join(commands)}")
        ask(self.layout, "spawn", name=name, **commands[name])

    def start_program(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        node: str = LOGIN,
        user: str = "root",
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start one more daemon, e.g. a test's own: it has a log, can be stopped, and ends with the cluster."""
        facts = self.facts
        account = self._unix_user(user, facts)
        ask(
            self.layout,
            "spawn",
            name=name,
            host=self._host(node, facts),
            argv=[str(word) for word in argv],
            env={**self.environment(facts), "HOME": account["home"], "LANG": "C.UTF-8", **(env or {})},
            user=[account["uid"], account["gid"], account["groups"]],
        )

    def restart_slurmctld(self, host: str = "ctl1", *, timeout: float = 60) -> None:
        """Stop and start a controller's slurmctld; return when it serves (see wait_registered). Raises SluiceError."""
        self.stop_daemon(f"slurmctld@{host}")
        self.start_daemon(f"slurmctld@{host}")
        self.wait_registered(timeout=timeout)

    def log(self, daemon: str) -> Path:
        """The daemon's log file."""
        return self.layout.logs / f"{daemon}.log"

    def log_tail(self, daemon: str, lines: int = 12) -> str:
        """The last lines of the daemon's log; empty if there are none."""
        try:
            text = self.log(daemon).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(text[-lines:])

    # ---- what slurmctld says ----

    def node_states(self) -> list[NodeStatus]:
        """Every node as `sinfo` shows it. Raises CommandError while slurmctld does not answer."""
        done = self.run(["sinfo", "--noheader", "--Node", "--format=%N|%T|%G|%E"], timeout=60)
        found = {}
        for line in done.stdout.splitlines():
            name, state, gres, reason = line.split("|", 3)
            found[name] = NodeStatus(name, state, gres, "" if reason == "none" else reason)
        return list(found.values())

    def wait_registered(self, *, timeout: float = 60) -> None:
        """Wait until a slurmctld answers and every node has registered with it.

        Before that a node is UNKNOWN: slurmctld starts no job there, and 24.11 takes `state=drain` for it, but then
        answers `state=resume` with "Invalid node state specified". Raises SluiceError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                missing = [node.name for node in self.node_states() if node.state.startswith("unk")]
            except CommandError as error:
                missing = [error.what]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise SluiceError(f"not registered with slurmctld within {timeout:g} s: {', '.join(missing)}")
            time.sleep(0.1)

    def wait_idle(
        self, nodes: Iterable[str] | None = None, *, timeout: float = 60, progress: Progress | None = None
    ) -> None:
        """Wait until the nodes (all of them) are idle. Raises SluiceError naming those that are not."""
        wanted = set(nodes or self.nodes)
        deadline = time.monotonic() + timeout
        shown = -1
        while True:
            states = {status.name: status for status in self.node_states() if status.name in wanted}
            idle = sum(status.state == "idle" for status in states.values())
            if progress is not None and idle != shown:
                progress(f"nodes idle: {idle} of {len(wanted)}")
                shown = idle
            if idle == len(wanted):
                return
            broken = [s for s in states.values() if s.state.startswith(("drain", "inval")) or s.state.endswith("inval")]
            if broken or time.monotonic() > deadline:
                worst = broken[0] if broken else next(s for s in states.values() if s.state != "idle")
                words = self.log_tail(f"slurmd@{worst.name}")
                raise SluiceError(
                    f"node {worst.name} is {worst.state}{f' ({worst.reason})' if worst.reason else ''}; "
                    f"the last lines of its slurmd's log:\n{words}"
                )
            for daemon in self.daemons():
                if daemon.status is not None:
                    raise DaemonError(self, daemon)
            time.sleep(0.1)


class DaemonError(SluiceError):
    """A daemon that ended; carries the last lines of its log."""

    def __init__(self, cluster: ClusterHandle, daemon: Daemon) -> None:
        how = f"exit status {daemon.status}" if (daemon.status or 0) >= 0 else f"signal {-(daemon.status or 0)}"
        super().__init__(f"{daemon.name} ended with {how}; the last lines of its log:\n{cluster.log_tail(daemon.name)}")


def require_root(what: str) -> None:
    """Raise SluiceError unless root: namespaces, device files and cgroups need it."""
    if os.geteuid() != 0:
        raise SluiceError(f"sluice cluster {what}: you are not root", remedy="run it as root, e.g. with sudo")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
