"""Models over UCX, between real processes: whatever goes wrong, what is used is right, and TLS does it instead.

UCX's own TCP stands in for RDMA: nothing here needs an adapter.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from sluice.base.errors import UsageError
from sluice.exchange.serving import Orders, Peer, ReplicaSpec, peer_key
from sluice.serve.replica import share as share_module
from sluice.serve.replica import stage as stage_module
from sluice.serve.replica import ucx as ucx_module
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.path import Tls, exactly
from sluice.serve.replica.pieces import DIGEST, PART, Pieces
from sluice.serve.replica.share import Link, Share
from sluice.serve.replica.spec import parse_spec
from sluice.serve.replica.stage import Staged, pieces_of, stage
from sluice.serve.replica.ucx import PROGRAM, Ucx, UcxError, UcxPath, why_not
from tests.unit.serve.replica_bed import ROOT, spec_of
from tests.unit.serve.ucx_bed import OVER_TCP, needs_ucx

SIZE = (9 << 20) + 5  # pieces of 4, 4 and 1 MiB, and one of a few bytes
SECRET = "5" * 64
KNOWN = cache(why_not)
REAL_INIT, REAL_SEND = UcxPath.__init__, UcxPath.send
MARK = b"the weights, which nobody else may read; "


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no time that a busy machine would not keep. Whether there is UCX is looked for once."""
    for name, value in OVER_TCP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ucx_module, "START_S", 100.0)
    monkeypatch.setattr(ucx_module, "why_not", KNOWN)
    monkeypatch.setattr(share_module, "ANSWER_S", 100.0)
    monkeypatch.setattr(stage_module, "_STALLED_S", 200.0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ReplicaSpec:
    model = tmp_path_factory.mktemp("model")
    chance = os.urandom(SIZE)
    parts = {"a": MARK * (PART // len(MARK)) + chance[: 8 << 20], "b": chance[: 1 << 20], "c": b"small", "empty": b""}
    for name, data in parts.items():
        (model / name).write_bytes(data)
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in parts.items())
    return spec_of(model, stage="-", sha256=hashlib.sha256(lines.encode()).hexdigest(), data_path="ucx")


class Node:
    """A replica in a process of its own, tests/unit/serve/ucx_node.py."""

    def __init__(self, kind: str, spec: ReplicaSpec, folder: Path, peer: Peer | None = None) -> None:
        folder.mkdir()
        words = [
            kind,
            json.dumps(asdict(replace(spec, stage=str(folder)))),
            *([json.dumps(asdict(peer))] if peer else []),
        ]
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.serve.ucx_node", *words], cwd=ROOT,
                stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **OVER_TCP},
            )  # fmt: skip

    @cached_property
    def peer(self) -> Peer:
        assert self.process.stdout is not None
        return Peer(**json.loads(self.process.stdout.readline()))

    def ucx_processes(self) -> list[int]:
        found = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # it has ended
                for pid in children.read_text().split():
                    if Path(f"/proc/{pid}/comm").read_text() == "sluice-ucx\n":
                        found.append(int(pid))
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def start(spec: ReplicaSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start one; or have the one of this kind that other tests have had, without connections, if it lives."""
    folder = tmp_path_factory.mktemp("nodes")
    nodes: list[Node] = []
    known: dict[str, Node] = {}

    def one(kind: str = "well", peer: Peer | None = None) -> Node:
        node = known.get(kind)
        if peer is not None or node is None or node.process.poll() is not None:
            nodes.append(node := Node(kind, spec, folder / str(len(nodes)), peer))
            if peer is None:
                known[kind] = node
        until(lambda: not node.ucx_processes())
        return node

    yield one
    for node in nodes:
        node.kill()


@pytest.fixture
def here(copy: Pieces) -> Iterator[tuple[Share, Peer]]:
    """A replica in this process that gives the model, and how it can be reached."""
    context, fingerprint = make_context("node")
    share = Share(context, SECRET, 1 << 40, lambda: None, "ucx")
    share.offer(copy)
    assert share.weights is not None
    yield share, Peer("127.0.0.1", share.weights.port, fingerprint, peer_key(SECRET))
    share.end()


class Taker:
    """A replica in this process, that knows of one peer."""

    def __init__(self, spec: ReplicaSpec, folder: Path, peer: Peer) -> None:
        folder.mkdir()
        context, _ = make_context("node")
        orders = Orders("go on", (peer,), reads=False)
        self.spec = replace(spec, stage=str(folder))
        self.share = Share(context, "6" * 64, 1 << 40, lambda: self.share.tell(orders), "ucx")
        self.staged: Staged | None = None
        self.thread = threading.Thread(target=self._stage)
        self.thread.start()

    def _stage(self) -> None:
        self.staged = stage(self.spec, share=self.share)

    def wait(self) -> Staged:
        """The model, which is right."""
        self.thread.join(200)
        assert self.staged is not None
        for one in Path(self.spec.model).iterdir():
            assert (self.staged.path / one.name).read_bytes() == one.read_bytes()
        assert not list(self.staged.path.parent.parent.glob(".part.*"))
        return self.staged


@pytest.fixture
def take(spec: ReplicaSpec, tmp_path: Path) -> Iterator[Callable[[Peer], Taker]]:
    takers: list[Taker] = []

    def one(peer: Peer) -> Taker:
        takers.append(Taker(spec, tmp_path / f"taker-{len(takers)}", peer))
        return takers[-1]

    yield one
    for taker in takers:
        taker.share.end()
        taker.thread.join(200)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were read from the storage, in this process."""
    done: list[int] = []
    real = Pieces.read_source

    def read(pieces: Pieces, number: int) -> bytes:
        done.append(pieces.size(number))
        return real(pieces, number)

    monkeypatch.setattr(Pieces, "read_source", read)
    return done


def whole(spec: ReplicaSpec) -> int:
    return sum(one.stat().st_size for one in Path(spec.model).iterdir())


def until(look: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not look():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def copy(spec: ReplicaSpec, tmp_path_factory: pytest.TempPathFactory) -> Pieces:
    """The same model, staged here."""
    pieces = pieces_of(stage(replace(spec, stage=str(tmp_path_factory.mktemp("here")))))
    assert pieces is not None
    return pieces


# ---- it works ----


@needs_ucx
def test_a_model_goes_over_ucx(
    start: Callable[..., Node], take: Callable[[Peer], Taker], spec: ReplicaSpec, reads: list[int],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    node = start()
    takers = [take(node.peer), take(node.peer)]
    for one in takers:
        assert one.wait().taken == one.wait().by_ucx == whole(spec) and not reads
        places = [one.share.ucx._enter() for _ in range(ucx_module.MOST)]
        assert None not in places, "who has the model has them all, to give"
    said = capfd.readouterr().err + node.errors.read_text()
    assert said.count("action=data-path path=ucx") == 3, "each says it once"
    until(lambda: not node.ucx_processes())


@needs_ucx
def test_where_the_one_that_takes_has_none_it_is_tls(
    start: Callable[..., Node], copy: Pieces, capfd: pytest.CaptureFixture[str]
) -> None:
    link = Link(start().peer, copy, Ucx("tcp"))
    assert isinstance(link._path, Tls) and bytes(link.get(0)[0]) == copy.get(0)
    assert "serving.data_path is tcp" in capfd.readouterr().err
    link.close()


@needs_ucx
@pytest.mark.parametrize("version", ["this", "before"])
def test_where_the_one_that_gives_has_none_it_is_tls(
    version: str, here: tuple[Share, Peer], copy: Pieces, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (share, peer), ucx = here, Ucx("ucx")
    share.ucx = Ucx("tcp")
    if version == "before":  # for it that is the number of a piece
        monkeypatch.setattr(share.ucx, "give", lambda to: share._give_piece(to, Tls(to), copy, share_module._UCX))
    link = Link(peer, copy, ucx)
    assert isinstance(link._path, Tls) and bytes(link.get(0)[0]) == copy.get(0) and not ucx.taken
    assert "another replica has no UCX" in capfd.readouterr().err
    link.close()


@needs_ucx
def test_who_cannot_begin_to_give_over_ucx_gives_by_tls(
    here: tuple[Share, Peer], copy: Pieces, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the connection that is there: the next one would fail as well."""

    def cannot(path: UcxPath, kind: str, *more: Any) -> None:
        if kind == "give":
            raise UcxError("it cannot")
        REAL_INIT(path, kind, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(UcxPath, "__init__", cannot)
    (share, peer), ucx = here, Ucx("ucx")
    link = Link(peer, copy, ucx)
    assert isinstance(link._path, Tls) and bytes(link.get(0)[0]) == copy.get(0)
    assert 'action=ucx-failed what="it cannot"' in capfd.readouterr().err and ucx._failures == 1
    for one in (ucx, share.ucx):
        assert None not in [one._enter() for _ in range(ucx_module.MOST)]
    link.close()


@needs_ucx
def test_connections_beyond_the_places_have_tls(
    start: Callable[..., Node], copy: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx_module, "MOST", 1)
    peer, ucx = start().peer, Ucx("ucx")
    first, second = Link(peer, copy, ucx), Link(peer, copy, ucx)
    assert isinstance(first._path, UcxPath) and isinstance(second._path, Tls)
    assert [bytes(link.get(1)[0]) for link in (first, second)] == 2 * [copy.get(1)]
    first.close()
    third = Link(peer, copy, ucx)
    assert isinstance(third._path, UcxPath)
    for link in (second, third):
        link.close()


# ---- one end dies ----


def in_the_middle(monkeypatch: pytest.MonkeyPatch, do: Callable[[UcxPath], None]) -> None:
    """When a part of a piece has come, and more are to come, do it once."""
    real, done = UcxPath._opened, threading.Lock()

    def opened(path: UcxPath) -> bytes:
        part = real(path)
        if path._begun > path._done and done.acquire(blocking=False):
            do(path)
        return part

    monkeypatch.setattr(UcxPath, "_opened", opened)


@needs_ucx
@pytest.mark.parametrize("end", ["gives", "takes"])
def test_sigkill_of_a_process_of_ucx(
    end: str, start: Callable[..., Node], take: Callable[[Peer], Taker], spec: ReplicaSpec, reads: list[int],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    node = start("slow")

    def kill(path: UcxPath) -> None:
        for pid in node.ucx_processes() if end == "gives" else [path._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    in_the_middle(monkeypatch, kill)
    taker = take(node.peer)
    assert taker.wait().taken == whole(spec) and not reads, "by TLS, from the same one"
    assert taker.share.ucx.taken < whole(spec)
    assert "action=share-failed" in capfd.readouterr().err


@needs_ucx
def test_sigkill_of_the_one_that_takes(start: Callable[..., Node], copy: Pieces) -> None:
    node = start()
    taker = start("stuck", node.peer)
    until(lambda: bool(node.ucx_processes()) and bool(taker.ucx_processes()))
    orphans = taker.ucx_processes()
    taker.kill()
    until(lambda: not node.ucx_processes() and not any(Path(f"/proc/{pid}").exists() for pid in orphans))
    link = Link(node.peer, copy, Ucx("ucx"))
    assert isinstance(link._path, UcxPath) and bytes(link.get(2)[0]) == copy.get(2)
    link.close()


@needs_ucx
def test_a_process_of_ucx_that_ends_before_it_has_read_all(here: tuple[Share, Peer], copy: Pieces) -> None:
    """The kernel says so by an error, before what it had said: it is UCX that failed, not the peer."""
    link = Link(here[1], copy, Ucx("ucx"))
    path = link._path
    assert isinstance(path, UcxPath)
    path._process.send_signal(signal.SIGSTOP)
    path._begin(PART)
    path._process.kill()
    path._process.wait()
    with pytest.raises(UcxError, match="ended"):
        path._settle()
    with pytest.raises(UcxError, match="ended"):
        path._begin(PART)
    link.close()


@needs_ucx
def test_a_process_of_ucx_that_hangs(
    start: Callable[..., Node], take: Callable[[Peer], Taker], spec: ReplicaSpec, reads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node, real = start("slow"), UcxPath._word

    def stop(path: UcxPath) -> None:
        for pid in node.ucx_processes():
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(path, "_word", lambda _, kind: real(path, 1.0, kind))

    in_the_middle(monkeypatch, stop)
    taker = take(node.peer)
    assert taker.wait().taken == whole(spec) and taker.share.ucx.taken < whole(spec) and not reads


@needs_ucx
def test_sigkill_of_the_one_that_gives(
    start: Callable[..., Node], take: Callable[[Peer], Taker], spec: ReplicaSpec, reads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    node = start("slow")
    orphans: list[int] = []

    def kill(_: UcxPath) -> None:
        orphans.extend(node.ucx_processes())
        node.kill()
        monkeypatch.setattr(stage_module, "_STALLED_S", 0.3)

    in_the_middle(monkeypatch, kill)
    staged = take(node.peer).wait()
    assert staged.taken < whole(spec) and sum(reads) == whole(spec) - staged.taken
    assert orphans
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))


# ---- one end lies ----


def _longer(parts: Iterable[bytes]) -> Iterator[bytes]:
    """More than there is room for."""
    return (part + b"more" for part in parts)


def _emptier(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Nothing, and all of it after that."""
    yield b""
    yield from parts


def _shorter(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Half of the first part, and the whole: in the end there is more than was to come."""
    for part in parts:
        yield part[: PART // 2]
        yield part


def _other(parts: Iterable[bytes]) -> Iterator[bytes]:
    """As many bytes, but others."""
    return (bytes(len(part)) for part in parts)


LIES: dict[str, Callable[[Iterable[bytes]], Iterator[bytes]]] = {
    "longer": _longer, "emptier": _emptier, "shorter": _shorter, "other": _other,
}  # fmt: skip


def lies(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """Who gives here does so, from the next connection on. Empty: it does not lie."""

    def begin(path: UcxPath, kind: str, connection: Any, key: bytes, *more: Any) -> None:
        wrong = lie == "wrong_key" and kind == "give"
        REAL_INIT(path, kind, connection, os.urandom(32) if wrong else key, *more)  # type: ignore[arg-type]

    def send(path: UcxPath, parts: Iterable[bytes]) -> None:
        if lie == "silent":
            select.select([path._connection], [], [])  # until it is given up
            return
        REAL_SEND(path, LIES[lie](parts) if lie in LIES else parts)

    monkeypatch.setattr(UcxPath, "__init__", begin)
    monkeypatch.setattr(UcxPath, "send", send)


@needs_ucx
def test_lies_of_the_one_that_gives(here: tuple[Share, Peer], copy: Pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, peer), ucx = here, Ucx("ucx")
    for lie, words in {
        "longer": "truncated", "emptier": "a part of 16 bytes", "shorter": "are left of the piece",
        "silent": "nothing for 1 s", "wrong_key": "did not encrypt",
    }.items():  # fmt: skip
        lies(monkeypatch, lie)
        link = Link(peer, copy, ucx)
        link._tls.sendall(share_module._NUMBER.pack(0))
        assert len(exactly(link._tls, DIGEST)) == DIGEST
        if lie == "silent":
            link._tls.settimeout(1.0)
        with pytest.raises(UcxError, match=words):
            link._path.receive(copy.size(0))
        link.close()
    lies(monkeypatch, "")
    link = Link(peer, copy, ucx)
    assert isinstance(link._path, UcxPath) and bytes(link.get(0)[0]) == copy.get(0)
    assert ucx.taken == copy.size(0)
    link.close()


@needs_ucx
def test_who_lies_over_ucx_is_asked_by_tls(
    here: tuple[Share, Peer], take: Callable[[Peer], Taker], spec: ReplicaSpec, reads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lies(monkeypatch, "longer")
    taker = take(here[1])
    assert taker.wait().taken == whole(spec) and not reads and taker.share._without_ucx


@needs_ucx
def test_who_gives_other_bytes_is_not_asked_again(
    here: tuple[Share, Peer], take: Callable[[Peer], Taker], spec: ReplicaSpec, reads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lies(monkeypatch, "other")
    taker = take(here[1])
    assert taker.wait().taken == 0 and sum(reads) == whole(spec)


@needs_ucx
def test_an_address_that_is_none(start: Callable[..., Node], copy: Pieces) -> None:
    node = start()
    for address in (b"", b"\0", b"\xff" * 200, os.urandom(900), b"\1" * 0x4001):
        link = Link(node.peer, copy)
        link._tls.sendall(share_module._NUMBER.pack(share_module._UCX))
        assert len(exactly(link._tls, ucx_module.KEY)) == ucx_module.KEY
        link._tls.sendall(len(address).to_bytes(2, "big") + address)
        if exactly(link._tls, 1) == ucx_module._NO:
            assert bytes(link.get(0)[0]) == copy.get(0)
        else:
            assert len(address) > 200, "it looks like one, and nobody is there: the piece never comes"
        link.close()
    until(lambda: not node.ucx_processes())
    good = Link(node.peer, copy, Ucx("ucx"))
    assert isinstance(good._path, UcxPath) and bytes(good.get(0)[0]) == copy.get(0)
    good.close()


@needs_ucx
def test_whoever_reaches_the_address_can_stop_ucx_and_nothing_else(start: Callable[..., Node], copy: Pieces) -> None:
    """UCX does not know who sends: a stranger's bytes come first."""
    link = Link(start().peer, copy, Ucx("ucx"))
    assert isinstance(link._path, UcxPath)
    limits = Path(f"/proc/{link._path._process.pid}/limits").read_text()
    assert re.search(rf"^Max data size +{2 << 30} ", limits, re.MULTILINE), "what UCX keeps for nobody has a bound"
    stranger = UcxPath("give", link._tls, os.urandom(32), "ucx", lambda: None, lambda _: None, link._path.address)
    stranger.send([bytes(PART)])
    with pytest.raises(UcxError, match="did not encrypt"):
        while True:  # until it has come
            assert bytes(link.get(0)[0]) == copy.get(0)
    for one in (stranger, link):
        one.close()


# ---- what nobody else may read ----


@needs_ucx
def test_neither_key_nor_model_are_in_a_process_of_ucx(
    start: Callable[..., Node], copy: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []

    def noted(path: UcxPath, kind: str, connection: object, key: bytes, *more: object) -> None:
        keys.append(key)
        REAL_INIT(path, kind, connection, key, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(UcxPath, "__init__", noted)
    node = start()
    link = Link(node.peer, copy, Ucx("ucx"))
    assert isinstance(link._path, UcxPath) and MARK in link.get(0)[0]
    taking = memory_of(link._path._process.pid)
    giving = b"".join(memory_of(pid) for pid in node.ucx_processes())
    assert len(taking) > 4 * PART and len(giving) > 4 * PART
    for memory in (taking, giving):
        assert MARK not in memory and keys[0] not in memory
    link._path._memory[: len(MARK)] = MARK
    assert MARK in memory_of(link._path._process.pid), "it would be found"
    link.close()


def memory_of(pid: int) -> bytes:
    found = []
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if " rw" in line:
                with suppress(OSError, ValueError):
                    found.append(os.pread(memory.fileno(), end - begin, begin))
    return b"".join(found)


# ---- whether there is UCX ----


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A host's files with one adapter, whose port is active."""
    for name, text in {
        "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n", "sys/class/infiniband_verbs/abi_version": "6\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "dev/infiniband/uverbs0": "",
    }.items():  # fmt: skip
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


NONE = "no RDMA device with an active port that this job may open"


@needs_ucx
def test_rdma_is_an_active_port_that_can_be_opened(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not("auto", adapter) == ""
    state = adapter / "sys/class/infiniband/mlx5_0/ports/1/state"
    state.write_text("1: DOWN\n")
    assert why_not("auto", adapter) == NONE and why_not("ucx", adapter) == ""
    state.write_text("4: ACTIVE\n")
    (adapter / "dev/infiniband/uverbs0").unlink()
    assert why_not("auto", adapter) == NONE
    assert why_not("auto", adapter / "empty") == NONE
    assert why_not("tcp", adapter) == "serving.data_path is tcp"


@needs_ucx
def test_what_ucx_says_is_the_reason(monkeypatch: pytest.MonkeyPatch, adapter: Path) -> None:
    monkeypatch.delenv("UCX_TLS")
    assert why_not("auto", adapter) == "UCX: No such device", "this machine has none"


@needs_ucx
def test_what_works_with_nobody_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    """As where adapters do not reach each other: each peer would be waited for."""
    works, fails = Ucx("ucx"), Ucx("ucx")
    works.taken = 1
    for one in (works, fails):
        for _ in range(ucx_module.MOST_FAILURES):
            place = one._enter()
            assert place is not None
            place.release()
            one.failed()
    assert works._enter() is not None and fails._enter() is None
    assert capfd.readouterr().err.count("UCX failed with 3 replicas") == 1


def test_without_its_program_it_is_tls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ucx_module, "PROGRAM", tmp_path / "sluice-ucx")
    monkeypatch.setattr(ucx_module, "why_not", why_not)
    ucx = Ucx("ucx")
    assert [ucx._enter(), ucx._enter()] == [None, None]
    assert capfd.readouterr().err.count("Sluice was built without UCX") == 1
    for text, words in (("exit 3", "exit status 3"), ("printf 'FUCX is not installed: x'; exit 1", "not installed: x")):
        (tmp_path / "sluice-ucx").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "sluice-ucx").chmod(0o755)
        assert words in why_not("ucx")
    (tmp_path / "sluice-ucx").write_text("#!/bin/sh\nexec sleep 3600\n")
    monkeypatch.setattr(ucx_module, "START_S", 0.2)
    assert why_not("ucx") == "sluice-ucx: nothing for 0.2 s"


def test_a_spec_of_another_version(spec: ReplicaSpec) -> None:
    document = asdict(spec)
    del document["data_path"]
    assert parse_spec(json.dumps(document)).data_path == "auto", "of a replicad before"
    with pytest.raises(UsageError, match="'rdma'"):
        parse_spec(json.dumps({**document, "data_path": "rdma"}))


@needs_ucx
def test_a_host_without_the_library(tmp_path: Path) -> None:
    """The program loads it at run time, and says so where it is not there."""
    needed = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed and "libuc" not in needed
    (tmp_path / "libucp.so.0").write_text("not one")
    done = subprocess.run(
        [PROGRAM, "check"], env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stdout.startswith("FUCX is not installed: "), done
