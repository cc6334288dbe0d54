"""Drafts, compared with a direct search, and their chances after accepted and rejected tokens."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from raylm.messages import NewSequence
from raylm.params import SamplingParams
from raylm.worker.input_batch import InputBatch
from raylm.worker.speculation.drafts import Drafts
from raylm.worker.step_batch import StepBatch
from tests.worker.speculation.reference import Reference, Row

ROWS, LENGTH, MOST = 4, 256, 6


class Texts:
    """Rows whose tokens the test provides."""

    def __init__(self, most: int = MOST, **sizes: Any) -> None:
        sizes = {"index_bits": 14, "ring_bits": 12} | sizes
        self.drafts = Drafts(ROWS, most, 16, **sizes)
        self.batch = InputBatch(ROWS, LENGTH, 16, 60_000)

    def add(self, tokens: list[int], owner: int = 0, prompt: int | None = None) -> int:
        """Add a sequence. Returns its row."""
        seq_id = 1000 * owner + len(self.batch._row_of)
        while seq_id in self.batch._row_of:
            seq_id += 1
        prompt = len(tokens) if prompt is None else prompt
        row = self.batch.add(NewSequence(seq_id, tokens, prompt, [], SamplingParams(), seed=0, limit=LENGTH))
        self.drafts.forget(row, owner)
        return row

    def end(self, row: int) -> None:
        self.drafts.keep(row, self.batch)
        self.batch.remove(next(seq_id for seq_id, its in self.batch._row_of.items() if its == row))

    def come(self, row: int, tokens: list[int]) -> None:
        self.batch.append_tokens(np.full(len(tokens), row), np.array(tokens), np.arange(len(tokens)))

    def text(self, row: int) -> list[int]:
        return self.batch.token_ids[row, : self.batch.num_tokens[row]].tolist()  # type: ignore[no-any-return]

    def renew(self, *rows: int) -> None:
        ones = np.ones(len(rows), np.int64)
        step = StepBatch(list(rows), np.array(rows, np.int64), 0 * ones, ones, ones)
        self.drafts.renew(self.drafts.begin(step, self.batch))

    def drafted(self, row: int) -> list[int]:
        return self.drafts.tokens[row, : self.drafts.counts[row]].tolist()  # type: ignore[no-any-return]


class Text(Texts):
    """A single row."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.row = self.add(tokens)

    def next(self, tokens: list[int] | None = None) -> float:
        """Append tokens. Returns the chance of the new drafts."""
        if tokens:
            self.come(self.row, tokens)
        self.renew(self.row)
        return float(self.drafts.chances[self.row])

    @property
    def tokens(self) -> list[int]:
        return self.drafted(self.row)


@pytest.mark.parametrize("seed", range(30))
def test_drafts_are_those_that_a_search_by_hand_finds(seed: int) -> None:
    """Rows of two owners grow, end and restart. Their tokens follow the drafts or differ."""
    rng = np.random.default_rng(seed)
    texts, reference = Texts(index_bits=18), Reference(MOST)
    vocabulary, rows = int(rng.integers(2, 6)), {}

    def some(least: int, most: int) -> list[int]:
        return rng.integers(0, vocabulary, int(rng.integers(least, most))).tolist()  # type: ignore[no-any-return]

    for _ in range(20):
        if len(rows) < 3 and rng.random() < 0.6:
            owner, tokens = int(rng.integers(0, 2)), some(1, 25)
            row = texts.add(tokens, owner)
            rows[row], reference.rows[row] = len(tokens), Row(owner)
        for row in [row for row in rows if rng.random() < 0.1 or len(texts.text(row)) > 120]:
            reference.keep(row, texts.text(row), rows.pop(row))
            texts.end(row)
        for row in rows:
            right = texts.drafted(row)[: int(rng.integers(0, MOST + 1))]
            texts.come(row, right + some(1, 4) if rng.random() < 0.5 or not right else right)
        looked_at = [row for row in rows if rng.random() < 0.8]
        texts.renew(*looked_at)
        for row in looked_at:
            wanted, chance = reference.renew(row, texts.text(row))
            assert texts.drafted(row) == wanted
            assert texts.drafts.chances[row] == pytest.approx(chance)


def test_collisions_lose_matches_and_make_none_up() -> None:
    rng = np.random.default_rng(0)
    found = wanted = 0
    for vocabulary in (5, 30, 50_000):
        for _ in range(40):
            period = rng.integers(0, vocabulary, int(rng.integers(3, 100)))
            tokens = np.concatenate([period, rng.integers(0, vocabulary, 30), period]).tolist()
            texts = Texts(index_bits=9)
            row = texts.add(tokens)
            texts.renew(row)
            if drafts := texts.drafted(row):
                ends = [at for at in range(1, len(tokens)) if tokens[at - 1] == tokens[-1]]
                assert any((tokens[at:] * MOST)[:MOST] == drafts for at in ends)
            wanted += 1
            found += len(drafts) > 0
    assert 0.9 * wanted < found


