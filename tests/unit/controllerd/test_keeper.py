from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from policy.document import parse
from policy.health import NodeHealth, compile_health
from sluice.base.errors import SluiceError
from sluice.controllerd.health.keeper import Act, Keeper, from_document, to_document
from sluice.exchange.courier import MAX_REQUEST
from sluice.exchange.health_report import Fault, GpuState, Report, parse_report
from sluice.slurm.answers import Node


def policy(text: str = "{}") -> NodeHealth:
    return compile_health(parse(f"health: {text}").health)


def slurm_node(name: str, *flags: str, reason: str = "") -> Node:
    return Node(
        name, name, name, "idle", frozenset(flags), reason, 8, 0, 1, 8, 1, 1, 0, None, "", "", (), (), ("main",), 1, "x"
    )


def fault(number: int = 0, action: str = "drain-gpu", began: float = 1.0, **changes: Any) -> Fault:
    return Fault(**{
        "check": "xid", "uuid": f"GPU-{number}", "numbers": (number,), "severity": "fatal", "action": action,
        "acts": True, "began": began, "text": "XID 79", "jobs": (), **changes,
    })  # fmt: skip


def node_fault(**changes: Any) -> Fault:
    return fault(action="drain-node", check="driver", uuid="", numbers=(), text="hangs", **changes)


def report(name: str, *faults: Fault, time: float = 10.0, passes: int = 0, kept: str = "", gpus: int = 2) -> Report:
    sick = {one.uuid for one in faults}
    states = [
        GpuState(f"GPU-{n}", "nvidia", "Model", (n,), 0 if f"GPU-{n}" in sick else passes, kept) for n in range(gpus)
    ]
    return Report(name, time, "enforce", 3, tuple(states), faults, passes)


class Cluster:
    """Ten nodes, and a keeper whose actions succeed."""

    def __init__(self, count: int = 10) -> None:
        self.keeper = Keeper()
        self.nodes = {f"n{number}": slurm_node(f"n{number}") for number in range(count)}
        self.now = 10.0

    def step(self, *reports: Report, by: NodeHealth | None = None, by_gpu: bool = True) -> list[tuple[str, str]]:
        self.now += 10
        for one in reports:
            self.keeper.take(dataclasses.replace(one, time=self.now), self.now)
        acts = self.keeper.decide(self.nodes.values(), by or policy(), self.now, by_gpu=by_gpu)
        for act in acts:
            self.do(act)
            self.keeper.done(act, self.now - 1)
        return [(act.event or act.kind, act.node) for act in acts]

    def do(self, act: Act) -> None:
        if act.kind == "drain":
            self.nodes[act.node] = slurm_node(act.node, "drain", reason=act.reason)
        elif act.kind == "undrain":
            self.nodes[act.node] = slurm_node(act.node)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_one_gpu_goes_out_and_comes_back_after_its_passes(cluster: Cluster) -> None:
    assert cluster.step(report("n1", fault())) == [("out", "n1")]
    assert cluster.keeper.state.withdrawn() == [("n1", 0)]
    assert cluster.step(report("n1", fault())) == []
    assert cluster.step(report("n1", passes=2)) == []
    assert cluster.step(report("n1", passes=3)) == [("return", "n1")]
    assert cluster.keeper.state.withdrawn() == []


def test_what_is_news(cluster: Cluster) -> None:
    assert not cluster.keeper.is_news(report("n1"))
    assert cluster.keeper.is_news(report("n1", fault()))
    cluster.step(report("n1", fault(acts=False)))
    assert not cluster.keeper.is_news(report("n1", fault(acts=False)))
    assert cluster.keeper.is_news(report("n1", fault(began=50.0)))
    cluster.step(report("n1", fault(began=50.0)))
    assert cluster.keeper.is_news(report("n1"))  # it may return


def test_a_second_gpu_of_the_node_follows_by_itself(cluster: Cluster) -> None:
    cluster.step(report("n1", fault()))
    assert cluster.step(report("n1", fault(), fault(1, began=20.0))) == [("out", "n1")]
    assert sorted(cluster.keeper.state.withdrawn()) == [("n1", 0), ("n1", 1)]


