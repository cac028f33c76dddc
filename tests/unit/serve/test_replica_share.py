"""Models from replica to replica: the storage is read once, nothing is used unchecked, and nobody is needed."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.exchange.serving import Abilities, Heartbeat, Load, Orders, Peer, ReplicaSpec, State, Weights, peer_key
from sluice.serve.replica import share as share_module
from sluice.serve.replica import stage as stage_module
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.pieces import Pieces
from sluice.serve.replica.share import Link, Share
from sluice.serve.replica.stage import Staged, pieces_of, stage
from sluice.serve.replicad.weights import MOST_PEERS, peers_of
from tests.unit.serve.replica_bed import spec_of

SIZE = 20 << 20
MIB = 1 << 20


class Node:
    """A replica that stages on a disk of its own."""

    def __init__(self, number: int, spec: ReplicaSpec, site: Site) -> None:
        (spec_folder := Path(str(spec.stage)) / str(number)).mkdir()
        context, self.fingerprint = make_context("node")
        self.secret = f"{number:064x}"
        self.spec = replace(spec, stage=str(spec_folder), launch=f"{number:016x}")
        self.share = Share(context, self.secret, spec.broadcast * MIB, site.tell)
        self.staged: Staged | None = None
        self.error: Exception | None = None
        self.stopped = threading.Event()
        self.dead = False
        self._thread = threading.Thread(target=self._stage)

    def _stage(self) -> None:
        try:
            self.staged = stage(self.spec, self.stopped, self.share)
            pieces = pieces_of(self.staged)
            assert pieces is not None
            self.share.offer(pieces)
        except Exception as error:
            self.error = error

    def start(self) -> Node:
        self._thread.start()
        return self

    def wait(self) -> Staged:
        self._thread.join(60)
        assert self.staged is not None, self.error
        return self.staged

    def die(self) -> None:
        self.dead = True
        self.stopped.set()
        self.share.end()
        self._thread.join(30)

    def beat(self) -> Heartbeat:
        return Heartbeat(
            "tiny", self.spec.launch, 1, "127.0.0.1", 1, self.fingerprint, self.secret, State.STARTING, Abilities(), 1,
            Load(), None, weights=self.share.weights,
        )  # fmt: skip


class Site:
    """Nodes, and what replicad says to them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def tell(self) -> None:
        """All of them, as after a heartbeat of each."""
        beats = [node.beat() for node in self.nodes if not node.dead]
        for node, beat in zip([node for node in self.nodes if not node.dead], beats, strict=True):
            node.share.tell(Orders("go on", *peers_of(beat, beats)))

    def add(self, count: int, spec: ReplicaSpec) -> list[Node]:
        new = [Node(len(self.nodes) + number, spec, self) for number in range(count)]
        self.nodes += new
        return new


@pytest.fixture
def site() -> Iterator[Site]:
    one = Site()
    yield one
    for node in one.nodes:
        node.die()


