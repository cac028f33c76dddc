"""llama.cpp: `llama-server` where the node has it, else the same server of the Python package xllamacpp.

Checked with xllamacpp 2026.10 (the tests run it): it listens on a Unix socket, has as many slots as its option says,
queues what is more, and says in /metrics what it does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from sluice.base.run import PYTHON
from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine, Figures, Place, Start, has_option, share, total


def start(spec: ReplicaSpec, place: Place) -> Start:
    """A folder as model is the first of its .gguf files: the others are its parts. One that is named mmproj... is its
    encoder of images."""
    model, encoders = place.model, list[Path]()
    if model.is_dir():
        encoders = sorted(model.glob("mmproj*.gguf"))
        model = min(set(model.glob("*.gguf")) - set(encoders), default=model / "model.gguf")
    found = shutil.which("llama-server")
    program = (found,) if found else (*PYTHON, "-m", "sluice.serve.engines.xllamacpp_server")
    arguments = [
        *program,
        "--model", str(model),
        "--alias", spec.service,
        "--host", str(place.socket),
        "--parallel", str(spec.slots),
        "--metrics",
        "--no-webui",
    ]  # fmt: skip
    if place.gpus and not has_option(spec.options, "-ngl", "--n-gpu-layers", "--gpu-layers"):
        arguments += ["--n-gpu-layers", "999"]
    if encoders and not has_option(spec.options, "-mm", "--mmproj", "-mmu", "--mmproj-url", "--no-mmproj"):
        arguments += ["--mmproj", str(encoders[0])]
    return Start((*arguments, *spec.options), Path(place.socket))


def abilities(spec: ReplicaSpec) -> Abilities:
    """A chat goes on by a last message of the assistant; exactly, as the template puts the text where it was."""
    if has_option(spec.options, "--embeddings", "--embedding"):
        return Abilities(embeddings=True)
    return Abilities(chat=True, completions=True, responses=True, resume="tokens")


def load(figures: Figures) -> Load:
    """Of /metrics."""
    return Load(
        total(figures, "llamacpp:requests_processing"),
        total(figures, "llamacpp:requests_deferred"),
        total(figures, "llamacpp:prompt_tokens_total"),
        total(figures, "llamacpp:tokens_predicted_total"),
        share(figures, "llamacpp:kv_cache_usage_ratio"),
    )


ENGINE = Engine(start, abilities, "/metrics", load, end_s=5.0)
