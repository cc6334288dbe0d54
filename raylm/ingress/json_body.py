"""Reading a JSON request body within bounds: media type, bytes, nesting, and numbers that JSON has."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive

from raylm.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from raylm.ingress.lifecycle import ClientDisconnectedError

MAX_NESTING = 64

JSONObject = dict[str, Any]


def content_length(headers: Headers) -> int:
    """Bytes of the body as announced, 0 if they are not."""
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isdecimal() else 0


def check_head(headers: Headers, max_bytes: int) -> None:
    """Refuse a body by what is announced of it.

    Raises:
        MediaTypeError: it is not declared as plain JSON.
        BodyTooLargeError: it is longer than ``max_bytes``.
    """
    _check_media_type(headers)
    if content_length(headers) > max_bytes:
        raise _too_large(max_bytes)


def parse_json_object(body: bytes) -> JSONObject:
    """Parse ``body``; NaN, Infinity, numbers beyond a double and lone surrogates are refused by orjson already.

    Raises:
        InvalidRequestError: it is no JSON object, or nested deeper than MAX_NESTING.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} at byte {error.pos}.") from None
    if not isinstance(data, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_NESTING and _nested_deeper(data, MAX_NESTING):
        raise InvalidRequestError(f"The body is nested deeper than {MAX_NESTING} levels.")
    return data


def _check_media_type(headers: Headers) -> None:
    media_type, _, options = headers.get("content-type", "").partition(";")
    charset = options.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in {"", "utf-8", "utf8"}:
        raise MediaTypeError("The Content-Type must be application/json in UTF-8.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("A Content-Encoding is not supported; send the body as it is.")


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The request's body.

    Raises:
        BodyTooLargeError: it is longer than ``max_bytes``; the rest is not read.
        ClientDisconnectedError: the client hung up while sending.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {max_bytes} bytes.")


def _nested_deeper(data: JSONObject, limit: int) -> bool:
    level: list[Any] = [data]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True
