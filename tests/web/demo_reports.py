# ruff: noqa: E501 - tables
"""What the controllers' daemon would report of a demo: pages of jobs, reports of days, use over time."""

from __future__ import annotations

import math
import random
from datetime import date, timedelta
from typing import Any

from sluice.web.series import SERVICE_STEP_S, Series, ServiceSeries
from sluice.web.store import Store
from tests.web.demo_site import Demo

_HOUR = 3600


def job_page(demo: Demo, name: str) -> dict[str, Any] | None:
    """A job's page, as `sluice report job` has it."""
    job = demo.jobs.get(int(name)) if name.isdecimal() else None
    if job is None:
        return None
    gpus, ran = job.tres["gres/gpu"], job.start_time is not None and job.state != "PENDING"
    end = job.end_time or demo.now
    seconds = end - job.start_time if ran and job.start_time else 0
    used = {
        "gpus": [
            {"node": "gpu01", "index": at, "uuid": f"GPU-{at}", "model": "NVIDIA H100 80GB HBM3", "total_mib": 81559,
             "asked_mib": None, "limit_mib": None, "rung": "", "peak_mib": 21400 + 700 * at, "refused": 0,
             "seconds": float(seconds), "utilisation": {"mean": 41.0, "p50": 38.0, "p95": 88.0, "peak": 99.0},
             "memory_mean_mib": 19000.0, "energy_j": 300.0 * seconds, "idle_s": 0.2 * seconds, "throttled_s": 0.0,
             "errors": 0, "now_percent": None, "now_mib": None}
            for at in range(min(gpus, 8))
        ],
        "utilisation_percent": 41.0, "gpu_memory_asked_mib": None, "gpu_memory_peak_mib": 26300,
        "idle_gpu_s": 0.2 * seconds, "gpu_energy_j": 300.0 * seconds * gpus, "throttled_s": 0.0, "refused": 0, "rung": "",
        "reported_at": demo.now,
    }  # fmt: skip
    nothing = {"cpu_s": None, "cpu_percent": None, "memory_peak_mib": None}
    host = {"cpu_s": 3.0 * seconds, "cpu_percent": 37.0, "memory_peak_mib": 41000}
    failed = job.state in ("FAILED", "OUT_OF_MEMORY")
    advice = {
        "sbatch": f"sbatch --account={job.account} --partition=main --gres=gpu:h100:{max(1, gpus // 2)} --mem=48G "
                  "--time=05:00:00 job.sh",
        "because": [f"it used 41 percent of its {gpus} GPUs: half of them would do", "it used 25.7 GiB of 79.6 GiB of GPU memory"],
    }  # fmt: skip
    return {
        "schema_version": 1,
        "job": {
            "id": job.id, "label": str(job.id), "name": job.name, "user": job.user, "account": job.account, "qos": job.qos,
            "partition": job.partition, "state": job.state, "exit_code": "1:0" if failed else "0:0",
            "submit": job.submit_time, "eligible": job.eligible_time, "start": job.start_time if ran else None,
            "end": job.end_time, "wait_s": None, "elapsed_s": int(seconds),
        },
        "runs": 1,
        "asked": {"tres": dict(job.tres), "time_limit_s": job.time_limit_s, "time_unlimited": False},
        "granted": {"nodes": job.nodes, "node_count": job.node_count, "tres": dict(job.tres)},
        "used": used if ran else None,
        "host": host if ran else nothing,
        "limits_hit": [{"node": "gpu01", "time": end - 60, "action": "refuse"}] if failed else [],
        "waited": {"seconds": None, "slurm_reason": job.reason, "explanation": None, "not_explained": None},
        "advice": advice if ran else None,
    }  # fmt: skip