@pytest.fixture
def spec(tmp_path: Path) -> ReplicaSpec:
    (tmp_path / "model").mkdir()
    parts = {"a": os.urandom(SIZE - 3), "b": os.urandom(5), "empty": b""}
    for name, data in parts.items():
        (tmp_path / "model" / name).write_bytes(data)
    (tmp_path / "stage").mkdir()
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in parts.items())
    return spec_of(tmp_path / "model", stage=str(tmp_path / "stage"), sha256=hashlib.sha256(lines.encode()).hexdigest())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of the storage, which takes its time."""
    done: list[int] = []
    real = Pieces.read_source

    def read(pieces: Pieces, number: int) -> bytes:
        data = real(pieces, number)
        time.sleep(0.02)
        done.append(len(data))
        return data

    monkeypatch.setattr(Pieces, "read_source", read)
    return done


def same(staged: Staged, spec: ReplicaSpec) -> bool:
    return all((staged.path / one.name).read_bytes() == one.read_bytes() for one in Path(spec.model).iterdir())


def test_many_nodes_read_the_storage_once(site: Site, spec: ReplicaSpec, reads: list[int]) -> None:
    for node in site.add(6, spec):
        node.start()
    staged = [node.wait() for node in site.nodes]
    assert all(same(one, spec) for one in staged)
    assert sum(reads) < 1.5 * SIZE, "each that reads for itself makes it six times"
    assert sum(one.taken for one in staged) == 6 * (SIZE + 2) - sum(reads)
    (late,) = site.add(1, spec)
    before = sum(reads)
    assert late.start().wait().taken == SIZE + 2 and sum(reads) == before


def test_without_word_of_others_it_reads_the_storage(
    site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "_HEARD_S", 0.1)
    monkeypatch.setattr(Site, "tell", lambda self: None)
    (node,) = site.add(1, spec)
    assert same(node.start().wait(), spec) and node.wait().taken == 0


def test_when_the_one_that_reads_dies_the_next_one_does(
    site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    real = Pieces.read_source

    def read(pieces: Pieces, number: int) -> bytes:
        if number == 3 and not site.nodes[0].dead:
            reading.set()
            assert go_on.wait(30)
            raise OSError(5, "the storage has gone", "x")
        return real(pieces, number)

    monkeypatch.setattr(Pieces, "read_source", read)
    first, *others = site.add(3, spec)
    first.start()
    assert reading.wait(30)
    for node in others:
        node.start()
    until(lambda: all(node.share.weights is not None for node in others))
    go_on.set()
    first.die()
    site.tell()
    assert all(same(node.wait(), spec) for node in others) and isinstance(first.error, stage_module.StageError)


def test_where_nobody_gives_anything_each_reads(site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_module, "_STALLED_S", 0.3)
    (node,) = site.add(1, spec)
    nobody = Peer("127.0.0.1", free_port(), "0" * 64, "0" * 64)
    monkeypatch.setattr(Site, "tell", lambda self: node.share.tell(Orders("go on", (nobody,), reads=False)))
    assert same(node.start().wait(), spec)


def test_a_damaged_copy_is_refused_piece_by_piece(site: Site, spec: ReplicaSpec, reads: list[int]) -> None:
    first, second = site.add(2, spec)
    staged = first.start().wait()
    with (staged.path / "a").open("r+b") as file:
        file.write(b"damaged!")
    site.tell()
    before = sum(reads)
    assert same(second.start().wait(), spec)
    assert sum(reads) > before


def test_what_is_wrong_as_a_whole_is_read_again(
    site: Site, spec: ReplicaSpec, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = site.add(2, replace(spec, sha256=None))
    staged = first.start().wait()
    second.spec = replace(second.spec, sha256=spec.sha256)
    entry = staged.path.parent
    with (staged.path / "a").open("r+b") as file:
        file.write(b"damaged!")
        file.seek(0)
        digest = hashlib.sha256(file.read(4 << 20)).digest()
    digests = (entry / "pieces").read_bytes()
    (entry / "pieces").write_bytes(digest + digests[32:])
    pieces = pieces_of(staged)
    assert pieces is not None
    monkeypatch.setattr(pieces, "entry", stage_module._entry_name(second.spec, stage_module._files(Path(spec.model))))
    first.share.offer(pieces)
    assert same(second.start().wait(), spec) and sum(reads) == 2 * (SIZE + 2)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_it_gives_nothing_without_the_key_or_of_another_model(site: Site, spec: ReplicaSpec) -> None:
    (node,) = site.add(1, spec)
    pieces = pieces_of(node.start().wait())
    weights = node.share.weights
    assert pieces is not None and weights is not None and weights.whole
    good = Peer("127.0.0.1", weights.port, node.fingerprint, peer_key(node.secret))
    assert len(Link(good, pieces).get(0)[0]) == 4 << 20
    with pytest.raises(OSError, match="closed"):
        Link(replace(good, key=node.secret), pieces)
    with pytest.raises(ValueError, match="another certificate"):
        Link(replace(good, fingerprint="0" * 64), pieces)
    pieces.entry = "another"
    with pytest.raises(OSError, match="closed"):
        Link(good, pieces)
    with socket.create_connection(("127.0.0.1", weights.port), 5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.settimeout(10)
        with suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(100)


def test_silent_strangers_keep_nobody_out(site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: more connections than there are places, from two addresses, one of them that of a replica."""
    monkeypatch.setattr(share_module, "CONNECT_S", 60.0)
    peer, pieces = giver_of(site, spec)
    others = threading.active_count()  # of tests before this one, too
    for source in ("127.0.0.2", "127.0.0.1"):
        silent = [
            socket.create_connection((peer.host, peer.port), 5, (source, 0))
            for _ in range(2 * share_module.MOST_CONNECTIONS)
        ]
        links = [Link(peer, pieces) for _ in range(3)]
        until(lambda: threading.active_count() - others < 3 * share_module.MOST_CONNECTIONS)
        for one in (*links, *silent):
            one.close()


def test_silent_strangers_are_ended(site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_module, "CONNECT_S", 0.2)
    peer, _ = giver_of(site, spec)
    with socket.create_connection((peer.host, peer.port), 5) as silent:
        silent.settimeout(10)
        assert silent.recv(1) == b""


