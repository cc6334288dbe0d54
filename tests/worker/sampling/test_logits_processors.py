"""The logits processors, compared with transformers' and with the definitions of OpenAI's penalties."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raylm.messages import NewSequence
from raylm.params import SamplingParams
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.block_maxima import BlockMaxima
from raylm.worker.sampling.draw import RandomRows
from raylm.worker.sampling.truncation import truncate_candidates, truncate_row
from tests.worker.sampling.sampler_reference import Reference

VOCAB, PROMPT, OUTPUT, COUNT = 60, [5, 6, 7, 5], [20, 21, 20, 22, 23], 4


def run(news: list[NewSequence], logits: torch.Tensor, drawn: int = 0) -> torch.Tensor:
    """The logits after all processors. The last ``drawn`` tokens are appended one by one."""
    batch = InputBatch(len(news) + 1, 64, 16, VOCAB)
    batch.add(NewSequence(-1, [0], 1, [0], SamplingParams(), 0))
    for new in news:
        short = new.token_ids[: len(new.token_ids) - drawn]
        batch.add(
            NewSequence(
                new.seq_id,
                short,
                new.num_prompt_tokens,
                [0],
                new.params,
                0,
                new.stop_token_ids,
                new.bad_words_token_ids,
            )
        )
    rows = batch.rows([new.seq_id for new in news])
    for back in range(drawn, 0, -1):
        batch.append_tokens(rows, np.array([new.token_ids[-back] for new in news]))
    out = logits.clone()
    for processor in batch.processors:
        positions = processor.owned(rows)
        if positions.size:
            processor.apply(out, positions, rows[positions], batch)
    return out


def sequences(params: SamplingParams, **more: object) -> list[NewSequence]:
    """Sequences with different outputs and the same parameters."""
    outputs = [OUTPUT, OUTPUT[:-1], [20], []]
    return [NewSequence(i, PROMPT + out, len(PROMPT), [0], params, 0, **more) for i, out in enumerate(outputs)]  # type: ignore[arg-type]


def random_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(COUNT, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def expect(processors: list[object], news: list[NewSequence], logits: torch.Tensor) -> torch.Tensor:
    chain = LogitsProcessorList(processors)
    rows = [chain(torch.tensor([new.token_ids]), logits[i : i + 1].clone()) for i, new in enumerate(news)]
    return torch.cat(rows)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
@pytest.mark.parametrize("drawn", [0, 1])
def test_repetition_penalty(penalty: float, drawn: int) -> None:
    news = sequences(SamplingParams(repetition_penalty=penalty))[: COUNT - drawn]
    logits = random_logits()[: len(news)]
    expected = expect([RepetitionPenaltyLogitsProcessor(penalty)], news, logits)
    torch.testing.assert_close(run(news, logits, drawn), expected)


def test_min_tokens() -> None:
    news = sequences(SamplingParams(min_tokens=4), stop_token_ids=(3, 9, 999))
    logits = random_logits()
    expected = expect([MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [3, 9])], news, logits)
    got = run(news, logits)
    torch.testing.assert_close(got, expected)
    assert [int(row.isinf().sum()) for row in got] == [0, 0, 2, 2]


def test_min_tokens_is_reached_while_running() -> None:
    news = sequences(SamplingParams(min_tokens=5), stop_token_ids=(3,))[:3]
    got = run(news, random_logits()[:3], drawn=1)
    assert [int(row.isinf().sum()) for row in got] == [0, 1, 1]


def test_rows_of_different_penalties() -> None:
    news = sequences(SamplingParams(repetition_penalty=1.5))
    news[1] = NewSequence(1, news[1].token_ids, 4, [0], SamplingParams(frequency_penalty=1.0, presence_penalty=-0.5), 0)
    news[2] = NewSequence(2, [1], 1, [0], SamplingParams(repetition_penalty=0.5, frequency_penalty=0.3), 0)
    logits = random_logits()
    expected = np.stack([Reference(new).processed(row) for new, row in zip(news, logits.numpy(), strict=True)])
    np.testing.assert_allclose(run(news, logits), expected, rtol=1e-5, atol=1e-6)


def test_bad_words() -> None:
    words = ((8,), (22, 23, 30), (23, 31), (20, 22, 23, 32), (20, 33), (22, 34), (20, 21, 20, 22, 23, 35), (9, 20))
    news = sequences(SamplingParams(), bad_words_token_ids=words)
    logits = random_logits()
    expected = expect([NoBadWordsLogitsProcessor([list(word) for word in words])], news, logits)
    got = run(news, logits)
    torch.testing.assert_close(got, expected)
    forbidden = [row.isinf().nonzero().squeeze(1).tolist() for row in got]
    assert forbidden == [[8, 30, 31, 32, 35], [8, 34], [8, 33], [8]]


def test_bad_words_begun_in_the_prompt_may_be_finished() -> None:
    # As in vLLM, and unlike transformers, only generated tokens count.
    news = sequences(SamplingParams(), bad_words_token_ids=((5, 20), (7, 5, 40), (5, 20, 21)))
    assert not run(news, random_logits()).isinf().any()


def test_logit_bias() -> None:
    bias = {3: 2.5, 9: -1.0, 40: 250.0, 41: -1e9}
    news = sequences(SamplingParams(logit_bias=bias))
    logits = random_logits()
    clamped = [[[token], max(-100.0, min(100.0, value))] for token, value in bias.items()]
    torch.testing.assert_close(run(news, logits), expect([SequenceBiasLogitsProcessor(clamped)], news, logits))


def test_allowed_token_ids() -> None:
    got = run(sequences(SamplingParams(allowed_token_ids=(7, 3, 7))), logits := random_logits())
    expected = torch.full_like(logits, -torch.inf)
    expected[:, [3, 7]] = logits[:, [3, 7]]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("drawn", [0, 1])
def test_presence_and_frequency_count_generated_tokens_only(drawn: int) -> None:
    news = sequences(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25))[: COUNT - drawn]
    logits = random_logits()[: len(news)]
    expected = logits.clone()
    for i, new in enumerate(news):
        output = new.token_ids[len(PROMPT) :]
        for token in range(VOCAB):
            expected[i, token] -= -0.25 * output.count(token) + 0.5 * (token in output)
    torch.testing.assert_close(run(news, logits, drawn), expected)


def test_counts_outgrow_their_arrays() -> None:
    output = [10 + i % 40 for i in range(55)]
    new = NewSequence(0, [1, *output], 1, [0], SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2), 0)
    logits = random_logits()[:1]
    torch.testing.assert_close(run([new], logits, drawn=55), run([new], logits))
    np.testing.assert_allclose(run([new], logits)[0], Reference(new).processed(logits[0].numpy()), rtol=1e-5, atol=1e-6)


def test_everything_at_once_in_the_documented_order() -> None:
    rich = SamplingParams(
        allowed_token_ids=tuple(range(50)),
        logit_bias={20: 1.0, 21: -30.0, 55: 100.0},
        min_tokens=9,
        repetition_penalty=1.7,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    )
    more = {"stop_token_ids": (2,), "bad_words_token_ids": ((23, 24), (20, 24), (8,))}
    news = sequences(rich, **more)
    news[1] = NewSequence(1, PROMPT, 4, [0], SamplingParams(), 0)
    logits = random_logits()
    expected = np.stack([Reference(new).processed(row) for new, row in zip(news, logits.numpy(), strict=True)])
    np.testing.assert_allclose(run(news, logits), expected, rtol=1e-5, atol=1e-6)


def test_few_allowed_tokens_are_settled_among_candidates() -> None:
    logits = torch.full((COUNT, 400), -torch.inf)
    logits[:, [3, 300]] = torch.tensor([1.0, 2.0])
    batch = InputBatch(COUNT, 64, 16, 400)
    rows = np.array([batch.add(new) for new in sequences(SamplingParams(top_k=50))])
    maxima = BlockMaxima(logits)
    chosen = RandomRows.gather(np.arange(COUNT), batch.sampling[rows], batch.num_tokens[rows], maxima.peak)
    weights, ids, complete = truncate_candidates(maxima, chosen, 64)
    assert complete.all()
    assert [row[w > 0].tolist() for row, w in zip(ids, weights, strict=True)] == [[300, 3]] * COUNT


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.8])
def test_truncation(fields: dict[str, float], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **fields)  # type: ignore[arg-type]
    warpers = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(params.min_p)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    logits = random_logits(seed=int(10 * temperature))
    expected = expect(warpers, sequences(params), logits).softmax(dim=1).double()
    batch = InputBatch(COUNT, 64, 16, VOCAB)
    rows = np.array([batch.add(new) for new in sequences(params)])
    maxima = BlockMaxima(logits)
    chosen = RandomRows.gather(np.arange(COUNT), batch.sampling[rows], batch.num_tokens[rows], maxima.peak)
    weights, ids, complete = truncate_candidates(maxima, chosen, 64)
    assert complete.all(), "the candidates contain all kept tokens"
    got = torch.zeros_like(expected).scatter_(1, torch.from_numpy(ids), torch.from_numpy(weights))
    torch.testing.assert_close(got / got.sum(dim=1, keepdim=True), expected, rtol=1e-5, atol=1e-9)
    for i in range(COUNT):
        row = truncate_row(logits[i], chosen.take(np.array([i])))
        torch.testing.assert_close(row / row.sum(), expected[i], rtol=1e-5, atol=1e-9)