def test_a_node_is_drained_with_a_tagged_reason_and_returns(cluster: Cluster) -> None:
    assert cluster.step(report("n1", node_fault())) == [("drain", "n1")]
    assert cluster.nodes["n1"].reason == "sluice: driver: hangs"
    assert cluster.step(report("n1", node_fault())) == []
    assert cluster.step(report("n1", passes=3)) == [("undrain", "n1")]


def test_without_the_placement_hook_the_node_is_drained_for_its_gpu(cluster: Cluster) -> None:
    assert cluster.step(report("n1", fault()), by_gpu=False) == [("drain", "n1")]
    assert cluster.nodes["n1"].reason == "sluice: xid GPU 0: XID 79"
    assert cluster.step(report("n1", passes=2), by_gpu=False) == []
    assert cluster.step(report("n1", passes=3), by_gpu=False) == [("undrain", "n1")]


def test_what_a_person_drained_is_left_alone(cluster: Cluster) -> None:
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="new disk")
    assert cluster.step(report("n1", node_fault())) == []
    assert cluster.step(report("n1", passes=9)) == []
    cluster.nodes["n2"] = slurm_node("n2", "drain", reason="sluice: driver: by a person who can write")
    assert cluster.step(report("n2", passes=9)) == []  # Sluice did not do it


def test_a_person_resumes_a_node_and_sluice_does_not_drain_it_for_the_same_fault(cluster: Cluster) -> None:
    cluster.step(report("n1", node_fault()))
    cluster.nodes["n1"] = slurm_node("n1")
    assert cluster.step(report("n1", node_fault())) == [("health.left", "n1")]
    assert cluster.step(report("n1", node_fault())) == []
    assert cluster.step(report("n1", node_fault(began=99.0))) == [("drain", "n1")]  # another one


def test_a_person_gives_the_drain_another_reason_and_it_is_his(cluster: Cluster) -> None:
    cluster.step(report("n1", node_fault()))
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="bad cable")
    assert cluster.step(report("n1", passes=9)) == [("health.left", "n1")]
    assert cluster.nodes["n1"].reason == "bad cable"


def test_a_node_that_slurm_drained_as_its_prolog_refused_a_sick_gpu_goes_on_without_it(cluster: Cluster) -> None:
    cluster.step(report("n1"), report("n2"))
    hit = dataclasses.replace(report("n1", fault()), refused_at=cluster.now + 5)
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="Prolog error")
    cluster.nodes["n2"] = slurm_node("n2", "drain", reason="Prolog error")  # for another reason: nobody refused
    assert cluster.step(hit, report("n2")) == [("out", "n1")]
    assert cluster.step(hit, report("n2")) == [("undrain", "n1")]
    assert cluster.step(hit, report("n2")) == []
    cluster.now += 100
    cluster.step(hit)
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="Prolog error")  # later, and not by that refusal
    assert cluster.step(hit) == []


def test_a_node_that_slurm_drained_as_its_epilog_got_no_clean_gpu_goes_on_without_it(cluster: Cluster) -> None:
    cluster.step(report("n1"), report("n2"))
    hit = dataclasses.replace(report("n1", fault()), refused_at=cluster.now + 5, unclean=("GPU-0",))
    other = dataclasses.replace(hit, node="n2", unclean=("GPU-0", "GPU-1"))  # nothing says what the second one has
    for name in ("n1", "n2"):
        cluster.nodes[name] = slurm_node(name, "drain", reason="Epilog error")
    all_of_them = policy("{breaker: {share: 100}}")
    assert cluster.step(hit, other, by=all_of_them) == [("out", "n1"), ("out", "n2")]
    assert cluster.step(hit, other, by=all_of_them) == [("undrain", "n1")]
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="Prolog error")  # no prolog refused
    assert cluster.step(hit) == []


