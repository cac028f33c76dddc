"""A small receiver of OTLP over HTTP and gRPC, on OpenTelemetry's own protocol package."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def attribute(span: Span, name: str) -> str:
    """Of a span; empty where there is none."""
    found = {one.key: one.value for one in span.attributes}.get(name)
    return "" if found is None else found.string_value or str(found.int_value)


class OtlpReceiver:
    """Keeps the spans that it was sent. It can be made to be away, to refuse spans by name, and over HTTP to redirect
    and to answer at length."""

    def __init__(self, protocol: str = "http", address: str = "127.0.0.1") -> None:
        self.protocol, self.address = protocol, address
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.away = False
        self.refused = ""
        self.moved_to = ""
        self.answer_bytes, self.answered = 0, 0
        self._lock = threading.Lock()
        self.port = self._serve()

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    def by_id(self) -> dict[str, Span]:
        with self._lock:
            return {span.span_id.hex(): span for span in self.spans}

    def jobs(self, name: str, value: str) -> list[Span]:
        """The spans of jobs with an attribute, each once."""
        found = self.by_id().values()
        return [span for span in found if span.name == "slurm.job" and attribute(span, name) == value]

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> int:
        """0, or the HTTP status of what it answers."""
        if self.away:
            return 503
        spans = [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
        if self.refused and any(span.name == self.refused for span in spans):
            return 400
        with self._lock:
            self.spans += spans
            self.headers.append(headers)
            for one in request.resource_spans:
                self.resources.append({each.key: each.value.string_value for each in one.resource.attributes})
        return 0

    def _serve(self) -> int:
        if self.protocol == "grpc":
            self._grpc = grpc.server(ThreadPoolExecutor(2))
            add_TraceServiceServicer_to_server(_Service(self), self._grpc)
            port = self._grpc.add_insecure_port(f"{self.address}:0")
            self._grpc.start()
            return port
        self._http = ThreadingHTTPServer((self.address, 0), _handler(self))
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return int(self._http.server_address[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.protocol == "grpc":
            self._grpc.stop(0)
        else:
            self._http.shutdown()
            self._http.server_close()


class _Service(TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self.receiver = receiver

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        status = self.receiver.take(request, dict(context.invocation_metadata()))
        if status:
            code = grpc.StatusCode.UNAVAILABLE if status == 503 else grpc.StatusCode.INVALID_ARGUMENT
            context.abort(code, "as the test wants it")
        return ExportTraceServiceResponse()


def _handler(receiver: OtlpReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = 404
            if self.path == "/v1/traces":
                status = receiver.take(ExportTraceServiceRequest.FromString(body), dict(self.headers)) or 200
            if receiver.moved_to:
                self.send_response(302)
                self.send_header("Location", receiver.moved_to)
            else:
                self.send_response(status)
            self.send_header("Content-Length", str(receiver.answer_bytes))
            self.end_headers()
            with suppress(ConnectionError):
                for _ in range(receiver.answer_bytes >> 20):
                    self.wfile.write(bytes(1 << 20))
                    receiver.answered += 1 << 20

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
