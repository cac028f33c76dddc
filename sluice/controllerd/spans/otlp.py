"""A receiver of OTLP, through OpenTelemetry's own SDK and exporters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policy.traces import NodeTraces
from sluice.base.errors import SluiceError
from sluice.base.private import read_private
from sluice.controllerd.spans.span import Span
from sluice.metrics.influx import RejectedError, TooLargeError

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_TIMEOUT_S = 10.0
_MAX_HEADERS = 16 << 10
_MOST_ANSWER = 64 << 10  # bytes, of which nothing is used
_HEADER = re.compile(r"([A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}):[ \t]*([\x21-\x7e][\x20-\x7e]{0,4000})")

_GRPC_NAME = re.compile(r"[A-Za-z0-9_.-]+(?<!-bin)", re.IGNORECASE)


class Receiver:
    """Where spans are exported to; see `sluice.metrics.sender.Target`."""

    def __init__(self, settings: NodeTraces) -> None:
        self._settings = settings
        self._exporter = make_exporter(settings, headers_for(settings))

    def write(self, lines: bytes) -> None:
        """Export lines of `Span`. Raises SluiceError where the receiver does not answer, TooLargeError where it
        answers, but not to these: a smaller batch then shows which of them it refuses, and RejectedError for what is
        no span, e.g. of another version."""
        try:
            spans = [to_sdk(Span.from_line(line)) for line in lines.splitlines()]
        except ValueError as error:
            raise RejectedError(f"the spool has something else than spans: {error}") from error
        for _ in range(2):  # what failed before the receiver answered again was not refused
            if self._export(spans):
                return
            if not self._export([]):
                raise SluiceError(
                    f"traces.endpoint {self._settings.endpoint}: no answer to OTLP over {self._settings.protocol}",
                    remedy="is a receiver of that protocol there, and are its headers right?",
                )
        raise TooLargeError(f"traces.endpoint {self._settings.endpoint}: {len(spans)} spans are refused")

    def _export(self, spans: Sequence[ReadableSpan]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            return self._exporter.export(spans) is SpanExportResult.SUCCESS
        except (TypeError, ValueError):  # what protobuf cannot have, e.g. half a surrogate pair, or the year 9999
            return False


def make_exporter(settings: NodeTraces, headers: dict[str, str]) -> SpanExporter:
    """OpenTelemetry's exporter of the protocol. Raises SluiceError."""
    try:
        return _grpc(settings, headers) if settings.protocol == "grpc" else _http(settings, headers)
    except ImportError as error:
        raise SluiceError(
            f"traces.endpoint: {error}", remedy="install OpenTelemetry's packages: pip install 'sluice-slurm[spans]'"
        ) from error
    except OSError as error:
        raise SluiceError(f"traces.ca_file {settings.ca_file}: {error.strerror}") from error


def _http(settings: NodeTraces, headers: dict[str, str]) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    bare = settings.endpoint.count("/") == 2
    return OTLPSpanExporter(
        endpoint=settings.endpoint + ("/v1/traces" if bare else ""),
        certificate_file=settings.ca_file or None,
        headers=headers,
        timeout=_TIMEOUT_S,
        session=_session(),
    )


def _session() -> requests.Session:
    import requests

    class Session(requests.Session):
        """Follows no redirections, which OpenTelemetry's exporter takes for success, and reads no endless answers."""

        def request(self, *words: Any, **named: Any) -> requests.Response:
            answer = super().request(*words, **named | {"allow_redirects": False, "stream": True})
            with answer:
                answer.raw.read(_MOST_ANSWER)
            if 300 <= answer.status_code < 400:
                raise requests.RequestException(f"status {answer.status_code}")
            return answer

    return Session()


def _grpc(settings: NodeTraces, headers: dict[str, str]) -> SpanExporter:
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = not settings.endpoint.startswith("https://")
    roots = Path(settings.ca_file).read_bytes() if settings.ca_file else None
    return OTLPSpanExporter(
        endpoint=settings.endpoint,
        insecure=insecure,
        credentials=None if insecure else grpc.ssl_channel_credentials(roots),
        headers={name.lower(): value for name, value in headers.items()},
        timeout=_TIMEOUT_S,
    )


def headers_for(settings: NodeTraces) -> dict[str, str]:
    """The headers to send. Raises SluiceError where they would go over plain HTTP unasked, or cannot be sent."""
    headers = read_headers(Path(settings.headers_file))
    for name in headers if settings.protocol == "grpc" else ():
        if not _GRPC_NAME.fullmatch(name):
            raise SluiceError(
                f"{settings.headers_file}: gRPC cannot send {name} as text",
                remedy="names are of letters, digits, '_', '-' and '.', and do not end with -bin",
            )
    if headers and not settings.endpoint.startswith("https://") and not settings.headers_without_tls:
        raise SluiceError(
            f"traces.endpoint {settings.endpoint}: the headers in {settings.headers_file} are not sent over plain HTTP",
            remedy="use https://, or set traces.headers_without_tls",
        )
    return headers


def read_headers(path: Path) -> dict[str, str]:
    """The headers; none without a file. Raises SluiceError for one that others may read, or that has no headers."""
    try:
        text = read_private(path, _MAX_HEADERS).decode("utf-8", "replace")
    except FileNotFoundError:
        return {}
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _HEADER.fullmatch(line.strip())
        if match:
            found[match[1]] = match[2]
        elif line.strip():
            raise SluiceError(f"{path}:{number}: not a header", remedy="write NAME: VALUE on each line")
    return found


def to_sdk(span: Span) -> ReadableSpan:
    """A span as OpenTelemetry's SDK has it."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

    def context(trace: str, number: str, *, remote: bool) -> Any:
        return SpanContext(int(trace, 16), int(number, 16), remote, TraceFlags(TraceFlags.SAMPLED))

    attributes = span.attributes | ({"error.type": span.error} if span.error else {})
    return ReadableSpan(
        name=span.name,
        context=context(span.trace, span.id, remote=False),
        parent=context(span.trace, span.parent, remote=span.remote_parent) if span.parent else None,
        resource=Resource({"service.name": "slurm", "slurm.cluster.name": span.cluster}),
        attributes=attributes,
        events=[Event(event.name, event.attributes, _ns(event.time)) for event in span.events],
        links=[Link(context(trace, number, remote=True)) for trace, number in span.links],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=_ns(span.start),
        end_time=_ns(span.end),
        instrumentation_scope=InstrumentationScope("sluice.spans"),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e6) * 1000
