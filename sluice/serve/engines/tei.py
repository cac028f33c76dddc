"""text-embeddings-inference. By the documents of TEI 1.8 (`text-embeddings-router`).

Its router listens on TCP alone (--uds-path is between its own processes), so it has an API key, in its environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine, Place, Start, has_option


def start(spec: ReplicaSpec, place: Place) -> Start:
    """On a port of 127.0.0.1. Its /metrics are on the same port in builds that serve them there."""
    arguments = [
        "text-embeddings-router",
        "--model-id", str(place.model),
        "--served-model-name", spec.service,
        "--hostname", "127.0.0.1",
        "--port", str(place.port),
        "--uds-path", str(place.folder / "tei"),
    ]  # fmt: skip
    if not has_option(spec.options, "--max-concurrent-requests"):
        arguments += ["--max-concurrent-requests", str(spec.slots)]
    return Start((*arguments, *spec.options), place.port, {"API_KEY": place.key, "HF_HUB_OFFLINE": "1"})


def abilities(spec: ReplicaSpec) -> Abilities:
    """Embeddings alone."""
    del spec
    return Abilities(embeddings=True)


def load(figures: Mapping[str, float]) -> Load:
    """Of /metrics."""
    return Load(waiting=int(figures.get("te_queue_size", 0)))


ENGINE = Engine(start, abilities, "/metrics", load)
