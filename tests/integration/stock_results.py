"""What jobs that use Slurm's features get, found the same way on any cluster, so that two clusters can be compared.

Nothing depends on how fast a machine is: all jobs of a group are looked at together, as their partition opens at once,
and one scheduler alone starts them. Behind a job that waits that is sched/backfill, else the main scheduler, as
backfill is switched off by then. A job that comes last tells that all others have been looked at.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dev_cluster.cluster import DevCluster
from sluice.base.files import write_atomic
from tests.integration import slurm_features
from tests.integration.settled import PATIENCE, until

Results = dict[str, str]
"""Of each job, by `FEATURE.NUMBER`, task of an array and component: state, order and what it holds."""

# GPUs and parts of them, several nodes, whole nodes, named and excluded ones. Times differ by more than a second or
# two, so that what backfill holds back is the same in every run.
REQUESTS = [
    "--gres=gpu:1",
    "--gres=gpu:3",
    "--gres=shard:10240",
    "--gres=gpu:8",
    "-N2 --gres=gpu:2",
    "--gres=shard:40960",
    "-n4 --gpus-per-task=1",
    "--gpus=2 -c4",
    "-N1 --exclusive --gres=gpu:1",
    "--gres=gpu:1 -w n3",
    "--gres=gpu:2 --mem=20G",
    "-N2 -n2 -c2",
    "--gres=gpu:1 -x n1",
    "--gres=gpu:6",
    "--gres=gpu:8",
    "--gres=gpu:1",
]
FEATURES = {
    "topology": ["-N2 --gres=gpu:3 --switches=1"],
    "gpus-per-task": ["-n4 -N2 --ntasks-per-node=2 --gpus-per-task=2", "-n3 --gpus-per-task=1"],
    "exclusive": ["-N1 --exclusive --gres=gpu:1", "-N1 --gres=gpu:1"],
    "features": [f"--gres=gpu:1 -C {words}" for words in ("fast", "slow&rack2", "fast|slow")]
    + ["-N2 --gres=gpu:2 -C [rack1|rack2]"],
    "licences": ["--gres=gpu:1 -L solver:1"] * 3,
    "arrays": ["--array=0-5%3 --gres=gpu:1"],
    "power-saving": ["-p sleepy -w n8 --gres=gpu:1", "-p sleepy --gres=gpu:1"],
    "mps": ["--gres=mps:50", "--gres=mps:50", "--gres=mps:60"],  # of one GPU of a node at a time: the last may wait
}
_RESERVATIONS = (
    "ReservationName=mine StartTime=now Duration=60 Nodes=n[1-2] Users=bob",
    "ReservationName=soon StartTime=now+15minutes Duration=30 Nodes=n[3-4] Users=bob",
)
_WAKES_A_NODE = "power-saving.0"
_ALL_NODES = "n[1-8]"
_AWAKE = [f"n{number}" for number in range(1, 8)]
_BACKFILL_ON, _BACKFILL_OFF = "bf_interval=1", "bf_interval=-1"


def description(sluice: dict[str, Any] | None) -> dict[str, Any]:
    """The cluster of `slurm_features` without accounting, and two nodes more: n8 sleeps, n7 has what marks the end.

    Larger jobs go first: the order is another one than that of submission.
    """
    given = slurm_features.description(sluice)
    gres_conf = given["gres"]["gres_conf"].replace("n[1-6]", _ALL_NODES).replace("n[1-5]", "n[1-5,7-8]")
    node_lines = f"{given['gres']['node_lines']}NodeName=n[7-8] {slurm_features.LINE} Gres=gpu:h100:8,shard:640000\n"
    topology = slurm_features.TOPOLOGY.replace("leaf[1-3]", "leaf[1-4]").replace(
        "SwitchName=top", "SwitchName=leaf4 Nodes=n[7-8]\nSwitchName=top"
    )
    slurm_conf = [line for line in slurm_features.SLURM_CONF.splitlines() if not line.startswith(("Preempt", "Sched"))]
    return {
        **given,
        "nodes": [{"names": _ALL_NODES, "platform": "dgx-h100"}],
        "controllers": 1,
        "accounting": False,
        "accounts": [],
        "users": [{"name": "alice"}, {"name": "bob"}],
        "partitions": [
            {"name": "main", "nodes": "n[1-6]", "options": "PriorityTier=5 DefaultTime=10"},
            {"name": "urgent", "nodes": "n[1-6]", "options": "PriorityTier=10 DefaultTime=10"},
            {"name": "sleepy", "nodes": "n[7-8]", "options": "PriorityTier=5 DefaultTime=10"},
            {"name": "last", "nodes": "n7", "options": "PriorityTier=1 DefaultTime=10"},
        ],
        "gres": {"gres_conf": gres_conf, "node_lines": node_lines},
        "topology_conf": topology,
        "slurm_conf": "\n".join(
            [
                *slurm_conf,
                "PreemptType=preempt/partition_prio",
                "PreemptMode=REQUEUE",
                "PriorityWeightJobSize=100000",
                f"SchedulerParameters={_BACKFILL_ON},bf_max_time=60,sched_interval=1,batch_sched_delay=0,defer",
            ]
        )
        + "\n",
    }


def results(cluster: DevCluster, between: Callable[[], None]) -> Results:
    """All of it, with a call of `between` before each group of jobs; the cluster is as good as new then, but for n8."""
    asker = _Asker(cluster)
    asker.root("scontrol", "update", "NodeName=n8", "State=POWER_DOWN")
    found: Results = {}
    for group in (_backfilled, _requests, _features, _reserved, _preempted):
        between()
        found |= group(asker)
        asker.cancel()
        cluster.wait_idle(_AWAKE, timeout=PATIENCE)
    return found


class _Asker:
    """Submits jobs and reads what became of them."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster

    def root(self, *command: str) -> str:
        return self.cluster.run(list(command)).stdout

    def submit(self, feature: str, *asked: str, user: str = "alice", wrap: str = "exec sleep 1000") -> None:
        """Jobs, named after the feature with a number."""
        self.cluster.run(
            [
                "bash",
                "-ec",
                "\n".join(
                    shlex.join(
                        ["sbatch", "-Q", f"-J{feature}.{number}", "-o/dev/null", *options.split(), f"--wrap={wrap}"]
                    )
                    for number, options in enumerate(asked)
                ),
            ],
            user=user,
        )

    @contextmanager
    def closed(self) -> Iterator[None]:
        """The partition opens for all jobs of it at once."""
        self.root("scontrol", "update", "PartitionName=main", "State=DOWN")
        yield
        self.root("scontrol", "update", "PartitionName=main", "State=UP")

    def _let_main_look(self) -> None:
        """Once this partition's turn has come, the main scheduler has been through the others, which go before it."""
        self.submit("end", "-p last", wrap="true")
        self.await_states("end", "COMPLETED")

    def shown(self) -> Results:
        """All jobs that wait or have begun. Those that have are past their prolog, or their node wakes up."""

        def look() -> Results:
            lines = self.root("scontrol", "show", "job", "-d", "-o").splitlines()
            return dict(_read(line) for line in lines if not re.search(r"JobState=(CANCELLED|COMPLETED)", line))

        def settled(found: Results) -> bool:
            return [name for name, job in found.items() if "=CONFIGURING" in job] in ([], [_WAKES_A_NODE])

        self._let_main_look()  # which says why the others wait
        return dict(until(look, settled))

    def await_states(self, prefix: str, *wanted: str) -> None:
        """Until all jobs of such names are in one of these states."""

        def states() -> list[str]:
            lines = self.root("squeue", "-h", "-r", "-t", "all", "-o", "%j %T").splitlines()
            return [line.split()[1] for line in lines if line.startswith(prefix + ".")]

        until(states, lambda seen: seen and set(seen) <= set(wanted))

    def cancel(self) -> None:
        """No job is left in the queue."""
        self.root("scancel", "--user=alice")
        self.root("scancel", "--user=bob")
        until(lambda: self.root("squeue", "-h") == "")


