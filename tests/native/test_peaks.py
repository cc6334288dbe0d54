"""The most likely token of each row, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.native import most_likely

SPECIAL = [float("-inf"), float("inf"), 0.0, -0.0, 3e38, -3e38, 1e-45]


@settings(deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.one_of(st.integers(1, 200), st.integers(16300, 16500), st.integers(30000, 50000)),
    kinds=st.integers(1, 9),
    beyond=st.integers(0, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_first_of_the_largest(rows: int, columns: int, kinds: int, beyond: int, seed: int) -> None:
    """With few distinct values, so that many are equal. Values after the end of a row must not count."""
    draw = np.random.default_rng(seed)
    values = np.where(draw.random(kinds) < 0.3, draw.choice(SPECIAL, kinds), draw.normal(size=kinds))
    logits = torch.from_numpy(draw.choice(values, (rows, columns + beyond)).astype(np.float32))[:, :columns]
    found, ids = most_likely(logits)
    np.testing.assert_array_equal(found, logits.numpy().max(axis=1))
    np.testing.assert_array_equal(ids, logits.numpy().argmax(axis=1))


@pytest.mark.parametrize("columns", [1, 15, 16, 64, 100, 16384, 16385, 49152])
def test_nan_anywhere_is_told(columns: int) -> None:
    for at in {0, columns // 2, columns - 1}:
        logits = torch.full((3, columns), float("-inf"))
        logits[1, at] = float("nan")
        found, _ = most_likely(logits)
        assert np.isnan(found).tolist() == [False, True, False]
