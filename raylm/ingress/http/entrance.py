"""Middleware of a replica that runs before Serve's own request handling, in the same process."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylm import ray_private
from raylm.ingress.http.listener import CrowdServer
from raylm.ingress.http.middleware import ServeErrorMiddleware, ThrottleMiddleware
from raylm.ingress.http.probes import PROBES


class Entrance:
    """The app of this process's replica and its mount path. The replica writes both once, when it can answer.

    The middleware needs it because Serve does not pass the app to middleware.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._route_prefix: Callable[[], str] = str

    def open(self, app: ASGIApp, route_prefix: Callable[[], str]) -> None:
        self.app, self._route_prefix = app, route_prefix

    def mounted(self, scope: Scope) -> str | None:
        """Serve's root path for a probe of this app, or None for any other request."""
        root: str = scope.get("root_path", "") + self._route_prefix().rstrip("/")
        path: str = scope["path"]
        return root if path.startswith(root) and path[len(root) :] in PROBES else None


ENTRANCE = Entrance()


class ProbeMiddleware:
    """Answers probes by the app itself, in the turn of the event loop in which the probe is read.

    Serve's handling would take several turns and one of the replica's request slots. In a proxy process, which has no
    app, the middleware passes every request on.
    """

    def __init__(self, app: ASGIApp, entrance: Entrance = ENTRANCE) -> None:
        self._app = app
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = self._entrance.app
        if answers is None or scope["type"] != "http" or (root := self._entrance.mounted(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await answers({**scope, "root_path": root}, receive, send)


class HeadersMiddleware:
    """Removes headers that Serve cannot handle. In a replica it also removes headers that control Serve.

    Serve decodes some headers as UTF-8 and answers 500 if that fails. One header of Serve ends a request after a given
    time with a server error. Another header makes our event loop read from a connection of Serve's event loop in
    another thread, which uvloop does not support.
    """

    def __init__(self, app: ASGIApp, entrance: Entrance = ENTRANCE) -> None:
        self._app = app
        self._entrance = entrance
        self._steering, self._read = ray_private.serve_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not all(self._passes(*header) for header in scope["headers"]):
            scope = {**scope, "headers": [header for header in scope["headers"] if self._passes(*header)]}
        await self._app(scope, receive, send)

    def _passes(self, name: bytes, value: bytes) -> bool:
        if name in self._steering and self._entrance.app is not None:
            return False
        return value.isascii() or name.replace(b"_", b"-") not in self._read or _is_utf8(value)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def serve_middlewares() -> list[Middleware]:
    """The middleware of Serve's proxies and replica servers, outermost last.

    Serve calls this function (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH) before it starts such a server. The function
    also replaces the server by CrowdServer.
    """
    ray_private.replace_http_server(CrowdServer)
    kinds = (HeadersMiddleware, ServeErrorMiddleware, ThrottleMiddleware, ProbeMiddleware)
    return [Middleware(kind) for kind in kinds]
