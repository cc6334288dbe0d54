"""SequenceText: stop strings split over tokens in any way, min_tokens, and the ends of a sequence."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raylm.frontend.text.detokenizer import SequenceText
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.params import SamplingParams
from tests.frontend.text.test_stop_strings import brute_force

WORDS = st.lists(
    st.sampled_from(["hello", " world", "E", "EN", "END", "€", "N", "D", " stop", "st", "op"]), max_size=14
)


def bytes_as_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte, so that characters of several bytes are split too."""
    by_byte = {tokenizer.token_bytes(token): token for token in range(3, 330)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def run(text: SequenceText, chunks: list[list[int]]) -> tuple[str, int, str | None]:
    """Push chunk after chunk. The last one ends by length, as from the engine."""
    out, used = "", 0
    for place, chunk in enumerate(chunks):
        piece, count, stop = text.push(chunk, "length" if place == len(chunks) - 1 else None)
        out, used = out + piece, used + count
        if stop is not None:
            return out, used, stop
    return out, used, None


@given(
    words=WORDS,
    stops=st.lists(st.sampled_from(["END", "stop", "€", "op w", "ND"]), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
    min_tokens=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 5), max_size=30),
    as_bytes=st.booleans(),
)
def test_equals_brute_force_over_the_tokens(
    tokenizer: Tokenizer,
    words: list[str],
    stops: list[str],
    include: bool,
    min_tokens: int,
    sizes: list[int],
    as_bytes: bool,
) -> None:
    whole = "".join(words)
    tokens = bytes_as_tokens(tokenizer, whole) if as_bytes else tokenizer.encode_now(whole, add_special_tokens=False)
    early = b"".join(map(tokenizer.token_bytes, tokens[:min_tokens])).decode(errors="ignore")
    want, want_stop = brute_force(whole, tuple(stops), include, len(early))
    chunks, rest = [], tokens
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens)
    out, used, stop = run(SequenceText(tokenizer, params), [*filter(None, chunks), rest])
    assert (out, stop) == (want, want_stop)
    if stop is not None:
        seen = b"".join(map(tokenizer.token_bytes, tokens[:used])).decode(errors="ignore")
        assert stop in seen[len(want if not include else want[: -len(stop)]) :]
        assert used > min_tokens


def push(tokenizer: Tokenizer, tokens: list[int], ended: Any, **params: Any) -> tuple[str, int, str | None]:
    return SequenceText(tokenizer, SamplingParams(**params)).push(tokens, ended)


def test_the_token_that_ended_the_sequence_is_no_text(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode_now("hello", add_special_tokens=False)
    comma = tokenizer.encode_now(",", add_special_tokens=False)
    assert push(tokenizer, hello + comma, "stop") == ("hello", len(hello) + 1, None)
    assert push(tokenizer, hello + comma, "length") == ("hello,", len(hello) + 1, None)
    assert push(tokenizer, hello + comma, "stop", include_stop_str_in_output=True)[0] == "hello,"
    assert push(tokenizer, [*hello, 2], "stop", skip_special_tokens=False)[0] == "hello"


def test_what_was_held_back_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    text = SequenceText(tokenizer, SamplingParams(stop=("END",)))
    tokens = tokenizer.encode_now("so EN", add_special_tokens=False)
    assert text.push(tokens, None)[0] == "so "
    assert not text.finished
    assert text.push([2], "stop") == ("EN", 1, None)
    assert text.finished
