"""The sampler's tokens, compared with exact distributions (chi-square) and with the reference, token by token."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylm.messages import NewSequence
from raylm.params import SamplingParams
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling import block_maxima
from raylm.worker.sampling.draw import RandomRows, draw_from_weights
from raylm.worker.sampling.sampler import Sampler
from tests.worker.sampling.sampler_reference import Reference

DRAWS = 24_000
WAYS = {"candidates": Sampler(), "few candidates": Sampler((2, 5)), "whole rows": Sampler(())}


def chi_square_limit(freedom: int) -> float:
    """Wilson and Hilferty's approximation to the quantile at 1 - 1e-6."""
    return freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3


def test_chi_square_limit() -> None:
    assert chi_square_limit(10) == pytest.approx(48.6, rel=0.02)  # from tables: P(chi2_10 > 48.6) is about 5e-7
    assert chi_square_limit(30) == pytest.approx(82.0, rel=0.02)


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "top_k": 20, "temperature": 1.2},
    {"logit_bias": {3: 1.5, 9: -2.0}, "top_k": 200, "temperature": 0.8},
    {"allowed_token_ids": (1, 4, 9, 16), "top_k": 3},
]


@pytest.mark.parametrize("fields", COMBINATIONS, ids=str)
@pytest.mark.parametrize("vocab_size", [30, 1300])
def test_frequencies(fields: dict[str, Any], vocab_size: int) -> None:
    generator = np.random.default_rng(len(str(fields)))
    row = generator.normal(0, 1.5, vocab_size).astype(np.float32)
    tokens = [3, 4, 5, 3, 9, 9, 9, 1]
    params = SamplingParams(**fields)
    batch = InputBatch(DRAWS, 16, 16, vocab_size)
    for seed in range(DRAWS):
        batch.add(NewSequence(seed, tokens, 3, [0], params, seed))
    logits = torch.from_numpy(row).expand(DRAWS, -1).clone()
    drawn = Sampler().sample(logits, np.arange(DRAWS), batch).token_ids
    weights = Reference(NewSequence(0, tokens, 3, [0], params, 0)).weights(row)
    assert_frequencies(np.bincount(drawn, minlength=vocab_size), weights / weights.sum())


def assert_frequencies(counts: np.ndarray, probabilities: np.ndarray) -> None:
    assert not counts[probabilities == 0].any(), "an excluded token was drawn"
    expected = probabilities * counts.sum()
    common = expected >= 10
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(observed) > 1:
        assert ((observed - wanted) ** 2 / wanted).sum() < chi_square_limit(len(observed) - 1)


