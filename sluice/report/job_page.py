"""Everything that is known of one job, for the page that people put into a ticket."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sluice.base.errors import SluiceError, UsageError
from sluice.base.text import one_line
from sluice.report.advice import HostUse, advise
from sluice.report.collect import Source
from sluice.report.fleet import hosts
from sluice.report.summaries import GpuUse, JobUse
from sluice.slurm.allocations import Allocation, stream, tres_of
from sluice.slurm.answers import UNLIMITED

SCHEMA_VERSION = 1
_NUMBER = re.compile(r"node (\d{1,9})")  # a node that the decisions do not name
_SETTLED_S = 600
Explain = Callable[[Allocation], dict[str, Any]]


class NoJobError(SluiceError):
    """The accounting has no such job."""


def job_page(source: Source, name: str, explain: Explain) -> dict[str, Any]:
    """The document of a job as the caller may see it. `explain` gives the decisions' answer, or raises.

    Raises UsageError for what is no job's number or names several jobs, NoJobError where there is no such job.
    """
    runs = _runs(source, name)
    job = runs[-1]
    use = source.use_of(job)
    host, reason = _host(source, job)
    node = source.fleet.of_job(job.nodes)
    settled = job.end is not None or job.elapsed_s >= _SETTLED_S  # before, what it used says little
    advice = advise(job, use if settled else None, host, node) if job.start is not None else None
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "job": _facts(job),
        "runs": len(runs),
        "asked": _asked(job),
        "granted": {"nodes": job.nodes, "node_count": job.node_count, "tres": dict(tres_of(job.allocated))},
        "used": None if use is None else _used(use),
        "host": {"cpu_s": host.cpu_s, "cpu_percent": _cpu_percent(job, host), "memory_peak_mib": host.memory_mib},
        "limits_hit": [] if use is None else list(use.events),
        "waited": _waited(job, reason, explain),
        "advice": None if advice is None else {"sbatch": advice.line, "because": advice.because},
    }
    return document


def _runs(source: Source, name: str) -> list[Allocation]:
    """All runs of the job, the oldest first."""
    if not re.fullmatch(r"\d{1,10}([_+]\d{1,10})?", name, re.ASCII):
        raise UsageError(f"job {name[:40]!r}: not a job's number", remedy="write 17, 17_3 of an array, or 17+1")
    # Without a time sacct looks at today only, for a job's number at all times.
    found = list(stream(source.commands, ids=[name], names=True))
    exact = [job for job in found if job.label == name or str(job.id) == name]
    if not exact and found:
        labels = ", ".join(dict.fromkeys(one_line(job.label, limit=40) for job in found[:8]))
        raise UsageError(f"job {name}: {len(found)} jobs", remedy=f"name one of them: {labels}")
    if not exact:
        raise NoJobError(f"job {name}: not in the accounting, or you may not see it", remedy="see sacct -a")
    return sorted(exact, key=lambda job: (job.submit or 0, job.start or 1 << 60))


def _facts(job: Allocation) -> dict[str, Any]:
    return {
        "id": job.id, "label": job.label, "name": job.name, "user": job.user, "account": job.account, "qos": job.qos,
        "partition": job.partition, "state": job.state, "exit_code": job.exit_code, "submit": job.submit,
        "eligible": job.eligible, "start": job.start, "end": job.end, "wait_s": job.wait_s,
        "elapsed_s": job.elapsed_s,
    }  # fmt: skip


def _asked(job: Allocation) -> dict[str, Any]:
    return {
        "tres": dict(tres_of(job.requested)),
        "time_limit_s": None if job.limit_s in (None, UNLIMITED) else job.limit_s,
        "time_unlimited": job.limit_s == UNLIMITED,
    }


def _used(use: JobUse) -> dict[str, Any]:
    return {
        "gpus": [_gpu(gpu) for gpu in use.gpus],
        "utilisation_percent": 100 * use.busy_s / use.device_s if use.busy_s is not None and use.device_s else None,
        "gpu_memory_asked_mib": use.asked_mib,
        "gpu_memory_peak_mib": use.peak_mib,
        "idle_gpu_s": use.idle_s,
        "gpu_energy_j": use.energy_j,
        "throttled_s": use.throttled_s,
        "refused": use.refused,
        "rung": use.rung,
        "reported_at": use.reported_at,
        "saved_at": use.saved_at,
        "bindings": list(use.bindings),
        "nics": list(use.nics),
        "slowest": None if use.slowest is None else asdict(use.slowest),
        "told": use.reported_at,  # its name until 0.1.0
    }


def _gpu(gpu: GpuUse) -> dict[str, Any]:
    return {name: dict(value) if name == "utilisation" else value for name, value in asdict(gpu).items()}


def _cpu_percent(job: Allocation, host: HostUse) -> float | None:
    cpus = tres_of(job.allocated).get("cpu", 0)
    return 100 * host.cpu_s / (cpus * job.elapsed_s) if host.cpu_s is not None and cpus and job.elapsed_s else None


def _host(source: Source, job: Allocation) -> tuple[HostUse, str]:
    """What sacct's steps say of CPU time and memory, and Slurm's last reason for the job's waiting."""
    try:
        said = source.commands.output(
            "sacct", "--noheader", "--parsable2", f"--jobs={job.id}", "--format=JobIDRaw,TotalCPU,MaxRSS,Reason"
        )
    except SluiceError:
        return HostUse(), ""
    cpu: list[float] = []
    memory: list[int] = []
    reason = ""
    for line in said.splitlines():
        number, total, rss, *rest = [*line.split("|"), "", "", ""]
        if number == str(job.id):
            reason = rest[0]
        if "." not in number or number.partition(".")[0] != str(job.id):
            continue
        seconds, mib = cpu_seconds(total), _mib(rss)
        if seconds is not None and rss:  # steps that nothing was gathered of have an empty MaxRSS
            cpu.append(seconds)
        if mib is not None:
            memory.append(mib)
    return HostUse(sum(cpu) if cpu else None, max(memory, default=None)), reason


