from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dev_cluster.accounts import UserDatabase, sacctmgr_dump
from dev_cluster.configuration import Ports, cgroup_conf, hosts_file, slurm_conf, slurmdbd_conf, with_ports
from dev_cluster.description import ClusterDescription, parse_description
from sluice.base.errors import UsageError


def describe(**fields: object) -> ClusterDescription:
    nodes = [{"names": "n[1-3]", "platform": "none"}]
    return parse_description(yaml.safe_dump({"nodes": nodes, **fields}), source="test")


def parameters(text: str) -> list[tuple[str, str]]:
    return [(line.split("=", 1)[0], line.split("=", 1)[1]) for line in text.splitlines() if "=" in line]


def test_every_node_gets_a_port_of_its_own_and_lines_stay_folded() -> None:
    lines = (
        "# comment\nNodeName=DEFAULT CPUs=4\nNodeName=a-[1-3] Gres=gpu:2\nnodename=b1\n  NodeName=c1,d[7-8] CPUs=1\n"
    )
    assert with_ports(lines, Ports(5000)).splitlines() == [
        "# comment",
        "NodeName=DEFAULT CPUs=4",
        "NodeName=a-[1-3] Gres=gpu:2 Port=[5006-5008]",
        "nodename=b1 Port=5009",
        "  NodeName=c1,d[7-8] CPUs=1 Port=[5010-5012]",
    ]
    assert Ports.needed(7) == 5012 - 5000 + 1


def test_lines_of_the_description_replace_generated_ones() -> None:
    text = slurm_conf(describe(slurm_conf="SlurmctldTimeout = 99\nslurmdtimeout=77\nX=1"), Ports(5000), "NodeName=n1\n")
    assert [value for key, value in parameters(text) if key.strip().lower() == "slurmctldtimeout"] == [" 99"]
    assert [value for key, value in parameters(text) if key.lower() == "slurmdtimeout"] == ["77"]
    assert text.endswith("X=1\n")
    assert parameters(cgroup_conf(describe(cgroup_conf="ConstrainDevices=no"))).count(("ConstrainDevices", "no")) == 1
    assert ("DbdPort", "5001") in parameters(slurmdbd_conf(describe(), Ports(5000)))


def test_the_version_of_cgroups_is_the_descriptions() -> None:
    unified = parameters(cgroup_conf(describe()))
    assert unified[0] == ("CgroupPlugin", "cgroup/v2") and ("IgnoreSystemd", "yes") in unified
    assert parameters(cgroup_conf(describe(cgroup="v1")))[0] == ("CgroupPlugin", "cgroup/v1")
    with pytest.raises(UsageError, match="cgroup: .*'v1' or 'v2'"):
        describe(cgroup="v3")


def test_both_controllers_share_a_port_on_addresses_of_their_own() -> None:
    text = slurm_conf(describe(), Ports(5000), "")
    assert [value for key, value in parameters(text) if key == "SlurmctldHost"] == [
        "ctl1(127.0.1.1)",
        "ctl2(127.0.1.2)",
    ]
    assert "NoCtldInAddrAny" in text
    assert "ctl2" not in slurm_conf(describe(controllers=1), Ports(5000), "")


def test_partitions() -> None:
    fields = {"partitions": [{"name": "a", "nodes": "n1", "options": "MaxTime=5"}, {"name": "b"}]}
    lines = [line for line in slurm_conf(describe(**fields), Ports(1), "").splitlines() if line.startswith("Partition")]
    assert lines == [
        "PartitionName=a Nodes=n1 State=UP Default=YES MaxTime=5",
        "PartitionName=b Nodes=ALL State=UP Default=NO",
    ]


def test_without_accounting_nothing_points_at_it() -> None:
    assert "slurmdbd" not in slurm_conf(describe(accounting=False), Ports(5000), "")
    assert "accounting_storage/slurmdbd" in slurm_conf(describe(), Ports(5000), "")


def test_configless_is_switched_on_where_a_node_wants_it() -> None:
    nodes = [{"names": "n1", "platform": "none", "config": "configless"}]
    assert "enable_configless" in slurm_conf(describe(nodes=nodes), Ports(5000), "")
    assert "enable_configless" not in slurm_conf(describe(), Ports(5000), "")


def test_a_thousand_hosts_have_different_addresses() -> None:
    nodes = [{"names": "n[1-1024]", "platform": "none"}]
    addresses = [line.split()[0] for line in hosts_file(describe(nodes=nodes)).splitlines()]
    assert len(set(addresses)) == len(addresses) == 1024 + 5
    assert all(0 < int(part) < 255 for address in addresses for part in address.split(".")[3:])


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nbob:x:1000:1000::/home/bob:/bin/sh\nx:x:2001:7::/:/\n"
    )
    (tmp_path / "etc/group").write_text("root:x:0:\nbob:x:1000:\n")
    return tmp_path


def test_users_of_the_cluster_stand_in_for_those_of_the_system(system: Path) -> None:
    users = UserDatabase(system, describe(users=[{"name": "alice"}, {"name": "bob", "uid": 3000}]))
    lines = users.passwd.splitlines()
    assert [line.split(":")[0] for line in lines] == ["root", "slurm", "munge", "alice", "bob"]
    assert users.users["bob"].uid == 3000
    assert users.users["alice"].home == "/run/sluice-cluster/home/alice"
    assert "bob:x:3000:" in users.group.splitlines()
    assert "bob:x:1000:" not in users.group.splitlines()


def test_what_sacctmgr_loads() -> None:
    fields = {
        "accounts": [{"name": "physics", "description": "Particle physics"}, {"name": "atoms", "parent": "physics"}],
        "users": [{"name": "alice", "accounts": ["atoms", "physics"]}, {"name": "bob"}],
    }
    lines = [line.split(":Fairshare")[0] for line in sacctmgr_dump("c", describe(**fields)).splitlines()]
    assert lines == [
        "Cluster - 'c'",
        "Parent - 'root'",
        "User - 'root':DefaultAccount='root':AdminLevel='Administrator'",
        "Account - 'physics':Description='Particle physics':Organization='sluice'",
        "User - 'bob':DefaultAccount='root'",
        "Parent - 'physics'",
        "Account - 'atoms':Description='atoms':Organization='sluice'",
        "User - 'alice':DefaultAccount='atoms'",
        "Parent - 'atoms'",
        "User - 'alice':DefaultAccount='atoms'",
    ]
