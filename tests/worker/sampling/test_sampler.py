"""The Sampler's guarantees: independent rows and restarts, log-probabilities, greedy ties, failed rows."""

from typing import Any

import numpy as np
import pytest
import torch

from raylm.messages import Logprobs, NewSequence
from raylm.native import most_likely
from raylm.params import SamplingParams
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.sampler import Sampler
from tests.worker.sampling.sampler_reference import Reference

VOCAB = 777
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "logprobs": 2},
    {"top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.99, "logprobs": 0},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 20, "frequency_penalty": 1.0},
    {"allowed_token_ids": (1, 500, 776), "logprobs": 5},
    {"logit_bias": {5: 8.0}, "presence_penalty": -1.0},
    {"top_k": 300, "min_tokens": 3},
]


def make(seq_id: int, tokens: list[int], prompt: int = 2, **fields: Any) -> NewSequence:
    return NewSequence(seq_id, tokens, prompt, [0], SamplingParams(**fields), seed=seq_id * 31, stop_token_ids=(5,))


def random_logits(count: int, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def split(logprobs: Logprobs) -> list[tuple[list[int], list[float], int]]:
    ends = np.cumsum(logprobs.counts)
    starts = ends - logprobs.counts
    spans = zip(starts, ends, logprobs.ranks, strict=True)
    return [(logprobs.token_ids[a:b], logprobs.logprobs[a:b], rank) for a, b, rank in spans]


def test_a_row_does_not_see_its_neighbours() -> None:
    news = [make(i, [1, 2, 3, i], **KINDS[i % len(KINDS)]) for i in range(40)]
    logits = random_logits(40)
    alone: list[tuple[int, Any]] = []
    for i, new in enumerate(news):
        batch = InputBatch(1, 16, 16, VOCAB)
        batch.add(new)
        out = Sampler().sample(logits[i : i + 1].clone(), np.array([0]), batch)
        alone.append((int(out.token_ids[0]), out.logprobs and split(out.logprobs)[0]))
    generator = np.random.default_rng(0)
    for size in (2, 7, 40):
        batch = InputBatch(64, 16, 16, VOCAB)
        chosen = generator.permutation(40)[:size]
        for i in chosen:
            batch.add(news[i])
        shuffled = generator.permutation(chosen)
        out = Sampler().sample(logits[shuffled].clone(), batch.rows(shuffled.tolist()), batch)
        assert out.token_ids.tolist() == [alone[i][0] for i in shuffled]
        for got, i in zip(split(out.logprobs), shuffled, strict=True) if out.logprobs else []:
            ids, values, rank = alone[i][1] or ([], [], 0)
            assert (got[0], got[2]) == (ids, rank)
            np.testing.assert_allclose(got[1], values, rtol=1e-6)


def toy_model(tokens: list[int]) -> torch.Tensor:
    return random_logits(1, seed=hash(tuple(tokens[-3:])) % 2**31)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_preemption_and_restart_change_nothing(fields: dict[str, Any]) -> None:
    def generate(preempted_at: set[int], restarted_at: set[int]) -> list[int]:
        tokens, batch, sampler = [7, 8], InputBatch(4, 64, 16, VOCAB), Sampler()
        row = batch.add(make(3, tokens, **fields))
        for step in range(14):
            if step in preempted_at:
                batch.remove(3)
                batch.add(make(100 + step, [1, 2, 3], presence_penalty=1.0))
                row = batch.add(make(3, tokens, **fields))
                batch.remove(100 + step)
            if step in restarted_at:
                batch, sampler = InputBatch(2, 64, 16, VOCAB), Sampler()
                row = batch.add(make(3, tokens, **fields))
            rows = np.array([row])
            drawn = sampler.sample(toy_model(tokens), rows, batch).token_ids
            batch.append_tokens(rows, drawn)
            tokens = [*tokens, int(drawn[0])]
        return tokens

    expected = generate(set(), set())
    assert generate({1, 5, 6}, set()) == expected
    assert generate({3}, {4, 9}) == expected


def test_seeds_and_positions_give_different_draws() -> None:
    batch = InputBatch(200, 120, 16, VOCAB)
    rows = np.array([batch.add(make(i, [1] * (1 + i % 100), 1)) for i in range(200)])
    drawn = Sampler().sample(torch.zeros(200, VOCAB), rows, batch).token_ids
    assert len(set(drawn.tolist())) > 150
    assert drawn[:100].tolist() != drawn[100:].tolist()


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(most_likely=most_likely)])
def test_greedy_takes_the_smallest_id_among_equals(sampler: Sampler) -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, [700, 300, 301]] = 2.0
    logits[2, [776, 10]] = 3.0
    logits[3] = -torch.inf
    logits[3, 776] = -1e30
    batch = InputBatch(4, 16, 16, VOCAB)
    rows = np.array([batch.add(make(i, [1], temperature=0.0)) for i in range(4)])
    assert sampler.sample(logits, rows, batch).token_ids.tolist() == [0, 300, 10, 776]


