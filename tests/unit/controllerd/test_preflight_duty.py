"""Preflights on the controllers: nodes that join, measure and hear a verdict, and what is remembered of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from policy.document import parse
from policy.node import FILE_NAME, compile_node
from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.controllerd import preflight
from sluice.controllerd.daemon import Site
from sluice.controllerd.health.controller import controller_of
from sluice.controllerd.health.keeper import NodeState
from sluice.controllerd.preflight import Coordinator
from sluice.controllerd.preflight_restarts import FIRST_FILE
from sluice.exchange.preflight import STATE_FILE, Memory
from sluice.exchange.preflight_jobs import FILE_NAME as JOBS_FILE
from sluice.exchange.preflight_jobs import JobPreflight, read_preflights
from tests.unit.controllerd.slurm_objects import a_job, a_node

HOSTS = ("h1", "h2", "h3", "h4")
Speed = Callable[[str, str], float | None]


class FakeSite:
    """As much of a controller as preflights need; `away`: nodes that are drained."""

    def __init__(self, folder: Path, policy: str) -> None:
        (folder / FILE_NAME).write_text(compile_node(parse(policy)).render())
        self.state_save = self.conf_folder = folder
        self.events = folder / "events.jsonl"
        self.client = self.commands = self
        self.asked = 0
        self.others = "m[1-9]"  # where another job runs
        self.away: set[str] = set()
        self.state = "RUNNING"
        self.per_node = "gres:gpu:1"

    def jobs(self, *, ids: list[int] | None = None, states: list[str]) -> list[Any]:
        del states
        if ids is None:
            return [replace(a_job(7), nodes="h[1-4]"), replace(a_job(99), nodes=self.others)]
        self.asked += 1
        job = replace(a_job(ids[0]), state=self.state, priority=1, eligible_time=1, tres={"node": 4, "gres/gpu": 4})
        job = replace(job, tres_per_node=self.per_node)
        return [replace(job, nodes="h[1-4]" if ids[0] < 100 else "h1")]

    def config(self) -> dict[str, str]:
        return {"BOOT_TIME": "2026-11-29T10:00:00"}

    def output(self, *_: str) -> str:
        return ""

    def nodes(self) -> list[Any]:
        flags = {name: frozenset({"drain"} if name in self.away else ()) for name in HOSTS}
        return [replace(a_node(name), address=f"10.0.0.{name[1]}", flags=flags[name]) for name in HOSTS]

    def run(self, *_: str, **__: Any) -> Any:
        return type("Done", (), {"stdout": "SwitchName=l1 Level=0 Nodes=h[1-4]\n"})


class Bench:
    """A controller with time of its own, and the nodes of its jobs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
        self.now = 1000.0
        monkeypatch.setattr("sluice.controllerd.preflight.time.monotonic", lambda: self.now)
        self.site = FakeSite(folder, policy)
        self.coordinator = Coordinator(cast(Site, self.site))

    def ask(self, node: str, job: int = 7, **more: Any) -> dict[str, Any]:
        return self.coordinator.answer({"job": job, "node": node, "types": ["h100"], **more})

    def begin(self, node: str, job: int = 7) -> dict[str, Any]:
        return self.ask(node, job, begins=True)

    def join(self, node: str, job: int = 7, tools: tuple[str, ...] = ("perftest", "tcp")) -> dict[str, Any]:
        return self.ask(node, job, port=4000, tools=list(tools), nics=["mlx5_0"], interface="eth0")

    def play(self, speed: Speed, hosts: tuple[str, ...] = HOSTS, job: int = 7) -> dict[str, dict[str, Any]]:
        """All nodes until each has heard the end."""
        answers = {node: self.begin(node, job) for node in hosts}
        while any(one["state"] not in ("done", "none") for one in answers.values()):
            for node in hosts:
                answers[node] = self.next(node, answers[node], speed, job)
            self.now += 0.1
        return answers

    def next(self, node: str, answer: dict[str, Any], speed: Speed, job: int) -> dict[str, Any]:
        if answer["state"] == "join":
            return self.join(node, job)
        if answer["state"] == "test":
            mine = [one for some in answer["rounds"] for one in some if one["role"] != "serve"]
            results = {one["id"]: [speed(node, "h" + one["address"][-1]), 2.0] for one in mine}
            return self.ask(node, job, batch=answer["batch"], results=results)
        return answer if answer["state"] in ("done", "none") else self.ask(node, job, batch=99)

    def jobs(self) -> dict[int, list[JobPreflight]]:
        return read_preflights(self.site.state_save / JOBS_FILE)

    def memory(self) -> Memory:
        return Memory.load(self.site.state_save / STATE_FILE)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    def make(policy: str = "preflight: {when: always, least: 30, bound: 20s}\n") -> Bench:
        return Bench(tmp_path, monkeypatch, policy)

    return make


