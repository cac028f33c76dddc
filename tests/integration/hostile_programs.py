# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH108, PTH110, PTH116, PTH118, PTH123, SIM115
"""What a hostile tenant runs inside a job: ``python3 hostile_programs.py ATTACK [WORD ...]``, all standard library.

An attack prints ``up PID`` once it is at work, PID being a process that may be said to hold GPU memory, and goes on
until it is ended. COUNT in the environment scales what there can be many of. Tests, `benchmarks hostile` and a person
who wants to see an attack run the same file; none of it needs a right that users do not have.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import itertools
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress

AGENT = "/run/sluice/agent.sock"
RUN = "/run/sluice"
COUNT = int(os.environ.get("COUNT", "0"))
C = ctypes.CDLL(None, use_errno=True)
ATTACKS: dict[str, Callable[..., None]] = {}


def attack(function: Callable[..., None]) -> Callable[..., None]:
    """Callable by its name, dashes for underscores."""
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


def up(pid: int | None = None) -> None:
    print("up", pid or os.getpid(), flush=True)


def stay() -> None:
    while True:
        time.sleep(60)


def again_and_again(what: Callable[[], object], pause: float = 0.02) -> None:
    """Do it for ever, whatever it is refused with."""
    up()
    while True:
        with suppress(OSError, ValueError):
            what()
        time.sleep(pause)


def children(count: int, run: Callable[[int], None]) -> list[int]:
    """So many processes, as many as the kernel lets us have."""
    pids = []
    for number in range(count):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            try:
                run(number)
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def files_of_agent() -> list[str]:
    """All that can be seen below /run/sluice."""
    return [os.path.join(folder, name) for folder, _, names in os.walk(RUN) for name in names]


def writable() -> list[str]:
    return [path for path in files_of_agent() if os.access(path, os.W_OK) and not path.endswith(".sock")]


def started(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


# ---- the job's own shared memory ----


@attack
def truncate() -> None:
    """What root has mapped has no pages any more."""

    def shorten() -> None:
        for path in writable():
            with suppress(OSError):
                os.truncate(path, 0)
            with suppress(OSError):
                os.truncate(path, 4096)

    again_and_again(shorten)


@attack
def fill() -> None:
    """A GiB of pages in each file, beside it, and below every folder that can be written."""

    def more() -> None:
        for path in writable():
            with suppress(OSError):
                file = os.open(path, os.O_RDWR)
                try:
                    os.posix_fallocate(file, 0, 1 << 30)
                finally:
                    os.close(file)
        for folder, _, _ in os.walk(RUN):
            if os.access(folder, os.W_OK):
                with suppress(OSError), open(f"{folder}/filled.{os.getpid()}", "wb") as made:
                    os.posix_fallocate(made.fileno(), 0, 1 << 30)

    again_and_again(more, 0.5)


@attack
def remove() -> None:
    """Take away, rename and replace what is there: links, folders and pipes in the place of files."""

    def replace() -> None:
        for path in files_of_agent():
            for do in (
                os.unlink,
                lambda one: os.rename(one, one + ".away"),
                lambda one: os.symlink("/etc/shadow", one),
            ):
                with suppress(OSError):
                    do(path)
            with suppress(OSError):
                os.mkfifo(path)

    again_and_again(replace, 0.1)


def maps(count: int) -> None:
    """So many mappings, none of which the kernel can join to its neighbour."""
    C.mmap.restype = ctypes.c_void_p
    C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    size = 4096
    base = C.mmap(None, size * count, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    fixed = 0x10
    for number in range(0, count, 2):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        if C.mmap(base + number * size, size, mmap.PROT_READ, flags, -1, 0) in (None, 2**64 - 1):
            break


@attack
def seats() -> None:
    """Every seat of the ledger names a process with 60,000 mappings, as one that exported memory."""
    pid = children(1, lambda _: (maps(60_000), stay()))[0]
    maps(60_000)

    def forge() -> None:
        for path in writable():
            with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
                place = memory.find(b"slledger")
                if place < 0:
                    continue
                devices, _, count = struct.unpack_from("3I", memory, place + 12)
                for word in range(2048, place, 8):  # who shares with others: all of them, if that is what lies there
                    if word >= 8192:
                        struct.pack_into("2I", memory, word, 1, 1)
                for seat in range(count):
                    of = (pid, os.getpid(), 1)[seat % 3]
                    begun = started(of) if seat % 2 else seat
                    struct.pack_into("QQ", memory, place + 64 + 64 * devices + 64 * seat, begun, of << 32 | seat + 1)

    again_and_again(forge, 0.1)


@attack
def scribble() -> None:
    """Every word of the shared memory changes all the time."""

    def write() -> None:
        for path in writable():
            with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[:] = os.urandom(4096) * (len(memory) // 4096) + b"\0" * (len(memory) % 4096)

    again_and_again(write)


@attack
def locks() -> None:
    """Locks and leases on all that can be opened, so that whoever opens it waits."""
    held = []

    def lock() -> None:
        for path in [*files_of_agent(), "/etc/ld.so.preload", "/etc/slurm/slurm.conf", "/etc/slurm/sluice.node.json"]:
            for flags in (os.O_RDWR, os.O_RDONLY):
                with suppress(OSError):
                    held.append(os.open(path, flags | os.O_NONBLOCK))
                    for do in (
                        lambda file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
                        lambda file: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB),
                        lambda file: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
                        lambda file: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
                    ):
                        with suppress(OSError):
                            do(held[-1])

    signal.signal(signal.SIGIO, signal.SIG_IGN)
    lock()
    up()
    stay()


@attack
def watch_files() -> None:
    """inotify on all that can be seen, never read, and many of them."""
    for _ in range(COUNT or 128):
        file = C.inotify_init1(0)
        if file < 0:
            break
        for folder, _, names in itertools.chain(os.walk(RUN), os.walk("/etc/slurm")):
            for name in ("", *names):
                C.inotify_add_watch(file, os.path.join(folder, name).encode(), 0xFFF)
    up()
    stay()


# ---- processes ----


@attack
def leaderless() -> None:
    """The first thread ends, the others go on: /proc/PID/cgroup says "/" of such a process (version 1)."""
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=stay).start()
        C.syscall(60, 0)  # exit, of this thread alone
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    up(pid)
    stay()


@attack
def processes() -> None:
    """As many as there may be, each with a name that reads like the end of a line of /proc/PID/stat."""

    def one(number: int) -> None:
        name(f") 0 0\n{number} (")
        stay()

    children(COUNT or 1000, one)
    up()
    stay()


def name(text: str) -> None:
    C.prctl(15, text.encode()[:15], 0, 0, 0)


@attack
def names() -> None:
    """A process whose name and arguments are lies, and one with arguments of two megabytes."""
    name(") Z 1 1 1\n(")
    if "lies" not in sys.argv:
        lies = ["lies", "Uid:\t0\t0\t0\t0", "/slurm/uid_0/job_1/step_0", "\x1b[2J\n\r", *(["x" * 100_000] * 18)]
        os.execv(sys.executable, [sys.executable, __file__, "names", *lies])
    up()
    stay()


@attack
def mappings() -> None:
    """So many mappings in all, 60,000 a process."""

    def one(_: int) -> None:
        maps(60_000)
        stay()

    children((COUNT or 120_000) // 60_000, one)
    up()
    stay()


@attack
def forks() -> None:
    """Processes that come and go, so that numbers are soon used again."""

    def storm(_: int) -> None:
        while True:
            with suppress(OSError):
                pid = os.fork()
                if pid == 0:
                    os._exit(0)
                os.waitpid(pid, 0)

    children(8, storm)
    up()
    stay()


@attack
def execs() -> None:
    """Processes that become another program all the time."""

    def storm(_: int) -> None:
        loop = 'while :; do exec sh -c "$0" "$0"; done'
        os.execv("/bin/sh", ["sh", "-c", loop, loop])

    children(8, storm)
    up()
    stay()


@attack
def threads() -> None:
    """A process with many threads, and a first one that has ended."""
    pid = os.fork()
    if pid == 0:
        threading.stack_size(1 << 16)
        for _ in range(COUNT or 500):
            threading.Thread(target=stay).start()
        C.syscall(60, 0)
    time.sleep(1)
    up(pid)
    stay()


@attack
def signals() -> None:
    """Every signal to everybody that is not ours: root's helpers, the agent, other users' processes."""
    mine, group = os.getpid(), {os.getpid(), os.getppid()}

    def kill() -> None:
        for entry in os.listdir("/proc"):
            with suppress(OSError, ValueError):
                if os.stat(f"/proc/{entry}").st_uid != os.getuid() and int(entry) not in group:
                    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGBUS, signal.SIGCONT, 64):
                        with suppress(PermissionError):
                            os.kill(int(entry), number)

    assert mine
    again_and_again(kill, 0.1)


@attack
def trace() -> None:
    """ptrace of everybody, and reading and writing of all that /proc has of them."""
    tracee = children(1, lambda _: stay())[0]
    attach, seize = 16, 0x4206
    C.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    C.ptrace(attach, tracee, None, None)

    def poke() -> None:
        for entry in os.listdir("/proc"):
            with suppress(OSError, ValueError):
                if os.stat(f"/proc/{int(entry)}").st_uid == os.getuid():
                    continue
                C.ptrace(seize, int(entry), None, None)
                for name, flags in (("mem", os.O_RDWR), ("oom_score_adj", os.O_WRONLY), ("environ", os.O_RDONLY)):
                    with suppress(OSError):
                        os.close(os.open(f"/proc/{entry}/{name}", flags))

    with suppress(OSError):
        poke()
    up(tracee)
    while True:
        with suppress(OSError):
            poke()
        time.sleep(0.1)


@attack
def stopped() -> None:
    """Stops itself, in a session of its own: nothing that is asked of it is done."""
    pid = children(1, lambda _: (os.setsid(), os.kill(os.getpid(), signal.SIGSTOP), stay()))[0]
    os.waitpid(pid, os.WUNTRACED)
    up(pid)
    stay()


@attack
def deaf() -> None:
    """Blocks every signal that can be blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid() if os.getpid() != os.getpgrp() else None
    up()
    stay()


