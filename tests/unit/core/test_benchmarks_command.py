"""The benchmarks' command line: what its exit codes and its JSON say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{i},64000,262144,8,A\n" for i in range(80))
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1000,1024,1,1000\n"


def benchmark(*arguments):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_json_says_what_was_measured(tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES)
    done = benchmark(
        "gang", "--json", "--nodes", tmp_path / "nodes.csv", "--gang-nodes", 4, "--decisions", 100, "--rounds", 1
    )
    document = json.loads(done.stdout)
    keys = {"benchmark", "figures", "spread", "must", "peer", "machine", "versions", "command"}
    assert set(document) == keys
    assert document["must"] == {"start_p99_us": ["<=", 100.0]}
    assert all(isinstance(value, int | float) for value in document["figures"].values())
    assert done.returncode in (0, 1)  # a small cluster, a busy machine: the figure itself does not matter here


@pytest.mark.parametrize("name", ["core-latency", "openb", "backfill", "utilisation"])
@pytest.mark.parametrize("content", [b"", b"bad\n", bytes(range(256))])
def test_unreadable_lists_are_no_missed_goal(tmp_path, name, content):
    nodes, pods, bad = tmp_path / "nodes.csv", tmp_path / "pods.csv", tmp_path / "bad.csv"
    nodes.write_text(NODES)
    pods.write_text(PODS)
    bad.write_bytes(content)
    for lists in (("--nodes", bad, "--pods", pods), ("--nodes", nodes, "--pods", bad)):
        done = benchmark(name, *lists)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "bad.csv" in done.stderr
