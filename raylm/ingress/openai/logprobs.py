"""Log-probabilities in answers: OpenAI's forms for chat and completions, vLLM's form for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from functools import cache
from typing import TYPE_CHECKING

from raylm.ingress.http.answer import Pieces
from raylm.ingress.http.body import JSONObject

if TYPE_CHECKING:
    from raylm.frontend import AsyncLLM, TokenLogprob

_LOWEST = -9999.0  # OpenAI's value for "very unlikely"; JSON has no -Infinity


class TokenTexts:
    """Caches the bytes and text of token ids, at most one entry for each id of the vocabulary.

    ``bytes_of`` returns UTF-8, which may be part of a character. ``text_of`` shows it as OpenAI does.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.special = llm.special_token_ids
        self.bytes_of = cache(llm.token_bytes)
        self.text_of: Callable[[int], str] = cache(lambda token_id: _readable(self.bytes_of(token_id)))

    def by_id(self) -> TokenTexts:
        """The same bytes, with texts like token_id:7, which are unique."""
        named = copy(self)
        named.text_of = "token_id:{}".format
        return named


def _readable(raw: bytes) -> str:
    r"""Bytes that are no text by themselves are shown as \xe2\x80."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Iterable[TokenLogprob], tokens: TokenTexts, *, drawn: bool = False) -> JSONObject:
    """``choices[].logprobs`` of a chat completion or chunk. ``content`` is generated when it is iterated.

    With ``drawn`` the drawn token is the first alternative, unless it is already an alternative.
    """
    return {"content": Pieces(_chat_entry(entry, tokens, drawn) for entry in entries), "refusal": None}


def _chat_entry(entry: TokenLogprob, tokens: TokenTexts, drawn: bool) -> JSONObject:
    item = _chat_item(entry.token_id, entry.logprob, tokens)
    likely = entry.top
    top = [_chat_item(token_id, logprob, tokens) for token_id, logprob in likely]
    missing = drawn and all(token_id != entry.token_id for token_id, _ in likely)
    item["top_logprobs"] = [dict(item), *top] if missing else top
    return item


def _chat_item(token_id: int, logprob: float, tokens: TokenTexts) -> JSONObject:
    raw = tokens.bytes_of(token_id)
    return {"token": tokens.text_of(token_id), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


class CompletionLogprobs:
    """``choices[].logprobs`` in chunks of one choice of a completion. Offsets continue across chunks.

    The token itself is the first of its ``top_logprobs``, as clients of vLLM expect.

    ``text_offset`` is the number of characters of the choice's text before the token. A character of several tokens
    counts at its last token. The column ``top_logprobs`` is Pieces that are made when they are
    written, since they take most of the memory.
    """

    def __init__(self, tokens: TokenTexts, num_top: int, hidden: Collection[int] = ()) -> None:
        """``hidden`` are tokens that generated text leaves out."""
        self._tokens = tokens
        self._hidden = hidden
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def generated(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> JSONObject:
        """The columns of generated tokens, after all earlier tokens, with all their alternatives."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokens.bytes_of(token_id)))
        return self._columns(token_ids, entries, offsets, None)

    def prompt(self, text: str, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> JSONObject:
        """The columns of an echoed prompt. Tokens that are not in ``text`` (such as BOS) have no length."""
        raw, place, offsets = text.encode(), 0, []
        for token_id in token_ids:
            offsets.append(self._offset)
            piece = self._tokens.bytes_of(token_id)
            if not raw.startswith(piece, place):
                piece = piece.removeprefix(b" ")  # a space that some tokenizers add before a text
            if raw.startswith(piece, place):
                place += len(piece)
                self._offset += len(self._decoder.decode(piece))
        self._offset = len(text)
        self._decoder.reset()
        return self._columns(token_ids, entries, offsets, self._num_top)

    def _columns(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: list[int], num_top: int | None
    ) -> JSONObject:
        return {
            "tokens": [self._tokens.text_of(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else max(entry.logprob, _LOWEST) for entry in entries],
            "top_logprobs": Pieces(None if entry is None else self._top(entry, num_top) for entry in entries),
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob, num_top: int | None) -> dict[str, float]:
        likely = [(entry.token_id, entry.logprob), *entry.top[:num_top]]
        return {self._tokens.text_of(token_id): max(logprob, _LOWEST) for token_id, logprob in likely}


def prompt_logprobs(entries: Sequence[TokenLogprob | None], num_top: int, tokens: TokenTexts) -> Pieces:
    """vLLM's ``prompt_logprobs``: for each prompt token null or {token id: {logprob, rank, decoded_token}}.

    The prompt's own token is the first, as clients of vLLM expect.
    """
    return Pieces(None if entry is None else _by_id(entry, num_top, tokens) for entry in entries)


def _by_id(entry: TokenLogprob, num_top: int, tokens: TokenTexts) -> JSONObject:
    own = {"logprob": max(entry.logprob, _LOWEST), "rank": entry.rank, "decoded_token": tokens.text_of(entry.token_id)}
    others = {
        str(token_id): {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": tokens.text_of(token_id)}
        for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)
        if token_id != entry.token_id
    }
    return {str(entry.token_id): own} | others
