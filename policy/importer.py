"""A policy file from an existing cluster: it describes what is there, so that `sluice plan` after it has no changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from policy import compiled
from policy.live import Live, gpus_of
from policy.names import check_name, check_tenant, check_user, check_word
from policy.state import AccountState
from sluice.base.errors import SluiceError

_WEIGHTS = {"fifo": "PriorityWeightAge", "fair_share": "PriorityWeightFairshare", "priority": "PriorityWeightQOS"}


def import_policy(live: Live) -> tuple[str, list[str]]:
    """The text of a policy file, and what could not be taken over.

    Limits are written under Sluice's names where it has one, and otherwise as they are under `slurm`.
    """
    notes: list[str] = []
    tenants: dict[str, Any] = {}
    refused: set[str] = set()
    for name, state in live.state.accounts.items():
        if state.parent in refused or not _keeps(check_tenant, name):
            refused.add(name)
            notes.append(f"account {name!r} is left out: Sluice does not keep its name, or its parent's")
            continue
        tenants[name] = _tenant(live, name, state, notes)
    document: dict[str, Any] = {"version": 1, "cluster": live.name}
    types = sorted({kind for node in live.nodes for kind in gpus_of(node)[0] if kind and _keeps(check_name, kind)})
    if types:
        document["classes"] = {kind: {"types": [kind]} for kind in types}
    document["scheduling"] = _scheduling(live)
    if "GrpSubmitJobs" in live.state.root_limits:
        document["scheduling"]["max_queued"] = int(live.state.root_limits["GrpSubmitJobs"])
    document["tenants"] = tenants
    for odd in live.odd_users:
        notes.append(
            f"user {odd.user} in {odd.account}, partition {odd.partition}: left as it is; Sluice has no such limit"
        )
    for name in live.state.reservations:
        notes.append(f"reservation {name}: Sluice's own, of an earlier policy, left out; applying this file ends it")
    head = f"# Written by `sluice import` from the cluster {live.name}.\n"
    return head + yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True), notes


def _keeps(check: Any, name: str) -> bool:
    try:
        check(name)
    except ValueError:
        return False
    return True


def _tenant(live: Live, name: str, state: AccountState, notes: list[str]) -> dict[str, Any]:
    tenant: dict[str, Any] = {}
    if state.description != name:
        tenant["description"] = _words(state.description, name, notes)
    tenant["organization"] = _words(state.organization, name, notes)
    if state.parent != "root":
        tenant["parent"] = state.parent
    above = live.state.accounts[state.parent].coordinators if state.parent in live.state.accounts else frozenset()
    if coordinators := sorted(state.coordinators - above):
        tenant["coordinators"] = coordinators
    tenant["shares"] = int(state.shares) if state.shares.isdecimal() else 1
    if not state.shares.isdecimal():
        notes.append(f"account {name}: its fair-share is {state.shares!r}, which becomes 1")
    rest = dict(state.limits)
    for option, field in (("GrpJobs", "max_jobs"), ("GrpSubmitJobs", "max_queued")):
        if option in rest:
            tenant[field] = int(rest.pop(option))
    if "MaxWall" in rest:
        tenant["max_time"] = f"{rest.pop('MaxWall')}m"
    limit = _amount(rest)
    if limit:
        tenant["limit"] = limit
    if rest:
        tenant["slurm"] = rest
    tenant["qos"] = {"use": list(state.qos)}
    if state.default_qos:
        tenant["qos"]["default"] = state.default_qos
    members: list[Any] = []
    for (account, user), user_state in live.state.users.items():
        if account != name:
            continue
        if not _keeps(check_user, user):
            notes.append(f"user {user!r} in {name} is left out: Sluice does not keep this name")
            continue
        member: dict[str, Any] = {"name": user}
        if user_state.shares.isdecimal() and user_state.shares != "1":
            member["shares"] = int(user_state.shares)
        limits = dict(user_state.limits)
        tres = _tres(limits.get("GrpTRES", ""))
        if set(tres) == {"gres/gpu"}:
            member["max_gpus"] = int(limits.pop("GrpTRES").partition("=")[2])
        if limits:
            member["slurm"] = limits
        members.append(member if len(member) > 1 else user)
    tenant["members"] = members
    return {key: value for key, value in tenant.items() if value not in (None, [], "")}


def _amount(rest: dict[str, str]) -> dict[str, Any]:
    """GPUs and GPU memory of GrpTRES as a limit; anything else stays in `rest`."""
    tres = _tres(rest.get("GrpTRES", ""))
    limit: dict[str, Any] = {}
    if "gres/gpu" in tres:
        limit["gpus"] = int(tres.pop("gres/gpu"))
    if "gres/shard" in tres:
        limit["gpu_memory"] = int(tres.pop("gres/shard"))
    if tres:
        rest["GrpTRES"] = ",".join(f"{key}={value}" for key, value in sorted(tres.items()))
    else:
        rest.pop("GrpTRES", None)
    return limit


def _tres(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in filter(None, text.split(",")))


def _words(text: str, name: str, notes: list[str]) -> str:
    if _keeps(check_word, text):
        return text
    notes.append(f"account {name}: its description or organization {text!r} is not kept by Slurm as it is written")
    return "".join(letter for letter in text if letter.isalnum() or letter in " -._")


def _scheduling(live: Live) -> dict[str, Any]:
    """Weights and times in force."""
    config: Mapping[str, str] = live.config
    order = {name: int(config[key]) for name, key in _WEIGHTS.items() if config.get(key, "").isdecimal()}
    try:
        ours = compiled.load(live.folder / compiled.FILE_NAME)[0].settings.weight.fair_share
    except SluiceError:
        ours = 0
    if ours:  # Slurm's own then weighs less than one step of it
        order["fair_share"] = ours
    found: dict[str, Any] = {"order": order}
    for field, key in (("aging", "PriorityMaxAge"), ("fair_share_half_life", "PriorityDecayHalfLife")):
        seconds = _seconds(config.get(key, ""))
        if seconds is not None and (seconds or field != "aging"):
            found[field] = f"{seconds}s"
    period = config.get("PriorityUsageResetPeriod", "").lower()
    if period in ("daily", "weekly", "monthly", "quarterly", "yearly"):
        found["usage_period"] = period
    return found


def _seconds(text: str) -> int | None:
    from sluice.slurm.text import parse_duration

    value = parse_duration(text)
    return value if value is not None and value >= 0 else None
