"""CausalLM: what every served language model is to the loader and to the model runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from raylm.checkpoint import Checkpoint
from raylm.models.layers import Attend, AttentionSpec
from raylm.models.linear import KernelFactory
from raylm.models.ranks import Ranks, Shard
from raylm.native import NativeDecoder


class CausalLM(nn.Module, ABC):
    """A model over one flattened batch of tokens: built on the meta device, loaded into ``targets``, then frozen.

    ``quantization`` says in words how its linear layers are quantized, None where none are. ``shards`` says by name
    which part of a checkpoint's tensor this rank holds; of those not named it holds all. ``capturable`` says whether
    ``forward`` is the same operations whatever the tokens are, as a CUDA graph must be; ``torch_multiplies`` whether
    large weights are left to torch, whichever kernels there are; ``adaptable`` whether LoRA adapters fit: its linear
    layers are named and shaped as in the Llama family.
    """

    vocab_size: int
    attention_specs: list[AttentionSpec]
    quantization: str | None = None
    capturable: bool = True
    torch_multiplies: bool = False
    adaptable: bool = False
    shards: Mapping[str, Shard] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> CausalLM:
        """Build what config.json describes, without its weights; where several ``ranks`` share it, the part of one.

        Raises:
            ConfigError: it asks for something that is not supported, named.
        """

    def materialize(self, dtype: torch.dtype, device: torch.device) -> None:
        """Give every parameter memory, as ``Module.to_empty`` would, without the import of symbolic shapes it costs."""
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(memory, requires_grad=False))

    @abstractmethod
    def targets(self) -> dict[str, Tensor]:
        """Name of a weight -> the memory that it is loaded into."""

    def places(self, found: frozenset[str]) -> dict[str, Tensor]:
        """Memory for the names that the checkpoint holds, and by its own name for each target that it does not fill."""
        return self.targets()

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint may hold ``name`` without the model having a place for it."""
        return name in self.redundant or name.endswith("rotary_emb.inv_freq")

    @property
    @abstractmethod
    def redundant(self) -> frozenset[str]:
        """Names that a checkpoint may hold beyond ``targets``: copies of what the model, or another rank, has."""

    @abstractmethod
    def freeze(self, kernels: KernelFactory) -> None:
        """Called once after loading: bring everything into the form that the forward pass reads."""

    def native_decoder(self, max_tokens: int, kv_caches: Sequence[Tensor]) -> NativeDecoder | None:
        """The same model as one native call for steps of up to ``max_tokens``; None where it runs layer by layer.

        ``kv_caches`` are the layers' pools, which stay where they are.
        """
        return None

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``input_ids`` and ``positions`` (tokens,) int64 -> hidden states (tokens, hidden_size)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, hidden_size) -> logits (rows, vocab_size) in float32, in memory of their own.

        On a rank other than 0 they are only its own part of the vocabulary.
        """
