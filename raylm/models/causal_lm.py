"""CausalLM: the interface of all served language models for the loader and the model runner."""

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
    """The attention of one layer.

    ``sliding_window`` is the number of tokens that a query attends to, with itself. ``softcap`` bounds scores by
    ``softcap * tanh(score / softcap)``. An fp8 KV cache stores keys and values divided by their scales.
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
        """This spec without its layer and scales. Equal for all layers that differ only in these."""
        return replace(self, layer=0, key_scale=1.0, value_scale=1.0)


class Attend(Protocol):
    """Computes attention of each token to its own sequence, with past tokens. The model runner provides it."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """``q`` (tokens, num_heads, head_dim), ``k`` and ``v`` (tokens, num_kv_heads, head_dim) -> as ``q``.

        Without ``k`` and ``v`` they must have been written to ``places``.
        """

    def places(self, spec: AttentionSpec) -> KVPlaces | None:
        """The places where a layer may write the step's keys and values. None if attention writes them."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor on one rank: the entries ``part`` along ``dim`` (0 or 1) of ``count`` in the checkpoint."""

    dim: int
    part: range
    count: int


class CausalLM(nn.Module, ABC):
    """A model over one flattened batch of tokens. Built on the meta device, loaded into ``targets``, then frozen.

    ``dtype`` is the dtype of computation. ``quantization`` describes the quantization of its linear layers. ``shards``
    has, by name, the part of a checkpoint's tensor on this rank; tensors that it has completely are omitted.
    ``capturable``: ``forward`` runs the same operations for all tokens, as a CUDA graph requires. ``torch_multiplies``:
    torch multiplies some large weights, even if native kernels are available. ``adaptable``: LoRA adapters can be
    applied, because its linear layers have the names and shapes of the Llama family.
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
        """Build the model of config.json without weights. With several ``ranks``, build the part of one.

        Raises:
            ConfigError: the configuration is not supported.
        """

    def materialize(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate every parameter, like ``Module.to_empty``, but without its slow import of symbolic shapes."""
        self.dtype = dtype
        for module in self.modules():
            if isinstance(module, Linear):
                module.dtype = dtype
            for name, parameter in list(module.named_parameters(recurse=False)):
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(memory, requires_grad=False))

    def compile_for_one_row(self, device: torch.device) -> None:
        """Compile the kernels of linear layers for one row, by a product of each. No profile run has such a step."""
        for module in self.modules():
            if isinstance(module, Linear):
                module(torch.zeros(1, module.in_features, dtype=self.dtype, device=device))

    def targets(self) -> dict[str, Tensor]:
        """The names of weights, and the memory that they are loaded into."""
        return {name: target for name, target in self._weights() if name not in self.redundant}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self.named_modules():
            if isinstance(module, Weighted):
                yield from module.targets(path)

    def places(self, found: frozenset[str]) -> dict[str, Tensor]:
        """Memory for the names in the checkpoint, and for each target that they do not fill, by its own name."""
        return self.targets()

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint may have a tensor ``name`` that the model does not use."""
        return name in self.redundant or name.endswith(NO_WEIGHTS)

    @property
    @abstractmethod
    def redundant(self) -> frozenset[str]:
        """Names that a checkpoint may have besides ``targets``: copies of weights of this model or of other ranks."""

    @property
    def embedding(self) -> Tensor | None:
        """The memory of the embedding before ``freeze``, which a tied head shares. None if another stage has it."""
        return None

    @abstractmethod
    def freeze(self, kernels: KernelFactory) -> None:
        """Convert everything to the form of the forward pass. Called once after loading."""

    def native_decoder(self, max_tokens: int, kv_caches: Sequence[Tensor]) -> NativeDecoder | None:
        """The model as one native call for steps of up to ``max_tokens``; None if it runs layer by layer."""
        return None

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """``input_ids`` and ``positions`` (tokens,) int64 -> hidden states (tokens, hidden_size)."""

    def empty_stream(self, tokens: int) -> Tensor:
        """Memory on the CPU for what a stage of a pipeline passes to the next one."""
        raise AssertionError("it has one stage")

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (rows, hidden_size) -> float32 logits (rows, vocab_size).

        Above rank 0 only the rank's own part.
        """