@attack
def dump() -> None:
    """Core dumps of large processes, one after the other."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.chdir("/tmp")

    def large(_: int) -> None:
        memory = mmap.mmap(-1, 64 << 20)
        memory.write(b"x" * (64 << 20))
        os.kill(os.getpid(), signal.SIGSEGV)

    def one() -> None:
        for pid in children(2, large):
            os.waitpid(pid, 0)
        for name in os.listdir("/tmp"):
            if name.startswith("core"):
                with suppress(OSError):
                    os.unlink(f"/tmp/{name}")

    again_and_again(one, 0.2)


@attack
def limits() -> None:
    """No descriptors, no file sizes, no processes, no memory: what is done in this process's name cannot be done."""
    up()
    for kind, value in (
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    stay()


@attack
def namespaces() -> None:
    """User, process, mount, cgroup, time, network and IPC namespaces within each other, the clock a year ahead."""
    everything = 0x10000000 | 0x20000000 | 0x00020000 | 0x02000000 | 0x00000080 | 0x40000000 | 0x08000000
    pid = os.fork()
    if pid == 0:
        for _ in range(6):
            if C.unshare(everything) != 0:
                C.unshare(0x10000000 | 0x20000000 | 0x00020000)
            with suppress(OSError), open("/proc/self/timens_offsets", "w") as file:
                file.write("monotonic 31536000 0\nboottime 31536000 0\n")
            inner = os.fork()
            if inner:
                os.waitpid(inner, 0)
                os._exit(0)
        stay()
    time.sleep(0.3)
    inner = pid
    while True:
        with open(f"/proc/{inner}/task/{inner}/children") as file:
            below = file.read().split()
        if not below:
            break
        inner = int(below[0])
    up(inner)
    stay()


@attack
def cgroups() -> None:
    """Out of the job's cgroups: move, freeze, make ones of the same names, mount them in a namespace."""
    roots = ["/sys/fs/cgroup"]
    if C.unshare(0x10000000 | 0x00020000 | 0x02000000) == 0:
        with suppress(OSError):
            os.makedirs("/tmp/cg", exist_ok=True)
            if C.mount(b"none", b"/tmp/cg", b"cgroup2", 0, None) == 0:
                roots.append("/tmp/cg")

    def move() -> None:
        for root in roots:
            for folder, _, files in os.walk(root):
                if folder.count("/") > 8:
                    continue
                for file in {"cgroup.procs", "tasks", "cgroup.freeze", "freezer.state", "cgroup.kill"} & set(files):
                    with suppress(OSError), open(f"{folder}/{file}", "w") as out:
                        out.write(
                            {"freezer.state": "FROZEN", "cgroup.freeze": "1", "cgroup.kill": "1"}.get(
                                file, str(os.getpid())
                            )
                        )
                with suppress(OSError):
                    os.makedirs(f"{folder}/job_1/step_0")

    again_and_again(move, 0.5)


@attack
def fuse() -> None:
    """A file system whose server is this process, which waits for an answer of its own: no signal ends it."""
    user, group = os.getuid(), os.getgid()
    assert C.unshare(0x10000000 | 0x00020000) == 0
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    server = os.open("/dev/fuse", os.O_RDWR)
    place = tempfile.mkdtemp(prefix="fuse.")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    assert C.mount(b"hostile", place.encode(), b"fuse", 0, options.encode()) == 0, os.strerror(ctypes.get_errno())

    def serve() -> None:
        init = 26
        while True:
            _, asked, unique = struct.unpack_from("IIQ", os.read(server, 1 << 18))
            if asked == init:
                os.write(server, struct.pack("IiQ 4I2H2I2H8I", 80, 0, unique, 7, 31, 0, 0, 12, 10, 4096, 1, *[0] * 10))

    threading.Thread(target=serve, daemon=True).start()
    up()
    os.stat(f"{place}/file")


# ---- the agent's socket ----


def connect(seconds: float = 5.0) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.settimeout(seconds)
    one.connect(next((path for path in (f"{RUN}/ask/{os.getuid()}", AGENT) if os.path.exists(path)), AGENT))
    return one


def ask(line: bytes, seconds: float = 5.0) -> bytes:
    """One request; its answer."""
    with connect(seconds) as agent:
        agent.sendall(line + b"\n")
        with agent.makefile("rb") as answers:
            return answers.readline()


@attack
def crowd() -> None:
    """Connections that say nothing, from as many processes as it takes, each opened again when it is closed."""

    def hold(_: int) -> None:
        held: list[socket.socket] = []
        while True:
            with suppress(OSError):
                held.append(connect(0.2))
            if len(held) > 60:
                held.pop(0).close()
            time.sleep(0.005)

    children(COUNT or 4, hold)
    time.sleep(0.5)
    up()
    stay()


@attack
def half_closed() -> None:
    """Connections that send and do not read, that close one half, and that say a byte a second."""
    held = []

    def one() -> None:
        for kind in range(3):
            agent = connect(0.2)
            held.append(agent)
            if kind == 0:
                with suppress(OSError):
                    agent.sendall(b'{"do": "devices"}\n' * 2000)
            elif kind == 1:
                agent.sendall(b'{"do": "devices"}\n')
                agent.shutdown(socket.SHUT_RD)
            else:
                agent.sendall(b"{")
                agent.shutdown(socket.SHUT_WR)
        while len(held) > 40:
            held.pop(0).close()

    again_and_again(one, 0.02)


@attack
def requests() -> None:
    """Requests that are refused with all their text, as large as they may be and very many."""
    large = json.dumps({"do": "task", "open": ["/dev/" + chr(233) * 9 + str(number) for number in range(800)]}).encode()
    small = json.dumps({"do": "task", "open": ["/dev/nvidia99"]}).encode()
    huge = json.dumps({"do": "task", "open": ["x" * 3800 for _ in range(16)]}).encode()
    up()
    for number in itertools.count():
        with suppress(OSError):
            ask((small, large, huge)[number % 3 if number > 300 else 0], 1.0)


@attack
def json_bombs() -> None:
    """What JSON's readers stumble over."""
    bombs = [
        b"[" * 60_000,
        b'{"a":' * 12_000,
        b'{"do": "task", "open": ' + b"9" * 60_000 + b"}",
        b'{"do": "task", "open": [NaN, Infinity, -Infinity, 1e999]}',
        b'{"do": "task", "do": "epilog", "job": 1, "job": 2}',
        b'{"do": "task", "peer": {"uid": 0}, "open": []}',
        b'{"do": ["task"], "open": {}}',
        b'{"do": "task", "open": [["x"], {"y": 1}, null, true]}',
        b'{"do": "task", "open": "\\ud800\\udfff\\ud800"}',
        b'{"do": "limit", "job": 99999999999999999999999, "uid": -1}',
        b"\xff\xfe\x00",
        b'"' + b"x" * 65_000,
        b"null",
    ]

    def all_of_them() -> None:
        for bomb in bombs:
            with suppress(OSError):
                ask(bomb, 0.5)

    again_and_again(all_of_them)


@attack
def descriptors() -> None:
    """Descriptors sent with a request, as many as a message takes: the agent's are to stay few."""

    def one() -> None:
        with connect(0.5) as agent:
            files = array.array("i", [agent.fileno()] * 250)
            agent.sendmsg([b'{"do": "devices"}\n'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])

    again_and_again(one)


@attack
def spoof() -> None:
    """Says what each request answers that is not this user's to make: for another job, as root's programs."""
    job = int(sys.argv[2])
    for request in (
        {"do": "prolog", "job": job, "uid": 0, "user": "x", "account": "", "partition": "", "gpus": [0]},
        {"do": "limit", "job": job, "uid": os.getuid(), "whole": True, "gpus": [0], "shards": 80000, "open": []},
        {"do": "epilog", "job": job},
        {"do": "status"},
        {"do": "task", "open": [], "job": job},
    ):
        try:
            print(ask(json.dumps(request).encode()).decode(errors="replace").strip(), flush=True)
        except OSError as error:
            print(json.dumps({"error": str(error)}), flush=True)


# ---- what is inherited, passed on and said ----


@attack
def send_device() -> None:
    """Opens a device that this job was given, and sends it to whoever asks at a socket."""
    path, device = sys.argv[2:4]
    opened = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_PATH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen(1)
        up()
        peer, _ = listener.accept()
        socket.send_fds(peer, [b"x"], [opened])
        stay()


@attack
def receive_device() -> None:
    """Gets it, in a job that was given none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
        sender.connect(sys.argv[2])
        _, files, _, _ = socket.recv_fds(sender, 1, 1)
    print("got", len(files), flush=True)
    up()
    stay()


@attack
def full_pipe() -> None:
    """Standard output is a pipe that is full, which nobody reads: whoever tells the job something would wait."""
    up()
    time.sleep(0.5)
    path = f"/tmp/full.{os.getpid()}"
    os.mkfifo(path)
    both = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(both, b"x" * 65536)
    os.set_blocking(both, True)
    os.unlink(path)
    for number in (1, 2):
        os.dup2(both, number)
    stay()


@attack
def hold() -> None:
    """GPU memory by the driver's library: MiB, and how long; says when it asks and what it is answered."""
    size = int(sys.argv[2])
    cu = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert cu.cuInit(0) == 0 and cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cu.cuCtxSetCurrent(context) == 0
    print("at", time.time(), flush=True)
    print("code", cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size << 20)), flush=True)
    stay()


@attack
def churn() -> None:
    """Processes that hold more than the job may, each for a moment: `hold` begins again when it is ended."""

    def one(_: int) -> None:
        while True:
            pid = os.fork()
            if pid == 0:
                sys.argv[2:] = ["8192"]
                signal.setitimer(signal.ITIMER_REAL, 0.7)
                hold()
            os.waitpid(pid, 0)

    children(4, one)
    up()
    stay()


@attack
def quiet() -> None:
    """Nothing: what the others are compared with."""
    up()
    stay()


if __name__ == "__main__":
    ATTACKS[sys.argv[1]]()