def cpu_seconds(text: str) -> float | None:
    """sacct's ``[days-[hours:]]minutes:seconds.fraction``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        return None
    return ((int(match[1] or 0) * 24 + int(match[2] or 0)) * 60 + int(match[3])) * 60 + float(match[4])


def _mib(text: str) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    if match is None:
        return None
    factor = {"": 1 / 1024**2, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[match[2]]
    return int(float(match[1]) * factor)


def named(explanation: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """The explanation with the job's nodes by their names, also where the decisions have only numbers.

    Files that hold no decision of the core know no names. Slurm numbers and lists nodes in one order; of several
    nodes with unlike parts the names are left out rather than guessed, as that order is the site's to change.
    """
    start: dict[str, Any] = explanation.get("start") or {}
    parts = start.get("parts", [])
    numbers = sorted({int(m[1]) for part in parts if (m := _NUMBER.fullmatch(str(part.get("node"))))})
    alike = len({str({**part, "node": ""}) for part in parts}) == 1 and len(parts) == len(numbers)
    if not numbers or len(numbers) != len(nodes) or not (alike or len(numbers) == 1):
        return explanation
    names = {f"node {number}": name for number, name in zip(numbers, nodes, strict=True)}

    def shown(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**part, "node": names.get(str(part.get("node")), part.get("node"))} for part in of]

    roles = [{**role, "parts": shown(role.get("parts", []))} for role in start.get("roles", [])]
    start = {**start, "parts": shown(parts)} | ({"roles": roles} if roles else {})
    return {**explanation, "start": start}


def _waited(job: Allocation, reason: str, explain: Explain) -> dict[str, Any]:
    shown = "" if reason in ("None", "") else reason
    waited: dict[str, Any] = {"seconds": job.wait_s, "slurm_reason": shown}
    try:
        waited["explanation"] = named(explain(job), hosts(job.nodes))
    except (SluiceError, OSError) as error:
        waited["not_explained"] = one_line(str(error))
    return waited
