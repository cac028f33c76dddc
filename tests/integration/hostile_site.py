"""A cluster with hostile tenants on it: how they attack, and how a neighbour fares meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from gpu_sim.fields import set_values
from policy.compiled import CompiledPolicy, Global
from sluice.base.run import CommandError
from tests.integration.platforms import SINGLE
from tests.integration.settled import PATIENCE, until

NODE, OTHER = "single-1", "single-2"
AGENT = f"agent@{NODE}"
PYTHON = "/usr/bin/python3"
PROGRAMS = INSIDE / "programs"
HOSTILE = Path(__file__).with_name("hostile_programs.py")
SCRATCH = INSIDE / "scratch"
"""Where all hosts see the cluster's scratch folder."""
TENANTS = ("mallory", "trudy", "eve", "oscar", "craig")
ENDED_S = 2.0
"""Within which what is over its limit is ended."""
PROLOG_S = 5.0
"""Within which a neighbour's prolog is answered while the machine does much else; see `benchmarks hostile`."""
RECORD_BYTES = 256 << 10
RUN_KIB = 8 << 10
"""More than before, once hostile jobs are gone."""

POLICY = CompiledPolicy(generated_s=0, source="test", settings=Global(placement="sluice", gpu_shares=True)).render()


def description(platform: Path, **more: Any) -> dict[str, Any]:
    """Two nodes of one GPU each, with all of Sluice; neighbours and hostile tenants."""
    platform.write_text(SINGLE)
    return {
        "nodes": [{"names": f"{NODE},{OTHER}", "platform": str(platform)}],
        "controllers": 1,
        "agent": True,
        "controllerd": True,
        "sluice": {"level": "place", "policy": POLICY},
        "accounts": [{"name": "physics"}, {"name": "chemistry"}],
        "users": [
            *({"name": name, "accounts": ["physics"]} for name in ("alice", "bob")),
            *({"name": name, "accounts": ["chemistry"]} for name in TENANTS),
        ],
        "slurm_conf": "SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2\n"
        "MaxArraySize=20001\nMaxJobCount=30000\n",
        **more,
    }


@dataclass
class Running:
    """A job that runs on the attacked node, and what it says."""

    program: subprocess.Popen[str]
    job: int
    pid: int
    said: list[str] = field(default_factory=list)


@dataclass
class Ended:
    """How an excess ended: seconds until the agent said so (None: it did not) and until the process was gone."""

    said: float | None
    gone: float
    record: dict[str, Any] | None


