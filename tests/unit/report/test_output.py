"""What reports print: units, widths, and names that would break a terminal, a spreadsheet or a parser."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError, UsageError
from sluice.cli.report_job import _bindings, bar, render
from sluice.cli.report_output import (
    choose,
    help_format,
    print_aligned,
    print_csv,
    print_json,
    print_parsable,
)
from sluice.report.advice import HostUse, advise
from sluice.report.count import Span, tally
from sluice.report.fields import DEFAULTS, FIELDS, GROUPED_BY, Row
from sluice.report.output import Units, duration, number
from sluice.report.plot import plot
from sluice.report.summaries import GpuUse, JobUse, of_comment
from sluice.report.tally import Tally
from sluice.report.tenants import Period, budget, jain, usage_period
from sluice.slurm import Commands
from sluice.slurm.allocations import _rows, stream
from tests.unit.report.test_tally import FLEET, JOB

HOSTILE = [
    "=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "evil\x1b[31m\x1b]0;title\x07", "two\nlines\r\nthree",
    "a|b|c", '"quoted", <b>html</b> & $x$', "\u202ereversed\u2066", "bcc: a@b.c\r\nSubject: x", "x" * 3000,
    "\x00\x9b1m", "\ud800half",
]  # fmt: skip


def row(name: str = "physics") -> Row:
    made = tally(JOB, Span(0, 5000), None, FLEET)
    assert made is not None
    return Row(made, {"account": name, "user": name}, job=replace(JOB, name=name, account=name), fleet=FLEET)


def test_every_default_is_a_field() -> None:
    for kind, names in DEFAULTS.items():
        assert choose(names, kind)
    assert set(GROUPED_BY) | {"jobs", "services"} == set(DEFAULTS)
    assert len({one.name.lower() for one in FIELDS}) == len({one.key for one in FIELDS}) == len(FIELDS)
    assert len(help_format("jobs")) == len(FIELDS)


@pytest.mark.parametrize(("text", "jobs"), [("Nothing", True), ("JobID", False), ("User%x", True), ("", True)])
def test_unknown_fields_are_named(text: str, jobs: bool) -> None:
    with pytest.raises(UsageError, match="no field"):
        choose(text, "jobs" if jobs else "users")


def test_widths_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    columns = choose("Account%-6,GPUHours%10,CPUHours", "users")
    print_aligned(columns, [row(), row("biochemistry")], Units("seconds"), header_line=True)
    assert capsys.readouterr().out.splitlines() == [
        "Accou+ GPUSeconds CPUSeconds",
        "------ ---------- ----------",
        "physi+       1200       2400",
        "bioch+       1200       2400",
    ]
    print_parsable(columns, [row()], Units("hours"), header_line=True)
    assert capsys.readouterr().out == "Account|GPUHours|CPUHours\nphysics|0.33|0.67\n"


def test_columns_name_their_units_and_amounts_stand_under_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    long, short = row(), row("biology")
    long.tally.gpu_s, long.tally.gpu_energy_j, long.tally.shard_mib_s = 72_000, 7_200_000, 1 << 20
    short.tally.gpu_s, short.tally.gpu_energy_j, short.tally.shard_mib_s = 9, 90_000, 0
    columns = choose("GPUHours,GPUMemHours,GPUEnergy,GPUMemPeak", "jobs")
    for one, peak in ((long, 20_480), (short, 100)):
        one.use = JobUse(peak_mib=peak)
    print_aligned(columns, [long, short], Units(), header_line=True)
    assert capsys.readouterr().out.splitlines() == [
        "GPUHours GPUMemHours(GiB) GPUEnergy(kWh) GPUMemPeak",
        "-------- ---------------- -------------- ----------",
        "   20.00             0.28          2.000        20G",
        "    0.00                0          0.025       100M",
    ]
    print_parsable(columns, [long, short], Units("seconds", "G"), header_line=True)
    assert capsys.readouterr().out.splitlines() == [
        "GPUSeconds|GPUMemSeconds(GiB)|GPUEnergy(kWh)|GPUMemPeak(GiB)",
        "72000|1024|2|20",
        "9|0|0.025|0.10",
    ]
    print_csv(columns, [short], Units(), header_line=True)
    assert capsys.readouterr().out.splitlines() == [
        "GPUHours,GPUMemHours(GiB),GPUEnergy(kWh),GPUMemPeak(MiB)",
        "0.00,0,0.025,100",
    ]


def test_unknown_is_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    columns = choose("Utilisation,GPUEnergy,BudgetUsed,WastedGPUHours", "users")
    print_aligned(columns, [row()], Units(), header_line=False)
    assert capsys.readouterr().out.split() == ["-", "-", "-", "-"]
    print_json("tenants", {"start": 0, "end": 1}, [row()])
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["utilisation_percent"] is None
    assert found["rows"][0]["gpu_s"] == 1200


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_harmless(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    columns = choose("Account,JobName,GPUHours", "jobs")
    for show in (print_aligned, print_parsable, print_csv):
        show(columns, [row(name), row()], Units(), header_line=True)
        text = capsys.readouterr().out
        assert not [one for one in text if one not in "\r\n" and not one.isprintable()], show
        assert len(text.splitlines()) == (4 if show is print_aligned else 3)
        if show is print_parsable:
            assert [line.count("|") for line in text.splitlines()] == [2, 2, 2]
        if show is print_csv:
            cells = list(csv.reader(io.StringIO(text)))
            assert [len(line) for line in cells] == [3, 3, 3]
            assert cells[1][0][:1] not in ("=", "+", "-", "@", "\t", "\r")
    print_json("jobs", {}, [row(name)])
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    json.loads(out)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_in_a_picture(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    plot(path, "tenants", Span(0, 5000), [row(name), row("$\\frac{1}{2}$")])
    import xml.dom.minidom

    xml.dom.minidom.parse(str(path))
    assert b"<script" not in path.read_bytes()


def test_png(tmp_path: Path) -> None:
    plot(tmp_path / "a.png", "users", Span(0, 5000), [row()])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_small_things() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3661, 90_061)] == [
        "00:00:00",
        "00:01:00",
        "01:01:01",
        "1-01:01:01",
    ]
    assert [number(value, 2) for value in (3.0, 0.333, 1e6, float("nan"))] == ["3", "0.33", "1000000", ""]
    assert [number(value, 2) for value in (0, 0.0, 0.001)] == ["0", "0", "0.00"], "something is not nothing"
    assert bar(50, fancy=False, width=4) == "[##..]"
    assert bar(1000, width=4) == "████"
    assert bar(-5, width=4) == "░░░░"


@pytest.mark.parametrize(
    ("said", "shown", "remedy"),
    [
        ("sacct: error: Invalid user id: carla\n", "Invalid user id: carla", "write users as `id` knows them"),
        ("Slurm accounting storage is disabled\n", "Slurm accounting storage is disabled", "AccountingStorageType"),
        (
            "sacct: error: _open_persist_conn: failed to open persistent connection to host:db: Connection refused\n"
            "sacct: error: Sending PersistInit msg: Connection refused\n"
            "sacct: error: Problem talking to the database: Connection refused\n",
            "_open_persist_conn: failed to open persistent connection to host:db: Connection refused; "
            "Sending PersistInit msg: Connection refused; Problem talking to the database: Connection refused",
            "systemctl status slurmdbd",
        ),
        ("", "exit status 1", ""),
    ],
)
def test_what_sacct_says_is_reported_with_a_remedy(tmp_path: Path, said: str, shown: str, remedy: str) -> None:
    program = tmp_path / "bin/sacct"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}END\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(SluiceError) as found:
        list(stream(Commands(prefix=tmp_path), start=0, end=1))
    assert found.value.what == f"sacct: {shown}" and remedy in found.value.remedy


# A stand-in whose second job has a name with the separator of this very call: of jobs it changes names only.
_SACCT = """#!/bin/sh
for word; do case $word in --delimiter=*) mark=${word#*=};; --format=*) fields=${word#*=};; esac; done
forged=$(printf 'two%s\\n7%sno' "$mark" "$mark")
for number in 7 8; do
    for field in $(echo "$fields" | tr , ' '); do
        case $field in
            JobIDRaw) printf %s $number;; User) printf alice;; State) printf 'CANCELLED by 0';;
            ElapsedRaw) printf 9;; JobName) [ $number = 7 ] && printf 'one\\nwith\\037lines' || printf %s "$forged";;
        esac
        printf %s "$mark"
    done
    echo
