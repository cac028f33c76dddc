"""What a batch's job and the gateways tell each other.

The job posts objects of JSON to its batch's path, with the batch's secret as key: `results`, the answers that it has,
each as [LINE, CUSTOM_ID, STATUS, BODY]; `at`, from where it wants more requests, as the gateway has said before, null
for the begin, or absent if it wants none; `why`, if it gives up. The gateway answers with `do` (`go on` or `stop`),
with `requests` that have no result yet, each as [LINE, TEXT], and with the next `at`, null at the end. Each line of a
batch's file is a request; it is named by its number, from 1 on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path("/var/lib/sluice-gateway/files")
"""Of files and batches, unless the policy says otherwise (serving.batches.folder)."""
PROGRAM = Path("/opt/sluice/bin/sluice-batch")
JOB_PREFIX = "sluice-batch."
"""Begin of the names of batches' jobs: sluice-batch.SERVICE."""
LEAVE_S = 90
"""Before its time is over, a job ends what it has and lets Slurm queue it again."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_LINE = 4 << 20
"""Bytes of a request."""
MOST_ANSWER = 8 << 20
"""Bytes of the answer to one."""
MOST_GIVEN = 1 << 20
"""Bytes of requests that a gateway gives at a time, unless one has more."""
GIVEN = 64
"""Requests that it gives at a time."""


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where a job finds its batch."""

    gateways: tuple[str, ...]
    ca: str | None
    path: str
    secret: str = field(repr=False)
