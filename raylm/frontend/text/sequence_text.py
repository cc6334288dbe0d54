"""SequenceText: the text side of one sequence, from its tokens to what its caller may see."""

from __future__ import annotations

from raylm.frontend.text.detokenizer import Detokenizer
from raylm.frontend.text.stop_strings import StopStrings
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.messages import FinishReason
from raylm.params import SamplingParams


class SequenceText:
    """Detokenizes, finds stop strings, and holds back what might become one.

    A stop string counts only if a token after the first ``min_tokens`` completes it, as EOS does.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_shows_stop", "_stops", "finished")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.finished = False
        self._num_tokens = 0
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, params)
        self._stops = StopStrings(params.stop, include=self._shows_stop) if params.stop else None

    def push(self, token_ids: list[int], ended: FinishReason | None) -> tuple[str, int, str | None]:
        """Take in tokens; return (text that is final, how many of the tokens count, stop string matched or None).

        The token that made the engine stop (EOS, a stop token) is no text, unless stop strings are shown.
        """
        hidden = len(token_ids) - 1 if ended == "stop" and not self._shows_stop else None
        text = ""
        for place, token_id in enumerate(token_ids):
            self._num_tokens += 1
            piece, stop = self._screen("" if place == hidden else self._detokenizer.push(token_id))
            text += piece
            if stop is not None:
                return text, place + 1, stop
        if ended is None:
            return text, len(token_ids), None
        piece, stop = self._screen(self._detokenizer.flush())
        self.finished = True
        if stop is None and self._stops is not None:
            piece += self._stops.flush()
        return text + piece, len(token_ids), stop

    def _screen(self, piece: str) -> tuple[str, str | None]:
        if self._stops is None or not piece:
            return piece, None
        final, stop = self._stops.push(piece, armed=self._num_tokens > self._min_tokens)
        self.finished = stop is not None
        return final, stop
