"""JSON answers of any size: small ones in one call, large ones in pieces on a thread, beside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import orjson
from starlette.responses import Response

from raylm.frontend import LARGE, offload

_PIECE_BYTES = 2**20


class Pieces:
    """A JSON array that may be long. ``values`` are its elements, read once: best an iterator that makes them."""

    def __init__(self, values: Iterable[Any]) -> None:  # no dataclass: orjson would write it as an object
        self.values = values


async def json_answer(make: Callable[[], Any], size: int) -> list[bytes]:
    """What ``make`` returns as JSON, in one piece or several; ``size`` is roughly how many things it has.

    One call of orjson for a large value, or one copy of its result, would hold up all threads: use Pieces in it.
    """
    if size <= LARGE:
        return [orjson.dumps(make(), default=pieces_as_list, option=orjson.OPT_SERIALIZE_NUMPY)]
    return await offload(lambda: list(_grouped(_written(make()))), size)


def json_response(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def pieces_as_list(value: object) -> list[Any]:
    """The ``default`` of orjson for values that hold Pieces."""
    if isinstance(value, Pieces):
        return list(value.values)
    raise TypeError(type(value))


def _written(value: Any) -> Iterator[bytes]:
    """``value`` in small parts; objects and Pieces are taken apart, all else is encoded as it is."""
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
    """The parts joined to pieces of about a mebibyte; in one buffer, as each would be an object of 40 bytes."""
    held = bytearray()
    for part in parts:
        held += part
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)