class HostileSite:
    """The cluster."""

    def __init__(self, cluster: DevCluster, *, other_system: bool = False) -> None:
        self.cluster = cluster
        self.other_system = other_system  # what is compiled here does not run there
        cluster.layout.scratch.chmod(0o777)
        shutil.copy(HOSTILE, cluster.layout.scratch)
        self._next_job = 900000

    # ---- jobs ----

    def program(self, attack: str, *words: str) -> list[str]:
        """The command line of an attack."""
        return [PYTHON, str(SCRATCH / HOSTILE.name), attack, *words]

    def srun(
        self, *command: str | Path, gres: str = "shard:2048", node: str = NODE, options: Sequence[str] = ()
    ) -> list[str]:
        asked = [f"--gres={gres}"] if gres else []
        return ["srun", "--quiet", "--mem=100", "-w", node, *asked, *options, *map(str, command)]

    @contextmanager
    def job(
        self, *command: str, user: str = "mallory", env: dict[str, str] | None = None, until: str = "up", **options: Any
    ) -> Iterator[Running]:
        """A job that prints ``up PID``; it is cancelled at the end."""
        words = self.srun("sh", "-c", 'echo job $SLURM_JOB_ID $$; exec "$@"', "x", *command, **options)
        line = self.cluster.command(words, user=user, cwd="/tmp", env=env)
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as program:
            assert program.stdout
            running, lines = Running(program, 0, 0), []
            try:
                for text in program.stdout:
                    lines.append(text)
                    match text.split():
                        case ["job", job, pid]:
                            running.job, running.pid = int(job), int(pid)
                        case [word, *more] if word == until:
                            running.pid = int(more[0]) if more else running.pid
                            break
                assert lines and lines[-1].split()[:1] == [until], f"{command}: {''.join(lines)[-2000:]}"
                running.said = lines
                yield running
            finally:
                if running.job:
                    self.run("scancel", "--signal=KILL", "--full", str(running.job), check=False)
                    self.run("scancel", str(running.job), check=False)
                try:
                    program.communicate(timeout=PATIENCE)
                except subprocess.TimeoutExpired:
                    program.kill()

    def attack(self, name: str, *words: str, env: dict[str, str] | None = None, **options: Any) -> Any:
        """The attack of that name, in a job."""
        given = [] if env is None else ["env", *(f"{key}={value}" for key, value in env.items())]
        return self.job(*given, *self.program(name, *words), **options)

    def run(self, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(list(words), check=check, **options)

    # ---- memory ----

    @property
    def sim(self) -> Path:
        return self.cluster.node_folder(NODE) / "gpu_sim"

    def lives(self, pid: int) -> bool:
        """Whether a process of the node is there; remains do not count."""
        state = self.run("sh", "-c", f"cat /proc/{pid}/task/*/stat 2>/dev/null", node=NODE, check=False).stdout
        return any(line.rpartition(")")[2].split()[:1] not in (["Z"], ["X"], []) for line in state.splitlines())

    def exceed(self, running: Running, size: str = "60G", pid: int | None = None) -> Ended:
        """The driver says that the job's process holds so much; what became of it."""
        of, began, clock = pid or running.pid, time.time(), time.monotonic()
        set_values(self.sim, 0, {"process": f"{of}:{size}"})
        try:
            while self.lives(of) and time.monotonic() - clock < 10 * ENDED_S:
                time.sleep(0.02)
            gone = time.monotonic() - clock
        finally:
            set_values(self.sim, 0, {"processes": "none"})
        if self.lives(of):
            return Ended(None, float("inf"), None)
        self.run("scancel", str(running.job), check=False)
        record = until(lambda: self.record(running.job))
        ends = [event["time"] - began for event in record["events"] if event["action"] == "end"]
        return Ended(min(ends, default=None), gone, record)

    def holds_to(self, running: Running, pid: int | None = None) -> dict[str, Any]:
        """Its excess is ended in time and its record says so and is small; the record."""
        ended = self.exceed(running, pid=pid)
        assert ended.record is not None, "it holds 60 GiB and lives"
        assert ended.said is not None, ended.record["events"][-3:]
        assert ended.said < ENDED_S and ended.gone < ENDED_S + 1, (ended.said, ended.gone)
        assert len(json.dumps(ended.record)) < RECORD_BYTES
        return ended.record

    def record(self, job: int, node: str = NODE) -> dict[str, Any] | None:
        path = self.cluster.node_folder(node) / f"records/{job}.json"
        try:
            assert path.stat().st_size < RECORD_BYTES, f"{path.name}: {path.stat().st_size} bytes"
            found: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return found

    def running_records(self) -> list[dict[str, Any]]:
        """What the agent has given to the jobs that run."""
        lines = self.run("sh", "-c", "cat /run/sluice/agent/jobs/*.json", node=NODE, check=False).stdout.splitlines()
        return [json.loads(line) for line in lines]

    # ---- a neighbour, and the node ----

    def programs_of_neighbour(self) -> dict[str, float]:
        """Seconds that prolog, task's helper and epilog of a job of alice's take, as slurmd starts them."""
        self._next_job += 1
        job, taken = str(self._next_job), {}
        environment = [
            f"SLURM_JOB_ID={job}",
            "SLURM_JOB_UID=2001",
            "SLURM_JOB_USER=alice",
            "SLURM_JOB_GPUS=0",
            f"SLUICE_JOB={job}",
            "SLUICE_UID=2001",
            "SLUICE_STEP=whole",
            "SLUICE_GPUS=0",
            "SLUICE_SHARDS=1024",
        ]
        for name in ("sluice-prolog", "sluice-task-init", "sluice-epilog"):
            words = ["env", "-i", *environment, str(PROGRAMS / name)]
            clock = time.monotonic()
            done = self.run(*words, node=NODE, check=False)
            taken[name] = time.monotonic() - clock
            assert done.returncode == 0, (name, taken, done.stdout, done.stderr)
        return taken

    def neighbour_is_served(self) -> None:
        """Its programs are answered in time, and what holds too much of its is ended in time."""
        taken = self.programs_of_neighbour()
        assert max(taken.values()) < PROLOG_S, taken
        with self.job(*self.program("quiet"), user="bob") as excess:
            self.holds_to(excess)

    def agent_pid(self, node: str = NODE) -> int:
        """The process that listens for the programs of slurmd."""
        look = (
            "import socket as s, struct as t; a = s.socket(s.AF_UNIX); a.settimeout(5); "
            "a.connect('/run/sluice/agent.sock'); "
            "print(t.unpack('3i', a.getsockopt(s.SOL_SOCKET, s.SO_PEERCRED, 12))[0])"
        )
        return int(self.run(PYTHON, "-c", look, node=node).stdout)

    def run_kib(self) -> int:
        """What is in /run/sluice, with what is mounted there."""
        return int(self.run("du", "-sk", "/run/sluice", node=NODE, check=False).stdout.split()[0])

    def broken_nodes(self) -> list[str]:
        bad = ("drain", "down", "fail", "inval", "unk", "error")
        return [
            f"{one.name} {one.state} {one.reason}"
            for one in self.cluster.node_states()
            if any(w in one.state for w in bad)
        ]

    def tracebacks(self, since: dict[str, int]) -> list[str]:
        """Daemons whose log names one."""
        found = []
        for path in self.cluster.layout.logs.glob("*.log"):
            with path.open("rb") as file:
                file.seek(since.get(path.name, 0))
                text = file.read()
            if b"Traceback (most" in text or b"Exception in thread" in text:
                found.append(f"{path.name}: {text[text.rfind(b'Traceback') :][-600:].decode(errors='replace')}")
        return found

    def log_sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.cluster.layout.logs.glob("*.log")}

    def clear(self) -> None:
        """No job of a hostile tenant's is left."""
        names = ",".join((*TENANTS, "bob"))

        def gone() -> bool:
            left = self.run("squeue", "-h", "-u", names, "-t", "PD,R,CG,CF,S,RH,SE,RQ", "-o", "%A").stdout.split()
            if left:
                self.run("scancel", "--quiet", *sorted(set(left))[:100], check=False)
            return not left

        until(gone, timeout=2 * PATIENCE)

    def heal(self) -> None:
        """As an admin would, so that one lost fight does not lose the next."""
        set_values(self.sim, 0, {"processes": "none"})
        for daemon in self.cluster.daemons():
            if daemon.status is not None and daemon.name.startswith(("agent@", "controllerd@")):
                self.cluster.start_daemon(daemon.name)
        for node in self.broken_nodes():
            self.run("scontrol", "update", f"nodename={node.split()[0]}", "state=resume", check=False)
        until(self._answers)

    def _answers(self) -> bool:
        with suppress(CommandError):
            return self.agent_pid() > 0
        return False
