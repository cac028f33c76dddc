from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dev_cluster.description import ClusterDescription, load_description, parse_description, shipped_names
from sluice.base.errors import UsageError

NODE = {"names": "n1", "platform": "none"}


def describe(**fields: object) -> ClusterDescription:
    return parse_description(yaml.safe_dump({"nodes": [NODE], **fields}), source="c.yaml")


def test_shipped_clusters_load() -> None:
    assert shipped_names() == ["demo", "scale-1024", "scale-128"]
    assert {name: len(load_description(name).hosts) for name in shipped_names()} == {
        "demo": 8,
        "scale-128": 128,
        "scale-1024": 1024,
    }


def test_hostlists_expand_in_order() -> None:
    description = describe(nodes=[{"names": "b[2-3]", "platform": "none"}, {"names": "a1", "platform": "none"}])
    assert description.hosts == ["b2", "b3", "a1"]
    assert description.group_of("b3").names == "b[2-3]"
    with pytest.raises(UsageError, match="node 'c1': not in this cluster; its nodes are b2, b3, a1"):
        description.group_of("c1")


def test_users_get_the_numbers_that_others_leave_free() -> None:
    description = describe(users=[{"name": "a"}, {"name": "b", "uid": 2001}, {"name": "c"}])
    assert [user.uid for user in description.users] == [2002, 2001, 2003]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"nodes": []}, "nodes: List should have at least 1 item"),
        ({"nodes": [{"names": "", "platform": "none"}]}, "names: no node named"),
        ({"nodes": [{"names": "n[1-", "platform": "none"}]}, "names: hostlist 'n\\[1-'"),
        ({"nodes": [{"names": "n1", "platform": "b9000"}]}, "platform: there is no such platform; known are none"),
        ({"partitions": [{"name": "p", "nodes": "n[1-"}]}, "hostlist 'n\\[1-'"),
        ({"nodes": [{"names": "ctl1", "platform": "none"}]}, "'ctl1' cannot be a node's name"),
        ({"nodes": [{"names": "N1;rm", "platform": "none"}]}, "cannot be a node's name"),
        ({"nodes": [NODE, NODE]}, "node 'n1' is named twice"),
        ({"users": [{"name": "a", "accounts": ["x"]}]}, "user 'a': account 'x' is not among the accounts"),
        ({"users": [{"name": "a"}, {"name": "a"}]}, "user 'a' is named twice"),
        ({"users": [{"name": "a", "uid": 0}]}, "users.0.uid"),
        ({"users": [{"name": "a:0:0:"}]}, "users.0.name"),
        ({"accounts": [{"name": "a", "parent": "b"}, {"name": "b"}]}, "parent 'b' must be named before it"),
        ({"accounts": [{"name": "root"}]}, "account 'root' is named twice"),
        ({"accounts": [{"name": "a", "description": "it's"}]}, "accounts.0.description"),
        ({"partitions": [{"name": "p", "nodes": "n[1-2]"}]}, "partition 'p': node 'n2' is not among the nodes"),
        ({"controllers": 3}, "controllers"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
    ],
)
def test_refused(fields: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        describe(**fields)
    assert str(refused.value).startswith("c.yaml:")


@pytest.mark.parametrize(
    ("name", "what"),
    [("nonsense", "cluster 'nonsense': not one that comes with Sluice"), ("/no/c.yaml", "No such file")],
)
def test_unknown_names(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        load_description(name)


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("nodes: [{names: x1, platform: none}]")
    assert load_description(str(tmp_path / "mine.yml")).hosts == ["x1"]
