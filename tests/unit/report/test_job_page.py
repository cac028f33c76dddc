"""The page of one job."""

from __future__ import annotations

from typing import Any

from sluice.report.job_page import named


def test_nodes_of_the_start_have_names_where_the_records_have_numbers() -> None:
    def told(*nodes: tuple[str, int]) -> dict[str, Any]:
        return {"start": {"at": 1.0, "parts": [{"node": node, "gpus": [gpu]} for node, gpu in nodes]}}

    one = told(("node 7", 0), ("node 7", 3))  # shares of two GPUs
    assert named(one, ["g-8"]) == told(("g-8", 0), ("g-8", 3))
    assert named(told(("node 7", 0), ("node 9", 0)), ["g-8", "g-10"]) == told(("g-8", 0), ("g-10", 0))
    unlike = told(("node 7", 0), ("node 9", 1))
    assert named(unlike, ["g-8", "g-10"]) == unlike, "which is which is not known"
    assert named(told(("g-1", 0)), ["g-1"]) == told(("g-1", 0))
    assert named(one, []) == one and named({"job": "1"}, ["g-1"]) == {"job": "1"}
    assert named({"start": None}, ["g-1"]) == {"start": None}
