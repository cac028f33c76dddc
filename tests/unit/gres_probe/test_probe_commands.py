"""`sluice inventory` and `sluice topo NODE` on a drop folder of simulated and of made-up nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from simulated_node import Simulate

from gres_probe.collect import load_inventories, write_inventory
from gres_probe.inventory import Gpu, Health, Inventory, Link, LinkType, Partition, Problem
from sluice.base.errors import SluiceError, UsageError
from sluice.main import sluice


def node(name: str, model: str = "NVIDIA L40S", count: int = 2, **gpu: Any) -> Inventory:
    gpu.setdefault("health", Health.OK)
    gpus = [
        Gpu("nvidia", n, f"GPU-{name}-{n}", model, f"/dev/nvidia{n}", n, f"0000:0{n}:00.0", 46068, 45000, **gpu)
        for n in range(count)
    ]
    links = [[Link(LinkType.SELF if one == other else LinkType.NUMA_NODE) for other in gpus] for one in gpus]
    return Inventory(name, gpus, links, probed_at="2026-01-02T03:04:05Z")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten nodes of two kinds, one of them in trouble."""
    for number in range(1, 10):
        write_inventory(tmp_path, node(f"n{number}", memory_used_mib=1000, utilisation_percent=10 * number))
    sick = node("n10", "NVIDIA H100 80GB HBM3", count=1, health=Health.FAILED, health_reasons=["row remapping failed"])
    sick.problems = [Problem("nvidia", "GPU 1: GPU is lost", "reboot", 1)]
    write_inventory(tmp_path, sick)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(sluice, words)


def test_table_by_node(folder: Path) -> None:
    result = run("inventory", "--inventory-dir", str(folder))
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["NODE", "GPUS", "MODELS", "MEMORY", "USED", "UTIL", "HEALTH", "PROBED"]
    assert [line.split()[0] for line in lines[1:]] == [f"n{number}" for number in range(1, 11)]
    assert lines[3].split() == ["n3", "2", "2x", "NVIDIA", "L40S", "90.0G", "2.0G", "30%", "ok", "2026-01-02T03:04:05Z"]
    assert "1 failed, 1 unread" in lines[10]
    assert result.exit_code == 1 and "n10: nvidia: GPU 1: GPU is lost; reboot" in result.stderr


def test_table_by_model_folds_nodes(folder: Path) -> None:
    result = run(
        "inventory", "--inventory-dir", str(folder), "--by", "model", "-P", "-o", "model,gpus,nodecount,util,nodes"
    )
    assert result.stdout.splitlines() == [
        "MODEL|GPUS|NODECOUNT|UTIL|NODES",
        "NVIDIA L40S|18|9|50|n[1-9]",
        "NVIDIA H100 80GB HBM3|1|1||n10",
    ]


def test_table_by_gpu_of_selected_nodes(folder: Path) -> None:
    result = run(
        "inventory", "--inventory-dir", str(folder), "-w", "n[2,9]", "--by", "gpu", "-P", "-n", "-o", "node,index,util"
    )
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["n2|0|20", "n2|1|20", "n9|0|90", "n9|1|90"]


def test_instances_stand_in_the_place_of_their_gpu(tmp_path: Path) -> None:
    one = node("n1")
    one.gpus[0].partitioned = True
    one.gpus[0].partitions = [Partition(n, f"MIG-{n}", "1g.10gb", 9984, ["/dev/nvidia0"]) for n in range(2)]
    one.gpus[1].partitioned = True
    write_inventory(tmp_path, one)
    result = run("inventory", "--inventory-dir", str(tmp_path), "--by", "gpu", "-P", "-n", "-o", "index,model,usable")
    assert result.stdout.splitlines() == ["0:0|1g.10gb|9984", "0:1|1g.10gb|9984", "1|NVIDIA L40S (no instances)|45000"]


