"""The whole of Sluice in a cluster: what `sluice cluster up` adds to a cluster file that does not set it."""

from __future__ import annotations

from typing import Any

import yaml

from dev_cluster.description import Account, ClusterDescription, User
from dev_cluster.layout import INSIDE

_ACCOUNTS = [
    Account(name="physics", description="Particle physics"),
    Account(name="biology", description="Structural biology"),
]
_USERS = [User(name="alice", accounts=["physics"]), User(name="bob", accounts=["biology"])]
_AGENT_CONF = (
    f"HealthCheckProgram={INSIDE}/programs/sluice-health\n",
    "HealthCheckInterval=300\n",
    "PrologEpilogTimeout=120\n",
)
_HEADER = "# The policy of this cluster. Change it, then: sluice plan; sluice apply. docs/policy.md has all keys.\n"


def with_sluice(description: ClusterDescription) -> ClusterDescription:
    """The description with all of Sluice switched on, except for what it sets itself; `sluice: false` adds nothing."""
    given = description.model_dump(exclude_unset=True)
    if given.get("sluice", True) is None:
        return description
    if description.accounting and not (description.accounts or description.users):
        description = description.model_copy(update={"accounts": _ACCOUNTS, "users": _USERS})
    plugins = {"supervise": True, "lease": 2.5, "journal": True, **(given.get("sluice") or {})}
    wanted: dict[str, Any] = {"agent": True, "controllerd": True, "explaind": True}
    if description.accounting and not plugins.get("policy"):
        wanted["policy"] = sample_policy(description)
    whole = wanted | description.model_dump(exclude_unset=True) | {"sluice": plugins}
    if whole["agent"] is True:
        missing = [line for line in _AGENT_CONF if line.partition("=")[0] not in description.slurm_conf]
        whole["slurm_conf"] = "".join(missing) + description.slurm_conf
    return ClusterDescription.model_validate(whole)


def sample_policy(description: ClusterDescription) -> str:
    """A policy that makes each account a tenant; those at the top have 4 GPUs guaranteed, and may borrow idle ones."""
    tenants = {account.name: _tenant(account, description) for account in description.accounts}
    policy = {"version": 1, "failover": {"journal": True}, "tenants": tenants}
    return _HEADER + yaml.safe_dump(policy, sort_keys=False, default_flow_style=None, width=120)


def _tenant(account: Account, description: ClusterDescription) -> dict[str, Any]:
    place = {"guarantee": {"gpus": 4}, "borrow": True} if account.parent == "root" else {"parent": account.parent}
    about = {"description": account.description} if account.description else {}
    members = [user.name for user in description.users if account.name in user.accounts]
    return {**about, **place, "members": members}
