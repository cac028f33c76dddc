"""Services as they are now: the policy, the jobs of replicas, and what replicad says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Protocol

from policy.service_jobs import ServicePolicy, ServicesPolicy, parse_job_name
from sluice.exchange.recent_use import ServiceUse
from sluice.exchange.serve_status import ReplicaStatus, ServiceStatus, Status
from sluice.slurm.job import ENDED

_WAITS = frozenset({"PENDING", "CONFIGURING", "REQUEUED"})
COUNTED = ("queued", "starting", "ready", "draining", "failed")
"""States of replicas that are counted; without replicad, a job that runs is `running`."""


class ReplicasJob(Protocol):
    """What is needed of a job."""

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """By which it is a replica's."""

    @property
    def user(self) -> str:
        """Whose it is."""

    @property
    def account(self) -> str:
        """Its tenant."""

    @property
    def state(self) -> str:
        """As Slurm has it."""

    @property
    def nodes(self) -> str:
        """Hostlist."""

    @property
    def reason(self) -> str:
        """Why it waits."""

    @property
    def start_time(self) -> int | None:
        """When it began."""


def service_documents(
    policy: ServicesPolicy,
    jobs: Iterable[ReplicasJob],
    status: Status | None,
    use: Mapping[str, ServiceUse] | None = None,
) -> list[dict[str, Any]]:
    """All services with their replicas, for JSON. `status` None: replicad does not say; `use` None: records do not."""
    of_service: dict[str, list[dict[str, Any]]] = {name: [] for name in policy.services}
    for name, replica in _replicas(policy, jobs, status):
        of_service[name].append(replica)
    return [
        _document(
            one,
            of_service[name],
            None if status is None else status.services.get(name, ServiceStatus()),
            None if use is None else use.get(name),
        )
        for name, one in policy.services.items()
    ]


def _replicas(
    policy: ServicesPolicy, jobs: Iterable[ReplicasJob], status: Status | None
) -> Iterable[tuple[str, dict[str, Any]]]:
    """By their jobs; one whose job slurmctld does not know any more, as replicad has it."""
    known = {} if status is None else dict(status.replicas)
    for job in jobs:
        named = parse_job_name(job.name)
        service = policy.services.get(named[0]) if named is not None else None
        if named is None or service is None or (job.user, job.account) != (service.user, service.tenant):
            continue  # anybody may give a job such a name
        said = known.pop(named[1], None)
        if said is None and job.state in ENDED:
            continue
        yield service.name, _replica(named[1], job, said)
    for launch, said in known.items():
        if said.service in policy.services:
            yield said.service, _replica(launch, None, said)


def _replica(launch: str, job: ReplicasJob | None, said: ReplicaStatus | None) -> dict[str, Any]:
    state = str(said.state) if said is not None else "queued" if job is not None and job.state in _WAITS else "running"
    waits = job is not None and job.state in _WAITS
    return {
        "launch": launch,
        "job": job.id if job is not None else said.job if said is not None else 0,
        "state": state,
        "job_state": None if job is None else job.state,
        "nodes": "" if job is None else job.nodes,
        "start_time": None if job is None or waits else job.start_time,
        "why": _why(job, said),
        **{name: None if said is None else getattr(said, name) for name in _SAID},
    }


def _why(job: ReplicasJob | None, said: ReplicaStatus | None) -> str:
    if said is not None and said.why:
        return said.why
    if said is not None and said.slow:
        return f"slow: takes at least {said.slow} times as long as most others; gateways leave it out for a while"
    return job.reason if job is not None and job.state in _WAITS else ""


_SAID = ("slots", "running", "waiting", "prompt_tokens", "completion_tokens", "cache_used", "heard", "ends", "slow")


def _document(
    one: ServicePolicy, replicas: list[dict[str, Any]], now: ServiceStatus | None, use: ServiceUse | None
) -> dict[str, Any]:
    counts = {name: sum(replica["state"] == name for replica in replicas) for name in (*COUNTED, "running")}
    return {
        "name": one.name,
        "tenant": one.tenant,
        "user": one.user,
        "engine": one.engine,
        "model": one.model,
        "callers": list(one.callers),
        "priority": one.priority,
        "state": state_of(one, counts, failed=now is not None and bool(now.why)),
        "paused": one.paused,
        "least": one.least,
        "most": one.most,
        "slots": one.slots,
        "gres": one.gres,
        "partition": one.partition,
        "walltime_s": one.walltime_s,
        "first_token_deadline_s": one.first_token_s,
        "log_prompts": one.log_prompts,
        **{name: counts[name] for name in COUNTED},
        **{name: None if now is None else getattr(now, name) for name in FIGURES},
        **{name: None if use is None else getattr(use, name) for name in USE},
        "why": "" if now is None else now.why,
        "replicas": sorted(replicas, key=lambda replica: (replica["job"], replica["launch"])),
    }


FIGURES = ("waiting", "oldest_s", "in_flight", "tokens_in_flight", "delay_s", "wanted", "eta_s")
"""What only replicad knows."""
USE = tuple(one.name for one in fields(ServiceUse))
"""What only the records of requests say."""


def state_of(one: ServicePolicy, counts: Mapping[str, int], *, failed: bool = False) -> str:
    """One word for a service. `failed`: replicad says why there is no replica."""
    if one.paused:
        return "paused"
    for state, of in (("ready", "ready"), ("running", "running"), ("starting", "starting"), ("starting", "queued")):
        if counts[of]:
            return state
    if counts["failed"] or failed:
        return "failed"
    return "down" if one.least else "idle"
