"""Waiting for the output of several processes at once: bounded in time and in size."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable


def read_all(descriptors: Iterable[int], *, deadline: float, limit: int) -> dict[int, bytes | None]:
    """Read every descriptor to its end; None for one that did not end by `deadline` or gave more than `limit` bytes.

    `deadline` is a time of `time.monotonic`. The descriptors stay open and become non-blocking.
    """
    parts: dict[int, bytearray] = {descriptor: bytearray() for descriptor in descriptors}
    whole: dict[int, bytes | None] = dict.fromkeys(parts)
    with selectors.DefaultSelector() as selector:
        for descriptor in parts:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                try:
                    chunk = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    continue
                parts[key.fd] += chunk
                if not chunk:
                    whole[key.fd] = bytes(parts[key.fd])
                if not chunk or len(parts[key.fd]) > limit:
                    selector.unregister(key.fd)
    return whole