_RESIDENT = """
import os
from pathlib import Path
from raylm.worker.speculation.drafts import Drafts

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
drafts = Drafts(256, 64, 16)
print(resident() - before)
"""


def test_they_take_no_more_than_50_mb() -> None:
    """In a separate process, whose allocator has no free memory to reuse."""
    told = subprocess.run([sys.executable, "-c", _RESIDENT], capture_output=True, text=True, check=True, timeout=300)
    assert 30e6 < int(told.stdout) < 50e6


def test_what_followed_is_guessed_again() -> None:
    text = Text([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4])
    assert text.next() > 0
    assert text.tokens == [5, 6, 7, 8, 9, 2]


def test_a_short_cycle_goes_round() -> None:
    text = Text([9, 1, 2, 3, 1, 2, 3, 1])
    text.next()
    assert text.tokens == [2, 3, 1, 2, 3, 1]


def test_what_followed_most_of_the_times_outvotes_the_latest() -> None:
    often = [1, 2, 3, 90, 1, 2, 3, 91, 1, 2, 3, 92]
    text = Text([*often, 1, 2, 4, 93, 1, 2])
    text.next()
    assert text.tokens[:2] == [3, 92]
    text = Text([*often, *([1, 2, 4, 93] * 3), 5, 1, 2])
    text.next()
    assert text.tokens[0] == 4


def test_without_a_repetition_there_is_no_chance() -> None:
    assert Text([1, 2, 3, 4, 5]).next() == 0
    assert Text([1]).next() == 0


def test_a_row_goes_on_copying_from_where_it_was_right() -> None:
    """After 1 2 comes 7 in the latest text and 3 before it. The row keeps copying the older text while it matches."""
    text = Text([5, 1, 2, 3, 1, 2, 4, 1, 2, 7, 6, 5])
    text.next([1, 2, 3])
    assert text.tokens[:3] == [1, 2, 4]
    text.next([1])
    assert text.tokens[:2] == [2, 4]
    text.next([2])
    assert text.tokens[0] == 4  # the latest 1 2 continues with 7, but 3 1 2 with 4, as the copy does


def test_chances_follow_what_came_whether_or_not_it_was_verified() -> None:
    right, wrong = Text([1, 2, 3, 4, 1, 2]), Text([1, 2, 3, 4, 1, 2])
    first = right.next()
    assert wrong.next() == first
    for step in range(5):
        good = right.next(right.tokens[:3])
        bad = wrong.next([20 + step, 1, 2])  # what follows 1 2 always changes
    assert good > 0.9
    assert bad < first / 2


def test_a_row_that_begins_anew_has_forgotten() -> None:
    text = Text([1, 2, 3, 4, 5, 6] * 3)
    text.next()
    text.end(text.row)
    text.row = text.add([1, 2, 9, 3, 1, 2], owner=1)
    assert text.next() > 0
    assert text.tokens[0] == 9


@pytest.mark.parametrize("came", [1, 3, MOST, MOST + 3])
def test_more_may_come_than_was_guessed(came: int) -> None:
    text = Text([1, 2, 3, 4, 5] * 4)
    text.next()
    assert text.next(([1, 2, 3, 4, 5] * 3)[:came]) > 0.5
    assert text.tokens == ([1, 2, 3, 4, 5] * 6)[came : came + MOST]


def test_a_copy_goes_on_behind_a_token_that_was_wrong() -> None:
    text = Text([*range(20), *range(4)])
    text.next()
    text.next([4, 5])
    assert text.next([77]) > 0
    assert text.tokens == list(range(7, 7 + MOST))


def test_what_was_overwritten_is_not_found() -> None:
    texts, rng = Texts(ring_bits=8), np.random.default_rng(0)
    answers = [rng.integers(0, 50_000, 60).tolist() for _ in range(20)]
    for answer in answers:
        texts.end(texts.add(answer, prompt=0))
    found = []
    for answer in answers:
        row = texts.add(answer[:30])
        texts.renew(row)
        found.append(texts.drafted(row) == answer[30 : 30 + MOST])
        texts.batch.remove(next(iter(texts.batch._row_of)))
    assert found == [False] * 16 + [True] * 4


def test_an_answer_of_before_is_drafted_and_kept_to() -> None:
    texts = Texts()
    first = texts.add([1, 2, 3], owner=5)
    texts.come(first, list(range(10, 30)))
    texts.end(first)
    second, stranger = texts.add([9, 1, 2, 3], owner=5), texts.add([9, 1, 2, 3], owner=6)
    texts.renew(second, stranger)
    assert texts.drafted(second) == list(range(10, 10 + MOST))
    assert texts.drafted(stranger) == []
    for _ in range(2):
        texts.come(second, texts.drafted(second))
        texts.renew(second)
    assert texts.drafted(second) == list(range(10 + 2 * MOST, 10 + 3 * MOST))
    texts.come(second, texts.drafted(second))
    texts.renew(second)
    assert texts.drafted(second) == [28, 29]
    texts.come(second, [28, 29])
    texts.renew(second)
    assert texts.drafts.chances[second] == 0
