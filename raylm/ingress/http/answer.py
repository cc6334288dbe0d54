"""JSON answers of any size. Small answers are encoded in one call, large answers in pieces on a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import orjson
from starlette.responses import Response

from raylm.frontend import LARGE, offload

_PIECE_BYTES = 2**20


class Pieces:
    """A JSON array that may be long. ``values`` are its elements, which are read once. An iterator saves memory."""

    def __init__(self, values: Iterable[Any]) -> None:  # not a dataclass, because orjson would write it as an object
        self.values = values


async def json_answer(make: Callable[[], Any], size: int) -> list[bytes]:
    """Encode the result of ``make`` as JSON, in one piece or several.

    One call of orjson for a large value holds the GIL for the whole call, so the large arrays in it should be Pieces.

    Args:
        size: About how many values the result has.
    """
    if size <= LARGE:
        return [orjson.dumps(make(), default=pieces_as_list, option=orjson.OPT_SERIALIZE_NUMPY)]
    return await offload(lambda: list(_grouped(_written(make()))), size)


def json_response(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def pieces_as_list(value: object) -> list[Any]:
    """Convert Pieces to a list: the ``default`` function for orjson."""
    if isinstance(value, Pieces):
        return list(value.values)
    raise TypeError(type(value))


def _written(value: Any) -> Iterator[bytes]:
    """Encode ``value`` in small parts. Objects and Pieces are split, and every other value is encoded in one part."""
    items: Iterable[Iterable[bytes]]
    if isinstance(value, Pieces):
        opening, items, closing = b"[", map(_written, value.values), b"]"
    elif isinstance(value, dict) and any(isinstance(item, (dict, Pieces)) for item in value.values()):
        members = (chain([orjson.dumps(name) + b":"], _written(item)) for name, item in value.items())
        opening, items, closing = b"{", members, b"}"
    else:
        yield orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        return
    yield opening
    for place, item in enumerate(items):
        if place:
            yield b","
        yield from item
    yield closing


def _grouped(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join the parts to pieces of about 1 MiB, in one buffer, because each small bytes object costs 40 bytes."""
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)
