"""A library's calls may take as long as the time between two samples: no GPU is reported busier for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from prolog_epilog import read_nvidia
from prolog_epilog.read_amd import AmdReader
from prolog_epilog.read_intel import IntelReader
from prolog_epilog.read_nvidia import NvidiaReader, _Gpu
from prolog_epilog.sampling import Reader

UUID = "GPU-0"
PERCENT = 30
PID = 77


class Machine:
    """Its clocks, and calls into a library. The GPU is always equally busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 500.0
        self.delays = cycle((0.0, 0.01, 0.4, 0.0, 0.03, 0.0, 0.2))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e9)

    def call(self, answer: Callable[[], Any]) -> Callable[..., Any]:
        """A function that takes a while."""

        def called(*_: Any) -> Any:
            self.now += next(self.delays)
            return answer()

        return called


def nvidia(machine: Machine, monkeypatch: pytest.MonkeyPatch, *, by_process: bool) -> Reader:
    errors = {name: type(name, (Exception,), {}) for name in ("NVMLError_NotFound", "NVMLError_GpuIsLost", "NVMLError")}
    since = machine.call(lambda: [(PID, int(time.time() * 1e6), PERCENT)])
    monkeypatch.setattr(read_nvidia, "BusyLists", lambda _: SimpleNamespace(since=since))
    reader = NvidiaReader.__new__(NvidiaReader)
    reader.api = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=machine.call(lambda: 0),
        nvmlDeviceGetCurrentClocksThrottleReasons=machine.call(lambda: 0),
        nvmlDeviceGetUtilizationRates=machine.call(lambda: SimpleNamespace(gpu=PERCENT)),
        **errors,
    )
    reader.gpus, reader._busy_lists = [_Gpu(UUID, None, [], by_process=by_process)], None
    return reader


def amd(machine: Machine, monkeypatch: pytest.MonkeyPatch, *, by_process: bool) -> Reader:
    def processes(_: Any) -> list[dict[str, Any]]:
        return [{"pid": PID, "engine_usage": {"gfx": machine.now * PERCENT * 1e7 if by_process else 0}}]

    api = SimpleNamespace(
        AmdSmiException=type("AmdSmiException", (Exception,), {}),
        amdsmi_get_gpu_activity=machine.call(lambda: {"gfx_activity": PERCENT}),
        amdsmi_get_energy_count=machine.call(lambda: None),
        amdsmi_get_violation_status=machine.call(lambda: None),
        amdsmi_get_gpu_process_list=processes,
    )
    return AmdReader(api, [(UUID, [(UUID, None)])])


def intel(machine: Machine, monkeypatch: pytest.MonkeyPatch, *, by_process: bool) -> Reader:
    def get(function: str, *_: Any) -> Any:
        machine.now += next(machine.delays)
        now = int(machine.now * 1e6)
        engine = {"activeTime": now * PERCENT // 100, "timestamp": now}
        return SimpleNamespace(type=0, onSubdevice=False, throttleReasons=0, energy=0, **engine)

    return IntelReader(SimpleNamespace(handles=lambda *_: ["handle"], get=get), [(UUID, None)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "by_process"), [(nvidia, True), (nvidia, False), (amd, True), (amd, False), (intel, False)]
)
def test_slow_calls_change_no_utilisation(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Reader], by_process: bool
) -> None:
    machine = Machine(monkeypatch)
    reader = make(machine, monkeypatch, by_process=by_process)
    reader.activity([UUID])
    seen = []
    for _ in range(20):
        machine.now += 0.5
        devices, processes = reader.activity([UUID])
        busy = processes[UUID][PID] if by_process else devices[UUID].busy_ns
        assert busy is not None
        seen.append((devices[UUID].at_s, busy))
    shares = [(after[1] - before[1]) / (after[0] - before[0]) / 1e9 for before, after in pairwise(seen)]
    assert shares == pytest.approx([PERCENT / 100] * 19, rel=1e-6)