def test_it_gives_on_after_there_was_no_descriptor_left(
    site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, pieces = giver_of(site, spec)
    real, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def accept(one: socket.socket) -> Any:
        accepted = real(one)
        if failures:
            accepted[0].close()
            raise failures.pop()
        return accepted

    monkeypatch.setattr(socket.socket, "accept", accept)
    listening = site.nodes[0].share._socket
    assert listening is not None
    assert not works(lambda: Link(peer, pieces)) or not works(lambda: Link(peer, pieces))
    assert not failures
    until(lambda: works(lambda: Link(peer, pieces)))
    site.nodes[0].die()
    until(lambda: listening.fileno() == -1)


def works(make: Callable[[], Any]) -> bool:
    try:
        make()
    except OSError:
        return False
    return True


def until(look: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not look():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_gives_no_faster_than_it_may(site: Site, spec: ReplicaSpec) -> None:
    first, second = site.add(2, replace(spec, broadcast=16))
    first.start().wait()
    began = time.monotonic()
    assert second.start().wait().taken == SIZE + 2
    assert time.monotonic() - began > 0.8 * (SIZE - (4 << 20)) / (16 * MIB)


def giver_of(site: Site, spec: ReplicaSpec) -> tuple[Peer, Pieces]:
    """One that has the whole model."""
    (node,) = site.add(1, spec)
    pieces = pieces_of(node.start().wait())
    assert pieces is not None and node.share.weights is not None
    return Peer("127.0.0.1", node.share.weights.port, node.fingerprint, peer_key(node.secret)), pieces


def test_whose_turn_is_too_late_asks_others_at_once(
    site: Site, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_module, "ANSWER_S", 4.0)
    peer, pieces = giver_of(site, replace(spec, broadcast=4))
    links = [Link(peer, pieces) for _ in range(6)]
    began, given, refused = time.monotonic(), [], []

    def ask(link: Link) -> None:
        try:
            link.get(0)
            given.append(time.monotonic() - began)
        except OSError:
            refused.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask, args=(link,)) for link in links]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(given) == 3 and max(given) < share_module.ANSWER_S, "after 0, 1 and 2 s"
    assert len(refused) == 3 and max(refused) < 1


def test_who_gives_to_many_at_once_keeps_no_piece_for_each(site: Site, spec: ReplicaSpec) -> None:
    peer, pieces = giver_of(site, spec)
    links = [Link(peer, pieces) for _ in range(share_module.MOST_CONNECTIONS)]
    tracemalloc.start()
    try:
        for link in links:  # nobody reads the answer
            link._tls.sendall((0).to_bytes(4, "big"))
        time.sleep(1)
        assert tracemalloc.get_traced_memory()[0] < 2.5 * len(links) * MIB, "a piece has 4 MiB"
    finally:
        tracemalloc.stop()
        for link in links:
            link.close()


# ---- replicad's word ----


def beat(number: int, *, whole: bool = False, entry: str = "m.1") -> Heartbeat:
    return Heartbeat(
        "s", f"{number:016x}", 1, f"n{number}", 1, "f" * 64, f"{number:064x}", State.STARTING, Abilities(), 1, Load(),
        None, weights=Weights(entry, 7, whole),
    )  # fmt: skip


def test_one_reads_and_all_know_it() -> None:
    beats = [beat(number) for number in range(40)]
    said = [peers_of(one, beats) for one in beats]
    assert [reads for _, reads in said] == [True] + [False] * 39
    assert all(len(peers) == MOST_PEERS and peers[0].host == "n0" for peers, _ in said[1:])
    assert all(f"n{number}" not in [one.host for one in peers] for number, (peers, _) in enumerate(said))
    named = [sum(one.host == f"n{number}" for peers, _ in said for one in peers) for number in range(1, 40)]
    assert max(named) - min(named) <= 1, "the load is even"
    assert said[5][0][0].key == peer_key("0" * 64) != "0" * 64


def test_nobody_reads_what_one_has() -> None:
    beats = [beat(1), beat(2, whole=True), beat(3)]
    assert [peers_of(one, beats)[1] for one in (beats[0], beats[2])] == [False, False]
    assert peers_of(beats[1], beats) == ((), True)
    assert [one.host for one in peers_of(beats[2], beats)[0]] == ["n2", "n1"]


def test_another_model_is_another_matter() -> None:
    beats = [beat(1), beat(2, entry="m.2")]
    assert [peers_of(one, beats) for one in beats] == [((), True), ((), True)]
    assert peers_of(replace(beats[0], weights=None), beats) == ((), True)
