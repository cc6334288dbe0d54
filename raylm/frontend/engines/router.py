"""Router: owns the ready engines and their reader tasks, and chooses an engine for each request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Generic, TypeVar

from raylm.errors import EngineCrashedError, EngineDiedError, EngineUnavailableError, RayLMError
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.others_load import distances
from raylm.frontend.engines.prompt_blocks import KeptRuns, PromptBlocks
from raylm.frontend.engines.recovery import Recovery
from raylm.frontend.engines.rendezvous import RendezvousHash
from raylm.frontend.engines.routed_engine import Route, RoutedEngine, RoutedPrompt, speeds
from raylm.frontend.input_processor import Limits
from raylm.frontend.timelines.record import Score
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineStats
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

WAKE_PERIOD_S = 1.0
_NO_ENGINE = "No engine is ready; try again shortly."
_NO_SUCH_ENGINE = "No ready engine can continue this request."

P = TypeVar("P", bound=RoutedPrompt)
Choice = tuple[int, list[float]]
"""Index of the best engine, and the cost of each, lower is better."""


class Router(Generic[P]):
    """Routes prompts to engines, and owns all prompts that were sent until they ``leave``.

    ``deliver`` takes these prompts by their keys and an engine's outputs, and returns the sequences to stop.
    A prompt whose engine is lost continues on another engine. Without another engine it waits at most
    ``recovery_timeout_s``. ``wake`` is called repeatedly while prompts wait and there is no engine, and while they are
    on an engine that is about to end; without ``wake`` new prompts do not wait. A new engine takes over prompts that
    would wait longer on other engines. Routers of different ``rank`` prefer different engines where other clients use
    them too. With ``explains`` a route has the scores of all engines.
    """

    def __init__(
        self,
        deliver: Callable[[Mapping[int, P], EngineCoreOutputs], list[tuple[int, int]]],
        recovery_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        wake: Callable[[], None] | None = None,
        rng: random.Random | None = None,
        rank: int = 0,
        explains: bool = True,
    ) -> None:
        self._deliver = deliver
        self._explains = explains
        self._rank = rank
        self._rendezvous = RendezvousHash()
        self._runs = KeptRuns()
        self._engines: dict[str, RoutedEngine] = {}
        self._prompts: dict[int, P] = {}  # by the key of their request
        self._recovery = Recovery(self._send_again, recovery_timeout_s)
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._wake = wake
        self._rng = rng or random.Random()
        self._engine_came = asyncio.Event()
        self._had_engines = False
        self._closing: set[asyncio.Task[None]] = set()
        self._moved_keys = count(-1, -1)
        self._spread_due = False
        self.adapters = AdapterDirectory()

    @property
    def num_prompts(self) -> int:
        """The number of prompts that were sent and have not left."""
        return len(self._prompts)

    @property
    def is_ready(self) -> bool:
        return bool(self._engines)

    async def until_engine(self) -> None:
        """Wait for an engine if one is expected. Raises EngineUnavailableError if none is ready in time.

        An engine is expected if ``wake`` can start one, or if earlier engines were lost, because they are replaced.
        """
        until = asyncio.get_running_loop().time() + self._recovery_timeout_s
        while not self._engines and (self._wake is not None or self._had_engines):
            if (left_s := until - asyncio.get_running_loop().time()) <= 0:
                break
            if self._wake is not None:
                self._wake()
            await self._until_one_comes(min(WAKE_PERIOD_S, left_s))
        self._check_ready()

    async def until_lasting_engine(self) -> None:
        """Wait, without a limit, for an engine that does not drain."""
        while all(engine.client.draining for engine in self._engines.values()):
            await self._until_one_comes(WAKE_PERIOD_S)

    async def _until_one_comes(self, timeout_s: float) -> None:
        self._engine_came.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._engine_came.wait()

    @property
    def limits(self) -> Limits:
        """The limits that hold on every ready engine. Raises EngineUnavailableError without an engine."""
        self._check_ready()
        infos = [engine.client.info for engine in self._engines.values()]
        return Limits(min(i.max_model_len for i in infos), min(i.worker.vocab_size for i in infos))

    @property
    def fingerprint(self) -> str:
        """The common fingerprint of all ready engines, "" without an engine. If they differ, it ends in "_varies"."""
        found = sorted({engine.client.info.worker.fingerprint for engine in self._engines.values()})
        if len(found) < 2:
            return "".join(found)
        return f"fp_{hashlib.sha256(' '.join(found).encode()).hexdigest()[:16]}_varies"

    @property
    def clients(self) -> list[EngineClient]:
        """The clients of the ready engines."""
        return [engine.client for engine in self._engines.values()]

    def stats(self) -> dict[str, EngineStats]:
        return {engine_id: engine.stats for engine_id, engine in self._engines.items()}

    def add(self, client: EngineClient) -> RoutedEngine:
        """Add a ready engine and start to read its outputs. Must be called from a task that no request cancels."""
        engine = self._engines[client.info.engine_id] = RoutedEngine(client)
        engine.reader = asyncio.create_task(self._read(engine), name=f"read {client.info.engine_id}")
        if len(self._engines) == 2:
            for one in self._engines.values():
                one.watch()
        elif len(self._engines) > 2:
            engine.watch()
        self._spread_due = True
        self._had_engines = True
        self._engine_came.set()
        self._on_engines()
        self._relieve(engine)
        return engine

    async def close(self) -> None:
        """Disconnect from all engines. Open requests end with EngineUnavailableError."""
        out_of_service = EngineUnavailableError("The engine that served this request was taken out of service.")
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            if engine.reader is not None:
                engine.reader.cancel()
            self._lose(engine, out_of_service, crashed=False)
            await self._close_client(engine.client)
        self._recovery.close(out_of_service)
        await asyncio.gather(*self._closing)

    def send(self, prompt: P, route: Route | None) -> None:
        """Send a prompt to the chosen engine. Call ``leave`` when it has ended.

        Without a route it waits, like prompts whose engine was lost.
        """
        self._prompts[prompt.request.key] = prompt
        if route is None:
            self._recovery.take([prompt], "", EngineUnavailableError(_NO_ENGINE))
        else:
            self._send(prompt, prompt.request, route)

    def go_on(self, prompt: P, fingerprint: str = "") -> None:
        """Send a prompt with its tokens when an engine is ready, of this ``fingerprint`` if one is given."""
        self._prompts[prompt.request.key] = prompt
        self._recovery.take(
            [prompt], fingerprint, EngineUnavailableError(_NO_SUCH_ENGINE if self._engines else _NO_ENGINE)
        )

    def leave(self, prompt: P, *, abort: bool) -> None:
        """Forget a prompt that has ended. With ``abort`` its engine may still run it, and is asked to abort it."""
        key, route = prompt.request.key, prompt.route
        self._prompts.pop(key, None)
        if prompt.timer is not None or prompt is self._recovery.on_trial:
            self._recovery.forget(prompt)
        if route is not None:
            prompt.route, engine = None, route.engine
            engine.end(key, None if abort else self._clock())
            if abort:
                engine.client.abort([key])
            if engine.client.draining and not engine.open:
                self._on_engines()

    def _send_again(self, prompt: RoutedPrompt) -> None:
        """Send a waiting prompt. With tokens, it needs an engine of the fingerprint of the engine that drew them."""
        request = prompt.resumed()
        self._send(prompt, request, self.pick(request, prompt.fingerprint if any(request.drawn) else None))

    def _send(self, prompt: RoutedPrompt, request: EngineCoreRequest, route: Route) -> None:
        engine, route.since, route.continues = route.engine, self._clock(), any(request.drawn)
        engine.begin(request.key, route)
        prompt.route = route
        prompt.on_sent(route)
        engine.client.add(replace(request, uncached_tokens=route.uncached_tokens) if route.blocks else request)

    def pick(self, request: EngineCoreRequest, fingerprint: str | None = None) -> Route:
        """Choose the engine with the lowest predicted cost for this request and others, at random among equals.

        Raises:
            EngineUnavailableError: no engine is ready, or none has the adapter or the ``fingerprint``.
            ModelNotFoundError: the adapter is not loaded.
        """
        engines = self._able(request, fingerprint)
        if len(engines) == 1:
            return Route(engines[0], request.params.n, len(request.prompt_token_ids))
        prompt = PromptBlocks(request, self._runs)
        uncached = self._uncached(prompt, engines)
        place, costs = self.choose(prompt, engines, uncached)
        engine, now = engines[place], self._clock()
        blocks = () if engine.blocks.told is None else self._blocks(prompt, engine)
        scored = zip(engines, costs, uncached, strict=True) if self._explains else ()
        return Route(engine, request.params.n, uncached[place], blocks, tuple([_score(*one, now) for one in scored]))

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        """Choose among two or more engines. ``uncached`` has the prompt tokens that each would have to compute."""
        if self._spread_due:
            self._spread()
        named, found = self._named(prompt, engines, uncached)
        now = self._clock()
        costs = [
            engine.predicted_s(tokens, *speed, now, found, place == named)
            for place, (engine, tokens, speed) in enumerate(zip(engines, uncached, speeds(engines), strict=True))
        ]
        least = min(costs)
        return self._rng.choice([place for place, cost in enumerate(costs) if cost == least]), costs

    def _able(self, request: EngineCoreRequest, fingerprint: str | None) -> list[RoutedEngine]:
        """The engines that can serve a request, at least one; otherwise raises EngineUnavailableError."""
        self._check_ready()
        engines = list(self._engines.values())
        if request.adapter is not None:
            able = self.adapters.engines_with(request.adapter)
            engines = [engine for engine in engines if engine.client.info.engine_id in able]
        if fingerprint is not None:
            engines = [engine for engine in engines if engine.client.info.worker.fingerprint == fingerprint]
        if not engines:
            raise EngineUnavailableError(_NO_SUCH_ENGINE)
        lasting = [engine for engine in engines if not engine.client.draining]
        if not lasting and self._wake is not None:
            self._wake()
        return lasting or engines

    def _uncached(self, prompt: PromptBlocks, engines: list[RoutedEngine]) -> list[int]:
        """The prompt tokens that each engine would have to compute, at least one."""
        length, found, matched = prompt.length, [], 0
        blocks: list[int] = []
        size = 0  # of ``blocks``, which are shared by engines of this block size unless there is an adapter
        for engine in engines:
            known = engine.blocks
            if known.told is None:
                found.append(length)
                continue
            its_size = engine.client.info.worker.block_size
            if its_size != size or prompt.adapter is not None:
                size, blocks = its_size, self._blocks(prompt, engine)
            matched = known.num_matched(blocks, matched)
            found.append(length - size * min(matched, (length - 1) // size))
        return found

    def _named(
        self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]
    ) -> tuple[int | None, float]:
        """The index of the engine that every ingress would choose for the uncached rest of this prompt, and the weight
        of that choice (0 to 1). None and 0 if there is no such engine.
        """
        best = engines[uncached.index(least := min(uncached))]
        if (told := best.blocks.told) is None:
            return None, 0.0
        size, blocks = best.client.info.worker.block_size, self._blocks(prompt, best)
        matched = (prompt.length - least) // size
        if not matched or blocks[matched - 1] in told:
            self._rendezvous.learn(matched * size / prompt.length)
        place = self._rendezvous.place(blocks, matched, engines)
        return place, 0.0 if place is None else self._rendezvous.found

    def _blocks(self, prompt: PromptBlocks, engine: RoutedEngine) -> list[int]:
        info, adapter = engine.client.info, prompt.adapter
        return prompt.of(
            info.worker.block_size, "" if adapter is None else self.adapters.digest(info.engine_id, adapter)
        )

    async def _read(self, engine: RoutedEngine) -> None:
        """Read outputs until the engine is lost. Only ``close`` and ``_hand_over`` cancel this task."""
        lost = EngineDiedError("The engine that served this request was lost; sending it again is safe.")
        crashed = False
        try:
            async for outputs in engine.client.outputs():
                engine.on_outputs(outputs, self._clock())
                if stops := self._deliver(self._prompts, outputs):  # before another engine can take over the prompts
                    engine.client.stop(stops)
                if outputs.adapters is not None:
                    self.adapters.on_report(engine.client, outputs.adapters)
                    self._on_engines()
                if self._recovery.on_trial is not None:
                    self._recovery.check_trial()
                if outputs.draining and not engine.client.draining:
                    engine.client.draining = True
                    self._on_engines()
                if engine.client.info.engine_id not in self._engines:
                    return
        except EngineDiedError as error:
            # The supervisor logs the loss of an engine. Discovery logs a lost connection to a live engine.
            open_requests = f"{len(engine.open)} open requests"
            engine_id = engine.client.info.engine_id
            lost_with = about("engine.lost", engine=engine_id, open_requests=len(engine.open))
            logger.info("lost engine %s with %s: %s", engine_id, open_requests, error, extra=lost_with)
            lost.__cause__ = error  # clients get the neutral text above; logs and offline users get the cause
            crashed = isinstance(error, EngineCrashedError)
        except Exception as error:
            engine_id = engine.client.info.engine_id
            logger.exception(
                "engine %s: reading its outputs failed", engine_id, extra=about("engine.failed", engine=engine_id)
            )
            lost.__cause__ = error
        self._leave(engine, lost, crashed=crashed)

    def _on_engines(self) -> None:
        """React to a new engine, a new adapter of an engine, or an engine that is about to end."""
        for engine in [engine for engine in self._engines.values() if engine.client.draining]:
            if any(self._can_replace(other, engine) for other in self._engines.values()):
                self._hand_over(engine)
            elif engine.open and self._wake is not None:
                self._wake()
        self._recovery.retry()

    def _relieve(self, new: RoutedEngine) -> None:
        """Move prompts without tokens from the longest queues to a new engine while they would wait less there.

        The newest prompts move, and keep their order. Each gets a new key, because its old engine may have sent tokens
        before the abort arrives.
        """
        waiting = {}
        for engine in self._engines.values():
            if engine is new or new.client.info.max_model_len < engine.client.info.max_model_len:
                continue
            if keys := [key for key, route in engine.starting.items() if self._is_movable(self._prompts[key], route)]:
                waiting[engine] = keys
        moving: list[P] = []
        queued = new.queued_tokens
        while waiting:
            engine = max(waiting, key=lambda engine: engine.queued_tokens)
            prompt = self._prompts[waiting[engine][-1]]
            (_, token_s), (_, new_token_s) = speeds([engine, new])
            queued += len(prompt.request.prompt_token_ids)
            if queued * new_token_s >= engine.queued_tokens * token_s:
                break
            self.leave(prompt, abort=True)
            moving.append(prompt)
            waiting[engine].pop()
            if not waiting[engine]:
                del waiting[engine]
        for prompt in reversed(moving):
            request = prompt.request = replace(prompt.request, key=next(self._moved_keys))
            self.send(prompt, Route(new, request.params.n, len(request.prompt_token_ids)))

    def _is_movable(self, prompt: P, route: Route) -> bool:
        """Whether a new engine may take a prompt over: it has no adapters yet, and Recovery observes suspects."""
        return not route.continues and prompt.request.adapter is None and not prompt.crashes

    def _can_replace(self, other: RoutedEngine, engine: RoutedEngine) -> bool:
        mine, its = engine.client.info, other.client.info
        takes_open = not engine.open or mine.worker.fingerprint == its.worker.fingerprint
        return takes_open and not other.client.draining and self.adapters.has_all_of(its.engine_id, mine.engine_id)

    def _hand_over(self, engine: RoutedEngine) -> None:
        """Move the requests of a draining engine to other engines. Its later outputs are ignored."""
        engine_id, moving = engine.client.info.engine_id, len(engine.open)
        ends = about("engine.ends", engine=engine_id, open_requests=moving)
        logger.info("engine %s is ending, moving its %d open requests", engine_id, moving, extra=ends)
        if engine.reader is not None and engine.reader is not asyncio.current_task():
            engine.reader.cancel()
        self._leave(engine, EngineDiedError("The engine that served this request has ended."), crashed=False)

    def _leave(self, engine: RoutedEngine, error: RayLMError, *, crashed: bool) -> None:
        self._lose(engine, error, crashed=crashed)
        task = asyncio.create_task(self._close_client(engine.client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lose(self, engine: RoutedEngine, error: RayLMError, *, crashed: bool) -> None:
        engine_id = engine.client.info.engine_id
        if self._engines.get(engine_id) is engine:
            del self._engines[engine_id]
            self._spread_due = True
            self.adapters.leave(engine_id)
        prompts = [self._prompts[key] for key in engine.open]
        for prompt in prompts:
            prompt.route = None
        if crashed:
            self._recovery.suspect(prompts)
        self._recovery.take(prompts, engine.client.info.worker.fingerprint, error)
        if prompts and not self._engines and self._wake is not None:
            self._wake()

    def _spread(self) -> None:
        """Give the engines their distances, once after any number of changes."""
        self._spread_due = False
        for engine_id, distance in zip(sorted(self._engines), distances(len(self._engines), self._rank), strict=True):
            self._engines[engine_id].distance = distance

    async def _close_client(self, client: EngineClient) -> None:
        try:
            await client.close()
        except Exception as error:
            logger.warning("engine %s: error while disconnecting: %s", client.info.engine_id, error)

    def _check_ready(self) -> None:
        if not self._engines:
            raise EngineUnavailableError(_NO_ENGINE)


def _score(engine: RoutedEngine, cost: float, uncached_tokens: int, now: float) -> Score:
    told_s_ago = max(0.0, now - engine.others.told_at)
    told = (engine.queued_tokens + engine.stats.others.queued_tokens, engine.sequences, engine.stats.waiting)
    return (engine.client.info.engine_id, cost, uncached_tokens, *told, told_s_ago)
