"""The program that measures a job's GPUs: real processes, the vendors' simulated libraries, faults of each kind."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_sim import library_dir, load_platform, write_node_state
from gpu_sim.fields import set_values
from gpu_sim.state import read_state
from prolog_epilog import preflight_gpus
from prolog_epilog.preflight_gpus import GpuTests, Results, said_of, whole_gpus
from prolog_epilog.programs import gpu_test
from sluice.exchange.record import Grant, JobRecord
from sluice.fabric.preflight import Preflight, Verdict
from sluice.fabric.tested import Member, Part, Result
from sluice.fabric.tested import Test as OneTest
from tests.unit.prolog_epilog.examples import device, granted, record

GPUS = 4
RATES = {"copy_host": "400", "copy_local": "500", "copy_peer": "600"}
"""MB/s: copies take longer than they do on this machine, however busy it is."""


class Node:
    """A simulated node whose GPUs copy at a given rate."""

    def __init__(self, folder: Path, platform: str) -> None:
        self.folder = folder
        write_node_state(folder, load_platform(platform), "n1")
        self.set(*range(GPUS), **RATES)
        pcis = [gpu.pci for gpu in read_state(folder).gpus[:GPUS]]
        vendor = "amd" if "mi300x" in platform else "nvidia"
        names = [f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{pci.function}" for pci in pcis]
        self.gpus = [device(index, pci=name, vendor=vendor) for index, name in enumerate(names)]

    def set(self, *gpus: int, **values: str) -> None:
        for gpu in gpus:
            set_values(self.folder, gpu, values)

    def judged(self) -> Verdict:
        """A whole preflight of this node alone, with the core's own tests."""
        names = tuple(str(one.index) for one in self.gpus)
        preflight = Preflight([Member("n1", ("eth0",), ("",), names, "", "H100")])
        with GpuTests(self.gpus) as tests:
            while some := preflight.next_round():
                found = tests.measure(ordered(some, names), time.monotonic() + 60)
                preflight.take([result(found[str(at)], one) for at, one in enumerate(some) if str(at) in found])
        return preflight.verdict()


def ordered(tests: list[OneTest], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"id": str(at), "kind": one.kind, "gpu": names[one.place], "other_gpu": names[one.other_gpu]}
        for at, one in enumerate(tests)
    ]


def result(said: list[Any], test: OneTest) -> Result:
    value, _, fault = said
    return Result(test, value, 0.0, fault)


