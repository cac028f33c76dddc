"""tools/bench: it runs every benchmark there is, with options that each of them takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import BENCHMARKS, BenchmarkGroup

ROOT = Path(__file__).parents[3]
TRACES = (
    "openb/openb_node_list_gpu_node.csv",
    "openb/openb_pod_list_default.csv",
    "openb/openb_pod_list_gpuspec33.csv",
    "openb/published.json",
    "alibaba_spot/v2026spot_node_info_df.csv",
    "muri/trace1.csv",
    "muri/trace2.csv",
    "chronus/trace_job_Philly_SLO.csv",
    "muri/published.json",
)
# In place of Python: records how it was called; exits as the file `exits` says for the benchmark's name.
PYTHON = """#!/bin/sh
shift 2
printf '%s\\n' "$@" >>calls
echo ... >>calls
echo '{}'
exit "$(sed -n "s/^$1 //p" exits | grep . || echo 0)"
"""


@dataclass
class Tree:
    """A copy of the script in a tree whose Python is the one above."""

    path: Path

    def bench(self, *words: str, results: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **environment, "JSON": str(self.path / "results") if results else ""}
        return subprocess.run(
            [self.path / "tools/bench", *words],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=60,
        )

    def calls(self) -> list[list[str]]:
        """Each benchmark's name and options."""
        file = self.path / "calls"
        said = file.read_text().split("...\n")[:-1] if file.exists() else []
        return [call.splitlines() for call in said]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/bench", tmp_path / "tools/bench")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "exits").touch()
    (tmp_path / "results").mkdir()
    for name in TRACES:
        file = tmp_path / "traces" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return Tree(tmp_path)


def test_every_benchmark_is_run_with_options_that_it_takes(tree: Tree) -> None:
    assert tree.bench(str(tree.path / "traces")).returncode == 0
    calls = tree.calls()
    assert {name for name, *_ in calls} == set(BENCHMARKS)
    group = BenchmarkGroup()
    for name, *options in calls:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        command.make_context(name, [*options])  # raises click.UsageError


def test_each_result_has_a_file_of_its_own(tree: Tree) -> None:
    assert tree.bench("", results=True).returncode == 0
    files = {file.stem for file in (tree.path / "results").iterdir()}
    assert len(files) == len(tree.calls())
    twice = ("submit-latency", "submit-latency-admit", "slurm-throughput-128", "slurm-throughput-1024")
    assert {"probe", *twice} <= files
    assert all(json.loads((tree.path / f"results/{name}.json").read_text()) == {} for name in files)
    assert all(call[-1] == "--json" for call in tree.calls())


def test_a_run_that_was_cut_off_goes_on(tree: Tree) -> None:
    """With what could not run, and without what missed a bound, which has a result."""
    (tree.path / "exits").write_text("probe 2\ngroup 1\n")
    chosen = ("", "ledger", "probe", "group")
    assert tree.bench(*chosen, results=True).returncode == 2
    assert tree.bench(*chosen, results=True, CONTINUE="1").returncode == 2
    assert [name for name, *_ in tree.calls()[3:]] == ["probe"]
    assert tree.bench(*chosen, results=True).returncode == 2
    assert len(tree.calls()) == 7


@pytest.mark.parametrize("environment", [{"CONTINUE": "1"}, {"JSON": "/nowhere"}])
def test_results_that_have_no_folder_are_refused_before_anything_is_run(
    tree: Tree, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CONTINUE", "JSON"):
        monkeypatch.setenv(name, environment.get(name, ""))
    done = subprocess.run([tree.path / "tools/bench"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "JSON=" in done.stderr
    assert tree.calls() == []


def test_without_traces_what_needs_them_is_left_out(tree: Tree) -> None:
    done = tree.bench()
    assert done.returncode == 0
    assert "without a folder of traces" in done.stderr
    assert not {"openb", "slurm-fragmentation"} & {name for name, *_ in tree.calls()}


def test_benchmarks_can_be_chosen(tree: Tree) -> None:
    assert tree.bench("", "slurm-throughput", "probe").returncode == 0
    assert tree.calls() == [
        ["probe"],
        ["slurm-throughput", "--nodes", "128"],
        ["slurm-throughput", "--nodes", "1024"],
    ]


@pytest.mark.parametrize("name", ["openb", "prob", "slurm"])
def test_what_cannot_be_chosen_is_named_before_anything_is_run(tree: Tree, name: str) -> None:
    done = tree.bench("", "probe", name)
    assert done.returncode == 2
    assert f"no benchmark {name}," in done.stderr
    assert tree.calls() == []


def test_the_worst_exit_status_is_reported(tree: Tree) -> None:
    (tree.path / "exits").write_text("probe 2\ngroup 1\n")
    assert tree.bench("", "ledger", "probe", "group").returncode == 2
    assert len(tree.calls()) == 3
    assert tree.bench("", "ledger", "group").returncode == 1
    assert tree.bench("", "ledger").returncode == 0
