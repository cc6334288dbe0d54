"""TurnTokens: tokenizes conversations, and keeps the token ids of their turns for the requests that follow."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from tokenizers import AddedToken

from raylm.frontend.text.tokenizer import Tokenizer, check_chars
from raylm.frontend.threads import LARGE

MAX_BYTES = 32 * 2**20
"""Limit of the kept ids: about 8 million tokens."""
SHORTEST = 2_048
"""Characters of a text; a shorter one is tokenized in less than a millisecond."""
_ENTRY_BYTES = 256  # of one kept turn, without its ids
_MAX_MARKERS = 16

Key = tuple[str, bytes]


class TurnTokens:
    """Splits a text before each marker of a turn, and tokenizes only the parts that it has not kept.

    A marker is an added token of the tokenizer that the chat template writes, such as ``<|im_start|>``. The tokenizer
    splits every text at its added tokens first, and tokenizes what is between them separately. So the ids of the
    parts, one after another, are the ids of the whole text. ``markers_of`` finds the tokens for which that is true.

    The kept ids are found by a digest of the part's text, so a conversation that was edited, cut or rendered in another
    way only has more parts to tokenize. Ids are kept for one ``owner``, and no other owner's request finds them. The
    parts used longest ago are dropped first.
    """

    def __init__(self, tokenizer: Tokenizer, written: str) -> None:
        """``written`` is everything that may write a marker: the templates, and the special tokens they are given."""
        self._tokenizer = tokenizer
        self._markers = [marker for marker in markers_of(tokenizer) if marker in written][:_MAX_MARKERS]
        self._kept: OrderedDict[Key, array[int]] = OrderedDict()
        self.num_bytes = 0

    async def encode(self, text: str, owner: str | None, *, param: str) -> list[int] | array[int]:
        """The ids of ``text`` without the special tokens that the tokenizer adds. Nothing is kept without an owner.

        Raises:
            InvalidRequestError: as Tokenizer.encode.
        """
        check_chars(len(text), param)
        parts = self._parts(text) if owner is not None and len(text) >= SHORTEST else []
        if not parts or owner is None:
            return await self._tokenizer.encode(text, add_special_tokens=False, param=param)
        keys = [(owner, _digest(part)) for part in parts]
        known = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: part for key, part in zip(keys, parts, strict=True) if key not in known}
        if new:
            known.update(zip(new, await self._tokenizer.encode_each(list(new.values()), param=param), strict=True))
        self._keep(known)
        ids = array("I")
        for key in keys:
            ids.extend(known[key])
        return ids

    def _parts(self, text: str) -> list[str]:
        """The parts of ``text``; none if it has no marker, or more parts than can be looked up in a moment."""
        counts = [text.count(marker) for marker in self._markers]
        most = max(counts, default=0)
        if not 0 < most <= LARGE:
            return []
        marker = self._markers[counts.index(most)]
        first, *rest = text.split(marker)
        return [*([first] if first else []), *(marker + part for part in rest)]

    def _keep(self, used: dict[Key, array[int]]) -> None:
        for key, ids in used.items():
            if key not in self._kept:
                self.num_bytes += _num_bytes(ids)
            self._kept[key] = ids
            self._kept.move_to_end(key)
        while self.num_bytes > MAX_BYTES:
            self.num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])


def markers_of(tokenizer: Tokenizer) -> Iterable[str]:
    """The added tokens before which any text can be split, so that its parts have the ids of the whole.

    Such a token is found in the text itself, not in its normalized form; it takes no space from the text before it;
    what stands before it is not a part of a word, whether the token or the end of the text follows; and no other
    added token can overlap it.
    """
    added = list(tokenizer.backend.get_added_tokens_decoder().values())
    found_first = [token.content for token in added if not token.normalized]
    return [
        token.content
        for token in added
        if _is_marker(token) and not any(_overlaps(token.content, other) for other in found_first)
    ]


def _is_marker(token: AddedToken) -> bool:
    first = token.content[:1]
    is_apart = bool(first) and not (first.isalnum() or first == "_" or first.isspace())
    return is_apart and first.isascii() and not (token.normalized or token.lstrip or token.single_word)


def _overlaps(marker: str, other: str) -> bool:
    """Whether ``other`` can be found in a text in place of the marker, or of its beginning."""
    if marker != other and marker in other:
        return True
    sizes = range(1, min(len(marker), len(other)))
    return any(other.endswith(marker[:size]) for size in sizes)


def _digest(part: str) -> bytes:
    return blake2b(part.encode(errors="surrogatepass"), digest_size=16).digest()


def _num_bytes(ids: array[int]) -> int:
    return _ENTRY_BYTES + len(ids) * ids.itemsize
