"""A replica in a process of its own, by the replicas' code but for what its first argument says that it does wrong.

`python -m tests.unit.serve.ucx_node KIND SPEC [PEER]`: it stages the model, from the storage or from PEER alone, prints
how it can be reached, and gives the model until it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

from sluice.exchange.serving import Orders, Peer, peer_key
from sluice.serve.replica import ucx
from sluice.serve.replica.certificate import make_context
from sluice.serve.replica.pieces import Pieces
from sluice.serve.replica.share import Share
from sluice.serve.replica.spec import parse_spec
from sluice.serve.replica.stage import pieces_of, stage

SECRET = "5" * 64
SLOW_S = 0.05


def _do_wrong(kind: str) -> None:
    parts, opened = Pieces.parts, ucx.UcxPath._opened
    if kind == "slow":

        def slow(pieces: Pieces, number: int) -> Iterator[bytes]:
            for part in parts(pieces, number):
                time.sleep(SLOW_S)
                yield part

        Pieces.parts = slow  # type: ignore[assignment, method-assign]
    elif kind == "stuck":  # when the first part has come

        def stuck(path: ucx.UcxPath) -> bytes:
            opened(path)
            while True:
                time.sleep(3600)

        ucx.UcxPath._opened = stuck  # type: ignore[assignment, method-assign]
    elif kind != "well":
        raise SystemExit(f"{kind}: not known")


def main(kind: str, text: str, peer: str = "") -> None:
    """Does not return."""
    _do_wrong(kind)
    ucx.START_S = 100.0  # on a busy machine
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
