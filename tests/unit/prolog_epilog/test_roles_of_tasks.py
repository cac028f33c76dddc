"""Roles of a job as a node has them: what tasks get in their environment, and what they can see."""

from __future__ import annotations

import random

import pytest

from prolog_epilog.roles import Given, Layout, Step, narrowed
from prolog_epilog.state import RefusalError

TEXT = "prefill,decode n1=0-3/4-7 n2=/0-2,5"
LAYOUT = Layout.read(TEXT)
ALL = tuple(range(8))


def test_a_layout_and_its_variables() -> None:
    assert LAYOUT.nodes == {"n1": ((0, 1, 2, 3), (4, 5, 6, 7)), "n2": ((), (0, 1, 2, 5))}
    assert LAYOUT.exports(None) == {
        "SLUICE_GPU_ROLES": "prefill=n1:0-3 decode=n1:4-7+n2:0-2,5",
        "SLUICE_GPU_ROLE_NODES_prefill": "n1",
        "SLUICE_GPU_ROLE_NODES_decode": "n1,n2",
    }
    assert LAYOUT.exports(Given("decode", (4,), 1, 8)).items() > {
        "SLUICE_GPU_ROLE": "decode", "SLUICE_GPU_ROLE_RANK": "1", "SLUICE_GPU_ROLE_SIZE": "8",
    }.items()  # fmt: skip
    assert "SLUICE_GPU_ROLE_RANK" not in LAYOUT.exports(Given("decode", (4,)))


