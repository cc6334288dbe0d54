"""A simple sampler as the reference: one row at a time, fully sorted, in float64 and Python integers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raylm.messages import NewSequence
from raylm.params import SamplingParams

MASK = 2**64 - 1
GROUP = 512
Vector = NDArray[np.float64]


def splitmix64(state: int, index: int) -> int:
    """The index-th output of SplitMix64, as published."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def exponential(seed: int, position: int, index: int) -> float:
    state = splitmix64(seed & MASK, position)
    return -math.log(((splitmix64(state, index) >> 12) + 0.5) * 2.0**-52)


@dataclass
class Reference:
    """The distribution and the choice of one sequence's next token."""

    new: NewSequence

    @property
    def params(self) -> SamplingParams:
        return self.new.params

    @property
    def generated(self) -> list[int]:
        return self.new.token_ids[self.new.num_prompt_tokens :]

    def processed(self, logits: NDArray[np.float32]) -> Vector:
        """The logits after masks, bias and penalties."""
        out = logits.astype(np.float64)
        allowed = self.params.allowed_token_ids
        if allowed:
            out[[token for token in range(len(out)) if token not in allowed]] = -np.inf
        for word in self.new.bad_words_token_ids:
            head = list(word[:-1])
            if not head or self.generated[-len(head) :] == head:
                out[word[-1]] = -np.inf
        if len(self.generated) < self.params.min_tokens:
            out[list(self.new.stop_token_ids)] = -np.inf
        for token, bias in self.params.logit_bias.items():
            out[token] += max(-100.0, min(100.0, bias))
        return self._penalized(out)

    def _penalized(self, out: Vector) -> Vector:
        for token in set(self.new.token_ids):
            penalty = self.params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
            count = self.generated.count(token)
            out[token] -= self.params.frequency_penalty * count + self.params.presence_penalty * (count > 0)
        return out

    def weights(self, logits: NDArray[np.float32], slack: float = 0.0) -> Vector:
        """The unnormalised distribution. ``slack`` is a relative change of the limits."""
        scores = self.processed(logits)
        scaled = (scores - scores.max()) / self.params.temperature
        weights = np.exp(scaled)
        weights[weights < min(1.0, self.params.min_p * (1 + slack))] = 0
        if 0 < self.params.top_k < len(weights):
            weights[scores < sorted(scores, reverse=True)[self.params.top_k - 1]] = 0
        if self.params.top_p < 1:
            before, wanted = 0.0, self.params.top_p * (1 - slack) * weights.sum()
            for token in sorted(range(len(scores)), key=lambda t: (-scores[t], t)):
                before, weights[token] = before + weights[token], weights[token] * (before < wanted)
        return weights

    def draw(self, logits: NDArray[np.float32], slack: float = 0.0) -> int:
        """Draw a group of tokens, then a token of this group."""
        if self.params.temperature == 0:
            scores = self.processed(logits)
            return min(range(len(scores)), key=lambda t: (-scores[t], t))
        weights = self.weights(logits, slack)
        starts = range(0, len(weights), GROUP)
        masses = {i: float(weights[start : start + GROUP].sum()) for i, start in enumerate(starts)}
        block = self._race(masses, first_index=2**32)
        inside = range(block * GROUP, min(len(weights), (block + 1) * GROUP))
        return self._race({token: float(weights[token]) for token in inside}, first_index=0)

    def _race(self, weights: dict[int, float], first_index: int) -> int:
        position = len(self.new.token_ids)
        times = {i: exponential(self.new.seed, position, first_index + i) / w for i, w in weights.items() if w > 0}
        return min(times, key=times.__getitem__)
