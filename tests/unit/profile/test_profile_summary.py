"""Time lines, summaries and traces of what was collected."""

from __future__ import annotations

import gzip
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.profile_files import SECOND, Writer, training
from sluice.base.errors import SluiceError
from sluice.client.models import ProfileSummary
from sluice.profile.intervals import both, length, union
from sluice.profile.summary import render, summarise
from sluice.profile.timeline import Offset, load, write_clocks
from sluice.profile.trace import write


def collected(folder: Path, *writers: Writer, step: str = "0") -> Path:
    for writer in writers:
        (folder / f"{writer.host}.{step}").mkdir(exist_ok=True)
        (folder / f"{writer.host}.{step}" / writer.file_name).write_bytes(writer.content())
    return folder


def summary(folder: Path, *writers: Writer) -> dict[str, Any]:
    found = summarise(load(collected(folder, *writers)))
    assert ProfileSummary.model_validate(found).model_dump(mode="json") == found
    return found


def test_spans() -> None:
    assert union([(5, 9), (1, 3), (2, 4), (9, 10), (7, 7), (20, 20)]) == [(1, 4), (5, 10)]
    assert both([(0, 10), (20, 30)], [(5, 25), (28, 40)]) == 5 + 5 + 2
    assert length([(1, 4), (5, 10)]) == 8


