"""NVIDIA's way to take a process's state off its GPUs and put it back: the driver's cuCheckpointProcess* functions.

Started by gpus.py as a process of its own, which may crash or hang with the driver: `suspend MS INIT PID...`, of
processes below INIT; `resume PID... [OLD_UUID=NEW_UUID...]`; `problem`. Prints a JSON object: `pids`, those that use
CUDA, or `error`, with `never` where the driver refuses what the program does.
Standard library only. Source of calls and their order: NVIDIA's CUDA driver API, "CUDA Checkpointing", and the tool
cuda-checkpoint: lock, checkpoint; restore, unlock.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SINCE, REMAPS_SINCE = 12080, 13000
"""CUDA's versions of drivers 570, which has the functions, and 580, which restores on other GPUs (`gpuPairs`)."""
RUNNING, LOCKED, CHECKPOINTED = 0, 1, 2
_NOT_READY, _NOT_SUPPORTED = 600, 801
_PTRACE_CONT, _PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 7, 17, 0x4206, 0x4207
_TRACE_CLONES = 8  # PTRACE_O_TRACECLONE
_WALL = 0x40000000
_LOOK_S = 0.002
_STOP_S = 10.0  # until a thread that is stopped is traced
_UNSUPPORTED = (
    "the driver cannot save what it has on its GPU: managed memory, memory shared with other processes, MIG or MPS"
)


class FailedError(Exception):
    """The reason in words."""


class UnsupportedError(FailedError):
    """What the program does with its GPUs cannot be saved, now or later."""


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_char * 60))


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs."""

    _fields_ = (
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (64 - ctypes.sizeof(ctypes.c_void_p) - ctypes.sizeof(ctypes.c_uint))),
    )


class Driver:
    """libcuda. Raises FailedError where it is missing or older than 570."""

    def __init__(self) -> None:
        try:
            self.api = ctypes.CDLL("libcuda.so.1")
            version = ctypes.c_int()
            self.api.cuDriverGetVersion(ctypes.byref(version))
            self.version = version.value
            if self.version < SINCE or not hasattr(self.api, "cuCheckpointProcessLock"):
                raise FailedError("its NVIDIA driver is too old to save what a GPU has; 570 or later is needed")
        except OSError as error:
            raise FailedError(f"NVIDIA's driver is missing: {error}") from None
        if code := self.api.cuInit(0):
            raise FailedError(f"NVIDIA's driver does not start: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.api.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or str(code).encode()).decode(errors="replace")

    def check(self, code: int, what: str) -> None:
        """Raises FailedError for what the driver answered."""
        if code == _NOT_SUPPORTED:
            raise UnsupportedError(_UNSUPPORTED)
        if code:
            raise FailedError(f"the NVIDIA driver could not {what}: {self._name(code)}")

    def state(self, pid: int) -> int | None:
        """None: the process does not use CUDA, or has ended. Its thread answers: it must not be stopped."""
        state = ctypes.c_int()
        return None if self.api.cuCheckpointProcessGetState(pid, ctypes.byref(state)) else state.value

    def thread(self, pid: int) -> int | None:
        """The thread of the process that works for the driver; None: the process does not use CUDA, or has ended.

        It is to be traced: it has to be the process's.
        """
        found = ctypes.c_int()
        if self.api.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(found)):
            return None
        if not os.path.exists(f"/proc/{pid}/task/{found.value}"):  # noqa: PTH110 - as below
            raise FailedError(f"the NVIDIA driver names thread {found.value}, which is not of its process")
        return found.value

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Its calls wait from now on, and what they have begun has ended."""
        code = self.api.cuCheckpointProcessLock(pid, ctypes.byref(LockArgs(timeout_ms=max(1, timeout_ms))))
        if code == _NOT_READY:
            raise FailedError("its work on the GPU did not end in time")
        self.check(code, "lock it")

    def checkpoint(self, pid: int) -> None:
        """Its device memory goes to the host, its GPUs are let go."""
        self.check(self.api.cuCheckpointProcessCheckpoint(pid, None), "take its state off the GPU")

    def restore(self, pid: int, pairs: list[tuple[str, str]]) -> None:
        """The reverse, on other GPUs where there are `pairs`."""
        array = (GpuPair * len(pairs))(*(GpuPair(_bytes(old), _bytes(new)) for old, new in pairs))
        args = RestoreArgs(pairs=array, count=len(pairs))
        code = self.api.cuCheckpointProcessRestore(pid, ctypes.byref(args) if pairs else None)
        self.check(code, "put its state back on a GPU")

    def unlock(self, pid: int) -> None:
        """Its calls go on."""
        self.check(self.api.cuCheckpointProcessUnlock(pid, None), "unlock it")


def _bytes(uuid: str) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * 16)(*bytes.fromhex(uuid.partition("-")[2].replace("-", "")))


# ---- processes and threads ----


def _stat(pid: int) -> list[bytes]:
    """What /proc says of a process or thread, from its state on."""
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - small and often
        return file.read().rpartition(b") ")[2].split()


def _is_stopped(thread: int) -> bool:
    return _stat(thread)[0] in (b"T", b"t")


def is_below(pid: int, init: int) -> bool:
    """Whether it is one of the processes below `init`, of which none leaves them: its number may be another's now."""
    with suppress(OSError):
        while pid > 1 and pid != init:
            pid = int(_stat(pid)[1])
    return pid == init


