"""ASGI middleware: cross-origin calls, the context of a request, and what stands around Ray Serve's own handling."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylm.errors import (
    EngineUnavailableError,
    HeadersTooLargeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RayLMError,
)
from raylm.frontend import Throttle
from raylm.ingress.http.errors import as_known_error, clip, error_response, logger, route_path, routing_error
from raylm.ingress.http.exchange import Exchange, exchange_of
from raylm.ingress.http.heap import HeapTrimmer
from raylm.ingress.http.hosts import Hosts, comes_from_here
from raylm.ingress.http.probes import PROBES
from raylm.stages import about, report

if TYPE_CHECKING:
    from raylm.ingress.http.ops import HTTPMetrics

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_SHOWN = 16  # names of ignored fields
_MAX_SHOWN_HOST = 100
REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-|\Z)")

_RATE_LIMITS = [
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
_Headers = Iterable[tuple[bytes, bytes]]


class ConfiguredOriginsMiddleware(CORSMiddleware):
    """Lets pages of ``origins`` call from a browser; outermost, so that they can read refusals too.

    Pages of other origins get the app's own answers. A preflight, which carries no key, is answered by 204: the browser
    itself compares the headers with what the page wants to do.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        methods, exposed = (
            ("GET", "POST", "DELETE", "OPTIONS"),
            ("x-request-id", "retry-after", "x-raylm-ignored-fields", *_RATE_LIMITS),
        )
        super().__init__(app, origins, methods, allow_headers=("*",), expose_headers=exposed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        allowed = origin is not None and self.is_allowed_origin(origin)
        await (super().__call__ if allowed else self.app)(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        headers = super().preflight_response(request_headers).headers
        return Response(None, 204, {name: value for name, value in headers.items() if not name.startswith("content-")})


class RequestContextMiddleware:
    """Bounds the headers, gives the request its id, counts the answer, and turns every exception into one.

    It makes the Exchange of each request, and writes into the head of the answer what stands there. PROBES are neither
    counted nor logged. WebSockets are refused. The heap is trimmed after large bodies and answers.
    """

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics, access_log: bool = False) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._heap = HeapTrimmer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, request_id := _request_id(scope["headers"]))
        is_probe, began = route_path(scope) in PROBES, time.perf_counter()
        status: int | None = None
        carried = 0
        self._heap.opened()

        async def receive_and_count() -> Message:
            nonlocal carried
            message = await receive()
            carried += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, carried
            carried += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                if not is_probe:
                    self._metrics.answers[status, exchange.key_name] += 1
                headers = [*message["headers"], (b"x-request-id", request_id.encode())]
                headers += exchange.answer_headers()
                if ignored := exchange.ignored_fields:
                    more = [f"and {len(ignored) - MAX_SHOWN} more"] if len(ignored) > MAX_SHOWN else []
                    shown = ", ".join(ignored[:MAX_SHOWN] + more)
                    headers.append((b"x-raylm-ignored-fields", shown.encode()))
                message = {**message, "headers": headers}
            await send(message)

        try:
            _check_headers(scope["headers"])
            await self._app(scope, receive_and_count, send_with_id)
        except Exception as error:
            if status is not None:
                failed = about("request.failed", request_id)
                logger.error("request %s broke off after its answer began", request_id, exc_info=error, extra=failed)
                raise
            if isinstance(error, HTTPException):
                response = error_response(routing_error(error, scope), route_path(scope), error.headers)
            else:
                response = error_response(as_known_error(error, request_id), route_path(scope))
            await response(scope, receive, send_with_id)
        finally:
            self._heap.carried(carried)
            if self._access_log and not is_probe:
                report("stage", "access", _access_line(scope, status, time.perf_counter() - began), request_id)


