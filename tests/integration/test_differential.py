"""The same random mix of jobs on stock Slurm and at level place: what users may count on is the same."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product

import pytest

from dev_cluster.cluster import DevCluster
from sluice.base.hostlist import expand
from tests.integration.job_mix import GPU_MIB, RESERVED_NODE, Mix, Step, description, shell_lines
from tests.integration.settled import until
from tests.integration.slurm_features import POLICY, set_up, status_in_force

pytestmark = pytest.mark.cluster

FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
STEPS = int(os.environ.get("SLUICE_MIX_STEPS", "1000" if FULL else "60"))
SEEDS = [int(seed) for seed in os.environ.get("SLUICE_MIX_SEEDS", "1 2 3" if FULL else "1").split()]
VERSIONS = ["22.05", "24.11"] if FULL else ["22.05"]
VERSIONS = os.environ.get("SLUICE_MIX_VERSIONS", " ".join(VERSIONS)).split()
# Of a job whose deadline the queue endangers, be it refused by Slurm or not.
DANGER = re.compile(r"sbatch: (?:error: )?--deadline=\S+ may be missed: after all that is planned [^|]*\|")
UNENDED = {"PENDING", "RUNNING", "SUSPENDED", "REQUEUED", "PREEMPTED"}
CHECKED = {"SLUICE_CROSS_CHECK_PERMILLE": "1000", "SLUICE_MIRROR_CHECK_EVERY": "1"}


@dataclass
class Job:
    """What became of a job."""

    state: str
    exit: str
    tres: dict[str, str]
    submitted: float
    started: float
    ended: float


@dataclass
class Outcome:
    """What a mix came to on one cluster."""

    log_from: int = 0  # where slurmctld's log was before
    answers: dict[str, tuple[bool, str]] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)  # what the looks at running jobs found
    looks: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    log: str = ""
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first submission to the last end."""
        ended = [job.ended for job in self.jobs.values() if job.ended]
        return max(ended) - min(job.submitted for job in self.jobs.values()) if ended else 0

    def has_refused(self, job: str) -> bool:
        """Was it, with its array or heterogeneous job, not even queued?"""
        return not self.answers.get(step_of(job), (True, ""))[0]

    @property
    def wait(self) -> float:
        """Mean seconds from submission to start."""
        waits = [job.started - job.submitted for job in self.jobs.values() if job.started]
        return sum(waits) / len(waits) if waits else 0


def step_of(job: str) -> str:
    """The name of the step that submitted a job, be it a task of an array or a component."""
    return re.split("[x_]", job)[0]


# ---- running a mix ----


def play(cluster: DevCluster, steps: list[Step]) -> Outcome:
    """Submit it all, and wait until nothing more happens."""
    outcome = Outcome(log_from=len(cluster.log("slurmctld@ctl1").read_text()))
    with _watched(cluster, outcome):
        chunk: list[Step] = []
        for step in steps:
            waiting = {other.name for other in chunk}
            if len(chunk) >= 20 or waiting & set(re.findall(r"\{(s\d+d\d+)\}", " ".join(step.words))):
                _submit(cluster, chunk, outcome)
                chunk = []
            chunk.append(step)
        _submit(cluster, chunk, outcome)
        _settle(cluster, outcome)
    return outcome


def end_what_never_comes(clusters: list[DevCluster], outcomes: list[Outcome]) -> None:
    """sched/backfill keeps nodes for jobs that never start, e.g. of which one component cannot, and others wait behind
    them. Where only one cluster has some left: what both have left ends, or one has left and the other has refused,
    still counted as left; the rest goes on."""

    def go_on(cluster: DevCluster, outcome: Outcome, other: Outcome) -> None:
        ended = {name: line for name, line in outcome.left.items() if name in other.left or other.has_refused(name)}
        if not ended:
            return
        ids = [line.split()[0].removesuffix("_N/A") for name, line in ended.items() if "x" not in name]
        cluster.run(["scancel", *ids], check=False)
        with _watched(cluster, outcome):
            _settle(cluster, outcome)
        outcome.left |= ended

    if outcomes[0].left.keys() != outcomes[1].left.keys():
        before = [replace(outcome, left=dict(outcome.left)) for outcome in reversed(outcomes)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(go_on, clusters, outcomes, before))


