"""The live view: what fits where, keys, and names that would break a terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from sluice.base import events
from sluice.base.errors import SluiceError
from sluice.cli.top import command
from sluice.exchange.live import GpuReading, JobNow, Live, live, read_live
from sluice.slurm.answers import Job, Node
from sluice.top.look import Cluster, Look, changes, job_line, node_line, tenant_lines
from sluice.top.screen import PARTS, Screen, fit
from tests.unit.report.test_output import HOSTILE


def node(name: str = "g-1", **more: Any) -> Node:
    fields: dict[str, Any] = {
        "name": name, "address": name, "hostname": name, "state": "mixed", "flags": frozenset(), "reason": "",
        "cpus": 224, "cpus_allocated": 4, "sockets": 2, "cores_per_socket": 56, "threads_per_core": 2,
        "memory_mib": 1000, "memory_allocated_mib": 0, "memory_free_mib": None,
        "gres": "gpu:h100:8(S:0-1),shard:h100:648064(S:0-1)",
        "gres_used": "gpu:h100:3(IDX:0-2),shard:h100:2(IDX:4,6)", "features": (), "active_features": (),
        "partitions": ("main",), "weight": 1, "version": "22.05.8", "tres": {},
        "tres_allocated": {"gres/gpu": 3, "gres/shard": 20480},
    }  # fmt: skip
    return Node(**{**fields, **more})


def job(number: int = 7, **more: Any) -> Job:
    fields: dict[str, Any] = {
        "id": number, "array_id": None, "array_tasks": "", "name": "train", "user": "alice", "uid": 2001,
        "account": "physics", "qos": "normal", "partition": "main", "state": "RUNNING", "reason": "", "nodes": "g-1",
        "node_count": 1, "cpus": 4, "submit_time": 1, "eligible_time": 1, "start_time": int(time.time()) - 90,
        "end_time": None, "time_limit_s": 3600, "priority": 10, "tres": {"gres/gpu": 3}, "tres_per_node": "",
        "tres_per_job": "", "tres_per_task": "", "features": "", "dependency": "", "reservation": "", "comment": "",
        "work_dir": "/",
    }  # fmt: skip
    return Job(**{**fields, **more})


def look(*jobs: Job, nodes: tuple[Node, ...] | None = None) -> Look:
    lines = [job_line(one) for one in jobs or (job(), job(8, state="PENDING", nodes="", user="bob"))]
    return Look(1000.0, [node_line(one) for one in nodes or (node(), node("g-2"))], lines, tenant_lines(lines))


def test_gpus_of_a_node() -> None:
    found = node_line(node())
    assert found.picture == "###.+.+."
    assert (found.gpus, found.gpus_allocated, found.shards_allocated) == (8, 3, 20480)
    newer = (
        "gpu:h100:2(IDX:0-1),shard:h100:20480(0/81008,0/81008,10240/81008,0/81008,10240/81008,0/81008,0/81008,0/81008)"
    )
    assert node_line(node(gres_used=newer)).picture == "##+.+..."  # as 24.11 writes it
    newest = node_line(node(gres_used=newer.replace("(0/81008,0/81008,", "(-/81008,-/81008,")))
    assert (newest.picture, newest.shared) == ("##+.+...", {2, 4})  # as 26.05
    assert node_line(node(gres_used="gpu:h100:0(IDX:N/A),shard:h100:0(IDX:N/A)")).picture == "........"
    assert node_line(node(flags=frozenset({"drain"}))).state == "drain"
    assert node_line(node(gres="", gres_used="")).picture == ""


@pytest.mark.parametrize("part", list(PARTS))
@pytest.mark.parametrize("size", [(80, 24), (79, 10), (200, 60), (40, 6), (20, 4)])
def test_every_part_fits(part: str, size: tuple[int, int]) -> None:
    screen = Screen(look(), part)
    lines = screen.lines(*size)
    assert len(lines) == size[1]
    assert all(len(text) <= size[0] for text, _ in lines)


def test_at_80_columns_what_matters_is_there() -> None:
    text = "\n".join(line for line, _ in Screen(look(), "gpus").lines(80, 24))
    assert "###.+.+." in text
    text = "\n".join(line for line, _ in Screen(look(), "jobs").lines(80, 24))
    assert all(word in text for word in ("alice", "physics", "g-1", "train", "waiting 1"))


def test_utilisation_where_it_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "live"
    assert read_live(path, 1000.0) == Live()
    told = [
        GpuReading(
            "g-1",
            0,
            "a",
            71.0,
            90.0,
            jobs={7: 80.0, 8: None},
            memory_used=20 << 30,
            memory_total=80 << 30,
            job_memory={7: 12 << 30, 8: 1 << 30},
        ),
        GpuReading("g-1", 1, "b", utilisation_percent=31.0, jobs={7: 30.0}),
        GpuReading("g-2", 0, "c"),  # this driver does not report it
    ]
    path.write_text(json.dumps(live(told, 1000.0)))
    known = read_live(path, 1010.0)
    assert known.jobs[7] == [JobNow("g-1", 0, 80.0, 12288), JobNow("g-1", 1, 30.0, None)]
    assert read_live(path, 1100.0) == Live(), "old"
    lines = [job_line(job(number), known.jobs[number]) for number in (7, 8)]
    rows = [node_line(node(name), known.gpus[name]) for name in ("g-1", "g-2")]
    assert ([row.percent for row in rows], [line.percent for line in lines]) == ([60.5, None], [55.0, None])
    assert [line.used_mib for line in lines] == [12288, 1024]
    shown = Look(1000.0, rows, lines, tenant_lines(lines))
    by_node = {line.split()[0]: line for line, _ in Screen(shown, "gpus").lines(80, 24) if line.startswith("g-")}
    assert " 60% " in by_node["g-1"] and " - " in by_node["g-2"]
    text = [line for line, _ in Screen(shown, "jobs").lines(80, 24) if "alice" in line]
    assert " 55%    12G " in text[0] and "%" not in text[1] and "train" in text[0]
    devices = [line for line, _ in Screen(shown, "devices").lines(80, 24) if line.startswith("g-")]
    assert devices[0].split() == ["g-1", "0", "h100", "whole", "90%", "20G", "80G", "25%", "71C", "7,8"]
    assert devices[1].split() == ["g-1", "1", "h100", "whole", "31%", "-", "-", "-", "-", "7"] and len(devices) == 16
    screen = Screen(shown, "jobs")
    screen.key("enter")
    detail = "\n".join(line for line, _ in screen.lines(80, 24))
    assert "g-1 GPU 0   80%, 12G" in detail and "g-1 GPU 1   30%, -" in detail
    for broken in (
        "",
        "[]",
        "7",
        '{"version": 1}',
        '{"version": 2, "at": 1000, "nodes": {"g": 3}, "jobs": {}}',
        '{"version": 2, "at": 1000, "nodes": {}, "jobs": {"7": [[]]}}',
        "[" * 99999,
    ):
        path.write_text(broken)
        assert read_live(path, 1000.0) == Live()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(name: str) -> None:
    shown = look(
        job(1, name=name, user=name, account=name, reason=name, nodes=name, partition=name),
        nodes=(node(name, reason=name),),
    )
    for part in PARTS:
        screen = Screen(shown, part)
        for text, _ in screen.lines(80, 24):
            assert text.isprintable() or not text
        screen.key("enter")
        for text, _ in screen.lines(80, 24):
            assert text.isprintable() or not text


def test_keys_sort_filter_and_drill_down() -> None:
    screen = Screen(look(job(1, user="alice", tres={"gres/gpu": 1}), job(2, user="bob", tres={"gres/gpu": 5})))
    screen.key("2")
    assert screen.part == "jobs"
    for _ in range(4):
        screen.key("s")
    assert [row.id for row in screen.rows()] == ["1", "2"]  # by GPUs
    screen.key("r")
    assert [row.id for row in screen.rows()] == ["2", "1"]
    for key in ("/", "b", "o", "x", "back", "b", "enter"):
        screen.key(key)
    assert [row.user for row in screen.rows()] == ["bob"]
    screen.key("enter")
    assert screen.detail is not None
    assert "sluice report job 2" in "\n".join(text for text, _ in screen.lines(80, 24))
    screen.key("esc")
    assert screen.detail is None
    screen.key("esc")
    assert len(screen.rows()) == 2
    screen.key("1")
    screen.key("enter")
    assert screen.scope == ("node", "g-1")
    assert len(screen.rows()) == 2
    screen.key("esc")
    assert screen.part == "gpus"
    assert screen.key("q") is False


def test_the_cursor_stays_within_the_rows() -> None:
    screen = Screen(look(*(job(number) for number in range(1, 101))), "jobs")
    for key in ("end", "pagedown", "down"):
        screen.key(key)
    lines = screen.lines(80, 20)
    assert screen.cursor == 99
    assert [style for _, style in lines].count("cursor") == 1
    screen.look = look(job(1))
    screen.lines(80, 20)
    assert screen.cursor == 0


def test_what_changed_between_two_looks() -> None:
    before = look(job(1), job(2, state="PENDING", nodes=""))
    after = look(job(2), job(3), nodes=(node(flags=frozenset({"drain"}), reason="hot"), node("g-2")))
    said = [event.what for event in changes(before, after)]
    assert any("job 2 of alice: running on g-1" in what for what in said)
    assert any("job 3" in what for what in said)
    assert any("job 1 of alice is over" in what for what in said)
    assert "node g-1: drain hot" in said
    assert changes(Look(), after) == []


def test_a_controller_that_is_away_is_said_and_the_last_look_stays(tmp_path: Path) -> None:
    class Client:
        away = False

        def nodes(self) -> list[Node]:
            if self.away:
                raise SluiceError("slurmctld does not\x1b[2J answer")
            return [node()]

        def jobs(self) -> list[Job]:
            return [job()]

    client = Client()
    file = tmp_path / "events.jsonl"
    events.append(file, "takeover", host="ctl2")
    cluster = Cluster(client, file)  # type: ignore[arg-type]
    assert "takeover host=ctl2" in [event.what for event in cluster.look().events]
    client.away = True
    found = cluster.look()
    assert len(found.nodes) == 1
    assert found.problem == "slurmctld does not [2J answer"
    assert len([event for event in found.events if "takeover" in event.what]) == 1


def test_one_look_without_a_controller_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> object:
        raise SluiceError("slurmctld does not answer")

    monkeypatch.setattr("sluice.slurm.connect", lambda **_: SimpleNamespace(config=away, nodes=away, jobs=away))
    monkeypatch.setattr("sluice.exchange.running.ask_running", away)
    done = CliRunner().invoke(command, ["--once", "--events", str(tmp_path / "none")])
    assert isinstance(done.exception, SluiceError) and "scontrol ping" in done.exception.remedy
    assert done.exception.what == "slurmctld does not answer"


def test_wide_characters_take_two_cells() -> None:
    assert fit("日本語", 4) == "日+"
    assert fit("日本語", 6) == "日本語"
    assert fit("abc", 5, right=True, pad=True) == "  abc"
