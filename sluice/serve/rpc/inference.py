"""The service Inference: each call is one request of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import grpc

from sluice.serve.rpc import serve_pb2 as pb
from sluice.serve.rpc.gateway import Gateway
from sluice.serve.rpc.status import CallError, Context
from sluice.serve.rpc.structs import from_struct, to_struct

S = TypeVar("S")
Q = TypeVar("Q")
A = TypeVar("A")


def answers(call: Callable[[S, Q, Context], Awaitable[A]]) -> Callable[[S, Q, Context], Awaitable[A]]:
    """A method with one answer, whose CallErrors end the call."""

    @wraps(call)
    async def method(self: S, request: Q, context: Context) -> A:
        try:
            return await call(self, request, context)
        except CallError as error:
            await error.end(context)
        except ValueError as error:
            await _unfit(error).end(context)

    return method


def streams(call: Callable[[S, Q, Context], AsyncIterator[A]]) -> Callable[[S, Q, Context], AsyncIterator[A]]:
    """A method with a stream of answers, whose CallErrors end the call."""

    @wraps(call)
    async def method(self: S, request: Q, context: Context) -> AsyncIterator[A]:
        try:
            async for answer in call(self, request, context):
                yield answer
        except CallError as error:
            await error.end(context)
        except ValueError as error:
            await _unfit(error).end(context)

    return method


def _unfit(error: ValueError) -> CallError:
    """An answer that has what no message can have, such as half of a surrogate pair."""
    return CallError(grpc.StatusCode.INTERNAL, f"the answer cannot be sent ({error}); see the log of the engine")


class Inference:
    """Its methods."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @answers
    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:  # noqa: N802
        """`GET /v1/models`."""
        found = await self._gateway.ask(context, "GET", "/v1/models")
        models = [
            pb.Model(id=_text(one, "id"), owned_by=_text(one, "owned_by"), created=_whole(one, "created"))
            for one in _objects(found, "data")
        ]
        return pb.ListModelsReply(models=models)

    @answers
    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatReply:  # noqa: N802
        """`POST /v1/chat/completions`."""
        found = await self._gateway.ask(context, "POST", "/v1/chat/completions", _chat(request))
        choices = []
        for one in _objects(found, "choices"):
            message = _object(one, "message")
            said = pb.Message(
                role=_text(message, "role"), content=_text(message, "content"),
                fields=_others(message, "role", "content"),
            )  # fmt: skip
            choices.append(
                pb.ChatChoice(
                    index=_whole(one, "index"), message=said, finish_reason=_text(one, "finish_reason"),
                    logprobs=_struct(one, "logprobs"),
                )
            )  # fmt: skip
        return pb.ChatReply(id=_text(found, "id"), model=_text(found, "model"), choices=choices, usage=_usage(found))

    @streams
    async def ChatStream(self, request: pb.ChatRequest, context: Context) -> AsyncIterator[pb.ChatChunk]:  # noqa: N802
        """The same, streamed."""
        async for event in self._gateway.stream(context, "/v1/chat/completions", _chat(request)):
            for one in _objects(event, "choices"):
                delta = _object(one, "delta")
                yield pb.ChatChunk(
                    id=_text(event, "id"), model=_text(event, "model"), index=_whole(one, "index"),
                    text=_text(delta, "content"), finish_reason=_text(one, "finish_reason"),
                    fields=_others(delta, "content"), logprobs=_struct(one, "logprobs"),
                )  # fmt: skip
            if (usage := _usage(event)) is not None:
                yield pb.ChatChunk(id=_text(event, "id"), model=_text(event, "model"), usage=usage)

    @answers
    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteReply:  # noqa: N802
        """`POST /v1/completions`."""
        found = await self._gateway.ask(context, "POST", "/v1/completions", _complete(request))
        choices = [
            pb.CompleteChoice(
                index=_whole(one, "index"), text=_text(one, "text"), finish_reason=_text(one, "finish_reason"),
                logprobs=_struct(one, "logprobs"),
            )
            for one in _objects(found, "choices")
        ]  # fmt: skip
        return pb.CompleteReply(
            id=_text(found, "id"), model=_text(found, "model"), choices=choices, usage=_usage(found)
        )

    @streams
    async def CompleteStream(  # noqa: N802
        self, request: pb.CompleteRequest, context: Context
    ) -> AsyncIterator[pb.CompleteChunk]:
        """The same, streamed."""
        async for event in self._gateway.stream(context, "/v1/completions", _complete(request)):
            for one in _objects(event, "choices"):
                yield pb.CompleteChunk(
                    id=_text(event, "id"), model=_text(event, "model"), index=_whole(one, "index"),
                    text=_text(one, "text"), finish_reason=_text(one, "finish_reason"),
                    logprobs=_struct(one, "logprobs"),
                )  # fmt: skip
            if (usage := _usage(event)) is not None:
                yield pb.CompleteChunk(id=_text(event, "id"), model=_text(event, "model"), usage=usage)

    @answers
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedReply:  # noqa: N802
        """`POST /v1/embeddings`."""
        if not request.input:
            raise _invalid("input: empty; send at least one text")
        body = _body(request.model, request.options)
        body |= {"input": list(request.input), "encoding_format": "float"}
        found = await self._gateway.ask(context, "POST", "/v1/embeddings", body)
        rows = sorted(_objects(found, "data"), key=lambda one: _whole(one, "index"))
        try:
            embeddings = [pb.Embedding(values=one["embedding"]) for one in rows]
        except (KeyError, TypeError, ValueError) as error:
            text = "the engine's embeddings are not lists of numbers; is the model one for embeddings?"
            raise CallError(grpc.StatusCode.INTERNAL, text) from error
        return pb.EmbedReply(model=_text(found, "model"), embeddings=embeddings, usage=_usage(found))


