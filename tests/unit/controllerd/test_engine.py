"""When alerts fire, are repeated, resolved and silenced; and that a crash neither loses nor repeats one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from policy.alerts import Alerts, NodeAlerts, NodeRule, compile_alerts
from sluice.base.errors import SluiceError
from sluice.base.events import Event
from sluice.controllerd.alerts.engine import Engine, OvertakenError
from sluice.controllerd.alerts.message import Message
from sluice.controllerd.alerts.observe import Found, Seen
from sluice.controllerd.alerts.outbox import Outbox
from sluice.exchange.live import GpuReading, Readings
from sluice.exchange.silences import Silence, read_silences, write_silences

HOT = NodeRule(name="hot", kind="temperature", threshold=85, duration=60, repeat=600)


class World:
    """An engine, the subjects that it sees, and what it reported."""

    def __init__(self, folder: Path, *rules: NodeRule) -> None:
        self.folder = folder
        self.settings = NodeAlerts(rules=rules or (HOT,), sinks={"log": {"kind": "log"}})
        self.found: dict[str, Seen] = {}
        self.known = True
        self.unknown = False
        self.acts: list[tuple[str, int]] = []
        self.engine = self.start()

    def start(self) -> Engine:
        self.engine = Engine(self.folder, "test", Outbox(self.folder / "outbox"))
        return self.engine

    def look(self, rule: NodeRule) -> Found:
        if self.unknown:
            raise SluiceError("slurmctld does not answer")
        return Found(self.found, lambda _: self.known)

    def step(self, now: float) -> list[tuple[str, str]]:
        """What is reported: state and first subject."""
        self.engine.step(self.settings, self.look, lambda rule, what, job: self.acts.append((what, job)), now)
        return self.told()

    def told(self) -> list[tuple[str, str]]:
        said: list[Message] = []
        self.engine.outbox.deliver({"log": said.append, "mail": said.append})
        return [(one.state, one.subjects[0].name) for one in said]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "alerts")


def test_fires_after_its_duration_once_and_is_resolved(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "90 degrees")}
    assert world.step(1000) == []
    assert world.step(1059) == []
    assert world.step(1060) == [("firing", "n1 GPU 0")]
    assert world.step(1100) == []
    world.found = {}
    assert world.step(1200) == [("resolved", "n1 GPU 0")]
    assert world.step(1300) == []


def test_a_planner_whose_level_was_set_just_now_has_time_for_its_first_plan(tmp_path: Path) -> None:
    policy = compile_alerts(Alerts.model_validate({"rules": {"plan": {"kind": "power-plan"}}}))
    world = World(tmp_path / "alerts", *policy.rules)
    world.found = {"planner": Seen(3600, "no plan for 3600 s")}
    assert world.step(1000) == world.step(1002) == []
    world.found = {}
    assert world.step(1003) == []
    world.found = {"planner": Seen(60, "no plan for 60 s")}
    world.step(2000)
    assert world.step(2010) == [("firing", "planner")]


def test_a_break_restarts_the_duration(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    world.found = {}
    assert world.step(1030) == []
    world.found = {"n1 GPU 0": Seen(90, "")}
    assert world.step(1070) == []
    assert world.step(1130) == [("firing", "n1 GPU 0")]


def test_is_repeated_while_it_holds(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    assert len(world.step(1060)) == 1
    assert world.step(1600) == []
    assert world.step(1660) == [("firing", "n1 GPU 0")]


def test_a_state_of_the_release_before_is_read(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    assert len(world.step(1060)) == 1
    state = world.folder / "state.json"
    state.write_text(state.read_text().replace('"sent"', '"told"'))
    world.start()
    assert world.step(1100) == []
    assert world.step(1659) == []
    assert world.step(1660) == [("firing", "n1 GPU 0")]


def test_what_is_not_known_neither_fires_nor_resolves(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    world.step(1060)
    world.unknown = True
    world.found = {}
    assert world.step(1100) == []
    world.unknown = False
    assert world.step(1200) == [("resolved", "n1 GPU 0")]


def test_a_node_that_tells_nothing_is_not_well_again(world: World) -> None:
    """E.g. a daemon that has just started has no readings; after an hour the alert is dropped."""
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    world.step(1060)
    world.start()
    world.found, world.known = {}, False
    assert world.step(1100) == []
    world.found = {"n1 GPU 0": Seen(90, "")}
    assert world.step(1200) == []
    world.found = {}
    assert world.step(1300) == []
    assert world.step(4901) == [("resolved", "n1 GPU 0")]


def test_many_subjects_are_one_message(world: World) -> None:
    world.found = {f"n{number} GPU 0": Seen(90, "") for number in range(500)}
    world.step(1000)
    world.engine.step(world.settings, world.look, lambda *_: None, 1060)
    said: list[Message] = []
    world.engine.outbox.deliver({"log": said.append})
    assert [(one.count, len(one.subjects)) for one in said] == [(500, 30)]


def test_a_new_daemon_goes_on_where_the_old_one_ended(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    world.start()
    assert world.step(1060) == [("firing", "n1 GPU 0")]
    world.start()
    assert world.step(1100) == []
    world.found = {}
    assert world.step(1200) == [("resolved", "n1 GPU 0")]


def test_killed_before_the_state_was_written_it_tells_the_same_message_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once; a receiver recognises it by its id."""
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    monkeypatch.setattr(Engine, "save", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        world.step(1060)
    monkeypatch.undo()
    first = [path.name for path in (world.folder / "outbox").iterdir()]
    world.start()
    world.engine.step(world.settings, world.look, lambda *_: None, 1075)
    assert [path.name for path in (world.folder / "outbox").iterdir()] == first  # not a second one
    assert world.told() == [("firing", "n1 GPU 0")]


def test_a_damaged_state_is_begun_again(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    for text in ("", "{", "[]", '{"alerts": 5}', '{"alerts": {"hot": {"x": {"no": 1}}}}', '{"seqs": "x"}'):
        (world.folder / "state.json").write_text(text)
        world.start()
        assert world.engine.alerts == {}


def test_silences(world: World) -> None:
    world.folder.mkdir()
    write_silences(world.folder, [Silence("a", "h*", "n1 *", 2000)])
    assert read_silences(world.folder, 2001) == []
    world.found = {"n1 GPU 0": Seen(90, ""), "n2 GPU 0": Seen(90, "")}
    world.step(1000)
    assert world.step(1060) == [("firing", "n2 GPU 0")]
    assert world.engine.alerts["hot"]["n1 GPU 0"].silenced
    assert world.step(2001) == [("firing", "n1 GPU 0"), ("firing", "n2 GPU 0")]  # it still holds; and a repetition


def test_a_rule_s_own_silence_and_sinks(tmp_path: Path) -> None:
    rule = HOT.model_copy(update={"silence": date(2100, 1, 1), "sinks": ("mail",)})
    world = World(tmp_path / "alerts", rule)
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    assert world.step(2000) == []
    world.settings = NodeAlerts(rules=(rule.model_copy(update={"silence": None}),), sinks={"log": {}, "mail": {}})
    world.engine.step(world.settings, world.look, lambda *_: None, 3000)
    assert [name for _, name in world.engine.outbox.waiting()] == ["mail"]


def test_a_rule_that_is_taken_out_is_forgotten(world: World) -> None:
    world.found = {"n1 GPU 0": Seen(90, "")}
    world.step(1000)
    world.step(1060)
    world.settings = NodeAlerts(rules=(), sinks=world.settings.sinks)
    assert world.step(1100) == []
    assert world.engine.alerts == {}


# ---- actions ----


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("notify", [("notify", 7)]),
        ("signal", [("notify", 7), ("signal", 7)]),
        ("cancel", [("notify", 7), ("cancel", 7)]),
    ],
)
def test_idle_jobs_are_warned_before_anything_happens(
    tmp_path: Path, action: str, expected: list[tuple[str, int]]
) -> None:
    rule = NodeRule(name="idle", kind="gpu-idle", threshold=1, duration=60, action=action, warning=300)
    world = World(tmp_path / "alerts", rule)
    world.found = {"job 7": Seen(0, "0%", (7,))}
    world.step(1000)
    world.step(1059)
    assert world.acts == []
    world.step(1060)
    assert ("cancel", 7) not in world.acts
    world.step(1359)
    assert ("cancel", 7) not in world.acts
    world.start()  # a new daemon knows of the warning
    for now in (1360, 1400, 1500):
        world.step(now)
    assert world.acts == expected