@pytest.mark.parametrize(
    "others", [[], KINDS, [{"temperature": 0.0, "logprobs": 1}], [{"temperature": 0.0, "top_k": 2}]]
)
def test_greedy_rows_are_drawn_alike_however_the_largest_logit_is_found(others: list[dict[str, Any]]) -> None:
    """Including rows from which no token can be drawn."""
    kinds = [{"temperature": 0.0}] * 4 + others
    found = []
    for sampler in (Sampler(), Sampler(most_likely=most_likely)):
        logits = random_logits(len(kinds))
        logits[1], logits[2, 9], logits[3, 700] = -torch.inf, torch.nan, torch.inf
        batch = InputBatch(len(kinds), 16, 16, VOCAB)
        rows = np.array([batch.add(make(i, [1, 2, 3], **kind)) for i, kind in enumerate(kinds)])
        drawn = sampler.sample(logits, rows, batch)
        found.append((drawn.token_ids.tolist(), drawn.failed, drawn.logprobs))
        assert [at for at, _ in drawn.failed] == [1, 2, 3]
    assert found[0] == found[1]


def test_no_temperature_is_too_small() -> None:
    logits = random_logits(2)
    logits[1, [40, 50]] = 30.0
    batch = InputBatch(400, 16, 16, VOCAB)
    rows = np.array([batch.add(make(i, [1], 1, temperature=10.0 ** -(i % 320))) for i in range(400)])[100:]
    drawn = Sampler().sample(logits[1:].repeat(300, 1), rows, batch).token_ids
    assert set(drawn.tolist()) == {40, 50}


def test_logprobs_describe_the_raw_distribution() -> None:
    count = 12
    logits = random_logits(count).mul(4).round().div(4)
    raw = logits.double().log_softmax(dim=1)
    tops = [None, 0, 1, 5, 20, 3] * 2
    fields = [
        {"logprobs": top, "temperature": i // 6 * 1.3, "logit_bias": {9: 30.0 * (i % 2)}} for i, top in enumerate(tops)
    ]
    batch = InputBatch(count, 16, 16, VOCAB)
    rows = np.array([batch.add(make(i, [1], 1, **f)) for i, f in enumerate(fields)])
    out = Sampler().sample(logits.clone(), rows, batch)
    assert out.logprobs is not None
    assert out.logprobs.counts == [0 if top is None else top + 1 for top in tops]
    for i, (ids, values, rank) in enumerate(split(out.logprobs)):
        if tops[i] is None:
            assert rank == 0
            continue
        token = int(out.token_ids[i])
        expected = sorted(range(VOCAB), key=lambda t: (-raw[i, t].item(), t))[: tops[i]]
        assert ids == [token, *expected]
        np.testing.assert_allclose(values, raw[i, ids], rtol=1e-6)
        assert rank == 1 + int((raw[i] > raw[i, token]).sum())
    assert 9 in out.token_ids, "the biased token shows that logprobs are of raw logits"
    assert max(out.logprobs.ranks) > 32, "ranks beyond the candidates are counted over the row"


def test_logprobs_leave_out_what_cannot_be_drawn() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [600, 3, 40]] = torch.tensor([1.0, 1.0, 2.0])
    batch = InputBatch(1, 16, 16, VOCAB)
    rows = np.array([batch.add(make(0, [1], 1, temperature=0.0, logprobs=5))])
    out = Sampler().sample(logits, rows, batch).logprobs
    assert out is not None
    assert (out.counts, out.token_ids, out.ranks) == ([4], [40, 40, 3, 600], [1])
    assert sum(np.exp(out.logprobs[1:])) == pytest.approx(1)