def start_alone(cluster: DevCluster, outcome: Outcome, names: list[str]) -> None:
    """Let each of these waiting jobs start alone, in order of submission: those that do are left no more."""
    if not names:
        return
    outcome.log = _log(cluster, outcome)  # what follows is nothing that the other cluster sees
    pending = {name: line.split()[0].removesuffix("_N/A") for name, line in outcome.left.items()}
    owner = {name: step_of(name) for name in pending}
    owners = sorted({owner[name] for name in names}, key=lambda own: int(own.split("d")[1]))
    with _watched(cluster, outcome):
        # Of a heterogeneous job only the leader takes commands, for all of it. Not checked, as one that was not held in
        # time ends: what is in the queue then decides.
        leaders = [name for name in pending if "x" not in name]
        if others := [pending[name] for name in leaders if owner[name] not in owners]:
            cluster.run(["scancel", *others], check=False)
        cluster.run(["scontrol", "hold", *[pending[name] for name in leaders if owner[name] in owners]], check=False)
        for own in owners:
            mine = [name for name in pending if owner[name] == own]
            ids = [pending[name] for name in mine]
            asked = [pending[name] for name in leaders if owner[name] == own]
            cluster.run(["scontrol", "release", *asked], check=False)
            words = ["squeue", "-h", "-r", "-o", "%T %r", "-j", ",".join(ids)]
            deadline = time.monotonic() + 20  # ten passes of sched/backfill
            while queue := cluster.run(words, check=False, timeout=60).stdout:
                if "PENDING" in queue and time.monotonic() > deadline:
                    cluster.run(["scancel", *asked], check=False)
                    break
                time.sleep(0.3)
            else:
                for name in mine:
                    del outcome.left[name]


@contextmanager
def _watched(cluster: DevCluster, outcome: Outcome) -> Iterator[None]:
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(cluster, outcome, ended))
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _submit(cluster: DevCluster, chunk: list[Step], outcome: Outcome) -> None:
    script = "\n".join(shell_lines(step, outcome.ids) for step in chunk)
    said = cluster.run(["bash", "-s"], user="alice", input_text=script, timeout=600).stdout
    for name, status, text in re.findall(r"^@@(\S+) (\d+) (.*)$", said, re.M):
        if id_ := re.search(r"(?:^|\|)(\d+)(?=\||$)", text):
            outcome.ids[name] = id_[1]
        outcome.answers[name] = (status == "0", _plain(text))


def _plain(text: str) -> str:
    """Without what differs from one moment to the next, and what level place prints in addition to Slurm's answer."""
    text = DANGER.sub("", text)
    text = re.sub(r"(?:^|\|)\d+\|", "|", text)
    text = re.sub(r"Job \d+ to start at .*", "Job to start", text)
    text = re.sub(r"slurm_update error: .*?: ", "", text)
    return re.sub(r"(job|jobid|JobId=?)\s*\d+(_\d+)?", "job", text)


def _settle(cluster: DevCluster, outcome: Outcome) -> None:
    """Until nothing has run for a while; then what is left is known."""
    last, since, looks = set[str](), time.monotonic(), 0
    let_start: dict[str, float] = {}
    deadline = since + 120 + 2 * STEPS
    while queue := cluster.run(["squeue", "-h", "-r", "-o", "%F_%K %T %j %r"], timeout=120).stdout:
        jobs = {line.split()[0] for line in queue.splitlines()}
        if jobs != last or re.search(" (RUNNING|COMPLETING|CONFIGURING) |BeginTime$", queue, re.M):
            since, looks = time.monotonic(), 0
        looks += 1
        # Slurm delays requeued jobs by two minutes; settled.start_again says why not now.
        waiting = re.findall(r"^(\d+)_\S+ PENDING \S+ BeginTime", queue, re.M)
        if late := [job for job in waiting if time.monotonic() > let_start.get(job, 0) + 5]:
            cluster.run(["scontrol", "update", f"JobId={','.join(late)}", "StartTime=now+2"], check=False)
            let_start |= dict.fromkeys(late, time.monotonic())
        # On a busy machine slurmctld answers later, and passes take longer, too.
        if (time.monotonic() - since > 10 and looks > 20) or time.monotonic() > deadline:
            break
        last = jobs
        time.sleep(0.5)
    ended = "CANCELLED COMPLETED FAILED TIMEOUT"
    outcome.left = {
        line.split()[2] + (f"_{line.split()[0].split('_')[1]}" if "_N/A" not in line.split()[0] else ""): line
        for line in queue.splitlines()
        if line.split()[1] not in ended
    }


