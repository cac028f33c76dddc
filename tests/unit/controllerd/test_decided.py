"""The time from submission to the first decision, from decisions as slurmctld writes them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from sluice.controllerd.metrics.cluster import Throughput, scheduler_points
from sluice.controllerd.metrics.decided import Decided
from sluice.explain.decisions import DecisionError
from sluice.metrics.names import unknown

NOW = 1_763_726_400
RUN, WILL, TEST = 0, 1, 2


def number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def payload(job: int, submit: int, mode: int = RUN, array: int = 0, account: bytes = b"physics") -> bytes:
    fields = [job, array, (1 << 32) - 1, 1000, 5, 1, submit, 60]
    words = b"".join(number(len(text)) + text for text in (account, b"main"))
    return b"".join(map(number, fields)) + words + number(mode) + number(0) + b"rest of the decision"


def entry(body: bytes, time_s: float, kind: int = 3) -> bytes:
    head = struct.pack("<IHHQq", len(body), kind, 0, 1, round(time_s * 1e6))
    return head + body + struct.pack("<I", zlib.crc32(body, zlib.crc32(head)))


HEADER = struct.pack("<8sII", b"SLUICEDR", 1, 0)


def write(folder: Path, file: int, *entries: bytes) -> None:
    path = folder / f"decisions.{file:012}"
    with path.open("ab") as out:
        out.write(b"" if out.tell() else HEADER)
        out.write(b"".join(entries))


@pytest.fixture
def decided(tmp_path: Path) -> Decided:
    return Decided(tmp_path, NOW - 0.5)


def test_each_job_counts_once_with_its_first_decision(decided: Decided, tmp_path: Path) -> None:
    decided.look()
    assert decided.totals == {} and decided.percentile(0.5) is None  # no decisions: the level is off
    early = entry(payload(1, NOW - 10), NOW + 1)  # submitted before the entries begin: may have been decided before
    tested = entry(payload(2, NOW + 1, TEST), NOW + 1.1)  # sbatch asks whether it can run at all
    first = entry(payload(2, NOW + 1), NOW + 3.25)
    torn = entry(payload(3, NOW + 4, WILL, account=b"biology"), NOW + 4.5)
    image = entry(b"image", NOW, kind=2)
    write(tmp_path, 1, early, tested, image, first, first, torn[:9])
    decided.look()
    assert decided.totals == {"physics": (1, 2.25)}
    write(tmp_path, 1, torn[9:], entry(payload(2, NOW + 1), NOW + 9))
    again = entry(payload(2, NOW + 20), NOW + 20.5)  # requeued: submitted again
    tasks = [entry(payload(job, NOW + 20, array=10), NOW + 21 + job) for job in (10, 11)]
    write(tmp_path, 2, again, *tasks)
    decided.look()
    assert decided.totals == {"physics": (3, 2.25 + 0.5 + 11), "biology": (1, 0.5)}
    decided.look()
    assert decided.percentile(0.5) == 2.25 and decided.percentile(0.95) == 11
    fields = scheduler_points("c", "", None, 1, 1, decided)[0].fields
    assert fields == {"controllers_up": 1, "decision_wait_median_seconds": 2.25, "decision_wait_p95_seconds": 11}
    assert unknown("sluice_scheduler", fields) == []


def test_a_damaged_file_is_left_for_the_next(decided: Decided, tmp_path: Path) -> None:
    bad = bytearray(entry(payload(1, NOW + 1), NOW + 2))
    bad[30] ^= 1
    write(tmp_path, 1, bytes(bad), entry(payload(5, NOW + 1), NOW + 2))
    write(tmp_path, 2, entry(payload(2, NOW + 1), NOW + 4))
    with pytest.raises(DecisionError, match="checksum"):
        decided.look()
    decided.look()
    assert decided.totals == {"physics": (1, 3.0)}
    (tmp_path / "decisions.000000000003").write_bytes(b"something else altogether")
    with pytest.raises(DecisionError, match="not a file of decisions"):
        decided.look()


def test_more_than_one_look_can_take(decided: Decided, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.explain.followed._AT_ONCE", 1 << 20)
    big = entry(b"x" * 3_000_000, NOW, kind=1)
    for file in (1, 2):
        write(tmp_path, file, big, *(entry(payload(file * 100 + one, NOW + 1), NOW + 2) for one in range(10)))
    for _ in range(6):
        decided.look()
    assert decided.totals == {"physics": (20, 20.0)}


def test_jobs_have_the_fields_only_with_decisions() -> None:
    seen = Throughput()
    assert seen.points("c", 1) == []
    (point,) = seen.points("c", 1, {"physics": (2, 0.5)})
    assert point.fields["decided_total"] == 2 and point.fields["submit_to_decision_seconds_total"] == 0.5
    assert unknown("sluice_jobs", point.fields) == []