def fast(node: str, peer: str) -> float:
    del node, peer
    return 48.0


def slow_h3(node: str, peer: str) -> float:
    return 11.0 if node != peer and "h3" in (node, peer) else 48.0


def test_good_nodes_hear_so_and_are_remembered(bench: Callable[..., Bench]) -> None:
    made = bench()
    answers = made.play(fast)
    assert {one["text"] for one in answers.values()} == {"preflight: 3 rounds, 0.2 s by perftest, 4 nodes are good"}
    assert all(one["faults"] == {} for one in answers.values())
    assert set(made.memory().proved) == set(HOSTS)
    assert made.site.asked == 1
    assert made.coordinator.counts == {"passed": 1, "found": 0, "undecided": 0}


def test_the_node_at_fault_is_told_and_only_it(bench: Callable[..., Bench]) -> None:
    made = bench()
    answers = made.play(slow_h3)
    words = "node h3's link mlx5_0 to leaf l1 slow: 11 of 30 GB/s"
    assert answers["h3"]["faults"] == {"fabric_link": [words]}
    assert [answers[node]["faults"] for node in ("h1", "h2", "h4")] == [{}, {}, {}]
    assert made.memory().nodes["h3"].state == "faulty"
    [event] = events.read(made.site.events)
    assert (event.kind, event.fields["nodes"], event.fields["job"]) == ("fabric.preflight", "h[1-4]", 7)
    assert words in event.fields["reason"]


