"""Parked tokens: finds the tokens that engines drew for a stream whose ingress is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from raylm.errors import RayLMError
from raylm.frontend.engines.engine_client import EngineClient
from raylm.messages import EngineCoreRequest, ParkedTokens

ANSWER_S = 1.0
_MOST_SEEN = 2**16  # names


@dataclass(frozen=True, slots=True)
class Taken:
    """Parked tokens, and the ``fingerprint`` of the engine that drew them."""

    tokens: ParkedTokens
    fingerprint: str


class Seen:
    """The names of streams whose tokens this process had drawn again, the newest _MOST_SEEN of them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> bool:
        """Note a name. Returns whether it was there before; never for ""."""
        if not name or name in self._names:
            return bool(name)
        self._names[name] = None
        if len(self._names) > _MOST_SEEN:
            del self._names[next(iter(self._names))]
        return False


async def take_parked(clients: Iterable[EngineClient], request: EngineCoreRequest) -> Taken | None:
    """The longest parked tokens of any engine. Ignores engines that are gone or do not answer within ANSWER_S."""
    found = await asyncio.gather(*(_ask(client, request) for client in clients))
    return max(filter(None, found), key=lambda taken: taken.tokens.num_tokens, default=None)


async def _ask(client: EngineClient, request: EngineCoreRequest) -> Taken | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            tokens = await client.take_parked(request)
    except (TimeoutError, RayLMError):
        return None
    return None if tokens is None else Taken(tokens, client.info.worker.fingerprint)
