"""text-embeddings-inference. By the documents of TEI 1.8 and the source of 1.9.3 (`text-embeddings-router`); not run.

Its router listens on TCP alone (--uds-path is between its own processes), so it has an API key, in its environment.
"""

from __future__ import annotations

from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine, Figures, Place, Start, has_option, option_value, total

_INPUTS = 32
"""TEI's own most texts of a request."""
_BODY = 32 << 20
"""Bytes of a request that gateways take; TEI's own limit is 2,000,000."""


def start(spec: ReplicaSpec, place: Place) -> Start:
    """On a port of 127.0.0.1, with its /metrics. It also binds a second port for these for a moment, and ends where
    another program has it: any free one."""
    arguments = [
        "text-embeddings-router",
        "--model-id", str(place.model),
        "--served-model-name", spec.service,
        "--hostname", "127.0.0.1",
        "--port", str(place.port),
        "--uds-path", str(place.folder / "tei"),
    ]  # fmt: skip
    if not has_option(spec.options, "--max-concurrent-requests"):
        arguments += ["--max-concurrent-requests", str(spec.slots * _inputs(spec.options))]
    if not has_option(spec.options, "--payload-limit"):
        arguments += ["--payload-limit", str(_BODY)]
    if not has_option(spec.options, "--prometheus-port"):
        arguments += ["--prometheus-port", "0"]
    environment = {"API_KEY": place.key, "HF_HUB_OFFLINE": "1"}
    return Start((*arguments, *spec.options), place.port, environment, secret=place.key)


def _inputs(options: tuple[str, ...]) -> int:
    """Texts of a request at the most. TEI counts each one as a request, and refuses a request of more than are free."""
    given = option_value(options, "--max-client-batch-size") or ""
    return max(int(given), 1) if given.isascii() and given.isdigit() else _INPUTS


def abilities(spec: ReplicaSpec) -> Abilities:
    """Embeddings alone."""
    del spec
    return Abilities(embeddings=True)


def load(figures: Figures) -> Load:
    """Of /metrics."""
    return Load(waiting=total(figures, "te_queue_size"))


ENGINE = Engine(start, abilities, "/metrics", load)
