"""What the agent reports of GPUs and jobs as metrics."""

from __future__ import annotations

from pathlib import Path

from prolog_epilog.accounting import Tick
from prolog_epilog.agent import Agent
from prolog_epilog.metrics import NodeExporter
from prolog_epilog.summary import Interval
from prolog_epilog.watching import Watch
from prolog_epilog.worker import Worker


def test_nothing_is_kept_of_jobs_that_ended_before_a_sample(agent: Agent, tmp_path: Path) -> None:
    """On a GPU that no other job has when it is sampled."""
    exporter = NodeExporter(agent, tmp_path / "metrics", clock=lambda: 0.0)
    agent.watcher.watches["nvidia"] = watch = Watch(Worker("nvidia"))
    for job in range(10):
        exporter.tick(Tick("GPU-0", {job: Interval(0.5, 1.0)}))
    exporter.look()
    exporter.sample(watch, {"usage": [], "full": {}})
    assert exporter._sums == {}
