from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from policy import node
from policy.checkpoint import NodeCheckpoint, Rhythm
from policy.document import check, parse
from policy.health import CHECKS, XID_BLAME_THE_JOB, XID_FATAL
from policy.model import Strangers
from policy.node import NodePolicy, NodePolicyFile, compile_node
from policy.node_limits import NodeStrangers
from sluice.base.errors import SluiceError


def words(text: str) -> list[str]:
    return [str(problem) for problem in check(text, source="f")[1]]


def test_a_file_says_everything_and_reads_back() -> None:
    policy = compile_node(parse("health: {mode: shadow, interval: 15s, passes: 5}\n"))
    again = node.parse(policy.render(), source="x")
    assert again == policy
    assert (again.health.mode, again.health.interval_s, again.health.passes) == ("shadow", 15, 5)
    assert set(again.health.checks) == set(CHECKS)
    sections = {
        "limits",
        "health",
        "metrics",
        "checkpoint",
        "alerts",
        "traces",
        "preflight",
        "power",
        "power_control",
        "profiles",
    }
    assert set(json.loads(policy.render())) == {"schema_version"} | sections


def test_who_loads_the_library_of_profiles() -> None:
    assert compile_node(parse("{}\n")).profiles == "all"
    assert compile_node(parse("profiles: asked\n")).profiles == "asked"


def test_traces_say_where_to_and_what_may_leave() -> None:
    text = (
        "traces: {endpoint: 'https://collector.site:4318/', protocol: grpc, private: [users], settle: 1m, spool: 1G}\n"
    )
    traces = node.parse(compile_node(parse(text)).render(), source="x").traces
    assert (traces.endpoint, traces.protocol, traces.settle, traces.spool) == (
        "https://collector.site:4318", "grpc", 60, 1024,
    )  # fmt: skip
    assert traces.hidden("jobs,users") == {"jobs"} and not traces.hidden("(null)") & {"jobs", "users"}
    assert traces.hidden("all") == {"jobs", "accounts", "nodes"}
    for wrong in (
        "collector.site:4318",
        "http://me:secret@collector:4318",
        "http://collector",
        "http://collector:99999",
    ):
        assert words(f"traces: {{endpoint: '{wrong}'}}\n"), wrong
    assert words("traces: {headers_file: headers}\n") and words("traces: {private: [everything]}\n")


def test_without_a_section_checks_only_say_what_they_would_do() -> None:
    assert compile_node(parse("{}")).health.mode == "shadow"
    assert NodePolicy().health.mode == "shadow"
    assert compile_node(parse("health: {}")).health.mode == "enforce"


