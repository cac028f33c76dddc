"""MIG layouts against the simulated driver: planned, checked, laid out, and finished after a kill."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from layout_node import DYING, LayoutNode

from gpu_sim.fields import get_values, set_values
from gres_probe.mig import Change, GpuLayout, changes, wanted_layouts, words
from policy.node import NodePolicy
from policy.node_limits import NodeLimits
from sluice.base.errors import UsageError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the driver lays out GPUs for root only")


def layout(profiles: tuple[str, ...] | None, **more: Any) -> GpuLayout:
    fields = {"index": 0, "uuid": "GPU-0", "model": "H100", "capable": True, "whole": True, "pending": False, "busy": 0}
    return GpuLayout(profiles=profiles, **{**fields, **more})


@pytest.mark.parametrize(
    ("now", "wanted", "changed"),
    [
        (layout(None), None, False),
        (layout(None), ("7g.80gb",), True),
        (layout(()), None, True),
        (layout(("3g.40gb", "2g.20gb")), ("2g.20gb", "3g.40gb"), False),  # in any order
        (layout(("3g.40gb",)), ("3g.40gb", "3g.40gb"), True),
        (layout(("3g.40gb",), whole=False), ("3g.40gb",), True),  # killed before its compute instance was made
        (layout(None, pending=True), None, True),
    ],
)
def test_only_what_differs_is_changed(now: GpuLayout, wanted: tuple[str, ...] | None, changed: bool) -> None:
    assert bool(changes([now], {0: wanted})) is changed
    assert changes([now], {}) == []  # the policy does not name it


def test_the_policy_names_nodes_and_gpus() -> None:
    policy = {"n[1-2]": ("7g.80gb",), "n1:1,2": ("3g.40gb", "3g.40gb"), "n2:0": ()}
    assert wanted_layouts("n1", policy, 3) == {0: ("7g.80gb",), 1: ("3g.40gb",) * 2, 2: ("3g.40gb",) * 2}
    assert wanted_layouts("n2", policy, 2) == {0: None, 1: ("7g.80gb",)}
    assert wanted_layouts("n3", policy, 2) == {}
    with pytest.raises(UsageError, match="GPU 2: n1 has 2 GPUs"):
        wanted_layouts("n1", policy, 2)


def test_a_change_in_words() -> None:
    assert Change(layout(None), ("3g.40gb",)).describe() == "GPU 0 (H100): MIG off -> 3g.40gb"
    assert words(()) == "MIG on, no instance"


class Node(LayoutNode):
    """One of NVIDIA GPUs."""

    def __init__(self, folder: Path, platform: str = "dgx-h100") -> None:
        super().__init__(folder, platform)

    def wants(self, **layouts: tuple[str, ...]) -> None:
        mig = {key.replace("_", ":"): profiles for key, profiles in layouts.items()}
        self.policy.write_text(NodePolicy(limits=NodeLimits(mig=mig)).render())

    def apply(self, stop_after: int | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(APPLY, self.policy, -1 if stop_after is None else stop_after, check=check)

    def layouts(self) -> list[str]:
        return [get_values(self.sim, index)["mig_layout"] for index in range(2)]


# Lays out what `sluice mig apply` would, and is killed after so many calls of the driver's setters.
APPLY = f"""{DYING}
from pathlib import Path
from gres_probe.mig import Mig, changes, wanted_layouts
from policy.node import parse
import pynvml
for name in ("nvmlDeviceSetMigMode", "nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpuInstanceCreateComputeInstance",
             "nvmlGpuInstanceDestroy", "nvmlComputeInstanceDestroy"):
    setattr(pynvml, name, dying(getattr(pynvml, name)))
mig = Mig()
now = mig.layouts()
for one in changes(now, wanted_layouts("n1", parse(Path(sys.argv[1]).read_bytes(), source="f").limits.mig, len(now))):
    mig.check(one)
    mig.apply(one)
