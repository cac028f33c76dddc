"""Times to the first decision, out of files that the plugins' own recorder wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from slurm_plugin.decisions import Decision, Mode, list_files, read_records
from tests.unit.slurm_plugin.record_files import run_churn
from usage.metrics.decided import Decided


def test_what_is_followed_is_what_is_recorded(churn: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    run_churn(churn, folder, 5, steps=400)
    first: dict[tuple[int, int], str] = {}
    for path in list_files(folder):
        for record in read_records(path):
            if isinstance(record.body, Decision) and record.body.mode != Mode.TEST_ONLY:
                job = record.body.job
                first.setdefault((job.array_id or job.id, job.submit), job.account)
    assert len(first) > 20
    decided = Decided(folder, -2.0)
    decided.look()
    assert {account: jobs for account, (jobs, _) in decided.totals.items()} == Counter(first.values())