@pytest.fixture(autouse=True)
def _libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program finds the simulated ones; it stays this user, who may read the folders of tests."""
    monkeypatch.setenv("SLUICE_SIM_STATE", str(tmp_path / "sim/state"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library_dir()))
    monkeypatch.setattr("prolog_epilog.preflight_programs.os.geteuid", lambda: 1000)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "sim", "dgx-h100")


@pytest.fixture
def amd(tmp_path: Path) -> Node:
    return Node(tmp_path / "sim", "mi300x-platform")


def of(kind: str, gpu: int = 0, other: int = 0) -> dict[str, Any]:
    return {"id": kind, "kind": kind, "gpu": str(gpu), "other_gpu": str(other)}


def measured(node: Node, *tests: dict[str, Any]) -> Results:
    with GpuTests(node.gpus) as made:
        return made.measure(tests, time.monotonic() + 60)


def test_all_is_measured_as_the_gpus_give_it(node: Node) -> None:
    found = measured(node, of("clock"), of("memory"), of("pcie", 1), of("nvlink", 2, 3))
    assert {one: fault for one, (_, _, fault) in found.items()} == dict.fromkeys(found, "")
    values = {one: value for one, (value, _, _) in found.items()}
    assert values["clock"] == pytest.approx(1980, rel=0.15)  # an H100's highest, in MHz
    assert values["memory"] == pytest.approx(2 * 0.5, rel=0.3)  # read and written
    assert values["pcie"] == pytest.approx(0.4, rel=0.3)
    assert values["nvlink"] == pytest.approx(0.6, rel=0.3)


def test_good_gpus_are_good(node: Node) -> None:
    verdict = node.judged()
    assert (verdict.findings, verdict.undecided, verdict.unjudged) == ((), (), 0)
    assert verdict.tests >= 4 * GPUS


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ({"throttle": "hw_slowdown"}, "clock", " MHz"),
        ({"copy_local": "200"}, "memory", " GB/s"),
        ({"copy_host": "150"}, "pcie", " GB/s"),
        ({"copy_peer": "200"}, "nvlink", " GB/s"),
        ({"copy_wrong": "local"}, "memory", "wrong data"),
        ({"copy_wrong": "host"}, "pcie", "wrong data"),
        ({"copy_wrong": "peer"}, "nvlink", "wrong data"),
        ({"lost": "yes"}, "gpu", "answers"),
    ],
)
def test_what_is_at_fault_is_named_and_nothing_else(node: Node, fault: dict[str, str], kind: Any, words: str) -> None:
    node.set(2, **fault)
    [finding] = node.judged().findings
    assert finding.parts == (Part(kind, "n1", "2"),)
    assert words in finding.text
    assert "GPU 2" in finding.text


def test_amd_s_gpus_are_measured_by_hip_which_has_no_clock(amd: Node) -> None:
    found = measured(amd, of("clock"), of("memory"), of("pcie", 1))
    assert set(found) == {"memory", "pcie"}
    amd.set(1, copy_wrong="host")
    amd.set(0, copy_local="100")
    found = measured(amd, of("memory"), of("pcie", 1))
    assert found["memory"][0] == pytest.approx(0.2, rel=0.3)
    assert found["pcie"] == [None, 0.0, "wrong data"]


def test_a_gpu_whose_memory_others_have_is_not_said_to_be_at_fault(node: Node) -> None:
    node.set(0, memory_used="79G")
    assert measured(node, of("memory")) == {}


def test_where_no_driver_answers_nothing_was_tested(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")
    assert measured(node, of("memory")) == {}
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library_dir()))
    monkeypatch.setattr(preflight_gpus, "_READY_S", 1.0)
    node.set(0, driver_hang="yes")
    assert measured(node, of("memory")) == {}


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A program that says something else."""
    program = tmp_path / "program.py"
    monkeypatch.setattr(preflight_gpus, "PROGRAM", program)
    monkeypatch.setattr(preflight_gpus, "_TEST_S", 1.0)

    def make(*lines: str) -> GpuTests:
        text = (
            "import sys\nsys.stdin.readline(); print('{\"ready\": true}'); sys.stdout.flush(); sys.stdin.readline()\n"
        )
        program.write_text(text + "".join(f"print({line!r})\n" for line in lines) + "sys.stdout.flush()\ninput()\n")
        return GpuTests([device()])

    yield make


def test_the_gpu_that_does_not_answer_is_named_and_the_others_were_not_tested(says: Any) -> None:
    lines = ['{"began": "clock"}', '{"began": "memory"}', '{"id": "clock", "value": 1900.0, "fault": ""}']
    with says(*lines) as tests:
        found = tests.measure([of("clock", 0), of("memory", 1), of("pcie", 1), of("nvlink", 2)], time.monotonic() + 30)
    silent = [None, 0.0, "no answer"]
    assert found == {"clock": [1900.0, 0.0, ""], "memory": silent, "pcie": silent}


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "other", "value": 1.0}', '{"id": "clock", "value": "9"}', '{"id": "clock", "value": true}',
        '{"id": "clock", "fault": "no; rm -rf /"}', '{"id": "clock", "fault": "%s"}' % ("x" * 99), "[]", "{", "",
    ],
)  # fmt: skip
def test_only_what_can_be_is_believed(says: Any, line: str) -> None:
    with says(line) as tests:
        assert tests.measure([of("clock")], time.monotonic() + 2) == {}


def test_a_program_does_not_start_when_time_is_over() -> None:
    tests = GpuTests([device()])
    tests.__exit__()
    assert tests.measure([of("clock")], time.monotonic() + 5) == {}


def test_tests_that_share_something_are_not_made_at_once() -> None:
    tests = [of(kind, gpu, (gpu + 1) % 4) for gpu in range(4) for kind in gpu_test.KINDS]

    def busy(test: dict[str, str]) -> set[str]:
        return {test["gpu"], test["other_gpu"]} if test["kind"] == "nvlink" else {test["gpu"]}

    rounds = gpu_test.at_once(tests, busy)
    assert [(some[0]["kind"], len(some)) for some in rounds] == [
        ("clock", 4), ("memory", 4), ("pcie", 4), ("nvlink", 2), ("nvlink", 2),
    ]  # fmt: skip
    for some in rounds:
        taken = [gpu for test in some for gpu in busy(test)]
        assert len(taken) == len(set(taken))
    one_host = gpu_test.at_once([of("pcie", 0), of("pcie", 1)], lambda _: {"host"})
    assert [len(some) for some in one_host] == [1, 1]


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5})])
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert gpu_test.cpus_of(text) == cpus
    with pytest.raises(ValueError, match="^$"):
        gpu_test.cpus_of("")


