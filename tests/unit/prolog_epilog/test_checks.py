from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from facts_of import MIB, gpu, node

from policy.document import parse
from policy.health import CHECKS, NodeHealth, compile_health
from policy.units import show_seconds
from prolog_epilog.health import memory
from prolog_epilog.health.checks import GPU_CHECKS, NODE_CHECKS
from prolog_epilog.health.judge import Round, judge
from prolog_epilog.health.memory import Memory
from sluice.exchange.readings import Link, Reading

POLICY = compile_health(parse("health: {}").health)


def policy(text: str) -> NodeHealth:
    return compile_health(parse(f"health: {text}").health)


def rounds(*facts: Any, by: NodeHealth = POLICY, every: float = 10.0, **of_node: Any) -> Round:
    """One round after the other, `every` seconds apart; the last one's result. A list is the GPUs of one round."""
    known = Memory()
    result = Round()
    for number, one in enumerate(facts):
        gpus = one if isinstance(one, list) else [one]
        result = judge(node(1000.0 + every * number, *gpus, **of_node), known, by)
    return result


def found(result: Round) -> dict[str, str]:
    return {one.check: one.text for one in result.findings}


def test_there_is_a_function_for_each_check_of_the_policy_and_no_other() -> None:
    assert {*GPU_CHECKS, *NODE_CHECKS} == set(CHECKS)
    assert {name for name, default in CHECKS.items() if default.node} == set(NODE_CHECKS)


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "intel"])
def test_a_healthy_gpu_passes_all_checks(vendor: str) -> None:
    result = rounds(*(gpu(vendor=vendor) for _ in range(40)))
    assert found(result) == {}
    assert result.unknown == {}
    applying = {name for name, check in GPU_CHECKS.items() if vendor in check.vendors}
    skipped = {"xid", "clocks", "idle_gpu"}  # without events, work or a job
    assert applying - skipped <= {*result.passed["GPU-0"], "xid"}


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "intel"])
def test_what_a_driver_does_not_tell_is_unknown_and_never_ok(vendor: str) -> None:
    silent = gpu(vendor=vendor, _reading=Reading("GPU-0"), _residual_bytes=None, _strays=None, _jobs=(7,))
    result = rounds(silent, silent)
    assert found(result) == {}
    told = {"gpu_lost", "device_file", "xid", "link_down", "link_errors", "residual_memory"}
    expected = {name for name, check in GPU_CHECKS.items() if vendor in check.vendors} - told
    assert set(result.unknown["GPU-0"]) == expected
    assert not set(result.passed["GPU-0"]) & expected


