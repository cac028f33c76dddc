"""The daemon's reports for tests of the web: rolled-up days and recent jobs of made-up owners, without Slurm."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

from policy.quota_use import TenantUse
from policy.service_jobs import FILE_NAME as SERVICES_FILE
from policy.service_jobs import ServicePolicy, ServicesPolicy
from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.published_reports import BusyError, Recent, Reports, Wanted
from sluice.exchange.record import Grant, JobRecord
from sluice.exchange.requests import RequestLog, RequestRecord
from sluice.exchange.snapshot import parse_answer, render_answer
from sluice.explain.shadow import Shadow
from sluice.report.collect import Selection, Source
from sluice.report.count import Counter, Span
from sluice.report.fleet import Fleet, NodeGpus
from sluice.report.rollup import DayCount, midnight
from sluice.report.tally import Key, Tally
from sluice.slurm import Commands, SlurmClient
from sluice.slurm.allocations import Allocation

OWNERS = {1: ("alice", "physics"), 2: ("bob", "physics"), 3: ("mallory", "chemistry"), 4: ("alice", "physics")}
LLM = ServicePolicy(name="llm", tenant="chemistry", user="mallory", engine="vllm", callers=("*",))
FLEET = Fleet({"n1": NodeGpus("h100", {"h100": 4}, 4, 0)})
TODAY = date.today()
YESTERDAY = TODAY - timedelta(days=1)


class FakeSlurm:
    """slurmctld, and how often it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self) -> dict[str, str]:
        return {
            "ClusterName": "c", "StateSaveLocation": str(self.folder), "SLURM_CONF": str(self.folder / "slurm.conf"),
            "AccountingStorageType": "accounting_storage/slurmdbd", "PriorityDecayHalfLife": "0",
        }  # fmt: skip


def counted(gpu_s: float) -> dict[date, Counter]:
    """What each owner used on a day."""
    made = Counter(FLEET)
    for user, account in OWNERS.values():
        key = Key(account, user, f"of-{user}", "q", "COMPLETED", "h100")
        made.cells.setdefault(key, Tally()).add(Tally(ran=1, started=1, gpu_s=gpu_s))
    return {YESTERDAY: made}


def on_nodes(gpu_s: float) -> dict[date, Counter]:
    """The same of nodes."""
    made = Counter(FLEET, nodes_alone=True)
    made.cells[Key("", "", "", "", "", "", "n1")] = Tally(ran=4, gpu_s=4 * gpu_s)
    return {YESTERDAY: made}


def page_of(number: int) -> dict[str, Any]:
    """The page of an owner's job."""
    user, account = OWNERS[number]
    return {
        "schema_version": 1,
        "job": {
            "id": number, "label": str(number), "name": f"secret-of-{user}", "user": user, "account": account,
            "qos": "q", "partition": "main", "state": "COMPLETED", "exit_code": "0:0", "submit": 1, "eligible": 1,
            "start": 2, "end": 3, "wait_s": 1, "elapsed_s": 1,
        },
        "runs": 1,
        "asked": {"tres": {"cpu": 1}, "time_limit_s": 60, "time_unlimited": False},
        "granted": {"nodes": "n1", "node_count": 1, "tres": {"cpu": 1}},
        "used": None,
        "host": {"cpu_s": 1.0, "cpu_percent": 100.0, "memory_peak_mib": 5},
        "limits_hit": [],
        "waited": {"seconds": 1, "slurm_reason": "", "explanation": {"schema_version": 1, "job": str(number)}},
        "advice": {"sbatch": f"sbatch secret-of-{user}", "because": []},
    }  # fmt: skip


EXPLANATION = {
    "schema_version": 1,
    "order": {
        "as_of": 1.0, "site_factor": 1, "place": 1, "terms": [{"name": "age", "weight": 1, "value": 0.5}],
        "slurm_terms": {"qos": 1}, "predicted_run_s": 5, "gpus": 1, "starving": False, "deadline": "none",
        "tenant": {"account": "physics", "shares": 1, "fair_share": 1.0, "gpu_hours": 77.0, "tier": 0},
    },
}  # fmt: skip


