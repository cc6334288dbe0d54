"""Fakes: a model whose next token is a function of the whole sequence, and a worker whose KV cache is Python objects.

For every slot of every KV block, the worker stores the token, its position and its prefix. It draws the next token from
the entries that it *reads* through the block table. So a wrong table, a block that is freed too early or a false prefix
hit gives a wrong answer, as with real attention.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from random import Random

from raylm.config import Config
from raylm.engine.model_executor import ModelExecutor
from raylm.errors import EngineDiedError, InvalidRequestError
from raylm.messages import Logprobs, ModelRunnerOutput, NewSequence, SchedulerOutput, WorkerInfo
from raylm.params import SamplingParams

Entry = tuple[int, int, int]
"""(token, position, fold of everything before it): the KV of one token."""


@dataclass(frozen=True)
class FakeModel:
    """Token ids from 0 to vocab_size - 1. About one token in ``eos_period`` is ``eos_token_id``."""

    vocab_size: int = 50
    eos_token_id: int = 0
    eos_period: int = 12

    def next_token(self, fold: int, seed: int, position: int) -> int:
        """The token at ``position``, drawn after the prefix that folds to ``fold``."""
        if hash((position, fold, seed)) % self.eos_period == 0:
            return self.eos_token_id
        return 1 + hash((fold, position, seed)) % (self.vocab_size - 1)

    def continuation(self, prompt: list[int], seed: int, count: int, adapter: str = "") -> list[int]:
        """The first ``count`` tokens after a prompt, including EOS. This reference has no blocks and no batches."""
        fold, tokens = begin(adapter), list(prompt)
        for position in range(len(prompt) + count - 1):
            fold = read(fold, write(fold, tokens[position], position))
            if position >= len(prompt) - 1:
                tokens.append(self.next_token(fold, seed, position + 1))
        return tokens[len(prompt) :]


def begin(adapter: str) -> int:
    """The initial fold of a sequence, from the path of its adapter. Every KV entry depends on it."""
    return hash(adapter) if adapter else 0


def write(fold: int, token: int, position: int) -> Entry:
    """The KV entry of a token that attends to a prefix."""
    return (token, position, hash((fold, token, position)))


def read(fold: int, entry: Entry) -> int:
    """Attend to one more entry."""
    return hash((fold, entry))


@dataclass
class Row:
    """The worker's state of one sequence."""

    new: NewSequence
    tokens: list[int]
    block_ids: list[int]
    computed: int | None = None
    deferred: bool = False


