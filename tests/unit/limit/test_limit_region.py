"""Root's side: what makes a region, what it refuses, and what it reports."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from limited import Job, Look, look

from sluice.core import limit
from sluice.core.errors import CoreError
from sluice.core.limit import Device, Region, create, remove
from tests.programs.begin import CUDA

MIB = 1 << 20
GPU = Device(80000 * MIB, 1000 * MIB, 500 * MIB, uuid="GPU-00000000-1111-2222-3333-444444444444", pci="0000:1b:00.0")


def test_made_read_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "job_1"
    other = Device(64 * MIB, 64 * MIB, 0, name="pthread-cpu", spill=7 * 64 * MIB)
    create(folder, [GPU, other], 1234, mounted=False)
    assert {(p.name, oct(p.stat().st_mode), p.owner()) for p in (folder, *folder.iterdir())} == {
        ("job_1", "0o40750", "root"),  # the group's bits of a file with an access list are its mask
        ("limits", "0o100640", "root"),
        ("ledger", "0o100660", "root"),
    }
    with Region(folder) as region:
        assert region.devices == [GPU, other]
        assert region.usage(0) == limit.Usage(1000 * MIB, 0, 0, 0, 0)
        assert look(folder) == Look(0, 0, {}, set())
        region.set_limit(1, 32 * MIB)
        assert region.devices[1] == replace(other, limit=32 * MIB)
    remove(folder)
    remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("devices", "code", "words"),
    [
        ([], 3, "0 devices: must be 1 to 32"),
        ([GPU] * 33, 3, "33 devices"),
        ([replace(GPU, limit=0)], 3, "limit of 0 bytes on device 0 (GPU-0000"),
        ([replace(GPU, limit=80001 * MIB)], 3, "must be 1 to what it has, 83886080000"),
        ([replace(GPU, limit=-1)], 3, "must be 1 to what it has"),
        ([replace(GPU, limit=500 * MIB)], 3, "a driver context alone takes 524288000; ask for more"),
        ([replace(GPU, spill=9000 * MIB)], 3, "spill of 9437184000 bytes"),
        ([replace(GPU, uuid="", pci="")], 2, "neither UUID nor PCI address nor OpenCL name"),
        ([GPU, replace(GPU, uuid="GPU-5")], 2, "in the list twice, 0 and 1"),
        ([replace(GPU, uuid="x" * 300)], 2, "has no end"),
    ],
)
def test_bad_terms(tmp_path: Path, devices: list[Device], code: int, words: str) -> None:
    with pytest.raises(CoreError) as caught:
        create(tmp_path / "job_1", devices, 0)
    assert (caught.value.code, words in str(caught.value)) == (code, True), caught.value
    assert list(tmp_path.iterdir()) == []


def test_bad_places(tmp_path: Path) -> None:
    create(tmp_path / "there", [GPU], 0, mounted=False)
    (tmp_path / "link").symlink_to("there")
    for call, words in (
        (lambda: create(tmp_path / "there", [GPU], 0), "is there already; remove it first"),
        (lambda: create(tmp_path / "none/job", [GPU], 0), "No such file or directory"),
        (lambda: create(tmp_path / "x", [GPU], 0, processes=0), "0 processes"),
        (lambda: Region(tmp_path / "none"), "no such region"),
        (lambda: Region(tmp_path), "no such region"),
        (lambda: Region(tmp_path / "link"), "link"),
    ):
        with pytest.raises(CoreError, match=words):
            call()


def test_a_full_file_system_is_said_at_once(tmp_path: Path) -> None:
    code = """
import ctypes, sys
from pathlib import Path
from limited import CLONE_NEWNS, MS_PRIVATE, MS_REC
from sluice.core.limit import Device, create
libc = ctypes.CDLL(None)
assert libc.unshare(CLONE_NEWNS) == 0
assert libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0
assert libc.mount(b"none", sys.argv[1].encode(), b"tmpfs", ctypes.c_ulong(0), b"size=64k") == 0
try:
    create(Path(sys.argv[1]) / "job", [Device(100 << 20, 50 << 20, 0, uuid="GPU-1")], 0, mounted=False)
except Exception as error:
    print(error, list(Path(sys.argv[1]).iterdir()))
