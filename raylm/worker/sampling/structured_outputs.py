"""Structured outputs: matchers are made beside the steps, and mask what would break the form of an answer."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.messages import NewSequence
from raylm.worker.arrays import IntArray, Mask
from raylm.worker.sampling.logits_processors import LogitsProcessor, TokenColumns
from raylm.worker.sampling.thinking_budget import Phase, Progress

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("raylm.worker")

MAX_KEPT = 64


class Grammars:
    """Makes matchers, on a thread of its own while the step that needs them computes.

    The tokens are read beforehand, in the background; the matchers of the last ``MAX_KEPT`` grammars are kept before
    their first token, and copied in microseconds.
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self.eos_token_ids = eos_token_ids
        self._fresh = lru_cache(MAX_KEPT)(self._compile)
        self._thread = ThreadPoolExecutor(1, "raylm-grammar")
        self._tokenizer: Future[LLTokenizer] | None = None
        if eos_token_ids:
            self._tokenizer = self._thread.submit(_load, path, eos_token_ids, vocab_size)

    def start(self, grammar: str, answer: list[int]) -> Future[LLMatcher]:
        """A matcher behind the tokens of ``answer``."""
        return self._thread.submit(self._make, grammar, answer)

    def _compile(self, grammar: str) -> LLMatcher:
        from raylm.grammar import matcher

        assert self._tokenizer is not None, "the front end lets no grammar pass to a model without an end token"
        return matcher(self._tokenizer.result(), grammar)

    def _make(self, grammar: str, answer: list[int]) -> LLMatcher:
        found = self._fresh(grammar).deep_copy()
        for token in answer:
            if not found.is_stopped():
                found.consume_token(token)
        return found


def _load(path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> LLTokenizer:
    from raylm.grammar import load_tokenizer

    return load_tokenizer(path, eos_token_ids, vocab_size)


class GrammarRow:
    """One row: its matcher, once it is ready, and its reasoning, for which the grammar does not hold."""

    def __init__(self, future: Future[LLMatcher], progress: Progress | None) -> None:
        self._future, self.progress = future, progress

    @cached_property
    def matcher(self) -> LLMatcher:
        """The matcher behind the tokens so far; waits for it."""
        return self._future.result()

    @property
    def phase(self) -> Phase:
        return self.progress.phase if self.progress else Phase.ANSWERING

    def push(self, token: int) -> None:
        if self.progress is not None and not self.progress.push(token):
            return
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token)


class StructuredOutputs(LogitsProcessor[GrammarRow]):
    """Gives -inf to every token after which the answer could not be completed any more; EOS is one of them.

    A row at the end of its grammar is left the end token alone, whatever else forbids it: so ``min_tokens`` that the
    grammar cannot fill are filled with it. A row whose reasoning may begin here may begin it.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, grammars: Grammars | None) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._grammars = grammars
        self._masks = np.zeros((0, -(-vocab_size // 32)), np.int32)

    def state_of(self, new: NewSequence) -> GrammarRow | None:
        if new.grammar is None:
            return None
        assert self._grammars is not None, "only the worker's own batch serves grammars"
        progress = Progress(new.thinking) if new.thinking else None
        generated = new.token_ids[new.num_prompt_tokens :]
        answer = [token for token in generated if progress is None or progress.push(token)]
        return GrammarRow(self._grammars.start(new.grammar, answer), progress)

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        for row, token in self._owned_tokens(rows, token_ids):
            self.states[row].push(token)

    def reason(self, row: int) -> str | None:
        if row not in self.states or not self.states[row].matcher.is_error():
            return None
        return "the form asked of the answer became too complex to follow"

    def apply(self, logits: torch.Tensor, positions: IntArray, rows: IntArray, batch: TokenColumns) -> None:
        """Only rows that answer; 10 to 40 µs a row for the mask, up to 80 µs to apply it to 152,000 logits."""
        answering = [at for at, row in enumerate(rows.tolist()) if self.states[row].phase in _MASKED]
        if not answering:
            return
        masks = self._fill([self.states[int(rows[at])] for at in answering])
        forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        forbid(logits, positions[answering], forbidden[:, : self.vocab_size])
        for at in answering:
            matcher = self.states[int(rows[at])].matcher
            if matcher.is_stopped() and not matcher.is_error():
                assert self._grammars is not None
                logits[int(positions[at])] = -torch.inf
                logits[int(positions[at]), self._grammars.eos_token_ids[0]] = 0.0

    def _fill(self, states: list[GrammarRow]) -> NDArray[np.int32]:
        """The masks of these rows, a bit for each token: [R, V / 32]."""
        if len(self._masks) < len(states):
            self._masks = np.zeros((2 * len(states), self._masks.shape[1]), np.int32)
        masks = self._masks[: len(states)]
        for mask, state in zip(masks, states, strict=True):
            state.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if state.matcher.is_error():
                logger.warning("a grammar cannot go on: %s", state.matcher.get_error()[:200])
                mask[:] = 0
            elif state.progress is not None and state.phase is Phase.BEGINNING:
                start = state.progress.thinking.start_token_id
                mask.view(np.uint32)[start // 32] |= np.uint32(1 << start % 32)
        return masks


_MASKED = (Phase.BEGINNING, Phase.ANSWERING)


def forbid(logits: torch.Tensor, positions: IntArray, forbidden: Mask) -> None:
    """Give -inf to the ``forbidden`` tokens [R, V] of the rows of ``logits`` [S, V] at ``positions`` [R].

    On a CPU by numpy, which takes half of torch's time.
    """
    if logits.device.type == "cpu":
        host = logits.numpy()
        for position, row in zip(positions.tolist(), forbidden, strict=True):
            np.copyto(host[position], np.float32(-np.inf), where=row)
        return
    where = torch.from_numpy(positions).to(logits.device)
    logits[where] = logits[where].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
