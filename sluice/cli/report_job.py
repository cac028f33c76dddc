"""`sluice report job`: one job on one page."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.report.output import duration, moment

if TYPE_CHECKING:
    from sluice.slurm.allocations import Allocation

_BAR = 20
_MOST_LINES = 64


def run(source: Any, name: str, as_json: bool, decisions: Path | None) -> None:
    """Print the page of a job."""
    from sluice.report.job_page import job_page

    def explain(job: Allocation) -> dict[str, Any]:
        return _explain(source, job, decisions)

    document = job_page(source, name, explain)
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for line in render(document, fancy=(sys.stdout.encoding or "").lower().startswith("utf")):
        click.echo(line)


def _explain(source: Any, job: Allocation, decisions: Path | None) -> dict[str, Any]:
    """From the decisions where this user may read them, else from the explain service."""
    from sluice.base.errors import SluiceError
    from sluice.explain.explain_service import ask, decisions_folder
    from sluice.explain.explanation import explain_job, parse_job
    from sluice.slurm.user import slurm_user

    name = parse_job(job.label.partition("+")[0])
    config = source.client.config()
    folder = decisions or decisions_folder(config)
    if os.access(folder, os.R_OK | os.X_OK):
        found = explain_job(folder, name, submit=job.submit, known_id=job.id)
        if found is None:
            raise SluiceError("nothing is recorded of it", remedy="jobs are recorded from level shadow on")
        return found
    hosts = [one.host for one in sorted(source.client.ping(), key=lambda one: not one.up)]
    port = int(os.environ.get("SLUICE_EXPLAIN_PORT") or 6821)
    return ask(hosts, port, name, trusted=(slurm_user(config), 0), timeout=10)


# ---- for people ----


def render(document: dict[str, Any], *, fancy: bool = True) -> list[str]:
    """The page as lines, none of which can hold anything but text."""
    clean = _clean(document)
    parts = [_head(clean), _asked(clean), _used(clean, fancy), _limits(clean), _waited(clean), _advice(clean)]
    lines: list[str] = []
    for part in parts:
        lines += ["", *part] if lines and part else part
    return lines


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {one_line(str(key)): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return one_line(value, limit=2000) if isinstance(value, str) else value


def bar(percent: float, fancy: bool = True, width: int = _BAR) -> str:
    """``[######......]``."""
    full = max(0, min(width, round(percent / 100 * width)))
    return ("█" * full + "░" * (width - full)) if fancy else "[" + "#" * full + "." * (width - full) + "]"


def _at(seconds: int | None) -> str:
    return "-" if seconds is None else moment(seconds)


def _head(page: dict[str, Any]) -> list[str]:
    job = page["job"]
    again = f", its run number {page['runs']}" if page["runs"] > 1 else ""
    lines = [
        f"Job {job['label']} \"{job['name'][:60]}\" of {job['user']} ({job['account']}), partition {job['partition']}, "
        f"QOS {job['qos'] or '-'}{again}",
        f"  {job['state']}, exit code {job['exit_code']}",
        f"  submitted {_at(job['submit'])}   started {_at(job['start'])}   ended {_at(job['end'])}",
    ]
    wait = "still waits" if job["wait_s"] is None else f"waited {duration(job['wait_s'])}"
    limit = page["asked"]["time_limit_s"]
    text = "without a limit" if page["asked"]["time_unlimited"] else f"of {duration(limit)}" if limit else ""
    return [*lines, f"  {wait}, ran {duration(job['elapsed_s'])} {text}".rstrip()]


def _tres(values: dict[str, int]) -> str:
    words = []
    for name, count in values.items():
        if name in ("billing", "energy"):
            continue
        shown = format_mib(count) if name in ("mem", "gres/shard") else str(count)
        words.append(f"{'GPU memory' if name == 'gres/shard' else name} {shown}")
    return ", ".join(words) or "-"


def _asked(page: dict[str, Any]) -> list[str]:
    granted = page["granted"]
    return [
        f"Asked    {_tres(page['asked']['tres'])}",
        f"Granted  {_tres(granted['tres'])}" + (f" on {granted['nodes']}" if granted["nodes"] else ""),
    ]


_UNKNOWN = {
    "RUNNING": "its nodes have not reported yet, or it is not yours; what it used is known when it has ended",
    "SUSPENDED": "its nodes have not reported yet, or it is not yours; what it used is known when it has ended",
    "PENDING": "it has not started",
}


def _used(page: dict[str, Any], fancy: bool) -> list[str]:
    used, host = page["used"], page["host"]
    lines = ["Used" if used is None or used.get("reported_at") is None else f"Used until {moment(used['reported_at'])}"]
    if used is None:
        unknown = _UNKNOWN.get(page["job"]["state"], "nothing was measured, or its records cannot be read here")
        lines.append(f"  GPUs: {unknown}")
    else:
        for gpu in used["gpus"][:_MOST_LINES]:
            lines += _gpu_lines(gpu, fancy)
        if len(used["gpus"]) > _MOST_LINES:
            lines.append(f"  ... and {len(used['gpus']) - _MOST_LINES} GPUs more: see --json")
        if not used["gpus"] and used["gpu_memory_peak_mib"] is not None:
            of = f" of {format_mib(used['gpu_memory_asked_mib'])}" if used["gpu_memory_asked_mib"] else ""
            lines.append(f"  GPU memory   {format_mib(used['gpu_memory_peak_mib'])}{of} at most on one GPU")
        if not used["gpus"] and used["utilisation_percent"] is not None:
            lines.append(f"  GPUs         {bar(used['utilisation_percent'], fancy)} {used['utilisation_percent']:.0f}%")
        lines += _sums(used) + _slowest(used) + _nics(used) + _bindings(used)
    if host["cpu_percent"] is not None:
        lines.append(f"  CPUs         {bar(host['cpu_percent'], fancy)} {host['cpu_percent']:.0f}%")
    if host["memory_peak_mib"] is not None:
        lines.append(f"  host memory  {format_mib(host['memory_peak_mib'])} at most in one task")
    return lines


def _gpu_lines(gpu: dict[str, Any], fancy: bool) -> list[str]:
    have = gpu["asked_mib"] if gpu["asked_mib"] is not None else gpu["total_mib"]
    share = "" if gpu["asked_mib"] is None else f", {format_mib(gpu['asked_mib'])} of {format_mib(gpu['total_mib'])}"
    lines = [f"  {gpu['node']} GPU {gpu['index']}  {gpu['model']}{share}, held by: {gpu['rung']}"]
    mean = gpu["utilisation"].get("mean")
    if mean is None:
        lines.append("    compute    not measured")
    else:
        more = ", ".join(
            f"{name} {gpu['utilisation'][name]:.0f}%" for name in ("p50", "p95", "peak") if name in gpu["utilisation"]
        )
        lines.append(f"    compute    {bar(mean, fancy)} {mean:.0f}%" + (f"  ({more})" if more else ""))
    filled = 100 * gpu["peak_mib"] / have if have else 0.0
    lines.append(f"    memory     {bar(filled, fancy)} {filled:.0f}%  (peak {format_mib(gpu['peak_mib'])})")
    percent, mib = gpu.get("now_percent"), gpu.get("now_mib")
    if percent is not None or mib is not None:
        shown = "-" if percent is None else f"{percent:.0f}%"
        lines.append(f"    now        {shown}, {'-' if mib is None else format_mib(mib)}")
    return lines


def _sums(used: dict[str, Any]) -> list[str]:
    words = []
    if used["gpu_energy_j"]:
        words.append(f"energy {_energy(used['gpu_energy_j'])}")
    if used["idle_gpu_s"]:
        words.append(f"idle {duration(used['idle_gpu_s'])} of GPU time")
    if used["throttled_s"]:
        words.append(f"throttled {duration(used['throttled_s'])}")
    if used.get("saved_at") is not None:
        words.append(f"last saved {moment(used['saved_at'])}")
    return [f"  {', '.join(words)}"] if words else []


_SLOW = {
    "throttled": "slowed down by power, heat or the hardware {value:.0f} % of the time (others: {others:.0f} %)",
    "busy": "busy {value:.0f} % of the time, and the others {others:.0f} %, as they wait for it",
    "power": "draws {value:.0f} W, and the others {others:.0f} W, as they wait for it inside kernels",
}


def _slowest(used: dict[str, Any]) -> list[str]:
    """The GPU that the others wait for."""
    one = used.get("slowest")
    if not one:
        return []
    said = _SLOW[one["why"]].format(value=one["value"], others=one["others"])
    return [f"  slowest      {one['node']} GPU {one['index']}: {said}"]


def _nics(used: dict[str, Any]) -> list[str]:
    """What the job's network interfaces counted."""
    found = used.get("nics") or []
    lines = [f"  network      {one['node']} {one['nic']}: {_nic(one)}" for one in found[:_MOST_LINES]]
    if len(found) > _MOST_LINES:
        lines.append(f"    ... and {len(found) - _MOST_LINES} interfaces more: see --json")
    return lines


def _nic(one: dict[str, Any]) -> str:
    counts = dict(one["counts"])
    words = [
        f"{format_mib(counts.pop(name) >> 20)} {shown}"
        for name, shown in (("transmit_bytes", "sent"), ("receive_bytes", "received"))
        if name in counts
    ]
    words += [f"{name.replace('_', ' ')} {count}" for name, count in sorted(counts.items())]
    shared = "shared with other jobs" if one["shared"] else ""
    alone = f"counted while it was not: {', '.join(words)}" if words and shared else ", ".join(words)
    return "; ".join(filter(None, (shared, alone))) or "nothing counted yet"


def _bindings(used: dict[str, Any]) -> list[str]:
    """Tasks that were bound far from their GPUs, and what to do about it; one line where there are none."""
    found = used.get("bindings") or []
    far = [one for one in found if not one["agrees"]]
    huge = _huge(found)
    if not far:
        near = ["  binding      the CPUs of all tasks are near their GPUs, and so may be their memory"] if found else []
        return near + huge
    lines = ["  binding      tasks are not near their GPUs, which makes copies to and from these slower:"]
    lines += [
        f"    {one['node']} step {one['step']}, {one['tasks']} {'task' if one['tasks'] == 1 else 'tasks'}: {_far(one)} "
        f"(NUMA nodes: GPUs {one['gpu_nodes']}, CPUs {one['cpu_nodes']}, memory {one['memory_nodes']})"
        for one in far[:_MOST_LINES]
    ]
    if len(far) > _MOST_LINES:
        lines.append(f"    ... and {len(far) - _MOST_LINES} more: see --json")
    return [*lines, "    try --gres-flags=enforce-binding, or srun's --cpu-bind and --mem-bind", *huge]


def _huge(bindings: list[dict[str, Any]]) -> list[str]:
    """Huge pages of the nodes, where there are any: those near the GPUs, and the others."""
    sizes = {one["node"]: (one.get("huge_mib") or 0, one.get("huge_far_mib") or 0) for one in bindings}
    return [
        f"  huge pages   {node}: {format_mib(near)} on the GPUs' NUMA nodes, {format_mib(far)} on others"
        for node, (near, far) in list(sizes.items())[:_MOST_LINES]
        if near or far
    ]


def _far(one: dict[str, Any]) -> str:
    """What of a binding that does not agree."""
    far = one["cpus"] - one["cpus_near"]
    if not far:
        return "the memory is on other NUMA nodes than the GPUs"
    return f"{far} of {one['cpus']} CPUs {'is' if far == 1 else 'are'} on other NUMA nodes than the GPUs"


def _energy(joules: float) -> str:
    return f"{joules / 3_600_000:.3f} kWh" if joules >= 360_000 else f"{joules / 3600:.2f} Wh"


_ACTIONS = {
    "refuse": "an allocation was refused at the limit of GPU memory",
    "warn": "warned: close to the limit of GPU memory",
    "end": "ended: over the limit of GPU memory",
    "stray": "a process outside of the job's limits was ended",
}


def _limits(page: dict[str, Any]) -> list[str]:
    lines = []
    refused = (page["used"] or {}).get("refused", 0)
    for event in page["limits_hit"][:_MOST_LINES]:
        at = moment(event["time"]) if isinstance(event.get("time"), int | float) else "-"
        lines.append(f"  {at} {event.get('node', '')} {_ACTIONS.get(event.get('action', ''), event.get('action', ''))}")
    if refused:
        lines.append(f"  {refused} allocations beyond the limit were refused")
    if page["job"]["state"] == "TIMEOUT":
        lines.append("  ended at its time limit")
    if page["job"]["state"] == "OUT_OF_MEMORY":
        lines.append("  ended: out of host memory")
    return ["Limits hit", *lines] if lines else ["Limits hit  none that is known"]


def _waited(page: dict[str, Any]) -> list[str]:
    from sluice.base.errors import SluiceError
    from sluice.cli.explain import render as render_explanation

    waited = page["waited"]
    lines = ["Why it waited"]
    if waited["slurm_reason"]:
        lines.append(f"  Slurm's last reason: {waited['slurm_reason']}")
    if "explanation" in waited:
        try:
            lines += [f"  {line}".rstrip() for line in render_explanation(waited["explanation"])[1:] if line]
        except SluiceError as error:
            lines.append(f"  {error}")
    else:
        lines.append(f"  no decision: {waited['not_explained']}")
    return lines


def _advice(page: dict[str, Any]) -> list[str]:
    advice = page["advice"]
    if advice is None:
        return []
    lines = ["Next time"]
    lines += [f"  - {reason}" for reason in advice["because"]] or ["  ask for the same: nothing speaks against it"]
    return [*lines, f"  {advice['sbatch']}"]
