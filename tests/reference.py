"""The independent reference for whole answers: transformers' generate, greedy, one prompt at a time, in float32."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@lru_cache(maxsize=2)
def _model(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def greedy(path: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Exactly ``max_tokens`` tokens for each prompt, also after an end token."""
    return [_greedy(path, tuple(prompt), max_tokens) for prompt in prompts]


@lru_cache(maxsize=512)
@torch.inference_mode()
def _greedy(path: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    model = _model(path)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def random_prompts(
    count: int, vocab_size: int, *, longest: int = 60, shared: int = 0, seed: int = 0
) -> list[list[int]]:
    """Prompts of 3 to ``longest`` random ids that are not special, behind a common prefix of ``shared`` ids."""
    rng = random.Random(seed)
    head = rng.choices(range(8, vocab_size), k=shared)
    return [head + rng.choices(range(8, vocab_size), k=rng.randint(3, longest)) for _ in range(count)]
