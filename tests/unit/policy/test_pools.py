"""The section `pools`: what is refused, and what Slurm and fleetd get."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from policy import pool_nodes
from policy.document import PolicyError, parse
from policy.model import Policy

SHAPE = {
    "name": "p5.48xlarge",
    "gpus": {"h100": 8},
    "gpu_memory": "81008M",
    "cpus": 192,
    "memory": "2000G",
    "price": 98.3,
}
POOL: dict[str, Any] = {"driver": "ec2", "nodes": "p5-[1-4]", "shapes": [SHAPE]}


def policy(**changes: Any) -> Policy:
    return parse(yaml.safe_dump({"pools": {"p5": {**POOL, **changes}}}), source="sluice.yaml")


def test_nodes_are_known_before_there_is_one() -> None:
    found = pool_nodes.node_lines(
        policy(features=["cloud"], least=1, idle="15m", boot_within="5m", end_within="45s"), shards=True
    ).splitlines()
    assert found[1:] == [
        "NodeName=p5-[1-4] CPUs=192 RealMemory=2048000 Gres=gpu:h100:8,shard:648064 Feature=cloud Weight=100 "
        "State=CLOUD",
        "PartitionName=p5 Nodes=p5-[1-4] SuspendTime=1200 SuspendTimeout=45 ResumeTimeout=960",
    ]
    assert pool_nodes.slurm_settings(policy(least=1))["SuspendExcNodes"] == "p5-[1-4]:1"
    apart = pool_nodes.slurm_settings(policy(least=2, nodes="p5-[001-003,007],q-1"))
    assert apart["SuspendExcNodes"] == "p5-[001-003]:2,p5-007:1,q-1:1"
    assert pool_nodes.slurm_settings(Policy()) == {}


def test_nodes_have_what_their_smallest_shape_has() -> None:
    other = {**SHAPE, "name": "p5e.48xlarge", "cpus": 96, "memory": "3000G"}
    assert "CPUs=96 RealMemory=2048000" in pool_nodes.node_lines(policy(shapes=[SHAPE, other]), shards=False)


def test_nodes_of_a_dynamic_pool_are_known_by_a_feature_and_by_what_they_were_made_of() -> None:
    dynamic = policy(dynamic=True, features=["cloud"])
    assert pool_nodes.node_lines(dynamic, shards=True).splitlines()[1:] == [
        "NodeSet=sluice-pool-p5 Feature=sluice-pool-p5",
        "PartitionName=p5 Nodes=sluice-pool-p5 SuspendTime=1200 SuspendTimeout=30 ResumeTimeout=1560",
    ]
    found = pool_nodes.compile_pools(dynamic, "main", shards=True).pools["p5"]
    assert found.node_conf == (
        "CPUs=192 RealMemory=2048000 Gres=gpu:h100:8,shard:648064 "
        f"Feature=cloud,sluice-pool-p5,{found.made} Weight=100"
    )
    others = [policy(dynamic=True, features=["cloud"], weight=7), policy(dynamic=True)]
    made = [pool_nodes.compile_pools(one, "main", shards=True).pools["p5"].made for one in others]
    assert len({found.made, *made}) == 3
    fixed = pool_nodes.compile_pools(policy(), "main", shards=True).pools["p5"]
    assert (fixed.node_conf, fixed.made) == ("", "")


def test_a_partition_is_for_tenants_and_those_below_them() -> None:
    tenants = {"nlp": {}, "speech": {"parent": "nlp"}, "vision": {}}
    document = {"tenants": tenants, "pools": {"p5": {**POOL, "tenants": ["nlp"]}}}
    found = pool_nodes.node_lines(parse(yaml.safe_dump(document), source="sluice.yaml"), shards=False)
    assert "AllowAccounts=root,nlp,speech " in found


def test_what_fleetd_reads_is_what_was_written() -> None:
    changed = policy(zones=["a", "b"], back_off="30s", list_every="10s")
    compiled = pool_nodes.compile_pools(changed, "main", shards=True)
    assert pool_nodes.parse_pools(compiled.render(), source="x") == compiled
    assert compiled.pools["p5"].gres == "gpu:h100:8,shard:648064" and compiled.pools["p5"].zones == ("a", "b")
    assert (compiled.pools["p5"].list_s, compiled.look_s) == (10, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shapes": [SHAPE, {**SHAPE, "name": "g6", "gpus": {"l4": 8}}]}, "'g6' has not the GPUs of 'p5.48xlarge'"),
        ({"shapes": [SHAPE, SHAPE]}, "named twice"),
        ({"shapes": [{**SHAPE, "gpus": {"H100": 8}}]}, "in lower case"),
        ({"settings": {"secret_key": "x"}}, "credentials are never in the policy"),
        ({"settings": {"options": {"password": "x"}}}, "credentials are never in the policy"),
        ({"nodes": "p5-[1-"}, "p5-"),
        ({"nodes": "P5-[1-2]"}, "not a host's name"),
        ({"nodes": "p5-[1-9999]"}, "1 to 4096"),
        ({"least": 5}, "least 5 is more than the 4 nodes"),
        ({"node_options": "State=DOWN"}, "State is written from the pool's own fields"),
        ({"partition_options": "MaxTime=60 SuspendTime=600"}, "SuspendTime is written from the pool's own fields"),
        ({"partition_options": "allowaccounts=nlp"}, "allowaccounts is written from the pool's own fields"),
        ({"node_options": "Sockets=2\nNodeName=x"}, "separated by one space"),
        ({"zones": ["a", "a"]}, "named twice"),
        ({"tenants": ["nobody"]}, "'nobody' is not a tenant"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words.replace("[", r"\[")):
        parse(yaml.safe_dump({"pools": {"p5": {**POOL, **changes}}}), source="sluice.yaml")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"nodes": "p5-[4-6]"}, "'p5-4' is in pool 'p5' already"),
        ({"nodes": "x-1", "partition": "p5"}, "that of pool 'p5'"),
    ],
)
def test_two_pools_share_nothing(other: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        parse(yaml.safe_dump({"pools": {"p5": POOL, "second": {**POOL, **other}}}), source="sluice.yaml")
