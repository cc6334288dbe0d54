"""Checks that the embedded model's greedy answers on a GPU equal those on the CPU.

For differences it measures the margin.
"""

from __future__ import annotations

from typing import Any

from raylm import LLM, SamplingParams
from raylm.llm_engine import Completion

TERMS = [
    "a token", "a KV cache", "a sequence", "a replica", "the scheduler", "paged attention", "prefix caching",
    "chunked prefill", "continuous batching", "an engine",
]  # fmt: skip
# Questions in the model's training domain. The best token's logit is at least 2.4 above the second.
QUESTIONS = [
    *(f"What is {a} + {b}?" for a, b in zip(range(13, 23), range(58, 38, -2), strict=True)),
    *(f"What is {term}?" for term in TERMS),
]
# Prompts outside the training domain. Some margins are 0.003 to 0.1. In bfloat16 alone a margin differs by 0.07
# (standard deviation between two ways to compute on a CPU).
BEGINNINGS = [f"{a} plus {b} is" for a, b in zip(range(3, 23), range(40, 60), strict=True)]
_TOKENS = 24


def answers(logprobs: int | None = None, **config: Any) -> dict[str, list[Completion]]:
    """The embedded model's answers in bfloat16 to QUESTIONS and BEGINNINGS."""
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, logprobs=logprobs)
    with LLM("embedded", dtype="bfloat16", **config) as llm:
        results = {
            "questions": llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params, progress=False),
            "beginnings": llm.generate(BEGINNINGS, params, progress=False),
        }
    return {name: [result.completions[0] for result in found] for name, found in results.items()}


def greedy_rows(device: str, **config: Any) -> list[dict[str, Any]]:
    """The number of answers equal to the CPU's, and for other answers the CPU's margin at the first different token.

    A margin is the difference between the best and the second logit.
    """
    here, there = answers(2, device="cpu"), answers(device=device, **config)
    return [{"greedy": name} | compare(here[name], there[name]) for name in here]


def compare(wanted: list[Completion], got: list[Completion]) -> dict[str, Any]:
    """The figures of ``greedy_rows`` for some answers and their expected answers."""
    margins: list[float] = []
    for one, other in zip(wanted, got, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        parted = next((at for at, (here, there) in pairs if here != there), None)
        if parted is not None:
            margins.append(margin(one, parted))
    tokens = sum(len(completion.token_ids) for completion in wanted)
    return {"prompts": len(wanted), "tokens": tokens, "equal": len(wanted) - len(margins), "margins": margins}


def margin(completion: Completion, at: int) -> float:
    """The difference between the best and the second logit at one token."""
    assert completion.logprobs is not None
    best = sorted(logprob for _, logprob in completion.logprobs[at].top)
    return best[-1] - best[-2]
