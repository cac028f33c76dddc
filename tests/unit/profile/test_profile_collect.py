"""The collector and the program of nodes, without Slurm between them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.profile_files import Writer, training
from sluice.base.errors import SluiceError
from sluice.profile.collect import Collector
from sluice.profile.job import ProfiledJob, timeline
from sluice.profile.timeline import load
from sluice.slurm.commands import Commands

PROGRAM = Path(__file__).parents[3] / "prolog_epilog/programs/profile_node.py"
Nodes = Callable[[Path], Collector]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of job 17 on the node."""
    folder = tmp_path / "profile/17"
    (folder / "0").mkdir(parents=True)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "collected").mkdir()
    return tmp_path / "collected"


@pytest.fixture
def node(tmp_path: Path, job: Path, target: Path) -> Iterator[Collector]:
    """The real program, which finds the folder elsewhere."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text().replace("/run/sluice/profile", str(job.parent)))
    env = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "9"}
    with Collector(["/usr/bin/python3", "-IS", str(program)], 1, target, env) as collector:
        yield collector


TALKER = """
import sys
for text in sys.argv[1:]:
    sys.stdout.buffer.write(bytes.fromhex(text))
    sys.stdout.flush()
    sys.stdin.readline()
"""


def talking(*said: bytes, target: Path, tasks: int = 1) -> Collector:
    """A node that says the first of this, and the next whenever it is asked something."""
    return Collector([sys.executable, "-c", TALKER, *(text.hex() for text in said)], tasks, target)


def test_a_profile_is_started_stopped_and_collected(node: Collector, job: Path, target: Path) -> None:
    assert node.start("*", 60) == 1
    magic, unused, wanted, until, budget, number, size = struct.unpack("<8sIIQIIQ24x", (job / "0/control").read_bytes())
    assert (magic, unused, wanted, budget, size) == (b"SLUPCTL1", 0, 47, 0, 0) and number > 0
    assert 50 * 10**9 < until - time.clock_gettime_ns(time.CLOCK_MONOTONIC) <= 60 * 10**9
    writer = training(Writer(number=number), 4000, 1)
    (job / "0" / writer.file_name).write_bytes(writer.content())
    node.stop("0")
    assert struct.unpack_from("<I", (job / "0/control").read_bytes(), 12) == (0,)
    assert node.collect("0") == 0
    assert (target / "n1.0" / writer.file_name).read_bytes() == writer.content()
    (offset,) = load(target).offsets.values()
    assert offset.node == "n1" and node.problems == []


def test_what_is_not_a_profile_stays_there(node: Collector, job: Path, target: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (job / "0/a.1.profile").symlink_to(secret)
    os.mkfifo(job / "0/b.1.profile")
    (job / "0/c.1.profile\n").write_text("x")
    (job / "0/.d.profile.txt").write_text("x")
    (job / "9").mkdir()  # of the collector's own step
    (job / "9/e.1.profile").write_text("x")
    (job / "0/f.1.profile").write_bytes(b"kept")
    node.collect("*")
    assert [path.name for path in target.glob("*/*")] == ["f.1.profile"]
    assert len(node.problems) == 2


def test_each_file_has_its_part_of_what_is_collected(tmp_path: Path, job: Path, target: Path) -> None:
    """The first process does not take all of it, and an earlier profile none."""
    for pid, steps, number in ((1, 400, 2), (2, 1, 2), (3, 400, 2), (4, 400, 1)):
        writer = training(Writer(pid=pid, rank=pid, number=number), steps, 5)
        (job / "0" / writer.file_name).write_bytes(writer.content())
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text().replace("/run/sluice/profile", str(job.parent)))
    env = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "9"}
    with Collector(["/usr/bin/python3", "-IS", str(program)], 1, target, env, most=30_000) as collector:
        left_out = collector.collect("*")
    sizes = {path.name: path.stat().st_size for path in (target / "n1.0").iterdir()}
    small = (job / "0/n1.2.2.profile").stat().st_size
    assert sizes == {"n1.1.2.profile": 10_000, "n1.2.2.profile": small, "n1.3.2.profile": 20_000 - small}
    assert left_out == sum((job / "0" / name).stat().st_size for name in sizes) - 30_000


def test_processes_of_one_number_are_all_there(node: Collector, job: Path, target: Path) -> None:
    """Containers have numbers of their own: the library makes such names different."""
    content = training(Writer(), 5, 1).content()
    for name in ("n1.100.1.profile", "n1.100.1-1.profile"):
        (job / "0" / name).write_bytes(content)
    assert node.collect("*") == 0
    assert len(load(target).profiles) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_what_another_user_put_next_to_a_jobs_output_is_not_its_profile(tmp_path: Path) -> None:
    """A job may have run in /tmp."""
    ended = ProfiledJob(17, "", os.geteuid(), 0, runs=False, work_dir=tmp_path)
    writer = training(Writer(), 5, 1)
    ended.folder.mkdir()
    (ended.folder / writer.file_name).write_bytes(writer.content())
    with timeline(Commands(), ended) as found:
        assert len(found.profiles) == 1
    os.chown(ended.folder, 2001, -1)
    with pytest.raises(SluiceError, match="not its user's"), timeline(Commands(), ended):
        pass


@pytest.mark.parametrize("made", [None, "no profile", "n1.1.1.profile"])
def test_a_folders_name_does_nothing_to_roots_terminal(tmp_path: Path, made: str | None) -> None:
    ended = ProfiledJob(17, "", os.geteuid(), 0, runs=False, work_dir=tmp_path / "a\033]0;b\a")
    if made is not None:
        ended.folder.mkdir(parents=True)
        (ended.folder / made).touch()
    with pytest.raises(SluiceError) as refused, timeline(Commands(), ended):
        pass
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("noted", "said"),
    [
        ("CUDA_INJECTION64_PATH", "its user set CUDA_INJECTION64_PATH"),
        ("ROCP_TOOL_LIBRARIES", "its user set ROCP_TOOL_LIBRARIES"),
        ("", "its programs were started without --gpu-profile"),
        ("\x1b[2J" * 100, "its programs were started without --gpu-profile"),  # a step writes there what it likes
    ],
)
def test_a_step_that_has_not_loaded_the_library_is_not_profiled(
    node: Collector, job: Path, noted: str, said: str
) -> None:
    (job / "0/injected").write_text(noted)
    assert node.start("*", 0) == 0
    (problem,) = node.problems
    assert problem.startswith(f"n1: step 0: {said}") and problem.endswith(": not profiled")


HOLDS = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("job_of_it", "library", "named"),
    [("17", "libigdrcl.so.24", True), ("170", "libigdrcl.so.24", False), ("17", "libze_intel_gpu.so", False)],
)
def test_programs_with_a_driver_that_is_not_traced_are_named(
    node: Collector, tmp_path: Path, job_of_it: str, library: str, named: bool
) -> None:
    """OpenCL on Intel's GPUs does not go through Level Zero."""
    (tmp_path / library).write_bytes(b"\0" * 4096)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path / library)],
        env={"SLURM_JOB_ID": job_of_it}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as program:  # fmt: skip
        assert program.stdin is not None and program.stdout is not None and program.stdout.readline()
        node.collect("*")
        program.stdin.close()
    expected = "n1: OpenCL work is not seen: 1 processes have Intel's OpenCL driver loaded"
    assert node.problems == ([expected] if named else [])