"""


@needs_root
def test_gpus_are_laid_out_and_left_alone_afterwards(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.wants(n1_0=("3g.40gb", "2g.20gb", "1g.10gb"), n1_1=("1g.20gb",) * 4)
    planned = json.loads(node.plan("--json").stdout)["changes"]
    assert [(one["gpu"], one["now"]) for one in planned] == [(0, None), (1, None)]
    assert "GPU 0 (NVIDIA H100 80GB HBM3): MIG off -> 3g.40gb,2g.20gb,1g.10gb" in node.plan().stdout
    node.apply()
    assert node.layouts() == ["3g.40gb,2g.20gb,1g.10gb", ",".join(["1g.20gb"] * 4)]
    before = (node.sim / "state").read_bytes()
    assert "nothing to change" in node.plan().stderr
    node.apply()
    assert (node.sim / "state").read_bytes() == before
    node.wants(n1=())
    node.apply()
    assert node.layouts() == ["", ""] and get_values(node.sim, 0)["mig"] == "no"


@needs_root
@pytest.mark.parametrize(
    "undone",
    [
        {"mig_layout": ""},  # as on an A100, whose mode lies in the board's memory
        {"mig_layout": "", "mig": "no"},  # as from Hopper on
    ],
)
def test_a_restart_of_the_node_is_made_good(tmp_path: Path, undone: dict[str, str]) -> None:
    node = Node(tmp_path)
    node.wants(n1_0=("3g.40gb", "3g.40gb"))
    node.apply()
    assert node.restore() == ""
    for field, value in undone.items():
        set_values(node.sim, 0, {field: value})
    assert node.layouts()[0] == ""
    assert node.restore().count("->") == 1
    assert node.layouts() == ["3g.40gb,3g.40gb", ""]
    assert node.restore() == ""


@needs_root
@pytest.mark.parametrize("calls", range(9))
def test_killed_at_any_call_and_run_again_it_is_right(tmp_path: Path, calls: int) -> None:
    node = Node(tmp_path)
    node.wants(n1_0=("4g.40gb", "1g.10gb"))
    node.apply()
    node.wants(n1_0=("2g.20gb", "2g.20gb", "3g.40gb"))
    assert node.apply(stop_after=calls, check=False).returncode == -9
    node.apply()
    assert sorted(node.layouts()[0].split(",")) == ["2g.20gb", "2g.20gb", "3g.40gb"]
    assert "nothing to change" in node.plan().stderr


@needs_root
@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (("9g.90gb",), "no MIG profile '9g.90gb'; it has: 1g.10gb"),
        (("4g.40gb", "4g.40gb"), "no room for 4g.40gb in 4g.40gb,4g.40gb"),
        (("7g.80gb", "1g.10gb"), "no room for 1g.10gb"),
    ],
)
def test_what_the_gpu_cannot_have_is_refused_before_anything_is_touched(
    tmp_path: Path, wanted: tuple[str, ...], why: str
) -> None:
    node = Node(tmp_path)
    node.wants(n1_0=wanted)
    before = (node.sim / "state").read_bytes()
    for done in (node.plan(check=False), node.apply(check=False)):
        assert done.returncode != 0 and why in done.stderr
    assert (node.sim / "state").read_bytes() == before


@needs_root
def test_a_gpu_without_mig_and_one_in_use_are_refused(tmp_path: Path) -> None:
    node = Node(tmp_path / "a", "l40s-x4")
    node.wants(n1_0=("1g.10gb",))
    node.policy.parent.mkdir(exist_ok=True)
    assert "has no MIG" in node.plan(check=False).stderr
    node = Node(tmp_path / "b")
    node.wants(n1_0=("7g.80gb",))
    set_values(node.sim, 0, {"process": "1:1G"})
    assert "1 processes are on it" in node.plan().stdout
    assert "processes use it" in node.apply(check=False).stderr
    assert get_values(node.sim, 0)["mig"] == "no"


# Checks or applies a layout while one of NVML's calls fails, as with a GPU that is lost by then.
FAILING = """
import sys, pynvml
from gres_probe.mig import Change, Mig
from sluice.base.errors import SluiceError
doing, failing = sys.argv[1:]
mig = Mig()
change = Change(mig.layouts()[0], ("3g.40gb", "3g.40gb"))
def fail(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
setattr(pynvml, failing, fail)
try:
    getattr(mig, doing)(change)
except SluiceError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("doing", "failing"),
    [
        ("check", "nvmlDeviceGetHandleByIndex"),
        ("check", "nvmlDeviceGetGpuInstancePossiblePlacements"),
        ("apply", "nvmlDeviceGetHandleByIndex"),
        ("apply", "nvmlDeviceSetMigMode"),
    ],
)
def test_what_the_driver_refuses_is_said_with_the_gpu_and_what_was_asked(
    tmp_path: Path, doing: str, failing: str
) -> None:
    assert Node(tmp_path).run(FAILING, doing, failing).stdout.strip() == (
        "GPU 0 (NVIDIA H100 80GB HBM3): MIG off -> 3g.40gb,3g.40gb: NVML: GPU is lost; "
        "see: nvidia-smi, dmesg; then run: sluice mig apply"
    )


