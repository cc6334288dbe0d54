"""GrammarPreparation: holds requests back until the worker has compiled their grammars."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from raylm.errors import EngineDiedError, RayLMError
from raylm.messages import EngineCoreRequest
from raylm.round_robin import RoundRobin

MAX_KNOWN = 128  # fewer grammars than the worker keeps, so that a known grammar is still compiled there

Name = tuple[str, int]  # client id, key
Admit = Callable[[str, EngineCoreRequest], None]
Fail = Callable[[str, int, RayLMError], None]


class GrammarPreparation:
    """Owns the requests that wait for their grammars.

    Grammars are compiled one at a time while steps run: tenants in turn, those of a tenant in the order of arrival. The
    last MAX_KNOWN compiled grammars are known to be ready.
    """

    def __init__(self, prepare: Callable[[str], Awaitable[None]], admit: Admit, fail: Fail) -> None:
        self._prepare, self._admit, self._fail = prepare, admit, fail
        self._known: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, dict[Name, EngineCoreRequest]] = {}
        self._turns = RoundRobin()
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def holds_back(self, client_id: str, request: EngineCoreRequest, grammar: str) -> bool:
        """Hold the request back if its ``grammar`` is not ready. Returns whether it is held back.

        ``admit`` is called when the grammar is ready, ``fail`` if it cannot be compiled.
        """
        if grammar in self._known:
            return False
        self._waiting.setdefault(grammar, {})[client_id, request.key] = request
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        return True

    def abort(self, client_id: str, key: int | None = None) -> None:
        """Drop one held request of a client, or all of them if ``key`` is None."""
        for grammar, requests in list(self._waiting.items()):
            for name in [name for name in requests if name[0] == client_id and key in (None, name[1])]:
                del requests[name]
            if not requests:
                del self._waiting[grammar]

    def close(self) -> None:
        """Drop all requests and stop compiling."""
        self._waiting.clear()
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while self._waiting:
            grammar = self._next()
            try:
                await self._prepare(grammar)
            except EngineDiedError:
                return  # the failing step reports the error to all clients
            except RayLMError as error:
                for client_id, key in self._waiting.pop(grammar, {}):
                    self._fail(client_id, key, error)
                continue
            self._remember(grammar)
            for (client_id, _), request in self._waiting.pop(grammar, {}).items():
                self._admit(client_id, request)

    def _next(self) -> str:
        """The oldest grammar that the tenant whose turn it is waits for."""
        oldest: dict[str, str] = {}  # by tenant
        for grammar, requests in self._waiting.items():
            for request in requests.values():
                oldest.setdefault(request.service.tenant, grammar)
        return oldest[self._turns.choose(oldest)]

    def _remember(self, grammar: str) -> None:
        self._known[grammar] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
