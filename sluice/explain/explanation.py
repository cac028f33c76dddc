"""Why a job has its place: one document from slurmctld's decisions, made by asking the core again.

`explain_job` looks a job up in the decisions and the order's table and answers with plain data (lists,
dictionaries, numbers, text), which `sluice explain` prints and the explain service sends.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sluice.base.errors import UsageError
from sluice.core import lib
from sluice.core.cluster import Cluster
from sluice.core.errors import CoreError
from sluice.core.placement import Layout, Part, Placement, Policy, Preference, Reason, Request, place
from sluice.explain import decisions
from sluice.explain.decisions import (
    Decision,
    DecisionEntry,
    DecisionError,
    Image,
    Mode,
    Outcome,
    Plan,
    Rank,
    Replay,
    Start,
    Topology,
)
from sluice.explain.order_table import TenantRank, read_order_table

SCHEMA_VERSION = 1
_TOPOLOGY, _IMAGE, _DECISION, _START, _PLAN = 1, 2, 3, 4, 5
_JOB = re.compile(r"([0-9]{1,10})(?:_([0-9]{1,10}))?\Z")
_MAX_ID = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class JobName:
    """A job as users write it: ``17`` or, of an array, ``17_3``."""

    id: int
    task: int | None = None

    def __str__(self) -> str:
        return str(self.id) if self.task is None else f"{self.id}_{self.task}"


def parse_job(text: str) -> JobName:
    """Raises UsageError for anything but ``17`` and ``17_3``."""
    match = _JOB.match(text)
    if match is None or int(match[1]) > _MAX_ID or int(match[2] or 0) > _MAX_ID or int(match[1]) == 0:
        raise UsageError(f"job {text[:40]!r}: not a job's number", remedy="write it as 17, or as 17_3 of an array")
    return JobName(int(match[1]), None if match[2] is None else int(match[2]))


@dataclass
class _State:
    """Topology and images as bytes: cheap to keep, decoded when a question is asked."""

    topology: bytes | None = None
    images: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(self.topology, dict(self.images))

    def replay(self) -> Replay:
        replay = Replay()
        for kind, payload in [(_TOPOLOGY, self.topology), *((_IMAGE, image) for image in self.images.values())]:
            body = decisions.parse_entry(kind, payload or b"")
            assert isinstance(body, Topology | Image)  # noqa: S101 - by their kinds
            replay.feed(DecisionEntry(0, 0, body))
        return replay


@dataclass
class Story:
    """What the entries say of one job; of each kind the last one, with its time in seconds since 1970."""

    decision: tuple[float, Decision] | None = None
    before: _State = field(default_factory=_State)  # what the core knew at the decision
    start: tuple[float, Start] | None = None
    plan: tuple[float, Plan] | None = None
    latest: _State = field(default_factory=_State)  # what it knew at the newest entry
    latest_time: float = 0


def _first_number(payload: bytes) -> int:
    value = shift = 0
    for byte in payload[:5]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value


@dataclass(frozen=True, slots=True)
class _Search:
    """Which entries are the job's. Numbers are used again: the submission distinguishes jobs of one number."""

    name: JobName
    known_id: int | None  # what slurmctld calls an array's task, or Slurm's record of all its tasks that wait
    submit: int | None

    def wanted(self, kind: int, payload: bytes) -> bool:
        """Whether it may be; cheap."""
        data = decisions.Fields(payload)
        job = data.number()
        if job == self.known_id or (self.name.task is None and job == self.name.id):
            return True
        return (
            kind != _PLAN
            and self.name.task is not None
            and (data.number(), data.number()) == (self.name.id, self.name.task)
        )

    def is_of(self, body: object, time: float) -> bool:
        """Whether it is."""
        if self.submit is None:
            return True
        if isinstance(body, Decision | Start):
            return body.job.submit == self.submit
        return time >= self.submit


