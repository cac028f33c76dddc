"""How long job_submit/sluice takes for one submission, in isolation: the plugin whole, outside slurmctld.

A program includes the plugin and calls it on a corpus of job descriptions, plain, completed and refused, of many
tenants. Not in the time: slurmctld's own look-up of a user's default account, for jobs that name none, and its log. On
running daemons `sluice plugin status` shows what the hook costs there (counters submit.*).

What spans add under slurmctld's locks is measured in the same run: each job is submitted with a trace and without, in
turns; `spans_added_*` is the difference between the two, `trace_*` the time of the added code alone.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path

import click

from benchmarks import Result
from sluice.base.errors import SluiceError

OPTIONS = [
    click.Option(["--calls"], type=click.IntRange(100), default=300000, show_default=True, help="Submissions."),
    click.Option(["--tenants"], type=click.IntRange(1, 60000), default=1000, show_default=True, help="In the policy."),
]
MUST = {
    "hook_p99_us": ("<=", 50.0),
    "trace_p99_us": ("<=", 5.0),
    "spans_added_mean_us": ("<=", 5.0),
    "spans_added_p99_us": ("<=", 5.0),
}
_ROOT = Path(__file__).parents[1]
_SOURCES = ("slurm_plugin/admission/*.c", "slurm_plugin/rules/*.c", "native/core/*.c")
_PARTS = ("runtime/controller", "runtime/log", "runtime/settings", "runtime/status", "runtime/ticker")


def run(calls: int, tenants: int) -> Result:
    """Percentiles over all calls, and over those that were accepted and refused."""
    with tempfile.TemporaryDirectory() as folder:
        program = _build(Path(folder))
        done = subprocess.run([program, str(calls), str(tenants)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SluiceError(f"submit_hook ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    rows = [line.split() for line in done.stdout.splitlines()]
    samples = [(int(ns) / 1000, code == "1") for ns, code, _, _ in rows]
    traces = sorted(int(ns) / 1000 for _, code, _, ns in rows if code == "0")
    traced, untraced = ([int(row[at]) / 1000 for row in rows if row[1] == "0"] for at in (0, 2))
    taken = sorted(us for us, _ in samples)
    figures = {
        "hook_p50_us": statistics.median(taken),
        "hook_p99_us": _percentile(taken, 0.99),
        "hook_p999_us": _percentile(taken, 0.999),
        "hook_max_us": taken[-1],
        "accepted_p99_us": _percentile(sorted(us for us, refused in samples if not refused), 0.99),
        "refused_p99_us": _percentile(sorted(us for us, refused in samples if refused), 0.99),
        "trace_p50_us": statistics.median(traces),
        "trace_p99_us": _percentile(traces, 0.99),
        "spans_traced_p50_us": statistics.median(traced),
        "spans_untraced_p50_us": statistics.median(untraced),
        "spans_added_p50_us": statistics.median(traced) - statistics.median(untraced),
        "spans_added_mean_us": _mean(traced) - _mean(untraced),
        "spans_added_p99_us": _percentile(sorted(traced), 0.99) - _percentile(sorted(untraced), 0.99),
        "refused_share": sum(refused for _, refused in samples) / len(samples),
    }
    return Result(figures=figures)


def _build(folder: Path) -> Path:
    program = folder / "submit_hook"
    sources = [str(path) for pattern in _SOURCES for path in sorted(_ROOT.glob(pattern)) if "_slurm" not in path.stem]
    sources += [str(_ROOT / f"slurm_plugin/{name}.c") for name in _PARTS]
    sources.append(str(_ROOT / "slurm_plugin/failover/end_notice.c"))
    includes = [f"-I{_ROOT / name}" for name in ("slurm_plugin", "native/include", "native/core")]
    command = [
        "gcc",
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O2",
        "-march=x86-64-v2",
        "-pthread",
        "-o",
        str(program),
        *includes,
    ]
    done = subprocess.run(
        [*command, str(Path(__file__).with_suffix(".c")), *sources, "-ldl"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SluiceError(
            f"submit_hook cannot be built: {done.stderr.strip()[-500:]}", remedy="install gcc and libslurm-dev"
        )
    return program


def _mean(values: list[float]) -> float:
    """Of what is not in the last thousandth, which is what the machine did in between."""
    return statistics.fmean(sorted(values)[: -(len(values) // 1000) or None])


def _percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
