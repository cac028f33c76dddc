"""HIP 7, as its public sources have it: versioned symbols, look-ups of its own names with dlsym, entry points that are
called by the runtime itself, programs that bind to it early. A stand-in that grants everything is behind them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from limited import MIB, Job, new_job

from sluice.core.limit import Device
from tests.programs.build import build_library, build_program

CONTEXT = 10
BEGIN = """
import ctypes as c, json, os
MIB = 1 << 20
hip = c.CDLL("libamdhip64.so.7", mode=int(os.environ.get("MODE", "0")))
def taken(call, mib, *more):
    return call(c.byref(c.c_void_p()), c.c_size_t(mib * MIB), *more)
def found(look, name, flags, *version):
    it = c.c_void_p()
    code = look(name.encode(), c.byref(it), *version, c.c_ulonglong(flags), c.byref(c.c_int()))
    assert code == 0, (name, code)
    return c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_size_t, c.c_void_p)(it.value)
"""
# All of its own public names are versioned, and may be bound to at once or within the library.
LINKS = {"interposable": [], "bound within": ["-Wl,-Bsymbolic"]}


@pytest.fixture(params=LINKS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "hip"
    folder.mkdir()
    versions = folder / "versions"
    versions.write_text("hip_4.2 { global: hip*; local: *; };\nhip_7.1 { global: hipGetDriverEntryPoint*; } hip_4.2;\n")
    library = folder / "libamdhip64.so.7"
    soname = ["-DHIP7", "-Wl,-soname,libamdhip64.so.7", f"-Wl,--version-script={versions}"]
    build_library("hip_stand_in", library, *soname, *LINKS[request.param])
    device = Device(1 << 40, (CONTEXT + 100) * MIB, CONTEXT * MIB, pci="0000:05:00.0")
    made = new_job(tmp_path / "region", {**os.environ, "LD_LIBRARY_PATH": str(folder)}, [device])
    yield made
    made.end()


def test_calls_that_the_runtime_makes_itself_are_charged_once(job: Job) -> None:
    """hipExtMallocWithFlags finds and calls hipMalloc: neither recursion, nor a second charge."""
    out, err = job.run(
        BEGIN
        + """
said = [taken(hip.hipExtMallocWithFlags, 101, 0), taken(hip.hipExtMallocWithFlags, 60, 0)]
print(json.dumps([*said, taken(hip.hipMalloc, 41), taken(hip.hipMalloc, 40)]))
"""
    )
    assert json.loads(out) == [2, 0, 2, 0], err


@pytest.mark.parametrize("deep", [False, True], ids=["", "deep binding"])
def test_functions_found_by_name_are_limited(job: Job, deep: bool) -> None:
    """With RTLD_DEEPBIND the runtime's own dlsym is the C library's, and it finds its own functions."""
    out, err = job.run(
        BEGIN
        + """
said = []
for look, version in (hip.hipGetProcAddress, (700,)), (hip.hipGetDriverEntryPoint, ()), \\
        (hip.hipGetDriverEntryPoint_spt, ()):
    for flags in 0, 2:  # like HIP, the stand-in has no hipMallocAsync_spt; its pools are nobody's, and cost nothing
        for name in "hipMalloc", "hipMallocAsync":
            said.append(found(look, name, flags, *version)(c.addressof(c.c_void_p()), 101 * MIB, None))
print(json.dumps(said))
""",
        MODE=str(os.RTLD_LAZY | os.RTLD_DEEPBIND) if deep else "0",
    )
    assert json.loads(out) == 6 * [2, 0], err


@pytest.mark.parametrize("deep", [False, True], ids=["", "deep binding"])
@pytest.mark.parametrize(("version", "place"), [(500, 256), (600, 288)])
def test_properties_found_by_name_have_the_form_that_was_asked_for(
    job: Job, version: int, place: int, deep: bool
) -> None:
    out, err = job.run(
        BEGIN
        + f"""
properties = c.create_string_buffer(4096)
code = found(hip.hipGetProcAddress, "hipGetDeviceProperties", 0, {version})(c.addressof(properties), 0, None)
print(json.dumps([code, [i for i in range(0, 800, 8) if any(properties.raw[i:i + 8])]]))
print(int.from_bytes(properties.raw[{place}:{place} + 8], "little") // MIB)
""",
        MODE=str(os.RTLD_LAZY | os.RTLD_DEEPBIND) if deep else "0",
    )
    first, total = out.splitlines()
    assert json.loads(first) == [0, [place]], err
    assert int(total) == CONTEXT + 100


def test_a_program_that_was_linked_to_versioned_names(job: Job, tmp_path: Path) -> None:
    """Bound at its start (BIND_NOW), to hipMalloc@hip_4.2; the limiter's functions have no version."""
    folder = job.environment["LD_LIBRARY_PATH"]
    program = build_program("hip_linked", tmp_path / "linked", "-Wl,-z,now", f"-L{folder}", "-l:libamdhip64.so.7")
    out, err = job.run([str(program)])
    assert out == "2 0 2\n", err
