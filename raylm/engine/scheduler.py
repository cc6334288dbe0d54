"""Scheduler: owns the sequences of an EngineCore and decides what each step computes."""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import count, islice

from raylm import logprob_columns
from raylm.config import SchedulerConfig
from raylm.engine.client_loads import ClientLoads
from raylm.engine.kv_cache_manager import KVCacheManager, Lookahead
from raylm.engine.outbox import ClientOutputs
from raylm.engine.parking import Parking
from raylm.engine.queues import create_queue
from raylm.engine.sequence import RequestState, Sequence, Status
from raylm.engine.snapshot import take_snapshot
from raylm.engine.stage_turns import StageTurns
from raylm.engine.step_budget import create_budget
from raylm.engine.step_plan import StepPlan
from raylm.engine.time_limits import TimeLimits
from raylm.engine.timelines.observer import Observer
from raylm.errors import InvalidRequestError, RayLMError
from raylm.messages import (
    Counters,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    EngineStats,
    ModelRunnerOutput,
    OtherClients,
    SchedulerOutput,
)

_MOST_GIVEN_UP = 256  # expired requests ended before one step; takes about 1 ms


class Scheduler:
    """Plans the steps of an engine: each sequence catches up with its own tokens.

    There are no phases for prefill and decode. A sequence has known tokens and computed tokens, and each step computes
    some of the difference within its budget. A long prompt, a prefix hit, a preempted sequence and a decoding sequence
    differ only in the size of this difference.

    Up to ``Config.steps_in_flight`` plans may be with the workers. ``num_tokens`` of a sequence includes the token that
    each step in flight will draw; the workers feed that token to their next step themselves. Accepted draft tokens
    beyond it are added when the result arrives. With several ``stages``, decoding sequences take turns (StageTurns).

    No sequence starves. The first running sequence (by rank) is never preempted, its prompt never yields, and it gets
    blocks as long as any other sequence holds some. Alone it always fits, because ``max_model_len`` is at most the size
    of the pool.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float] = time.time,
        observer: Observer | None = None,
        stages: int = 1,
    ) -> None:
        self.kv = kv
        self._observer = observer or Observer()
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.running: list[Sequence] = []
        self.clock = clock
        self.waiting = create_queue(config, self)
        self.counters = Counters()
        self.loads = ClientLoads()
        self.parking = Parking()
        self._budget = create_budget(config)
        self._lookahead = Lookahead(kv, config.speculative_tokens)
        self._requests: dict[str, dict[int, RequestState]] = {}  # by client and key
        self._sequences: dict[int, Sequence] = {}
        self._finished: list[int] = []
        self._given_up: list[tuple[str, int]] = []
        self._limits = TimeLimits()
        self._turns = StageTurns(stages)
        self._ids: Iterator[int] = count()  # sequence ids, in the order of arrival
        self._step = 0
        self._seen = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_steps(self) -> int:
        """Number of steps planned so far."""
        return self._step

    # ---------------------------------------------------------------- requests

    def add(self, client_id: str, request: EngineCoreRequest, adapter: int = 0, adapter_digest: str = "") -> None:
        """Queue the first sequence of a request. The others are queued when the first has computed the shared prompt.

        A request continued from a lost engine (``request.drawn``) is queued before new requests, with all of its
        sequences.

        Raises:
            RayLMError: the request can never be served, or a request with this key is open.
        """
        if self.is_open(client_id, request.key):
            raise RayLMError(f"A request with the key {request.key} is open already.")
        arrival = next(self._ids) - bool(request.drawn) * 2**62  # continued requests come before all new ones
        state = RequestState.create(client_id, request, arrival, self.max_model_len, adapter, adapter_digest)
        self._requests.setdefault(client_id, {})[request.key] = state
        self.parking.enter(state)
        for seq in state.begin(self._ids):
            self._enqueue(seq)

    def abort(self, client_id: str, key: int) -> None:
        """End a request immediately. Unknown and finished requests are ignored."""
        if state := self._requests.get(client_id, {}).get(key):
            self._abort(state)

    def stop(self, client_id: str, key: int, index: int) -> None:
        """End one sequence of a request; the others continue. Unknown and finished sequences are ignored."""
        state = self._requests.get(client_id, {}).get(key)
        for seq in [seq for seq in state.open if seq.index == index] if state else ():
            self._close(seq)

    def is_open(self, client_id: str, key: int) -> bool:
        return key in self._requests.get(client_id, ())

    def open_requests(self, client_id: str | None = None) -> list[tuple[str, int]]:
        """(client, key) of the open requests of one client, or of all clients if ``client_id`` is None."""
        clients = self._requests if client_id is None else (client_id,)
        return [(client, key) for client in clients for key in self._requests.get(client, ())]

    def requests_of(self, adapter: int) -> list[tuple[str, int]]:
        """(client, key) of the open requests that use a LoRA adapter."""
        return [
            (client_id, key)
            for client_id, states in self._requests.items()
            for key, state in states.items()
            if state.adapter == adapter
        ]

    def take_given_up(self) -> list[tuple[str, int]]:
        """(client, key) of the requests that ended since the last call because their time limit expired."""
        given_up, self._given_up = self._given_up, []
        return given_up

    # ---------------------------------------------------------------- forecasts, for the queue

    def now(self) -> float:
        return self.clock()

    def free_places(self) -> int:
        return self._budget.places(self.running)

    def cached_blocks(self, seq: Sequence) -> int:
        return self.kv.num_cached_blocks(seq)

    def first_token_s(self, seq: Sequence) -> float:
        tokens = len(seq.token_ids) - self.kv.num_cached_blocks(seq) * self.kv.block_size
        return self._budget.first_token_s(tokens)

    def snapshot(self) -> EngineSnapshot:
        return take_snapshot(self.stats(), self._sequences.values(), self.kv)

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step: running sequences first, then waiting ones, then prompts that yield.

        None if nothing can be computed now.
        """
        may_start = self._give_up()
        self._displace()
        plan = StepPlan(
            self._budget.tokens(self.running, shared=self.waiting.is_shared), self._budget.places(self.running)
        )
        yielding = self.waiting.yielding(islice(self.running, 1, None))
        self._schedule_running(plan, yielding)
        if may_start:
            self._schedule_waiting(plan)
        if yielding:
            self._schedule_yielding(plan, yielding)
            if may_start:
                self._schedule_waiting(plan)
        if plan.empty:
            return None
        self._step += 1
        finished, self._finished = self._finished, []
        columns = plan.columns(self._step, finished)
        self._turns.note(columns, self._sequences)
        return columns

    def _give_up(self) -> bool:
        """End the waiting requests whose time limit has expired. Returns False if more of them are left.

        Runs before the step is planned, so no plan contains their sequences.
        """
        now = self.clock()
        for _ in range(_MOST_GIVEN_UP):
            if (state := self._limits.first_over(now)) is None:
                return True
            self._given_up.append((state.client_id, state.request.key))
            self._abort(state)
        return False

    def _displace(self) -> None:
        """If no place is free, preempt a sequence if the policy gives its place to a waiting one."""
        if not self.waiting or self.free_places() or (found := self.waiting.displaced()) is None:
            return
        coming, those = found
        others = (seq for seq in those if seq is not self.running[0])
        victim = min(others, key=self._cost_of_preemption, default=None)
        if victim is not None and self.kv.fits(coming, victim, spare=2 * len(self.running)):
            self._observer.preempted(victim, coming, self._step + 1)
            self._preempt(victim)
            self.waiting.invite(coming)

    def _schedule_running(self, plan: StepPlan, yielding: Collection[Sequence]) -> None:
        turn = self._turns.next(self.running, self._step + 1, self._seen)
        for seq in plan.add_running(self.running, self._lookahead.reserve_every, self._reserve_blocks, turn, yielding):
            self.kv.publish(seq, seq.num_computed)

    def _schedule_yielding(self, plan: StepPlan, yielding: Collection[Sequence]) -> None:
        """Compute the prompts that yield with the tokens that are left."""
        for seq in yielding:
            if plan.tokens > 0 and seq.status is Status.RUNNING:
                plan.add_prompt(seq)
                self.kv.publish(seq, seq.num_computed)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Start waiting sequences in the order of the queue, as far as the budget and the pool allow."""
        while plan.max_new > 0 and plan.tokens > 0 and self.waiting:
            if not self._start_one(plan):
                return

    def _start_one(self, plan: StepPlan) -> bool:
        """Start one waiting sequence. Returns False if none can start."""
        spare = len(self.running)  # one free block for each running sequence to grow: fewer would cause preemptions
        for seq in self.waiting.candidates():
            if seq.resume_after > self._seen:
                return False
            cached = self.kv.admit(seq, spare, use_cache=not seq.reads_every_token)
            if cached is not None:
                self._start(seq, cached, plan)
                return True
        return False

    def _start(self, seq: Sequence, cached: int, plan: StepPlan) -> None:
        """Move a sequence from the queue to the running batch. The KV of ``cached`` of its tokens is cached."""
        self.waiting.start(seq, cached)
        self._limits.leave(seq.state)
        self._budget.join(seq)
        insort(self.running, seq, key=self.waiting.rank)
        if seq.status is Status.WAITING:
            self.counters.prefix_queries += len(seq.token_ids)
            self.counters.prefix_hits += cached
        seq.start(cached)
        self._observer.scheduled(seq, self._step + 1, cached)
        self.loads.owe(seq, len(seq.token_ids) - cached - 1)
        plan.add_new(seq, self.kv.block_ids(seq))
        self.kv.publish(seq, seq.num_computed)

    def _reserve_blocks(self, seq: Sequence, place: int, plan: StepPlan) -> bool:
        """Extend the block table of ``seq``, the next decoding row of the plan; preempt sequences after it if needed.

        Returns False if there are too few blocks: the sequence keeps its blocks and skips this step.
        """
        num_tokens = self._lookahead.tokens_to_reserve(seq, len(self.running))
        while (blocks := self.kv.extend(seq, num_tokens)) is None:
            victim = self._victim(seq, place)
            if victim is None:
                return False
            self._observer.preempted(victim, seq, self._step + 1)
            self._preempt(victim)
            plan.close()
        plan.grow(blocks)
        return True

    def _victim(self, seq: Sequence, place: int) -> Sequence | None:
        """The sequence after ``place`` that ``seq`` may preempt, or None.

        The first running sequence may preempt any other; another one only sequences of the same or a higher
        ``standing``.
        """
        if place + 1 == len(self.running):
            return None
        self.waiting.settle()
        victim = min(self.running[place + 1 :], key=self._cost_of_preemption)
        return victim if place == 0 or self.waiting.standing(victim) >= self.waiting.standing(seq) else None

    def _cost_of_preemption(self, seq: Sequence) -> tuple[float, int, int]:
        """Sort key of preemption, lowest first: the policy's ``standing``, then the least wasted work, then the newest.

        Wasted work is the number of tokens to compute again: 0 for a sequence whose last token is in flight.
        """
        wasted = 0 if seq.num_tokens >= seq.limit else max(0, seq.num_computed - self.kv.num_shared_tokens(seq))
        return (-self.waiting.standing(seq), wasted, -seq.state.arrival)

    def _preempt(self, seq: Sequence) -> None:
        """Take the row and the blocks from a sequence and queue it again.

        It restarts with all of its tokens when the results of the steps in flight have arrived.
        """
        self._leave_batch(seq)
        seq.status = Status.PREEMPTED
        seq.num_computed = 0
        seq.resume_after = self._step
        self.waiting.push(seq)
        self._limits.enter(seq.state)
        self.loads.owe(seq, len(seq.token_ids) - 1)
        self.counters.preemptions += 1

    # ---------------------------------------------------------------- update

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, EngineCoreOutputs]:
        """Apply the result of a step. Results must arrive in the order of the steps.

        Returns the message to each client.
        """
        assert result.step == plan.step == self._seen + 1, (
            f"result {result.step} of step {plan.step} after {self._seen}"
        )
        self._seen = plan.step
        self._budget.observe(plan, result)
        outputs: defaultdict[str, ClientOutputs] = defaultdict(ClientOutputs)
        for seq_id, reason in result.failed:
            self._fail(seq_id, RayLMError(reason), outputs)
        for seq_id, reason in result.undrawable:
            self._fail(seq_id, self._undrawable(seq_id, reason), outputs)
        self._count_chunks(plan)
        for seq_id in result.deferred:
            if seq_id in self._sequences:
                self._sequences[seq_id].defer()
        for seq_id, logprobs in result.prompt_logprobs:
            if (seq := self._sequences.get(seq_id)) and seq.prompt_logprobs is not None:
                seq.prompt_logprobs.append(logprobs)
        self._append_tokens(result, outputs)
        self._take_vectors(result, outputs)
        self.counters.drafted_tokens += result.drafted_tokens
        self.counters.count_step(plan.num_tokens + result.drafted_tokens)
        now = self.clock()
        return {client_id: entry.columns(result, self.stats(client_id), now) for client_id, entry in outputs.items()}

    def _undrawable(self, seq_id: int, reason: str) -> InvalidRequestError:
        """The error of a sequence whose parameters leave no token. It names the first parameter that may be why."""
        params = self._sequences[seq_id].state.request.params if seq_id in self._sequences else None
        names = ("allowed_token_ids", "bad_words", "min_tokens")
        param = next((name for name in names if getattr(params, name, None)), None)
        return InvalidRequestError(f"No token can be drawn: {reason}.", param=param)

    def stats(self, client_id: str | None = None) -> EngineStats:
        """The stats for a client. Without a client, ``others`` is empty."""
        step_s, token_s = self._budget.speed
        return EngineStats(
            places=self._budget.places(self.running),
            step_s=step_s,
            token_s=token_s,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self.kv.usage,
            steps=self._seen,
            counters=self.counters.copy(),
            others=OtherClients() if client_id is None else self.loads.others(client_id),
        )

    def _append_tokens(self, result: ModelRunnerOutput, outputs: defaultdict[str, ClientOutputs]) -> None:
        """Append each token to the sequence that drew it. Tokens of sequences that have ended are dropped."""
        drawn_by = map(self._sequences.get, self._drawn_by(result))
        for position, seq, token in zip(range(len(result.token_ids)), drawn_by, result.token_ids, strict=True):
            if seq is None:
                continue
            token_ids = seq.token_ids
            token_ids.append(token)
            entry = outputs[seq.client_id]
            entry.sequences.append(seq)
            entry.positions.append(position)
            if token in seq.stop_ids or len(token_ids) >= seq.next_check:
                self._check_token(seq, entry)
        self.counters.generation_tokens += sum(len(entry.positions) for entry in outputs.values())

    def _drawn_by(self, result: ModelRunnerOutput) -> list[int]:
        """The id of the sequence that drew each token. Counts accepted drafts: all but one of a sequence's tokens."""
        if len(result.token_ids) == len(result.seq_ids):
            return result.seq_ids
        for seq_id, drawn in zip(result.seq_ids, result.token_counts, strict=True):
            if seq := self._sequences.get(seq_id):
                seq.accept_drafts(drawn - 1)
                self.counters.accepted_tokens += drawn - 1
        return [seq_id for seq_id, drawn in zip(result.seq_ids, result.token_counts, strict=True) for _ in range(drawn)]

    def _take_vectors(self, result: ModelRunnerOutput, outputs: defaultdict[str, ClientOutputs]) -> None:
        for seq_id, vector in result.pooled:
            if seq := self._sequences.get(seq_id):
                self.counters.prompt_tokens += seq.num_prompt_tokens
                outputs[seq.client_id].pooled.append((seq.key, vector))
                self._close(seq)

    def _check_token(self, seq: Sequence, outputs: ClientOutputs) -> None:
        """Handle a token that is the first or last one of its sequence, or a stop token."""
        self._observer.drew(seq, self._seen)
        if len(seq.token_ids) == seq.num_prompt_tokens + 1:
            self._complete_prompt(seq, outputs)
        seq.next_check = seq.limit
        if (reasons := seq.ended_by) is not None:
            outputs.finish(*reasons)
            self._close(seq)

    def _complete_prompt(self, seq: Sequence, outputs: ClientOutputs) -> None:
        """Handle the first token: the prompt's logprobs are complete, and the sequences that share the prompt start."""
        if seq.index == 0:
            self.counters.prompt_tokens += seq.num_prompt_tokens
        if seq.prompt_logprobs is not None:
            outputs.prompt_logprobs.append((seq.key, logprob_columns.join(seq.prompt_logprobs)))
            seq.prompt_logprobs = None
        for sibling in seq.state.fork(self._ids):
            self._enqueue(sibling)

    def _count_chunks(self, plan: SchedulerOutput) -> None:
        """Subtract the prompt tokens that a step computed from the clients' loads."""
        for row in range(plan.num_scheduled.count(1), len(plan.seq_ids)):
            if (seq := self._sequences.get(plan.seq_ids[row])) and seq.status is Status.RUNNING:
                computed = plan.num_computed[row] + plan.num_scheduled[row]
                self.loads.owe(seq, len(seq.token_ids) - computed - 1)

    # ---------------------------------------------------------------- ends

    def _enqueue(self, seq: Sequence) -> None:
        self._sequences[seq.id] = seq
        self.waiting.push(seq)
        self._limits.enter(seq.state)
        self.loads.enter(seq)

    def _close(self, seq: Sequence) -> None:
        """End a sequence, and its request if this was the last open one."""
        self._remove(seq)
        if not seq.state.open:
            self._forget(seq.state, is_whole=True)

    def _fail(self, seq_id: int, error: RayLMError, outputs: defaultdict[str, ClientOutputs]) -> None:
        """End the whole request of a sequence with an error.

        Unless the client caused the error, the computed blocks are removed from the prefix cache.
        """
        if seq := self._sequences.get(seq_id):
            self.parking.forget(seq.state)
            self._abort(seq.state)
            if not isinstance(error, InvalidRequestError):
                self.kv.unpublish(seq)
            outputs[seq.client_id].errors.append((seq.key, error))

    def _abort(self, state: RequestState) -> None:
        for seq in list(state.open):
            self._remove(seq)
        self._forget(state, is_whole=False)

    def _forget(self, state: RequestState, *, is_whole: bool) -> None:
        self.parking.leave(state, is_whole=is_whole)
        requests = self._requests[state.client_id]
        del requests[state.request.key]
        if not requests:
            del self._requests[state.client_id]

    def _remove(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._leave_batch(seq)
        else:
            self.waiting.remove(seq)
            self._limits.leave(seq.state)
            self.kv.forget(seq)
        seq.status = Status.FINISHED
        self._observer.ended(seq, self._seen)
        self.parking.end(seq)
        seq.state.open.remove(seq)
        del self._sequences[seq.id]
        self.loads.leave(seq)

    def _leave_batch(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.waiting.leave(seq)
        self._budget.leave(seq)
        self._finished.append(seq.id)
        self.kv.free(seq)
