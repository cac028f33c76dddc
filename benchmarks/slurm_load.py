"""Load for a whole Slurm cluster: jobs that arrive at given times, run on real daemons, and what became of them."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.layout import DEFAULT_FOLDER, INSIDE
from policy.compiled import CompiledPolicy, Global
from sluice.base.errors import SluiceError
from sluice.base.hostlist import expand

GPUS_A_NODE = 8
SHARDS_A_GPU = 80_000
CORES_A_NODE = 128
MEMORY_MIB = 1_000_000

# Runs on the login host as the user who submits: one process for the whole load, sbatch for each job.
_SUBMITTER = """
import json, subprocess, sys, time
jobs, begin = json.load(sys.stdin), time.time()
running = []
def reap(proc):
    out, err = proc[1].communicate()
    sys.stdout.write(json.dumps([proc[0], out.strip(), proc[2], err.strip()[-300:]]) + "\\n")
for number, (at, words) in enumerate(jobs):
    wait = begin + at - time.time()
    if wait > 0:
        time.sleep(wait)
    pipe, now = subprocess.PIPE, time.time()
    running.append((number, subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True), now))
    if len(running) > 8:
        reap(running.pop(0))
for proc in running:
    reap(proc)
"""


@dataclass(frozen=True)
class Job:
    """One job of a load: when it is submitted, sbatch's options, how long it runs (s) and may run (min)."""

    at: float
    options: tuple[str, ...]
    seconds: float
    minutes: int
    gpus: float
    """What it holds of GPUs, in all."""
    group: int = 0
    """Whose it is: the caller's."""


@dataclass
class Ran:
    """What became of a job, in seconds since 1970; None: not yet."""

    job: Job
    job_id: str
    submitted: float
    started: float | None = None
    ended: float | None = None
    state: str = ""
    gpus: tuple[tuple[str, int, float], ...] = ()
    """What it was seen to hold: node, index, how much of that GPU."""
    script: float | None = None
    """When its script began for the first time, by the stamp that it left."""

    def wait(self, until: float) -> float:
        """How long it waited, up to `until` if it had not started."""
        return max(0.0, min(self.started if self.started is not None else until, until) - self.submitted)


