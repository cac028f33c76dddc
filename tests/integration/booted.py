"""Machines that systemd has booted as process 1 of namespaces of their own, with a cgroup tree of version 2 alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from sluice.base.run import run_command

HYBRID = any(not line.startswith("0:") for line in Path("/proc/self/cgroup").read_text().splitlines())
"""This kernel lists cgroups of version 1 in every process's file, also where none of them is mounted."""
SLUICE = "/opt/sluice/bin/sluice"
SOURCES = "/opt/sluice/src"
"""The checkout, in a machine with `installed`."""
DEBIAN_CONF = """AuthType=auth/munge
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/cgroup
"""
"""Of slurm.conf: users and paths of Debian's packages, and cgroups."""
_SLURM_CONF = f"""SlurmctldHost=sluice
{DEBIAN_CONF}SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
PriorityType=priority/multifactor
GresTypes=gpu,shard
ReturnToService=2
Prolog=/usr/libexec/sluice/sluice-prolog
Epilog=/usr/libexec/sluice/sluice-epilog
TaskProlog=/usr/libexec/sluice/sluice-task-prolog
PrologFlags=Alloc,Contain
PrologEpilogTimeout=120
HealthCheckProgram=/usr/libexec/sluice/sluice-health
HealthCheckInterval=300
Include nodes.sluice.conf
PartitionName=main Nodes=ALL Default=YES
"""
# $1: the machine's cgroup. It ends with its input, i.e. with the test, however that ends; so does the machine.
_CLEANER = r"""
trap '' INT TERM HUP
cat >/dev/null
echo 1 >"$1/cgroup.kill"
for try in $(seq 600); do grep -q 'populated 1' "$1/cgroup.events" || break; sleep 0.05; done
find "$1" -depth -type d -exec rmdir {} \;
"""
# $1: the cgroup, $2: the machine's name, $3: an empty folder, $4: a tree of Debian; then nspawn's options. The tree is
# not changed: an overlay in memory is above it.
_NSPAWN = r"""
echo 0 >"$1/cgroup.procs"; shift
exec unshare --pid --mount --ipc --cgroup --fork --kill-child --propagation private sh -euc '
    mount -t proc proc /proc; mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs tmpfs /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup
    name=$1; mount -t tmpfs tmpfs "$2"; cd "$2"; mkdir upper work root
    mount -t overlay overlay -o "lowerdir=$3,upperdir=upper,workdir=work" root; shift 3
    echo 0123456789abcdef0123456789abcdef >root/etc/machine-id; echo "$name" >root/etc/hostname
    export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
    exec systemd-nspawn --quiet --machine="$name" --register=no --keep-unit --directory=root --boot "$@" \
        systemd.unit=basic.target
' sh "$@"
"""
# All that nspawn forbids by default and Slurm needs: without bpf(2), Slurm 22.05 runs jobs with all devices open.
_OPTIONS = (
    "--private-network",
    "--console=pipe",
    "--capability=all",
    "--system-call-filter=@default @known bpf keyctl perf_event_open",
)


def slurm_conf(name: str, *more: str) -> str:
    """Of a cluster of that name whose only host, `sluice`, is set up as the admin guide has it; with more lines."""
    return f"ClusterName={name}\n{_SLURM_CONF}" + "".join(f"{line}\n" for line in more)


class CannotBootError(Exception):
    """This machine does not boot others; the message says why."""


class Machine:
    """A machine that has booted of a tree. `pid`: its process 1, as seen from here."""

    init = "systemd"
    patience = 60.0
    """Seconds to wait for what takes no time on hardware."""

    def __init__(self, pid: int, tree: Path) -> None:
        self.pid = pid
        self.tree = tree

    def command(self, *words: str, user: str = "") -> list[str]:
        """The command line of a program in the machine."""
        enter = ["nsenter", "--target", str(self.pid), "--all", "--root", "--wdns=/"]
        become = ["setpriv", "--reuid", user, "--regid", user, "--init-groups"] if user else []
        return [
            *enter,
            "env",
            "-i",
            "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            *become,
            *words,
        ]

    def run(self, *words: str, check: bool = True, text: str | None = None, user: str = "") -> str:
        """A command's output and complaints."""
        limit = 3 * self.patience
        done = run_command(self.command(*words, user=user), check=False, timeout=limit, input_text=text)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return (done.stdout + done.stderr).strip()

    def shell(self, script: str, **options: Any) -> str:
        """A script's output and complaints."""
        return self.run("sh", "-euc", script, **options)

    def write(self, path: str, text: str, mode: str = "644") -> None:
        """A file, and its folders."""
        quoted = shlex.quote(path)
        self.shell(f'mkdir -p "$(dirname {quoted})"; cat >{quoted}; chmod {mode} {quoted}', text=text)

    def wait(self, condition: Callable[[], Any], seconds: float = 0) -> Any:
        """What it returns, once that is something."""
        deadline = time.monotonic() + (seconds or self.patience)
        while not (found := condition()):
            assert time.monotonic() < deadline, self.run("journalctl", "--lines=40", "--output=cat", check=False)
            time.sleep(0.2)
        return found

    def copy(self, files: Sequence[Path], folder: str) -> None:
        """Files into a folder of the machine, which is made."""
        packed = subprocess.run(
            ["tar", "-c", *(word for file in files for word in ("-C", file.parent, file.name))],
            stdout=subprocess.PIPE,
            check=True,
        )
        self.run("mkdir", "-p", folder)
        subprocess.run(self.command("tar", "-x", "-C", folder), input=packed.stdout, check=True)

    def shown(self, unit: str, name: str) -> str:
        """One of a unit's properties."""
        return self.run("systemctl", "show", f"--property={name}", "--value", unit)

    def journal(self, unit: str) -> str:
        """What a unit has logged."""
        return self.run("journalctl", f"--unit={unit}", "--output=cat", "--no-pager")

    def logged_at(self, unit: str, text: str) -> int:
        """When it first logged a line with a text: microseconds on the clock of systemd's monotonic timestamps."""
        lines = self.run("journalctl", f"--unit={unit}", "--output=json", "--no-pager").splitlines()
        entries = (json.loads(line) for line in lines)
        return next(int(one["__MONOTONIC_TIMESTAMP"]) for one in entries if text in str(one["MESSAGE"]))

    def is_active(self, unit: str) -> bool:
        """Whether systemd says so."""
        return self.run("systemctl", "is-active", unit, check=False) == "active"


