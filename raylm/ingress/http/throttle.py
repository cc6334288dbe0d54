"""ThrottleMiddleware: outermost in a replica's server; lets a crowd into Ray Serve's handling a few at a time."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from raylm.frontend import Throttle

_PROBES = ("/health", "/ready")
_SERVES = "/-/"


class ThrottleMiddleware:
    """What Serve does around a request costs as much as what we do: for a thousand of them in one turn of the event
    loop nobody else would be heard for a good part of a second. Probes pass by the crowd."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope, at once or in a later turn."""
        if scope["type"] == "http" and not _is_probe(scope["path"]):
            await self._throttle.enter()
        await self._app(scope, receive, send)


def _is_probe(path: str) -> bool:
    return path.endswith(_PROBES) or path.startswith(_SERVES)
