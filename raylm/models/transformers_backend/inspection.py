"""Inspects a transformers model before loading: its attention, and the linear layers that can be stacked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.masking_utils import AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from raylm.models.causal_lm import AttentionSpec
from raylm.models.transformers_backend.paged_attention import PROBED, CurrentAttention

_TOKENS = 3
_FARTHEST = 1 << 18  # positions up to which masks are inspected
# Keywords without effect on paged attention, which has no dropout, own cache, or returned weights.
_WITHOUT_MEANING = {
    "dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "past_key_values", "sliding_window",
}  # fmt: skip


class UnservedError(Exception):
    """The reason why transformers' modeling code cannot be served, as text to follow the model's name."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of a layer: the number of tokens that a query attends to, None for all up to itself."""

    window: int | None


class Recorder(nn.Module):
    """Replaces a linear layer: records its input and returns zeros. ``is_read``: code has read its weight."""

    def __init__(self, linear: nn.Module, seen: list[tuple[Recorder, Tensor]]) -> None:
        super().__init__()
        self.in_features, self.out_features = layer_shape(linear)
        self.has_bias, self.is_read = linear.bias is not None, False
        self._seen = seen

    @property
    def weight(self) -> Tensor:
        """Zeros, for modeling code that multiplies by the weight, or reads its dtype."""
        self.is_read = True
        return torch.zeros(()).expand(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        self._seen.append((self, x))
        return x.new_zeros(*x.shape[:-1], self.out_features)


class IdleExperts(nn.Module):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(x)


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer of torch or GPT-2."""
    rows, columns = layer.get_parameter("weight").shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def is_experts(module: nn.Module) -> bool:
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


class AttentionProbe:
    """Records the attention of each layer, and rejects attention that paged attention cannot compute."""

    def __init__(self) -> None:
        self.specs: dict[nn.Module, AttentionSpec] = {}

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, options: dict[str, Any]
    ) -> Tensor:
        if module in self.specs:
            raise UnservedError("one of its layers attends twice")
        _check_options(options)
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
        if k.shape != v.shape or k.shape[2:] != q.shape[2:] or heads % kv_heads or q.shape[2] != _TOKENS:
            raise UnservedError(
                "its queries, keys and values are not of one length and head size, as in latent attention"
            )
        scale = options.get("scaling")
        scale = float(head_dim**-0.5 if scale is None else scale)
        window, softcap = _window(mask), options.get("softcap")
        self.specs[module] = AttentionSpec(len(self.specs), heads, kv_heads, head_dim, scale, window, softcap)
        return q.transpose(1, 2)


def _check_options(options: dict[str, Any]) -> None:
    if options.get("is_causal") is False:
        raise UnservedError("its attention is not causal")
    known = _WITHOUT_MEANING | {"scaling", "softcap", "is_causal"}
    odd = sorted(name for name, value in options.items() if name not in known and value is not None)
    if odd:
        named = "attention sinks (s_aux)" if "s_aux" in odd else ", ".join(odd)
        raise UnservedError(f"its attention needs {named}")


def _window(mask: object) -> int | None:
    if isinstance(mask, UnservedError):
        raise mask
    if not isinstance(mask, Mask):
        raise UnservedError("its attention does not take the common causal masks")
    return mask.window


def read_mask(
    *, mask_function: Callable[..., Tensor], config: Any, attention_mask: object = None, **_: Any
) -> Mask | UnservedError:
    """transformers' mask interface: finds the tokens that ``mask_function`` lets a query attend to."""
    length = min(int(getattr(config, "max_position_embeddings", None) or 4096), _FARTHEST)
    keys, zero = torch.arange(length), torch.tensor(0)

    def seen(query: int) -> Tensor:
        return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(length)

    count = int(seen(length - 1).sum())
    for query in {0, 1, length // 3, length // 2, count, length - 1}:
        distance = query - keys
        if query < length and not torch.equal(seen(query), (distance >= 0) & (distance < count)):
            return UnservedError("its attention is neither causal nor a sliding window")
    return Mask(None if count == length else count)


AttentionMaskInterface.register(PROBED, read_mask)


def inspect(model: Any, attention: CurrentAttention) -> tuple[dict[nn.Module, AttentionSpec], list[list[str]]]:
    """Run the decoder of ``model`` with three tokens and weights of zeros, with a probe as its attention.

    Parameters must be on the meta device, buffers on the CPU. Returns the spec of each attention module, in the order
    of the layers, and the paths of linear layers that can be replaced, grouped by parent and input.

    Raises:
        UnservedError: paged attention does not support the model.
    """
    seen: list[tuple[Recorder, Tensor]] = []
    replaced = {path: module for path, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)}
    experts = {path: module for path, module in model.named_modules() if is_experts(module)}
    recorders = {Recorder(linear, seen): path for path, linear in replaced.items()}
    for recorder, path in recorders.items():
        model.set_submodule(path, recorder)
    for path in experts:
        model.set_submodule(path, IdleExperts())
    probe = attention.call = AttentionProbe()
    decoder = getattr(model, model.base_model_prefix)
    with torch.device("cpu"):
        zeros = {name: torch.zeros(()).expand(weight.shape) for name, weight in decoder.named_parameters()}
        positions = torch.arange(_TOKENS)[None]
        inputs = {"input_ids": positions.clone(), "position_ids": positions, "use_cache": False}
        functional_call(decoder, zeros, kwargs=inputs)
    attention.call = None
    if not probe.specs:
        raise UnservedError("its layers do not call transformers' attention interface")
    for path, module in (replaced | experts).items():
        model.set_submodule(path, module)
    return probe.specs, list(_groups(seen, recorders))


def _groups(seen: list[tuple[Recorder, Tensor]], recorders: dict[Recorder, str]) -> Iterator[list[str]]:
    """Group successive layers with the same input and parent, all with or all without a bias.

    Others form their own group.
    """
    calls = Counter(recorder for recorder, _ in seen)
    stackable = [(recorder, x) for recorder, x in seen if calls[recorder] == 1 and not recorder.is_read]

    def key(call: tuple[Recorder, Tensor]) -> tuple[int, str, bool]:
        return id(call[1]), recorders[call[0]].rpartition(".")[0], call[0].has_bias

    for _, group in groupby(stackable, key):
        yield [recorders[recorder] for recorder, _ in group]
    alone = recorders.keys() - {recorder for recorder, _ in stackable}
    yield from ([recorders[recorder]] for recorder in recorders if recorder in alone and not recorder.is_read)
