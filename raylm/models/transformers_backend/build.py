"""Builds a model of transformers without weights, inspects it, and puts our linear layers and experts into it."""

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
    """All fields of a decoder's output that some head reads."""

    cross_attentions: tuple[Tensor, ...] | None = None


class Passing(nn.Module):
    """Replaces the decoder, so that the head can be called alone: what is given as embeddings comes out."""

    @property
    def decoder(self) -> Passing:
        """For modeling code whose decoder is wrapped once more."""
        return self

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> Passed:
        return Passed(last_hidden_state=inputs_embeds)


@dataclass(frozen=True, eq=False)
class Modeling:
    """``causal`` holds all but its ``decoder``, whose layers call ``attention``, and need of it what ``specs`` has.

    ``names`` are its weights' as its own code has them, ``tied`` those that are copies of others.
    """

    causal: Any
    decoder: nn.Module
    attention: CurrentAttention
    specs: dict[nn.Module, AttentionSpec]
    names: frozenset[str]
    tied: frozenset[str]

    def kept_in_float32(self, dtype: torch.dtype) -> frozenset[str]:
        """The weights that its authors want in float32 beside others of ``dtype``."""
        plan: dict[str, torch.dtype] = self.causal._get_dtype_plan(dtype)
        return frozenset(name for name in self.names if _named(plan, name))


def build_modeling(checkpoint: Checkpoint, name: str) -> Modeling:
    """What config.json describes as the class ``name``, or UnservedError; weights stay on the meta device."""
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
    """Give buffers their values, such as rotary frequencies; those that a checkpoint holds stay zero."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with torch.device("cpu"):
        model.initialize_weights()
    for module in model.modules():
        # Frequencies that change with the longest sequence would change with the neighbours in its batch; no length is
        # served from which on they would: see Checkpoint.max_position_embeddings.
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            module.rope_type = dict.fromkeys(kinds, "default")


def _replace_modules(causal: Any, groups: list[list[str]]) -> None:
    """Our experts, and our linear layers, one a group; what is kept in float32 stays torch's."""
    for path, module in list(causal.named_modules()):
        if is_experts(module):
            causal.set_submodule(path, split_experts(module))
    kept = {*causal._keep_in_fp32_modules, *causal._keep_in_fp32_modules_strict}
    for paths in groups:
        if not any(_named(kept, path) for path in paths):
            stack_linears(causal, paths)


def _named(parts: Iterable[str], name: str) -> bool:
    """Whether one of ``parts``, which may be dotted, is among those of ``name``."""
    return any(f".{part}." in f".{name}." for part in parts)
