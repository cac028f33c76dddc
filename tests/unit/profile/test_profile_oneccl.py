"""Calls of oneCCL's C interface in profiles on Intel's GPUs."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from profiled import COLLECTIVE, GPU, KERNELS, LOST, Profiled

Make = Callable[..., Profiled]


@pytest.fixture
def vendor() -> str:
    return "intel"


# Parameters as Intel's oneapi/ccl.h of 2022.2 has them. Each call takes 1 ms, and answers with what it was given.
LIBRARY = """
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#define API __attribute__((visibility("default"))) __attribute__((weak))
typedef int type, operation;
typedef struct onecclComm *communicator;
static int takes(uintptr_t sum)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return (int)sum;
}
#define P (uintptr_t)
API int onecclReduce(const void *a, void *b, size_t n, type t, operation o, int r, communicator c, void *s)
{
    return takes(P a + P b + n + P t + P o + P r + P c + P s);
}
API int onecclAllReduce(void *a, void *b, size_t n, type t, operation o, communicator c, void *s)
{
    return takes(P a + P b + n + P t + P o + P c + P s);
}
API int onecclBroadcast(const void *a, void *b, size_t n, type t, int r, communicator c, void *s)
{
    return takes(P a + P b + n + P t + P r + P c + P s);
}
API int onecclReduceScatter(const void *a, void *b, size_t n, type t, operation o, communicator c, void *s)
{
    return takes(P a + P b + n + P t + P o + P c + P s);
}
API int onecclAllGather(const void *a, void *b, size_t n, type t, communicator c, void *s)
{
    return takes(P a + P b + n + P t + P c + P s);
}
API int onecclAllToAll(const void *a, void *b, size_t n, type t, communicator c, void *s)
{
    return takes(P a + P b + n + P t + P c + P s);
}
API int onecclAllToAllV(const void *a, const size_t *m, void *b, const size_t *n, type t, communicator c, void *s)
{
    return takes(P a + P m + P b + P n + P t + P c + P s);
}
API int onecclSend(const void *a, size_t n, type t, int p, communicator c, void *s)
{
    return takes(P a + n + P t + P p + P c + P s);
}
API int onecclRecv(void *a, size_t n, type t, int p, communicator c, void *s)
{
    return takes(P a + n + P t + P p + P c + P s);
}
API int onecclCommDestroy(communicator c) { return takes(P c); }
"""
LINKED = """
#include <stddef.h>
struct onecclComm;
int onecclAllReduce(void *, void *, size_t, int, int, struct onecclComm *, void *);
int train(void) { return onecclAllReduce(NULL, NULL, 500, 6, 0, (void *)0xC0FFEE, NULL); }
"""
PROGRAM = (
    GPU
    + """
begin()
ccl, linked = (c.CDLL(os.environ["FOLDER"] + "/" + name) for name in ("libccl.so.2", "liblinked.so"))
comm = 0xC0FFEE
calls = {  # element type 8 is of 8 bytes; what each is given adds up to what it answers
    "Reduce": (1, 2, 100, 8, 4, 3, comm, 5), "AllReduce": (1, 2, 100, 8, 4, comm, 5),
    "Broadcast": (1, 2, 100, 8, 3, comm, 5), "ReduceScatter": (1, 2, 100, 8, 4, comm, 5),
    "AllGather": (1, 2, 100, 8, comm, 5), "AllToAll": (1, 2, 100, 8, comm, 5),
    "AllToAllV": (1, 16, 2, 32, 8, comm, 5), "Send": (1, 100, 8, 3, comm, 5), "Recv": (1, 100, 8, 3, comm, 5),
}
def all_of_them():
    for name, given in calls.items():
        types = [c.c_int if one in (8, 3, 4) else c.c_size_t for one in given]
        assert getattr(ccl, "oneccl" + name)(*(type(one) for type, one in zip(types, given))) == sum(given), name
    assert linked.train() == 500 + 6 + comm
    assert ccl.onecclCommDestroy(c.c_size_t(comm)) == comm
all_of_them()
say()
while told() != "end":
    all_of_them()
    child = os.fork()
    if child == 0:
        all_of_them()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say()
"""
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    libraries = [("ccl.so.2", LIBRARY, []), ("linked.so", LINKED, ["-L.", "-l:libccl.so.2"])]
    libraries += [("renamed.so", LIBRARY, []), ("with_renamed.so", LINKED, ["-L.", "-l:librenamed.so"])]
    for name, code, more in [*libraries, ("with_its_own.so", LIBRARY + LINKED, [])]:
        words = ["cc", "-shared", "-fPIC", f"-Wl,-soname,lib{name},-rpath,$ORIGIN", "-xc", "-", "-o", f"lib{name}"]
        subprocess.run([*words, *more], input=code, cwd=tmp_path, text=True, check=True)
    return tmp_path


def test_calls_of_oneccl(make: Make, folder: Path) -> None:
    """Looked up and linked, with what they are given and answer; nothing of a child, nor while nobody wants it."""
    program = make(PROGRAM, FOLDER=str(folder))
    assert program.hears() == "ready"
    number = program.ask()
    program.collects_anything(number)
    program.tell()
    program.hears()
    profile = program.stop(number)
    calls = profile.of(COLLECTIVE)
    names = ["Reduce", "AllReduce", "Broadcast", "ReduceScatter", "AllGather", "AllToAll", "AllToAllV", "Send", "Recv"]
    assert [profile.names[one.name] for one in sorted(calls, key=lambda one: one.start)] == [*names, "AllReduce"]
    for one in calls:
        thread, _, size, communicator = struct.unpack("<IiQQ", one.rest)
        assert (thread, communicator) == (program.process.pid, 0xC0FFEE)
        assert one.end - one.start >= 1_000_000 and size in (800, 1000, 0)
        assert (size == 0) == (profile.names[one.name] == "AllToAllV")
    assert not profile.of(LOST)
    number = program.ask(KERNELS)
    program.collects_anything(number)
    program.tell()
    program.hears()
    assert not program.stop(number).of(COLLECTIVE)
    program.tell("end")
    program.ends()


def test_without_a_gpu_its_calls_are_its_own(make: Make, folder: Path) -> None:
    """A program that never begins with Level Zero: nothing is loaded, and each call gets there."""
    program = make(PROGRAM.replace("begin()\n", ""), FOLDER=str(folder))
    assert program.hears() == "ready"
    program.tell("end")
    program.ends()


@pytest.mark.parametrize("name", ["with_its_own", "with_renamed"])
@pytest.mark.parametrize("scope", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_a_oneccl_of_another_name_is_called(make: Make, folder: Path, name: str, scope: str) -> None:
    """A library that has oneCCL in it, or as a wheel brings it: calls of it pass by ours first, too."""
    code = f"library = c.CDLL(os.environ['FOLDER'] + '/lib{name}.so', mode=c.{scope})\n"
    program = make(GPU + code + "say(str(library.train() == 500 + 6 + 0xC0FFEE))\n", FOLDER=str(folder))
    assert program.hears() == "True"
    program.ends()
