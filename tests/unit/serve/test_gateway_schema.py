"""The served part of OpenAI's API: schemathesis makes good and bad requests by the types of the `openai` package.

With SLUICE_TEST_SCALE=full it makes 10,000.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
import uvloop
from hypothesis import HealthCheck, given, settings
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatRequest
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionRequest
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter
from schemathesis import GenerationMode

from tests.unit.serve.gateway_bed import CHAT, Bed, Heard, answer_of, bed

FULL = os.environ.get("SLUICE_TEST_SCALE") == "full"
REFUSALS = (400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 429, 431)
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
ANSWERS: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": {
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "engine", "usage": USAGE,
        "choices": [{"index": 0, "text": "hello", "finish_reason": "stop", "logprobs": None}],
    },
    "/embeddings": {
        "object": "list", "model": "engine", "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}],
    },
    "/responses": {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "engine", "status": "completed", "output": [],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        "usage": {
            "input_tokens": 9, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 12,
        },
    },
}  # fmt: skip
"""Of the engine, by path."""


class Problem(BaseModel):
    """An answer that is no success."""

    error: ErrorObject


class Models(BaseModel):
    """The answer of /models, which the package has as a page of its client."""

    object: str
    data: list[Model]


SERVED: dict[str, tuple[Any, Any]] = {
    "/chat/completions": (ChatRequest, ChatCompletion),
    "/completions": (CompletionRequest, Completion),
    "/embeddings": (EmbeddingCreateParams, CreateEmbeddingResponse),
    "/responses": (ResponseCreateParamsNonStreaming, Response),
    "/models": (None, Models),
}
"""Types of the request and of the answer, by path."""
MOST = 10_000
CASES = -(-MOST // (2 * (len(SERVED) - 1))) if FULL else 12


def described() -> dict[str, Any]:
    """OpenAPI of what is served."""
    schemas: dict[str, Any] = {}

    def schema(of: Any) -> dict[str, Any]:
        made = TypeAdapter(of).json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(made.pop("$defs", {}))
        return made

    def answers(of: Any) -> dict[str, Any]:
        content = {"200": {"application/json": {"schema": schema(of)}}}
        content |= {str(status): {"application/json": {"schema": schema(Problem)}} for status in REFUSALS}
        return {status: {"description": status, "content": one} for status, one in content.items()}

    paths: dict[str, Any] = {}
    for path, (asked, answered) in SERVED.items():
        operation: dict[str, Any] = {"responses": answers(answered)}
        if asked is not None:
            body = schema(asked)
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[path] = {"get" if asked is None else "post": operation}
    return {
        "openapi": "3.1.0", "info": {"title": "models", "version": "1"}, "paths": paths,
        "components": {"schemas": schemas},
    }  # fmt: skip


async def engine(heard: Heard) -> None:
    heard.writer.write(answer_of(ANSWERS[heard.path.removeprefix("/v1")]))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """In a thread of its own, as its clients wait."""
    folder, started = tmp_path_factory.mktemp("gateway"), Future[tuple[Bed, asyncio.Event]]()

    async def serve() -> None:
        async with bed(folder, engine) as made:
            end = asyncio.Event()
            started.set_result((made, end))
            await end.wait()

    thread = threading.Thread(target=uvloop.run, args=(serve(),))
    thread.start()
    made, end = started.result(30)
    yield made
    made.worker.loop.call_soon_threadsafe(end.set)
    thread.join()


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemathesis.openapi.from_dict(described())


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", SERVED)
def test_requests_are_answered_as_openai_describes(gateway: Bed, schema: Any, path: str, mode: GenerationMode) -> None:
    """What is right reaches the engine as it is; what is wrong is refused, or the engine's to refuse."""
    operation = schema[path]["GET" if SERVED[path][0] is None else "POST"]
    good = mode is GenerationMode.POSITIVE
    if SERVED[path][0] is None and not good:
        pytest.skip("there is nothing to get wrong")
    seen: Counter[int] = Counter()

    def check(case: Any) -> None:
        if isinstance(case.body, dict) and (good or isinstance(case.body.get("model"), str)):
            case.body = {**case.body, "model": "m"}
        answer = case.call(base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"})
        seen[answer.status_code] += 1
        case.validate_response(
            answer,
            excluded_checks=[  # the gateway's part of a body is small: the rest is for the engine
                schemathesis.checks.negative_data_rejection, schemathesis.checks.positive_data_acceptance,
                schemathesis.checks.ignored_auth,
            ],
        )  # fmt: skip

    run = given(case=operation.as_strategy(generation_mode=mode))(check)
    settings(max_examples=CASES, database=None, derandomize=not FULL, suppress_health_check=list(HealthCheck))(run)()
    assert seen.keys() <= {200, *REFUSALS} and (200 in seen if good else seen.keys() - {200}), seen
    assert gateway.worker.held == 0
