"""Classes of GPUs, and the expressions that choose them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import dgx, gpu, l40s, matrix, mig, mixed

from gres_probe.collect import write_inventory
from gres_probe.expressions import compile_condition
from gres_probe.group import FIELDS, group
from gres_probe.inventory import Inventory
from policy.grouping import Grouping, load_grouping
from sluice.base.errors import SluiceError

MACHINES = [dgx("dgx1"), dgx("dgx2"), l40s("l40s1"), mixed("mixed1"), mig("mig1")]


def classes(*strategies: dict[str, Any], machines: list[Inventory] = MACHINES, **more: Any) -> dict[str, int]:
    """The number of GPUs in each class."""
    measured = more.pop("measured", None)
    grouping = Grouping.model_validate({"strategies": list(strategies), **more})
    return {name: len(one.gpus) for name, one in group(machines, grouping, measured=measured).classes.items()}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"by": "model"}, {"h100": 18, "h100_1g.10gb": 2, "l40s": 4, "mi300x": 1}),
        ({"by": "vendor"}, {"amd": 1, "nvidia": 24}),
        ({"by": "memory", "step": "8G"}, {"16g": 2, "192g": 1, "48g": 4, "80g": 18}),
        ({"by": "memory", "step": 1000}, {"10000m": 2, "197000m": 1, "47000m": 4, "82000m": 18}),
        ({"by": "link-domain"}, {"nolink": 9, "nvlink8": 16}),
        ({"by": "compatibility"}, {"amd_gfx942": 1, "nvidia_8.9": 4, "nvidia_9.0": 20}),
        ({"by": "compatibility", "driver": True}, {"amd_gfx942_550": 1, "nvidia_8.9_550": 4, "nvidia_9.0_550": 20}),
        (
            {"by": "expression", "classes": {"big": "memory_gib >= 80", "amd": "vendor == 'amd'"}},
            {"big": 19, "other": 6},
        ),
        ({"by": "expression", "classes": {"mig": "partition"}, "otherwise": "whole"}, {"mig": 2, "whole": 23}),
    ],
)
def test_strategies(strategy: dict[str, Any], expected: dict[str, int]) -> None:
    assert classes(strategy) == expected


def test_composition() -> None:
    assert classes({"by": "vendor"}, {"by": "link-domain"}, machines=MACHINES[:3]) == {
        "nvidia-nolink": 4,
        "nvidia-nvlink8": 16,
    }


def test_declared_performance() -> None:
    declared = {"l40s": 362, "h100": 989, "mi300x": 1000}
    found = classes({"by": "performance", "threshold": 0.1}, performance=declared)
    assert found == {"p0": 4, "p1": 19, "unrated": 2}


def test_measured_performance_goes_first() -> None:
    machine = Inventory("n1", [gpu(i) for i in range(4)], matrix(4))
    measured = {"GPU-0-HBM3": 100.0, "GPU-1-HBM3": 109.0, "GPU-2-HBM3": 111.0}
    found = classes({"by": "performance"}, machines=[machine], measured=measured, performance={"h100": 500})
    assert found == {"p0": 2, "p1": 1, "p2": 1}  # a class reaches ten per cent above its slowest, not from step to step


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=30), st.floats(0.01, 2))
def test_performance_classes_keep_to_the_threshold(figures: list[float], threshold: float) -> None:
    machine = Inventory("n1", [gpu(i) for i in range(len(figures))], matrix(len(figures)))
    measured = {one.uuid: figure for one, figure in zip(machine.gpus, figures, strict=True)}
    grouping = Grouping.model_validate({"strategies": [{"by": "performance", "threshold": threshold}]})
    found = [
        sorted(measured[ref.uuid] for ref in one.gpus)
        for one in group([machine], grouping, measured=measured).classes.values()
    ]
    assert all(members[-1] <= members[0] * (1 + threshold) for members in found)
    found.sort()
    assert all(low[-1] < high[0] for low, high in pairwise(found))


def test_features_and_node_sets() -> None:
    result = group(MACHINES, Grouping())
    assert result.features()["mixed1"] == ("class_h100", "class_mi300x")
    assert "NodeSet=class_h100 Nodes=dgx[1-2],mig1,mixed1\n" in result.node_sets()


def test_order_does_not_matter() -> None:
    first, second = group(MACHINES, Grouping()), group(MACHINES[::-1], Grouping())
    assert list(first.classes) == list(second.classes)
    assert first.node_sets() == second.node_sets()


FIELD_VALUES = {"memory_gib": 80, "vendor": "nvidia", "sm": 9.0, "link_size": 8, "numa_node": None, "partition": False}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("memory_gib >= 80", True),
        ("40 <= memory_gib < 80", False),
        ("vendor == 'nvidia' and not partition", True),
        ("vendor in ['amd', 'intel'] or sm >= 9", True),
        ("vendor not in ('amd',)", True),
        ("memory_gib * link_size >= 640", True),
        ("memory_gib // 3 == 26 and memory_gib % 3 == 2 and memory_gib / 8 == 10 and memory_gib - 1 > -1", True),
        ("numa_node > 0", False),
        ("numa_node <= 0", False),
        ("numa_node == None", True),
        ("numa_node is not None", False),
        ("vendor > 3", False),
        ("vendor * 3 == 1", False),
        ("memory_gib / 0 > 1", False),
        ("True", True),
    ],
)
def test_expressions(text: str, holds: bool) -> None:
    assert compile_condition(text, FIELDS, source="test")(FIELD_VALUES) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "memory_gib.__class__",
        "vendor[0] == 'n'",
        "9 ** 9 ** 9",
        "1 << 999999",
        "lambda: 1",
        "[x for x in (1,)]",
        "f'{vendor}'",
        "(x := 1)",
        "unknown > 1",
        "memory_gib >",
        "vendor if True else 1",
        "b'x' == vendor",
        "{1: 2}",
        "not " * 500 + "True",
        "1" * 1001,
        "",
        "a\x00b",
        "...",
    ],
)
def test_what_is_not_allowed(text: str) -> None:
    with pytest.raises(SluiceError):
        compile_condition(text, FIELDS, source="test")


TOKENS = st.sampled_from([*FIELDS[:4], *"and or not < == in ( ) [ ] 1 'x' + * - % ,".split()])


@given(st.one_of(st.text(max_size=60), st.lists(TOKENS, max_size=25).map(" ".join)))
def test_any_expression_is_refused_or_total(text: str) -> None:
    try:
        condition: Callable[[dict[str, Any]], bool] = compile_condition(text, FIELDS, source="test")  # type: ignore[assignment]
    except SluiceError:
        return
    assert condition(FIELD_VALUES) in (True, False)
    assert condition({}) in (True, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grouping: {strategies: [{by: magic}]}", "magic"),
        ("grouping: {strategies: []}", "at least 1"),
        ("grouping: {strategies: [{by: memory, step: 8Q}]}", "size '8Q'"),
        ("grouping: {strategies: [{by: performance, threshold: 0}]}", "greater than 0"),
        ("grouping: {strategies: [{by: expression, classes: {'a b': 'True'}}]}", "pattern"),
        ("grouping: {prefix: '9'}", "pattern"),
        ("\n\ngrouping: {colour: red}", "yaml:3: .*Extra inputs"),
        ("grouping: {performance: {h100: -1}}", "greater than 0"),
        ("grouping: [", "not YAML"),
        ("- a", "not a mapping"),
        ("grouping: " + "[" * 5000, "not YAML"),
    ],
)
def test_bad_policies(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(text)
    with pytest.raises(SluiceError, match=says):
        load_grouping(path)


def test_a_policy_without_the_section(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text("tenants: []\n")
    assert load_grouping(path) == Grouping()


def test_command(tmp_path: Path) -> None:
    for machine in MACHINES:
        write_inventory(tmp_path / "inventories", machine)

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "sluice.main",
                "group",
                "--inventory-dir",
                str(tmp_path / "inventories"),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        return done.stdout if code == 0 else done.stderr

    assert run("-P", "-n", "-o", "class,gpus,nodelist").splitlines()[0] == "h100|18|dgx[1-2],mig1,mixed1"
    assert {one["name"] for one in json.loads(run("--json"))["classes"]} == {"h100", "h100_1g.10gb", "l40s", "mi300x"}
    assert run("--output-dir", str(tmp_path)) == f"wrote {tmp_path}/classes.sluice.conf\n"
    assert run("--output-dir", str(tmp_path)) == ""
    assert (tmp_path / "classes.sluice.conf").read_text() == run("--node-sets")
    (tmp_path / "bad.json").write_text('{"GPU-1": -3}')
    assert "no performance" in run("--measured", str(tmp_path / "bad.json"), code=1)
    assert "No such file" in run("--policy", str(tmp_path / "none.yaml"), code=2)
    (tmp_path / "inventories/torn.json").write_text('{"schema_version": 1, "node"')
    assert "torn" in run("-P", "-n", code=1)
