"""Pages of jobs are what a plain filter and sort give, whatever changes in between."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from sluice.base.errors import UsageError
from sluice.base.hostlist import expand
from sluice.controllerd.snapshot import job_row
from sluice.web import store as module
from sluice.web.store import SORTS, Job, Jobs, Query, Texts
from tests.unit.controllerd.slurm_objects import a_job


def a_row(choose: random.Random, number: int) -> dict[str, Any]:
    user, state = choose.choice("abc"), choose.choice(["PENDING", "RUNNING"])
    start = None if state == "PENDING" else choose.randrange(50)
    nodes = "" if state == "PENDING" else choose.choice(["n1", "n[1-2]", "n2", "n[1,3-4]"])
    job = a_job(number, user=user, account=f"acc-{user}", state=state, start_time=start, priority=choose.randrange(9),
                nodes=nodes, node_count=len(expand(nodes)) if nodes else 0)  # fmt: skip
    return job_row(job)


@pytest.mark.parametrize("steps", [0, 1, 4, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_what_a_plain_filter_and_sort_give(monkeypatch: pytest.MonkeyPatch, seed: int, steps: int) -> None:
    """However far the order of all jobs is walked before those that were found are sorted."""
    monkeypatch.setattr(module, "_STEPS", steps)
    choose, jobs = random.Random(seed), Jobs()
    truth: dict[int, dict[str, Any]] = {}
    jobs.index()
    for _ in range(60):
        for _ in range(20):
            number = choose.randrange(1, 150)
            if choose.random() < 0.3:
                jobs.remove(number)
                truth.pop(number, None)
            else:
                truth[number] = a_row(choose, number)
                jobs.put(truth[number])
        users = frozenset(choose.sample("abc", choose.randrange(3)))
        states = frozenset(choose.sample(["PENDING", "RUNNING"], choose.randrange(2)))
        seen = choose.choice([None, set(choose.sample(sorted(truth), len(truth) // 2))])
        node = choose.choice(["", "n1", "n3", "n9"])
        sort, descending = choose.choice(SORTS), choose.random() < 0.5

        def place(row: dict[str, Any], sort: str = sort) -> tuple[int, int]:
            return -1 if row[sort] is None else row[sort], row["id"]

        wanted = [
            row["id"]
            for row in sorted(truth.values(), key=place, reverse=descending)
            if (not users or row["user"] in users) and (not states or row["state"] in states)
            if seen is None or row["id"] in seen
            if not node or (row["nodes"] and node in expand(row["nodes"]))
        ]
        found: list[int] = []
        cursor: str | None = ""
        while cursor is not None:
            page = jobs.page(
                Query(users=users, states=states, node=node, sort=sort, descending=descending, limit=7, cursor=cursor),
                seen,
            )
            assert page.total == len(wanted)
            found += [job.id for job in page.jobs]
            cursor = page.next
        assert found == wanted


@pytest.mark.parametrize("descending", [True, False])
def test_few_jobs_at_the_end_of_many_are_found_without_sorting_them(
    monkeypatch: pytest.MonkeyPatch, descending: bool
) -> None:
    """Whoever asks for the last page, or makes up its cursor, would have all that match sorted each time."""
    jobs = Jobs()
    for number in range(1, 101):
        jobs.put(job_row(a_job(number, user="a" if number % 2 else "b", priority=number)))
    jobs.index()
    monkeypatch.setattr(jobs, "_sorted", None)
    query = Query(users=frozenset("a"), sort="priority", descending=descending, limit=48)
    page = jobs.page(query, None)
    assert page.next is not None
    last = jobs.page(replace(query, cursor=page.next), None)
    assert [job.id for job in last.jobs] == ([3, 1] if descending else [97, 99])
    assert last.next is None


def test_texts_are_kept_up_to_a_size_those_that_were_asked_for_last() -> None:
    """However long one tenant's names and comments are, of which a control character is six bytes."""
    small, large = Job(job_row(a_job(1))), Job(job_row(a_job(2, comment="\x01" * 1000)))
    size = len(Texts(0).of(small))
    assert json.loads(Texts(0).of(large)) == large.document() and len(Texts(0).of(large)) > 6000
    texts = Texts(6000 + 3 * size)
    others = [Job(job_row(a_job(number))) for number in range(3, 10)]
    made = {job: texts.of(job) for job in (small, *others)}
    assert all(texts.of(job) is text for job, text in made.items())
    assert texts.of(small) is made[small]
    kept = texts.of(large)
    assert texts.of(large) is kept and texts.of(small) is made[small]
    assert texts.of(others[0]) is not made[others[0]]
    texts = Texts(6000)
    assert texts.of(large) is not texts.of(large)  # it alone is too large


