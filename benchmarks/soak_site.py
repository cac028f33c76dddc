"""The cluster of a long run: all of Sluice on simulated nodes, its load, and what disturbs it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from dev_cluster.chaos.cluster import CONTROLLERS, LEASE_S, SITE_CONF, Chaos
from dev_cluster.chaos.judge import Outcome
from dev_cluster.control import init_pid
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError
from sluice.base.run import PYTHON

NODES = 4
SHAPES = ("", "", "--gres=gpu:1", "--gres=gpu:4", "--gpu-mem=10G", "--gres=gpu:2 -N2")
POLICY = """\
version: 1
classes: {{h100: {{types: [h100]}}}}
defaults: {{max_time: 1d}}
tenants:
  physics: {{members: [alice], guarantee: {{gpus: 8}}, borrow: true, shares: {shares}}}
  biology: {{members: [bob], limit: {{gpus: 16}}, max_queued: 500}}
failover: {{journal: true}}
"""
# What users ask for while their jobs run, about one of them.
QUESTIONS = (
    "squeue",
    "sinfo",
    "scontrol show nodes",
    "sacct -n -X -S now-1hour",
    "sluice explain --port {port} {job}",
    "sluice quota show physics",
    "sluice report jobs",
    "sluice top --once",
    "sluice whoami",
)
QUESTION_S = 5.0


class Soak(Chaos):
    """The cluster: two supervised controllers at level place, agents on all nodes, controllerd and explaind."""

    def __init__(self, *, plugins: Path | None = None, seed: int = 42) -> None:
        sluice = {"level": "place", "journal": True, "supervise": True, "lease": LEASE_S}
        if plugins is not None:
            sluice["plugins"] = str(plugins)
        super().__init__(
            sluice,
            slurm_conf=SITE_CONF,
            more={
                "nodes": [{"names": f"n[1-{NODES}]", "platform": "dgx-h100"}],
                "users": [{"name": "alice"}, {"name": "bob"}],
                "gres": None,
                "agent": True,
                "controllerd": True,
                "slurm_conf": SITE_CONF
                + "MessageTimeout=10\nMinJobAge=60\nDefMemPerCPU=10\nReturnToService=2\nSlurmdTimeout=20\n"
                + "PrologEpilogTimeout=45\n"  # a new leader asks nodes after it: stop_load waits for longer
                + "AccountingStorageTRES=gres/gpu,gres/shard\nAccountingStorageEnforce=associations,limits,qos,safe\n",
            },
        )
        self.draw = random.Random(seed)
        self.acts: Counter[str] = Counter()
        self._shares = cycle((10, 20))
        self._stopping = threading.Event()
        self.change_policy()
        # Controllers share this machine's addresses: one explain service, at a port that no other cluster has.
        explaind = [*PYTHON, "-m", "sluice.main", "explaind", "--port", self.explain_port]
        self.cluster.start_program("explaind@ctl1", explaind, node="ctl1")

    @property
    def explain_port(self) -> str:
        """The next one after the cluster's."""
        ports = self.cluster.facts["ports"]
        return str(ports["slurmctld"] + ports["count"])

    # ---- load ----

    def ask_questions(self) -> None:
        """Commands of users, one after the other, until `stop_questions`."""
        for question in cycle(QUESTIONS):
            if self._stopping.wait(QUESTION_S):
                return
            words = question.format(job=self._some_job(), port=self.explain_port).split()
            with suppress(SluiceError):  # a controller may be down just now
                done = self.cluster.run(words, user="alice", check=False, timeout=120)
                self.acts[f"{' '.join(words[:2])}: {'answered' if done.returncode == 0 else 'failed'}"] += 1

    def stop_questions(self) -> None:
        """End `ask_questions` after the command that runs."""
        self._stopping.set()

    def _some_job(self) -> int:
        with suppress(OSError, IndexError):
            accepted = [entry["id"] for entry in self.log()[-100:] if entry["what"] == "accepted"]
            return int(self.draw.choice(accepted))
        return 1

    def change_policy(self) -> None:
        """Apply a policy with other shares than the last one had."""
        file = self.cluster.layout.scratch / "sluice.yaml"
        file.write_text(POLICY.format(shares=next(self._shares)))
        inside = INSIDE / "scratch"
        words = ["sluice", "apply", "--yes", "--file", str(inside / file.name), "--state-dir", str(inside / "policy")]
        self.cluster.run(words, timeout=300)
        self.acts["policy changed"] += 1

    # ---- disturbances ----

    def round(self, number: int, *, seconds: float, rate: float) -> Outcome:
        """Load for so long, with one kind of disturbance in it; what became of the jobs.

        Where a node dies its jobs start again, also one whose end it had no time to report.
        """
        disturb = (self.take_over, self.lose_node)[number % 2]
        begun = time.monotonic()
        self.start_load(rate, number, SHAPES)
        for act, share in ((disturb, 0.2), (self.change_policy, 0.6)):
            time.sleep(max(0.0, begun + share * seconds - time.monotonic()))
            act()
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        outcome = self.stop_load()
        if disturb == self.lose_node:
            outcome.started_again = outcome.run_again = 0
        return outcome

    def take_over(self) -> None:
        """The leader is killed, the backup leads for a while, and the primary comes back."""
        moment = self.kill("ctl1")
        self._await("no service after the leader was killed", lambda: self.accepted_since(moment) is not None)
        time.sleep(self.draw.uniform(0.5, 10))
        self.start("ctl1")
        self._await("ctl1 does not lead again", lambda: self.in_charge("ctl1"))
        self.acts["takeover"] += 1

    def lose_node(self) -> None:
        """All processes of a node end at once; it boots again a moment later. Another node's agent dies, too."""
        lost, other = self.draw.sample(range(1, NODES + 1), 2)
        self.send_all(self.processes_of(f"n{lost}"), signal.SIGKILL)
        self.send_all(self._agents(f"n{other}"), signal.SIGKILL)
        for daemon in (f"agent@n{lost}", f"slurmd@n{lost}"):
            self._await(f"{daemon} has not ended", lambda daemon=daemon: self._has_ended(daemon))  # type: ignore[misc]
            self.cluster.start_daemon(daemon)
        self.acts["node died"] += 1
        self.acts["agent died"] += 1

    def processes_of(self, host: str) -> list[int]:
        """Of everything that runs on a host, as the cluster numbers them."""
        find = "for one in /proc/[0-9]*; do [ $one/ns/uts -ef /proc/self/ns/uts ] && echo ${one#/proc/}; done; true"
        return [int(line) for line in self.cluster.run(["bash", "-c", find], node=host).stdout.split()]

    def send_all(self, pids: list[int], number: int) -> None:
        """To processes of the cluster, as nearly at once as can be."""
        self.cluster.run(["kill", f"-{number}", *map(str, pids)], check=False)

    def _agents(self, host: str) -> list[int]:
        guard = next(one.pid for one in self.cluster.daemons() if one.name == f"agent@{host}")
        return [int(word) for word in self.cluster.run(["pgrep", "-P", str(guard)], check=False).stdout.split()]

    def ended_daemons(self) -> list[str]:
        """Those that should run, and do not."""
        return [one.name for one in self.cluster.daemons() if one.status is not None]

    def _has_ended(self, daemon: str) -> bool:
        return daemon in self.ended_daemons()

    def _await(self, otherwise: str, condition: Callable[[], bool]) -> None:
        if not self.wait(condition, 120):
            raise SluiceError(otherwise)

    # ---- what is read ----

    @property
    def init(self) -> int:
        """The cluster's process 1, as this machine numbers it. Raises SluiceError."""
        if (pid := init_pid(self.cluster.layout)) is None:
            raise SluiceError(f"{self.cluster.folder}: the cluster has ended")
        return pid

    def folders(self) -> dict[str, list[Path]]:
        """Where state is kept that could grow, by the name under which it is reported."""
        layout = self.cluster.layout
        folders = {"journal": "sluice.journal", "decisions": "sluice.records", "job records": "sluice.jobs"}
        found = {name: [layout.state / folder] for name, folder in folders.items()}
        found["policy history"] = [layout.scratch / "policy"]
        found["StateSaveLocation"] = [one for one in layout.state.iterdir() if one.name not in folders.values()]
        for host in CONTROLLERS:
            found[f"controllerd@{host} state"] = [layout.folder / "controllerd" / host]
        for node in self.cluster.nodes:
            found[f"slurmd@{node} spool"] = [layout.node(node) / "spool"]
            found[f"agent@{node} records"] = [
                layout.node(node) / name for name in ("records", "outbox", "running", "ended")
            ]
        return found
