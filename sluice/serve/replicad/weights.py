"""Which replicas of a service give their staged model to which, and who reads the site's storage."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.exchange.serving import Heartbeat, Peer, peer_key

MOST_PEERS = 16


def peers_of(mine: Heartbeat, beats: Iterable[Heartbeat]) -> tuple[tuple[Peer, ...], bool]:
    """Of whom a replica takes the model that it stages, and whether it reads the storage. `beats`: of its service's
    replicas that are heard, its own among them, those first that staged first.

    Where none has the whole model, the first one reads it: all others get it from there and from each other. Each one
    is named those that have all, the reader, and of the rest those next to it in the order: not all ask the same few.
    """
    own = mine.weights
    if own is None or own.whole:
        return (), True
    given = [(one, one.weights) for one in beats if one.weights is not None]
    same = [(one, weights) for one, weights in given if weights.entry == own.entry]
    place = [one.launch for one, _ in same].index(mine.launch)
    order = sorted(same[place + 1 :] + same[:place], key=lambda pair: (not pair[1].whole, pair is not same[0]))
    reads = place == 0 and not any(weights.whole for _, weights in order)
    peers = (Peer(one.host, weights.port, one.fingerprint, peer_key(one.secret)) for one, weights in order[:MOST_PEERS])
    return tuple(peers), reads
