"""Chaos on a cluster of real daemons: load, SIGKILLs of the leading controller, and what became of every job."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from dev_cluster.chaos.faults import Faults
from dev_cluster.chaos.judge import Outcome, evaluate
from dev_cluster.cluster import DevCluster
from dev_cluster.description import parse_description
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError
from sluice.base.run import CommandError

CONTROLLERS = ("ctl1", "ctl2")
LEASE_S = 2.5
TIMEOUT_S = 6
SITE_CONF = f"SlurmctldTimeout={TIMEOUT_S}\nSchedulerParameters=nohold_on_prolog_fail\n"
"""slurm.conf, as docs/failover.md has it."""
_STILL_S = 8.0
_REQUEUED_S = 150.0  # what a node could not launch waits for two minutes, as all that is requeued


def sluice_description(plugins: Path | None, *, journal: bool = True) -> dict[str, Any]:
    """The cluster's key `sluice` for a supervised cluster, with the journal or without."""
    wanted: dict[str, Any] = {"level": "admit", "journal": journal, "supervise": True, "lease": LEASE_S}
    if plugins is not None:
        wanted["plugins"] = str(plugins)
    return wanted


class Chaos:
    """A cluster, its load, and what kills its controllers. A context: the cluster goes with it."""

    def __init__(
        self,
        sluice: dict[str, Any] | None,
        *,
        nodes: int = 8,
        accounting: bool = True,
        slurm_conf: str = "",
        root: Path | None = None,
        power: bool | None = None,
        agent: bool = False,
        more: dict[str, Any] | None = None,
    ) -> None:
        """`power`: with the faults of `Faults`, and, when true, power cuts. `agent`: nodes report jobs' ends.
        `more`: keys of the cluster's description in place of these."""
        self.place = Path(tempfile.mkdtemp(prefix="sluice-failover-"))
        self.cluster = DevCluster(self.place / "cluster")
        self.work = self.cluster.folder / "chaos"
        self.driver: subprocess.Popen[bytes] | None = None
        self.faults = None if power is None else Faults(self.place, power=power)
        names = f"n[1-{nodes}]"
        description: dict[str, Any] = {
            "nodes": [{"names": names, "platform": "none"}],
            "users": [{"name": "alice"}],
            "accounting": accounting,
            "gres": {"node_lines": f"NodeName={names} CPUs=64 RealMemory=64000 State=UNKNOWN\n", "gres_conf": ""},
            # PrologEpilogTimeout: a new leader waits so long before it asks nodes (docs/failover.md).
            "slurm_conf": "MessageTimeout=10\nMinJobAge=600\nDefMemPerCPU=10\nMaxJobCount=20000\n"
            "SelectTypeParameters=CR_CPU_Memory\nPrologEpilogTimeout=10\n" + slurm_conf,
        }
        if sluice is not None:
            environment = {} if self.faults is None else self.faults.environment
            description["sluice"] = {**sluice, "environment": environment}
        if agent:
            description["agent"] = "ends"
        description |= more or {}
        try:
            self.cluster.up(parse_description(json.dumps(description), source="failover"), attached=True, root=root)
            if power and self.faults is not None:
                self.faults.all_is_durable(self.cluster)
        except BaseException:
            self.cluster.down()
            shutil.rmtree(self.place, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.driver is not None:
            self.driver.kill()
            self.driver.wait()
        self.cluster.down()
        shutil.rmtree(self.place, ignore_errors=True)

    # ---- load ----

    def start_load(self, rate: float, seed: int, shapes: Sequence[str] = ("",)) -> None:
        """Begin to submit; each job has the sbatch options of one of the shapes."""
        shutil.rmtree(self.work, ignore_errors=True)
        (self.work / "runs").mkdir(parents=True)
        for path in (self.work, self.work / "runs"):
            path.chmod(0o777)
        shutil.copy(Path(__file__).with_name("driver.py"), self.work / "driver.py")
        inside = INSIDE / self.work.name
        argv = ["/usr/bin/python3", "-I", f"{inside}/driver.py", str(inside), f"{rate:g}", str(seed), *shapes]
        self.driver = subprocess.Popen(self.cluster.command(argv, user="alice"))

    def stop_load(self, *, settle_s: float = 90) -> Outcome:
        """End it, wait until nothing waits or runs, or nothing has changed for `settle_s`, and judge.

        Where jobs wait that were requeued, for longer: until those can have started.
        """
        (self.work / "stop").touch()
        if self.driver is not None:
            self.driver.wait(timeout=200)
            self.driver = None
        before, since, limit = "", time.monotonic(), settle_s
        while time.monotonic() - since < limit:  # a long queue takes its time
            with suppress(CommandError):
                left = self.cluster.run(["squeue", "-h", "-t", "PD,R,CG,CF", "-o", "%i %t %r"]).stdout
                if left != before:
                    before, since = left, time.monotonic()
                rows = [line.split() for line in left.splitlines()]
                requeued = any(row[1:] == ["PD", "BeginTime"] for row in rows)
                limit = max(settle_s, _REQUEUED_S) if requeued else settle_s
                still = all(row[1] == "PD" for row in rows)  # held for good, or stuck
                if not left or (still and not requeued and time.monotonic() - since > _STILL_S):
                    break
            time.sleep(0.5)
        return evaluate(self.log(), self.runs(), self.states())

    def log(self) -> list[dict[str, Any]]:
        """What Slurm answered the driver so far."""
        text = (self.work / "log").read_text() if (self.work / "log").exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def runs(self) -> dict[str, list[list[str]]]:
        """What the jobs said."""
        found = {}
        for path in (self.work / "runs").iterdir():
            lines = [line.split() for line in path.read_text().splitlines()]
            found[path.name] = [line for line in lines if len(line) == 5]
        return found

    def states(self) -> dict[int, str]:
        """What slurmctld knows."""
        shown = self.cluster.run(["squeue", "-h", "-a", "-t", "all", "-o", "%A %T"], timeout=120).stdout
        return {int(line.split()[0]): line.split()[1] for line in shown.splitlines() if line}

    def accepted_since(self, up: float) -> float | None:
        """When the first submission after a moment was acknowledged, of those that were made after it."""
        log = self.log()
        fresh = {entry["tag"] for entry in log if entry["what"] == "asked" and entry["up"] >= up}
        times = [entry["up"] for entry in log if entry["what"] == "accepted" and entry["tag"] in fresh]
        return min(times, default=None)

    # ---- controllers ----

    def slurmctld(self, host: str) -> int | None:
        """The pid of a host's slurmctld, under its supervisor or not, in the cluster's own numbers."""
        daemon = next(one for one in self.cluster.daemons() if one.name == f"slurmctld@{host}")
        if daemon.status is not None:
            return None
        children = self.cluster.run(["ps", "-o", "pid=,args=", "--ppid", str(daemon.pid)], check=False).stdout
        for line in children.splitlines():
            pid, _, words = line.strip().partition(" ")
            if re.match(r"\S*slurmctld\b(?!:)", words):
                return int(pid)
        return daemon.pid

    def send(self, pid: int, number: int) -> None:
        """To a process of the cluster."""
        self.cluster.run(["kill", f"-{number}", str(pid)])

    def leader(self) -> str | None:
        """Who answers as the one in charge."""
        for host in CONTROLLERS:
            if self.slurmctld(host) is None:
                continue
            shown = self.cluster.run(["scontrol", "show", "config"], check=False, timeout=40).stdout
            found = re.search(r"^Slurmctld\((\w+)\) at (\w+) is UP", shown, re.MULTILINE)
            return found[2] if found else None
        return None

    def kill(self, host: str, number: int = signal.SIGKILL) -> float:
        """SIGKILL a host's slurmctld, or stop it so that its supervisor does; when (the jobs' clock)."""
        pid = self.slurmctld(host)
        if pid is None:
            raise SluiceError(f"{host}: no slurmctld there")
        self.send(pid, number)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)  # what was answered before it is no service after it
        self.wait(lambda: self.ended(host), 20)
        return now

    def power_cut(self) -> float:
        """Both controllers go at once, and with them all that was not synced; when (the jobs' clock)."""
        assert self.faults is not None
        pids = [
            str(one.pid) for one in self.cluster.daemons() if one.name.startswith("slurmctld@") and one.status is None
        ]
        pids += [str(pid) for host in CONTROLLERS if (pid := self.slurmctld(host)) is not None]
        self.cluster.run(["kill", "-9", *dict.fromkeys(pids)], check=False)  # some die with their supervisor
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.wait(lambda: all(self.ended(host) for host in CONTROLLERS), 20)
        self.wait(
            lambda: self.cluster.run(["pgrep", "-f", "^/usr/sbin/slurmctld|sluice-supervise"], check=False).returncode
            != 0,
            20,
        )
        self.faults.lose_unsynced(self.cluster.layout.state)
        self.faults.all_is_durable(self.cluster)
        return now

    def ended(self, host: str) -> bool:
        """Whether a controller's daemon is gone."""
        return next(one for one in self.cluster.daemons() if one.name == f"slurmctld@{host}").status is not None

    def start(self, host: str) -> None:
        """Start a controller that has ended."""
        self.cluster.start_daemon(f"slurmctld@{host}")

    def in_charge(self, host: str) -> bool:
        """Whether a controller's heartbeat is the current one."""
        with suppress(OSError):
            beat = (self.cluster.layout.state / "heartbeat").read_bytes()
            return len(beat) == 16 and int.from_bytes(beat[8:], "big") == CONTROLLERS.index(host)
        return False

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float) -> bool:
        """Until it holds; whether it did in time. Where it asks a controller, none may answer just now."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(CommandError):
                if condition():
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)

    def service_after(self, moment: float, limit_s: float = 60) -> float | None:
        """Seconds from `moment` to the first acknowledged submission that was made after it."""
        self.wait(lambda: self.accepted_since(moment) is not None, limit_s)
        found = self.accepted_since(moment)
        return None if found is None else found - moment

    def submit_ms(self) -> float:
        """Median of the load's submissions that were answered at once."""
        took = [entry["took"] for entry in self.log() if entry["what"] == "accepted"]
        return median(took) * 1000 if took else 0.0