# The rules of the driver's own setters, which the above relies on.
RULES = """
import ctypes, json, os, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
said = []
def ask(function, *arguments):
    try:
        answer = function(*arguments)
        said.append("ok" if not isinstance(answer, int) else answer)
        return answer
    except n.NVMLError as error:
        said.append(str(error))
if os.fork() == 0:
    os.setresuid(65534, 65534, 65534)
    ask(n.nvmlDeviceSetMigMode, h, 1); print(json.dumps(said), flush=True); os._exit(0)
os.wait()
ask(n.nvmlDeviceCreateGpuInstance, h, 19)          # MIG is off
ask(n.nvmlDeviceSetMigMode, h, 1)
instance = ask(n.nvmlDeviceCreateGpuInstance, h, 9)
ask(n.nvmlDeviceGetMigDeviceHandleByIndex, h, 0)   # not before it has a compute instance
ask(n.nvmlGpuInstanceCreateComputeInstance, instance, 0)
compute = ask(n.nvmlGpuInstanceCreateComputeInstance, instance, 2)
ask(n.nvmlGpuInstanceCreateComputeInstance, instance, 2)
ask(n.nvmlDeviceGetMigDeviceHandleByIndex, h, 0)
ask(n.nvmlDeviceSetMigMode, h, 0)                  # instances go first
ask(n.nvmlGpuInstanceDestroy, instance)            # and compute instances before them
ask(n.nvmlDeviceCreateGpuInstance, h, 0)           # no room
ask(n.nvmlComputeInstanceDestroy, compute)
ask(n.nvmlGpuInstanceDestroy, instance)
ask(n.nvmlDeviceSetMigMode, h, 0)
print(json.dumps(said))
"""


@needs_root
def test_the_drivers_rules(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == tmp_path or folder.name.startswith("pytest"):
            folder.chmod(0o755)  # the user that the driver refuses may read the node's state
    denied, said = map(json.loads, Node(tmp_path).run(RULES).stdout.splitlines())
    assert denied == ["Insufficient Permissions"]
    assert said == [
        "Not Supported", 0, "ok", "Not Found", "Not Supported", "ok", "Insufficient Resources", "ok",
        "In use by another client", "In use by another client", "Insufficient Resources", 0, 0, 0,
    ]  # fmt: skip


@needs_root
def test_a_mode_waits_for_a_reset_where_processes_keep_the_gpu(tmp_path: Path) -> None:
    node = Node(tmp_path)
    set_values(node.sim, 0, {"process": "1:1G"})
    code = (
        "import json, pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "print(json.dumps([n.nvmlDeviceSetMigMode(h, 1), *n.nvmlDeviceGetMigMode(h)]))"
    )
    assert json.loads(node.run(code).stdout) == [19, 0, 1]