def finish(cluster: DevCluster, steps: list[Step], outcome: Outcome) -> None:
    """Cancel what is left, and gather."""
    deadline = time.monotonic() + 120
    cluster.run(["scancel", "--user=alice"], timeout=120)
    while queue := cluster.run(["squeue", "-h"], timeout=120).stdout:
        assert time.monotonic() < deadline, queue
        time.sleep(0.3)
    deadline = time.monotonic() + 20
    last = re.search(r"NEXT_JOB_ID\s*=\s*(\d+)", cluster.run(["scontrol", "show", "config"]).stdout)
    assert last
    # By number: of a span of time sacct leaves out the jobs that were never eligible.
    numbers = ",".join(str(number) for number in range(1, int(last[1])))
    fields = "JobID,JobName,State,ExitCode,AllocTRES,Submit,Start,End"
    while True:
        rows = [
            line.split("|")
            for line in cluster.run(["sacct", "-naXP", "-j", numbers, "-o", fields], timeout=120).stdout.splitlines()
        ]
        if not any(row[2].split()[0] in UNENDED for row in rows) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    for row in rows:
        if row[1].split("d")[0] != steps[0].name.split("d")[0]:
            continue  # of another mix
        name = row[1] + (f"_{row[0].split('_')[1]}" if "_" in row[0] else "")
        outcome.jobs[name] = Job(
            state=row[2].split()[0],
            exit=row[3],
            tres=dict(word.split("=") for word in row[4].split(",") if word),
            submitted=_seconds(row[5]),
            started=_seconds(row[6]),
            ended=_seconds(row[7]),
        )
    outcome.log = outcome.log or _log(cluster, outcome)
    outcome.errors = Counter({text: len(lines) for text, lines in errors_of(outcome.log).items()})