@dataclass
class Arm:
    """A cluster that loads are run on: stock Slurm, or Slurm with the plugins at a level."""

    nodes: int
    level: str | None
    """None: stock Slurm without any plugin."""
    plugins: Path | None = None
    settings: Global = field(default_factory=Global)
    slurm_conf: str = ""
    # time is compressed: a scheduler that looks every 30 s would wait for as long as the jobs run
    scheduler: str = (
        "bf_interval=3,bf_continue,bf_max_job_test=1000,bf_resolution=10,bf_window=1440,default_queue_depth=200,"
        "sched_min_interval=500000,batch_sched_delay=1,bf_yield_interval=500000"
    )
    """SchedulerParameters."""

    def __enter__(self) -> Arm:
        """Boot it."""
        self.parent = tempfile.TemporaryDirectory(dir=DEFAULT_FOLDER.parent, prefix="sl-bench-")
        self.cluster = DevCluster(Path(self.parent.name) / "cluster")
        document = yaml.safe_dump(self._description())
        self.cluster.up(parse_description(document, source="benchmark"), attached=True, timeout=600)
        self.stamps = self.cluster.folder / "stamps"
        self.stamps.mkdir()
        self.stamps.chmod(0o777)  # of the user who submits
        return self

    def __exit__(self, *_: object) -> None:
        """Bring it down."""
        self.cluster.down()
        self.parent.cleanup()

    def _description(self) -> dict[str, Any]:
        names = f"n[1-{self.nodes}]"
        gres = [f"NodeName={names} Name=gpu Type=h100 File=/dev/nvidia{gpu}" for gpu in range(GPUS_A_NODE)]
        gres.append(f"NodeName={names} Name=shard Count={GPUS_A_NODE * SHARDS_A_GPU}")
        sluice: dict[str, Any] = {}
        if self.level is not None:
            sluice = {"level": self.level, "policy": CompiledPolicy(settings=self.settings).render()}
            if self.plugins is not None:
                sluice["plugins"] = str(self.plugins)
        return {
            "nodes": [{"names": names, "platform": "dgx-h100"}],
            "users": [{"name": "alice"}],
            "controllers": 1,
            "accounting": False,
            "gres": {
                "gres_conf": "\n".join(gres),
                "node_lines": f"NodeName={names} Sockets=2 CoresPerSocket={CORES_A_NODE // 2} ThreadsPerCore=1 "
                f"RealMemory={MEMORY_MIB} Gres=gpu:h100:{GPUS_A_NODE},shard:{GPUS_A_NODE * SHARDS_A_GPU}\n",
            },
            "slurm_conf": "MinJobAge=36000\nMaxJobCount=100000\nDefMemPerCPU=100\nKillWait=1\n"
            f"SchedulerParameters={self.scheduler}\n{self.slurm_conf}",
            **({"sluice": sluice} if sluice else {}),
        }

    def _look(self, seen: dict[str, tuple[tuple[str, int, float], ...]], stop: threading.Event) -> None:
        """Every two seconds, and at the end: which GPUs the jobs hold."""
        ended = False
        while not ended:
            ended = stop.wait(2)
            for line in self.cluster.run(["scontrol", "show", "job", "-d", "-o"], timeout=60).stdout.splitlines():
                if "JobState=RUNNING" in line and (found := re.match(r"JobId=(\d+)", line)):
                    seen[found[1]] = held_gpus(line)

    def run(self, jobs: Sequence[Job], *, settle_s: float) -> tuple[list[Ran], float]:
        """Run a load, in order of `at`; what became of it, and when that was seen.

        That is when all had started, or `settle_s` after the last submission. What is left then is cancelled. Raises
        SluiceError for a job that was refused, and where no script left its stamp.
        """
        # An empty file of the job's number, whose time stays that of the first run; without a process of its own.
        script = f": >>{INSIDE}/{self.stamps.name}/$SLURM_JOB_ID; exec sleep"
        words = [
            (
                job.at,
                [
                    "sbatch",
                    "--parsable",
                    "-o/dev/null",
                    f"-t{job.minutes}",
                    f"--wrap={script} {job.seconds:.1f}",
                    *job.options,
                ],
            )
            for job in jobs
        ]
        held: dict[str, tuple[tuple[str, int, float], ...]] = {}
        stop = threading.Event()
        looker = threading.Thread(target=self._look, args=(held, stop))
        looker.start()
        try:
            done = self.cluster.run(
                ["python3", "-c", _SUBMITTER], user="alice", input_text=json.dumps(words), timeout=jobs[-1].at + 600
            )
            ran = {}
            for number, job_id, submitted, said in map(json.loads, done.stdout.splitlines()):
                if not job_id:
                    raise SluiceError(f"sbatch {' '.join(jobs[number].options)}: {said}", remedy="see sbatch's words")
                ran[job_id] = Ran(jobs[number], job_id, submitted)
            deadline = time.monotonic() + settle_s
            while time.monotonic() < deadline and self.cluster.run(["squeue", "-h", "-t", "PD,CF"]).stdout.strip():
                time.sleep(1)
        finally:
            stop.set()
            looker.join()
        now = time.time()
        for line in self.cluster.run(["squeue", "-h", "-t", "all", "-o", "%i|%T|%S|%e"]).stdout.split():
            job_id, state, start, end = line.split("|")
            if (seen := ran.get(job_id.removesuffix("+0"))) is not None:  # the first part of a heterogeneous job
                _note(seen, state, _time(start), _time(end))
                seen.gpus = held.get(job_id, ())
        for stamp in self.stamps.iterdir():
            if stamp.name in ran:
                ran[stamp.name].script = stamp.stat().st_mtime
        if any(one.ended for one in ran.values()) and not any(one.script for one in ran.values()):
            raise SluiceError("jobs have ended, and no script left its stamp", remedy="see the cluster's logs")
        self._clear()
        return [ran[key] for key in sorted(ran, key=int)], now

    def _clear(self) -> None:
        self.cluster.run(["scancel", "-u", "alice"])
        deadline = time.monotonic() + 120
        while self.cluster.run(["squeue", "-h", "-t", "PD,R,CF,CG"]).stdout.strip():
            if time.monotonic() > deadline:
                raise SluiceError("jobs do not end within two minutes of scancel", remedy="see the cluster's logs")
            time.sleep(0.5)

    def counters(self) -> dict[str, int]:
        """The plugins' counters; none of stock Slurm."""
        time.sleep(1.2)  # written every second
        for status in (self.cluster.folder / "state").glob("sluice.status.*"):
            return dict(json.loads(status.read_text())["counters"])
        return {}