def test_when_the_job_ends_all_is_sent_first(node: Collector, job: Path, target: Path) -> None:
    writer = training(Writer(), 400, 1)
    (job / "0" / writer.file_name).write_bytes(writer.content())
    node.start("*", 60)
    node._step.terminate()  # as Slurm does
    assert not node.wait(30)
    assert (target / "n1.0" / writer.file_name).read_bytes() == writer.content()


HELLO = b"0 hello n1 boot\n"


@pytest.mark.parametrize(
    "said",
    [
        b"0 file ../../etc x.1.profile 5\n",
        b"0 file 0 ../x.1.profile 5\n",
        b"0 file 0 x.profile\n",
        b"0 file 0 x.1.profile -5x\n",
        b"0 file 0 x.1.profile -1099511627776\n0 file 0 x.1.profile 9\n",  # would make room for as much
        b"0 clock 1\n",
        b"0 started many\n",
        b"0 data not-base64!\n0 file 0 x.1.profile 9\n0 data AAAA\n",
        b"0 file 0 x.1.profile 9\n0 data eJwLSUxWMDQyBgAQcwKT\n",  # of another length
    ],
)
def test_what_a_node_says_without_sense_is_a_problem_and_writes_nothing(target: Path, said: bytes) -> None:
    with talking(HELLO, said + b"0 sent 0\n", target=target) as collector:
        collector._ask("send * 1", "sent")
    assert sum(path.stat().st_size for path in target.rglob("*") if path.is_file()) <= 9
    assert len(collector.problems) == 1 and collector.problems[0].isprintable()


def test_a_node_that_says_too_much(target: Path) -> None:
    with talking(HELLO, b"x" * 5000, target=target) as collector, pytest.raises(SluiceError, match="too long"):
        collector.stop("*")


def test_a_step_that_does_not_begin(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.profile.collect._BEGIN_S", 0.5)
    with pytest.raises(SluiceError, match="no node has answered"), talking(b"noise\n7 hello n8 x\n", target=target):
        pass
    words = ["/bin/sh", "-c", "echo 'srun: job 17 is\033gone' >&2"]
    with pytest.raises(SluiceError, match="step has ended: job 17 is gone"), Collector(words, 1, target):
        pass


def test_nodes_that_do_not_answer_are_named_and_the_others_collected(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.profile.collect._BEGIN_S", 1.0)
    with talking(HELLO, target=target, tasks=2) as collector:
        assert collector.problems == ["1 of 2 nodes have not answered within 1 s"]
        assert collector.nodes == ["n1"]