@pytest.mark.parametrize(
    "text",
    [
        "a,b n1=0",
        "a,a n1=0/1",
        "a-b n1=0",
        "a n1=1-0",
        "a n1=0 n1=1",
        "a n1=64",
        "a n1=0-999999999",
        "a n1=2,1",
        "a n1=x",
        "a =0",
        "a n1",
        "seventeen_letters n1=0",
        "a,b,c,d,e,f,g,h,i n1=0////////",
        "a " + "n" * (32 << 10) + "=0",
    ],
)
def test_what_slurmctld_would_not_write(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        Layout.read(text)


@pytest.mark.parametrize(
    ("node", "open", "step", "expected"),
    [
        # Each task has a GPU of its own, by Slurm.
        ("n1", [5], Step(local=5, tasks="8,4", gpus=8), Given("decode", (5,), 1, 8)),
        ("n1", [2], Step(local=2, tasks="8,4", gpus=8), Given("prefill", (2,), 2, 4)),
        ("n2", [5], Step(local=3, node=1, tasks="8,4", gpus=4), Given("decode", (5,), 7, 8)),
        ("n1", [6], Step(local=6, tasks="8,4", bound=True), Given("decode", (6,), 2, 8)),
        ("n1", [5], Step(local=1, tasks="2,1", gpus=8, bound=True), Given("decode", (5,))),  # --gpu-bind=map_gpu:0,5
        ("n1", [6, 7], Step(local=3, tasks="4,2", gpus=8), Given("decode", (6, 7), 1, 4)),
        # All tasks of a node share its GPUs: they are divided as these are.
        ("n1", ALL, Step(local=0, tasks="2,1", gpus=8), Given("prefill", (0, 1, 2, 3), 0, 1)),
        ("n1", ALL, Step(local=1, tasks="2,1", gpus=8), Given("decode", (4, 5, 6, 7), 0, 2)),
        ("n2", [0, 1, 2, 5], Step(local=0, node=1, tasks="2,1", gpus=4), Given("decode", (0, 1, 2, 5), 1, 2)),
        ("n1", ALL, Step(local=9, tasks="16,8", gpus=8), Given("decode", (4, 5, 6, 7), 1, 16)),
        # One task, or three, for two roles: none of them.
        ("n1", ALL, Step(), None),
        ("n1", ALL, Step(tasks="1,1", gpus=8), None),
        ("n1", ALL, Step(local=1, tasks="3,1", gpus=8), None),
        ("n1", [3, 4], Step(local=1, tasks="4,2", gpus=8), None),
        # A part of the job: the role is known, and its place among all is not.
        ("n2", [0, 1, 2, 5], Step(tasks="1", gpus=4), Given("decode", (0, 1, 2, 5))),
        ("n1", [5], Step(local=1, tasks="4", gpus=4), Given("decode", (5,))),
        # What a user makes up.
        ("n1", [5], Step(local=5, tasks="8(x999999999)", gpus=8), Given("decode", (5,))),
        ("n1", ALL, Step(local=1 << 30, tasks="2,1", gpus=8), None),
        ("n9", [5], Step(local=5, tasks="8,4", gpus=8), None),
        # The step names the role.
        ("n1", ALL, Step(rank=1, size=6, tasks="4,2", gpus=8, role="decode"), Given("decode", (4, 5, 6, 7), 1, 6)),
        ("n1", [6], Step(rank=1, size=6, role="decode"), Given("decode", (6,), 1, 6)),
    ],
)
def test_what_a_task_has(node: str, open: list[int], step: Step, expected: Given | None) -> None:
    assert LAYOUT.given_to(step, node, open) == expected


def test_ranks_are_each_there_once() -> None:
    """Random layouts, tasks with GPUs of their own and tasks that share them: each role's ranks are 0 to its size."""
    draw, ranked = random.Random(22), 0
    for _ in range(300):
        each = draw.choice([1, 2, 4])
        nodes: dict[str, tuple[tuple[int, ...], ...]] = {}
        for node in range(draw.randint(1, 4)):
            gpus = [draw.choice([0, 1]) for _ in range(8 // each)]
            split = [tuple(g for g in range(8) if gpus[g // each] == role) for role in (0, 1)]
            nodes[f"n{node}"] = (split[0], split[1])
        layout, own = Layout(("a", "b"), nodes), draw.random() < 0.5
        found: dict[str, list[int]] = {"a": [], "b": []}
        sizes: dict[str, set[int | None]] = {"a": set(), "b": set()}
        tasks = ",".join([str(8 // each)] * len(nodes))
        for number, name in enumerate(nodes):
            for local in range(8 // each):
                open = range(local * each, (local + 1) * each) if own else range(8)
                given = layout.given_to(Step(local=local, node=number, tasks=tasks, gpus=8), name, open)
                assert given is not None
                assert set(given.gpus) <= set(layout.gpus_of(given.role, name))
                if given.rank is not None:
                    found[given.role].append(given.rank)
                    sizes[given.role].add(given.size)
        for role, ranks in found.items():
            assert sorted(ranks) == list(range(len(ranks)))
            assert sizes[role] <= {len(ranks)}
            ranked += len(ranks)
    assert ranked > 1000


def test_a_step_that_cannot_have_its_role() -> None:
    with pytest.raises(RefusalError, match="no role of the job") as unknown:
        LAYOUT.given_to(Step(role="router"), "n1", ALL)
    assert unknown.value.remedy == "name one of prefill, decode"
    with pytest.raises(RefusalError, match="none of the role's GPUs on n2") as elsewhere:
        LAYOUT.given_to(Step(role="prefill"), "n2", [0, 1])
    assert "start it on n1 (srun -w)" in str(elsewhere.value.remedy)


def test_visible_devices_are_narrowed() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ZE_AFFINITY_MASK": "7", "ROCR_VISIBLE_DEVICES": 5}
    assert narrowed(visible, (2, 3, 5, 6), (3, 6), "nvidia") == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert narrowed(visible, (2, 3, 5, 6), (2, 3, 5, 6), "nvidia") == {}


def test_lists_of_amd_that_count_what_another_leaves() -> None:
    """Slurm without Flags= in gres.conf sets all of them."""
    visible = {name: "0,1,2,3" for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")}
    left = narrowed(visible, range(4), (2, 3), "amd")
    assert left == {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0,1", "GPU_DEVICE_ORDINAL": "0,1"}
    assert narrowed({"CUDA_VISIBLE_DEVICES": "0,1"}, (0, 1), (1,), "amd") == {"CUDA_VISIBLE_DEVICES": "1"}


def test_a_step_from_a_request() -> None:
    said = {"local": 1, "rank": -1, "size": True, "node": "0", "tasks": 4, "gpus": 8, "bound": 1, "role": "a", "x": 1}
    assert Step.of(said) == Step(local=1, gpus=8, role="a")
    assert Step.of({"gpus": [5], "bound": True}) == Step(bound=True)
