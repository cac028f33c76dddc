"""Why a job waits, or has its place: an explanation in sentences."""

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
    kept = [ui.t(_PRIVATE.get(word, word)) for word in document.get("private") or ()]
    if kept:
        found.append(escape(ui.t("Not shown, as it is private on this cluster: {what}", what=", ".join(kept))))
    return found


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
