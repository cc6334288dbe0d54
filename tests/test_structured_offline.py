"""Structured outputs in the offline engine: with preemption, with draft tokens, and refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from raylm import LLM, SamplingParams
from raylm.engine.sequence import Sequence, Status
from raylm.errors import InvalidRequestError
from raylm.params import StructuredOutputs
from raylm.worker.sampling.grammars import AnswerMatcher
from tests.checkpoints import make_checkpoint, make_tokenizer


def test_preemption_and_speculation_change_nothing() -> None:
    """A pool too small for all sequences, chunks and drafts give the same tokens as a large pool."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 30, "maxItems": 40}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = StructuredOutputs(json=schema)
    params = [
        SamplingParams(temperature=0.8, seed=i, n=2, max_tokens=150, structured_outputs=form if i % 3 else None)
        for i in range(9)
    ]
    prompts = [f"Number {i}: " * 12 for i in range(9)]
    answers = []
    for config in ({"cache": {"num_blocks": 1024}}, {"cache": {"num_blocks": 40}}):
        guesses = 4 if config["cache"]["num_blocks"] == 40 else 0
        with LLM(**config, scheduler={"speculative_tokens": guesses, "max_num_batched_tokens": 64}) as llm:
            answers.append(llm.generate(prompts, params, progress=False))
            stats = llm._engine._core.scheduler.stats()
    assert stats.counters.preemptions > 0
    assert stats.counters.drafted_tokens > 0
    for first, second in zip(*answers, strict=True):
        assert [c.token_ids for c in first.completions] == [c.token_ids for c in second.completions]
    for i, result in enumerate(answers[1]):
        for completion in result.completions if i % 3 else ():
            jsonschema.validate(json.loads(completion.text), schema)


def test_late_masks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows skip steps, are preempted, and are drawn beside rows with drafts. Tokens and logprobs stay the same."""
    form = StructuredOutputs(regex="([ab]{2,5} )+[xyz]+")
    params = [
        SamplingParams(
            temperature=0.8,
            seed=i,
            n=2,
            max_tokens=60,
            logprobs=2 if i % 2 else None,
            prompt_logprobs=1 if i == 3 else None,
            frequency_penalty=0.5 if i == 4 else 0.0,
            min_tokens=20 if i == 5 else 0,
            structured_outputs=form if i % 3 else None,
        )
        for i in range(6)
    ]
    prompts = [f"Number {i}: " * 12 for i in range(6)]
    deferred: list[Status] = []
    defer, step, answers = Sequence.defer, AnswerMatcher._step, []

    def noted(seq: Sequence) -> None:
        deferred.append(seq.status)
        defer(seq)

    def slow(self: AnswerMatcher, *args: Any) -> None:
        time.sleep(0.002)
        step(self, *args)

    monkeypatch.setattr(Sequence, "defer", noted)
    for late in (False, True):
        for name, seconds in (("SLOW_S", -1.0), ("WAIT_S", 0.0), ("LONE_WAIT_S", 0.001)):
            monkeypatch.setattr(f"raylm.worker.sampling.grammars.{name}", seconds if late else 60.0)
        monkeypatch.setattr(AnswerMatcher, "_step", slow if late else step)
        guesses, blocks = (4, 12) if late else (0, 1024)
        scheduler = {"speculative_tokens": guesses, "max_num_batched_tokens": 64}
        with LLM(cache={"num_blocks": blocks}, scheduler=scheduler) as llm:
            answers.append(llm.generate(prompts, params, progress=False))
            preemptions = llm._engine._core.scheduler.stats().counters.preemptions
        assert bool(deferred) == late
    assert preemptions > 0
    for first, second in zip(*answers, strict=True):
        assert first.prompt_logprobs == second.prompt_logprobs
        for one, other in zip(first.completions, second.completions, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs


def test_offline_a_budget_is_refused() -> None:
    with LLM(cache={"num_blocks": 64}) as llm, pytest.raises(InvalidRequestError) as refused:
        llm.generate("x", SamplingParams(thinking_token_budget=3), progress=False)
    assert refused.value.param == "thinking_token_budget"


def test_tokens_without_a_logit_are_no_obstacle(tmp_path: Path) -> None:
    """Training may add a padding token to a tokenizer and leave the model as it is."""
    tokenizer = make_tokenizer(320)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert len(tokenizer) > 320
    tokenizer.save_pretrained(make_checkpoint(tmp_path, tokenizer=False))
    form = StructuredOutputs(regex="[a-z]{3,5}")
    with LLM(str(tmp_path), engine={"threads": 1}, cache={"num_blocks": 64}) as llm:
        (found,) = llm.generate("hello", temperature=1.0, seed=1, max_tokens=12, structured_outputs=form)
    assert re.fullmatch("[a-z]{3,5}", found.text)