def test_frequencies_over_positions_of_few_seeds() -> None:
    vocab_size = 700
    row = np.random.default_rng(5).normal(0, 2, vocab_size).astype(np.float32)
    batch = InputBatch(DRAWS, 241, 16, vocab_size)
    for i in range(DRAWS):
        batch.add(NewSequence(i, [1] * (1 + i % 240), 1, [0], SamplingParams(), seed=i // 240))
    drawn = Sampler().sample(torch.from_numpy(row).expand(DRAWS, -1).clone(), np.arange(DRAWS), batch).token_ids
    weights = np.exp(row.astype(np.float64))
    assert_frequencies(np.bincount(drawn, minlength=vocab_size), weights / weights.sum())


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, list[NewSequence]]:
    """Logits with many equal values, and sequences of all kinds."""
    vocab_size = draw(st.sampled_from([3, 40, 128, 300, 513, 1100]))
    count = draw(st.integers(1, 5))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step = draw(st.sampled_from([0.0, 0.25, 1.0, 20.0]))
    logits = generator.normal(0, draw(st.sampled_from([0.0, 0.5, 3.0, 30.0])), (count, vocab_size))
    logits = (np.round(logits / step) * step if step else logits).astype(np.float32)
    logits[generator.random(logits.shape) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
    logits[:, draw(st.integers(0, vocab_size - 1))] = 1.0
    return logits, [draw(sequences(i, vocab_size)) for i in range(count)]


@st.composite
def sequences(draw: st.DrawFn, seq_id: int, vocab_size: int) -> NewSequence:
    token = st.integers(0, vocab_size - 1)
    rarely = draw(st.integers(0, 3)) == 0
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-40, 0.01, 0.5, 1.0, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.25, 0.5, 0.9, 0.999])),
        top_k=draw(st.sampled_from([-1, -1, 1, 2, 7, 64, 100, 2000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.5])) if rarely else 1.0,
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 1.25])) if rarely else 0.0,
        frequency_penalty=draw(st.sampled_from([0.0, -1.0, 0.75])) if rarely else 0.0,
        min_tokens=draw(st.integers(0, 4)),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-500.0, -1.0, 2.0, 100.0]), max_size=3)),
    )
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    output = draw(st.lists(token, max_size=6))
    stops = tuple(draw(st.lists(token, max_size=1 if vocab_size > 3 else 0)))
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    return NewSequence(seq_id, prompt + output, len(prompt), [0], params, seed, stops)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_way_draws_what_the_reference_draws(case: tuple[np.ndarray, list[NewSequence]]) -> None:
    logits, news = case
    batch = InputBatch(len(news), 16, 16, logits.shape[1])
    rows = np.array([batch.add(new) for new in news])
    drawn = {way: sampler.sample(torch.from_numpy(logits.copy()), rows, batch) for way, sampler in WAYS.items()}
    for i, new in enumerate(news):
        if np.isinf(Reference(new).processed(logits[i]).max()):
            assert all(i in dict(out.failed) for out in drawn.values())
            continue
        # If a limit is within rounding of a sum, both results are right.
        expected = {Reference(new).draw(logits[i], slack) for slack in (0.0, 1e-6, -1e-6)}
        got = {way: int(out.token_ids[i]) for way, out in drawn.items()}
        assert set(got.values()) <= expected, (got, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", [8, 600])
def test_top_p_that_falls_exactly_between_equals_keeps_the_smallest_ids(way: str, vocab_size: int) -> None:
    logits = torch.full((400, vocab_size), -torch.inf)
    logits[:, -8:] = 1.0
    batch = InputBatch(400, 16, 16, vocab_size)
    rows = np.array([batch.add(NewSequence(i, [1], 1, [0], SamplingParams(top_p=0.5), i)) for i in range(400)])
    drawn = WAYS[way].sample(logits, rows, batch).token_ids
    assert set(drawn.tolist()) == {vocab_size - 8 + i for i in range(4)}, "four tokens have half of the probability"


@pytest.mark.parametrize("way", WAYS)
def test_top_p_goes_by_likelihood_where_logits_nearly_agree(way: str) -> None:
    logits = torch.full((400, 50), -torch.inf)
    logits[:, 10:18] = 1.0 + 1e-4 * torch.arange(8)
    batch = InputBatch(400, 16, 16, 50)
    rows = np.array([batch.add(NewSequence(i, [1], 1, [0], SamplingParams(top_p=0.499), i)) for i in range(400)])
    assert set(WAYS[way].sample(logits, rows, batch).token_ids.tolist()) == {14, 15, 16, 17}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.6},
        {"top_p": 0.3, "min_p": 0.05},
        {"top_p": 0.3, "top_k": 90},
        {"top_p": 0.05, "min_p": 0.4, "top_k": 40},
    ],
    ids=str,
)
def test_limits_meet_beyond_the_candidates(way: str, fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 1, (300, 320)).astype(np.float32)
    batch = InputBatch(300, 16, 16, 320)
    news = [NewSequence(i, [1], 1, [0], SamplingParams(**fields), i) for i in range(300)]
    rows = np.array([batch.add(new) for new in news])
    drawn = WAYS[way].sample(torch.from_numpy(logits.copy()), rows, batch).token_ids
    assert drawn.tolist() == [Reference(new).draw(row) for new, row in zip(news, logits, strict=True)]


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_p": 0.5, "temperature": 0.6}, {"top_k": 40}, {"min_p": 0.03}])
def test_both_ways_draw_the_same_from_large_vocabularies(fields: dict[str, Any]) -> None:
    count, vocab_size = 48, 32_001
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, vocab_size, generator=generator) * torch.linspace(1, 4, count)[:, None]
    logits = logits.bfloat16().float()
    batch = InputBatch(count, 16, 16, vocab_size)
    rows = np.array([batch.add(NewSequence(i, [1], 1, [0], SamplingParams(**fields), i)) for i in range(count)])
    fast = Sampler().sample(logits.clone(), rows, batch).token_ids
    whole = Sampler(()).sample(logits.clone(), rows, batch).token_ids
    np.testing.assert_array_equal(fast, whole)


def test_draws_hardly_move_with_tiny_noise() -> None:
    count, vocab_size = 2_000, 1_000
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    noisy = logits + 1e-3 * torch.randn(count, vocab_size, generator=generator)
    distance = (logits.softmax(1) - noisy.softmax(1)).abs().sum(1).mean() / 2
    batch = InputBatch(count, 16, 16, vocab_size)
    rows = np.array([batch.add(NewSequence(i, [1], 1, [0], SamplingParams(), i)) for i in range(count)])
    changed = Sampler().sample(logits, rows, batch).token_ids != Sampler().sample(noisy, rows, batch).token_ids
    assert changed.mean() < 6 * distance + 3 / count


@pytest.mark.parametrize("scale", [0.1, 1.7, 4.0, 6.0, 9.0])
def test_pruned_first_race_has_the_winner_of_the_full_one(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_maxima, "_WINDOWS_AT_ONCE", 100)
    count, vocab_size = 60, 32_001
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(4)) * scale
    batch = InputBatch(count, 16, 16, vocab_size)
    rows = np.array([batch.add(NewSequence(i, [1], 1, [0], SamplingParams(), i)) for i in range(count)])
    peak = logits.amax(dim=1)
    weights = (logits.double() - peak[:, None]).exp()
    chosen = RandomRows.gather(
        np.arange(count), batch.sampling[rows], batch.num_tokens[rows], logits.amax(dim=1).numpy()
    )
    expected = [draw_from_weights(weights[i], chosen.take(np.array([i])))[0] for i in range(count)]
    assert Sampler().sample(logits, rows, batch).token_ids.tolist() == expected