def test_what_was_found_for_a_job_is_kept_with_what_came_of_it(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.play(fast, job=8)
    answers = made.play(slow_h3)
    [good], [kept] = made.jobs()[8], made.jobs()[7]
    assert (good.verdict, good.user, good.left_out, good.at_fault) == ("good", a_job(7).user, "", [])
    assert (kept.verdict, answers["h1"]["verdict"]) == ("fault", "fault")
    assert [(part.node, part.what) for part in kept.at_fault] == [
        ("h3", "node h3's link mlx5_0 to leaf l1 slow: 11 of 30 GB/s")
    ]
    controller_of(cast(Site, made.site)).keeper.state.nodes["h3"] = NodeState(drained="slow")
    assert made.ask("h3")["drained"] is True
    made.site.state = "PENDING"
    for _ in range(3):
        made.now += 1
        made.coordinator.restarts.run()
    [kept] = made.jobs()[7]
    assert kept.requeued is not None and kept.released is not None
    [_, event] = events.read(made.site.events)
    assert (event.kind, event.fields["job"], event.fields["node"]) == ("fabric.preflight-requeue", 7, "h3")
    assert event.fields["reason"].endswith("slow: 11 of 30 GB/s; requeued, starts on other nodes")


def test_a_job_whose_node_is_not_drained_does_not_go_first(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.play(slow_h3)
    made.ask("h3")
    controller_of(cast(Site, made.site)).keeper.state.nodes["h1"] = NodeState(drained="another fault")
    made.ask("h1")
    first = made.site.state_save / FIRST_FILE
    assert "7 " not in first.read_text()
    controller_of(cast(Site, made.site)).keeper.state.nodes["h3"] = NodeState(drained="slow")
    made.ask("h3")
    assert "\n7 " in first.read_text()


def test_a_damaged_list_of_jobs_is_begun_again(bench: Callable[..., Bench]) -> None:
    made = bench()
    (made.site.state_save / JOBS_FILE).write_text("{")
    made.play(fast)
    assert [one.verdict for one in made.jobs()[7]] == ["good"]


def test_a_full_disk_costs_no_verdict(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sluice.controllerd.preflight.write_preflights", full)
    assert bench().play(slow_h3)["h3"]["faults"]


def test_a_node_that_does_not_join_is_not_waited_for(bench: Callable[..., Bench]) -> None:
    made = bench()
    answers = made.play(fast, ("h1", "h2", "h3"))
    assert answers["h1"]["text"].endswith("h4 did not join")
    assert set(made.memory().suspects) == {"h4"}


def test_a_node_that_dies_meanwhile_ends_the_preflight_in_time(bench: Callable[..., Bench]) -> None:
    made = bench()
    for node in HOSTS:
        made.begin(node)
        made.join(node)
    for node in ("h1", "h2", "h3"):
        made.next(node, made.ask(node), fast, 7)
    made.now += 19.5
    answer = made.ask("h1", batch=0)
    assert answer["text"].endswith("no answer from h4 in time")
    assert answer["faults"] == {}
    assert not made.memory().nodes


@pytest.mark.parametrize(
    ("policy", "times"),
    [
        ("preflight: {when: always, least: 30}\n", [True, True, True]),
        ("preflight: {when: after-maintenance, least: 30}\n", [True, False, True]),
        ("preflight: {when: on-suspicion, least: 30}\n", [False, False, False]),
        ("preflight: {when: never}\n", [False, False, False]),
        ("classes: {a: {types: [a100]}}\npreflight: {when: always, least: 30, classes: [a]}\n", [False] * 3),
        ("{}\n", [False, False, False]),
    ],
)
def test_the_policy_says_which_jobs(bench: Callable[..., Bench], policy: str, times: list[bool]) -> None:
    """The second job finds all nodes proved; before the third, one was drained."""
    made = bench(policy)
    seen = []
    for job in (1, 2, 3):
        seen.append(made.play(fast, job=job)["h1"]["state"] == "done")
        made.site.away = {"h2"} if job == 2 else set()
        made.coordinator.watch(cast(Site, made.site))
    assert seen == times


@pytest.mark.parametrize(("suspected", "faulty"), [(("h2",), ()), ((), ("h2",))])
def test_a_node_that_is_suspected_or_at_fault_is_tested_again(
    bench: Callable[..., Bench], suspected: tuple[str, ...], faulty: tuple[str, ...]
) -> None:
    """Also where its health report has no finding any more, as its agent was restarted."""
    made = bench("preflight: {when: on-suspicion, least: 30}\n")
    made.coordinator.memory.judge({}, suspected, faulty, "found", 1.0)
    assert made.play(fast)["h1"]["state"] == "done"
    assert made.play(fast, job=8)["h1"]["state"] == "none"


def test_a_job_that_starts_again_is_tested_again(bench: Callable[..., Bench]) -> None:
    made = bench()
    assert "slow" in made.play(slow_h3)["h1"]["text"]
    assert made.play(fast)["h1"]["text"].endswith("4 nodes are good")
    assert made.site.asked == 2


def test_an_array_s_last_task_has_its_own_nodes(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the array's number, for which Slurm shows all of its tasks."""
    made = bench()
    tasks = [replace(a_job(9), nodes="m[1-2]", array_id=7), replace(a_job(7), nodes="h[1-4]", array_id=7)]
    monkeypatch.setattr(made.site, "jobs", lambda **_: tasks)
    assert made.begin("h1") == {"state": "join", "gpus": True}


def test_one_node_is_not_tested(bench: Callable[..., Bench]) -> None:
    assert bench().play(fast, ("h1",), job=100)["h1"] == {
        "state": "none", "faults": {}, "good": False, "drained": False,
    }  # fmt: skip


def test_all_measure_by_tcp_where_one_has_nothing_else(bench: Callable[..., Bench]) -> None:
    made = bench()
    for node in HOSTS:
        made.begin(node)
        answer = made.join(node, tools=("tcp",) if node == "h4" else ("perftest", "tcp"))
    assert {one["tool"] for some in answer["rounds"] for one in some} == {"tcp"}


def test_a_node_with_other_jobs_is_suspected_and_not_drained(bench: Callable[..., Bench]) -> None:
    """A tenant there could fill its interface, and have it drained."""
    made = bench()
    made.site.others = "h3,m1"
    answers = made.play(slow_h3)
    assert [one["faults"] for one in answers.values()] == [{}] * 4
    assert answers["h1"]["text"].endswith("h3 is not the job's alone, and suspected only")
    assert set(made.memory().suspects) == {"h3"}


def test_a_node_on_which_perftest_does_not_run_is_not_drained(bench: Callable[..., Bench]) -> None:
    """Its users may lock too little memory, say: it does not even reach itself."""
    made = bench()
    answers = made.play(lambda node, peer: None if "h3" in (node, peer) else 48.0)
    assert [one["faults"] for one in answers.values()] == [{}] * 4
    assert set(made.memory().suspects) == {"h3"}


def test_a_node_is_in_one_preflight_at_a_time(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.begin("h1", job=7)
    assert made.begin("h1", job=8)["state"] == "none"
    made.now += 21.0  # the first one's nodes are gone
    assert made.begin("h1", job=9)["state"] == "join"


def test_a_job_that_starts_again_on_other_nodes_hears_nothing_of_before(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench()
    made.play(slow_h3)
    monkeypatch.setattr(made.site, "jobs", lambda **_: [replace(a_job(7), nodes="h[1-2],h5")])
    assert made.begin("h5") == {"state": "join", "gpus": True}
    assert made.begin("h1") == {"state": "join", "gpus": True}


def test_what_nodes_forget_is_on_disk(bench: Callable[..., Bench]) -> None:
    """Else a controller that takes over counts a node as proved that was away since."""
    made = bench()
    made.play(fast)
    made.site.away = {"h2"}
    made.coordinator.watch(cast(Site, made.site))
    assert set(made.memory().proved) == {"h1", "h3", "h4"}


def test_only_a_verdict_on_a_node_makes_it_good(bench: Callable[..., Bench]) -> None:
    assert all(one["good"] for one in bench().play(fast).values())
    answers = bench().play(slow_h3, job=8)
    assert [answers[node]["good"] for node in HOSTS] == [True, True, False, True]


def test_two_nodes_share_a_token_that_no_other_test_has(bench: Callable[..., Bench]) -> None:
    made = bench()
    for node in HOSTS:
        made.begin(node)
        made.join(node)
    tokens: dict[str, set[str]] = {}
    for node in HOSTS:
        for one in [test for some in made.ask(node)["rounds"] for test in some]:
            tokens.setdefault(one["id"], set()).add(one["token"])
    assert all(len(some) == 1 for some in tokens.values())
    assert len(set.union(*tokens.values())) == len(tokens) == 8


def test_only_who_asks_in_a_test_says_what_it_gave(bench: Callable[..., Bench]) -> None:
    made = bench()
    for node in HOSTS:
        made.begin(node)
        made.join(node)
    orders = {node: [test for some in made.ask(node)["rounds"] for test in some] for node in HOSTS}
    forged = {one["id"]: [0.001, 1.0] for some in orders.values() for one in some}
    made.ask("h4", batch=0, results=forged)
    for node in ("h1", "h2", "h3"):
        mine = {one["id"]: [48.0, 2.0] for one in orders[node] if one["role"] != "serve"}
        made.ask(node, batch=0, results=mine)
    run = made.coordinator._runs[7]
    assert run.preflight is not None
    slow = {seen.test.node for seen in run.preflight._seen if seen.result.value == 0.001}
    assert slow <= {"h4"}


@pytest.mark.parametrize(
    "words",
    [
        {"node": "h9"},
        {"node": "h1; rm"},
        {"node": 5},
        {"node": "h1", "port": 0, "tools": [], "nics": []},
        {"node": "h1", "port": float("inf"), "tools": [], "nics": []},
        {"node": "h1", "port": 4000, "tools": 5, "nics": []},
        {"node": "h1", "port": 4000, "tools": []},
        {"job": None, "node": "h1"},
        {"node": "h1", "batch": -1, "results": 5},
        {"node": "h1", "port": 4000, "tools": ["tcp"], "nics": ["../x"]},
    ],
)
def test_what_is_no_request_is_refused(bench: Callable[..., Bench], words: dict[str, Any]) -> None:
    made = bench()
    made.begin("h2")
    with pytest.raises(SluiceError):
        made.coordinator.answer({"job": 7, "types": ["h100"], **words})


@pytest.mark.parametrize("value", [-1, 0, True, "48", None, float("nan"), float("inf"), 1e9, [48]])
def test_a_figure_that_cannot_be_is_no_answer(value: object) -> None:
    assert preflight._number(value, 1e5) is None


def test_a_preflight_of_a_lost_controller_ends_without_a_verdict(bench: Callable[..., Bench]) -> None:
    assert bench().ask("h1", batch=0, results={}) == {"state": "none"}


@pytest.mark.parametrize("text", ["", "{", '{"nodes": 5}', '{"classes": [["a"]]}'])
def test_a_damaged_memory_begins_anew(bench: Callable[..., Bench], text: str) -> None:
    made = bench()
    (made.site.state_save / STATE_FILE).write_text(text)
    made.play(fast)
    assert json.loads((made.site.state_save / STATE_FILE).read_text())["nodes"]["h1"]["state"] == "good"


def test_memory_is_bounded() -> None:
    memory = Memory()
    for number in range(400):
        memory.learn({(f"m{number}", "pair", False): [(48.0, 2.0, "h1")] * 100})
    assert len(memory.past) == 256
    assert {len(results) for results in memory.past.values()} == {64}
    assert ("m399", "pair", False) in memory.past


class GpuBench(Bench):
    """Nodes that have GPUs to measure; jobs from 100 on have h1 alone."""

    gpus: Sequence[str] = ("0", "1", "2", "3")

    def about(self, node: str, job: int) -> dict[str, Any]:
        gpus = self.gpus if node != "h4" else []
        return {"gpus": gpus, "gpu_model": "H100", "linked": True, "alone": job >= 100}

    def begin(self, node: str, job: int = 7) -> dict[str, Any]:
        return self.ask(node, job, begins=True, **self.about(node, job))

    def join(self, node: str, job: int = 7, tools: tuple[str, ...] = ("perftest", "tcp")) -> dict[str, Any]:
        alone = job >= 100
        words: dict[str, Any] = {"port": 0 if alone else 4000, "tools": [] if alone else list(tools)}
        return self.ask(node, job, **words, nics=["mlx5_0"], interface="eth0", **self.about(node, job))

    def next(self, node: str, answer: dict[str, Any], speed: Any, job: int) -> dict[str, Any]:
        if answer["state"] != "test":
            return super().next(node, answer, speed, job)
        mine = [one for some in answer["rounds"] for one in some if one["role"] != "serve"]
        results = {one["id"]: self.result(node, one, speed) for one in mine}
        return self.ask(node, job, batch=answer["batch"], results={one: got for one, got in results.items() if got})

    def result(self, node: str, one: dict[str, Any], speed: Any) -> list[Any] | None:
        return speed(node, one) if one["tool"] == "gpu" else [48.0, 2.0]


@pytest.fixture
def gpu_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GpuBench]:
    def make(policy: str = "preflight: {when: always, least: 30, bound: 20s}\n") -> GpuBench:
        return GpuBench(tmp_path, monkeypatch, policy)

    return make


def good_gpus(node: str, test: dict[str, Any]) -> list[Any] | None:
    del node, test
    return [100.0, 0.0, ""]


def test_gpus_are_measured_before_nodes_meet_each_other(gpu_bench: Callable[..., GpuBench]) -> None:
    made = gpu_bench()
    for node in HOSTS:
        made.begin(node, 7)
        answer = made.join(node)
    kinds = [{one.get("kind", one["role"]) for one in some} for some in answer["rounds"]]
    assert kinds == [{"alone"}]  # h4 has none to measure
    answer = made.ask("h1", batch=-1)
    assert [one["kind"] for one in answer["rounds"][0] if one["tool"] == "gpu" and one["gpu"] == "1"] == [
        "clock", "memory", "pcie", "nvlink",
    ]  # fmt: skip
    again = gpu_bench().play(cast(Any, good_gpus), job=8)
    assert {one["text"] for one in again.values()} == {"preflight: 3 rounds, 0.4 s by perftest, 4 nodes are good"}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([40.0, 0.0, ""], "node h3's PCIe of GPU 2 slow: 40 of 100 GB/s"),
        ([None, 0.0, "wrong data"], "node h3's PCIe of GPU 2: wrong data"),
    ],
)
def test_the_gpu_at_fault_is_told(gpu_bench: Callable[..., GpuBench], said: list[Any], words: str) -> None:
    def speed(node: str, test: dict[str, Any]) -> list[Any]:
        bad = (node, test["kind"], test["gpu"]) == ("h3", "pcie", "2")
        return said if bad else [100.0, 0.0, ""]

    made = gpu_bench()
    answers = made.play(cast(Any, speed))
    assert answers["h3"]["faults"] == {"fabric_gpu": [words]}
    assert [answers[node]["faults"] for node in ("h1", "h2", "h4")] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("said", "drained"),
    [([40.0, 0.0, ""], False), ([None, 0.0, "no answer"], False), ([None, 0.0, "wrong data"], True)],
)
def test_other_jobs_can_fill_pcie_and_the_host_and_not_spoil_data(
    gpu_bench: Callable[..., GpuBench], said: list[Any], drained: bool
) -> None:
    made = gpu_bench()
    made.site.others = "h3,m1"
    answers = made.play(cast(Any, lambda node, one: said if (node, one["kind"]) == ("h3", "pcie") else [100.0, 0.0]))
    assert bool(answers["h3"]["faults"]) is drained


def test_a_job_of_one_node_is_tested_where_it_has_gpus(gpu_bench: Callable[..., GpuBench]) -> None:
    def speed(node: str, test: dict[str, Any]) -> list[Any]:
        del node
        return [None, 0.0, "cuMemAlloc_v2 answers 46"] if "3" in (test["gpu"], test["other_gpu"]) else [9.0, 0.0, ""]

    made = gpu_bench()
    answer = made.play(cast(Any, speed), ("h1",), job=100)["h1"]
    assert answer["faults"] == {"fabric_gpu": ["node h1's GPU 3: cuMemAlloc_v2 answers 46"]}
    assert answer["text"].startswith("preflight: 2 rounds, 0.2 s by GPUs, node h1's GPU 3")
    good = made.play(cast(Any, good_gpus), ("h1",), job=101)["h1"]
    assert good["text"].endswith("by GPUs, h1 is good")


@pytest.mark.parametrize("asked", ["gres:shard:10240", "gres/mps:50", "gres:gpu:h100:1,gres:shard:1"])
def test_gpus_that_other_jobs_may_get_a_part_of_are_not_measured(
    gpu_bench: Callable[..., GpuBench], asked: str
) -> None:
    """Also where the node takes them for whole ones, as slurmd does not tell it how many shards a job has."""
    made = gpu_bench()
    made.site.per_node = asked
    assert made.play(cast(Any, good_gpus), ("h1",), job=100)["h1"]["state"] == "none"
    made.play(cast(Any, good_gpus), job=9)
    assert made.coordinator.memory.proved.keys() == set(HOSTS)
    assert not any(kind in KINDS for _, kind, _ in made.coordinator.memory.past)
    assert made.begin("h1", 10) == {"state": "join", "gpus": False}


def test_tests_that_were_not_made_say_nothing(gpu_bench: Callable[..., GpuBench]) -> None:
    made = gpu_bench()
    answer = made.play(cast(Any, lambda *_: None), ("h1",), job=100)["h1"]
    assert (answer["faults"], answer["good"]) == ({}, False)
    assert answer["text"].endswith("by GPUs, nothing to compare with yet")


def test_after_maintenance_each_gpu_is_measured_once(gpu_bench: Callable[..., GpuBench]) -> None:
    """Without asking Slurm for the jobs that need none."""
    made = gpu_bench("preflight: {when: after-maintenance}\n")
    states = []
    for job, gpus in ((100, ["0", "1"]), (101, ["1"]), (102, ["1", "2", "3"]), (103, ["0", "3"])):
        made.gpus = gpus
        made.coordinator.memory.learn(
            {("H100", kind, False): [(100.0, 0.0, f"m{n}") for n in range(9)] for kind in KINDS}
        )
        states.append(made.play(cast(Any, good_gpus), ("h1",), job=job)["h1"]["state"])
    assert states == ["done", "none", "done", "none"]
    assert made.memory().proved == {"h1": {"0", "1", "2", "3"}}
    assert made.site.asked == 2


KINDS = ("clock", "memory", "pcie", "nvlink")


def test_a_policy_without_gpus_measures_none(gpu_bench: Callable[..., GpuBench]) -> None:
    made = gpu_bench("preflight: {when: always, least: 30, gpus: false}\n")
    assert made.play(cast(Any, good_gpus))["h1"]["text"].startswith("preflight: 3 rounds, 0.2 s by perftest")


@pytest.mark.parametrize(
    ("policy", "tools", "tool", "nic"),
    [
        ("any", ("perftest", "ucx", "tcp"), "perftest", "mlx5_0"),
        ("any", ("ucx", "tcp"), "ucx", "mlx5_0"),
        ("any", ("libfabric", "tcp"), "libfabric", "mlx5_0"),
        ("libfabric", ("ucx", "libfabric", "tcp"), "libfabric", "mlx5_0"),
        ("any", ("tcp",), "tcp", "eth0"),
        ("ucx", ("perftest", "ucx", "tcp"), "ucx", "mlx5_0"),
        ("ucx", ("perftest", "tcp"), "tcp", "eth0"),
        ("tcp", ("perftest", "ucx", "tcp"), "tcp", "eth0"),
    ],
)
def test_the_tool_is_what_all_have_or_what_the_policy_says(
    bench: Callable[..., Bench], policy: str, tools: tuple[str, ...], tool: str, nic: str
) -> None:
    made = bench(f"preflight: {{when: always, least: 30, tool: {policy}}}\n")
    for node in HOSTS:
        made.begin(node)
        answer = made.join(node, tools=(*tools, "other") if node == "h4" else tools)
    assert {(one["tool"], one["nic"]) for some in answer["rounds"] for one in some} == {(tool, nic)}


def test_ucx_measures_by_the_network_where_a_node_has_no_rdma(bench: Callable[..., Bench]) -> None:
    made = bench()
    for node in HOSTS:
        made.begin(node)
        nics = [] if node == "h2" else ["mlx5_0"]
        answer = made.ask(node, port=4000, tools=["perftest", "ucx", "tcp"], nics=nics, interface="eth0")
    assert {(one["tool"], one["nic"]) for some in answer["rounds"] for one in some} == {("ucx", "eth0")}
