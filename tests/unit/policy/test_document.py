"""Policy files: every mistake is reported with line, value and remedy; valid files are read as intended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from policy.document import PolicyError, check, load, parse
from policy.model import Policy
from sluice.base.errors import UsageError

EXAMPLES = Path(__file__).parents[3] / "etc/examples"


def words(text: str) -> list[str]:
    return [str(problem) for problem in check(text, source="f")[1]]


def test_every_mistake_is_named_at_once() -> None:
    found = words(
        "version: 1\n"
        "tenants:\n"
        "  a:\n"
        "    parnt: b\n"
        "    members: [alice, 'Bob X']\n"
        "    limit: {gpus: -3}\n"
        "    max_time: 48\n"
        "  b: {guarantee: {gpus: 9}, limit: {gpus: 4}}\n"
        "scheduling: {order: fairshare}\n"
    )
    assert len(found) == 6
    for line, *parts in (
        (4, "'parnt'", "did you mean 'parent'?"),
        (5, "'Bob X'"),
        (6, "tenants.a.limit.gpus", "-3"),
        (7, "48", "48m"),
        (8, "guarantee.gpus 9", "raise the limit"),
        (9, "'fairshare'"),
    ):
        assert any(one.startswith(f"f:{line}:") and all(part in one for part in parts) for one in found), (line, found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Acme", "'acme'"),
        ("a b", "several names"),
        ("'a,b'", "several names"),
        ("'a[1-2]'", "not kept"),
        ("root", "Sluice reserves"),
        ("sluice_x", "Sluice reserves"),
        ("'42'", "number"),
        ("-a", "not kept"),
        ('"a\'b"', "not kept"),
        ("x" * 41, "at most 40"),
        ("é", "not kept"),
    ],
)
def test_names_that_slurm_would_mangle_are_refused(name: str, said: str) -> None:
    (found,) = words(f"tenants:\n  {name}: {{}}\n")
    assert said in found, found


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("tenants:\n  a: {parent: b}\n", 2, "'b' is not a tenant"),
        ("tenants:\n  a: {parent: b}\n  b: {parent: a}\n", 2, "its own ancestor"),
        ("tenants:\n  a:\n    classes: [h100]\n", 3, "'h100' is not a class"),
        ("classes: {c: {types: [x, y]}}\ntenants:\n  a:\n    limit: {classes: {c: {gpus: 1}}}\n", 4, "one by one"),
        ("classes:\n  c: {types: [x]}\n  d: {types: [x]}\n", 3, "in class 'c' already"),
        ("tenants:\n  a: {guarantee: {gpus: 4}}\n  b: {parent: a, guarantee: {gpus: 5}}\n", 2, "less than the 5"),
        ("tenants:\n  a:\n    guarantee: {gpus: 4}\n    limit: {gpus: 8}\n", 2, "borrow: true"),
        ("tenants:\n  a:\n    budget: {gpu_hours: 4}\n", 3, "usage_period"),
        ("tenants:\n  a: {lend: false}\n", 2, "guarantee"),
        ("tenants:\n  a: {expires: 0001-01-01}\n", 2, "out of range"),
        ("tenants:\n  a: {expires: 9999-12-31}\n", 2, "out of range"),
        ("tenants:\n  a: {members: [root]}\n", 2, "root"),
        ("tenants: {}\ncompaction: {}\n", 2, "only with the failover journal"),
        ("compaction:\n  tenants: {a: false}\n", 2, "'a' is not a tenant"),
        ("compaction:\n  classes: {c: 5m}\n", 2, "'c' is not a class"),
        ("compaction:\n  factor: 0\n", 2, "greater than or equal to 0.1"),
        ("compaction:\n  moves_per_hour: 65\n", 2, "less than or equal to 64"),
        ("tenants:\n  a: {members: [x, x]}\n", 2, "twice"),
        ("allocation: {strategy: hybrid}\n", 1, "reserved_ratio"),
        ("tenants:\n  a: {slurm: {Shell: x}}\n", 2, "not an option"),
        ("tenants:\n  a: {description: 'x:y'}\n", 2, "Slurm would change it"),
    ],
)
def test_parts_that_do_not_fit_each_other(text: str, line: int, said: str) -> None:
    found = words(text)
    assert any(one.startswith(f"f:{line}:") and said in one for one in found), found


def test_a_mapping_where_words_are_allowed_gets_its_own_mistakes() -> None:
    assert [one.partition("; ")[0] for one in words("tenants:\n  a: {members: [{name: x, max_gpu: 2}]}\n")] == [
        "f:2: tenants.a.members.0.max_gpu: unknown key 'max_gpu'"
    ]
    (found,) = words("scheduling: {order: {fifo: -1}}\n")
    assert "scheduling.order.fifo" in found


@pytest.mark.parametrize("section", ["alerts"])
def test_what_nothing_acts_on_is_refused_unless_accepted_by_name(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No section is such a one now; the next that is checked before anything acts on it will be."""
    monkeypatch.setattr("policy.model.LATER", (section,))
    (found,) = words(f"{section}: {{}}\n")
    assert "not yet enforced" in found
    assert f"accept_unenforced: [{section}]" in found
    assert parse(f"{section}: {{}}\naccept_unenforced: [{section}]\n").unenforced() == [section]
    others = [name for name in ("alerts", "health") if name != section]
    assert words(f"{section}: {{}}\naccept_unenforced: {others}\n")


@pytest.mark.parametrize("text", ["a: [", "tenants: {a: {}, a: {}}", "- 1\n- 2\n", "\x00", "&a [*a]"])
def test_what_is_no_policy_at_all(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_an_empty_file_is_an_empty_policy() -> None:
    assert parse("") == Policy()
    assert parse("level: off\n").level == "off"


def test_load_names_the_first_mistake_and_how_many_there_are(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text("tenants:\n  A: {}\n  B: {}\n  c: {x: 1}\n")
    with pytest.raises(PolicyError, match=r"sluice.yaml:2: .* and 1 more|and 2 more") as caught:
        load(path)
    assert len(caught.value.problems) >= 2


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("policy-*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_right(path: Path) -> None:
    assert load(path).policy.tenants


def test_the_small_cluster_says_all_that_it_is_known_for() -> None:
    policy = load(EXAMPLES / "policy-small-cluster.yaml").policy
    assert (policy.allocation.strategy, policy.allocation.reserved_ratio) == ("hybrid", 0.3)
    assert policy.scheduling.order == "fair-share"
    assert policy.scheduling.max_queued == 1000
    assert policy.defaults.default_priority == 5
    assert policy.monitoring is not None
    assert (policy.monitoring.interval, policy.monitoring.retention_days) == (5, 30)
    assert policy.alerts is not None
    assert (policy.alerts.temperature, policy.alerts.utilisation, policy.alerts.memory) == (85, 95, 90)
    assert policy.defaults.max_gpus_per_user == 8
    assert policy.defaults.max_time == 48 * 3600
    assert policy.scheduling.preemption.enabled
    assert policy.checkpoint is not None
    assert (policy.checkpoint.interval, policy.checkpoint.max_retries) == (600, 3)


def test_a_text_of_mistakes_alone_is_checked_soon() -> None:
    began = time.thread_time()  # others' work does not count
    _, problems = check("".join(f"k{number}: 1\n" for number in range(50_000)))
    assert len(problems) >= 100 and time.thread_time() - began < 15
