"""tools/bench_page.py: results of benchmarks in the tables of docs/benchmarks.md."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
_PAGE = """# Benchmarks

### gang

Text with 21.95 us.

| figure | measured | spread | must | peer |
|---|---|---|---|---|
| nodes | 1 | | | |
| start_us | 2 | 1 to 3 | <= 9 | 4 |
| stock_us | | | | 5 |
| gone_us | 6 | | | |

| figure | Sluice | LiteLLM |
|---|---|---|
| start_us | 7 | 8 |

### ledger

| figure | measured |
|---|---|
| pair_us | 0.5 |
"""
_RESULT: dict[str, Any] = {
    "figures": {"nodes": 4278.0, "start_us": 26.0612, "new_us": 1.0},
    "spread": {"start_us": [26.6, 25.25]},
    "must": {"start_us": ["<=", 100.0]},
    "peer": {"start_us": 20.78, "stock_us": 0.5},
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_page", ROOT / "tools/bench_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "page.md").write_text(_PAGE)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    return module


def test_rows_get_their_figures_and_nothing_else_changes(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "gang.json").write_text(json.dumps(_RESULT))
    (results / "ledger.part").write_text("")  # it runs still
    (results / "other.json").write_text(json.dumps(_RESULT))
    tool.main(results)
    expected = (
        _PAGE.replace("| nodes | 1 |", "| nodes | 4,278 |")
        .replace("| start_us | 2 | 1 to 3 | <= 9 | 4 |", "| start_us | 26.06 | 25.25 to 26.6 | <= 100 | 20.78 |")
        .replace("| stock_us | | | | 5 |", "| stock_us | | | | 0.5 |")
    )
    assert (tmp_path / "page.md").read_text() == expected
    said = capsys.readouterr().out
    assert "  nodes: 1 |  |  |   ->  4,278 |" in said
    assert "  in no table: new_us\n" in said
    assert "other: docs/benchmarks.md has no section of this name\n" in said


@pytest.mark.parametrize("text", ["", "[]", "{", '{"figures": {}}', None])
def test_what_is_no_result_is_named_and_the_page_stays(tool: ModuleType, tmp_path: Path, text: str | None) -> None:
    """None: there are no results."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "gang.json").write_text(json.dumps(_RESULT))
    if text is None:
        (results / "gang.json").unlink()
    else:
        (results / "ledger.json").write_text(text)
    with pytest.raises(SystemExit, match="no results there" if text is None else "ledger.json: not a result"):
        tool.main(results)
    assert (tmp_path / "page.md").read_text() == _PAGE


def test_it_runs_as_the_page_says(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "tools/bench_page.py", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no results there" in done.stderr


def test_the_page_has_a_section_for_most_benchmarks() -> None:
    """Those without one are in the section of another, with a table of their own."""
    ran = set(re.findall(r"^ +measure(?:_as)? ([a-z0-9-]+)", (ROOT / "tools/bench").read_text(), re.MULTILINE))
    sections = set(re.findall(r"(?m)^### ([a-z-]+)$", (ROOT / "docs/benchmarks.md").read_text()))
    assert ran - sections == {"submit-latency-admit", "slurm-throughput-128", "slurm-throughput-1024", "journal"}
