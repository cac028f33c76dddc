"""Waiting for the output of several processes at once: bounded in time and in size."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class Output:
    """The data of one descriptor; `ended` is False where time or size ran out first."""

    data: bytearray = field(default_factory=bytearray)
    ended: bool = False


def read_all(
    descriptors: Collection[int], *, deadline: float, limit: int, until: Collection[int] | None = None
) -> dict[int, Output]:
    """Read each descriptor to its end, or to `limit` bytes, or until `deadline`, a time of `time.monotonic`.

    Returns as soon as those in `until` (default all) are done. The descriptors stay open and become non-blocking.
    """
    outputs = {descriptor: Output() for descriptor in descriptors}
    waiting = set(descriptors if until is None else until)
    with selectors.DefaultSelector() as selector:
        for descriptor in outputs:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                try:
                    chunk = os.read(key.fd, 1 << 16)
                except BlockingIOError:
                    continue
                output = outputs[key.fd]
                output.data += chunk
                output.ended = not chunk
                if output.ended or len(output.data) > limit:
                    selector.unregister(key.fd)
                    waiting.discard(key.fd)
    return outputs
