"""ServeErrorMiddleware: puts OpenAI's error envelope around what Ray Serve itself answers in plain text."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raylm.errors import EngineUnavailableError, NotFoundError, OverloadedError, RayLMError
from raylm.ingress.http.errors import error_response
from raylm.ingress.http.throttle import ThrottleMiddleware

_STARTING = "The server is starting or has no free replica; try again shortly."


def serve_middlewares() -> list[Middleware]:
    """What RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names: outermost in Serve's proxies and replica servers, the last
    one outside."""
    return [Middleware(ServeErrorMiddleware), Middleware(ThrottleMiddleware)]


class ServeErrorMiddleware:
    """Our own answers pass; a failure in plain text is Serve's and is said anew. One request id header is enough."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection scope; Serve's own routes (/-/healthz, /-/routes) stay as they are."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        replaced = False

        async def send_ours(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                if replaced := _is_serves_failure(message):
                    await error_response(_as_ours(message["status"]), scope["path"])(scope, receive, send)
                    return
                message = {**message, "headers": _one_request_id(message)}
            if not replaced:
                await send(message)

        await self._app(scope, receive, send_ours)


def _is_serves_failure(message: Message) -> bool:
    media_type = Headers(raw=message["headers"]).get("content-type", "")
    return message["status"] >= 400 and not media_type.startswith("application/json")


def _one_request_id(message: Message) -> list[tuple[bytes, bytes]]:
    headers = MutableHeaders(raw=list(message["headers"]))
    if request_id := headers.get("x-request-id"):
        headers["x-request-id"] = request_id
    return headers.raw


def _as_ours(status: int) -> RayLMError:
    if status == 404:
        return NotFoundError("There is no such route.")
    if status == 429:
        return OverloadedError("The server holds as many requests as it can; try again shortly.")
    if status in {502, 503, 504}:
        return EngineUnavailableError(_STARTING)
    return RayLMError("The server had an error while processing your request.")
