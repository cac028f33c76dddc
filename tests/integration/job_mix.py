"""Random mixes of jobs that ask for all that Slurm offers, for comparing two clusters: the same seed, the same mix."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.slurm_features import TOPOLOGY

LINE = "Sockets=2 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=64000"
GPU_MIB = 80000
RESERVED_NODE = "n3"


def _gpus(nodes: str, kind: str, first: int, last: int) -> list[str]:
    return [
        f"NodeName={nodes} Name=gpu Type={kind} File=/dev/nvidia{gpu} Cores={gpu // 4 * 8}-{gpu // 4 * 8 + 7}"
        for gpu in range(first, last)
    ]


GRES_CONF = "\n".join(
    [
        *_gpus("n[1-3,6]", "h100", 0, 8),
        *_gpus("n4", "a100", 0, 8),
        *_gpus("n5", "h100", 0, 4),
        *_gpus("n5", "a100", 4, 8),
        f"NodeName=n[1-5] Name=shard Count={8 * GPU_MIB}",
        "NodeName=n6 Name=mps Count=800",
    ]
)
NODE_LINES = f"""NodeName=n[1-2] {LINE} Gres=gpu:h100:8,shard:{8 * GPU_MIB} Feature=fast,rack1
NodeName=n3 {LINE} Gres=gpu:h100:8,shard:{8 * GPU_MIB} Feature=slow,rack2
NodeName=n4 {LINE} Gres=gpu:a100:8,shard:{8 * GPU_MIB} Feature=slow,rack2 Weight=2
NodeName=n5 {LINE} Gres=gpu:h100:4,gpu:a100:4,shard:{8 * GPU_MIB} Feature=slow,rack3
NodeName=n6 {LINE} Gres=gpu:h100:8,mps:800 Feature=slow,rack3
"""
SLURM_CONF = """TopologyPlugin=topology/tree
GresTypes=gpu,shard,mps
AccountingStorageTRES=gres/gpu,gres/shard,gres/mps
DefMemPerCPU=500
PreemptType=preempt/qos
PreemptMode=REQUEUE
Licenses=solver:2
MinJobAge=3600
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0,bf_continue,kill_invalid_depend
"""


def description(sluice: dict[str, Any] | None) -> dict[str, Any]:
    """Six nodes of 16 cores and eight GPUs, of two types and mixed, with all that the mixes ask for."""
    return {
        "nodes": [{"names": "n[1-6]", "platform": "dgx-h100"}],
        "controllers": 1,
        "accounts": [{"name": "physics"}, {"name": "biology"}],
        "users": [{"name": "alice", "accounts": ["physics"]}, {"name": "bob", "accounts": ["biology"]}],
        "partitions": [
            {"name": "main", "options": "DefaultTime=10 OverSubscribe=NO"},
            {"name": "share", "options": "DefaultTime=10 OverSubscribe=YES:2"},
        ],
        "gres": {"gres_conf": GRES_CONF, "node_lines": NODE_LINES},
        "slurm_conf": SLURM_CONF,
        "topology_conf": TOPOLOGY,
        **({"sluice": sluice} if sluice else {}),
    }


@dataclass
class Step:
    """One command of a mix. `{name}` in it is replaced by the id that another step's job got."""

    name: str
    command: str
    words: list[str]
    kind: str = "job"  # or test, busy, or act: its answer depends on when it comes
    free: set[str] = field(default_factory=set)  # cpu, gpu, mem, node: what its allocation may differ in
    loose: bool = False  # also its state may differ


