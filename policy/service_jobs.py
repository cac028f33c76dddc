"""The services of a policy as they run: two files, rows for gateways, and the jobs of replicas.

`sluice apply` writes them next to sluice.policy: `sluice.services.json`, which has nothing that is secret, and
`sluice.callers.json`, root's and replicad's alone, as members and limits of tenants are not everybody's to know. All
here is a pure function of them, so that a launch does what the policy says and nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from policy.names import OVER_QOS
from policy.node import CompiledFile, parse_compiled
from policy.services import HEALTH, Service, ServiceLimits, Serving, TenantServing
from sluice.base.errors import SluiceError, UsageError
from sluice.exchange.batches import JOB_PREFIX as BATCH_PREFIX
from sluice.exchange.batches import LEAVE_S, BatchPlace
from sluice.exchange.requests import FOLDER
from sluice.exchange.serving import (
    JOB_PREFIX,
    PORT,
    AccountRow,
    DataPath,
    EngineName,
    Limit,
    LimitRow,
    Priority,
    ReplicaSpec,
    ServiceRow,
    WithoutAuthority,
)

if TYPE_CHECKING:
    from policy.model import Policy, Tenant

FILE_NAME = "sluice.services.json"
"""Its name next to slurm.conf."""
CALLERS_FILE = "sluice.callers.json"
"""Who may call, and how much."""
_PRIVATE = {"limits", "accounts"}
_MOST_BYTES = 16 << 20
_LAUNCH = re.compile(r"[0-9a-f]{16}")
_LIMITS = tuple(ServiceLimits.model_fields)


class _Compiled(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ServicePolicy(_Compiled):
    """A service with plain values: seconds, MiB, Slurm's words for GPUs."""

    name: str
    tenant: str
    user: str
    engine: EngineName
    model: str = ""
    sha256: str | None = None
    stage: str | None = None
    broadcast: int = 1024
    options: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    gres: str = ""
    """Of a replica's node, as sbatch has it."""
    constraint: str = ""
    gpus: int = 0
    """Whole ones of a replica, on all its nodes."""
    cpus: int | None = None
    memory: int | None = None
    nodes: int = 1
    partition: str = ""
    guaranteed: int | None = None
    """So many of its replicas are the tenant's own work, and all others over-quota work; None: all are its own."""
    callers: tuple[str, ...] = ()
    least: int = 0
    most: int = 1
    slots: int = 16
    idle_s: float = 900
    walltime_s: int = 86_400
    priority: Priority = "normal"
    first_token_s: float = 600
    answer_s: float = 3600
    default_tokens: int = 1024
    ready_s: float = 900
    drain_s: float = 600
    health: str = "/health"
    queue_delay_s: float = 2.0
    tokens_in_flight: int | None = None
    ahead: bool = False
    log_prompts: bool = False
    logs: str | None = None
    paused: bool = False


class LimitPolicy(_Compiled):
    """A limit with all that it inherits."""

    kind: Literal["key", "user", "tenant", "service"]
    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    queued: int | None = None
    weight: int = 1
    tokens: int | None = None
    """Budget of a tenant in each usage period."""


class BatchPolicy(_Compiled):
    """Files and batches of gateways, with plain values: MiB and seconds."""

    gateways: tuple[str, ...]
    ca: str | None = None
    api: str
    api_ca: str | None = None
    folder: str
    quota: int
    keep: int
    nice: int
    program: str


class ServicesPolicy(_Compiled):
    """The whole file."""

    schema_version: Literal[1] = 1
    services: dict[str, ServicePolicy] = {}
    limits: tuple[LimitPolicy, ...] = ()
    accounts: dict[str, tuple[str, ...]] = {}
    """The tenants of each user, in the order of the policy."""
    registries: tuple[str, ...] = ()
    """HOST:PORT of each replicad; none: the controllers of slurm.conf."""
    requests: str = str(FOLDER)
    address: str = ""
    """Where users reach the gateways."""
    usage_period: str = "none"
    without_authority: WithoutAuthority = "share"
    data_path: DataPath = "auto"
    batches: BatchPolicy | None = None

    def render(self) -> str:
        """The text of the file that everybody may read."""
        return self._rendered(self.model_dump(mode="json", exclude=_PRIVATE, exclude_defaults=True))

    def render_callers(self) -> str:
        """The text of the other one."""
        return self._rendered(self.model_dump(mode="json", include=_PRIVATE, exclude_defaults=True))

    def _rendered(self, document: dict[str, Any]) -> str:
        """What is usual is left out: people read this in plans."""
        return json.dumps({"schema_version": self.schema_version, **document}, indent=1, ensure_ascii=False) + "\n"


