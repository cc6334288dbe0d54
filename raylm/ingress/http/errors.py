"""Error envelopes, Anthropic's on its paths and OpenAI's elsewhere: where an exception becomes what a client reads."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.responses import Response

from raylm.errors import RayLMError

logger = logging.getLogger("raylm.ingress")

_MAX_MESSAGE = 600
_MAX_PARAM = 120
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``: what the client reads never grows with what it sent."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return short.encode(errors="replace").decode()


def envelope(error: RayLMError, path: str = "") -> bytes:
    """The JSON body of ``error``, as clients of ``path`` know it."""
    if is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        inner = {"type": kind, "message": clip(error.message, _MAX_MESSAGE)}
        return orjson.dumps({"type": "error", "error": inner})
    body: dict[str, Any] = {
        "message": clip(error.message, _MAX_MESSAGE),
        "type": error.type,
        "param": None if error.param is None else clip(error.param, _MAX_PARAM),
        "code": error.code,
    }
    return orjson.dumps({"error": body})


def error_event(error: RayLMError, path: str) -> bytes:
    """``error`` as the last event of a stream whose head said 200 already."""
    name = b"event: error\n" if is_anthropic(path) else b""
    return name + b"data: " + envelope(error, path) + b"\n\n"


def error_response(error: RayLMError, path: str, headers: dict[str, str] | None = None) -> Response:
    """``error`` as a response with its status, and Retry-After where the class has one."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(envelope(error, path), error.status, headers, media_type="application/json")


def is_anthropic(path: str) -> bool:
    """Whether clients of ``path`` are Anthropic's."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def as_known_error(error: Exception, request_id: str) -> RayLMError:
    """``error`` itself if it was raised on purpose; anything else is logged and becomes a neutral 500."""
    if isinstance(error, RayLMError):
        return error
    logger.error("request %s failed unexpectedly", request_id, exc_info=error)
    return RayLMError("The server had an error while processing your request.")
