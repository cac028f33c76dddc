"""vLLM. By the documents of vLLM 0.30 (`vllm serve`): --uds, --served-model-name, --max-num-seqs. Tried with 0.32."""

from __future__ import annotations

from sluice.exchange.serving import Abilities, Load, ReplicaSpec
from sluice.serve.engines.base import Engine, Figures, Place, Start, has_option, option_value, share, total


def start(spec: ReplicaSpec, place: Place) -> Start:
    """HTTP on the socket; each layer over the GPUs of a node, and the layers over the nodes, where the options do not
    say otherwise."""
    arguments = [
        "vllm", "serve", str(place.model),
        "--uds", str(place.socket),
        "--served-model-name", spec.service,
    ]  # fmt: skip
    if not has_option(spec.options, "--max-num-seqs"):
        arguments += ["--max-num-seqs", str(spec.slots)]
    spread = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
    group = place.group
    if group.nodes > 1:
        arguments += [
            "--nnodes", str(group.nodes), "--node-rank", str(group.rank),
            "--master-addr", group.host, "--master-port", str(group.port),
            *(["--headless"] if group.rank else []),
        ]  # fmt: skip
        if not has_option(spec.options, *spread):
            arguments += ["--pipeline-parallel-size", str(group.nodes)]
    if place.gpus > 1 and not has_option(spec.options, *spread):
        arguments += ["--tensor-parallel-size", str(place.gpus)]
    if not has_option(spec.options, "--disable-uvicorn-access-log"):
        arguments.append("--disable-uvicorn-access-log")
    environment = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return Start((*arguments, *spec.options), place.socket, environment)


def abilities(spec: ReplicaSpec) -> Abilities:
    """Chat goes on with `continue_final_message`, completions with token ids as prompt."""
    pooling = ("embed", "embedding", "pooling")
    if any(option_value(spec.options, name) in pooling for name in ("--task", "--runner", "--convert")):
        return Abilities(embeddings=True)
    return Abilities(chat=True, completions=True, responses=True, resume="tokens")


def load(figures: Figures) -> Load:
    """Of /metrics."""
    return Load(
        total(figures, "vllm:num_requests_running"),
        total(figures, "vllm:num_requests_waiting"),
        total(figures, "vllm:prompt_tokens_total"),
        total(figures, "vllm:generation_tokens_total"),
        share(figures, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    )


ENGINE = Engine(start, abilities, "/metrics", load, end_s=30.0)