def _scan(path: Path, search: _Search, story: Story, *, newest: bool) -> None:
    """Follow one file. What a newer file has already stays."""
    found, state = Story(), _State()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return  # rotated away just now
    except OSError as error:
        raise DecisionError(f"{path}: {error.strerror}") from error
    decisions.check_header(path, data)
    at, head, time = decisions.HEADER_BYTES, decisions.ENTRY_HEAD, 0
    while at + head.size <= len(data):
        length, kind, _, _, time_us = head.unpack_from(data, at)
        end = at + head.size + length
        if end + 4 > len(data):
            break
        if zlib.crc32(data[at:end]) != int.from_bytes(data[end : end + 4], "little"):
            raise DecisionError(f"{path}: byte {at}: checksum wrong: the file is damaged")
        payload, time = data[at + head.size : end], time_us
        at = end + 4
        if kind == _IMAGE:
            state.images[_first_number(payload)] = payload
        elif kind == _TOPOLOGY:
            state = _State(payload)
        elif kind in (_DECISION, _START, _PLAN) and search.wanted(kind, payload):
            body = decisions.parse_entry(kind, payload)
            if not search.is_of(body, time_us / 1e6):
                continue
            if isinstance(body, Decision | Start) and _submit_of(found) not in (None, body.job.submit):
                found = Story()  # an earlier job of the same number
            if isinstance(body, Decision):
                if found.start is None and body.mode != Mode.TEST_ONLY:
                    found.decision, found.before = (time_us / 1e6, body), state.copy()
            elif isinstance(body, Start):
                found.start = time_us / 1e6, body
            elif isinstance(body, Plan):
                found.plan = time_us / 1e6, body
    if newest:
        story.latest, story.latest_time = state, time / 1e6
    if _submit_of(story) is not None and _submit_of(found) not in (None, _submit_of(story)):
        return  # of an earlier job of the same number
    if story.decision is None and found.decision is not None:
        story.decision, story.before = found.decision, found.before
    story.start = story.start or found.start
    story.plan = story.plan or found.plan


def _submit_of(story: Story) -> int | None:
    """When the job of the story was submitted, where that is known."""
    if story.start is not None:
        return story.start[1].job.submit
    return story.decision[1].job.submit if story.decision is not None else None


def read_story(folder: Path, name: JobName, *, submit: int | None = None, known_id: int | None = None) -> Story:
    """What the decisions of a folder say of the job, as far back as needed. Raises DecisionError."""
    story, search = Story(), _Search(name, known_id, submit)
    for number, path in enumerate(reversed(decisions.list_files(folder))):
        _scan(path, search, story, newest=number == 0)
        if story.decision is not None:
            break
    return story


# ---- the document ----


def explain_job(
    folder: Path, name: JobName, *, submit: int | None = None, known_id: int | None = None
) -> dict[str, Any] | None:
    """What is known of the job, or None when nothing is. Times are seconds since 1970. Raises DecisionError.

    `submit`: when it was submitted, and `known_id`: its own number in an array, where Slurm knows them.
    """
    story = read_story(folder, name, submit=submit, known_id=known_id)
    rank, tenant, table_time = _rank_of(folder, known_id or name.id, story)
    facts = story.start[1].job if story.start else story.decision[1].job if story.decision else None
    if facts is None and rank is None and story.plan is None:
        return None
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "job": str(name)}
    if facts is not None:
        document |= {"job_id": facts.id, "uid": facts.uid, "account": facts.account, "partition": facts.partition}
    if rank is not None:
        document["order"] = _order(rank, tenant, table_time)
    if story.decision is not None:
        document["decision"] = _decided(story)
    if story.start is not None:
        document["start"] = _started(story)
    else:
        document["waiting"] = _waiting(story)
    return document


def _rank_of(folder: Path, number: int, story: Story) -> tuple[Rank | None, TenantRank | None, float]:
    """The rank at the start, or as of the order's last table."""
    if story.start is not None:
        rank = story.start[1].rank
        return rank, None, rank.taken if rank else 0
    number = story.decision[1].job.id if story.decision else number
    table = read_order_table(folder, job=number)
    if table is None or number not in table.jobs:
        return None, None, 0
    rank, index = table.jobs[number]
    return rank, table.tenants[index] if 0 <= index < len(table.tenants) else None, table.taken


_DEADLINES = {0: "none", 1: "feasible", 2: "infeasible"}


