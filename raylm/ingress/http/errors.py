"""Converts exceptions to error bodies: OpenAI's format, and the formats of other APIs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from raylm.errors import MethodNotAllowedError, NotFoundError, RayLMError
from raylm.lazy import Family
from raylm.stages import about

if TYPE_CHECKING:
    from raylm.ingress.http.body import JSONObject

logger = logging.getLogger("raylm.ingress")

_MAX_MESSAGE = 600
_MAX_PARAM = 120


@dataclass(frozen=True)
class ErrorFormat:
    name: str  # of the schema in /openapi.json
    schema: JSONObject
    body: Callable[[RayLMError, str], JSONObject]  # makes the body from an error and its clipped message
    event: bytes = b""  # the line before the data of an error in a stream


def _openai_body(error: RayLMError, message: str) -> JSONObject:
    param = None if error.param is None else clip(error.param, _MAX_PARAM)
    return {"error": {"message": message, "type": error.type, "param": param, "code": error.code}}


def object_schema(properties: dict[str, JSONObject]) -> JSONObject:
    """The JSON schema of an object that requires all of ``properties``."""
    return {"type": "object", "required": list(properties), "properties": properties}


_STRING: JSONObject = {"type": "string"}
_NULLABLE_STRING: JSONObject = {"anyOf": [_STRING, {"type": "null"}]}
_OPENAI_ERROR = {"message": _STRING, "type": _STRING, "param": _NULLABLE_STRING, "code": _NULLABLE_STRING}
_OPENAI = ErrorFormat("Error", object_schema({"error": object_schema(_OPENAI_ERROR)}), _openai_body)

# Formats other than OpenAI's, by path prefix.
_FORMATS: Family[ErrorFormat] = Family({
    "/v1/messages": "raylm.ingress.anthropic.errors:ANTHROPIC",
})  # fmt: skip


def error_format(path: str) -> ErrorFormat:
    prefix = next((prefix for prefix in _FORMATS if path == prefix or path.startswith(f"{prefix}/")), None)
    return _OPENAI if prefix is None else _FORMATS[prefix]


def route_path(scope: Scope) -> str:
    """The path that the app's router uses, which is the path without Serve's mount prefix."""
    return str(scope["path"]).removeprefix(scope.get("root_path", "").rstrip("/"))


def clip(text: str, limit: int) -> str:
    """Cut ``text`` to at most ``limit`` characters, so that the size of an error does not grow with the request."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    return short.encode(errors="replace").decode()


def error_event(error: RayLMError, path: str) -> bytes:
    """``error`` as the last event of a stream whose status 200 was already sent."""
    return error_format(path).event + b"data: " + envelope(error, path) + b"\n\n"


def error_response(error: RayLMError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(envelope(error, path), error.status, headers, media_type="application/json")


def envelope(error: RayLMError, path: str = "") -> bytes:
    """The JSON body of ``error`` in the format of ``path``."""
    return orjson.dumps(error_format(path).body(error, clip(error.message, _MAX_MESSAGE)))


def as_known_error(error: Exception, request_id: str) -> RayLMError:
    """Return a RayLMError unchanged. Log any other exception and return a neutral 500 error."""
    if isinstance(error, RayLMError):
        return error
    failed = about("request.failed", request_id)
    logger.error("request %s failed unexpectedly", request_id, exc_info=error, extra=failed)
    return RayLMError("The server had an error while processing your request.")


def routing_error(error: HTTPException, scope: Scope) -> RayLMError:
    place = f"{clip(scope['method'], 20)} {clip(scope['path'], 100)}"
    if error.status_code == 405:
        return MethodNotAllowedError(f"The route of {place} does not take this method.")
    return NotFoundError(f"There is no route {place}.")
