"""EngineCore: owns the scheduler, the steps in flight and an outbox per client. Imports neither Ray nor torch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from raylm.config import Config
from raylm.engine.adapter_table import AdapterTable
from raylm.engine.grammar_preparation import GrammarPreparation
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.link import Silence
from raylm.engine.model_executor import ModelExecutor
from raylm.engine.outbox import Outbox
from raylm.engine.recording import create_scheduler
from raylm.engine.scheduler import Scheduler
from raylm.engine.step_budget import StepLimit
from raylm.engine.timelines.observer import EventRecorder
from raylm.errors import (
    DeadlineExceededError,
    EngineCrashedError,
    EngineDiedError,
    EngineUnavailableError,
    ModelNotFoundError,
    RayLMError,
)
from raylm.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    LoRAAdapter,
    ModelRunnerOutput,
    ParkedTokens,
    SchedulerOutput,
    SequenceEvent,
    SequenceEventKind,
    WorkerInfo,
)

TELL_EVERY_S = 0.05  # interval of load messages to clients that had no tokens in recent steps
TELL_ADDED_S = 0.01  # the same after requests were added: a long step would delay the news
_LONG_S = 0.02  # behind a step expected to take this long, the next step is planned late
_MOST_OF_IT = 0.75  # share of the long step after which the next step is planned
_ON_ITS_WAY_S = 0.1  # longest transport time of a request; a larger difference is a difference of two clocks
_MOST_LEAVERS = 256  # requests of departed clients ended at once; takes about 1 ms


class EngineCore:
    """Runs the loop of one engine. Call ``start``, then ``run``; all other calls come from the same event loop.

    A client is registered from ``connect`` to ``drop_client``; calls of other clients are ignored. After a worker is
    lost or a step has failed, all calls and outboxes raise EngineDiedError.
    """

    scheduler: Scheduler

    def __init__(self, config: Config, executor: ModelExecutor, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._executor = executor
        self._outboxes: dict[str, Outbox] = {}
        self._in_flight: deque[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput]]] = deque()
        self._work = asyncio.Event()
        self._lost_by: EngineDiedError | None = None
        executor.on_lost = self._lose
        self._ended_by: RayLMError | None = None
        self._ended_with = 0
        self._adapters = AdapterTable(config.lora)
        self._draining = False
        self._began_at = 0.0  # start of the oldest step in flight, in the loop's time
        self._leavers: deque[tuple[str, int]] = deque()
        self._limit = StepLimit(config.engine.step_timeout_s)
        self._observer = EventRecorder(self._note_event)
        self._grammars = GrammarPreparation(executor.prepare_grammar, self._admit_prepared, self._refuse)

    async def start(self) -> WorkerInfo:
        """Start the workers and create the scheduler for the KV pool that they allocated.

        ``max_model_len`` of the result is the least of what configuration, model and KV pool allow, in tokens.
        Therefore a sequence always fits when it runs alone.
        """
        try:
            info = await self._executor.start()
        except EngineDiedError as error:
            reason = self._lost_by or error
            raise reason from reason.__cause__
        longest = min(info.max_model_len, info.num_blocks * info.block_size)
        if self._config.max_model_len is not None:
            longest = min(longest, self._config.max_model_len)
        kv = KVCacheManager(info.num_blocks, info.block_size, self._config.cache.prefix_caching)
        self.scheduler = create_scheduler(self._config, kv, longest, self._clock, self._observer)
        return replace(info, max_model_len=longest)

    # ---------------------------------------------------------------- clients

    def connect(self, client_id: str) -> Outbox:
        """Open the outbox of a client. Its first message lists the loaded adapters.

        Requests that the client had open before are ended.
        """
        self._check_alive()
        self.drop_client(client_id)
        self._end_leavers(len(self._leavers))  # all of them: the client may use the same keys again
        outbox = self._outboxes[client_id] = Outbox()
        outbox.put(self._outputs(client_id, adapters=self._adapters.adapters))
        return outbox

    def drain(self) -> None:
        """Tell all clients that this engine is about to stop, so that they use other engines.

        Requests that still arrive are served.
        """
        self._draining = True
        for client_id, outbox in self._outboxes.items():
            outbox.put(self._outputs(client_id))

    def drop_client(self, client_id: str, outbox: Outbox | None = None) -> None:
        """End all requests of a client. Does nothing if the client has connected again, so that its outbox is another.

        At most _MOST_LEAVERS requests end at once, the rest between the next steps, so that a step is not delayed.
        """
        current = self._outboxes.get(client_id)
        if current is None or (outbox is not None and outbox is not current):
            return
        self._grammars.abort(client_id)
        self._outboxes.pop(client_id).close(EngineUnavailableError("The client has disconnected from the engine."))
        self._leavers.extend(self.scheduler.open_requests(client_id))
        self._end_leavers()

    def _end_leavers(self, most: int = _MOST_LEAVERS) -> None:
        """End up to ``most`` requests of departed clients, in the order of arrival, so that running ones end first."""
        for _ in range(min(most, len(self._leavers))):
            self.scheduler.abort(*self._leavers.popleft())

    def add(self, client_id: str, requests: list[EngineCoreRequest], sent: float | None = None) -> None:
        """Add requests. A request that can never be served is answered with an error at once.

        ``sent`` is the time at which the client sent them, in seconds since the epoch by the client's clock. If that
        clock differs from the engine's, the arrival times are corrected: time limits and targets count from them.
        """
        self._check_alive()
        if client_id not in self._outboxes:
            return
        ahead_s = 0.0 if sent is None else self._clock() - sent
        if abs(ahead_s) > _ON_ITS_WAY_S:
            requests = [replace(request, arrival_time=request.arrival_time + ahead_s) for request in requests]
        for request in requests:
            self._observe(client_id, request, "taken_in")
            if request.grammar is None or not self._grammars.holds_back(client_id, request, request.grammar):
                self._admit(client_id, request)
        self._tell_watchers(TELL_ADDED_S, but=client_id)

    def _admit_prepared(self, client_id: str, request: EngineCoreRequest) -> None:
        self._observe(client_id, request, "compiled")
        self._admit(client_id, request)

    def _observe(self, client_id: str, request: EngineCoreRequest, kind: SequenceEventKind) -> None:
        scheduler = self.scheduler
        self._observer.request(client_id, request.key, kind, scheduler.num_steps, len(scheduler.waiting))

    def _note_event(self, client_id: str, event: SequenceEvent) -> None:
        if (outbox := self._outboxes.get(client_id)) is not None:
            outbox.note_event(event)

    def _admit(self, client_id: str, request: EngineCoreRequest) -> None:
        try:
            adapter = () if request.adapter is None else self._adapters.loaded(request.adapter)
            self.scheduler.add(client_id, request, *adapter)
        except RayLMError as error:
            self._refuse(client_id, request.key, error)
        except Exception as error:  # an unexpected error ends this request only
            message = f"The engine cannot add this request: {type(error).__name__}: {error}"
            self._refuse(client_id, request.key, RayLMError(message))
        self._work.set()

    def _refuse(self, client_id: str, key: int, error: RayLMError) -> None:
        if client_id in self._outboxes:
            self._outboxes[client_id].put(self._outputs(client_id, [(key, error)]))

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return self.scheduler.has_work or bool(self._grammars)

    @property
    def has_clients(self) -> bool:
        return bool(self._outboxes)

    def abort(self, client_id: str, keys: list[int]) -> None:
        """Abort requests. Unknown and finished keys are ignored. The client receives only the new stats."""
        for key in keys:
            self._grammars.abort(client_id, key)
            self.scheduler.abort(client_id, key)
        if keys:
            self._put_stats(client_id)

    def stop(self, client_id: str, sequences: list[tuple[int, int]]) -> None:
        """Stop single sequences, given as (key, index). Otherwise like ``abort``."""
        for key, index in sequences:
            self.scheduler.stop(client_id, key, index)
        if sequences:
            self._put_stats(client_id)

    def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        """Take the tokens of a request whose client was lost, to continue it elsewhere. None if there are none."""
        try:
            adapter, _ = self._adapters.loaded(request.adapter)
        except RayLMError:
            return None
        return self.scheduler.parking.take(request, adapter)

    def pass_period(self, seconds: float) -> None:
        """Age the parked tokens by one period of ``seconds``."""
        self.scheduler.parking.pass_period(round(self._config.ingress.recovery_timeout_s / seconds))

    def watch_blocks(self, client_id: str) -> None:
        """Tell a client which blocks the prefix cache holds: all of them now, then the changes.

        Does nothing if prefix caching is off.
        """
        if client_id not in self._outboxes or not self._config.cache.prefix_caching:
            return
        self._note_blocks()
        self._outboxes[client_id].watch(self.scheduler.kv.pool.watch())
        self._outboxes[client_id].put(self._outputs(client_id))

    def _note_blocks(self) -> list[str]:
        """Pass the changes of the prefix cache to the clients that watch it. Returns the ids of these clients."""
        watching = [client_id for client_id, outbox in self._outboxes.items() if outbox.is_watching]
        if not watching:
            self.scheduler.kv.pool.unwatch()
        elif changes := self.scheduler.kv.pool.take_changes():
            for client_id in watching:
                self._outboxes[client_id].note_blocks(changes)
        return watching

    def _tell_watchers(self, every_s: float, but: str = "") -> None:
        """Send the stats to watching clients that got no message for ``every_s`` seconds, except to ``but``."""
        now = self._clock()
        for client_id in self._note_blocks():
            age_s = now - self._outboxes[client_id].told_at  # negative if the clock was set back
            if client_id != but and not 0 <= age_s <= every_s:
                self._put_stats(client_id)

    # ---------------------------------------------------------------- adapters

    async def load_adapter(self, adapter: LoRAAdapter) -> None:
        """Load a LoRA adapter and announce it to every client. Does nothing if exactly this adapter is loaded.

        Raises:
            InvalidRequestError: the adapter cannot be served, or another adapter has its name.
            OverloadedError: lora.max_adapters adapters are loaded.
        """
        await self._adapters.until_not_loading(adapter)
        self._check_alive()
        number = self._adapters.begin(adapter)
        if number is None:
            return
        try:
            digest = await self._executor.load_adapter(number, adapter.path)
        except BaseException:
            self._adapters.end(adapter, None)
            raise
        self._adapters.end(adapter, number, digest)
        self._announce_adapters()

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter and end the requests that use it. Does nothing if no adapter has this name."""
        self._check_alive()
        number = self._adapters.remove(name)
        if number is None:
            return
        self._announce_adapters()
        message = f"The LoRA adapter '{name}' was unloaded while it served this request."
        gone = ModelNotFoundError(message, param="model")
        for client_id, key in self.scheduler.requests_of(number):
            self.scheduler.abort(client_id, key)
            self._refuse(client_id, key, gone)  # has no effect for a departed client
        if self._in_flight:
            await asyncio.wait([result for _, result in self._in_flight])
        await self._executor.unload_adapter(number)

    def _announce_adapters(self) -> None:
        for client_id, outbox in self._outboxes.items():
            outbox.put(self._outputs(client_id, adapters=self._adapters.adapters))

    # ---------------------------------------------------------------- steps

    async def step(self) -> None:
        """Plan and submit steps, then apply the result of the oldest. Further steps are submitted before it arrives.

        Behind a long step, the next step is planned when most of the long step is over, so that requests which arrive
        meanwhile join it. Each stage of a pipeline gets a step at once.
        """
        self._end_leavers()
        self._hand_over(self._config.engine.pipeline_parallel_size)
        if self._in_flight and len(self._in_flight) < self._config.steps_in_flight:
            await self._until_most_is_over()
            self._hand_over(self._config.steps_in_flight)
        given_up = self.scheduler.take_given_up()
        for client_id, key in given_up:
            self._refuse(
                client_id, key, DeadlineExceededError("The request was stopped because its time limit has passed.")
            )
        if not self._in_flight:
            assert given_up or not self.scheduler.has_work, (
                "requests are open, nothing is in flight, and nothing can be scheduled"
            )
            return
        plan, result = self._in_flight[0]
        for client_id, outputs in self.scheduler.update(plan, await self._result_in_time(plan, result)).items():
            if client_id in self._outboxes:
                self._outboxes[client_id].put(outputs)
        self._in_flight.popleft()
        self._began_at = asyncio.get_running_loop().time()
        self._tell_watchers(TELL_EVERY_S)

    def _hand_over(self, most: int) -> None:
        """Plan and submit steps until ``most`` are in flight."""
        if not self._in_flight:
            self._began_at = asyncio.get_running_loop().time()
        while len(self._in_flight) < most and (plan := self.scheduler.schedule()):
            self._in_flight.append((plan, asyncio.ensure_future(self._executor.execute(plan))))

    async def _until_most_is_over(self) -> None:
        """Wait until most of the oldest step is over. Returns at once if the step is not expected to be long."""
        plan, result = self._in_flight[0]
        expected_s = self._limit.expected_s(plan)
        if expected_s >= _LONG_S:
            due_s = self._began_at + _MOST_OF_IT * expected_s - asyncio.get_running_loop().time()
            if due_s > 0:
                await asyncio.wait([result], timeout=due_s)

    async def _result_in_time(
        self, plan: SchedulerOutput, result: asyncio.Future[ModelRunnerOutput]
    ) -> ModelRunnerOutput:
        """Wait for the result of the oldest step, with a time limit: only the limit reveals a worker that hangs.

        A time in which this process itself was stopped, as with its whole node, does not count: the worker was, too.

        Raises:
            EngineCrashedError: the step took longer than its limit.
        """
        limit_s, named = self._limit.of(plan)
        late: list[SchedulerOutput] = []
        silence = Silence(lambda: _give_up(plan, result, late), limit_s)
        try:  # asyncio.timeout costs three times as much in every step
            output = await result
        except asyncio.CancelledError as error:
            if not late or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise EngineCrashedError(f"A step has taken longer than {named}, {limit_s:g} s.") from error
        finally:
            silence.stop()
        self._limit.observe(plan, output)
        return output

    async def run(self) -> None:
        """Run steps while there is work, and wait otherwise. Ends only by cancellation or when the engine fails."""
        try:
            while True:
                while not self._in_flight and not self.scheduler.has_work:
                    await self._idle()
                await self.step()
                await asyncio.sleep(0)  # let clients run even if the worker is faster than this loop
        except EngineDiedError as error:
            reason = self._lost_by or error
            self._close(reason)
            raise reason from reason.__cause__
        except Exception as error:
            died = EngineCrashedError(f"The engine failed: {type(error).__name__}: {error}")
            self._close(died)
            raise died from error

    def _lose(self, error: EngineDiedError) -> None:
        """A worker is lost; what waits in ``step`` fails by itself."""
        self._lost_by = self._lost_by or error
        self._work.set()

    async def shutdown(self) -> None:
        """Stop the workers and close every outbox. ``run`` must have ended or been cancelled before."""
        self._close(EngineUnavailableError("The engine was shut down."))
        await self._executor.shutdown()

    async def _idle(self) -> None:
        self.scheduler.kv.check_idle()
        self._note_blocks()
        for client_id in self._outboxes:
            self._put_stats(client_id)
        if self._lost_by is None:
            self._work.clear()
        await self._work.wait()
        if self._lost_by is not None:
            raise self._lost_by

    def report(self, client_id: str) -> None:
        """Put a message without entries, as a sign that the engine lives."""
        if client_id in self._outboxes:
            self._outboxes[client_id].put(self._outputs(client_id))

    def _put_stats(self, client_id: str) -> None:
        if client_id in self._outboxes:
            self._outboxes[client_id].put_stats(self._outputs(client_id))

    def _outputs(
        self,
        client_id: str,
        errors: list[tuple[int, RayLMError]] | None = None,
        adapters: tuple[LoRAAdapter, ...] | None = None,
    ) -> EngineCoreOutputs:
        """A message without tokens."""
        stats = self.scheduler.stats(client_id)
        return EngineCoreOutputs(
            *([], [], [], [], [], [], []),
            stats,
            errors=errors or [],
            adapters=adapters,
            created=self._clock(),
            draining=self._draining,
        )

    @property
    def held_requests(self) -> int:
        """Number of open requests, or of those open when the engine ended."""
        now = len(self.scheduler.open_requests()) + len(self._grammars)
        return now if self._ended_by is None else self._ended_with

    def _check_alive(self) -> None:
        if self._ended_by is not None:
            raise self._ended_by

    def _close(self, error: RayLMError) -> None:
        self._ended_by = error
        open_requests = sum(len(self.scheduler.open_requests(client_id)) for client_id in self._outboxes)
        self._ended_with = open_requests + len(self._grammars)
        self._grammars.close()
        for outbox in self._outboxes.values():
            outbox.close(error)
        for _, result in self._in_flight:
            result.cancel()  # also marks an exception of the future as retrieved
        self._in_flight.clear()


def _give_up(plan: SchedulerOutput, result: asyncio.Future[ModelRunnerOutput], late: list[SchedulerOutput]) -> None:
    late.append(plan)
    result.cancel()