def _order(rank: Rank, tenant: TenantRank | None, taken: float) -> dict[str, Any]:
    order: dict[str, Any] = {
        "as_of": taken,
        "site_factor": rank.site,
        "place": rank.place + 1,
        "terms": [
            {"name": name, "weight": rank.weights.get(name, 0), "value": round(value, 3)}
            for name, value in rank.terms.items()
            if rank.weights.get(name, 0)
        ],
        "slurm_terms": {name: value for name, value in rank.slurm.items() if value},
        "predicted_run_s": rank.remaining_s,
        "gpus": rank.gpus,
        "starving": rank.starving,
        "deadline": _DEADLINES.get(rank.deadline, "none"),
    }
    if rank.operators_site is not None:
        order["operators_site_factor"] = rank.operators_site
    if rank.deadline == 1:
        order["laxity_s"] = rank.laxity_s
    if tenant is not None:
        order["tenant"] = {
            "account": tenant.account,
            "shares": tenant.shares,
            "fair_share": round(tenant.factor, 4),
            "gpu_hours": round(tenant.gpu_seconds / 3600, 3),
            "tier": tenant.tier,
        }
    return order


def _names(replay: Replay) -> Callable[[int], str]:
    names = replay.topology.node_names if replay.topology else []
    return lambda node: names[node] if 0 <= node < len(names) else f"node {node}"


def _gpus(mask: int) -> list[int]:
    return [gpu for gpu in range(mask.bit_length()) if mask >> gpu & 1]


def _parts(parts: tuple[Part, ...], name: Callable[[int], str]) -> list[dict[str, Any]]:
    return [
        ({"nics": _gpus(part.nics)} if part.nics else {})
        | {
            "node": name(part.node),
            "gpus": _gpus(part.gpus),
            "gpu_memory_mib": part.gpu_memory_mib or None,
            "gpu_compute_percent": part.gpu_compute_percent or None,
            "cpus": part.cpus_milli / 1000,
            "host_memory_mib": part.host_memory_mib,
        }
        for part in parts
    ]


_OUTCOMES = {
    Outcome.USED: "placed by Sluice",
    Outcome.REFUSED: "no place; has to wait",
    Outcome.OVERRULED: "stock Slurm refused Sluice's choice and chose itself",
    Outcome.SHADOWED: "stock Slurm chose (level shadow)",
    Outcome.RESERVED: "fits, but would delay a reserved start or break a power budget; has to wait",
    Outcome.STOCK_FOUND: "Sluice found no place; stock Slurm did",
}


def _asked(request: Request, model: Callable[[int], str]) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "nodes": max(request.nodes_min, 1),
        "gpus": request.gpus,
        "gpus_in_total": bool(request.flags & request.flags.GPUS_TOTAL),
        "gpu_memory_mib": request.gpu_memory_mib or None,
        "gpu_compute_percent": request.gpu_compute_percent or None,
        "cpus": request.cpus_milli / 1000,
        "host_memory_mib": request.host_memory_mib,
        "exclusive": bool(request.flags & request.flags.EXCLUSIVE),
    }
    if request.nics or request.nics_per_gpu:
        asked |= {"nics": request.nics, "nics_per_gpu": request.nics_per_gpu}
        if request.nic_planes != Layout.POLICY:
            asked["nic_planes"] = "one" if request.nic_planes == Layout.PACK else "spread"
    if request.models:
        asked["gpu_types"] = [model(number) for number in range(64) if request.models >> number & 1]
    if request.segment > 1:
        asked["segment"] = request.segment
    for preference in ("one_link_domain", "one_numa_node", "near_nic", "one_switch"):
        if getattr(request, preference) != Preference.ANY:
            asked[preference] = getattr(request, preference).name.lower()
    return asked


def _model_names(cluster: Cluster) -> Callable[[int], str]:
    def name(model: int) -> str:
        try:
            return cluster.model_name(model)
        except IndexError:
            return f"type {model}"

    return name


_MOST_NAMED = 8  # nodes


def _far_from_nics(replay: Replay, request: Request, name: Callable[[int], str]) -> dict[str, Any]:
    """Where a request for NICs finds free GPUs with no free NIC near them; nothing where there are none."""
    if not request.nics and not request.nics_per_gpu:
        return {}
    nodes = range(replay.ready().totals().nodes) if request.allowed is None else sorted(request.allowed)
    found = ((node, replay.free_without_nic(node, request.nic_kinds)) for node in nodes)
    named = [{"node": name(node), "gpus": gpus} for node, gpus in found if gpus]
    return {"gpus_without_nic": named[:_MOST_NAMED]} if named else {}


def _in_words(reason: Reason, request: Request) -> str:
    if reason == Reason.GPU_COMPUTE:
        return f"too few GPUs with {request.gpu_compute_percent} % of their compute free"
    if reason == Reason.SEGMENT:
        return f"fits, but too few leaf switches or blocks have {request.segment} such nodes for a segment"
    return reason.text