def test_a_node_that_slurmd_drained_for_its_full_spool_goes_on_when_there_is_room(cluster: Cluster) -> None:
    full = report("n1", dataclasses.replace(node_fault(), check="spool"))
    cluster.step(report("n1"))
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="SlurmdSpoolDir is full")
    assert cluster.step(full) == []  # it is drained already
    room = dataclasses.replace(report("n1", passes=2), room=True)
    assert cluster.step(room) == []  # not often enough
    assert cluster.step(report("n1", passes=3)) == []  # nobody looked for room
    sick = dataclasses.replace(report("n1", node_fault(), passes=3), room=True)
    assert cluster.step(sick) == []
    assert cluster.step(dataclasses.replace(room, passes=3)) == [("undrain", "n1")]
    cluster.nodes["n1"] = slurm_node("n1", "drain", reason="a person's")
    assert cluster.step(dataclasses.replace(room, passes=9)) == []


def test_the_breaker(cluster: Cluster) -> None:
    """Ten percent of ten nodes is one: the oldest fault goes, the others wait, and no job is started again for them."""
    acts = cluster.step(
        report("n3", fault(began=3.0)),
        report("n1", fault(began=1.0, action="requeue", jobs=(7,))),
        report("n2", fault(began=2.0, action="requeue", jobs=(8,))),
    )
    assert acts == [("out", "n1"), ("requeue", "n1"), ("health.breaker", "n2")]
    assert set(cluster.keeper.state.held_back) == {"n2", "n3"}
    assert cluster.keeper.take(report("n2"), cluster.now)["held_back"] is True
    assert cluster.step(
        report("n1", fault(), fault(1)), report("n2", fault(began=2.0)), report("n3", fault(began=3.0))
    ) == [
        ("out", "n1")  # the node counts already
    ]
    assert cluster.step(report("n1", passes=3), report("n2", fault(began=2.0)), report("n3", passes=3)) == [
        ("return", "n1"),
        ("return", "n1"),
    ]
    assert cluster.step(report("n2", fault(began=2.0))) == [("out", "n2"), ("health.breaker", "")]


@pytest.mark.parametrize(
    ("text", "count", "most"),
    [
        ("{breaker: {share: 10}}", 128, 12),
        ("{breaker: {share: 0, least: 2}}", 10, 2),
        ("{breaker: {share: 0, least: 0}}", 10, 0),
        ("{breaker: {share: 100}}", 10, 10),
        ("{breaker: {share: 9}}", 10, 1),
    ],
)
def test_how_many_the_breaker_lets_through(text: str, count: int, most: int) -> None:
    cluster = Cluster(count)
    acts = cluster.step(*(report(name, fault()) for name in cluster.nodes), by=policy(text))
    assert sum(kind == "out" for kind, _ in acts) == most
    assert ("health.breaker" in {kind for kind, _ in acts}) == (most < count)


def test_jobs_are_started_again_once(cluster: Cluster) -> None:
    hit = fault(action="requeue", jobs=(7, 9))
    assert cluster.step(report("n1", hit)) == [("out", "n1"), ("requeue", "n1"), ("requeue", "n1")]
    assert cluster.step(report("n1", hit)) == []
    again = from_document(json.loads(json.dumps(to_document(cluster.keeper.state))))
    cluster.keeper = Keeper(again)  # another daemon goes on
    assert cluster.step(report("n1", hit)) == []
    assert cluster.step(report("n1", fault(action="requeue", jobs=(7,), began=50.0))) == [("requeue", "n1")]


def test_warnings_and_shadows_are_reported_once(cluster: Cluster) -> None:
    faults = [fault(action="warn", acts=False), fault(1, acts=False), fault(2, action="log", acts=False)]
    assert cluster.step(report("n1", *faults)) == [("health.warn", "n1"), ("health.shadow", "n1")]
    assert cluster.step(report("n1", *faults)) == []
    assert not cluster.keeper.state.withdrawn()
    old = json.dumps(to_document(cluster.keeper.state)).replace("|reported", "|told")  # the key until 0.1.0
    cluster.keeper = Keeper(from_document(json.loads(old)))
    assert cluster.step(report("n1", *faults)) == []


def test_an_old_report_says_nothing(cluster: Cluster) -> None:
    cluster.step(report("n1", fault()))
    cluster.now += 1000
    assert cluster.step() == []
    assert cluster.keeper.state.withdrawn() == [("n1", 0)]


