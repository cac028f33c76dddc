"""What the process of a vendor reads in addition to memory, on simulated hardware of all three."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sim_node import Node

from sluice.exchange.readings import Reading

_SAMPLING = "import sys, prolog_epilog.sampling as s; sys.argv = ['', sys.argv[1]]; s.main()"
# Holds memory and is busy as standard input says; answers with its number.
_LOAD = """
import ctypes, os, sys
hip = sys.argv[1] == "hip"
lib = ctypes.CDLL("libamdhip64.so.6" if hip else "libcuda.so.1")
address, context = ctypes.c_void_p(), ctypes.c_void_p()
if hip:
    assert lib.hipSetDevice(0) == 0 and lib.hipMalloc(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0
else:
    assert lib.cuInit(0) == 0 and lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert lib.cuCtxSetCurrent(context) == 0 and lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0
print(os.getpid(), flush=True)
for line in sys.stdin:
    print(lib.sluice_sim_load(0, int(line)), flush=True)
"""


class Sampling:
    """The vendor's process on a node."""

    def __init__(self, node: Node, vendor: str) -> None:
        self.process = node.start(_SAMPLING, vendor)

    def ask(self, **request: object) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"do": "sample", **request}), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        assert "ok" in answer, answer
        return dict(answer["ok"])

    def full(self) -> list[Reading]:
        return [Reading.from_dict(fields) for fields in self.ask(full=True)["full"].values()]


@contextmanager
def sampling(node: Node, vendor: str) -> Iterator[Sampling]:
    one = Sampling(node, vendor)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


@contextmanager
def load(node: Node, kind: str, **extra: str) -> Iterator[Callable[[int], int]]:
    with node.start(_LOAD, kind, **extra) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]

        def set_load(permille: int) -> int:
            print(permille, file=process.stdin, flush=True)
            assert process.stdout is not None and process.stdout.readline().strip() == "0"
            return int(line)

        try:
            yield set_load
        finally:
            process.kill()


def test_a_full_reading_of_nvidia(dgx: Node) -> None:
    dgx.set(0, utilisation=73, temperature=61, power=512, ecc_corrected=4, remapped_correctable=2, pcie_replays=7)
    dgx.set(0, throttle="sw_power_cap,idle", link3_replays=5, link3_tx=2048, clock_graphics=1500, remap_pending="yes")
    with sampling(dgx, "nvidia") as one:
        first, *others = one.full()
        assert len(others) == 7 and not first.lost and first.problem is None
        assert (first.utilisation_percent, first.temperature_c, first.power_mw) == (73, 61, 512_000)
        assert (first.ecc_enabled, first.ecc_corrected, first.ecc_uncorrected) == (True, 4, 0)
        assert (first.rows_correctable, first.rows_pending, first.rows_failed) == (2, True, False)
        assert (first.pcie_replays, first.clock_graphics_mhz) == (7, 1500)
        assert sorted(first.throttle or []) == ["idle", "power"]
        assert len(first.links) == 18 and first.links[3].replays == 5 and first.links[3].tx_bytes == 2 << 20
        assert first.links[2].up is True and first.xids == []
        assert first.energy_mj is not None and first.temperature_shutdown_c and first.pcie_width_max == 16
        dgx.set(1, xid="48,63")
        found = one.full()[1].xids
        assert [xid for _, xid in found] == [48, 63] and abs(found[0][0] - time.time()) < 60
        assert one.full()[1].xids == []


def test_a_lost_gpu_is_listed_and_the_others_are_read(dgx: Node) -> None:
    with sampling(dgx, "nvidia") as one:
        uuid = one.full()[2].uuid
        dgx.set(2, lost="yes")
        answer = one.ask(full=True, used=True)
        readings = {name: Reading.from_dict(fields) for name, fields in answer["full"].items()}
        assert readings[uuid].lost and readings[uuid].problem
        assert sum(reading.problem is None for reading in readings.values()) == 7
        assert len(answer["used"]) == 7