def test_json_holds_everything(folder: Path) -> None:
    result = run("inventory", "--inventory-dir", str(folder), "--json", "-w", "n[1,99]")
    document = json.loads(result.stdout)
    assert document["schema_version"] == 1 and list(document["failures"]) == ["n99"]
    (only,) = document["nodes"]
    assert Inventory.from_json(json.dumps(only), source="x") == load_inventories(folder).inventories["n1"]
    assert result.exit_code == 1 and "n99" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inventory", "--inventory-dir", "/nonexistent/folder"], "/nonexistent/folder"),
        (["inventory", "-w", "n[1-"], "n[1-"),
        (["inventory", "--owner", "no-such-user"], "no-such-user"),
        (["topo", "n1", "--inventory-dir", "/nonexistent/folder"], "/nonexistent/folder"),
        (["inventory", "collect", "n[1-", "--rsh", "ssh"], "n[1-"),
        (["inventory", "collect", "n1", "--rsh", "'unclosed"], "'unclosed"),
        (["inventory", "collect", "n1", "--rsh", ""], "--rsh"),
        (["probe", "--vendor", "matrox"], "'matrox'"),
    ],
)
def test_mistakes_get_one_line(words: list[str], message: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, SluiceError)
    assert message in str(result.exception) and len(str(result.exception).splitlines()) == 1
    assert result.exception.remedy


def test_wrong_options_are_usage_errors(folder: Path) -> None:
    for words in (["--format", "colour"], ["-w", "n[1-"], ["--owner", "no-such-user"]):
        assert isinstance(run("inventory", "--inventory-dir", str(folder), *words).exception, UsageError)
    assert run("inventory", "--by", "colour").exit_code == 2
    assert run("probe", "--timeout", "0").exit_code == 2


def test_topology_of_a_collected_node(simulate: Simulate, tmp_path: Path) -> None:
    simulated = simulate("rtx4090x4")
    assert simulated.run("probe", "--drop", str(tmp_path / "drop"), "--node", "ada-1").returncode == 0
    here = simulated.run("topo", "-P").stdout
    collected = run("topo", "ada-1", "--inventory-dir", str(tmp_path / "drop"), "-P").stdout
    assert collected == here and len(here.splitlines()) >= 5
    document = json.loads(run("topo", "ada-1", "--inventory-dir", str(tmp_path / "drop"), "--json").stdout)
    assert document["link_domains"] == [[0], [1], [2], [3]] and document["links"][0][0]["type"] == "X"
    assert len(document["gpus"]) == 4 and document["schema_version"] == 1


def test_collect_over_a_remote_shell(simulate: Simulate, tmp_path: Path) -> None:
    """A shell script replaces ssh: it runs its words as the remote shell would; n3 is down."""
    node = simulate("dgx-h100")
    rsh = tmp_path / "rsh"
    rsh.write_text(
        "#!/bin/sh\n"
        "host=$1; shift\n"
        '[ "$host" = n3 ] && { echo "ssh: connect to host n3 port 22: No route to host" >&2; exit 255; }\n'
        'exec sh -c "$*"\n'
    )
    rsh.chmod(0o755)
    sluice_there = tmp_path / "sluice there"
    roots = f"--sys-root '{node.folder}/sys' --proc-root '{node.folder}/proc'"
    sluice_there.write_text(f'#!/bin/sh\nexec {sys.executable} -m sluice.main "$@" {roots}\n')
    sluice_there.chmod(0o755)
    drop = tmp_path / "drop"
    words = [sys.executable, "-m", "sluice.main", "inventory", "collect", "n[1-3]", "--inventory-dir", str(drop)]
    done = subprocess.run(
        [*words, "--rsh", str(rsh), "--program", f"'{sluice_there}'"],
        env={**os.environ, **node.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "sluice: n3: ssh: connect to host n3 port 22: No route to host" in done.stderr.splitlines()
    assert "2 of 3 nodes, 16 GPUs" in done.stderr
    assert list(load_inventories(drop).inventories) == ["n1", "n2"]
