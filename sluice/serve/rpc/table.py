"""The services' methods, as their descriptors have them: what a server registers and what a client calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from sluice.serve.rpc import serve_pb2

MOST_MESSAGE = 16 << 20
"""Bytes of a message in both directions."""
INFERENCE = "sluice.serve.v1.Inference"
JOBS = "sluice.serve.v1.Jobs"


@dataclass(frozen=True, slots=True)
class Method:
    """One of a service. `path`: as on the wire; `streams`: its answers are a stream."""

    name: str
    path: str
    streams: bool
    request: Any
    reply: Any


def methods(service: str) -> list[Method]:
    """All of a service, by its full name."""
    found = serve_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    return [_method(service, one) for one in found.methods]


def _method(service: str, found: MethodDescriptor) -> Method:
    return Method(
        found.name,
        f"/{service}/{found.name}",
        found.server_streaming,
        GetMessageClass(found.input_type),
        GetMessageClass(found.output_type),
    )


def handlers(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """What a server adds: each method is the servicer's of the same name. Raises AttributeError."""
    made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in methods(service):
        make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        made[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=method.request.FromString,
            response_serializer=method.reply.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service, made)
