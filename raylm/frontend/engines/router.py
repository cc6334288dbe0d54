"""Router: owns the set of ready engines, one reader task for each, and the choice of an engine for a request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat

from raylm.errors import EngineCrashedError, EngineDiedError, EngineUnavailableError, RayLMError
from raylm.frontend.engines.adapters import AdapterDirectory
from raylm.frontend.engines.branches import Branches
from raylm.frontend.engines.engine_client import EngineClient
from raylm.frontend.engines.others_load import distances
from raylm.frontend.engines.recovery import Fail, Recovery, Resume
from raylm.frontend.engines.rendezvous import Rendezvous
from raylm.frontend.engines.routed_engine import OpenRequest, PromptBlocks, RoutedEngine, speeds
from raylm.frontend.input_processor import Limits
from raylm.frontend.timelines.record import Score
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineStats
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

WAKE_PERIOD_S = 1.0
ABOUT_EQUAL = 0.02  # share by which predictions may differ and say nothing

Deliver = Callable[[EngineCoreOutputs], list[tuple[int, int]]]
Choice = tuple[int, list[float]]
"""The place of the best engine, and what each was judged by, the less the better."""
OnSent = Callable[[int, str, tuple[Score, ...]], None]


@dataclass(frozen=True, slots=True)
class Route:
    """An engine for a request, the prompt tokens that it will have to compute, and the blocks that it then holds.

    ``scores`` are those of all engines that were compared, none where there was no choice or nobody is to be told.
    """

    engine: RoutedEngine
    uncached_tokens: int
    blocks: Sequence[int] = ()
    scores: tuple[Score, ...] = ()


class Router:
    """``deliver`` takes every output and returns sequences to stop; ``fail`` ends requests with an error.

    A request whose engine is lost goes on on another one: ``resume`` gives it with the tokens it has. Where there is
    none it waits for one, at most ``recovery_timeout_s``. ``wake`` is called, again and again, while requests wait for
    an engine and there is none, and when they are on one that is to end; without it new requests do not wait.
    ``on_sent`` is told which engine got a request, and what all of them scored. Routers of different ``rank`` prefer
    different engines where others use them too.
    """

    def __init__(
        self,
        deliver: Deliver,
        fail: Fail,
        resume: Resume,
        recovery_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.time,
        wake: Callable[[], None] | None = None,
        rng: random.Random | None = None,
        on_sent: OnSent | None = None,
        rank: int = 0,
    ) -> None:
        self._on_sent = on_sent
        self._rank = rank
        self._rendezvous = Rendezvous()
        self._branches = Branches()
        self._engines: dict[str, RoutedEngine] = {}
        self._engine_of: dict[int, RoutedEngine] = {}
        self._recovery = Recovery(resume, self._send_again, fail, recovery_timeout_s)
        self._recovery_timeout_s = recovery_timeout_s
        self._clock = clock
        self._wake = wake
        self._rng = rng or random.Random()
        self._deliver = deliver
        self._engine_came = asyncio.Event()
        self._had_engines = False
        self._closing: set[asyncio.Task[None]] = set()
        self.adapters = AdapterDirectory()

    @property
    def is_ready(self) -> bool:
        return bool(self._engines)

    async def until_engine(self) -> None:
        """Wait for an engine where one is expected; EngineUnavailableError if it does not come in time.

        It is where ``wake`` can bring one, and where all that were there have been lost: others are started for them.
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
        """Wait, however long, for an engine that does not drain."""
        while all(engine.client.draining for engine in self._engines.values()):
            await self._until_one_comes(WAKE_PERIOD_S)

    async def _until_one_comes(self, timeout_s: float) -> None:
        self._engine_came.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._engine_came.wait()

    @property
    def limits(self) -> Limits:
        """What every ready engine can take; EngineUnavailableError without any."""
        self._check_ready()
        infos = [engine.client.info for engine in self._engines.values()]
        return Limits(min(i.max_model_len for i in infos), min(i.worker.vocab_size for i in infos))

    @property
    def fingerprint(self) -> str:
        """Of what all ready engines compute with; "" without any. Where they differ nothing can be promised."""
        found = sorted({engine.client.info.worker.fingerprint for engine in self._engines.values()})
        if len(found) < 2:
            return "".join(found)
        return f"fp_{hashlib.sha256(' '.join(found).encode()).hexdigest()[:16]}_varies"

    @property
    def clients(self) -> list[EngineClient]:
        """Those of the ready engines."""
        return [engine.client for engine in self._engines.values()]

    def stats(self) -> dict[str, EngineStats]:
        return {engine_id: engine.stats for engine_id, engine in self._engines.items()}

    def add(self, client: EngineClient) -> RoutedEngine:
        """Take in a ready engine and start reading from it; call it from a task that outlives every request."""
        engine = self._engines[client.info.engine_id] = RoutedEngine(client)
        engine.reader = asyncio.create_task(self._read(engine), name=f"read {client.info.engine_id}")
        if len(self._engines) > 1:
            for one in self._engines.values():
                one.watch()
        self._spread()
        self._had_engines = True
        self._engine_came.set()
        self._on_engines()
        return engine

    async def close(self) -> None:
        """Leave all engines; open requests end with EngineUnavailableError."""
        out_of_service = EngineUnavailableError("The engine that served this request was taken out of service.")
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            if engine.reader is not None:
                engine.reader.cancel()
            self._lose(engine, out_of_service, crashed=False)
            await self._close_client(engine.client)
        self._recovery.close(out_of_service)
        await asyncio.gather(*self._closing)

    def send(self, request: EngineCoreRequest, route: Route | None) -> None:
        """Hand a request to the engine that was picked for it; ``leave`` when it is over.

        Without one it waits, as those whose engine was lost.
        """
        if route is None:
            unavailable = EngineUnavailableError("No engine is ready; try again shortly.")
            self._recovery.take([request.key], "", unavailable)
            return
        engine, uncached = route.engine, route.uncached_tokens
        engine.begin(request.key, OpenRequest(request.params.n, uncached, route.blocks, self._clock()))
        self._engine_of[request.key] = engine
        if self._on_sent is not None:
            self._on_sent(request.key, engine.client.info.engine_id, route.scores)
        engine.client.add(replace(request, uncached_tokens=uncached) if route.blocks else request)

    def send_when_able(self, request: EngineCoreRequest, fingerprint: str = "") -> None:
        """Hand a request to an engine, of this ``fingerprint`` if there is one, now or as soon as one is ready."""
        try:
            route = self.pick(request, fingerprint or None)
        except EngineUnavailableError as error:
            self._recovery.take([request.key], fingerprint, error)
        else:
            self.send(request, route)

    def leave(self, key: int, *, abort: bool) -> None:
        """A request is over; with ``abort`` its engine may still be at work on it."""
        self._recovery.forget(key)
        if (engine := self._engine_of.pop(key, None)) is not None:
            engine.end(key, None if abort else self._clock())
            if abort:
                engine.client.abort([key])
            if engine.client.draining and not engine.open:
                self._on_engines()

    def _send_again(self, request: EngineCoreRequest, fingerprint: str) -> None:
        """Only an engine of the same fingerprint goes on with the tokens of another."""
        self.send(request, self.pick(request, fingerprint if any(request.drawn) else None))

    def pick(self, request: EngineCoreRequest, fingerprint: str | None = None) -> Route:
        """The engine with the least predicted seconds for this request and to those there; among equals any.

        Raises:
            EngineUnavailableError: none is ready, has the adapter or the ``fingerprint``.
            ModelNotFoundError: the adapter is not loaded.
        """
        engines = self._able(request, fingerprint)
        if len(engines) == 1:
            return Route(engines[0], len(request.prompt_token_ids))
        prompt = PromptBlocks(request)
        uncached = self._uncached(prompt, engines)
        place, costs = self.choose(prompt, engines, uncached)
        engine, now = engines[place], self._clock()
        blocks = () if engine.blocks.told is None else self._blocks(prompt, engine)
        told = None if self._on_sent is None else map(_score, engines, costs, uncached, repeat(now))
        return Route(engine, uncached[place], blocks, tuple(told or ()))

    def choose(self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]) -> Choice:
        """Of two or more engines, of which each would have to compute so many of the prompt's tokens."""
        named, found, payers = self._shared(prompt, engines, uncached)
        now, least = self._clock(), min(uncached)
        costs = [
            engine.predicted_s(least + (tokens - least) / payers, *speed, now, found, place == named)
            for place, (engine, tokens, speed) in enumerate(zip(engines, uncached, speeds(engines), strict=True))
        ]
        most = min(costs) * (1 + ABOUT_EQUAL)
        return self._rng.choice([place for place, cost in enumerate(costs) if cost <= most]), costs

    def _able(self, request: EngineCoreRequest, fingerprint: str | None) -> list[RoutedEngine]:
        """The engines that can serve a request; at least one, or an error."""
        self._check_ready()
        engines = list(self._engines.values())
        if request.adapter is not None:
            able = self.adapters.engines_with(request.adapter)
            engines = [engine for engine in engines if engine.client.info.engine_id in able]
        if fingerprint is not None:
            engines = [engine for engine in engines if engine.client.info.worker.fingerprint == fingerprint]
        if not engines:
            raise EngineUnavailableError("No engine is ready that could go on with this request.")
        lasting = [engine for engine in engines if not engine.client.draining]
        if not lasting and self._wake is not None:
            self._wake()
        return lasting or engines

    def _uncached(self, prompt: PromptBlocks, engines: list[RoutedEngine]) -> list[int]:
        """For each engine the tokens that would have to be computed there; one always is."""
        length, found, matched = prompt.length, [], 0
        blocks: list[int] = []
        size = 0  # of the blocks above, which are the same on all engines of this block size but for an adapter
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

    def _shared(
        self, prompt: PromptBlocks, engines: list[RoutedEngine], uncached: list[int]
    ) -> tuple[int | None, float, float]:
        """What the longest part of a prompt that is known says of it.

        The place of the engine that all ingresses name for what follows and how much that counts (Rendezvous), and how
        many prompts shall pay for one more copy of that part (Branches). Where news are old it is one: a prompt may go
        on from more than what is known.
        """
        best = engines[uncached.index(least := min(uncached))]
        if (told := best.blocks.told) is None:
            return None, 0.0, 1.0
        size, blocks, payers = best.client.info.worker.block_size, self._blocks(prompt, best), 1.0
        matched = (prompt.length - least) // size
        if not matched or blocks[matched - 1] in told:
            self._rendezvous.learn(matched * size / prompt.length)
            if matched and (others := self._branches.note(blocks[matched - 1]) - 1):
                payers += others * (1.0 - best.doubt(self._clock()))
        place = self._rendezvous.place(blocks, matched, engines)
        return place, 0.0 if place is None else self._rendezvous.found, payers

    def _blocks(self, prompt: PromptBlocks, engine: RoutedEngine) -> list[int]:
        info, adapter = engine.client.info, prompt.adapter
        return prompt.of(
            info.worker.block_size, "" if adapter is None else self.adapters.digest(info.engine_id, adapter)
        )

    async def _read(self, engine: RoutedEngine) -> None:
        """Read until the engine is lost; nothing else ends this task but ``close``."""
        lost = EngineDiedError("The engine that served this request was lost; sending it again is safe.")
        crashed = False
        try:
            async for outputs in engine.client.outputs():
                engine.on_outputs(outputs, self._clock())
                if outputs.adapters is not None:
                    self.adapters.on_report(engine.client, outputs.adapters)
                    self._on_engines()
                if self._recovery.watches:
                    self._recovery.on_tokens(outputs.keys)
                if stops := self._deliver(outputs):
                    engine.client.stop(stops)
                if outputs.draining and not engine.client.draining:
                    engine.client.draining = True
                    self._on_engines()
                if engine.client.info.engine_id not in self._engines:
                    return
        except EngineDiedError as error:
            # Its supervisor tells what was lost; a line to an engine that lives is Discovery's to tell.
            open_requests = f"{len(engine.open)} open requests"
            engine_id = engine.client.info.engine_id
            lost_with = about("engine.lost", engine=engine_id, open_requests=len(engine.open))
            logger.info("lost engine %s with %s: %s", engine_id, open_requests, error, extra=lost_with)
            lost.__cause__ = error  # clients get the neutral text above, logs and offline users the reason
            crashed = isinstance(error, EngineCrashedError)
        except Exception as error:
            engine_id = engine.client.info.engine_id
            logger.exception(
                "engine %s: reading its outputs failed", engine_id, extra=about("engine.failed", engine=engine_id)
            )
            lost.__cause__ = error
        self._leave(engine, lost, crashed=crashed)

    def _on_engines(self) -> None:
        """There is one more, one has an adapter more, or one is about to end."""
        for engine in [engine for engine in self._engines.values() if engine.client.draining]:
            if any(self._can_replace(other, engine) for other in self._engines.values()):
                self._hand_over(engine)
            elif engine.open and self._wake is not None:
                self._wake()
        self._recovery.retry()

    def _can_replace(self, other: RoutedEngine, engine: RoutedEngine) -> bool:
        mine, its = engine.client.info, other.client.info
        takes_open = not engine.open or mine.worker.fingerprint == its.worker.fingerprint
        return takes_open and not other.client.draining and self.adapters.has_all_of(its.engine_id, mine.engine_id)

    def _hand_over(self, engine: RoutedEngine) -> None:
        """Its requests go on on others; what it still says of them is not heard."""
        engine_id, moving = engine.client.info.engine_id, len(engine.open)
        ends = about("engine.ends", engine=engine_id, open_requests=moving)
        logger.info("engine %s ends; %d open requests move", engine_id, moving, extra=ends)
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
            self._spread()
            self.adapters.leave(engine_id)
        keys = list(engine.open)
        for key in keys:
            del self._engine_of[key]
        if crashed:
            self._recovery.suspect(keys)
        self._recovery.take(keys, engine.client.info.worker.fingerprint, error)
        if keys and not self._engines and self._wake is not None:
            self._wake()

    def _spread(self) -> None:
        for engine_id, distance in zip(sorted(self._engines), distances(len(self._engines), self._rank), strict=True):
            self._engines[engine_id].distance = distance

    async def _close_client(self, client: EngineClient) -> None:
        try:
            await client.close()
        except Exception as error:
            logger.warning("engine %s: could not be left in order: %s", client.info.engine_id, error)

    def _check_ready(self) -> None:
        if not self._engines:
            raise EngineUnavailableError("No engine is ready; try again shortly.")


def _score(engine: RoutedEngine, cost: float, uncached_tokens: int, now: float) -> Score:
    told_s_ago = max(0.0, now - engine.others.told_at)
    told = (engine.queued_tokens + engine.stats.others.queued_tokens, engine.sequences, engine.stats.waiting)
    return (engine.client.info.engine_id, cost, uncached_tokens, *told, told_s_ago)
