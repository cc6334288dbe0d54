"""The phase of a sequence, from reasoning to answer, and the thinking budget that ends the reasoning."""

from __future__ import annotations

from enum import Enum

from raylm.messages import ReasoningTokenIds
from raylm.worker.arrays import Ints


class Phase(Enum):
    """The phase of a sequence. In CLOSING it draws the fixed text that models write after the end of reasoning."""

    BEGINNING = "beginning"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWERING = "answering"


class Progress:
    """Tracks one sequence's tokens from its reasoning to its answer. Without ``thinking`` it only answers.

    ``budget`` is the maximum number of reasoning tokens, None for no limit. ``forbidden`` are tokens that it must not
    draw during reasoning.
    """

    def __init__(self, thinking: ReasoningTokenIds | None, budget: int | None, forbidden: Ints) -> None:
        self._budget, self._num_thinking_tokens = budget, 0
        self.forbidden = forbidden
        self.phase = Phase.ANSWERING
        if thinking is not None:
            self.phase = Phase.THINKING if thinking.begun else Phase.BEGINNING
            self.start_token_id, self._end_token_id = thinking.start_token_id, thinking.end_token_id
            end = thinking.closing_token_ids.index(thinking.end_token_id) + 1
            self._end_token_ids = thinking.closing_token_ids[
                max(0, end - 1 - budget) if budget is not None else 0 : end
            ]
            self._closing = list(thinking.closing_token_ids[end:])

    def push(self, token: int) -> bool:
        """Add the next token. Returns whether it belongs to the answer."""
        if self.phase is Phase.BEGINNING:
            thinks = token == self.start_token_id
            self.phase = Phase.THINKING if thinks else Phase.ANSWERING
            return not thinks
        if self.phase is Phase.THINKING:
            self._num_thinking_tokens += 1
            if token == self._end_token_id:
                self.phase = Phase.CLOSING if self._closing else Phase.ANSWERING
            return False
        if self.phase is Phase.CLOSING:
            self._closing.pop(0)
            if not self._closing:
                self.phase = Phase.ANSWERING
            return False
        return True

    def next_token(self) -> int | None:
        """The only token that may come next, None if there is a choice."""
        if self.phase is Phase.CLOSING:
            return self._closing[0]
        if self.phase is not Phase.THINKING or self._budget is None:
            return None
        at = self._num_thinking_tokens - (self._budget - (len(self._end_token_ids) - 1))
        return self._end_token_ids[at] if at >= 0 else None
