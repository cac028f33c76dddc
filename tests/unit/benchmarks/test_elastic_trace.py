"""Gangs and chains that a history does not have."""

from __future__ import annotations

from benchmarks.elastic_trace import related
from sluice.simulate.traces import Trace, TraceJob


def test_jobs_of_several_nodes_are_gangs_and_jobs_wait_for_the_one_before() -> None:
    history = Trace("test", [TraceJob("a", 0, 10, 16), TraceJob("b", 5, 10, 1), TraceJob("c", 5, 10, 20, nodes=4)])
    jobs, relations = related(history, 8, 100, 1)
    assert [(job.gpus, job.nodes, job.submit) for job in jobs.jobs] == [
        *[(8, 1, 0)] * 2, (1, 1, 5), *[(5, 1, 5)] * 4
    ]  # fmt: skip
    assert relations.gangs == {0: 1, 1: 1, 3: 3, 4: 3, 5: 3, 6: 3}
    assert relations.after == {2: 0, 3: 2, 4: 2, 5: 2, 6: 2}
    assert related(history, 8, 0, 1)[1].after == {}