@dataclass
class Kills:
    """What a series of kills brought."""

    outcome: Outcome
    takeovers: list[float]
    restarts: list[float]
    submit_ms: float
    no_service: int


def kill_series(
    chaos: Chaos,
    kinds: Sequence[str],
    rate: float,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> Kills:
    """End the leader under load, once in each of these ways:

    `takeover`: SIGKILL; the backup takes over, and the primary comes back to lead. `stop`: the same by SIGSTOP, which
    its supervisor answers. `restart`: SIGKILL, and the primary is started again at once, as by systemd. `power`: both
    controllers lose their power, and are started again.
    """
    draw = random.Random(seed)
    kills = Kills(Outcome(), [], [], 0.0, 0)
    chaos.start_load(rate, seed)
    chaos.wait(lambda: len(chaos.log()) > 3 * rate, 60)
    for number, kind in enumerate(kinds):
        time.sleep(draw.uniform(0.5, 7))
        if kind == "power":
            moment = chaos.power_cut()
            for host in CONTROLLERS:
                chaos.start(host)
        else:
            moment = chaos.kill("ctl1", signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "restart":
            chaos.start("ctl1")
        took = chaos.service_after(moment)
        say(f"{number + 1} of {len(kinds)}: {kind}, service after {-1 if took is None else took:.1f} s")
        if took is None:
            kills.no_service += 1
        else:
            (kills.takeovers if kind in ("takeover", "stop") else kills.restarts).append(took)
        if kind in ("takeover", "stop"):
            time.sleep(draw.uniform(0.5, 4))
            chaos.start("ctl1")
        moment = time.clock_gettime(time.CLOCK_BOOTTIME)
        chaos.wait(lambda: chaos.in_charge("ctl1"), 60)
        chaos.service_after(moment)
    time.sleep(3)
    kills.submit_ms = chaos.submit_ms()
    kills.outcome = chaos.stop_load()
    return kills


def usual_kinds(runs: int) -> list[str]:
    """Two takeovers for each restart."""
    return ["restart" if number % 3 == 2 else "takeover" for number in range(runs)]
