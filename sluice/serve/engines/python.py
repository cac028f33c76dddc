"""A function in Python, decorated with `@serve.model`: the service's `command` runs the file that has it."""

from __future__ import annotations

from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine, Figures, total
from sluice.serve.engines.openai import fill


def abilities(spec: ReplicaSpec) -> Abilities:
    """Embeddings, and /predict."""
    del spec
    return Abilities(embeddings=True)


def load(figures: Figures) -> Load:
    """Of /metrics."""
    return Load(
        total(figures, "sluice_model_running"),
        total(figures, "sluice_model_waiting"),
        total(figures, "sluice_model_prompt_tokens_total"),
    )


ENGINE = Engine(fill, abilities, "/metrics", load)
