"""Builds a transformers model without weights, inspects it, and replaces its linear layers and experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import initialization
from transformers.modeling_outputs import MoeModelOutputWithPast

from raylm.checkpoint import Checkpoint
from raylm.models.causal_lm import AttentionSpec
from raylm.models.linear import HEAD
from raylm.models.transformers_backend.inspection import Mask, UnservedError, inspect, is_experts
from raylm.models.transformers_backend.module_replacement import split_experts, stack_linears
from raylm.models.transformers_backend.paged_attention import PAGED, PROBED, CurrentAttention


@dataclass
class Passed(MoeModelOutputWithPast):  # type: ignore[misc]
    """All fields of a decoder's output that a head may read."""

    cross_attentions: tuple[Tensor, ...] | None = None


class Passing(nn.Module):
    """Replaces the decoder, so that the head can be called alone. Returns its input embeddings."""

    @property
    def decoder(self) -> Passing:
        """For modeling code with one more wrapper around the decoder."""
        return self

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> Passed:
        return Passed(last_hidden_state=inputs_embeds)


@dataclass(frozen=True, eq=False)
class Modeling:
    """A transformers model in parts. ``causal`` is the model without its ``decoder``, whose layers call ``attention``.

    ``specs`` describe each layer's attention. ``names`` are the names of its weights in its own code, ``tied`` those of
    copies of other weights.
    """

    causal: Any
    decoder: nn.Module
    attention: CurrentAttention
    specs: dict[nn.Module, AttentionSpec]
    names: frozenset[str]
    tied: frozenset[str]

    def kept_in_float32(self, dtype: torch.dtype) -> frozenset[str]:
        """The weights that must stay in float32 in a model of ``dtype``."""
        plan: dict[str, torch.dtype] = self.causal._get_dtype_plan(dtype)
        return frozenset(name for name in self.names if _named(plan, name))


def build_modeling(checkpoint: Checkpoint, name: str) -> Modeling:
    """Build the class ``name`` for config.json, with weights on the meta device. Raises UnservedError."""
    causal = _build(checkpoint, name)
    names, tied = frozenset(causal.state_dict()), frozenset(causal.all_tied_weights_keys)
    if tied - {f"{HEAD}.weight"} or type(getattr(causal, HEAD, None)) is not nn.Linear:
        raise UnservedError(f"its head is not {HEAD}, or it shares other weights too")
    attention = CurrentAttention(causal)
    try:
        specs, groups = inspect(causal, attention)
    except (LookupError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        if repr(Mask.__name__) in str(error):
            raise UnservedError("it makes or changes attention masks itself") from error
        raise UnservedError(f"its code does not run over single tokens: {error}") from error
    layers = causal.config.num_hidden_layers
    if len(specs) != layers:
        raise UnservedError(f"only {len(specs)} of its {layers} layers have attention")
    if checkpoint.max_position_embeddings is None:
        raise UnservedError("config.json does not say the longest context, max_position_embeddings")
    _replace_modules(causal, groups)
    causal.config._attn_implementation = PAGED
    decoder = getattr(causal, causal.base_model_prefix)
    causal.add_module(causal.base_model_prefix, Passing())
    return Modeling(causal, decoder, attention, specs, names, tied)


def _build(checkpoint: Checkpoint, name: str) -> Any:
    try:
        load = transformers.AutoConfig.from_pretrained
        config = load(checkpoint.path, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = PROBED
        with torch.device("meta"), initialization.no_tie_weights():
            model = getattr(transformers, name)(config).eval()
    except Exception as error:  # transformers raises many kinds
        raise UnservedError(f"transformers {transformers.__version__} cannot build it: {error!r}") from error
    _fill_buffers(model)
    return model


def _fill_buffers(model: Any) -> None:
    """Initialize buffers, such as rotary frequencies. Buffers that are in checkpoints stay zero."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with torch.device("cpu"):
        model.initialize_weights()
    for module in model.modules():
        # Dynamic frequencies depend on the longest sequence of the batch, so they would couple its rows. They only
        # differ from the default beyond Checkpoint.max_position_embeddings, which is not served.
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            module.rope_type = dict.fromkeys(kinds, "default")


def _replace_modules(causal: Any, groups: list[list[str]]) -> None:
    """Insert experts, and one linear layer for each group. Modules that stay in float32 are not replaced."""
    for path, module in list(causal.named_modules()):
        if is_experts(module):
            causal.set_submodule(path, split_experts(module))
    kept = {*causal._keep_in_fp32_modules, *causal._keep_in_fp32_modules_strict}
    for paths in groups:
        if not any(_named(kept, path) for path in paths):
            stack_linears(causal, paths)


def _named(parts: Iterable[str], name: str) -> bool:
    """Whether one of ``parts``, which may be dotted, is in the dotted ``name``."""
    return any(f".{part}." in f".{name}." for part in parts)
