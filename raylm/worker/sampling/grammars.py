"""Grammars: compiles grammars and computes slow masks on threads, while the worker runs steps."""

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
"""Masks of a grammar with a slower one are computed on a thread. For faster masks, waking a thread takes too long."""
QUICK_MASKS_S = 5e-3
"""Time in a step for masks that are not slow. The masks that remain are computed on the thread too."""
WAIT_S = 1e-3
"""Longest wait of a step for late masks."""
LONE_WAIT_S = 10e-3
"""Longest wait of a step for late masks if every draw of the step needs one."""


class Grammars:
    """Compiles grammars on one thread and computes slow masks on another, so that neither delays the other.

    The vocabulary is read in the background at start. The matchers of the last ``MAX_KEPT`` grammars are kept with
    their first mask, and copied in microseconds. The grammar server has checked every grammar before. A step waits for
    late masks only briefly; a row whose mask is still missing skips its draw in this step.
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self._kept: OrderedDict[str, AnswerMatcher] = OrderedDict()
        self._compiling = ThreadPoolExecutor(1, "raylm-grammar")
        self._masking = ThreadPoolExecutor(1, "raylm-masks")
        self._tokenizer: Future[LLTokenizer] | None = None
        if eos_token_ids:
            self._tokenizer = self._compiling.submit(_load, path, eos_token_ids, vocab_size)

    def prepare(self, grammar: str) -> None:
        """Compile a grammar, and return when it is compiled. A failure is reported by the rows that use the grammar."""
        self._compiling.submit(self._fresh, grammar).result()

    def start(self, grammar: str, tokens: list[int]) -> AnswerMatcher:
        """The matcher of a new row that has ``tokens`` already. The grammar is compiled now if it was not prepared."""
        answer = AnswerMatcher(self.vocab_size)
        if (fresh := self._kept.get(grammar)) is None:
            answer.coming = self._compiling.submit(lambda: answer.resume(self._fresh(grammar), tokens))
        elif tokens:
            answer.coming = self._masking.submit(answer.resume, fresh, tokens)
        else:
            answer.take(fresh)
        return answer

    def advance(self, answer: AnswerMatcher, token: int) -> None:
        """Append a token. A slow grammar starts computing the next mask at once, a fast one when it is needed."""
        answer.settle()
        answer.tokens.append(token)
        if answer.pace.slow:
            answer.coming = self._masking.submit(answer.follow)

    def ready(self, answers: list[AnswerMatcher], draws: int) -> list[bool]:
        """Which of the ``answers`` have their masks; the others are late. ``draws`` counts all draws of the step."""
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

    def _fresh(self, grammar: str) -> AnswerMatcher:
        """The kept matcher of a grammar, compiled if needed. Runs on the compiling thread, which alone changes them."""
        if grammar not in self._kept:
            fresh = AnswerMatcher(self.vocab_size)
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
    from raylm.grammar import load_tokenizer  # here on the thread: importing llguidance takes 50 ms

    return load_tokenizer(path, eos_token_ids, vocab_size)


@dataclass(slots=True)
class MaskPace:
    """Shared by all answers of a grammar: whether one of their masks took longer than ``SLOW_S``."""

    slow: bool = False


class AnswerMatcher:
    """The matcher of one answer, and the mask of its next token: one bit per token, [V / 32] int32.

    ``tokens`` are the tokens that the matcher has not consumed. ``coming`` is done when another thread has consumed
    them. A failure affects only this answer: its mask becomes empty.
    """

    def __init__(self, vocab_size: int) -> None:
        self.failed = self.over = False
        self.pace = MaskPace()
        self.tokens: list[int] = []
        self.coming: Future[None] | None = None
        self._matcher: LLMatcher | None = None
        self._mask: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), np.int32)

    def take(self, other: AnswerMatcher) -> None:
        """Copy the state of ``other``, which has consumed all its tokens."""
        self.failed, self.over, self.pace, self._mask = other.failed, other.over, other.pace, other._mask.copy()
        self._matcher = other._matcher.deep_copy() if other._matcher is not None else None

    def begin(self, compiled: Callable[[], LLMatcher]) -> None:
        """Take the matcher and compute the first mask."""
        try:
            self._matcher = compiled()
        except BaseException as error:
            self._fail(repr(error))
        self.follow()

    def resume(self, fresh: AnswerMatcher, tokens: list[int]) -> None:
        """Copy ``fresh``, and consume ``tokens``."""
        self.take(fresh)
        self.tokens = list(tokens)
        self.follow()

    def mask(self) -> NDArray[np.int32]:
        """The mask after all tokens. Waits for it, or computes it."""
        self.settle()
        if self.tokens:
            self.follow()
        return self._mask

    def forced(self) -> list[int]:
        """The next tokens if the grammar allows only one text; that text may have other tokenizations."""
        self.mask()
        if self._matcher is None or self.over:
            return []
        return self._matcher.compute_ff_tokens()

    def num_fitting(self, drafts: list[int]) -> int:
        """How many of the ``drafts`` the grammar allows in succession after all tokens."""
        self.mask()
        return 0 if self._matcher is None or self.over else self._matcher.validate_tokens(drafts)

    def behind(self, drafts: list[int]) -> Iterator[tuple[NDArray[np.int32], bool]]:
        """Yield (mask, whether the answer is complete) after each of the ``drafts``, which must fit the grammar."""
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
        """Wait for the other thread: only one thread at a time may use the matcher."""
        if self.coming is not None:
            self.coming.result()
            self.coming = None

    def follow(self) -> None:
        """Consume the tokens and compute the next mask."""
        tokens, self.tokens = self.tokens, []
        if self.failed or self._matcher is None:
            return
        started = time.thread_time()
        try:
            self._step(self._matcher, tokens)
        except BaseException as error:  # a panic in llguidance is not an Exception
            self._fail(repr(error))
        if time.thread_time() - started > SLOW_S:
            self.pace.slow = True

    def _step(self, matcher: LLMatcher, tokens: list[int]) -> None:
        if tokens and not (self.over or self._allows(tokens[0])):
            self._end()  # no token could be drawn, which has failed the sequence already
            return
        for token in tokens:
            if not matcher.is_stopped():
                matcher.consume_token(token)
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self.over = matcher.is_stopped()
        if matcher.is_error():
            self._fail(matcher.get_error())

    def _allows(self, token: int) -> bool:
        """Whether the mask allows a token."""
        return bool(self._mask[token >> 5] >> (token & 31) & 1)

    def _fail(self, reason: str) -> None:
        kind = _KIND_OF_ERROR.match(reason)[0]  # type: ignore[index]  # the rest may contain part of the answer
        logger.warning("a grammar failed: %s", kind, extra=about("grammar.failed"))
        self._end()

    def _end(self) -> None:
        self.failed, self.over, self._matcher = True, False, None
        self._mask[:] = 0
