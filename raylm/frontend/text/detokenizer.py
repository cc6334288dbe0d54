"""SequenceText: converts one sequence's tokens to visible text. Detokenizer: incremental decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers.decoders import DecodeStream

from raylm.frontend.text.stop_strings import StopStrings
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.messages import FinishReason
from raylm.params import SamplingParams

MOST_HELD = 16  # tokens; a UTF-8 character has at most four bytes, so more held tokens will not become text


class Detokenizer:
    """Incremental decoding with DecodeStream of tokenizers. Never returns part of a character.

    The joined pieces equal the text of all tokens decoded at once. DecodeStream holds tokens while the text ends in
    U+FFFD, and decodes all of them again at each step. A model that draws bytes that never become text would make this
    quadratic. So when ``MOST_HELD`` tokens are held, they are decoded up to a place that does not cut a character.
    """

    __slots__ = ("_added", "_anchor", "_backend", "_before", "_context", "_held", "_last_added", "_skip", "_stream")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, before: Sequence[int] = ()) -> None:
        """``before`` are the last tokens of a text that goes on. Some decoders drop the first space of a text."""
        self._backend = tokenizer.backend
        self._skip = params.skip_special_tokens
        apart = params.skip_special_tokens or params.spaces_between_special_tokens
        self._added: Mapping[int, str] = {} if apart else tokenizer.added_tokens
        self._last_added = False
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        # The tokens of the last piece. The text of a token depends on the tokens before it.
        self._context: list[int] = []
        self._anchor: list[int] = []  # the tokens of the last piece that does not end in U+FFFD
        self._held: list[int] = []
        self._before = list(before)

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that became final, "" while a character is incomplete."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id) or ""
        except Exception:  # tokenizers raises a bare Exception if later bytes change earlier text
            piece = self._cut(len(self._held))
        else:
            if piece:
                self._context = self._anchor = self._held
                self._held = []
            elif len(self._held) >= MOST_HELD:
                piece = self._let_go()
        if piece and self._before:
            piece = self._with_first_space(piece, self._context)
        if self._added:
            piece = self._close_up(token_id, piece)
        return piece

    def flush(self) -> str:
        """Decode the held tokens at the end. Incomplete characters become U+FFFD."""
        held, self._held = self._held, []
        piece = self._text_after(self._context, held) if held else ""
        return self._with_first_space(piece, held) if self._before else piece

    def _with_first_space(self, piece: str, token_ids: list[int]) -> str:
        """The first piece, with its space if it has one after the text before."""
        before, self._before = self._before, []
        whole = self._backend.decode(before + token_ids, skip_special_tokens=self._skip)
        start = self._backend.decode(before, skip_special_tokens=self._skip)
        return f" {piece}" if start and whole == f"{start} {piece}" else piece

    def _let_go(self) -> str:
        """Decode the held tokens up to a place that does not cut a character, and start a new stream after it."""
        held, whole = self._held, self._text_after(self._context, self._held)
        for cut in range(max(1, len(held) - 3), len(held) + 1):
            head = self._text_after(self._context, held[:cut])
            if head + self._text_after(held[:cut], held[cut:]) == whole:
                break
        piece = self._cut(cut)
        if piece and self._before:
            piece = self._with_first_space(piece, self._context)
        return piece + "".join(map(self.push, held[cut:]))

    def _cut(self, count: int) -> str:
        """Decode the first ``count`` held tokens, drop the others, and start a new stream.

        The new stream begins with the tokens of an earlier piece. Without them, a decoder that strips the first space
        of a text would strip the space of the next word.
        """
        held, self._held = self._held[:count], []
        text = self._text_after(self._context, held)
        if text:
            self._context = held
        if text and not text.endswith("\ufffd"):
            self._anchor = held
        self._stream = DecodeStream(self._anchor, skip_special_tokens=self._skip)
        return text

    def _text_after(self, context: list[int], token_ids: list[int]) -> str:
        before = self._backend.decode(context, skip_special_tokens=self._skip)
        return self._backend.decode(context + token_ids, skip_special_tokens=self._skip)[len(before) :]

    def _close_up(self, token_id: int, piece: str) -> str:
        """Remove spaces between added tokens, if spaces_between_special_tokens is off."""
        added = self._added.get(token_id)
        if added is not None and self._last_added and piece.endswith(added):
            piece = piece.removesuffix(added).rstrip(" ") + added
        self._last_added = added is not None
        return piece


class SequenceText:
    """Detokenizes a sequence, finds stop strings, and holds back text that may become one.

    A stop string counts only if a token after the first ``min_tokens`` completes it. The same holds for EOS. ``before``
    is as in Detokenizer.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_tokens", "_shows_stop", "_stops", "finished")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, before: Sequence[int] = ()) -> None:
        self.finished = False
        self._num_tokens = 0
        self._min_tokens = params.min_tokens
        self._shows_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer, params, before)
        self._stops = StopStrings(params.stop, include=self._shows_stop) if params.stop else None

    def push(self, token_ids: list[int], ended: FinishReason | None) -> tuple[str, int, str | None]:
        """Add tokens. Returns (text that became final, number of tokens that count, matched stop string or None).

        The token that stopped the engine (EOS, a stop token) has no text, unless stop strings are included.
        """
        hidden = len(token_ids) - 1 if ended == "stop" and not self._shows_stop else None
        text, stops, stop = "", self._stops, None
        for place, token_id in enumerate(token_ids):
            self._num_tokens += 1
            piece = "" if place == hidden else self._detokenizer.push(token_id)
            if stops is not None and piece:
                piece, stop = stops.push(piece, armed=self._num_tokens > self._min_tokens)
            text += piece
            if stop is not None:
                self.finished = True
                return text, place + 1, stop
        if ended is None:
            return text, len(token_ids), None
        self.finished, piece = True, self._detokenizer.flush()
        if stops is not None and piece:
            piece, stop = stops.push(piece, armed=self._num_tokens > self._min_tokens)
        if stops is not None and stop is None:
            piece += stops.flush()
        return text + piece, len(token_ids), stop
