"""Samples of a vendor's GPUs, and who reads them."""

from __future__ import annotations

import pytest

from prolog_epilog.agent import Agent
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker


def test_readers_get_each_sample_with_the_vendors_whole_answer(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, seen = Watch(Worker("nvidia")), []
    answer = {"usage": [["GPU-0", 5, 7]], "temperature": {"GPU-0": 50}}
    monkeypatch.setattr(watch.worker, "ask", lambda **_: answer)

    def read(of: Watch, told: dict[str, object]) -> None:
        seen.append((of.samples, told))
        agent.state.stopping.set()

    agent.watcher.on_sample.append(read)
    agent.watcher._watch(watch)
    assert seen == [(1, answer)] and watch.held == {("GPU-0", 5): 7}