CASES: list[tuple[str, str, list[dict[str, Any]], str]] = [
    # check, vendor, what each round reports, words of the finding (empty: there is none)
    ("gpu_lost", "nvidia", [{}, {"_reading": None}], "does not list it"),
    ("gpu_lost", "nvidia", [{}, {"lost": True}], "lost"),
    ("gpu_lost", "amd", [{"problem": "AMDSMI_STATUS_NO_DATA"}], "NO_DATA"),
    ("device_file", "intel", [{"_missing_files": ("/dev/dri/renderD128",)}], "renderD128"),
    ("persistence", "nvidia", [{"persistence": False}], "persistence mode is off"),
    ("persistence", "amd", [{"persistence": False}], ""),
    ("ras", "amd", [{"ras_uncorrected": 5}, {"ras_uncorrected": 6}], "1 uncorrected errors (RAS)"),
    ("ras", "intel", [{"ras_uncorrected": 5}, {"ras_uncorrected": 5}], ""),
    ("ecc_uncorrected", "nvidia", [{}, {"ecc_uncorrected": 2}], "2 uncorrected memory errors in 10m"),
    ("ecc_uncorrected", "nvidia", [{"ecc_uncorrected": 2}, {"ecc_uncorrected": 2}], ""),  # from before we looked
    ("ecc_uncorrected", "amd", [{"ecc_uncorrected": 9}, {"ecc_uncorrected": 1}], "1 uncorrected"),  # began again
    ("ecc_uncorrected", "nvidia", [{}, {"ecc_uncorrected": 2, "ecc_enabled": False}], ""),
    ("ecc_corrected", "intel", [{}, {"ecc_corrected": 999}], ""),
    ("ecc_corrected", "intel", [{}, {"ecc_corrected": 600}, {"ecc_corrected": 1000}], "1000 corrected"),
    ("row_remap_failed", "nvidia", [{"rows_failed": True}], "could not be replaced"),
    ("row_remap_pending", "nvidia", [{"rows_pending": True}], "waits for a reset"),
    ("row_remap_pending", "amd", [{"rows_pending": None, "pages_pending": True}], "waits for a reset"),
    ("retired_pages", "nvidia", [{"pages_retired": 59}], ""),
    ("retired_pages", "amd", [{"pages_retired": 60}], "60 retired memory pages"),
    ("temperature", "nvidia", [{"temperature_c": 96}] * 7, "96 degrees, from 95 on for 1m"),
    ("temperature", "nvidia", [{"temperature_c": 96}] * 6, ""),  # not for long enough
    ("temperature", "nvidia", [*[{"temperature_c": 96}] * 5, {}, *[{"temperature_c": 96}] * 3], ""),
    ("temperature_memory", "amd", [{"temperature_memory_c": 106}] * 7, "memory at 106 degrees"),
    ("throttle_thermal", "nvidia", [{"throttle": ["thermal"]}] * 30, "slowed down by heat for 100 %"),
    ("throttle_thermal", "nvidia", [{"throttle": ["thermal"]}] * 10, ""),  # too little was seen
    ("throttle_thermal", "nvidia", [{"throttle": ["power"]}] * 30, ""),
    ("throttle_power", "nvidia", [{"throttle": ["brake"]}] * 30, "power supply"),
    ("power", "amd", [{"power_mw": 800_000}] * 7, "takes 800 W of 700 W"),
    ("clocks", "nvidia", [{"utilisation_percent": 99}] * 31, "345 MHz of 1980 MHz"),
    ("clocks", "nvidia", [{"utilisation_percent": 99, "throttle": ["thermal"]}] * 31, ""),
    ("clocks", "nvidia", [{"utilisation_percent": 99, "clock_graphics_mhz": 1900}] * 31, ""),
    ("link_down", "nvidia", [{"links": [Link(0, True), Link(3, False)]}], "link 3 is down"),
    ("link_down", "nvidia", [{"links": []}], ""),
    ("link_errors", "amd", [{}, {"links": [Link(0, True, 60, 20, 20)]}], "100 errors of links"),
    ("pcie_width", "intel", [{"pcie_width": 8}] * 7, "PCIe link x8 of x16"),
    ("pcie_replays", "nvidia", [{}, {"pcie_replays": 1000}], "1000 replays"),
    ("residual_memory", "nvidia", [{}, *[{"_residual_bytes": 1524 * MIB}] * 13], "1024 MiB in use by no process"),
    ("residual_memory", "nvidia", [{}, *[{"_residual_bytes": 1523 * MIB}] * 13], ""),
    ("residual_memory", "nvidia", [{}, *[{"_residual_bytes": 9999 * MIB, "_jobs": (7,)}] * 13], ""),
    ("stray_process", "amd", [{"_strays": (41, 42)}] * 13, "processes of no job: 41, 42"),
    ("idle_gpu", "nvidia", [{"_jobs": (7,)}] * 361, "job 7 has not used it for 1h"),
    ("idle_gpu", "nvidia", [*[{"_jobs": (7,)}] * 300, {"_jobs": (7,), "utilisation_percent": 50}, {"_jobs": (7,)}], ""),
]


@pytest.mark.parametrize(("check", "vendor", "told", "words"), CASES)
def test_checks_of_a_gpu(check: str, vendor: str, told: list[dict[str, Any]], words: str) -> None:
    result = found(rounds(*(gpu(vendor=vendor, **one) for one in told)))
    if words:
        assert words in result[check]
    else:
        assert check not in result


def test_every_check_of_a_gpu_has_a_case_that_finds() -> None:
    assert {name for name, _, _, words in CASES if words} | {"xid", "firmware"} == set(GPU_CHECKS)


@pytest.mark.parametrize(
    ("check", "changes", "words"),
    [
        ("driver", {"problems": {"nvidia": "the nvidia driver gives no answer"}}, "gives no answer"),
        ("driver_version", {"modules": {"nvidia": "570.2"}}, "module 570.2, library 570.1"),
        ("driver_version", {"problems": {"nvidia": "Driver/library version mismatch"}}, "mismatch"),
        ("nic_link", {"nics": {"mlx5_0": "DOWN", "mlx5_1": "ACTIVE"}}, "mlx5_0 is DOWN"),
        ("fabric_nic", {"fabric": {"fabric_nic": ["n1's interface mlx5_0 slow"]}}, "mlx5_0 slow"),
        ("fabric_link", {"fabric": {"fabric_link": ["n1's link mlx5_0 slow", "and another"]}}, "slow; and another"),
        ("free_space", {"free_percent": {"/a": 60.0, "/b": 4.9}}, "/b: 4.9 % free"),
        ("spool", {"room_mib": {"/run/sluice": 900.0, "/spool": 15.9, "/gone": None}}, "/spool: 16 MiB free"),
        ("clock_skew", {"skew_s": -31.0}, "31.0 s"),
    ],
)
def test_checks_of_the_node(check: str, changes: dict[str, Any], words: str) -> None:
    result = rounds(*(gpu() for _ in range(5)), **changes)
    assert words in found(result)[check]
    assert all(one.gpu is None for one in result.findings if one.check == check)


def test_a_lost_agent_is_found_for_a_minute_also_where_its_guard_counts_from_the_beginning() -> None:
    known, lost = Memory(), "the node agent was lost (signal-9)"
    counts = [(0, ""), (1, lost), (1, lost), (1, lost), (0, ""), (1, lost)]
    seen = []
    for number, outages in enumerate(counts):
        result = judge(node(1000.0 + 40 * number, gpu(), outages=outages), known, POLICY)
        seen.append(found(result).get("agent_lost"))
    assert seen == [None, lost, lost, None, None, lost]


