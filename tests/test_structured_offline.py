"""Forms of answers in the offline engine: preempted, with draft tokens, and refused."""

from __future__ import annotations

import json

import jsonschema
import pytest

from raylm import LLM, SamplingParams
from raylm.errors import InvalidRequestError
from raylm.params import StructuredOutputs


@pytest.mark.uses("speculation")
def test_preemption_and_speculation_change_nothing() -> None:
    """A pool too small for all, chunks, and guesses: the same tokens as with room for everything."""
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


def test_offline_a_budget_is_refused() -> None:
    with LLM(cache={"num_blocks": 64}) as llm, pytest.raises(InvalidRequestError) as refused:
        llm.generate("x", SamplingParams(thinking_token_budget=3), progress=False)
    assert refused.value.param == "thinking_token_budget"
