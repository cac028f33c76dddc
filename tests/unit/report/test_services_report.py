"""The report of services: requests from the gateways' records, GPU time from the replicas' jobs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from policy.service_jobs import ServicePolicy, ServicesPolicy
from sluice.base.errors import UsageError
from sluice.cli import report as command
from sluice.exchange.requests import RequestLog, RequestRecord, parse
from sluice.report import services
from sluice.report.count import Span
from sluice.report.fields import fields_of
from sluice.report.fleet import Fleet, NodeGpus
from sluice.report.output import row_document
from sluice.report.rollup import midnight
from sluice.report.services import (
    USUAL,
    RequestDays,
    ServiceKey,
    ServiceSelection,
    add_gpu_time,
    parse_groups,
    rows_of,
)
from sluice.slurm.allocations import Allocation

DAY = date(2026, 11, 20)
NEXT = DAY + timedelta(days=1)
NOON = midnight(DAY) + 43_200
LAUNCH = "0123456789abcdef"
POLICY = ServicesPolicy(
    services={"llm": ServicePolicy(name="llm", tenant="nlp", user="nlp-serve", engine="vllm", callers=("*",))}
)
FLEET = Fleet({"n1": NodeGpus("h100", {"h100": 8}, 8, 8 * 81_920)})
JOB = Allocation(
    id=17, label="17", name=f"sluice-serve.llm.{LAUNCH}", user="nlp-serve", account="nlp", qos="normal",
    partition="main", state="COMPLETED", exit_code="0:0", submit=NOON, eligible=NOON, start=NOON, end=NOON + 3600,
    elapsed_s=3600, limit_s=7200, node_count=1, nodes="n1", requested="gres/gpu=2", allocated="gres/gpu=2,node=1",
    admin_comment="",
)  # fmt: skip


def a_request(number: int, **more: Any) -> RequestRecord:
    usual = RequestRecord(
        id=f"r{number}", begun=NOON, ended=NOON + number, key="k", user="alice", tenant="nlp", service="llm", job=17,
        prompt_tokens=100, completion_tokens=50, cached_tokens=10, outcome="ok", status=200, queue_s=0.0,
        first_token_s=0.1, total_s=1.0, endpoint="/v1/completions",
    )  # fmt: skip
    return replace(usual, **more)


def written(folder: Path, records: Iterable[RequestRecord], host: str = "ctl-1") -> Path:
    log = RequestLog(folder, host)
    for record in records:
        log.write(record)
    log.close()
    return folder


def everything(key: ServiceKey) -> bool:
    return True


def documents(cells: services.Cells, by: tuple[str, ...] = USUAL, takes: Any = everything) -> list[dict[str, Any]]:
    return [row_document(fields_of("services"), row) for row in rows_of(cells, takes, by)]


def test_requests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    outcomes = ("ok", "ok", "refused-limit", "cancelled", "failed", "expired")
    records = [
        a_request(number, outcome=outcome, first_token_s=0.1 * (number + 1), resumed=number % 2)
        for number, outcome in enumerate(outcomes)
    ]
    (row,) = documents(RequestDays(written(tmp_path, records)).cells(DAY, DAY))
    wanted = {
        "service": "llm", "account": "nlp", "requests": 6, "answered": 2, "refused": 1, "cancelled": 1, "failed": 1,
        "expired": 1, "prompt_tokens": 600, "completion_tokens": 300, "cached_tokens": 60, "tokens": 900, "resumed": 3,
    }  # fmt: skip
    assert row | wanted == row
    assert 300 <= row["first_token_p50_ms"] <= 305 and 600 <= row["first_token_p99_ms"] <= 610
    assert row["gpu_s"] == 0 and row["tokens_per_gpu_hour"] is None


def test_groups_days_and_selections(tmp_path: Path) -> None:
    records = [
        a_request(1),
        a_request(2, user="bob", tenant="robotics"),
        a_request(3, service="embed"),
        a_request(4, ended=midnight(NEXT) + 5.0),
        a_request(5, ended=midnight(NEXT) - 0.01),
    ]
    cells = RequestDays(written(tmp_path, records)).cells(DAY, NEXT)
    assert [(one["service"], one["account"], one["requests"]) for one in documents(cells)] == [
        ("embed", "nlp", 1), ("llm", "nlp", 3), ("llm", "robotics", 1),
    ]  # fmt: skip
    assert [(one["day"], one["requests"]) for one in documents(cells, ("day",))] == [(str(DAY), 4), (str(NEXT), 1)]
    of_bob = ServiceSelection(users=frozenset({"bob"}))
    assert [one["account"] for one in documents(cells, takes=of_bob.takes)] == ["robotics"]
    of_embed = ServiceSelection(services=frozenset({"embed"}), accounts=frozenset({"robotics"}))
    assert documents(cells, takes=of_embed.takes) == []
    assert [one["requests"] for one in documents(RequestDays(tmp_path).cells(NEXT, NEXT))] == [1]
    with pytest.raises(UsageError, match="cannot group by that"):
        parse_groups("service,key")


def test_an_id_that_two_hosts_wrote_around_midnight_counts_once(tmp_path: Path) -> None:
    midnight_utc = (NOON // 86_400 + 1) * 86_400
    written(tmp_path, [a_request(1, ended=midnight_utc - 1.0)], "ctl-1")
    written(tmp_path, [a_request(1, ended=midnight_utc + 1.0)], "ctl-2")
    cells = RequestDays(tmp_path).cells(DAY - timedelta(days=1), NEXT + timedelta(days=1))
    assert sum(one.requests for one in cells.values()) == 1


def test_each_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, [a_request(1), a_request(2, ended=NOON + 86_400)])
    lines: list[bytes] = []

    def counting(line: bytes) -> RequestRecord | None:
        lines.append(line)
        return parse(line)

    monkeypatch.setattr("sluice.exchange.requests.parse", counting)
    days = RequestDays(tmp_path)

    def look() -> tuple[int, int]:
        lines.clear()
        return sum(one.requests for one in days.cells(DAY, NEXT).values()), len(lines)

    assert look()[0] == 2
    assert look() == (2, 0)
    written(tmp_path, [a_request(3, ended=NOON + 86_401), a_request(3, ended=NOON + 86_401)])
    assert look() == (3, 2), "of the latest day only what was added"
    written(tmp_path, [a_request(4)])
    assert look()[0] == 4


def test_sums_of_days_that_are_over_are_kept(tmp_path: Path) -> None:
    folder, kept = tmp_path / "requests", tmp_path / "kept"
    folder.mkdir()
    written(folder, [a_request(1, outcome="failed"), a_request(2, ended=NOON + 86_400)])
    before = RequestDays(folder, kept, writes=True).cells(DAY, NEXT)
    (file,) = kept.iterdir()  # not of the latest day
    assert file.stat().st_mode & 0o777 == 0o600
    again = RequestDays(folder, kept)
    assert documents(again.cells(DAY, NEXT)) == documents(before)
    text = file.read_text().replace('"failed": 1', '"failed": 7')
    file.write_text(text)
    assert documents(RequestDays(folder, kept).cells(DAY, DAY))[0]["failed"] == 7, "found there"
    for damaged in (
        "",
        "[]",
        "{}",
        text[:-9],
        text.replace('"version": 3', '"version": 2'),
        text.replace('"ids": "', '"ids": "!'),
        text.replace("[[[", "[[[5,"),
    ):
        file.write_text(damaged)
        assert documents(RequestDays(folder, kept).cells(DAY, NEXT)) == documents(before)
    file.write_text(text)
    written(folder, [a_request(5)])
    assert documents(RequestDays(folder, kept).cells(DAY, DAY))[0]["failed"] == 1, "the records changed"


@pytest.mark.parametrize("later_s", [5.0, 86_400.0])
def test_a_request_that_goes_on_replaces_the_bill_of_its_killed_worker(tmp_path: Path, later_s: float) -> None:
    begin = (NOON // 86_400 + 1) * 86_400 - 60.0  # of a UTC day's last minute
    days = RequestDays(tmp_path)
    bill = a_request(1, ended=begin, endpoint="", outcome="failed", completion_tokens=5, first_token_s=0.3)
    written(tmp_path, [bill, a_request(2, ended=begin)])
    (before,) = documents(days.cells(DAY, NEXT + timedelta(days=1)))
    assert (before["requests"], before["failed"], before["completion_tokens"]) == (2, 1, 55)
    written(tmp_path, [a_request(1, ended=begin + min(later_s, 90.0), completion_tokens=50)], "ctl-2")
    for one in (days, RequestDays(tmp_path)):
        (row,) = documents(one.cells(DAY, NEXT + timedelta(days=1)))
        assert (row["requests"], row["failed"], row["answered"], row["completion_tokens"]) == (2, 0, 2, 100)
        assert row["first_token_p99_ms"] == 100


UTC_DAY = 86_400


def by_day(days: RequestDays, last: date) -> dict[str, tuple[int, int]]:
    """Requests and tokens of each local day."""
    rows = documents(days.cells(DAY - timedelta(days=2), last), ("day",))
    return {one["day"]: (one["requests"], one["tokens"]) for one in rows if one["requests"] or one["tokens"]}


@pytest.mark.parametrize("later_s", [7200.0, 3 * UTC_DAY, 14 * UTC_DAY])
def test_what_is_billed_again_much_later_is_billed_once_on_the_right_day(tmp_path: Path, later_s: float) -> None:
    """The rest of a killed worker's stream, and a batch's line that was answered twice."""
    folder, kept = tmp_path / "requests", tmp_path / "kept"
    folder.mkdir()
    last = DAY + timedelta(days=17)
    end = (NOON // UTC_DAY + 1) * UTC_DAY - 60.0
    days = RequestDays(folder, kept, writes=True)
    bill = a_request(1, ended=end, endpoint="", outcome="failed", completion_tokens=5)
    line = a_request(2, ended=end, endpoint="/v1/batches")
    written(folder, [bill, line, a_request(3, ended=NOON + 16 * UTC_DAY)])
    first = {str(services.day_of(end)): (2, 255), str(services.day_of(NOON + 16 * UTC_DAY)): (1, 150)}
    assert by_day(days, last) == first
    written(folder, [replace(line, ended=end + later_s), a_request(1, ended=end + later_s)], "ctl-2")
    wanted = {**first, str(services.day_of(end)): (1, 150), str(services.day_of(end + later_s)): (1, 150)}
    for one in (days, RequestDays(folder, kept), RequestDays(folder)):
        assert by_day(one, last) == wanted
    assert sum(one[0] for one in by_day(RequestDays(folder, kept), services.day_of(end)).values()) == 1


def test_a_day_that_is_kept_is_counted_again_when_a_gateway_that_was_cut_off_writes(tmp_path: Path) -> None:
    folder, kept = tmp_path / "requests", tmp_path / "kept"
    folder.mkdir()
    last = DAY + timedelta(days=4)
    written(folder, [a_request(number, ended=NOON + number * UTC_DAY) for number in range(4)])
    days = RequestDays(folder, kept, writes=True)
    assert by_day(days, last) == {str(DAY + timedelta(days=number)): (1, 150) for number in range(4)}
    before = {path.name: path.read_text() for path in kept.iterdir()}
    # one that nobody knew, and the first bill of one that another gateway has billed two days later
    written(folder, [a_request(9), a_request(2, ended=NOON + 5.0)], "ctl-2")
    wanted = {str(DAY): (3, 450), str(DAY + timedelta(days=1)): (1, 150), str(DAY + timedelta(days=3)): (1, 150)}
    for one in (days, RequestDays(folder, kept)):
        assert by_day(one, last) == wanted
    after = {path.name: path.read_text() for path in kept.iterdir()}
    assert after.keys() == before.keys() and all(after[name] != before[name] for name in before)


def test_a_key_that_was_paid_for_days_ago_buys_nothing_today(tmp_path: Path) -> None:
    """Gateways forget names of requests; their ids are what their callers make them."""
    midnight = (NOON // UTC_DAY + 1) * UTC_DAY
    written(tmp_path, [a_request(number, ended=midnight - 60.0) for number in (1, 2)])
    soon, later = midnight + 3500.0, midnight + 2 * UTC_DAY
    written(tmp_path, [a_request(1, begun=soon, ended=soon + 50), a_request(2, begun=later, ended=later + 50)], "ctl-2")
    assert sum(count for count, _ in by_day(RequestDays(tmp_path), DAY + timedelta(days=4)).values()) == 3


def test_ids_of_some_days_are_in_memory(tmp_path: Path) -> None:
    folder, kept = tmp_path / "requests", tmp_path / "kept"
    folder.mkdir()
    written(
        folder, [a_request(number, begun=end, ended=end) for number in range(40) for end in [NOON + number * UTC_DAY]]
    )
    days = RequestDays(folder, kept, writes=True)
    for _ in range(2):
        assert len(by_day(days, DAY + timedelta(days=50))) == 40
        assert len(days._days) == 40 and len(days._ids) <= 16


@pytest.mark.parametrize("seed", range(12))
def test_bills_are_exact_in_whatever_order_they_come_and_who_counts_is_killed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    folder, kept = tmp_path / "requests", tmp_path / "kept"
    folder.mkdir()
    last = DAY + timedelta(days=14)
    right: dict[str, RequestRecord] = {}
    days = RequestDays(folder, kept, writes=True)
    for _ in range(12):
        for _ in range(draw.randint(1, 8)):
            name, ended = draw.randint(1, 20), NOON + draw.randint(0, 12 * UTC_DAY)
            whole = draw.random() < 0.5
            one = a_request(
                name, ended=ended, endpoint="/v1/completions" if whole else "", outcome="ok" if whole else "failed",
                prompt_tokens=100 * name + whole,
            )  # fmt: skip
            written(folder, [one], f"ctl-{draw.randint(1, 3)}")
            known = right.get(one.id)
            if known is None or (not one.endpoint, one.ended) < (not known.endpoint, known.ended):
                right[one.id] = one
        if draw.random() < 0.7:
            child = os.fork()
            if not child:
                days.cells(DAY, last)
                os._exit(0)
            time.sleep(draw.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        days = days if draw.random() < 0.5 else RequestDays(folder, kept, writes=True)
        wanted: dict[str, tuple[int, int]] = {}
        for one in right.values():
            day = str(services.day_of(one.ended))
            count, tokens = wanted.get(day, (0, 0))
            wanted[day] = count + 1, tokens + one.prompt_tokens + one.completion_tokens
        assert by_day(days, last) == wanted


# ---- GPU time ----


def gpu_time(
    cells: services.Cells, jobs: list[Allocation], *, span: Span | None = None, now: float = NOON + 10**6
) -> dict[tuple[str, str, str], float]:
    whole = span or Span(midnight(DAY), midnight(NEXT + timedelta(days=1)))
    add_gpu_time(cells, [(job, None) for job in jobs], POLICY, whole, fleet=FLEET, now=now)
    return {(key.account, key.user, key.day): made.gpu_s for key, made in cells.items() if made.gpu_s}


def test_gpu_time_is_divided_by_tokens(tmp_path: Path) -> None:
    records = [a_request(1), a_request(2, user="bob", tenant="robotics", prompt_tokens=400)]
    cells = RequestDays(written(tmp_path, records)).cells(DAY, DAY)
    assert gpu_time(cells, [JOB]) == {("nlp", "alice", str(DAY)): 1800.0, ("robotics", "bob", str(DAY)): 5400.0}
    rows = {one["account"]: one for one in documents(cells)}
    assert rows["nlp"]["tokens_per_gpu_hour"] == 300


def test_a_batchs_tokens_have_no_part_in_the_replicas_time(tmp_path: Path) -> None:
    records = [a_request(1), a_request(2, user="bob", tenant="robotics", endpoint="/v1/batches")]
    cells = RequestDays(written(tmp_path, records)).cells(DAY, DAY)
    assert gpu_time(cells, [JOB]) == {("nlp", "alice", str(DAY)): 7200.0}
    assert {one["account"]: one["tokens"] for one in documents(cells)} == {"nlp": 150, "robotics": 150}


def test_time_that_nobody_used_is_the_services_own_tenants() -> None:
    assert gpu_time({}, [JOB]) == {("nlp", "", str(DAY)): 7200.0}


def test_a_job_over_midnight_and_one_that_runs_on() -> None:
    late = replace(JOB, start=midnight(NEXT) - 100, end=midnight(NEXT) + 300, elapsed_s=400)
    assert gpu_time({}, [late]) == {("nlp", "", str(DAY)): 200.0, ("nlp", "", str(NEXT)): 600.0}
    runs = replace(JOB, state="RUNNING", end=None)
    assert gpu_time({}, [runs], now=NOON + 50) == {("nlp", "", str(DAY)): 100.0}
    waits = replace(JOB, state="PENDING", start=None, end=None)
    assert gpu_time({}, [waits]) == {}


@pytest.mark.parametrize(
    "change", [{"user": "mallory"}, {"account": "robotics"}, {"name": "train"}, {"name": f"sluice-serve.{LAUNCH}"}]
)
def test_jobs_that_are_no_replicas_add_nothing(change: dict[str, Any]) -> None:
    assert gpu_time({}, [replace(JOB, **change)]) == {}


def test_a_service_that_was_removed_keeps_its_time() -> None:
    old = replace(JOB, name=f"sluice-serve.old.{LAUNCH}")
    cells: services.Cells = {}
    gpu_time(cells, [old, replace(old, account="thief", user="mallory")])
    assert {(key.service, key.account): made.gpu_s for key, made in cells.items()} == {("old", "nlp"): 7200.0}


# ---- the command ----


class _Source(SimpleNamespace):
    fleet = FLEET

    def jobs(self, span: Span, selection: Any, *, names: bool) -> Iterable[tuple[Allocation, None]]:
        assert names and selection.users == {"nlp-serve"}
        return [(JOB, None)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    source = _Source(now=float(midnight(NEXT) + 3600))
    monkeypatch.setattr(command, "_source", lambda options: source)
    monkeypatch.setattr(command, "_services_of", lambda source, conf: POLICY)
    written(tmp_path, [a_request(1), a_request(2, user="bob", tenant="robotics", prompt_tokens=400)])
    return lambda *words: CliRunner().invoke(
        command.command, ["services", "--requests", str(tmp_path), "-S", str(DAY), *words]
    )


def test_the_command(run: Any) -> None:
    found = run("-P", "-o", "Service,Account,Requests,Tokens,FirstTokenP50,GPUHours")
    assert found.stdout == (
        "Service|Account|Requests|Tokens|FirstTokenP50(ms)|GPUHours\nllm|nlp|1|150|100|0.50\nllm|robotics|1|450|100|1.50\n"
    ), found
    by_user = run("--csv", "--by", "user,day")
    assert by_user.stdout.splitlines()[0].startswith("User,Day,Requests,Refused")
    document = json.loads(run("--json", "--by", "service").stdout)
    assert (document["report"], document["rows"][0]["requests"]) == ("services", 2)
    assert "FirstTokenP99" in run("-e").stdout and "WaitP50" not in run("-e").stdout
    assert "no field 'Jobs'" in str(run("-o", "Jobs").exception)
    assert run("-u", "bob", "-n", "-P", "-o", "Account").stdout == "robotics\n"


def test_records_that_are_not_there(run: Any) -> None:
    assert "name the folder with --requests" in str(run("--requests", "/nonexistent").exception)
