"""SmolLM2-135M-Instruct, a model trained by others: RayLM and transformers with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from raylm.checkpoint import PACKAGED, resolve
from raylm.llm import LLM
from raylm.params import SamplingParams

MODULE, _, INSTALL = PACKAGED["smollm2"]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec(MODULE) is None, reason=f"{MODULE} is not installed: {INSTALL}"),
]
TOKENS = 24
PROMPTS = [
    f"{question} {subject}?"
    for question in ("What is", "Why do people need", "Who invented", "Tell me a story about")
    for subject in (
        "a bicycle", "the moon", "a KV cache", "bread", "the number 12", "Paris", "a lighthouse", "rain", "a library",
        "ice", "a compiler", "the violin", "an ant", "tea", "a bridge", "sleep",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' model of the file, dequantized to float32 by transformers."""
    file = Path(str(resolve("smollm2")))
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def ours() -> Iterator[LLM]:
    """RayLM's model with dequantized weights, in float32."""
    with LLM("smollm2", dtype="float32", quantization="none", device="cpu", num_blocks=1024, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """64 conversations, rendered by transformers."""
    path = resolve("smollm2").path
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    inner = Tokenizer.from_file(str(path / "tokenizer.json"))
    rendered = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in PROMPTS
    )
    return [inner.encode(text, add_special_tokens=False).ids for text in rendered]


@pytest.fixture(scope="module")
def wanted(theirs: Any, prompts: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens."""
    found = []
    with torch.inference_mode():
        for ids in prompts:
            out = theirs.generate(
                torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=[0, 2], pad_token_id=2
            )
            found.append(out[0, len(ids) :].tolist())
    return found


def test_conversations_become_the_tokens_that_were_rendered(ours: LLM, prompts: list[list[int]]) -> None:
    results = ours.chat(PROMPTS, max_tokens=1, temperature=0, progress=False)
    assert [result.prompt_token_ids for result in results] == prompts


def test_greedy_texts_are_those_of_transformers_alone_and_crowded(
    ours: LLM, prompts: list[list[int]], wanted: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    crowded = ours.generate(prompts, params, progress=False)
    assert [result.completions[0].token_ids for result in crowded] == wanted
    alone = [ours.generate([ids], params, progress=False)[0] for ids in prompts[::8]]
    assert [result.completions[0].token_ids for result in alone] == wanted[::8]


def test_log_probabilities_of_prompts_are_those_of_transformers(
    ours: LLM, theirs: Any, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for ids, result in zip(prompts[:8], ours.generate(prompts[:8], params, progress=False), strict=True):
        with torch.inference_mode():
            exact = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert result.prompt_logprobs is not None
        for place in range(1, len(ids)):
            entry = result.prompt_logprobs[place]
            assert entry is not None
            assert abs(entry.logprob - float(exact[place - 1, ids[place]])) < 1e-4
