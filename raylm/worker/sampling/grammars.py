"""Grammars: makes the matchers of a worker's rows and computes their masks, on threads beside the forward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("raylm.worker")

MAX_KEPT = 256


class Grammars:
    """Compiles on one thread and computes masks on another, so that neither stands in the other's way.

    The tokens are read beforehand, in the background; the matchers of the last ``MAX_KEPT`` grammars are kept before
    their first token, and copied in microseconds. What is compiled here was proved by the grammar server.
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self._fresh = lru_cache(MAX_KEPT)(self._compile)
        self._compiling = ThreadPoolExecutor(1, "raylm-grammar")
        self._masking = ThreadPoolExecutor(1, "raylm-masks")
        self._tokenizer: Future[LLTokenizer] | None = None
        if eos_token_ids:
            self._tokenizer = self._compiling.submit(_load, path, eos_token_ids, vocab_size)

    def prepare(self, grammar: str) -> None:
        """Compile it, and return when that is done; a failure is that of the rows that use it."""
        with suppress(Exception):
            self._compiling.submit(self._fresh, grammar).result()

    def start(self, grammar: str, answer: list[int]) -> Answer:
        """The answer of a row, behind the tokens that it has; its first mask is on its way."""
        started = Answer(self._compiling.submit(lambda: self._fresh(grammar).deep_copy()), self.vocab_size)
        started.coming = self.submit(lambda: started.advance(answer))
        return started

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` on the thread of masks, in turn."""
        return self._masking.submit(work)

    def _compile(self, grammar: str) -> LLMatcher:
        from raylm.grammar import matcher

        assert self._tokenizer is not None, "the front end lets no grammar pass to a model without an end token"
        return matcher(self._tokenizer.result(), grammar)


def _load(path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> LLTokenizer:
    from raylm.grammar import load_tokenizer  # on the thread: importing llguidance takes 50 ms

    return load_tokenizer(path, eos_token_ids, vocab_size)


class Answer:
    """One row's matcher and the mask of its next token, a bit for each: [V / 32] int32.

    ``coming`` ends when ``mask`` is that of all tokens handed over. A failure is the row's alone: its mask is empty.
    """

    coming: Future[None]

    def __init__(self, made: Future[LLMatcher], vocab_size: int) -> None:
        self.mask: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), np.int32)
        self.failed = self.over = False
        self._made = made

    def advance(self, tokens: list[int]) -> None:
        """Take in more tokens and compute the next mask; on the thread of masks."""
        if self.failed:
            return
        try:
            self._follow(self._made.result(), tokens)
        except BaseException as error:  # a panic of llguidance is no Exception
            self._fail(repr(error))

    def _follow(self, matcher: LLMatcher, tokens: list[int]) -> None:
        for token in tokens:
            if not matcher.is_stopped():
                matcher.consume_token(token)
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
        self.over = matcher.is_stopped()
        if matcher.is_error():
            self._fail(matcher.get_error())

    def _fail(self, reason: str) -> None:
        logger.warning("a grammar cannot go on: %s", reason[:200])
        self.failed, self.over = True, False
        self.mask[:] = 0
