"""Explanations, the order's table and the shadow report, from decisions that the plugins' own code wrote."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import UsageError
from sluice.cli.explain import render
from sluice.cli.shadow import render as render_shadow
from sluice.core.cluster import Cluster, GpuShape, NicGroups, NodeShape
from sluice.core.placement import Part, Policy, Preference, Reason, Request, commit, explain
from sluice.explain.decisions import Decision, DecisionError, Mode, Outcome, Start, read_entries
from sluice.explain.explanation import JobName, explain_job, parse_job, read_story, smaller_requests
from sluice.explain.order_table import parse_order_table, read_order_table
from sluice.explain.shadow import Shadow, report
from tests.unit.explain.decision_files import forge, raw_entries, run_churn

TABLE = """sluice-ranks 1
taken 1800000000
policy 0 0 1000 5000 0 0 800 0 7200 8 604800
tenant 1 1073741824 0 0 0 (others)
tenant 10 536870912 16700400 0 0 physics
job 5 1700 3 1 8 600 1 0 6600 0 0 536870912000 429496729600 0 0 858993459200 7 0 0 0 0 0 0 -3
job 6 1073741825 0 7 1 60 0 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
end 00000000
"""


@pytest.mark.parametrize(("text", "name"), [("17", JobName(17)), ("17_3", JobName(17, 3)), ("17_0", JobName(17, 0))])
def test_a_jobs_name(text: str, name: JobName) -> None:
    assert parse_job(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "17_", "17;ls", "17\n", "1e3", "9" * 11, "17_" + "9" * 11, "\uff11\uff17", "17+1"]
)
def test_what_is_no_job(text: str) -> None:
    with pytest.raises(UsageError):
        parse_job(text)


def test_the_order_table() -> None:
    table = parse_order_table(TABLE, source="here")
    assert table.weights == {
        "priority": 0,
        "age": 0,
        "fair-share": 1000,
        "deadline": 5000,
        "service": 0,
        "time": 0,
        "size": 800,
    }
    assert (table.laxity_horizon_s, table.starvation_s) == (7200, 604800)
    rank, tenant = table.jobs[5]
    assert (rank.site, rank.place, rank.gpus, rank.laxity_s) == (1700, 3, 8, 6600)
    assert (rank.terms["fair-share"], rank.terms["deadline"], rank.terms["size"]) == (500, 400, 800)
    assert rank.slurm["age"] == 7
    assert rank.slurm["nice"] == -3
    assert table.tenants[tenant].account == "physics"
    assert table.tenants[tenant].gpu_seconds == 16700.4
    assert table.jobs[6][0].starving
    assert list(parse_order_table(TABLE, source="here", job=6).jobs) == [6]


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    assert read_order_table(tmp_path) is None
    rng = random.Random(1)
    for text in (
        "",
        "sluice-ranks 2\n",
        TABLE[:-20],
        TABLE.replace("job 5 1700", "job 5 x"),
        TABLE.replace("taken", "took"),
    ):
        with pytest.raises(DecisionError):
            parse_order_table(text, source="here")
    for _ in range(500):
        mutated = bytearray(TABLE.encode())
        for _ in range(3):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            parse_order_table(mutated.decode("utf-8", "replace"), source="here")
        except DecisionError:
            continue


def started_jobs(path: Path) -> list[Start]:
    return [entry.body for entry in read_entries(path) if isinstance(entry.body, Start)]


def test_a_started_job(sample: Path) -> None:
    starts = started_jobs(sample)
    one = next(start for start in starts if len(start.parts) == 1 and start.parts[0].gpus)
    document = explain_job(sample.parent, JobName(one.job.id))
    assert document is not None
    assert document["start"]["as_chosen"]
    part = document["start"]["parts"][0]
    assert part["node"] == f"node-{one.parts[0].node:03}"
    assert sum(1 << gpu for gpu in part["gpus"]) == one.parts[0].gpus
    decided = document["decision"]
    assert decided["replayed"] is True
    assert (
        decided["nodes_that_fit"] + sum(entry["nodes"] for entry in decided["nodes_by_reason"])
        == decided["nodes"]
        == 70
    )
    assert decided["choice"]["parts"] == document["start"]["parts"]
    text = "\n".join(render(document))
    assert f"node-{one.parts[0].node:03}: GPU " in text
    assert "Why there: placed by Sluice" in text
    document["start"]["as_chosen"] = False
    assert "  The policy chose other GPUs of these nodes; these are nearer to the job's NICs" in "\n".join(
        render(document)
    )
    document["start"]["parts"][0]["node"] = "elsewhere"
    assert "  These are not the nodes and GPUs that Sluice chose." in render(document)


def test_every_job_of_a_churn_is_explained(sample: Path) -> None:
    jobs = {entry.body.job.id for entry in read_entries(sample) if isinstance(entry.body, Decision | Start)}
    reasons, claims = set(), set()
    for job in jobs:
        document = explain_job(sample.parent, JobName(job))
        assert document is not None
        assert document["decision"]["replayed"] is True, job
        assert render(document)
        reasons |= {entry["reason"] for entry in document["decision"]["nodes_by_reason"]}
        for part in document.get("start", {}).get("parts", []):
            claims.add(part["gpu_compute_percent"])
    assert any(re.fullmatch(r"too few GPUs with [0-9]+ % of their compute free", reason) for reason in reasons)
    assert len(claims) > 2
    assert explain_job(sample.parent, JobName(4_000_000)) is None


def test_a_place_of_the_planners_is_not_put_to_the_core_again(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    folder.mkdir()
    entries = []
    for kind, payload in raw_entries(sample):
        if kind == 3 and next_decision(payload).placement is not None:
            head, flags_on = split_at_outcome(payload)
            payload = head + payload[len(head) : len(head) + 1] + bytes([flags_on[0] | 8]) + flags_on[1:]
        entries.append((kind, payload))
    (folder / sample.name).write_bytes(forge(entries))
    for start in started_jobs(sample):
        decided = (explain_job(folder, JobName(start.job.id)) or {})["decision"]
        assert (decided["planned"], decided["replayed"]) == (True, None)


def test_a_waiting_job_with_its_order(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    folder.mkdir()
    (folder / sample.name).write_bytes(sample.read_bytes())
    refused = next(
        entry.body
        for entry in read_entries(sample)
        if isinstance(entry.body, Decision) and entry.body.placement is None
    )
    (folder / "order.ranks").write_text(TABLE.replace("job 5 ", f"job {refused.job.id} "))
    document = explain_job(folder, JobName(refused.job.id))
    assert document is not None
    assert document["order"]["site_factor"] == 1700
    assert document["order"]["tenant"]["account"] == "physics"
    assert [term["name"] for term in document["order"]["terms"]] == ["fair-share", "deadline", "size"]
    text = "\n".join(render(document))
    assert "physics has 10 shares and used 4.639 GPU-hours lately" in text
    assert "400.0  deadline (of 5000): 110 min to spare" in text


def test_an_operators_site_factor(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    folder.mkdir()
    (folder / sample.name).write_bytes(sample.read_bytes())
    refused = next(
        entry.body
        for entry in read_entries(sample)
        if isinstance(entry.body, Decision) and entry.body.placement is None
    )
    table = TABLE.replace("job 5 ", f"job {refused.job.id} ").replace("job 6", f"operator {refused.job.id} -77\njob 6")
    (folder / "order.ranks").write_text(table)
    document = explain_job(folder, JobName(refused.job.id))
    assert document is not None
    assert (document["order"]["site_factor"], document["order"]["operators_site_factor"]) == (1700, -77)
    assert "         -77  SITE: site factor set by an operator: -77 (ours would be 1700):" in render(document)
    with pytest.raises(DecisionError, match="not 2 numbers"):
        parse_order_table(table.replace(" -77", ""), source="here")


def test_numbers_that_are_used_again(sample: Path, tmp_path: Path) -> None:
    """Of two jobs of one number the submission decides; without it the later one is meant."""
    folder = tmp_path / "decisions"
    folder.mkdir()
    entries = raw_entries(sample)
    start = next(start for start in started_jobs(sample))
    (folder / "decisions.000000000001").write_bytes(forge(entries))
    later = []
    for kind, payload in entries:  # the same entries, submitted a second later
        if kind in (3, 4):
            payload = payload.replace(b"\x80\xa4\xa7\xda\x06", b"\x81\xa4\xa7\xda\x06", 1)  # 1,800,000,000 as LEB128
        later.append((kind, payload))
    assert later != entries
    (folder / "decisions.000000000002").write_bytes(forge(later))
    name = JobName(start.job.id)
    assert read_story(folder, name).start is not None
    first = read_story(folder, name, submit=1_800_000_000)
    second = read_story(folder, name, submit=1_800_000_001)
    assert first.start is not None
    assert second.start is not None
    assert first.start[1].job.submit == 1_800_000_000
    assert second.start[1].job.submit == 1_800_000_001
    assert read_story(folder, name).start[1].job.submit == 1_800_000_001  # type: ignore[index]
    assert read_story(folder, name, submit=1_700_000_000).start is None


@pytest.fixture
def busy() -> Cluster:
    """Two nodes of eight GPUs: one with three free GPUs, one with six that are pair-wise linked."""
    cluster = Cluster(2)
    gpus = tuple(GpuShape("h100", 80_000, link_domain=index // 2) for index in range(8))
    shape = cluster.add_shape(NodeShape(gpus))
    for held in (0b11111, 0b11):
        node = cluster.add_node(shape, 64_000, 500_000)
        commit(cluster, [Part(node, held, 0, 40_000, 400_000)])
    return cluster


def test_what_smaller_request_would_start(busy: Cluster) -> None:
    def smaller(**request: Any) -> dict[str, Any]:
        return {change["what"]: change["value"] for change in smaller_requests(busy, Policy.SLUICE, Request(**request))}

    assert smaller(gpus=8) == {"gpus": 6}
    assert smaller(gpus=4, nodes_min=2, nodes_max=2) == {"nodes": 1, "gpus": 3}
    assert smaller(gpus=4, one_link_domain=Preference.REQUIRED) == {"gpus": 2, "one_link_domain": "not required"}
    assert smaller(gpus=1, cpus_milli=30_000) == {"cpus": 24}
    assert smaller(gpus=1, host_memory_mib=120_000) == {"host_memory_mib": 99_840}
    assert smaller(gpus=1, gpu_memory_mib=90_000) == {"gpu_memory_mib": 79_872}
    assert smaller(gpus=8, cpus_milli=30_000) == {}, "no single change is enough"


def test_segments_and_one_switch_in_words() -> None:
    """Of two blocks of two nodes, one node each is in use."""
    cluster = Cluster(4)
    shape = cluster.add_shape(NodeShape((GpuShape("h100", 80_000),)))
    for _ in range(2):
        block = cluster.add_switch()
        for _ in range(2):
            cluster.add_node(shape, 64_000, 500_000, block)
    commit(cluster, [Part(0, 1), Part(2, 1)])
    whole = Request(gpus=1, nodes_min=2, nodes_max=2, segment=2)
    assert smaller_requests(cluster, Policy.SLUICE, whole) == [{"what": "segment", "value": "not asked", "unit": ""}]
    together = replace(whole, segment=0, one_switch=Preference.REQUIRED)
    smaller = smaller_requests(cluster, Policy.SLUICE, together)
    assert [change["what"] for change in smaller] == ["nodes", "one_switch"]
    counted = explain(cluster, Policy.SLUICE, whole).by_reason
    assert counted == {Reason.GPU_BUSY: 2, Reason.SEGMENT: 2}
    waiting = {
        "as_of": 1,
        "never": False,
        "nodes": 4,
        "would_start_now": smaller_requests(cluster, Policy.SLUICE, whole),
    }
    lines = render({"job": "1", "uid": 1, "account": "a", "partition": "main", "waiting": waiting})
    assert "    without --segment" in lines


def test_a_share_of_compute_in_words() -> None:
    cluster = Cluster(1)
    cluster.add_node(cluster.add_shape(NodeShape((GpuShape("h100", 80_000),))), 64_000, 500_000)
    commit(cluster, [Part(0, 1, 10_000, gpu_compute_percent=60)])
    smaller = smaller_requests(cluster, Policy.SLUICE, Request(gpus=1, gpu_memory_mib=100, gpu_compute_percent=60))
    assert smaller == [{"what": "gpu_compute_percent", "value": 40, "unit": "%"}]
    part = {"node": "n1", "gpus": [0], "gpu_memory_mib": 10240, "gpu_compute_percent": 60, "cpus": 1}
    document = {
        "job": "1",
        "uid": 1,
        "account": "a",
        "partition": "main",
        "waiting": {"as_of": 1, "never": False, "nodes": 1, "would_start_now": smaller},
    }
    assert "with 40 % of each GPU's compute" in "\n".join(render(document))
    document["start"] = {"at": 1, "parts": [part | {"host_memory_mib": 0}]}
    assert "n1: GPU 0 (10G, 60 % of the compute of each), 1 CPUs" in "\n".join(render(document))


def test_nics_in_words() -> None:
    """A request for NICs that has none near the GPUs that are free: what would start, and where GPUs are alone."""
    cluster = Cluster(1)
    near = NicGroups((0, 1), (0, 1), (0, 0))
    cluster.add_node(cluster.add_shape(NodeShape((GpuShape("h100", 80_000),) * 2, nics=near)), 64_000, 500_000)
    commit(cluster, [Part(0, nics=0b10)])
    smaller = smaller_requests(cluster, Policy.SLUICE, Request(gpus=1, nics=2, nic_kinds=1))
    assert smaller == [{"what": "nics", "value": 1, "unit": ""}]
    waiting = {"as_of": 1, "never": False, "nodes": 1, "would_start_now": smaller}
    alone = [{"node": "n1", "gpus": 2}, {"node": "n2", "gpus": 1}]
    document = {"job": "1", "uid": 1, "account": "a", "partition": "main"}
    said = "\n".join(render(document | {"waiting": waiting | {"gpus_without_nic": alone}}))
    assert "  2 GPUs free on n1, no free NIC near them\n  1 GPU free on n2, no free NIC near it" in said
    assert "with 1 NIC a node" in said
    part = {"node": "n1", "gpus": [0], "gpu_memory_mib": None, "cpus": 1, "host_memory_mib": 0, "nics": [0, 1]}
    assert "n1: GPU 0, NIC 0,1, 1 CPUs" in "\n".join(render(document | {"start": {"at": 1, "parts": [part]}}))


def test_a_hostile_answer_is_fit_for_a_terminal() -> None:
    document = {
        "job": "1\x1b[2J",
        "uid": 1,
        "account": "a\u202eb\n\nc",
        "partition": "\x07main",
        "waiting": {"as_of": 1, "plan": {"planned_at": 1, "expected_start": 5, "reason": "\x1b]0;x\x07", "gang": 0}},
    }
    text = "".join(render(document))
    assert all(character.isprintable() for character in text)
    with pytest.raises(UsageError, match="--json"):
        render({"job": "1", "order": 7})


def test_shadow_report(churn: Path, tmp_path: Path) -> None:
    """Decisions as if at level shadow, with a stock that takes the first node of those that the core would take."""
    folder = tmp_path / "decisions"
    run_churn(churn, folder, 11, steps=200)
    assert report(folder).decisions == 0, "decisions of level place are not compared"
    assert Shadow().document()["decisions"] == 0


def shadowed(sample: Path) -> list[tuple[int, bytes]]:
    """The sample's entries with every decision shadowed: stock agrees, and starts what the core starts."""
    changed = []
    for kind, payload in raw_entries(sample):
        if kind == 3:
            head, tail = split_at_outcome(payload)
            payload = head + bytes([Outcome.SHADOWED]) + tail
        changed.append((kind, payload))
    return changed