# ---- requests ----


def _invalid(text: str) -> CallError:
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, text)


def _body(model: str, options: Any) -> dict[str, Any]:
    if not model:
        raise _invalid("model: empty; name one of ListModels")
    try:
        body = from_struct(options)
    except ValueError as error:
        raise _invalid(str(error)) from error
    if taken := sorted({"model", "messages", "prompt", "input", "stream", "stream_options"} & body.keys()):
        raise _invalid(f"options: {taken[0]} has a field of its own, or a method; leave it out of options")
    return {"model": model, **body}


def sampling_of(sampling: pb.Sampling) -> dict[str, Any]:
    """As fields of a request."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    found = {name: getattr(sampling, name) for name in names if sampling.HasField(name)}
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    return found


def _chat(request: pb.ChatRequest) -> dict[str, Any]:
    if not request.messages:
        raise _invalid("messages: empty; send at least one")
    body = _body(request.model, request.options) | sampling_of(request.sampling)
    try:
        body["messages"] = [
            {"role": one.role, "content": one.content, **from_struct(one.fields)} for one in request.messages
        ]
    except ValueError as error:
        raise _invalid(str(error)) from error
    return body


def _complete(request: pb.CompleteRequest) -> dict[str, Any]:
    return _body(request.model, request.options) | sampling_of(request.sampling) | {"prompt": request.prompt}


# ---- answers: what an engine made, so nothing of it is taken for granted ----


def _object(found: Any, name: str) -> Mapping[str, Any]:
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, dict) else {}


def _objects(found: Any, name: str) -> list[dict[str, Any]]:
    value = found.get(name) if isinstance(found, dict) else None
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _text(found: Any, name: str) -> str:
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, str) else ""


def _whole(found: Mapping[str, Any], name: str) -> int:
    """A field of 64 bits, or an index, which a list of choices cannot make longer than 31."""
    value = found.get(name)
    most = 1 << 31 if name == "index" else 1 << 63
    return value if isinstance(value, int) and abs(value) < most else 0


def _struct(found: Mapping[str, Any], name: str) -> Any:
    value = found.get(name)
    return to_struct(value) if isinstance(value, dict) else None


def _others(found: Mapping[str, Any], *names: str) -> Any:
    left = {name: value for name, value in found.items() if name not in names and value is not None}
    return to_struct(left) if left else None


def _usage(found: Any) -> pb.Usage | None:
    usage = _object(found, "usage")
    if not usage:
        return None
    return pb.Usage(
        prompt_tokens=_whole(usage, "prompt_tokens"),
        completion_tokens=_whole(usage, "completion_tokens"),
        cached_tokens=_whole(_object(usage, "prompt_tokens_details"), "cached_tokens"),
    )