def test_busy_copies_idle_and_what_overlaps(tmp_path: Path) -> None:
    writer = Writer()
    fast, slow = writer.name("fast"), writer.name("slow")
    writer.kernel(slow, 0, SECOND // 2)
    writer.kernel(fast, SECOND // 4, SECOND // 2, stream=9)  # at the same time: counts once
    writer.copy(3 * SECOND // 8, 6 * SECOND // 8, 3 << 30)
    writer.end(SECOND)
    found = summary(tmp_path, writer)
    assert (found["busy_percent"], found["copies_percent"], found["idle_percent"]) == (50, 37.5, 25)
    assert found["copies_overlapped_percent"] == 33.33
    assert [(one["name"], one["calls"], one["percent"]) for one in found["kernels"]] == [
        ("slow", 1, 66.67), ("fast", 1, 33.33),
    ]  # fmt: skip
    assert found["copies"][0]["direction"] == "host (pinned) to device"
    assert found["slowest_over_median_percent"] is None


def test_kernels_that_took_no_time_are_shown(tmp_path: Path) -> None:
    writer = Writer()
    writer.kernel(writer.name("empty"), SECOND // 4, SECOND // 4)
    writer.end(SECOND)
    assert any("0.0 %" in line and "empty" in line for line in render(summary(tmp_path, writer)))


def test_samples_of_the_processor(tmp_path: Path) -> None:
    writer = Writer()
    load_batch, wait = writer.name("load_batch"), writer.name("wait")
    for at in range(3):
        writer.sample(load_batch, at * SECOND // 10, 200)
    writer.sample(wait, 0, 201)
    writer.record(13, 0, 0, struct.pack("<QIIQ", 0, 10, 0, 0))
    writer.end(SECOND)
    found = summary(tmp_path, writer)
    assert found["samples"] == 4
    assert found["functions"] == [
        {"name": "load_batch", "samples": 3, "percent": 75.0}, {"name": "wait", "samples": 1, "percent": 25.0},
    ]  # fmt: skip
    assert "   75.0 %         3  load_batch" in render(found)
    assert any("not all of its threads are sampled" in note for note in found["notes"])
    write(load(tmp_path), tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    lanes = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    seen = {(lanes[one["tid"]], one["name"]) for one in events if one.get("cat") == "sample"}
    assert seen == {("thread 200, sampled", "load_batch"), ("thread 201, sampled", "wait")}


def test_time_in_which_nothing_was_collected_is_not_idle(tmp_path: Path) -> None:
    """The budget was spent: of the gap nothing is known."""
    writer = Writer()
    writer.kernel(writer.name("k"), 0, SECOND // 4 + 1000)  # the last one ends in the gap
    writer.record(12, SECOND // 4, SECOND, struct.pack("<QIIQ", 99, 6, 0, 0))
    writer.record(12, 5 * SECOND // 4, 2 * SECOND, struct.pack("<QIIQ", 99, 6, 0, 0))
    writer.end(2 * SECOND)
    found = summary(tmp_path, writer)
    assert (found["busy_percent"], found["copies_percent"], found["idle_percent"]) == (50, 0, 50)
    assert (found["ranks"][0]["compute_percent"], found["lost_events"]) == (50, 198)


def test_the_slowest_rank_is_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    ranks = [training(Writer(f"n{rank}", 10 + rank, rank=rank), 400, 5, 1.3 if rank == 2 else 1) for rank in range(4)]
    found = summary(tmp_path, *ranks)
    assert (found["ranks"][0]["rank"], found["ranks"][0]["node"]) == (2, "n2")
    assert 20 < found["slowest_over_median_percent"] < 30 and found["collectives_percent"] > 10
    assert "Slowest: rank 2 on n2" in "\n".join(render(found))


def test_two_processes_on_one_gpu_are_one_gpu(tmp_path: Path) -> None:
    one, other = (training(Writer(pid=pid), 40, 1) for pid in (1, 2))
    assert summary(tmp_path, one, other)["gpus"] == 1


def test_measured_clocks_put_nodes_on_one_time_line(tmp_path: Path) -> None:
    """One node's time of day is an hour off, and its uptime is another one."""
    one = training(Writer("n1", 1), 400, 1)
    other = Writer("n2", 2, started=50 * SECOND, time_of_day=one.time_of_day + 3600 * SECOND, boot="boot-2")
    training(other, 400, 1)
    collected(tmp_path, one, other)
    write_clocks(
        tmp_path,
        {
            ("n1", "boot-1"): Offset("n1", one.time_of_day - one.started, 30_000),
            ("n2", "boot-2"): Offset("n2", one.time_of_day - other.started, 50_000),
        },
    )
    found = summarise(load(tmp_path))
    assert found["seconds"] == pytest.approx(0.025)
    assert {one["node"]: (one["ahead_ms"], one["uncertainty_us"]) for one in found["clocks"]} == {
        "n1": (0, 30), "n2": (3_600_000, 50),
    }  # fmt: skip
    assert "to within 50 us" in "\n".join(render(found))


def test_a_clock_that_jumps_moves_nothing_and_is_said(tmp_path: Path) -> None:
    writer = training(Writer(), 400, 1)
    writer.clock(SECOND // 100, jump=-7200 * SECOND)
    found = summary(tmp_path, writer)
    assert found["seconds"] == 0.025
    assert any("its clock was changed by 7200000 ms" in note for note in found["notes"])
    assert any("not measured" in note for note in found["notes"])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    full, killed, occupied = Writer(pid=1), training(Writer(pid=2), 40, 1), Writer(pid=3)
    full.lost(1000, 6)
    full.end(5, reason=5)
    killed.ended = bytes(64)
    occupied.end(5, reason=9, name=occupied.name("PyTorch\x1b[2J"))
    found = summary(tmp_path, full, killed, occupied)
    (tmp_path / "n1.0/z.1.profile").write_bytes(b"\0" * 500)
    notes = "\n".join(summarise(load(tmp_path))["notes"])
    for words in ("disk is full", "has no end", "another profiler has it: PyTorch [2J", "z.1.profile: not a profile"):
        assert words in notes
    assert (found["lost_events"], found["lost_because"]) == (1000, ["budget"])
    assert all(line.isprintable() for line in render(found))


def test_what_ran_without_times_is_counted_by_itself(tmp_path: Path) -> None:
    ran, lost = training(Writer(pid=1), 40, 1), training(Writer(pid=2), 40, 1)
    for _ in range(11_000):  # ten in each second; no room of what is lost is theirs
        ran.lost(3, 11)
    ran.lost(2, 6)
    lost.lost(5, 7)
    found = summary(tmp_path, ran, lost)
    assert (found["not_timed_events"], found["lost_events"]) == (33_000, 7)
    assert found["lost_because"] == ["budget", "buffers"]
    assert any(line.startswith("Not timed: 33000 kernels and copies of command lists") for line in render(found))
    (other := tmp_path / "other").mkdir()
    assert not any(line.startswith("Not timed") for line in render(summary(other, lost)))


def test_a_step_is_looked_at_alone(tmp_path: Path) -> None:
    collected(tmp_path, Writer(pid=1), step="0")
    collected(tmp_path, Writer(pid=2), step="batch")
    assert [one.pid for one in load(tmp_path, "batch").profiles] == [2]
    with pytest.raises(SluiceError, match="no profile"):
        load(tmp_path, "7")


def test_the_newest_profile_of_a_step_counts(tmp_path: Path) -> None:
    collected(tmp_path, Writer(pid=1, number=9), Writer(pid=2, number=10), Writer("n2", 3, number=8))
    assert [(one.host, one.pid) for one in load(tmp_path).profiles] == [("n1", 2), ("n2", 3)]


def test_all_processes_together_have_no_more_events_than_is_asked_for(tmp_path: Path) -> None:
    ranks = [training(Writer(pid=10 + rank, rank=rank), 50, 5) for rank in range(20)]
    found = load(collected(tmp_path, *ranks), most=400)
    assert [len(one.events) for one in found.profiles] == [20] * 20
    assert any("records more than are shown" in note for note in found.notes)


def test_a_crowd_of_files_is_refused_soon(tmp_path: Path) -> None:
    folder = tmp_path / "n1.0"
    folder.mkdir()
    for number in range(16_385):
        os.close(os.open(folder / f"n1.{number}.1.profile", os.O_CREAT))
    begin = time.process_time()
    with pytest.raises(SluiceError, match="more than 16384 files"):
        load(tmp_path)
    assert time.process_time() - begin < 0.7


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/n1.0").symlink_to(collected(tmp_path, Writer()) / "n1.0")
    with pytest.raises(SluiceError, match="no profile"):
        load(tmp_path / "in")


def test_a_trace_is_what_perfetto_opens(tmp_path: Path) -> None:
    writer = training(Writer(rank=1), 400, 1)
    writer.kernel(writer.name('"quoted"\\ \x1b name'), 0, 1001)
    path = tmp_path / "trace.json.gz"
    count = write(load(collected(tmp_path, writer)), path)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert len(spans) == 401 and count == len(events) - 1
    assert all(one["ts"] >= 0 and one["dur"] >= 0 for one in spans)
    assert next(one for one in spans if "quoted" in one["name"])["dur"] == 1.001
    assert {one["cat"] for one in spans} == {"kernel", "copy"}
    names = [one["args"]["name"] for one in events if one["name"] in ("process_name", "thread_name")]
    assert names[0] == "rank 1: train 100 on n1" and "GPU 0 stream 7" in names
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []
