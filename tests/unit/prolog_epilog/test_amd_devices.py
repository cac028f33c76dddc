"""AMD GPUs in partitions, as the agent reads and limits them; through the unmodified amdsmi."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_sim import library_dir, load_platform, write_node_state
from gpu_sim.fields import get_values, set_values
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from prolog_epilog.agent import Agent
from prolog_epilog.devices import NodeDevice
from prolog_epilog.rungs.share import partition_percent
from prolog_epilog.state import MIB, RefusalError, Settings
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker
from sluice.exchange.record import Grant, JobRecord

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("amdsmi") is None, reason="the package amdsmi is missing"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the agent's folders are root's"),
]
PART_MIB = (196592 - 284) // 8
CONTEXT = 310 * MIB  # of the simulated MI300X

# Fills the device that $ROCR_VISIBLE_DEVICES names, at a load; prints what it got in MiB and waits.
FILL = """
import ctypes as c, sys
hip, p, got = c.CDLL("libamdhip64.so"), c.c_void_p(), 0
assert hip.hipSetDevice(0) == 0
while (code := hip.hipMalloc(c.byref(p), c.c_size_t(1 << 20))) == 0:
    got += 1
assert hip.sluice_sim_load(0, int(sys.argv[1])) == 0
print(got, code, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sim"
    write_node_state(folder, load_platform("mi300x-platform"), "n1")
    monkeypatch.setenv("SLUICE_SIM_STATE", str(folder / "state"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library_dir()))
    set_values(folder, 0, {"partitions": "cpx-nps1"})
    return folder


@pytest.fixture
def worker(sim: Path) -> Iterator[Worker]:
    made = Worker("amd", timeout=20)
    yield made
    made.close()


def uuids(sim: Path) -> list[str]:
    gpu = get_values(sim, 0)["uuid"]
    return [f"{gpu}/{part}" for part in range(8)]


def test_each_partition_has_its_own_memory_processes_and_time(sim: Path, worker: Worker) -> None:
    parts, other = uuids(sim), get_values(sim, 1)["uuid"]
    command = [sys.executable, "-c", FILL, "500"]
    environment = {**os.environ, "ROCR_VISIBLE_DEVICES": "3"}
    assert worker.ask(do="sample", devices=[*parts, other], used=True)["usage"] == []
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline().split() == [str(PART_MIB - 310), "2"]
        answer: dict[str, Any] = {}
        for _ in range(3):
            answer = worker.ask(do="sample", devices=[*parts, other], used=True, full=True)
        assert answer["usage"] == [[parts[3], program.pid, PART_MIB * MIB]]
        assert {uuid for uuid, size in answer["used"].items() if size} >= {parts[3]}
        assert answer["used"][parts[3]] == PART_MIB * MIB and answer["used"][parts[2]] == 0
        devices = answer["devices"]
        assert devices[parts[3]]["busy_ns"] > 0 and devices[parts[2]]["busy_ns"] == 0
        assert (devices[parts[3]]["share"], devices[other]["share"]) == (1 / 8, 1.0)
        assert list(answer["busy"][parts[3]]) == [str(program.pid)] and answer["busy"][parts[2]] == {}
        readings = answer["full"]
        assert len(readings) == 8 and readings[parts[0][:-2]]["parts"] == parts and "parts" not in readings[other]
        [some] = worker.ask(do="sample", some=[parts[5]])["some"].values()  # an instance names its GPU
        assert some["uuid"] == parts[0][:-2]
        program.stdin.close()
    assert worker.ask(do="sample", used=True)["usage"] == []


def agent_of(folder: Path, worker: Worker, device: NodeDevice, **limits: Any) -> Agent:
    run = folder / "run"
    agent = Agent(Settings(run=run, records=run / "records", policy=run / "sluice.policy", memory_wait=3.0))
    for path in (run, run / "agent"):
        path.mkdir()
    for store in (agent.state.jobs, agent.state.store, agent.state.outbox):
        store.prepare()
    (run / "sluice.node.json").write_text(NodePolicy(limits=NodeLimits(**limits)).render())
    agent.watcher.watches["amd"] = Watch(worker)
    agent.state.devices = [device]
    return agent


def device_of(sim: Path, part: int) -> NodeDevice:
    files = (f"/dev/dri/renderD{136 + part - 1}",)
    return NodeDevice(
        0, "amd", "AMD Instinct MI300X", uuids(sim)[part], "", files, files[0], PART_MIB, "6.10.5", 0, "", (),
        "cpx-nps1", ordinal=part, siblings=8,
    )  # fmt: skip


def record_of(device: NodeDevice, limit: int | None, **more: Any) -> JobRecord:
    grant = Grant(0, device.uuid, device.vendor, device.model, device.memory_mib * MIB, limit, limit)
    return JobRecord(7, 0, "ann", "physics", "main", "n1", 1.0, grants=[grant], **more)


@pytest.mark.parametrize(
    ("limit", "ladder", "rung", "passed"),
    [
        (None, ("mig", "limiter", "watchdog"), "mig", {}),
        (PART_MIB * MIB, ("mig", "limiter", "watchdog"), "mig", {}),
        (
            4096 * MIB,
            ("mig", "driver", "mps", "limiter", "watchdog"),
            "watchdog",
            {
                "mig": "the limit is less than the instance",
                "driver": "amd's driver has no such limit",
                "mps": "amd has no MPS",
                "limiter": "HIP gives the partitions of a GPU one PCI address",
            },
        ),
    ],
)
def test_the_rung_follows_from_the_device(
    tmp_path: Path, sim: Path, worker: Worker, limit: int | None, ladder: Any, rung: str, passed: dict[str, str]
) -> None:
    device = device_of(sim, 2)
    agent = agent_of(tmp_path, worker, device, ladder=ladder)
    record = record_of(device, limit)
    agent.jobs._ladder.hold(record)
    assert (record.grants[0].rung, record.grants[0].passed_over) == (rung, passed)


def test_no_rung_weaker_than_the_policy_allows_holds_a_part_of_a_partition(
    tmp_path: Path, sim: Path, worker: Worker
) -> None:
    device = device_of(sim, 2)
    agent = agent_of(tmp_path, worker, device, ladder=("mig", "limiter"))
    with pytest.raises(RefusalError, match="no rung that can hold its limit"):
        agent.jobs._ladder.hold(record_of(device, 4096 * MIB))


def test_a_partition_is_a_share_of_its_gpu(tmp_path: Path, sim: Path, worker: Worker) -> None:
    device = device_of(sim, 2)
    assert partition_percent(device) == 12
    agent = agent_of(tmp_path, worker, device)
    record = record_of(device, None, share_percent=12)
    agent.jobs._ladder.choose_share(record)
    assert record.share_by == "mig"
    with pytest.raises(RefusalError, match="the partition has 12 % of its GPU"):
        agent.jobs._ladder.choose_share(record_of(device, None, share_percent=13))


def test_contexts_are_measured_and_memory_cleared_on_the_partition_itself(
    tmp_path: Path, sim: Path, worker: Worker
) -> None:
    device = device_of(sim, 2)
    agent = agent_of(tmp_path, worker, device, scrub=True)
    agent.contexts.measure(agent.watcher, time.monotonic() + 60)
    assert agent.contexts.of(device) == {"context": CONTEXT, "total": PART_MIB * MIB}
    (sim / "vram").write_bytes(b"\0" * 65536)  # a driver that clears nothing
    record = record_of(device, None)
    agent.state.records[7] = record
    assert agent.jobs._gpu_reset.reset(record, {}) == {}
    [event] = record.events
    assert event.action == "scrub" and 0.97 < event.detail["bytes"] / (PART_MIB * MIB - CONTEXT) <= 1
    stored = json.loads((tmp_path / "run/agent/contexts.json").read_text())
    assert list(stored) == [device.kind]