def compile_services(policy: Policy) -> ServicesPolicy:
    """What replicad and launches need of a policy."""
    accounts: dict[str, tuple[str, ...]] = {}
    for name, tenant in policy.tenants.items():
        for user in tenant.users:
            accounts[user] = (*accounts.get(user, ()), name)
    serving = policy.serving
    return ServicesPolicy(
        services={name: _service(policy, name, one) for name, one in policy.services.items()},
        limits=tuple(_limits(serving, policy.services)),
        accounts=accounts if policy.services else {},
        registries=tuple(serving.registries),
        requests=serving.requests,
        address=serving.address,
        without_authority=serving.without_authority,
        data_path=serving.data_path,
        usage_period=policy.scheduling.usage_period,
        batches=None if serving.batches is None else BatchPolicy.model_validate(serving.batches.model_dump()),
    )


def _service(policy: Policy, name: str, one: Service) -> ServicePolicy:
    gpu_class = policy.classes[one.gpu_class] if one.gpu_class is not None else None
    kind = gpu_class.types[0] if gpu_class is not None and len(gpu_class.types) == 1 else ""
    gres = f"shard:{one.gpu_memory}" if one.gpu_memory else ""
    if one.gpus:
        gres = f"gpu:{kind}:{one.gpus}" if kind else f"gpu:{one.gpus}"
    by_feature = gpu_class is not None and (not kind or one.gpus is None)
    return ServicePolicy(
        name=name,
        gres=gres,
        constraint=(gpu_class.feature or gpu_class.types[0]) if gpu_class is not None and by_feature else "",
        gpus=(one.gpus or 0) * one.nodes,
        partition=one.partition or "",
        guaranteed=_guaranteed(policy.tenants[one.tenant], one),
        callers=one.whose,
        health=one.health or HEALTH[one.engine],
        least=one.replicas.least,
        most=one.replicas.most,
        slots=one.replicas.slots,
        idle_s=one.idle,
        walltime_s=one.walltime,
        first_token_s=one.first_token_deadline,
        answer_s=one.answer_within,
        ready_s=one.ready_within,
        drain_s=one.drain_within,
        queue_delay_s=one.target.queue_delay,
        tokens_in_flight=one.target.tokens_in_flight or None,
        options=tuple(one.options),
        command=tuple(one.command),
        **{field: getattr(one, field) for field in _SAME},
    )


def _guaranteed(tenant: Tenant, one: Service) -> int | None:
    """A tenant that borrows and has no guarantee has over-quota work alone."""
    if not one.borrow:
        return None
    return one.replicas.least if tenant.guarantee is not None else 0


_SAME = ("tenant", "user", "engine", "model", "sha256", "stage", "broadcast", "cpus", "memory", "nodes", "priority",
         "default_tokens", "ahead", "log_prompts", "logs", "paused")  # fmt: skip


def _limits(serving: Serving, services: Mapping[str, Service]) -> Iterable[LimitPolicy]:
    """One line for each that is named, and "*" for all others of its kind; what a line leaves out, "*" has."""
    groups: tuple[tuple[Literal["key", "user", "tenant"], ServiceLimits, Mapping[str, ServiceLimits]], ...] = (
        ("key", serving.each_key, serving.keys),
        ("user", serving.each_user, serving.users),
        ("tenant", serving.each_tenant, serving.tenants),
    )
    for kind, each, named in groups:
        usual = each.model_dump(include=set(_LIMITS))
        yield LimitPolicy(kind=kind, name="*", **usual)
        for name, one in named.items():
            own = one.model_dump(include={*_LIMITS, *TenantServing.model_fields}, exclude_none=True)
            yield LimitPolicy(kind=kind, name=name, **{**usual, **own})
    for name, service in services.items():
        yield LimitPolicy(kind="service", name=name, **service.limits.model_dump())


def parse(text: str | bytes, *, source: str) -> ServicesPolicy:
    """A file's content. Raises SluiceError that names `source` and the place."""
    return parse_compiled(text, ServicesPolicy, source=source, most=_MOST_BYTES)