def test_a_full_reading_of_amd(make_node: Callable[..., Node]) -> None:
    node = make_node("mi300x-platform")
    node.set(0, utilisation=64, temperature=71, power=600, ecc_uncorrected=1, retired_single=2, pcie_replays=3)
    node.set(0, throttle="hw_thermal", link1="down", link2_rx=10)
    with sampling(node, "amd") as one:
        first = one.full()[0]
        assert (first.utilisation_percent, first.temperature_c, first.power_mw) == (64, 71, 600_000)
        assert (first.ecc_uncorrected, first.ras_uncorrected, first.pages_retired) == (1, 0, 2)
        assert first.pcie_replays == 3 and first.throttle == ["thermal"] and first.power_limit_mw == 750_000
        assert [link.up for link in first.links[:3]] == [True, False, True] and first.links[2].rx_bytes == 10240
        assert first.pcie_generation == 5 and first.energy_mj is not None


def test_a_full_reading_of_intel(make_node: Callable[..., Node]) -> None:
    node = make_node("intel-max-1550x4")
    node.set(0, utilisation=40, temperature=55, power=300, ecc_corrected=9, pcie_replays=2, throttle="sw_power_cap")
    with sampling(node, "intel") as one:
        one.full()
        time.sleep(0.3)
        first = one.full()[0]
        assert first.utilisation_percent == pytest.approx(40, abs=1.5)
        assert first.power_mw == pytest.approx(300_000, rel=0.05)
        assert (first.temperature_c, first.ecc_corrected, first.pcie_replays) == (55, 9, 2)
        assert first.throttle == ["power"] and first.memory_total_bytes and first.links[0].up is True
        node.set(0, utilisation=0)
        time.sleep(0.2)
        one.full()
        time.sleep(0.2)
        assert one.full()[0].utilisation_percent == pytest.approx(0, abs=1)


def _grown(one: Sampling, uuid: str, seconds: float) -> tuple[float, dict[int, float]]:
    """Share of the time at work in the next seconds: the device's, and each process's, with a tick each 0.2 s."""
    begin, start = one.ask(devices=[uuid]), time.monotonic()
    while time.monotonic() - start < seconds:
        time.sleep(0.2)
        end = one.ask(devices=[uuid])
    passed = (time.monotonic() - start) * 1e9
    before = begin["busy"].get(uuid, {})
    busy = {int(pid): (ns - before.get(pid, 0)) / passed for pid, ns in end["busy"].get(uuid, {}).items()}
    return (end["devices"][uuid]["busy_ns"] - begin["devices"][uuid]["busy_ns"]) / passed, busy


@pytest.mark.parametrize(
    ("platform", "vendor", "kind"), [("dgx-h100", "nvidia", "cuda"), ("mi300x-platform", "amd", "hip")]
)
def test_time_at_work_by_process(make_node: Callable[..., Node], platform: str, vendor: str, kind: str) -> None:
    node = make_node(platform)
    uuid = node.get(0, "uuid")
    with sampling(node, vendor) as one, load(node, kind) as first, load(node, kind) as second:
        numbers = [first(300), second(450)]
        device, busy = _grown(one, uuid, 1.2)
        assert device == pytest.approx(0.75, abs=0.03)
        assert [busy[number] for number in numbers] == [pytest.approx(0.3, abs=0.02), pytest.approx(0.45, abs=0.02)]
        first(0)
        device, busy = _grown(one, uuid, 0.6)
        assert device == pytest.approx(0.45, abs=0.03) and busy[numbers[0]] == pytest.approx(0, abs=0.02)


def test_time_at_work_of_mig_instances(make_node: Callable[..., Node]) -> None:
    node = make_node("dgx-h100-mig")
    with sampling(node, "nvidia") as one:
        uuids = [uuid for uuid in one.ask(used=True)["used"] if uuid.startswith("MIG-")]
        with load(node, "cuda", CUDA_VISIBLE_DEVICES=uuids[0]) as set_load:
            set_load(500)
            device, _ = _grown(one, uuids[0], 1.0)
            assert device == pytest.approx(0.5, abs=0.02)
            assert _grown(one, uuids[1], 0.4)[0] == pytest.approx(0, abs=0.01)