def test_the_nodes_unknowns() -> None:
    result = rounds(gpu(), modules={"nvidia": None}, nics={"mlx5_0": None}, free_percent={"/x": None}, skew_s=None)
    assert set(result.unknown["node"]) == {"driver_version", "nic_link", "free_space", "clock_skew"}


def test_the_driver_that_is_expected() -> None:
    by = policy('{expect: {nvidia: "580.1"}}')
    assert "570.1, expected 580.1" in found(rounds(gpu(), by=by))["driver_version"]


def test_firmware_that_the_others_do_not_have() -> None:
    result = rounds([gpu(0), gpu(1, vbios="95.99"), gpu(2)])
    (one,) = result.findings
    assert (one.check, one.text) == ("firmware", "firmware 95.99, others have 96.00")
    assert one.gpu is not None and one.gpu.gpu.uuid == "GPU-1"


def test_a_finding_stays_while_nobody_can_tell_and_goes_when_it_passes() -> None:
    known = Memory()
    judge(node(0.0, gpu()), known, POLICY)
    hit = judge(node(10.0, gpu(rows_failed=True, _jobs=(7,))), known, POLICY)
    silent = gpu(_reading=None, _answered=False)
    still = judge(node(20.0, silent, problems={"nvidia": "hangs"}), known, POLICY)
    gone = judge(node(30.0, gpu()), known, POLICY)
    assert [(one.new, one.jobs) for one in hit.findings] == [(True, (7,))]
    assert [(one.check, one.new, one.began) for one in still.findings if one.gpu] == [("row_remap_failed", False, 10.0)]
    assert not gone.findings


def test_modes_and_actions() -> None:
    sick = gpu(rows_failed=True)
    for text, acts in (
        ("{}", True),
        ("{mode: shadow}", False),
        ("{checks: {row_remap_failed: {shadow: true}}}", False),
        ("{checks: {row_remap_failed: {action: warn}}}", False),
    ):
        (one,) = rounds(sick, by=policy(text)).findings
        assert one.acts is acts, text
    assert not rounds(sick, by=policy("{mode: off}")).findings
    assert not rounds(sick, by=policy("{checks: {row_remap_failed: {enabled: false}}}")).findings


def test_rounds_that_pass_are_counted_and_begin_again() -> None:
    known = Memory()
    for number, one in enumerate([gpu(), gpu(), gpu(rows_failed=True), gpu(), gpu(power_mw=800_000)]):
        judge(node(10.0 * number, one), known, POLICY)
    assert known.of("GPU-0").passes == 2  # power only warns
    judge(node(60.0, gpu(_reading=None, _answered=False), problems={"nvidia": "hangs"}), known, POLICY)
    assert known.of("GPU-0").passes == 2  # nobody has answered


def test_memory_outlives_the_agent(tmp_path: Any) -> None:
    path = tmp_path / "health.json"
    known = Memory()
    judge(node(0.0, gpu(ecc_uncorrected=1)), known, POLICY)
    judge(node(10.0, gpu(ecc_uncorrected=2, xids=[(9.0, 31)], _jobs=(7,))), known, POLICY)
    memory.save(path, memory.copy_of(known))
    again = memory.load(path)
    assert again.subjects == known.subjects
    result = judge(node(20.0, gpu(ecc_uncorrected=2)), again, POLICY)
    assert [(one.check, one.began, one.new) for one in result.findings] == [("ecc_uncorrected", 10.0, False)]
    for text in ("", "{}", '{"schema_version": 1, "subjects": {"a": 1}}', '{"schema_version": 2}', "[" * 100000):
        path.write_text(text)
        with pytest.raises(Exception, match="damaged"):
            memory.load(path)
    assert memory.load(tmp_path / "none").subjects == {}
    assert dataclasses.is_dataclass(again)


def test_a_window_restarts_with_another_job_and_after_a_time_without_checks() -> None:
    told = [gpu(_jobs=(7,)) for _ in range(300)] + [gpu(_jobs=(8,)) for _ in range(300)]
    assert not found(rounds(*told))
    known = Memory()
    assert not judge(node(0.0, gpu(temperature_c=99)), known, POLICY).findings
    assert not judge(node(9000.0, gpu(temperature_c=99)), known, POLICY).findings
    assert judge(node(9060.0, gpu(temperature_c=99)), known, POLICY).findings


def test_the_page_lists_every_check_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs/health.md").read_text()
    rows = {
        line.split("`")[1]: [cell.strip() for cell in line.split("|")] for line in page.splitlines() if "| `" in line
    }
    for name, default in CHECKS.items():
        cells = rows[name]
        assert default.title in cells and cells[-3:-1] == [default.severity, default.action], name
        assert (show_seconds(default.window) if default.window else "") == cells[-4]
        assert (f"{default.threshold:g} {default.unit}" if default.unit else "") == cells[-5]
