"""Time inside select_p_job_test per decision, of stock Slurm and of the placement hook, on real daemons.

Both arms run the same jobs on the same kind of cluster and are timed by one shim (slurm_throughput_shim.c), a select
plugin that times the plugin that it wraps. `defer` is set, so that jobs are tried by the main scheduler's cycles;
backfill is kept out of the way, and each cycle tries all jobs.

(a) `jobs_fitting` jobs of one node and one to four GPUs, submitted held and released together, all of which fit,
(b) `jobs_pending` such jobs on a cluster whose GPUs are all taken, none of which fits.

The cluster's nodes share the processors with slurmctld here, unlike in production: in both arms slurmctld goes first
(real-time priority), and the processor time of the thread that decides is reported with the time by the clock.

Our arm has the placement hook alone: job_submit, site_factor and prep are not loaded, and the planner, which looks at
the queue under slurmctld's read locks, does so every ten minutes here. submit-latency and site-factor have the others.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import click
import yaml

from benchmarks import Result
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from policy.compiled import CompiledPolicy, Global
from sluice.base.errors import SluiceError
from sluice.base.slurm_version import parse_slurm_version
from sluice.plugin.builder import build_plugins
from sluice.plugin.site import find_plugin_dir
from sluice.plugin.sources import distribution_source, release_name

OPTIONS = [
    click.Option(["--nodes"], type=click.IntRange(4, 4096), default=128, show_default=True, help="Nodes of 8 GPUs."),
    click.Option(["--jobs-fitting"], type=click.IntRange(1), default=300, show_default=True, help="Jobs of (a)."),
    click.Option(["--jobs-pending"], type=click.IntRange(1), default=3000, show_default=True, help="Jobs of (b)."),
    click.Option(["--window-s"], type=float, default=60.0, show_default=True, help="How long (b) is watched."),
    click.Option(["--plugins"], default="", help="Folder of built plugins; default: built for the installed Slurm."),
]
MUST: dict[str, tuple[str, float]] = {}  # by the number of nodes, see run
_MODES = {0: "run_now", 1: "test_only", 2: "will_run"}  # SELECT_MODE_* of slurmctld
_SCHEDULER = (
    "defer,default_queue_depth=10000,partition_job_depth=0,bf_min_age_reserve=864000,bf_interval=10800,"
    "sched_interval=20,sched_min_interval=20000000,max_sched_time=10"
)
_SAMPLE = struct.Struct("<IIHh")
_JOB = "/run/sluice-cluster/state/job"
_PATIENCE = 900.0


@dataclass
class _Samples:
    """What the shim wrote between two moments: nanoseconds by mode."""

    by_mode: dict[str, list[int]]
    cpu: list[int]  # of all modes

    @property
    def all(self) -> list[int]:
        return [ns for values in self.by_mode.values() for ns in values]

    def mean_us(self, mode: str | None = None) -> float:
        values = self.all if mode is None else self.by_mode.get(mode, [])
        return statistics.fmean(values) / 1000 if values else 0.0

    def median_us(self) -> float:
        return statistics.median(self.all) / 1000 if self.all else 0.0

    def cpu_mean_us(self) -> float:
        return statistics.fmean(self.cpu) / 1000 if self.cpu else 0.0


@dataclass
class _Outcome:
    """One arm: what was measured in each scenario."""

    fit: _Samples
    submit: _Samples
    full: _Samples
    fit_us_per_job: float
    full_us_per_job: float
    hook_p99_us: dict[str, float]  # of the hook without stock Slurm: since the boot, and in both scenarios
    counters: dict[str, int]


class _Arm:
    """One cluster under the shim."""

    def __init__(self, folder: Path, plugins: Path | None, nodes: int) -> None:
        self.folder = folder
        self.cluster = DevCluster(folder / "cluster")
        self.samples = folder / "cluster/state/shim"
        self.nodes = nodes
        self.ours = plugins is not None
        stock = "/usr/lib/x86_64-linux-gnu/slurm-wlm"
        shim = folder / "plugins"
        shim.mkdir()
        wrapped = f"{stock}/select_cons_tres.so"
        if plugins is not None:
            for name in ("libsluice_controller.so", "select_cons_tres.so"):
                target = "sluice_select.so" if name.startswith("select") else name
                shutil.copy2(plugins / name, shim / target)
            wrapped = "-l:sluice_select.so"
        command = [
            *("gcc", "-O2", "-shared", "-fPIC", "-o", str(shim / "select_cons_tres.so")),
            *(str(Path(__file__).with_name("slurm_throughput_shim.c")), f"-L{shim}"),
            # Slurm's folder first: in the shim's folder the name of stock's plugin is the shim's own.
            f"-Wl,-rpath,{stock}:$ORIGIN",
            *("-Wl,-z,lazy", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed", wrapped),
        ]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SluiceError(f"the shim cannot be built: {made.stderr.strip()[-500:]}")
        self.plugins = shim

    def up(self) -> None:
        policy = CompiledPolicy(
            generated_s=1, source="benchmark", settings=Global(placement="sluice", planner_interval_ms=600_000)
        ).render()
        width = len(str(self.nodes))
        description = {
            "nodes": [{"names": f"n[{1:0{width}d}-{self.nodes}]", "platform": "dgx-h100"}],
            "controllers": 1,
            "accounting": False,
            "users": [{"name": "alice"}],
            "slurm_conf": f"SchedulerParameters={_SCHEDULER}\nMessageTimeout=100\nDefMemPerCPU=500\n"
            "MaxJobCount=20000\n",
            "sluice": {
                "level": "place" if self.ours else "off",
                "policy": policy,
                "plugins": str(self.plugins),
                "environment": {"SLUICE_SHIM_SAMPLES": "/run/sluice-cluster/state/shim"},
            },
        }
        parsed = parse_description(yaml.safe_dump(description), source="benchmark")
        self.cluster.up(parsed, timeout=_PATIENCE, attached=True)
        # A thread begins with the priority of its creator: all that there are now.
        self.run("bash", "-c", "chrt --rr --all-tasks --pid 1 $(pidof slurmctld)")

    def down(self) -> None:
        self.cluster.down()

    def run(self, *command: str) -> str:
        return self.cluster.run(list(command), timeout=_PATIENCE).stdout

    def mark(self) -> int:
        if not self.samples.exists():
            return 0
        with self.samples.open("rb") as file:
            return int(struct.unpack("<Q", file.read(8))[0])

    def since(self, begin: int) -> _Samples:
        end = self.mark()
        by_mode: dict[str, list[int]] = {}
        with self.samples.open("rb") as file:
            file.seek(8 + begin * _SAMPLE.size)
            data = file.read((end - begin) * _SAMPLE.size)
        cpu = []
        for ns, cpu_ns, mode, _ok in _SAMPLE.iter_unpack(data):
            by_mode.setdefault(_MODES.get(mode, str(mode)), []).append(ns)
            cpu.append(cpu_ns)
        return _Samples(by_mode, cpu)

    def submit(self, count: int, *, held: bool) -> None:
        """Jobs of 1, 2, 3, 4, 1 ... GPUs, by one shell."""
        options = f"-Q {'-H ' if held else ''}-N1 -n1 -c2 -t 60 -o /dev/null"
        one = f"sbatch {options} --gres=gpu:$((i % 4 + 1)) {_JOB} >/dev/null || exit 1"
        self.run("bash", "-c", f"for i in $(seq 0 {count - 1}); do {one}; done")

    def wait(self, what: str, done: str) -> None:
        """Until the shell's condition holds."""
        deadline = time.monotonic() + _PATIENCE
        while self.run("bash", "-c", f"if {done}; then echo yes; fi").strip() != "yes":
            if time.monotonic() > deadline:
                raise SluiceError(f"{what}: not within {_PATIENCE:.0f} s")
            time.sleep(0.5)

    def cycle_us_per_job(self) -> float:
        """sdiag: mean time of the main scheduler's cycles over their mean depth."""
        main = self.run("sdiag").split("Main schedule statistics")[1].split("Backfilling")[0]
        values = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in main.splitlines() if ":" in line}
        depth = float(values["Mean depth cycle"])
        return float(values["Mean cycle"]) / depth if depth else 0.0

    def counters(self) -> dict[str, int]:
        time.sleep(2.5)  # the status file follows every second
        file = next(iter((self.folder / "cluster/state").glob("sluice.status.*")), None)
        return dict(json.loads(file.read_text())["counters"]) if file else {}