done
"""


def test_no_name_of_a_job_begins_a_row(tmp_path: Path) -> None:
    """Attack: a user reads the separator in /proc/PID/cmdline, and renames a job before sacct has asked for it."""
    program = tmp_path / "bin/sacct"
    program.parent.mkdir()
    program.write_text(_SACCT)
    program.chmod(0o755)
    found = list(stream(Commands(prefix=tmp_path), names=True))
    assert [(job.id, job.user, job.state, job.elapsed_s, job.name) for job in found] == [
        (7, "alice", "CANCELLED", 9, "no"),
        (8, "alice", "CANCELLED", 9, "two"),
    ]
    assert {job.name for job in stream(Commands(prefix=tmp_path))} == {""}


def test_sacct_rows_may_come_in_any_pieces() -> None:
    data = b"".join(b"7<>" + name + b"<>\n" for name in (b"one", b"two\nwith\nlines", b"three"))
    for size in (1, 7, 64, 10_000):
        blocks = iter([data[at : at + size] for at in range(0, len(data), size)])
        assert list(_rows(blocks, b"<>", 2)) == [["7", "one"], ["7", "two\nwith\nlines"], ["7", "three"]]


# ---- budgets and fairness ----


def test_projection_of_a_budget() -> None:
    found = budget(100 * 3600, 25 * 3600, Period(0, 1000), 100)
    assert found["budget_used_percent"] == 25
    assert found["budget_projected_percent"] == 250
    assert found["budget_used_up_at"] == 400
    assert "budget_projected_percent" not in budget(100, 25, None, 100)
    calm = budget(100 * 3600, 3600, Period(0, 1000), 500)
    assert (calm["budget_projected_percent"], calm["budget_used_up_at"]) == (2, None)
    assert budget(100, 0, Period(0, 1000), 500)["budget_projected_percent"] == 0


@pytest.mark.parametrize(
    ("word", "start", "end"),
    [
        ("MONTHLY", "2026-11-01", "2026-12-01"),
        ("QUARTERLY", "2026-10-01", "2027-01-01"),
        ("YEARLY", "2026-01-01", "2027-01-01"),
        ("DAILY", "2026-11-21", "2026-11-22"),
        ("WEEKLY", "2026-11-15", "2026-11-22"),
    ],
)
def test_usage_periods(word: str, start: str, end: str) -> None:
    from datetime import datetime

    found = usage_period({"PriorityUsageResetPeriod": word}, datetime(2026, 11, 21, 12).timestamp())
    assert found is not None
    assert datetime.fromtimestamp(found.start).isoformat()[:10] == start
    assert datetime.fromtimestamp(found.end).isoformat()[:10] == end
    assert usage_period({"PriorityUsageResetPeriod": "NONE"}, 0) is None


def test_jain() -> None:
    assert jain([1, 1, 1]) == 1
    assert jain([1, 0, 0, 0]) == 0.25
    assert jain([]) is None


# ---- summaries and advice ----


def gpu(**more: object) -> GpuUse:
    fields: dict[str, object] = {
        "node": "n1", "index": 0, "uuid": "GPU-1", "model": "H100", "total_mib": 81_920, "asked_mib": None,
        "limit_mib": None, "rung": "limiter", "peak_mib": 70_000, "refused": 0, "seconds": 600.0,
        "utilisation": {"mean": 80.0, "peak": 100.0},
    }  # fmt: skip
    return GpuUse(**{**fields, **more})  # type: ignore[arg-type]


def test_a_comment_is_read_and_a_forged_one_does_no_harm() -> None:
    found = of_comment("by hand sluice:v=1,rung=limiter,gpus=2,asked=10240,peak=9216,refused=1,ended=0,gs=100,us=25")
    assert found is not None
    assert (found.asked_mib, found.peak_mib, found.device_s, found.busy_s, found.refused) == (10240, 9216, 100, 25, 1)
    assert of_comment("nothing of ours") is None
    assert of_comment("sluice:v=2,peak=1") is None
    odd = of_comment("sluice:v=1,asked=1e99,peak=-4,gs=nan,us=inf,rung=x")
    assert odd is not None
    assert (odd.asked_mib, odd.peak_mib, odd.device_s, odd.busy_s) == (None, None, 0, None)


def test_advice_for_a_share_that_was_too_large() -> None:
    job = replace(JOB, allocated="cpu=4,mem=8G,gres/shard=40960,node=1")
    use = JobUse(asked_mib=40_960, peak_mib=9000)
    line = advise(job, use, HostUse(), FLEET.nodes["n1"]).line
    assert "--gpu-mem=10752M" in line.replace("10.5G", "10752M") or "--gpu-mem=11008M" in line
    assert "--time=15" in line  # ran 10 of 60 minutes


def test_advice_after_refusals_asks_for_more() -> None:
    job = replace(JOB, allocated="cpu=4,mem=8G,gres/shard=10240,node=1", state="FAILED")
    found = advise(job, JobUse(asked_mib=10_240, peak_mib=10_200, refused=3), HostUse(), FLEET.nodes["n1"])
    assert "--gpu-mem=15G" in found.line
    assert "refused" in found.because[0]


def test_advice_for_a_hardly_used_gpu_is_a_share() -> None:
    job = replace(JOB, allocated="cpu=4,mem=8G,gres/gpu=1,gres/gpu:h100=1,node=1")
    use = JobUse(gpus=(gpu(peak_mib=5000, utilisation={"mean": 10.0, "peak": 60.0}),))
    found = advise(job, use, HostUse(), FLEET.nodes["n1"])
    assert "--gpu-mem=6G" in found.line
    assert "--constraint=h100" in found.line
    assert "--gres" not in found.line


def test_advice_for_gpus_that_did_nothing() -> None:
    idle = gpu(index=1, utilisation={"mean": 0.0, "peak": 0.0}, peak_mib=400)
    found = advise(JOB, JobUse(gpus=(gpu(), idle)), HostUse(), FLEET.nodes["n1"])
    assert "--gres=gpu:h100:1" in found.line


def test_advice_without_measurements_asks_for_the_same() -> None:
    job = replace(JOB, elapsed_s=3000)
    found = advise(job, None, HostUse(), None)
    assert found.because == []
    assert found.line == (
        "sbatch --account=physics --partition=main --gres=gpu:h100:2 --cpus-per-task=4 --mem=8192M --time=60 job.sh"
    )


def test_advice_can_be_pasted_whatever_the_names() -> None:
    import shlex

    found = advise(replace(JOB, account="a; rm -rf /\n$(x)", partition="p`q`"), None, HostUse(), None)
    words = shlex.split(found.line)
    assert words[1] == "--account=a; rm -rf / $(x)"
    assert "\n" not in found.line


@pytest.mark.parametrize("name", HOSTILE)
def test_a_page_is_lines_of_text(name: str) -> None:
    page = {
        "job": {"label": "17", "name": name, "user": name, "account": name, "partition": name, "qos": name,
                "state": "FAILED", "exit_code": "1:0", "submit": 1, "start": 2, "end": 3, "wait_s": 1, "elapsed_s": 1},
        "runs": 2, "asked": {"tres": {name: 1}, "time_limit_s": 60, "time_unlimited": False},
        "granted": {"nodes": name, "tres": {"gres/shard": 10240}},
        "used": {"gpus": [{"node": name, "index": 0, "model": name, "asked_mib": 10, "total_mib": 100, "rung": name,
                           "utilisation": {"mean": 50.0}, "peak_mib": 5}], "utilisation_percent": 50.0,
                 "gpu_energy_j": 1.0, "idle_gpu_s": 1.0, "throttled_s": 0, "refused": 1, "saved_at": 9,
                 "gpu_memory_peak_mib": 5, "gpu_memory_asked_mib": 10,
                 "nics": [{"node": name, "nic": name, "shared": True, "counts": {name: 3, "transmit_bytes": 5 << 20}}],
                 "slowest": {"node": name, "index": 0, "why": "busy", "value": 90.0, "others": 10.0},
                 "bindings": [{"node": name, "step": name, "tasks": 2, "gpu_nodes": name, "cpus": 4, "cpus_near": 1,
                               "cpu_nodes": name, "memory_nodes": name, "agrees": False}]},
        "host": {"cpu_percent": 10.0, "memory_peak_mib": 10},
        "limits_hit": [{"node": name, "action": name, "time": "soon"}],
        "waited": {"seconds": 1, "slurm_reason": name, "not_explained": name},
        "advice": {"sbatch": f"sbatch {name}", "because": [name]},
    }  # fmt: skip
    for line in render(page):
        assert line.isprintable() or line == "", line


NEAR = {"node": "n1", "step": "0", "tasks": 2, "gpu_nodes": "1", "cpus": 4, "cpus_near": 4, "cpu_nodes": "1",
        "memory_nodes": "0-1", "agrees": True}  # fmt: skip
FAR_CPUS = NEAR | {"node": "n2", "cpus_near": 1, "cpu_nodes": "0-1", "agrees": False}
FAR_CPU = FAR_CPUS | {"cpus_near": 3, "tasks": 1}
FAR_MEMORY = NEAR | {"node": "n3", "tasks": 1, "memory_nodes": "0", "agrees": False}


@pytest.mark.parametrize(
    ("bindings", "lines"),
    [
        ([], []),
        ([NEAR, NEAR], ["  binding      the CPUs of all tasks are near their GPUs, and so may be their memory"]),
        (
            [NEAR, FAR_CPUS, FAR_CPU, FAR_MEMORY],
            [
                "  binding      tasks are not near their GPUs, which makes copies to and from these slower:",
                "    n2 step 0, 2 tasks: 3 of 4 CPUs are on other NUMA nodes than the GPUs "
                "(NUMA nodes: GPUs 1, CPUs 0-1, memory 0-1)",
                "    n2 step 0, 1 task: 1 of 4 CPUs is on other NUMA nodes than the GPUs "
                "(NUMA nodes: GPUs 1, CPUs 0-1, memory 0-1)",
                "    n3 step 0, 1 task: the memory is on other NUMA nodes than the GPUs "
                "(NUMA nodes: GPUs 1, CPUs 1, memory 0)",
                "    try --gres-flags=enforce-binding, or srun's --cpu-bind and --mem-bind",
            ],
        ),
    ],
    ids=["none", "near", "far"],
)
def test_what_is_said_of_bindings(bindings: list[dict[str, Any]], lines: list[str]) -> None:
    assert _bindings({"bindings": bindings}) == lines


def test_tally_reads_back_only_tallies() -> None:
    from sluice.base.errors import SluiceError

    for bad in ({"nonsense": 1}, {"waits": {"x": 1}}, {"waits": 5}, {"ran": "x"}):
        with pytest.raises(SluiceError):
            Tally().add_document(bad)
