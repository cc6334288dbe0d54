"""Exchange: what the layers of the app know of one HTTP request and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from starlette.types import Scope

if TYPE_CHECKING:
    from raylm.frontend import ApiKey

_NAME = "raylm.exchange"  # in the scope


class Exchange:
    """One HTTP request and its answer.

    ``key`` is None without keys and on open paths. ``is_local`` is True if the client is on this machine and names it
    in Host. The answer names ``ignored_fields`` in a header, and has the headers that ``answer_headers`` returns.
    """

    __slots__ = ("answer_headers", "ignored_fields", "is_local", "key", "request_id")

    def __init__(self, scope: Scope, request_id: str) -> None:
        scope[_NAME] = self
        self.request_id = request_id
        self.key: ApiKey | None = None
        self.is_local = False
        self.ignored_fields: list[str] = []
        self.answer_headers: Callable[[], list[tuple[bytes, bytes]]] = list

    @property
    def key_name(self) -> str:
        """The name of the key, "" without one."""
        return "" if self.key is None else self.key.name


def exchange_of(scope: Scope) -> Exchange:
    """The Exchange of a scope, which RequestContextMiddleware makes."""
    return cast(Exchange, scope[_NAME])
