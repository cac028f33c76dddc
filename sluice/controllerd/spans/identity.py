"""IDs of traces and spans, and what job_submit kept of a submission.

IDs follow from what they are of, so that what is sent twice is one for who receives it.

The job's own span ID is computed on the node, too (slurm_plugin/rules/trace.c), as the job has it in its environment.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_WORD = re.compile(r"(?:^|\s)traceparent:00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])(?=\s|\Z)")
_SUBMITTED = re.compile(r"(?:^|\s)submitted:(\d{16}),(\d{1,9})(?:,(\d{16}))?(?=\s|\Z)")
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Context:
    """The trace that a job was submitted in."""

    trace: str  # 32 digits
    parent: str  # 16 digits; empty: the job begins the trace
    sampled: bool = True


def submitted_in(admin_comment: str) -> Context | None:
    """What job_submit kept of the submitting environment; None where it kept nothing."""
    match = _WORD.search(admin_comment)
    if match is None or not match[1].strip("0") or not match[2].strip("0"):
        return None
    begun = match[1].startswith(match[2])  # by Sluice, for a job that nobody traced
    return Context(match[1], "" if begun else match[2], match[3] == "1")


@dataclass(frozen=True, slots=True)
class Submission:
    """When a job came to slurmctld, in seconds since 1970, and how long its checks there took."""

    arrived: float
    checks_s: float
    began: float | None = None  # when its client had read its options, by the client's clock: a tenant's claim


def submission_in(admin_comment: str) -> Submission | None:
    """What job_submit kept of a submission that was passed with a trace; None where it kept nothing."""
    match = _SUBMITTED.search(admin_comment)
    if match is None:
        return None
    return Submission(int(match[1]) / 1e6, int(match[2]) / 1e6, int(match[3]) / 1e6 if match[3] else None)


def own_trace(cluster: str, job: int, submit: int) -> Context:
    """The trace of a job that was submitted without one. `job`: of an array or heterogeneous job, its first number."""
    return Context(hashlib.sha256(f"{cluster} {job} {submit}".encode()).hexdigest()[:32], "")


def job_span_id(cluster: str, trace: str, job: int) -> str:
    """The ID of the span of a whole job."""
    return _hash(f"{cluster[:40]} {trace} {job} job")


def span_id(cluster: str, trace: str, job: int, kind: str, start: float) -> str:
    """The ID of another span of a job: of a kind, with what tells it from others of that kind, and its start."""
    return _hash(f"{cluster} {trace} {job} {kind} {start:.6f}")


def _hash(text: str) -> str:
    """FNV-1a of 64 bits, and MurmurHash3's last steps."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & _MASK
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    value ^= value >> 33
    return f"{value or 1:016x}"
