"""The benchmark of job_submit, which includes the plugin's own sources, still builds and measures."""

from __future__ import annotations

from benchmarks.submit_hook import run


def test_job_submit_is_measured_on_accepted_and_refused_requests() -> None:
    figures = run(180, 1).figures  # each of its kinds of requests ten times
    assert 0.4 < figures["refused_share"] < 0.8
    assert 0 < figures["hook_p50_us"] <= figures["hook_p99_us"] <= figures["hook_max_us"]
