"""Idle nodes in a preflight: which stand by, which are asked, and what becomes of a preflight that they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from sluice.base.errors import SluiceError
from sluice.controllerd.daemon import Site
from sluice.controllerd.preflight_spares import Spares
from tests.unit.controllerd.slurm_objects import a_job, a_node
from tests.unit.controllerd.test_preflight_duty import Bench

POLICY = "preflight: {when: always, least: 30, bound: 20s}\n"
NODES = ("h1", "h2", "h3", "h4")


def slow_h1(node: str, peer: str) -> float:
    return 11.0 if node != peer and "h1" in (node, peer) else 48.0


class Pair(Bench):
    """A job on h1 and h2; h3 and h4 are idle, and ask each time that others do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, speed: Callable[[str, str], float]) -> None:
        super().__init__(folder, monkeypatch, POLICY)
        self.speed = speed
        self.states = dict.fromkeys(NODES, "idle")
        self.busy = "m1"
        self.asking = {"h3", "h4"}
        self.joined: set[str] = set()
        self.lost = ""
        self.silent: set[str] = set()  # of the job's, from then on
        monkeypatch.setattr(self.site, "nodes", self._nodes)
        monkeypatch.setattr(self.site, "jobs", self._jobs)
        self.watch()

    def _nodes(self) -> list[Any]:
        return [replace(a_node(name), address=f"10.0.0.{name[1]}", state=self.states[name]) for name in NODES]

    def _jobs(self, **_: Any) -> list[Any]:
        tested = replace(a_job(7), nodes="h[1-2]", tres_per_node="gres:gpu:1")
        return [tested, replace(a_job(99), nodes=self.busy)]

    def watch(self) -> None:
        self.coordinator.watch(cast(Site, self.site))

    def ask_spare(self, node: str, types: tuple[str, ...] = ("h100",)) -> dict[str, Any]:
        return self.coordinator.answer_spare({"node": node, "types": list(types)})

    def join_spare(self, node: str) -> dict[str, Any] | None:
        """Its answer; None where it does not come."""
        if node == self.lost:
            return None
        self.joined.add(node)
        return self.join(node)

    def to_the_end(self, on_turn: Callable[[int], None] = lambda _: None) -> dict[str, dict[str, Any]]:
        """Both nodes of the job, and what idle nodes are asked for, until the job's have heard the end."""
        answers = {node: self.begin(node) for node in ("h1", "h2")}
        for turn in range(400):
            if all(answers[node]["state"] == "done" for node in {"h1", "h2"} - self.silent):
                return answers
            for node in [one for one in answers if one not in self.silent]:
                answers[node] = self.next(node, answers[node], self.speed, 7)
            for node in sorted(self.asking - self.joined):
                if self.ask_spare(node)["state"] == "join" and (joined := self.join_spare(node)) is not None:
                    answers[node] = joined
            on_turn(turn)
            for node in self.joined - self.asking:
                answers.pop(node, None)
            self.now += 0.1
        raise AssertionError(answers)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    def make(speed: Callable[[str, str], float] = slow_h1) -> Pair:
        return Pair(tmp_path, monkeypatch, speed)

    return make


def test_idle_nodes_say_which_of_two_nodes_it_is(pair: Callable[..., Pair]) -> None:
    made = pair()
    answers = made.to_the_end()
    assert made.joined == {"h3", "h4"}
    assert "by perftest with idle h[3-4], node h1's link mlx5_0 to leaf l1" in answers["h1"]["text"]
    assert (set(answers["h1"]["faults"]), answers["h2"]["faults"]) == ({"fabric_link"}, {})
    assert made.memory().nodes["h1"].state == "faulty"
    assert set(made.memory().nodes) <= {"h1", "h2"}  # they have proved nothing


def test_good_nodes_ask_no_idle_ones(pair: Callable[..., Pair]) -> None:
    made = pair(lambda *_: 48.0)
    assert made.to_the_end()["h1"]["text"].endswith("2 nodes are good")
    assert made.joined == set()


@pytest.mark.parametrize("why", ["another job there", "drained", "suspected", "other GPUs", "silent", "no time"])
def test_a_node_that_is_not_idle_as_the_job_s_is_not_asked(pair: Callable[..., Pair], why: str) -> None:
    made = pair()
    if why == "another job there":
        made.busy = "h[3-4]"
    elif why == "drained":
        made.states |= {"h3": "down", "h4": "allocated"}
        made.watch()
    elif why == "suspected":
        made.coordinator.memory.judge({}, ("h3", "h4"), (), "found", 1.0)
    elif why == "silent":
        made.ask_spare("h3")
        made.asking = set()
        made.now += 11.0
    elif why == "other GPUs":
        made.asking = set()

    def turn(number: int) -> None:
        if why == "no time" and number < 2:
            made.now += 8.0
        for node in ("h3", "h4") if why == "other GPUs" else ():
            made.ask_spare(node, ("a100",))

    answers = made.to_the_end(turn)
    assert made.joined == set()
    assert answers["h1"]["faults"] == answers["h2"]["faults"] == {}
    assert "undecided: h1's link mlx5_0 or h2's link mlx5_0" in answers["h1"]["text"]


