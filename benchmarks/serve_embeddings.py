"""Embeddings of many clients with one short text each: llama.cpp with a slot for each, whose texts it puts into one
batch, and with one slot, which takes one text after the other. Both behind the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.serve_site import GatewaySite, Load, RealReplica, cpu_s
from sluice.exchange.serving import Abilities
from tests.serve_models import make_model

_CLIENTS = 32
_WARM_S = 1.0
_TEXT = " six"


def measure(figures: dict[str, float], seconds: float, rounds: int) -> None:
    """In turns; medians."""
    rates: dict[int, list[float]] = {1: [], _CLIENTS: []}
    costs: dict[int, list[float]] = {1: [], _CLIENTS: []}
    with GatewaySite() as site:
        (key,) = site.keys("alice")
        # weights of 120 MiB are more than caches hold, as those of models are
        model = make_model(site.folder / "model.gguf", "random", layers=4, feed=4096, width=512)
        port = site.start(2)
        for _ in range(rounds):
            for slots in rates:
                with _replica(site, model, slots) as engine:
                    _load(site, port, key, _WARM_S)
                    before = cpu_s(engine)
                    count = _load(site, port, key, seconds)
                    rates[slots].append(count / seconds)
                    costs[slots].append(1000 * (cpu_s(engine) - before) / max(count, 1))
    figures |= {
        "embeddings_batched_ratio": median(rates[_CLIENTS]) / median(rates[1]),
        "embeddings_batched_per_s": median(rates[_CLIENTS]),
        "embeddings_single_per_s": median(rates[1]),
        "embeddings_batched_engine_cpu_ms": median(costs[_CLIENTS]),
        "embeddings_single_engine_cpu_ms": median(costs[1]),
    }


@contextmanager
def _replica(site: GatewaySite, model: Path, slots: int) -> Iterator[int]:
    """One that is ready; the process of its engine."""
    words = ("--embeddings", "--pooling", "mean", "--threads", "1", "--ctx-size", str(256 * slots), "--kv-unified")
    one = RealReplica(model, slots, *words)
    try:
        one.wait()
        site.publish({"alice": "physics"}, slots=slots)
        site.replicas.clear()
        site.add_replica(
            f"{slots:016x}", one.facts["port"], slots, secret=one.facts["secret"],
            fingerprint=one.facts["fingerprint"], abilities=Abilities(embeddings=True),
        )  # fmt: skip
        yield int(one.facts["engine"])
    finally:
        one.kill()


def _load(site: GatewaySite, port: int, key: str, seconds: float) -> int:
    """Answers."""
    load = Load(site.program, site.folder, port, [key], _CLIENTS, seconds, path="/v1/embeddings", input=_TEXT)
    return len(load.wait().good)
