"""Policies by name, their schedules of a trace, the figures, and the command."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sluice.base.errors import SluiceError, UsageError
from sluice.cli.simulate import command
from sluice.core.order import Factor
from sluice.core.placement import Policy
from sluice.core.replay import Backfill, Preemption, State
from sluice.simulate.cluster_file import ClusterNode, read_nodes
from sluice.simulate.metrics import jain, measure, percentile
from sluice.simulate.simulation import PRESETS, Assumptions, parse_policy, simulate
from sluice.simulate.traces import MICROSECOND, Trace, TraceJob


def second(count: float) -> int:
    return round(count * MICROSECOND)


def job(submit: float, run: float, gpus: int = 1, **more: Any) -> TraceJob:
    return TraceJob(f"{submit}-{run}", second(submit), second(run), gpus, **more)


def trace_of(*jobs: TraceJob, unit: str = "milli") -> Trace:
    return Trace("test", list(jobs), unit)


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, part) for part in (0, 1, 50, 99, 100)] == [1, 1, 50, 99, 100]
    assert (percentile([5.0], 99), percentile([], 50)) == (5.0, 0.0)


def test_jain_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_figures_of_a_schedule_worked_out_by_hand() -> None:
    # Four GPUs: a 0-10 (all four), b 10-16 (two), c 10-14 (two); b has a deadline at 15, c one at 20.
    trace = trace_of(
        job(0, 10, 4, tenant="x"),
        job(2, 6, 2, tenant="y", deadline=second(15)),
        job(4, 4, 2, tenant="y", deadline=second(20)),
    )
    figures = measure(simulate(trace, read_nodes("1x4"), parse_policy("fifo")))
    assert (figures.jobs, figures.rejected, figures.preemptions) == (3, 0, 0)
    assert figures.jct_mean_s == pytest.approx((10 + 14 + 10) / 3)
    assert (figures.wait_mean_s, figures.wait_p50_s, figures.wait_p99_s) == (pytest.approx(14 / 3), 6, 8)
    assert (figures.makespan_s, figures.throughput_per_hour) == (16, pytest.approx(3 * 3600 / 16))
    assert figures.allocation_percent == pytest.approx(100 * (40 + 12 + 8) / 64)
    assert (figures.deadlines, figures.deadlines_missed) == (2, 1)
    # A tenant's part is two GPUs: alone x's job of four would take 20; y's take 6 and 4.
    assert figures.fairness == {"x": pytest.approx(10 / 20), "y": pytest.approx((14 / 6 + 10 / 4) / 2)}
    assert figures.fairness_worst == figures.fairness["y"]


def test_fragmentation_counts_what_usual_requests_cannot_use() -> None:
    # Two nodes of four. Three of four GPUs are busy on each; every usual request wants two.
    trace = trace_of(*(job(0, 10, 3) for _ in range(2)), *(job(1, 10, 2) for _ in range(4)))
    simulation = simulate(trace, read_nodes("2x4"), parse_policy("easy"))
    waiting = [sample.fragmented_permille for sample in simulation.replayed.samples if sample.pending]
    # The two idle GPUs are not enough for a request of two (they are on two nodes) and not for one of three.
    assert waiting and waiting[0] == 1000


def test_preemptions_are_counted() -> None:
    figures = measure(simulate(trace_of(job(0, 10, 4), job(2, 3, 4)), read_nodes("1x4"), parse_policy("srsf")))
    assert (figures.preemptions, figures.jct_mean_s, figures.makespan_s) == (1, (13 + 3) / 2, 13)


def test_shares_of_one_gpu_go_together() -> None:
    halves = [job(0, 10, 1, share=500) for _ in range(4)]
    figures = measure(simulate(trace_of(*halves), read_nodes("1x2"), parse_policy("sluice")))
    assert (figures.makespan_s, figures.allocation_percent) == (10, 100)


def test_shards_are_mib_of_the_nodes_gpus() -> None:
    nodes = [ClusterNode("n", 1, "h100", gpu_memory_mib=81920)]
    trace = trace_of(*(job(0, 10, 1, share=40960) for _ in range(2)), job(0, 10, 1, share=90000), unit="mib")
    figures = measure(simulate(trace, nodes, parse_policy("easy")))
    assert (figures.jobs, figures.rejected, figures.makespan_s) == (2, 1, 10)
    assert figures.allocation_percent == pytest.approx(100)


def test_models_that_are_asked_and_wide_jobs() -> None:
    nodes = [ClusterNode("a", 4, "t4"), ClusterNode("b", 4, "v100"), ClusterNode("c", 4, "v100")]
    trace = trace_of(job(0, 5, 4, models=("v100",)), job(0, 5, 8, models=("v100", "unheard")), job(0, 5, 6, nodes=4))
    simulation = simulate(trace, nodes, parse_policy("easy"))
    starts = [outcome.start // MICROSECOND for outcome in simulation.replayed.outcomes[:2]]
    assert starts == [0, 5]
    assert simulation.replayed.outcomes[2].state == State.REJECTED  # four nodes are not there


def test_estimates() -> None:
    # The second job may go ahead of the wide one only if it is known to be short enough.
    jobs = [job(0, 10, 3), job(1, 5, 4), job(2, 8, 1, estimate=second(60))]
    starts = {
        kind: simulate(trace_of(*jobs), read_nodes("1x4"), parse_policy("easy"), Assumptions(kind)).replayed.outcomes[2]
        for kind in ("exact", "limit")
    }
    assert starts["exact"].start == second(2)
    assert starts["limit"].start == second(15)


def test_the_same_seed_gives_the_same_replay() -> None:
    jobs = trace_of(*(job(at / 7, 3 + at % 5, 1 + at % 4) for at in range(60)))
    nodes = read_nodes("2x4")
    runs = [simulate(jobs, nodes, parse_policy("easy"), Assumptions("noisy", 5, seed)) for seed in (1, 1, 2)]
    assert runs[0].replayed == runs[1].replayed
    assert runs[0].replayed != runs[2].replayed


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_every_job(name: str) -> None:
    jobs = trace_of(*(job(at, 1 + at % 9, 1 + at % 4, tenant=str(at % 3), best_effort=at % 2 == 0,
                          deadline=second(at + 20) if at % 2 else 0) for at in range(50)))  # fmt: skip
    figures = measure(simulate(jobs, read_nodes("2x4"), parse_policy(name)))
    assert figures.jobs == 50 and figures.deadlines == 25


def test_policies_can_be_changed() -> None:
    policy = parse_policy("slurm,placement=fgd,age=0,backfill=greedy,preemption=tiers,guard=yes,starvation=2")
    assert policy.placement == Policy.FGD and policy.weights[Factor.AGE] == 0
    assert policy.weights[Factor.FAIR_SHARE] == PRESETS["slurm"][0].weights[Factor.FAIR_SHARE]
    assert (policy.backfill, policy.preemption, policy.guarded) == (Backfill.GREEDY, Preemption.TIERS, True)
    assert policy.starvation == 2 * 86400 * MICROSECOND


@pytest.mark.parametrize(
    "text",
    ["nobody", "easy,colour=red", "easy,age=-1", "easy,age=x", "easy,placement=best", "easy,guard=maybe",
     "easy,preemption=order", "easy,starvation=nan", "easy,laxity=0"],
)  # fmt: skip
def test_bad_policies_are_named(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policy(text)
    assert text.split(",")[0] in str(caught.value) and caught.value.remedy


# ---- the command ----

SWF = "".join(
    f"{number} {number} 0 {10 + number % 7} 1 -1 -1 {1 + number % 4} 60 -1 1 1 {number % 2} 1 1 1 -1 -1\n"
    for number in range(40)
)


def call(folder: Path, *arguments: str, text: str = SWF) -> Result:
    path = folder / "history.swf"
    path.write_text(text)
    return CliRunner().invoke(command, ["--trace", str(path), "--nodes", "2x4", *arguments], catch_exceptions=True)


def test_table(tmp_path: Path) -> None:
    result = call(tmp_path, "--policy", "fifo", "--policy", "sluice")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[0].split() == ["fifo", "sluice"]
    assert lines[1].split() == ["jobs", "that", "ended", "40", "40"]


# On 2 nodes of 4 GPUs: two jobs of two hours hold half of each node from the tenth minute on, and one needs all of one.
SPREAD = "".join(
    f"{number} {submit} 0 {run} {gpus} -1 -1 {gpus} {run} -1 1 1 1 1 1 1 -1 -1\n"
    for number, submit, run, gpus in ((1, 0, 7200, 2), (2, 0, 1200, 2), (3, 0, 7200, 2), (4, 60, 600, 4))
)


def test_moves_are_shown_next_to_the_policy_without(tmp_path: Path) -> None:
    columns = ("-P", "-n", "-o", "wait_mean_s,moves", "--policy", "easy")
    assert call(tmp_path, *columns, "--migrate", text=SPREAD).stdout.splitlines() == [
        "easy|1785|0",
        "easy+moves|285|1",
    ]
    assert call(tmp_path, *columns, "--migrate", "--savable", "0", text=SPREAD).stdout.splitlines()[1].endswith("|0")
    policy = tmp_path / "sluice.yaml"
    policy.write_text("failover: {journal: true}\ncompaction: {wait: 1h}\n")
    assert call(tmp_path, *columns, "--migrate", str(policy), text=SPREAD).stdout.splitlines()[1].endswith("|0")


def test_parsable(tmp_path: Path) -> None:
    result = call(tmp_path, "-P", "-o", "jobs,makespan_s", "--policy", "easy", "--policy", "fifo,placement=best-fit")
    header, easy, changed = result.stdout.splitlines()
    assert (header, easy.split("|")[:2]) == ("policy|jobs|makespan_s", ["easy", "40"])
    assert changed.startswith("fifo,placement=best-fit|40|")
    assert call(tmp_path, "-P", "-n", "-o", "jobs", "--policy", "easy").stdout == "easy|40\n"


def test_json(tmp_path: Path) -> None:
    document = json.loads(call(tmp_path, "--json").stdout)
    assert document["schema_version"] == 1 and document["trace"]["jobs"] == 40
    assert [one["policy"] for one in document["policies"]] == ["easy", "slurm", "sluice"]
    first = document["policies"][0]
    assert first["figures"]["jobs"] == 40 and max(sample["gpus"] for sample in first["over_time"]) <= 8


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_plot(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"picture{suffix}"
    assert call(tmp_path, "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(magic)


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = call(tmp_path, "--plot", str(tmp_path / "picture.svg"))
    assert isinstance(result.exception, SluiceError) and "pip install matplotlib" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plot", "picture.pdf"), ".svg or .png"),
        (("--plot", "/nowhere/at/all.svg"), "no folder"),
        (("-o", "jobs,colour"), "'colour'"),
        (("--policy", "nobody"), "'nobody'"),
        (("--policy", "srtf", "--migrate"), "srtf"),
        (("--format", "csv"), "not of a known format"),
    ],
)
def test_usage_errors(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = call(tmp_path, *arguments)
    assert isinstance(result.exception, UsageError) and words in str(result.exception)


def test_what_is_left_out_is_said_on_stderr(tmp_path: Path) -> None:
    result = call(tmp_path, text=SWF + "99 50 -1 -1 -1 -1 -1 4 60 -1 5 1 1 1 1 1 -1 -1\n")
    assert result.exit_code == 0 and "1 never ran: left out" in result.stderr


def test_shards_on_gpus_of_unknown_size_are_said_on_stderr(tmp_path: Path) -> None:
    header = "JobIDRaw|Submit|Start|ElapsedRaw|State|AllocTRES"
    times = "2026-10-01T00:00:00|2026-10-01T00:00:10|60|COMPLETED"
    result = call(tmp_path, text=f"{header}\n1|{times}|cpu=1,gres/shard=10240,node=1\n")
    assert "1 jobs with shards will fit nowhere" in result.stderr


@pytest.mark.parametrize("option", ["--restart", "--checkpoint", "--interval", "--noise"])
def test_nan_is_no_number(tmp_path: Path, option: str) -> None:
    result = call(tmp_path, option, "nan")
    assert result.exit_code == 2 and option in result.output


def test_policies_are_listed() -> None:
    result = CliRunner().invoke(command, ["--list-policies"])
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == list(PRESETS)


def test_trace_and_nodes_are_needed() -> None:
    result = CliRunner().invoke(command, [])
    assert result.exit_code == 2 and "--trace" in result.output