def test_one_that_does_not_come_is_waited_for_three_seconds(pair: Callable[..., Pair]) -> None:
    made = pair()
    made.lost = "h3"
    answers = made.to_the_end()
    assert "with idle h4, node h1's link" in answers["h1"]["text"]


@pytest.mark.parametrize("how", ["says so", "dies", "gets a job"])
def test_one_that_leaves_costs_no_verdict_on_others(pair: Callable[..., Pair], how: str) -> None:
    """Both leave in the middle of a test; what the job's nodes say of them is no evidence."""
    made = pair()

    def leave(_: int) -> None:
        if made.joined == {"h3", "h4"} and made.asking:
            made.asking = set()
            for node in ("h3", "h4"):
                if how == "says so":
                    made.ask(node, leaves=True)
            if how == "gets a job":
                monkey = replace(a_job(8), nodes="h[3-4]", tres_per_node="gres:gpu:1")
                made.site.jobs = lambda **_: [monkey]  # type: ignore[method-assign]
                made.begin("h3", job=8)

    answers = made.to_the_end(leave)
    assert answers["h1"]["faults"] == answers["h2"]["faults"] == {}
    assert "undecided: h1's link mlx5_0 or h2's link mlx5_0" in answers["h1"]["text"]
    assert made.now < (1021.0 if how == "dies" else 1003.0)
    assert {"h3", "h4"}.isdisjoint(made.memory().suspects)


def test_one_that_hangs_with_a_node_of_the_job_does_not_make_the_others_forget(pair: Callable[..., Pair]) -> None:
    """h1 waits for h3 until its time is over; h2 hears what was known before."""
    made = pair()

    def hang(_: int) -> None:
        if made.joined == {"h3", "h4"} and made.asking:
            made.asking = set()
            made.silent = {"h1"}

    answers = made.to_the_end(hang)
    text = answers["h2"]["text"]
    assert "undecided: h1's link mlx5_0 or h2's link mlx5_0" in text
    assert text.endswith("no answer from h[1,3-4] in time")
    assert {name: one.state for name, one in made.memory().nodes.items()} == {"h1": "suspected", "h2": "suspected"}


def test_an_idle_node_at_fault_is_suspected_only(pair: Callable[..., Pair]) -> None:
    def bad_h1_and_h4(node: str, peer: str) -> float:
        return 11.0 if node != peer and {"h1", "h4"} & {node, peer} else 48.0

    made = pair(bad_h1_and_h4)
    answers = made.to_the_end()
    assert "fabric_link" in answers["h1"]["faults"]
    assert "h4 is idle, and suspected only" in answers["h1"]["text"]
    assert made.memory().nodes["h4"].state == "suspected"


def test_who_belongs_to_no_preflight_is_refused(pair: Callable[..., Pair]) -> None:
    made = pair()
    made.begin("h1")
    with pytest.raises(SluiceError, match="node h3 is not one of the job's"):
        made.join("h3")
    with pytest.raises(SluiceError, match="not a valid request"):
        made.coordinator.answer_spare({"node": "h3"})


def test_few_idle_nodes_ask_often_however_many_there_are() -> None:
    spares = Spares()
    nodes = [replace(a_node(f"n{number}"), state="idle", flags=frozenset()) for number in range(4000)]
    assert spares.seen("n0", ["h100"], "l0", 0.0) == 5.0  # Slurm has said nothing yet
    spares.watch(nodes, 0.0)
    again = [spares.seen(f"n{n}", ["h100"], f"l{n // 20}", 0.0) for n in range(4000)]
    assert again.count(1.0) == 64
    assert all(again[leaf * 20 : leaf * 20 + 20].count(1.0) == 2 for leaf in range(32))
    assert sum(1 / one for one in again) < 64 + 4000 / 60 + 1
    assert max(again) == 80.0
    assert spares.choose(["h100"], ["l3"], [], 1.0) == ("n60", "n61")
    assert spares.choose(["h100"], ["l3"], ["n60"], 1.0)[0] == "n61"
    assert spares.choose(["a100"], ["l3"], [], 1.0) == ()
    assert spares.choose(["h100"], ["l3"], [], 11.0) == ()
    assert spares.seen("n70", ["h100"], "l3", 11.0) == 1.0  # in the place of one that was not heard
    spares.watch(nodes, 1000.0)
    assert spares.seen("n60", ["h100"], "l3", 1000.0) == 1.0


def test_nodes_without_jobs_that_slurm_does_not_show_as_idle_ask_as_seldom() -> None:
    """In a maintenance of the whole site none can stand by."""
    spares = Spares()
    spares.watch([replace(a_node(f"n{n}"), state="idle", flags=frozenset({"maintenance"})) for n in range(4000)], 0.0)
    again = [spares.seen(f"n{n}", ["h100"], f"l{n // 20}", turn) for turn in (0.0, 60.0) for n in range(4000)]
    assert again[0] == 5.0
    assert sum(1 / one for one in again[4000:]) < 51
