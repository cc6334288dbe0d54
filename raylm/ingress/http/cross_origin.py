"""CrossOrigin: lets pages of configured origins call this server from a browser (the Fetch standard's CORS)."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_RawHeaders = list[tuple[bytes, bytes]]

_METHODS = b"GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, retry-after"
_MAX_AGE_S = b"600"


class CrossOrigin:
    """ASGI middleware; outermost, so that refusals can be read by pages too.

    Preflights of allowed origins are answered here: a browser sends no key with them. What comes from elsewhere goes
    on without a word, which makes the browser keep the answer from the page.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or not ("*" in self._origins or origin in self._origins):
            await self._app(scope, receive, send)
            return
        allowed = self._allowed(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            wanted = headers.get("access-control-request-headers", "").encode("latin-1")
            await send({"type": "http.response.start", "status": 204, "headers": allowed + _preflight(wanted)})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = (b"access-control-expose-headers", _EXPOSED)
                message = {**message, "headers": [*message["headers"], *allowed, exposed]}
            await send(message)

        await self._app(scope, receive, send_allowed)

    def _allowed(self, origin: str) -> _RawHeaders:
        if "*" in self._origins:
            return [(b"access-control-allow-origin", b"*")]
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]


def _preflight(wanted: bytes) -> _RawHeaders:
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", _MAX_AGE_S),
    ]