def test_a_job_that_works_again_is_left_alone(tmp_path: Path) -> None:
    rule = NodeRule(name="idle", kind="gpu-idle", threshold=1, duration=60, action="cancel", warning=300)
    world = World(tmp_path / "alerts", rule)
    world.found = {"job 7": Seen(0, "", (7,))}
    world.step(1000)
    world.step(1060)
    world.found = {}
    world.step(1200)
    world.found = {"job 7": Seen(0, "", (7,))}
    world.step(1400)
    world.step(1420)
    assert world.acts == [("notify", 7)]


def test_nothing_is_done_to_silenced_jobs(tmp_path: Path) -> None:
    rule = NodeRule(name="idle", kind="gpu-idle", threshold=1, duration=0, action="cancel", warning=60)
    world = World(tmp_path / "alerts", rule)
    (tmp_path / "alerts").mkdir(exist_ok=True)
    write_silences(tmp_path / "alerts", [Silence("a", "*", "*", 1e12)])
    world.found = {"job 7": Seen(0, "", (7,))}
    for now in (1000, 1100, 1200):
        world.step(now)
    assert world.acts == []


# ---- what happens once ----


def test_takeovers_are_reported_once_whatever_happens(tmp_path: Path) -> None:
    world = World(tmp_path / "alerts", NodeRule(name="takeover", kind="takeover", threshold=1, duration=0))
    events = [Event(4, 900.0, "takeover", {"leader": "ctl2", "before": "ctl1\x1b[31m"}), Event(5, 901.0, "drill", {})]
    world.engine.happened(world.settings, events, [], 1000)
    assert world.told() == [("happened", "controller ctl2")]
    world.start()
    world.engine.happened(world.settings, events, [], 1010)
    assert world.told() == []