def test_settings_of_a_check_override_its_defaults() -> None:
    text = (
        "health: {temperature: 80, checks: "
        "{temperature: {action: warn}, xid: {window: 2m, shadow: true}, power: {enabled: false}}}"
    )
    checks = compile_node(parse(text)).health.checks
    assert (checks["temperature"].threshold, checks["temperature"].action) == (80, "warn")
    assert (checks["xid"].window_s, checks["xid"].shadow, checks["xid"].action) == (120, True, "requeue")
    assert "power" not in checks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("health: {checks: {temprature: {}}}", "no check 'temprature'"),
        ("health: {checks: {xid: {action: reboot}}}", "'reboot'"),
        ("health: {checks: {xid: {window: 5}}}", "has no unit"),
        ("health: {temperature: 90, checks: {temperature: {threshold: 80}}}", "given twice"),
        ("health: {paths: [tmp]}", "not an absolute path"),
        ("health: {breaker: {share: 101}}", "101"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    found = words(text)
    assert found and any(said in one for one in found), found


def test_events_are_of_one_kind_only() -> None:
    assert not set(XID_FATAL) & set(XID_BLAME_THE_JOB)


def test_the_file_is_read_again_and_the_last_good_one_kept(tmp_path: Path) -> None:
    path = tmp_path / node.FILE_NAME
    file = NodePolicyFile(path)
    assert file.current() == NodePolicy() and file.problem is None
    path.write_text(compile_node(parse("health: {passes: 7}")).render())
    assert file.current().health.passes == 7
    path.write_text("{broken")
    os.utime(path, ns=(1, 1))
    assert file.current().health.passes == 7
    assert file.problem is not None and str(path) in str(file.problem)
    path.write_text(compile_node(parse("health: {passes: 8}")).render())
    assert file.current().health.passes == 8 and file.problem is None
    path.unlink()
    assert file.current().health.passes == 8


def test_two_threads_see_the_same_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one was given the defaults while the first one still read the file."""
    path = tmp_path / node.FILE_NAME
    path.write_text(compile_node(parse("health: {passes: 7}")).render())
    file, reading, go_on = NodePolicyFile(path), threading.Event(), threading.Event()
    whole = node.parse

    def slow(text: str | bytes, *, source: str) -> NodePolicy:
        reading.set()
        assert go_on.wait(20)
        return whole(text, source=source)

    monkeypatch.setattr(file, "_parse", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(file.current)
        assert reading.wait(20)
        second = pool.submit(file.current)
        wait([second], timeout=0.2)
        go_on.set()
        assert (first.result(20).health.passes, second.result(20).health.passes) == (7, 7)


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 2}', '{"health": {"mode": "on"}}', "\x00"])
def test_what_is_no_node_policy(text: str) -> None:
    with pytest.raises(SluiceError, match="x: "):
        node.parse(text, source="x")


def test_a_newer_file_may_have_more_sections() -> None:
    assert node.parse('{"schema_version": 1, "later": {}}', source="x") == NodePolicy()


def test_checkpoints_are_passed_to_the_controllers_and_to_slurm() -> None:
    assert compile_node(parse("{}")).checkpoint.max_retries == 3
    told = compile_node(parse("checkpoint: {interval: 10m, signal: USR2, backoff: 5s, max_retries: 0}")).checkpoint
    assert (told.interval_s, told.signal, told.backoff_s, told.max_retries) == (600, "USR2", 5, 0)
    assert words("checkpoint: {interval: 5s}")
    assert "'chemistry' is not a tenant" in words("checkpoint: {tenants: {chemistry: app}}")[0]


@pytest.mark.parametrize(
    ("comment", "interval"),
    [
        ("checkpoint", None),
        ("xsluice:checkpoint", None),
        ("sluice:checkpointing", None),
        ("sluice:checkpoint", 600),
        ("sluice:checkpoint=app", 600),
        ("run 3, sluice:checkpoint=20m", 1200),
        ("sluice:checkpoint=1s", 60),
        ("sluice:checkpoint=often", 600),
        ("sluice:checkpoint=daly", "daly"),
        ("sluice:checkpoint=no", None),
        ("sluice:checkpoint=20m,sluice:checkpoint=no", None),  # the job's option comes after its comment
        ("sluice:checkpoint=no sluice:checkpoint=90s", 90),
    ],
)
def test_how_a_comment_asks_for_signals(comment: str, interval: int | str | None) -> None:
    rhythm = NodeCheckpoint(interval_s=600).rhythm("physics", comment)
    assert (rhythm and rhythm.interval_s) == interval


def test_jobs_that_do_not_say_follow_their_tenant() -> None:
    policy = compile_node(
        parse(
            "tenants: {physics: {}, optics: {parent: physics}, lasers: {parent: optics}, maths: {}}\n"
            "checkpoint: {interval: daly, tenants: {optics: no, physics: app, lasers: app}}\n"
        )
    ).checkpoint
    saving = {name for name in ("physics", "optics", "lasers", "maths") if policy.rhythm(name, "") is not None}
    assert saving == {"physics", "lasers"}
    assert policy.rhythm("physics", "") == Rhythm("daly")
    assert policy.rhythm("maths", "sluice:checkpoint") == Rhythm("daly")
    assert NodeCheckpoint(default="app").rhythm("", "") == Rhythm(None)


def test_nodes_know_every_word_about_strangers() -> None:
    """The agent does without the model of the whole policy, so that what nodes read is written twice."""
    written, read = (
        {name: (field.annotation, field.default) for name, field in one.model_fields.items()}
        for one in (Strangers, NodeStrangers)
    )
    assert written == read
