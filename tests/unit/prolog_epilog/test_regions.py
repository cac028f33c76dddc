"""A job's region of limits that its tenant damages: root answers in time, and only the tenant's jobs suffer."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prolog_epilog.contexts import Contexts
from prolog_epilog.devices import NodeDevice
from prolog_epilog.regions import Regions, check_mounts
from prolog_epilog.state import Settings, State
from sluice.core import limit
from sluice.core.errors import CoreError
from sluice.core.ledger import Ledger
from sluice.exchange.record import Grant, JobRecord

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: regions are mounted")

MIB, GIB = 1 << 20, 1 << 30
JOB, USER, NEIGHBOUR = 7, 23456, 34567


class Node:
    """An agent's regions, in a folder that every user can enter."""

    def __init__(self, run: Path) -> None:
        state = State(Settings(run=run, records=run / "records"))
        state.devices = [
            NodeDevice(
                0, "nvidia", "H100", "GPU-1", "0000:1b:00.0", ("/dev/nvidia0",), "/dev/nvidia0",
                81008, "615.10", 0, "", (),
            )
        ]  # fmt: skip
        contexts = Contexts(state)
        contexts.measured = {state.devices[0].kind: {"total": 80 * GIB, "context": 520 * MIB}}
        self.regions = Regions(state, contexts)
        self.regions.folder.mkdir()

    @property
    def folder(self) -> Path:
        return self.regions.folder / f"job_{JOB}"

    def job(self) -> JobRecord:
        grant = Grant(0, "GPU-1", "nvidia", "H100", 80 * GIB, 4 * GIB, 4 * GIB)
        grant.total = 80 * GIB
        record = JobRecord(JOB, USER, "ann", "physics", "main", "n1", 1.0, grants=[grant])
        self.regions.make(record)
        return record


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        made = Node(Path(folder))
        yield made
        limit.remove(made.folder)


