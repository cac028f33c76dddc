"""A process that is taken off its GPUs and put back, by NVIDIA's calls, as the node agent makes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sim_node import Node

from prolog_epilog.checkpoint import cuda

PLATFORM = """
name: four
description: three H100 and an A100
cpu: {sockets: 1, cores_per_socket: 56, threads_per_core: 2, numa_nodes: 1, memory_mib: 524288}
drivers:
  nvidia: {version: 580.65.06, library: 13.580.65.06, runtime: 13000}
gpus:
  - {model: h100-sxm5-80gb, pci: '0000:1b:00.0', numa: 0, under: 'pci0000:15/0000:15:01.0'}
  - {model: h100-sxm5-80gb, pci: '0000:2b:00.0', numa: 0, under: 'pci0000:25/0000:25:01.0'}
  - {model: h100-sxm5-80gb, pci: '0000:3b:00.0', numa: 0, under: 'pci0000:35/0000:35:01.0'}
  - {model: a100-sxm4-40gb, pci: '0000:4b:00.0', numa: 0, under: 'pci0000:45/0000:45:01.0'}
"""
# Has a pattern on its GPU, and says on each line whether it is there, and another call was made.
PROGRAM = """
import ctypes as c, os, sys, time
cu = c.CDLL("libcuda.so.1")
def ok(code):
    assert code == 0, code
context, address, size = c.c_void_p(), c.c_uint64(), 64 << 20
pattern = os.urandom(1 << 16)
ok(cu.cuInit(0))
ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0))
ok(cu.cuCtxSetCurrent(context))
{more}
ok(cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(size)))
ok(cu.cuMemcpyHtoD_v2(address, pattern, c.c_size_t(len(pattern))))
back = c.create_string_buffer(len(pattern))
while True:
    ok(cu.cuMemcpyDtoH_v2(back, address, c.c_size_t(len(pattern))))
    print(int(back.raw == pattern), flush=True)
    time.sleep(0.01)
"""
MANAGED = "ok(cu.cuMemAllocManaged(c.byref(address), c.c_size_t(1 << 20), 1))"
SHARED = """
handle = c.create_string_buffer(64)
ok(cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(1 << 20)))
ok(cu.cuIpcGetMemHandle(handle, address))
"""
USED = """
import json, pynvml as n
n.nvmlInit()
found = []
for index in range(n.nvmlDeviceGetCount()):
    handle = n.nvmlDeviceGetHandleByIndex(index)
    found.append(sum(one.usedGpuMemory >> 20 for one in n.nvmlDeviceGetComputeRunningProcesses(handle)))
