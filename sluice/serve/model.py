"""A function in Python as a model: `@serve.model`, then `serve.run()`; the engine `python` of a service runs that file.

    from sluice import serve

    @serve.model(max_batch=32, max_delay=0.005)
    def embed(texts):
        return [vector_of(text) for text in texts]

    serve.run()

Requests that come at the same time are one call of the function. Needs the extra `serve` of sluice-slurm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sluice.base.errors import UsageError
from sluice.serve.engines.hosted import Function, Model, estimate_tokens

F = TypeVar("F", bound=Function)
_models: list[Model] = []


def model(
    *, max_batch: int = 32, max_delay: float = 0.005, count_tokens: Callable[[Any], int] = estimate_tokens
) -> Callable[[F], F]:
    """Serve the function. It gets a list of inputs and returns as many outputs, in one thread, one call at a time.

    `max_batch`: inputs of a call at most. `max_delay`: seconds that an input waits for others at most, where the model
    has nothing to do. `count_tokens`: of an input, for what its tenant pays. Raises UsageError.
    """
    if max_batch < 1 or not 0 <= max_delay <= 60:
        raise UsageError(
            f"max_batch {max_batch}, max_delay {max_delay}: not in range", remedy="use at least 1, and 0 to 60 seconds"
        )

    def serve(function: F) -> F:
        _models.append(Model(function, max_batch, max_delay, count_tokens))
        return function

    return serve


def run(socket: str | None = None) -> None:
    """Serve the model until SIGTERM, on the socket that the replica named. Raises UsageError."""
    import os

    from sluice.serve.engines.model_server import serve

    where = socket or os.environ.get("SLUICE_ENGINE_SOCKET", "")
    if not where:
        raise UsageError("no socket to listen on", remedy="run it as a service's command, or call serve.run(PATH)")
    if len(_models) != 1:
        raise UsageError(f"{len(_models)} functions with @serve.model", remedy="have one in each file")
    serve(_models[0], where, os.environ.get("SLUICE_SERVICE", "model"))