def as_user(program: str, *words: object, uid: int = USER) -> subprocess.Popen[str]:
    """A program of a tenant's, on this machine's Python."""
    return subprocess.Popen(
        ["/usr/bin/python3", "-c", program, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        user=uid,
        group=uid,
        extra_groups=[],
    )


def said(program: str, *words: object, uid: int = USER) -> str:
    out, err = as_user(program, *words, uid=uid).communicate(timeout=60)
    assert err == ""
    return out


FILL = """
import os, sys
file = os.open(sys.argv[1], os.O_RDWR)
for what in (lambda: os.posix_fallocate(file, 0, 1 << 30),
             lambda: os.pwrite(file, b"x", 1 << 20),
             lambda: os.open(os.path.dirname(sys.argv[1]) + "/more", os.O_CREAT | os.O_WRONLY)):
    try:
        print(what())
    except OSError as error:
        print(error.strerror)
"""


def test_a_tenant_cannot_fill_the_file_system(node: Node) -> None:
    record = node.job()
    before = os.statvfs(node.regions.folder).f_bavail
    assert said(FILL, node.folder / "ledger") == "No space left on device\n" * 2 + "Permission denied\n"
    assert os.statvfs(node.folder).f_bavail == 0  # there was room for the two files only
    assert abs(os.statvfs(node.regions.folder).f_bavail - before) * os.statvfs("/").f_bsize < 256 * MIB
    node.regions.collect(record)


LOOK = """
import sys
for name in ("", "/limits", "/ledger"):
    try:
        print(open(sys.argv[1] + name, "rb").read(8) if name else __import__("os").listdir(sys.argv[1]))
    except OSError as error:
        print(error.strerror)
"""


def test_limits_are_the_jobs_own_business(node: Node) -> None:
    node.job()
    assert said(LOOK, node.folder, uid=NEIGHBOUR) == "Permission denied\n" * 3
    assert said(LOOK, node.folder).splitlines()[1] == repr((node.folder / "limits").read_bytes()[:8])


SHORTEN = """
import os, sys
file, size = os.open(sys.argv[1], os.O_RDWR), os.stat(sys.argv[1]).st_size
print("-", flush=True)
while True:
    os.ftruncate(file, 0)
    os.ftruncate(file, size)
"""


def test_a_ledger_that_is_shortened_all_the_time_is_no_signal(node: Node) -> None:
    """Read in a process of its own, as it was SIGBUS that ended the agent."""
    node.job()
    read = f"""
import sys, time
from pathlib import Path
from sluice.core.errors import CoreError
from sluice.core.limit import Region
end, damaged = time.monotonic() + 2, 0
while time.monotonic() < end:
    try:
        with Region(Path({str(node.folder)!r})) as region:
            region.usage(0)
    except CoreError:
        damaged += 1
print(damaged > 0)
"""
    with as_user(SHORTEN, node.folder / "ledger") as tenant:
        try:
            assert tenant.stdout and tenant.stdout.readline() == "-\n"
            done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=60, check=False)
        finally:
            tenant.kill()
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def damage(how: str, ledger: Path) -> None:
    size = ledger.stat().st_size
    content = (
        bytes(size) if how == "zeroes" else b"\xff" * size if how == "ones" else random.Random(how).randbytes(size)
    )
    with ledger.open("r+b") as file:
        file.write(content)
        file.truncate({"empty": 0, "half": size // 2, "sparse": 1 << 40}.get(how, size))


@pytest.mark.parametrize("how", ["zeroes", "ones", "random", "other", "empty", "half", "sparse"])
def test_a_damaged_ledger_is_left_out_of_the_record(node: Node, how: str) -> None:
    """By the agent that made the region, and by one that takes it over."""
    record = node.job()
    damage(how, node.folder / "ledger")
    node.regions.collect(record)
    assert (record.grants[0].peak, record.grants[0].refused) == (0, 0)
    assert [event.action for event in record.events] == ["refuse"]
    again = Regions(node.regions._state, node.regions._contexts)
    again.take_over(JOB)
    again.collect(record)
    again.remove(JOB)
    assert not node.folder.exists()


def test_figures_that_no_job_reaches_are_not_believed(node: Node) -> None:
    record = node.job()
    with (node.folder / "ledger").open("r+b") as file:
        device = file.read().index(b"slledger") + 64
        for place, value in ((48, 81 * GIB), (56, 1 << 60)):
            file.seek(device + place)
            file.write(value.to_bytes(8, "little"))
    node.regions.collect(record)
    assert (record.grants[0].peak, record.grants[0].refused) == (0, 0)


MANY_MAPPINGS = """
import ctypes, mmap, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
pages = 2 * 60000
start = libc.mmap(None, pages * 4096, 1, 0x22, -1, 0)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
made = sum(libc.mprotect(start + page * 4096, 4096, 3) == 0 for page in range(0, pages, 4))
print(made, flush=True)
sys.stdin.readline()
"""


def test_forged_seats_cost_root_nothing(node: Node) -> None:
    """1,024 of them, each naming a living process whose list of mappings takes long to read."""
    record = node.job()
    with as_user(MANY_MAPPINGS) as tenant:
        assert tenant.stdout and tenant.stdin and int(tenant.stdout.readline()) > 29000
        with (node.folder / "ledger").open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(b"slledger")
            assert at % 64 == 0
            whole = mmap.mmap(-1, len(memory) - at)
            whole[:] = memory[at:]
            ledger = Ledger(whole)
            for number in range(1024):
                ledger.join(0, number << 22 | tenant.pid, number)
            memory[at:] = whole[:]
        begin, works = time.monotonic(), time.process_time()
        for _ in range(100):
            node.regions.collect(record)
        node.regions.remove(JOB)
        assert time.process_time() - works < 0.5
        assert time.monotonic() - begin < 10  # it waits for nothing; on a busy machine for a processor
        tenant.stdin.close()
    assert record.events == []


HOLD = """
import fcntl, os, signal, struct, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(file, fcntl.LOCK_EX)
fcntl.lockf(file, fcntl.LOCK_EX)
try:
    fcntl.fcntl(os.open(sys.argv[1], os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
    print("leased", flush=True)
except OSError as error:
    print(error.strerror, flush=True)
sys.stdin.readline()
"""


def test_locks_and_leases_make_nobody_wait(node: Node) -> None:
    record = node.job()
    with as_user(HOLD, node.folder / "ledger") as tenant:
        assert tenant.stdout and tenant.stdin and tenant.stdout.readline() == "Permission denied\n"
        begin = time.monotonic()
        again = Regions(node.regions._state, node.regions._contexts)
        again.take_over(JOB)
        again.collect(record)
        again.remove(JOB)
        assert time.monotonic() - begin < 0.5
        assert not node.folder.exists() and tenant.poll() is None
        tenant.stdin.close()
    assert record.events == []


def interrupted(folder: Path) -> None:
    limit.make_folder(folder, USER, 1 << 16, 4)


def earlier_version(folder: Path) -> None:
    limit.create(folder, [limit.Device(GIB, GIB, 0, uuid="GPU-1")], USER, mounted=False)


def mounted_twice(folder: Path) -> None:
    interrupted(folder)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True, timeout=10)


@pytest.mark.parametrize("leave", [interrupted, earlier_version, mounted_twice])
def test_what_an_earlier_agent_left_is_replaced(node: Node, leave: Callable[[Path], None]) -> None:
    leave(node.folder)
    node.job()
    assert node.folder.is_mount() and node.regions.of(JOB) == node.folder
    with limit.Region(node.folder) as region:
        assert region.devices[0].limit == 4 * GIB
    node.regions.remove(JOB)
    assert list(node.regions.folder.iterdir()) == []


def test_a_region_that_cannot_be_made_leaves_nothing(node: Node) -> None:
    with pytest.raises(CoreError):
        limit.create(node.folder, [limit.Device(GIB, 2 * GIB, 0, uuid="GPU-1")], USER)
    assert not node.folder.exists()


CHECK = """
import sys
from pathlib import Path
from prolog_epilog.regions import check_mounts
check_mounts(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(("inner", "seen"), [("private", True), ("shared", True), ("slave", False)])
def test_mounts_that_slurmd_would_not_see_are_refused(tmp_path: Path, inner: str, seen: bool) -> None:
    """Process 1's mount namespace, one like a simulated host's, one like a container's, and that of a unit with
    ProtectHome=."""
    check_mounts(tmp_path)
    words = ["unshare", "--mount", "--propagation", "shared", "sh", "-c", '"$@" || exit 1', "outer"]  # it lives on
    words += ["unshare", "--mount", "--propagation", inner, sys.executable, "-c", CHECK, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode == 0) == seen, done.stderr
    assert seen or "slurmd would not see the jobs' limits" in done.stderr
