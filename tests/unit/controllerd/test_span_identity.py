from __future__ import annotations

import pytest

from sluice.controllerd.spans.identity import (
    Context,
    Submission,
    job_span_id,
    own_trace,
    span_id,
    submission_in,
    submitted_in,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("comment", "context"),
    [
        (f"traceparent:00-{TRACE}-{SPAN}-01", Context(TRACE, SPAN)),
        (f"kept traceparent:00-{TRACE}-{SPAN}-00 sluice:v=1", Context(TRACE, SPAN, sampled=False)),
        (f"traceparent:00-{TRACE}-{TRACE[:16]}-01", Context(TRACE, "")),  # begun by spank_sluice
    ],
)
def test_the_trace_that_a_job_was_submitted_in(comment: str, context: Context) -> None:
    assert submitted_in(comment) == context


@pytest.mark.parametrize(
    "comment",
    [
        "",
        "sluice:v=1,rung=limiter",
        f"traceparent:00-{TRACE}-{SPAN}-01x",
        f"xtraceparent:00-{TRACE}-{SPAN}-01",
        f"traceparent:00-{TRACE.upper()}-{SPAN}-01",
        f"traceparent:00-{'0' * 32}-{SPAN}-01",
        f"traceparent:00-{TRACE}-{'0' * 16}-01",
        f"traceparent:01-{TRACE}-{SPAN}-01",
    ],
)
def test_other_comments_are_no_trace(comment: str) -> None:
    assert submitted_in(comment) is None


def test_the_jobs_span_has_the_id_that_the_job_is_given() -> None:
    """slurm_plugin/tests/test_trace.c expects the same of what computes it on the node."""
    assert job_span_id("main", TRACE, 17) == "7329bf17e919b308"


def test_ids_differ_in_everything_that_they_follow_from() -> None:
    ids = {
        span_id(cluster, trace, job, kind, start)
        for cluster in ("main", "other")
        for trace in (TRACE, TRACE[::-1])
        for job in (17, 18)
        for kind in ("wait", "run")
        for start in (1.0, 2.0)
    }
    assert len(ids) == 32 and all(len(one) == 16 and int(one, 16) for one in ids)
    assert own_trace("main", 17, 1) != own_trace("main", 17, 2)


def test_what_was_kept_of_a_submission() -> None:
    """As slurm_plugin/tests/test_trace.c expects it of what writes it."""
    comment = f"traceparent:00-{TRACE}-{SPAN}-01 submitted:1760000000200000,37,1760000000123456"
    assert submission_in(comment) == Submission(1760000000.2, 37e-6, 1760000000.123456)
    assert submission_in(f"{comment.rpartition(',')[0]} sluice:v=1") == Submission(1760000000.2, 37e-6)
    assert submitted_in(comment) == Context(TRACE, SPAN)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "submitted:1,2",
        "xsubmitted:1760000000200000,37",
        "submitted:1760000000200000",
        "submitted:1760000000200000,37,",
        "submitted:1760000000200000,37x",
        "submitted:1760000000200000,1234567890",
    ],
)
def test_other_words_are_no_submission(words: str) -> None:
    assert submission_in(words) is None
