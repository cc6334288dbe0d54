"""The indexes against a search by hand, and what Drafts make of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.worker.arrays import IntArray, Ints
from raylm.worker.speculation.drafts import Drafts
from raylm.worker.speculation.ngram import LENGTHS, AnswerHistory, NGramIndex

ROWS, LENGTH, MOST = 4, 64, 6


def by_hand(tokens: list[int]) -> tuple[int, int]:
    """(lag, length) of the longest and then latest earlier match of 16, 8, 4, 3 or 2 tokens at the end."""
    for size in LENGTHS[::-1].tolist():
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[len(tokens) - size :] and len(tokens) >= size:
                return len(tokens) - 1 - end, size
    return 0, 0


class WithoutCollisions(NGramIndex):
    """Every n-gram has its own slot."""

    def __init__(self) -> None:
        super().__init__(ROWS, LENGTH)
        self.slots: dict[bytes, int] = {}

    def _slots(self, tokens: IntArray) -> Ints:
        grams = [[tokens[:size, at].tobytes() for at in range(tokens.shape[1])] for size in LENGTHS]
        return np.array([[self.slots.setdefault(gram, len(self.slots)) for gram in level] for level in grams], np.int64)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_index_finds_what_a_search_by_hand_finds(data: st.DataObject) -> None:
    index, texts = WithoutCollisions(), [[data.draw(st.integers(0, 3))] for _ in range(ROWS)]
    token_ids = np.full((ROWS, LENGTH), 3, np.int32)
    for _ in range(data.draw(st.integers(1, 8))):
        for row in range(ROWS):
            if data.draw(st.integers(0, 9)) == 0:
                texts[row] = []
                index.forget(row)
            texts[row] += data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
            token_ids[row, : len(texts[row])] = texts[row]
        rows = np.array(data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))])
        lags, levels = index.search(token_ids, rows, np.array([len(texts[row]) for row in rows]))
        for row, lag, length in zip(rows.tolist(), lags.tolist(), LENGTHS[levels].tolist(), strict=True):
            wanted = by_hand(texts[row])
            assert lag == wanted[0]
            assert lag == 0 or length == wanted[1]


def test_collisions_lose_matches_and_make_none_up() -> None:
    rng = np.random.default_rng(0)
    found = wanted = 0
    for vocabulary in (5, 30, 50_000):
        for _ in range(40):
            period = rng.integers(0, vocabulary, int(rng.integers(3, 400)))
            tokens = np.concatenate([period, rng.integers(0, vocabulary, 30), period]).astype(np.int32)
            lags, levels = NGramIndex(1, 1024).search(tokens[None], np.array([0]), np.array([len(tokens)]))
            lag, length = int(lags[0]), int(LENGTHS[levels[0]])
            wanted += 1
            found += lag > 0
            if lag:
                assert (tokens[-length:] == tokens[-length - lag : -lag]).all()
    assert found > 0.95 * wanted


class Text:
    """One row whose tokens come as told."""

    def __init__(self, tokens: list[int], history: AnswerHistory | None = None, owner: int = 0) -> None:
        self.guesses = Drafts(NGramIndex(ROWS, LENGTH), history or AnswerHistory(), ROWS, MOST)
        self.guesses.forget(1, owner)
        self.token_ids = np.zeros((ROWS, LENGTH), np.int32)
        self.length = 0
        self.come(tokens)

    def come(self, tokens: list[int]) -> None:
        self.token_ids[1, self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)

    def renew(self) -> float:
        self.guesses.renew(self.token_ids, np.array([1]), np.array([self.length]))
        return float(self.guesses.chances(np.array([1]))[0])

    @property
    def tokens(self) -> list[int]:
        return self.guesses.tokens[1, : self.guesses.counts[1]].tolist()  # type: ignore[no-any-return]


def test_what_followed_is_guessed_again() -> None:
    text = Text([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4])
    assert text.renew() > 0
    assert text.tokens == [5, 6, 7, 8, 9, 2]


def test_a_short_cycle_goes_round() -> None:
    text = Text([9, 1, 2, 3, 1, 2, 3, 1])
    text.renew()
    assert text.tokens == [2, 3, 1, 2, 3, 1]


def test_without_a_repetition_there_is_no_chance() -> None:
    assert Text([1, 2, 3, 4, 5]).renew() == 0
    assert Text([1]).renew() == 0


def test_a_row_goes_on_copying_from_where_it_was_right() -> None:
    """1 2 was followed by 7 the last time, and by 3 before that: the copy of the older text is kept while it holds."""
    text = Text([5, 1, 2, 3, 1, 2, 4, 1, 2, 7, 6, 5])
    text.come([1, 2, 3])
    text.renew()
    assert text.tokens[:3] == [1, 2, 4]
    text.come([1])
    text.renew()
    assert text.tokens[:2] == [2, 4]
    text.come([2])
    text.renew()
    assert text.tokens[0] == 4  # the latest 1 2 says 7, and 3 1 2 the same as the copy


def test_chances_follow_what_came_whether_or_not_it_was_verified() -> None:
    right, wrong = Text([1, 2, 3, 4, 1, 2]), Text([1, 2, 3, 4, 1, 2])
    first = right.renew()
    assert wrong.renew() == first
    for step in range(5):
        right.come(right.tokens[:3])
        wrong.come([20 + step, 1, 2])  # 1 2 is never followed by what followed it before
        good, bad = right.renew(), wrong.renew()
    assert good > 0.9
    assert bad < first / 2


def test_a_row_that_begins_anew_has_forgotten() -> None:
    text = Text([1, 2, 3, 4, 5, 6] * 3)
    text.renew()
    text.guesses.forget(1, 0)
    text.length = 0
    text.come([1, 2, 9, 3, 1, 2])
    assert text.renew() > 0
    assert text.tokens[0] == 9


@pytest.mark.parametrize("came", [1, 3, MOST, MOST + 3])
def test_more_may_come_than_was_guessed(came: int) -> None:
    text = Text([1, 2, 3, 4, 5] * 4)
    text.renew()
    text.come(([1, 2, 3, 4, 5] * 3)[:came])
    assert text.renew() > 0.5
    assert text.tokens == ([1, 2, 3, 4, 5] * 6)[came : came + MOST]


def found_by_hand(answers: list[tuple[int, list[int]]], tail: list[int], owner: int) -> list[int] | None:
    """What followed the longest and then latest match of the tail in the answers of the owner."""
    for size in LENGTHS[::-1].tolist():
        for theirs, answer in reversed(answers):
            for end in range(len(answer) - 1, size - 1, -1):
                if theirs == owner and len(tail) >= size and answer[end - size : end] == tail[-size:]:
                    return answer[end:]
    return None


class HistoryWithoutCollisions(AnswerHistory):
    def __init__(self, size: int) -> None:
        super().__init__(size, 16)
        self.slots: dict[bytes, int] = {}

    def _slots(self, tokens: IntArray, owners: Ints) -> Ints:
        return np.array(
            [
                [self.slots.setdefault(tokens[:size, at].tobytes() + bytes([owner]), len(self.slots))
                 for at, owner in enumerate(owners.tolist())]
                for size in LENGTHS
            ],
            np.int64,
        ).reshape(len(LENGTHS), len(owners))  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_history_finds_what_a_search_by_hand_finds(data: st.DataObject) -> None:
    history, answers = HistoryWithoutCollisions(1 << 12), []
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)
    for _ in range(data.draw(st.integers(1, 8))):
        owner, answer = data.draw(st.integers(0, 1)), data.draw(tokens)
        history.append(np.array(answer, np.int32), 0, owner)
        answers.append((owner, answer))
    tail, owner = data.draw(tokens), data.draw(st.integers(0, 1))
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tail)] = tail
    starts, _ = history.search(row, np.array([0]), np.array([len(tail)]), np.array([owner]))
    wanted = found_by_hand(answers, tail, owner)
    assert (starts[0] > 0) == (wanted is not None)
    if wanted is not None:
        read, counts = history.read(starts, np.array([owner]), 40)
        assert read[0, : counts[0]].tolist() == wanted


def test_what_was_overwritten_is_not_found() -> None:
    history, rng = AnswerHistory(256, 12), np.random.default_rng(0)
    answers = [rng.integers(0, 50_000, 60).astype(np.int32) for _ in range(20)]
    for answer in answers:
        history.append(answer, 0, 7)
    found = []
    for answer in answers:
        starts, _ = history.search(answer[None], np.array([0]), np.array([30]), np.array([7]))
        found.append(bool(starts[0] > 0))
        if found[-1]:
            read, counts = history.read(starts, np.array([7]), 40)
            assert read[0, : counts[0]].tolist() == answer[30:].tolist()
    assert found == [False] * 16 + [True] * 4


def test_an_answer_of_before_is_drafted_and_kept_to() -> None:
    history = AnswerHistory()
    first = Text([1, 2, 3], history, owner=5)
    first.come(list(range(10, 30)))
    first.guesses.keep(1, first.token_ids[1, : first.length], 3)
    second = Text([9, 1, 2, 3], history, owner=5)
    assert second.renew() > 0
    assert second.tokens == list(range(10, 10 + MOST))
    for _ in range(2):
        second.come(second.tokens)
        second.renew()
    assert second.tokens == list(range(10 + 2 * MOST, 10 + 3 * MOST))
    second.come(second.tokens)
    second.renew()
    assert second.tokens == [28, 29]
    second.come([28, 29])
    assert second.renew() == 0
    assert Text([9, 1, 2, 3], history, owner=6).renew() == 0


def test_a_copy_goes_on_behind_a_token_that_was_wrong() -> None:
    text = Text([*range(20), *range(4)])
    text.renew()
    text.come([4, 5])
    text.renew()
    text.come([77])
    assert text.renew() > 0
    assert text.tokens == list(range(7, 7 + MOST))
