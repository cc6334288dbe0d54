"""Families with transformers' modeling code in the whole engine: greedy tokens equal transformers' generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raylm import LLM, SamplingParams
from raylm.llm import GenerationResult
from tests.checkpoints import make_tokenizer
from tests.models.transformers_backend.families import make_family
from tests.reference import greedy, random_prompts

MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["Gemma2ForCausalLM", "Qwen3MoeForCausalLM"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_family(tmp_path_factory.mktemp("universal"), request.param)
    make_tokenizer(320).save_pretrained(path)
    return path


def served(path: Path, **config: Any) -> LLM:
    return LLM(str(path), engine={"threads": 2}, max_model_len=128, **config)


def tokens(results: list[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


def test_many_at_once_in_chunks(path: Path) -> None:
    prompts = random_prompts(24, 320)
    scheduler = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
    with served(path, cache={"num_blocks": 256}, scheduler=scheduler) as llm:
        assert tokens(llm.generate(prompts, GREEDY, progress=False)) == greedy(path, prompts, MAX_TOKENS)


def test_with_preemptions(path: Path) -> None:
    prompts, long = random_prompts(16, 320, longest=30, seed=1), 40  # sequences grow by more than one block
    params = SamplingParams(temperature=0.0, max_tokens=long, ignore_eos=True)
    with served(path, cache={"num_blocks": 16}, scheduler={"max_num_seqs": 12}) as llm:
        assert tokens(llm.generate(prompts, params, progress=False)) == greedy(path, prompts, long)
        assert llm._engine._core.scheduler.counters.preemptions > 0


def test_with_a_warm_prefix_cache(path: Path) -> None:
    prompts = random_prompts(8, 320, longest=30, shared=50, seed=2)
    with served(path, cache={"num_blocks": 256}) as llm:
        first = [llm.generate(prompt, GREEDY, progress=False)[0] for prompt in prompts]
        again = llm.generate(prompts, GREEDY, progress=False)
    assert tokens(first) == tokens(again) == greedy(path, prompts, MAX_TOKENS)
    assert all(result.num_cached_tokens >= 48 for result in [*first[1:], *again])


def test_draft_tokens_are_verified(path: Path) -> None:
    prompts = [prompt * 3 for prompt in random_prompts(6, 320, longest=12, seed=3)]
    with served(path, cache={"num_blocks": 256}, scheduler={"speculative_tokens": 4}) as llm:
        assert tokens(llm.generate(prompts, GREEDY, progress=False)) == greedy(path, prompts, MAX_TOKENS)
