"""CausalLM: what every served language model is to the loader and to the model runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from raylm.checkpoint import Checkpoint
from raylm.models.checkpoint_check import NO_WEIGHTS
from raylm.models.elementwise import KVPlaces
from raylm.models.linear import KernelFactory, Linear, Weighted
from raylm.models.ranks import Ranks
from raylm.native import NativeDecoder


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention: ``sliding_window`` counts the tokens that a query sees, itself included, and ``softcap``
    bounds scores by ``softcap * tanh(score / softcap)``. A KV cache of fp8 holds keys and values over their scales.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def kind(self) -> AttentionSpec:
        """The same of all layers that differ in numbers alone."""
        return replace(self, layer=0, key_scale=1.0, value_scale=1.0)


class Attend(Protocol):
    """Attention over each token's own sequence, past included; the model runner provides it."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """``q`` (tokens, num_heads, head_dim), ``k`` and ``v`` (tokens, num_kv_heads, head_dim) -> as ``q``.

        Without ``k`` and ``v`` they have been written to ``places`` before.
        """

    def places(self, spec: AttentionSpec) -> KVPlaces | None:
        """Where a layer may write the step's keys and values itself; None where attention does it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank holds the entries ``part`` along ``dim`` (0 or 1), of which the checkpoint's tensor has ``count``."""

    dim: int
    part: range
    count: int


class CausalLM(nn.Module, ABC):
    """A model over one flattened batch of tokens: built on the meta device, loaded into ``targets``, then frozen.

    ``dtype`` is what it computes in; ``quantization`` describes how its linear layers are quantized. ``shards`` has by
    name which part of a checkpoint's tensor this rank holds, if not all. ``capturable``: ``forward`` is the same
    operations whatever the tokens are, as a CUDA graph must be. ``torch_multiplies``: large weights are left to torch,
    whichever kernels there are. ``adaptable``: LoRA adapters fit, its linear layers are named and shaped as in the
    Llama family.
    """

    vocab_size: int
    dtype: torch.dtype
    attention_specs: list[AttentionSpec]
    quantization: str | None = None
    capturable: bool = True
    torch_multiplies: bool = False
    adaptable: bool = False
    shards: Mapping[str, Shard] = MappingProxyType({})

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, ranks: Ranks) -> CausalLM:
        """What config.json describes, without its weights, or ConfigError; of several ``ranks`` the part of one."""

    def materialize(self, dtype: torch.dtype, device: torch.device) -> None:
        """Give every parameter memory, as ``Module.to_empty`` would, without the import of symbolic shapes it costs."""
        self.dtype = dtype
        for module in self.modules():
            if isinstance(module, Linear):
                module.dtype = dtype
            for name, parameter in list(module.named_parameters(recurse=False)):
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(memory, requires_grad=False))

    def targets(self) -> dict[str, Tensor]:
        """Names of weights, and the memory that they are loaded into."""
        return {name: target for name, target in self._weights() if name not in self.redundant}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self.named_modules():
            if isinstance(module, Weighted):
                yield from module.targets(path)

    def places(self, found: frozenset[str]) -> dict[str, Tensor]:
        """Memory for the names that the checkpoint holds, and by its own name for each target that it does not fill."""
        return self.targets()

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint may hold ``name`` without the model having a place for it."""
        return name in self.redundant or name.endswith(NO_WEIGHTS)

    @property
    @abstractmethod
    def redundant(self) -> frozenset[str]:
        """Names that a checkpoint may hold beyond ``targets``: copies of what the model, or another rank, has."""

    @abstractmethod
    def freeze(self, kernels: KernelFactory) -> None:
        """Called once after loading: bring everything into the form that the forward pass reads."""

    def native_decoder(self, max_tokens: int, kv_caches: Sequence[Tensor]) -> NativeDecoder | None:
        """The same model as one native call for steps of up to ``max_tokens``; None where it runs layer by layer."""
        return None

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``input_ids`` and ``positions`` (tokens,) int64 -> hidden states (tokens, hidden_size)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, hidden_size) -> float32 logits (rows, vocab_size); above rank 0 only its own part."""