class Accounting(Source):
    """sacct with a job of each owner that ended now, asked for which users."""

    asked: list[frozenset[str]]

    def _stream(self, span: Span, selection: Selection, **_: Any) -> Iterator[Allocation]:
        self.asked.append(selection.users)
        for number, (user, account) in OWNERS.items():
            if not selection.users or user in selection.users:
                end = int(self.now) - number
                yield Allocation(number, str(number), f"secret-of-{user}", user, account, "q", "main", "COMPLETED",
                                 "0:0", end - 9, end - 9, end - 5, end, 5, 60, 1, "n1", "cpu=1", "cpu=1,gres/gpu=1", "")  # fmt: skip  # noqa: E501


class Records:
    """What nodes sent of the owners' jobs: each had the GPU before its number."""

    def between(self, start: float, end: float) -> list[JobRecord]:
        noon = midnight(YESTERDAY) + 43_200
        return [
            JobRecord(
                number, 1, user, account, "main", "n1", noon, noon + 60,
                grants=[Grant(number - 1, f"GPU-{number}", "nvidia", "h100", 80 << 30)],
            )
            for number, (user, account) in OWNERS.items()
            if start <= noon < end
        ]  # fmt: skip


class Reported:
    """The part of the daemon that makes reports; `sacct` counts how often the accounting was read."""

    def __init__(self, folder: Path) -> None:
        slurm = cast(SlurmClient, FakeSlurm(folder))
        self.site = Site(slurm, Commands(), folder / "state", events=folder / "events", host="here")
        tenants = {name: TenantUse(name, "", limits={"GrpTRES": "gres/gpu=100"}, used={"gres/gpu": 77}) for name in
                   ("physics", "chemistry")}  # fmt: skip
        self.reports = Reports(self.site, lambda: FLEET, lambda: tenants)
        self.sacct = 0
        self.asked: list[frozenset[str]] = []
        self.reports.source = self._source  # type: ignore[method-assign]
        self.fails = False
        history = self.reports.history
        history.rolled().save(YESTERDAY, DayCount(4, counted(3600.0), on_nodes(3600.0)))
        history._read = self._read  # type: ignore[method-assign]
        self.reports.pages._make = self._page
        requests = folder / "requests"
        requests.mkdir(exist_ok=True)
        policy = ServicesPolicy(services={"llm": LLM}, requests=str(requests))
        (folder / SERVICES_FILE).write_text(policy.render())
        log = RequestLog(requests, "here")
        for number, (user, account) in OWNERS.items():
            log.write(RequestRecord(f"r{number}", time.time(), time.time(), "k", user, account, "llm", 0, 10, 5, 0,
                                    "ok", 200, 0.0, 0.2, 1.0, "/v1/completions"))  # fmt: skip
        self.reports.shadows._make = lambda hours: Shadow().document()

    def _source(self, now: float) -> Accounting:
        found = Accounting(cast(Any, None), Commands(), now=now)
        found.asked = self.asked
        found.__dict__ |= {"fleet": FLEET, "price_kwh": 0.5}
        found.records = cast(Any, Records())
        return found

    def _read(self, now: float) -> Recent:
        self.sacct += 1
        if self.fails:
            raise SluiceError("slurmdbd does not answer")
        return Recent(TODAY, now, {TODAY: counted(1800.0)[YESTERDAY]}, {TODAY: on_nodes(1800.0)[YESTERDAY]})

    def _page(self, name: Any) -> dict[str, Any] | None:
        self.sacct += 1
        if isinstance(name, Wanted):
            make = self.reports._each_gpu if name.each else getattr(self.reports, f"_{name.kind}")
            return make(name)
        return page_of(int(name)) if name.isdecimal() and int(name) in OWNERS else None

    def answer(self, do: str, **words: Any) -> dict[str, Any]:
        """What the daemon answers, made at once."""
        if do == "explain":
            return {"explanation": {**copy.deepcopy(EXPLANATION), "job": words["job"]}}
        desk, ask = {
            "report": (
                self.reports.pages
                if words.get("report") in ("jobs", "services") or words.get("each")
                else self.reports.reports,
                self.reports.report,
            ),
            "job-page": (self.reports.pages, self.reports.page),
            "shadow": (self.reports.shadows, self.reports.shadow),
        }[do]
        try:
            found = parse_answer(ask(words))
            if "waits" in found:
                desk.step(0.0)
                found = parse_answer(ask(words))
            return found
        except BusyError as error:
            return parse_answer(render_answer({"busy": error.what}))
