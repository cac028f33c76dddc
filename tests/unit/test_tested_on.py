"""What test runs count, and the page of it."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path

from tests.integration.ran_on import keep

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "22.05.8|v1|sluice cluster|bookworm", "24.11.5|v2|systemd|trixie"


def test_the_latest_run_of_each_module_counts(tmp_path: Path) -> None:
    path = tmp_path / "tested-on.json"
    keep({(OLD, "test_a"): Counter(passed=3, failed=2), (OLD, "test_b"): Counter(passed=10)}, path)
    keep({(OLD, "test_a"): Counter(passed=5), (NEW, "test_a"): Counter(passed=7)}, path)
    *_, first, second = runpy.run_path(str(ROOT / "tools/tested_on.py"))["page"](
        json.loads(path.read_text())
    ).splitlines()
    assert first.startswith("| 22.05.8 | v1 | sluice cluster | bookworm | test_a, test_b | 15 | 0 | 20")
    assert second.startswith("| 24.11.5 | v2 | systemd | trixie | test_a | 7 | 0 | 20")


def test_an_earlier_row_stays_until_all_its_modules_have_run_again() -> None:
    page = runpy.run_path(str(ROOT / "tools/tested_on.py"))["page"]
    both = {"test_a": {"day": "2026-11-24", "passed": 3}, "test_b": {"day": "2026-11-24", "passed": 10}}
    other = {"test_a": {"day": "2026-11-24", "passed": 1}}
    before = page({OLD: both, NEW: other})
    once = page({OLD: {"test_a": {"day": "2026-11-28", "passed": 4}}}, before)
    assert set(before.splitlines()) < set(once.splitlines())
    again = page({OLD: {name: {"day": "2026-11-29", "passed": 5} for name in both}}, once)
    assert again.splitlines()[-2:] == [
        "| 22.05.8 | v1 | sluice cluster | bookworm | test_a, test_b | 10 | 0 | 2026-11-29 |",
        before.splitlines()[-1],
    ]
