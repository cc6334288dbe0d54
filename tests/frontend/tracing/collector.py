"""Collector: an OTLP receiver over HTTP, which decodes requests with OpenTelemetry's protobuf classes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Answers with ``status``. While that is 200, received data is in ``requests`` and ``bodies``."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.refused = 0
        self.has_refused = threading.Event()
        self.requests: list[ExportTraceServiceRequest] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in list(self.requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def children(self, root: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == root.span_id]

    def resource(self) -> dict[str, Any]:
        return values(self.requests[-1].resource_spans[0].resource.attributes)

    @contextmanager
    def running(self, port: int = 0) -> Iterator[Collector]:
        server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _handler(self) -> Callable[..., BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                if collector.status == 200:
                    collector.paths.append(self.path)
                    collector.bodies.append(body)
                    collector.requests.append(ExportTraceServiceRequest.FromString(body))
                else:
                    collector.refused += 1
                    collector.has_refused.set()
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        return Handler


def values(attributes: Any) -> dict[str, Any]:
    """The attributes as Python values."""
    return {pair.key: _value(pair.value) for pair in attributes if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))
