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
    from raylm.grammar import load_tokenizer  # on the thread: importing llguidance takes 50 ms

    return load_tokenizer(path, eos_token_ids, vocab_size)


class AnswerRow:
    """One row: its reasoning, for which the grammar does not hold, and its matcher, once it is ready, if it has one."""

    def __init__(self, progress: Progress, future: Future[LLMatcher] | None) -> None:
        self.progress, self._future = progress, future

    @cached_property
    def matcher(self) -> LLMatcher | None:
        """The matcher behind the tokens so far; waits for it."""
        return None if self._future is None else self._future.result()

    @property
    def is_free(self) -> bool:
        """Whether any token may come from now on."""
        return self._future is None and self.progress.phase is Phase.ANSWERING

    def push(self, token: int) -> None:
        answers = self.progress.push(token)
        if answers and self.matcher is not None and not self.matcher.is_stopped():
            self.matcher.consume_token(token)


class StructuredOutputs(LogitsProcessor[AnswerRow]):
    """Gives -inf to every token after which the answer could not be completed any more; EOS is one of them.

    A row at the end of its grammar is left the end token alone, whatever else forbids it: so ``min_tokens`` that the
    grammar cannot fill are filled with it. A row whose reasoning may begin here may begin it, and cannot end within it.
    A row whose thinking budget is used up writes the end of its reasoning, token by token; if its answer has no
    grammar, it is let go of when that begins.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, grammars: Grammars | None) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._grammars = grammars
        self._masks = np.zeros((0, -(-vocab_size // 32)), np.int32)

    def state_of(self, new: NewSequence) -> AnswerRow | None:
        budget = new.params.thinking_token_budget if new.thinking else None
        if new.grammar is None and budget is None:
            return None
        progress = Progress(new.thinking, budget, self._possible(new.stop_token_ids if new.grammar is not None else ()))
        answer = [token for token in new.token_ids[new.num_prompt_tokens :] if progress.push(token)]
        future = None
        if new.grammar is not None:
            assert self._grammars is not None, "only the worker's own batch serves grammars"
            future = self._grammars.start(new.grammar, answer)
        state = AnswerRow(progress, future)
        return None if state.is_free else state

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        for row, token in self._owned_tokens(rows, token_ids):
            self.states[row].push(token)
            if self.states[row].is_free:
                self.remove(row)

    def reason(self, row: int) -> str | None:
        matcher = self.states[row].matcher if row in self.states else None
        return "the form asked of the answer became too complex to follow" if matcher and matcher.is_error() else None

    def apply(self, logits: torch.Tensor, positions: IntArray, rows: IntArray, batch: TokenColumns) -> None:
        """For rows that answer 10 to 40 µs a row for the mask, up to 80 µs to apply it to 152,000 logits."""
        answering: list[tuple[int, Progress, LLMatcher]] = []
        for position, row in zip(positions.tolist(), rows.tolist(), strict=True):
            progress = self.states[row].progress
            if progress.phase in (Phase.THINKING, Phase.CLOSING):
                if (token := progress.next_token()) is not None:
                    _leave(token, logits[position])
                elif progress.forbidden.size:
                    logits[position, torch.from_numpy(progress.forbidden).to(logits.device)] = -torch.inf
            elif (matcher := self.states[row].matcher) is not None:
                answering.append((position, progress, matcher))
        if not answering:
            return
        masks = self._fill(answering)
        forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
        forbid(logits, np.array([position for position, *_ in answering]), forbidden[:, : self.vocab_size])
        for position, _, matcher in answering:
            if matcher.is_stopped() and not matcher.is_error():
                assert self._grammars is not None
                _leave(self._grammars.eos_token_ids[0], logits[position])

    def _fill(self, answering: list[tuple[int, Progress, LLMatcher]]) -> NDArray[np.int32]:
        """The masks of these rows, a bit for each token: [R, V / 32]."""
        if len(self._masks) < len(answering):
            self._masks = np.zeros((2 * len(answering), self._masks.shape[1]), np.int32)
        masks = self._masks[: len(answering)]
        for mask, (_, progress, matcher) in zip(masks, answering, strict=True):
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error():
                logger.warning("a grammar cannot go on: %s", matcher.get_error()[:200])
                mask[:] = 0
            elif progress.phase is Phase.BEGINNING:
                start = progress.start_token_id
                mask.view(np.uint32)[start // 32] |= np.uint32(1 << start % 32)
        return masks


def _leave(token: int, logits: torch.Tensor) -> None:
    """Nothing but one token to draw from the ``logits`` [V] of a row."""
    logits.fill_(-torch.inf)
    logits[token] = 0.0


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