def hook_p99_us(counters: dict[str, int], before: dict[str, int]) -> float:
    """Upper boundary of the class in which the 99th percentile of the hook's own times lies.

    Of the decisions since the counters `before` were read. Raises SluiceError where there were none.
    """
    classes = sorted(
        (math.inf if name.endswith("more") else float(name.rsplit("_", 1)[1]), value - before.get(name, 0))
        for name, value in counters.items()
        if name.startswith("select.hook_us_")
    )
    decisions = sum(value for _, value in classes)
    if not decisions:
        raise SluiceError("the hook decided nothing", remedy="watch for longer: --window-s; or see slurmctld's log")
    up_to = accumulate(value for _, value in classes)
    bound = next(bound for (bound, _), count in zip(classes, up_to, strict=True) if count >= 0.99 * decisions)
    return bound if math.isfinite(bound) else 1e9


def _measure(arm: _Arm, jobs_fitting: int, jobs_pending: int, window_s: float) -> _Outcome:
    (arm.folder / "cluster/state/job").write_text("#!/bin/sh\nsleep 3600\n")
    arm.submit(jobs_fitting, held=True)
    before_fit = arm.counters()
    arm.run("sdiag", "-r")
    begin = arm.mark()
    arm.run("bash", "-c", "squeue -h -t PD -o %A | paste -sd, | xargs scontrol release")
    arm.wait("start of the jobs that fit", f'[ "$(squeue -h -t R | wc -l)" -ge {jobs_fitting} ]')
    fit, fit_us = arm.since(begin), arm.cycle_us_per_job()
    after_fit = arm.counters()
    arm.run("bash", "-c", "squeue -h -o %A | xargs scancel")
    arm.wait("end of the jobs that fit", '[ "$(squeue -h | wc -l)" -eq 0 ]')
    arm.run("sbatch", "-Q", f"-N{arm.nodes}", "--ntasks-per-node=1", "-c2", "--gres=gpu:8", "-o", "/dev/null", _JOB)
    arm.wait("start of the job that fills the cluster", '[ "$(squeue -h -t R | wc -l)" -eq 1 ]')
    begin = arm.mark()
    arm.submit(jobs_pending, held=False)
    submit = arm.since(begin)
    before_full = arm.counters()
    arm.run("sdiag", "-r")
    begin = arm.mark()
    time.sleep(window_s)
    full, full_us = arm.since(begin), arm.cycle_us_per_job()
    counters = arm.counters()
    figures = {
        "hook_p99_us": (counters, {}),
        "fit_hook_p99_us": (after_fit, before_fit),
        "full_hook_p99_us": (counters, before_full),
    }
    hook_us = {figure: hook_p99_us(*read) for figure, read in figures.items()} if arm.ours else {}
    return _Outcome(fit, submit, full, fit_us, full_us, hook_us, counters)