"""
    said = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    ).stdout
    assert said == f"make ledger in {tmp_path}/job: No space left on device; make room there []\n"


def test_a_damaged_region_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    create(folder, [GPU], 0, mounted=False)
    content = (folder / "limits").read_bytes()
    for left in (0, len(content) // 2):
        (folder / "limits").write_bytes(content[:left])
        with pytest.raises(CoreError, match="make the region again"):
            Region(folder)
    (folder / "limits").write_bytes(content)
    (folder / "ledger").write_bytes(b"")
    with Region(folder) as region:  # its limits are good
        with pytest.raises(CoreError, match="shorter than it was made; its figures are not known"):
            region.usage(0)
        region.set_limit(0, 600 * MIB)


def test_processes_and_what_each_holds(make_job: Callable[..., Job]) -> None:
    job = make_job(5000)
    held = [job.start(CUDA + f"start(); alloc({mib}); step('-')") for mib in (100, 200)]
    for process in held:
        assert process.stdout
        process.stdout.readline()
    found = look(job.folder)
    assert found.processes == {held[0].pid: [620 * MIB], held[1].pid: [720 * MIB]}
    assert found.spaces == {Path("/proc/self/ns/pid").stat().st_ino}
    held[0].kill()
    held[0].wait()
    with job.region() as region:
        assert region.usage(0).charged == 1340 * MIB  # root removes no process
        found = look(job.folder)
        assert (found.released, found.ended) == (620 * MIB, 1)
        assert region.usage(0).charged == 720 * MIB


def test_what_the_dead_held_is_no_refusal(make_job: Callable[..., Job]) -> None:
    job = make_job(1000)
    for _ in range(2):
        assert job.run(CUDA + "start(); print(alloc(480) > 0); os.kill(os.getpid(), 9)", code=-9)[0] in ("", "True\n")
    assert job.run(CUDA + "start(); print(alloc(480) > 0, alloc(1))")[0] == "True -2\n"
    with job.region() as region:
        assert (region.usage(0).refused, region.usage(0).peak) == (1, 1000 * MIB)


def test_containers_of_a_job_account_together(make_job: Callable[..., Job]) -> None:
    """Processes of other PID namespaces: never mistaken for each other, and removed by a process that sees them."""
    job = make_job(3 * 520 + 1000)
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    held = [job.start([*inside, CUDA + "start(); alloc(300); step(str(os.getpid()))"]) for _ in range(2)]
    for process in held:
        assert process.stdout
        assert process.stdout.readline() == "1\n"
    assert job.charged() == 2 * 820
    assert job.run(CUDA + "start(); print(info()[0], alloc(401), alloc(400) > 0)")[0] == "400 -2 True\n"
    assert job.charged() == 2 * 820
    [first] = Path(f"/proc/{held[0].pid}/task/{held[0].pid}/children").read_text().split()
    container = os.pidfd_open(int(first))
    space = os.open(f"/proc/{first}/ns/pid", os.O_RDONLY)  # else the kernel may give its number to the next container
    held[0].kill()
    held[0].communicate()
    assert select.select([container], [], [], 60)[0]  # its own end comes a moment after that of the program before it
    os.close(container)
    assert job.run([*inside, CUDA + "start(); print(alloc(401))"])[0] == "-2\n"  # in a container, others are not seen
    os.close(space)
    assert job.run(CUDA + "start(); print(alloc(1221), alloc(1220) > 0)")[0] == "-2 True\n"
    assert job.charged() == 820


def test_a_container_that_sees_the_nodes_processes(make_job: Callable[..., Job]) -> None:
    """Its own numbers mean other processes in that /proc: no living process is taken for dead."""
    job = make_job(2 * 520 + 300)
    two = """
to_parent, to_child = os.pipe(), os.pipe()
if os.fork() == 0:
    start(); alloc(200)
    os.write(to_parent[1], b"-")
    os.read(to_child[0], 1)
    os._exit(0)
os.read(to_parent[0], 1)
start()
print(os.getpid(), os.readlink("/proc/self") != "1", info()[0], alloc(101), alloc(100) > 0, flush=True)
os.write(to_child[1], b"-")
os.wait()
print(alloc(700) > 0)
"""
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, "-c"]
    assert job.run([*inside, CUDA + two])[0] == "1 True 100 -2 True\nTrue\n"


def test_a_ledger_without_free_seats_refuses(make_job: Callable[..., Job]) -> None:
    """A dead process makes room for others; a living one does not."""
    job = make_job(5000, processes=2)
    held = [job.start(CUDA + "start(); step('-')") for _ in range(2)]
    for process in held:
        assert process.stdout
        process.stdout.readline()
    out, err = job.run(CUDA + "print(start())")
    assert (out, "seats are taken" in err) == ("-2\n", True)
    held[0].kill()
    held[0].wait()
    assert job.run(CUDA + "start(); print(alloc(10) > 0)")[0] == "True\n"