print(json.dumps(found))
"""
HAS = 520 + 64


@pytest.fixture
def node(make_node: Callable[..., Node], tmp_path: Path) -> Node:
    return make_node(str(platform(tmp_path)))


def platform(folder: Path, version: str = "580.65.06", runtime: int = 13000) -> Path:
    file = folder / f"{runtime}.yaml"
    file.write_text(PLATFORM.replace("580.65.06", version).replace("13000", str(runtime)))
    return file


class Program:
    """One that runs."""

    def __init__(self, node: Node, more: str = "") -> None:
        self.process = node.start(PROGRAM.replace("{more}", more))
        self.works()

    def works(self) -> None:
        """The pattern is there, twice in a row from now on."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        for _ in self.process.stdout:  # what it has said before
            pass
        os.set_blocking(self.process.stdout.fileno(), True)
        said = [self.process.stdout.readline() for _ in range(2)]
        assert said == ["1\n", "1\n"], self.process.stderr and self.process.stderr.read()

    def waits(self) -> None:
        """It says nothing more, as its next call waits."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if not any(True for _ in self.process.stdout):
                break
            time.sleep(0.2)
        os.set_blocking(self.process.stdout.fileno(), True)
        time.sleep(0.1)
        assert self.process.poll() is None

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start(node: Node) -> Iterator[Callable[..., Program]]:
    made: list[Program] = []

    def begin(more: str = "") -> Program:
        made.append(Program(node, more))
        return made[-1]

    yield begin
    for one in made:
        one.end()


def ask(node: Node, *words: object) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", cuda.__name__, *map(str, words)]
    done = subprocess.run(command, env=node.environment(), capture_output=True, text=True, timeout=60, check=True)
    return dict(json.loads(done.stdout))


def pair(node: Node, old: int, new: int) -> str:
    return f"{node.get(old, 'uuid')}={node.get(new, 'uuid')}"


def test_it_is_off_the_gpu_and_on_it_again(node: Node, start: Callable[..., Program]) -> None:
    program, other = start(), subprocess.Popen(["sleep", "60"])
    pid = program.process.pid
    try:
        assert node.run(USED) == [HAS, 0, 0, 0]
        for _ in range(2):  # again it does nothing
            assert ask(node, "suspend", 10_000, os.getpid(), pid, other.pid) == {"pids": [pid]}
            assert node.run(USED) == [0, 0, 0, 0]
        program.waits()
        for _ in range(2):
            assert ask(node, "resume", pid, other.pid) == {"pids": [pid]}
        assert node.run(USED) == [HAS, 0, 0, 0]
        program.works()
    finally:
        other.kill()
        other.wait()


def test_on_another_gpu_of_its_model_alone(node: Node, start: Callable[..., Program]) -> None:
    program = start()
    pid = program.process.pid
    ask(node, "suspend", 10_000, os.getpid(), pid)
    assert "CUDA_ERROR_INVALID_VALUE" in ask(node, "resume", pid, pair(node, 0, 3))["error"]  # an A100
    assert "CUDA_ERROR_INVALID_DEVICE" in ask(node, "resume", pid, pair(node, 2, 1))["error"]  # its own is not named
    assert node.run(USED) == [0, 0, 0, 0]
    assert ask(node, "resume", pid, pair(node, 0, 1)) == {"pids": [pid]}
    assert node.run(USED) == [0, HAS, 0, 0]
    program.works()
    ask(node, "suspend", 10_000, os.getpid(), pid)
    assert ask(node, "resume", pid, pair(node, 1, 2)) == {"pids": [pid]}  # it is known by the one that it has now
    assert node.run(USED) == [0, 0, HAS, 0]


def test_a_stopped_process_stays_stopped(node: Node, start: Callable[..., Program]) -> None:
    """As CRIU leaves it: it gets its GPU back before it runs."""
    program = start()
    pid = program.process.pid
    ask(node, "suspend", 10_000, os.getpid(), pid)
    os.kill(pid, signal.SIGSTOP)
    assert ask(node, "resume", pid) == {"pids": [pid]}
    assert node.run(USED) == [HAS, 0, 0, 0]
    states = [(task / "stat").read_text().rpartition(") ")[2][0] for task in Path(f"/proc/{pid}/task").iterdir()]
    assert len(states) > 1 and {*states} == {"T"}
    program.waits()
    os.kill(pid, signal.SIGCONT)
    program.works()


@pytest.mark.parametrize("more", [MANAGED, SHARED])
def test_what_cannot_be_saved_goes_on(node: Node, start: Callable[..., Program], more: str) -> None:
    good, program = start(), start(more)
    pids = good.process.pid, program.process.pid
    before = node.run(USED)
    assert "cannot save what it has on its GPU" in ask(node, "suspend", 10_000, os.getpid(), *pids)["error"]
    assert node.run(USED) == before
    good.works()
    program.works()


def test_a_gpu_that_is_taken_meanwhile(node: Node, start: Callable[..., Program]) -> None:
    program = start()
    pid = program.process.pid
    ask(node, "suspend", 10_000, os.getpid(), pid)
    full = start("ok(cu.cuMemAlloc_v2(c.byref(address), c.c_size_t(78 << 30)))")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in ask(node, "resume", pid)["error"]
    full.end()
    assert ask(node, "resume", pid) == {"pids": [pid]}
    program.works()


def test_a_process_of_another_job_is_left_alone(node: Node, start: Callable[..., Program]) -> None:
    """Its number may have been one of the job's."""
    program, init = start(), subprocess.Popen(["sleep", "60"])
    try:
        said = ask(node, "suspend", 10_000, init.pid, program.process.pid)
        assert "ended meanwhile" in said["error"] and not said["never"]
        program.works()
    finally:
        init.kill()
        init.wait()


class Ending:
    """A driver for which one process ends just as it is to be put back, and the thread that works is another's."""

    def __init__(self, gone: int) -> None:
        self.gone = gone
        self.api = self
        self.done: list[int] = []

    def state(self, pid: int) -> int:
        return cuda.RUNNING if pid in self.done else cuda.LOCKED

    def thread(self, pid: int) -> int:
        if pid == self.gone:
            raise cuda.FailedError("no such process")
        return pid

    def unlock(self, pid: int) -> None:
        self.done.append(pid)


def test_one_that_ends_does_not_keep_the_others() -> None:
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    driver: Any = Ending(ended.pid)
    cuda.resume(driver, [ended.pid, os.getpid()], [])
    assert driver.done == [os.getpid()]
    ended.wait()
    driver = Ending(os.getpid())
    with pytest.raises(cuda.FailedError, match="no such"):
        cuda.resume(driver, [os.getpid()], [])


def test_whoever_asks_may_die(node: Node, start: Callable[..., Program]) -> None:
    program = start()
    pid = program.process.pid
    for tick in range(5):
        command = [sys.executable, "-P", "-m", cuda.__name__, "suspend", "10000", str(os.getpid()), str(pid)]
        asking = subprocess.Popen(command, env=node.environment(), stdout=subprocess.DEVNULL)
        time.sleep(0.02 * tick)
        asking.kill()
        asking.wait()
        assert ask(node, "suspend", 10_000, os.getpid(), pid) == {"pids": [pid]}
        assert node.run(USED) == [0, 0, 0, 0]
        assert ask(node, "resume", pid) == {"pids": [pid]}
        assert node.run(USED) == [HAS, 0, 0, 0]
    program.works()


@pytest.mark.parametrize(("version", "runtime", "why"), [("550.90.07", 12040, "too old"), ("570.86.10", 12080, "")])
def test_drivers_that_cannot_say_so(
    make_node: Callable[..., Node], tmp_path: Path, version: str, runtime: int, why: str
) -> None:
    node = make_node(str(platform(tmp_path, version, runtime)))
    assert why in ask(node, "problem").get("error", "")
    if why:
        return
    program = Program(node)
    try:
        ask(node, "suspend", 10_000, os.getpid(), program.process.pid)
        assert "cannot save" in ask(node, "resume", program.process.pid, pair(node, 0, 1))["error"]  # since 580
        assert ask(node, "resume", program.process.pid) == {"pids": [program.process.pid]}
        program.works()
    finally:
        program.end()
