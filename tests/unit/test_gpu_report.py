"""What `make test-gpu` reports: on a simulated GPU, without one, and of what failed."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/gpu_report.py"
XML = """<testsuites><testsuite>
<testcase classname="tests.unit.limit.test_limit_hardware" name="test_a" time="1.26"><properties>
<property name="suspend_s" value="1.5"/></properties></testcase>
<testcase classname="tests.unit.limit.test_limit_hardware" name="test_b[x]" time="0"><skipped message="no
 driver"/></testcase>
<testcase classname="tests.unit.test_c" name="test_c" time="0"><failure message="assert 3 == 4">...</failure></testcase>
<testcase classname="tests.unit.test_c" name="test_d" time="0"><error message="failed on setup">...</error></testcase>
</testsuite></testsuites>"""
MACHINE = {"gpus": [{"name": "G", "memory_mib": 80}], "driver": "580.1", "cuda": 13000, "system": "D", "kernel": "6"}


def run(output: Path, *words: str) -> tuple[int, str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, TOOL, "--output", output, *words], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr, json.loads((output / "gpu-report.json").read_text())


def test_what_pytest_wrote_becomes_checks(tmp_path: Path) -> None:
    tool = runpy.run_path(str(TOOL))
    (tmp_path / "report.xml").write_text(XML)
    found = tool["checks"](tmp_path / "report.xml")
    assert [(one["module"], one["check"], one["outcome"], one["reason"], one["seconds"]) for one in found] == [
        ("limit_hardware", "a", "held", "", 1.3),
        ("limit_hardware", "b[x]", "skipped", "no driver", 0),
        ("c", "c", "not held", "assert 3 == 4", 0),
        ("c", "d", "not held", "failed on setup", 0),
    ]
    assert [one["figures"] for one in found] == [{"suspend_s": "1.5"}, {}, {}, {}]
    (tmp_path / "report.xml").write_text("<testsuites><cut")
    assert tool["checks"](tmp_path / "report.xml") == tool["checks"](tmp_path / "none.xml") == []


@pytest.mark.parametrize(
    ("outcomes", "late", "status"),
    [
        (["held", "skipped"], False, 0),
        (["held", "not held"], False, 1),
        (["held"], True, 1),
        (["skipped"], False, 2),
        ([], False, 2),
    ],
)
def test_status_and_table(outcomes: list[str], late: bool, status: int) -> None:
    tool = runpy.run_path(str(TOOL))
    found = [
        {"module": "m", "check": "c", "outcome": one, "reason": "r", "seconds": 0, "figures": {"s": "1"}}
        for one in outcomes
    ]
    report = {"machine": MACHINE, "checks": found, "simulated": False, "commit": "abc", "time_ran_out": late}
    assert tool["status"](report) == status
    text = tool["table"](report)
    assert "1 x G (80 MiB)\nDriver: 580.1, CUDA 13.0\n" in text
    assert ("Time ran out" in text) == late
    assert f"{outcomes.count('held')} held, {outcomes.count('not held')} not held" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="jobs' regions are root's")
def test_on_a_simulated_gpu(tmp_path: Path) -> None:
    code, err, report = run(tmp_path, "--simulate", "dgx-h100")
    checks = report["checks"]
    assert isinstance(checks, list)
    assert code == 0, [one for one in checks if one["outcome"] == "not held"] or err
    held = {one["check"] for one in checks if one["outcome"] == "held"}
    assert held >= {"the_last_mib_is_granted_and_one_more_refused", "each_gpu_has_memory_temperature_and_power"}
    assert report["simulated"] is True
    assert "- simulated\nDriver: 550.90.07, CUDA 12.4\n" in (tmp_path / "gpu-report.txt").read_text()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    """Says so and why, with a status of its own."""
    code, err, report = run(tmp_path)
    assert code == 2
    assert "Nothing was tested: make test-gpu needs an NVIDIA GPU" in err
    assert report["checks"] == []
    assert "NVML" in str(report["machine"])
