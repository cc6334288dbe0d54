"""TokenLogprobs: a list of entries, and the memory of thousands of entries."""

from __future__ import annotations

import pickle
import tracemalloc
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from raylm.frontend.outputs import PromptLogprobs, TokenLogprob, TokenLogprobs
from raylm.messages import Logprobs

NUM_TOP = 20
BYTES_OF_A_PAIR = 4 + 8  # a token id and a double


def columns(num_tokens: int) -> Logprobs:
    random, size = Random(0), (1 + NUM_TOP) * num_tokens
    token_ids = [random.randrange(1000, 100_000) for _ in range(size)]
    return Logprobs([1 + NUM_TOP] * num_tokens, token_ids, [-random.random() for _ in range(size)], [7] * num_tokens)


def test_an_entry_has_the_numbers_of_its_columns() -> None:
    read = columns(3)
    for place, entry in enumerate(TokenLogprobs.of_columns(read)):
        part = slice(place * (1 + NUM_TOP), (place + 1) * (1 + NUM_TOP))
        pairs = list(zip(read.token_ids[part], read.logprobs[part], strict=True))
        assert [(entry.token_id, entry.logprob), *entry.top] == pairs
        assert (entry.rank, entry.num_top) == (7, NUM_TOP)
        assert TokenLogprob(*pairs[0], 7, pairs[1:]) == entry == pickle.loads(pickle.dumps(entry))
        assert entry != TokenLogprob(*pairs[0], 8, pairs[1:])


ENTRY = st.builds(
    TokenLogprob,
    st.integers(0, 9),
    st.floats(-9, 0),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0)), max_size=3),
)
PLACE = st.none() | st.integers(-6, 6)


@given(st.lists(ENTRY, max_size=5), st.lists(ENTRY, max_size=3), PLACE, PLACE)
def test_the_entries_of_an_answer_are_a_list(
    entries: list[TokenLogprob], later: list[TokenLogprob], start: int | None, stop: int | None
) -> None:
    found, wanted = TokenLogprobs(entries), [*entries, *later]
    found.extend(TokenLogprobs(later))
    assert (list(found), len(found), found) == (wanted, len(wanted), TokenLogprobs(wanted))
    assert [found[place] for place in range(-len(wanted), len(wanted))] == wanted * 2
    assert list(found[start:stop]) == wanted[start:stop]
    assert list(found[start:stop:-2]) == wanted[start:stop:-2]
    part = found[start:stop]
    part.extend(TokenLogprobs(later))
    assert list(part) == [*wanted[start:stop], *later]
    assert list(found) == wanted, "a slice is a copy"
    assert pickle.loads(pickle.dumps(found)) == found
    assert (found == TokenLogprobs(entries)) is (not later)


def test_tokens_without_log_probabilities() -> None:
    read = Logprobs([0, 2, 0], [7, 8], [-1.0, -2.0], [0, 3, 0])
    missing, known = TokenLogprob(-1, 0.0, 0), TokenLogprob(7, -1.0, 3, [(8, -2.0)])
    entries = TokenLogprobs.of_columns(read)
    assert list(entries) == [*entries[:2], *entries[2:]] == [missing, known, missing]
    prompt = PromptLogprobs(entries, 4)
    assert list(prompt) == prompt[:] == [None, None, known, None]
    assert (len(prompt), prompt[-2], prompt[2:]) == (4, known, [known, None])


def test_entries_take_no_objects() -> None:
    read, count = columns(1000), 1000
    tracemalloc.start()
    try:
        entries = TokenLogprobs.of_columns(read)
        taken, num_blocks = tracemalloc.get_traced_memory()[0], len(tracemalloc.take_snapshot().traces)
    finally:
        tracemalloc.stop()
    assert len(entries) == count
    assert taken < 1.5 * count * (1 + NUM_TOP) * BYTES_OF_A_PAIR
    assert num_blocks < 20
