"""Structured outputs: masks tokens that would violate the form of an answer, and ends reasoning within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raylm.messages import NewSequence
from raylm.worker.arrays import IntArray, Ints, Mask
from raylm.worker.sampling.grammars import AnswerMatcher, Grammars
from raylm.worker.sampling.logits_processors import LogitsProcessor, TokenColumns
from raylm.worker.sampling.thinking_budget import Phase, Progress


@dataclass(slots=True)
class AnswerRow:
    """One row: its reasoning, which the grammar does not apply to, and its answer, if it has a grammar."""

    progress: Progress
    answer: AnswerMatcher | None

    @property
    def is_free(self) -> bool:
        """Whether any token may be drawn from now on."""
        return self.answer is None and self.progress.phase is Phase.ANSWERING


_NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Restriction:
    """The tokens that the row at ``position`` of a step may draw.

    These are the set bits of ``mask`` [V / 32], all tokens if it is None, without ``forbidden``. If ``only`` is set, it
    is the only token, even if another rule forbids it.
    """

    position: int
    mask: NDArray[np.int32] | None
    forbidden: Ints
    only: int | None


class StructuredOutputsProcessor(LogitsProcessor[AnswerRow]):
    """Sets tokens to -inf after which the answer could not be completed. EOS is such a token too.

    A row at the end of its grammar draws the end token, even if another rule forbids it. So if the grammar ends before
    ``min_tokens``, end tokens fill the rest. A row whose reasoning may begin may draw its start token. During reasoning
    it cannot draw stop tokens. A row whose thinking budget is used up draws the end of its reasoning, token by token.
    If its answer has no grammar, it is removed then.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, grammars: Grammars | None) -> None:
        super().__init__(max_num_seqs, vocab_size)
        self._grammars = grammars

    def state_of(self, new: NewSequence) -> AnswerRow | None:
        budget = new.params.thinking_token_budget if new.thinking else None
        if new.grammar is None and budget is None:
            return None
        progress = Progress(new.thinking, budget, self._possible(new.stop_token_ids if new.grammar is not None else ()))
        tokens = [token for token in new.token_ids[new.num_prompt_tokens :] if progress.push(token)]
        answer = None if new.grammar is None else self._used_grammars.start(new.grammar, tokens)
        state = AnswerRow(progress, answer)
        return None if state.is_free else state

    @property
    def _used_grammars(self) -> Grammars:
        assert self._grammars is not None, "only the worker's own batch serves grammars"
        return self._grammars

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        for row, token in self._owned_tokens(rows, token_ids):
            state = self.states[row]
            if state.progress.push(token) and state.answer is not None:
                self._used_grammars.advance(state.answer, token)
            if state.is_free:
                self.remove(row)

    def follows_drafts(self, rows: IntArray) -> Mask:
        """Rows in their answer whose masks are computed quickly."""
        states = [self.states[row] for row in rows.tolist()]
        may = [state.progress.phase is Phase.ANSWERING and _is_quick(state.answer) for state in states]
        return np.array(may, np.bool_)

    def forced(self, row: int) -> list[int]:
        """The tokens that must come next, where there is no choice, for a row that follows drafts."""
        answer = self.states[row].answer
        return answer.forced() if answer is not None else []

    def num_fitting(self, row: int, drafts: list[int]) -> int:
        """The number of ``drafts`` that the grammar allows in sequence, for a row that follows drafts."""
        answer = self.states[row].answer
        return answer.num_fitting(drafts) if answer is not None else 0

    def reason(self, row: int) -> str | None:
        answer = self.states[row].answer if row in self.states else None
        return "the form asked of the answer became too complex to follow" if answer and answer.failed else None

    def apply(self, logits: torch.Tensor, positions: IntArray, rows: IntArray, batch: TokenColumns) -> None:
        """Apply the masks. Computing a mask takes 10 to 40 µs for each row, applying it to 152,000 logits up to 80 µs.

        Rows whose masks are late keep their logits. If a row is repeated, its repetitions are masked as if its drafts,
        which are after its tokens in the batch, were drawn.
        """
        found = self.restrictions(positions, rows, len(logits), batch)
        masked = [(each.position, each.mask) for each in found if each.mask is not None]
        if masked:
            masks = np.stack([mask for _, mask in masked])
            forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
            forbid(logits, np.array([position for position, _ in masked]), forbidden[:, : self.vocab_size])
        for each in found:
            if each.forbidden.size:
                logits[each.position, torch.from_numpy(each.forbidden).to(logits.device)] = -torch.inf
            if each.only is not None:
                _leave(each.only, logits[each.position])

    def restrictions(self, positions: IntArray, rows: IntArray, draws: int, batch: TokenColumns) -> list[Restriction]:
        """What the owned ``rows`` at ``positions`` may draw, in a step with so many ``draws``. Omits late rows."""
        found: list[Restriction] = []
        answering: list[tuple[int, Progress, AnswerMatcher, list[int]]] = []
        for position, row, num_drafts in _runs(positions, rows):
            state = self.states[row]
            if state.progress.phase in (Phase.THINKING, Phase.CLOSING):
                token = state.progress.next_token()
                found.append(Restriction(position, None, state.progress.forbidden if token is None else _NONE, token))
            elif state.answer is not None:
                known = int(batch.num_tokens[row])
                drafts = batch.token_ids[row, known : known + num_drafts].tolist()
                answering.append((position, state.progress, state.answer, drafts))
        self.late = []
        if not answering:
            return found
        end = self._used_grammars.eos_token_ids[0]
        ready = self._used_grammars.ready([answer for _, _, answer, _ in answering], draws)
        for (position, progress, answer, drafts), is_ready in zip(answering, ready, strict=True):
            if not is_ready:
                self.late.append(position)
                continue
            masks = [(_mask(progress, answer), answer.over), *answer.behind(drafts)]
            for offset, (mask, over) in enumerate(masks):
                found.append(Restriction(position + offset, mask, _NONE, end if over else None))
        return found


def _is_quick(answer: AnswerMatcher | None) -> bool:
    return answer is not None and answer.coming is None and not answer.pace.slow


def _runs(positions: IntArray, rows: IntArray) -> Iterator[tuple[int, int, int]]:
    """(first position, row, number of repetitions) of rows that occur once or several times in succession."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    counts = np.diff(starts, append=len(rows)) - 1
    return zip(positions[starts].tolist(), rows[starts].tolist(), counts.tolist(), strict=True)


def _mask(progress: Progress, answer: AnswerMatcher) -> NDArray[np.int32]:
    """The mask of the next token. Includes the start token of reasoning if reasoning may begin."""
    mask = answer.mask()
    if progress.phase is not Phase.BEGINNING or answer.failed:
        return mask
    mask, start = mask.copy(), progress.start_token_id
    mask.view(np.uint32)[start // 32] |= np.uint32(1 << start % 32)
    return mask


def _leave(token: int, logits: torch.Tensor) -> None:
    """Leave only one token to draw in the ``logits`` [V] of a row."""
    logits.fill_(-torch.inf)
    logits[token] = 0.0


def forbid(logits: torch.Tensor, positions: IntArray, forbidden: Mask) -> None:
    """Set the ``forbidden`` tokens [R, V] of the rows of ``logits`` [S, V] at ``positions`` [R] to -inf.

    On a CPU numpy takes half of torch's time.
    """
    if logits.device.type == "cpu":
        host = logits.numpy()
        for position, row in zip(positions.tolist(), forbidden, strict=True):
            np.copyto(host[position], np.float32(-np.inf), where=row)
        return
    where = torch.from_numpy(positions).to(logits.device)
    logits[where] = logits[where].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
