"""InputBatch: one row per sequence. The runner and the sampler read its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raylm.messages import NewSequence
from raylm.worker.arrays import IntArray, Ints, Mask, ragged
from raylm.worker.sampling.grammars import Grammars
from raylm.worker.sampling.logits_processors import LOGITS_PROCESSORS, LogitsProcessor
from raylm.worker.sampling.structured_outputs import StructuredOutputsProcessor

SAMPLING_DTYPE = np.dtype(
    {
        "names": ["temperature", "top_p", "min_p", "top_k", "seed", "logprobs"],
        "formats": [np.float64] * 3 + [np.int64] * 3,
    }
)
NO_LOGPROBS = -1


class InputBatch:
    """The state of every sequence in the worker, as columns over rows. A preemption is a remove and an add.

    A sequence keeps its row from ``add`` to ``remove``. Free rows hold stale values. Columns, all numpy on the host:
        token_ids          [max_num_seqs, max_model_len] int32, valid up to num_tokens
        num_tokens         [max_num_seqs] int32, known tokens of prompt and answer
        num_prompt_tokens  [max_num_seqs] int32
        block_tables       [max_num_seqs, ceil(max_model_len / block_size)] int32, valid up to num_blocks
        num_blocks         [max_num_seqs] int32
        limits             [max_num_seqs] int32, greatest length of the sequence in tokens
        sampling           [max_num_seqs] records of SAMPLING_DTYPE: temperature 0 is greedy, top_k is vocab_size when
                           off, logprobs is NO_LOGPROBS when not requested
    State that few sequences need (biases, masks, penalties) is in ``processors``, each of which owns its rows, and in
    ``logprob_token_ids`` by row. A worker that never ``draws``, because it has a stage before the last one, has no
    processors.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        *,
        draws: bool = True,
    ) -> None:
        self.vocab_size = vocab_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.limits = np.zeros(max_num_seqs, np.int32)
        self.sampling = np.zeros(max_num_seqs, SAMPLING_DTYPE)
        self.structured = StructuredOutputsProcessor(max_num_seqs, vocab_size, grammars)
        self.processors: tuple[LogitsProcessor[Any], ...] = ()
        if draws:
            self.processors = (*(kind(max_num_seqs, vocab_size) for kind in LOGITS_PROCESSORS), self.structured)
        self._grammars = grammars if draws else None
        self.logprob_token_ids: dict[int, Ints] = {}
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def add(self, new: NewSequence) -> int:
        """Assign a row to the sequence and fill it. An error changes nothing.

        Raises:
            InvalidRequestError: a token id of its parameters is outside the vocabulary.
            RuntimeError: the sequence has a row already, all rows are taken, or it does not fit in a row.
        """
        if new.seq_id in self._row_of:
            raise RuntimeError(f"sequence {new.seq_id} has a row already")
        if not self._free_rows:
            raise RuntimeError(f"all {len(self.num_tokens)} rows are taken")
        if len(new.token_ids) > self.token_ids.shape[1] or len(new.block_ids) > self.block_tables.shape[1]:
            raise RuntimeError(
                f"sequence {new.seq_id} has {len(new.token_ids)} tokens in {len(new.block_ids)} blocks; a row holds "
                f"{self.token_ids.shape[1]} in {self.block_tables.shape[1]}"
            )
        states = [processor.state_of(new) for processor in self.processors]
        row = self._row_of[new.seq_id] = self._free_rows.pop()
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.block_tables[row, : len(new.block_ids)] = new.block_ids
        self.num_blocks[row] = len(new.block_ids)
        self.limits[row] = min(new.limit, self.token_ids.shape[1])
        params = new.params
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        logprobs = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.sampling[row] = (params.temperature, params.top_p, params.min_p, top_k, new.seed, logprobs)
        if params.logprob_token_ids:
            self.logprob_token_ids[row] = np.array(params.logprob_token_ids, np.int64)
        for processor, state in zip(self.processors, states, strict=True):
            if state is not None:
                processor.add(row, state)
        return row

    def prepare_grammar(self, grammar: str) -> None:
        """Compile a grammar. Returns when it is compiled."""
        if self._grammars is not None:
            self._grammars.prepare(grammar)

    def remove(self, seq_id: int) -> None:
        row = self._row_of.pop(seq_id)
        self._free_rows.append(row)
        self.logprob_token_ids.pop(row, None)
        for processor in self.processors:
            processor.remove(row)

    def rows(self, seq_ids: Sequence[int]) -> Ints:
        return np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))

    def may_be_drawn_ahead(self, rows: IntArray) -> Mask:
        """Which of the distinct rows may draw several tokens at once, after drafts, [len(rows)]."""
        may = np.ones(len(rows), np.bool_)
        for processor in self._followers():
            owned = processor.owned(rows)
            may[owned] &= processor.follows_drafts(rows[owned])
        return may

    @property
    def has_followers(self) -> bool:
        """Whether a processor changes the logits of any row depending on the row's own tokens."""
        return bool(self._followers())

    def _followers(self) -> list[LogitsProcessor[Any]]:
        return [processor for processor in self.processors if processor.states and processor.follows_tokens]

    def append_blocks(
        self, rows: IntArray, counts: Sequence[int] | IntArray, block_ids: Sequence[int] | IntArray
    ) -> None:
        """Append blocks: ``counts[i]`` of the flat ``block_ids`` go to the table of ``rows[i]``. Rows are distinct."""
        if len(block_ids) == 0:
            return
        added = np.asarray(counts, np.int64)
        places, offsets = ragged(added)
        self.block_tables[rows[places], self.num_blocks[rows][places] + offsets] = block_ids
        self.num_blocks[rows] += added.astype(np.int32)

    def append_tokens(self, rows: IntArray, token_ids: IntArray, offsets: IntArray | int = 0) -> None:
        """Append a token to each of the rows, and tell the processors.

        A row may be repeated in succession; ``offsets`` then number its tokens from 0.
        """
        lengths = self.num_tokens[rows] + offsets
        self.token_ids[rows, lengths] = token_ids
        self.num_tokens[rows] = lengths + 1  # for a repeated row numpy keeps the last value
        for processor in self.processors:
            if processor.states:
                processor.append_tokens(rows, token_ids)