def errors_of(log: str) -> dict[str, list[str]]:
    """A log's lines of errors, by what they say whatever the numbers."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in log.splitlines():
        if re.search(r"\berror:", line):
            found[re.sub(r"\d+", "#", re.sub(r"^\S+ ?|\[.*?\] ", "", line)).strip()].append(line)
    return found


def _log(cluster: DevCluster, outcome: Outcome) -> str:
    return cluster.log("slurmctld@ctl1").read_text()[outcome.log_from :]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() if text[:1].isdigit() else 0


# ---- looking at what runs ----


def _watch(cluster: DevCluster, outcome: Outcome, ended: threading.Event) -> None:
    """Between two lists of jobs that are the same, the nodes: what they say is held is what the jobs hold."""
    script = "; echo @@; ".join(["scontrol show job -d -o", "scontrol show node -d -o", "scontrol show job -d -o"])
    while not ended.wait(0.5):
        done = cluster.run(["bash", "-c", script], check=False, timeout=120)
        parts = done.stdout.split("@@\n")
        if done.returncode or len(parts) != 3:
            continue
        before, nodes, after = parts
        jobs = [job for job in map(_held, before.splitlines()) if job]
        if [job.held for job in jobs] != [job.held for job in map(_held, after.splitlines()) if job]:
            continue
        outcome.looks += 1
        outcome.wrong += _check(jobs, nodes)


@dataclass
class Held:
    """What a job holds, in words of Slurm: node -> (CPU numbers, MiB, GRES)."""

    name: str
    running: bool
    partition: str
    reservation: str
    held: dict[str, tuple[set[int], int, str]]


def _held(line: str) -> Held | None:
    state = re.search(r"JobState=(\S+)", line)
    if not state or state[1] not in ("RUNNING", "COMPLETING", "CONFIGURING"):
        return None
    word = dict(re.findall(r"(\S+?)=(\S*)", line))
    # Of a job that is ending: the nodes that it has not given back yet.
    still = [] if word["NodeList"] == "(null)" else expand(word["NodeList"])
    return Held(
        name=f"{word['JobName']}={word['JobId']}",
        running=state[1] == "RUNNING",
        partition=word["Partition"],
        reservation=word.get("Reservation", ""),
        held={
            node: (set(_numbers(cpus)), int(memory), gres)
            for nodes, cpus, memory, gres in re.findall(r" Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)", line)
            for node in expand(nodes)
            if node in still
        },
    )


def _numbers(text: str) -> list[int]:
    ranges = [part.partition("-") for part in text.split(",") if part[:1].isdigit()]
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]


def whole_gpus(gres: str) -> set[int]:
    """Indices of the GPUs held whole: ``gpu:h100:2(IDX:0-1)``."""
    return {index for text in re.findall(r"gpu(?::\w+)*:\d+\(IDX:([\d,-]+)\)", gres) for index in _numbers(text)}


def shares(gres: str) -> dict[int, int]:
    """Shares of each GPU: ``shard:40000(40000/80000,0/80000)`` or, of some versions, ``shard:h100:4(3:4/80000)``."""
    held: dict[int, int] = defaultdict(int)
    for text in re.findall(r"(?:shard|mps)(?::\w+)*:\d+\(([^)]*)\)", gres):
        for position, share in enumerate(text.split(",")):
            found = re.fullmatch(r"(?:(\d+)[:(])?(\d+)/(\d+)\)?", share)
            if found and found[2] != "0":
                held[int(found[1] or position)] += int(found[2])
    return held


def _check(jobs: list[Held], nodes: str) -> list[str]:
    wrong = []
    by_node: dict[str, list[Held]] = defaultdict(list)
    for job in jobs:
        for node in job.held:
            by_node[node].append(job)
    for line in nodes.splitlines():
        word = dict(re.findall(r"(\S+?)=(\S*)", line))
        node = word["NodeName"]
        wrong += [f"{node}: {text}" for text in _check_node(node, by_node[node], word)]
    return wrong


def _check_node(node: str, jobs: list[Held], says: dict[str, str]) -> list[str]:
    wrong = []
    cpus: dict[int, str] = {}
    whole: dict[int, str] = {}
    parts: dict[int, int] = defaultdict(int)
    shared: dict[int, str] = {}
    memory = 0
    for job in jobs:
        its_cpus, its_memory, gres = job.held[node]
        memory += its_memory
        if job.partition == "main":
            wrong += [f"CPU {cpu}: {cpus[cpu]} and {job.name}" for cpu in its_cpus & cpus.keys()]
            cpus.update(dict.fromkeys(its_cpus, job.name))
        wrong += [f"GPU {gpu}: {whole[gpu]} and {job.name}" for gpu in whole_gpus(gres) & whole.keys()]
        whole.update(dict.fromkeys(whole_gpus(gres), job.name))
        for gpu, amount in shares(gres).items():
            parts[gpu] += amount
            shared[gpu] = job.name
        if node == RESERVED_NODE and job.reservation != "mine":
            wrong.append(f"{job.name} runs on reserved nodes")
    wrong += [f"GPU {gpu}: whole {whole[gpu]}, parts {shared[gpu]}" for gpu in whole.keys() & parts.keys()]
    wrong += [f"GPU {gpu}: {amount} shares" for gpu, amount in parts.items() if amount > GPU_MIB]
    if memory > int(says["RealMemory"]) or int(says["AllocMem"]) > int(says["RealMemory"]):
        wrong.append(f"{memory} MiB held, AllocMem={says['AllocMem']}")
    if int(says["CPUAlloc"]) > int(says["CPUTot"]):
        wrong.append(f"CPUAlloc={says['CPUAlloc']}")
    if all(job.running for job in jobs):
        if memory != int(says["AllocMem"]):
            wrong.append(f"{memory} MiB held by {[job.name for job in jobs]}, AllocMem={says['AllocMem']}")
        if whole.keys() != whole_gpus(says["GresUsed"]):
            wrong.append(f"GPUs {sorted(whole)} held by {sorted(set(whole.values()))}, GresUsed={says['GresUsed']}")
    return wrong


# ---- comparing ----


@dataclass
class Seen:
    """What stock Slurm does with a step, asked again and again."""

    answers: list[tuple[bool, str]] = field(default_factory=list)
    tres: dict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))  # by job name
    errors: set[str] = field(default_factory=set)  # that slurmctld logged meanwhile


@dataclass
class Difference:
    """What place has done otherwise than stock, and what of it stock Slurm may do itself now and then."""

    text: str
    step: Step | None = None
    answer: tuple[bool, str] | None = None
    job: str = ""
    tres: dict[str, str] = field(default_factory=dict)
    error: str = ""  # a line of the log about the step's job

    def is_stock(self, cluster: DevCluster) -> bool:
        """Stock Slurm does so, too, asked alone."""
        if "(msg_type=SRUN_JOB_COMPLETE) failed" in self.error:
            return stock_says_of_refused_sruns(cluster, self.error)
        if self.step is None:
            return False
        seen = ask_stock(cluster, self.step)
        if self.error:
            return self.error in seen.errors
        if self.answer:
            return self.answer in seen.answers
        return fixed(self.step, self.tres) in [fixed(self.step, tres) for tres in seen.tres[self.job]]


def differences(steps: list[Step], stock: Outcome, place: Outcome) -> list[Difference]:
    """What place has done otherwise than stock."""
    found = []
    by_name = {step.name: step for step in steps}
    for step in steps:
        if step.kind in ("job", "test", "update") and stock.answers.get(step.name) != place.answers.get(step.name):
            text = f"{step.name}: stock said {stock.answers.get(step.name)}, place {place.answers.get(step.name)}: "
            alone = None if step.kind == "update" else step
            found.append(Difference(f"{text}{step.command} {step.words}", alone, place.answers.get(step.name)))
    for name in sorted(stock.jobs.keys() | place.jobs.keys()):
        if (own := step_of(name)) not in by_name or by_name[own].loose:
            continue
        if stock.has_refused(name) != place.has_refused(name):
            continue  # that its submission was answered differently is a difference already
        step = by_name[own]
        one, other = stock.jobs.get(name), place.jobs.get(name)
        text = f"{name} ({stock.ids.get(step.name)}, {place.ids.get(step.name)})"
        if not one or not other:
            found.append(Difference(f"{text}: only on {'stock' if one else 'place'}: {step.words}"))
        elif name in place.left and name not in stock.left:
            found.append(Difference(f"{text}: ended on stock, left on place: {place.left[name]}: {step.words}"))
        elif name in stock.left:
            continue  # stock starts it not even alone (start_alone): there is nothing to compare with
        elif (one.state, one.exit) != (other.state, other.exit):
            states = f"{one.state} {one.exit} on stock, {other.state} {other.exit} on place"
            found.append(Difference(f"{text}: {states}: {step.words}"))
        elif fixed(step, one.tres) != fixed(step, other.tres):
            tres = f"{one.tres} on stock, {other.tres} on place"
            found.append(Difference(f"{text}: {tres}: {step.words}", step, job=name.split("_")[0], tres=other.tres))
    found += [Difference(f"place: {text}") for text in sorted(set(place.wrong))]
    for text, lines in errors_of(place.log).items():
        if text not in stock.errors:
            found += [
                Difference(f"place's log: {text} ({len(lines)}x): {step and step.words}", step, error=text)
                for step in {step.name if step else "": step for step in _about(lines, by_name, place)}.values()
            ]
    for counter in ("select.cross_wrong", "select.check_failures", "select.mirror_mismatches"):
        if place.counters.get(counter, 0):
            lines = [line for line in place.log.splitlines() if "select/sluice" in line]
            found.append(Difference(f"{counter} = {place.counters[counter]}: {lines[:5]}"))
    return found


def _about(lines: list[str], by_name: dict[str, Step], outcome: Outcome) -> Iterator[Step | None]:
    """The steps whose jobs these lines of the log name; None for a line that names none of them."""
    names = {id_: name for name, id_ in outcome.ids.items()}
    for line in lines:
        job = re.search(r"\b[Jj]ob(?:Id=| )(\d+)", line)
        yield by_name.get(names.get(job[1], "")) if job else None


def fixed(step: Step, tres: dict[str, str]) -> dict[str, str]:
    """What the request says of the allocation."""
    kinds = ("cpu", "gres/gpu", "mem", "node", "gres/shard", "gres/mps")
    return {kind: tres[kind] for kind in kinds if kind in tres and kind.removeprefix("gres/") not in step.free}


# ---- what stock does now and then ----

# Others' jobs, one or two for each node: with a GPU and ever more CPUs, which take another node, too, where one has too
# few left; all of one socket with its GPUs, nearly all of the other one; three GPUs of one socket and one of the other
# one; and such as are ending: batch jobs are only tested when they are submitted, whatever runs, but nodes that are
# completing others are not counted among those with a counted feature, and the job is queued that else is refused.
BOUND = "-mblock:block --gres-flags=enforce-binding"
ENDING = ["-N1"]
FILLS = [
    [],
    *([f"-n{cpus} --gres=gpu:1"] for cpus in (9, 12, 13, 14, 15, 16)),
    [f"{shape} {BOUND}" for shape in ("-n8 --gres=gpu:4", "-n7 --gres=gpu:3")],
    ["-N1 -n2 --sockets-per-node=2 --ntasks-per-socket=1 --gpus-per-socket=1", f"-N1 -n1 --gres=gpu:2 {BOUND}"],
    ENDING,
]


def ask_stock(cluster: DevCluster, step: Step) -> Seen:
    """Submit a step's request to stock Slurm alone, its nodes filled up more and more."""
    seen = Seen()
    log_from = len(cluster.log("slurmctld@ctl1").read_text())
    words = [word for word in step.words if not word.startswith(("--dependency", "--begin", "--hold"))]
    asked = Step(step.name, step.command, [*words[:-1], "--wrap=sleep 60"], kind=step.kind)
    for fill in FILLS:
        _fill(cluster, fill)
        if fill is ENDING:
            cluster.run(["scancel", "--user=alice"])
        probe = Outcome()
        _submit(cluster, [asked], probe)
        seen.answers.append(probe.answers[step.name])
        deadline = time.monotonic() + 6  # two passes of sched/backfill
        while time.monotonic() < deadline and step.name in probe.ids:
            shown = cluster.run(["scontrol", "show", "job", "-o", probe.ids[step.name]], check=False).stdout
            if "JobState=PENDING" not in shown:
                for name, tres in re.findall(r" JobName=(\S+) .*(?: |Alloc)TRES=(\S+)", shown):
                    seen.tres[name].append(dict(word.split("=") for word in tres.split(",")))
                break
            time.sleep(0.3)
        _empty(cluster)
    seen.errors = set(errors_of(cluster.log("slurmctld@ctl1").read_text()[log_from:]))
    return seen


