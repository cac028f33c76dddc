"""Why a job waits, or has its place, and whether it can be saved: an explanation in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup, escape

from sluice.web.pages.show import Ui, visible

_SMALLER = {
    "nodes": "nodes: {value}", "gpus": "GPUs: {value}", "gpu_compute_percent": "compute of each GPU: {value} %",
    "cpus": "CPUs a node: {value}", "gpu_types": "any class of GPU", "exclusive": "not exclusive",
    "gpu_memory_mib": "memory of each GPU: {value}", "host_memory_mib": "memory a node: {value}",
}  # fmt: skip
_PRIVATE = {"usage": "shares and use of accounts", "nodes": "the nodes' states and scores"}


def why(ui: Ui, document: Mapping[str, Any] | None) -> list[Markup]:
    """Sentences, the most important first; none where nothing is known."""
    if not document:
        return []
    found: list[Markup] = []
    waiting, slurm = document.get("waiting") or {}, document.get("slurm") or {}
    if slurm.get("refused"):
        found.append(escape(ui.t("It was refused: {why}", why=visible(slurm["refused"]))))
    if slurm.get("state") == "PENDING":
        found += _waits(ui, document, waiting, slurm)
    elif document.get("start"):
        found += _started(ui, document)
    for part in ("moves", "pools"):
        found += [escape(visible(_sentence(one))) for one in document.get(part) or ()]
    found += [escape(visible(_sentence(one["text"]))) for one in document.get("preflights") or ()]
    kept = [ui.t(_PRIVATE.get(word, word)) for word in document.get("private") or ()]
    if kept:
        found.append(escape(ui.t("Not shown, as it is private on this cluster: {what}", what=", ".join(kept))))
    return found


def _sentence(words: str) -> str:
    return f"It {words}" if words.startswith(("waits", "is ", "was ")) else f"{words[:1].upper()}{words[1:]}"


def saves(ui: Ui, document: Mapping[str, Any] | None) -> list[Markup]:
    """Whether what the job has done is lost when it is ended; none where it is not known."""
    found = (document or {}).get("checkpoint")
    if not found:
        return []
    t = ui.t
    if found["mode"] == "no":
        no = t("It cannot be saved: it does not ask for signals (--checkpoint=app). What ends it costs all its work.")
        return [escape(no)]
    if found["mode"] == "system":
        return [escape(t("Its node saves it as it runs before it is ended, if it has no connections to others."))]
    signalled = t("It saves its state when it gets the signal {signal}.", signal=found["signal"])
    said = [Markup("{} {}").format(signalled, _how_often(ui, found))]
    n = found["signals"]
    if found["saved"]:
        said.append(Markup("{} {}").format(t("Last saved:"), ui.time(found["saved"])))
        said.append(escape(t("It answered {n} of {all} signals.", n=found["answers"], all=n)))
    elif n:
        none = t("It has answered none of {n} signals: it is not known whether it can be saved.", n=n)
        said.append(escape(none))
    elif found.get("problem"):
        said.append(escape(t("What came of its signals cannot be read now.")))
    else:
        said.append(escape(t("It has had no signal yet: it is not known whether it can be saved.")))
    return said


def _how_often(ui: Ui, found: Mapping[str, Any]) -> str:
    t = ui.t
    if found["interval_s"] is None:
        return t("How often is found out once it runs.") if found["daly"] else t("It gets it before it is ended only.")
    every = ui.duration(found["interval_s"])
    if not found["daly"]:
        return t("It gets it every {time}.", time=every)
    if found["save_s"] is None:
        return t("It gets it every {time} until a save has been measured.", time=every)
    return t(
        "It gets it every {time}, which loses least: a save takes {save}, and one of its nodes fails every {fails}.",
        time=every, save=ui.duration(found["save_s"]), fails=ui.duration(found["mttf_s"]),
    )  # fmt: skip


def _waits(ui: Ui, document: Mapping[str, Any], waiting: Mapping[str, Any], slurm: Mapping[str, Any]) -> list[Markup]:
    t = ui.t
    found = [escape(t("It waits because: {why}.", why=visible(ui.reason(slurm.get("reason", "")))))]
    if waiting.get("never"):
        found.append(escape(t("It could never start here: no node can give what it asks for.")))
    elif waiting.get("fits_now"):
        found.append(
            escape(t("A place for it is free; it waits for its turn, or for a start that is reserved for others."))
        )
    for one in (waiting.get("nodes_by_reason") or ())[:6]:
        found.append(escape(t("Nodes that cannot take it, {why}: {n}", n=one["nodes"], why=visible(t(one["reason"])))))
    smaller = [_change(ui, one) for one in (waiting.get("would_start_now") or ())[:6]]
    if smaller:
        found.append(escape(t("It would start now with one of these instead: {changes}.", changes="; ".join(smaller))))
    plan = waiting.get("plan") or {}
    expected = plan.get("expected_start") or slurm.get("start_time")
    if expected:
        found.append(Markup("{} {}").format(t("Expected start:"), ui.time(expected)))
    order = document.get("order") or {}
    if order.get("place"):
        found.append(escape(t("Its place in the queue's order is {place}.", place=order["place"])))
    if order.get("starving"):
        found.append(escape(t("It has waited longer than the bound: it goes before all that have not.")))
    return found


def _change(ui: Ui, one: Mapping[str, Any]) -> str:
    value = ui.mib(one["value"]) if one["what"].endswith("_mib") else one["value"]
    words = _SMALLER.get(one["what"])
    return ui.t(words, value=value) if words else f"{visible(one['what'])}: {visible(value)}"


def _started(ui: Ui, document: Mapping[str, Any]) -> list[Markup]:
    start, decision = document["start"], document.get("decision")
    found = [
        Markup("{} {}: {}").format(
            ui.t("Started"), ui.time(start.get("at")),
            ", ".join(_place(part) for part in (start.get("parts") or ())[:8]),
        )
    ]  # fmt: skip
    for role in (start.get("roles") or ())[:8]:
        where = ", ".join(_place(part) for part in (role.get("parts") or ())[:8])
        found.append(escape(ui.t("Role {name}: {where}", name=visible(role["name"]), where=where)))
    if decision is None:
        return [*found, escape(ui.t("Stock Slurm chose its place."))]
    if decision.get("nodes_that_fit") is not None:
        found.append(
            escape(
                ui.t("{fit} of {n} nodes could take it.", fit=decision["nodes_that_fit"], n=decision.get("nodes", "?"))
            )
        )
    return found


def _place(part: Mapping[str, Any]) -> str:
    gpus = ",".join(map(str, part.get("gpus") or ()))
    return visible(part["node"]) + (f" GPU {gpus}" if gpus else "")
