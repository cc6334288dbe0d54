"""CausalLM: what every served language model is to the loader and to the model runner."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from raylm.checkpoint import Checkpoint
from raylm.models.layers import Attend, AttentionSpec
from raylm.models.linear import KernelFactory
from raylm.native import NativeDecoder


class CausalLM(nn.Module, ABC):
    """A model over one flattened batch of tokens: built on the meta device, loaded into ``targets``, then frozen.

    ``quantization`` says in words how its linear layers are quantized, None where none are.
    """

    vocab_size: int
    attention_specs: list[AttentionSpec]
    quantization: str | None = None

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> CausalLM:
        """Build what config.json describes, without its weights.

        Raises:
            ConfigError: it asks for something that is not supported, named.
        """

    @abstractmethod
    def targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the memory that weight is loaded into."""

    @property
    @abstractmethod
    def redundant(self) -> frozenset[str]:
        """Names that a checkpoint may hold beyond ``targets``, as copies of what the model has already."""

    @abstractmethod
    def freeze(self, kernels: KernelFactory) -> None:
        """Called once after loading: bring everything into the form that the forward pass reads."""

    def native_decoder(self, max_tokens: int) -> NativeDecoder | None:
        """The same model as one native call for steps of up to ``max_tokens``; None where it runs layer by layer."""
        return None

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``input_ids`` and ``positions`` (tokens,) int64 -> hidden states (tokens, hidden_size)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, hidden_size) -> logits (rows, vocab_size) in float32, in memory of their own."""
