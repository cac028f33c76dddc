"""Spans of jobs: whether what they are made of is there, and may leave."""

from __future__ import annotations

from collections.abc import Iterator

from gres_probe.doctor.check import CannotCheckError, Outcome, SiteView, check, fail, ok
from policy.node import FILE_NAME, NodePolicyFile


@check("traces", "spans of jobs")
def traces(site: SiteView) -> Iterator[Outcome]:
    """They come from accounting, and leave only where PrivateData or the policy lets them."""
    settings = NodePolicyFile(site.folder / FILE_NAME).current().traces
    if not settings.endpoint:
        raise CannotCheckError("the policy has no traces.endpoint")
    private = site.option("PrivateData")
    problems = []
    if not site.option("AccountingStorageType").endswith("slurmdbd"):
        problems.append(fail("spans need accounting", "set AccountingStorageType=accounting_storage/slurmdbd"))
    if "jobs" in settings.hidden(private):
        what = f"jobs are private (PrivateData={private}), so that no spans are sent to {settings.endpoint}"
        problems.append(fail(what, "add jobs to traces.private in the policy if they may leave"))
    yield from problems or [ok(f"spans of jobs may be sent to {settings.endpoint}")]
