"""benchmarks.compare: a regression is found, noise is not one, and each direction is declared."""

from __future__ import annotations

import json
import random
import re
import subprocess
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import (
    HIGHER,
    LOWER,
    NEITHER,
    compare,
    compare_documents,
    direction,
    measure_in_turns,
    times_worse,
)
from sluice.base.errors import SluiceError

DOCS = Path(__file__).parents[3] / "docs/benchmarks.md"


def pairs(factor: float, count: int = 5, noise: float = 0.02, seed: int = 1) -> list[tuple[float, float]]:
    """Runs next to each other, on a machine with slow and fast periods."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        machine = draw.uniform(1, 1.5)
        found.append((machine * draw.gauss(10, 10 * noise), machine * draw.gauss(10 * factor, 10 * noise)))
    return found


def document(figures: dict[str, float], command: str = "python -m benchmarks probe") -> dict[str, Any]:
    return {"figures": figures, "must": {}, "command": command}


@pytest.mark.parametrize(
    ("base", "this", "better", "ratio"),
    [
        (2, 3, LOWER, 1.5),
        (2, 3, HIGHER, 2 / 3),
        (3, 2, HIGHER, 1.5),
        (0, 0, LOWER, 1),
        (0, 1, LOWER, inf),
        (1, 0, LOWER, 0),
        (1, 0, HIGHER, inf),
    ],
)
def test_a_ratio_above_one_is_worse(base: float, this: float, better: str, ratio: float) -> None:
    assert times_worse(base, this, better) == pytest.approx(ratio)


def test_a_regression_is_found() -> None:
    found = compare("probe", "probe_ms", LOWER, pairs(1.3), 1.1)
    assert found.worse and found.low > 1.1 and found.low <= found.ratio <= found.high


def test_what_is_better_or_the_same_is_not_worse() -> None:
    assert not compare("probe", "probe_ms", LOWER, pairs(0.7), 1.1).worse
    assert compare("probe", "jobs_per_s", HIGHER, pairs(0.7), 1.1).worse
    assert not any(compare("probe", "probe_ms", LOWER, pairs(1, seed=seed), 1.1).worse for seed in range(50))


def test_a_regression_below_the_bound_is_not_worse() -> None:
    found = compare("probe", "probe_ms", LOWER, [(10, 10.8)] * 3, 1.1)
    assert found.low > 1 and not found.worse


def test_a_ratio_that_noise_can_explain_is_not_worse() -> None:
    found = compare("probe", "probe_ms", LOWER, [(10, 15), (10, 12), (12, 10)], 1.1)
    assert found.ratio > 1.1 and found.low < 1 and not found.worse


def test_the_same_runs_have_the_same_interval() -> None:
    assert compare("probe", "probe_ms", LOWER, pairs(1.1), 1.1) == compare("probe", "probe_ms", LOWER, pairs(1.1), 1.1)


def test_only_figures_of_both_trees_that_have_a_direction_are_compared() -> None:
    base = document({"probe_ms_p50": 10, "devices": 18, "gone_ms": 1})
    this = document({"probe_ms_p50": 30, "devices": 20, "new_ms": 1})
    (found,) = compare_documents("probe", [(base, this)] * 3, 1.1)
    assert (found.figure, found.ratio, found.worse) == ("probe_ms_p50", 3, True)


def test_other_options_are_not_compared() -> None:
    both = document({"probe_ms_p50": 10}), document({"probe_ms_p50": 10}, "python -m benchmarks probe --runs 9")
    with pytest.raises(SluiceError, match=r"probe: the base ran it with other options: .*--runs 9"):
        compare_documents("probe", [both] * 3, 1.1)


@pytest.mark.parametrize(
    ("figure", "better"),
    [
        ("place_p99_us", LOWER),
        ("probe_ms_p50", LOWER),
        ("conservative_us_per_job", LOWER),
        ("tenant_report_mib", LOWER),
        ("agent_core_percent", LOWER),
        ("pairs_per_second", HIGHER),
        ("fit_faster", HIGHER),
        ("default_sluice_allocation_percent", HIGHER),
        ("default_gain_over_fgd_points", HIGHER),
        ("loop_overhead_percent", NEITHER),
        ("devices", NEITHER),
    ],
)
def test_directions(figure: str, better: str) -> None:
    assert direction(figure, {}) == better


def test_a_figure_that_no_pattern_names_goes_by_its_must() -> None:
    assert direction("lost", {"lost": ["==", 0.0]}) == LOWER
    assert direction("held", {"held": [">=", 95.0]}) == HIGHER


def test_every_figure_with_a_unit_of_time_in_the_docs_has_a_direction() -> None:
    figures = set(re.findall(r"^\| `?(\w+_(?:us|ms|s)(?:_\w+)?)`?[ :,;|]", DOCS.read_text(), re.MULTILINE))
    assert len(figures) > 60
    undeclared = {one for one in figures if direction(one, {}) == NEITHER}
    differences = {"added_first_token_ms", "added_p50_ms", "added_p99_ms", "alone_added_ms_p50", "decision_added_us"}
    differences |= {f"spans_added_{name}_us" for name in ("mean", "p50", "p99")}
    calls = {f"python_{name}_us" for name in ("admit", "turn", "progress", "settle")}
    assert undeclared <= {"clock_us", "python_ms_p95", "python_start_ms_p50", *differences, *calls}


def test_the_trees_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTINUE", "1")  # which would keep results of an earlier comparison
    trees = []
    for name in ("base", "this"):
        script = tmp_path / name / "tools/bench"
        script.parent.mkdir(parents=True)
        said = json.dumps(document({f"{name}_ms": 1}))
        script.write_text(
            f'#!/bin/sh\n[ -z "$CONTINUE" ] || exit 2\necho {name} >>../turns\necho \'{said}\' >"$JSON/$2-1.json"\n'
        )
        script.chmod(0o755)
        trees.append(tmp_path / name)
    found = measure_in_turns(trees, ["probe"], "", 3, tmp_path / "results")
    assert (tmp_path / "turns").read_text().split() == ["base", "this", "this", "base", "base", "this"]
    assert [list(one["figures"]) + list(other["figures"]) for one, other in found["probe-1"]] == [
        ["base_ms", "this_ms"]
    ] * 3
    (tmp_path / "base/tools/bench").write_text("#!/bin/sh\nexit 2\n")
    with pytest.raises(SluiceError, match="probe: could not run in .*base"):
        measure_in_turns(trees, ["probe"], "", 3, tmp_path / "results")


def test_make_passes_base_and_names() -> None:
    words = ["make", "-n", "bench", "BASE=f4ed785", "NAMES=core-latency limiter"]
    done = subprocess.run(words, cwd=DOCS.parents[1], capture_output=True, text=True, check=True)
    assert "-m benchmarks.compare f4ed785 core-latency limiter" in done.stdout
    assert "tools/bench " not in done.stdout