@pytest.mark.parametrize("cursor", ["AAAA", "=", "\x00", "[]", "W10", "x" * 600, "WzIsImlkIiwxLDEsMV0", "\u00e9"])
def test_a_cursor_that_is_not_ours_is_refused(cursor: str) -> None:
    jobs = Jobs()
    jobs.index()
    with pytest.raises(UsageError, match="cursor"):
        jobs.page(Query(cursor=cursor), None)


def test_jobs_by_a_part_of_their_names_follow_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept, few of them, and are what a search of all names finds."""
    monkeypatch.setattr(module, "_SMALL", 0)
    monkeypatch.setattr(module, "_SEARCHES", 3)
    choose, jobs = random.Random(1), Jobs()
    parts = ["a", "b", "ab", "train", "x" * 9]
    for step in range(600):
        row = a_row(choose, choose.randint(1, 40)) | {"name": "".join(choose.choices("ab", k=choose.randint(0, 4)))}
        if step % 7:
            jobs.put(row)
        else:
            jobs.remove(row["id"])
        if step == 20:
            jobs.index()
        if step >= 20:
            part = choose.choice(parts)
            wanted = {number for number, job in jobs.by_id.items() if part in job.name}
            assert {job.id for job in jobs.page(Query(name=part), None).jobs} == wanted
            some = set(choose.sample(sorted(jobs.by_id), len(jobs.by_id) // 2))
            assert {job.id for job in jobs.page(Query(name=part), some).jobs} == wanted & some
            assert len(jobs._named) <= 3


def test_jobs_that_wait_are_counted_as_they_change() -> None:
    choose, jobs = random.Random(2), Jobs()
    for _ in range(300):
        number = choose.randint(1, 30)
        job = a_job(number, state=choose.choice(["PENDING", "RUNNING"]), reason=choose.choice(["", "Priority", "Held"]),
                    tres={"gres/gpu": choose.randrange(3)})  # fmt: skip
        jobs.remove(number) if choose.random() < 0.2 else jobs.put(job_row(job))
        for seen in (None, set(choose.sample(range(31), 15))):
            wait = [one for one in jobs.by_id.values() if one.state == "PENDING" and (seen is None or one.id in seen)]
            wanted = {
                reason: (len(mine), sum(one.gpus for one in mine))
                for reason in ("", "Priority", "Held")
                if (mine := [one for one in wait if one.reason == reason])
            }
            assert jobs.waiting(seen) == wanted


def test_what_is_made_of_sections_is_made_again_once_they_change() -> None:
    store = module.Store()
    made: list[int] = []

    def take(*rows: list[Any], reset: bool = False) -> int:
        store.apply({"epoch": "e", "last": 1, "more": False, "reset": reset, "rows": list(rows)})

        def count() -> int:
            made.append(len(store.rows("nodes")))
            return made[-1]

        return store.once("how many", ("nodes", "gpus"), count)

    assert (take(["nodes", "n1", {}]), take(["events", "1", {}]), len(made)) == (1, 1, 1)
    assert (take(["nodes", "n2", {}]), take(["nodes", "n1", None]), len(made)) == (2, 1, 3)
    assert (take(reset=True), len(made)) == (0, 4)


def test_a_long_answer_is_taken_in_pieces() -> None:
    store = module.Store()
    changes: list[module.Change] = []
    rows = [["jobs", str(number), a_row(random.Random(1), number)] for number in range(1, 201)]
    answer = {"epoch": "e", "last": 1, "more": False, "reset": True, "rows": rows}
    pieces = len(list(store.applying(answer, changes)))
    assert pieces == 4 and len(store.jobs.by_id) == 200 and store.complete and len(changes) == 201
