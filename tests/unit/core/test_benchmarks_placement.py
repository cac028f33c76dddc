"""The benchmarks of gangs and of load, on small inputs: that they measure what they say."""

from __future__ import annotations

import random

import pytest

from benchmarks import gang, utilisation
from sluice.base.errors import SluiceError
from sluice.core.placement import Policy, Request


@pytest.fixture
def nodes(tmp_path):
    path = tmp_path / "nodes.csv"
    lines = ["sn,cpu_milli,memory_mib,gpu,model"]
    lines += [f"n{i},64000,262144,{8 if i % 2 else 2},{'A' if i % 2 else 'B'}" for i in range(64)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def pods(tmp_path):
    path, draw = tmp_path / "pods.csv", random.Random(1)
    lines = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time"]
    for i in range(200):
        gpus, milli = draw.choice([(1, 300), (1, 500), (1, 1000), (8, 1000), (0, 0), (2, 1000)])
        lines.append(f"p{i:03},4000,8192,{gpus},{milli},,{i},{i + draw.choice([0, 50, 500, 5000])}")
    lines.append("p999,4000,8192,1,500,C,0,10")  # of a model that no node has
    path.write_text("\n".join(lines) + "\n")
    return path


def test_gang(nodes):
    result = gang.run(
        nodes,
        gang_nodes=6,
        gpus=8,
        rack_nodes=8,
        pod_racks=2,
        busy=300,
        policy="best-fit",
        decisions=300,
        rounds=2,
        seed=5,
    )
    assert result.figures["nodes"] == 64
    assert result.figures["gpus"] == 320
    assert 1 <= result.figures["leaf_switches_mean"] < result.peer["leaf_switches_mean"] <= 4
    assert 0 < result.figures["start_p50_us"] <= result.figures["start_p99_us"]
    assert result.figures["refused"] == 0
    assert set(gang.MUST) <= set(result.figures)


def test_gang_that_is_too_large(nodes):
    listed = gang.read_nodes(nodes)
    cluster = gang.build(listed, 8, 2)
    with pytest.raises(SluiceError, match="no gang"):
        gang.measure(
            cluster,
            Policy.FIRST_FIT,
            Request(gpus=8, nodes_min=32),
            node_by_node=False,
            busy=900,
            decisions=5,
            seed=1,
        )


def loads(nodes, pods, **options):
    return utilisation.run(
        nodes,
        pods,
        **{
            "policy": "best-fit",
            "peer": ["first-fit"],
            "load": 130,
            "arrivals": 4000,
            "longest": 1000,
            "patience": 500,
            "set_aside": 4,
            "seeds": 2,
            "first_seed": 1,
            **options,
        },
    )


def test_utilisation(nodes, pods):
    result = loads(nodes, pods)
    assert result.figures["pods_that_never_fit"] == 1
    assert 80 < result.figures["gpu_allocation_percent"] <= 100
    assert set(result.figures) - {"pods_that_never_fit"} == set(result.peer)
    assert len(result.spread["best-fit_gpu_allocation_percent"]) == 2


def test_little_load_waits_little_and_is_allocated_as_asked(nodes, pods):
    result = loads(nodes, pods, load=40)
    assert result.figures["wait_p50_s"] == 0
    assert result.figures["several_gpus_started_percent"] > 99
    assert result.figures["gpu_allocation_percent"] == pytest.approx(40, abs=6)


def test_a_node_set_aside_shortens_the_longest_waits(nodes, pods):
    without, with_nodes = (
        loads(nodes, pods, load=100, arrivals=8000, patience=300, set_aside=count) for count in (0, 4)
    )
    assert with_nodes.figures["wait_p99_s"] < 0.9 * without.figures["wait_p99_s"]


def test_pod_lists_without_times(nodes, pods):
    pods.write_text(pods.read_text().replace("deletion_time", "end"))
    with pytest.raises(SluiceError, match="deletion_time"):
        loads(nodes, pods)