def split_at_outcome(payload: bytes) -> tuple[bytes, bytes]:
    from sluice.explain.decisions import Fields, _job

    fields = Fields(payload)
    _job(fields)
    assert Mode(fields.number()) == Mode.RUN_NOW
    at = fields.at
    fields.number()
    return payload[:at], payload[fields.at :]


def test_shadow_report_counts(sample: Path, tmp_path: Path) -> None:
    folder = tmp_path / "decisions"
    folder.mkdir()
    file = folder / "decisions.000000000001"
    entries = []
    for kind, payload in shadowed(sample):
        if kind == 3:
            head, tail = split_at_outcome(payload)
            fits = next_decision(payload).placement is not None
            flags = bytes([tail[0] & ~7 | 2 | (4 if fits else 0)])
            payload = head + bytes([Outcome.SHADOWED]) + flags + tail[1:]
        entries.append((kind, payload))
    file.write_bytes(forge(entries))
    shadow = report(folder)
    starts = len(started_jobs(file))
    assert shadow.decisions > 100
    assert shadow.both >= starts
    assert shadow.neither == shadow.decisions - shadow.both
    assert shadow.only_core == shadow.only_stock == 0
    assert shadow.compared_gpus == shadow.same_gpus > 0
    assert shadow.same_nodes < shadow.both, "stock's nodes are not in these entries"
    assert shadow.core.idle_nodes_broken > 0
    lines = render_shadow(shadow)
    assert any("both would start the job" in line for line in lines)


def next_decision(payload: bytes) -> Decision:
    from sluice.explain.decisions import parse_entry

    body = parse_entry(3, payload)
    assert isinstance(body, Decision)
    return body


def test_a_job_that_slurm_alone_places_says_so() -> None:
    plan = {"planned_at": 1.8e9, "expected_start": None, "reason": "left to Slurm's own scheduler (why)", "gang": 0}
    text = "\n".join(render({"schema_version": 1, "job": "17", "waiting": {"as_of": 1.8e9, "plan": plan}}))
    assert "No start is planned yet: left to Slurm's own scheduler (why)" in text
    assert "was not asked" not in text


@pytest.mark.parametrize(("value", "words"), [(1, "with 1 GPU\n"), (2, "with 2 GPUs\n")])
def test_smaller_requests_are_counted_in_words(value: int, words: str) -> None:
    waiting = {
        "as_of": 1.8e9,
        "fits_now": False,
        "never": False,
        "nodes": 1,
        "nodes_by_reason": [],
        "nodes_that_fit": 0,
        "would_start_now": [{"what": "gpus", "value": value, "unit": ""}],
    }
    assert words in "\n".join(render({"schema_version": 1, "job": "17", "waiting": waiting})) + "\n"
