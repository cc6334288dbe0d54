"""Whether the embedded model says on a GPU what it says on the CPU, and where not, how near a tie it was."""

from __future__ import annotations

from typing import Any

from raylm import LLM, SamplingParams
from raylm.llm import Completion

PROMPTS = [f"{a} plus {b} is" for a, b in zip(range(3, 23), range(40, 60), strict=True)]
_TOKENS = 24


def answers(logprobs: int | None = None, **config: Any) -> list[Completion]:
    """What the embedded model says to each prompt, in bfloat16."""
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, logprobs=logprobs)
    with LLM("embedded", dtype="bfloat16", **config) as llm:
        return [result.completions[0] for result in llm.generate(PROMPTS, params, progress=False)]


def greedy_row(device: str, **config: Any) -> dict[str, Any]:
    """How many answers are the CPU's, token by token, and for those that part from them the CPU's margin where they do.

    A margin is how far the best logit is before the second; both sides sum in float32 in an order of their own, so
    margins below 0.01 are ties.
    """
    margins: list[float] = []
    tokens = 0
    for wanted, got in zip(answers(2, device="cpu"), answers(device=device, **config), strict=True):
        tokens += len(wanted.token_ids)
        pairs = enumerate(zip(wanted.token_ids, got.token_ids, strict=False))
        parted = next((at for at, (here, there) in pairs if here != there), None)
        if parted is not None:
            margins.append(margin(wanted, parted))
    return {"greedy_prompts": len(PROMPTS), "tokens": tokens, "equal": len(PROMPTS) - len(margins), "margins": margins}


def margin(completion: Completion, at: int) -> float:
    """How far the best logit was before the second, at one token."""
    assert completion.logprobs is not None
    best = sorted(logprob for _, logprob in completion.logprobs[at].top)
    return best[-1] - best[-2]
