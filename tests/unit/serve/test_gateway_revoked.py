"""A key that is revoked on one host is refused by the gateways of all hosts, also by one whose store still has it."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sluice.base.tokens import TokenStore
from sluice.exchange.serving import REVOKED, LeaseReport
from sluice.exchange.snapshot import Snapshot
from sluice.serve.gateway import parent
from sluice.serve.gateway.keys import Keys
from sluice.serve.gateway.parent import REVOKED_FILE
from sluice.serve.gateway.refusals import RefusalError
from sluice.serve.gateway.revoked import SILENT_S, Revoked
from sluice.serve.replicad.leases import Book
from sluice.serve.replicad.revoked import RevokedKeys
from tests.unit.serve.gateway_bed import plain, run, until
from tests.unit.serve.test_gateway_process import ASK, a_replica, two_gateways


def is_in(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def test_two_gateways_refuse_a_key_within_a_second(tmp_path: Path) -> None:
    """Whichever host it is revoked on; the other one's store has it still."""

    async def work() -> None:
        replica = await a_replica(tmp_path, plain)
        async with two_gateways(tmp_path, replica) as gateways:
            for one, other in (gateways, gateways[::-1]):
                store = TokenStore(one.folder / "tokens.json")
                made, key = store.create("alice", ["serve"], now=time.time(), seconds=3600)
                (other.folder / "tokens.json").write_bytes((one.folder / "tokens.json").read_bytes())
                one.key = other.key = key
                for each in gateways:
                    while (await each.ask(ASK)).status != 200:
                        await asyncio.sleep(0.2)
                seen = one.folder / "records" / REVOKED_FILE
                await until(partial(is_in, seen, made.digest), 60)
                store.revoke([made.id])
                reports = one.keeper.asked_before
                before, heard = len(reports), other.keeper.asked
                async with asyncio.timeout(60):
                    for each in (one, other):
                        while (await each.ask(ASK)).status != 401:
                            await asyncio.sleep(0.02)
                    while len(reports) < before + 2:
                        await asyncio.sleep(0.02)
                # Within a second: the store is looked at before each report of limits, twice a second and more. One
                # report may have been on its way; before the next one the key was seen. One question may have been
                # on its way then, and the next one, at once, has the key; so has the next answer to the other host.
                assert one.keeper.told[made.digest] <= reports[before + 1] + 2, (one.keeper.told, before, reports)
                assert other.keeper.asked > heard
                assert made.id in TokenStore(other.folder / "tokens.json").tokens()

    run(work())


def test_what_is_revoked_during_a_question_is_told_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "_PERIOD_S", 3600.0)
    untold: list[tuple[str, float]] = []
    told: list[list[Any]] = []

    async def work() -> None:
        follow = parent.Follow(Path("replicad"), lambda _: None, lambda: list(untold))

        async def ask(line: bytes, seconds: float = 0.0) -> dict[str, Any]:
            told.append(json.loads(line)["revoked"])
            if not untold:
                untold.append(("0" * 64, 1e10))
                follow.ask_soon()
            found: dict[str, Any] = json.loads(Snapshot().after("", 0))
            return found

        monkeypatch.setattr(follow, "ask", ask)
        running = asyncio.create_task(follow.run())
        await until(lambda: len(told) == 2, 60)
        running.cancel()

    run(work())
    assert told == [[], [["0" * 64, 1e10]]]


class Replicad:
    """Of one host, as far as keys go."""

    def __init__(self, name: str) -> None:
        self.name, self.snapshot = name, Snapshot()
        self.keys = RevokedKeys(self.snapshot)

    def rows(self) -> dict[str, float]:
        found = json.loads(self.snapshot.after("", 0))["rows"]
        return {key: until for section, key, until in found if section == REVOKED}

    def tell(self, other: Replicad, *, lost: bool = False, known: bool = True) -> None:
        """A note and its answer, which may be lost. Not `known`: it does not know yet who answers."""
        other.keys.hear(self.name, self.keys.say(other.name if known else ""))
        if not lost:
            self.keys.hear(other.name, other.keys.say(self.name))


