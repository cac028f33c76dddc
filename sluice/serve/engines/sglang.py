"""SGLang. By the documents of SGLang 0.5; tried with 0.5.23. It listens on TCP alone, so it has an API key.

The key is in a file for --config, which only the service's user can read: arguments of a process are everybody's.
"""

from __future__ import annotations

import json

from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine, Figures, Place, Start, has_option, share, total

_CONFIG = "sglang.yaml"


def start(spec: ReplicaSpec, place: Place) -> Start:
    """On a port of 127.0.0.1."""
    config = {
        "model-path": str(place.model),
        "served-model-name": spec.service,
        "host": "127.0.0.1",
        "port": place.port,
        "api-key": place.key,
        "enable-metrics": True,
    }
    if not has_option(spec.options, "--max-running-requests"):
        config["max-running-requests"] = spec.slots
    if not has_option(spec.options, "--log-level-http"):
        config["log-level-http"] = "warning"  # without a line for each request, and for each look of the replica
    group = place.group
    if group.nodes > 1:
        config.update({"nnodes": group.nodes, "node-rank": group.rank, "dist-init-addr": f"{group.host}:{group.port}"})
    gpus = place.gpus * group.nodes
    if gpus > 1 and not has_option(spec.options, "--tp", "--tp-size", "--tensor-parallel-size", "--dp-size", "--dp"):
        config["tensor-parallel-size"] = gpus
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in config.items())
    arguments = ("python3", "-m", "sglang.launch_server", "--config", str(place.folder / _CONFIG), *spec.options)
    environment = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return Start(arguments, place.port, environment, {_CONFIG: text}, secret=place.key)


def abilities(spec: ReplicaSpec) -> Abilities:
    """Chat goes on with `continue_final_message`, completions with token ids as prompt."""
    if has_option(spec.options, "--is-embedding"):
        return Abilities(embeddings=True)
    return Abilities(chat=True, completions=True, responses=True, resume="tokens")


def load(figures: Figures) -> Load:
    """Of /metrics."""
    return Load(
        total(figures, "sglang:num_running_reqs"),
        total(figures, "sglang:num_queue_reqs"),
        total(figures, "sglang:prompt_tokens_total"),
        total(figures, "sglang:generation_tokens_total"),
        share(figures, "sglang:token_usage"),
    )


ENGINE = Engine(start, abilities, "/metrics", load, end_s=30.0)
