"""`sluice sim` on the folders of a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dev_cluster.commands.sim import command
from gpu_sim import load_platform, write_node_state
from sluice.base.errors import UsageError


@pytest.fixture
def cluster(tmp_path: Path, shared_trees: Path) -> Path:
    for node, platform in (("n1", "rtx4090x4"), ("n2", "rtx4090x4"), ("m1", "dgx-h100-mig")):
        write_node_state(tmp_path / "nodes" / node / "gpu_sim", load_platform(platform), node, shared=shared_trees)
    return tmp_path


def sim(cluster: Path, verb: str, *arguments: str) -> Result:
    return CliRunner().invoke(command, [verb, "--dir", str(cluster), *arguments], catch_exceptions=False)


def test_set_and_get_on_several_nodes(cluster: Path) -> None:
    assert sim(cluster, "set", "n[1-2]", "0,2-3", "temperature=70", "utilisation=9").exit_code == 0
    said = sim(cluster, "get", "n[1-2]", "all", "temperature").output.splitlines()
    hot = [f"{node} {gpu} temperature={29 if gpu == 1 else 70}" for node in ("n1", "n2") for gpu in range(4)]
    assert said == hot
    document = json.loads(sim(cluster, "get", "--json", "n1", "2", "utilisation", "temperature").output)
    assert document == {"schema_version": 1, "nodes": {"n1": {"2": {"utilisation": "9", "temperature": "70"}}}}


def test_list_shows_all_gpus(cluster: Path) -> None:
    sim(cluster, "set", "n2", "1", "lost=yes", "memory_used=3G")
    lines = sim(cluster, "list").output.splitlines()
    assert len(lines) == 1 + 8 + 4 + 4
    [lost] = [line for line in lines if line.endswith(" lost")]
    assert lost.split()[:2] == ["n2", "1"]
    assert " 3072 " in lost
    assert any("mig:3g.40gb,2g.20gb,1g.10gb" in line for line in lines)
    assert sim(cluster, "list", "-nP", "-o", "gpu,used,state").output.splitlines()[:1] == [
        "0|0|mig:1g.10gb" + ",1g.10gb" * 6
    ]


def test_list_as_json(cluster: Path) -> None:
    document = json.loads(sim(cluster, "list", "--json").output)
    assert document["schema_version"] == 1
    assert len(document["gpus"]) == 8 + 4 + 4
    assert document["gpus"][-1]["node"] == "n2" and document["gpus"][-1]["total_mib"] == 24564


def test_what_one_node_refuses_changes_no_other(cluster: Path) -> None:
    with pytest.raises(UsageError, match="ecc_uncorrected"):
        sim(cluster, "set", "m1,n1", "0", "ecc_uncorrected=1")  # the second node's GPUs have no ECC
    assert sim(cluster, "get", "m1", "0", "ecc_uncorrected").output == "m1 0 ecc_uncorrected=0\n"


def test_fields_are_listed() -> None:
    said = CliRunner().invoke(command, ["fields"]).output
    assert "ecc_uncorrected" in said
    assert "mig_layout" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("set", "n9", "0", "temperature=50"), "node 'n9'"),
        (("set", "n1", "9", "temperature=50"), "GPU '9'"),
        (("set", "n1", "0", "temperature"), "not a change"),
        (("set", "n1", "0", "temperature=50", "temperature=60"), "given twice"),
        (("set", "n1", "0", "temperature=900"), "temperature=900"),
        (("set", "n1", "0", "volume=11"), "field 'volume'"),
        (("get", "n1", "0", "volume"), "field 'volume'"),
        (("get", "n[1-", "0"), "hostlist"),
        (("set", "", "0", "temperature=50"), "nodes '': none named"),
        (("set", "n1", "3-1", "temperature=50"), "GPU '3-1'"),
        (("set", "n1", "²-³", "temperature=50"), "GPU '²-³'"),
    ],
)
def test_mistakes_are_reported_in_one_line(cluster: Path, arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        sim(cluster, *arguments)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_cluster_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sluice cluster up"):
        sim(tmp_path, "list")