def _read(line: str) -> tuple[str, str]:
    fields = dict(re.findall(r"(\S+?)=(\S*)", line))
    name = " ".join(fields[key] for key in ("JobName", "ArrayTaskId", "HetJobOffset") if key in fields)
    if fields["Reason"] in ("Resources", "Priority"):  # which of them is a matter of who looked last
        fields["Reason"] = "waits"
    kept = ("JobState", "Reason", "Priority", "Restarts", "Partition", "NodeList", "NumNodes", "NumCPUs", "TRES")
    words = [f"{key}={fields[key]}" for key in kept if key in fields]
    return name, " ".join(words + re.findall(r"\bNodes=\S+ CPU_IDs=\S+ Mem=\S+ GRES=\S*", line))


# ---- groups of jobs ----


def _backfilled(asker: _Asker) -> Results:
    """A job that needs all nodes waits: all that starts is started by backfill; so are heterogeneous jobs anyhow."""
    asker.submit("backfill-keeps", "-w n1 --gres=gpu:1 -t 100")
    asker.await_states("backfill-keeps", "RUNNING")
    with asker.closed():
        asker.submit("backfill-wide", "-N6 --gres=gpu:8 -t 100")
        asker.submit("backfill", *(f"{asked} -t {5 + 3 * (number * 7 % 16)}" for number, asked in enumerate(REQUESTS)))
        asker.submit("end", "--nice=1000000 -t 1", wrap="true")  # not larger than any, and so the last
    asker.await_states("end", "COMPLETED")
    asker.submit("heterogeneous", "--gres=gpu:h100:1 -N1 -t 3 : --gres=gpu:h100:1 -N1 -t 3 : -n1 -t 3")
    asker.await_states("heterogeneous", "RUNNING")
    return asker.shown()


