"""RequestHead: what a request says beside its prompt and parameters, made once, where it comes in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from raylm.errors import InvalidRequestError

MAX_CACHE_SALT_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """Who asks, and how the request is treated, whether it asks for text or for a vector.

    A lower ``priority`` is served earlier (under the priority policy). Only requests of the same ``cache_salt`` share
    cached prefixes. ``arrival_time`` is in seconds since the epoch. ``param`` is the field that errors about the prompt
    name. ``adapter`` names a LoRA adapter, None means the base model.
    """

    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = field(default_factory=time.time)
    param: str = "prompt"
    adapter: str | None = None

    def nth(self, place: int, param: str | None = None) -> RequestHead:
        """The head of one of several prompts that came together, which may come from a field of its own."""
        return replace(self, request_id=f"{self.request_id}-{place}", param=param or self.param)

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            InvalidRequestError: naming the field.
        """
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
            message = f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters."
            raise InvalidRequestError(message, param="cache_salt")