def run(
    *, nodes: int = 128, jobs_fitting: int = 300, jobs_pending: int = 3000, window_s: float = 60, plugins: str = ""
) -> Result:
    """Both arms. `plugins`: a folder of built plugins; else they are built for the installed Slurm."""
    if nodes * 8 < jobs_fitting * 3:  # 2.5 GPUs a job, and some room
        raise SluiceError(f"{jobs_fitting} jobs do not fit on {nodes} nodes")
    outcomes: dict[str, _Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="sluice-throughput-") as name:
        built = Path(plugins) if plugins else _built(Path(name) / "built")
        for arm_name, arm_plugins in (("stock", None), ("ours", built)):
            folder = Path(name) / arm_name
            folder.mkdir()
            arm = _Arm(folder, arm_plugins, nodes)
            arm.up()
            try:
                outcomes[arm_name] = _measure(arm, jobs_fitting, jobs_pending, window_s)
            finally:
                arm.down()
    stock, ours = outcomes["stock"], outcomes["ours"]
    figures: dict[str, float] = {}
    peer: dict[str, float] = {}
    for scenario in ("fit", "submit", "full"):
        before, after = getattr(stock, scenario), getattr(ours, scenario)
        figures[f"{scenario}_mean_us"], peer[f"{scenario}_mean_us"] = after.mean_us(), before.mean_us()
        figures[f"{scenario}_median_us"], peer[f"{scenario}_median_us"] = after.median_us(), before.median_us()
        figures[f"{scenario}_cpu_mean_us"], peer[f"{scenario}_cpu_mean_us"] = after.cpu_mean_us(), before.cpu_mean_us()
        figures[f"{scenario}_decisions"], peer[f"{scenario}_decisions"] = len(after.all), len(before.all)
        for mode in sorted(set(before.by_mode) & set(after.by_mode)):
            key = f"{scenario}_{mode}_mean_us"
            figures[key], peer[key] = after.mean_us(mode), before.mean_us(mode)
        if after.all and before.all:
            figures[f"{scenario}_faster"] = before.mean_us() / after.mean_us()
            figures[f"{scenario}_cpu_faster"] = before.cpu_mean_us() / after.cpu_mean_us()
    for scenario in ("fit", "full"):
        before_us, after_us = getattr(stock, f"{scenario}_us_per_job"), getattr(ours, f"{scenario}_us_per_job")
        figures[f"sdiag_{scenario}_us_per_job"], peer[f"sdiag_{scenario}_us_per_job"] = after_us, before_us
        if after_us:
            figures[f"sdiag_{scenario}_faster"] = before_us / after_us
    figures |= ours.hook_p99_us
    for name in (
        *("narrowed", "fell_back", "refused", "remembered", "stock_tests", "stock_alone", "index_asked", "index_kept"),
        *("follow_us_most", "workload_us_most"),
    ):
        figures[f"count_{name}"] = ours.counters.get(f"select.{name}", 0)
    faster = 10.0 if nodes >= 1024 else 5.0
    must: dict[str, tuple[str, float]] = {
        "fit_faster": (">=", faster),
        "full_faster": (">=", faster),
        "fit_cpu_faster": (">=", faster),
        "full_cpu_faster": (">=", faster),
        "sdiag_fit_faster": (">=", 3.0),
        "sdiag_full_faster": (">=", 3.0),
    }
    if nodes >= 1024:
        must |= {figure: ("<=", 100.0) for figure in ours.hook_p99_us}
    return Result(figures=figures, peer=peer, must=must, versions={"nodes": str(nodes), "slurm": _version()})


def _version() -> str:
    return subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]


def _built(folder: Path) -> Path:
    """The plugins, built for the installed Slurm."""
    version = parse_slurm_version(f"slurm-wlm {_version()}")
    build_plugins(
        distribution_source(version, suite=release_name(Path("/"))),
        folder,
        plugin_dir=find_plugin_dir(Path("/"), Path("/usr")),
        root=None,
    )
    return folder
