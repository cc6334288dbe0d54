"""The queries of lists of items: which page of the list, and the check of their names."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from raylm.errors import InvalidRequestError
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import unsupported

_MOST_ITEMS, _DEFAULT_ITEMS = 100, 20


@dataclass(frozen=True, slots=True)
class Page:
    """At most ``limit`` items after the item with the id ``after``; ``order`` is asc or desc, the newest first."""

    limit: int
    order: str
    after: str | None


def read_page(request: Request) -> Page:
    """Raises InvalidRequestError if a value is wrong."""
    query = request.query_params
    limit = query.get("limit", str(_DEFAULT_ITEMS))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST_ITEMS):
        raise InvalidRequestError(f"'limit' must lie between 1 and {_MOST_ITEMS}.", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("'order' must be asc or desc.", param="order")
    return Page(int(limit), order, query.get("after"))


def check_query(request: Request, known: set[str]) -> None:
    """Raise UnsupportedFieldError if the query has another name."""
    for name in request.query_params:
        if name not in known:
            raise unsupported(clip(name, 64), "this query parameter is not supported.")
