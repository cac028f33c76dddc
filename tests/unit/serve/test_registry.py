"""What comes over the network: heartbeats that are taken, and all that is refused and counted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from sluice.base.errors import SluiceError
from sluice.exchange.serving import (
    Abilities,
    Demand,
    Heartbeat,
    Launched,
    LeaseAnswer,
    LeaseReport,
    LeaseRow,
    Load,
    Orders,
    Outlook,
    PeerNote,
    State,
    parse,
    render,
)
from sluice.serve.replicad.registry import Expected, Registry, addresses
from sluice.serve.replicad.tickets import Tickets
from sluice.slurm.munge import Message
from sluice.slurm.munge_service import RefusedError

OWN, ALICE, BOB = 990, 2001, 2002
LAUNCH = "0123456789abcdef"
BEAT = Heartbeat(
    "words", LAUNCH, 17, "n1", 4711, "ab" * 32, "cd" * 32, State.READY, Abilities(chat=True), 4, Load(running=2), 1e9
)


class Site:
    def __init__(self) -> None:
        self.taken: list[Heartbeat] = []
        self.notes: list[PeerNote] = []
        self.expected = {
            LAUNCH: Expected("words", ALICE, 17, frozenset({"n1", "n2.site"})),
            "f" * 16: Expected("words", ALICE, None, frozenset()),
        }
        self.registry = Registry(
            OWN, lambda: {ALICE: "alice", BOB: "bob"}, self.expected.get, self.take, self.note, self.lease
        )  # fmt: skip

    def take(self, beat: Heartbeat) -> Orders:
        self.taken.append(beat)
        return Orders("drain")

    def note(self, note: PeerNote) -> PeerNote:
        self.notes.append(note)
        return replace(note, host="ctl1")

    @staticmethod
    def lease(report: LeaseReport) -> bytes:
        return render(LeaseAnswer("e", report.number, True, 1, 0, "share"))

    def say(self, beat: Heartbeat | bytes, uid: int = ALICE) -> bytes:
        return self.registry.answer(Message(beat if isinstance(beat, bytes) else render(beat), uid, uid))

    def refused(self, beat: Heartbeat | bytes, uid: int = ALICE) -> str:
        """Why; it is counted."""
        before = self.registry.counts()
        with pytest.raises(RefusedError):
            self.say(beat, uid)
        ((why, _),) = self.registry.counts().items() - before.items()
        assert not self.taken
        return why


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_heartbeat_of_the_services_user_is_taken_and_answered(site: Site) -> None:
    orders = parse(Orders, site.say(BEAT))
    assert replace(orders, ticket="") == Orders("drain")
    assert site.registry.owner(orders.ticket.encode()) == (LAUNCH,)
    assert site.taken == [BEAT] and site.registry.counts() == {"taken": 1}
    for host in ("n2", "n2.site"):
        site.say(replace(BEAT, host=host))
    site.say(replace(BEAT, launch="f" * 16, job=5, host="anywhere"))


@pytest.mark.parametrize(
    ("change", "uid", "why"),
    [
        ({}, BOB, "another user"),
        ({}, 2003, "stranger"),
        ({}, 0, "stranger"),
        ({"launch": "1" * 16}, ALICE, "unknown launch"),
        ({"service": "other"}, ALICE, "unknown launch"),
        ({"job": 18}, ALICE, "another job"),
        *(({"host": host}, ALICE, "another host") for host in ("n3", "n1.other", "10.0.0.1", "127.0.0.1", "fd00::1")),
        ({"host": "n1/../x"}, ALICE, "malformed"),
        ({"host": ""}, ALICE, "malformed"),
        ({"port": 0}, ALICE, "malformed"),
        ({"port": 70000}, ALICE, "malformed"),
        ({"secret": "short"}, ALICE, "malformed"),
        ({"fingerprint": "x" * 64}, ALICE, "malformed"),
        ({"slots": 0}, ALICE, "malformed"),
        ({"slots": 10**9}, ALICE, "malformed"),
        ({"why": "x" * 2000}, ALICE, "malformed"),
        ({"ends": float("inf")}, ALICE, "malformed"),
        ({"ends": -1.0}, ALICE, "malformed"),
        ({"load": Load(running=-1)}, ALICE, "malformed"),
        ({"load": Load(prompt_tokens=1 << 60)}, ALICE, "malformed"),
        ({"load": Load(cache_used=float("nan"))}, ALICE, "malformed"),
    ],
)
def test_what_is_not_so_is_refused(site: Site, change: dict[str, Any], uid: int, why: str) -> None:
    assert site.refused(replace(BEAT, **change), uid) == why


def test_hostile_bytes_are_refused(site: Site) -> None:
    good = json.loads(render(BEAT))
    for text in (b"", b"{", b"null", b"[]", b"1" * 70_000, b"[" * 60_000, b'{"service": "words"}', b"\xff\xfe"):
        assert site.refused(text) == "malformed"
    for name in good:
        for value in (None, [], {}, "x" * 70_000, -1, 1e400):
            text = json.dumps({**good, name: value}).encode()
            try:
                answer = site.say(text)
            except RefusedError:
                continue
            free = {"version", "ends", "why", "abilities", "load", "weights"}
            assert parse(Orders, answer) and name in free, (name, value)
            site.taken.clear()


def test_random_changes_of_a_heartbeat_raise_nothing_else(site: Site) -> None:
    rng, good = random.Random(3), bytearray(render(BEAT))
    for _ in range(3000):
        text = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        try:
            site.say(bytes(text))
        except RefusedError:
            continue
    assert site.registry.counts()["malformed"] > 1000


def test_a_stranger_is_refused_before_anything_is_parsed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.serve.replicad.registry.parse", lambda *_: pytest.fail("parsed"))
    with pytest.raises(RefusedError):
        site.say(b"x" * 1000, 2003)


def test_only_replicads_own_user_may_send_notes(site: Site) -> None:
    demand = Demand("words", "h:1", 1, 0.5, 2, 900, 0.1)
    note = PeerNote("ctl2", True, (demand,), (Launched("words", LAUNCH),), (Outlook("words", "why", 3.0),))
    assert parse(PeerNote, site.say(render(note), OWN)).host == "ctl1" and site.notes == [note]
    assert site.refused(render(note), ALICE) == "malformed"
    with pytest.raises(SluiceError):
        site.say(render(BEAT), OWN)
    assert len(site.notes) == 1


def test_only_replicads_own_user_may_pass_on_reports_of_gateways(site: Site) -> None:
    report = LeaseReport("g", 3, 2, (LeaseRow("user", "alice", (1, 2, 3, 4), (5, -6)),))
    assert parse(LeaseReport, render(report)) == report
    assert parse(LeaseAnswer, site.say(render(report), OWN)).number == 3
    assert site.refused(render(report), ALICE) == "malformed"


def test_addresses() -> None:
    assert addresses(["ctl1:6824", "[fd00::1]:7"]) == [("ctl1", 6824), ("fd00::1", 7)]
    for text in ("ctl1", ":1", "ctl1:x"):
        with pytest.raises(SluiceError, match="HOST:PORT"):
            addresses([text])


def test_a_ticket_holds_for_its_launch_and_for_two_minutes_at_most() -> None:
    tickets = Tickets()
    given = tickets.make(LAUNCH, 60.0).encode()
    assert tickets.launch(given, 60.0) == tickets.launch(given, 179.9) == LAUNCH
    assert tickets.launch(given, 180.0) is None and tickets.launch(given, 59.9) is None
    others = given.replace(b"0", b"1", 1), given[:-1], given + b"0", LAUNCH.encode(), b"MUNGE:AwQFAAA=:"
    assert not [one for one in (*others, b"", b".", b"\xff") if tickets.launch(one, 60.0)]
    assert Tickets().launch(given, 60.0) is None, "of a process before"


def test_of_what_is_too_long_for_a_ticket_nothing_is_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: words as long as a line may be, which the loop that reads all heartbeats would hash."""
    signed: list[str] = []
    monkeypatch.setattr(Tickets, "_signature", lambda tickets, launch, period: signed.append(launch) or "")
    assert Tickets().launch(b"\xff" * (64 << 10) + b".x", 60.0) is None
    assert not signed