def test_a_lost_agent_is_reported_once(tmp_path: Path) -> None:
    rule = NodeRule(name="agent-lost", kind="agent-lost", threshold=1, duration=0, nodes="n[1-2]")
    world = World(tmp_path / "alerts", rule)

    def warn(seq: int, node: str, reason: str) -> Event:
        return Event(seq, 900.0 + seq, "health.warn", {"node": node, "reason": reason, "by": "health"})

    lost = "sluice: agent_lost: the node agent was lost (signal-9); jobs unwatched for 0.4 s"
    events = [warn(4, "n1", lost), warn(5, "n3", lost), warn(6, "n2", "sluice: clock_skew: 31 s")]
    world.engine.happened(world.settings, events, [], 1000)
    assert world.told() == [("happened", "node n1")]
    world.engine.happened(world.settings, [*events, warn(7, "n2", lost)], [], 1010)
    assert world.told() == [("happened", "node n2")]


def test_each_controller_has_events_of_its_own(tmp_path: Path) -> None:
    """The one that takes over leads for the first time; its file begins at 1, wherever the other's is."""
    world = World(tmp_path / "alerts", NodeRule(name="takeover", kind="takeover", threshold=1, duration=0))
    old = [Event(900, 100.0, "takeover", {"leader": "ctl1"})]
    world.engine.happened(world.settings, old, [], 5000)
    assert world.told() == []  # long ago
    world.engine = Engine(world.folder, "test", Outbox(world.folder / "outbox"), "ctl2")
    world.engine.happened(world.settings, [Event(1, 4990.0, "takeover", {"leader": "ctl2"})], [], 5010)
    assert world.told() == [("happened", "controller ctl2")]
    world.engine = Engine(world.folder, "test", Outbox(world.folder / "outbox"), "ctl2")
    world.engine.happened(world.settings, [Event(1, 4990.0, "takeover", {"leader": "ctl2"})], [], 5020)
    assert world.told() == []


def test_errors_are_reported_when_counters_grow(tmp_path: Path) -> None:
    world = World(tmp_path / "alerts", NodeRule(name="errors", kind="errors", threshold=1, duration=0))

    def see(count: int | None, now: float) -> list[tuple[str, str]]:
        world.engine.happened(world.settings, [], [GpuReading("n1", 3, "GPU-3", errors=count)], now)
        return world.told()

    assert see(7, 1000) == []  # what was before is not reported
    assert see(7, 1010) == []
    assert see(9, 1020) == [("happened", "n1 GPU 3")]
    assert see(None, 1030) == []
    assert see(0, 1040) == []  # the driver was loaded again
    assert see(1, 1050) == [("happened", "n1 GPU 3")]


# ---- the outbox ----


def message(number: str = "m1") -> Message:
    return Message(number, 1.0, "test", "hot", "temperature", "warning", "firing")


