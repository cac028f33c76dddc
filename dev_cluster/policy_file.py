"""The policy of a cluster: /etc/sluice/sluice.yaml, and what slurmctld must know of it before it is applied."""

from __future__ import annotations

import re
from pathlib import Path

from dev_cluster.configuration import CLUSTER_NAME
from dev_cluster.description import ClusterDescription
from policy.document import parse
from policy.pool_nodes import compile_pools, slurm_settings
from policy.pool_nodes import node_lines as pool_lines
from sluice.base.errors import UsageError
from sluice.base.hostlist import expand


def policy_text(policy: str) -> str:
    """The text of a policy that is given as text or by a file's path, checked; empty for none. Raises UsageError."""
    if not policy:
        return ""
    source = "policy" if "\n" in policy else f"policy {policy}"
    try:
        text = policy if "\n" in policy else Path(policy).read_text()
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}", remedy="name a policy file, or write its text") from error
    parse(text, source=source)
    return text


def first_pools(description: ClusterDescription, text: str) -> str:
    """pools.sluice.conf, which slurmctld must have from its start."""
    return pool_lines(parse(text, source="policy"), shards=description.shards)


def dynamic_nodes(description: ClusterDescription, text: str) -> dict[str, str]:
    """What `slurmd -Z --conf` gets of each node of a dynamic pool."""
    if not description.fleet:
        return {}
    pools = compile_pools(parse(text, source="policy"), CLUSTER_NAME, shards=description.shards).pools
    return {node: one.node_conf for one in pools.values() if one.node_conf for node in expand(one.nodes)}


def first_snippet(description: ClusterDescription, node_lines: str) -> str:
    """policy.sluice.conf until the policy is applied: what needs a restart of slurmctld is in force from its start."""
    types = sorted(set(re.findall(r"\bgpu:([a-z_][\w.-]*):\d", node_lines)))
    tres = ["gres/gpu", *(["gres/shard"] if description.shards else []), *(f"gres/gpu:{word}" for word in types)]
    configless = any(group.config == "configless" for group in description.nodes)
    parameters = {
        "AccountingStorageTRES": ",".join(tres),
        "AccountingStorageEnforce": "associations,limits,qos,safe",
        "PriorityType": "priority/multifactor",
        "PreemptType": "preempt/qos",
        "PreemptMode": "REQUEUE",
        "SchedulerParameters": "nohold_on_prolog_fail",
        "SlurmctldParameters": ",".join(["enable_configless"] * configless + ["preempt_send_user_signal"]),
        "SlurmctldTimeout": "10",
        "SlurmdTimeout": "60",
    }
    if description.fleet:
        policy = parse(policy_text(description.policy), source="policy")
        parameters |= {**slurm_settings(policy), "PrivateData": "cloud"}
    return "".join(f"{key}={value}\n" for key, value in parameters.items())
