"""What NVIDIA's driver reports of processes when the node's clock is set: its samples use that clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from prolog_epilog import read_nvidia
from prolog_epilog.read_nvidia import NvidiaReader, _Gpu


class Driver:
    """Samples of one process that is at work half of the time, six a second, kept for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.steady = 1_700_000_000.0, 500.0
        self.samples: list[tuple[int, int, int]] = []
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.steady)
        monkeypatch.setattr(read_nvidia, "BusyLists", lambda api: self)

    def run(self, seconds: float, percent: int = 50) -> None:
        for _ in range(int(seconds * 6)):
            self.wall, self.steady = self.wall + 1 / 6, self.steady + 1 / 6
            self.samples.append((77, int(self.wall * 1e6), percent))
        self.samples = self.samples[-100:]

    def since(self, handle: Any, time_us: int) -> list[tuple[int, int, int]]:
        return [one for one in self.samples if one[1] > time_us]


@pytest.mark.parametrize("step", [-3600.0, -30.0, -0.4, 0.4, 30.0, 3600.0])
def test_work_is_neither_doubled_nor_lost(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    driver = Driver(monkeypatch)
    reader = NvidiaReader.__new__(NvidiaReader)
    errors = {name: type(name, (Exception,), {}) for name in ("NVMLError_NotFound", "NVMLError_GpuIsLost", "NVMLError")}
    reader.api, reader._busy_lists = SimpleNamespace(**errors), None
    gpu = _Gpu("GPU-0", None, [])
    reader._processes(gpu)
    for _ in range(20):
        driver.run(0.5)
        reader._processes(gpu)
    driver.wall += step
    driver.samples = driver.samples[-30:]
    seen = []
    for _ in range(40):
        driver.run(0.5, percent=10)
        before = gpu.busy_ns
        reader._processes(gpu)
        seen.append((gpu.busy_ns - before) / 0.5e9)
    assert seen[4:] == pytest.approx([0.1] * 36), "nothing of before the step is counted for later"
    assert 5.0 + 20 * 0.1 - 0.06 <= gpu.busy_ns / 1e9 <= 5.0 + 20 * 0.1 + 1.0


@pytest.mark.parametrize("failing", ["nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"])
def test_samples_of_instances_are_freed_also_when_the_driver_fails(failing: str) -> None:
    held: set[object] = set()

    class RefusedError(Exception):
        pass

    def alloc() -> object:
        sample = object()
        held.add(sample)
        return sample

    def metrics() -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=50.0)])

    def fail(*_: object) -> None:
        raise RefusedError

    reader = NvidiaReader.__new__(NvidiaReader)
    reader.api = SimpleNamespace(
        NVMLError=RefusedError, NVML_GPM_METRICS_GET_VERSION=1, c_nvmlGpmMetricsGet_t=metrics, nvmlGpmSampleAlloc=alloc,
        nvmlGpmMigSampleGet=lambda device, number, sample: sample, nvmlGpmMetricsGet=lambda get: get,
        nvmlGpmSampleFree=held.remove,
    )  # fmt: skip
    gpu = _Gpu("GPU-0", None, [], gpm_works=True)
    assert [reader._part_busy(gpu, "MIG-0", 1)[1] is None for _ in range(3)] == [False] * 3 and len(held) == 1
    setattr(reader.api, failing, fail)
    assert [reader._part_busy(gpu, "MIG-0", 1)[1] for _ in range(3)] == [None] * 3 and len(held) == 1
