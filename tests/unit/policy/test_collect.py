"""Events of jobs, from accounting into the audit log: each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.audit import AuditLog
from policy.collect import collect
from sluice_base.errors import SluiceError
from slurm_client.model import AccountingJob


def job(number: int, submit: int, start: int | None, end: int | None, gpus: int = 2) -> AccountingJob:
    return AccountingJob(
        id=number, label=str(number), name="j", user="alice", account="red", qos="red", partition="main",
        state="COMPLETED", exit_code=0, exit_signal=0, nodes="n1", node_count=1, cpus=1, submit_time=submit,
        eligible_time=submit, start_time=start, end_time=end, elapsed_s=1, time_limit_s=None,
        tres_requested={"cpu": 1, "gres/gpu": gpus}, tres_allocated={"cpu": 1, "gres/gpu": gpus}, reservation="",
    )  # fmt: skip


class FakeClient:
    def __init__(self, jobs: list[AccountingJob]) -> None:
        self.jobs = jobs

    def accounting_jobs(self, **window: Any) -> list[AccountingJob]:
        return self.jobs


def test_each_event_is_recorded_once_and_in_order(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    jobs = [job(1, 1000, 1010, 1030), job(2, 1005, 1031, None), job(3, 1006, 1007, 1008, gpus=0)]
    client: Any = FakeClient(jobs)
    assert collect(log, client, user="root", delay_s=0, now=1020) == 4
    assert collect(log, client, user="root", delay_s=0, now=1020) == 0
    assert collect(log, client, user="root", delay_s=0, now=1040) == 2
    assert collect(log, client, user="root", delay_s=0, now=1050) == 0
    found = [(record.action, record.subject) for record in log.records() if record.action != "collect"]
    assert found == [
        ("submit", "1"), ("submit", "2"), ("submit", "3"), ("grant", "1"), ("return", "1"), ("grant", "2"),
    ]  # fmt: skip
    assert [record.detail["gpus"] for record in log.records() if record.action == "grant"] == [2, 2]
    assert log.verify()[1] == []


def test_young_events_are_left_to_the_next_time(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    client: Any = FakeClient([job(1, 1000, 1010, 1030)])
    assert collect(log, client, user="root", delay_s=25, now=1030) == 1
    assert collect(log, client, user="root", delay_s=0, now=1030) == 2


def test_the_last_collection_is_found_behind_a_rotation(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, rotate_bytes=600)
    client: Any = FakeClient([job(1, 1000, 1010, 1030)])
    assert collect(log, client, user="root", delay_s=0, now=1020) == 2
    for number in range(4):
        log.append("root", "apply", str(number))
    assert collect(log, client, user="root", delay_s=0, now=1040) == 1


def test_nothing_is_collected_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("")
    client: Any = FakeClient([])
    with pytest.raises(SluiceError, match="recorded"):
        collect(AuditLog(tmp_path / "audit"), client, user="root")
