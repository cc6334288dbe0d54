"""RequestContextMiddleware: what holds for every route; bounded headers, a request id, counts, an error envelope."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylm.errors import HeadersTooLargeError
from raylm.ingress.http.errors import as_known_error, error_response, logger
from raylm.ingress.http.metrics import HTTPMetrics

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-|\Z)")

_Headers = Iterable[tuple[bytes, bytes]]


class RequestContextMiddleware:
    """ASGI middleware; the innermost frame that a client can see failing, so nothing passes it unanswered."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope; anything but HTTP is handed through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["raylm.request_id"] = _request_id(scope["headers"])
        scope["raylm.send"] = send  # for the parts of a stream: nobody between here and there has a say in them
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._metrics.answered(message["status"], scope.get("raylm.key", ""))
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            _check_headers(scope["headers"])
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if started:
                logger.error("request %s broke off after its answer had begun", request_id, exc_info=error)
                raise
            await error_response(as_known_error(error, request_id), scope["path"])(scope, receive, send_with_id)
        finally:
            # It leads back to the scope, and thousands of such rings are a long stop when the collector finds them.
            del scope["raylm.send"]


def _request_id(headers: _Headers) -> str:
    """The client's X-Request-Id if it is a plain short token, else its trace and span, else a new one.

    Nothing is traced here. A request that belongs to a trace (W3C traceparent) is called by it in answers and logs,
    with a part of its own, since a client may send several in one span.
    """
    own = uuid.uuid4().hex
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.match(text := value.decode("latin-1")):
            return text
        if name == b"traceparent" and (trace := TRACEPARENT.match(value)) and value[:2] != b"ff":
            own = f"{trace[1].decode()}-{trace[2].decode()}-{own[:8]}"
    return own


def _check_headers(headers: _Headers) -> None:
    sizes = [len(name) + len(value) for name, value in headers]
    if len(sizes) > MAX_HEADERS:
        raise HeadersTooLargeError(f"The request has more than {MAX_HEADERS} headers.")
    if sum(sizes) > MAX_HEADER_BYTES:
        raise HeadersTooLargeError(f"The request's headers are longer than {MAX_HEADER_BYTES} bytes.")
