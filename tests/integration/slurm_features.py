"""A cluster that uses Slurm's features at once, for tests that Sluice's plugins leave them as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from dev_cluster.cluster import DevCluster
from policy.compiled import CompiledPolicy, Global, Tenant, Weights
from tests.integration.jobs import shown, state, submit
from tests.integration.settled import until

POLICY = CompiledPolicy(
    settings=Global(weight=Weights(fair_share=1000, age=100), age_full_s=3600),
    tenants=[Tenant(account="physics"), Tenant(account="biology")],
).render()
GPUS = range(8)
GRES_CONF = "\n".join(
    [
        f"NodeName=n[1-6] Name=gpu Type=h100 File=/dev/nvidia{gpu} Cores={gpu // 4 * 8}-{gpu // 4 * 8 + 7}"
        for gpu in GPUS
    ]
    + ["NodeName=n[1-5] Name=shard Count=640000"]
    + ["NodeName=n6 Name=mps Count=800"]
)
LINE = "Sockets=2 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=64000"
NODE_LINES = f"""NodeName=n[1-2] {LINE} Gres=gpu:h100:8,shard:640000 Feature=fast,rack1
NodeName=n[3-5] {LINE} Gres=gpu:h100:8,shard:640000 Feature=slow,rack2
NodeName=n6 {LINE} Gres=gpu:h100:8,mps:800 Feature=slow,rack2
"""
TOPOLOGY = """SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=leaf3 Nodes=n[5-6]
SwitchName=top Switches=leaf[1-3]
"""
SLURM_CONF = """TopologyPlugin=topology/tree
GresTypes=gpu,shard,mps
PreemptType=preempt/qos
PreemptMode=REQUEUE
Licenses=solver:2
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=100000
SuspendTimeout=5
ResumeTimeout=600
SchedulerParameters=bf_interval=2,sched_interval=2
"""


def description(sluice: dict[str, Any] | None) -> dict[str, Any]:
    """Six nodes of eight GPUs with topology, features, licences, shards, MPS and preemption by QOS."""
    return {
        "nodes": [{"names": "n[1-6]", "platform": "dgx-h100"}],
        "accounts": [{"name": "physics"}, {"name": "biology"}],
        "users": [{"name": "alice", "accounts": ["physics"]}, {"name": "bob", "accounts": ["biology"]}],
        "partitions": [{"name": "main", "options": "DefaultTime=10 OverSubscribe=NO"}],
        "gres": {"gres_conf": GRES_CONF, "node_lines": NODE_LINES},
        "slurm_conf": SLURM_CONF,
        "topology_conf": TOPOLOGY,
        **({"sluice": sluice} if sluice else {}),
    }


def set_up(cluster: DevCluster) -> None:
    """Two QOS of which one preempts the other."""
    for words in (
        ["add", "qos", "low", "Priority=1"],
        ["add", "qos", "high", "Priority=100", "Preempt=low", "PreemptMode=requeue"],
        ["modify", "user", "where", "name=alice,bob", "set", "qos=normal,low,high"],
    ):
        cluster.run(["sacctmgr", "-i", *words])
    cluster.wait_idle()


def status_in_force(cluster: DevCluster) -> dict[str, Any]:
    """What the plugins in the leading slurmctld say of themselves."""
    text = cluster.run(["cat", "/run/sluice-cluster/state/sluice.status.ctl1"]).stdout
    found: dict[str, Any] = json.loads(text)
    return found


def gpu_indices(gres: str) -> set[int]:
    """The GPU indices in the words of `scontrol show job -d`: ``gpu:h100:2(IDX:0-1)``, ``shard:40000(3/80000)``,
    ``mps:50(IDX:0)``."""
    indices: set[int] = set()
    for first, last in re.findall(r"(?:IDX:|,)(\d+)(?:-(\d+))?(?=[,)])", gres):
        indices |= set(range(int(first), int(last or first) + 1))
    for words in re.findall(r"(?:shard|mps):[^(]*\(([^)]*)\)", gres):
        if "IDX" not in words:
            indices |= {position for position, share in enumerate(words.split(",")) if not share.startswith("0/")}
    return indices


class Jobs:
    """Submits jobs and looks up what became of them."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster

    def submit(self, *options: str, user: str = "alice", wrap: str = "exec sleep 600") -> str:
        """The id of a new job."""
        return submit(self.cluster, "--mem=1G", *options, wrap=wrap, user=user)

    def shown(self, job: str) -> dict[str, str]:
        """What `scontrol show job` has of it."""
        return shown(self.cluster, job)

    def state(self, job: str) -> str:
        """Its state, in Slurm's words."""
        return state(self.cluster, job)

    def gres(self, job: str) -> str:
        """What it holds of GRES on its first node, with indices."""
        return self.shown(job).get("GRES", "")

    def wait(self, job: str, state: str | Sequence[str], *, timeout: float = 90) -> dict[str, str]:
        """Wait until it is in the state, or in one of them."""
        wanted = [state] if isinstance(state, str) else state
        return dict(until(lambda: self.shown(job), lambda seen: seen["JobState"] in wanted, timeout))

    def cancel_all(self) -> None:
        """No job is left, and every node is idle."""
        self.cluster.run(["scancel", "-f", "--signal=KILL", "--user=alice"])
        self.cluster.run(["scancel", "--user=alice"])
        self.cluster.run(["scancel", "--user=bob"])
        until(lambda: self.cluster.run(["squeue", "-h", "-o", "%i %T"]).stdout, lambda left: left == "")