def _fill(cluster: DevCluster, shapes: list[str]) -> None:
    """Others' jobs of these shapes run, on each node."""
    said = "ls *.runs 2>/dev/null | wc -l"
    cluster.run(["bash", "-c", "rm -f *.runs"], user="alice")
    script = f"trap 'sleep {20 if shapes is ENDING else 0}' TERM; touch $SLURM_JOB_ID.runs; sleep 600 & wait"
    jobs = list(product([f"n{number}" for number in range(1, 7)], shapes))
    for node, shape in jobs:
        others = ["sbatch", "-o/dev/null", "-t10", f"-w{node}", *shape.split(), f"--wrap={script}"]
        cluster.run([*others, *(["--reservation=mine"] if node == RESERVED_NODE else [])], user="alice")
    until(lambda: cluster.run(["bash", "-c", said], user="alice").stdout.strip(), str(len(jobs)).__eq__)


def _empty(cluster: DevCluster) -> None:
    cluster.run(["scancel", "--user=alice"])
    until(lambda: cluster.run(["squeue", "-h"]).stdout, lambda left: not left)


def stock_says_of_refused_sruns(cluster: DevCluster, error: str) -> bool:
    """An srun that is refused at once also hears that its job has ended, and may have gone by then: does stock Slurm
    say this of many of them?"""
    log_from = len(cluster.log("slurmctld@ctl1").read_text())
    _fill(cluster, ["-N1 --exclusive"])
    cluster.run(["sbatch", "-o/dev/null", "-t10", "-N1", "--exclusive", "--qos=high", "--wrap=true"], user="alice")
    sruns = "for i in $(seq 10); do timeout 20 srun --immediate=1 -N1 true; done >/dev/null 2>&1 &"
    deadline = time.monotonic() + 120
    while not (found := error in errors_of(cluster.log("slurmctld@ctl1").read_text()[log_from:])):
        if time.monotonic() > deadline:
            break
        cluster.run(["bash", "-c", sruns * 12 + " wait"], user="alice", timeout=300)
    _empty(cluster)
    return found


