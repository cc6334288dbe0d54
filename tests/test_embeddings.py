"""Vectors of prompts equal transformers' hidden states, pooled: in chunks, in batches, with cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from raylm.errors import ContextLengthError, InvalidRequestError
from raylm.llm import LLM
from raylm.params import PoolingParams, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.reference import random_prompts

CONFIG = {
    "cache": {"num_blocks": 24},
    "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "engine": {"threads": 2},
    "max_model_len": 128,
}
WAYS = ["last", "mean", "cls"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def states(checkpoint: Path) -> Iterator[object]:
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.inference_mode()
    def hidden(prompt: list[int]) -> np.ndarray:
        return model(torch.tensor([prompt])).last_hidden_state[0].numpy()

    return hidden


def reference(hidden: np.ndarray, params: PoolingParams) -> np.ndarray:
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(axis=0)}[params.pooling][: params.dimensions]
    return vector / np.linalg.norm(vector) if params.normalize else vector


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("normalize", "dimensions"), [(True, None), (False, None), (True, 10)])
def test_vectors_are_those_of_transformers(llm, states, way, normalize, dimensions) -> None:  # type: ignore[no-untyped-def]
    params = PoolingParams(pooling=way, normalize=normalize, dimensions=dimensions)
    prompts = [*random_prompts(12, 320, longest=80, shared=40), [7]]
    for _ in range(2):  # in the second round the prefixes are cached
        for prompt, vector in zip(prompts, llm.embed(prompts, params, progress=False), strict=True):
            np.testing.assert_allclose(np.asarray(vector), reference(states(prompt), params), atol=2e-5, rtol=1e-4)


def test_vectors_and_tokens_share_a_batch(llm: LLM, states) -> None:  # type: ignore[no-untyped-def]
    """The pool is small, so sequences are preempted too."""
    prompts = random_prompts(10, 320, longest=60, seed=3)
    sampling, params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), PoolingParams(pooling="mean")
    alone = [result.token_ids for result in llm.generate(prompts, sampling, progress=False)]

    with ThreadPoolExecutor(2) as callers:
        results = callers.submit(llm.generate, prompts, sampling, progress=False)
        vectors = callers.submit(llm.embed, prompts * 3, params, progress=False)
    assert [result.token_ids for result in results.result()] == alone
    for prompt, vector in zip(prompts * 3, vectors.result(), strict=True):
        np.testing.assert_allclose(np.asarray(vector), reference(states(prompt), params), atol=2e-5, rtol=1e-4)


def test_the_whole_context_may_be_embedded_and_no_more(llm: LLM, states) -> None:  # type: ignore[no-untyped-def]
    prompt = [5 + n % 300 for n in range(128)]
    for way in WAYS:
        params = PoolingParams(pooling=way)
        (vector,) = llm.embed(prompt, params, progress=False)
        np.testing.assert_allclose(np.asarray(vector), reference(states(prompt), params), atol=2e-5, rtol=1e-4)
    with pytest.raises(ContextLengthError, match="maximum context length is 128 tokens"):
        llm.embed([*prompt, 5], progress=False)


def test_wrong_parameters_are_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="at most 64") as dimensions:
        llm.embed("a", PoolingParams(dimensions=65), progress=False)
    assert dimensions.value.param == "dimensions"
    for field, value in (("dimensions", 0), ("pooling", "max")):
        with pytest.raises(InvalidRequestError) as wrong:
            PoolingParams(**{field: value})
        assert wrong.value.param == field
