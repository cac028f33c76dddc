"""What several modules use."""

from __future__ import annotations

from pathlib import Path

import pytest

from prolog_epilog.agent import Agent
from prolog_epilog.state import Settings
from tests.unit.prolog_epilog.examples import GIB, device


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    made = Agent(Settings(run=tmp_path / "run", records=tmp_path / "records", policy=tmp_path / "sluice.policy"))
    made.state.devices = [device(0), device(1)]
    made.contexts.measured = {device(0).kind: {"total": 80 * GIB, "context": GIB // 2}}
    made.state.jobs.prepare()
    made.state.store.prepare()
    return made