def test_a_gpu_that_is_gone_does_not_return_by_itself(cluster: Cluster) -> None:
    cluster.step(report("n1", fault(1)))
    assert cluster.step(report("n1", passes=9, gpus=1)) == []
    assert [act.kind for act in cluster.keeper.return_by_hand("n1", 1)] == ["return"]


def test_kept_gpus_return_by_hand_only(cluster: Cluster) -> None:
    kept = fault(check="repeated")
    cluster.step(report("n1", kept))
    for _ in range(5):
        assert cluster.step(report("n1", kept, passes=9, kept="5 fatal events")) == []
    for act in cluster.keeper.return_by_hand("n1", 0):
        cluster.keeper.done(act, cluster.now)
    assert cluster.keeper.take(report("n1"), cluster.now)["returned"] == ["GPU-0"]
    assert cluster.keeper.take(report("n1"), cluster.now)["returned"] == []


def test_healthy_nodes_are_not_written_down(cluster: Cluster) -> None:
    cluster.step(report("n1"), report("n2", fault()), report("n3", fault(action="warn", acts=False)))
    document = to_document(cluster.keeper.state)
    assert set(document["reports"]) == {"n2", "n3"} and set(document["nodes"]) == {"n2"}
    assert from_document(json.loads(json.dumps(document))).withdrawn() == [("n2", 0)]


def test_a_list_without_a_state_is_adopted_and_recognised(cluster: Cluster) -> None:
    cluster.keeper.adopt([("n1", 1), ("n2", 0)], 1.0)
    assert sorted(cluster.keeper.state.withdrawn()) == [("n1", 1), ("n2", 0)]
    assert cluster.step(report("n1", passes=1)) == []
    assert cluster.step(report("n1", passes=3)) == [("return", "n1")]
    assert cluster.keeper.state.withdrawn() == [("n2", 0)]


def test_nodes_that_slurm_does_not_have_any_more_are_forgotten(cluster: Cluster) -> None:
    cluster.step(report("n1", fault()))
    del cluster.nodes["n1"]
    cluster.step()
    assert not cluster.keeper.state.withdrawn() and not cluster.keeper.state.reports


def test_a_report_fits_into_a_request_whatever_jobs_do() -> None:
    worst = fault(severity="fatal", jobs=(7,))
    many = [fault(text="x" * 5000, check=f"check_{number}", severity="warning") for number in range(900)]
    blames = tuple("job 7: XID 31" * 99 for _ in range(9000))
    whole = dataclasses.replace(report("n1", *many[:450], worst, *many[450:]), blames=blames)
    text = json.dumps(whole.to_dict())
    assert len(text) < MAX_REQUEST and worst in parse_report(json.loads(text)).faults


def test_a_report_reads_back_and_nonsense_is_refused() -> None:
    whole = report("n1", fault(jobs=(7,)), node_fault(), kept="5 fatal events")
    document = json.loads(json.dumps(whole.to_dict()))
    assert parse_report(document) == whole
    assert (whole.severity, whole.nagios) == ("fatal", 2)
    for key, value in (("node", "n 1"), ("node", "x" * 99), ("time", "now"), ("time", -1), ("mode", "a b"), ("gpus", 3),
                       ("faults", [{}]), ("schema_version", 2), ("passes", None)):  # fmt: skip
        with pytest.raises(SluiceError, match="health report"):
            parse_report(document | {key: value})
    for key, value in (("check", "a b"), ("severity", "dire"), ("acts", "yes"), ("numbers", [999]), ("jobs", [0])):
        with pytest.raises(SluiceError, match="health report"):
            parse_report(document | {"faults": [document["faults"][0] | {key: value}]})


def test_nagios() -> None:
    assert report("n1").nagios == 0
    assert report("n1", fault(severity="info")).nagios == 0
    assert report("n1", fault(severity="warning")).nagios == 1
    assert report("n1", fault(severity="critical")).nagios == 2
    silent = dataclasses.replace(report("n1"), gpus=(GpuState("GPU-0", "amd", "M", (0,), 0, unknown=("gpu_lost",)),))
    assert silent.nagios == 3
