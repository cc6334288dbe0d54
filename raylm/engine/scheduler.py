"""Scheduler: owns the EngineCore's sequences, their tokens, statuses and queues; decides what each step computes."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from raylm import logprob_columns
from raylm.config import SchedulerConfig
from raylm.engine.client_loads import ClientLoads
from raylm.engine.kv_cache_manager import KVCacheManager, Lookahead
from raylm.engine.outbox import ClientOutputs
from raylm.engine.queues import WaitingQueue
from raylm.engine.sequence import RequestState, Sequence, Status
from raylm.engine.step_budget import create_budget
from raylm.engine.step_plan import StepPlan
from raylm.engine.timelines.observer import Observer
from raylm.errors import InvalidRequestError, RayLMError
from raylm.messages import (
    Counters,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    EngineStats,
    ModelRunnerOutput,
    SchedulerOutput,
)
from raylm.metrics import STEP_TOKENS_BUCKETS


class Scheduler:
    """Lets every sequence catch up with its own tokens, step by step.

    There are no phases: a sequence has tokens known and tokens computed, and each step computes some of the
    difference within its budget. A long prompt, a prefix hit, a preempted sequence and the next token of a running
    one differ only in how large the difference is.

    Plans may be handed over before earlier ones have returned (``steps_in_flight``). A token that a step in flight
    will draw is counted in ``num_tokens``, and the worker feeds it to itself; draft tokens that it accepts beyond that
    one are counted when the step is seen.

    Nothing starves: the first of the running batch (by rank) is never preempted, and gets blocks as long as any other
    sequence has some; alone it always fits, as ``max_model_len`` is at most the pool.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, max_model_len: int, observer: Observer | None = None
    ) -> None:
        self.kv = kv
        self._observer = observer or Observer()
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(config.policy)
        self.counters = Counters()
        self.loads = ClientLoads()
        self._budget = create_budget(config)
        self._lookahead = Lookahead(kv, config.speculative_tokens)
        self._requests: dict[tuple[str, int], RequestState] = {}
        self._sequences: dict[int, Sequence] = {}
        self._finished: list[int] = []
        self._ids: Iterator[int] = count()  # in the order of arrival
        self._resumed: Iterator[int] = count(-(2**62))  # as if they had arrived before all others
        self._step = 0
        self._seen = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_steps(self) -> int:
        """Steps that were drawn up."""
        return self._step

    # ---------------------------------------------------------------- requests

    def add(self, client_id: str, request: EngineCoreRequest, adapter: int = 0, adapter_digest: str = "") -> None:
        """Let the first sequence of a request wait; the others start when it has computed the prompt they share.

        One that a lost engine began waits before those that begin here, with all of its sequences.

        Raises:
            RayLMError: it can never be served, or its key is taken.
        """
        if (client_id, request.key) in self._requests:
            raise RayLMError(f"A request with the key {request.key} is open already.")
        arrival = next(self._resumed if request.drawn else self._ids)
        state = RequestState.create(client_id, request, arrival, self.max_model_len, adapter, adapter_digest)
        self._requests[client_id, request.key] = state
        for seq in state.begin(self._ids):
            self._enqueue(seq)

    def abort(self, client_id: str, key: int) -> None:
        """End a request at once; unknown and finished ones are ignored."""
        if state := self._requests.get((client_id, key)):
            self._abort(state)

    def stop(self, client_id: str, key: int, index: int) -> None:
        """End one sequence of a request, the others go on; unknown and finished ones are ignored."""
        state = self._requests.get((client_id, key))
        for seq in [seq for seq in state.open if seq.index == index] if state else ():
            self._close(seq)

    def open_requests(self, client_id: str | None = None) -> list[tuple[str, int]]:
        """(client, key) of the open requests, of one client or of all."""
        return [name for name in self._requests if client_id is None or name[0] == client_id]

    def requests_of(self, adapter: int) -> list[tuple[str, int]]:
        """(client, key) of the open requests that use a LoRA adapter."""
        return [name for name, state in self._requests.items() if state.adapter == adapter]

    def snapshot(self) -> EngineSnapshot:
        """All that is held now; takes time in proportion to the pool."""
        sequences = list(self._sequences.values())
        return EngineSnapshot(
            stats=self.stats(),
            num_blocks=self.kv.pool.num_blocks,
            block_size=self.kv.block_size,
            request_ids=[seq.state.request.request_id for seq in sequences],
            indexes=[seq.index for seq in sequences],
            statuses=[seq.status.value for seq in sequences],
            num_tokens=[len(seq.token_ids) for seq in sequences],
            num_computed=[seq.num_computed for seq in sequences],
            block_ids=[self.kv.held_blocks(seq) for seq in sequences],
            cached=self.kv.pool.cached(),
        )

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput | None:
        """Draw up the next step: first what runs, then what waits; None if nothing can be computed now."""
        plan = StepPlan(self._budget.tokens(self.running), self._budget.places(self.running))
        self._schedule_running(plan)
        self._schedule_waiting(plan)
        if plan.empty:
            return None
        self._step += 1
        finished, self._finished = self._finished, []
        return plan.columns(self._step, finished)

    def _schedule_running(self, plan: StepPlan) -> None:
        plan.add_running(self.running, self._lookahead.reserve_every, self._reserve_blocks)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Strict head of line: all others wait behind the first one until the pool can hold it."""
        while plan.max_new > 0 and plan.tokens > 0 and self.waiting:
            seq = self.waiting.peek()
            if seq.resume_after > self._seen:
                return
            spare = len(self.running)  # a block for each to grow by: admitting more is paid back in preemptions
            cached = self.kv.admit(seq, spare, use_cache=not seq.reads_every_token)
            if cached is None:
                return
            self._start(seq, cached, plan)

    def _start(self, seq: Sequence, cached: int, plan: StepPlan) -> None:
        """Move a sequence from the queue to the running batch; ``cached`` of its tokens are computed."""
        self.waiting.remove(seq)
        insort(self.running, seq, key=self.waiting.rank)
        if seq.status is Status.WAITING:
            seq.num_cached = cached
            self.counters.prefix_queries += len(seq.token_ids)
            self.counters.prefix_hits += cached
        else:
            seq.next_check = len(seq.token_ids) + 1  # that it has caught up is told
        seq.status = Status.RUNNING
        self._observer.scheduled(seq, self._step + 1, cached)
        if seq.prompt_logprobs is not None:
            seq.prompt_logprobs = []
        seq.num_computed = cached
        self.loads.owe(seq, len(seq.token_ids) - cached - 1)
        plan.add_new(seq, self.kv.block_ids(seq))

    def _reserve_blocks(self, seq: Sequence, place: int, plan: StepPlan) -> bool:
        """Let the block table of ``seq``, the plan's next to decode, grow; preempt sequences behind it if need be.

        Without success the sequence sits this step out with its blocks; those before it may still preempt it.
        """
        num_tokens = self._lookahead.tokens_to_reserve(seq, len(self.running))
        while (blocks := self.kv.extend(seq, num_tokens)) is None:
            if place + 1 == len(self.running):
                return False
            victim = min(self.running[place + 1 :], key=self._cost_of_preemption)
            self._observer.preempted(victim, seq, self._step + 1)
            self._preempt(victim)
            plan.close()
        plan.grow(blocks)
        return True

    def _cost_of_preemption(self, seq: Sequence) -> tuple[int, int, int]:
        """Preempted first is the lowest class, then the sequence with the least wasted work, then the newest.

        Wasted are tokens that have to be computed again: none of a sequence whose last token is on its way.
        """
        rank = self.waiting.rank(seq)
        wasted = 0 if seq.num_tokens >= seq.limit else max(0, seq.num_computed - self.kv.num_shared_tokens(seq))
        return (-rank[0], wasted, -rank[1])

    def _preempt(self, seq: Sequence) -> None:
        """Take row and blocks from a sequence; it starts again, with all tokens, once those in flight are seen."""
        self._leave_batch(seq)
        seq.status = Status.PREEMPTED
        seq.num_computed = 0
        seq.resume_after = self._step
        self.waiting.push(seq)
        self.loads.owe(seq, len(seq.token_ids) - 1)
        self.counters.preemptions += 1

    # ---------------------------------------------------------------- update

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, EngineCoreOutputs]:
        """Take in what a step drew, in the order of the steps; returns the message to each client."""
        assert result.step == plan.step == self._seen + 1, (
            f"result {result.step} of step {plan.step} after {self._seen}"
        )
        self._seen = plan.step
        self._budget.observe(plan, result)
        outputs: defaultdict[str, ClientOutputs] = defaultdict(ClientOutputs)
        for seq_id, reason in result.failed:
            self._fail(seq_id, RayLMError(reason), outputs)
        for seq_id, reason in result.undrawable:
            self._fail(seq_id, InvalidRequestError(f"No token can be drawn: {reason}."), outputs)
        self._publish_chunks(plan)
        for seq_id, logprobs in result.prompt_logprobs:
            if (seq := self._sequences.get(seq_id)) and seq.prompt_logprobs is not None:
                seq.prompt_logprobs.append(logprobs)
        self._append_tokens(result, outputs)
        self._take_vectors(result, outputs)
        self.counters.drafted_tokens += result.drafted_tokens
        self._count_step(plan.num_tokens + result.drafted_tokens)
        stats, now = self.stats(), time.time()
        return {
            client_id: entry.columns(result, replace(stats, others=self.loads.others(client_id)), now)
            for client_id, entry in outputs.items()
        }

    def _count_step(self, num_tokens: int) -> None:
        if num_tokens:
            self.counters.step_tokens += num_tokens
            counts = list(self.counters.steps_by_tokens)
            counts[bisect_left(STEP_TOKENS_BUCKETS, num_tokens)] += 1
            self.counters.steps_by_tokens = tuple(counts)

    def stats(self) -> EngineStats:
        step_s, token_s = self._budget.speed
        return EngineStats(
            places=self._budget.places(self.running),
            step_s=step_s,
            token_s=token_s,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self.kv.usage,
            steps=self._seen,
            counters=replace(self.counters),
        )

    def _append_tokens(self, result: ModelRunnerOutput, outputs: defaultdict[str, ClientOutputs]) -> None:
        """Append each token to the sequence that drew it; what was drawn behind a sequence's end is dropped."""
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
                self._check_token(seq, token, entry)
        self.counters.generation_tokens += sum(len(entry.positions) for entry in outputs.values())

    def _drawn_by(self, result: ModelRunnerOutput) -> list[int]:
        """The sequence of each token; several of one sequence are accepted drafts, as a step counts on one."""
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

    def _check_token(self, seq: Sequence, token: int, outputs: ClientOutputs) -> None:
        """The token just appended is the first or the last one, or might end the sequence."""
        self._observer.drew(seq, self._seen)
        if len(seq.token_ids) == seq.num_prompt_tokens + 1:
            self._complete_prompt(seq, outputs)
        seq.next_check = seq.limit
        params = seq.state.request.params
        if token in seq.stop_ids and seq.num_generated > params.min_tokens:
            by_eos = token in seq.state.request.eos_token_ids and not params.ignore_eos
            outputs.finish("stop", None if by_eos else token)
            self._close(seq)
        elif len(seq.token_ids) >= seq.limit:
            outputs.finish("length", None)
            self._close(seq)

    def _complete_prompt(self, seq: Sequence, outputs: ClientOutputs) -> None:
        """The first token has come: the prompt's logprobs are whole, and the sequences that share it may start."""
        if seq.index == 0:
            self.counters.prompt_tokens += seq.num_prompt_tokens
        if seq.prompt_logprobs is not None:
            outputs.prompt_logprobs.append((seq.key, logprob_columns.join(seq.prompt_logprobs)))
            seq.prompt_logprobs = None
        for sibling in seq.state.fork(self._ids):
            self._enqueue(sibling)

    def _publish_chunks(self, plan: SchedulerOutput) -> None:
        """Let the prompts that this step computed be found; single tokens are published when they fill a block."""
        for row in range(plan.num_scheduled.count(1), len(plan.seq_ids)):
            if (seq := self._sequences.get(plan.seq_ids[row])) and seq.status is Status.RUNNING:
                computed = plan.num_computed[row] + plan.num_scheduled[row]
                self.kv.publish(seq, computed)
                self.loads.owe(seq, len(seq.token_ids) - computed - 1)

    # ---------------------------------------------------------------- ends

    def _enqueue(self, seq: Sequence) -> None:
        self._sequences[seq.id] = seq
        self.waiting.push(seq)
        self.loads.enter(seq)

    def _close(self, seq: Sequence) -> None:
        """End a sequence, and with the last one its request."""
        self._remove(seq)
        if not seq.state.open:
            del self._requests[seq.client_id, seq.key]

    def _fail(self, seq_id: int, error: RayLMError, outputs: defaultdict[str, ClientOutputs]) -> None:
        """End the whole request of a sequence; unless the client caused it, what was computed is not to be reused."""
        if seq := self._sequences.get(seq_id):
            self._abort(seq.state)
            if not isinstance(error, InvalidRequestError):
                self.kv.unpublish(seq)
            outputs[seq.client_id].errors.append((seq.key, error))

    def _abort(self, state: RequestState) -> None:
        for seq in list(state.open):
            self._remove(seq)
        del self._requests[state.client_id, state.request.key]

    def _remove(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._leave_batch(seq)
        else:
            self.waiting.remove(seq)
            self.kv.forget(seq)
        seq.status = Status.FINISHED
        self._observer.ended(seq, self._seen)
        seq.state.open.remove(seq)
        del self._sequences[seq.id]
        self.loads.leave(seq)

    def _leave_batch(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._finished.append(seq.id)
        self.kv.free(seq)