@dataclass
class FakeWorker:
    """A worker without a model. It checks every plan as a real worker relies on it, and runs the plan at once.

    A sequence that contains the token ``poison`` fails, as if its logits were not finite. With ``speculative_tokens``
    the worker drafts up to that many tokens of a decoding sequence; ``luck`` decides how many are right. A sequence
    with a grammar has no drafts, and defers its draw with the probability ``lateness``. When a step is planned, the
    results of at most ``unseen_steps`` steps are unknown.
    """

    num_blocks: int = 64
    block_size: int = 16
    max_model_len: int = 256
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    poison: int | None = None
    speculative_tokens: int = 0
    lateness: float = 0.0
    unseen_steps: int = 3
    luck: Random = field(default_factory=lambda: Random(0))
    model: FakeModel = field(default_factory=FakeModel)
    kv: dict[tuple[int, int], Entry] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=lambda: {0: ""})
    grammars: list[str] = field(default_factory=list)
    last_step: int = 0
    tokens_computed: int = 0
    tokens_accepted: int = 0

    @classmethod
    def from_config(cls, config: Config) -> FakeWorker:
        """Create the worker as LocalExecutor does."""
        return cls(
            num_blocks=config.cache.num_blocks or 64,
            block_size=config.cache.block_size or 16,
            max_model_len=config.max_model_len or 256,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            speculative_tokens=config.scheduler.speculative_tokens,
        )

    def start(self) -> WorkerInfo:
        """The information that a real worker finds out at start."""
        return WorkerInfo(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            device="cpu",
            dtype="text",
            attention_backend="fake",
            threads=1,
            weights_bytes=0,
            kv_cache_bytes=0,
        )

    def open_link(self, node_id: str) -> None:
        """Does nothing: as a Ray actor, this worker takes steps only as Ray calls, like a worker on another node."""

    def prepare_grammar(self, grammar: str) -> None:
        """Record that ``grammar`` was compiled. Refuse a grammar that begins with "bad"."""
        if grammar.startswith("bad"):
            raise InvalidRequestError("The grammar cannot be compiled.", param="structured_outputs")
        self.grammars.append(grammar)

    def load_adapter(self, adapter: int, path: str) -> str:
        """Load an adapter. Refuse a path that begins with "bad". The digest of its content is the path."""
        if path.startswith("bad"):
            raise InvalidRequestError(f"The adapter {path!r} cannot be served.", param="lora_path")
        assert adapter not in self.adapters, "an adapter number is used twice"
        self.adapters[adapter] = path
        return path

    def unload_adapter(self, adapter: int) -> None:
        """Forget an adapter. A later step that uses it fails."""
        del self.adapters[adapter]

    def shutdown(self) -> None:
        """Nothing to free."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: remove rows, add rows, extend block tables, compute and draw tokens."""
        assert plan.step == self.last_step + 1, f"step {plan.step} after {self.last_step}"
        self.last_step = plan.step
        self._check_columns(plan)
        for seq_id in plan.finished:
            del self.rows[seq_id]
        for new in plan.new:
            assert new.seq_id not in self.rows, f"sequence {new.seq_id} has a row already"
            assert new.seq_id in plan.seq_ids, "a new sequence must be scheduled in the same step"
            self.rows[new.seq_id] = Row(new, list(new.token_ids), list(new.block_ids))
        assert len(self.rows) <= self.max_num_seqs, f"{len(self.rows)} rows"
        self._extend_tables(plan)
        return self._compute(plan)

    def _check_columns(self, plan: SchedulerOutput) -> None:
        count = len(plan.seq_ids)
        columns = (plan.num_computed, plan.num_scheduled, plan.samples, plan.new_block_counts)
        assert count > 0, "an empty plan"
        assert all(len(column) == count for column in columns), "columns of different length"
        assert len(set(plan.seq_ids)) == count, "a sequence is scheduled twice"
        assert sum(plan.new_block_counts) == len(plan.new_block_ids)
        assert min(plan.num_scheduled) >= 1
        assert plan.num_scheduled.count(1) == next((i for i, n in enumerate(plan.num_scheduled) if n > 1), count)
        assert plan.num_tokens <= self.max_num_batched_tokens, f"{plan.num_tokens} tokens in a step"

    def _extend_tables(self, plan: SchedulerOutput) -> None:
        start, new = 0, {new.seq_id for new in plan.new}
        for seq_id, count in zip(plan.seq_ids, plan.new_block_counts, strict=True):
            assert count == 0 or seq_id not in new, "a new sequence comes with its whole block table"
            self.rows[seq_id].block_ids += plan.new_block_ids[start : start + count]
            start += count

    def _compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput(plan.step, [], [], [], Logprobs([], [], [], []))
        drafted = 0
        columns = zip(plan.seq_ids, plan.num_computed, plan.num_scheduled, plan.samples, strict=True)
        joined = {new.seq_id: place for place, new in enumerate(plan.new)}
        # A new sequence may read blocks that rows before it in ``plan.new``, or older rows, write in this step.
        for seq_id, computed, count, samples in sorted(columns, key=lambda row: joined.get(row[0], -1)):
            row = self.rows[seq_id]
            if (self.speculative_tokens or self.lateness) and samples and count == 1:
                computed = self._where_it_is(row, computed)
            if len(row.tokens) == row.new.limit:
                assert self.speculative_tokens, "a token beyond the limit"
                continue
            end = computed + count
            assert samples == (end == len(row.tokens)), f"sequence {seq_id}: {end} of {len(row.tokens)}, {samples=}"
            assert computed == row.computed or row.computed is None, (
                f"{row.computed} tokens are computed, not {computed}"
            )
            row.computed = end
            fold = self._forward(row, computed, end)
            self.tokens_computed += count
            if self.poison in row.tokens:
                result.failed.append((seq_id, "logits are not finite"))
                row.tokens += [self.poison or 0] * samples  # the next step is in flight and expects a token
                continue
            late = samples and row.new.grammar is not None and self.luck.random() < self.lateness
            tells = row.new.params.prompt_logprobs is not None and not row.deferred
            if tells and computed < row.new.num_prompt_tokens:
                result.prompt_logprobs.append((seq_id, _prompt_logprobs(row, computed, end)))
            if samples and row.new.pooling is not None:
                result.pooled.append((seq_id, struct.pack("qq", fold, end)))
            elif late:
                row.computed, row.deferred = end - 1, True
                result.deferred.append(seq_id)
            elif samples:
                may_guess = count == 1 and row.new.grammar is None
                guesses = self._guesses(row, plan.num_tokens + drafted) if may_guess else 0
                drafted += guesses
                self._draw(row, seq_id, self._verify(row, fold, guesses), result)
        logprobs = result.logprobs if result.logprobs and any(result.logprobs.counts) else None
        return replace(result, logprobs=logprobs, drafted_tokens=drafted)

    def _where_it_is(self, row: Row, computed: int) -> int:
        """The number of tokens computed of a decoding sequence. The plan may not know the results of some steps."""
        here = len(row.tokens) - 1
        most, least = (
            4 * self.speculative_tokens,
            -self.unseen_steps if self.lateness and row.new.grammar is not None else 0,
        )
        assert least <= here - computed <= most, f"{here} tokens are computed, not {computed}"
        return here

    def _guesses(self, row: Row, tokens: int) -> int:
        """The number of drafts: random, within the sequence's blocks, its limit and the token budget of the step."""
        known = len(row.tokens)
        room = min(
            self.speculative_tokens,
            row.new.limit - known - 1,
            len(row.block_ids) * self.block_size - known,
            self.max_num_batched_tokens - tokens,
        )
        return self.luck.randint(0, room) if room > 0 else 0

    def _verify(self, row: Row, fold: int, guesses: int) -> list[int]:
        """Draw after ``fold``, then after each right draft. Entries written behind a wrong draft are invalid."""
        right, position = self.luck.randint(0, guesses), len(row.tokens)
        drawn = [self.model.next_token(fold, row.new.seed, position)]
        for guess in range(guesses):
            token = drawn[-1] if guess < right else drawn[-1] + 1
            slot = (row.block_ids[position // self.block_size], position % self.block_size)
            self.kv[slot] = write(fold, token, position)
            fold, position = read(fold, self.kv[slot]), position + 1
            if guess < right:
                drawn.append(self.model.next_token(fold, row.new.seed, position))
        return drawn

    def _draw(self, row: Row, seq_id: int, drawn: list[int], result: ModelRunnerOutput) -> None:
        row.tokens += drawn
        row.computed = len(row.tokens) - 1
        self.tokens_accepted += len(drawn) - 1
        result.seq_ids.append(seq_id)
        result.token_counts.append(len(drawn))
        result.token_ids.extend(drawn)
        for token in drawn:
            assert result.logprobs is not None
            _append_logprobs(result.logprobs, token, row.new.params)

    def _forward(self, row: Row, computed: int, end: int) -> int:
        """Read the computed entries, write the new ones. Returns the fold over all entries."""
        assert end <= len(row.tokens), "an unknown token is computed"
        longest = min(self.max_model_len, row.new.num_prompt_tokens + (row.new.params.max_tokens or self.max_model_len))
        assert end < longest + (row.new.pooling is not None), (
            f"{end} of at most {longest} tokens, the last is never computed"
        )
        assert end <= len(row.block_ids) * self.block_size, "the block table is too short"
        fold = begin(self.adapters[row.new.adapter])
        for position in range(end):
            slot = (row.block_ids[position // self.block_size], position % self.block_size)
            if position >= computed:
                assert 0 <= slot[0] < self.num_blocks
                self.kv[slot] = write(fold, row.tokens[position], position)
            assert slot in self.kv, f"position {position} of sequence {row.new.seq_id} was never computed"
            fold = read(fold, self.kv[slot])
        return fold


def _append_logprobs(logprobs: Logprobs, token: int, params: SamplingParams) -> None:
    """Append the token itself with logprob -token, then ``params.logprobs`` others. The value shows the token."""
    count = 0 if params.logprobs is None else 1 + params.logprobs
    logprobs.counts.append(count)
    logprobs.token_ids.extend([token, *range(1000, 1000 + count - 1)][:count])
    logprobs.logprobs.extend([-float(token)] * count)
    logprobs.ranks.append(min(count, 1))


def _prompt_logprobs(row: Row, computed: int, end: int) -> Logprobs:
    """Entries for the computed prompt positions. The first token of the prompt has none."""
    whole = Logprobs([], [], [], [])
    for position in range(computed, min(end, row.new.num_prompt_tokens)):
        empty = SamplingParams(logprobs=row.new.params.prompt_logprobs if position else None)
        _append_logprobs(whole, row.tokens[position], empty)
    return whole


class FakeExecutor(ModelExecutor):
    """Runs a FakeWorker in this process. The result of a step comes ``delay_s`` seconds after the result before it.

    ``die`` loses the worker: every step in flight and every later step fails. At step ``die_at_step`` the worker dies
    by itself.
    """

    def __init__(self, worker: FakeWorker | None = None, delay_s: float = 0.0, die_at_step: int | None = None) -> None:
        self.worker = worker or FakeWorker()
        self.most_in_flight = 0
        self.shut_down = False
        self._delay_s = delay_s
        self._die_at_step = die_at_step
        self._dead = False
        self._in_flight = 0
        self._turn = asyncio.Lock()

    async def start(self) -> WorkerInfo:
        """Start the fake worker."""
        return self.worker.start()

    def execute(self, plan: SchedulerOutput) -> Awaitable[ModelRunnerOutput]:
        """Run the step now, and return its result later."""
        if plan.step == self._die_at_step:
            self.die()
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        result = None if self._dead else self.worker.execute(plan)
        return asyncio.ensure_future(self._give(result))

    async def prepare_grammar(self, grammar: str) -> None:
        """Compile the grammar after a delay, in which other tasks can run."""
        await asyncio.sleep(self._delay_s)
        self.worker.prepare_grammar(grammar)

    async def load_adapter(self, adapter: int, path: str) -> str:
        """Load the adapter after a delay, in which other tasks can run."""
        await asyncio.sleep(self._delay_s)
        return self.worker.load_adapter(adapter, path)

    async def unload_adapter(self, adapter: int) -> None:
        """Unload the adapter immediately."""
        self.worker.unload_adapter(adapter)

    def die(self) -> None:
        """Lose the worker."""
        self._dead = True

    async def shutdown(self) -> None:
        """Record the call."""
        self.shut_down = True

    async def _give(self, result: ModelRunnerOutput | None) -> ModelRunnerOutput:
        async with self._turn:
            await asyncio.sleep(self._delay_s)
        self._in_flight -= 1
        if self._dead or result is None:
            raise EngineDiedError("The worker is gone.")
        return result
