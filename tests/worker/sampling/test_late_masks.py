"""Only rows with late masks skip a step, and they draw the same tokens later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raylm.checkpoint import EMBEDDED
from raylm.grammar import grammar_of
from raylm.messages import NewSequence
from raylm.params import SamplingParams
from raylm.params import StructuredOutputs as Spec
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.grammars import AnswerMatcher, Grammars
from raylm.worker.sampling.sampler import LATE, NOT_FINITE, Sampler

VOCAB, EOS = 6142, (2, 0)
GRAMMAR = grammar_of(Spec(regex="[ab]+c"))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """All masks after the first token are slow. They are computed when the event is set."""
    step, event = AnswerMatcher._step, threading.Event()

    def wait_and_step(self: AnswerMatcher, matcher: Any, tokens: list[int]) -> None:
        if tokens:
            assert event.wait(300)
        step(self, matcher, tokens)

    monkeypatch.setattr(AnswerMatcher, "_step", wait_and_step)
    monkeypatch.setattr("raylm.worker.sampling.grammars.SLOW_S", -1.0)
    yield event
    event.set()


def batch_of(*grammars: str | None) -> InputBatch:
    batch = InputBatch(4, 128, 16, VOCAB, Grammars(EMBEDDED, EOS, VOCAB))
    batch.prepare_grammar(GRAMMAR)
    for seq_id, grammar in enumerate(grammars):
        params = SamplingParams(temperature=1.0, logprobs=1)
        batch.add(NewSequence(seq_id, [9, 10], 2, [0], params, seq_id, stop_token_ids=EOS, grammar=grammar))
    return batch


def logits(step: int) -> torch.Tensor:
    return torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(step))


def settle(batch: InputBatch, seq_id: int) -> None:
    batch.processors[-1].states[int(batch.rows([seq_id])[0])].answer.settle()


def test_a_late_row_sits_out_alone_and_draws_the_same_token(held: threading.Event) -> None:
    batch = batch_of(GRAMMAR, None)
    rows = batch.rows([0, 1])
    first = Sampler().sample(logits(0), rows, batch)
    assert (first.token_ids != LATE).all()
    batch.append_tokens(rows, first.token_ids)
    late = Sampler().sample(logits(1), rows, batch)
    assert late.token_ids[0] == LATE
    assert late.token_ids[1] >= 0
    assert late.logprobs is not None
    assert late.logprobs.counts == [0, 2]
    assert not late.failed
    held.set()
    settle(batch, 0)
    drawn = Sampler().sample(logits(1), rows, batch)
    assert drawn.token_ids[1] == late.token_ids[1]
    undisturbed = batch_of(GRAMMAR, None)
    undisturbed.append_tokens(rows, first.token_ids)
    settle(undisturbed, 0)
    assert Sampler().sample(logits(1), rows, undisturbed).token_ids.tolist() == drawn.token_ids.tolist()


def test_what_is_wrong_with_a_late_row_is_told_when_it_draws(held: threading.Event) -> None:
    batch = batch_of(GRAMMAR)
    rows = batch.rows([0])
    batch.append_tokens(rows, Sampler().sample(logits(0)[:1], rows, batch).token_ids)
    broken = torch.full((1, VOCAB), float("nan"))
    late = Sampler().sample(broken.clone(), rows, batch)
    assert late.token_ids.tolist() == [LATE]
    assert not late.failed
    held.set()
    settle(batch, 0)
    assert Sampler().sample(broken, rows, batch).failed == [(0, NOT_FINITE)]


def test_masks_beyond_the_budget_of_a_step_are_left_to_the_thread(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylm.worker.sampling.grammars.QUICK_MASKS_S", -1.0)
    batch = batch_of(GRAMMAR, None)
    batch.processors[-1].states[int(batch.rows([0])[0])].answer.pace.slow = False
    rows = batch.rows([0, 1])
    batch.append_tokens(rows, Sampler().sample(logits(0), rows, batch).token_ids)
    assert Sampler().sample(logits(1), rows, batch).token_ids[0] == LATE
    held.set()
    settle(batch, 0)
    assert (Sampler().sample(logits(1), rows, batch).token_ids != LATE).all()
