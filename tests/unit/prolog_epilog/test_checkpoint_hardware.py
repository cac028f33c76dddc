"""What programs have on a real NVIDIA GPU is taken off it and put back, with CRIU in between: no Slurm, no simulation.

Root, a driver of CUDA 12.8 or later, and nvidia-ml-py. `SLUICE_CRIU` as in test_system_checkpoint.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from prolog_epilog.checkpoint.criu import Criu, mount_own_proc, why_not
from prolog_epilog.checkpoint.gpus import Cuda, NeverError

pytestmark = pytest.mark.gpu

CRIU = Path(os.environ.get("SLUICE_CRIU") or Path(__file__).parents[3] / "build/criu/criu")
MIB = 4096
CHUNK = 64
SECONDS = 60.0
# Fills its memory with numbers that tell one chunk from another; when it may, it says how many chunks are wrong.
HOLDER = """
import ctypes as c, os, sys, time
cu, context, address = c.CDLL("libcuda.so.1"), c.c_void_p(), c.c_uint64()
folder, take, mib, chunk = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def ok(code):
    assert code == 0, code
def say(name, text):
    with open(f"{folder}/new", "w") as file:
        file.write(text)
    os.rename(f"{folder}/new", f"{folder}/{name}")
ok(cu.cuInit(0)), ok(cu.cuDevicePrimaryCtxRetain(c.byref(context), 0)), ok(cu.cuCtxSetCurrent(context))
size = c.c_size_t(mib << 20)
ok(cu.cuMemAllocManaged(c.byref(address), size, 1) if take == "managed" else cu.cuMemAlloc_v2(c.byref(address), size))
places = [(number, address.value + (number * chunk << 20)) for number in range(mib // chunk)]
for number, place in places:
    ok(cu.cuMemsetD32_v2(c.c_uint64(place), 0xA5C30000 + number, c.c_size_t(chunk << 18)))
ok(cu.cuCtxSynchronize())
say("ready", str(os.getpid()))
while not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
buffer, wrong = (c.c_uint32 * (chunk << 18))(), 0
for number, place in places:
    ok(cu.cuMemcpyDtoH_v2(buffer, c.c_uint64(place), c.c_size_t(chunk << 20)))
    wrong += bytes(buffer) != (0xA5C30000 + number).to_bytes(4, "little") * (chunk << 18)
say("said", str(wrong))
"""

# Steps of which each needs all before it, in PyTorch; after its last one, it says what it came to.
TRAINER = """
import os, sys, time
import torch
folder, steps = sys.argv[1], int(sys.argv[2])
def say(name, text):
    with open(f"{folder}/new", "w") as file:
        file.write(text)
    os.rename(f"{folder}/new", f"{folder}/{name}")
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
data, optimizer = torch.randn(64, 256, 512, device="cuda"), torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(steps):
    optimizer.zero_grad()
    loss = (net(data[step % 64]) - data[(step + 1) % 64]).square().mean()
    loss.backward()
    optimizer.step()
    if step == steps // 4:
        say("ready", "")
    while step == steps // 2 and not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
say("said", repr([loss.item(), sum(one.double().sum().item() for one in net.parameters())]))
"""
STEPS = 400
OPEN = 'exec "$@" </dev/null >"$0" 2>&1'
"""A shell's script: what a program has open is of its own mount namespace."""


class Holder:
    """A program with a PID namespace, a /proc and a session of its own, and nothing open but files: as in jobs."""

    def __init__(self, folder: Path, program: str, *words: str) -> None:
        folder.mkdir()
        self.folder = folder
        inside = ["unshare", "--pid", "--fork", "--mount-proc", "setsid", "sh", "-c", OPEN, str(folder / "log")]
        self.outer = subprocess.Popen([*inside, sys.executable, "-c", program, str(folder), *words])
        self._await("ready")
        [self.pid] = map(int, Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children").read_text().split())

    def _await(self, name: str) -> str:
        end = time.monotonic() + SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < end, self.log()
            assert name != "ready" or self.outer.poll() is None, self.log()
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def says(self) -> str:
        """At its end: of a holder, how many chunks of its memory are not what it wrote."""
        (self.folder / "go").touch()
        return self._await("said")

    def end(self) -> None:
        for pid in (self.pid, self.outer.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.outer.wait()
        end = time.monotonic() + SECONDS
        while Path(f"/proc/{self.pid}").exists():  # a name of its sockets is in use until then
            assert time.monotonic() < end, self.pid
            time.sleep(0.02)


@pytest.fixture(scope="module")
def driver() -> Cuda:
    """The installed one."""
    if os.environ.get("SLUICE_TEST_GPU") != "simulated" and not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    if os.geteuid() != 0:
        pytest.skip("other processes' GPUs are root's to take")
    made = Cuda()
    if problem := made.problem():
        pytest.skip(problem)
    return made


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    made: list[Holder] = []

    def make(mib: int = MIB, take: str = "device", program: str = HOLDER, words: tuple[str, ...] = ()) -> Holder:
        made.append(Holder(tmp_path / f"holder{len(made)}", program, *(words or (take, str(mib), str(CHUNK)))))
        return made[-1]

    yield make
    for one in made:
        one.end()


def used_mib() -> int:
    """Of GPU 0, by everybody."""
    code = (
        "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).used >> 20)"
    )
    return int(subprocess.check_output([sys.executable, "-c", code], timeout=60))


def timed(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def test_it_is_off_the_gpu_and_back(
    driver: Cuda, hold: Callable[..., Holder], record_property: Callable[[str, object], None]
) -> None:
    before = used_mib()
    holder = hold()
    assert used_mib() >= before + MIB
    took = timed(lambda: driver.suspend(holder.pid, [holder.pid], 20, -1))
    assert used_mib() <= before + MIB // 16
    driver.suspend(holder.pid, [holder.pid], 20, -1)  # once more: nothing is left to do
    back = timed(lambda: driver.resume([holder.pid], [], -1))
    assert used_mib() >= before + MIB
    assert holder.says() == "0"
    for name, seconds in (("suspend", took), ("resume", back)):
        record_property(f"{name}_s", round(seconds, 2))
        record_property(f"{name}_gib_per_s", round(MIB / 1024 / seconds, 2))


def test_a_program_that_is_stopped_is_put_back_and_stays_stopped(driver: Cuda, hold: Callable[..., Holder]) -> None:
    """As CRIU leaves it."""
    holder = hold(mib=256)
    driver.suspend(holder.pid, [holder.pid], 20, -1)
    os.kill(holder.pid, signal.SIGSTOP)
    driver.resume([holder.pid], [], -1)
    (holder.folder / "go").touch()
    time.sleep(0.5)
    assert Path(f"/proc/{holder.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    assert not (holder.folder / "said").exists()
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.says() == "0"


def test_managed_memory_is_refused_and_the_program_runs_on(driver: Cuda, hold: Callable[..., Holder]) -> None:
    holder = hold(mib=256, take="managed")
    with pytest.raises(NeverError):
        driver.suspend(holder.pid, [holder.pid], 20, -1)
    assert holder.says() == "0"


def save_and_end(driver: Cuda, holder: Holder, folder: Path) -> Callable[[], None]:
    """It is gone; what is returned brings it back."""
    if not CRIU.exists():
        pytest.skip(f"{CRIU}: no CRIU; fetch it with: tools/criu build/criu")
    criu = Criu(CRIU)
    if problem := criu.problem():
        pytest.skip(problem)
    folder.mkdir()

    def take(name: str, plain: BinaryIO) -> None:
        with (folder / name).open("xb") as file:
            shutil.copyfileobj(plain, file, 1 << 20)

    driver.suspend(holder.pid, [holder.pid], 20, -1)
    with (folder.parent / "lock").open("w") as lock:
        criu.save(holder.pid, folder, 60, lock.fileno(), take)
    holder.end()

    def resume() -> None:
        done = subprocess.run(criu.resume_words(folder), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, why_not(folder)
        holder.pid = int((folder / "pid").read_text())
        mount_own_proc(holder.pid)
        driver.resume([holder.pid], [], -1)
        os.kill(holder.pid, signal.SIGCONT)

    return resume


def test_criu_saves_it_and_it_goes_on_after_its_end(
    driver: Cuda, hold: Callable[..., Holder], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    before = used_mib()
    holder = hold(mib=1024)
    began = time.monotonic()
    resume = save_and_end(driver, holder, tmp_path / "image")
    record_property("saved_after_s", round(time.monotonic() - began, 2))
    record_property("image_mib", sum(file.stat().st_size for file in (tmp_path / "image").iterdir()) >> 20)
    assert used_mib() <= before + 64
    record_property("resumed_after_s", round(timed(resume), 2))
    assert holder.says() == "0"


def test_pytorch_goes_on_to_the_same_result(driver: Cuda, hold: Callable[..., Holder], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole = hold(program=TRAINER, words=(str(STEPS),)).says()
    other = hold(program=TRAINER, words=(str(STEPS),))
    driver.suspend(other.pid, [other.pid], 20, -1)
    driver.resume([other.pid], [], -1)
    assert other.says() == whole
    saved = hold(program=TRAINER, words=(str(STEPS),))
    save_and_end(driver, saved, tmp_path / "image")()
    assert saved.says() == whole
