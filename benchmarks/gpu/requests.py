"""Offline requests of different lengths: raylm.LLM, and transformers' continuous batching on the same weights."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PROMPTS, _ANSWERS = (0.06, 0.6), (0.03, 0.3)  # ranges, as shares of the longest sequence
_ALPHABET = 256  # token ids of prompts


@dataclass(frozen=True)
class Load:
    """Requests with random prompts. Answers have exactly ``answers[i]`` tokens and are greedy."""

    prompts: list[list[int]]
    answers: list[int]

    @classmethod
    def of(cls, count: int, longest: int) -> Load:
        """``count`` requests of up to ``longest`` tokens each."""
        draw = random.Random(count)
        lengths = [int(longest * draw.uniform(*_PROMPTS)) for _ in range(count)]
        prompts = [[draw.randrange(_ALPHABET) for _ in range(length)] for length in lengths]
        return cls(prompts, [int(longest * draw.uniform(*_ANSWERS)) for _ in range(count)])


def by_raylm(path: Path, load: Load, config: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of ``raylm.LLM``, from the call to the last answer."""
    from raylm import LLM, SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in load.answers]
    with LLM(path, **config) as llm:
        llm.generate(load.prompts[:8], params[:8], progress=False)
        started = time.perf_counter()
        results = llm.generate(load.prompts, params, progress=False)
        taken = time.perf_counter() - started
    wrong = sum(len(result.token_ids) != count for result, count in zip(results, load.answers, strict=True))
    return _row("raylm", load, taken, wrong)


def by_transformers(path: Path, load: Load, device: torch.device) -> dict[str, Any]:
    """Tokens per second of transformers' ``generate_batch``.

    All its requests of a call have the same answer length, so each gets the mean length of the load's answers.
    """
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="paged|sdpa")
    model.to(device)
    each = round(sum(load.answers) / len(load.answers))
    same = Load(load.prompts, [each] * len(load.prompts))
    settings = GenerationConfig(max_new_tokens=each, do_sample=False, eos_token_id=-1, pad_token_id=0)
    given = {"generation_config": settings, "continuous_batching_config": ContinuousBatchingConfig()}
    model.generate_batch(load.prompts[:8], **given)
    started = time.perf_counter()
    outputs = model.generate_batch(load.prompts, **given)
    taken = time.perf_counter() - started
    wrong = sum(len(output.generated_tokens) != each for output in outputs.values()) + len(load.prompts) - len(outputs)
    return _row("transformers", same, taken, wrong)


def _row(engine: str, load: Load, taken: float, wrong: int) -> dict[str, Any]:
    tokens = sum(load.answers)
    return {
        "requests": len(load.prompts),
        "engine": engine,
        "prompt_tokens": sum(map(len, load.prompts)),
        "tokens": tokens,
        "wrong": wrong,
        "s": taken,
        "tok_s": tokens / taken,
    }
