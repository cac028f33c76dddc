"""The process that exports spans from the spool, so that OpenTelemetry's packages are not in the controllers' daemon.

``python -m sluice.controllerd.spans.sender SPOOL``, as `sluice.metrics.sender`. What is sent twice, as an answer was
lost, has the same IDs.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from policy.traces import NodeTraces
from sluice.controllerd.spans.otlp import Receiver
from sluice.metrics.sender import Sender, say, send_until_closed
from sluice.metrics.spool import Reader


def main() -> None:
    """Export until standard input is closed."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the sender says once what lasts
    folder = Path(sys.argv[1])
    settings = NodeTraces.model_validate_json(sys.stdin.readline())
    words = ("spans", "the receiver")
    send_until_closed(Sender(Reader(folder), lambda: Receiver(settings), say, folder, words))


if __name__ == "__main__":
    main()
