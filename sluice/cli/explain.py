"""`sluice explain`: why a job has its priority and its nodes, or why it still waits."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from sluice.base.errors import SluiceError, UsageError
from sluice.base.hostlist import fold
from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.cli.decisions_option import decisions_option

DEFAULT_PORT = 6821
_MOST_NODES = 16


@click.command("explain")
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    envvar="SLUICE_EXPLAIN_HOST",
    metavar="HOST",
    help="Where the explain service is; may be given several times. Default: the controllers.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORT,
    envvar="SLUICE_EXPLAIN_PORT",
    show_default=True,
    metavar="PORT",
    help="The explain service's port.",
)
@decisions_option("Read this folder of decisions instead of asking the service; for SlurmUser and root.")
@click.option("--timeout", type=click.FloatRange(0.1, 600), default=60.0, show_default=True, help="Seconds to wait.")
def command(job: str, as_json: bool, hosts: tuple[str, ...], port: int, decisions: Path | None, timeout: float) -> None:
    """Why JOB (17, or 17_3 of an array) has its priority and its nodes, or why it still waits."""
    from sluice.explain.explanation import explain_job, parse_job

    name = parse_job(job)
    document: dict[str, Any] | None
    if decisions is not None:
        document = explain_job(decisions, name)
        if document is None:
            raise SluiceError(
                f"job {name}: nothing is recorded of it in {decisions}",
                remedy="check the job's number; jobs are recorded from level shadow on",
            )
    else:
        from sluice.explain.explain_service import ask, open_site
        from sluice.slurm.user import slurm_user

        site = open_site()
        named = hosts or tuple(controller.host for controller in _up_first(site.client.ping()))
        document = ask(named, port, name, trusted=(slurm_user(site.config()), 0), timeout=timeout)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        for line in render(document):
            click.echo(line)


def _up_first(controllers: list[Any]) -> list[Any]:
    return sorted(controllers, key=lambda controller: not controller.up)


# ---- for people ----


def render(document: dict[str, Any]) -> list[str]:
    """The explanation as lines of text. Raises UsageError where it is not what this version knows."""
    clean = _printable(document)
    try:
        lines = _title(clean) + _priority(clean)
        lines += _started(clean) if "start" in clean else _waiting(clean)
        clean["preflights"] = [one["text"] for one in clean.get("preflights", [])]
        lines += _checkpoint(clean)
        return lines + [line for part in _SENTENCES for line in _sentences(clean, part)] + _withheld(clean)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the explanation is not as this sluice knows it: {error!r}", remedy="see it with --json"
        ) from error


def _printable(value: Any) -> Any:
    """The same with texts that are fit for a terminal."""
    if isinstance(value, dict):
        return {key: _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return one_line(value, limit=300) if isinstance(value, str) else value


def _moment(seconds: float | None) -> str:
    return "unknown" if not seconds else datetime.fromtimestamp(seconds).strftime("%Y-%m-%dT%H:%M:%S")


def _duration(seconds: float) -> str:
    minutes, days = int(seconds) // 60, int(seconds) // 86400
    if seconds < 120:
        return f"{int(seconds)} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if days < 3 else f"{days} days"


def _title(document: dict[str, Any]) -> list[str]:
    slurm = document.get("slurm", {})
    words, refused = [f"Job {document['job']}"], list[str]()
    if slurm:
        words.append(
            f"of {slurm['user']} ({slurm['account']}), partition {slurm['partition']}: {slurm['state'].lower()}"
        )
        if slurm["state"] == "PENDING" and slurm["reason"] not in ("", "None"):
            words.append(f"({slurm['reason']})")
        if slurm.get("refused") and slurm["state"] not in ("RUNNING", "COMPLETED"):
            refused = ["", f"Refused {slurm['refused']}"]
            if slurm["state"] == "PENDING":
                refused.append(f"  It waits until it is released: scontrol release {slurm['job_id']}")
    elif "account" in document:
        words.append(f"of uid {document['uid']} ({document['account']}), partition {document['partition']}")
    return [" ".join(words), *refused]


def _priority(document: dict[str, Any]) -> list[str]:
    order, slurm = document.get("order"), document.get("slurm", {})
    if order is None:
        unknown = "Sluice's order gives it no site factor, or had not come to it before it started"
        return ["", f"Priority {slurm['priority']}: {unknown}"] if slurm else []
    lines = ["", f"Priority{_total(slurm)} as of {_moment(order['as_of'])}, place {order['place']} in Sluice's order"]
    if "operators_site_factor" in order:
        kept, ours = order["operators_site_factor"], order["site_factor"]
        lines.append(f"  {kept:>10}  SITE: site factor set by an operator: {kept} (ours would be {ours}):")
    else:
        lines.append(f"  {order['site_factor']:>10}  SITE, Sluice's part:")
    if order["starving"]:
        lines.append("              waited longer than the starvation bound: goes before all that did not")
    for term in order["terms"]:
        lines.append(f"  {term['value']:>16.1f}  {term['name']} (of {term['weight']}){_because(term['name'], order)}")
    for name, value in order["slurm_terms"].items():
        lines.append(f"  {value:>10}  Slurm's {name}")
    return lines


def _total(slurm: dict[str, Any]) -> str:
    return f" {slurm['priority']}" if slurm.get("state") == "PENDING" else ""


def _because(term: str, order: dict[str, Any]) -> str:
    tenant = order.get("tenant")
    if term == "fair-share" and tenant:
        shares = f"{tenant['shares']} share{'' if tenant['shares'] == 1 else 's'}"
        return f": {tenant['account']} has {shares} and used {tenant['gpu_hours']:g} GPU-hours lately"
    if term == "deadline":
        if order["deadline"] == "feasible":
            return f": {_duration(max(order['laxity_s'], 0))} to spare"
        return ": no deadline" if order["deadline"] == "none" else ": cannot be met any more"
    if term in ("service", "time"):
        return f": expected to run {_duration(order['predicted_run_s'])} on {order['gpus']} GPUs"
    return f": {order['gpus']} GPUs" if term == "size" else ""


def _share(part: dict[str, Any]) -> str:
    amounts = [format_mib(part["gpu_memory_mib"])] if part["gpu_memory_mib"] else []
    if part.get("gpu_compute_percent"):
        amounts.append(f"{part['gpu_compute_percent']} % of the compute")
    return f" ({', '.join(amounts)} of each)" if amounts else ""


def _where(parts: list[dict[str, Any]]) -> list[str]:
    lines = []
    for part in parts[:_MOST_NODES]:
        words = []
        if part["gpus"]:
            words.append(f"GPU {','.join(map(str, part['gpus']))}{_share(part)}")
        if part.get("nics"):
            words.append(f"NIC {','.join(map(str, part['nics']))}")
        if part["cpus"] or part["host_memory_mib"] or not words:
            words += [f"{part['cpus']:g} CPUs", f"{format_mib(part['host_memory_mib'])} of memory"]
        lines.append(f"  {part['node']}: {', '.join(words)}")
    if len(parts) > _MOST_NODES:
        lines.append(f"  and {len(parts) - _MOST_NODES} more nodes")
    return lines


def _reasons(of: dict[str, Any]) -> list[str]:
    return [f"  {entry['nodes']:>8}  {entry['reason']}" for entry in of.get("nodes_by_reason", [])]


def _far_from_nics(of: dict[str, Any]) -> list[str]:
    lines = []
    for entry in of.get("gpus_without_nic", []):
        some = "1 GPU free" if entry["gpus"] == 1 else f"{entry['gpus']} GPUs free"
        lines.append(f"  {some} on {entry['node']}, no free NIC near {'it' if entry['gpus'] == 1 else 'them'}")
    return lines


def _instead(start: dict[str, Any], choice: dict[str, Any] | None) -> str:
    if choice is None or {part["node"] for part in start["parts"]} != {part["node"] for part in choice["parts"]}:
        return "These are not the nodes and GPUs that Sluice chose."
    return "The policy chose other GPUs of these nodes; these are nearer to the job's NICs, or what stock Slurm gave."


def _roles(roles: list[dict[str, Any]]) -> list[str]:
    """Of each role the nodes that give it the same GPUs, together."""
    lines = []
    for role in roles:
        nodes: dict[str, list[str]] = {}
        for part in role["parts"]:
            nodes.setdefault(",".join(map(str, part["gpus"])), []).append(part["node"])
        where = [f"{fold(names)} GPU {gpus}" for gpus, names in nodes.items()]
        more = f", and {len(where) - _MOST_NODES} more" if len(where) > _MOST_NODES else ""
        lines.append(f"  role {role['name']}: {', '.join(where[:_MOST_NODES])}{more}")
    return lines


def _started(document: dict[str, Any]) -> list[str]:
    start, decision = document["start"], document.get("decision")
    lines = ["", f"Started {_moment(start['at'])} on", *_where(start["parts"]), *_roles(start.get("roles", []))]
    if decision is None:
        return [*lines, "Stock Slurm chose; Sluice was not asked, or its decision is gone."]
    lines += ["", f"Why there: {decision['outcome']} (policy {decision['policy']})"]
    if decision["planned"]:
        return [*lines, "  The place is the backfill planner's: it was reserved for this job."]
    choice = decision.get("choice")
    if start.get("as_chosen") is False:
        lines.append(f"  {_instead(start, choice)}")
    if choice is not None:
        lines.append(f"  {decision['nodes_that_fit']:>8}  of {decision['nodes']} nodes could take it; the others:")
        lines += _reasons(decision) + _far_from_nics(decision)
        lines.append(f"  score {choice['score']}, of which")
        lines += [f"  {term['value']:>8}  {term['name'].replace('_', ' ')}" for term in choice["score_terms"]]
        if choice["next_best"]:
            lines.append(f"  next best: {choice['next_best']['node']}, score {choice['next_best']['score']}")
    return lines


def _waiting(document: dict[str, Any]) -> list[str]:
    waiting, decision, slurm = document.get("waiting", {}), document.get("decision"), document.get("slurm", {})
    if slurm and slurm["state"] != "PENDING":
        return ["", "Nothing is recorded of its start: it needed no decision of Sluice's, or the decision is gone."]
    lines = [""]
    if decision is not None:
        lines.append(f"Last asked for {_moment(decision['at'])}: {decision['outcome']}")
    if waiting.get("fits_now"):
        lines.append("  A place for it is free; it waits for its turn, or for a start that is reserved for others.")
    elif "would_start_now" in waiting:
        never = "Could never start here" if waiting["never"] else "Why it waits"
        counted = f"of {waiting['nodes']} nodes" if "nodes" in waiting else "no place for it"
        lines.append(f"{never}, as of {_moment(waiting['as_of'])}: {counted}")
        lines += _reasons(waiting) + _far_from_nics(waiting)
        if waiting.get("nodes_that_fit"):
            lines.append(f"  {waiting['nodes_that_fit']:>8}  could take a part of it")
        lines += _smaller(waiting["would_start_now"])
    elif decision is None and not (waiting.get("plan") or {}).get("reason"):
        lines.append("Sluice was not asked for a place yet: the job is held, depends on others, or is not in turn.")
    return lines + _expected(waiting.get("plan"), slurm)


def _checkpoint(document: dict[str, Any]) -> list[str]:
    """Whether the job can be saved, and what it would lose now."""
    found = document.get("checkpoint")
    if found is None:
        return []
    if found["mode"] == "no":
        return [
            "",
            "Cannot be saved: it does not ask for signals (--checkpoint=app); what ends it costs all of its work.",
        ]
    if found["mode"] == "system" and found.get("cannot"):
        return ["", f"Cannot be saved as it runs: {found['cannot']}. What ends it costs all of its work."]
    if found["mode"] == "system":
        limit = f"up to {found['limit_mib']} MiB of memory, without connections to others or steps"
        alone = "that node alone: elsewhere it begins again from its start"
        where = "any node that is like it" if found.get("elsewhere") else alone
        return [
            "",
            f"Its node saves it as it runs before it is ended (--checkpoint=system): {limit}.",
            f"  It goes on on {where}.",
        ]
    lines = ["", f"Saves its state when signalled ({found['signal']}), {_how_often(found)}"]
    if found["saved"] is not None:
        lines.append(
            f"  Last saved {_moment(found['saved'])}, answered {found['answers']} of {found['signals']} signals."
        )
    elif found["signals"]:
        lines.append(f"  It has not answered {found['signals']} signals: it is not known whether it can be saved.")
    elif "problem" in found:
        lines.append(f"  What came of its signals cannot be read: {found['problem']}")
    else:
        lines.append("  It has had no signal yet: it is not known whether it can be saved.")
    return lines


def _how_often(found: dict[str, Any]) -> str:
    if found["interval_s"] is None:
        return "every so often, once it runs" if found["daly"] else "before it is ended only"
    every = f"every {_duration(found['interval_s'])}"
    if not found["daly"]:
        return every
    if found["save_s"] is None:
        return f"every {_duration(found['interval_s'])} until a save has been measured"
    failing = _duration(found["mttf_s"])
    return f"{every} by Daly's formula: a save takes {found['save_s']:g} s, and one of its nodes fails every {failing}"


_SENTENCES = ("moves", "preflights", "pools")


def _sentences(document: dict[str, Any], part: str) -> list[str]:
    words = [
        f"It {one}" if one.startswith(("waits", "is ", "was ")) else f"{one[:1].upper()}{one[1:]}"
        for one in document.get(part, [])
    ]
    return ["", *words] if words else []


_PRIVATE = {"usage": "shares and usage of accounts", "nodes": "the nodes' states and scores"}


def _withheld(document: dict[str, Any]) -> list[str]:
    words = document.get("private", [])
    kept = " and ".join(_PRIVATE.get(word, word) for word in words)
    return ["", f"Not shown, by this site's PrivateData={','.join(words)}: {kept}"] if words else []


_SMALLER = {
    "nodes": "on {value} node{s}",
    "gpus": "with {value} GPU{s}",
    "gpu_compute_percent": "with {value} % of each GPU's compute",
    "nics": "with {value} NIC{s} a node",
    "cpus": "with {value} CPU{s} a node",
    "gpu_types": "with any type of GPU",
    "exclusive": "without --exclusive",
    "segment": "without --segment",
    "one_switch": "with nodes of several leaf switches or blocks, as after the TIME of --fabric or --switches",
}


def _smaller(smaller: list[dict[str, Any]]) -> list[str]:
    if not smaller:
        return ["  No smaller request would start now."]
    lines = ["  It would start now"]
    for change in smaller:
        what, value = change["what"], change["value"]
        if what in ("gpu_memory_mib", "host_memory_mib"):
            of = "of each GPU" if what == "gpu_memory_mib" else "of host memory a node"
            lines.append(f"    with {format_mib(value)} {of}")
        else:
            words = _SMALLER.get(what, f"without {what.replace('_', ' ')} required")
            lines.append("    " + words.format(value=value, s="" if value == 1 else "s"))
    return lines


def _expected(plan: dict[str, Any] | None, slurm: dict[str, Any]) -> list[str]:
    if plan is not None and plan["expected_start"]:
        lines = [f"Expected start: {_moment(plan['expected_start'])}, as planned {_moment(plan['planned_at'])}"]
        return lines + ([f"  {plan['reason']}"] if plan["reason"] else [])
    if plan is not None:
        return [f"No start is planned yet{': ' + plan['reason'] if plan['reason'] else ''}"]
    if slurm.get("start_time"):
        return [f"Expected start by Slurm's own estimate: {_moment(slurm['start_time'])}"]
    return []
