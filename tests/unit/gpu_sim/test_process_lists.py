"""The agent's own reading of NVML's lists of processes, compared with pynvml's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim_node import Node

BOTH = """
import json, os, pathlib, pynvml as n
from gpu_sim.fields import set_values
from prolog_epilog import nvml_lists
nvml_lists._ROOM = 1
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
set_values(pathlib.Path(os.environ["SLUICE_SIM_STATE"]).parent, 2, {"lost": "yes"})
lists, asked = nvml_lists.ProcessLists(n), []
lists.held(handles[3])  # finds out which form there is
for one in lists._lists:
    def count(*arguments, function=one._function):
        asked.append(1)
        return function(*arguments)
    one._function = count
ours = [[sorted(lists.held(handle)) for handle in handles] for _ in range(2)]
form = lists._forms[0]
theirs = []
for handle in handles:
    try:
        found = [p for kind in ("Compute", "Graphics")
                 for p in getattr(n, f"nvmlDeviceGet{kind}RunningProcesses{form}")(handle)]
    except n.NVMLError_GpuIsLost:
        found = []
    theirs.append(sorted([p.pid, p.usedGpuMemory] for p in found))
print(json.dumps({"ours": ours, "theirs": theirs, "form": form, "asked": len(asked)}))
"""


@pytest.mark.parametrize(("platform", "form"), [("dgx-h100", "_v3"), ("dgx-a100", "_v2")])
def test_they_are_pynvmls_with_half_of_the_questions(make_node: Callable[..., Node], platform: str, form: str) -> None:
    node = make_node(platform)
    for number in range(5):
        node.set(0, process=f"{1000 + number}:{number + 1}G")
    node.set(1, process="1001:3G")
    node.set(2, process="1002:4G")  # lost in a moment
    found = node.run(BOTH)
    assert found["form"] == form
    assert found["ours"] == [found["theirs"], found["theirs"]]
    assert [len(listed) for listed in found["theirs"]] == [5, 1, 0, 0, 0, 0, 0, 0]
    assert found["theirs"][0][4] == [1004, 5 << 30]
    assert found["asked"] <= 2 * 2 * 8 + 3  # the first time with a longer array, until all have room


def test_a_function_that_the_driver_does_not_have(dgx: Node) -> None:
    found = dgx.run("""
import json, types, pynvml as n
from prolog_epilog import nvml_lists
old = types.SimpleNamespace(nvmlLib=object(), NVMLError=n.NVMLError, NVML_ERROR_FUNCTION_NOT_FOUND=13,
                            NVMLError_FunctionNotFound=n.NVMLError_FunctionNotFound)
said = []
for ask in (lambda: nvml_lists.ProcessLists(old).held(None), lambda: nvml_lists.BusyLists(old)):
    try:
        ask()
    except n.NVMLError_FunctionNotFound as error:
        said.append(str(error))
print(json.dumps(said))
""")
    assert found == ["Function Not Found"] * 2