class ServicesFile:
    """The services in force, for all threads: read again when a file changes, the last good one kept.

    Where the second file cannot be read, nobody has a tenant, so that nobody may call.
    """

    def __init__(self, path: Path) -> None:
        self._services = CompiledFile(path, parse, ServicesPolicy(), most=_MOST_BYTES)
        self._callers = CompiledFile(path.with_name(CALLERS_FILE), parse, ServicesPolicy(), most=_MOST_BYTES)
        self._made: tuple[ServicesPolicy, ServicesPolicy, ServicesPolicy] | None = None

    @property
    def problem(self) -> SluiceError | None:
        """Why what is on disk is not what is in force."""
        return self._services.problem or self._callers.problem

    @property
    def loaded(self) -> bool:
        """Whether there was a file."""
        return self._services.loaded

    def current(self) -> ServicesPolicy:
        """The policy; none of it where there never was a file that could be read. Raises nothing."""
        services, callers = self._services.current(), self._callers.current()
        made = self._made
        if made is None or made[0] is not services or made[1] is not callers:
            whole = services.model_copy(update={name: getattr(callers, name) for name in _PRIVATE})
            made = self._made = services, callers, whole
        return made[2]


# ---- rows for gateways ----


def service_rows(policy: ServicesPolicy) -> list[ServiceRow]:
    """Of all services, as far as the policy knows them: not why there is no replica, nor when there will be one."""
    return [
        ServiceRow(
            name=one.name,
            tenant=one.tenant,
            callers=one.callers,
            engine=one.engine,
            priority=one.priority,
            deadline_s=one.first_token_s,
            answer_s=one.answer_s,
            default_tokens=one.default_tokens,
            least=one.least,
            most=one.most,
            slots=one.slots,
            paused=one.paused,
            log_prompts=one.log_prompts,
        )
        for one in policy.services.values()
    ]


def limit_rows(policy: ServicesPolicy, spent: Mapping[str, int] | None = None) -> list[LimitRow]:
    """All limits. `spent`: tokens of tenants in this usage period, for those that have a budget."""
    used = spent or {}
    return [
        LimitRow(
            one.kind,
            one.name,
            Limit(**{name: getattr(one, name) for name in _LIMITS}),
            one.weight,
            None if one.tokens is None else max(0, one.tokens - used.get(one.name, 0)),
        )
        for one in policy.limits
    ]


def account_rows(policy: ServicesPolicy) -> list[AccountRow]:
    """Users and their tenants."""
    return [AccountRow(user, tenants) for user, tenants in policy.accounts.items()]


def has_budgets(policy: ServicesPolicy) -> bool:
    """Whether `limit_rows` needs to know what tenants spent."""
    return any(one.tokens is not None for one in policy.limits)


# ---- jobs ----


@dataclass(frozen=True, slots=True)
class ReplicaJob:
    """A replica, as sbatch gets it."""

    user: str
    name: str
    arguments: tuple[str, ...]
    """Options of sbatch, each in one word with its value. How its environment, folder and answer are is the
    launcher's."""
    script: str
    """Its standard input."""
    spec: ReplicaSpec


def job_name(service: str, launch: str) -> str:
    """The name of a replica's job."""
    return f"{JOB_PREFIX}{service}.{launch}"


def parse_job_name(name: str) -> tuple[str, str] | None:
    """Service and launch of a job, or None where its name is no replica's."""
    service, _, launch = name.removeprefix(JOB_PREFIX).rpartition(".")
    return (service, launch) if name.startswith(JOB_PREFIX) and service and _LAUNCH.fullmatch(launch) else None


def find_service(policy: ServicesPolicy, name: str) -> ServicePolicy:
    """A service. Raises UsageError."""
    if name not in policy.services:
        known = ", ".join(list(policy.services)[:10]) or "none"
        raise UsageError(f"service {name[:80]!r}: not in the policy that is applied", remedy=f"known: {known}")
    return policy.services[name]


