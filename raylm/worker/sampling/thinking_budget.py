"""Worker: where a sequence stands between its thoughts and its answer, and the ThinkingBudget that ends thoughts."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

from raylm.messages import NewSequence, Thinking
from raylm.worker.sampling.logits_processors import IntArray, LogitsProcessor

if TYPE_CHECKING:
    from raylm.worker.input_batch import InputBatch


class Phase(Enum):
    """Where a sequence stands."""

    BEGINNING = "beginning"
    THINKING = "thinking"
    CLOSING = "closing"
    ANSWERING = "answering"


class Progress:
    """Follows one sequence's drawn tokens from its thoughts to its answer.

    Between both stand the ``closing`` tokens: those that a model writes behind the end of its thoughts.
    """

    __slots__ = ("closing", "num_thoughts", "phase", "thinking")

    def __init__(self, thinking: Thinking) -> None:
        self.thinking = thinking
        self.phase = Phase.THINKING if thinking.begun else Phase.BEGINNING
        self.num_thoughts = 0
        end = thinking.closing_token_ids.index(thinking.end_token_id)
        self.closing = list(thinking.closing_token_ids[end + 1 :])

    def push(self, token: int) -> bool:
        """Take in the next token; whether it belongs to the answer."""
        if self.phase is Phase.BEGINNING:
            thinks = token == self.thinking.start_token_id
            self.phase = Phase.THINKING if thinks else Phase.ANSWERING
            return not thinks
        if self.phase is Phase.THINKING:
            self.num_thoughts += 1
            if token == self.thinking.end_token_id:
                self.phase = Phase.CLOSING if self.closing else Phase.ANSWERING
            return False
        if self.phase is Phase.CLOSING:
            self.closing.pop(0)
            if not self.closing:
                self.phase = Phase.ANSWERING
            return False
        return True


class Thoughts:
    """One row of ThinkingBudget: its progress, and what it must draw instead of another thought."""

    __slots__ = ("_budget", "_forbidden", "_last_words", "progress")

    def __init__(
        self, new: NewSequence, thinking: Thinking, forbidden: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> None:
        self.progress = Progress(thinking)
        self._forbidden = forbidden
        words = list(thinking.closing_token_ids)
        words = words[: words.index(thinking.end_token_id) + 1]
        budget = new.params.thinking_token_budget
        self._last_words = words if budget is None else words[max(0, len(words) - 1 - budget) :]
        self._budget = budget

    def next_token(self) -> int | None:
        """The only token that may come now, None if there is a choice."""
        progress = self.progress
        if progress.phase is Phase.CLOSING:
            return progress.closing[0]
        if progress.phase is not Phase.THINKING or self._budget is None:
            return None
        said = progress.num_thoughts - (self._budget - (len(self._last_words) - 1))
        return self._last_words[said] if said >= 0 else None

    @property
    def forbidden(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Tokens that may not come now."""
        return self._forbidden if self.progress.phase is Phase.THINKING else self._forbidden[:0]


class ThinkingBudget(LogitsProcessor[Thoughts]):
    """Makes a sequence whose budget for thoughts is used up write the end of them, and nothing else, token by token.

    A sequence whose answer has a grammar cannot end within its thoughts, and begins its answer where a model does. A
    row is let go of when its answer begins.
    """

    def state_of(self, new: NewSequence) -> Thoughts | None:
        """The row's thoughts, if it has a budget or a grammar and has not begun its answer."""
        if new.thinking is None or (new.params.thinking_token_budget is None and new.grammar is None):
            return None
        ends = self._possible(new.stop_token_ids) if new.grammar is not None else np.zeros(0, np.int64)
        state = Thoughts(new, new.thinking, ends)
        for token in new.token_ids[new.num_prompt_tokens :]:
            state.progress.push(token)
        return None if state.progress.phase is Phase.ANSWERING else state

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Follow the owned rows."""
        for position in self.owned(rows).tolist():
            row = int(rows[position])
            self.states[row].progress.push(int(token_ids[position]))
            if self.states[row].progress.phase is Phase.ANSWERING:
                self.remove(row)

    def apply(self, logits: torch.Tensor, positions: IntArray, rows: IntArray, batch: InputBatch) -> None:
        """Leave the rows that have no choice their one token."""
        for position, row in zip(positions.tolist(), rows.tolist(), strict=True):
            state = self.states[row]
            token = state.next_token()
            if token is not None:
                logits[position] = -torch.inf
                logits[position, token] = 0.0
            elif state.forbidden.size:
                logits[position, torch.from_numpy(state.forbidden).to(logits.device)] = -torch.inf
