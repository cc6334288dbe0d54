"""Grammars: makes the matchers of a worker's rows beside its steps, and computes there the masks that take long."""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raylm.stages import about

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("raylm.worker")
_KIND_OF_ERROR = re.compile(r"[A-Za-z ]{0,60}")

MAX_KEPT = 256
SLOW_S = 1e-3
"""What takes longer is computed beside the next step; for less than that waking a thread takes too long."""
QUICK_MASKS_S = 5e-3
"""Of a step, for the masks that are not slow; those that are left are computed beside the next step too."""
WAIT_S = 1e-3
"""Of a step, for masks that are late."""
LONE_WAIT_S = 10e-3
"""The same if nothing is drawn without them."""


class Grammars:
    """Compiles on one thread and computes slow masks on another, so that neither stands in the other's way.

    The tokens are read beforehand, in the background; the matchers of the last ``MAX_KEPT`` grammars are kept with
    their first mask, and copied in microseconds. What is compiled here was proved by the grammar server. No step waits
    for long: a row whose mask is late by then sits it out.
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._compiling = ThreadPoolExecutor(1, "raylm-grammar")
        self._masking = ThreadPoolExecutor(1, "raylm-masks")
        self._tokenizer: Future[LLTokenizer] | None = None
        if eos_token_ids:
            self._tokenizer = self._compiling.submit(_load, path, eos_token_ids, vocab_size)

    def prepare(self, grammar: str) -> None:
        """Compile it, and return when that is done; a failure is that of the rows that use it."""
        self._compiling.submit(self._fresh, grammar).result()

    def start(self, grammar: str, tokens: list[int]) -> Answer:
        """The answer of a row, behind the ``tokens`` that it has; compiled now only if nobody prepared it."""
        answer = Answer(self.vocab_size)
        if (fresh := self._kept.get(grammar)) is None:
            answer.coming = self._compiling.submit(lambda: answer.resume(self._fresh(grammar), tokens))
        elif tokens:
            answer.coming = self._masking.submit(answer.resume, fresh, tokens)
        else:
            answer.take(fresh)
        return answer

    def advance(self, answer: Answer, token: int) -> None:
        """Hand over the next token; the mask behind it is computed when it is asked for, or, if slow, from now on."""
        answer.settle()
        answer.tokens.append(token)
        if answer.pace.slow:
            answer.coming = self._masking.submit(answer.follow)

    def ready(self, answers: list[Answer], draws: int) -> list[bool]:
        """Which of the ``answers`` have their masks, of a step with so many ``draws``; the others are late."""
        until = time.monotonic() + QUICK_MASKS_S
        for answer in answers:
            if answer.coming is None and answer.tokens:
                if time.monotonic() < until:
                    answer.follow()
                else:
                    answer.coming = self._masking.submit(answer.follow)
        if coming := [answer.coming for answer in answers if answer.coming is not None]:
            all_wait = len(coming) == draws
            wait(coming, LONE_WAIT_S if all_wait else WAIT_S, FIRST_COMPLETED if all_wait else ALL_COMPLETED)
        return [answer.coming is None or answer.coming.done() for answer in answers]

    def _fresh(self, grammar: str) -> Answer:
        """On the thread that compiles, which alone changes what is kept."""
        if grammar not in self._kept:
            fresh = Answer(self.vocab_size)
            fresh.begin(lambda: self._compile(grammar))
            self._kept[grammar] = fresh
        self._kept.move_to_end(grammar)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[grammar]

    def _compile(self, grammar: str) -> LLMatcher:
        from raylm.grammar import matcher

        assert self._tokenizer is not None, "the front end lets no grammar pass to a model without an end token"
        return matcher(self._tokenizer.result(), grammar)


def _load(path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> LLTokenizer:
    from raylm.grammar import load_tokenizer  # on the thread: importing llguidance takes 50 ms

    return load_tokenizer(path, eos_token_ids, vocab_size)


@dataclass(slots=True)
class Pace:
    """Of all answers of a grammar: whether one of their masks has taken longer than ``SLOW_S``."""

    slow: bool = False


class Answer:
    """One answer's matcher and the mask of its next token, a bit for each: [V / 32] int32.

    ``tokens`` are those that the matcher has not seen; ``coming`` ends when another thread is done with them. A failure
    is this answer's alone: its mask is empty.
    """

    def __init__(self, vocab_size: int) -> None:
        self.failed = self.over = False
        self.pace = Pace()
        self.tokens: list[int] = []
        self.coming: Future[None] | None = None
        self._matcher: LLMatcher | None = None
        self._mask: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), np.int32)

    def take(self, other: Answer) -> None:
        """Become what ``other`` is, which has seen all its tokens."""
        self.failed, self.over, self.pace, self._mask = other.failed, other.over, other.pace, other._mask.copy()
        self._matcher = other._matcher.deep_copy() if other._matcher is not None else None

    def begin(self, compiled: Callable[[], LLMatcher]) -> None:
        """Take the matcher and compute the first mask."""
        try:
            self._matcher = compiled()
        except BaseException as error:
            self._fail(repr(error))
        self.follow()

    def resume(self, fresh: Answer, tokens: list[int]) -> None:
        """Begin as ``fresh``, and see ``tokens``."""
        self.take(fresh)
        self.tokens = list(tokens)
        self.follow()

    def mask(self) -> NDArray[np.int32]:
        """The mask behind all tokens; waits for it, or computes it."""
        self.settle()
        if self.tokens:
            self.follow()
        return self._mask

    def forced(self) -> list[int]:
        """The tokens that must come behind all tokens, where there is no choice; they may be spelled otherwise."""
        self.mask()
        if self._matcher is None or self.over:
            return []
        return self._matcher.compute_ff_tokens()

    def num_fitting(self, drafts: list[int]) -> int:
        """How many of the ``drafts`` may come behind all tokens, one after the other."""
        self.mask()
        return 0 if self._matcher is None or self.over else self._matcher.validate_tokens(drafts)

    def behind(self, drafts: list[int]) -> Iterator[tuple[NDArray[np.int32], bool]]:
        """The mask behind each of the ``drafts``, which must fit, and whether the answer is over there."""
        if not drafts or self._matcher is None:
            return
        matcher = self._matcher.deep_copy()
        for token in drafts:
            if not matcher.is_stopped():
                matcher.consume_token(token)
            mask = np.zeros_like(self._mask)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            yield mask, matcher.is_stopped()

    def settle(self) -> None:
        """Wait for the other thread; one at a time may use the matcher."""
        if self.coming is not None:
            self.coming.result()
            self.coming = None

    def follow(self) -> None:
        """See the tokens and compute the mask behind them."""
        tokens, self.tokens = self.tokens, []
        if self.failed or self._matcher is None:
            return
        started = time.thread_time()
        try:
            self._step(self._matcher, tokens)
        except BaseException as error:  # a panic of llguidance is no Exception
            self._fail(repr(error))
        if time.thread_time() - started > SLOW_S:
            self.pace.slow = True

    def _step(self, matcher: LLMatcher, tokens: list[int]) -> None:
        for token in tokens:
            if not matcher.is_stopped():
                matcher.consume_token(token)
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self.over = matcher.is_stopped()
        if matcher.is_error():
            self._fail(matcher.get_error())

    def _fail(self, reason: str) -> None:
        kind = _KIND_OF_ERROR.match(reason)[0]  # type: ignore[index]  # what follows may be a part of the answer
        logger.warning("a grammar cannot go on: %s", kind, extra=about("grammar.failed"))
        self.failed, self.over, self._matcher = True, False, None
        self._mask[:] = 0
