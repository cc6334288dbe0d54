"""Reading a JSON request body within bounds: media type, bytes, nesting, and numbers that JSON has."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive

from raylm.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from raylm.frontend import ClientDisconnectedError

MAX_NESTING = 64
MAX_ELEMENTS = 2**19  # commas, colons and opening brackets: so many are parsed in 20 to 40 ms, in one go
_INLINE_BYTES = 65_536
_SLICE_BYTES = 2**20
_MARKS = (b",", b":", b"{", b"[")

JSONObject = dict[str, Any]


def check_head(headers: Headers, max_bytes: int) -> int:
    """Refuse a body by what is announced of it; returns its bytes, 0 if they are not."""
    media_type, _, options = headers.get("content-type", "").partition(";")
    charset = options.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in {"", "utf-8", "utf8"}:
        raise MediaTypeError("The Content-Type must be application/json in UTF-8.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("A Content-Encoding is not supported; send the body as it is.")
    length = headers.get("content-length", "")
    num_bytes = int(length[:20]) if length.isdecimal() else 0
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return num_bytes


async def read_json_object(receive: Receive, max_bytes: int) -> tuple[JSONObject, int]:
    """The request's body, and its bytes; of one that is too long the rest is not read.

    Raises:
        ClientDisconnectedError: the client hung up while sending.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    body = b"".join(parts)
    if size <= _INLINE_BYTES:
        return parse_json_object(body), size
    return await asyncio.to_thread(parse_json_object, body), size


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {max_bytes} bytes.")


def parse_json_object(body: bytes) -> JSONObject:
    """Parse ``body``; NaN, Infinity, numbers beyond a double and lone surrogates are refused by orjson already."""
    if len(body) > MAX_ELEMENTS and _count_marks(body) > MAX_ELEMENTS < _count_elements(body):
        raise BodyTooLargeError(f"The body holds more than {MAX_ELEMENTS} JSON values.")
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error.msg} at byte {error.pos}.") from None
    if not isinstance(data, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_NESTING and _nested_deeper(data, MAX_NESTING):
        raise InvalidRequestError(f"The body is nested deeper than {MAX_NESTING} levels.")
    return data


def _count_marks(body: bytes) -> int:
    """Marks that part elements, those inside strings included; in slices, as each count holds the GIL."""
    starts = range(0, len(body), _SLICE_BYTES)
    return sum(body.count(mark, start, start + _SLICE_BYTES) for start in starts for mark in _MARKS)


def _count_elements(body: bytes) -> int:
    """Marks outside of strings, up to the first one beyond MAX_ELEMENTS or the end of what could be JSON."""
    found = position = 0
    while position < len(body) and found <= MAX_ELEMENTS:
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        found += sum(body.count(mark, position, end) for mark in _MARKS)
        position = _after_string(body, quote) if quote >= 0 else end
    return found


def _after_string(body: bytes, quote: int) -> int:
    """Where the string that begins at ``quote`` is over: a quote after an odd number of backslashes is a part of it."""
    end = body.find(b'"', quote + 1)
    while end >= 0:
        before = end - 1
        while body[before] == 0x5C:
            before -= 1
        if (end - before) % 2:
            return end + 1
        end = body.find(b'"', end + 1)
    return len(body)


def _nested_deeper(data: JSONObject, limit: int) -> bool:
    level: list[Any] = [data]
    for _ in range(limit):
        children = chain.from_iterable(node.values() if type(node) is dict else node for node in level)
        level = [child for child in children if type(child) is dict or type(child) is list]
        if not level:
            return False
    return True
