"""TokenLogprob: what it gives back of its columns, and how much memory thousands of entries take."""

from __future__ import annotations

import pickle
import tracemalloc
from random import Random

from raylm.frontend.outputs import TokenLogprob, read_logprobs
from raylm.messages import Logprobs

NUM_TOP = 20
BYTES_OF_A_PAIR = 4 + 8  # a token id and a double


def columns(num_tokens: int) -> Logprobs:
    random, size = Random(0), (1 + NUM_TOP) * num_tokens
    token_ids = [random.randrange(1000, 100_000) for _ in range(size)]
    return Logprobs([1 + NUM_TOP] * num_tokens, token_ids, [-random.random() for _ in range(size)], [7] * num_tokens)


def test_an_entry_has_the_numbers_of_its_columns() -> None:
    read = columns(3)
    for place, entry in enumerate(read_logprobs(read)):
        part = slice(place * (1 + NUM_TOP), (place + 1) * (1 + NUM_TOP))
        pairs = list(zip(read.token_ids[part], read.logprobs[part], strict=True))
        assert [(entry.token_id, entry.logprob), *entry.top] == pairs
        assert (entry.rank, entry.num_top) == (7, NUM_TOP)
        assert TokenLogprob(*pairs[0], 7, pairs[1:]) == entry == pickle.loads(pickle.dumps(entry))
        assert entry != TokenLogprob(*pairs[0], 8, pairs[1:])


def test_alternatives_take_no_objects() -> None:
    read, count = columns(1000), 1000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        entries = list(read_logprobs(read))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(entries) == count
    assert taken < 3 * count * (1 + NUM_TOP) * BYTES_OF_A_PAIR