class _Awake(threading.Thread):
    """Lets a thread of a stopped process run, and the threads that it begins; they stop when this ends.

    Where a process is stopped, a thread that is begun is stopped, too, and NVIDIA's driver begins threads as it puts
    state back, and waits for them. A traced thread that is continued leaves its process's stop alone, and enters it
    again when it is let go, or when this program is killed. Only the thread that traces can do so.
    """

    def __init__(self, thread: int) -> None:
        super().__init__(daemon=True)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._libc.ptrace.restype = ctypes.c_long
        self._thread, self._traced = thread, {thread}
        self._runs, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._ptrace(_PTRACE_SEIZE, self._thread, _TRACE_CLONES)
            self._await(self._thread)
            while not self._over.wait(_LOOK_S):
                self._let_go_on()
            self._let_go()
        except (FailedError, ChildProcessError) as error:  # the latter: it has ended
            self._error = error
        finally:
            self._runs.set()

    def _ptrace(self, request: int, thread: int, data: int = 0) -> None:
        if self._libc.ptrace(request, thread, None, data) < 0:
            raise FailedError(f"its thread {thread} cannot be traced: {os.strerror(ctypes.get_errno())}")

    def _await(self, thread: int) -> None:
        """Raises FailedError where the thread runs: its user may have let it."""
        end = time.monotonic() + _STOP_S
        while thread in self._traced and not self._runs.is_set():
            if time.monotonic() > end:
                raise FailedError(f"its thread {thread} does not stop")
            self._let_go_on()
            time.sleep(_LOOK_S)

    def _stopped(self) -> Iterator[tuple[int, int]]:
        """Threads that have stopped since it was last asked, and the signals that stopped them; 0: it was no signal."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, _WALL | os.WNOHANG))[0]:
                thread, status = found
                if os.WIFSTOPPED(status):
                    self._traced.add(thread)
                    yield thread, 0 if status >> 16 else os.WSTOPSIG(status)
                else:
                    self._traced.discard(thread)

    def _let_go_on(self) -> None:
        for thread, number in self._stopped():
            with suppress(FailedError):  # it was killed
                self._ptrace(_PTRACE_CONT, thread, number)
            if thread == self._thread:
                self._runs.set()

    def _let_go(self) -> None:
        for thread in self._traced:
            with suppress(FailedError):
                self._ptrace(_PTRACE_INTERRUPT, thread)
        end = time.monotonic() + _STOP_S
        while self._traced and time.monotonic() < end:
            for thread, number in self._stopped():
                with suppress(FailedError):
                    self._ptrace(_PTRACE_DETACH, thread, number)
                self._traced.discard(thread)
            time.sleep(_LOOK_S)

    def __enter__(self) -> None:
        self.start()
        self._runs.wait()
        if self._error is not None:
            raise self._error

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


@contextmanager
def awake(thread: int) -> Iterator[None]:
    """Let this thread run while the rest of its process stays stopped; it is stopped again however this ends."""
    if not _is_stopped(thread):
        yield
        return
    with _Awake(thread):
        yield


# ---- what is asked for ----


def suspend(driver: Driver, init: int, pids: list[int], timeout_ms: int) -> list[int]:
    """Take all of these off their GPUs, as far as they are on any; all or none. The ones that use CUDA."""
    used = [pid for pid in pids if driver.state(pid) is not None]
    end = time.monotonic() + timeout_ms / 1000
    try:
        for pid in used:  # all are locked before one lets go: they may wait for each other
            if driver.state(pid) == RUNNING:
                driver.lock(pid, int((end - time.monotonic()) * 1000))
                if not is_below(pid, init):
                    raise FailedError("one of its processes ended meanwhile")
        for pid in used:
            if driver.state(pid) == LOCKED:
                driver.checkpoint(pid)
    except FailedError:
        resume(driver, used, [])
        raise
    for pid in used:
        if driver.state(pid) != CHECKPOINTED:
            raise FailedError("the NVIDIA driver lost what it had on its GPU")
    return used


def resume(driver: Driver, pids: list[int], pairs: list[tuple[str, str]]) -> list[int]:
    """Those that are off their GPUs or locked, on GPUs and running again. They may be stopped, and stay so."""
    used = []
    for pid in pids:
        try:
            if (thread := driver.thread(pid)) is not None:
                used.append(pid)
                _resume_one(driver, pid, thread, pairs)
        except (FailedError, OSError):
            if not _has_ended(pid):
                raise
    return used


def _resume_one(driver: Driver, pid: int, thread: int, pairs: list[tuple[str, str]]) -> None:
    with awake(thread):
        if driver.state(pid) == CHECKPOINTED:
            driver.restore(pid, pairs)
        if driver.state(pid) == LOCKED:
            driver.unlock(pid)
        if driver.state(pid) != RUNNING:
            raise FailedError("the NVIDIA driver did not put its state back on a GPU")


def _has_ended(pid: int) -> bool:
    try:
        return _stat(pid)[0] in (b"Z", b"X")
    except OSError:
        return True


def main(words: list[str]) -> dict[str, object]:
    """What is printed."""
    try:
        driver = Driver()
        if words[0] == "problem":
            return {"pids": [], "version": driver.version}
        if words[0] == "suspend":
            return {"pids": suspend(driver, int(words[2]), [int(word) for word in words[3:]], int(words[1]))}
        pairs = [(old, new) for word in words[1:] for old, found, new in [word.partition("=")] if found]
        pids = [int(word) for word in words[1:] if word.isdecimal()]
        return {"pids": resume(driver, pids, pairs)}
    except (FailedError, OSError) as error:
        return {"error": str(error), "never": isinstance(error, UnsupportedError)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
