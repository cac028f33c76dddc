from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy.document import parse
from policy.node import compile_node
from prolog_epilog.health import memory
from prolog_epilog.health.monitor import Monitor
from prolog_epilog.server import Peer
from prolog_epilog.state import RefusalError
from sluice.base.errors import SluiceError
from sluice.exchange.readings import Reading

PEER = Peer(1, 0)


class Vendor:
    """A vendor's thread: answers as soon as it is asked for everything, unless it hangs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.worker = SimpleNamespace(vendor="nvidia")
        self.problem: SluiceError | None = None
        self.held: dict[tuple[str, int], int] = {}
        self.owners: dict[int, Any] = {}
        self.full = False
        self.hangs = False
        self.wanted = SimpleNamespace(set=self._asked)
        self.readings: dict[str, dict[str, Any]] = {}

    def _asked(self) -> None:
        if self.full and not self.hangs:
            self.full = False
            told = {uuid: Reading(uuid, **fields).to_dict() for uuid, fields in self.readings.items()}
            self.node.monitor.on_sample(self, {"full": told})  # type: ignore[arg-type]


class Node:
    """An agent's parts around a monitor."""

    def __init__(self, folder: Path, text: str = "health: {checks: {driver: {window: 0s}}}") -> None:
        lock = threading.RLock()
        self.state = SimpleNamespace(
            lock=lock, sampled=threading.Condition(lock), records={}, node="n1", stopping=threading.Event()
        )
        self.vendor = Vendor(self)
        self.folder = folder
        self.sent: list[dict[str, Any]] = []
        self.answer: dict[str, Any] | SluiceError = {"time": time.time(), "returned": [], "held_back": False}
        (folder / "sluice.node.json").write_text(compile_node(parse(text)).render())
        self.device = folder / "nvidia0"
        self.device.touch()
        self.monitor = self.restart()

    def restart(self) -> Monitor:
        self.monitor = Monitor(
            self.state,
            SimpleNamespace(watches={"nvidia": self.vendor}),  # type: ignore[arg-type]
            policy=self.folder / "sluice.node.json",
            memory=self.folder / "health.json",
            send=self.send,
            spools=[str(self.folder / "%n")],
        )
        partition = SimpleNamespace(uuid="MIG-1")
        gpu = SimpleNamespace(
            uuid="GPU-0", vendor="nvidia", model="H100", nics=[], driver_version="570", partitions=[partition]
        )
        self.monitor.start(SimpleNamespace(gpus=[gpu], device_files=[str(self.device)]))  # type: ignore[arg-type]
        self.vendor.readings = {"GPU-0": {"temperature_c": 40.0, "rows_failed": False}}
        return self.monitor

    def send(self, report: dict[str, Any]) -> dict[str, Any]:
        self.sent.append(report)
        if isinstance(self.answer, SluiceError):
            raise self.answer
        return self.answer

    def faults(self) -> list[str]:
        report = self.monitor.round()
        assert report is not None
        return [fault.check for fault in report.faults if fault.check != "free_space"]

    def refuses(self, uuid: str = "GPU-0") -> str:
        try:
            self.monitor.refuse_sick([SimpleNamespace(uuid=uuid)])  # type: ignore[list-item]
        except RefusalError as error:
            return str(error)
        return ""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    def node_devices(inventory: Any) -> list[Any]:
        return [SimpleNamespace(gpu=0, files=tuple(inventory.device_files))]

    monkeypatch.setattr("prolog_epilog.health.monitor.node_devices", node_devices)
    return Node(tmp_path)


def test_a_round_asks_judges_and_reports(node: Node) -> None:
    assert node.faults() == []
    node.vendor.readings["GPU-0"]["rows_failed"] = True
    assert node.faults() == ["row_remap_failed"]
    node.monitor.deliver()
    (report,) = node.sent
    assert report["faults"][0]["acts"] is True and report["faults"][0]["numbers"] == (0,)
    node.monitor.deliver()
    assert len(node.sent) == 1  # nothing new


def test_what_another_preflight_finds_is_another_fault(node: Node) -> None:
    """So that the controllers, who let a node be that a person has resumed, drain it again."""
    node.monitor._fabric = lambda: {"fabric_link": ["node n1's link mlx5_0 slow"]}

    def began() -> float:
        report = node.monitor.round()
        assert report is not None
        [fault] = [one for one in report.faults if one.check == "fabric_link"]
        return fault.began

    first = began()
    assert began() == first, "rounds look at the same preflight"
    node.monitor.found_again(["fabric_link"])
    assert began() > first