def replica_spec(
    policy: ServicesPolicy, service: str, launch: str, *, registry_uid: int, registries: Sequence[str] = ()
) -> ReplicaSpec:
    """What a replica gets to know. `registries`: where the policy names none. Raises UsageError."""
    one = find_service(policy, service)
    if not _LAUNCH.fullmatch(launch):
        raise UsageError(f"launch {launch[:40]!r}: not 16 hexadecimal digits", remedy="let replicad choose it")
    where = policy.registries or tuple(registries)
    if not where:
        raise UsageError("no replicad is known", remedy="set serving.registries in the policy file, and apply it")
    return ReplicaSpec(
        service=one.name,
        launch=launch,
        engine=one.engine,
        model=one.model,
        sha256=one.sha256,
        stage=one.stage,
        options=one.options,
        command=one.command,
        slots=one.slots,
        registries=where,
        registry_uid=registry_uid,
        ready_s=one.ready_s,
        drain_s=one.drain_s,
        health=one.health,
        broadcast=one.broadcast,
        nodes=one.nodes,
        data_path=policy.data_path,
    )


def batch_job(policy: ServicesPolicy, service: str, place: BatchPlace) -> dict[str, Any]:
    """The job of a batch, as the REST API's `POST /jobs` has it; who pays is the caller's to add.

    Raises UsageError for a service that is not in the policy, or has replicas of several nodes.
    """
    one, batches = find_service(policy, service), policy.batches
    if batches is None:
        raise UsageError("serving.batches: not in the policy that is applied", remedy="add it, and apply it")
    if one.nodes > 1:
        raise UsageError(f"service {service!r}: on {one.nodes} nodes", remedy="send its requests one by one")
    spec = ReplicaSpec(
        one.name, "0" * 16, one.engine, one.model, None, None, one.options, one.command, one.slots, (), 0,
        one.ready_s, 0.0, one.health, 0, 1,
    )  # fmt: skip
    orders = {"version": 1, "batch": asdict(place), "spec": asdict(spec), "seconds": one.walltime_s}
    text = json.dumps(orders, ensure_ascii=True, separators=(",", ":"))
    fields = {
        "name": f"{BATCH_PREFIX}{service}",
        "partition": one.partition,
        "nodes": "1",
        "ntasks": 1,
        "cpus_per_task": one.cpus,
        "memory": f"{one.memory}M" if one.memory else None,
        "gres": one.gres,
        "constraint": one.constraint,
        "time_limit": str(-(-one.walltime_s // 60)),
        "nice": batches.nice,
        "requeue": True,
        "signal": f"B:TERM@{min(LEAVE_S, one.walltime_s // 4)}",
        "work_dir": "/",
        "output": "/dev/null",
        "script": f"#!/bin/sh\nexec {batches.program} <<'SLUICE_BATCH'\n{text}\nSLUICE_BATCH\n",
    }
    return {name: value for name, value in fields.items() if value not in ("", None)}


def registries_of(hosts: Iterable[str], port: int = PORT) -> tuple[str, ...]:
    """HOST:PORT of replicad on controllers."""
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


def replica_job(
    policy: ServicesPolicy,
    service: str,
    launch: str,
    *,
    registry_uid: int,
    program: Path,
    registries: Sequence[str] = (),
    lent: bool = False,
) -> ReplicaJob:
    """The job of a replica: who runs it, sbatch's options, and its script. `program`: sluice-replica on the nodes;
    `lent`: as over-quota work, where the service borrows.

    Raises UsageError for a service that is not in the policy, or is paused, and for what is no launch.
    """
    one = find_service(policy, service)
    if one.paused:
        raise UsageError(f"service {service!r}: paused", remedy=f"sluice serve resume {service}")
    spec = replica_spec(policy, service, launch, registry_uid=registry_uid, registries=registries)
    options: dict[str, str] = {
        "job-name": job_name(service, launch),
        "account": one.tenant,
        "qos": OVER_QOS if lent and one.guaranteed is not None else "",
        "partition": one.partition,
        "nodes": str(one.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(one.cpus or ""),
        "mem": f"{one.memory}M" if one.memory else "",
        "gres": one.gres,
        "constraint": one.constraint,
        "time": str(-(-one.walltime_s // 60)),
        "signal": f"B:TERM@{int(one.drain_s)}",
        "output": f"{one.logs.rstrip('/')}/{job_name(service, launch)}.%j.log" if one.logs else "/dev/null",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value]
    text = json.dumps(asdict(spec), ensure_ascii=True, separators=(",", ":"))
    script = f"#!/bin/sh\nexec {shlex.quote(str(program))} <<'SLUICE_REPLICA'\n{text}\nSLUICE_REPLICA\n"
    return ReplicaJob(one.user, options["job-name"], (*words, "--no-requeue"), script, spec)