def test_a_failing_sink_is_tried_again_later_and_holds_up_no_other(tmp_path: Path) -> None:
    clock = [0.0]
    outbox = Outbox(tmp_path, clock=lambda: clock[0])
    outbox.put(message(), ["bad", "good"])
    outbox.put(message("m2"), ["bad"])
    tried: list[float] = []

    def bad(one: Message) -> None:
        tried.append(clock[0])
        raise SluiceError("no route to host")

    taken: list[Message] = []
    assert outbox.deliver({"bad": bad, "good": taken.append}) == 1
    assert len(tried) == 1  # the second message does not try at once again
    for clock[0] in range(1, 200):
        outbox.deliver({"bad": bad, "good": taken.append})
    assert tried[:4] == [0, 5, 15, 35]
    fixed: list[Message] = []
    clock[0] = 10_000
    assert outbox.deliver({"bad": fixed.append}) == 2
    assert [one.id for one in fixed] == ["m1", "m2"]


def test_what_is_damaged_or_has_no_sink_is_dropped_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(message(), ["gone"])
    (tmp_path / "x@log.json").write_text("{}")
    (tmp_path / "other.txt").write_text("not ours")
    assert outbox.deliver({"log": lambda _: None}) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
    assert "no sink 'gone'" in caplog.text


def test_old_messages_are_given_up(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.put(message(), ["bad"])
    (path,) = tmp_path.iterdir()
    os.utime(path, (1, 1))

    def bad(one: Message) -> None:
        raise OSError("no")

    outbox.deliver({"bad": bad})
    assert not path.exists()


def test_the_outbox_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.controllerd.alerts.outbox.MOST", 10)
    outbox = Outbox(tmp_path)
    for number in range(25):
        outbox.put(message(f"m{number}"), ["log"])
    assert len(outbox.waiting()) == 10
    assert (tmp_path / "m24@log.json").exists()


def test_a_daemon_killed_while_it_delivers_delivers_again(tmp_path: Path) -> None:
    """SIGKILL after the sink took the message and before it was removed: it comes again, with the same id."""
    outbox = Outbox(tmp_path / "outbox")
    for number in range(5):
        outbox.put(message(f"m{number}"), ["file"])
    program = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        from sluice.controllerd.alerts.outbox import Outbox
        def sink(one):
            with open({str(tmp_path / "taken")!r}, "a") as file:
                file.write(one.id + "\\n")
            if one.id == "m2" and not Path({str(tmp_path / "killed")!r}).exists():
                Path({str(tmp_path / "killed")!r}).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        Outbox(Path({str(tmp_path / "outbox")!r})).deliver({{"file": sink}})
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    codes = [subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    assert (tmp_path / "taken").read_text().split() == ["m0", "m1", "m2", "m2", "m3", "m4"]
    assert outbox.waiting() == []


def test_a_clock_that_is_set_makes_nothing_older(tmp_path: Path) -> None:
    """A job whose GPU is idle is not cancelled because the controller's clock gained an hour, and reported once."""
    rule = NodeRule(name="idle", kind="gpu-idle", threshold=1, duration=60, repeat=600, action="cancel", warning=900)
    world = World(tmp_path, rule)
    at = [1000.0, 50.0]
    world.engine = Engine(tmp_path, "test", Outbox(tmp_path / "outbox"), clocks=lambda: (at[0], at[1]))
    world.found = {"job 7": Seen(0, "idle", (7,))}

    def later(seconds: float, jump: float = 0.0) -> list[tuple[str, str]]:
        at[:] = at[0] + seconds + jump, at[1] + seconds
        world.engine.step(world.settings, world.look, lambda rule, what, job: world.acts.append((what, job)))
        return world.told()

    assert later(0) == []
    assert later(30, jump=3600) == []
    assert later(15, jump=-7200) == []
    assert later(15) == [("firing", "job 7")] and world.acts == [("notify", 7)]
    assert later(15, jump=3600) == [] and world.acts == [("notify", 7)]
    assert later(15, jump=-86_400) == []
    assert later(575) == [("firing", "job 7")], "repeated after ten minutes of real time"
    assert later(290) == [] and world.acts == [("notify", 7)]
    assert later(10) == [] and world.acts == [("notify", 7), ("cancel", 7)]


# ---- what nodes report ----


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"node": 5, "gpus": []},
        {"node": "n1", "gpus": [5]},
        {"node": "n1", "gpus": [{"index": "0"}]},
        {"node": "n" * 100, "gpus": []},
        {"node": "n1", "gpus": [{"index": 0}] * 300},
    ],
)
def test_what_is_no_node_s_telling_is_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(SluiceError):
        Readings().take(request_)


