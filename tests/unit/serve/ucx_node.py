"""A replica in a process of its own, by the replicas' code but for what its first argument says that it does wrong.

`python -m tests.unit.serve.ucx_node KIND SPEC [PEER]`: it stages the model, from the storage or from PEER alone, prints
how it can be reached, and gives the model until it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from sluice.exchange.serving import Orders, Peer, peer_key
from sluice.serve.replica import ucx
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.pieces import PART, Pieces
from sluice.serve.replica.share import Share
from sluice.serve.replica.spec import parse_spec
from sluice.serve.replica.stage import pieces_of, stage

SECRET = "5" * 64
SLOW_S = 0.2


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


def _silent(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Nothing at all."""
    time.sleep(3600)
    yield from parts


def _other(parts: Iterable[bytes]) -> Iterator[bytes]:
    """As many bytes, but others."""
    return (bytes(len(part)) for part in parts)


LIES: dict[str, Callable[[Iterable[bytes]], Iterator[bytes]] | None] = {
    "longer": _longer, "emptier": _emptier, "shorter": _shorter, "silent": _silent, "wrong_key": None,
}  # fmt: skip


def _do_wrong(kind: str) -> None:
    send, begin, parts = ucx.UcxPath.send, ucx.UcxPath.__init__, Pieces.parts
    if kind == "other":
        ucx.UcxPath.send = lambda path, given: send(path, _other(given))  # type: ignore[method-assign]
    elif kind == "slow":

        def slow(pieces: Pieces, number: int) -> Iterator[bytes]:
            for part in parts(pieces, number):
                time.sleep(SLOW_S)
                yield part

        Pieces.parts = slow  # type: ignore[method-assign]
    elif kind == "lies":
        left = iter(LIES)
        of_path: dict[ucx.UcxPath, str] = {}

        def lying(path: ucx.UcxPath, which: str, connection: object, key: bytes, *more: object) -> None:
            of_path[path] = lie = next(left, "")
            begin(path, which, connection, os.urandom(32) if lie == "wrong_key" else key, *more)  # type: ignore[arg-type]

        def send_lies(path: ucx.UcxPath, given: Iterable[bytes]) -> None:
            lie = LIES.get(of_path[path])
            send(path, given if lie is None else lie(given))

        ucx.UcxPath.__init__ = lying  # type: ignore[assignment, method-assign]
        ucx.UcxPath.send = send_lies  # type: ignore[method-assign]
    elif kind != "well":
        raise SystemExit(f"{kind}: not known")


def main(kind: str, text: str, peer: str = "") -> None:
    """Does not return."""
    _do_wrong(kind)
    spec = parse_spec(text)
    context, fingerprint = make_context("node")
    orders = Orders("go on", (Peer(**json.loads(peer)),) if peer else (), reads=not peer)
    share = Share(context, SECRET, 1 << 40, lambda: share.tell(orders), spec.data_path)
    staged = stage(spec, share=share)
    pieces = pieces_of(staged)
    assert pieces is not None
    share.offer(pieces)
    assert share.weights is not None
    print(json.dumps(asdict(Peer("127.0.0.1", share.weights.port, fingerprint, peer_key(SECRET)))), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
