"""A function in Python, decorated with `@serve.model`: the service's `command` runs the file that has it."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine
from sluice.serve.engines.openai import fill


def abilities(spec: ReplicaSpec) -> Abilities:
    """Embeddings, and /predict."""
    del spec
    return Abilities(embeddings=True)


def load(figures: Mapping[str, float]) -> Load:
    """Of /metrics."""
    return Load(
        int(figures.get("sluice_model_running", 0)),
        int(figures.get("sluice_model_waiting", 0)),
        int(figures.get("sluice_model_prompt_tokens_total", 0)),
    )


ENGINE = Engine(fill, abilities, "/metrics", load)