def _requests(asker: _Asker) -> Results:
    """The same by the main scheduler, which backfill leaves alone from here on."""
    conf = asker.cluster.layout.slurm / "slurm.conf"
    write_atomic(conf, conf.read_text().replace(_BACKFILL_ON, _BACKFILL_OFF))
    asker.cluster.restart_slurmctld(timeout=PATIENCE)
    with asker.closed():
        asker.submit("requests", *REQUESTS)
    return asker.shown()


def _features(asker: _Asker) -> Results:
    until(
        lambda: asker.root("sinfo", "-h", "-n", "n8", "-o", "%T"), lambda state: "~" in state or "powered_down" in state
    )
    with asker.closed():
        for feature, asked in FEATURES.items():
            asker.submit(feature, *asked)
    return asker.shown()


def _reserved(asker: _Asker) -> Results:
    for reservation in _RESERVATIONS:
        asker.root("scontrol", "create", *reservation.split())
    with asker.closed():
        asker.submit("reservations-own", "--reservation=mine --gres=gpu:3", user="bob")
        asker.submit("reservations-short", "--gres=gpu:8 -t 5")
        asker.submit("reservations-long", *["--gres=gpu:8 -t 60"] * 3)
    found = asker.shown()
    asker.cancel()
    for name in ("mine", "soon"):
        asker.root("scontrol", "delete", f"ReservationName={name}")
    return found


def _preempted(asker: _Asker) -> Results:
    asker.submit("preemption", *["-N1 --gres=gpu:8 --requeue"] * 6)
    asker.await_states("preemption", "RUNNING")
    asker.submit("preemption-urgent", "-p urgent -N2 --gres=gpu:8")
    asker.await_states("preemption-urgent", "RUNNING")
    asker.await_states("preemption", "RUNNING", "PENDING")
    return asker.shown()
