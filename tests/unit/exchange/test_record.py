"""What a job's user can write into root's records: bounded, printable, and never instead of what was done to it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.admin_comment import render
from sluice.exchange.record import MOST_EVENTS, MOST_RECORD, Event, Grant, JobRecord, Store

DEVICES = 64
ACTIONS = ("refuse", "limit", "stray", "problem", "rung", "share", "warn", "end", "cap", "reset", "scrub", "something")


def record(grants: int = 1) -> JobRecord:
    made = JobRecord(7, 1000, "u" * 32, "a" * 64, "p" * 64, "n1", 5000.0)
    for index in range(grants):
        passed = {rung: "x" * 200 for rung in ("mig", "driver", "mps", "limiter")}
        made.grants.append(Grant(index, "MIG-" + "0" * 36, "nvidia", "H100" * 8, 80 << 30, passed_over=passed))
    return made


def size(one: JobRecord) -> int:
    return len(one.to_json())


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 5)
    if kind == 0:
        return rng.choice([1e308, -1, 1 << 5000, float("inf"), float("nan"), True, None])
    if kind < 5:
        return "".join(
            rng.choices(
                ["x", "\n", "\x1b[2J", "\ud800", '"', "\u202e", "ä", "\x00"], k=rng.choice((5, 50, 3000 >> (4 * depth)))
            )
        )
    return [value(rng, depth + 1) for _ in range(rng.randrange(100 if kind == 5 and not depth else 3))]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_noted_a_record_is_bounded_printable_and_read_back(seed: int) -> None:
    rng = random.Random(seed)
    one = record(DEVICES)
    for _ in range(300):
        one.note(rng.choice(ACTIONS), **{f"f{number}": value(rng) for number in range(rng.choice((1, 3, 20)))})
        one.note_once("problem", what=value(rng))
    one.note("end", step="0", uuid="MIG-" + "0" * 36, charged=1 << 40, limit=1 << 30, notified="the watchdog")
    one.note("return", uuids=[grant.uuid for grant in one.grants])
    assert [event.action for event in one.events[-2:]] == ["end", "return"]
    text = one.to_json()
    assert len(text) < MOST_RECORD and len(one.events) <= MOST_EVENTS
    assert text.strip().isprintable() and "Infinity" not in text and "NaN" not in text
    assert JobRecord.from_json(text, "x") == one
    assert len(json.dumps(one.in_short())) < (4 << 10) + size(record(DEVICES)) + 100


def test_a_tenant_who_fills_the_list_still_has_ended(tmp_path: Path) -> None:
    """Attack: 210 requests that each name other devices, then more memory than was asked."""
    one = record()
    for number in range(210):
        one.note("refuse", step="0", open=[f"/dev/nvidia{number}"])
        one.note("limit", uuid="GPU-0", asked=number, bytes=number)
    for _ in range(100):
        one.note("warn", step="0", uuid="GPU-0", charged=1 << 40, limit=1, notified="x")
    for number in range(3):
        one.note("end", step=f"{number}", uuid="GPU-0", charged=1 << 40, limit=1, notified="x")
    one.note("return", uuids=["GPU-0"])
    assert sum(event.action == "refuse" for event in one.events) == 16
    assert "ended=3" in render([one])
    shown = one.events_left_out + sum(event.times for event in one.events)
    assert shown == 210 + 210 + 100 + 3 + 1, "none is lost without being counted"
    store = Store(tmp_path)
    store.save(one)
    assert store.load(7) == one


def test_large_requests_do_not_grow_a_record() -> None:
    """Attack: 600 requests of 62 KB made a record of 37 MB, and `status` took 9.5 s."""
    one = record()
    for number in range(600):
        one.note("refuse", step="0", open=[f"{number}" + "x" * 4000] * 16)
    one.note("end", step="0")
    began = time.process_time()
    assert size(one) < 80 << 10 and len(json.dumps(one.in_short())) < 6 << 10
    assert time.process_time() - began < 0.5
    assert one.events[-1].action == "end"


def test_what_is_said_again_is_counted() -> None:
    one = record()
    for _ in range(1000):
        one.note("refuse", step="0", open=["/dev/nvidia1"])
    [event] = one.events
    assert (event.times, one.events_left_out) == (1000, 0)
    one.note("refuse", step="1", open=["/dev/nvidia1"])
    assert len(one.events) == 2


def test_a_record_that_an_earlier_version_let_grow_is_cut_when_it_is_read() -> None:
    one = record()
    one.events = [Event(1.0, "refuse", {"open": ["y" * 60000] * 16}) for _ in range(30)]
    one.events.append(Event(2.0, "end", {"step": "0"}))
    found = JobRecord.from_json(one.to_json(), "x")
    assert size(found) < 16 << 10 and found.events[-1].action == "end"


def test_the_latest_events_are_shown() -> None:
    one = record()
    for number in range(30):
        one.note("end", step=str(number))
        one.note("cap", uuid="GPU-0", bytes=number)
    assert [event.detail["step"] for event in one.latest(("end",), most=3)] == ["27", "28", "29"]
    assert [event.action for event in one.latest(most=3)] == ["cap", "end", "cap"][:3]
    assert one.latest(size=10) == []


def test_usage_of_another_kind_is_no_record() -> None:
    text = json.dumps(json.loads(record().to_json()) | {"usage": 5})
    with pytest.raises(SluiceError, match="n1: not a job's record: usage 5"):
        JobRecord.from_json(text, "n1")