def _decided(story: Story) -> dict[str, Any]:
    """The last decision, and why it had this result."""
    assert story.decision is not None  # noqa: S101 - the caller looked
    time, decision = story.decision
    decided: dict[str, Any] = {
        "at": time,
        "asked_by": ("backfill" if decision.backfill else "scheduler") if decision.mode == Mode.RUN_NOW else "forecast",
        "outcome": _OUTCOMES[decision.outcome],
        "policy": decision.policy.label,
        "planned": decision.planned,
        "core_us": decision.core_ns / 1000,
    }
    if story.before.topology is None:
        return decided
    replay = story.before.replay()
    cluster = replay.ready()
    name = _names(replay)
    decided["request"] = _asked(decision.request, _model_names(cluster))
    try:
        why = replay.explain(decision)
    except CoreError as error:
        decided["error"] = str(error)
        return decided
    decided |= _far_from_nics(replay, decision.request, name)
    decided |= {
        "replayed": (why.verdict, why.placement) == (decision.verdict, decision.placement)
        if decision.replayable
        else None,
        "nodes": why.nodes,
        "nodes_by_reason": [
            {"reason": _in_words(reason, decision.request), "nodes": count}
            for reason, count in why.by_reason.items()
            if reason != Reason.FITS
        ],
        "nodes_that_fit": why.by_reason.get(Reason.FITS, 0),
    }
    if decision.placement is not None:
        decided["choice"] = {
            "parts": _parts(decision.placement.parts, name),
            "score": decision.placement.score,
            "score_terms": [{"name": term, "value": value} for term, value in why.terms.items()],
            "next_best": _next_best(cluster, decision, name),
        }
    if decision.stock_nodes:
        decided["stock_nodes"] = [name(node) for node in decision.stock_nodes]
    return decided


def _next_best(cluster: Cluster, decision: Decision, name: Callable[[int], str]) -> dict[str, Any] | None:
    """What the core would have chosen without the node that it chose."""
    assert decision.placement is not None  # noqa: S101 - the caller looked
    if len(decision.placement.parts) != 1:
        return None
    allowed = decision.request.allowed
    everything = frozenset(range(cluster.totals().nodes)) if allowed is None else allowed
    without = replace(decision.request, allowed=everything - {decision.placement.parts[0].node})
    other = _place(cluster, decision.policy, without)
    return None if other is None else {"node": name(other.parts[0].node), "score": other.score}


def _place(cluster: Cluster, policy: Policy, request: Request) -> Placement | None:
    try:
        return place(cluster, policy, request)
    except CoreError:  # never, or contradictory
        return None


def _gpus_by_node(parts: Iterable[Part]) -> dict[int, int]:
    """A job with a share of a GPU has several parts on a node."""
    gpus: dict[int, int] = {}
    for part in parts:
        gpus[part.node] = gpus.get(part.node, 0) | part.gpus
    return gpus


def _started(story: Story) -> dict[str, Any]:
    assert story.start is not None  # noqa: S101 - the caller looked
    time, start = story.start
    state = story.before if story.before.topology else story.latest
    name = _names(state.replay()) if state.topology else lambda node: f"node {node}"
    decision = story.decision[1] if story.decision else None
    claimed = decision.request.gpu_compute_percent if decision else 0
    parts = tuple(replace(part, gpu_compute_percent=claimed if part.gpus else 0) for part in start.parts)
    started: dict[str, Any] = {"at": time, "parts": _parts(parts, name)}
    if start.roles:
        started["roles"] = [
            {
                "name": role,
                "gpus": sum(gpus.bit_count() for gpus in masks),
                "parts": [
                    {"node": name(part.node), "gpus": _gpus(gpus)}
                    for part, gpus in zip(parts, masks, strict=True)
                    if gpus
                ],
            }
            for role, masks in start.roles.items()
        ]
    if decision is not None and decision.placement is not None:
        started["as_chosen"] = _gpus_by_node(start.parts) == _gpus_by_node(decision.placement.parts)
    return started