class Mix:
    """Makes the steps of a mix, one after the other."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.prefix = f"s{seed}d"
        self.steps: list[Step] = []
        self.jobs: list[str] = []

    def make(self, count: int) -> list[Step]:
        """So many steps."""
        while len(self.steps) < count:
            maker = self.rng.choices(
                [self.job, self.array, self.het, self.held, self.cancelled, self.updated, self.test, self.busy],
                [70, 6, 5, 4, 4, 5, 6, 3],
            )[0]
            maker()
            if self.jobs and self.rng.random() < 0.05:
                self.act()
        return self.steps

    def new_name(self) -> str:
        """Of the step to come: no other mix has it."""
        return f"{self.prefix}{len(self.steps)}"

    # ---- kinds of steps ----

    def job(self) -> None:
        """A batch job."""
        options, free = self.options()
        self.batch(options, free)

    def batch(self, options: list[str], free: set[str], *, seconds: str = "", loose: bool = False) -> str:
        """A batch job with these options; its name."""
        name = self.new_name()
        self.steps.append(
            Step(
                name, "sbatch", [*self.common(name), *options, f"--wrap={self.script(seconds)}"], free=free, loose=loose
            )
        )
        self.jobs.append(name)
        return name

    def common(self, name: str) -> list[str]:
        """Every batch job has these."""
        return ["--parsable", "--requeue", "-o", "/dev/null", "-J", name]

    def script(self, seconds: str = "") -> str:
        """What the job does: it looks at what it got, and in part of all cases has a step do so, too."""
        seconds = seconds or f"{self.rng.choice([0.1, 0.3, 0.5, 1, 2])}"
        looks = '[ "${{SLURM_GPUS_ON_NODE:-0}}" = 0 ] || [ "$(echo $CUDA_VISIBLE_DEVICES | tr , \'\\n\' | wc -l)" = '
        looks += '"$SLURM_GPUS_ON_NODE" ] || exit 9'
        step = "; srun true || exit 8" if self.rng.random() < 0.12 else ""
        ends = "; exit 3" if self.rng.random() < 0.06 else ""
        return f"{looks}; sleep {seconds}{step}{ends}"

    def array(self) -> None:
        """An array, mostly throttled."""
        options, free = self.options()
        last = self.rng.randint(1, 5)
        throttle = self.rng.choice(["", "%1", "%2", "%3"])
        self.batch([*options, f"--array=0-{last}{throttle}"], free)

    def het(self) -> None:
        """Two or three components."""
        name = self.new_name()
        words, free = self.common(name), set()
        for component in range(self.rng.randint(2, 3)):
            shape, freedom = self.shape()
            words += ([":", "-J", f"{name}x{component}"] if component else []) + shape + self.memory(shape)
            free |= freedom
        self.steps.append(Step(name, "sbatch", [*words, f"--wrap={self.script()}"], free=free))
        self.jobs.append(name)

    def held(self) -> None:
        """Held and, mostly, released later."""
        options, free = self.options()
        job = self.batch([*options, "--hold"], free)
        if self.rng.random() < 0.8:
            self.act(f"scontrol release {{{job}}}")

    def cancelled(self) -> None:
        """Cancelled, be it pending or running."""
        options, _ = self.options()
        job = self.batch(options, {"cpu", "gpu", "mem", "node"}, seconds="300", loose=True)
        self.act(f"sleep 0.{self.rng.randint(0, 9)}; scancel {{{job}}}")

    def updated(self) -> None:
        """Changed while it waits."""
        options, free = self.options()
        job = self.batch([*options, "--hold"], free)
        change = self.rng.choice(
            [
                "TimeLimit=5",
                "NumNodes=1",
                "NumNodes=2",
                "MinMemoryNode=2000",
                "Nice=10",
                "Features=slow",
                "ExcNodeList=n1",
                "ReqNodeList=n2",
                "TresPerNode=gres/gpu:1" if self.rng.random() < 0.5 else "Gres=gpu:2",
                "NumCPUs=4",
                "QOS=high",
                "Contiguous=yes",
                "Partition=share",
            ]
        )
        self.steps.append(Step(self.new_name(), "scontrol", ["update", f"JobId={{{job}}}", change], kind="update"))
        self.act(f"scontrol release {{{job}}}")

    def test(self) -> None:
        """Only asked."""
        options, _ = self.options()
        name = self.new_name()
        self.steps.append(Step(name, "sbatch", ["--test-only", *options, "--wrap=true"], kind="test"))

    def busy(self) -> None:
        """Interactive: now or not at all."""
        shape, _ = self.shape()
        name = self.new_name()
        words = ["--immediate=1", "-J", name, *shape, *self.memory(shape), "true"]
        self.steps.append(Step(name, "timeout 20 srun", words, kind="busy", loose=True))

    def act(self, command: str = "") -> None:
        """Something done to a job, whatever has become of it."""
        if not command:
            job = self.rng.choice(self.jobs[-10:])
            command = self.rng.choice(["scontrol requeue {{{0}}}", "scontrol top {{{0}}}"]).format(job)
        self.steps.append(Step(self.new_name(), "sh -c", [command], kind="act"))

    # ---- options ----

    def pick(self, *choices: Any) -> Any:
        """One of them."""
        return self.rng.choice(choices)

    def nodes(self, most: int = 3) -> tuple[list[str], set[str]]:
        """How many nodes."""
        if self.rng.random() < 0.4:
            low = self.rng.randint(1, most)
            return [f"-N{low}-{low + self.rng.randint(1, 2)}"], {"cpu", "mem", "node"}
        return [f"-N{self.rng.randint(1, most)}"], set()

    def shape(self) -> tuple[list[str], set[str]]:
        """Nodes, tasks, CPUs and GRES, and what of the allocation that leaves open."""
        makers: list[tuple[Callable[[], tuple[list[str], set[str]]], int]] = [
            (self.one_node, 30),
            (self.per_node, 12),
            (self.total, 14),
            (self.per_task, 8),
            (self.per_socket, 5),
            (self.shards, 18),
            (self.cpus, 10),
            (self.mps, 3),
            (self.tasks_per_gpu, 3),
            (self.absurd, 4),
        ]
        return self.rng.choices([maker for maker, _ in makers], [weight for _, weight in makers])[0]()

    def one_node(self) -> tuple[list[str], set[str]]:
        kind = self.pick("", "", "", "h100:", "a100:")
        gpus = self.pick(1, 1, 1, 2, 2, 3, 4, 4, 5, 8)
        return ["-N1", f"--gres=gpu:{kind}{gpus}", *self.pick([], ["-c2"], ["-n2"], ["-n4", "-c2"], ["-c8"])], set()

    def per_node(self) -> tuple[list[str], set[str]]:
        nodes, free = self.nodes()
        kind = self.pick("", "", "h100:", "a100:")
        option = self.pick("--gpus-per-node=", "--gres=gpu:")
        tasks = self.pick([], [], ["--ntasks-per-node=2"])
        return [*nodes, f"{option}{kind}{self.pick(1, 2, 4, 8)}", *tasks], free | ({"gpu"} if free else set())

    def total(self) -> tuple[list[str], set[str]]:
        nodes, free = self.pick(([], {"cpu", "mem", "node"}), (["-N1"], set()), self.nodes())
        if "-N1" not in nodes:
            free = {"cpu", "mem", "node"}
        tasks = self.pick([], ["-n1"], ["-n2"], ["-n4"])
        kind = self.pick("", "", "h100:", "a100:")
        per_gpu = self.pick([], [], ["--cpus-per-gpu=2"])
        return [*nodes, *tasks, f"--gpus={kind}{self.pick(1, 2, 3, 5, 8, 10, 16)}", *per_gpu], free

    def per_task(self) -> tuple[list[str], set[str]]:
        tasks = self.rng.randint(1, 6)
        nodes, free = self.pick((["-N1"], set()), ([], {"cpu", "mem", "node"}), (["-N2"], {"cpu", "mem"}))
        words = [*nodes, f"-n{tasks}", f"--gpus-per-task={self.pick(1, 2, 4)}", *self.pick([], ["-c2"])]
        return words, {*free, "cpu", "mem"}

    def per_socket(self) -> tuple[list[str], set[str]]:
        words = ["-N1", "--sockets-per-node=2", "-n2", "--ntasks-per-socket=1", f"--gpus-per-socket={self.pick(1, 2)}"]
        return words, {"cpu", "mem"}

    def shards(self) -> tuple[list[str], set[str]]:
        nodes = self.pick(["-N1"], ["-N1"], ["-N1"], ["-N2"])
        amount = self.pick(1000, 5000, 20000, 40000, 60000, GPU_MIB, GPU_MIB + 1)
        return [*nodes, f"--gres=shard:{amount}", *self.pick([], ["-c2"])], set()

    def cpus(self) -> tuple[list[str], set[str]]:
        if self.rng.random() < 0.4:
            nodes, free = self.nodes()
            return [*nodes, f"-n{self.rng.randint(1, 8)}"], free | {"cpu", "mem"}
        return ["-N1", f"-n{self.rng.randint(1, 8)}", f"-c{self.pick(1, 2)}"], set()

    def mps(self) -> tuple[list[str], set[str]]:
        return ["-N1", f"--gres=mps:{self.pick(25, 50, 100)}"], set()

    def tasks_per_gpu(self) -> tuple[list[str], set[str]]:
        return [f"--gpus={self.pick(1, 2, 4)}", "--ntasks-per-gpu=2"], {"cpu", "mem", "node"}

    def absurd(self) -> tuple[list[str], set[str]]:
        """What cannot be had, or not be said."""
        return self.pick(
            ["--gres=gpu:9"], ["--gres=gpu:v100:1"], ["--gres=gpu:h100:2,gpu:a100:2", "-N1"], ["-N7", "--gpus=7"],
            ["-N1", "--gpus=9"], ["--gpus=1", "--gpus-per-node=2"], ["--gpus-per-task=1"], ["--gpus=0"],
            ["--gres=gpu:1,shard:1000"], ["--gres=nosuch:1"], ["-n200"], ["--gpus=2", "-N3"], ["--gpus=1", "-c17"],
            ["--mem=70G", "--gpus=1"], ["--gpus-per-node=4", "--gpus=6", "-N2"], ["--gres=gpu:a100:8", "-N2"],
        ), {"cpu", "mem", "node", "gpu"}  # fmt: skip

    def memory(self, shape: list[str]) -> list[str]:
        """Host memory."""
        if any(word.startswith("--mem") for word in shape):
            return []
        choices = [[], [], ["--mem=1G"], ["--mem=20G"], ["--mem-per-cpu=700"]]
        if any("gpu" in word for word in shape):
            choices.append(["--mem-per-gpu=3G"])
        return self.rng.choice(choices)

    def options(self) -> tuple[list[str], set[str]]:
        """A shape with other preferences."""
        shape, free = self.shape()
        words = [*shape, *self.memory(shape), f"--time={self.pick(1, 2, 5, 10)}"]
        extras: list[tuple[Callable[[], list[str]], float]] = [
            (self.constraint, 0.12), (lambda: [f"--nodelist={self.pick('n1', 'n2', 'n5')}"], 0.05),
            (lambda: [f"--exclude={self.pick('n1', 'n[1-2]', 'n6', 'n[4-5]')}"], 0.08),
            (lambda: ["--contiguous"], 0.04), (lambda: [self.pick("--switches=1", "--switches=1@00:00:05")], 0.05),
            (lambda: ["--exclusive"], 0.06), (lambda: ["--licenses=solver:1"], 0.05),
            (lambda: [self.pick("--qos=low", "--qos=low", "--qos=high")], 0.3), (lambda: ["--begin=now+2"], 0.04),
            (lambda: ["--time-min=1"], 0.08), (lambda: ["--reservation=mine"], 0.05),
            (lambda: ["--gres-flags=" + self.pick("enforce-binding", "disable-binding")], 0.05),
            (lambda: [f"--nice={self.pick(5, 100)}"], 0.05), (lambda: ["--spread-job"], 0.03),
            (lambda: ["--use-min-nodes"], 0.03), (lambda: ["-pshare", *self.pick([], ["--oversubscribe"])], 0.06),
            (lambda: ["--overcommit"], 0.03), (lambda: [f"-m{self.pick('cyclic', 'block:cyclic', 'plane=2')}"], 0.04),
            (lambda: ["--deadline=now+30minutes"], 0.04), (lambda: ["--mincpus=4"], 0.03), (self.dependency, 0.08),
        ]  # fmt: skip
        for extra, chance in extras:
            if self.rng.random() < chance:
                words += extra()
        if any(
            word in ("--exclusive", "--overcommit", "--spread-job", "--use-min-nodes", "-pshare")
            or word.startswith(("-mplane", "--gres-flags", "--mincpus"))
            for word in words
        ):
            free = free | {"cpu", "mem"} | ({"gpu"} if "--exclusive" in words else set())
        if any(word in ("--spread-job", "--use-min-nodes") for word in words) and "-N1" not in words:
            free = free | {"node"}
        if "--exclusive" in words and free:
            free = free | {"gpu"}
        return words, free

    def constraint(self) -> list[str]:
        """Features, counted and exclusive ones among them."""
        plain = ["fast", "slow", "slow&rack2", "fast|rack3", "rack9", "slow&(rack1|rack3)"]
        return [f"--constraint={self.pick(*plain, '[rack1|rack2]', '[rack1*1&rack2*1]')}"]

    def dependency(self) -> list[str]:
        """On jobs before it."""
        if not self.jobs:
            return []
        kind = self.pick("afterok", "afterany", "afternotok", "after", "singleton")
        return (
            ["--dependency=singleton"]
            if kind == "singleton"
            else [f"--dependency={kind}:{{{self.rng.choice(self.jobs[-8:])}}}"]
        )


def shell_lines(step: Step, ids: dict[str, str]) -> str:
    """The step as shell code that prints its name, exit status and output as one line."""
    words = [word.format_map(_Ids(ids)) for word in step.words]
    command = f"{step.command} {shlex.join(words)}"
    return f"out=$({command} 2>&1 </dev/null); rc=$?; echo \"@@{step.name} $rc $(echo \"$out\" | tr '\\n' '|')\""


class _Ids(dict[str, str]):
    """A job that there is not has an id that no job has."""

    def __missing__(self, name: str) -> str:
        return "999999"