def test_what_is_written_is_not_changed_by_a_preflight_meanwhile(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []

    def copied(subject: Any) -> dict[str, Any]:
        locked.append(node.monitor._lock.locked())
        return asdict(subject)

    node.monitor._fabric = lambda: {"fabric_link": ["node n1's link mlx5_0 slow"]}
    monkeypatch.setattr(memory, "asdict", copied)
    assert node.monitor.round()
    assert locked and all(locked)


def test_a_driver_that_hangs_holds_a_round_up_for_some_seconds_only(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prolog_epilog.health.monitor.ANSWER_S", 0.3)
    node.vendor.hangs = True
    began = time.monotonic()
    assert node.faults() == ["driver"]
    assert time.monotonic() - began < 2
    answer = node.monitor.check(peer=PEER, fresh=False)["report"]
    assert "gpu_lost" in answer["gpus"][0]["unknown"]
    node.vendor.hangs = False
    assert node.faults() == []


def test_prologs_refuse_what_quick_checks_found_and_nothing_else(node: Node) -> None:
    node.vendor.readings["GPU-0"] |= {"temperature_c": 99.0, "pages_retired": 70}
    node.faults()
    assert node.refuses() == ""  # neither is quick
    node.vendor.readings["GPU-0"] |= {"rows_failed": True}
    node.faults()
    assert "GPU 0: row_remap_failed" in node.refuses()
    assert "row_remap_failed" in node.refuses("MIG-1")  # a partition of it
    assert node.refuses("GPU-9") == ""
    node.device.unlink()
    node.vendor.readings["GPU-0"] |= {"rows_failed": False}
    assert "row_remap_failed" in node.refuses()
    node.faults()
    assert "no device file" in node.refuses() or "device_file" in node.refuses()


def test_without_room_for_jobs_prologs_refuse_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"n1": 900.0}
    monkeypatch.setattr("prolog_epilog.health.monitor._room_mib", lambda path: room[Path(path).name])
    assert node.faults() == []
    assert node.refuses() == ""
    room["n1"] = 3.0
    assert f"no room in {node.folder}/n1" in node.refuses()  # no round has seen it yet
    assert node.faults() == ["spool"]
    assert "3 MiB free" in node.refuses()
    node.monitor.deliver()
    assert node.sent[-1]["room"] is False and node.sent[-1]["refused_at"] > 0
    room["n1"] = 900.0
    assert node.faults() == []
    node.monitor.deliver()
    assert node.sent[-1]["room"] is True
    assert node.refuses() == ""


def test_with_the_breaker_open_or_in_shadow_prologs_refuse_nothing(node: Node) -> None:
    node.vendor.readings["GPU-0"] |= {"rows_failed": True}
    node.faults()
    node.answer = {"time": time.time(), "returned": [], "held_back": True}
    node.monitor.deliver()
    assert node.refuses() == ""
    node.answer = {"time": time.time(), "returned": [], "held_back": False}
    node.faults()
    node.monitor.deliver()
    assert node.refuses()
    (node.folder / "sluice.node.json").write_text(compile_node(parse("health: {mode: shadow}")).render())
    node.faults()
    assert node.refuses() == ""


def test_without_controllers_it_says_so_and_goes_on(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.answer = SluiceError("no controller answers")
    for _ in range(3):
        node.faults()
        node.monitor.deliver()
    assert capsys.readouterr().err.count("no health report was accepted") == 1
    report = node.monitor.round()
    assert report is not None and report.undelivered_since is not None
    node.answer = {"time": time.time() - 100, "returned": [], "held_back": False}
    node.monitor.deliver()
    assert node.faults() == ["clock_skew"]  # it is a hundred seconds ahead of the controller


def test_what_a_person_returns_is_forgotten_and_all_else_outlives_the_agent(node: Node) -> None:
    for _ in range(5):
        node.vendor.readings["GPU-0"]["rows_failed"] = True
        node.faults()
        node.vendor.readings["GPU-0"]["rows_failed"] = False
        node.faults()
    assert node.faults() == ["repeated"]
    node.restart()
    assert node.faults() == ["repeated"]
    node.answer = {"time": time.time(), "returned": ["GPU-0"], "held_back": False}
    node.monitor.deliver()
    assert node.faults() == []


def test_mode_off(node: Node) -> None:
    (node.folder / "sluice.node.json").write_text(compile_node(parse("health: {mode: off}")).render())
    assert node.monitor.round() is None
    assert node.monitor.check(peer=PEER) == {"report": None}


def test_a_reading_that_makes_no_sense_is_said_and_is_no_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolog_epilog.health.monitor.ANSWER_S", 0.2)
    node.vendor.hangs = True
    node.monitor.on_sample(node.vendor, {"full": {"GPU-0": "hot"}})  # type: ignore[arg-type]
    assert node.faults() == ["driver"]