def _time(text: str) -> float | None:
    return None if text in ("N/A", "Unknown", "None") else datetime.fromisoformat(text).timestamp()


def _note(ran: Ran, state: str, start: float | None, end: float | None) -> None:
    ran.state = state
    if state not in ("PENDING", "CONFIGURING", "CANCELLED"):
        ran.started = start
    if state in ("COMPLETED", "FAILED", "TIMEOUT", "COMPLETING"):
        ran.ended = end


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))] if ranked else 0.0


def held_gpus(line: str) -> tuple[tuple[str, int, float], ...]:
    """What a job holds, from its line of ``scontrol show job -d -o``: node, index and how much of each GPU."""
    held = []
    for nodes, gres in re.findall(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\d+ GRES=(\S*)", line):
        gpus = [
            (index, 1.0) for text in re.findall(r"gpu(?::\w+)*:\d+\(IDX:([\d,-]+)\)", gres) for index in _indices(text)
        ]
        for parts, text in re.findall(r"shard(?::\w+)*:(\d+)\(IDX:([\d,-]+)\)", gres):
            gpus += [(index, int(parts) / SHARDS_A_GPU) for index in _indices(text)]
        held += [(node, index, part) for node in expand(nodes) for index, part in gpus]
    return tuple(held)


def _indices(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",") if part[:1].isdigit()]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def _claims(ran: Sequence[Ran], begin: float, end: float) -> dict[tuple[str, int], list[tuple[float, float, Ran]]]:
    """Of each GPU: moments at which a job's program began (+) or ended (-) to have a part of it."""
    claims: dict[tuple[str, int], list[tuple[float, float, Ran]]] = defaultdict(list)
    for job in ran:
        if job.started is None:
            continue
        low = max(job.started, begin)
        high = min(job.started + job.job.seconds, job.ended if job.ended is not None else end, end)
        known = job.gpus or ((job.job_id, 0, job.job.gpus),)  # too short to be seen: as much as it asked for
        for node, index, part in known if high > low else ():
            claims[node, index] += [(low, part, job), (high, -part, job)]
    return claims


def in_use(ran: Sequence[Ran], gpus: float, begin: float, end: float) -> tuple[float, int]:
    """Percent of GPU time between two moments that jobs ran with, and how many jobs got what others had.

    A GPU counts once, however often it was given out. A job's program has its GPUs for as long as it was to run: what
    Slurm takes to end it is no use of a GPU.
    """
    used = 0.0
    twice: set[str] = set()
    for moments in _claims(ran, begin, end).values():
        now, level, last = begin, 0.0, ""
        for at, part, job in sorted(moments, key=lambda moment: (moment[0], moment[1])):
            used += (min(level, 1.0) if job.gpus else level) * (at - now)
            if job.gpus and level > 1.001 and at - now >= 2:  # starts are reported in whole seconds
                twice.add(last)
            now, level, last = at, level + part, job.job_id if part > 0 else last
    return 100 * used / (gpus * (end - begin)), len(twice)


def allocation(ran: Sequence[Ran], gpus: float, begin: float, end: float) -> float:
    """Percent of GPU time between two moments that jobs held, by what they asked for, until Slurm saw their end."""
    held = 0.0
    for job in ran:
        if job.started is not None:
            held += job.job.gpus * max(0.0, min(job.ended or end, end) - max(job.started, begin))
    return 100 * held / (gpus * (end - begin))
