"""The entrance of a replica: what stands in front of Serve's own handling of a request, in the same process."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raylm import ray_private
from raylm.ingress.http.listener import CrowdServer
from raylm.ingress.http.middleware import PROBES, ServeErrorMiddleware, ThrottleMiddleware


class Entrance:
    """The app of the replica in this process, and how it is mounted; written by the replica once, when it can answer.

    Serve tells the middleware in front of its handling nothing of what it handles.
    """

    def __init__(self) -> None:
        self.app: ASGIApp | None = None
        self._route_prefix: Callable[[], str] = str

    def open(self, app: ASGIApp, route_prefix: Callable[[], str]) -> None:
        self.app, self._route_prefix = app, route_prefix

    def mounted(self, scope: Scope) -> str | None:
        """What Serve makes the root path of a probe to this app, None of anything else."""
        root: str = scope.get("root_path", "") + self._route_prefix().rstrip("/")
        path: str = scope["path"]
        return root if path.startswith(root) and path[len(root) :] in PROBES else None


ENTRANCE = Entrance()


class ProbeMiddleware:
    """Answers probes by the app itself, in the turn of the event loop in which they are read.

    Serve's handling would take several turns, in each of which others have theirs, and a place. In a proxy, which has
    no app, it lets them pass.
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
    """Takes out headers that Serve would fail on, and, in a replica, those that steer its handling.

    Serve reads some headers as UTF-8 and answers 500 where they are not. By one of its own it ends a request after a
    time, as a failure of the server. By another one it lets our event loop read from a connection of its own event
    loop, in another thread, which uvloop does not bear.
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
    """For Serve's proxies and replica servers (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH), the last one outermost.

    Serve calls it before it starts such a server, which becomes a CrowdServer.
    """
    ray_private.replace_http_server(CrowdServer)
    kinds = (HeadersMiddleware, ServeErrorMiddleware, ThrottleMiddleware, ProbeMiddleware)
    return [Middleware(kind) for kind in kinds]
