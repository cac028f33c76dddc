"""Records of jobs on disk: written, read back, damaged, of other versions, and old."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.job_records import check_record
from sluice.exchange.record import JobRecord, Stage, Store
from tests.unit.prolog_epilog.examples import GIB, granted, record


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "a/b")
    store.prepare()
    one = granted(GIB)
    one.note("grant", uuids=["GPU-0"])
    store.save(one)
    assert store.load(7) == one and store.load_all() == ([one], [])
    assert (store.folder / "7.json").stat().st_mode & 0o777 == 0o600
    store.remove(7)
    store.remove(7)
    with pytest.raises(SluiceError, match="job 7: no record"):
        store.load(7)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema_version": 1}', '{"schema_version": 2}', "null", '"x"'])
def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path)
    store.save(record(8))
    (tmp_path / "7.json").write_text(text)
    found, [problem] = store.load_all()
    assert [one.job for one in found] == [8] and "7.json" in problem.what


def test_fields_of_later_versions_are_ignored() -> None:
    fields = json.loads(granted(GIB).to_json())
    fields["later"] = fields["grants"][0]["later"] = 1
    assert JobRecord.from_json(json.dumps(fields), "x") == granted(GIB)


def test_a_job_is_as_old_as_the_clock_says_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    now, up = [5000.0], [100.0]
    monkeypatch.setattr("sluice.exchange.record.time.time", lambda: now[0])
    monkeypatch.setattr("sluice.exchange.record.uptime", lambda: up[0])
    one, earlier = record(started=5000.0, started_uptime=100.0), record(started=5000.0)
    now[0], up[0] = 5000.0 - 3600 + 30, 130.0
    assert (one.age(), earlier.age()) == (30.0, -3570.0)
    for each in (one, earlier):
        each.end(now[0], up[0])
    assert (one.ended, one.ran_s, earlier.ran_s) == (1430.0, 30.0, None)
    up[0] = 20.0  # another boot: only the times are left
    one.end(now[0], up[0])
    assert (one.age(), one.ran_s) == (-3570.0, None)


def test_old_records_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(record(7))
    store.save(record(8))
    os.utime(tmp_path / "7.json", (1, 1))
    store.prune(before=1000)
    assert [one.job for one in store.load_all()[0]] == [8]


def test_stages_are_timed_by_the_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    up = [100.0]
    monkeypatch.setattr("sluice.exchange.record.uptime", lambda: up[0])
    one, earlier = record(started_uptime=101.0), record()
    one.keep_stage("prolog.health", 99.5, 100.25)
    with pytest.raises(OSError, match="full"), one.stage("prolog.power"):
        up[0] = 102.0
        raise OSError("full")
    with one.stage("prolog.power"):  # of each name the first
        up[0] = 103.0
    assert one.stages == [Stage("prolog.health", -1.5, 0.75), Stage("prolog.power", -1.0, 2.0)]
    assert JobRecord.from_json(one.to_json(), "x") == one
    earlier.keep_stage("limits", 1.0, 2.0)  # of a version that did not know when it began
    assert earlier.stages == []


@pytest.mark.parametrize(
    "stages", [[{"name": 1, "after_s": 0, "took_s": 0}], [{"name": "limits", "after_s": "x", "took_s": 0}],
               [{"name": "limits", "after_s": float("nan"), "took_s": 0}], [{"name": "limits"}], [1], {"a": 1}, None],
)  # fmt: skip
def test_stages_that_are_none_are_refused(stages: object) -> None:
    fields = json.loads(record(ended=5.0).to_json()) | {"stages": stages}
    with pytest.raises(SluiceError):
        check_record(JobRecord.from_json(json.dumps(fields), "x"))