def unified_hierarchy() -> Path | None:
    """Where this machine has cgroups of version 2."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)


@contextmanager
def cgroup_of_own(name: str) -> Iterator[Path]:
    """A cgroup of version 2; it and all processes in it go with this block, or with this process if that is killed."""
    unified = unified_hierarchy()
    if os.geteuid() != 0 or unified is None:
        raise CannotBootError("booting a machine needs root and cgroups of version 2")
    group = unified / f"sluice-test-{os.getpid()}-{name}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotBootError(f"{group}: {error.strerror}") from error
    words = ["env", "-i", "sh", "-c", _CLEANER, "sh", str(group)]  # without the mark by which conftest.py ends others
    cleaner = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield group
    finally:
        assert cleaner.stdin is not None
        cleaner.stdin.close()
        assert cleaner.wait(60) == 0 and not group.exists()


@contextmanager
def nspawn(tree: Path, folder: Path, options: Sequence[str] = (), *, name: str = "sluice") -> Iterator[Machine]:
    """Debian's `tree` as a machine at its basic.target. `folder`: for its log; `options`: of systemd-nspawn.

    Raises CannotBootError.
    """
    (folder / "root").mkdir()
    log = folder / "console"
    with cgroup_of_own(name) as group, log.open("wb") as console:
        words = ["sh", "-euc", _NSPAWN, "sh", str(group), name, str(folder / "root"), str(tree), *_OPTIONS, *options]
        boot = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            machine = Machine(_wait_for_boot(boot, group, log), tree)
            yield machine
        finally:
            boot.kill()
            boot.wait()


def connect(machines: dict[str, Machine]) -> None:
    """A link between each two machines, by their addresses."""
    for (one, first), (other, second) in combinations(machines.items(), 2):
        names = [f"to-{address.replace('.', '-')}"[-15:] for address in (other, one)]
        ends = ["name", names[0], "netns", str(first.pid), "type", "veth", "peer", "name", names[1]]
        run_command(["ip", "link", "add", *ends, "netns", str(second.pid)], timeout=60)
        for machine, name, own, far in ((first, names[0], one, other), (second, names[1], other, one)):
            machine.shell(
                f"ip address add {own}/32 dev {name}; ip link set lo up; ip link set {name} up;"
                f"ip route add {far}/32 dev {name} src {own}"
            )


def _wait_for_boot(boot: subprocess.Popen[bytes], group: Path, log: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and boot.poll() is None:
        for pid in _processes(group):
            if _is_init(pid) and Machine(pid, group).is_active("basic.target"):
                return pid
        time.sleep(0.1)
    said = log.read_text(errors="replace")[-1000:]
    raise CannotBootError(f"systemd-nspawn --boot does not boot here: {said}")


def _processes(group: Path) -> Iterator[int]:
    for folder, _, _ in os.walk(group):  # unlike Path.rglob, it passes over folders that go meanwhile
        with suppress(OSError):
            yield from map(int, Path(folder, "cgroup.procs").read_text().split())


def _is_init(pid: int) -> bool:
    """Whether it is process 1 of a PID namespace, and systemd."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
        return ids[-1] == "1" and "\tsystemd\n" in status
    return False


def installed(folder: Path, tree: Path) -> list[str]:
    """Sluice at /opt/sluice: an environment of the tree's Python, as `make install` makes it, of what is built here.

    In place of a wheel, its packages and those that they need are the checkout's and its environment's, by bind mounts.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    home = Path("/usr") if (tree / "usr/bin" / version).exists() else Path("/opt/python")
    prefix = folder / "prefix"
    packages = prefix / "lib" / version / "site-packages"
    for path in (packages, prefix / "bin", prefix / "src", prefix / "needed"):
        path.mkdir(parents=True)
    (packages / "sluice.pth").write_text("/opt/sluice/src\n/opt/sluice/needed\n")
    (prefix / "pyvenv.cfg").write_text(f"home = {home}/bin\n")
    (prefix / "bin/python3").symlink_to(f"{home}/bin/{version}")
    checkout = Path(__file__).resolve().parents[2]
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["scripts"]
    for name, place in scripts.items():
        module, _, function = place.partition(":")
        program = prefix / "bin" / name
        program.write_text(
            f"#!/opt/sluice/bin/python3\nimport sys\nfrom {module} import {function} as do\nsys.exit(do())\n"
        )
        program.chmod(0o755)
    binds = {prefix: "", checkout: "/src", Path(sysconfig.get_path("purelib")): "/needed"}
    found = [f"--bind-ro={source}:/opt/sluice{place}" for source, place in binds.items()]
    if home != Path("/usr"):  # this Python, in a tree that has another
        base = Path(sys.base_prefix)
        found += [f"--bind-ro={base / part}:/opt/python/{part}" for part in (f"bin/{version}", f"lib/{version}")]
        library = Path(sysconfig.get_config_var("LIBDIR")) / sysconfig.get_config_var("INSTSONAME")
        found += [f"--bind-ro={library}:/usr/local/lib/{library.name}"] if library.is_file() else []
    return found