# ---- the test ----


@pytest.fixture(scope="module", params=VERSIONS)
def clusters(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> list[DevCluster]:
    """Stock and place."""
    root = {"root": request.getfixturevalue("trixie_root")} if request.param == "24.11" else {}
    place = {"level": "place", "policy": POLICY, "environment": CHECKED}
    both = [make_shared_cluster(description(sluice), **root) for sluice in (None, place)]
    for cluster in both:
        set_up(cluster)
        made = f"ReservationName=mine StartTime=now Duration=UNLIMITED Nodes={RESERVED_NODE} Users=alice"
        cluster.run(["scontrol", "create", *made.split()])
    assert status_in_force(both[1])["level"] == "place"
    return both


def survived(steps: list[Step], version: str) -> list[Step]:
    """What stock slurmctld survives: 24.11 ends when it spreads a job with --gpus or --gpus-per-task."""
    return [
        replace(step, words=[word for word in step.words if word != "--spread-job"])
        if version == "24.11" and any(word.startswith(("--gpus=", "--gpus-per-task=")) for word in step.words)
        else step
        for step in steps
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_same_mix_same_results(request: pytest.FixtureRequest, clusters: list[DevCluster], seed: int) -> None:
    steps = survived(Mix(seed).make(STEPS), request.node.callspec.params["clusters"])
    with ThreadPoolExecutor(2) as pool:
        stock, place = pool.map(lambda cluster: play(cluster, steps), clusters)
    end_what_never_comes(clusters, [stock, place])
    # Jobs that wait on stock only: stock keeps nodes for jobs that never come. Alone they do as well as at place.
    start_alone(clusters[0], stock, sorted(stock.left.keys() - place.left.keys()))
    for cluster, outcome in zip(clusters, (stock, place), strict=True):
        finish(cluster, steps, outcome)
    time.sleep(1.5)
    place.counters = status_in_force(clusters[1])["counters"]
    ended = sum(job.state == "COMPLETED" for job in place.jobs.values())
    print(
        f"seed {seed}: {len(steps)} steps, {len(place.jobs)} jobs, {ended} completed, {place.looks} looks; "
        f"stock {stock.seconds:.0f} s, mean wait {stock.wait:.1f} s, {len(set(stock.wrong))} wrong; "
        f"place {place.seconds:.0f} s, mean wait {place.wait:.1f} s; "
        + ", ".join(
            f"{name} {place.counters.get('select.' + name)}" for name in ("narrowed", "refused", "cross_checked")
        )
    )
    found = [difference.text for difference in differences(steps, stock, place) if not difference.is_stock(clusters[0])]
    assert not found, "\n".join(found)
    assert ended > len(steps) / 3
    assert place.looks > 3
    assert place.counters["select.narrowed"] > 0
    assert place.counters["select.cross_checked"] > 0
