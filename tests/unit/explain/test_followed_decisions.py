"""Times to the first decision, out of files that the plugins' own recorder wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sluice.controllerd.metrics.decided import Decided
from sluice.explain.decisions import Decision, Mode, list_files, read_entries
from tests.unit.explain.decision_files import run_churn


def test_what_is_followed_is_what_is_recorded(churn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    run_churn(churn, folder, 5, steps=400)
    first: dict[tuple[int, int], str] = {}
    for path in list_files(folder):
        for entry in read_entries(path):
            if isinstance(entry.body, Decision) and entry.body.mode != Mode.TEST_ONLY:
                job = entry.body.job
                first.setdefault((job.array_id or job.id, job.submit), job.account)
    assert len(first) > 20
    decided = Decided(folder, -2.0)
    decided.look()
    assert {account: jobs for account, (jobs, _) in decided.totals.items()} == Counter(first.values())