class HostMiddleware:
    """Notes in the Exchange whether a request comes from this machine and names it in Host.

    With ``enforced`` requests with a Host that is unknown are answered 403, except for PROBES: a page whose own name
    leads to this machine could read the answers.
    """

    def __init__(
        self, app: ASGIApp, allowed: tuple[str, ...], nodes: Callable[[], Collection[str]] = tuple, *, enforced: bool
    ) -> None:
        """``nodes`` lists the addresses of the cluster's nodes, whose proxies name their clients."""
        self._app = app
        self._hosts = Hosts(allowed)
        self._nodes = nodes
        self._enforced = enforced

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            known = self._hosts.know(headers)
            if self._enforced and not known and route_path(scope) not in PROBES:
                shown = clip(headers["host"], _MAX_SHOWN_HOST)
                advice = "use localhost, or add the name to ingress.allowed_hosts"
                raise PermissionDeniedError(f"The Host header '{shown}' is no name of this server: {advice}.")
            exchange_of(scope).is_local = known and comes_from_here(scope, headers, self._nodes())
        return self._app(scope, receive, send)


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """No route has WebSockets. Without ASGI's extension for refusals with a body a server answers 403."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1000, "reason": ""})
        return
    refusal = error_response(NotFoundError("The API has no WebSockets; ask by HTTP."), scope["path"])
    start = {"type": "websocket.http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": refusal.body})


def _access_line(scope: Scope, status: int | None, seconds: float) -> str:
    """``status`` is None where the client has left before there was an answer."""
    client = (scope.get("client") or ("-",))[0]
    # HAProxy names its own client last. Without HAProxy a client may write what it likes there.
    if forwarded := Headers(scope=scope).getlist("x-forwarded-for"):
        client = forwarded[-1].rpartition(",")[2].strip()
    path = quote(scope["path"], safe="/:@+,;=~!$&'()*")
    asked = f"{quote(client, safe=':')} {scope['method']} {path}"
    return f"{asked} {status or '-'} {seconds:.3f} s {exchange_of(scope).request_id}"


def _request_id(headers: _Headers) -> str:
    """The client's X-Request-Id if it is a plain short token, else its trace and span, else a new one.

    To a trace and span (W3C traceparent) a part of its own is added: a client may send several requests in one span.
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


class ThrottleMiddleware:
    """Lets requests into Serve's handling a few in each turn of the event loop; probes do not wait for their turn.

    What Serve does around a request costs as much as what we do.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and not scope["path"].endswith(("/health", "/ready", "/ping"))
            and not _is_serve_route(scope)
        ):
            await self._throttle.enter()
        await self._app(scope, receive, send)


class ServeErrorMiddleware:
    """Puts an error envelope around what Serve itself answers in plain text, and leaves one x-request-id header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_serve_route(scope):
            await self._app(scope, receive, send)
            return
        replaced = False

        async def send_enveloped(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                is_json = headers.get("content-type", "").startswith("application/json")
                replaced = message["status"] >= 400 and not is_json
                if replaced:
                    error = _serve_error(message["status"])
                    await error_response(error, _api_path(scope["path"]))(scope, receive, send)
                elif request_id := headers.get("x-request-id"):
                    headers["x-request-id"] = request_id
                message = {**message, "headers": headers.raw}
            if not replaced:
                await send(message)

        await self._app(scope, receive, send_enveloped)


def _is_serve_route(scope: Scope) -> bool:
    """/-/healthz and /-/routes are Serve's own, and stay as they are."""
    return str(scope["path"]).startswith("/-/")


def _api_path(path: str) -> str:
    """The path of the API in a request's path. A proxy does not know the route prefix before it."""
    return path[max(path.rfind("/v1/"), 0) :]


def _serve_error(status: int) -> RayLMError:
    if status == 404:
        return NotFoundError("There is no such route.")
    if status == 429:
        return OverloadedError("The server holds as many requests as it can; try again shortly.")
    if status in {502, 503, 504}:
        return EngineUnavailableError("The server is starting or has no free replica; try again shortly.")
    return RayLMError("The server had an error while processing your request.")
