"""Scheduler: owns the EngineCore's sequences, their tokens, statuses and queues; decides what each step computes."""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from raylm import logprob_columns
from raylm.config import SchedulerConfig
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.outbox import ClientOutputs
from raylm.engine.queues import create_queue
from raylm.engine.sequence import RequestState, Sequence, Status
from raylm.engine.step_budget import create_budget
from raylm.engine.step_plan import StepPlan
from raylm.errors import RayLMError
from raylm.messages import (
    Counters,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)


class Scheduler:
    """Lets every sequence catch up with its own tokens, step by step.

    There are no phases: a sequence has tokens known and tokens computed, and each step computes some of the
    difference within its budget. A long prompt, a prefix hit, a preempted sequence and the next token of a running
    one differ only in how large the difference is.

    Plans may be handed over before earlier ones have returned (``steps_in_flight``). A token that a step in flight
    will draw is counted in ``num_tokens``, and the worker feeds it to itself. A worker that speculates may draw more
    than that one; how many is known when the step is seen, and until then blocks are reserved for the most.

    Nothing starves or goes round in circles: the first of the running batch (by rank) is never preempted, and gets
    blocks as long as any other sequence has some; alone it always fits, as ``max_model_len`` is at most the pool.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, max_model_len: int) -> None:
        self.kv = kv
        self.max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self.running: list[Sequence] = []
        self.waiting = create_queue(config.policy)
        self.counters = Counters()
        self._max_num_seqs = config.max_num_seqs
        self._budget = create_budget(config)
        self._drafts = config.speculative_tokens
        self._requests: dict[tuple[str, int], RequestState] = {}
        self._sequences: dict[int, Sequence] = {}
        self._finished: list[int] = []
        self._ids: Iterator[int] = count()
        self._arrivals: Iterator[int] = count()
        self._step = 0
        self._seen = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return bool(self._requests)

    # ---------------------------------------------------------------- requests

    def add(self, client_id: str, request: EngineCoreRequest, adapter: int = 0) -> None:
        """Let the first sequence of a request wait; the others start when it has computed the prompt they share.

        Raises:
            ContextLengthError: the prompt leaves no room for a token.
            InvalidRequestError: the prompt is empty.
            RayLMError: the key is taken.
        """
        if (client_id, request.key) in self._requests:
            raise RayLMError(f"A request with the key {request.key} is open already.")
        state = RequestState.create(client_id, request, next(self._arrivals), self.max_model_len, adapter)
        first = state.sequence(next(self._ids), 0)
        self._requests[client_id, request.key] = state
        self._enqueue(first)

    def abort(self, client_id: str, key: int) -> None:
        """End a request at once, whatever state its sequences are in; unknown and finished ones are ignored."""
        state = self._requests.get((client_id, key))
        if state is not None:
            self._abort(state)

    def stop(self, client_id: str, key: int, index: int) -> None:
        """End one sequence of a request, the others go on; unknown and finished ones are ignored."""
        state = self._requests.get((client_id, key))
        for seq in state.open if state is not None else ():
            if seq.index == index:
                self._close(seq)
                return

    def open_requests(self, client_id: str | None = None) -> list[tuple[str, int]]:
        """(client, key) of the open requests, of one client or of all."""
        return [name for name in self._requests if client_id is None or name[0] == client_id]

    def requests_of(self, adapter: int) -> list[tuple[str, int]]:
        """(client, key) of the open requests that use a LoRA adapter."""
        return [name for name, state in self._requests.items() if state.adapter == adapter]

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> SchedulerOutput | None:
        """Draw up the next step: first who runs, then who waits; None if nobody can compute anything now."""
        plan = StepPlan(self._budget.tokens(self.running), self._max_num_seqs - len(self.running))
        self._schedule_running(plan)
        self._schedule_waiting(plan)
        if not plan.ids and not plan.chunks:
            return None
        self._step += 1
        finished, self._finished = self._finished, []
        return plan.columns(self._step, finished)

    def _schedule_running(self, plan: StepPlan) -> None:
        """Every running sequence in the order of its rank; a long one leaves a token for each that comes behind it."""
        block_size, ids, computed_column = self.kv.block_size, plan.ids, plan.computed
        speculating = self._drafts > 0
        for place, seq in enumerate(self.running):  # preemption takes sequences out behind ``place`` only
            computed, known = seq.num_computed, seq.num_tokens
            if known >= seq.limit or plan.tokens <= 0:
                continue
            if known - computed > 1:
                behind = len(self.running) - place - 1
                plan.add(seq, min(known - computed, max(1, plan.tokens - behind)))
            elif (computed % block_size and not speculating) or self._make_room(seq, place, plan):
                ids.append(seq.id)
                computed_column.append(computed)
                seq.num_computed = known
                seq.num_tokens = known + 1
                plan.tokens -= 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Strict head of line: whoever is first waits until there is room, and all others behind it."""
        while plan.seats > 0 and plan.tokens > 0 and self.waiting:
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
        seq.status = Status.RUNNING
        if seq.prompt_logprobs is not None:
            seq.prompt_logprobs = []
        seq.num_computed = cached
        plan.seats -= 1
        plan.new.append(seq.as_new(self.kv.block_ids(seq)))
        plan.add(seq, min(len(seq.token_ids) - cached, plan.tokens))

    def _make_room(self, seq: Sequence, place: int, plan: StepPlan) -> bool:
        """Let the block table of ``seq``, the plan's next row, hold a token more; preempt who is behind it if need be.

        With speculation it is one more than the worker may have by then, and if blocks abound, the guesses too.
        Without success the sequence keeps its blocks and sits this step out: it loses no work, and those before it
        may still preempt it.
        """
        wanted = self._wanted(seq) if self._drafts else seq.num_tokens
        while (blocks := self.kv.extend(seq, wanted)) is None:
            if place + 1 == len(self.running):
                return False
            self._preempt(min(self.running[place + 1 :], key=self._cost_of_preemption))
            plan.close()
        if blocks:
            plan.grown[len(plan.ids)] = blocks
        return True

    def _wanted(self, seq: Sequence) -> int:
        """Tokens that the block table of ``seq`` should hold in the next step; the limit's own is never computed."""
        drafts, capacity = self._drafts, self.kv.capacity(seq)
        longest = min(seq.longest(drafts), capacity + 1)  # the worker makes no guess that it has no block for
        abundant = self.kv.pool.num_free > len(self.running) + drafts // self.kv.block_size + 1
        return min(longest + drafts * abundant, seq.limit - 1)

    def _cost_of_preemption(self, seq: Sequence) -> tuple[int, int, int]:
        """Who is preempted first: the lowest class, then the one with the least wasted work, then the newest.

        Wasted are the tokens that have to be computed again. Those that other sequences hold too are not, nor
        anything of a sequence whose last token is on its way.
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
        self.counters.preemptions += 1

    # ---------------------------------------------------------------- update

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, EngineCoreOutputs]:
        """Take in what a step drew, in the order of the steps; returns what it means for each client."""
        assert result.step == plan.step == self._seen + 1, (
            f"result {result.step} of step {plan.step} after {self._seen}"
        )
        self._seen = plan.step
        self._budget.observe(plan, result)
        news: defaultdict[str, ClientOutputs] = defaultdict(ClientOutputs)
        for seq_id, reason in result.failed:
            self._fail(seq_id, reason, news)
        self._publish_chunks(plan)
        for seq_id, logprobs in result.prompt_logprobs:
            seq = self._sequences.get(seq_id)
            if seq is not None and seq.prompt_logprobs is not None:
                seq.prompt_logprobs.append(logprobs)
        if len(result.token_ids) == len(result.seq_ids):
            self._take_tokens(result, news)
        else:
            self._take_runs(result, news)
        self._take_vectors(result, news)
        self.counters.drafted_tokens += result.drafted_tokens
        stats, now = self.stats(), time.time()
        return {client_id: entry.columns(result, stats, now) for client_id, entry in news.items()}

    def stats(self) -> EngineStats:
        """The state as it is now."""
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self.kv.usage,
            steps=self._seen,
            counters=replace(self.counters),
        )

    def _take_tokens(self, result: ModelRunnerOutput, news: defaultdict[str, ClientOutputs]) -> None:
        """Append each drawn token to its sequence; those of sequences that are gone are the wasted step at an end."""
        sequences, taken = self._sequences, 0
        for position, (seq_id, token) in enumerate(zip(result.seq_ids, result.token_ids, strict=True)):
            seq = sequences.get(seq_id)
            if seq is None:
                continue
            taken += 1
            seq.token_ids.append(token)
            entry = news[seq.client_id]
            entry.sequences.append(seq)
            entry.positions.append(position)
            if token in seq.stop_ids or len(seq.token_ids) >= seq.milestone:
                self._reach_milestone(seq, token, entry)
        self.counters.generation_tokens += taken

    def _take_runs(self, result: ModelRunnerOutput, news: defaultdict[str, ClientOutputs]) -> None:
        """Append several tokens to a sequence, until one of them ends it: what was drawn behind that is dropped."""
        end = 0
        for seq_id, drawn in zip(result.seq_ids, result.token_counts, strict=True):
            start, end = end, end + drawn
            seq = self._sequences.get(seq_id)
            if seq is None:
                continue
            seq.catch_up(drawn - 1)
            before = len(seq.token_ids)
            entry = news[seq.client_id]
            entry.sequences.append(seq)
            for token in result.token_ids[start:end]:
                seq.token_ids.append(token)
                if token in seq.stop_ids or len(seq.token_ids) >= seq.milestone:
                    self._reach_milestone(seq, token, entry)
                if seq.status is Status.FINISHED:
                    break
            taken = len(seq.token_ids) - before
            entry.counts.append(taken)
            entry.positions.extend(range(start, start + taken))
            self.counters.generation_tokens += taken
            self.counters.accepted_tokens += drawn - 1

    def _take_vectors(self, result: ModelRunnerOutput, news: defaultdict[str, ClientOutputs]) -> None:
        """A prompt that came to a vector is at its end."""
        for seq_id, vector in result.pooled:
            seq = self._sequences.get(seq_id)
            if seq is not None:
                self.counters.prompt_tokens += seq.num_prompt_tokens
                news[seq.client_id].pooled.append((seq.key, vector))
                self._close(seq)

    def _reach_milestone(self, seq: Sequence, token: int, news: ClientOutputs) -> None:
        """The token just appended is the first one, or the last one, or might end the sequence."""
        if len(seq.token_ids) == seq.num_prompt_tokens + 1:
            self._complete_prompt(seq, news)
        seq.milestone = seq.limit
        params = seq.state.request.params
        if token in seq.stop_ids and seq.num_generated > params.min_tokens:
            by_eos = token in seq.state.request.eos_token_ids and not params.ignore_eos
            self._finish(seq, "stop", None if by_eos else token, news)
        elif len(seq.token_ids) >= seq.limit:
            self._finish(seq, "length", None, news)

    def _complete_prompt(self, seq: Sequence, news: ClientOutputs) -> None:
        """The first token has come: the prompt's logprobs are whole, and the sequences that share it may start."""
        if seq.index == 0:
            self.counters.prompt_tokens += seq.num_prompt_tokens
        if seq.prompt_logprobs is not None:
            news.prompt_logprobs.append((seq.key, logprob_columns.join(seq.prompt_logprobs)))
            seq.prompt_logprobs = None
        for sibling in seq.state.fork(self._ids):
            self._enqueue(sibling)

    def _publish_chunks(self, plan: SchedulerOutput) -> None:
        """Let the prompts that this step computed be found; single tokens are published when they fill a block."""
        for row in range(plan.num_scheduled.count(1), len(plan.seq_ids)):
            seq = self._sequences.get(plan.seq_ids[row])
            if seq is not None and seq.status is Status.RUNNING:
                self.kv.publish(seq, plan.num_computed[row] + plan.num_scheduled[row])

    # ---------------------------------------------------------------- ends

    def _enqueue(self, seq: Sequence) -> None:
        self._sequences[seq.id] = seq
        self.waiting.push(seq)

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | None, news: ClientOutputs) -> None:
        news.finish(reason, stop_reason)
        self._close(seq)

    def _close(self, seq: Sequence) -> None:
        """A sequence has come to its end, and its request with the last one."""
        self._remove(seq)
        if not seq.state.open:
            del self._requests[seq.client_id, seq.key]

    def _fail(self, seq_id: int, reason: str, news: defaultdict[str, ClientOutputs]) -> None:
        """End the whole request of a sequence with an error; what the sequence computed is not to be reused."""
        seq = self._sequences.get(seq_id)
        if seq is not None:
            self._abort(seq.state)
            self.kv.distrust(seq)
            news[seq.client_id].errors.append((seq.key, RayLMError(reason)))

    def _abort(self, state: RequestState) -> None:
        for seq in list(state.open):
            self._remove(seq)
        del self._requests[state.client_id, state.request.key]

    def _remove(self, seq: Sequence) -> None:
        """Take a sequence out of every table, whatever its status."""
        if seq.status is Status.RUNNING:
            self._leave_batch(seq)
        else:
            self.waiting.remove(seq)
            self.kv.forget(seq)
        seq.status = Status.FINISHED
        seq.state.open.remove(seq)
        del self._sequences[seq.id]

    def _leave_batch(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._finished.append(seq.id)
        self.kv.free(seq)
