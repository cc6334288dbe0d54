"""DecoderConfig: a validated config.json.

It avoids transformers' classes, whose import takes longer than a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raylm.checkpoint import Checkpoint, shown
from raylm.errors import ConfigError
from raylm.models.config_fields import Fields
from raylm.models.ranks import SINGLE_RANK, Ranks

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_LARGEST_THETA = 1e30  # far above values of real models; its powers are finite in float32
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_FACTORS = "factors"  # of a GGUF file: the frequencies are divided by the list ``factors``


@dataclass(frozen=True, eq=False)
class Rope:
    """Inverse frequencies (head_dim / 2,) in float32, and the factor of cosine and sine (yarn's attention factor)."""

    inv_freq: Tensor
    scaling: float


@dataclass(frozen=True)
class Biases:
    """Which linear layers have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, eq=False)
class DecoderConfig:
    """Configuration of a decoder.

    ``windows`` has the number of tokens that a query of each layer attends to, None for all. If several ``ranks`` share
    the decoder, heads and ``intermediate_size`` are those of this rank; see tensor_parallel.py. ``layers`` are those of
    this stage; see pipeline.py.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    tied: bool
    windows: tuple[int | None, ...]
    rope: Rope
    biases: Biases
    qk_norm: bool
    layers: range
    ranks: Ranks = SINGLE_RANK

    @property
    def vocab(self) -> range:
        """The token ids whose embeddings, and rows of the head, are on this rank."""
        return self.ranks.part(self.vocab_size)


def decoder_config(
    fields: Fields, windows: tuple[int | None, ...], biases: Biases, *, qk_norm: bool = False
) -> DecoderConfig:
    """Read a configuration. The arguments besides ``fields`` depend on the family. Raises ConfigError."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", fallback="num_attention_heads")
    if heads % kv_heads:
        raise fields.error("num_attention_heads", heads, f"a multiple of num_key_value_heads ({kv_heads})")
    head_dim = fields.size("hidden_size") // heads if fields.get("head_dim") is None else fields.size("head_dim")
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "even, for the rotary embedding")
    act = fields.get("hidden_act")
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        raise fields.error("hidden_act", act, f"one of {', '.join(_ACTIVATIONS)}, which are supported")
    return DecoderConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        activation=_ACTIVATIONS[act],
        tied=fields.flag("tie_word_embeddings"),
        windows=windows,
        rope=_rope(fields, head_dim),
        biases=biases,
        qk_norm=qk_norm,
        layers=range(len(windows)),
    )


def layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """The windows of families in which some or no layers have sliding windows."""
    layers = fields.size("num_hidden_layers")
    window = fields.size("sliding_window") if fields.flag("use_sliding_window") else None
    if fields.get("layer_types") is None:
        first = layers if window is None else fields.size("max_window_layers", least=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    return listed_windows(fields, window, "use_sliding_window")


def listed_windows(fields: Fields, window: int | None, switch: str) -> tuple[int | None, ...]:
    """The windows that layer_types lists. Without ``window``, which the entry ``switch`` sets, it may list none."""
    layers, kinds = fields.size("num_hidden_layers"), fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(isinstance(kind, str) for kind in kinds):
        raise fields.error("layer_types", kinds, f"a list of {layers} names")
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", kinds, f"{layers} of full_attention or sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise fields.error(switch, fields.get(switch), "set where layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields, head_dim: int) -> Rope:
    """Read old or new entries. The dynamic type differs only beyond ``max_position_embeddings``, which is refused."""
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise fields.error("rope_parameters", parameters, "an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if (
        not isinstance(kind, str)
        or kind not in (*_ROPE_TYPES, _FACTORS)
        or any(isinstance(value, dict) for value in parameters.values())
    ):
        raise ConfigError(
            f"config.json: the rotary embedding {shown(kind)} is not supported, only {', '.join(_ROPE_TYPES)}."
        )
    if parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError("config.json: a partial_rotary_factor other than 1 is not supported.")
    if kind == "dynamic" and fields.checkpoint.max_position_embeddings is None:
        raise fields.error("max_position_embeddings", None, "given for the dynamic rotary embedding")
    with torch.device("cpu"):  # even if the model is built on the meta device
        if kind not in ("default", _FACTORS):
            return _scaled_rope(kind, fields.checkpoint)
        theta = parameters.get("rope_theta") or fields.get("rope_theta") or 10000.0
        if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta <= _LARGEST_THETA:
            raise fields.error("rope_theta", theta, f"a positive number up to {_LARGEST_THETA:g}")
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(1.0 / (theta**exponents) / _factors(parameters, head_dim), 1.0)


def _factors(parameters: dict[str, Any], head_dim: int) -> Tensor:
    """What frequencies are divided by, (head_dim / 2,) or one for all."""
    if parameters.get("rope_type") != _FACTORS:
        return torch.ones(1)
    factors = parameters.get("factors")
    numbers = isinstance(factors, list) and all(isinstance(one, float) and 0 < one <= _LARGEST_THETA for one in factors)
    if not isinstance(factors, list) or not numbers or len(factors) != head_dim // 2:
        raise ConfigError(f"config.json: the factors of the rotary embedding must be {head_dim // 2} positive numbers.")
    return torch.tensor(factors)


def _scaled_rope(kind: str, checkpoint: Checkpoint) -> Rope:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        hf_config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    except Exception as error:  # transformers raises many kinds
        where = f"config.json of {checkpoint}"
        raise ConfigError(f"{where}: the rotary embedding {kind!r} is incomplete: {error!r}") from error
    return Rope(inv_freq.float(), float(scaling))
