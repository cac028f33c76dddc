"""Usage records of requests: written with one write, read tolerantly, each id once, and never a prompt in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange import requests
from sluice.exchange.requests import (
    MOST_LINE,
    OUTCOMES,
    RequestLog,
    RequestRecord,
    Seen,
    Spent,
    days,
    parse,
    period_start,
    prune,
    read_requests,
    render,
)

DAY = 86_400
NOON = 20_000 * DAY + DAY / 2


def a_request(number: int = 1, **more: Any) -> RequestRecord:
    usual = RequestRecord(
        id=f"req-{number:08}", begun=NOON, ended=NOON + number, key="0123456789abcdef", user="alice", tenant="nlp",
        service="deepseek-7b", job=17, prompt_tokens=100, completion_tokens=20, cached_tokens=64, outcome="ok",
        status=200, queue_s=0.01, first_token_s=0.25, total_s=1.5, endpoint="/v1/chat/completions", resumed=1,
    )  # fmt: skip
    return replace(usual, **more)


def read(folder: Path, start: float = 0, end: float = 1e11) -> list[RequestRecord]:
    return list(read_requests(folder, start, end))


@pytest.mark.parametrize(
    "change",
    [{}, {"first_token_s": None}, {"user": 'a"\\\n{"v":1'}, {"job": 0}, *({"outcome": one} for one in OUTCOMES)],
)
def test_a_record_is_read_as_it_was_written(change: dict[str, Any]) -> None:
    record = a_request(**change)
    line = render(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert parse(line[:-1]) == record


def test_there_is_no_place_for_what_was_said() -> None:
    names = {one.name for one in fields(RequestRecord)}
    assert names == set(json.loads(render(a_request()))) - {"v"}
    texts = {one.name for one in fields(RequestRecord) if one.type in ("str", "Outcome")}
    assert texts == {"id", "key", "user", "tenant", "service", "outcome", "endpoint"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("id", 5), ("outcome", "fine"), ("prompt_tokens", -1), ("prompt_tokens", 1.5), ("prompt_tokens", True),
     ("prompt_tokens", 1 << 60), ("ended", "now"), ("ended", -1), ("ended", 1e300), ("first_token_s", "x"), ("v", 2),
     ("user", None), ("job", None)],
)  # fmt: skip
def test_lines_that_are_no_records(name: str, value: Any) -> None:
    document = json.loads(render(a_request()))
    assert parse(json.dumps({**document, name: value}, separators=(",", ":")).encode()) is None
    document.pop(name)
    assert parse(json.dumps(document, separators=(",", ":")).encode()) is None


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b'{"v":1}', b"\xff" * 100, b'{"v":' + b"[" * 4000])
def test_other_lines(line: bytes) -> None:
    assert parse(line) is None


def test_files_are_of_a_host_and_a_utc_day(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "ctl-1")
    log.write(a_request(1))
    log.write(a_request(2, ended=NOON + DAY))
    log.write(a_request(3, ended=NOON + 3))  # a late one goes to its own day
    log.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["ctl-1-2024-10-04.jsonl", "ctl-1-2024-10-05.jsonl"]
    assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} <= {0o640}
    assert [one.id[-1] for one in read(tmp_path)] == ["1", "3", "2"]
    assert len(days(tmp_path)) == 2


def test_an_id_is_counted_once_whoever_wrote_it(tmp_path: Path) -> None:
    for host in ("ctl-1", "ctl-2"):
        log = RequestLog(tmp_path, host)
        for number in (1, 2, 2):
            log.write(a_request(number))
        log.write(a_request(3 if host == "ctl-1" else 4))
    assert [one.id[-1] for one in read(tmp_path)] == ["1", "2", "3", "4"]
    assert Spent(tmp_path).by_tenant(0) == {"nlp": 480}


def test_the_times_that_are_asked_for(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "h")
    for number in range(5):
        log.write(a_request(number))
    assert [one.id[-1] for one in read(tmp_path, NOON + 1, NOON + 3)] == ["1", "2"]
    assert read(tmp_path, NOON + 10) == [] and read(tmp_path / "none") == []


def test_damaged_lines_cost_themselves_alone(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "h")
    log.write(a_request(1))
    path = next(tmp_path.iterdir())
    with path.open("ab") as file:
        file.write(render(a_request(9))[:40])  # a full disk
    log.write(a_request(2))
    with path.open("ab") as file:
        file.write(b"\0" * 3 * MOST_LINE + b"\n" + b"x" * (2 << 20) + b"\n{}\n")
    log.write(a_request(3))
    with path.open("ab") as file:
        file.write(render(a_request(4))[:-1])  # still being written
    assert [one.id[-1] for one in read(tmp_path)] == ["1", "2", "3"]


def test_reading_is_bounded_whatever_is_in_the_file(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "h-2024-10-04.jsonl").write_bytes(b"x" * (32 << 20))
    tracemalloc.start()
    try:
        assert read(tmp_path) == []
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_other_files_and_links_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "h-2024-99-04.jsonl").write_bytes(render(a_request()))
    (tmp_path / "notes.txt").write_bytes(render(a_request()))
    (tmp_path / f"ctl-1-{time.strftime('%Y-%m-%d', time.gmtime(NOON))}.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / f"ctl-2-{time.strftime('%Y-%m-%d', time.gmtime(NOON))}.jsonl")
    done: list[object] = []

    def look() -> None:
        done.extend((read(tmp_path), requests.recent_requests(tmp_path, 0, 1e11), Spent(tmp_path).by_tenant(0)))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(20)
    assert done == [[], [], {}]
    with pytest.raises(OSError, match="symbolic"):
        RequestLog(tmp_path, "ctl-1").write(a_request())
    assert (tmp_path / "secret").read_text() == "x"


def test_a_record_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="a record of"):
        RequestLog(tmp_path).write(a_request(endpoint="/" * MOST_LINE))


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, line: len(line) - 1)
    with pytest.raises(OSError, match="No space left"):
        RequestLog(tmp_path).write(a_request())


def test_workers_of_a_host_share_a_file(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.unit.exchange.test_requests import *\n"
        "log = RequestLog(Path(sys.argv[1]), 'h')\n"
        "for number in range(500): log.write(a_request(number, id=f'{sys.argv[2]}-{number}', user='u' * 2000))"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(one)]) for one in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert len(list(tmp_path.iterdir())) == 1 and len(read(tmp_path)) == 2000


def test_the_latest_requests_are_read_from_the_ends_of_files(tmp_path: Path) -> None:
    for host in ("a", "b"):
        log = RequestLog(tmp_path, host)
        for number in range(100):
            log.write(a_request(number, id=f"{number % 60}"))
    found = requests.recent_requests(tmp_path, NOON + 50, NOON + 100)
    assert sorted(int(one.id) for one in found) == sorted({*range(50, 60), *range(40)})
    few = requests.recent_requests(tmp_path, NOON, NOON + 100, most=2000)
    assert 0 < len(few) < 20 and {int(one.id) for one in few} <= set(range(20, 40))


def test_the_bill_of_a_killed_worker_counts_until_its_request_goes_on(tmp_path: Path) -> None:
    bill = a_request(1, endpoint="", outcome="failed", completion_tokens=5)
    whole = a_request(1, ended=NOON + 9, completion_tokens=50)
    one, other = RequestLog(tmp_path, "ctl-1"), RequestLog(tmp_path, "ctl-2")
    spent = Spent(tmp_path)
    one.write(bill)
    one.write(bill)
    one.write(a_request(2))
    assert spent.by_tenant(0) == {"nlp": 105 + 120}
    assert [found.id[-1] for found in read(tmp_path)] == ["2", "1"]
    other.write(whole)
    other.write(whole)
    one.write(replace(bill, ended=NOON + 10))  # once it is whole it stays so
    assert spent.by_tenant(0) == {"nlp": 150 + 120} == Spent(tmp_path).by_tenant(0)
    assert {found.id: found.completion_tokens for found in read(tmp_path)} == {bill.id: 50, "req-00000002": 20}
    recent = requests.recent_requests(tmp_path, NOON, NOON + 20)
    assert {found.id: found.completion_tokens for found in recent} == {bill.id: 50, "req-00000002": 20}


def test_what_was_broken_off_does_not_pay_for_what_is_sent_again(tmp_path: Path) -> None:
    nothing = a_request(1, outcome="cancelled", status=499, prompt_tokens=0, completion_tokens=0)
    part = a_request(1, ended=NOON + 2, outcome="cancelled", status=499, completion_tokens=3)
    whole = a_request(1, ended=NOON + 3, completion_tokens=50)
    one, other, spent = RequestLog(tmp_path, "ctl-1"), RequestLog(tmp_path, "ctl-2"), Spent(tmp_path)
    one.write(nothing)
    assert spent.by_tenant(0) == {"nlp": 0}
    other.write(part)
    assert spent.by_tenant(0) == {"nlp": 103}
    one.write(replace(nothing, ended=NOON + 2.5))  # it takes nothing back
    other.write(whole)
    other.write(replace(part, ended=NOON + 4))
    assert spent.by_tenant(0) == {"nlp": 150} == Spent(tmp_path).by_tenant(0)
    assert [found.completion_tokens for found in read(tmp_path)] == [50]
    assert [one.completion_tokens for one in requests.recent_requests(tmp_path, NOON, NOON + 20)] == [50]


# ---- what tenants spent ----


def test_spent_follows_without_reading_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, spent, parsed = RequestLog(tmp_path, "h"), Spent(tmp_path), 0

    def counting(line: bytes) -> RequestRecord | None:
        nonlocal parsed
        parsed += 1
        return parse(line)

    monkeypatch.setattr(requests, "parse", counting)
    assert spent.by_tenant(0) == {}
    log.write(a_request(1))
    log.write(a_request(2, tenant="robotics", outcome="failed"))
    assert spent.by_tenant(0) == {"nlp": 120, "robotics": 120}
    log.write(a_request(3))
    log.write(a_request(3))
    with next(tmp_path.iterdir()).open("ab") as file:
        file.write(render(a_request(4))[:50])
        file.flush()
        assert spent.by_tenant(0) == {"nlp": 240, "robotics": 120}
        file.write(render(a_request(4))[50:])
    assert spent.by_tenant(0) == {"nlp": 360, "robotics": 120}
    assert parsed == 5
    assert spent.by_tenant(NOON + 3) == {"nlp": 240}  # another period


def test_a_year_of_days_is_not_open_at_once(tmp_path: Path) -> None:
    for number in range(120):
        with closing(RequestLog(tmp_path, "h")) as log:
            log.write(a_request(number, ended=NOON + number * DAY))
    program = (
        "import resource, sys; from pathlib import Path; from sluice.exchange.requests import Spent;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); print(Spent(Path(sys.argv[1])).by_tenant(0))"
    )  # in a process of its own, whose other files are known
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert ran.stdout == f"{{'nlp': {120 * 120}}}\n", ran.stderr


def test_periods() -> None:
    now = time.mktime((2026, 11, 25, 13, 5, 0, 0, 0, -1))  # a Wednesday

    def said(period: str) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(period_start(period, now)))

    assert [said(one) for one in ("daily", "weekly", "monthly", "quarterly", "yearly")] == [
        "2026-11-25 00:00", "2026-11-22 00:00", "2026-11-01 00:00", "2026-10-01 00:00", "2026-01-01 00:00",
    ]  # fmt: skip
    assert period_start("none", now) == 0


def test_old_days_are_removed(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "h")
    for number in range(4):
        log.write(a_request(number, ended=NOON + number * DAY))
    (tmp_path / "other.txt").write_text("")
    assert [one.name for one in prune(tmp_path, NOON + 3 * DAY, 2 * DAY)] == ["h-2024-10-04.jsonl"]
    assert len(read(tmp_path)) == 3 and (tmp_path / "other.txt").exists()


def test_ids_are_remembered_in_bounded_memory() -> None:
    seen = Seen(10)
    assert [seen.again(str(number)) for number in range(15)] == [False] * 15
    assert seen.again("14") and seen.again("5")
    for number in range(100, 121):
        seen.again(str(number))
    assert not seen.again("5")
