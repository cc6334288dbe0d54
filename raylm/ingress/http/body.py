"""Reads a JSON request body and checks its media type, size, nesting and numbers."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.types import Receive

from raylm.errors import BodyTimeoutError, BodyTooLargeError, InvalidRequestError, MediaTypeError, OverloadedError
from raylm.frontend import ClientDisconnectedError, Request

MAX_NESTING = 64
MAX_ELEMENTS = 2**19  # commas, colons and opening brackets: 20 to 40 ms of parsing in one call
_INLINE_BYTES = 65_536
_SLICE_BYTES = 2**20
_LONGEST_AT_ONCE = 8  # how many of the longest bodies may be received at the same time
_CROWDED = "The server receives as much as it can, and this body had come for longest; try again shortly."
_MARKS = (b",", b":", b"{", b"[")

JSONObject = dict[str, Any]


def check_head(headers: Headers, max_bytes: int) -> int:
    """Check the headers of a body. Returns its announced length in bytes, or 0."""
    media_type, _, options = headers.get("content-type", "").partition(";")
    charset = options.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in {"", "utf-8", "utf8"}:
        raise MediaTypeError("The Content-Type must be application/json in UTF-8.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError("A Content-Encoding is not supported; send the body uncompressed.")
    length = headers.get("content-length", "")
    num_bytes = int(length[:20]) if length.isdecimal() else 0
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    return num_bytes


class BodyReader:
    """Receives the bodies of a replica. Limits the time of each body and the total bytes of all incomplete bodies.

    If the total is exceeded, the body that began first is refused.
    """

    def __init__(self, max_bytes: int, max_bodies: int, timeout_s: float) -> None:
        self.max_bytes = max_bytes
        self._max_bodies = max_bodies
        self._timeout_s = timeout_s
        self._sizes: dict[Request, int] = {}  # in order of arrival
        self._size = 0

    async def read(self, receive: Receive, request: Request) -> bytes:
        """Receive the body of a request, in its ``connected`` block. The rest of a body that is too long is not read.

        Raises:
            ClientDisconnectedError: The client disconnected before the end of the body.
            BodyTooLargeError: The body is longer than its limit.
            BodyTimeoutError: The body took longer than its time limit.
            OverloadedError: The incomplete bodies of all requests exceeded their limit.
        """
        late = BodyTimeoutError(f"The body did not arrive within {self._timeout_s:g} s.")
        timer = asyncio.get_running_loop().call_later(self._timeout_s, request.interrupt, late)
        self._sizes[request] = 0
        self._make_room()
        try:
            parts: list[bytes] = []
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                self._count(request, len(parts[-1]))
            return b"".join(parts)
        finally:
            timer.cancel()
            self._size -= self._sizes.pop(request, 0)

    def _count(self, request: Request, num_bytes: int) -> None:
        self._sizes[request] += num_bytes
        self._size += num_bytes
        if self._sizes[request] > self.max_bytes:
            raise _too_large(self.max_bytes)
        self._make_room()

    def _make_room(self) -> None:
        while len(self._sizes) > self._max_bodies or self._size > _LONGEST_AT_ONCE * self.max_bytes:
            oldest = next(iter(self._sizes))
            self._size -= self._sizes.pop(oldest)
            oldest.interrupt(OverloadedError(_CROWDED))


async def read_json_object(body: bytes) -> JSONObject:
    """Parse ``body``. A long body is parsed on a thread."""
    return parse_json_object(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(parse_json_object, body)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {max_bytes} bytes.")


def parse_json_object(body: bytes) -> JSONObject:
    """Parse ``body``. orjson already refuses NaN, Infinity, numbers beyond a double, and lone surrogates."""
    if len(body) > MAX_ELEMENTS and _count_marks(body) > MAX_ELEMENTS < _count_elements(body):
        raise BodyTooLargeError(f"The body has more than {MAX_ELEMENTS} JSON values.")
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
    """Count commas, colons and opening brackets, also inside strings.

    Counts in slices, since a count holds the GIL.
    """
    starts = range(0, len(body), _SLICE_BYTES)
    return sum(body.count(mark, start, start + _SLICE_BYTES) for start in starts for mark in _MARKS)


def _count_elements(body: bytes) -> int:
    """Count the marks outside of strings, up to MAX_ELEMENTS + 1 or the end of valid JSON."""
    found = position = 0
    while position < len(body) and found <= MAX_ELEMENTS:
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        found += sum(body.count(mark, position, end) for mark in _MARKS)
        position = _after_string(body, quote) if quote >= 0 else end
    return found


def _after_string(body: bytes, quote: int) -> int:
    """The position after the string that begins at ``quote``. A quote after an odd number of backslashes is escaped."""
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
