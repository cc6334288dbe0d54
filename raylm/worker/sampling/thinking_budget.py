"""Where a sequence stands between its reasoning and its answer, and the thinking budget that ends the reasoning."""

from __future__ import annotations

from enum import Enum

import numpy as np
import torch

from raylm.messages import NewSequence, Thinking
from raylm.worker.arrays import IntArray, Ints
from raylm.worker.sampling.logits_processors import LogitsProcessor, TokenColumns


class Phase(Enum):
    """Between reasoning and answer a sequence closes: it writes what a model writes behind the end of its reasoning."""

    BEGINNING = "beginning"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWERING = "answering"


class Progress:
    """Follows one sequence's drawn tokens from its reasoning to its answer; ``closing`` tokens are still to come."""

    __slots__ = ("closing", "num_thinking_tokens", "phase", "thinking")

    def __init__(self, thinking: Thinking) -> None:
        self.thinking = thinking
        self.phase = Phase.THINKING if thinking.begun else Phase.BEGINNING
        self.num_thinking_tokens = 0
        end = thinking.closing_token_ids.index(thinking.end_token_id)
        self.closing = list(thinking.closing_token_ids[end + 1 :])

    def push(self, token: int) -> bool:
        """Take in the next token; whether it belongs to the answer."""
        if self.phase is Phase.BEGINNING:
            thinks = token == self.thinking.start_token_id
            self.phase = Phase.THINKING if thinks else Phase.ANSWERING
            return not thinks
        if self.phase is Phase.THINKING:
            self.num_thinking_tokens += 1
            if token == self.thinking.end_token_id:
                self.phase = Phase.CLOSING if self.closing else Phase.ANSWERING
            return False
        if self.phase is Phase.CLOSING:
            self.closing.pop(0)
            if not self.closing:
                self.phase = Phase.ANSWERING
            return False
        return True


class BudgetRow(Progress):
    """One row of ThinkingBudget, which knows the tokens that end its reasoning when the budget is used up."""

    __slots__ = ("_budget", "_end_token_ids", "_forbidden")

    def __init__(self, new: NewSequence, thinking: Thinking, forbidden: Ints) -> None:
        super().__init__(thinking)
        self._forbidden = forbidden
        ids = list(thinking.closing_token_ids)
        ids = ids[: ids.index(thinking.end_token_id) + 1]
        budget = new.params.thinking_token_budget
        self._end_token_ids = ids if budget is None else ids[max(0, len(ids) - 1 - budget) :]
        self._budget = budget

    def next_token(self) -> int | None:
        """The only token that may come now, None if there is a choice."""
        if self.phase is Phase.CLOSING:
            return self.closing[0]
        if self.phase is not Phase.THINKING or self._budget is None:
            return None
        at = self.num_thinking_tokens - (self._budget - (len(self._end_token_ids) - 1))
        return self._end_token_ids[at] if at >= 0 else None

    @property
    def forbidden(self) -> Ints:
        """Tokens that may not come now."""
        return self._forbidden if self.phase is Phase.THINKING else self._forbidden[:0]


class ThinkingBudget(LogitsProcessor[BudgetRow]):
    """Makes a sequence whose thinking budget is used up write the end of its reasoning, token by token.

    A sequence whose answer has a grammar cannot end within its reasoning, and begins its answer where a model does. A
    row is let go of when its answer begins.
    """

    def state_of(self, new: NewSequence) -> BudgetRow | None:
        if new.thinking is None or (new.params.thinking_token_budget is None and new.grammar is None):
            return None
        ends = self._possible(new.stop_token_ids) if new.grammar is not None else np.zeros(0, np.int64)
        state = BudgetRow(new, new.thinking, ends)
        for token in new.token_ids[new.num_prompt_tokens :]:
            state.push(token)
        return None if state.phase is Phase.ANSWERING else state

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        for row, token in self._owned_tokens(rows, token_ids):
            state = self.states[row]
            state.push(token)
            if state.phase is Phase.ANSWERING:
                self.remove(row)

    def apply(self, logits: torch.Tensor, positions: IntArray, rows: IntArray, batch: TokenColumns) -> None:
        for position, row in zip(positions.tolist(), rows.tolist(), strict=True):
            state = self.states[row]
            token = state.next_token()
            if token is not None:
                logits[position] = -torch.inf
                logits[position, token] = 0.0
            elif state.forbidden.size:
                logits[position, torch.from_numpy(state.forbidden).to(logits.device)] = -torch.inf
