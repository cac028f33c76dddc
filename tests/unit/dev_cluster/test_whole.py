"""What `sluice cluster up` adds to a cluster file."""

from __future__ import annotations

import pytest
import yaml

from dev_cluster.description import ClusterDescription, load_description, parse_description
from dev_cluster.policy_file import first_snippet, policy_text
from dev_cluster.whole import with_sluice
from policy.document import parse
from sluice.base.errors import UsageError


def describe(**fields: object) -> ClusterDescription:
    nodes = [{"names": "n1", "platform": "none"}]
    return parse_description(yaml.safe_dump({"nodes": nodes, **fields}), source="c.yaml")


def test_a_file_of_nodes_alone_gets_everything() -> None:
    whole = with_sluice(describe())
    assert whole.sluice is not None and (whole.sluice.level, whole.sluice.supervise) == ("place", True)
    assert (whole.agent, whole.controllerd, whole.explaind) == (True, True, True)
    tenants = parse(whole.policy).tenants
    assert {name: list(tenant.users) for name, tenant in tenants.items()} == {"physics": ["alice"], "biology": ["bob"]}
    assert [user.uid for user in whole.users] == [2001, 2002]
    assert "HealthCheckInterval=300" in whole.slurm_conf


def test_what_the_file_sets_stays() -> None:
    accounts = [{"name": "chem"}, {"name": "lab", "parent": "chem"}]
    users = [{"name": "dana", "uid": 3000, "accounts": ["lab"]}]
    whole = with_sluice(
        describe(
            agent=False, sluice={"level": "admit", "supervise": False}, accounts=accounts, users=users, slurm_conf="X=1"
        )
    )
    assert whole.sluice is not None and (whole.sluice.level, whole.sluice.supervise) == ("admit", False)
    assert whole.agent is False and whole.slurm_conf == "X=1"
    assert [user.uid for user in whole.users] == [3000]
    tenants = parse(whole.policy).tenants
    assert tenants["lab"].parent == "chem" and list(tenants["lab"].users) == ["dana"]
    assert with_sluice(describe(sluice={"policy": "[tenant a]\n"})).policy == ""
    assert "HealthCheckInterval=300" not in with_sluice(describe(slurm_conf="HealthCheckInterval=60")).slurm_conf
    assert with_sluice(describe(accounting=False)).policy == ""


@pytest.mark.parametrize("name", ["scale-128", "scale-1024"])
def test_sluice_false_is_stock_slurm(name: str) -> None:
    stock = load_description(name)
    assert with_sluice(stock) is stock and stock.sluice is None and not stock.agent


def test_a_policy_is_checked_before_anything_is_made() -> None:
    with pytest.raises(UsageError, match="policy /no/such.yaml: No such file"):
        policy_text("/no/such.yaml")
    with pytest.raises(UsageError, match="tenants.a.members"):
        policy_text("tenants:\n  a: {members: 3}\n")
    with pytest.raises(UsageError, match="policy: needs accounting"):
        describe(policy="version: 1\n", accounting=False)


def test_slurmctld_counts_each_type_of_gpu_from_its_start() -> None:
    snippet = first_snippet(
        describe(), "NodeName=n1 Gres=gpu:h100:8,gpu:h100_1g.10gb:2,shard:10\nNodeName=n2 Gres=gpu:4"
    )
    assert "AccountingStorageTRES=gres/gpu,gres/shard,gres/gpu:h100,gres/gpu:h100_1g.10gb\n" in snippet
