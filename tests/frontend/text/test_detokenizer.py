"""Detokenizer: the pieces join to the text of all tokens decoded at once, and no piece ends within a character."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylm.frontend.text.detokenizer import MOST_HELD, Detokenizer
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.params import SamplingParams

TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60)


def pieces(tokenizer: Tokenizer, token_ids: list[int], **params: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@given(TEXT)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode_now(text, add_special_tokens=False)
    found = pieces(tokenizer, token_ids)
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


@given(st.lists(st.integers(0, 329), max_size=80), st.booleans())
def test_any_tokens_join_to_the_decoded_whole(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    whole = tokenizer.backend.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(tokenizer, token_ids, skip_special_tokens=skip)) == whole


@given(TEXT)
def test_byte_fallback_text_comes_back(fallback_tokenizer: Tokenizer, text: str) -> None:
    token_ids = fallback_tokenizer.encode_now(text, add_special_tokens=False)
    whole = fallback_tokenizer.backend.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces(fallback_tokenizer, token_ids)) == whole


@given(st.integers(259, 292), st.lists(st.integers(0, 2) | st.integers(131, 258) | st.integers(259, 292), max_size=60))
def test_words_among_bytes_that_are_no_text_keep_their_spaces(
    fallback_tokenizer: Tokenizer, first: int, others: list[int]
) -> None:
    """The tokens are special tokens, bytes from 0x80, and words. The decoder strips the first space of a text."""
    token_ids = [first, *others]
    whole = fallback_tokenizer.backend.decode(token_ids, skip_special_tokens=True)
    text = "".join(pieces(fallback_tokenizer, token_ids))
    assert re.sub("[^a-z ]", "", text) == re.sub("[^a-z ]", "", whole)


@pytest.mark.parametrize("count", [MOST_HELD - 1, MOST_HELD, 3 * MOST_HELD])
def test_a_word_after_many_skipped_tokens_keeps_its_space(fallback_tokenizer: Tokenizer, count: int) -> None:
    token_ids = fallback_tokenizer.encode_now("a dog", add_special_tokens=False)
    end, the = map(fallback_tokenizer.backend.token_to_id, ("</s>", "▁the"))
    assert "".join(pieces(fallback_tokenizer, [*token_ids, *[end] * count, the, the])) == "a dog the the"


def test_text_goes_on_after_many_bytes_that_are_no_text(tokenizer: Tokenizer) -> None:
    lone = next(i for i in range(330) if tokenizer.token_bytes(i) == b"\x80")
    euro = tokenizer.encode_now("€", add_special_tokens=False)
    token_ids = [lone] * (3 * MOST_HELD) + euro[:2] + euro + tokenizer.encode_now("end", add_special_tokens=False)
    found = pieces(tokenizer, token_ids)
    assert "".join(found) == tokenizer.backend.decode(token_ids)
    assert "".join(found[: 2 * MOST_HELD]), "endless bytes were held back"


@pytest.mark.parametrize("lead", range(MOST_HELD - 4, MOST_HELD + 1))
def test_letting_go_cuts_no_character(tokenizer: Tokenizer, lead: int) -> None:
    lone = next(i for i in range(330) if tokenizer.token_bytes(i) == b"\x80")
    euro = tokenizer.encode_now("€", add_special_tokens=False)
    assert len(euro) == 3
    assert "".join(pieces(tokenizer, [lone] * lead + euro)) == "\ufffd" * lead + "€"


def test_an_incomplete_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode_now("€", add_special_tokens=False)
    assert pieces(tokenizer, [first]) == ["", "\ufffd"]


def test_special_tokens_are_skipped_or_not(tokenizer: Tokenizer) -> None:
    end = tokenizer.backend.token_to_id("<|im_end|>")
    token_ids = [*tokenizer.encode_now("hello", add_special_tokens=False), end]
    assert "".join(pieces(tokenizer, token_ids)) == "hello"
    assert "".join(pieces(tokenizer, token_ids, skip_special_tokens=False)) == "hello<|im_end|>"


def test_special_tokens_close_together_on_demand(tokenizer: Tokenizer) -> None:
    spaced = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False))
    spaced._last_added = True  # as after another added token, if the decoder puts a space between both
    end = tokenizer.backend.token_to_id("<|im_end|>")
    assert spaced._close_up(end, " <|im_end|>") == "<|im_end|>"
    assert spaced._close_up(70, " word") == " word"
    assert spaced._close_up(end, " <|im_end|>") == " <|im_end|>"


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, fallback_tokenizer: Tokenizer) -> None:
    text = "hello wörld €\n"
    for which, prefix in ((tokenizer, ""), (fallback_tokenizer, " ")):
        token_ids = which.encode_now(text, add_special_tokens=False)
        assert b"".join(map(which.token_bytes, token_ids)).decode() == prefix + text
    assert tokenizer.token_bytes(10**6) == b""


@given(st.text(alphabet="abc t,", min_size=2, max_size=40), st.integers(1, 20))
def test_a_continuation_keeps_the_space_after_the_text_before(
    fallback_tokenizer: Tokenizer, text: str, at: int
) -> None:
    backend, token_ids = fallback_tokenizer.backend, fallback_tokenizer.encode_now(text, add_special_tokens=False)
    before, after = token_ids[:at], token_ids[at:]
    detokenizer = Detokenizer(fallback_tokenizer, SamplingParams(), before[-5:])
    continuation = "".join([*map(detokenizer.push, after), detokenizer.flush()])
    if backend.decode(before[-5:]).strip():
        assert backend.decode(before) + continuation == backend.decode(token_ids)