def test_nobody_asks_for_logprobs() -> None:
    batch = InputBatch(2, 16, 16, VOCAB)
    rows = np.array([batch.add(make(i, [1], 1)) for i in range(2)])
    assert Sampler().sample(random_logits(2), rows, batch).logprobs is None


@pytest.mark.parametrize("top", [0, 1, 20])
def test_prompt_logprobs(top: int) -> None:
    count = 300
    logits = random_logits(count)
    logits[7, 3] = torch.nan
    logits[8, 5] = -torch.inf
    token_ids = np.arange(count, dtype=np.int32) * 2
    token_ids[8] = 5
    raw = logits.double().log_softmax(dim=1)
    described = Sampler().prompt_logprobs(logits, token_ids, top)
    assert described.counts == [0 if i == 7 else 1 + top for i in range(count)]
    for i, (ids, values, rank) in enumerate(split(described)):
        if i == 7:
            assert rank == 0
            continue
        assert ids == [token_ids[i], *raw[i].topk(top).indices.tolist()]
        np.testing.assert_allclose(values, raw[i, ids].clamp(min=-9999), rtol=1e-6)
        assert rank == 1 + int((raw[i] > raw[i, token_ids[i]]).sum())
    assert described.logprobs[described.counts[0] * 7] == -9999.0
    assert Sampler().prompt_logprobs(logits[:0], token_ids[:0], top) == Logprobs([], [], [], [])


def test_failed_rows_have_reasons_and_harm_nobody() -> None:
    fields: list[dict[str, Any]] = [
        {"temperature": t, "logprobs": 1, "top_p": p} for t in (0.0, 1.0) for p in (1.0, 0.9)
    ]
    news = [make(i, [1, 2], **fields[i % 4]) for i in range(20)]
    news[16] = make(16, [1, 2], allowed_token_ids=(5,), min_tokens=1, logprobs=1)
    news[17] = make(17, [1, 2], allowed_token_ids=(5, 6), logprobs=1)
    news[18] = make(18, [1, 2], repetition_penalty=1e-6, logprobs=1)
    good = random_logits(20)
    bad = good.clone()
    bad[0:4, 700] = torch.nan
    bad[4:8, 3] = torch.inf
    bad[8:12] = -torch.inf
    bad[17, 9] = torch.nan
    bad[18, 1] = 1e35
    batch = InputBatch(20, 16, 16, VOCAB)
    rows = np.array([batch.add(new) for new in news])
    out = Sampler().sample(bad, rows, batch)
    reasons = dict(out.failed)
    assert sorted(reasons) == [*range(12), 16, 17, 18]
    assert {reasons[i] for i in (*range(12), 17)} == {"the model's logits are not finite"}
    assert "no token to draw" in reasons[16]
    assert "penalties" in reasons[18]
    healthy = [12, 13, 14, 15, 19]
    expected = [Reference(news[i]).draw(good[i].numpy()) for i in healthy]
    assert out.token_ids[healthy].tolist() == expected
    assert out.logprobs is not None
    assert out.logprobs.counts == [2 if i in healthy else 0 for i in range(20)]
    assert all(np.isfinite(out.logprobs.logprobs))
    assert not out.token_ids[list(reasons)].any()


def test_shapes_and_types() -> None:
    batch = InputBatch(2, 16, 16, VOCAB)
    rows = np.array([batch.add(make(i, [1], 1)) for i in range(2)])
    with pytest.raises(ValueError, match="777"):
        Sampler().sample(torch.zeros(2, VOCAB + 1), rows, batch)
    assert Sampler().sample(torch.zeros(0, VOCAB), rows[:0], batch).token_ids.tolist() == []
    half = random_logits(2).bfloat16()
    strided = random_logits(4)[::2]
    for logits in (half, strided):
        same = logits.float().clone(memory_format=torch.contiguous_format)
        expected = Sampler().sample(same, rows, batch).token_ids
        assert Sampler().sample(logits, rows, batch).token_ids.tolist() == expected.tolist()


def test_a_step_whose_rows_all_fail_has_no_logprobs() -> None:
    batch = InputBatch(4, 64, 16, VOCAB)
    batch.add(make(0, [1, 2, 3], logprobs=2))
    out = Sampler().sample(torch.full((1, VOCAB), float("nan")), batch.rows([0]), batch)
    assert [position for position, _ in out.failed] == [0]
    assert out.logprobs == Logprobs([0], [], [], [0])
