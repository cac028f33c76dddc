"""Nodes that an administrator empties: the order, the question and the answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.base.files import write_atomic
from sluice.exchange import emptying
from sluice.exchange.emptying import (
    ASK_FILE,
    REASONS,
    SAID_FILE,
    LeavingJob,
    is_order,
    order,
    parse_emptying,
    reason_before,
)
from sluice.exchange.plugin_list import checksummed
from sluice.explain.moves import leaving, site_emptying

SAID = """node n1 0 order
node n2 1796007600 ask
job 7 n1 moves - 0 n3
job 8 n1 stays unsaved 1796009000 -
job 9 n2 ends in-time 1796007000 -
"""


def whole(lines: str, at: int = 1000) -> str:
    return checksummed(f"sluice-emptying 1\nat {at}\n{lines}")


def test_what_slurmctld_says_is_read() -> None:
    said = parse_emptying(whole(SAID), source="x")
    assert (said.at, said.deadlines, said.ordered) == (1000, {"n1": 0, "n2": 1796007600}, frozenset({"n1"}))
    assert said.jobs[0] == LeavingJob(7, "n1", "moves", "-", 0, "n3")
    assert said.jobs[0].reason == "saves, is requeued and goes on on n3"
    assert (said.jobs[2].end, said.jobs[2].to, said.jobs[2].reason) == (1796007000, "", "ends by the deadline")


@pytest.mark.parametrize(
    "text", ["", whole(SAID)[:-1], whole(SAID.replace("moves", "flies")), whole(SAID.replace("in-time", "why"))]
)
def test_a_damaged_answer_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(SluiceError, match=r"^sluice\.emptying: "):
        parse_emptying(text, source="sluice.emptying")


def test_words_are_those_of_the_plugin() -> None:
    source = (Path(__file__).parents[3] / "slurm_plugin/planner/emptying.c").read_text()
    names = source.partition("whys[SLUICE_LEAVE_WHYS] = {")[2].partition("}")[0]
    assert [name.strip().strip('"') for name in names.split(",")] == list(REASONS)


def test_an_order_is_known_by_its_reason() -> None:
    assert order("new fan", 1796007600) == "sluice empty by 2026-11-30T03:00:00Z: new fan"
    for reason in (order("new fan", 0), order("", 1796007600)):
        assert is_order(reason)
    assert reason_before(order("new fan", 0)) == ""
    assert reason_before(order("a; drained before: b", 1796007600, "hot: 95 C")) == "hot: 95 C"
    for reason in ("new fan", "sluice empty", "sluice empty by tomorrow: x", "sluice emptyish: x"):
        assert not is_order(reason)


def test_the_owner_of_a_job_is_told_of_orders_alone(tmp_path: Path) -> None:
    config = {"StateSaveLocation": str(tmp_path)}
    assert leaving(site_emptying(config), 8) == []
    (tmp_path / SAID_FILE).write_text(whole(SAID, int(time.time())))
    said = site_emptying(config)
    assert leaving(said, 8) == [f"is on n1, which an administrator empties: {REASONS['unsaved']}"]
    assert leaving(said, 9) == []
    (tmp_path / SAID_FILE).write_text(whole(SAID, int(time.time()) - 61))
    assert leaving(site_emptying(config), 8) == []


def test_an_answer_to_another_question_is_none(tmp_path: Path) -> None:
    """Older, of other nodes, or with another deadline; the question goes with who asked it."""

    def slurmctld() -> None:
        path = tmp_path / ASK_FILE
        while not path.exists():
            time.sleep(0.01)
        asked.append(path.read_text())
        at = int(time.time())
        for text in (
            whole("node n1 5 ask\n", at - 10),
            whole("node n2 5 ask\n", at + 1),
            whole("node n1 6 ask\n", at + 1),
        ):
            write_atomic(tmp_path / SAID_FILE, text)
            time.sleep(0.5)
        write_atomic(tmp_path / SAID_FILE, whole("node n1 5 ask\nnode n2 0 order\n", at + 2))

    asked: list[str] = []
    thread = threading.Thread(target=slurmctld)
    thread.start()
    said = emptying.ask(tmp_path, ["n1"], 5, patience_s=60)
    thread.join()
    assert said.deadlines == {"n1": 5, "n2": 0}
    assert asked[0].startswith("sluice-empty 1\nn1 ") and not (tmp_path / ASK_FILE).exists()


def test_no_answer_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="has not said in 0 s") as raised:
        emptying.ask(tmp_path, ["n1"], 0, patience_s=0.1)
    assert "level place" in raised.value.remedy and not (tmp_path / ASK_FILE).exists()
