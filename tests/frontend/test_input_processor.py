"""InputProcessor: the parameters that it completes, and errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raylm.checkpoint import Checkpoint
from raylm.errors import ConfigError, ContextLengthError, InvalidRequestError
from raylm.frontend import RequestHead
from raylm.frontend.defaults import default_max_tokens, sampling_defaults
from raylm.frontend.input_processor import InputProcessor, Limits
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.messages import EngineCoreRequest
from raylm.params import SamplingParams

LIMITS = Limits(max_model_len=100, vocab_size=330)


@pytest.fixture
def processor(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, (2,), None)


def build(processor: InputProcessor, prompt: list[int], salt: str | None = None, **params: Any) -> EngineCoreRequest:
    head = RequestHead(request_id="r", priority=3, cache_salt=salt, arrival_time=7.0)
    return processor.build(prompt, SamplingParams(**params), LIMITS, head)


def test_resolves_what_the_caller_left_open(processor: InputProcessor) -> None:
    first, second = build(processor, [5] * 40), build(processor, [5] * 40, seed=11, max_tokens=60)
    assert first.params.max_tokens == second.params.max_tokens == 60
    assert first.params.seed is not None
    assert first.params.seed != build(processor, [5] * 40).params.seed
    assert second.params.seed == 11
    assert first.key != second.key
    assert (first.eos_token_ids, first.priority, first.arrival_time) == ((2,), 3, 7.0)


async def test_bad_words_are_banned_at_the_start_and_after_a_space(
    processor: InputProcessor, tokenizer: Tokenizer
) -> None:
    found = await processor.bad_words(("hello world",), LIMITS)
    assert {tokenizer.backend.decode(list(ids)) for ids in found} == {"hello world", " hello world"}


async def test_bad_words_that_are_no_text_are_refused(processor: InputProcessor) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await processor.bad_words(("\ud800",), LIMITS)
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("prompt", "params", "phrase"),
    [
        ([5] * 100, {}, "your prompt has 100 tokens"),
        ([5] * 41, {"max_tokens": 60}, "you requested 101 tokens (41 in the prompt, 60 in the completion)"),
    ],
)
def test_refuses_what_does_not_fit(
    processor: InputProcessor, prompt: list[int], params: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        build(processor, prompt, **params)
    assert caught.value.message.startswith("This model's maximum context length is 100 tokens. However, ")
    assert phrase in caught.value.message
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([5, 330], {}, "prompt"),
        ([-1, 5], {}, "prompt"),
        ([5], {"logit_bias": {330: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([5], {"allowed_token_ids": (5, 330)}, "allowed_token_ids"),
        ([5], {"stop_token_ids": (330,)}, "stop_token_ids"),
        ([5], {"stop": ("x" * 2049,)}, "stop"),
        ([5], {"salt": ""}, "cache_salt"),
        ([5], {"salt": "x" * 129}, "cache_salt"),
        ([5] * 90, {"min_tokens": 11}, "min_tokens"),
    ],
)
def test_refuses(processor: InputProcessor, prompt: list[int], params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        build(processor, prompt, **params)
    assert caught.value.param == param
    assert len(caught.value.message) < 200


def test_long_texts_are_refused_before_they_are_tokenized(processor: InputProcessor, tokenizer: Tokenizer) -> None:
    most = 100 * tokenizer.longest_token_chars
    processor.check_chars(most, LIMITS.max_model_len, "prompt")
    with pytest.raises(ContextLengthError, match="maximum context length is 100 tokens"):
        processor.check_chars(most + 1, LIMITS.max_model_len, "prompt")


def test_defaults_come_from_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(Checkpoint(tmp_path)) == {}
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2}))
    assert sampling_defaults(Checkpoint(tmp_path)) == {"temperature": 0.6, "top_k": 20}
    file.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ConfigError, match=r"generation_config\.json.*temperature"):
        sampling_defaults(Checkpoint(tmp_path))


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "9"])
def test_the_length_of_answers_comes_from_the_checkpoint(tmp_path: Path, wrong: object) -> None:
    assert default_max_tokens(Checkpoint(tmp_path)) is None
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"max_new_tokens": 2048}))
    assert default_max_tokens(Checkpoint(tmp_path)) == 2048
    file.write_text(json.dumps({"max_new_tokens": wrong}))
    with pytest.raises(ConfigError, match=r"generation_config\.json.*max_new_tokens"):
        default_max_tokens(Checkpoint(tmp_path))


def test_a_default_length_gives_way(tokenizer: Tokenizer) -> None:
    processor = InputProcessor(tokenizer, (2,), default_max_tokens=30)
    assert build(processor, [5] * 40).params.max_tokens == 30
    assert build(processor, [5] * 40, max_tokens=60).params.max_tokens == 60
    assert build(processor, [5] * 40, min_tokens=33).params.max_tokens == 33
    assert build(processor, [5] * 90).params.max_tokens == 10
