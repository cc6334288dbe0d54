"""Tokenizer: converts between text and token ids; owns the threads that tokenize long texts.

It is loaded by the tokenizers-backed class of transformers, which reads the checkpoint's side files, and then only its
`tokenizers` core is used. Importing AutoTokenizer takes 1.7 s and imports torch; this takes 0.6 s without torch.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as Backend

from raylm.errors import ConfigError, InvalidRequestError
from raylm.frontend.threads import Lanes

T = TypeVar("T")

LARGE_CHARS = 65_536  # longer texts, which take 20 ms or more, have their own thread
INLINE_CHARS = 8_192  # tokenized in one turn of the event loop: about 3 ms; more would delay every stream
MAX_CHARS = 4 * 1024 * 1024  # building the list of ids holds the GIL: about 20 ms for a text of this length
MAX_IDS = 4 * 1024 * 1024


class Tokenizer:
    """Converts text to ids and back without blocking the event loop for long. Short texts do not wait for long ones.

    Raises:
        ConfigError: the checkpoint has no tokenizer.json, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "tokenizer.json").exists():
            raise ConfigError(f"model: {path} has no tokenizer.json; convert its tokenizer to the fast format.")
        from transformers import PreTrainedTokenizerFast

        try:
            with _panics_raised():
                loaded = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except Exception as error:
            raise ConfigError(f"model: the tokenizer in {path} cannot be loaded: {error}") from error
        self.backend: Backend = loaded.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        found = loaded.chat_template or {}
        self.chat_templates: dict[str, str] = dict(found) if isinstance(found, dict) else {"default": str(found)}
        self.special_tokens: dict[str, str] = {name: str(text) for name, text in loaded.special_tokens_map.items()}
        self._lanes = Lanes("raylm-tokenizer")
        self._inline_left = INLINE_CHARS

    @cached_property
    def vocab_size(self) -> int:
        """The highest token id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def longest_token_chars(self) -> int:
        """Number of characters of the longest token. A text of n tokens has at most n times as many."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        return {token_id: str(token.content) for token_id, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that ``skip_special_tokens`` omits."""
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Tokenize ``text``. A long text, and many short ones in the same turn of the loop, are tokenized on a thread.

        Raises:
            InvalidRequestError: the text is too long, or the tokenizer cannot read it. Names ``param``.
        """
        check_chars(len(text), param)
        encode = partial(self.encode_now, text, add_special_tokens=add_special_tokens, param=param)
        return await self._run(len(text), encode)

    async def encode_each(self, texts: list[str], *, param: str) -> list[array[int]]:
        """As ``encode``, without the tokenizer's special tokens, for each of several texts."""

        def work() -> list[array[int]]:
            return [array("I", self.encode_now(text, add_special_tokens=False, param=param)) for text in texts]

        return await self._run(sum(map(len, texts)), work)

    def encode_now(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Tokenize ``text`` on the calling thread. Uses the batch call because only that releases the GIL."""
        with _errors_named(param, text):
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    async def encode_pair(self, one: str, other: str, param: str) -> tuple[list[int], int]:
        """Tokenize two texts as one prompt. Returns its tokens and the place where those of the second text begin.

        Raises InvalidRequestError as ``encode``.
        """
        check_chars(len(one) + len(other), param)

        def work() -> tuple[list[int], int]:
            with _errors_named(param, one, other):
                found = self.backend.encode_batch([(one, other)], add_special_tokens=True)[0]
            return found.ids, len(found.ids) - sum(found.type_ids)

        return await self._run(len(one) + len(other), work)

    async def decode(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, with special tokens."""
        if len(token_ids) > MAX_IDS:
            raise InvalidRequestError(f"tokens has more than {MAX_IDS} entries.", param="tokens")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise InvalidRequestError(f"tokens must be ids from 0 to {self.vocab_size - 1}.", param="tokens")
        return await self._run(len(token_ids), partial(self.decode_now, token_ids))

    def decode_now(self, token_ids: list[int]) -> str:
        """The text of ``token_ids``, with special tokens, on the calling thread. Releases the GIL."""
        try:
            with _panics_raised():
                texts: list[str] = self.backend.decode_batch([token_ids], skip_special_tokens=False)
        except Exception as error:
            raise InvalidRequestError(
                f"The model's tokenizer cannot decode tokens: {_line(error)}", param="tokens"
            ) from error
        return texts[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token adds to a text; may be part of a character. b"" for an id without a token."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.added_tokens:
            return token.encode()
        if self._byte_level:
            return bytes(BYTE_OF_CHAR[char] for char in token if char in BYTE_OF_CHAR)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def token_piece(self, token_id: int) -> str:
        """The token as it is written in the vocabulary (``Ġthe``, ``▁the``), "" for an id without a token."""
        piece: str | None = self.backend.id_to_token(token_id)
        return piece or ""

    def close(self) -> None:
        self._lanes.close()

    @cached_property
    def _byte_level(self) -> bool:
        return b'"ByteLevel"' in self.backend.decoder.__getstate__() if self.backend.decoder else False

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Return ``work()``. Runs it on a thread if its ``size`` is too much for this turn of the event loop."""
        if size > self._inline_left:
            return await self._lanes.run(work, large=size > LARGE_CHARS)
        if self._inline_left == INLINE_CHARS and size:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._inline_left -= size
        return work()

    def _begin_turn(self) -> None:
        self._inline_left = INLINE_CHARS


class _PanickedError(Exception):
    """A Rust library has panicked."""


@contextmanager
def _panics_raised() -> Iterator[None]:
    """Convert pyo3's PanicException, which is not an Exception and cannot be imported, to _PanickedError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _PanickedError(str(error)) from error


@contextmanager
def _errors_named(param: str, *texts: str) -> Iterator[None]:
    """Raise InvalidRequestError, which names ``param``, if a text is not Unicode or the tokenizer fails."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{param} is not valid Unicode: it contains a surrogate.", param=param) from error
    try:
        with _panics_raised():
            yield
    except Exception as error:
        raise InvalidRequestError(
            f"The model's tokenizer cannot tokenize {param}: {_line(error)}", param=param
        ) from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def check_chars(num_chars: int, param: str) -> None:
    """Raise InvalidRequestError for a text that is too long for any model."""
    if num_chars > MAX_CHARS:
        raise InvalidRequestError(f"{param} has more than {MAX_CHARS} characters.", param=param)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, other bytes to the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}


BYTE_OF_CHAR = _byte_of_char()
