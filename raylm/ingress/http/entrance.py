"""Middleware of a replica that runs before Serve's own request handling, in the same process."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylm import ray_private
from raylm.ingress.http.middleware import ServeErrorMiddleware, ThrottleMiddleware


class HeadersMiddleware:
    """Removes headers that Serve cannot handle. In a replica it also removes headers that control Serve.

    Serve decodes some headers as UTF-8 and answers 500 if that fails. One header of Serve ends a request after a given
    time with a server error. Another header makes our event loop read from a connection of Serve's event loop in
    another thread, which uvloop does not support.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._steering, self._read = ray_private.serve_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(self._passes(*header) for header in scope["headers"]):
            scope = {**scope, "headers": [header for header in scope["headers"] if self._passes(*header)]}
        await self._app(scope, receive, send)

    def _passes(self, name: bytes, value: bytes) -> bool:
        if name in self._steering and _is_replica():
            return False
        return value.isascii() or name.replace(b"_", b"-") not in self._read or _is_utf8(value)


def _is_replica() -> bool:
    """Whether this process is a replica. Serve's proxies run the same middleware."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def serve_middlewares() -> list[Middleware]:
    """The middleware of Serve's proxies and replica servers, outermost last.

    Serve calls this function (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH) before it starts such a server.
    """
    return [Middleware(kind) for kind in (HeadersMiddleware, ServeErrorMiddleware, ThrottleMiddleware)]