def test_only_whole_gpus_are_measured() -> None:
    shared = granted(1 << 30)
    whole = record(
        grants=[Grant(0, "GPU-0", "nvidia", "H100", 80 << 30), Grant(1, "GPU-1", "nvidia", "H100", 80 << 30)]
    )
    assert whole_gpus(shared, [device()]) == []
    assert whole_gpus(whole, [device(), device(1, partition="1g.10gb"), device(2)]) == [device()]
    assert whole_gpus(whole, [device(vendor="intel")]) == []
    pair = [device(0, linked=("GPU-1",)), device(1, linked=("GPU-0",))]
    assert said_of(whole, pair) == {"gpus": ["0", "1"], "gpu_model": "H100", "linked": True}
    other = record(8, grants=[Grant(1, "GPU-1", "nvidia", "H100", 80 << 30)])
    assert whole_gpus(whole, [device(), device(1)], [other]) == [device()]
    assert whole_gpus(whole, [device(), device(1, model="A100")]) == []
    assert said_of(capped(whole), [device(), device(1)]) == {
        "gpus": ["0", "1"], "gpu_model": "H100-400W", "linked": False,
    }  # fmt: skip
    assert said_of(whole, []) == {}
    whole.grants[1].power_mw = 300_000
    assert whole_gpus(whole, [device(), device(1)]) == []


@pytest.mark.parametrize(
    ("status", "fault"),
    [(2, False), (46, False), (217, False), (221, False), (222, False), (801, False), (101, True), (214, True),
     (719, True), (999, True)],
)  # fmt: skip
def test_only_errors_that_are_the_gpus_are_its_faults(status: int, fault: bool) -> None:
    """A node without the driver's compiler (221), or with a GPU that a daemon of MPS has for itself (46), is good."""
    assert bool(gpu_test.DriverError("cuCall", status).fault) is fault


def test_the_program_is_in_the_groups_of_its_devices_and_meets_no_tenants_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AMD's files are of mode 660; the folder where CUDA looks for MPS is in /tmp."""
    modes = {"/dev/dri/renderD128": (0o20660, 105), "/dev/kfd": (0o20660, 109), "/dev/root": (0o20660, 0)}
    modes["/dev/file"] = (0o100660, 7)

    def stat(path: Path) -> os.stat_result:
        mode, group = modes[str(path)]
        return os.stat_result((mode, 0, 0, 0, 0, group, 0, 0, 0, 0))

    monkeypatch.setattr("prolog_epilog.preflight_gpus.Path.stat", stat)
    files = ("/dev/dri/renderD128", "/dev/root", "/dev/file")
    program = preflight_gpus._GpuProgram([device(vendor="amd", files=files)])
    assert program.groups() == [105, 109]
    assert program.environment()["CUDA_MPS_PIPE_DIRECTORY"] == "/dev/null"


def capped(job: JobRecord) -> JobRecord:
    for grant in job.grants:
        grant.power_mw = 400_000
    return job


@pytest.mark.gpu
def test_a_real_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any NVIDIA GPU from Maxwell on; the kernel is compiled by the driver."""
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no NVIDIA GPU on this machine (/dev/nvidiactl)")
    for name in ("SLUICE_SIM_STATE", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name)
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(32)
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGetPCIBusId(address, 32, 0) == 0
    monkeypatch.setattr("prolog_epilog.preflight_programs.os.geteuid", os.getuid)
    began = time.monotonic()
    with GpuTests([device(pci=address.value.decode())]) as tests:
        found = tests.measure([of("clock"), of("memory"), of("pcie")], time.monotonic() + 60)
    took = time.monotonic() - began
    print(found, took)
    assert [fault for _, _, fault in found.values()] == ["", "", ""]
    assert 300 < found["clock"][0] < 4000
    assert found["memory"][0] > found["pcie"][0] > 0.5
    assert took < 10
