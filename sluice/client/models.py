"""The documents of the API. What a command prints with --json has the same model as its endpoint.

Times are seconds since 1970, durations seconds, memory MiB; null: not known. New fields may come at any time; a field
is not removed or changed within a `schema_version`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from gres_probe.inventory import Inventory as NodeInventory


class Model(BaseModel):
    """What all have in common: fields that a newer server adds are passed over."""


class Document(Model):
    """A whole answer."""

    schema_version: int = 1


class Viewed(Document):
    """An answer from the snapshot."""

    stale_since: float | None = Field(None, description="Since when it could not be read again; null: it is fresh.")
    problem: str = Field("", description="Why it could not be read again.")


class Problem(Model):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = Field(description="What is wrong: the value and the place.")
    remedy: str = Field("", description="What to do about it.")
    request_id: str = ""


class Job(Model):
    """A job that slurmctld knows. Waiting tasks of an array are one."""

    id: int
    array_id: int | None
    array_tasks: str
    name: str
    user: str
    account: str
    qos: str
    partition: str
    state: str
    reason: str
    nodes: str = Field(description="A hostlist; empty while it waits.")
    node_count: int
    cpus: int
    gpus: int
    gpu_mem_mib: int
    memory_mib: int
    submit_time: int | None
    eligible_time: int | None
    start_time: int | None
    end_time: int | None
    time_limit_s: int | None = Field(description="-1: no limit.")
    priority: int
    features: str
    dependency: str
    reservation: str
    comment: str
    work_dir: str
    refused: str = Field(description="Why the node's agent refused it; empty: it did not.")


class JobList(Viewed):
    """Jobs, a page of them."""

    jobs: list[Job]
    total: int = Field(description="All that match and the caller may see.")
    next: str | None = Field(None, description="The cursor of the next page; null: this is the last.")


class JobGpu(Model):
    """A GPU that a job has."""

    node: str
    index: int
    utilisation_percent: float | None
    memory_used_mib: int | None
    memory_total_mib: int | None
    temperature_c: float | None


class JobPage(Viewed):
    """One job."""

    job: Job
    gpus: list[JobGpu] = Field(description="As its nodes report them; empty where they do not.")


class Explanation(Document):
    """Why a job has its priority and its nodes, or why it waits (docs/explain.md)."""

    job: str
    job_id: int | None = None
    uid: int | None = None
    account: str | None = None
    partition: str | None = None
    order: dict[str, Any] | None = None
    decision: dict[str, Any] | None = None
    start: dict[str, Any] | None = None
    waiting: dict[str, Any] | None = None
    slurm: dict[str, Any] | None = None
    private: list[str] | None = Field(None, description="The words of PrivateData that kept something back.")


class Node(Model):
    """A node."""

    name: str
    state: str
    flags: list[str]
    available: bool = Field(description="Whether new jobs can start there.")
    reason: str
    gpu_types: dict[str, int]
    gpus: int
    gpus_allocated: int
    gpu_mem_mib: int
    gpu_mem_allocated_mib: int
    cpus: int
    cpus_allocated: int
    memory_mib: int
    memory_allocated_mib: int
    features: list[str]
    partitions: list[str]
    slurm_version: str


class NodeList(Viewed):
    """Nodes."""

    nodes: list[Node]


class Gpu(Model):
    """A GPU."""

    node: str
    index: int
    type: str
    use: Literal["free", "shared", "whole"]
    available: bool
    health: Literal["ok", "out"]
    reason: str
    jobs: list[int] = Field(description="Of those that the caller may see.")
    utilisation_percent: float | None
    memory_used_mib: int | None
    memory_total_mib: int | None
    temperature_c: float | None


class GpuList(Viewed):
    """GPUs."""

    gpus: list[Gpu]


class QuotaRow(Model):
    """One thing that is limited, guaranteed or used."""

    what: str
    guaranteed: float | None
    limit: float | None
    used: float
    left: float | None


class Quota(Document):
    """What a tenant may use, and uses."""

    tenant: str
    quota: list[QuotaRow]


class MemberUse(Model):
    """What a member of a tenant uses."""

    user: str
    running: int
    submitted: int
    used: dict[str, int]
    used_minutes: dict[str, float]


class TenantInList(Model):
    """A tenant: an account of Slurm with its limits and use."""

    name: str
    parent: str
    members: list[str] = Field(description="Those that the caller may see.")
    shares: str
    qos: list[str]
    default_qos: str
    borrow: bool
    guarantee: dict[str, int]
    limits: dict[str, str]
    running: int
    submitted: int
    used: dict[str, int]
    used_minutes: dict[str, float]


class Tenant(TenantInList):
    """A tenant alone: `sluice tenant show`."""

    schema_version: int = 1


class TenantList(Viewed):
    """Tenants."""

    tenants: list[TenantInList]


class TenantUsage(Document):
    """What the members of a tenant use."""

    tenant: str
    members: list[MemberUse]


class Event(Model):
    """Something that happened on the controller."""

    seq: int
    time: float
    kind: str
    fields: dict[str, Any]


class EventList(Viewed):
    """Events, the oldest first."""

    events: list[Event]


class HealthRow(Model):
    """A fault, or what is out of service."""

    node: str
    gpu: str
    state: str
    severity: str
    check: str
    since: float | None
    reason: str
    uuid: str = ""


class HealthList(Viewed):
    """All faults and what is out of service."""

    mode: str
    breaker_since: float | None
    rows: list[HealthRow]
    left_out: int
    healthy: str = Field(description="Nodes without a fault, as a hostlist.")


class HealthEvent(Model, extra="allow"):
    """Something that health did or saw."""

    time: float
    kind: str


class HealthHistory(Document):
    """The last events of health."""

    events: list[HealthEvent]


class Alert(Model):
    """An alert."""

    rule: str
    state: Literal["firing", "waiting", "silenced"]
    subject: str
    since: float
    value: float
    text: str


class Silence(Model):
    """A rule that sends nothing for a while."""

    id: str
    rule: str
    subject: str
    until: float
    by: str
    comment: str


class AlertList(Viewed):
    """Alerts and silences."""

    alerts: list[Alert]
    undelivered: int
    silences: list[Silence]


class PolicyShown(Viewed):
    """The policy file as it is understood: sizes in MiB, times in seconds."""

    policy: dict[str, Any]


class Finding(Model):
    """A check of what a takeover needs."""

    kind: Literal["ok", "remark", "problem"]
    what: str
    remedy: str = ""


class Lease(Model):
    """Which controller may lead."""

    epoch: int
    held: bool
    host: str
    valid_s: float
    age_s: float


class FailoverStatus(Viewed):
    """The controllers."""

    hosts: list[str]
    leader: str | None
    up: dict[str, bool]
    lease: Lease | None
    journal: dict[str, int]
    findings: list[Finding]


class Inventory(Viewed):
    """The GPUs that nodes reported when they were probed."""

    nodes: list[NodeInventory]
    failures: dict[str, str]


class Report(Document):
    """Figures of a time (docs/report-fields.md has the fields of `rows`)."""

    report: str
    start: int
    end: int
    made: int
    jain_index: float | None = None
    rows: list[dict[str, Any]]


class Whoami(Document):
    """The caller."""

    user: str
    level: Literal["user", "operator", "administrator"]
    coordinates: list[str]
    accounts: list[str]


class Part(Model):
    """One part of the snapshot."""

    at: float | None = Field(description="When it was last read.")
    stale_since: float | None
    problem: str


class Overview(Document):
    """The cluster in one look, and how old each part of the snapshot is."""

    cluster: str
    slurm_version: str
    private_data: list[str]
    connected: bool = Field(description="Whether the controllers' daemon answers.")
    parts: dict[str, Part]
    jobs_by_state: dict[str, int] = Field(description="Of those that the caller may see.")
    gpus: int | None = Field(description="null: PrivateData keeps nodes from the caller.")
    gpus_in_use: int | None
    gpus_out: int | None
