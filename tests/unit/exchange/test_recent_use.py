"""What was used of services lately: each record once, however they come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.exchange.recent_use import CallerUse, RecentUse, ServiceUse
from sluice.exchange.requests import RequestLog, RequestRecord

NOW = 1_795_000_040.0  # 20 s after a minute began: rates are of 5 minutes and 20 s
DEADLINES = {"llm": 30.0, "quiet": 60.0}
USUAL = RequestRecord(
    id="r", begun=NOW - 9, ended=NOW - 5, key="k", user="alice", tenant="nlp", service="llm", job=7, prompt_tokens=1000,
    completion_tokens=600, cached_tokens=0, outcome="ok", status=200, queue_s=0.0, first_token_s=1.0, total_s=4.0,
    endpoint="/v1/chat/completions",
)  # fmt: skip


def write(folder: Path, *records: dict[str, Any], host: str = "gw1") -> None:
    log = RequestLog(folder, host)
    for number, words in enumerate(records):
        log.write(replace(USUAL, **{"id": f"{host}-{number}-{words}"[:60], **words}))
    log.close()


def test_rates_are_of_the_last_minutes_and_the_deadline_of_the_last_hour(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        RecentUse(tmp_path / "elsewhere").look(DEADLINES, NOW)
    recent = RecentUse(tmp_path)
    assert recent.look(DEADLINES, NOW) == dict.fromkeys(DEADLINES, ServiceUse(0, 0, None)), "there is no record yet"
    write(
        tmp_path, {}, {"ended": NOW - 200}, {"ended": NOW - 900}, {"ended": NOW - 4000}, {"service": "gone"},
        {"first_token_s": 31.0}, {"first_token_s": None, "total_s": 2.0},
        {"first_token_s": None, "outcome": "expired"}, {"first_token_s": None, "outcome": "failed"},
        {"first_token_s": None, "outcome": "refused-limit"}, {"first_token_s": None, "outcome": "cancelled"},
    )  # fmt: skip
    found = recent.look(DEADLINES, NOW)
    assert found["quiet"] == ServiceUse(0, 0, None)
    assert found["llm"].requests_per_minute == round(8 / (5 + 20 / 60))
    assert found["llm"].tokens_per_minute == round(8 * 1600 / (5 + 20 / 60))
    assert found["llm"].deadline_met_percent == round(100 * 4 / 7, 1), "an embedding counts by its answer"


def test_what_is_added_is_read_once_and_what_is_replaced_counts_no_more(tmp_path: Path) -> None:
    write(tmp_path, {"id": "one"}, {"id": "cut", "endpoint": "", "completion_tokens": 0})
    recent = RecentUse(tmp_path)
    first = recent.look(DEADLINES, NOW)["llm"]
    assert first == recent.look(DEADLINES, NOW)["llm"], "nothing is counted twice"
    assert first.tokens_per_minute == round(2600 / (5 + 20 / 60))
    write(tmp_path, {"id": "cut"}, {"id": "one"}, {"id": "new"})
    assert recent.look(DEADLINES, NOW)["llm"].tokens_per_minute == round(4800 / (5 + 20 / 60))
    later = NOW + 3700
    assert recent.look(DEADLINES, later)["llm"] == ServiceUse(0, 0, None), "an hour later it is forgotten"


def test_users_and_tenants_are_counted_over_all_services_for_some_minutes(tmp_path: Path) -> None:
    cut = {"tenant": "hpc", "id": "cut", "endpoint": "", "completion_tokens": 0}
    write(tmp_path, {}, {"service": "gone"}, {"user": "bob", "ended": NOW - 900}, cut)
    recent = RecentUse(tmp_path)
    recent.look(DEADLINES, NOW)
    minute = 5 + 20 / 60
    assert recent.callers(NOW) == {
        "user/alice": CallerUse(round(3 / minute), round(4200 / minute)),
        "tenant/nlp": CallerUse(round(2 / minute), round(3200 / minute)),
        "tenant/hpc": CallerUse(round(1 / minute), round(1000 / minute)),
    }
    write(tmp_path, {"tenant": "hpc", "id": "cut"})
    recent.look(DEADLINES, NOW)
    assert recent.callers(NOW)["tenant/hpc"].tokens_per_minute == round(1600 / minute), "its bill is replaced"
    assert recent.callers(NOW + 400) == {}