def test_readings_are_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("sluice.exchange.live.time.monotonic", lambda: now[0])
    readings = Readings()
    gpu = {
        "index": 1,
        "uuid": "GPU-1",
        "temperature_c": 70,
        "errors": 2,
        "jobs": {"7": 12.5, "8": None, "x": 1},
        "utilisation_percent": "hot",
        "memory_percent": True,
    }
    readings.take({"node": "n1", "gpus": [gpu]})
    (found,) = readings.fresh()
    assert (found.temperature_c, found.utilisation_percent, found.memory_percent, found.errors) == (70, None, None, 2)
    assert found.jobs == {7: 12.5, 8: None}
    now[0] = 300
    assert readings.fresh() == []


def test_a_controller_that_was_replaced_does_not_undo_what_the_new_one_wrote(tmp_path: Path) -> None:
    old = World(tmp_path)
    old.found = {"n1": Seen(90, "90")}
    old.step(0)
    new = World(tmp_path)
    new.found = old.found
    assert new.step(100) == [("firing", "n1")]
    written = (tmp_path / "state.json").read_bytes()
    with pytest.raises(OvertakenError, match=r"state\.json: another controller has written it"):
        old.step(101)
    with pytest.raises(OvertakenError):
        old.engine.happened(old.settings, [], [], 101)
    assert (tmp_path / "state.json").read_bytes() == written
    old.start()
    assert old.step(102) == [], "what the new one has sent is known again"


def test_rules_that_wait_for_the_database_come_last(tmp_path: Path) -> None:
    kinds = ("quota", "temperature", "database-down", "node-drained", "budget")
    world = World(tmp_path, *(NodeRule(name=kind, kind=kind, threshold=1, duration=0) for kind in kinds))
    order: list[str] = []

    def look(rule: NodeRule) -> Found:
        order.append(rule.kind)
        return Found({})

    world.engine.step(world.settings, look, lambda *_: None, 0)
    assert order == ["temperature", "node-drained", "quota", "database-down", "budget"]


# ---- the policy ----


def test_the_short_form_makes_rules() -> None:
    found = compile_alerts(Alerts.model_validate({"temperature": 85, "memory": 90, "utilisation": 95}))
    assert {rule.name: rule.threshold for rule in found.rules} == {
        "temperature": 85,
        "memory": 90,
        "utilisation-high": 95,
    }
    assert found.readings
    assert found.sinks == {"log": {"kind": "log"}}
    assert NodeAlerts.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    "section",
    [
        {"rules": {"a": {"kind": "nonsense"}}},
        {"rules": {"a": {"kind": "temperature", "action": {"do": "cancel"}}}},
        {"rules": {"a": {"kind": "queue-wait", "threshold": 4}}},
        {"rules": {"a": {"kind": "temperature", "threshold": "hot"}}},
        {"rules": {"a": {"kind": "temperature", "threshold": float("nan")}}},
        {"rules": {"a": {"kind": "temperature", "sinks": ["nobody"]}}},
        {"rules": {"temperature": {"kind": "temperature"}}, "temperature": 80},
        {"sinks": {"a": {"kind": "email", "to": ["x@y\nBcc: z@w"]}}},
        {"sinks": {"a": {"kind": "email", "to": ["a@b.c"], "user": "u", "password_file": "/x"}}},
        {"sinks": {"a": {"kind": "email", "to": ["a@b.c"], "user": "u", "password_file": "/x", "tls": "none"}}},
        {"sinks": {"a": {"kind": "webhook", "url": "file:///etc/passwd"}}},
        {"sinks": {"a": {"kind": "webhook", "url": "https://u:p@host/"}}},
        {"sinks": {"a": {"kind": "webhook", "url": "https://host/ x"}}},
        {"sinks": {"a": {"kind": "webhook", "url": "http://host/x"}}},
        {"sinks": {"a": {"kind": "exec", "program": "rm -rf /"}}},
        {"sinks": {"a": {"kind": "exec", "program": "/bin/../x"}}},
        {"sinks": {"a": {"kind": "pigeon"}}},
    ],
)
def test_mistakes_in_the_policy(section: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Alerts.model_validate(section)


def test_the_state_is_json_of_this_form(world: World) -> None:
    world.found = {'n1 "GPU"\n\x1b[31m': Seen(90, "hot\r\nBcc: x")}
    world.step(1000)
    document = json.loads((world.folder / "state.json").read_text())
    (one,) = document["alerts"]["hot"].values()
    assert one["text"] == "hot Bcc: x"