def _waiting(story: Story) -> dict[str, Any]:
    """Why it still waits, as of the newest decision."""
    waiting: dict[str, Any] = {"as_of": story.latest_time}
    if story.plan is not None:
        time, plan = story.plan
        waiting["plan"] = {"planned_at": time, "expected_start": plan.start, "reason": plan.reason, "gang": plan.gang}
    if story.decision is None or story.latest.topology is None:
        return waiting
    decision = story.decision[1]
    replay = story.latest.replay()
    cluster = replay.ready()
    if story.before.topology != story.latest.topology:  # nodes may have other numbers
        return waiting
    request = replace(decision.request)
    now = _place(cluster, decision.policy, request)
    waiting["fits_now"] = now is not None
    if now is None:
        why = replay.explain(decision)
        waiting |= {
            "never": why.verdict == lib.SLUICE_ERROR_NEVER,
            "nodes": why.nodes,
            "nodes_by_reason": [
                {"reason": _in_words(reason, request), "nodes": count}
                for reason, count in why.by_reason.items()
                if reason != Reason.FITS
            ],
            "nodes_that_fit": why.by_reason.get(Reason.FITS, 0),
            "would_start_now": smaller_requests(cluster, decision.policy, request),
        } | _far_from_nics(replay, request, _names(replay))
    return waiting


def smaller_requests(cluster: Cluster, policy: Policy, request: Request) -> list[dict[str, Any]]:
    """Requests that ask less in one respect and would start now; of each respect the one that asks most."""

    def most(low: int, high: int, change: Callable[[int], Request]) -> int | None:
        """The largest value from `low` to `high` - 1 that fits, by halving: what asks less fits where more does."""
        if high <= low or _place(cluster, policy, change(low)) is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if _place(cluster, policy, change(middle)) is None:
                high = middle
            else:
                low = middle
        return low

    found: list[dict[str, Any]] = []

    def note(what: str, unit: str, value: float | None) -> None:
        if value is not None:
            found.append({"what": what, "value": value, "unit": unit})

    nodes = max(request.nodes_min, 1)
    each = max(request.segment, 1)
    fewer = most(1, nodes // each, lambda count: replace(request, nodes_min=count * each, nodes_max=count * each))
    note("nodes", "", fewer and fewer * each)
    if request.gpus:
        note("gpus", "", most(1, request.gpus, lambda value: replace(request, gpus=value)))
    kinds = request.nic_kinds
    fewer_nics = lambda value: replace(request, nics=value, nic_kinds=kinds if value else 0)  # noqa: E731
    note("nics", "", most(0 if request.gpus else 1, request.nics, fewer_nics))
    step = 256
    if request.gpu_memory_mib > step:
        blocks = -(-request.gpu_memory_mib // step)
        value = most(1, blocks, lambda value: replace(request, gpu_memory_mib=value * step))
        note("gpu_memory_mib", "MiB", None if value is None else value * step)
    claimed = request.gpu_compute_percent
    note("gpu_compute_percent", "%", most(1, claimed, lambda value: replace(request, gpu_compute_percent=value)))
    if request.cpus_milli > 1000:
        value = most(1, -(-request.cpus_milli // 1000), lambda value: replace(request, cpus_milli=value * 1000))
        note("cpus", "", value)
    if request.host_memory_mib > step:
        blocks = -(-request.host_memory_mib // step)
        value = most(1, blocks, lambda value: replace(request, host_memory_mib=value * step))
        note("host_memory_mib", "MiB", None if value is None else value * step)
    for preference in ("one_link_domain", "one_numa_node", "near_nic", "one_switch"):
        if getattr(request, preference) == Preference.REQUIRED:
            relaxed: dict[str, Any] = {preference: Preference.ANY}
            if preference == "one_switch":
                relaxed["lower_switches"] = 0
            if _place(cluster, policy, replace(request, **relaxed)) is not None:
                found.append({"what": preference, "value": "not required", "unit": ""})
    if request.segment > 1 and _place(cluster, policy, replace(request, segment=0)) is not None:
        found.append({"what": "segment", "value": "not asked", "unit": ""})
    if request.models and _place(cluster, policy, replace(request, models=0)) is not None:
        found.append({"what": "gpu_types", "value": "any", "unit": ""})
    if request.flags & request.flags.EXCLUSIVE:
        shared = replace(request, flags=request.flags & ~request.flags.EXCLUSIVE)
        if _place(cluster, policy, shared) is not None:
            found.append({"what": "exclusive", "value": "not asked", "unit": ""})
    return found
