"""A method for each endpoint; written by tools/client_reference.py."""

# ruff: noqa: A002, E501, N803

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import date
from typing import Literal

from sluice.client import models
from sluice.client.base import BaseAsyncClient, BaseClient
from sluice.client.transport import Call


class Client(BaseClient):
    """All calls. Each raises ApiError."""

    def overview(self) -> models.Overview:
        """The cluster in one look. `GET /overview`."""
        return self.call(Call(models.Overview, "GET", "/overview"))

    def whoami(self) -> models.Whoami:
        """The caller. `GET /whoami`."""
        return self.call(Call(models.Whoami, "GET", "/whoami"))

    def metrics(self) -> models.MetricNames:
        """Every metric that there is. `GET /metrics`."""
        return self.call(Call(models.MetricNames, "GET", "/metrics"))

    def past_events(self, *, after: int = 0) -> models.EventList:
        """What happened. `GET /events`."""
        return self.call(Call(models.EventList, "GET", "/events", query={"after": after}))

    def jobs_page(
        self,
        *,
        user: str = "",
        account: str = "",
        partition: str = "",
        state: str = "",
        qos: str = "",
        name: str = "",
        node: str = "",
        sort: Literal["id", "submit_time", "start_time", "end_time", "priority", "gpus"] = "id",
        order: Literal["ascending", "descending"] = "descending",
        limit: int = 100,
        cursor: str = "",
    ) -> models.JobList:
        """Jobs, one page. `GET /jobs`."""
        return self.call(
            Call(
                models.JobList,
                "GET",
                "/jobs",
                query={
                    "user": user,
                    "account": account,
                    "partition": partition,
                    "state": state,
                    "qos": qos,
                    "name": name,
                    "node": node,
                    "sort": sort,
                    "order": order,
                    "limit": limit,
                    "cursor": cursor,
                },
            )
        )

    def jobs(
        self,
        *,
        user: str = "",
        account: str = "",
        partition: str = "",
        state: str = "",
        qos: str = "",
        name: str = "",
        node: str = "",
        sort: Literal["id", "submit_time", "start_time", "end_time", "priority", "gpus"] = "id",
        order: Literal["ascending", "descending"] = "descending",
        limit: int = 100,
    ) -> Iterator[models.Job]:
        """Jobs, read page by page."""
        for page in self._pages(
            lambda cursor: self.jobs_page(
                user=user,
                account=account,
                partition=partition,
                state=state,
                qos=qos,
                name=name,
                node=node,
                sort=sort,
                order=order,
                limit=limit,
                cursor=cursor,
            )
        ):
            yield from page.jobs

    def job(self, job: int) -> models.JobPage:
        """One job. `GET /jobs/{job}`."""
        return self.call(Call(models.JobPage, "GET", "/jobs/{job}", names={"job": job}))

    def job_series(self, job: int) -> models.JobSeries:
        """The use of a running job's GPUs over time. `GET /jobs/{job}/series`."""
        return self.call(Call(models.JobSeries, "GET", "/jobs/{job}/series", names={"job": job}))

    def job_explanation(self, job: int) -> models.Explanation:
        """Why a job waits, or has its place. `GET /jobs/{job}/explanation`."""
        return self.call(Call(models.Explanation, "GET", "/jobs/{job}/explanation", names={"job": job}))

    def nodes(self, *, node: str = "") -> models.NodeList:
        """Nodes. `GET /nodes`."""
        return self.call(Call(models.NodeList, "GET", "/nodes", query={"node": node}))

    def gpus(self, *, node: str = "") -> models.GpuList:
        """GPUs. `GET /gpus`."""
        return self.call(Call(models.GpuList, "GET", "/gpus", query={"node": node}))

    def node_topology(self, node: str) -> models.Topology:
        """How the GPUs of a node are joined. `GET /nodes/{node}/topology`."""
        return self.call(Call(models.Topology, "GET", "/nodes/{node}/topology", names={"node": node}))

    def topology(self) -> models.NetworkTopology:
        """How nodes are joined. `GET /topology`."""
        return self.call(Call(models.NetworkTopology, "GET", "/topology"))

    def classes(self) -> models.ClassList:
        """GPUs that are alike. `GET /classes`."""
        return self.call(Call(models.ClassList, "GET", "/classes"))

    def inventory(self) -> models.Inventory:
        """What nodes were probed to have. `GET /inventory`."""
        return self.call(Call(models.Inventory, "GET", "/inventory"))

    def tenants(self) -> models.TenantList:
        """Tenants. `GET /tenants`."""
        return self.call(Call(models.TenantList, "GET", "/tenants"))

    def tenant(self, tenant: str) -> models.Tenant:
        """One tenant. `GET /tenants/{tenant}`."""
        return self.call(Call(models.Tenant, "GET", "/tenants/{tenant}", names={"tenant": tenant}))

    def tenant_quota(self, tenant: str) -> models.Quota:
        """What a tenant may use, and uses. `GET /tenants/{tenant}/quota`."""
        return self.call(Call(models.Quota, "GET", "/tenants/{tenant}/quota", names={"tenant": tenant}))

    def tenant_usage(self, tenant: str) -> models.TenantUsage:
        """What a tenant's members use. `GET /tenants/{tenant}/usage`."""
        return self.call(Call(models.TenantUsage, "GET", "/tenants/{tenant}/usage", names={"tenant": tenant}))

    def services(self) -> models.ServiceList:
        """Models that run as services. `GET /services`."""
        return self.call(Call(models.ServiceList, "GET", "/services"))

    def limits(self) -> models.CallerLimits:
        """What gateways of services let through of the caller. `GET /limits`."""
        return self.call(Call(models.CallerLimits, "GET", "/limits"))

    def service(self, service: str) -> models.Service:
        """One service and its replicas. `GET /services/{service}`."""
        return self.call(Call(models.Service, "GET", "/services/{service}", names={"service": service}))

    def service_series(self, service: str) -> models.ServiceSeries:
        """How a service was over the last day. `GET /services/{service}/series`."""
        return self.call(Call(models.ServiceSeries, "GET", "/services/{service}/series", names={"service": service}))

    def change_service(
        self,
        service: str,
        *,
        least: int | None = None,
        most: int | None = None,
        paused: bool | None = None,
        key: str = "",
    ) -> models.ServiceChanged:
        """Scale, pause or resume a service: in the policy file, and applied. `PATCH /services/{service}`."""
        return self.call(
            Call(
                models.ServiceChanged,
                "PATCH",
                "/services/{service}",
                names={"service": service},
                body={"least": least, "most": most, "paused": paused},
                key=key,
            )
        )

    def pools(self) -> models.PoolList:
        """Pools of nodes that come and go. `GET /pools`."""
        return self.call(Call(models.PoolList, "GET", "/pools"))

    def pool(self, pool: str) -> models.Pool:
        """One pool and its nodes. `GET /pools/{pool}`."""
        return self.call(Call(models.Pool, "GET", "/pools/{pool}", names={"pool": pool}))

    def pool_history(self, pool: str) -> models.PoolHistory:
        """What happened in a pool. `GET /pools/{pool}/history`."""
        return self.call(Call(models.PoolHistory, "GET", "/pools/{pool}/history", names={"pool": pool}))

    def node_pool(self, node: str) -> models.PoolNodeWhy:
        """Why a node of a pool is as it is. `GET /nodes/{node}/pool`."""
        return self.call(Call(models.PoolNodeWhy, "GET", "/nodes/{node}/pool", names={"node": node}))

    def nodes_report(self, *, since: date | None = None, until: date | None = None, limit: int = 1000) -> models.Report:
        """What was used of each node. `GET /reports/nodes`."""
        return self.call(
            Call(models.Report, "GET", "/reports/nodes", query={"since": since, "until": until, "limit": limit})
        )

    def nodes_report_csv(self, *, since: date | None = None, until: date | None = None, limit: int = 1000) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return self.call(
            Call(
                models.Text,
                "GET",
                "/reports/nodes",
                query={"since": since, "until": until, "limit": limit, "format": "csv"},
            )
        ).text

    def reports_gpus_each(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
    ) -> models.Report:
        """What was used of each GPU. `GET /reports/gpus/each`."""
        return self.call(
            Call(
                models.Report,
                "GET",
                "/reports/gpus/each",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "gpu_type": gpu_type,
                },
            )
        )

    def reports_gpus_each_csv(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return self.call(
            Call(
                models.Text,
                "GET",
                "/reports/gpus/each",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "gpu_type": gpu_type,
                    "format": "csv",
                },
            )
        ).text

    def reports_jobs(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
    ) -> models.JobsReport:
        """Single jobs, ended ones included. `GET /reports/jobs`."""
        return self.call(
            Call(
                models.JobsReport,
                "GET",
                "/reports/jobs",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                },
            )
        )

    def reports_jobs_csv(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return self.call(
            Call(
                models.Text,
                "GET",
                "/reports/jobs",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "format": "csv",
                },
            )
        ).text

    def reports_services(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        service: str = "",
        account: str = "",
        user: str = "",
        by: str = "",
    ) -> models.ServicesReport:
        """What requests to services used. `GET /reports/services`."""
        return self.call(
            Call(
                models.ServicesReport,
                "GET",
                "/reports/services",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "service": service,
                    "account": account,
                    "user": user,
                    "by": by,
                },
            )
        )

    def reports_services_csv(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        service: str = "",
        account: str = "",
        user: str = "",
        by: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return self.call(
            Call(
                models.Text,
                "GET",
                "/reports/services",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "service": service,
                    "account": account,
                    "user": user,
                    "by": by,
                    "format": "csv",
                },
            )
        ).text

    def report(
        self,
        report: str,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
        by: str = "",
    ) -> models.Report:
        """What was used, by whom, and how well. `GET /reports/{report}`."""
        return self.call(
            Call(
                models.Report,
                "GET",
                "/reports/{report}",
                names={"report": report},
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "gpu_type": gpu_type,
                    "by": by,
                },
            )
        )

    def report_csv(
        self,
        report: str,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
        by: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return self.call(
            Call(
                models.Text,
                "GET",
                "/reports/{report}",
                names={"report": report},
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "gpu_type": gpu_type,
                    "by": by,
                    "format": "csv",
                },
            )
        ).text

    def job_report(self, job: int) -> models.JobReport:
        """Everything that is known of one job. `GET /jobs/{job}/report`."""
        return self.call(Call(models.JobReport, "GET", "/jobs/{job}/report", names={"job": job}))

    def health(self) -> models.HealthList:
        """Faults, and what is out of service. `GET /health`."""
        return self.call(Call(models.HealthList, "GET", "/health"))

    def health_history(self, *, node: str = "") -> models.HealthHistory:
        """What health did. `GET /health/history`."""
        return self.call(Call(models.HealthHistory, "GET", "/health/history", query={"node": node}))

    def power(self) -> models.PowerShown:
        """Budgets of watts, and what is drawn. `GET /power`."""
        return self.call(Call(models.PowerShown, "GET", "/power"))

    def power_drawn(self) -> models.PowerDrawn:
        """What nodes and tenants draw. `GET /power/drawn`."""
        return self.call(Call(models.PowerDrawn, "GET", "/power/drawn"))

    def alerts(self) -> models.AlertList:
        """Alerts and silences. `GET /alerts`."""
        return self.call(Call(models.AlertList, "GET", "/alerts"))

    def policy(self) -> models.PolicyShown:
        """The policy file. `GET /policy`."""
        return self.call(Call(models.PolicyShown, "GET", "/policy"))

    def failover(self) -> models.FailoverStatus:
        """The controllers. `GET /failover`."""
        return self.call(Call(models.FailoverStatus, "GET", "/failover"))

    def failover_history(self) -> models.FailoverHistory:
        """What happened to them. `GET /failover/history`."""
        return self.call(Call(models.FailoverHistory, "GET", "/failover/history"))

    def shadow(self, *, hours: float | None = None) -> models.ShadowReport:
        """What Sluice would have decided. `GET /shadow`."""
        return self.call(Call(models.ShadowReport, "GET", "/shadow", query={"hours": hours}))

    def audit(
        self,
        *,
        user: str = "",
        action: str = "",
        request_id: str = "",
        after: int = 0,
        before: int = 0,
        limit: int = 100,
    ) -> models.AuditList:
        """What the caller did; to administrators, who did what. `GET /audit`."""
        return self.call(
            Call(
                models.AuditList,
                "GET",
                "/audit",
                query={
                    "user": user,
                    "action": action,
                    "request_id": request_id,
                    "after": after,
                    "before": before,
                    "limit": limit,
                },
            )
        )

    def policy_drift(self) -> models.PolicyDrift:
        """What was changed by hand since a policy was applied. `GET /policy/drift`."""
        return self.call(Call(models.PolicyDrift, "GET", "/policy/drift"))

    def submit(
        self,
        *,
        script: str,
        name: str | None = None,
        account: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
        time_limit: str | None = None,
        nodes: str | None = None,
        ntasks: int | None = None,
        ntasks_per_node: int | None = None,
        cpus_per_task: int | None = None,
        cpus_per_gpu: int | None = None,
        memory: str | None = None,
        memory_per_cpu: str | None = None,
        memory_per_gpu: str | None = None,
        gpus: str | None = None,
        gpus_per_node: str | None = None,
        gpus_per_task: str | None = None,
        gpu_mem: str | None = None,
        gpu_share: str | None = None,
        gpu_power: str | None = None,
        gpu_affinity: str | None = None,
        gpu_spread: bool = False,
        fabric: str | None = None,
        nics_per_gpu: int | None = None,
        nic_planes: str | None = None,
        segment: int | None = None,
        gang: str | None = None,
        gres: str | None = None,
        constraint: str | None = None,
        licenses: str | None = None,
        reservation: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        array: str | None = None,
        dependency: str | None = None,
        begin: str | None = None,
        deadline: str | None = None,
        nice: int | None = None,
        hold: bool = False,
        requeue: bool | None = None,
        exclusive: bool = False,
        comment: str | None = None,
        work_dir: str | None = None,
        output: str | None = None,
        error: str | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        signal: str | None = None,
        environment: dict[str, str] | None = None,
        key: str = "",
    ) -> models.Submitted:
        """Submit a job. `POST /jobs`."""
        return self.call(
            Call(
                models.Submitted,
                "POST",
                "/jobs",
                body={
                    "script": script,
                    "name": name,
                    "account": account,
                    "partition": partition,
                    "qos": qos,
                    "time_limit": time_limit,
                    "nodes": nodes,
                    "ntasks": ntasks,
                    "ntasks_per_node": ntasks_per_node,
                    "cpus_per_task": cpus_per_task,
                    "cpus_per_gpu": cpus_per_gpu,
                    "memory": memory,
                    "memory_per_cpu": memory_per_cpu,
                    "memory_per_gpu": memory_per_gpu,
                    "gpus": gpus,
                    "gpus_per_node": gpus_per_node,
                    "gpus_per_task": gpus_per_task,
                    "gpu_mem": gpu_mem,
                    "gpu_share": gpu_share,
                    "gpu_power": gpu_power,
                    "gpu_affinity": gpu_affinity,
                    "gpu_spread": gpu_spread,
                    "fabric": fabric,
                    "nics_per_gpu": nics_per_gpu,
                    "nic_planes": nic_planes,
                    "segment": segment,
                    "gang": gang,
                    "gres": gres,
                    "constraint": constraint,
                    "licenses": licenses,
                    "reservation": reservation,
                    "nodelist": nodelist,
                    "exclude": exclude,
                    "array": array,
                    "dependency": dependency,
                    "begin": begin,
                    "deadline": deadline,
                    "nice": nice,
                    "hold": hold,
                    "requeue": requeue,
                    "exclusive": exclusive,
                    "comment": comment,
                    "work_dir": work_dir,
                    "output": output,
                    "error": error,
                    "mail_type": mail_type,
                    "mail_user": mail_user,
                    "signal": signal,
                    "environment": environment,
                },
                key=key,
            )
        )

    def what_if(
        self,
        *,
        script: str,
        name: str | None = None,
        account: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
        time_limit: str | None = None,
        nodes: str | None = None,
        ntasks: int | None = None,
        ntasks_per_node: int | None = None,
        cpus_per_task: int | None = None,
        cpus_per_gpu: int | None = None,
        memory: str | None = None,
        memory_per_cpu: str | None = None,
        memory_per_gpu: str | None = None,
        gpus: str | None = None,
        gpus_per_node: str | None = None,
        gpus_per_task: str | None = None,
        gpu_mem: str | None = None,
        gpu_share: str | None = None,
        gpu_power: str | None = None,
        gpu_affinity: str | None = None,
        gpu_spread: bool = False,
        fabric: str | None = None,
        nics_per_gpu: int | None = None,
        nic_planes: str | None = None,
        segment: int | None = None,
        gang: str | None = None,
        gres: str | None = None,
        constraint: str | None = None,
        licenses: str | None = None,
        reservation: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        array: str | None = None,
        dependency: str | None = None,
        begin: str | None = None,
        deadline: str | None = None,
        nice: int | None = None,
        hold: bool = False,
        requeue: bool | None = None,
        exclusive: bool = False,
        comment: str | None = None,
        work_dir: str | None = None,
        output: str | None = None,
        error: str | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        signal: str | None = None,
        environment: dict[str, str] | None = None,
        key: str = "",
    ) -> models.WhatIf:
        """Would a request start, when, where; what smaller one would sooner. `POST /what-if`."""
        return self.call(
            Call(
                models.WhatIf,
                "POST",
                "/what-if",
                body={
                    "script": script,
                    "name": name,
                    "account": account,
                    "partition": partition,
                    "qos": qos,
                    "time_limit": time_limit,
                    "nodes": nodes,
                    "ntasks": ntasks,
                    "ntasks_per_node": ntasks_per_node,
                    "cpus_per_task": cpus_per_task,
                    "cpus_per_gpu": cpus_per_gpu,
                    "memory": memory,
                    "memory_per_cpu": memory_per_cpu,
                    "memory_per_gpu": memory_per_gpu,
                    "gpus": gpus,
                    "gpus_per_node": gpus_per_node,
                    "gpus_per_task": gpus_per_task,
                    "gpu_mem": gpu_mem,
                    "gpu_share": gpu_share,
                    "gpu_power": gpu_power,
                    "gpu_affinity": gpu_affinity,
                    "gpu_spread": gpu_spread,
                    "fabric": fabric,
                    "nics_per_gpu": nics_per_gpu,
                    "nic_planes": nic_planes,
                    "segment": segment,
                    "gang": gang,
                    "gres": gres,
                    "constraint": constraint,
                    "licenses": licenses,
                    "reservation": reservation,
                    "nodelist": nodelist,
                    "exclude": exclude,
                    "array": array,
                    "dependency": dependency,
                    "begin": begin,
                    "deadline": deadline,
                    "nice": nice,
                    "hold": hold,
                    "requeue": requeue,
                    "exclusive": exclusive,
                    "comment": comment,
                    "work_dir": work_dir,
                    "output": output,
                    "error": error,
                    "mail_type": mail_type,
                    "mail_user": mail_user,
                    "signal": signal,
                    "environment": environment,
                },
                key=key,
            )
        )

    def cancel(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Cancel a job, or a task as 17_4. `POST /jobs/{job}/cancel`."""
        return self.call(Call(models.JobDone, "POST", "/jobs/{job}/cancel", names={"job": job}, key=key))

    def hold(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Hold a job, or a task as 17_4. `POST /jobs/{job}/hold`."""
        return self.call(Call(models.JobDone, "POST", "/jobs/{job}/hold", names={"job": job}, key=key))

    def release(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Release a job, or a task as 17_4. `POST /jobs/{job}/release`."""
        return self.call(Call(models.JobDone, "POST", "/jobs/{job}/release", names={"job": job}, key=key))

    def requeue(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Requeue a job, or a task as 17_4. `POST /jobs/{job}/requeue`."""
        return self.call(Call(models.JobDone, "POST", "/jobs/{job}/requeue", names={"job": job}, key=key))

    def job_profile_start(
        self, job: int | str, *, step: str = "", seconds: int | None = None, key: str = ""
    ) -> models.ProfileDone:
        """Start a profile of a job. `POST /jobs/{job}/profile/start`."""
        return self.call(
            Call(
                models.ProfileDone,
                "POST",
                "/jobs/{job}/profile/start",
                names={"job": job},
                body={"step": step, "seconds": seconds},
                key=key,
            )
        )

    def job_profile_stop(self, job: int | str, *, step: str = "", key: str = "") -> models.ProfileDone:
        """Stop the profile of a job. `POST /jobs/{job}/profile/stop`."""
        return self.call(
            Call(
                models.ProfileDone, "POST", "/jobs/{job}/profile/stop", names={"job": job}, body={"step": step}, key=key
            )
        )

    def job_profile(self, job: int, *, step: str = "") -> models.ProfileSummary:
        """What the GPUs of a job, or of a step, did while they were profiled. `GET /jobs/{job}/profile`."""
        return self.call(
            Call(models.ProfileSummary, "GET", "/jobs/{job}/profile", names={"job": job}, query={"step": step})
        )

    def update(
        self,
        job: int | str,
        *,
        time_limit: str | None = None,
        priority: int | None = None,
        comment: str | None = None,
        name: str | None = None,
        qos: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        nice: int | None = None,
        begin: str | None = None,
        deadline: str | None = None,
        dependency: str | None = None,
        reservation: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        constraint: str | None = None,
        requeue: bool | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        key: str = "",
    ) -> models.JobDone:
        """Change a job. `PATCH /jobs/{job}`."""
        return self.call(
            Call(
                models.JobDone,
                "PATCH",
                "/jobs/{job}",
                names={"job": job},
                body={
                    "time_limit": time_limit,
                    "priority": priority,
                    "comment": comment,
                    "name": name,
                    "qos": qos,
                    "partition": partition,
                    "account": account,
                    "nice": nice,
                    "begin": begin,
                    "deadline": deadline,
                    "dependency": dependency,
                    "reservation": reservation,
                    "nodelist": nodelist,
                    "exclude": exclude,
                    "constraint": constraint,
                    "requeue": requeue,
                    "mail_type": mail_type,
                    "mail_user": mail_user,
                },
                key=key,
            )
        )

    def return_to_service(
        self, *, node: str, gpus: list[int] | None = None, reason: str = "", key: str = ""
    ) -> models.Returned:
        """Return GPUs to service. `POST /health/return`."""
        return self.call(
            Call(
                models.Returned, "POST", "/health/return", body={"node": node, "gpus": gpus, "reason": reason}, key=key
            )
        )

    def power_budget(
        self, *, name: str, watts: int | None = None, seconds: int = 7200, key: str = ""
    ) -> models.BudgetLowered:
        """Lower a budget of watts for a while. `POST /power/budget`."""
        return self.call(
            Call(
                models.BudgetLowered,
                "POST",
                "/power/budget",
                body={"name": name, "watts": watts, "seconds": seconds},
                key=key,
            )
        )

    def silence(
        self, *, rule: str, subject: str = "*", seconds: int = 14400, comment: str = "", key: str = ""
    ) -> models.Silenced:
        """Send no notices of a rule for a while. `POST /alerts/silences`."""
        return self.call(
            Call(
                models.Silenced,
                "POST",
                "/alerts/silences",
                body={"rule": rule, "subject": subject, "seconds": seconds, "comment": comment},
                key=key,
            )
        )

    def end_silence(self, silence: str, *, key: str = "") -> models.Silenced:
        """End a silence. `DELETE /alerts/silences/{silence}`."""
        return self.call(
            Call(models.Silenced, "DELETE", "/alerts/silences/{silence}", names={"silence": silence}, key=key)
        )

    def policy_check(self, *, text: str, key: str = "") -> models.PolicyChecked:
        """The mistakes of a policy file. `POST /policy/check`."""
        return self.call(Call(models.PolicyChecked, "POST", "/policy/check", body={"text": text}, key=key))

    def policy_plan(self, *, text: str, key: str = "") -> models.PolicyPlan:
        """What a policy would change. `POST /policy/plan`."""
        return self.call(Call(models.PolicyPlan, "POST", "/policy/plan", body={"text": text}, key=key))

    def policy_apply(self, *, hash: str, key: str = "") -> models.PolicyApplied:
        """Apply a plan that was seen. `POST /policy/apply`."""
        return self.call(Call(models.PolicyApplied, "POST", "/policy/apply", body={"hash": hash}, key=key))


class AsyncClient(BaseAsyncClient):
    """All calls. Each raises ApiError."""

    async def overview(self) -> models.Overview:
        """The cluster in one look. `GET /overview`."""
        return await self.call(Call(models.Overview, "GET", "/overview"))

    async def whoami(self) -> models.Whoami:
        """The caller. `GET /whoami`."""
        return await self.call(Call(models.Whoami, "GET", "/whoami"))

    async def metrics(self) -> models.MetricNames:
        """Every metric that there is. `GET /metrics`."""
        return await self.call(Call(models.MetricNames, "GET", "/metrics"))

    async def past_events(self, *, after: int = 0) -> models.EventList:
        """What happened. `GET /events`."""
        return await self.call(Call(models.EventList, "GET", "/events", query={"after": after}))

    async def jobs_page(
        self,
        *,
        user: str = "",
        account: str = "",
        partition: str = "",
        state: str = "",
        qos: str = "",
        name: str = "",
        node: str = "",
        sort: Literal["id", "submit_time", "start_time", "end_time", "priority", "gpus"] = "id",
        order: Literal["ascending", "descending"] = "descending",
        limit: int = 100,
        cursor: str = "",
    ) -> models.JobList:
        """Jobs, one page. `GET /jobs`."""
        return await self.call(
            Call(
                models.JobList,
                "GET",
                "/jobs",
                query={
                    "user": user,
                    "account": account,
                    "partition": partition,
                    "state": state,
                    "qos": qos,
                    "name": name,
                    "node": node,
                    "sort": sort,
                    "order": order,
                    "limit": limit,
                    "cursor": cursor,
                },
            )
        )

    async def jobs(
        self,
        *,
        user: str = "",
        account: str = "",
        partition: str = "",
        state: str = "",
        qos: str = "",
        name: str = "",
        node: str = "",
        sort: Literal["id", "submit_time", "start_time", "end_time", "priority", "gpus"] = "id",
        order: Literal["ascending", "descending"] = "descending",
        limit: int = 100,
    ) -> AsyncIterator[models.Job]:
        """Jobs, read page by page."""
        async for page in self._pages(
            lambda cursor: self.jobs_page(
                user=user,
                account=account,
                partition=partition,
                state=state,
                qos=qos,
                name=name,
                node=node,
                sort=sort,
                order=order,
                limit=limit,
                cursor=cursor,
            )
        ):
            for one in page.jobs:
                yield one

    async def job(self, job: int) -> models.JobPage:
        """One job. `GET /jobs/{job}`."""
        return await self.call(Call(models.JobPage, "GET", "/jobs/{job}", names={"job": job}))

    async def job_series(self, job: int) -> models.JobSeries:
        """The use of a running job's GPUs over time. `GET /jobs/{job}/series`."""
        return await self.call(Call(models.JobSeries, "GET", "/jobs/{job}/series", names={"job": job}))

    async def job_explanation(self, job: int) -> models.Explanation:
        """Why a job waits, or has its place. `GET /jobs/{job}/explanation`."""
        return await self.call(Call(models.Explanation, "GET", "/jobs/{job}/explanation", names={"job": job}))

    async def nodes(self, *, node: str = "") -> models.NodeList:
        """Nodes. `GET /nodes`."""
        return await self.call(Call(models.NodeList, "GET", "/nodes", query={"node": node}))

    async def gpus(self, *, node: str = "") -> models.GpuList:
        """GPUs. `GET /gpus`."""
        return await self.call(Call(models.GpuList, "GET", "/gpus", query={"node": node}))

    async def node_topology(self, node: str) -> models.Topology:
        """How the GPUs of a node are joined. `GET /nodes/{node}/topology`."""
        return await self.call(Call(models.Topology, "GET", "/nodes/{node}/topology", names={"node": node}))

    async def topology(self) -> models.NetworkTopology:
        """How nodes are joined. `GET /topology`."""
        return await self.call(Call(models.NetworkTopology, "GET", "/topology"))

    async def classes(self) -> models.ClassList:
        """GPUs that are alike. `GET /classes`."""
        return await self.call(Call(models.ClassList, "GET", "/classes"))

    async def inventory(self) -> models.Inventory:
        """What nodes were probed to have. `GET /inventory`."""
        return await self.call(Call(models.Inventory, "GET", "/inventory"))

    async def tenants(self) -> models.TenantList:
        """Tenants. `GET /tenants`."""
        return await self.call(Call(models.TenantList, "GET", "/tenants"))

    async def tenant(self, tenant: str) -> models.Tenant:
        """One tenant. `GET /tenants/{tenant}`."""
        return await self.call(Call(models.Tenant, "GET", "/tenants/{tenant}", names={"tenant": tenant}))

    async def tenant_quota(self, tenant: str) -> models.Quota:
        """What a tenant may use, and uses. `GET /tenants/{tenant}/quota`."""
        return await self.call(Call(models.Quota, "GET", "/tenants/{tenant}/quota", names={"tenant": tenant}))

    async def tenant_usage(self, tenant: str) -> models.TenantUsage:
        """What a tenant's members use. `GET /tenants/{tenant}/usage`."""
        return await self.call(Call(models.TenantUsage, "GET", "/tenants/{tenant}/usage", names={"tenant": tenant}))

    async def services(self) -> models.ServiceList:
        """Models that run as services. `GET /services`."""
        return await self.call(Call(models.ServiceList, "GET", "/services"))

    async def limits(self) -> models.CallerLimits:
        """What gateways of services let through of the caller. `GET /limits`."""
        return await self.call(Call(models.CallerLimits, "GET", "/limits"))

    async def service(self, service: str) -> models.Service:
        """One service and its replicas. `GET /services/{service}`."""
        return await self.call(Call(models.Service, "GET", "/services/{service}", names={"service": service}))

    async def service_series(self, service: str) -> models.ServiceSeries:
        """How a service was over the last day. `GET /services/{service}/series`."""
        return await self.call(
            Call(models.ServiceSeries, "GET", "/services/{service}/series", names={"service": service})
        )

    async def change_service(
        self,
        service: str,
        *,
        least: int | None = None,
        most: int | None = None,
        paused: bool | None = None,
        key: str = "",
    ) -> models.ServiceChanged:
        """Scale, pause or resume a service: in the policy file, and applied. `PATCH /services/{service}`."""
        return await self.call(
            Call(
                models.ServiceChanged,
                "PATCH",
                "/services/{service}",
                names={"service": service},
                body={"least": least, "most": most, "paused": paused},
                key=key,
            )
        )

    async def pools(self) -> models.PoolList:
        """Pools of nodes that come and go. `GET /pools`."""
        return await self.call(Call(models.PoolList, "GET", "/pools"))

    async def pool(self, pool: str) -> models.Pool:
        """One pool and its nodes. `GET /pools/{pool}`."""
        return await self.call(Call(models.Pool, "GET", "/pools/{pool}", names={"pool": pool}))

    async def pool_history(self, pool: str) -> models.PoolHistory:
        """What happened in a pool. `GET /pools/{pool}/history`."""
        return await self.call(Call(models.PoolHistory, "GET", "/pools/{pool}/history", names={"pool": pool}))

    async def node_pool(self, node: str) -> models.PoolNodeWhy:
        """Why a node of a pool is as it is. `GET /nodes/{node}/pool`."""
        return await self.call(Call(models.PoolNodeWhy, "GET", "/nodes/{node}/pool", names={"node": node}))

    async def nodes_report(
        self, *, since: date | None = None, until: date | None = None, limit: int = 1000
    ) -> models.Report:
        """What was used of each node. `GET /reports/nodes`."""
        return await self.call(
            Call(models.Report, "GET", "/reports/nodes", query={"since": since, "until": until, "limit": limit})
        )

    async def nodes_report_csv(self, *, since: date | None = None, until: date | None = None, limit: int = 1000) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return (
            await self.call(
                Call(
                    models.Text,
                    "GET",
                    "/reports/nodes",
                    query={"since": since, "until": until, "limit": limit, "format": "csv"},
                )
            )
        ).text

    async def reports_gpus_each(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
    ) -> models.Report:
        """What was used of each GPU. `GET /reports/gpus/each`."""
        return await self.call(
            Call(
                models.Report,
                "GET",
                "/reports/gpus/each",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "gpu_type": gpu_type,
                },
            )
        )

    async def reports_gpus_each_csv(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return (
            await self.call(
                Call(
                    models.Text,
                    "GET",
                    "/reports/gpus/each",
                    query={
                        "since": since,
                        "until": until,
                        "limit": limit,
                        "account": account,
                        "user": user,
                        "partition": partition,
                        "gpu_type": gpu_type,
                        "format": "csv",
                    },
                )
            )
        ).text

    async def reports_jobs(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
    ) -> models.JobsReport:
        """Single jobs, ended ones included. `GET /reports/jobs`."""
        return await self.call(
            Call(
                models.JobsReport,
                "GET",
                "/reports/jobs",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                },
            )
        )

    async def reports_jobs_csv(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return (
            await self.call(
                Call(
                    models.Text,
                    "GET",
                    "/reports/jobs",
                    query={
                        "since": since,
                        "until": until,
                        "limit": limit,
                        "account": account,
                        "user": user,
                        "partition": partition,
                        "format": "csv",
                    },
                )
            )
        ).text

    async def reports_services(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        service: str = "",
        account: str = "",
        user: str = "",
        by: str = "",
    ) -> models.ServicesReport:
        """What requests to services used. `GET /reports/services`."""
        return await self.call(
            Call(
                models.ServicesReport,
                "GET",
                "/reports/services",
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "service": service,
                    "account": account,
                    "user": user,
                    "by": by,
                },
            )
        )

    async def reports_services_csv(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        service: str = "",
        account: str = "",
        user: str = "",
        by: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return (
            await self.call(
                Call(
                    models.Text,
                    "GET",
                    "/reports/services",
                    query={
                        "since": since,
                        "until": until,
                        "limit": limit,
                        "service": service,
                        "account": account,
                        "user": user,
                        "by": by,
                        "format": "csv",
                    },
                )
            )
        ).text

    async def report(
        self,
        report: str,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
        by: str = "",
    ) -> models.Report:
        """What was used, by whom, and how well. `GET /reports/{report}`."""
        return await self.call(
            Call(
                models.Report,
                "GET",
                "/reports/{report}",
                names={"report": report},
                query={
                    "since": since,
                    "until": until,
                    "limit": limit,
                    "account": account,
                    "user": user,
                    "partition": partition,
                    "gpu_type": gpu_type,
                    "by": by,
                },
            )
        )

    async def report_csv(
        self,
        report: str,
        *,
        since: date | None = None,
        until: date | None = None,
        limit: int = 1000,
        account: str = "",
        user: str = "",
        partition: str = "",
        gpu_type: str = "",
        by: str = "",
    ) -> str:
        """The same for spreadsheets, as CSV with a first line of names."""
        return (
            await self.call(
                Call(
                    models.Text,
                    "GET",
                    "/reports/{report}",
                    names={"report": report},
                    query={
                        "since": since,
                        "until": until,
                        "limit": limit,
                        "account": account,
                        "user": user,
                        "partition": partition,
                        "gpu_type": gpu_type,
                        "by": by,
                        "format": "csv",
                    },
                )
            )
        ).text

    async def job_report(self, job: int) -> models.JobReport:
        """Everything that is known of one job. `GET /jobs/{job}/report`."""
        return await self.call(Call(models.JobReport, "GET", "/jobs/{job}/report", names={"job": job}))

    async def health(self) -> models.HealthList:
        """Faults, and what is out of service. `GET /health`."""
        return await self.call(Call(models.HealthList, "GET", "/health"))

    async def health_history(self, *, node: str = "") -> models.HealthHistory:
        """What health did. `GET /health/history`."""
        return await self.call(Call(models.HealthHistory, "GET", "/health/history", query={"node": node}))

    async def power(self) -> models.PowerShown:
        """Budgets of watts, and what is drawn. `GET /power`."""
        return await self.call(Call(models.PowerShown, "GET", "/power"))

    async def power_drawn(self) -> models.PowerDrawn:
        """What nodes and tenants draw. `GET /power/drawn`."""
        return await self.call(Call(models.PowerDrawn, "GET", "/power/drawn"))

    async def alerts(self) -> models.AlertList:
        """Alerts and silences. `GET /alerts`."""
        return await self.call(Call(models.AlertList, "GET", "/alerts"))

    async def policy(self) -> models.PolicyShown:
        """The policy file. `GET /policy`."""
        return await self.call(Call(models.PolicyShown, "GET", "/policy"))

    async def failover(self) -> models.FailoverStatus:
        """The controllers. `GET /failover`."""
        return await self.call(Call(models.FailoverStatus, "GET", "/failover"))

    async def failover_history(self) -> models.FailoverHistory:
        """What happened to them. `GET /failover/history`."""
        return await self.call(Call(models.FailoverHistory, "GET", "/failover/history"))

    async def shadow(self, *, hours: float | None = None) -> models.ShadowReport:
        """What Sluice would have decided. `GET /shadow`."""
        return await self.call(Call(models.ShadowReport, "GET", "/shadow", query={"hours": hours}))

    async def audit(
        self,
        *,
        user: str = "",
        action: str = "",
        request_id: str = "",
        after: int = 0,
        before: int = 0,
        limit: int = 100,
    ) -> models.AuditList:
        """What the caller did; to administrators, who did what. `GET /audit`."""
        return await self.call(
            Call(
                models.AuditList,
                "GET",
                "/audit",
                query={
                    "user": user,
                    "action": action,
                    "request_id": request_id,
                    "after": after,
                    "before": before,
                    "limit": limit,
                },
            )
        )

    async def policy_drift(self) -> models.PolicyDrift:
        """What was changed by hand since a policy was applied. `GET /policy/drift`."""
        return await self.call(Call(models.PolicyDrift, "GET", "/policy/drift"))

    async def submit(
        self,
        *,
        script: str,
        name: str | None = None,
        account: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
        time_limit: str | None = None,
        nodes: str | None = None,
        ntasks: int | None = None,
        ntasks_per_node: int | None = None,
        cpus_per_task: int | None = None,
        cpus_per_gpu: int | None = None,
        memory: str | None = None,
        memory_per_cpu: str | None = None,
        memory_per_gpu: str | None = None,
        gpus: str | None = None,
        gpus_per_node: str | None = None,
        gpus_per_task: str | None = None,
        gpu_mem: str | None = None,
        gpu_share: str | None = None,
        gpu_power: str | None = None,
        gpu_affinity: str | None = None,
        gpu_spread: bool = False,
        fabric: str | None = None,
        nics_per_gpu: int | None = None,
        nic_planes: str | None = None,
        segment: int | None = None,
        gang: str | None = None,
        gres: str | None = None,
        constraint: str | None = None,
        licenses: str | None = None,
        reservation: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        array: str | None = None,
        dependency: str | None = None,
        begin: str | None = None,
        deadline: str | None = None,
        nice: int | None = None,
        hold: bool = False,
        requeue: bool | None = None,
        exclusive: bool = False,
        comment: str | None = None,
        work_dir: str | None = None,
        output: str | None = None,
        error: str | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        signal: str | None = None,
        environment: dict[str, str] | None = None,
        key: str = "",
    ) -> models.Submitted:
        """Submit a job. `POST /jobs`."""
        return await self.call(
            Call(
                models.Submitted,
                "POST",
                "/jobs",
                body={
                    "script": script,
                    "name": name,
                    "account": account,
                    "partition": partition,
                    "qos": qos,
                    "time_limit": time_limit,
                    "nodes": nodes,
                    "ntasks": ntasks,
                    "ntasks_per_node": ntasks_per_node,
                    "cpus_per_task": cpus_per_task,
                    "cpus_per_gpu": cpus_per_gpu,
                    "memory": memory,
                    "memory_per_cpu": memory_per_cpu,
                    "memory_per_gpu": memory_per_gpu,
                    "gpus": gpus,
                    "gpus_per_node": gpus_per_node,
                    "gpus_per_task": gpus_per_task,
                    "gpu_mem": gpu_mem,
                    "gpu_share": gpu_share,
                    "gpu_power": gpu_power,
                    "gpu_affinity": gpu_affinity,
                    "gpu_spread": gpu_spread,
                    "fabric": fabric,
                    "nics_per_gpu": nics_per_gpu,
                    "nic_planes": nic_planes,
                    "segment": segment,
                    "gang": gang,
                    "gres": gres,
                    "constraint": constraint,
                    "licenses": licenses,
                    "reservation": reservation,
                    "nodelist": nodelist,
                    "exclude": exclude,
                    "array": array,
                    "dependency": dependency,
                    "begin": begin,
                    "deadline": deadline,
                    "nice": nice,
                    "hold": hold,
                    "requeue": requeue,
                    "exclusive": exclusive,
                    "comment": comment,
                    "work_dir": work_dir,
                    "output": output,
                    "error": error,
                    "mail_type": mail_type,
                    "mail_user": mail_user,
                    "signal": signal,
                    "environment": environment,
                },
                key=key,
            )
        )

    async def what_if(
        self,
        *,
        script: str,
        name: str | None = None,
        account: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
        time_limit: str | None = None,
        nodes: str | None = None,
        ntasks: int | None = None,
        ntasks_per_node: int | None = None,
        cpus_per_task: int | None = None,
        cpus_per_gpu: int | None = None,
        memory: str | None = None,
        memory_per_cpu: str | None = None,
        memory_per_gpu: str | None = None,
        gpus: str | None = None,
        gpus_per_node: str | None = None,
        gpus_per_task: str | None = None,
        gpu_mem: str | None = None,
        gpu_share: str | None = None,
        gpu_power: str | None = None,
        gpu_affinity: str | None = None,
        gpu_spread: bool = False,
        fabric: str | None = None,
        nics_per_gpu: int | None = None,
        nic_planes: str | None = None,
        segment: int | None = None,
        gang: str | None = None,
        gres: str | None = None,
        constraint: str | None = None,
        licenses: str | None = None,
        reservation: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        array: str | None = None,
        dependency: str | None = None,
        begin: str | None = None,
        deadline: str | None = None,
        nice: int | None = None,
        hold: bool = False,
        requeue: bool | None = None,
        exclusive: bool = False,
        comment: str | None = None,
        work_dir: str | None = None,
        output: str | None = None,
        error: str | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        signal: str | None = None,
        environment: dict[str, str] | None = None,
        key: str = "",
    ) -> models.WhatIf:
        """Would a request start, when, where; what smaller one would sooner. `POST /what-if`."""
        return await self.call(
            Call(
                models.WhatIf,
                "POST",
                "/what-if",
                body={
                    "script": script,
                    "name": name,
                    "account": account,
                    "partition": partition,
                    "qos": qos,
                    "time_limit": time_limit,
                    "nodes": nodes,
                    "ntasks": ntasks,
                    "ntasks_per_node": ntasks_per_node,
                    "cpus_per_task": cpus_per_task,
                    "cpus_per_gpu": cpus_per_gpu,
                    "memory": memory,
                    "memory_per_cpu": memory_per_cpu,
                    "memory_per_gpu": memory_per_gpu,
                    "gpus": gpus,
                    "gpus_per_node": gpus_per_node,
                    "gpus_per_task": gpus_per_task,
                    "gpu_mem": gpu_mem,
                    "gpu_share": gpu_share,
                    "gpu_power": gpu_power,
                    "gpu_affinity": gpu_affinity,
                    "gpu_spread": gpu_spread,
                    "fabric": fabric,
                    "nics_per_gpu": nics_per_gpu,
                    "nic_planes": nic_planes,
                    "segment": segment,
                    "gang": gang,
                    "gres": gres,
                    "constraint": constraint,
                    "licenses": licenses,
                    "reservation": reservation,
                    "nodelist": nodelist,
                    "exclude": exclude,
                    "array": array,
                    "dependency": dependency,
                    "begin": begin,
                    "deadline": deadline,
                    "nice": nice,
                    "hold": hold,
                    "requeue": requeue,
                    "exclusive": exclusive,
                    "comment": comment,
                    "work_dir": work_dir,
                    "output": output,
                    "error": error,
                    "mail_type": mail_type,
                    "mail_user": mail_user,
                    "signal": signal,
                    "environment": environment,
                },
                key=key,
            )
        )

    async def cancel(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Cancel a job, or a task as 17_4. `POST /jobs/{job}/cancel`."""
        return await self.call(Call(models.JobDone, "POST", "/jobs/{job}/cancel", names={"job": job}, key=key))

    async def hold(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Hold a job, or a task as 17_4. `POST /jobs/{job}/hold`."""
        return await self.call(Call(models.JobDone, "POST", "/jobs/{job}/hold", names={"job": job}, key=key))

    async def release(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Release a job, or a task as 17_4. `POST /jobs/{job}/release`."""
        return await self.call(Call(models.JobDone, "POST", "/jobs/{job}/release", names={"job": job}, key=key))

    async def requeue(self, job: int | str, *, key: str = "") -> models.JobDone:
        """Requeue a job, or a task as 17_4. `POST /jobs/{job}/requeue`."""
        return await self.call(Call(models.JobDone, "POST", "/jobs/{job}/requeue", names={"job": job}, key=key))

    async def job_profile_start(
        self, job: int | str, *, step: str = "", seconds: int | None = None, key: str = ""
    ) -> models.ProfileDone:
        """Start a profile of a job. `POST /jobs/{job}/profile/start`."""
        return await self.call(
            Call(
                models.ProfileDone,
                "POST",
                "/jobs/{job}/profile/start",
                names={"job": job},
                body={"step": step, "seconds": seconds},
                key=key,
            )
        )

    async def job_profile_stop(self, job: int | str, *, step: str = "", key: str = "") -> models.ProfileDone:
        """Stop the profile of a job. `POST /jobs/{job}/profile/stop`."""
        return await self.call(
            Call(
                models.ProfileDone, "POST", "/jobs/{job}/profile/stop", names={"job": job}, body={"step": step}, key=key
            )
        )

    async def job_profile(self, job: int, *, step: str = "") -> models.ProfileSummary:
        """What the GPUs of a job, or of a step, did while they were profiled. `GET /jobs/{job}/profile`."""
        return await self.call(
            Call(models.ProfileSummary, "GET", "/jobs/{job}/profile", names={"job": job}, query={"step": step})
        )

    async def update(
        self,
        job: int | str,
        *,
        time_limit: str | None = None,
        priority: int | None = None,
        comment: str | None = None,
        name: str | None = None,
        qos: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        nice: int | None = None,
        begin: str | None = None,
        deadline: str | None = None,
        dependency: str | None = None,
        reservation: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        constraint: str | None = None,
        requeue: bool | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        key: str = "",
    ) -> models.JobDone:
        """Change a job. `PATCH /jobs/{job}`."""
        return await self.call(
            Call(
                models.JobDone,
                "PATCH",
                "/jobs/{job}",
                names={"job": job},
                body={
                    "time_limit": time_limit,
                    "priority": priority,
                    "comment": comment,
                    "name": name,
                    "qos": qos,
                    "partition": partition,
                    "account": account,
                    "nice": nice,
                    "begin": begin,
                    "deadline": deadline,
                    "dependency": dependency,
                    "reservation": reservation,
                    "nodelist": nodelist,
                    "exclude": exclude,
                    "constraint": constraint,
                    "requeue": requeue,
                    "mail_type": mail_type,
                    "mail_user": mail_user,
                },
                key=key,
            )
        )

    async def return_to_service(
        self, *, node: str, gpus: list[int] | None = None, reason: str = "", key: str = ""
    ) -> models.Returned:
        """Return GPUs to service. `POST /health/return`."""
        return await self.call(
            Call(
                models.Returned, "POST", "/health/return", body={"node": node, "gpus": gpus, "reason": reason}, key=key
            )
        )

    async def power_budget(
        self, *, name: str, watts: int | None = None, seconds: int = 7200, key: str = ""
    ) -> models.BudgetLowered:
        """Lower a budget of watts for a while. `POST /power/budget`."""
        return await self.call(
            Call(
                models.BudgetLowered,
                "POST",
                "/power/budget",
                body={"name": name, "watts": watts, "seconds": seconds},
                key=key,
            )
        )

    async def silence(
        self, *, rule: str, subject: str = "*", seconds: int = 14400, comment: str = "", key: str = ""
    ) -> models.Silenced:
        """Send no notices of a rule for a while. `POST /alerts/silences`."""
        return await self.call(
            Call(
                models.Silenced,
                "POST",
                "/alerts/silences",
                body={"rule": rule, "subject": subject, "seconds": seconds, "comment": comment},
                key=key,
            )
        )

    async def end_silence(self, silence: str, *, key: str = "") -> models.Silenced:
        """End a silence. `DELETE /alerts/silences/{silence}`."""
        return await self.call(
            Call(models.Silenced, "DELETE", "/alerts/silences/{silence}", names={"silence": silence}, key=key)
        )

    async def policy_check(self, *, text: str, key: str = "") -> models.PolicyChecked:
        """The mistakes of a policy file. `POST /policy/check`."""
        return await self.call(Call(models.PolicyChecked, "POST", "/policy/check", body={"text": text}, key=key))

    async def policy_plan(self, *, text: str, key: str = "") -> models.PolicyPlan:
        """What a policy would change. `POST /policy/plan`."""
        return await self.call(Call(models.PolicyPlan, "POST", "/policy/plan", body={"text": text}, key=key))

    async def policy_apply(self, *, hash: str, key: str = "") -> models.PolicyApplied:
        """Apply a plan that was seen. `POST /policy/apply`."""
        return await self.call(Call(models.PolicyApplied, "POST", "/policy/apply", body={"hash": hash}, key=key))
