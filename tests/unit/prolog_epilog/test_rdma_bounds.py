"""Bounds on what jobs hold of RDMA adapters, on a tree of cgroup v2 that answers as the kernel's rdma controller."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from policy.model import Policy
from policy.node_limits import NodeLimits, compile_limits
from prolog_epilog import rdma
from prolog_epilog.agent import Agent
from prolog_epilog.cgroups import Place
from prolog_epilog.rdma import RdmaBounds
from prolog_epilog.server import Peer
from tests.unit.prolog_epilog.examples import GIB, granted, record

BOTH = NodeLimits(rdma_handles=64, rdma_objects=100000)
SCOPE = "system.slice/slurmstepd.scope"
PLACE = Place(7, "0", job_path=f"/{SCOPE}/job_7", version=2)


class Kernel:
    """Folders of cgroups; a child has ``rdma.max`` once its parent passes the controller on."""

    def __init__(self, root: Path, controllers: str = "cpuset cpu memory pids rdma") -> None:
        self.root, self.job = root, root / SCOPE / "job_7"
        self.adapters = ["mlx5_0", "mlx5_1"]
        self.written: list[tuple[str, str]] = []
        (self.job / "step_0/user/task_0").mkdir(parents=True)
        for folder in (root, root / "system.slice", root / SCOPE, self.job):
            (folder / "cgroup.controllers").write_text(controllers)
            (folder / "cgroup.subtree_control").write_text("cpuset cpu memory\n")
            (folder / "cgroup.procs").touch()

    def write(self, path: Path, text: str) -> None:
        """As cgroup_subtree_control_write and rdmacg_resource_set_max."""
        if path.name == "cgroup.subtree_control":
            parents = path.parent.parent / "cgroup.subtree_control"
            if path.parent != self.root and "rdma" not in parents.read_text():
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            path.write_text(path.read_text() + text.removeprefix("+"))
        else:
            if "rdma" not in (path.parent.parent / "cgroup.subtree_control").read_text():
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            device, *bounds = text.split()
            if device not in self.adapters or not bounds:
                raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        self.written.append((str(path.relative_to(self.root)), text))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(tmp_path / "cgroup")
    monkeypatch.setattr(rdma, "_write", made.write)
    return made


def test_the_controller_is_passed_on_from_the_root_and_the_job_is_bounded(kernel: Kernel) -> None:
    one = record()
    bounds = RdmaBounds(lambda: BOTH, kernel.root)
    bounds.hold(one, PLACE, ["mlx5_1", "mlx5_0"])
    assert kernel.written == [
        ("cgroup.subtree_control", "+rdma"),
        ("system.slice/cgroup.subtree_control", "+rdma"),
        (f"{SCOPE}/cgroup.subtree_control", "+rdma"),
        (f"{SCOPE}/job_7/rdma.max", "mlx5_0 hca_handle=64 hca_object=100000"),
        (f"{SCOPE}/job_7/rdma.max", "mlx5_1 hca_handle=64 hca_object=100000"),
    ]
    kernel.written.clear()
    bounds.hold(one, PLACE, ["mlx5_0", "mlx5_1"])  # another step
    assert [path for path, _ in kernel.written] == [f"{SCOPE}/job_7/rdma.max"] * 2
    [event] = one.events
    assert (event.action, event.detail) == (
        "rdma", {"bounds": "hca_handle=64 hca_object=100000", "nics": ["mlx5_0", "mlx5_1"]},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "place", "nics"),
    [(NodeLimits(), PLACE, ["mlx5_0"]), (BOTH, PLACE, []), (BOTH, None, ["mlx5_0"])],
)
def test_nothing_is_done_without_bounds_adapters_or_a_job(kernel: Kernel, limits, place, nics: list[str]) -> None:
    one = record()
    RdmaBounds(lambda: limits, kernel.root).hold(one, place, nics)
    assert kernel.written == one.events == []


def test_where_the_kernel_cannot_the_record_says_so_and_the_job_runs(kernel: Kernel) -> None:
    (kernel.root / "cgroup.controllers").write_text("cpuset cpu memory")
    one = record()
    for place in (PLACE, Place(7, "0", job_path="/slurm/uid_0/job_7", version=1)):
        for _ in range(50):
            RdmaBounds(lambda: BOTH, kernel.root).hold(one, place, ["mlx5_0"])
    [event] = one.events
    assert event.detail == {"problem": "this kernel has no rdma controller in cgroup v2"}
    assert kernel.written == []


def test_an_adapter_that_has_gone_is_no_reason_to_refuse_a_task_or_to_leave_others_unbounded(kernel: Kernel) -> None:
    kernel.adapters = ["mlx5_1"]
    one = record()
    RdmaBounds(lambda: BOTH, kernel.root).hold(one, PLACE, ["mlx5_0", "mlx5_1"])
    assert one.events[-1].detail == {"problem": "No such device"}
    assert kernel.written[-1] == (f"{SCOPE}/job_7/rdma.max", "mlx5_1 hca_handle=64 hca_object=100000")


def test_steps_that_open_one_adapter_or_both_in_turn_do_not_fill_the_record(kernel: Kernel) -> None:
    one = record()
    for step in range(100):
        RdmaBounds(lambda: BOTH, kernel.root).hold(one, PLACE, ["mlx5_0", "mlx5_1"][: step % 2 + 1])
    assert [event.times for event in one.events] == [50, 50]


def test_only_one_of_both(kernel: Kernel) -> None:
    assert rdma.bounds_of(NodeLimits(rdma_objects=5)) == "hca_object=5"
    RdmaBounds(lambda: NodeLimits(rdma_handles=2), kernel.root).hold(record(), PLACE, ["mlx5_0"])
    assert kernel.written[-1][1] == "mlx5_0 hca_handle=2"


def test_the_agent_bounds_a_step_before_its_tasks_start(
    agent: Agent, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: agent.regions.remove(7))  # a mount, where the test runs as root
    agent.state.records[7] = granted(GIB)
    agent.jobs.rdma = RdmaBounds(lambda: BOTH, kernel.root)
    (agent.state.settings.run / "limit").mkdir(parents=True)
    monkeypatch.setattr("prolog_epilog.cgroups.place_of", lambda *_: PLACE)
    monkeypatch.setattr("prolog_epilog.cgroups.take_steps", lambda *_: None)
    step = {"do": "limit", "job": 7, "uid": 1000, "whole": True, "gpus": [0], "shards": 0, "open": []}
    answer = agent.server.answer(json.dumps(step | {"nics": ["mlx5_0"]}).encode(), Peer(os.getpid(), 0))
    assert "ok" in answer, answer
    assert kernel.written[-1] == (f"{SCOPE}/job_7/rdma.max", "mlx5_0 hca_handle=64 hca_object=100000")


def test_the_policy() -> None:
    policy = Policy.model_validate({"version": 1, "enforcement": {"rdma": {"handles": 64}}})
    found = compile_limits(policy.enforcement)
    assert (found.rdma_handles, found.rdma_objects) == (64, None)
