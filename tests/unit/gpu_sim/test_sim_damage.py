"""Damaged state files: a driver returns an error of its own for any content, and never ends the program."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from sim_node import Node

from gpu_sim import layout, read_state
from sluice.base.errors import SluiceError

# Reads damage numbers from standard input and answers each with the results of one function of each library.
DRIVERS = """
import ctypes as c, json, sys
nvml = c.CDLL("libnvidia-ml.so.1")
smi = c.CDLL("libamd_smi.so")
zes = c.CDLL("libze_loader.so.1")
device = c.c_void_p()
name, used = c.create_string_buffer(256), c.create_string_buffer(64)
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, c.byref(device)) == 0
print("ready", flush=True)
for line in sys.stdin:
    codes = [nvml.nvmlDeviceGetName(device, name, 256), nvml.nvmlDeviceGetMemoryInfo(device, used),
             nvml.nvmlDeviceGetNvLinkState(device, 17, used), smi.amdsmi_init(c.c_uint64(2)), zes.zesInit(0)]
    print(json.dumps(codes), flush=True)
"""
CORRUPTED, NOT_LOADED = 14, 9
UNEXPECTED = 43  # AMDSMI_STATUS_UNEXPECTED_DATA


def test_no_damage_ends_a_program(dgx: Node, full_scale: bool) -> None:
    whole = dgx.state.read_bytes()
    chance = random.Random(7)
    damaged = [b"", whole[:7], whole[:-1], whole + b"\0", b"\0" * len(whole), whole[: len(whole) // 2]]
    for _ in range(2000 if full_scale else 100):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] ^= chance.randint(1, 255)
        damaged.append(bytes(data))
    with dgx.start(DRIVERS) as program:
        assert program.stdin and program.stdout
        assert program.stdout.readline() == "ready\n"
        for data in damaged:
            dgx.state.write_bytes(data)
            program.stdin.write("\n")
            program.stdin.flush()
            codes = json.loads(program.stdout.readline())
            assert codes[:3] == [CORRUPTED] * 3
            assert 0 not in codes
        program.stdin.close()


def test_a_sealed_state_with_absurd_figures_is_no_danger(dgx: Node) -> None:
    """The checksum is right here: only the checks of values reject it."""
    absurd = {
        "link_count": 255,
        "process_count": 2**31,
        "profile_count": 99,
        "vendor": 7,
        "memory_reserved_mib": 2**32 - 1,
        "tiles": 0,
        "dies": 9,
        "name": b"x" * 96,
        "uuid": b"x" * 48,
    }
    whole = dgx.state.read_bytes()
    for field, value in absurd.items():
        dgx.state.write_bytes(whole)
        state = read_state(dgx.folder)
        if isinstance(value, bytes):
            offset = getattr(layout.Gpu, field).offset
            gpu = bytearray(bytes(state.gpus[0]))
            gpu[offset : offset + len(value)] = value
            state.gpus[0] = layout.Gpu.from_buffer_copy(gpu)
        else:
            setattr(state.gpus[0], field, value)
        dgx.state.write_bytes(state.to_bytes())
        assert dgx.run('import ctypes; print(ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2())') == CORRUPTED, field


def test_an_amd_gpu_in_no_mode_is_no_danger(make_node: Callable[..., Node]) -> None:
    node = make_node("mi300x-platform")
    for mode in (0, 6, 2**32 - 1):
        state = read_state(node.folder)
        state.gpus[0].compute_partition = mode
        node.state.write_bytes(state.to_bytes())
        assert node.run('import ctypes as c; print(c.CDLL("libamd_smi.so").amdsmi_init(c.c_uint64(2)))') == UNEXPECTED


def test_python_refuses_a_damaged_state_too(dgx: Node) -> None:
    whole = dgx.state.read_bytes()
    for data, complaint in (
        (b"", "not a simulated node's state"),
        (whole[:-4], "its head says"),
        (whole[:-1] + b"\x01", "checksum"),
        (whole[:8] + b"\x63" + whole[9:], "version 99"),
    ):
        dgx.state.write_bytes(data)
        try:
            read_state(dgx.folder)
        except SluiceError as error:
            assert complaint in str(error)
        else:
            raise AssertionError(complaint)