class Host:
    """A gateway's parent, as far as keys go."""

    def __init__(self, folder: Path, host: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.number, self.host = folder, 0, host
        self.store = TokenStore(folder / "tokens.json")
        self.start()

    def start(self) -> None:
        self.revoked = Revoked(self.store, self.folder / "revoked.json", self.host or str(self.folder), time.time())
        self.look()

    def look(self, later: float = 0.0) -> bool:
        return self.revoked.look(time.time() + later)

    def lease(self, book: Book, now: float = 1.0) -> None:
        self.number += 1
        report = self.revoked.of_report(LeaseReport(str(self.folder), self.number, self.number - 1))
        answer = book.answer(report, self.number * 1000)
        assert answer is not None
        self.revoked.answered(answer, now)

    def exchange(self, replicad: Replicad, *, lost: bool = False) -> None:
        """With replicad of this host; `lost`: its answer."""
        replicad.keys.take(self.revoked.untold())
        if not lost:
            self.revoked.hear(replicad.rows())

    def key(self) -> str:
        return self.store.create("alice", ["serve"], now=time.time(), seconds=3600)[0].digest


def test_what_is_revoked_reaches_all_whatever_is_lost(tmp_path: Path) -> None:
    one, other = Host(tmp_path / "one"), Host(tmp_path / "other")
    here, there = Replicad("ctl1"), Replicad("ctl2")
    digests = [one.key() for _ in range(250)]
    one.look()
    one.store.revoke([each.id for each in one.store.tokens().values() if each.digest in digests[:230]])
    assert one.look() and not one.look()
    one.exchange(here, lost=True)
    here.tell(there, lost=True, known=False)
    for _ in range(4):  # a hundred at once
        one.exchange(here)
        here.tell(there)
        there.tell(here, lost=True)
        other.exchange(there, lost=True)
        other.exchange(there)
    assert set(other.revoked.digests) == set(digests[:230]) and not other.revoked.untold()
    # Another replicad knows nothing: it learns it of the gateway of its host, or of the other one.
    other.look()
    other.start()  # from its file
    for new, learns in ((Replicad("ctl2"), other.exchange), (Replicad("ctl2"), here.tell)):
        third = Host(tmp_path / f"third-{learns.__name__}")
        for _ in range(5):
            learns(new)
            third.exchange(new)
        assert set(third.revoked.digests) == set(digests[:230])


def test_replicads_that_know_each_other_say_each_key_once() -> None:
    here, there = Replicad("ctl1"), Replicad("ctl2")
    for number in range(20):
        (here, there)[number % 2].keys.take([(f"{number:064x}", 1e10)])
        here.tell(there)
    there.tell(here)
    assert here.rows() == there.rows() and len(here.rows()) == 20
    here.tell(there)
    assert not here.keys.say("ctl2").keys and not there.keys.say("ctl1").keys


def test_a_secret_that_was_rotated_is_revoked_and_a_store_that_is_away_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Host(tmp_path / "one")
    first, second = one.key(), one.key()
    one.look()
    (name,) = (each.id for each in one.store.tokens().values() if each.digest == first)
    one.store.rotate(name, now=time.time(), old_for=100)
    assert not one.look()
    one.store.rotate(name, now=time.time(), old_for=0)
    assert one.look() and first in one.revoked.digests and second not in one.revoked.digests
    known = dict(one.revoked.digests)
    content = one.store.path.read_bytes()
    for broken in (None, b"{"):
        one.store.path.unlink() if broken is None else one.store.path.write_bytes(broken)
        assert not one.look()
    one.store.path.write_bytes(content)
    one.look()
    assert one.revoked.digests == known
    tokens = one.store.tokens

    def between() -> Any:
        """The file is removed and put back meanwhile: `rm` and `cp`."""
        one.store.path.unlink()
        found = tokens()
        one.store.path.write_bytes(content)
        return found

    monkeypatch.setattr(one.store, "tokens", between)
    assert not one.look()
    (tmp_path / "one/revoked.json").write_text("[]")
    one.start()
    assert one.revoked.digests == {}


def test_what_is_revoked_while_no_gateway_runs_is_seen_by_the_next_one(tmp_path: Path) -> None:
    one = Host(tmp_path / "one")
    first, second = one.key(), one.key()
    one.look()
    one.store.revoke([each.id for each in one.store.tokens().values() if each.digest == first])
    one.start()
    assert set(one.revoked.digests) == {first}
    # One that would be over by now is no news.
    assert second not in one.revoked.digests
    one.store.revoke(list(one.store.tokens()))
    assert not one.look(7200) and set(one.revoked.digests) == {first}


def test_a_full_disk_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other, replicad = Host(tmp_path / "one"), Host(tmp_path / "other"), Replicad("ctl1")
    (digest,) = [one.key()]
    one.look()
    file = other.revoked.path
    other.revoked.path = tmp_path / "later/revoked.json"
    one.store.revoke(list(one.store.tokens()))
    one.look()
    one.exchange(replicad)
    other.exchange(replicad)
    for later in (0.0, 11.0, 22.0):
        assert not other.look(later) and digest in other.revoked.digests
    assert sum("revoked.json" in record.getMessage() for record in caplog.records) == 1
    other.revoked.path = file
    other.look(23.0)
    assert not file.exists(), "not at each look"
    other.look(33.0)
    other.start()
    assert digest in other.revoked.digests


def test_replicad_takes_digests_and_nothing_else() -> None:
    replicad, good = Replicad("ctl1"), "0" * 64
    told = [("x" * 100_000, 1e10), (good.upper() + "A", 1e10), ("1" * 64, float("nan")), (good, 1e10)]
    assert replicad.keys.take(told) and not replicad.keys.take(told) and replicad.rows() == {good: 1e10}


def test_a_gateway_alone_believes_keys_whatever_its_controllers_do(tmp_path: Path) -> None:
    """Under each name that it had: it takes another one each time that its lease is over, or the authority is new."""
    one, book = Host(tmp_path / "one"), Book("a", 0, {})
    before = Host(tmp_path / "before", host=str(tmp_path / "one"))  # was killed, and is not known to be away yet
    before.lease(book)
    one.lease(book, 1.0)
    assert not one.revoked.silent(1.1 + SILENT_S)
    Host(tmp_path / "other").lease(book)
    one.lease(book, 2.0)
    assert one.revoked.silent(2.1 + SILENT_S)


def test_a_gateway_that_hears_nobody_believes_keys_for_a_while_only(tmp_path: Path) -> None:
    one, other, book = Host(tmp_path / "one"), Host(tmp_path / "other"), Book("a", 0, {})
    one.lease(book, 100.0)
    assert not one.revoked.silent(1000.0), "it is the only one: its own store has all"
    other.lease(book, 1000.0)
    one.lease(book, 1001.0)
    assert not one.revoked.silent(1001.0 + SILENT_S) and one.revoked.silent(1001.1 + SILENT_S)
    one.lease(book, 2000.0)
    assert not one.revoked.silent(2000.0)


def test_workers_refuse_what_their_parent_says(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    made, key = store.create("alice", ["serve"], now=time.time(), seconds=3600)
    keys, head = Keys(store), f"Bearer {key}".encode()

    def refused(**words: Any) -> int:
        keys.revoked(words.get("digests", ()), silent=words.get("silent", False))
        with pytest.raises(RefusalError) as error:
            keys.check(head, "127.0.0.1")
        return error.value.status

    keys.check(head, "127.0.0.1")
    assert refused(digests=[made.digest]) == 401
    assert refused(silent=True) == 503
    keys.revoked([], silent=False)
    keys.check(head, "127.0.0.1")
