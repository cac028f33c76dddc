"""What the agent does first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gres_probe.inventory import Inventory
from policy.node_limits import NodeStrangers
from prolog_epilog.contexts import Contexts
from prolog_epilog.devices import NodeDevice
from prolog_epilog.state import Settings, State
from prolog_epilog.vigil import Vigil
from prolog_epilog.watching import Watch, Watcher
from prolog_epilog.worker import Worker
from sluice.base.errors import SluiceError


def test_the_watch_begins_without_what_takes_long_to_load() -> None:
    program = "import sluice.cli.agent, prolog_epilog.vigil, sys; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_samples_count_before_there_is_anybody_to_tell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(Settings(run=tmp_path, records=tmp_path / "records"))
    watcher, watch, told = Watcher(state, NodeStrangers), Watch(Worker("nvidia")), threading.Event()
    watcher.on_sample.append(lambda *_: told.set())
    monkeypatch.setattr(watch.worker, "ask", lambda **_: {"usage": []})
    watcher.notifying.clear()
    thread = threading.Thread(target=watcher._watch, args=(watch,))
    thread.start()
    with state.sampled:
        assert state.sampled.wait_for(lambda: watch.delivered, 20)
    assert not told.is_set()
    watcher.notifying.set()
    with state.lock:
        watch.look()
    assert told.wait(20)
    state.stopping.set()
    with state.lock:
        watch.look()
    thread.join(20)


def test_only_the_first_agent_since_the_boot_waits_long_for_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def probe(*, timeout: float, **_: Any) -> Inventory:
        waited.append(timeout)
        return Inventory("n1")

    monkeypatch.setattr("gres_probe.probe.probe_node", probe)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for _ in range(2):
        vigil = Vigil(Settings(run=tmp_path / "run", records=tmp_path / "records"))
        began = time.monotonic()
        vigil.begin()
        assert time.monotonic() - began < 20  # there is no driver to wait for
        os.close(vigil._lock)
    assert waited == [50.0, 10.0]


def test_drivers_that_give_no_context_delay_the_watch_together_and_not_each(tmp_path: Path) -> None:
    state = State(Settings(run=tmp_path, records=tmp_path / "records"))
    (tmp_path / "agent").mkdir()
    state.devices = [
        NodeDevice(i, "nvidia", f"GPU {i}", f"GPU-{i}", f"{i}", (), f"/dev/nvidia{i}", 81920, "570", None, "", ())
        for i in range(3)
    ]
    watcher, asked = Watcher(state, NodeStrangers), []

    def ask(*, timeout: float, **_: Any) -> None:
        asked.append(timeout)
        time.sleep(timeout)
        raise SluiceError("the nvidia driver gives no answer", remedy="see dmesg")

    watcher.watches["nvidia"] = Watch(Worker("nvidia"))
    watcher.watches["nvidia"].worker.ask = ask  # type: ignore[method-assign, assignment]
    contexts = Contexts(state)
    contexts.measure(watcher, time.monotonic() + 0.2)
    assert len(asked) == 1 and asked[0] <= 0.2
    assert contexts.path.exists()  # the next agent does not wait as long again
