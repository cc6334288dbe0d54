"""Anthropic's error format."""

from __future__ import annotations

from raylm.errors import RayLMError
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import ErrorFormat, object_schema

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STRING = {"type": "string"}


def _body(error: RayLMError, message: str) -> JSONObject:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


_SCHEMA = object_schema({"type": {"const": "error"}, "error": object_schema({"type": _STRING, "message": _STRING})})

ANTHROPIC = ErrorFormat("AnthropicError", _SCHEMA, _body, event=b"event: error\n")