def services_report(demo: Demo, words: dict[str, Any]) -> dict[str, Any]:
    """What requests used: by day, by service, or by service and caller."""
    choose, by = random.Random("services"), words["by"] or ["service", "account"]
    first = date.fromisoformat(words["from"])
    days = (date.fromisoformat(words["until"]) - first).days + 1
    lines: list[dict[str, Any]] = [{"day": str(first + timedelta(days=at))} for at in range(days)]
    if "day" not in by:
        names = [name for name in demo.services() if name in (words["services"] or [name])]
        callers = ("language", "physics") if "account" in by else ("",)
        lines = [{"service": name, **({"account": one} if one else {})} for name in names for one in callers]
    rows = []
    for line in lines if demo.gpus else ():
        requests = choose.randrange(2000, 90_000)
        failed, refused, expired = (choose.randrange(requests // 90) for _ in range(3))
        rows.append({
            **line, "requests": requests, "answered": requests - failed - refused - expired, "failed": failed, "refused": refused,
            "expired": expired, "cancelled": 3, "resumed": 1, "tokens": requests * 600, "prompt_tokens": requests * 400,
            "cached_tokens": requests * 90, "completion_tokens": requests * 200, "first_token_p50_ms": choose.randrange(60, 300),
            "first_token_p95_ms": choose.randrange(300, 4000), "first_token_p99_ms": 9000, "gpu_s": requests * 1.4,
            "shared_gpu_s": None, "tokens_per_gpu_hour": choose.randrange(800_000, 2_000_000),
        })  # fmt: skip
    head = {"start": int(demo.now - days * 86400), "end": int(demo.now), "made": int(demo.now)}
    return {"schema_version": 1, "report": "services", **head, "rows": rows, "total": len(rows)}


def report(demo: Demo, words: dict[str, Any]) -> dict[str, Any]:
    """A report of days: made up, and the same every time."""
    if words["report"] == "services":
        return services_report(demo, words)
    kind, choose = words["report"], random.Random(str(words))
    days = (date.fromisoformat(words["until"]) - date.fromisoformat(words["from"])).days + 1
    use: dict[tuple[str, ...], float] = {}
    for job in demo.jobs.values():
        name = {"users": (job.account, job.user), "tenants": (job.account,)}.get(kind, (job.account,))
        accounts = words.get("accounts")
        wanted = not accounts or job.account in accounts
        if wanted:
            use[name] = use.get(name, 0) + job.tres["gres/gpu"] * choose.randrange(2, 9) * _HOUR
    rows = []
    for name, gpu_s in sorted(use.items()):
        row: dict[str, Any] = {"account": name[0], "jobs": choose.randrange(2, 90), "gpu_s": gpu_s * days / 4}
        if kind == "users":
            row["user"] = name[1]
        row |= {
            "cpu_s": gpu_s * 8, "wait_p50_s": choose.randrange(60, 4000), "wait_p95_s": choose.randrange(4000, 40000),
            "utilisation_percent": choose.uniform(20, 95), "failed": choose.randrange(9), "wasted_gpu_s": gpu_s / 9,
            "efficiency_percent": choose.uniform(20, 95), "idle_gpu_s": gpu_s / 7, "gpu_energy_j": gpu_s * 400,
        }  # fmt: skip
        rows.append(row)
    return {
        "schema_version": 1, "stale_since": None, "problem": "", "report": kind, "start": int(demo.now - days * 86400),
        "end": int(demo.now), "made": int(demo.now), "jain_index": 0.83 if kind == "fairness" else None, "rows": rows,
        "total": len(rows), "recent_at": demo.now, "missing": [],
    }  # fmt: skip


def fill_series(demo: Demo, store: Store) -> None:
    """Two hours of the GPUs' use, and a day of the services'."""
    choose = random.Random(1)
    rows = store.rows("gpus")
    store.series = Series()
    for step in range(60 if demo.gpus < 100 else 4, 0, -1):
        now = {
            key: row if row["utilisation_percent"] is None or row["use"] == "free" else {
                **row, "utilisation_percent": max(0.0, min(100.0, row["utilisation_percent"] + choose.uniform(-18, 6)))
            }
            for key, row in rows.items()
        }  # fmt: skip
        store.series.note(demo.now - 120 * step, now)
    store.service_series = ServiceSeries()
    for step in range(720, 0, -1):
        wave = (1 - math.cos(step / 115)) / 2
        store.service_series.note(demo.now - SERVICE_STEP_S * step, {
            name: row if row["tokens_per_minute"] is None else {
                **row, "ready": round(row["ready"] * wave), "waiting": int(wave * choose.randrange(9)) if row["ready"] else 0,
                "in_flight": int(row["in_flight"] * wave * choose.uniform(0.8, 1.2)),
                "tokens_per_minute": int(row["tokens_per_minute"] * wave * choose.uniform(0.85, 1.15)),
            }
            for name, row in store.rows("services").items()
        })  # fmt: skip


def profile(job: int, kernel: str) -> dict[str, Any]:
    """What `sluice profile summary --json` prints."""
    rank = {
        "rank": 0, "node": "gpu01", "pid": 4711, "program": kernel, "compute_seconds": 8.1, "compute_percent": 81.0,
        "waiting_percent": 12.5,
    }  # fmt: skip
    return {
        "schema_version": 1, "job_id": job, "start": 1_790_000_000.0, "seconds": 10.0, "nodes": 1, "processes": 2, "gpus": 2,
        "busy_percent": 81.0, "copies_percent": 20.0, "idle_percent": 12.0, "collectives_percent": 10.0,
        "copies_overlapped_percent": 65.0, "collectives_overlapped_percent": 0.0,
        "kernels": [{"name": kernel, "calls": 81_000, "seconds": 8.1, "percent": 100.0, "mean_us": 100.0}],
        "copies": [{"direction": "host (pinned) to device", "count": 9, "bytes": 1 << 30, "seconds": 2.0, "gb_per_s": 0.537}],
        "samples": 0, "functions": [],
        "slowest_over_median_percent": 4.2, "ranks": [rank, {**rank, "rank": 1}], "lost_events": 7, "lost_because": ["budget"],
        "cost_percent": 0.9, "clocks": [{"node": "gpu01", "ahead_ms": 0.1, "uncertainty_us": 41.0}], "notes": [kernel],
    }  # fmt: skip
