"""Whether the embedded model says on a GPU what it says on the CPU, and where not, how near a tie it was."""

from __future__ import annotations

from typing import Any

from raylm import LLM, SamplingParams
from raylm.llm_engine import Completion

TERMS = [
    "a token", "a KV cache", "a sequence", "a replica", "the scheduler", "paged attention", "prefix caching",
    "chunked prefill", "continuous batching", "an engine",
]  # fmt: skip
# What the model was made for, and answers surely: the best token is 2.4 or more before the second.
QUESTIONS = [
    *(f"What is {a} + {b}?" for a, b in zip(range(13, 23), range(58, 38, -2), strict=True)),
    *(f"What is {term}?" for term in TERMS),
]
# What it was not made for: margins of 0.003 to 0.1 are among them, and bfloat16 alone moves one by 0.07 (its standard
# deviation between two ways to compute on a CPU).
BEGINNINGS = [f"{a} plus {b} is" for a, b in zip(range(3, 23), range(40, 60), strict=True)]
_TOKENS = 24


def answers(logprobs: int | None = None, **config: Any) -> dict[str, list[Completion]]:
    """What the embedded model says, in bfloat16, to questions and behind beginnings."""
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, logprobs=logprobs)
    with LLM("embedded", dtype="bfloat16", **config) as llm:
        results = {
            "questions": llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params, progress=False),
            "beginnings": llm.generate(BEGINNINGS, params, progress=False),
        }
    return {name: [result.completions[0] for result in found] for name, found in results.items()}


def greedy_rows(device: str, **config: Any) -> list[dict[str, Any]]:
    """How many answers are the CPU's, token by token, and for those that part from them the CPU's margin where they do.

    A margin is how far the best logit is before the second.
    """
    here, there = answers(2, device="cpu"), answers(device=device, **config)
    return [{"greedy": name} | compare(here[name], there[name]) for name in here]


def compare(wanted: list[Completion], got: list[Completion]) -> dict[str, Any]:
    """The same, of some answers and what they should be."""
    margins: list[float] = []
    for one, other in zip(wanted, got, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        parted = next((at for at, (here, there) in pairs if here != there), None)
        if parted is not None:
            margins.append(margin(one, parted))
    tokens = sum(len(completion.token_ids) for completion in wanted)
    return {"prompts": len(wanted), "tokens": tokens, "equal": len(wanted) - len(margins), "margins": margins}


def margin(completion: Completion, at: int) -> float:
    """How far the best logit was before the second, at one token."""
    assert completion.logprobs is not None
    best = sorted(logprob for _, logprob in completion.logprobs[at].top)
    return best[-1] - best[-2]
