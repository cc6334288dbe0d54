"""Encoder: models whose tokens attend to tokens on both sides. They give vectors and scores, and generate nothing."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from raylm.models.causal_lm import Attend, CausalLM


class Encoder(CausalLM):
    """A model that computes a whole prompt at once. It has no KV cache and no language-model head.

    ``attention_specs`` is empty.
    """

    capturable = False

    @abstractmethod
    def encode(self, ids: Tensor, types: Tensor) -> Tensor:
        """``ids`` and token ``types`` (tokens,) int64 of one prompt -> hidden states (tokens, hidden_size)."""

    @abstractmethod
    def score(self, hidden: Tensor) -> Tensor:
        """The hidden states (tokens, hidden_size) of a pair of texts -> its score (1,) float32."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        raise AssertionError("an encoder computes whole prompts")

    def logits(self, hidden: Tensor) -> Tensor:
        """No row draws a token. (0, hidden_size) -> (0, vocab_size)."""
        assert len(hidden) == 0, "an encoder draws no tokens"
        return hidden.new_empty((0, self.vocab_size))
