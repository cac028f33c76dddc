"""What a command shows as JSON, an endpoint gives, or the reason why not is written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
import pytest

from gres_probe.group import group
from gres_probe.inventory import Gpu, Inventory, Link, LinkType
from gres_probe.topology import topology_document
from policy.grouping import Grouping
from policy.quota_use import TenantUse, quota_rows
from policy.service_jobs import ServicePolicy, ServicesPolicy
from policy.service_use import service_documents
from sluice.client import models
from sluice.exchange import fleet, serve_status
from sluice.exchange.recent_use import ServiceUse
from sluice.exchange.serving import State
from sluice.explain.shadow import Difference, Shadow
from sluice.failover.shared import Lease
from sluice.failover.status import Status
from sluice.main import COMMANDS, sluice
from sluice.report import job_page
from sluice.report.fields import FIELDS, GROUPED_BY, Row, fields_of
from sluice.report.output import head_of, row_document
from sluice.report.services import ServiceKey, ServiceTally, rows_of
from sluice.report.summaries import GpuUse, JobUse
from sluice.report.tally import Tally
from sluice.web.api import ENDPOINTS
from tests.unit.web.reported import page_of

_NODE, _FILES, _DEV, _CHANGES = "of one node", "of files on this host", "of a development cluster", "changes something"
_SITE = "of the site's installation, for root"
SHOWN = {
    "alerts list": "/alerts",
    "explain": "/jobs/{job}/explanation",
    "failover status": "/failover",
    "failover history": "/failover/history",
    "group": "/classes",
    "health list": "/health",
    "health history": "/health/history",
    "inventory": "/inventory",
    "policy show": "/policy",
    "policy check": "/policy/check",
    "plan": "/policy/plan",
    "pool list": "/pools",
    "pool show": "/pools/{pool}",
    "pool history": "/pools/{pool}/history",
    "pool why": "/nodes/{node}/pool",
    "power show": "/power",
    "drift": "/policy/drift",
    **{f"report {kind}": f"/reports/{'nodes' if kind == 'nodes' else '{report}'}" for kind in GROUPED_BY},
    "profile summary": "/jobs/{job}/profile",
    "report job": "/jobs/{job}/report",
    "report jobs": "/reports/jobs",
    "report services": "/reports/services",
    "serve list": "/services",
    "serve show": "/services/{service}",
    "shadow report": "/shadow",
    "topo": "/nodes/{node}/topology",
    "quota show": "/tenants/{tenant}/quota",
    "tenant list": "/tenants",
    "tenant show": "/tenants/{tenant}",
    "tenant usage": "/tenants/{tenant}/usage",
    "whoami": "/whoami",
}
NOT_SHOWN = {
    "agent status": _NODE,
    "agent record": _NODE,
    "health check": _NODE,
    "mig plan": _NODE,
    "probe": _NODE,
    "controllerd status": _SITE,
    "doctor": _SITE,
    "fabric check": _SITE,
    "fabric discover": _SITE,
    "plugin status": _SITE,
    "token list": _SITE,
    "failover drill": _CHANGES,
    "node empty": _CHANGES,
    "power budget": _CHANGES,
    "power why": "of the leading controller, which is asked by the user's own MUNGE credential",
    "lint": _FILES,
    "simulate": _FILES,
    "plugin check": _SITE,
}


def commands_with_json(command: click.Command, name: str) -> Iterator[str]:
    if any(isinstance(one, click.Option) and "--json" in one.opts for one in command.params):
        yield name
    if isinstance(command, click.Group):
        for word, one in command.commands.items():
            yield from commands_with_json(one, f"{name} {word}")


def all_with_json() -> set[str]:
    found: set[str] = set()
    for name in COMMANDS:
        command = sluice.get_command(click.Context(sluice), name)
        assert command is not None
        found |= set(commands_with_json(command, name))
    return found


def test_each_command_with_json_has_an_endpoint_or_a_reason() -> None:
    of_groups = {"cluster": _DEV, "sim": _DEV}
    rest = {name for name in all_with_json() if name.partition(" ")[0] not in of_groups}
    assert sorted(rest ^ (set(SHOWN) | set(NOT_SHOWN))) == []


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_endpoint_that_is_named_is_there(name: str) -> None:
    assert SHOWN[name] in {one.path for one in ENDPOINTS} and name in all_with_json()


# ---- what a command prints is what the model says ----

USE = TenantUse("physics", "", ["alice"], "2", {"GrpTRES": "gres/gpu=8"}, used={"gres/gpu": 2}, minutes={"gres/gpu": 1})
GPU = Gpu("nvidia", 0, "GPU-1", "H100", "/dev/nvidia0", 0, "0000:01:00.0", 81559, 81000)


def a_report(kind: str) -> dict[str, Any]:
    row = Row(Tally(ran=1, gpu_s=60.0, device_s=9.0, busy_s=3.0), {"account": "a", "user": "u"}, {"gpu_limit": 5})
    return head_of(
        kind, {"start": 1, "end": 2, "made": 3, "rows": [row_document([one for one in FIELDS if not one.jobs], row)]}
    )


def of_job() -> dict[str, Any]:
    """The page of a job that was measured."""
    gpu = GpuUse("n1", 0, "GPU-1", "H100", 81559, None, None, "none", 5, 0, 9.0, {"mean": 50.0})
    used = JobUse(9.0, 4.5, gpus=(gpu,), events=({"node": "n1", "time": 1.0, "action": "warn", "bytes": 5},))
    page = page_of(1)
    page["used"], page["limits_hit"] = job_page._used(used), list(used.events)
    return page


def a_service() -> dict[str, Any]:
    policy = ServicesPolicy(
        services={"llm": ServicePolicy(name="llm", tenant="nlp", user="nlp-serve", engine="vllm", callers=("*",))}
    )
    said = serve_status.ReplicaStatus(
        "llm", "0123456789abcdef", 17, "n1", State.READY, 16, 3, 1, 10, 20, 0.5, "tokens", 5.0, None
    )
    (found,) = service_documents(
        policy,
        [],
        serve_status.Status({"llm": serve_status.ServiceStatus(1, 2.0)}, {said.launch: said}),
        {"llm": ServiceUse(3, 900, 99.5)},
    )
    return found


def a_report_of_services() -> dict[str, Any]:
    row = rows_of({ServiceKey("llm", "nlp", "alice", "2026-11-20"): ServiceTally(1, 1)}, lambda _: True, ("day",))
    rows = [row_document(fields_of("services"), one) for one in row]
    return head_of("services", {"start": 1, "end": 2, "made": 3, "rows": rows})


FLEET = fleet.FleetStatus(
    5.0,
    pools={"p5": fleet.PoolStatus("ec2", "p5-[1-2]", 2, 0, "p5")},
    nodes=[fleet.NodeStatus("p5-1", "p5", "up", difference="no_capacity", text="none", again=9.0, jobs=(17,))],
    history=[fleet.Event(1.0, "p5-1", "p5", "asked")],
)

PRINTED: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"report {kind}": partial(a_report, kind) for kind in GROUPED_BY},
    "report job": of_job,
    "report services": a_report_of_services,
    "serve list": lambda: {
        "schema_version": 1,
        "address": "https://models.site.org/v1",
        "services": [{name: value for name, value in a_service().items() if name != "replicas"}],
    },
    "serve show": lambda: {"schema_version": 1, **a_service()},
    "pool list": lambda: {"schema_version": 1, "pools": fleet.pool_documents(FLEET)},
    "pool show": lambda: {"schema_version": 1, **fleet.pool_document(FLEET, "p5")},
    "pool history": lambda: {"schema_version": 1, **fleet.history_document(FLEET, "p5")},
    "pool why": lambda: {"schema_version": 1, **fleet.why_document(FLEET, "p5-1")},
    "topo": lambda: topology_document(Inventory("n1", [GPU], [[Link(LinkType.SELF)]])),
    "group": lambda: {"classes": group([Inventory("n1", [GPU], [[Link(LinkType.SELF)]])], Grouping()).document()},
    "shadow report": lambda: Shadow(differences=[Difference(1, 1.0, ("n1",), ("n2",))]).document(),
    "quota show": lambda: {"tenant": "physics", "quota": quota_rows(USE)},
    "tenant show": lambda: {"schema_version": 1, **USE.document()},
    "whoami": lambda: {"user": "alice", "level": "user", "coordinates": [], "gpu_types": ["h100"],
                       "tenants": [{**USE.document(), "quota": quota_rows(USE), "example": "sbatch"}]},
    "failover status": lambda: Status(("a",), "a", {"a": True}, Lease(1, True, "a", 5.0, 1.0), {"x": 5}).document(),
}  # fmt: skip
"""Made by the functions that the commands use."""


def known_only(value: Any, model: Any) -> Any:
    """What is left when the model is asked, recursively, for what it knows."""
    return model.model_validate(value).model_dump(mode="json", exclude_unset=True)


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_what_a_command_prints_fits_the_model_of_its_endpoint_and_none_of_it_is_lost(name: str) -> None:
    (model,) = {one.model for one in ENDPOINTS if one.path == SHOWN[name] and one.method == "GET"}
    printed = json.loads(json.dumps(PRINTED[name]()))
    assert known_only(printed, model) == printed


def test_a_row_of_a_report_has_the_fields_of_reports() -> None:
    assert set(models.ReportRow.model_fields) == {one.key for one in FIELDS if not one.jobs}
    assert set(models.JobRow.model_fields) == {one.key for one in FIELDS}
    assert set(models.ServiceRow.model_fields) == {one.key for one in fields_of("services")}
